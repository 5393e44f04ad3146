"""Keras models as JSON, for checkpoints: only what Keras's own layers can rebuild."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import keras

from tfpolicies.errors import CheckpointError


def model_to_json(model: keras.Model) -> dict[str, Any] | None:
    """Returns the architecture of a model, or None if it has layers that are not Keras's own."""
    try:
        config = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    except (NotImplementedError, TypeError, ValueError):
        return None
    return config if _refusal(config) is None else None


def model_from_json(config: Mapping[str, Any]) -> keras.Model:
    """Rebuilds a model, with new weights, from what `model_to_json` returned.

    Nothing but Keras's own classes is looked up, and no code of the file is run.

    Raises:
        CheckpointError: if the config names anything else, or is no model.
    """
    reason = _refusal(config)
    if reason is not None:
        raise CheckpointError(f"The model of the checkpoint cannot be rebuilt: {reason}.")
    try:
        model = keras.saving.deserialize_keras_object(dict(config), safe_mode=True)
    except Exception as error:
        raise CheckpointError(f"The model of the checkpoint is damaged: {error}") from error
    if not isinstance(model, keras.Model):
        raise CheckpointError(f"The checkpoint holds a {type(model).__name__} for a model.")
    return model


def _refusal(config: Any) -> str | None:
    """Returns why a Keras config must not be rebuilt, or None."""
    if isinstance(config, list | tuple):
        return next(filter(None, map(_refusal, config)), None)
    if not isinstance(config, Mapping):
        return None
    if "class_name" in config:
        module, name = config.get("module"), config["class_name"]
        own = isinstance(module, str) and (module == "keras" or module.startswith("keras."))
        plain = module == "builtins" and name in ("__tuple__", "__numpy__", "__tensor__")
        if name in ("Lambda", "__lambda__", "function") or not (own or plain or _is_shape(config)):
            return f"it names {module}.{name}, which is none of Keras's own layers"
    return next(filter(None, map(_refusal, config.values())), None)


def _is_shape(config: Mapping[str, Any]) -> bool:
    return config["class_name"] in ("__tuple__", "__keras_tensor__") and "module" not in config
