"""Files of Keras 3 and Keras 2, and their mapping to the variables of a model."""

from __future__ import annotations

import base64
import json
import marshal
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from tfpolicies.models.weight_mapping import match_weights
from tfpolicies.storage.keras_h5 import read_keras_weights

KINDS = ("keras3 weights", "keras3 archive", "keras2 weights", "keras2 model")


def sample_model() -> keras.Model:
    """Returns a small model with a cell, moving statistics, seeds and layers in layers."""
    inputs = keras.Input((5, 4))
    hidden = keras.layers.LSTM(3)(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.1)], name="inner")
    return keras.Model(inputs, keras.layers.Dense(2, name="logits")(inner(hidden)))


def sample_file(model: keras.Model, kind: str, folder: Path) -> bytes:
    """Returns the bytes of a file of that kind with the weights of `model`."""
    if kind == "keras3 weights":
        path = folder / "sample.weights.h5"
        model.save_weights(path)
    elif kind == "keras3 archive":
        path = folder / "sample.keras"
        model.save(path)
    else:
        path = folder / "sample.h5"
        write_keras2(path, model, whole=kind == "keras2 model")
    return path.read_bytes()


def write_keras2(path: Path, model: keras.Model, *, whole: bool) -> None:
    """Writes a file as Keras 2 does; a whole model has a config with a Lambda that raises."""
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"] = b"2.15.0"
        file.attrs["backend"] = b"tensorflow"
        group = file
        if whole:
            file.attrs["model_config"] = json.dumps(_config_with_lambda()).encode()
            slots = file.create_group("optimizer_weights")
            slots.create_dataset("Adam/iter:0", data=np.int64(7))
            slots.attrs["weight_names"] = np.asarray([b"Adam/iter:0"])
            group = file.create_group("model_weights")
        layers = [layer for layer in model.layers if layer.weights]
        group.attrs["layer_names"] = np.asarray([layer.name.encode() for layer in model.layers])
        for layer in model.layers:
            part = group.create_group(layer.name)
            names = [f"{_keras2_scope(layer, v)}/{v.name}:0" for v in layer.weights]
            part.attrs["weight_names"] = np.asarray([name.encode() for name in names])
            for name, variable in zip(names, layer.weights if layer in layers else (), strict=True):
                part.create_dataset(name, data=np.asarray(variable))


def _keras2_scope(layer: keras.layers.Layer, variable: Any) -> str:
    scopes = variable.path.split("/")[:-1]
    if isinstance(layer, keras.Model):
        return scopes[-1]
    return "/".join(scopes[scopes.index(layer.name) :])


def _config_with_lambda() -> dict[str, Any]:
    code = compile("raise SystemExit('code of the file was run')", "file", "exec")
    function = [base64.b64encode(marshal.dumps(code)).decode(), None, None]
    config = {"name": "lambda", "function": function, "function_type": "lambda"}
    layers = [{"class_name": "Lambda", "config": config}]
    return {"class_name": "Sequential", "config": {"name": "sequential", "layers": layers}}


WRITERS = ("weights", "archive", "legacy", "keras2")


def write_model(model: keras.Model, folder: Path, writer: str) -> Path:
    """Writes a model, or its weights only, in one of the formats of `WRITERS`."""
    path = folder / {"weights": "x.weights.h5", "archive": "x.keras"}.get(writer, "x.h5")
    if writer == "weights":
        model.save_weights(path)
    elif writer == "keras2":
        write_keras2(path, model, whole=False)
    else:
        model.save(path)
    return path


def strip_names(file: h5py.File) -> None:
    """Removes the names of layers that newer versions of Keras store as attributes."""
    file.visititems(lambda _, item: [item.attrs.pop(key) for key in list(item.attrs)] and None)


def make_keys(model: keras.Model) -> list[str]:
    return [f"key_{i}" for i in range(len(model.variables))]


def map_file(path: Path, model: keras.Model, **options: Any) -> Any:
    """Maps the weights of a file to the variables of a model, named by `make_keys`."""
    return match_weights(read_keras_weights(path), model, make_keys(model), path, **options)


def assert_mapped(mapping: Any, variables: list[Any], model: keras.Model, original: Any) -> None:
    """Asserts that variables of a model, and no others, get the weights of the original."""
    keys = {id(x): key for key, x in zip(make_keys(model), model.variables, strict=True)}
    assert set(mapping.arrays) == {keys[id(variable)] for variable in variables}
    for variable, weight in zip(variables, original.weights, strict=True):
        np.testing.assert_array_equal(mapping.arrays[keys[id(variable)]], np.asarray(weight))
