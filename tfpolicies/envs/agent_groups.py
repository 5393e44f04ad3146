"""Agents that act together as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium import spaces

from tfpolicies.envs.multi_agent_env import COMMON, MultiAgentEnv, MultiAgentStep
from tfpolicies.envs.repairs import check_flag
from tfpolicies.errors import EnvError


class GroupedAgents(MultiAgentEnv):
    """A multi-agent environment with groups of agents in the place of their members.

    A group has an observation when one of its members has one; for a member that has none, because
    it is done or waits, the last one stands in. It is done when all its members are.

    Args:
        env: the environment.
        groups: the members' ids by the group's id.
        obs_space: the observation space of a group; by default the Tuple of its members' spaces.
        act_space: the action space of a group, likewise.

    Raises:
        EnvError: if an agent is in two groups, or a group has no members; by `reset` and `step`, if
            a group has an observation but one of its members never had one.
    """

    def __init__(
        self,
        env: MultiAgentEnv,
        groups: Mapping[Any, list[Any]],
        obs_space: spaces.Space | None = None,
        act_space: spaces.Space | None = None,
    ) -> None:
        self.env = env
        self.groups = {group: list(members) for group, members in groups.items()}
        self._group_of: dict[Any, Any] = {}
        for group, members in self.groups.items():
            if not members:
                raise EnvError(f"Group {group!r} has no members; name at least one agent.")
            for agent in members:
                if agent in self._group_of:
                    raise EnvError(
                        f"Agent {agent!r} is in the groups {self._group_of[agent]!r} and "
                        f"{group!r}; an agent can be in one only."
                    )
                self._group_of[agent] = group
        alone = env.get_agent_ids() - set(self._group_of)
        self._agent_ids = alone | set(self.groups)
        self.observation_space = self._joined(alone, env.observation_space_of, obs_space)
        self.action_space = self._joined(alone, env.action_space_of, act_space)
        self._last: dict[Any, Any] = {}
        self._done: set[Any] = set()

    def _joined(self, alone: set[Any], space_of: Any, given: spaces.Space | None) -> spaces.Dict:
        found = {agent: space_of(agent) for agent in alone}
        for group, members in self.groups.items():
            own = spaces.Tuple([space_of(agent) for agent in members])
            found[group] = own if given is None else given
        return spaces.Dict(sorted(found.items(), key=lambda item: str(item[0])))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        obs, infos = self.env.reset(seed=seed, options=options)
        self._last, self._done = {}, set()
        grouped = self._group_obs(obs)
        return grouped, self._group_infos(infos, grouped)

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        actions: dict[Any, Any] = {}
        for agent, action in action_dict.items():
            if agent in self.groups:
                pairs = zip(self.groups[agent], action, strict=True)
                actions.update((a, part) for a, part in pairs if a in self._waiting)
            else:
                actions[agent] = action
        obs, rewards, terminateds, truncateds, infos = self.env.step(actions)
        for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            for agent in flags.keys() & self._group_of.keys():  # their groups have other flags
                check_flag(flags[agent], f"{name}[{agent!r}]", "`step` of the grouped environment")
        self._done |= {a for f in (terminateds, truncateds) for a, flag in f.items() if flag}
        grouped = self._group_obs(obs)
        group_infos = self._group_infos(infos, grouped)
        group_rewards: dict[Any, float] = {}
        for agent, reward in rewards.items():
            group = self._group_of.get(agent, agent)
            group_rewards[group] = group_rewards.get(group, 0.0) + reward
        for group in self.groups.keys() & grouped.keys():
            own = [rewards.get(agent, 0.0) for agent in self.groups[group]]
            group_infos.setdefault(group, {})["individual_rewards"] = own
        ends = self._group_ends(terminateds, truncateds)
        return MultiAgentStep(grouped, group_rewards, *ends, group_infos)

    def _group_obs(self, obs: Mapping[Any, Any]) -> dict[Any, Any]:
        self._last.update(obs)
        self._waiting = {agent for agent in obs if agent not in self._done}
        found = {agent: x for agent, x in obs.items() if agent not in self._group_of}
        for group in {self._group_of[a]: None for a in obs if a in self._group_of}:
            missing = [agent for agent in self.groups[group] if agent not in self._last]
            if missing:
                raise EnvError(
                    f"Group {group!r} has an observation, but its members {missing} never had "
                    "one in this episode. Group agents that start together."
                )
            found[group] = tuple(self._last[agent] for agent in self.groups[group])
        return found

    def _group_infos(self, infos: Mapping[Any, Any], obs: Mapping[Any, Any]) -> dict[Any, Any]:
        found = {a: info for a, info in infos.items() if a in obs or a == COMMON}
        for group in self.groups.keys() & obs.keys():
            own = [infos.get(agent, {}) for agent in self.groups[group]]
            found[group] = {"individual_infos": own}
        return found

    def _group_ends(
        self, terminateds: Mapping[Any, bool], truncateds: Mapping[Any, bool]
    ) -> tuple[dict[Any, bool], dict[Any, bool]]:
        """Returns the flags; a group is truncated if one of those who ended it was."""
        ends: tuple[dict[Any, bool], dict[Any, bool]] = ({}, {})
        for found, flags in zip(ends, (terminateds, truncateds), strict=True):
            found.update((a, f) for a, f in flags.items() if a not in self._group_of)
        for group, members in self.groups.items():
            if all(agent in self._done for agent in members):
                cut = any(truncateds.get(agent, False) for agent in members)
                ends[0][group], ends[1][group] = not cut, cut
        return ends

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()
