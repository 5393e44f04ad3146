"""Rollout workers in Ray actors: starts, calls, monitors, and restarts them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, NamedTuple

import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.distributed.ray_actor import RemoteRolloutWorker
from tfpolicies.distributed.ray_cluster import cluster, get_resource_amounts
from tfpolicies.distributed.ray_utils import (
    describe_failure,
    get_result,
    make_local_error,
    require_sendable,
)
from tfpolicies.distributed.registry_sync import pack_registries, register_packed
from tfpolicies.distributed.tune import get_worker_resources
from tfpolicies.distributed.worker_protocol import WorkerSnapshot, restore_snapshot
from tfpolicies.errors import WorkerError
from tfpolicies.system.gpu_memory import GROWTH_VARIABLE

logger = logging.getLogger("tfpolicies")

_POLL_SECONDS = 0.5  # seconds of waiting after which silent workers are probed
_PATIENCE = 45.0  # seconds after which a worker that is not ready is reported
_STOP_TIMEOUT_SECONDS = 3.0  # seconds that workers have to close their environments


@dataclass(eq=False)
class _RemoteWorker:
    """One remote worker.

    Attributes:
        index: its worker index, from 1.
        actor: the Ray actor; None while there is none.
        building: the reference of `build`, until the worker is created.
        healthy: whether it is called.
        state_since: the time at which it was started, or failed.
        restarts: the number of restarts.
        has_warned: whether its slow start was reported.
        probe: the reference and the start time of a health probe.
        unawaited_calls: references of calls without a consumer.
        samples: references of requested samples.
        requests: references of calls for `take_requested_results`.
    """

    index: int
    actor: Any = None
    building: Any = None
    healthy: bool = False
    state_since: float = 0.0
    restarts: int = 0
    probe: tuple[Any, float] | None = None
    has_warned: bool = False
    unawaited_calls: list[Any] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)

    def kill(self) -> None:
        """Ends its process, if it has one, and drops its pending calls."""
        actor, self.actor = self.actor, None
        self.building, self.healthy, self.probe = None, False, None
        self.unawaited_calls, self.samples, self.requests = [], [], []
        if actor is not None:
            ray.kill(actor)


class _CallResult(NamedTuple):
    """The result of a call in a worker, or its error."""

    reference: Any
    remote: _RemoteWorker
    value: Any
    error: BaseException | None


class RayWorkers:
    """N rollout workers in Ray actors.

    Args:
        count: N.
        make_arguments: `f(index, recreated)`, returns the keyword arguments of a `RolloutWorker`;
            `recreated` is True if it replaces one that died.
        config: has the workers' resources and the settings of fault tolerance.
        make_snapshot: returns the snapshot that a restarted worker gets before it samples.

    Attributes:
        num_restarts: the number of restarts of all workers.
    """

    def __init__(
        self,
        count: int,
        make_arguments: Callable[[int, bool], Mapping[str, Any]],
        config: AlgorithmConfig,
        make_snapshot: Callable[[], WorkerSnapshot],
    ) -> None:
        self._make_arguments = make_arguments
        self._config = config
        self._make_snapshot = make_snapshot
        self.num_restarts = 0
        self._recreated: list[int] = []
        self._num_failed_rounds = 0
        self._stopped = False
        self._sent_registries = pack_registries()  # registered in the workers
        self._remotes = [_RemoteWorker(i) for i in range(1, count + 1)]
        cluster.join()
        try:
            for remote in self._remotes:
                self._start(remote, recreated=False)
            self.descriptions = self._wait_until_built(self._remotes)
        except BaseException:
            self.stop()
            raise

    require_sendable = staticmethod(require_sendable)

    def sync_registries(self) -> None:
        """Sends names that were registered in this process since the last call to the workers."""
        registries = pack_registries()
        new_entries = [entry for entry in registries if entry not in self._sent_registries]
        if new_entries:
            self.call(lambda worker, packed: register_packed(packed), new_entries)
            self._sent_registries = registries

    # -- starting -----------------------------------------------------------------------------

    def _start(self, remote: _RemoteWorker, *, recreated: bool) -> None:
        config = self._config
        environ = dict(config.extra_python_environs_for_worker)
        if config.num_gpus_per_worker:
            environ.setdefault(GROWTH_VARIABLE, "true")
        else:
            environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
        actor_class = ray.remote(concurrency_groups={"health": 1})(RemoteRolloutWorker).options(
            # A private cluster has no other users, and waiting for CPUs could deadlock.
            num_cpus=0 if cluster.is_private else config.num_cpus_per_worker,
            num_gpus=config.num_gpus_per_worker,
            resources=dict(config.custom_resources_per_worker) or None,
            scheduling_strategy="SPREAD" if "SPREAD" in config.placement_strategy else None,
            max_restarts=0,
        )
        threads = max(1, int(config.num_cpus_per_worker))
        remote.actor = actor_class.remote(
            threads, environ, [os.path.abspath(path) for path in sys.path]
        )
        arguments = cloudpickle.dumps(dict(self._make_arguments(remote.index, recreated)))
        remote.building = remote.actor.build.remote(arguments, self._sent_registries)
        remote.state_since = time.monotonic()
        remote.has_warned = False

    def add(self, count: int) -> None:
        """Adds workers, waits for them, and makes them equal to the others.

        Raises:
            Exception: the error of creating one of them.
        """
        first_index = self.num_workers + 1
        new_remotes = [_RemoteWorker(index) for index in range(first_index, first_index + count)]
        self._remotes += new_remotes
        for remote in new_remotes:
            self._start(remote, recreated=False)
        self._wait_until_built(new_remotes)
        self.call_without_waiting(
            restore_snapshot, self._make_snapshot(), indices=range(first_index, first_index + count)
        )

    def _wait_until_built(self, remotes: Collection[_RemoteWorker]) -> dict[int, Any]:
        results = {}
        building = {remote.building: remote for remote in remotes}
        for _, remote, value, error in self._iter_results(building):
            remote.building = None
            if error is None:
                remote.healthy = True
                results[remote.index] = value
            elif self._config.validate_workers_after_construction or not self._tolerates_failures():
                raise make_local_error(error, remote.index)
            else:
                self._handle_failure(remote, error)
        if not results:
            raise WorkerError(
                f"None of {len(remotes)} remote workers could be created. The log has the reasons."
            )
        return results

    # -- status -------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """The number of workers, including those that failed."""
        return len(self._remotes)

    def get_healthy_indices(self) -> list[int]:
        return [remote.index for remote in self._remotes if remote.healthy]

    @property
    def num_in_flight(self) -> int:
        """The number of requested samples that did not arrive yet."""
        return sum(len(remote.samples) for remote in self._remotes)

    def pop_recreated(self) -> list[int]:
        """Returns the indices of the workers that were restarted since the last call."""
        indices, self._recreated = self._recreated, []
        return indices

    # -- calling ------------------------------------------------------------------------------

    def call(
        self,
        func: Callable[..., Any],
        *args: object,
        indices: Collection[int] | None = None,
        timeout: float | None = None,
    ) -> dict[int, Any]:
        """Returns `func(worker, *args)` of the healthy workers, by index, in order.

        Args:
            func: called in the workers' processes.
            args: for `func`.
            indices: only of these workers.
            timeout: seconds; later results are ignored.

        Raises:
            Exception: the error of `func` in the first worker that raised one. Workers that died
                are ignored.
        """
        results, errors = {}, []
        for _, remote, value, error in self._iter_results(
            self._submit(func, args, indices), timeout
        ):
            if error is None:
                results[remote.index] = value
            elif isinstance(error, RayTaskError):
                errors.append((remote.index, error))
            else:
                self._handle_failure(remote, error)
        if errors:
            index, error = min(errors, key=lambda pair: pair[0])
            raise make_local_error(error, index) from error
        return dict(sorted(results.items()))

    def _submit(
        self, func: Callable[..., Any], args: tuple, indices: Collection[int] | None
    ) -> dict[Any, _RemoteWorker]:
        shared = [ray.put(part) for part in (func, *args)]
        return {
            remote.actor.call.remote(*shared): remote
            for remote in self._remotes
            if remote.healthy and (indices is None or remote.index in indices)
        }

    def call_without_waiting(
        self, func: Callable[..., Any], *args: object, indices: Collection[int] | None = None
    ) -> None:
        """Calls `func(worker, *args)` in the healthy workers without waiting, in order."""
        for reference, remote in self._submit(func, args, indices).items():
            remote.unawaited_calls.append(reference)

    def get_references(
        self, func: Callable[..., Any], indices: Collection[int] | None
    ) -> list[Any]:
        """Returns Ray's references of `func(worker)` of the healthy workers, in order."""
        return list(self._submit(func, (), indices))

    def request(self, func: Callable[..., Any], indices: Collection[int] | None) -> int:
        """Starts `func(worker)` for `take_requested_results`; returns the number of calls."""
        self.check_workers()
        calls = self._submit(func, (), indices)
        for reference, remote in calls.items():
            remote.requests.append(reference)
        return len(calls)

    def take_requested_results(self, timeout: float | None) -> list[tuple[int, Any]]:
        """Returns `(index, result)` of the calls of `request` that have finished.

        Args:
            timeout: seconds to wait; later results are left for the next call. None waits for all.

        Raises:
            Exception: the error of a function in a worker; the other results stay. Workers that
                died are ignored.
        """
        pending = {ref: remote for remote in self._remotes for ref in remote.requests}
        results = list(self._iter_results(pending, timeout))
        for reference, remote, _, error in results:
            if isinstance(error, RayTaskError):
                remote.requests.remove(reference)
                raise make_local_error(error, remote.index) from error
        for reference, remote, _, error in results:
            if error is None:
                remote.requests.remove(reference)
            elif remote.healthy:
                self._handle_failure(remote, error)
        return [(result.remote.index, result.value) for result in results if result.error is None]

    def _check_unawaited_calls(self) -> None:
        """Raises the error of a finished call of `send`, if there is one."""
        for remote in self._remotes:
            if not remote.unawaited_calls:
                continue
            done, remote.unawaited_calls = ray.wait(
                remote.unawaited_calls, num_returns=len(remote.unawaited_calls), timeout=0
            )
            for reference in done:
                _, error = get_result(reference)
                if isinstance(error, RayTaskError):
                    raise make_local_error(error, remote.index) from error
                if error is not None and remote.healthy:
                    self._handle_failure(remote, error)

    def _iter_results(
        self, calls: Mapping[Any, _RemoteWorker], timeout: float | None = None
    ) -> Iterator[_CallResult]:
        """Yields the results of calls as they arrive, until the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pending = dict(calls)
        while pending:
            remaining = _POLL_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            for result in self._wait_for_results(pending, min(_POLL_SECONDS, remaining)):
                del pending[result.reference]
                yield result
            if deadline is not None and time.monotonic() >= deadline:
                return

    def _wait_for_results(
        self, pending: Mapping[Any, _RemoteWorker], seconds: float = _POLL_SECONDS
    ) -> list[_CallResult]:
        """Waits briefly for results; probes workers that stay silent."""
        references = list(pending)
        done, _ = ray.wait(references, num_returns=1, timeout=seconds)
        if done:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            return [_CallResult(ref, pending[ref], *get_result(ref)) for ref in done]
        failures = {remote: self._get_failure(remote) for remote in set(pending.values())}
        return [
            _CallResult(reference, remote, None, WorkerError(failures[remote]))
            for reference, remote in pending.items()
            if failures[remote] is not None
        ]

    def _get_failure(self, remote: _RemoteWorker) -> str | None:
        """Returns why a silent worker counts as dead, or None."""
        now = time.monotonic()
        if remote.building is not None:
            limit = self._config.worker_restore_timeout_s
            is_late = now - remote.state_since > limit
            if now - remote.state_since > _PATIENCE and not remote.has_warned:
                remote.has_warned = True
                logger.warning(
                    "Remote worker %d is not ready after %g seconds. It requests %s; the cluster "
                    "has %s in total, of which %s are free.",
                    remote.index,
                    _PATIENCE,
                    get_worker_resources(self._config),
                    get_resource_amounts(ray.cluster_resources()),
                    get_resource_amounts(ray.available_resources()),
                )
            return f"it was not ready after {limit:g} seconds" if is_late else None
        if remote.probe is None:
            remote.probe = remote.actor.find_failure.remote(), now
            return None
        reference, probe_start = remote.probe
        done, _ = ray.wait([reference], timeout=0)
        if done:
            remote.probe = None
            status, error = get_result(reference)
            return None if error is not None else status
        limit = self._config.worker_health_probe_timeout_s
        return f"it has not answered for {limit:g} seconds" if now - probe_start > limit else None

    # -- sampling -----------------------------------------------------------------------------

    def sample(
        self, func: Callable[..., Any], *args: object, timeout: float | None = None
    ) -> list[Any]:
        """Returns one `func(worker, *args)` of each worker that works, at least one.

        A worker that fails is reported, and restarted if the config says so.

        Args:
            func: called in the workers.
            args: for `func`.
            timeout: seconds; later results are reported and ignored.

        Raises:
            WorkerError: if a worker died and the config says neither to recreate nor to ignore it.
            Exception: the error of `func` in a worker, under the same condition.
        """
        while True:
            self.check_workers()
            calls = self._submit(func, args, None)
            for reference, remote in calls.items():
                remote.samples.append(reference)
            results = {}
            for _, remote, value, error in self._iter_results(calls, timeout):
                remote.samples = []
                if error is None:
                    results[remote.index] = value
                else:
                    self._handle_failure(remote, error)
            late_workers = [remote for remote in self._remotes if remote.samples]
            for remote in late_workers:
                remote.samples = []
                logger.warning("Remote worker %d took over %s seconds.", remote.index, timeout)
            if not late_workers:
                self._count_round(results)
            if results or late_workers:
                return [value for _, value in sorted(results.items())]

    def sample_ready(self, func: Callable[..., Any], in_flight: int) -> list[Any]:
        """Returns `func(worker)` of the workers that are ready, at least one; the others continue.

        Args:
            func: called in the workers.
            in_flight: the number of pending calls per worker, so that none waits for this process.

        Raises:
            WorkerError: as `sample`.
        """
        while True:
            self.check_workers()
            self._request_samples(func, in_flight)
            pending = {ref: remote for remote in self._remotes for ref in remote.samples}
            results, failed = [], False
            for reference, remote, value, error in self._wait_for_results(pending):
                if error is None:
                    results.append(value)
                    if reference in remote.samples:  # else its worker was killed before
                        remote.samples.remove(reference)
                elif remote.healthy:
                    self._handle_failure(remote, error)
                    failed = True
            if failed or results:
                self._count_round(results)
            if results:
                self._request_samples(func, in_flight)
                return results

    def _request_samples(self, func: Callable[..., Any], in_flight: int) -> None:
        for remote in self._remotes:
            while remote.healthy and len(remote.samples) < in_flight:
                remote.samples.append(remote.actor.call.remote(func))

    def _count_round(self, results: Collection[Any]) -> None:
        """Counts consecutive rounds without a sample; raises if there are too many."""
        self._num_failed_rounds = 0 if results else self._num_failed_rounds + 1
        max_rounds = self._config.num_consecutive_worker_failures_tolerance
        if self._num_failed_rounds > max_rounds:
            raise WorkerError(
                f"All {self.num_workers} remote workers failed in {self._num_failed_rounds} "
                "consecutive rounds of sampling, more than "
                f"num_consecutive_worker_failures_tolerance={max_rounds}. The log says why each of "
                "them failed; correct the environment, or raise the limit."
            )

    # -- failures -----------------------------------------------------------------------------

    def _tolerates_failures(self) -> bool:
        return self._config.recreate_failed_workers or self._config.ignore_worker_failures

    def _handle_failure(self, remote: _RemoteWorker, error: BaseException) -> None:
        """Ends the process of a worker that failed; raises unless the config tolerates failures.

        If `func` raised in the worker, its process is healthy: it stays, and can be called again.
        """
        remote.samples = []
        raises = not self._tolerates_failures() and not self._stopped
        if raises and remote.healthy and isinstance(error, RayTaskError):
            raise make_local_error(error, remote.index) from error
        remote.kill()
        remote.state_since = time.monotonic()
        logger.warning("Remote worker %d failed: %s", remote.index, describe_failure(error))
        if raises:
            raise make_local_error(error, remote.index) from error

    def check_workers(self) -> None:
        """Restarts workers that died, as the config says, and adds those that are ready.

        Waits if no other worker is healthy.
        """
        self._check_unawaited_calls()
        while True:
            for remote in self._remotes:
                # The first restart is immediate, later ones follow after the delay.
                delay = self._config.delay_between_worker_restarts_s if remote.restarts else 0.0
                is_due = time.monotonic() - remote.state_since >= delay
                if remote.actor is None and is_due and self._will_restart(remote):
                    remote.restarts += 1
                    self.num_restarts += 1
                    self._start(remote, recreated=True)
                elif remote.building is not None:
                    self._check_building(remote)
            if self.get_healthy_indices():
                return
            if not any(r.building is not None or self._will_restart(r) for r in self._remotes):
                raise WorkerError(
                    f"None of the {self.num_workers} remote workers is left. The log says why each "
                    "failed; fault_tolerance(recreate_failed_workers=True, "
                    "max_num_worker_restarts=...) restarts them."
                )
            time.sleep(0.05)

    def _will_restart(self, remote: _RemoteWorker) -> bool:
        config = self._config
        return config.recreate_failed_workers and remote.restarts < config.max_num_worker_restarts

    def _check_building(self, remote: _RemoteWorker) -> None:
        """Makes a restarted worker available if it is ready."""
        done, _ = ray.wait([remote.building], timeout=0)
        if not done:
            failure = self._get_failure(remote)
            if failure is not None:
                self._handle_failure(remote, WorkerError(failure))
            return
        _, error = get_result(remote.building)
        if error is not None:
            self._handle_failure(remote, error)
            return
        remote.building = None
        snapshot = self._make_snapshot()
        remote.unawaited_calls.append(
            remote.actor.call.remote(restore_snapshot, snapshot, remote.restarts)
        )
        remote.healthy = True
        self._recreated.append(remote.index)
        logger.warning("Remote worker %d works again, restart %d.", remote.index, remote.restarts)

    # -- shutdown -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Closes the workers' environments and ends their processes; may be called again."""
        if self._stopped:
            return
        self._stopped = True
        try:
            if ray.is_initialized():
                self._stop_workers()
        finally:
            cluster.leave()

    def _stop_workers(self) -> None:
        idle_actors = [r.actor for r in self._remotes if r.healthy and not r.samples]
        if idle_actors:
            ray.wait(
                [actor.call.remote(methodcaller("stop")) for actor in idle_actors],
                num_returns=len(idle_actors),
                timeout=_STOP_TIMEOUT_SECONDS,
            )
        for remote in self._remotes:
            remote.kill()
