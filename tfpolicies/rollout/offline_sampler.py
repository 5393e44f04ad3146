"""Returns recorded experience in place of a sampler's, postprocessed in the same way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.batch.view_builder import Trajectories
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.errors import BatchError, MissingColumnError
from tfpolicies.models.action_mapping import ActionMapping
from tfpolicies.models.ports import make_leaf_ports
from tfpolicies.models.spaces import action_leaves, is_float_box, unflatten
from tfpolicies.offline.block_reader import Block, BlockReader, ReaderPosition
from tfpolicies.offline.column_map import ColumnMap
from tfpolicies.offline.data_source import Chunk, DataSource, join_chunks
from tfpolicies.offline.step_columns import ACTIONS, EPISODE_COLUMNS, EPS_ID, NEW_OBS, OBS, REWARDS
from tfpolicies.offline.trajectories import (
    TrajectoryRows,
    group_by_episode,
    make_trajectories,
)
from tfpolicies.policy.batch_utils import make_sequence_batch
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.column_plan import ACTING_COLUMNS, ColumnPlan
from tfpolicies.rollout.episode import SINGLE_AGENT, Episode
from tfpolicies.rollout.loaded_block import (
    LoadedBlock,
    count_env_steps,
    count_items,
    join_batches,
)
from tfpolicies.rollout.postprocessor import Postprocessor
from tfpolicies.rollout.rollout_rows import RolloutRows, apply_reward_clipping, nest_columns

logger = logging.getLogger("tfpolicies")

_UNROLLS_PER_BLOCK = 1 << 24


class OfflineSettings(NamedTuple):
    """Settings of reading recorded experience.

    Attributes:
        rows: of a sample.
        shuffle_rows: the least number of rows that are shuffled together; 0: none.
        shard: `(k, n)`: the k-th of n shares.
        seed: of the order.
        columns: where columns of batches come from; see `ColumnMap`.
        actions_normalized: whether recorded actions are in [-1, 1] already.
        postprocess: whether trajectories are postprocessed.
        reads_all: whether batches also have the recorded columns that the loss does not read.
        whole_trajectories: whether a sample ends with a trajectory, if rows are in order.
    """

    rows: int
    shuffle_rows: int = 0
    shard: tuple[int, int] = (0, 1)
    seed: int = 0
    columns: Mapping[str, Any] | None = None
    actions_normalized: bool = False
    postprocess: bool = False
    reads_all: bool = False
    whole_trajectories: bool = False


class OfflineSampler:
    """Returns the batches of recorded experience.

    The data are opened by the first sample.

    Args:
        open_source: opens the data.
        policies: by id.
        settings: how they are read.
        make_postprocessor: creates the postprocessor of trajectories.
        rng: accepted and stored, as for other samplers.

    Attributes:
        metrics: always empty: recorded episodes say nothing about the current policies.
        rng: the argument; it may be replaced.
    """

    envs = None
    num_envs = 0
    state_kind = "data"
    running_episodes: Sequence[Episode] = ()

    def __init__(
        self,
        open_source: Callable[[], DataSource],
        policies: Mapping[str, Any],
        settings: OfflineSettings,
        make_postprocessor: Callable[[], Postprocessor],
        rng: np.random.Generator,
    ) -> None:
        self.policies = policies
        self.metrics: list[Any] = []
        self.rng = rng
        self._settings = settings
        self._open_source = open_source
        self._make_postprocessor = make_postprocessor
        self._source: DataSource | None = None
        self._reader: BlockReader | None = None
        self._plans: dict[str, ColumnPlan] = {}
        self._block: LoadedBlock | None = None
        self._block_position = ReaderPosition()
        self._saved_position: tuple[ReaderPosition, int] | None = None
        self._dropped = 0

    # -- sampling -----------------------------------------------------------------------------

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Returns the next rows: as many as the settings say, or a few more for sequences.

        Raises:
            BatchError: if the data are damaged, or lack a column.
            ObservationError: if a row is not in the policy's spaces.
        """
        parts: dict[str, list[SampleBatch]] = {}
        missing = self._settings.rows
        while missing > 0:
            block = self._block or self._load_block()
            batches, rows = block.take(missing)
            missing -= rows
            for policy_id, batch in batches.items():
                parts.setdefault(policy_id, []).append(batch)
            if block.is_empty:
                self._block = None
        joined: dict[str, Any] = {pid: join_batches(batches) for pid, batches in parts.items()}
        if [*joined] == [DEFAULT_POLICY_ID]:
            result: SampleBatch = joined[DEFAULT_POLICY_ID]
            return result
        return MultiAgentBatch(joined, count_env_steps(joined))

    def reset(self, seeds: object) -> None:
        """Does nothing: there are no running episodes, and reading continues."""

    def check_columns(self) -> None:
        """Opens the data and checks that they have the columns that the policies need.

        Raises:
            MissingColumnError: if not.
        """
        self._get_reader()

    def close(self) -> None:
        """Closes files and processes."""
        if self._source is not None:
            self._source.close()

    # -- state --------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Returns the position, as plain values and arrays.

        Rows whose postprocessing read the policy are part of it, since the policy changes.
        """
        block = self._block
        return {
            "kind": self.state_kind,
            "envs": None,
            "rng": self.rng.bit_generator.state,
            "position": self.get_position(),
            "rows": None if block is None or not self._settings.postprocess else block.get_rows(),
        }

    def get_position(self) -> list[Any]:
        """Returns where the next sample begins, as JSON values."""
        block = self._block
        if self._saved_position is not None:
            position, offset = self._saved_position
        elif self._reader is None:
            position, offset = ReaderPosition(), 0
        else:
            position = self._get_reader().position if block is None else self._block_position
            offset = 0 if block is None else block.offset
        return [position.to_state(), offset, list(self._settings.shard)]

    def set_position(self, position: Sequence[Any]) -> None:
        """Continues at a position of `get_position`; at the start if it is of another shard."""
        reader_state, offset, shard = position
        self._block = None
        if tuple(shard) != self._settings.shard:
            logger.warning(
                "The data are shared among %d workers, but were among %d before. Reading starts "
                "again.",
                self._settings.shard[1],
                shard[1],
            )
            reader_state, offset = ReaderPosition().to_state(), 0
        self._saved_position = ReaderPosition.from_state(reader_state), int(offset)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned."""
        self.rng.bit_generator.state = state["rng"]
        self.set_position(state["position"])
        if state["rows"] is not None and self._saved_position is not None:
            reader = self._get_reader()
            self._block_position, offset = self._saved_position
            self._saved_position = None
            reader.position = ReaderPosition.from_state(self._block_position.to_state())
            reader.read_block()
            self._block = LoadedBlock.from_rows(
                state["rows"], offset, self._settings.whole_trajectories
            )

    # -- blocks -------------------------------------------------------------------------------

    def _get_source(self) -> DataSource:
        if self._source is None:
            self._source = self._open_source()
        return self._source

    def _get_reader(self) -> BlockReader:
        if self._reader is not None:
            return self._reader
        source, settings = self._get_source(), self._settings
        self._column_map = ColumnMap(source.column_names, settings.columns)
        has_default = DEFAULT_POLICY_ID in self.policies
        policy_ids = [DEFAULT_POLICY_ID] if has_default else list(self.policies)
        self._plans = {
            pid: ColumnPlan.for_policy(
                self.policies[pid],
                self._column_map,
                postprocess=settings.postprocess,
                reads_all=settings.reads_all,
            )
            for pid in policy_ids
        }
        plans = self._plans.values()
        names = {name for plan in plans for name in plan.names}
        needed = {name for plan in plans for name in plan.needed}
        has_episodes = any(plan.has_episodes for plan in plans)
        column_map = self._column_map
        self._reader = BlockReader(
            source,
            column_map.find_sources(sorted(names), sorted(needed)),
            seed=settings.seed,
            shuffle_rows=settings.shuffle_rows,
            shard=settings.shard,
            find_starts=column_map.find_starts if has_episodes else None,
            episode_names=column_map.find_sources(EPISODE_COLUMNS, ()) if has_episodes else None,
        )
        return self._reader

    def _load_block(self) -> LoadedBlock:
        """Reads the next block; its rows are postprocessed and in random order."""
        reader = self._get_reader()
        offset = 0
        if self._saved_position is not None:
            reader.position, offset = self._saved_position
            self._saved_position = None
        self._block_position = ReaderPosition.from_state(reader.position.to_state())
        block = reader.read_block()
        batches = self._make_batches(block)
        counts = [count_items(batch) for batch in batches.values()]
        order = reader.draw_order(block, sum(counts))
        self._block = LoadedBlock(batches, order, offset, self._settings.whole_trajectories)
        return self._block

    def _make_batches(self, block: Block) -> dict[str, SampleBatch]:
        by_policy: dict[str, list[Chunk]] = {}
        for chunk in block.chunks:
            policy_id = chunk.policy_id or DEFAULT_POLICY_ID
            if policy_id not in self._plans:
                if len(self._plans) > 1 or chunk.policy_id is None:
                    raise BatchError(
                        f"{chunk.table} has rows of policy {policy_id!r:.50}, but there are "
                        f"{sorted(self._plans)!s:.200}. Rename the policies of the config, or the "
                        "rows'."
                    )
                policy_id = next(iter(self._plans))
            by_policy.setdefault(policy_id, []).append(chunk)
        batches = {}
        for policy_id, chunks in by_policy.items():
            plan, policy = self._plans[policy_id], self.policies[policy_id]
            if plan.has_episodes:
                epoch, number = block.key
                first_unroll = (epoch * 1_000_003 + number) * _UNROLLS_PER_BLOCK
                batch = self._make_trajectory_batch(policy_id, plan, chunks, first_unroll)
            else:
                batch = self._make_row_batch(policy, plan, chunks)
            if batch is not None and batch.count:
                batches[policy_id] = batch
        return batches

    def _make_row_batch(
        self, policy: Policy, plan: ColumnPlan, chunks: Sequence[Chunk]
    ) -> SampleBatch:
        """Returns the batch of rows that are independent of each other."""
        spaces = policy.observation_space, policy.action_space
        parts = []
        for chunk in chunks:
            steps = self._column_map.read(chunk, spaces, plan.names)
            parts.append((steps.obs or [], steps.new_obs or [], steps.actions or [], steps.columns))
        obs, new_obs, actions = (
            [_concatenate(leaf) for leaf in zip(*(part[i] for part in parts), strict=True)]
            for i in range(3)
        )
        columns: dict[str, Any] = {
            name: _concatenate([part[3][name] for part in parts]) for name in parts[0][3]
        }
        learning = policy.driver.learning
        columns[OBS] = self._nest_observations(policy, learning.normalize_observations(obs))
        if plan.needs_next_obs:
            next_leaves = learning.normalize_observations(new_obs)
            columns[NEW_OBS] = self._nest_observations(policy, next_leaves)
        if REWARDS in columns:
            clip_rewards = policy.config.get("clip_rewards")
            clipped = apply_reward_clipping(columns[REWARDS], clip_rewards)
            columns[REWARDS] = learning.scale_rewards(clipped)
        columns[ACTIONS] = unflatten(policy.action_space, self._convert_actions(policy, actions))
        return SampleBatch(columns)

    def _nest_observations(self, policy: Any, leaves: Sequence[np.ndarray]) -> Any:
        return policy._convert_observations(unflatten(policy.observation_space, leaves))

    def _convert_actions(self, policy: Policy, actions: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Converts the environment's actions to those of the policy."""
        config, space = policy.config, policy.action_space
        normalize = config.get("normalize_actions", True) and not self._settings.actions_normalized
        clip = bool(config.get("clip_actions", False)) and not config.get("normalize_actions", True)
        leaves = action_leaves(space)
        if clip:
            actions = [
                np.clip(x, leaf.space.low, leaf.space.high) if is_float_box(leaf.space) else x
                for leaf, x in zip(leaves, actions, strict=True)
            ]
        is_compiled = policy.driver.program is not None
        mapping = ActionMapping(space, normalize, clip, zero_based=is_compiled)
        return mapping.from_env(actions)

    def _make_trajectory_batch(
        self, policy_id: str, plan: ColumnPlan, chunks: Sequence[Chunk], first_unroll: int
    ) -> SampleBatch | None:
        """Returns the batch of trajectories, postprocessed if the settings say so."""
        column_map, policy = self._column_map, self.policies[policy_id]
        if not self._get_source().has_contiguous_episodes:
            chunks = [group_by_episode(join_chunks(chunks), column_map)]
        spaces = policy.observation_space, policy.action_space
        parts: list[TrajectoryRows] = []
        for chunk in chunks:
            steps = column_map.read(chunk, spaces, plan.names)
            part = make_trajectories(
                steps,
                column_map,
                needs_next_obs=plan.needs_next_obs,
                first_unroll=first_unroll,
            )
            first_unroll += chunk.rows
            self._report_dropped(part.dropped, chunk)
            if len(part.ends):
                parts.append(part)
        if not parts:
            return None
        rows = self._make_rollout_rows(policy_id, policy, parts)
        if not self._settings.postprocess:
            rows.prepare(policy.config.get("clip_rewards"), None, observes=False)
            batch = rows.to_batch()
            return make_sequence_batch(batch, policy) if policy.is_recurrent() else batch
        postprocessor = self._make_postprocessor()
        try:
            return postprocessor.make_batches([rows], lambda: _make_owners(rows))[policy_id]
        except KeyError as error:
            if error.args[0] not in ACTING_COLUMNS:
                raise
            raise MissingColumnError(
                f"Postprocessing of {type(policy).__name__} reads {error.args[0]!r}, which the "
                "data do not have. It is recorded by offline_data(output=...) of algorithms whose "
                "policies have a critic; MARWIL, BC, DQN and SAC do not need it."
            ) from error

    def _report_dropped(self, rows: int, chunk: Chunk) -> None:
        if rows and not self._dropped:
            logger.warning(
                "%d of %d rows of %s have no next observation, because their episode is cut off "
                "there and 'new_obs' is not recorded. They are left out, as others like them.",
                rows,
                chunk.rows,
                chunk.table,
            )
        self._dropped += rows

    def _make_rollout_rows(
        self, policy_id: str, policy: Any, parts: Sequence[TrajectoryRows]
    ) -> RolloutRows:
        def join(arrays: Sequence[Any]) -> list[np.ndarray]:
            return [_concatenate(leaf) for leaf in zip(*arrays, strict=True)]

        obs = join([part.obs for part in parts])
        new_obs = obs if parts[0].new_obs is None else join([part.new_obs for part in parts])
        names = parts[0].columns
        columns = {name: _concatenate([part.columns[name] for part in parts]) for name in names}
        ends = _concatenate([part.ends for part in parts])
        columns.setdefault(REWARDS, np.zeros(len(ends), np.float32))
        ports = make_leaf_ports(ACTIONS, action_leaves(policy.action_space))
        actions = self._convert_actions(policy, join([part.actions for part in parts]))
        columns |= {port.name: x for port, x in zip(ports, actions, strict=True)}
        for i, state in enumerate(policy.get_initial_state()):
            initial = np.broadcast_to(np.asarray(state), (len(ends), *np.shape(state)))
            for name in (f"state_in_{i}", f"state_out_{i}"):
                if columns.get(name, initial).shape != initial.shape:
                    del columns[name]
                columns.setdefault(name, initial)
        rows = RolloutRows(policy_id, policy, ports, obs, new_obs, columns, ends)
        self._add_views(policy, rows)
        return rows

    def _add_views(self, policy: Policy, rows: RolloutRows) -> None:
        """Adds the earlier steps that the model reads."""
        views = policy.driver.acting.views
        if not views:
            return
        space = policy.observation_space
        sources = {
            OBS: unflatten(space, rows.obs),
            NEW_OBS: unflatten(space, rows.new_obs),
            **nest_columns(
                {port.name: rows.columns[port.name] for port in rows.actions},
                rows.actions,
                policy.action_space,
                (),
            ),
            REWARDS: rows.columns[REWARDS],
        }
        trajectories = Trajectories(rows.ends)
        for view in views:
            for current in (view, view.next_step_view):
                if current is None:
                    continue
                requirement = ViewRequirement(current.source, shift=list(current.shifts))
                column = trajectories.build_views(sources, {current.name: requirement})
                leaves = current.flatten(column[current.name])
                rows.columns |= {
                    port.name: leaf for port, leaf in zip(current.ports, leaves, strict=True)
                }


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _make_owners(rows: RolloutRows) -> dict[int, tuple[Any, Any]]:
    """Returns an episode and an agent for each trajectory."""
    episode_ids = rows.columns[EPS_ID]
    agents = rows.columns["agent_index"]
    result = {}
    for unroll, part in rows.iter_unrolls():
        episode = _RecordedEpisode(int(episode_ids[part.start]))
        agent = int(agents[part.start]) or SINGLE_AGENT
        result[unroll] = episode, agent
    return result


class _RecordedEpisode:
    """The episode of recorded rows, for methods that postprocess trajectories."""

    def __init__(self, episode_id: int) -> None:
        self.episode_id = episode_id
