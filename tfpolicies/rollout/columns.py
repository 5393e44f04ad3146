"""What samplers do to the columns of a sample before they become a batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.errors import UsageError
from tfpolicies.models.ports import Port, View
from tfpolicies.models.spaces import nest
from tfpolicies.policy.policy import Policy


def clipped_rewards(rewards: np.ndarray, clip: bool | float | None) -> np.ndarray:
    """Returns rewards as learning sees them: their signs (True), bounded (a number), as they are.

    >>> clipped_rewards(np.array([-3.0, 0.5]), True), clipped_rewards(np.array([-3.0, 0.5]), 1.0)
    (array([-1.,  1.]), array([-1. ,  0.5]))
    """
    if not clip:
        return rewards
    result: np.ndarray = np.sign(rewards) if clip is True else np.clip(rewards, -clip, clip)
    return result


def require_same_columns(policy: Policy, kept: Collection[str], given: Collection[str]) -> None:
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


def nested_columns(
    columns: dict[str, Any], ports: Sequence[Port], space: gym.Space[Any], views: Sequence[View]
) -> dict[str, Any]:
    """Joins the columns of leaves, of actions and of views, to one that is nested, in place."""
    if len(ports) > 1 or ports[0].path:
        columns["actions"] = nest(space, [columns.pop(port.name) for port in ports])
    for view in views:
        for each in (view, view.following):
            if each is not None and (len(each.ports) > 1 or each.ports[0].path):
                columns[each.name] = each.nested([columns.pop(port.name) for port in each.ports])
    return columns


def seen_after(
    views: Sequence[View],
    columns: Mapping[str, np.ndarray],
    rows: np.ndarray,
    **sources: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Returns the leaves of views as they are one step after some rows, `[K, ...]` each.

    Args:
        views: what acting reads.
        columns: those of acting.
        rows: int `[K]`.
        **sources: the leaves of `obs`, `actions`, `rewards`, and of `new_obs`, `[R, ...]` each.
    """
    taken = {name: [leaf[rows] for leaf in leaves] for name, leaves in sources.items()}
    found = []
    for view in views:
        seen = [columns[port.name][rows] for port in (view.following or view).ports]
        found += view.reached(seen, taken[view.source], taken["new_obs"])
    return found
