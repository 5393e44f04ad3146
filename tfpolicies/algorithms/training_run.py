"""The loop around an `Algorithm`: train until a goal is reached, show how far it is, keep it."""

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

TARGET, STEPS, CALLBACK = "target", "steps", "callback"  # why a training ends by itself

_MEAN = f"{RECENT}mean"  # which callbacks may take out of a row
_SPEED_MEMORY = 0.9  # of the shown speed, an exponential mean over iterations


class TrainingRun:
    """The training of one algorithm, by a command or by `Algorithm.learn`.

    Args:
        algorithm: what is trained; closing it is the caller's.
        goals: when training ends, and what is kept.
        records: where that is kept; closing them is the caller's.
        console: where progress is shown; None: nowhere.
        followers: called with the algorithm and the result after each iteration; training ends
            where one of them returns False.

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
        """Environment steps so far, those of earlier sessions included."""
        return int(self.algorithm.counters["num_env_steps_sampled"])

    def train(self, rescue: Callable[[str], None], *, at_least_steps: int = 0) -> str:
        """Trains until the target or the last step, and writes a checkpoint at the end.

        Args:
            rescue: see `Signals.held_back`.
            at_least_steps: the target does not count before so many further environment steps.

        Returns:
            `TARGET`, `STEPS` or `CALLBACK`.

        Raises:
            KeyboardInterrupt: if a signal ended it, as a `SignalEnd` where `Signals` are entered;
                the iteration that ran then has ended, if it could.
            BaseException: what the environment, say, raised. What `rescue` of the records saves
                has not been saved then.
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
        """Trains one iteration and takes it down; whether no follower wants it to be the last."""
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
            logger.warning("Nothing was learned: %s", short)
        return reason

    def _warn_if_too_short(self) -> None:
        """Says it before a run begins; several agents may give a row each in a step."""
        config = self.algorithm.config
        short = too_short(config, self.goals.steps)
        if short is not None and not (self.env_steps or config.is_multi_agent()):
            logger.warning("There will be no update, or hardly one: %s", short)
