"""One seed gives one sequence of actions, on every runtime and for every distribution."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from helpers.marks import telling
from tfpolicies import PPOTF1Policy, PPOTF2Policy
from tfpolicies.models.distributions.noise import NOISE_KINDS, NoiseBuffer

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
DISTRIBUTIONS = {
    "Categorical": (spaces.Discrete(5, start=3), None),
    "MultiCategorical": (spaces.MultiDiscrete([[2, 3], [4, 2]]), None),
    "MultiCategorical of a Box": (spaces.Box(-1, 2, (2,), np.int64), None),
    "Bernoulli": (spaces.MultiBinary(4), None),
    "DiagGaussian": (BOX, None),
    "SquashedGaussian": (BOX, "squashed_gaussian"),
    "Deterministic": (BOX, "deterministic"),
    "product": (
        spaces.Dict(a=spaces.Tuple([spaces.Discrete(3), BOX]), b=spaces.MultiBinary(2)),
        None,
    ),
}
RUNTIMES = {
    "function": (PPOTF2Policy, "tf"),
    "session": (PPOTF1Policy, "tf"),
    "onnx": (PPOTF2Policy, "onnx"),
}


def sequence(policy, observations):
    rng = np.random.default_rng(1)
    weights = policy.get_weights()
    policy.set_weights({key: w + 0.5 * rng.normal(size=w.shape) for key, w in weights.items()})
    actions = [policy.compute_actions(obs).actions for obs in observations]
    return [np.concatenate(leaf) for leaf in zip(*map(leaves_of, actions), strict=True)]


def leaves_of(actions):
    if isinstance(actions, dict):
        return [leaf for part in actions.values() for leaf in leaves_of(part)]
    if isinstance(actions, tuple):
        return [leaf for part in actions for leaf in leaves_of(part)]
    return [actions]


TELLING = [DISTRIBUTIONS[name] for name in ("Categorical", "SquashedGaussian", "product")]


@pytest.mark.parametrize(
    ("actions", "custom"), telling(DISTRIBUTIONS.values(), *TELLING), ids=DISTRIBUTIONS
)
def test_one_seed_gives_one_sequence_of_actions_on_all_runtimes(actions, custom):
    rng = np.random.default_rng(0)
    sizes = [1, 4, 1, 7] * 10
    observations = [rng.uniform(-1, 1, (n, 3)).astype(np.float32) for n in sizes]
    actual = {
        name: sequence(
            factories.make(
                cls,
                actions=actions,
                inference=inference,
                seed=11,
                model={"fcnet_hiddens": [4], "custom_action_dist": custom},
            ),
            observations,
        )
        for name, (cls, inference) in RUNTIMES.items()
    }
    for name in ("session", "onnx"):
        for ours, expected in zip(actual[name], actual["function"], strict=True):
            assert ours.dtype == expected.dtype
            if expected.dtype.kind == "f":
                np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=1e-5)
            else:
                np.testing.assert_array_equal(ours, expected)


KINDS = pytest.mark.parametrize("kind", NOISE_KINDS.values(), ids=NOISE_KINDS)


def call_by_call(kind, rng, calls, size):
    parts = [np.empty((rows, size), np.float32) for rows in calls]
    for part in parts:
        kind.draw(rng, part)
        kind.transform(part)
    return parts


@KINDS
@pytest.mark.parametrize("size", [1, 3, 8])
def test_noise_drawn_ahead_is_that_of_call_by_call_to_the_bit(kind, size):
    one, other, calls = np.random.default_rng(7), np.random.default_rng(7), [5, 1, 8, 3]
    ahead = NoiseBuffer(kind, one, sum(calls), size)
    for rows, expected in zip(calls, call_by_call(kind, other, calls, size), strict=True):
        np.testing.assert_array_equal(ahead.take(rows), expected)
    assert one.bit_generator.state == other.bit_generator.state


@KINDS
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_generator_that_settles_is_where_the_calls_so_far_left_it(kind, taken):
    one, other = np.random.default_rng(7), np.random.default_rng(7)
    ahead = NoiseBuffer(kind, one, 11, 3)
    for _ in range(taken):
        ahead.take(2)
    ahead.rewind_generator()
    call_by_call(kind, other, [2] * taken, 3)
    assert one.bit_generator.state == other.bit_generator.state


def test_noise_ahead_gives_nothing_where_a_call_needs_more_than_is_left():
    ahead = NoiseBuffer(NOISE_KINDS["normal"], np.random.default_rng(0), 5, 2)
    assert ahead.take(4).shape == (4, 2)
    assert ahead.take(2) is None
    assert ahead.take(1).shape == (1, 2)


def acted(policy, sizes):
    rng = np.random.default_rng(3)
    inputs = [rng.uniform(-1, 1, (rows, 3)).astype(np.float32) for rows in sizes]
    return [policy.driver.acting.act([obs])[1]["actions"].copy() for obs in inputs]


@pytest.mark.parametrize("actions", [spaces.Discrete(5), BOX, DISTRIBUTIONS["product"][0]])
def test_acting_ahead_gives_the_actions_and_the_generator_of_acting_step_by_step(actions):
    sizes = [4, 1, 4, 4]  # three more rows than are drawn ahead
    one, other = (factories.make(PPOTF2Policy, actions=actions) for _ in range(2))
    with one.driver.acting.prefetch_noise(10):
        actual = [one.compute_actions(np.zeros((n, 3), np.float32)).actions for n in sizes]
    expected = [other.compute_actions(np.zeros((n, 3), np.float32)).actions for n in sizes]
    for ours, theirs in zip(map(leaves_of, actual), map(leaves_of, expected), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    assert one.get_state()["rng"] == other.get_state()["rng"]


def read_while_changing(policy):
    with policy.driver.state.lock_for_change():
        return policy.driver.state.learning_rng.bit_generator.state


READS = {
    "its state": lambda policy: policy.get_state()["rng"],
    "a copy of its state": lambda policy: policy.driver.state.copy().rng.bit_generator.state,
    "its generator": lambda policy: policy.driver.generator.bit_generator.state,
    "learning": read_while_changing,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_who_reads_a_generator_never_sees_it_ahead(read):
    one, other = factories.make(PPOTF2Policy), factories.make(PPOTF2Policy)
    with one.driver.acting.prefetch_noise(20):
        acted(one, [4, 4])
        acted(other, [4, 4])
        assert read(one) == read(other)
        np.testing.assert_array_equal(acted(one, [4])[0], acted(other, [4])[0])
    assert read(one) == read(other)


def test_what_is_interrupted_leaves_the_generator_where_its_steps_did():
    one, other = factories.make(PPOTF2Policy), factories.make(PPOTF2Policy)

    def interrupted():
        with one.driver.acting.prefetch_noise(20):
            acted(one, [4, 4])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    acted(other, [4, 4])
    assert one.get_state()["rng"] == other.get_state()["rng"]


def test_a_call_among_many_policies_draws_where_the_steps_before_it_stopped():
    one, other = factories.make(PPOTF2Policy), factories.make(PPOTF2Policy)
    numbers = np.empty((3, 2), np.float32), np.empty((3, 2), np.float32)
    with one.driver.acting.prefetch_noise(20):
        acted(one, [4])
        one.driver.acting.prepare_call(3, True, out=numbers[0])
    acted(other, [4])
    other.driver.acting.prepare_call(3, True, out=numbers[1])
    np.testing.assert_array_equal(*numbers)


def test_noise_of_a_policy_that_does_not_explore_is_not_drawn():
    policy = factories.make(PPOTF2Policy, explore=False)
    before = policy.get_state()["rng"]
    with policy.driver.acting.prefetch_noise(20):
        acted(policy, [4, 4])
    assert policy.get_state()["rng"] == before
