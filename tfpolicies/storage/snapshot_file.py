"""Files of snapshots: the variables that a policy acts with, mapped and shared by processes.

A file `snapshot-<16 digits of its SHA-256>.state` has a header of 64 bytes, a description in JSON,
and the memory of the variables, which begins at a multiple of 64 bytes::

    offset  0   8 bytes   magic, "TFPSNAP" and a zero byte
    offset  8   uint32    version of the format, 1
    offset 12   uint32    bytes of the description
    offset 16   uint64    bytes of the memory

The name and the checksum of a file are known to whoever refers to it: a policy map, or the index in
a checkpoint.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import CheckpointError
from tfpolicies.storage.content_file import ContentFile
from tfpolicies.storage.manifest import MAX_MANIFEST_BYTES, load_json, sha256
from tfpolicies.system.atomic import replace_on_success
from tfpolicies.system.regular_files import open_regular

_HEADER = struct.Struct("<8sIIQ")
_HEADER_BYTES = _ALIGNMENT = 64
_MAGIC, _VERSION = b"TFPSNAP\0", 1


class SnapshotContent(NamedTuple):
    """The content of a file.

    Attributes:
        description: JSON values.
        memory: read-only, uint8 `[n]`.
    """

    description: dict[str, Any]
    memory: np.ndarray


def write_snapshot(folder: Path, description: dict[str, Any], memory: np.ndarray) -> ContentFile:
    """Writes a file into a folder, unless it is there.

    Args:
        folder: made if it is missing.
        description: JSON values.
        memory: uint8 `[n]`.

    Raises:
        OSError: if it cannot be written.
    """
    text = json.dumps(description).encode()
    header = _HEADER.pack(_MAGIC, _VERSION, len(text), memory.nbytes).ljust(_HEADER_BYTES, b"\0")
    padding = b"\0" * (-len(text) % _ALIGNMENT)
    content = b"".join((header, text, padding, memory.data))
    digest = sha256(content)
    file = ContentFile(folder / make_snapshot_name(digest), digest, len(content))
    if not file.exists:
        folder.mkdir(parents=True, exist_ok=True)
        with replace_on_success(file.path) as temporary:
            temporary.write_bytes(content)
    return file


def make_snapshot_name(digest: str) -> str:
    """Returns the name of a file.

    >>> make_snapshot_name("03b1e51cc59b8a0f66")
    'snapshot-03b1e51cc59b8a0f.state'
    """
    return f"snapshot-{digest[:16]}.state"


def map_snapshot(file: ContentFile) -> SnapshotContent:
    """Returns the content of a file; processes that map it share the memory.

    Raises:
        CheckpointError: if it is missing, damaged or of another version.
    """
    try:
        with open_regular(file.path) as opened:
            content = np.memmap(opened, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(file.path)!r} cannot be read: {error}.") from error
    fault = _find_fault(file, content)
    if fault:
        raise CheckpointError(f"{str(file.path)!r} is damaged: {fault}. Copy the file again.")
    _, _, text_bytes, memory_bytes = _HEADER.unpack(bytes(content[: _HEADER.size]))
    text = bytes(content[_HEADER_BYTES : _HEADER_BYTES + text_bytes])
    start = _HEADER_BYTES + text_bytes + -text_bytes % _ALIGNMENT
    try:
        description = load_json(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(file.path)!r} is not a snapshot: {error}.") from error
    if not isinstance(description, dict):
        raise CheckpointError(f"{str(file.path)!r} is not a snapshot: it has no description.")
    return SnapshotContent(description, np.asarray(content)[start : start + memory_bytes])


def _find_fault(file: ContentFile, content: np.ndarray) -> str:
    """Returns the fault of a header or checksum; "" if there is none."""
    if content.size != file.size or content.size < _HEADER_BYTES:
        return f"it has {content.size} bytes instead of {file.size}"
    if sha256(content.data) != file.sha256:
        return "its SHA-256 differs"
    magic, version, text_bytes, memory_bytes = _HEADER.unpack(bytes(content[: _HEADER.size]))
    if magic != _MAGIC:
        return "it is not a snapshot"
    if version != _VERSION:
        return f"its format has version {version}, supported is {_VERSION}"
    text_end = _HEADER_BYTES + text_bytes + -text_bytes % _ALIGNMENT
    if text_bytes > MAX_MANIFEST_BYTES or text_end + memory_bytes != content.size:
        return "its header does not fit its size"
    return ""
