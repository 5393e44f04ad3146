"""The session runtime, graph mode: one `tf.Graph` per Program, a `tf.compat.v1.Session` per policy.

The graph holds a network and an optimizer of its own, made by the same code as the eager ones, and
the Program's functions on v1 placeholders. Each session has its own values of the variables, so a
state is loaded only when it changed elsewhere. Nothing here touches eager mode or the default graph
of the caller.
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
    """Returns what makes a session on the default graph, the same for equal arguments.

    Policies whose sessions one creator makes may take over each other's.

    Args:
        session_args: fields of its `tf.compat.v1.ConfigProto`.

    Sessions share a pool of threads of their own: TensorFlow's global one would keep, for the whole
    process, the size that its first session asked for.

    Raises:
        ConfigError: if TensorFlow knows no such field, or it cannot have the value.
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
    if physical("GPU") and not logical("GPU"):  # those that are hidden are hidden from sessions
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
        """Puts the function into the graph if it is not there yet."""
        if self.options is not None:
            return
        forks.require_tensorflow()
        with self.graph.as_default():
            given = tf.nest.map_structure(
                lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), self.signature
            )
            # A function orders its assignments by itself, which a plain v1 graph does not.
            # XLA places nothing, and takes no code that was optimised for a device.
            run = self._run if self.jit else on_device(self._run, self.device)
            function = tf.function(run, jit_compile=self.jit or None, autograph=False)
            with placed(self.device):
                # Called as it is, it would run as plain operations after
                # `run_functions_eagerly(True)`.
                self._structure = function.get_concrete_function(*self.signature)(*given)
            self.options = _callable_options(
                tf.nest.flatten(given), tf.nest.flatten(self._structure)
            )

    def _run(self, *given: tf.Tensor) -> Any:
        found = self.function(*given)
        return tf.zeros([]) if found is None else found

    def nested(self, arrays: Sequence[np.ndarray]) -> Any:
        """Returns flat results in the structure that the function gives."""
        return tf.nest.pack_sequence_as(self._structure, arrays)


_MAX_IDLE = 2  # sessions of one Program and creator that wait for a policy


def _callable_options(feeds: Sequence[Any], fetches: Sequence[Any]) -> Any:
    options = config_pb2.CallableOptions()
    options.feed.extend(tensor.name for tensor in feeds)
    options.fetch.extend(tensor.name for tensor in fetches)
    options.run_options.inter_op_thread_pool = -1  # in the caller's thread: nothing to wake up
    return options


class _Callables(dict[_GraphFunction, Any]):
    """Functions that were traced as one session runs them, from flat arrays to flat arrays."""

    def __init__(self, session: tf.compat.v1.Session) -> None:
        self._session = session

    def __missing__(self, function: _GraphFunction) -> Any:
        # `make_callable` takes ten times as long per call as this, which is under it.
        call = self[function] = self._session._make_callable_from_options(function.options)
        return call


class _OpenSession:
    """A session with what was prepared in it and what lies in its variables."""

    def __init__(self, session: tf.compat.v1.Session) -> None:
        self.session = session
        self.resident = Resident()
        self.rehearsals = Rehearsals()
        self.callables = _Callables(session)
        # At the end of the process they must go before TensorFlow's modules do.
        weakref.finalize(self, self.callables.clear)

    def close(self) -> None:
        """Closes the session, and gives its memory back."""
        self.callables.clear()
        self.resident.forget()
        self.session.close()


class _IdleSessions:
    """Open sessions that nobody uses, at most a few of each creator.

    Opening a session takes as long as a hundred actions, so the session of a policy that was paged
    out serves the next one that is made or brought back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Callable[[], Any], list[_OpenSession]] = {}

    def take(self, create: Callable[[], Any]) -> _OpenSession | None:
        """Returns one that `create` made, if there is one."""
        with self._lock:
            found = self._idle.get(create)
            taken = found.pop() if found else None
            if not found:
                self._idle.pop(create, None)
            return taken

    def put(self, create: Callable[[], Any], opened: _OpenSession) -> None:
        """Keeps one, or closes it if there are enough."""
        with self._lock:
            found = self._idle.setdefault(create, [])
            if len(found) < _MAX_IDLE:
                found.append(opened)
                return
        opened.close()

    def drop(self, create: Callable[[], Any]) -> None:
        """Closes those that `create` made."""
        with self._lock:
            found = self._idle.pop(create, [])
        for opened in found:
            opened.close()


@dataclasses.dataclass(eq=False)
class _PolicySession:
    """The session of one policy, opened when it is first used.

    Args:
        graph: of the Program.
        create: makes a session on the default graph.
        idle: where to look first.

    Attributes:
        open: the session; None while it is not open.
    """

    graph: tf.Graph
    create: Callable[[], Any]
    idle: _IdleSessions
    open: _OpenSession | None = None

    def opened(self) -> _OpenSession:
        """Returns the session, opening it if it is not open.

        Raises:
            ConfigError: if the creator gives no session on the default graph.
        """
        if self.open is None:
            self.open = self.idle.take(self.create) or self.create_one()
        return self.open

    def create_one(self) -> _OpenSession:
        """Opens the session by the creator, not one that is idle."""
        forks.require_tensorflow()
        with self.graph.as_default():
            made = self.create()
        if getattr(made, "graph", None) is not self.graph:
            raise ConfigError(
                "the session_creator must return a tf.compat.v1.Session on the default graph, "
                f"got {made!r}. For example: `lambda: tf.compat.v1.Session(config=...)`."
            )
        self.open = _OpenSession(made)
        return self.open

    def give_up(self) -> None:
        """Leaves the session to whoever needs one next."""
        opened, self.open = self.open, None
        if opened is not None:
            self.idle.put(self.create, opened)

    def close(self) -> None:
        """Closes the session if it is open."""
        opened, self.open = self.open, None
        if opened is not None:
            opened.close()


class SessionRuntime(Runtime):
    """Runs the functions of one Program in its graph, in one session per state.

    Making a graph takes long and leaves two megabytes behind, so it stays for a while when the
    Program's last policy goes, and the next policy of the kind takes it again.

    Args:
        functions: the Program's functions over eager variables; the graph's are made like them.
        act: the outputs of acting.
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
        """Returns the session of a state, with the state in it."""
        with state.lock:
            self.load(state)
            return self._held(state).opened().session

    def open_sessions_with(self, state: PolicyState, create: Callable[[], Any]) -> None:
        """Says what makes the session of a state; called with the graph as default."""
        held = _PolicySession(self._graph, create, self._idle)
        self._sessions[state] = held
        weakref.finalize(state, held.close).atexit = False

    def open(self, state: PolicyState) -> None:
        """Has the creator make the session of a state now."""
        self._held(state).create_one()

    def release(self, state: PolicyState) -> None:
        """Leaves the session of a state to others; the state has what its updates left."""
        held = self._sessions.get(state)
        if held is not None:
            held.give_up()

    def drop_idle(self, create: Callable[[], Any]) -> None:
        """Closes the sessions of one creator that nobody uses."""
        self._idle.drop(create)

    def close(self, state: PolicyState) -> None:
        """Closes the session of a state; a later use opens a new one."""
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
        """Returns a function for other functions to call; see `Runtime.inner`."""
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
            held.open = None  # the call may still change its variables
            raise
        if is_new:
            opened.resident.forget()
            self.begin_update(state)

    def _update(self, function: Any, state: PolicyState, given: Sequence[Any]) -> Any:
        function.trace()
        arrays = tf.nest.flatten([state.hyper, *given])
        return function.nested(self._held(state).opened().callables[function](*arrays))

    def load(self, state: PolicyState) -> None:
        """Copies a state into its session, unless it is there."""
        forks.require_tensorflow()
        with self._lock:
            opened = self._held(state).opened()
            if not opened.resident.is_there(state):
                self._load.trace()
                opened.callables[self._load](*tf.nest.flatten(state.segments))
                opened.resident.note(state)

    def resident(self, state: PolicyState) -> Resident:
        """Returns what remembers which state lies in the variables of a state's session."""
        return self._held(state).opened().resident
