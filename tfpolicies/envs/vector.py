"""Adapters that step many environments at once, in any autoreset mode.

There are adapters for plain `gymnasium.Env` instances, stepped one after the other; for Gymnasium
vector environments in any of their three autoreset modes, including EnvPool; and for those of
other APIs that are `SteppedTogether`. All of them return the same `Step`:

* `obs` are the observations for which the next actions are chosen.
* `dead[i]` says that environment i was only being reset in this step (Gymnasium's NEXT_STEP mode):
  no transition took place.
* `broken` has the environments that failed in this step and were re-created: their running episodes
  must be dropped, and `obs` shows their next ones.
* `lost` has the environments in which a life was lost, if that ends the episode only for learning.
* `final` has the last observations of episodes that ended in this step, if `obs` already shows
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
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from tfpolicies.envs.autoreset import ModeFinder, final_observations, stated_mode
from tfpolicies.envs.repairs import (
    BREAKS,
    EnvCopies,
    Repairs,
    are_flags,
    are_sound,
    as_flags,
    check_flag,
    check_observation,
    check_reward,
    explain_seed,
    require_space,
    sound_check,
)
from tfpolicies.errors import EnvError
from tfpolicies.finite import real
from tfpolicies.type_aliases import Structure

Broken: TypeAlias = dict[int, Exception]
Infos: TypeAlias = Mapping[str, Any]
VectorResult: TypeAlias = tuple[Structure, np.ndarray, np.ndarray, np.ndarray, Infos]
"""Result of `VectorEnv.step`."""


class Step(NamedTuple):
    """Result of one step of N environments."""

    obs: Any  # batched as the observation space is nested, [N, ...]
    rewards: np.ndarray  # [N]
    terminateds: np.ndarray  # bool [N]
    truncateds: np.ndarray  # bool [N]
    infos: Any  # a list of dicts, or a vector environment's dict
    dead: np.ndarray | None  # bool [N]; None: all are transitions
    final: tuple[np.ndarray, Any] | None  # indices [K] and their last observations [K, ...]
    broken: Mapping[int, Exception] | None = None  # re-created environments; also in `dead`
    lost: np.ndarray | None = None  # bool [N]: continues, but later steps do not count for learning


class Environments(abc.ABC):
    """N environments that step together.

    Attributes:
        num_envs: N.
        observation_space: of one environment.
        action_space: of one environment.
        env_factory: re-creates the environment of an index (index 0 of a vector environment re-creates
            all of them); None if that is not possible.
        connector_ns: nanoseconds that connectors took in all steps: for actions, for observations.
    """

    num_envs: int
    observation_space: Space
    action_space: Space
    maker: Callable[[int], Any] | None = None
    connecting: tuple[int, int] = (0, 0)
    repairs = Repairs()

    def guard(self, repairs: Repairs) -> None:
        """Sets the supervisor that handles failures of the environments."""
        self.repairs = repairs

    @abc.abstractmethod
    def reset(self, seeds: Sequence[int] | None) -> Any:
        """Starts new episodes everywhere; returns the observations, batched."""

    @abc.abstractmethod
    def step(self, actions: Structure) -> Step:
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

        The method `get_state` of an environment returns it, or that of a wrapper, for all that it
        wraps. Wrappers without `get_state` are supported only if they are Gymnasium's time limit or
        checks.
        """
        states = [_state_of(env) for env in self.get_sub_environments()]
        return None if any(state is None for state in states) else states

    def set_state(self, states: Sequence[Any]) -> None:
        """Restores a result of `get_state`."""
        for env, state in zip(self.get_sub_environments(), states, strict=True):
            _restore(env, state)


class SteppedTogether(abc.ABC):
    """N environments of another API that provide their adapter; creators may return one.

    Attributes:
        num_envs: N.
    """

    num_envs: int

    @abc.abstractmethod
    def as_environments(self) -> Environments:
        """Returns the adapter that steps these environments."""

    @abc.abstractmethod
    def get_sub_environments(self) -> list[Any]:
        """Returns the environments, by index; or []."""


def _state_of(env: gym.Env) -> list[Any] | None:
    """Returns the states of an environment's layers from the outermost in, or None."""
    get_state = getattr(env, "get_state", None)
    if callable(get_state):
        return [get_state()]
    if not isinstance(env, TimeLimit | OrderEnforcing | PassiveEnvChecker):
        return None
    inner = _state_of(env.env)
    own = env._elapsed_steps if isinstance(env, TimeLimit) else None
    return None if inner is None else [own, *inner]


def _restore(env: Any, layers: Sequence[Any]) -> None:
    for own in layers[:-1]:
        if isinstance(env, TimeLimit):
            env._elapsed_steps = own
        env = env.env
    env.set_state(layers[-1])


_NONE: Mapping[int, Exception] = {}


class SeparateEnvironments(Environments):
    """Environments that are reset one by one, each when its episode has ended.

    A subclass steps them; `_made_of` makes a step of the results. If they are invalid, `_repaired`
    replaces the failed environments.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        num_envs: N.
    """

    def __init__(self, observation_space: Space, action_space: Space, num_envs: int) -> None:
        self.num_envs = num_envs
        self.observation_space = observation_space
        self.action_space = action_space
        self._stack = _stacker(observation_space, num_envs)
        self._is_sound = sound_check(observation_space)
        self._whole = action_space.dtype if isinstance(action_space, gym.spaces.Discrete) else None
        self._own_copy = copier(action_space)

    @abc.abstractmethod
    def _reset_at(self, index: int, seed: int | None) -> Any:
        """Starts a new episode of an environment; returns the result of its `reset`."""

    @abc.abstractmethod
    def _renewed(self, index: int) -> Any:
        """Replaces an environment that failed; returns the first observation of the new one."""

    def _mended(self, results: Sequence[Any]) -> Broken:
        """Returns the environments that report a failure and have re-created themselves."""
        return {}

    def _reset(self, index: int, seed: int | None = None) -> Any:
        try:
            return self._first_observation(index, seed)
        except BREAKS as error:
            self.repairs.broke(index, f"reset(seed={seed})", error)
            return self._renewed(index)

    def _first_observation(self, index: int, seed: int | None = None) -> Any:
        what = self.repairs.call(index, "reset")
        found = self._reset_at(index, seed)
        if not isinstance(found, tuple) or len(found) != 2:
            raise EnvError(
                f"{what} must return a pair (observation, info), got {found!r:.200}. Write "
                "`return observation, {}`."
            )
        check_observation(self.observation_space, found[0], f"observation that {what} gave")
        return found[0]

    def _rows(self, actions: Any) -> list[Any]:
        """Splits actions into single ones, which the environments may keep."""
        # `tolist` is faster than indexing an array of ints N times.
        if self._whole is not None:
            return actions.astype(self._whole, copy=False).tolist()
        return single_rows(self._own_copy(actions))

    def _made_of(self, results: Sequence[Any], broken: Mapping[int, Exception] = _NONE) -> Any:
        """Makes a step of the results, and resets ended environments; None if one is invalid."""
        try:
            reached, rewards, terminateds, truncateds, infos = zip(*results, strict=True)
            obs = list(reached)
            numbers = np.array(rewards, np.float32)
            sound = numbers.ndim == 1 and math.isfinite(sum(rewards))
            sound = sound and are_flags(terminateds) and are_flags(truncateds)
            stacked = self._stack(obs)
        except (TypeError, ValueError, KeyError, IndexError):
            return None
        if not (sound and self._is_sound(stacked)):
            return None
        final = dead = None
        if any(terminateds) or any(truncateds):
            final = self._reset_ended(obs, terminateds, truncateds)
            stacked = self._stack(obs)
        if broken:
            dead = np.isin(np.arange(self.num_envs), list(broken))
        elif self.repairs.breaks:
            self.repairs.stepped()
        flags = np.array(terminateds, bool), np.array(truncateds, bool)
        return Step(stacked, numbers, *flags, infos, dead, final, broken or None)

    def _repaired(self, results: list[Any], actions: Sequence[Any], broken: Broken) -> Step:
        """Replaces the environments that failed; returns the step."""
        mended = {} if broken else self._mended(results)
        for i, result in enumerate(results):
            if i in broken or i in mended:
                continue
            try:
                self._check_result(i, result)
            except EnvError as error:
                self.repairs.broke(i, f"step({actions[i]!r})", error)
                broken[i] = error
        for i in set(range(self.num_envs)).difference(broken, mended):
            self.repairs.stepped(i)
        for i in (*broken, *mended):
            first = self._reset(i) if i in mended else self._renewed(i)
            results[i] = first, 0.0, False, False, {}
        broken |= mended
        made = self._made_of(results, broken)
        if made is None:
            raise EnvError(f"The results of a step cannot be stacked: {results!r:.500}.")
        return made

    def _check_result(self, index: int, result: Sequence[Any]) -> None:
        what = self.repairs.call(index, "step")
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(
                f"{what} must return (observation, reward, terminated, truncated, info), got "
                f"{result!r:.200}."
            )
        check_observation(self.observation_space, result[0], f"observation that {what} gave")
        check_reward(result[1], what)
        for name, flag in zip(("terminated", "truncated"), result[2:4], strict=True):
            check_flag(flag, name, what)

    def _reset_ended(
        self, obs: list[Any], terminateds: Sequence[bool], truncateds: Sequence[bool]
    ) -> tuple[np.ndarray, Any]:
        """Replaces last observations in `obs` by first ones; returns the last ones."""
        ended = [i for i in range(self.num_envs) if terminateds[i] or truncateds[i]]
        last = _stacker(self.observation_space, len(ended))([obs[i] for i in ended])
        for i in ended:
            self.repairs.worked(i)
            obs[i] = self._reset(i)
        return np.array(ended), last


class PlainEnvironments(EnvCopies, SeparateEnvironments):
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
        given = [None] * self.num_envs if seeds is None else list(seeds)
        return self._stack([self._reset(i, seed) for i, seed in enumerate(given)])

    def _reset_at(self, index: int, seed: int | None) -> Any:
        try:
            return self._resets[index](seed=seed)
        except TypeError:
            explain_seed(self.envs[index].reset, self.repairs.call(index, "reset"))
            raise

    def _renewed(self, index: int) -> Any:
        return self._renew(index, self._first_observation)

    def step(self, actions: Any) -> Step:
        whole = self._whole  # not `_rows`: a call costs more than the branch
        rows = self._rows(actions) if whole is None else actions.astype(whole, copy=False).tolist()
        results: list[Any] = []
        broken: Broken = {}
        for step, action in zip(self._steps, rows, strict=True):
            try:
                results.append(step(action))
            except BREAKS as error:
                index = len(results)
                broken[index] = self.repairs.broke(index, f"step({action!r})", error)
                results.append(None)
        made = None if broken else self._made_of(results)
        return made or self._repaired(results, rows, broken)


def _stacker(space: Space, count: int) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that copies `count` observations into a batch."""
    if isinstance(space, gym.spaces.Dict):
        parts = {key: _stacker(sub, count) for key, sub in space.items()}
        return lambda rows: {k: stack([row[k] for row in rows]) for k, stack in parts.items()}
    if isinstance(space, gym.spaces.Tuple):
        subs = [_stacker(sub, count) for sub in space]
        return lambda rows: tuple(stack([row[i] for row in rows]) for i, stack in enumerate(subs))
    dtype = np.float32 if space.dtype == np.float64 else space.dtype
    shape = (count, *(space.shape or ()))

    inner = shape[1:]

    def stack(rows: Sequence[Any]) -> np.ndarray:
        if not inner:
            return real(np.array(rows)).astype(dtype, copy=False).reshape(shape)
        try:
            shapes = [row.shape for row in rows]
        except AttributeError:  # lists
            shapes = [np.shape(row) for row in rows]
        if shapes.count(inner) != len(shapes):
            raise ValueError(f"{shapes} are not all {inner}")
        try:
            return np.concatenate(rows, dtype=dtype, casting="same_kind").reshape(shape)
        except TypeError:  # floats for integers; or text, which "unsafe" would read as numbers
            return real(np.concatenate(rows)).astype(dtype).reshape(shape)

    return stack


_RESETS_LATER = (AutoresetMode.NEXT_STEP, None)
"""Modes in which the step after an episode's end resets; None: the mode is not known yet."""


class VectorEnvironments(Environments):
    """A Gymnasium vector environment in any autoreset mode, EnvPool included.

    Args:
        env: the vector environment.

    Attributes:
        mode: its autoreset mode; None until its first episode has ended, if its metadata has none.

    Raises:
        EnvError: if its metadata has an unknown mode; by `step`, if `ModeFinder` does not find it.
    """

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.observation_space = require_space(env, "single_observation_space")
        self.action_space = require_space(env, "single_action_space")
        self.mode = stated_mode(env)
        self._finder = ModeFinder(env) if self.mode is None else None
        self._ended: np.ndarray | None = None  # environments whose episode the last step ended
        self._is_sound = sound_check(self.observation_space)
        self._own_copy = copier(self.action_space)
        self._step = env.step

    def guard(self, repairs: Repairs) -> None:
        super().guard(repairs)
        self._take(self.env)

    def _take(self, env: VectorEnv) -> None:
        self.env = env
        self._step = self.repairs.watched(0, "step", env.step)

    def reset(self, seeds: Sequence[int] | None) -> Any:
        try:
            return self._reset(seeds)
        except BREAKS as error:
            self.repairs.broke(0, "reset", error)
            return self._renewed()

    def _reset(self, seeds: Sequence[int] | None) -> Any:
        self._ended = None
        if self._finder is not None:
            self._finder.reset()
        if seeds is None:
            return self.env.reset()[0]
        # Seeds for each environment, one seed for all, or (EnvPool) seeded when made.
        tries: list[Any] = [list(seeds), seeds[0]]
        for seed in tries:
            with contextlib.suppress(TypeError, gym.error.Error):
                return self.env.reset(seed=seed)[0]
        return self.env.reset()[0]

    def _renewed(self) -> Any:
        """Re-creates the whole vector environment; returns its first observations."""

        def start(env: VectorEnv) -> Any:
            self._take(env)
            return self._reset(None)

        return self.repairs.renewed(0, self.env, start)[1]

    def step(self, actions: Structure) -> Step:
        actions = self._own_copy(actions)
        try:
            return self._made_of(self._step(actions))
        except BREAKS as error:
            return all_anew(self.num_envs, self.repairs.broke(0, "step", error), self._renewed())

    def _made_of(self, result: VectorResult) -> Step:
        obs, rewards, terminateds, truncateds, infos = result
        stops, cuts = as_flags(terminateds), as_flags(truncateds)
        if stops is None or cuts is None or not (are_sound(rewards) and self._is_sound(obs)):
            self._explain(result)
        if self.repairs.breaks:
            self.repairs.stepped()
        if self._finder is not None:
            self.mode = self._finder.find(rewards, stops | cuts, self._ended, infos)
            self._finder = self._finder if self.mode is None else None
        dead, final, self._ended = self._ended, None, None
        if 1 in stops.tobytes() or 1 in cuts.tobytes():  # many times faster than `any`
            ended = stops | cuts
            self.repairs.worked(0, ended.tobytes().count(1))
            if self.mode in _RESETS_LATER:
                self._ended = ended
            else:
                obs, final = self._finish(obs, ended, infos)
        return Step(obs, rewards, stops, cuts, infos, dead, final)

    def _explain(self, result: VectorResult) -> NoReturn:
        obs, rewards, terminateds, truncateds, _ = result
        for i in range(self.num_envs):
            row = _rows(self.observation_space, obs, i)
            check_observation(self.observation_space, row, f"observation of environment {i}")
            check_reward(rewards[i], f"`step` of environment {i}")
            for name, flags in (("terminated", terminateds), ("truncated", truncateds)):
                check_flag(flags[i], name, f"`step` of environment {i}")
        raise AssertionError("an invalid result passed all checks")

    def _finish(self, obs: Structure, ended: np.ndarray, infos: Infos) -> tuple[Any, Any]:
        indices = np.flatnonzero(ended)
        if self.mode is AutoresetMode.DISABLED:
            last = _rows(self.observation_space, obs, indices)
            obs, _ = self.env.reset(options={"reset_mask": ended})
            return obs, (indices, last)
        given = final_observations(infos, indices.tolist())
        if given is None:
            raise EnvError(
                f"{self.env} resets in the same step, but its info has no 'final_obs', so the last "
                "observations of its episodes are lost. Use AutoresetMode.NEXT_STEP."
            )
        if isinstance(given, list):
            return obs, (indices, _stacker(self.observation_space, len(indices))(given))
        return obs, (indices, _rows(self.observation_space, given, indices))

    def get_sub_environments(self) -> list[Any]:
        return list(getattr(self.env, "envs", None) or [self.env])

    def get_state(self) -> list[Any] | None:
        if self._tells_its_state():
            ended = np.zeros(self.num_envs, bool) if self._ended is None else self._ended
            return [self.env.get_state(), ended.tolist()]  # type: ignore[attr-defined]
        if self.mode in _RESETS_LATER:
            return None  # only the vector environment knows which of its parts wait for a reset
        return super().get_state()

    def set_state(self, states: Sequence[Any]) -> None:
        if not self._tells_its_state():
            super().set_state(states)
            return
        state, ended = states
        self.env.set_state(state)  # type: ignore[attr-defined]
        self._ended = np.array(ended, bool) if any(ended) else None

    def _tells_its_state(self) -> bool:
        return callable(getattr(self.env, "get_state", None))

    def close(self) -> None:
        self.env.close()


def _rows(space: Space, batch: Any, indices: np.ndarray | int) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {key: _rows(sub, batch[key], indices) for key, sub in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_rows(sub, batch[i], indices) for i, sub in enumerate(space))
    return np.array(batch[indices])


def all_anew(num_envs: int, error: Exception, first: Structure) -> Step:
    """Returns the step in which all environments failed, because the failing one is unknown.

    Args:
        num_envs: number of environments.
        error: the exception that one of them raised.
        first_obs: the first observations of the new ones, batched.
    """
    never, broken = np.zeros(num_envs, bool), dict.fromkeys(range(num_envs), error)
    rewards = np.zeros(num_envs, np.float32)
    return Step(first, rewards, never, never, {}, ~never, None, broken)


def require_same_spaces(index: int, env: Any, first: Any) -> None:
    """Checks that an environment has the spaces of the first one.

    Args:
        index: of the environment.
        env: object with the attributes `observation_space` and `action_space`.
        first: object with the same attributes.

    Raises:
        EnvError: if a space differs.
    """
    for kind in ("observation", "action"):
        space, expected = getattr(env, f"{kind}_space"), getattr(first, f"{kind}_space")
        if space != expected:
            raise EnvError(
                f"Environment {index} has the {kind} space {space}, but the first one has "
                f"{expected}; all environments of a worker must have the same one."
            )


def copier(space: Space) -> Callable[[Any], Any]:
    """Returns a function that copies a batch of actions for the environment, in the space's dtypes.

    The arrays are read-only, so an environment that writes to its actions gets an error.
    """
    if isinstance(space, gym.spaces.Dict):
        parts = {key: copier(sub) for key, sub in space.items()}
        return lambda actions: {key: copy(actions[key]) for key, copy in parts.items()}
    if isinstance(space, gym.spaces.Tuple):
        subs = [copier(sub) for sub in space]
        return lambda actions: tuple(copy(x) for copy, x in zip(subs, actions, strict=True))
    dtype = space.dtype

    def copied(actions: np.ndarray) -> np.ndarray:
        own = actions.astype(dtype)
        own.flags.writeable = False
        return own

    return copied


def single_rows(batch: Any) -> list[Any]:
    """Splits a possibly nested batch `[N, ...]` into single actions or observations."""
    if isinstance(batch, dict):
        columns = [single_rows(part) for part in batch.values()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(batch, tuple):
        return list(zip(*(single_rows(part) for part in batch), strict=True))
    return list(batch)
