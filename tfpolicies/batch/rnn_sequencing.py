"""Sequences of bounded length, cut from trajectories for recurrent models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tfpolicies.batch.layout import INFOS, SEQ_LENS, STATE_IN, Layout
from tfpolicies.batch.leaves import (
    count_rows,
    get_padded_positions,
    iterate_leaves,
    map_leaves,
    scatter_rows,
    take_rows,
    to_leaf,
)
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import BatchError

ID_COLUMNS = {
    "episode_ids": SampleBatch.EPS_ID,
    "unroll_ids": SampleBatch.UNROLL_ID,
    "agent_indices": SampleBatch.AGENT_INDEX,
}
"""The id columns of rows, by their argument of `chop_into_sequences`."""


def chop_into_sequences(
    *,
    feature_columns: Sequence[Any],
    state_columns: Sequence[Any],
    max_seq_len: int,
    episode_ids: ArrayLike | None = None,
    unroll_ids: ArrayLike | None = None,
    agent_indices: ArrayLike | None = None,
    dynamic_max: bool = True,
    shuffle: bool = False,
    seq_lens: ArrayLike | None = None,
    states_already_reduced_to_init: bool = False,
    padding: str = "zero",
    rng: np.random.Generator | None = None,
) -> tuple[list[Any], list[Any], np.ndarray]:
    """Cuts rows into sequences and pads these to one length.

    A new sequence starts where the episode, the unroll or the agent changes, and when the
    current one has `max_seq_len` rows.

    Args:
        feature_columns: columns [rows, ...], possibly nested.
        state_columns: columns [rows, ...], or [num_seqs, ...] if already reduced.
        max_seq_len: maximum number of rows per sequence.
        episode_ids: int [rows]; None if all rows are of one episode. The same holds for
            `unroll_ids` and `agent_indices`.
        unroll_ids: int [rows].
        agent_indices: int [rows].
        dynamic_max: whether sequences are padded to the longest of them, not to `max_seq_len`.
        shuffle: whether the sequences are put in random order.
        seq_lens: the lengths [num_seqs], if already known; the ids are not used then.
        states_already_reduced_to_init: whether `state_columns` have one row per sequence.
        padding: `"zero"` (None in columns of objects or text), or `"last"`, which repeats the last
            row of a sequence.
        rng: the source of randomness for `shuffle`; a new one if None.

    Returns:
        The features, each [num_seqs * padded length, ...]; the states [num_seqs, ...] at the
        starts of the sequences; the lengths, int32 [num_seqs].

    Raises:
        BatchError: if lengths do not fit each other or `max_seq_len`, or `padding` is neither.

    >>> features, states, lengths = chop_into_sequences(
    ...     feature_columns=[[4, 4, 8, 8, 8]], state_columns=[[4, 5, 8, 7, 8]], max_seq_len=2,
    ...     episode_ids=[1, 1, 5, 5, 5])
    >>> features[0], states[0], lengths
    (array([4, 4, 8, 8, 8, 0]), array([4, 8, 8]), array([2, 2, 1], dtype=int32))
    """
    if max_seq_len < 1:
        raise BatchError(f"`max_seq_len` must be at least 1, but got {max_seq_len}.")
    if padding not in ("zero", "last"):
        raise BatchError(f'`padding` must be "zero" or "last", but got {padding!r}.')
    features = [map_leaves(to_leaf, column) for column in feature_columns]
    states = [map_leaves(to_leaf, column) for column in state_columns]
    row_columns = [*features, *([] if states_already_reduced_to_init else states)]
    if seq_lens is None:
        id_columns = (episode_ids, unroll_ids, agent_indices)
        ids = [np.asarray(column) for column in id_columns if column is not None]
        lengths = compute_sequence_lengths(
            ids, _count_common_rows([*row_columns, *ids]), max_seq_len
        )
    else:
        lengths = np.asarray(seq_lens)
    _require_lengths(lengths, _count_common_rows(row_columns), max_seq_len)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    if not states_already_reduced_to_init:
        states = _take_rows_of_columns(states, starts)
    elif states and _count_common_rows(states) != len(lengths):
        raise BatchError(
            f"Reduced states must have one row per sequence, so {len(lengths)}, but they have "
            f"{_count_common_rows(states)}. Pass states_already_reduced_to_init=False for one "
            "per row."
        )
    if shuffle:
        order = (rng or np.random.default_rng()).permutation(len(lengths))
        ranges = [np.arange(starts[i], starts[i] + lengths[i]) for i in order]
        features = _take_rows_of_columns(features, np.concatenate([np.empty(0, np.int64), *ranges]))
        states, lengths = _take_rows_of_columns(states, order), lengths[order]
    width = int(lengths.max(initial=0)) if dynamic_max else max_seq_len
    pad = _make_pad_function(lengths, width, padding)
    padded = [map_leaves(pad, column) for column in features]
    return padded, states, lengths.astype(np.int32, copy=False)


def _make_pad_function(lengths: np.ndarray, width: int, padding: str) -> Callable[[Any], Any]:
    if padding == "last":
        steps = np.minimum(np.arange(width), lengths[:, None] - 1)
        rows = (np.cumsum(lengths) - lengths)[:, None] + steps
        return lambda leaf: take_rows(leaf, rows.ravel())
    positions, total = get_padded_positions(lengths, width), len(lengths) * width
    return lambda leaf: scatter_rows(leaf, positions, total)


def _take_rows_of_columns(columns: list[Any], indices: np.ndarray) -> list[Any]:
    return [map_leaves(lambda leaf: take_rows(leaf, indices), column) for column in columns]


def _count_common_rows(columns: Sequence[Any]) -> int:
    counts = sorted({count_rows(leaf) or 0 for leaf in iterate_leaves(tuple(columns))})
    if len(counts) > 1:
        raise BatchError(
            f"Features, states and ids must have the same number of rows, but have {counts}. "
            "Cut them to one trajectory's rows."
        )
    return counts[0] if counts else 0


def compute_sequence_lengths(ids: Sequence[np.ndarray], rows: int, max_seq_len: int) -> np.ndarray:
    """Returns the lengths of the sequences that rows are cut into, int64 `[num_seqs]`.

    Args:
        ids: int columns `[rows]`; a new sequence starts where one of them changes.
        rows: number of rows.
        max_seq_len: maximum number of rows per sequence.
    """
    if not rows:
        return np.empty(0, np.int64)
    changes = np.zeros(rows, dtype=bool)
    for column in ids:
        changes[1:] |= column[1:] != column[:-1]
    pieces = np.diff([0, *np.flatnonzero(changes), rows])
    counts = -(-pieces // max_seq_len)
    lengths = np.full(counts.sum(), max_seq_len)
    lengths[np.cumsum(counts) - 1] = pieces - (counts - 1) * max_seq_len
    return lengths


def _require_lengths(lengths: np.ndarray, rows: int, max_seq_len: int) -> None:
    if lengths.sum() != rows or lengths.max(initial=0) > max_seq_len:
        raise BatchError(
            f"`seq_lens` must add up to the {rows} rows and be at most max_seq_len={max_seq_len}, "
            f"but got {lengths.tolist()}. Leave it out to chop the rows by their ids."
        )


def pad_batch_to_sequences_of_same_size(
    batch: SampleBatch,
    max_seq_len: int,
    shuffle: bool = False,
    batch_divisibility_req: int = 1,
    feature_keys: Sequence[str] | None = None,
    view_requirements: Mapping[str, ViewRequirement] | None = None,
    rng: np.random.Generator | None = None,
) -> None:
    """Prepares a batch for a model that needs sequences of one length, in place.

    A padded batch is unchanged. One with states (`state_in_0` or `state_out_0`) is chopped into
    sequences and padded; one whose number of rows is not a multiple of `batch_divisibility_req` is
    chopped into groups of that many rows and padded; any other is only shuffled, if requested.

    Args:
        batch: the batch to change; it becomes `zero_padded` if it is chopped.
        max_seq_len: maximum number of rows per sequence.
        shuffle: whether sequences (or rows, without sequences) are put in random order.
        batch_divisibility_req: the number of rows of a batch without states must be a multiple of
            this.
        feature_keys: the columns to keep and pad when the batch is chopped, besides the states;
            None keeps all.
        view_requirements: those of the policy; if `state_in_0` is a window of several steps
            (attention), sequences are padded to `max_seq_len`, otherwise to the longest of them.
        rng: the source of randomness for `shuffle`; a new one if None.

    Raises:
        BatchError: if the columns' lengths do not fit. Nothing is changed then.
        MissingColumnError: if the batch lacks one of `feature_keys`.
    """
    if batch.zero_padded:
        return
    has_states = f"{STATE_IN}0" in batch or "state_out_0" in batch
    if not has_states and batch.count % batch_divisibility_req == 0:
        if shuffle:
            batch.shuffle(rng)
        return
    lengths = dict.get(batch, SEQ_LENS) if has_states else None
    state_keys = [key for key in batch if key.startswith(STATE_IN)]
    all_keys = batch if feature_keys is None else feature_keys
    keys = [key for key in all_keys if key != SEQ_LENS and key not in state_keys]
    states = [dict.get(batch, key) for key in state_keys]
    ids: dict[str, Any] = {name: dict.get(batch, key) for name, key in ID_COLUMNS.items()}
    is_reduced = lengths is not None and _count_common_rows(states) == len(lengths)
    features, states, lengths = chop_into_sequences(
        feature_columns=[_get_column(batch, key) for key in keys],
        state_columns=states,
        max_seq_len=max_seq_len if has_states else batch_divisibility_req,
        **ids,
        dynamic_max=has_states and not _is_state_window(view_requirements),
        shuffle=shuffle,
        seq_lens=lengths,
        states_already_reduced_to_init=is_reduced,
        rng=rng,
    )
    columns = dict(zip([*keys, *state_keys], [*features, *states], strict=True))
    if INFOS in columns and isinstance(dict.get(batch, INFOS), list):
        columns[INFOS] = columns[INFOS].tolist()
    width = next((count_rows(leaf) or 0 for leaf in iterate_leaves(tuple(features))), 0)
    batch._store_columns(
        {**columns, SEQ_LENS: lengths},
        Layout(zero_padded=True, max_seq_len=width // max(len(lengths), 1)),
    )


def _get_column(batch: SampleBatch, key: str) -> Any:
    """Returns a column; a list of infos becomes an array of objects."""
    column = dict.get(batch, key) if key in batch else batch[key]
    if key == INFOS and isinstance(column, list):
        return np.fromiter(column, object, len(column))
    return column


def _is_state_window(view_requirements: Mapping[str, ViewRequirement] | None) -> bool:
    """Whether the model's first state is a window of several steps, as for attention."""
    state = (view_requirements or {}).get(f"{STATE_IN}0")
    return state is not None and len(state.shift_arr) > 1
