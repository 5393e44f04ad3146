"""The session runtime, graph mode: one `tf.Graph` per Program, a `tf.compat.v1.Session` per policy.

The graph has its own network and optimizer, made by the same code as the eager ones, and the
Program's functions on v1 placeholders. Each session has its own values of the variables, so a
state is loaded only after it changed elsewhere. This module changes neither eager mode nor the
caller's default graph.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.eager_mode import EagerLock
from tfpolicies.program.devices import on_device, placed
from tfpolicies.program.functions import ProgramFunctions
from tfpolicies.program.outputs import ActLayout
from tfpolicies.program.runtimes.runtime import Rehearsals, Resident, Runtime, concrete
from tfpolicies.state import PolicyState
from tfpolicies.system import forks


def session_creator(session_args: Mapping[str, Any]) -> Callable[[], Any]:
    """Returns a function that creates a session on the default graph, the same for equal arguments.

    Policies with the same creator may reuse each other's sessions. These sessions share a separate
    thread pool: TensorFlow's global one would keep, for the whole process, the size that its first
    session requested.

    Args:
        session_args: fields of its `tf.compat.v1.ConfigProto`.

    Raises:
        ConfigError: if TensorFlow has no such field, or does not accept the value.
    """
    name = repr(sorted(session_args.items()))
    if name in _creators:
        return _creators[name]
    try:
        config = tf.compat.v1.ConfigProto(**session_args)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"tf_session_args={dict(session_args)!r} must be fields of tf.compat.v1.ConfigProto: "
            f"{error}"
        ) from error
    physical, logical = tf.config.list_physical_devices, tf.config.list_logical_devices
    if physical("GPU") and not logical("GPU"):  # hidden GPUs are also hidden from sessions
        config.device_count["GPU"] = 0
    threads = config.inter_op_parallelism_threads
    if threads > 0 and not (config.use_per_session_threads or config.session_inter_op_thread_pool):
        pool = f"tfpolicies/{threads}"
        config.session_inter_op_thread_pool.add(num_threads=threads, global_name=pool)
    return _creators.setdefault(name, lambda: tf.compat.v1.Session(config=config))


_creators: dict[str, Callable[[], Any]] = {}


@dataclasses.dataclass(eq=False)
class _GraphFunction:
    """One function in the graph of a Program: placeholders and results, made on first use."""

    graph: tf.Graph
    function: Any
    signature: Sequence[Any]
    device: str
    jit: bool
    options: Any = None
    _structure: Any = None

    def trace(self) -> None:
        if self.options is not None:
            return
        forks.require_tensorflow()
        with self.graph.as_default():
            given = tf.nest.map_structure(
                lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), self.signature
            )
            # A function orders its assignments, which a plain v1 graph does not.
            # XLA ignores devices, and refuses code that was optimised for one.
            run = self._run if self.jit else on_device(self._run, self.device)
            function = tf.function(run, jit_compile=self.jit or None, autograph=False)
            with placed(self.device):
                # Calling `function` itself would add plain operations after
                # `run_functions_eagerly(True)`.
                self._structure = function.get_concrete_function(*self.signature)(*given)
            self.options = _callable_options(
                tf.nest.flatten(given), tf.nest.flatten(self._structure)
            )

    def _run(self, *given: tf.Tensor) -> Any:
        found = self.function(*given)
        return tf.zeros([]) if found is None else found

    def nested(self, arrays: Sequence[np.ndarray]) -> Any:
        """Returns flat results in the structure that the function returns."""
        return tf.nest.pack_sequence_as(self._structure, arrays)


_MAX_IDLE = 2  # sessions per Program and creator


def _callable_options(feeds: Sequence[Any], fetches: Sequence[Any]) -> Any:
    options = config_pb2.CallableOptions()
    options.feed.extend(tensor.name for tensor in feeds)
    options.fetch.extend(tensor.name for tensor in fetches)
    options.run_options.inter_op_thread_pool = -1  # the caller's thread, without a thread switch
    return options


class _Callables(dict[_GraphFunction, Any]):
    """Callables of traced functions in one session, from flat arrays to flat arrays."""

    def __init__(self, session: tf.compat.v1.Session) -> None:
        self._session = session

    def __missing__(self, function: _GraphFunction) -> Any:
        # `make_callable`, which calls this, takes ten times as long per call.
        call = self[function] = self._session._make_callable_from_options(function.options)
        return call


class _OpenSession:
    """A session with its callables and the record of the state in its variables."""

    def __init__(self, session: tf.compat.v1.Session) -> None:
        self.session = session
        self.resident = Resident()
        self.rehearsals = Rehearsals()
        self.callables = _Callables(session)
        # At the end of the process they must be deleted before TensorFlow's modules.
        weakref.finalize(self, self.callables.clear)

    def close(self) -> None:
        self.callables.clear()
        self.resident.forget()
        self.session.close()


class _IdleSessions:
    """A pool of open sessions that are not in use, at most a few of each creator.

    Opening a session takes as long as a hundred actions, so the session of a policy that was paged
    out is reused by the next policy that is created or loaded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Callable[[], Any], list[_OpenSession]] = {}

    def take(self, create: Callable[[], Any]) -> _OpenSession | None:
        with self._lock:
            found = self._idle.get(create)
            taken = found.pop() if found else None
            if not found:
                self._idle.pop(create, None)
            return taken

    def put(self, create: Callable[[], Any], opened: _OpenSession) -> None:
        with self._lock:
            found = self._idle.setdefault(create, [])
            if len(found) < _MAX_IDLE:
                found.append(opened)
                return
        opened.close()

    def drop(self, create: Callable[[], Any]) -> None:
        with self._lock:
            found = self._idle.pop(create, [])
        for opened in found:
            opened.close()


@dataclasses.dataclass(eq=False)
class _PolicySession:
    """The session of one policy, opened on first use; `open` is None while it is not open."""

    graph: tf.Graph
    create: Callable[[], Any]
    idle: _IdleSessions
    open: _OpenSession | None = None

    def opened(self) -> _OpenSession:
        if self.open is None:
            self.open = self.idle.take(self.create) or self.create_one()
        return self.open

    def create_one(self) -> _OpenSession:
        """Opens a new session by the creator, without reusing an idle one."""
        forks.require_tensorflow()
        with self.graph.as_default():
            made = self.create()
        if getattr(made, "graph", None) is not self.graph:
            raise ConfigError(
                "session_creator must return a tf.compat.v1.Session on the default graph, "
                f"got {made!r}. For example: `lambda: tf.compat.v1.Session(config=...)`."
            )
        self.open = _OpenSession(made)
        return self.open

    def give_up(self) -> None:
        opened, self.open = self.open, None
        if opened is not None:
            self.idle.put(self.create, opened)

    def close(self) -> None:
        opened, self.open = self.open, None
        if opened is not None:
            opened.close()


class SessionRuntime(Runtime):
    """Runs the functions of one Program in its graph, in one session per state.

    Building a graph takes long and leaks two megabytes, so it is kept for a while after the
    Program's last policy is deleted, and the next policy with the same spec reuses it.

    Args:
        functions: the Program's functions over eager variables; the graph's are made like them.
        act_layout: the outputs of acting.
        lock: the Program's; held while the graph grows or a session is opened or loaded.

    Raises:
        ModelError: if the model is an instance that Keras cannot copy into the graph.
    """

    is_kept = True

    def __init__(self, functions: ProgramFunctions, act: ActLayout, lock: EagerLock) -> None:
        self._lock = lock
        self._graph = tf.Graph()
        if functions.spec.source.key[0] == "instance":
            raise ModelError(
                "this model cannot be copied into a graph, because Keras cannot rebuild it from "
                "its config; give the model as a factory f(observation_space, num_outputs) instead."
            )
        with self._graph.as_default():
            in_graph = ProgramFunctions.of(functions.spec)
        in_graph.traces = functions.traces
        super().__init__(in_graph, act)
        self._make_functions({})
        self._sessions: weakref.WeakKeyDictionary[PolicyState, _PolicySession] = (
            weakref.WeakKeyDictionary()
        )
        self._idle = _IdleSessions()

    def _made(
        self,
        function: Callable[..., Any],
        signature: Sequence[Any],
        *,
        acts: bool = False,
        jit: bool = False,
    ) -> _GraphFunction:
        return _GraphFunction(self._graph, function, signature, self.functions.device, jit=jit)

    # -- sessions -----------------------------------------------------------------------------

    def session(self, state: PolicyState) -> Any:
        """Returns the session of a state, with the state loaded."""
        with state.lock:
            self.load(state)
            return self._held(state).opened().session

    def open_sessions_with(self, state: PolicyState, create: Callable[[], Any]) -> None:
        held = _PolicySession(self._graph, create, self._idle)
        self._sessions[state] = held
        weakref.finalize(state, held.close).atexit = False

    def open(self, state: PolicyState) -> None:
        self._held(state).create_one()

    def release(self, state: PolicyState) -> None:
        """Returns the session of a state to the pool; results of updates stay in the state."""
        held = self._sessions.get(state)
        if held is not None:
            held.give_up()

    def drop_idle(self, create: Callable[[], Any]) -> None:
        self._idle.drop(create)

    def close(self, state: PolicyState) -> None:
        with state.lock:
            self._held(state).close()

    def _held(self, state: PolicyState) -> _PolicySession:
        if state not in self._sessions:
            self.open_sessions_with(state, session_creator({}))
        return self._sessions[state]

    # -- acting -------------------------------------------------------------------------------

    def _called(self, function: Any, state: PolicyState, arrays: Sequence[Any]) -> list[np.ndarray]:
        if forks.forked_from is not None:
            forks.require_tensorflow()
        held = self._sessions.get(state)
        opened = None if held is None else held.open
        if opened is None or not opened.resident.is_there(state):
            self.load(state)
            opened = self._held(state).opened()
        if function.options is None:
            with self._lock:
                function.trace()
        called: list[np.ndarray] = opened.callables[function](*arrays)
        return called

    # -- learning -----------------------------------------------------------------------------

    def inner(
        self, function: Callable[..., Any], signature: Sequence[Any], *, for_xla: bool
    ) -> Any:
        forks.require_tensorflow()
        on = function if for_xla else on_device(function, self.functions.device)
        with self._graph.as_default():
            return concrete(on, signature, for_xla=for_xla)

    def _rehearse(
        self,
        key: Hashable,
        function: Any,
        state: PolicyState,
        given: Sequence[Any],
        meanwhile: Callable[[], None] | None,
    ) -> None:
        held = self._held(state)
        opened, arrays = held.opened(), tf.nest.flatten([state.hyper.copy(), *given])
        try:
            is_new = opened.rehearsals.run(
                key, lambda: opened.callables[function](*arrays), meanwhile
            )
        except BaseException:
            held.open = None  # since the call may still change its variables
            raise
        if is_new:
            opened.resident.forget()
            self.begin_update(state)

    def _update(self, function: Any, state: PolicyState, given: Sequence[Any]) -> Any:
        function.trace()
        arrays = tf.nest.flatten([state.hyper, *given])
        return function.nested(self._held(state).opened().callables[function](*arrays))

    def load(self, state: PolicyState) -> None:
        forks.require_tensorflow()
        with self._lock:
            opened = self._held(state).opened()
            if not opened.resident.is_there(state):
                self._load.trace()
                opened.callables[self._load](*tf.nest.flatten(state.segments))
                opened.resident.note(state)

    def resident(self, state: PolicyState) -> Resident:
        return self._held(state).opened().resident
