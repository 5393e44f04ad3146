"""Reads `policy_spec.json` of exports without TensorFlow."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tfpolicies.system.regular_files import read_regular

SPEC_FILE = "policy_spec.json"
ONNX_FOLDER = "onnx"
"""The subfolder that `tfpolicies export` creates."""

_MAX_BYTES = 1 << 24  # bytes


def read_format(spec: Path) -> str | None:
    """Returns the format of an export: its layout for an engine, or else its kind of artefact.

    For example "triton", "onnx" or "saved_model"; None if there is no file or no such entry.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = read_spec(spec)
        export_format = record.get("layout") or record.get("artefact")
        return export_format if isinstance(export_format, str) else None
    return None


def read_spec(spec: Path) -> dict[str, Any]:
    """Returns the content of a spec file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a JSON object.
    """
    record = json.loads(read_regular(spec, _MAX_BYTES))
    if not isinstance(record, dict):
        raise ValueError(f"{spec.name} is not a JSON object")
    return record


def list_versions(folder: Path) -> dict[str, Path]:
    """Returns the exports in numbered folders, or in `onnx` inside them, sorted by number.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     for part in ("10", "9/onnx", "11"):
    ...         Path(name, part).mkdir(parents=True)
    ...         if part != "11":
    ...             _ = Path(name, part, SPEC_FILE).write_text("{}")
    ...     [(number, path.name) for number, path in list_versions(Path(name)).items()]
    [('9', 'onnx'), ('10', '10')]
    """
    numbered = sorted((x for x in folder.iterdir() if is_number(x)), key=lambda x: int(x.name))
    candidates = [(x.name, place) for x in numbered for place in (x / ONNX_FOLDER, x)]
    return {number: place for number, place in candidates if (place / SPEC_FILE).exists()}


def is_number(folder: Path) -> bool:
    """Returns whether a folder has the name of a version."""
    return folder.name.isdecimal() and folder.name.isascii()


def name_model(path: Path) -> str:
    """Returns the model name of an export: that of its folder, ignoring `onnx` and numbers.

    >>> [name_model(Path("exp", part)) for part in ("", "onnx", "7", "7/onnx")]
    ['exp', 'exp', 'exp', 'exp']
    """
    while path.name == ONNX_FOLDER or is_number(path):
        path = path.parent
    return path.name
