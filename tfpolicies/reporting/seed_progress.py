"""Console output of a training with several seeds: a bar for each, else lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tfpolicies.reporting.progress_display import format_status

_SECONDS_BETWEEN_LINES = 10.0


class SeedProgress:
    """Shows the progress of several seeds: a bar for each in a terminal, else lines.

    A context manager. Lines are printed for the seeds with news, every 10 seconds and when a seed
    ends.

    Args:
        seeds: in the order of display.
        target: mean return at which a seed ends; None if there is none.
        console: where to show it.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        target: float | None,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._console = console
        self._clock = clock
        self._next_line_at = -math.inf
        self._texts: dict[int, str] = {}  # to be printed, by seed
        self._shown: dict[int, str] = {}
        self._progress: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[status]}", markup=False),
                console=console,
                expand=True,
                refresh_per_second=4,
            )
            self._tasks = {
                seed: self._progress.add_task(f"seed {seed}", total=1.0, status="waiting")
                for seed in seeds
            }

    def __enter__(self) -> SeedProgress:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        else:
            self._print_lines()

    def update(self, seed: int, row: Mapping[str, float], total_steps: int | None) -> None:
        """Shows the last iteration of a seed.

        Args:
            seed: which one.
            row: of `progress.csv`; empty before the first iteration.
            total_steps: environment steps at which it ends; None if unknown.
        """
        if not row:
            self.set_status(seed, "starting", None)
            return
        env_steps = int(row.get("env_steps", 0))
        total = "" if total_steps is None else f"/{total_steps:,}"
        mean_return = row.get("recent_returns/mean", row.get("episode_reward_mean", math.nan))
        speed = row.get("steps_per_s", math.nan)
        status = format_status(env_steps, mean_return, speed, total_steps, self._target)
        share = min(1.0, env_steps / total_steps) if total_steps else 0.0
        self.set_status(seed, f"{env_steps:,}{total} | {status}", share)

    def finish(self, seed: int, status: str) -> None:
        """Shows that a seed has ended, and why."""
        self.set_status(seed, status, 1.0)
        if self._progress is None:
            self._print_lines()

    def set_status(self, seed: int, status: str, share: float | None) -> None:
        if self._progress is not None:
            self._progress.update(self._tasks[seed], status=status, completed=share)
            return
        if self._shown.get(seed) != status:
            self._texts[seed] = self._shown[seed] = status
        if self._clock() >= self._next_line_at:
            self._print_lines()

    def _print_lines(self) -> None:
        for seed, text in self._texts.items():
            line = f"seed {seed} | {text}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._texts.clear()
        self._next_line_at = self._clock() + _SECONDS_BETWEEN_LINES
