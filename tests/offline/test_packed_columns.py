"""Packed columns: what they hold, and what is refused without being executed."""

import base64
import os
import pickle

import numpy as np
import pytest

from tfpolicies.errors import BatchError
from tfpolicies.offline.packed_columns import is_packed_column, pack_column, unpack_column

lz4_frame = pytest.importorskip("lz4.frame")
pytestmark = pytest.mark.core


class Executed:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def pack(content):
    """Returns any bytes as a packed column."""
    return base64.b64encode(lz4_frame.compress(content)).decode()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int64", "float16", "float32", ">f8"])
def test_arrays_of_every_protocol_and_dtype_are_equal(protocol, dtype):
    expected = np.arange(12).reshape(3, 4).astype(dtype)
    for array in (
        expected,
        np.asfortranarray(expected),
        expected[:, :0],
        expected[0, :1].reshape(()),
    ):
        result = unpack_column(pack(pickle.dumps(array, protocol)))
        assert result.dtype == expected.dtype
        assert result.shape == np.shape(array)
        np.testing.assert_array_equal(result, array)


def test_nested_arrays_keep_their_structure():
    column = {"a": np.arange(3), "b": (np.ones(3), {"c": np.zeros(3)})}
    result = unpack_column(pack_column(column))
    assert is_packed_column(pack_column(column))
    assert {*result} == {"a", "b"}
    assert result["b"][1]["c"].tolist() == [0, 0, 0]


def test_nothing_that_a_pickle_names_is_executed(tmp_path):
    canary = tmp_path / "canary"
    for value in (Executed(canary), [Executed(canary)], {"x": np.array([Executed(canary)])}):
        for protocol in range(6):
            with pytest.raises(BatchError):
                unpack_column(pack(pickle.dumps(value, protocol)))
    assert not canary.exists()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("text", "'str' instead of an array"),
        (None, "'NoneType' instead of an array"),
        (np.array(["text"]), "dtype 'U4'"),
        (np.array([None]), "dtype 'O8'"),
        (np.zeros(2, "c8"), "dtype 'c8'"),
        (np.zeros(2, "M8[s]"), "dtype 'M8'"),
    ],
)
def test_anything_but_arrays_of_numbers_is_refused_by_name(value, problem):
    with pytest.raises(BatchError, match="nothing in it was executed") as caught:
        unpack_column(pack(pickle.dumps(value)))
    assert problem in str(caught.value)


def test_damaged_texts_are_refused():
    packed = pack_column(np.arange(1000))
    for text in (packed[:-9], packed[:40], "BCJNG", "BCJNG" + "A" * 40, "BCJNG\0", packed + "é"):
        with pytest.raises(BatchError):
            unpack_column(text)


def test_a_text_that_unpacks_to_very_many_bytes_is_refused(monkeypatch):
    monkeypatch.setattr("tfpolicies.offline.packed_columns.MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(BatchError, match="it has more than 1048576 bytes when unpacked"):
        unpack_column(pack_column(np.zeros(1 << 18)))
