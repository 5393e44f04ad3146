"""Prioritised replay, Schaul et al. 2016 (arXiv:1511.05952), proportional variant.

A row of priority p is drawn with the probability P = p^alpha / sum p^alpha (equation 1), and its
loss is weighted by (N P)^-beta, divided by the largest of these weights over all rows (section
3.4). A priority is the absolute temporal-difference error plus epsilon; a new row gets the greatest
priority so far, initially 1.

Deviations from the paper, both as in RLlib: rows are drawn independently of each other, not from
strata of equal mass; beta does not change with time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from tfpolicies.base.type_aliases import Scalar
from tfpolicies.base.validators import Validator, is_finite
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import CheckpointError, ConfigError, UnknownPolicyError, UsageError
from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer
from tfpolicies.replay.ring_buffer import ReplayBuffer
from tfpolicies.replay.sum_tree import SumTree

NON_NEGATIVE = Validator(lambda x: is_finite(x) and x >= 0, "a finite number >= 0")
WEIGHTS, INDEXES = "weights", "batch_indexes"
"""Columns of drawn rows: the weights of their loss, float32; their indices, int64."""


class Priorities:
    """The priorities of rows, and draws in proportion to their powers.

    Args:
        capacity: the number of rows.
        alpha: exponent of priorities; 0 draws uniformly.
        beta: exponent of importance weights, which correct for alpha; 0 gives ones.

    Raises:
        ConfigError: if `alpha` or `beta` is not a finite number >= 0.
    """

    def __init__(self, capacity: int, alpha: float, beta: float) -> None:
        for name, value in (("alpha", alpha), ("beta", beta)):
            check_non_negative(name, value)
        self.alpha, self.beta = float(alpha), float(beta)
        self.max_priority = 1.0
        self._tree = SumTree(capacity)

    def initialize(self, indices: np.ndarray, priority: float | None = None) -> None:
        """Sets the priority of new rows at `indices` `[B]`; None is the greatest so far."""
        priority = self.max_priority if priority is None else priority
        self._tree.set(indices, self._compute_masses(np.float64(priority)))

    def update(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities; for an index that occurs twice, the last one counts.

        Args:
            indices: indices `[B]`.
            priorities: `[B]`, finite and greater than 0.

        Raises:
            UsageError: if a priority is not. Nothing is changed then.
        """
        priorities = np.asarray(priorities, np.float64)
        self._tree.set(indices, self._compute_masses(priorities))
        self.max_priority = float(max(self.max_priority, priorities.max(initial=0.0)))

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Returns `count` indices, int64, drawn independently and with replacement."""
        return self._tree.find(rng.random(count) * self._tree.total)

    def compute_weights(self, indices: np.ndarray, beta: float | None = None) -> np.ndarray:
        """Returns importance weights float32 `[B]`: the row with the lowest probability has 1.

        Args:
            indices: indices `[B]`.
            beta: an exponent to use instead of the default.
        """
        beta = self.beta if beta is None else beta
        return ((self._tree.minimum / self._tree[indices]) ** beta).astype(np.float32)

    def get_state(self, filled: int) -> dict[str, Any]:
        """Returns the argument of `set_state`, with the powers of the first `filled` priorities."""
        masses = self._tree[:filled].copy()
        return {"alpha": self.alpha, "greatest": self.max_priority, "masses": masses}

    def check_state(self, state: Mapping[str, Any] | None, filled: int) -> tuple[float, np.ndarray]:
        """Returns the greatest priority and the powers of a state."""
        fields = state if isinstance(state, Mapping) else {}
        masses, max_priority = np.asarray(fields.get("masses", ())), fields.get("greatest")
        has_all_rows = masses.shape == (filled,) and masses.dtype.kind == "f"
        if (
            not has_all_rows
            or not _are_priorities(masses)
            or not NON_NEGATIVE.is_valid(max_priority)
        ):
            raise CheckpointError(
                f"The state has no priorities of {filled} rows: it is of a buffer without "
                "priorities, or damaged. Load it into a buffer of the same class, or start with "
                "an empty one."
            )
        if fields["alpha"] != self.alpha:
            raise CheckpointError(
                f"The state has priorities to the power of alpha={fields['alpha']!r}, but this "
                f"buffer has alpha={self.alpha}. Create one with the same alpha."
            )
        return float(fields["greatest"]), masses

    def set_state(self, state: Mapping[str, Any], filled: int) -> None:
        self.max_priority, masses = self.check_state(state, filled)
        self._tree = SumTree(self._tree.capacity)
        self._tree.set(np.arange(filled), masses)

    def _compute_masses(self, priorities: np.ndarray | np.float64) -> np.ndarray:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            masses = np.asarray(priorities**self.alpha)
        if not (_are_priorities(np.asarray(priorities)) and _are_priorities(masses)):
            raise UsageError(
                "Priorities, and their powers by alpha, must be finite and greater than 0, got "
                f"{np.asarray(priorities)!r:.200}. Add a small number to errors that may be 0."
            )
        return masses


class PrioritizedReplayBuffer(ReplayBuffer):
    """The newest `capacity` rows of one policy, drawn by their priorities.

    Args:
        capacity: the number of rows to keep.
        seed: of the generator that chooses rows; None draws one.
        alpha: exponent of priorities; 0 draws uniformly.
        beta: exponent of importance weights; 0 gives ones.
        eps: the number that `update_priorities` adds to absolute errors.
        **settings: arguments of `ReplayBuffer`.

    Raises:
        ConfigError: if an argument is out of range.

    >>> buffer = PrioritizedReplayBuffer(4, seed=0, alpha=1.0, beta=1.0, eps=0.0)
    >>> buffer.add(SampleBatch(obs=[[0.0], [1.0]]))
    >>> buffer.update_priorities(np.array([0, 1]), np.array([1.0, -3.0]))
    >>> rows = buffer.sample(10_000)
    >>> round(float(rows["obs"].mean()), 1), sorted(set(rows["weights"].tolist()))
    (0.7, [0.3333333432674408, 1.0])
    """

    def __init__(
        self,
        capacity: int,
        seed: int | np.random.SeedSequence | None = None,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        **settings: Any,
    ) -> None:
        super().__init__(capacity, seed, **settings)
        check_non_negative("eps", eps)
        self.eps = eps
        self._priorities = Priorities(capacity, alpha, beta)

    def add(self, batch: SampleBatch) -> None:
        """Copies the rows of `batch` into the buffer, each with the greatest priority so far.

        Raises:
            BatchError: as in `ReplayBuffer.add`. Nothing is changed then.
        """
        before = self.num_added
        super().add(batch)
        first = max(before, self.num_added - self.capacity)
        self._priorities.initialize(np.arange(first, self.num_added) % self.capacity)

    def update_priorities(self, indexes: np.ndarray, errors: np.ndarray) -> None:
        """Sets the priorities of rows to their absolute errors plus `eps`.

        Args:
            indexes: `[B]`, the column `batch_indexes` of drawn rows; for a row that occurs twice,
                the last error counts.
            errors: temporal-difference errors `[B]`.

        Raises:
            UsageError: if the lengths differ, there is no row with an index, or an error is not
                finite (or 0 with an `eps` of 0). Nothing is changed then.
        """
        indexes, errors = check_indexes(indexes, errors, len(self))
        self._priorities.update(indexes, np.abs(errors) + self.eps)

    def get_state(self) -> dict[str, Any]:
        """Returns all rows and priorities (copied), counters and the generator."""
        return {**super().get_state(), "priorities": self._priorities.get_state(len(self))}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `get_state`; the next samples are the same rows again.

        Raises:
            CheckpointError: if `state` is of a buffer with another capacity or alpha, or without
                priorities, or is damaged. Nothing is changed then.
        """
        filled = min(state.get("num_added", 0), self.capacity)
        self._priorities.check_state(state.get("priorities"), filled)
        super().set_state(state)
        self._priorities.set_state(state["priorities"], filled)

    def _draw_rows(self, num_items: int) -> SampleBatch:
        """Adds the columns `weights`, float32, and `batch_indexes`, int64, to drawn rows.

        If the rows were added with weights, the weights are multiplied.
        """
        indices = self._priorities.draw(num_items, self._rng)
        batch, weights = self._take(indices), self._priorities.compute_weights(indices)
        stored_weights = batch.get(WEIGHTS)
        batch[WEIGHTS] = (
            weights if stored_weights is None else (weights * stored_weights).astype(np.float32)
        )
        batch[INDEXES] = indices
        return batch


class MultiAgentPrioritizedReplayBuffer(MultiAgentReplayBuffer):
    """One `PrioritizedReplayBuffer` per policy ID, created with the policy's first rows.

    It takes the arguments of `MultiAgentReplayBuffer`, and the keywords `alpha`, `beta` and `eps`.
    """

    buffer_class = PrioritizedReplayBuffer

    def update_priorities(self, errors: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Sets the priorities of rows by policy ID; see `PrioritizedReplayBuffer`.

        Args:
            errors: by policy ID, the column `batch_indexes` and the errors of drawn rows.

        Raises:
            UnknownPolicyError: if no rows of a policy were added.
            UsageError: as in `PrioritizedReplayBuffer.update_priorities`.
        """
        if unknown := [policy_id for policy_id in errors if policy_id not in self.buffers]:
            raise UnknownPolicyError(
                f"No rows of policies {unknown} were added; there are rows of {[*self.buffers]}."
            )
        for policy_id, (indexes, td_errors) in errors.items():
            buffer = cast(PrioritizedReplayBuffer, self.buffers[policy_id])
            buffer.update_priorities(indexes, td_errors)


def check_non_negative(name: str, value: Scalar) -> None:
    """Raises a `ConfigError` unless an argument is a finite number >= 0."""
    if not NON_NEGATIVE.is_valid(value):
        raise ConfigError(f"`{name}` must be {NON_NEGATIVE.description}, but got {value!r}.")


def check_indexes(
    indexes: ArrayLike, values: ArrayLike, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns indexes of rows and a value for each, as arrays `[B]`, the values in float64."""
    indexes, values = np.asarray(indexes), np.asarray(values, np.float64)
    if indexes.ndim != 1 or indexes.shape != values.shape or indexes.dtype.kind not in "iu":
        raise UsageError(
            "Priorities need `batch_indexes` [B], whole numbers, and one value for each, but got "
            f"{indexes.dtype} of shape {indexes.shape} and shape {values.shape}. Give the "
            f"column {INDEXES!r} of the rows to which the values belong."
        )
    if indexes.size and not 0 <= indexes.min() <= indexes.max() < rows:
        raise UsageError(
            f"`batch_indexes` must be from 0 to {rows - 1}, the rows of the buffer, but got "
            f"{indexes.min()} to {indexes.max()}. Give the column {INDEXES!r} of drawn rows."
        )
    return indexes, values


def _are_priorities(values: np.ndarray) -> bool:
    return bool(np.all((values > 0) & (values < np.inf)))
