"""Checkpoints that are edited as a stranger could edit them who knows the format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfpolicies.storage.checkpoint import read_checkpoint, write_checkpoint
from tfpolicies.storage.manifest import compute_checksum

GENERATED = ("arrays", "checksum", "format_version", "policies", "segments", "tfpolicies_version")


@contextlib.contextmanager
def edit_checkpoint(folder: Path, target: Path | None = None) -> Iterator[dict[str, Any]]:
    """Gives the manifest of a policy's checkpoint, and writes it again, here or to `target`."""
    checkpoint = read_checkpoint(folder, "policy.json", kind="Policy")
    manifest = {name: x for name, x in checkpoint.manifest.items() if name not in GENERATED}
    yield manifest
    write_checkpoint(target or folder, "policy.json", manifest, checkpoint.arrays)


@contextlib.contextmanager
def edit_manifest(path: Path) -> Iterator[dict[str, Any]]:
    """Gives all entries of a manifest, and writes them with a checksum that fits."""
    manifest = json.loads(path.read_text())
    yield manifest
    manifest["checksum"] = compute_checksum(manifest)
    path.write_text(json.dumps(manifest))
