"""Prioritised replay: the sum tree, draws and weights, and how algorithms learn by it."""

import numpy as np
import pytest

from helpers.continuous_actions import transitions
from helpers.factories import assert_equal
from helpers.off_policy import make_config, saved_counting, train
from helpers.replay import make_rows
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

PRIORITIZED = {"type": "MultiAgentPrioritizedReplayBuffer", "capacity": 64}


def make_prioritized(env=saved_counting, config_class=DQNConfig, **training):
    return make_config(env, config_class, **{"replay_buffer_config": PRIORITIZED, **training})


def get_masses(buffer):
    return buffer.get_state()["priorities"]["masses"].tolist()


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
def test_sums_stay_those_of_the_leaves_in_any_order_of_writes(capacity):
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
    fresh = SumTree(capacity)
    fresh.set(np.arange(capacity), leaves)
    for one, other in zip(levels(tree), levels(fresh), strict=True):
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
    buffer.add(make_rows(0, 20))
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
    buffer.add(make_rows(0, 4))
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
    buffer.add(make_rows(0, 2))
    buffer.update_priorities(np.array([0, 1]), np.array([1e-9, 1e9]))
    batch = buffer.sample(10_000)
    assert abs(batch["actions"].mean() - 0.5) < 4 * 0.5 / 100
    assert (batch["weights"] == 1).all()


def test_of_an_index_drawn_twice_the_last_error_counts():
    buffer = PrioritizedReplayBuffer(3, seed=0, alpha=1.0, eps=0.5)
    buffer.add(make_rows(0, 3))
    buffer.update_priorities(np.array([1, 0, 1, 2, 1]), np.array([100.0, -1.0, 7.0, 0.0, 2.0]))
    assert get_masses(buffer) == [1.5, 2.5, 0.5]


def test_new_rows_get_the_greatest_priority_so_far():
    buffer = PrioritizedReplayBuffer(4, seed=0, alpha=2.0, eps=0.0)
    buffer.add(make_rows(0, 3))
    assert get_masses(buffer) == [1.0, 1.0, 1.0]
    buffer.update_priorities(np.array([0, 1]), np.array([3.0, 0.5]))
    buffer.update_priorities(np.array([0]), np.array([2.0]))
    buffer.add(make_rows(3, 5))  # the second one over the first row
    assert get_masses(buffer) == [9.0, 0.25, 1.0, 9.0]
    buffer.add(make_rows(5, 15))
    assert get_masses(buffer) == [9.0] * 4
    assert set(buffer.sample(100)["actions"].tolist()) == {11, 12, 13, 14}


def test_weights_of_the_rows_themselves_are_factors():
    buffer = PrioritizedReplayBuffer(2, seed=0, alpha=1.0, beta=1.0, eps=0.0)
    buffer.add(make_rows(0, 2, weights=np.array([0.0, 0.5], np.float32)))
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
    buffer.add(make_rows(0, 3))
    with pytest.raises(UsageError, match=message):
        buffer.update_priorities(np.array(indexes), np.array(errors))
    assert get_masses(buffer) == [1.0, 1.0, 1.0]
    with pytest.raises(BatchError):
        buffer.add(SampleBatch(obs=np.zeros((1, 1), np.float32)))
    assert get_masses(buffer) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("settings", [{"alpha": -1}, {"beta": np.inf}, {"eps": "no"}])
def test_exponents_are_finite_numbers_from_0(settings):
    with pytest.raises(ConfigError, match=r"must be a finite number >= 0, but got"):
        PrioritizedReplayBuffer(5, **settings)
    with pytest.raises(ConfigError, match=f"`{next(iter(settings))}`"):
        MultiAgentPrioritizedReplayBuffer(5, **settings)


def test_a_restored_buffer_draws_the_same_to_the_bit():
    rng = np.random.default_rng(0)
    buffer, restored = (PrioritizedReplayBuffer(300, seed=s, eps=0.01) for s in (1, 2))
    for first in range(0, 400, 50):
        buffer.add(make_rows(first, first + 50))
        drawn = buffer.sample(64)["batch_indexes"]
        buffer.update_priorities(drawn, rng.normal(size=64))
    restored.add(make_rows(0, 7))
    restored.set_state(buffer.get_state())
    for _ in range(5):
        one, other = buffer.sample(64), restored.sample(64)
        assert_equal(dict(one), dict(other))
        errors = rng.normal(size=64)
        for each in (buffer, restored):
            each.update_priorities(one["batch_indexes"], errors)
            each.add(make_rows(0, 3))
    assert get_masses(buffer) == get_masses(restored)


def test_foreign_states_are_refused_and_change_nothing():
    buffer, uniform = PrioritizedReplayBuffer(5, seed=2), ReplayBuffer(5, seed=2)
    for each in (buffer, uniform):
        each.add(make_rows(0, 3))
    good = buffer.get_state()
    priorities = good["priorities"]
    bad = [
        uniform.get_state(),
        PrioritizedReplayBuffer(5, alpha=0.5).get_state() | {"num_added": 0, "columns": {}},
        {**good, "priorities": {**priorities, "masses": priorities["masses"][:2]}},
        {**good, "priorities": {**priorities, "masses": -priorities["masses"]}},
        {**good, "priorities": {**priorities, "greatest": np.nan}},
        {**good, "rng": {}},
    ]
    for state in bad:
        with pytest.raises(CheckpointError):
            buffer.set_state(state)
    assert get_masses(buffer) == [1.0, 1.0, 1.0]


def test_each_policy_has_its_own_priorities():
    buffer = MultiAgentPrioritizedReplayBuffer(4, seed=0, alpha=1.0, eps=0.0)
    buffer.add(MultiAgentBatch({"a": make_rows(0, 2), "b": make_rows(5, 7)}, env_steps=2))
    buffer.update_priorities({"a": (np.array([0]), np.array([3.0]))})
    masses = {policy_id: get_masses(part) for policy_id, part in buffer.buffers.items()}
    assert masses == {"a": [3.0, 1.0], "b": [1.0, 1.0]}
    with pytest.raises(UnknownPolicyError, match="'c'"):
        buffer.update_priorities({"c": (np.array([0]), np.array([3.0]))})


# -- algorithms -----------------------------------------------------------------------------------


def record_updates(algorithm, monkeypatch):
    """Returns a list that gets the batch of each update, its errors, and the number of updates."""
    learning, updates = algorithm.get_policy().driver.learning, []
    replay = type(learning).replay

    def record(self, batch, size, follows):
        result = replay(self, batch, size, follows)
        updates.append((batch, result["td_error"], len(follows)))
        return result

    monkeypatch.setattr(type(learning), "replay", record)
    return updates


@pytest.mark.parametrize(
    ("config", "env"),
    [(DQNConfig, saved_counting), (SACConfig, "Pendulum-v1"), (TD3Config, "Pendulum-v1")],
)
def test_after_each_update_its_errors_are_the_priorities(config, env, monkeypatch):
    algorithm = make_prioritized(env, config, training_intensity=1.0, n_step=2).build()
    recorded = record_updates(algorithm, monkeypatch)
    masses = np.ones(64)
    greatest = 1.0
    for updates_due in (2, 3, 3):  # the last rows of running episodes wait at first
        first = algorithm.replay_buffer.num_added
        algorithm.train()
        added = algorithm.replay_buffer.num_added
        masses[first:added] = greatest**0.6
        for batch, errors, updates in recorded:
            assert (updates, batch.count, errors.shape) == (1, 4, (4,))
            chosen = batch["batch_indexes"]
            filled = masses[:added]
            np.testing.assert_allclose(
                batch["weights"], (filled.min() / masses[chosen]) ** 0.4, rtol=1e-5
            )
            for place, error in zip(chosen, errors, strict=True):
                masses[place] = (abs(np.float64(error)) + 1e-6) ** 0.6
            greatest = max(greatest, float(np.abs(np.float64(errors)).max() + 1e-6))
        assert len(recorded) == updates_due
        recorded.clear()
    result = algorithm.replay_buffer.get_state()["buffers"]["default_policy"]["priorities"]
    np.testing.assert_allclose(result["masses"], masses[:added], rtol=1e-12)
    assert result["greatest"] == pytest.approx(greatest, rel=1e-12)
    assert algorithm.get_policy().program.functions.traces["learn_once"] == 1


def test_the_weights_of_drawn_rows_weigh_the_update():
    policy = make_prioritized().build().get_policy()
    buffer = PrioritizedReplayBuffer(8, seed=0, alpha=1.0, beta=1.0)
    buffer.add(transitions(policy, 8))
    buffer.update_priorities(np.arange(8), np.arange(1.0, 9.0))
    drawn = buffer.sample(4)
    gradients = policy.compute_gradients(drawn)[0]
    ones = SampleBatch({**drawn, "weights": np.ones(4, np.float32)})
    single = [policy.compute_gradients(ones[i : i + 1])[0] for i in range(4)]
    for k, gradient in enumerate(gradients):  # clipped gradients are not of one direction
        expected = sum(w * each[k] for w, each in zip(drawn["weights"], single, strict=True)) / 4
        np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5)


def test_the_type_chooses_the_buffer_by_rllibs_names():
    name = "MultiAgentPrioritizedReplayBuffer"
    kinds = (name, f"ray.rllib.utils.replay_buffers.{name}", MultiAgentPrioritizedReplayBuffer)
    for kind in kinds:
        config = make_prioritized(
            replay_buffer_config={"type": kind, "prioritized_replay_alpha": 0.5}
        )
        changed = {"type": name, "prioritized_replay_alpha": 0.5}
        assert config.replay_buffer_config == {**DQNConfig().replay_buffer_config, **changed}
    exponents = {"alpha": 0.3, "beta": 0.7, "eps": 0.01}
    numbers = {f"prioritized_replay_{key}": value for key, value in exponents.items()}
    config.training(replay_buffer_config={"type": name, "capacity": 9, **numbers})
    buffer = config.build().replay_buffer
    assert isinstance(buffer, MultiAgentPrioritizedReplayBuffer)
    buffer.add(make_rows(0, 1))
    ring = buffer.buffers["default_policy"]
    assert (ring.capacity, ring.eps) == (9, 0.01)
    assert (ring._priorities.alpha, ring._priorities.beta) == (0.3, 0.7)
    config.training(replay_buffer_config={"type": "MultiAgentReplayBuffer"})
    assert config.replay_buffer_config == {"type": "MultiAgentReplayBuffer"}
    assert type(config.build().replay_buffer) is MultiAgentReplayBuffer


def test_without_errors_or_indexes_the_way_out_is_named():
    class Custom(Policy):
        answer = {}

        def compute_actions(self, obs_batch, state_batches=None, **kwargs):
            return ActionBatch(np.zeros(len(obs_batch), np.int64), [], {})

        def learn_on_batch(self, samples):
            return self.answer

    def drop_indexes(batch, workers, config):
        for each in batch.policy_batches.values():
            del each["batch_indexes"]
        return batch

    def run(**settings):
        config = make_prioritized(**settings).multi_agent(
            policies={"default_policy": PolicySpec(Custom)}
        )
        config.build().train()

    with pytest.raises(UsageError, match="'td_error'"):
        run()
    Custom.answer = {"learner_stats": {"td_error": np.array([1.0, np.nan, 2.0, 3.0])}}
    run()
    Custom.answer = {"td_error": np.ones(3)}
    with pytest.raises(UsageError, match=r"\[B\]"):
        run()
    Custom.answer = {"td_error": np.ones(4)}
    with pytest.raises(UsageError, match="'batch_indexes'"):
        run(before_learn_on_batch=drop_indexes)


class Watching(DefaultCallbacks):
    sizes = []

    def on_learn_on_batch(self, *, policy, train_batch, result, **kwargs):
        self.sizes.append(train_batch.count)


class Moving(DQNTF2Policy):
    """Counts the calls of `update_target`, which it overrides."""

    moved = 0

    def update_target(self, tau=None):
        type(self).moved += 1
        super().update_target(tau)


def train_masses(config):
    algorithm = config.build()
    train(algorithm, 2)
    states = algorithm.replay_buffer.get_state()["buffers"]
    return {pid: state["priorities"]["masses"] for pid, state in states.items()}


def test_all_ways_to_learn_leave_the_same_priorities():
    def make(**framework):
        config = make_prioritized(training_intensity=1.0, target_network_update_freq=4, lr=0.1)
        return config.framework(**framework)

    expected = train_masses(make())["default_policy"]
    assert len({*expected.tolist()}) > 5
    moving = make().multi_agent(policies={"default_policy": PolicySpec(Moving)})
    watching = make().callbacks(Watching)
    for config in (make(framework="tf"), make(jit_compile=True), watching, moving):
        np.testing.assert_allclose(train_masses(config)["default_policy"], expected, rtol=1e-3)
    assert {*Watching.sizes} == {4}
    assert Moving.moved == 6


def test_each_policy_learns_by_its_own_priorities():
    config = make_prioritized(MultiAgentCartPole)
    ids = ["a", "b"]
    config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
    config.multi_agent(policies=set(ids), policy_mapping_fn=lambda agent, *_, **__: ids[agent % 2])
    masses = train_masses(config)
    assert set(masses) == {"a", "b"}
    assert all((x != 1).any() for x in masses.values())
    assert masses["a"].tolist()[:12] != masses["b"].tolist()[:12]


def test_rows_that_a_function_changed_keep_their_places():
    def halve_rewards(batch, workers, config):
        for each in batch.policy_batches.values():
            assert {"weights", "batch_indexes"} <= set(each)
            each["rewards"] = each["rewards"] / 2
        return batch

    plain, changed = (
        train_masses(make_prioritized(before_learn_on_batch=f)) for f in (None, halve_rewards)
    )
    plain, changed = plain["default_policy"], changed["default_policy"]
    assert plain.shape == changed.shape == (24,)
    assert (plain != changed).any()


def test_the_first_update_is_compiled_when_it_is_warmed_up():
    algorithm = make_prioritized().build()
    algorithm.warm_up()
    traces = dict(algorithm.get_policy().program.functions.traces)
    before = algorithm.get_policy().get_weights()
    algorithm.train()
    assert dict(algorithm.get_policy().program.functions.traces) == traces
    after = algorithm.get_policy().get_weights()
    assert any((before[key] != after[key]).any() for key in before)
