"""Reads the bytes of an untrusted HDF5 file under a budget.

The work of reading is bounded by a small multiple of the file's size: each access is charged, so
loops and overlapping parts exhaust the budget.

Source: HDF5 File Format Specification, version 3.0 (support.hdfgroup.org).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

SIGNATURE = b"\x89HDF\r\n\x1a\n"
UNDEFINED = (1 << 64) - 1  # address of unallocated data
MAX_NAME_BYTES = 4096  # bytes of a link's, layer's or weight's name

_ACCESS_COST = 64  # charged for each access, in addition to the bytes it reads


class Hdf5Error(ValueError):
    """An HDF5 file is damaged or malicious."""


class UnsupportedHdf5Error(Hdf5Error):
    """An HDF5 file uses a part of the format that this package does not read."""


class Hdf5Source:
    """The bytes of an HDF5 file.

    Attributes:
        root: the address of the root group.

    Args:
        content: the whole file.

    Raises:
        Hdf5Error: if it is not an HDF5 file of the older format, or is truncated.
    """

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self._budget = 4 * len(content) + (1 << 16)
        self._heaps: dict[int, dict[int, bytes]] = {}
        if content[:8] != SIGNATURE:
            raise Hdf5Error("it does not begin with the HDF5 signature")
        if len(content) < 96 or content[8] > 1:
            version = content[8] if len(content) > 8 else "none"
            raise UnsupportedHdf5Error(f"its HDF5 superblock has version {version}, not 0 or 1")
        if (content[13], content[14]) != (8, 8):
            raise UnsupportedHdf5Error("its addresses or lengths do not have 8 bytes")
        at = 24 if content[8] == 0 else 28
        base, _, end, _, _, self.root = struct.unpack_from("<6Q", content, at)
        if base != 0:
            raise UnsupportedHdf5Error("it has a base address")
        if end > len(content):
            raise Hdf5Error(f"it is truncated: it has {len(content)} bytes of {end}")

    def view(self, address: int, size: int) -> memoryview:
        """Returns `size` bytes without copying them; every access goes through here."""
        self.charge(size + _ACCESS_COST)
        if address + size > len(self._content):
            raise Hdf5Error(f"it points to byte {address + size}, but has {len(self._content)}")
        return self._content[address : address + size]

    def read(self, address: int, size: int) -> bytes:
        """Returns a copy of `size` bytes; see `view`."""
        return bytes(self.view(address, size))

    def charge(self, work: int) -> None:
        """Takes `work` bytes from the budget."""
        self._budget -= work
        if self._budget < 0:
            raise Hdf5Error("its parts overlap: together they are longer than the file")

    def unpack(self, layout: str, address: int) -> tuple[Any, ...]:
        """Returns the little-endian fields of a `struct` layout at an address."""
        return struct.unpack("<" + layout, self.view(address, struct.calcsize("<" + layout)))

    def read_heap_object(self, heap: int, index: int) -> bytes:
        """Returns an object of the global heap collection at address `heap`."""
        if heap not in self._heaps:
            self._heaps[heap] = dict(self._iterate_heap_objects(heap))
        if index not in self._heaps[heap]:
            raise Hdf5Error(f"a string refers to object {index} of a heap that does not have it")
        content = self._heaps[heap][index]
        self.charge(len(content))
        return content

    def _iterate_heap_objects(self, heap: int) -> Iterator[tuple[int, bytes]]:
        signature, version, size = self.unpack("4sB3xQ", heap)
        if signature != b"GCOL" or version != 1:
            raise Hdf5Error("a global heap does not begin with its signature")
        at, end = heap + 16, heap + size
        while at + 16 <= end:
            index, length = self.unpack("H6xQ", at)
            if index == 0:  # the free space at the end
                return
            yield index, self.read(at + 16, length)
            at += 16 + length + -length % 8


def unpack_fields(layout: str, body: bytes, at: int = 0) -> tuple[Any, ...]:
    """Returns the little-endian fields of a `struct` layout in a part of a file."""
    if len(body) - at < struct.calcsize("<" + layout):
        raise Hdf5Error("a part of it is shorter than it must be")
    return struct.unpack_from("<" + layout, body, at)


def decode_name(encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        raise Hdf5Error(f"a name is not UTF-8: {encoded[:40]!r}") from None
