"""Acting in one call: actions for the environment, greedy unless exploration is requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.leaves import split_rows
from tfpolicies.errors import UsageError, show_value
from tfpolicies.models.spaces import Leaf, get_at_path, leaves
from tfpolicies.policy.policy_session import PolicySession
from tfpolicies.policy.recurrent_state import RecurrentState


def predict(
    policy: Any,
    obs: Structure,
    state: Structure | None = None,
    *,
    reward: Structure | None = None,
    explore: bool | None = False,
    batched: bool | None = None,
) -> Any:
    agent_connectors, action_connectors = policy.agent_connectors, policy.action_connectors
    changes_observations = any(
        connector.changes_observations for connector in agent_connectors or ()
    )
    acting = policy.driver.acting.stackable
    is_plain = acting is not None and acting.reader.reads_obs_only and state is reward is None
    if batched is None:
        if changes_observations:
            raise UsageError(
                "predict cannot distinguish one observation from a batch, because connectors "
                "change observations. Give batched=False or batched=True."
            )
        space_leaves = acting.reader.obs_leaves if is_plain else leaves(policy.observation_space)
        batched = _is_batch(space_leaves, obs)
    if is_plain and not (
        agent_connectors or action_connectors
    ):  # no state to keep: faster than a session
        return acting.predict(obs, batched=batched, explore=explore)
    rows = split_rows(obs) if changes_observations and batched else [obs]
    if changes_observations:
        rows = [agent_connectors.transform_observation(row) for row in rows]
        obs = _stack(rows) if batched else rows[0]
    session = PolicySession(policy, _count_rows(policy, obs) if batched else None, explore=explore)
    if state is not None:
        _restore_state(session.recurrent_state, state)
    result = session.act(obs, reward)
    if action_connectors:
        env_actions = [
            action_connectors.transform_action(row)
            for row in (split_rows(result) if batched else [result])
        ]
        result = _stack(env_actions) if batched else env_actions[0]
    return (
        (result, session.recurrent_state.get_state())
        if session.recurrent_state.has_state
        else result
    )


def _is_batch(space_leaves: Sequence[Leaf], obs: Structure) -> bool:
    """Whether an observation has a leading axis that its space lacks."""
    try:
        part = get_at_path(obs, space_leaves[0].path)
    except (KeyError, IndexError, TypeError, ValueError):
        return True  # rows in a list, or a misfit, which acting refuses
    return np.ndim(part) > len(space_leaves[0].shape)


def _count_rows(policy: Any, obs: Structure) -> int:
    """Returns the rows of a batch; 1 for one that acting will refuse."""
    path = leaves(policy.observation_space)[0].path
    try:
        return len(get_at_path(obs, path))
    except (KeyError, IndexError, TypeError, ValueError):
        return 1


def _stack(rows: Sequence[Any]) -> Any:
    if isinstance(rows[0], Mapping):
        return {key: _stack([row[key] for row in rows]) for key in rows[0]}
    if isinstance(rows[0], tuple):
        return tuple(_stack(parts) for parts in zip(*rows, strict=True))
    return np.stack([np.asarray(row) for row in rows])


def _restore_state(recurrent_state: RecurrentState, state: Any) -> None:
    """Sets a recurrent state from `predict` or `get_initial_state`, after checking its shapes."""
    expected = recurrent_state.get_state()
    if isinstance(state, Sequence) and not isinstance(state, str):
        initial = {name: x for name, x in expected.items() if name.startswith("state_")}
        named_states = {f"state_{i}": x for i, x in enumerate(state)}
        if named_states.keys() == initial.keys() and all(
            np.shape(named_states[name]) in (x.shape, x.shape[1:]) for name, x in initial.items()
        ):
            state = expected | {
                n: np.broadcast_to(x, expected[n].shape) for n, x in named_states.items()
            }
    shapes = {name: x.shape for name, x in expected.items()}
    actual_shapes = (
        {n: np.shape(x) for n, x in state.items()} if isinstance(state, Mapping) else None
    )
    if actual_shapes != shapes:
        raise UsageError(
            "state must be the state that the last call of predict returned, for as many rows, or "
            f"get_initial_state(): arrays of the shapes {shapes}, got "
            f"{show_value(state if actual_shapes is None else actual_shapes)}. Give None when "
            "episodes begin."
        )
    recurrent_state.set_state(
        {name: np.array(x, expected[name].dtype) for name, x in state.items()}
    )
