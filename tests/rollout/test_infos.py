"""Infos are in batches, and the episode beside them, where somebody reads them; nowhere else."""

import gymnasium as gym
import numpy as np
import pytest

from helpers.environments import CountingEnv, SavedCountingEnv, counting_creator
from policy.test_method_overrides import Pair
from tfpolicies import (
    AlgorithmConfig,
    DefaultCallbacks,
    MultiAgentBatch,
    Policy,
    PPOConfig,
    PPOTF2Policy,
    RolloutWorker,
    SampleBatch,
)
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.rollout.episode import Episode, find_excluded


class Zero(Policy):
    """Always takes action 0."""

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})


class Reading(Zero):
    """Takes down what its postprocessing is given."""

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        kept = self.__dict__.setdefault("kept", [])
        infos = sample_batch["infos"].tolist()
        kept.append((infos, episode.length, episode.total_reward, episode))
        sample_batch["bonus"] = np.array([float(len(info)) for info in infos], np.float32)
        return sample_batch


def worker_of(policy=Zero, env=CountingEnv, callbacks=None, *, length=6, **settings):
    config = AlgorithmConfig().environment(env if env is Pair else (lambda context: env()))
    config.rollouts(rollout_fragment_length=length).callbacks(callbacks).debugging(seed=1)
    config.update_from_dict(settings)
    return RolloutWorker(config=config, default_policy_class=policy)


def test_nobody_pays_for_infos_that_nobody_reads():
    worker, several = worker_of(), worker_of(env=Pair)
    assert "infos" not in worker.sample()
    assert "infos" not in several.sample()["default_policy"]
    assert "infos" not in worker.sampler._buffer.columns
    assert "infos" not in several.sampler._transitions.records.columns


def test_a_policys_own_postprocessing_has_infos_and_the_episode():
    worker = worker_of(Reading)
    batch = worker.sample()  # episodes of 4, 1 and 6 steps
    policy = worker.get_policy()
    steps = [[{"step": n} for n in range(1, last + 1)] for last in (4, 1, 1)]
    assert [infos for infos, *_ in policy.kept] == steps
    assert [length for _, length, *_ in policy.kept] == [4, 1, 1]
    assert batch["infos"].dtype == object
    assert batch["infos"].tolist() == [*steps[0], *steps[1], *steps[2]]
    assert batch["bonus"].tolist() == [1.0] * 6
    sums = [sum(CountingEnv().reward(i, n, 0) for n in range(k)) for i, k in ((0, 4), (1, 1))]
    assert [total for _, _, total, _ in policy.kept[:2]] == sums
    running = policy.kept[-1][-1]
    assert isinstance(running, Episode)
    assert (running.worker, running.env_index, running.last_info_for()) == (worker, 0, {"step": 1})
    worker.sample()
    infos, length, total, same = policy.kept[3]
    assert same is running
    assert (len(infos), length) == (5, 6)
    assert total == sum(CountingEnv().reward(2, n, 0) for n in range(6))


@pytest.mark.parametrize("mode", ["plain", "same_step", "next_step", "disabled"])
@pytest.mark.parametrize("complete", [False, True])
def test_an_info_stands_in_the_row_of_its_step(mode, complete):
    class Callbacks(DefaultCallbacks):
        def on_sample_end(self, *, worker, samples):
            samples["step"] = np.array([info["step"] for info in samples["infos"]])

    config = AlgorithmConfig().environment(counting_creator(mode, 2)).callbacks(Callbacks)
    batch_mode = "complete_episodes" if complete else "truncate_episodes"
    config.rollouts(rollout_fragment_length=5, num_envs_per_worker=2, batch_mode=batch_mode)
    worker = RolloutWorker(config=config, default_policy_class=Zero)
    for _ in range(3):
        batch = worker.sample()
        assert batch["step"].tolist() == (batch["t"] + 1).tolist()


def test_infos_of_several_agents_stand_in_the_rows_of_their_steps():
    worker = worker_of(Reading, Pair, length=4)
    for _ in range(2):
        batch = worker.sample()["default_policy"]
        assert batch["infos"].tolist() == [
            {"now": int(t) + 1, "of": "ab"[index]}
            for t, index in zip(batch["t"], batch["agent_index"], strict=True)
        ]
        assert batch["bonus"].tolist() == [2.0] * 8


def test_callbacks_about_trajectories_and_updates_have_infos():
    seen = []

    class Callbacks(DefaultCallbacks):
        def on_postprocess_trajectory(self, *, postprocessed_batch, episode, **kwargs):
            seen.append((postprocessed_batch["infos"][-1], episode.length))

        def on_learn_on_batch(self, *, policy, train_batch, result):
            seen.append(len(train_batch["infos"]))

    config = (
        PPOConfig()
        .environment(lambda context: CountingEnv())
        .rollouts(rollout_fragment_length=6)
        .training(train_batch_size=6, sgd_minibatch_size=3, num_sgd_iter=1)
        .training(model={"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [4]})
        .framework(inference="tf", jit_compile=False)
        .callbacks(Callbacks)
        .debugging(log_level="ERROR")
    )
    algorithm = config.build()
    algorithm.train()
    assert seen[0] == ({"step": 4}, 4)
    assert [x for x in seen if isinstance(x, int)]
    algorithm.stop()


def test_running_episodes_go_on_after_a_restore_beside_own_postprocessing():
    class Own(PPOTF2Policy):
        totals = ()

        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            type(self).totals += (episode.total_reward,)
            return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)

    def sampling():
        config = PPOConfig().environment(lambda context: SavedCountingEnv())
        config.rollouts(rollout_fragment_length=6).framework(inference="tf").debugging(seed=1)
        return RolloutWorker(config=config, default_policy_class=Own)

    worker, other = sampling(), sampling()
    worker.sample()
    state = worker.sampler.get_state()
    other.sample()
    other.sampler.set_state(state)
    other.get_policy().set_state(worker.get_policy().get_state())
    Own.totals = ()
    expected, actual = worker.sample(), other.sample()
    assert expected["infos"].tolist() == actual["infos"].tolist()
    np.testing.assert_array_equal(expected["rewards"], actual["rewards"])
    half = len(Own.totals) // 2
    assert Own.totals[:half] == Own.totals[half:]


def test_episodes_whose_infos_wait_begin_anew_after_a_restore():
    settings = {"batch_mode": "complete_episodes", "num_envs_per_worker": 2}
    reading, plain = (
        worker_of(policy, SavedCountingEnv, **settings, length=3) for policy in (Reading, Zero)
    )
    for worker in (reading, plain):
        worker.sample()
    assert plain.sampler.get_state() is not None
    waits = reading.sampler._buffer.has_infos()
    assert (reading.sampler.get_state() is None) == waits


def test_postprocessing_reads_infos_also_where_it_is_tried_on_zeros():
    class Own(PPOTF2Policy):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            steps = [float(info.get("step", 0)) for info in sample_batch["infos"]]
            sample_batch["rewards"] = np.array(steps, np.float32)
            return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)

    config = PPOConfig().environment(lambda context: CountingEnv())
    config.rollouts(rollout_fragment_length=6).framework(inference="tf", jit_compile=False)
    worker = RolloutWorker(config=config, default_policy_class=Own)
    batch = worker.sample()
    assert batch["rewards"].tolist() == [1.0, 2.0, 3.0, 4.0, 1.0, 1.0]
    assert worker.learn_on_batch(batch)["default_policy"]["num_agent_steps_trained"] == 6


# -- what infos say about learning ----------------------------------------------------------------


class Off(gym.Wrapper):
    """Infos say that some episodes, by their number from 1 on, are not to be learned from."""

    def __init__(self, env, barred):
        super().__init__(env)
        self.barred, self.number = barred, 0

    def reset(self, **kwargs):
        self.number += 1
        return self.env.reset(**kwargs)

    def step(self, action):
        *result, info = self.env.step(action)
        return *result, {**info, "training_enabled": self.number not in self.barred}


def of_barred(*barred, policy=Zero, **settings):
    return worker_of(policy, lambda: Off(CountingEnv(), barred), **settings)


def test_trajectories_whose_last_info_says_so_are_not_learned_from():
    worker = of_barred(2, policy=Reading)  # episodes of 4, 1 and 6 steps
    batch = worker.sample()
    assert (type(batch), batch.count) == (MultiAgentBatch, 6)
    assert batch["default_policy"]["t"].tolist() == [0, 1, 2, 3, 0]
    assert [len(infos) for infos, *_ in worker.get_policy().kept] == [4, 1]
    assert batch["default_policy"]["bonus"].tolist() == [2.0] * 5
    assert isinstance(worker.sample(), SampleBatch)


def test_of_episodes_that_are_all_barred_only_the_steps_are_counted():
    worker = of_barred(1, 2, 3, 4, 5, batch_mode="complete_episodes")
    batch = worker.sample()
    assert (batch.policy_batches, batch.count) == ({}, 11)
    assert [episode.episode_length for episode in worker.get_metrics()] == [4, 1, 6]


def test_vector_environments_say_it_for_each_of_theirs():
    assert find_excluded({}, 2) == []
    infos = {"training_enabled": np.array([True, False])}
    assert find_excluded(infos, 2) == find_excluded({"final_info": infos}, 2) == [1]
    present = {**infos, "_training_enabled": np.array([True, False])}
    assert find_excluded({**present, "other": np.zeros(2)}, 2) == []
    assert find_excluded([{}, {"final_info": {"training_enabled": False}}], 2) == [1]
