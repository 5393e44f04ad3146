"""Filters: statistics that are frozen while acting, and merged without counting twice."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from helpers.onnx_runtime import load_in_onnx_runtime
from tfpolicies.errors import ConfigError, ObservationError, WeightsError
from tfpolicies.models.mean_std_filters import (
    MeanStdFilter,
    RewardFilter,
    get_filtered_leaves,
    make_filter,
    normalize,
)
from tfpolicies.models.running_stat import RunningStat
from tfpolicies.models.spaces import batch_leaves, leaves

LINE = spaces.Box(-100.0, 100.0, (1,), np.float32)
PLANE = spaces.Box(-100.0, 100.0, (2,), np.float32)


def column(*values):
    return np.array(values, np.float32)[:, None]


def make_line(*values, flush=True):
    """Returns a filter of one number that has observed some values."""
    line = MeanStdFilter(LINE)
    line.observe([column(*values)])
    if flush:
        line.flush()
    return line


def normalize_all(line, *values):
    ((mean, scale),) = line.get_scalings()
    return normalize(tf.constant(column(*values)), mean, scale).numpy()[:, 0].tolist()


@pytest.mark.core
def test_mean_and_variance_of_hand_made_numbers():
    stat = RunningStat((2,))
    stat.push_batch([[1.0, 10.0]])
    assert (stat.count, stat.mean.tolist(), stat.std.tolist()) == (1, [1, 10], [0, 0])
    stat.push_batch(np.array([[2, 10], [6, 10]]))
    assert stat.count == 3
    assert stat.mean.tolist() == [3, 10]
    assert stat.m2.tolist() == [14, 0]
    assert stat.var.tolist() == [7, 0]
    assert stat.mean.dtype == stat.m2.dtype == np.float64


@given(st.integers(0, 2**31), st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_pushing_pieces_and_merging_agree_with_numpy(seed, sizes):
    pieces = [np.random.default_rng(seed + i).normal(3, 2, (n, 2, 3)) for i, n in enumerate(sizes)]
    everything = np.concatenate(pieces)
    pushed, merged = RunningStat((2, 3)), RunningStat((2, 3))
    for piece in pieces:
        pushed.push_batch(piece)
        other = RunningStat((2, 3))
        other.push_batch(piece)
        merged.merge(other)
    for stat in (pushed, merged):
        assert stat.count == len(everything)
        if len(everything) > 1:
            np.testing.assert_allclose(stat.mean, everything.mean(0), rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(stat.var, everything.var(0, ddof=1), rtol=1e-11)


@pytest.mark.core
def test_a_large_offset_costs_no_digits_of_the_spread():
    rng = np.random.default_rng(0)
    spread = rng.integers(-8, 9, (20_000, 1)) / 16  # exact beside 1e8
    stat = RunningStat((1,))
    for piece in np.split(spread + 1e8, 100):
        stat.push_batch(piece)
    np.testing.assert_allclose(stat.mean - 1e8, spread.mean(0), atol=1e-7)
    np.testing.assert_allclose(stat.var, spread.var(0, ddof=1), rtol=1e-9)


def test_a_batch_that_does_not_fit_changes_nothing():
    stat = RunningStat((2,))
    stat.push_batch([[1.0, 2.0]])
    for wrong in ([1.0, 2.0], [[1.0]], 3.0):
        with pytest.raises(ObservationError, match=r"shape \[B, 2\]"):
            stat.push_batch(wrong)
    for wrong in (np.nan, np.inf, 1e300):
        with pytest.raises(ObservationError, match="finite"):
            stat.push_batch([[0.0, wrong], [0.0, -wrong]])
    stat.push_batch(np.zeros((0, 2)))
    assert stat.count == 1
    assert stat.mean.tolist() == [1, 2]


@pytest.mark.core
def test_boxes_of_numbers_are_filtered_except_action_masks():
    space = spaces.Dict(
        image=spaces.Box(0, 255, (4, 4, 3), np.uint8),
        kind=spaces.Discrete(3),
        counts=spaces.Box(0, 9, (2,), np.int32),
        flags=spaces.MultiBinary(2),
        speed=spaces.Box(-1, 1, (), np.float64),
    )
    names = [leaf.name("obs") for leaf in leaves(space)]
    assert [names[i] for i in get_filtered_leaves(space)] == ["obs_counts", "obs_speed"]
    assert get_filtered_leaves(spaces.Discrete(3)) == ()
    mask = spaces.Box(0, 1, (2,), np.float32)
    masked = spaces.Dict(action_mask=mask, observations=LINE)
    assert get_filtered_leaves(masked) == (1,)
    assert get_filtered_leaves(spaces.Dict(action_mask=mask, other=LINE)) == (0, 1)


def test_filters_are_chosen_by_name():
    assert make_filter("NoFilter", LINE).get_scalings() == ()
    for name in ("MeanStdFilter", "ConcurrentMeanStdFilter"):
        assert make_filter(name, LINE).filtered == (0,)
    for name, words in (
        (lambda shape: None, "A callable is for the config of an algorithm or a worker"),
        ("MeanStdFiltr", "Did you mean 'MeanStdFilter'"),
        (None, "got None"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_filter(name, LINE)


@pytest.mark.core
@pytest.mark.parametrize(
    ("observed", "values", "expected"),
    [
        ([0, 1, 2, 3], [3, 1.5], [1.1619, 0]),
        ([], [5], [5]),  # fewer than two observations
        ([7], [5], [5]),
        ([-1, 1], [999, -999], [10, -10]),  # clipped
        ([0.1] * 7, [0.1], [0]),  # constant
    ],
)
def test_values_are_scaled_by_the_running_mean_and_the_unbiased_std(observed, values, expected):
    assert np.round(normalize_all(make_line(*observed), *values), 4).tolist() == expected


@pytest.mark.core
def test_the_numbers_of_acting_are_frozen_until_the_flush():
    line = make_line(0, 2)
    before = line.get_scalings()
    line.observe([column(100)])
    assert line.get_scalings() is before
    assert line.pending_count == 1
    line.flush()
    assert line.pending_count == 0
    assert line.get_scalings()[0].mean.tolist() == [34]
    assert before[0].mean.tolist() == [1]
    with pytest.raises(ValueError, match="read-only"):
        before[0].mean[0] = 9


def test_leaves_have_separate_statistics_and_a_bad_one_changes_none():
    space = spaces.Dict(a=spaces.Box(0, 9, (2,), np.int64), k=spaces.Discrete(2), z=LINE)
    nested = MeanStdFilter(space)
    obs = {"a": [[1, 5], [3, 5]], "k": [0, 1], "z": [[0.5], [1.5]]}
    nested.observe(batch_leaves(leaves(space), obs, "obs"))
    nested.flush()
    first, second = nested.get_scalings()
    assert first.mean.tolist() == [2, 5]
    assert second.mean.tolist() == [1]
    np.testing.assert_allclose(second.scale, [2**0.5], rtol=1e-6)
    assert {str(array.dtype) for pair in (first, second) for array in pair} == {"float32"}
    space = spaces.Dict(a=LINE, b=LINE)
    nested = MeanStdFilter(space)
    with pytest.raises(ObservationError, match=r"obs_b: .*finite"):
        nested.observe([column(1), column(np.nan)])
    with pytest.raises(ObservationError, match="one array per leaf"):
        nested.observe([column(1)])
    assert nested.pending_count == 0


@pytest.mark.core
def test_changes_of_another_filter_are_added_once():
    first, second = make_line(1, 2, 3, 4), make_line(5, 6, 7, 8, flush=False)
    first.apply_changes(second)
    (stat,) = first.statistics
    assert (stat.count, stat.mean.tolist()) == (8, [4.5])
    assert second.pending_count == 4
    for other in (MeanStdFilter(PLANE), RewardFilter()):
        for method in (first.apply_changes, first.sync):
            with pytest.raises(WeightsError, match="classes and shapes are equal"):
                method(other)


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 4))
def test_workers_and_their_center_agree_with_numpy_in_every_round(seed, workers, rounds):
    rng = np.random.default_rng(seed)
    center, everything = MeanStdFilter(PLANE), []
    filters = [center.snapshot() for _ in range(workers)]
    for _ in range(rounds):
        for worker in filters:
            rows = rng.normal(size=(rng.integers(0, 5), 2))
            worker.observe([rows])
            everything.append(rows)
        for change in [worker.snapshot(flush=True) for worker in filters]:
            center.apply_changes(change)
        late = rng.normal(size=(1, 2))  # observed between the collection and the return
        filters[0].observe([late])
        everything.append(late)
        for worker in filters:
            worker.sync(center)
    filters[0].flush()
    (stat,) = filters[0].statistics
    rows = np.concatenate(everything)
    assert stat.count == len(rows)
    np.testing.assert_allclose(stat.mean, rows.mean(0), atol=1e-12)
    np.testing.assert_allclose(stat.m2, ((rows - rows.mean(0)) ** 2).sum(0), atol=1e-10)


def test_a_snapshot_is_independent():
    worker = make_line(1, 3, flush=False)
    assert worker.snapshot(flush=True).pending_count == 2
    assert worker.pending_count == 0
    assert worker.get_scalings()[0].mean.tolist() == [2]  # also where no statistics come back
    assert worker.snapshot(flush=True).pending_count == 0
    line = make_line(0, 2)
    copy = line.snapshot()
    line.observe([column(5)])
    line.flush()
    assert copy.get_scalings()[0].mean.tolist() == [1]
    copy.observe([column(0)])
    assert line.pending_count == 0


def test_threads_may_observe_at_once():
    line = MeanStdFilter(LINE)

    def work(value):
        for _ in range(200):
            line.observe([column(value)])
            line.flush()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    (stat,) = line.statistics
    assert stat.count == 800
    np.testing.assert_allclose(stat.mean, [1.5], atol=1e-12)
    np.testing.assert_allclose(stat.m2, [1000], rtol=1e-12)


@pytest.mark.core
def test_a_state_restores_statistics_and_pending_elements():
    line = make_line(0, 2)
    line.observe([column(100)])
    state = line.get_state()
    assert state["pending/0/count"] == 1
    assert {str(array.dtype) for array in state.values()} == {"float64"}
    restored, unpickled = MeanStdFilter(LINE), pickle.loads(pickle.dumps(line))
    restored.set_state(state)
    for copy in (restored, unpickled):
        assert copy.pending_count == 1
        assert normalize_all(copy, 3) == normalize_all(line, 3)
        copy.flush()
        assert copy.get_scalings()[0].mean.tolist() == [34]


def test_a_state_that_does_not_fit_changes_nothing():
    line = make_line(0, 2)
    good = line.get_state()
    bad = [
        None,
        {},
        {**good, "frozen/0/mean": np.zeros(2)},
        {**good, "frozen/0/m2": np.array([np.nan])},
        {**good, "pending/0/m2": np.array([-1.0])},
        {**good, "pending/0/count": "many"},
    ]
    for state in bad:
        with pytest.raises(WeightsError, match="state of a filter"):
            line.set_state(state)
    assert line.get_scalings()[0].mean.tolist() == [1]


@pytest.mark.core
def test_rewards_are_scaled_with_their_sign_by_filters_that_have_states_and_merge():
    rewards = RewardFilter()
    rewards.observe(np.array([[-2.0, 0.0], [2.0, 0.0]]))
    assert rewards([4, -1]).tolist() == [4, -1]  # frozen
    rewards.flush()
    scale = (8 / 3) ** -0.5
    np.testing.assert_allclose(rewards([[4], [-1]]), [[4 * scale], [-scale]], rtol=1e-6)
    assert rewards([99])[0] == 10
    assert rewards([1]).dtype == np.float32
    rewards = RewardFilter()
    rewards.observe(np.full(50, 0.1))
    rewards.flush()
    np.testing.assert_array_equal(rewards([0.1]), np.float32([0.1]))  # they do not vary
    first, second = RewardFilter(), RewardFilter()
    first.observe([1, 2])
    first.flush()
    second.observe([5])
    with pytest.raises(ObservationError, match=r"rewards: .*finite"):
        second.observe([np.nan])
    first.apply_changes(second.snapshot(flush=True))
    restored = RewardFilter()
    restored.set_state(first.get_state())
    assert restored([3]) == first([3])
    assert restored.statistics[0].count == 3


@pytest.mark.core
def test_the_tensor_function_runs_in_onnx_runtime():
    function = tf.function(lambda x, mean, scale: (normalize(x, mean, scale),))
    shapes = {"x": [None, 2], "mean": [2], "scale": [2]}
    signature = [tf.TensorSpec(shape, tf.float32, name=name) for name, shape in shapes.items()]
    run = load_in_onnx_runtime(function, signature, ["normalised"])
    plane = MeanStdFilter(PLANE)
    plane.observe([np.random.default_rng(0).normal(5, 2, (50, 2))])
    plane.flush()
    ((mean, scale),) = plane.get_scalings()
    x = np.array([[5, 6], [99, -99], [4, 5]], np.float32)
    (result,) = run({"x": x, "mean": mean, "scale": scale})
    np.testing.assert_allclose(result, normalize(tf.constant(x), mean, scale), atol=1e-6)
