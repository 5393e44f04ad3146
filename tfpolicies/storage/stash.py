"""Stash: a folder of memory images of policy states, each read at once, or mapped and shared.

An entry is a file `<name>.state`: a header of 64 bytes, then the memory of a state as it is::

    offset  0   8 bytes   magic, "TFPSTASH"
    offset  8   uint32    version of the format, 1
    offset 12   uint32    CRC-32 of the image
    offset 16   uint64    bytes of the image

An entry may have a record, `<name>.json`: the data needed to make a policy of it in another
process. Files are replaced as a whole, so readers find the old or the new one. An image that a
record describes is not replaced: the next version of the policy gets another name, and the old
entry is removed after the record of the new one is written. Entries are named
`<policy id>~<random suffix>`, so that messages can name the policy.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import struct
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote

import numpy as np

from tfpolicies.errors import StashError
from tfpolicies.storage.manifest import MAX_MANIFEST_BYTES, load_json
from tfpolicies.storage.spaces_json import check_space_sizes
from tfpolicies.system.atomic import remove_file, replace_on_success, sync_folder, write_atomically
from tfpolicies.system.folder_lock import FolderLock, make_locked_folder, remove_abandoned
from tfpolicies.system.regular_files import open_regular, read_regular

HEADER_BYTES = 64
_HEADER_STRUCT = struct.Struct("<8sIIQ")
_MAGIC, _VERSION = b"TFPSTASH", 1
_TEMPORARY_PREFIX = "tfpolicies-stash-"  # prefix of the names of temporary folders
_MAX_NAME_LENGTH = 120  # characters of an entry's name that its file name may contain


class RecordSummary(NamedTuple):
    """Summary of a record.

    Attributes:
        name: of its entry.
        policy_ids: the ids of the policy.
        number: increases with each record written to this folder.
    """

    name: str
    policy_ids: list[str]
    number: int


class Stash:
    """A folder of images by name; one process writes to it, any number may read.

    Args:
        folder: made when the first image is written; None for a temporary one, which is removed
            with the stash. If the process is killed, the next one that makes a temporary stash
            removes it.
        scratch: a folder on the same disk that no other process writes to, for temporary files;
            None for `folder`.
    """

    def __init__(self, folder: Path | None = None, scratch: Path | None = None) -> None:
        self._folder = folder
        self._scratch = scratch
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._folder_lock: FolderLock | None = None  # of a temporary folder

    @property
    def folder(self) -> Path:
        with self._lock:
            if self._folder is None:
                remove_abandoned(Path(tempfile.gettempdir()).glob(f"{_TEMPORARY_PREFIX}*"))
                self._folder, self._folder_lock = make_locked_folder(
                    lambda: Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX))
                )
                weakref.finalize(self, _remove_temporary, self._folder, self._owner)
            return self._folder

    def get_path(self, name: str, ending: str = "state") -> Path:
        """Returns the file of an entry; its name may have any characters."""
        safe = quote(name, safe=" ").replace(".", "%2E")
        if len(safe) > _MAX_NAME_LENGTH:
            digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
            safe = f"{safe[:_MAX_NAME_LENGTH]}-{digest}"
        return self.folder / f"{safe}.{ending}"

    def write(self, name: str, image: np.ndarray) -> None:
        """Writes an image, uint8 `[n]`.

        Raises:
            StashError: if it cannot be written; the old entry is untouched then.
        """
        self._write(name, image, os.replace)

    def write_new(self, name: str, image: np.ndarray) -> bool:
        """Writes an image unless there is one (atomically); returns whether it was written.

        Raises:
            StashError: if it cannot be written.
        """
        return self._write(name, image, _link_to_free_name)

    def _write(self, name: str, image: np.ndarray, move: Callable[[Path, Path], None]) -> bool:
        if os.getpid() != self._owner:
            raise StashError(
                f"The policy {get_policy_id(name)!r} cannot be written to the stash: it "
                f"belongs to process {self._owner}, from which this one was forked. It stays in "
                "memory. Make a PolicyMap in this process, or one whose `capacity` holds all "
                "policies."
            )
        path = self.get_path(name)
        header = _HEADER_STRUCT.pack(_MAGIC, _VERSION, zlib.crc32(image.data), image.nbytes)
        try:
            self.make_folders()
            with (
                replace_on_success(path, self._scratch, move) as temporary,
                open(temporary, "wb", buffering=0) as file,
            ):
                _write_all(file, header.ljust(HEADER_BYTES, b"\0"))
                _write_all(file, image.data)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            raise StashError(
                f"The policy {get_policy_id(name)!r} cannot be written to the stash: {error}. It "
                "stays in memory. Free some space, or raise `capacity`, so that fewer policies go "
                "there."
            ) from error

    def make_folders(self) -> None:
        """Makes the folders that images are written to.

        Raises:
            OSError: if one of them cannot be made.
        """
        for folder in (self.folder, self._scratch or self.folder):
            folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str, size: int) -> np.ndarray:
        """Returns a new array with an image of `size` bytes.

        Raises:
            StashError: if it is missing, damaged or of another size.
        """
        image = np.empty(size, np.uint8)
        try:
            with open_regular(self.get_path(name)) as file:
                header = file.read(HEADER_BYTES)
                count = file.readinto(image.data)
                surplus = file.read(1)
        except OSError as error:
            self._raise_unreadable(name, error)
        self._check(name, header, image, count, surplus)
        return image

    def map(self, name: str, size: int) -> np.ndarray:
        """Returns an image as a read-only memory map: processes that map it share its memory.

        Raises:
            StashError: if it is missing, damaged or of another size.
        """
        try:
            with open_regular(self.get_path(name)) as file:
                memory_map = np.memmap(file, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            self._raise_unreadable(name, error)
        image = np.asarray(memory_map)[HEADER_BYTES : HEADER_BYTES + size]
        self._check(
            name,
            bytes(memory_map[:HEADER_BYTES]),
            image,
            image.size,
            memory_map[HEADER_BYTES + size :],
        )
        return image

    def _raise_unreadable(self, name: str, error: Exception) -> NoReturn:
        policy_id = get_policy_id(name)
        raise StashError(
            f"The policy {policy_id!r} was stashed and cannot be read back: {error}. Other "
            f"policies are not affected; `del policy_map[{policy_id!r}]` removes it, or "
            "assign it again."
        ) from error

    def _check(
        self, name: str, header: bytes, image: np.ndarray, count: int, surplus: bytes | np.ndarray
    ) -> None:
        fault = None
        if len(header) < HEADER_BYTES or header[: len(_MAGIC)] != _MAGIC:
            fault = "it is not a stash file"
        else:
            _, version, crc, size = _HEADER_STRUCT.unpack(header[: _HEADER_STRUCT.size])
            if version != _VERSION:
                fault = f"its format has version {version}, supported is {_VERSION}"
            elif size != image.size or count != size or len(surplus):
                fault = f"it does not have the expected {image.size} bytes"
            elif zlib.crc32(image.data) != crc:
                fault = "its checksum differs from its content"
        if fault:
            path = str(self.get_path(name))
            self._raise_unreadable(name, StashError(f"{path!r} is damaged: {fault}"))

    def has(self, name: str) -> bool:
        """Returns True if there is an image under a name."""
        return self.get_path(name).is_file()

    def get_size(self, name: str) -> int:
        """Returns the bytes of an entry's file.

        Raises:
            StashError: if it is missing.
        """
        try:
            return self.get_path(name).stat().st_size
        except OSError as error:
            self._raise_unreadable(name, error)

    def remove(self, name: str) -> None:
        """Removes an entry and its record, if they exist."""
        remove_file(self.get_path(name, "json"))
        remove_file(self.get_path(name))

    # -- records ------------------------------------------------------------------------------

    def write_record(self, name: str, record: Mapping[str, Any]) -> None:
        """Writes the data needed to make a policy of an entry: JSON values."""
        content = json.dumps({"name": name, **record}, indent=1).encode()
        try:
            self.make_folders()
            write_atomically(self.get_path(name, "json"), content, scratch=self._scratch)
            sync_folder(self.folder)
        except OSError as error:
            raise StashError(
                f"The record of the policy {get_policy_id(name)!r} cannot be written to the "
                f"stash: {error}."
            ) from error

    def read_record(self, name: str) -> dict[str, Any]:
        """Reads a record of `write_record`.

        Raises:
            StashError: if it is missing or damaged.
        """
        try:
            record = load_json(read_regular(self.get_path(name, "json"), MAX_MANIFEST_BYTES))
            if record["name"] != name:
                raise ValueError(f"it is the record of {record['name']!r:.80}")
            if not isinstance(record["policy"], dict):
                raise ValueError("it holds no policy")
            check_space_sizes(record)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            self._raise_unreadable(name, error)
        return dict(record)

    def has_record(self, name: str) -> bool:
        """Returns True if there is a record under a name."""
        return self.get_path(name, "json").is_file()

    def list_records(self) -> list[RecordSummary]:
        """Returns summaries of the readable records whose entries exist, the newest record last."""
        summaries = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                record = load_json(read_regular(path, MAX_MANIFEST_BYTES))
                name, policy_ids = record["name"], list(record["policy_ids"])
                number = record.get("number", 0)  # not written by earlier versions
            except (OSError, ValueError, TypeError, KeyError, RecursionError):
                continue
            is_valid = all(isinstance(x, str) for x in (name, *policy_ids)) and type(number) is int
            if is_valid and self.get_path(name, "json") == path and self.has(name):
                summaries.append(RecordSummary(name, policy_ids, number))
        return sorted(summaries, key=lambda summary: summary.number)

    def remove_unrecorded(self) -> None:
        """Removes images without a record, left by a process that was killed."""
        for path in self.folder.glob("*.state"):
            if not path.with_suffix(".json").exists():
                remove_file(path)


def make_entry_name(policy_id: str) -> str:
    return f"{policy_id}~{secrets.token_hex(4)}"


def get_policy_id(name: str) -> str:
    """Returns the policy id in an entry's name.

    >>> get_policy_id("main~v2~0f3a")
    'main~v2'
    """
    return name.rpartition("~")[0]


def _link_to_free_name(temporary: Path, path: Path) -> None:
    """Gives a file its name, which must be free."""
    os.link(temporary, path)
    remove_file(temporary)


def _remove_temporary(folder: Path, owner: int) -> None:
    """Removes a temporary stash, unless this process is a fork of its owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _write_all(file: RawIOBase, content: bytes | memoryview) -> None:
    view = memoryview(content).cast("B")
    while len(view):
        view = view[file.write(view) :]
