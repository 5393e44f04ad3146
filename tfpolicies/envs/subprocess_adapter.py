"""Environments that are spread over processes, which step at the same time.

A worker gives each process its share of the environments (`child_process.py` is the worker's side
of one, `env_process.py` the program that runs there). Observations, actions and rewards are in
shared memory; this module sends the requests, and assembles the parts of a step. It also
replaces a process that was lost, and reports the environment in which it was lost.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import cloudpickle
import numpy as np

from tfpolicies.base.type_aliases import Structure
from tfpolicies.envs.child_process import (
    ChildProcess,
    ProcessLostError,
    end_if_dead,
    iterate_ready,
    restore_error,
)
from tfpolicies.envs.env_factory import (
    EnvContext,
    OnCreated,
    check_instance_suffices,
    check_process_count,
    get_gym_spec,
    is_env_instance,
    is_import_path,
)
from tfpolicies.envs.env_process import MakeRequest, MakeResult, StepExtras, get_share
from tfpolicies.envs.env_registry import ENVIRONMENTS, EnvSource
from tfpolicies.envs.fault_tolerance import EnvSupervisor
from tfpolicies.envs.shared_arrays import SharedArrays, flatten, make_unnamed_file, unflatten
from tfpolicies.envs.vector_adapters import StepResult, VectorEnvAdapter, require_same_spaces
from tfpolicies.errors import EnvError, show_value

logger = logging.getLogger("tfpolicies")

_POLL_SECONDS = 1.0  # between two checks if a silent process has ended
# Seconds at most beyond env_step_timeout_s, for calls that return by themselves
_GRACE_SECONDS = 5.0
_CLOSE_SECONDS = 5.0  # for processes to end by themselves


def make_process_environments(
    source: EnvSource,
    num_envs: int,
    num_processes: int,
    context: EnvContext,
    on_created: OnCreated | None = None,
    *,
    checked: bool = True,
    may_be_none: bool = False,
) -> SubprocessEnvAdapter | None:
    """Makes environments with one agent in separate processes.

    Args:
        source: as `make_any_environments` takes it, but neither an instance nor a source of vector
            environments.
        num_envs: number of environments in all.
        num_processes: number of processes over which they are spread.
        context: of the first one.
        on_created: called with a `RemoteEnvironment`, its context and its index.
        checked: whether Gymnasium's checker watches environments made by name.
        may_be_none: whether a creator may return None, for no environment.

    Returns:
        The environments; None if the creator returned None and may do so.

    Raises:
        ConfigError: if there are more processes than environments.
        EnvError: if the environments cannot be sent to other processes, or not be made there.
        Exception: any exception of a constructor.
    """
    check_process_count(num_envs, num_processes)
    if is_env_instance(source):
        check_instance_suffices(source, 1, 0, evaluates=False, num_processes=num_processes)
    creator = ENVIRONMENTS.find(source)
    by_name = creator is None and isinstance(source, str) and not is_import_path(source)
    assignment = {
        "source": source,
        "creators": {} if creator is None else {source: creator},
        "spec": get_gym_spec(str(source)) if by_name else None,
        "context": context.copy_with_overrides(remote=True),
        "checked": checked,
        "may_be_none": may_be_none,
        "num_envs": num_envs,
        "num_processes": num_processes,
        "log_level": logging.getLogger().getEffectiveLevel(),
    }
    envs = _start(_pack(assignment), num_envs, num_processes, context.worker_index)
    if envs is not None and on_created is not None:
        for i, env in enumerate(envs.get_sub_environments()):
            on_created(env, context.copy_with_overrides(vector_index=i), i)
    return envs


def _pack(assignment: Mapping[str, Any]) -> bytes:
    try:
        return cloudpickle.dumps(("make", MakeRequest(**assignment)))
    except Exception as error:
        culprit = _find_unsendable(assignment)
        raise EnvError(
            f"env_processes needs environments that can be sent to other processes, but {culprit} "
            f"cannot be: {type(error).__name__}: {error}. Let the environment make such objects in "
            "`__init__`; or leave env_processes out."
        ) from error


def _find_unsendable(assignment: Mapping[str, Any]) -> str:
    settings = {f"env_config[{key!r}]": value for key, value in assignment["context"].items()}
    for name, value in {**settings, "env": [assignment["source"], assignment["creators"]]}.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return name if name == "env" else f"{name} = {show_value(value)}"
    return "env"


def _start(
    assignment: bytes, num_envs: int, num_processes: int, worker_index: int
) -> SubprocessEnvAdapter | None:
    """Starts processes that make their environments; None if the creator returns None."""
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(make_unnamed_file())
        processes = [ChildProcess(number, memory) for number in range(num_processes)]
        for process in processes:
            stack.callback(process.end)
            process.send(assignment)
        results_by_process: dict[int, MakeResult | None] = {}
        for process in iterate_ready(processes, _POLL_SECONDS, end_if_dead):
            share = get_share(process.number, num_envs, num_processes)
            results_by_process[process.number] = _receive_make_result(process, share, worker_index)
        results = [answer for _, answer in sorted(results_by_process.items()) if answer is not None]
        if len(results) < num_processes:
            return None
        envs = SubprocessEnvAdapter(assignment, processes, results, memory, num_envs, worker_index)
        stack.pop_all()
    _warn_tensorflow_imported(results)
    return envs


def _receive_make_result(
    process: ChildProcess, share: range, worker_index: int
) -> MakeResult | None:
    """Receives the answer to the request to make environments; explains a lost process."""
    description = f"{_describe_share(share)} of worker {worker_index}"
    try:
        result: MakeResult | None = process.receive()
    except ProcessLostError as error:
        raise EnvError(
            f"The process that was to make {description} has ended ({error}).{_advise(error)}"
        ) from error
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"It was raised in the process that was to make {description}.")
        raise
    return result


def _describe_share(share: range) -> str:
    """Returns how messages call the environments of a process.

    >>> _describe_share(range(3, 4)), _describe_share(range(4, 8))
    ('environment 3', 'environments 4 to 7')
    """
    if len(share) == 1:
        return f"environment {share.start}"
    return f"environments {share.start} to {share.stop - 1}"


def _advise(lost: ProcessLostError) -> str:
    is_killed = str(lost) == "SIGKILL"
    return " The system does so if memory runs out: try fewer processes." if is_killed else ""


def _warn_tensorflow_imported(results: Sequence[MakeResult]) -> None:
    if any(answer.has_tensorflow for answer in results):
        logger.warning(
            "The processes of environments import TensorFlow, which takes seconds and some hundred "
            "MB in each of them: the module of the environment's class imports it. Move that class "
            "to a module that does not."
        )


_STEP_REQUEST = pickle.dumps(("step",))


class SubprocessEnvAdapter(VectorEnvAdapter):
    """N environments with one agent that are spread over P processes.

    Args:
        assignment: the request that makes a process make its environments.
        processes: processes that have made their environments.
        results: their answers.
        memory: the file of the shared memory, which this object closes.
        num_envs: N.
        worker_index: of the worker, for messages.

    Attributes:
        seconds_to_make: time to make all environments, summed over the processes.

    Raises:
        EnvError: if their spaces differ, or cannot be shared.
    """

    def __init__(
        self,
        assignment: bytes,
        processes: list[ChildProcess],
        results: Sequence[MakeResult],
        memory: IO[bytes],
        num_envs: int,
        worker_index: int,
    ) -> None:
        self.num_envs = num_envs
        self.observation_space = results[0].observation_space
        self.action_space = results[0].action_space
        self.seconds_to_make = sum(answer.seconds for answer in results)
        self.env_factory = self._restart_process
        self._assignment = assignment
        self._processes = processes
        self._memory = memory
        self._worker_index = worker_index
        count = len(processes)
        self._shares = [get_share(number, num_envs, count) for number in range(count)]
        for answer, share in zip(results, self._shares, strict=True):
            require_same_spaces(share.start, answer, self)
        spaces = self.observation_space, self.action_space
        self._arrays = SharedArrays(memory.fileno(), *spaces, num_envs, count, is_new=True)
        self._close_memory = weakref.finalize(self, memory.close)
        self._timeout: float | None = None
        self._on_recreated: Callable[[Any, int], None] = lambda env, index: None
        self.set_supervisor(EnvSupervisor(worker_index=worker_index))

    def set_supervisor(self, supervisor: EnvSupervisor) -> None:
        super().set_supervisor(supervisor)
        self._timeout = None if supervisor.watchdog is None else supervisor.watchdog.timeout
        self._on_recreated = supervisor.on_recreated
        supervisor.on_recreated = self._notify_restarted
        self._ask_each("guard", *([x] * len(self._processes) for x in self._get_guard_arguments()))

    def _get_guard_arguments(self) -> tuple[Any, ...]:
        supervisor = self.supervisor
        return (
            supervisor.make is not None,
            supervisor.worker_index,
            self._timeout,
            supervisor.max_restarts,
        )

    # -- processes ----------------------------------------------------------------------------

    def _find_process(self, index: int) -> ChildProcess:
        return next(
            x for x, share in zip(self._processes, self._shares, strict=True) if index in share
        )

    def _restart_process(self, index: int) -> ChildProcess:
        number = self._find_process(index).number
        self._processes[number].end()
        process = self._processes[number] = ChildProcess(number, self._memory)
        process.send(self._assignment)
        share = self._shares[number]
        result = _receive_make_result(process, share, self._worker_index)
        require_same_spaces(share.start, result, self)
        self._ask(process, "guard", *self._get_guard_arguments())
        return process

    def _notify_restarted(self, process: ChildProcess, index: int) -> None:
        """Calls `on_recreated` for all environments of a process that was restarted."""
        for i in self._shares[process.number]:
            self._on_recreated(RemoteEnvironment(self, i), i)

    def _send(
        self, processes: list[ChildProcess], requests: list[bytes], *, is_limited: bool = False
    ) -> Iterator[ChildProcess]:
        """Sends requests and yields each process that answers; `is_limited`: with a timeout."""
        self._drop_answers(processes)
        arrays = self._arrays
        for process, request in zip(processes, requests, strict=True):
            arrays.call_start[process.number] = time.monotonic() if is_limited else math.inf
            arrays.call_env_index[process.number] = -1
            process.send(request)
        return iterate_ready(processes, self._get_poll_seconds(), self._check_process)

    def _get_poll_seconds(self) -> float:
        return _POLL_SECONDS if self._timeout is None else min(_POLL_SECONDS, self._timeout / 4)

    def _drop_answers(self, processes: Iterable[ChildProcess]) -> None:
        """Receives pending answers to earlier requests, which an error or a signal interrupted."""
        busy = [process for process in processes if process.outstanding]
        for process in iterate_ready(busy, self._get_poll_seconds(), self._check_process):
            while process.outstanding:
                with contextlib.suppress(Exception):
                    process.receive()

    def _ask(
        self, process: ChildProcess, method: str, *args: object, is_limited: bool = False
    ) -> Any:
        request = cloudpickle.dumps((method, *args))
        for answered in self._send([process], [request], is_limited=is_limited):
            return answered.receive()

    def _check_process(self, process: ChildProcess) -> None:
        """Ends a process that takes too long, and cleans up one that has ended."""
        end_if_dead(process)
        if process.is_lost() or self._timeout is None:
            return
        seconds = time.monotonic() - float(self._arrays.call_start[process.number])
        if seconds > self._timeout + min(self._timeout, _GRACE_SECONDS):
            process.end(f"it hung for {seconds:.1f} seconds; env_step_timeout_s={self._timeout:g}")

    def _locate_failure(
        self, process: ChildProcess, lost: ProcessLostError, method: str
    ) -> tuple[int, EnvError]:
        """Returns the environment in which a process was lost, and an error that names it."""
        number = process.number
        share, index = self._shares[number], int(self._arrays.call_env_index[number])
        if index >= 0:
            method = "step" if self._arrays.call_is_step[number] else "reset"
        index = max(index, share.start)
        message = (
            f"The process of {_describe_share(share)} of worker {self._worker_index} has ended in "
            f"`{method}` of environment {index}: {lost}.{_advise(lost)}"
        )
        if lost.trace:
            logger.error("%s It was here:\n%s", message, lost.trace)
        return index, EnvError(message)

    def _receive(self, process: ChildProcess, method: str, failed: dict[int, Exception]) -> Any:
        """Returns a process's answer; None if it was lost and replaced.

        The environments of a lost process are added to `failed`.
        """
        try:
            return process.receive()
        except ProcessLostError as lost:
            index, error = self._locate_failure(process, lost, method)
            reason = self.supervisor.on_failure(index, method, error)
            self.supervisor.recreate(
                index, process, lambda new: self._ask(new, "reset", None, is_limited=True)
            )
            failed.update(dict.fromkeys(self._shares[process.number], reason))
            return None

    def _ask_each(self, method: str, *args: object) -> list[Any]:
        """Sends all processes a request that does not step; `args` has a list per argument."""
        requests = [
            cloudpickle.dumps((method, *process_arguments))
            for process_arguments in zip(*args, strict=True)
        ]
        requests = requests or [pickle.dumps((method,))] * len(self._processes)
        answers: dict[int, Any] = {}
        for process in self._send(self._processes, requests):
            try:
                answers[process.number] = process.receive()
            except ProcessLostError as lost:
                raise self._locate_failure(process, lost, method)[1] from lost
        return [answers[number] for number in range(len(self._processes))]

    def ask_one(self, index: int, method: str, *args: object) -> Any:
        """Returns the answer of the process of one environment.

        Raises:
            EnvError: if the process was lost.
            Exception: the exception raised there.
        """
        process = self._find_process(index)
        try:
            return self._ask(process, method, *args)
        except ProcessLostError as lost:
            raise self._locate_failure(process, lost, method)[1] from lost

    # -- episodes -----------------------------------------------------------------------------

    def reset(self, seeds: Sequence[int] | None) -> Any:
        seeds_by_process = [
            None if seeds is None else [seeds[i] for i in share] for share in self._shares
        ]
        requests = [pickle.dumps(("reset", process_seeds)) for process_seeds in seeds_by_process]
        for process in self._send(self._processes, requests, is_limited=True):
            recreated = self._receive(process, "reset", {})
            for index in recreated or ():
                self._on_recreated(RemoteEnvironment(self, index), index)
        return self._copy_obs()

    def _copy_obs(self) -> Any:
        return unflatten(self.observation_space, (leaf.copy() for leaf in self._arrays.obs))

    def step(self, actions: Structure) -> StepResult:
        leaves = flatten(self.action_space, actions)
        for shared, leaf in zip(self._arrays.actions, leaves, strict=True):
            shared[...] = leaf
        failed: dict[int, Exception] = {}
        extras_by_process: dict[int, StepExtras] = {}
        requests = [_STEP_REQUEST] * len(self._processes)
        for process in self._send(self._processes, requests, is_limited=True):
            extras = self._receive(process, "step", failed)
            if extras is not None:
                extras_by_process[process.number] = extras
        return self._assemble_step(extras_by_process, failed)

    def _assemble_step(
        self, extras_by_process: Mapping[int, StepExtras], failed: dict[int, Exception]
    ) -> StepResult:
        """Assembles a step from shared memory and the processes' answers.

        A process without results outside of shared memory is not in `extras_by_process`; `failed`
        has the environments of lost processes.
        """
        arrays, supervisor = self._arrays, self.supervisor
        rewards, terminateds, truncateds = (
            x.copy() for x in (arrays.rewards, arrays.terminateds, arrays.truncateds)
        )
        for index in failed:
            rewards[index], terminateds[index], truncateds[index] = 0.0, False, False
        infos: list[Any] = [{}] * self.num_envs
        ended, last_obs, recreated = [], [], []
        for number, extras in sorted(extras_by_process.items()):
            share = self._shares[number]
            infos[share.start : share.stop] = pickle.loads(extras.infos)
            failed |= {
                index: restore_error(serialized) for index, serialized in extras.failed.items()
            }
            recreated += extras.recreated
            if extras.final_obs is not None:
                ended.append(extras.final_obs[0])
                last_obs.append(flatten(self.observation_space, extras.final_obs[1]))
        final_obs = None
        if ended:
            joined = (np.concatenate(leaves) for leaves in zip(*last_obs, strict=True))
            final_obs = np.concatenate(ended), unflatten(self.observation_space, joined)
        for index in recreated:
            self._on_recreated(RemoteEnvironment(self, index), index)
        if supervisor.failures:
            if not failed:
                supervisor.on_step()
            for index in () if final_obs is None else final_obs[0].tolist():
                supervisor.on_episode_done(index)
        reset_only = np.isin(np.arange(self.num_envs), list(failed)) if failed else None
        results = rewards, terminateds, truncateds
        return StepResult(self._copy_obs(), *results, infos, reset_only, final_obs, failed or None)

    # -- checks, state and close --------------------------------------------------------------

    def check_new_env(self, steps: int, action_mask_key: str) -> None:
        """Plays a few steps of an environment made like the first one, in its process.

        Raises:
            EnvError: at the first fault.
        """
        self.ask_one(0, "check_new_env", steps, action_mask_key)

    def get_sub_environments(self) -> list[Any]:
        return [RemoteEnvironment(self, index) for index in range(self.num_envs)]

    def get_state(self) -> list[Any] | None:
        parts = self._ask_each("get_state")
        if any(states is None for states in parts):
            return None
        return [state for states in parts for state in states]

    def set_state(self, states: Sequence[Any]) -> None:
        self._ask_each("set_state", [[states[i] for i in share] for share in self._shares])

    def close(self) -> None:
        processes = self._processes
        for process in processes:
            process.send(pickle.dumps(("close",)))
        deadline = time.monotonic() + _CLOSE_SECONDS
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
            process.end()
        self._close_memory()


class RemoteEnvironment:
    """Proxy of an environment in another process.

    Its attributes are read and set there, and its methods called; arguments and values are copies.

    Args:
        environments: the adapter that it belongs to.
        index: index of the environment.
        is_unwrapped: whether the attributes are those of the environment without its wrappers.
    """

    def __init__(
        self, environments: SubprocessEnvAdapter, index: int, is_unwrapped: bool = False
    ) -> None:
        self.__dict__["_place"] = environments, index, is_unwrapped

    @property
    def unwrapped(self) -> RemoteEnvironment:
        """The environment without its wrappers."""
        environments, index, _ = self._place
        return RemoteEnvironment(environments, index, True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        environments, index, is_unwrapped = self._place
        is_method, value = environments.ask_one(index, "read", index, is_unwrapped, name)
        return functools.partial(self._call, name) if is_method else value

    def __setattr__(self, name: str, value: object) -> None:
        environments, index, is_unwrapped = self._place
        environments.ask_one(index, "write", index, is_unwrapped, name, value)

    def _call(self, name: str, *args: object, **kwargs: object) -> Any:
        environments, index, is_unwrapped = self._place
        return environments.ask_one(index, "call", index, is_unwrapped, name, args, kwargs)

    def __repr__(self) -> str:
        return f"<environment {self._place[1]} in another process>"
