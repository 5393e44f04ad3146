"""Converts the running episodes of a multi-agent sampler to plain values and arrays, and back.

The values are dicts with string keys, lists, numbers, strings, agent ids and NumPy arrays, so that
a checkpoint can hold them. User data attached to episodes is not included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.models.spaces import unflatten
from tfpolicies.rollout.multi_agent_episode import MultiAgentEpisode, SubEnvState
from tfpolicies.rollout.multi_agent_tables import ColumnTable, PolicyRows
from tfpolicies.rollout.transition_table import TransitionTable

# -- episodes ---------------------------------------------------------------------------------


def get_episode_state(episode: MultiAgentEpisode) -> dict[str, Any]:
    return {
        "id": episode.episode_id,
        "env_index": episode.env_index,
        "length": episode.length,
        "total_reward": float(episode.total_reward),
        "agents": [[agent, episode.policy_for(agent)] for agent in episode.get_agents()],
        "seats": [[agent, seat] for agent, seat in episode.slot_by_agent.items()],
        "rewards": [[agent, pid, total] for (agent, pid), total in episode.agent_rewards.items()],
        "barred": [agent for agent in episode.last_infos if episode.is_excluded(agent)],
    }


def restore_episode(episode: MultiAgentEpisode, state: Mapping[str, Any], *, ended: bool) -> None:
    episode.episode_id = state["id"]
    episode.length = state["length"]
    episode.total_reward = state["total_reward"]
    episode.set_policies(dict(state["agents"]))
    episode.last_infos.update({agent: {"training_enabled": False} for agent in state["barred"]})
    if ended:
        episode.fix_rewards({(agent, pid): total for agent, pid, total in state["rewards"]})
    else:
        episode.slot_by_agent.update(dict(state["seats"]))


def get_sub_env_state(sub_env: SubEnvState) -> dict[str, Any]:
    """Returns the running episode of a sub-environment and the observations that await actions."""
    pending = [[list(part.agents), part.rows.stack(observed)] for part, observed in sub_env.pending]
    return {
        "episode": get_episode_state(sub_env.episode),
        "done": list(sub_env.done),
        "pending": pending,
    }


def restore_sub_env(
    sub_env: SubEnvState, episode: MultiAgentEpisode, state: Mapping[str, Any]
) -> None:
    restore_episode(episode, state["episode"], ended=False)
    sub_env.start_episode(episode)
    obs = {}
    for agents, leaves in state["pending"]:
        for i, agent in enumerate(agents):
            space = sub_env.get_rows(episode.policy_for(agent)).policy.observation_space
            obs[agent] = unflatten(space, [leaf[i] for leaf in leaves])
    sub_env.set_pending(sub_env.group_agents(tuple(obs)), obs)
    sub_env.mark_done(state["done"])


# -- tables -----------------------------------------------------------------------------------


def get_transition_state(transitions: TransitionTable) -> dict[str, Any]:
    slots = transitions.slots
    return {
        "records": _copy_columns(transitions.records),
        "seats": _copy_columns(slots),
        "free": list(slots.free_slots),
        "next_unroll": slots.next_unroll,
        "barred": sorted(slots.excluded),
        "rows": [[pid, _get_rows_state(rows)] for pid, rows in transitions.rows.items()],
    }


def restore_transitions(
    transitions: TransitionTable, state: Mapping[str, Any], policies: Mapping[str, Any]
) -> None:
    """Restores what `get_transition_state` returned into a new, empty table."""
    _append_columns(transitions.records, state["records"])
    slots = transitions.slots
    slots.used = 0
    _append_columns(slots, state["seats"])
    slots.free_slots.extend(state["free"])
    slots.next_unroll = state["next_unroll"]
    slots.excluded = set(state["barred"])
    for policy_id, rows_state in state["rows"]:
        rows = transitions.rows[policy_id] = PolicyRows(policy_id, policies[policy_id])
        columns = rows_state["columns"]
        rows.action_columns = tuple(rows_state["acted"])
        rows.table.add_columns(
            {name: (columns[name].shape[1:], columns[name].dtype) for name in rows.action_columns}
        )
        _append_columns(rows.table, columns)
        rows.final_observations = {unroll: list(leaves) for unroll, leaves in rows_state["finals"]}
        if len(rows_state["memory"]["rewards"]) > 1:
            rows.recurrent_state.grow(len(rows_state["memory"]["rewards"]))
        rows.recurrent_state.set_state(rows_state["memory"])


def _get_rows_state(rows: PolicyRows) -> dict[str, Any]:
    return {
        "columns": _copy_columns(rows.table),
        "acted": list(rows.action_columns),
        "finals": [[unroll, leaves] for unroll, leaves in rows.final_observations.items()],
        "memory": rows.recurrent_state.get_state(),
    }


def _copy_columns(table: ColumnTable) -> dict[str, np.ndarray]:
    """Copies all columns except infos: these are empty whenever a state is taken."""
    names = (name for name, column in table.columns.items() if column.dtype != object)
    return {name: table[name].copy() for name in names}


def _append_columns(table: ColumnTable, columns: Mapping[str, np.ndarray]) -> None:
    new_rows = table.append(len(next(iter(columns.values()))))
    for name, column in columns.items():
        table.columns[name][new_rows] = column


# -- finished trajectories --------------------------------------------------------------------


def get_ended_state(transitions: TransitionTable, sub_envs: Sequence[SubEnvState]) -> list[Any]:
    """Returns the finished episodes that still have rows, with their trajectories and agents."""
    running_ids = {id(sub_env.episode) for sub_env in sub_envs}
    entries: dict[int, list[Any]] = {}
    for unroll, (episode, agent) in transitions.slots.owners.items():
        if id(episode) not in running_ids:
            entry = entries.setdefault(id(episode), [get_episode_state(episode), []])
            entry[1].append([unroll, agent])
    return list(entries.values())
