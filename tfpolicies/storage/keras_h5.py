"""Reads weights from files of Keras 2 and 3, without running code from the file.

Four kinds of file, distinguished by their content:

* "keras3 weights": `model.save_weights("x.weights.h5")`. Groups follow the objects of the model:
  `layers/dense_1/vars/0`. The number counts layers of one class; HDF5 lists them alphabetically.
* "keras3 archive": `model.save("x.keras")`, a zip with such a file and the model's config.
* "keras2 weights" and "keras2 model": `.h5` files with the attributes `layer_names` and
  `weight_names`, as Keras 2 and the legacy writer of Keras 3 make them.

Of a config only names, classes and the order of layers are read. No class is imported, no
Lambda is decoded, no pickle is opened.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import MissingModelFileError, ModelImportError
from tfpolicies.storage.hdf5_reader import Hdf5Object
from tfpolicies.storage.hdf5_source import SIGNATURE, Hdf5Error, UnsupportedHdf5Error
from tfpolicies.storage.keras_weights import (
    KerasWeights,
    LayerWeights,
    NamedArray,
    natural_sort_key,
    parse_layer_path,
    snake_case,
    split_number,
)
from tfpolicies.system.paths import describe_path, resolve_path
from tfpolicies.system.regular_files import read_regular

_ARCHIVE_WEIGHTS, _ARCHIVE_CONFIG = "model.weights.h5", "config.json"
_MAX_INFLATION = 100  # maximal ratio of uncompressed to compressed size
_MAX_DEPTH = 32  # of nested groups
_MAX_PATH = 1024  # characters
_NO_WEIGHTS = {"optimizer", "metrics", "_metrics", "_loss_tracker", "_compile_metrics"}
_SEED = re.compile(r"_?(random_|seed_)generator(_state)?(_\d+)?")


def read_keras_weights(path: str | os.PathLike[str]) -> KerasWeights:
    """Reads the weights of a Keras 2 or 3 file, layer by layer.

    Work and memory are bounded by a small multiple of the file's size (in an archive, of
    100 times its size), whatever the file says about itself.

    Args:
        path: A file of one of the four kinds; the name does not matter.

    Returns:
        The layers that own weights, each array a copy in native byte order. Optimizer slots,
        metrics and seeds of random generators are left out.

    Raises:
        MissingModelFileError: if there is no such file; also a FileNotFoundError.
        ModelImportError: if it is of another kind, damaged or uses features that Keras does not
            use; the message names the file and, if there is one, the layer.
    """
    name, content = repr(os.fspath(path)), _read_content(path)
    try:
        if content.startswith(SIGNATURE):
            return _read_hdf5(content)
        if content.startswith(b"PK\x03\x04"):
            return _read_archive(content)
    except (Hdf5Error, RecursionError) as error:
        is_foreign = isinstance(error, UnsupportedHdf5Error)
        advice = " Load it with Keras and save its weights again." if is_foreign else ""
        raise ModelImportError(
            f"`import_file`: {name} cannot be read as Keras weights: {error}. Nothing was "
            f"imported.{advice}"
        ) from error
    raise ModelImportError(
        f"`import_file`: {name} is neither HDF5 nor a .keras archive. Give a file "
        "written by Keras: .weights.h5, .keras or .h5."
    )


def _read_content(path: str | os.PathLike[str]) -> bytes:
    file = resolve_path(path)
    try:
        return read_regular(file)
    except FileNotFoundError:
        raise MissingModelFileError(
            f"`import_file`: there is no file {describe_path(path, file)}. Check the path."
        ) from None
    except (OSError, ValueError, MemoryError) as error:  # ValueError: a NUL in the path
        raise ModelImportError(f"`import_file`: {str(file)!r} cannot be read: {error}.") from error


# HDF5 ---------------------------------------------------------------------------------------------


def _read_hdf5(content: bytes) -> KerasWeights:
    root = Hdf5Object.read_root(content)
    if _read_names(root, "layer_names") is not None:
        return KerasWeights("keras2 weights", _read_keras2_layers(root))
    if "model_weights" in root.members:
        return KerasWeights("keras2 model", _read_keras2_layers(root.get_child("model_weights")))
    return KerasWeights("keras3 weights", _read_keras3_layers(root))


def _read_array(source: Hdf5Object, weight_path: str) -> NamedArray:
    name = weight_path.rpartition("/")[2].removesuffix(":0")
    try:
        array = source.read_array()
    except Hdf5Error as error:
        raise type(error)(f"the weight {weight_path!r}: {error}") from error
    if array.dtype.kind == "b":
        raise UnsupportedHdf5Error(f"the weight {weight_path!r}: it holds bools, not numbers")
    return NamedArray(name, array.astype(array.dtype.newbyteorder("="), copy=False))


# Keras 2 ------------------------------------------------------------------------------------------


def _read_keras2_layers(group: Hdf5Object) -> list[LayerWeights]:
    names = _read_names(group, "layer_names")
    if names is None:
        raise Hdf5Error("its group 'model_weights' has no list of layers")
    if len(set(names)) != len(names):
        raise Hdf5Error("its list of layers names one twice")
    layers = [layer for name in names for layer in _iterate_keras2_owners(group, name, name)]
    if "top_level_model_weights" in group.members:
        layers += _iterate_keras2_owners(group, "top_level_model_weights", "")
    if not layers:
        raise Hdf5Error("it holds no weights")
    return layers


def _iterate_keras2_owners(
    parent: Hdf5Object, group_name: str, layer: str
) -> Iterator[LayerWeights]:
    """Yields the layers that own a layer's weights, according to the names of the weights."""
    group = parent.find(group_name)
    names = _read_names(group, "weight_names")
    if names is None:
        raise Hdf5Error(f"the layer {group_name!r} has no list of weights")
    if len(set(names)) != len(names):
        raise Hdf5Error(f"the layer {group_name!r} lists a weight twice")
    owners: dict[str, list[NamedArray]] = {}
    for name in names:
        if name.count("/") > _MAX_DEPTH or len(name) > _MAX_PATH:
            raise Hdf5Error(f"its weights are nested deeper than {_MAX_DEPTH}, or have long names")
        owner = _get_keras2_owner(layer, name)
        if not _SEED.fullmatch(name.rpartition("/")[2].removesuffix(":0")):
            owners.setdefault(owner, []).append(_read_array(group.find(name), name))
    for owner in _sort_outer_first(owners):
        yield LayerWeights(owner, None, owners[owner])


def _sort_outer_first(names: Iterable[str]) -> list[str]:
    """Sorts layers like a model: each layer is followed by its inner layers.

    Keras lists the trainable weights of a layer and its inner layers first, and then the others.

    >>> _sort_outer_first(["norm/dense", "norm", "cell/a", "b", "cell/c"])
    ['norm', 'norm/dense', 'cell/a', 'cell/c', 'b']
    """
    first_seen: dict[tuple[str, ...], int] = {}
    orders = {}
    for name in names:
        parts = name.split("/")
        prefixes = [tuple(parts[:end]) for end in range(1, len(parts) + 1)]
        orders[name] = [first_seen.setdefault(prefix, len(first_seen)) for prefix in prefixes]
    return sorted(orders, key=lambda name: orders[name])


def _get_keras2_owner(layer: str, weight: str) -> str:
    """Returns the name of the owner of a weight below its model.

    >>> _get_keras2_owner("lstm", "lstm/lstm_cell/kernel:0")
    'lstm/lstm_cell'
    >>> _get_keras2_owner("dense", "my_model/dense/kernel:0")
    'dense'
    >>> _get_keras2_owner("inner", "dense/kernel:0")
    'inner/dense'
    """
    scopes = weight.split("/")[:-1]
    if not layer:
        return ""
    if layer in scopes:
        scopes = scopes[len(scopes) - scopes[::-1].index(layer) :]
    return "/".join([layer, *scopes])


def _read_names(group: Hdf5Object, attribute: str) -> list[str] | None:
    """Returns a list of names, which Keras splits into numbered attributes if it is long."""
    whole = group.read_strings(attribute)
    if whole is not None:
        return whole
    chunks: list[str] = []
    number = 0
    while (chunk := group.read_strings(f"{attribute}{number}")) is not None:
        chunks += chunk
        number += 1
    return chunks if number else None


# Keras 3 ------------------------------------------------------------------------------------------


def _read_keras3_layers(root: Hdf5Object) -> list[LayerWeights]:
    layers = list(_walk_groups(root, (), (), are_named=True, visited={root.address}))
    if not layers:
        raise Hdf5Error("it holds no weights of a Keras model")
    return layers


def _walk_groups(
    group: Hdf5Object,
    path: tuple[str, ...],
    names: tuple[str, ...],
    *,
    are_named: bool,
    visited: set[int],
) -> Iterator[LayerWeights]:
    """Yields the owners of weights in and below a group.

    `names` are those of the layers around it, without the model; `are_named` says whether all of
    them are stored names. `visited` has the addresses of visited groups; none may occur again.
    """
    if len(path) > _MAX_DEPTH or sum(map(len, path + names)) > _MAX_PATH:
        raise Hdf5Error(f"its groups are nested deeper than {_MAX_DEPTH}, or have long names")
    vars_group = group.get_child("vars") if "vars" in group.members else None
    if vars_group is not None and path:
        stored_names = vars_group.read_strings("name")
        are_named = are_named and bool(stored_names)
        names += tuple(stored_names or ())[:1]
    if vars_group is not None:
        group_path = "/".join(path)
        weights = [
            _read_array(vars_group.get_child(key), f"{group_path}/vars/{key}")
            for key in sorted(vars_group.members, key=_vars_sort_key)
        ]
        if weights:
            location, name = (
                parse_layer_path(group_path),
                "/".join(names) if are_named else group_path,
            )
            yield LayerWeights(
                name, location.class_name, weights, group_path, are_named, location.sequence
            )
    for key in sorted(group.members, key=split_number):
        child = group.get_child(key) if key != "vars" else None
        if child is None or (not path and key in _NO_WEIGHTS) or _SEED.fullmatch(key):
            continue
        if not child.is_group:
            raise Hdf5Error(f"{'/'.join((*path, key))!r} is a weight outside of any layer")
        if child.address in visited:
            raise Hdf5Error(f"the group {'/'.join((*path, key))!r} is in it twice")
        visited.add(child.address)
        key = "layers" if key == "_layer_checkpoint_dependencies" else key
        yield from _walk_groups(child, (*path, key), names, are_named=are_named, visited=visited)


def _vars_sort_key(key: str) -> tuple[int, str]:
    return (int(key), "") if re.fullmatch(r"\d{1,9}", key) else (1 << 32, key)


# .keras archives ----------------------------------------------------------------------------------


class _ConfigLayer(NamedTuple):
    position: int  # in the model's order, layers of inner models included
    name: str  # path of names below the model


def _read_archive(content: bytes) -> KerasWeights:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            weights = _read_member(archive, _ARCHIVE_WEIGHTS)
            config = _read_member(archive, _ARCHIVE_CONFIG)
        config_layers = dict(_iterate_config_layers(json.loads(config), budget=len(config)))
    except Hdf5Error:
        raise
    except (
        *(zipfile.BadZipFile, zlib.error, EOFError, OSError, MemoryError, RecursionError),
        *(NotImplementedError, RuntimeError, ValueError, LookupError, OverflowError, TypeError),
    ) as error:  # a damaged archive makes zipfile raise any of them
        raise Hdf5Error(f"the archive is damaged ({error})") from error
    if not weights.startswith(SIGNATURE):
        raise Hdf5Error(f"its {_ARCHIVE_WEIGHTS} is not an HDF5 file")
    layers = _read_keras3_layers(Hdf5Object.read_root(weights))
    return KerasWeights("keras3 archive", _sort_by_config(layers, config_layers))


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Returns one file of an archive, if it occurs once and is not a zip bomb."""
    infos = [info for info in archive.infolist() if info.filename == name]
    if len(infos) != 1:
        raise Hdf5Error(f"the archive has {len(infos)} files {name!r}")
    info = infos[0]
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
        raise Hdf5Error(f"{name!r} is encrypted or compressed in a way that Keras does not use")
    if info.file_size > info.compress_size * _MAX_INFLATION + 1024:
        raise Hdf5Error(f"{name!r} expands from {info.compress_size} to {info.file_size} bytes")
    with archive.open(info) as file:
        return file.read(info.file_size)


def _iterate_config_layers(model: Json, budget: int) -> Iterator[tuple[str, _ConfigLayer]]:
    """Yields path and record of each layer in the config of a Sequential or functional model.

    Paths and names together must not be longer than `budget`; in regular configs they are not.
    """
    pending: list[tuple[str, str, Any]] = [("", "", model)]  # a stack: depth first
    position = 0
    while pending:
        path, name, record = pending.pop()
        if path:
            yield path, _ConfigLayer(position, name)
            position += 1
        used: dict[str, int] = {}
        inner = []
        for layer in _get_inner_layers(record):
            kind = snake_case(str(layer.get("class_name")))
            number = used[kind] = used.get(kind, -1) + 1
            key = f"{kind}_{number}" if number else kind
            child_name = str(_get_config(layer).get("name"))
            budget -= len(path) + len(name) + len(key) + len(child_name)
            if budget < 0:
                raise Hdf5Error(f"the names in its {_ARCHIVE_CONFIG} are too long")
            inner.append(
                (f"{path}/layers/{key}".lstrip("/"), f"{name}/{child_name}".lstrip("/"), layer)
            )
        pending += reversed(inner)


def _get_config(record: Json) -> dict[str, Any]:
    config = record.get("config") if isinstance(record, dict) else None
    return config if isinstance(config, dict) else {}


def _get_inner_layers(record: Json) -> list[dict[str, Any]]:
    layers = _get_config(record).get("layers")
    return (
        [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    )


def _sort_by_config(
    layers: list[LayerWeights], config_layers: dict[str, _ConfigLayer]
) -> list[LayerWeights]:
    """Sorts layers in the order of the model's config, if it lists all of them."""
    entries = []
    for layer in layers:
        config_layer, remainder = _find_config_layer(layer.path, config_layers)
        if config_layer is None:
            return layers
        named_layer = layer
        if not layer.is_named and not remainder:
            named_layer = replace(layer, name=config_layer.name, is_named=True)
        entries.append(
            (
                config_layer.position,
                natural_sort_key(layer.path),
                replace(named_layer, sequence=remainder),
            )
        )
    return [layer for _, _, layer in sorted(entries, key=lambda entry: entry[:2])]


def _find_config_layer(
    path: str, config_layers: dict[str, _ConfigLayer]
) -> tuple[_ConfigLayer | None, str]:
    """Returns the innermost configured layer around a path, and the rest of the path."""
    parts = path.split("/")
    for cut in range(len(parts), 0, -1):
        config_layer = config_layers.get("/".join(parts[:cut]))
        if config_layer is not None:
            return config_layer, "/".join(parts[cut:])
    return None, path
