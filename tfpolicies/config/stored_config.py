"""Whole configs as JSON values and in pickles, with the architecture of a model that they hold.

It needs Keras, unlike the rest of this room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import keras

from tfpolicies.config.setting import Merge, taken
from tfpolicies.config.stored_settings import POLICY_SETTINGS, decode_settings
from tfpolicies.errors import CheckpointError, UnpicklableError
from tfpolicies.models.architecture import Architecture
from tfpolicies.models.keras_json import model_from_json, model_to_json
from tfpolicies.models.registry import MODELS
from tfpolicies.storage.import_paths import Missing, describe
from tfpolicies.storage.json_values import encode_value, find_missing
from tfpolicies.storage.places import Places
from tfpolicies.type_aliases import Setting


def encode_config(config: Mapping[str, Any], built: keras.Model | None = None) -> Any:
    """Returns a config as JSON values; a model of Keras's own layers by its architecture.

    Args:
        config: of a policy or of an algorithm.
        built: what a factory in it has made. Its architecture stands beside the factory's name,
            so that loading can do without the factory.
    """
    custom = config.get("model", {}).get("custom_model")
    given = custom if isinstance(custom, keras.Model) else None
    known = built if given is None else given
    architecture = None if known is None else _architecture(known)
    if given is not None and architecture is not None:
        config = _with_model(config, custom_model=None)
    return {"settings": encode_value(config), "keras": architecture}


_ARCHITECTURES: WeakKeyDictionary[keras.Model, dict[str, Any]] = WeakKeyDictionary()


def _architecture(model: keras.Model) -> dict[str, Any] | None:
    """Returns what `model_to_json` does, which is asked again and again while training goes on."""
    found = _ARCHITECTURES.get(model) or model_to_json(model)
    if found is not None:
        _ARCHITECTURES[model] = found
    return found


def decode_config(
    record: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    source: str,
    places: Places = POLICY_SETTINGS,
    *,
    unneeded: Collection[str] = (),
) -> dict[str, Any]:
    """Inverse of `encode_config`.

    Args:
        record: what `encode_config` returned.
        overrides: settings that replace stored ones; `model` is merged, and so are dicts of the
            same `type`. A number replaces the stored schedule of it, too.
        source: the checkpoint, for messages.
        places: where the record may name objects.
        unneeded: settings in which a `Missing` may stay.

    Raises:
        CheckpointError: if settings that could not be stored are not among the overrides.
    """
    config = overridden_config(record, overrides, source, places)
    missing = find_missing({name: x for name, x in config.items() if name not in unneeded})
    if missing:
        names = ", ".join(f"config{place} ({found.name})" for place, found in missing.items())
        raise CheckpointError(
            f"{source} was saved with objects that a file cannot hold safely: {names}. Give them "
            "again: from_checkpoint(path, config={...})."
        )
    return config


def overridden_config(
    record: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    source: str,
    places: Places = POLICY_SETTINGS,
) -> dict[str, Any]:
    """Returns what `decode_config` does; a `Missing` where something was not given again."""
    given = dict(overrides or {})
    env, model = given.get("env"), given.pop("model", {})
    if not isinstance(model, Mapping):
        model = {"custom_model": model}
    known = {env: env} if isinstance(env, str) else None  # what is named again the file means, too
    config = decode_settings(record["settings"], places, known=known)
    if not isinstance(config, dict) or not isinstance(config.get("model", {}), Mapping):
        raise CheckpointError(f"{source} holds {config!r:.80} for a config.")
    if "model" in config:  # those of before there was a choice have their channels last
        config["model"] = {"channels_first": False, **config["model"]}
    wants_stored = record["keras"] is not None and "custom_model" not in model
    if wants_stored and MODELS.find(config["model"].get("custom_model")) is None:
        config["model"]["custom_model"] = model_from_json(record["keras"])
    config |= {name: _laid_over(config.get(name), value) for name, value in given.items()}
    config |= dict.fromkeys(_replaced_schedules(config, given))
    return _with_model(config, **model) if model else config


def _replaced_schedules(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """Returns the stored schedules of numbers that are overridden, which would hide the numbers.

    A schedule that is an integer begins with the number, so it stays.
    """
    names = [f"{name}_schedule" for name in overrides]
    return [x for x in names if x not in overrides and isinstance(config.get(x), list | tuple)]


def _laid_over(stored: Setting, given: Setting) -> Any:
    """Returns a setting that replaces a stored one.

    A dict of the same `type` is merged, as it is in a config; one that says again what a `Missing`
    type is, too.
    """
    if not (isinstance(stored, Mapping) and isinstance(given, Mapping) and "type" in stored):
        return given
    missing, again = stored["type"], given.get("type")
    path = again if isinstance(again, str) else describe(again)
    if isinstance(missing, Missing) and missing.name.replace(":", ".") == path.replace(":", "."):
        stored = {**stored, "type": again}
    return taken({"merge": Merge.TYPED}, stored, given)


def _with_model(settings: Mapping[str, Any], **model: Setting) -> dict[str, Any]:
    """Returns settings with other settings of the model."""
    return {**settings, "model": {**settings["model"], **model}}


_USUALLY = {"inference": "onnx", "jit_compile": True, "rollout_fragment_length": None}
"""What "auto" became for most policies that are not in graph mode; None: that differs."""


def automatic_of(
    manifest: Mapping[str, Any], config: Mapping[str, Any], overrides: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the settings of a checkpoint that were "auto", and what they became.

    They are "auto" again, so that today's rule decides. Older checkpoints do not say which these
    are; there those count that have what "auto" became for most policies.

    Args:
        manifest: of a policy or an algorithm.
        config: its settings.
        overrides: settings that are given again.
    """
    known = manifest.get("automatic")
    if not isinstance(known, list):
        eager = config.get("framework") != "tf"
        known = [name for name, usual in _USUALLY.items() if eager and config.get(name) == usual]
    return {x: config.get(x) for x in _USUALLY if x in known and x not in (overrides or {})}


def travelling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings for pickle: with the architecture of a model instead of the model.

    Raises:
        UnpicklableError: if Keras cannot rebuild the model.
    """
    custom = settings.get("model", {}).get("custom_model")
    if not isinstance(custom, keras.Model):
        return dict(settings)
    architecture = Architecture.of(custom)
    if architecture is None:
        raise UnpicklableError(
            f"The model {custom.name!r} cannot be pickled, because Keras cannot rebuild it from "
            "its config; give it as a factory f(observation_space, num_outputs) at the top level "
            "of a module instead."
        )
    return _with_model(settings, custom_model=architecture)


def arrived(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `travelling`; the model has weights of its own."""
    custom = settings.get("model", {}).get("custom_model")
    if not isinstance(custom, Architecture):
        return dict(settings)
    return _with_model(settings, custom_model=custom.build())
