"""The experience of many policies: one `SampleBatch` each, and how many env steps they took."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tfpolicies.batch.column_batch import ColumnBatch
from tfpolicies.batch.layout import SEQ_LENS
from tfpolicies.errors import BatchError, BatchUsageError, UnknownPolicyError, near_matches

if TYPE_CHECKING:
    from tfpolicies.batch.sample_batch import SampleBatch

DEFAULT_POLICY_ID = "default_policy"


class MultiAgentBatch:
    """The rows of several policies, collected in the same env steps.

    Args:
        policy_batches: the rows by policy id.
        env_steps: how often the environments were stepped, however many agents acted.

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
            raise BatchUsageError(f"`env_steps` must be a whole number from 0, got {env_steps!r}.")
        self.policy_batches: dict[str, SampleBatch] = dict(policy_batches)
        self.count = int(env_steps)

    @staticmethod
    def wrap_as_needed(
        policy_batches: Mapping[str, SampleBatch], env_steps: int
    ) -> SampleBatch | MultiAgentBatch:
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
                f"{near_matches(str(policy_id), map(str, self.policy_batches))}"
            ) from None

    def timeslices(self, k: int) -> list[MultiAgentBatch]:
        """Cuts the batch into pieces of `k` env steps, the rest coming last.

        Rows are ordered by `eps_id`, `t` and `agent_index`. A policy without rows in a piece is
        absent from it. Batches without `unroll_id` get one, the number of the piece.

        Raises:
            MissingColumnError: if a batch lacks `eps_id`, `t` or `agent_index`.
            BatchUsageError: if `k` is not positive.
            BatchError: if a batch has sequences, which cutting by env steps would break.
        """
        if k < 1:
            raise BatchUsageError(f"`k` must be at least 1 env step, but got {k}.")
        filled = {pid: batch for pid, batch in self.policy_batches.items() if batch.count}
        for policy_id, batch in filled.items():
            if SEQ_LENS in batch or batch.time_major:
                raise BatchError(
                    f"Only batches without sequences can be cut by env steps, but that of "
                    f"{policy_id!r} has some. Cut before the rows are chopped into sequences."
                )
        num_steps, steps = _number_env_steps(list(filled.values()))
        starts = range(0, num_steps, k)
        pieces: list[dict[str, SampleBatch]] = [{} for _ in starts]
        for (policy_id, batch), (order, row_steps) in zip(filled.items(), steps, strict=True):
            rows = batch._take(order)
            bounds = np.searchsorted(row_steps, [*starts, num_steps]).tolist()
            for number, (start, stop) in enumerate(pairwise(bounds)):
                if start < stop:
                    pieces[number][policy_id] = _with_unroll_id(rows[start:stop], number)
        return [
            MultiAgentBatch(piece, min(k, num_steps - start))
            for piece, start in zip(pieces, starts, strict=True)
        ]

    def as_multi_agent(self) -> MultiAgentBatch:
        """Returns itself."""
        return self

    def copy(self) -> MultiAgentBatch:
        """Returns a deep copy: all arrays are its own."""
        copies = {policy_id: batch.copy() for policy_id, batch in self.policy_batches.items()}
        return MultiAgentBatch(copies, self.count)

    def size_bytes(self) -> int:
        """Returns the memory of all columns of all policies in bytes."""
        return sum(batch.size_bytes() for batch in self.policy_batches.values())

    def compress(
        self, bulk: bool = False, columns: Collection[str] = frozenset({"obs", "new_obs"})
    ) -> None:
        """Compresses columns of each batch in place; see `SampleBatch.compress`."""
        for batch in self.policy_batches.values():
            batch.compress(bulk, columns)

    def decompress_if_needed(
        self, columns: Collection[str] = frozenset({"obs", "new_obs"})
    ) -> MultiAgentBatch:
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
        How many env steps there are, and for each batch the order of its rows and, in this
        order, the number of each row's env step.
    """
    if not batches:
        return 0, []
    keys = [np.array(batch.columns(["eps_id", "t", "agent_index"]), np.int64) for batch in batches]
    _, numbers = np.unique(np.concatenate(keys, axis=1)[:2], axis=1, return_inverse=True)
    numbers = numbers.ravel()
    splits = np.split(numbers, np.cumsum([batch.count for batch in batches])[:-1])
    orders = [np.lexsort((agents, part)) for (_, _, agents), part in zip(keys, splits, strict=True)]
    ordered = [(order, part[order]) for order, part in zip(orders, splits, strict=True)]
    return int(numbers.max()) + 1, ordered


def _with_unroll_id(batch: SampleBatch, number: int) -> SampleBatch:
    if "unroll_id" not in batch:
        batch.update(unroll_id=np.full(batch.count, number, np.int64))
    return batch
