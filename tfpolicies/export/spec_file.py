"""`policy_spec.json`, which lies beside each export, as far as it is read without TensorFlow."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from tfpolicies.system.regular_files import read_regular

SPEC_FILE = "policy_spec.json"
_LARGEST = 1 << 24  # bytes of one


def form_of(spec: Path) -> str | None:
    """Returns the form of an export: its layout for an engine, or else what kind of artefact it is.

    Args:
        spec: its `policy_spec.json`.

    Returns:
        Such as "triton", "onnx" or "saved_model"; None if there is no file, or it does not tell.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        told = json.loads(read_regular(spec, _LARGEST))
        if isinstance(told, dict):
            found = told.get("layout") or told.get("artefact")
            return found if isinstance(found, str) else None
    return None
