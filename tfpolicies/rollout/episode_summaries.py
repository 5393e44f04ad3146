"""Summaries of finished episodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.rollout.episode import RolloutMetrics

_NAN = float("nan")

MIN_RECENT_EPISODES = 5
"""The number of newest episodes that always count as recent, however long they are."""


def summarize_episodes(
    episodes: Sequence[RolloutMetrics],
    new_episodes: int | None = None,
    *,
    keep_custom_metrics: bool = False,
) -> dict[str, Any]:
    """Returns means, minima and maxima over episodes; NaN without episodes.

    `sampler_perf` has the means of `perf_stats` (see `StepTimes.means`) over the episodes that have
    them; `connector_metrics` has the mean times of connectors over all policies.

    Args:
        episodes: those of the smoothing window, oldest first.
        new_episodes: how many of them ended in this iteration; all by default.
        keep_custom_metrics: return lists of custom metrics, with one value per episode.

    >>> summary = summarize_episodes([RolloutMetrics(3, 2.0), RolloutMetrics(5, 4.0)])
    >>> summary["episode_reward_mean"], summary["episode_len_mean"], summary["episodes_this_iter"]
    (3.0, 4.0, 2)
    """
    valid = [episode for episode in episodes if not episode.episode_faulty]
    rewards = [episode.episode_reward for episode in valid]
    lengths = [episode.episode_length for episode in valid]
    rewards_by_policy = _collect_by_name(
        {policy_id: reward}
        for episode in valid
        for (_, policy_id), reward in episode.agent_rewards.items()
        if policy_id != DEFAULT_POLICY_ID
    )
    custom_values = _collect_by_name(episode.custom_metrics for episode in valid)
    hist_data = _collect_by_name(episode.hist_data for episode in valid)
    custom = {name: list(map(float, values)) for name, values in custom_values.items()}
    return {
        "episode_reward_max": max(rewards, default=_NAN),
        "episode_reward_min": min(rewards, default=_NAN),
        "episode_reward_mean": float(np.mean(rewards)) if rewards else _NAN,
        "episode_len_mean": float(np.mean(lengths)) if lengths else _NAN,
        "episodes_this_iter": len(episodes) if new_episodes is None else new_episodes,
        "num_faulty_episodes": len(episodes) - len(valid),
        "policy_reward_min": {pid: min(values) for pid, values in rewards_by_policy.items()},
        "policy_reward_max": {pid: max(values) for pid, values in rewards_by_policy.items()},
        "policy_reward_mean": {pid: float(np.mean(x)) for pid, x in rewards_by_policy.items()},
        "custom_metrics": custom if keep_custom_metrics else _summarize_custom(custom),
        "hist_stats": {
            "episode_reward": rewards,
            "episode_lengths": lengths,
            **{f"policy_{pid}_reward": values for pid, values in rewards_by_policy.items()},
            **{name: [*itertools.chain(*lists)] for name, lists in hist_data.items()},
        },
        "sampler_perf": _means(episode.perf_stats for episode in valid),
        "connector_metrics": _means(_connector_times(valid)),
        "episode_media": _collect_by_name(episode.media for episode in valid),
    }


def summarize_recent_returns(episodes: Sequence[RolloutMetrics], steps: int) -> dict[str, float]:
    """Summarizes the returns of the newest episodes that fit into `steps`, at least 5 episodes.

    Args:
        episodes: finished ones, oldest first; faulty ones are ignored.
        steps: maximum number of environment steps of these episodes together.

    Returns:
        `mean`, `std`, `min` and `max` of their returns (NaN without episodes), the number of
        `episodes`, and their total `env_steps`.

    >>> episodes = [RolloutMetrics(200, -float(i)) for i in range(10)]
    >>> recent = summarize_recent_returns(episodes, 1250)
    >>> recent["episodes"], recent["env_steps"], recent["mean"], recent["max"]
    (6, 1200, -6.5, -4.0)
    """
    recent: list[RolloutMetrics] = []
    env_steps = 0
    for episode in reversed([episode for episode in episodes if not episode.episode_faulty]):
        if len(recent) >= MIN_RECENT_EPISODES and env_steps + episode.episode_length > steps:
            break
        recent.append(episode)
        env_steps += episode.episode_length
    returns = [episode.episode_reward for episode in recent]
    return {
        "mean": float(np.mean(returns)) if returns else _NAN,
        "std": float(np.std(returns)) if returns else _NAN,
        "min": min(returns, default=_NAN),
        "max": max(returns, default=_NAN),
        "episodes": len(returns),
        "env_steps": env_steps,
    }


def _connector_times(episodes: Sequence[RolloutMetrics]) -> Iterator[Mapping[str, float]]:
    """Yields the times of each pipeline, of each policy, in each episode."""
    for episode in episodes:
        for pipelines in episode.connector_metrics.values():
            yield from pipelines.values()


def _summarize_custom(custom: Mapping[str, Sequence[float]]) -> dict[str, float]:
    summary = {}
    for name, values in custom.items():
        summary[f"{name}_mean"] = float(np.mean(values))
        summary[f"{name}_min"] = min(values)
        summary[f"{name}_max"] = max(values)
    return summary


def _means(dicts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values_by_name = _collect_by_name(dicts)
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


def _collect_by_name(dicts: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = {}
    for mapping in dicts:
        for name, value in mapping.items():
            result.setdefault(name, []).append(value)
    return result


# -- as plain values, for checkpoints -----------------------------------------------------------


def get_metrics_state(metrics: Sequence[RolloutMetrics]) -> list[list[Any]]:
    """Returns the metrics of episodes as lists, numbers, strings and agent ids.

    Custom metrics and `hist_data` must be numbers, as in summaries. `media` may be anything, so it
    is not included, nor are times.

    >>> state = get_metrics_state([RolloutMetrics(3, 2.0, {("a", "p"): 2.0}), RolloutMetrics(0)])
    >>> restore_metrics(state)[0].agent_rewards
    {('a', 'p'): 2.0}
    """
    return [
        [
            metrics.episode_length,
            float(metrics.episode_reward),
            [[agent, policy_id, x] for (agent, policy_id), x in metrics.agent_rewards.items()],
            {name: float(x) for name, x in metrics.custom_metrics.items()},
            {name: [float(x) for x in values] for name, values in metrics.hist_data.items()},
            metrics.episode_faulty,
        ]
        for metrics in metrics
    ]


def restore_metrics(state: Sequence[Sequence[Any]]) -> list[RolloutMetrics]:
    """Returns the metrics that `get_metrics_state` was called with.

    Lists of older checkpoints end after the reward; the other fields are empty then.
    """
    return [_restore_episode(*values) for values in state]


def _restore_episode(
    length: int,
    reward: float,
    by_agent: Sequence[Any] = (),
    custom_metrics: Mapping[str, float] | None = None,
    hist_data: Mapping[str, list[float]] | None = None,
    faulty: bool = False,
) -> RolloutMetrics:
    return RolloutMetrics(
        length,
        reward,
        {(agent, policy_id): total for agent, policy_id, total in by_agent},
        custom_metrics or {},
        hist_data=hist_data or {},
        episode_faulty=faulty,
    )
