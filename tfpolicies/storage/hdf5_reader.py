"""Reads the HDF5 that Keras writes, from bytes that may be anybody's, in plain Python.

The HDF5 library is written for files it can trust: of 6000 small files with a few bytes changed,
one crashed the process and five never came back (see docs/decisions). This module knows the
part of the format that h5py writes by default and Keras uses: symbol-table groups, string
attributes, and numbers stored in one piece. It follows no link out of the image, and the bytes it
looks at are counted: whatever the image says, the work is a small multiple of its length.

Source: HDF5 File Format Specification, version 3.0 (support.hdfgroup.org).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

SIGNATURE = b"\x89HDF\r\n\x1a\n"

_UNDEFINED = (1 << 64) - 1
_DATASPACE, _DATATYPE, _LAYOUT, _FILTERS, _ATTRIBUTE = 0x01, 0x03, 0x08, 0x0B, 0x0C
_CONTINUATION, _SYMBOL_TABLE, _LINK, _LINK_INFO, _EXTERNAL = 0x10, 0x11, 0x06, 0x02, 0x07
_COMPACT, _CONTIGUOUS, _CHUNKED = 0, 1, 2
_MAX_NAME = 1024  # bytes of a layer's or weight's name
_MAX_RANK = 16
_LOOK = 64  # what one look at the image costs, in bytes, besides those it reads
_REWRITE = "load it with Keras and save its weights again"

# (size, precision, exponent at, exponent bits, mantissa at, mantissa bits, bias) -> NumPy
_FLOATS = {
    (2, 16, 10, 5, 0, 10, 15): "f2",
    (4, 32, 23, 8, 0, 23, 127): "f4",
    (8, 64, 52, 11, 0, 52, 1023): "f8",
}


class Hdf5Error(ValueError):
    """An image is damaged, or uses a part of HDF5 that Keras does not."""


class _Message(NamedTuple):
    kind: int
    flags: int
    body: bytes


class _Type(NamedTuple):
    """A datatype: numbers of a NumPy dtype, or strings of fixed or varying length."""

    dtype: np.dtype | None
    size: int  # bytes of one element
    is_text: bool = False
    is_varying: bool = False


class Hdf5Image:
    """The bytes of an HDF5 file, and a budget for looking at them.

    Raises:
        Hdf5Error: if this is no such file, or a truncated one.
    """

    def __init__(self, image: bytes) -> None:
        self._image = image
        self._budget = 4 * len(image) + (1 << 16)
        self._heaps: dict[int, dict[int, bytes]] = {}
        if image[:8] != SIGNATURE:
            raise Hdf5Error("it does not begin as an HDF5 file does")
        if len(image) < 96 or image[8] > 1:
            version = image[8] if len(image) > 8 else "none"
            raise Hdf5Error(f"its HDF5 superblock has version {version}, not 0 or 1; {_REWRITE}")
        if (image[13], image[14]) != (8, 8):
            raise Hdf5Error("its addresses or lengths do not have 8 bytes")
        at = 24 if image[8] == 0 else 28
        base, _, end, _, _, self._root = struct.unpack_from("<6Q", image, at)
        if base != 0:
            raise Hdf5Error("it has a base address")
        if end > len(image):
            raise Hdf5Error(f"it is truncated: it has {len(image)} bytes of {end}")

    @property
    def root(self) -> Hdf5Object:
        """The root group."""
        return Hdf5Object(self, self._root)

    def read(self, at: int, size: int) -> bytes:
        """Returns `size` bytes; every look at the image goes through here.

        Raises:
            Hdf5Error: if they are not in the image, or too many have been asked for.
        """
        self._charge(size + _LOOK)
        if at + size > len(self._image):
            raise Hdf5Error(f"it points to byte {at + size}, but has {len(self._image)}")
        return self._image[at : at + size]

    def _charge(self, work: int) -> None:
        self._budget -= work
        if self._budget < 0:
            raise Hdf5Error("its parts overlap: they are longer together than the file")

    def unpack(self, layout: str, at: int) -> tuple[Any, ...]:
        """Returns the little-endian fields of a `struct` layout at an address."""
        return struct.unpack("<" + layout, self.read(at, struct.calcsize("<" + layout)))

    def heap_object(self, heap: int, index: int) -> bytes:
        """Returns one object of the global heap collection at address `heap`."""
        if heap not in self._heaps:
            self._heaps[heap] = dict(self._heap_objects(heap))
        if index not in self._heaps[heap]:
            raise Hdf5Error(f"a string refers to object {index} of a heap that does not have it")
        found = self._heaps[heap][index]
        self._charge(len(found))
        return found

    def _heap_objects(self, heap: int) -> Iterator[tuple[int, bytes]]:
        signature, version, size = self.unpack("4sB3xQ", heap)
        if signature != b"GCOL" or version != 1:
            raise Hdf5Error("a global heap does not begin as one")
        at, end = heap + 16, heap + size
        while at + 16 <= end:
            index, length = self.unpack("H6xQ", at)
            if index == 0:  # the free space at the end
                return
            yield index, self.read(at + 16, length)
            at += 16 + length + -length % 8


class Hdf5Object:
    """A group or a dataset, by the address of its header."""

    def __init__(self, image: Hdf5Image, address: int) -> None:
        self._image = image
        self.address = address
        self._messages = list(_header(image, address))
        self._groups: dict[str, Hdf5Object] = {}
        kinds = {message.kind for message in self._messages}
        self.is_dataset = _LAYOUT in kinds
        self.is_group = _SYMBOL_TABLE in kinds
        if self.is_dataset == self.is_group:
            detail = "a group of the newer format" if kinds & {_LINK, _LINK_INFO} else "neither"
            raise Hdf5Error(
                f"an object is no group or dataset as Keras writes it ({detail}); {_REWRITE}"
            )

    @functools.cached_property
    def members(self) -> dict[str, int]:
        """Names and addresses of the members of a group, in the order of the file.

        Raises:
            Hdf5Error: if this is no group, or one of the links leads elsewhere.
        """
        body = self._one(_SYMBOL_TABLE, "group")
        tree, heap = _fields("QQ", body)
        signature, version, size, _, data = self._image.unpack("4sB3xQQQ", heap)
        if signature != b"HEAP" or version != 0:
            raise Hdf5Error("the names of a group are no local heap")
        names = self._image.read(data, size)
        found: dict[str, int] = {}
        for table in _leaves(self._image, tree):
            for name, address in _entries(self._image, table, names):
                if name in found:
                    raise Hdf5Error(f"a group has two members {name!r}")
                found[name] = address
        return found

    def child(self, name: str) -> Hdf5Object:
        """Returns a member of a group; those that are groups are parsed once.

        Raises:
            Hdf5Error: if there is none of that name, or it cannot be parsed.
        """
        if name not in self.members:
            raise Hdf5Error(f"it has no {name!r} where its attributes say there is one")
        found = self._groups.get(name) or Hdf5Object(self._image, self.members[name])
        if found.is_group:
            self._groups[name] = found
        return found

    def find(self, path: str) -> Hdf5Object:
        """Returns what lies at a path of names below a group; see `child`."""
        return functools.reduce(Hdf5Object.child, path.split("/"), self)

    def strings(self, attribute: str) -> list[str] | None:
        """Returns the strings of an attribute, or None if there is none of that name.

        An attribute without elements is an empty list, whatever its type.

        Raises:
            Hdf5Error: if its elements are no strings, or longer than names are.
        """
        parts = self._attributes.get(attribute.encode())
        return None if parts is None else self._strings(*parts)

    @functools.cached_property
    def _attributes(self) -> dict[bytes, tuple[int, bytes, bytes, bytes]]:
        return dict(_attribute(m) for m in self._messages if m.kind == _ATTRIBUTE)

    def array(self) -> np.ndarray:
        """Returns the numbers of a dataset as an array of its own, in native byte order.

        Raises:
            Hdf5Error: if this is no dataset, or one of other data or stored in another way.
        """
        kinds = {message.kind for message in self._messages}
        if kinds & {_FILTERS, _EXTERNAL}:
            raise Hdf5Error(f"it is compressed or stored outside the file; {_REWRITE}")
        shape = _shape(self._one(_DATASPACE, "dataset"))
        dtype, itemsize = _datatype(self._one(_DATATYPE, "dataset"))[:2]
        if dtype is None:
            raise Hdf5Error("it holds no integers or floats of 16 to 64 bits (bfloat16, perhaps)")
        content = self._content(self._one(_LAYOUT, "dataset"), math.prod(shape) * itemsize)
        try:
            array = np.frombuffer(content, dtype).reshape(shape)
        except ValueError as error:  # such as (0, 2**62)
            raise Hdf5Error(f"it has the impossible shape {shape}") from error
        return array.astype(dtype.newbyteorder("="))

    def _content(self, layout: bytes, size: int) -> bytes:
        version, kind = _fields("BB", layout)
        if version not in (3, 4) or kind not in (_COMPACT, _CONTIGUOUS):
            how = "in chunks" if kind == _CHUNKED else "in a way unknown here"
            raise Hdf5Error(f"it is stored {how}; {_REWRITE}")
        if kind == _COMPACT:
            (stored,) = _fields("H", layout[2:])
            content = layout[4 : 4 + stored]
        else:
            address, stored = _fields("QQ", layout[2:])
            if size and address == _UNDEFINED:
                raise Hdf5Error("it was never written")
            content = self._image.read(address, size) if size else b""
        if (size and stored != size) or len(content) != size:
            raise Hdf5Error(f"it needs {size} bytes for its shape, but has {stored}")
        return content

    def _one(self, kind: int, what: str) -> bytes:
        bodies = [message for message in self._messages if message.kind == kind]
        if len(bodies) != 1 or bodies[0].flags & 2:  # 2: the message is kept elsewhere
            raise Hdf5Error(f"it is no {what} as Keras writes it")
        return bodies[0].body

    def _strings(self, flags: int, datatype: bytes, dataspace: bytes, data: bytes) -> list[str]:
        shape = _shape(dataspace)
        count = math.prod(shape)
        if count == 0:
            return []
        kind = _datatype(datatype)
        if flags & 3 or not kind.is_text or len(shape) > 1 or count * kind.size > len(data):
            raise Hdf5Error("an attribute of names is no list of strings")
        pieces = [data[i * kind.size : (i + 1) * kind.size] for i in range(count)]
        if kind.is_varying:
            pieces = [self._varying(piece) for piece in pieces]
        return [_name(piece.split(b"\0")[0]) for piece in pieces]

    def _varying(self, reference: bytes) -> bytes:
        length, heap, index = _fields("IQI", reference)
        if length > _MAX_NAME:
            raise Hdf5Error(f"a name is {length} bytes long")
        return self._image.heap_object(heap, index)[:length] if length else b""


def _header(image: Hdf5Image, address: int) -> Iterator[_Message]:
    version, count, size = image.unpack("BxH4xI", address)
    if version != 1:
        raise Hdf5Error(f"an object does not begin as one of the older format does; {_REWRITE}")
    blocks = [(address + 16, size)]
    for start, length in blocks:  # grows: a message may name one more block
        block, at = image.read(start, length), 0
        while at + 8 <= len(block) and count:
            kind, size, flags = struct.unpack_from("<HHB", block, at)
            body = block[at + 8 : at + 8 + size]
            if len(body) < size:
                raise Hdf5Error("a message of an object is longer than its block")
            at, count = at + 8 + size, count - 1
            if kind == _CONTINUATION:
                blocks.append(_fields("QQ", body))
            yield _Message(kind, flags, body)
    if count:
        raise Hdf5Error("an object has fewer messages than it says")


def _leaves(image: Hdf5Image, tree: int) -> Iterator[int]:
    """Yields the addresses of a group's symbol tables, in the order of names."""
    pending, seen = [(tree, None)], set()
    while pending:
        node, expected = pending.pop()
        if node in seen:
            raise Hdf5Error("the tree of a group runs in a circle")
        seen.add(node)
        signature, kind, level, used = image.unpack("4sBBH", node)
        if signature != b"TREE" or kind != 0 or expected not in (None, level):
            raise Hdf5Error("the tree of a group is damaged")
        fields = struct.unpack(f"<{2 * used}Q", image.read(node + 24, 16 * used))
        children = fields[1::2]
        if level == 0:
            yield from children
        else:
            pending += [(child, level - 1) for child in reversed(children)]


def _entries(image: Hdf5Image, table: int, names: bytes) -> Iterator[tuple[str, int]]:
    signature, version, count = image.unpack("4sBxH", table)
    if signature != b"SNOD" or version != 1:
        raise Hdf5Error("a table of a group is damaged")
    for start, address, kind in struct.iter_unpack("<QQI20x", image.read(table + 8, 40 * count)):
        if kind > 1:
            raise Hdf5Error("a group has a link that is soft or leads to another file")
        end = names.find(b"\0", start, start + _MAX_NAME)
        if end < 0:
            raise Hdf5Error("the name of a member has no end")
        name = _name(names[start:end])
        if not name or "/" in name:
            raise Hdf5Error(f"a member of a group has the impossible name {name!r}")
        yield name, address


def _attribute(message: _Message) -> tuple[bytes, tuple[int, bytes, bytes, bytes]]:
    """Returns name and (flags, datatype, dataspace, data) of an attribute message."""
    body = message.body
    version, flags, *sizes = _fields("BBHHH", body)
    if version not in (1, 2, 3):
        raise Hdf5Error(f"an attribute has the unknown version {version}")
    at = 9 if version == 3 else 8
    parts = []
    for size in sizes:
        parts.append(body[at : at + size])
        at += size + (-size % 8 if version == 1 else 0)
    name, datatype, dataspace = parts
    shared = message.flags & 2 or (flags & 3 if version > 1 else 0)
    return name.split(b"\0")[0], (shared, datatype, dataspace, body[at:])


def _shape(body: bytes) -> tuple[int, ...]:
    version, rank, flags, kind = _fields("BBBB", body)
    if version not in (1, 2) or rank > _MAX_RANK or flags > 1 or (version == 2 and kind > 1):
        raise Hdf5Error("it has a shape that no array has")
    return _fields(f"{rank}Q", body[8 if version == 1 else 4 :])


def _datatype(body: bytes) -> _Type:
    head, bits, _, size = _fields("BBHI", body)
    kind, version = head & 15, head >> 4
    if version not in (1, 2, 3):
        raise Hdf5Error("it has a type of an unknown version")
    dtype = None
    if kind == 0 and size in (1, 2, 4, 8) and _fields("HH", body[8:]) == (0, 8 * size):
        dtype = np.dtype(f"{'>' if bits & 1 else '<'}{'i' if bits & 8 else 'u'}{size}")
    if kind == 1 and not bits & 64:
        offset, *layout, bias = _fields("HHBBBBI", body[8:])
        name = _FLOATS.get((size, *layout, bias))
        dtype = np.dtype(f"{'>' if bits & 1 else '<'}{name}") if name and not offset else None
    is_varying = kind == 9 and bits & 15 == 1 and size == 16
    is_fixed = kind == 3 and 0 < size <= _MAX_NAME
    return _Type(dtype, size, is_varying or is_fixed, is_varying)


def _fields(layout: str, body: bytes) -> tuple[Any, ...]:
    size = struct.calcsize("<" + layout)
    if len(body) < size:
        raise Hdf5Error("a part of it is shorter than it must be")
    return struct.unpack_from("<" + layout, body)


def _name(encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        raise Hdf5Error(f"a name is no UTF-8: {encoded[:40]!r}") from None
