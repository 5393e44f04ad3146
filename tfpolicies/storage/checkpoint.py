"""Checkpoints: folders of one JSON manifest and HDF5 array files, whole at any instant.

Algorithms and policies use the same format. The files that a manifest lists are named by their
content (`weights-<hash>.h5`, `policies/main-<hash>/`), so writing a new checkpoint never touches
the old files. The manifest is replaced last; then the files that no manifest lists are removed::

    run/checkpoint/
    ├── algorithm.json                       lists name and checksum of all below
    ├── counters-03b1e51cc59b8a0f.h5         16 digits of the file's SHA-256
    ├── segment-77a0f3c9d2be0146.h5          constant rows; folders may share the file by links
    └── policies/
        └── main-9c1f0ab7315d2e44/           16 digits of the SHA-256 of its policy.json
            ├── policy.json                  a complete checkpoint of the policy
            └── weights-5d41402abc4b2a76.h5

One process writes to a folder at a time; any number may read it meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import CheckpointError, UnknownPolicyError
from tfpolicies.storage.content_file import ContentFile
from tfpolicies.storage.hdf5_bytes import check_arrays, pack_arrays, unpack_arrays
from tfpolicies.storage.manifest import (
    ARRAY_FILE,
    GROUP_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    POLICIES,
    POLICY_FOLDER,
    SEGMENTS,
    check_new_manifest,
    dump_manifest,
    load_json,
    make_invalid_error,
    parse_manifest,
    sha256,
)
from tfpolicies.storage.segment_files import Segment, SegmentFileRef
from tfpolicies.system.atomic import (
    is_temporary,
    make_folder,
    remove_file,
    remove_if_empty,
    sync_folder,
    write_atomically,
)
from tfpolicies.system.paths import describe_path, resolve_path
from tfpolicies.system.regular_files import get_size, open_regular, read_content, read_regular

_MANIFEST_NAMES = ("algorithm.json", "policy.json")
# Errors of reading a JSON file of another program as a manifest.
_MANIFEST_ERRORS = (OSError, ValueError, RecursionError, AttributeError, TypeError, LookupError)

Arrays = Mapping[str, Mapping[str, np.ndarray]]


class CheckpointData(NamedTuple):
    """A checkpoint to be written: of an algorithm, or of a policy inside it."""

    manifest_name: str  # such as "policy.json"
    manifest: dict[str, Any]  # JSON values, with a "type"
    arrays: Arrays  # group -> name -> array


class Checkpoint(NamedTuple):
    """Checked result of `read_checkpoint`."""

    manifest: dict[str, Any]  # the writer's entries and those that this module adds
    arrays: dict[str, dict[str, np.ndarray]]  # group -> name -> array, in the writer's order
    policies: dict[str, Checkpoint]  # empty in the checkpoint of one policy
    segments: Sequence[Segment] = ()  # checked when their rows are read


# Writing ------------------------------------------------------------------------------------------


def write_checkpoint(
    folder: str | os.PathLike[str],
    manifest_name: str,
    manifest: dict[str, Any],
    arrays: Arrays,
    *,
    policies: Mapping[str, CheckpointData] | None = None,
    segments: Sequence[Segment] = (),
) -> None:
    """Writes a checkpoint into `folder`, and replaces an existing one as a whole.

    If the process is killed at any instant, the old or the new checkpoint is whole. Array files and
    policies that have not changed are not written again, nor are segments that were written to any
    folder. Files of other programs are never touched, and checkpoints under another manifest name
    in the same folder stay valid.

    Args:
        folder: Made if missing, with its parents.
        manifest_name: Name of the JSON file, such as "policy.json".
        manifest: JSON values only (see `encode_value` for others), with a "type" such as
            "Policy". `format_version`, `tfpolicies_version`, `arrays`, `policies`, `segments` and
            `compute_checksum` are added.
        arrays: Group name ("weights", "optimizer") -> array name -> array of bools, integers or
            floats of any shape. Each group becomes one file.
        policies: Policy id -> its checkpoint, each written to a separate folder.
        segments: Constant rows, each in a separate file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checkpoint(
    ...         folder, "policy.json", {"type": "Policy"}, {"weights": {"bias": np.zeros(2)}}
    ...     )
    ...     read_checkpoint(folder, "policy.json", kind="Policy").arrays
    {'weights': {'bias': array([0., 0.])}}
    """
    root, parts = Path(folder), dict(policies or {})
    checkpoint_data = CheckpointData(manifest_name, manifest, arrays)
    for part in (checkpoint_data, *parts.values()):
        _check_part(part)
    for policy_id in parts:
        if not isinstance(policy_id, str):
            raise CheckpointError(f"`policies`: an id must be a string, got {policy_id!r}.")
    with _explain_disk_errors(root):
        policy_entries = {key: _write_policy(root, key, part) for key, part in parts.items()}
        make_folder(root)
        segment_entries = [segment.write(root) for segment in segments]
        _write_part(root, *_serialize_part(checkpoint_data, policy_entries, segment_entries))
        _remove_unlisted(root)


def _write_policy(root: Path, policy_id: str, part: CheckpointData) -> dict[str, Any]:
    """Writes one policy to the folder named by its content; returns its entry for the manifest."""
    files, name, text = _serialize_part(part)
    digest = sha256(text)
    folder = f"{POLICIES}/{re.sub('[^A-Za-z0-9_.-]', '_', policy_id)[:64]}-{digest[:16]}"
    _write_part(root / folder, files, name, text)
    return {"folder": folder, "manifest": name, "type": part.manifest["type"], "sha256": digest}


def _write_part(folder: Path, files: dict[str, bytes], name: str, text: bytes) -> None:
    """Writes the files that the manifest lists, then the manifest; the order matters."""
    make_folder(folder)
    for file, image in files.items():
        write_atomically(folder / file, image)
    sync_folder(folder)
    write_atomically(folder / name, text)
    sync_folder(folder)


def _serialize_part(
    part: CheckpointData,
    policies: dict[str, Any] | None = None,
    segments: list[dict[str, Any]] | None = None,
) -> tuple[dict[str, bytes], str, bytes]:
    """Returns the array files (name -> bytes), the manifest's name and the manifest's bytes."""
    files, entries = {}, {}
    for group, arrays in part.arrays.items():
        image = pack_arrays(arrays)
        digest = sha256(image)
        file = f"{group}-{digest[:16]}.h5"
        files[file] = image
        entries[group] = {"file": file, "sha256": digest, "bytes": len(image)}
    return (
        files,
        part.manifest_name,
        dump_manifest(part.manifest, entries, policies or {}, segments or []),
    )


def _check_part(part: CheckpointData) -> None:
    check_new_manifest(part.manifest_name, part.manifest)
    for group, group_arrays in part.arrays.items():
        if not isinstance(group, str) or not GROUP_NAME.fullmatch(group):
            raise CheckpointError(
                f"`arrays`: a group's name must be letters, digits and underscores, got {group!r}."
            )
        check_arrays(group, group_arrays)


@contextlib.contextmanager
def _explain_disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Checkpoint {str(root)!r} could not be written: {error}. An earlier checkpoint there "
            "is still whole. Free some space or name another folder, then write again."
        ) from error


# Removing -----------------------------------------------------------------------------------------


def _remove_unlisted(folder: Path) -> None:
    """Removes files of this module in `folder` that no manifest there lists any more."""
    files, folders = _read_listed_names(folder)
    for path in _list_folder(folder):
        stale = ARRAY_FILE.fullmatch(path.name) and path.name not in files
        if stale or is_temporary(path.name):
            remove_file(path)
    for path in _list_folder(folder / POLICIES):
        if not POLICY_FOLDER.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        if f"{POLICIES}/{path.name}" not in folders:
            _remove_manifest(path)
        _remove_unlisted(path)
        remove_if_empty(path)
    remove_if_empty(folder / POLICIES)


def _read_listed_names(folder: Path) -> tuple[set[str], set[str]]:
    files: set[str] = set()
    folders: set[str] = set()
    for path in _list_folder(folder):
        if not MANIFEST_NAME.fullmatch(path.name):
            continue
        with contextlib.suppress(*_MANIFEST_ERRORS):
            manifest = load_json(read_regular(path, MAX_MANIFEST_BYTES))
            files |= {entry["file"] for entry in manifest.get("arrays", {}).values()}
            files |= {entry["file"] for entry in manifest.get(SEGMENTS, [])}
            folders |= {entry["folder"] for entry in manifest.get(POLICIES, {}).values()}
    return files, folders


def _remove_manifest(folder: Path) -> None:
    """Removes the manifest whose checksum is in the name of `folder`; no other file matches."""
    match = POLICY_FOLDER.fullmatch(folder.name)
    for path in _list_folder(folder):
        if match and MANIFEST_NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                if sha256(read_regular(path, MAX_MANIFEST_BYTES))[:16] == match[1]:
                    remove_file(path)


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


# Reading ------------------------------------------------------------------------------------------


class _VanishedError(CheckpointError):
    """A listed file is gone: it was lost, or another process has just replaced the checkpoint."""


def read_checkpoint(
    folder: str | os.PathLike[str],
    manifest_name: str,
    *,
    kind: str,
    groups: Collection[str] | None = None,
    policies: Collection[str] | None = None,
) -> Checkpoint:
    """Reads the checkpoint in `folder`, and checks everything it returns.

    Sizes and checksums are compared before HDF5 parses a byte, and no code chosen by the file
    runs. Segments are checked for their size; the rest of them is checked when their rows are read.
    A checkpoint that is replaced meanwhile is read whole, old or new.

    Args:
        folder: The folder of `write_checkpoint`, as the caller wrote it.
        manifest_name: Name of the JSON file, such as "policy.json".
        kind: The "type" that the manifest must have, such as "Policy".
        groups: Groups of arrays to read of the checkpoint itself; all by default. A name that the
            checkpoint does not have is left out.
        policies: Ids of the policies to read; all by default.

    Raises:
        CheckpointError: if the folder is not found, or something in it is missing, foreign, of
            another version or damaged. The message names the file and the reason.
        UnknownPolicyError: if the checkpoint has no policy of one of the ids.
    """
    root = resolve_path(folder)
    previous_text: bytes | None = None
    while True:
        text = _read_manifest_text(folder, root, manifest_name)
        try:
            return _load_checkpoint(root, manifest_name, text, kind, groups, policies)
        except _VanishedError:
            if text == previous_text:
                raise
            previous_text = text  # the checkpoint may have been replaced: read the manifest again


def read_manifest(
    folder: str | os.PathLike[str], manifest_name: str, *, kind: str
) -> dict[str, Any]:
    """Returns the checked manifest of a checkpoint without opening an array file.

    Raises:
        CheckpointError: as `read_checkpoint` does.
    """
    root = resolve_path(folder)
    text = _read_manifest_text(folder, root, manifest_name)
    return parse_manifest(root / manifest_name, text, kind)


def _load_checkpoint(
    root: Path,
    manifest_name: str,
    text: bytes,
    kind: str,
    groups: Collection[str] | None,
    policies: Collection[str] | None,
) -> Checkpoint:
    path = root / manifest_name
    manifest = parse_manifest(path, text, kind)
    files, parts = manifest["arrays"], manifest[POLICIES]
    unknown = sorted(set(policies or ()) - set(parts))
    if unknown:
        raise UnknownPolicyError(
            f"`policies`: the checkpoint {str(root)!r} has no {unknown}; it has {sorted(parts)}."
        )
    arrays = {
        group: _read_arrays(root, entry)
        for group, entry in files.items()
        if groups is None or group in groups
    }
    loaded_policies = {
        policy_id: _read_policy(root, entry)
        for policy_id, entry in parts.items()
        if policies is None or policy_id in policies
    }
    segments = [_make_segment(root, entry) for entry in manifest.pop(SEGMENTS)]
    return Checkpoint(manifest, arrays, loaded_policies, segments)


def _make_segment(root: Path, entry: dict[str, Any]) -> Segment:
    file = ContentFile(root / entry["file"], entry["sha256"], entry["bytes"])
    if not file.exists:
        raise _VanishedError(
            f"{str(file.path)!r} is missing or truncated, though the manifest lists it."
        )
    return Segment(None, SegmentFileRef(file))


def make_missing_checkpoint_error(user_path: str | os.PathLike[str], root: Path) -> CheckpointError:
    """Returns the error for a folder that does not exist.

    Args:
        user_path: the folder, as the caller wrote it.
        root: the folder, absolute.
    """
    run_folders = [folder for folder in root.parents[:2] if (folder / "run.json").exists()]
    hint = _suggest_checkpoint(run_folders[0]) if run_folders else ""
    name = describe_path(user_path, root)
    return CheckpointError(f"Checkpoint {name} not found: there is no such folder.{hint}")


def _read_manifest_text(user_path: str | os.PathLike[str], root: Path, manifest_name: str) -> bytes:
    if not root.is_dir():
        raise make_missing_checkpoint_error(user_path, root)
    try:
        return read_regular(root / manifest_name, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(
            f"Checkpoint {describe_path(user_path, root)} does not seem to be valid: it has no "
            f"{manifest_name}.{_suggest_checkpoint(root)}"
        ) from None
    except OSError as error:
        raise make_invalid_error(root / manifest_name, f"it cannot be read ({error})") from error


def _suggest_checkpoint(root: Path) -> str:
    """Returns a hint at the newest checkpoint below a folder without one, such as a run's."""
    patterns = ("*", "*/*", "*/checkpoints/*")
    manifests = [
        path
        for pattern in patterns
        for name in _MANIFEST_NAMES
        for path in root.glob(f"{pattern}/{name}")
    ]
    if not manifests:
        return ""
    newest = max(manifests, key=lambda path: path.stat().st_mtime).parent
    return f" There is a checkpoint in {str(root)!r}: give {str(newest)!r}."


def _read_policy(root: Path, entry: dict[str, Any]) -> Checkpoint:
    folder, name = root / entry["folder"], entry["manifest"]
    text = _read_file(folder / name, entry["sha256"], limit=MAX_MANIFEST_BYTES)
    return _load_checkpoint(folder, name, text, entry["type"], None, None)


def _read_arrays(root: Path, entry: dict[str, Any]) -> dict[str, np.ndarray]:
    path = root / entry["file"]
    image = _read_file(path, entry["sha256"], size=entry["bytes"])
    try:
        return unpack_arrays(image)
    except CheckpointError as error:
        raise CheckpointError(f"{str(path)!r} is not an array file: {error}.") from error


def _read_file(
    path: Path, digest: str, *, limit: int | None = None, size: int | None = None
) -> bytes:
    try:
        with open_regular(path) as file:
            actual_size = get_size(file)
            if size is not None and actual_size != size:
                raise CheckpointError(
                    f"{str(path)!r} is damaged: it has {actual_size} bytes, the manifest says "
                    f"{size}."
                )
            content = read_content(file, limit)
    except FileNotFoundError:
        raise _VanishedError(f"{str(path)!r} is missing, though the manifest lists it.") from None
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}.") from error
    if sha256(content) != digest:
        raise CheckpointError(
            f"{str(path)!r} is damaged: its SHA-256 differs from the one in the manifest. "
            "Use another checkpoint, or copy the file again."
        )
    return content
