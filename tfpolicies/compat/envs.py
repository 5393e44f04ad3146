"""RLlib's environment names: `register_env`, and classes that ported scripts use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym

from tfpolicies.compat.utils import make_missing_method_error
from tfpolicies.envs.env_registry import register_environment
from tfpolicies.envs.multi_agent_env import MultiAgentEnv, make_multi_agent
from tfpolicies.envs.pettingzoo import pettingzoo_env
from tfpolicies.envs.vector_adapters import VectorEnvAdapter
from tfpolicies.rollout.episode import Episode

ENV_STATE = "state"
"""The key of the global state in observations of cooperating agents."""

BaseEnv = VectorEnvAdapter
EpisodeV2 = Episode
TaskType = Any
MultiAgentCartPole: type[MultiAgentEnv] = make_multi_agent("CartPole-v1")


def register_env(name: str, env_creator: Callable[[Any], Any]) -> None:
    """Registers an environment creator under a name for `config.environment(name)`.

    Args:
        name: a non-empty text.
        env_creator: `f(env_context)`; `env_context` is the `env_config` with the worker's
            index. It may return a `gymnasium.Env`, a `MultiAgentEnv` or a PettingZoo environment.

    Raises:
        EnvError: if the name is not a text or the creator cannot be called.
    """
    register_environment(name, env_creator)


class TaskSettableEnv(gym.Env):
    """A base class for environments with several tasks; the config's `env_task_fn` sets them."""

    def sample_tasks(self, n_tasks: int) -> list[Any]:
        """Returns tasks drawn at random."""
        raise make_missing_method_error(self, "sample_tasks(self, n_tasks)")

    def set_task(self, task: Any) -> None:
        """Sets the task, from the next episode on."""
        raise make_missing_method_error(self, "set_task(self, task)")

    def get_task(self) -> Any:
        """Returns the current task."""
        raise make_missing_method_error(self, "get_task(self)")


def PettingZooEnv(env: Any) -> MultiAgentEnv:
    """Returns an environment of PettingZoo, turn-based or parallel, as a `MultiAgentEnv`.

    Observations keep their names: those of classic games are `{"observation": ..., "action_mask":
    ...}`, and a custom model reads the mask. `config.environment` also accepts PettingZoo
    environments directly; then every policy masks its actions.
    """
    wrapped: Any = pettingzoo_env(env)
    return type(wrapped)(wrapped.env, renames_obs=False)


ParallelPettingZooEnv = PettingZooEnv
