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
_WEIGHT_INDEPENDENT = ("dtype", "bounds")  # differences that leave weights usable
_NESTED = (spaces.Dict, spaces.Tuple)
_MAX_AGENTS = 4096  # remembered per policy


def require_compatible_spaces(
    policy_id: str,
    policy: Policy,
    source: str,
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
    """
    env_spaces = (observation_space, action_space)
    for name, env_space, policy_space in zip(_NAMES, env_spaces, policy.driver.spaces, strict=True):
        if (
            not isinstance(policy_space, gym.Space)
            or not isinstance(env_space, gym.Space)
            or policy_space is env_space
        ):
            continue
        is_action = name == "action_space"
        if (
            contains_space(env_space, policy_space)
            if is_action
            else contains_space(policy_space, env_space, allow_extra_parts=True)
        ):
            continue
        reason = "which cannot hold its actions" if is_action else "which it cannot read"
        raise SpaceError(
            f"Policy {policy_id!r} has the {name} {policy_space}, but {source} has {env_space}, "
            f"{reason}. Omit {name} in the PolicySpec to use the environment's, let another policy "
            f"act there, or correct the environment's {name} (a Dict by agent id if agents have "
            "different ones)."
        )


def require_trained_spaces(
    policy_id: str, trained_spaces: Spaces, env_spaces: Spaces, *, allow_different: bool
) -> None:
    """Checks that an environment has the spaces that a policy was trained with.

    Other bounds of observations are only logged; any other difference is an error.

    Args:
        policy_id: of the policy.
        trained_spaces: spaces of the policy when it was saved.
        env_spaces: spaces of the environment after connectors; compared only if they are Gymnasium
            spaces.
        allow_different: accepts other dtypes and bounds, on which weights do not depend.
    """
    for name, trained_space, env_space in zip(_NAMES, trained_spaces, env_spaces, strict=True):
        if not isinstance(trained_space, gym.Space) or not isinstance(env_space, gym.Space):
            continue
        mismatch = find_difference(trained_space, env_space)
        if mismatch == "bounds" and name == "observation_space":
            logger.warning(
                "Policy %r was trained with the observation_space %s; the environment has other "
                "bounds: %s.",
                policy_id,
                trained_space,
                env_space,
            )
        elif mismatch is not None and not (allow_different and mismatch in _WEIGHT_INDEPENDENT):
            advice = (
                "If that is intended, pass allow_other_spaces=True (`--allow-other-spaces`)"
                if mismatch in _WEIGHT_INDEPENDENT
                else "Its weights cannot be used there: give an environment with the spaces that "
                "the policy was trained for, or train a new policy"
            )
            raise SpaceError(
                f"Policy {policy_id!r} was trained with the {name} {trained_space}, but the "
                f"environment has {env_space}, with "
                f"{'other' if mismatch in _PLURALS else 'another'} {mismatch}. {advice}."
            )


def find_difference(expected: gym.Space[Any], actual: gym.Space[Any]) -> str | None:
    """Returns the most important difference of two spaces; None if they are equal.

    >>> find_difference(spaces.Discrete(2), spaces.Discrete(3))
    'number of values'
    >>> find_difference(spaces.Box(-1, 1, (2,)), spaces.Box(-2, 2, (2,)))
    'bounds'
    """
    if expected == actual and expected.dtype == actual.dtype:
        return None
    if isinstance(expected, _NESTED) and isinstance(actual, _NESTED):
        expected_parts, actual_parts = _get_parts(expected), _get_parts(actual)
        if type(expected) is not type(actual) or expected_parts.keys() != actual_parts.keys():
            return "parts"
        differences = {
            find_difference(part, actual_parts[key]) for key, part in expected_parts.items()
        }
        return next((name for name in _DIFFERENCES if name in differences), None)
    if type(expected) is not type(actual) or not isinstance(expected, LEAF_SPACES):
        return "kind"
    if expected.shape != actual.shape:
        return "shape"
    if not isinstance(expected, spaces.Box):
        (first, last), (low, high) = _get_range(expected), _get_range(actual)
        if not np.array_equal(last - first, high - low):
            return "number of values"
    return "bounds" if expected.dtype == actual.dtype else "dtype"


def contains_space(
    wide: gym.Space[Any], narrow: gym.Space[Any], *, allow_extra_parts: bool = False
) -> bool:
    """Returns whether each element of `narrow` is also valid for `wide`.

    Spaces other than Dict, Tuple, Box, Discrete, MultiDiscrete and MultiBinary are not compared.

    Args:
        wide: the space that must contain the elements.
        narrow: the space of the elements.
        allow_extra_parts: whether elements may have parts that `wide` lacks.

    >>> contains_space(spaces.Discrete(5), spaces.Discrete(2))
    True
    >>> contains_space(spaces.Discrete(2), spaces.Discrete(5))
    False
    """
    both = (wide, narrow)
    if not all(isinstance(space, (*_NESTED, *LEAF_SPACES)) for space in both):
        return True
    if isinstance(wide, _NESTED) and isinstance(narrow, _NESTED):
        outer, inner = _get_parts(wide), _get_parts(narrow)
        if not (
            outer.keys() <= inner.keys() if allow_extra_parts else outer.keys() == inner.keys()
        ):
            return False
        return all(
            contains_space(part, inner[key], allow_extra_parts=allow_extra_parts)
            for key, part in outer.items()
        )
    if any(isinstance(space, _NESTED) for space in both):
        return False
    if wide.shape != narrow.shape or (is_float_box(narrow) and not is_float_box(wide)):
        return False
    if any(isinstance(space, spaces.Box) for space in both):
        return True
    (first, last), (low, high) = _get_range(wide), _get_range(narrow)
    return bool(np.all(first <= low) and np.all(high <= last))


def _get_parts(space: spaces.Dict | spaces.Tuple[Any]) -> dict[Any, gym.Space[Any]]:
    return dict(space.items() if isinstance(space, spaces.Dict) else enumerate(space))


def _get_range(space: Any) -> tuple[Any, Any]:
    """Returns the smallest and the largest number of a discrete space."""
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    count = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return space.start, space.start + count - 1


class AgentSpaceChecker:
    """Checks the spaces of policies and agents, once for each pair.

    Args:
        policies_observe_env: whether policies get the environment's own observations; False with an
            `observation_fn`.
    """

    def __init__(self, *, policies_observe_env: bool) -> None:
        self._policies_observe_env = policies_observe_env
        self._checked_agents: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()

    def check(self, env: object, agent: Hashable, policy_id: str, policy: Policy) -> None:
        """Checks that a policy can act for an agent; see `require_compatible_spaces`.

        Spaces that the environment does not define are not checked, nor are spaces before or after
        connectors: these check their input themselves.

        Raises:
            SpaceError: if it cannot.
        """
        checked = self._checked_agents.setdefault(policy, set())
        if agent in checked or not isinstance(env, MultiAgentEnv):
            return
        observation_space = action_space = None
        if self._policies_observe_env and policy.agent_connectors is None:
            observation_space = get_agent_space(env, "observation_space", agent)
        if policy.action_connectors is None:
            action_space = get_agent_space(env, "action_space", agent)
        source = f"agent {agent!r} of {type(env).__name__}"
        require_compatible_spaces(policy_id, policy, source, observation_space, action_space)
        if len(checked) >= _MAX_AGENTS:
            checked.clear()
        checked.add(agent)


def get_agent_space(env: MultiAgentEnv, name: str, agent: Hashable) -> gym.Space[Any] | None:
    """Returns the `observation_space` or `action_space` of an agent; None if it is not defined."""
    try:
        space: gym.Space[Any] = getattr(env, f"get_{name}")(agent)
        return space
    except EnvError:  # not defined, or not for this agent
        return None
