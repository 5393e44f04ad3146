"""Reads groups, attributes and arrays of untrusted HDF5 files, in plain Python.

The HDF5 library is written for trusted files: damaged files crash the process, or keep it busy
without end (`docs/decisions/008`). This module reads the part of the format that h5py writes by
default, which Keras and the checkpoints of this package use: groups, attributes that are strings,
and numbers that are stored in one block. It follows no link out of the file.

Source: HDF5 File Format Specification, version 3.0 (support.hdfgroup.org).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tfpolicies.storage.hdf5_links import read_links, read_symbol_table
from tfpolicies.storage.hdf5_source import (
    MAX_NAME_BYTES,
    UNDEFINED,
    Hdf5Error,
    Hdf5Source,
    UnsupportedHdf5Error,
    decode_name,
    unpack_fields,
)

_DATASPACE, _DATATYPE, _LAYOUT, _FILTERS, _ATTRIBUTE = 0x01, 0x03, 0x08, 0x0B, 0x0C
_CONTINUATION, _SYMBOL_TABLE, _LINK, _LINK_INFO, _EXTERNAL = 0x10, 0x11, 0x06, 0x02, 0x07
_COMPACT, _CONTIGUOUS, _CHUNKED = 0, 1, 2
_MAX_RANK = 32
_BOOL_MEMBERS = (b"FALSE\0\0\0TRUE\0\0\0\0\0\1", b"FALSE\0TRUE\0\0\1")  # as h5py writes them

# (size, precision, exponent offset, exponent bits, mantissa offset, mantissa bits, bias) -> NumPy
_FLOATS = {
    (2, 16, 10, 5, 0, 10, 15): "f2",
    (4, 32, 23, 8, 0, 23, 127): "f4",
    (8, 64, 52, 11, 0, 52, 1023): "f8",
}


class _Message(NamedTuple):
    kind: int
    flags: int
    body: bytes


class _Datatype(NamedTuple):
    """A datatype: numbers of a NumPy dtype, or strings of fixed or varying length."""

    dtype: np.dtype | None
    size: int  # bytes of one element
    is_text: bool = False
    is_varying: bool = False


class Hdf5Object:
    """A group or a dataset of a file.

    Raises:
        Hdf5Error: if there is no header of a group or dataset at the address.
    """

    def __init__(self, source: Hdf5Source, address: int) -> None:
        self._source = source
        self.address = address
        self._messages = list(_iterate_messages(source, address))
        self._groups: dict[str, Hdf5Object] = {}
        kinds = {message.kind for message in self._messages}
        self.is_dataset = _LAYOUT in kinds
        self.is_group = bool(kinds & {_SYMBOL_TABLE, _LINK_INFO})
        if self.is_dataset == self.is_group:
            raise UnsupportedHdf5Error("an object is neither a group nor a dataset")

    @classmethod
    def read_root(cls, content: bytes) -> Hdf5Object:
        """Returns the root group of a file.

        Raises:
            Hdf5Error: if it is not an HDF5 file, is truncated, or cannot be read.
        """
        source = Hdf5Source(content)
        return cls(source, source.root)

    @functools.cached_property
    def members(self) -> dict[str, int]:
        """Names and addresses of the members of a group, in the order of the file.

        Raises:
            Hdf5Error: if this is not a group, or one of the links is not a hard link.
        """
        if all(message.kind != _LINK_INFO for message in self._messages):
            return read_symbol_table(self._source, self._get_message_body(_SYMBOL_TABLE, "group"))
        links = (message.body for message in self._messages if message.kind == _LINK)
        return read_links(self._source, self._get_message_body(_LINK_INFO, "group"), links)

    def get_child(self, name: str) -> Hdf5Object:
        """Returns a member of a group; groups are parsed once."""
        if name not in self.members:
            raise Hdf5Error(f"it has no {name!r}, though its attributes name it")
        member = self._groups.get(name) or Hdf5Object(self._source, self.members[name])
        if member.is_group:
            self._groups[name] = member
        return member

    def find(self, path: str) -> Hdf5Object:
        """Returns the object at a path of names below a group; see `child`."""
        return functools.reduce(Hdf5Object.get_child, path.split("/"), self)

    def read_strings(self, attribute: str) -> list[str] | None:
        """Returns the strings of an attribute, or None if there is none of that name.

        An attribute without elements is an empty list, whatever its type.

        Raises:
            Hdf5Error: if its elements are not strings, or longer than names may be.
        """
        parts = self._attributes.get(attribute.encode())
        return None if parts is None else self._decode_strings(*parts)

    @functools.cached_property
    def _attributes(self) -> dict[bytes, tuple[int, bytes, bytes, bytes]]:
        return dict(_parse_attribute(m) for m in self._messages if m.kind == _ATTRIBUTE)

    def read_array(self) -> np.ndarray:
        """Returns the numbers of a dataset as a new array, in the byte order of the file."""
        kinds = {message.kind for message in self._messages}
        if kinds & {_FILTERS, _EXTERNAL}:
            raise UnsupportedHdf5Error("it is compressed or stored outside the file")
        shape = _parse_shape(self._get_message_body(_DATASPACE, "dataset"))
        dtype, itemsize = _parse_datatype(self._get_message_body(_DATATYPE, "dataset"))[:2]
        if dtype is None:
            raise UnsupportedHdf5Error(
                "it does not hold bools, integers or floats of 8 to 64 bits (bfloat16, perhaps)"
            )
        content = self._read_content(
            self._get_message_body(_LAYOUT, "dataset"), math.prod(shape) * itemsize
        )
        try:
            array = np.frombuffer(content, np.uint8).view(dtype).reshape(shape).copy()
        except ValueError as error:  # such as (0, 2**62)
            raise Hdf5Error(f"it has the impossible shape {shape}") from error
        if dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
            raise Hdf5Error("a bool of it is neither 0 nor 1")
        return array

    def _read_content(self, layout: bytes, size: int) -> bytes | memoryview:
        version, kind = unpack_fields("BB", layout)
        if version not in (3, 4) or kind not in (_COMPACT, _CONTIGUOUS):
            storage_form = "in chunks" if kind == _CHUNKED else "in a way unknown here"
            raise UnsupportedHdf5Error(f"it is stored {storage_form}")
        content: bytes | memoryview
        if kind == _COMPACT:
            (stored_size,) = unpack_fields("H", layout, 2)
            content = layout[4 : 4 + stored_size]
        else:
            address, stored_size = unpack_fields("QQ", layout, 2)
            if size and address == UNDEFINED:
                raise Hdf5Error("it was never written")
            content = self._source.view(address, size) if size else b""
        if (size and stored_size != size) or len(content) != size:
            raise Hdf5Error(f"it needs {size} bytes for its shape, but has {stored_size}")
        return content

    def _get_message_body(self, kind: int, object_kind: str) -> bytes:
        bodies = [message for message in self._messages if message.kind == kind]
        if len(bodies) != 1 or bodies[0].flags & 2:  # 2: a shared message, stored elsewhere
            raise UnsupportedHdf5Error(f"it is not a plain {object_kind}")
        return bodies[0].body

    def _decode_strings(
        self, flags: int, datatype: bytes, dataspace: bytes, data: bytes
    ) -> list[str]:
        shape = _parse_shape(dataspace)
        count = math.prod(shape)
        if count == 0:
            return []
        kind = _parse_datatype(datatype)
        if flags & 3 or not kind.is_text or len(shape) > 1 or count * kind.size > len(data):
            raise Hdf5Error("an attribute of names is not a list of strings")
        pieces = [data[i * kind.size : (i + 1) * kind.size] for i in range(count)]
        if kind.is_varying:
            pieces = [self._read_varying_string(piece) for piece in pieces]
        return [decode_name(piece.split(b"\0")[0]) for piece in pieces]

    def _read_varying_string(self, reference: bytes) -> bytes:
        length, heap, index = unpack_fields("IQI", reference)
        if length > MAX_NAME_BYTES:
            raise Hdf5Error(f"a name is {length} bytes long")
        return self._source.read_heap_object(heap, index)[:length] if length else b""


def _iterate_messages(source: Hdf5Source, address: int) -> Iterator[_Message]:
    version, count, size = source.unpack("BxH4xI", address)
    if version != 1:
        raise UnsupportedHdf5Error("an object header does not have version 1")
    blocks = [(address + 16, size)]
    for start, length in blocks:  # grows: a continuation message adds a block
        block, at = source.read(start, length), 0
        while at + 8 <= len(block) and count:
            kind, size, flags = struct.unpack_from("<HHB", block, at)
            body = block[at + 8 : at + 8 + size]
            if len(body) < size:
                raise Hdf5Error("a message of an object is longer than its block")
            at, count = at + 8 + size, count - 1
            if kind == _CONTINUATION:
                blocks.append(unpack_fields("QQ", body))
            yield _Message(kind, flags, body)
    if count:
        raise Hdf5Error("an object has fewer messages than its header says")


def _parse_attribute(message: _Message) -> tuple[bytes, tuple[int, bytes, bytes, bytes]]:
    """Returns name and (flags, datatype, dataspace, data) of an attribute message."""
    body = message.body
    version, flags, *sizes = unpack_fields("BBHHH", body)
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


def _parse_shape(body: bytes) -> tuple[int, ...]:
    version, rank, flags, kind = unpack_fields("BBBB", body)
    if version not in (1, 2) or rank > _MAX_RANK or flags > 1 or (version == 2 and kind > 1):
        raise Hdf5Error("it has an impossible shape")
    return unpack_fields(f"{rank}Q", body[8 if version == 1 else 4 :])


def _parse_datatype(body: bytes) -> _Datatype:
    head, bits, _, size = unpack_fields("BBHI", body)
    kind, version = head & 15, head >> 4
    if version not in (1, 2, 3):
        raise Hdf5Error("it has a type of an unknown version")
    dtype = None
    if kind == 0 and size in (1, 2, 4, 8) and unpack_fields("HH", body[8:]) == (0, 8 * size):
        dtype = np.dtype(f"{'>' if bits & 1 else '<'}{'i' if bits & 8 else 'u'}{size}")
    if kind == 1 and not bits & 64:
        offset, *layout, bias = unpack_fields("HHBBBBI", body[8:])
        name = _FLOATS.get((size, *layout, bias))
        dtype = np.dtype(f"{'>' if bits & 1 else '<'}{name}") if name and not offset else None
    if kind == 8 and size == 1 and body[20:].startswith(_BOOL_MEMBERS):
        dtype = np.dtype(bool) if _parse_datatype(body[8:20]).dtype == np.int8 else None
    is_varying = kind == 9 and bits & 15 == 1 and size == 16
    is_fixed = kind == 3 and 0 < size <= MAX_NAME_BYTES
    return _Datatype(dtype, size, is_varying or is_fixed, is_varying)
