"""Reads the members of an HDF5 group, by name, from symbol tables, headers and heaps.

h5py writes a symbol table by default. A group that tracks the order of its links stores up to 8 of
them in its header, and more in a fractal heap that a B-tree indexes. All links must be hard ones:
soft and external links, which point to other places, are refused.

Source: HDF5 File Format Specification, version 3.0, sections III.A, III.B, III.D, III.E and III.G.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tfpolicies.storage.hdf5_source import (
    MAX_NAME_BYTES,
    UNDEFINED,
    Hdf5Error,
    Hdf5Source,
    UnsupportedHdf5Error,
    decode_name,
    unpack_fields,
)

_NOT_HARD_LINK = "a group has a link that is soft or leads to another file"


class _Link(NamedTuple):
    name: str
    address: int  # of the object's header
    order: int  # of creation


def read_symbol_table(source: Hdf5Source, message: bytes) -> dict[str, int]:
    """Returns names and addresses of a group's members from its symbol-table message."""
    tree, heap = unpack_fields("QQ", message)
    signature, version, size, _, data = source.unpack("4sB3xQQQ", heap)
    if signature != b"HEAP" or version != 0:
        raise Hdf5Error("the names of a group are not in a local heap")
    names = source.read(data, size)
    links = (
        link
        for table in _iterate_tables(source, tree)
        for link in _iterate_entries(source, table, names)
    )
    return _index_by_name(links)


def read_links(source: Hdf5Source, info: bytes, messages: Iterable[bytes]) -> dict[str, int]:
    """Returns names and addresses of a group's members, in the order of creation if it is tracked.

    Args:
        source: the file.
        info: the group's link-info message.
        messages: its link messages; these are all links unless there is a heap.

    Raises:
        Hdf5Error: if a part is damaged, or a link is not a hard link.
    """
    version, flags = unpack_fields("BB", info)
    if version != 0:
        raise UnsupportedHdf5Error(f"the links of a group have the unknown version {version}")
    heap_address, tree = unpack_fields("QQ", info, 10 if flags & 1 else 2)
    links = [_parse_link(message) for message in messages]
    if heap_address != UNDEFINED:
        heap = _FractalHeap(source, heap_address)
        links += [_parse_link(heap.read(key[4:])) for key in _iterate_records(source, tree)]
    return _index_by_name(sorted(links, key=lambda link: link.order))


def _index_by_name(links: Iterable[_Link]) -> dict[str, int]:
    members: dict[str, int] = {}
    for link in links:
        if link.name in members:
            raise Hdf5Error(f"a group has two members {link.name!r}")
        members[link.name] = link.address
    return members


def _decode_member_name(encoded: bytes) -> str:
    name = decode_name(encoded)
    if not name or "/" in name:
        raise Hdf5Error(f"a member of a group has the impossible name {name[:40]!r}")
    return name


# Symbol tables ------------------------------------------------------------------------------------


def _iterate_tables(source: Hdf5Source, tree: int) -> Iterator[int]:
    """Yields the addresses of a group's symbol tables, in the order of names."""
    pending, visited = [(tree, None)], set()
    while pending:
        node, expected = pending.pop()
        if node in visited:
            raise Hdf5Error("the tree of a group has a cycle")
        visited.add(node)
        signature, kind, level, used = source.unpack("4sBBH", node)
        if signature != b"TREE" or kind != 0 or expected not in (None, level):
            raise Hdf5Error("the tree of a group is damaged")
        fields = struct.unpack(f"<{2 * used}Q", source.view(node + 24, 16 * used))
        children = fields[1::2]
        if level == 0:
            yield from children
        else:
            pending += [(child, level - 1) for child in reversed(children)]


def _iterate_entries(source: Hdf5Source, table: int, names: bytes) -> Iterator[_Link]:
    signature, version, count = source.unpack("4sBxH", table)
    if signature != b"SNOD" or version != 1:
        raise Hdf5Error("a table of a group is damaged")
    for start, address, kind in struct.iter_unpack("<QQI20x", source.view(table + 8, 40 * count)):
        if kind > 1:
            raise Hdf5Error(_NOT_HARD_LINK)
        end = names.find(b"\0", start, start + MAX_NAME_BYTES)
        if end < 0:
            raise Hdf5Error("the name of a member has no end")
        source.charge(end - start)  # names may overlap
        yield _Link(_decode_member_name(names[start:end]), address, 0)


# Links --------------------------------------------------------------------------------------------


def _parse_link(message: bytes) -> _Link:
    version, flags = unpack_fields("BB", message)
    if version != 1:
        raise UnsupportedHdf5Error(f"a link has the unknown version {version}")
    at, order = 2, 0
    if flags & 8:  # the link type, which hard links may omit
        (kind,) = unpack_fields("B", message, at)
        if kind != 0:
            raise Hdf5Error(_NOT_HARD_LINK)
        at += 1
    if flags & 4:
        (order,) = unpack_fields("Q", message, at)
        at += 8
    at += 1 if flags & 16 else 0  # the character set; names are ASCII or UTF-8
    (length,) = unpack_fields("BHIQ"[flags & 3], message, at)
    at += 1 << (flags & 3)
    if length > MAX_NAME_BYTES:
        raise Hdf5Error(f"the name of a member is {length} bytes long")
    (address,) = unpack_fields("Q", message, at + length)
    return _Link(_decode_member_name(message[at : at + length]), address, order)


class _FractalHeap:
    """A heap of links: blocks whose sizes double from row to row of a table."""

    def __init__(self, source: Hdf5Source, address: int) -> None:
        self._source = source
        self._children: dict[int, tuple[int, ...]] = {}
        signature, version, id_size, filters = source.unpack("4sBHH", address)
        if signature != b"FRHP" or version != 0:
            raise Hdf5Error("the links of a group are not in a fractal heap")
        if filters or id_size != 7:
            raise UnsupportedHdf5Error("the heap of a group is compressed, or has unusual keys")
        fields = source.unpack("HQQHHQH", address + 110)
        self._width, self._start, largest, bits, _, self._root, self._rows = fields
        is_table = all(map(_is_power_of_two, (self._width, self._start, largest)))
        if not is_table or self._width * self._start > largest or not 8 <= bits <= 64:
            raise Hdf5Error("the heap of a group is damaged")
        self._offset_size = (bits + 7) // 8
        self._direct_rows = largest.bit_length() - self._start.bit_length() + 2

    def read(self, key: bytes) -> bytes:
        """Returns the object with a key of 7 bytes: a byte of flags, offset and length."""
        if key[0]:
            raise UnsupportedHdf5Error("a link is stored outside the blocks of its heap")
        at = 1 + self._offset_size
        offset, size = (int.from_bytes(part, "little") for part in (key[1:at], key[at:]))
        return self._source.read(self._locate(offset), size)

    def _locate(self, offset: int) -> int:
        """Returns the address of a byte of the heap; offsets run through all its blocks."""
        block, rows = self._root, self._rows
        while rows:  # an indirect block: a table of blocks, each smaller than itself
            row = (offset // (self._width * self._start)).bit_length()
            size = self._start << max(0, row - 1)
            column, offset = divmod(offset - (self._width * size if row else 0), size)
            if row >= rows or column >= self._width:
                raise Hdf5Error("a link is outside of its heap")
            block = self._read_table(block, rows)[row * self._width + column]
            rows = 0
            if row >= self._direct_rows:
                rows = size.bit_length() - (self._width * self._start).bit_length() + 1
        return block + offset

    def _read_table(self, block: int, rows: int) -> tuple[int, ...]:
        if block not in self._children:
            head = 13 + self._offset_size
            if self._source.read(block, 5) != b"FHIB\0":
                raise Hdf5Error("a block of a heap is damaged")
            table = self._source.view(block + head, 8 * rows * self._width)
            self._children[block] = struct.unpack(f"<{rows * self._width}Q", table)
        children = self._children[block]
        if len(children) != rows * self._width:
            raise Hdf5Error("a block of a heap is in it twice")
        return children


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


_RECORD_BYTES = 11  # bytes of a record: the hash of a name, and its key in the heap


def _iterate_records(source: Hdf5Source, address: int) -> Iterator[bytes]:
    """Yields the records of a version-2 B-tree of names, in no particular order."""
    head = source.unpack("4sBBIHHxxQH", address)
    signature, version, kind, node_size, record, depth, root, count = head
    max_records = (node_size - 10) // _RECORD_BYTES  # records of a leaf
    if (
        (signature, version, kind, record) != (b"BTHD", 0, 5, _RECORD_BYTES)
        or depth > 16
        or max_records < 1
    ):
        raise Hdf5Error("the index of a group is damaged")
    count_size, pointers = _count_bytes(max_records), _pointer_sizes(node_size, depth)
    pending = [(root, count, depth)] if count else []
    while pending:
        node, count, level = pending.pop()
        children = count + 1 if level else 0
        if count > max_records:
            raise Hdf5Error("a node of a group's index is damaged")
        body = source.read(node, 6 + count * _RECORD_BYTES + children * pointers[level])
        if body[:6] != (b"BTIN" if level else b"BTLF") + b"\0\x05":
            raise Hdf5Error("a node of a group's index is damaged")
        end = 6 + count * _RECORD_BYTES
        yield from (body[at : at + _RECORD_BYTES] for at in range(6, end, _RECORD_BYTES))
        for at in range(end, len(body), pointers[level] or 1):
            (child,) = unpack_fields("Q", body, at)
            child_count = int.from_bytes(body[at + 8 : at + 8 + count_size], "little")
            pending.append((child, child_count, level - 1))


def _pointer_sizes(node_size: int, depth: int) -> list[int]:
    """Returns the bytes of a pointer to a child, by the level of the node that has it.

    A pointer has an address, the record count of the child, and above level 1 that of its subtree.
    """
    total = most = (node_size - 10) // _RECORD_BYTES  # records in and below a node of a level
    pointers = [0]
    for level in range(1, depth + 1):
        size = 8 + _count_bytes(most) + (_count_bytes(total) if level > 1 else 0)
        fitting = (node_size - 10 - size) // (_RECORD_BYTES + size)
        total = (fitting + 1) * total + fitting
        pointers.append(size)
    return pointers


def _count_bytes(number: int) -> int:
    return (number.bit_length() + 7) // 8
