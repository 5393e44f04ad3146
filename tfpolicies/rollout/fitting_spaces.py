"""Whether a policy's spaces fit those of the agents that it acts for."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies.envs.multi_agent_env import MultiAgentEnv
from tfpolicies.errors import EnvError, SpaceError
from tfpolicies.models.spaces import LEAF_SPACES, is_float_box

_NAMES = ("observation_space", "action_space")
_NESTED = (spaces.Dict, spaces.Tuple)
_MOST_AGENTS = 4096  # that are remembered per policy


def require_fitting_spaces(
    policy_id: str, policy: Any, whose: str, observation_space: Any, action_space: Any
) -> None:
    """Checks that a policy can read what an environment gives, and that its actions are allowed.

    Refused is only what cannot be right: leaves of another shape, floats where integers are meant,
    numbers out of the range of a Discrete or its like, and parts that are missing. Bounds and
    precisions of Boxes may differ, and observations may have parts that the policy does not read.

    Args:
        policy_id: of the policy.
        policy: one whose spaces are no Gymnasium spaces is not checked.
        whose: the spaces are, for the message.
        observation_space: of the environment; anything but a space is not checked.
        action_space: likewise.

    Raises:
        SpaceError: naming both spaces.
    """
    for name, own in zip(_NAMES, (observation_space, action_space), strict=True):
        mine = getattr(policy, name, None)
        if not isinstance(mine, gym.Space) or not isinstance(own, gym.Space) or mine is own:
            continue
        acts = name == "action_space"
        if holds(own, mine) if acts else holds(mine, own, in_part=True):
            continue
        why = "which cannot hold its actions" if acts else "which it cannot read"
        raise SpaceError(
            f"Policy {policy_id!r} has the {name} {mine}, but {whose} has {own}, {why}. Leave "
            f"{name} out of the PolicySpec to take the environment's, let another policy act "
            f"there, or correct the environment's {name} (a Dict by agent id where agents have "
            "different ones)."
        )


def holds(wide: gym.Space, narrow: gym.Space, *, in_part: bool = False) -> bool:
    """Whether elements of one space can be taken for elements of another.

    Spaces that are neither Dict, Tuple, Box, Discrete, MultiDiscrete nor MultiBinary are not
    compared.

    Args:
        wide: the space that is to hold them.
        narrow: where they are from.
        in_part: whether the elements may have parts that `wide` lacks.

    >>> holds(spaces.Discrete(5), spaces.Discrete(2)), holds(spaces.Discrete(2), spaces.Discrete(5))
    (True, False)
    """
    both = (wide, narrow)
    if not all(isinstance(space, (*_NESTED, *LEAF_SPACES)) for space in both):
        return True
    if all(isinstance(space, _NESTED) for space in both):
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


def _parts(space: Any) -> dict[Any, gym.Space]:
    return dict(space.items() if isinstance(space, spaces.Dict) else enumerate(space))


def _range(space: Any) -> tuple[Any, Any]:
    """Returns the least and the largest number of a Discrete or its like."""
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    count = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return space.start, space.start + count - 1


class AgentSpaces:
    """Checks the spaces of policies and agents when they meet, once for each pair.

    Args:
        observed: whether policies observe what environments give; not so behind an
            `observation_fn`.
    """

    def __init__(self, *, observed: bool) -> None:
        self._observed = observed
        self._met: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()

    def check(self, env: Any, agent: Any, policy_id: str, policy: Any) -> None:
        """Checks that a policy can act for an agent; see `require_fitting_spaces`.

        What the environment does not tell is not checked; nor is what stands behind connectors,
        which check what they take.

        Raises:
            SpaceError: if it cannot.
        """
        met = self._met.setdefault(policy, set())
        if agent in met or not isinstance(env, MultiAgentEnv):
            return
        seen = done = None
        if self._observed and policy.agent_connectors is None:
            seen = _space(env, "observation_space", agent)
        if policy.action_connectors is None:
            done = _space(env, "action_space", agent)
        whose = f"agent {agent!r} of {type(env).__name__}"
        require_fitting_spaces(policy_id, policy, whose, seen, done)
        if len(met) >= _MOST_AGENTS:
            met.clear()
        met.add(agent)


def _space(env: MultiAgentEnv, name: str, agent: Any) -> gym.Space | None:
    try:
        return getattr(env, f"{name}_of")(agent)
    except EnvError:  # it has none, or none for this agent
        return None
