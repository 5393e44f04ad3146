"""Which backend Keras computes with: here it must be TensorFlow."""

from __future__ import annotations

import json
import os
import sys

from tfpolicies.errors import ConfigError


def require_tensorflow_backend() -> None:
    """Checks that Keras computes with TensorFlow, or will do so when it is imported.

    Raises:
        ConfigError: if it has another backend; the message says where that was chosen.
    """
    chosen, where = _chosen()
    if chosen == "tensorflow":
        return
    raise ConfigError(
        f"Keras must compute with TensorFlow here, but {where} chooses {chosen!r}. Set "
        "KERAS_BACKEND=tensorflow before Python starts, or before anything imports Keras."
    )


def _chosen() -> tuple[str, str]:
    """Returns Keras's backend, and where it was chosen."""
    loaded = getattr(getattr(sys.modules.get("keras"), "backend", None), "backend", None)
    if loaded is not None:
        return loaded(), "Keras, which this process has imported already,"
    variable = os.environ.get("KERAS_BACKEND")
    if variable:
        return variable, "the environment variable KERAS_BACKEND"
    folder = os.environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    path = os.path.join(folder, "keras.json")
    try:
        with open(path, encoding="utf-8") as file:
            return str(json.load(file)["backend"]), path
    except (OSError, ValueError, LookupError, TypeError):  # Keras takes its default then
        return "tensorflow", path
