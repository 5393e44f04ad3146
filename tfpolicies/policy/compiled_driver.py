"""Driver of policies with a Program. Methods that a policy overrides are called instead."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.batch.postprocessing import standardized
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.base_config import log_auto_change
from tfpolicies.errors import UsageError
from tfpolicies.policy import overrides
from tfpolicies.policy.acting import CompiledActing
from tfpolicies.policy.driver import Acting, Learning, PolicyDriver, validate_result
from tfpolicies.policy.hooks import TFPolicyHooks
from tfpolicies.policy.learning import PolicyLearner
from tfpolicies.program.compile_mode import CompileMode
from tfpolicies.program.minibatches import is_input
from tfpolicies.program.policy_state import ACTING_PARTS, PolicyState
from tfpolicies.program.program import Program

_COPIED_ATTRIBUTES = ("agent_connectors", "action_connectors", "_views")


class CustomMethodActing(Acting):
    """Acts by methods that a policy overrides; the Program filters and maps actions."""

    def __init__(self, policy: TFPolicyHooks) -> None:
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

    def __init__(self, policy: TFPolicyHooks) -> None:
        super().__init__(policy)
        self._learner: PolicyLearner = policy._learner
        self._state = policy._state
        self._updates = policy.program.updates

    @property
    def detects_non_finite(self) -> bool:
        return "learn_on_batch" not in self.policy._overridden

    @property
    def compile_mode(self) -> str:
        return (self._updates.compile_mode or CompileMode.PLAIN).value

    @property
    def lookahead(self) -> int:
        return 0 if self.postprocesses_trajectories else int(self.policy._lookahead)

    def select_columns(self, batch: Mapping[str, Any]) -> list[str]:
        """Returns the columns that the loss reads; all but infos if overridden methods learn."""
        if self.policy._overridden.isdisjoint(
            (*overrides.UPDATE_METHODS, *overrides.LOADING_METHODS)
        ):
            self._learner.discover_columns()
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
            result = policy.learn_epochs(batch, num_epochs, minibatch_size, shuffle=shuffle)
            return validate_result(policy, "learn_epochs", result)
        return self._learner.learn(batch, num_epochs, minibatch_size, shuffle=shuffle)

    def replay(
        self, batch: SampleBatch, minibatch_size: int | None, update_targets: np.ndarray
    ) -> Mapping[str, Any]:
        """Updates by replayed rows, target networks included, in one compiled call."""
        policy = self.policy
        update_targets = policy._select_target_updates(update_targets)
        names = {*overrides.UPDATE_METHODS, *overrides.LOADING_METHODS, "learn_epochs"}
        uses_methods = bool(policy._overridden & names) or self._learner.has_minibatch_callback()
        policy_class = type(policy)
        update_target = getattr(policy_class, "update_target", None)
        updates_target_inside = is_input(
            policy.program.runtime.signatures.step_inputs.update_targets
        )
        has_custom_target_update = update_target is not policy_class._compiled_target_update or (
            update_target is not None and not updates_target_inside
        )
        if has_custom_target_update and not uses_methods and minibatch_size is None:
            result = self._learner.update_epochs(batch, 1, None, shuffle=False)
            if update_targets.any():
                policy.update_target()
            return result
        if uses_methods or has_custom_target_update:
            return super().replay(batch, minibatch_size, update_targets)
        return self._learner.update_epochs(
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
            view_and_state_inputs = [
                columns[port.name] for port in (*ports.view_ports, *ports.states)
            ]
            inputs = [*obs, *view_and_state_inputs, columns["action_dist_inputs"]]
            *rows, perturbed_dist_inputs = (x.reshape(-1, *x.shape[2:]) for x in inputs)
            policy.exploration.adapt(acting.compute_dist_inputs(rows), perturbed_dist_inputs)

    def flush_filters(self) -> None:
        """Applies pending running statistics in acting, learning and exports.

        A frozen policy stays as it is.
        """
        if self._state.frozen_as is not None:
            return
        running_filter = self.policy.filter
        has_changed = running_filter is not None and running_filter.pending_count
        super().flush_filters()
        if has_changed:
            self.policy.driver.apply_filters()

    def normalize_observations(self, obs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return obs

    def resolve_auto_settings(self) -> None:
        policy = self.policy
        self._learner.discover_columns()
        policy.config["jit_compile"] = (
            self._updates.resolve_compile_mode(self._state) is not CompileMode.PLAIN
        )
        _ = policy._acting.inference
        for name, previous in policy.auto_settings.items():
            log_auto_change(name, previous, policy.config[name])
            policy.auto_settings[name] = policy.config[name]

    def warm_up(self, rows: int, num_epochs: int, minibatch_size: int | None) -> None:
        self._learner.discover_columns()
        acting = self.policy._acting.tries_onnx
        sizes = rows, num_epochs, minibatch_size
        self.policy.program.warm_up(self._state.hyperparameters, *sizes, acting=acting)
        self.resolve_auto_settings()

    def pop_loading_seconds(self) -> float:
        seconds, self._learner.loading_seconds = self._learner.loading_seconds, 0.0
        return seconds


class CompiledDriver(PolicyDriver):
    """Drives a policy by its Program, and manages its state."""

    state: PolicyState
    program: Program

    def __init__(self, policy: TFPolicyHooks) -> None:
        super().__init__(policy)
        self.state = policy._state
        self.program = policy.program
        self.auto_settings = policy.auto_settings
        self.learning = CompiledLearning(policy)

    def choose_parts(self) -> None:
        policy = self.policy
        policy._acting.overrides_single_action = "compute_single_action" in policy._overridden
        is_compiled = policy._overridden.isdisjoint(overrides.ACTING_METHODS)
        self.acting = policy._acting if is_compiled else CustomMethodActing(policy)

    @property
    def version(self) -> Any:
        """A value that changes with the policy's numbers; None if it overrides weight methods."""
        if not self.policy._overridden.isdisjoint(overrides.WEIGHT_METHODS):
            return None
        return id(self.state), self.state.version, self.state.hyperparameters.tobytes()

    @property
    def is_frozen(self) -> bool:
        return self.state.frozen_as is not None

    @property
    def generator(self) -> np.random.Generator:
        self.state.flush_noise_buffer()
        generator: np.random.Generator = self.state.rng
        return generator

    def get_acting_weights(self) -> Mapping[str, np.ndarray] | None:
        if len(self.program.layout.networks) == 1 or self.learning.postprocesses_trajectories:
            return None
        if not self.policy._overridden.isdisjoint(
            (*overrides.WEIGHT_METHODS, *overrides.ACTING_METHODS)
        ):
            return None
        weights: Mapping[str, np.ndarray] = self.state.copy_weights("model")
        return weights

    def apply_filters(self) -> None:
        running_filter = self.policy.filter
        if running_filter is not None:
            self.policy._state_dict.apply_filter(running_filter)

    @contextlib.contextmanager
    def allow_non_finite(self) -> Iterator[None]:
        policy = self.policy
        previous, policy._accepts_non_finite = policy._accepts_non_finite, True
        try:
            yield
        finally:
            policy._accepts_non_finite = previous

    def require_changeable(self) -> None:
        self.state.require_not_frozen()

    def get_hyperparameter(self, name: str) -> float:
        return float(self.policy.get_hyperparameter(name))

    def set_hyperparameter(self, name: str, value: float | None) -> None:
        self.policy.set_hyperparameter(name, value)

    def copy_from(self, other: TFPolicyHooks) -> None:
        policy, source = self.policy, other.driver
        if not isinstance(source, CompiledDriver) or not self._has_variables_like(source.program):
            raise UsageError(f"{policy!r} cannot act like {other!r}, which has another model.")
        layout = self.program.layout
        parts: tuple[str, ...] = ACTING_PARTS
        if all(layout.get_slots(x) == source.program.layout.get_slots(x) for x in layout.networks):
            parts = (*source.state.layout.networks, "filter")
        with source.state.lock:
            arrays = source.state.copy_weights(*parts)
        with self.state.lock_for_change():
            self.state.write(arrays)
            self.state.update_targets(1.0, parts)
        self.state.global_timestep = other.global_timestep
        if not policy._overridden.isdisjoint(overrides.WEIGHT_METHODS):
            policy.set_weights(other.get_weights())
        self._copy_filters(source)

    def _has_variables_like(self, other: Program) -> bool:
        program = self.program
        return program is other or all(
            program.layout.get_slots(x) == other.layout.get_slots(x) for x in ACTING_PARTS
        )

    def make_copy(self, state: Mapping[str, Any]) -> Any:
        return type(self.policy).from_state(state)

    def copy_with_settings(
        self, policy_id: str, settings: Mapping[str, Any], *, rebuild: bool
    ) -> Any:
        base_copy = super().copy_with_settings(policy_id, settings, rebuild=rebuild)
        if not rebuild:
            return base_copy
        policy = self.policy
        config = {**policy.config, **settings, "__policy_id": policy_id}
        result = type(policy)(*self.spaces, config)
        result.driver.copy_from(policy)
        for name, value in vars(base_copy).items():
            if name in _COPIED_ATTRIBUTES or not hasattr(result, name):
                setattr(result, name, value)
        return result
