"""Prioritised replay: the sum tree, draws and weights, and how algorithms learn by it."""

import gymnasium as gym
import numpy as np
import pytest

from helpers.environments import CountingEnv, SavedCountingEnv, TwoArmsEnv
from tfpolicies import (
    DefaultCallbacks,
    DQNConfig,
    DQNTF2Policy,
    MultiAgentBatch,
    Policy,
    PolicySpec,
    SACConfig,
    SampleBatch,
    TD3Config,
)
from tfpolicies.compat import MultiAgentCartPole
from tfpolicies.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    UnknownPolicyError,
    UsageError,
)
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer
from tfpolicies.replay.prioritized import (
    MultiAgentPrioritizedReplayBuffer,
    PrioritizedReplayBuffer,
)
from tfpolicies.replay.ring_buffer import ReplayBuffer
from tfpolicies.replay.sum_tree import SumTree

pytestmark = pytest.mark.usefixtures("kept_programs")

BY_PRIORITIES = {"type": "MultiAgentPrioritizedReplayBuffer", "capacity": 64}


def rows(first, stop, **columns):
    numbers = np.arange(first, stop)
    return SampleBatch(obs=numbers[:, None].astype(np.float32), actions=numbers, **columns)


def levels(tree):
    return [level.copy() for level in (*tree._sums, *tree._minima)]


# -- the tree -------------------------------------------------------------------------------------


def test_masses_find_the_leaves_they_fall_on_by_hand():
    tree = SumTree(5000)  # two levels
    places, values = np.array([0, 1, 17, 4999]), np.array([0.5, 1.5, 2.0, 4.0])
    tree.set(places, values)
    assert (tree.total, tree.minimum) == (8.0, 0.5)
    masses = np.array([0.0, 0.49, 0.5, 1.99, 2.0, 3.99, 4.0, 7.99])
    assert tree.find(masses).tolist() == [0, 0, 1, 1, 17, 17, 4999, 4999]
    tree.set(np.array([0, 4999]), np.array([0.0, 0.25]))
    assert (tree.total, tree.minimum) == (3.75, 0.25)
    assert tree.find(np.array([0.0, 3.5])).tolist() == [1, 4999]
    assert tree[places].tolist() == [0.0, 1.5, 2.0, 0.25]


@pytest.mark.parametrize("capacity", [1, 16, 17, 1000, 5000, 70_000])
def test_sums_stay_those_of_the_leaves_whatever_is_written_in_whatever_order(capacity):
    rng, tree, leaves = np.random.default_rng(0), SumTree(capacity), np.zeros(capacity)
    for _ in range(30):
        places = rng.integers(capacity, size=50)  # many of them twice
        values = rng.exponential(size=50) ** 3 * (rng.random(50) > 0.1)
        tree.set(places, values)
        for place, value in zip(places, values, strict=True):  # one by one: the last one stays
            leaves[place] = value
        np.testing.assert_array_equal(tree[:capacity], leaves)
        assert tree.total == pytest.approx(leaves.sum(), rel=1e-12)
        assert tree.minimum == leaves[leaves > 0].min(initial=np.inf)
    anew = SumTree(capacity)
    anew.set(np.arange(capacity), leaves)
    for one, other in zip(levels(tree), levels(anew), strict=True):
        np.testing.assert_array_equal(one, other)  # to the bit: nothing drifts
    result = tree.find(rng.random(5000) * tree.total)
    assert (leaves[result] > 0).all()


def test_the_ends_of_intervals_find_leaves_that_are_not_0():
    rng = np.random.default_rng(3)
    leaves = np.where(rng.random(80_000) < 0.5, 0.0, 10.0 ** rng.integers(-12, 3, size=80_000))
    tree = SumTree(90_000)
    tree.set(np.arange(80_000), leaves)
    ends = np.cumsum(leaves)
    masses = np.concatenate([ends, np.nextafter(ends, 0), [0.0, np.nextafter(tree.total, 0)]])
    result = tree.find(np.clip(masses, 0, np.nextafter(tree.total, 0)))
    assert (leaves[result] > 0).all()


# -- a buffer -------------------------------------------------------------------------------------


def test_rows_are_drawn_in_proportion_to_powers_of_their_priorities():
    buffer = PrioritizedReplayBuffer(40, seed=0, alpha=0.5, beta=1.0, eps=0.0)
    buffer.add(rows(0, 20))
    errors = np.linspace(-3, 5, 20) ** 2 + 0.1
    buffer.update_priorities(np.arange(20), errors * np.where(np.arange(20) % 2, 1, -1))
    expected = np.sqrt(errors) / np.sqrt(errors).sum()
    batch = buffer.sample(100_000)
    counts = np.bincount(batch["actions"], minlength=20)
    chi_square = ((counts - 100_000 * expected) ** 2 / (100_000 * expected)).sum()
    assert chi_square < 43.8  # of 19 degrees of freedom, the 99.9 % quantile
    np.testing.assert_array_equal(batch["batch_indexes"], batch["actions"])
    assert (batch["weights"].dtype, batch["batch_indexes"].dtype) == (np.float32, np.int64)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_make_up_for_it_and_the_largest_is_1(beta):
    buffer = PrioritizedReplayBuffer(4, seed=0, alpha=1.0, beta=beta, eps=0.0)
    buffer.add(rows(0, 4))
    buffer.update_priorities(np.arange(4), np.array([1.0, 2.0, 4.0, 8.0]))
    batch = buffer.sample(400)
    chances = np.array([1, 2, 4, 8]) / 15
    weights = (4 * chances) ** -beta
    expected = (weights / weights.max())[batch["actions"]]  # of all rows, drawn or not
    np.testing.assert_allclose(batch["weights"], expected, rtol=1e-6)
    one = buffer.sample(1)["weights"]  # not the largest of those drawn
    assert one[0] in (weights / weights.max()).astype(np.float32)


def test_an_alpha_of_0_draws_uniformly():
    buffer = PrioritizedReplayBuffer(2, seed=0, alpha=0.0, beta=1.0)
    buffer.add(rows(0, 2))
    buffer.update_priorities(np.array([0, 1]), np.array([1e-9, 1e9]))
    batch = buffer.sample(10_000)
    assert abs(batch["actions"].mean() - 0.5) < 4 * 0.5 / 100
    assert (batch["weights"] == 1).all()


def test_of_an_index_drawn_twice_the_last_error_counts():
    buffer = PrioritizedReplayBuffer(3, seed=0, alpha=1.0, eps=0.5)
    buffer.add(rows(0, 3))
    buffer.update_priorities(np.array([1, 0, 1, 2, 1]), np.array([100.0, -1.0, 7.0, 0.0, 2.0]))
    assert buffer.get_state()["priorities"]["masses"].tolist() == [1.5, 2.5, 0.5]


def test_new_rows_get_the_greatest_priority_so_far():
    buffer = PrioritizedReplayBuffer(4, seed=0, alpha=2.0, eps=0.0)
    buffer.add(rows(0, 3))
    assert buffer.get_state()["priorities"]["masses"].tolist() == [1.0, 1.0, 1.0]
    buffer.update_priorities(np.array([0, 1]), np.array([3.0, 0.5]))
    buffer.update_priorities(np.array([0]), np.array([2.0]))
    buffer.add(rows(3, 5))  # the second one over the first row
    assert buffer.get_state()["priorities"]["masses"].tolist() == [9.0, 0.25, 1.0, 9.0]
    buffer.add(rows(5, 15))
    assert buffer.get_state()["priorities"]["masses"].tolist() == [9.0] * 4
    assert set(buffer.sample(100)["actions"].tolist()) == {11, 12, 13, 14}


def test_weights_of_the_rows_themselves_are_factors():
    buffer = PrioritizedReplayBuffer(2, seed=0, alpha=1.0, beta=1.0, eps=0.0)
    buffer.add(rows(0, 2, weights=np.array([0.0, 0.5], np.float32)))
    buffer.update_priorities(np.array([0, 1]), np.array([1.0, 4.0]))
    batch = buffer.sample(50)
    np.testing.assert_allclose(batch["weights"], np.where(batch["actions"] == 0, 0.0, 0.125))


@pytest.mark.parametrize(
    ("indexes", "errors", "message"),
    [
        ([0], [1.0, 2.0], "one value for each"),
        ([[0]], [[1.0]], "one value for each"),
        ([0.0], [1.0], "whole number"),
        ([0, 3], [1.0, 1.0], "from 0 to 2"),
        ([-1], [1.0], "from 0 to 2"),
        ([0, 1], [1.0, np.nan], "finite and greater than 0"),
        ([0, 1], [1.0, np.inf], "finite and greater than 0"),
        ([0, 1], [1.0, 0.0], "finite and greater than 0"),
    ],
)
def test_wrong_priorities_are_refused_and_change_nothing(indexes, errors, message):
    buffer = PrioritizedReplayBuffer(5, seed=0, eps=0.0)
    buffer.add(rows(0, 3))
    with pytest.raises(UsageError, match=message):
        buffer.update_priorities(np.array(indexes), np.array(errors))
    assert buffer.get_state()["priorities"]["masses"].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(BatchError):
        buffer.add(SampleBatch(obs=np.zeros((1, 1), np.float32)))
    assert buffer.get_state()["priorities"]["masses"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("settings", [{"alpha": -1}, {"beta": np.inf}, {"eps": "no"}])
def test_exponents_are_finite_numbers_from_0(settings):
    with pytest.raises(ConfigError, match=r"must be a finite number >= 0, but got"):
        PrioritizedReplayBuffer(5, **settings)
    with pytest.raises(ConfigError, match=f"`{next(iter(settings))}`"):
        MultiAgentPrioritizedReplayBuffer(5, **settings)


def test_a_restored_buffer_goes_on_to_the_bit():
    rng = np.random.default_rng(0)
    buffer, twin = (PrioritizedReplayBuffer(300, seed=s, eps=0.01) for s in (1, 2))
    for first in range(0, 400, 50):
        buffer.add(rows(first, first + 50))
        drawn = buffer.sample(64)["batch_indexes"]
        buffer.update_priorities(drawn, rng.normal(size=64))
    state = buffer.get_state()
    twin.add(rows(0, 7))
    twin.set_state(state)
    for _ in range(5):
        one, other = buffer.sample(64), twin.sample(64)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
        errors = rng.normal(size=64)
        for each in (buffer, twin):
            each.update_priorities(one["batch_indexes"], errors)
            each.add(rows(0, 3))
    assert levels(buffer._priorities._tree)[-1].tolist() == (
        levels(twin._priorities._tree)[-1].tolist()
    )


def test_foreign_states_are_refused_and_change_nothing():
    buffer, uniform = PrioritizedReplayBuffer(5, seed=2), ReplayBuffer(5, seed=2)
    for each in (buffer, uniform):
        each.add(rows(0, 3))
    good = buffer.get_state()
    own = good["priorities"]
    bad = [
        uniform.get_state(),
        PrioritizedReplayBuffer(5, alpha=0.5).get_state() | {"num_added": 0, "columns": {}},
        {**good, "priorities": {**own, "masses": own["masses"][:2]}},
        {**good, "priorities": {**own, "masses": -own["masses"]}},
        {**good, "priorities": {**own, "greatest": np.nan}},
        {**good, "rng": {}},
    ]
    for state in bad:
        with pytest.raises(CheckpointError):
            buffer.set_state(state)
    assert buffer.get_state()["priorities"]["masses"].tolist() == [1.0, 1.0, 1.0]


def test_each_policy_has_its_own_priorities():
    buffer = MultiAgentPrioritizedReplayBuffer(4, seed=0, alpha=1.0, eps=0.0)
    buffer.add(MultiAgentBatch({"a": rows(0, 2), "b": rows(5, 7)}, env_steps=2))
    buffer.update_priorities({"a": (np.array([0]), np.array([3.0]))})
    masses = {
        p: s["priorities"]["masses"].tolist() for p, s in buffer.get_state()["buffers"].items()
    }
    assert masses == {"a": [3.0, 1.0], "b": [1.0, 1.0]}
    with pytest.raises(UnknownPolicyError, match="'c'"):
        buffer.update_priorities({"c": (np.array([0]), np.array([3.0]))})


# -- algorithms -----------------------------------------------------------------------------------


def saved_counting(context):
    return SavedCountingEnv(context.vector_index)


def two_arms(context):
    return TwoArmsEnv()


def aiming(context):
    return gym.make("Pendulum-v1")


SMALL = {
    DQNConfig: {"hiddens": []},
    SACConfig: {"q_model_config": {"fcnet_hiddens": [8]}},
    TD3Config: {"actor_hiddens": [8], "critic_hiddens": [8]},
}


def tiny(env=saved_counting, config=DQNConfig, **training):
    settings = {
        "model": {"fcnet_hiddens": [8]},
        **SMALL[config],
        "train_batch_size": 4,
        "num_steps_sampled_before_learning_starts": 0,
        "replay_buffer_config": BY_PRIORITIES,
        **training,
    }
    return (
        config()
        .environment(env)
        .rollouts(num_envs_per_worker=2, rollout_fragment_length=6)
        .training(**settings)
        .framework(inference="tf", jit_compile=False)
        .reporting(min_sample_timesteps_per_iteration=0, min_time_s_per_iteration=0)
        .debugging(seed=4, log_level="ERROR")
    )


def watched(algorithm, monkeypatch):
    """Returns a list that gets what each update learned from, and the errors it left."""
    learning, seen = algorithm.get_policy().driver.learning, []
    replay = type(learning).replay

    def noted(self, batch, size, follows):
        result = replay(self, batch, size, follows)
        seen.append((batch, result["td_error"], len(follows)))
        return result

    monkeypatch.setattr(type(learning), "replay", noted)
    return seen


@pytest.mark.parametrize(
    ("config", "env"), [(DQNConfig, saved_counting), (SACConfig, aiming), (TD3Config, aiming)]
)
def test_after_each_update_its_errors_are_the_priorities(config, env, monkeypatch):
    algorithm = tiny(env, config, training_intensity=1.0, train_batch_size=4, n_step=2).build()
    seen = watched(algorithm, monkeypatch)
    masses = np.ones(64)
    greatest = 1.0
    for updates_due in (2, 3, 3):  # the last rows of running episodes wait at first
        first = algorithm.replay_buffer.num_added
        algorithm.train()
        added = algorithm.replay_buffer.num_added
        masses[first:added] = greatest**0.6
        for batch, errors, updates in seen:
            assert (updates, batch.count, errors.shape) == (1, 4, (4,))
            chosen = batch["batch_indexes"]
            filled = masses[:added]
            np.testing.assert_allclose(
                batch["weights"], (filled.min() / masses[chosen]) ** 0.4, rtol=1e-5
            )
            for place, error in zip(chosen, errors, strict=True):
                masses[place] = (abs(np.float64(error)) + 1e-6) ** 0.6
            greatest = max(greatest, float(np.abs(np.float64(errors)).max() + 1e-6))
        assert len(seen) == updates_due
        seen.clear()
    result = algorithm.replay_buffer.get_state()["buffers"]["default_policy"]["priorities"]
    np.testing.assert_allclose(result["masses"], masses[:added], rtol=1e-12)
    assert result["greatest"] == pytest.approx(greatest, rel=1e-12)
    assert algorithm.get_policy().program.functions.traces["learn_once"] == 1


def test_the_weights_of_drawn_rows_weigh_the_update():
    policy = tiny().build().get_policy()
    buffer = PrioritizedReplayBuffer(8, seed=0, alpha=1.0, beta=1.0)
    batch = policy.postprocess_trajectory(_transitions())
    buffer.add(
        SampleBatch({name: batch[name] for name in policy.driver.learning.select_columns(batch)})
    )
    buffer.update_priorities(np.arange(8), np.arange(1.0, 9.0))
    drawn = buffer.sample(4)
    before = policy.get_weights()
    gradients = policy.compute_gradients(drawn)[0]
    ones = SampleBatch({**drawn, "weights": np.ones(4, np.float32)})
    single = [
        policy.compute_gradients(SampleBatch({k: v[i : i + 1] for k, v in ones.items()}))[0]
        for i in range(4)
    ]
    for k, gradient in enumerate(gradients):  # clipped gradients are not of one direction
        expected = sum(w * each[k] for w, each in zip(drawn["weights"], single, strict=True)) / 4
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5)
    assert (before.keys()) == policy.get_weights().keys()


def _transitions():
    env, rng = CountingEnv(), np.random.default_rng(0)
    shape = env.observation_space.shape
    return SampleBatch(
        obs=rng.normal(size=(8, *shape)).astype(np.float32),
        new_obs=rng.normal(size=(8, *shape)).astype(np.float32),
        actions=rng.integers(2, size=8),
        rewards=rng.normal(size=8).astype(np.float32),
        terminateds=np.zeros(8, bool),
        truncateds=np.zeros(8, bool),
    )


def test_the_type_chooses_the_buffer_by_rllibs_names():
    name = "MultiAgentPrioritizedReplayBuffer"
    kinds = (name, f"ray.rllib.utils.replay_buffers.{name}", MultiAgentPrioritizedReplayBuffer)
    for kind in kinds:
        config = tiny(replay_buffer_config={"type": kind, "prioritized_replay_alpha": 0.5})
        changed = {"type": name, "prioritized_replay_alpha": 0.5}
        assert config.replay_buffer_config == {**DQNConfig().replay_buffer_config, **changed}
    config.training(
        replay_buffer_config={
            "type": "MultiAgentPrioritizedReplayBuffer",
            "capacity": 9,
            "prioritized_replay_alpha": 0.3,
            "prioritized_replay_beta": 0.7,
            "prioritized_replay_eps": 0.01,
        }
    )
    buffer = config.build().replay_buffer
    assert isinstance(buffer, MultiAgentPrioritizedReplayBuffer)
    buffer.add(rows(0, 1))
    own = buffer.buffers["default_policy"]
    assert (own.capacity, own.eps) == (9, 0.01)
    assert (own._priorities.alpha, own._priorities.beta) == (0.3, 0.7)
    config.training(replay_buffer_config={"type": "MultiAgentReplayBuffer"})
    assert config.replay_buffer_config == {"type": "MultiAgentReplayBuffer"}
    assert type(config.build().replay_buffer) is MultiAgentReplayBuffer


@pytest.mark.parametrize(("config", "env"), [(DQNConfig, two_arms), (SACConfig, aiming)])
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(config, env, tmp_path):
    def made():
        return tiny(env, config, store_buffer_in_checkpoints=True, training_intensity=0.5, n_step=2)

    algorithm = made().build()
    for _ in range(3):
        algorithm.train()
    algorithm.save(tmp_path)
    restored = made().build()
    restored.restore(tmp_path)
    stored = algorithm.replay_buffer.get_state()["buffers"]["default_policy"]["priorities"]
    again = restored.replay_buffer.get_state()["buffers"]["default_policy"]["priorities"]
    np.testing.assert_array_equal(stored["masses"], again["masses"])
    for each in (algorithm, restored):  # environments begin anew after a restore
        each.replay_buffer.buffers["default_policy"].sample(3)
    for _ in range(3):
        for pid, buffer in algorithm.replay_buffer.buffers.items():
            twin = restored.replay_buffer.buffers[pid]
            batches = [each.sample(8) for each in (buffer, twin)]
            for name in batches[0]:
                np.testing.assert_array_equal(batches[0][name], batches[1][name])
            results = [
                each.get_policy().driver.learning.replay(batch, None, np.ones(1, bool))["td_error"]
                for each, batch in zip((algorithm, restored), batches, strict=True)
            ]
            np.testing.assert_array_equal(*results)
            for each, errors in zip((buffer, twin), results, strict=True):
                each.update_priorities(batches[0]["batch_indexes"], errors)


def test_one_seed_repeats_a_prioritised_run_bit_for_bit():
    one, other = (tiny(two_arms, n_step=2).build() for _ in range(2))
    for _ in range(4):
        a, b = (each.train()["info"]["learner"] for each in (one, other))
        assert a["default_policy"]["learner_stats"] == b["default_policy"]["learner_stats"]


def test_without_errors_or_indexes_the_way_out_is_named():
    class Hand(Policy):
        answer = {}

        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})

        def learn_on_batch(self, samples):
            return self.answer

    def changed(batch, workers, config):
        for each in batch.policy_batches.values():
            del each["batch_indexes"]
        return batch

    def trained(**more):
        config = tiny(**more).multi_agent(policies={"default_policy": PolicySpec(Hand)})
        config.build().train()

    with pytest.raises(UsageError, match="'td_error'"):
        trained()
    Hand.answer = {"learner_stats": {"td_error": np.array([1.0, np.nan, 2.0, 3.0])}}
    trained()
    Hand.answer = {"td_error": np.ones(3)}
    with pytest.raises(UsageError, match=r"\[B\]"):
        trained()
    Hand.answer = {"td_error": np.ones(4)}
    with pytest.raises(UsageError, match="'batch_indexes'"):
        trained(before_learn_on_batch=changed)


class Watching(DefaultCallbacks):
    sizes = []

    def on_learn_on_batch(self, *, policy, train_batch, result, **kwargs):
        self.sizes.append(train_batch.count)


class Moving(DQNTF2Policy):
    """Moves its target by a method of its own."""

    moved = 0

    def update_target(self, tau=None):
        type(self).moved += 1
        super().update_target(tau)


def masses_of(config):
    algorithm = config.build()
    for _ in range(2):
        algorithm.train()
    states = algorithm.replay_buffer.get_state()["buffers"]
    algorithm.stop()
    return {pid: state["priorities"]["masses"] for pid, state in states.items()}


def test_all_ways_to_learn_leave_the_same_priorities():
    def made(**framework):
        config = tiny(training_intensity=1.0, target_network_update_freq=4, lr=0.1)
        return config.framework(**framework)

    expected = masses_of(made())["default_policy"]
    assert len({*expected.tolist()}) > 5
    moving = made().multi_agent(policies={"default_policy": PolicySpec(Moving)})
    others = [
        made(framework="tf"),
        made(jit_compile=True),
        made().callbacks(Watching),
        moving,
    ]
    for config in others:
        np.testing.assert_allclose(masses_of(config)["default_policy"], expected, rtol=1e-3)
    assert {*Watching.sizes} == {4}
    assert Moving.moved == 6


def test_two_policies_learn_each_by_priorities_of_its_own():
    config = tiny(MultiAgentCartPole)
    ids = ["a", "b"]
    config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
    config.multi_agent(policies=set(ids), policy_mapping_fn=lambda agent, *_, **__: ids[agent % 2])
    masses = masses_of(config)
    assert set(masses) == {"a", "b"}
    for own in masses.values():
        assert (own != 1).any()
    assert masses["a"].tolist()[:12] != masses["b"].tolist()[:12]


def test_rows_that_a_function_changed_keep_their_places():
    def halved(batch, workers, config):
        for each in batch.policy_batches.values():
            assert {"weights", "batch_indexes"} <= set(each)
            each["rewards"] = each["rewards"] / 2
        return batch

    plain, changed = (masses_of(tiny(before_learn_on_batch=f)) for f in (None, halved))
    plain, changed = plain["default_policy"], changed["default_policy"]
    assert plain.shape == changed.shape == (24,)
    assert (plain != changed).any()


def test_the_first_update_is_compiled_when_it_is_warmed_up():
    algorithm = tiny().build()
    algorithm.warm_up()
    traces = dict(algorithm.get_policy().program.functions.traces)
    before = algorithm.get_policy().get_weights()
    algorithm.train()
    assert dict(algorithm.get_policy().program.functions.traces) == traces
    after = algorithm.get_policy().get_weights()
    assert any((before[key] != after[key]).any() for key in before)
