"""Small functions that ported code imports from `ray.rllib.utils`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import tensorflow as tf

from tfpolicies.errors import UnsupportedSpaceError as UnsupportedSpaceException
from tfpolicies.models import losses

__all__ = ["UnsupportedSpaceException", "explained_variance", "override", "try_import_tf"]

Method = TypeVar("Method", bound=Callable[..., Any])


def try_import_tf(error: bool = False) -> tuple[ModuleType, ModuleType, int]:
    """Returns `(tensorflow.compat.v1, tensorflow, 2)`; no setting of TensorFlow is changed.

    Args:
        error: accepted for ported code: TensorFlow is always there.
    """
    del error
    return tf.compat.v1, tf, 2


def explained_variance(y: tf.Tensor, pred: tf.Tensor) -> tf.Tensor:
    """Returns the share of the variance of `y` `[N]` that `pred` `[N]` explains, at least -1."""
    return losses.explained_variance(y, pred, tf.ones_like(y))


def override(parent: type) -> Callable[[Method], Method]:
    """Returns a decorator that checks that a method overrides one of `parent`.

    >>> class Loud(dict):
    ...     @override(dict)
    ...     def shout(self): ...
    Traceback (most recent call last):
        ...
    NameError: shout is no method of dict, so it overrides nothing. Check the spelling.
    """

    def check(method: Method) -> Method:
        if method.__name__ not in dir(parent):
            raise NameError(
                f"{method.__name__} is no method of {parent.__name__}, so it overrides nothing. "
                "Check the spelling."
            )
        return method

    return check
