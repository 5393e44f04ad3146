"""Serialises complete configs as JSON values or for pickle, including model architectures.

It needs Keras, unlike the rest of this subpackage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import keras

from tfpolicies.base.type_aliases import Setting
from tfpolicies.config.setting import Merge, merge_value
from tfpolicies.config.settings_allowlist import POLICY_SETTINGS, decode_settings
from tfpolicies.errors import CheckpointError, UnpicklableError
from tfpolicies.models.architecture import Architecture
from tfpolicies.models.keras_json import model_from_json, model_to_json
from tfpolicies.models.registry import MODELS
from tfpolicies.storage.allowed_objects import AllowedObjects
from tfpolicies.storage.import_paths import UnresolvedObject, get_declared_path
from tfpolicies.storage.json_values import encode_value, find_unresolved


def encode_config(config: Mapping[str, Any], built_model: keras.Model | None = None) -> Any:
    """Returns a config as JSON values; a model of built-in Keras layers as its architecture.

    Args:
        config: of a policy or of an algorithm.
        built_model: the model that a factory in it created. Its architecture is stored next to the
            factory's name, so that loading does not need the factory.
    """
    custom = config.get("model", {}).get("custom_model")
    model = custom if isinstance(custom, keras.Model) else None
    keras_model = built_model if model is None else model
    architecture = None if keras_model is None else _get_architecture(keras_model)
    if model is not None and architecture is not None:
        config = _update_model(config, custom_model=None)
    return {"settings": encode_value(config), "keras": architecture}


_ARCHITECTURES: WeakKeyDictionary[keras.Model, dict[str, Any]] = WeakKeyDictionary()


def _get_architecture(model: keras.Model) -> dict[str, Any] | None:
    """Returns `model_to_json`, cached because training calls it repeatedly."""
    architecture = _ARCHITECTURES.get(model) or model_to_json(model)
    if architecture is not None:
        _ARCHITECTURES[model] = architecture
    return architecture


def decode_config(
    record: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    source: str,
    places: AllowedObjects = POLICY_SETTINGS,
    *,
    unneeded: Collection[str] = (),
) -> dict[str, Any]:
    """Inverse of `encode_config`.

    Args:
        record: the return value of `encode_config`.
        overrides: settings that replace stored ones; `model` is merged, and so are dicts of the
            same `type`. A number also replaces its stored schedule.
        source: the checkpoint, for messages.
        places: where the record may name objects.
        unneeded: settings in which a `UnresolvedObject` may stay.
    """
    config = decode_and_override(record, overrides, source, places)
    missing = find_unresolved({name: x for name, x in config.items() if name not in unneeded})
    if missing:
        names = ", ".join(
            f"config{place} ({missing_value.name})" for place, missing_value in missing.items()
        )
        raise CheckpointError(
            f"{source} was saved with objects that a file cannot hold safely: {names}. Pass them "
            "when loading: from_checkpoint(path, config={...})."
        )
    return config


def decode_and_override(
    record: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    source: str,
    places: AllowedObjects = POLICY_SETTINGS,
) -> dict[str, Any]:
    """Decodes as `decode_config`, but keeps `UnresolvedObject` values that no override replaces."""
    values = dict(overrides or {})
    env, model = values.get("env"), values.pop("model", {})
    if not isinstance(model, Mapping):
        model = {"custom_model": model}
    objects = {env: env} if isinstance(env, str) else None  # also allowed in the file then
    config = decode_settings(record["settings"], places, objects=objects)
    if not isinstance(config, dict) or not isinstance(config.get("model", {}), Mapping):
        raise CheckpointError(f"{source} holds {config!r:.80} instead of a config.")
    if "model" in config:  # older checkpoints have channels last
        config["model"] = {"channels_first": False, **config["model"]}
    uses_stored_model = record["keras"] is not None and "custom_model" not in model
    if uses_stored_model and MODELS.find(config["model"].get("custom_model")) is None:
        config["model"]["custom_model"] = model_from_json(record["keras"])
    config |= {name: _merge_override(config.get(name), value) for name, value in values.items()}
    config |= dict.fromkeys(_find_overridden_schedules(config, values))
    return _update_model(config, **model) if model else config


def _find_overridden_schedules(
    config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> list[str]:
    """Returns stored schedules that would hide overridden numbers.

    An integer schedule starts with the number, so it is kept.
    """
    names = [f"{name}_schedule" for name in overrides]
    return [x for x in names if x not in overrides and isinstance(config.get(x), list | tuple)]


def _merge_override(stored_value: Setting, override: Setting) -> Any:
    """Returns the override of a stored setting.

    A dict of the same `type` is merged, as in a config; the same applies if it provides the class
    of a `UnresolvedObject` type.
    """
    if not (
        isinstance(stored_value, Mapping)
        and isinstance(override, Mapping)
        and "type" in stored_value
    ):
        return override
    stored_type, override_type = stored_value["type"], override.get("type")
    path = override_type if isinstance(override_type, str) else get_declared_path(override_type)
    if isinstance(stored_type, UnresolvedObject) and stored_type.name.replace(
        ":", "."
    ) == path.replace(":", "."):
        stored_value = {**stored_value, "type": override_type}
    return merge_value({"merge": Merge.TYPED}, stored_value, override)


def _update_model(settings: Mapping[str, Any], **model: Setting) -> dict[str, Any]:
    return {**settings, "model": {**settings["model"], **model}}


_COMMON_AUTO_VALUES = {"inference": "onnx", "jit_compile": True, "rollout_fragment_length": None}
"""Usual resolved values of "auto" outside graph mode; None: varies."""


def get_stored_auto(
    manifest: Mapping[str, Any], config: Mapping[str, Any], overrides: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the settings of a checkpoint that were "auto", and their resolved values.

    They are set to "auto" again, so that the current rule decides. Older checkpoints do not store
    which these are; there, settings with the usual resolved value count as "auto".

    Args:
        manifest: of a policy or an algorithm.
        config: its settings.
        overrides: settings that the caller provides.
    """
    names = manifest.get("automatic")
    if not isinstance(names, list):
        is_eager = config.get("framework") != "tf"
        names = [
            name
            for name, common_value in _COMMON_AUTO_VALUES.items()
            if is_eager and config.get(name) == common_value
        ]
    return {
        x: config.get(x) for x in _COMMON_AUTO_VALUES if x in names and x not in (overrides or {})
    }


def to_pickle(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces a model in settings by its architecture, for pickle."""
    custom = settings.get("model", {}).get("custom_model")
    if not isinstance(custom, keras.Model):
        return dict(settings)
    architecture = Architecture.from_model(custom)
    if architecture is None:
        raise UnpicklableError(
            f"The model {custom.name!r} cannot be pickled, because Keras cannot rebuild it from "
            "its config; give it as a factory f(observation_space, num_outputs) at the top level "
            "of a module instead."
        )
    return _update_model(settings, custom_model=architecture)


def from_pickle(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `to_pickle`; the model has new weights."""
    custom = settings.get("model", {}).get("custom_model")
    if not isinstance(custom, Architecture):
        return dict(settings)
    return _update_model(settings, custom_model=custom.build())
