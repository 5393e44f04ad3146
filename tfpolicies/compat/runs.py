"""What algorithms have under names that only code written for RLlib asks for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any


def saving(algorithm: Any) -> Callable[..., None]:
    """Returns `algorithm.save_checkpoint(checkpoint_dir)`."""

    def save_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> None:
        algorithm.save(checkpoint_dir)

    return save_checkpoint


def loading(algorithm: Any) -> Callable[..., None]:
    """Returns `algorithm.load_checkpoint(checkpoint_dir)`."""

    def load_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> None:
        algorithm.restore(checkpoint_dir)

    return load_checkpoint


def logdir(algorithm: Any) -> str:
    """Returns the run folder, or without one a temporary folder that is made when first asked."""
    if algorithm.run_dir is not None:
        return str(algorithm.run_dir)
    algorithm.logdir = tempfile.mkdtemp(prefix=f"{type(algorithm).__name__}_")
    return str(algorithm.logdir)


OF_ALGORITHMS: dict[str, Callable[[Any], Any]] = {
    "_counters": lambda algorithm: algorithm.counters,
    "get_config": lambda algorithm: lambda: algorithm.config,
    "load_checkpoint": loading,
    "logdir": logdir,
    "save_checkpoint": saving,
    "step": lambda algorithm: algorithm.train,
}
"""By name, what returns it."""
