"""Dict of columns of equal length, optionally in sequences: the storage of a `SampleBatch`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from tfpolicies.base.type_aliases import Scalar
from tfpolicies.batch import layout as _layout
from tfpolicies.batch.layout import (
    SEQ_LENS,
    TERMINATEDS,
    TRUNCATEDS,
    Layout,
    iterate_columns,
    map_columns,
)
from tfpolicies.batch.leaves import Column, Leaf, concatenate_columns, iterate_leaves
from tfpolicies.errors import BatchError, BatchUsageError, MissingColumnError, suggest_similar_names

if TYPE_CHECKING:
    from typing_extensions import Self

_SliceType = slice  # the class below has a method named `slice`
_ATTRIBUTES = ("layout", "raw_is_training", "num_grad_updates", "_slices_by_sequence")
_RECORDED_KEY_SETS = ("accessed_keys", "added_keys", "deleted_keys")


class ColumnBatch(dict):
    """Columns by name; `SampleBatch` documents it. Every change is validated first."""

    def __init__(
        self,
        *args: Any,
        _time_major: bool | None = None,
        _max_seq_len: int | None = None,
        _zero_padded: bool | None = None,
        _is_training: bool | None = None,
        _num_grad_updates: float | None = None,
        **columns: Column,
    ) -> None:
        raw_columns = dict(*args, **columns)
        source = args[0] if args and isinstance(args[0], ColumnBatch) else None
        inherited = source.layout if source is not None else Layout()
        layout = Layout(
            _first_not_none(_time_major, inherited.time_major),
            _first_not_none(_zero_padded, inherited.zero_padded),
            _first_not_none(_max_seq_len, inherited.max_seq_len),
        )
        training = raw_columns.pop("is_training", _is_training)
        self.raw_is_training: Any = _first_not_none(
            training, getattr(source, "raw_is_training", False)
        )
        self.num_grad_updates: float | None = _first_not_none(
            _num_grad_updates, getattr(source, "num_grad_updates", None)
        )
        self._slices_by_sequence = False
        self.accessed_keys: set[str] = set()
        self.added_keys: set[str] = set()
        self.deleted_keys: set[str] = set()
        self.get_interceptor: Callable[[Any], Any] | None = None
        self._intercepted: dict[str, Any] = {}
        self._store_columns(_layout.to_columns(raw_columns), layout)

    def _store_columns(self, columns: dict[str, Any], layout: Layout) -> None:
        """Replaces all columns and their layout at once, after checking that they fit together.

        Nothing is converted, and the three sets of recorded keys do not change.

        Raises:
            BatchError: if the columns' lengths differ; nothing is changed then.
        """
        self._count = _layout.count_valid_rows(columns, layout)
        self.layout = layout
        self._intercepted.clear()
        super().clear()
        super().update(columns)

    # -- counting --------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """The number of rows, without padding. It follows every change of the batch.

        Raises:
            BatchError: inside a trace, where the number of rows is unknown.
        """
        if self._count is None:
            raise BatchError(
                "Rows cannot be counted, because these columns are tensors of unknown length. Use "
                "`tf.shape(column)[0]` inside traced code."
            )
        return self._count

    def __len__(self) -> int:
        return self.count

    def __bool__(self) -> bool:
        return self._count != 0

    @property
    def time_major(self) -> bool:
        """Whether columns are [T, B, ...]; then a batch without `seq_lens` has T * B rows."""
        return self.layout.time_major

    @property
    def zero_padded(self) -> bool:
        """Whether every sequence takes `max_seq_len` rows."""
        return self.layout.zero_padded

    @property
    def max_seq_len(self) -> int | None:
        """The padded length of sequences, or that of the longest one; None without sequences."""
        lengths = super().get(SEQ_LENS)
        if isinstance(lengths, np.ndarray):
            return self.layout.width(lengths)
        return self.layout.max_seq_len

    # -- the dict --------------------------------------------------------------------------------

    def __getitem__(self, key: str | slice) -> Any:
        if isinstance(key, slice):
            return self._slice_rows(key)
        if not isinstance(key, str):
            raise TypeError(
                f"A batch is indexed by a column's name or a slice, but got {key!r} of type "
                f"{type(key).__name__}. Iterate over `batch.rows()` for single rows."
            )
        if key == _layout.DONES:
            return self._get_dones()
        if key == "is_training":
            return self.is_training
        if key not in self:
            hint = suggest_similar_names(key, self)
            raise MissingColumnError(f"No column {key!r} in this batch; it has {list(self)}.{hint}")
        self.accessed_keys.add(key)
        if self.get_interceptor is None:
            return super().__getitem__(key)
        if key not in self._intercepted:
            self._intercepted[key] = self.get_interceptor(super().__getitem__(key))
        return self._intercepted[key]

    def _get_dones(self) -> Any:
        parts = [self[name] for name in (TERMINATEDS, TRUNCATEDS) if name in self]
        if not parts:
            raise MissingColumnError(
                f"'dones' is {TERMINATEDS!r} or {TRUNCATEDS!r}, but the batch has neither; it has "
                f"{list(self)}."
            )
        if len(parts) == 2 and isinstance(parts[0], np.ndarray):
            return np.logical_or(*parts)
        return parts[0] if len(parts) == 1 else parts[0] | parts[1]  # tensors

    def __setitem__(self, key: str, value: Column) -> None:
        if key == "is_training":
            self.set_training(value)
            return
        new = _layout.to_columns({key: value})
        if not new:  # empty `seq_lens`
            self.pop(key, None)
            return
        self._count = _layout.count_valid_rows({**self, **new}, self.layout)
        if key not in self:
            self.added_keys.add(key)
        super().__setitem__(key, new[key])
        if self.get_interceptor is not None:
            self._intercepted[key] = new[key]

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise MissingColumnError(f"No column {key!r} to delete; the batch has {list(self)}.")
        layout = self.layout
        if key == SEQ_LENS:
            layout = Layout(time_major=layout.time_major)
        remaining = {name: column for name, column in self.items() if name != key}
        self._count = _layout.count_valid_rows(remaining, layout)
        self.layout = layout
        super().__delitem__(key)
        self._intercepted.pop(key, None)
        self.deleted_keys.add(key)

    def get(self, key: str, default: object = None) -> Any:
        """Returns `self[key]`, or `default` if there is no such column."""
        try:
            return self[key]
        except MissingColumnError:
            return default

    def update(self, *args: object, **columns: Column) -> None:
        """Sets many columns at once; if it sets all of them, their common length may change.

        The three sets of recorded keys do not change.

        Raises:
            BatchError: if the columns do not fit together; the batch is unchanged then.
        """
        self._store_columns({**self, **_layout.to_columns(dict(*args, **columns))}, self.layout)

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: str, default: object = None) -> Any:
        """Returns `self[key]`, after setting it to `default` if there is no such column."""
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: object) -> Any:
        """Deletes a column and returns it; returns `default`, if given, if there is none."""
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """Deletes the newest column and returns its name and value."""
        for key in reversed(self):
            return key, self.pop(key)
        raise MissingColumnError("No column to pop: the batch has none.")

    def clear(self) -> None:
        """Deletes all columns."""
        self.deleted_keys.update(self)
        self._store_columns({}, Layout(time_major=self.time_major))

    # -- rows ------------------------------------------------------------------------------------

    def _slice_rows(self, rows: _SliceType) -> Self:
        if self._slices_by_sequence:
            return self._select_sequences(rows)
        if SEQ_LENS not in self:
            return self._make_like(map_columns(lambda leaf: leaf[rows], _identity, self))
        start, stop, step = rows.indices(self.count)
        _require_step_1(step, rows)
        ends = np.cumsum(super().__getitem__(SEQ_LENS))
        first, last = (int(np.searchsorted(ends, row, side="right")) for row in (start, stop))
        return self._select_sequences(slice(first, max(first, last)))

    def _select_sequences(self, index: _SliceType) -> Self:
        """Returns whole sequences; in a time-major batch without `seq_lens`, entries of axis 1."""
        lengths = super().get(SEQ_LENS)
        if lengths is None and not self.time_major:
            raise BatchUsageError(
                f"A batch can only be sliced along its sequences if it has {SEQ_LENS!r}, but it "
                f"has {list(self)}. Call `disable_slicing_by_batch_id()` first."
            )
        leaf = next(iterate_leaves(self), None)
        width = len(lengths) if lengths is not None else (0 if leaf is None else leaf.shape[1])
        first, last, step = index.indices(width)
        _require_step_1(step, index)
        return self._make_like(
            _layout.slice_sequences(dict(self), self.layout, first, max(first, last))
        )

    def slice(
        self, start: int, end: int, state_start: int | None = None, state_end: int | None = None
    ) -> Self:
        """Returns the rows `start` to `end - 1`, as views unless padding is added.

        Without `seq_lens` this is `self[start:end]`. With it, sequences are cut: `seq_lens` is
        shortened, and `state_in_*` keeps one row for each sequence that has rows in the result. A
        negative `start` adds that many rows of zeros in front.

        Args:
            start: the first row.
            end: the row after the last one; limited to the batch's end.
            state_start: the first sequence whose state is kept; computed if None.
            state_end: the sequence after the last such one; required with `state_start`.

        Raises:
            BatchUsageError: if the states do not cover the rows, or only one bound is given.
            BatchError: if the batch is padded or time-major: its sequences cannot be cut.

        >>> batch = ColumnBatch(obs=[1, 2, 3, 4, 5, 6], seq_lens=[2, 4])
        >>> batch.slice(0, 3)["seq_lens"], batch.slice(-1, 3)["obs"]
        (array([2, 1], dtype=int32), array([0, 1, 2, 3]))
        """
        has_sequences = SEQ_LENS in self
        if (state_start is None) != (state_end is None) or (
            state_start is not None and not has_sequences
        ):
            raise BatchUsageError(
                f"`state_start` and `state_end` go together and need {SEQ_LENS!r}, but got "
                f"{state_start} and {state_end}, and the batch has {list(self)}."
            )
        if not has_sequences:
            return self._make_like(map_columns(lambda leaf: leaf[start:end], _identity, self))
        if self.layout.is_rectangular:
            raise BatchError(
                f"Only sequences without padding can be cut, but the batch has {self.layout}. "
                "Use `batch[start:end]`, which keeps sequences whole."
            )
        states = None if state_start is None else slice(state_start, state_end)
        return self._make_like(_layout.cut_sequences(dict(self), start, end, states))

    def enable_slicing_by_batch_id(self) -> None:
        """Makes `batch[i:j]` select sequences instead of rows."""
        self._slices_by_sequence = True

    def disable_slicing_by_batch_id(self) -> None:
        """Makes `batch[i:j]` select rows again."""
        self._slices_by_sequence = False

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields each row as a dict of single values, without padding, with its nesting.

        In a batch with sequences `seq_lens` is 1, and `state_in_*` is the state at the start of the
        row's sequence.
        """
        columns = (
            map_columns(_layout.to_batch_major, _identity, self) if self.time_major else dict(self)
        )
        lengths = columns.get(SEQ_LENS)
        if lengths is None:
            positions = sequence_indices = np.arange(self.count)
        else:
            positions = _layout.get_row_positions(lengths, self.layout)
            sequence_indices = np.repeat(np.arange(len(lengths)), lengths)
        constants = {} if lengths is None else {SEQ_LENS: 1}
        for position, sequence_index in zip(positions, sequence_indices, strict=True):
            yield map_columns(itemgetter(position), itemgetter(sequence_index), columns) | constants

    def columns(self, keys: Iterable[str]) -> list[Any]:
        """Returns the columns of these names, in this order."""
        return [self[key] for key in keys]

    # -- copies ----------------------------------------------------------------------------------

    def copy(self, shallow: bool = False) -> Self:
        """Returns a batch with the same columns and with separate attributes and key sets.

        Args:
            shallow: whether the arrays are shared with this batch. A deep copy owns its arrays;
                items of lists (the dicts in `infos`) are shared in both.
        """
        columns = dict(self) if shallow else map_columns(_copy_leaf, _copy_leaf, self)
        result = _restore(type(self), columns, self._state())
        result.get_interceptor = self.get_interceptor
        return result

    def _make_like(self, columns: dict[str, Any]) -> Self:
        layout = self.layout
        if layout.is_rectangular and layout.max_seq_len is None:
            layout = layout._replace(max_seq_len=self.max_seq_len)
        result = type(self)(columns, **layout.as_keywords())
        result.raw_is_training = self.raw_is_training
        result.num_grad_updates = self.num_grad_updates
        return result

    def size_bytes(self) -> int:
        """Returns the memory of all columns in bytes; for a list, that of the list itself."""
        leaves = iterate_leaves(self)
        return sum(int(getattr(leaf, "nbytes", None) or sys.getsizeof(leaf)) for leaf in leaves)

    def _state(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in _ATTRIBUTES}
        return state | {name: set(getattr(self, name)) for name in _RECORDED_KEY_SETS}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), dict(self), self._state())  # without the interceptor

    # -- interceptor and training ----------------------------------------------------------------

    def set_get_interceptor(self, fn: Callable[[Any], Any] | None) -> None:
        """Passes every value read by `batch[key]` through `fn`, once per key.

        `items()` and `values()` return the stored values. A value set afterwards is returned as it
        was set. `fn` is not pickled.
        """
        if fn is not self.get_interceptor:
            self._intercepted.clear()
        self.get_interceptor = fn

    @property
    def is_training(self) -> Any:
        """Whether the batch is for a training pass."""
        if self.get_interceptor is None or not isinstance(self.raw_is_training, bool):
            return self.raw_is_training
        if "is_training" not in self._intercepted:
            self._intercepted["is_training"] = self.get_interceptor(self.raw_is_training)
        return self._intercepted["is_training"]

    def set_training(self, training: Column = True) -> None:
        """Sets `is_training`."""
        self.raw_is_training = training
        self._intercepted.pop("is_training", None)


def _restore(cls: type[Any], columns: dict[str, Any], state: dict[str, Any]) -> Any:
    batch = cls(columns, **state["layout"].as_keywords())
    for name, value in state.items():
        setattr(batch, name, value)
    return batch


def _first_not_none(value: Scalar | None, default: Scalar | None) -> Any:
    return default if value is None else value


def _require_step_1(step: int, index: slice) -> None:
    if step != 1:
        raise BatchUsageError(
            f"A batch with sequences is sliced with step 1, but got {index}. Leave the step out."
        )


def _identity(leaf: Leaf) -> Any:
    return leaf


def _copy_leaf(leaf: Leaf) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray | list) else leaf


def join_columns(batches: Sequence[ColumnBatch]) -> tuple[dict[str, Any], Layout]:
    """Returns the concatenated columns and the layout of one or more non-empty batches.

    Raises:
        BatchError: if the batches differ in columns, shapes or layout. A missing column is a
            MissingColumnError.
    """
    layout = _get_common_layout(batches)
    for number, batch in enumerate(batches):
        _require_same_columns(batches[0], batch, number)
    columns = {
        name: concatenate_columns(
            name,
            [dict.get(batch, name) for batch in batches],
            axis=1 if layout.time_major and not per_sequence else 0,
        )
        for name, _, per_sequence in iterate_columns(batches[0])
    }
    return columns, layout


def _get_common_layout(batches: Sequence[ColumnBatch]) -> Layout:
    first = batches[0].layout
    for name in ("time_major", "zero_padded"):
        values = [getattr(batch, name) for batch in batches]
        if len(set(values)) > 1:
            raise BatchError(
                f"Batches to be joined must have the same `{name}`, but have {values}. Join them "
                "before they are padded or transposed."
            )
    lengths = [batch.max_seq_len for batch in batches]
    is_mixed = None in lengths and set(lengths) != {None}
    if is_mixed or (first.is_rectangular and len(set(lengths)) > 1):
        raise BatchError(
            "Batches to be joined must all have sequences, padded to one length, or all have none, "
            f"but their `max_seq_len` are {lengths}. Join them before they are padded."
        )
    return first._replace(max_seq_len=lengths[0] if first.is_rectangular else None)


def _require_same_columns(first: ColumnBatch, batch: ColumnBatch, number: int) -> None:
    missing, extra = sorted(first.keys() - batch.keys()), sorted(batch.keys() - first.keys())
    if missing:
        raise MissingColumnError(
            f"Batches to be joined must have the same columns, but batch {number} lacks {missing}, "
            "which batch 0 has. Add them, or delete them from all batches."
        )
    if extra:
        raise BatchError(
            f"Batches to be joined must have the same columns, but batch {number} has {extra}, "
            "which batch 0 lacks. Delete them, or add them to all batches."
        )
