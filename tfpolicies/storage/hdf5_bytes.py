"""Converts named arrays to the bytes of an HDF5 file, and back.

The file has one group, `arrays`, with one contiguous dataset per array, in the order given. The
same arrays give the same bytes: no times are stored and the oldest file layout is used.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from urllib.parse import unquote

import h5py
import numpy as np

from tfpolicies.base.validators import is_unicode
from tfpolicies.errors import CheckpointError
from tfpolicies.storage.hdf5_reader import Hdf5Object
from tfpolicies.storage.hdf5_source import Hdf5Error

_GROUP = "arrays"
_PLAIN_KINDS = "biuf"  # bool, int, uint, float
_MAX_NAME_BYTES = 4000  # bytes of a quoted name: a longer link would be stored outside its heap


def check_arrays(group: str, arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        subject = f"Array {name!r} of group {group!r}"
        if not isinstance(name, str) or not name or not is_unicode(name):
            raise CheckpointError(f"{subject} must be named by a non-empty unicode string.")
        if len(_quote_name(name).encode()) > _MAX_NAME_BYTES:
            raise CheckpointError(
                f"Array {name[:200]!r}... of group {group!r} must have a name of at most "
                f"{_MAX_NAME_BYTES} bytes, got {len(name)} characters. Shorten the names of layers."
            )
        if not isinstance(array, (np.ndarray, np.generic)) or array.dtype.kind not in _PLAIN_KINDS:
            actual = getattr(array, "dtype", type(array).__name__)
            raise CheckpointError(
                f"{subject} must be a NumPy array of bools, integers or floats, got {actual}. "
                "Convert it with `np.asarray(...)`, or put it into the manifest if it is not an "
                "array."
            )


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns an HDF5 file image of `arrays`, which have passed `check_arrays`.

    >>> image = pack_arrays({"dense/kernel": np.ones((2, 3), np.float32)})
    >>> image == pack_arrays({"dense/kernel": np.ones((2, 3), np.float32)})
    True
    >>> unpack_arrays(image)["dense/kernel"].shape
    (2, 3)
    """
    buffer = io.BytesIO()
    group_settings = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    group_settings.set_link_creation_order(h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED)
    group_settings.set_obj_track_times(False)
    with h5py.File(buffer, "w", libver="earliest") as file:
        group = h5py.Group(h5py.h5g.create(file.id, _GROUP.encode(), gcpl=group_settings))
        for name, array in arrays.items():
            group.create_dataset(_quote_name(name), data=np.asarray(array), track_times=False)
    return buffer.getvalue()


def unpack_arrays(image: bytes) -> dict[str, np.ndarray]:
    """Returns the arrays of an image made by `pack_arrays`, each writable and owned by the caller.

    The image may be untrusted: it is parsed in Python, under a budget, and only the forms
    that `pack_arrays` writes are accepted. Links that are soft or lead to other files, data stored
    outside, virtual, chunked or compressed datasets and other types of data are refused.
    """
    try:
        root = Hdf5Object.read_root(image)
        if list(root.members) != [_GROUP] or not root.get_child(_GROUP).is_group:
            raise CheckpointError(f"it must hold exactly one group, {_GROUP!r}")
        group = root.get_child(_GROUP)
        arrays = {
            unquote(link, errors="strict"): _read_array(group, link) for link in group.members
        }
    except (Hdf5Error, UnicodeDecodeError) as error:
        raise CheckpointError(f"it cannot be parsed as HDF5 ({error})") from error
    if len(arrays) != len(group.members):
        raise CheckpointError("it names an array twice")
    return arrays


def _read_array(group: Hdf5Object, link: str) -> np.ndarray:
    try:
        return group.get_child(link).read_array()
    except Hdf5Error as error:
        raise Hdf5Error(f"{link[:200]!r} is not a plain array: {error}") from error


def _quote_name(name: str) -> str:
    """Returns the link name: `/`, `.` and NUL have a meaning in HDF5."""
    return re.sub(r"[%/\0]|\A\.\Z", lambda match: f"%{ord(match[0]):02X}", name)
