"""Many agents with policies on TensorFlow: memory, previous actions, masks, Boxes, exploration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import make
from helpers.multi_agent_envs import (
    SPACE,
    THREE,
    Crowd,
    Scripted,
    Staggered,
    World,
    flags,
    sampler_of,
)
from helpers.workers import assert_equal_batches, sampler_with
from tfpolicies import MultiAgentEnv, PGTF2Policy, PPOTF2Policy
from tfpolicies.errors import ConfigError
from tfpolicies.policy_map import stacked_acting

SIZE = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 3}
PREVIOUS = {"max_seq_len": 1, "lstm_use_prev_action": True, "lstm_use_prev_reward": True}


def make_policy(policy_class: Any = PPOTF2Policy, **config: Any) -> Any:
    return make(policy_class, SPACE, THREE, **config)


@pytest.mark.core
def test_each_agent_has_its_own_memory_and_last_action_and_reward():
    policy = make_policy(model={**SIZE, **PREVIOUS})
    sampler = sampler_with(policy, *(Crowd(i, 7 + i) for i in range(2)), length=15)
    parts = [sampler.sample()["p"] for _ in range(3)]
    last: dict[tuple[int, int], Any] = {}
    checked = 0
    for part in parts:
        assert part["seq_lens"].tolist() == [1] * part.count
        for i in range(part.count):
            key = int(part["eps_id"][i]), int(part["agent_index"][i])
            state = [part[f"state_in_{k}"][i : i + 1] for k in range(2)]
            prev = part["prev_actions"][i], part["prev_rewards"][i]
            expected_state, expected_prev = last.get(key, ([np.zeros((1, 3))] * 2, (0, 0.0)))
            np.testing.assert_allclose(state, expected_state, atol=1e-6)
            assert prev == expected_prev
            checked += key in last
            row = part["obs"][i : i + 1]
            inputs = (part[f"prev_{x}"][i : i + 1] for x in ("actions", "rewards"))
            _, after, extras = policy.compute_actions(row, state, *inputs, explore=False)
            np.testing.assert_allclose(
                extras["action_dist_inputs"][0], part["action_dist_inputs"][i], atol=1e-5
            )
            last[key] = after, (part["actions"][i], part["rewards"][i])
    assert checked > 20


def test_sequences_of_agents_begin_with_the_memory_they_had():
    policy = make_policy(model={**SIZE, "max_seq_len": 3})
    part = sampler_with(policy, Staggered(), length=7).sample()["p"]
    assert part["seq_lens"].tolist() == [3, 3, 1, 3, 1]
    assert part["state_in_0"].shape == (5, 3)
    assert not part["state_in_0"][[0, 3]].any()
    assert part["state_in_0"][[1, 2, 4]].any(axis=1).all()
    result = policy.learn_on_batch(part)
    assert np.isfinite(result["learner_stats"]["total_loss"])


class Boxes(World):
    """Each agent has its own spaces; records its actions."""

    def __init__(self) -> None:
        super().__init__()
        self._agent_ids = ("a", "b")
        nested = spaces.Dict(x=SPACE, n=spaces.Discrete(3))
        self.observation_space = spaces.Dict(a=SPACE, b=nested)
        box = spaces.Box(1.0, 5.0, (2,), np.float32)
        self.action_space = spaces.Dict(a=box, b=spaces.Tuple((box, spaces.Discrete(2, start=3))))

    def obs(self, *agents: str) -> dict[str, Any]:
        result: dict[str, Any] = super().obs(*agents)
        result["b"] = {"x": result["b"].astype(np.float64), "n": self.now % 3}
        return result

    def play(self, actions: Any) -> Any:
        assert self.action_space_contains(actions)
        over = self.now == 4
        return self.obs("a", "b"), {"a": 1.0, "b": 1.0}, flags(), flags(over), {}


def test_agents_with_other_spaces_get_their_actions():
    env = Boxes()
    policies = {
        agent: make(PPOTF2Policy, env.get_observation_space(agent), env.get_action_space(agent))
        for agent in "ab"
    }
    settings = {"policies": policies, "mapping": lambda agent, episode, **kwargs: agent}
    batch = sampler_of(env, rollout_fragment_length=5, **settings).sample()
    sent = np.array([actions["a"] for actions in env.acted])
    np.testing.assert_allclose(sent, np.clip(3.0 + 2.0 * batch["a"]["actions"], 1.0, 5.0))
    b = batch["b"]
    assert b["obs"]["n"].tolist() == [0, 1, 2, 0, 0]
    assert b["new_obs"]["n"].tolist() == [1, 2, 0, 1, 1]
    assert b["obs"]["x"].dtype == np.float32
    assert b["new_obs"]["x"][:, 2].tolist() == [1, 2, 3, 4, 1]
    assert [int(x["b"][1]) for x in env.acted] == (3 + b["actions"][1]).tolist()
    assert policies["b"].learn_on_batch(b)["learner_stats"]


class Masked(MultiAgentEnv):
    """Two agents in turn; an action that the mask forbids is an error."""

    action_space = spaces.Discrete(3)
    observation_space = spaces.Dict(
        action_mask=spaces.Box(0, 1, (3,), np.int8), observations=spaces.Box(0.0, 9.0, (1,))
    )
    _agent_ids = (0, 1)

    def see(self, agent: int) -> dict[int, Any]:
        self.mask = np.array([1, 0, 0], np.int8)[(np.arange(3) + self.now) % 3]
        return {agent: {"observations": np.array([self.now], np.float32), "action_mask": self.mask}}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.now = 0
        return self.see(0), {}

    def step(self, action_dict: Any) -> Any:
        ((agent, action),) = action_dict.items()
        assert self.mask[action], (agent, action)
        self.now += 1
        over = self.now == 6
        rewards = {agent: 1.0, 1 - agent: -1.0}
        return self.see(1 - agent), rewards, flags(over), flags(), {}


@pytest.mark.core
def test_masks_are_respected_in_turn_based_games():
    policy = make(PGTF2Policy, Masked.observation_space, Masked.action_space)
    part = sampler_with(policy, Masked(), length=12).sample()["p"]
    # Agent 0 acts at 0, 2, 4 and sees the end at 6; agent 1 at 1, 3, 5 and does not.
    assert part["t"].tolist() == [1, 3, 5, 2, 4, 5] * 2
    assert part["rewards"].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0] * 2
    assert part["obs"]["observations"][:, 0].tolist() == [0, 2, 4, 1, 3, 5] * 2
    assert part["new_obs"]["observations"][:, 0].tolist() == [2, 4, 6, 3, 5, 5] * 2
    assert part["terminateds"].tolist() == [False, False, True] * 4


def test_filters_see_every_row_once():
    policy = make_policy(PGTF2Policy, observation_filter="MeanStdFilter")
    rows = sampler_with(policy, Crowd(0, 0), Crowd(1, 1), length=20).sample()["p"]["obs"]
    assert policy.filter.pending_count == len(rows)
    policy.driver.learning.flush_filters()
    np.testing.assert_allclose(policy.filter.statistics[0].mean, rows.mean(axis=0), rtol=1e-5)


def test_parameter_noise_needs_whole_episodes_and_gets_them():
    policy = make_policy(PGTF2Policy, exploration_config={"type": "ParameterNoise"})
    with pytest.raises(ConfigError, match=r"policy 'p'.*complete_episodes"):
        sampler_with(policy, Staggered(), length=14)
    sampler = sampler_with(policy, Staggered(), length=14, batch_mode="complete_episodes")
    part = sampler.sample()["p"]
    logits = part["action_dist_inputs"].reshape(2, 11, 3)
    assert not np.allclose(logits[0], logits[1])  # other weights in the second episode


def test_policies_learn_from_their_parts():
    script = [(("a", "b", "c"), {"a": 1.0, "c": 1.0}, {}, {})] * 40
    policies = {"p": make_policy(), "q": make_policy(PGTF2Policy)}
    sampler = sampler_of(
        Scripted(script, first=("a", "b", "c")), policies=policies, rollout_fragment_length=20
    )
    batch = sampler.sample()
    assert {pid: part.count for pid, part in batch.policy_batches.items()} == {"p": 40, "q": 20}
    for pid, part in batch.policy_batches.items():
        policies[pid].learn_on_batch(part)
        assert policies[pid].num_grad_updates == 1


@pytest.mark.parametrize("model", [{"fcnet_hiddens": [4]}, {"use_lstm": True, "lstm_cell_size": 3}])
def test_policies_of_one_program_act_in_one_call_and_as_if_alone(model, monkeypatch):
    def sample(max_rows: int) -> list[Any]:
        monkeypatch.setattr(stacked_acting, "_MAX_ROWS_TO_STACK", max_rows)
        policies = {x: make_policy(model=model, seed=i) for i, x in enumerate("abcd")}
        assert len({policy.program for policy in policies.values()}) == 1
        envs = [Crowd(i, 30 + i) for i in range(3)]
        settings = {"policies": policies, "mapping": lambda agent, episode, **kwargs: agent}
        sampler = sampler_of(*envs, rollout_fragment_length=12, **settings)
        return [sampler.sample() for _ in range(2)]

    for alone, stacked in zip(sample(0), sample(32), strict=True):
        assert_equal_batches(stacked, alone, atol=1e-5)
