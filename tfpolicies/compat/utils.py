"""Small functions that ported code imports from `ray.rllib.utils`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfpolicies.errors import UnsupportedSpaceError as UnsupportedSpaceException
from tfpolicies.models import losses

__all__ = [
    "FLOAT_MAX",
    "FLOAT_MIN",
    "SMALL_NUMBER",
    "UnsupportedSpaceException",
    "convert_to_numpy",
    "explained_variance",
    "make_tf_callable",
    "override",
    "try_import_tf",
    "try_import_torch",
    "warn_if_infinite_kl_divergence",
]

FLOAT_MAX = 3.4e38
FLOAT_MIN = -3.4e38
SMALL_NUMBER = 1e-6

Method = TypeVar("Method", bound=Callable[..., Any])


def try_import_tf(error: bool = False) -> tuple[ModuleType, ModuleType, int]:
    """Returns `(tensorflow.compat.v1, tensorflow, 2)`; no setting of TensorFlow is changed.

    Args:
        error: accepted for ported code: TensorFlow is always there.
    """
    del error
    return tf.compat.v1, tf, 2


def try_import_torch(error: bool = False) -> tuple[None, None]:
    """Returns `(None, None)`, as where PyTorch is not installed."""
    del error
    return None, None


def convert_to_numpy(x: Any, reduce_type: bool = True) -> Any:
    """Returns a structure of tensors as one of arrays; with `reduce_type` 64-bit ones as 32-bit.

    >>> convert_to_numpy({"a": tf.constant([1.0])})
    {'a': array([1.], dtype=float32)}
    """

    def array(value: Any) -> Any:
        found = np.asarray(value)
        narrow = {"float64": np.float32, "int64": np.int32}.get(found.dtype.name)
        return found.astype(narrow) if reduce_type and narrow is not None else found

    return tf.nest.map_structure(array, x)


def make_tf_callable(session_or_none: Any = None, dynamic_shape: bool = False) -> Any:
    """Returns a decorator for functions of tensors, which may then be called with arrays.

    The result is an array where there is a session, as in graph mode, and a tensor elsewhere. Of a
    policy's model, give a method itself (`policy.model.my_method`): it runs with that policy's
    weights, whenever it is called.

    Args:
        session_or_none: what `policy.get_session()` gives.
        dynamic_shape: accepted for ported code.
    """
    del dynamic_shape
    return lambda function: _TensorFunction(function, session_or_none is not None)


@dataclass(frozen=True)
class _TensorFunction:
    function: Callable[..., Any]
    gives_arrays: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tf.nest.map_structure(tf.convert_to_tensor, (args, kwargs))
        found = self.function(*args, **kwargs)
        return tf.nest.map_structure(np.asarray, found) if self.gives_arrays else found


def warn_if_infinite_kl_divergence(policy: Any, kl_divergence: Any) -> None:
    """Does nothing: KL divergences of the distributions here are finite, with masks too."""


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
