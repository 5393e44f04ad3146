"""`VectorEnv`: environments that step together, in RLlib's form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from tfpolicies.compat.utils import make_missing_method_error
from tfpolicies.envs.fault_tolerance import (
    ENV_FAILURES,
    EnvSupervisor,
    check_observation,
    require_space,
)
from tfpolicies.envs.vector_adapters import (
    CustomVectorEnv,
    PerEnvResetAdapter,
    StepResult,
    make_all_failed_step,
)
from tfpolicies.errors import EnvError

logger = logging.getLogger("tfpolicies")

Info = dict[str, Any]
Steps = tuple[list[Any], list[float], list[bool], list[bool], list[Info]]
"""Observations, rewards, terminated flags, truncated flags, infos."""


class VectorEnv(CustomVectorEnv):
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
        recreate = make_env if restart_failed_sub_environments else None
        while make_env is not None and len(envs) < num_envs:
            envs.append(make_env(len(envs)))
        return _GymVectorEnv(
            observation_space or require_space(envs[0], "observation_space"),
            action_space or require_space(envs[0], "action_space"),
            envs,
            recreate,
        )

    def vector_reset(
        self, *, seeds: list[int] | None = None, options: list[Info] | None = None
    ) -> tuple[list[Any], list[Info]]:
        """Starts new episodes in all environments; returns N observations and N infos.

        Args:
            seeds: one for each environment, or None.
            options: one for each environment, or None.
        """
        raise make_missing_method_error(self, "vector_reset(self, *, seeds=None, options=None)")

    def reset_at(
        self, index: int | None = None, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Any, Info]:
        """Starts a new episode of one environment; returns its observation and info.

        The observation is an exception if the reset failed, and the environment was re-created.
        """
        raise make_missing_method_error(self, "reset_at(self, index, *, seed=None, options=None)")

    def restart_at(self, index: int | None = None) -> None:
        """Re-creates one environment; `reset_at` is called next."""
        raise make_missing_method_error(self, "restart_at(self, index)")

    def vector_step(self, actions: list[Any]) -> Steps:
        """Steps all environments.

        Args:
            actions: N actions.

        Returns:
            N observations, rewards, terminated flags, truncated flags, and infos.
        """
        raise make_missing_method_error(self, "vector_step(self, actions)")

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

    def make_adapter(self) -> VectorEnvStepper:
        """Returns the adapter that steps these environments."""
        return VectorEnvStepper(self)


class _GymVectorEnv(VectorEnv):
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
        nones: list[Any] = [None] * self.num_envs
        arguments = zip(seeds or nones, options or nones, strict=True)
        results = [self.reset_at(i, seed=seed, options=o) for i, (seed, o) in enumerate(arguments)]
        return [obs for obs, _ in results], [info for _, info in results]

    def reset_at(
        self, index: int | None = None, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Any, Info]:
        try:
            return self.envs[index or 0].reset(seed=seed, options=options)
        except Exception as error:
            return self._recreate_failed(index or 0, error), {}

    def restart_at(self, index: int | None = None) -> None:
        if self.make_env is None:
            raise EnvError(
                f"Environment {index or 0} cannot be re-created: make_env is None. Give make_env."
            )
        try:
            self.envs[index or 0].close()
        except ENV_FAILURES as error:
            logger.warning("Environment %d failed in close(): %r", index or 0, error)
        self.envs[index or 0] = self.make_env(index or 0)

    def vector_step(self, actions: list[Any]) -> Steps:
        results = [self._step_at(index, action) for index, action in enumerate(actions)]
        obs, rewards, terminateds, truncateds, infos = map(list, zip(*results, strict=True))
        return obs, rewards, terminateds, truncateds, infos

    def _step_at(self, index: int, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        try:
            return self.envs[index].step(action)
        except Exception as error:
            return self._recreate_failed(index, error), 0.0, True, True, {}

    def _recreate_failed(self, index: int, error: Exception) -> Exception:
        """Re-creates a failed environment if that is enabled, and returns its error."""
        if self.make_env is None:
            raise error
        self.restart_at(index)
        return error

    def get_sub_environments(self) -> list[Any]:
        return self.envs


class VectorEnvStepper(PerEnvResetAdapter):
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

    def set_supervisor(self, supervisor: EnvSupervisor) -> None:
        super().set_supervisor(supervisor)
        self._wrap_step()

    def _wrap_step(self) -> None:
        self._step = self.supervisor.watch(0, "vector_step", self.env.vector_step)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        try:
            return self._reset_all(seeds)
        except ENV_FAILURES as error:
            self.supervisor.on_failure(0, "vector_reset", error)
            return self._recreate_all()

    def _reset_all(self, seeds: Sequence[int] | None = None) -> Any:
        """Starts new episodes; returns their first observations, batched."""
        reset = self.env.vector_reset
        observations, _ = reset() if seeds is None else reset(seeds=list(seeds))
        return self._stack(
            [*map(self._check_first_observation, range(self.num_envs), observations)]
        )

    def _check_first_observation(self, index: int, obs: Any) -> Any:
        """Returns the first observation of an environment, whose reset may have failed."""
        if isinstance(obs, Exception):
            self._record_restart(index, "vector_reset", obs)
            return self._get_first_observation(index)
        description = (
            f"observation that {self.supervisor.describe_call(index, 'vector_reset')} returned"
        )
        check_observation(self.observation_space, obs, description)
        return obs

    def _recreate_all(self) -> Any:
        """Re-creates the whole `VectorEnv`; returns its first observations."""

        def start(env: VectorEnv) -> Any:
            self.env = env
            self._wrap_step()
            return self._reset_all()

        return self.supervisor.recreate(0, self.env, start)[1]

    def _reset_at(self, index: int, seed: int | None) -> Any:
        while True:
            result = self.env.reset_at(index, seed=seed)
            if not (isinstance(result, tuple) and result and isinstance(result[0], Exception)):
                return result
            self._record_restart(index, "reset_at", result[0])

    def step(self, actions: Any) -> StepResult:
        rows = self._split_actions(actions)
        try:
            results = list(zip(*self._step(rows), strict=True))
        except ENV_FAILURES as error:
            error = self.supervisor.on_failure(0, "vector_step", error)
            return make_all_failed_step(self.num_envs, error, self._recreate_all())
        return self._make_step(results) or self._repair_step(results, rows, {})

    def _find_self_restarted(self, results: Sequence[Any]) -> dict[int, Exception]:
        broken = {i: row[0] for i, row in enumerate(results) if isinstance(row[0], Exception)}
        for index, error in broken.items():
            self._record_restart(index, "vector_step", error)
        return broken

    def _record_restart(self, index: int, method: str, error: Exception) -> None:
        """Records that an environment failed, and that the `VectorEnv` has re-created it."""
        self.supervisor.on_self_restart(index, method, error)
        self._notify_created(index)

    def _recreate(self, index: int) -> Any:
        self.env.restart_at(index)
        self._notify_created(index)
        return self._reset(index)

    def _notify_created(self, index: int) -> None:
        if envs := self.env.get_sub_environments():
            self.supervisor.on_recreated(envs[index], index)

    def get_sub_environments(self) -> list[Any]:
        return list(self.env.get_sub_environments() or [self.env])

    def close(self) -> None:
        self.env.close()
