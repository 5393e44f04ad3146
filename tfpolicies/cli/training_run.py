"""The loop around an `Algorithm`: train, show, checkpoint, resume, keep the best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfpolicies.cli.settings import TrainSettings
from tfpolicies.cli.signals import current
from tfpolicies.reporting.console import TrainingProgress
from tfpolicies.reporting.learning_curve import draw_learning_curve
from tfpolicies.reporting.progress_csv import ProgressCsv, read_progress
from tfpolicies.reporting.progress_row import EVALUATION_MEAN, progress_row
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.reporting.tensorboard_events import EventWriter, event_scalars

if TYPE_CHECKING:
    from rich.console import Console

    from tfpolicies.algorithms.algorithm import Algorithm
    from tfpolicies.algorithms.checkpoints import AlgorithmRecord
    from tfpolicies.config.algorithm_config import AlgorithmConfig

TARGET, STEPS = "target", "steps"  # why a training ends by itself

_SECONDS_BETWEEN_CURVES = 15.0
_QUICK = 0.02  # seconds that a record may take to be made in each iteration
_SHARE_OF_RECORDS = 0.05  # of the time that training takes, at most, for records that take longer
_SPEED_MEMORY = 0.9  # of the shown speed, an exponential mean over iterations


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        env_steps: environment steps so far.
        mean_return: of the last 100 training episodes; NaN before the first has ended.
        time_s: seconds of training so far, over all sessions.
    """

    env_steps: int = 0
    mean_return: float = math.nan
    time_s: float = 0.0

    @property
    def steps_per_s(self) -> float:
        """Environment steps per second of training."""
        return self.env_steps / self.time_s if self.time_s else math.nan


class TrainingRun:
    """One training run in its folder; a context manager that closes what it opened.

    Args:
        run: the folder, held by this process.
        settings: what was asked for.
        algorithm: as `restore_or_build` gives it; closing it is the caller's.
        console: where progress is shown.
    """

    def __init__(
        self, run: RunFolder, settings: TrainSettings, algorithm: Algorithm, console: Console
    ) -> None:
        self.run = run
        self.settings = settings
        self.console = console
        self.algorithm = algorithm
        steps = self.algorithm.counters["num_env_steps_sampled"]
        config = self.algorithm.config
        evaluates_behind = _evaluates(config) and not config.evaluation_parallel_to_training
        self._scores_samples = settings.keep_best and not evaluates_behind
        self._best = best_score(run, config)
        self._csv = ProgressCsv(run.progress_csv)
        self._csv.drop_after(self.algorithm.iteration)
        self._events = EventWriter(run.events, resume_step=steps)
        self.progress = _last_progress(run, steps)
        self._curve_drawn_at = time.monotonic()
        self._speed = math.nan
        self._saved = algorithm.iteration  # that the newest checkpoint is of
        self._record: AlgorithmRecord | None = None
        self._recorded = algorithm.iteration  # that the record is of
        self._record_due_at = -math.inf

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._events.close()

    def train(self, rescue: Callable[[str], None], *, at_least_steps: int = 0) -> str:
        """Trains until the target or the last step, and writes a checkpoint at the end.

        Args:
            rescue: see `Signals.held_back`.
            at_least_steps: the target does not count before so many further environment steps.

        Returns:
            `TARGET` or `STEPS`.

        Raises:
            SignalEnd: if a signal ended it; the iteration that ran then has ended, if it could.
            BaseException: what the environment, say, raised. `rescue` of this run has not been
                called then.
        """
        settings = self.settings
        earliest = self.progress.env_steps + at_least_steps
        shown = TrainingProgress(settings.steps, settings.until, self.console)
        with current().held_back(rescue) as signals, shown:
            self._keep_record()
            while self.progress.env_steps < settings.steps and signals.requested is None:
                sampled_with = self._states() if self._scores_samples else {}
                result = self.algorithm.train()
                self._take_down(result, sampled_with)
                self._keep_record()
                shown.update(self.progress.env_steps, self.progress.mean_return, self._speed)
                if self._has_reached_target(result) and self.progress.env_steps >= earliest:
                    return self._finish(TARGET)
                if self.algorithm.iteration % settings.checkpoint_every == 0:
                    self.save()
            return self._finish(STEPS)

    def save(self) -> None:
        """Replaces the run's checkpoint, atomically."""
        with current().unhurried():
            self.algorithm.save(self.run.latest)
        self._saved = self.algorithm.iteration

    def rescue(self) -> None:
        """Saves the state after the last whole iteration, unless the newest checkpoint has it.

        What an iteration that did not end has changed in the algorithm does not count. This may be
        called while another thread trains.

        Raises:
            CheckpointError: if it cannot be written.
        """
        if self._record is not None and self._recorded > self._saved:
            self._record.write(self.run.latest)
            self._saved = self._recorded

    def _keep_record(self) -> None:
        """Keeps a copy of what a checkpoint would hold now, for `rescue`.

        Where copying takes long, as with large models or stored replay buffers, it is not done in
        each iteration.
        """
        from tfpolicies.algorithms.checkpoints import record_of

        if time.monotonic() < self._record_due_at:
            return
        began = time.thread_time()
        self._record, self._recorded = record_of(self.algorithm), self.algorithm.iteration
        took = time.thread_time() - began
        if took > _QUICK:
            self._record_due_at = time.monotonic() + took / _SHARE_OF_RECORDS

    def _finish(self, reason: str) -> str:
        self.save()
        self._draw_curve()
        return reason

    def _states(self) -> dict[str, dict[str, Any]]:
        """Returns the states of the policies that are trained, by id."""
        worker = self.algorithm.worker
        return {pid: worker.policy_map[pid].get_state() for pid in worker.get_policies_to_train()}

    def _take_down(self, result: dict[str, Any], sampled_with: Mapping[str, Any]) -> None:
        row = progress_row(result)
        if self.settings.keep_best:
            self._keep_best(row, sampled_with)
        self._csv.append(row)
        self._events.write_scalars(int(row["env_steps"]), event_scalars(row))
        self.progress = _progress_of(row)
        speed = row["steps_per_s"]
        if math.isfinite(self._speed):
            speed = _SPEED_MEMORY * self._speed + (1 - _SPEED_MEMORY) * speed
        self._speed = speed
        if time.monotonic() - self._curve_drawn_at > _SECONDS_BETWEEN_CURVES:
            self._draw_curve()

    def _keep_best(self, row: dict[str, float], sampled_with: Mapping[str, Any]) -> None:
        """Writes the best checkpoint anew if an iteration has the best score so far.

        It has the weights that earned the score: the present ones where they were evaluated behind
        the update, else those from before it. Weights that are not finite are never the best.

        Args:
            row: of the iteration.
            sampled_with: the states of its policies when it began.
        """
        from tfpolicies.policy.checkpoints import is_finite_state

        score = _score(row, self.algorithm.config)
        if not score > self._best:  # NaN is never best
            return
        states = sampled_with if self._scores_samples else self._states()
        if all(map(is_finite_state, states.values())):
            with current().unhurried():
                self.algorithm.save(self.run.best, policy_states=states)
            self._best = score

    def _has_reached_target(self, result: dict[str, Any]) -> bool:
        """Whether as many episodes as the mean is meant for have ended, and it is high enough."""
        until, wanted = self.settings.until, self.algorithm.config
        episodes = len(result["hist_stats"]["episode_reward"])
        if until is None or episodes < wanted.metrics_num_episodes_for_smoothing:
            return False
        return result["episode_reward_mean"] >= until

    def _draw_curve(self) -> None:
        draw_learning_curve(
            read_progress(self.run.progress_csv),
            self.run.learning_curve,
            title=self.settings.title,
            target=self.settings.until,
        )
        self._curve_drawn_at = time.monotonic()


def restore_or_build(run: RunFolder | None, settings: TrainSettings) -> Algorithm:
    """Returns the algorithm from the run's newest checkpoint, or a new one if there is none yet.

    Raises:
        ConfigError: for settings that contradict each other.
        EnvError: for an unknown environment.
        CheckpointError: if the checkpoint is damaged.
    """
    from tfpolicies.algorithms.algorithm import Algorithm

    if run is not None and run.has_checkpoint:
        return Algorithm.from_checkpoint(
            run.latest,
            config={"env": settings.env},
            allow_other_spaces=settings.allow_other_spaces,
            allow_non_finite=settings.config().on_nan == "warn",
        )
    algorithm: Algorithm = settings.config().build()
    return algorithm


def best_score(run: RunFolder, config: AlgorithmConfig) -> float:
    """Returns the score of the best checkpoint so far, -inf if there is none.

    It is read from the run's CSV, so that a resumed run goes on comparing: evaluations if the run
    evaluates, else the mean return of training episodes. Other rows may be higher without having
    been the best, where their weights were not finite.
    """
    from tfpolicies.policy.checkpoints import ALGORITHM_MANIFEST
    from tfpolicies.storage.checkpoint import read_manifest

    if not run.best.exists() or not run.progress_csv.exists():
        return -math.inf
    manifest = read_manifest(run.best, ALGORITHM_MANIFEST, kind="Algorithm")
    rows = read_progress(run.progress_csv)
    own = [row for row in rows if row["iteration"] == manifest["progress"]["iteration"]]
    scores = [_score(row, config) for row in own or rows]
    return max((score for score in scores if not math.isnan(score)), default=-math.inf)


def _evaluates(config: AlgorithmConfig) -> bool:
    return config.evaluation_interval is not None


def _score(row: dict[str, float], config: AlgorithmConfig) -> float:
    return row.get(EVALUATION_MEAN if _evaluates(config) else "episode_reward_mean", math.nan)


def _last_progress(run: RunFolder, env_steps: int) -> Progress:
    rows = read_progress(run.progress_csv) if env_steps else []
    return _progress_of(rows[-1]) if rows else Progress(env_steps)


def _progress_of(row: dict[str, float]) -> Progress:
    return Progress(int(row["env_steps"]), row["episode_reward_mean"], row["time_s"])
