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


<<<<<<< HEAD
_KEPT = ("agent_connectors", "action_connectors", "_views")
=======
class ProgramLearning(by_methods.LearningByMethods):
    """Lets a policy learn by its Program; see `parts.Learning`.

    Args:
        policy: whose state learns.
    """

    @property
    def finds_non_finite(self) -> bool:
        """Whether the Program does all updates of `learn_on_batch`."""
        return "learn_on_batch" not in self._policy._overridden

    @property
    def compiled_as(self) -> str:
        """How updates are compiled, in words; "tf.function" before that was decided."""
        return (self._policy.program.updates.form or Form.PLAIN).value

    def columns(self, batch: Mapping[str, Any]) -> list[str]:
        """Returns the columns that the loss reads; all but infos where methods of its own learn."""
        if self._policy._overridden.isdisjoint((*by_methods.UPDATING, *by_methods.LOADING)):
            self.prepare()
            return list(self._policy.program.updates.signature.columns)
        return super().columns(batch)

    def train(
        self,
        batch: Any,
        num_epochs: int,
        minibatch_size: int,
        *,
        shuffle: bool = True,
        standardize: Collection[str] = (),
    ) -> Mapping[str, Any]:
        """Standardizes columns as far as the batch has them, then calls `learn_epochs`."""
        for name in standardize:
            if name in batch:
                batch[name] = standardized(batch[name])
        return self.update(batch, num_epochs, minibatch_size, shuffle=shuffle)

    def update(
        self,
        batch: Any,
        num_epochs: int,
        minibatch_size: int,
        *,
        shuffle: bool = True,
        rng: np.random.Generator | None = None,
    ) -> dict[str, Any]:
        """Calls `learn_epochs`; the policy's own generator shuffles."""
        del rng
        result: dict[str, Any] = self._policy.learn_epochs(
            batch, num_epochs, minibatch_size, shuffle=shuffle
        )
        return result

    def replay(self, batch: Any, minibatch_size: int, follows: np.ndarray) -> Mapping[str, Any]:
        """Updates by replayed rows in one compiled call, in which target networks move, too."""
        policy = self._policy
        by_hand = policy._overridden & {*by_methods.UPDATING, *by_methods.LOADING, "learn_epochs"}
        kind = type(policy)
        moves = getattr(kind, "update_target", None)
        if by_hand or moves is not kind._moves_target or policy._learning.sees_minibatches():
            return super().replay(batch, minibatch_size, follows)
        return policy._learning.epochs(batch, 1, minibatch_size, shuffle=False, follows=follows)

    def adapt(self, result: Mapping[str, Any]) -> None:
        """Adapts the policy's coefficients as its class says."""
        self._policy._adapt(result)

    def observe(self, obs: Sequence[np.ndarray], columns: Mapping[str, np.ndarray]) -> None:
        """Takes the rows of a sample into the filters; a frozen policy takes in nothing."""
        policy, acting = self._policy, self._policy._acting
        if policy._state.frozen_as is not None:
            return
        rows = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in obs]
        if policy.filter is not None:
            policy.filter.observe(rows)
        if policy.reward_filter is not None:
            policy.reward_filter.observe(columns["rewards"])
        if acting.follows_episodes:
            ports = policy.program.ports
            more = [columns[port.name] for port in (*ports.prev, *ports.states)]
            more.append(columns["action_dist_inputs"])
            *others, disturbed = (x.reshape(-1, *x.shape[2:]) for x in more)
            policy.exploration.adapt(acting.dist_inputs([*rows, *others]), disturbed)

    def flush_filters(self) -> None:
        """Lets what was observed take effect: in acting, in learning, in exports.

        A frozen policy stays as it is.
        """
        policy = self._policy
        if policy._state.frozen_as is not None:
            return
        if policy.reward_filter is not None:
            policy.reward_filter.flush()
        if policy.filter is not None and policy.filter.pending_count:
            policy.filter.flush()
            policy.holding.apply_filters()

    def seen(self, obs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns observation leaves as they are: the Program filters them."""
        return obs

    def prepare(self) -> None:
        """Runs the loss once on a small batch of zeros, if no policy of the kind did."""
        self._policy._learning.prepare()

    def resolve(self) -> None:
        """Decides in the config what every "auto" becomes, as the first use would."""
        policy = self._policy
        self.prepare()
        policy.config["jit_compile"] = policy.program.updates.resolve_form() is not Form.PLAIN
        _ = policy._acting.inference
        for name, before in policy.automatic.items():
            tell_if_resolved_anew(name, before, policy.config[name])
            policy.automatic[name] = policy.config[name]

    def warm_up(self, rows: int, num_epochs: int, minibatch_size: int) -> None:
        """Traces and compiles acting and learning for batches of `rows`; changes no numbers."""
        self.prepare()
        policy = self._policy
        acting = policy._acting.tries_onnx
        policy.program.warm_up(rows, num_epochs, minibatch_size, acting=acting)
        self.resolve()

    def take_seconds_loading(self) -> float:
        """Returns the seconds spent on making columns of batches since the last call."""
        seconds: float = self._policy._learning.take_seconds_loading()
        return seconds
>>>>>>> wt-S


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
        """The generator that draws action noise and shuffles minibatches."""
        generator: np.random.Generator = self.state.rng
        return generator

    def acting_weights(self) -> Mapping[str, np.ndarray] | None:
        """Returns the weights of the network that acts, if there are more and sampling is ours."""
        policy = self._policy
        if len(self.program.layout.networks) == 1 or policy.learning.by_trajectory:
            return None
        if not policy._overridden.isdisjoint(by_methods.WEIGHTS):
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
        with theirs.state.lock:
            acting = theirs.state.copy_of(*ACTING)
        with self.state.changing():
            self.state.write(acting)
            self.state.follow(1.0, ACTING)
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
