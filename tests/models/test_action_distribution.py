"""Which distribution a space gets; nested spaces, masks, refusals, conversion to ONNX."""

import math

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tfpolicies.program.runtimes.onnx import convert

INTS = spaces.Box(np.array([-1, 5]), np.array([1, 6]), dtype=np.int32)
MIXED = spaces.Dict(
    arm=spaces.Box(-1, 1, (2,)),
    buttons=spaces.MultiBinary(2),
    walk=spaces.Tuple([spaces.Discrete(3), spaces.MultiDiscrete([2, 2])]),
)
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


@pytest.mark.core
def test_each_space_has_its_usual_distribution():
    for space, kind in [
        (spaces.Discrete(2), Categorical),
        (spaces.MultiDiscrete([2]), MultiCategorical),
        (INTS, MultiCategorical),
        (spaces.Box(0, 255, (2,), np.uint8), MultiCategorical),
        (spaces.MultiBinary(2), Bernoulli),
        (spaces.Box(-1, 1, (2, 2), np.float64), DiagGaussian),
    ]:
        assert ActionDistribution.for_space(space).leaf_classes == (kind,)
    assert ActionDistribution.for_space(MIXED).leaf_classes == (
        DiagGaussian,
        Bernoulli,
        Categorical,
        MultiCategorical,
    )


@pytest.mark.core
def test_another_kind_can_be_chosen_for_boxes_of_floats_only():
    class Wide(DiagGaussian):
        pass

    for custom, kind in [
        ("squashed_gaussian", SquashedGaussian),
        ("deterministic", Deterministic),
        ("diag_gaussian", DiagGaussian),
        (Wide, Wide),
    ]:
        kinds = ActionDistribution.for_space(MIXED, custom).leaf_classes
        assert kinds == (kind, Bernoulli, Categorical, MultiCategorical)


def test_a_distribution_that_nothing_takes_is_told_of_once(caplog):
    for _ in range(2):
        kinds = ActionDistribution.for_space(spaces.Discrete(7), "deterministic").leaf_classes
        assert kinds == (Categorical,)
    (record,) = caplog.records
    message = (
        "is not used: Deterministic is for Boxes of floats, and the action space Discrete(7) has"
    )
    assert message in record.getMessage()
    ActionDistribution.for_space(MIXED, "deterministic")
    assert len(caplog.records) == 1


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


def test_spaces_without_a_distribution_are_refused():
    for space in (spaces.Text(3), spaces.Sequence(spaces.Discrete(2))):
        with pytest.raises(UnsupportedSpaceError, match=r"gymnasium\.ActionWrapper"):
            ActionDistribution.for_space(space)
    with pytest.raises(UnsupportedSpaceError, match="'talk' cannot be used"):
        ActionDistribution.for_space(spaces.Dict(talk=spaces.Text(3)))
    with pytest.raises(UnsupportedSpaceError, match="there is no action"):
        ActionDistribution.for_space(spaces.Dict())


def test_a_box_of_too_many_integers_is_refused():
    assert ActionDistribution.for_space(spaces.Box(1, 100, (100,), np.int64)).num_inputs == 10_000
    with pytest.raises(UnsupportedSpaceError, match=r"10100 possible values.*at most 10000"):
        ActionDistribution.for_space(spaces.Box(0, 100, (100,), np.int64))
    everything = np.iinfo(np.int64)
    space = spaces.Box(everything.min, everything.max, (1,), np.int64)
    with pytest.raises(UnsupportedSpaceError, match=rf"'deep/0' has {2**64} possible values"):
        ActionDistribution.for_space(spaces.Dict(deep=spaces.Tuple([space])))
    assert ActionDistribution.for_space(spaces.MultiDiscrete([30_000])).num_inputs == 30_000


# -- nested spaces --------------------------------------------------------------------------------


@pytest.mark.core
def test_a_product_has_the_sums_of_its_leaves_in_their_order():
    dist_class = ActionDistribution.for_space(MIXED)
    assert [leaf.name("a") for leaf in dist_class.leaves] == [
        "a_arm",
        "a_buttons",
        "a_walk_0",
        "a_walk_1",
    ]
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
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(left, right)
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


def test_a_nest_of_one_leaf_is_still_a_nest():
    dist_class = ActionDistribution.for_space(spaces.Tuple([spaces.Dict(only=spaces.Discrete(2))]))
    ((action,),) = [list(part.values()) for part in dist_class(tf.zeros([2, 2])).sample(tf.eye(2))]
    assert action.numpy().tolist() == [0, 1]


def test_one_leaf_is_a_list_of_one_tensor():
    dist_class = ActionDistribution.for_space(spaces.Discrete(2))
    distribution = dist_class(tf.zeros([2, 2]))
    (action,) = distribution.sample_leaves(tf.eye(2))
    assert action.numpy().tolist() == [0, 1]
    np.testing.assert_allclose(distribution.logp_leaves([action]), [-math.log(2)] * 2, rtol=1e-6)


# -- masks ----------------------------------------------------------------------------------------

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


def test_a_space_of_floats_alone_has_nothing_to_mask():
    dist_class = ActionDistribution.for_space(spaces.Box(-1, 1, (2,)))
    inputs = tf.ones([3, 4])
    np.testing.assert_array_equal(dist_class.apply_mask(inputs, tf.zeros([3, 0])), inputs)
    assert dist_class(inputs).valid_mask().shape == (3, 0)


@pytest.mark.parametrize("width", [1, 3])
def test_a_mask_of_another_width_is_refused(width):
    with pytest.raises(SpaceError, match=rf"must be \[B, 4\].*got the shape \(2, {width}\)"):
        ActionDistribution.for_space(spaces.Discrete(4)).apply_mask(
            tf.zeros([2, 4]), tf.ones([2, width])
        )


def allow_one_action(dist_class):
    """Returns a mask that leaves one action in each cell, and no bit."""
    mask = []
    for kind, leaf in zip(dist_class.leaf_classes, dist_class.leaves, strict=True):
        if kind is Bernoulli:
            mask += [0] * math.prod(leaf.shape)
        elif kind is Categorical:
            mask += [0] * (int(leaf.space.n) - 1) + [1]
        elif kind is MultiCategorical:
            sizes = getattr(leaf.space, "nvec", None)
            sizes = leaf.space.high - leaf.space.low + 1 if sizes is None else sizes
            for size in sizes.reshape(-1):
                mask += [0] * (int(size) - 1) + [1]
    return np.array([mask])


def add_smallest_float(inputs, allowed, dist_class):
    """Masks as models do by themselves: log(0), clamped to the smallest float, is added."""
    return inputs + dist_class.apply_mask(tf.zeros_like(inputs), allowed)


def write_minus_infinity(inputs, allowed, dist_class):
    """Masks as models do that do not clamp log(0)."""
    masked = dist_class.apply_mask(tf.zeros_like(inputs), allowed)
    return tf.where(masked == MASKED_LOGIT, -np.inf, inputs)


def both(inputs, allowed, dist_class):
    return dist_class.apply_mask(add_smallest_float(inputs, allowed, dist_class), allowed)


def by_masked(inputs, allowed, dist_class):
    return dist_class.apply_mask(inputs, allowed)


@pytest.mark.parametrize("apply", [by_masked, add_smallest_float, both, write_minus_infinity])
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
    for what, values in results.items():
        assert np.isfinite(values.numpy()).all(), what
        assert np.isfinite(tape.gradient(values, raw).numpy()).all(), what
    assert_allowed(dist_class, actions, allowed)
    assert_allowed(dist_class, distribution.sample_leaves(tf.zeros_like(noise)), allowed)
    if dist_class.mask_size == dist_class.num_inputs:  # no Gaussians: one action, and certain
        np.testing.assert_allclose(results["logp"][0], 0.0, atol=1e-6)
        np.testing.assert_allclose(results["entropy"][0], 0.0, atol=1e-6)
        np.testing.assert_allclose(results["kl"][0], 0.0, atol=1e-6)


def assert_allowed(dist_class, actions, allowed):
    """Asserts that a mask of the chosen actions lies within the mask of the allowed ones."""
    column = 0
    for kind, leaf, action in zip(dist_class.leaf_classes, dist_class.leaves, actions, strict=True):
        flat = action.numpy().reshape(len(allowed), -1)
        if kind is Bernoulli:
            assert (flat <= allowed[:, column : column + flat.shape[1]]).all()
            column += flat.shape[1]
        elif kind in (Categorical, MultiCategorical):
            space = leaf.space
            if kind is Categorical:
                sizes = [int(space.n)]
            else:
                sizes = space.nvec if hasattr(space, "nvec") else space.high - space.low + 1
            for cell, size in enumerate(np.reshape(sizes, -1)):
                assert allowed[range(len(allowed)), column + flat[:, cell]].all()
                column += int(size)
    assert column == allowed.shape[1]


def test_other_masks_than_before_give_a_great_but_finite_divergence():
    """Also in sums over cells and rows, as a loss computes them."""
    space = spaces.MultiDiscrete([2] * 50)
    dist_class = ActionDistribution.for_space(space)
    inputs = tf.zeros([1000, 100])
    left = dist_class(dist_class.apply_mask(inputs, tf.constant([[1, 0] * 50])))
    right = dist_class(dist_class.apply_mask(inputs, tf.constant([[0, 1] * 50])))
    total = tf.reduce_sum(left.kl(right)).numpy()
    assert 1e6 < total < np.inf
    assert np.isfinite(tf.reduce_sum(right.logp(left.deterministic_sample())).numpy())


def test_a_row_in_which_everything_is_forbidden_is_uniform():
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


# -- ONNX -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_converts_to_onnx_and_agrees(name):
    dist_class = ActionDistribution.for_space(*KINDS[name])
    sizes = {
        "inputs": dist_class.num_inputs,
        "noise": dist_class.noise_size,
        "mask": dist_class.mask_size,
    }
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

    signature = [tf.TensorSpec([None, size], tf.float32, name=n) for n, size in sizes.items()]
    names = [f"action_{i}" for i in range(len(dist_class.leaves))] + ["logp", "sampled_logp"]
    names += ["entropy", "kl"] if statistics else []
    traced = tf.function(function, input_signature=signature, autograph=False)
    model = convert(traced, signature, [*names, "valid"])
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    for rows in (1, 5):
        rng = np.random.default_rng(rows)
        given = {
            "inputs": inputs_for(dist_class, rows),
            "noise": dist_class.draw_noise(rng, rows),
            "mask": np.maximum(
                allow_one_action(dist_class), rng.integers(0, 2, (rows, dist_class.mask_size))
            ).astype(np.float32),
        }
        expected = traced(*[tf.constant(x) for x in given.values()])
        taken = {node.name for node in session.get_inputs()}
        actual = session.run(None, {key: x for key, x in given.items() if key in taken})
        for what, left, right in zip([*names, "valid"], actual, expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5, err_msg=what)
            if what.startswith("action"):
                assert left.dtype == right.numpy().dtype
