"""Infos and episodes for readers: postprocessing, callbacks, and `training_enabled`."""

import gymnasium as gym
import numpy as np
import pytest

from helpers.custom_policies import ZeroPolicy
from helpers.environments import CountingEnv, SavedCountingEnv, counting_creator
from helpers.multi_agent_envs import Scripted
from helpers.workers import make_callbacks, make_config, make_worker
from tfpolicies import MultiAgentBatch, PPOTF2Policy, SampleBatch
from tfpolicies.rollout.episode import Episode, find_excluded


def make_pair(context):
    """Makes two agents, whose infos say the step and the agent; episodes of three steps."""
    infos = [{agent: {"now": now, "of": agent} for agent in "ab"} for now in (1, 2, 3)]
    return Scripted([(("a", "b"), {}, {"__all__": x["a"]["now"] == 3}, {}, x) for x in infos])


class Reading(ZeroPolicy):
    """Records the inputs of its postprocessing."""

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        calls = self.__dict__.setdefault("calls", [])
        infos = sample_batch["infos"].tolist()
        calls.append((infos, episode.length, episode.total_reward, episode))
        sample_batch["bonus"] = np.array([float(len(info)) for info in infos], np.float32)
        return sample_batch


def worker_with(policy=ZeroPolicy, env=lambda context: CountingEnv(), *, length=6, **settings):
    return make_worker(env, policy, rollout_fragment_length=length, **settings)


def test_infos_are_not_collected_without_a_reader():
    worker, several = worker_with(), worker_with(env=make_pair)
    assert "infos" not in worker.sample()
    assert "infos" not in several.sample()["default_policy"]
    assert "infos" not in worker.sampler._buffer.columns
    assert "infos" not in several.sampler._transitions.records.columns


def test_a_policys_own_postprocessing_has_infos_and_the_episode():
    worker = worker_with(Reading)
    batch = worker.sample()  # episodes of 4, 1 and 6 steps
    policy = worker.get_policy()
    steps = [[{"step": n} for n in range(1, last + 1)] for last in (4, 1, 1)]
    assert [infos for infos, *_ in policy.calls] == steps
    assert [length for _, length, *_ in policy.calls] == [4, 1, 1]
    assert batch["infos"].dtype == object
    assert batch["infos"].tolist() == [*steps[0], *steps[1], *steps[2]]
    assert batch["bonus"].tolist() == [1.0] * 6
    sums = [sum(CountingEnv().reward(i, n, 0) for n in range(k)) for i, k in ((0, 4), (1, 1))]
    assert [total for _, _, total, _ in policy.calls[:2]] == sums
    running = policy.calls[-1][-1]
    assert isinstance(running, Episode)
    assert (running.worker, running.env_index, running.last_info_for()) == (worker, 0, {"step": 1})
    worker.sample()
    infos, length, total, same = policy.calls[3]
    assert same is running
    assert (len(infos), length) == (5, 6)
    assert total == sum(CountingEnv().reward(2, n, 0) for n in range(6))


@pytest.mark.parametrize("mode", ["plain", "same_step", "next_step", "disabled"])
@pytest.mark.parametrize("complete", [False, True])
def test_an_info_stands_in_the_row_of_its_step(mode, complete):
    def add_steps(worker, samples):
        samples["step"] = np.array([info["step"] for info in samples["infos"]])

    batch_mode = "complete_episodes" if complete else "truncate_episodes"
    settings = {"num_envs_per_worker": 2, "batch_mode": batch_mode}
    settings["callbacks"] = make_callbacks(on_sample_end=add_steps)
    worker = worker_with(env=counting_creator(mode, 2), length=5, **settings)
    for _ in range(3):
        batch = worker.sample()
        assert batch["step"].tolist() == (batch["t"] + 1).tolist()


def test_infos_of_several_agents_stand_in_the_rows_of_their_steps():
    worker = worker_with(Reading, make_pair, length=4)
    for _ in range(2):
        batch = worker.sample()["default_policy"]
        assert batch["infos"].tolist() == [
            {"now": int(t) + 1, "of": "ab"[index]}
            for t, index in zip(batch["t"], batch["agent_index"], strict=True)
        ]
        assert batch["bonus"].tolist() == [2.0] * 8


def test_callbacks_about_trajectories_and_updates_have_infos():
    ends, counts = [], []

    def on_postprocess(postprocessed_batch, episode, **kwargs):
        ends.append((postprocessed_batch["infos"][-1], episode.length))

    def on_learn(policy, train_batch, result):
        counts.append(len(train_batch["infos"]))

    model = {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [4]}
    training = {"train_batch_size": 6, "sgd_minibatch_size": 3, "num_sgd_iter": 1, "model": model}
    methods = {"on_postprocess_trajectory": on_postprocess, "on_learn_on_batch": on_learn}
    training |= {"rollout_fragment_length": 6, "callbacks": make_callbacks(**methods)}
    algorithm = make_config(lambda context: CountingEnv(), **training).build()
    algorithm.train()
    assert ends[0] == ({"step": 4}, 4)
    assert counts
    algorithm.stop()


def test_running_episodes_continue_after_a_restore_next_to_an_override_of_postprocessing():
    class Recording(PPOTF2Policy):
        totals = ()

        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            type(self).totals += (episode.total_reward,)
            return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)

    worker, other = (worker_with(Recording, lambda _: SavedCountingEnv()) for _ in range(2))
    worker.sample()
    state = worker.sampler.get_state()
    other.sample()
    other.sampler.set_state(state)
    other.get_policy().set_state(worker.get_policy().get_state())
    Recording.totals = ()
    expected, actual = worker.sample(), other.sample()
    assert expected["infos"].tolist() == actual["infos"].tolist()
    np.testing.assert_array_equal(expected["rewards"], actual["rewards"])
    half = len(Recording.totals) // 2
    assert Recording.totals[:half] == Recording.totals[half:]


def test_episodes_whose_infos_wait_have_no_state():
    settings = {"batch_mode": "complete_episodes", "num_envs_per_worker": 2, "length": 3}
    reading, plain = (
        worker_with(policy, lambda _: SavedCountingEnv(), **settings)
        for policy in (Reading, ZeroPolicy)
    )
    for worker in (reading, plain):
        worker.sample()
    assert plain.sampler.get_state() is not None
    waits = reading.sampler._buffer.has_infos()
    assert (reading.sampler.get_state() is None) == waits


def test_postprocessing_reads_infos_also_where_it_is_tried_on_zeros():
    class Reading(PPOTF2Policy):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            steps = [float(info.get("step", 0)) for info in sample_batch["infos"]]
            sample_batch["rewards"] = np.array(steps, np.float32)
            return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)

    worker = worker_with(Reading)
    batch = worker.sample()
    assert batch["rewards"].tolist() == [1.0, 2.0, 3.0, 4.0, 1.0, 1.0]
    assert worker.learn_on_batch(batch)["default_policy"]["num_agent_steps_trained"] == 6


class Off(gym.Wrapper):
    """Excludes some episodes from learning, by their infos."""

    def __init__(self, env, excluded):
        super().__init__(env)
        self.excluded, self.number = excluded, 0

    def reset(self, **kwargs):
        self.number += 1
        return self.env.reset(**kwargs)

    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {**info, "training_enabled": self.number not in self.excluded}


def worker_without(*excluded, policy=ZeroPolicy, **settings):
    """Makes a worker that does not learn from some episodes, by their number from 1 on."""
    return worker_with(policy, lambda context: Off(CountingEnv(), excluded), **settings)


def test_trajectories_whose_last_info_says_so_are_not_learned_from():
    worker = worker_without(2, policy=Reading)  # episodes of 4, 1 and 6 steps
    batch = worker.sample()
    assert (type(batch), batch.count) == (MultiAgentBatch, 6)
    assert batch["default_policy"]["t"].tolist() == [0, 1, 2, 3, 0]
    assert [len(infos) for infos, *_ in worker.get_policy().calls] == [4, 1]
    assert batch["default_policy"]["bonus"].tolist() == [2.0] * 5
    assert isinstance(worker.sample(), SampleBatch)


def test_steps_are_counted_where_all_episodes_are_excluded():
    worker = worker_without(1, 2, 3, 4, 5, batch_mode="complete_episodes")
    batch = worker.sample()
    assert (batch.policy_batches, batch.count) == ({}, 11)
    assert [episode.episode_length for episode in worker.get_metrics()] == [4, 1, 6]


def test_vector_environments_exclude_each_of_their_episodes():
    assert find_excluded({}, 2) == []
    infos = {"training_enabled": np.array([True, False])}
    assert find_excluded(infos, 2) == find_excluded({"final_info": infos}, 2) == [1]
    present = {**infos, "_training_enabled": np.array([True, False])}
    assert find_excluded({**present, "other": np.zeros(2)}, 2) == []
    assert find_excluded([{}, {"final_info": {"training_enabled": False}}], 2) == [1]
