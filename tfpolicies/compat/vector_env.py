"""`VectorEnv`: environments that step together, in RLlib's form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from tfpolicies.compat.utils import unset
from tfpolicies.envs.repairs import BREAKS, Repairs, check_observation, require_space
from tfpolicies.envs.vector import SeparateEnvironments, Step, SteppedTogether, all_anew
from tfpolicies.errors import EnvError

logger = logging.getLogger("tfpolicies")

Info = dict[str, Any]
Steps = tuple[list[Any], list[float], list[bool], list[bool], list[Info]]
"""Observations, rewards, terminated flags, truncated flags, infos."""


class VectorEnv(SteppedTogether):
    """Base class of N environments with a common step.

    A subclass overrides `vector_reset`, `reset_at` and `vector_step`. It chooses the number of
    environments; `num_envs_per_worker` has no effect. Samplers step it by one `vector_step`, and
    reset the environments whose episodes have ended by `reset_at`.

    If an environment failed and was re-created, a subclass may return an exception in place of its
    observation; its episode is dropped. With `restart_failed_sub_environments`, an environment that
    returns values outside its space is re-created by `restart_at`, and all are if a method raises.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        num_envs: N.
    """

    def __init__(
        self, observation_space: gym.Space, action_space: gym.Space, num_envs: int
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.num_envs = num_envs

    @staticmethod
    def vectorize_gym_envs(
        make_env: Callable[[int], gym.Env] | None = None,
        existing_envs: Sequence[gym.Env] | None = None,
        num_envs: int = 1,
        action_space: gym.Space | None = None,
        observation_space: gym.Space | None = None,
        restart_failed_sub_environments: bool = False,
    ) -> VectorEnv:
        """Returns a `VectorEnv` of Gymnasium environments.

        Args:
            make_env: makes the environment of an index; not needed if there are enough.
            existing_envs: existing environments, for the first indices.
            num_envs: N.
            action_space: of one environment, by default that of the first one.
            observation_space: of one environment, by default that of the first one.
            restart_failed_sub_environments: whether `make_env` re-creates an environment that
                raises.

        Raises:
            EnvError: if there are too few environments, and no `make_env`.
        """
        envs = list(existing_envs or ())
        if make_env is None and (len(envs) < num_envs or restart_failed_sub_environments):
            raise EnvError(
                f"make_env must be a function of the index for num_envs={num_envs}, {len(envs)} "
                f"existing environments and {restart_failed_sub_environments=}, got None."
            )
        makes = make_env if restart_failed_sub_environments else None
        while make_env is not None and len(envs) < num_envs:
            envs.append(make_env(len(envs)))
        return _PlainVectorEnv(
            observation_space or require_space(envs[0], "observation_space"),
            action_space or require_space(envs[0], "action_space"),
            envs,
            makes,
        )

    def vector_reset(
        self, *, seeds: list[int] | None = None, options: list[Info] | None = None
    ) -> tuple[list[Any], list[Info]]:
        """Starts new episodes in all environments; returns N observations and N infos.

        Args:
            seeds: one for each environment, or None.
            options: one for each environment, or None.
        """
        raise unset(self, "vector_reset(self, *, seeds=None, options=None)")

    def reset_at(
        self, index: int | None = None, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Any, Info]:
        """Starts a new episode of one environment; returns its observation and info.

        The observation is an exception if the reset failed, and the environment was re-created.
        """
        raise unset(self, "reset_at(self, index, *, seed=None, options=None)")

    def restart_at(self, index: int | None = None) -> None:
        """Re-creates one environment; `reset_at` is called next."""
        raise unset(self, "restart_at(self, index)")

    def vector_step(self, actions: list[Any]) -> Steps:
        """Steps all environments.

        Args:
            actions: N actions.

        Returns:
            N observations, rewards, terminated flags, truncated flags, and infos.
        """
        raise unset(self, "vector_step(self, actions)")

    def get_sub_environments(self) -> list[Any]:
        """Returns the N environments for direct access; [] if there are none."""
        return []

    def try_render_at(self, index: int | None = None) -> Any:
        """Returns the image that `render` of one environment returns; None if there is none."""
        envs = self.get_sub_environments()
        return envs[index or 0].render() if envs else None

    def close(self) -> None:
        """Closes the environments."""
        for env in self.get_sub_environments():
            env.close()

    def as_environments(self) -> SteppedByMethods:
        """Returns the adapter that steps these environments."""
        return SteppedByMethods(self)


class _PlainVectorEnv(VectorEnv):
    """A `VectorEnv` of Gymnasium environments.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        envs: the environments.
        make_env: re-creates the environment of an index after a failure; None: failures are
            raised.
    """

    def __init__(
        self,
        observation_space: gym.Space,
        action_space: gym.Space,
        envs: list[gym.Env],
        make_env: Callable[[int], gym.Env] | None,
    ) -> None:
        super().__init__(observation_space, action_space, len(envs))
        self.envs = envs
        self.make_env = make_env

    def vector_reset(
        self, *, seeds: list[int] | None = None, options: list[Info] | None = None
    ) -> tuple[list[Any], list[Info]]:
        nothing: list[Any] = [None] * self.num_envs
        given = zip(seeds or nothing, options or nothing, strict=True)
        found = [self.reset_at(i, seed=seed, options=o) for i, (seed, o) in enumerate(given)]
        return [obs for obs, _ in found], [info for _, info in found]

    def reset_at(
        self, index: int | None = None, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Any, Info]:
        try:
            return self.envs[index or 0].reset(seed=seed, options=options)
        except Exception as error:
            return self._mended(index or 0, error), {}

    def restart_at(self, index: int | None = None) -> None:
        if self.make_env is None:
            raise EnvError(
                f"Environment {index or 0} cannot be re-created: make_env is None. Give make_env."
            )
        try:
            self.envs[index or 0].close()
        except BREAKS as error:
            logger.warning("Environment %d failed in close(): %r", index or 0, error)
        self.envs[index or 0] = self.make_env(index or 0)

    def vector_step(self, actions: list[Any]) -> Steps:
        found = [self._step_at(index, action) for index, action in enumerate(actions)]
        obs, rewards, terminateds, truncateds, infos = map(list, zip(*found, strict=True))
        return obs, rewards, terminateds, truncateds, infos

    def _step_at(self, index: int, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        try:
            return self.envs[index].step(action)
        except Exception as error:
            return self._mended(index, error), 0.0, True, True, {}

    def _mended(self, index: int, error: Exception) -> Exception:
        """Re-creates a failed environment if that is enabled, and returns its error."""
        if self.make_env is None:
            raise error
        self.restart_at(index)
        return error

    def get_sub_environments(self) -> list[Any]:
        return self.envs


class SteppedByMethods(SeparateEnvironments):
    """Steps a `VectorEnv`, as the samplers' environments.

    Args:
        env: a `VectorEnv`.

    Raises:
        EnvError: if it lacks a space; by `reset`, if an observation is not of its space.
    """

    def __init__(self, env: VectorEnv) -> None:
        observation_space = require_space(env, "observation_space")
        super().__init__(observation_space, require_space(env, "action_space"), env.num_envs)
        self.env = env
        self._step = env.vector_step

    def guard(self, repairs: Repairs) -> None:
        super().guard(repairs)
        self._watch()

    def _watch(self) -> None:
        self._step = self.repairs.watched(0, "vector_step", self.env.vector_step)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        try:
            return self._first(seeds)
        except BREAKS as error:
            self.repairs.broke(0, "vector_reset", error)
            return self._all_renewed()

    def _first(self, seeds: Sequence[int] | None = None) -> Any:
        """Starts new episodes; returns their first observations, batched."""
        reset = self.env.vector_reset
        found, _ = reset() if seeds is None else reset(seeds=list(seeds))
        return self._stack([*map(self._checked_first, range(self.num_envs), found)])

    def _checked_first(self, index: int, obs: Any) -> Any:
        """Returns the first observation of an environment, whose reset may have failed."""
        if isinstance(obs, Exception):
            self._take_down(index, "vector_reset", obs)
            return self._first_observation(index)
        what = f"observation that {self.repairs.call(index, 'vector_reset')} returned"
        check_observation(self.observation_space, obs, what)
        return obs

    def _all_renewed(self) -> Any:
        """Re-creates the whole `VectorEnv`; returns its first observations."""

        def start(env: VectorEnv) -> Any:
            self.env = env
            self._watch()
            return self._first()

        return self.repairs.renewed(0, self.env, start)[1]

    def _reset_at(self, index: int, seed: int | None) -> Any:
        while True:
            found = self.env.reset_at(index, seed=seed)
            if not (isinstance(found, tuple) and found and isinstance(found[0], Exception)):
                return found
            self._take_down(index, "reset_at", found[0])

    def step(self, actions: Any) -> Step:
        rows = self._rows(actions)
        try:
            results = list(zip(*self._step(rows), strict=True))
        except BREAKS as error:
            error = self.repairs.broke(0, "vector_step", error)
            return all_anew(self.num_envs, error, self._all_renewed())
        return self._made_of(results) or self._repaired(results, rows, {})

    def _mended(self, results: Sequence[Any]) -> dict[int, Exception]:
        broken = {i: row[0] for i, row in enumerate(results) if isinstance(row[0], Exception)}
        for index, error in broken.items():
            self._take_down(index, "vector_step", error)
        return broken

    def _take_down(self, index: int, method: str, error: Exception) -> None:
        """Records that an environment failed, and that the `VectorEnv` has re-created it."""
        self.repairs.mended(index, method, error)
        self._announce(index)

    def _renewed(self, index: int) -> Any:
        self.env.restart_at(index)
        self._announce(index)
        return self._reset(index)

    def _announce(self, index: int) -> None:
        if envs := self.env.get_sub_environments():
            self.repairs.on_made(envs[index], index)

    def get_sub_environments(self) -> list[Any]:
        return list(self.env.get_sub_environments() or [self.env])

    def close(self) -> None:
        self.env.close()
