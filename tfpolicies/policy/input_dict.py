"""Input dicts: the inputs of acting by column name, for one row or a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpolicies.base.type_aliases import ModelState, Structure
from tfpolicies.batch.leaves import expand_batch_axis
from tfpolicies.errors import UsageError


def name_states(states: ModelState) -> dict[str, Any]:
    """Returns a recurrent state by its column names in an input dict."""
    if isinstance(states, Mapping):
        return {"state_in": states}
    return {f"state_in_{i}": part for i, part in enumerate(states)}


def read_states(input_dict: Mapping[str, Any]) -> Any:
    """Returns the recurrent state in an input dict: a list or dict of arrays, or None."""
    names = [name for name in input_dict if name.startswith("state_in_")]
    names.sort(key=lambda name: int(name.removeprefix("state_in_")))
    return input_dict.get("state_in") or [input_dict[name] for name in names] or None


def make_row(
    obs: Structure | None,
    state: ModelState | None = None,
    prev_action: Structure | None = None,
    prev_reward: Structure | None = None,
    info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the input dict of one row, without a batch axis."""
    if obs is None:
        raise UsageError("compute_single_action needs obs or input_dict; both are missing.")
    columns = {"obs": obs, "prev_actions": prev_action, "prev_rewards": prev_reward, "infos": info}
    given_columns = {name: value for name, value in columns.items() if value is not None}
    return given_columns | name_states([] if state is None else state)


def add_batch_axis(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the input dict of a batch of one row.

    >>> add_batch_axis({"obs": 3, "seq_lens": [1]})
    {'obs': array([3]), 'seq_lens': [1]}
    """
    return {
        name: value if name == "seq_lens" else expand_batch_axis(value)
        for name, value in row.items()
    }
