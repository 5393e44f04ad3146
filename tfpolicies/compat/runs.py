"""What algorithms have under names that only code written for RLlib asks for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

from tfpolicies.compat.methods import as_method


def save_checkpoint(algorithm: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Saves an algorithm in a folder."""
    algorithm.save(checkpoint_dir)


def load_checkpoint(algorithm: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Restores an algorithm from a folder."""
    algorithm.restore(checkpoint_dir)


def logdir(algorithm: Any) -> str:
    """Returns the run folder, or without one a temporary folder that is made when first asked."""
    if algorithm.run_dir is not None:
        return str(algorithm.run_dir)
    algorithm.logdir = tempfile.mkdtemp(prefix=f"{type(algorithm).__name__}_")
    return str(algorithm.logdir)


ALGORITHM_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "_counters": lambda algorithm: algorithm.counters,
    "get_config": lambda algorithm: lambda: algorithm.config,
    "load_checkpoint": as_method(load_checkpoint),
    "logdir": logdir,
    "save_checkpoint": as_method(save_checkpoint),
    "step": lambda algorithm: algorithm.train,
}
"""By name, what returns it."""
