"""Checks and conversions of the numbers in a column; errors name the row."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.base.finite_checks import is_finite
from tfpolicies.errors import BatchError, ObservationError
from tfpolicies.models.spaces import MASK, Leaf, choices_per_cell, is_choice
from tfpolicies.offline.data_source import Chunk
from tfpolicies.offline.step_columns import ACTIONS, OBS, SEPARATOR


def describe_number(chunk: Chunk, label: str, array: np.ndarray, is_valid: np.ndarray) -> str:
    """Returns the first number that is not valid, and where it is."""
    index = np.unravel_index(int(np.argmin(is_valid)), array.shape)
    entry = [int(i) for i in index[1:]]
    location = f"{label}{entry}" if entry else label
    return f"{location} is {array[index]} in {chunk.describe_row(int(index[0]))}"


def require_numbers(chunk: Chunk, label: str, array: np.ndarray) -> None:
    if array.dtype.kind in "biuf":
        return
    rows = (row for row, value in enumerate(array) if np.asarray(value).dtype.kind not in "biuf")
    row = next(rows, 0)
    raise BatchError(
        f"{label} must have numbers, but is {array[row]!r:.60} in {chunk.describe_row(row)}. "
        "Replace it by a number, for example by a function in columns={...}, or leave the row out."
    )


def to_leaf_dtype(chunk: Chunk, label: str, leaf: Leaf, array: np.ndarray) -> np.ndarray:
    require_numbers(chunk, label, array)
    if array.dtype == leaf.dtype:
        result = array
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            result = array.astype(leaf.dtype)
    if leaf.dtype.kind == "f":
        if not is_finite(result):
            problem = describe_number(chunk, label, array, np.isfinite(result))
            raise ObservationError(
                f"{label} must be finite numbers of {leaf.dtype}, but {problem}. Leave the row "
                "out, or replace the number."
            )
    elif result is not array and not np.can_cast(array.dtype, leaf.dtype):
        is_same = result == array
        if not is_same.all():
            problem = describe_number(chunk, label, array, is_same)
            raise ObservationError(
                f"{label} must have numbers of {leaf.dtype}, as its space does, but {problem}. "
                "Change the space, or replace the number."
            )
    if label.split(SEPARATOR)[0] != ACTIONS:
        check_choices(chunk, leaf, result, label)
    return result


def check_choices(chunk: Chunk, leaf: Leaf, array: np.ndarray, label: str) -> None:
    """Raises an ObservationError for a choice that the space does not have."""
    space: Any = leaf.space
    low: Any
    high: Any
    if isinstance(space, gym.spaces.Discrete):
        low, high = np.int64(space.start), np.int64(space.start + space.n - 1)
    elif isinstance(space, gym.spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    elif isinstance(space, gym.spaces.MultiBinary):
        low, high = np.int64(0), np.int64(1)
    elif isinstance(space, gym.spaces.Box) and label == ACTIONS and leaf.dtype.kind in "iu":
        low, high = space.low, space.high
    else:
        return
    is_valid = (array >= low) & (array <= high)
    if not is_valid.all():
        label = SEPARATOR.join((label, *leaf.path)) if label == ACTIONS else label
        problem = describe_number(chunk, label, array, is_valid)
        hint = " Change the space, or leave the row out."
        if isinstance(space, gym.spaces.Discrete) and array.min() == low + 1:
            hint = (
                f" If the table counts from {int(low) + 1}, use Discrete({space.n}, start="
                f"{int(low) + 1}), or a function in columns={{...}} that subtracts 1."
            )
        raise ObservationError(f"{label} must be a choice of {space}, but {problem}.{hint}")


def check_masks(
    chunk: Chunk,
    act_leaves: Sequence[Leaf],
    actions: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
) -> None:
    """Raises an ObservationError for a choice that its observation's mask does not allow."""
    if len(act_leaves) != 1 or len(masks) != 1 or not is_choice(act_leaves[0].space):
        return
    space: Any = act_leaves[0].space
    sizes = np.array(choices_per_cell(space))
    mask = masks[0].reshape(chunk.rows, -1)
    if mask.shape[1] != sizes.sum():
        return  # the policy refuses such spaces
    choices = actions[0].reshape(chunk.rows, len(sizes)) - np.ravel(space.start)
    is_allowed = np.take_along_axis(mask, choices + np.cumsum(sizes) - sizes, axis=1) != 0
    if not is_allowed.all():
        problem = describe_number(chunk, ACTIONS, actions[0], is_allowed.reshape(actions[0].shape))
        raise ObservationError(
            f"{ACTIONS} must be allowed by {SEPARATOR.join((OBS, MASK))}, but {problem}, which "
            "is not. Leave the row out, or change its mask."
        )


def to_floats(chunk: Chunk, name: str, array: np.ndarray) -> np.ndarray:
    require_numbers(chunk, name, array)
    with np.errstate(over="ignore"):
        result = array.astype(np.float32, copy=False)
    if not is_finite(result):
        problem = describe_number(chunk, name, array, np.isfinite(result))
        raise BatchError(
            f"{name} must be finite numbers, but {problem}. Leave the row out, or replace the "
            "number."
        )
    return result


def to_flags(chunk: Chunk, name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype == bool:
        return array
    require_numbers(chunk, name, array)
    is_valid = (array == 0) | (array == 1)
    if not is_valid.all():
        problem = describe_number(chunk, name, array, is_valid)
        raise BatchError(
            f"{name} must be true or false, but {problem}. Convert it by a function in "
            "columns={...}."
        )
    return array.astype(bool)


def to_integers(chunk: Chunk, name: str, array: np.ndarray) -> np.ndarray:
    require_numbers(chunk, name, array)
    with np.errstate(invalid="ignore"):
        result = array.astype(np.int64)
    is_same = result == array
    if not is_same.all():
        problem = describe_number(chunk, name, array, is_same)
        raise BatchError(
            f"{name} must be integers, but {problem}. Convert it by a function in columns={{...}}."
        )
    return result


def to_ids(chunk: Chunk, name: str, array: np.ndarray) -> np.ndarray:
    """Returns ids as int64; other values than integers become hashes of their texts."""
    if array.ndim == 1 and array.dtype.kind in "biu":
        return array.astype(np.int64, copy=False)
    values = array.tolist() if array.ndim == 1 else [tuple(row) for row in array.tolist()]
    ids = {}
    for value in dict.fromkeys(values):
        if any(x is None or x != x for x in (value if isinstance(value, tuple) else (value,))):
            row = next(i for i, x in enumerate(values) if x is value or x == value)
            raise BatchError(
                f"{name} must be an id in each row, but is {value} in {chunk.describe_row(row)}. "
                "Fill it in, or leave the row out."
            )
        digest = hashlib.blake2b(repr(value).encode(errors="replace"), digest_size=7).digest()
        ids[value] = int.from_bytes(digest, "little")
    return np.array([ids[value] for value in values], np.int64)


def require_order(chunk: Chunk, t: np.ndarray, starts: np.ndarray) -> None:
    """Checks that time steps increase within each trajectory.

    Raises:
        BatchError: if not; the message names the row.
    """
    is_valid = np.ones(len(t), bool)
    is_valid[1:] = starts[1:] | (t[1:] > t[:-1])
    if not is_valid.all():
        row = int(np.argmin(is_valid))
        raise BatchError(
            f"Rows must be in order within an episode, but t is {t[row]} in "
            f"{chunk.describe_row(row)}, after {t[row - 1]}. Sort the table by episode and time."
        )
