"""Changed array files, on which the HDF5 library crashes, for `fuzz_attacks`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from unittest import mock

import numpy as np

from soak.attempt import Attempt
from tfpolicies.storage.hdf5_bytes import pack_arrays, unpack_arrays

_FIELDS = (0, 1, 255, 1 << 16, 1 << 32, 1 << 40, (1 << 64) - 1)


def change_bytes(image: bytes, rng: random.Random) -> bytes:
    """Returns an image in which one to four numbers are other ones."""
    changed = bytearray(image)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place, size = rng.randrange(len(changed)), rng.choice((1, 1, 1, 2, 4, 8))
        number = rng.choice((*_FIELDS, rng.randrange(len(changed)), rng.randrange(256)))
        changed[place : place + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(changed[: len(image)])


@contextlib.contextmanager
def changed_array_files(rng: random.Random) -> Iterator[None]:
    """Changes the array files that checkpoints write, before they are named and checksummed."""

    def pack(arrays: dict[str, np.ndarray]) -> bytes:
        image = pack_arrays(arrays)
        return change_bytes(image, rng) if rng.random() < 0.5 else image

    with mock.patch("tfpolicies.storage.checkpoint.pack_arrays", pack):
        yield


_ARRAYS = {
    "few": {"kernel": np.ones((3, 2), np.float32), "done": np.ones(4, bool)},
    "heap": {f"w{i}": np.ones(i + 1, np.float32) for i in range(12)},
    "tree": {f"w{i}": np.float64(i) for i in range(60)},
    "blocks": {f"{'policy/' * 20}{i}": np.int8([i % 9]) for i in range(300)},
}
_IMAGES = {what: pack_arrays(arrays) for what, arrays in _ARRAYS.items()}


def array_file_attempt(rng: random.Random) -> Attempt:
    """Returns a changed image of arrays, read as checkpoints read theirs."""
    what = rng.choice(list(_IMAGES))
    image = change_bytes(_IMAGES[what], rng)
    return Attempt(what, lambda: unpack_arrays(image))
