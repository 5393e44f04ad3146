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

from tfpolicies.batch.leaves import first_row, with_batch_axis
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_defaults import default_view_requirements, with_memory
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.config.idioms import PREDICT_ARGUMENTS, answering, missing_attribute
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.config.read_only import copied
from tfpolicies.connectors.pipelines import (
    ActionConnectorPipeline,
    AgentConnectorPipeline,
    connector_metrics,
    pipelines_from_state,
    pipelines_to_state,
    successor,
    tell_left_out,
)
from tfpolicies.errors import BatchError, ConfigError, NotOfferedError, UsageError, WeightsError
from tfpolicies.extensions import Extensible
from tfpolicies.marks import for_place
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.preprocessed import preprocess_batch
from tfpolicies.models.spaces import (
    action_leaves,
    batch_leaves,
    describe_space,
    leaves,
    nest,
    space_key,
    space_struct,
)
from tfpolicies.policy import overrides
from tfpolicies.policy.driver import PolicyDriver
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.input_dict import add_batch_axis, make_row, read_memory
from tfpolicies.policy.policy_views import PolicyViews
from tfpolicies.policy.prediction import predict
from tfpolicies.policy.recurrent_state import flatten_memory
from tfpolicies.policy.session import PolicySession
from tfpolicies.system.paths import resolve_path
from tfpolicies.type_aliases import Structure

logger = logging.getLogger("tfpolicies")


class ActionBatch(NamedTuple):
    """What acting gives; unpacks as `actions, state_outs, extras`."""

    actions: Any  # [B, *action_shape], normalised; nested for nested action spaces
    state_outs: list[np.ndarray]  # each [B, size]; [] for a policy without memory
    extras: dict[str, np.ndarray]  # each [B, ...]: action_logp, action_prob, vf_preds, ...


@for_place("policy_class")
class Policy(Extensible, metaclass=overrides.PolicyMeta):
    """Something that chooses actions for observations, and may learn to do it better.

    A hand-written policy implements `compute_actions`. One that learns also overrides
    `learn_on_batch`, or `compute_gradients` and `apply_gradients`; and `get_weights` and
    `set_weights`. Every other method works on these.

    Args:
        observation_space: of the environment, possibly nested.
        action_space: of the environment.
        config: settings, as a dict or an `AlgorithmConfig`.

    Attributes:
        flat_observations: of a class, whether its own methods are given observations as RLlib's
            are: float32 rows `[B, F]`, the parts of a nested space one after the other and choices
            one-hot. Boxes stay as they are. A `TFPolicy` refuses it with a `UsageError`.
        global_timestep: rows acted on, or what `on_global_var_update` said last.
        num_grad_updates: updates done.
        agent_connectors: what is done to observations and rewards before the policy; None without,
            and until a worker gives it those of its config.
        action_connectors: what is done to its actions; likewise.
        filter: the running statistics of observations; None without `observation_filter`.
        reward_filter: those of rewards; likewise.

    >>> class Always(Policy):
    ...     def compute_actions(self, obs_batch, state_batches=None, **kwargs):
    ...         return ActionBatch(np.full(len(obs_batch), 1), [], {})
    >>> space = gym.spaces.Discrete(2)
    >>> policy = Always(gym.spaces.Box(-1, 1, (3,)), space, {})
    >>> int(policy.compute_single_action([0.0, 0.0, 0.0])[0])
    1
    """

    _describe_missing = staticmethod(missing_attribute)
    flat_observations: ClassVar[bool] = False
    global_timestep: int = 0
    num_grad_updates: int = 0
    _page_methods: ClassVar[dict[str, Any]] = {}
    """The methods here that a driver may leave out; see `overrides`."""
    _overridden: frozenset[str] = frozenset()
    """Those of them that the policy has of its own, which are what runs."""
    _signature: overrides.ActSignature
    """What `compute_actions` asks for."""
    _driver_class: ClassVar[type[PolicyDriver]] = PolicyDriver
    _driver: PolicyDriver | None = None
    _pageable: Any = None
    """`driver.state`, for the map's shortest way to it."""
    _views: PolicyViews | None = None
    _sees_zeros = False  # whether postprocessing is run on a batch that nobody sampled

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls._inspect_methods()

    @classmethod
    def _inspect_methods(cls) -> None:
        """Finds which methods the class has of its own, and what they ask for."""
        cls._overridden = overrides.find_overridden(cls, cls._page_methods)
        cls._signature = overrides.ActSignature.inspect(cls, _act_on_dict)

    def _inspect_own_methods(self) -> None:
        """Does so for methods of this policy alone, and has the driver call them."""
        attributes = vars(self)
        for name in ("_overridden", "_signature"):
            attributes.pop(name, None)
        own = overrides.METHODS & attributes.keys()
        if own:
            attributes["_overridden"] = self._overridden | own
            attributes["_signature"] = overrides.ActSignature.inspect(self, _act_on_dict)
        if "_driver" in attributes:
            self.driver.choose_parts()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in overrides.METHODS:
            self._inspect_own_methods()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in overrides.METHODS:
            self._inspect_own_methods()

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
        self.filter, self.reward_filter = self._own_filters()

    def _own_filters(self) -> tuple[Any, Any]:
        """Returns the running statistics of observations and of rewards, or None for none."""
        names = [
            self.config.get(name, "NoFilter") for name in ("observation_filter", "reward_filter")
        ]
        if names == ["NoFilter", "NoFilter"]:
            return None, None
        from tfpolicies.models.filters import make_filter, make_reward_filter  # imports TensorFlow

        observed, rewards = names
        made = None if observed == "NoFilter" else make_filter(observed, self.observation_space)
        return made, make_reward_filter(rewards)

    @property
    def driver(self) -> PolicyDriver:
        """What samplers, algorithms, maps and checkpoints talk to."""
        driver = self._driver
        if driver is None or driver._reference() is not self:  # it came with a copy
            driver = self._driver = self._driver_class(self)
            overrides.register(self)
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
            state_batches: the memory of each row, one array `[B, size]` per state tensor.
            prev_action_batch: the last actions `[B, ...]`, for models that read them; of one that
                reads the n last, `[B, n, ...]`.
            prev_reward_batch: the last rewards `[B]`, or `[B, n]`, likewise.
            info_batch: accepted and unused.
            episodes: accepted and unused.
            explore: sample (True) or be greedy (False); None takes `config["explore"]`.
            timestep: the time step for schedules of exploration; None takes the policy's own.
            **kwargs: accepted and unused.

        Returns:
            The actions, the new memory, and extras such as `action_logp`.
        """

    def compute_actions_from_input_dict(
        self,
        input_dict: Mapping[str, Any],
        explore: bool | None = None,
        timestep: int | None = None,
        episodes: Any = None,
        **kwargs: Any,
    ) -> ActionBatch:
        """Is `compute_actions` for a batch: reads `obs`, `state_in_*`, `prev_*`, `infos` from it.

        A memory that is a dict is `state_in`. What the signature of `compute_actions` does not name
        is left out.

        Raises:
            KeyError: if `input_dict` has no `obs`.
        """
        given = {
            "prev_action_batch": input_dict.get("prev_actions"),
            "prev_reward_batch": input_dict.get("prev_rewards"),
            "info_batch": input_dict.get("infos"),
            "explore": explore,
            "timestep": timestep,
            "episodes": episodes,
        }
        if views := self._views_in(input_dict):
            given["views"] = views
        if not self._signature.takes_all:
            given = {name: x for name, x in given.items() if name in self._signature.names}
        memory = read_memory(input_dict)
        return self.compute_actions(self._as_given(input_dict["obs"]), memory, **given, **kwargs)

    def _as_given(self, obs_batch: Structure) -> Any:
        """Returns observations in the form that methods of the class are given."""
        if not self.flat_observations:
            return obs_batch
        return preprocess_batch(leaves(self.observation_space), obs_batch)

    def _views_in(self, input_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what `compute_actions` is to be given of an input dict as its `views`."""
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
            state: the memory, one array `[size]` per state tensor.
            prev_action: the last action.
            prev_reward: the last reward.
            info: the last info.
            input_dict: gives all of these under their column names instead.
            episode: accepted and unused.
            explore: as in `compute_actions`.
            timestep: as in `compute_actions`.
            **kwargs: passed on.

        Returns:
            The action, the new memory and the extras, all without a batch axis.
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
        first = {key: value[0] for key, value in extras.items()}
        named = isinstance(states, Mapping)
        after = first_row(states) if named else [first_row(part) for part in states]
        return first_row(actions), after, first

    @answering(lambda _, name: PREDICT_ARGUMENTS.get(name, ""))
    def predict(
        self,
        obs: Structure,
        state: Structure | None = None,
        *,
        reward: Structure | None = None,
        explore: bool | None = False,
        batched: bool | None = None,
    ) -> Any:
        """Returns what to pass to `env.step`: greedy actions in the environment's units.

        Observations and actions pass through the policy's connectors.

        Args:
            obs: one observation, or a batch: its arrays with a leading axis `[B, ...]`.
            state: what the last call returned, for policies with a memory, or `[*arrays]` of
                `get_initial_state()`; None where episodes begin.
            reward: what the last action earned, a number or `[B]`; for models that read it.
            explore: True samples; None takes `config["explore"]`.
            batched: whether `obs` is a batch; None: its shape decides.

        Returns:
            One action, or a batch `[B, ...]`, as arrays of your own. Of a policy with a memory,
            or one that looks back on earlier steps, `(actions, state)`.

        Raises:
            ObservationError: if the observation does not fit the space, has NaN or infinity, or a
                mask that allows no action (see `debugging(check_inputs=...)`).
            UsageError: for a state of another policy or another number of rows, and if a connector
                remembers something of running episodes.
        """
        return predict(self, obs, state, reward=reward, explore=explore, batched=batched)

    def session(
        self, batch_size: int | None = None, *, explore: bool | None = None
    ) -> PolicySession:
        """Returns an object that acts step by step and keeps the memory in between.

        It leaves connectors out, and says so in the log.

        Args:
            batch_size: how many environments act together; None for one, without a batch axis.
            explore: sample (True) or be greedy (False); None takes `config["explore"]`.
        """
        tell_left_out("session()", self.agent_connectors, self.action_connectors)
        return PolicySession(self, batch_size, explore=explore)

    def env_action(
        self, action: Structure, *, unsquash: bool | None = None, clip: bool | None = None
    ) -> Any:
        """Returns one action as the environment takes it: that of a Box in its bounds.

        Args:
            action: as `compute_single_action` gives it.
            unsquash: map to the Box's bounds; None takes `config["normalize_actions"]`.
            clip: clip to the Box's bounds; None takes `config["clip_actions"]`.
        """
        rows = batch_leaves(action_leaves(self.action_space), with_batch_axis(action), "action")
        mapped = self.driver.acting.to_env(rows, unsquash=unsquash, clip=clip)
        return nest(self.action_space, [leaf[0] for leaf in mapped])

    # -- trajectories -------------------------------------------------------------------------

    def postprocess_fragments(self, fragments: Fragments) -> None:
        """Adds columns for all trajectories of a sample at once; none by default."""
        del fragments

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
            episode: the episode, where there is one.
        """
        del other_agent_batches, episode
        return sample_batch

    # -- learning -----------------------------------------------------------------------------

    def loss(self, model: Any, dist_class: Any, train_batch: Any) -> Any:
        """Returns the loss of a train batch; policies that learn by gradients override it.

        Raises:
            NotOfferedError: here; also a NotImplementedError.
        """
        raise self._not_offered("loss")

    def learn_on_batch(self, samples: SampleBatch) -> dict[str, Any]:
        """Does one update: `compute_gradients`, then `apply_gradients`.

        Returns:
            The info of the gradients; `{}` for a policy that does not learn.
        """
        gradients, info = self.compute_gradients(samples)
        self.apply_gradients(gradients)
        return info

    def _learns(self) -> bool:
        """Whether the class says how it learns."""
        return "learn_on_batch" in self._overridden

    def compute_gradients(
        self, postprocessed_batch: SampleBatch
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns gradients, one per variable, and statistics; none for a policy without them."""
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
        """Asks a replay buffer for one train batch and does one update on it.

        Args:
            replay_actor: has a method `replay(policy_id)`, which returns a batch, or None while it
                has too few rows; for example a `MultiAgentReplayBuffer`.
            policy_id: whose rows to ask for.

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

        The minibatch size is `config["sgd_minibatch_size"]`, or `train_batch_size` where there is
        none; all rows are used if it is not smaller than the batch.

        Raises:
            BatchError: if no batch is loaded, or `offset` lies behind its end.
        """
        rows = self.get_num_samples_loaded_into_buffer(buffer_index)
        size = self._minibatch_size() or rows
        if not rows:
            raise BatchError(
                f"Buffer {buffer_index} is empty: you must call load_batch_into_buffer before "
                "learn_on_loaded_batch."
            )
        if size < rows and not 0 <= offset < rows:
            raise BatchError(f"offset must be in [0, {rows}), got {offset}.")
        return self._learn_on_rows(self._loaded[buffer_index], offset, size)

    def _learn_on_rows(self, batch: SampleBatch, offset: int, size: int) -> dict[str, Any]:
        """Does one update on `size` rows of a loaded batch; on all if it has no more."""
        whole = size >= batch.count
        return self.learn_on_batch(batch if whole else batch.slice(offset, offset + size))

    def _minibatch_size(self) -> int:
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
            NotOfferedError: if the policy does not say; also a NotImplementedError.
        """
        raise self._not_offered("compute_log_likelihoods")

    # -- views --------------------------------------------------------------------------------

    @property
    def view_requirements(self) -> PolicyViews:
        """The columns that acting and learning read, and what each is derived from; by name.

        What is set here becomes a column of the policy's batches, for postprocessing and learning;
        see "Views" in `docs/models.md`. Set it in the constructor of the policy's class.

        Raises:
            NotOfferedError: when what is set cannot be had, and on changes of other columns.
            UsageError: when it is set after the first sample or update.
        """
        return self._own_views().of(self)

    @view_requirements.setter
    def view_requirements(self, requirements: Mapping[str, ViewRequirement]) -> None:
        self.view_requirements.update(requirements)

    def init_view_requirements(self) -> None:
        """Makes the default requirements, if there are none yet; they are pruned when read."""
        if self._views is None:
            self._views = PolicyViews(self._required_views())

    def _own_views(self) -> PolicyViews:
        if self._views is None:
            self.init_view_requirements()
        if self._views is None:  # a class of the user's makes none
            self._views = PolicyViews(self._required_views())
        return self._views

    def _required_views(self) -> Mapping[str, ViewRequirement]:
        """Returns what the model requires for training alone."""
        return {}

    def _default_views(self) -> dict[str, ViewRequirement]:
        """Returns the requirements of the columns that there are in any case."""
        views = default_view_requirements(self.observation_space, self.action_space)
        steps = {**MODEL_DEFAULTS, **self.config.get("model", {})}["max_seq_len"]
        memory = flatten_memory(self.get_initial_state())
        return with_memory(views, memory, max_seq_len=steps)

    def maybe_add_time_dimension(
        self, input_dict: Mapping[str, Any], seq_lens: Structure, framework: str | None = None
    ) -> Any:
        """Returns `input_dict` as it is: the Program folds rows into sequences itself."""
        del seq_lens, framework
        return input_dict

    def maybe_remove_time_dimension(self, input_dict: Mapping[str, Any]) -> Any:
        """Returns `input_dict` as it is: rows leave the Program without a time axis."""
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
        """Forgets what connectors remember of the episodes in an environment, or in several."""
        for pipeline in (self.agent_connectors, self.action_connectors):
            if pipeline is not None:
                pipeline.reset(env_id)

    def restore_connectors(self, state: Mapping[str, Any]) -> None:
        """Makes the connectors anew that `state["connector_configs"]` describes, if it has any.

        Present ones that do the same stay, with what they remember. Those of a state that does not
        tell the environment's observation space still need `agent_connectors.connect(space)`, as a
        worker does it, unless there are some that know it.

        Raises:
            ConfigError: if it is malformed; nothing is changed then.
            SpaceError: if they do not fit the present ones' spaces; likewise.
        """
        self.agent_connectors, self.action_connectors = self._restored_connectors(state)

    def _restored_connectors(
        self, state: Mapping[str, Any]
    ) -> tuple[AgentConnectorPipeline | None, ActionConnectorPipeline | None]:
        """Returns what `restore_connectors` would make the connectors, and changes nothing."""
        agent, action = pipelines_from_state(state.get("connector_configs") or {})
        agent = successor(self.agent_connectors, agent)
        action = successor(self.action_connectors, action)
        if action is not None and not action.is_connected:
            action.connect(self.action_space)
        return agent, action

    # -- weights and state --------------------------------------------------------------------

    def copy(self, policy_id: str | None = None) -> Any:
        """Returns an independent policy in the same state, by `copy.deepcopy`.

        Args:
            policy_id: of the copy; None for the same.
        """
        twin = copy.deepcopy(self)
        twin.policy_id = self.policy_id if policy_id is None else policy_id
        return twin

    def get_weights(self) -> Any:
        """Returns copies of the weights; `{}` for a policy without any."""
        return {}

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any]) -> None:
        """Overwrites the weights with values as `get_weights` returns them.

        Raises:
            UsageError: if this policy has no weights but some are given.
        """
        if weights:
            raise UsageError(f"{type(self).__name__} has no weights to set; got {len(weights)}.")

    def get_state(self) -> dict[str, Any]:
        """Returns everything that `set_state` restores.

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
                "config": copied(self.config),
            },
        }
        state |= {name: each.get_state() for name, each in self.driver.filters.items()}
        connectors = pipelines_to_state(self.agent_connectors, self.action_connectors)
        return {**state, "connector_configs": connectors} if connectors else state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; the policy keeps its own spaces and config.

        Raises:
            KeyError: if `weights` or `global_timestep` is missing.
        """
        self._check_state(state)
        self.set_weights(state["weights"])
        self.global_timestep = int(state["global_timestep"])
        self.num_grad_updates = int(state.get("num_grad_updates", self.num_grad_updates))
        for name, each in self.driver.filters.items():
            if name in state:
                each.set_state(state[name])
        self.restore_connectors(state)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Checks what can be checked without a change; warns if it is a state for other spaces.

        Raises:
            KeyError: if `weights` or `global_timestep` is missing.
            ConfigError: if the connectors' state is malformed.
        """
        _ = state["weights"], state["global_timestep"]
        self._restored_connectors(state)
        spec = state.get("policy_spec") or {}
        for name in ("observation_space", "action_space"):
            given, own = spec.get(name), getattr(self, name)
            if given is not None and space_key(given) != space_key(own):
                logger.warning(
                    "the state was taken of a policy with the %s %s; %r keeps its own, %s.",
                    name,
                    given,
                    self,
                    own,
                )

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Policy:
        """Returns a new policy of the class, spaces and config in a state of `get_state`.

        The class is the state's, whichever class this is called on.

        Raises:
            WeightsError: if the state has no `policy_spec`.
        """
        spec = state.get("policy_spec")
        if spec is None:
            raise WeightsError(
                "No `policy_spec` key in the state; only a state of `get_state()` makes a policy."
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

        Killed at any instant, it leaves the folder's old or new checkpoint whole. With
        `config["export_native_model_files"]` a SavedModel follows, in the subfolder `model`.

        Args:
            export_dir: the folder, made if it is missing.
            filename_prefix: must be None.
            policy_state: a state of `get_state` to write instead of the present one.
            checkpoint_format: "json", the only one.

        Raises:
            ConfigError: for another format, or a `filename_prefix`.
            CheckpointError: if it cannot be written.
        """
        from tfpolicies.policy import checkpoints  # needs TensorFlow, unlike this module

        if filename_prefix is not None:
            raise ConfigError("filename_prefix is no longer used; name the folder instead.")
        if checkpoint_format != "json":
            raise ConfigError(f"checkpoint_format must be 'json', got {checkpoint_format!r}.")
        folder = resolve_path(export_dir)
        checkpoints.write_policy_checkpoint(self, folder, policy_state)
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

        A checkpoint holds policies of this class or of subclasses of it; `Policy` takes all.
        Nothing in the file is executed. A class of your own is found by calling this on it; what a
        file cannot hold (a distribution of yours, a model that Keras cannot rebuild) is given in
        `config`. To act, a policy needs no callbacks; it asks for them when it is trained.

        Args:
            checkpoint: the folder, or what `Algorithm.save` returned.
            policy_ids: of an algorithm's checkpoint, only these.
            config: settings that replace stored ones.
            allow_non_finite: take weights with NaN or infinity, too.
            custom_objects: layers of yours and the like that a stored Keras model may be made of:
                name -> class. Those registered by `keras.saving.register_keras_serializable` need
                not be given.
            model_work_limit: how many times the usual work a stored Keras model may take, in calls,
                operations and memory; `math.inf` for no limit. See `docs/decisions/003`.

        Raises:
            CheckpointError: if it is missing, damaged or foreign, of another class or not finite,
                or if a stored model takes too much work; the message names the file.
            ConfigError: if `model_work_limit` is not a positive number.
            UnknownPolicyError: if one of `policy_ids` is not in it.
        """
        # They need TensorFlow, unlike this module.
        from tfpolicies.models.work import limit_work
        from tfpolicies.policy import checkpoints

        path = checkpoints.path_of(checkpoint)
        scope = checkpoints.custom_object_scope(custom_objects or {})
        with scope, limit_work(model_work_limit):
            return checkpoints.load_policies(
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
            NotOfferedError: if the policy is no TensorFlow code; also a NotImplementedError.
        """
        raise self._not_offered("export_model")

    def import_model_from_h5(self, import_file: str | os.PathLike[str]) -> Any:
        """Takes over the weights of a Keras file.

        Raises:
            NotOfferedError: if the policy has no Keras model; also a NotImplementedError.
        """
        raise self._not_offered("import_model_from_h5")

    def on_global_var_update(self, global_vars: Mapping[str, Any]) -> None:
        """Takes over the counters of the whole run.

        Args:
            global_vars: `timestep`, and `num_grad_updates` if it is to change.

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
        """Where learning runs, such as `["/cpu:0"]`."""
        return ["/cpu:0"]

    def is_recurrent(self) -> bool:
        """Whether acting needs a memory."""
        return self.num_state_tensors() > 0

    def num_state_tensors(self) -> int:
        """Returns the number of arrays of the memory."""
        return len(self.get_initial_state())

    def get_initial_state(self) -> list[np.ndarray]:
        """Returns the memory at the start of an episode, one array `[size]` per state tensor.

        It may also be a dict of such arrays: `compute_actions` is then given a dict and returns
        one. A policy written by hand is asked for each episode anew.
        """
        return []

    def get_exploration_state(self) -> dict[str, Any]:
        """Returns the state of the exploration; `{}` if it has none."""
        return {}

    def get_session(self) -> Any:
        """Returns the TensorFlow session of a graph-mode policy, None for others."""
        return None

    def close(self) -> None:
        """Gives back what the policy holds outside of Python's memory; here nothing."""

    def get_host(self) -> str:
        """Returns the computer's network name, "" if it has none."""
        return socket.gethostname()

    def make_rl_module(self) -> Any:
        """Returns the policy's Keras model: here the model is the module.

        Raises:
            NotOfferedError: if the policy has no Keras model; also a NotImplementedError.
        """
        raise self._not_offered("make_rl_module")

    def apply(self, func: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Returns `func(self, *args, **kwargs)`."""
        return func(self, *args, **kwargs)

    def _not_offered(self, method: str) -> NotOfferedError:
        owner = type(self).__name__
        return NotOfferedError(
            f"{owner} has no `{method}`. Override it in {owner}, or derive from TFPolicy, which "
            "has it."
        )

    def __repr__(self) -> str:
        """Returns the class and the spaces: `PPOTF2Policy(Box((4,), float32), Discrete(2))`."""
        spaces = (getattr(self, f"{of}_space", None) for of in ("observation", "action"))
        return f"{type(self).__name__}({', '.join(map(describe_space, spaces))})"


_act_on_dict = Policy.compute_actions_from_input_dict
Policy._page_methods = overrides.methods_of(Policy)
