"""The Ray actor that hosts a rollout worker. Defers heavy imports until it runs in its process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import cloudpickle

from tfpolicies.system.gpu_memory import claim_process
from tfpolicies.system.log_suppression import extend_sys_path, load_tensorflow


class RemoteRolloutWorker:
    """Hosts a `RolloutWorker` in a Ray actor, and calls functions with it.

    Args:
        threads: of TensorFlow, for one operation and between operations.
        environ: environment variables of the process.
        paths: additional module search paths, so that a worker can import the modules of the
            learning process.
    """

    def __init__(self, threads: int, environ: Mapping[str, str], paths: Sequence[str]) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.update(environ)
        extend_sys_path(paths)
        claim_process(only_samples=True)
        load_tensorflow()
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        self._worker: Any = None

    def build(self, arguments: bytes, registries: list[tuple[str, str, bytes]]) -> Any:
        """Creates the worker; returns the description of its environments.

        Args:
            arguments: the pickled arguments of `RolloutWorker`; unpickling may need TensorFlow.
            registries: the result of `pack_registries`.
        """
        from tfpolicies.distributed.registry_sync import register_packed
        from tfpolicies.distributed.worker_protocol import describe_envs
        from tfpolicies.rollout.rollout_worker import RolloutWorker

        register_packed(registries)
        self._worker = RolloutWorker(**cloudpickle.loads(arguments))
        self._worker.flushes_filters = False
        return describe_envs(self._worker)

    def call(self, func: Callable[..., Any], *args: object) -> Any:
        """Returns `func(worker, *args)`."""
        return func(self._worker, *args)

    @ray.method(concurrency_group="health")
    def find_failure(self) -> str | None:
        """Returns where the worker hangs, or None; answers also while the worker is busy."""
        watchdog = None if self._worker is None else self._worker.watchdog
        return None if watchdog is None else watchdog.status()
