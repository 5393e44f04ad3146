"""The kinds of noise that distributions transform, as a NumPy generator draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

NoiseBlocks = tuple[tuple[str, int], ...]
"""Kind and number of columns of each block of a noise array, from left to right."""


_TINY = np.finfo(np.float32).tiny


class NoiseKind(NamedTuple):
    """One kind of noise: numbers as a generator gives them, and what is made of them.

    The second step sees numbers only, so that it may be taken for many generators' at once.
    """

    draw: Callable[[np.random.Generator, np.ndarray], Any]
    """Overwrites a contiguous float32 array with new numbers."""
    finish: Callable[[np.ndarray], Any]
    """Turns the numbers of an array into noise, in place."""


def _draw_exponential(rng: np.random.Generator, out: np.ndarray) -> None:
    rng.standard_exponential(dtype=np.float32, out=out)


def _finish_gumbel(out: np.ndarray) -> None:
    # -log of a standard exponential variable is a standard Gumbel variable.
    np.maximum(out, _TINY, out=out)
    np.log(out, out=out)
    np.negative(out, out=out)


def _draw_normal(rng: np.random.Generator, out: np.ndarray) -> None:
    rng.standard_normal(dtype=np.float32, out=out)


def _draw_logistic(rng: np.random.Generator, out: np.ndarray) -> None:
    out[...] = rng.logistic(size=out.shape)


def _finish_nothing(out: np.ndarray) -> None:
    del out


NOISE_KINDS = {
    "gumbel": NoiseKind(_draw_exponential, _finish_gumbel),
    "normal": NoiseKind(_draw_normal, _finish_nothing),
    "logistic": NoiseKind(_draw_logistic, _finish_nothing),
}


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
    parts = [_draw_block(kind, rng, (batch_size, size)) for kind, size in blocks]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.zeros((batch_size, 0), np.float32), *parts], axis=1)


def _draw_block(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    noise = np.empty(shape, np.float32)
    draw_numbers, finish = NOISE_KINDS[kind]
    draw_numbers(rng, noise)
    finish(noise)
    return noise
