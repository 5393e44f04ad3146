"""The program of a process that steps a share of a worker's environments, without TensorFlow.

It makes plain environments and steps them by `SyncEnvAdapter`, as a worker without such
processes does, so that episodes, seeds, errors and restarts are the same. Requests come by a
socket; observations, actions and results are in shared memory.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import logging
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium as gym

from tfpolicies.base.type_aliases import Structure
from tfpolicies.envs.env_checker import check_new_env
from tfpolicies.envs.env_factory import EnvContext, make_any_environments
from tfpolicies.envs.env_registry import ENVIRONMENTS, EnvSource
from tfpolicies.envs.fault_tolerance import EnvSupervisor, describe_slow_call
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.shared_arrays import SharedArrays, flatten, unflatten
from tfpolicies.envs.vector_adapters import StepResult, SyncEnvAdapter, VectorEnvAdapter
from tfpolicies.errors import EnvError, show_value
from tfpolicies.system.parent_process import end_with_parent

TRACE_SIGNAL = signal.SIGUSR1
"""Makes the process write its traceback, even if it hangs in native code."""


class MakeRequest(NamedTuple):
    """Request to make the environments of a process.

    Attributes:
        source: as `make_any_environments` takes it.
        creators: creators registered in the worker's process, by name.
        spec: of a name that is registered with Gymnasium; None for other sources.
        context: of the worker's first environment.
        checked: whether Gymnasium's checker watches environments made by name.
        may_be_none: whether a creator may return None, for no environment.
        num_envs: of all processes.
        num_processes: how many there are.
        log_level: records of lower levels are dropped.
    """

    source: Any
    creators: dict[str, Any]
    spec: gym.envs.registration.EnvSpec | None
    context: EnvContext
    checked: bool
    may_be_none: bool
    num_envs: int
    num_processes: int
    log_level: int


class MakeResult(NamedTuple):
    """Answer of a process that has made its environments.

    Attributes:
        observation_space: of each environment.
        action_space: of each environment.
        seconds: time taken.
        has_tensorflow: whether making them imported TensorFlow.
    """

    observation_space: gym.Space
    action_space: gym.Space
    seconds: float
    has_tensorflow: bool


class StepExtras(NamedTuple):
    """The parts of a step that are not in shared memory; indices are those of all environments.

    Attributes:
        infos: one dict per environment, pickled.
        reset_only: bool `[K]`; None: all K were transitions.
        final_obs: indices and last observations; None: no episode ended.
        failed: errors by index.
        recreated: indices of the environments that were re-created.
    """

    infos: bytes
    reset_only: Any
    final_obs: Any
    failed: dict[int, SerializedError]
    recreated: list[int]


class SerializedError(NamedTuple):
    """An exception as it is sent to another process.

    Attributes:
        pickled: the exception.
        text: its traceback as text.
        frames: the frames of the traceback.
    """

    pickled: bytes
    text: str
    frames: list[traceback.FrameSummary]

    @classmethod
    def from_exception(cls, error: BaseException) -> SerializedError:
        """Serializes an exception; one that cannot be pickled becomes an `EnvError`."""
        text = "".join(traceback.format_exception(error))
        frames = list(traceback.extract_tb(error.__traceback__))
        try:
            pickled = dumps(error)
            pickle.loads(pickled)
        except Exception:
            substitute = EnvError(f"{type(error).__name__}: {error}")
            substitute.__dict__["__notes__"] = getattr(error, "__notes__", [])
            pickled = pickle.dumps(substitute)
        return cls(pickled, text, frames)


def dumps(value: object) -> bytes:
    """Pickles a value; classes of scripts and closures are included.

    Raises:
        Exception: of many classes, if part of the value cannot be sent to another process.
    """
    try:
        return pickle.dumps(value)
    except Exception:
        import cloudpickle

        return cloudpickle.dumps(value)


def get_share(process: int, num_envs: int, num_processes: int) -> range:
    """Returns the indices of one process's environments; the first processes get the remainder.

    >>> [list(get_share(process, 5, 2)) for process in (0, 1)]
    [[0, 1, 2], [3, 4]]
    """
    size, remainder = divmod(num_envs, num_processes)
    start = process * size + min(process, remainder)
    return range(start, start + size + (process < remainder))


class _RecordingSupervisor(EnvSupervisor):
    """Records each call in shared memory, where the worker sees which call hangs or crashed."""

    def __init__(
        self, arrays: SharedArrays, process: int, timeout: float | None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._arrays = arrays
        self._process = process
        self._timeout = timeout

    def watch(self, index: int, method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._record, index, method, function)

    def _record(
        self, index: int, method: str, function: Callable[..., Any], *args: object, **kwargs: object
    ) -> Any:
        arrays, process = self._arrays, self._process
        arrays.call_env_index[process] = self.first_index + index
        arrays.call_is_step[process] = method == "step"
        arrays.call_start[process] = start = time.monotonic()
        result = function(*args, **kwargs)
        seconds = time.monotonic() - start
        if self._timeout is not None and seconds > self._timeout:
            raise EnvError(
                describe_slow_call(self.describe_call(index, method), seconds, self._timeout)
            )
        return result


class _LogCollector(logging.Handler):
    """Keeps log records until the next answer carries them to the worker."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelno, self.format(record)))

    def take(self) -> list[tuple[str, int, str]]:
        """Returns name, level and text of the records since the last call."""
        records, self.records = self.records, []
        return records


class EnvProcess:
    """Answers the requests of the worker that started this process.

    Args:
        process: index of the process within its worker.
        memory: descriptor of the shared memory.
    """

    def __init__(self, process: int, memory: int) -> None:
        self._process = process
        self._memory = memory
        self._recreated: list[int] = []

    def make(self, assignment: MakeRequest) -> MakeResult | None:
        """Makes the environments of this process; returns None if the creator returns None."""
        logging.getLogger().setLevel(assignment.log_level)
        for name, creator in assignment.creators.items():
            ENVIRONMENTS.add(name, creator)
        if assignment.spec is not None:
            gym.registry[assignment.spec.id] = assignment.spec
        num_envs, num_processes = assignment.num_envs, assignment.num_processes
        share = get_share(self._process, num_envs, num_processes)
        start_time = time.perf_counter()
        envs = make_any_environments(
            assignment.source,
            len(share),
            assignment.context.copy_with_overrides(vector_index=share.start),
            checked=assignment.checked,
            may_be_none=assignment.may_be_none,
            sequential=True,
        )
        seconds = time.perf_counter() - start_time
        if envs is None:
            return None
        if not isinstance(envs, SyncEnvAdapter):
            envs.close()
            raise EnvError(_describe_refusal(assignment.source, envs))
        self._envs, self._share = envs, share
        self._sizes = num_envs, num_processes
        spaces = envs.observation_space, envs.action_space
        return MakeResult(*spaces, seconds, "tensorflow" in sys.modules)

    def guard(
        self,
        recreates: bool,
        worker_index: int | None,
        timeout: float | None,
        max_restarts: int | None,
    ) -> None:
        """Maps the shared memory, and sets how failures of environments are handled.

        Args:
            recreates: whether environments are re-created after a failure.
            worker_index: for messages.
            timeout: time limit of a call; None: unlimited.
            max_restarts: see `EnvSupervisor`.
        """
        envs = self._envs
        self._arrays = SharedArrays(
            self._memory, envs.observation_space, envs.action_space, *self._sizes
        )
        start, stop = self._share.start, self._share.stop
        self._obs_views = [leaf[start:stop] for leaf in self._arrays.obs]
        self._actions = [leaf[start:stop] for leaf in self._arrays.actions]
        results = self._arrays.rewards, self._arrays.terminateds, self._arrays.truncateds
        self._rewards, self._terminateds, self._truncateds = (x[start:stop] for x in results)
        supervisor = _RecordingSupervisor(
            self._arrays,
            self._process,
            timeout,
            make=self._recreate_env if recreates else None,
            worker_index=worker_index,
            max_restarts=max_restarts,
            on_recreated=lambda env, index: self._recreated.append(start + index),
            first_index=start,
        )
        envs.set_supervisor(supervisor)

    def _recreate_env(self, index: int) -> Any:
        return self._envs.env_factory(index)  # type: ignore[misc]

    def reset(self, seeds: Sequence[int] | None) -> list[int]:
        """Starts new episodes; returns the indices of environments that were re-created."""
        self._write(self._envs.reset(seeds))
        recreated, self._recreated = self._recreated, []
        return recreated

    def _write(self, obs: Structure) -> None:
        leaves = flatten(self._envs.observation_space, obs)
        for view, leaf in zip(self._obs_views, leaves, strict=True):
            view[...] = leaf

    def step(self) -> StepExtras | None:
        """Steps by the actions in shared memory; returns None if all results are there."""
        step = self._envs.step(unflatten(self._envs.action_space, iter(self._actions)))
        self._write(step.obs)
        self._rewards[...] = step.rewards
        self._terminateds[...] = step.terminateds
        self._truncateds[...] = step.truncateds
        is_plain = step.final_obs is None and step.reset_only is None and not self._recreated
        return None if is_plain and not any(step.infos) else self._make_extras(step)

    def _make_extras(self, step: StepResult) -> StepExtras:
        start = self._share.start
        recreated, self._recreated = self._recreated, []
        final_obs = (
            step.final_obs
            if step.final_obs is None
            else (step.final_obs[0] + start, step.final_obs[1])
        )
        failed = {
            start + i: SerializedError.from_exception(error)
            for i, error in (step.failed or {}).items()
        }
        return StepExtras(
            self._pack_infos(step.infos), step.reset_only, final_obs, failed, recreated
        )

    def _pack_infos(self, infos: Sequence[Any]) -> bytes:
        try:
            return dumps(list(infos))
        except Exception as error:
            share = self._share
            raise EnvError(
                f"An info of environments {share.start} to {share.stop - 1} cannot be sent to the "
                f"worker's process ({error}): {show_value(list(infos))}. Put numbers, texts and "
                "arrays into infos; or leave env_processes out."
            ) from error

    def get_state(self) -> list[Any] | None:
        return self._envs.get_state()

    def set_state(self, states: Sequence[Any]) -> None:
        """Restores a result of `get_state`."""
        self._envs.set_state(states)

    def check_new_env(self, steps: int, action_mask_key: str) -> None:
        """Plays a few steps of an environment made like the first one; see `check_new_env`."""
        check_new_env(self._recreate_env, steps, action_mask_key)

    def read(self, index: int, is_unwrapped: bool, name: str) -> tuple[bool, Any]:
        """Returns whether an attribute of an environment is a method, and its value if not."""
        value = getattr(self._get_env(index, is_unwrapped), name)
        return (True, None) if callable(value) else (False, _check_picklable(name, value))

    def write(self, index: int, is_unwrapped: bool, name: str, value: object) -> None:
        """Sets an attribute of an environment."""
        setattr(self._get_env(index, is_unwrapped), name, value)

    def call(self, index: int, is_unwrapped: bool, name: str, args: tuple, kwargs: dict) -> Any:
        method = getattr(self._get_env(index, is_unwrapped), name)
        return _check_picklable(f"{name}(...)", method(*args, **kwargs))

    def _get_env(self, index: int, is_unwrapped: bool) -> Any:
        env = self._envs.envs[index - self._share.start]
        return env.unwrapped if is_unwrapped else env

    def close(self) -> None:
        if hasattr(self, "_envs"):
            self._envs.close()


def _describe_refusal(source: EnvSource, envs: VectorEnvAdapter | MultiAgentEnvAdapter) -> str:
    if isinstance(envs, MultiAgentEnvAdapter):
        return (
            f"{source!r} has several agents, but env_processes supports environments with one "
            "agent. Leave it out; num_rollout_workers steps them in other processes, by Ray."
        )
    return (
        f"{source!r} is a vector environment, so its environments cannot be spread over "
        "processes. Leave env_processes out, or give a creator of single environments."
    )


def _check_picklable(name: str, value: object) -> Any:
    try:
        dumps(value)
    except Exception as error:
        raise EnvError(
            f"The value of {name} of an environment cannot be sent to the worker's process: "
            f"{show_value(value)} ({error}). Read its parts instead, such as numbers and arrays."
        ) from error
    return value


def serve(process: int, requests: int, memory: int, trace: int) -> None:
    """Answers requests until the worker closes or ends. The process runs nothing else.

    Args:
        process: index of the process within its worker.
        requests: descriptor of the socket.
        memory: descriptor of the shared memory.
        trace: descriptor of the file for tracebacks of crashes and of calls that hang.
    """
    end_with_parent()
    atexit.register(os.killpg, os.getpgrp(), signal.SIGKILL)  # after the environments' own
    faulthandler.enable(trace)
    faulthandler.register(TRACE_SIGNAL, trace)
    if process:
        warnings.simplefilter("ignore")  # the first process emits the same warnings
    records = _LogCollector()
    logging.getLogger().addHandler(records)
    env_process, connection = EnvProcess(process, memory), Connection(requests)
    method = ""
    while method != "close":
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            method, *args = _load(request)
            answer = True, getattr(env_process, method)(*args), records.take()
            reply = dumps(answer)
        except (Exception, SystemExit) as error:
            reply = pickle.dumps((False, SerializedError.from_exception(error), records.take()))
        connection.send_bytes(reply)


def _load(request: bytes) -> Any:
    try:
        return pickle.loads(request)
    except Exception as error:
        raise EnvError(
            f"The environment cannot be loaded in its process: {type(error).__name__}: {error}. "
            "Put its class into a module that Python finds and that can be imported by itself; "
            "PYTHONPATH=FOLDER adds a folder."
        ) from error
