"""Compiled acting: checks inputs, runs the runtime, and counts rows."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.batch.leaves import with_batch_axis
from tfpolicies.errors import BatchError, ConfigError, ObservationError
from tfpolicies.exploration.exploration import checked_array
from tfpolicies.models.distributions.noise import NoiseAhead, NoiseKind
from tfpolicies.models.ports import View
from tfpolicies.models.spaces import batch_leaves, nest
from tfpolicies.policy.driver import Acting, SingleAction
from tfpolicies.policy.input_check import InputCheck
from tfpolicies.policy.input_dict import add_batch_axis, make_row, read_memory
from tfpolicies.policy.input_reader import InputReader, MemoryCountError
from tfpolicies.policy.kind import PolicyKind
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.program.functions import ActOutputs
from tfpolicies.program.inference import RUNTIMES
from tfpolicies.program.runtimes.runtime import Actor
from tfpolicies.state import PolicyState, tick
from tfpolicies.type_aliases import Structure

_ALWAYS_GIVEN = ("action_logp", "action_prob", "action_dist_inputs")
_MOST_AHEAD = 2**18  # numbers of noise, of 4 bytes each

logger = logging.getLogger("tfpolicies")


class CompiledActing(Acting):
    """Runs the act function of a Program for one policy.

    Args:
        policy: the policy; "auto" inference is resolved in its config on first use.
    """

    reads_episodes = False
    has_own_single_action = False
    """Whether the policy overrides `compute_single_action`."""

    def __init__(self, policy: PolicyKind) -> None:
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
        self.only_kind: NoiseKind | None = self.exploration.only_kind
        self.resets_per_episode = self.exploration.needs_complete_episodes
        self.views = ports.views
        layout = program.act_layout
        self._action_names = [port.name for port in layout.actions]
        self._state_names = [port.name for port in layout.states]
        self._extra_names = [x.name for x in layout.extras if x.name not in policy._acting_only]
        self._action_space = program.spec.action_space
        self._is_flat = len(layout.actions) == 1 and not layout.actions[0].path
        self._first_extra = len(layout.actions) + len(layout.states)
        self._result_names = [*_ALWAYS_GIVEN, *layout.extra_names]
        self._result_names += ["vf_preds"] if layout.with_value else []
        spec = program.spec
        further = (*ports.seen, *ports.states)
        check = InputCheck(spec.observation_space, spec.action_space, further).check
        self.reader = InputReader(ports, self.config, check)
        self._disturbed: tuple[int, PolicyState] | None = None
        # The last outputs, and the result of `act` for them.
        self._last: tuple[Any, tuple[Any, dict[str, np.ndarray]]] = (None, (None, {}))

    @property
    def stackable(self) -> CompiledActing:
        """This object: it can act in one call with other policies of its Program."""
        return self

    @property
    def input_views(self) -> Sequence[View]:
        return self.views

    @property
    def has_fixed_initial_state(self) -> bool:
        return "get_initial_state" not in self.policy._overridden

    @functools.cached_property
    def runner(self) -> Actor:
        """The runtime that acts."""
        *others, last = self._candidates()
        for name in others:
            try:
                return self._taken(name)
            except ConfigError as reason:
                what = RUNTIMES[name].name
                logger.warning("acting through TensorFlow instead of %s: %s", what, reason)
        return self._taken(last)

    @property
    def inference(self) -> str:
        _ = self.runner
        return str(self.config["inference"])

    @property
    def tries_onnx(self) -> bool:
        """Whether ONNX Runtime is a candidate for acting."""
        return "onnx" in self._candidates()

    def _candidates(self) -> Sequence[str]:
        wanted = self.config["inference"]
        return [wanted] if wanted != "auto" else self.program.inference.fitting

    def _taken(self, name: str) -> Actor:
        actor = self.program.inference.actor(name)
        self.config["inference"] = name
        return actor

    def run(
        self, inputs: Sequence[np.ndarray], explore: bool, timestep: int | None = None
    ) -> ActOutputs:
        """Acts on checked inputs, one array per port; counts the rows.

        Returns:
            Arrays that are valid until the next call.
        """
        runner = self.runner
        with self.state.lock:
            state, noise, params = self.drawn(len(inputs[0]), explore, timestep)
            return runner.run(state, inputs, noise, params)

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
        last, result = self._last
        if last is not outputs:
            result = self.columns_of(outputs)
            self._last = outputs, result
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
        if self.has_own_single_action:
            return super().act_single(obs, state, unsquash=unsquash, clip=clip, **arguments)
        try:
            outputs, explore = self.run_single(obs, state, **arguments)
        except MemoryCountError:  # the policy's method also accepts states of ported code
            return super().act_single(obs, state, unsquash=unsquash, clip=clip, **arguments)
        env_actions = outputs.env_actions
        if unsquash is not None or clip is not None:
            env_actions = self.to_env(outputs.actions, unsquash=unsquash, clip=clip)
        rows = [x[0].copy() for x in env_actions]
        env_action = rows[0] if self._is_flat else nest(self._action_space, rows)
        _, states, extras = self.first_row(outputs, explore=explore)
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
            MemoryCountError: if the recurrent state has another number of arrays than the policy's.
        """
        del info, episode, kwargs
        if input_dict is None and self.reader.reads_obs_only and state is None and obs is not None:
            batch = obs[None] if isinstance(obs, np.ndarray) else with_batch_axis(obs)
            inputs = self.reader.read(batch)
        else:
            row = input_dict or make_row(obs, state, prev_action, prev_reward)
            rows = add_batch_axis(row)
            previous = rows.get("prev_actions"), rows.get("prev_rewards")
            inputs = self.reader.read(rows["obs"], read_memory(rows), *previous, rows)
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
        rows = obs if batched else with_batch_axis(obs)
        inputs = batch_leaves(self.reader.obs_leaves, rows, "obs")
        if self.config["check_inputs"]:
            self.reader.check(inputs)
        outputs = self.run(inputs, self.config["explore"] if explore is None else explore)
        actions = [x.copy() if batched else x[0].copy() for x in outputs.env_actions]
        return actions[0] if self._is_flat else nest(self._action_space, actions)

    @contextlib.contextmanager
    def prefetch_noise(self, rows: int) -> Iterator[None]:
        state, kind, size = self.state, self.only_kind, self._noise_size
        if kind is not None and self.config["explore"] and not self.resets_per_episode:
            with state.lock:
                state.settle()
                state.ahead = NoiseAhead(kind, state.rng, min(rows, _MOST_AHEAD // size), size)
        try:
            yield
        finally:
            state.settle()

    def columns_of(self, out: ActOutputs) -> tuple[Any, dict[str, np.ndarray]]:
        """Returns environment actions and columns, as `act` does."""
        columns = dict(zip(self._action_names, out.actions, strict=True))
        columns["action_logp"] = out.logp
        columns["action_dist_inputs"] = out.dist_inputs
        if out.values is not None:
            columns["vf_preds"] = out.values
        if out.states:
            columns.update(zip(self._state_names, out.states, strict=True))
        for name in self._extra_names:
            columns[name] = out.extras[name]
        return nest(self._action_space, out.env_actions), columns

    def start_episode(self) -> None:
        """Notifies the exploration that an episode ended and the next one starts."""
        self.exploration.on_episode_end()
        self.exploration.on_episode_start()

    def arrays(self, outputs: ActOutputs, *, explore: bool, own: bool) -> list[np.ndarray]:
        """Returns the arrays of an `ActionBatch`, `[..., N, *shape]` each.

        Args:
            outputs: NumPy arrays.
            explore: whether the actions were sampled; else their log-probabilities are 0.
            caller_owned: whether the caller owns the outputs; else they are copied.
        """
        found = [*outputs.actions, *outputs.states]
        found += [outputs.logp, outputs.prob, outputs.dist_inputs, *outputs.extras.values()]
        if outputs.values is not None:
            found.append(outputs.values)
        if not own:
            found = [*map(np.ndarray.copy, found)]
        if not explore:
            found[self._first_extra][...], found[self._first_extra + 1][...] = 0.0, 1.0
        return found

    def first_row(self, outputs: ActOutputs, *, explore: bool) -> ActionBatch:
        """Returns the first row of outputs `[1, ...]`, as arrays that the caller owns."""
        return self.batch([x[0] for x in self.arrays(outputs, explore=explore, own=False)])

    def batch(self, arrays: Sequence[np.ndarray]) -> ActionBatch:
        """Returns the `ActionBatch` of N rows from arrays `[N, *shape]`, ordered as by `arrays`."""
        count, first = len(self._action_names), self._first_extra
        actions = arrays[0] if self._is_flat else nest(self._action_space, arrays[:count])
        extras = dict(zip(self._result_names, arrays[first:], strict=True))
        return ActionBatch(actions, [*arrays[count:first]], extras)

    def drawn(
        self,
        rows: int,
        explore: bool,
        timestep: int | None = None,
        numbers: np.ndarray | None = None,
    ) -> tuple[PolicyState, Any, np.ndarray]:
        """Counts the rows of a call and draws its noise. The caller holds the state's lock.

        Args:
            rows: N.
            explore: sample or be greedy.
            timestep: for exploration schedules; None takes the policy's own.
            out: contiguous float32 buffer `[N, noise_size]` for the random numbers. Needs
                `explore` and noise of a single kind (`only_kind`). The caller then finishes the
                noise.

        Returns:
            The state to act with, the noise `[N, noise_size]` and the exploration's parameters.
        """
        state = self.state
        params = self._no_params
        if self._num_params:
            now = state.global_timestep if timestep is None else timestep
            given = self.exploration.params(now, explore)
            params = checked_array(self.exploration, "params", given, (self._num_params,))
        state.last_used = tick()
        state.global_timestep += rows
        if not explore:
            return state, np.zeros((rows, self._noise_size), np.float32), params
        if state.ahead is not None:
            noise = state.ahead.take(rows) if numbers is None else None
            if noise is not None:
                return state, noise, params
            state.settle()
        noise, kind = None, self.only_kind
        if kind is None:
            given = self.exploration.draw_noise(state.rng, rows, params)
            shape = (rows, self._noise_size)
            noise = checked_array(self.exploration, "draw_noise", given, shape)
        elif numbers is not None:
            kind.draw(state.rng, numbers)
        else:
            noise = np.empty((rows, self._noise_size), np.float32)
            kind.draw(state.rng, noise)
            kind.finish(noise)
        if self.resets_per_episode:
            state = self._disturbed_state()
        return state, noise, params

    def _disturbed_state(self) -> PolicyState:
        """Returns a state with the perturbed weights of this episode (parameter noise)."""
        known, explorer = self._disturbed, self.exploration
        if known is None or known[0] != self.state.version or explorer.wants_perturbation:
            disturbed = self.state.copy()
            weights = {
                slot.key: self.state.arrays[slot.key] for slot in disturbed.layout.of("model")
            }
            disturbed.write(explorer.perturb(weights, self.state.rng))
            known = self._disturbed = (self.state.version, disturbed)
        return known[1]

    def dist_inputs(
        self, inputs: Sequence[np.ndarray], state: PolicyState | None = None
    ) -> np.ndarray:
        """Returns the distribution inputs `[N, n]` for checked inputs; counts no rows.

        Args:
            inputs: one array per port.
            state: another state of the same Program; None for the policy's own.
        """
        outputs = self._greedy(inputs, self.state if state is None else state)
        return np.array(outputs.dist_inputs)

    def values(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the values for checked inputs, float32 `[N]`; counts no rows."""
        return np.array(self._greedy(inputs, self.state).values)

    def _greedy(self, inputs: Sequence[np.ndarray], state: PolicyState) -> ActOutputs:
        noise = np.zeros((len(inputs[0]), self._noise_size), np.float32)
        params = np.zeros(self._num_params, np.float32)
        runner = self.runner
        with state.lock:
            return runner.run(state, inputs, noise, params)

    def checked_actions(self, actions: Structure) -> list[np.ndarray]:
        """Returns normalised actions as one array per leaf.

        Raises:
            ObservationError: if an action does not fit the action space.
        """
        spec = self.program.spec
        found = batch_leaves(spec.action_leaves, actions, "actions")
        for leaf, array in zip(spec.action_leaves, found, strict=True):
            if isinstance(leaf.space, gym.spaces.Discrete):
                last = np.asarray(leaf.space.n - 1)
            elif isinstance(leaf.space, gym.spaces.MultiDiscrete):
                last = leaf.space.nvec - 1
            else:
                continue
            wrong = (array < 0) | (array > last)
            if wrong.any():
                raise ObservationError(
                    f"{leaf.name('actions')} must be from 0 to {last.tolist()} (0-based; those of "
                    "the environment need actions_normalized=False), got "
                    f"{array[wrong].reshape(-1)[0]}."
                )
        return found

    def log_likelihoods(
        self, actions: Structure, inputs: Sequence[np.ndarray], *, normalized: bool
    ) -> np.ndarray:
        """Returns the log-probability of each action, float32 `[N]`; see `TFPolicy`."""
        spec = self.program.spec
        if not normalized:
            env_leaves = [
                leaf._replace(dtype=np.dtype(leaf.space.dtype)) for leaf in spec.action_leaves
            ]
            found = batch_leaves(env_leaves, actions, "actions")
            actions = nest(spec.action_space, spec.action_mapping.from_env(found))
        checked = self.checked_actions(actions)
        if len(checked[0]) != len(inputs[0]):
            raise BatchError(f"Got {len(checked[0])} actions for {len(inputs[0])} observations.")
        with self.state.lock:
            return self.program.runtime.log_likelihoods(self.state, inputs, checked)

    def to_env(
        self,
        actions: Sequence[np.ndarray],
        *,
        unsquash: bool | None = None,
        clip: bool | None = None,
    ) -> list[np.ndarray]:
        mapping = self.program.spec.action_mapping.override(unsquash, clip)
        return mapping.to_env(actions)
