"""The manifest of a checkpoint: checks, encoding and decoding."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tfpolicies._version import __version__
from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import CheckpointError
from tfpolicies.storage.spaces_json import check_space_sizes

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 1 << 25  # bytes of a manifest
_MAX_VALUES, _MAX_CONTAINERS = 1 << 22, 1 << 20  # limits of values, and of lists and objects

ALGORITHM_MANIFEST, POLICIES = "algorithm.json", "policies"
SEGMENT, SEGMENTS = "segment", "segments"
_RESERVED_ENTRIES = (
    "format_version",
    "tfpolicies_version",
    "arrays",
    POLICIES,
    SEGMENTS,
    "checksum",
)
GROUP_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
MANIFEST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.json")
ARRAY_FILE = re.compile(r"[A-Za-z][A-Za-z0-9_]*-[0-9a-f]{16}\.h5")
POLICY_FOLDER = re.compile(r"[A-Za-z0-9_.-]*-([0-9a-f]{16})")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_new_manifest(name: str, manifest: dict[str, Any]) -> None:
    """Checks that `manifest` can be written under `name`."""
    if not isinstance(name, str) or not MANIFEST_NAME.fullmatch(name):
        raise CheckpointError(
            f"`manifest_name` must be a plain file name ending in .json, got {name!r}."
        )
    if not isinstance(manifest, dict) or not isinstance(manifest.get("type"), str):
        raise CheckpointError(
            f"`manifest` for {name} must be a dict with a string 'type', got {manifest!r}."
        )
    reserved = sorted(set(manifest) & set(_RESERVED_ENTRIES))
    if reserved:
        raise CheckpointError(f"`manifest` for {name} must not set {reserved}: they are reserved.")
    _check_json(name, manifest)


def dump_manifest(
    manifest: dict[str, Any],
    arrays: dict[str, Any],
    policies: dict[str, Any],
    segments: list[dict[str, Any]],
) -> bytes:
    """Returns the content of the manifest file: all entries, and their checksum.

    Segments are listed only if there are any.
    """
    check_space_sizes(manifest)
    versions = {"format_version": FORMAT_VERSION, "tfpolicies_version": __version__}
    entries = {**manifest, **versions, "arrays": arrays, POLICIES: policies}
    if segments:
        entries[SEGMENTS] = segments
    entries["checksum"] = compute_checksum(entries)
    text = (json.dumps(entries, indent=2) + "\n").encode()
    reason = _find_excess(text)
    if reason:
        raise CheckpointError(
            f"The manifest of a checkpoint cannot be written: {reason}. Put large arrays of "
            "configs and of states of environments elsewhere."
        )
    return text


def parse_manifest(path: Path, text: bytes, kind: str) -> dict[str, Any]:
    """Parses the manifest in `text`, and checks every entry that lists a file."""
    try:
        manifest = load_json(text)
    except (ValueError, RecursionError) as error:
        raise make_invalid_error(path, f"it is not JSON ({error})") from error
    if not isinstance(manifest, dict):
        raise make_invalid_error(path, f"it holds a JSON {type(manifest).__name__}, not an object")
    if manifest.get("type") != kind:
        raise CheckpointError(
            f"{str(path)!r} has type {manifest.get('type')!r}, but must have {kind!r}. "
            "Name a checkpoint of that type."
        )
    version = manifest.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(
            f"{str(path)!r} has format version {version!r}, written by tfpolicies "
            f"{manifest.get('tfpolicies_version')!r}; this is tfpolicies {__version__}, which "
            f"reads version {FORMAT_VERSION}. Use the tfpolicies that wrote it, or a newer one."
        )
    if manifest.get("checksum") != compute_checksum(manifest):
        raise make_invalid_error(
            path, "its checksum differs: it was damaged or edited after it was written"
        )
    check_space_sizes(manifest)
    for entry in ("arrays", POLICIES):
        if not isinstance(manifest.get(entry), dict):
            raise make_invalid_error(path, f"its entry {entry!r} is not an object")
    for group, file_entry in manifest["arrays"].items():
        _check_array_entry(path, group, file_entry)
    for policy_id, file_entry in manifest[POLICIES].items():
        _check_policy_entry(path, policy_id, file_entry)
    if not isinstance(manifest.setdefault(SEGMENTS, []), list):
        raise make_invalid_error(path, f"its entry {SEGMENTS!r} is not a list")
    for file_entry in manifest[SEGMENTS]:
        _check_array_entry(path, SEGMENT, file_entry)
    return manifest


def load_json(text: bytes) -> Any:
    """Parses a JSON text, unless it is so long that it could exhaust the memory."""
    reason = _find_excess(text)
    if reason:
        raise ValueError(reason)
    return json.loads(text)


def _find_excess(text: bytes) -> str | None:
    """Returns a message about the exceeded limit of a JSON text, or None."""
    values, containers = text.count(b","), text.count(b"[") + text.count(b"{")
    for count, limit, unit in (
        (len(text), MAX_MANIFEST_BYTES, "bytes"),
        (values, _MAX_VALUES, "values"),
        (containers, _MAX_CONTAINERS, "lists and objects"),
    ):
        if count > limit:
            return f"it has about {count} {unit}, and the limit is {limit}"
    return None


def sha256(content: bytes | memoryview) -> str:
    """Returns 64 hexadecimal digits, by which files are named and checked."""
    return hashlib.sha256(content).hexdigest()


def make_invalid_error(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{str(path)!r} does not seem to be valid: {reason}.")


def _check_json(name: str, manifest: dict[str, Any]) -> None:
    for key, value in manifest.items():
        try:
            text = json.dumps({key: value}, allow_nan=False)
            exact = json.loads(text) == {key: value}
        except (TypeError, ValueError, RecursionError):
            exact = False
        if not exact:
            raise CheckpointError(
                f"`manifest` for {name}: entry {key!r} has values that are not JSON, or would "
                "not read back as they are. Pass it through `encode_value(...)`."
            )


def _check_array_entry(path: Path, group: str, entry: Json) -> None:
    subject = f"the entry of array group {group!r}"
    file, digest, size = _get_fields(path, subject, entry, "file", "sha256", "bytes")
    if not _is_matching_text(digest, _SHA256) or type(size) is not int or size < 0:
        raise make_invalid_error(path, f"{subject} has no proper checksum or size")
    if not _is_matching_text(file, ARRAY_FILE) or file != f"{group}-{digest[:16]}.h5":
        raise make_invalid_error(
            path, f"{subject} names {file!r}, which is not an array file of this folder"
        )


def _check_policy_entry(path: Path, policy_id: str, entry: Json) -> None:
    subject = f"the entry of policy {policy_id!r}"
    folder, name, kind, digest = _get_fields(
        path, subject, entry, "folder", "manifest", "type", "sha256"
    )
    if not _is_matching_text(digest, _SHA256) or not isinstance(kind, str):
        raise make_invalid_error(path, f"{subject} has no proper checksum or type")
    parent, _, leaf = folder.rpartition("/") if isinstance(folder, str) else ("", "", "")
    match = POLICY_FOLDER.fullmatch(leaf)
    if parent != POLICIES or not match or match[1] != digest[:16]:
        raise make_invalid_error(
            path, f"{subject} names {folder!r}, which is not a policy of this folder"
        )
    if not _is_matching_text(name, MANIFEST_NAME):
        raise make_invalid_error(path, f"{subject} names {name!r}, which is not a manifest")


def _get_fields(path: Path, subject: str, entry: Json, *names: str) -> list[Any]:
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise make_invalid_error(path, f"{subject} is malformed")
    return [entry[name] for name in names]


def _is_matching_text(value: Json, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def compute_checksum(manifest: dict[str, Any]) -> str:
    """Returns the SHA-256 of all entries but "checksum"; white space does not matter."""
    entries = {key: value for key, value in manifest.items() if key != "checksum"}
    return sha256(json.dumps(entries, separators=(",", ":")).encode())
