"""What samplers do to the columns of a sample before they become a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import UsageError
from tfpolicies.models.ports import Port
from tfpolicies.models.spaces import nest


def clipped_rewards(rewards: np.ndarray, clip: bool | float | None) -> np.ndarray:
    """Returns rewards as learning sees them: their signs (True), bounded (a number), as they are.

    >>> clipped_rewards(np.array([-3.0, 0.5]), True), clipped_rewards(np.array([-3.0, 0.5]), 1.0)
    (array([-1.,  1.]), array([-1. ,  0.5]))
    """
    if not clip:
        return rewards
    return np.sign(rewards) if clip is True else np.clip(rewards, -clip, clip)


def require_same_columns(policy: Any, kept: Collection[str], given: Collection[str]) -> None:
    """Checks that a policy acts with the columns that it acted with before.

    Args:
        policy: acts.
        kept: the names of the columns of acting that there are.
        given: those that it gave now.

    Raises:
        UsageError: if they differ: rows of one batch have the same columns.
    """
    if set(kept) != set(given):
        raise UsageError(
            f"{type(policy).__name__} gave the columns {sorted(given)} when it acted, but "
            f"{sorted(kept)} before. Return the same extras in every call."
        )


def postprocessed(
    policy: Any, rows: SampleBatch, others: Mapping[Any, Any], episode: Any
) -> SampleBatch:
    """Returns what a policy's own `postprocess_trajectory` makes of the rows of one trajectory.

    Raises:
        UsageError: if it is no SampleBatch.
    """
    found = policy.postprocess_trajectory(rows.copy(shallow=True), others, episode)
    if not isinstance(found, SampleBatch):
        raise UsageError(
            f"{type(policy).__name__}.postprocess_trajectory must return a SampleBatch, got "
            f"{type(found).__name__}; return the batch that it was given, with what it adds."
        )
    return found


def nested_actions(
    columns: dict[str, Any], ports: Sequence[Port], space: gym.Space
) -> dict[str, Any]:
    """Joins the columns of action leaves to one that is nested as the action space is, in place."""
    if len(ports) == 1 and not ports[0].path:
        return columns
    names = [port.name for port in ports]
    for prefix in ("", "prev_"):
        if prefix + names[0] in columns:
            parts = [columns.pop(prefix + name) for name in names]
            columns[f"{prefix}actions"] = nest(space, parts)
    return columns


def remembered(
    policy: Any, columns: Mapping[str, np.ndarray], rewards: np.ndarray, ports: Sequence[Port]
) -> list[np.ndarray]:
    """Returns what acting reads after each row, besides the observation.

    Args:
        policy: acts.
        columns: those of acting.
        rewards: as the environment gave them.
        ports: the leaves of actions.
    """
    reads_actions, reads_rewards = policy.acting.reads
    names = [port.name for port in ports] if reads_actions else []
    states = [name for name in columns if name.startswith("state_out_")]
    found = [columns[name] for name in names]
    return found + [rewards] * reads_rewards + [columns[name] for name in states]
