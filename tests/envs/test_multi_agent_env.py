"""The dict API of environments with several agents: spaces, groups, independent copies."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import CountingEnv
from helpers.multi_agent_envs import SPACE, THREE, Scripted, Staggered, World
from tfpolicies import MultiAgentEnv
from tfpolicies.envs.env_factory import EnvContext, make_any_environments, make_environments
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.envs.vector_adapters import SyncEnvAdapter
from tfpolicies.errors import EnvError

END, GO = {"__all__": True}, {}


class SpacesByAgent(World):
    observation_space = spaces.Dict(a=SPACE, b=spaces.Discrete(4))
    action_space = spaces.Dict(a=THREE, b=spaces.Box(0.0, 1.0, (2,)))
    _agent_ids = ()


class OneDict(World):
    observation_space = spaces.Dict(x=SPACE, n=THREE)


@pytest.mark.core
def test_spaces_are_one_for_all_or_by_agent_id():
    same, by_agent, nested = Staggered(), SpacesByAgent(), OneDict()
    assert same.get_agent_ids() == {"a", "b", "c", "d"}
    assert same.get_observation_space("c") is SPACE
    assert by_agent.get_agent_ids() == {"a", "b"}
    assert by_agent.get_observation_space("b") == spaces.Discrete(4)
    assert by_agent.get_action_space("a") == THREE
    assert nested.get_observation_space("a") is nested.observation_space
    with pytest.raises(EnvError, match=r"no agent 'c', only \['a', 'b'\]"):
        by_agent.get_action_space("c")
    with pytest.raises(EnvError, match="World has no `observation_space`"):
        type("NoWorld", (World,), {"observation_space": None})().get_observation_space("a")


def test_dicts_of_observations_and_actions_are_sampled_and_checked():
    by_agent = SpacesByAgent()
    obs, actions = by_agent.observation_space_sample(), by_agent.action_space_sample(["b"])
    assert sorted(obs) == ["a", "b"]
    assert list(actions) == ["b"]
    assert by_agent.observation_space_contains(obs)
    assert by_agent.action_space_contains(actions)
    assert not by_agent.action_space_contains({"a": 3})
    assert not by_agent.observation_space_contains({"b": 4})


def test_reset_and_step_are_abstract():
    assert issubclass(MultiAgentEnv, gym.Env)
    assert MultiAgentEnv.reset.__isabstractmethod__
    assert MultiAgentEnv.step.__isabstractmethod__


def test_a_group_acts_and_earns_together():
    script = [
        (("a", "b", "c"), {"a": 1.0, "b": 2.0, "c": 4.0}, GO, GO, {"a": {"k": 1}}),
        (("a", "b", "c"), {"a": 1.0, "c": 4.0}, {"b": True}, GO),
        (("a", "c"), {"a": 1.0}, {"a": True}, GO),
        (("c",), {}, END, GO),
    ]
    world = Scripted(script, first=("a", "b", "c"))
    env = world.with_agent_groups({"team": ["a", "b"]})
    assert env.get_agent_ids() == {"team", "c", "d"}
    assert env.get_observation_space("team") == spaces.Tuple((SPACE, SPACE))
    assert env.get_action_space("team") == spaces.Tuple((THREE, THREE))
    obs, infos = env.reset(seed=1)
    assert infos == {"team": {"individual_infos": [{}, {}]}}
    assert sorted(obs) == ["c", "team"]
    assert [x[0] for x in obs["team"]] == [0.0, 1.0]

    obs, rewards, terminateds, truncateds, infos = env.step({"team": (1, 2), "c": 0})
    assert world.acted[-1] == {"a": 1, "b": 2, "c": 0}
    assert rewards == {"team": 3.0, "c": 4.0}
    assert infos["team"] == {"individual_infos": [{"k": 1}, {}], "individual_rewards": [1.0, 2.0]}
    assert not any(terminateds.values())
    assert truncateds == {"__all__": False}

    _, _, terminateds, *_ = env.step({"team": (1, 2), "c": 0})
    assert "team" not in terminateds
    obs, _, terminateds, *_ = env.step({"team": (0, 2), "c": 0})
    assert world.acted[-1] == {"a": 0, "c": 0}  # b is done
    assert [x[2] for x in obs["team"]] == [3.0, 2.0]  # its last observation stands in
    assert terminateds["team"]
    *_, terminateds, _, _ = env.step({"c": 0})
    assert terminateds["__all__"]


def test_impossible_groups_are_refused():
    for groups, words in (
        ({"x": ["a", "b"], "y": ["b"]}, "Agent 'b' is in the groups 'x' and 'y'"),
        ({"x": []}, "Group 'x' has no members"),
        ({"x": ["a", "c"]}, r"its members \['c'\] never had one"),
    ):
        with pytest.raises(EnvError, match=words):
            Staggered().with_agent_groups(groups).reset()
    pair = spaces.Tuple((THREE, THREE))
    grouped = Staggered().with_agent_groups({"x": ["a", "b"]}, act_space=pair)
    assert grouped.get_action_space("x") is pair


@pytest.mark.core
def test_each_agent_plays_its_own_copy():
    envs = []

    def create(config: Any) -> gym.Env:
        envs.append(CountingEnv(len(envs), config["lengths"]))
        return envs[-1]

    env = make_multi_agent(create)({"num_agents": 2, "lengths": (2, 3)})
    assert env.get_agent_ids() == {0, 1}
    obs, infos = env.reset(seed=5)
    assert [x.seeds for x in envs] == [[5], [6]]
    assert obs[1].tolist() == [1.0, 0.0, 0.0]
    assert infos[1] == {"episode": 0}
    env.step({0: 1, 1: 1})
    step = env.step({0: 1, 1: 1})
    assert step.terminateds == {0: True, 1: False, "__all__": False}
    step = env.step({1: 1})
    assert sorted(step.obs) == [1]
    assert step.terminateds["__all__"]
    assert not step.truncateds["__all__"]
    env.close()
    assert [x.closed for x in envs] == [1, 1]
    with pytest.raises(EnvError, match=r"config\['num_agents'\] must be an integer >= 1, got 0"):
        make_multi_agent(create)({"num_agents": 0})


def test_a_creator_of_agents_gives_copies():
    contexts = []

    def create(context: EnvContext) -> MultiAgentEnv:
        contexts.append(context.vector_index)
        return Staggered()

    envs = make_any_environments(create, 3, EnvContext({}))
    assert isinstance(envs, MultiAgentEnvAdapter)
    assert envs.num_envs == 3
    assert contexts == [0, 1, 2]
    assert isinstance(make_any_environments(CountingEnv, 2, EnvContext({})), SyncEnvAdapter)
    with pytest.raises(EnvError, match="has several agents, but one policy is to act"):
        make_environments(Staggered, 1, EnvContext({}))
    one = Staggered()
    with pytest.raises(EnvError, match="returned the same environment twice"):
        make_any_environments(lambda context: one, 2, EnvContext({}))


def test_resets_that_break_the_contract_are_named():
    class Broken(Staggered):
        answer: Any = None

        def reset(self, *, seed=None, options=None):
            return self.answer

    envs = MultiAgentEnvAdapter([Broken()])
    for answer, message in [
        ({}, "must return a pair .observations, infos., got dict"),
        (({}, None), "must return infos as a dict by agent id, got NoneType"),
        (({}, {"a": {}}), "infos of agents without an observation"),
    ]:
        Broken.answer = answer
        with pytest.raises(EnvError, match=message):
            envs.reset(0)
    Broken.answer = {"a": np.zeros(3)}, {"__common__": {}}
    assert list(envs.reset(0)[0]) == ["a"]
