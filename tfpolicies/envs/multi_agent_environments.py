"""Steps copies of a multi-agent environment, and checks their results against the API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpolicies.envs.multi_agent_env import ALL, COMMON, MultiAgentEnv, MultiAgentStep
from tfpolicies.envs.repairs import BREAKS, EnvCopies, Repairs, are_flags, check_flag, explain_seed
from tfpolicies.errors import EnvError

_NAMES = ("observations", "rewards", "terminateds", "truncateds", "infos")


class MultiAgentEnvironments(EnvCopies):
    """N copies of a multi-agent environment; each is stepped by the actions of its agents.

    Args:
        envs: the copies.

    Attributes:
        num_envs: N.
        env_factory: re-creates the copy of an index; None if that is not possible.
    """

    maker: Callable[[int], MultiAgentEnv] | None = None

    def __init__(self, envs: Sequence[MultiAgentEnv]) -> None:
        self.envs = list(envs)
        self.num_envs = len(self.envs)
        self.guard(Repairs())

    def reset(self, index: int, seed: int | None = None) -> tuple[Mapping, Mapping]:
        """Starts an episode in one copy; returns observations and infos by agent id.

        Args:
            index: which copy.
            seed: for its `reset`.

        Raises:
            EnvError: if the result violates the API of `MultiAgentEnv`.
        """
        try:
            return self._first(index, seed)
        except BREAKS as error:
            self.repairs.broke(index, f"reset(seed={seed})", error)
            return self.renew(index)

    def renew(self, index: int) -> tuple[Mapping, Mapping]:
        """Replaces a copy that failed by a new one, and starts an episode like `reset`."""
        return self._renew(index, self._first)

    def _first(self, index: int, seed: int | None = None) -> tuple[Mapping, Mapping]:
        try:
            found = self._resets[index](seed=seed)
        except TypeError:
            explain_seed(self.envs[index].reset, f"`reset` of environment {index}")
            raise
        if not isinstance(found, tuple) or len(found) != 2:
            raise EnvError(
                f"`reset` of environment {index} must return a pair (observations, infos), got "
                f"{type(found).__name__}. Return two dicts by agent id."
            )
        _require_dicts(index, "reset", ("observations", "infos"), found)
        obs, infos = found
        _require_known_infos(index, "reset", infos, obs)
        return obs, infos

    def step(self, index: int, actions: Mapping[Any, Any]) -> MultiAgentStep:
        """Steps one copy.

        Raises:
            EnvError: if the result violates the API of `MultiAgentEnv`.
        """
        found = self._steps[index](actions)
        if not _keeps_the_contract(found):
            _explain(index, found)
        return found

    def get_state(self) -> list[Any] | None:
        """Returns the state of each copy, or None if one has no `get_state`."""
        tell = [getattr(env, "get_state", None) for env in self.envs]
        states = [one() if callable(one) else None for one in tell]
        return None if any(state is None for state in states) else states

    def set_state(self, states: Sequence[Any]) -> None:
        """Restores a result of `get_state`."""
        for env, state in zip(self.envs, states, strict=True):
            env.set_state(state)


def _keeps_the_contract(found: MultiAgentStep | Sequence[Any]) -> bool:
    """Returns False if a closer look is needed; called in every step, so it is quick."""
    if not isinstance(found, tuple) or len(found) != 5:
        return False
    obs, rewards, terminateds, truncateds, infos = found
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


def _explain(index: int, found: MultiAgentStep | Sequence[Any]) -> None:
    """Raises an `EnvError` about the first fault in the result of a step, if there is one."""
    if not isinstance(found, tuple | list) or len(found) != 5:
        got = f"{len(found)} values" if isinstance(found, tuple | list) else type(found).__name__
        raise EnvError(
            f"`step` of environment {index} must return five dicts ({', '.join(_NAMES)}), got "
            f"{got}."
        )
    _require_dicts(index, "step", _NAMES, found)
    obs, _, terminateds, truncateds, infos = found
    for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
        if ALL not in flags:
            raise EnvError(
                f"`{name}` of environment {index} must have the key '__all__' (whether the episode "
                f"is over), but has only {list(flags)}. Return {name}['__all__'] in every step."
            )
        for agent, flag in flags.items():
            check_flag(flag, f"{name}[{agent!r}]", f"`step` of environment {index}")
    _require_known_infos(index, "step", infos, obs)


def _require_dicts(index: int, call: str, names: Sequence[str], found: Sequence[Any]) -> None:
    for name, part in zip(names, found, strict=True):
        if not isinstance(part, Mapping):
            raise EnvError(
                f"`{call}` of environment {index} must return {name} as a dict by agent id, got "
                f"{type(part).__name__}."
            )


def _require_known_infos(
    index: int, call: str, infos: Mapping[Any, Any], obs: Mapping[Any, Any]
) -> None:
    strange = [agent for agent in infos if agent not in obs and agent != COMMON]
    if strange:
        raise EnvError(
            f"`{call}` of environment {index} gave infos of agents without an observation: "
            f"{strange}; observations are of {list(obs)}. Put them under '__common__', or leave "
            "them out."
        )
