"""The layers of a Keras model that own variables: their names and their paths in Keras files."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from tfpolicies.keras_weights import snake_case

_SEED = "seed_generator_state"
_CELLS = (keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell)


class Owner(NamedTuple):
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
    made_up: tuple[bool, ...]
    positions: tuple[int, ...]
    roles: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    inner: frozenset[int] = frozenset()


def idle_seeds(model: keras.Model) -> set[int]:
    """Returns the `id` of each seed that no layer of a model reads.

    Keras's LSTM, GRU and simple cells have a seed generator for dropout even without dropout.
    Subclasses may use it for something else, so their seeds are not included.
    """
    return {
        id(layer.seed_generator.state)
        for layer in model._flatten_layers()
        if type(layer) in _CELLS and not (layer.dropout or layer.recurrent_dropout)
    }


class _Visit(NamedTuple):
    layer: Any
    path: str
    names: tuple[str, ...]
    made_up: tuple[bool, ...]


def owners_of(model: keras.Model) -> list[Owner]:
    """Returns the owners of all variables except seeds, in the order of `model.variables`.

    A variable that several layers share is in each of them, as in Keras's files. The model
    must be built.
    """
    positions = {id(variable): i for i, variable in enumerate(model.variables)}
    unowned = dict(positions)
    owners: dict[Owner, int] = {}  # with the position of the first variable of each

    def add(name: str, path: str | None, made_up: tuple[bool, ...], own: list[Any]) -> None:
        first = min([unowned[id(x)] for x in own if id(x) in unowned], default=None)
        indices = tuple(positions[id(variable)] for variable in own)
        roles = tuple(variable.name for variable in own)
        shapes = tuple(tuple(variable.shape) for variable in own)
        owner = Owner(name, path, made_up, indices, roles, shapes)
        owners[owner] = min(indices) if first is None else first
        for variable in own:
            unowned.pop(id(variable), None)

    for layer, path, names, made_up in _visits(model):
        variables = layer._trainable_variables + layer._non_trainable_variables
        own = [variable for variable in variables if id(variable) in positions]
        if own:
            add("/".join(names), path, made_up, own)
    for variable in model.variables:  # those in attributes that Keras does not save
        if id(variable) in unowned and variable.name != _SEED:
            name = variable.path.rpartition("/")[0]
            add(name, None, (True,) * (name.count("/") + 1), [variable])
    ordered = sorted(owners, key=owners.__getitem__)
    return [owner._replace(inner=_get_inner(owner, ordered)) for owner in ordered]


def _get_inner(owner: Owner, owners: Iterable[Owner]) -> frozenset[int]:
    """Returns the positions of an owner that layers inside it also own."""
    if owner.path is None:
        return frozenset()
    prefix = f"{owner.path}/".lstrip("/")
    inside = [x for x in owners if x is not owner and (x.path or "").startswith(prefix)]
    return frozenset(owner.positions).intersection(p for x in inside for p in x.positions)


def _visits(model: keras.Model) -> Iterator[_Visit]:
    """Yields each layer once, by the first path under which Keras saves it."""
    seen: set[int] = set()
    pending = [_Visit(model, "", (), ())]
    while pending:
        visit = pending.pop()
        if id(visit.layer) in seen:
            continue
        seen.add(id(visit.layer))
        yield visit
        counts = isinstance(visit.layer, keras.Model)
        children = [
            _Visit(
                child,
                f"{visit.path}/{key}".lstrip("/"),
                (*visit.names, child.name),
                (*visit.made_up, counts and _is_made_up(child)),
            )
            for key, child in _children(visit.layer)
        ]
        pending += reversed(children)


def _is_made_up(layer: keras.layers.Layer) -> bool:
    return bool(re.fullmatch(rf"{snake_case(type(layer).__name__)}(_\d+)?", layer.name))


def _children(layer: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    """Yields the layers in the attributes of a layer, under Keras's keys."""
    ordered = hasattr(layer, "_operations") or isinstance(layer, keras.Sequential)
    if ordered:
        yield from _listed("layers", layer.layers)
    names = set(dir(layer)) - _of_every_layer()  # including properties: `query_dense`
    for key in sorted(names, key=lambda name: (name.startswith("_"), name)):
        try:
            value = getattr(layer, key)
        except Exception:  # of a property, which Keras also ignores when it saves
            continue
        if isinstance(value, keras.layers.Layer):
            yield key, value
        elif isinstance(value, list | tuple | dict):
            yield from _listed(key, value)


def _listed(key: str, container: Sequence[object] | dict[str, object]) -> Iterator[tuple[str, Any]]:
    """Yields the layers of a list, numbered by class."""
    used: dict[str, int] = {}
    for item in container.values() if isinstance(container, dict) else container:
        if isinstance(item, keras.layers.Layer):
            kind = snake_case(type(item).__name__)
        elif isinstance(item, list | tuple | dict):
            kind = "container"
        else:
            continue
        number = used[kind] = used.get(kind, -1) + 1
        name = f"{key}/{kind}_{number}" if number else f"{key}/{kind}"
        if kind == "container":
            yield from _listed(name, item)
        else:
            yield name, item


@functools.cache
def _of_every_layer() -> frozenset[str]:
    named = keras.layers.Layer(name="any")  # an explicit name: Keras counts generated ones
    tracked = [f"_self_unconditional_{x}" for x in ("checkpoint_dependencies", "dependency_names")]
    return frozenset(dir(named)) | {"_functional", "_operations", "operations", *tracked}
