"""Driver of policies with a Program. Methods that a policy overrides are called instead."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.batch.postprocessing import standardized
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.sectioned import tell_if_resolved_anew
from tfpolicies.errors import UsageError
from tfpolicies.policy import overrides
from tfpolicies.policy.acting import CompiledActing
from tfpolicies.policy.driver import Acting, Learning, PolicyDriver, validate_result
from tfpolicies.policy.kind import PolicyKind
from tfpolicies.policy.learning import Learner
from tfpolicies.program.minibatches import is_input
from tfpolicies.program.program import Program
from tfpolicies.program.update_forms import Form
from tfpolicies.state import ACTING, PolicyState

_KEPT = ("agent_connectors", "action_connectors", "_views")


class OverriddenActing(Acting):
    """Acts by methods that a policy overrides; the Program filters and maps actions."""

    def __init__(self, policy: PolicyKind) -> None:
        super().__init__(policy)
        self._compiled: CompiledActing = policy._acting
        self.views = self._compiled.views
        self.resets_per_episode = self._compiled.resets_per_episode

    @property
    def has_fixed_initial_state(self) -> bool:
        return self._compiled.has_fixed_initial_state

    @property
    def inference(self) -> str:
        """The runtime that acts where the overriding methods call those of `TFPolicy`."""
        return self._compiled.inference

    def to_env(
        self,
        actions: Sequence[np.ndarray],
        *,
        unsquash: bool | None = None,
        clip: bool | None = None,
    ) -> list[np.ndarray]:
        return self._compiled.to_env(actions, unsquash=unsquash, clip=clip)

    def start_episode(self) -> None:
        self._compiled.start_episode()


class CompiledLearning(Learning):
    """Trains a policy by its Program."""

    def __init__(self, policy: PolicyKind) -> None:
        super().__init__(policy)
        self._learner: Learner = policy._learner
        self._state = policy._state
        self._updates = policy.program.updates

    @property
    def detects_non_finite(self) -> bool:
        return "learn_on_batch" not in self.policy._overridden

    @property
    def compile_mode(self) -> str:
        return (self._updates.form or Form.PLAIN).value

    @property
    def lookahead(self) -> int:
        return 0 if self.postprocesses_trajectories else int(self.policy._lookahead)

    def select_columns(self, batch: Mapping[str, Any]) -> list[str]:
        """Returns the columns that the loss reads; all but infos if overridden methods learn."""
        if self.policy._overridden.isdisjoint((*overrides.UPDATING, *overrides.LOADING)):
            self._learner.discover()
            return list(self._updates.signature.columns)
        return super().select_columns(batch)

    def train(
        self,
        batch: SampleBatch,
        num_epochs: int,
        minibatch_size: int,
        *,
        shuffle: bool = True,
        standardize: Collection[str] = (),
    ) -> Mapping[str, Any]:
        for name in standardize:
            if name in batch:
                batch[name] = standardized(batch[name])
        return self.update(batch, num_epochs, minibatch_size, shuffle=shuffle)

    def update(
        self,
        batch: SampleBatch,
        num_epochs: int,
        minibatch_size: int,
        *,
        shuffle: bool = True,
        rng: np.random.Generator | None = None,
    ) -> Mapping[str, Any]:
        """Updates by all minibatches of all epochs; the policy's own generator shuffles."""
        del rng
        policy = self.policy
        if "learn_epochs" in policy._overridden:
            learned = policy.learn_epochs(batch, num_epochs, minibatch_size, shuffle=shuffle)
            return validate_result(policy, "learn_epochs", learned)
        return self._learner.learn(batch, num_epochs, minibatch_size, shuffle=shuffle)

    def replay(
        self, batch: SampleBatch, minibatch_size: int | None, update_targets: np.ndarray
    ) -> Mapping[str, Any]:
        """Updates by replayed rows, target networks included, in one compiled call."""
        policy = self.policy
        update_targets = policy._followed(update_targets)
        names = {*overrides.UPDATING, *overrides.LOADING, "learn_epochs"}
        by_methods = bool(policy._overridden & names) or self._learner.sees_minibatches()
        policy_class = type(policy)
        moves = getattr(policy_class, "update_target", None)
        moves_inside = is_input(policy.program.runtime.signatures.step_inputs.update_targets)
        own = moves is not policy_class._moves_target or (moves is not None and not moves_inside)
        if own and not by_methods and minibatch_size is None:
            result = self._learner.epochs(batch, 1, None, shuffle=False)
            if update_targets.any():
                policy.update_target()
            return result
        if by_methods or own:
            return super().replay(batch, minibatch_size, update_targets)
        return self._learner.epochs(
            batch, 1, minibatch_size, shuffle=False, update_targets=update_targets
        )

    def adapt(self, result: Mapping[str, Any]) -> None:
        self.policy._adapt(result)

    def observe(self, obs: Sequence[np.ndarray], columns: Mapping[str, np.ndarray]) -> None:
        """Adds the rows of a sample to the filters; a frozen policy ignores them."""
        if self._state.frozen_as is not None:
            return
        super().observe(obs, columns)
        policy, acting = self.policy, self.policy._acting
        if acting.resets_per_episode:
            ports = policy.program.ports
            more = [columns[port.name] for port in (*ports.seen, *ports.states)]
            inputs = [*obs, *more, columns["action_dist_inputs"]]
            *rows, disturbed = (x.reshape(-1, *x.shape[2:]) for x in inputs)
            policy.exploration.adapt(acting.dist_inputs(rows), disturbed)

    def flush_filters(self) -> None:
        """Applies pending running statistics in acting, learning and exports.

        A frozen policy stays as it is.
        """
        if self._state.frozen_as is not None:
            return
        observed = self.policy.filter
        has_changed = observed is not None and observed.pending_count
        super().flush_filters()
        if has_changed:
            self.policy.driver.apply_filters()

    def normalize_observations(self, obs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return obs

    def resolve(self) -> None:
        policy = self.policy
        self._learner.discover()
        policy.config["jit_compile"] = self._updates.resolve_form(self._state) is not Form.PLAIN
        _ = policy._acting.inference
        for name, before in policy.automatic.items():
            tell_if_resolved_anew(name, before, policy.config[name])
            policy.automatic[name] = policy.config[name]

    def warm_up(self, rows: int, num_epochs: int, minibatch_size: int | None) -> None:
        self._learner.discover()
        acting = self.policy._acting.tries_onnx
        sizes = rows, num_epochs, minibatch_size
        self.policy.program.warm_up(self._state.hyper, *sizes, acting=acting)
        self.resolve()

    def take_seconds_loading(self) -> float:
        seconds, self._learner.seconds_loading = self._learner.seconds_loading, 0.0
        return seconds


class CompiledDriver(PolicyDriver):
    """Drives a policy by its Program, and manages its state."""

    state: PolicyState
    program: Program

    def __init__(self, policy: PolicyKind) -> None:
        super().__init__(policy)
        self.state = policy._state
        self.program = policy.program
        self.auto_settings = policy.automatic
        self.learning = CompiledLearning(policy)

    def choose_parts(self) -> None:
        policy = self.policy
        policy._acting.has_own_single_action = "compute_single_action" in policy._overridden
        is_compiled = policy._overridden.isdisjoint(overrides.ACTING)
        self.acting = policy._acting if is_compiled else OverriddenActing(policy)

    @property
    def version(self) -> Any:
        """A value that changes with the policy's numbers; None if it overrides weight methods."""
        if not self.policy._overridden.isdisjoint(overrides.WEIGHTS):
            return None
        return id(self.state), self.state.version, self.state.hyper.tobytes()

    @property
    def is_frozen(self) -> bool:
        return self.state.frozen_as is not None

    @property
    def generator(self) -> np.random.Generator:
        self.state.settle()
        generator: np.random.Generator = self.state.rng
        return generator

    def get_acting_weights(self) -> Mapping[str, np.ndarray] | None:
        if len(self.program.layout.networks) == 1 or self.learning.postprocesses_trajectories:
            return None
        if not self.policy._overridden.isdisjoint((*overrides.WEIGHTS, *overrides.ACTING)):
            return None
        weights: Mapping[str, np.ndarray] = self.state.copy_of("model")
        return weights

    def apply_filters(self) -> None:
        observed = self.policy.filter
        if observed is not None:
            self.policy._owned.apply_filter(observed)

    @contextlib.contextmanager
    def allow_non_finite(self) -> Iterator[None]:
        policy = self.policy
        before, policy._accepts_non_finite = policy._accepts_non_finite, True
        try:
            yield
        finally:
            policy._accepts_non_finite = before

    def require_changeable(self) -> None:
        self.state.require_changeable()

    def get_hyperparameter(self, name: str) -> float:
        return float(self.policy.hyper(name))

    def set_hyperparameter(self, name: str, value: float | None) -> None:
        self.policy.set_hyper(name, value)

    def copy_from(self, other: PolicyKind) -> None:
        policy, source = self.policy, other.driver
        if not isinstance(source, CompiledDriver) or not self._has_variables_like(source.program):
            raise UsageError(f"{policy!r} cannot act like {other!r}, which has another model.")
        layout = self.program.layout
        parts: tuple[str, ...] = ACTING
        if all(layout.of(x) == source.program.layout.of(x) for x in layout.networks):
            parts = (*layout.networks, "filter")
        with source.state.lock:
            arrays = source.state.copy_of(*parts)
        with self.state.changing():
            self.state.write(arrays)
            self.state.follow(1.0, parts)
        self.state.global_timestep = other.global_timestep
        if not policy._overridden.isdisjoint(overrides.WEIGHTS):
            policy.set_weights(other.get_weights())
        self._copy_filters(source)

    def _has_variables_like(self, other: Program) -> bool:
        own = self.program
        return own is other or all(own.layout.of(x) == other.layout.of(x) for x in ACTING)

    def make_copy(self, state: Mapping[str, Any]) -> Any:
        return type(self.policy).from_state(state)

    def copy_with_settings(
        self, policy_id: str, settings: Mapping[str, Any], *, rebuild: bool
    ) -> Any:
        changed = super().copy_with_settings(policy_id, settings, rebuild=rebuild)
        if not rebuild:
            return changed
        policy = self.policy
        config = {**policy.config, **settings, "__policy_id": policy_id}
        result = type(policy)(*self.spaces, config)
        result.driver.copy_from(policy)
        for name, value in vars(changed).items():
            if name in _KEPT or not hasattr(result, name):
                setattr(result, name, value)
        return result
