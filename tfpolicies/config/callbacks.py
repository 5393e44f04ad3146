"""`DefaultCallbacks`, the base class of user callbacks, and helpers for several of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpolicies.base.allowlist import allow_in_checkpoint
from tfpolicies.errors import suggest_similar_names

logger = logging.getLogger("tfpolicies")


@allow_in_checkpoint("callbacks")
class DefaultCallbacks:
    """User callbacks without effect; subclass it and override the methods you need.

    Pass the subclass to `AlgorithmConfig.callbacks(...)`. All arguments are passed by keyword.
    Those annotated with `Any` have classes of higher subpackages, which your methods can name.
    Methods for single episodes cost time only if they are overridden.
    """

    def on_algorithm_init(self, *, algorithm: Any) -> None:
        """Called when an algorithm is built."""

    def on_create_policy(self, *, policy_id: str, policy: Any) -> None:
        """Called when a worker has created a policy.

        Connectors can be added to its pipelines: `policy.action_connectors.append(...)`.
        """

    def on_sub_environment_created(
        self, *, worker: Any, sub_environment: Any, env_context: Any, env_index: int
    ) -> None:
        """Called when a worker has created an environment."""

    def on_episode_created(
        self, *, worker: Any, base_env: Any, policies: Any, episode: Any, env_index: int
    ) -> None:
        """Called before an episode starts."""

    def on_episode_start(
        self, *, worker: Any, base_env: Any, policies: Any, episode: Any, env_index: int
    ) -> None:
        """Called when an episode has its first observation."""

    def on_episode_step(
        self, *, worker: Any, base_env: Any, policies: Any, episode: Any, env_index: int
    ) -> None:
        """Called after each step of an episode."""

    def on_episode_end(
        self, *, worker: Any, base_env: Any, policies: Any, episode: Any, env_index: int
    ) -> None:
        """Called when an episode has ended."""

    def on_postprocess_trajectory(
        self,
        *,
        worker: Any,
        episode: Any,
        agent_id: Hashable,
        policy_id: str,
        policies: Any,
        postprocessed_batch: Any,
        original_batches: Mapping[Hashable, tuple[Any, ...]],
    ) -> None:
        """Called with each trajectory after its postprocessing."""

    def on_sample_end(self, *, worker: Any, samples: Any) -> None:
        """Called with each batch before `sample()` returns it."""

    def on_learn_on_batch(self, *, policy: Any, train_batch: Any, result: dict[str, Any]) -> None:
        """Called before an update; entries added to `result` become `custom_metrics`."""

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any]) -> None:
        """Called with the result of each training iteration; the return value is ignored."""

    def on_run_start(self, *, algorithm: Any, run_dir: Path | None) -> None:
        """Called by `learn` and `tfpolicies train` before the first iteration.

        `run_dir` is the run folder; None if nothing is written.
        """

    def on_iteration_start(self, *, algorithm: Any) -> None:
        """Called before each iteration of `learn` and `tfpolicies train`."""

    def on_iteration_end(self, *, algorithm: Any, row: dict[str, float]) -> bool | None:
        """Called with the numbers that `progress.csv` gets; ends training by returning False."""

    def on_training_end(self, *, algorithm: Any, ended_by: str) -> None:
        """Called after the last iteration, before the final checkpoint is written.

        It is not called if a signal or an error ends training, since that can be resumed.
        `ended_by` is "steps", "target" or "callback".
        """

    def on_run_end(self, *, algorithm: Any, run_dir: Path | None, ended_by: str) -> None:
        """Called when all files of the run are written.

        `ended_by` may also be "signal" or "error".
        """

    def on_evaluate_start(self, *, algorithm: Any) -> None:
        """Called before an evaluation."""

    def on_evaluate_end(self, *, algorithm: Any, evaluation_metrics: dict[str, Any]) -> None:
        """Called with the return value of `Algorithm.evaluate`, `{"evaluation": {...}}`.

        Entries added there become part of the result.
        """

    def on_workers_recreated(
        self, *, algorithm: Any, worker_set: Any, worker_ids: list[int], is_evaluation: bool
    ) -> None:
        """Called when failed remote workers have been recreated."""

    def on_checkpoint_loaded(self, *, algorithm: Any) -> None:
        """Called when an algorithm has been restored."""


_EPISODE_HOOKS = (
    "on_episode_created",
    "on_episode_start",
    "on_episode_step",
    "on_episode_end",
    "on_postprocess_trajectory",
)


_BATCH_HOOKS = ("on_postprocess_trajectory", "on_sample_end", "on_learn_on_batch")


def overrides(callbacks: DefaultCallbacks, name: str) -> bool:
    """Returns whether a subclass of `DefaultCallbacks` overrides the method `name`."""
    return getattr(type(callbacks), name) is not getattr(DefaultCallbacks, name)


def warn_of_unknown_methods(callbacks: DefaultCallbacks) -> None:
    """Warns about methods with the prefix of callbacks that `DefaultCallbacks` does not have."""
    callbacks_class = type(callbacks)
    for name in dir(callbacks_class):
        if name.startswith(("on_", "_on_")) and not hasattr(DefaultCallbacks, name):
            hooks = [x for x in vars(DefaultCallbacks) if x.startswith("on_")]
            logger.warning(
                "%s.%s is never called: DefaultCallbacks has no such method.%s To end training, "
                "pass learn(..., callbacks=[f]) a function f(algorithm, result) that returns "
                "False.",
                callbacks_class.__name__,
                name,
                suggest_similar_names(name, hooks),
            )


def has_episode_methods(callbacks: DefaultCallbacks) -> bool:
    """Returns whether a method for single episodes is overridden."""
    return any(overrides(callbacks, name) for name in _EPISODE_HOOKS)


def has_batch_methods(callbacks: DefaultCallbacks) -> bool:
    """Returns whether a method that gets sampled rows is overridden."""
    return any(overrides(callbacks, name) for name in _BATCH_HOOKS)


def make_multi_callbacks(
    callback_class_list: Sequence[type[DefaultCallbacks]],
) -> type[DefaultCallbacks]:
    """Returns a class whose methods call those of all given classes, in order.

    >>> class Hello(DefaultCallbacks):
    ...     def on_algorithm_init(self, *, algorithm):
    ...         print("hello", algorithm)
    >>> make_multi_callbacks([Hello, Hello])().on_algorithm_init(algorithm="there")
    hello there
    hello there
    """
    classes = list(callback_class_list)
    return _make_dispatching_class(
        classes, lambda: [callback_class() for callback_class in classes]
    )


def join_callbacks(callbacks: Sequence[DefaultCallbacks]) -> DefaultCallbacks:
    """Returns callbacks whose methods call those of all given ones, in order.

    >>> class Hello(DefaultCallbacks):
    ...     def on_algorithm_init(self, *, algorithm):
    ...         print("hello", algorithm)
    >>> join_callbacks([Hello(), DefaultCallbacks()]).on_algorithm_init(algorithm="there")
    hello there
    """
    return _make_dispatching_class(
        [type(callback) for callback in callbacks], lambda: list(callbacks)
    )()


class _MultiCallbacks(DefaultCallbacks):
    parts: list[DefaultCallbacks]


def _make_dispatching_class(
    classes: Sequence[type[DefaultCallbacks]], make_parts: Callable[[], list[DefaultCallbacks]]
) -> type[DefaultCallbacks]:
    """Returns a class with the overridden methods of some classes, which calls its parts."""

    def make_method(name: str) -> Callable[..., bool | None]:
        def method(self: _MultiCallbacks, **arguments: object) -> bool | None:
            results = [getattr(part, name)(**arguments) for part in self.parts]
            return False if any(result is False for result in results) else None

        return method

    def init(self: _MultiCallbacks) -> None:
        self.parts = make_parts()

    methods = {
        name: make_method(name)
        for name, default_method in vars(DefaultCallbacks).items()
        if name.startswith("on_")
        and any(getattr(callback_class, name) is not default_method for callback_class in classes)
    }
    return type("MultiCallbacks", (_MultiCallbacks,), {"__init__": init, **methods})
