"""The distribution of an action space, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.base.warn_once import warn_once
from tfpolicies.errors import SpaceError, UnsupportedSpaceError
from tfpolicies.models.distributions import noise
from tfpolicies.models.distributions.base import (
    BOX_DISTRIBUTIONS,
    MASKED_LOGIT,
    Distribution,
    check_distribution_class,
    is_whole_space_distribution,
)
from tfpolicies.models.distributions.categorical import Bernoulli, Categorical, MultiCategorical
from tfpolicies.models.distributions.gaussian import DiagGaussian
from tfpolicies.models.model_config import Settings
from tfpolicies.models.spaces import (
    Leaf,
    action_leaves,
    choices_per_cell,
    get_at_path,
    is_float_box,
    unflatten,
)


class ProductDistribution:
    """One distribution per leaf of a nested space, all independent; has `Distribution`'s methods.

    Actions are nested as the space is. Inputs, noise and masks of the leaves are concatenated in
    the order of the leaves; log-probabilities, entropies and divergences are sums over them.

    Args:
        inputs: `[B, num_inputs]` float32, as the model computed them.
        space: the nested action space.
        leaves: its leaves.
        leaf_classes: the distribution class of each leaf.

    Attributes:
        parts: the distribution of each leaf.
    """

    def __init__(
        self,
        inputs: tf.Tensor,
        space: spaces.Space,
        leaves: Sequence[Leaf],
        leaf_classes: Sequence[type[Distribution]],
    ) -> None:
        self.inputs = inputs
        self.space = space
        self.leaves = tuple(leaves)
        pairs = list(zip(leaf_classes, self.leaves, strict=True))
        self._noise_sizes = [leaf_class.noise_size(leaf.space) for leaf_class, leaf in pairs]
        rows = split_columns(
            inputs, [leaf_class.num_inputs(leaf.space) for leaf_class, leaf in pairs]
        )
        self.parts = [
            leaf_class(columns, leaf.space)
            for (leaf_class, leaf), columns in zip(pairs, rows, strict=True)
        ]

    def sample(self, noise: tf.Tensor) -> Any:
        """Transforms noise `[B, noise_size]` to nested actions; zero noise gives the mode."""
        return unflatten(self.space, self.sample_leaves(noise))

    def deterministic_sample(self) -> Any:
        """Returns the mode, nested as the space is."""
        return unflatten(self.space, [part.deterministic_sample() for part in self.parts])

    def sample_leaves(self, noise: tf.Tensor) -> list[tf.Tensor]:
        """Computes `sample` as one tensor per leaf of the space."""
        noises = split_columns(noise, self._noise_sizes)
        return [part.sample(columns) for part, columns in zip(self.parts, noises, strict=True)]

    def logp(self, actions: TensorStructure) -> tf.Tensor:
        """Returns the log-probability (density) of nested `actions`, float32 `[B]`."""
        return self.logp_leaves([get_at_path(actions, leaf.path) for leaf in self.leaves])

    def logp_leaves(self, actions: Sequence[tf.Tensor]) -> tf.Tensor:
        """Computes `logp` of actions with one tensor per leaf of the space."""
        pairs = zip(self.parts, actions, strict=True)
        return tf.add_n([part.logp(action) for part, action in pairs])

    def sampled_logp(self, noise: tf.Tensor) -> tf.Tensor:
        """Returns the log-probability of `sample(noise)`, float32 `[B]`."""
        noises = split_columns(noise, self._noise_sizes)
        pairs = zip(self.parts, noises, strict=True)
        return tf.add_n([part.sampled_logp(columns) for part, columns in pairs])

    def entropy(self) -> tf.Tensor:
        """Returns the entropy in nats, float32 `[B]`."""
        return tf.add_n([part.entropy() for part in self.parts])

    def kl(self, other: ProductDistribution) -> tf.Tensor:
        """Returns KL(self || other) in nats, float32 `[B]`."""
        pairs = zip(self.parts, other.parts, strict=True)
        return tf.add_n([part.kl(other_part) for part, other_part in pairs])

    def valid_mask(self) -> tf.Tensor:
        """Returns which maskable logits are not masked, bool `[B, mask_size]`."""
        return tf.concat([part.valid_mask() for part in self.parts], axis=-1)


def split_columns(columns: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Splits `[B, sum(sizes)]` into one `[B, size]` for each size."""
    return tf.split(columns, list(sizes), axis=-1) if len(sizes) > 1 else [columns]


MAX_BOX_LOGITS = 10_000


@dataclass(frozen=True)
class ActionDistribution:
    """The distribution of one action space: `dist_class(inputs)` builds those of a batch.

    Attributes:
        space: the action space; a Dict or Tuple gives a `ProductDistribution`.
        leaf_classes: the distribution class of each leaf; a single class if it is for the whole
            space.
        loss_noise_size: the number of noise values per row that a loss uses.

    >>> space = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1)])
    >>> dist_class = ActionDistribution.for_space(space)
    >>> dist_class.num_inputs, dist_class.noise_blocks, dist_class.mask_size
    (5, (('gumbel', 3), ('normal', 1)), 3)
    """

    space: spaces.Space
    leaf_classes: tuple[Any, ...]
    loss_noise_size: ClassVar[int] = 0

    @classmethod
    def for_space(
        cls, space: spaces.Space, custom: str | type | None = None, settings: Settings | None = None
    ) -> ActionDistribution:
        """Returns the distribution of `space`.

        Args:
            space: the action space. Discrete gets Categorical, MultiDiscrete and a Box of integers
                MultiCategorical, MultiBinary Bernoulli, a Box of floats DiagGaussian.
            custom: the distribution of each Box of floats in `space` instead of DiagGaussian:
                a name of `BOX_DISTRIBUTIONS` or a subclass of `Distribution`. Other leaves ignore
                it; a warning is logged if there are only such. A `WholeSpaceDistribution` class, or
                its name, is used for all of `space`.
            settings: the `model` settings, for a `WholeSpaceDistribution` class.

        Raises:
            UnsupportedSpaceError: if a leaf has no distribution, or is a Box of too many integers.
            ConfigError: if `custom` is something else.
        """
        custom = BOX_DISTRIBUTIONS.find(custom) or custom
        if is_whole_space_distribution(custom):
            return custom.for_space(space, settings or {})
        box_class = DiagGaussian if custom is None else check_distribution_class(custom)
        leaves = action_leaves(space)
        leaf_classes = tuple(_choose_class(leaf, box_class) for leaf in leaves)
        if not leaf_classes:
            raise UnsupportedSpaceError(f"The action space {space} is empty: there is no action.")
        if custom is not None and not any(is_float_box(leaf.space) for leaf in leaves):
            warn_once(
                "model['custom_action_dist'] is not used: %s is for Boxes of floats, and the "
                "action space %s has none. A `WholeSpaceDistribution` class can be used for any "
                "space.",
                *(box_class.__name__, str(space)),
            )
        return cls(space, leaf_classes)

    def __call__(self, inputs: tf.Tensor, model: keras.Model | None = None) -> Any:
        """Builds the distributions of a batch; for nested spaces a `ProductDistribution`.

        Args:
            inputs: `[B, num_inputs]` float32.
            model: the model that computed them, with the policy's weights; for
                `WholeSpaceDistribution`.
        """
        if self._is_nested:
            return ProductDistribution(inputs, self.space, self.leaves, self.leaf_classes)
        return self.leaf_classes[0](inputs, self.space)

    def with_loss_noise(self, noise: tf.Tensor | None) -> ActionDistribution:
        """Returns the distribution that a loss uses.

        Args:
            noise: float32 `[B, loss_noise_size]`, standard normal, for entropies and divergences
                that
                are estimated from samples. This class has closed forms and ignores it.
        """
        return self

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The action space's leaves, in the order of inputs, noise and masks."""
        return action_leaves(self.space)

    @cached_property
    def num_inputs(self) -> int:
        """The number of inputs of the distribution of a row."""
        return sum(self._input_sizes)

    @property
    def num_outputs(self) -> int:
        """The number of outputs per row that a model must compute."""
        return self.num_inputs

    def compute_inputs(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns inputs `[B, num_inputs]`, given a model's outputs after masking.

        Args:
            outputs: `[B, num_outputs]` float32; here they are the inputs.
        """
        return outputs

    @cached_property
    def noise_blocks(self) -> noise.NoiseBlocks:
        """Kind and number of columns of each block of the noise, from left to right.

        Adjacent blocks of one kind are merged; leaves without noise have no block.
        """
        return noise.merge_blocks(
            [
                (kind.noise_kind, kind.noise_size(leaf.space))
                for kind, leaf in self._classes_and_leaves
            ]
        )

    @cached_property
    def noise_size(self) -> int:
        """The number of noise values per row."""
        return sum(size for _, size in self.noise_blocks)

    @cached_property
    def mask_size(self) -> int:
        """The number of logits per row that a mask can forbid; a Box of floats has none."""
        return sum(self._mask_sizes)

    def draw_noise(self, rng: np.random.Generator, batch_size: int) -> np.ndarray:
        """Draws the noise for `batch_size` rows, block by block, float32 `[B, noise_size]`."""
        return noise.draw_noise(self.noise_blocks, rng, batch_size)

    def apply_mask(self, inputs: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """Replaces the logits of forbidden actions by `MASKED_LOGIT`.

        If everything in a row is forbidden, all actions are equally likely. A forbidden bit of a
        MultiBinary stays 0.

        Args:
            inputs: `[B, num_inputs]` float32.
            mask: `[B, mask_size]` of any dtype, 0 or False where an action is forbidden.

        Raises:
            SpaceError: if the mask has another width.
        """
        if mask.shape[-1] not in (None, self.mask_size):
            raise SpaceError(
                f"An action mask for {self.space} must be [B, {self.mask_size}], one number per "
                f"maskable action; got the shape {tuple(mask.shape)}."
            )
        allowed = tf.cast(mask, tf.bool)
        if self.mask_size == self.num_inputs:
            return tf.where(allowed, inputs, MASKED_LOGIT)
        parts = zip(
            split_columns(inputs, self._input_sizes),
            split_columns(allowed, self._mask_sizes),
            self._mask_sizes,
            strict=True,
        )
        return tf.concat(
            [tf.where(ok, part, MASKED_LOGIT) if size else part for part, ok, size in parts],
            axis=-1,
        )

    @property
    def _is_nested(self) -> bool:
        return isinstance(self.space, spaces.Dict | spaces.Tuple)

    @property
    def _classes_and_leaves(self) -> Sequence[tuple[type[Distribution], Leaf]]:
        return list(zip(self.leaf_classes, self.leaves, strict=True))

    @cached_property
    def _input_sizes(self) -> list[int]:
        return [kind.num_inputs(leaf.space) for kind, leaf in self._classes_and_leaves]

    @cached_property
    def _mask_sizes(self) -> list[int]:
        return [kind.mask_size(leaf.space) for kind, leaf in self._classes_and_leaves]


def _choose_class(leaf: Leaf, box_class: type[Distribution]) -> type[Distribution]:
    if isinstance(leaf.space, spaces.Discrete):
        return Categorical
    if isinstance(leaf.space, spaces.MultiDiscrete):
        return MultiCategorical
    if isinstance(leaf.space, spaces.MultiBinary):
        return Bernoulli
    if is_float_box(leaf.space):
        return box_class
    logits = sum(choices_per_cell(leaf.space))
    if logits > MAX_BOX_LOGITS:
        location = f" at {'/'.join(leaf.path)!r}" if leaf.path else ""
        raise UnsupportedSpaceError(
            f"The Box of integers {leaf.space}{location} has {logits} possible values, counted "
            f"over all cells, and each needs a logit; at most {MAX_BOX_LOGITS} are supported. "
            "Narrow its bounds, or let the environment accept a Box of floats and round, for "
            "example with a gymnasium.ActionWrapper."
        )
    return MultiCategorical
