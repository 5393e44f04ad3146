"""Sampling of many agents: true transitions, recorded once, in the batch of their policy."""

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.multi_agent_envs import (
    GAMMA,
    LAMBDA,
    Crowd,
    Scripted,
    Staggered,
    Walker,
    sampler_of,
    value_of,
)
from helpers.workers import assert_equal_batches, make_callbacks, map_all_to
from tfpolicies import DefaultCallbacks, SampleBatch, compute_advantages
from tfpolicies.config.multi_agent import default_policy_mapping
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.errors import EnvError, UnknownPolicyError, UsageError
from tfpolicies.rollout.episode_summaries import summarize_episodes
from tfpolicies.rollout.multi_agent_sampler import MultiAgentSampler
from tfpolicies.storage.json_values import decode_value, encode_value
from tfpolicies.storage.nested_arrays import extract_arrays, restore_arrays

END, GO = {"__all__": True}, {}
MODES = pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])


def sample_script(script, length=None, first=("a", "b"), **settings):
    """Samples once from a script; returns the batch, the sampler and the environment."""
    env = Scripted(script, first)
    sampler = sampler_of(env, rollout_fragment_length=length or len(script), **settings)
    return sampler.sample(), sampler, env


def staggered(copies, length, mode="truncate_episodes", unit="env_steps"):
    envs = [Staggered() for _ in range(copies)]
    settings = {"batch_mode": mode, "count_steps_by": unit}
    return sampler_of(*envs, rollout_fragment_length=length, **settings)


def get_rows(batch, agent_index):
    rows = batch["agent_index"] == agent_index
    return {name: np.asarray(column)[rows] for name, column in batch.items()}


def map_a_to_p(agent_id, episode, **kwargs):
    return "p" if agent_id == "a" else "q"


# -- how much is sampled ----------------------------------------------------------------------

TABLE = [  # episodes of 7 env steps and 11 agent steps, fragment 10
    ("truncate_episodes", "env_steps", 1, {(10, 15), (10, 16)}),
    ("truncate_episodes", "env_steps", 3, {(30, 45), (30, 48)}),
    ("truncate_episodes", "agent_steps", 1, {(7, 11)}),
    ("truncate_episodes", "agent_steps", 3, {(21, 33)}),
    ("complete_episodes", "env_steps", 1, {(14, 22)}),
    ("complete_episodes", "env_steps", 3, {(35, 55)}),
    ("complete_episodes", "agent_steps", 1, {(7, 11)}),
    ("complete_episodes", "agent_steps", 3, {(21, 33)}),
]


@pytest.mark.core
@pytest.mark.parametrize(("mode", "unit", "copies", "expected"), TABLE)
def test_a_sample_has_as_many_steps_as_the_mode_and_the_unit_say(mode, unit, copies, expected):
    sampler = staggered(copies, 10, mode, unit)
    batch = sampler.sample()
    assert (batch.env_steps(), batch.agent_steps()) in expected
    for _ in range(3):
        later = sampler.sample()
        if "truncate" in mode and unit == "env_steps":
            assert later.env_steps() == 10 * copies
        else:
            assert later.agent_steps() >= 10 * copies


def test_whole_episodes_that_are_not_needed_come_with_the_next_sample():
    sampler = staggered(3, 10, "complete_episodes")
    first = sampler.sample()
    metrics, sampler.metrics = sampler.metrics, []
    second = sampler.sample()
    # Two rounds end six episodes; five are enough. The sixth and four of the third and fourth
    # round make the next sample.
    assert first.env_steps() == second.env_steps() == 35
    ids = [set(batch["p"]["eps_id"].tolist()) for batch in (first, second)]
    assert [len(x) for x in ids] == [5, 5]
    assert not ids[0] & ids[1]
    assert len(metrics) == len(sampler.metrics) == 5  # each with the batch that it is in


def test_every_sample_of_whole_episodes_has_some_and_reports_them():
    sampler = staggered(3, 1, "complete_episodes")
    for _ in range(5):
        batch, (metrics,) = sampler.sample(), sampler.metrics
        assert batch.env_steps() == metrics.episode_length == 7
        sampler.metrics = []


def test_a_copy_that_has_its_agent_steps_waits_for_the_others():
    lively = Scripted([(("a", "b", "c", "d"), {}, {}, {})] * 50, first=("a", "b", "c", "d"))
    quiet = Scripted([(("a",), {}, {}, {})] * 50, first=("a",))
    sampler = sampler_of(lively, quiet, rollout_fragment_length=8, count_steps_by="agent_steps")
    batch = sampler.sample()
    assert (lively.now, quiet.now) == (2, 8)
    assert (batch.env_steps(), batch.agent_steps()) == (10, 16)
    sampler.sample()
    assert (lively.now, quiet.now) == (4, 16)


# -- what is in it ----------------------------------------------------------------------------


@pytest.mark.core
def test_rewards_of_an_agent_that_waits_come_with_its_next_observation():
    batch = sampler_of(Staggered(), rollout_fragment_length=7).sample()
    assert list(batch.policy_batches) == ["p"]
    a, b = get_rows(batch["p"], 0), get_rows(batch["p"], 1)
    assert a["t"].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert a["rewards"].tolist() == [1.0] * 7
    assert b["t"].tolist() == [1, 3, 5, 6]
    assert b["rewards"].tolist() == [2.0, 2.0, 2.0, 1.0]
    assert b["obs"][:, 2].tolist() == [0, 2, 4, 6]
    assert b["new_obs"][:, 2].tolist() == [2, 4, 6, 7]
    assert b["terminateds"].tolist() == [False, False, False, True]
    assert not batch["p"]["truncateds"].any()
    assert batch["p"]["unroll_id"].tolist() == [0] * 7 + [1] * 4
    assert len(set(batch["p"]["eps_id"].tolist())) == 1
    assert a["obs"][:, 0].tolist() == [0.0] * 7
    kinds = {name: batch["p"][name].dtype for name in batch["p"]}
    assert kinds["rewards"] == np.float32
    assert {kinds[x] for x in ("eps_id", "unroll_id", "agent_index", "t")} == {np.dtype(np.int64)}


def test_a_fragment_ends_between_an_action_and_its_answer():
    sampler = sampler_of(Staggered(), rollout_fragment_length=3)
    first, second = sampler.sample()["p"], sampler.sample()["p"]
    b_first, b_second = get_rows(first, 1), get_rows(second, 1)
    # "b" acted at time 2 and was not answered when the first fragment ended, at time 3.
    assert b_first["t"].tolist() == [1]
    assert b_first["new_obs"][:, 2].tolist() == [2]
    assert b_second["t"].tolist() == [3, 5]
    assert b_second["obs"][:, 2].tolist() == [2, 4]
    assert b_second["new_obs"][:, 2].tolist() == [4, 6]
    assert b_first["eps_id"][0] == b_second["eps_id"][0]
    assert not set(first["unroll_id"]) & set(second["unroll_id"])
    assert b_first["values_bootstrapped"].tolist() == value_of(b_first["new_obs"]).tolist()


def get_true_rows(envs):
    rows = [(env.number, *row) for env in envs for x in env.truth.values() for row in x]
    return sorted(tuple(float(x) for x in row) for row in rows)


def get_sampled_rows(batches):
    rows, names = [], ("obs", "actions", "rewards", "new_obs", "t", "terminateds", "truncateds")
    for batch in batches:
        for part in batch.policy_batches.values():
            columns = (part[name] for name in names)
            for obs, action, reward, new, t, *ends in zip(*columns, strict=True):
                rows.append((obs[0] // 10, *obs, action, reward, *new, t, *ends))
    return sorted(tuple(float(x) for x in row) for row in rows)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    copies=st.integers(1, 3),
    length=st.integers(1, 12),
    mode=st.sampled_from(["truncate_episodes", "complete_episodes"]),
    unit=st.sampled_from(["env_steps", "agent_steps"]),
)
def test_every_true_transition_is_sampled_once(seed, copies, length, mode, unit):
    envs = [Crowd(i, seed + i) for i in range(copies)]
    settings = {"batch_mode": mode, "count_steps_by": unit}
    sampler = sampler_of(*envs, rollout_fragment_length=length, **settings)
    batches = [sampler.sample() for _ in range(4)]
    result, truth = get_sampled_rows(batches), get_true_rows(envs)
    if mode == "truncate_episodes":
        assert result == truth
    else:
        assert len(set(result)) == len(result)
        assert set(result) <= set(truth)
        whole = {(round(row[0]), round(row[2])) for row in result}  # copy and episode
        assert result == [r for r in truth if (round(r[0]), round(r[2])) in whole]
    assert all(m.episode_length > 0 for m in sampler.metrics)
    for batch in batches:
        check_trajectories(batch)


def check_trajectories(batch):
    """Asserts that rows of a trajectory follow each other, and that advantages are its own."""
    for part in batch.policy_batches.values():
        check_policy_trajectories(part)


def check_policy_trajectories(part):
    ids = part["unroll_id"]
    assert (np.diff(ids) >= 0).all()
    for unroll in np.unique(ids):
        where = np.flatnonzero(ids == unroll)
        piece = part[int(where[0]) : int(where[-1]) + 1]
        assert (np.diff(piece["t"]) > 0).all()
        np.testing.assert_array_equal(piece["obs"][1:], piece["new_obs"][:-1])
        assert not (piece["terminateds"] | piece["truncateds"])[:-1].any()
        last_r = 0.0 if piece["terminateds"][-1] else float(value_of(piece["new_obs"][-1:])[0])
        columns = {x: piece[x] for x in ("rewards", "vf_preds", "terminateds")}
        expected = compute_advantages(SampleBatch(columns), last_r, GAMMA, LAMBDA)
        advantages = (batch["advantages"] for batch in (piece, expected))
        np.testing.assert_allclose(*advantages, rtol=1e-5, atol=1e-5)


def test_a_batch_that_was_handed_out_is_never_written_again():
    sampler = staggered(2, 3)
    batch = sampler.sample()
    before = copy.deepcopy(batch)
    for _ in range(5):
        sampler.sample()
    assert_equal_batches(batch, before)


def test_all_agents_of_a_policy_act_in_one_call():
    policies = {"p": Walker(), "q": Walker()}
    envs = [Scripted([(("a", "b", "c"), {}, {}, {})] * 5, first=("a", "b", "c")) for _ in range(4)]
    sampler_of(*envs, policies=policies, rollout_fragment_length=5).sample()
    assert policies["p"].calls == [8] * 5
    assert policies["q"].calls == [4] * 5


# -- how trajectories end ---------------------------------------------------------------------


@pytest.mark.core
def test_an_agent_without_a_last_observation_keeps_its_last_real_one():
    script = [(("a", "b"), {"a": 1, "b": 2}, GO, GO), (("a",), {"a": 3, "b": 4}, END, GO)]
    part = sample_script(script)[0]["p"]
    b = get_rows(part, 1)
    assert b["rewards"].tolist() == [2.0, 4.0]
    assert b["terminateds"].tolist() == [False, True]
    assert b["obs"][:, 2].tolist() == [0, 1]
    assert b["new_obs"][:, 2].tolist() == [1, 1]  # not time 2, which it never saw
    assert get_rows(part, 0)["new_obs"][:, 2].tolist() == [1, 2]


def test_an_episode_truncated_for_all_bootstraps_and_terminates_no_agent():
    script = [(("a", "b"), {"a": 1.0, "b": 1.0}, GO, END)]
    part = sample_script(script)[0]["p"]
    assert part["truncateds"].tolist() == [True, True]
    assert part["terminateds"].tolist() == [False, False]
    values = value_of(part["new_obs"])
    assert part["values_bootstrapped"].tolist() == values.tolist()
    expected = 1.0 + GAMMA * values - part["vf_preds"]
    np.testing.assert_allclose(part["advantages"], expected)


def test_agents_come_late_and_leave_early():
    script = [
        (("a", "b", "c"), {"a": 1, "b": 1}, {"b": True}, GO),  # b leaves with an observation
        (("a", "c"), {"a": 2, "c": 5}, GO, GO),
        (("c", "d"), {"a": 3, "c": 6}, {"d": True}, {"a": True}),  # a without; d comes and goes
        (("c",), {"c": 7, "b": 9}, END, GO),
    ]
    batch, _, world = sample_script(script)
    assert [sorted(x) for x in world.acted] == [["a", "b"], ["a", "c"], ["a", "c"], ["c"]]
    a, b = get_rows(batch["p"], 0), get_rows(batch["p"], 1)
    assert a["rewards"].tolist() == [1.0, 2.0, 3.0]
    assert a["truncateds"].tolist() == [False, False, True]
    assert not a["terminateds"].any()
    assert a["new_obs"][:, 2].tolist() == [1, 2, 2]
    assert b["rewards"].tolist() == [1.0]
    assert b["terminateds"].tolist() == [True]
    c = batch["q"]
    assert c["agent_index"].tolist() == [2, 2, 2]  # d never acted: no row
    assert c["rewards"].tolist() == [5.0, 6.0, 7.0]
    assert c["t"].tolist() == [1, 2, 3]
    assert batch.agent_steps() == 7


def test_steps_without_observations_are_taken_without_actions():
    script = [((), {}, GO, GO), ((), {"a": 2}, GO, GO), (("a", "b"), {"a": 1}, END, GO)]
    batch, _, world = sample_script(script)
    part = batch["p"]
    assert [len(x) for x in world.acted] == [2, 0, 0]
    assert get_rows(part, 0)["rewards"].tolist() == [3.0]
    assert part["t"].tolist() == [2, 2]


def test_rewards_before_the_first_action_count_for_the_episode_only():
    script = [(("a", "c"), {"c": 5.0, "a": 1.0}, GO, GO), (("a", "c"), {"c": 2.0}, END, GO)]
    batch, sampler, _ = sample_script(script, first=("a",))
    assert batch["q"]["rewards"].tolist() == [2.0]
    assert sampler.metrics[0].episode_reward == 8.0
    assert sampler.metrics[0].agent_rewards == {("a", "p"): 1.0, ("c", "q"): 7.0}


def test_an_agent_that_comes_back_after_it_was_done_is_refused():
    script = [(("a", "b"), {}, {"b": True}, GO), (("a", "b"), {}, GO, GO)]
    with pytest.raises(EnvError, match=r"agent 'b'.*single trajectory"):
        sample_script(script)


def test_an_episode_without_a_transition_is_refused():
    with pytest.raises(EnvError, match="without a single transition"):
        sample_script([((), {}, END, GO)], first=())


def test_an_agent_whose_last_info_says_so_is_not_learned_from():
    off = {"b": {"training_enabled": False}, "a": {"training_enabled": True}}
    script = [(("a", "b"), {}, GO, GO), (("a", "b"), {}, END, GO, off)]
    batch, sampler, _ = sample_script(script)
    for part in (batch["p"], sampler.sample()["p"]):
        assert set(part["agent_index"].tolist()) == {0}
    batch, *_ = sample_script([(("a", "b"), {}, GO, GO, off)] * 4, 2)
    assert set(batch["p"]["agent_index"].tolist()) == {0}


# -- which policy acts ------------------------------------------------------------------------


def test_the_mapping_is_called_once_for_each_agent_and_episode():
    calls = []

    def mapping(agent_id, episode, worker, **kwargs):
        calls.append((agent_id, episode.episode_id, worker))
        return "p"

    sampler = sampler_of(Staggered(), mapping=mapping, rollout_fragment_length=14, worker="w")
    batch = sampler.sample()
    ids = list(dict.fromkeys(episode for _, episode, _ in calls))
    assert calls == [(agent, episode, "w") for episode in ids for agent in "ab"]
    assert len(ids) == 3  # two that ended, one that began
    assert set(batch["p"]["eps_id"].tolist()) == set(ids[:2])


def test_a_new_mapping_is_for_episodes_that_begin_later():
    sampler = sampler_of(Staggered(), rollout_fragment_length=3)
    assert set(sampler.sample().policy_batches) == {"p"}
    sampler.worker_policies.policy_mapping_fn = map_all_to("q")
    assert set(sampler.sample().policy_batches) == {"p"}  # steps 4 to 6 of 7
    assert set(sampler.sample().policy_batches) == {"p", "q"}
    assert set(sampler.sample().policy_batches) == {"q"}


def test_an_unknown_policy_id_and_a_function_of_other_arguments_are_refused():
    with pytest.raises(UnknownPolicyError, match="returned invalid policy id 'x' for agent 'a'"):
        sampler_of(Staggered(), mapping=map_all_to("x"))
    with pytest.raises(UnknownPolicyError, match=r"returned invalid policy id \['p'\]"):
        sampler_of(Staggered(), mapping=map_all_to(["p"]))
    with pytest.raises(UnknownPolicyError, match=r"multi_agent\(policy_mapping_fn=\.\.\.\)"):
        sampler_of(Staggered(), mapping=default_policy_mapping)
    with pytest.raises(TypeError):
        sampler_of(Staggered(), mapping=lambda agent_id, episode: "p")


@MODES
def test_episodes_of_a_removed_policy_are_dropped_and_others_continue(mode):
    policies = {"p": Walker(), "q": Walker()}
    envs = Staggered(), Scripted([(("c",), {"c": 1.0}, GO, GO)] * 30, first=("c",))
    sampler = sampler_of(*envs, policies=policies, rollout_fragment_length=5, batch_mode=mode)
    if mode == "complete_episodes":
        envs[1].script[6] = (("c",), {"c": 1.0}, END, GO)
    sampler.sample()
    del policies["p"]
    sampler.worker_policies.policy_mapping_fn = map_all_to("q")
    batch = sampler.sample()
    assert set(batch.policy_batches) == {"q"}
    assert batch.env_steps() >= 10
    check_trajectories(batch)
    policies["q"] = Walker()  # another policy under the same id
    assert set(sampler.sample().policy_batches) == {"q"}


@pytest.mark.core
@MODES
@pytest.mark.parametrize("moment", ["on_episode_step", "on_episode_end", "on_episode_start"])
@pytest.mark.parametrize("again", [False, True])
def test_a_callback_may_remove_a_policy_in_the_middle_of_an_episode(mode, moment, again):
    """Its episodes are dropped, also if another policy comes under its id; "c" appears later."""

    class Growing(Staggered):
        def play(self, actions):
            obs, rewards, *others = super().play(actions)
            return (obs | self.obs("c") if self.now > 4 else obs), rewards, *others

    policies, calls = {"p": Walker(), "q": Walker()}, []

    def remove(episode, **kwargs):
        calls.append(episode)
        if len(calls) == 3:
            del policies["q"]
            sampler.worker_policies.policy_mapping_fn = map_all_to("p")
            if again:
                policies["q"] = Walker()

    settings = {"policies": policies, "mapping": map_a_to_p, "batch_mode": mode}
    settings["callbacks"] = make_callbacks(**{moment: remove})()
    sampler = sampler_of(Growing(), Growing(), rollout_fragment_length=9, **settings)
    for _ in range(4):
        batch = sampler.sample()
        assert batch.env_steps() >= 18
        check_trajectories(batch)
    assert set(batch.policy_batches) == {"p"}


def test_rows_of_a_policy_removed_with_the_last_step_of_a_sample_are_dropped():
    policies = {"p": Walker(), "q": Walker()}

    def remove(**kwargs):
        if policies.pop("q", None) is not None:
            sampler.worker_policies.policy_mapping_fn = map_all_to("p")

    settings = {"policies": policies, "callbacks": make_callbacks(on_episode_end=remove)()}
    sampler = sampler_of(Staggered(), mapping=map_a_to_p, rollout_fragment_length=7, **settings)
    batch = sampler.sample()
    assert (batch.env_steps(), batch.agent_steps()) == (7, 7)
    assert set(batch.policy_batches) == {"p"}
    assert (sampler.sample().env_steps(), sampler.sample().agent_steps()) == (7, 11)


# -- settings ---------------------------------------------------------------------------------


def test_rewards_are_clipped_for_learning_and_raw_in_metrics():
    script = [(("a", "b"), {"a": -3.0, "b": 0.5}, END, GO)]
    batch, sampler, _ = sample_script(script, clip_rewards=True)
    assert batch["p"]["rewards"].tolist() == [-1.0, 1.0]
    assert sampler.metrics[0].episode_reward == -2.5
    assert sample_script(script, clip_rewards=1.0)[0]["p"]["rewards"].tolist() == [-1.0, 0.5]


def test_an_observation_fn_changes_the_inputs_of_acting_and_learning():
    calls = []

    def observation_fn(agent_obs, worker, base_env, policies, episode, **kwargs):
        calls.append((list(agent_obs), episode.length, base_env.num_envs, sorted(policies)))
        return {agent: x + np.float32(100) for agent, x in agent_obs.items()}

    script = [(("a", "b"), {}, GO, GO), (("a",), {}, END, GO)]
    part = sample_script(script, observation_fn=observation_fn)[0]["p"]
    assert part["obs"][:, 2].tolist() == [100, 101, 100, 101]
    assert part["new_obs"][:, 2].tolist() == [101, 102, 101, 101]
    assert [x[:2] for x in calls] == [(["a", "b"], 0), (["a", "b"], 1), (["a"], 2), (["a", "b"], 0)]
    assert calls[0][2:] == (1, ["p", "q"])


@pytest.mark.parametrize("result", [None, ["a"]])
def test_an_observation_fn_that_returns_no_dict_is_named(result):
    with pytest.raises(UsageError, match="observation_fn must return a dict"):
        sampler_of(Staggered(), observation_fn=lambda **kwargs: result)


def test_sampling_needs_running_episodes():
    envs, policies = MultiAgentEnvAdapter([Staggered()]), SimpleNamespace(policy_mapping_fn=None)
    rng = np.random.default_rng(0)
    with pytest.raises(UsageError, match="call reset"):
        MultiAgentSampler(envs, {}, policies, fragment_length=8, rng=rng).sample()


@MODES
def test_one_seed_gives_the_same_batches(mode):
    def run():
        envs = [Crowd(i, i) for i in range(2)]
        sampler = sampler_of(*envs, rollout_fragment_length=9, batch_mode=mode, seed=4)
        return [sampler.sample() for _ in range(3)]

    for left, right in zip(run(), run(), strict=True):
        assert_equal_batches(left, right)


def test_the_first_reset_gets_seeds_and_later_ones_none():
    env = Staggered()
    sampler = sampler_of(env, rollout_fragment_length=8)
    sampler.reset([11])
    sampler.sample()
    assert env.seeds == [None, 11, None]


# -- callbacks and metrics --------------------------------------------------------------------


class Recorder(DefaultCallbacks):
    def __init__(self):
        self.log = []

    def on_episode_created(self, *, episode, env_index, **kwargs):
        self.log.append(("created", env_index, episode.length))

    def on_episode_start(self, *, episode, base_env, **kwargs):
        assert episode.get_agents() == ["a", "b"]
        self.log.append(("start", base_env.get_sub_environments()[0].episode, episode.length))

    def on_episode_step(self, *, episode, policies, **kwargs):
        assert set(policies) == {"p", "q"}
        self.log.append(("step", episode.length, episode.total_reward))

    def on_episode_end(self, *, episode, worker, **kwargs):
        assert worker == "w"
        episode.custom_metrics["half"] = episode.length / 2
        episode.hist_data["lengths"] = [episode.length]
        self.log.append(("end", episode.agent_rewards, episode.last_info_for("a")))


@pytest.mark.core
def test_callbacks_come_in_order_and_metrics_name_agents_and_policies():
    script = [
        (("a", "b"), {"a": 1.0, "b": 2.0}, GO, GO),
        (("a", "b"), {"a": 3.0, "b": 4.0}, END, GO, {"a": {"k": 1}, "__common__": {}}),
    ]
    callbacks = Recorder()
    _, sampler, _ = sample_script(script, callbacks=callbacks, worker="w")
    rewards = {("a", "p"): 4.0, ("b", "p"): 6.0}
    steps = [("step", 1, 3.0), ("step", 2, 10.0), ("end", rewards, {"k": 1})]
    next_episode = [("created", 0, 0), ("start", 1, 0)]
    assert callbacks.log == [("created", 0, 0), ("start", 0, 0), *steps, *next_episode]
    (metrics,) = sampler.metrics
    assert metrics.episode_length == 2
    assert metrics.episode_reward == 10.0
    assert metrics.agent_rewards == rewards
    assert metrics.custom_metrics == {"half": 1.0}
    assert metrics.hist_data == {"lengths": [2]}
    summary = summarize_episodes(sampler.metrics)
    assert summary["policy_reward_mean"] == {"p": 5.0}
    assert summary["policy_reward_min"] == {"p": 4.0}
    assert summary["policy_reward_max"] == {"p": 6.0}
    assert summary["hist_stats"]["policy_p_reward"] == [4.0, 6.0]


class Nosy(Walker):
    """Overrides postprocessing, and records the batches of other agents."""

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        others = sorted(
            (agent, pid, policy is not None, batch.count)
            for agent, (pid, policy, batch) in other_agent_batches.items()
        )
        trajectory = sample_batch.count, others, episode.length
        self.trajectories = [*getattr(self, "trajectories", []), trajectory]
        others_rewards = sum(x["rewards"].sum() for _, _, x in other_agent_batches.values())
        sample_batch["others"] = np.full(sample_batch.count, others_rewards, np.float32)
        return sample_batch


def test_a_policy_that_postprocesses_by_itself_sees_all_agents_of_the_episode():
    script = [(("a", "c"), {"a": 1.0, "c": 8.0}, GO, GO), (("a", "c"), {"a": 2.0}, END, GO)]
    policies = {"p": Nosy(), "q": Walker()}
    batch, *_ = sample_script(script, 3, first=("a", "c"), policies=policies)
    trajectories = [(2, [("c", "q", True, 2)], 2), (1, [("c", "q", True, 1)], 1)]
    assert policies["p"].trajectories == trajectories
    assert batch["p"]["others"].tolist() == [8.0, 8.0, 8.0]
    assert "advantages" in batch["q"]
    assert "advantages" not in batch["p"]


def test_trajectories_are_shown_to_the_callback():
    calls = []

    def record(episode, agent_id, policy_id, postprocessed_batch, original_batches, **kwargs):
        assert episode.policy_for(agent_id) == policy_id
        postprocessed_batch["recorded"] = np.ones(postprocessed_batch.count)
        assert "advantages" in postprocessed_batch
        assert "advantages" not in original_batches[agent_id][2]
        calls.append((agent_id, policy_id, postprocessed_batch.count))

    callbacks = make_callbacks(on_postprocess_trajectory=record)()
    batch = sampler_of(Staggered(), callbacks=callbacks, rollout_fragment_length=9).sample()
    assert calls == [("a", "p", 7), ("b", "p", 4), ("a", "p", 2), ("b", "p", 1)]
    assert batch["p"]["recorded"].sum() == 14


def test_without_connectors_batches_of_others_come_as_pairs():
    class Opponents(Walker):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            [(policy, batch)] = other_agent_batches.values()
            assert policy is policies["q"]
            sample_batch["opponents"] = batch["rewards"]
            return sample_batch

    script = [(("a", "c"), {"a": 1.0, "c": 8.0}, GO, GO), (("a", "c"), {"c": 2.0}, END, GO)]
    policies = {"p": Opponents(), "q": Walker()}
    settings = {"policies": policies, "enable_connectors": False}
    batch, *_ = sample_script(script, first=("a", "c"), **settings)
    assert batch["p"]["opponents"].tolist() == [8.0, 2.0]


# -- environments that break the contract -----------------------------------------------------


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((("a", "b"), {"a": "x"}, GO, GO), "Rewards must be .* agent 'a' is 'x'"),
        ((("a", "b"), {"a": [1.0, 2.0]}, GO, GO), "Rewards must be"),
        ((("a", "b"), {"a": 1.0, "b": None}, GO, GO), "Rewards must be .* agent 'b' is None"),
        ((("a", "b"), {"a": 1.0, "b": np.nan}, GO, GO), "Rewards must be .* agent 'b' is nan"),
        ((("a", "b"), {"b": np.ones(1)}, GO, GO), r"Rewards must be .* agent 'b' is array"),
        ((("a",), {}, GO, GO, {"b": {}}), "infos of agents without an observation: .'b'."),
    ],
)
def test_rewards_and_infos_that_break_the_contract_are_named(step, message):
    with pytest.raises(EnvError, match=message):
        sample_script([step])


def test_after_an_error_in_a_step_new_episodes_are_asked_for_and_no_batch_is_poisoned():
    class Flaky(Staggered):
        def play(self, actions):
            if self.episode == 0 and self.now == 4:
                raise RuntimeError("the server is gone")
            return super().play(actions)

    sampler = sampler_of(Flaky(), Staggered(), rollout_fragment_length=6)
    with pytest.raises(RuntimeError, match="the server is gone"):
        sampler.sample()
    with pytest.raises(UsageError, match="call reset"):
        sampler.sample()
    sampler.reset(None)
    batch = sampler.sample()
    assert set(batch["p"]["obs"][:, 1].tolist()) == {1.0}  # of the second episodes only
    check_trajectories(batch)


def test_results_of_the_wrong_form_are_named():
    class Broken(Staggered):
        def __init__(self, result):
            super().__init__()
            self.result = result

        def play(self, actions):
            return self.result

    obs, go = {"a": np.zeros(3, np.float32)}, {"__all__": False}
    for result, message in [
        (None, "must return five dicts .* got NoneType"),
        ((obs, {}, go, go), "got 4 values"),
        ((obs, {}, {}, go, {}), "`terminateds` of environment 0 must have the key '__all__'"),
        ((obs, {}, go, {"a": False}, {}), "`truncateds` .* but has only .'a'."),
        ((np.zeros(3), {}, go, go, {}), "return observations as a dict by agent id, got ndarray"),
        ((obs, 1.0, go, go, {}), "return rewards as a dict"),
    ]:
        with pytest.raises(EnvError, match=message):
            sampler_of(Broken(result), rollout_fragment_length=1).sample()


def test_an_observation_of_another_shape_names_the_agent():
    class Ragged(Staggered):
        def obs(self, *agents):
            result = super().obs(*agents)
            return {**result, "b": np.zeros(2, np.float32)} if self.now == 2 else result

    words = r"agent 'b' that .* environment 0 gave policy 'p' has the shape \(2,\)"
    with pytest.raises(EnvError, match=words):
        sampler_of(Ragged(), rollout_fragment_length=4).sample()


# -- checkpoints ------------------------------------------------------------------------------


def without_times(metrics):
    return [episode._replace(perf_stats={}) for episode in metrics]


class SavedCrowd(Crowd):
    def get_state(self):
        state = {name: value for name, value in vars(self).items() if name != "rng"}
        return {**copy.deepcopy(state), "rng": self.rng.bit_generator.state}

    def set_state(self, state):
        state = copy.deepcopy(state)
        self.rng.bit_generator.state = state.pop("rng")
        vars(self).update(state)


@MODES
@pytest.mark.parametrize("unit", ["env_steps", "agent_steps"])
def test_a_restored_sampler_continues_with_the_same_batches(mode, unit):
    settings_ = {"rollout_fragment_length": 6, "batch_mode": mode, "count_steps_by": unit}
    policies = {"p": Nosy(), "q": Walker(seed=1)}
    sampler = sampler_of(*(SavedCrowd(i, 20 + i) for i in range(3)), policies=policies, **settings_)
    for _ in range(3):
        sampler.sample()
    arrays = {}
    state = sampler.get_state()
    envs = state.pop("envs")
    stored = encode_value(extract_arrays(state, arrays))
    policies_copy = copy.deepcopy(policies)
    other = sampler_of(*(SavedCrowd(i, 0) for i in range(3)), policies=policies_copy, **settings_)
    restored = restore_arrays(decode_value(json.loads(json.dumps(stored))), arrays)
    other.set_state({**restored, "envs": envs})
    assert [m.agent_rewards for m in other.metrics] == [m.agent_rewards for m in sampler.metrics]
    for _ in range(4):
        assert_equal_batches(other.sample(), sampler.sample())
    assert without_times(other.metrics) == without_times(sampler.metrics)
    assert policies["p"].trajectories == policies_copy["p"].trajectories


def test_a_sampler_without_the_policies_or_copies_of_its_state_begins_new_episodes():
    sampler = sampler_of(SavedCrowd(0, 1), SavedCrowd(1, 2), rollout_fragment_length=9)
    sampler.sample()
    state = sampler.get_state()
    one_copy = sampler_of(SavedCrowd(0, 5), rollout_fragment_length=9)
    settings = {"policies": {"q": Walker()}, "mapping": map_all_to("q")}
    crowds = [SavedCrowd(i, 5) for i in range(2)]
    one_policy = sampler_of(*crowds, rollout_fragment_length=9, **settings)
    for other in (one_copy, one_policy):
        other.set_state(state)
        assert other.metrics == without_times(sampler.metrics)
        assert other.sample().env_steps() == 9 * other.envs.num_envs


def test_without_states_of_environments_or_with_callbacks_there_is_no_state():
    assert sampler_of(Staggered()).get_state() is None

    callbacks = make_callbacks(on_episode_end=lambda **kwargs: None)()
    assert sampler_of(SavedCrowd(0, 0)).get_state() is not None
    assert sampler_of(SavedCrowd(0, 0), callbacks=callbacks).get_state() is None
