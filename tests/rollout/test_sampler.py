"""Sampling: every row is a true transition, nothing is lost, doubled or written again."""

import copy
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.environments import (
    MODES,
    CountingEnv,
    NestedCountingEnv,
    SavedCountingEnv,
    counting_creator,
)
from helpers.multi_agent_envs import GAMMA, LAMBDA, Walker, value_of
from tfpolicies import (
    AlgorithmConfig,
    DefaultCallbacks,
    PPOConfig,
    PPOTF2Policy,
    RolloutWorker,
    compute_advantages,
)
from tfpolicies.policy.policy import ActionBatch

pytestmark = pytest.mark.usefixtures("kept_programs")


def make_worker(
    mode="plain",
    count=3,
    length=5,
    lengths=(4, 1, 6),
    *,
    complete=False,
    policy=Walker,
    kind=CountingEnv,
    callbacks=None,
    clip_rewards=None,
    config=AlgorithmConfig,
):
    settings_ = (
        config()
        .environment(clip_rewards=clip_rewards)
        .env_runners(
            num_envs_per_env_runner=count,
            rollout_fragment_length=length,
            batch_mode="complete_episodes" if complete else "truncate_episodes",
        )
        .callbacks(callbacks)
        .debugging(seed=0)
    )
    return RolloutWorker(
        env_creator=counting_creator(mode, count, lengths, kind),
        config=settings_,
        default_policy_class=policy,
    )


def counting_envs(worker):
    return worker.foreach_env(lambda env: env)


def where(obs):
    if isinstance(obs, dict):
        return np.stack([obs["where"][0], obs["where"][1][:, 0], obs["step"][:, 0]], 1).astype(int)
    return obs.astype(int)


def check_rows(batch, lengths=(4, 1, 6)):
    """Every row is a true transition; returns its places as [(number, episode, step)]."""
    obs, reached = where(batch["obs"]), where(batch["new_obs"])
    for i, (number, episode, step) in enumerate(obs.tolist()):
        env = CountingEnv(number, lengths)
        last = step + 1 == env.length(episode)
        assert reached[i].tolist() == [number, episode, step + 1]
        assert batch["t"][i] == step
        assert batch["rewards"][i] == env.reward(episode, step, int(batch["actions"][i]))
        assert batch["terminateds"][i] == (last and not env.truncates(episode))
        assert batch["truncateds"][i] == (last and env.truncates(episode))
    return list(map(tuple, obs.tolist()))


def pieces_of(batch):
    """The batch cut where the unroll id changes."""
    cuts = np.flatnonzero(np.diff(batch["unroll_id"])) + 1
    edges = [0, *cuts.tolist(), batch.count]
    return [batch[start:end] for start, end in pairwise(edges)]


def check_pieces(batch, seen_unrolls):
    """An unroll is one piece of one episode, complete from cut to cut, and its id is new."""
    pieces = pieces_of(batch)
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        obs = where(piece["obs"])
        assert len(np.unique(obs[:, :2], axis=0)) == 1
        assert len(set(piece["eps_id"].tolist())) == 1
        np.testing.assert_array_equal(np.diff(obs[:, 2]), 1)
        assert piece["unroll_id"][0] not in seen_unrolls
        seen_unrolls.add(int(piece["unroll_id"][0]))
        if following is not None:
            ended = piece["terminateds"][-1] or piece["truncateds"][-1]
            assert ended or where(following["obs"])[0, 0] != obs[0, 0]


def check_advantages(batch):
    """GAE per piece, with 0, the final observation's or the next observation's value behind it."""
    after = np.where(batch["terminateds"], 0.0, value_of(where(batch["new_obs"])))
    np.testing.assert_array_equal(batch["values_bootstrapped"], after)
    for piece in pieces_of(batch):
        expected = compute_advantages(
            copy.deepcopy(piece), float(piece["values_bootstrapped"][-1]), GAMMA, LAMBDA
        )
        for name in ("advantages", "value_targets"):
            np.testing.assert_allclose(piece[name], expected[name], rtol=1e-5, atol=1e-4)


def true_history(number, lengths, steps):
    env, places, episode = CountingEnv(number, lengths), [], 0
    while len(places) < steps:
        places += [(number, episode, step) for step in range(env.length(episode))]
        episode += 1
    return places[:steps]


class History:
    """What an environment's samples say together, held against what the environment did."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.places = defaultdict(list)
        self.actions = defaultdict(list)
        self.ids = defaultdict(set)
        self.unrolls = set()

    def add(self, batch):
        for i, place in enumerate(check_rows(batch, self.lengths)):
            self.places[place[0]].append(place)
            self.actions[place[0]].append(int(batch["actions"][i]))
            self.ids[place[:2]].add(int(batch["eps_id"][i]))
        check_pieces(batch, self.unrolls)

    def check(self, envs):
        for env in envs:
            places = self.places[env.number]
            assert places == true_history(env.number, self.lengths, len(places))
            assert self.actions[env.number] == [int(a) for a in env.actions[: len(places)]]
        assert all(len(ids) == 1 for ids in self.ids.values())
        assert len(set().union(*self.ids.values())) == len(self.ids)


# -- truncate_episodes ------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_fragments_join_to_the_true_history_of_each_environment(mode):
    worker, history = make_worker(mode), History((4, 1, 6))
    for _ in range(30):
        batch = worker.sample()
        assert where(batch["obs"])[:, 0].tolist() == [0] * 5 + [1] * 5 + [2] * 5
        history.add(batch)
        check_advantages(batch)
    history.check(counting_envs(worker))


@pytest.mark.parametrize("mode", MODES)
def test_nested_observations_stay_nested_and_true(mode):
    class BlindWalker(Walker):
        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(self.rng.integers(3, size=len(obs_batch["step"])), [], {})

        def postprocess_fragments(self, fragments):
            assert len(fragments.bootstrap_inputs) == 3  # leaves

    worker, history = (
        make_worker(mode, kind=NestedCountingEnv, policy=BlindWalker),
        History((4, 1, 6)),
    )
    for _ in range(8):
        batch = worker.sample()
        assert batch["obs"]["step"].dtype == batch["new_obs"]["step"].dtype == np.uint8
        history.add(batch)
    history.check(counting_envs(worker))


@settings(max_examples=60)
@given(
    mode=st.sampled_from(MODES),
    count=st.integers(1, 4),
    length=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    complete=st.booleans(),
    samples=st.integers(1, 8),
)
def test_any_lengths_modes_and_fragments_give_true_rows(
    mode, count, length, lengths, complete, samples
):
    worker = make_worker(mode, count, length, lengths, complete=complete)
    history, rows = History(lengths), 0
    for _ in range(samples):
        batch = worker.sample()
        rows += batch.count
        history.add(batch)
        check_advantages(batch)
        if complete:
            assert batch.count >= length * count
        else:
            numbers = where(batch["obs"])[:, 0]
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
def test_a_fragment_end_is_bootstrapped_and_the_next_fragment_goes_on():
    worker = make_worker(count=1, length=3, lengths=(5,))
    first, second = worker.sample(), worker.sample()
    assert not first["terminateds"].any()
    assert not first["truncateds"].any()
    assert first["values_bootstrapped"].tolist() == [1.125, 1.25, 1.375]
    assert second["t"].tolist() == [3, 4, 0]
    assert second["terminateds"].tolist() == [False, True, False]
    assert second["values_bootstrapped"].tolist() == [1.5, 0.0, 1.375]  # (0.5 n + 0.25 e + ...)
    assert first["eps_id"][0] == second["eps_id"][0] != second["eps_id"][2]
    assert len({first["unroll_id"][0], second["unroll_id"][0], second["unroll_id"][2]}) == 3


def test_a_surplus_is_handed_out_by_the_next_sample_without_another_step():
    worker = make_worker("next_step", count=2, length=4, lengths=(1, 50))
    envs = counting_envs(worker)
    taken = [0, 0]
    for _ in range(6):
        batch = worker.sample()
        for env in envs:
            taken[env.number] += int((where(batch["obs"])[:, 0] == env.number).sum())
    assert taken == [24, 24]
    assert all(len(env.actions) >= 24 for env in envs)


# -- complete_episodes ------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_complete_episodes_are_whole_reach_the_goal_and_lose_nothing(mode):
    worker, history = make_worker(mode, complete=True), History((4, 1, 6))
    for _ in range(12):
        batch = worker.sample()
        assert batch.count >= 15
        for piece in pieces_of(batch):
            assert piece["t"].tolist() == list(range(piece.count))
            assert piece["terminateds"][-1] or piece["truncateds"][-1]
        history.add(batch)
        check_advantages(batch)
    history.check(counting_envs(worker))


def test_complete_episodes_do_not_favour_short_ones():
    # Episodes of 2 steps in environment 0, of 30 in 1: in the long run half the rows each.
    def create(context):
        return CountingEnv(context.vector_index, [(2,), (30,)][context.vector_index])

    config = AlgorithmConfig().rollouts(
        num_envs_per_worker=2, rollout_fragment_length=7, batch_mode="complete_episodes"
    )
    worker = RolloutWorker(env_creator=create, config=config, default_policy_class=Walker)
    rows = np.concatenate([where(worker.sample()["obs"])[:, 0] for _ in range(60)])
    assert 0.45 < rows.mean() < 0.55


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
    worker = make_worker(clip_rewards=clip, complete=complete)
    returns = defaultdict(float)
    for _ in range(6):
        batch = worker.sample()
        for i, (number, episode, step) in enumerate(where(batch["obs"]).tolist()):
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
    worker = make_worker(count=1, length=11)
    batch = worker.sample()  # episodes of 4, 1 and 6 steps
    metrics = worker.get_metrics()
    assert [m.episode_length for m in metrics] == [4, 1, 6]
    assert [m.episode_reward for m in metrics] == [
        batch["rewards"][:4].sum(),
        batch["rewards"][4],
        batch["rewards"][5:].sum(),
    ]
    assert dict(metrics[1].agent_rewards) == {("agent0", "default_policy"): batch["rewards"][4]}
    assert worker.get_metrics() == []


# -- policies ---------------------------------------------------------------------------------


def test_a_policy_with_its_own_postprocessing_gets_one_trajectory_at_a_time():
    class Own(Walker):
        seen = []

        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            self.seen.append(sample_batch)
            sample_batch["returns_to_go"] = np.cumsum(sample_batch["rewards"][::-1])[::-1]
            return sample_batch

    for mode in MODES:
        for complete in (False, True):
            Own.seen = []
            worker, history = make_worker(mode, policy=Own, complete=complete), History((4, 1, 6))
            for _ in range(5):
                history.add(worker.sample())
            history.check(counting_envs(worker))
            assert sum(piece.count for piece in Own.seen) == sum(map(len, history.places.values()))
            for piece in Own.seen:
                assert piece.is_single_trajectory()
                assert len(set(piece["unroll_id"].tolist())) == 1


def test_a_policy_of_tensorflow_may_extend_its_trajectories():
    class Extended(PPOTF2Policy):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            batch = super().postprocess_trajectory(sample_batch, other_agent_batches, episode)
            batch["doubled"] = 2.0 * batch["advantages"]
            return batch

    config = tiny_ppo_config
    plain = make_worker("same_step", policy=PPOTF2Policy, config=config)
    extended = make_worker("same_step", policy=Extended, config=config)
    for _ in range(3):
        expected, actual = plain.sample(), extended.sample()
        for name in ("obs", "new_obs", "advantages", "value_targets", "values_bootstrapped"):
            np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(actual["doubled"], 2.0 * actual["advantages"])
        np.testing.assert_array_equal(actual["actions"], expected["actions"])


def tiny_ppo_config():
    return PPOConfig().training(model={"fcnet_hiddens": [8]}).framework(inference="tf")


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_ppo_bootstraps_from_its_own_value_of_the_observation_reached(mode):
    worker = make_worker(mode, policy=PPOTF2Policy, config=tiny_ppo_config)
    policy = worker.get_policy()
    for _ in range(3):
        batch = worker.sample()
        reached = np.where(batch["terminateds"], 0.0, policy.compute_values([batch["new_obs"]]))
        np.testing.assert_allclose(batch["values_bootstrapped"], reached, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            batch["vf_preds"], policy.compute_values([batch["obs"]]), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            batch["action_logp"],
            policy.compute_log_likelihoods(batch["actions"], batch["obs"]),
            rtol=1e-4,
            atol=1e-5,
        )
        for piece in pieces_of(batch):
            last = float(piece["values_bootstrapped"][-1])
            expected = compute_advantages(copy.deepcopy(piece), last, policy.config["gamma"], 1.0)
            np.testing.assert_allclose(
                piece["advantages"], expected["advantages"], rtol=1e-4, atol=1e-4
            )


@pytest.mark.core
def test_columns_have_the_documented_dtypes():
    batch = make_worker(policy=PPOTF2Policy, config=tiny_ppo_config).sample()
    assert {name: str(batch[name].dtype) for name in batch} == {
        "obs": "float32",
        "new_obs": "float32",
        "actions": "int64",
        "rewards": "float32",
        "terminateds": "bool",
        "truncateds": "bool",
        "eps_id": "int64",
        "unroll_id": "int64",
        "agent_index": "int64",
        "t": "int64",
        "action_logp": "float32",
        "action_dist_inputs": "float32",
        "vf_preds": "float32",
        "advantages": "float32",
        "value_targets": "float32",
        "values_bootstrapped": "float32",
    }
    assert batch.count == 15
    assert (batch["agent_index"] == 0).all()


# -- callbacks --------------------------------------------------------------------------------


def recorder(log):
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
    worker = make_worker(mode, callbacks=recorder(log))
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
    worker = make_worker(mode, callbacks=recorder([]), complete=complete)
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
    seen = []

    class Infos(DefaultCallbacks):
        def on_episode_step(self, *, worker, base_env, policies, episode, env_index):
            seen.append((episode.last_info_for().get("step"), episode.length))

    make_worker(mode, callbacks=Infos).sample()
    assert len(seen) > 10
    assert all(info == length for info, length in seen)


def test_the_trajectory_callback_gets_the_batch_and_what_it_was_made_of():
    class Own(Walker):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            made = sample_batch.copy()
            made["made"] = np.ones(made.count)
            return made

    class Trajectories(DefaultCallbacks):
        calls = []

        def on_postprocess_trajectory(self, *, postprocessed_batch, original_batches, **others):
            self.calls.append((postprocessed_batch, original_batches, others))
            postprocessed_batch["marked"] = np.full(postprocessed_batch.count, len(self.calls))

    worker = make_worker(policy=Own, callbacks=Trajectories)
    batch = worker.sample()
    assert len(Trajectories.calls) == len(pieces_of(batch))
    for i, (piece, original, others) in enumerate(Trajectories.calls):
        policy_id, policy, before = original["agent0"]
        assert (policy_id, policy) == ("default_policy", worker.get_policy())
        assert "made" in piece
        assert "made" not in before
        np.testing.assert_array_equal(before["obs"], piece["obs"])
        assert others["agent_id"] == "agent0"
        assert others["worker"] is worker
        assert (pieces_of(batch)[i]["marked"] == i + 1).all()


def test_without_connectors_the_original_batch_comes_as_a_pair():
    class Pairs(DefaultCallbacks):
        seen = []

        def on_postprocess_trajectory(self, *, policies, original_batches, **others):
            policy, batch = original_batches["agent0"]
            self.seen.append((policy is policies["default_policy"], batch.count))

    def without():
        return AlgorithmConfig().rollouts(enable_connectors=False)

    batch = make_worker(policy=Walker, callbacks=Pairs, config=without).sample()
    assert [same for same, _ in Pairs.seen] == [True] * len(pieces_of(batch))
    assert sum(count for _, count in Pairs.seen) == batch.count


# -- memory -----------------------------------------------------------------------------------


def arrays_of(batch):
    nested = {f"{k}/{j}": x for k, v in batch.items() if isinstance(v, dict) for j, x in v.items()}
    return {k: v for k, v in {**batch, **nested}.items() if isinstance(v, np.ndarray)}


@pytest.mark.core
@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_handed_out_is_never_written_again(mode, count, complete):
    worker = make_worker(mode, count, complete=complete)
    batches = [worker.sample() for _ in range(20)]
    copies = [copy.deepcopy(arrays_of(batch)) for batch in batches]
    for _ in range(5):
        worker.sample()
    for batch, kept in zip(batches, copies, strict=True):
        for name, array in arrays_of(batch).items():
            np.testing.assert_array_equal(array, kept[name])


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_user_writes_into_a_batch_changes_nothing_else(mode, count, complete):
    class Vandal(DefaultCallbacks):
        def on_postprocess_trajectory(self, *, postprocessed_batch, **others):
            obs = postprocessed_batch["obs"].copy()
            postprocessed_batch["new_obs"][...] = -7.0
            np.testing.assert_array_equal(postprocessed_batch["obs"], obs)

    worker = make_worker(mode, count, complete=complete, callbacks=Vandal)
    undisturbed = make_worker(mode, count, complete=complete)
    for _ in range(8):
        batch, expected = worker.sample(), undisturbed.sample()
        assert (batch["new_obs"] == -7.0).all()
        for name in ("obs", "actions", "rewards", "t", "vf_preds"):
            np.testing.assert_array_equal(batch[name], expected[name])
        for array in arrays_of(batch).values():
            array[...] = 1


# -- states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("mode", ["plain", "same_step", "disabled"])
def test_a_restored_sampler_gives_the_same_batches(mode, complete):
    def saved_worker():
        return make_worker(mode, kind=SavedCountingEnv, complete=complete)

    first, second = saved_worker(), saved_worker()
    for _ in range(3):
        first.sample()
    first.get_metrics()
    second.sample()
    second.get_metrics()
    second.sampler.set_state(copy.deepcopy(first.sampler.get_state()))
    second.get_policy().rng.bit_generator.state = first.get_policy().rng.bit_generator.state
    for _ in range(5):
        expected, actual = first.sample(), second.sample()
        assert list(actual) == list(expected)
        for name in expected:
            np.testing.assert_array_equal(actual[name], expected[name])
    lengths = [[m.episode_length for m in w.get_metrics()] for w in (first, second)]
    assert lengths[0] == lengths[1] != []


def test_a_saved_state_is_not_changed_by_going_on():
    worker = make_worker(kind=SavedCountingEnv, complete=True)
    worker.sample()
    state = worker.sampler.get_state()
    kept = copy.deepcopy(state)
    worker.sample()
    other = make_worker(kind=SavedCountingEnv, complete=True)
    other.sampler.set_state(state)
    other.sample()
    for name in ("obs", "alive", "running"):
        for a, b in zip(state[name], kept[name], strict=True):
            np.testing.assert_array_equal(a, b)
    for name, column in kept["columns"].items():
        np.testing.assert_array_equal(state["columns"][name], column)


def test_a_sampler_has_no_state_without_its_environments_or_with_followed_episodes():
    assert make_worker().sampler.get_state() is None
    followed = make_worker(kind=SavedCountingEnv, callbacks=recorder([]))
    assert followed.sampler.get_state() is None
