"""The abstract policy: NumPy in, NumPy out, no TensorFlow."""

from __future__ import annotations

import abc
import copy
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np

from tfpolicies.base.allowlist import allow_in_checkpoint
from tfpolicies.base.extensions import Extensible
from tfpolicies.base.type_aliases import Structure
from tfpolicies.batch.leaves import expand_batch_axis, get_first_row
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_defaults import add_state_views, make_default_view_requirements
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.config.live_dict import copy_containers
from tfpolicies.config.migration_hints import (
    PREDICT_ARGUMENTS,
    describe_missing_attribute,
    suggest_for_unknown_keywords,
)
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.connectors.pipelines import (
    ActionConnectorPipeline,
    AgentConnectorPipeline,
    choose_restored_pipeline,
    connector_metrics,
    pipelines_from_state,
    pipelines_to_state,
    warn_skipped_connectors,
)
from tfpolicies.errors import (
    BatchError,
    ConfigError,
    UnsupportedMethodError,
    UsageError,
    WeightsError,
)
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.rllib_flattening import flatten_observation_batch
from tfpolicies.models.spaces import (
    action_leaves,
    batch_leaves,
    describe_space,
    leaves,
    space_key,
    space_struct,
    unflatten,
)
from tfpolicies.policy import overrides
from tfpolicies.policy.driver import PolicyDriver
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.input_dict import add_batch_axis, make_row, read_states
from tfpolicies.policy.policy_session import PolicySession
from tfpolicies.policy.policy_view_requirements import PolicyViewRequirements
from tfpolicies.policy.prediction import predict
from tfpolicies.policy.recurrent_state import flatten_states
from tfpolicies.system.paths import resolve_path

logger = logging.getLogger("tfpolicies")


class ActionBatch(NamedTuple):
    """Result of acting; unpacks as `actions, state_outs, extras`."""

    actions: Any  # [B, *action_shape], normalised; nested for nested action spaces
    state_outs: list[np.ndarray]  # each [B, size]; [] without a recurrent state
    extras: dict[str, np.ndarray]  # each [B, ...]: action_logp, action_prob, vf_preds, ...


@allow_in_checkpoint("policy_class")
class Policy(Extensible, metaclass=overrides.PolicyMeta):
    """Chooses actions for observations, and may learn.

    A custom policy implements `compute_actions`. One that learns also overrides
    `learn_on_batch`, or `compute_gradients` and `apply_gradients`; and `get_weights` and
    `set_weights`. Every other method works on these.

    Args:
        observation_space: of the environment, possibly nested.
        action_space: of the environment.
        config: settings, as a dict or an `AlgorithmConfig`.

    Attributes:
        flat_observations: set it on a class whose methods expect observations as RLlib's do:
            float32 rows `[B, F]`, the parts of a nested space concatenated and choices one-hot.
            Boxes stay as they are. A `TFPolicy` refuses it with a `UsageError`.
        global_timestep: rows acted on, or the last value from `on_global_var_update`.
        num_grad_updates: updates done.
        agent_connectors: transform observations and rewards before the policy; None without
            connectors, and until a worker sets those of the config.
        action_connectors: transform the policy's actions; None as for `agent_connectors`.
        filter: the running statistics of observations; None without `observation_filter`.
        reward_filter: the running statistics of rewards; None without `reward_filter`.

    >>> class Always(Policy):
    ...     def compute_actions(self, obs_batch, state_batches=None, **kwargs):
    ...         return ActionBatch(np.full(len(obs_batch), 1), [], {})
    >>> space = gym.spaces.Discrete(2)
    >>> policy = Always(gym.spaces.Box(-1, 1, (3,)), space, {})
    >>> int(policy.compute_single_action([0.0, 0.0, 0.0])[0])
    1
    """

    _describe_missing = staticmethod(describe_missing_attribute)
    flat_observations: ClassVar[bool] = False
    global_timestep: int = 0
    num_grad_updates: int = 0
    _base_methods: ClassVar[dict[str, Any]] = {}
    """The methods that a driver may bypass; see `overrides`."""
    _overridden: frozenset[str] = frozenset()
    """Those of them that the policy overrides; the driver calls these."""
    _signature: overrides.ActSignature
    """The arguments that `compute_actions` accepts."""
    _driver_class: ClassVar[type[PolicyDriver]] = PolicyDriver
    _driver: PolicyDriver | None = None
    _pageable: Any = None
    """`driver.state`, for fast access by a `PolicyMap`."""
    _views: PolicyViewRequirements | None = None
    _uses_dummy_batch = False  # whether postprocessing runs on a dummy batch

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls._inspect_methods()

    @classmethod
    def _inspect_methods(cls) -> None:
        cls._overridden = overrides.find_overridden(cls, cls._base_methods)
        cls._signature = overrides.ActSignature.from_owner(cls, _act_on_dict)

    def _inspect_instance_methods(self) -> None:
        """Finds methods replaced on this policy only, and makes the driver call them."""
        attributes = vars(self)
        for name in ("_overridden", "_signature"):
            attributes.pop(name, None)
        instance_methods = overrides.OVERRIDABLE_METHODS & attributes.keys()
        if instance_methods:
            attributes["_overridden"] = self._overridden | instance_methods
            attributes["_signature"] = overrides.ActSignature.from_owner(self, _act_on_dict)
        if "_driver" in attributes:
            self.driver.choose_parts()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in overrides.OVERRIDABLE_METHODS:
            self._inspect_instance_methods()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in overrides.OVERRIDABLE_METHODS:
            self._inspect_instance_methods()

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        config: Mapping[str, Any],
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.config = config if isinstance(config, dict) else dict(config)
        self.policy_id = DEFAULT_POLICY_ID
        self.agent_connectors: AgentConnectorPipeline | None = None
        self.action_connectors: ActionConnectorPipeline | None = None
        self._loaded: dict[int, Any] = {}
        self.filter, self.reward_filter = self._make_filters()

    def _make_filters(self) -> tuple[Any, Any]:
        """Returns the running statistics of observations and of rewards; None for "NoFilter"."""
        names = [
            self.config.get(name, "NoFilter") for name in ("observation_filter", "reward_filter")
        ]
        if names == ["NoFilter", "NoFilter"]:
            return None, None
        from tfpolicies.models.mean_std_filters import (  # imports TensorFlow
            make_filter,
            make_reward_filter,
        )

        filter_name, reward_filter_name = names
        observation_filter = (
            None if filter_name == "NoFilter" else make_filter(filter_name, self.observation_space)
        )
        return observation_filter, make_reward_filter(reward_filter_name)

    @property
    def driver(self) -> PolicyDriver:
        """The driver that samplers, algorithms, maps and checkpoints use."""
        driver = self._driver
        if driver is None or driver._reference() is not self:  # copied from another policy
            driver = self._driver = self._driver_class(self)
            overrides.register_policy(self)
        return driver

    # -- acting -------------------------------------------------------------------------------

    @abc.abstractmethod
    def compute_actions(
        self,
        obs_batch: Structure,
        state_batches: Sequence[np.ndarray] | None = None,
        prev_action_batch: Structure | None = None,
        prev_reward_batch: Structure | None = None,
        info_batch: Any = None,
        episodes: Any = None,
        explore: bool | None = None,
        timestep: int | None = None,
        **kwargs: Any,
    ) -> ActionBatch:
        """Chooses one action for each row of `obs_batch` `[B, ...]`.

        Args:
            obs_batch: observations, nested as the space is; lists of rows are accepted.
            state_batches: the recurrent state of each row, one array `[B, size]` per state tensor.
            prev_action_batch: the last actions `[B, ...]`, for models that read them; for one that
                reads the n last, `[B, n, ...]`.
            prev_reward_batch: the last rewards `[B]`, or `[B, n]`, for models that read them.
            info_batch: accepted and unused.
            episodes: accepted and unused.
            explore: sample (True) or be greedy (False); None takes `config["explore"]`.
            timestep: the time step for schedules of exploration; None takes the policy's own.
            **kwargs: accepted and unused.

        Returns:
            The actions, the new recurrent state, and extras such as `action_logp`.
        """

    def compute_actions_from_input_dict(
        self,
        input_dict: Mapping[str, Any],
        explore: bool | None = None,
        timestep: int | None = None,
        episodes: Any = None,
        **kwargs: Any,
    ) -> ActionBatch:
        """Calls `compute_actions` with `obs`, `state_in_*`, `prev_*` and `infos` of a batch.

        A recurrent state that is a dict is in `state_in`. Arguments that the signature of
        `compute_actions` does not name are left out.

        Raises:
            KeyError: if `input_dict` has no `obs`.
        """
        arguments = {
            "prev_action_batch": input_dict.get("prev_actions"),
            "prev_reward_batch": input_dict.get("prev_rewards"),
            "info_batch": input_dict.get("infos"),
            "explore": explore,
            "timestep": timestep,
            "episodes": episodes,
        }
        if views := self._select_views(input_dict):
            arguments["views"] = views
        if not self._signature.accepts_kwargs:
            arguments = {name: x for name, x in arguments.items() if name in self._signature.names}
        states = read_states(input_dict)
        return self.compute_actions(
            self._convert_observations(input_dict["obs"]), states, **arguments, **kwargs
        )

    def _convert_observations(self, obs_batch: Structure) -> Any:
        """Converts observations to the form that methods of the class expect."""
        if not self.flat_observations:
            return obs_batch
        return flatten_observation_batch(leaves(self.observation_space), obs_batch)

    def _select_views(self, input_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the argument `views` of `compute_actions` from an input dict."""
        return {}

    def compute_single_action(
        self,
        obs: Structure | None = None,
        state: Sequence[np.ndarray] | None = None,
        *,
        prev_action: Structure | None = None,
        prev_reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        input_dict: Mapping[str, Any] | None = None,
        episode: Any = None,
        explore: bool | None = None,
        timestep: int | None = None,
        **kwargs: Any,
    ) -> tuple[Any, list[np.ndarray], dict[str, Any]]:
        """Chooses the action for one observation.

        Args:
            obs: one observation, without a batch axis.
            state: the recurrent state, one array `[size]` per state tensor.
            prev_action: the last action.
            prev_reward: the last reward.
            info: the last info.
            input_dict: gives all of these under their column names instead.
            episode: accepted and unused.
            explore: as in `compute_actions`.
            timestep: as in `compute_actions`.
            **kwargs: passed on.

        Returns:
            The action, the new recurrent state and the extras, all without a batch axis.
        """
        if input_dict is None:
            input_dict = make_row(obs, state, prev_action, prev_reward, info)
        actions, states, extras = self.compute_actions_from_input_dict(
            add_batch_axis(input_dict),
            explore=explore,
            timestep=timestep,
            episodes=[episode],
            **kwargs,
        )
        first_extras = {key: value[0] for key, value in extras.items()}
        is_dict = isinstance(states, Mapping)
        first_states = (
            get_first_row(states) if is_dict else [get_first_row(part) for part in states]
        )
        return get_first_row(actions), first_states, first_extras

    @suggest_for_unknown_keywords(lambda _, name: PREDICT_ARGUMENTS.get(name, ""))
    def predict(
        self,
        obs: Structure,
        state: Structure | None = None,
        *,
        reward: Structure | None = None,
        explore: bool | None = False,
        batched: bool | None = None,
    ) -> Any:
        """Returns actions for `env.step`: greedy by default, in the environment's units.

        Observations and actions pass through the policy's connectors.

        Args:
            obs: one observation, or a batch: its arrays with a leading axis `[B, ...]`.
            state: the state that the last call returned, for policies with a recurrent state, or
                `[*arrays]` of `get_initial_state()`; None at the start of an episode.
            reward: the reward of the last action, a number or `[B]`; for models that read it.
            explore: True samples; None takes `config["explore"]`.
            batched: whether `obs` is a batch; None: its shape decides.

        Returns:
            One action, or a batch `[B, ...]`, as arrays that you own. For a policy with a recurrent
            state, or one that reads earlier steps, `(actions, state)`.

        Raises:
            ObservationError: if the observation does not fit the space, has NaN or infinity, or a
                mask that allows no action (see `debugging(check_inputs=...)`).
            UsageError: for a state of another policy or another number of rows, and if a connector
                keeps data of running episodes.
        """
        return predict(self, obs, state, reward=reward, explore=explore, batched=batched)

    def session(
        self, batch_size: int | None = None, *, explore: bool | None = None
    ) -> PolicySession:
        """Returns an object that acts step by step and keeps the recurrent state in between.

        It does not apply connectors, and logs that.

        Args:
            batch_size: number of environments that act together; None for one, without a batch
                axis.
            explore: sample (True) or be greedy (False); None takes `config["explore"]`.
        """
        warn_skipped_connectors("session()", self.agent_connectors, self.action_connectors)
        return PolicySession(self, batch_size, explore=explore)

    def to_env_action(
        self, action: Structure, *, unsquash: bool | None = None, clip: bool | None = None
    ) -> Any:
        """Converts one action for the environment: a Box action is mapped into its bounds.

        Args:
            action: as `compute_single_action` returns it.
            unsquash: map to the Box's bounds; None takes `config["normalize_actions"]`.
            clip: clip to the Box's bounds; None takes `config["clip_actions"]`.
        """
        rows = batch_leaves(action_leaves(self.action_space), expand_batch_axis(action), "action")
        mapped = self.driver.acting.to_env(rows, unsquash=unsquash, clip=clip)
        return unflatten(self.action_space, [leaf[0] for leaf in mapped])

    # -- trajectories -------------------------------------------------------------------------

    def postprocess_fragments(self, fragments: Fragments) -> None:
        """Adds columns for all trajectories of a sample at once; none by default."""
        del fragments

    @property
    def _postprocesses(self) -> bool:
        """Whether `postprocess_fragments` adds or changes columns."""
        return type(self).postprocess_fragments is not Policy.postprocess_fragments

    def postprocess_trajectory(
        self,
        sample_batch: SampleBatch,
        other_agent_batches: Mapping[Any, tuple[str, Policy, Any]] | None = None,
        episode: Any = None,
    ) -> Any:
        """Returns the batch of one trajectory with the columns added that learning needs.

        Args:
            sample_batch: rows of one agent of one episode, in order.
            other_agent_batches: by agent id, `(policy_id, policy, batch)` of the other agents.
            episode: the episode, if any.
        """
        del other_agent_batches, episode
        return sample_batch

    # -- learning -----------------------------------------------------------------------------

    def loss(self, model: Any, dist_class: Any, train_batch: Any) -> Any:
        """Returns the loss of a train batch; policies that learn by gradients override it.

        Raises:
            UnsupportedMethodError: here; also a NotImplementedError.
        """
        raise self._not_offered_error("loss")

    def learn_on_batch(self, samples: SampleBatch) -> dict[str, Any]:
        """Does one update: `compute_gradients`, then `apply_gradients`.

        Returns:
            The info of the gradients; `{}` for a policy that does not learn.
        """
        gradients, info = self.compute_gradients(samples)
        self.apply_gradients(gradients)
        return info

    def _learns(self) -> bool:
        return "learn_on_batch" in self._overridden

    def compute_gradients(
        self, postprocessed_batch: SampleBatch
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns gradients, one per variable, and statistics; both empty by default."""
        del postprocessed_batch
        return [], {}

    def apply_gradients(self, gradients: Sequence[Any]) -> None:
        """Updates the weights with gradients as `compute_gradients` returns them.

        Raises:
            UsageError: if this policy has no weights but some gradients are given.
        """
        if len(gradients):
            raise UsageError(
                f"{type(self).__name__} has no weights to update; got {len(gradients)} gradients. "
                "Override `apply_gradients` in a policy that learns."
            )

    def learn_on_batch_from_replay_buffer(
        self, replay_actor: Any, policy_id: str
    ) -> dict[str, Any]:
        """Samples one train batch from a replay buffer and does one update on it.

        Args:
            replay_actor: has a method `replay(policy_id)`, which returns a batch, or None while it
                has too few rows; for example a `MultiAgentReplayBuffer`.
            policy_id: the policy whose rows are sampled.

        Returns:
            The result of `learn_on_batch`; `{}` if there was no batch.
        """
        batch = replay_actor.replay(policy_id)
        return {} if batch is None else self.learn_on_batch(batch)

    def load_batch_into_buffer(self, batch: Mapping[str, Any], buffer_index: int = 0) -> int:
        """Keeps a batch for `learn_on_loaded_batch`; returns its number of rows."""
        self._loaded[buffer_index] = batch if isinstance(batch, SampleBatch) else SampleBatch(batch)
        return self.get_num_samples_loaded_into_buffer(buffer_index)

    def get_num_samples_loaded_into_buffer(self, buffer_index: int = 0) -> int:
        """Returns the rows of a loaded batch, 0 before loading."""
        return self._loaded[buffer_index].count if buffer_index in self._loaded else 0

    def learn_on_loaded_batch(self, offset: int = 0, buffer_index: int = 0) -> dict[str, Any]:
        """Does one update on rows `[offset, offset + minibatch size)` of a loaded batch.

        The minibatch size is `config["sgd_minibatch_size"]`, or `train_batch_size` if that is not
        set; all rows are used if it is not smaller than the batch.

        Raises:
            BatchError: if no batch is loaded, or `offset` is beyond its end.
        """
        rows = self.get_num_samples_loaded_into_buffer(buffer_index)
        size = self._get_minibatch_size() or rows
        if not rows:
            raise BatchError(
                f"Buffer {buffer_index} is empty: you must call load_batch_into_buffer before "
                "learn_on_loaded_batch."
            )
        if size < rows and not 0 <= offset < rows:
            raise BatchError(f"offset must be in [0, {rows}), got {offset}.")
        return self._learn_on_rows(self._loaded[buffer_index], offset, size)

    def _learn_on_rows(self, batch: SampleBatch, offset: int, size: int) -> dict[str, Any]:
        """Does one update on `size` rows of a loaded batch; on all rows if it has no more."""
        uses_all_rows = size >= batch.count
        return self.learn_on_batch(batch if uses_all_rows else batch.slice(offset, offset + size))

    def _get_minibatch_size(self) -> int:
        return self.config.get("sgd_minibatch_size") or self.config.get("train_batch_size") or 0

    def compute_log_likelihoods(
        self,
        actions: Structure,
        obs_batch: Structure,
        state_batches: Sequence[np.ndarray] | None = None,
        prev_action_batch: Structure | None = None,
        prev_reward_batch: Structure | None = None,
        actions_normalized: bool = True,
        in_training: bool = True,
    ) -> np.ndarray:
        """Returns the log-probability of each action, float32 `[B]`.

        Raises:
            UnsupportedMethodError: if the policy does not implement it; also a NotImplementedError.
        """
        raise self._not_offered_error("compute_log_likelihoods")

    # -- views --------------------------------------------------------------------------------

    @property
    def view_requirements(self) -> PolicyViewRequirements:
        """The columns that acting and learning read, and their source columns, by name.

        A view that you set becomes a column of the policy's batches, for postprocessing and
        learning; see "Views" in `docs/howto/models.md`. Set it in the constructor of the policy's
        class.

        Raises:
            UnsupportedMethodError: when a view is not supported, and on changes of other columns.
            UsageError: when it is set after the first sample or update.
        """
        return self._get_views().bind(self)

    @view_requirements.setter
    def view_requirements(self, requirements: Mapping[str, ViewRequirement]) -> None:
        self.view_requirements.update(requirements)

    def init_view_requirements(self) -> None:
        """Creates the default requirements if there are none yet; they are pruned when read."""
        if self._views is None:
            self._views = PolicyViewRequirements(self._get_required_views())

    def _get_views(self) -> PolicyViewRequirements:
        if self._views is None:
            self.init_view_requirements()
        if self._views is None:  # a custom class overrides init_view_requirements
            self._views = PolicyViewRequirements(self._get_required_views())
        return self._views

    def _get_required_views(self) -> Mapping[str, ViewRequirement]:
        """Returns the views that the model requires for training only."""
        return {}

    def _make_default_views(self) -> dict[str, ViewRequirement]:
        """Returns the requirements of the columns that every batch has."""
        views = make_default_view_requirements(self.observation_space, self.action_space)
        steps = {**MODEL_DEFAULTS, **self.config.get("model", {})}["max_seq_len"]
        states = flatten_states(self.get_initial_state())
        return add_state_views(views, states, max_seq_len=steps)

    def maybe_add_time_dimension(
        self, input_dict: Mapping[str, Any], seq_lens: Structure, framework: str | None = None
    ) -> Any:
        """Returns `input_dict` unchanged: the Program folds rows into sequences itself."""
        del seq_lens, framework
        return input_dict

    def maybe_remove_time_dimension(self, input_dict: Mapping[str, Any]) -> Any:
        """Returns `input_dict` unchanged: the Program's outputs have no time axis."""
        return input_dict

    # -- connectors ---------------------------------------------------------------------------

    def get_connector_metrics(self) -> dict[str, dict[str, float]]:
        """Returns the mean time of each connector in ms, `<name>_ms`; `{}` without connectors.

        The keys are `agent_connectors` and `action_connectors`.
        """
        if self.agent_connectors is None and self.action_connectors is None:
            return {}
        return connector_metrics(self.agent_connectors, self.action_connectors)

    def reset_connectors(self, env_id: int | str) -> None:
        """Resets the connectors' episode data of one environment, or of several."""
        for pipeline in (self.agent_connectors, self.action_connectors):
            if pipeline is not None:
                pipeline.reset(env_id)

    def restore_connectors(self, state: Mapping[str, Any]) -> None:
        """Creates the connectors that `state["connector_configs"]` describes, if any.

        Existing connectors with the same configuration stay, including their episode data. If the
        state does not contain the environment's observation space, and no existing connectors know
        it, call `agent_connectors.connect(space)` afterwards, as a worker does.

        Raises:
            ConfigError: if the state is malformed; nothing is changed then.
            SpaceError: if they do not fit the spaces of the existing connectors; nothing is changed
                then.
        """
        self.agent_connectors, self.action_connectors = self._build_connectors(state)

    def _build_connectors(
        self, state: Mapping[str, Any]
    ) -> tuple[AgentConnectorPipeline | None, ActionConnectorPipeline | None]:
        """Returns the connectors for `restore_connectors`, and changes nothing."""
        agent, action = pipelines_from_state(state.get("connector_configs") or {})
        agent = choose_restored_pipeline(self.agent_connectors, agent)
        action = choose_restored_pipeline(self.action_connectors, action)
        if action is not None and not action.is_connected:
            action.connect(self.action_space)
        return agent, action

    # -- weights and state --------------------------------------------------------------------

    def copy(self, policy_id: str | None = None) -> Any:
        """Returns an independent policy in the same state, by `copy.deepcopy`.

        Args:
            policy_id: of the copy; None for the same.
        """
        result = copy.deepcopy(self)
        result.policy_id = self.policy_id if policy_id is None else policy_id
        return result

    def get_weights(self) -> Any:
        """Returns copies of the weights; `{}` for a policy without any."""
        return {}

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any]) -> None:
        """Overwrites the weights with values from `get_weights`.

        Raises:
            UsageError: if this policy has no weights but some are given.
        """
        if weights:
            raise UsageError(f"{type(self).__name__} has no weights to set; got {len(weights)}.")

    def get_state(self) -> dict[str, Any]:
        """Returns the state that `set_state` restores.

        Keys: `weights`, `global_timestep`, `num_grad_updates`, `policy_spec` (class, spaces and
        config), `filter` and `reward_filter` with those, and `connector_configs` with connectors.
        """
        state: dict[str, Any] = {
            "weights": self.get_weights(),
            "global_timestep": self.global_timestep,
            "num_grad_updates": self.num_grad_updates,
            "policy_spec": {
                "policy_class": type(self),
                "observation_space": self.observation_space,
                "action_space": self.action_space,
                "config": copy_containers(self.config),
            },
        }
        state |= {
            name: running_filter.get_state() for name, running_filter in self.driver.filters.items()
        }
        connectors = pipelines_to_state(self.agent_connectors, self.action_connectors)
        return {**state, "connector_configs": connectors} if connectors else state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`; the policy keeps its own spaces and config.

        Raises:
            KeyError: if `weights` or `global_timestep` is missing.
        """
        self._check_state(state)
        self.set_weights(state["weights"])
        self.global_timestep = int(state["global_timestep"])
        self.num_grad_updates = int(state.get("num_grad_updates", self.num_grad_updates))
        for name, running_filter in self.driver.filters.items():
            if name in state:
                running_filter.set_state(state[name])
        self.restore_connectors(state)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Checks a state without changing anything; warns if it is for other spaces.

        Raises:
            KeyError: if `weights` or `global_timestep` is missing.
            ConfigError: if the connectors' state is malformed.
        """
        _ = state["weights"], state["global_timestep"]
        self._build_connectors(state)
        spec = state.get("policy_spec") or {}
        for name in ("observation_space", "action_space"):
            stored_space, space = spec.get(name), getattr(self, name)
            if stored_space is not None and space_key(stored_space) != space_key(space):
                logger.warning(
                    "the state is of a policy with the %s %s; %r keeps its own, %s.",
                    name,
                    stored_space,
                    self,
                    space,
                )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Policy:
        """Returns a new policy of the class, spaces and config in a state from `get_state`.

        The class is the one in the state, not the one that this is called on.

        Raises:
            WeightsError: if the state has no `policy_spec`.
        """
        spec = state.get("policy_spec")
        if spec is None:
            raise WeightsError(
                "No `policy_spec` key in the state; use a state that `get_state()` returned."
            )
        policy_class: type[Policy] = spec["policy_class"]
        policy = policy_class(spec["observation_space"], spec["action_space"], spec["config"])
        policy.set_state(state)
        return policy

    def export_checkpoint(
        self,
        export_dir: str | os.PathLike[str],
        filename_prefix: str | None = None,
        *,
        policy_state: Mapping[str, Any] | None = None,
        checkpoint_format: str = "json",
    ) -> None:
        """Writes a checkpoint into a folder: `policy.json` and HDF5 files, no pickle.

        If the process is killed at any instant, the folder's old or new checkpoint is intact. With
        `config["export_native_model_files"]` it also writes a SavedModel to the subfolder `model`.

        Args:
            export_dir: the folder, created if it is missing.
            filename_prefix: must be None.
            policy_state: a state from `get_state` to write instead of the current one.
            checkpoint_format: "json", the only one.

        Raises:
            ConfigError: for another format, or a `filename_prefix`.
            CheckpointError: if it cannot be written.
        """
        from tfpolicies.policy import policy_checkpoints  # needs TensorFlow, unlike this module

        if filename_prefix is not None:
            raise ConfigError("filename_prefix is no longer used; name the folder instead.")
        if checkpoint_format != "json":
            raise ConfigError(f"checkpoint_format must be 'json', got {checkpoint_format!r}.")
        folder = resolve_path(export_dir)
        policy_checkpoints.write_policy_checkpoint(self, folder, policy_state)
        if self.config.get("export_native_model_files"):
            self.export_model(folder / "model")

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | os.PathLike[str],
        policy_ids: Sequence[str] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        allow_non_finite: bool = False,
        model_work_limit: float = 1.0,
    ) -> Any:
        """Returns the policy of a checkpoint, or the policies of an algorithm's checkpoint by id.

        The policies must be of this class or of subclasses of it; `Policy` accepts all. Nothing in
        the file is executed. To load a class of your own, call this method on it. Pass in `config`
        objects that a file cannot store (a custom distribution, a model that Keras cannot rebuild).
        A policy needs its callbacks only for training, and raises if they are missing then.

        Args:
            checkpoint: the folder, or the result of `Algorithm.save`.
            policy_ids: of an algorithm's checkpoint, load only these.
            config: settings that replace stored ones.
            allow_non_finite: also accept weights with NaN or infinity.
            custom_objects: custom layers and similar objects of a stored Keras model: name ->
                class. Those registered by `keras.saving.register_keras_serializable` may be left
                out.
            model_work_limit: how many times the usual work a stored Keras model may take, in calls,
                operations and memory; `math.inf` for no limit. See `docs/decisions/003`.

        Raises:
            CheckpointError: if it is missing, damaged or foreign, of another class or not finite,
                or if a stored model takes too much work; the message names the file.
            ConfigError: if `model_work_limit` is not a positive number.
            UnknownPolicyError: if one of `policy_ids` is not in it.
        """
        # Imported here, because they need TensorFlow, unlike this module.
        from tfpolicies.models.work import limit_work
        from tfpolicies.policy import policy_checkpoints

        path = policy_checkpoints.get_path(checkpoint)
        scope = policy_checkpoints.custom_object_scope(custom_objects or {})
        with scope, limit_work(model_work_limit):
            return policy_checkpoints.load_policies(
                path, policy_ids, cls, config, allow_non_finite=allow_non_finite
            )

    def export_model(
        self,
        export_dir: str | os.PathLike[str],
        onnx: int | bool | None = None,
        *,
        layout: str | None = None,
        litert: bool | str = False,
        observations: Structure | None = None,
        web: bool = False,
        ort_web: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Writes the policy for serving.

        Raises:
            UnsupportedMethodError: if the policy has no TensorFlow code; also a
                NotImplementedError.
        """
        raise self._not_offered_error("export_model")

    def import_model_from_h5(self, import_file: str | os.PathLike[str]) -> Any:
        """Loads weights from a Keras file.

        Raises:
            UnsupportedMethodError: if the policy has no Keras model; also a NotImplementedError.
        """
        raise self._not_offered_error("import_model_from_h5")

    def on_global_var_update(self, global_vars: Mapping[str, Any]) -> None:
        """Sets the counters to those of the whole run.

        Args:
            global_vars: `timestep`, and `num_grad_updates` if it should change.

        Raises:
            KeyError: if `timestep` is missing.
        """
        self.global_timestep = int(global_vars["timestep"])
        if global_vars.get("num_grad_updates") is not None:
            self.num_grad_updates = int(global_vars["num_grad_updates"])

    # -- facts --------------------------------------------------------------------------------

    @property
    def observation_space_struct(self) -> Any:
        """The observation space as nested dicts and tuples of leaf spaces."""
        return space_struct(self.observation_space)

    @property
    def action_space_struct(self) -> Any:
        """The action space as nested dicts and tuples of leaf spaces."""
        return space_struct(self.action_space)

    @property
    def devices(self) -> list[str]:
        """The devices that learning uses, such as `["/cpu:0"]`."""
        return ["/cpu:0"]

    def is_recurrent(self) -> bool:
        """Whether acting needs a recurrent state."""
        return self.num_state_tensors() > 0

    def num_state_tensors(self) -> int:
        """Returns the number of arrays of the recurrent state."""
        return len(self.get_initial_state())

    def get_initial_state(self) -> list[np.ndarray]:
        """Returns the recurrent state at the start of an episode, one array `[size]` per tensor.

        It may also be a dict of such arrays: `compute_actions` then gets and returns a dict. For a
        custom policy it is called for each episode.
        """
        return []

    def get_exploration_state(self) -> dict[str, Any]:
        """Returns the state of the exploration; `{}` if it has none."""
        return {}

    def get_session(self) -> Any:
        """Returns the TensorFlow session of a graph-mode policy, None for others."""
        return None

    def close(self) -> None:
        """Releases resources outside of Python's memory; here a no-op."""

    def get_host(self) -> str:
        """Returns the computer's network name, "" if it has none."""
        return socket.gethostname()

    def make_rl_module(self) -> Any:
        """Returns the policy's Keras model: here the model is the module.

        Raises:
            UnsupportedMethodError: if the policy has no Keras model; also a NotImplementedError.
        """
        raise self._not_offered_error("make_rl_module")

    def apply(self, func: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Returns `func(self, *args, **kwargs)`."""
        return func(self, *args, **kwargs)

    def _not_offered_error(self, method: str) -> UnsupportedMethodError:
        owner = type(self).__name__
        return UnsupportedMethodError(
            f"{owner} has no `{method}`. Override it in {owner}, or derive from TFPolicy, which "
            "has it."
        )

    def __repr__(self) -> str:
        """Returns the class and the spaces: `PPOTF2Policy(Box((4,), float32), Discrete(2))`."""
        spaces = (getattr(self, f"{kind}_space", None) for kind in ("observation", "action"))
        return f"{type(self).__name__}({', '.join(map(describe_space, spaces))})"


_act_on_dict = Policy.compute_actions_from_input_dict
Policy._base_methods = overrides.get_base_methods(Policy)
