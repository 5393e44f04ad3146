"""RLlib's preprocessors, for code that encodes observations for its own networks.

Policies and algorithms take the environment's observations; policies also accept preprocessed
ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies.batch.leaves import expand_batch_axis
from tfpolicies.errors import SpaceError
from tfpolicies.models.model_config import complete_model_config
from tfpolicies.models.rllib_flattening import flatten_observations
from tfpolicies.models.spaces import batch_leaves, flat_size, leaves


class Preprocessor:
    """Converts observations to arrays; `get_preprocessor` finds the class for a space.

    Args:
        obs_space: the environment's.
        options: `model` settings; validated, but without effect.

    Attributes:
        observation_space: the space of the results of `transform`; if it differs from `obs_space`,
            its attribute `original_space` is that space.
        shape: the shape of one transformed observation.
        size: the number of its elements.

    Raises:
        SpaceError: if policies cannot use `obs_space`.
        ModelSettingError: if an option is not a model setting, or out of its range.
    """

    def __init__(self, obs_space: gym.Space, options: Mapping[str, Any] | None = None) -> None:
        if not isinstance(obs_space, gym.Space):
            raise SpaceError(
                f"obs_space must be a gymnasium.Space, got {obs_space!r:.200}. Give the "
                "environment's."
            )
        complete_model_config(options or {})
        self._leaves = leaves(obs_space)
        self.observation_space = self._make_space(obs_space)
        self.shape: tuple[int, ...] = self.observation_space.shape or ()
        self.size = math.prod(self.shape)

    def transform(self, observation: Any) -> np.ndarray:
        """Returns one observation as `[*shape]`.

        Raises:
            ObservationError: if it does not fit the space.
        """
        return self.transform_batch(expand_batch_axis(observation))[0]

    def transform_batch(self, observations: Any) -> np.ndarray:
        """Returns observations `[N, ...]`, nested like the space, as `[N, *shape]`.

        Raises:
            ObservationError: if they do not fit the space.
        """
        return self._encode(batch_leaves(self._leaves, observations, "observations"))

    def _make_space(self, space: gym.Space) -> gym.Space:
        """Returns the space of the results of `_encode`."""
        return space

    def _encode(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the leaves `[N, ...]` of observations as `[N, *shape]`."""
        return arrays[0]


class NoPreprocessor(Preprocessor):
    """Returns observations unchanged."""


class GenericPixelPreprocessor(NoPreprocessor):
    """Returns Atari frames unchanged; environment wrappers crop, resize and stack them."""


class AtariRamPreprocessor(NoPreprocessor):
    """Returns the memory of an Atari console unchanged."""


class MultiBinaryPreprocessor(Preprocessor):
    """Converts bits to float32."""

    def _make_space(self, space: gym.Space) -> gym.Space:
        return _set_original_space(space, spaces.Box(0.0, 1.0, space.shape or (), np.float32))

    def _encode(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].astype(np.float32)


class _FlatteningPreprocessor(Preprocessor):
    """Concatenates observations to float32 rows: choices are one-hot, pixels from 0 to 255."""

    def _make_space(self, space: gym.Space) -> gym.Space:
        return make_preprocessed_space(space)

    def _encode(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return flatten_observations(self._leaves, arrays)


class OneHotPreprocessor(_FlatteningPreprocessor):
    """One-hot encodes Discrete and MultiDiscrete observations.

    >>> OneHotPreprocessor(gym.spaces.Discrete(3)).transform(1)
    array([0., 1., 0.], dtype=float32)
    """


class TupleFlatteningPreprocessor(_FlatteningPreprocessor):
    """Concatenates the parts of a Tuple, also of nested ones, in one row."""


class DictFlatteningPreprocessor(_FlatteningPreprocessor):
    """Concatenates the parts of a Dict, in its own order, in one row."""


_CLASSES_BY_SPACE: dict[type[gym.Space], type[Preprocessor]] = {
    spaces.Discrete: OneHotPreprocessor,
    spaces.MultiDiscrete: OneHotPreprocessor,
    spaces.Tuple: TupleFlatteningPreprocessor,
    spaces.Dict: DictFlatteningPreprocessor,
}
_ATARI_BY_SHAPE = {(210, 160, 3): GenericPixelPreprocessor, (128,): AtariRamPreprocessor}


def get_preprocessor(space: gym.Space, include_multi_binary: bool = False) -> type[Preprocessor]:
    """Returns the class of preprocessors of a space.

    Args:
        space: the environment's.
        include_multi_binary: whether a MultiBinary becomes a Box of floats.
    """
    classes = _CLASSES_BY_SPACE | (
        {spaces.MultiBinary: MultiBinaryPreprocessor} if include_multi_binary else {}
    )
    matches = (
        preprocessor_class
        for space_class, preprocessor_class in classes.items()
        if isinstance(space, space_class)
    )
    return next(matches, _ATARI_BY_SHAPE.get(getattr(space, "shape", None) or (), NoPreprocessor))


def make_flat_space(space: gym.Space) -> gym.spaces.Box:
    return gym.spaces.Box(-np.inf, np.inf, (sum(map(flat_size, leaves(space))),), np.float32)


def make_preprocessed_space(space: gym.Space) -> gym.Space:
    """Returns the space that a `TFModelV2` gets: a Box itself, otherwise a flat one.

    The flat one has the original in its attribute `original_space`.

    >>> make_preprocessed_space(spaces.Discrete(3)).shape
    (3,)
    """
    return (
        space
        if isinstance(space, spaces.Box)
        else _set_original_space(space, make_flat_space(space))
    )


def _set_original_space(space: gym.Space, encoded_space: Any) -> gym.Space:
    encoded_space.original_space = space
    return encoded_space
