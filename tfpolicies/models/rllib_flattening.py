"""Observations flattened as by RLlib's preprocessors, and the inverse; NumPy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.errors import ObservationError
from tfpolicies.models.spaces import (
    Leaf,
    as_flat_rows,
    batch_leaves,
    choices_per_cell,
    flat_size,
    is_choice,
)


def flatten_observations(space_leaves: Sequence[Leaf], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Flattens leaves `[B, *leaf.shape]` to float32 rows `[B, F]`; discrete leaves are one-hot.

    Images keep their range, 0 to 255.

    >>> from gymnasium import spaces
    >>> from tfpolicies.models.spaces import leaves
    >>> space = spaces.Dict(at=spaces.Discrete(3, start=1), speed=spaces.Box(-9, 9, (1,)))
    >>> rows = [np.array([1, 3]), np.array([[5.0], [6.0]])]
    >>> flatten_observations(leaves(space), rows).tolist()
    [[1.0, 0.0, 0.0, 5.0], [0.0, 0.0, 1.0, 6.0]]
    """
    parts = []
    for leaf, array in zip(space_leaves, arrays, strict=True):
        space: Any = leaf.space
        rows = array.reshape(len(array), math.prod(leaf.shape))
        if is_choice(space):
            sizes, choices = np.array(choices_per_cell(space)), rows - np.ravel(space.start)
            if ((choices < 0) | (choices >= sizes)).any():
                raise ObservationError(
                    f"{leaf.name('obs')} must hold members of {space}, but got values from "
                    f"{array.min()} to {array.max()}. Fix the space or the environment."
                )
            rows = np.zeros((len(array), sizes.sum()), np.float32)
            np.put_along_axis(rows, choices + np.cumsum(sizes) - sizes, 1.0, axis=1)
        parts.append(rows)
    return np.concatenate(parts, axis=1, dtype=np.float32)


def flatten_observation_batch(space_leaves: Sequence[Leaf], obs_batch: Structure) -> Any:
    """Flattens a batch of observations to rows `[B, F]`; returns such rows unchanged.

    A Box or MultiBinary that is not nested has no flat form, and is returned unchanged.

    Raises:
        ObservationError: if the observations do not fit the leaves.
    """
    if not _has_flat_form(space_leaves):
        return obs_batch
    if isinstance(obs_batch, np.ndarray) and as_flat_rows(space_leaves, obs_batch) is not None:
        return obs_batch
    return flatten_observations(space_leaves, batch_leaves(space_leaves, obs_batch, "obs_batch"))


def _has_flat_form(space_leaves: Sequence[Leaf]) -> bool:
    return bool(space_leaves[0].path) or is_choice(space_leaves[0].space)


def decode_flat_observations(
    space_leaves: Sequence[Leaf], obs_batch: Structure, error: ObservationError
) -> list[np.ndarray]:
    """Decodes preprocessed observations to the leaves `[B, *leaf.shape]`.

    They are rows `[B, F]`: discrete leaves are one-hot, and the leaves of a nested space are
    concatenated in its order. A Box or MultiBinary that is not nested has no flat form.

    Args:
        space_leaves: the leaves of the observation space.
        obs_batch: observations that do not fit that space.
        error: the error that reports this.

    Raises:
        ObservationError: `error` if these are not such rows; or if a discrete leaf is not one-hot.
    """
    rows = as_flat_rows(space_leaves, obs_batch) if _has_flat_form(space_leaves) else None
    if rows is None:
        raise error
    parts = _split_columns(rows, [flat_size(leaf) for leaf in space_leaves])
    return [_decode_leaf(leaf, part) for leaf, part in zip(space_leaves, parts, strict=True)]


def _split_columns(rows: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(sizes)[:-1], axis=1)


def _decode_leaf(leaf: Leaf, part: np.ndarray) -> np.ndarray:
    space: Any = leaf.space
    name = leaf.name("obs_batch")
    if not is_choice(space):
        unnamed_leaf = leaf._replace(path=())
        return batch_leaves([unnamed_leaf], part.reshape(-1, *leaf.shape), name)[0]
    cells = [
        _decode_one_hot(cell, space, name) for cell in _split_columns(part, choices_per_cell(space))
    ]
    return np.stack(cells, axis=1).reshape(-1, *leaf.shape) + np.asarray(space.start, np.int64)


def _decode_one_hot(cell: np.ndarray, space: gym.Space, name: str) -> np.ndarray:
    """Returns the column of each one-hot row that is 1, int64 `[B]`."""
    is_one_hot = ((cell == 0) | (cell == 1)).all(axis=1) & (cell.sum(axis=1) == 1)
    if not is_one_hot.all():
        row = int(np.argmin(is_one_hot))
        raise ObservationError(
            f"{name} must be of {space}, or one-hot rows of it, but row {row} has "
            f"{cell[row].tolist()!s:.200}. Pass observations as the environment returns them."
        )
    return cell.argmax(axis=1)
