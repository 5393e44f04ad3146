"""Cuts recorded steps into trajectories, and rebuilds the next observation of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfpolicies.offline.column_checks import require_order
from tfpolicies.offline.column_map import ColumnMap, Steps
from tfpolicies.offline.data_source import Chunk
from tfpolicies.offline.step_columns import AGENT_INDEX, EPS_ID, TERMINATEDS, TRUNCATEDS, T


@dataclass
class TrajectoryRows:
    """Steps of one policy, trajectory after trajectory.

    Attributes:
        obs: observation leaves `[R, ...]`.
        new_obs: leaves `[R, ...]` of the next observations; None if they were not asked for.
        actions: action leaves `[R, ...]`, as the environment takes them.
        columns: other columns `[R, ...]`, with `eps_id`, `agent_index`, `unroll_id` and `t`.
        ends: bool `[R]`: the last row of each trajectory.
        dropped: how many rows were left out, because their next observation is unknown.
    """

    obs: list[np.ndarray]
    new_obs: list[np.ndarray] | None
    actions: list[np.ndarray]
    columns: dict[str, np.ndarray]
    ends: np.ndarray
    dropped: int = 0


def group_by_episode(chunk: Chunk, column_map: ColumnMap) -> Chunk:
    """Sorts the rows of episodes that alternate, so that each episode's rows follow each other.

    Rows of an episode keep their order, and episodes the order of their first rows.
    """
    keys = [column_map.read_column(chunk, x) for x in (EPS_ID, AGENT_INDEX) if column_map.has(x)]
    if not keys:
        return chunk
    _, first, group = np.unique(
        np.stack(keys, axis=1), axis=0, return_index=True, return_inverse=True
    )
    order = np.argsort(first[group.reshape(-1)], kind="stable")
    return chunk.reorder(order)


def make_trajectories(
    steps: Steps, column_map: ColumnMap, *, needs_next_obs: bool, first_unroll: int
) -> TrajectoryRows:
    """Returns steps as trajectories.

    A trajectory ends where a row terminates or truncates its episode, or the next row belongs to
    another episode. If that row does neither, the trajectory counts as cut off: its last row is
    truncated. Where the next observation of such a row is not recorded, the row is left out, and
    its observation is the next one of the row before.

    Args:
        steps: in the order of time within each episode.
        column_map: of their table.
        needs_next_obs: whether next observations are asked for.
        first_unroll: the number of the first trajectory.

    Raises:
        BatchError: if time steps do not increase within an episode.
    """
    chunk, columns = steps.chunk, dict(steps.columns)
    starts = column_map.find_starts(chunk)
    if T in columns:
        require_order(chunk, columns[T], starts)
    ends = np.append(starts[1:], True)
    rows = chunk.rows
    for name in (TERMINATEDS, TRUNCATEDS):
        columns.setdefault(name, np.zeros(rows, bool))
    is_cut = ends & ~columns[TERMINATEDS] & ~columns[TRUNCATEDS]
    columns[TRUNCATEDS] = columns[TRUNCATEDS] | is_cut
    unrolls = np.cumsum(starts) - 1
    first_rows = np.flatnonzero(starts)
    columns.setdefault(EPS_ID, unrolls + first_unroll)
    columns.setdefault(AGENT_INDEX, np.zeros(rows, np.int64))
    columns.setdefault(T, np.arange(rows) - first_rows[unrolls])
    columns["unroll_id"] = unrolls + first_unroll
    result = TrajectoryRows(steps.obs or [], steps.new_obs, steps.actions or [], columns, ends)
    if not needs_next_obs:
        result.new_obs = None
        return result
    if result.new_obs is None:
        return _rebuild_next_obs(result)
    return result


def _rebuild_next_obs(rows: TrajectoryRows) -> TrajectoryRows:
    """Adds next observations from the next rows; a terminated row gets its own observation."""
    columns, ends = rows.columns, rows.ends
    index = np.minimum(np.arange(len(ends)) + 1, len(ends) - 1)
    is_unknown = ends & ~columns[TERMINATEDS]
    index[ends] = np.flatnonzero(ends)
    rows.new_obs = [leaf[index] for leaf in rows.obs]
    if not is_unknown.any():
        return rows
    kept = ~is_unknown
    before = np.append(is_unknown[1:], False) & kept & ~ends
    columns = {name: column[kept] for name, column in columns.items()}
    columns[TRUNCATEDS] = columns[TRUNCATEDS] | before[kept]
    return TrajectoryRows(
        _take(rows.obs, kept),
        _take(rows.new_obs, kept),
        _take(rows.actions, kept),
        columns,
        (ends | before)[kept],
        int(is_unknown.sum()),
    )


def _take(leaves: Sequence[np.ndarray], kept: np.ndarray) -> list[np.ndarray]:
    return [leaf[kept] for leaf in leaves]
