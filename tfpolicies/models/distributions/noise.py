"""The kinds of noise that distributions transform, as a NumPy generator draws them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

NoiseBlocks = tuple[tuple[str, int], ...]
"""Kind and number of columns of each block of a noise array, from left to right."""


_TINY = np.finfo(np.float32).tiny


def _gumbel(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    # -log of a standard exponential variable is a standard Gumbel variable.
    noise = rng.standard_exponential(shape, np.float32)
    np.maximum(noise, _TINY, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _logistic(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.logistic(size=shape).astype(np.float32)


NOISE_KINDS = {"gumbel": _gumbel, "normal": _normal, "logistic": _logistic}


def merge(blocks: Sequence[tuple[str, int]]) -> NoiseBlocks:
    """Leaves empty blocks out and joins neighbours of one kind.

    >>> merge([("gumbel", 3), ("normal", 0), ("gumbel", 2), ("normal", 1)])
    (('gumbel', 5), ('normal', 1))
    """
    present = [block for block in blocks if block[1]]
    return tuple(
        (kind, sum(size for _, size in group)) for kind, group in groupby(present, lambda b: b[0])
    )


def draw(blocks: NoiseBlocks, rng: np.random.Generator, batch_size: int) -> np.ndarray:
    """Draws noise block by block, float32 `[B, sum of the sizes]`.

    With one block, B rows are the noise of B calls for one row each.
    """
    if len(blocks) == 1:
        ((kind, size),) = blocks
        return NOISE_KINDS[kind](rng, (batch_size, size))
    parts = [NOISE_KINDS[kind](rng, (batch_size, size)) for kind, size in blocks]
    return np.concatenate([np.zeros((batch_size, 0), np.float32), *parts], axis=1)
