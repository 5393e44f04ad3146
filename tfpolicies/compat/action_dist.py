"""Action distributions in RLlib's form, and the adapter through which policies use them.

A subclass of `ActionDistribution` is a `WholeSpaceDistribution`: `over` gives the core the
interface that it needs. A batch is a `RLlibDistributionBatch` around an object of the class, which
is re-created for each draw. The policy's noise replaces the random numbers that the base classes
here would draw, in the order in which they request them. The noise has the size that the default
distribution of the action space needs. So an autoregressive distribution, which samples each part
of an action once, is a function of the noise on all runtimes. Further random numbers, for example
for a gamma variate, are seeded by the noise; ONNX has no operation for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import tensorflow as tf

from tfpolicies.compat.distribution_noise import use_noise
from tfpolicies.errors import UnsupportedMethodError
from tfpolicies.models.distributions import ActionDistribution as SpaceDistribution
from tfpolicies.models.distributions.base import WholeSpaceDistribution
from tfpolicies.models.distributions.noise import NoiseBlocks
from tfpolicies.models.spaces import Leaf, get_at_path, is_float_box, unflatten


class ActionDistribution(WholeSpaceDistribution):
    """A batch of distributions over actions, in RLlib's form.

    Register a subclass by `ModelCatalog.register_custom_action_dist`, or pass it as
    `model={"custom_action_dist": MyDistribution}`. It covers the whole action space. Actions are
    normalised, as in all policies; `logp` gets those of a Dict or Tuple in one row each, and
    `sample` returns them nested.

    Args:
        inputs: the model's outputs, `[B, n]`.
        model: the model; its layers and methods run with the policy's weights.
    """

    def __init__(self, inputs: Any, model: Any) -> None:
        self.inputs = inputs
        self.model = model

    @classmethod
    def for_space(
        cls, space: gym.Space, settings: Mapping[str, Any], **arguments: Any
    ) -> RLlibDistribution:
        """Returns the distribution that a policy uses; see `WholeSpaceDistribution`."""
        return RLlibDistribution(
            space, (cls,), settings, {**cls._get_arguments(space), **arguments}
        )

    @staticmethod
    def _get_arguments(space: gym.Space) -> dict[str, Any]:
        """Returns additional arguments of the class for an action space."""
        del space
        return {}

    def sample(self) -> Any:
        """Returns actions, `[B, ...]`, nested as their space is; to be overridden."""
        raise self._make_missing_method_error("sample(self)")

    def deterministic_sample(self) -> Any:
        """Returns the greedy actions, `[B, ...]`; to be overridden."""
        raise self._make_missing_method_error("deterministic_sample(self)")

    def sampled_action_logp(self) -> tf.Tensor:
        """Returns the log-probability of the last sample, float32 `[B]`; to be overridden."""
        raise self._make_missing_method_error("sampled_action_logp(self)")

    def logp(self, x: Any) -> tf.Tensor:
        """Returns the log-probability of actions, float32 `[B]`; to be overridden."""
        raise self._make_missing_method_error("logp(self, x)")

    def kl(self, other: Any) -> tf.Tensor:
        """Returns KL(self || other) in nats, float32 `[B]`; to be overridden."""
        raise self._make_missing_method_error("kl(self, other)")

    def entropy(self) -> tf.Tensor:
        """Returns the entropy in nats, float32 `[B]`; to be overridden."""
        raise self._make_missing_method_error("entropy(self)")

    def multi_kl(self, other: Any) -> tf.Tensor:
        """Returns `kl`; for several choices, the value of each."""
        return self.kl(other)

    def multi_entropy(self) -> tf.Tensor:
        """Returns `entropy`; for several choices, the value of each."""
        return self.entropy()

    @staticmethod
    def required_model_output_shape(action_space: gym.Space, model_config: Any) -> Any:
        """Returns how many numbers a model must compute per row; to be overridden."""
        raise UnsupportedMethodError(
            f"A distribution for {action_space} must define its number of inputs: write a "
            "@staticmethod required_model_output_shape(action_space, model_config) that returns "
            "the number of outputs."
        )

    def _make_missing_method_error(self, method: str) -> UnsupportedMethodError:
        name, _, _ = method.partition("(")
        return UnsupportedMethodError(
            f"{type(self).__name__} has no `{name}`, which is required here. Write `{method}`."
        )


@dataclass(frozen=True)
class RLlibDistribution(SpaceDistribution):
    """The distribution of an action space that a class in RLlib's form defines.

    Attributes:
        settings: the `model` config.
        arguments: additional arguments of the class.
        noise: float32 `[B, 2]` in a loss; seeds the random numbers drawn there.
    """

    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)
    noise: Any = field(default=None, compare=False)
    loss_noise_size: ClassVar[int] = 2

    def __call__(self, inputs: tf.Tensor, model: Any = None) -> RLlibDistributionBatch:
        return RLlibDistributionBatch(self, inputs, model)

    def with_loss_noise(self, noise: tf.Tensor | None) -> RLlibDistribution:
        return replace(self, noise=noise)

    @cached_property
    def num_inputs(self) -> int:
        """The number of model outputs per row, as the class defines it."""
        (kind,) = self.leaf_classes
        return int(np.prod(kind.required_model_output_shape(self.space, self.settings)))

    @cached_property
    def noise_blocks(self) -> NoiseBlocks:
        """The noise of the default distribution of the space."""
        return self.default_distribution.noise_blocks

    @cached_property
    def mask_size(self) -> int:
        """Always 0: only the class knows the meaning of its inputs."""
        return 0

    @cached_property
    def default_distribution(self) -> SpaceDistribution:
        return SpaceDistribution.for_space(self.space)


class RLlibDistributionBatch:
    """A batch of distributions, with the methods of the core and of RLlib.

    Other attributes are looked up in an object of the class.

    Args:
        distribution: the distribution.
        inputs: `[B, num_inputs]` float32.
        model: the model that computed them.
    """

    def __init__(self, distribution: RLlibDistribution, inputs: tf.Tensor, model: Any) -> None:
        self.inputs = inputs
        self._distribution = distribution
        self._model = model
        self._inner = self._make_inner()
        self._last_draw: tuple[Any, Any] = (None, None)  # the last noise and its actions

    def _make_inner(self) -> Any:
        (kind,) = self._distribution.leaf_classes
        return kind(self.inputs, self._model, **self._distribution.arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)

    def sample(self, noise: tf.Tensor | None = None) -> Any:
        """Returns nested actions for `noise` `[B, noise_size]`, or random ones if it is None."""
        if noise is None:
            return self._call_inner("sample")
        return unflatten(self._distribution.space, self.sample_leaves(noise))

    def deterministic_sample(self) -> Any:
        return self._call_inner("deterministic_sample")

    def sampled_action_logp(self) -> tf.Tensor:
        """Returns the log-probability of the last `sample()`, float32 `[B]`."""
        return self._inner.sampled_action_logp()

    def sample_leaves(self, noise: tf.Tensor) -> list[tf.Tensor]:
        """Turns noise `[B, noise_size]` into one tensor per leaf; see `Distribution`."""
        return self._draw(noise).leaves

    def sampled_logp(self, noise: tf.Tensor) -> tf.Tensor:
        """Returns the log-probability of `sample(noise)`, float32 `[B]`."""
        return self._draw(noise).logp

    def logp(self, actions: Any) -> tf.Tensor:
        """Returns the log-probability of actions, nested or in rows, float32 `[B]`."""
        if isinstance(actions, Mapping | tuple | list):
            return self.logp_leaves(
                [get_at_path(actions, leaf.path) for leaf in self._distribution.leaves]
            )
        return self._call_inner("logp", actions)

    def logp_leaves(self, actions: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the log-probability of actions with one tensor per leaf, float32 `[B]`."""
        return self._call_inner("logp", concat_leaves(self._distribution.leaves, actions))

    def entropy(self) -> tf.Tensor:
        """Returns the entropy in nats, float32 `[B]`."""
        return self._call_inner("entropy")

    def kl(self, other: Any) -> tf.Tensor:
        """Returns KL(self || other) in nats, float32 `[B]`."""
        return self._call_inner("kl", other._inner)

    def multi_entropy(self) -> tf.Tensor:
        """Returns the entropy, or the entropy of each choice."""
        return self._call_inner("multi_entropy")

    def multi_kl(self, other: Any) -> tf.Tensor:
        """Returns KL(self || other), or the divergence of each choice."""
        return self._call_inner("multi_kl", other._inner)

    @property
    def parts(self) -> list[_LeafDistribution]:
        """The distribution of each leaf, for exploration strategies."""
        shape = [tf.shape(self.inputs)[0], self._distribution.default_distribution.num_inputs]
        default_batch = self._distribution.default_distribution(tf.zeros(shape))
        modes = split_leaves(self._distribution.leaves, self.deterministic_sample())
        pairs = zip(getattr(default_batch, "parts", [default_batch]), modes, strict=True)
        return [_LeafDistribution(part.inputs, mode) for part, mode in pairs]

    def _call_inner(self, name: str, *arguments: Any) -> Any:
        with use_noise(self._distribution.noise):
            return getattr(self._inner, name)(*arguments)

    def _draw(self, noise: tf.Tensor) -> _Draw:
        if self._last_draw[0] is not noise:
            self._last_draw = noise, self._compute_draw(noise)
        return self._last_draw[1]

    def _compute_draw(self, noise: tf.Tensor) -> _Draw:
        """Returns samples; rows whose noise is zero get the greedy actions."""
        space_leaves, inner = self._distribution.leaves, self._make_inner()
        with use_noise(noise, self._distribution.noise_blocks):
            samples = split_leaves(space_leaves, inner.sample())
            logp = inner.sampled_action_logp()
            modes = split_leaves(space_leaves, inner.deterministic_sample())
            mode_logp = inner.logp(concat_leaves(space_leaves, modes))
        is_drawn = tf.reduce_max(tf.abs(noise), axis=-1) > 0.0
        pairs = zip(space_leaves, samples, modes, strict=True)
        return _Draw(
            [_select_sample(leaf, is_drawn, *pair) for leaf, *pair in pairs],
            tf.where(is_drawn, logp, mode_logp),
        )


class _Draw(NamedTuple):
    """Actions computed from noise, with their log-probabilities."""

    leaves: list[tf.Tensor]
    logp: tf.Tensor  # [B] float32


class _LeafDistribution(NamedTuple):
    """The attributes of a leaf's distribution that exploration strategies use."""

    inputs: tf.Tensor  # logits of a distribution without forbidden actions
    mode: tf.Tensor

    def deterministic_sample(self) -> tf.Tensor:
        return self.mode


def split_leaves(space_leaves: Sequence[Leaf], actions: Any) -> list[tf.Tensor]:
    """Returns nested actions as one tensor `[B, *shape]` per leaf; integers are int64."""
    result = []
    for leaf in space_leaves:
        dtype = tf.float32 if is_float_box(leaf.space) else tf.int64
        result.append(
            tf.reshape(tf.cast(get_at_path(actions, leaf.path), dtype), [-1, *leaf.shape])
        )
    return result


def concat_leaves(space_leaves: Sequence[Leaf], actions: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the actions of a nested space as `[B, k]`; other actions are returned unchanged.

    They are float32, or int32 if all are Discrete, as in RLlib.
    """
    if not space_leaves[0].path:
        return actions[0]
    all_discrete = all(isinstance(leaf.space, gym.spaces.Discrete) for leaf in space_leaves)
    dtype = tf.int32 if all_discrete else tf.float32
    sizes = [int(np.prod(leaf.shape)) for leaf in space_leaves]
    pairs = zip(actions, sizes, strict=True)
    return tf.concat([tf.reshape(tf.cast(x, dtype), [-1, size]) for x, size in pairs], axis=-1)


def _select_sample(
    leaf: Leaf, is_drawn: tf.Tensor, sample: tf.Tensor, mode: tf.Tensor
) -> tf.Tensor:
    by_row = tf.reshape(is_drawn, [-1] + [1] * len(leaf.shape)) if leaf.shape else is_drawn
    return tf.cast(tf.where(by_row, sample, mode), leaf.dtype)
