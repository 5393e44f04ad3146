"""Base classes of action distributions, and the registry of their names."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, TypeGuard

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.base.allowlist import allow_in_checkpoint
from tfpolicies.base.name_registry import NameRegistry
from tfpolicies.errors import ConfigError, suggest_similar_names
from tfpolicies.models.distributions.noise import NOISE_KINDS
from tfpolicies.models.model_config import Settings

MASKED_LOGIT = float(np.finfo(np.float32).min)
"""The logit of a forbidden action: finite, so that no NaN can arise."""

MIN_LOG_PROB = -1e9
"""The smallest log-probability: its Exp is 0, and its sums over cells and rows stay finite."""


@allow_in_checkpoint("custom_action_dist")
class Distribution(abc.ABC):
    """A batch of distributions over the actions of one leaf space.

    A subclass defines the sizes for a space (`num_inputs`, `noise_kind`, `noise_size`,
    `mask_size`) and implements the mathematics. Zero noise must give the mode.

    Args:
        inputs: `[B, num_inputs]` float32, as the model computed them.
        space: the action space.

    Attributes:
        noise_kind: the name of the noise's distribution, one of `NOISE_KINDS`.
    """

    noise_kind: ClassVar[str] = "normal"

    def __init__(self, inputs: tf.Tensor, space: spaces.Space) -> None:
        self.inputs = inputs
        self.space: Any = space

    @staticmethod
    @abc.abstractmethod
    def num_inputs(space: spaces.Space) -> int:
        """Returns the number of outputs per row that a model must compute."""

    @staticmethod
    @abc.abstractmethod
    def noise_size(space: spaces.Space) -> int:
        """Returns the number of noise values per row."""

    @staticmethod
    def mask_size(space: spaces.Space) -> int:
        """Returns the number of inputs that are logits which a mask can forbid: all or none."""
        return 0

    @abc.abstractmethod
    def sample(self, noise: tf.Tensor) -> Any:
        """Transforms noise `[B, noise_size]` to actions `[B, *shape]`; zero noise to the mode."""

    @abc.abstractmethod
    def logp(self, actions: tf.Tensor) -> tf.Tensor:
        """Returns the log-probability (density) of `actions`, float32 `[B]`."""

    @abc.abstractmethod
    def entropy(self) -> tf.Tensor:
        """Returns the entropy in nats, float32 `[B]`."""

    @abc.abstractmethod
    def kl(self, other: Any) -> tf.Tensor:
        """Returns KL(self || other) in nats, float32 `[B]`; `other` is of the same class."""

    def deterministic_sample(self) -> Any:
        """Returns the mode, `[B, *shape]`."""
        return self.sample(tf.zeros([tf.shape(self.inputs)[0], self.noise_size(self.space)]))

    def sampled_logp(self, noise: tf.Tensor) -> tf.Tensor:
        """Returns the log-probability of `sample(noise)`, float32 `[B]`.

        It is also differentiable in the inputs through the sample, and exact where the
        action has lost digits.
        """
        return self.logp(self.sample(noise))

    def valid_mask(self) -> tf.Tensor:
        """Returns which maskable logits are not masked, bool `[B, mask_size]`."""
        return self.inputs[:, : self.mask_size(self.space)] > MASKED_LOGIT / 2

    def sample_leaves(self, noise: tf.Tensor) -> list[tf.Tensor]:
        """Computes `sample` as one tensor per leaf of the space."""
        return [self.sample(noise)]

    def logp_leaves(self, actions: Sequence[tf.Tensor]) -> tf.Tensor:
        """Computes `logp` of actions with one tensor per leaf of the space."""
        (action,) = actions
        return self.logp(action)


@allow_in_checkpoint("custom_action_dist")
class WholeSpaceDistribution(abc.ABC):
    """A class of distributions over all leaves of an action space together.

    The parts of an action may depend on each other, as those of an autoregressive policy do.
    """

    @classmethod
    @abc.abstractmethod
    def for_space(cls, space: spaces.Space, settings: Settings, **arguments: object) -> Any:
        """Returns the `ActionDistribution` of a space.

        Args:
            space: the action space.
            settings: the `model` settings.
            **arguments: further arguments of the class.
        """


BOX_DISTRIBUTIONS = NameRegistry("A distribution", ConfigError)
"""Distributions for Boxes of floats, or for whole action spaces, by name."""


def register_box_distribution(
    name: str, dist_class: type[Distribution | WholeSpaceDistribution]
) -> None:
    """Registers a distribution under a name, for `model={"custom_action_dist": name}`.

    Args:
        name: a non-empty string.
        dist_class: a `Distribution` for Boxes of floats, or a `WholeSpaceDistribution`.

    Raises:
        ConfigError: if the name is not a string or the class is something else.
    """
    BOX_DISTRIBUTIONS.add(
        name,
        dist_class
        if is_whole_space_distribution(dist_class)
        else check_distribution_class(dist_class),
    )


def is_whole_space_distribution(
    value: str | type | None,
) -> TypeGuard[type[WholeSpaceDistribution]]:
    """Returns whether `value` is a class of distributions over a whole action space."""
    return isinstance(value, type) and issubclass(value, WholeSpaceDistribution)


def is_distribution(value: str | type | None) -> TypeGuard[type[Distribution]]:
    """Returns whether `value` is a class of distributions over one leaf."""
    return isinstance(value, type) and issubclass(value, Distribution)


def check_distribution_class(dist_class: str | type | None) -> type[Distribution]:
    if not is_distribution(dist_class):
        hint = (
            suggest_similar_names(dist_class, BOX_DISTRIBUTIONS)
            if isinstance(dist_class, str)
            else ""
        )
        raise ConfigError(
            f"model['custom_action_dist'] must be None, one of {sorted(BOX_DISTRIBUTIONS)} or a "
            f"subclass of tfpolicies.models.distributions.Distribution; got {dist_class!r}.{hint}"
        )
    if dist_class.noise_kind not in NOISE_KINDS:
        raise ConfigError(
            f"{dist_class.__name__}.noise_kind must be one of {sorted(NOISE_KINDS)}; got "
            f"{dist_class.noise_kind!r}."
        )
    return dist_class


def softplus(x: tf.Tensor) -> tf.Tensor:
    """Returns log(1 + exp(x)) for any x, without overflow; its gradient is also exact at 0."""
    return 0.5 * (x + tf.abs(x)) + tf.math.log(1.0 + tf.exp(-tf.abs(x)))
