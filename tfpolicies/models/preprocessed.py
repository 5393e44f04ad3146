"""Observations that came through one of RLlib's preprocessors, turned back; NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfpolicies.errors import ObservationError
from tfpolicies.models.spaces import (
    Leaf,
    batch_leaves,
    cell_sizes,
    flat_rows,
    flat_size,
    is_choice,
)


def turned_back(
    space_leaves: Sequence[Leaf], obs_batch: Any, error: ObservationError
) -> list[np.ndarray]:
    """Returns the leaves `[B, *leaf.shape]` of preprocessed observations.

    Those are rows `[B, F]`: choices are one-hot, and the leaves of a nested space stand one behind
    the other in its order. A Box or MultiBinary that is not nested has no such form.

    Args:
        space_leaves: of the observation space.
        obs_batch: what does not fit that space.
        error: says so.

    Raises:
        ObservationError: `error` if these are no such rows; or if a choice is not one-hot.
    """
    first = space_leaves[0]
    has_form = bool(first.path) or is_choice(first.space)
    rows = flat_rows(space_leaves, obs_batch) if has_form else None
    if rows is None:
        raise error
    parts = _columns(rows, [flat_size(leaf) for leaf in space_leaves])
    return [_leaf(leaf, part) for leaf, part in zip(space_leaves, parts, strict=True)]


def _columns(rows: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(sizes)[:-1], axis=1)


def _leaf(leaf: Leaf, part: np.ndarray) -> np.ndarray:
    space: Any = leaf.space
    name = leaf.name("obs_batch")
    if not is_choice(space):
        alone = leaf._replace(path=())
        return batch_leaves([alone], part.reshape(-1, *leaf.shape), name)[0]
    cells = [_chosen(cell, space, name) for cell in _columns(part, cell_sizes(space))]
    return np.stack(cells, axis=1).reshape(-1, *leaf.shape) + np.asarray(space.start, np.int64)


def _chosen(cell: np.ndarray, space: Any, name: str) -> np.ndarray:
    """Returns which column of each one-hot row is 1, int64 `[B]`."""
    is_one_hot = ((cell == 0) | (cell == 1)).all(axis=1) & (cell.sum(axis=1) == 1)
    if not is_one_hot.all():
        row = int(np.argmin(is_one_hot))
        raise ObservationError(
            f"{name} must be of {space}, or one-hot rows of it, but row {row} has "
            f"{cell[row].tolist()!s:.200}. Give observations as the environment does."
        )
    return cell.argmax(axis=1)
