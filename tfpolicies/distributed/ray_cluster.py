"""The Ray cluster of remote workers: the user's, or a private one of this process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping

import ray


class Cluster:
    """The Ray cluster: the user's, or a private one that lives as long as it has users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_private = False

    @property
    def is_private(self) -> bool:
        """True if this process started the cluster."""
        return self._is_private

    def join(self) -> None:
        """Connects to the existing cluster, or starts one on this computer."""
        with self._lock:
            if not ray.is_initialized():
                ray.init(logging_level=logging.WARNING, include_dashboard=False)
                self._is_private, self._num_users = "RAY_ADDRESS" not in os.environ, 0
            self._num_users += 1

    def leave(self) -> None:
        """Shuts a private cluster down after its last user left."""
        with self._lock:
            self._num_users -= 1
            if self._is_private and self._num_users <= 0 and ray.is_initialized():
                ray.shutdown()
                self._is_private = False


cluster = Cluster()


def get_resource_amounts(resources: Mapping[str, float]) -> dict[str, float]:
    """Returns the resources of a cluster without memory and node names."""
    return {
        name: amount
        for name, amount in resources.items()
        if "node:" not in name and "memory" not in name
    }
