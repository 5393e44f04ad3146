"""`VectorEnv`: environments that step together, as RLlib's users write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from tfpolicies.compat.utils import batch, unset
from tfpolicies.envs.vector import single_rows


class VectorEnv(gym.vector.VectorEnv):
    """N environments behind one step: a vector environment of Gymnasium made of four methods.

    A subclass overrides `vector_reset`, `reset_at` and `vector_step`. It decides the number of
    environments, whatever `num_envs_per_worker` is.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        num_envs: N.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self, observation_space: gym.Space, action_space: gym.Space, num_envs: int
    ) -> None:
        self.observation_space = self.single_observation_space = observation_space
        self.action_space = self.single_action_space = action_space
        self.num_envs = num_envs

    def vector_reset(
        self, *, seeds: list[int] | None = None, options: list[dict[str, Any]] | None = None
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """Starts new episodes everywhere; returns N observations and N infos.

        Args:
            seeds: one for each environment, or None.
            options: likewise.
        """
        raise unset(self, "vector_reset(self, *, seeds=None, options=None)")

    def reset_at(
        self, index: int, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts a new episode of one environment; returns its observation and info."""
        raise unset(self, "reset_at(self, index, *, seed=None, options=None)")

    def vector_step(
        self, actions: list[Any]
    ) -> tuple[list[Any], list[float], list[bool], list[bool], list[dict[str, Any]]]:
        """Steps all environments.

        Args:
            actions: N actions.

        Returns:
            N observations, rewards, whether episodes terminated, whether they were truncated, and
            infos.
        """
        raise unset(self, "vector_step(self, actions)")

    def get_sub_environments(self) -> list[Any]:
        """Returns the N environments, for those who want to talk to them; [] if there are none."""
        return []

    def __getattr__(self, name: str) -> Any:
        """Returns the environments as `envs`, where Gymnasium's vector environments have them."""
        if name == "envs":
            return self.get_sub_environments()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the observations that `vector_reset` gives, batched, and its infos."""
        count = self.num_envs
        seeds = [seed + i for i in range(count)] if isinstance(seed, int) else seed
        obs, infos = self.vector_reset(
            seeds=None if seeds is None else list(seeds),
            options=None if options is None else [options] * count,
        )
        return batch(obs), self._joined(infos)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Does a `vector_step`, and `reset_at` where an episode ended."""
        reached, rewards, terminateds, truncateds, infos = self.vector_step(single_rows(actions))
        obs, told = list(reached), self._joined(infos)
        ended, cut = np.array(terminateds, bool), np.array(truncateds, bool)
        if (ended | cut).any():
            told["final_obs"] = np.full(self.num_envs, None, object)
        for index in np.flatnonzero(ended | cut).tolist():
            told["final_obs"][index] = obs[index]
            obs[index], _ = self.reset_at(index)
        return batch(obs), np.array(rewards, np.float64), ended, cut, told

    def _joined(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for index, info in enumerate(infos):
            joined = self._add_info(joined, dict(info), index)
        return joined
