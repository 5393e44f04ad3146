"""Steps copies of a multi-agent environment, and checks their results against the API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpolicies.envs.episode_state import get_episode_state, has_episode_state, set_episode_state
from tfpolicies.envs.fault_tolerance import (
    ENV_FAILURES,
    EnvCopies,
    EnvSupervisor,
    are_flags,
    check_accepts_seed,
    check_flag,
)
from tfpolicies.envs.multi_agent_env import ALL, COMMON, MultiAgentEnv, MultiAgentStepResult
from tfpolicies.errors import EnvError

_RESULT_NAMES = ("observations", "rewards", "terminateds", "truncateds", "infos")


class MultiAgentEnvAdapter(EnvCopies):
    """N copies of a multi-agent environment; each is stepped by the actions of its agents.

    Args:
        envs: the copies.

    Attributes:
        num_envs: N.
        env_factory: re-creates the copy of an index; None if that is not possible.
    """

    env_factory: Callable[[int], MultiAgentEnv] | None = None

    def __init__(self, envs: Sequence[MultiAgentEnv]) -> None:
        self.envs = list(envs)
        self.num_envs = len(self.envs)
        self.set_supervisor(EnvSupervisor())

    def reset(self, index: int, seed: int | None = None) -> tuple[Mapping, Mapping]:
        """Starts an episode in one copy; returns observations and infos by agent id.

        Args:
            index: which copy.
            seed: for its `reset`.

        Raises:
            EnvError: if the result violates the API of `MultiAgentEnv`.
        """
        try:
            return self._reset_copy(index, seed)
        except ENV_FAILURES as error:
            self.supervisor.on_failure(index, f"reset(seed={seed})", error)
            return self.recreate(index)

    def recreate(self, index: int) -> tuple[Mapping, Mapping]:
        """Replaces a copy that failed by a new one, and starts an episode like `reset`."""
        return self._replace_copy(index, self._reset_copy)

    def _reset_copy(self, index: int, seed: int | None = None) -> tuple[Mapping, Mapping]:
        try:
            result = self._resets[index](seed=seed)
        except TypeError:
            check_accepts_seed(self.envs[index].reset, f"`reset` of environment {index}")
            raise
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvError(
                f"`reset` of environment {index} must return a pair (observations, infos), got "
                f"{type(result).__name__}. Return two dicts by agent id."
            )
        _check_dicts(index, "reset", ("observations", "infos"), result)
        obs, infos = result
        _check_info_agents(index, "reset", infos, obs)
        return obs, infos

    def step(self, index: int, actions: Mapping[Any, Any]) -> MultiAgentStepResult:
        """Steps one copy.

        Raises:
            EnvError: if the result violates the API of `MultiAgentEnv`.
        """
        result = self._steps[index](actions)
        if not _is_valid_result(result):
            _check_result(index, result)
        return result

    def get_state(self) -> list[Any] | None:
        if not all(map(has_episode_state, self.envs)):
            return None
        return [get_episode_state(env) for env in self.envs]

    def set_state(self, states: Sequence[Any]) -> None:
        """Restores a result of `get_state`."""
        for env, state in zip(self.envs, states, strict=True):
            set_episode_state(env, state)


def _is_valid_result(result: MultiAgentStepResult | Sequence[Any]) -> bool:
    """Returns False if a closer look is needed; called in every step, so it is quick."""
    if not isinstance(result, tuple) or len(result) != 5:
        return False
    obs, rewards, terminateds, truncateds, infos = result
    return (
        isinstance(obs, dict)
        and isinstance(rewards, dict)
        and isinstance(terminateds, dict)
        and isinstance(truncateds, dict)
        and isinstance(infos, dict)
        and ALL in terminateds
        and ALL in truncateds
        and infos.keys() <= obs.keys()
        and are_flags([*terminateds.values()])
        and are_flags([*truncateds.values()])
    )


def _check_result(index: int, result: MultiAgentStepResult | Sequence[Any]) -> None:
    """Raises an `EnvError` about the first fault in the result of a step, if there is one."""
    if not isinstance(result, tuple | list) or len(result) != 5:
        description = (
            f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        )
        raise EnvError(
            f"`step` of environment {index} must return five dicts ({', '.join(_RESULT_NAMES)}), "
            f"got {description}."
        )
    _check_dicts(index, "step", _RESULT_NAMES, result)
    obs, _, terminateds, truncateds, infos = result
    for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
        if ALL not in flags:
            raise EnvError(
                f"`{name}` of environment {index} must have the key '__all__' (whether the episode "
                f"is over), but has only {list(flags)}. Return {name}['__all__'] in every step."
            )
        for agent, flag in flags.items():
            check_flag(flag, f"{name}[{agent!r}]", f"`step` of environment {index}")
    _check_info_agents(index, "step", infos, obs)


def _check_dicts(index: int, call: str, names: Sequence[str], parts: Sequence[Any]) -> None:
    for name, part in zip(names, parts, strict=True):
        if not isinstance(part, Mapping):
            raise EnvError(
                f"`{call}` of environment {index} must return {name} as a dict by agent id, got "
                f"{type(part).__name__}."
            )


def _check_info_agents(
    index: int, call: str, infos: Mapping[Any, Any], obs: Mapping[Any, Any]
) -> None:
    unknown_agents = [agent for agent in infos if agent not in obs and agent != COMMON]
    if unknown_agents:
        raise EnvError(
            f"`{call}` of environment {index} gave infos of agents without an observation: "
            f"{unknown_agents}; observations are of {list(obs)}. Put them under '__common__', or "
            "leave them out."
        )
