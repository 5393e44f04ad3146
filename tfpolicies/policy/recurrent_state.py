"""State of running episodes: recurrent state, and the earlier steps that views read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.base.type_aliases import ModelState, Structure
from tfpolicies.models.ports import (
    ACTIONS,
    OBS,
    REWARDS,
    ViewInput,
    get_unmasked_leaf_indices,
    make_leaf_ports,
    make_previous_step_views,
)
from tfpolicies.models.spaces import action_leaves

_HISTORY_NAMES = {OBS: "obs_{}", ACTIONS: "action_{}", REWARDS: "rewards"}
"""The names of each column's history in the state of a `RecurrentState`."""


def flatten_states(states: ModelState) -> list[np.ndarray]:
    """Returns the arrays of a recurrent state in order: dicts, at any depth, are sorted by key.

    >>> flatten_states([np.zeros(1), {"b": np.ones(2), "a": np.zeros(3)}])
    [array([0.]), array([0., 0., 0.]), array([1., 1.])]
    """
    parts = [states[key] for key in sorted(states)] if isinstance(states, Mapping) else states
    nested = [flatten_states(x) if isinstance(x, Mapping) else [np.asarray(x)] for x in parts]
    return [array for arrays in nested for array in arrays]


def unflatten_states(structure: ModelState, arrays: Sequence[np.ndarray]) -> Any:
    """Inverts `flatten_states`: returns arrays in the structure of `structure`."""
    remaining = iter(arrays)

    def fill(part: Structure) -> Any:
        if isinstance(part, Mapping):
            return {key: fill(part[key]) for key in sorted(part)}
        return next(remaining)

    return fill(structure) if isinstance(structure, Mapping) else [fill(part) for part in structure]


class RecurrentState:
    """The state that N environments' episodes keep from step to step, for samplers and sessions.

    With several agents, a row belongs to one agent of a running episode, and only some rows act in
    a step.

    Attributes:
        is_needed: whether the policy gets anything from earlier steps.
        has_state: whether its actions depend on earlier steps: by a recurrent state, or by views.
        extra_arguments_fn: returns further arguments of `Acting.act` for the rows that act (None:
            all): infos and episodes; None if the policy reads neither.
    """

    def __init__(self, policy: Any, rows: int) -> None:
        self.policy = policy
        self.driver = policy.driver
        self._initial_row = self._get_initial_state()
        self._states = self._make_initial_states(rows) if self._initial_row else []
        self.extra_arguments_fn: Callable[[Any], Mapping[str, Any]] | None = None
        self._views = tuple(self.driver.acting.input_views)
        following = (view.next_step_view for view in self._views)
        self._following_views = tuple(view for view in following if view is not None)
        self._names = [port.name for view in self._views for port in view.ports]
        self._actions = make_leaf_ports(ACTIONS, action_leaves(policy.action_space))
        self._unmasked_indices = get_unmasked_leaf_indices(policy.observation_space)
        # The last steps of the columns that views read: leaves [rows, steps, ...].
        self._history = self._make_history(rows)
        self.is_needed = bool(self._states) or bool(self._views)
        self.has_state = bool(self._states) or bool(self.driver.acting.views)

    def _make_history(self, rows: int) -> dict[str, list[np.ndarray]]:
        """Returns the history of `rows` rows at the start of their episodes."""
        depths, leaves_by_column = (
            {REWARDS: 1},
            {REWARDS: make_previous_step_views(self.policy.action_space)[1].leaves},
        )
        for view in self._views:
            depths[view.source] = max(depths.get(view.source, 0), view.depth)
            leaves_by_column[view.source] = view.source_leaves
        return {
            name: [np.zeros((rows, depths[name], *x.shape), x.dtype) for x in column_leaves]
            for name, column_leaves in leaves_by_column.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "driver"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, driver=state["policy"].driver)

    def _get_initial_state(self) -> list[np.ndarray]:
        states = flatten_states(self.policy.get_initial_state())
        return [np.asarray(state, np.float32) for state in states]

    def _make_initial_states(self, count: int) -> list[np.ndarray]:
        """Returns the initial states of `count` episodes, which may differ."""
        if self.driver.acting.has_fixed_initial_state:
            return [np.stack([state] * count) for state in self._initial_row]
        initial_states = [self._get_initial_state() for _ in range(count)]
        return [np.stack(states) for states in zip(*initial_states, strict=True)]

    def act(
        self, obs: Sequence[np.ndarray], explore: bool | None = None, rows: np.ndarray | None = None
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Acts on checked observation leaves `[N, ...]` and records the step.

        Args:
            obs: the observations, `[K, ...]` of the rows that act.
            explore: sample or be greedy; None takes the policy's config.
            rows: the rows that act, int `[K]`; None for all N.

        Returns:
            Actions for the environments, and the columns of each row.
        """
        if not self.is_needed:
            result: tuple[Any, dict[str, np.ndarray]] = self.driver.acting.act(obs, explore=explore)
            return result
        view_leaves, states = self.get_inputs(obs, rows)
        extra_arguments = {} if self.extra_arguments_fn is None else self.extra_arguments_fn(rows)
        env_actions, columns = self.driver.acting.act(
            obs, view_leaves, states, explore=explore, **extra_arguments
        )
        return env_actions, self.record_actions(columns, obs, view_leaves, states, rows)

    def get_inputs(
        self, obs: Sequence[np.ndarray], rows: np.ndarray | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the inputs of acting besides the observations `[K, ...]` of the rows that act.

        These are the leaves of the views that the policy reads, and the recurrent state, `[K, ...]`
        each.
        """
        index = slice(None) if rows is None else rows
        view_leaves = [x for view in self._views for x in self._read_view(view, obs, index)]
        return view_leaves, [state[index] for state in self._states]

    def _read_view(
        self, view: ViewInput, obs: Sequence[np.ndarray], index: Any
    ) -> Iterator[np.ndarray]:
        """Yields the leaves of a view, as arrays that later steps do not change."""
        shifts = view.shifts
        for i, history in enumerate(self._history[view.source]):
            if not view.is_window:
                yield (
                    history[index, shifts[0]] if shifts[0] else obs[self._unmasked_indices[i]]
                ).copy()
                continue
            steps, length = history[index], history.shape[1]
            if 0 in shifts:
                steps = np.concatenate([steps, obs[self._unmasked_indices[i]][:, None]], axis=1)
            yield steps.take([shift + length for shift in shifts], axis=1)

    def record_actions(
        self,
        columns: dict[str, np.ndarray],
        obs: Sequence[np.ndarray],
        view_leaves: Sequence[np.ndarray],
        states: Sequence[np.ndarray],
        rows: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Records how rows acted on `obs`; returns the columns, including views and states.

        The reward of a step is 0 until `record_rewards` is called.
        """
        index = slice(None) if rows is None else rows
        new_columns = dict(zip(self._names, view_leaves, strict=True))
        for view in self._following_views:
            new_columns |= zip(
                (p.name for p in view.ports), self._read_view(view, obs, index), strict=True
            )
        new_columns |= {f"state_in_{i}": state for i, state in enumerate(states)}
        if rows is None:  # copies, because returned columns must not change
            self._states = [np.array(columns[f"state_out_{i}"]) for i in range(len(states))]
        else:
            for i, state in enumerate(self._states):
                state[rows] = columns[f"state_out_{i}"]
        for source, arrays in self._history.items():
            for i, history in enumerate(arrays):
                if history.shape[1] > 1:
                    history[index, :-1] = history[index, 1:]
                if source == OBS and history.shape[1]:
                    history[index, -1] = obs[self._unmasked_indices[i]]
                elif source == ACTIONS:
                    history[index, -1] = columns[self._actions[i].name]
                elif source == REWARDS:
                    history[index, -1] = 0.0
        return {**columns, **new_columns}

    def record_rewards(self, rewards: np.ndarray, rows: np.ndarray | None = None) -> None:
        """Records the rewards `[N]` of the last actions; `[K]` with `rows`, int `[K]`."""
        self._history[REWARDS][0][slice(None) if rows is None else rows, -1] = rewards

    @property
    def num_rows(self) -> int:
        return len(self._history[REWARDS][0])

    def grow(self, rows: int) -> None:
        """Extends to `rows` rows; the new ones are at the start of their episodes."""
        num_new = rows - self.num_rows
        if self._states and num_new > 0:
            pairs = zip(self._states, self._make_initial_states(num_new), strict=True)
            self._states = [np.concatenate(pair) for pair in pairs]
        for source, new_history in self._make_history(num_new).items():
            pairs = zip(self._history[source], new_history, strict=True)
            self._history[source] = [np.concatenate(pair) for pair in pairs]

    def record_step(
        self, rewards: np.ndarray, ended: np.ndarray, reset_only: np.ndarray | None
    ) -> None:
        """Records the results of an environment step.

        Args:
            rewards: `[N]`.
            ended: bool `[N]`: the episode ended in this step.
            reset_only: bool `[N]`: the environment was only reset in it; None if none was.
        """
        self.record_rewards(rewards)
        is_new_episode = ended if reset_only is None else ended | reset_only
        if is_new_episode.any():
            self.reset(is_new_episode)

    def reset(self, rows: np.ndarray | Sequence[int]) -> None:
        """Starts new episodes in the environments of a bool or index array."""
        count = len(self._history[REWARDS][0][rows])
        if self._states and count:
            for array, start in zip(self._states, self._make_initial_states(count), strict=True):
                array[rows] = start
        for arrays in self._history.values():
            for history in arrays:
                history[rows] = 0

    def get_state(self) -> dict[str, np.ndarray]:
        named_states = {f"state_{i}": x.copy() for i, x in enumerate(self._states)}
        return named_states | {name: x.copy() for name, x in self._iter_history()}

    def _iter_history(self) -> Iterator[tuple[str, np.ndarray]]:
        for source, arrays in self._history.items():
            for i, history in enumerate(arrays):
                yield _HISTORY_NAMES[source].format(i), history

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        self._states = [np.array(state[f"state_{i}"]) for i in range(len(self._states))]
        for name, history in self._iter_history():
            if name in state:  # older states lack history that was not read
                history[...] = state[name].reshape(history.shape)
