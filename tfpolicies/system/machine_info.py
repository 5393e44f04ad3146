"""The versions and the machine of this process, for the records of a run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from typing import Any

import psutil

from tfpolicies._version import __version__

_DISTRIBUTIONS = ("tensorflow", "keras", "numpy", "gymnasium", "onnxruntime", "ray")
_GIB = 1 << 30  # bytes


def get_versions() -> dict[str, str]:
    """Returns the versions of Python, of this package and of the installed ones it uses.

    >>> get_versions().keys() >= {"python", "tensorflow", "tfpolicies"}
    True
    """
    versions = {"tfpolicies": __version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return dict(sorted(versions.items()))


def get_machine() -> dict[str, Any]:
    """Returns the system, the processor, the cores and the memory in GiB; and GPUs, if any.

    GPUs are those that TensorFlow uses; they are left out in a process that has not imported it.
    The name of the machine is left out, since records are published.
    """
    machine: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _get_processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / _GIB, 1),
    }
    gpus = _get_gpus()
    return {**machine, "gpus": gpus} if gpus else machine


def _get_processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _get_gpus() -> list[str]:
    tf = sys.modules.get("tensorflow")
    if tf is None:
        return []
    config = tf.config
    return [
        str(config.experimental.get_device_details(gpu).get("device_name", gpu.name))
        for gpu in config.list_physical_devices("GPU")
    ]
