"""Adapters that step many environments at once, in any autoreset mode.

There are adapters for plain `gymnasium.Env` instances, stepped one after the other; for Gymnasium
vector environments in any of their three autoreset modes, including EnvPool; and for those of
other APIs that are `CustomVectorEnv`. All of them return the same `StepResult`:

* `obs` are the observations for which the next actions are chosen.
* `reset_only[i]` says that environment i was only being reset in this step (Gymnasium's NEXT_STEP
  mode): no transition took place.
* `failed` has the environments that failed in this step and were re-created: their running episodes
  must be dropped, and `obs` shows their next ones.
* `life_lost` has the environments in which a life was lost, if that ends the episode only for
  learning.
* `final_obs` has the last observations of episodes that ended in this step, if `obs` already shows
  the next episode. In NEXT_STEP mode `obs` itself is the last observation.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv

from tfpolicies.base.finite_checks import require_real
from tfpolicies.base.type_aliases import Structure
from tfpolicies.envs.autoreset import (
    AutoresetModeDetector,
    get_declared_mode,
    get_final_observations,
)
from tfpolicies.envs.episode_state import (
    get_episode_state,
    get_layer_states,
    has_episode_state,
    set_episode_state,
    set_layer_states,
)
from tfpolicies.envs.fault_tolerance import (
    ENV_FAILURES,
    EnvCopies,
    EnvSupervisor,
    are_finite_numbers,
    are_flags,
    as_flags,
    check_accepts_seed,
    check_flag,
    check_observation,
    check_reward,
    make_obs_check,
    require_space,
)
from tfpolicies.errors import EnvError

Failures: TypeAlias = dict[int, Exception]
Infos: TypeAlias = Mapping[str, Any]
VectorResult: TypeAlias = tuple[Structure, np.ndarray, np.ndarray, np.ndarray, Infos]
"""Result of `VectorEnv.step`."""


class StepResult(NamedTuple):
    """Result of one step of N environments."""

    obs: Any  # batched as the observation space is nested, [N, ...]
    rewards: np.ndarray  # [N]
    terminateds: np.ndarray  # bool [N]
    truncateds: np.ndarray  # bool [N]
    infos: Any  # a list of dicts, or a vector environment's dict
    reset_only: np.ndarray | None  # bool [N]; None: all are transitions
    final_obs: tuple[np.ndarray, Any] | None  # indices [K] and their last observations [K, ...]
    failed: Mapping[int, Exception] | None = None  # re-created environments; also in `reset_only`
    # Bool [N]: continues, but later steps do not count for learning
    life_lost: np.ndarray | None = None


class VectorEnvAdapter(abc.ABC):
    """N environments that step together.

    Attributes:
        num_envs: N.
        observation_space: of one environment.
        action_space: of one environment.
        env_factory: re-creates the environment of an index (index 0 of a vector environment
            re-creates all of them); None if that is not possible.
        connector_ns: nanoseconds that connectors took in all steps: for actions, for observations.
    """

    num_envs: int
    observation_space: Space
    action_space: Space
    env_factory: Callable[[int], Any] | None = None
    connector_ns: tuple[int, int] = (0, 0)
    supervisor = EnvSupervisor()

    def set_supervisor(self, supervisor: EnvSupervisor) -> None:
        """Sets the supervisor that handles failures of the environments."""
        self.supervisor = supervisor

    @abc.abstractmethod
    def reset(self, seeds: Sequence[int] | None) -> Any:
        """Starts new episodes everywhere; returns the observations, batched."""

    @abc.abstractmethod
    def step(self, actions: Structure) -> StepResult:
        """Steps all environments by actions `[N, ...]` of the action space."""

    @abc.abstractmethod
    def get_sub_environments(self) -> list[Any]:
        """Returns the environments, by index.

        For a vector environment without a list of its parts (`envs`), the list has only itself.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closes all environments."""

    def get_state(self) -> list[Any] | None:
        """Returns the state of each environment, or None if one cannot return its whole state.

        Raises:
            EnvError: if the `get_state` of an environment fails.
        """
        states = [get_layer_states(env) for env in self.get_sub_environments()]
        return None if any(state is None for state in states) else states

    def set_state(self, states: Sequence[Any]) -> None:
        """Restores a result of `get_state`.

        Raises:
            EnvError: if the `set_state` of an environment fails.
        """
        for env, state in zip(self.get_sub_environments(), states, strict=True):
            set_layer_states(env, state)


class CustomVectorEnv(abc.ABC):
    """N environments of another API that provide their adapter; creators may return one.

    Attributes:
        num_envs: N.
    """

    num_envs: int

    @abc.abstractmethod
    def make_adapter(self) -> VectorEnvAdapter:
        """Returns the adapter that steps these environments."""

    @abc.abstractmethod
    def get_sub_environments(self) -> list[Any]:
        """Returns the environments, by index; or []."""


_NO_FAILURES: Mapping[int, Exception] = {}


class PerEnvResetAdapter(VectorEnvAdapter):
    """Environments that are reset one by one, each when its episode has ended.

    A subclass steps them; `_make_step` makes a step of the results. If they are invalid,
    `_repair_step` replaces the failed environments.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        num_envs: N.
    """

    def __init__(self, observation_space: Space, action_space: Space, num_envs: int) -> None:
        self.num_envs = num_envs
        self.observation_space = observation_space
        self.action_space = action_space
        self._stack = _make_stacker(observation_space, num_envs)
        self._is_valid_obs = make_obs_check(observation_space)
        self._discrete_dtype = (
            action_space.dtype if isinstance(action_space, gym.spaces.Discrete) else None
        )
        self._copy_actions = make_action_copier(action_space)

    @abc.abstractmethod
    def _reset_at(self, index: int, seed: int | None) -> Any:
        """Starts a new episode of an environment; returns the result of its `reset`."""

    @abc.abstractmethod
    def _recreate(self, index: int) -> Any:
        """Replaces an environment that failed; returns the first observation of the new one."""

    def _find_self_restarted(self, results: Sequence[Any]) -> Failures:
        """Returns the environments that report a failure and have re-created themselves."""
        return {}

    def _reset(self, index: int, seed: int | None = None) -> Any:
        try:
            return self._get_first_observation(index, seed)
        except ENV_FAILURES as error:
            self.supervisor.on_failure(index, f"reset(seed={seed})", error)
            return self._recreate(index)

    def _get_first_observation(self, index: int, seed: int | None = None) -> Any:
        call = self.supervisor.describe_call(index, "reset")
        result = self._reset_at(index, seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvError(
                f"{call} must return a pair (observation, info), got {result!r:.200}. Write "
                "`return observation, {}`."
            )
        check_observation(self.observation_space, result[0], f"observation that {call} gave")
        return result[0]

    def _split_actions(self, actions: Any) -> list[Any]:
        """Splits actions into single ones, which the environments may keep."""
        # `tolist` is faster than indexing an array of ints N times.
        if self._discrete_dtype is not None:
            return actions.astype(self._discrete_dtype, copy=False).tolist()
        return split_batch(self._copy_actions(actions))

    def _make_step(
        self, results: Sequence[Any], failed: Mapping[int, Exception] = _NO_FAILURES
    ) -> Any:
        """Makes a step of the results, and resets ended environments; None if one is invalid."""
        try:
            reached, rewards, terminateds, truncateds, infos = zip(*results, strict=True)
            obs = list(reached)
            reward_array = np.array(rewards, np.float32)
            is_valid = reward_array.ndim == 1 and math.isfinite(sum(rewards))
            is_valid = is_valid and are_flags(terminateds) and are_flags(truncateds)
            stacked = self._stack(obs)
        except (TypeError, ValueError, KeyError, IndexError):
            return None
        if not (is_valid and self._is_valid_obs(stacked)):
            return None
        final_obs = reset_only = None
        if any(terminateds) or any(truncateds):
            final_obs = self._reset_ended(obs, terminateds, truncateds)
            stacked = self._stack(obs)
        if failed:
            reset_only = np.isin(np.arange(self.num_envs), list(failed))
        elif self.supervisor.failures:
            self.supervisor.on_step()
        flags = np.array(terminateds, bool), np.array(truncateds, bool)
        return StepResult(
            stacked, reward_array, *flags, infos, reset_only, final_obs, failed or None
        )

    def _repair_step(
        self, results: list[Any], actions: Sequence[Any], failed: Failures
    ) -> StepResult:
        """Replaces the environments that failed; returns the step."""
        self_restarted = {} if failed else self._find_self_restarted(results)
        for i, result in enumerate(results):
            if i in failed or i in self_restarted:
                continue
            try:
                self._check_result(i, result, actions[i])
            except EnvError as error:
                self.supervisor.on_failure(i, f"step({actions[i]!r})", error)
                failed[i] = error
        for i in set(range(self.num_envs)).difference(failed, self_restarted):
            self.supervisor.on_step(i)
        for i in (*failed, *self_restarted):
            first_obs = self._reset(i) if i in self_restarted else self._recreate(i)
            results[i] = first_obs, 0.0, False, False, {}
        failed |= self_restarted
        step = self._make_step(results, failed)
        if step is None:
            raise EnvError(f"The results of a step cannot be stacked: {results!r:.500}.")
        return step

    def _check_result(self, index: int, result: Sequence[Any], action: Structure) -> None:
        call = self.supervisor.describe_call(index, "step")
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(
                f"{call} must return (observation, reward, terminated, truncated, info), got "
                f"{result!r:.200}."
            )
        check_observation(self.observation_space, result[0], f"observation that {call} gave")
        check_reward(result[1], call, action)
        for name, flag in zip(("terminated", "truncated"), result[2:4], strict=True):
            check_flag(flag, name, call)

    def _reset_ended(
        self, obs: list[Any], terminateds: Sequence[bool], truncateds: Sequence[bool]
    ) -> tuple[np.ndarray, Any]:
        """Replaces last observations in `obs` by first ones; returns the last ones."""
        ended = [i for i in range(self.num_envs) if terminateds[i] or truncateds[i]]
        last_obs = _make_stacker(self.observation_space, len(ended))([obs[i] for i in ended])
        for i in ended:
            self.supervisor.on_episode_done(i)
            obs[i] = self._reset(i)
        return np.array(ended), last_obs


class SyncEnvAdapter(EnvCopies, PerEnvResetAdapter):
    """Plain `gymnasium.Env` instances, stepped one after the other and reset at once when done.

    Args:
        envs: the instances; they share one observation and action space.

    Raises:
        EnvError: if their spaces differ, or (by `reset`) if an observation is not of its space.
    """

    def __init__(self, envs: Sequence[gym.Env]) -> None:
        self.envs = list(envs)
        observation_space = require_space(self.envs[0], "observation_space")
        action_space = require_space(self.envs[0], "action_space")
        super().__init__(observation_space, action_space, len(self.envs))
        for i, env in enumerate(self.envs):
            require_same_spaces(i, env, self)
        self._watch_calls()

    def reset(self, seeds: Sequence[int] | None) -> Any:
        env_seeds = [None] * self.num_envs if seeds is None else list(seeds)
        return self._stack([self._reset(i, seed) for i, seed in enumerate(env_seeds)])

    def _reset_at(self, index: int, seed: int | None) -> Any:
        try:
            return self._resets[index](seed=seed)
        except TypeError:
            check_accepts_seed(
                self.envs[index].reset, self.supervisor.describe_call(index, "reset")
            )
            raise

    def _recreate(self, index: int) -> Any:
        return self._replace_copy(index, self._get_first_observation)

    def step(self, actions: Any) -> StepResult:
        discrete_dtype = self._discrete_dtype  # not `_rows`: a call costs more than the branch
        rows = (
            self._split_actions(actions)
            if discrete_dtype is None
            else actions.astype(discrete_dtype, copy=False).tolist()
        )
        results: list[Any] = []
        failed: Failures = {}
        for step, action in zip(self._steps, rows, strict=True):
            try:
                results.append(step(action))
            except ENV_FAILURES as error:
                index = len(results)
                failed[index] = self.supervisor.on_failure(index, f"step({action!r})", error)
                results.append(None)
        result = None if failed else self._make_step(results)
        return result or self._repair_step(results, rows, failed)


def _make_stacker(space: Space, count: int) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that copies `count` observations into a batch."""
    if isinstance(space, gym.spaces.Dict):
        parts = {key: _make_stacker(sub, count) for key, sub in space.items()}
        return lambda rows: {k: stack([row[k] for row in rows]) for k, stack in parts.items()}
    if isinstance(space, gym.spaces.Tuple):
        subs = [_make_stacker(sub, count) for sub in space]
        return lambda rows: tuple(stack([row[i] for row in rows]) for i, stack in enumerate(subs))
    dtype = np.float32 if space.dtype == np.float64 else space.dtype
    shape = (count, *(space.shape or ()))

    row_shape = shape[1:]

    def stack(rows: Sequence[Any]) -> np.ndarray:
        if not row_shape:
            return require_real(np.array(rows)).astype(dtype, copy=False).reshape(shape)
        try:
            shapes = [row.shape for row in rows]
        except AttributeError:  # lists
            shapes = [np.shape(row) for row in rows]
        if shapes.count(row_shape) != len(shapes):
            raise ValueError(f"{shapes} are not all {row_shape}")
        try:
            return np.concatenate(rows, dtype=dtype, casting="same_kind").reshape(shape)
        except TypeError:  # floats for integers; or text, which "unsafe" would read as numbers
            return require_real(np.concatenate(rows)).astype(dtype).reshape(shape)

    return stack


_NEXT_STEP_MODES = (AutoresetMode.NEXT_STEP, None)
"""Modes in which the step after an episode's end resets; None: the mode is not known yet."""


class GymVectorEnvAdapter(VectorEnvAdapter):
    """A Gymnasium vector environment in any autoreset mode, EnvPool included.

    Args:
        env: the vector environment.

    Attributes:
        mode: its autoreset mode; None until its first episode has ended, if its metadata has none.

    Raises:
        EnvError: if its metadata has an unknown mode; by `step`, if `AutoresetModeDetector` does
            not find it.
    """

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.observation_space = require_space(env, "single_observation_space")
        self.action_space = require_space(env, "single_action_space")
        self.mode = get_declared_mode(env)
        self._mode_detector = AutoresetModeDetector(env) if self.mode is None else None
        self._ended: np.ndarray | None = None  # environments whose episode the last step ended
        self._is_valid_obs = make_obs_check(self.observation_space)
        self._copy_actions = make_action_copier(self.action_space)
        self._step = env.step

    def set_supervisor(self, supervisor: EnvSupervisor) -> None:
        super().set_supervisor(supervisor)
        self._use_env(self.env)

    def _use_env(self, env: VectorEnv) -> None:
        self.env = env
        self._step = self.supervisor.watch(0, "step", env.step)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        try:
            return self._reset(seeds)
        except ENV_FAILURES as error:
            self.supervisor.on_failure(0, "reset", error)
            return self._recreate()

    def _reset(self, seeds: Sequence[int] | None) -> Any:
        self._ended = None
        if self._mode_detector is not None:
            self._mode_detector.reset()
        if seeds is None:
            return self.env.reset()[0]
        # Seeds for each environment, one seed for all, or (EnvPool) seeded when made.
        tries: list[Any] = [list(seeds), seeds[0]]
        for seed in tries:
            with contextlib.suppress(TypeError, gym.error.Error):
                return self.env.reset(seed=seed)[0]
        return self.env.reset()[0]

    def _recreate(self) -> Any:
        """Re-creates the whole vector environment; returns its first observations."""

        def start(env: VectorEnv) -> Any:
            self._use_env(env)
            return self._reset(None)

        return self.supervisor.recreate(0, self.env, start)[1]

    def step(self, actions: Structure) -> StepResult:
        actions = self._copy_actions(actions)
        try:
            return self._make_step(self._step(actions), actions)
        except ENV_FAILURES as error:
            return make_all_failed_step(
                self.num_envs, self.supervisor.on_failure(0, "step", error), self._recreate()
            )

    def _make_step(self, result: VectorResult, actions: Structure) -> StepResult:
        obs, rewards, terminateds, truncateds, infos = result
        terminated_flags, truncated_flags = as_flags(terminateds), as_flags(truncateds)
        if (
            terminated_flags is None
            or truncated_flags is None
            or not (are_finite_numbers(rewards) and self._is_valid_obs(obs))
        ):
            self._raise_invalid_result(result, actions)
        if self.supervisor.failures:
            self.supervisor.on_step()
        if self._mode_detector is not None:
            self.mode = self._mode_detector.detect(
                rewards, terminated_flags | truncated_flags, self._ended, infos
            )
            self._mode_detector = self._mode_detector if self.mode is None else None
        reset_only, final_obs, self._ended = self._ended, None, None
        if (
            1 in terminated_flags.tobytes() or 1 in truncated_flags.tobytes()
        ):  # many times faster than `any`
            ended = terminated_flags | truncated_flags
            self.supervisor.on_episode_done(0, ended.tobytes().count(1))
            if self.mode in _NEXT_STEP_MODES:
                self._ended = ended
            else:
                obs, final_obs = self._split_final_obs(obs, ended, infos)
        return StepResult(
            obs, rewards, terminated_flags, truncated_flags, infos, reset_only, final_obs
        )

    def _raise_invalid_result(self, result: VectorResult, actions: Structure) -> NoReturn:
        obs, rewards, terminateds, truncateds, _ = result
        for i in range(self.num_envs):
            row = _select_rows(self.observation_space, obs, i)
            check_observation(self.observation_space, row, f"observation of environment {i}")
            check_reward(rewards[i], f"`step` of environment {i}", split_batch(actions)[i])
            for name, flags in (("terminated", terminateds), ("truncated", truncateds)):
                check_flag(flags[i], name, f"`step` of environment {i}")
        raise AssertionError("an invalid result passed all checks")

    def _split_final_obs(self, obs: Structure, ended: np.ndarray, infos: Infos) -> tuple[Any, Any]:
        indices = np.flatnonzero(ended)
        if self.mode is AutoresetMode.DISABLED:
            selected = _select_rows(self.observation_space, obs, indices)
            obs, _ = self.env.reset(options={"reset_mask": ended})
            return obs, (indices, selected)
        last_obs = get_final_observations(infos, indices.tolist())
        if last_obs is None:
            raise EnvError(
                f"{self.env} resets in the same step, but its info has no 'final_obs', so the last "
                "observations of its episodes are lost. Use AutoresetMode.NEXT_STEP."
            )
        if isinstance(last_obs, list):
            return obs, (indices, _make_stacker(self.observation_space, len(indices))(last_obs))
        return obs, (indices, _select_rows(self.observation_space, last_obs, indices))

    def get_sub_environments(self) -> list[Any]:
        return list(getattr(self.env, "envs", None) or [self.env])

    def get_state(self) -> list[Any] | None:
        if self._has_own_state():
            ended = np.zeros(self.num_envs, bool) if self._ended is None else self._ended
            return [get_episode_state(self.env), ended.tolist()]
        if self.mode in _NEXT_STEP_MODES:
            return None  # only the vector environment knows which of its parts wait for a reset
        return super().get_state()

    def set_state(self, states: Sequence[Any]) -> None:
        if not self._has_own_state():
            super().set_state(states)
            return
        state, ended = states
        set_episode_state(self.env, state)
        self._ended = np.array(ended, bool) if any(ended) else None

    def _has_own_state(self) -> bool:
        return has_episode_state(self.env)

    def close(self) -> None:
        self.env.close()


def _select_rows(space: Space, batch: Any, indices: np.ndarray | int) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {key: _select_rows(sub, batch[key], indices) for key, sub in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_select_rows(sub, batch[i], indices) for i, sub in enumerate(space))
    return np.array(batch[indices])


def make_all_failed_step(num_envs: int, error: Exception, first_obs: Structure) -> StepResult:
    """Returns the step in which all environments failed, because the failing one is unknown.

    Args:
        num_envs: number of environments.
        error: the exception that one of them raised.
        first_obs: the first observations of the new ones, batched.
    """
    no_flags, failed = np.zeros(num_envs, bool), dict.fromkeys(range(num_envs), error)
    rewards = np.zeros(num_envs, np.float32)
    return StepResult(first_obs, rewards, no_flags, no_flags, {}, ~no_flags, None, failed)


def require_same_spaces(index: int, env: Any, first: Any) -> None:
    """Checks that an environment has the spaces of the first one.

    Args:
        index: of the environment.
        env: object with the attributes `observation_space` and `action_space`.
        first: object with the same attributes.
    """
    for kind in ("observation", "action"):
        space, expected = getattr(env, f"{kind}_space"), getattr(first, f"{kind}_space")
        if space != expected:
            raise EnvError(
                f"Environment {index} has the {kind} space {space}, but the first one has "
                f"{expected}; all environments of a worker must have the same one."
            )


def make_action_copier(space: Space) -> Callable[[Any], Any]:
    """Returns a function that copies a batch of actions for the environment, in the space's dtypes.

    The arrays are read-only, so an environment that writes to its actions gets an error.
    """
    if isinstance(space, gym.spaces.Dict):
        parts = {key: make_action_copier(sub) for key, sub in space.items()}
        return lambda actions: {key: copy(actions[key]) for key, copy in parts.items()}
    if isinstance(space, gym.spaces.Tuple):
        subs = [make_action_copier(sub) for sub in space]
        return lambda actions: tuple(copy(x) for copy, x in zip(subs, actions, strict=True))
    dtype = space.dtype

    def copy_actions(actions: np.ndarray) -> np.ndarray:
        copied_actions = actions.astype(dtype)
        copied_actions.flags.writeable = False
        return copied_actions

    return copy_actions


def split_batch(batch: Any) -> list[Any]:
    """Splits a possibly nested batch `[N, ...]` into single actions or observations."""
    if isinstance(batch, dict):
        columns = [split_batch(part) for part in batch.values()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(batch, tuple):
        return list(zip(*(split_batch(part) for part in batch), strict=True))
    return list(batch)
