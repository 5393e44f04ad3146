"""Warns about user code whose values TensorFlow freezes when it traces the code once."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import numbers
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.errors import show_value

logger = logging.getLogger(__name__)

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


@contextlib.contextmanager
def warn_of_frozen_draws(name: str, *code: Callable[..., Any]) -> Iterator[None]:
    """Warns once if code that is traced in the block draws random numbers in Python.

    They become constants of the trace. It checks NumPy's global generator, and the generators that
    a function of `code` refers to by name.

    Args:
        name: of the code, for the message.
        *code: functions that run in the block.
    """
    if tf.executing_eagerly():
        yield
        return
    generators = {"np.random": np.random.mtrand._rand}
    for function in code:
        generators |= _find_generators(function)
    before = {label: _get_rng_state(generator) for label, generator in generators.items()}
    yield
    for label, generator in generators.items():
        if _get_rng_state(generator) != before[label]:
            _warn_of_draws(name, label)


def warn_of_frozen_numbers(name: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Warns once for each attribute of `self` that traced code sets to a number, not a tensor."""
    if tf.executing_eagerly():
        return
    for attribute, value in after.items():
        is_number = isinstance(value, numbers.Number | np.ndarray) and not isinstance(value, bool)
        if is_number and before.get(attribute) is not value:
            _warn_of_number(name, attribute, show_value(value))


@functools.cache
def _warn_of_draws(name: str, generator: str) -> None:
    logger.warning(
        "%s draws from %s, but it is traced once for all updates and calls, so it gets the same "
        "numbers each time. Draw by TensorFlow (tf.random.stateless_normal with a seed that "
        "changes), or in a loss let the class's `learning_noise_size` return how many numbers you "
        "need, and read self.learning_noise.",
        name,
        generator,
    )


@functools.cache
def _warn_of_number(name: str, attribute: str, value: str) -> None:
    logger.warning(
        "%s sets self.%s to the number %s, but it is traced once for all updates, so the number "
        "never changes, and the policy itself does not get it. Compute it by TensorFlow and return "
        "it from stats_fn, or put it into the config and name it in `hyperparameters`.",
        name,
        attribute,
        value,
    )


def _find_generators(code: Callable[..., Any]) -> dict[str, Any]:
    """Returns the random generators among the globals and outer variables of a function."""
    try:
        variables = inspect.getclosurevars(code)
    except (TypeError, ValueError):  # not a Python function
        return {}
    values = {**variables.globals, **variables.nonlocals}
    return {name: value for name, value in values.items() if isinstance(value, _GENERATORS)}


def _get_rng_state(generator: np.random.Generator | np.random.RandomState | random.Random) -> str:
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    state = generator.get_state(legacy=False)
    return repr((state["state"]["pos"], state["state"]["key"].tobytes(), state["has_gauss"]))
