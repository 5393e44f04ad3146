"""Nested observations in batches that callbacks can also read and modify as RLlib's flat rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.compat.preprocessors import DictFlatteningPreprocessor
from tfpolicies.errors import ObservationError
from tfpolicies.models.rllib_flattening import decode_flat_observations
from tfpolicies.models.spaces import leaves, unflatten


class DictWithFlatRows(dict[str, Any]):
    """Observations `[T, ...]` of a Dict; keys that are not strings index their flat rows `[T, F]`.

    Values written into rows must be preprocessed: choices are one-hot.

    Args:
        space: the Dict.
        obs: observations, nested like the space.

    >>> space = gym.spaces.Dict(at=gym.spaces.Discrete(2), speed=gym.spaces.Box(-9, 9, (1,)))
    >>> columns = {"at": np.array([1, 0]), "speed": np.array([[3.0], [4.0]])}
    >>> obs = DictWithFlatRows(space, columns)
    >>> obs[:, :2] = [[1, 0], [0, 1]]
    >>> obs["at"], obs[0]
    (array([0, 1]), array([1., 0., 3.], dtype=float32))
    """

    def __init__(self, space: gym.spaces.Dict, obs: Mapping[str, Any]) -> None:
        super().__init__(obs)
        self._space = space

    @property
    def shape(self) -> tuple[int, ...]:
        return self._rows().shape

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self._rows()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, str):
            super().__setitem__(key, value)
            return
        rows = self._rows()
        rows[key] = value
        self.update(unflatten_rows(self._space, rows))

    def _rows(self) -> np.ndarray:
        return DictFlatteningPreprocessor(self._space).transform_batch(dict(self))


def unflatten_rows(space: gym.Space, rows: np.ndarray) -> Any:
    """Returns flat rows `[T, F]`, nested like the space.

    Raises:
        ObservationError: if they have another width, or a choice is not one-hot.
    """
    shape = list(np.shape(rows))
    error = ObservationError(f"`obs` has the shape {shape}, which does not fit {space}.")
    return unflatten(space, decode_flat_observations(leaves(space), rows, error))


@contextlib.contextmanager
def flat_observation_view(batch: SampleBatch, space: gym.Space) -> Iterator[None]:
    """Gives a batch observations of both forms within its block; afterwards they are nested."""
    if not isinstance(space, gym.spaces.Dict) or not all(isinstance(key, str) for key in space):
        yield
        return
    originals = {x: batch[x] for x in ("obs", "new_obs") if isinstance(batch.get(x), Mapping)}
    for name, obs in originals.items():
        dict.__setitem__(batch, name, DictWithFlatRows(space, obs))
    yield
    for name in originals:
        obs_after = batch[name]
        batch[name] = (
            dict(obs_after) if isinstance(obs_after, Mapping) else unflatten_rows(space, obs_after)
        )
