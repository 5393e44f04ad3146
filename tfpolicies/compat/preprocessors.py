"""Observations as models see them, for code that encodes by hand what it gives its own networks."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.batch.leaves import with_batch_axis
from tfpolicies.models.preprocessing import encode, encoded_shape
from tfpolicies.models.spaces import batch_leaves, leaves


class Preprocessor:
    """Encodes observations of a space as rows of numbers.

    Policies and algorithms take observations as the environment gives them; this is for networks
    of one's own, such as a central critic.

    Args:
        obs_space: the environment's.
        options: accepted for ported code.

    Attributes:
        observation_space: of what `transform` returns.
        shape: `(F,)`, of an encoded observation.
        size: F.

    >>> get_preprocessor(gym.spaces.Discrete(3))(gym.spaces.Discrete(3)).transform(1)
    array([0., 1., 0.], dtype=float32)
    """

    def __init__(self, obs_space: gym.Space, options: Any = None) -> None:
        del options
        self._leaves = leaves(obs_space)
        self.observation_space = flat_space(obs_space)
        self.shape = self.observation_space.shape
        self.size = self.shape[0]

    def transform(self, observation: Any) -> np.ndarray:
        """Returns one observation as float32 `[F]`.

        Raises:
            ObservationError: if it does not fit the space.
        """
        return self.transform_batch(with_batch_axis(observation))[0]

    def transform_batch(self, observations: Any) -> np.ndarray:
        """Returns observations `[N, ...]`, nested as the space is, as float32 `[N, F]`.

        Raises:
            ObservationError: if they do not fit the space.
        """
        rows = batch_leaves(self._leaves, observations, "observations")
        pairs = zip(self._leaves, rows, strict=True)
        parts = [np.asarray(encode(leaf, x)).reshape(len(x), -1) for leaf, x in pairs]
        return np.concatenate(parts, axis=1)


def flat_space(space: gym.Space) -> gym.spaces.Box:
    """Returns the space of observations that are encoded as rows of numbers."""
    width = sum(math.prod(encoded_shape(leaf)) for leaf in leaves(space))
    return gym.spaces.Box(-np.inf, np.inf, (width,), np.float32)


def get_preprocessor(space: gym.Space) -> type[Preprocessor]:
    """Returns the class of preprocessors of a space, which is the same for all."""
    del space
    return Preprocessor
