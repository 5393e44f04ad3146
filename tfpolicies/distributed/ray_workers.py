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
from tfpolicies.distributed.hosted_worker import HostedWorker
from tfpolicies.distributed.messages import Alignment, align
from tfpolicies.distributed.names import pack_names, take_names
from tfpolicies.distributed.ray_cluster import amounts, cluster
from tfpolicies.distributed.ray_errors import cause, fetched, reason, require_sendable
from tfpolicies.distributed.tune import needs_of_worker
from tfpolicies.errors import WorkerError
from tfpolicies.system.gpus import GROWS

logger = logging.getLogger("tfpolicies")

_SLICE = 0.5  # seconds of waiting after which silent workers are probed
_PATIENCE = 45.0  # seconds after which a worker that is not ready is reported
_GOODBYE = 3.0  # seconds that workers have to close their environments


@dataclass(eq=False)
class _Remote:
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
        requests: references of calls for `take_answers`.
    """

    index: int
    actor: Any = None
    building: Any = None
    healthy: bool = False
    since: float = 0.0
    restarts: int = 0
    probe: tuple[Any, float] | None = None
    warned: bool = False
    notices: list[Any] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)

    def let_go(self) -> None:
        """Ends its process, if it has one, and drops its pending calls."""
        actor, self.actor = self.actor, None
        self.building, self.healthy, self.probe = None, False, None
        self.notices, self.samples, self.requests = [], [], []
        if actor is not None:
            ray.kill(actor)


class _Answer(NamedTuple):
    """The result of a call in a worker, or its error."""

    reference: Any
    remote: _Remote
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
        arguments: Callable[[int, bool], Mapping[str, Any]],
        config: AlgorithmConfig,
        alignment: Callable[[], Alignment],
    ) -> None:
        self._arguments = arguments
        self._config = config
        self._alignment = alignment
        self.num_restarts = 0
        self._recreated: list[int] = []
        self._failed_rounds = 0
        self._stopped = False
        self._names = pack_names()  # registered in the workers
        self._remotes = [_Remote(i) for i in range(1, count + 1)]
        cluster.join()
        try:
            for remote in self._remotes:
                self._start(remote, recreated=False)
            self.descriptions = self._await(self._remotes)
        except BaseException:
            self.stop()
            raise

    require_sendable = staticmethod(require_sendable)

    def share_names(self) -> None:
        """Sends names that were registered in this process since the last call to the workers."""
        packed = pack_names()
        new = [each for each in packed if each not in self._names]
        if new:
            self.call(lambda worker, packed: take_names(packed), new)
            self._names = packed

    # -- starting -----------------------------------------------------------------------------

    def _start(self, remote: _Remote, *, recreated: bool) -> None:
        config = self._config
        environ = dict(config.extra_python_environs_for_worker)
        if config.num_gpus_per_worker:
            environ.setdefault(GROWS, "true")
        else:
            environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
        kind = ray.remote(concurrency_groups={"health": 1})(HostedWorker).options(
            # A private cluster has no other users, and waiting for CPUs could deadlock.
            num_cpus=0 if cluster.is_own else config.num_cpus_per_worker,
            num_gpus=config.num_gpus_per_worker,
            resources=dict(config.custom_resources_per_worker) or None,
            scheduling_strategy="SPREAD" if "SPREAD" in config.placement_strategy else None,
            max_restarts=0,
        )
        threads = max(1, int(config.num_cpus_per_worker))
        remote.actor = kind.remote(threads, environ, [os.path.abspath(path) for path in sys.path])
        arguments = cloudpickle.dumps(dict(self._arguments(remote.index, recreated)))
        remote.building = remote.actor.build.remote(arguments, self._names)
        remote.since = time.monotonic()
        remote.warned = False

    def add(self, count: int) -> None:
        """Adds workers, waits for them, and makes them equal to the others.

        Raises:
            Exception: the error of creating one of them.
        """
        first = self.num_workers + 1
        added = [_Remote(index) for index in range(first, first + count)]
        self._remotes += added
        for remote in added:
            self._start(remote, recreated=False)
        self._await(added)
        self.send(align, self._alignment(), indices=range(first, first + count))

    def _await(self, remotes: Collection[_Remote]) -> dict[int, Any]:
        """Waits until workers are built; returns the results of `build` by index."""
        found = {}
        building = {remote.building: remote for remote in remotes}
        for _, remote, answer, error in self._answers(building):
            remote.building = None
            if error is None:
                remote.healthy = True
                found[remote.index] = answer
            elif self._config.validate_workers_after_construction or not self._is_lenient():
                raise cause(error, remote.index)
            else:
                self._fail(remote, error)
        if not found:
            raise WorkerError(
                f"None of {len(remotes)} remote workers could be created. The log has the reasons."
            )
        return found

    # -- status -------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """The number of workers, including those that failed."""
        return len(self._remotes)

    def healthy(self) -> list[int]:
        """Returns the indices of the workers that work."""
        return [remote.index for remote in self._remotes if remote.healthy]

    @property
    def num_in_flight(self) -> int:
        """The number of requested samples that did not arrive yet."""
        return sum(len(remote.samples) for remote in self._remotes)

    def take_recreated(self) -> list[int]:
        """Returns the indices of the workers that were restarted since the last call."""
        found, self._recreated = self._recreated, []
        return found

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
        found, errors = {}, []
        for _, remote, answer, error in self._answers(self._asked(func, args, indices), timeout):
            if error is None:
                found[remote.index] = answer
            elif isinstance(error, RayTaskError):
                errors.append((remote.index, error))
            else:
                self._fail(remote, error)
        if errors:
            index, error = min(errors, key=lambda pair: pair[0])
            raise cause(error, index) from error
        return dict(sorted(found.items()))

    def _asked(
        self, func: Callable[..., Any], args: tuple, indices: Collection[int] | None
    ) -> dict[Any, _Remote]:
        shared = [ray.put(part) for part in (func, *args)]
        return {
            remote.actor.call.remote(*shared): remote
            for remote in self._remotes
            if remote.healthy and (indices is None or remote.index in indices)
        }

    def send(
        self, func: Callable[..., Any], *args: object, indices: Collection[int] | None = None
    ) -> None:
        """Calls `func(worker, *args)` in the healthy workers without waiting, in order."""
        for reference, remote in self._asked(func, args, indices).items():
            remote.notices.append(reference)

    def references(self, func: Callable[..., Any], indices: Collection[int] | None) -> list[Any]:
        """Returns Ray's references of `func(worker)` of the healthy workers, in order."""
        return list(self._asked(func, (), indices))

    def request(self, func: Callable[..., Any], indices: Collection[int] | None) -> int:
        """Calls `func(worker)` in workers for `take_answers`; returns the number of calls."""
        self.look_after()
        asked = self._asked(func, (), indices)
        for reference, remote in asked.items():
            remote.requests.append(reference)
        return len(asked)

    def take_answers(self, timeout: float | None) -> list[tuple[int, Any]]:
        """Returns `(index, result)` of the calls of `request` that have finished.

        Args:
            timeout: seconds to wait; later results are left for the next call. None waits for all.

        Raises:
            Exception: the error of a function in a worker; the other results stay. Workers that
                died are ignored.
        """
        waiting = {ref: remote for remote in self._remotes for ref in remote.requests}
        answers = list(self._answers(waiting, timeout))
        for reference, remote, _, error in answers:
            if isinstance(error, RayTaskError):
                remote.requests.remove(reference)
                raise cause(error, remote.index) from error
        for reference, remote, _, error in answers:
            if error is None:
                remote.requests.remove(reference)
            elif remote.healthy:
                self._fail(remote, error)
        return [(each.remote.index, each.value) for each in answers if each.error is None]

    def _check_notices(self) -> None:
        """Raises the error of a finished call of `send`, if there is one."""
        for remote in self._remotes:
            if not remote.notices:
                continue
            done, remote.notices = ray.wait(
                remote.notices, num_returns=len(remote.notices), timeout=0
            )
            for reference in done:
                _, error = fetched(reference)
                if isinstance(error, RayTaskError):
                    raise cause(error, remote.index) from error
                if error is not None and remote.healthy:
                    self._fail(remote, error)

    def _answers(
        self, asked: Mapping[Any, _Remote], timeout: float | None = None
    ) -> Iterator[_Answer]:
        """Yields the results of calls as they arrive, until the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = dict(asked)
        while waiting:
            left = _SLICE if deadline is None else max(0.0, deadline - time.monotonic())
            for answer in self._arrived(waiting, min(_SLICE, left)):
                del waiting[answer.reference]
                yield answer
            if deadline is not None and time.monotonic() >= deadline:
                return

    def _arrived(self, waiting: Mapping[Any, _Remote], seconds: float = _SLICE) -> list[_Answer]:
        """Waits briefly for results; probes workers that stay silent."""
        references = list(waiting)
        done, _ = ray.wait(references, num_returns=1, timeout=seconds)
        if done:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            return [_Answer(ref, waiting[ref], *fetched(ref)) for ref in done]
        silent = {remote: self._trouble(remote) for remote in set(waiting.values())}
        return [
            _Answer(reference, remote, None, WorkerError(silent[remote]))
            for reference, remote in waiting.items()
            if silent[remote] is not None
        ]

    def _trouble(self, remote: _Remote) -> str | None:
        """Returns why a silent worker counts as dead, or None."""
        now = time.monotonic()
        if remote.building is not None:
            limit = self._config.worker_restore_timeout_s
            late = now - remote.since > limit
            if now - remote.since > _PATIENCE and not remote.warned:
                remote.warned = True
                logger.warning(
                    "Remote worker %d is not ready after %g seconds. It requests %s; the cluster "
                    "has %s in total, of which %s are free.",
                    remote.index,
                    _PATIENCE,
                    needs_of_worker(self._config),
                    amounts(ray.cluster_resources()),
                    amounts(ray.available_resources()),
                )
            return f"it was not ready after {limit:g} seconds" if late else None
        if remote.probe is None:
            remote.probe = remote.actor.trouble.remote(), now
            return None
        reference, asked_at = remote.probe
        done, _ = ray.wait([reference], timeout=0)
        if done:
            remote.probe = None
            answer, error = fetched(reference)
            return None if error is not None else answer
        limit = self._config.worker_health_probe_timeout_s
        return f"it has not answered for {limit:g} seconds" if now - asked_at > limit else None

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
            self.look_after()
            asked = self._asked(func, args, None)
            for reference, remote in asked.items():
                remote.samples.append(reference)
            found = {}
            for _, remote, answer, error in self._answers(asked, timeout):
                remote.samples = []
                if error is None:
                    found[remote.index] = answer
                else:
                    self._fail(remote, error)
            late = [remote for remote in self._remotes if remote.samples]
            for remote in late:
                remote.samples = []
                logger.warning("Remote worker %d took over %s seconds.", remote.index, timeout)
            if not late:
                self._count_round(found)
            if found or late:
                return [answer for _, answer in sorted(found.items())]

    def sample_ready(self, func: Callable[..., Any], in_flight: int) -> list[Any]:
        """Returns `func(worker)` of the workers that are ready, at least one; the others continue.

        Args:
            func: called in the workers.
            in_flight: the number of pending calls per worker, so that none waits for this process.

        Raises:
            WorkerError: as `sample`.
        """
        while True:
            self.look_after()
            self._request(func, in_flight)
            waiting = {ref: remote for remote in self._remotes for ref in remote.samples}
            found, failed = [], False
            for reference, remote, answer, error in self._arrived(waiting):
                if error is None:
                    found.append(answer)
                    if reference in remote.samples:  # else its worker was killed before
                        remote.samples.remove(reference)
                elif remote.healthy:
                    self._fail(remote, error)
                    failed = True
            if failed or found:
                self._count_round(found)
            if found:
                self._request(func, in_flight)
                return found

    def _request(self, func: Callable[..., Any], in_flight: int) -> None:
        for remote in self._remotes:
            while remote.healthy and len(remote.samples) < in_flight:
                remote.samples.append(remote.actor.call.remote(func))

    def _count_round(self, found: Collection[Any]) -> None:
        """Counts consecutive rounds without a sample; raises if there are too many."""
        self._failed_rounds = 0 if found else self._failed_rounds + 1
        most = self._config.num_consecutive_worker_failures_tolerance
        if self._failed_rounds > most:
            raise WorkerError(
                f"All {self.num_workers} remote workers failed in {self._failed_rounds} "
                "consecutive rounds of sampling, more than "
                f"num_consecutive_worker_failures_tolerance={most}. The log says why each of them "
                "failed; correct the environment, or raise the limit."
            )

    # -- failures -----------------------------------------------------------------------------

    def _is_lenient(self) -> bool:
        return self._config.recreate_failed_workers or self._config.ignore_worker_failures

    def _fail(self, remote: _Remote, error: BaseException) -> None:
        """Ends the process of a worker that failed; raises unless the config tolerates failures.

        If `func` raised in the worker, its process is healthy: it stays, and can be called again.
        """
        remote.samples = []
        tells = not self._is_lenient() and not self._stopped
        if tells and remote.healthy and isinstance(error, RayTaskError):
            raise cause(error, remote.index) from error
        remote.let_go()
        remote.since = time.monotonic()
        logger.warning("Remote worker %d failed: %s", remote.index, reason(error))
        if tells:
            raise cause(error, remote.index) from error

    def look_after(self) -> None:
        """Restarts workers that died, as the config says, and adds those that are ready.

        Waits if no other worker is healthy.

        Raises:
            WorkerError: if none is left, and none can be restarted.
        """
        self._check_notices()
        while True:
            for remote in self._remotes:
                # The first restart is immediate, later ones follow after the delay.
                delay = self._config.delay_between_worker_restarts_s if remote.restarts else 0.0
                is_due = time.monotonic() - remote.since >= delay
                if remote.actor is None and is_due and self._will_restart(remote):
                    remote.restarts += 1
                    self.num_restarts += 1
                    self._start(remote, recreated=True)
                elif remote.building is not None:
                    self._look_at(remote)
            if self.healthy():
                return
            if not any(r.building is not None or self._will_restart(r) for r in self._remotes):
                raise WorkerError(
                    f"None of the {self.num_workers} remote workers is left. The log says why each "
                    "failed; fault_tolerance(recreate_failed_workers=True, "
                    "max_num_worker_restarts=...) restarts them."
                )
            time.sleep(0.05)

    def _will_restart(self, remote: _Remote) -> bool:
        config = self._config
        return config.recreate_failed_workers and remote.restarts < config.max_num_worker_restarts

    def _look_at(self, remote: _Remote) -> None:
        """Makes a restarted worker available if it is ready."""
        done, _ = ray.wait([remote.building], timeout=0)
        if not done:
            trouble = self._trouble(remote)
            if trouble is not None:
                self._fail(remote, WorkerError(trouble))
            return
        _, error = fetched(remote.building)
        if error is not None:
            self._fail(remote, error)
            return
        remote.building = None
        alignment = self._alignment()
        remote.notices.append(remote.actor.call.remote(align, alignment, remote.restarts))
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
                self._say_goodbye()
        finally:
            cluster.leave()

    def _say_goodbye(self) -> None:
        calm = [r.actor for r in self._remotes if r.healthy and not r.samples]
        if calm:
            ray.wait(
                [actor.call.remote(methodcaller("stop")) for actor in calm],
                num_returns=len(calm),
                timeout=_GOODBYE,
            )
        for remote in self._remotes:
            remote.let_go()
