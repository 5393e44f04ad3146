"""Plays whole episodes with a policy without learning from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfpolicies.envs.vector import Environments
from tfpolicies.errors import UsageError
from tfpolicies.models.spaces import batch_leaves, leaves
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.recurrent_state import RecurrentState
from tfpolicies.rollout.connected import connector_metrics_of
from tfpolicies.rollout.episode import EpisodeFollower, RolloutMetrics, with_notes
from tfpolicies.rollout.sampler import LONG, Goal, Played, warn_long_episode
from tfpolicies.rollout.timing import StepTimes, now
from tfpolicies.rollout.worker import Worker


def play(worker: Worker, amount: int, *, by_episodes: bool, seconds: float | None = None) -> Played:
    """Plays whole episodes in a worker's environments, without learning from them.

    Args:
        worker: a `RolloutWorker`.
        amount: the number of episodes, or the minimum number of steps.
        by_episodes: whether `amount` counts episodes.
        seconds: time limit; episodes that have not ended by then do not count. None for no limit.

    Raises:
        UsageError: if the worker was stopped.
    """
    if worker.environments is None or worker.sampler is None:
        raise UsageError("The evaluation worker was stopped.")
    limit = math.inf if seconds is None else now() + seconds * 1e9
    goal = Goal(amount, by_episodes, limit)
    return worker.sampler.play(
        goal, worker.seeds.next(worker.environments.num_envs, evaluation=True)
    )


def play_episodes(
    policy: Policy,
    envs: Environments,
    goal: Goal,
    *,
    seeds: Sequence[int] | None = None,
    times: StepTimes | None = None,
    follower: EpisodeFollower | None = None,
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
    first = envs.reset(seeds)
    obs = batch_leaves(space_leaves, first, "the environment's observation")
    count = envs.num_envs
    first_ones_more = np.arange(count) * goal.by_episodes
    shares = (goal.amount + count - 1 - first_ones_more) // count
    returns, lengths = np.zeros(count), np.zeros(count, np.int64)
    played: list[RolloutMetrics] = []
    memory = RecurrentState(policy, count)
    if follower is None and memory.driver.acting.reads_episodes:
        follower = EpisodeFollower(lambda *told: None, None, count, np.random.default_rng())
    if follower is not None:
        follower.start_all(first)
        if memory.driver.acting.reads_episodes:
            memory.around = follower.around
    done = np.zeros(count, np.int64)  # episodes or steps, in the unit of the shares
    steps, report_at = 0, LONG
    while (done < shares).any() and now() < goal.limit:
        connecting = envs.connecting
        started = now()
        env_actions, columns = memory.act(obs)
        acted = now()
        step = envs.step(env_actions)
        stepped = now()
        if follower is not None:
            follower.step(step, env_actions, columns)
        if memory.is_needed:
            memory.stepped(step.rewards, step.terminateds | step.truncateds, step.dead)
        obs = batch_leaves(space_leaves, step.obs, "the environment's observation")
        alive = True if step.dead is None else ~step.dead
        returns += np.where(alive, step.rewards, 0.0)
        lengths += alive
        for index, error in (step.broken or {}).items():
            played.append(RolloutMetrics(episode_faulty=True))
            returns[index] = lengths[index] = 0
            if follower is not None:
                follower.broke(index, error)
        before, after = envs.connecting[0] - connecting[0], envs.connecting[1] - connecting[1]
        waited = stepped - acted - before - after
        times.add(1, now() - stepped + after, acted - started, before, waited)
        steps += 1
        if steps == report_at:
            waiting = np.flatnonzero((lengths >= LONG) & (done < shares))
            if len(waiting):
                first_one = int(waiting[0])
                warn_long_episode(first_one, int(lengths[first_one]), evaluates=True)
            report_at *= 2
        for i in np.flatnonzero((step.terminateds | step.truncateds) & alive):
            ended = RolloutMetrics(int(lengths[i]), float(returns[i]), perf_stats=times.means())
            if follower is not None:
                ended = with_notes(ended, follower.take_finished(int(i)))
            if done[i] < shares[i]:
                played.append(ended._replace(connector_metrics=connector_metrics_of(policy)))
            done[i] += 1 if goal.by_episodes else lengths[i]
            returns[i] = lengths[i] = 0
    return played
