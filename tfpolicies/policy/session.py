"""Acting by hand, step by step: an object that keeps what the policy must remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.batch.leaves import first_row, with_batch_axis
from tfpolicies.errors import ObservationError
from tfpolicies.finite import is_finite
from tfpolicies.models.ports import action_ports
from tfpolicies.models.spaces import action_leaves, batch_leaves, leaves, numbers
from tfpolicies.policy.by_methods import memory_leaves
from tfpolicies.policy.input_check import InputCheck


class Session:
    """Acts in one environment, or in B of them, and keeps memory, previous actions and rewards.

    A policy without a memory can be used in the same way, so code that plays need not know.

    Args:
        policy: acts.
        batch_size: how many environments act together; None for one, without a batch axis.
    """

    def __init__(self, policy: Any, batch_size: int | None = None) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self._leaves = leaves(policy.observation_space)
        self._check = InputCheck(policy.observation_space, policy.action_space).check
        self.reset()

    def reset(self, rows: Any = None) -> None:
        """Starts new episodes: everywhere, or in the environments of a bool or index array."""
        if rows is None:
            self.memory = Memory(self.policy, self.batch_size or 1)
        else:
            self.memory.forget(rows)

    def act(self, obs: Any, reward: Any = None, explore: bool | None = None) -> Any:
        """Returns the action for an observation, ready for the environment.

        Args:
            obs: one observation, or a batch `[B, ...]` with a batch size.
            reward: what the last action earned, a number or `[B]`; for models that read it.
            explore: sample or be greedy; None takes the policy's config.

        Raises:
            ObservationError: if the observation does not fit the space, has NaN or infinity, or a
                mask that allows no action (see `debugging(check_inputs=...)`).
        """
        single = self.batch_size is None
        batch = with_batch_axis(obs) if single else obs
        found = batch_leaves(self._leaves, batch, "obs")
        earned = None if reward is None else numbers(reward, "reward").reshape(-1)
        if self.policy.config.get("check_inputs", True):
            self._check(found)
            if earned is not None and not is_finite(earned):
                raise ObservationError(f"The reward must be finite, got {reward!r:.200}.")
        if earned is not None:
            self.memory.rewarded(earned)
        actions, _ = self.memory.act(found, explore)
        return first_row(actions) if single else actions


class Memory:
    """What N environments' episodes carry from step to step; the samplers' side of a `Session`.

    With several agents, a row belongs to one agent of a running episode, and some rows act in a
    step while others wait.

    Attributes:
        is_needed: whether the policy remembers anything at all.
        around: returns further arguments of `Acting.columns` for the rows that act (None: all):
            infos and episodes; None where the policy asks for neither.
    """

    def __init__(self, policy: Any, rows: int) -> None:
        self.policy = policy
        self.acting = policy.acting
        self._start = self._asked()
        self._states = self._starts(rows) if self._start else []
        self.around: Callable[[Any], Mapping[str, Any]] | None = None
        self._reads_actions, self._reads_rewards = self.acting.given
        read = action_leaves(policy.action_space) if self._reads_actions else ()
        self._names = [port.name for port in action_ports("actions", read)]
        self._actions = [np.zeros((rows, *leaf.shape), leaf.dtype) for leaf in read]
        self._rewards = np.zeros(rows, np.float32)
        self.is_needed = bool(self._states) or self._reads_actions or self._reads_rewards

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "acting"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, acting=state["policy"].acting)

    def _asked(self) -> list[np.ndarray]:
        found = memory_leaves(self.policy.get_initial_state())
        return [np.asarray(state, np.float32) for state in found]

    def _starts(self, count: int) -> list[np.ndarray]:
        """Returns the memory at the start of `count` episodes, which may begin differently."""
        if self.acting.starts_alike:
            return [np.stack([state] * count) for state in self._start]
        asked = [self._asked() for _ in range(count)]
        return [np.stack(states) for states in zip(*asked, strict=True)]

    def act(
        self, obs: Sequence[np.ndarray], explore: bool | None = None, rows: Any = None
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Acts on checked observation leaves `[N, ...]` and remembers.

        Args:
            obs: the observations, `[K, ...]` of those that act.
            explore: sample or be greedy; None takes the policy's config.
            rows: which rows act, int `[K]`; None for all N.

        Returns:
            Actions for the environments, and the columns to keep of each row.
        """
        if not self.is_needed:
            return self.acting.columns(obs, explore=explore)
        previous, states = self.inputs(rows)
        more = {} if self.around is None else self.around(rows)
        for_env, columns = self.acting.columns(obs, previous, states, explore=explore, **more)
        return for_env, self.remember(columns, previous, states, rows)

    def inputs(self, rows: Any = None) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns what acting reads besides the observations, of the rows that act.

        That is the leaves of the previous actions and the previous rewards, as far as the policy
        reads them, and the memory; `[K, ...]` each.
        """
        chosen = slice(None) if rows is None else rows
        previous = [x[chosen] for x in self._actions] if self._reads_actions else []
        previous += [self._rewards[chosen]] if self._reads_rewards else []
        return previous, [state[chosen] for state in self._states]

    def remember(
        self,
        columns: dict[str, np.ndarray],
        previous: Sequence[np.ndarray],
        states: Sequence[np.ndarray],
        rows: Any = None,
    ) -> dict[str, np.ndarray]:
        """Takes down how rows acted; returns the columns to keep, with what `inputs` gave."""
        kept = {f"prev_{name}": x for name, x in zip(self._names, previous, strict=False)}
        if self._reads_rewards:
            kept["prev_rewards"] = previous[-1]
        kept |= {f"state_in_{i}": state for i, state in enumerate(states)}
        if rows is None:  # the columns that were handed out must not change
            self._states = [np.array(columns[f"state_out_{i}"]) for i in range(len(states))]
            self._actions = [np.array(columns[name]) for name in self._names]
        else:
            for i, state in enumerate(self._states):
                state[rows] = columns[f"state_out_{i}"]
            for name, array in zip(self._names, self._actions, strict=True):
                array[rows] = columns[name]
        return {**columns, **kept}

    def rewarded(self, rewards: np.ndarray, rows: Any = None) -> None:
        """Takes down the rewards `[N]` of the last actions; `[K]` of the rows given, int `[K]`."""
        if rows is None:
            self._rewards = np.array(rewards, np.float32)
        else:
            self._rewards[rows] = rewards

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self._rewards)

    def grow(self, rows: int) -> None:
        """Makes room for `rows` rows in all; the new ones are at the start of their episodes."""
        more = rows - len(self._rewards)
        if self._states and more > 0:
            pairs = zip(self._states, self._starts(more), strict=True)
            self._states = [np.concatenate(pair) for pair in pairs]
        self._actions = [
            np.concatenate([x, np.zeros((more, *x.shape[1:]), x.dtype)]) for x in self._actions
        ]
        self._rewards = np.concatenate([self._rewards, np.zeros(more, np.float32)])

    def stepped(self, rewards: np.ndarray, ended: np.ndarray, dead: np.ndarray | None) -> None:
        """Takes down what a step of the environments gave.

        Args:
            rewards: `[N]`.
            ended: bool `[N]`: the episode ended in this step.
            dead: bool `[N]`: the environment was only reset in it; None if none was.
        """
        self.rewarded(rewards)
        self.forget(ended if dead is None else ended | dead)

    def forget(self, rows: Any) -> None:
        """Starts new episodes in the environments of a bool or index array."""
        count = len(self._rewards[rows])
        if self._states and count:
            for array, start in zip(self._states, self._starts(count), strict=True):
                array[rows] = start
        for array in (*self._actions, self._rewards):
            array[rows] = 0

    def get_state(self) -> dict[str, np.ndarray]:
        """Returns everything that is remembered, as copies, by name."""
        named = {f"state_{i}": x for i, x in enumerate(self._states)}
        named |= {f"action_{i}": x for i, x in enumerate(self._actions)}
        named["rewards"] = self._rewards
        return {name: array.copy() for name, array in named.items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restores what `get_state` returned."""
        self._states = [np.array(state[f"state_{i}"]) for i in range(len(self._states))]
        named = enumerate(self._actions)  # older states lack what is not read of the past
        self._actions = [np.array(state.get(f"action_{i}", x)) for i, x in named]
        self._rewards = np.array(state["rewards"])
