"""Sampling: every row is a true transition, nothing is lost, doubled or written again."""

import copy
from collections import defaultdict

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.environments import (
    MODES,
    CountingEnv,
    NestedCountingEnv,
    SavedCountingEnv,
    counting_creator,
    counting_vector,
)
from helpers.factories import assert_equal
from helpers.multi_agent_envs import GAMMA, LAMBDA, Walker, value_of
from helpers.transitions import LENGTHS, History, get_places, split_pieces
from helpers.workers import make_callbacks, make_worker
from tfpolicies import (
    AlgorithmConfig,
    DefaultCallbacks,
    PPOConfig,
    PPOTF2Policy,
    compute_advantages,
)
from tfpolicies.policy.policy import ActionBatch

pytestmark = pytest.mark.usefixtures("kept_programs")


def counting_worker(
    mode="plain", count=3, length=5, lengths=LENGTHS, complete=False, kind=CountingEnv, **settings
):
    defaults = {"policy_class": Walker, "config_class": AlgorithmConfig}
    defaults |= {"num_envs_per_worker": count, "rollout_fragment_length": length}
    defaults["batch_mode"] = "complete_episodes" if complete else "truncate_episodes"
    creator = counting_creator(mode, count, lengths, kind)
    return make_worker(**{"env_creator": creator, **defaults, **settings})


PPO = {"policy_class": PPOTF2Policy, "config_class": PPOConfig}


def counting_envs(worker):
    return worker.foreach_env(lambda env: env)


def check_advantages(batch):
    """GAE per piece, with 0, the final observation's or the next observation's value after it."""
    after = np.where(batch["terminateds"], 0.0, value_of(get_places(batch["new_obs"])))
    np.testing.assert_array_equal(batch["values_bootstrapped"], after)
    for piece in split_pieces(batch):
        expected = compute_advantages(
            copy.deepcopy(piece), float(piece["values_bootstrapped"][-1]), GAMMA, LAMBDA
        )
        for name in ("advantages", "value_targets"):
            np.testing.assert_allclose(piece[name], expected[name], rtol=1e-5, atol=1e-4)


# -- truncate_episodes ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nested_observations_stay_nested_and_true(mode):
    class BlindWalker(Walker):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(self.rng.integers(3, size=len(obs_batch["step"])), [], {})

        def postprocess_fragments(self, fragments):
            assert len(fragments.bootstrap_inputs) == 3  # leaves

    worker = counting_worker(mode, kind=NestedCountingEnv, policy_class=BlindWalker)
    history = History()
    for _ in range(8):
        batch = worker.sample()
        assert batch["obs"]["step"].dtype == batch["new_obs"]["step"].dtype == np.uint8
        history.add(batch)
    history.check(counting_envs(worker))


@pytest.mark.core
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(
    count=st.integers(1, 4),
    length=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    samples=st.integers(1, 8),
)
@example(count=3, length=5, lengths=LENGTHS, samples=30)
@example(count=3, length=6, lengths=(1,), samples=1)
def test_samples_join_to_the_true_history_of_each_environment(
    mode, complete, count, length, lengths, samples
):
    worker = counting_worker(mode, count, length, lengths, complete=complete)
    history, rows = History(lengths), 0
    for _ in range(samples):
        batch = worker.sample()
        rows += batch.count
        history.add(batch)
        check_advantages(batch)
        if complete:
            assert batch.count >= length * count
            for piece in split_pieces(batch):
                assert piece["t"].tolist() == list(range(piece.count))
                assert piece["terminateds"][-1] or piece["truncateds"][-1]
        else:
            numbers = get_places(batch["obs"])[:, 0]
            assert numbers.tolist() == np.repeat(np.arange(count), length).tolist()
    history.check(counting_envs(worker))
    ended = [m.episode_length for m in worker.get_metrics()]
    finished = sum(
        CountingEnv(place[0], lengths).length(place[1]) == place[2] + 1
        for places in history.places.values()
        for place in places
    )
    assert len(ended) == finished
    if complete:
        assert sum(ended) == rows


@pytest.mark.core
def test_a_fragment_end_is_bootstrapped_and_the_next_fragment_continues():
    worker = counting_worker(count=1, length=3, lengths=(5,))
    first, second = worker.sample(), worker.sample()
    assert not first["terminateds"].any()
    assert not first["truncateds"].any()
    assert first["values_bootstrapped"].tolist() == [1.125, 1.25, 1.375]
    assert second["t"].tolist() == [3, 4, 0]
    assert second["terminateds"].tolist() == [False, True, False]
    assert second["values_bootstrapped"].tolist() == [1.5, 0.0, 1.375]  # (0.5 n + 0.25 e + ...)
    assert first["eps_id"][0] == second["eps_id"][0] != second["eps_id"][2]
    assert len({first["unroll_id"][0], second["unroll_id"][0], second["unroll_id"][2]}) == 3


def test_a_surplus_is_returned_by_the_next_sample():
    worker = counting_worker("next_step", count=2, length=4, lengths=(1, 50))
    counts = np.zeros(2, int)
    for _ in range(6):
        counts += np.bincount(get_places(worker.sample()["obs"])[:, 0])
    assert counts.tolist() == [24, 24]
    assert all(len(env.actions) >= 24 for env in counting_envs(worker))


# -- complete_episodes ------------------------------------------------------------------------


def test_complete_episodes_do_not_favour_short_ones():
    # Episodes of 2 steps in environment 0, of 30 in 1: in the long run half the rows each.
    def create(context):
        return CountingEnv(context.vector_index, [(2,), (30,)][context.vector_index])

    settings = {"num_envs_per_worker": 2, "rollout_fragment_length": 7}
    worker = make_worker(create, Walker, batch_mode="complete_episodes", **settings)
    rows = np.concatenate([get_places(worker.sample()["obs"])[:, 0] for _ in range(60)])
    assert 0.45 < rows.mean() < 0.55


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_vector_environments_that_reuse_their_arrays_lose_no_final_observation(mode, complete):
    vector = counting_vector(AutoresetMode[mode.upper()], copy=False)
    worker = counting_worker(env_creator=lambda context: vector, complete=complete)
    history = History()
    for _ in range(8):
        history.add(worker.sample())
    history.check(counting_envs(worker))


# -- rewards and metrics ----------------------------------------------------------------------


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        (None, lambda r: r),
        (False, lambda r: r),
        (True, np.sign),
        (2.5, lambda r: np.clip(r, -2.5, 2.5)),
    ],
)
def test_learning_sees_clipped_rewards_and_metrics_raw_ones(clip, expected, complete):
    worker = counting_worker(clip_rewards=clip, complete=complete)
    returns = defaultdict(float)
    for _ in range(6):
        batch = worker.sample()
        for i, (number, episode, step) in enumerate(get_places(batch["obs"]).tolist()):
            raw = CountingEnv(number).reward(episode, step, int(batch["actions"][i]))
            assert batch["rewards"][i] == np.float32(expected(raw))
            returns[number, episode] += raw
            if batch["terminateds"][i] or batch["truncateds"][i]:
                returns[number, episode, "ended"] = True
        assert batch["rewards"].dtype == np.float32
        check_advantages_use(batch)
    ended = [value for key, value in returns.items() if (*key, "ended") in returns]
    actual = [m.episode_reward for m in worker.get_metrics()]
    np.testing.assert_allclose(sorted(actual), sorted(ended))


def check_advantages_use(batch):
    one_step = batch["rewards"] + GAMMA * batch["values_bootstrapped"] - batch["vf_preds"]
    last = np.append(np.diff(batch["unroll_id"]) != 0, True)
    np.testing.assert_allclose(batch["advantages"][last], one_step[last], rtol=1e-5, atol=1e-5)


@pytest.mark.core
def test_metrics_are_emptied_when_they_are_read_and_name_the_agent():
    worker = counting_worker(count=1, length=11)
    batch = worker.sample()  # episodes of 4, 1 and 6 steps
    metrics = worker.get_metrics()
    assert [m.episode_length for m in metrics] == [4, 1, 6]
    rewards = batch["rewards"]
    returns = [rewards[:4].sum(), rewards[4], rewards[5:].sum()]
    assert [m.episode_reward for m in metrics] == returns
    assert dict(metrics[1].agent_rewards) == {("agent0", "default_policy"): rewards[4]}
    assert worker.get_metrics() == []


# -- policies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_an_override_of_postprocessing_gets_one_trajectory_at_a_time(mode, complete):
    class Recording(Walker):
        trajectories = []

        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            self.trajectories.append(sample_batch)
            sample_batch["returns_to_go"] = np.cumsum(sample_batch["rewards"][::-1])[::-1]
            return sample_batch

    worker = counting_worker(mode, policy_class=Recording, complete=complete)
    history = History()
    for _ in range(5):
        history.add(worker.sample())
    history.check(counting_envs(worker))
    assert sum(x.count for x in Recording.trajectories) == sum(map(len, history.places.values()))
    for piece in Recording.trajectories:
        assert piece.is_single_trajectory()
        assert len(set(piece["unroll_id"].tolist())) == 1


def test_a_policy_of_tensorflow_may_extend_its_trajectories():
    class Extended(PPOTF2Policy):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            batch = super().postprocess_trajectory(sample_batch, other_agent_batches, episode)
            batch["doubled"] = 2.0 * batch["advantages"]
            return batch

    plain = counting_worker("same_step", **PPO)
    extended = counting_worker("same_step", **{**PPO, "policy_class": Extended})
    for _ in range(3):
        expected, actual = plain.sample(), extended.sample()
        for name in ("obs", "new_obs", "advantages", "value_targets", "values_bootstrapped"):
            np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(actual["doubled"], 2.0 * actual["advantages"])
        np.testing.assert_array_equal(actual["actions"], expected["actions"])


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_ppo_bootstraps_from_its_own_value_of_the_observation_reached(mode):
    worker = counting_worker(mode, **PPO)
    policy = worker.get_policy()
    for _ in range(3):
        batch = worker.sample()
        reached = np.where(batch["terminateds"], 0.0, policy.compute_values([batch["new_obs"]]))
        logp = policy.compute_log_likelihoods(batch["actions"], batch["obs"])
        values = policy.compute_values([batch["obs"]])
        for name, column in (("values_bootstrapped", reached), ("vf_preds", values)):
            np.testing.assert_allclose(batch[name], column, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(batch["action_logp"], logp, rtol=1e-4, atol=1e-5)
        for piece in split_pieces(batch):
            last = float(piece["values_bootstrapped"][-1])
            expected = compute_advantages(copy.deepcopy(piece), last, policy.config["gamma"], 1.0)
            advantages = (x["advantages"] for x in (piece, expected))
            np.testing.assert_allclose(*advantages, rtol=1e-4, atol=1e-4)


@pytest.mark.core
def test_columns_have_the_documented_dtypes():
    batch = counting_worker(**PPO).sample()
    floats = "obs new_obs rewards action_logp action_dist_inputs vf_preds advantages value_targets"
    integers = "actions eps_id unroll_id agent_index t"
    expected = dict.fromkeys([*floats.split(), "values_bootstrapped"], "float32")
    expected |= dict.fromkeys(integers.split(), "int64")
    expected |= dict.fromkeys(("terminateds", "truncateds"), "bool")
    assert {name: str(batch[name].dtype) for name in batch} == expected
    assert batch.count == 15
    assert (batch["agent_index"] == 0).all()


# -- callbacks --------------------------------------------------------------------------------


def make_recorder(log):
    class Recorder(DefaultCallbacks):
        def on_episode_created(self, *, worker, base_env, policies, episode, env_index):
            log.append(("created", env_index, episode.episode_id, episode.length))

        def on_episode_start(self, *, worker, base_env, policies, episode, env_index):
            log.append(("start", env_index, episode.episode_id, episode.length))
            episode.user_data["rewards"] = []

        def on_episode_step(self, *, worker, base_env, policies, episode, env_index):
            log.append(("step", env_index, episode.episode_id, episode.length))
            episode.user_data["rewards"].append(episode.total_reward)

        def on_episode_end(self, *, worker, base_env, policies, episode, env_index):
            log.append(("end", env_index, episode.episode_id, episode.length))
            assert len(episode.user_data["rewards"]) == episode.length
            episode.custom_metrics["own_length"] = episode.length
            episode.custom_metrics["own_reward"] = episode.total_reward
            episode.hist_data["rewards"] = episode.user_data["rewards"]

        def on_sample_end(self, *, worker, samples):
            log.append(("sample", samples.count))

    return Recorder


@pytest.mark.parametrize("mode", MODES)
def test_callbacks_follow_each_episode_in_order(mode):
    log = []
    worker = counting_worker(mode, callbacks=make_recorder(log))
    for _ in range(6):
        worker.sample()
    assert [entry for entry in log if entry[0] == "sample"] == [("sample", 15)] * 6
    for number in range(3):
        actual = [entry for entry in log if entry[0] != "sample" and entry[1] == number]
        expected, episode = [], 0
        while len(expected) < len(actual):
            length = CountingEnv(number).length(episode)
            expected += [("created", 0), ("start", 0)]
            expected += [("step", k + 1) for k in range(length)]
            expected += [("end", length)]
            episode += 1
        assert [(name, length) for name, _, _, length in actual] == expected[: len(actual)]
        ids = [entry[2] for entry in actual if entry[0] == "created"]
        assert len(set(ids)) == len(ids)


@pytest.mark.core
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_custom_metrics_are_reported_with_their_own_episode(mode, complete):
    worker = counting_worker(mode, callbacks=make_recorder([]), complete=complete)
    metrics = []
    for _ in range(8):
        worker.sample()
        metrics += worker.get_metrics()
    assert len(metrics) > 10
    for one in metrics:
        assert one.custom_metrics["own_length"] == one.episode_length
        assert one.custom_metrics["own_reward"] == pytest.approx(one.episode_reward)
        assert len(one.hist_data["rewards"]) == one.episode_length


@pytest.mark.parametrize("mode", MODES)
def test_callbacks_see_the_last_info_of_their_environment(mode):
    calls = []

    def record(worker, base_env, policies, episode, env_index):
        calls.append((episode.last_info_for().get("step"), episode.length))

    counting_worker(mode, callbacks=make_callbacks(on_episode_step=record)).sample()
    assert len(calls) > 10
    assert all(info == length for info, length in calls)


def test_the_trajectory_callback_gets_the_batch_and_its_original():
    class Copying(Walker):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            batch = sample_batch.copy()
            batch["copied"] = np.ones(batch.count)
            return batch

    calls = []

    def record(postprocessed_batch, original_batches, **others):
        calls.append((postprocessed_batch, original_batches, others))
        postprocessed_batch["marked"] = np.full(postprocessed_batch.count, len(calls))

    callbacks = make_callbacks(on_postprocess_trajectory=record)
    worker = counting_worker(policy_class=Copying, callbacks=callbacks)
    batch = worker.sample()
    assert len(calls) == len(split_pieces(batch))
    for i, (piece, original, others) in enumerate(calls):
        policy_id, policy, before = original["agent0"]
        assert (policy_id, policy) == ("default_policy", worker.get_policy())
        assert "copied" in piece
        assert "copied" not in before
        np.testing.assert_array_equal(before["obs"], piece["obs"])
        assert others["agent_id"] == "agent0"
        assert others["worker"] is worker
        assert (split_pieces(batch)[i]["marked"] == i + 1).all()


def test_without_connectors_the_original_batch_comes_as_a_pair():
    calls = []

    def record(policies, original_batches, **others):
        policy, batch = original_batches["agent0"]
        calls.append((policy is policies["default_policy"], batch.count))

    callbacks = make_callbacks(on_postprocess_trajectory=record)
    batch = counting_worker(callbacks=callbacks, enable_connectors=False).sample()
    assert [same for same, _ in calls] == [True] * len(split_pieces(batch))
    assert sum(count for _, count in calls) == batch.count


# -- memory -----------------------------------------------------------------------------------


def get_arrays(batch):
    nested = {f"{k}/{j}": x for k, v in batch.items() if isinstance(v, dict) for j, x in v.items()}
    return {k: v for k, v in {**batch, **nested}.items() if isinstance(v, np.ndarray)}


@pytest.mark.core
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_handed_out_is_never_written_again(mode, count, complete):
    worker = counting_worker(mode, count, complete=complete)
    batches = [worker.sample() for _ in range(20)]
    copies = [copy.deepcopy(get_arrays(batch)) for batch in batches]
    for _ in range(5):
        worker.sample()
    for batch, expected in zip(batches, copies, strict=True):
        assert_equal(get_arrays(batch), expected)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_changes_of_a_batch_by_the_user_change_nothing_else(mode, count, complete):
    def overwrite(postprocessed_batch, **others):
        obs = postprocessed_batch["obs"].copy()
        postprocessed_batch["new_obs"][...] = -7.0
        np.testing.assert_array_equal(postprocessed_batch["obs"], obs)

    callbacks = make_callbacks(on_postprocess_trajectory=overwrite)
    worker = counting_worker(mode, count, complete=complete, callbacks=callbacks)
    undisturbed = counting_worker(mode, count, complete=complete)
    for _ in range(8):
        batch, expected = worker.sample(), undisturbed.sample()
        assert (batch["new_obs"] == -7.0).all()
        for name in ("obs", "actions", "rewards", "t", "vf_preds"):
            np.testing.assert_array_equal(batch[name], expected[name])
        for array in get_arrays(batch).values():
            array[...] = 1


# -- states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("mode", ["plain", "same_step", "disabled"])
def test_a_restored_sampler_gives_the_same_batches(mode, complete):
    settings = {"kind": SavedCountingEnv, "complete": complete}
    first, second = (counting_worker(mode, **settings) for _ in range(2))
    for _ in range(3):
        first.sample()
    first.get_metrics()
    second.sample()
    second.get_metrics()
    second.sampler.set_state(copy.deepcopy(first.sampler.get_state()))
    second.get_policy().rng.bit_generator.state = first.get_policy().rng.bit_generator.state
    for _ in range(5):
        expected, actual = first.sample(), second.sample()
        assert_equal(actual, expected)
    lengths = [[m.episode_length for m in w.get_metrics()] for w in (first, second)]
    assert lengths[0] == lengths[1] != []


def test_later_samples_do_not_change_a_saved_state():
    worker = counting_worker(kind=SavedCountingEnv, complete=True)
    worker.sample()
    state = worker.sampler.get_state()
    before = copy.deepcopy(state)
    worker.sample()
    other = counting_worker(kind=SavedCountingEnv, complete=True)
    other.sampler.set_state(state)
    other.sample()
    for name in ("obs", "alive", "running"):
        for array, expected in zip(state[name], before[name], strict=True):
            np.testing.assert_array_equal(array, expected)
    assert_equal(state["columns"], before["columns"])


def test_a_sampler_has_no_state_without_its_environments_or_with_followed_episodes():
    assert counting_worker().sampler.get_state() is None
    followed = counting_worker(kind=SavedCountingEnv, callbacks=make_recorder([]))
    assert followed.sampler.get_state() is None
