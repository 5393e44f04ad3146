"""Environments in processes of their own, which step at the same time.

Each process is a new interpreter, not a fork: it neither has TensorFlow nor runs the user's script.
Classes and functions of a script are sent to it by cloudpickle. It steps its share of environments
by `env_process.py`; what a step gives is put together here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from tfpolicies.envs.env_process import TRACE_SIGNAL, Assignment, Made, Rest, get_share
from tfpolicies.envs.making import (
    EnvContext,
    check_process_count,
    gym_spec,
    is_import_path,
    is_instance,
    require_alone,
)
from tfpolicies.envs.registry import ENVIRONMENTS
from tfpolicies.envs.repairs import Repairs
from tfpolicies.envs.shared_arrays import SharedArrays, flatten, make_unnamed_file, unflatten
from tfpolicies.envs.vector import Environments, Step, require_same_spaces
from tfpolicies.errors import EnvError, show_value

logger = logging.getLogger("tfpolicies")

_PROGRAM = (
    "import sys; process, requests, memory, trace = map(int, sys.argv[1:5]); "
    "sys.path[:] = sys.argv[5:]; from tfpolicies.envs.env_process import serve; "
    "serve(process, requests, memory, trace)"
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables of numerical libraries, 1 unless the user sets them: there are many processes."""

_LOOK_SECONDS = 1.0  # between two looks whether a silent process has ended
_GRACE = 5.0  # seconds at most beyond env_step_timeout_s, for calls that return by themselves
_CLOSE_SECONDS = 5.0  # for processes that are to end by themselves
_TRACE_BYTES = 100_000  # that are read of a traceback
_TRACE_SECONDS = 0.5  # for a process that is to write where it hangs


def make_process_environments(
    source: Any,
    num_envs: int,
    num_processes: int,
    context: EnvContext,
    on_created: Callable[[Any, EnvContext, int], None] | None = None,
    *,
    checked: bool = True,
    may_be_none: bool = False,
) -> ProcessEnvironments | None:
    """Makes environments with one agent in processes of their own.

    Args:
        source: as `make_any_environments` takes it, but for environments that are given themselves
            and those that step together.
        num_envs: how many in all.
        num_processes: over how many processes they are spread.
        context: of the first one.
        on_created: called with a `RemoteEnvironment`, its context and its index.
        checked: whether Gymnasium's checker watches environments made by name.
        may_be_none: whether a creator may give None, for no environment.

    Returns:
        The environments; None if the creator gave None and may do so.

    Raises:
        ConfigError: if there are more processes than environments.
        EnvError: if the environments cannot be sent to other processes, or not be made there.
        Exception: what a constructor raises.
    """
    check_process_count(num_envs, num_processes)
    if is_instance(source):
        require_alone(source, 1, 0, evaluates=False, num_processes=num_processes)
    creator = ENVIRONMENTS.find(source)
    by_name = creator is None and isinstance(source, str) and not is_import_path(source)
    assignment = {
        "source": source,
        "creators": {} if creator is None else {source: creator},
        "spec": gym_spec(source) if by_name else None,
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
    """Returns the request to make environments.

    Raises:
        EnvError: if part of it cannot be sent to another process.
    """
    try:
        return cloudpickle.dumps(("make", Assignment(**assignment)))
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


class RemoteTraceback(Exception):
    """The traceback of an error that was raised in the process of an environment; its cause.

    Args:
        text: the traceback.
        frames: its frames.

    Attributes:
        frames: as given.
    """

    def __init__(self, text: str, frames: Sequence[traceback.FrameSummary]) -> None:
        super().__init__(f"\n{text}")
        self.frames = frames


class _LostError(Exception):
    """The process has ended.

    Args:
        how: it ended; or what it was ended for.
        trace: where it was, as text; "" if that is not known.
    """

    def __init__(self, how: str, trace: str) -> None:
        super().__init__(how)
        self.trace = trace


class _Process:
    """A process that steps a share of environments, as its worker sees it.

    Args:
        number: which one.
        memory: the file of the shared memory.
    """

    def __init__(self, number: int, memory: Any) -> None:
        self.number = number
        self.outstanding = 0  # answers that were not received yet
        self._lost: _LostError | None = None
        ours, theirs = socket.socketpair()
        self._trace = make_unnamed_file()
        files = [file.fileno() for file in (theirs, memory, self._trace)]
        words = map(str, (number, *files, *sys.path))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *words],
                stdin=subprocess.PIPE,  # closed when this process ends: see `_end_with_worker`
                pass_fds=files,
                env={**dict.fromkeys(_ONE_THREAD, "1"), **os.environ},
                start_new_session=True,  # Ctrl-C is for this process
            )
        self._connection = Connection(ours.detach())
        self._end = weakref.finalize(
            self, _end_process, self._process, self._connection, self._trace, os.getpid()
        )

    def fileno(self) -> int:
        """Returns the descriptor by which answers come."""
        return self._connection.fileno()

    def send(self, request: bytes) -> None:
        """Sends a request, if the process is still there; `receive` raises if it is not."""
        self.outstanding += 1
        if self._lost is None:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(request)

    def receive(self) -> Any:
        """Returns an answer.

        Raises:
            _LostError: if the process has ended.
            Exception: what was raised there.
        """
        self.outstanding -= 1
        if self._lost is not None:
            raise self._lost
        try:
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self.end() from error
        is_result, result, records = pickle.loads(answer)
        for name, level, text in records:
            logging.getLogger(name).log(level, "%s", text)
        if is_result:
            return result
        raise restore_error(result)

    def has_ended(self) -> bool:
        """Whether the process has ended, also where others hold its end of the socket."""
        if hasattr(os, "waitid"):  # it leaves the process's number taken
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, how) is not None
        return self._process.poll() is not None

    def is_lost(self) -> bool:
        """Whether it is known that the process has ended."""
        return self._lost is not None

    def end(self, why: str = "") -> _LostError:
        """Ends the process and those that it started.

        Args:
            why: a process is ended that still runs; "": it has ended by itself.

        Returns:
            What `receive` raises from now on.
        """
        if self._lost is None:
            if why:
                self._process.send_signal(TRACE_SIGNAL)
                time.sleep(_TRACE_SECONDS)
            trace = os.pread(self._trace.fileno(), _TRACE_BYTES, 0).decode(errors="replace")
            self._end()
            self._lost = _LostError(why or _describe_end(self._process.returncode), trace)
        return self._lost

    def close(self) -> None:
        """Ends the process."""
        self.end()

    def wait(self, seconds: float) -> None:
        """Waits until the process has ended by itself."""
        deadline = time.monotonic() + seconds
        while self._lost is None and not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.002)


def _describe_end(code: int) -> str:
    """Returns how a process with a return code ended.

    >>> _describe_end(-11), _describe_end(3)
    ('SIGSEGV', 'exit status 3')
    """
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _end_process(
    process: subprocess.Popen[bytes], connection: Connection, trace: Any, owner: int
) -> None:
    if os.getpid() != owner:  # a fork of the process that started it
        return
    if process.returncode is None:  # so its number has not been given to another one
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()  # type: ignore[union-attr]
    connection.close()
    trace.close()
    process.wait()


def restore_error(sent: Any) -> Exception:
    """Returns an exception that was sent by a process, caused by its traceback there."""
    try:
        error = pickle.loads(sent.pickled)
    except Exception:
        error = EnvError(sent.text.rstrip().rpartition("\n")[2])
    error.__cause__ = RemoteTraceback(sent.text, sent.frames)
    return error


def _iterate_ready(
    processes: Iterable[_Process], seconds: float, look: Callable[[_Process], None]
) -> Iterator[_Process]:
    """Yields each process as soon as it has answered, or is lost.

    Args:
        processes: have been sent a request each.
        seconds: between two looks at those that are silent.
        look: called with each of these; it may end them.
    """
    poll, waiting = select.poll(), {}
    for process in processes:
        if process.is_lost():
            yield process
            continue
        waiting[process.fileno()] = process
        poll.register(process.fileno(), select.POLLIN)
    while waiting:
        ready = [file for file, _ in poll.poll(1000 * seconds)]
        for file in ready:
            poll.unregister(file)
            yield waiting.pop(file)
        for file, process in [] if ready else list(waiting.items()):
            look(process)
            if process.is_lost():
                poll.unregister(file)
                yield waiting.pop(file)


def _start(
    assignment: bytes, num_envs: int, num_processes: int, worker_index: int
) -> ProcessEnvironments | None:
    """Starts processes and has them make their environments; None if the creator gives none.

    Raises:
        EnvError: if the spaces of the environments differ, or a process ends.
        Exception: what a constructor raises.
    """
    memory = make_unnamed_file()
    processes = [_Process(number, memory) for number in range(num_processes)]
    try:
        for process in processes:
            process.send(assignment)
        made: dict[int, Made | None] = {}
        for process in _iterate_ready(processes, _LOOK_SECONDS, _end_if_dead):
            share = get_share(process.number, num_envs, num_processes)
            made[process.number] = _receive_made(process, share, worker_index)
        answers = [made[number] for number in range(num_processes)]
        sound = [answer for answer in answers if answer is not None]
        if len(sound) == num_processes:
            envs = ProcessEnvironments(assignment, processes, sound, memory, num_envs, worker_index)
            _warn_of_tensorflow(sound)
            return envs
    except BaseException:
        _end_all(processes)
        memory.close()
        raise
    _end_all(processes)
    memory.close()
    return None


def _end_all(processes: Iterable[_Process]) -> None:
    for process in processes:
        process.end()


def _end_if_dead(process: _Process) -> None:
    if process.has_ended():
        process.end()


def _receive_made(process: _Process, share: range, worker_index: int) -> Made | None:
    """Returns what a process has made.

    Raises:
        EnvError: if it has ended.
        Exception: what a constructor raises.
    """
    place = f"{_name_share(share)} of worker {worker_index}"
    try:
        made: Made | None = process.receive()
    except _LostError as error:
        raise EnvError(
            f"The process that was to make {place} has ended ({error}).{_advise(error)}"
        ) from error
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(f"It was raised in the process that was to make {place}.")
        raise
    return made


def _name_share(share: range) -> str:
    """Returns how messages call the environments of a process.

    >>> _name_share(range(3, 4)), _name_share(range(4, 8))
    ('environment 3', 'environments 4 to 7')
    """
    if len(share) == 1:
        return f"environment {share.start}"
    return f"environments {share.start} to {share.stop - 1}"


def _advise(lost: _LostError) -> str:
    is_killed = str(lost) == "SIGKILL"
    return " The system does so where memory runs out: try fewer processes." if is_killed else ""


def _warn_of_tensorflow(made: Sequence[Made]) -> None:
    if any(answer.has_tensorflow for answer in made):
        logger.warning(
            "The processes of environments import TensorFlow, which takes seconds and some hundred "
            "MB in each of them: the module of the environment's class does. Put that class into a "
            "module that does not."
        )


_STEP = pickle.dumps(("step",))


class ProcessEnvironments(Environments):
    """N environments with one agent that are spread over P processes.

    Args:
        assignment: the request that makes a process make its environments.
        processes: have made them.
        made: what each of them has.
        memory: the file of the shared memory, which this object closes.
        num_envs: N.
        worker_index: of the worker, for messages.

    Attributes:
        seconds_to_make: that making all environments took, added up over the processes.

    Raises:
        EnvError: if their spaces differ, or cannot be shared.
    """

    def __init__(
        self,
        assignment: bytes,
        processes: list[_Process],
        made: Sequence[Made],
        memory: Any,
        num_envs: int,
        worker_index: int,
    ) -> None:
        self.num_envs = num_envs
        self.observation_space = made[0].observation_space
        self.action_space = made[0].action_space
        self.seconds_to_make = sum(answer.seconds for answer in made)
        self.maker = self._make_process
        self._assignment = assignment
        self._processes = processes
        self._memory = memory
        self._worker_index = worker_index
        count = len(processes)
        self._shares = [get_share(number, num_envs, count) for number in range(count)]
        for answer, share in zip(made, self._shares, strict=True):
            require_same_spaces(share.start, answer, self)
        spaces = self.observation_space, self.action_space
        self._arrays = SharedArrays(memory.fileno(), *spaces, num_envs, count, is_new=True)
        self._close_memory = weakref.finalize(self, memory.close)
        self._limit: float | None = None
        self._on_made: Callable[[Any, int], None] = lambda env, index: None
        self.guard(Repairs(worker_index=worker_index))

    def guard(self, repairs: Repairs) -> None:
        super().guard(repairs)
        self._limit = None if repairs.watchdog is None else repairs.watchdog.limit
        self._on_made = repairs.on_made
        repairs.on_made = self._announce
        self._ask_each("guard", *([x] * len(self._processes) for x in self._get_guard()))

    def _get_guard(self) -> tuple[Any, ...]:
        """Returns the arguments of `EnvProcess.guard`."""
        repairs = self._repairs
        return repairs.make is not None, repairs.worker_index, self._limit, repairs.limit

    # -- processes ----------------------------------------------------------------------------

    def _find_process(self, index: int) -> _Process:
        """Returns the process of an environment."""
        return next(x for x, own in zip(self._processes, self._shares, strict=True) if index in own)

    def _make_process(self, index: int) -> _Process:
        """Starts another process in the place of that of an environment; returns it."""
        number = self._find_process(index).number
        self._processes[number].end()
        process = self._processes[number] = _Process(number, self._memory)
        process.send(self._assignment)
        share = self._shares[number]
        made = _receive_made(process, share, self._worker_index)
        require_same_spaces(share.start, made, self)
        self._ask(process, "guard", *self._get_guard())
        return process

    def _announce(self, process: _Process, index: int) -> None:
        """Notifies the worker of all environments of a process that was started again."""
        del index
        for i in self._shares[process.number]:
            self._on_made(RemoteEnvironment(self, i), i)

    def _send(
        self, processes: Sequence[_Process], requests: Sequence[bytes], *, is_limited: bool = False
    ) -> Iterator[_Process]:
        """Sends each process a request; yields the processes as they have answered.

        Args:
            processes: the processes.
            requests: one for each.
            is_limited: whether `env_step_timeout_s` is about these requests.
        """
        self._drop_answers(processes)
        arrays = self._arrays
        for process, request in zip(processes, requests, strict=True):
            arrays.since[process.number] = time.monotonic() if is_limited else math.inf
            arrays.index[process.number] = -1
            process.send(request)
        return _iterate_ready(list(processes), self._get_look_seconds(), self._look)

    def _get_look_seconds(self) -> float:
        return _LOOK_SECONDS if self._limit is None else min(_LOOK_SECONDS, self._limit / 4)

    def _drop_answers(self, processes: Iterable[_Process]) -> None:
        """Receives answers to earlier requests, which an error or a signal has left there."""
        late = [process for process in processes if process.outstanding]
        for process in _iterate_ready(late, self._get_look_seconds(), self._look):
            while process.outstanding:
                with contextlib.suppress(Exception):
                    process.receive()

    def _ask(self, process: _Process, method: str, *args: Any, is_limited: bool = False) -> Any:
        """Returns the answer of one process.

        Raises:
            _LostError: if the process has ended.
            Exception: what was raised there.
        """
        request = cloudpickle.dumps((method, *args))
        for answered in self._send([process], [request], is_limited=is_limited):
            return answered.receive()

    def _look(self, process: _Process) -> None:
        """Ends a process that takes too long; and notices one that has ended."""
        _end_if_dead(process)
        if process.is_lost() or self._limit is None:
            return
        seconds = time.monotonic() - float(self._arrays.since[process.number])
        if seconds > self._limit + min(self._limit, _GRACE):
            process.end(f"it hung for {seconds:.1f} seconds; env_step_timeout_s={self._limit:g}")

    def _explain(self, process: _Process, lost: _LostError, method: str) -> tuple[int, EnvError]:
        """Returns which environment a process was lost in, and an error that says so.

        Args:
            process: the process.
            lost: how.
            method: of the request.
        """
        number = process.number
        share, index = self._shares[number], int(self._arrays.index[number])
        if index >= 0:
            method = "step" if self._arrays.is_step[number] else "reset"
        index = max(index, share.start)
        message = (
            f"The process of {_name_share(share)} of worker {self._worker_index} has ended in "
            f"`{method}` of environment {index}: {lost}.{_advise(lost)}"
        )
        if lost.trace:
            logger.error("%s It was here:\n%s", message, lost.trace)
        return index, EnvError(message)

    def _receive(self, process: _Process, method: str, broken: dict[int, Exception]) -> Any:
        """Returns a process's answer; None if it was lost and another one is in its place.

        Args:
            process: has answered, or is lost.
            method: of the request.
            broken: gets the environments of a lost process.

        Raises:
            EnvError: if it was lost, and environments that break are not made again.
            Exception: what was raised there.
        """
        try:
            return process.receive()
        except _LostError as lost:
            index, error = self._explain(process, lost, method)
            reason = self._repairs.broke(index, method, error)
            self._repairs.renewed(index, process, self._start_episodes)
            broken.update(dict.fromkeys(self._shares[process.number], reason))
            return None

    def _start_episodes(self, process: _Process) -> None:
        self._ask(process, "reset", None, is_limited=True)

    def _ask_each(self, method: str, *args: Any) -> list[Any]:
        """Returns the answers of all processes to a request that does not step.

        Args:
            method: what is called there.
            *args: each a list of arguments, one for each process.

        Raises:
            EnvError: if a process was lost.
            Exception: what was raised there.
        """
        requests = [cloudpickle.dumps((method, *own)) for own in zip(*args, strict=True)]
        requests = requests or [pickle.dumps((method,))] * len(self._processes)
        answers: dict[int, Any] = {}
        for process in self._send(self._processes, requests):
            try:
                answers[process.number] = process.receive()
            except _LostError as lost:
                raise self._explain(process, lost, method)[1] from lost
        return [answers[number] for number in range(len(self._processes))]

    def ask_one(self, index: int, method: str, *args: Any) -> Any:
        """Returns the answer of the process of one environment.

        Raises:
            EnvError: if the process was lost.
            Exception: what was raised there.
        """
        process = self._find_process(index)
        try:
            return self._ask(process, method, *args)
        except _LostError as lost:
            raise self._explain(process, lost, method)[1] from lost

    # -- episodes -----------------------------------------------------------------------------

    def reset(self, seeds: Sequence[int] | None) -> Any:
        shares = [None if seeds is None else [seeds[i] for i in share] for share in self._shares]
        requests = [pickle.dumps(("reset", own)) for own in shares]
        for process in self._send(self._processes, requests, is_limited=True):
            remade = self._receive(process, "reset", {})
            for index in remade or ():
                self._on_made(RemoteEnvironment(self, index), index)
        return self._copy_obs()

    def _copy_obs(self) -> Any:
        return unflatten(self.observation_space, (leaf.copy() for leaf in self._arrays.obs))

    def step(self, actions: Any) -> Step:
        leaves = flatten(self.action_space, actions)
        for place, leaf in zip(self._arrays.actions, leaves, strict=True):
            place[...] = leaf
        broken: dict[int, Exception] = {}
        rests: dict[int, Rest] = {}
        requests = [_STEP] * len(self._processes)
        for process in self._send(self._processes, requests, is_limited=True):
            rest = self._receive(process, "step", broken)
            if rest is not None:
                rests[process.number] = rest
        return self._put_together(rests, broken)

    def _put_together(self, rests: Mapping[int, Rest], broken: dict[int, Exception]) -> Step:
        """Returns a step.

        Args:
            rests: what is not in shared memory, by process; those that are missing have nothing.
            broken: environments whose process was lost.
        """
        arrays, repairs = self._arrays, self._repairs
        rewards, terminateds, truncateds = (
            x.copy() for x in (arrays.rewards, arrays.terminateds, arrays.truncateds)
        )
        for index in broken:
            rewards[index], terminateds[index], truncateds[index] = 0.0, False, False
        infos: list[Any] = [{}] * self.num_envs
        ended, last, remade = [], [], []
        for number, rest in sorted(rests.items()):
            share = self._shares[number]
            infos[share.start : share.stop] = pickle.loads(rest.infos)
            broken |= {index: restore_error(sent) for index, sent in rest.broken.items()}
            remade += rest.remade
            if rest.final is not None:
                ended.append(rest.final[0])
                last.append(flatten(self.observation_space, rest.final[1]))
        final = None
        if ended:
            joined = (np.concatenate(leaves) for leaves in zip(*last, strict=True))
            final = np.concatenate(ended), unflatten(self.observation_space, joined)
        for index in remade:
            self._on_made(RemoteEnvironment(self, index), index)
        if repairs.breaks:
            if not broken:
                repairs.stepped()
            for index in () if final is None else final[0].tolist():
                repairs.worked(index)
        dead = np.isin(np.arange(self.num_envs), list(broken)) if broken else None
        results = rewards, terminateds, truncateds
        return Step(self._copy_obs(), *results, infos, dead, final, broken or None)

    # -- everything else ----------------------------------------------------------------------

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
    """An environment in another process, as callers see it that want to talk to it.

    Its attributes are read and set there, and its methods called; arguments and values are copies.

    Args:
        environments: whose one it is.
        index: which one.
        is_unwrapped: whether the attributes are those of the environment without its wrappers.
    """

    def __init__(
        self, environments: ProcessEnvironments, index: int, is_unwrapped: bool = False
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

    def __setattr__(self, name: str, value: Any) -> None:
        environments, index, is_unwrapped = self._place
        environments.ask_one(index, "write", index, is_unwrapped, name, value)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        environments, index, is_unwrapped = self._place
        return environments.ask_one(index, "call", index, is_unwrapped, name, args, kwargs)

    def __repr__(self) -> str:
        return f"<environment {self._place[1]} in another process>"
