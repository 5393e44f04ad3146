"""Whether a copy of a user's model, which Keras rebuilt, computes what the model does."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from tfpolicies.errors import ModelError
from tfpolicies.models.calling import call_model, call_with_zeros, zeros
from tfpolicies.models.ports import InputPorts
from tfpolicies.types import TensorStructure

_TOLERANCE = 1e-4  # of the largest number of an output


def require_equal(model: keras.Model, copy: keras.Model, ports: InputPorts) -> None:
    """Checks that a copy gives what its original does, for random observations.

    Models that do not even give the same twice cannot be compared.

    Args:
        model: the original; it stays as it is.
        copy: as Keras rebuilt it; it gets the original's weights.
        ports: the inputs of the policy.

    Raises:
        ModelError: if it gives something else; it names the layer, if it can be told.
    """
    call_with_zeros(model, ports)
    call_with_zeros(copy, ports)
    for variable, original in zip(copy.variables, model.variables, strict=True):
        variable.assign(original)
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.normal(size=x.shape).astype(np.float32) if x.dtype == np.float32 else x
        for name, x in zeros(ports).items()
    }
    wanted, again = call_model(model, inputs), call_model(model, inputs)
    if not _is_same(wanted, again) or _is_same(call_model(copy, inputs), wanted):
        return
    name = _first_other_layer(model, copy, inputs)
    where = "" if name is None else f", first in its layer {name!r}"
    raise ModelError(
        f"A policy learns with a copy of the model {model.name!r}, which Keras rebuilds from its "
        f"config, and the copy computes something else{where}. An attribute that was set after a "
        "layer was made is not part of a config: take it as an argument of `__init__` and return "
        "it in `get_config`, or give a factory, model=lambda observation_space, num_outputs: ..., "
        "that makes the whole model."
    )


def _first_other_layer(
    model: keras.Model, copy: keras.Model, inputs: Mapping[str, np.ndarray]
) -> str | None:
    """Returns the name of the first layer of a functional model that gives something else."""
    if not isinstance(model, keras.Function | keras.Sequential):
        return None
    for ours, theirs in zip(model.layers, copy.layers, strict=True):
        try:
            parts = [keras.Model(x.inputs, y.output) for x, y in ((model, ours), (copy, theirs))]
            found = [call_model(part, inputs) for part in parts]
        except (AttributeError, ValueError, ModelError):  # it is called several times, for example
            continue
        if not _is_same(*found):
            return str(ours.name)
    return None


def _is_same(one: TensorStructure, other: TensorStructure) -> bool:
    pairs = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return all(_is_close(np.asarray(x), np.asarray(y)) for x, y in pairs)


def _is_close(x: np.ndarray, y: np.ndarray) -> bool:
    largest = float(np.abs(y).max(initial=0.0)) if y.dtype.kind == "f" else 0.0
    if not np.isfinite(largest):
        return bool(np.array_equal(x, y, equal_nan=y.dtype.kind == "f"))
    return x.shape == y.shape and bool(np.allclose(x, y, 0.0, _TOLERANCE * max(largest, 1e-6)))
