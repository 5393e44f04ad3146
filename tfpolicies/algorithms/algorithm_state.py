"""The state of an algorithm as a dict with RLlib's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpolicies.algorithms import checkpoints
from tfpolicies.algorithms.host import HostAlgorithm
from tfpolicies.errors import UsageError

_EVALUATED_BY = "eval_policy_mapping_fn"  # key of a state


def make_state(algorithm: HostAlgorithm) -> dict[str, Any]:
    """Returns the state of an algorithm; see `Algorithm.__getstate__`."""
    evaluating = algorithm.evaluation_worker
    mapping = {} if evaluating is None else {_EVALUATED_BY: evaluating.policy_mapping_fn}
    return {
        **mapping,
        "algorithm_class": type(algorithm),
        "config": algorithm.config.copy(),
        "worker": algorithm.worker.get_state(),
        "counters": dict(algorithm.counters),
        "training_iteration": algorithm.iteration,
        "extra": algorithm.get_extra_state(),
    }


def restore_state(algorithm: HostAlgorithm, state: Mapping[str, Any]) -> None:
    """Restores the state of an algorithm; see `Algorithm.__setstate__`."""
    local = algorithm.worker
    worker_state, iteration = state["worker"], int(state["training_iteration"])
    worker_state = checkpoints.with_configured_numbers(local, worker_state)
    counters, before = dict(state["counters"]), local.get_state()
    local.set_state(worker_state)
    try:
        if "extra" in state:
            algorithm.set_extra_state(state["extra"])
    except BaseException:
        local.set_state(before)
        raise
    algorithm.counters.update(counters)
    algorithm.iteration = iteration
    algorithm.workers.align(new_episodes=True)
    evaluating = algorithm.evaluation_workers
    if _EVALUATED_BY in state and evaluating is not None:
        to_train = evaluating.local_worker().is_policy_to_train
        evaluating.set_mapping_and_trainable(state[_EVALUATED_BY], to_train)


def build_from_state(state: Mapping[str, Any]) -> Any:
    """Builds the algorithm of a state; see `Algorithm.from_state`."""
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
