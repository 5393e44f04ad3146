"""What workers and their sets have under names that only code written for RLlib asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from tfpolicies.compat.methods import as_method
from tfpolicies.envs.making import EnvContext, make_any_environments
from tfpolicies.errors import UsageError


def foreach_worker_async(
    workers: Any,
    func: Callable[[Any], Any],
    *,
    healthy_only: bool = True,
    remote_worker_ids: Collection[int] | None = None,
) -> int:
    """Has `func(worker)` called in remote workers, and waits for none.

    Returns:
        How many will answer to `fetch_ready_async_reqs`.
    """
    del healthy_only  # others are never called
    remotes = workers._remotes
    workers._complete_weights()
    return 0 if remotes is None else int(remotes.request(func, remote_worker_ids))


def fetch_ready_async_reqs(
    workers: Any, *, timeout_seconds: float | None = 0.0, mark_healthy: bool = False
) -> list[tuple[int, Any]]:
    """Returns `(index, answer)` of what was asked by `foreach_worker_async` and arrived.

    It waits for `timeout_seconds` at most, or, if that is None, for all.
    """
    del mark_healthy  # who answers is
    remotes = workers._remotes
    return [] if remotes is None else list(remotes.take_answers(timeout_seconds))


def add_workers(workers: Any, num_workers: int, validate: bool = False) -> None:
    """Starts more remote workers.

    Raises:
        UsageError: if there are none so far.
    """
    del validate  # it waits for them
    remotes = workers._remotes
    if remotes is None:
        raise UsageError(
            "add_workers adds to remote workers, of which there are none: build with "
            "num_rollout_workers of 1 or more."
        )
    remotes.add(num_workers)


def is_policy_to_train(workers: Any, policy_id: str, batch: Any = None) -> bool:
    """Whether a policy is trained, on a batch."""
    return bool(workers.local_worker().policies.trains(policy_id, batch))


def env_creator(worker: Any, context: EnvContext) -> Any:
    """Returns a new environment like the worker's, of a context."""
    given = worker.creation_args()["env_creator"]
    source = worker.config.env if given is None else given
    made: Any = make_any_environments(source, 1, context)
    return made.get_sub_environments()[0]


def assert_healthy(worker: Any) -> None:
    """Raises what sampling would if the worker was stopped or has no environment."""
    worker._require_sampler()


WORKER_SET_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "add_workers": as_method(add_workers),
    "fetch_ready_async_reqs": as_method(fetch_ready_async_reqs),
    "foreach_worker_async": as_method(foreach_worker_async),
    "is_policy_to_train": as_method(is_policy_to_train),
}
"""By name, what returns it."""

WORKER_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "assert_healthy": as_method(assert_healthy),
    "env_context": lambda worker: worker._context(),
    "env_creator": as_method(env_creator),
    "last_batch": lambda worker: worker._first_batch,
}
"""By name, what returns it."""
