"""Preprocessors under RLlib's names, for code that encodes by hand what it gives its own networks.

Policies and algorithms take observations as the environment gives them; policies also take what
preprocessors make of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies.batch.leaves import with_batch_axis
from tfpolicies.errors import SpaceError
from tfpolicies.models.preprocessed import preprocess
from tfpolicies.models.settings import model_settings
from tfpolicies.models.spaces import batch_leaves, flat_size, leaves


class Preprocessor:
    """Makes arrays of observations; `get_preprocessor` finds the class for a space.

    Args:
        obs_space: the environment's.
        options: `model` settings; checked, and of no effect.

    Attributes:
        observation_space: of what `transform` returns; unless that is the space itself, its
            attribute `original_space` is.
        shape: of one observation in that space.
        size: how many numbers it has.

    Raises:
        SpaceError: if `obs_space` is no space that policies can use.
        ModelSettingError: if an option is no model setting, or out of its range.
    """

    def __init__(self, obs_space: gym.Space, options: Mapping[str, Any] | None = None) -> None:
        if not isinstance(obs_space, gym.Space):
            raise SpaceError(
                f"obs_space must be a gymnasium.Space, got {obs_space!r:.200}. Give that of the "
                "environment."
            )
        model_settings(options or {})
        self._leaves = leaves(obs_space)
        self.observation_space = self._told(obs_space)
        self.shape: tuple[int, ...] = self.observation_space.shape or ()
        self.size = math.prod(self.shape)

    def transform(self, observation: Any) -> np.ndarray:
        """Returns one observation as `[*shape]`.

        Raises:
            ObservationError: if it does not fit the space.
        """
        return self.transform_batch(with_batch_axis(observation))[0]

    def transform_batch(self, observations: Any) -> np.ndarray:
        """Returns observations `[N, ...]`, nested as the space is, as `[N, *shape]`.

        Raises:
            ObservationError: if they do not fit the space.
        """
        return self._encoded(batch_leaves(self._leaves, observations, "observations"))

    def _told(self, space: gym.Space) -> gym.Space:
        """Returns the space of what `_encoded` returns."""
        return space

    def _encoded(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the leaves `[N, ...]` of observations as `[N, *shape]`."""
        return arrays[0]


class NoPreprocessor(Preprocessor):
    """Leaves observations as they are."""


class GenericPixelPreprocessor(NoPreprocessor):
    """Leaves Atari frames as they are; environment wrappers crop, resize and stack them."""


class AtariRamPreprocessor(NoPreprocessor):
    """Leaves the memory of an Atari console as it is."""


class MultiBinaryPreprocessor(Preprocessor):
    """Makes bits float32."""

    def _told(self, space: gym.Space) -> gym.Space:
        return _made_of(space, spaces.Box(0.0, 1.0, space.shape or (), np.float32))

    def _encoded(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].astype(np.float32)


class _FlatteningPreprocessor(Preprocessor):
    """Makes rows of float32: choices one-hot, and pixels from 0 to 255."""

    def _told(self, space: gym.Space) -> gym.Space:
        return preprocessed_space(space)

    def _encoded(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return preprocess(self._leaves, arrays)


class OneHotPreprocessor(_FlatteningPreprocessor):
    """Makes Discrete and MultiDiscrete observations one-hot.

    >>> OneHotPreprocessor(gym.spaces.Discrete(3)).transform(1)
    array([0., 1., 0.], dtype=float32)
    """


class TupleFlatteningPreprocessor(_FlatteningPreprocessor):
    """Puts the parts of a Tuple, also of nested ones, in one row."""


class DictFlatteningPreprocessor(_FlatteningPreprocessor):
    """Puts the parts of a Dict, in its own order, in one row."""


_KINDS: dict[type[gym.Space], type[Preprocessor]] = {
    spaces.Discrete: OneHotPreprocessor,
    spaces.MultiDiscrete: OneHotPreprocessor,
    spaces.Tuple: TupleFlatteningPreprocessor,
    spaces.Dict: DictFlatteningPreprocessor,
}
_ATARI = {(210, 160, 3): GenericPixelPreprocessor, (128,): AtariRamPreprocessor}


def get_preprocessor(space: gym.Space, include_multi_binary: bool = False) -> type[Preprocessor]:
    """Returns the class of preprocessors of a space.

    Args:
        space: the environment's.
        include_multi_binary: whether a MultiBinary becomes a Box of floats.
    """
    kinds = _KINDS | ({spaces.MultiBinary: MultiBinaryPreprocessor} if include_multi_binary else {})
    found = (made for kind, made in kinds.items() if isinstance(space, kind))
    return next(found, _ATARI.get(getattr(space, "shape", None) or (), NoPreprocessor))


def flat_space(space: gym.Space) -> gym.spaces.Box:
    """Returns the space of observations that are encoded as rows of numbers."""
    return gym.spaces.Box(-np.inf, np.inf, (sum(map(flat_size, leaves(space))),), np.float32)


def preprocessed_space(space: gym.Space) -> gym.Space:
    """Returns the space that a `TFModelV2` is told: a Box itself, else a flat one.

    The flat one has the original in its attribute `original_space`.

    >>> preprocessed_space(spaces.Discrete(3)).shape
    (3,)
    """
    return space if isinstance(space, spaces.Box) else _made_of(space, flat_space(space))


def _made_of(space: gym.Space, told: Any) -> gym.Space:
    told.original_space = space
    return told
