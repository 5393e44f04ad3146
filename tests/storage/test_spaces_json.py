"""Gymnasium spaces through JSON."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from tfpolicies.errors import CheckpointError, UnsupportedSpaceError
from tfpolicies.storage.spaces_json import decode_space, encode_space

ENVS = [gymnasium.make(name) for name in ("CartPole-v1", "Pendulum-v1", "Acrobot-v1")]


def through_json(space):
    return decode_space(json.loads(json.dumps(encode_space(space), allow_nan=False)))


@st.composite
def boxes(draw):
    dtype = np.dtype(draw(st.sampled_from(["f2", "f4", "f8", "u1", "i1", "i4", "i8"])))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    low = rng.integers(0, 20, shape).astype(dtype)
    high = low + rng.integers(0, 20, shape).astype(dtype)
    if dtype.kind == "f" and shape:
        low[rng.random(shape) < 0.3] = -np.inf
        high[rng.random(shape) < 0.3] = np.inf
    return spaces.Box(low, high, shape, dtype.type)


LEAVES = st.one_of(
    boxes(),
    st.builds(
        lambda n, start: spaces.Discrete(n, start=start),
        st.integers(1, 9),
        st.integers().map(lambda i: i % 1000 - 500),
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(spaces.MultiDiscrete),
    st.integers(1, 5).map(spaces.MultiBinary),
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(spaces.MultiBinary),
    st.builds(
        lambda n, chars: spaces.Text(n, min_length=0, charset=chars),
        st.integers(1, 5),
        st.text("abcé🙂", min_size=1),
    ),
)
SPACES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3).map(spaces.Dict),
        inner.map(spaces.Sequence),
        st.lists(inner, min_size=1, max_size=2).map(spaces.OneOf),
    ),
    max_leaves=6,
)


@given(SPACES)
@settings(max_examples=150)
def test_nested_spaces_come_back_equal_and_sample_alike(space):
    back = through_json(space)
    assert back == space
    assert type(back) is type(space)
    assert encode_space(back) == encode_space(space)


@given(boxes())
@settings(max_examples=80)
def test_the_bounds_of_a_box_are_exact_not_merely_close(box):
    back = through_json(box)
    for name in ("low", "high", "bounded_below", "bounded_above"):
        assert getattr(back, name).tobytes() == getattr(box, name).tobytes()
        assert getattr(back, name).dtype == getattr(box, name).dtype
    back.seed(1)
    box.seed(1)
    np.testing.assert_array_equal(back.sample(), box.sample())


def test_uniform_bounds_are_one_number_and_others_a_list():
    image = encode_space(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    assert (image["low"], image["high"]) == (0, 255)
    mixed = encode_space(spaces.Box(np.array([0.0, -0.0], np.float32), np.float32(1), (2,)))
    assert [str(x) for x in mixed["low"]] == ["0.0", "-0.0"]
    assert mixed["high"] == 1.0


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (3,)),
        spaces.Box(np.array([-np.inf, 0.0]), np.array([1.0, np.inf]), dtype=np.float64),
        spaces.Box(0, 1, (), bool),
        spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max - 1, (2,), np.int64),
        spaces.Box(-np.inf, 5, (2,), np.int32),
        spaces.Box(np.array([-np.inf, 3.0]), np.array([4.0, np.inf]), dtype=np.int16),
        spaces.Box(-np.inf, np.inf, (2,), np.int64),
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([[2, 3], [4, 5]], dtype=np.int8, start=[[0, 1], [2, 3]]),
        spaces.MultiBinary((2, 3)),
        spaces.Dict([("z", spaces.Discrete(2)), ("a", spaces.Discrete(3))]),
        spaces.Dict({1: spaces.Discrete(2), 0: spaces.Discrete(3)}),
        spaces.Dict(),
        spaces.Tuple([]),
        spaces.Sequence(spaces.Discrete(2), stack=True),
        spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
        spaces.Graph(spaces.Discrete(3), None),
        spaces.Text(3, charset=frozenset("cab")),
        *(space for env in ENVS for space in (env.observation_space, env.action_space)),
    ],
    ids=str,
)
def test_spaces_of_every_kind_come_back_exactly(space):
    back = through_json(space)
    assert back == space
    if isinstance(space, spaces.Dict):
        assert list(back.spaces) == list(space.spaces)
    if isinstance(space, spaces.Box):
        assert back.is_bounded("below") == space.is_bounded("below")
        np.testing.assert_array_equal(back.low, space.low)
        np.testing.assert_array_equal(back.high, space.high)
        np.testing.assert_array_equal(back.bounded_above, space.bounded_above)
    if isinstance(space, spaces.Text):
        assert back.character_list == space.character_list


def test_the_order_and_dtypes_that_newer_gymnasiums_take_survive():
    newer = hasattr(spaces.Dict(), "sort_keys")  # older ones have the defaults alone
    discrete = spaces.Discrete(2, dtype=np.uint8) if newer else spaces.Discrete(2)
    entries = {"b": discrete, "a": spaces.Discrete(3)}
    space = spaces.Dict(entries, sort_keys=False) if newer else spaces.Dict(entries)
    back = through_json(space)
    assert back == space
    assert list(back) == list(space)
    assert back["b"].dtype == discrete.dtype
    assert getattr(back, "sort_keys", None) is getattr(space, "sort_keys", None)


def test_a_space_that_gymnasium_does_not_have_is_named_in_the_error():
    class Simplex(spaces.Box):
        """Looks like a Box but is none."""

    with pytest.raises(UnsupportedSpaceError, match=r"Simplex.*Gymnasium's"):
        encode_space(spaces.Tuple([Simplex(0, 1)]))


def test_a_dict_space_with_other_keys_is_refused():
    with pytest.raises(UnsupportedSpaceError, match="strings or integers"):
        encode_space(spaces.Dict({(1, 2): spaces.Discrete(2)}))


@pytest.mark.parametrize(
    "record",
    [
        None,
        {},
        {"type": "Evil"},
        {"type": []},
        {"type": "Box"},
        {"type": "Box", "dtype": "float32", "shape": [2], "low": [0.0], "high": 1.0},
        {"type": "Box", "dtype": "float32", "shape": [2], "low": 2.0, "high": 1.0},
        {"type": "Box", "dtype": "object", "shape": [2], "low": 0, "high": 1},
        {"type": "Box", "dtype": "float64", "shape": [10**9, 10**9], "low": 0.0, "high": 1.0},
        {"type": "Discrete", "dtype": "int64", "n": 0, "start": 0},
        {"type": "Discrete", "dtype": "int64", "n": "3", "start": 0},
        {"type": "MultiBinary", "n": "3"},
        {"type": "Dict", "spaces": [["a"]], "sort_keys": True},
        {"type": "Tuple", "spaces": 3},
        {"type": "Text", "min_length": 2, "max_length": 1, "characters": "a"},
        {"type": "Sequence"},
    ],
    ids=str,
)
def test_malformed_records_raise_a_checkpoint_error(record):
    with pytest.raises(CheckpointError):
        decode_space(record)


def test_a_flat_space_keeps_the_one_it_was_made_of():
    flat = spaces.Box(-1.0, 1.0, (5,), np.float32)
    flat.original_space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1.0, 1.0, (3,)))
    again = through_json(spaces.Tuple([flat]))[0]
    assert again == flat
    assert again.original_space == flat.original_space
    assert not hasattr(through_json(spaces.Discrete(2)), "original_space")
