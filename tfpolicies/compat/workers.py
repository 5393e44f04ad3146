"""What workers and their sets have under names that only code written for RLlib asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from tfpolicies.envs.making import EnvContext, make_any_environments
from tfpolicies.errors import UsageError


def asking(workers: Any) -> Callable[..., int]:
    """Returns `workers.foreach_worker_async(func, healthy_only=..., remote_worker_ids=...)`.

    It has `func(worker)` called in remote workers, waits for none, and returns how many will answer
    to `fetch_ready_async_reqs`.
    """

    def foreach_worker_async(
        func: Callable[[Any], Any],
        *,
        healthy_only: bool = True,
        remote_worker_ids: Collection[int] | None = None,
    ) -> int:
        del healthy_only  # others are never called
        remotes = workers._remotes
        workers._complete_weights()
        return 0 if remotes is None else int(remotes.request(func, remote_worker_ids))

    return foreach_worker_async


def fetching(workers: Any) -> Callable[..., list[tuple[int, Any]]]:
    """Returns `workers.fetch_ready_async_reqs(timeout_seconds=0)`.

    It gives `(index, answer)` of what was asked by `foreach_worker_async` and arrived, after
    `timeout_seconds` at most, or, if that is None, of all.
    """

    def fetch_ready_async_reqs(
        *, timeout_seconds: float | None = 0.0, mark_healthy: bool = False
    ) -> list[tuple[int, Any]]:
        del mark_healthy  # who answers is
        remotes = workers._remotes
        return [] if remotes is None else list(remotes.take_answers(timeout_seconds))

    return fetch_ready_async_reqs


def adding(workers: Any) -> Callable[..., None]:
    """Returns `workers.add_workers(num_workers)`, which starts more remote workers."""

    def add_workers(num_workers: int, validate: bool = False) -> None:
        del validate  # it waits for them
        remotes = workers._remotes
        if remotes is None:
            raise UsageError(
                "add_workers adds to remote workers, of which there are none: build with "
                "num_rollout_workers of 1 or more."
            )
        remotes.add(num_workers)

    return add_workers


def trains(workers: Any) -> Callable[..., bool]:
    """Returns `workers.is_policy_to_train(policy_id, batch=None)`."""
    return lambda policy_id, batch=None: workers.local_worker().roster.trains(policy_id, batch)


def creator(worker: Any) -> Callable[[EnvContext], Any]:
    """Returns what makes an environment like the worker's of a context."""
    given = worker.creation_args()["env_creator"]
    source = worker.config.env if given is None else given

    def env_creator(context: EnvContext) -> Any:
        made: Any = make_any_environments(source, 1, context)
        return made.get_sub_environments()[0]

    return env_creator


def asserting(worker: Any) -> Callable[[], None]:
    """Returns `worker.assert_healthy()`."""

    def assert_healthy() -> None:
        worker._require_sampler()

    return assert_healthy


OF_WORKER_SETS: dict[str, Callable[[Any], Any]] = {
    "add_workers": adding,
    "fetch_ready_async_reqs": fetching,
    "foreach_worker_async": asking,
    "is_policy_to_train": trains,
}
"""By name, what returns it."""

OF_WORKERS: dict[str, Callable[[Any], Any]] = {
    "assert_healthy": asserting,
    "env_context": lambda worker: worker._context(),
    "env_creator": creator,
    "last_batch": lambda worker: worker._first_batch,
}
"""By name, what returns it."""
