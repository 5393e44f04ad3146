"""Policy drivers: the interface that samplers, algorithms, evaluation, maps and checkpoints use.

Each policy has one driver, `policy.driver`, so callers never check the policy type. The driver in
this module calls the public methods of a custom policy. Policies with a Program have the driver in
`compiled_driver.py`. A driver has two parts, acting and learning, because a subclass may override
only one of them.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.leaves import iterate_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import UsageError
from tfpolicies.models.action_mapping import ActionMapping, find_unscaled
from tfpolicies.models.ports import (
    PREVIOUS_STEP_SOURCES,
    ViewInput,
    make_leaf_ports,
    make_previous_step_views,
)
from tfpolicies.models.spaces import Leaf, action_leaves, batch_leaves, unflatten
from tfpolicies.policy.input_dict import name_states
from tfpolicies.policy.recurrent_state import flatten_states, unflatten_states

if TYPE_CHECKING:
    from tfpolicies.program.policy_state import PolicyState
    from tfpolicies.program.program import Program

logger = logging.getLogger("tfpolicies")

FILTER_ATTRIBUTES = ("filter", "reward_filter")
"""The attributes of a policy that hold its running statistics, or None."""

_warned_classes: weakref.WeakSet[type] = weakref.WeakSet()


class _DriverPart:
    """A part of a driver. It references its policy weakly, so that the policy can be freed."""

    def __init__(self, policy: Any) -> None:
        self._reference = weakref.ref(policy)

    @property
    def policy(self) -> Any:
        policy = self._reference()
        if policy is None:
            raise ReferenceError("The policy of this driver is gone. Keep the policy itself.")
        return policy

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the policy gets its own driver
        return type(None), ()


class SingleAction(NamedTuple):
    """Result of acting on one observation.

    Attributes:
        env_action: for the environment.
        states: the new recurrent state, arrays without a batch axis.
        extras: such as `action_logp`, by name.
    """

    env_action: Any
    states: Any
    extras: dict[str, Any]


class Acting(_DriverPart):
    """Acts by a policy's `compute_actions`, for samplers and sessions.

    Episodes start with the recurrent state of `Policy.get_initial_state`.

    Attributes:
        views: the inputs of model and value function besides observation and recurrent state.
        has_fixed_initial_state: whether all episodes start with the same recurrent state; otherwise
            `get_initial_state` is called for each.
        resets_per_episode: whether `start_episode` must be called when an episode ends.
        inference: the runtime that acts, "onnx" or "tf", with "auto" resolved; None without a
            Program.
        stackable: the object that can act in one call with others of its Program, or None.
    """

    views: Sequence[ViewInput] = ()
    resets_per_episode: bool = False
    stackable: Any = None
    _state_structure: Any = None

    @property
    def has_fixed_initial_state(self) -> bool:
        """Whether all episodes start with the same recurrent state."""
        return False

    @property
    def inference(self) -> str | None:
        """The runtime that acts; None without a Program."""
        return None

    @property
    def input_views(self) -> Sequence[ViewInput]:
        """The views that `act` needs: the previous action and reward, and `views`."""
        previous_views = make_previous_step_views(self.policy.action_space)
        return (
            *previous_views,
            *(view for view in self.views if view.name not in PREVIOUS_STEP_SOURCES),
        )

    @property
    def reads_episodes(self) -> bool:
        """Whether `act` needs the last infos and the episodes of its rows."""
        return bool(self.policy._signature.reads_episodes)

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
        """Acts on inputs that are known to fit.

        Args:
            obs: observation leaves `[N, ...]`.
            views: the leaves of `input_views`.
            states: the recurrent state, `[N, ...]` each.
            explore: sample or be greedy; None takes `config["explore"]`.
            infos: the last info of each row; needed with `reads_episodes`.
            episodes: the episode of each row; needed with `reads_episodes`.

        Returns:
            Actions for the environment, and the columns of each row: `actions` (one column per
            leaf), extras, and the new recurrent state `state_out_<i>`. The arrays are valid until
            the next call.

        Raises:
            UsageError: if `compute_actions` returns something else, or not one for each
                observation.
            ObservationError: if actions do not have the action space's shape.
        """
        policy = self.policy
        leaves = action_leaves(policy.action_space)
        obs = policy.driver.learning.normalize_observations(obs)
        batch = policy._convert_observations(unflatten(policy.observation_space, obs))
        inputs: dict[str, Any] = {"obs": batch}
        arrays = iter(views)
        for view in self.input_views if views else ():
            inputs[view.name] = view.unflatten([next(arrays) for _ in view.ports])
        if infos is not None:
            inputs["infos"] = list(infos)
        result = policy.compute_actions_from_input_dict(
            SampleBatch({**inputs, **self._name_states(states)}),
            explore=explore,
            timestep=policy.global_timestep,
            episodes=episodes,
        )
        method = f"{type(policy).__name__}.compute_actions"
        raw_actions, state_outs, extras = _check_act_result(result, method)
        actions = batch_leaves(leaves, raw_actions, "actions")
        ports = make_leaf_ports("actions", leaves)
        columns = {port.name: x for port, x in zip(ports, actions, strict=True)}
        columns |= {f"state_out_{i}": x for i, x in enumerate(flatten_states(state_outs))}
        columns |= {name: np.asarray(extra) for name, extra in extras.items()}
        _require_rows(columns, len(next(iterate_leaves(batch))), method)
        return unflatten(policy.action_space, self.to_env(actions)), columns

    def act_single(
        self,
        obs: Structure | None,
        state: Sequence[np.ndarray] | None = None,
        *,
        unsquash: bool | None = None,
        clip: bool | None = None,
        **arguments: object,
    ) -> SingleAction:
        """Acts on one observation by the policy's `compute_single_action`.

        Args:
            obs: the observation; None if it is in an `input_dict` among the arguments.
            state: the recurrent state.
            unsquash: see `Policy.to_env_action`.
            clip: see `Policy.to_env_action`.
            **arguments: further arguments of `Policy.compute_single_action`.
        """
        policy = self.policy
        action, states, extras = policy.compute_single_action(obs, state, **arguments)
        env_action = policy.to_env_action(action, unsquash=unsquash, clip=clip)
        return SingleAction(env_action, states, extras)

    def prefetch_noise(self, rows: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which acting is faster, with the same results.

        Args:
            rows: the total number of rows that `act` gets in it.
        """
        del rows
        return contextlib.nullcontext()

    def to_env(
        self,
        actions: Sequence[np.ndarray],
        *,
        unsquash: bool | None = None,
        clip: bool | None = None,
    ) -> list[np.ndarray]:
        """Maps leaves of the policy's own actions to the environment's actions.

        Args:
            actions: `[N, *shape]` each.
            unsquash: see `Policy.to_env_action`.
            clip: see `Policy.to_env_action`.
        """
        policy = self.policy
        config = policy.config
        normalize = config.get("normalize_actions", True) if unsquash is None else unsquash
        clip = config.get("clip_actions", False) if clip is None else clip
        mapping = ActionMapping(policy.action_space, normalize, clip, zero_based=False)
        if normalize:
            _warn_if_unscaled(policy, mapping.leaves, actions)
        return mapping.to_env(actions)

    def start_episode(self) -> None:
        """Called when an episode ends and the next one starts."""

    def _name_states(self, states: Sequence[np.ndarray]) -> dict[str, Any]:
        """Returns a recurrent state by its column names in an input dict."""
        if not states:
            return {}
        if self._state_structure is None:
            self._state_structure = self.policy.get_initial_state()
        return name_states(unflatten_states(self._state_structure, states))


class Learning(_DriverPart):
    """Trains a policy by its `learn_on_batch`, and prepares its train batches."""

    @property
    def detects_non_finite(self) -> bool:
        """Whether an update itself detects results that are not finite."""
        return False

    @property
    def compile_mode(self) -> str | None:
        """Name of the compilation mode of updates; None without a Program."""
        return None

    @property
    def lookahead(self) -> int:
        """Number of later rows that postprocessing reads; 0: trajectories end with fragments."""
        return 0

    @property
    def learns(self) -> bool:
        """Whether the class implements learning."""
        return bool(self.policy._learns())

    @property
    def postprocesses_trajectories(self) -> bool:
        """Whether `postprocess_trajectory` must be called for each trajectory."""
        return "postprocess_trajectory" in self.policy._overridden

    @property
    def postprocesses(self) -> bool:
        """Whether postprocessing adds or changes columns."""
        return self.postprocesses_trajectories or bool(self.policy._postprocesses)

    def freeze_views(self) -> Mapping[str, ViewRequirement]:
        requirements = self.policy._get_views()
        requirements.is_frozen = True
        views: Mapping[str, ViewRequirement] = requirements.added_views
        return views

    def select_columns(self, batch: Mapping[str, Any]) -> list[str]:
        """Returns the columns of a batch to keep for learning later: all but infos."""
        return [name for name in batch if name != SampleBatch.INFOS]

    def train(
        self,
        batch: SampleBatch,
        num_epochs: int,
        minibatch_size: int,
        *,
        shuffle: bool = True,
        standardize: Collection[str] = (),
    ) -> Mapping[str, Any]:
        """Learns from a whole train batch; here by `learn_on_batch`, which handles epochs itself.

        Args:
            batch: a postprocessed batch of N rows.
            num_epochs: passes over the batch. A policy that handles epochs itself ignores this and
                the following arguments.
            minibatch_size: rows per update.
            shuffle: whether rows are shuffled.
            standardize: columns to scale to mean 0 and standard deviation 1 first.

        Returns:
            The result of `learn_on_batch`.
        """
        del num_epochs, minibatch_size, shuffle, standardize
        result: Mapping[str, Any] = self.policy.learn_on_batch(batch)
        return result

    def update(
        self,
        batch: SampleBatch,
        num_epochs: int,
        minibatch_size: int,
        *,
        shuffle: bool = True,
        rng: np.random.Generator | None = None,
    ) -> Mapping[str, Any]:
        """Updates by all minibatches of all epochs; returns the result of the last one.

        Rows are shuffled in place in the batch (those of sequences are not). If the policy has a
        `learn_epochs`, that shuffles.

        Args:
            batch: a postprocessed batch of N rows.
            num_epochs: passes over the batch.
            minibatch_size: rows per update.
            shuffle: whether rows are shuffled.
            rng: shuffles the rows of a policy that has no generator.

        Raises:
            UsageError: if a result is not a dict.
        """
        policy = self.policy
        learn_epochs = getattr(policy, "learn_epochs", None)
        if learn_epochs is not None and shuffle:
            update_result = learn_epochs(batch, num_epochs, minibatch_size)
            return {**validate_result(policy, "learn_epochs", update_result)}
        result: Mapping[str, Any] = {}
        for _ in range(num_epochs):
            if shuffle and SampleBatch.SEQ_LENS not in batch:
                batch.shuffle(rng)
            for minibatch in batch.timeslices(minibatch_size):
                update_result = policy.learn_on_batch(minibatch)
                result = validate_result(policy, "learn_on_batch", update_result)
        return {**result}

    def replay(
        self, batch: SampleBatch, minibatch_size: int | None, update_targets: np.ndarray
    ) -> Mapping[str, Any]:
        """Updates by replayed rows, one minibatch after the other; returns the result.

        Args:
            batch: `[K * minibatch_size]` rows.
            minibatch_size: rows per update; None for one update of all rows, whose result also has
                the values that the loss records for each row.
            update_targets: bool `[K]`, whether target networks are updated after each update.
        """
        policy = self.policy
        result: Mapping[str, Any] = {}
        size = minibatch_size or batch.count
        ends = [0, *(np.flatnonzero(update_targets) + 1).tolist(), len(update_targets)]
        for start, stop in itertools.pairwise(ends):
            if start < stop:
                rows = batch.slice(start * size, stop * size)
                result = self.update(rows, 1, size, shuffle=False)
                if update_targets[stop - 1] and hasattr(policy, "update_target"):
                    policy.update_target()
        return result

    def adapt(self, result: Mapping[str, Any]) -> None:
        """Adapts the policy's coefficients to the result of `train`."""

    def observe(self, obs: Sequence[np.ndarray], columns: Mapping[str, np.ndarray]) -> None:
        """Adds the rows of a sample to the filters, if any. They take effect at the next flush.

        Args:
            obs: observation leaves, `[N, T, ...]` each.
            columns: the other columns, `[N, T, ...]` each; rewards are the environment's.
        """
        filters = self.policy.driver.filters
        if "filter" in filters:
            filters["filter"].observe([leaf.reshape(-1, *leaf.shape[2:]) for leaf in obs])
        if "reward_filter" in filters:
            filters["reward_filter"].observe(columns["rewards"])

    def flush_filters(self) -> None:
        """Applies pending running statistics, between two rounds of training."""
        for running_filter in self.policy.driver.filters.values():
            running_filter.flush()

    def normalize_observations(self, obs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns observation leaves `[..., *shape]` as batches store them: filtered."""
        running_filter = self.policy.driver.filters.get("filter")
        return obs if running_filter is None else running_filter.normalize_leaves(obs)

    def scale_rewards(self, rewards: np.ndarray) -> np.ndarray:
        """Returns rewards as batches store them: scaled by the reward filter, if any."""
        running_filter = self.policy.driver.filters.get("reward_filter")
        return rewards if running_filter is None else running_filter(rewards)

    def resolve_auto_settings(self) -> None:
        """Resolves every "auto" setting in the config, as the first use would."""

    def warm_up(self, rows: int, num_epochs: int, minibatch_size: int | None) -> None:
        """Traces and compiles acting and learning for batches of `rows`; changes no numbers."""

    def pop_loading_seconds(self) -> float:
        """Returns the seconds spent on loading batches since the last call."""
        return 0.0


class PolicyDriver(_DriverPart):
    """Manages a policy's state, and has the parts that act and learn.

    `get_state`, `set_state`, `copy` and `close` are methods of `Policy`.

    Args:
        policy: the policy to drive.

    Attributes:
        acting: for samplers, sessions, evaluation and stacked acting.
        learning: for algorithms and workers.
        state: the `PolicyState` that a `PolicyMap` may swap to disk; None for custom policies.
        program: the `Program` that policies share; None for custom policies.
        auto_settings: the settings that were "auto".
    """

    acting: Acting
    learning: Learning
    state: PolicyState | None = None
    program: Program | None = None
    auto_settings: Collection[str] = ()

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self.learning = Learning(policy)
        self.choose_parts()

    def choose_parts(self) -> None:
        """Chooses the parts. Called again when a method of the policy is replaced."""
        self.acting = Acting(self.policy)

    @property
    def spaces(self) -> tuple[gym.Space[Any] | None, gym.Space[Any] | None]:
        """The observation and the action space; None for one that the policy lacks."""
        names = "observation_space", "action_space"
        observation_space, action_space = (getattr(self.policy, name, None) for name in names)
        return observation_space, action_space

    @property
    def version(self) -> Any:
        """A value that changes when the policy's numbers change; None if unknown."""
        return None

    @property
    def is_frozen(self) -> bool:
        """Whether the policy only acts; see `PolicyMap.freeze`."""
        return False

    @property
    def generator(self) -> np.random.Generator | None:
        """The generator of action noise and of minibatch order; None if unknown.

        Learning that may overlap sampling has another generator. For a custom policy this is the
        attribute `generator`, if it is a NumPy generator.
        """
        generator = vars(self.policy).get("generator")
        return generator if isinstance(generator, np.random.Generator) else None

    @property
    def filters(self) -> dict[str, Any]:
        """The running statistics `filter` (observations) and `reward_filter`, if present."""
        attributes = vars(self.policy)
        return {
            name: attributes[name] for name in FILTER_ATTRIBUTES if attributes.get(name) is not None
        }

    def get_acting_weights(self) -> Mapping[str, np.ndarray] | None:
        """Returns copies of the weights that sampling needs; None if it needs all."""
        return None

    def apply_filters(self) -> None:
        """Makes acting and learning use the filters' current statistics."""

    def allow_non_finite(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which `set_weights` and `set_state` accept NaN and infinity."""
        return contextlib.nullcontext()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Checks that a state fits, without changes; see `Policy.set_state` for the errors."""
        self.policy._check_state(state)

    def require_changeable(self) -> None:
        """Checks that hyperparameters may be changed.

        Raises:
            FrozenPolicyError: if the policy is frozen.
            UsageError: if the policy has no known hyperparameters.
        """
        raise self._no_hyperparameters_error()

    def get_hyperparameter(self, name: str) -> float:
        """Returns the current value of a hyperparameter.

        Raises:
            ConfigError: if there is none of this name.
            UsageError: if the policy has no known hyperparameters.
        """
        raise self._no_hyperparameters_error()

    def set_hyperparameter(self, name: str, value: float | None) -> None:
        """Sets a hyperparameter of this policy only; see `get_hyperparameter` for the errors."""
        raise self._no_hyperparameters_error()

    def _no_hyperparameters_error(self) -> UsageError:
        return UsageError(f"{self.policy!r} has no known hyperparameters.")

    def copy_from(self, other: Any) -> None:
        """Copies all state that acting depends on from a policy with the same model.

        Raises:
            UsageError: if the other policy has another model; nothing is changed then.
        """
        self.policy.set_weights(other.get_weights())
        self._copy_filters(other.driver)

    def _copy_filters(self, other: PolicyDriver) -> None:
        for name, running_filter in self.filters.items():
            if name in other.filters:
                running_filter.sync(other.filters[name])

    def make_copy(self, state: Mapping[str, Any]) -> Any:
        """Returns a policy of the same class, spaces and config in a state from `get_state`."""
        result: Any = copy.deepcopy(self.policy)
        result.set_state(state)
        return result

    def copy_with_settings(
        self, policy_id: str, settings: Mapping[str, Any], *, rebuild: bool
    ) -> Any:
        """Returns a copy with other settings.

        Args:
            policy_id: of the copy.
            settings: replace those of the config.
            rebuild: whether the constructor must read the settings. A policy with a Program is then
                created again, with the connectors and additional attributes of this one.
        """
        del rebuild
        result: Any = self.policy.copy(policy_id)
        result.config.update(settings)
        return result


def validate_result(policy: object, method: str, result: object) -> Mapping[str, Any]:
    """Returns the result of an update method after checking its type."""
    if isinstance(result, Mapping):
        return result
    raise UsageError(
        f"{type(policy).__name__}.{method} must return a dict of results, such as what "
        f"super().{method} returns, or {{}}; got {result!r:.200}."
    )


def _require_rows(columns: Mapping[str, np.ndarray], rows: int, method: str) -> None:
    for name, column in columns.items():
        if column.shape[:1] != (rows,):
            raise UsageError(
                f"{method} got {rows} observations, but returned {name} of the shape "
                f"{column.shape}; its first axis must have one entry for each."
            )


def _check_act_result(result: object, method: str) -> tuple[Any, Any, Mapping[str, Any]]:
    """Returns actions, recurrent state and extras from a result of `compute_actions`."""
    if isinstance(result, tuple | list) and len(result) == 3:
        actions, state_outs, extras = result
        if isinstance(state_outs, list | tuple | Mapping) and isinstance(extras, Mapping):
            return actions, state_outs, extras
    raise UsageError(
        f"{method} must return (actions, state_outs, extras): state_outs a list or dict of arrays, "
        f"extras a dict; without a recurrent state (actions, [], {{}}). Got {result!r:.200}."
    )


def _warn_if_unscaled(policy: Any, leaves: Sequence[Leaf], actions: Sequence[np.ndarray]) -> None:
    """Warns, once for each class, of an action outside -1 to 1 with `normalize_actions`."""
    policy_class = type(policy)
    if policy_class in _warned_classes:
        return
    unscaled = find_unscaled(leaves, actions)
    if unscaled is not None:
        _warned_classes.add(policy_class)
        logger.warning(
            "%s returned the action %g, but with normalize_actions=True actions are from -1 to 1: "
            "the environment gets them scaled to the bounds of its action space, and clipped. If "
            "your policy returns actions in the environment's units, set "
            "environment(normalize_actions=False).",
            policy_class.__name__,
            unscaled,
        )
