"""What policies of one kind share: the code that subclasses override, most of it traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import keras
import tensorflow as tf

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.errors import ConfigError, PolicyOwnedError, SpaceError
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.losses import clip_gradients
from tfpolicies.models.network import ModelSource, model_source
from tfpolicies.policy.policy import Policy


class PolicyKind(Policy):
    """The override points of `TFPolicy`: what a class says about all of its policies.

    Code that is traced runs on a *view* of the class, see `traced_view`: an object without a state.
    """

    config_class: type[AlgorithmConfig] = AlgorithmConfig
    state_aliases: ClassVar[dict[str, str]] = {}
    """Keys of a state, and the hyper-parameters that stand under them instead of their names."""
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
        "jit_compile",
    )

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
    def has_loss(cls) -> bool:
        """Whether the class says how it learns."""
        return cls.loss is not PolicyKind.loss

    @classmethod
    def adds_outputs(cls) -> bool:
        """Whether the class overrides `extra_action_out_fn`."""
        return cls.extra_action_out_fn is not PolicyKind.extra_action_out_fn

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
    def traced_view(cls, **shared: Any) -> PolicyKind:
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
