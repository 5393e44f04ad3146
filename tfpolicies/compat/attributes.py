"""Attributes of configs, algorithms and workers that only code written for RLlib uses."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.envs.env_factory import EnvContext, make_any_environments
from tfpolicies.errors import UsageError
from tfpolicies.storage.spaces_json import encode_space


def make_method_getter(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Returns a getter for a function as a method: the object becomes its first argument."""
    return partial(partial, function)


NOT_SERIALIZABLE = "__not_serializable__"
"""Replaces functions and objects in the result of `serialize()`."""


def get_rollout_fragment_length(config: Any, worker_index: int = 0) -> int:
    """Returns a worker's steps per environment and sample; index 0 gives the common number."""
    return int(config.get_fragment_length(worker_index=worker_index))


def is_atari(config: Any) -> bool:
    name = config.env
    spec = gym.registry.get(name) if isinstance(name, str) else None
    entry = str(getattr(spec, "entry_point", ""))
    return entry.startswith("ale_py") or str(name).startswith("ALE/")


def multiagent(config: Any) -> dict[str, Any]:
    """Returns the multi-agent settings, as old dict configs have them."""
    return {
        name: config[name]
        for name, section in config._section_by_setting.items()
        if section == "multi_agent"
    }


def serialize(config: Any) -> dict[str, Any]:
    """Returns all settings as JSON values; classes are replaced by their paths.

    Functions and objects without a JSON form become `NOT_SERIALIZABLE`. The result is for reading
    and comparing; checkpoints hold a config that can be loaded again.
    """
    return dict(_to_json(config.to_dict()))


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_json(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_to_json, value), key=str)
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, gym.Space):
        return encode_space(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    is_json = value is None or isinstance(value, bool | int | float | str)
    return value if is_json else NOT_SERIALIZABLE


CONFIG_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "get_rollout_fragment_length": make_method_getter(get_rollout_fragment_length),
    "is_atari": is_atari,
    "multiagent": multiagent,
    "pop": lambda config: config.get,
    "serialize": make_method_getter(serialize),
    "total_train_batch_size": lambda config: config.train_batch_size,
}
"""Getters of the attributes of configs, by name."""


def save_checkpoint(algorithm: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Saves an algorithm in a folder."""
    algorithm.save(checkpoint_dir)


def load_checkpoint(algorithm: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Restores an algorithm from a folder."""
    algorithm.restore(checkpoint_dir)


def logdir(algorithm: Any) -> str:
    """Returns the run folder, or a temporary folder that is created on first use."""
    if algorithm.run_dir is not None:
        return str(algorithm.run_dir)
    algorithm.logdir = tempfile.mkdtemp(prefix=f"{type(algorithm).__name__}_")
    return str(algorithm.logdir)


ALGORITHM_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "_counters": lambda algorithm: algorithm.counters,
    "get_config": lambda algorithm: lambda: algorithm.config,
    "load_checkpoint": make_method_getter(load_checkpoint),
    "logdir": logdir,
    "save_checkpoint": make_method_getter(save_checkpoint),
    "step": lambda algorithm: algorithm.train,
}
"""Getters of the attributes of algorithms, by name."""


def foreach_worker_async(
    workers: Any,
    func: Callable[[Any], Any],
    *,
    healthy_only: bool = True,
    remote_worker_ids: Collection[int] | None = None,
) -> int:
    """Starts `func(worker)` in remote workers without waiting.

    Returns:
        How many calls will be answered by `fetch_ready_async_reqs`.
    """
    del healthy_only  # failed workers are never called
    remotes = workers._remotes
    workers._send_full_weights()
    return 0 if remotes is None else int(remotes.request(func, remote_worker_ids))


def fetch_ready_async_reqs(
    workers: Any, *, timeout_seconds: float | None = 0.0, mark_healthy: bool = False
) -> list[tuple[int, Any]]:
    """Returns the finished results of `foreach_worker_async` as `(index, answer)`.

    It waits at most `timeout_seconds`, or for all results if that is None.
    """
    del mark_healthy  # workers that answer are healthy
    remotes = workers._remotes
    return [] if remotes is None else list(remotes.take_requested_results(timeout_seconds))


def add_workers(workers: Any, num_workers: int, validate: bool = False) -> None:
    """Starts more remote workers.

    Raises:
        UsageError: if there are none so far.
    """
    del validate  # adding waits for the workers
    remotes = workers._remotes
    if remotes is None:
        raise UsageError(
            "add_workers needs at least one remote worker, but there is none: build with "
            "num_rollout_workers of 1 or more."
        )
    remotes.add(num_workers)


def is_policy_to_train(workers: Any, policy_id: str, batch: Any = None) -> bool:
    """Returns whether a policy is trained on a batch."""
    return bool(workers.local_worker().policies.is_trained(policy_id, batch))


def env_creator(worker: Any, context: EnvContext) -> Any:
    """Returns a new environment like the worker's, for a context."""
    creator = worker.creation_args()["env_creator"]
    source = worker.config.env if creator is None else creator
    environments: Any = make_any_environments(source, 1, context)
    return environments.get_sub_environments()[0]


def assert_healthy(worker: Any) -> None:
    """Raises the error of sampling if the worker was stopped or has no environment."""
    worker._require_sampler()


WORKER_SET_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "add_workers": make_method_getter(add_workers),
    "fetch_ready_async_reqs": make_method_getter(fetch_ready_async_reqs),
    "foreach_worker_async": make_method_getter(foreach_worker_async),
    "is_policy_to_train": make_method_getter(is_policy_to_train),
}
"""Getters of the attributes of worker sets, by name."""

WORKER_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "assert_healthy": make_method_getter(assert_healthy),
    "env_context": lambda worker: worker._context(),
    "env_creator": make_method_getter(env_creator),
    "last_batch": lambda worker: worker._first_batch,
}
"""Getters of the attributes of workers, by name."""
