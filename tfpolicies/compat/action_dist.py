"""Action distributions in RLlib's form, and how a policy takes them.

A class of them is a `WholeSpace`: `over` gives the core what it asks for. Each batch of that is a
`PortedBatch` around an object of the class, which is made anew for each draw. Noise that the policy
draws becomes the chance of the base classes here, in the order in which they ask for it. There is
as much of it as the usual distribution of the action space takes, so that an autoregressive one,
which samples each part of an action once, is a function of it on all runtimes. What is drawn beyond
that, as for a gamma variate, is seeded by the noise, which ONNX has no operation for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import tensorflow as tf

from tfpolicies.compat.chance import drawing_from
from tfpolicies.errors import NotOfferedError
from tfpolicies.models.distributions import ActionDistribution as SpaceDistribution
from tfpolicies.models.distributions.base import WholeSpace
from tfpolicies.models.distributions.noise import NoiseBlocks
from tfpolicies.models.spaces import Leaf, is_float_box, nest, pick


class ActionDistribution(WholeSpace):
    """A batch of distributions over actions, as RLlib's users write it.

    Register a subclass by `ModelCatalog.register_custom_action_dist`, or give it as
    `model={"custom_action_dist": MyDistribution}`. It is for the whole action space. Actions are
    normalised, as all of a policy's; those of a Dict or Tuple come to `logp` in one row each, and
    `sample` returns them nested.

    Args:
        inputs: `[B, n]`, what the model computed.
        model: that computed them; its layers and methods run with the policy's weights.
    """

    def __init__(self, inputs: Any, model: Any) -> None:
        self.inputs = inputs
        self.model = model

    @classmethod
    def over(
        cls, space: gym.Space, settings: Mapping[str, Any], **arguments: Any
    ) -> PortedDistribution:
        """Returns what a policy takes; see `WholeSpace`."""
        return PortedDistribution(space, (cls,), settings, {**cls._arguments(space), **arguments})

    @staticmethod
    def _arguments(space: gym.Space) -> dict[str, Any]:
        """Returns further arguments of the class for an action space."""
        del space
        return {}

    def sample(self) -> Any:
        """Returns actions, `[B, ...]`, nested as their space is; to be overridden."""
        raise self._lacks("sample(self)")

    def deterministic_sample(self) -> Any:
        """Returns the actions to take where nothing is explored, `[B, ...]`; to be overridden."""
        raise self._lacks("deterministic_sample(self)")

    def sampled_action_logp(self) -> tf.Tensor:
        """Returns the log-probability of the last sample, float32 `[B]`; to be overridden."""
        raise self._lacks("sampled_action_logp(self)")

    def logp(self, x: Any) -> tf.Tensor:
        """Returns the log-probability of actions, float32 `[B]`; to be overridden."""
        raise self._lacks("logp(self, x)")

    def kl(self, other: Any) -> tf.Tensor:
        """Returns KL(self || other) in nats, float32 `[B]`; to be overridden."""
        raise self._lacks("kl(self, other)")

    def entropy(self) -> tf.Tensor:
        """Returns the entropy in nats, float32 `[B]`; to be overridden."""
        raise self._lacks("entropy(self)")

    def multi_kl(self, other: Any) -> tf.Tensor:
        """Returns `kl`; of several choices, that of each."""
        return self.kl(other)

    def multi_entropy(self) -> tf.Tensor:
        """Returns `entropy`; of several choices, that of each."""
        return self.entropy()

    @staticmethod
    def required_model_output_shape(action_space: gym.Space, model_config: Any) -> Any:
        """Returns how many numbers a model must compute per row; to be overridden."""
        raise NotOfferedError(
            f"A distribution for {action_space} must say what its model computes: write a "
            "@staticmethod required_model_output_shape(action_space, model_config) that returns "
            "the number of outputs."
        )

    def _lacks(self, method: str) -> NotOfferedError:
        name, _, _ = method.partition("(")
        return NotOfferedError(
            f"{type(self).__name__} has no `{name}`, which is asked for here. Write `{method}`."
        )


@dataclass(frozen=True)
class PortedDistribution(SpaceDistribution):
    """The distribution of an action space that a class in RLlib's form gives.

    Attributes:
        settings: of the model.
        arguments: further ones of the class.
        noise: float32 `[B, 2]` in a loss, which what is drawn there is seeded by.
    """

    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)
    noise: Any = field(default=None, compare=False)
    loss_noise: ClassVar[int] = 2

    def __call__(self, inputs: tf.Tensor, model: Any = None) -> PortedBatch:
        return PortedBatch(self, inputs, model)

    def drawing_from(self, noise: tf.Tensor | None) -> PortedDistribution:
        return replace(self, noise=noise)

    @cached_property
    def num_inputs(self) -> int:
        """How many numbers a model must compute per row, as the class says."""
        (kind,) = self.kinds
        return int(np.prod(kind.required_model_output_shape(self.space, self.settings)))

    @cached_property
    def noise_blocks(self) -> NoiseBlocks:
        """The noise of the usual distribution of the space."""
        return self.usual.noise_blocks

    @cached_property
    def mask_size(self) -> int:
        """Nothing: what the inputs mean is the class's own."""
        return 0

    @cached_property
    def usual(self) -> SpaceDistribution:
        """The usual distribution of the space."""
        return SpaceDistribution.of(self.space)


class PortedBatch:
    """A batch of distributions as the core and as RLlib's code ask for it.

    Attributes that are not here are looked up in an object of the class.

    Args:
        owner: what the batch is of.
        inputs: `[B, num_inputs]` float32.
        model: that computed them.
    """

    def __init__(self, owner: PortedDistribution, inputs: tf.Tensor, model: Any) -> None:
        self.inputs = inputs
        self._owner = owner
        self._model = model
        self._inner = self._made()
        self._drawn: tuple[Any, Any] = (None, None)  # the last noise, and what it gave

    def _made(self) -> Any:
        (kind,) = self._owner.kinds
        return kind(self.inputs, self._model, **self._owner.arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)

    def sample(self, noise: tf.Tensor | None = None) -> Any:
        """Returns nested actions: those of `noise` `[B, noise_size]`, or with None by chance."""
        if noise is None:
            return self._asked("sample")
        return nest(self._owner.space, self.sample_leaves(noise))

    def deterministic_sample(self) -> Any:
        """Returns what the class says."""
        return self._asked("deterministic_sample")

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
            return self.logp_leaves([pick(actions, leaf.path) for leaf in self._owner.leaves])
        return self._asked("logp", actions)

    def logp_leaves(self, actions: Sequence[tf.Tensor]) -> tf.Tensor:
        """Does what `logp` does, for actions with one tensor per leaf of the space."""
        return self._asked("logp", in_rows(self._owner.leaves, actions))

    def entropy(self) -> tf.Tensor:
        """Returns the entropy in nats, float32 `[B]`."""
        return self._asked("entropy")

    def kl(self, other: Any) -> tf.Tensor:
        """Returns KL(self || other) in nats, float32 `[B]`."""
        return self._asked("kl", other._inner)

    def multi_entropy(self) -> tf.Tensor:
        """Returns the entropy, or that of each choice."""
        return self._asked("multi_entropy")

    def multi_kl(self, other: Any) -> tf.Tensor:
        """Returns KL(self || other), or that of each choice."""
        return self._asked("multi_kl", other._inner)

    @property
    def parts(self) -> list[_Part]:
        """What exploration asks of each leaf."""
        shape = [tf.shape(self.inputs)[0], self._owner.usual.num_inputs]
        usual = self._owner.usual(tf.zeros(shape))
        modes = leaves_of(self._owner.leaves, self.deterministic_sample())
        pairs = zip(getattr(usual, "parts", [usual]), modes, strict=True)
        return [_Part(part.inputs, mode) for part, mode in pairs]

    def _asked(self, name: str, *arguments: Any) -> Any:
        with drawing_from(self._owner.noise):
            return getattr(self._inner, name)(*arguments)

    def _draw(self, noise: tf.Tensor) -> _Drawn:
        if self._drawn[0] is not noise:
            self._drawn = noise, self._drawn_from(noise)
        return self._drawn[1]

    def _drawn_from(self, noise: tf.Tensor) -> _Drawn:
        """Returns samples; where noise is zero, what the class says without exploration."""
        parts, drawn = self._owner.leaves, self._made()
        with drawing_from(noise, self._owner.noise_blocks):
            samples = leaves_of(parts, drawn.sample())
            logp = drawn.sampled_action_logp()
            modes = leaves_of(parts, drawn.deterministic_sample())
            mode_logp = drawn.logp(in_rows(parts, modes))
        is_drawn = tf.reduce_max(tf.abs(noise), axis=-1) > 0.0
        pairs = zip(parts, samples, modes, strict=True)
        return _Drawn(
            [_chosen(leaf, is_drawn, *pair) for leaf, *pair in pairs],
            tf.where(is_drawn, logp, mode_logp),
        )


class _Drawn(NamedTuple):
    """What noise gave."""

    leaves: list[tf.Tensor]
    logp: tf.Tensor  # [B] float32


class _Part(NamedTuple):
    """What exploration asks of the distribution of a leaf."""

    inputs: tf.Tensor  # logits by which nothing is forbidden
    mode: tf.Tensor

    def deterministic_sample(self) -> tf.Tensor:
        """Returns the action to take where nothing is explored."""
        return self.mode


def leaves_of(parts: Sequence[Leaf], actions: Any) -> list[tf.Tensor]:
    """Returns nested actions as one tensor `[B, *shape]` per leaf; integers are int64."""
    found = []
    for leaf in parts:
        kind = tf.float32 if is_float_box(leaf.space) else tf.int64
        found.append(tf.reshape(tf.cast(pick(actions, leaf.path), kind), [-1, *leaf.shape]))
    return found


def in_rows(parts: Sequence[Leaf], actions: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the actions of a nested space as `[B, k]`; those of another one stay as they are.

    They are float32, or int32 if all are Discrete, as RLlib's are.
    """
    if not parts[0].path:
        return actions[0]
    whole = all(isinstance(leaf.space, gym.spaces.Discrete) for leaf in parts)
    kind = tf.int32 if whole else tf.float32
    sizes = [int(np.prod(leaf.shape)) for leaf in parts]
    pairs = zip(actions, sizes, strict=True)
    return tf.concat([tf.reshape(tf.cast(x, kind), [-1, size]) for x, size in pairs], axis=-1)


def _chosen(leaf: Leaf, is_drawn: tf.Tensor, sample: tf.Tensor, mode: tf.Tensor) -> tf.Tensor:
    by_row = tf.reshape(is_drawn, [-1] + [1] * len(leaf.shape)) if leaf.shape else is_drawn
    return tf.cast(tf.where(by_row, sample, mode), leaf.dtype)
