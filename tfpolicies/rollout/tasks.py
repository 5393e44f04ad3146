"""Curricula: environments that have tasks, and who says which one is next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfpolicies.envs.making import EnvContext
from tfpolicies.errors import UsageError
from tfpolicies.rollout.rollout_worker import RolloutWorker


def set_tasks(
    worker: RolloutWorker, env_task_fn: Callable[..., Any], result: Mapping[str, Any]
) -> None:
    """Gives each environment of a worker the task that a function says, if it is another one.

    Args:
        worker: whose environments they are.
        env_task_fn: `f(result, env, env_context)`, a task as `env.set_task(task)` takes it.
        result: of a training iteration.

    Raises:
        UsageError: for an environment without `get_task()` and `set_task(task)`.
    """

    def set_task(env: object, context: EnvContext) -> None:
        known: Any = next((x for x in (env, getattr(env, "unwrapped", env)) if _has_tasks(x)), None)
        if known is None:
            raise UsageError(
                "env_task_fn needs environments with the methods get_task() and set_task(task), "
                f"got {env!r}. Give such a class by config.environment(...); environments by name "
                "that step as one vector environment cannot have tasks."
            )
        task = env_task_fn(result, known, context)
        if task != known.get_task():
            known.set_task(task)

    worker.foreach_env_with_context(set_task)


def _has_tasks(env: object) -> bool:
    return hasattr(env, "get_task") and hasattr(env, "set_task")
