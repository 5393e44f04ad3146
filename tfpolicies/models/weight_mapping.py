"""Assigns the arrays of a Keras file to the variables of a model.

User-given names have priority, then the paths under which Keras saves layers, then the
order of layers. Every ambiguity is an error: a policy with a wrong layer still acts.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import NamedTuple, TypeVar

import keras
import numpy as np

from tfpolicies.errors import ModelImportError, near_matches
from tfpolicies.keras_weights import KerasWeights, LayerWeights, place_of, without_underscores
from tfpolicies.models.actor_critic import variables_of_actor
from tfpolicies.models.layer_tree import Owner, owners_of

_NEAR = 3  # number of layers before and after the wrong one in the list of an error


class MappedWeight(NamedTuple):
    """One line of the report."""

    layer: str  # the layer's name in the file
    weight: str  # the weight's name or number in the file
    variable: str  # the key of the policy's variable
    how: str  # "name" or "order"
    shape: tuple[int, ...]


class MappingReport(tuple[MappedWeight, ...]):
    """All weights that were mapped; `str()` is a table.

    Attributes:
        kept: the names of the model's layers without weights in the file; they are unchanged.
    """

    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns one line per weight, and one about the unchanged layers."""
        rows = [("file", "policy", "by", "shape")]
        for entry in self:
            where = f"{entry.layer}/{entry.weight}".lstrip("/")
            rows.append((where, entry.variable, entry.how, str(entry.shape)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        kept = [f"not in the file, and unchanged: {', '.join(self.kept)}"]
        return "\n".join(lines + kept * bool(self.kept))


class WeightMapping(NamedTuple):
    """The result of `match_weights`.

    Attributes:
        arrays: key of a variable -> its new value, of the variable's shape and dtype.
        report: the source of each array.
    """

    arrays: dict[str, np.ndarray]
    report: MappingReport


class _Pair(NamedTuple):
    source: LayerWeights
    target: Owner
    how: str


def match_weights(
    source: KerasWeights,
    model: keras.Model,
    keys: Sequence[str],
    file: str | PurePath,
    *,
    allow_missing: bool = False,
) -> WeightMapping:
    """Finds the variable of `model` for each weight of a file. Changes nothing.

    1. Layers of the same user-given name belong together, wherever in the model they are.
    2. A Keras 3 file is laid out like the model it was saved from: layers at the same places of
       `model`, or of one part of one of the two, belong together.
    3. Names that Keras generated (`dense_3`) depend on what else a process has built; they count
       only if the names of all remaining layers in file and model are equal, shapes included.
    4. A file with as many layers as the actor has fills the actor; variables that only the value
       needs stay unchanged.
    5. The remaining layers are paired in the order of the model, shapes being equal. If a file
       does not determine the order (Keras 3 weights, between layers of different classes), only
       layers of one class are paired so, or of shapes that no other class has.

    Layers of the file that normalise inputs (Keras's `Normalization`) are ignored, unless the
    model has such layers. Inside a layer weights are paired by name if both sides have the same
    names, else by order. A variable that layers share may be stored once, or by each of them. Seeds
    of random generators stay unchanged. float16, float64 and integers are cast to the dtype of the
    variable.

    Args:
        source: The result of `read_keras_weights`.
        model: The built model.
        keys: A key for each of `model.variables`, in that order.
        file: The file's name, for messages.
        allow_missing: Accept a file that has no weights for some layers of the model (a plain
            classifier for a policy that also has a critic); they are left out of the result. Every
            layer of the file must still have its place, by a user-given name, by its
            place, or in the only order that fits.

    Raises:
        ModelImportError: if a layer of the file has no place or not only one, a layer of the model
            gets no weights, shapes differ, a weight is NaN, infinite or out of the range of its
            variable, the layers that share a variable have different values for it, or the model
            of the file was quantized. The message names the file, the layers and both shapes.
    """
    if not any(str(variable.dtype) in _CODES for variable in model.variables):
        require_unquantized(source, file)
    owners = owners_of(model)
    layers = _without_normalization(source.layers, owners)
    if source.kind.startswith("keras2"):
        layers = _split_wrappers(layers, owners)
    targets = _targets(len(layers), owners, model)
    matcher = _Matcher(KerasWeights(source.kind, layers), targets, str(file), allow_missing)
    pairs = matcher.pairs()
    arrays: dict[str, np.ndarray] = {}
    report: list[MappedWeight] = []
    for layer, target, how in pairs:
        for index, position in _alignment(layer, target) or ():
            name, array = layer.weights[index]
            variable, key = model.variables[position], keys[position]
            cast = _cast(array, variable, f"{layer.name}/{name}", str(file))
            if key not in arrays:
                arrays[key] = cast
                report.append(MappedWeight(layer.name, name, key, how, array.shape))
            elif not np.array_equal(arrays[key], cast):
                raise ModelImportError(
                    f"`import_file`: {str(file)!r} has two values for one variable: its weight "
                    f"{f'{layer.name}/{name}'!r} differs from that of another layer, although the "
                    "layers share it in the model. Save the model again. Nothing was imported."
                )
    order = {key: number for number, key in enumerate(keys)}
    report.sort(key=lambda entry: order[entry.variable])
    found = MappingReport(report)
    found.kept = tuple(o.name for o in _without(owners, [pair.target for pair in pairs]))
    return WeightMapping({entry.variable: arrays[entry.variable] for entry in report}, found)


def _without_normalization(
    layers: Sequence[LayerWeights], owners: Sequence[Owner]
) -> list[LayerWeights]:
    """Returns the layers of a file without `Normalization`, unless the model has such layers."""
    if any(set(owner.roles) == _OF_NORMALIZATION for owner in owners):
        return list(layers)
    return [layer for layer in layers if layer.class_name != "normalization"]


_OF_NORMALIZATION = {"mean", "variance", "count"}


_CODES = ("int8", "uint8")


def require_unquantized(source: KerasWeights, file: str | PurePath) -> None:
    """Checks that weights are plain numbers, not codes that separate scales decode.

    Args:
        source: The result of `read_keras_weights`.
        file: The file's name, for the message.

    Raises:
        ModelImportError: if a layer has 8-bit integers.
    """
    for layer in source.layers:
        dtypes = [str(weight.array.dtype) for weight in layer.weights]
        dtype = next((each for each in dtypes if each in _CODES), None)
        if dtype is not None:
            raise ModelImportError(
                f"`import_file`: {str(file)!r} holds a quantized model: its layer "
                f"{_called(layer.name)} has {dtype} weights, but a policy has float weights. Save "
                "the model before `model.quantize(...)`. Nothing was imported."
            )


def _split_wrappers(layers: Sequence[LayerWeights], owners: Sequence[Owner]) -> list[LayerWeights]:
    """Separates the weights of wrappers and of the layers inside, which Keras 2 stores together.

    That concerns wrappers that share a variable with the layer inside: `SpectralNormalization`.
    """
    of_wrappers = {
        role
        for owner in owners
        for role, position in zip(owner.roles, owner.positions, strict=True)
        if owner.inner and position not in owner.inner
    }
    result = []
    for layer in layers:
        outer = [weight for weight in layer.weights if weight.name in of_wrappers]
        inner = [weight for weight in layer.weights if weight.name not in of_wrappers]
        if outer and inner:
            result += [replace(layer, weights=outer)]
            result += [replace(layer, name=f"{layer.name}/layer", weights=inner)]
        else:
            result.append(layer)
    return result


def _targets(count: int, owners: list[Owner], model: keras.Model) -> list[Owner]:
    """Returns all layers of the model, or the actor's if the file has only that many."""
    variables = variables_of_actor(model)
    if variables is None or count == len(owners):
        return owners
    ids = {id(variable) for variable in variables}
    actor = [o for o in owners if all(id(model.variables[i]) in ids for i in o.positions)]
    return actor if count == len(actor) else owners


class _Matcher:
    """One application of the rules; each removes the layers that it has paired."""

    def __init__(
        self, source: KerasWeights, targets: list[Owner], file: str, allow_missing: bool
    ) -> None:
        self._kind = source.kind
        self._all_sources, self._all_targets = source.layers, targets
        self._sources, self._targets = list(source.layers), list(targets)
        self._file, self._allow_missing = file, allow_missing
        self._pairs: list[_Pair] = []

    def pairs(self) -> list[_Pair]:
        self._by_given_name()
        self._by_place()
        self._by_every_name()
        self._by_order()
        return self._pairs

    def _take(self, pairs: Sequence[_Pair]) -> None:
        known = {id(pair.source) for pair in self._pairs}
        self._pairs += [pair for pair in pairs if id(pair.source) not in known]
        self._sources = _without(self._sources, [pair.source for pair in pairs])
        self._targets = _without(self._targets, [pair.target for pair in pairs])

    # By name

    def _by_given_name(self) -> None:
        given = [pair for pair in self._same_names() if _is_given(pair)]
        for pair in given:
            if _alignment(pair.source, pair.target) is None:
                raise self._mismatch(pair.source, pair.target)
        self._take(given)

    def _by_every_name(self) -> None:
        named = self._same_names()
        complete = len(named) == len(self._sources) == len(self._targets)
        if complete and all(self._fits(pair.source, pair.target) for pair in named):
            self._take(named)

    def _same_names(self) -> list[_Pair]:
        """Returns layers of equal names, or else of equal name endings that match only one."""
        found: list[_Pair] = []
        for same in (operator.eq, _is_end_of_either):
            sources = _without(self._sources, [pair.source for pair in found])
            targets = _without(self._targets, [pair.target for pair in found])
            named = [layer for layer in sources if layer.is_named]
            hits = [(s, t) for s in named for t in targets if same(s.name, t.name)]
            layers, owners = Counter(id(s) for s, _ in hits), Counter(id(t) for _, t in hits)
            found += [_Pair(s, t, "name") for s, t in hits if layers[id(s)] == owners[id(t)] == 1]
        return found

    # By the path under which Keras saves a layer

    def _by_place(self) -> None:
        anchor = next((layer.path for layer in self._all_sources if layer.path), None)
        if anchor is None or not self._kind.startswith("keras3"):
            return
        anchor = without_underscores(anchor)
        paths = [without_underscores(x.path) for x in self._all_targets if x.path is not None]
        moves = [(p[: len(p) - len(anchor)], "") for p in paths if _is_end(anchor, p)]
        moves += [("", anchor[: len(anchor) - len(p)]) for p in paths if p and _is_end(p, anchor)]
        fitting = [
            pairs for move in dict.fromkeys(moves) if (pairs := self._under(*move)) is not None
        ]
        complete = len(self._all_sources) == len(self._all_targets)
        if len(fitting) == 1 and (self._allow_missing or complete):
            self._take(fitting[0])

    def _under(self, prefix: str, inner: str) -> list[_Pair] | None:
        """Returns a new pair for each source if all of them have a place, else None.

        Args:
            prefix: the place in the model of the file's layers.
            inner: the place in the file of the model's layers; one of the two is empty.
        """
        places: dict[str, list[Owner]] = {}
        for owner in self._all_targets:
            places.setdefault(without_underscores(owner.path or ""), []).append(owner)
        pairs = []
        for layer in self._all_sources:
            path = without_underscores(layer.path)
            if not path.startswith(inner):
                return None
            owners = places.get((prefix + path[len(inner) :]).rstrip("/"), [])
            if len(owners) > 1:  # two attributes, `dense` and `_dense`
                owners = [x for x in owners if _is_end_of_either(x.path or "", layer.path)]
            if len(owners) != 1 or not self._fits(layer, owners[0]):
                return None
            owner = owners[0]
            counted = layer.class_name and not _is_same(layer, owner)
            pairs.append(_Pair(layer, owner, "order" if counted else "name"))
        return pairs if len({id(pair.target) for pair in pairs}) == len(pairs) else None

    def _fits(self, layer: LayerWeights, owner: Owner) -> bool:
        """Returns whether the shapes fit and no earlier pair is broken."""
        for pair in self._pairs:
            if pair.source is layer or pair.target is owner:
                return pair.source is layer and pair.target is owner
        return _alignment(layer, owner) is not None

    # By order

    def _by_order(self) -> None:
        if not self._sources and (self._allow_missing or not self._targets):
            return
        for sources, targets in self._ordered_groups():
            if self._allow_missing:
                self._take(self._only_embedding(sources, targets))
                continue
            for layer, owner in zip(sources, targets, strict=False):
                if _alignment(layer, owner) is None:
                    raise self._mismatch(layer, owner)
                self._take([_Pair(layer, owner, "order")])
        if self._sources:
            raise self._no_place(self._sources[0])
        if self._targets and not self._allow_missing:
            raise self._no_weights(self._targets[0])

    def _ordered_groups(self) -> Iterator[tuple[list[LayerWeights], list[Owner]]]:
        """Yields layers of the file whose order is known, and those of the model they may fit."""
        all_sources, all_targets = self._sources, self._targets
        if self._allow_missing:  # earlier pairs determine the place of the file in the model
            all_sources, all_targets = self._all_sources, self._all_targets
        if len({layer.sequence for layer in all_sources}) <= 1:
            yield all_sources, all_targets
            return
        sequences: dict[tuple, set[str]] = {}
        for layer in all_sources:
            sequences.setdefault(tuple(layer.shapes), set()).add(layer.sequence)

        def group(shapes: Sequence[tuple[int, ...]], path: str | None) -> tuple:
            shared = len(sequences.get(tuple(shapes), ())) > 1
            return (*shapes, place_of(path or "").role if shared else "")

        groups: dict[tuple, list[LayerWeights]] = {}
        for layer in all_sources:
            groups.setdefault(group(layer.shapes, layer.path), []).append(layer)
        for key, layers in groups.items():
            if len({layer.sequence for layer in layers}) > 1:
                raise self._ambiguous(layers[0])
            yield layers, [t for t in all_targets if group(t.shapes, t.path) == key]

    def _only_embedding(self, sources: list[LayerWeights], targets: list[Owner]) -> list[_Pair]:
        """Pairs layers with some of the model's, in order, if only one such pairing exists."""
        first = self._embedding(sources, targets)
        last = self._embedding(sources[::-1], targets[::-1])[::-1]
        for layer, one, other in zip(sources, first, last, strict=True):
            if one is not other:
                raise self._ambiguous(layer)
        return [_Pair(s, t, "order") for s, t in zip(sources, first, strict=True)]

    def _embedding(self, sources: list[LayerWeights], targets: list[Owner]) -> list[Owner]:
        left, found = iter(targets), []
        for layer in sources:
            owner = next((t for t in left if self._fits(layer, t)), None)
            if owner is None:
                raise self._no_place(layer)
            found.append(owner)
        return found

    # Errors

    def _mismatch(self, layer: LayerWeights, owner: Owner) -> ModelImportError:
        why = "has the same name" if _is_same(layer, owner) else "is the next in order"
        return self._error(
            f"its layer {_called(layer.name)} has weights of shapes {_list(layer.shapes)}, but the "
            f"model's layer {_called(owner.name)}, which {why}, has weights of shapes "
            f"{_list(owner.shapes)}",
            layer,
            owner,
        )

    def _no_place(self, layer: LayerWeights) -> ModelImportError:
        hint = near_matches(layer.name, [owner.name for owner in self._all_targets])
        return self._error(
            f"its layer {_called(layer.name)} with weights of shapes {_list(layer.shapes)} fits no "
            "layer of the model without weights (remaining: "
            f"{_layers(self._targets[: 2 * _NEAR])}).{hint}",
            layer,
        )

    def _no_weights(self, owner: Owner) -> ModelImportError:
        return self._error(
            f"it has no weights of shapes {_list(owner.shapes)} for the model's layer "
            f"{_called(owner.name)} (`allow_missing=True` leaves such layers unchanged)",
            owner=owner,
        )

    def _ambiguous(self, layer: LayerWeights) -> ModelImportError:
        return self._error(
            f"its layer {_called(layer.name)} with weights of shapes {_list(layer.shapes)} fits "
            "more than one layer of the model, and neither names nor order determine which. Name "
            "the layers, or save a .keras file",
            layer,
        )

    def _error(
        self, problem: str, layer: LayerWeights | None = None, owner: Owner | None = None
    ) -> ModelImportError:
        sources, targets = self._all_sources, self._all_targets
        return ModelImportError(
            f"`import_file`: {self._file!r} ({self._kind}) does not fit the model: {problem}. The "
            f"file has {len(sources)} layers with weights: {_layers(_around(sources, layer))}; the "
            f"model has {len(targets)}: {_layers(_around(targets, owner))}. Nothing was imported."
        )


_NEW_ROLES = {"depthwise_kernel": "kernel"}  # Keras 3 names of weights by Keras 2 name


def _alignment(layer: LayerWeights, owner: Owner) -> list[tuple[int, int]] | None:
    """Returns pairs of weight and variable indices; None if they do not fit.

    All of the owner's variables must be there, or all except those that a layer inside also owns.
    """
    variables = list(zip(owner.roles, owner.shapes, owner.positions, strict=True))
    if len(layer.weights) < len(variables):
        variables = [each for each in variables if each[2] not in owner.inner]
    if len(layer.weights) != len(variables) or not variables:
        return None
    roles = [role for role, _, _ in variables]
    names = [x.name if x.name in roles else _NEW_ROLES.get(x.name, x.name) for x in layer.weights]
    order = list(range(len(names)))
    if set(names) == set(roles) and len(set(names)) == len(names):
        order = [names.index(role) for role in roles]
    elif set(names) & set(roles):  # for example gamma in one, beta in the other
        return None
    fits = [layer.shapes[i] for i in order] == [shape for _, shape, _ in variables]
    return [(i, x[2]) for i, x in zip(order, variables, strict=True)] if fits else None


def _cast(array: np.ndarray, variable: keras.Variable, what: str, file: str) -> np.ndarray:
    dtype = np.dtype(str(variable.dtype))
    if not np.isfinite(array).all():
        problem = "has values that are NaN or infinite"
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(dtype)
        both_float = dtype.kind == array.dtype.kind == "f"
        if np.isfinite(cast).all() if both_float else np.array_equal(cast, array):
            return cast
        problem = f"has {array.dtype} values that {dtype} cannot hold"
    raise ModelImportError(
        f"`import_file`: in {file!r} the weight {what!r} {problem}. Nothing was imported."
    )


def _is_given(pair: _Pair) -> bool:
    """Returns whether a user chose the parts of the name that are equal on both sides."""
    parts = min(len(pair.source.name.split("/")), len(pair.target.made_up))
    return not any(pair.target.made_up[len(pair.target.made_up) - parts :])


def _is_end(short: str, long: str) -> bool:
    return short == long or (short != "" and long.endswith(f"/{short}"))


def _is_end_of_either(one: str, other: str) -> bool:
    return _is_end(one, other) or _is_end(other, one)


_Item = TypeVar("_Item")


def _without(items: Sequence[_Item], taken: Sequence[_Item]) -> list[_Item]:
    ids = {id(item) for item in taken}
    return [item for item in items if id(item) not in ids]


def _around(items: Sequence[_Item], item: _Item | None) -> Sequence[_Item]:
    at = next((i for i, other in enumerate(items) if other is item), 0)
    return items[max(0, at - _NEAR) : at + _NEAR + 1]


def _is_same(layer: LayerWeights, owner: Owner) -> bool:
    return layer.is_named and _is_end_of_either(layer.name, owner.name)


def _called(name: str) -> str:
    return repr(name) if name else "'' (the model itself)"


def _list(shapes: Sequence[tuple[int, ...]]) -> str:
    return " ".join(str(tuple(shape)) for shape in shapes)


def _layers(layers: Sequence[LayerWeights | Owner]) -> str:
    return ", ".join(f"{_called(x.name)} {_list(x.shapes)}" for x in layers) or "none"
