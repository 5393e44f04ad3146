"""Checks that the spaces of policies are compatible with those of environments and agents."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies.envs.multi_agent_env import MultiAgentEnv
from tfpolicies.errors import EnvError, SpaceError
from tfpolicies.models.spaces import LEAF_SPACES, is_float_box
from tfpolicies.policy.policy import Policy

logger = logging.getLogger("tfpolicies")

Spaces = tuple[Any, Any]  # observation space and action space

_NAMES = ("observation_space", "action_space")
_DIFFERENCES = ("parts", "kind", "shape", "number of values", "dtype", "bounds")  # worst first
_PLURALS = ("parts", "bounds")
_OF_NUMBERS = ("dtype", "bounds")  # differences that leave weights usable
_NESTED = (spaces.Dict, spaces.Tuple)
_MOST_AGENTS = 4096  # remembered per policy


def require_fitting_spaces(
    policy_id: str,
    policy: Policy,
    whose: str,
    observation_space: gym.Space[Any] | None,
    action_space: gym.Space[Any] | None,
) -> None:
    """Checks that a policy can read an environment's observations and that its actions are allowed.

    Rejects only what cannot be right: leaves of another shape, floats where integers are expected,
    numbers out of the range of a discrete space, and missing parts. Bounds and precisions of Boxes
    may differ, and observations may have parts that the policy does not read.

    Args:
        policy_id: of the policy.
        policy: not checked if its spaces are not Gymnasium spaces.
        source: names the owner of the spaces in the message.
        observation_space: of the environment; ignored unless it is a Gymnasium space.
        action_space: of the environment; ignored unless it is a Gymnasium space.

    Raises:
        SpaceError: naming both spaces.
    """
    given = (observation_space, action_space)
    for name, own, mine in zip(_NAMES, given, policy.driver.spaces, strict=True):
        if not isinstance(mine, gym.Space) or not isinstance(own, gym.Space) or mine is own:
            continue
        acts = name == "action_space"
        if holds(own, mine) if acts else holds(mine, own, in_part=True):
            continue
        why = "which cannot hold its actions" if acts else "which it cannot read"
        raise SpaceError(
            f"Policy {policy_id!r} has the {name} {mine}, but {whose} has {own}, {why}. Omit "
            f"{name} in the PolicySpec to use the environment's, let another policy act "
            f"there, or correct the environment's {name} (a Dict by agent id if agents have "
            "different ones)."
        )


def require_trained_spaces(
    policy_id: str, trained: Spaces, given: Spaces, *, allow_other: bool
) -> None:
    """Checks that an environment has the spaces that a policy was trained with.

    Other bounds of observations are only logged; any other difference is an error.

    Args:
        policy_id: of the policy.
        trained_spaces: spaces of the policy when it was saved.
        env_spaces: spaces of the environment after connectors; compared only if they are Gymnasium
            spaces.
        allow_different: accepts other dtypes and bounds, on which weights do not depend.

    Raises:
        SpaceError: naming both spaces, the difference, and what to do.
    """
    for name, mine, own in zip(_NAMES, trained, given, strict=True):
        if not isinstance(mine, gym.Space) or not isinstance(own, gym.Space):
            continue
        what = difference(mine, own)
        if what == "bounds" and name == "observation_space":
            logger.warning(
                "Policy %r was trained with the observation_space %s; the environment has other "
                "bounds: %s.",
                policy_id,
                mine,
                own,
            )
        elif what is not None and not (allow_other and what in _OF_NUMBERS):
            advice = (
                "If that is intended, pass allow_other_spaces=True (`--allow-other-spaces`)"
                if what in _OF_NUMBERS
                else "Its weights cannot be used there: give an environment with the spaces that "
                "the policy was trained for, or train a new policy"
            )
            raise SpaceError(
                f"Policy {policy_id!r} was trained with the {name} {mine}, but the environment has "
                f"{own}, with {'other' if what in _PLURALS else 'another'} {what}. {advice}."
            )


def difference(one: gym.Space[Any], other: gym.Space[Any]) -> str | None:
    """Returns the most important difference of two spaces; None if they are equal.

    >>> difference(spaces.Discrete(2), spaces.Discrete(3))
    'number of values'
    >>> difference(spaces.Box(-1, 1, (2,)), spaces.Box(-2, 2, (2,)))
    'bounds'
    """
    if one == other and one.dtype == other.dtype:
        return None
    if isinstance(one, _NESTED) and isinstance(other, _NESTED):
        mine, own = _parts(one), _parts(other)
        if type(one) is not type(other) or mine.keys() != own.keys():
            return "parts"
        found = {difference(part, own[key]) for key, part in mine.items()}
        return next((what for what in _DIFFERENCES if what in found), None)
    if type(one) is not type(other) or not isinstance(one, LEAF_SPACES):
        return "kind"
    if one.shape != other.shape:
        return "shape"
    if not isinstance(one, spaces.Box):
        (first, last), (low, high) = _range(one), _range(other)
        if not np.array_equal(last - first, high - low):
            return "number of values"
    return "bounds" if one.dtype == other.dtype else "dtype"


def holds(wide: gym.Space[Any], narrow: gym.Space[Any], *, in_part: bool = False) -> bool:
    """Returns whether each element of `narrow` is also valid for `wide`.

    Spaces other than Dict, Tuple, Box, Discrete, MultiDiscrete and MultiBinary are not compared.

    Args:
        wide: the space that must contain the elements.
        narrow: the space of the elements.
        allow_extra_parts: whether elements may have parts that `wide` lacks.

    >>> holds(spaces.Discrete(5), spaces.Discrete(2)), holds(spaces.Discrete(2), spaces.Discrete(5))
    (True, False)
    """
    both = (wide, narrow)
    if not all(isinstance(space, (*_NESTED, *LEAF_SPACES)) for space in both):
        return True
    if isinstance(wide, _NESTED) and isinstance(narrow, _NESTED):
        outer, inner = _parts(wide), _parts(narrow)
        if not (outer.keys() <= inner.keys() if in_part else outer.keys() == inner.keys()):
            return False
        return all(holds(part, inner[key], in_part=in_part) for key, part in outer.items())
    if any(isinstance(space, _NESTED) for space in both):
        return False
    if wide.shape != narrow.shape or (is_float_box(narrow) and not is_float_box(wide)):
        return False
    if any(isinstance(space, spaces.Box) for space in both):
        return True
    (first, last), (low, high) = _range(wide), _range(narrow)
    return bool(np.all(first <= low) and np.all(high <= last))


def _parts(space: spaces.Dict | spaces.Tuple[Any]) -> dict[Any, gym.Space[Any]]:
    return dict(space.items() if isinstance(space, spaces.Dict) else enumerate(space))


def _range(space: Any) -> tuple[Any, Any]:
    """Returns the smallest and the largest number of a discrete space."""
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    count = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return space.start, space.start + count - 1


class AgentSpaces:
    """Checks the spaces of policies and agents, once for each pair.

    Args:
        policies_observe_env: whether policies get the environment's own observations; False with an
            `observation_fn`.
    """

    def __init__(self, *, observed: bool) -> None:
        self._observed = observed
        self._met: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()

    def check(self, env: object, agent: Hashable, policy_id: str, policy: Policy) -> None:
        """Checks that a policy can act for an agent; see `require_fitting_spaces`.

        Spaces that the environment does not define are not checked, nor are spaces before or after
        connectors: these check their input themselves.

        Raises:
            SpaceError: if it cannot.
        """
        met = self._met.setdefault(policy, set())
        if agent in met or not isinstance(env, MultiAgentEnv):
            return
        seen = done = None
        if self._observed and policy.agent_connectors is None:
            seen = space_of(env, "observation_space", agent)
        if policy.action_connectors is None:
            done = space_of(env, "action_space", agent)
        whose = f"agent {agent!r} of {type(env).__name__}"
        require_fitting_spaces(policy_id, policy, whose, seen, done)
        if len(met) >= _MOST_AGENTS:
            met.clear()
        met.add(agent)


def space_of(env: MultiAgentEnv, name: str, agent: Hashable) -> gym.Space[Any] | None:
    """Returns the `observation_space` or `action_space` of an agent; None if it is not defined."""
    try:
        space: gym.Space[Any] = getattr(env, f"{name}_of")(agent)
        return space
    except EnvError:  # not defined, or not for this agent
        return None
