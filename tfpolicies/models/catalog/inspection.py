"""States and further inputs of Keras models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfpolicies.errors import ModelError

STATE_IN = "state_in_"
SEQ_LENS = "seq_lens"
PREV_ACTIONS = "prev_actions"
PREV_REWARDS = "prev_rewards"
PREV_N_ACTIONS = "prev_n_actions"
PREV_N_REWARDS = "prev_n_rewards"
LAST_N_VIEWS = ("prev_n_obs", PREV_N_ACTIONS, PREV_N_REWARDS)


def get_state_shapes(model: keras.Model) -> list[tuple[int, ...]]:
    """Returns the shapes of a model's states, without the batch; [] for a model without memory.

    A functional model has memory if it has inputs named `state_in_0`, `state_in_1`, ...; a
    subclassed one if it has an attribute `state_shapes`, a list of shapes.
    """
    input_shapes = get_input_shapes(model)
    if input_shapes is None:
        return [_check_known_shape(model, i, s) for i, s in enumerate(_read_state_shapes(model))]
    state_inputs = {
        name: shape for name, shape in input_shapes.items() if name.startswith(STATE_IN)
    }
    expected = [f"{STATE_IN}{i}" for i in range(len(state_inputs))]
    if set(state_inputs) != set(expected):
        raise ModelError(
            f"The state inputs of the model {model.name!r} must be named {', '.join(expected)}, "
            f"got {', '.join(sorted(state_inputs))}."
        )
    return [_check_known_shape(model, i, state_inputs[name][1:]) for i, name in enumerate(expected)]


def get_extra_inputs(model: keras.Model) -> tuple[str, ...]:
    """Returns the names of a model's inputs besides observation and memory.

    These are `prev_actions[_path]`, `prev_rewards` and `seq_lens`. For a functional model they
    are names of its inputs, which may also be `prev_n_obs[_path]`, `prev_n_actions[_path]` and
    `prev_n_rewards`; for a subclassed one its attribute `extra_inputs`, a list of names. A
    subclassed model with `state_shapes` always takes `seq_lens`.
    """
    input_shapes = get_input_shapes(model)
    if input_shapes is not None:
        return tuple(
            name for name in input_shapes if _is_extra(name) or is_view_input(LAST_N_VIEWS, name)
        )
    names = tuple(getattr(model, "extra_inputs", ()))
    unknown = [name for name in names if not (isinstance(name, str) and _is_extra(name))]
    if unknown:
        raise ModelError(
            f"extra_inputs of the model {model.name!r} may name {PREV_ACTIONS}, {PREV_REWARDS} and "
            f"{SEQ_LENS}, got {unknown[0]!r}. Declare other inputs in view_requirements."
        )
    if len(_read_state_shapes(model)) > 0 and SEQ_LENS not in names:
        return (*names, SEQ_LENS)
    return names


def _is_extra(name: str) -> bool:
    return is_view_input((PREV_ACTIONS,), name) or name in (PREV_REWARDS, SEQ_LENS)


def is_view_input(views: tuple[str, ...], name: str) -> bool:
    return any(name == view or name.startswith(f"{view}_") for view in views)


def get_input_shapes(model: keras.Model) -> dict[str, tuple] | None:
    """Returns the shapes of a functional model's inputs by name; None for a subclassed model."""
    if isinstance(model, keras.Sequential):
        return {}
    inputs = getattr(model, "inputs", None)
    if not isinstance(inputs, list | tuple):
        return None
    structure = getattr(model, "input", None)
    if isinstance(structure, Mapping):
        return {str(key): tuple(tensor.shape) for key, tensor in structure.items()}
    return {tensor.name: tuple(tensor.shape) for tensor in inputs}


def _read_state_shapes(model: keras.Model) -> list[Any]:
    shapes = getattr(model, "state_shapes", ())
    if isinstance(shapes, str) or not hasattr(shapes, "__iter__"):
        raise ModelError(
            f"state_shapes of the model {model.name!r} must be a list of shapes such as "
            f"[(64,), (64,)], got {shapes!r}."
        )
    return list(shapes)


def _check_known_shape(
    model: keras.Model, index: int, shape: Sequence[int] | int
) -> tuple[int, ...]:
    sizes = tuple(shape) if hasattr(shape, "__iter__") else (shape,)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(
            f"{STATE_IN}{index} of the model {model.name!r} must have a known shape, such as "
            f"(64,) without the batch, got {sizes}."
        )
    return sizes
