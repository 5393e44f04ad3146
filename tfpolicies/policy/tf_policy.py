"""Policies whose mathematics is TensorFlow code: handles on a state of a shared Program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.batch.leaves import map_leaves
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import overrides
from tfpolicies.config.read_only import copied
from tfpolicies.config.sections import is_number
from tfpolicies.errors import (
    BatchError,
    ConfigError,
    PolicyOwnedError,
    SpaceError,
    WeightsError,
)
from tfpolicies.exploration.making import make_exploration
from tfpolicies.export.onnx_file import export_onnx
from tfpolicies.export.result import ExportResult
from tfpolicies.export.saved_model import export_saved_model
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.losses import clip_gradients
from tfpolicies.models.network import ModelSource, model_source
from tfpolicies.models.spaces import nest
from tfpolicies.policy import checkpoints, learning_batches
from tfpolicies.policy.acting import Acting
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.identity import complete_config, derived_seed
from tfpolicies.policy.policy import ActionBatch, Policy
from tfpolicies.program.minibatches import draw_minibatches
from tfpolicies.program.program import Program
from tfpolicies.program.spec import ProgramSpec, static_settings
from tfpolicies.schedules import piecewise_linear


class TFPolicy(Policy):
    """A policy with a Keras model; subclasses say what its loss is.

    Policies of one class, spaces, architecture and static config share one `Program`: its functions
    are traced once, and each policy costs its numbers only. Code that is traced (`loss`,
    `stats_fn`, `grad_stats_fn`, `compute_gradients_fn`, `apply_gradients_fn`) therefore runs on a
    view of the class: `self.config` holds the hyper-parameters as tensors, what `loss` sets on
    `self` can be read by `stats_fn`, and what belongs to one policy cannot be read.

    A subclass overrides, as far as it differs:

    * `hyperparameters`: names of config keys whose numbers may differ between policies.
    * `static_keys`: names of config keys that change code or shapes.
    * `loss(model, dist_class, train_batch)`: a scalar tensor.
    * `stats_fn(train_batch)`: a dict of scalar tensors.
    * `postprocess_fragments(fragments)`: adds columns for all trajectories at once; or
      `postprocess_trajectory(batch)`, which is then called for each trajectory.

    Args:
        observation_space: of the environment, possibly nested.
        action_space: of the environment.
        config: a dict or an `AlgorithmConfig`; what is missing comes from `config_class`. The keys
            `__policy_id` and `worker_index` seed weights and noise together with `seed`.

    Raises:
        ConfigError: for an unknown or invalid setting.
        SpaceError: for a space that cannot be used.
        ModelError: for a model that does not fit.
    """

    config_class: type[AlgorithmConfig] = AlgorithmConfig
    hyperparameters: tuple[str, ...] = ("lr", "gamma", "grad_clip")
    static_keys: tuple[str, ...] = (
        "model",
        "optimizer",
        "grad_clip_by",
        "normalize_actions",
        "clip_actions",
        "observation_filter",
        "eager_tracing",
        "jit_compile",
    )

    def __init__(
        self, observation_space: gym.Space, action_space: gym.Space, config: Any = None
    ) -> None:
        complete, identity = complete_config(type(self).config_class, config)
        super().__init__(observation_space, action_space, complete)
        self.validate_spaces(observation_space, action_space, complete)
        self.policy_id = identity["__policy_id"]
        self.exploration = make_exploration(
            complete["exploration_config"],
            type(self).distribution(action_space, static_settings(type(self), complete)),
            worker_index=identity["worker_index"],
            num_workers=complete["num_workers"],
            normalize_actions=complete["normalize_actions"],
        )
        transform = self.exploration.transform
        spec = ProgramSpec.of(type(self), observation_space, action_space, complete, transform)
        self.program = Program.of(spec)
        seed = complete["seed"]
        self._state = self.program.new_state(
            spec.hyper_values(complete),
            weight_seed=derived_seed(seed, self.policy_id, "weights"),
            rng_seed=derived_seed(seed, self.policy_id, identity["worker_index"], "noise"),
            template=spec.source.template,
        )
        made = complete["callbacks"]
        self.callbacks = made() if made is not None else None
        self._acting = Acting(self.program, self._state, self.exploration, self.config)
        self._buffers: dict[int, dict[str, Any]] = {}

    # -- what subclasses say ------------------------------------------------------------------

    def loss(self, model: Any, dist_class: Any, train_batch: Any) -> tf.Tensor:
        """Returns the loss of one minibatch, a scalar tensor; traced for all policies of a kind.

        Args:
            model: call it on `train_batch` for `(dist_inputs, state)`, then `value_function()`.
            dist_class: `dist_class(dist_inputs)` gives the action distributions.
            train_batch: tensors by column; `loss_mask` weighs the rows of a padded minibatch.

        Raises:
            ConfigError: if the class has no loss, so that its policies only act.
        """
        raise ConfigError(
            f"{type(self).__name__} has no loss, so it acts but does not learn. Override "
            "`loss(self, model, dist_class, train_batch)` in a subclass."
        )

    def stats_fn(self, train_batch: Any) -> dict[str, tf.Tensor]:
        """Returns statistics of a minibatch as scalar tensors; names go to `learner_stats`."""
        del train_batch
        return {}

    def grad_stats_fn(self, train_batch: Any, grads: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Returns statistics of the gradients as scalar tensors."""
        del train_batch, grads
        return {}

    def compute_gradients_fn(self, optimizer: Any, loss: tf.Tensor) -> list[tuple[Any, Any]]:
        """Returns `(gradient, variable)` pairs, clipped as `grad_clip` and `grad_clip_by` say."""
        pairs = optimizer.compute_gradients(loss)
        return clip_gradients(pairs, self.config["grad_clip"], self.config["grad_clip_by"])

    def apply_gradients_fn(self, optimizer: Any, grads: list[tuple[Any, Any]]) -> None:
        """Updates the variables with `(gradient, variable)` pairs."""
        optimizer.apply_gradients(grads)

    def extra_action_out_fn(self) -> dict[str, tf.Tensor]:
        """Returns further outputs of acting, `[N, ...]` each, by name; none by default.

        `self.dist_inputs` `[N, n]` and `self.values` `[N]` (or None) are those of the same call.
        """
        return {}

    def extra_learn_fetches_fn(self) -> dict[str, tf.Tensor]:
        """Returns what `learn_on_batch` gives beside statistics, by name; none by default.

        It runs behind `loss` and may read what that set on `self`, per row too.
        """
        return {}

    @classmethod
    def adds_outputs(cls) -> bool:
        """Whether the class overrides `extra_action_out_fn`."""
        return cls.extra_action_out_fn is not TFPolicy.extra_action_out_fn

    @classmethod
    def distribution(cls, action_space: gym.Space, static: Mapping[str, Any]) -> Any:
        """Returns the action distribution of the class for a space, given the static config."""
        return ActionDistribution.of(action_space, static["model"]["custom_action_dist"])

    @classmethod
    def model_source(
        cls,
        observation_space: gym.Space,
        dist_class: Any,
        static: Mapping[str, Any],
        *,
        with_value: bool,
    ) -> ModelSource:
        """Returns where networks come from; a class with another architecture overrides it.

        Args:
            observation_space: as the environment has it.
            dist_class: what `distribution` gave; `num_inputs` is the width of the outputs.
            static: the static config; `static["model"]` is complete.
            with_value: what `wants_value` gave.
        """
        return model_source(observation_space, dist_class, static["model"], with_value=with_value)

    @classmethod
    def wants_value(cls, static: Mapping[str, Any]) -> bool:
        """Whether the model must estimate values, given the static config."""
        del static
        return False

    @classmethod
    def wants_target(cls, static: Mapping[str, Any]) -> bool:
        """Whether the policy has a target network, `self.target_model` in `loss`."""
        del static
        return False

    @classmethod
    def make_optimizer(cls, static: Mapping[str, Any]) -> Any:
        """Returns a new Keras optimizer; its learning rate is set from `lr` at each update.

        `optimizer={"type": "sgd", "momentum": 0.9}` gives `keras.optimizers.SGD(momentum=0.9)`;
        Adam is the default.

        Raises:
            ConfigError: if Keras does not know the type or an argument.
        """
        settings = dict(static["optimizer"])
        kind = settings.pop("type", "adam")
        if "learning_rate" in settings:
            raise ConfigError("optimizer['learning_rate'] would be ignored; set lr instead.")
        try:
            return keras.optimizers.get({"class_name": kind, "config": settings})
        except (ValueError, TypeError) as error:
            raise ConfigError(f"optimizer={dict(static['optimizer'])!r}: {error}") from error

    def validate_spaces(
        self, observation_space: gym.Space, action_space: gym.Space, config: Mapping[str, Any]
    ) -> None:
        """Checks the spaces; a subclass that supports fewer raises `UnsupportedSpaceError`."""
        del config
        if not isinstance(observation_space, gym.Space) or not isinstance(action_space, gym.Space):
            raise SpaceError(
                "observation_space and action_space must be Gymnasium spaces, got "
                f"{observation_space!r} and {action_space!r}."
            )

    @classmethod
    def traced_view(cls, **shared: Any) -> TFPolicy:
        """Returns an object of this class that has only what all policies of a kind share."""
        view = object.__new__(cls)
        view.__dict__.update(shared, _is_view=True)
        return view

    def __getattr__(self, name: str) -> Any:
        cls = type(self).__name__
        if self.__dict__.get("_is_view"):
            raise PolicyOwnedError(
                f"traced code of {cls} read self.{name}, which belongs to one policy while the "
                "trace is shared by all of its kind. Put numbers into the config and name them in "
                f"{cls}.hyperparameters, put what changes code into {cls}.static_keys."
            )
        raise AttributeError(f"{cls!r} object has no attribute {name!r}")

    # -- facts --------------------------------------------------------------------------------

    @property
    def dist_class(self) -> Any:
        """The action distribution class: `dist_class(dist_inputs)`."""
        return self.program.spec.dist_class

    @property
    def framework(self) -> str:
        """The framework of the config, `"tf2"`."""
        return self.config["framework"]

    @property
    def global_timestep(self) -> int:
        """Rows acted on so far, or what `on_global_var_update` said last."""
        return self._state.global_timestep

    @property
    def num_grad_updates(self) -> int:
        """Minibatch updates done so far."""
        return self._state.num_grad_updates

    @property
    def generator(self) -> np.random.Generator:
        """The generator that draws action noise and shuffles minibatches."""
        return self._state.rng

    @property
    def inference(self) -> str:
        """The runtime that acts: "onnx" or "tf", with "auto" resolved."""
        _ = self._acting.runner
        return self.config["inference"]

    @property
    def model(self) -> keras.Model:
        """The Keras model with this policy's weights in it; read it, do not write through it."""
        program = self.program
        with program.lock:
            program.make_resident(self._state)
            return program.functions.network.model

    def make_rl_module(self) -> keras.Model:
        """Returns the policy's Keras model: here the model is the module."""
        return self.model

    def to_keras(self) -> keras.Model:
        """Returns a trained copy of the model, for the caller to keep."""
        model = self.program.spec.source.make(0)
        if model is self.program.functions.network.model:
            raise ConfigError(
                "this model cannot be copied, because Keras cannot rebuild it from its config; "
                "give the model as a factory f(observation_space, num_outputs) instead."
            )
        for variable, value in zip(model.variables, self.get_weights().values(), strict=True):
            variable.assign(value)
        return model

    def has_own_postprocessing(self) -> bool:
        """Whether a subclass overrides `postprocess_trajectory`."""
        return type(self).postprocess_trajectory is not TFPolicy.postprocess_trajectory

    # -- acting -------------------------------------------------------------------------------

    def compute_actions(
        self,
        obs_batch: Any,
        state_batches: Sequence[np.ndarray] | None = None,
        prev_action_batch: Any = None,
        prev_reward_batch: Any = None,
        info_batch: Any = None,
        episodes: Any = None,
        explore: bool | None = None,
        timestep: int | None = None,
        **kwargs: Any,
    ) -> ActionBatch:
        """Chooses one action for each row of `obs_batch`.

        Actions are normalised: 0-based int64 for Discrete, in [-1, 1] for a bounded float Box with
        `normalize_actions`. `extras` has `action_logp` and `action_prob` `[B]` (0 and 1 where
        greedy), `action_dist_inputs` `[B, n]`, and `vf_preds` `[B]` if the model has a value.

        Raises:
            ObservationError: if `obs_batch` does not fit the observation space.
        """
        inputs = self._acting.checked_inputs(
            obs_batch, state_batches, prev_action_batch, prev_reward_batch
        )
        explore = self.config["explore"] if explore is None else explore
        out = self._acting.run(inputs, explore, timestep)
        logp, prob = out.logp.copy(), out.prob.copy()
        if not explore:
            logp[...], prob[...] = 0.0, 1.0
        extras = {
            "action_logp": logp,
            "action_prob": prob,
            "action_dist_inputs": out.dist_inputs.copy(),
            **{name: array.copy() for name, array in out.extras.items()},
        }
        if out.values is not None:
            extras["vf_preds"] = out.values.copy()
        actions = nest(self.action_space, [leaf.copy() for leaf in out.actions])
        return ActionBatch(actions, [state.copy() for state in out.states], extras)

    def act_columns(
        self,
        obs: Sequence[np.ndarray],
        previous: Sequence[np.ndarray] = (),
        states: Sequence[np.ndarray] = (),
        *,
        explore: bool | None = None,
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Acts for a sampler; see `Policy.act_columns`."""
        explore = self.config["explore"] if explore is None else explore
        out = self._acting.run([*obs, *previous, *states], explore)
        layout = self.program.act_layout
        columns = {port.name: x for port, x in zip(layout.actions, out.actions, strict=True)}
        columns["action_logp"] = out.logp
        columns["action_dist_inputs"] = out.dist_inputs
        if out.values is not None:
            columns["vf_preds"] = out.values
        for port, state in zip(layout.states, out.states, strict=True):
            columns[port.name] = state
        return nest(self.action_space, out.env_actions), columns

    def reads_previous(self) -> tuple[bool, bool]:
        """Whether the model reads the previous action, and the previous reward."""
        return self.program.ports.reads_actions, self.program.ports.reads_rewards

    def get_initial_state(self) -> list[np.ndarray]:
        """Returns the memory at the start of an episode: zeros, one array per state tensor."""
        return [port.zeros(1)[0] for port in self.program.ports.states]

    def get_exploration_state(self) -> dict[str, Any]:
        """Returns the state of the exploration; `{}` for stochastic sampling."""
        return self.exploration.state()

    def env_action(
        self, action: Any, *, unsquash: bool | None = None, clip: bool | None = None
    ) -> Any:
        """Returns one normalised action as the environment takes it.

        Args:
            action: as `compute_single_action` gives it.
            unsquash: map to the Box's bounds; None takes `config["normalize_actions"]`.
            clip: clip to the Box's bounds; None takes `config["clip_actions"]`.
        """
        return self._acting.env_action(action, unsquash=unsquash, clip=clip)

    def compute_values(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the values of checked inputs, one array per input port, float32 `[N]`."""
        return self._acting.values(inputs)

    def compute_log_likelihoods(
        self,
        actions: Any,
        obs_batch: Any,
        state_batches: Sequence[np.ndarray] | None = None,
        prev_action_batch: Any = None,
        prev_reward_batch: Any = None,
        actions_normalized: bool = True,
        in_training: bool = True,
    ) -> np.ndarray:
        """Returns the log-probability of each action, float32 `[B]`.

        Args:
            actions: `[B, *shape]`, nested as the action space is.
            obs_batch: the observations they were chosen for.
            state_batches: the memory, for policies that have one.
            prev_action_batch: the previous actions, for models that read them.
            prev_reward_batch: the previous rewards, likewise.
            actions_normalized: False if the actions are the environment's.
            in_training: accepted; the result is that of acting.

        Raises:
            ObservationError: if the observations or actions do not fit their spaces.
            UsageError: if the memory, or what else the model reads, is missing.
            BatchError: if there are not as many actions as observations.
        """
        del in_training
        inputs = self._acting.checked_inputs(
            obs_batch, state_batches, prev_action_batch, prev_reward_batch
        )
        return self._acting.log_likelihoods(actions, inputs, normalized=actions_normalized)

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

        Rows are shuffled anew for each epoch by the policy's own generator, and every row is used:
        the last minibatch of an epoch has what remains.

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
            BatchError: if it is empty, or a column has another shape than before.
        """
        if num_epochs < 1 or minibatch_size < 1:
            raise BatchError(
                f"num_epochs and minibatch_size must be at least 1, got {num_epochs} and "
                f"{minibatch_size}."
            )
        if self._learns_by_minibatch():
            return self._learn_minibatches(batch, num_epochs, minibatch_size, shuffle=shuffle)
        return self._learn(batch, num_epochs, minibatch_size, shuffle=shuffle)

    def _learns_by_minibatch(self) -> bool:
        """Whether code of the user must see every minibatch."""
        own = type(self).learn_on_batch is not TFPolicy.learn_on_batch
        return own or (
            self.callbacks is not None and overrides(self.callbacks, "on_learn_on_batch")
        )

    def _learn_minibatches(
        self, batch: Mapping[str, Any], num_epochs: int, minibatch_size: int, *, shuffle: bool
    ) -> dict[str, Any]:
        """Calls `learn_on_batch` for each minibatch, in the order of `learn_epochs`."""
        whole = batch if isinstance(batch, SampleBatch) else SampleBatch(batch)
        if not whole.count:
            raise BatchError("The batch is empty; learning needs at least one row.")
        size = min(minibatch_size, whole.count)
        rng = self.generator if shuffle else None
        minibatches = draw_minibatches(whole.count, num_epochs, size, rng)
        results = [
            self.learn_on_batch(whole.take(rows[mask > 0]))
            for rows, mask in zip(minibatches.rows, minibatches.mask, strict=True)
        ]
        found = [result.get("learner_stats", {}) for result in results]
        stats = {name: _reduction(name)([each[name] for each in found]) for name in found[0]}
        return {
            **results[-1],
            "learner_stats": {name: float(value) for name, value in stats.items()},
            "num_agent_steps_trained": whole.count,
        }

    def learn_on_batch(self, samples: Mapping[str, Any]) -> dict[str, Any]:
        """Does one update on all rows of a batch; see `learn_epochs` for the result.

        Raises:
            MissingColumnError: if the batch lacks a column that the loss reads.
            BatchError: if it is empty.
        """
        return self._learn(samples, 1, None, shuffle=False)

    def _learn(
        self,
        batch: Mapping[str, Any],
        num_epochs: int,
        minibatch_size: int | None,  # None: all rows
        *,
        shuffle: bool,
    ) -> dict[str, Any]:
        self.prepare_learning()
        custom = self._announced(batch)
        columns = self.program.select_columns(self._learning_columns(batch))
        result = self._learn_columns(columns, num_epochs, minibatch_size, shuffle=shuffle)
        sampled_at = getattr(batch, "num_grad_updates", None) or 0
        result["diff_num_grad_updates_vs_sampler_policy"] -= sampled_at
        return {**result, "custom_metrics": custom}

    def _announced(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Tells the callbacks of an update; returns the custom metrics they give."""
        custom: dict[str, Any] = {}
        if self.callbacks is not None:
            self.callbacks.on_learn_on_batch(policy=self, train_batch=batch, result=custom)
        return custom

    def _learn_columns(
        self,
        columns: dict[str, Any],
        num_epochs: int,
        minibatch_size: int | None,
        *,
        shuffle: bool,
    ) -> dict[str, Any]:
        rows = self.program.rows_of(columns)
        before = self._state.num_grad_updates
        fetches: dict[str, Any] = {}
        if minibatch_size is None and num_epochs == 1 and self.program.signature.fetches:
            totals, fetches = self.program.learn_once(self._state, columns)
        else:
            totals = self.program.learn_epochs(
                self._state, columns, num_epochs, minibatch_size, shuffle=shuffle
            )
        return {
            "learner_stats": self._named_stats(totals),
            "num_agent_steps_trained": rows,
            "num_grad_updates_lifetime": self._state.num_grad_updates,
            "diff_num_grad_updates_vs_sampler_policy": float(before),
            **fetches,
        }

    def _named_stats(self, totals: Mapping[str, np.ndarray]) -> dict[str, float]:
        names = self.program.signature.stat_names
        stats = {name: float(totals[_kind(name)][i]) for i, name in enumerate(names)}
        return {**stats, **self.hyper_stats()}

    def hyper_stats(self) -> dict[str, float]:
        """Returns hyper-parameters in force, by the names they have in `learner_stats`."""
        return {"cur_lr": self.hyper("lr")}

    def prepare_learning(self) -> None:
        """Runs the loss once on a small batch of zeros, if no policy of the kind did."""
        if not self.program.is_discovered:
            self.program.discover(self._learning_columns(learning_batches.dummy_batch(self)))

    @property
    def loss_columns(self) -> tuple[str, ...]:
        """The names of the columns that the loss reads."""
        self.prepare_learning()
        return tuple(self.program.signature.columns)

    def warm_up(self, rows: int, num_epochs: int, minibatch_size: int) -> None:
        """Traces and compiles acting and learning for batches of `rows`; changes no numbers."""
        self.prepare_learning()
        acting = self.config["inference"] != "tf"
        self.program.warm_up(rows, num_epochs, minibatch_size, acting=acting)
        self.config["jit_compile"] = self.program.resolve_jit()
        _ = self.inference

    def _learning_columns(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return learning_batches.learning_columns(self.program, batch)

    def compute_gradients(
        self, postprocessed_batch: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Returns the gradients of one batch, in the order of the trainable variables.

        Neither weights nor counters change. The info has `learner_stats`.
        """
        self.prepare_learning()
        columns = self.program.select_columns(self._learning_columns(postprocessed_batch))
        gradients, stats = self.program.gradients(self._state, columns)
        return gradients, {"learner_stats": {**stats, **self.hyper_stats()}}

    def apply_gradients(self, gradients: Sequence[np.ndarray | None]) -> None:
        """Applies gradients as `compute_gradients` returns them; None counts as zeros.

        Raises:
            WeightsError: if their number or shapes are wrong; nothing is changed then.
        """
        variables = self.program.functions.network.model.trainable_variables
        if len(gradients) != len(variables):
            raise WeightsError(
                f"Unexpected number of gradients: {len(gradients)} for {len(variables)} variables."
            )
        arrays = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            shape = tuple(variable.shape)
            array = np.zeros(shape, np.float32) if gradient is None else np.asarray(gradient)
            if array.shape != shape:
                raise WeightsError(f"gradients[{i}] must have shape {shape}, got {array.shape}.")
            arrays.append(array.astype(np.float32, copy=False))
        self.program.apply_gradients(self._state, arrays)

    def load_batch_into_buffer(self, batch: Mapping[str, Any], buffer_index: int = 0) -> int:
        """Keeps a batch for `learn_on_loaded_batch`; returns its number of rows."""
        self.prepare_learning()
        self._buffers[buffer_index] = self.program.select_columns(self._learning_columns(batch))
        return self.get_num_samples_loaded_into_buffer(buffer_index)

    def get_num_samples_loaded_into_buffer(self, buffer_index: int = 0) -> int:
        """Returns the rows of a loaded batch, 0 before loading."""
        columns = self._buffers.get(buffer_index)
        return 0 if columns is None else self.program.rows_of(columns)

    def learn_on_loaded_batch(self, offset: int = 0, buffer_index: int = 0) -> dict[str, Any]:
        """Does one update on rows `[offset, offset + minibatch size)` of a loaded batch.

        The minibatch size is `config["sgd_minibatch_size"]`, or `train_batch_size` where there is
        none; all rows are used if it is not smaller than the batch.

        Raises:
            BatchError: if no batch is loaded, or `offset` lies behind its end.
        """
        columns = self._buffers.get(buffer_index)
        if columns is None:
            raise BatchError(
                f"Buffer {buffer_index} is empty: you must call load_batch_into_buffer before "
                "learn_on_loaded_batch."
            )
        rows = self.get_num_samples_loaded_into_buffer(buffer_index)
        size = self.config.get("sgd_minibatch_size") or self.config["train_batch_size"]
        if size < rows:
            if not 0 <= offset < rows:
                raise BatchError(f"offset must be in [0, {rows}), got {offset}.")
            items = self.program.items_between(columns, offset, offset + size)
            columns = tf.nest.map_structure(lambda x: x[items], columns)
        custom = self._announced(columns)
        return {**self._learn_columns(columns, 1, None, shuffle=False), "custom_metrics": custom}

    # -- trajectories -------------------------------------------------------------------------

    def postprocess_trajectory(
        self,
        sample_batch: SampleBatch,
        other_agent_batches: Mapping[Any, Any] | None = None,
        episode: Any = None,
    ) -> SampleBatch:
        """Adds the columns that the loss needs to the rows of one trajectory, in place.

        Args:
            sample_batch: rows of one episode in order, with `new_obs` and the acting extras; a last
                row that is not terminated is bootstrapped from its `new_obs`.
            other_agent_batches: unused here; for overrides.
            episode: unused here; for overrides.
        """
        del other_agent_batches, episode
        fragments = Fragments.of_trajectory(self, sample_batch)
        self.postprocess_fragments(fragments)
        for name, column in fragments.added.items():
            sample_batch[name] = column[0]
        if fragments.reached is not None:
            rows = fragments.reached[0]
            reached = map_leaves(lambda leaf: leaf[rows], sample_batch[SampleBatch.NEXT_OBS])
            sample_batch[SampleBatch.NEXT_OBS] = reached
        return sample_batch

    # -- weights and state --------------------------------------------------------------------

    def get_weights(self) -> dict[str, np.ndarray]:
        """Returns copies of the model's variables under canonical keys, in order."""
        return self._state.copy_of("model")

    def set_weights(self, weights: Mapping[str, Any] | Sequence[Any]) -> None:
        """Overwrites the model's variables; a target network becomes equal to the model.

        Args:
            weights: a dict as `get_weights` returns it, matched by key; or, if its keys are others,
                and for a list, by order and shape.

        Raises:
            WeightsError: if number or shapes differ; nothing is changed then.
        """
        self._state.write(self._matched(weights, "model", "weights"))
        self._state.copy_part("model", "target", 1.0)

    def _matched(self, values: Any, part: str, argument: str) -> dict[str, np.ndarray]:
        slots = self.program.layout.of(part)
        if isinstance(values, Mapping):
            if set(values) == {slot.key for slot in slots}:
                values = [values[slot.key] for slot in slots]
            else:
                values = list(values.values())
        elif not isinstance(values, Sequence):
            raise WeightsError(
                f"{argument} must be a dict or a list of arrays, got {type(values).__name__}."
            )
        if len(values) != len(slots):
            raise WeightsError(
                f"{argument} has {len(values)} arrays, but this policy has {len(slots)}: "
                f"{', '.join(slot.key for slot in slots)}."
            )
        matched = {}
        for slot, value in zip(slots, values, strict=True):
            name = f"{argument}[{slot.key!r}]"
            try:
                array = np.asarray(value, slot.dtype)
            except (TypeError, ValueError) as error:
                raise WeightsError(f"{name} must be an array of {slot.dtype}: {error}") from error
            if array.shape != slot.shape:
                raise WeightsError(f"{name} must have shape {slot.shape}, got {array.shape}.")
            matched[slot.key] = array
        return matched

    def hyper(self, name: str) -> float:
        """Returns the value in force of a hyper-parameter."""
        return float(self._state.hyper[self.program.spec.hyperparameters.index(name)])

    def set_hyper(self, name: str, value: float | None) -> None:
        """Sets a hyper-parameter of this policy alone, from the next update on.

        Raises:
            ConfigError: if this class has no such hyper-parameter, or the value is no number.
        """
        names = self.program.spec.hyperparameters
        if name not in names:
            raise ConfigError(f"{name!r} is no hyper-parameter; those are {', '.join(names)}.")
        if not (value is None or is_number(value)):
            raise ConfigError(f"{name} must be a number or None (no limit), got {value!r}.")
        self._state.hyper[names.index(name)] = float("inf") if value is None else value

    def get_state(self) -> dict[str, Any]:
        """Returns everything that `set_state` restores, as copies.

        Keys: `weights`, `target_weights` (empty without a target network),
        `_optimizer_variables`, `global_timestep`, `num_grad_updates`, `hyperparameters`, `rng` (the
        generator's state) and `policy_spec`.
        """
        names = self.program.spec.hyperparameters
        return {
            "weights": self.get_weights(),
            "target_weights": self._state.copy_of("target"),
            "_optimizer_variables": self._state.copy_of("learner"),
            "global_timestep": self._state.global_timestep,
            "num_grad_updates": self._state.num_grad_updates,
            "hyperparameters": {name: self.hyper(name) for name in names},
            "rng": self._state.rng.bit_generator.state,
            "policy_spec": {
                "policy_class": type(self),
                "observation_space": self.observation_space,
                "action_space": self.action_space,
                "config": copied(self.config),
            },
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; everything is checked before anything changes.

        `policy_spec` is not applied: a policy keeps its spaces and config.

        Raises:
            KeyError: if `weights` or `global_timestep` is missing.
            WeightsError: if an array does not fit.
        """
        arrays, hyper = self.check_state(state)
        timestep = int(state["global_timestep"])
        updates = int(state.get("num_grad_updates", self._state.num_grad_updates))
        if "rng" in state:
            self._state.rng.bit_generator.state = state["rng"]
        self._state.write(arrays)
        self._state.hyper[...] = hyper
        self._state.global_timestep = timestep
        self._state.num_grad_updates = updates

    def check_state(self, state: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Checks that a state fits; returns its arrays by key and its hyper-parameters.

        Raises:
            KeyError: if `weights` or `global_timestep` is missing.
            WeightsError: if an array does not fit.
        """
        _ = state["global_timestep"]
        arrays = self._matched(state["weights"], "model", "state['weights']")
        target = state.get("target_weights") or list(arrays.values())
        if self.program.layout.of("target"):
            arrays.update(self._matched(target, "target", "state['target_weights']"))
        slots = state.get("_optimizer_variables")
        if slots is not None:
            arrays.update(self._matched(slots, "learner", "state['_optimizer_variables']"))
        hyper = self._state.hyper.copy()
        names = self.program.spec.hyperparameters
        for name, value in state.get("hyperparameters", {}).items():
            if name not in names:
                raise WeightsError(f"state['hyperparameters'] has {name!r}, unknown to {self!r}.")
            hyper[names.index(name)] = value
        return arrays, hyper

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> TFPolicy:
        """Returns a new policy of the class, spaces and config in a state of `get_state`.

        Raises:
            WeightsError: if the state has no `policy_spec`.
        """
        spec = state.get("policy_spec")
        if spec is None:
            raise WeightsError(
                "No `policy_spec` key in the state; only a state of `get_state()` makes a policy."
            )
        policy_class = spec["policy_class"]
        policy = policy_class(spec["observation_space"], spec["action_space"], spec["config"])
        policy.set_state(state)
        return policy

    def export_checkpoint(
        self,
        export_dir: str | os.PathLike[str],
        filename_prefix: Any = None,
        *,
        policy_state: Mapping[str, Any] | None = None,
        checkpoint_format: str = "json",
    ) -> None:
        """Writes a checkpoint into a folder: `policy.json` and HDF5 files, no pickle.

        Killed at any instant, it leaves the folder's old or new checkpoint whole.

        Args:
            export_dir: the folder, made if it is missing.
            filename_prefix: must be None.
            policy_state: a state of `get_state` to write instead of the present one.
            checkpoint_format: "json", the only one.

        Raises:
            ConfigError: for another format, or a `filename_prefix`.
            CheckpointError: if it cannot be written.
        """
        if filename_prefix is not None:
            raise ConfigError("filename_prefix is no longer used; name the folder instead.")
        if checkpoint_format != "json":
            raise ConfigError(f"checkpoint_format must be 'json', got {checkpoint_format!r}.")
        checkpoints.write_policy_checkpoint(self, export_dir, policy_state)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | os.PathLike[str],
        policy_ids: Sequence[str] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> Any:
        """Returns the policy of a checkpoint, or the policies of an algorithm's checkpoint by id.

        Nothing in the file is executed. A class of your own is found by calling this on it; what a
        file cannot hold (a callback class, a model with layers of your own) is given in `config`.

        Args:
            checkpoint: the folder, or what `Algorithm.save` returned.
            policy_ids: of an algorithm's checkpoint, only these.
            config: settings that replace stored ones.

        Raises:
            CheckpointError: if it is missing, damaged or foreign; the message names the file.
            UnknownPolicyError: if one of `policy_ids` is not in it.
        """
        path = checkpoints.path_of(checkpoint)
        return checkpoints.load_policies(path, policy_ids, cls, config)

    # -- export -------------------------------------------------------------------------------

    def export_model(
        self, export_dir: str | os.PathLike[str], onnx: int | bool | None = None
    ) -> ExportResult:
        """Writes the whole policy, preprocessing and action pipeline included, for serving.

        The export is run against the policy before it is reported as done.

        Args:
            export_dir: the folder; made if missing. A SavedModel goes to the next numbered version
                folder in it, ONNX to `model.onnx` and `model_sample.onnx`.
            onnx: None for a SavedModel, True for ONNX, a number for ONNX of that opset.

        Returns:
            The path and the parity figures.

        Raises:
            ExportError: if it cannot be written or does not do what the policy does; the folder is
                then as it was. Also a RuntimeError if tf2onnx is missing.
        """
        if onnx is None or onnx == 0:
            return export_saved_model(self.program, self._state, export_dir)
        if onnx is True:
            return export_onnx(self.program, self._state, export_dir)
        return export_onnx(self.program, self._state, export_dir, opset=onnx)

    def on_global_var_update(self, global_vars: Mapping[str, Any]) -> None:
        """Takes over the run's counters and moves schedules to its time step.

        Args:
            global_vars: `timestep`, and `num_grad_updates` if it is to change.
        """
        self._state.global_timestep = int(global_vars["timestep"])
        if global_vars.get("num_grad_updates") is not None:
            self._state.num_grad_updates = int(global_vars["num_grad_updates"])
        self.update_schedules(self._state.global_timestep)

    def update_schedules(self, timestep: int) -> None:
        """Sets each hyper-parameter that has a `<name>_schedule` to its value at `timestep`.

        A schedule that is an integer n goes from the configured value to 0 at time step n.
        """
        for name in self.program.spec.hyperparameters:
            points = self.config.get(f"{name}_schedule")
            if isinstance(points, int):
                points = [[0, self.config[name]], [points, 0.0]]
            if points is not None:
                self.set_hyper(name, piecewise_linear(points, timestep))


def _kind(name: str) -> str:
    """Returns how a statistic is summed up over minibatches, by its name."""
    prefix = name.partition("_")[0]
    return prefix if prefix in ("min", "max") else "mean"


def _reduction(name: str) -> Any:
    return {"min": np.nanmin, "max": np.nanmax, "mean": np.nanmean}[_kind(name)]
