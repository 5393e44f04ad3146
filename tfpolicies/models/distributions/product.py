"""Independent distributions of the leaves of a Dict or Tuple space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from gymnasium import spaces

from tfpolicies.models.distributions.base import Distribution
from tfpolicies.models.spaces import Leaves, nest, pick
from tfpolicies.types import TensorStructure


class Product:
    """One distribution per leaf of a nested space, all independent; has `Distribution`'s methods.

    Actions are nested as the space is. Inputs, noise and masks of the leaves follow one another in
    the order of the leaves; log-probabilities, entropies and divergences are sums over them.

    Args:
        inputs: `[B, num_inputs]` float32, as the model computed them.
        space: the nested action space.
        leaves: its leaves.
        kinds: the distribution class of each leaf.

    Attributes:
        parts: the distribution of each leaf.
    """

    def __init__(
        self,
        inputs: tf.Tensor,
        space: spaces.Space,
        leaves: Leaves,
        kinds: Sequence[type[Distribution]],
    ) -> None:
        self.inputs = inputs
        self.space = space
        self.leaves = tuple(leaves)
        pairs = list(zip(kinds, self.leaves, strict=True))
        self._noise_sizes = [kind.noise_size(leaf.space) for kind, leaf in pairs]
        rows = split_columns(inputs, [kind.num_inputs(leaf.space) for kind, leaf in pairs])
        self.parts = [
            kind(columns, leaf.space) for (kind, leaf), columns in zip(pairs, rows, strict=True)
        ]

    def sample(self, noise: tf.Tensor) -> Any:
        """Turns noise `[B, noise_size]` into nested actions; zero noise into the mode."""
        return nest(self.space, self.sample_leaves(noise))

    def deterministic_sample(self) -> Any:
        """Returns the mode, nested as the space is."""
        return nest(self.space, [part.deterministic_sample() for part in self.parts])

    def sample_leaves(self, noise: tf.Tensor) -> list[tf.Tensor]:
        """Does what `sample` does, with one tensor per leaf of the space."""
        noises = split_columns(noise, self._noise_sizes)
        return [part.sample(columns) for part, columns in zip(self.parts, noises, strict=True)]

    def logp(self, actions: TensorStructure) -> tf.Tensor:
        """Returns the log-probability (density) of nested `actions`, float32 `[B]`."""
        return self.logp_leaves([pick(actions, leaf.path) for leaf in self.leaves])

    def logp_leaves(self, actions: Sequence[tf.Tensor]) -> tf.Tensor:
        """Does what `logp` does, for actions with one tensor per leaf of the space."""
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

    def kl(self, other: Product) -> tf.Tensor:
        """Returns KL(self || other) in nats, float32 `[B]`."""
        pairs = zip(self.parts, other.parts, strict=True)
        return tf.add_n([part.kl(its) for part, its in pairs])

    def valid_mask(self) -> tf.Tensor:
        """Returns which maskable logits are not masked, bool `[B, mask_size]`."""
        return tf.concat([part.valid_mask() for part in self.parts], axis=-1)


def split_columns(columns: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Cuts `[B, sum(sizes)]` into one `[B, size]` for each size."""
    return tf.split(columns, list(sizes), axis=-1) if len(sizes) > 1 else [columns]
