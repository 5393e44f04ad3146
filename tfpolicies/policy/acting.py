"""Compiled acting: checks inputs, runs the runtime, and counts rows."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.leaves import expand_batch_axis
from tfpolicies.errors import BatchError, ConfigError, ObservationError
from tfpolicies.exploration.exploration import check_array
from tfpolicies.models.distributions.noise import NoiseBuffer, NoiseKind
from tfpolicies.models.ports import ViewInput
from tfpolicies.models.spaces import batch_leaves, unflatten
from tfpolicies.policy.driver import Acting, SingleAction
from tfpolicies.policy.hooks import TFPolicyHooks
from tfpolicies.policy.input_check import InputValidator
from tfpolicies.policy.input_dict import add_batch_axis, make_row, read_states
from tfpolicies.policy.input_reader import InputReader, StateCountError
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.program.functions import ActOutputs
from tfpolicies.program.inference import RUNTIMES
from tfpolicies.program.policy_state import PolicyState, tick
from tfpolicies.program.runtimes.runtime import ActingRuntime

_BASE_EXTRAS = ("action_logp", "action_prob", "action_dist_inputs")
_MAX_PREFETCHED_NUMBERS = 2**18  # numbers of noise, of 4 bytes each

logger = logging.getLogger("tfpolicies")


class CompiledActing(Acting):
    """Runs the act function of a Program for one policy.

    Args:
        policy: the policy; "auto" inference is resolved in its config on first use.
    """

    reads_episodes = False
    overrides_single_action = False
    """Whether the policy overrides `compute_single_action`."""

    def __init__(self, policy: TFPolicyHooks) -> None:
        super().__init__(policy)
        self.program = program = policy.program
        self.state = policy._state
        self.exploration: Any = policy.exploration
        self.config = policy.config
        self._no_params = np.zeros(0, np.float32)
        # Cached, because every step reads these.
        ports = program.ports
        transform = program.spec.explorer
        self._num_params, self._noise_size = transform.num_params, transform.noise_size
        self.noise_kind: NoiseKind | None = self.exploration.noise_kind
        self.resets_per_episode = self.exploration.needs_complete_episodes
        self.views = ports.views
        layout = program.act_layout
        self._action_names = [port.name for port in layout.actions]
        self._state_names = [port.name for port in layout.states]
        self._extra_names = [
            x.name for x in layout.extras if x.name not in policy._acting_only_outputs
        ]
        self._action_space = program.spec.action_space
        self._has_single_leaf = len(layout.actions) == 1 and not layout.actions[0].path
        self._first_extra_index = len(layout.actions) + len(layout.states)
        self._extras_names = [*_BASE_EXTRAS, *layout.extra_names]
        self._extras_names += ["vf_preds"] if layout.has_values else []
        spec = program.spec
        other_ports = (*ports.view_ports, *ports.states)
        check = InputValidator(spec.observation_space, spec.action_space, other_ports).check
        self.reader = InputReader(ports, self.config, check)
        self._perturbed: tuple[int, PolicyState] | None = None
        # The last outputs, and the result of `act` for them.
        self._last_result: tuple[Any, tuple[Any, dict[str, np.ndarray]]] = (None, (None, {}))

    @property
    def stackable(self) -> CompiledActing:
        """This object: it can act in one call with other policies of its Program."""
        return self

    @property
    def input_views(self) -> Sequence[ViewInput]:
        return self.views

    @property
    def has_fixed_initial_state(self) -> bool:
        return "get_initial_state" not in self.policy._overridden

    @functools.cached_property
    def acting_runtime(self) -> ActingRuntime:
        *preferred, fallback = self._candidates()
        for name in preferred:
            try:
                return self._use_runtime(name)
            except ConfigError as error:
                runtime_name = RUNTIMES[name].name
                logger.warning("acting through TensorFlow instead of %s: %s", runtime_name, error)
        return self._use_runtime(fallback)

    @property
    def inference(self) -> str:
        _ = self.acting_runtime
        return str(self.config["inference"])

    @property
    def tries_onnx(self) -> bool:
        return "onnx" in self._candidates()

    def _candidates(self) -> Sequence[str]:
        configured = self.config["inference"]
        return [configured] if configured != "auto" else self.program.inference.auto_runtimes

    def _use_runtime(self, name: str) -> ActingRuntime:
        runtime = self.program.inference.get_runtime(name)
        self.config["inference"] = name
        return runtime

    def run(
        self, inputs: Sequence[np.ndarray], explore: bool, timestep: int | None = None
    ) -> ActOutputs:
        """Acts on checked inputs, one array per port; counts the rows.

        Returns:
            Arrays that are valid until the next call.
        """
        runtime = self.acting_runtime
        with self.state.lock:
            state, noise, params = self.prepare_call(len(inputs[0]), explore, timestep)
            return runtime.run(state, inputs, noise, params)

    def act(
        self,
        obs: Sequence[np.ndarray],
        views: Sequence[np.ndarray] = (),
        states: Sequence[np.ndarray] = (),
        *,
        explore: bool | None = None,
        infos: Sequence[Any] | None = None,
        episodes: Sequence[Any] | None = None,
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Acts for a sampler; see `Acting.act`. Infos and episodes are not read."""
        explore = self.config["explore"] if explore is None else explore
        inputs = [*obs, *views, *states] if views or states else obs
        outputs = self.run(inputs, explore)
        last, result = self._last_result
        if last is not outputs:
            result = self.make_columns(outputs)
            self._last_result = outputs, result
        return result

    def act_single(
        self,
        obs: Structure | None,
        state: Sequence[np.ndarray] | None = None,
        *,
        unsquash: bool | None = None,
        clip: bool | None = None,
        **arguments: Any,
    ) -> SingleAction:
        if self.overrides_single_action:
            return super().act_single(obs, state, unsquash=unsquash, clip=clip, **arguments)
        try:
            outputs, explore = self.run_single(obs, state, **arguments)
        except StateCountError:  # the policy's method also accepts states of ported code
            return super().act_single(obs, state, unsquash=unsquash, clip=clip, **arguments)
        env_actions = outputs.env_actions
        if unsquash is not None or clip is not None:
            env_actions = self.to_env(outputs.actions, unsquash=unsquash, clip=clip)
        rows = [x[0].copy() for x in env_actions]
        env_action = rows[0] if self._has_single_leaf else unflatten(self._action_space, rows)
        _, states, extras = self.take_first_row(outputs, explore=explore)
        return SingleAction(env_action, states, extras)

    def run_single(
        self,
        obs: Structure | None,
        state: Sequence[np.ndarray] | None = None,
        *,
        prev_action: Structure | None = None,
        prev_reward: Structure | None = None,
        info: Mapping[str, Any] | None = None,
        input_dict: Mapping[str, Any] | None = None,
        episode: Any = None,
        explore: bool | None = None,
        timestep: int | None = None,
        **kwargs: object,
    ) -> tuple[ActOutputs, bool]:
        """Acts on one observation; see `Policy.compute_single_action` for the arguments.

        Returns:
            Arrays `[1, ...]` that are valid until the next call, and whether it explored.

        Raises:
            StateCountError: if the recurrent state has another number of arrays than the policy's.
        """
        del info, episode, kwargs
        if input_dict is None and self.reader.reads_obs_only and state is None and obs is not None:
            batch = obs[None] if isinstance(obs, np.ndarray) else expand_batch_axis(obs)
            inputs = self.reader.read(batch)
        else:
            row = input_dict or make_row(obs, state, prev_action, prev_reward)
            rows = add_batch_axis(row)
            previous = rows.get("prev_actions"), rows.get("prev_rewards")
            inputs = self.reader.read(rows["obs"], read_states(rows), *previous, rows)
        explore = self.config["explore"] if explore is None else explore
        return self.run(inputs, explore, timestep), explore

    def predict(self, obs: Structure, *, batched: bool, explore: bool | None) -> Any:
        """Returns actions for the environment, as arrays that the caller owns.

        Only for policies that read nothing but the observation (`reads_obs_only`).

        Args:
            obs: one observation, or a batch `[B, ...]`.
            batched: whether `obs` is a batch.
            explore: sample or be greedy; None takes `config["explore"]`.
        """
        rows = obs if batched else expand_batch_axis(obs)
        inputs = batch_leaves(self.reader.obs_leaves, rows, "obs")
        if self.config["check_inputs"]:
            self.reader.check(inputs)
        outputs = self.run(inputs, self.config["explore"] if explore is None else explore)
        actions = [x.copy() if batched else x[0].copy() for x in outputs.env_actions]
        return actions[0] if self._has_single_leaf else unflatten(self._action_space, actions)

    @contextlib.contextmanager
    def prefetch_noise(self, rows: int) -> Iterator[None]:
        state, kind, size = self.state, self.noise_kind, self._noise_size
        if kind is not None and self.config["explore"] and not self.resets_per_episode:
            with state.lock:
                state.flush_noise_buffer()
                state.noise_buffer = NoiseBuffer(
                    kind, state.rng, min(rows, _MAX_PREFETCHED_NUMBERS // size), size
                )
        try:
            yield
        finally:
            state.flush_noise_buffer()

    def make_columns(self, outputs: ActOutputs) -> tuple[Any, dict[str, np.ndarray]]:
        """Returns environment actions and columns, as `act` does."""
        columns = dict(zip(self._action_names, outputs.actions, strict=True))
        columns["action_logp"] = outputs.logp
        columns["action_dist_inputs"] = outputs.dist_inputs
        if outputs.values is not None:
            columns["vf_preds"] = outputs.values
        if outputs.states:
            columns.update(zip(self._state_names, outputs.states, strict=True))
        for name in self._extra_names:
            columns[name] = outputs.extras[name]
        return unflatten(self._action_space, outputs.env_actions), columns

    def start_episode(self) -> None:
        """Notifies the exploration that an episode ended and the next one starts."""
        self.exploration.on_episode_end()
        self.exploration.on_episode_start()

    def collect_arrays(
        self, outputs: ActOutputs, *, explore: bool, caller_owned: bool
    ) -> list[np.ndarray]:
        """Returns the arrays of an `ActionBatch`, `[..., N, *shape]` each.

        Args:
            outputs: NumPy arrays.
            explore: whether the actions were sampled; else their log-probabilities are 0.
            caller_owned: whether the caller owns the outputs; else they are copied.
        """
        result = [*outputs.actions, *outputs.states]
        result += [outputs.logp, outputs.prob, outputs.dist_inputs, *outputs.extras.values()]
        if outputs.values is not None:
            result.append(outputs.values)
        if not caller_owned:
            result = [*map(np.ndarray.copy, result)]
        if not explore:
            result[self._first_extra_index][...], result[self._first_extra_index + 1][...] = (
                0.0,
                1.0,
            )
        return result

    def take_first_row(self, outputs: ActOutputs, *, explore: bool) -> ActionBatch:
        """Returns the first row of outputs `[1, ...]`, as arrays that the caller owns."""
        return self.make_action_batch(
            [x[0] for x in self.collect_arrays(outputs, explore=explore, caller_owned=False)]
        )

    def make_action_batch(self, arrays: Sequence[np.ndarray]) -> ActionBatch:
        """Returns the `ActionBatch` of N rows from arrays `[N, *shape]`, ordered as by `arrays`."""
        count, first = len(self._action_names), self._first_extra_index
        actions = (
            arrays[0] if self._has_single_leaf else unflatten(self._action_space, arrays[:count])
        )
        extras = dict(zip(self._extras_names, arrays[first:], strict=True))
        return ActionBatch(actions, [*arrays[count:first]], extras)

    def prepare_call(
        self,
        rows: int,
        explore: bool,
        timestep: int | None = None,
        out: np.ndarray | None = None,
    ) -> tuple[PolicyState, Any, np.ndarray]:
        """Counts the rows of a call and draws its noise. The caller holds the state's lock.

        Args:
            rows: N.
            explore: sample or be greedy.
            timestep: for exploration schedules; None takes the policy's own.
            out: contiguous float32 buffer `[N, noise_size]` for the random numbers. Needs
                `explore` and noise of a single kind (`noise_kind`). The caller then finishes the
                noise.

        Returns:
            The state to act with, the noise `[N, noise_size]` and the exploration's parameters.
        """
        state = self.state
        params = self._no_params
        if self._num_params:
            schedule_step = state.global_timestep if timestep is None else timestep
            raw = self.exploration.get_params(schedule_step, explore)
            params = check_array(self.exploration, "get_params", raw, (self._num_params,))
        state.last_used = tick()
        state.global_timestep += rows
        if not explore:
            return state, np.zeros((rows, self._noise_size), np.float32), params
        if state.noise_buffer is not None:
            noise = state.noise_buffer.take(rows) if out is None else None
            if noise is not None:
                return state, noise, params
            state.flush_noise_buffer()
        noise, kind = None, self.noise_kind
        if kind is None:
            raw = self.exploration.draw_noise(state.rng, rows, params)
            shape = (rows, self._noise_size)
            noise = check_array(self.exploration, "draw_noise", raw, shape)
        elif out is not None:
            kind.draw(state.rng, out)
        else:
            noise = np.empty((rows, self._noise_size), np.float32)
            kind.draw(state.rng, noise)
            kind.transform(noise)
        if self.resets_per_episode:
            state = self._get_perturbed_state()
        return state, noise, params

    def _get_perturbed_state(self) -> PolicyState:
        """Returns a state with the perturbed weights of this episode (parameter noise)."""
        cached, explorer = self._perturbed, self.exploration
        if cached is None or cached[0] != self.state.version or explorer.needs_perturbation:
            perturbed = self.state.copy()
            weights = {
                slot.key: self.state.arrays[slot.key]
                for slot in perturbed.layout.get_slots("model")
            }
            perturbed.write(explorer.perturb(weights, self.state.rng))
            cached = self._perturbed = (self.state.version, perturbed)
        return cached[1]

    def compute_dist_inputs(
        self, inputs: Sequence[np.ndarray], state: PolicyState | None = None
    ) -> np.ndarray:
        """Returns the distribution inputs `[N, n]` for checked inputs; counts no rows.

        Args:
            inputs: one array per port.
            state: another state of the same Program; None for the policy's own.
        """
        outputs = self._run_greedy(inputs, self.state if state is None else state)
        return np.array(outputs.dist_inputs)

    def compute_values(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the values for checked inputs, float32 `[N]`; counts no rows."""
        return np.array(self._run_greedy(inputs, self.state).values)

    def _run_greedy(self, inputs: Sequence[np.ndarray], state: PolicyState) -> ActOutputs:
        noise = np.zeros((len(inputs[0]), self._noise_size), np.float32)
        params = np.zeros(self._num_params, np.float32)
        runtime = self.acting_runtime
        with state.lock:
            return runtime.run(state, inputs, noise, params)

    def check_actions(self, actions: Structure) -> list[np.ndarray]:
        """Returns normalised actions as one array per leaf."""
        spec = self.program.spec
        arrays = batch_leaves(spec.action_leaves, actions, "actions")
        for leaf, array in zip(spec.action_leaves, arrays, strict=True):
            if isinstance(leaf.space, gym.spaces.Discrete):
                largest = np.asarray(leaf.space.n - 1)
            elif isinstance(leaf.space, gym.spaces.MultiDiscrete):
                largest = leaf.space.nvec - 1
            else:
                continue
            is_invalid = (array < 0) | (array > largest)
            if is_invalid.any():
                raise ObservationError(
                    f"{leaf.name('actions')} must be from 0 to {largest.tolist()} (0-based; those "
                    "of the environment need actions_normalized=False), got "
                    f"{array[is_invalid].reshape(-1)[0]}."
                )
        return arrays

    def compute_log_likelihoods(
        self, actions: Structure, inputs: Sequence[np.ndarray], *, normalized: bool
    ) -> np.ndarray:
        """Returns the log-probability of each action, float32 `[N]`; see `TFPolicy`."""
        spec = self.program.spec
        if not normalized:
            env_leaves = [
                leaf._replace(dtype=np.dtype(leaf.space.dtype)) for leaf in spec.action_leaves
            ]
            env_arrays = batch_leaves(env_leaves, actions, "actions")
            actions = unflatten(spec.action_space, spec.action_mapping.from_env(env_arrays))
        arrays = self.check_actions(actions)
        if len(arrays[0]) != len(inputs[0]):
            raise BatchError(f"Got {len(arrays[0])} actions for {len(inputs[0])} observations.")
        with self.state.lock:
            return self.program.runtime.log_likelihoods(self.state, inputs, arrays)

    def to_env(
        self,
        actions: Sequence[np.ndarray],
        *,
        unsquash: bool | None = None,
        clip: bool | None = None,
    ) -> list[np.ndarray]:
        mapping = self.program.spec.action_mapping.override(unsquash, clip)
        return mapping.to_env(actions)
