"""Imported SavedModels."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel
from tensorflow.python.eager.cancellation import CancellationManager, CancellationManagerContext

from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.errors import MissingModelFileError, ModelImportError
from tfpolicies.export import player
from tfpolicies.importers.allowed_ops import find_disallowed_operations, find_mistyped_constants
from tfpolicies.importers.imported_model import ImportedModel, TensorInfo
from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.system.log_suppression import suppress_conversion_output
from tfpolicies.system.paths import link_without_wildcards
from tfpolicies.system.regular_files import read_regular

_FILE = "saved_model.pb"
_ACTION, _INITIAL_STATE, _SERVING = "action", "get_initial_state", "serving_default"
_RUN_ERRORS = (
    "was loaded, but does not run: {!s:.200}",
    (tf.errors.OpError, TypeError, ValueError, LookupError),
)
_CALL_LOCK = threading.RLock()  # TensorFlow has one variable for the cancellation of calls


def find_saved_model(path: Path) -> Path | None:
    """Returns the folder of a SavedModel: `path`, or its subfolder with the highest number."""
    if (path / _FILE).exists():
        return (path / _FILE).resolve().parent  # exported version folders link to the newest
    versions = [x for x in path.glob("*") if x.name.isdecimal() and (x / _FILE).exists()]
    return max(versions, key=lambda x: int(x.name), default=None)


class ImportedSavedModel(ImportedModel):
    """One function of a SavedModel.

    Args:
        folder: the SavedModel.
        signature: the name of a signature; None for the function `action`, or the signature
            `action`, `serving_default` or the only one.
        limited: whether the time of loading and of each call is limited, by `CallClock`. A model
            that takes longer is stopped permanently, between two operations. Limited models run one
            at a time.

    Raises:
        MissingModelFileError: if there is none.
        ModelImportError: if it is damaged, has an operation that is not allowed, lacks the
            function, or exceeds the time limit.
    """

    def __init__(self, folder: Path, signature: str | None, limited: bool = True) -> None:
        self.source = f"The SavedModel {os.fspath(folder)!r}"
        self._arguments = (folder, signature, limited)
        self._cancellation = CancellationManager() if limited else None
        _require_allowed_operations(folder, self.source)
        translated = self._translate_errors("cannot be loaded: {!s:.500}")
        with (
            translated,
            link_without_wildcards(folder) as location,
            suppress_conversion_output(),
            self._limit_time(),
        ):
            self._loaded = tf.saved_model.load(str(location))
        problem = "was refused: its signature is not a function of tensors ({!s:.200})"
        with self._translate_errors(problem):
            self._function = self._select_function(signature)
            self._structure = self._function.structured_input_signature
            args, kwargs = self._structure  # names get no prefix if one of them is empty
            self._leaves = [
                *_iterate_leaves(self._structure if args and kwargs else args or kwargs)
            ]
            self.inputs = _make_tensor_infos(self._leaves)
            self.outputs = _make_tensor_infos(_iterate_leaves(self._function.structured_outputs))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the model as its path: another process loads the same folder."""
        return type(self), self._arguments

    @ensure_eager()
    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns all outputs by name; see `ImportedModel.run`."""
        flat = [tf.constant(feed[name]) if name in feed else leaf for name, leaf in self._leaves]
        args, kwargs = tf.nest.pack_sequence_as(self._structure, flat)
        with self._translate_errors(*_RUN_ERRORS), self._limit_time():
            outputs = _iterate_leaves(self._function(*args, **kwargs))
            return {name: np.asarray(x) for name, x in outputs if _is_tensor(x)}

    @ensure_eager()
    def get_initial_state(self) -> list[np.ndarray] | None:
        """Returns the state of `get_initial_state` for one row, without the batch axis."""
        signature = self._loaded.signatures.get(_INITIAL_STATE)
        if signature is None and not hasattr(self._loaded, _INITIAL_STATE):
            return None
        with self._translate_errors(*_RUN_ERRORS), self._limit_time():
            if signature is None:
                state: Any = self._loaded.get_initial_state(tf.constant(1))
            else:
                specs = signature.structured_input_signature[1]
                state = signature(**{name: tf.constant(1, x.dtype) for name, x in specs.items()})
            return [np.asarray(x)[0] for _, x in _iterate_leaves(state)]

    def stop(self) -> None:
        """Stops a running call between two operations, and prevents further calls."""
        if self._cancellation is not None:
            self._cancellation.start_cancel()

    @contextlib.contextmanager
    def _limit_time(self) -> Iterator[None]:
        """Limits the time of TensorFlow calls in its block."""
        if self._cancellation is None:
            yield
            return
        with _CALL_LOCK, CancellationManagerContext(self._cancellation):
            player.CALL_CLOCK.start(self.stop)
            try:
                yield
            except tf.errors.CancelledError as error:
                if not self._cancellation.is_cancelled:
                    raise
                raise ModelImportError(
                    f"{self.source} takes too long: it did not finish in {player.CALL_SECONDS:.3g} "
                    "seconds, and was stopped; give it fewer rows at once, or set "
                    "model_work_limit=math.inf if you trust its origin."
                ) from error
            finally:
                player.CALL_CLOCK.stop()

    @contextlib.contextmanager
    def _translate_errors(
        self, problem: str, kinds: tuple[type[Exception], ...] = (Exception,)
    ) -> Iterator[None]:
        """Converts errors of these kinds to a `ModelImportError` that names model and problem."""
        try:
            yield
        except kinds as error:
            if isinstance(error, ModelImportError) and Exception in kinds:
                raise
            raise ModelImportError(
                f"{self.source} {problem.format(error)}. Save it again with TensorFlow 2."
            ) from error

    def _select_function(self, signature: str | None) -> Any:
        signatures = self._loaded.signatures
        functions = getattr(getattr(self._loaded, _ACTION, None), "concrete_functions", ())
        if signature is None and functions:
            return min(functions, key=_count_fixed_rows)
        other_names = [name for name in signatures if name not in (_ACTION, _SERVING)]
        names = (
            [signature] if signature else [_ACTION, _SERVING, *other_names[: len(other_names) == 1]]
        )
        for name in names:
            if name in signatures:
                return signatures[name]
        raise ModelImportError(
            f"{self.source} has no signature {names[0]!r}, but {sorted(signatures)}. Name one: "
            "import_policy(..., signature=...)."
        )


def _require_allowed_operations(folder: Path, source: str) -> None:
    try:
        content = read_regular(folder / _FILE)
        model = SavedModel.FromString(content)
    except FileNotFoundError as error:
        raise MissingModelFileError(f"{source} has no {_FILE}.") from error
    except (OSError, DecodeError) as error:
        raise ModelImportError(f"{source} cannot be read: {error}.") from error
    for path in folder.rglob("*"):
        if not (path.is_file() or path.is_dir()):  # reading a FIFO would block
            raise ModelImportError(f"{source} was refused: {str(path)!r} is not a regular file.")
    for graph in model.meta_graphs:
        if not graph.HasField("object_graph_def"):
            raise ModelImportError(
                f"{source} was saved by TensorFlow 1, and its whole graph would be run. Save it "
                "again with tf.saved_model.save of TensorFlow 2."
            )
        if unknown := find_disallowed_operations(graph):
            raise ModelImportError(
                f"{source} was refused before it was run: it has the operations "
                f"{', '.join(unknown)[:400]}, which are not among those that only compute. Export "
                "the network without them, or load the model yourself and write a Policy that "
                "calls it."
            )
        if mistyped := find_mistyped_constants(graph):
            raise ModelImportError(
                f"{source} is damaged: the values of its constants {', '.join(mistyped)[:400]} are "
                "not of the types that the constants have. Save it again with TensorFlow 2."
            )


def _iterate_leaves(
    structure: TensorStructure, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a structure in the order of `tf.nest`, with their paths as names."""
    if isinstance(structure, Mapping):
        parts: Sequence[tuple[str, Any]] = [(str(key), structure[key]) for key in sorted(structure)]
    elif isinstance(structure, tuple | list):
        names = getattr(structure, "_fields", range(len(structure)))
        parts = [(str(name), part) for name, part in zip(names, structure, strict=True)]
    else:
        yield "/".join(path) or "output", structure
        return
    for name, part in parts:
        yield from _iterate_leaves(part, (*path, name))


def _count_fixed_rows(function: tf.types.experimental.ConcreteFunction) -> int:
    """Returns how many inputs of a function have a fixed batch size."""
    specs = [
        leaf for _, leaf in _iterate_leaves(function.structured_input_signature) if _is_tensor(leaf)
    ]
    return sum(spec.shape.rank not in (None, 0) and spec.shape[0] is not None for spec in specs)


def _is_tensor(leaf: TensorStructure) -> bool:
    return isinstance(leaf, tf.TensorSpec | tf.Tensor)


def _make_tensor_infos(leaves: Iterable[tuple[str, Any]]) -> list[TensorInfo]:
    tensors = []
    for name, spec in leaves:
        if _is_tensor(spec):
            shape = spec.shape.as_list() if spec.shape.rank is not None else [None]
            tensors.append(TensorInfo(name, tuple(shape), np.dtype(spec.dtype.as_numpy_dtype)))
    return tensors
