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

from tfpolicies.errors import ModelImportError, suggest_similar_names
from tfpolicies.models.actor_critic_model import get_actor_variables
from tfpolicies.models.layer_tree import VariableOwner, find_variable_owners
from tfpolicies.storage.keras_weights import (
    KerasWeights,
    LayerWeights,
    parse_layer_path,
    strip_underscores,
)

_NUM_NEIGHBOURS = 3  # number of layers before and after the wrong one in the list of an error


class MappedWeight(NamedTuple):
    """One line of the report."""

    layer: str  # the layer's name in the file
    weight: str  # the weight's name or number in the file
    variable: str  # the key of the policy's variable
    matched_by: str  # "name" or "order"
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
            source = f"{entry.layer}/{entry.weight}".lstrip("/")
            rows.append((source, entry.variable, entry.matched_by, str(entry.shape)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        unchanged = [f"not in the file, and unchanged: {', '.join(self.kept)}"]
        return "\n".join(lines + unchanged * bool(self.kept))


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
    target: VariableOwner
    matched_by: str


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
    """
    if not any(str(variable.dtype) in _QUANTIZED_DTYPES for variable in model.variables):
        require_unquantized(source, file)
    owners = find_variable_owners(model)
    layers = _remove_normalization(source.layers, owners)
    if source.kind.startswith("keras2"):
        layers = _split_wrappers(layers, owners)
    targets = _select_targets(len(layers), owners, model)
    matcher = _Matcher(KerasWeights(source.kind, layers), targets, str(file), allow_missing)
    pairs = matcher.match()
    arrays: dict[str, np.ndarray] = {}
    report: list[MappedWeight] = []
    for layer, target, matched_by in pairs:
        for index, position in _align_weights(layer, target) or ():
            name, array = layer.weights[index]
            variable, key = model.variables[position], keys[position]
            converted = _cast_to_variable(array, variable, f"{layer.name}/{name}", str(file))
            if key not in arrays:
                arrays[key] = converted
                report.append(MappedWeight(layer.name, name, key, matched_by, array.shape))
            elif not np.array_equal(arrays[key], converted):
                raise ModelImportError(
                    f"`import_file`: {str(file)!r} has two values for one variable: its weight "
                    f"{f'{layer.name}/{name}'!r} differs from that of another layer, although the "
                    "layers share it in the model. Save the model again. Nothing was imported."
                )
    order = {key: number for number, key in enumerate(keys)}
    report.sort(key=lambda entry: order[entry.variable])
    mapping_report = MappingReport(report)
    mapping_report.kept = tuple(o.name for o in _exclude(owners, [pair.target for pair in pairs]))
    return WeightMapping(
        {entry.variable: arrays[entry.variable] for entry in report}, mapping_report
    )


def _remove_normalization(
    layers: Sequence[LayerWeights], owners: Sequence[VariableOwner]
) -> list[LayerWeights]:
    """Returns the layers of a file without `Normalization`, unless the model has such layers."""
    if any(set(owner.roles) == _NORMALIZATION_ROLES for owner in owners):
        return list(layers)
    return [layer for layer in layers if layer.class_name != "normalization"]


_NORMALIZATION_ROLES = {"mean", "variance", "count"}


_QUANTIZED_DTYPES = ("int8", "uint8")


def require_unquantized(source: KerasWeights, file: str | PurePath) -> None:
    """Checks that weights are plain numbers, not codes that separate scales decode.

    Args:
        source: The result of `read_keras_weights`.
        file: The file's name, for the message.
    """
    for layer in source.layers:
        dtypes = [str(weight.array.dtype) for weight in layer.weights]
        dtype = next((name for name in dtypes if name in _QUANTIZED_DTYPES), None)
        if dtype is not None:
            raise ModelImportError(
                f"`import_file`: {str(file)!r} holds a quantized model: its layer "
                f"{_quote_name(layer.name)} has {dtype} weights, but a policy has float weights. "
                "Save the model before `model.quantize(...)`. Nothing was imported."
            )


def _split_wrappers(
    layers: Sequence[LayerWeights], owners: Sequence[VariableOwner]
) -> list[LayerWeights]:
    """Separates the weights of wrappers and of the layers inside, which Keras 2 stores together.

    That concerns wrappers that share a variable with the layer inside: `SpectralNormalization`.
    """
    wrapper_roles = {
        role
        for owner in owners
        for role, position in zip(owner.roles, owner.positions, strict=True)
        if owner.inner_positions and position not in owner.inner_positions
    }
    result = []
    for layer in layers:
        outer = [weight for weight in layer.weights if weight.name in wrapper_roles]
        inner = [weight for weight in layer.weights if weight.name not in wrapper_roles]
        if outer and inner:
            result += [replace(layer, weights=outer)]
            result += [replace(layer, name=f"{layer.name}/layer", weights=inner)]
        else:
            result.append(layer)
    return result


def _select_targets(
    count: int, owners: list[VariableOwner], model: keras.Model
) -> list[VariableOwner]:
    """Returns all layers of the model, or the actor's if the file has only that many."""
    variables = get_actor_variables(model)
    if variables is None or count == len(owners):
        return owners
    ids = {id(variable) for variable in variables}
    actor = [o for o in owners if all(id(model.variables[i]) in ids for i in o.positions)]
    return actor if count == len(actor) else owners


class _Matcher:
    """One application of the rules; each removes the layers that it has paired."""

    def __init__(
        self, source: KerasWeights, targets: list[VariableOwner], file: str, allow_missing: bool
    ) -> None:
        self._kind = source.kind
        self._all_sources, self._all_targets = source.layers, targets
        self._sources, self._targets = list(source.layers), list(targets)
        self._file, self._allow_missing = file, allow_missing
        self._pairs: list[_Pair] = []

    def match(self) -> list[_Pair]:
        self._match_user_names()
        self._match_paths()
        self._match_all_names()
        self._match_order()
        return self._pairs

    def _add_pairs(self, pairs: Sequence[_Pair]) -> None:
        paired_ids = {id(pair.source) for pair in self._pairs}
        self._pairs += [pair for pair in pairs if id(pair.source) not in paired_ids]
        self._sources = _exclude(self._sources, [pair.source for pair in pairs])
        self._targets = _exclude(self._targets, [pair.target for pair in pairs])

    # By name

    def _match_user_names(self) -> None:
        user_named = [pair for pair in self._find_same_names() if _is_user_named(pair)]
        for pair in user_named:
            if _align_weights(pair.source, pair.target) is None:
                raise self._make_mismatch_error(pair.source, pair.target)
        self._add_pairs(user_named)

    def _match_all_names(self) -> None:
        pairs = self._find_same_names()
        complete = len(pairs) == len(self._sources) == len(self._targets)
        if complete and all(self._fits(pair.source, pair.target) for pair in pairs):
            self._add_pairs(pairs)

    def _find_same_names(self) -> list[_Pair]:
        """Returns layers of equal names, or else of equal name endings that match only one."""
        pairs: list[_Pair] = []
        for is_same_name in (operator.eq, _shares_path_suffix):
            sources = _exclude(self._sources, [pair.source for pair in pairs])
            targets = _exclude(self._targets, [pair.target for pair in pairs])
            named_layers = [layer for layer in sources if layer.is_named]
            candidates = [
                (s, t) for s in named_layers for t in targets if is_same_name(s.name, t.name)
            ]
            layers, owners = (
                Counter(id(s) for s, _ in candidates),
                Counter(id(t) for _, t in candidates),
            )
            pairs += [
                _Pair(s, t, "name") for s, t in candidates if layers[id(s)] == owners[id(t)] == 1
            ]
        return pairs

    # By the path under which Keras saves a layer

    def _match_paths(self) -> None:
        anchor = next((layer.path for layer in self._all_sources if layer.path), None)
        if anchor is None or not self._kind.startswith("keras3"):
            return
        anchor = strip_underscores(anchor)
        paths = [strip_underscores(x.path) for x in self._all_targets if x.path is not None]
        moves = [(p[: len(p) - len(anchor)], "") for p in paths if _is_path_suffix(anchor, p)]
        moves += [
            ("", anchor[: len(anchor) - len(p)]) for p in paths if p and _is_path_suffix(p, anchor)
        ]
        complete_matches = [
            pairs
            for move in dict.fromkeys(moves)
            if (pairs := self._match_below(*move)) is not None
        ]
        complete = len(self._all_sources) == len(self._all_targets)
        if len(complete_matches) == 1 and (self._allow_missing or complete):
            self._add_pairs(complete_matches[0])

    def _match_below(self, prefix: str, inner: str) -> list[_Pair] | None:
        """Returns a new pair for each source if all of them have a place, else None.

        Args:
            prefix: the place in the model of the file's layers.
            inner: the place in the file of the model's layers; one of the two is empty.
        """
        owners_by_path: dict[str, list[VariableOwner]] = {}
        for owner in self._all_targets:
            owners_by_path.setdefault(strip_underscores(owner.path or ""), []).append(owner)
        pairs = []
        for layer in self._all_sources:
            path = strip_underscores(layer.path)
            if not path.startswith(inner):
                return None
            owners = owners_by_path.get((prefix + path[len(inner) :]).rstrip("/"), [])
            if len(owners) > 1:  # two attributes, `dense` and `_dense`
                owners = [x for x in owners if _shares_path_suffix(x.path or "", layer.path)]
            if len(owners) != 1 or not self._fits(layer, owners[0]):
                return None
            owner = owners[0]
            matched_by_count = layer.class_name and not _has_same_name(layer, owner)
            pairs.append(_Pair(layer, owner, "order" if matched_by_count else "name"))
        return pairs if len({id(pair.target) for pair in pairs}) == len(pairs) else None

    def _fits(self, layer: LayerWeights, owner: VariableOwner) -> bool:
        """Returns whether the shapes fit and no earlier pair is broken."""
        for pair in self._pairs:
            if pair.source is layer or pair.target is owner:
                return pair.source is layer and pair.target is owner
        return _align_weights(layer, owner) is not None

    # By order

    def _match_order(self) -> None:
        if not self._sources and (self._allow_missing or not self._targets):
            return
        for sources, targets in self._iter_groups():
            if self._allow_missing:
                self._add_pairs(self._match_unique_order(sources, targets))
                continue
            for layer, owner in zip(sources, targets, strict=False):
                if _align_weights(layer, owner) is None:
                    raise self._make_mismatch_error(layer, owner)
                self._add_pairs([_Pair(layer, owner, "order")])
        if self._sources:
            raise self._make_no_place_error(self._sources[0])
        if self._targets and not self._allow_missing:
            raise self._make_no_weights_error(self._targets[0])

    def _iter_groups(self) -> Iterator[tuple[list[LayerWeights], list[VariableOwner]]]:
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

        def get_group_key(shapes: Sequence[tuple[int, ...]], path: str | None) -> tuple:
            is_shared = len(sequences.get(tuple(shapes), ())) > 1
            return (*shapes, parse_layer_path(path or "").role if is_shared else "")

        groups: dict[tuple, list[LayerWeights]] = {}
        for layer in all_sources:
            groups.setdefault(get_group_key(layer.shapes, layer.path), []).append(layer)
        for key, layers in groups.items():
            if len({layer.sequence for layer in layers}) > 1:
                raise self._make_ambiguity_error(layers[0])
            yield layers, [t for t in all_targets if get_group_key(t.shapes, t.path) == key]

    def _match_unique_order(
        self, sources: list[LayerWeights], targets: list[VariableOwner]
    ) -> list[_Pair]:
        """Pairs layers with some of the model's, in order, if only one such pairing exists."""
        first = self._match_greedily(sources, targets)
        last = self._match_greedily(sources[::-1], targets[::-1])[::-1]
        for layer, first_owner, last_owner in zip(sources, first, last, strict=True):
            if first_owner is not last_owner:
                raise self._make_ambiguity_error(layer)
        return [_Pair(s, t, "order") for s, t in zip(sources, first, strict=True)]

    def _match_greedily(
        self, sources: list[LayerWeights], targets: list[VariableOwner]
    ) -> list[VariableOwner]:
        remaining, owners = iter(targets), []
        for layer in sources:
            owner = next((t for t in remaining if self._fits(layer, t)), None)
            if owner is None:
                raise self._make_no_place_error(layer)
            owners.append(owner)
        return owners

    # Errors

    def _make_mismatch_error(self, layer: LayerWeights, owner: VariableOwner) -> ModelImportError:
        relation = "has the same name" if _has_same_name(layer, owner) else "is the next in order"
        return self._make_error(
            f"its layer {_quote_name(layer.name)} has weights of shapes "
            f"{_format_shapes(layer.shapes)}, but the model's layer {_quote_name(owner.name)}, "
            f"which {relation}, has weights of shapes {_format_shapes(owner.shapes)}",
            layer,
            owner,
        )

    def _make_no_place_error(self, layer: LayerWeights) -> ModelImportError:
        hint = suggest_similar_names(layer.name, [owner.name for owner in self._all_targets])
        return self._make_error(
            f"its layer {_quote_name(layer.name)} with weights of shapes "
            f"{_format_shapes(layer.shapes)} fits no layer of the model without weights "
            f"(remaining: {_format_layers(self._targets[: 2 * _NUM_NEIGHBOURS])}).{hint}",
            layer,
        )

    def _make_no_weights_error(self, owner: VariableOwner) -> ModelImportError:
        return self._make_error(
            f"it has no weights of shapes {_format_shapes(owner.shapes)} for the model's layer "
            f"{_quote_name(owner.name)} (`allow_missing=True` leaves such layers unchanged)",
            owner=owner,
        )

    def _make_ambiguity_error(self, layer: LayerWeights) -> ModelImportError:
        return self._make_error(
            f"its layer {_quote_name(layer.name)} with weights of shapes "
            f"{_format_shapes(layer.shapes)} fits more than one layer of the model, and neither "
            "names nor order determine which. Name the layers, or save a .keras file",
            layer,
        )

    def _make_error(
        self, problem: str, layer: LayerWeights | None = None, owner: VariableOwner | None = None
    ) -> ModelImportError:
        sources, targets = self._all_sources, self._all_targets
        return ModelImportError(
            f"`import_file`: {self._file!r} ({self._kind}) does not fit the model: {problem}. The "
            f"file has {len(sources)} layers with weights: "
            f"{_format_layers(_get_neighbours(sources, layer))}; the model has {len(targets)}: "
            f"{_format_layers(_get_neighbours(targets, owner))}. Nothing was imported."
        )


_KERAS_3_ROLES = {"depthwise_kernel": "kernel"}  # Keras 3 names of weights by Keras 2 name


def _align_weights(layer: LayerWeights, owner: VariableOwner) -> list[tuple[int, int]] | None:
    """Returns pairs of weight and variable indices; None if they do not fit.

    All of the owner's variables must be there, or all except those that a layer inside also owns.
    """
    variables = list(zip(owner.roles, owner.shapes, owner.positions, strict=True))
    if len(layer.weights) < len(variables):
        variables = [variable for variable in variables if variable[2] not in owner.inner_positions]
    if len(layer.weights) != len(variables) or not variables:
        return None
    roles = [role for role, _, _ in variables]
    names = [
        x.name if x.name in roles else _KERAS_3_ROLES.get(x.name, x.name) for x in layer.weights
    ]
    order = list(range(len(names)))
    if set(names) == set(roles) and len(set(names)) == len(names):
        order = [names.index(role) for role in roles]
    elif set(names) & set(roles):  # for example gamma in one, beta in the other
        return None
    fits = [layer.shapes[i] for i in order] == [shape for _, shape, _ in variables]
    return [(i, x[2]) for i, x in zip(order, variables, strict=True)] if fits else None


def _cast_to_variable(
    array: np.ndarray, variable: keras.Variable, name: str, file: str
) -> np.ndarray:
    dtype = np.dtype(str(variable.dtype))
    if not np.isfinite(array).all():
        problem = "has values that are NaN or infinite"
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            converted = array.astype(dtype)
        both_float = dtype.kind == array.dtype.kind == "f"
        if np.isfinite(converted).all() if both_float else np.array_equal(converted, array):
            return converted
        problem = f"has {array.dtype} values that {dtype} cannot hold"
    raise ModelImportError(
        f"`import_file`: in {file!r} the weight {name!r} {problem}. Nothing was imported."
    )


def _is_user_named(pair: _Pair) -> bool:
    """Returns whether a user chose the parts of the name that are equal on both sides."""
    parts = min(len(pair.source.name.split("/")), len(pair.target.auto_named))
    return not any(pair.target.auto_named[len(pair.target.auto_named) - parts :])


def _is_path_suffix(short: str, long: str) -> bool:
    return short == long or (short != "" and long.endswith(f"/{short}"))


def _shares_path_suffix(first: str, second: str) -> bool:
    return _is_path_suffix(first, second) or _is_path_suffix(second, first)


_Item = TypeVar("_Item")


def _exclude(items: Sequence[_Item], excluded: Sequence[_Item]) -> list[_Item]:
    ids = {id(item) for item in excluded}
    return [item for item in items if id(item) not in ids]


def _get_neighbours(items: Sequence[_Item], item: _Item | None) -> Sequence[_Item]:
    index = next((i for i, other in enumerate(items) if other is item), 0)
    return items[max(0, index - _NUM_NEIGHBOURS) : index + _NUM_NEIGHBOURS + 1]


def _has_same_name(layer: LayerWeights, owner: VariableOwner) -> bool:
    return layer.is_named and _shares_path_suffix(layer.name, owner.name)


def _quote_name(name: str) -> str:
    return repr(name) if name else "'' (the model itself)"


def _format_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return " ".join(str(tuple(shape)) for shape in shapes)


def _format_layers(layers: Sequence[LayerWeights | VariableOwner]) -> str:
    return ", ".join(f"{_quote_name(x.name)} {_format_shapes(x.shapes)}" for x in layers) or "none"
