"""Runs evaluations of an algorithm: after iterations, parallel to them, or by `evaluate()`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol
from tfpolicies.algorithms.evaluator import Evaluator, RunningEvaluation, make_metrics
from tfpolicies.algorithms.learn import to_positive_int
from tfpolicies.errors import UsageError
from tfpolicies.rollout.sampler import EvaluationResult


class AlgorithmEvaluation:
    """Evaluates the policies of an algorithm, and calls its callbacks.

    Args:
        algorithm: an `Algorithm`.
        evaluator: plays the episodes.
    """

    def __init__(self, algorithm: AlgorithmProtocol, evaluator: Evaluator) -> None:
        self._algorithm = algorithm
        self._evaluator = evaluator
        self._last_metrics: dict[str, Any] | None = None

    def start(self) -> RunningEvaluation | None:
        """Starts the evaluation of the next iteration, if it runs parallel to training."""
        algorithm = self._algorithm
        if not self._is_due(algorithm.iteration + 1):
            return None
        if not algorithm.config.evaluation_parallel_to_training:
            return None
        algorithm.callbacks.on_evaluate_start(algorithm=algorithm)
        return self._evaluator.start()

    def _is_due(self, iteration: int) -> bool:
        interval = self._algorithm.config.evaluation_interval
        return interval is not None and iteration % interval == 0

    def _is_at_end(self) -> bool:
        """Whether the last steps of `learn` were trained, and the run has evaluations."""
        algorithm = self._algorithm
        steps = algorithm.counters["num_env_steps_sampled"]
        has_evaluations = algorithm.config.evaluation_interval is not None
        return bool(has_evaluations and steps >= algorithm._metrics.max_env_steps)

    def add_to(self, result: dict[str, Any], running: RunningEvaluation | None) -> None:
        """Adds the evaluation of an iteration to its result, if there is one.

        Args:
            result: of the iteration.
            running: the return value of `start` before the iteration.
        """
        algorithm = self._algorithm
        if running is not None:
            running.training_done.set()
            result.update(self._report(running.future.result(), self._evaluator))
        elif self._is_due(algorithm.iteration) or self._is_at_end():
            result.update(algorithm.evaluate())
        elif (
            algorithm.config.always_attach_evaluation_results
            and self._evaluator.workers is not None
        ):
            result["evaluation"] = self._last_metrics or self._evaluator.make_empty_metrics()

    def evaluate(
        self,
        duration_fn: Callable[[int], int] | None,
        episodes: int | None,
        explore: bool | None,
        **setting_changes: object,
    ) -> dict[str, dict[str, Any]]:
        """Plays episodes; see `Algorithm.evaluate`.

        Args:
            duration_fn: as in `Algorithm.evaluate`.
            episodes: as in `Algorithm.evaluate`.
            explore: as in `Algorithm.evaluate`.
            setting_changes: settings of this evaluation; None for the default.
        """
        episodes = _check_duration(duration_fn, episodes)
        algorithm = self._algorithm
        algorithm.callbacks.on_evaluate_start(algorithm=algorithm)
        with self._evaluator_for(episodes, explore, setting_changes) as evaluator:
            function = algorithm.config.custom_evaluation_function
            if function is None:
                return self._report(evaluator.play(duration_fn, episodes), evaluator)
            workers = evaluator.prepare()
            workers.copy_weights_from(algorithm.worker)
            metrics = function(algorithm, workers)
        if not isinstance(metrics, dict):
            name = getattr(function, "__qualname__", repr(function))
            raise UsageError(
                f"custom_evaluation_function {name} must return a dict of metrics, got "
                f"{metrics!r:.200}; end it with `return summarize_episodes(episodes)`, or with "
                "your own dict."
            )
        return self._notify_callbacks(metrics)

    @contextlib.contextmanager
    def _evaluator_for(
        self, episodes: int | None, explore: bool | None, setting_changes: dict[str, Any]
    ) -> Iterator[Evaluator]:
        """Yields the evaluator of one call: the default one, or a temporary one with changes."""
        default_evaluator = self._evaluator
        explore = default_evaluator.explore if explore is None else explore
        setting_changes = {
            name: value for name, value in setting_changes.items() if value is not None
        }
        if setting_changes:
            if episodes is not None:
                setting_changes |= {
                    "evaluation_duration": episodes,
                    "evaluation_duration_unit": "episodes",
                }
            evaluator = default_evaluator.with_settings(setting_changes, explore)
            try:
                yield evaluator
            finally:
                evaluator.stop()
            return
        previous_explore, default_evaluator.explore = default_evaluator.explore, explore
        try:
            yield default_evaluator
        finally:
            default_evaluator.explore = previous_explore

    def _report(self, result: EvaluationResult, evaluator: Evaluator) -> dict[str, dict[str, Any]]:
        workers = evaluator.prepare()
        workers.notify_recreated()
        return self._notify_callbacks(make_metrics(result, workers))

    def _notify_callbacks(self, metrics: dict[str, Any]) -> dict[str, dict[str, Any]]:
        self._last_metrics = metrics
        result = {"evaluation": metrics}
        algorithm = self._algorithm
        algorithm.callbacks.on_evaluate_end(algorithm=algorithm, evaluation_metrics=result)
        return result


def _check_duration(duration_fn: Callable[[int], int] | None, episodes: int | None) -> int | None:
    """Checks the duration arguments of `evaluate`; returns the number of episodes or None."""
    if not (duration_fn is None or callable(duration_fn)):
        raise UsageError(
            f"duration_fn must be a function or None, got {duration_fn!r:.200}. To play "
            "20 episodes, write evaluate(episodes=20)."
        )
    if episodes is None:
        return None
    if duration_fn is not None:
        raise UsageError("Give either duration_fn or episodes to evaluate, not both.")
    return to_positive_int("episodes", episodes)
