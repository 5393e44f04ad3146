"""Plays whole episodes with a policy without learning from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfpolicies.envs.vector_adapters import VectorEnvAdapter
from tfpolicies.errors import UsageError
from tfpolicies.models.spaces import batch_leaves, leaves
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.recurrent_state import RecurrentState
from tfpolicies.rollout.base_worker import BaseWorker
from tfpolicies.rollout.connector_env import get_connector_metrics
from tfpolicies.rollout.episode import EpisodeTracker, RolloutMetrics, add_callback_metrics
from tfpolicies.rollout.sampler import (
    LONG_EPISODE_STEPS,
    EvaluationDuration,
    EvaluationResult,
    warn_long_episode,
)
from tfpolicies.rollout.timing import StepTimes, now


def play(
    worker: BaseWorker, amount: int, *, by_episodes: bool, seconds: float | None = None
) -> EvaluationResult:
    """Plays whole episodes in a worker's environments, without learning from them.

    Args:
        worker: a `RolloutWorker`.
        amount: the number of episodes, or the minimum number of steps.
        by_episodes: whether `amount` counts episodes.
        seconds: time limit; episodes that have not ended by then do not count. None for no limit.
    """
    if worker.environments is None or worker.sampler is None:
        if worker.config.env is None:
            raise UsageError(
                "There is no environment to evaluate in. Give one: evaluate(env=...), or "
                "config.environment(...)."
            )
        raise UsageError("The evaluation worker was stopped.")
    deadline = math.inf if seconds is None else now() + seconds * 1e9
    duration = EvaluationDuration(amount, by_episodes, deadline)
    return worker.sampler.play(
        duration, worker.seeds.next(worker.environments.num_envs, evaluation=True)
    )


def play_episodes(
    policy: Policy,
    envs: VectorEnvAdapter,
    duration: EvaluationDuration,
    *,
    seeds: Sequence[int] | None = None,
    times: StepTimes | None = None,
    tracker: EpisodeTracker | None = None,
) -> list[RolloutMetrics]:
    """Plays whole episodes and returns their metrics.

    Each environment plays a fixed share of the episodes or steps; when counting episodes, the first
    environments get the remainder. Collecting whichever episodes end first would favour short
    episodes. An environment starts new episodes until its share is done, and finishes every episode
    that it started.

    Args:
        policy: acts; its own config says whether it explores.
        envs: start new episodes.
        duration: how much to play.
        seeds: one for each environment.
        times: accumulates the times of steps; None for a new `StepTimes`.
        tracker: tracks the episodes for callbacks; None creates one only for a policy that reads
            the episodes it acts in.
    """
    times = StepTimes() if times is None else times
    space_leaves = leaves(envs.observation_space)
    first_obs = envs.reset(seeds)
    obs = batch_leaves(space_leaves, first_obs, "the environment's observation")
    count = envs.num_envs
    rounding_offsets = np.arange(count) * duration.by_episodes
    shares = (duration.amount + count - 1 - rounding_offsets) // count
    returns, lengths = np.zeros(count), np.zeros(count, np.int64)
    results: list[RolloutMetrics] = []
    recurrent_state = RecurrentState(policy, count)
    if tracker is None and recurrent_state.driver.acting.reads_episodes:
        tracker = EpisodeTracker(lambda *arguments: None, None, count, np.random.default_rng())
    if tracker is not None:
        tracker.start_all(first_obs)
        if recurrent_state.driver.acting.reads_episodes:
            recurrent_state.extra_arguments_fn = tracker.get_context
    completed = np.zeros(count, np.int64)  # episodes or steps, in the unit of the shares
    steps, next_report = 0, LONG_EPISODE_STEPS
    while (completed < shares).any() and now() < duration.deadline:
        connector_ns = envs.connector_ns
        act_start = now()
        env_actions, columns = recurrent_state.act(obs)
        act_end = now()
        step = envs.step(env_actions)
        step_end = now()
        if tracker is not None:
            tracker.step(step, env_actions, columns)
        if recurrent_state.is_needed:
            recurrent_state.record_step(
                step.rewards, step.terminateds | step.truncateds, step.reset_only
            )
        obs = batch_leaves(space_leaves, step.obs, "the environment's observation")
        valid = True if step.reset_only is None else ~step.reset_only
        returns += np.where(valid, step.rewards, 0.0)
        lengths += valid
        for index, error in (step.failed or {}).items():
            results.append(RolloutMetrics(episode_faulty=True))
            returns[index] = lengths[index] = 0
            if tracker is not None:
                tracker.on_env_failure(index, error)
        action_connector_ns, obs_connector_ns = (
            envs.connector_ns[0] - connector_ns[0],
            envs.connector_ns[1] - connector_ns[1],
        )
        env_wait_ns = step_end - act_end - action_connector_ns - obs_connector_ns
        times.add(
            1,
            now() - step_end + obs_connector_ns,
            act_end - act_start,
            action_connector_ns,
            env_wait_ns,
        )
        steps += 1
        if steps == next_report:
            long_running = np.flatnonzero((lengths >= LONG_EPISODE_STEPS) & (completed < shares))
            if len(long_running):
                env_index = int(long_running[0])
                warn_long_episode(env_index, int(lengths[env_index]), in_evaluation=True)
            next_report *= 2
        for i in np.flatnonzero((step.terminateds | step.truncateds) & valid):
            metrics = RolloutMetrics(int(lengths[i]), float(returns[i]), perf_stats=times.means())
            if tracker is not None:
                metrics = add_callback_metrics(metrics, tracker.pop_finished(int(i)))
            if completed[i] < shares[i]:
                results.append(metrics._replace(connector_metrics=get_connector_metrics(policy)))
            completed[i] += 1 if duration.by_episodes else lengths[i]
            returns[i] = lengths[i] = 0
    return results
