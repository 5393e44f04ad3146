"""Checks that no agent of a worker's environments is mapped to a policy that is to be removed."""

from __future__ import annotations

import itertools
from typing import Any

from tfpolicies.config.multi_agent import require_mapping_fn
from tfpolicies.envs.checking import same_randomness
from tfpolicies.errors import UsageError

_DRAWS = 16  # calls of a mapping function for an agent, to see which policies it may give


def require_unmapped(worker: Any, policy_id: str, policy_mapping_fn: Any = None) -> None:
    """Checks that the mapping function gives a policy to none of the agents.

    The function is called for each agent that the environment names, with running episodes or
    with None, several times, since it may draw policies. Where it raises an error nothing is
    known. The generators of `random` and NumPy stay as they are.

    Args:
        worker: a `RolloutWorker`.
        policy_id: of the policy.
        policy_mapping_fn: the function; None for the one there is.

    Raises:
        ConfigError: if it is not a function.
        UsageError: if it gives the policy to an agent.
    """
    require_mapping_fn(policy_mapping_fn)
    mapping = policy_mapping_fn or worker.policy_mapping_fn
    if policy_id not in worker.policy_map or worker.env is None:
        return
    agents = sorted(getattr(worker.env, "get_agent_ids", set)(), key=str)
    episodes = getattr(worker.sampler, "running_episodes", None) or [None]
    for agent, episode in itertools.product(agents, episodes):
        try:
            with same_randomness():
                drawn = {mapping(agent, episode, worker=worker) for _ in range(_DRAWS)}
        except Exception:
            continue
        if policy_id in drawn:
            name = getattr(mapping, "__qualname__", repr(mapping))
            raise UsageError(
                f"Policy {policy_id!r} cannot be removed: policy_mapping_fn ({name:.200}) "
                f"gives it to agent {agent!r}. Give another mapping in the same call, "
                f"remove_policy({policy_id!r}, policy_mapping_fn=...). To replace the policy, "
                f"go on with add_policy({policy_id!r}, ..., policy_mapping_fn=...), where the "
                "mapping may be the old one; or let it become a copy of another one: "
                f"get_policy({policy_id!r}).set_state(get_policy(OTHER).get_state())."
            )
