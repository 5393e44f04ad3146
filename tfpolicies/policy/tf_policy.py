"""Policies implemented in TensorFlow. Each is a handle on its own state and a shared Program."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import keras
import numpy as np

from tfpolicies.base.extensions import EXTENSIONS
from tfpolicies.base.type_aliases import Structure
from tfpolicies.base.validators import is_number
from tfpolicies.batch.leaves import map_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.live_dict import copy_containers
from tfpolicies.connectors.pipelines import warn_skipped_connectors
from tfpolicies.errors import ConfigError, UsageError
from tfpolicies.exploration.exploration_factory import make_exploration
from tfpolicies.exploration.schedules import piecewise_linear
from tfpolicies.export.formats import export_policy
from tfpolicies.export.spec_writer import ExportResult
from tfpolicies.models.actor_critic_model import get_user_model
from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.models.keras_export import to_plain_keras_model
from tfpolicies.models.learning_rates import resolve_schedule
from tfpolicies.models.mean_std_filters import MeanStdFilter, make_reward_filter
from tfpolicies.models.model_calls import get_adapted_layers
from tfpolicies.models.ports import PREVIOUS_STEP_SOURCES
from tfpolicies.models.registry import resolve_custom_model
from tfpolicies.models.running_filter import Scaling
from tfpolicies.models.spaces import require_non_empty
from tfpolicies.models.view_requirements import get_view_requirements
from tfpolicies.models.weight_mapping import MappingReport, match_weights
from tfpolicies.models.wrapped_model import WrappedModel
from tfpolicies.policy import overrides
from tfpolicies.policy.acting import CompiledActing
from tfpolicies.policy.batch_utils import require_actions
from tfpolicies.policy.compiled_driver import CompiledDriver
from tfpolicies.policy.counters import VariableLikeInt
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.hooks import TFPolicyHooks
from tfpolicies.policy.input_reader import StateCountError
from tfpolicies.policy.learning import PolicyLearner
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.policy.policy_card import make_policy_card
from tfpolicies.policy.policy_checkpoints import reduce_policy
from tfpolicies.policy.policy_config import AUTO_SETTINGS, complete_config, derive_seed
from tfpolicies.policy.state_dict import PolicyStateDict, has_only_acting_weights, match_arrays
from tfpolicies.policy.view_pruning import prune_view_requirements
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.program import Program
from tfpolicies.program.runtimes.session import get_session_creator
from tfpolicies.program.spec import ProgramSpec, get_static_settings
from tfpolicies.storage.keras_h5 import read_keras_weights
from tfpolicies.system.fork_guard import check_tensorflow_survived_fork

_NOT_COPIED = {"_state", "exploration", "filter", "reward_filter", "callbacks", "_loaded"}
_NOT_COPIED |= {"_acting", "_learner", "_driver", "_state_dict", "_worker_index", "_create_session"}
"""Attributes that `TFPolicy.copy` creates instead of copying them."""


class TFPolicy(TFPolicyHooks):
    """A policy with a Keras model; subclasses define its loss.

    Policies with the same class, spaces, architecture and static config share one `Program`: its
    functions are traced once, so each further policy only costs its numbers. Traced code (`loss`,
    `stats_fn`, `grad_stats_fn`, `compute_gradients_fn`, `apply_gradients_fn`) therefore runs on a
    view of the class: `self.config` holds the hyperparameters as tensors, `stats_fn` can read
    attributes that `loss` sets on `self`, and attributes of one policy cannot be read.

    A subclass overrides those that differ:

    * `hyperparameters`: names of config keys whose numbers may differ between policies.
    * `static_keys`: names of config keys that change code or shapes.
    * `loss(model, dist_class, train_batch)`: a scalar tensor.
    * `stats_fn(train_batch)`: a dict of scalar tensors.
    * `postprocess_fragments(fragments)`: adds columns for all trajectories at once; or
      `postprocess_trajectory(batch)`, which is then called for each trajectory.

    Args:
        observation_space: of the environment, possibly nested.
        action_space: of the environment.
        config: a dict or an `AlgorithmConfig`; `config_class` has the defaults. The keys
            `__policy_id` and `worker_index` seed weights and noise together with `seed`;
            `__session_creator` creates the session in graph mode, with the graph as default.

    Attributes:
        dist_class: the action distribution class: `dist_class(dist_inputs, model)`.
        automatic: the settings that were "auto", with the values that a checkpoint recorded.
        exploration: turns noise into actions, and has the numbers that control it.
        framework: `"tf"` for policies in graph mode, otherwise `"tf2"`.
        program: the Program, shared with other policies.

    Raises:
        ConfigError: for an unknown or invalid setting.
        SpaceError: for a space that cannot be used.
        ModelError: for a model that does not fit.
    """

    _replays: ClassVar[bool] = False
    """Whether it learns from a replay buffer."""
    _column_defaults: ClassVar[Mapping[str, float]] = {}
    """Fill values of columns `[N]` that a batch may lack."""
    _coefficient_stats: ClassVar[Mapping[str, str]] = {}
    """Hyperparameters, besides learning rates, in `learner_stats`, by their names there."""
    _driver_class = CompiledDriver

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.flat_observations:
            raise UsageError(
                f"{cls.__name__}.flat_observations must be False: a TFPolicy encodes nested "
                "observations itself, in front of its model, and batches keep them nested. Leave "
                "it out, or derive the class from Policy, whose methods can get flat rows."
            )

    @ensure_eager()
    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        config: Mapping[str, Any] | AlgorithmConfig | None = None,
    ) -> None:
        overrides.warn_slower(type(self), self._overridden)
        complete, identity = complete_config(type(self), config)
        self.auto_settings = {name: None for name in AUTO_SETTINGS if complete[name] == "auto"}
        super().__init__(observation_space, action_space, complete)
        self.validate_spaces(observation_space, action_space, complete)
        require_non_empty(observation_space, "observation_space")
        require_non_empty(action_space, "action_space")
        self.policy_id = identity["__policy_id"]
        self.framework: str = complete["framework"]
        self.exploration = make_exploration(
            complete["exploration_config"],
            type(self)._get_distribution(action_space, get_static_settings(type(self), complete)),
            worker_index=identity["worker_index"],
            num_workers=complete["num_workers"],
            normalize_actions=complete["normalize_actions"],
        )
        transform = self.exploration.transform
        spec = ProgramSpec.from_policy(
            type(self), observation_space, action_space, complete, transform
        )
        self.exploration.transform = spec.explorer
        self.dist_class = spec.dist_class
        self.program = Program.get_or_create(spec)
        seed = complete["seed"]
        self._state = self.program.new_state(
            spec.get_hyperparameter_values(complete),
            weight_seed=derive_seed(seed, self.policy_id, "weights"),
            rng_seed=derive_seed(seed, self.policy_id, identity["worker_index"], "noise"),
            template=spec.source.template,
        )
        create_session = identity["__session_creator"] or get_session_creator(
            complete["tf_session_args"]
        )
        self.filter = (
            MeanStdFilter(observation_space, spec.indices_of_filtered_leaves)
            if spec.indices_of_filtered_leaves
            else None
        )
        self.reward_filter = make_reward_filter(complete["reward_filter"])
        self._build_parts(identity["worker_index"], create_session)
        self._update_schedules(0)

    def _build_parts(self, worker_index: int, create_session: Callable[[], Any]) -> None:
        """Builds the acting, learning and state parts. Call it once all attributes are set."""
        self._worker_index = worker_index
        self._create_session = create_session
        # NaN of the learning policy must also reach remote workers.
        self._accepts_non_finite = worker_index > 0 or self.config["on_nan"] == "warn"
        self.program.runtime.set_session_creator(self._state, create_session)
        self._loaded = {}
        self._acting, self._learner = CompiledActing(self), PolicyLearner(self)
        filters = self.driver.filters
        self._state_dict = PolicyStateDict(
            self.program, self._state, self.exploration, filters, self._state_aliases
        )

    @functools.cached_property
    def callbacks(self) -> Any:
        """The policy's own callbacks; None if its config names none.

        Raises:
            CheckpointError: if the policy was loaded without them.
        """
        make_callbacks = self.config["callbacks"]
        return None if make_callbacks is None else make_callbacks()

    def copy(self, policy_id: str | None = None) -> Any:
        """Returns an independent policy with the same Program and state.

        It has a new generator, so that the two do not make the same choices; everything else in
        `get_state` is equal. The copy is not frozen; that of a frozen policy has new optimizers,
        and new weights in networks that do not act, such as critics of SAC. Attributes that a
        subclass adds are copied by `copy.deepcopy`. It takes microseconds, because the Program is
        shared.

        Args:
            policy_id: of the copy; None for the same. Together with `seed` it seeds the generator.
        """
        result = object.__new__(type(self))
        shared = (self.program, self.dist_class, self.observation_space, self.action_space)
        memo: dict[int, Any] = {id(x): x for x in shared}
        memo |= {id(self): result, id(self.config): copy_containers(self.config)}
        attributes = {name: x for name, x in vars(self).items() if name not in _NOT_COPIED}
        vars(result).update(copy.deepcopy(attributes, memo))
        result.policy_id = self.policy_id if policy_id is None else policy_id
        with self._state.lock:
            transform = self.exploration.transform
            result.exploration = copy.deepcopy(self.exploration, {id(transform): transform})
            result._state = self._copy_state(result.policy_id)
            for name in ("filter", "reward_filter"):
                setattr(result, name, copy.deepcopy(getattr(self, name)))
        result._build_parts(self._worker_index, self._create_session)
        return result

    def _copy_state(self, policy_id: str) -> PolicyState:
        seed = self.config["seed"]
        rng_seed = derive_seed(seed, policy_id, self._worker_index, "noise")
        if self._state.frozen_as is None:
            return self._state.copy(np.random.default_rng(rng_seed))
        weight_seed = derive_seed(seed, policy_id, "weights")
        return self.program.thaw_state(self._state, weight_seed, rng_seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns `copy()`: equal except for its generator, and not frozen."""
        result = memo[id(self)] = self.copy()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the policy as a checkpoint, including its random generator.

        Functions and classes of the config that checkpoints cannot store are pickled by name.
        Session creator, loaded batches and the frozen flag are not pickled.

        Raises:
            UnpicklableError: if the class or one of those functions cannot be imported by a name.
        """
        return reduce_policy(self)

    # -- facts --------------------------------------------------------------------------------

    @property
    def _pageable(self) -> PolicyState:
        return self._state

    @property
    def global_timestep(self) -> int:
        """Rows acted on so far, or the last value from `on_global_var_update`."""
        return VariableLikeInt(self._state.global_timestep)

    @global_timestep.setter
    def global_timestep(self, value: int) -> None:
        self._state.global_timestep = value

    @property
    def num_grad_updates(self) -> int:
        """Minibatch updates done so far."""
        return self._state.num_grad_updates

    @num_grad_updates.setter
    def num_grad_updates(self, value: int) -> None:
        self._state.num_grad_updates = value

    @property
    def devices(self) -> list[str]:
        """The devices that learning uses: `["/cpu:0"]`, or `["/gpu:0"]` with a GPU.

        It uses a GPU if there is one and `num_gpus=1`.
        """
        return [self.program.functions.device]

    @property
    def model(self) -> keras.Model:
        """The Keras model with this policy's weights, for reading only.

        In `loss` and code that runs after it, it is the `model` argument of `loss`.
        """
        if self._context is not None:
            return self._context.model
        model = self.program.load_model(self._state)
        user_model = get_user_model(model)
        if isinstance(user_model, WrappedModel):
            user_model.bind_policy(self)
        EXTENSIONS.prepare_model(self, model)
        return model

    def make_rl_module(self) -> keras.Model:
        """Returns the policy's Keras model, as `model`: here it is the RL module."""
        return self.model

    @ensure_eager()
    def to_keras(self) -> keras.Model:
        """Returns a trained copy of the model, which the caller owns.

        It takes encoded observations (float32; discrete parts one-hot), under the input names of
        your model, and computes the policy's outputs. An observation filter is included as layers
        without weights in front of the model, one for each filtered part. Its `.keras` file needs
        only Keras if the model consists of Keras layers. The model in your config is never changed.
        """
        check_tensorflow_survived_fork()
        model = self.program.spec.source.make()
        if get_user_model(model) is get_user_model(self.program.functions.network.model):
            raise ConfigError(
                "this model cannot be copied, because Keras cannot rebuild it from its config; "
                "give the model as a factory f(observation_space, num_outputs) instead."
            )
        weights, slots = self.get_weights(), self.program.layout.get_slots("model")
        for variable, slot in zip(model.variables, slots, strict=True):
            if slot.key in weights:  # the others are never read
                variable.assign(weights[slot.key])
        for layer in get_adapted_layers(model):
            layer.finalize_state()
        names = self.program.functions.network.filtered_names
        numbers = [self._state.arrays[slot.key] for slot in self.program.layout.get_slots("filter")]
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        scalings = {name: Scaling(*pair) for name, pair in zip(names, pairs, strict=True)}
        custom_model = resolve_custom_model(self.config["model"]["custom_model"])
        template = custom_model if isinstance(custom_model, keras.Model) else None
        return to_plain_keras_model(model, self.program.ports, scalings, template=template)

    def summary(self, print_fn: Callable[[str], object] = print) -> None:
        """Prints the policy's spaces, networks, parameters and memory, and what acts and learns.

        Args:
            print_fn: called with each line.
        """
        from tfpolicies.policy.policy_summary import format_summary

        for line in format_summary(self):
            print_fn(line)

    def get_session(self) -> Any:
        """Returns the policy's `tf.compat.v1.Session` in graph mode, otherwise None.

        The session has the policy's variables; changes that you make to them are not kept.
        """
        return self.program.runtime.get_session(self._state)

    def close(self) -> None:
        """Closes the session, if the policy has one; the next use opens a new one."""
        self.program.runtime.close_session(self._state)

    def _learns(self) -> bool:
        return super()._learns() or type(self).loss is not TFPolicy.loss

    # -- acting -------------------------------------------------------------------------------

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
        views: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> ActionBatch:
        """Chooses one action for each row of `obs_batch`.

        Actions are normalised: 0-based int64 for Discrete, in [-1, 1] for a bounded float Box with
        `normalize_actions`. `extras` has `action_logp` and `action_prob` `[B]` (0 and 1 for greedy
        actions), `action_dist_inputs` `[B, n]`, and `vf_preds` `[B]` if the model has a value.
        `views` are the other inputs that the model reads, by name, such as `prev_n_obs` `[B, n,
        ...]`.

        Observations are `[B, ...]` as the environment returns them, nested as the space is; or, for
        discrete and nested spaces, rows `[B, F]` as RLlib's preprocessors make them: choices
        one-hot, the leaves concatenated. Observations that fit the space are always used as they
        are.

        Raises:
            ObservationError: if `obs_batch` does not fit the observation space, has NaN or
                infinity, or a mask that allows no action (see `debugging(check_inputs=...)`).
        """
        acting = self._acting
        previous = prev_action_batch, prev_reward_batch
        try:
            inputs = acting.reader.read(obs_batch, state_batches, *previous, views)
        except StateCountError as error:
            states, restore_form = self._complete_states(state_batches, error)
            result = self.compute_actions(
                obs_batch, states, *previous, explore=explore, timestep=timestep, views=views
            )
            return result._replace(state_outs=restore_form(result.state_outs))
        explore = self.config["explore"] if explore is None else explore
        outputs = acting.run(inputs, explore, timestep)
        return acting.make_action_batch(
            acting.collect_arrays(outputs, explore=explore, caller_owned=False)
        )

    def compute_single_action(
        self,
        obs: Structure | None = None,
        state: Sequence[np.ndarray] | None = None,
        **arguments: Any,
    ) -> tuple[Any, list[np.ndarray], dict[str, Any]]:
        """Chooses the action for one observation; see `Policy.compute_single_action`."""
        if self._overridden.isdisjoint(overrides.ACTING_METHODS):
            with contextlib.suppress(StateCountError):  # `compute_actions` accepts other forms
                outputs, explore = self._acting.run_single(obs, state, **arguments)
                return self._acting.take_first_row(outputs, explore=explore)
        return super().compute_single_action(obs, state, **arguments)

    def _complete_states(self, states: Sequence[Any] | None, error: UsageError) -> tuple[Any, Any]:
        """Returns a recurrent state in the policy's form and the function that converts it back."""
        completed = EXTENSIONS.complete_recurrent_state(self, states)
        if completed is None:
            raise error from None
        return completed

    def _select_views(self, input_dict: Mapping[str, Any]) -> dict[str, Any]:
        names = (
            view.name for view in self.program.ports.views if view.name not in PREVIOUS_STEP_SOURCES
        )
        return {name: input_dict[name] for name in names if name in input_dict}

    def _make_filters(self) -> tuple[Any, Any]:
        return None, None  # the Program filters: `__init__` sets both attributes

    def get_initial_state(self) -> list[np.ndarray]:
        """Returns the initial recurrent state: zeros, one array per state tensor."""
        return [port.zeros(1)[0] for port in self.program.ports.states]

    def get_exploration_state(self) -> dict[str, Any]:
        """Returns the state of the exploration; `{}` for stochastic sampling."""
        return self.exploration.get_state()

    def compute_values(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the values of checked inputs, one array per input port, float32 `[N]`."""
        return self._acting.compute_values(inputs)

    def compute_log_likelihoods(
        self,
        actions: Structure,
        obs_batch: Structure,
        state_batches: Sequence[np.ndarray] | None = None,
        prev_action_batch: Structure | None = None,
        prev_reward_batch: Structure | None = None,
        actions_normalized: bool = True,
        in_training: bool = True,
        views: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Returns the log-probability of each action, float32 `[B]`.

        Args:
            actions: `[B, *shape]`, nested as the action space is.
            obs_batch: the observations they were chosen for, as in `compute_actions`.
            state_batches: the recurrent state, for policies that have one.
            prev_action_batch: the previous actions, for models that read them.
            prev_reward_batch: the previous rewards, for models that read them.
            actions_normalized: False if the actions are the environment's.
            in_training: accepted; the result is that of acting.
            views: the other views that the model reads, by name.

        Raises:
            ObservationError: if the observations or actions do not fit their spaces.
            UsageError: if the recurrent state, or another input that the model reads, is missing.
            BatchError: if there are not as many actions as observations.
        """
        del in_training
        previous = prev_action_batch, prev_reward_batch
        inputs = self._acting.reader.read(obs_batch, state_batches, *previous, views, to_act=False)
        return self._acting.compute_log_likelihoods(actions, inputs, normalized=actions_normalized)

    # -- learning -----------------------------------------------------------------------------

    def learn_epochs(
        self,
        batch: Mapping[str, Any],
        num_epochs: int,
        minibatch_size: int,
        *,
        shuffle: bool = True,
    ) -> dict[str, Any]:
        """Updates the policy by all minibatches of all epochs, in one compiled call.

        The policy's own generator shuffles the rows in each epoch, and every row is used: the last
        minibatch of an epoch has the remaining rows.

        Args:
            batch: a postprocessed batch of N rows.
            num_epochs: passes over the batch.
            minibatch_size: rows per update.
            shuffle: whether the rows are shuffled; else minibatches are slices in order.

        Returns:
            `learner_stats` (means over the minibatches; minima and maxima for names that begin with
            `min_` and `max_`), `num_agent_steps_trained` (N), `num_grad_updates_lifetime`.

        Raises:
            MissingColumnError: if the batch lacks a column that the loss reads.
            BatchError: if it is empty, a column has another shape than before, or an action is not
                in the action space.
        """
        return self._learner.learn(batch, num_epochs, minibatch_size, shuffle=shuffle)

    def learn_on_batch(self, samples: Mapping[str, Any]) -> dict[str, Any]:
        """Does one update on all rows of a batch; see `learn_epochs` for the result.

        Raises:
            MissingColumnError: if the batch lacks a column that the loss reads.
            BatchError: if it is empty, or an action is not in the action space.
        """
        require_actions(self.program.spec.action_leaves, samples)
        if self._overridden.isdisjoint(overrides.GRADIENT_METHODS):
            return self._learner.update_epochs(samples, 1, None, shuffle=False)
        return self._learner.update_by_gradients(samples)

    def _has_update_methods(self) -> bool:
        """Whether a subclass overrides methods that each update must call."""
        return not self._overridden.isdisjoint(overrides.UPDATE_METHODS)

    def compute_gradients(
        self, postprocessed_batch: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns the gradients of one batch, in the order of the trainable variables.

        Neither weights nor counters change. The info has `learner_stats`, and values that the class
        computes for each row, such as `td_error` `[B]`.

        Raises:
            BatchError: as `learn_on_batch`.
        """
        require_actions(self.program.spec.action_leaves, postprocessed_batch)
        return self._learner.compute_gradients(postprocessed_batch)

    def apply_gradients(self, gradients: Sequence[np.ndarray | None]) -> None:
        """Applies gradients as `compute_gradients` returns them; None counts as zeros.

        Raises:
            WeightsError: if their number or shapes are wrong; nothing is changed then.
        """
        self._learner.apply_gradients(gradients)

    def load_batch_into_buffer(self, batch: Mapping[str, Any], buffer_index: int = 0) -> int:
        """Keeps a batch for `learn_on_loaded_batch`; returns its number of rows."""
        require_actions(self.program.spec.action_leaves, batch)
        if self._has_update_methods():
            return super().load_batch_into_buffer(batch, buffer_index)
        self._learner.discover_columns()
        loaded = self._loaded[buffer_index] = self._learner.read(batch)
        loaded.is_reused = True
        return self.get_num_samples_loaded_into_buffer(buffer_index)

    def _learn_on_rows(self, batch: Any, offset: int, size: int) -> dict[str, Any]:
        if self._has_update_methods():
            return super()._learn_on_rows(batch, offset, size)
        return self._learner.update_on_loaded_batch(batch, offset, size)

    def _get_required_views(self) -> dict[str, ViewRequirement]:
        model = self.program.functions.network.model
        return {
            n: view
            for n, view in get_view_requirements(model).items()
            if not view.used_for_compute_actions
        }

    def _make_default_views(self) -> dict[str, ViewRequirement]:
        """Returns requirements for the columns that this policy reads.

        A small batch of zeros is postprocessed and, if the class has a loss, run through the loss
        without an update. Columns that acting or training does not read are marked so, and columns
        that neither reads are left out. That postprocessing itself gets all possible columns.
        """
        views = super()._make_default_views()
        return views if self._uses_dummy_batch else prune_view_requirements(self, views)

    # -- trajectories -------------------------------------------------------------------------

    def postprocess_trajectory(
        self,
        sample_batch: SampleBatch,
        other_agent_batches: Mapping[Any, Any] | None = None,
        episode: Any = None,
    ) -> SampleBatch:
        """Adds the columns that the loss needs to the rows of one trajectory, in place.

        Args:
            sample_batch: rows of one episode in order, with `new_obs` and the acting extras; the
                value of a last row that is not terminated is bootstrapped from its `new_obs`.
            other_agent_batches: unused here; for overrides.
            episode: unused here; for overrides.
        """
        del other_agent_batches, episode
        if not self._postprocesses:
            return sample_batch
        fragments = Fragments.from_trajectory(self, sample_batch)
        self.postprocess_fragments(fragments)
        for name, column in fragments.new_columns.items():
            sample_batch[name] = column[0]
        if fragments.next_obs_index is not None:
            rows = fragments.next_obs_index[0]
            reached = map_leaves(lambda leaf: leaf[rows], sample_batch[SampleBatch.NEXT_OBS])
            sample_batch[SampleBatch.NEXT_OBS] = reached
        return sample_batch

    # -- weights and state --------------------------------------------------------------------

    def get_weights(self, as_dict: bool = True) -> Any:
        """Returns copies of the networks' variables.

        Target networks are not included. The seeds of layers with dropout are; those of LSTM and
        GRU layers without dropout, which are never read, are not.

        Args:
            as_dict: whether to return a dict by canonical keys, in order; False: a list.
        """
        weights = self._state.copy_weights(*self.program.layout.networks)
        return weights if as_dict else list(weights.values())

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any]) -> None:
        """Overwrites the networks' variables; target networks become equal to their sources.

        Args:
            weights: a dict from `get_weights`, matched by key; or a list or a dict with other keys,
                matched by order and shape. Weights of the acting network only are enough: then the
                others stay.

        Raises:
            WeightsError: if number or shapes differ, or a number is not finite (except with
                `on_nan="warn"`); nothing is changed then.
        """
        finite = not self._accepts_non_finite
        layout = self.program.layout
        parts = ("model",) if has_only_acting_weights(layout, weights) else layout.networks
        arrays = match_arrays(layout, weights, parts, "weights", finite=finite)
        with self._state.lock_for_change():
            self._state.write(arrays)
            self._state.update_targets(1.0, parts)

    def get_hyperparameter(self, name: str) -> float:
        """Returns the current value of a hyperparameter.

        Raises:
            ConfigError: if this class has no such hyperparameter.
        """
        names = self.program.spec.hyperparameters
        if name not in names:
            raise ConfigError(f"{name!r} is not a hyperparameter; those are {', '.join(names)}.")
        return float(self._state.hyperparameters[names.index(name)])

    def set_hyperparameter(self, name: str, value: float | None) -> None:
        """Sets a hyperparameter of this policy only, from the next update on.

        Raises:
            ConfigError: if this class has no such hyperparameter, or the value is not a number.
        """
        self._state.require_not_frozen()
        _ = self.get_hyperparameter(name)  # raises if it does not exist
        if not (value is None or is_number(value)):
            raise ConfigError(f"{name} must be a number or None (no limit), got {value!r}.")
        spec, names = self.program.spec, [name]
        if value is None and name in spec.learning_rates:
            raise ConfigError(f"{name} must be a number, got None. Set it to the value of 'lr'.")
        if name == "lr":  # also for networks that have no learning rate
            names += spec.get_unset_rates(self.config)
        for hyperparameter in names:
            index = spec.hyperparameters.index(hyperparameter)
            self._state.hyperparameters[index] = float("inf") if value is None else value

    def get_state(self) -> dict[str, Any]:
        """Returns copies of the state that `set_state` restores.

        Keys: `weights`; `target_weights` with target networks; `filter`, the running statistics of
        observations, with a filter; `_optimizer_variables`; `_exploration_state`;
        `global_timestep`; `num_grad_updates`; `hyperparameters`, those of `_state_aliases` under
        their aliases; `rng`, the generator's state, and `learning_rng` if learning has its own
        generator; `connector_configs` with connectors; and `policy_spec`.
        """
        with self._state.lock:
            return {**super().get_state(), **self._state_dict.to_dict()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`; everything is checked before anything changes.

        The policy keeps its own spaces and config and ignores `policy_spec`, because config and
        Program belong together. `from_state` creates a policy with the state's config. A
        hyperparameter with a schedule gets the value of its schedule at the state's time step.

        Raises:
            KeyError: if `weights` or `global_timestep` is missing.
            WeightsError: if a part does not fit, or a number is not finite (except with
                `on_nan="warn"`); nothing is changed then.
            ConfigError: if the connectors' state is malformed; nothing is changed then.
        """
        self._check_state(state)
        with self._state.lock_for_change():
            self._state_dict.restore(state, finite=not self._accepts_non_finite)
            self._update_schedules(self.global_timestep)
        self.restore_connectors(state)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        self._state_dict.validate(state, finite=not self._accepts_non_finite)
        super()._check_state(state)

    # -- export -------------------------------------------------------------------------------

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
    ) -> ExportResult:
        """Writes the whole policy, preprocessing and mapping of actions included, for serving.

        The export is run and compared with the policy before this returns. Connectors are left out;
        a log line says so. `MODEL_CARD.md`, next to `policy_spec.json`, lists the known
        facts of the policy; there are more if an algorithm or the command `export` writes it.

        Args:
            export_dir: the folder; created if missing. A SavedModel is written to the next numbered
                version folder in it, and links in `export_dir` point there, so that TensorFlow
                loads either folder; ONNX to `model.onnx` and `model_sample.onnx`; LiteRT to
                `model.tflite`.
            onnx: None for a SavedModel, True for ONNX, a number from 11 to 18 for that opset.
            layout: the serving engine whose folder layout is written: "tf-serving", "triton",
                "mlserver", "kserve" or "kubernetes" (`tfpolicies serve` in containers). All but the
                first hold ONNX, of the opset that `onnx` names.
            litert: True for LiteRT; "float16" or "int8" for LiteRT with rounded weights.
            observations: with `litert`, a batch `[N, ...]` of observations, nested as the space is,
                on which greedy actions are compared; None for 1000 random ones.
            web: write ONNX with `index.html`, a page that runs the policy in a browser, and
                `policy.js`, a module for your own pages. Serve the folder over HTTP.
            ort_web: the `dist` folder of the npm package onnxruntime-web, which is copied next to
                the page; None for a pinned version on a CDN.

        Returns:
            The path, the parity figures and how to load it.

        Raises:
            ExportError: if arguments contradict each other, it cannot be written or does not
                compute the policy's outputs, or `ort_web` lacks a file; the folder is then as it
                was. Also a RuntimeError if a package is missing.
        """
        warn_skipped_connectors("The export", self.agent_connectors, self.action_connectors)
        return export_policy(
            self.program,
            self._state,
            export_dir,
            onnx,
            layout=layout,
            litert=litert,
            observations=observations,
            web=web,
            ort_web=ort_web,
            card=make_policy_card(self),
        )

    def import_model_from_h5(
        self, import_file: str | os.PathLike[str], *, allow_missing: bool = False
    ) -> MappingReport:
        """Loads the weights of a Keras file: `.h5`, `.weights.h5` or `.keras`.

        Layers are matched by their names, else by position; a target network is set equal to the
        model. The optimizer keeps its state. A file with as many layers as the actor has fills the
        actor, and the rest of the model keeps its weights. Layers of the file that normalise inputs
        are skipped.

        Args:
            import_file: saved by Keras 2 or Keras 3. Nothing in it is executed.
            allow_missing: accept a file without weights for some layers of the model, which keep
                theirs: for example a plain classifier for a policy that also has a critic.

        Returns:
            The mapping from arrays of the file to variables, and the layers that kept their weights
            (`kept`); `print` it.

        Raises:
            MissingModelFileError: if there is no such file; also a FileNotFoundError.
            ModelImportError: if it is damaged, does not fit, was quantized, or has NaN or infinity;
                nothing is changed then.
        """
        keys = [slot.key for slot in self.program.layout.get_slots("model")]
        source = read_keras_weights(import_file)
        model = self.program.functions.network.model
        match = match_weights(
            source, model, keys, os.fspath(import_file), allow_missing=allow_missing
        )
        with self._state.lock_for_change():
            self._state.write(match.arrays)
            self._state.update_targets(1.0, ["model"])
        return match.report

    def on_global_var_update(self, global_vars: Mapping[str, Any]) -> None:
        """Sets the counters to those of the whole run and moves schedules to its time step.

        Schedules are at time step 0 until then.

        Args:
            global_vars: `timestep`, and `num_grad_updates` if it should change.
        """
        super().on_global_var_update(global_vars)
        if self._state.frozen_as is None:
            self._update_schedules(self.global_timestep)

    def _update_schedules(self, timestep: int) -> None:
        """Sets each hyperparameter that has a `<name>_schedule` to its value at `timestep`.

        A schedule that is an integer n goes from the configured value to 0 at time step n. An `lr`
        that is a function is also a schedule.
        """
        rate = resolve_schedule(self.config["lr"])
        if rate is not None and not rate.counts_updates:
            self.set_hyperparameter("lr", rate.value(timestep))
        self._update_lr_schedule()
        for name in self.program.spec.hyperparameters:
            points = self.config.get(f"{name}_schedule")
            if isinstance(points, int):
                points = [[0, self.config[name]], [points, 0.0]]
            if points is not None:
                self.set_hyperparameter(name, piecewise_linear(points, timestep))

    def _update_lr_schedule(self) -> None:
        """Sets `lr` to its value at the current number of updates, if it is a Keras schedule."""
        rate = resolve_schedule(self.config["lr"])
        if rate is not None and rate.counts_updates:
            self.set_hyperparameter("lr", rate.value(self.num_grad_updates))


TFPolicy._base_methods = overrides.get_base_methods(TFPolicy)
TFPolicy._inspect_methods()
