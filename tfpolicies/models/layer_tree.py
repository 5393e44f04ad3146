"""The layers of a Keras model that own variables: their names and their paths in Keras files."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from tfpolicies.storage.keras_weights import snake_case

_SEED = "seed_generator_state"
_RECURRENT_CELLS = (keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell)


class VariableOwner(NamedTuple):
    """A layer and the variables that it directly owns; the cell of an LSTM is a separate owner.

    Attributes:
        name: the names of the enclosing layers and its name, without the model's: `lstm/lstm_cell`.
        path: its path in Keras 3 files, such as `layers/lstm/cell`; None if it is unknown.
        auto_named: for each part of the name, whether Keras generated it.
        positions: indices of its variables in `model.variables`, in the order Keras saves them.
        roles: their names, such as `kernel`.
        shapes: their shapes.
        inner_positions: the positions of variables that a layer inside it also owns: the kernel in
            `SpectralNormalization(Dense(4))`.
    """

    name: str
    path: str | None
    auto_named: tuple[bool, ...]
    positions: tuple[int, ...]
    roles: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    inner_positions: frozenset[int] = frozenset()


def find_unused_seeds(model: keras.Model) -> set[int]:
    """Returns the `id` of each seed that no layer of a model reads.

    Keras's LSTM, GRU and simple cells have a seed generator for dropout even without dropout.
    Subclasses may use it for something else, so their seeds are not included.
    """
    return {
        id(layer.seed_generator.state)
        for layer in model._flatten_layers()
        if type(layer) in _RECURRENT_CELLS and not (layer.dropout or layer.recurrent_dropout)
    }


class _Visit(NamedTuple):
    layer: Any
    path: str
    names: tuple[str, ...]
    auto_named: tuple[bool, ...]


def find_variable_owners(model: keras.Model) -> list[VariableOwner]:
    """Returns the owners of all variables except seeds, in the order of `model.variables`.

    A variable that several layers share is in each of them, as in Keras's files. The model
    must be built.
    """
    positions = {id(variable): i for i, variable in enumerate(model.variables)}
    remaining = dict(positions)
    owners: dict[VariableOwner, int] = {}  # with the position of the first variable of each

    def add(name: str, path: str | None, auto_named: tuple[bool, ...], own: list[Any]) -> None:
        first_position = min([remaining[id(x)] for x in own if id(x) in remaining], default=None)
        indices = tuple(positions[id(variable)] for variable in own)
        roles = tuple(variable.name for variable in own)
        shapes = tuple(tuple(variable.shape) for variable in own)
        owner = VariableOwner(name, path, auto_named, indices, roles, shapes)
        owners[owner] = min(indices) if first_position is None else first_position
        for variable in own:
            remaining.pop(id(variable), None)

    for layer, path, names, made_up in _iter_layers(model):
        variables = layer._trainable_variables + layer._non_trainable_variables
        owned_variables = [variable for variable in variables if id(variable) in positions]
        if owned_variables:
            add("/".join(names), path, made_up, owned_variables)
    for variable in model.variables:  # those in attributes that Keras does not save
        if id(variable) in remaining and variable.name != _SEED:
            name = variable.path.rpartition("/")[0]
            add(name, None, (True,) * (name.count("/") + 1), [variable])
    sorted_owners = sorted(owners, key=owners.__getitem__)
    return [
        owner._replace(inner_positions=_get_inner_positions(owner, sorted_owners))
        for owner in sorted_owners
    ]


def _get_inner_positions(owner: VariableOwner, owners: Iterable[VariableOwner]) -> frozenset[int]:
    if owner.path is None:
        return frozenset()
    prefix = f"{owner.path}/".lstrip("/")
    inside = [x for x in owners if x is not owner and (x.path or "").startswith(prefix)]
    return frozenset(owner.positions).intersection(p for x in inside for p in x.positions)


def _iter_layers(model: keras.Model) -> Iterator[_Visit]:
    """Yields each layer once, by the first path under which Keras saves it."""
    visited: set[int] = set()
    pending = [_Visit(model, "", (), ())]
    while pending:
        visit = pending.pop()
        if id(visit.layer) in visited:
            continue
        visited.add(id(visit.layer))
        yield visit
        is_model = isinstance(visit.layer, keras.Model)
        children = [
            _Visit(
                child,
                f"{visit.path}/{key}".lstrip("/"),
                (*visit.names, child.name),
                (*visit.auto_named, is_model and _is_auto_named(child)),
            )
            for key, child in _iter_children(visit.layer)
        ]
        pending += reversed(children)


def _is_auto_named(layer: keras.layers.Layer) -> bool:
    return bool(re.fullmatch(rf"{snake_case(type(layer).__name__)}(_\d+)?", layer.name))


def _iter_children(layer: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    """Yields the layers in the attributes of a layer, under Keras's keys."""
    has_layer_list = hasattr(layer, "_operations") or isinstance(layer, keras.Sequential)
    if has_layer_list:
        yield from _iter_container("layers", layer.layers)
    names = set(dir(layer)) - _get_base_layer_attributes()  # including properties: `query_dense`
    for key in sorted(names, key=lambda name: (name.startswith("_"), name)):
        try:
            value = getattr(layer, key)
        except Exception:  # of a property, which Keras also ignores when it saves
            continue
        if isinstance(value, keras.layers.Layer):
            yield key, value
        elif isinstance(value, list | tuple | dict):
            yield from _iter_container(key, value)


def _iter_container(
    key: str, container: Sequence[object] | dict[str, object]
) -> Iterator[tuple[str, Any]]:
    """Yields the layers of a list, numbered by class."""
    counts: dict[str, int] = {}
    for item in container.values() if isinstance(container, dict) else container:
        if isinstance(item, keras.layers.Layer):
            class_name = snake_case(type(item).__name__)
        elif isinstance(item, list | tuple | dict):
            class_name = "container"
        else:
            continue
        number = counts[class_name] = counts.get(class_name, -1) + 1
        name = f"{key}/{class_name}_{number}" if number else f"{key}/{class_name}"
        if class_name == "container":
            yield from _iter_container(name, item)
        else:
            yield name, item


@functools.cache
def _get_base_layer_attributes() -> frozenset[str]:
    layer = keras.layers.Layer(name="any")  # an explicit name: Keras counts generated ones
    tracking_attributes = [
        f"_self_unconditional_{x}" for x in ("checkpoint_dependencies", "dependency_names")
    ]
    return frozenset(dir(layer)) | {
        "_functional",
        "_operations",
        "operations",
        *tracking_attributes,
    }
