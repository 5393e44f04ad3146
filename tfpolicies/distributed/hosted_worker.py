"""A rollout worker in a process of its own. Nothing here is loaded before it runs there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle

from tfpolicies.system.gpus import claim_process
from tfpolicies.system.quiet import extend_paths, load_tensorflow


class HostedWorker:
    """Holds a `RolloutWorker` and calls functions with it, in a Ray actor.

    Args:
        threads: of TensorFlow, for one operation and between operations.
        environ: variables of the process.
        paths: where modules are found, too: what the learning process can import, a worker can.
    """

    def __init__(self, threads: int, environ: Mapping[str, str], paths: Sequence[str]) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.update(environ)
        extend_paths(paths)
        claim_process(only_samples=True)
        load_tensorflow()
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        self._worker: Any = None

    def build(self, arguments: bytes, names: list[tuple[str, str, bytes]]) -> Any:
        """Makes the worker; returns what its environments are like.

        Args:
            arguments: the pickled arguments of `RolloutWorker`; they may need TensorFlow.
            names: what `pack_names` returned.
        """
        from tfpolicies.distributed.messages import describe
        from tfpolicies.distributed.names import take_names
        from tfpolicies.rollout.rollout_worker import RolloutWorker

        take_names(names)
        self._worker = RolloutWorker(**cloudpickle.loads(arguments))
        self._worker.flushes_filters = False
        return describe(self._worker)

    def call(self, func: Callable[..., Any], *args: object) -> Any:
        """Returns `func(worker, *args)`."""
        return func(self._worker, *args)

    @ray.method(concurrency_group="health")
    def trouble(self) -> str | None:
        """Says what the worker hangs in, None if it works; answers while it works."""
        watchdog = None if self._worker is None else self._worker.watchdog
        return None if watchdog is None else watchdog.trouble()
