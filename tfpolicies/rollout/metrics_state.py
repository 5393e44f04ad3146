"""What is reported of episodes as plain values, so that a checkpoint can hold it, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfpolicies.rollout.episode import RolloutMetrics


def metrics_state(metrics: Sequence[RolloutMetrics]) -> list[list[Any]]:
    """Returns what was reported of episodes as lists, numbers, texts and agent ids.

    Custom metrics and `hist_data` must be numbers, as they are for summaries; `media` may be
    anything and is left out, and so are times.

    >>> state = metrics_state([RolloutMetrics(3, 2.0, {("a", "p"): 2.0}), RolloutMetrics(0)])
    >>> restored_metrics(state)[0].agent_rewards
    {('a', 'p'): 2.0}
    """
    return [
        [
            metrics.episode_length,
            float(metrics.episode_reward),
            [[agent, policy_id, x] for (agent, policy_id), x in metrics.agent_rewards.items()],
            {name: float(x) for name, x in metrics.custom_metrics.items()},
            {name: [float(x) for x in found] for name, found in metrics.hist_data.items()},
            metrics.episode_faulty,
        ]
        for metrics in metrics
    ]


def restored_metrics(state: Sequence[Sequence[Any]]) -> list[RolloutMetrics]:
    """Returns the metrics that `metrics_state` was called on.

    Lists may end after the reward, as those of older checkpoints do; the rest is empty then.
    """
    return [_restored(*values) for values in state]


def _restored(
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
