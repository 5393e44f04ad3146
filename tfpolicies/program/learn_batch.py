"""The columns of a train batch in the dtypes and shapes that the loss of a Program expects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from tfpolicies.base.finite_checks import NON_NUMERIC_KINDS
from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.rnn_sequencing import ID_COLUMNS, chop_into_sequences
from tfpolicies.errors import BatchError, MissingColumnError, suggest_similar_names
from tfpolicies.models.ports import SEQ_LENS, InputPorts
from tfpolicies.models.spaces import Leaf
from tfpolicies.program.functions import LossGradients, is_per_sequence
from tfpolicies.program.spec import ProgramSpec
from tfpolicies.program.traced_arguments import LOSS_MASK, nest_rows

_REDUCTIONS = ("mean", "min", "max")


class LossSignature(NamedTuple):
    """The inputs and outputs of a loss, discovered by running it on a small batch."""

    columns: dict[str, Any]  # tf.TensorSpec (nested for nested columns), by name
    stat_names: tuple[str, ...]
    reductions: list[int]  # of each statistic: its row in the totals
    fetches: tuple[str, ...]  # names of the results of `extra_learn_fetches_fn`
    reads_mask: bool  # whether the loss reads the row mask, so that minibatches may be padded

    @classmethod
    def from_loss(cls, loss: LossGradients, columns: Mapping[str, Any]) -> LossSignature:
        """Returns the signature of a loss that ran on these tensors."""
        specs = {
            name: tf.nest.map_structure(
                lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), columns[name]
            )
            for name in sorted(loss.batch.accessed_keys - {LOSS_MASK})
        }
        names = tuple(sorted(loss.stats))
        reductions = [_REDUCTIONS.index(reduction_for(name)) for name in names]
        return cls(specs, names, reductions, tuple(sorted(loss.fetches)), loss.batch.is_weighed)


class LearnBatch:
    """A batch that is ready for learning.

    Args:
        columns: the columns that the loss reads, `[N, ...]` each.
        is_recurrent: whether its items are sequences instead of rows.

    Attributes:
        columns: the argument.
        num_items: N.
        count: the number of rows of the items, without padding of sequences.
        is_reused: whether several calls learn from it, between which its arrays may be written.

    Raises:
        BatchError: if there are no rows, or the columns have different numbers of them.
    """

    def __init__(self, columns: dict[str, Any], *, is_recurrent: bool) -> None:
        self.columns = columns
        self.num_items = _check_num_items(columns)
        self.count = int(columns[SEQ_LENS].sum()) if is_recurrent else self.num_items
        self.is_reused = False
        self._is_recurrent = is_recurrent
        self._on_device: tuple[int, Any] | None = None

    def select_range(self, start: int, stop: int) -> np.ndarray:
        """Returns the indices of the rows `[start, stop)`, or of the sequences that begin there."""
        if not self._is_recurrent:
            return np.arange(start, min(stop, self.num_items), dtype=np.int32)
        starts = np.cumsum(self.columns[SEQ_LENS]) - self.columns[SEQ_LENS]
        return np.flatnonzero((starts >= start) & (starts < stop)).astype(np.int32)

    def take(self, items: np.ndarray) -> Any:
        return tf.nest.map_structure(lambda column: column[items], self.columns)

    def count_rows(self, items: np.ndarray) -> int:
        return int(self.columns[SEQ_LENS][items].sum()) if self._is_recurrent else len(items)

    def place(self, capacity: int, to_device: Callable[[Any], Any]) -> Any:
        """Returns the columns on the device, padded to `capacity` items.

        The result is cached, so that a batch is copied once.
        """
        if self._on_device is None or self._on_device[0] != capacity:
            columns: Any = self.columns
            if capacity != self.num_items:
                columns = tf.nest.map_structure(lambda x: _pad(x, capacity), columns)
            self._on_device = capacity, to_device(columns)
        return self._on_device[1]


class BatchReader:
    """Reads the columns of a loss from batches."""

    def __init__(self, spec: ProgramSpec, ports: InputPorts, signature: LossSignature) -> None:
        self._spec = spec
        self._ports = ports
        self._is_recurrent = ports.is_recurrent
        self._specs = signature.columns
        self._defaults = spec.policy_class._column_defaults
        self._dtypes_and_shapes = {  # dtypes and shapes of arrays that need no conversion
            name: (x.dtype.as_numpy_dtype, tuple(x.shape[1:]))
            for name, x in signature.columns.items()
            if not isinstance(x, Mapping)
        }

    def read(self, batch: Mapping[str, Any]) -> LearnBatch:
        """Returns the columns the loss reads, in the dtypes it was traced with.

        Raises:
            MissingColumnError: if the batch lacks one of them.
            BatchError: naming a column whose dtype or shape differs from the traced one.
        """
        if self._is_recurrent:
            batch = to_loss_columns(self._spec, self._ports, batch)
        elif getattr(batch, "get_interceptor", None) is None:
            batch = dict(batch)  # reads of a `SampleBatch` are slower: it records them
        columns = {}
        for name, spec in self._specs.items():
            if name not in batch and name in self._defaults and "rewards" in batch:
                shape = np.shape(batch["rewards"])
                columns[name] = np.full(shape, self._defaults[name], np.float32)
                continue
            if name not in batch:
                raise MissingColumnError(
                    f"The batch has no column {name!r}, which the loss of "
                    f"{self._spec.policy_class.__name__} reads; it has {sorted(batch)}."
                    f"{suggest_similar_names(name, batch)} `postprocess_trajectory` adds derived "
                    "columns."
                )
            column = columns[name] = batch[name]
            is_array = type(column) is np.ndarray and column.ndim > 0
            if is_array and self._dtypes_and_shapes.get(name) == (column.dtype, column.shape[1:]):
                continue
            if not self._is_recurrent:
                column = _to_loss_column(self._spec, self._ports, name, column)
            columns[name] = _check_column(name, spec, column)
        return LearnBatch(columns, is_recurrent=self._is_recurrent)


def to_loss_columns(
    spec: ProgramSpec, ports: InputPorts, batch: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns all columns of a batch that a loss may read, with float32 instead of float64.

    For recurrent models these are sequences: `[S, T, ...]`, padded with their last row up to T,
    with their lengths `seq_lens` `[S]` and the initial recurrent state `[S, ...]` of each.
    Sequences without rows are left out.
    """
    columns = {}
    for name, column in batch.items():
        if name != "infos" and (name != SEQ_LENS or ports.is_recurrent):
            converted = _to_loss_column(spec, ports, name, column)
            if isinstance(converted, Mapping) or converted.dtype != object:
                columns[name] = converted
    return _chop_columns(spec, ports, columns) if ports.is_recurrent else columns


def _to_loss_column(spec: ProgramSpec, ports: InputPorts, name: str, column: Structure) -> Any:
    """Returns one column, nested by dicts only; see `to_loss_columns`."""
    leaves = _get_leaves(spec, ports, name)
    return _to_float32(column) if leaves is None else nest_rows(leaves, column, name)


def _to_float32(column: Structure) -> Any:
    if isinstance(column, Mapping | tuple):
        parts = column.items() if isinstance(column, Mapping) else enumerate(column)
        return {str(key): _to_float32(part) for key, part in parts}
    array = np.asarray(column)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def reduction_for(name: str) -> str:
    """Returns how a statistic is reduced over minibatches, by its name: mean, min or max."""
    prefix = name.partition("_")[0]
    return prefix if prefix in _REDUCTIONS else "mean"


def _get_leaves(spec: ProgramSpec, ports: InputPorts, name: str) -> tuple[Leaf, ...] | None:
    """Returns the leaves of the space of a column; None if it has no space."""
    if name in ("obs", "new_obs"):
        return spec.obs_leaves
    if name in ("actions", "prev_actions"):
        return spec.action_leaves
    return next((view.leaves for view in ports.views if view.name == name), None)


def _chop_columns(spec: ProgramSpec, ports: InputPorts, columns: dict[str, Any]) -> dict[str, Any]:
    columns = _drop_empty_sequences(columns)
    states = [port.name for port in ports.states]
    lengths = columns.get(SEQ_LENS)
    features = {name: x for name, x in columns.items() if not is_per_sequence(name)}
    steps = spec.max_seq_len
    padded, reduced, lengths = chop_into_sequences(
        feature_columns=list(features.values()),
        state_columns=[columns[name] for name in states if name in columns],
        max_seq_len=steps,
        dynamic_max=False,
        seq_lens=lengths,
        states_already_reduced_to_init=lengths is not None,
        padding="last",  # so that computations on padding are as finite as on valid rows
        **{argument: columns[name] for argument, name in ID_COLUMNS.items() if name in columns},
    )
    count = len(lengths)

    def fold(column: Structure) -> Any:
        if isinstance(column, Mapping):
            return {key: fold(part) for key, part in column.items()}
        array = np.asarray(column)
        return array.reshape(count, steps, *array.shape[1:])

    sequences = {name: fold(x) for name, x in zip(features, padded, strict=True)}
    sequences |= dict(zip([name for name in states if name in columns], reduced, strict=True))
    return {**sequences, SEQ_LENS: lengths}


def _drop_empty_sequences(columns: dict[str, Any]) -> dict[str, Any]:
    has_rows = np.asarray(columns.get(SEQ_LENS, ())) > 0
    if has_rows.all():
        return columns
    per_sequence = [name for name in columns if is_per_sequence(name)]
    non_empty = {
        name: columns[name][has_rows]
        for name in per_sequence
        if len(columns[name]) == len(has_rows)
    }
    return {**columns, **non_empty}


def _check_num_items(columns: Mapping[str, Any]) -> int:
    counts = set(map(len, tf.nest.flatten(columns)))
    if len(counts) > 1:
        by_name = {
            name: sorted({len(x) for x in tf.nest.flatten(c)}) for name, c in columns.items()
        }
        raise BatchError(
            f"All columns of a batch need the same number of rows, but they have {by_name}."
        )
    if counts in (set(), {0}):
        raise BatchError("The batch is empty; learning needs at least one row.")
    return counts.pop()


def _check_column(
    name: str, spec: tf.TensorSpec | Mapping[str, tf.TensorSpec], column: Structure
) -> Any:
    if isinstance(spec, Mapping):
        parts = cast(Mapping[str, Structure], column)
        return {key: _check_column(f"{name}/{key}", part, parts[key]) for key, part in spec.items()}
    array = np.asarray(column)
    if array.dtype.kind in NON_NUMERIC_KINDS:
        raise BatchError(f"Column {name!r} must be real numbers, but has the dtype {array.dtype}.")
    shape = tuple(spec.shape[1:])
    if array.ndim == 0 or array.shape[1:] != shape:
        raise BatchError(
            f"Column {name!r} has rows of shape {array.shape[1:]}; the loss was traced for rows of "
            f"shape {shape}. Give all batches of a policy the same shapes."
        )
    return array.astype(spec.dtype.as_numpy_dtype, copy=False)


def _pad(array: np.ndarray, capacity: int) -> np.ndarray:
    padded = np.zeros((capacity, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded
