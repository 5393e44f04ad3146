"""Writes the run folder of a training: CSV rows, events, learning curve and checkpoints.

`RunLogger` and `NullRunLogger`, which writes nothing, have the same methods; `TrainingLoop` calls
them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfpolicies.config.run_sections import needs_environment
from tfpolicies.reporting.learning_curve import draw_learning_curve
from tfpolicies.reporting.progress_csv import ProgressCsv, read_progress
from tfpolicies.reporting.progress_display import format_count
from tfpolicies.reporting.progress_row import EVALUATION_MEAN, RECENT_PREFIX
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.reporting.tensorboard_events import EventWriter, get_event_scalars
from tfpolicies.reporting.video import make_preview
from tfpolicies.rollout.episode_summaries import MIN_RECENT_EPISODES
from tfpolicies.system.machine_info import get_machine, get_versions
from tfpolicies.system.signal_handling import get_interrupt_handler

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm_checkpoints import AlgorithmSnapshot
    from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol
    from tfpolicies.config.algorithm_config import AlgorithmConfig

logger = logging.getLogger("tfpolicies")

_STEPS_COUNTER = "num_env_steps_sampled"
_VIDEO_SEEDS = (0,)  # seeds of the episodes of a video; the same in each, for comparison
_SECONDS_BETWEEN_CURVES = 15.0
_FAST_SNAPSHOT_SECONDS = 0.02  # seconds up to which a snapshot is made in every iteration
_MAX_HISTOGRAM_TIME_SHARE = 0.01  # maximum share of training time
_MAX_SNAPSHOT_TIME_SHARE = 0.05  # maximum share of training time for slower snapshots


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Stop criteria and saving options of a training.

    Attributes:
        steps: environment steps at which it ends, including those before a restore.
        until: mean return of recent training episodes at which it ends; None: none.
        checkpoint_every: iterations between checkpoints.
        keep_checkpoints: how many of the newest are kept, `latest` among them.
        keep_best: whether the best checkpoint is also kept.
        title: algorithm and environment, for the learning curve.
        record_every: iterations between videos; 0: none are recorded.
        data_rows: rows of the recorded experience, for display; None if unknown.
    """

    steps: float  # whole
    until: float | None = None
    checkpoint_every: int = 20
    keep_checkpoints: int = 1
    keep_best: bool = False
    title: str = ""
    record_every: int = 0
    data_rows: int | None = None


class NullRunLogger:
    """Writes nothing, for a training without a folder."""

    is_video_due = False

    def _do_nothing(self, *arguments: object, **options: object) -> None:
        """Does nothing."""

    snapshot = before_iteration = log_row = record_video = save = finish = emergency_save = (
        close
    ) = _do_nothing


class RunLogger:
    """Writes the files of a training to its run folder.

    Args:
        run: the folder, held by this process.
        algorithm: the trained algorithm, in the state of the run's newest checkpoint or later.
        options: of the training.

    Attributes:
        best_score: mean return of the best checkpoint; -inf if there is none.
    """

    def __init__(
        self, run: RunFolder, algorithm: AlgorithmProtocol, options: TrainingOptions
    ) -> None:
        from tfpolicies.algorithms.run_description import (  # imports Keras
            describe_run,
            get_compared_settings,
        )

        self.run = run
        description = describe_run(algorithm)
        run.describe(description, get_versions(), get_machine())
        run.clear_error()
        self._algorithm = algorithm
        self._options = options
        config = algorithm.config
        evaluates_after_update = _evaluates(config) and not config.evaluation_parallel_to_training
        self._scores_sampling_weights = options.keep_best and not evaluates_after_update
        self._sampling_states: dict[
            str, Any
        ] = {}  # states at the start of an iteration, by policy id
        self.best_score = _read_best_score(run, config)
        can_evaluate_best = evaluates_after_update and config.custom_evaluation_function is None
        if can_evaluate_best and options.keep_best and run.best.exists():
            self.best_score = _evaluate_best(run, algorithm)
        self._csv = ProgressCsv(run.progress_csv)
        self._repeated_iterations = self._csv.drop_after(algorithm.iteration)
        steps = algorithm.counters[_STEPS_COUNTER]
        self._events = EventWriter(run.events, resume_step=steps)
        self._events.write_hyperparameters(get_compared_settings(algorithm.config, description))
        self._histograms_due_at = -math.inf
        self._curve_drawn_at = time.monotonic()
        self._protected_checkpoint = (
            algorithm._last_finite_checkpoint
        )  # never removed: other runs may start from it
        self._saved_iteration = _read_iteration(run.latest) if run.has_checkpoint else 0
        self._snapshot: AlgorithmSnapshot | None = None
        self._snapshot_iteration = algorithm.iteration  # of the record
        self._snapshot_due_at = -math.inf

    def describe_resumption(self) -> str:
        """Returns after which iteration training resumes; call it before training."""
        unit = "step" if needs_environment(self._algorithm.config.input_) else "row"
        steps = format_count(int(self._algorithm.counters[_STEPS_COUNTER]), unit)
        text = f"after iteration {self._algorithm.iteration} ({steps})"
        if self._repeated_iterations == 0:
            return f"{text}."
        repeated = format_count(self._repeated_iterations, "iteration")
        return f"{text}; {repeated} recorded after this checkpoint will be repeated."

    def close(self) -> None:
        self._events.close()

    def snapshot(self, *, is_last: bool = False) -> None:
        """Takes a snapshot of the algorithm, for `emergency_save`.

        If that takes long, as with large models or stored replay buffers, it is not done in every
        iteration.

        Args:
            is_last: whether training ends now, so that it is done in any case.
        """
        from tfpolicies.algorithms.algorithm_checkpoints import make_snapshot

        is_new = self._snapshot_iteration != self._algorithm.iteration
        if time.monotonic() < self._snapshot_due_at and not (is_last and is_new):
            return
        started_at = time.thread_time()
        self._snapshot, self._snapshot_iteration = (
            make_snapshot(self._algorithm),
            self._algorithm.iteration,
        )
        seconds = time.thread_time() - started_at
        if seconds > _FAST_SNAPSHOT_SECONDS:
            self._snapshot_due_at = time.monotonic() + seconds / _MAX_SNAPSHOT_TIME_SHARE

    def before_iteration(self) -> None:
        """Copies the weights that will sample, if they may turn out to be the best."""
        if self._scores_sampling_weights:
            self._sampling_states = self._get_trained_states()

    def log_row(self, row: Mapping[str, float]) -> None:
        """Writes the row of an iteration, and the best checkpoint if it has the best score."""
        if self._options.keep_best:
            self._save_if_best(row)
        self._csv.append(row)
        self._events.write_scalars(int(row["env_steps"]), get_event_scalars(row))
        self._write_histograms(int(row["env_steps"]))
        if time.monotonic() - self._curve_drawn_at > _SECONDS_BETWEEN_CURVES:
            self._draw_curve()

    def _write_histograms(self, env_steps: int) -> None:
        """Writes histograms of the newest actions, so that they take at most 1% of the time."""
        if time.monotonic() < self._histograms_due_at:
            return
        started_at = time.thread_time()
        actions = self._algorithm._train_batch_sampler.recent_actions.get_components()
        self._events.write_histograms(env_steps, actions)
        seconds = time.thread_time() - started_at
        self._histograms_due_at = time.monotonic() + seconds / _MAX_HISTOGRAM_TIME_SHARE

    def save(self) -> None:
        """Replaces the run's checkpoint, atomically."""
        with get_interrupt_handler().allow_unlimited_time():
            self._algorithm.save(self.run.latest)
            if self._options.keep_checkpoints > 1:
                iteration, count = self._algorithm.iteration, self._options.keep_checkpoints
                self.run.archive_latest(iteration, count, protected=self._protected_checkpoint)
        self._saved_iteration = self._algorithm.iteration

    def finish(self) -> None:
        """Writes the final checkpoint and learning curve."""
        self.save()
        self._draw_curve()

    def emergency_save(self) -> None:
        """Saves the state after the last complete iteration, unless the newest checkpoint has it.

        Changes of an unfinished iteration are not saved. May be called while another thread trains.

        Raises:
            CheckpointError: if it cannot be written.
        """
        if self._snapshot is not None and self._snapshot_iteration > self._saved_iteration:
            self._snapshot.write(self.run.latest)
            self._saved_iteration = self._snapshot_iteration

    @property
    def is_video_due(self) -> bool:
        record_every = self._options.record_every
        return record_every > 0 and self._algorithm.iteration % record_every == 0

    def record_video(self) -> None:
        """Records an episode with the current policies.

        If that fails, training continues and a warning gives the reason.
        """
        from tfpolicies.algorithms.episode_playback import PlaySetup, record_episodes

        iteration, steps = self._algorithm.iteration, self._algorithm.counters[_STEPS_COUNTER]
        path = self.run.videos / f"iteration-{iteration:06}-steps-{steps:09}.mp4"
        try:
            record_episodes(PlaySetup(self._algorithm), [path], _VIDEO_SEEDS)
            self._events.write_gif(steps, "videos", *make_preview(path))
        except Exception as error:
            logger.warning("There is no video of iteration %d: %s", iteration, error)

    def _get_trained_states(self) -> dict[str, dict[str, Any]]:
        worker = self._algorithm.worker
        return {pid: worker.policy_map[pid].get_state() for pid in worker.get_policies_to_train()}

    def _save_if_best(self, row: Mapping[str, float]) -> None:
        """Replaces the best checkpoint if an iteration has the best score so far.

        It gets the weights of that score: the current ones if they were evaluated after the update,
        else those from before it. Weights that are not finite are never the best.
        """
        from tfpolicies.policy.policy_checkpoints import is_finite_state

        score = _get_score(row, self._algorithm.config)
        if not score > self.best_score:  # NaN is never best
            return
        states = (
            self._sampling_states if self._scores_sampling_weights else self._get_trained_states()
        )
        if all(map(is_finite_state, states.values())):
            with get_interrupt_handler().allow_unlimited_time():
                self._algorithm.save(self.run.best, policy_states=states)
            self.best_score = score

    def _draw_curve(self) -> None:
        draw_learning_curve(
            read_progress(self.run.progress_csv),
            self.run.learning_curve,
            title=self._options.title,
            target=self._options.until,
            from_data=not needs_environment(self._algorithm.config.input_),
        )
        self._curve_drawn_at = time.monotonic()


def _read_best_score(run: RunFolder, config: AlgorithmConfig) -> float:
    """Returns the score of the best checkpoint so far, -inf if there is none.

    It is read from the run's CSV, so that a resumed run continues to compare. Other rows may have
    higher scores if their weights were not finite.
    """
    if not run.best.exists() or not run.progress_csv.exists():
        return -math.inf
    rows = read_progress(run.progress_csv)
    best = _read_iteration(run.best)
    matching_rows = [row for row in rows if row["iteration"] == best]
    scores = [_get_score(row, config) for row in matching_rows or rows]
    return max((score for score in scores if not math.isnan(score)), default=-math.inf)


def _evaluate_best(run: RunFolder, algorithm: AlgorithmProtocol) -> float:
    """Returns the mean return of the best checkpoint, evaluated in the same way as later ones.

    The score in the run's CSV may be from sampled episodes, or from fewer episodes.
    """
    from tfpolicies.algorithms.algorithm_checkpoints import StoredAlgorithm
    from tfpolicies.policy.policy_checkpoints import set_stored_state

    default_evaluator = algorithm._evaluator
    evaluator = default_evaluator.with_settings(
        {}, default_evaluator.explore
    )  # with separate random generators
    policies = dict(algorithm.worker.policy_map.items())
    best = StoredAlgorithm.read(run.best).get_policies(
        [type(policy) for policy in policies.values()]
    )
    evaluated_policies = {pid: policy for pid, policy in policies.items() if pid in best}
    states = {pid: policy.get_state() for pid, policy in evaluated_policies.items()}
    try:
        for pid, policy in evaluated_policies.items():
            set_stored_state(policy, best[pid].make_state_for(policy))
        returns = [episode.episode_reward for episode in evaluator.play().episodes]
    finally:
        evaluator.stop()
        for pid, policy in evaluated_policies.items():
            policy.set_state(states[pid])
    score = sum(returns) / len(returns) if returns else -math.inf
    logger.info("The best checkpoint so far has a mean return of %.4g.", score)
    return score


def _read_iteration(checkpoint: Path) -> int:
    from tfpolicies.storage.checkpoint import read_manifest
    from tfpolicies.storage.manifest import ALGORITHM_MANIFEST

    manifest = read_manifest(checkpoint, ALGORITHM_MANIFEST, kind="Algorithm")
    return int(manifest["progress"]["iteration"])


def _evaluates(config: AlgorithmConfig) -> bool:
    return config.evaluation_interval is not None


def _get_score(row: Mapping[str, float], config: AlgorithmConfig) -> float:
    """Returns the score that selects the best checkpoint; NaN if an iteration has none.

    It is the mean return of evaluations if the run evaluates, else that of recent episodes.
    """
    if _evaluates(config):
        return row.get(EVALUATION_MEAN, math.nan)
    if math.isnan(row.get(f"{RECENT_PREFIX}episodes", math.nan)):  # in runs of earlier versions
        return row.get("episode_reward_mean", math.nan)
    return get_recent_return(row, config)


def is_score_constant(row: Mapping[str, float], config: AlgorithmConfig) -> bool:
    """Returns whether all episodes of an iteration's score have the same return.

    Args:
        row: of an iteration, whose training episodes have the same return.
        config: of the run.
    """
    low, high = (row.get(f"evaluation/episode_reward_{x}", math.nan) for x in ("min", "max"))
    return low == high or not _evaluates(config)


def get_recent_return(row: Mapping[str, float], config: AlgorithmConfig) -> float:
    """Returns the mean return of recent episodes; NaN if there are too few.

    If a run reads only recorded experience, it is that of the iteration's evaluation.

    Args:
        row: of an iteration, see `make_progress_row`.
        config: of the run.
    """
    if not needs_environment(config.input_):
        return row.get(EVALUATION_MEAN, math.nan)
    min_episodes = min(MIN_RECENT_EPISODES, config.metrics_num_episodes_for_smoothing)
    if row.get(f"{RECENT_PREFIX}episodes", 0) < min_episodes:
        return math.nan
    return row.get(f"{RECENT_PREFIX}mean", math.nan)
