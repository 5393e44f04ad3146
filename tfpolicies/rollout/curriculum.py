"""Curriculum learning: sets the tasks of environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfpolicies.envs.env_factory import EnvContext
from tfpolicies.errors import UsageError
from tfpolicies.rollout.rollout_worker import RolloutWorker


def set_tasks(
    worker: RolloutWorker, env_task_fn: Callable[..., Any], result: Mapping[str, Any]
) -> None:
    """Sets the task of each environment of a worker, if a function returns another one.

    Args:
        worker: has the environments.
        env_task_fn: `f(result, env, env_context)`, returns a task for `env.set_task(task)`.
        result: of a training iteration.
    """

    def set_task(env: object, context: EnvContext) -> None:
        task_env: Any = next(
            (x for x in (env, getattr(env, "unwrapped", env)) if _has_tasks(x)), None
        )
        if task_env is None:
            raise UsageError(
                "env_task_fn needs environments with the methods get_task() and set_task(task), "
                f"got {env!r}. Set such a class with config.environment(...); environments by "
                "name that step as one vector environment cannot have tasks."
            )
        task = env_task_fn(result, task_env, context)
        if task != task_env.get_task():
            task_env.set_task(task)

    worker.foreach_env_with_context(set_task)


def _has_tasks(env: object) -> bool:
    return hasattr(env, "get_task") and hasattr(env, "set_task")
