"""Distributions of spaces: nested ones, masks, refusals, conversion to ONNX."""

import math

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.arrays import assert_arrays_equal
from helpers.onnx_runtime import load_in_onnx_runtime
from tfpolicies.errors import ConfigError, SpaceError, UnsupportedSpaceError
from tfpolicies.models.distributions import (
    MASKED_LOGIT,
    ActionDistribution,
    Bernoulli,
    Categorical,
    Deterministic,
    DiagGaussian,
    MultiCategorical,
    SquashedGaussian,
)

INTS = spaces.Box(np.array([-1, 5]), np.array([1, 6]), dtype=np.int32)
MIXED = spaces.Dict(
    arm=spaces.Box(-1, 1, (2,)),
    buttons=spaces.MultiBinary(2),
    walk=spaces.Tuple([spaces.Discrete(3), spaces.MultiDiscrete([2, 2])]),
)
NOT_FLOATS = [Bernoulli, Categorical, MultiCategorical]  # of MIXED
KINDS = {
    "categorical": (spaces.Discrete(4, start=-1), None),
    "multi_discrete": (spaces.MultiDiscrete([3, 2, 3]), None),
    "multi_discrete_2d": (spaces.MultiDiscrete([[2, 2], [2, 2]]), None),
    "int_box": (INTS, None),
    "bernoulli": (spaces.MultiBinary((2, 2)), None),
    "diag_gaussian": (spaces.Box(-1, 1, (2, 2)), None),
    "diag_gaussian_0d": (spaces.Box(-1, 1, ()), None),
    "squashed_gaussian": (spaces.Box(-1, 1, (3,)), "squashed_gaussian"),
    "deterministic": (spaces.Box(-1, 1, (3,)), "deterministic"),
    "bounded_deterministic": (spaces.Box(-1, 2, (3,)), "bounded_deterministic"),
    "nested": (MIXED, None),
    "nested_squashed": (MIXED, "squashed_gaussian"),
    "nested_deterministic": (MIXED, "deterministic"),
}


def inputs_for(dist_class, rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, dist_class.num_inputs)).astype(np.float32)


class Wide(DiagGaussian):
    pass


@pytest.mark.core
@pytest.mark.parametrize(
    ("space", "custom", "expected"),
    [
        (spaces.Discrete(2), None, [Categorical]),
        (spaces.MultiDiscrete([2]), None, [MultiCategorical]),
        (INTS, None, [MultiCategorical]),
        (spaces.Box(0, 255, (2,), np.uint8), None, [MultiCategorical]),
        (spaces.MultiBinary(2), None, [Bernoulli]),
        (spaces.Box(-1, 1, (2, 2), np.float64), None, [DiagGaussian]),
        (MIXED, None, [DiagGaussian, *NOT_FLOATS]),
        (MIXED, "squashed_gaussian", [SquashedGaussian, *NOT_FLOATS]),
        (MIXED, "deterministic", [Deterministic, *NOT_FLOATS]),
        (MIXED, "diag_gaussian", [DiagGaussian, *NOT_FLOATS]),
        (MIXED, Wide, [Wide, *NOT_FLOATS]),
    ],
    ids=str,
)
def test_each_space_has_its_distribution_and_only_that_of_floats_can_be_chosen(
    space, custom, expected
):
    assert list(ActionDistribution.for_space(space, custom).leaf_classes) == expected


def test_a_distribution_that_is_not_used_is_reported_once(caplog):
    for _ in range(2):
        kinds = ActionDistribution.for_space(spaces.Discrete(7), "deterministic").leaf_classes
        assert kinds == (Categorical,)
    ActionDistribution.for_space(MIXED, "deterministic")
    (message,) = caplog.messages
    assert "is not used: Deterministic is for Boxes of floats" in message
    assert "and the action space Discrete(7) has" in message


def test_an_unknown_kind_is_refused_with_those_that_exist():
    box = spaces.Box(-1, 1)
    with pytest.raises(ConfigError, match=r"custom_action_dist.*Did you mean 'squashed_gaussian'"):
        ActionDistribution.for_space(box, "squashed_gausian")
    for custom in (3, int, box):
        with pytest.raises(ConfigError, match=r"subclass of .*Distribution; got"):
            ActionDistribution.for_space(box, custom)

    class Strange(DiagGaussian):
        noise_kind = "cauchy"

    with pytest.raises(ConfigError, match=r"Strange.noise_kind must be one of .*'cauchy'"):
        ActionDistribution.for_space(box, Strange)


def test_spaces_without_a_distribution_or_with_too_many_integers_are_refused():
    for space in (spaces.Text(3), spaces.Sequence(spaces.Discrete(2))):
        with pytest.raises(UnsupportedSpaceError, match=r"gymnasium\.ActionWrapper"):
            ActionDistribution.for_space(space)
    with pytest.raises(UnsupportedSpaceError, match="'talk' cannot be used"):
        ActionDistribution.for_space(spaces.Dict(talk=spaces.Text(3)))
    with pytest.raises(UnsupportedSpaceError, match="there is no action"):
        ActionDistribution.for_space(spaces.Dict())
    assert ActionDistribution.for_space(spaces.Box(1, 100, (100,), np.int64)).num_inputs == 10_000
    with pytest.raises(UnsupportedSpaceError, match=r"10100 possible values.*at most 10000"):
        ActionDistribution.for_space(spaces.Box(0, 100, (100,), np.int64))
    everything = np.iinfo(np.int64)
    space = spaces.Box(everything.min, everything.max, (1,), np.int64)
    with pytest.raises(UnsupportedSpaceError, match=rf"'deep/0' has {2**64} possible values"):
        ActionDistribution.for_space(spaces.Dict(deep=spaces.Tuple([space])))
    assert ActionDistribution.for_space(spaces.MultiDiscrete([30_000])).num_inputs == 30_000


@pytest.mark.core
def test_a_product_has_the_sums_of_its_leaves_in_their_order():
    dist_class = ActionDistribution.for_space(MIXED)
    names = [leaf.name("a") for leaf in dist_class.leaves]
    assert names == ["a_arm", "a_buttons", "a_walk_0", "a_walk_1"]
    assert [leaf.dtype.name for leaf in dist_class.leaves] == ["float32", "int8", "int64", "int64"]
    assert (dist_class.num_inputs, dist_class.mask_size) == (4 + 2 + 3 + 4, 2 + 3 + 4)
    assert dist_class.noise_blocks == (("normal", 2), ("logistic", 2), ("gumbel", 7))
    assert dist_class.noise_size == 11
    inputs, other = inputs_for(dist_class, 6), inputs_for(dist_class, 6, seed=1)
    noise = dist_class.draw_noise(np.random.default_rng(2), 6)
    together, another = dist_class(tf.constant(inputs)), dist_class(tf.constant(other))
    leaf_spaces = [leaf.space for leaf in dist_class.leaves]
    columns = np.cumsum([4, 2, 3])
    alone = [
        [
            ActionDistribution.for_space(space)(tf.constant(part))
            for space, part in zip(leaf_spaces, np.split(x, columns, axis=1), strict=True)
        ]
        for x in (inputs, other)
    ]
    noises = np.split(noise, np.cumsum([2, 2, 3]), axis=1)
    expected = [part.sample(tf.constant(n)) for part, n in zip(alone[0], noises, strict=True)]
    actual = together.sample_leaves(tf.constant(noise))
    assert_arrays_equal(actual, expected)
    logp = sum(part.logp(action) for part, action in zip(alone[0], expected, strict=True))
    np.testing.assert_allclose(together.logp_leaves(actual), logp, rtol=1e-6)
    np.testing.assert_allclose(together.sampled_logp(tf.constant(noise)), logp, rtol=1e-5)
    entropy = sum(part.entropy() for part in alone[0])
    np.testing.assert_allclose(together.entropy(), entropy, rtol=1e-6)
    kl = sum(left.kl(right) for left, right in zip(*alone, strict=True))
    np.testing.assert_allclose(together.kl(another), kl, rtol=1e-6)


@pytest.mark.core
def test_nested_actions_have_the_structure_of_the_space():
    dist_class = ActionDistribution.for_space(MIXED)
    distribution = dist_class(tf.constant(inputs_for(dist_class, 3)))
    noise = tf.zeros([3, dist_class.noise_size])
    actions = distribution.sample(noise)
    assert list(actions) == ["arm", "buttons", "walk"]
    assert isinstance(actions["walk"], tuple)
    assert actions["walk"][1].shape == (3, 2)
    leaves = distribution.sample_leaves(noise)
    np.testing.assert_array_equal(distribution.logp(actions), distribution.logp_leaves(leaves))
    mode = distribution.deterministic_sample()
    np.testing.assert_array_equal(mode["arm"], actions["arm"])
    np.testing.assert_array_equal(mode["walk"][0], actions["walk"][0])


def test_one_leaf_is_a_list_of_one_tensor_or_a_nest():
    nested = ActionDistribution.for_space(spaces.Tuple([spaces.Dict(only=spaces.Discrete(2))]))
    (part,) = nested(tf.zeros([2, 2])).sample(tf.eye(2))
    assert {key: action.numpy().tolist() for key, action in part.items()} == {"only": [0, 1]}
    distribution = ActionDistribution.for_space(spaces.Discrete(2))(tf.zeros([2, 2]))
    (action,) = distribution.sample_leaves(tf.eye(2))
    assert action.numpy().tolist() == [0, 1]
    np.testing.assert_allclose(distribution.logp_leaves([action]), [-math.log(2)] * 2, rtol=1e-6)


MASKABLE = {
    name: pair for name, pair in KINDS.items() if ActionDistribution.for_space(*pair).mask_size
}


@pytest.mark.core
def test_a_mask_replaces_the_logits_of_what_is_forbidden_and_nothing_else():
    dist_class = ActionDistribution.for_space(MIXED)
    inputs = tf.reshape(tf.range(13, dtype=tf.float32), [1, 13])
    mask = np.array([[1, 0, 1, 1, 0, 0, 1, 1, 0]])
    low = MASKED_LOGIT
    expected = [[0, 1, 2, 3, 4, low, 6, 7, low, low, 10, 11, low]]
    for dtype in (np.bool_, np.int8, np.int64, np.float32):
        masked = dist_class.apply_mask(inputs, tf.constant(mask.astype(dtype)))
        np.testing.assert_array_equal(masked, np.array(expected, np.float32))
    np.testing.assert_array_equal(dist_class(masked).valid_mask(), mask.astype(bool))
    scaled = dist_class.apply_mask(inputs, tf.constant(mask * 7))
    np.testing.assert_array_equal(scaled, masked)


def test_the_mask_of_floats_is_empty_and_a_mask_of_another_width_refused():
    dist_class = ActionDistribution.for_space(spaces.Box(-1, 1, (2,)))
    inputs = tf.ones([3, 4])
    np.testing.assert_array_equal(dist_class.apply_mask(inputs, tf.zeros([3, 0])), inputs)
    assert dist_class(inputs).valid_mask().shape == (3, 0)
    dist_class = ActionDistribution.for_space(spaces.Discrete(4))
    for width in (1, 3):
        with pytest.raises(SpaceError, match=rf"must be \[B, 4\].*the shape \(3, {width}\)"):
            dist_class.apply_mask(inputs, tf.ones([3, width]))


def get_cell_sizes(space):
    """Returns the number of choices in each cell of a space of whole numbers."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    sizes = space.nvec if hasattr(space, "nvec") else space.high - space.low + 1
    return sizes.reshape(-1).tolist()


def allow_one_action(dist_class):
    """Returns a mask that leaves one action in each cell, and no bit."""
    mask = []
    for kind, leaf in zip(dist_class.leaf_classes, dist_class.leaves, strict=True):
        if kind is Bernoulli:
            mask += [0] * math.prod(leaf.shape)
        elif kind in (Categorical, MultiCategorical):
            for size in get_cell_sizes(leaf.space):
                mask += [0] * (size - 1) + [1]
    return np.array([mask])


def add_smallest_float(inputs, allowed, dist_class):
    """Masks as models do by themselves: log(0), clamped to the smallest float, is added."""
    return inputs + dist_class.apply_mask(tf.zeros_like(inputs), allowed)


def write_minus_infinity(inputs, allowed, dist_class):
    """Masks as models do that do not clamp log(0)."""
    masked = dist_class.apply_mask(tf.zeros_like(inputs), allowed)
    return tf.where(masked == MASKED_LOGIT, -np.inf, inputs)


def mask_twice(inputs, allowed, dist_class):
    return dist_class.apply_mask(add_smallest_float(inputs, allowed, dist_class), allowed)


def mask(inputs, allowed, dist_class):
    return dist_class.apply_mask(inputs, allowed)


@pytest.mark.parametrize("apply", [mask, add_smallest_float, mask_twice, write_minus_infinity])
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("name", MASKABLE)
def test_masked_quantities_and_gradients_are_finite_and_forbidden_actions_never_drawn(
    name, scale, apply
):
    dist_class = ActionDistribution.for_space(*KINDS[name])
    rng = np.random.default_rng(0)
    one = allow_one_action(dist_class)
    allowed = np.concatenate([one, np.maximum(one, rng.integers(0, 2, (6, one.shape[1])))])
    nothing = dist_class.apply_mask(
        tf.zeros([1, dist_class.num_inputs]), tf.zeros([1, dist_class.mask_size])
    )
    scales = np.where(nothing.numpy() == MASKED_LOGIT, np.float32(scale), np.float32(1))
    raw = tf.constant(inputs_for(dist_class, 7) * scales)
    old = tf.constant(inputs_for(dist_class, 7, seed=1) * scales)
    noise = tf.constant(dist_class.draw_noise(rng, 7))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(raw)
        distribution = dist_class(apply(raw, tf.constant(allowed), dist_class))
        before = dist_class(apply(old, tf.constant(allowed), dist_class))
        actions = distribution.sample_leaves(noise)
        results = {"logp": distribution.logp_leaves(actions)}
        if SquashedGaussian not in dist_class.leaf_classes:
            results["entropy"] = distribution.entropy()
            results["kl"] = distribution.kl(before)
            results["kl to others"] = before.kl(distribution)
    for quantity, values in results.items():
        assert np.isfinite(values.numpy()).all(), quantity
        assert np.isfinite(tape.gradient(values, raw).numpy()).all(), quantity
    assert_allowed(dist_class, actions, allowed)
    assert_allowed(dist_class, distribution.sample_leaves(tf.zeros_like(noise)), allowed)
    if dist_class.mask_size == dist_class.num_inputs:  # no Gaussians: one action, and certain
        for quantity in ("logp", "entropy", "kl"):
            np.testing.assert_allclose(results[quantity][0], 0.0, atol=1e-6)


def assert_allowed(dist_class, actions, allowed):
    """Asserts that a mask of the chosen actions lies within the mask of the allowed ones."""
    column = 0
    for kind, leaf, action in zip(dist_class.leaf_classes, dist_class.leaves, actions, strict=True):
        flat = action.numpy().reshape(len(allowed), -1)
        if kind is Bernoulli:
            assert (flat <= allowed[:, column : column + flat.shape[1]]).all()
            column += flat.shape[1]
        elif kind in (Categorical, MultiCategorical):
            for cell, size in enumerate(get_cell_sizes(leaf.space)):
                assert allowed[range(len(allowed)), column + flat[:, cell]].all()
                column += size
    assert column == allowed.shape[1]


def test_divergence_between_masks_is_finite_and_a_row_without_allowed_actions_uniform():
    dist_class = ActionDistribution.for_space(spaces.MultiDiscrete([2] * 50))
    inputs = tf.zeros([1000, 100])
    left = dist_class(dist_class.apply_mask(inputs, tf.constant([[1, 0] * 50])))
    right = dist_class(dist_class.apply_mask(inputs, tf.constant([[0, 1] * 50])))
    total = tf.reduce_sum(left.kl(right)).numpy()
    assert 1e6 < total < np.inf
    assert np.isfinite(tf.reduce_sum(right.logp(left.deterministic_sample())).numpy())
    dist_class = ActionDistribution.for_space(spaces.Discrete(4))
    masked = dist_class.apply_mask(tf.constant([[1.0, 2.0, 3.0, 4.0]]), tf.zeros([1, 4]))
    np.testing.assert_allclose(dist_class(masked).entropy(), [math.log(4)], rtol=1e-6)


@settings(max_examples=50)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=5, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5).filter(any),
    st.integers(0, 2**32 - 1),
)
def test_no_noise_draws_a_forbidden_action(logits, allowed, seed):
    dist_class = ActionDistribution.for_space(spaces.Discrete(5))
    masked = dist_class.apply_mask(tf.constant([logits]), tf.constant([allowed]))
    noise = dist_class.draw_noise(np.random.default_rng(seed), 50)
    actions = dist_class(tf.repeat(masked, 50, axis=0)).sample(tf.constant(noise))
    assert np.array(allowed)[actions.numpy()].all()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_converts_to_onnx_and_agrees(name):
    dist_class = ActionDistribution.for_space(*KINDS[name])
    sizes = [dist_class.num_inputs, dist_class.noise_size, dist_class.mask_size]
    statistics = SquashedGaussian not in dist_class.leaf_classes

    def function(inputs, noise, mask):
        distribution = dist_class(dist_class.apply_mask(inputs, mask))
        actions = distribution.sample_leaves(noise)
        # Of a rounded tanh near 1 no density can be had to 1e-5: another action's is compared.
        inner = [0.5 * a if a.dtype == tf.float32 else a for a in actions]
        results = [distribution.logp_leaves(inner), distribution.sampled_logp(noise)]
        if statistics:
            results += [distribution.entropy(), distribution.kl(dist_class(inputs[::-1]))]
        return [*actions, *results, distribution.valid_mask()]

    signature = [
        tf.TensorSpec([None, size], tf.float32, name=name)
        for name, size in zip(("inputs", "noise", "mask"), sizes, strict=True)
    ]
    names = [f"action_{i}" for i in range(len(dist_class.leaves))] + ["logp", "sampled_logp"]
    names += ["entropy", "kl"] if statistics else []
    traced = tf.function(function, input_signature=signature, autograph=False)
    names.append("valid")
    run = load_in_onnx_runtime(traced, signature, names)
    for rows in (1, 5):
        rng = np.random.default_rng(rows)
        noise = dist_class.draw_noise(rng, rows)
        allowed = rng.integers(0, 2, (rows, dist_class.mask_size))
        allowed = np.maximum(allow_one_action(dist_class), allowed).astype(np.float32)
        inputs = {"inputs": inputs_for(dist_class, rows), "noise": noise, "mask": allowed}
        expected = traced(*[tf.constant(x) for x in inputs.values()])
        for name, left, right in zip(names, run(inputs), expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5, err_msg=name)
            if name.startswith("action"):
                assert left.dtype == right.numpy().dtype
