"""NumPy random generators as JSON: a restored generator continues bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import CheckpointError
from tfpolicies.storage.json_values import decode_value, encode_value

_MAX_POOL_SIZE = 1024  # words of a SeedSequence, which has 4 by default
_BIT_GENERATOR_NAMES = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_BIT_GENERATORS: dict[str, type[Any]] = {
    name: getattr(np.random, name) for name in _BIT_GENERATOR_NAMES
}


def encode_generator(generator: np.random.Generator) -> dict[str, Any]:
    """Returns the whole state of `generator` as JSON values, leaving it unchanged.

    The seed sequence is included, so that `spawn` also gives the same children.

    >>> rng = np.random.default_rng(7)
    >>> copy = decode_generator(encode_generator(rng))
    >>> bool(np.all(copy.normal(size=9) == rng.normal(size=9)))
    True
    """
    bit_generator = generator.bit_generator
    name = type(bit_generator).__name__
    if _BIT_GENERATORS.get(name) is not type(bit_generator):
        raise CheckpointError(
            f"A generator on {name} cannot be stored; use one on {sorted(_BIT_GENERATORS)}."
        )
    seeds = bit_generator.seed_seq
    seed_state = seeds.state if type(seeds) is np.random.SeedSequence else None
    record: dict[str, Any] = encode_value(
        {"state": bit_generator.state, "seed_sequence": seed_state}
    )
    return record


def decode_generator(record: Json) -> np.random.Generator:
    value = decode_value(record)
    try:
        state, seed_state = value["state"], value["seed_sequence"]
        if seed_state is not None and seed_state["pool_size"] > _MAX_POOL_SIZE:
            raise ValueError(f"pool_size={seed_state['pool_size']}, at most {_MAX_POOL_SIZE}")
        seeds = None if seed_state is None else np.random.SeedSequence(**seed_state)
        bit_generator = _BIT_GENERATORS[state["bit_generator"]](seeds)
        bit_generator.state = state
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(
            f"The record of a random generator is malformed: {error!r}."
        ) from error
    return np.random.Generator(bit_generator)
