"""Imported Keras models: objects, or `.keras` files, from which no code is executed."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpolicies.errors import CheckpointError, MissingModelFileError, ModelImportError
from tfpolicies.importers.imported_model import ImportedModel, TensorInfo
from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.models.keras_json import model_from_json
from tfpolicies.models.size_check import limit_to_stored_weights
from tfpolicies.models.weight_mapping import match_weights, require_unquantized
from tfpolicies.models.work import TRIAL_ROWS, check_work, limit_work
from tfpolicies.storage.keras_h5 import read_keras_weights
from tfpolicies.system.regular_files import read_regular

_MAX_CONFIG_BYTES = 1 << 24  # bytes of an architecture


class ImportedKerasModel(ImportedModel):
    """A functional or sequential Keras model.

    Args:
        model: a built model; each call uses its current weights.
        source: describes its origin in messages.
        model_work_limit: see `limit_work`; it matters for inputs whose sizes a file leaves open.

    Raises:
        ModelImportError: if it has no inputs yet.
    """

    def __init__(
        self,
        model: keras.Model,
        source: str = "The Keras model",
        model_work_limit: float = math.inf,
    ) -> None:
        self.source = source
        self._model_work_limit = model_work_limit
        self._checked_shapes: set[tuple[tuple[int, ...], ...]] = (
            set()
        )  # shapes of rows of the inputs
        try:
            flat_model = keras.Model(model.inputs, model.outputs)
        except (AttributeError, ValueError, TypeError) as error:
            raise ModelImportError(
                f"{source} {model.name!r} has no inputs yet; call model.build(...) first. Give a "
                "functional or sequential model."
            ) from error
        self._model = flat_model
        self._function = tf.function(lambda x: flat_model(x, training=False), reduce_retracing=True)
        self.inputs = [_make_tensor_info(x.name, x) for x in flat_model.inputs]
        names = getattr(model, "output_names", None)
        names = names or [f"output_{i}" for i in range(len(flat_model.outputs))]  # as exports do
        self.outputs = [
            _make_tensor_info(name, x) for name, x in zip(names, flat_model.outputs, strict=True)
        ]

    @ensure_eager()
    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns all outputs by name; see `ImportedModel.run`.

        Raises:
            ModelImportError: if a file's model exceeds the computation limit for inputs of these
                sizes.
        """
        self._require_work([np.shape(feed[x.name])[1:] for x in self.inputs])
        result: Any = self._function([tf.constant(feed[x.name]) for x in self.inputs])
        outputs = result if isinstance(result, list | tuple) else [result]
        return {x.name: np.asarray(y) for x, y in zip(self.outputs, outputs, strict=True)}

    def _require_work(self, shapes: list[tuple[int, ...]]) -> None:
        if tuple(shapes) in self._checked_shapes:
            return
        pairs = zip(shapes, self._model.inputs, strict=True)
        tensors = [keras.KerasTensor((TRIAL_ROWS, *shape), x.dtype) for shape, x in pairs]
        try:
            with limit_work(self._model_work_limit):
                check_work([(self._model, tensors)], self.source)
        except CheckpointError as error:
            raise ModelImportError(str(error)) from error
        self._checked_shapes.add(tuple(shapes))


_FILE_ERRORS = (OSError, KeyError, ValueError, RecursionError, zipfile.BadZipFile)


def read_keras_file(path: Path, model_work_limit: float = 1.0) -> ImportedKerasModel:
    """Returns the model in a `.keras` file, built from Keras classes that a file may name.

    Args:
        path: the file.
        model_work_limit: see `limit_work`.
    """
    source = f"The Keras file {os.fspath(path)!r}"
    try:
        with zipfile.ZipFile(io.BytesIO(read_regular(path))) as archive:
            text = archive.open("config.json").read(_MAX_CONFIG_BYTES)
        config, description = json.loads(text), f"The model of {source}"
        try:
            weights = read_keras_weights(path)
        except ModelImportError:
            with limit_to_stored_weights(source, 0), limit_work(model_work_limit):
                model_from_json(config, description)  # refused names are reported first
            raise
        count = sum(x.array.size for layer in weights.layers for x in layer.weights)
        try:
            with limit_to_stored_weights(source, count), limit_work(model_work_limit):
                model = model_from_json(config, description)
        except CheckpointError:
            require_unquantized(weights, path)  # files must not name its dtype policies
            raise
    except FileNotFoundError as error:
        raise MissingModelFileError(f"{source} is not there.") from error
    except (*_FILE_ERRORS, CheckpointError) as error:
        raise ModelImportError(f"{source} was refused: {error}") from error
    keys = [str(i) for i in range(len(model.variables))]
    match = match_weights(weights, model, keys, os.fspath(path))
    for key, array in match.arrays.items():
        model.variables[int(key)].assign(array)
    return ImportedKerasModel(model, source, model_work_limit)


def _make_tensor_info(name: str, tensor: keras.KerasTensor) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), np.dtype(str(tensor.dtype)))
