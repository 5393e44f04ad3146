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
from tfpolicies.program.act_outputs import ActOutputLayout
from tfpolicies.program.devices import device_scope, pin_to_device
from tfpolicies.program.functions import ProgramFunctions
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.runtimes.runtime import (
    ResidentState,
    TFRuntime,
    WarmUpCalls,
    trace_concrete,
)
from tfpolicies.system import fork_guard


def get_session_creator(session_args: Mapping[str, Any]) -> Callable[[], Any]:
    """Returns a function that creates a session on the default graph, the same for equal arguments.

    Policies with the same creator may reuse each other's sessions. These sessions share a separate
    thread pool: TensorFlow's global one would keep, for the whole process, the size that its first
    session requested.

    Args:
        session_args: fields of its `tf.compat.v1.ConfigProto`.
    """
    key = repr(sorted(session_args.items()))
    if key in _creators:
        return _creators[key]
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
    return _creators.setdefault(key, lambda: tf.compat.v1.Session(config=config))


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
        fork_guard.check_tensorflow_survived_fork()
        with self.graph.as_default():
            placeholders = tf.nest.map_structure(
                lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), self.signature
            )
            # A function orders its assignments, which a plain v1 graph does not.
            # XLA ignores devices, and refuses code that was optimised for one.
            run = self._run if self.jit else pin_to_device(self._run, self.device)
            function = tf.function(run, jit_compile=self.jit or None, autograph=False)
            with device_scope(self.device):
                # Calling `function` itself would add plain operations after
                # `run_functions_eagerly(True)`.
                self._structure = function.get_concrete_function(*self.signature)(*placeholders)
            self.options = _make_callable_options(
                tf.nest.flatten(placeholders), tf.nest.flatten(self._structure)
            )

    def _run(self, *inputs: tf.Tensor) -> Any:
        result = self.function(*inputs)
        return tf.zeros([]) if result is None else result

    def restore_structure(self, arrays: Sequence[np.ndarray]) -> Any:
        return tf.nest.pack_sequence_as(self._structure, arrays)


_MAX_IDLE = 2  # sessions per Program and creator


def _make_callable_options(feeds: Sequence[Any], fetches: Sequence[Any]) -> Any:
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
        self.resident_state = ResidentState()
        self.warm_up_calls = WarmUpCalls()
        self.callables = _Callables(session)
        # At the end of the process they must be deleted before TensorFlow's modules.
        weakref.finalize(self, self.callables.clear)

    def close(self) -> None:
        self.callables.clear()
        self.resident_state.clear()
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
            sessions = self._idle.get(create)
            session = sessions.pop() if sessions else None
            if not sessions:
                self._idle.pop(create, None)
            return session

    def put(self, create: Callable[[], Any], session: _OpenSession) -> None:
        with self._lock:
            sessions = self._idle.setdefault(create, [])
            if len(sessions) < _MAX_IDLE:
                sessions.append(session)
                return
        session.close()

    def close_all(self, create: Callable[[], Any]) -> None:
        with self._lock:
            sessions = self._idle.pop(create, [])
        for session in sessions:
            session.close()


@dataclasses.dataclass(eq=False)
class _PolicySession:
    """The session of one policy, opened on first use; `open` is None while it is not open."""

    graph: tf.Graph
    create: Callable[[], Any]
    idle: _IdleSessions
    open_session: _OpenSession | None = None

    def get_or_open(self) -> _OpenSession:
        if self.open_session is None:
            self.open_session = self.idle.take(self.create) or self.open_new()
        return self.open_session

    def open_new(self) -> _OpenSession:
        """Opens a new session by the creator, without reusing an idle one."""
        fork_guard.check_tensorflow_survived_fork()
        with self.graph.as_default():
            session = self.create()
        if getattr(session, "graph", None) is not self.graph:
            raise ConfigError(
                "session_creator must return a tf.compat.v1.Session on the default graph, "
                f"got {session!r}. For example: `lambda: tf.compat.v1.Session(config=...)`."
            )
        self.open_session = _OpenSession(session)
        return self.open_session

    def release(self) -> None:
        session, self.open_session = self.open_session, None
        if session is not None:
            self.idle.put(self.create, session)

    def close(self) -> None:
        session, self.open_session = self.open_session, None
        if session is not None:
            session.close()


class SessionRuntime(TFRuntime):
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

    outlives_policies = True

    def __init__(
        self, functions: ProgramFunctions, act_layout: ActOutputLayout, lock: EagerLock
    ) -> None:
        self._lock = lock
        self._graph = tf.Graph()
        if functions.spec.source.key[0] == "instance":
            raise ModelError(
                "this model cannot be copied into a graph, because Keras cannot rebuild it from "
                "its config; give the model as a factory f(observation_space, num_outputs) instead."
            )
        with self._graph.as_default():
            graph_functions = ProgramFunctions.build(functions.spec)
        graph_functions.traces = functions.traces
        super().__init__(graph_functions, act_layout)
        self._make_functions({})
        self._sessions: weakref.WeakKeyDictionary[PolicyState, _PolicySession] = (
            weakref.WeakKeyDictionary()
        )
        self._idle = _IdleSessions()

    def _prepare(
        self,
        function: Callable[..., Any],
        signature: Sequence[Any],
        *,
        acts: bool = False,
        jit: bool = False,
    ) -> _GraphFunction:
        return _GraphFunction(self._graph, function, signature, self.functions.device, jit=jit)

    # -- sessions -----------------------------------------------------------------------------

    def get_session(self, state: PolicyState) -> Any:
        """Returns the session of a state, with the state loaded."""
        with state.lock:
            self.load(state)
            return self._get_policy_session(state).get_or_open().session

    def set_session_creator(self, state: PolicyState, create: Callable[[], Any]) -> None:
        policy_session = _PolicySession(self._graph, create, self._idle)
        self._sessions[state] = policy_session
        weakref.finalize(state, policy_session.close).atexit = False

    def open_session(self, state: PolicyState) -> None:
        self._get_policy_session(state).open_new()

    def release_session(self, state: PolicyState) -> None:
        """Returns the session of a state to the pool; results of updates stay in the state."""
        policy_session = self._sessions.get(state)
        if policy_session is not None:
            policy_session.release()

    def close_idle_sessions(self, create: Callable[[], Any]) -> None:
        self._idle.close_all(create)

    def close_session(self, state: PolicyState) -> None:
        with state.lock:
            self._get_policy_session(state).close()

    def _get_policy_session(self, state: PolicyState) -> _PolicySession:
        if state not in self._sessions:
            self.set_session_creator(state, get_session_creator({}))
        return self._sessions[state]

    # -- acting -------------------------------------------------------------------------------

    def _call_acting(
        self, function: Any, state: PolicyState, arrays: Sequence[Any]
    ) -> list[np.ndarray]:
        if fork_guard.forked_from_pid is not None:
            fork_guard.check_tensorflow_survived_fork()
        policy_session = self._sessions.get(state)
        session = None if policy_session is None else policy_session.open_session
        if session is None or not session.resident_state.holds(state):
            self.load(state)
            session = self._get_policy_session(state).get_or_open()
        if function.options is None:
            with self._lock:
                function.trace()
        results: list[np.ndarray] = session.callables[function](*arrays)
        return results

    # -- learning -----------------------------------------------------------------------------

    def prepare_inner(
        self, function: Callable[..., Any], signature: Sequence[Any], *, for_xla: bool
    ) -> Any:
        fork_guard.check_tensorflow_survived_fork()
        pinned = function if for_xla else pin_to_device(function, self.functions.device)
        with self._graph.as_default():
            return trace_concrete(pinned, signature, for_xla=for_xla)

    def _warm_up(
        self,
        key: Hashable,
        function: Any,
        state: PolicyState,
        inputs: Sequence[Any],
        meanwhile: Callable[[], None] | None,
    ) -> None:
        policy_session = self._get_policy_session(state)
        session, arrays = (
            policy_session.get_or_open(),
            tf.nest.flatten([state.hyperparameters.copy(), *inputs]),
        )
        try:
            is_new = session.warm_up_calls.run(
                key, lambda: session.callables[function](*arrays), meanwhile
            )
        except BaseException:
            policy_session.open_session = None  # since the call may still change its variables
            raise
        if is_new:
            session.resident_state.clear()
            self.begin_update(state)

    def _call_update(self, function: Any, state: PolicyState, inputs: Sequence[Any]) -> Any:
        function.trace()
        arrays = tf.nest.flatten([state.hyperparameters, *inputs])
        return function.restore_structure(
            self._get_policy_session(state).get_or_open().callables[function](*arrays)
        )

    def load(self, state: PolicyState) -> None:
        fork_guard.check_tensorflow_survived_fork()
        with self._lock:
            session = self._get_policy_session(state).get_or_open()
            if not session.resident_state.holds(state):
                self._load.trace()
                segments = self.functions.layout.complete_segments(state.segments)
                session.callables[self._load](*tf.nest.flatten(segments))
                session.resident_state.record(state)

    def get_resident_state(self, state: PolicyState) -> ResidentState:
        return self._get_policy_session(state).get_or_open().resident_state
