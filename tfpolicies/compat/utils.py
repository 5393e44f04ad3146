"""Small functions that ported code imports from `ray.rllib.utils`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import tensorflow as tf

from tfpolicies import compat
from tfpolicies.batch.leaves import split_rows
from tfpolicies.errors import ConfigError, UnsupportedMethodError
from tfpolicies.errors import UnsupportedSpaceError as UnsupportedSpaceException
from tfpolicies.models import losses
from tfpolicies.models.distributions.gaussian import LOG_STD_RANGE
from tfpolicies.models.spaces import leaves

FLOAT_MAX = 3.4e38
FLOAT_MIN = -3.4e38
LARGE_INTEGER = 100_000_000
MIN_LOG_NN_OUTPUT, MAX_LOG_NN_OUTPUT = LOG_STD_RANGE
SMALL_NUMBER = 1e-6
unbatch = split_rows

Method = TypeVar("Method", bound=Callable[..., Any])
Policy = TypeVar("Policy", bound=type)


def try_import_tf(error: bool = False) -> tuple[ModuleType, ModuleType, int]:
    """Returns `(tensorflow.compat.v1, tensorflow, 2)`; no setting of TensorFlow is changed.

    Args:
        error: accepted for ported code: TensorFlow is always there.
    """
    del error
    return tf.compat.v1, tf, 2


class _MissingTorchModule:
    """Base class of PyTorch models, whose constructor raises an error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedMethodError(
            f"{type(self).__name__} is a model of PyTorch, and policies are TensorFlow's. Use "
            'the script\'s TensorFlow model, with framework("tf2").'
        )


def try_import_torch(error: bool = False) -> tuple[None, SimpleNamespace]:
    """Returns `(None, nn)`, as where PyTorch is not installed.

    Classes may be derived from `nn.Module`; making an object of one raises a
    `UnsupportedMethodError`.
    """
    del error
    return None, SimpleNamespace(Module=_MissingTorchModule)


def convert_to_numpy(x: Any, reduce_type: bool = True) -> Any:
    """Converts a structure of tensors to arrays; with `reduce_type` 64-bit ones become 32-bit.

    >>> convert_to_numpy({"a": tf.constant([1.0])})
    {'a': array([1.], dtype=float32)}
    """

    def to_array(value: Any) -> Any:
        result = np.asarray(value)
        narrow = {"float64": np.float32, "int64": np.int32}.get(result.dtype.name)
        return result.astype(narrow) if reduce_type and narrow is not None else result

    return tf.nest.map_structure(to_array, x)


def make_tf_callable(session_or_none: Any = None, dynamic_shape: bool = False) -> Any:
    """Returns a decorator that lets functions of tensors be called with arrays.

    The result is an array with a session, as in graph mode, and a tensor otherwise. A method of a
    policy's model (`policy.model.my_method`) always runs with that policy's weights.

    Args:
        session_or_none: the result of `policy.get_session()`.
        dynamic_shape: accepted for ported code.
    """
    del dynamic_shape
    return lambda function: _TensorFunction(function, session_or_none is not None)


@dataclass(frozen=True)
class _TensorFunction:
    function: Callable[..., Any]
    returns_arrays: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tf.nest.map_structure(tf.convert_to_tensor, (args, kwargs))
        result = self.function(*args, **kwargs)
        return tf.nest.map_structure(np.asarray, result) if self.returns_arrays else result


def one_hot(x: Any, space: gym.Space | int | None = None, depth: int = 0) -> Any:
    """Returns actions or observations `[...]` of a space as float32 `[..., F]`.

    Args:
        x: integers of a Discrete space; for a MultiDiscrete one, the last axis has its parts.
        space: the space, for a tensor; or a depth.
        depth: F, for an array.

    Raises:
        UnsupportedSpaceError: for other spaces.

    >>> one_hot([1, 0], gym.spaces.Discrete(2)).numpy().tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    >>> one_hot([2], depth=3).tolist()
    [[0.0, 0.0, 1.0]]
    """
    depth = space if isinstance(space, int) else depth
    if depth:
        return np.eye(depth, dtype=np.float32)[np.asarray(x)]
    x = tf.cast(x, tf.int64)
    if isinstance(space, gym.spaces.Discrete):
        return tf.one_hot(x - space.start, int(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete) and space.nvec.ndim == 1:
        parts = [tf.one_hot(x[..., i] - space.start[i], n) for i, n in enumerate(space.nvec)]
        return tf.concat(parts, axis=-1)
    raise UnsupportedSpaceException(
        f"one_hot takes a Discrete space or a MultiDiscrete one of one axis, got {space!r}."
    )


def softmax(x: Any, axis: int = -1, epsilon: float = SMALL_NUMBER) -> np.ndarray:
    """Returns probabilities of logits `x` along an axis, none below `epsilon`.

    >>> softmax(np.zeros(2)).tolist()
    [0.5, 0.5]
    """
    x = np.asarray(x)
    powers = np.exp(x - x.max(axis, keepdims=True))
    return np.maximum(powers / powers.sum(axis, keepdims=True), epsilon)


def flatten_space(space: gym.Space) -> list[gym.Space]:
    """Returns the leaf spaces of Dicts and Tuples, also of nested ones.

    >>> both = gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Discrete(3)])
    >>> flatten_space(gym.spaces.Dict(a=both))
    [Discrete(2), Discrete(3)]
    """
    return [leaf.space for leaf in leaves(space)]


def batch(list_of_structs: Sequence[Any]) -> Any:
    """Stacks nested observations or actions into one structure of arrays.

    >>> batch([{"a": 1}, {"a": 2}])
    {'a': array([1, 2])}
    """
    first = list_of_structs[0]
    if isinstance(first, dict):
        return {key: batch([struct[key] for struct in list_of_structs]) for key in first}
    if isinstance(first, tuple):
        return tuple(batch(parts) for parts in zip(*list_of_structs, strict=True))
    return np.stack(list_of_structs)


def get_tf_eager_cls_if_necessary(orig_cls: Policy, config: Any) -> Policy:
    """Returns the class itself: a policy class defines whether it runs eagerly."""
    del config
    return orig_cls


def warn_if_infinite_kl_divergence(policy: Any, kl_divergence: Any) -> None:
    """Does nothing: KL divergences of this package's distributions are finite, also with masks."""


def explained_variance(y: tf.Tensor, pred: tf.Tensor) -> tf.Tensor:
    """Returns the fraction of the variance of `y` `[N]` that `pred` `[N]` explains, at least -1."""
    return losses.explained_variance(y, pred, tf.ones_like(y))


def from_config(cls: Any, config: Any = None, **kwargs: Any) -> Any:
    """Returns an object of a class, made with the settings of a dict.

    Args:
        cls: the class, unless the config names one; or the config itself.
        config: keyword arguments, and under "type" the class: itself, or a name in
            `tfpolicies.compat`, with or without RLlib's module. Or only the class; or
            an object of `cls`, which is returned.
        **kwargs: override those of the config.

    Raises:
        ConfigError: if there is no such class.

    >>> from_config({"type": "ConstantSchedule", "value": 2.0})(100)
    2.0
    """
    if config is None and isinstance(cls, dict | str):
        cls, config = None, cls
    if isinstance(cls, type) and isinstance(config, cls):
        return config
    settings = {**(config if isinstance(config, dict) else {"type": config}), **kwargs}
    target = settings.pop("type", None) or cls
    if isinstance(target, str) and (name := target.rpartition(".")[2]) in compat.__all__:
        target = getattr(compat, name)
    if not callable(target):
        raise ConfigError(
            f"`type` must be a class, or the name of one in {compat.__name__}, got {target!r}. "
            "Import the class, and pass it directly."
        )
    return target(**settings)


def make_missing_method_error(owner: Any, method: str) -> UnsupportedMethodError:
    """Returns the error for a method that a subclass must override, given its signature."""
    return UnsupportedMethodError(f"{type(owner).__name__} has no `{method}`; override it.")


def override(parent: type) -> Callable[[Method], Method]:
    """Returns a decorator that checks that a method overrides one of `parent`.

    >>> class Loud(dict):
    ...     @override(dict)
    ...     def shout(self): ...
    Traceback (most recent call last):
        ...
    NameError: dict has no method shout, so it overrides nothing. Check the spelling.
    """

    def check(method: Method) -> Method:
        if method.__name__ not in dir(parent):
            raise NameError(
                f"{parent.__name__} has no method {method.__name__}, so it overrides nothing. "
                "Check the spelling."
            )
        return method

    return check
