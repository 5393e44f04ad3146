"""Sample batches: columns of one policy or of several, and functions that join batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tfpolicies.base.extensions import Extensible
from tfpolicies.batch import layout as _layout
from tfpolicies.batch.column_batch import ColumnBatch, join_columns
from tfpolicies.batch.compression import pack_leaf, unpack_leaf
from tfpolicies.batch.layout import Layout
from tfpolicies.batch.leaves import Leaf, map_leaves, scatter_rows, take_rows
from tfpolicies.errors import (
    BatchError,
    BatchUsageError,
    MissingColumnError,
    UnknownPolicyError,
    UsageError,
    suggest_similar_names,
)

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_POLICY_ID = "default_policy"

AnyBatch: TypeAlias = "SampleBatch | MultiAgentBatch"
_OBSERVATIONS = frozenset({"obs", "new_obs"})


class SampleBatch(ColumnBatch, Extensible):
    """Experience of one policy: a dict from column names to arrays with one entry per row.

    Arrays are stored without a copy. Numbers and lists become arrays, `infos` stays a
    list. A column may be nested: a dict or tuple of arrays, as for Dict and Tuple spaces.

    With `seq_lens` [num_seqs] int32 the rows are sequences (for recurrent models): the first
    `seq_lens[0]` rows are the first sequence, and so on. Columns `state_in_<i>` then have one
    entry per sequence. In a *zero-padded* batch every sequence takes `max_seq_len` rows.

    `count` is the number of rows without padding; it follows every change of the batch, and
    columns whose lengths differ are refused.

    Args:
        *args: a mapping or pairs, as for `dict`. The attributes of another SampleBatch are copied.
        _time_major: whether columns are [T, B, ...] and not [B * T, ...].
        _max_seq_len: the length sequences are padded to; the longest one's by default.
        _zero_padded: whether the sequences are padded.
        _is_training: the property `is_training`; a column of that name does the same.
        _num_grad_updates: number of updates of the policy when it collected the batch.
        **columns: more columns.

    Raises:
        BatchError: if the lengths of two columns differ.
        BatchUsageError: if a column's name is not a string.
        MissingColumnError: for a column `dones`, which is read-only: terminated or truncated.

    >>> batch = SampleBatch(obs=[[0.0], [1.0], [2.0]], rewards=[1.0, 1.0, 1.0])
    >>> batch[1:], batch["rewards"].sum()
    (SampleBatch(2: ['obs', 'rewards']), np.float64(3.0))
    """

    OBS = CUR_OBS = "obs"
    NEXT_OBS = "new_obs"
    ACTIONS = "actions"
    REWARDS = "rewards"
    PREV_ACTIONS = "prev_actions"
    PREV_REWARDS = "prev_rewards"
    TERMINATEDS = _layout.TERMINATEDS
    TRUNCATEDS = _layout.TRUNCATEDS
    DONES = _layout.DONES
    INFOS = _layout.INFOS
    SEQ_LENS = _layout.SEQ_LENS
    T = "t"
    EPS_ID = "eps_id"
    ENV_ID = "env_id"
    AGENT_INDEX = "agent_index"
    UNROLL_ID = "unroll_id"
    VF_PREDS = "vf_preds"
    VALUES_BOOTSTRAPPED = "values_bootstrapped"
    ACTION_DIST_INPUTS = "action_dist_inputs"
    ACTION_PROB = "action_prob"
    ACTION_LOGP = "action_logp"
    ACTION_DIST = "action_dist"
    OBS_EMBEDS = "obs_embeds"
    RETURNS_TO_GO = "returns_to_go"
    ATTENTION_MASKS = "attention_masks"

    def env_steps(self) -> int:
        """Returns `count`."""
        return self.count

    def agent_steps(self) -> int:
        """Returns `count`."""
        return self.count

    def __repr__(self) -> str:
        names = [name for name in self if name != self.SEQ_LENS]
        lengths = self._get_raw(self.SEQ_LENS)
        sequences = "" if lengths is None else f" (seqs={len(lengths)})"
        return f"SampleBatch({'?' if self._count is None else self._count}{sequences}: {names})"

    def _get_raw(self, name: str) -> Any:
        """Returns a column or None, without recording the access."""
        return dict.get(self, name)

    # -- trajectories ----------------------------------------------------------------------------

    def is_terminated_or_truncated(self) -> bool:
        """Whether the last row ends its episode; False for an empty batch."""
        return bool(self.count and self._get_unpadded_rows("dones")[-1])

    def is_single_trajectory(self) -> bool:
        """Whether no row before the last one ends an episode."""
        return not (self.count and np.any(self._get_unpadded_rows("dones")[:-1]))

    def _get_unpadded_rows(self, key: str) -> np.ndarray:
        """Returns an array column without padding, batch-major."""
        array = np.asarray(self[key])
        if self.time_major:
            array = _layout.to_batch_major(array)
        if self.layout.is_rectangular and self._get_raw(self.SEQ_LENS) is not None:
            array = array[_layout.get_row_positions(self._get_raw(self.SEQ_LENS), self.layout)]
        return array

    def split_by_episode(self, key: str | None = None) -> list[Self]:
        """Splits the batch at episode boundaries; the order stays and no row is lost.

        Args:
            key: `"eps_id"` splits where the episode's id changes, `"dones"` after each row that is
                terminated or truncated (remaining rows come last). None prefers `eps_id`.

        Raises:
            MissingColumnError: if the batch lacks the column.
            BatchUsageError: for another `key`.
            BatchError: if an episode begins within a padded sequence.
        """
        if key not in (None, self.EPS_ID, self.DONES):
            raise BatchUsageError(f'`key` must be "eps_id", "dones" or None, but got {key!r}.')
        if key == self.EPS_ID or (key is None and self.EPS_ID in self):
            ids = self._get_unpadded_rows(self.EPS_ID)
            cuts = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        else:
            cuts = np.flatnonzero(self._get_unpadded_rows(self.DONES)[:-1]) + 1
        bounds = [0, *cuts.tolist(), self.count] if self.count else []
        pieces = list(pairwise(bounds))
        if not self.layout.is_rectangular:
            return [self.slice(start, stop) for start, stop in pieces]
        lengths = self._get_raw(self.SEQ_LENS)
        if lengths is None or not np.isin(cuts, np.cumsum(lengths)).all():
            raise BatchError(
                "A padded or time-major batch can only be split between its sequences, but an "
                f"episode ends after rows {cuts.tolist()}. Split before padding."
            )
        starts = np.searchsorted(np.cumsum(lengths) - lengths, bounds)
        return [self._select_sequences(slice(*pair)) for pair in pairwise(starts)]

    def timeslices(
        self, size: int | None = None, num_slices: int | None = None, k: int | None = None
    ) -> list[Self]:
        """Cuts the batch into consecutive pieces.

        A batch with sequences is only cut between them, so its pieces have about that many rows.

        Args:
            size: rows per piece; the last piece may be smaller.
            num_slices: the number of pieces, of nearly equal size, smaller ones first.
            k: another name of `size`.

        Raises:
            BatchUsageError: unless exactly one argument is given, and is positive.
            BatchError: if the batch is time-major without `seq_lens`.
        """
        values = [value for value in (size, num_slices, k) if value is not None]
        if len(values) != 1 or values[0] < 1:
            raise BatchUsageError(
                "`timeslices` takes either `size` or `num_slices`, from 1, but got "
                f"size={size}, num_slices={num_slices}, k={k}."
            )
        if self.time_major and self.SEQ_LENS not in self:
            raise BatchError(
                "A time-major batch can only be cut between its sequences, but it has no "
                f"{self.SEQ_LENS!r}. Cut before transposing, or set {self.SEQ_LENS!r}."
            )
        if num_slices is None:
            bounds = [*range(0, self.count, values[0]), self.count]
        else:
            small, larger = divmod(self.count, num_slices)
            first_larger = num_slices - larger
            bounds = [i * small + max(i - first_larger, 0) for i in range(num_slices + 1)]
        pieces = [self[start:stop] for start, stop in pairwise(bounds)]
        return pieces if num_slices else [piece for piece in pieces if piece.count]

    def as_multi_agent(self) -> MultiAgentBatch:
        """Returns a multi-agent batch with this one under the default policy's id."""
        return MultiAgentBatch({DEFAULT_POLICY_ID: self}, self.count)

    def concat(self, other: SampleBatch) -> SampleBatch:
        """Returns this batch's rows followed by those of `other`; see `concat_samples`."""
        return _concat_sample_batches([self, other])

    # -- order and padding -----------------------------------------------------------------------

    def _take_rows(self, indices: Sequence[int] | np.ndarray) -> Self:
        """Returns a new batch of the rows at `indices` [K], copied.

        Raises:
            BatchError: if the batch has sequences or is time-major.
        """
        self._require_independent_rows("taken one by one")
        rows = np.asarray(indices, dtype=np.int64)
        return self._make_like(map_leaves(lambda leaf: take_rows(leaf, rows), self))

    def shuffle(self, rng: np.random.Generator | None = None) -> Self:
        """Puts the rows in random order, in place, and returns the batch.

        Args:
            rng: the source of randomness; a fresh one if None.

        Raises:
            BatchError: if the batch has sequences or is time-major.
        """
        self._require_independent_rows("shuffled")
        order = (rng or np.random.default_rng()).permutation(self.count)
        self._store_columns(map_leaves(lambda leaf: take_rows(leaf, order), self), self.layout)
        return self

    def _require_independent_rows(self, action: str) -> None:
        if self.SEQ_LENS in self or self.time_major:
            raise BatchError(
                f"Rows of sequences depend on each other and cannot be {action}, but the batch has "
                f"{list(self)} and {self.layout}. Do it before the batch is cut into sequences, or "
                "shuffle in `pad_batch_to_sequences_of_same_size`."
            )

    def right_zero_pad(self, max_seq_len: int, exclude_states: bool = True) -> Self:
        """Pads every sequence to `max_seq_len` rows, in place, and returns the batch.

        Padding is zero, or None in lists and columns of objects or text. `count` does not change.

        Args:
            max_seq_len: rows per sequence afterwards.
            exclude_states: whether `state_in_*` stays unpadded, one row per sequence; otherwise it
                must have one per row and is padded like the other columns.

        Raises:
            BatchError: without `seq_lens`, for a sequence longer than `max_seq_len`, or if the
                batch is time-major or padded to another length. Nothing is changed then.
        """
        lengths = self._get_raw(self.SEQ_LENS)
        if lengths is None or lengths.max() > max_seq_len or self.time_major:
            raise BatchError(
                f"Padding to max_seq_len={max_seq_len} needs a batch-major batch with sequences "
                f"that are not longer, but {self.SEQ_LENS!r} is {lengths} and time_major is "
                f"{self.time_major}. Chop it with `chop_into_sequences` first."
            )
        target = Layout(zero_padded=True, max_seq_len=max_seq_len)
        if self.zero_padded and self.max_seq_len != max_seq_len:
            raise BatchError(
                f"A batch can be padded only once, but this one is already padded to "
                f"{self.max_seq_len}, not {max_seq_len}. Pad the original batch."
            )
        if not self.zero_padded:
            self._store_columns(self._pad_columns(target, exclude_states), target)
        return self

    def _pad_columns(self, target: Layout, exclude_states: bool) -> dict[str, Any]:
        lengths = self._get_raw(self.SEQ_LENS)
        positions = _layout.get_row_positions(lengths, target)
        total = len(lengths) * (target.max_seq_len or 0)

        def pad(leaf: Leaf) -> Any:
            return scatter_rows(leaf, positions, total)

        result = dict(self)
        for name, column in self.items():
            is_state = name.startswith(_layout.STATE_IN) and exclude_states
            if name != self.SEQ_LENS and not is_state:
                result[name] = map_leaves(pad, column)
        return result

    # -- compression -----------------------------------------------------------------------------

    def compress(self, bulk: bool = False, columns: Collection[str] = _OBSERVATIONS) -> None:
        """Compresses columns in place: each row becomes a text (zlib, base64).

        Args:
            bulk: whether to make one text of a whole column instead. It compresses better, but can
                then not be sliced or joined.
            columns: the columns to compress; missing ones are ignored.

        Raises:
            BatchError: if a column holds Python objects. Nothing is changed then.
        """
        self._map_columns(columns, lambda leaf: pack_leaf(leaf, bulk))

    def decompress_if_needed(self, columns: Collection[str] = _OBSERVATIONS) -> Self:
        """Undoes `compress` in place and returns the batch; other columns are unchanged."""
        self._map_columns(columns, unpack_leaf)
        return self

    def _map_columns(self, names: Collection[str], function: Callable[[Any], Any]) -> None:
        old = {name: self._get_raw(name) for name in names if name in self}
        new = {name: map_leaves(function, column) for name, column in old.items()}
        if any(new[name] is not column for name, column in old.items()):
            self._store_columns({**self, **new}, self.layout)

    # -- removed methods -------------------------------------------------------------------------

    @staticmethod
    def concat_samples(samples: object) -> None:
        """Raises a UsageError: the function `concat_samples` replaced it."""
        raise UsageError(
            "`SampleBatch.concat_samples` was removed. Call the function `concat_samples(samples)` "
            "of tfpolicies instead."
        )

    def zero_pad(self, *args: object, **kwargs: object) -> None:
        """Raises a UsageError: `right_zero_pad` replaced it."""
        raise UsageError("`zero_pad` was removed. Call `right_zero_pad(max_seq_len)` instead.")


class MultiAgentBatch:
    """The rows of several policies, collected in the same env steps.

    Args:
        policy_batches: the rows by policy id.
        env_steps: number of environment steps, independent of the number of agents that acted.

    Attributes:
        policy_batches: the rows by policy id.
        count: the number of env steps, also `len(batch)`; `agent_steps()` counts rows.

    Raises:
        BatchUsageError: if a value is not a `SampleBatch` or `env_steps` is not a count.
    """

    __iter__ = None  # without this, Python would iterate by calling `batch[0]`

    def __init__(self, policy_batches: Mapping[str, SampleBatch], env_steps: int) -> None:
        for policy_id, batch in policy_batches.items():
            if not isinstance(batch, ColumnBatch):
                raise BatchUsageError(
                    f"`policy_batches` maps policy ids to SampleBatches, but {policy_id!r} has a "
                    f"{type(batch).__name__}. Wrap its columns in `SampleBatch(...)`."
                )
        if isinstance(env_steps, bool) or int(env_steps) != env_steps or env_steps < 0:
            raise BatchUsageError(f"`env_steps` must be an integer >= 0, got {env_steps!r}.")
        self.policy_batches: dict[str, SampleBatch] = dict(policy_batches)
        self.count = int(env_steps)

    @staticmethod
    def wrap_as_needed(policy_batches: Mapping[str, SampleBatch], env_steps: int) -> AnyBatch:
        """Returns the default policy's batch if it is the only one, otherwise all of them."""
        if list(policy_batches) == [DEFAULT_POLICY_ID]:
            return policy_batches[DEFAULT_POLICY_ID]
        return MultiAgentBatch(policy_batches, env_steps)

    def __len__(self) -> int:
        return self.count

    def env_steps(self) -> int:
        """Returns the number of env steps."""
        return self.count

    def agent_steps(self) -> int:
        """Returns the number of rows of all policies."""
        return sum(batch.count for batch in self.policy_batches.values())

    def __getitem__(self, policy_id: str) -> SampleBatch:
        try:
            return self.policy_batches[policy_id]
        except (KeyError, TypeError):
            raise UnknownPolicyError(
                f"No policy {policy_id!r} in this batch; it has {list(self.policy_batches)}."
                f"{suggest_similar_names(str(policy_id), map(str, self.policy_batches))}"
            ) from None

    def timeslices(self, k: int) -> list[MultiAgentBatch]:
        """Cuts the batch into pieces of `k` env steps, with the remaining steps last.

        Rows are ordered by `eps_id`, `t` and `agent_index`. A policy without rows in a piece is
        missing in it. Batches without `unroll_id` get one, the number of the piece. In a batch with
        sequences, each row becomes a sequence, with the recurrent state that acting had there.

        Raises:
            MissingColumnError: if a batch lacks `eps_id`, `t` or `agent_index`; or `state_out_<i>`,
                if the states within its sequences are needed.
            BatchUsageError: if `k` is not positive.
            BatchError: if a batch is time-major.
        """
        if k < 1:
            raise BatchUsageError(f"`k` must be at least 1 env step, but got {k}.")
        non_empty = {pid: batch for pid, batch in self.policy_batches.items() if batch.count}
        for policy_id, batch in non_empty.items():
            if batch.time_major:
                raise BatchError(
                    f"Only batch-major batches can be cut by env steps, but that of {policy_id!r} "
                    "is time-major. Cut before transposing."
                )
        unsequenced = {pid: _remove_sequences(batch) for pid, batch in non_empty.items()}
        num_steps, steps = _number_env_steps(list(unsequenced.values()))
        starts = range(0, num_steps, k)
        pieces: list[dict[str, SampleBatch]] = [{} for _ in starts]
        for (policy_id, batch), (order, row_steps) in zip(unsequenced.items(), steps, strict=True):
            rows = batch._take_rows(order)
            if _layout.SEQ_LENS in non_empty[policy_id]:
                rows[_layout.SEQ_LENS] = np.ones(rows.count, np.int32)
            bounds = np.searchsorted(row_steps, [*starts, num_steps]).tolist()
            for number, (start, stop) in enumerate(pairwise(bounds)):
                if start < stop:
                    pieces[number][policy_id] = _add_unroll_id(rows[start:stop], number)
        return [
            MultiAgentBatch(piece, min(k, num_steps - start))
            for piece, start in zip(pieces, starts, strict=True)
        ]

    def as_multi_agent(self) -> MultiAgentBatch:
        """Returns itself."""
        return self

    def copy(self) -> MultiAgentBatch:
        """Returns a deep copy, which owns all its arrays."""
        copies = {policy_id: batch.copy() for policy_id, batch in self.policy_batches.items()}
        return MultiAgentBatch(copies, self.count)

    def size_bytes(self) -> int:
        """Returns the memory of all columns of all policies in bytes."""
        return sum(batch.size_bytes() for batch in self.policy_batches.values())

    def compress(self, bulk: bool = False, columns: Collection[str] = _OBSERVATIONS) -> None:
        """Compresses columns of each batch in place; see `SampleBatch.compress`."""
        for batch in self.policy_batches.values():
            batch.compress(bulk, columns)

    def decompress_if_needed(self, columns: Collection[str] = _OBSERVATIONS) -> MultiAgentBatch:
        """Undoes `compress` in place and returns itself."""
        for batch in self.policy_batches.values():
            batch.decompress_if_needed(columns)
        return self

    def __repr__(self) -> str:
        return f"MultiAgentBatch({self.policy_batches}, env_steps={self.count})"


def _number_env_steps(
    batches: Sequence[SampleBatch],
) -> tuple[int, list[tuple[np.ndarray, np.ndarray]]]:
    """Numbers the env steps of all batches in the order of their `eps_id` and `t`.

    Returns:
        The number of env steps, and for each batch the order of its rows and, in this order, the
        number of each row's env step.
    """
    if not batches:
        return 0, []
    keys = [np.array(batch.columns(["eps_id", "t", "agent_index"]), np.int64) for batch in batches]
    _, numbers = np.unique(np.concatenate(keys, axis=1)[:2], axis=1, return_inverse=True)
    numbers = numbers.ravel()
    splits = np.split(numbers, np.cumsum([batch.count for batch in batches])[:-1])
    orders = [np.lexsort((agents, part)) for (_, _, agents), part in zip(keys, splits, strict=True)]
    result = [(order, part[order]) for order, part in zip(orders, splits, strict=True)]
    return int(numbers.max()) + 1, result


def _remove_sequences(batch: SampleBatch) -> SampleBatch:
    """Returns the rows without padding, each with the recurrent state that acting had there."""
    lengths = batch._get_raw(_layout.SEQ_LENS)
    if lengths is None:
        return batch
    positions = _layout.get_row_positions(lengths, batch.layout)
    columns = {
        name: _get_states_of_rows(batch, name, positions)
        if per_sequence
        else map_leaves(lambda leaf: take_rows(leaf, positions), column)
        for name, column, per_sequence in _layout.iterate_columns(batch)
        if name != _layout.SEQ_LENS
    }
    training, updates = batch.raw_is_training, batch.num_grad_updates
    return SampleBatch(columns, _is_training=training, _num_grad_updates=updates)


def _get_states_of_rows(batch: SampleBatch, name: str, positions: np.ndarray) -> np.ndarray:
    """Returns the states `[rows, ...]` for a column `state_in_<i>` `[num_seqs, ...]`."""
    lengths = batch._get_raw(_layout.SEQ_LENS)
    sequence_indices = np.repeat(np.arange(len(lengths)), lengths)
    states = take_rows(batch._get_raw(name), sequence_indices)
    inner_rows = np.flatnonzero(
        np.diff(sequence_indices, prepend=-1) == 0
    )  # not the first of their sequence
    if len(inner_rows):
        state_out = name.replace(_layout.STATE_IN, _layout.STATE_OUT)
        if state_out not in batch:
            raise MissingColumnError(
                f"The recurrent state of a row within a sequence is {state_out!r} of the row "
                f"before, but the batch has {list(batch)}. `timeslices` of each policy's batch "
                "keeps sequences whole."
            )
        states[inner_rows] = take_rows(batch._get_raw(state_out), positions[inner_rows - 1])
    return states


def _add_unroll_id(batch: SampleBatch, number: int) -> SampleBatch:
    if "unroll_id" not in batch:
        batch.update(unroll_id=np.full(batch.count, number, np.int64))
    return batch


def concat_samples(samples: Iterable[AnyBatch]) -> AnyBatch:
    """Joins batches into one, in their order.

    If one of them is a MultiAgentBatch, the result is also one, and SampleBatches are added under
    the default policy's id. Empty batches are skipped. `num_grad_updates` becomes the mean,
    weighted by rows. A single batch is not copied: the result shares its arrays.

    Raises:
        BatchError: if the batches do not have the same columns, shapes and layout. A missing
            column is a MissingColumnError.

    >>> concat_samples([SampleBatch(obs=[1, 2]), SampleBatch(obs=[3])])["obs"]
    array([1, 2, 3])
    """
    batches = list(samples)
    if any(isinstance(batch, MultiAgentBatch) for batch in batches):
        return concat_samples_into_ma_batch(batches)
    return _concat_sample_batches(_require_batches(batches))


def concat_samples_into_ma_batch(samples: Iterable[AnyBatch]) -> MultiAgentBatch:
    """Joins batches into one MultiAgentBatch, each policy's rows separately.

    Raises:
        BatchError: if an element is not a batch, or batches of one policy do not fit together.
    """
    by_policy: dict[str, list[SampleBatch]] = {}
    env_steps = 0
    for batch in _require_batches(list(samples)):
        ma_batch = batch.as_multi_agent()
        env_steps += ma_batch.env_steps()
        for policy_id, policy_batch in ma_batch.policy_batches.items():
            if policy_batch.count or isinstance(batch, MultiAgentBatch):
                by_policy.setdefault(policy_id, []).append(policy_batch)
    joined = {
        policy_id: _concat_sample_batches(batches) for policy_id, batches in by_policy.items()
    }
    return MultiAgentBatch(joined, env_steps)


def convert_ma_batch_to_sample_batch(batch: AnyBatch) -> SampleBatch:
    """Returns the default policy's batch of a MultiAgentBatch that has no other.

    Raises:
        BatchError: if there are other policies.
    """
    if not isinstance(batch, MultiAgentBatch):
        return batch
    if list(batch.policy_batches) != [DEFAULT_POLICY_ID]:
        raise BatchError(
            f"Only a batch with {DEFAULT_POLICY_ID!r} and no other policy can become a "
            f"SampleBatch, but this one has {list(batch.policy_batches)}. Take the policy's rows: "
            "`batch[policy_id]`."
        )
    return batch[DEFAULT_POLICY_ID]


def _require_batches(batches: list[Any]) -> list[Any]:
    for batch in batches:
        if not isinstance(batch, SampleBatch | MultiAgentBatch):
            raise BatchError(
                "Only SampleBatches and MultiAgentBatches can be joined, but got a "
                f"{type(batch).__name__}. Wrap columns in `SampleBatch(...)`."
            )
    return batches


def _concat_sample_batches(batches: Sequence[SampleBatch]) -> SampleBatch:
    non_empty = [batch for batch in batches if batch.count]
    if not non_empty:
        return SampleBatch()
    first = non_empty[0]
    if len(non_empty) == 1:
        result = type(first)(first)
    else:
        columns, layout = join_columns(non_empty)
        result = type(first)(columns, **layout.as_keywords())
        result.set_training(first.raw_is_training)
    rows = sum(batch.count for batch in non_empty)
    updates = sum((batch.num_grad_updates or 0.0) * batch.count for batch in non_empty)
    result.num_grad_updates = updates / rows
    return result
