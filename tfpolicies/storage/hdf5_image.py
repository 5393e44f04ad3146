"""Named arrays as the bytes of an HDF5 file, and back.

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

from tfpolicies.errors import CheckpointError

_GROUP = "arrays"
_PLAIN_KINDS = "biuf"  # bool, int, uint, float


def check_arrays(group: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Checks that `arrays` can be packed.

    Raises:
        CheckpointError: if a name is empty or no text, or a value is no array of bools, integers
            or floats.
    """
    for name, array in arrays.items():
        where = f"Array {name!r} of group {group!r}"
        if not isinstance(name, str) or not name or not _is_unicode(name):
            raise CheckpointError(f"{where} must be named by a non-empty unicode string.")
        if not isinstance(array, (np.ndarray, np.generic)) or array.dtype.kind not in _PLAIN_KINDS:
            found = getattr(array, "dtype", type(array).__name__)
            raise CheckpointError(
                f"{where} must be a NumPy array of bools, integers or floats, got {found}. Convert "
                "it with `np.asarray(...)`, or put it into the manifest if it is no array."
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
    ordered = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    ordered.set_link_creation_order(h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED)
    ordered.set_obj_track_times(False)
    with h5py.File(buffer, "w", libver="earliest") as file:
        group = h5py.Group(h5py.h5g.create(file.id, _GROUP.encode(), gcpl=ordered))
        for name, array in arrays.items():
            group.create_dataset(_quote(name), data=np.asarray(array), track_times=False)
    return buffer.getvalue()


def unpack_arrays(image: bytes) -> dict[str, np.ndarray]:
    """Returns the arrays of an image made by `pack_arrays`, each writable and owned by the caller.

    Only what `pack_arrays` writes is accepted: plain numeric data inside the image. Links that
    are soft or lead to other files, data stored outside, virtual, chunked or compressed datasets
    and other types of data are refused, before any of it is read.

    Raises:
        CheckpointError: if the image is no such file.
    """
    try:
        with h5py.File(io.BytesIO(image), "r") as file:
            if list(file) != [_GROUP] or not _is_hard(file, _GROUP):
                raise CheckpointError(f"it must hold exactly one group, {_GROUP!r}")
            group = file[_GROUP]
            if not isinstance(group, h5py.Group):
                raise CheckpointError(f"{_GROUP!r} is not a group")
            return {unquote(link, errors="strict"): _read(group, link, image) for link in group}
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises nearly anything for a malformed file
        raise CheckpointError(f"it cannot be parsed as HDF5 ({error})") from error


def _read(group: h5py.Group, link: str, image: bytes) -> np.ndarray:
    if not _is_hard(group, link):
        raise CheckpointError(f"{link!r} is a soft or external link; only plain arrays are read")
    dataset = group[link]
    if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
        raise CheckpointError(f"{link!r} is not a plain array")
    if not _is_plain(dataset.dtype):
        raise CheckpointError(f"{link!r} has type {dataset.dtype}; only plain numbers are read")
    layout = dataset.id.get_create_plist()
    inline = (h5py.h5d.CONTIGUOUS, h5py.h5d.COMPACT)
    if layout.get_external_count() or layout.get_layout() not in inline:
        raise CheckpointError(f"{link!r} is not stored contiguously inside the file")
    if dataset.nbytes > len(image):
        raise CheckpointError(f"{link!r} claims {dataset.nbytes} bytes, more than the file has")
    array = np.empty(dataset.shape, dataset.dtype)
    if array.size:
        dataset.read_direct(array)
    return array


def _is_hard(group: h5py.Group, link: str) -> bool:
    return isinstance(group.get(link, getlink=True), h5py.HardLink)


def _is_plain(dtype: np.dtype) -> bool:
    return dtype.kind in _PLAIN_KINDS and dtype.metadata is None and dtype.subdtype is None


def _quote(name: str) -> str:
    """Returns the link name: HDF5 gives a meaning to `/`, `.` and NUL."""
    return re.sub(r"[%/\0]|\A\.\Z", lambda match: f"%{ord(match[0]):02X}", name)


def _is_unicode(name: str) -> bool:
    return name.encode(errors="ignore").decode() == name
