"""The parts of policies with a Program, beside `acting.ProgramActing`: views on such a policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.errors import UsageError
from tfpolicies.policy import by_methods
from tfpolicies.state import ACTING


class OverriddenActing(by_methods.ActingByMethods):
    """Acts by the methods that a subclass has of its own; the Program filters and maps actions."""

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        inner = policy._acting
        self.views, self.starts_alike = inner.views, inner.starts_alike
        self.follows_episodes = inner.follows_episodes

    @property
    def inference(self) -> str:
        """The runtime that acts where the methods call those of `TFPolicy`."""
        return self._policy._acting.inference

    def to_env(self, actions: Sequence[np.ndarray], **how: Any) -> list[np.ndarray]:
        """Returns leaves of normalised actions as the environment takes them."""
        return list(self._policy._acting.to_env(actions, **how))

    def next_episode(self) -> None:
        """Tells the exploration that an episode ended and the next one begins."""
        self._policy._acting.next_episode()


_KEPT = ("agent_connectors", "action_connectors", "_views")


class ProgramHolding(by_methods.HoldingByMethods):
    """Takes care of a policy's state; see `parts.Holding`.

    Args:
        policy: whose state it is.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self.state = policy._state
        self.program = policy.program
        self.automatic = policy.automatic

    @property
    def version(self) -> Any:
        """What is equal as long as the numbers are; None where weights are methods' affair."""
        if not self._policy._overridden.isdisjoint(by_methods.WEIGHTS):
            return None
        return id(self.state), self.state.version, self.state.hyper.tobytes()

    @property
    def is_frozen(self) -> bool:
        """Whether the policy only acts."""
        return self.state.frozen_as is not None

    @property
    def generator(self) -> np.random.Generator:
        """The generator that draws action noise; see `parts.Holding`."""
        self.state.settle()
        generator: np.random.Generator = self.state.rng
        return generator

    def acting_weights(self) -> Mapping[str, np.ndarray] | None:
        """Returns the weights of the network that acts, if there are more and sampling is ours."""
        policy = self._policy
        if len(self.program.layout.networks) == 1 or policy.learning.by_trajectory:
            return None
        if not policy._overridden.isdisjoint((*by_methods.WEIGHTS, *by_methods.ACTING)):
            return None
        weights: Mapping[str, np.ndarray] = self.state.copy_of("model")
        return weights

    def apply_filters(self) -> None:
        """Acts and learns with the filters' present statistics; call it after a change."""
        observed = self._policy.filter
        if observed is not None:
            self._policy._owned.apply_filter(observed)

    @contextlib.contextmanager
    def accepting_non_finite(self) -> Iterator[None]:
        """Has `set_weights` and `set_state` take NaN and infinity for a while."""
        policy = self._policy
        before, policy._accepts_non_finite = policy._accepts_non_finite, True
        try:
            yield
        finally:
            policy._accepts_non_finite = before

    def require_changeable(self) -> None:
        """Raises a `FrozenPolicyError` if the policy is frozen."""
        self.state.require_changeable()

    def hyper(self, name: str) -> float:
        """Returns the value in force of a hyper-parameter; see `TFPolicy.hyper`."""
        return float(self._policy.hyper(name))

    def set_hyper(self, name: str, value: float | None) -> None:
        """Sets a hyper-parameter of this policy alone; see `TFPolicy.set_hyper`."""
        self._policy.set_hyper(name, value)

    def take_over(self, other: Any) -> None:
        """Takes over weights, filter and time step of a policy with such a model.

        Raises:
            UsageError: if the other has another model; nothing is changed then.
        """
        policy, theirs = self._policy, other.holding
        if theirs.program is None or not self._has_variables_like(theirs.program):
            raise UsageError(f"{policy!r} cannot act like {other!r}, which is of another kind.")
        layout, parts = self.program.layout, ACTING
        if all(layout.of(x) == theirs.program.layout.of(x) for x in layout.networks):
            parts = (*layout.networks, "filter")
        with theirs.state.lock:
            arrays = theirs.state.copy_of(*parts)
        with self.state.changing():
            self.state.write(arrays)
            self.state.follow(1.0, parts)
        self.state.global_timestep = other.global_timestep
        if not policy._overridden.isdisjoint(by_methods.WEIGHTS):
            policy.set_weights(other.get_weights())
        self._take_over_filters(theirs)

    def _has_variables_like(self, other: Any) -> bool:
        mine = self.program
        return mine is other or all(mine.layout.of(x) == other.layout.of(x) for x in ACTING)

    def twin(self, state: Any) -> Any:
        """Returns another policy of the class, made of a state of `get_state`."""
        return type(self._policy).from_state(state)

    def changed_copy(self, policy_id: str, changes: Mapping[str, Any], *, anew: bool) -> Any:
        """Returns a copy with other settings; see `parts.Holding.changed_copy`."""
        twin = super().changed_copy(policy_id, changes, anew=anew)
        if not anew:
            return twin
        policy = self._policy
        config = {**policy.config, **changes, "__policy_id": policy_id}
        made = type(policy)(*self.spaces, config)
        made.holding.take_over(policy)
        for name, value in vars(twin).items():
            if name in _KEPT or not hasattr(made, name):
                setattr(made, name, value)
        return made
