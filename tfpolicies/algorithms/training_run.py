"""The loop around `Algorithm.train`: runs until a stop criterion, shows progress, saves results."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tfpolicies.algorithms.diagnosis import too_short
from tfpolicies.algorithms.run_records import Goals, NoRecords, RunRecords, get_recent_return
from tfpolicies.reporting.console import TrainingProgress
from tfpolicies.reporting.progress_row import RECENT, progress_row
from tfpolicies.system.signals import interruptions

if TYPE_CHECKING:
    from tfpolicies.algorithms.host import HostAlgorithm

logger = logging.getLogger("tfpolicies")

TARGET, STEPS, CALLBACK = "target", "steps", "callback"  # reasons why training ended

_MEAN = f"{RECENT}mean"  # callbacks may remove it from a row
_SPEED_MEMORY = 0.9  # weight of the previous speed in the exponential mean over iterations


class TrainingRun:
    """Trains one algorithm, for a command or for `Algorithm.learn`.

    Args:
        algorithm: the algorithm to train; the caller closes it.
        options: stop criteria and saving options.
        run_logger: writes the run folder; the caller closes it.
        console: shows progress; None for no output.
        callbacks: called with the algorithm and the result after each iteration; training ends if
            one of them returns False.

    Attributes:
        result: of the last iteration; empty before the first.
    """

    def __init__(
        self,
        algorithm: HostAlgorithm,
        goals: Goals,
        records: RunRecords | NoRecords,
        console: Console | None = None,
        followers: Sequence[Callable[[Any, dict[str, Any]], Any]] = (),
    ) -> None:
        self.algorithm = algorithm
        self.goals = goals
        self.records = records
        self.result: dict[str, Any] = {}
        self._console = console or Console(quiet=True, force_terminal=False)
        self._followers = followers
        self._row: dict[str, float] = {}  # of the last iteration
        self._speed = math.nan
        self._began_at = self.env_steps
        self._has_learned = False

    @property
    def env_steps(self) -> int:
        """Environment steps so far, including those before a restore."""
        return int(self.algorithm.counters["num_env_steps_sampled"])

    def train(self, rescue: Callable[[str], None], *, at_least_steps: int = 0) -> str:
        """Trains until the target or the last step, and writes a checkpoint at the end.

        Args:
            emergency_save: saves the state when a signal ends the process; see `Signals.held_back`.
            min_new_steps: environment steps to train before the target is checked.

        Returns:
            `TARGET`, `STEPS` or `CALLBACK`.

        Raises:
            KeyboardInterrupt: if a signal ended it, as a `SignalEnd` within `Signals`; the running
                iteration has ended if it could.
            BaseException: any error of, for example, the environment. The caller must then call
                `emergency_save` of the records.
        """
        results = self.algorithm._results
        results.ends_at = self.goals.steps
        try:
            return self._train(rescue, self.env_steps + at_least_steps)
        finally:
            results.ends_at = math.inf

    def _train(self, rescue: Callable[[str], None], earliest: int) -> str:
        self._warn_if_too_short()
        until = self.goals.until
        shown = TrainingProgress(int(self.goals.steps), self.goals.until, self._console)
        with interruptions().held_back(rescue) as signals, shown:
            self.records.keep()
            while self.env_steps < self.goals.steps and signals.requested is None:
                wanted = self._iterate()
                shown.update(self.env_steps, self._row.get(_MEAN, math.nan), self._speed)
                if self.records.is_video_due:
                    with shown.doing("recording a video"):
                        self.records.film()
                score = get_recent_return(self._row, self.algorithm.config)
                if until is not None and self.env_steps >= earliest and score >= until:
                    return self._finish(TARGET)
                if not wanted:
                    return self._finish(CALLBACK)
                if self.algorithm.iteration % self.goals.checkpoint_every == 0:
                    self.records.save()
            return self._finish(STEPS)

    def _iterate(self) -> bool:
        """Trains and records one iteration; returns whether training continues."""
        self.records.before_iteration()
        self.result = self.algorithm.train()
        self._has_learned |= bool(self.result["info"]["learner"])
        row = self._row = progress_row(self.result)
        self.records.take_down(row)
        speed = row["steps_per_s"]
        if math.isfinite(self._speed):
            speed = _SPEED_MEMORY * self._speed + (1 - _SPEED_MEMORY) * speed
        self._speed = speed
        self.records.keep()
        answers = [follower(self.algorithm, self.result) for follower in self._followers]
        return not any(answer is False for answer in answers)

    def _finish(self, reason: str) -> str:
        self.records.finish()
        short = too_short(self.algorithm.config, self.env_steps - self._began_at)
        if short is not None and self.result and not self._has_learned:
            logger.warning("No update was done: %s", short)
        return reason

    def _warn_if_too_short(self) -> None:
        """Warns before a run starts; not with several agents, whose steps may give several rows."""
        config = self.algorithm.config
        short = too_short(config, self.goals.steps)
        if short is not None and not (self.env_steps or config.is_multi_agent()):
            logger.warning("There will be no or hardly any updates: %s", short)
