"""The state of an algorithm as a dict with RLlib's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpolicies.algorithms import algorithm_checkpoints
from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol
from tfpolicies.errors import UsageError

_EVAL_MAPPING_KEY = "eval_policy_mapping_fn"  # key of a state


def make_state(algorithm: AlgorithmProtocol) -> dict[str, Any]:
    evaluation_worker = algorithm.evaluation_worker
    mapping = (
        {}
        if evaluation_worker is None
        else {_EVAL_MAPPING_KEY: evaluation_worker.policy_mapping_fn}
    )
    return {
        **mapping,
        "algorithm_class": type(algorithm),
        "config": algorithm.config.copy(),
        "worker": algorithm.worker.get_state(),
        "counters": dict(algorithm.counters),
        "training_iteration": algorithm.iteration,
        "extra": algorithm.get_extra_state(),
    }


def restore_state(algorithm: AlgorithmProtocol, state: Mapping[str, Any]) -> None:
    local_worker = algorithm.worker
    worker_state, iteration = state["worker"], int(state["training_iteration"])
    worker_state = algorithm_checkpoints.apply_worker_hyperparameters(local_worker, worker_state)
    counters, previous_state = dict(state["counters"]), local_worker.get_state()
    local_worker.set_state(worker_state)
    try:
        if "extra" in state:
            algorithm.set_extra_state(state["extra"])
    except BaseException:
        local_worker.set_state(previous_state)
        raise
    algorithm.counters.update(counters)
    algorithm.iteration = iteration
    algorithm.workers.sync_workers(new_episodes=True)
    evaluation_workers = algorithm.evaluation_workers
    if _EVAL_MAPPING_KEY in state and evaluation_workers is not None:
        to_train = evaluation_workers.local_worker().is_policy_to_train
        evaluation_workers.set_mapping_and_trainable(state[_EVAL_MAPPING_KEY], to_train)


def build_from_state(state: Mapping[str, Any]) -> Any:
    algorithm_class, config = (state.get(name) for name in ("algorithm_class", "config"))
    if algorithm_class is None or config is None:
        raise UsageError(
            "The state of an algorithm must have 'algorithm_class' and 'config', as "
            f"`algorithm.__getstate__()` returns it; got the keys {sorted(state)}."
        )
    algorithm = algorithm_class(config.copy(copy_frozen=False))
    try:
        algorithm.__setstate__(state)
    except BaseException:
        algorithm.stop()
        raise
    return algorithm
