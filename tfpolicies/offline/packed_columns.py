"""Columns that RLlib packs in its JSON lines: base64 of an LZ4 frame of a pickled array.

The pickle is read as data: nothing that it names is imported or called.
"""

from __future__ import annotations

import base64
import binascii
import math
import pickle
from typing import Any

import numpy as np

from tfpolicies.batch.compression import is_packed, unpack_array
from tfpolicies.errors import BatchError, MissingPackageError
from tfpolicies.storage.pickle_reader import RefusedError, read_arrays
from tfpolicies.system.installed_distributions import get_install_command

MAX_UNPACKED_BYTES = 128 << 20  # of one column in one line
_DAMAGES = (ValueError, TypeError, OverflowError, LookupError, AttributeError, RecursionError)
_RLLIB_PREFIX = "BCJNG"  # of each LZ4 frame in base64


def _import_lz4() -> Any:
    try:
        import lz4.frame
    except ImportError as error:
        raise MissingPackageError(
            f"Packed columns of RLlib need the package lz4, which is not installed ({error}). "
            f"Install it: {get_install_command('data')}. Or record with "
            "output_compress_columns=[]."
        ) from error
    return lz4.frame


def is_packed_column(text: str) -> bool:
    """Returns whether a text is a packed column, of RLlib or of this package."""
    return text.startswith(_RLLIB_PREFIX) or is_packed(text)


def unpack_column(text: str) -> Any:
    """Returns a packed column: an array, or a dict or tuple of arrays.

    Args:
        text: as `pack_column` or `SampleBatch.compress` wrote it.

    Raises:
        BatchError: if it is damaged, too large, or holds anything but arrays of numbers.
        MissingPackageError: if it is RLlib's and lz4 is not installed.
    """
    if is_packed(text):
        _check_size(text)
        return unpack_array(text)
    pickled = _decompress(text)
    try:
        return read_arrays(pickled)
    except RefusedError as error:
        raise BatchError(f"its pickle holds {error}; nothing in it was executed") from error
    except _DAMAGES as error:
        raise BatchError(
            f"its pickle is damaged: {error!s:.100}; nothing in it was executed"
        ) from error


def _check_size(text: str) -> None:
    """Checks the size that a packed array of this package states."""
    try:
        _, dtype_name, shape, _ = text.split(";", 3)
        size = math.prod(map(int, filter(None, shape.split(",")))) * np.dtype(dtype_name).itemsize
    except (ValueError, TypeError):
        return  # `unpack_array` names the fault
    if size > MAX_UNPACKED_BYTES:
        raise BatchError(f"it has more than {MAX_UNPACKED_BYTES} bytes when unpacked")


def _decompress(text: str) -> bytes:
    decompressor = _import_lz4().LZ4FrameDecompressor()
    try:
        content = base64.b64decode(text, validate=True)
        result: bytes = decompressor.decompress(content, max_length=MAX_UNPACKED_BYTES + 1)
    except (binascii.Error, ValueError, RuntimeError) as error:
        raise BatchError(f"it is not an LZ4 frame in base64: {error!s:.100}") from error
    if len(result) > MAX_UNPACKED_BYTES:
        raise BatchError(f"it has more than {MAX_UNPACKED_BYTES} bytes when unpacked")
    if not decompressor.eof:
        raise BatchError("its end is missing")
    return result


def pack_column(column: Any) -> str:
    """Returns a column as RLlib packs it; its environment may have NumPy 1 or 2.

    Args:
        column: an array, or a dict or tuple of arrays.

    >>> unpack_column(pack_column(np.arange(3)))
    array([0, 1, 2])
    """
    frame = _import_lz4()
    pickled = pickle.dumps(column, protocol=3)  # names modules as plain text
    pickled = pickled.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n", 1)
    return base64.b64encode(frame.compress(pickled)).decode("ascii")
