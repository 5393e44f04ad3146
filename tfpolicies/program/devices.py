"""Devices for the functions of a Program."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.system.gpu_memory import warn_without_gpu

CPU = "/cpu:0"


def choose_learner_device(num_gpus: float, present: int | None = None) -> str:
    """Returns `"/gpu:0"` if a GPU is configured and present, else the CPU."""
    if not num_gpus:
        return CPU
    if present is None:
        present = len(tf.config.list_logical_devices("GPU"))  # without hidden ones
    if not present:
        warn_without_gpu(num_gpus)
        return CPU
    return "/gpu:0"


@functools.cache
def get_device_context() -> Callable[[str], Any]:
    """Returns the context manager of `placed`, cached for callers that run in every step."""
    return tf.device if len(tf.config.list_logical_devices()) > 1 else contextlib.nullcontext


def device_scope(device: str) -> Any:
    """Returns a context in which variables and operations are placed on a device.

    TensorFlow uses a GPU for everything that is not pinned, and XLA refuses code whose variables
    are on another device. If there is only one device, the context does nothing, to save time.
    """
    return get_device_context()(device)


@functools.cache
def get_zero_copy_factory() -> Callable[[np.ndarray], tf.Tensor]:
    """Returns a function that makes a CPU tensor, which may share the memory of its array.

    It takes a fraction of the time of `tf.constant`, which copies twice. The array must not change
    while the tensor is in use.
    """
    tensor_class: Any = type(tf.constant(0))
    return functools.partial(tensor_class, device=None, dtype=None)


_NOT_GATHERED_ON_GPU = (tf.uint8, tf.int8, tf.uint16, tf.int16)
"""The dtypes that TensorFlow does not gather on a GPU."""


def gather_rows(column: tf.Tensor, rows: tf.Tensor, device: str) -> tf.Tensor:
    """Returns rows `[mb, ...]` of a column `[N, ...]`, for learning on a device.

    TensorFlow does not gather bytes on a GPU: for each minibatch it would copy the whole column to
    the CPU, and the gathered rows back. So bytes are gathered as 32-bit words.
    """
    words, remainder = divmod(column.dtype.size * math.prod(column.shape[1:]), 4)
    if device == CPU or column.dtype not in _NOT_GATHERED_ON_GPU or remainder:
        return tf.gather(column, rows)
    packed = tf.reshape(column, [-1, words, 4 // column.dtype.size])
    unpacked = tf.bitcast(tf.gather(tf.bitcast(packed, tf.int32), rows), column.dtype)
    return tf.reshape(unpacked, [-1, *column.shape[1:]])


def pin_to_device(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Returns a function that runs on a device, with its input tensors there."""

    @functools.wraps(function)
    def run(*inputs: tf.Tensor) -> Any:
        with device_scope(device):
            return function(*copy_inputs(inputs))

    def copy_inputs(inputs: tf.Tensor) -> Any:
        # Inputs of a graph have no device, so loops over them could run on another one.
        if tf.executing_eagerly() or get_device_context() is contextlib.nullcontext:
            return inputs
        return tf.nest.map_structure(tf.identity, inputs)

    return run
