"""Checks an environment by playing random actions, and reports the first fault in one sentence."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence

from tfpolicies.base.type_aliases import Structure
from tfpolicies.envs.episode_state import encode_episode_states, get_layer_states, set_layer_states
from tfpolicies.envs.fault_tolerance import (
    ENV_FAILURES,
    describe_invalid_reward,
    get_failure_hint,
)
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.multi_agent_env import ALL, MultiAgentEnv
from tfpolicies.envs.pettingzoo import is_pettingzoo, pettingzoo_env
from tfpolicies.errors import EnvError, SpaceMismatchError, show_value
from tfpolicies.storage.json_values import decode_value

_BOOL_TYPES = (bool, np.bool_)
_MAX_REPEATED_STEPS = 20
_STEPS_BEFORE_STATE = 3  # steps before an episode is stored and continued


def check_env(
    env: gym.Env,
    *,
    steps: int = 200,
    seed: int = 0,
    action_mask_key: str = "action_mask",
    repeatable: bool = True,
) -> None:
    """Plays an environment with random actions, and reports the first fault.

    Masks of Discrete actions, under the key `action_mask_key` of Dict observations, are respected.
    At the end, the first 20 steps of the first episode are repeated with the same seed and actions,
    and must have the same results. If the environment has `get_state` and `set_state`, which
    checkpoints then use, an episode must continue in the same way from a state that was stored. The
    environment is left in the middle of an episode.

    Args:
        env: a `gymnasium.Env`, a `MultiAgentEnv` or an environment of PettingZoo.
        steps: how many to play; over several episodes, if they are shorter.
        seed: of the first reset and of the actions.
        action_mask_key: the key of masks in observations.
        repeatable: whether the same seed and actions must have the same results; False for
            environments that cannot repeat, such as hardware.

    Raises:
        EnvError: at the first fault; the message names the agent, the part of the observation, the
            value, and what to do.

    >>> check_env(gym.make("CartPole-v1"), steps=20)
    """
    if is_pettingzoo(env):
        env = pettingzoo_env(env)
    if not isinstance(env, gym.Env):
        raise EnvError(
            "check_env takes a gymnasium.Env, a MultiAgentEnv or an environment of PettingZoo, got "
            f"{type(env).__name__}. Pass an instance, not a class or a name."
        )
    checker_class: Any = (
        _MultiAgentChecker if isinstance(env, MultiAgentEnv) else _SingleAgentChecker
    )
    checker = checker_class(env, np.random.default_rng(seed), action_mask_key)
    obs = checker.reset(seed)
    calls: list[tuple[Any, dict[str, Any]]] = [(None, copy.deepcopy(checker.results))]
    is_recording = repeatable
    for _ in range(steps):
        actions = checker.choose_actions(obs)
        recorded_actions = copy.deepcopy(actions)
        obs, over = checker.step(actions)
        if is_recording:
            calls.append((recorded_actions, copy.deepcopy(checker.results)))
        is_recording &= not over and len(calls) <= _MAX_REPEATED_STEPS
        if over:
            obs = checker.reset(None)
    if repeatable:
        _require_same_results(checker, seed, calls)
        _require_episode_state(checker, seed)


def _require_same_results(
    checker: _SingleAgentChecker | _MultiAgentChecker,
    seed: int,
    calls: Sequence[tuple[Any, Mapping[str, Any]]],
) -> None:
    """Repeats an episode and compares its results.

    Args:
        checker: of the environment.
        seed: of the episode.
        calls: actions and results; the first are those of `reset`.
    """
    checker.reset(seed)
    difference = _find_difference("of `reset`", calls[0][1], checker.results)
    difference = difference or _replay_steps(checker, calls[1:])
    if difference is not None:
        raise EnvError(
            f"The environment is not repeatable with seed={seed} and the same actions. "
            f"{difference}. Begin `reset` with `super().reset(seed=seed)`, set all attributes of "
            "an episode there, and draw from `self.np_random`. If the environment cannot repeat, "
            "as hardware, give repeatable=False."
        )


def _replay_steps(
    checker: _SingleAgentChecker | _MultiAgentChecker,
    calls: Sequence[tuple[Any, Mapping[str, Any]]],
) -> str | None:
    """Repeats steps; returns a text about the first result that differs, or None."""
    for step, (actions, first_results) in enumerate(calls, 1):
        checker.step(actions)
        difference = _find_difference(f"in step {step}", first_results, checker.results)
        if difference is not None:
            return difference
    return None


def _find_difference(
    place: str, first_results: Mapping[str, Any], results: Mapping[str, Any]
) -> str | None:
    """Returns a text about the first result that differs, or None."""
    for name in {**first_results, **results}:
        first, second = first_results.get(name), results.get(name)
        if not data_equivalence(first, second):
            return f"{name} {place} was {show_value(first, 100)}, then {show_value(second, 100)}"
    return None


def _require_episode_state(checker: _SingleAgentChecker | _MultiAgentChecker, seed: int) -> None:
    """Continues an episode twice from its stored state, if there is one; compares the results."""
    if get_layer_states(checker.env) is None:
        return
    obs, over, steps = checker.reset(seed), False, 0
    while not over and steps < _STEPS_BEFORE_STATE:
        obs, over = checker.step(checker.choose_actions(obs))
        steps += 1
    if over:
        obs = checker.reset(seed)
    stored = decode_value(encode_episode_states(get_layer_states(checker.env)))
    progress = copy.deepcopy(checker.progress)
    calls: list[tuple[Any, dict[str, Any]]] = []
    over = False
    while not over and len(calls) < _MAX_REPEATED_STEPS:
        actions = checker.choose_actions(obs)
        recorded_actions = copy.deepcopy(actions)
        obs, over = checker.step(actions)
        calls.append((recorded_actions, copy.deepcopy(checker.results)))
    checker.progress = progress
    set_layer_states(checker.env, stored)
    difference = _replay_steps(checker, calls)
    if difference is not None:
        raise EnvError(
            "After `set_state` with the result of `get_state`, an episode continues in another "
            f"way. {difference}. Include everything that later steps depend on, also "
            "`self.np_random.bit_generator.state`, and restore all of it in `set_state`."
        )


def check_new_env(make: Callable[[int], Any], steps: int, action_mask_key: str) -> None:
    """Plays a few steps of a new environment and closes it; see `check_env`.

    An environment whose `_skip_env_checking` is true, or whose spaces are set by the policies, is
    only made and closed. The state of the global random generators is restored.

    Args:
        make: makes the environment of an index; called with 0.
        steps: how many to play.
        action_mask_key: the key of masks in observations.

    Raises:
        EnvError: at the first fault.
    """
    with preserve_global_rngs():
        env = make(0)
        try:
            if _is_checkable(env):
                check_env(env, steps=steps, action_mask_key=action_mask_key, repeatable=False)
        finally:
            env.close()


def _is_checkable(env: gym.Env) -> bool:
    env_spaces = (
        getattr(env, f"{space_kind}_space", None) for space_kind in ("observation", "action")
    )
    return None not in env_spaces and not getattr(env, "_skip_env_checking", False)


@contextlib.contextmanager
def preserve_global_rngs() -> Iterator[None]:
    """Restores the state of the global random generators afterwards."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class _SingleAgentChecker:
    """Plays an environment with one agent.

    Attributes:
        results: the values that the last call returned, by name.
        progress: state of the check in the running episode.
    """

    def __init__(self, env: gym.Env, rng: np.random.Generator, mask_key: str) -> None:
        self.env = env
        self._mask_key = mask_key
        self.results: dict[str, Any] = {}
        self.progress: Any = None
        for name in ("observation_space", "action_space"):
            _require_space(getattr(env, name, None), f"`{name}` of {type(env).__name__}")
        self._seeded_action_space = _copy_and_seed(env.action_space, rng)

    def reset(self, seed: int | None) -> Any:
        result = _call_env("reset", lambda: self.env.reset(seed=seed))
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
            raise EnvError(
                "`reset` must return a pair (observation, info), info being a dict, got "
                f"{_describe(result)}. Write `return observation, {{}}`."
            )
        _require_element(self.env.observation_space, result[0], "The observation of `reset`")
        self.results = {"The observation": result[0]}
        return result[0]

    def choose_actions(self, obs: Structure) -> Any:
        return _make_read_only(random_action(self._seeded_action_space, obs, self._mask_key))

    def step(self, action: Structure) -> tuple[Any, bool]:
        """Plays a step; returns the observation, and if the episode ended."""
        result = _call_env("step", lambda: self.env.step(action), action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(
                "`step` must return (observation, reward, terminated, truncated, info), got "
                f"{_describe(result)}."
            )
        obs, reward, terminated, truncated, info = result
        _require_element(self.env.observation_space, obs, "The observation of `step`")
        _require_number(reward, "The reward", action)
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            _require_flag(flag, f"`{name}`")
        if not isinstance(info, Mapping):
            raise EnvError(f"The info must be a dict, got {_describe(info)}. Return {{}}.")
        self.results = {
            "The observation": obs,
            "The reward": float(reward),
            "`terminated`": bool(terminated),
            "`truncated`": bool(truncated),
        }
        return obs, bool(terminated or truncated)


@dataclass
class _EpisodeProgress:
    """State of a check in a running episode with several agents."""

    steps_without_obs: int = 0  # steps in which no agent could act
    done_agents: set[Any] = field(default_factory=set)
    observed_agents: set[Any] = field(default_factory=set)


class _MultiAgentChecker:
    """Plays an environment with several agents.

    Attributes:
        results: the values that the last call returned, by name.
        progress: state of the check in the running episode.
    """

    def __init__(self, env: MultiAgentEnv, rng: np.random.Generator, mask_key: str) -> None:
        self.env = env
        self._mask_key = mask_key
        self.results: dict[str, Any] = {}
        self._envs = MultiAgentEnvAdapter([env])
        self._ids = env.get_agent_ids()
        self._rng = rng
        self._seeded_action_spaces: dict[Any, gym.Space] = {}

    def reset(self, seed: int | None) -> dict[Any, Any]:
        """Begins an episode; returns the observations of the agents that act first."""
        self.progress = _EpisodeProgress()
        obs, _ = _call_env("reset", lambda: self._envs.reset(0, seed))
        self._check_observations(obs, "reset")
        self.results = {f"The observation of agent {agent!r}": x for agent, x in obs.items()}
        return dict(obs)

    def _check_observations(self, obs: Mapping[Any, Any], call: str) -> None:
        for agent, agent_obs in obs.items():
            self._check_agent_id(agent, f"an observation of `{call}`")
            if agent in self.progress.done_agents:
                raise EnvError(
                    f"Agent {agent!r} got an observation in `{call}` after it was done in the same "
                    "episode. Leave it out, or return it under another id."
                )
            self._check_agent_spaces(agent)
            space = self.env.get_observation_space(agent)
            _require_element(space, agent_obs, f"The observation of agent {agent!r} in `{call}`")
        self.progress.observed_agents |= set(obs)

    def _check_agent_id(self, agent: Hashable, subject: str) -> None:
        if agent == ALL or (self._ids and agent not in self._ids):
            raise EnvError(
                f"{agent!r} has {subject}, but is not among the agents "
                f"{sorted(self._ids, key=str)}. Correct the id, or name it in `_agent_ids`."
            )

    def _check_agent_spaces(self, agent: Hashable) -> None:
        if agent in self._seeded_action_spaces:
            return
        agent_spaces = (self.env.get_observation_space(agent), self.env.get_action_space(agent))
        for space, name in zip(agent_spaces, ("observation", "action"), strict=True):
            _require_space(space, f"The {name} space of agent {agent!r}")
        self._seeded_action_spaces[agent] = _copy_and_seed(agent_spaces[1], self._rng)

    def choose_actions(self, pending_obs: Mapping[Any, Any]) -> dict[Any, Any]:
        return {
            agent: _make_read_only(
                random_action(self._seeded_action_spaces[agent], x, self._mask_key)
            )
            for agent, x in pending_obs.items()
        }

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], bool]:
        """Plays a step; returns the observations of the next agents, and if the episode ended."""
        result = _call_env("step", lambda: self._envs.step(0, actions), actions)
        obs, rewards, terminateds, truncateds, _ = result
        self._check_observations(obs, "step")
        for agent, reward in rewards.items():
            self._check_agent_id(agent, "a reward")
            _require_number(reward, f"The reward of agent {agent!r}", actions.get(agent))
        for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            for agent, flag in flags.items():
                if agent != ALL:
                    self._check_agent_id(agent, f"a flag in `{name}`")
                _require_flag(flag, f"`{name}[{agent!r}]`")
                if flag:
                    self.progress.done_agents.add(agent)
        self.results = {
            **{f"The observation of agent {agent!r}": x for agent, x in obs.items()},
            **{f"The reward of agent {agent!r}": float(x) for agent, x in rewards.items()},
            "`terminateds`": dict(terminateds),
            "`truncateds`": dict(truncateds),
        }
        over = bool(terminateds[ALL] or truncateds[ALL])
        if (
            not over
            and self.progress.observed_agents
            and self.progress.observed_agents <= self.progress.done_agents
            and self._ids <= self.progress.done_agents
        ):
            raise EnvError(
                "All agents are done, but '__all__' is False in `terminateds` and in `truncateds`. "
                "Set it in the step in which the last agent is done."
            )
        pending_obs = {
            agent: x for agent, x in obs.items() if agent not in self.progress.done_agents
        }
        self.progress.steps_without_obs = 0 if pending_obs else self.progress.steps_without_obs + 1
        if self.progress.steps_without_obs > 100 and not over:
            raise EnvError(
                "No agent had an observation for 100 steps, so none can act. Give an "
                "observation to the agents whose turn it is, or end the episode."
            )
        return pending_obs, over


def _call_env(method: str, call: Callable[[], Any], actions: Structure | None = None) -> Any:
    """Returns `call()`; turns an exception into an `EnvError` with an explanation."""
    try:
        return call()
    except EnvError:
        raise
    except ENV_FAILURES as error:
        for_action = "" if actions is None else f" for the action {actions!r}"
        raise EnvError(
            f"`{method}` raised {type(error).__name__}{for_action}: "
            f"{error}.{get_failure_hint(error)} The cause is shown above."
        ) from error


def _copy_and_seed(space: gym.Space, rng: np.random.Generator) -> Any:
    """Copies a space and seeds the copy: others may sample from the space as well."""
    seeded_space = copy.deepcopy(space)
    seeded_space.seed(int(rng.integers(2**31)))
    return seeded_space


def _make_read_only(action: Structure) -> Any:
    """Makes the arrays of an action read-only, as those of policies are."""
    if isinstance(action, dict | tuple):
        for part in action.values() if isinstance(action, dict) else action:
            _make_read_only(part)
    elif isinstance(action, np.ndarray):
        action.flags.writeable = False
    return action


def random_action(space: gym.Space, obs: Structure, mask_key: str = "action_mask") -> Any:
    """Returns an action that the mask of an observation allows, if it has one."""
    mask: Any = obs.get(mask_key) if isinstance(obs, Mapping) else None
    if isinstance(space, spaces.Discrete) and np.shape(mask) == (space.n,):
        return space.sample(mask=(np.asarray(mask) != 0).astype(np.int8))
    return space.sample()


def _require_space(space: gym.Space | None, subject: str) -> None:
    if not isinstance(space, gym.Space):
        raise EnvError(
            f"{subject} must be a gymnasium space, got {_describe(space)}. Set it in `__init__`."
        )


def _require_number(value: Any, subject: str, action: Structure | None) -> None:
    is_number = isinstance(value, int | float | np.number | np.ndarray) and np.ndim(value) == 0
    if not is_number or np.iscomplexobj(value) or not np.isfinite(value):
        raise EnvError(
            f"{subject} must be a finite number, got {describe_invalid_reward(value, action)}"
        )


def _require_flag(value: Structure, subject: str) -> None:
    if not isinstance(value, _BOOL_TYPES):
        raise EnvError(f"{subject} must be True or False, got {value!r}. Return `bool(...)`.")


def _require_element(space: spaces.Space, value: Structure, subject: str) -> None:
    fault = _find_fault(space, value)
    if fault is not None:
        part = f", part {fault.path!r}," if fault.path else ""
        raise fault.error_class(f"{subject}{part} {fault.problem}")


class _SpaceFault(NamedTuple):
    """The path at which a value does not match its space, and the problem there."""

    path: str
    problem: str
    error_class: type[EnvError] = EnvError


def _find_fault(space: spaces.Space, value: Structure, path: str = "") -> _SpaceFault | None:
    """Returns the first fault of a value of a space; None if it is valid."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, Mapping):
            return _SpaceFault(
                path, f"must be a dict with the keys {list(space.keys())}: {_format_got(value)}."
            )
        if set(value) != set(space.keys()):
            return _SpaceFault(
                path,
                f"has the keys {list(value)}, but its space has {list(space.keys())}. Return "
                "exactly these.",
            )
        parts = [(key, sub, value[key]) for key, sub in space.items()]
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            return _SpaceFault(
                path, f"must be a tuple of {len(space.spaces)} parts: {_format_got(value)}."
            )
        parts = [(str(i), sub, x) for i, (sub, x) in enumerate(zip(space, value, strict=True))]
    elif isinstance(space, spaces.Box):
        return _find_box_fault(space, value, path)
    elif space.contains(value):
        return None
    else:
        problem = f"must be an element of {space}: {_format_got(value)}."
        return _SpaceFault(path, problem, SpaceMismatchError)
    for key, sub, part in parts:
        fault = _find_fault(sub, part, f"{path}/{key}" if path else str(key))
        if fault is not None:
            return fault
    return None


def _find_box_fault(space: spaces.Box, value: Structure, path: str) -> _SpaceFault | None:
    if not isinstance(value, np.ndarray | np.generic):
        problem = f"must be an array: {_format_got(value)}. Return np.array(..., np.{space.dtype})."
        return _SpaceFault(path, problem, SpaceMismatchError)
    value = np.asarray(value)
    if value.shape != space.shape:
        problem_text = (
            f"has the shape {value.shape}, but its space has {space.shape}; it is {space}."
        )
        return _SpaceFault(path, problem_text)
    if value.dtype.kind == "f" and np.isnan(value).any():
        index = tuple(np.argwhere(np.isnan(value))[0].tolist())
        text = f"has a NaN at {index}. Look for divisions by zero and values never set."
        return _SpaceFault(path, text)
    is_mixed = value.dtype.kind == "f" and space.dtype.kind != "f"
    is_fractional = np.floor(value) != value if is_mixed else np.zeros(())
    if is_fractional.any():
        index = tuple(np.argwhere(is_fractional)[0].tolist())
        text = (
            f"has {value[index]} at {index}, but its space has {space.dtype}, which would make it "
            f"{int(value[index])}. Declare Box(..., dtype=np.float32), or return whole numbers."
        )
        return _SpaceFault(path, text)
    mismatch = _find_mismatch(space, value)
    return None if mismatch is None else _SpaceFault(path, mismatch, SpaceMismatchError)


def _find_mismatch(space: spaces.Box, value: np.ndarray) -> str | None:
    """Returns how numbers differ from their space's dtype and bounds, None if they do not."""
    if not np.can_cast(value.dtype, space.dtype):
        return (
            f"has the dtype {value.dtype}, but its space has {space.dtype}. Return "
            f"`x.astype(np.{space.dtype})`, or change the space."
        )
    outside = (value < space.low) | (value > space.high)
    if outside.any():
        index = tuple(np.argwhere(outside)[0].tolist())
        low, high = space.low[index], space.high[index]
        return (
            f"has {value[index]} at {index}, which is not in [{low}, {high}]. Widen the bounds of "
            "its space, or clip the value."
        )
    return None


def _format_got(value: Structure) -> str:
    return f"got {_describe(value)}"


def _describe(value: Structure | None) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} values"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    kind = type(value).__name__
    return f"the {kind} {text}" if len(text) <= 60 else f"a {kind}"
