"""State of running episodes: recurrent state, and the earlier steps that views read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.models.ports import (
    ACTIONS,
    OBS,
    REWARDS,
    View,
    leaf_ports,
    plain_leaves,
    previous,
)
from tfpolicies.models.spaces import action_leaves
from tfpolicies.type_aliases import Memory, Structure

_STATE_NAMES = {OBS: "obs_{}", ACTIONS: "action_{}", REWARDS: "rewards"}
"""The names of each column's history in the state of a `RecurrentState`."""


def flatten_memory(memory: Memory) -> list[np.ndarray]:
    """Returns the arrays of a recurrent state in order: dicts, at any depth, are sorted by key.

    >>> flatten_memory([np.zeros(1), {"b": np.ones(2), "a": np.zeros(3)}])
    [array([0.]), array([0., 0., 0.]), array([1., 1.])]
    """
    parts = [memory[key] for key in sorted(memory)] if isinstance(memory, Mapping) else memory
    nested = [flatten_memory(x) if isinstance(x, Mapping) else [np.asarray(x)] for x in parts]
    return [array for arrays in nested for array in arrays]


def unflatten_memory(form: Memory, arrays: Sequence[np.ndarray]) -> Any:
    """Inverts `flatten_memory`: returns arrays in the structure of `structure`."""
    remaining = iter(arrays)

    def fill(part: Structure) -> Any:
        if isinstance(part, Mapping):
            return {key: fill(part[key]) for key in sorted(part)}
        return next(remaining)

    return fill(form) if isinstance(form, Mapping) else [fill(part) for part in form]


class RecurrentState:
    """The state that N environments' episodes keep from step to step, for samplers and sessions.

    With several agents, a row belongs to one agent of a running episode, and only some rows act in
    a step.

    Attributes:
        is_needed: whether the policy gets anything from earlier steps.
        has_state: whether its actions depend on earlier steps: by a recurrent state, or by views.
        extra_arguments_fn: returns further arguments of `Acting.act` for the rows that act (None: all):
            infos and episodes; None if the policy reads neither.
    """

    def __init__(self, policy: Any, rows: int) -> None:
        self.policy = policy
        self.driver = policy.driver
        self._start = self._initial_state()
        self._states = self._starts(rows) if self._start else []
        self.around: Callable[[Any], Mapping[str, Any]] | None = None
        self._views = tuple(self.driver.acting.input_views)
        later = (view.following for view in self._views)
        self._later = tuple(view for view in later if view is not None)
        self._names = [port.name for view in self._views for port in view.ports]
        self._actions = leaf_ports(ACTIONS, action_leaves(policy.action_space))
        self._plain = plain_leaves(policy.observation_space)
        # The last steps of the columns that views read: leaves [rows, steps, ...].
        self._past = self._zeros(rows)
        self.is_needed = bool(self._states) or bool(self._views)
        self.has_state = bool(self._states) or bool(self.driver.acting.views)

    def _zeros(self, rows: int) -> dict[str, list[np.ndarray]]:
        """Returns the history of `rows` rows at the start of their episodes."""
        depths, leaves_of = {REWARDS: 1}, {REWARDS: previous(self.policy.action_space)[1].leaves}
        for view in self._views:
            depths[view.source] = max(depths.get(view.source, 0), view.depth)
            leaves_of[view.source] = view.source_leaves
        return {
            name: [np.zeros((rows, depths[name], *x.shape), x.dtype) for x in found]
            for name, found in leaves_of.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "driver"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, driver=state["policy"].driver)

    def _initial_state(self) -> list[np.ndarray]:
        memory = flatten_memory(self.policy.get_initial_state())
        return [np.asarray(state, np.float32) for state in memory]

    def _starts(self, count: int) -> list[np.ndarray]:
        """Returns the initial states of `count` episodes, which may differ."""
        if self.driver.acting.has_fixed_initial_state:
            return [np.stack([state] * count) for state in self._start]
        asked = [self._initial_state() for _ in range(count)]
        return [np.stack(states) for states in zip(*asked, strict=True)]

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
            acted: tuple[Any, dict[str, np.ndarray]] = self.driver.acting.act(obs, explore=explore)
            return acted
        seen, states = self.inputs(obs, rows)
        more = {} if self.around is None else self.around(rows)
        for_env, columns = self.driver.acting.act(obs, seen, states, explore=explore, **more)
        return for_env, self.remember(columns, obs, seen, states, rows)

    def inputs(
        self, obs: Sequence[np.ndarray], rows: np.ndarray | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns the inputs of acting besides the observations `[K, ...]` of the rows that act.

        These are the leaves of the views that the policy reads, and the recurrent state, `[K, ...]`
        each.
        """
        chosen = slice(None) if rows is None else rows
        seen = [x for view in self._views for x in self._viewed(view, obs, chosen)]
        return seen, [state[chosen] for state in self._states]

    def _viewed(self, view: View, obs: Sequence[np.ndarray], chosen: Any) -> Iterator[np.ndarray]:
        """Yields the leaves of a view, as arrays that later steps do not change."""
        shifts = view.shifts
        for i, past in enumerate(self._past[view.source]):
            if not view.is_window:
                yield (past[chosen, shifts[0]] if shifts[0] else obs[self._plain[i]]).copy()
                continue
            steps, now = past[chosen], past.shape[1]
            if 0 in shifts:
                steps = np.concatenate([steps, obs[self._plain[i]][:, None]], axis=1)
            yield steps.take([shift + now for shift in shifts], axis=1)

    def remember(
        self,
        columns: dict[str, np.ndarray],
        obs: Sequence[np.ndarray],
        seen: Sequence[np.ndarray],
        states: Sequence[np.ndarray],
        rows: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Records how rows acted on `obs`; returns the columns, including views and states.

        The reward of a step is 0 until `rewarded` is called.
        """
        chosen = slice(None) if rows is None else rows
        kept = dict(zip(self._names, seen, strict=True))
        for view in self._later:
            kept |= zip((p.name for p in view.ports), self._viewed(view, obs, chosen), strict=True)
        kept |= {f"state_in_{i}": state for i, state in enumerate(states)}
        if rows is None:  # copies, because returned columns must not change
            self._states = [np.array(columns[f"state_out_{i}"]) for i in range(len(states))]
        else:
            for i, state in enumerate(self._states):
                state[rows] = columns[f"state_out_{i}"]
        for source, arrays in self._past.items():
            for i, past in enumerate(arrays):
                if past.shape[1] > 1:
                    past[chosen, :-1] = past[chosen, 1:]
                if source == OBS and past.shape[1]:
                    past[chosen, -1] = obs[self._plain[i]]
                elif source == ACTIONS:
                    past[chosen, -1] = columns[self._actions[i].name]
                elif source == REWARDS:
                    past[chosen, -1] = 0.0
        return {**columns, **kept}

    def rewarded(self, rewards: np.ndarray, rows: np.ndarray | None = None) -> None:
        """Records the rewards `[N]` of the last actions; `[K]` with `rows`, int `[K]`."""
        self._past[REWARDS][0][slice(None) if rows is None else rows, -1] = rewards

    @property
    def num_rows(self) -> int:
        """Number of rows, N."""
        return len(self._past[REWARDS][0])

    def grow(self, rows: int) -> None:
        """Extends to `rows` rows; the new ones are at the start of their episodes."""
        more = rows - self.num_rows
        if self._states and more > 0:
            pairs = zip(self._states, self._starts(more), strict=True)
            self._states = [np.concatenate(pair) for pair in pairs]
        for source, fresh in self._zeros(more).items():
            pairs = zip(self._past[source], fresh, strict=True)
            self._past[source] = [np.concatenate(pair) for pair in pairs]

    def stepped(self, rewards: np.ndarray, ended: np.ndarray, dead: np.ndarray | None) -> None:
        """Records the results of an environment step.

        Args:
            rewards: `[N]`.
            ended: bool `[N]`: the episode ended in this step.
            reset_only: bool `[N]`: the environment was only reset in it; None if none was.
        """
        self.rewarded(rewards)
        begun = ended if dead is None else ended | dead
        if begun.any():
            self.forget(begun)

    def forget(self, rows: np.ndarray | Sequence[int]) -> None:
        """Starts new episodes in the environments of a bool or index array."""
        count = len(self._past[REWARDS][0][rows])
        if self._states and count:
            for array, start in zip(self._states, self._starts(count), strict=True):
                array[rows] = start
        for arrays in self._past.values():
            for past in arrays:
                past[rows] = 0

    def get_state(self) -> dict[str, np.ndarray]:
        """Returns copies of all arrays, by name."""
        named = {f"state_{i}": x.copy() for i, x in enumerate(self._states)}
        return named | {name: x.copy() for name, x in self._named_past()}

    def _named_past(self) -> Iterator[tuple[str, np.ndarray]]:
        for source, arrays in self._past.items():
            for i, past in enumerate(arrays):
                yield _STATE_NAMES[source].format(i), past

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restores a state from `get_state`."""
        self._states = [np.array(state[f"state_{i}"]) for i in range(len(self._states))]
        for name, past in self._named_past():
            if name in state:  # older states lack history that was not read
                past[...] = state[name].reshape(past.shape)
