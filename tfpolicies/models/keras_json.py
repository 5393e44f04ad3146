"""Keras models as JSON, for checkpoints, and the checks before one is rebuilt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import keras

from tfpolicies.errors import CheckpointError, ModelError
from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.models.extent import require_room
from tfpolicies.models.keras_names import DTYPES, Kind, kinds
from tfpolicies.models.work import Work, require_limits, require_work
from tfpolicies.type_aliases import Json

_LAYER_KEYS = ("layer", "layers", "backward_layer", "cell", "cells")
_KEPT = ("name", "inbound_nodes", "build_config", "shared_object_id")  # besides class and config
_MOST_IN_A_ROW = 64  # building a Sequential of n layers takes Keras n * n steps
_UNFOLDED = 4  # allowed calls while a model is built, inner models first, per call when it acts
_LARGEST = 1 << 16  # of settings that cost time or memory without affecting weights or outputs
_BOUNDED = ("dilation_rate", "strides", "pool_size", "noise_shape")


def model_to_json(model: keras.Model) -> dict[str, Any] | None:
    """Returns the architecture of a model; None if it has layers that could not be looked up.

    These are layers that are neither Keras's nor registered by `keras.saving`, and Keras layers
    that hold code or read files.
    """
    try:
        config = json.loads(json.dumps(keras.saving.serialize_keras_object(model), allow_nan=False))
        return dict(_Reader().read(config, kinds()["layer"]))
    except (NotImplementedError, TypeError, ValueError, RecursionError):
        return None


@ensure_eager()
def model_from_json(
    config: Mapping[str, Any], what: str = "The model of the checkpoint"
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
        ModelError: if there is not enough memory for it (see `require_room`).
    """
    reader = _Reader()
    try:
        checked = reader.read(config, kinds()["layer"])
    except RecursionError:
        raise CheckpointError("The model of the checkpoint is nested too deeply.") from None
    require_limits(Work(calls=max(reader.calls, reader.unfolded // _UNFOLDED)), what)

    def rebuilt() -> Any:
        given = json.loads(json.dumps(checked))  # Keras empties parts of a config while reading
        return keras.saving.deserialize_keras_object(given, reader.used, safe_mode=True)

    def measured() -> Any:
        model = rebuilt()
        if isinstance(model, keras.Model):
            require_work([(model, None)], what)
        return model

    try:
        require_room(measured, what)
        model = rebuilt()
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


class _Reader:
    """Copies a config for Keras, and rejects what a file may not contain.

    Attributes:
        custom_objects: the custom classes and functions that the config names, by name.
        calls: the calls of layers, those of an inner model counted for each of its calls.
        construction_calls: the calls while the model is built, which calls each inner model once more.
    """

    def __init__(self) -> None:
        self.calls = self.unfolded = 0
        self.used: dict[str, Any] = {}

    def read(self, record: Json | Mapping[str, Any], kind: Kind | None) -> Any:
        """Returns a copy of a value.

        Args:
            value: JSON values.
            category: the objects that are allowed there; None for none.
        """
        if isinstance(record, str):
            return self._text(record, kind)
        if isinstance(record, list | tuple):
            return [self.read(each, kind) for each in record]
        if not isinstance(record, Mapping):
            return record
        if "class_name" not in record:
            return self._entries(record, kind)
        if kind is kinds()["activation"] and record["class_name"] == "function":
            return self._function(record)
        if str(record["class_name"]).startswith("__"):
            return self._data(record)
        return self._object(record, kind)

    def _entries(self, config: Mapping[str, Any], otherwise: Kind | None = None) -> dict[str, Any]:
        """Returns a copy of a dict, whose keys determine the allowed objects."""
        found = {}
        for key, value in config.items():
            if key in _BOUNDED and _largest(value) > _LARGEST:
                raise _refused(f"{key}={value!r:.80}, which is more than {_LARGEST}")
            if key == "unroll" and value:
                raise _refused("unroll=True, whose work has no bound")
            if key == "activity_regularizer" and _multiplies_rows(value):
                raise _refused(f"{key}={value!r:.80}, which multiplies the rows of a batch")
            found[key] = self.read(value, _kind_of(key) or otherwise)
        return found

    def _object(self, record: Mapping[str, Any], kind: Kind | None) -> dict[str, Any]:
        module, name = record.get("module"), record["class_name"]
        registered = record.get("registered_name") or name
        if kind is None or not isinstance(name, str) or not isinstance(registered, str):
            raise _refused(f"{module}.{name}, where no object is allowed")
        is_own = registered == name and isinstance(module, str) and (module, name) in kind.own
        if is_own:
            made = kind.own[str(module), name]
        else:
            made = self._foreign(name, registered, module, kind)
        config = record.get("config")
        if not isinstance(config, Mapping):
            raise CheckpointError(
                f"The model of the checkpoint holds {config!r:.80} instead of a config."
            )
        listed, nodes = config.get("layers"), record.get("inbound_nodes")
        if name == "Sequential" and isinstance(listed, list) and len(listed) > _MOST_IN_A_ROW:
            raise _refused(
                f"a Sequential of {len(listed)} layers, which is more than {_MOST_IN_A_ROW}"
            )
        outside, self.calls = self.calls, 0
        entries = self._entries(config, None if is_own else kinds()[""])
        self.unfolded += self.calls
        if issubclass(made, keras.Operation):
            times = len(nodes) if isinstance(nodes, list) else 0
            self.calls = (1 + self.calls) * max(1, times)
        self.calls += outside
        kept = {key: self.read(record[key], None) for key in _KEPT if key in record}
        return {
            "module": module,
            "class_name": name,
            "config": entries,
            "registered_name": None if is_own else registered,
            **kept,
        }

    def _foreign(self, name: str, registered: str, module: Json, kind: Kind) -> type:
        """Returns the custom class that a record names, and adds it to `used`."""
        found = _known(registered) or _known(name)
        if not isinstance(found, type):
            raise _refused(
                f"{module}.{name}, which is neither registered nor on the list of Keras objects "
                "that a file may name",
                name,
            )
        if not issubclass(found, kind.base):
            raise _refused(f"{name}, which must be a Keras {kind.what}, but is {found!r}")
        self.used[registered] = found
        return found

    def _function(self, record: Mapping[str, Any]) -> Any:
        name, module = record.get("config"), record.get("module")
        if not isinstance(name, str):
            raise CheckpointError(
                f"The model of the checkpoint holds {name!r:.80} instead of a function."
            )
        if module in ("builtins", "keras.activations") and name in kinds()["activation"].names:
            return name
        found = _known(name)
        if not isinstance(found, FunctionType):
            raise _refused(f"the function {name}, which is not registered", name)
        self.used[name] = found
        return {"module": module, "class_name": "function", "config": name, "registered_name": name}

    def _text(self, text: str, kind: Kind | None) -> str:
        """Returns a string, unless Keras would resolve it to an object that is not allowed."""
        if kind is not None and kind.names:
            found = _known(text)
            fits = isinstance(found, type) and issubclass(found, kind.base)
            if text not in kind.names and (not fits or kind is kinds()["activation"]):
                raise _refused(f"{text!r}, which is not a known {kind.what}", text)
            if found is not None:
                self.used[text] = found
        elif _known(text) is not None and ">" in text:
            raise _refused(f"{text!r}, where no object is allowed")
        return text

    def _data(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of a number, slice or tensor in the calls of a functional model."""
        tag, config = record["class_name"], record.get("config")
        if not isinstance(config, Mapping) or record.get("module") is not None:
            raise CheckpointError(f"The model of the checkpoint holds a malformed {tag}.")
        if tag == "__slice__":
            config = {key: self.read(config.get(key), None) for key in ("start", "stop", "step")}
        elif tag in ("__numpy__", "__tensor__", "__keras_tensor__"):
            dtype = config.get("dtype")
            if dtype not in DTYPES or not _is_plain(list(config.values())):
                raise _refused(f"a tensor of dtype {dtype!r:.40}, or not of numbers")
        elif tag != "__ellipsis__":
            raise _refused(f"{tag!r:.40}")
        return {"class_name": tag, "config": dict(config)}


def _known(name: str) -> Any:
    """Returns the object registered under a name or given by a scope; None without."""
    return keras.saving.get_registered_object(name)


def _kind_of(key: str) -> Kind | None:
    if key in _LAYER_KEYS:
        return kinds()["layer"]
    ending = key.rpartition("_")[2]
    return kinds().get(ending) if ending else None


def _is_plain(value: Json) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _multiplies_rows(value: Json) -> bool:
    """Returns whether a regularizer multiplies all pairs of rows; the batch size has no limit."""
    name = value.get("class_name") if isinstance(value, Mapping) else value
    config = value.get("config") if isinstance(value, Mapping) else None
    mode = config.get("mode", "rows") if isinstance(config, Mapping) else "rows"
    return str(name).replace("_", "").lower() == "orthogonalregularizer" and mode == "rows"


def _largest(value: Json) -> float:
    if isinstance(value, list | tuple):
        return max(map(_largest, value), default=0)
    return abs(value) if isinstance(value, int | float) else 0


def _refused(what: str, name: str | None = None) -> CheckpointError:
    given = f"custom_objects={{{name!r}: ...}}, or " if name else ""
    return CheckpointError(
        f"The model of the checkpoint cannot be rebuilt: it names {what}. If you trust it, pass "
        f'{given}the whole model as config={{"model": model}}, to `from_checkpoint`.'
    )
