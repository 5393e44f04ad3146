"""One seed gives one sequence of actions, on every runtime and for every distribution."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import OBS, TWO, make, rows_of, varied
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
    "product": (spaces.Dict(a=spaces.Tuple([TWO, BOX]), b=spaces.MultiBinary(2)), None),
}
RUNTIMES = {
    "function": (PPOTF2Policy, "tf"),
    "session": (PPOTF1Policy, "tf"),
    "onnx": (PPOTF2Policy, "onnx"),
}


def act(policy, observations):
    """Returns the leaves of the actions for batches of observations, one after the other."""
    actions = [policy.compute_actions(obs).actions for obs in observations]
    return [np.concatenate(leaf) for leaf in zip(*map(tf.nest.flatten, actions), strict=True)]


TELLING = [DISTRIBUTIONS[name] for name in ("Categorical", "SquashedGaussian", "product")]


@pytest.mark.parametrize(
    ("actions", "custom"), telling(DISTRIBUTIONS.values(), *TELLING), ids=DISTRIBUTIONS
)
def test_one_seed_gives_one_sequence_of_10_000_actions_on_all_runtimes(actions, custom):
    rng = np.random.default_rng(0)
    sizes = [1, 4, 1, 7] * 10 + [100] * 100
    observations = [rng.uniform(-1, 1, (n, 3)).astype(np.float32) for n in sizes]
    model = {"fcnet_hiddens": [4], "custom_action_dist": custom}
    policies = {
        name: varied(make(cls, actions=actions, inference=inference, seed=11, model=model))
        for name, (cls, inference) in RUNTIMES.items()
    }
    expected = act(policies["function"], observations)
    for name in ("session", "onnx"):
        for leaf, reference in zip(act(policies[name], observations), expected, strict=True):
            assert leaf.dtype == reference.dtype
            if reference.dtype.kind == "f":
                np.testing.assert_allclose(leaf, reference, atol=1e-5, rtol=1e-5)
            else:
                np.testing.assert_array_equal(leaf, reference)
    assert policies["onnx"].program is policies["function"].program
    assert policies["session"].program is not policies["function"].program
    inferences = [policy.driver.acting.inference for policy in policies.values()]
    assert inferences == ["tf", "tf", "onnx"]


KINDS = pytest.mark.parametrize("kind", NOISE_KINDS.values(), ids=NOISE_KINDS)


def call_by_call(kind, rng, calls, size):
    parts = [np.empty((rows, size), np.float32) for rows in calls]
    for part in parts:
        kind.draw(rng, part)
        kind.transform(part)
    return parts


@KINDS
@pytest.mark.parametrize("size", [1, 3, 8])
def test_buffered_noise_is_that_of_call_by_call_to_the_bit(kind, size):
    one, other, calls = np.random.default_rng(7), np.random.default_rng(7), [5, 1, 8, 3]
    buffer = NoiseBuffer(kind, one, sum(calls), size)
    for rows, expected in zip(calls, call_by_call(kind, other, calls, size), strict=True):
        np.testing.assert_array_equal(buffer.take(rows), expected)
    assert one.bit_generator.state == other.bit_generator.state


@KINDS
@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_generator_is_rewound_to_where_the_calls_so_far_left_it(kind, count):
    one, other = np.random.default_rng(7), np.random.default_rng(7)
    buffer = NoiseBuffer(kind, one, 11, 3)
    for _ in range(count):
        buffer.take(2)
    buffer.rewind_generator()
    call_by_call(kind, other, [2] * count, 3)
    assert one.bit_generator.state == other.bit_generator.state


def test_a_noise_buffer_gives_nothing_where_a_call_needs_more_than_is_left():
    buffer = NoiseBuffer(NOISE_KINDS["normal"], np.random.default_rng(0), 5, 2)
    assert buffer.take(4).shape == (4, 2)
    assert buffer.take(2) is None
    assert buffer.take(1).shape == (1, 2)


def act_by_driver(policy, sizes):
    inputs = [rows_of(OBS, rows, seed=i) for i, rows in enumerate(sizes)]
    return [policy.driver.acting.act([obs])[1]["actions"].copy() for obs in inputs]


@pytest.fixture
def policies(request):
    return [make(**getattr(request, "param", {})) for _ in range(2)]


@pytest.mark.parametrize(
    "policies",
    [{"actions": space} for space in (spaces.Discrete(5), BOX, DISTRIBUTIONS["product"][0])],
    indirect=True,
)
def test_prefetched_noise_gives_the_actions_and_the_generator_of_acting_step_by_step(policies):
    one, other = policies
    observations = [np.zeros((n, 3), np.float32) for n in (4, 1, 4, 4)]
    with one.driver.acting.prefetch_noise(10):  # three rows fewer than are acted on
        actual = act(one, observations)
    for leaf, expected in zip(actual, act(other, observations), strict=True):
        np.testing.assert_array_equal(leaf, expected)
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
def test_readers_of_a_generator_never_see_prefetched_noise(read, policies):
    one, other = policies
    with one.driver.acting.prefetch_noise(20):
        act_by_driver(one, [4, 4])
        act_by_driver(other, [4, 4])
        assert read(one) == read(other)
        np.testing.assert_array_equal(act_by_driver(one, [4])[0], act_by_driver(other, [4])[0])
    assert read(one) == read(other)


def test_an_interruption_leaves_the_generator_where_the_steps_did(policies):
    one, other = policies
    with contextlib.suppress(KeyboardInterrupt), one.driver.acting.prefetch_noise(20):
        act_by_driver(one, [4, 4])
        raise KeyboardInterrupt
    act_by_driver(other, [4, 4])
    assert one.get_state()["rng"] == other.get_state()["rng"]


def test_a_call_among_many_policies_draws_where_the_steps_before_it_stopped(policies):
    one, other = policies
    numbers = np.empty((3, 2), np.float32), np.empty((3, 2), np.float32)
    with one.driver.acting.prefetch_noise(20):
        act_by_driver(one, [4])
        one.driver.acting.prepare_call(3, True, out=numbers[0])
    act_by_driver(other, [4])
    other.driver.acting.prepare_call(3, True, out=numbers[1])
    np.testing.assert_array_equal(*numbers)


def test_noise_of_a_policy_that_does_not_explore_is_not_drawn():
    policy = make(explore=False)
    before = policy.get_state()["rng"]
    with policy.driver.acting.prefetch_noise(20):
        act_by_driver(policy, [4, 4])
    assert policy.get_state()["rng"] == before
