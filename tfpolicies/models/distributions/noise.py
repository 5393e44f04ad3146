"""The kinds of noise that distributions transform, drawn by a NumPy generator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

NoiseBlocks = tuple[tuple[str, int], ...]
"""Kind and number of columns of each block of a noise array, from left to right."""


_TINY = np.finfo(np.float32).tiny


class NoiseKind(NamedTuple):
    """One kind of noise: random numbers of a generator, and their transformation to noise.

    The second step does not use the generator, so the numbers of many generators can share it.
    """

    draw: Callable[[np.random.Generator, np.ndarray], Any]
    """Overwrites a contiguous float32 array with random numbers."""
    transform: Callable[[np.ndarray], Any]
    """Transforms the numbers of an array to noise, in place."""

    def fill(self, rng: np.random.Generator, out: np.ndarray) -> np.ndarray:
        """Overwrites a contiguous float32 array with new noise; returns it."""
        self.draw(rng, out)
        self.transform(out)
        return out


class NoiseBuffer:
    """The noise of several calls, drawn together at a fraction of the cost of separate draws.

    The numbers are the same ones in the same order. Until all rows are taken, or `rewind_generator`
    is called, the state of the generator is that after the last row.

    Args:
        kind: the kind of all noise.
        rng: the generator.
        rows: the number of rows to draw.
        size: the number of values per row.
    """

    def __init__(self, kind: NoiseKind, rng: np.random.Generator, rows: int, size: int) -> None:
        self._kind, self._rng, self._initial_state = kind, rng, rng.bit_generator.state
        self._num_taken = 0
        self._noise = kind.fill(rng, np.empty((rows, size), np.float32))

    def take(self, rows: int) -> np.ndarray | None:
        """Returns the noise of the next call, `[rows, size]`; None if too few rows are left."""
        start = self._num_taken
        if start + rows > len(self._noise):
            return None
        self._num_taken = start + rows
        return self._noise[start : self._num_taken]

    def rewind_generator(self) -> None:
        """Rewinds the generator to the rows taken so far; do not call `take` afterwards."""
        if self._num_taken < len(self._noise):
            self._rng.bit_generator.state = self._initial_state
            self._kind.draw(self._rng, self._noise[: self._num_taken])


def _draw_exponential(rng: np.random.Generator, out: np.ndarray) -> None:
    rng.standard_exponential(dtype=np.float32, out=out)


def _transform_to_gumbel(out: np.ndarray) -> None:
    # -log of a standard exponential variable is a standard Gumbel variable.
    np.maximum(out, _TINY, out=out)
    np.log(out, out=out)
    np.negative(out, out=out)


def _draw_normal(rng: np.random.Generator, out: np.ndarray) -> None:
    rng.standard_normal(dtype=np.float32, out=out)


def _draw_logistic(rng: np.random.Generator, out: np.ndarray) -> None:
    out[...] = rng.logistic(size=out.shape)


def _skip_transform(out: np.ndarray) -> None:
    """Does nothing: the numbers are the noise."""


NOISE_KINDS = {
    "gumbel": NoiseKind(_draw_exponential, _transform_to_gumbel),
    "normal": NoiseKind(_draw_normal, _skip_transform),
    "logistic": NoiseKind(_draw_logistic, _skip_transform),
}


def merge_blocks(blocks: Sequence[tuple[str, int]]) -> NoiseBlocks:
    """Removes empty blocks and merges adjacent blocks of one kind.

    >>> merge_blocks([("gumbel", 3), ("normal", 0), ("gumbel", 2), ("normal", 1)])
    (('gumbel', 5), ('normal', 1))
    """
    present = [block for block in blocks if block[1]]
    return tuple(
        (kind, sum(size for _, size in group)) for kind, group in groupby(present, lambda b: b[0])
    )


def draw_noise(blocks: NoiseBlocks, rng: np.random.Generator, batch_size: int) -> np.ndarray:
    """Draws noise block by block, float32 `[B, sum of the sizes]`.

    With one block, B rows are the noise of B calls for one row each.
    """
    parts = [
        NOISE_KINDS[kind].fill(rng, np.empty((batch_size, size), np.float32))
        for kind, size in blocks
    ]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.zeros((batch_size, 0), np.float32), *parts], axis=1)
