"""Replay buffers for several policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.errors import BatchError, UnknownPolicyError, suggest_similar_names
from tfpolicies.replay.allocator import BufferAllocator
from tfpolicies.replay.ring_buffer import ReplayBuffer


class MultiAgentReplayBuffer:
    """One `ReplayBuffer` per policy ID, created with the policy's first rows.

    Args:
        capacity: rows kept per policy.
        seed: of all buffers' generators; each also depends on the policy ID, so that the order of
            policies does not matter. None draws one.
        memory_limit_bytes: limit for the rows of all policies together; further rows are stored in
            files. None is half of the memory that is available when the first rows are added.
        storage_path: the folder of these files, which have no name and disappear with the buffer;
            None is that of the environment variable `TMPDIR`, or /var/tmp.
        **settings: of each buffer: `train_batch_size` and `learning_starts`.

    Attributes:
        buffer_class: the class of the buffers.
        buffers: the buffer of each policy ID; delete an entry to delete a policy's rows.
        allocator: allocates their memory.

    Raises:
        ConfigError: if an argument is out of range.
    """

    buffer_class: type[ReplayBuffer] = ReplayBuffer

    def __init__(
        self,
        capacity: int,
        seed: int | None = None,
        *,
        memory_limit_bytes: int | None = None,
        storage_path: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.allocator = BufferAllocator(memory_limit_bytes, storage_path)
        self.buffer_class(capacity, **settings)  # checks the arguments, and allocates no rows
        self._settings = settings
        self.capacity = capacity
        self._entropy = np.random.SeedSequence(seed).entropy
        self.buffers: dict[str, ReplayBuffer] = {}

    def __len__(self) -> int:
        return sum(len(buffer) for buffer in self.buffers.values())

    @property
    def num_added(self) -> int:
        """The number of rows of all policies that were ever added."""
        return sum(buffer.num_added for buffer in self.buffers.values())

    def add(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Copies each policy's rows into its buffer; a SampleBatch belongs to the default policy.

        Raises:
            BatchError: as in `ReplayBuffer.add`, naming the policy. Nothing is changed then.
        """
        parts = batch.as_multi_agent().policy_batches
        new_buffers = {pid: self._make_buffer(pid) for pid in parts if pid not in self.buffers}
        buffers = {**self.buffers, **new_buffers}
        for policy_id, part in parts.items():
            try:
                buffers[policy_id].check_batch(part)
            except BatchError as error:
                raise BatchError(f"Policy {policy_id!r}: {error}") from error
        for policy_id, part in parts.items():
            buffers[policy_id].add(part)
        self.buffers.update(new_buffers)

    def sample(self, num_items: int, policy_id: str) -> SampleBatch:
        """Returns `num_items` rows of one policy; see `ReplayBuffer.sample`.

        Raises:
            UnknownPolicyError: if no rows of this policy were added.
            UsageError: if `num_items` is not a non-negative integer.
        """
        if policy_id not in self.buffers:
            raise UnknownPolicyError(
                f"No rows of a policy {policy_id!r} were added; there are rows of "
                f"{list(self.buffers)}.{suggest_similar_names(policy_id, self.buffers)} Call `add` "
                "first, or use `replay`, which returns None until there are enough rows."
            )
        return self.buffers[policy_id].sample(num_items)

    def replay(self, policy_id: str) -> SampleBatch | None:
        """Returns one train batch of a policy, or None if it does not have enough rows yet."""
        buffer = self.buffers.get(policy_id)
        return None if buffer is None else buffer.replay()

    def stats(self) -> dict[str, dict[str, int]]:
        """Returns `ReplayBuffer.stats` by policy id."""
        return {policy_id: buffer.stats() for policy_id, buffer in self.buffers.items()}

    def get_state(self) -> dict[str, Any]:
        """Returns the state of each buffer by policy id, and the seed: JSON values and arrays."""
        states = {policy_id: buffer.get_state() for policy_id, buffer in self.buffers.items()}
        return {"entropy": self._entropy, "buffers": states}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `get_state`.

        Raises:
            CheckpointError: as in `ReplayBuffer.set_state`. Nothing is changed then.
        """
        buffers = {}
        for policy_id, buffer_state in state["buffers"].items():
            buffers[policy_id] = self._make_buffer(policy_id)
            buffers[policy_id].set_state(buffer_state)
        self._entropy = state["entropy"]
        self.buffers = buffers

    def _make_buffer(self, policy_id: str) -> ReplayBuffer:
        seed = np.random.SeedSequence([self._entropy, *policy_id.encode()])
        return self.buffer_class(self.capacity, seed, allocator=self.allocator, **self._settings)
