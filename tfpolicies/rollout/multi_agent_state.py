"""Converts the running episodes of a multi-agent sampler to plain values and arrays, and back.

The values are dicts with string keys, lists, numbers, strings, agent ids and NumPy arrays, so that
a checkpoint can hold them. User data attached to episodes is not included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.models.spaces import nest
from tfpolicies.rollout.multi_agent_episode import Copy, MultiAgentEpisode
from tfpolicies.rollout.multi_agent_ledger import Ledger
from tfpolicies.rollout.multi_agent_rows import PolicyRows, Table

# -- episodes ---------------------------------------------------------------------------------


def episode_state(episode: MultiAgentEpisode) -> dict[str, Any]:
    """Returns the identity and the counters of an episode."""
    return {
        "id": episode.episode_id,
        "env_index": episode.env_index,
        "length": episode.length,
        "total_reward": float(episode.total_reward),
        "agents": [[agent, episode.policy_for(agent)] for agent in episode.get_agents()],
        "seats": [[agent, seat] for agent, seat in episode.seat_of.items()],
        "rewards": [[agent, pid, total] for (agent, pid), total in episode.agent_rewards.items()],
        "barred": [agent for agent in episode.last_infos if episode.is_barred(agent)],
    }


def restore_episode(episode: MultiAgentEpisode, state: Mapping[str, Any], *, ended: bool) -> None:
    """Restores what `episode_state` returned into a new episode."""
    episode.episode_id = state["id"]
    episode.length = state["length"]
    episode.total_reward = state["total_reward"]
    episode.set_policies(dict(state["agents"]))
    episode.last_infos.update({agent: {"training_enabled": False} for agent in state["barred"]})
    if ended:
        episode.close({(agent, pid): total for agent, pid, total in state["rewards"]})
    else:
        episode.seat_of.update(dict(state["seats"]))


def copy_state(copy: Copy) -> dict[str, Any]:
    """Returns the running episode of a sub-environment and the observations that await actions."""
    pending = [[list(part.agents), part.rows.stacked(observed)] for part, observed in copy.pending]
    return {"episode": episode_state(copy.episode), "done": list(copy.done), "pending": pending}


def restore_copy(copy: Copy, episode: MultiAgentEpisode, state: Mapping[str, Any]) -> None:
    """Restores what `copy_state` returned."""
    restore_episode(episode, state["episode"], ended=False)
    copy.begin(episode)
    obs = {}
    for agents, leaves in state["pending"]:
        for i, agent in enumerate(agents):
            space = copy.rows_of(episode.policy_for(agent)).policy.observation_space
            obs[agent] = nest(space, [leaf[i] for leaf in leaves])
    copy.wait(copy.cast(tuple(obs)), obs)
    copy.leave(state["done"])


# -- tables -----------------------------------------------------------------------------------


def ledger_state(ledger: Ledger) -> dict[str, Any]:
    """Returns all tables of the transitions."""
    seats = ledger.seats
    return {
        "records": _columns(ledger.records),
        "seats": _columns(seats),
        "free": list(seats.free),
        "next_unroll": seats.next_unroll,
        "barred": sorted(seats.barred),
        "rows": [[pid, _rows_state(rows)] for pid, rows in ledger.rows.items()],
    }


def restore_ledger(ledger: Ledger, state: Mapping[str, Any], policies: Mapping[str, Any]) -> None:
    """Restores what `ledger_state` returned into a new, empty table."""
    _fill(ledger.records, state["records"])
    seats = ledger.seats
    seats.used = 0
    _fill(seats, state["seats"])
    seats.free.extend(state["free"])
    seats.next_unroll = state["next_unroll"]
    seats.barred = set(state["barred"])
    for policy_id, saved in state["rows"]:
        rows = ledger.rows[policy_id] = PolicyRows(policy_id, policies[policy_id])
        present = saved["columns"]
        rows.acted = tuple(saved["acted"])
        rows.table.add_columns(
            {name: (present[name].shape[1:], present[name].dtype) for name in rows.acted}
        )
        _fill(rows.table, present)
        rows.finals = {unroll: list(leaves) for unroll, leaves in saved["finals"]}
        if len(saved["memory"]["rewards"]) > 1:
            rows.memory.grow(len(saved["memory"]["rewards"]))
        rows.memory.set_state(saved["memory"])


def _rows_state(rows: PolicyRows) -> dict[str, Any]:
    return {
        "columns": _columns(rows.table),
        "acted": list(rows.acted),
        "finals": [[unroll, leaves] for unroll, leaves in rows.finals.items()],
        "memory": rows.memory.get_state(),
    }


def _columns(table: Table) -> dict[str, np.ndarray]:
    """Copies all columns except infos: these are empty whenever a state is taken."""
    plain = (name for name, column in table.columns.items() if column.dtype != object)
    return {name: table[name].copy() for name in plain}


def _fill(table: Table, columns: Mapping[str, np.ndarray]) -> None:
    where = table.append(len(next(iter(columns.values()))))
    for name, column in columns.items():
        table.columns[name][where] = column


# -- finished trajectories --------------------------------------------------------------------


def ended_state(ledger: Ledger, copies: Sequence[Copy]) -> list[Any]:
    """Returns the finished episodes that still have rows, with their trajectories and agents."""
    running = {id(copy.episode) for copy in copies}
    found: dict[int, list[Any]] = {}
    for unroll, (episode, agent) in ledger.seats.who.items():
        if id(episode) not in running:
            entry = found.setdefault(id(episode), [episode_state(episode), []])
            entry[1].append([unroll, agent])
    return list(found.values())
