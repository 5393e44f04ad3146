"""The loop around `Algorithm.train`: runs until a stop criterion, shows progress, saves results."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tfpolicies.algorithms.health_checks import describe_too_short
from tfpolicies.algorithms.run_logger import (
    NullRunLogger,
    RunLogger,
    TrainingOptions,
    get_recent_return,
    is_score_constant,
)
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.reporting.progress_display import TrainingProgress
from tfpolicies.reporting.progress_row import (
    EVALUATION_MEAN,
    RECENT_PREFIX,
    find_loss,
    find_policies_with_returns,
    has_constant_sum,
    make_progress_row,
)
from tfpolicies.reporting.run_folder import ENDED_BY_CALLBACK, ENDED_BY_STEPS, ENDED_BY_TARGET
from tfpolicies.system.signal_handling import get_interrupt_handler

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol

logger = logging.getLogger("tfpolicies")

ENDED_BY_SIGNAL, ENDED_BY_ERROR = "signal", "error"
"""Further reasons why training ended, for callbacks."""

_RECENT_MEAN = f"{RECENT_PREFIX}mean"  # callbacks may remove it from a row
_MEAN_Q = "learner/default_policy/mean_q"
_MAX_MEANS = 8  # of policies in a warning
_SPEED_SMOOTHING = 0.9  # weight of the previous speed in the exponential mean over iterations


class RunEnd:
    """The reason why a run ended, for `on_run_end` of callbacks."""

    reason = ENDED_BY_ERROR

    def set_error(self, error: BaseException) -> None:
        is_signal = isinstance(error, KeyboardInterrupt)
        self.reason = ENDED_BY_SIGNAL if is_signal else ENDED_BY_ERROR


@contextlib.contextmanager
def notify_callbacks(algorithm: AlgorithmProtocol, run_dir: Path | None) -> Iterator[RunEnd]:
    """Calls `on_run_start` of the algorithm's callbacks, and in the end `on_run_end`.

    The block sets the reason of the result; an error that leaves it is one.
    """
    callbacks, end = algorithm.callbacks, RunEnd()
    callbacks.on_run_start(algorithm=algorithm, run_dir=run_dir)
    try:
        yield end
    except BaseException as error:
        end.set_error(error)
        raise
    finally:
        with get_interrupt_handler().allow_unlimited_time():
            callbacks.on_run_end(algorithm=algorithm, run_dir=run_dir, ended_by=end.reason)


class TrainingLoop:
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
        algorithm: AlgorithmProtocol,
        options: TrainingOptions,
        run_logger: RunLogger | NullRunLogger,
        console: Console | None = None,
        callbacks: Sequence[Callable[[Any, dict[str, Any]], Any]] = (),
    ) -> None:
        self.algorithm = algorithm
        self.options = options
        self.run_logger = run_logger
        self.result: dict[str, Any] = {}
        self._console = console or Console(quiet=True, force_terminal=False)
        self._callbacks = callbacks
        self._row: dict[str, float] = {}  # of the last iteration
        self._speed = math.nan
        self._env_steps_at_start = self.env_steps
        self._has_learned = False
        self._warned_criteria: set[str] = set()
        self._reads_data = not needs_environment(algorithm.config.input_)
        self._evaluation_mean = math.nan  # of the last evaluation

    @property
    def env_steps(self) -> int:
        """Environment steps so far, including those before a restore."""
        return int(self.algorithm.counters["num_env_steps_sampled"])

    def train(self, emergency_save: Callable[[str], None], *, min_new_steps: int = 0) -> str:
        """Trains until the target or the last step, and writes a checkpoint at the end.

        Args:
            emergency_save: saves the state when a signal ends the process; see
                `ShutdownHandler.defer`.
            min_new_steps: environment steps to train before the target is checked.

        Returns:
            `ENDED_BY_TARGET`, `ENDED_BY_STEPS` or `ENDED_BY_CALLBACK`.

        Raises:
            KeyboardInterrupt: if a signal ended it, as a `SignalInterrupt` within
                `ShutdownHandler`; the running iteration has ended if it could.
            BaseException: any error of, for example, the environment. The caller must then call
                `emergency_save` of the records.
        """
        results = self.algorithm._metrics
        results.max_env_steps = self.options.steps
        try:
            return self._train(emergency_save, self.env_steps + min_new_steps)
        finally:
            results.max_env_steps = math.inf

    def _train(self, emergency_save: Callable[[str], None], min_env_steps: int) -> str:
        self._warn_if_too_short()
        until = self.options.until
        progress_bar = TrainingProgress(
            int(self.options.steps),
            self.options.until,
            self._console,
            unit="rows" if self._reads_data else "steps",
        )
        with get_interrupt_handler().defer(emergency_save) as signals, progress_bar:
            self.run_logger.snapshot()
            while self.env_steps < self.options.steps and signals.requested is None:
                should_continue = self._iterate()
                score = get_recent_return(self._row, self.algorithm.config)
                self._warn_if_sum_is_constant(score)
                if self._reads_data:
                    details = self._describe_learning()
                    progress_bar.update(self.env_steps, score, self._speed, details)
                else:
                    recent_mean = self._row.get(_RECENT_MEAN, math.nan)
                    progress_bar.update(self.env_steps, recent_mean, self._speed)
                if self.run_logger.is_video_due:
                    with progress_bar.show_activity("recording a video"):
                        self.run_logger.record_video()
                if until is not None and self.env_steps >= min_env_steps and score >= until:
                    return self._finish(ENDED_BY_TARGET)
                if not should_continue:
                    return self._finish(ENDED_BY_CALLBACK)
                if self.algorithm.iteration % self.options.checkpoint_every == 0:
                    self.run_logger.save()
            return self._finish(ENDED_BY_STEPS, is_interrupted=signals.requested is not None)

    def _iterate(self) -> bool:
        """Trains and records one iteration; returns whether training continues."""
        callbacks = self.algorithm.callbacks
        callbacks.on_iteration_start(algorithm=self.algorithm)
        self.run_logger.before_iteration()
        self.result = self.algorithm.train()
        self._has_learned |= bool(self.result["info"]["learner"])
        row = self._row = make_progress_row(self.result)
        self.run_logger.log_row(row)
        speed = row["steps_per_s"]
        if math.isfinite(self._speed):
            speed = _SPEED_SMOOTHING * self._speed + (1 - _SPEED_SMOOTHING) * speed
        self._speed = speed
        self.run_logger.snapshot()
        try:
            return_values = [callbacks.on_iteration_end(algorithm=self.algorithm, row=dict(row))]
            return_values += [callback(self.algorithm, self.result) for callback in self._callbacks]
        except Exception:
            self.run_logger.snapshot(is_last=True)
            raise
        return not any(value is False for value in return_values)

    def _warn_if_sum_is_constant(self, score: float) -> None:
        """Warns once if a criterion compares mean returns that cannot change.

        Args:
            score: the mean return of recent episodes.
        """
        row, until = self._row, self.options.until
        names = {"keep_best": self.options.keep_best, "until": until is not None}
        is_done = self._warned_criteria.issuperset(x for x, is_set in names.items() if is_set)
        if is_done or math.isnan(score):
            return
        if not has_constant_sum({name: [value] for name, value in row.items()}):
            return
        texts = {}
        if self.options.keep_best and is_score_constant(row, self.algorithm.config):
            texts["keep_best"] = (
                "keep_best has no best checkpoint and keeps the first one: evaluate the policy "
                "that you mean in a custom_evaluation_function (its episode_reward_mean counts), "
                "or save the best in a callback."
            )
        if until is not None and score < until:
            texts["until"] = (
                f"until={until:g} cannot be reached: evaluate the policy that you mean in a "
                "callback, and return False to end the training."
            )
        if not self._warned_criteria.issuperset(texts):
            self._warned_criteria.update(texts)
            means = [
                f"{pid!r} {row[f'policy/{pid}/return_mean']:.4g}"
                for pid in find_policies_with_returns(row)
            ]
            logger.warning(
                "All recent episodes have the same total return, %.4g, whatever the policies learn "
                "(mean returns: %s). %s",
                score,
                ", ".join(means[:_MAX_MEANS]) + (", ..." if len(means) > _MAX_MEANS else ""),
                " ".join(texts.values()),
            )

    def _describe_learning(self) -> str:
        """Describes the progress of a run that reads recorded experience."""
        rows, parts = self.options.data_rows, []
        if rows:
            parts.append(f"epoch {self.env_steps / rows:.1f} of {self.options.steps / rows:.1f}")
        loss = find_loss(self._row)
        if math.isfinite(loss):
            parts.append(f"loss {loss:.4g}")
        elif math.isfinite(mean_q := self._row.get(_MEAN_Q, math.nan)):
            parts.append(f"mean Q {mean_q:.4g}")
        mean = self._row.get(EVALUATION_MEAN, math.nan)
        self._evaluation_mean = mean if math.isfinite(mean) else self._evaluation_mean
        if math.isfinite(self._evaluation_mean):
            target = "" if self.options.until is None else f" of {self.options.until:,.6g}"
            parts.append(f"evaluation {self._evaluation_mean:,.4g}{target}")
        return " | ".join(parts) or "no update yet"

    def _finish(self, reason: str, *, is_interrupted: bool = False) -> str:
        if not is_interrupted:
            self.algorithm.callbacks.on_training_end(algorithm=self.algorithm, ended_by=reason)
        self.run_logger.finish()
        reason_for_no_update = describe_too_short(
            self.algorithm.config, self.env_steps - self._env_steps_at_start
        )
        if reason_for_no_update is not None and self.result and not self._has_learned:
            logger.warning("No update was done: %s", reason_for_no_update)
        return reason

    def _warn_if_too_short(self) -> None:
        """Warns before a run starts; not with several agents, whose steps may give several rows."""
        config = self.algorithm.config
        reason_for_no_update = describe_too_short(config, self.options.steps)
        if reason_for_no_update is not None and not (self.env_steps or config.is_multi_agent()):
            logger.warning("There will be no or hardly any updates: %s", reason_for_no_update)
