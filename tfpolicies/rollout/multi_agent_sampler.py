"""Samples many agents in copies of a multi-agent environment, with any number of policies.

All sub-environments step together. In each step their agents are grouped by policy, and each
policy acts once for all its agents. Transitions are stored in time order, and sorted by trajectory
when a batch is full; see `multi_agent_ledger.py`. The connectors of policies are applied between
environments and policies; see `multi_agent_connectors.py` for the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.batch.sample_batch import MultiAgentBatch
from tfpolicies.config.callbacks import follows_episodes, overrides
from tfpolicies.envs.multi_agent_env import ALL, MultiAgentStep
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.envs.repairs import BREAKS, check_reward
from tfpolicies.envs.vector import single_rows
from tfpolicies.errors import ConfigError, EnvError, SpaceError, UnknownPolicyError, UsageError
from tfpolicies.policy.policy import Policy
from tfpolicies.policy_map.stacked_acting import ColumnsCall, act_columns
from tfpolicies.rollout import multi_agent_state
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.fitting_spaces import AgentSpaces
from tfpolicies.rollout.metrics import metrics_state, restored_metrics
from tfpolicies.rollout.multi_agent_connectors import (
    Connections,
    check_observations,
    explain_observations,
)
from tfpolicies.rollout.multi_agent_episode import Copy, MultiAgentEpisode
from tfpolicies.rollout.multi_agent_ledger import Ledger, not_numbers
from tfpolicies.rollout.multi_agent_rows import PolicyRows
from tfpolicies.rollout.policy_connection import pipelines_of
from tfpolicies.rollout.sampler import LONG, Goal, Played, Sampler, warn_long_episode
from tfpolicies.rollout.timing import now
from tfpolicies.rollout.worker_policies import WorkerPolicies
from tfpolicies.type_aliases import Structure

_NOTHING: Mapping[str, Any] = {}


class _Finished(NamedTuple):
    """A finished episode that was not returned yet; it is reported together with its rows."""

    episode_id: int
    env_steps: int
    agent_steps: int
    metrics: list[RolloutMetrics]


class MultiAgentSampler(Sampler):
    """Samples batches of many policies from N copies of a multi-agent environment.

    Args:
        envs: the sub-environments.
        policies: by id. If a policy is removed, running episodes in which it acted are dropped.
        worker_policies: their `policy_mapping_fn(agent_id, episode, worker=..., **kwargs)` returns
            the id of the policy that acts for an agent. It is called once for each agent and
            episode, at the agent's first observation. If it is replaced, running episodes keep the
            previous function.
        count_agent_steps: count the steps of agents (transitions), not those of environments.
        observation_fn: `f(agent_obs=..., worker=..., base_env=..., policies=..., episode=...)`,
            returns the observations for the policies; called with each dict of observations, before
            connectors.
        settings: see `Sampler`.

    Attributes:
        worker_policies: the policies with their mapping function.
        metrics: whole episodes are reported with the batch that they are in.
    """

    envs: MultiAgentEnvironments

    def __init__(
        self,
        envs: MultiAgentEnvironments,
        policies: Mapping[str, Any],
        worker_policies: WorkerPolicies,
        *,
        count_agent_steps: bool = False,
        observation_fn: Callable[..., Mapping[Any, Any]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(envs, policies, **settings)
        self.worker_policies = worker_policies
        self._agent_steps_ended = 0  # of all episodes that ended since `play` was called
        self._waited = 0  # time of environments in the current step, ns
        self._connecting = 0  # time of action connectors in the current step, ns
        self._by_agent_steps = count_agent_steps
        self._observation_fn = observation_fn
        self._calls_steps = overrides(self._callbacks, "on_episode_step")
        self._notes = follows_episodes(self._callbacks)  # record observations, actions, rewards
        self._copies: list[Copy] = []
        self._spaces = AgentSpaces(observed=observation_fn is None)
        self._broken: dict[int, Exception] = {}  # by sub-environment, in the current step
        self._own_code_ran = True  # the user's code, which may have removed policies
        self._new_ledger()

    # -- episodes -----------------------------------------------------------------------------

    def _running_ids(self) -> list[int]:
        return [copy.episode.episode_id for copy in self._copies]

    @property
    def running_episodes(self) -> list[MultiAgentEpisode]:
        """The running episodes."""
        return [copy.episode for copy in self._copies]

    def reset(self, seeds: Sequence[int] | None) -> None:
        """Starts new episodes in all sub-environments; drops rows that were not returned yet."""
        count = self.envs.num_envs
        self._new_ledger()
        self._env_steps = np.zeros(count, np.int64)  # of the running fragments
        self._agent_steps = np.zeros(count, np.int64)
        self._episode_agent_steps = np.zeros(count, np.int64)
        self._finished: list[_Finished] = []  # only with whole episodes
        self._copies = [Copy(i, self._ledger.seats, self._rows_of) for i in range(count)]
        for copy in self._copies:
            self._begin_episode(copy, None if seeds is None else seeds[copy.index])
        self._connections.begin(self._copies)

    def _new_ledger(self) -> Ledger:
        self._ledger = Ledger(self.envs.num_envs)
        known = self._observation_fn is None
        self._connections = Connections(self.envs, self._ledger, space_is_known=known)
        return self._ledger

    def _rows_of(self, policy_id: str) -> PolicyRows:
        found = self._ledger.rows.get(policy_id)
        if found is None:
            policy = self.policies[policy_id]
            self._require_fitting_exploration(policy, f" of policy {policy_id!r}")
            found = self._ledger.rows[policy_id] = PolicyRows(policy_id, policy)
            self._keep_infos_for(policy)
            self._connections.connect(found)
        return found

    def _keep_infos_for(self, policy: Policy) -> None:
        if self._reads_infos(policy):
            self._ledger.keep_infos()

    def _begin_episode(
        self, copy: Copy, seed: int | None = None, *, in_new_copy: bool = False
    ) -> None:
        episode, index = self._new_episode(copy.index, int(self.rng.integers(10**18))), copy.index
        self._call("on_episode_created", episode, index)
        started = now()
        obs, infos = self.envs.renew(index) if in_new_copy else self.envs.reset(index, seed)
        self._waited += now() - started
        obs = self._seen(obs, episode)
        while error := self._wrong(obs, episode):
            self.envs.repairs.broke(index, "reset", error)
            obs, infos = self.envs.renew(index)
            obs = self._seen(obs, episode)
        copy.begin(episode)
        episode.last_infos.update(infos)
        if self._notes:
            episode.note(obs)
        self._episode_agent_steps[index] = 0
        copy.wait(copy.cast(tuple(obs)), obs)
        self._call("on_episode_start", episode, index)

    def _wrong(self, obs: Mapping[Any, Any], episode: MultiAgentEpisode) -> EnvError | None:
        """Checks first observations if failing environments are replaced; returns the error."""
        if self.envs.repairs.make is None:
            return None  # `PolicyRows.write` checks them later
        try:
            check_observations(obs, episode, self.envs.repairs.call(episode.env_index, "reset"))
        except EnvError as error:
            return error
        return None

    def _new_episode(self, index: int, episode_id: int) -> MultiAgentEpisode:
        return MultiAgentEpisode(
            episode_id,
            index,
            self._worker,
            mapping_fn=self.worker_policies.policy_mapping_fn,
            worker_policies=self.worker_policies,
            policies=self.policies,
            seats=self._ledger.seats,
            admit=self._admit,
        )

    def _admit(self, episode: MultiAgentEpisode, agent: Hashable, policy_id: str) -> None:
        env = self.envs.envs[episode.env_index]
        self._spaces.check(env, agent, policy_id, self._present(policy_id))

    def _seen(self, obs: Mapping[Any, Any], episode: MultiAgentEpisode) -> Mapping[Any, Any]:
        if self._observation_fn is None:
            return obs
        found = self._observation_fn(
            agent_obs=obs,
            worker=self._worker,
            base_env=self.envs,
            policies=self.policies,
            episode=episode,
        )
        if not isinstance(found, Mapping):
            raise UsageError(
                "observation_fn must return a dict of observations by agent id, got "
                f"{type(found).__name__}; return `agent_obs` to leave observations unchanged."
            )
        return found

    def _call(self, moment: str, episode: MultiAgentEpisode, env_index: int) -> None:
        self._own_code_ran |= overrides(self._callbacks, moment)
        self._tell(moment, episode, env_index)

    def _end_episode(self, copy: Copy) -> None:
        episode, index = copy.episode, copy.index
        agent_steps = int(self._episode_agent_steps[index])
        if not agent_steps:
            raise EnvError(
                f"An episode of environment {index} ended after {episode.length} steps without a "
                "single transition of an agent. Give observations to agents that can act on them."
            )
        self._agent_steps_ended += agent_steps
        episode.close()
        self.envs.repairs.worked(index)
        self._call("on_episode_end", episode, index)
        metrics = self._metrics_of(episode)
        if self._complete:
            done = _Finished(episode.episode_id, episode.length, agent_steps, [metrics])
            self._finished.append(done)
        else:
            self.metrics.append(metrics)
        for policy_id in {episode.policy_for(agent) for agent in episode.seat_of}:
            policy = self._present(policy_id)
            if policy is not None and policy.driver.acting.resets_per_episode:
                policy.driver.acting.start_episode()

    def _metrics_of(self, episode: MultiAgentEpisode) -> RolloutMetrics:
        return episode.metrics(self.times.means(), self._connections.metrics(episode))

    def _follow_policies(self) -> None:
        """Drops policies that were removed or replaced since the last step, and their episodes.

        Policies with new connectors count as replaced. Rows of finished episodes are dropped also.
        """
        self._own_code_ran = False
        ledger = self._ledger
        outdated = self._connections.is_outdated
        gone = [
            policy_id
            for policy_id, rows in ledger.rows.items()
            if self._present(policy_id) is not rows.policy or outdated(rows)
        ]
        if not gone:
            return
        dropped = [copy for copy in self._copies if copy.is_played_by(gone)]
        for copy in dropped:
            self._drop_episode(copy)
        for policy_id in gone:
            self._connections.disconnect(ledger.rows.pop(policy_id))
        for copy in dropped:
            self._begin_episode(copy)
        self._connections.begin(dropped)

    def _present(self, policy_id: str) -> Any:
        """Returns the policy of an id, without loading its variables into memory, or None."""
        if policy_id not in self.policies:
            return None
        handle = getattr(self.policies, "handle", self.policies.__getitem__)
        return handle(policy_id)

    def _drop_episode(self, copy: Copy) -> None:
        """Drops the rows of a running episode that were not returned yet, and their steps."""
        ledger, index, episode = self._ledger, copy.index, copy.episode
        dropped = ledger.records["eps_id"] == episode.episode_id
        closed = int((dropped & (ledger.records["t"] >= 0)).sum())
        ledger.keep(~dropped)
        self._agent_steps[index] -= closed
        self._env_steps[index] -= min(int(self._env_steps[index]), episode.length)

    # -- sampling -----------------------------------------------------------------------------

    def sample(self) -> MultiAgentBatch:
        """Returns the next postprocessed batch.

        Rows are ordered by trajectory and time. Transitions that await an agent's next observation
        are returned with a later sample. A policy without rows is not in the batch.

        Raises:
            EnvError: if an environment breaks the contract of `MultiAgentEnv`.
            UnknownPolicyError: if the mapping function returns the id of no existing policy.
            SpaceError: if the spaces of an agent and its policy do not fit together.
            ConfigError: if the policy's connectors do not accept the agent's observations.
            ObservationError: if connectors return values that are not of the policy's space, or not
                finite.
            UsageError: if no episodes are running. After an error `reset` has to start new ones.
        """
        if not self._copies:
            raise UsageError(
                "sample() needs running episodes, but there are none before reset() or after an "
                "error during a step; call reset() first."
            )
        self._own_code_ran = True
        try:
            while copies := self._copies_to_step():
                self._step(copies)
        except BaseException:
            self._copies = []  # rows of an incomplete step must not get into a batch
            raise
        return self._hand_out_episodes() if self._complete else self._hand_out_fragments()

    def _copies_to_step(self) -> list[Copy]:
        """Returns the sub-environments whose fragment is not full; `[]` if a batch is complete."""
        if self._own_code_ran:
            self._follow_policies()
        if self._complete:
            done = sum(map(self._counted, self._finished))
            return self._copies if done < self._length * self.envs.num_envs else []
        counts = self._agent_steps if self._by_agent_steps else self._env_steps
        return [copy for copy in self._copies if counts[copy.index] < self._length]

    def _step(self, copies: list[Copy]) -> None:
        started, self._waited, self._connecting = now(), 0, 0
        inference = self._act(copies)
        self._broken = {}
        answers = self._answers(copies)
        over = [copy for copy, moves, step in answers if self._ends_with(copy, moves, step)]
        if self._connections.connected:
            self._ledger.book_rewards()
            sound = [copy for copy, _, _ in answers if copy.index not in self._broken]
            self._connections.see(sound)
        closed = self._ledger.book()
        self._agent_steps += closed
        self._episode_agent_steps += closed
        if self._calls_steps:
            for copy in copies:
                if copy.index not in self._broken:
                    self._call("on_episode_step", copy.episode, copy.index)
        for copy in over:
            self._end_episode(copy)
            self._begin_episode(copy)
        for index, reason in self._broken.items():
            self._replace(self._copies[index], reason)
        self._connections.begin([*over, *(self._copies[index] for index in self._broken)])
        connecting, waited = self._connecting, self._waited
        others = now() - started - inference - connecting - waited
        self.times.add(1, others, inference, connecting, waited)

    def _answers(self, copies: list[Copy]) -> list[tuple[Copy, dict[Any, Any], MultiAgentStep]]:
        """Steps sub-environments with their agents' actions; returns those that did not fail."""
        answers, started = [], now()
        for copy in copies:
            moves, copy.moves = copy.moves, {}
            try:
                answers.append((copy, moves, self.envs.step(copy.index, moves)))
            except BREAKS as error:
                self._note_broken(copy, moves, error)
        self._waited += now() - started
        return answers

    def _note_broken(self, copy: Copy, moves: dict[Any, Any], error: BaseException) -> None:
        self._broken[copy.index] = self.envs.repairs.broke(copy.index, f"step({moves!r})", error)

    def _ends_with(self, copy: Copy, moves: dict[Any, Any], step: MultiAgentStep) -> bool:
        obs, rewards, terminateds, truncateds, infos = step
        episode = copy.episode
        t, episode.length = episode.length, episode.length + 1
        if infos:
            episode.last_infos.update(infos)
        obs = self._seen(obs, episode)  # its errors are not the environment's
        try:
            over = self._take(copy, t, obs, step)
        except (UnknownPolicyError, ConfigError, SpaceError):  # not the environment's errors
            raise
        except Exception as error:
            episode.length = t
            self._note_broken(copy, moves, error)
            return False
        self.envs.repairs.stepped(copy.index)
        self._env_steps[copy.index] += 1
        if self._complete and episode.length == LONG and not over:
            warn_long_episode(copy.index, LONG)
        if self._notes:
            episode.note(obs, moves, rewards, terminateds, truncateds)
        return over

    def _replace(self, copy: Copy, error: Exception) -> None:
        """Replaces a sub-environment that failed: drops its episode and starts a new one."""
        index = copy.index
        self._drop_episode(copy)
        self.metrics.append(RolloutMetrics(episode_faulty=True))
        self._own_code_ran = True
        self._tell("on_episode_end", error, index)
        self._begin_episode(copy, in_new_copy=True)

    def _act(self, copies: list[Copy]) -> int:
        """Chooses the pending actions of all agents; returns the time of the policies in ns."""
        acting: list[PolicyRows] = []
        for copy in copies:
            for part, observed in copy.pending:
                if not part.rows.waiting:
                    acting.append(part.rows)
                part.rows.waiting.append((copy, part, observed))
            copy.pending = []
        if not acting:
            return 0
        seats = [rows.seats() for rows in acting]
        first = self._ledger.open(np.concatenate(seats))
        firsts = first + np.cumsum([0, *map(len, seats)])
        calls = [
            ColumnsCall(
                rows.memory.driver.acting,
                obs := self._observed(rows, own),
                *rows.memory.inputs(obs, own),
                self._around(rows) if rows.asks_for_episodes else _NOTHING,
            )
            for rows, own in zip(acting, seats, strict=True)
        ]
        started = now()
        for i, actions, columns in act_columns(calls):
            rows, call = acting[i], calls[i]
            if rows.memory.is_needed:
                columns = rows.memory.remember(columns, call.obs, call.seen, call.states, seats[i])
            rows.write_columns(columns, int(firsts[i]))
            if self._notes:
                rows.note_acting(columns)
            if rows.connection is not None:
                asked = now()
                actions = rows.connection.act(actions, seats[i])
                self._connecting += now() - asked
            _give(rows, actions)
        return now() - started - self._connecting

    def _around(self, rows: PolicyRows) -> dict[str, Any]:
        """Returns the episodes and last infos of the agents that act next with a policy."""
        acting = [(copy.episode, agent) for copy, part, _ in rows.waiting for agent in part.agents]
        infos = [episode.last_info_for(agent) for episode, agent in acting]
        return {"infos": infos, "episodes": [episode for episode, _ in acting]}

    def _observed(self, rows: PolicyRows, seats: np.ndarray) -> list[np.ndarray]:
        """Writes the observations of the agents that act next; returns leaves `[K, ...]`."""
        try:
            return rows.write_observations(seats)
        except EnvError:
            waiting = [(copy, part.agents, observed) for copy, part, observed in rows.waiting]
            explain_observations(self.envs, waiting)
            raise

    def _take(self, copy: Copy, t: int, obs: Mapping[Any, Any], step: MultiAgentStep) -> bool:
        """Records the transitions of one sub-environment; returns whether its episode ended.

        Args:
            sub_env: the sub-environment.
            t: the length of its episode before the step.
            obs: the observations for the policies.
            step: the other results.
        """
        episode, ledger = copy.episode, self._ledger
        _, rewards, terminateds, truncateds, infos = step
        if self.envs.repairs.make is not None:
            what = self.envs.repairs.call(copy.index, "step")
            check_observations(obs, episode, what)
            for reward in rewards.values():
                check_reward(reward, what)
        cast = copy.cast(tuple(obs))
        seats = cast.seats
        if rewards:
            total = _total(rewards)
            ledger.earn(copy.seats_of(tuple(rewards)), list(rewards.values()))
            episode.total_reward += total
        over = bool(terminateds[ALL] or truncateds[ALL])
        if over or any(terminateds.values()) or any(truncateds.values()):
            unseen = self._take_ends(copy, obs, step)
            seats = np.concatenate([seats, unseen])
            obs = {agent: x for agent, x in obs.items() if agent not in copy.done}
            cast = copy.cast(tuple(obs))
        copy.wait(cast, obs)
        ledger.close(copy, t, seats, infos)
        return over

    def _take_ends(self, copy: Copy, obs: Mapping[Any, Any], step: MultiAgentStep) -> np.ndarray:
        """Records the agents that are done; returns slots of those without a last observation."""
        _, _, terminateds, truncateds, _ = step
        all_end, all_cut = bool(terminateds[ALL]), bool(truncateds[ALL])
        ledger, leaving, unseen = self._ledger, [], []
        for agent in copy.playing():
            ended = all_end or bool(terminateds.get(agent, False))
            cut = all_cut or bool(truncateds.get(agent, False))
            if not (ended or cut):
                continue
            leaving.append(agent)
            seat = copy.episode.seat_of[agent]
            unroll = ledger.seats.unroll(seat)
            if copy.episode.is_barred(agent):
                ledger.seats.barred.add(unroll)
            if agent not in obs:
                unseen.append(seat)
            rows = self._rows_of(copy.episode.policy_for(agent))
            if rows.connection is not None:
                observed = (obs[agent],) if agent in obs else ()
                self._connections.end(copy, rows, agent, unroll, observed)
            elif agent in obs:
                rows.finals[unroll] = rows.stacked([obs[agent]])
            ledger.end(seat, terminated=ended, truncated=cut)
        copy.leave(leaving)
        return np.array(unseen, np.int64)

    # -- playing ------------------------------------------------------------------------------

    def play(self, goal: Goal, seeds: Sequence[int] | None) -> Played:
        """Plays whole episodes without returning rows; see `Sampler.play`."""
        count = self.envs.num_envs
        shares = [(goal.amount + count - 1 - i) // count for i in range(count)]
        self.reset(seeds)
        self.metrics = []
        self._agent_steps_ended = 0
        played: list[RolloutMetrics] = []
        done = [0] * count
        going = [copy for copy in self._copies if shares[copy.index] > 0]
        while going and now() < goal.limit:
            if self._own_code_ran:
                self._follow_policies()
            before = [copy.episode for copy in going]
            self._step(going)
            for copy, episode in zip(going, before, strict=True):
                if copy.index in self._broken:
                    played.append(RolloutMetrics(episode_faulty=True))
                elif copy.episode is not episode:  # it ended, and the next one began
                    played.append(self._metrics_of(episode))
                    done[copy.index] += 1 if goal.by_episodes else episode.length
                elif episode.length == LONG:
                    warn_long_episode(copy.index, LONG, evaluates=True)
            going = [copy for copy in going if done[copy.index] < shares[copy.index]]
            self._ledger.keep(self._ledger.records["t"] < 0)
            self._ledger.forget_trajectories(self._copies)
        self._finished, self.metrics = [], []
        return Played(played, self._agent_steps_ended, now() >= goal.limit)

    # -- batches ------------------------------------------------------------------------------

    def _hand_out_episodes(self) -> MultiAgentBatch:
        goal, ids, counted, steps = self._length * self.envs.num_envs, [], 0, 0
        while counted < goal:
            episode = self._finished.pop(0)
            ids.append(episode.episode_id)
            steps += episode.env_steps
            counted += self._counted(episode)
            self.metrics += episode.metrics
        return self._hand_out(np.isin(self._ledger.records["eps_id"], ids), steps)

    def _counted(self, episode: _Finished) -> int:
        return episode.agent_steps if self._by_agent_steps else episode.env_steps

    def _hand_out_fragments(self) -> MultiAgentBatch:
        ledger, steps = self._ledger, int(self._env_steps.sum())
        for copy in self._copies:
            for agent in copy.playing() if copy.episode.last_infos else ():
                if copy.episode.is_barred(agent):
                    seat = copy.episode.seat_of[agent]
                    ledger.seats.barred.add(ledger.seats.unroll(seat))
        self._env_steps[:] = self._agent_steps[:] = 0
        return self._hand_out(ledger.records["t"] >= 0, steps)

    def _hand_out(self, taken: np.ndarray, env_steps: int) -> MultiAgentBatch:
        ledger = self._ledger
        samples = ledger.take(taken, self._copies)
        if barred := list(ledger.seats.barred):
            marked = ((x, np.isin(x.columns["unroll_id"], barred)) for x in samples)
            samples = [kept for pair in marked for kept in self._postprocessor.leave_out(*pair)]
        batches = self._postprocessor.batches(samples, lambda: ledger.seats.who)
        if not self._complete:
            ledger.turn_pages(self._copies)
        ledger.forget_trajectories(self._copies)
        return MultiAgentBatch({k: x for k, x in batches.items() if x.count}, env_steps)

    # -- checkpoints --------------------------------------------------------------------------

    def _keeps_anything(self) -> bool:
        follows = follows_episodes(self._callbacks) or self._ledger.has_infos()
        return follows or bool(self._connections.connected)

    def _get_running(self) -> dict[str, Any] | None:
        if not self._copies:
            return None
        return {
            "ledger": multi_agent_state.ledger_state(self._ledger),
            "copies": [multi_agent_state.copy_state(copy) for copy in self._copies],
            "ended": multi_agent_state.ended_state(self._ledger, self._copies),
            "finished": [[*done[:3], *metrics_state(done.metrics)] for done in self._finished],
            "steps": [self._env_steps.copy(), self._agent_steps.copy()],
            "episode_agent_steps": self._episode_agent_steps.copy(),
        }

    def _set_running(self, state: Mapping[str, Any]) -> bool:
        """Restores the running episodes.

        They keep their policies, and map later agents with the present mapping function. They
        cannot be restored if one of these policies does not exist or has connectors now, or if the
        number of sub-environments differs.
        """
        played = [self.policies.get(policy_id) for policy_id, _ in state["ledger"]["rows"]]
        others = any(policy is None or any(pipelines_of(policy)) for policy in played)
        if others or len(state["copies"]) != self.envs.num_envs:
            return False
        ledger = self._new_ledger()
        multi_agent_state.restore_ledger(ledger, state["ledger"], self.policies)
        for rows in ledger.rows.values():
            self._keep_infos_for(rows.policy)
        self._copies = [Copy(i, ledger.seats, self._rows_of) for i in range(self.envs.num_envs)]
        for copy, saved in zip(self._copies, state["copies"], strict=True):
            multi_agent_state.restore_copy(copy, self._new_episode(copy.index, 0), saved)
            for agent, seat in copy.episode.seat_of.items():
                ledger.seats.recognise(seat, copy.episode, agent)
        for saved, trajectories in state["ended"]:
            episode = self._new_episode(saved["env_index"], 0)
            multi_agent_state.restore_episode(episode, saved, ended=True)
            ledger.seats.who.update({unroll: (episode, agent) for unroll, agent in trajectories})
        self._finished = [
            _Finished(number, env, agent, restored_metrics(metrics))
            for number, env, agent, *metrics in state["finished"]
        ]
        self._env_steps, self._agent_steps = (np.array(x) for x in state["steps"])
        self._episode_agent_steps = np.array(state["episode_agent_steps"])
        return True


def _total(rewards: Mapping[Any, Any]) -> float:
    try:
        total = sum(rewards.values())
        if type(total) is float or not np.ndim(total):
            number = float(total)
            if math.isfinite(number):
                return number
    except (TypeError, ValueError):
        pass
    raise not_numbers(rewards)


def _give(rows: PolicyRows, actions: Structure) -> None:
    """Passes the actions of a policy to the sub-environments of its agents."""
    if isinstance(actions, np.ndarray) and actions.ndim == 1 and actions.dtype.kind == "i":
        single = actions.tolist()
    else:
        single = single_rows(rows.own_copy(actions))
    start = 0
    for copy, part, _ in rows.waiting:
        stop = start + len(part.agents)
        copy.moves.update(zip(part.agents, single[start:stop], strict=True))
        start = stop
    rows.waiting = []
