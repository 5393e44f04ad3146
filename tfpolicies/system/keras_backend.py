"""Checks that Keras uses TensorFlow as its backend."""

from __future__ import annotations

import json
import os
import sys

from tfpolicies.errors import ConfigError


def require_tensorflow_backend() -> None:
    """Checks that Keras uses TensorFlow, or will do so when it is imported."""
    backend, source = _find_backend()
    if backend == "tensorflow":
        return
    raise ConfigError(
        f"Keras must use TensorFlow as its backend, but {source} sets {backend!r}. Set "
        "KERAS_BACKEND=tensorflow before Python starts, or before anything imports Keras."
    )


def _find_backend() -> tuple[str, str]:
    get_loaded_backend = getattr(
        getattr(sys.modules.get("keras"), "backend", None), "backend", None
    )
    if get_loaded_backend is not None:
        return get_loaded_backend(), "Keras, which this process has already imported,"
    variable = os.environ.get("KERAS_BACKEND")
    if variable:
        return variable, "the environment variable KERAS_BACKEND"
    folder = os.environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    path = os.path.join(folder, "keras.json")
    try:
        with open(path, encoding="utf-8") as file:
            return str(json.load(file)["backend"]), path
    except (OSError, ValueError, LookupError, TypeError):  # Keras uses its default then
        return "tensorflow", path
