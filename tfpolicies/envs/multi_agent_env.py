"""Environments with several agents: observations, actions and results are dicts by agent id."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
from gymnasium import spaces

from tfpolicies.envs.fault_tolerance import check_flag
from tfpolicies.errors import EnvError, suggest_similar_names

ByAgent: TypeAlias = dict[Any, Any]
Flags: TypeAlias = Mapping[Any, bool]
Options: TypeAlias = dict[str, Any] | None
ALL = "__all__"
COMMON = "__common__"


class MultiAgentStepResult(NamedTuple):
    """Result of one step of a multi-agent environment: five dicts by agent id."""

    obs: Mapping[Any, Any]
    rewards: Mapping[Any, float]
    terminateds: Flags  # with "__all__"
    truncateds: Flags  # with "__all__"
    infos: Mapping[Any, Any]  # of agents in obs, and "__common__"


class MultiAgentEnv(gym.Env):
    """An environment with several agents; subclass it and write `reset` and `step`.

    An agent that is in a dict of observations, and not done, acts in the next step: all agents
    (simultaneous games), one (turn-based games), or anything in between. Agents may appear in the
    middle of an episode and leave before its end. An agent's reward counts for its last action, in
    whatever step it comes; rewards of several steps add up until the agent's next observation.

    Attributes:
        observation_space: one space for all agents, or a `Dict` space by agent id.
        action_space: one space for all agents, or a `Dict` space by agent id.
        _agent_ids: the ids of all agents that may appear. Optional if `possible_agents` is set, or
            a space is a Dict by agent id that has them all.
    """

    _agent_ids: Collection[Any] = ()

    @abc.abstractmethod
    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Any, ByAgent]:
        """Starts an episode; begin yours with `super().reset(seed=seed)`, for `self.np_random`.

        Returns:
            The observations of the agents that act first, and infos of some of them.
        """
        super().reset(seed=seed, options=options)
        return {}, {}

    @abc.abstractmethod
    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        """Takes the actions of the agents whose turn it is.

        Returns:
            observations, rewards, terminateds, truncateds, infos: dicts by agent id. Those of
            terminateds and truncateds have the key "__all__": whether the episode is over. An agent
            whose flag is set does not act again in this episode. Infos belong to agents with an
            observation, or are common to all under "__common__".
        """

    def get_agent_ids(self) -> set[Any]:
        """Returns the ids of all agents that may appear; an empty set if they are not declared."""
        agent_ids = self._agent_ids or getattr(self, "possible_agents", ())
        if agent_ids:
            return set(agent_ids)
        env_spaces = (getattr(self, name, None) for name in ("observation_space", "action_space"))
        by_agent: list[Any] = [space for space in env_spaces if _is_keyed(space)]
        have_same_keys = len(by_agent) == 2 and set(by_agent[0].keys()) == set(by_agent[1].keys())
        return set(by_agent[0].keys()) if have_same_keys else set()

    def get_observation_space(self, agent_id: Hashable) -> spaces.Space:
        """Returns the observation space of one agent.

        Raises:
            EnvError: if `observation_space` is a Dict by agent id without this agent.
        """
        return self._get_space("observation_space", agent_id)

    def get_action_space(self, agent_id: Hashable) -> spaces.Space:
        """Returns the action space of one agent.

        Raises:
            EnvError: if `action_space` is a Dict by agent id without this agent.
        """
        return self._get_space("action_space", agent_id)

    def _get_space(self, name: str, agent_id: Hashable) -> spaces.Space:
        space: Any = getattr(self, name, None)
        if space is None:
            raise EnvError(
                f"{type(self).__name__} has no `{name}`. Set it in `__init__`: one space for all "
                "agents, or a gymnasium.spaces.Dict by agent id."
            )
        # `agent in space` would test if the id is an element of the space.
        agent_ids = list(space.keys()) if _is_keyed(space) else []
        if not self.get_agent_ids().intersection(agent_ids):
            return space
        if agent_id not in agent_ids:
            raise EnvError(
                f"`{name}` of {type(self).__name__} is a Dict by agent id, but has no agent "
                f"{agent_id!r}, only "
                f"{agent_ids}.{suggest_similar_names(str(agent_id), map(str, agent_ids))} "
                "Add the agent's space, or correct its id."
            )
        return space[agent_id]

    def observation_space_contains(self, x: Mapping[Any, Any]) -> bool:
        """Returns True if each observation of a dict by agent id is in its agent's space."""
        return all(self.get_observation_space(agent).contains(obs) for agent, obs in x.items())

    def action_space_contains(self, x: Mapping[Any, Any]) -> bool:
        """Returns True if each action of a dict by agent id is in its agent's space."""
        return all(self.get_action_space(agent).contains(action) for agent, action in x.items())

    def observation_space_sample(self, agent_ids: Iterable[Any] | None = None) -> ByAgent:
        """Returns random observations by agent id, of all agents by default."""
        return {a: self.get_observation_space(a).sample() for a in self._select_agents(agent_ids)}

    def action_space_sample(self, agent_ids: Iterable[Any] | None = None) -> ByAgent:
        """Returns random actions by agent id, of all agents by default."""
        return {a: self.get_action_space(a).sample() for a in self._select_agents(agent_ids)}

    def _select_agents(self, agent_ids: Iterable[Any] | None) -> list[Any]:
        return sorted(self.get_agent_ids(), key=str) if agent_ids is None else list(agent_ids)

    def with_agent_groups(
        self,
        groups: Mapping[Any, list[Any]],
        obs_space: spaces.Space | None = None,
        act_space: spaces.Space | None = None,
    ) -> MultiAgentEnv:
        """Returns this environment with some agents joined to groups that act as one.

        A group observes and acts in tuples, in the order of its members. Its reward is the sum of
        the rewards of its members, which are in its info as `individual_rewards`.

        Args:
            groups: the members' ids by the group's id; agents in no group stay separate.
            obs_space: the observation space of a group, a Tuple; by default that of its members.
            act_space: the action space of a group, a Tuple; by default that of its members.

        Raises:
            EnvError: if an agent is in two groups, or a group has no members.
        """
        return GroupedAgentsEnv(self, groups, obs_space, act_space)


def _is_keyed(space: gym.Space | Mapping[Any, gym.Space] | None) -> bool:
    return isinstance(space, spaces.Dict | Mapping)


def make_multi_agent(
    env_name_or_creator: str | Callable[[Mapping[str, Any]], gym.Env],
) -> type[MultiAgentEnv]:
    """Returns an environment class in which each agent plays a separate copy of an environment.

    The agents `0 .. num_agents - 1` start together; the episode is over when all of them are done.
    The class is called with a config: `num_agents` (1 by default), and the settings of the creator.

    Args:
        env_name_or_creator: a name registered with Gymnasium, or `f(config)` that returns a
            `gymnasium.Env`.

    >>> env = make_multi_agent("CartPole-v1")({"num_agents": 2})
    >>> sorted(env.reset(seed=3)[0]), env.step({0: 1, 1: 0})[1]
    ([0, 1], {0: 1.0, 1: 1.0})
    """
    source = env_name_or_creator

    def make_by_name(config: Mapping[str, Any]) -> gym.Env:
        return gym.make(str(source), render_mode=config.get("render_mode"))

    create = make_by_name if isinstance(source, str) else source

    class IndependentAgents(MultiAgentEnv):
        """One copy of an environment for each agent."""

        def __init__(self, config: Mapping[str, Any] | None = None) -> None:
            settings = {} if config is None else config
            count = settings.get("num_agents", 1)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise EnvError(f"config['num_agents'] must be an integer >= 1, got {count!r}.")
            self.envs = [create(settings) for _ in range(count)]
            self._agent_ids = set(range(count))
            self.observation_space = self.envs[0].observation_space
            self.action_space = self.envs[0].action_space
            self.metadata, self.render_mode = self.envs[0].metadata, self.envs[0].render_mode
            self._playing: set[int] = set()

        def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[dict, dict]:
            self._playing = set(self._agent_ids)
            results = {
                i: env.reset(seed=None if seed is None else seed + i, options=options)
                for i, env in enumerate(self.envs)
            }
            return {i: x[0] for i, x in results.items()}, {i: x[1] for i, x in results.items()}

        def step(self, action_dict: Mapping[Any, Any]) -> Any:
            results = {i: self.envs[i].step(action) for i, action in action_dict.items()}
            obs, rewards, terminateds, truncateds, infos = (
                {i: result[k] for i, result in results.items()} for k in range(5)
            )
            self._playing -= {i for i in results if terminateds[i] or truncateds[i]}
            over = not self._playing
            is_truncated = over and all(truncateds[i] and not terminateds[i] for i in results)
            terminateds[ALL], truncateds[ALL] = over and not is_truncated, is_truncated
            return MultiAgentStepResult(obs, rewards, terminateds, truncateds, infos)

        def render(self) -> Any:
            return self.envs[0].render()

        def close(self) -> None:
            for env in self.envs:
                env.close()

    return IndependentAgents


class GroupedAgentsEnv(MultiAgentEnv):
    """A multi-agent environment in which groups of agents replace their members.

    A group has an observation when one of its members has one; a member without one, because it is
    done or waits, contributes its last observation. The group is done when all its members are.

    Args:
        env: the environment.
        groups: the members' ids by the group's id.
        obs_space: the observation space of a group; by default the Tuple of its members' spaces.
        act_space: the action space of a group; by default the Tuple of its members' spaces.

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
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self.groups = {group: list(members) for group, members in groups.items()}
        self._group_by_agent: ByAgent = {}
        for group, members in self.groups.items():
            if not members:
                raise EnvError(f"Group {group!r} has no members; name at least one agent.")
            for agent in members:
                if agent in self._group_by_agent:
                    raise EnvError(
                        f"Agent {agent!r} is in the groups {self._group_by_agent[agent]!r} and "
                        f"{group!r}; an agent can be in one only."
                    )
                self._group_by_agent[agent] = group
        ungrouped = env.get_agent_ids() - set(self._group_by_agent)
        self._agent_ids = ungrouped | set(self.groups)
        self.observation_space = self._join_spaces(ungrouped, env.get_observation_space, obs_space)
        self.action_space = self._join_spaces(ungrouped, env.get_action_space, act_space)
        self._last_obs: ByAgent = {}
        self._done_agents: set[Any] = set()

    def _join_spaces(
        self,
        ungrouped: set[Any],
        get_space: Callable[[Hashable], gym.Space],
        group_space: spaces.Space | None,
    ) -> spaces.Dict:
        spaces_by_id = {agent: get_space(agent) for agent in ungrouped}
        for group, members in self.groups.items():
            joint_space = spaces.Tuple([get_space(agent) for agent in members])
            spaces_by_id[group] = joint_space if group_space is None else group_space
        return spaces.Dict(sorted(spaces_by_id.items(), key=lambda item: str(item[0])))

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[ByAgent, ByAgent]:
        obs, infos = self.env.reset(seed=seed, options=options)
        self._last_obs, self._done_agents = {}, set()
        grouped = self._group_obs(obs)
        return grouped, self._group_infos(infos, grouped)

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        actions: ByAgent = {}
        for agent, action in action_dict.items():
            if agent in self.groups:
                pairs = zip(self.groups[agent], action, strict=True)
                actions.update((a, part) for a, part in pairs if a in self._acting_agents)
            else:
                actions[agent] = action
        obs, rewards, terminateds, truncateds, infos = self.env.step(actions)
        for name, flags in (("terminateds", terminateds), ("truncateds", truncateds)):
            for agent in (
                flags.keys() & self._group_by_agent.keys()
            ):  # flags of groups are made below
                check_flag(flags[agent], f"{name}[{agent!r}]", "`step` of the grouped environment")
        self._done_agents |= {a for f in (terminateds, truncateds) for a, flag in f.items() if flag}
        grouped = self._group_obs(obs)
        group_infos = self._group_infos(infos, grouped)
        group_rewards: dict[Any, float] = {}
        for agent, reward in rewards.items():
            group = self._group_by_agent.get(agent, agent)
            group_rewards[group] = group_rewards.get(group, 0.0) + reward
        for group in self.groups.keys() & grouped.keys():
            member_rewards = [rewards.get(agent, 0.0) for agent in self.groups[group]]
            group_infos.setdefault(group, {})["individual_rewards"] = member_rewards
        ends = self._group_ends(terminateds, truncateds)
        return MultiAgentStepResult(grouped, group_rewards, *ends, group_infos)

    def _group_obs(self, obs: Mapping[Any, Any]) -> ByAgent:
        self._last_obs.update(obs)
        self._acting_agents = {agent for agent in obs if agent not in self._done_agents}
        grouped = {agent: x for agent, x in obs.items() if agent not in self._group_by_agent}
        for group in {self._group_by_agent[a]: None for a in obs if a in self._group_by_agent}:
            missing = [agent for agent in self.groups[group] if agent not in self._last_obs]
            if missing:
                raise EnvError(
                    f"Group {group!r} has an observation, but its members {missing} never had "
                    "one in this episode. Group agents that start together."
                )
            grouped[group] = tuple(self._last_obs[agent] for agent in self.groups[group])
        return grouped

    def _group_infos(self, infos: Mapping[Any, Any], obs: Mapping[Any, Any]) -> ByAgent:
        grouped = {a: info for a, info in infos.items() if a in obs or a == COMMON}
        for group in self.groups.keys() & obs.keys():
            member_infos = [infos.get(agent, {}) for agent in self.groups[group]]
            grouped[group] = {"individual_infos": member_infos}
        return grouped

    def _group_ends(self, terminateds: Flags, truncateds: Flags) -> tuple[ByAgent, ByAgent]:
        """Returns the flags; a group is truncated if any of its members was."""
        ends: tuple[ByAgent, ByAgent] = ({}, {})
        for group_flags, flags in zip(ends, (terminateds, truncateds), strict=True):
            group_flags.update((a, f) for a, f in flags.items() if a not in self._group_by_agent)
        for group, members in self.groups.items():
            if all(agent in self._done_agents for agent in members):
                is_truncated = any(truncateds.get(agent, False) for agent in members)
                ends[0][group], ends[1][group] = not is_truncated, is_truncated
        return ends

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()
