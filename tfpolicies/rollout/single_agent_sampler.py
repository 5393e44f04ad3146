"""Samples one policy in many environments: acts, steps, writes columns, and cuts fragments.

The loop processes all environments at once. Columns are arrays `[N, W, ...]`, environment by
environment, so that a trajectory's rows are contiguous and a fragment without invalid rows is a
view. Episode ids, time steps, returns and postprocessing are computed for all rows together when a
fragment is full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.batch.layout import INFOS
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.callbacks import has_episode_methods
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.envs.vector_adapters import VectorEnvAdapter
from tfpolicies.errors import UsageError
from tfpolicies.models.ports import make_leaf_ports
from tfpolicies.models.spaces import Leaf, action_leaves, batch_leaves, leaves, unflatten
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.recurrent_state import RecurrentState
from tfpolicies.rollout.connector_env import get_connector_metrics, wrap_connectors
from tfpolicies.rollout.episode import (
    SINGLE_AGENT,
    Episode,
    EpisodeTracker,
    RolloutMetrics,
    add_callback_metrics,
    find_excluded,
    get_last_info,
)
from tfpolicies.rollout.evaluation import play_episodes
from tfpolicies.rollout.policy_connectors import get_pipelines, has_new_pipelines
from tfpolicies.rollout.postprocessor import TrajectoryOwners
from tfpolicies.rollout.rollout_rows import RolloutRows, require_same_columns
from tfpolicies.rollout.sampler import (
    LONG_EPISODE_STEPS,
    EvaluationDuration,
    EvaluationResult,
    Sampler,
    warn_long_episode,
)
from tfpolicies.rollout.space_checks import require_compatible_spaces
from tfpolicies.rollout.timing import now

_ENV_COLUMNS = ("rewards", "terminateds", "truncateds")
_FINAL_OBS = "the environment's final observation"
_AGENT_AND_POLICY = (SINGLE_AGENT, DEFAULT_POLICY_ID)
_NO_METRICS: Mapping[str, float] = {}
_NO_ROWS = np.zeros(0, np.int64)


class _RolloutBuffer:
    """The rows of N environments that were not returned yet, up to W steps.

    Attributes:
        used: steps written.
        obs: per leaf `[N, W + 1, ...]`: row t is acted on, row t + 1 is the next observation.
        columns: `[N, W, ...]` by name; includes `infos` if a policy or callback reads them.
        valid: bool `[N, W]`: False for rows that are not transitions or were already returned.
        has_invalid: whether it is False for a written row.
        final_observations: last observations of episodes that the environment reset in the same
            step: (t, environment indices, leaves).
        excluded: (t, environment index) of steps whose info excludes the trajectory that ends there
            from learning.
        life_losses: (t, environment index) of steps in which a life was lost, which ends an episode
            for learning.
    """

    def __init__(self, num_envs: int, width: int, obs_leaves: tuple[Leaf, ...]) -> None:
        self.num_envs = num_envs
        self.width = width
        self.obs_leaves = obs_leaves
        self.used = 0
        self.obs = [np.empty((num_envs, width + 1, *x.shape), x.dtype) for x in obs_leaves]
        self.columns: dict[str, np.ndarray] = {
            "rewards": np.empty((num_envs, width), np.float32),
            "terminateds": np.empty((num_envs, width), bool),
            "truncateds": np.empty((num_envs, width), bool),
        }
        self.valid = np.ones((num_envs, width), bool)
        self.has_invalid = False
        self.final_observations: list[tuple[int, np.ndarray, list[np.ndarray]]] = []
        self.excluded: list[tuple[int, int]] = []
        self.life_losses: list[tuple[int, int]] = []

    def keep_infos(self) -> None:
        """Adds the column of infos; rows written so far get empty ones."""
        if INFOS not in self.columns:
            infos = self.columns[INFOS] = np.empty((self.num_envs, self.width), object)
            infos[:, : self.used] = [[{} for _ in range(self.used)]] * self.num_envs

    def has_infos(self) -> bool:
        """Returns whether a row that was not returned yet has a non-empty info."""
        infos = self.columns.get(INFOS)
        return infos is not None and any(infos[:, : self.used][self.valid[:, : self.used]])

    def make_mask(self, steps: Sequence[tuple[int, int]]) -> np.ndarray:
        """Returns a mask of steps `(t, environment index)`, bool `[N, W]`."""
        mask = np.zeros(self.valid.shape, bool)
        for t, index in steps:
            mask[index, t] = True
        return mask

    def set_first_observations(self, obs: list[np.ndarray]) -> None:
        for buffer, leaf in zip(self.obs, obs, strict=True):
            buffer[:, 0] = leaf

    def get_env_views(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns views `[W, N, ...]` to write observations, and rewards and both end flags.

        Writing a row of a view takes half as long as writing a column.
        """
        env_views = [self.columns[name].swapaxes(0, 1) for name in _ENV_COLUMNS]
        return [leaf.swapaxes(0, 1) for leaf in self.obs], env_views

    def get_policy_views(
        self, policy: Policy, columns: Mapping[str, np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns a view `[W, N, ...]` for each output of acting, with the output `[N, ...]`.

        Raises:
            UsageError: if acting returned other columns before.
        """
        policy_columns = self.columns.keys() - _ENV_COLUMNS - {INFOS}
        if not (policy_columns or self.used):
            for name, array in columns.items():
                shape = (self.num_envs, self.width, *array.shape[1:])
                self.columns[name] = np.empty(shape, array.dtype)
        elif policy_columns != columns.keys():
            require_same_columns(policy, policy_columns, columns)
        return [(self.columns[name].swapaxes(0, 1), x) for name, x in columns.items()]

    def resize(self, start: int, width: int) -> _RolloutBuffer:
        """Returns a buffer of another width with the rows from step `start`."""
        resized = _RolloutBuffer(self.num_envs, width, self.obs_leaves)
        resized.fill(
            {name: column[:, start : self.used] for name, column in self.columns.items()},
            [leaf[:, start : self.used + 1] for leaf in self.obs],
            self.valid[:, start : self.used],
        )
        resized.final_observations = [
            (t - start, i, x) for t, i, x in self.final_observations if t >= start
        ]
        resized.excluded = [(t - start, i) for t, i in self.excluded if t >= start]
        resized.life_losses = [(t - start, i) for t, i in self.life_losses if t >= start]
        return resized

    def fill(
        self, columns: Mapping[str, np.ndarray], obs: Sequence[np.ndarray], valid: np.ndarray
    ) -> None:
        """Writes the first steps: columns `[N, t, ...]`, and observations `[N, t + 1, ...]`."""
        used = self.used = valid.shape[1]
        for name, column in columns.items():
            if name not in self.columns:
                shape = (self.num_envs, self.width, *column.shape[2:])
                self.columns[name] = np.empty(shape, column.dtype)
            self.columns[name][:, :used] = column
        for leaf, values in zip(self.obs, obs, strict=True):
            leaf[:, : used + 1] = values
        self.valid[:, :used] = valid
        self.has_invalid = not valid.all()

    def get_next_observations(self) -> list[np.ndarray]:
        """Returns the next observation of each step, `[N, used, ...]` per leaf, as copies.

        They must not share memory with `obs`: writing into one column of a batch would change the
        other, and the observation for the next action.
        """
        next_leaves = [leaf[:, 1 : self.used + 1].copy() for leaf in self.obs]
        for t, indices, final_leaves in self.final_observations:
            for leaf, rows in zip(next_leaves, final_leaves, strict=True):
                leaf[indices, t] = rows
        return next_leaves


class _EpisodeProgress(NamedTuple):
    """The id, steps and return of each environment's unfinished episode, `[N]` each."""

    episode_ids: np.ndarray  # int64
    steps: np.ndarray  # int64, in batches so far
    returns: np.ndarray  # float64, in batches so far

    @classmethod
    def start(cls, num_envs: int, rng: np.random.Generator) -> _EpisodeProgress:
        ids = rng.integers(10**18, size=num_envs, dtype=np.int64)
        return cls(ids, np.zeros(num_envs, np.int64), np.zeros(num_envs))


class SingleAgentSampler(Sampler):
    """Samples batches of one policy from N environments.

    The environments are wrapped with the policy's connectors. If its connectors change, or episode
    tracking is switched on, new episodes start.

    Args:
        envs: the environments.
        policies: the one called `DEFAULT_POLICY_ID` acts.
        settings: see `Sampler`.

    Raises:
        SpaceError: if the spaces of the policy do not fit those of the environments.
    """

    envs: VectorEnvAdapter
    _base_envs: VectorEnvAdapter

    def __init__(
        self, envs: VectorEnvAdapter, policies: Mapping[str, Any], **settings: Any
    ) -> None:
        super().__init__(envs, policies, **settings)
        self._tracker: EpisodeTracker | None = None
        self._untracked_episodes: dict[int, Episode] = {}  # by id, if no tracker has them
        self._batch_episodes: list[Episode] = []  # one per trajectory of the current batch
        self._buffer: _RolloutBuffer | None = None
        self._recurrent_state: RecurrentState | None = None
        self._progress = _EpisodeProgress.start(envs.num_envs, self.rng)
        self._next_unroll_id = 0
        self._connect(self._get_policy())

    def _get_running_ids(self) -> list[int]:
        ids: list[int] = self._progress.episode_ids.tolist()
        return ids

    def _get_policy(self) -> Any:
        return self.policies.get(DEFAULT_POLICY_ID)

    def _connect(self, policy: Policy) -> None:
        self._pipelines = get_pipelines(policy)
        self.envs = wrap_connectors(self._base_envs, policy)
        spaces = self.envs.observation_space, self.envs.action_space
        require_compatible_spaces(DEFAULT_POLICY_ID, policy, "the environment", *spaces)
        self._obs_leaves = leaves(self.envs.observation_space)
        self._action_ports = make_leaf_ports("actions", action_leaves(self.envs.action_space))

    def reset(self, seeds: Sequence[int] | None) -> None:
        """Starts new episodes in all environments; drops rows that were not returned yet."""
        obs = self.envs.reset(seeds)
        self._buffer = _RolloutBuffer(self.envs.num_envs, self._fragment_length, self._obs_leaves)
        self._buffer.set_first_observations(
            batch_leaves(self._obs_leaves, obs, "the environment's observation")
        )
        self._progress = _EpisodeProgress.start(self.envs.num_envs, self.rng)
        self._recurrent_state = None
        self._untracked_episodes = {}
        self._tracker = self._tracker or self._make_tracker()
        if self._tracker is not None:
            self._tracker.start_all(obs)

    def _needs_tracker(self, policy: Policy) -> bool:
        """Returns whether the policy or a callback reads single episodes step by step."""
        return policy.driver.acting.reads_episodes or has_episode_methods(self._callbacks)

    def _make_tracker(self) -> EpisodeTracker | None:
        if not self._needs_tracker(self._get_policy()):
            return None
        return EpisodeTracker(self._run_callback, self._worker, self.envs.num_envs, self.rng)

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Returns the next postprocessed batch.

        Rows are ordered by environment and time; with `truncate_episodes` each environment has
        exactly `get_fragment_length` of them. If the last info of a trajectory has a false
        `training_enabled`, its rows are excluded: the result is a `MultiAgentBatch` that still
        counts their steps.
        """
        if self._buffer is None:
            raise UsageError("sample() needs running episodes; call reset() first.")
        policy = self._get_policy()
        self._require_fitting_exploration(policy)
        is_outdated = has_new_pipelines(policy, self._pipelines)
        if is_outdated:
            self._connect(policy)
        if is_outdated or (self._tracker is None and self._needs_tracker(policy)):
            self.reset(None)
        if self._reads_infos(policy):
            self._buffer.keep_infos()
        buffer = self._collect(policy, self._buffer)
        selected = self._select_rows(buffer)
        batch = self._to_batch(policy, buffer, selected)
        self._buffer = self._carry_over(buffer, selected)
        return batch

    # -- the loop -----------------------------------------------------------------------------

    def _collect(self, policy: Policy, buffer: _RolloutBuffer) -> _RolloutBuffer:
        recurrent_state = self._get_recurrent_state(policy)
        resets_per_episode = policy.driver.acting.resets_per_episode
        tracks_ends = recurrent_state.is_needed or resets_per_episode
        act = recurrent_state.act if recurrent_state.is_needed else policy.driver.acting.act
        envs, tracker, space_leaves = self.envs, self._tracker, self._obs_leaves
        obs = [leaf[:, buffer.used] for leaf in buffer.obs]
        first_step, connector_ns, inference_ns, env_wait_ns, start = (
            buffer.used,
            envs.connector_ns,
            0,
            0,
            now(),
        )
        while missing := self._count_missing_steps(buffer):
            if buffer.used == buffer.width:
                self._report_long_episodes(buffer)
                buffer = buffer.resize(0, 2 * buffer.width)
            obs_views, (rewards, terminateds, truncateds) = buffer.get_env_views()
            valid, infos = buffer.valid.swapaxes(0, 1), buffer.columns.get(INFOS)
            previous_columns, column_views = None, []
            steps = range(buffer.used, min(buffer.used + missing, buffer.width))
            with policy.driver.acting.prefetch_noise(len(steps) * envs.num_envs):
                for t in steps:
                    act_start = now()
                    env_actions, columns = act(obs)
                    env_start = now()
                    step = envs.step(env_actions)
                    env_wait_ns += now() - env_start
                    inference_ns += env_start - act_start
                    if columns is not previous_columns:
                        previous_columns, column_views = (
                            columns,
                            buffer.get_policy_views(policy, columns),
                        )
                    for view, column in column_views:
                        view[t] = column
                    rewards[t] = step.rewards
                    terminateds[t] = step.terminateds
                    truncateds[t] = step.truncateds
                    obs = batch_leaves(space_leaves, step.obs, "the environment's observation")
                    for view, leaf in zip(obs_views, obs, strict=True):
                        view[t + 1] = leaf
                    if tracks_ends:
                        ended = step.terminateds | step.truncateds
                        recurrent_state.record_step(step.rewards, ended, step.reset_only)
                        if resets_per_episode and ended.any():
                            policy.driver.acting.start_episode()
                    if step.reset_only is not None:
                        np.logical_not(step.reset_only, valid[t])
                        buffer.has_invalid = True
                    if step.final_obs is not None:
                        final_obs = batch_leaves(space_leaves, step.final_obs[1], _FINAL_OBS)
                        buffer.final_observations.append((t, step.final_obs[0], final_obs))
                    if step.life_lost is not None:
                        buffer.life_losses += [
                            (t, i) for i in np.flatnonzero(step.life_lost).tolist()
                        ]
                    if step.failed is not None:
                        self._drop_episodes(buffer, step.failed, t)
                    if step.infos and any(step.infos):
                        buffer.excluded += [
                            (t, i) for i in find_excluded(step.infos, envs.num_envs)
                        ]
                    if infos is not None:
                        for i in range(buffer.num_envs):
                            infos[i, t] = dict(get_last_info(step.infos, i))
                    if tracker is not None:
                        tracker.step(step, env_actions, columns)
                    buffer.used = t + 1
        processing_ns = now() - start - inference_ns - env_wait_ns
        action_connector_ns, obs_connector_ns = (
            envs.connector_ns[0] - connector_ns[0],
            envs.connector_ns[1] - connector_ns[1],
        )
        env_wait_ns -= action_connector_ns + obs_connector_ns
        self.times.add(
            buffer.used - first_step,
            processing_ns + obs_connector_ns,
            inference_ns,
            action_connector_ns,
            env_wait_ns,
        )
        return buffer

    def _report_long_episodes(self, buffer: _RolloutBuffer) -> None:
        """Warns about episodes that delay a batch of whole episodes, at doubling lengths."""
        used = buffer.used
        if used < LONG_EPISODE_STEPS:
            return
        done = buffer.columns["terminateds"][:, :used] | buffer.columns["truncateds"][:, :used]
        steps = np.where(done.any(axis=1), done[:, ::-1].argmax(axis=1), used)
        env_index = int(steps.argmax())
        if steps[env_index] >= LONG_EPISODE_STEPS:
            warn_long_episode(env_index, int(steps[env_index]))

    def _get_recurrent_state(self, policy: Policy) -> RecurrentState:
        if self._recurrent_state is None or self._recurrent_state.policy is not policy:
            self._recurrent_state = RecurrentState(policy, self.envs.num_envs)
            if policy.driver.acting.reads_episodes and self._tracker is not None:
                self._recurrent_state.extra_arguments_fn = self._tracker.get_context
        return self._recurrent_state

    def _drop_episodes(
        self, buffer: _RolloutBuffer, failures: Mapping[int, Exception], t: int
    ) -> None:
        """Drops the rows of episodes whose environments failed in step `t`, and reports them."""
        done = buffer.columns["terminateds"][:, :t] | buffer.columns["truncateds"][:, :t]
        for i, error in failures.items():
            ends = np.flatnonzero(done[i] & buffer.valid[i, :t])
            buffer.valid[i, ends[-1] + 1 if len(ends) else 0 : t + 1] = False
            buffer.has_invalid = True
            if not len(ends):  # its first rows were returned before
                for column, new in zip(
                    self._progress, _EpisodeProgress.start(1, self.rng), strict=True
                ):
                    column[i] = new[0]
            self.metrics.append(RolloutMetrics(episode_faulty=True))
            if self._tracker is not None:
                self._tracker.on_env_failure(i, error)

    def _count_missing_steps(self, buffer: _RolloutBuffer) -> int:
        """Returns the minimum number of steps that a batch still needs; 0 for none."""
        used, length = buffer.used, self._fragment_length
        if used < length:
            return length - used
        if self._complete_episodes:
            return int(_mask_finished_episodes(buffer).sum() < length * buffer.num_envs)
        if self._is_full_fragment(buffer):
            return 0
        return max(0, length - int(buffer.valid[:, :used].sum(axis=1).min()))

    def _is_full_fragment(self, buffer: _RolloutBuffer) -> bool:
        return (
            not (self._complete_episodes or buffer.has_invalid)
            and buffer.used == self._fragment_length
        )

    def _select_rows(self, buffer: _RolloutBuffer) -> np.ndarray:
        if self._complete_episodes:
            return _mask_finished_episodes(buffer)
        alive = buffer.valid[:, : buffer.used]
        if self._is_full_fragment(buffer):
            return alive
        return alive & (alive.cumsum(axis=1) <= self._fragment_length)

    def _carry_over(self, buffer: _RolloutBuffer, selected: np.ndarray) -> _RolloutBuffer:
        if self._is_full_fragment(buffer):
            return buffer.resize(buffer.used, self._fragment_length)
        buffer.valid[:, : buffer.used] &= ~selected
        remaining = buffer.valid[:, : buffer.used].any(axis=0)
        start = int(remaining.argmax()) if remaining.any() else buffer.used
        return buffer.resize(start, self._fragment_length + buffer.used - start)

    def play(self, duration: EvaluationDuration, seeds: Sequence[int] | None) -> EvaluationResult:
        """Plays whole episodes without returning rows; see `Sampler.play`."""
        policy, tracker = self._get_policy(), self._make_tracker()
        episodes = play_episodes(
            policy, self.envs, duration, seeds=seeds, times=self.times, tracker=tracker
        )
        steps = sum(episode.episode_length for episode in episodes)
        return EvaluationResult(episodes, steps, now() >= duration.deadline)

    # -- from rows to a batch -----------------------------------------------------------------

    def _to_batch(
        self, policy: Policy, buffer: _RolloutBuffer, selected: np.ndarray
    ) -> SampleBatch | MultiAgentBatch:
        used = buffer.used
        is_whole = self._is_full_fragment(buffer)
        shape = (
            (1, int(selected.sum()))
            if self._complete_episodes
            else (buffer.num_envs, self._fragment_length)
        )

        positions = () if is_whole else np.nonzero(selected)

        def select_rows(column: np.ndarray) -> np.ndarray:
            if is_whole:
                return column[:, :used]
            count, width, *rest = column.shape
            env_index, step_index = positions
            # Selecting rows by number is several times faster than by a mask.
            row_numbers = env_index * width + step_index
            rows: np.ndarray = column.reshape((count * width, *rest)).take(row_numbers, axis=0)
            return rows.reshape((*shape, *rest))

        columns = {name: select_rows(column) for name, column in buffer.columns.items()}
        if INFOS in columns:
            columns[INFOS] = columns.pop(INFOS)  # infos are the last column of batches
        previous_returns = self._progress.returns
        ends = columns["terminateds"] | columns["truncateds"]
        columns.update(self._make_episode_columns(columns["rewards"], ends, selected))
        if buffer.life_losses:
            life_ends = select_rows(buffer.make_mask(buffer.life_losses))
            columns.update(self._split_at_life_losses(columns, life_ends))
            ends |= life_ends
        ends[:, -1] = True

        def flatten_rows(column: np.ndarray) -> np.ndarray:
            return column.reshape((-1, *column.shape[2:]))

        rollout_rows = RolloutRows(
            DEFAULT_POLICY_ID,
            policy,
            self._action_ports,
            [flatten_rows(select_rows(leaf)) for leaf in buffer.obs],
            [flatten_rows(select_rows(leaf)) for leaf in buffer.get_next_observations()],
            {name: flatten_rows(column) for name, column in columns.items()},
            flatten_rows(ends),
            shape,
        )

        eps_ids = rollout_rows.columns["eps_id"]

        def get_owners() -> TrajectoryOwners:
            if self._tracker is None:
                env_index = np.nonzero(selected)[0]
                self._batch_episodes = self._update_untracked_episodes(
                    rollout_rows, env_index, previous_returns
                )
            unrolls = [
                (unroll, int(eps_ids[rows.start])) for unroll, rows in rollout_rows.iter_unrolls()
            ]
            episode_ids = dict.fromkeys(episode_id for _, episode_id in unrolls)
            episodes = dict(zip(episode_ids, self._batch_episodes, strict=True))
            return {unroll: (episodes[episode_id], SINGLE_AGENT) for unroll, episode_id in unrolls}

        if not buffer.excluded:
            return self._make_batches([rollout_rows], get_owners, ends.size)[DEFAULT_POLICY_ID]
        excluded = flatten_rows(select_rows(buffer.make_mask(buffer.excluded)))
        remaining = self._postprocessor.exclude(rollout_rows, excluded)
        return MultiAgentBatch(self._make_batches(remaining, get_owners, ends.size), ends.size)

    def _split_at_life_losses(
        self, columns: Mapping[str, np.ndarray], life_ends: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns columns in which trajectories end at lost lives, bool `[N, T]`."""
        num_previous_losses = life_ends.ravel().cumsum().reshape(life_ends.shape) - life_ends
        self._next_unroll_id += int(life_ends.sum())
        return {
            "terminateds": columns["terminateds"] | life_ends,
            "unroll_id": columns["unroll_id"] + num_previous_losses,
        }

    def _update_untracked_episodes(
        self, rollout_rows: RolloutRows, env_index: np.ndarray, previous_returns: np.ndarray
    ) -> list[Episode]:
        """Returns the episode of each unroll, updated by its R rows, if there is no tracker.

        An episode stays the same object while it runs. `env_index` is int `[R]`; `previous_returns`
        has the returns of the running episodes before these rows, by environment.
        """
        result: list[Episode] = []
        episodes, columns = dict(self._untracked_episodes), rollout_rows.columns
        steps, ids, env_rewards = columns["t"], columns["eps_id"], rollout_rows.env_rewards
        for _, rows in rollout_rows.iter_unrolls():
            last, env = rows.stop - 1, int(env_index[rows.start])
            episode_id = int(ids[last])
            episode = episodes.get(episode_id)
            if episode is None:
                episode = episodes[episode_id] = Episode(episode_id, env, self._worker)
                is_continuation = steps[rows.start] > 0
                episode.total_reward = float(previous_returns[env]) if is_continuation else 0.0
            episode.length = int(steps[last]) + 1
            episode.total_reward += float(env_rewards[rows].sum(dtype=np.float64))
            episode.last_infos[SINGLE_AGENT] = columns[INFOS][last]
            last_obs = unflatten(
                self.envs.observation_space, [x[last] for x in rollout_rows.new_obs]
            )
            episode.record_step(
                {SINGLE_AGENT: last_obs}, rewards={SINGLE_AGENT: float(env_rewards[last])}
            )
            if not (result and result[-1] is episode):  # it had rows before a life was lost
                result.append(episode)
        running_ids = set(self._get_running_ids())
        self._untracked_episodes = {id_: x for id_, x in episodes.items() if id_ in running_ids}
        return result

    def _make_episode_columns(
        self, rewards: np.ndarray, done: np.ndarray, selected: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns ids and time steps of rows `[N, T]`; records the episodes that ended in them.

        `done` marks the last step of each episode, `selected` the rows of the buffer.
        """
        count, length = done.shape
        progress = self._progress
        if self._complete_episodes:  # only whole episodes: none is running at the first row
            progress = _EpisodeProgress.start(1, self.rng)
        elif not done.any():
            return self._make_running_columns(rewards, done)
        num_ended = np.zeros((count, length), np.int64)  # episodes that ended before the row
        np.cumsum(done[:, :-1], axis=1, out=num_ended[:, 1:])
        ids = self.rng.integers(10**18, size=(count, int(num_ended.max(initial=0)) + 2))
        ids[:, 0] = progress.episode_ids
        rows = np.arange(count)[:, None]
        index = np.arange(length)
        first_row = np.zeros(
            (count, length), np.int64
        )  # index of the first row of the row's episode
        first_row[:, 1:] = np.where(done[:, :-1], index[1:], 0)
        np.maximum.accumulate(first_row, axis=1, out=first_row)
        t = index - first_row + np.where(num_ended == 0, progress.steps[:, None], 0)
        total = rewards.cumsum(axis=1, dtype=np.float64)
        self._record_ended_episodes(done, t, total, progress, selected)
        if not self._complete_episodes:
            self._progress = _advance_progress(progress, done, ids, t, total)
        num_unrolls = num_ended[:, -1] + 1  # of each row
        unroll_ids = (
            num_ended + (self._next_unroll_id + num_unrolls.cumsum() - num_unrolls)[:, None]
        )
        self._next_unroll_id += int(num_unrolls.sum())
        return {
            "eps_id": ids[rows, num_ended],
            "unroll_id": unroll_ids,
            "agent_index": np.zeros((count, length), np.int64),
            "t": t,
        }

    def _make_running_columns(self, rewards: np.ndarray, done: np.ndarray) -> dict[str, np.ndarray]:
        """Returns `_make_episode_columns` for rows without an episode end, the usual case."""
        shape = count, length = done.shape
        episode_ids, steps, returns = self._progress
        self._pop_ended_episodes(done, _NO_ROWS, _NO_ROWS)
        new_returns = rewards.cumsum(axis=1, dtype=np.float64)[:, -1]
        self._progress = _EpisodeProgress(episode_ids, steps + length, returns + new_returns)
        unroll_ids = np.arange(self._next_unroll_id, self._next_unroll_id + count)
        self._next_unroll_id += count
        return {
            "eps_id": episode_ids.repeat(length).reshape(shape),
            "unroll_id": unroll_ids.repeat(length).reshape(shape),
            "agent_index": np.zeros(shape, np.int64),
            "t": steps[:, None] + np.arange(length),
        }

    def _record_ended_episodes(
        self,
        done: np.ndarray,
        t: np.ndarray,
        total: np.ndarray,
        progress: _EpisodeProgress,
        selected: np.ndarray,
    ) -> None:
        row, column = np.nonzero(done)
        env_index = row
        if self._complete_episodes:  # a single row has all environments' episodes in sequence
            env_index = np.repeat(np.arange(len(selected)), selected.sum(axis=1))[column]
        ended_episodes = self._pop_ended_episodes(done, row, env_index)
        if not len(row):
            return
        sums = total[row, column]
        returns = sums + progress.returns[row]
        not_first = np.flatnonzero(row[1:] == row[:-1]) + 1  # not the first to end in its row
        returns[not_first] = sums[not_first] - sums[not_first - 1]
        lengths = t[row, column] + 1
        values = returns.tolist()
        rewards = [{_AGENT_AND_POLICY: value} for value in values]
        other_fields = repeat(_NO_METRICS), repeat(self.times.means())
        metrics = list(map(RolloutMetrics, lengths.tolist(), values, rewards, *other_fields))
        if connectors := get_connector_metrics(self._get_policy()):
            metrics = [entry._replace(connector_metrics=connectors) for entry in metrics]
        if self._tracker is not None:
            metrics = list(map(add_callback_metrics, metrics, ended_episodes))
        self.metrics += metrics

    def _pop_ended_episodes(
        self, done: np.ndarray, row: np.ndarray, env_index: np.ndarray
    ) -> list[Episode]:
        """Pops the tracked episodes that ended; stores those of all trajectories in the batch.

        `done` is bool `[N, T]`; each of the K ended episodes has its `row` there, and its
        environment, `env_index`.
        """
        tracker = self._tracker
        if tracker is None:
            return []
        ended = [tracker.pop_finished(i) for i in env_index.tolist()]
        self._batch_episodes = []
        for i, is_ended in enumerate(done[:, -1].tolist()):
            self._batch_episodes += [ended[k] for k in np.flatnonzero(row == i)]
            if not is_ended:
                self._batch_episodes.append(tracker.oldest(i))
        return ended

    # -- checkpoints --------------------------------------------------------------------------

    def _has_unsavable_state(self) -> bool:
        buffer = self._buffer
        has_pending = buffer is not None and (
            buffer.has_infos() or buffer.excluded or buffer.life_losses
        )
        return self._tracker is not None or bool(has_pending)

    def _get_running_state(self) -> dict[str, Any] | None:
        buffer = self._buffer
        if buffer is None:
            return None
        used = buffer.used
        return {
            "columns": {k: x[:, :used].copy() for k, x in buffer.columns.items() if k != INFOS},
            "obs": [leaf[:, : used + 1].copy() for leaf in buffer.obs],
            "alive": buffer.valid[:, :used].copy(),
            "finals": [
                (t, i.copy(), [x.copy() for x in final_obs])
                for t, i, final_obs in buffer.final_observations
            ],
            "running": tuple(part.copy() for part in self._progress),
            "next_unroll": self._next_unroll_id,
            "memory": self._get_recurrent_state(self._get_policy()).get_state(),
        }

    def _set_running_state(self, state: Mapping[str, Any]) -> bool:
        used = state["alive"].shape[1]
        self._buffer = _RolloutBuffer(
            self.envs.num_envs, self._fragment_length + used, self._obs_leaves
        )
        self._buffer.fill(state["columns"] if used else {}, state["obs"], state["alive"])
        self._buffer.final_observations = list(state["finals"])
        self._recurrent_state = None
        self._get_recurrent_state(self._get_policy()).set_state(state["memory"])
        self._progress = _EpisodeProgress(*state["running"])
        self._next_unroll_id = state["next_unroll"]
        return True


def _mask_finished_episodes(buffer: _RolloutBuffer) -> np.ndarray:
    """Returns bool `[N, used]`: rows to return whose episode ended within the buffer."""
    used = buffer.used
    done = buffer.columns["terminateds"][:, :used] | buffer.columns["truncateds"][:, :used]
    valid = buffer.valid[:, :used]
    ends_later = np.logical_or.accumulate((done & valid)[:, ::-1], axis=1)[:, ::-1]
    return ends_later & valid


def _advance_progress(
    progress: _EpisodeProgress, done: np.ndarray, ids: np.ndarray, t: np.ndarray, total: np.ndarray
) -> _EpisodeProgress:
    """Returns the progress of the running episodes after a fragment `[N, T]`."""
    count = len(done)
    rows = np.arange(count)
    num_ended = done.sum(axis=1)
    length = done.shape[1]
    last_end = length - 1 - done[:, ::-1].argmax(axis=1)
    sums = np.where(
        num_ended > 0, total[:, -1] - total[rows, last_end], progress.returns + total[:, -1]
    )
    steps = np.where(done[:, -1], 0, t[:, -1] + 1)
    return _EpisodeProgress(ids[rows, num_ended], steps, sums)
