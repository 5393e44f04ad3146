"""Console output of commands: a progress bar and a summary table."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from tfpolicies.errors import UsageError
from tfpolicies.reporting.notebook import NotebookBar

_SECONDS_BETWEEN_LINES = 10.0
_REFRESHES_PER_SECOND = 4


class CommandConsole(Console):
    """A console that raises `BrokenPipeError` when its output pipe is closed."""

    def on_broken_pipe(self) -> None:
        """Raises the error; Rich would end the process."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class TrainingProgress:
    """Shows the progress of a training run: a bar in a terminal or a notebook.

    Elsewhere it prints a line per 10 seconds.

    A context manager; outside of it `update` shows nothing. The bar shows the progress from the
    lowest mean return so far to `target`; without a target, the share of `total_steps`. Time left
    is the time to `total_steps` at the current speed; with a target it is at most that.

    Args:
        total_steps: environment steps at which training ends, >= 1; None if unknown.
        target: mean return at which training ends; None if there is none.
        console: where to show it; standard output if None.
        unit: of the steps, for display.
        clock: a monotonic clock in seconds.

    Raises:
        UsageError: if `total_steps` is below 1.
    """

    def __init__(
        self,
        total_steps: int | None,
        target: float | None,
        console: Console | None = None,
        *,
        unit: str = "steps",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total_steps is not None and total_steps < 1:
            raise UsageError(f"`total_steps` must be at least 1 or None, got {total_steps!r}.")
        self._total_steps = total_steps
        self._target = target
        self._unit = unit
        self._console = console or Console()
        self._clock = clock
        self._progress: Progress | None = None  # in a terminal
        self._notebook_bar: NotebookBar | None = None
        self._pending_line: str | None = None
        self._next_line_at = -math.inf
        self._is_active = False
        self._min_return = math.inf  # mean return so far
        self._share = 0.0  # of the progress

    def __enter__(self) -> TrainingProgress:
        self._is_active = True
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._progress = _make_progress_bar(self._console)
            has_goal = self._total_steps is not None or self._target is not None
            self._task = self._progress.add_task(
                "training", total=1.0 if has_goal else None, status="in the first iteration"
            )
            self._progress.start()
        elif self._console.is_jupyter and not self._console.quiet:
            self._notebook_bar = NotebookBar()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_active = False
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._print_line()
        self._notebook_bar = None

    def update(
        self,
        env_steps: int,
        mean_return: float,
        steps_per_s: float,
        details: str | None = None,
    ) -> None:
        """Shows the state of the run.

        Args:
            env_steps: environment steps so far, including those before a resume.
            mean_return: mean return of recent episodes; NaN before the first has ended.
            steps_per_s: current environment steps per second.
            details: shown in place of the mean return.
        """
        if not self._is_active:
            return
        total = "" if self._total_steps is None else f"/{self._total_steps:,}"
        steps = f"{env_steps:,}{total} {self._unit}"
        status = format_status(
            env_steps, mean_return, steps_per_s, self._total_steps, self._target, details
        )
        self._share = self._compute_progress(env_steps, mean_return)
        if self._progress is not None:
            self._progress.update(self._task, completed=self._share, status=f"{steps} | {status}")
            return
        self._pending_line = f"{steps} | {status}"
        if self._clock() >= self._next_line_at:
            self._print_line()

    @contextlib.contextmanager
    def show_activity(self, activity: str) -> Iterator[None]:
        """While entered, the bar shows an activity other than training."""
        if self._progress is None:
            yield
            return
        (task,) = self._progress.tasks
        status = task.fields["status"]
        self._progress.update(self._task, status=f"{status} | {activity}", refresh=True)
        try:
            yield
        finally:
            self._progress.update(self._task, status=status)

    def _compute_progress(self, env_steps: int, mean_return: float) -> float:
        """Returns the progress to the target, or else to the last step, in [0, 1]."""
        if self._target is None:
            return min(1.0, env_steps / self._total_steps if self._total_steps else 0.0)
        if not math.isfinite(mean_return):
            return 0.0
        self._min_return = min(self._min_return, mean_return)
        distance = self._target - self._min_return
        return min(1.0, (mean_return - self._min_return) / distance if distance > 0 else 1.0)

    def _print_line(self) -> None:
        line, seconds = self._pending_line, _SECONDS_BETWEEN_LINES
        if line is None:
            return
        if self._notebook_bar is not None:
            has_goal = self._total_steps is not None or self._target is not None
            self._notebook_bar.show(self._share if has_goal else None, line)
            seconds = 1 / _REFRESHES_PER_SECOND
        else:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._next_line_at = self._clock() + seconds
        self._pending_line = None


def make_summary_table(title: str, entries: Mapping[str, object]) -> Group:
    """Returns a title above a table of names and values, for `Console.print`.

    Long values such as paths are folded, not truncated. Floats have up to six digits.

    >>> from rich.console import Console
    >>> Console(width=40).print(make_summary_table("Done", {"steps": 61440, "mean return": 481.25}))
    Done
    steps        61,440
    mean return  481.25
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in entries.items():
        table.add_row(Text(name), Text(_format_value(value)))
    return Group(Text(title, style="bold"), table)


def format_count(number: int, noun: str) -> str:
    """Formats a count with its noun.

    >>> format_count(1, "episode"), format_count(2_000, "step")
    ('1 episode', '2,000 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _format_value(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _make_progress_bar(console: Console) -> Progress:
    columns = BarColumn(bar_width=None), TextColumn("{task.fields[status]}", markup=False)
    rate = _REFRESHES_PER_SECOND
    return Progress(*columns, console=console, expand=True, refresh_per_second=rate)


def format_status(
    env_steps: int,
    mean_return: float,
    steps_per_s: float,
    total: int | None,
    target: float | None,
    details: str | None = None,
) -> str:
    """Formats speed, mean return and time left, as far as known.

    >>> format_status(2_000, 21.2, 1_000.0, 10_000, 475.0)
    '1,000/s | return 21.2 of 475 | at most 0:08 left'
    >>> format_status(2_000, float("nan"), float("nan"), None, None)
    'no episode has ended yet'
    """
    has_speed = math.isfinite(steps_per_s) and steps_per_s > 0
    parts = [f"{steps_per_s:,.0f}/s"] if has_speed else []
    target_text = "" if target is None else f" of {target:,.6g}"
    has_return = math.isfinite(mean_return)
    if details is not None:
        parts += [details]
    else:
        parts += [
            f"return {mean_return:,.4g}{target_text}" if has_return else "no episode has ended yet"
        ]
    if has_speed and total is not None:
        limit = "" if target is None else "at most "
        parts += [f"{limit}{_format_clock_time(max(0, total - env_steps) / steps_per_s)} left"]
    return " | ".join(parts)


def _format_clock_time(seconds: float) -> str:
    """Formats seconds as `m:ss` or `h:mm:ss`.

    >>> _format_clock_time(8), _format_clock_time(3725)
    ('0:08', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
