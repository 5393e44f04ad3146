"""Calls of Keras models: inputs by name, and rows of zeros to build and to try a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.errors import CheckpointError, ModelError
from tfpolicies.models.ports import NOISE, SEQ_LENS, InputPorts
from tfpolicies.models.preprocessing import get_encoded_shape, is_image
from tfpolicies.models.size_check import check_memory_for_rows, is_built_from_file
from tfpolicies.models.work import TRIAL_ROWS, check_work

ZERO_ROWS = TRIAL_ROWS  # number of sequences, and of steps of each, in a trial call


def make_zero_inputs(ports: InputPorts) -> dict[str, np.ndarray]:
    """Returns encoded inputs of zeros for two rows, or for two sequences of two steps."""
    rows = (ZERO_ROWS, ZERO_ROWS) if ports.is_recurrent else (ZERO_ROWS,)
    shapes = {
        port.name: get_encoded_shape(leaf)
        for port, leaf, mask in zip(ports.obs, ports.obs_leaves, ports.is_mask, strict=True)
        if not mask
    }
    for view in ports.views:
        shapes |= {
            port.name: shape
            for port, shape in zip(view.ports, view.get_encoded_shapes(), strict=True)
        }
    check_memory_for_rows(list(shapes.values()), "A model of such observations")
    inputs = {name: np.zeros((*rows, *shape), np.float32) for name, shape in shapes.items()}
    if ports.is_recurrent:
        inputs |= {port.name: port.zeros(ZERO_ROWS) for port in ports.states}
        inputs[SEQ_LENS] = np.full(ZERO_ROWS, ZERO_ROWS, np.int32)
    if ports.noise_size:
        inputs[NOISE] = np.zeros((ZERO_ROWS, ports.noise_size), np.float32)
    return inputs


def call_model(model: keras.Model, inputs: TensorStructure, *, training: bool = False) -> Any:
    """Calls a model with inputs by name, or with a single one; see `arrange_inputs`."""
    named_inputs = inputs if isinstance(inputs, Mapping) else {"obs": inputs}
    with _statistics_from_weights(model):
        return model(arrange_inputs(model, named_inputs), training=training)


def get_adapted_layers(model: keras.Model) -> list[keras.layers.Normalization]:
    """Returns the layers whose `adapt` computed mean and variance.

    Keras stores both as weights, and as constants that `call` uses; `finalize_state` computes the
    constants from the weights.
    """
    layer_class = keras.layers.Normalization
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, layer_class)]
    return [layer for layer in layers if layer.built and layer.input_mean is None]


@contextlib.contextmanager
def _statistics_from_weights(model: keras.Model) -> Iterator[None]:
    """Lets layers normalise by the mean and variance in their current weights."""
    layers = get_adapted_layers(model)
    saved = [(layer.mean, layer.variance) for layer in layers]
    for layer in layers:
        layer.finalize_state()
    try:
        yield
    finally:
        for layer, (mean, variance) in zip(layers, saved, strict=True):
            layer.mean, layer.variance = mean, variance


def arrange_inputs(model: keras.Model, inputs: Mapping[str, Any]) -> Any:
    """Returns inputs by name in the structure that a model expects.

    The inputs of a functional model have names: `obs_<key>`, or only the key. A single input
    matches any name, and a model without named inputs gets several as a dict.
    """
    structure = getattr(model, "_inputs_struct", None)
    if structure is None:
        return next(iter(inputs.values())) if len(inputs) == 1 else dict(inputs)
    names = [_find_input_name(name, inputs) for name in _get_input_names(structure)]
    if None in names:
        raise ModelError(
            f"The model {model.name!r} has the inputs {_get_input_names(structure)}, but a policy "
            f"provides {sorted(inputs)}. Name each input after one of these: "
            f"keras.Input(shape, name={min(inputs)!r})."
        )
    arrays = [inputs[name] for name in names if name is not None]
    if isinstance(structure, Mapping):
        return dict(zip(structure, arrays, strict=True))
    return arrays if isinstance(structure, list | tuple) else arrays[0]


def get_own_input_names(model: keras.Model, names: Mapping[str, Any]) -> dict[str, str]:
    """Returns a functional model's own names of several inputs, by the names of the policy's.

    It is empty for a model without named inputs, and for one with a single input.
    """
    structure = getattr(model, "_inputs_struct", None)
    if structure is None or len(names) == 1:
        return {}
    pairs = [(_find_input_name(name, names), name) for name in _get_input_names(structure)]
    return {name: own_name for name, own_name in pairs if name is not None}


def _find_input_name(name: str, inputs: Mapping[str, Any]) -> str | None:
    """Returns the input that a functional model's input name refers to; None if there is none."""
    if len(inputs) == 1:
        return next(iter(inputs))
    return next((candidate for candidate in (name, f"obs_{name}") if candidate in inputs), None)


def _get_input_names(structure: TensorStructure) -> list[str]:
    """Returns the names of a functional model's inputs: keys of a dict, or names of tensors."""
    if isinstance(structure, Mapping):
        return [str(key) for key in structure]
    return [tensor.name for tensor in keras.tree.flatten(structure)]


def call_with_zeros(model: keras.Model, ports: InputPorts) -> Any:
    """Builds a model by calling it on zeros; returns its outputs.

    Raises:
        ModelError: if the model cannot be called with such observations.
        CheckpointError: if a file describes it, and it needs too much work (see `limit_work`).
    """
    inputs = make_zero_inputs(ports)
    _require_float_inputs(model, ports, inputs)
    try:
        if is_built_from_file():
            check_work(_get_measurable_parts(model, inputs), f"The model {model.name!r}")
        return call_model(model, inputs)
    except (ModelError, CheckpointError):
        raise
    except Exception as error:
        leading = {1: "B", 2: "B, T"}[1 + ports.is_recurrent]
        shapes = []
        for name, array in inputs.items():
            per_sequence = name == SEQ_LENS or name.startswith("state_in_")
            sizes = array.shape[1:] if per_sequence else array.shape[1 + ports.is_recurrent :]
            axes = ["B" if per_sequence else leading, *map(str, sizes)]
            shapes.append(f"{name} [{', '.join(axes)}]")
        hint = ""
        if not ports.memory and any(isinstance(x, keras.layers.RNN) for x in get_all_layers(model)):
            hint = (
                " A policy acts step by step, so its memory is passed from call to call: let "
                "model={'use_lstm': True} build it, or see 'Memory' in docs/howto/models.md."
            )
        subject = "a dict of these inputs" if len(shapes) > 1 else "encoded observations of shape"
        raise ModelError(
            f"The model {model.name!r} could not be called with {subject}: {' and '.join(shapes)} "
            f"(float32; discrete parts are one-hot): {error}{hint}"
        ) from error


def _get_measurable_parts(
    model: keras.Model, inputs: Mapping[str, Any]
) -> list[tuple[keras.Model, Any]]:
    """Returns the models that `check_work` measures, each with its inputs.

    A functional part of a subclassed model gets the inputs of its input names, or None if they are
    missing.
    """
    if isinstance(model, keras.Function | keras.Sequential):
        return [(model, arrange_inputs(model, inputs))]
    parts: list[tuple[keras.Model, Any]] = []
    for part in model.layers:
        if isinstance(part, keras.Function | keras.Sequential):
            try:
                parts.append((part, arrange_inputs(part, inputs)))
            except ModelError:
                parts.append((part, None))
    return parts


def _require_float_inputs(model: keras.Model, ports: InputPorts, inputs: Mapping[str, Any]) -> None:
    """Raises a `ModelError` if a declared integer input of a model would truncate floats."""
    float_leaves = {
        port.name: leaf
        for port, leaf, mask in zip(ports.obs, ports.obs_leaves, ports.is_mask, strict=True)
        if not mask and (is_image(leaf.space) or np.issubdtype(leaf.dtype, np.floating))
    }
    functional = getattr(model, "_functional", None) or model  # in a `Sequential` with an input
    structure = getattr(functional, "_inputs_struct", None)
    if structure is None:
        return
    tensors = keras.tree.flatten(structure)
    for name, tensor in zip(_get_input_names(structure), tensors, strict=True):
        leaf = float_leaves.get(_find_input_name(name, inputs) or "")
        if leaf is not None and "int" in tensor.dtype:
            reason = (
                "images arrive divided by 255" if is_image(leaf.space) else "they have fractions"
            )
            raise ModelError(
                f"The input {name!r} of the model {model.name!r} has the dtype {tensor.dtype}, but "
                f"observations arrive as float32, and {reason}. Leave the dtype out: "
                f"keras.Input({tuple(tensor.shape[1:])})."
            )


def get_all_layers(model: keras.Model) -> list[keras.layers.Layer]:
    layers: list[keras.layers.Layer] = [model]
    for layer in getattr(model, "layers", []):
        layers.extend(get_all_layers(layer))
    return layers
