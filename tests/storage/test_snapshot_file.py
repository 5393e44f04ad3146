"""Files of snapshots: written by content, mapped, and checked before they are used."""

import hashlib
import os
import struct
from unittest.mock import Mock

import numpy as np
import pytest

from tfpolicies.errors import CheckpointError
from tfpolicies.storage.content_file import ContentFile
from tfpolicies.storage.snapshot_file import map_snapshot, write_snapshot

MEMORY = np.arange(192, dtype=np.uint8)
DESCRIPTION = {"global_timestep": 7, "hyperparameters": {"lr": 0.5}}


def test_a_snapshot_is_mapped_as_it_was_written(tmp_path):
    file = write_snapshot(tmp_path / "stash", DESCRIPTION, MEMORY)
    assert file.path.name == f"snapshot-{file.sha256[:16]}.state"
    assert hashlib.sha256(file.path.read_bytes()).hexdigest() == file.sha256
    content = map_snapshot(file)
    assert content.description == DESCRIPTION
    np.testing.assert_array_equal(content.memory, MEMORY)
    assert not content.memory.flags.writeable
    assert content.memory.ctypes.data % 64 == 0


def test_equal_snapshots_are_one_file(tmp_path):
    first = write_snapshot(tmp_path, DESCRIPTION, MEMORY)
    written_at = first.path.stat().st_mtime_ns
    assert write_snapshot(tmp_path, DESCRIPTION, MEMORY.copy()) == first
    assert first.path.stat().st_mtime_ns == written_at
    assert write_snapshot(tmp_path, {**DESCRIPTION, "global_timestep": 8}, MEMORY) != first


def test_folders_share_a_snapshot_by_a_hard_link_or_else_a_copy(tmp_path, monkeypatch):
    file = write_snapshot(tmp_path / "stash", DESCRIPTION, MEMORY)
    (tmp_path / "checkpoint").mkdir()
    linked = file.link_into(tmp_path / "checkpoint")
    assert linked.path.samefile(file.path)
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError("another disk")))
    (tmp_path / "other").mkdir()
    copied = file.link_into(tmp_path / "other")
    assert not copied.path.samefile(file.path)
    np.testing.assert_array_equal(map_snapshot(copied).memory, MEMORY)


def forge(folder, *, magic=b"TFPSNAP\0", version=1, text=b"{}", text_bytes=None, memory_bytes=64):
    """Writes a file with a correct checksum and the given header."""
    size = len(text) if text_bytes is None else text_bytes
    header = struct.pack("<8sIIQ", magic, version, size, memory_bytes).ljust(64, b"\0")
    content = header + text.ljust(64, b"\0") + bytes(64)
    path = folder / "forged.state"
    path.write_bytes(content)
    return ContentFile(path, hashlib.sha256(content).hexdigest(), len(content))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": b"TFPSTASH"}, "it is not a snapshot"),
        ({"version": 2}, "its format has version 2, supported is 1"),
        ({"memory_bytes": 128}, "its header does not fit its size"),
        ({"text_bytes": 2**32 - 1}, "its header does not fit its size"),
        ({"text": b"[1]"}, "it has no description"),
        ({"text": b"{"}, "is not a snapshot"),
    ],
)
def test_a_file_whose_header_is_wrong_is_refused(changes, reason, tmp_path):
    assert map_snapshot(forge(tmp_path)).description == {}
    with pytest.raises(CheckpointError, match=reason):
        map_snapshot(forge(tmp_path, **changes))


def test_a_damaged_or_missing_file_is_refused(tmp_path):
    file = write_snapshot(tmp_path, DESCRIPTION, MEMORY)
    content = bytearray(file.path.read_bytes())
    content[-1] ^= 1
    file.path.write_bytes(content)
    with pytest.raises(CheckpointError, match="its SHA-256 differs"):
        map_snapshot(file)
    file.path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"it has \d+ bytes instead of \d+"):
        map_snapshot(file)
    file.path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        map_snapshot(file)
