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
from tfpolicies.config.callbacks import follows_episodes
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.envs.vector import Environments
from tfpolicies.errors import UsageError
from tfpolicies.models.ports import leaf_ports
from tfpolicies.models.spaces import Leaf, action_leaves, batch_leaves, leaves, nest
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.recurrent_state import RecurrentState
from tfpolicies.rollout.batches import Who
from tfpolicies.rollout.collected import Collected, require_same_columns
from tfpolicies.rollout.connected import connected, connector_metrics_of
from tfpolicies.rollout.episode import (
    SINGLE_AGENT,
    Episode,
    EpisodeFollower,
    RolloutMetrics,
    barred_in,
    last_info_of,
    with_notes,
)
from tfpolicies.rollout.evaluation import play_episodes
from tfpolicies.rollout.fitting_spaces import require_fitting_spaces
from tfpolicies.rollout.policy_connection import has_others, pipelines_of
from tfpolicies.rollout.sampler import LONG, Goal, Played, Sampler, warn_long_episode
from tfpolicies.rollout.timing import now

_OF_ENV = ("rewards", "terminateds", "truncateds")
_FINAL = "the environment's final observation"
_AGENT_AND_POLICY = (SINGLE_AGENT, DEFAULT_POLICY_ID)
_NO_METRICS: Mapping[str, float] = {}
_NONE = np.zeros(0, np.int64)


class _Buffer:
    """The rows of N environments that were not returned yet, up to W steps.

    Attributes:
        used: steps written.
        obs: per leaf `[N, W + 1, ...]`: row t is acted on, row t + 1 is the next observation.
        columns: `[N, W, ...]` by name; includes `infos` if a policy or callback reads them.
        valid: bool `[N, W]`: False for rows that are not transitions or were already returned.
        has_invalid: whether it is False for a written row.
        final_observations: last observations of episodes that the environment reset in the same step:
            (t, environment indices, leaves).
        excluded: (t, environment index) of steps whose info excludes the trajectory that ends there
            from learning.
        life_losses: (t, environment index) of steps in which a life was lost, which ends an episode for
            learning.
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
        self.alive = np.ones((num_envs, width), bool)
        self.has_dead = False
        self.finals: list[tuple[int, np.ndarray, list[np.ndarray]]] = []
        self.barred: list[tuple[int, int]] = []
        self.lost: list[tuple[int, int]] = []

    def keep_infos(self) -> None:
        """Adds the column of infos; rows written so far get empty ones."""
        if INFOS not in self.columns:
            infos = self.columns[INFOS] = np.empty((self.num_envs, self.width), object)
            infos[:, : self.used] = [[{} for _ in range(self.used)]] * self.num_envs

    def has_infos(self) -> bool:
        """Returns whether a row that was not returned yet has a non-empty info."""
        infos = self.columns.get(INFOS)
        return infos is not None and any(infos[:, : self.used][self.alive[:, : self.used]])

    def marked(self, steps: Sequence[tuple[int, int]]) -> np.ndarray:
        """Returns a mask of steps `(t, environment index)`, bool `[N, W]`."""
        found = np.zeros(self.alive.shape, bool)
        for t, index in steps:
            found[index, t] = True
        return found

    def begin(self, obs: list[np.ndarray]) -> None:
        """Writes the observations for the first actions."""
        for buffer, leaf in zip(self.obs, obs, strict=True):
            buffer[:, 0] = leaf

    def places(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns views `[W, N, ...]` to write observations, and rewards and both end flags.

        Writing a row of a view takes half as long as writing a column.
        """
        of_env = [self.columns[name].swapaxes(0, 1) for name in _OF_ENV]
        return [leaf.swapaxes(0, 1) for leaf in self.obs], of_env

    def places_of(
        self, policy: Policy, columns: Mapping[str, np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns a view `[W, N, ...]` for each output of acting, with the output `[N, ...]`.

        Raises:
            UsageError: if acting returned other columns before.
        """
        acted = self.columns.keys() - _OF_ENV - {INFOS}
        if not (acted or self.used):
            for name, array in columns.items():
                shape = (self.num_envs, self.width, *array.shape[1:])
                self.columns[name] = np.empty(shape, array.dtype)
        elif acted != columns.keys():
            require_same_columns(policy, acted, columns)
        return [(self.columns[name].swapaxes(0, 1), x) for name, x in columns.items()]

    def moved(self, start: int, width: int) -> _Buffer:
        """Returns a buffer of another width with the rows from step `start`."""
        new = _Buffer(self.num_envs, width, self.obs_leaves)
        new.fill(
            {name: column[:, start : self.used] for name, column in self.columns.items()},
            [leaf[:, start : self.used + 1] for leaf in self.obs],
            self.alive[:, start : self.used],
        )
        new.finals = [(t - start, i, x) for t, i, x in self.finals if t >= start]
        new.barred = [(t - start, i) for t, i in self.barred if t >= start]
        new.lost = [(t - start, i) for t, i in self.lost if t >= start]
        return new

    def fill(
        self, columns: Mapping[str, np.ndarray], obs: Sequence[np.ndarray], alive: np.ndarray
    ) -> None:
        """Writes the first steps: columns `[N, t, ...]`, and observations `[N, t + 1, ...]`."""
        used = self.used = alive.shape[1]
        for name, column in columns.items():
            if name not in self.columns:
                shape = (self.num_envs, self.width, *column.shape[2:])
                self.columns[name] = np.empty(shape, column.dtype)
            self.columns[name][:, :used] = column
        for leaf, given in zip(self.obs, obs, strict=True):
            leaf[:, : used + 1] = given
        self.alive[:, :used] = alive
        self.has_dead = not alive.all()

    def reached(self) -> list[np.ndarray]:
        """Returns the next observation of each step, `[N, used, ...]` per leaf, as copies.

        They must not share memory with `obs`: writing into one column of a batch would change the
        other, and the observation for the next action.
        """
        leaves_reached = [leaf[:, 1 : self.used + 1].copy() for leaf in self.obs]
        for t, indices, last in self.finals:
            for leaf, rows in zip(leaves_reached, last, strict=True):
                leaf[indices, t] = rows
        return leaves_reached


class _Running(NamedTuple):
    """The id, steps and return of each environment's unfinished episode, `[N]` each."""

    ids: np.ndarray  # int64
    steps: np.ndarray  # int64, in batches so far
    returns: np.ndarray  # float64, in batches so far

    @classmethod
    def start(cls, num_envs: int, rng: np.random.Generator) -> _Running:
        """Returns the progress of new episodes."""
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

    envs: Environments
    _environments: Environments

    def __init__(self, envs: Environments, policies: Mapping[str, Any], **settings: Any) -> None:
        super().__init__(envs, policies, **settings)
        self._follower: EpisodeFollower | None = None
        self._running_episodes: dict[int, Episode] = {}  # by id, if no tracker has them
        self._episodes_taken: list[Episode] = []  # one per trajectory of the current batch
        self._buffer: _Buffer | None = None
        self._memory: RecurrentState | None = None
        self._running = _Running.start(envs.num_envs, self.rng)
        self._next_unroll = 0
        self._connect(self._policy())

    def _running_ids(self) -> list[int]:
        ids: list[int] = self._running.ids.tolist()
        return ids

    def _policy(self) -> Any:
        return self.policies.get(DEFAULT_POLICY_ID)

    def _connect(self, policy: Policy) -> None:
        self._pipelines = pipelines_of(policy)
        self.envs = connected(self._environments, policy)
        spaces = self.envs.observation_space, self.envs.action_space
        require_fitting_spaces(DEFAULT_POLICY_ID, policy, "the environment", *spaces)
        self._leaves = leaves(self.envs.observation_space)
        self._actions = leaf_ports("actions", action_leaves(self.envs.action_space))

    def reset(self, seeds: Sequence[int] | None) -> None:
        """Starts new episodes in all environments; drops rows that were not returned yet."""
        obs = self.envs.reset(seeds)
        self._buffer = _Buffer(self.envs.num_envs, self._length, self._leaves)
        self._buffer.begin(batch_leaves(self._leaves, obs, "the environment's observation"))
        self._running = _Running.start(self.envs.num_envs, self.rng)
        self._memory = None
        self._running_episodes = {}
        self._follower = self._follower or self._new_follower()
        if self._follower is not None:
            self._follower.start_all(obs)

    def _wants_episodes(self, policy: Policy) -> bool:
        """Returns whether the policy or a callback reads single episodes step by step."""
        return policy.driver.acting.reads_episodes or follows_episodes(self._callbacks)

    def _new_follower(self) -> EpisodeFollower | None:
        if not self._wants_episodes(self._policy()):
            return None
        return EpisodeFollower(self._tell, self._worker, self.envs.num_envs, self.rng)

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Returns the next postprocessed batch.

        Rows are ordered by environment and time; with `truncate_episodes` each environment has
        exactly `fragment_length` of them. If the last info of a trajectory has a false
        `training_enabled`, its rows are excluded: the result is a `MultiAgentBatch` that still
        counts their steps.
        """
        if self._buffer is None:
            raise UsageError("sample() needs running episodes; call reset() first.")
        policy = self._policy()
        self._require_fitting_exploration(policy)
        is_outdated = has_others(policy, self._pipelines)
        if is_outdated:
            self._connect(policy)
        if is_outdated or (self._follower is None and self._wants_episodes(policy)):
            self.reset(None)
        if self._reads_infos(policy):
            self._buffer.keep_infos()
        buffer = self._collect(policy, self._buffer)
        taken = self._rows_to_hand_out(buffer)
        batch = self._to_batch(policy, buffer, taken)
        self._buffer = self._carry_over(buffer, taken)
        return batch

    # -- the loop -----------------------------------------------------------------------------

    def _collect(self, policy: Policy, buffer: _Buffer) -> _Buffer:
        memory = self._memory_of(policy)
        follows = policy.driver.acting.resets_per_episode
        minds_ends = memory.is_needed or follows
        act = memory.act if memory.is_needed else policy.driver.acting.act
        envs, follower, space_leaves = self.envs, self._follower, self._leaves
        obs = [leaf[:, buffer.used] for leaf in buffer.obs]
        first, connecting, inference, waited, started = buffer.used, envs.connecting, 0, 0, now()
        while missing := self._missing_steps(buffer):
            if buffer.used == buffer.width:
                self._report_long_episodes(buffer)
                buffer = buffer.moved(0, 2 * buffer.width)
            seen, (rewards, terminateds, truncateds) = buffer.places()
            alive, infos = buffer.alive.swapaxes(0, 1), buffer.columns.get(INFOS)
            known, kept = None, []
            steps = range(buffer.used, min(buffer.used + missing, buffer.width))
            with policy.driver.acting.prefetch_noise(len(steps) * envs.num_envs):
                for t in steps:
                    asked = now()
                    env_actions, columns = act(obs)
                    answered = now()
                    step = envs.step(env_actions)
                    waited += now() - answered
                    inference += answered - asked
                    if columns is not known:
                        known, kept = columns, buffer.places_of(policy, columns)
                    for place, column in kept:
                        place[t] = column
                    rewards[t] = step.rewards
                    terminateds[t] = step.terminateds
                    truncateds[t] = step.truncateds
                    obs = batch_leaves(space_leaves, step.obs, "the environment's observation")
                    for place, leaf in zip(seen, obs, strict=True):
                        place[t + 1] = leaf
                    if minds_ends:
                        ended = step.terminateds | step.truncateds
                        memory.stepped(step.rewards, ended, step.dead)
                        if follows and ended.any():
                            policy.driver.acting.start_episode()
                    if step.dead is not None:
                        np.logical_not(step.dead, alive[t])
                        buffer.has_dead = True
                    if step.final is not None:
                        last = batch_leaves(space_leaves, step.final[1], _FINAL)
                        buffer.finals.append((t, step.final[0], last))
                    if step.lost is not None:
                        buffer.lost += [(t, i) for i in np.flatnonzero(step.lost).tolist()]
                    if step.broken is not None:
                        self._drop_episodes(buffer, step.broken, t)
                    if step.infos and any(step.infos):
                        buffer.barred += [(t, i) for i in barred_in(step.infos, envs.num_envs)]
                    if infos is not None:
                        for i in range(buffer.num_envs):
                            infos[i, t] = dict(last_info_of(step.infos, i))
                    if follower is not None:
                        follower.step(step, env_actions, columns)
                    buffer.used = t + 1
        others = now() - started - inference - waited
        before, after = envs.connecting[0] - connecting[0], envs.connecting[1] - connecting[1]
        waited -= before + after
        self.times.add(buffer.used - first, others + after, inference, before, waited)
        return buffer

    def _report_long_episodes(self, buffer: _Buffer) -> None:
        """Warns about episodes that delay a batch of whole episodes, at doubling lengths."""
        used = buffer.used
        if used < LONG:
            return
        done = buffer.columns["terminateds"][:, :used] | buffer.columns["truncateds"][:, :used]
        steps = np.where(done.any(axis=1), done[:, ::-1].argmax(axis=1), used)
        longest = int(steps.argmax())
        if steps[longest] >= LONG:
            warn_long_episode(longest, int(steps[longest]))

    def _memory_of(self, policy: Policy) -> RecurrentState:
        if self._memory is None or self._memory.policy is not policy:
            self._memory = RecurrentState(policy, self.envs.num_envs)
            if policy.driver.acting.reads_episodes and self._follower is not None:
                self._memory.around = self._follower.around
        return self._memory

    def _drop_episodes(self, buffer: _Buffer, broken: Mapping[int, Exception], t: int) -> None:
        """Drops the rows of episodes whose environments failed in step `t`, and reports them."""
        done = buffer.columns["terminateds"][:, :t] | buffer.columns["truncateds"][:, :t]
        for i, error in broken.items():
            ends = np.flatnonzero(done[i] & buffer.alive[i, :t])
            buffer.alive[i, ends[-1] + 1 if len(ends) else 0 : t + 1] = False
            buffer.has_dead = True
            if not len(ends):  # its first rows were returned before
                for running, new in zip(self._running, _Running.start(1, self.rng), strict=True):
                    running[i] = new[0]
            self.metrics.append(RolloutMetrics(episode_faulty=True))
            if self._follower is not None:
                self._follower.broke(i, error)

    def _missing_steps(self, buffer: _Buffer) -> int:
        """Returns the minimum number of steps that a batch still needs; 0 for none."""
        used, length = buffer.used, self._length
        if used < length:
            return length - used
        if self._complete:
            return int(_of_finished_episodes(buffer).sum() < length * buffer.num_envs)
        if self._is_whole(buffer):
            return 0
        return max(0, length - int(buffer.alive[:, :used].sum(axis=1).min()))

    def _is_whole(self, buffer: _Buffer) -> bool:
        """Returns whether a buffer is exactly one fragment of each environment."""
        return not (self._complete or buffer.has_dead) and buffer.used == self._length

    def _rows_to_hand_out(self, buffer: _Buffer) -> np.ndarray:
        if self._complete:
            return _of_finished_episodes(buffer)
        alive = buffer.alive[:, : buffer.used]
        if self._is_whole(buffer):
            return alive
        return alive & (alive.cumsum(axis=1) <= self._length)

    def _carry_over(self, buffer: _Buffer, taken: np.ndarray) -> _Buffer:
        if self._is_whole(buffer):
            return buffer.moved(buffer.used, self._length)
        buffer.alive[:, : buffer.used] &= ~taken
        left = buffer.alive[:, : buffer.used].any(axis=0)
        start = int(left.argmax()) if left.any() else buffer.used
        return buffer.moved(start, self._length + buffer.used - start)

    def play(self, goal: Goal, seeds: Sequence[int] | None) -> Played:
        """Plays whole episodes without returning rows; see `Sampler.play`."""
        policy, follower = self._policy(), self._new_follower()
        episodes = play_episodes(
            policy, self.envs, goal, seeds=seeds, times=self.times, follower=follower
        )
        steps = sum(episode.episode_length for episode in episodes)
        return Played(episodes, steps, now() >= goal.limit)

    # -- from rows to a batch -----------------------------------------------------------------

    def _to_batch(
        self, policy: Policy, buffer: _Buffer, taken: np.ndarray
    ) -> SampleBatch | MultiAgentBatch:
        used = buffer.used
        is_whole = self._is_whole(buffer)
        shape = (1, int(taken.sum())) if self._complete else (buffer.num_envs, self._length)

        places = () if is_whole else np.nonzero(taken)

        def cut(column: np.ndarray) -> np.ndarray:
            if is_whole:
                return column[:, :used]
            count, width, *rest = column.shape
            env_index, step_index = places
            # Selecting rows by number is several times faster than by a mask.
            numbers = env_index * width + step_index
            rows: np.ndarray = column.reshape((count * width, *rest)).take(numbers, axis=0)
            return rows.reshape((*shape, *rest))

        columns = {name: cut(column) for name, column in buffer.columns.items()}
        if INFOS in columns:
            columns[INFOS] = columns.pop(INFOS)  # infos are the last column of batches
        returns_before = self._running.returns
        ends = columns["terminateds"] | columns["truncateds"]
        columns.update(self._episode_columns(columns["rewards"], ends, taken))
        if buffer.lost:
            cuts = cut(buffer.marked(buffer.lost))
            columns.update(self._cut_at(columns, cuts))
            ends |= cuts
        ends[:, -1] = True

        def flat(column: np.ndarray) -> np.ndarray:
            return column.reshape((-1, *column.shape[2:]))

        collected = Collected(
            DEFAULT_POLICY_ID,
            policy,
            self._actions,
            [flat(cut(leaf)) for leaf in buffer.obs],
            [flat(cut(leaf)) for leaf in buffer.reached()],
            {name: flat(column) for name, column in columns.items()},
            flat(ends),
            shape,
        )

        ids = collected.columns["eps_id"]

        def who() -> Who:
            if self._follower is None:
                env_index = np.nonzero(taken)[0]
                self._episodes_taken = self._episodes_of(collected, env_index, returns_before)
            pieces = [(unroll, int(ids[rows.start])) for unroll, rows in collected.pieces()]
            numbers = dict.fromkeys(number for _, number in pieces)
            episodes = dict(zip(numbers, self._episodes_taken, strict=True))
            return {unroll: (episodes[number], SINGLE_AGENT) for unroll, number in pieces}

        if not buffer.barred:
            return self._postprocessor.batches([collected], who)[DEFAULT_POLICY_ID]
        barred = flat(cut(buffer.marked(buffer.barred)))
        kept = self._postprocessor.leave_out(collected, barred)
        return MultiAgentBatch(self._postprocessor.batches(kept, who), ends.size)

    def _cut_at(self, columns: Mapping[str, np.ndarray], lost: np.ndarray) -> dict[str, np.ndarray]:
        """Returns columns in which trajectories end at lost lives, bool `[N, T]`."""
        before = lost.ravel().cumsum().reshape(lost.shape) - lost
        self._next_unroll += int(lost.sum())
        return {
            "terminateds": columns["terminateds"] | lost,
            "unroll_id": columns["unroll_id"] + before,
        }

    def _episodes_of(
        self, collected: Collected, env_index: np.ndarray, returns_before: np.ndarray
    ) -> list[Episode]:
        """Returns the episode of each unroll, updated by its R rows, if there is no tracker.

        An episode stays the same object while it runs. `env_index` is int `[R]`; `previous_returns`
        has the returns of the running episodes before these rows, by environment.
        """
        found: list[Episode] = []
        known, columns = dict(self._running_episodes), collected.columns
        steps, ids, earned = columns["t"], columns["eps_id"], collected.earned
        for _, rows in collected.pieces():
            last, index = rows.stop - 1, int(env_index[rows.start])
            number = int(ids[last])
            episode = known.get(number)
            if episode is None:
                episode = known[number] = Episode(number, index, self._worker)
                goes_on = steps[rows.start] > 0
                episode.total_reward = float(returns_before[index]) if goes_on else 0.0
            episode.length = int(steps[last]) + 1
            episode.total_reward += float(earned[rows].sum(dtype=np.float64))
            episode.last_infos[SINGLE_AGENT] = columns[INFOS][last]
            reached = nest(self.envs.observation_space, [x[last] for x in collected.new_obs])
            episode.note({SINGLE_AGENT: reached}, rewards={SINGLE_AGENT: float(earned[last])})
            if not (found and found[-1] is episode):  # it had rows before a life was lost
                found.append(episode)
        running = set(self._running_ids())
        self._running_episodes = {id_: x for id_, x in known.items() if id_ in running}
        return found

    def _episode_columns(
        self, rewards: np.ndarray, done: np.ndarray, taken: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns ids and time steps of rows `[N, T]`; records the episodes that ended in them.

        `done` marks the last step of each episode, `selected` the rows of the buffer.
        """
        count, length = done.shape
        running = self._running
        if self._complete:  # only whole episodes: none is running at the first row
            running = _Running.start(1, self.rng)
        elif not done.any():
            return self._running_columns(rewards, done)
        before = np.zeros((count, length), np.int64)  # episodes that ended before the row
        np.cumsum(done[:, :-1], axis=1, out=before[:, 1:])
        ids = self.rng.integers(10**18, size=(count, int(before.max(initial=0)) + 2))
        ids[:, 0] = running.ids
        rows = np.arange(count)[:, None]
        index = np.arange(length)
        first = np.zeros((count, length), np.int64)  # index of the first row of the row's episode
        first[:, 1:] = np.where(done[:, :-1], index[1:], 0)
        np.maximum.accumulate(first, axis=1, out=first)
        t = index - first + np.where(before == 0, running.steps[:, None], 0)
        total = rewards.cumsum(axis=1, dtype=np.float64)
        self._book_episodes(done, t, total, running, taken)
        if not self._complete:
            self._running = _after(running, done, ids, t, total)
        pieces = before[:, -1] + 1  # of each row
        unroll_ids = before + (self._next_unroll + pieces.cumsum() - pieces)[:, None]
        self._next_unroll += int(pieces.sum())
        return {
            "eps_id": ids[rows, before],
            "unroll_id": unroll_ids,
            "agent_index": np.zeros((count, length), np.int64),
            "t": t,
        }

    def _running_columns(self, rewards: np.ndarray, done: np.ndarray) -> dict[str, np.ndarray]:
        """Returns `_episode_columns` for rows without an episode end, the usual short fragment."""
        shape = count, length = done.shape
        ids, steps, returns = self._running
        self._take_episodes(done, _NONE, _NONE)
        earned = rewards.cumsum(axis=1, dtype=np.float64)[:, -1]
        self._running = _Running(ids, steps + length, returns + earned)
        unrolls = np.arange(self._next_unroll, self._next_unroll + count)
        self._next_unroll += count
        return {
            "eps_id": ids.repeat(length).reshape(shape),
            "unroll_id": unrolls.repeat(length).reshape(shape),
            "agent_index": np.zeros(shape, np.int64),
            "t": steps[:, None] + np.arange(length),
        }

    def _book_episodes(
        self,
        done: np.ndarray,
        t: np.ndarray,
        total: np.ndarray,
        running: _Running,
        taken: np.ndarray,
    ) -> None:
        row, column = np.nonzero(done)
        place = row
        if self._complete:  # a single row has all environments' episodes in sequence
            place = np.repeat(np.arange(len(taken)), taken.sum(axis=1))[column]
        ended = self._take_episodes(done, row, place)
        if not len(row):
            return
        sums = total[row, column]
        returns = sums + running.returns[row]
        same = np.flatnonzero(row[1:] == row[:-1]) + 1  # not the first to end in its row
        returns[same] = sums[same] - sums[same - 1]
        lengths = t[row, column] + 1
        values = returns.tolist()
        rewards = [{_AGENT_AND_POLICY: value} for value in values]
        rest = repeat(_NO_METRICS), repeat(self.times.means())
        metrics = list(map(RolloutMetrics, lengths.tolist(), values, rewards, *rest))
        if connectors := connector_metrics_of(self._policy()):
            metrics = [each._replace(connector_metrics=connectors) for each in metrics]
        if self._follower is not None:
            metrics = list(map(with_notes, metrics, ended))
        self.metrics += metrics

    def _take_episodes(self, done: np.ndarray, row: np.ndarray, place: np.ndarray) -> list[Episode]:
        """Pops the tracked episodes that ended; stores those of all trajectories in the batch.

        `done` is bool `[N, T]`; each of the K ended episodes has its `row` there, and its
        environment, `env_index`.
        """
        follower = self._follower
        if follower is None:
            return []
        ended = [follower.take_finished(i) for i in place.tolist()]
        self._episodes_taken = []
        for i, last in enumerate(done[:, -1].tolist()):
            self._episodes_taken += [ended[k] for k in np.flatnonzero(row == i)]
            if not last:
                self._episodes_taken.append(follower.oldest(i))
        return ended

    # -- checkpoints --------------------------------------------------------------------------

    def _keeps_anything(self) -> bool:
        buffer = self._buffer
        waits = buffer is not None and (buffer.has_infos() or buffer.barred or buffer.lost)
        return self._follower is not None or bool(waits)

    def _get_running(self) -> dict[str, Any] | None:
        buffer = self._buffer
        if buffer is None:
            return None
        used = buffer.used
        return {
            "columns": {k: x[:, :used].copy() for k, x in buffer.columns.items() if k != INFOS},
            "obs": [leaf[:, : used + 1].copy() for leaf in buffer.obs],
            "alive": buffer.alive[:, :used].copy(),
            "finals": [(t, i.copy(), [x.copy() for x in last]) for t, i, last in buffer.finals],
            "running": tuple(part.copy() for part in self._running),
            "next_unroll": self._next_unroll,
            "memory": self._memory_of(self._policy()).get_state(),
        }

    def _set_running(self, state: Mapping[str, Any]) -> bool:
        used = state["alive"].shape[1]
        self._buffer = _Buffer(self.envs.num_envs, self._length + used, self._leaves)
        self._buffer.fill(state["columns"] if used else {}, state["obs"], state["alive"])
        self._buffer.finals = list(state["finals"])
        self._memory = None
        self._memory_of(self._policy()).set_state(state["memory"])
        self._running = _Running(*state["running"])
        self._next_unroll = state["next_unroll"]
        return True


def _of_finished_episodes(buffer: _Buffer) -> np.ndarray:
    """Returns bool `[N, used]`: rows to return whose episode ended within the buffer."""
    used = buffer.used
    done = buffer.columns["terminateds"][:, :used] | buffer.columns["truncateds"][:, :used]
    alive = buffer.alive[:, :used]
    ended_later = np.logical_or.accumulate((done & alive)[:, ::-1], axis=1)[:, ::-1]
    return ended_later & alive


def _after(
    running: _Running, done: np.ndarray, ids: np.ndarray, t: np.ndarray, total: np.ndarray
) -> _Running:
    """Returns the progress of the running episodes after a fragment `[N, T]`."""
    count = len(done)
    rows = np.arange(count)
    ended = done.sum(axis=1)
    length = done.shape[1]
    last_end = length - 1 - done[:, ::-1].argmax(axis=1)
    sums = np.where(ended > 0, total[:, -1] - total[rows, last_end], running.returns + total[:, -1])
    steps = np.where(done[:, -1], 0, t[:, -1] + 1)
    return _Running(ids[rows, ended], steps, sums)
