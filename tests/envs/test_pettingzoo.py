"""PettingZoo's environments, parallel and turn-based, by name, creator and instance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import make
from helpers.multi_agent_envs import sampler_of
from helpers.workers import sampler_with
from tfpolicies import PGTF2Policy
from tfpolicies.compat import PettingZooEnv
from tfpolicies.envs import check_env
from tfpolicies.envs.env_factory import EnvContext, check_env_name, make_any_environments
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.pettingzoo import (
    ParallelPettingZooEnv,
    TurnBasedPettingZooEnv,
    pettingzoo_env,
)
from tfpolicies.errors import EnvError

pytest.importorskip("pettingzoo")

import pettingzoo
from pettingzoo import AECEnv, ParallelEnv

TIC_TAC_TOE = "pettingzoo:classic/tictactoe_v3"
TURN_BASED = [TIC_TAC_TOE, "pettingzoo:classic/connect_four_v3"]
TOGETHER = ["pettingzoo:classic/rps_v2", "mpe2:simple_spread_v3", "mpe2:simple_tag_v3"]


def tictactoe() -> Any:
    return pettingzoo.make("aec", "classic/tictactoe_v3")


def make_policies(env: Any) -> dict[str, Any]:
    """Makes a policy for each agent."""
    model = {"fcnet_hiddens": [4], "conv_filters": []}  # boards are flattened
    return {
        agent: make(
            PGTF2Policy, env.get_observation_space(agent), env.get_action_space(agent), model=model
        )
        for agent in sorted(env.get_agent_ids())
    }


def sampler_by_agent(*envs: Any, policies: Any, length: int, **settings: Any) -> Any:
    settings["mapping"] = lambda agent_id, episode, **kwargs: agent_id
    return sampler_of(*envs, policies=policies, rollout_fragment_length=length, **settings)


@pytest.mark.parametrize("name", TURN_BASED + TOGETHER)
def test_environments_by_name_are_sound_and_are_sampled(name):
    if name.startswith("mpe2"):
        pytest.importorskip("mpe2")
    envs = make_any_environments(name, 2, EnvContext({}))
    assert isinstance(envs, MultiAgentEnvAdapter)
    env = envs.envs[0]
    expected = TurnBasedPettingZooEnv if name in TURN_BASED else ParallelPettingZooEnv
    assert type(env) is expected
    check_env(env, steps=50)
    policies = make_policies(env)
    batch = sampler_by_agent(*envs.envs, policies=policies, length=30).sample()
    assert batch.env_steps() == 60
    assert set(batch.policy_batches) == env.get_agent_ids()
    for agent, part in batch.policy_batches.items():
        assert np.isfinite(part["action_logp"]).all()
        policies[agent].learn_on_batch(part)


def test_a_won_game_gives_both_players_their_reward():
    env = pettingzoo_env(TIC_TAC_TOE)
    assert env.get_observation_space("player_1") == spaces.Dict(
        action_mask=spaces.Box(0, 1, (9,), np.int8),
        observations=tictactoe().observation_space("player_1")["observation"],
    )
    obs, infos = env.reset(seed=0)
    assert list(obs) == ["player_1"]
    assert list(infos) == ["player_1"]
    assert obs["player_1"]["action_mask"].tolist() == [1] * 9
    for move in (0, 3, 1, 4):  # the first player takes a column, the second the next one
        obs, _, terminateds, truncateds, _ = env.step({next(iter(obs)): move})
        assert not terminateds["__all__"]
    assert obs["player_1"]["action_mask"].tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 1]
    with pytest.raises(EnvError, match="It is the turn of agent 'player_1'"):
        env.step({"player_2": 2})
    obs, rewards, terminateds, truncateds, _ = env.step({"player_1": 2})
    assert sorted(obs) == ["player_1", "player_2"]
    assert rewards == {"player_1": 1, "player_2": -1}
    assert terminateds == {"player_1": True, "player_2": True, "__all__": True}
    assert not truncateds["__all__"]


@pytest.mark.core
def test_turns_become_rows_of_their_player():
    env = pettingzoo_env(TIC_TAC_TOE)
    settings = {"policies": make_policies(env), "batch_mode": "complete_episodes"}
    sampler = sampler_by_agent(env, length=9, **settings)
    batch = sampler.sample()
    first, second = batch["player_1"], batch["player_2"]
    assert first.count - second.count in range(len(sampler.metrics) + 1)
    assert batch.agent_steps() == batch.env_steps()  # one player moves at a time
    taken = np.arange(first.count), first["actions"]
    assert first["obs"]["action_mask"][taken].all()
    last = first["terminateds"]
    assert set(first["rewards"][last].tolist()) <= {-1.0, 0.0, 1.0}
    assert not first["rewards"][~last].any()
    for metrics in sampler.metrics:
        assert metrics.episode_reward == 0.0  # what one wins the other loses


class Dying(ParallelEnv):
    """Agent i leaves after i + 1 steps; the last step of all is a truncation."""

    metadata: dict[str, Any] = {"name": "dying"}
    possible_agents = ["x", "y", "z"]

    def observation_space(self, agent):
        return spaces.Box(0.0, 9.0, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.now = list(self.possible_agents), 0
        return self.see(), {agent: {} for agent in self.agents}

    def see(self):
        return {agent: np.array([self.now], np.float32) for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents)
        self.now += 1
        obs, names = self.see(), list(self.agents)
        ends = {agent: "xyz".index(agent) + 1 == self.now for agent in names}
        over = self.now == 3
        self.agents = [agent for agent in names if not ends[agent]]
        return (
            obs,
            dict.fromkeys(names, 1.0),
            {agent: ends[agent] and not over for agent in names},
            {agent: ends[agent] and over for agent in names},
            {agent: {} for agent in self.possible_agents},
        )


def test_dying_agents_end_their_own_trajectories():
    env = pettingzoo_env(Dying)
    check_env(env, steps=10)
    policy = make(PGTF2Policy, env.get_observation_space("x"), spaces.Discrete(2))
    part = sampler_with(policy, env, length=3).sample()["p"]
    assert part["agent_index"].tolist() == [0, 1, 1, 2, 2, 2]
    assert part["terminateds"].tolist() == [True, False, True, False, False, False]
    assert part["truncateds"].tolist() == [False] * 5 + [True]
    assert part["new_obs"][:, 0].tolist() == [1, 1, 2, 1, 2, 3]


def test_instances_creators_and_names_are_taken():
    assert isinstance(pettingzoo_env(Dying()), ParallelPettingZooEnv)
    assert isinstance(pettingzoo_env(tictactoe), TurnBasedPettingZooEnv)
    assert isinstance(tictactoe(), AECEnv)
    assert isinstance(make_any_environments(Dying(), 1, EnvContext({})), MultiAgentEnvAdapter)
    with pytest.raises(EnvError, match="env is one Dying object, but 2 environments"):
        make_any_environments(Dying(), 2, EnvContext({}))
    envs = make_any_environments(lambda context: Dying(), 2, EnvContext({}))
    assert envs.num_envs == 2
    envs.close()
    settings = EnvContext({"max_cycles": 4})
    envs = make_any_environments("pettingzoo:classic/rps_v2", 1, settings)
    env = envs.get_sub_environments()[0]
    env.reset(seed=0)
    steps = [env.step(env.action_space_sample()) for _ in range(4)]
    assert [step.truncateds["__all__"] for step in steps] == [False, False, False, True]


def test_unknown_names_and_other_things_are_refused():
    with pytest.raises(EnvError, match=r"No environment 'classic/rps_v1'.*'classic/rps_v2'"):
        check_env_name("pettingzoo:classic/rps_v1")
    with pytest.raises(EnvError, match="'mpe2:ludo_v1' could not be imported"):
        check_env_name("mpe2:ludo_v1")
    check_env_name("pettingzoo:classic/rps_v2")
    with pytest.raises(EnvError, match="but got int"):
        pettingzoo_env(3)


def test_a_package_that_an_environment_needs_is_named(monkeypatch):
    monkeypatch.setitem(pettingzoo.aec_registry, "classic/ludo-v1", None)
    del pettingzoo.aec_registry["classic/ludo-v1"]  # now, and again after the test
    pettingzoo.register("aec", "classic/ludo-v1", "pettingzoo.classic.ludo.ludo:env")
    with pytest.raises(EnvError, match=r"'pettingzoo\.classic\.ludo'.*pip install 'pettingzoo"):
        pettingzoo_env("pettingzoo:classic/ludo_v1")


def test_a_ported_environment_keeps_the_names_of_its_observations():
    env = PettingZooEnv(tictactoe())
    space = tictactoe().observation_space("player_1")
    assert env.get_observation_space("player_1") == space
    obs, _ = env.reset(seed=0)
    assert set(obs["player_1"]) == {"observation", "action_mask"}
    assert space.contains(obs["player_1"])
    check_env(env, steps=50)
    action, _, extras = make_policies(env)["player_1"].compute_single_action(obs["player_1"])
    assert 0 <= action < 9
    assert np.isfinite(extras["action_dist_inputs"]).all()  # the mask is for a model to read
