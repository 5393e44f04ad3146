"""Table of the transitions of many agents: written in time order, read by trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.envs.fault_tolerance import describe_invalid_reward
from tfpolicies.errors import EnvError
from tfpolicies.rollout.multi_agent_episode import SubEnvState
from tfpolicies.rollout.multi_agent_tables import AgentSlots, ColumnTable, PolicyRows
from tfpolicies.rollout.rollout_rows import RolloutRows

_INT_COLUMNS = ("t", "seat", "unroll_id", "eps_id", "agent_index")
_EMPTY: Mapping[Any, Any] = {}
_BATCH_COLUMNS = ("rewards", "terminateds", "truncateds", "eps_id", "unroll_id", "agent_index", "t")


class TransitionTable:
    """All transitions that were not returned yet: one table of records, and each policy's rows.

    Within a step, changes are collected per sub-environment first, then committed for all together.

    Args:
        num_copies: the number of sub-environments.

    Attributes:
        records: a table; `t` is -1 until the agent's next observation completes the transition.
        slots: the slots of the agents of running episodes.
        rows: by policy id.
        keeps_infos: whether records have the infos of the steps that completed them.
    """

    keeps_infos = False

    def __init__(self, num_copies: int) -> None:
        specs: dict[str, tuple[tuple[int, ...], Any]] = dict.fromkeys(_INT_COLUMNS, ((), np.int64))
        flags = dict.fromkeys(("terminateds", "truncateds"), ((), np.bool_))
        self.records = ColumnTable({**specs, **flags, "rewards": ((), np.float32)})
        self.slots = AgentSlots()
        self.rows: dict[str, PolicyRows] = {}
        self._num_copies = num_copies
        self._clear_step()

    def keep_infos(self) -> None:
        """Keeps infos from now on; completed records get empty ones."""
        if not self.keeps_infos:
            self.keeps_infos = True
            self.records.add_columns({"infos": ((), object)})
            self.records["infos"][:] = [{} for _ in range(self.records.used)]

    def has_infos(self) -> bool:
        return self.keeps_infos and any(self.records["infos"])

    # -- steps --------------------------------------------------------------------------------

    def open_transitions(self, slots: np.ndarray) -> int:
        """Opens a transition for each slot, int64 `[K]`; returns the number of the first record."""
        new_records = self.records.append(len(slots))
        columns, slot_columns = self.records.columns, self.slots.columns
        columns["t"][new_records] = -1
        columns["seat"][new_records] = slots
        columns["terminateds"][new_records] = columns["truncateds"][new_records] = False
        if self.keeps_infos:
            columns["infos"][new_records] = None
        for name in ("unroll_id", "eps_id", "agent_index"):
            columns[name][new_records] = slot_columns[name][slots]
        slot_columns["record"][slots] = np.arange(new_records.start, new_records.stop)
        return int(new_records.start)

    def _clear_step(self) -> None:
        self._reward_slots: list[np.ndarray] = []
        self._rewards: list[Any] = []
        self._closed: list[tuple[np.ndarray, int, int]] = []
        self._ends: list[tuple[int, bool, bool]] = []
        self._infos: list[Any] = []

    def add_rewards(self, slots: np.ndarray, rewards: Sequence[Any]) -> None:
        """Collects rewards of slots, int64 `[K]`."""
        self._reward_slots.append(slots)
        self._rewards += rewards

    def add_closed(
        self, sub_env: SubEnvState, t: int, slots: np.ndarray, infos: Mapping[Any, Any]
    ) -> None:
        """Collects the slots of one sub-environment whose agents are observed, or done, at `t`.

        Args:
            sub_env: the sub-environment.
            t: the step.
            slots: int64 `[K]`.
            infos: by agent id.
        """
        if len(slots):
            if self.keeps_infos:
                info_by_slot = {
                    sub_env.episode.slot_by_agent.get(agent): info for agent, info in infos.items()
                }
                self._infos += [dict(info_by_slot.get(slot) or _EMPTY) for slot in slots.tolist()]
            self._closed.append((slots, sub_env.index, t))

    def add_end(self, slot: int, *, terminated: bool, truncated: bool) -> None:
        """Collects how the trajectory of an agent that is done ends."""
        self._ends.append((slot, terminated, truncated))

    def commit_rewards(self) -> None:
        if self._reward_slots:
            slot_columns = self.slots.columns
            slots, rewards = np.concatenate(self._reward_slots), np.array(self._rewards, np.float64)
            slot_columns["earned"][slots] += rewards
            slot_columns["total"][slots] += rewards
            self._reward_slots, self._rewards = [], []

    def commit(self) -> np.ndarray:
        """Commits the collected changes: rewards, then completed transitions, then ends.

        Returns:
            The number of completed transitions per sub-environment, int64 `[num_copies]`.
        """
        self.commit_rewards()
        env_indices = self._commit_closed() if self._closed else np.zeros(0, np.int64)
        self._clear_step()
        return np.bincount(env_indices, minlength=self._num_copies)

    def _commit_closed(self) -> np.ndarray:
        """Completes the open transitions of the collected slots; returns their sub-environments."""
        slot_columns, columns = self.slots.columns, self.records.columns
        slot_arrays, *fields = zip(*self._closed, strict=True)
        slots, counts = np.concatenate(slot_arrays), [*map(len, slot_arrays)]
        env_indices, t = (np.repeat(x, counts) for x in fields)
        record = slot_columns["record"][slots]
        is_open = record >= 0
        if self.keeps_infos:
            record_infos = columns["infos"]
            for number, info in zip(record.tolist(), self._infos, strict=True):
                if number >= 0:
                    record_infos[number] = info
        if not is_open.all():
            slot_columns["earned"][slots[~is_open]] = 0.0  # earned before the agent's first action
            slots, env_indices, t, record = (x[is_open] for x in (slots, env_indices, t, record))
        rewards = slot_columns["earned"][slots]
        columns["rewards"][record] = rewards
        columns["t"][record] = t
        for slot, terminated, truncated in self._ends:
            number = slot_columns["record"][slot]
            if number >= 0:
                columns["terminateds"][number] = terminated
                columns["truncateds"][number] = truncated
        slot_columns["earned"][slots] = 0.0
        slot_columns["record"][slots] = -1
        for rows in self.rows.values():
            if rows.recurrent_state.is_needed:
                is_known = slots < rows.recurrent_state.num_rows
                rows.recurrent_state.record_rewards(rewards[is_known], slots[is_known])
        return env_indices

    # -- batches ------------------------------------------------------------------------------

    def take_rows(self, selected: np.ndarray, sub_envs: Sequence[SubEnvState]) -> list[RolloutRows]:
        """Removes and returns the rows of the selected records, bool `[K]`, by policy."""
        samples = [self._take_policy_rows(rows, selected, sub_envs) for rows in self.rows.values()]
        self.keep_only(~selected)
        return [sample for sample in samples if sample is not None]

    def _take_policy_rows(
        self, rows: PolicyRows, selected: np.ndarray, sub_envs: Sequence[SubEnvState]
    ) -> RolloutRows | None:
        table, records = rows.table, self.records
        index = np.flatnonzero(selected[table["record:"]])
        if not len(index):
            return None
        unroll_ids = records["unroll_id"][table["record:"][index]]
        order = np.argsort(unroll_ids, kind="stable")
        index, unroll_ids = index[order], unroll_ids[order]
        ends = np.append(unroll_ids[1:] != unroll_ids[:-1], True)
        numbers = table["record:"][index]
        columns = {name: table[name].take(index, axis=0) for name in rows.action_columns}
        record_columns = (*_BATCH_COLUMNS, "infos") if self.keeps_infos else _BATCH_COLUMNS
        columns |= {name: records[name].take(numbers) for name in record_columns}
        obs = [table[name].take(index, axis=0) for name in rows.obs_names]
        last_rows = np.flatnonzero(ends)
        new_obs = self._get_next_obs(rows, obs, last_rows, unroll_ids[last_rows], sub_envs)
        return RolloutRows(rows.policy_id, rows.policy, rows.actions, obs, new_obs, columns, ends)

    def _get_next_obs(
        self,
        rows: PolicyRows,
        obs: Sequence[np.ndarray],
        last_rows: np.ndarray,
        unroll_ids: np.ndarray,
        sub_envs: Sequence[SubEnvState],
    ) -> list[np.ndarray]:
        """Returns the next observation of each row, per leaf, in new arrays.

        It is the observation that the agent acted on next, or the last one of its trajectory; for
        an agent that is done without a last observation, it is the one it acted on. `last_rows` has
        the last row of each trajectory, `unroll_ids` their unroll ids in ascending order.
        """
        next_obs_leaves = [np.concatenate([leaf[1:], leaf[-1:]]) for leaf in obs]
        for leaf, target in zip(obs, next_obs_leaves, strict=True):
            target[last_rows] = leaf[last_rows]
        for row, unroll_id in zip(last_rows.tolist(), unroll_ids.tolist(), strict=True):
            for target, leaf in zip(
                next_obs_leaves, rows.final_observations.pop(unroll_id, ()), strict=False
            ):
                target[row] = leaf[0]
        for running_unroll_ids, next_obs in self._get_running_obs(rows, sub_envs):
            index = np.minimum(np.searchsorted(unroll_ids, running_unroll_ids), len(unroll_ids) - 1)
            is_running = unroll_ids[index] == running_unroll_ids
            for target, leaf in zip(next_obs_leaves, next_obs, strict=True):
                target[last_rows[index[is_running]]] = leaf[is_running]
        return next_obs_leaves

    def _get_running_obs(
        self, rows: PolicyRows, sub_envs: Sequence[SubEnvState]
    ) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """Returns the current observations of running trajectories: unroll ids, and leaves.

        They are those of open transitions, and those that agents act on next.
        """
        table, records = rows.table, self.records
        open_rows = np.flatnonzero(records["t"][table["record:"]] < 0)
        acted_on = [table[name][open_rows] for name in rows.obs_names]
        result = [(records["unroll_id"][table["record:"][open_rows]], acted_on)]
        pending = [pair for sub_env in sub_envs for pair in sub_env.pending if pair[0].rows is rows]
        if pending:
            slots = np.concatenate([group.slots for group, _ in pending])
            observations = [x for _, values in pending for x in values]
            result.append((self.slots.columns["unroll_id"][slots], rows.stack(observations)))
        return result

    def keep_only(self, selected: np.ndarray) -> None:
        """Keeps only the selected records, bool `[K]`, and the policies' rows of these."""
        new_numbers = np.cumsum(selected) - 1  # the new number of each record that stays
        for rows in self.rows.values():
            table = rows.table
            table.keep(np.flatnonzero(selected[table["record:"]]))
            table["record:"][...] = new_numbers[table["record:"]]
        record = self.slots["record"]
        open_slots = np.flatnonzero(record >= 0)
        old = record[open_slots]
        record[open_slots] = np.where(selected[old], new_numbers[old], -1)
        self.records.keep(np.flatnonzero(selected))

    def start_new_unrolls(self, sub_envs: Sequence[SubEnvState]) -> None:
        """Starts new unrolls of running trajectories; only open records may be left."""
        for sub_env in sub_envs:
            for agent in sub_env.get_active_agents():
                self.slots.start_new_unroll(
                    sub_env.episode.slot_by_agent[agent], sub_env.episode, agent
                )
        records = self.records
        records["unroll_id"][...] = self.slots.columns["unroll_id"][records["seat"]]

    def drop_finished_trajectories(self, sub_envs: Sequence[SubEnvState]) -> None:
        """Drops the owners of finished trajectories that have no rows left."""
        slots = self.slots
        unroll_ids = slots.columns["unroll_id"]
        remaining_ids = {
            unroll_ids[sub_env.episode.slot_by_agent[agent]]
            for sub_env in sub_envs
            for agent in sub_env.get_active_agents()
        }
        remaining_ids.update(self.records["unroll_id"].tolist())
        slots.owners = {
            number: owner for number, owner in slots.owners.items() if number in remaining_ids
        }
        slots.excluded &= remaining_ids
        for rows in self.rows.values():
            rows.final_observations = {
                n: leaves for n, leaves in rows.final_observations.items() if n in remaining_ids
            }


def make_reward_error(rewards: Mapping[Any, Any]) -> EnvError:
    """Creates the error about the first reward, by agent, that is not a number."""
    invalid = [(f"that of agent {agent!r}", x) for agent, x in rewards.items() if not _is_number(x)]
    description, reward = invalid[0] if invalid else ("one", None)
    return EnvError(
        f"Rewards must be one finite number for each agent, but {description} is "
        f"{describe_invalid_reward(reward)}"
    )


def _is_number(reward: object) -> bool:
    array = np.asarray(reward)
    return array.ndim == 0 and array.dtype.kind in "biuf" and bool(np.isfinite(array))
