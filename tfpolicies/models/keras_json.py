"""Keras models as JSON, for checkpoints, and the checks before one is rebuilt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import keras

from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import CheckpointError, ModelError
from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.models.keras_allowlist import DTYPES, KerasCategory, get_categories
from tfpolicies.models.size_check import check_memory
from tfpolicies.models.work import ModelWork, check_work, check_work_limits

_LAYER_KEYS = ("layer", "layers", "backward_layer", "cell", "cells")
_OTHER_KEYS = (
    "name",
    "inbound_nodes",
    "build_config",
    "shared_object_id",
)  # besides class and config
_MAX_SEQUENTIAL_LAYERS = 64  # building a Sequential of n layers takes Keras n * n steps
# Allowed calls while a model is built, inner models first, per call when it acts
_CONSTRUCTION_CALL_RATIO = 4
_MAX_SETTING_VALUE = (
    1 << 16
)  # of settings that cost time or memory without affecting weights or outputs
_BOUNDED_SETTINGS = ("dilation_rate", "strides", "pool_size", "noise_shape")


def model_to_json(model: keras.Model) -> dict[str, Any] | None:
    """Returns the architecture of a model; None if it has layers that could not be looked up.

    These are layers that are neither Keras's nor registered by `keras.saving`, and Keras layers
    that hold code or read files.
    """
    try:
        config = json.loads(json.dumps(keras.saving.serialize_keras_object(model), allow_nan=False))
        return dict(_ConfigReader().read(config, get_categories()["layer"]))
    except (NotImplementedError, TypeError, ValueError, RecursionError):
        return None


@ensure_eager()
def model_from_json(
    config: Mapping[str, Any], description: str = "The model of the checkpoint"
) -> keras.Model:
    """Rebuilds a model, with new weights, from the result of `model_to_json`.

    Everything that the config names is checked before any of it is called: Keras's classes must
    be on the list of `keras_names`, exactly as Keras writes them. Other classes must be in a
    `keras.saving.custom_object_scope`, or registered in this process by
    `keras.saving.register_keras_serializable`, and have the base class that belongs to their place.
    The compile config is ignored. The work of a call is also checked (`models/work.py`): the number
    of calls from the config only, before Keras builds layers, and the rest before weights are
    allocated.

    Args:
        config: JSON values.
        description: the model's name in messages.

    Raises:
        CheckpointError: if the config names anything else, is damaged, is not a model, or takes
            more work than a file may ask for (see `limit_work`).
        ModelError: if there is not enough memory for it (see `check_memory`).
    """
    reader = _ConfigReader()
    try:
        checked_config = reader.read(config, get_categories()["layer"])
    except RecursionError:
        raise CheckpointError("The model of the checkpoint is nested too deeply.") from None
    check_work_limits(
        ModelWork(calls=max(reader.calls, reader.construction_calls // _CONSTRUCTION_CALL_RATIO)),
        description,
    )

    def rebuild() -> Any:
        config_copy = json.loads(
            json.dumps(checked_config)
        )  # Keras empties parts of a config while reading
        return keras.saving.deserialize_keras_object(
            config_copy, reader.custom_objects, safe_mode=True
        )

    def rebuild_and_measure() -> Any:
        model = rebuild()
        if isinstance(model, keras.Model):
            check_work([(model, None)], description)
        return model

    try:
        check_memory(rebuild_and_measure, description)
        model = rebuild()
    except (CheckpointError, ModelError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"The model of the checkpoint is damaged, or not for Keras {keras.__version__}: "
            f"{error}. You can pass the whole model to `from_checkpoint` as "
            'config={"model": model}.'
        ) from error
    if not isinstance(model, keras.Model):
        raise CheckpointError(f"The checkpoint holds a {type(model).__name__} instead of a model.")
    return model


class _ConfigReader:
    """Copies a config for Keras, and rejects content that a file may not have.

    Attributes:
        custom_objects: the custom classes and functions that the config names, by name.
        calls: the calls of layers, those of an inner model counted for each of its calls.
        construction_calls: the calls while the model is built, which calls each inner model once
            more.
    """

    def __init__(self) -> None:
        self.calls = self.construction_calls = 0
        self.custom_objects: dict[str, Any] = {}

    def read(self, value: Json | Mapping[str, Any], category: KerasCategory | None) -> Any:
        """Returns a copy of a value.

        Args:
            value: JSON values.
            category: the objects that are allowed there; None for none.
        """
        if isinstance(value, str):
            return self._read_text(value, category)
        if isinstance(value, list | tuple):
            return [self.read(item, category) for item in value]
        if not isinstance(value, Mapping):
            return value
        if "class_name" not in value:
            return self._read_entries(value, category)
        if category is get_categories()["activation"] and value["class_name"] == "function":
            return self._read_function(value)
        if str(value["class_name"]).startswith("__"):
            return self._read_data(value)
        return self._read_object(value, category)

    def _read_entries(
        self, config: Mapping[str, Any], default_category: KerasCategory | None = None
    ) -> dict[str, Any]:
        """Returns a copy of a dict, whose keys determine the allowed objects."""
        entries = {}
        for key, value in config.items():
            if key in _BOUNDED_SETTINGS and _find_largest(value) > _MAX_SETTING_VALUE:
                raise _make_refusal(f"{key}={value!r:.80}, which is more than {_MAX_SETTING_VALUE}")
            if key == "unroll" and value:
                raise _make_refusal("unroll=True, whose work has no bound")
            if key == "activity_regularizer" and _multiplies_rows(value):
                raise _make_refusal(f"{key}={value!r:.80}, which multiplies the rows of a batch")
            entries[key] = self.read(value, _get_category(key) or default_category)
        return entries

    def _read_object(
        self, record: Mapping[str, Any], category: KerasCategory | None
    ) -> dict[str, Any]:
        module, name = record.get("module"), record["class_name"]
        registered_name = record.get("registered_name") or name
        if category is None or not isinstance(name, str) or not isinstance(registered_name, str):
            raise _make_refusal(f"{module}.{name}, where no object is allowed")
        is_keras_class = (
            registered_name == name
            and isinstance(module, str)
            and (module, name) in category.keras_classes
        )
        if is_keras_class:
            object_class = category.keras_classes[str(module), name]
        else:
            object_class = self._find_custom_class(name, registered_name, module, category)
        config = record.get("config")
        if not isinstance(config, Mapping):
            raise CheckpointError(
                f"The model of the checkpoint holds {config!r:.80} instead of a config."
            )
        layer_configs, nodes = config.get("layers"), record.get("inbound_nodes")
        if (
            name == "Sequential"
            and isinstance(layer_configs, list)
            and len(layer_configs) > _MAX_SEQUENTIAL_LAYERS
        ):
            raise _make_refusal(
                f"a Sequential of {len(layer_configs)} layers, which is more than "
                f"{_MAX_SEQUENTIAL_LAYERS}"
            )
        outer_calls, self.calls = self.calls, 0
        entries = self._read_entries(config, None if is_keras_class else get_categories()[""])
        self.construction_calls += self.calls
        if issubclass(object_class, keras.Operation):
            num_calls = len(nodes) if isinstance(nodes, list) else 0
            self.calls = (1 + self.calls) * max(1, num_calls)
        self.calls += outer_calls
        other_entries = {key: self.read(record[key], None) for key in _OTHER_KEYS if key in record}
        return {
            "module": module,
            "class_name": name,
            "config": entries,
            "registered_name": None if is_keras_class else registered_name,
            **other_entries,
        }

    def _find_custom_class(
        self, name: str, registered: str, module: Json, category: KerasCategory
    ) -> type:
        """Returns the custom class that a record names, and adds it to `used`."""
        custom_class = _find_registered(registered) or _find_registered(name)
        if not isinstance(custom_class, type):
            raise _make_refusal(
                f"{module}.{name}, which is neither registered nor on the list of Keras objects "
                "that a file may name",
                name,
            )
        if not issubclass(custom_class, category.base_class):
            raise _make_refusal(
                f"{name}, which must be a Keras {category.description}, but is {custom_class!r}"
            )
        self.custom_objects[registered] = custom_class
        return custom_class

    def _read_function(self, record: Mapping[str, Any]) -> Any:
        name, module = record.get("config"), record.get("module")
        if not isinstance(name, str):
            raise CheckpointError(
                f"The model of the checkpoint holds {name!r:.80} instead of a function."
            )
        if (
            module in ("builtins", "keras.activations")
            and name in get_categories()["activation"].allowed_names
        ):
            return name
        function = _find_registered(name)
        if not isinstance(function, FunctionType):
            raise _make_refusal(f"the function {name}, which is not registered", name)
        self.custom_objects[name] = function
        return {"module": module, "class_name": "function", "config": name, "registered_name": name}

    def _read_text(self, text: str, category: KerasCategory | None) -> str:
        """Returns a string, unless Keras would resolve it to an object that is not allowed."""
        if category is not None and category.allowed_names:
            registered = _find_registered(text)
            is_allowed = isinstance(registered, type) and issubclass(
                registered, category.base_class
            )
            if text not in category.allowed_names and (
                not is_allowed or category is get_categories()["activation"]
            ):
                raise _make_refusal(f"{text!r}, which is not a known {category.description}", text)
            if registered is not None:
                self.custom_objects[text] = registered
        elif _find_registered(text) is not None and ">" in text:
            raise _make_refusal(f"{text!r}, where no object is allowed")
        return text

    def _read_data(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of a number, slice or tensor in the calls of a functional model."""
        tag, config = record["class_name"], record.get("config")
        if not isinstance(config, Mapping) or record.get("module") is not None:
            raise CheckpointError(f"The model of the checkpoint holds a malformed {tag}.")
        if tag == "__slice__":
            config = {key: self.read(config.get(key), None) for key in ("start", "stop", "step")}
        elif tag in ("__numpy__", "__tensor__", "__keras_tensor__"):
            dtype = config.get("dtype")
            if dtype not in DTYPES or not _is_plain_data(list(config.values())):
                raise _make_refusal(f"a tensor of dtype {dtype!r:.40}, or not of numbers")
        elif tag != "__ellipsis__":
            raise _make_refusal(f"{tag!r:.40}")
        return {"class_name": tag, "config": dict(config)}


def _find_registered(name: str) -> Any:
    """Returns the object registered under a name or given by a scope; None without."""
    return keras.saving.get_registered_object(name)


def _get_category(key: str) -> KerasCategory | None:
    if key in _LAYER_KEYS:
        return get_categories()["layer"]
    ending = key.rpartition("_")[2]
    return get_categories().get(ending) if ending else None


def _is_plain_data(value: Json) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain_data, value))
    return value is None or isinstance(value, bool | int | float | str)


def _multiplies_rows(value: Json) -> bool:
    """Returns whether a regularizer multiplies all pairs of rows; the batch size has no limit."""
    name = value.get("class_name") if isinstance(value, Mapping) else value
    config = value.get("config") if isinstance(value, Mapping) else None
    mode = config.get("mode", "rows") if isinstance(config, Mapping) else "rows"
    return str(name).replace("_", "").lower() == "orthogonalregularizer" and mode == "rows"


def _find_largest(value: Json) -> float:
    if isinstance(value, list | tuple):
        return max(map(_find_largest, value), default=0)
    return abs(value) if isinstance(value, int | float) else 0


def _make_refusal(subject: str, name: str | None = None) -> CheckpointError:
    advice = f"custom_objects={{{name!r}: ...}}, or " if name else ""
    return CheckpointError(
        f"The model of the checkpoint cannot be rebuilt: it names {subject}. If you trust it, pass "
        f'{advice}the whole model as config={{"model": model}}, to `from_checkpoint`.'
    )
