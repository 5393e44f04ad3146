"""Override points of `TFPolicy`: the code of a class, most of it traced."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.base.extensions import EXTENSIONS
from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.migration_hints import check_recorded_statistics
from tfpolicies.errors import ConfigError, PolicyOwnedError, SpaceError
from tfpolicies.exploration.exploration import Exploration
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.losses import clip_gradients
from tfpolicies.models.model_source import ModelSource, make_model_source
from tfpolicies.models.spaces import unflatten
from tfpolicies.policy.policy import Policy
from tfpolicies.program.networks import NetworkPlan
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.program import Program
from tfpolicies.program.spec import get_static_settings
from tfpolicies.program.traced_acting import make_distribution
from tfpolicies.program.traced_arguments import TapeOptimizer, TracedModel, TrainBatch
from tfpolicies.program.traced_context import TracedContext


class TFPolicyHooks(Policy):
    """Override points of `TFPolicy`: the properties that a class fixes for all its policies.

    Traced code runs on a *traced view* of the class: an object without a state.
    """

    program: Program
    exploration: Exploration
    auto_settings: dict[str, Any]
    dist_class: ActionDistribution
    _state: PolicyState
    recorded: dict[str, tf.Tensor]  # in traced code: the arguments of `record`
    _context: TracedContext | None = None
    """The attributes of a traced view; None for a policy."""
    config_class: type[AlgorithmConfig] = AlgorithmConfig
    _acting_only_outputs: ClassVar[frozenset[str]] = frozenset()
    """Outputs of `extra_action_out_fn` that are not columns of batches."""
    _compiled_target_update: ClassVar[Any] = None
    """The `update_target` that is equivalent to the target updates inside compiled updates."""
    _state_aliases: ClassVar[dict[str, str]] = {}
    """Keys of a state, and the hyperparameters that are stored under them."""
    _enabling_settings: ClassVar[dict[str, str]] = {}
    """Hyperparameters, and the settings that make them 0 if False."""
    runtime: str = "function"  # traced functions; "session": graph mode
    hyperparameters: tuple[str, ...] = ("lr", "gamma", "grad_clip")
    static_keys: tuple[str, ...] = (
        "model",
        "optimizer",
        "grad_clip_by",
        "normalize_actions",
        "clip_actions",
        "observation_filter",
        "eager_tracing",
        "eager_max_retraces",
        "num_gpus",
        "jit_compile",
    )

    @classmethod
    def _derive_static_settings(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns static settings that follow from other settings of a complete config."""
        del config
        return {}

    @property
    def _lookahead(self) -> int:
        """Number of later rows that `postprocess_fragments` reads; that many rows are held back."""
        return 0

    def loss(
        self, model: TracedModel, dist_class: ActionDistribution, train_batch: TrainBatch
    ) -> tf.Tensor:
        """Returns the loss of one minibatch, a scalar tensor; traced once per Program.

        A class with several networks or optimizers returns a list, see `optimizer`. Each item may
        also be a function without arguments that returns the tensor. It is called after the
        optimizers of the losses given as tensors have stepped, so networks called inside it have
        their new weights; results computed before the call do not. `compute_gradients` makes no
        steps.

        Args:
            model: call it on `train_batch` for `(dist_inputs, state)`, then `value_function()`.
            dist_class: `dist_class(dist_inputs, model)` gives the action distributions.
            train_batch: tensors by column; `loss_mask` weights the rows of a padded minibatch.

        Raises:
            ConfigError: if the class has no loss, so that its policies only act.
        """
        raise ConfigError(
            f"{type(self).__name__} has no loss, so it acts but does not learn. Override "
            "`loss(self, model, dist_class, train_batch)` in a subclass."
        )

    def record(self, **values: tf.Tensor) -> None:
        """Adds statistics of a minibatch to `self.recorded`; call it in `loss`.

        Args:
            **values: by name: scalars, which `stats_fn` returns, or one number per row, `[B]`,
                which `extra_learn_fetches_fn` returns.
        """
        tensors = {name: tf.convert_to_tensor(value) for name, value in values.items()}
        self.recorded.update(tensors)

    def stats_fn(self, train_batch: TrainBatch) -> dict[str, tf.Tensor]:
        """Returns statistics of a minibatch, scalar tensors that go to `learner_stats`.

        By default these are the scalars that `loss` recorded.
        """
        recorded = {name: x for name, x in self.recorded.items() if x.shape.rank == 0}
        statistics = EXTENSIONS.read_statistics(self, train_batch)
        if statistics is None:
            check_recorded_statistics(self)
        return {**recorded, **(statistics or {})}

    def grad_stats_fn(self, train_batch: TrainBatch, grads: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Returns statistics of the gradients as scalar tensors."""
        del train_batch, grads
        return {}

    def compute_gradients_fn(
        self, optimizer: TapeOptimizer | list[TapeOptimizer], loss: tf.Tensor | list[tf.Tensor]
    ) -> list[Any]:
        """Returns `(gradient, variable)` pairs, clipped by `grad_clip` and `grad_clip_by`.

        For several losses both arguments are lists, and the result is a list of lists of pairs. If
        some losses are functions, this is called twice: with the losses given as tensors, then with
        the others. The same holds for `apply_gradients_fn`.
        """
        if isinstance(optimizer, list):
            return [self.compute_gradients_fn(*x) for x in zip(optimizer, loss, strict=True)]
        pairs = optimizer.compute_gradients(loss)
        return clip_gradients(pairs, self.config["grad_clip"], self.config["grad_clip_by"])

    def apply_gradients_fn(
        self, optimizer: TapeOptimizer | list[TapeOptimizer], grads: list[Any]
    ) -> None:
        """Updates the variables with `(gradient, variable)` pairs; lists for several losses."""
        if isinstance(optimizer, list):
            for one, pairs in zip(optimizer, grads, strict=True):
                one.apply_gradients(pairs)
        else:
            optimizer.apply_gradients(grads)

    def extra_action_out_fn(self) -> dict[str, tf.Tensor]:
        """Returns further outputs of acting, `[N, ...]` each, by name.

        `self.dist_inputs` `[N, n]` and `self.values` `[N]` (or None) are those of the same call, as
        are `self.model.last_output()` and `self.model.value_function()`. By default these are the
        values, `vf_preds`, which are an output of every class that estimates them.
        """
        values = getattr(self, "values", None)
        return {} if values is None else {SampleBatch.VF_PREDS: values}

    def extra_learn_fetches_fn(self) -> dict[str, tf.Tensor]:
        """Returns the results of `learn_on_batch` besides statistics, by name.

        It runs after `loss` and may read attributes that `loss` set on `self`. By default it
        returns the values that `loss` recorded for each row.
        """
        return {name: x for name, x in self.recorded.items() if x.shape.rank != 0}

    def make_model(self) -> keras.Model:
        """Returns a new Keras model; override it to build one in code.

        It is called whenever a network is needed, on a traced view of the class: read
        `self.observation_space`, `self.action_space`, `self.dist_class` (for `num_inputs`) and the
        static keys of `self.config`. Each call must return a new model of the same architecture.
        """
        context = self._context
        static = (
            get_static_settings(type(self), self.config)
            if context is None
            else context.config.static
        )
        return self._get_model_source(self.observation_space, self.dist_class, static).make()

    def optimizer(self) -> Any:
        """Returns a new Keras optimizer; by default from `_make_optimizer`.

        It is called once for each network. One network may have several losses: then `loss` returns
        a list, and this a list of as many optimizers.
        """
        return self._make_optimizer(self.config)

    @classmethod
    def network_plans(
        cls,
        observation_space: gym.Space[Any],
        dist_class: ActionDistribution,
        static: Mapping[str, Any],
    ) -> dict[str, NetworkPlan]:
        """Returns a plan for each network, by name.

        By default there is one network, which acts and learns. The first, "model", is the one that
        acts; in `loss` its target network is `self.target_model`. The others are
        `self.networks[name]` there, and their target networks `self.target_networks[name]`; see
        `NetworkHandle`. With several networks `loss` returns a list, one loss for each in this
        order; each is differentiated with respect to the variables of its own network only. A
        network whose variables are not trainable has no loss and no optimizer: calls in `loss`
        update them, as those of BatchNormalization.

        Args:
            observation_space: as the environment has it.
            dist_class: the action distribution class; `dist_class.space` is the action space.
            static: the values of `static_keys`, with a complete `static["model"]`.
        """
        del observation_space, dist_class, static
        return {"model": NetworkPlan()}

    @classmethod
    def learning_noise_size(cls, dist_class: ActionDistribution, static: Mapping[str, Any]) -> int:
        """Returns how many noise values `loss` needs per row; they are in `self.learning_noise`.

        They are standard normal, float32 `[B, k]`, drawn again for each update. If a class
        overrides this method, learning has its own random generator.

        Args:
            dist_class: the action distribution class.
            static: the values of `static_keys`.
        """
        del static
        return int(dist_class.loss_noise_size)

    def action_distribution_fn(
        self,
        model: TracedModel,
        *,
        obs_batch: TensorStructure,
        state_batches: Sequence[tf.Tensor],
        **kwargs: Any,
    ) -> tuple[tf.Tensor, Any, list[tf.Tensor]]:
        """Returns the inputs of the action distribution, its class, and the new recurrent state.

        A class that overrides it also overrides `make_model`.

        Args:
            model: call it on `input_dict` for `(dist_inputs [N, n], states)`.
            obs_batch: tensors, nested as the observation space is.
            state_batches: the recurrent state before the step, `[S, ...]` each.
            **kwargs: `input_dict`, all that the model may read, by column name.

        Returns:
            `dist_inputs` float32 `[N, self.dist_class.num_inputs]`; a class that takes them, such
            as `self.dist_class`; the recurrent state after the step.
        """
        del obs_batch, state_batches
        dist_inputs, states = model(kwargs["input_dict"])
        return dist_inputs, self.dist_class, states

    def action_sampler_fn(
        self,
        model: TracedModel,
        *,
        obs_batch: TensorStructure,
        state_batches: Sequence[tf.Tensor],
        **kwargs: Any,
    ) -> tuple[Any, tf.Tensor | None, tf.Tensor | None, list[tf.Tensor]]:
        """Returns actions, log-probabilities, distribution inputs, and the new recurrent state.

        All randomness comes from `noise`, so that one seed gives the same actions on every runtime.
        A class that overrides it also overrides `make_model`.

        Args:
            model: call it on `input_dict` for `(dist_inputs [N, n], states)`.
            obs_batch: tensors, nested as the observation space is.
            state_batches: the recurrent state before the step, `[S, ...]` each.
            **kwargs: `noise` float32 `[N, k]`, drawn by the exploration, zeros for greedy actions;
                `params` float32 `[p]`, the exploration's parameters, such as epsilon;
                `explorer`, whose `apply(distribution, noise, params)` explores; and `input_dict`,
                all that the model may read, by column name.

        Returns:
            Actions, normalised and nested as the action space is; their log-probabilities `[N]`,
            or None for zeros; `[N, self.dist_class.num_inputs]`, or None for zeros; the recurrent
            state after the step.
        """
        dist_inputs, dist_class, states = self.action_distribution_fn(
            model, obs_batch=obs_batch, state_batches=state_batches, **kwargs
        )
        distribution = make_distribution(self, model, dist_inputs, dist_class)
        actions, logp = kwargs["explorer"].apply(distribution, kwargs["noise"], kwargs["params"])
        return unflatten(self.action_space, actions), logp, dist_inputs, states

    def get_batch_divisibility_req(self) -> int:
        """Returns a number that the rows of each update must be a multiple of; 1 by default."""
        return 1

    def _select_target_updates(self, update_targets: np.ndarray) -> np.ndarray:
        """Returns which of the due target updates `[K]` happen; all by default."""
        return update_targets

    def _adapt(self, result: Mapping[str, Any]) -> None:
        """Adapts coefficients to the result of a training round; no-op by default."""

    @classmethod
    def _overrides(cls, name: str) -> bool:
        """Whether a subclass overrides an override point, such as "loss"."""
        method, base_method = getattr(cls, name), getattr(TFPolicyHooks, name)
        return getattr(method, "__func__", method) is not getattr(
            base_method, "__func__", base_method
        )

    @classmethod
    def _get_distribution(cls, action_space: gym.Space[Any], static: Mapping[str, Any]) -> Any:
        settings = static["model"]
        return ActionDistribution.for_space(action_space, settings["custom_action_dist"], settings)

    @classmethod
    def _get_model_source(
        cls,
        observation_space: gym.Space[Any],
        dist_class: ActionDistribution,
        static: Mapping[str, Any],
    ) -> ModelSource:
        """Returns the source of the networks; a class with another architecture overrides it."""
        with_value = cls.wants_value(static)
        return make_model_source(
            observation_space, dist_class, static["model"], with_value=with_value
        )

    @classmethod
    def wants_value(cls, static: Mapping[str, Any]) -> bool:
        """Whether the model must estimate values, given the static config."""
        del static
        return False

    @classmethod
    def _update_noise_size(cls, source: ModelSource, static: Mapping[str, Any]) -> int:
        """Returns the size k of `self.update_noise`: standard normal, equal for all rows."""
        del source, static
        return 0

    @classmethod
    def _make_optimizer(cls, static: Mapping[str, Any]) -> Any:
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
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        config: Mapping[str, Any],
    ) -> None:
        """Checks the spaces; a subclass that supports fewer raises `UnsupportedSpaceError`."""
        del config
        if not isinstance(observation_space, gym.Space) or not isinstance(action_space, gym.Space):
            raise SpaceError(
                "observation_space and action_space must be Gymnasium spaces, got "
                f"{observation_space!r} and {action_space!r}."
            )

    def _get_current_hyperparameter(self, name: str) -> Any:
        """Returns the current value of a hyperparameter: a tensor in traced code, else a number.

        Raises:
            ConfigError: if this class has no such hyperparameter.
        """
        return self.get_hyperparameter(name) if self._context is None else self.config[name]

    @property
    def cur_lr(self) -> Any:
        """The current learning rate."""
        return self._get_current_hyperparameter("lr")

    @classmethod
    def _make_traced_view(cls, context: TracedContext) -> TFPolicyHooks:
        """Returns an object of this class that has only the attributes shared by its policies."""
        view = object.__new__(cls)
        object.__setattr__(view, "_context", context)
        return view

    def __getattr__(self, name: str) -> Any:
        context = self._context
        if context is not None:
            if name in vars(context):
                return vars(context)[name]
            with contextlib.suppress(LookupError):
                return EXTENSIONS.get_attribute(self, name)
            cls = type(self).__name__
            raise PolicyOwnedError(
                f"traced code of {cls} read self.{name}, which belongs to one policy, while all "
                "policies with the same Program share the trace. Put numbers into the config and "
                f"name them in {cls}.hyperparameters; put settings that change code into "
                f"{cls}.static_keys."
            )
        return super().__getattr__(name)  # type: ignore[misc]
