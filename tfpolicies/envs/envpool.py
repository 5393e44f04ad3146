"""EnvPool's tasks by name: `"envpool:Pong-v5"`. EnvPool itself steps them together."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from tfpolicies.base.type_aliases import Structure
from tfpolicies.envs.vector_adapters import GymVectorEnvAdapter, StepResult, VectorResult
from tfpolicies.errors import EnvError, suggest_similar_names

PREFIX = "envpool:"
_RESERVED_SETTINGS = {
    "num_envs": "num_envs_per_worker says how many environments step together",
    "batch_size": "all environments step together",
    "env_type": "the environments are Gymnasium's",
    "seed": "the config's seed, or that of an evaluation, is used",
}
_SEED_COUNT = 2**31


def is_envpool_name(name: str) -> bool:
    """Returns True if a name is that of a task of EnvPool.

    >>> is_envpool_name("envpool:Pong-v5"), is_envpool_name("Pong-v5")
    (True, False)
    """
    return name.startswith(PREFIX)


def get_task(name: str) -> str:
    """Returns the EnvPool task of a name."""
    task = name.removeprefix(PREFIX)
    tasks = list_tasks()
    if task not in tasks:
        raise EnvError(
            f"EnvPool has no task {task!r}.{suggest_similar_names(task, tasks)} Its tasks are "
            "listed by `envpool.list_all_envs()`."
        )
    return task


def list_tasks() -> list[str]:
    """Returns the tasks of EnvPool, without the prefix of their names."""
    return list(_import_envpool().list_all_envs())


def make_envpool_environments(
    name: str, num_envs: int, settings: Mapping[str, Any]
) -> EnvPoolAdapter:
    """Makes environments of a task.

    Args:
        name: `"envpool:<task>"`.
        num_envs: how many.
        settings: EnvPool's settings, such as `{"stack_num": 4}`.
    """
    task = get_task(name)
    for key, why in _RESERVED_SETTINGS.items():
        if key in settings:
            raise EnvError(f"env_config of {name!r} cannot have {key!r}: {why}. Leave it out.")

    def make(seed: int) -> VectorEnv:
        kwargs = {"env_type": "gymnasium", "num_envs": num_envs, "seed": seed, **settings}
        try:
            env: VectorEnv = _import_envpool().make(task, **kwargs)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise EnvError(
                f"EnvPool does not make {task!r} with {dict(settings)}: {error}. env_config has "
                "the settings of `envpool.make`."
            ) from error
        return env

    return EnvPoolAdapter(make, zero_on_loss=bool(settings.get("zero_discount_on_life_loss")))


def _import_envpool() -> Any:
    try:
        return importlib.import_module("envpool")
    except ImportError as error:
        raise EnvError(
            f"Names like '{PREFIX}Pong-v5' need the package envpool: {error}. Install it: "
            "pip install envpool."
        ) from error


class EnvPoolAdapter(GymVectorEnvAdapter):
    """Environments of EnvPool, which takes its seed when made: a reset with seeds re-creates it.

    Args:
        make: `f(seed)`; environment i gets the seed `seed + i`.
        zero_on_loss: whether nothing counts for learning that comes after the loss of a life.
    """

    def __init__(self, make: Callable[[int], VectorEnv], *, zero_on_loss: bool) -> None:
        super().__init__(make(0))
        self._make_env = make
        self._zero_on_loss = zero_on_loss
        self._lives = np.zeros(self.num_envs, np.int64)
        self.env_factory = lambda index: make(0)

    def _reset(self, seeds: Sequence[int] | None) -> Any:
        self._lives = np.zeros(self.num_envs, np.int64)
        if seeds is not None:
            self.env.close()
            self._use_env(self._make_env(seeds[0] % _SEED_COUNT))
        return super()._reset(None)

    def _make_step(self, result: VectorResult, actions: Structure) -> StepResult:
        step = super()._make_step(result, actions)
        if not self._zero_on_loss:
            return step
        lives = step.infos["lives"]
        lost = (lives < self._lives) & ~(step.terminateds | step.truncateds)
        self._lives = lives.copy()
        return step._replace(life_lost=lost if lost.any() else None)
