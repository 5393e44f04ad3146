"""Acting for many states of one Program in one call.

The weights of P states are stacked on a leading axis, and so are observations `[P, N, ...]`, noise
`[P, N, k]` and the exploration's parameters `[P, p]`. `tf.vectorized_map` turns the act function
into one over such stacks. Where it cannot (convolutions with a kernel per policy), a loop inside
the call runs one state after the other.
"""

from __future__ import annotations

import abc
import copy
import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.program.devices import lender, placed
from tfpolicies.program.functions import ActOutputs
from tfpolicies.program.runtimes.function import FunctionRuntime, Traced
from tfpolicies.program.runtimes.onnx import convert, cpu_session
from tfpolicies.program.runtimes.runtime import Actor, Runtime, acted, signature_with_weights
from tfpolicies.state import PolicyState, Slot
from tfpolicies.system.forks import require_tensorflow

if TYPE_CHECKING:
    import onnx
from tfpolicies.system.quiet import quiet_conversion

MAX_BYTES = 256 * 2**20
"""Memory limit for the stacks of one Program and runtime; their tensors need the same again."""

_MAX_STACKS = 4


class Stack:
    """The acting weights of some states; those of a state are copied again after it has changed.

    Args:
        slots: the weights.
        rows: P.

    Attributes:
        arrays: `[P, *shape]` each.
        lock: held from `refresh` until the arrays are no longer read.
        num_copies: the number of rows that were copied so far.
        runtime_data: data that a runtime stores with the arrays.
    """

    def __init__(self, slots: Sequence[Slot], rows: int) -> None:
        self.arrays = [np.zeros((rows, *slot.shape), slot.dtype) for slot in slots]
        self.lock = threading.Lock()
        self.copies = 0
        self.held: Any = None
        self._keys = [slot.key for slot in slots]
        self._there: list[tuple[Any, int]] = [(_nobody, -1)] * rows

    @property
    def rows(self) -> int:
        return len(self._there)

    def refresh(self, states: Sequence[PolicyState]) -> None:
        """Copies the weights of `states[i]` to row i; holds the lock of one state at a time."""
        for i, (state, (known, version)) in enumerate(zip(states, self._there, strict=True)):
            if known() is not state or version != state.version:
                with state.lock:
                    arrays = state.acting_arrays
                    self.copies += 1
                    for stacked, key in zip(self.arrays, self._keys, strict=True):
                        stacked[i] = arrays[key]
                    self._there[i] = (weakref.ref(state), state.version)

    def is_orphan(self) -> bool:
        return any(known() is None for known, version in self._there if version >= 0)


def _nobody() -> None:
    return None


class _Binding(NamedTuple):
    """A stack with buffers, bound to ONNX Runtime; use it only under the stack's lock."""

    io: Any
    lead: tuple[int, ...]  # P, N
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


class StackedActor(Actor):
    """Acts for many states at once; it is thread-safe.

    It keeps the last few stacks of weights, so that groups of policies that act repeatedly cost no
    copies.

    Args:
        runtime: of the Program.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._slots = runtime.functions.layout.acting
        self._act = runtime.act_layout
        self._lock = threading.Lock()
        self._stacks: OrderedDict[tuple[int, ...], Stack] = OrderedDict()
        one = sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in self._slots)
        self.max_states = max(1, MAX_BYTES // (2 * max(1, one)))
        """The largest P of one call."""
        self._most = MAX_BYTES // max(1, one)

    def run(
        self,
        states: Sequence[PolicyState],
        inputs: Sequence[np.ndarray],
        noise: np.ndarray,
        params: np.ndarray,
    ) -> ActOutputs:
        """Acts for P states, at most `max_states`, on N rows each; see `Actor.run`.

        All arrays are contiguous. The returned arrays are never overwritten.
        """
        stack = self._stack_of(states)
        with stack.lock:
            stack.refresh(states)
            return self._call(stack, [*inputs, noise, params])

    @abc.abstractmethod
    def _call(self, stack: Stack, given: Sequence[np.ndarray]) -> ActOutputs:
        """Runs the stacked act function."""

    def _stack_of(self, states: Sequence[PolicyState]) -> Stack:
        """Returns a stack with that many rows, usually the one that already has these states."""
        key = tuple(map(id, states))
        with self._lock:
            stack = self._stacks.get(key)
            if stack is None:
                stack = self._make_room(len(states)) or Stack(self._slots, len(states))
                self._stacks[key] = stack
            self._stacks.move_to_end(key)
            return stack

    def _make_room(self, rows: int) -> Stack | None:
        """Removes stacks of deleted states, and the oldest ones; returns one that can be reused.

        A thread that is still acting with the reused stack holds its lock, and copies its rows
        again the next time.
        """
        stacks = self._stacks
        for key in [key for key, stack in stacks.items() if stack.is_orphan()]:
            del stacks[key]
        while stacks and (
            len(stacks) >= _MAX_STACKS or rows + sum(s.rows for s in stacks.values()) > self._most
        ):
            _, oldest = stacks.popitem(last=False)
            if oldest.rows == rows:
                return oldest
        return None


class TracedStackedActor(StackedActor):
    """Acts by one traced function, for any P and N."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._lend = lender()
        # Only operations that cannot be vectorised run in a loop.
        stacked = stacked_act(runtime, self._act.pack, tf.vectorized_map, "tf")
        self._device = runtime.functions.acting_device
        self._function = Traced(stacked, signature_with_weights(runtime, [None]), self._device)
        with quiet_conversion():
            self._function.trace()

    def _call(self, stack: Stack, given: Sequence[np.ndarray]) -> ActOutputs:
        require_tensorflow()
        with ensure_eager(), placed(self._device):
            if stack.held is None or stack.held[0] != stack.copies:
                stack.held = stack.copies, [tf.constant(array) for array in stack.arrays]
            weights = stack.held[1]
            packed = self._function(*weights, *map(self._lend, given))
        return self._act.unpack([x.numpy().copy() for x in packed])


class OnnxStackedActor(StackedActor):
    """Acts by ONNX Runtime, for any P and N; stacks of weights are bound without a copy."""

    def __init__(self, model: bytes, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._session = cpu_session(model)
        self._present = {node.name for node in self._session.get_inputs()}
        self._ports = self._act.ports()
        self._given = [x.name for x in signature_with_weights(runtime, [None])[len(self._slots) :]]

    def _call(self, stack: Stack, given: Sequence[np.ndarray]) -> ActOutputs:
        lead = given[0].shape[:2]
        if stack.held is None or stack.held.lead != lead:
            stack.held = self._bound(stack, lead, given)
        io, _, inputs, outputs = stack.held
        for buffer, array in zip(inputs, given, strict=True):
            buffer[...] = array
        self._session.run_with_iobinding(io)
        return self._act.unflatten([array.copy() for array in outputs])

    def _bound(self, stack: Stack, lead: tuple[int, ...], given: Sequence[np.ndarray]) -> _Binding:
        io = self._session.io_binding()
        inputs = [np.zeros_like(array) for array in given]
        weights = [(f"weights_{i}", array) for i, array in enumerate(stack.arrays)]
        for name, array in [*weights, *zip(self._given, inputs, strict=True)]:
            if name in self._present:
                io.bind_cpu_input(name, array)
        outputs = [np.zeros((*lead, *port.shape), port.dtype) for port in self._ports]
        for port, array in zip(self._ports, outputs, strict=True):
            shape, address = array.shape, array.ctypes.data
            io.bind_output(port.name, "cpu", 0, port.dtype, shape, address)
        return _Binding(io, lead, inputs, outputs)


def traced_actor(runtime: Runtime) -> StackedActor | None:
    """Returns the stacked act function of a Program for the function runtime, None for others."""
    is_traced = isinstance(runtime, FunctionRuntime) and runtime.traced
    return TracedStackedActor(runtime) if is_traced else None


def onnx_actor(runtime: Runtime) -> StackedActor:
    """Returns the stacked act function of a Program for ONNX Runtime."""
    signature, ports = signature_with_weights(runtime, [None]), runtime.act_layout.ports()

    def build(mapped: Callable[..., Any]) -> OnnxStackedActor:
        stacked = stacked_act(runtime, runtime.act_layout.flatten, mapped, "onnx")
        function = tf.function(stacked, input_signature=signature, autograph=False)
        model = convert(function, signature, [port.name for port in ports])
        return OnnxStackedActor(without_gathers(model), runtime)

    specs = [tf.TensorSpec([None, *port.shape], port.dtype) for port in ports]
    try:
        with quiet_conversion():
            return build(functools.partial(tf.vectorized_map, fallback_to_while_loop=False))
    except Exception:  # an operation cannot be vectorised, so all run in a loop
        return build(lambda one, index: tf.map_fn(one, index, fn_output_signature=specs))


def stacked_act(
    runtime: Runtime,
    flatten: Callable[[ActOutputs], list[Any]],
    mapped: Callable[..., Any],
    where: str,
) -> Callable[..., list[tf.Tensor]]:
    """Returns the act function over stacks, `f(*weights, *inputs, noise, params)`.

    `mapped(f, indices)` stacks the results of `f(i)` for each index.
    """
    functions = runtime.functions
    count = len(functions.layout.acting)

    def act(*tensors: tf.Tensor) -> list[tf.Tensor]:
        functions.traces.note(f"act (stacked, {where})", *tensors)

        def one(i: tf.Tensor) -> list[tf.Tensor]:
            return acted(runtime, [tf.gather(tensor, i) for tensor in tensors], flatten)

        # Indices instead of tensors are mapped: `vectorized_map` reads the length of each.
        return list(mapped(one, tf.range(tf.shape(tensors[count])[0])))

    return act


def without_gathers(model: bytes) -> bytes:
    """Returns a vectorised model that reads its inputs without copying them.

    `tf.vectorized_map` turns "row i of an input, for all i" into a Gather of all rows in order, a
    copy. Nodes that only computed the number of rows are removed as well. A Gather of a graph's
    input must be of all rows, in order.
    """
    import onnx

    loaded = onnx.load_from_string(model)
    graph = loaded.graph
    inputs = {node.name for node in graph.input}
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] in inputs:
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
    makers = {name: node for node in graph.node for name in node.output}
    wanted = [output.name for output in graph.output]
    needed: set[str] = set()
    while wanted:
        node = makers.get(wanted.pop())
        if node is not None and node.output[0] not in needed:
            needed.add(node.output[0])
            wanted += node.input
            wanted += _read_by_subgraphs(node)
    kept = [copy.deepcopy(node) for node in graph.node if node.output[0] in needed]
    del graph.node[:]
    graph.node.extend(kept)
    return bytes(loaded.SerializeToString())


def _read_by_subgraphs(node: onnx.NodeProto) -> list[str]:
    """Returns the names that the loops and branches of a node read, at any depth."""
    found: list[str] = []
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            found += [output.name for output in graph.output]
            for inner in graph.node:
                found += [*inner.input, *_read_by_subgraphs(inner)]
    return found
