"""Compression of arrays to text: zlib, then base64, with a header for dtype and shape.

Text survives JSON and any transport. Nothing is pickled, so unpacking untrusted text runs no code.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from tfpolicies.errors import BatchError

_HEADER = "tfpolicies-zlib"
_LEVEL = 1  # observations are repetitive: the fastest level already has most of the gain


@dataclass(frozen=True)
class PackedColumn:
    """A whole column as one packed text, with a number of rows, but without indexing."""

    rows: int
    text: str

    def __len__(self) -> int:
        return self.rows

    @property
    def shape(self) -> tuple[int]:
        return (self.rows,)

    @property
    def nbytes(self) -> int:
        return len(self.text)

    def __getitem__(self, index: object) -> NoReturn:
        raise BatchError(
            f"A column packed as a whole cannot be indexed, but got the index {index!r}. "
            "Call `decompress_if_needed()` on the batch first."
        )


def pack_array(array: np.ndarray) -> str:
    """Returns `array` as text.

    >>> unpack_array(pack_array(np.array([[1, 2], [3, 4]], np.uint8)))
    array([[1, 2],
           [3, 4]], dtype=uint8)
    """
    if array.dtype.hasobject:
        raise BatchError(
            f"Only arrays of numbers or text can be compressed, but got dtype {array.dtype}. "
            "Leave that column out of `columns`."
        )
    shape = ",".join(map(str, array.shape))
    data = base64.b64encode(zlib.compress(array.tobytes(), _LEVEL)).decode("ascii")
    return f"{_HEADER};{array.dtype.str};{shape};{data}"


def is_packed(text: str) -> bool:
    """Returns whether a text is one that `pack_array` returned."""
    return text.startswith(f"{_HEADER};")


def unpack_array(text: str) -> np.ndarray:
    """Returns the array that `pack` converted; it is writable and owns its memory."""
    try:
        _, dtype_name, shape_text, data = text.split(";", 3)
        dtype = np.dtype(dtype_name)
        shape = tuple(int(size) for size in shape_text.split(",") if size)
        size = math.prod(shape) * dtype.itemsize
        stream = zlib.decompressobj()
        raw = stream.decompress(base64.b64decode(data, validate=True), size + 1)
        if dtype.hasobject or len(raw) != size or not stream.eof:
            raise ValueError(f"{len(raw)} bytes for shape {shape} of {dtype}")
        return np.ndarray(shape, dtype, buffer=bytearray(raw))
    except (ValueError, TypeError, binascii.Error, zlib.error) as error:
        raise BatchError(
            f"A packed array must be the whole text that `compress` wrote, but {text[:60]!r}... "
            f"is damaged ({error}). Read it again from its source."
        ) from error


def pack_leaf(leaf: np.ndarray | list[Any] | PackedColumn, bulk: bool) -> Any:
    """Packs each row of a leaf, or the whole leaf with `bulk`; packed leaves are unchanged."""
    if isinstance(leaf, PackedColumn) or len(leaf) == 0 or _has_packed_rows(leaf):
        return leaf
    array = np.asarray(leaf)
    if bulk:
        return PackedColumn(len(array), pack_array(array))
    packed = np.empty(len(array), dtype=object)
    packed[:] = [pack_array(row) for row in map(np.asarray, array)]
    return packed


def unpack_leaf(leaf: np.ndarray | list[Any] | PackedColumn) -> Any:
    """Inverts `pack_leaf`; a leaf that is not packed is returned unchanged."""
    if isinstance(leaf, PackedColumn):
        return unpack_array(leaf.text)
    if _has_packed_rows(leaf):
        return np.stack([unpack_array(row) for row in leaf])
    return leaf


def _has_packed_rows(leaf: np.ndarray | list[Any] | PackedColumn) -> bool:
    is_object_array = isinstance(leaf, np.ndarray) and leaf.dtype == object and leaf.ndim == 1
    first = leaf[0] if is_object_array and len(leaf) else None
    return isinstance(first, str) and is_packed(first)
