"""Pickling for other processes: checkpoints in memory, and objects that no file can hold."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tfpolicies.errors import UnpicklableError
from tfpolicies.storage.checkpoint import Arrays, Checkpoint, CheckpointData
from tfpolicies.storage.import_paths import get_declared_path, get_import_path
from tfpolicies.storage.json_values import iterate_parts
from tfpolicies.storage.segment_files import Segment


def refuse_pickling(owner: object, advice: str) -> NoReturn:
    """Raises an error: an object cannot leave its process.

    Args:
        owner: the object.
        advice: sentence with an alternative.
    """
    raise UnpicklableError(
        f"A {type(owner).__name__} cannot be pickled or copied: it holds objects that belong to "
        f"this process. {advice}"
    )


def check_picklable_by_name(values: Mapping[str, Any]) -> None:
    """Checks that pickle can find all functions and classes in some values by their names.

    Args:
        values: the values, by how messages call them.
    """
    for path, part in (pair for name, x in values.items() for pair in iterate_parts(x, name)):
        if isinstance(part, type | types.FunctionType) and get_import_path(part) is None:
            raise UnpicklableError(
                f"{path} is {get_declared_path(part)}, which another process cannot find by its "
                "name. Define it at the top level of a module. Or save a checkpoint, and load it "
                "there with from_checkpoint(path, config={...})."
            )


def serialize_part(part: CheckpointData) -> tuple[bytes, Arrays]:
    """Serializes a checkpoint, without the policies in it, as text and arrays."""
    return json.dumps(part.manifest).encode(), part.arrays


def restore_checkpoint(
    serialized: tuple[bytes, Arrays],
    policies: Mapping[str, tuple[bytes, Arrays]] | None = None,
    segments: Sequence[Segment] = (),
) -> Checkpoint:
    """Restores results of `serialize_part` to a checkpoint, as if it had been read.

    Args:
        serialized: of the checkpoint itself.
        policies: of the policies in it, by id.
        segments: of the checkpoint.
    """
    manifest, arrays = serialized
    inner = {pid: restore_checkpoint(part) for pid, part in (policies or {}).items()}
    return Checkpoint(
        json.loads(manifest), {k: dict(x) for k, x in arrays.items()}, inner, segments
    )
