"""RLlib's worker methods about the process and the computer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tfpolicies.errors import UsageError


class WorkerProcess:
    """Base class of workers: their lock, host, and creation arguments.

    Args:
        creation_args: the arguments of the worker.
    """

    def __init__(self, creation_args: Mapping[str, Any]) -> None:
        self._creation_args = dict(creation_args)
        self._own_lock = threading.Lock()

    def creation_args(self) -> dict[str, Any]:
        """Returns the arguments that this worker was created with."""
        return dict(self._creation_args)

    def apply(self, func: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Returns `func(self, *args, **kwargs)`."""
        return func(self, *args, **kwargs)

    def ping(self) -> str:
        """Returns "pong"."""
        return "pong"

    def lock(self) -> None:
        """Acquires this worker's lock, which no other method uses."""
        self._own_lock.acquire()

    def unlock(self) -> None:
        """Releases this worker's lock.

        Raises:
            RuntimeError: if it is not locked.
        """
        self._own_lock.release()

    def get_host(self) -> str:
        """Returns the computer's network name."""
        return socket.gethostname()

    def get_node_ip(self) -> str:
        """Returns an address at which other computers may reach this one."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # a test address (RFC 5737): nothing is sent
                return str(probe.getsockname()[0])
            except OSError:
                return "127.0.0.1"

    def find_free_port(self) -> int:
        """Returns a port of this computer that is free at this moment."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def setup_torch_data_parallel(
        self, url: str = "", world_rank: int = 0, world_size: int = 1, backend: str = ""
    ) -> NoReturn:
        """Raises a `UsageError`: TensorFlow policies do not learn in a torch process group."""
        del url, world_rank, world_size, backend
        raise UsageError(
            "This worker does not support torch distributed: its policies use TensorFlow. Use "
            "several sampling workers with `rollouts(num_rollout_workers=...)`."
        )
