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

from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.sample_batch import MultiAgentBatch
from tfpolicies.config.callbacks import has_episode_methods, overrides
from tfpolicies.envs.fault_tolerance import ENV_FAILURES, check_reward
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.multi_agent_env import ALL, MultiAgentStepResult
from tfpolicies.envs.vector_adapters import split_batch
from tfpolicies.errors import ConfigError, EnvError, SpaceError, UnknownPolicyError, UsageError
from tfpolicies.policy.policy import Policy
from tfpolicies.policy_map.stacked_acting import SamplerCall, act_for_samplers
from tfpolicies.rollout import multi_agent_state
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.episode_summaries import get_metrics_state, restore_metrics
from tfpolicies.rollout.multi_agent_connectors import (
    ConnectorGroup,
    check_observations,
    raise_for_bad_observation,
)
from tfpolicies.rollout.multi_agent_episode import MultiAgentEpisode, SubEnvState
from tfpolicies.rollout.multi_agent_tables import PolicyRows
from tfpolicies.rollout.policy_connectors import get_pipelines
from tfpolicies.rollout.sampler import (
    LONG_EPISODE_STEPS,
    EvaluationDuration,
    EvaluationResult,
    Sampler,
    warn_long_episode,
)
from tfpolicies.rollout.space_checks import AgentSpaceChecker
from tfpolicies.rollout.timing import now
from tfpolicies.rollout.transition_table import TransitionTable, make_reward_error
from tfpolicies.rollout.worker_policies import WorkerPolicies

_EMPTY: Mapping[str, Any] = {}


class _FinishedEpisode(NamedTuple):
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

    envs: MultiAgentEnvAdapter

    def __init__(
        self,
        envs: MultiAgentEnvAdapter,
        policies: Mapping[str, Any],
        worker_policies: WorkerPolicies,
        *,
        count_agent_steps: bool = False,
        observation_fn: Callable[..., Mapping[Any, Any]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(envs, policies, **settings)
        self.worker_policies = worker_policies
        self._ended_agent_steps = 0  # of all episodes that ended since `play` was called
        self._env_wait_ns = 0  # time of environments in the current step, ns
        self._connector_ns = 0  # time of action connectors in the current step, ns
        self._counts_agent_steps = count_agent_steps
        self._observation_fn = observation_fn
        self._has_step_callback = overrides(self._callbacks, "on_episode_step")
        self._records_steps = has_episode_methods(
            self._callbacks
        )  # record observations, actions, rewards
        self._sub_envs: list[SubEnvState] = []
        self._space_checker = AgentSpaceChecker(policies_observe_env=observation_fn is None)
        self._failures: dict[int, Exception] = {}  # by sub-environment, in the current step
        self._user_code_ran = True  # the user's code, which may have removed policies
        self._reset_transitions()

    # -- episodes -----------------------------------------------------------------------------

    def _get_running_ids(self) -> list[int]:
        return [sub_env.episode.episode_id for sub_env in self._sub_envs]

    @property
    def running_episodes(self) -> list[MultiAgentEpisode]:
        return [sub_env.episode for sub_env in self._sub_envs]

    def reset(self, seeds: Sequence[int] | None) -> None:
        """Starts new episodes in all sub-environments; drops rows that were not returned yet."""
        count = self.envs.num_envs
        self._reset_transitions()
        self._env_steps = np.zeros(count, np.int64)  # of the running fragments
        self._agent_steps = np.zeros(count, np.int64)
        self._episode_agent_steps = np.zeros(count, np.int64)
        self._finished_episodes: list[_FinishedEpisode] = []  # only with whole episodes
        self._sub_envs = [
            SubEnvState(i, self._transitions.slots, self._get_rows) for i in range(count)
        ]
        for sub_env in self._sub_envs:
            self._start_episode(sub_env, None if seeds is None else seeds[sub_env.index])
        self._connectors.process_first_observations(self._sub_envs)

    def _reset_transitions(self) -> TransitionTable:
        self._transitions = TransitionTable(self.envs.num_envs)
        has_env_spaces = self._observation_fn is None
        self._connectors = ConnectorGroup(
            self.envs, self._transitions, has_env_spaces=has_env_spaces
        )
        return self._transitions

    def _get_rows(self, policy_id: str) -> PolicyRows:
        rows = self._transitions.rows.get(policy_id)
        if rows is None:
            policy = self.policies[policy_id]
            self._require_fitting_exploration(policy, f" of policy {policy_id!r}")
            rows = self._transitions.rows[policy_id] = PolicyRows(policy_id, policy)
            self._keep_infos_for(policy)
            self._connectors.add_policy(rows)
        return rows

    def _keep_infos_for(self, policy: Policy) -> None:
        if self._reads_infos(policy):
            self._transitions.keep_infos()

    def _start_episode(
        self, sub_env: SubEnvState, seed: int | None = None, *, in_new_env: bool = False
    ) -> None:
        episode, index = (
            self._new_episode(sub_env.index, int(self.rng.integers(10**18))),
            sub_env.index,
        )
        self._run_user_callback("on_episode_created", episode, index)
        start = now()
        obs, infos = self.envs.recreate(index) if in_new_env else self.envs.reset(index, seed)
        self._env_wait_ns += now() - start
        obs = self._apply_observation_fn(obs, episode)
        while error := self._find_reset_error(obs, episode):
            self.envs.supervisor.on_failure(index, "reset", error)
            obs, infos = self.envs.recreate(index)
            obs = self._apply_observation_fn(obs, episode)
        sub_env.start_episode(episode)
        episode.last_infos.update(infos)
        if self._records_steps:
            episode.record_step(obs)
        self._episode_agent_steps[index] = 0
        sub_env.set_pending(sub_env.group_agents(tuple(obs)), obs)
        self._run_user_callback("on_episode_start", episode, index)

    def _find_reset_error(
        self, obs: Mapping[Any, Any], episode: MultiAgentEpisode
    ) -> EnvError | None:
        """Checks first observations if failing environments are replaced; returns the error."""
        if self.envs.supervisor.make is None:
            return None  # `PolicyRows.write` checks them later
        try:
            check_observations(
                obs, episode, self.envs.supervisor.describe_call(episode.env_index, "reset")
            )
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
            slots=self._transitions.slots,
            check_agent=self._check_agent,
        )

    def _check_agent(self, episode: MultiAgentEpisode, agent: Hashable, policy_id: str) -> None:
        env = self.envs.envs[episode.env_index]
        self._space_checker.check(env, agent, policy_id, self._get_handle(policy_id))

    def _apply_observation_fn(
        self, obs: Mapping[Any, Any], episode: MultiAgentEpisode
    ) -> Mapping[Any, Any]:
        if self._observation_fn is None:
            return obs
        result = self._observation_fn(
            agent_obs=obs,
            worker=self._worker,
            base_env=self.envs,
            policies=self.policies,
            episode=episode,
        )
        if not isinstance(result, Mapping):
            raise UsageError(
                "observation_fn must return a dict of observations by agent id, got "
                f"{type(result).__name__}; return `agent_obs` to leave observations unchanged."
            )
        return result

    def _run_user_callback(
        self, callback_name: str, episode: MultiAgentEpisode, env_index: int
    ) -> None:
        self._user_code_ran |= overrides(self._callbacks, callback_name)
        self._run_callback(callback_name, episode, env_index)

    def _end_episode(self, sub_env: SubEnvState) -> None:
        episode, index = sub_env.episode, sub_env.index
        agent_steps = int(self._episode_agent_steps[index])
        if not agent_steps:
            raise EnvError(
                f"An episode of environment {index} ended after {episode.length} steps without a "
                "single transition of an agent. Give observations to agents that can act on them."
            )
        self._ended_agent_steps += agent_steps
        episode.fix_rewards()
        self.envs.supervisor.on_episode_done(index)
        self._run_user_callback("on_episode_end", episode, index)
        metrics = self._make_metrics(episode)
        if self._complete_episodes:
            finished = _FinishedEpisode(episode.episode_id, episode.length, agent_steps, [metrics])
            self._finished_episodes.append(finished)
        else:
            self.metrics.append(metrics)
        for policy_id in {episode.policy_for(agent) for agent in episode.slot_by_agent}:
            policy = self._get_handle(policy_id)
            if policy is not None and policy.driver.acting.resets_per_episode:
                policy.driver.acting.start_episode()

    def _make_metrics(self, episode: MultiAgentEpisode) -> RolloutMetrics:
        return episode.make_metrics(self.times.means(), self._connectors.get_metrics(episode))

    def _drop_outdated_policies(self) -> None:
        """Drops policies that were removed or replaced since the last step, and their episodes.

        Policies with new connectors count as replaced. Rows of finished episodes are dropped also.
        """
        self._user_code_ran = False
        transitions = self._transitions
        is_outdated = self._connectors.is_outdated
        outdated_ids = [
            policy_id
            for policy_id, rows in transitions.rows.items()
            if self._get_handle(policy_id) is not rows.policy or is_outdated(rows)
        ]
        if not outdated_ids:
            return
        dropped_envs = [
            sub_env for sub_env in self._sub_envs if sub_env.uses_policies(outdated_ids)
        ]
        for sub_env in dropped_envs:
            self._drop_episode(sub_env)
        for policy_id in outdated_ids:
            self._connectors.remove_policy(transitions.rows.pop(policy_id))
        for sub_env in dropped_envs:
            self._start_episode(sub_env)
        self._connectors.process_first_observations(dropped_envs)

    def _get_handle(self, policy_id: str) -> Any:
        """Returns the policy of an id, without loading its variables into memory, or None."""
        if policy_id not in self.policies:
            return None
        handle = getattr(self.policies, "get_handle", self.policies.__getitem__)
        return handle(policy_id)

    def _drop_episode(self, sub_env: SubEnvState) -> None:
        """Drops the rows of a running episode that were not returned yet, and their steps."""
        transitions, index, episode = self._transitions, sub_env.index, sub_env.episode
        dropped = transitions.records["eps_id"] == episode.episode_id
        num_closed = int((dropped & (transitions.records["t"] >= 0)).sum())
        transitions.keep_only(~dropped)
        self._agent_steps[index] -= num_closed
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
        if not self._sub_envs:
            raise UsageError(
                "sample() needs running episodes, but there are none before reset() or after an "
                "error during a step; call reset() first."
            )
        self._user_code_ran = True
        try:
            while sub_envs := self._select_sub_envs():
                self._step(sub_envs)
        except BaseException:
            self._sub_envs = []  # rows of an incomplete step must not get into a batch
            raise
        return self._hand_out_episodes() if self._complete_episodes else self._hand_out_fragments()

    def _select_sub_envs(self) -> list[SubEnvState]:
        """Returns the sub-environments whose fragment is not full; `[]` if a batch is complete."""
        if self._user_code_ran:
            self._drop_outdated_policies()
        if self._complete_episodes:
            num_steps = sum(map(self._count_steps, self._finished_episodes))
            return self._sub_envs if num_steps < self._fragment_length * self.envs.num_envs else []
        counts = self._agent_steps if self._counts_agent_steps else self._env_steps
        return [
            sub_env for sub_env in self._sub_envs if counts[sub_env.index] < self._fragment_length
        ]

    def _step(self, sub_envs: list[SubEnvState]) -> None:
        start, self._env_wait_ns, self._connector_ns = now(), 0, 0
        inference_ns = self._act(sub_envs)
        self._failures = {}
        results = self._step_sub_envs(sub_envs)
        ended = [
            sub_env
            for sub_env, agent_actions, step in results
            if self._record_step(sub_env, agent_actions, step)
        ]
        if self._connectors.connected_rows:
            self._transitions.commit_rewards()
            working = [sub_env for sub_env, _, _ in results if sub_env.index not in self._failures]
            self._connectors.process_step(working)
        num_closed = self._transitions.commit()
        self._agent_steps += num_closed
        self._episode_agent_steps += num_closed
        if self._has_step_callback:
            for sub_env in sub_envs:
                if sub_env.index not in self._failures:
                    self._run_user_callback("on_episode_step", sub_env.episode, sub_env.index)
        for sub_env in ended:
            self._end_episode(sub_env)
            self._start_episode(sub_env)
        for index, error in self._failures.items():
            self._replace_failed(self._sub_envs[index], error)
        self._connectors.process_first_observations(
            [*ended, *(self._sub_envs[index] for index in self._failures)]
        )
        connector_ns, env_wait_ns = self._connector_ns, self._env_wait_ns
        processing_ns = now() - start - inference_ns - connector_ns - env_wait_ns
        self.times.add(1, processing_ns, inference_ns, connector_ns, env_wait_ns)

    def _step_sub_envs(
        self, sub_envs: list[SubEnvState]
    ) -> list[tuple[SubEnvState, dict[Any, Any], MultiAgentStepResult]]:
        """Steps sub-environments with their agents' actions; returns those that did not fail."""
        results, start = [], now()
        for sub_env in sub_envs:
            agent_actions, sub_env.agent_actions = sub_env.agent_actions, {}
            try:
                results.append(
                    (sub_env, agent_actions, self.envs.step(sub_env.index, agent_actions))
                )
            except ENV_FAILURES as error:
                self._record_failure(sub_env, agent_actions, error)
        self._env_wait_ns += now() - start
        return results

    def _record_failure(
        self, sub_env: SubEnvState, agent_actions: dict[Any, Any], error: BaseException
    ) -> None:
        self._failures[sub_env.index] = self.envs.supervisor.on_failure(
            sub_env.index, f"step({agent_actions!r})", error
        )

    def _record_step(
        self, sub_env: SubEnvState, agent_actions: dict[Any, Any], step: MultiAgentStepResult
    ) -> bool:
        obs, rewards, terminateds, truncateds, infos = step
        episode = sub_env.episode
        t, episode.length = episode.length, episode.length + 1
        if infos:
            episode.last_infos.update(infos)
        obs = self._apply_observation_fn(obs, episode)  # its errors are not the environment's
        try:
            is_ended = self._record_transitions(sub_env, t, obs, step)
        except (UnknownPolicyError, ConfigError, SpaceError):  # not the environment's errors
            raise
        except Exception as error:
            episode.length = t
            if isinstance(error, EnvError):
                error.add(f"The actions were {agent_actions!r:.200}.")
            self._record_failure(sub_env, agent_actions, error)
            return False
        self.envs.supervisor.on_step(sub_env.index)
        self._env_steps[sub_env.index] += 1
        if self._complete_episodes and episode.length == LONG_EPISODE_STEPS and not is_ended:
            warn_long_episode(sub_env.index, LONG_EPISODE_STEPS)
        if self._records_steps:
            episode.record_step(obs, agent_actions, rewards, terminateds, truncateds)
        return is_ended

    def _replace_failed(self, sub_env: SubEnvState, error: Exception) -> None:
        """Replaces a sub-environment that failed: drops its episode and starts a new one."""
        index = sub_env.index
        self._drop_episode(sub_env)
        self.metrics.append(RolloutMetrics(episode_faulty=True))
        self._user_code_ran = True
        self._run_callback("on_episode_end", error, index)
        self._start_episode(sub_env, in_new_env=True)

    def _act(self, sub_envs: list[SubEnvState]) -> int:
        """Chooses the pending actions of all agents; returns the time of the policies in ns."""
        acting: list[PolicyRows] = []
        for sub_env in sub_envs:
            for group, observations in sub_env.pending:
                if not group.rows.pending:
                    acting.append(group.rows)
                group.rows.pending.append((sub_env, group, observations))
            sub_env.pending = []
        if not acting:
            return 0
        slots = [rows.get_slots() for rows in acting]
        first_record = self._transitions.open_transitions(np.concatenate(slots))
        first_records = first_record + np.cumsum([0, *map(len, slots)])
        calls = [
            SamplerCall(
                rows.recurrent_state.driver.acting,
                obs := self._write_observations(rows, policy_slots),
                *rows.recurrent_state.get_inputs(obs, policy_slots),
                self._get_episode_context(rows) if rows.reads_episodes else _EMPTY,
            )
            for rows, policy_slots in zip(acting, slots, strict=True)
        ]
        start = now()
        for i, actions, columns in act_for_samplers(calls):
            rows, call = acting[i], calls[i]
            if rows.recurrent_state.is_needed:
                columns = rows.recurrent_state.record_actions(
                    columns, call.obs, call.views, call.states, slots[i]
                )
            rows.write_columns(columns, int(first_records[i]))
            if self._records_steps:
                rows.record_acting(columns)
            if rows.connectors is not None:
                connector_start = now()
                actions = rows.connectors.transform_actions(actions, slots[i])
                self._connector_ns += now() - connector_start
            _assign_actions(rows, actions)
        return now() - start - self._connector_ns

    def _get_episode_context(self, rows: PolicyRows) -> dict[str, Any]:
        """Returns the episodes and last infos of the agents that act next with a policy."""
        acting = [
            (sub_env.episode, agent) for sub_env, group, _ in rows.pending for agent in group.agents
        ]
        infos = [episode.last_info_for(agent) for episode, agent in acting]
        return {"infos": infos, "episodes": [episode for episode, _ in acting]}

    def _write_observations(self, rows: PolicyRows, slots: np.ndarray) -> list[np.ndarray]:
        """Writes the observations of the agents that act next; returns leaves `[K, ...]`."""
        try:
            return rows.write_observations(slots)
        except EnvError:
            observed_agents = [
                (sub_env, group.agents, observations)
                for sub_env, group, observations in rows.pending
            ]
            raise_for_bad_observation(self.envs, observed_agents)
            raise

    def _record_transitions(
        self, sub_env: SubEnvState, t: int, obs: Mapping[Any, Any], step: MultiAgentStepResult
    ) -> bool:
        """Records the transitions of one sub-environment; returns whether its episode ended.

        Args:
            sub_env: the sub-environment.
            t: the length of its episode before the step.
            obs: the observations for the policies.
            step: the other results.
        """
        episode, transitions = sub_env.episode, self._transitions
        _, rewards, terminateds, truncateds, infos = step
        if self.envs.supervisor.make is not None:
            source = self.envs.supervisor.describe_call(sub_env.index, "step")
            check_observations(obs, episode, source)
            for reward in rewards.values():
                check_reward(reward, source)
        groups = sub_env.group_agents(tuple(obs))
        slots = groups.slots
        if rewards:
            total = _sum_rewards(rewards)
            transitions.add_rewards(sub_env.get_slots(tuple(rewards)), list(rewards.values()))
            episode.total_reward += total
        is_ended = bool(terminateds[ALL] or truncateds[ALL])
        if is_ended or any(terminateds.values()) or any(truncateds.values()):
            unobserved = self._record_done_agents(sub_env, obs, step)
            slots = np.concatenate([slots, unobserved])
            obs = {agent: x for agent, x in obs.items() if agent not in sub_env.done}
            groups = sub_env.group_agents(tuple(obs))
        sub_env.set_pending(groups, obs)
        transitions.add_closed(sub_env, t, slots, infos)
        return is_ended

    def _record_done_agents(
        self, sub_env: SubEnvState, obs: Mapping[Any, Any], step: MultiAgentStepResult
    ) -> np.ndarray:
        """Records the agents that are done; returns slots of those without a last observation."""
        _, _, terminateds, truncateds, _ = step
        all_terminated, all_truncated = bool(terminateds[ALL]), bool(truncateds[ALL])
        transitions, done_agents, unobserved = self._transitions, [], []
        for agent in sub_env.get_active_agents():
            terminated = all_terminated or bool(terminateds.get(agent, False))
            truncated = all_truncated or bool(truncateds.get(agent, False))
            if not (terminated or truncated):
                continue
            done_agents.append(agent)
            slot = sub_env.episode.slot_by_agent[agent]
            unroll_id = transitions.slots.get_unroll_id(slot)
            if sub_env.episode.is_excluded(agent):
                transitions.slots.excluded.add(unroll_id)
            if agent not in obs:
                unobserved.append(slot)
            rows = self._get_rows(sub_env.episode.policy_for(agent))
            if rows.connectors is not None:
                observations = (obs[agent],) if agent in obs else ()
                self._connectors.add_done_agent(sub_env, rows, agent, unroll_id, observations)
            elif agent in obs:
                rows.final_observations[unroll_id] = rows.stack([obs[agent]])
            transitions.add_end(slot, terminated=terminated, truncated=truncated)
        sub_env.mark_done(done_agents)
        return np.array(unobserved, np.int64)

    # -- playing ------------------------------------------------------------------------------

    def play(self, duration: EvaluationDuration, seeds: Sequence[int] | None) -> EvaluationResult:
        """Plays whole episodes without returning rows; see `Sampler.play`."""
        count = self.envs.num_envs
        shares = [(duration.amount + count - 1 - i) // count for i in range(count)]
        self.reset(seeds)
        self.metrics = []
        self._ended_agent_steps = 0
        results: list[RolloutMetrics] = []
        completed = [0] * count
        playing = [sub_env for sub_env in self._sub_envs if shares[sub_env.index] > 0]
        while playing and now() < duration.deadline:
            if self._user_code_ran:
                self._drop_outdated_policies()
            episodes = [sub_env.episode for sub_env in playing]
            self._step(playing)
            for sub_env, episode in zip(playing, episodes, strict=True):
                if sub_env.index in self._failures:
                    results.append(RolloutMetrics(episode_faulty=True))
                elif sub_env.episode is not episode:  # it ended, and the next one began
                    results.append(self._make_metrics(episode))
                    completed[sub_env.index] += 1 if duration.by_episodes else episode.length
                elif episode.length == LONG_EPISODE_STEPS:
                    warn_long_episode(sub_env.index, LONG_EPISODE_STEPS, in_evaluation=True)
            playing = [
                sub_env for sub_env in playing if completed[sub_env.index] < shares[sub_env.index]
            ]
            self._transitions.keep_only(self._transitions.records["t"] < 0)
            self._transitions.drop_finished_trajectories(self._sub_envs)
        self._finished_episodes, self.metrics = [], []
        return EvaluationResult(results, self._ended_agent_steps, now() >= duration.deadline)

    # -- batches ------------------------------------------------------------------------------

    def _hand_out_episodes(self) -> MultiAgentBatch:
        min_steps, episode_ids, num_counted, env_steps = (
            self._fragment_length * self.envs.num_envs,
            [],
            0,
            0,
        )
        while num_counted < min_steps:
            episode = self._finished_episodes.pop(0)
            episode_ids.append(episode.episode_id)
            env_steps += episode.env_steps
            num_counted += self._count_steps(episode)
            self.metrics += episode.metrics
        return self._hand_out(np.isin(self._transitions.records["eps_id"], episode_ids), env_steps)

    def _count_steps(self, episode: _FinishedEpisode) -> int:
        return episode.agent_steps if self._counts_agent_steps else episode.env_steps

    def _hand_out_fragments(self) -> MultiAgentBatch:
        transitions, env_steps = self._transitions, int(self._env_steps.sum())
        for sub_env in self._sub_envs:
            for agent in sub_env.get_active_agents() if sub_env.episode.last_infos else ():
                if sub_env.episode.is_excluded(agent):
                    slot = sub_env.episode.slot_by_agent[agent]
                    transitions.slots.excluded.add(transitions.slots.get_unroll_id(slot))
        self._env_steps[:] = self._agent_steps[:] = 0
        return self._hand_out(transitions.records["t"] >= 0, env_steps)

    def _hand_out(self, selected: np.ndarray, env_steps: int) -> MultiAgentBatch:
        transitions = self._transitions
        samples = transitions.take_rows(selected, self._sub_envs)
        if excluded := list(transitions.slots.excluded):
            pairs = ((x, np.isin(x.columns["unroll_id"], excluded)) for x in samples)
            samples = [
                remaining for pair in pairs for remaining in self._postprocessor.exclude(*pair)
            ]
        batches = self._make_batches(samples, lambda: transitions.slots.owners, env_steps)
        if not self._complete_episodes:
            transitions.start_new_unrolls(self._sub_envs)
        transitions.drop_finished_trajectories(self._sub_envs)
        return MultiAgentBatch({k: x for k, x in batches.items() if x.count}, env_steps)

    # -- checkpoints --------------------------------------------------------------------------

    def _has_unsavable_state(self) -> bool:
        has_unsavable = has_episode_methods(self._callbacks) or self._transitions.has_infos()
        return has_unsavable or bool(self._connectors.connected_rows)

    def _get_running_state(self) -> dict[str, Any] | None:
        if not self._sub_envs:
            return None
        return {
            "ledger": multi_agent_state.get_transition_state(self._transitions),
            "copies": [multi_agent_state.get_sub_env_state(sub_env) for sub_env in self._sub_envs],
            "ended": multi_agent_state.get_ended_state(self._transitions, self._sub_envs),
            "finished": [
                [*finished[:3], *get_metrics_state(finished.metrics)]
                for finished in self._finished_episodes
            ],
            "steps": [self._env_steps.copy(), self._agent_steps.copy()],
            "episode_agent_steps": self._episode_agent_steps.copy(),
        }

    def _set_running_state(self, state: Mapping[str, Any]) -> bool:
        """Restores the running episodes.

        They keep their policies, and map later agents with the present mapping function. They
        cannot be restored if one of these policies does not exist or has connectors now, or if the
        number of sub-environments differs.
        """
        policies = [self.policies.get(policy_id) for policy_id, _ in state["ledger"]["rows"]]
        has_other_policies = any(
            policy is None or any(get_pipelines(policy)) for policy in policies
        )
        if has_other_policies or len(state["copies"]) != self.envs.num_envs:
            return False
        transitions = self._reset_transitions()
        multi_agent_state.restore_transitions(transitions, state["ledger"], self.policies)
        for rows in transitions.rows.values():
            self._keep_infos_for(rows.policy)
        self._sub_envs = [
            SubEnvState(i, transitions.slots, self._get_rows) for i in range(self.envs.num_envs)
        ]
        for sub_env, saved_state in zip(self._sub_envs, state["copies"], strict=True):
            multi_agent_state.restore_sub_env(
                sub_env, self._new_episode(sub_env.index, 0), saved_state
            )
            for agent, slot in sub_env.episode.slot_by_agent.items():
                transitions.slots.set_owner(slot, sub_env.episode, agent)
        for saved_state, trajectories in state["ended"]:
            episode = self._new_episode(saved_state["env_index"], 0)
            multi_agent_state.restore_episode(episode, saved_state, ended=True)
            transitions.slots.owners.update(
                {unroll_id: (episode, agent) for unroll_id, agent in trajectories}
            )
        self._finished_episodes = [
            _FinishedEpisode(number, env, agent, restore_metrics(metrics))
            for number, env, agent, *metrics in state["finished"]
        ]
        self._env_steps, self._agent_steps = (np.array(x) for x in state["steps"])
        self._episode_agent_steps = np.array(state["episode_agent_steps"])
        return True


def _sum_rewards(rewards: Mapping[Any, Any]) -> float:
    try:
        total = sum(rewards.values())
        if type(total) is float or not np.ndim(total):
            as_float = float(total)
            if math.isfinite(as_float):
                return as_float
    except (TypeError, ValueError):
        pass
    raise make_reward_error(rewards)


def _assign_actions(rows: PolicyRows, actions: Structure) -> None:
    """Passes the actions of a policy to the sub-environments of its agents."""
    if isinstance(actions, np.ndarray) and actions.ndim == 1 and actions.dtype.kind == "i":
        agent_actions = actions.tolist()
    else:
        agent_actions = split_batch(rows.copy_actions(actions))
    start = 0
    for sub_env, group, _ in rows.pending:
        stop = start + len(group.agents)
        sub_env.agent_actions.update(zip(group.agents, agent_actions[start:stop], strict=True))
        start = stop
    rows.pending = []
