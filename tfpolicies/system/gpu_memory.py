"""Limits the GPU memory of TensorFlow, which by default takes all of it at its start."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

GROWTH_VARIABLE = "TF_FORCE_GPU_ALLOW_GROWTH"
"""Environment variable; if "true", TensorFlow allocates GPU memory as needed."""

logger = logging.getLogger("tfpolicies")

_process_role = {"is_own": False, "only_samples": False}


def claim_process(*, only_samples: bool = False) -> None:
    """Marks this process as one of the package, so that its TensorFlow may be limited.

    Args:
        only_samples: whether policies in it do not learn, so that no GPU is expected.
    """
    _process_role.update(is_own=True, only_samples=only_samples)


@functools.cache
def limit_gpus(*, uses_gpu: bool) -> None:
    """Keeps TensorFlow from taking all memory of all GPUs. Call it before TensorFlow starts.

    In processes of this package GPUs are hidden, or memory grows as needed. In a user's process
    nothing is changed, and a log line says how to do the same.

    Args:
        uses_gpu: whether something is to run on a GPU.
    """
    import tensorflow as tf

    visible = tf.config.get_visible_devices("GPU")
    if not visible or (uses_gpu and all(map(_is_limited, visible))):
        return
    if not _process_role["is_own"]:
        if not all(map(_is_limited, visible)):
            logger.warning(_SHARED_GPU_WARNING if uses_gpu else _UNUSED_GPU_WARNING)
        return
    try:
        if uses_gpu:
            for gpu in visible:
                tf.config.experimental.set_memory_growth(gpu, True)
        else:
            tf.config.set_visible_devices([], "GPU")
    except RuntimeError:  # TensorFlow has started and cannot be changed any more
        logger.warning(_SHARED_GPU_WARNING if uses_gpu else _UNUSED_GPU_WARNING)


def _is_limited(gpu: tf.config.PhysicalDevice) -> bool:
    import tensorflow as tf

    if os.environ.get(GROWTH_VARIABLE, "").lower() == "true":
        return True
    grows = tf.config.experimental.get_memory_growth(gpu)
    return bool(grows or tf.config.get_logical_device_configuration(gpu))


_GROWTH_ADVICE = f"set the environment variable {GROWTH_VARIABLE}=true before TensorFlow starts"
_SHARED_GPU_WARNING = (
    f"TensorFlow takes all memory of the GPU. To leave some for other processes, {_GROWTH_ADVICE}."
)
_UNUSED_GPU_WARNING = (
    "Nothing learns on the GPU (num_gpus=0), but TensorFlow takes all of its memory. Call "
    "tf.config.set_visible_devices([], 'GPU') before the first policy is made, or "
    f"{_GROWTH_ADVICE}; to learn on it, config.resources(num_gpus=1)."
)


@functools.cache
def warn_without_gpu(num_gpus: float) -> None:
    """Warns once that a GPU is configured for learning and there is none."""
    if not _process_role["only_samples"]:
        logger.warning("num_gpus=%s, but there is no GPU: learning runs on the CPU", num_gpus)
