"""Methods of episodes that ported callbacks use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tfpolicies.envs.multi_agent_env import ALL
from tfpolicies.errors import UsageError
from tfpolicies.policy.recurrent_state import flatten_states
from tfpolicies.rollout.episode import SINGLE_AGENT, Episode


def prev_action_for(episode: Episode, agent_id: Any = SINGLE_AGENT) -> Any:
    """Returns an agent's action before the last one, in the environment's units; None if none."""
    return _require_records(episode)._prev_actions.get(agent_id)


def prev_reward_for(episode: Episode, agent_id: Any = SINGLE_AGENT) -> float:
    """Returns an agent's reward before its last one; 0 if there is none."""
    return float(_require_records(episode)._prev_rewards.get(agent_id, 0.0))


def last_terminated_for(episode: Episode, agent_id: Any = SINGLE_AGENT) -> bool:
    """Returns whether the environment terminated an agent, or the episode for all."""
    ends = _require_records(episode)._terminateds
    return bool(ends.get(agent_id) or ends.get(ALL))


def last_truncated_for(episode: Episode, agent_id: Any = SINGLE_AGENT) -> bool:
    """Returns whether the environment truncated an agent, or the episode for all."""
    ends = _require_records(episode)._truncateds
    return bool(ends.get(agent_id) or ends.get(ALL))


def rnn_state_for(episode: Episode, agent_id: Any = SINGLE_AGENT) -> list[np.ndarray]:
    """Returns the recurrent state after an agent's last action, one array per state, without rows.

    Before its first action it is the initial state; `[]` if the policy has none.
    """
    if agent_id not in _require_records(episode)._acted:
        return flatten_states(_get_policy(episode, agent_id).get_initial_state())
    columns, row = episode._acted[agent_id]
    return [x[row] for name, x in columns.items() if name.startswith("state_out_")]


def last_extra_action_outs_for(
    episode: Episode, agent_id: Any = SINGLE_AGENT
) -> dict[str, np.ndarray]:
    """Returns further outputs of an agent's last action, such as `action_logp`; `{}` before it."""
    if agent_id not in _require_records(episode)._acted:
        return {}
    columns, row = episode._acted[agent_id]
    input_views = _get_policy(episode, agent_id).driver.acting.input_views
    views = [
        candidate
        for view in input_views
        for candidate in (view, view.next_step_view)
        if candidate is not None
    ]
    inputs = {port.name for view in views for port in view.ports}
    outputs = {
        name: column[row]
        for name, column in columns.items()
        if name not in inputs and not name.startswith(("actions", "state_"))
    }
    return (
        {"action_prob": np.exp(outputs["action_logp"]), **outputs}
        if "action_logp" in outputs
        else outputs
    )


EPISODE_METHODS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(prev_action_for, prev_reward_for, last_terminated_for, last_truncated_for),
        *(rnn_state_for, last_extra_action_outs_for),
    )
}
"""Methods of episodes for ported code, by name."""


def _get_policy(episode: Episode, agent_id: Any) -> Any:
    return episode.worker.policy_map[episode.policy_for(agent_id)]


def _require_records(episode: Episode) -> Episode:
    """Returns an episode whose agents' steps were recorded."""
    if episode.length and not episode._acted:
        raise UsageError(
            f"This episode of {episode.length} steps has no records of its agents, since no "
            "callback uses episodes. Override on_episode_step, even by one that does nothing; or "
            "read the columns of the batch."
        )
    return episode
