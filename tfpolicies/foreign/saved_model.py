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

from tfpolicies.errors import MissingModelFileError, ModelImportError
from tfpolicies.export import player
from tfpolicies.foreign.model import ForeignModel, Socket
from tfpolicies.foreign.operations import mistyped_constants, unknown_operations
from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.system.paths import link_without_wildcards
from tfpolicies.system.quiet import quiet_conversion
from tfpolicies.system.regular_files import read_regular
from tfpolicies.type_aliases import TensorStructure

_FILE = "saved_model.pb"
_ACTION, _MEMORY, _SERVING = "action", "get_initial_state", "serving_default"
_RUNNING = (
    "was loaded, but does not run: {!s:.200}",
    (tf.errors.OpError, TypeError, ValueError, LookupError),
)
_IN_TURN = threading.RLock()  # TensorFlow has one variable for the cancellation of calls


def saved_model_in(path: Path) -> Path | None:
    """Returns the folder of a SavedModel: `path`, or its subfolder with the highest number."""
    if (path / _FILE).exists():
        return (path / _FILE).resolve().parent  # exported version folders link to the newest
    versions = [x for x in path.glob("*") if x.name.isdecimal() and (x / _FILE).exists()]
    return max(versions, key=lambda x: int(x.name), default=None)


class SavedModelFunction(ForeignModel):
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
        self._given = (folder, signature, limited)
        self._cancelling = CancellationManager() if limited else None
        _require_known(folder, self.source)
        named = self._errors_named("cannot be loaded: {!s:.500}")
        with named, link_without_wildcards(folder) as place, quiet_conversion(), self._in_time():
            self._loaded = tf.saved_model.load(str(place))
        problem = "was refused: its signature is not a function of tensors ({!s:.200})"
        with self._errors_named(problem):
            self._function = self._found(signature)
            self._structure = self._function.structured_input_signature
            args, kwargs = self._structure  # names get no prefix if one of them is empty
            self._leaves = [*_paths(self._structure if args and kwargs else args or kwargs)]
            self.inputs = _sockets(self._leaves)
            self.outputs = _sockets(_paths(self._function.structured_outputs))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the model as its path: another process loads the same folder."""
        return type(self), self._given

    @ensure_eager()
    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns all outputs by name; see `ForeignModel.run`."""
        flat = [tf.constant(feed[name]) if name in feed else leaf for name, leaf in self._leaves]
        args, kwargs = tf.nest.pack_sequence_as(self._structure, flat)
        with self._errors_named(*_RUNNING), self._in_time():
            found = _paths(self._function(*args, **kwargs))
            return {name: np.asarray(x) for name, x in found if _is_tensor(x)}

    @ensure_eager()
    def initial_memory(self) -> list[np.ndarray] | None:
        """Returns the state of `get_initial_state` for one row, without the batch axis."""
        signature = self._loaded.signatures.get(_MEMORY)
        if signature is None and not hasattr(self._loaded, _MEMORY):
            return None
        with self._errors_named(*_RUNNING), self._in_time():
            if signature is None:
                given: Any = self._loaded.get_initial_state(tf.constant(1))
            else:
                specs = signature.structured_input_signature[1]
                given = signature(**{name: tf.constant(1, x.dtype) for name, x in specs.items()})
            return [np.asarray(x)[0] for _, x in _paths(given)]

    def stop(self) -> None:
        """Stops a running call between two operations, and prevents further calls."""
        if self._cancelling is not None:
            self._cancelling.start_cancel()

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Limits the time of TensorFlow calls in its block."""
        if self._cancelling is None:
            yield
            return
        with _IN_TURN, CancellationManagerContext(self._cancelling):
            player.CALL_CLOCK.start(self.stop)
            try:
                yield
            except tf.errors.CancelledError as error:
                if not self._cancelling.is_cancelled:
                    raise
                raise ModelImportError(
                    f"{self.source} takes too long: it did not finish in {player.CALL_SECONDS:.3g} "
                    "seconds, and was stopped; give it fewer rows at once, or set "
                    "model_work_limit=math.inf if you trust its origin."
                ) from error
            finally:
                player.CALL_CLOCK.stop()

    @contextlib.contextmanager
    def _errors_named(
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

    def _found(self, signature: str | None) -> Any:
        signatures = self._loaded.signatures
        own = getattr(getattr(self._loaded, _ACTION, None), "concrete_functions", ())
        if signature is None and own:
            return min(own, key=_fixed_rows)
        others = [name for name in signatures if name not in (_ACTION, _SERVING)]
        wanted = [signature] if signature else [_ACTION, _SERVING, *others[: len(others) == 1]]
        for name in wanted:
            if name in signatures:
                return signatures[name]
        raise ModelImportError(
            f"{self.source} has no signature {wanted[0]!r}, but {sorted(signatures)}. Name one: "
            "import_policy(..., signature=...)."
        )


def _require_known(folder: Path, source: str) -> None:
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
        if unknown := unknown_operations(graph):
            raise ModelImportError(
                f"{source} was refused before it was run: it has the operations "
                f"{', '.join(unknown)[:400]}, which are not among those that only compute. Export "
                "the network without them, or load the model yourself and write a Policy that "
                "calls it."
            )
        if mistyped := mistyped_constants(graph):
            raise ModelImportError(
                f"{source} is damaged: the values of its constants {', '.join(mistyped)[:400]} are "
                "not of the types that the constants have. Save it again with TensorFlow 2."
            )


def _paths(structure: TensorStructure, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
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
        yield from _paths(part, (*path, name))


def _fixed_rows(function: tf.types.experimental.ConcreteFunction) -> int:
    """Returns how many inputs of a function have a fixed batch size."""
    specs = [leaf for _, leaf in _paths(function.structured_input_signature) if _is_tensor(leaf)]
    return sum(spec.shape.rank not in (None, 0) and spec.shape[0] is not None for spec in specs)


def _is_tensor(leaf: TensorStructure) -> bool:
    return isinstance(leaf, tf.TensorSpec | tf.Tensor)


def _sockets(leaves: Iterable[tuple[str, Any]]) -> list[Socket]:
    sockets = []
    for name, spec in leaves:
        if _is_tensor(spec):
            shape = spec.shape.as_list() if spec.shape.rank is not None else [None]
            sockets.append(Socket(name, tuple(shape), np.dtype(spec.dtype.as_numpy_dtype)))
    return sockets
