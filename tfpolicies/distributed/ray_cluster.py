"""The Ray cluster that workers run in: the user's, or one of this process's own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping

import ray


class Cluster:
    """The Ray cluster: the user's, or one of this process's own while somebody needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._is_own = False

    @property
    def is_own(self) -> bool:
        """Whether it is one that this process started."""
        return self._is_own

    def join(self) -> None:
        """Connects to the cluster there is, or starts one on this computer."""
        with self._lock:
            if not ray.is_initialized():
                ray.init(logging_level=logging.WARNING, include_dashboard=False)
                self._is_own, self._users = "RAY_ADDRESS" not in os.environ, 0
            self._users += 1

    def leave(self) -> None:
        """Shuts the own cluster down when its last user left."""
        with self._lock:
            self._users -= 1
            if self._is_own and self._users <= 0 and ray.is_initialized():
                ray.shutdown()
                self._is_own = False


cluster = Cluster()


def amounts(resources: Mapping[str, float]) -> dict[str, float]:
    """Returns the resources of a cluster without those that name its nodes."""
    return {
        name: x for name, x in resources.items() if "node:" not in name and "memory" not in name
    }
