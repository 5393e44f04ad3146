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
from tfpolicies.program.devices import device_scope, get_zero_copy_factory
from tfpolicies.program.functions import ActOutputs
from tfpolicies.program.policy_state import PolicyState, Slot
from tfpolicies.program.runtimes.function import FunctionRuntime, TracedFunction
from tfpolicies.program.runtimes.onnx import convert, make_cpu_session
from tfpolicies.program.runtimes.runtime import (
    ActingRuntime,
    TFRuntime,
    make_signature_with_weights,
    run_act,
)
from tfpolicies.system.fork_guard import check_tensorflow_survived_fork

if TYPE_CHECKING:
    import onnx
from tfpolicies.system.log_suppression import suppress_conversion_output

MAX_BYTES = 256 * 2**20
"""Memory limit for the stacks of one Program and runtime; their tensors need the same again."""

_MAX_CACHED_STACKS = 4


class WeightStack:
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
        self.num_copies = 0
        self.runtime_data: Any = None
        self._keys = [slot.key for slot in slots]
        self._sources: list[tuple[Any, int]] = [(_no_state, -1)] * rows

    @property
    def rows(self) -> int:
        return len(self._sources)

    def refresh(self, states: Sequence[PolicyState]) -> None:
        """Copies the weights of `states[i]` to row i; holds the lock of one state at a time."""
        for i, (state, (state_ref, version)) in enumerate(zip(states, self._sources, strict=True)):
            if state_ref() is not state or version != state.version:
                with state.lock:
                    arrays = state.acting_arrays
                    self.num_copies += 1
                    for weights, key in zip(self.arrays, self._keys, strict=True):
                        weights[i] = arrays[key]
                    self._sources[i] = (weakref.ref(state), state.version)

    def has_dead_state(self) -> bool:
        return any(state_ref() is None for state_ref, version in self._sources if version >= 0)


def _no_state() -> None:
    return None


class _BoundStack(NamedTuple):
    """A stack with buffers, bound to ONNX Runtime; use it only under the stack's lock."""

    io: Any
    leading_shape: tuple[int, ...]  # P, N
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


class StackedRuntime(ActingRuntime):
    """Acts for many states at once; it is thread-safe.

    It keeps the last few stacks of weights, so that groups of policies that act repeatedly cost no
    copies.

    Args:
        runtime: of the Program.
    """

    def __init__(self, runtime: TFRuntime) -> None:
        self._slots = runtime.functions.layout.acting_slots
        self._output_layout = runtime.act_layout
        self._lock = threading.Lock()
        self._stacks: OrderedDict[tuple[int, ...], WeightStack] = OrderedDict()
        bytes_per_state = sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in self._slots)
        self.max_states = max(1, MAX_BYTES // (2 * max(1, bytes_per_state)))
        """The largest P of one call."""
        self._max_rows = MAX_BYTES // max(1, bytes_per_state)

    def run(
        self,
        states: Sequence[PolicyState],
        inputs: Sequence[np.ndarray],
        noise: np.ndarray,
        params: np.ndarray,
    ) -> ActOutputs:
        """Acts for P states, at most `max_states`, on N rows each; see `ActingRuntime.run`.

        All arrays are contiguous. The returned arrays are never overwritten.
        """
        stack = self._get_stack(states)
        with stack.lock:
            stack.refresh(states)
            return self._call(stack, [*inputs, noise, params])

    @abc.abstractmethod
    def _call(self, stack: WeightStack, arrays: Sequence[np.ndarray]) -> ActOutputs:
        """Runs the stacked act function."""

    def _get_stack(self, states: Sequence[PolicyState]) -> WeightStack:
        """Returns a stack with that many rows, usually the one that already has these states."""
        key = tuple(map(id, states))
        with self._lock:
            stack = self._stacks.get(key)
            if stack is None:
                stack = self._evict(len(states)) or WeightStack(self._slots, len(states))
                self._stacks[key] = stack
            self._stacks.move_to_end(key)
            return stack

    def _evict(self, rows: int) -> WeightStack | None:
        """Removes stacks of deleted states, and the oldest ones; returns one that can be reused.

        A thread that is still acting with the reused stack holds its lock, and copies its rows
        again the next time.
        """
        stacks = self._stacks
        for key in [key for key, stack in stacks.items() if stack.has_dead_state()]:
            del stacks[key]
        while stacks and (
            len(stacks) >= _MAX_CACHED_STACKS
            or rows + sum(s.rows for s in stacks.values()) > self._max_rows
        ):
            _, oldest = stacks.popitem(last=False)
            if oldest.rows == rows:
                return oldest
        return None


class StackedFunctionRuntime(StackedRuntime):
    """Acts by one traced function, for any P and N."""

    def __init__(self, runtime: TFRuntime) -> None:
        super().__init__(runtime)
        self._share = get_zero_copy_factory()
        # Only operations that cannot be vectorised run in a loop.
        stacked = make_stacked_act(runtime, self._output_layout.pack, tf.vectorized_map, "tf")
        self._device = runtime.functions.acting_device
        self._function = TracedFunction(
            stacked, make_signature_with_weights(runtime, [None]), self._device
        )
        with suppress_conversion_output():
            self._function.trace()

    def _call(self, stack: WeightStack, arrays: Sequence[np.ndarray]) -> ActOutputs:
        check_tensorflow_survived_fork()
        with ensure_eager(), device_scope(self._device):
            if stack.runtime_data is None or stack.runtime_data[0] != stack.num_copies:
                stack.runtime_data = (
                    stack.num_copies,
                    [tf.constant(array) for array in stack.arrays],
                )
            weights = stack.runtime_data[1]
            packed = self._function(*weights, *map(self._share, arrays))
        return self._output_layout.unpack([x.numpy().copy() for x in packed])


class StackedOnnxRuntime(StackedRuntime):
    """Acts by ONNX Runtime, for any P and N; stacks of weights are bound without a copy."""

    def __init__(self, model: bytes, runtime: TFRuntime) -> None:
        super().__init__(runtime)
        self._session = make_cpu_session(model)
        self._session_inputs = {node.name for node in self._session.get_inputs()}
        self._ports = self._output_layout.get_ports()
        self._input_names = [
            x.name for x in make_signature_with_weights(runtime, [None])[len(self._slots) :]
        ]

    def _call(self, stack: WeightStack, arrays: Sequence[np.ndarray]) -> ActOutputs:
        leading_shape = arrays[0].shape[:2]
        if stack.runtime_data is None or stack.runtime_data.leading_shape != leading_shape:
            stack.runtime_data = self._bind(stack, leading_shape, arrays)
        io, _, inputs, outputs = stack.runtime_data
        for buffer, array in zip(inputs, arrays, strict=True):
            buffer[...] = array
        self._session.run_with_iobinding(io)
        return self._output_layout.unflatten([array.copy() for array in outputs])

    def _bind(
        self, stack: WeightStack, leading_shape: tuple[int, ...], arrays: Sequence[np.ndarray]
    ) -> _BoundStack:
        io = self._session.io_binding()
        inputs = [np.zeros_like(array) for array in arrays]
        weights = [(f"weights_{i}", array) for i, array in enumerate(stack.arrays)]
        for name, array in [*weights, *zip(self._input_names, inputs, strict=True)]:
            if name in self._session_inputs:
                io.bind_cpu_input(name, array)
        outputs = [np.zeros((*leading_shape, *port.shape), port.dtype) for port in self._ports]
        for port, array in zip(self._ports, outputs, strict=True):
            shape, address = array.shape, array.ctypes.data
            io.bind_output(port.name, "cpu", 0, port.dtype, shape, address)
        return _BoundStack(io, leading_shape, inputs, outputs)


def make_stacked_function_runtime(runtime: TFRuntime) -> StackedRuntime | None:
    """Returns the stacked act function of a Program for the function runtime, None for others."""
    is_traced = isinstance(runtime, FunctionRuntime) and runtime.traced
    return StackedFunctionRuntime(runtime) if is_traced else None


def make_stacked_onnx_runtime(runtime: TFRuntime) -> StackedRuntime:
    signature, ports = make_signature_with_weights(runtime, [None]), runtime.act_layout.get_ports()

    def build(map_states: Callable[..., Any]) -> StackedOnnxRuntime:
        stacked = make_stacked_act(runtime, runtime.act_layout.flatten, map_states, "onnx")
        function = tf.function(stacked, input_signature=signature, autograph=False)
        model = convert(function, signature, [port.name for port in ports])
        return StackedOnnxRuntime(remove_gathers(model), runtime)

    specs = [tf.TensorSpec([None, *port.shape], port.dtype) for port in ports]
    try:
        with suppress_conversion_output():
            return build(functools.partial(tf.vectorized_map, fallback_to_while_loop=False))
    except Exception:  # an operation cannot be vectorised, so all run in a loop
        return build(lambda one, index: tf.map_fn(one, index, fn_output_signature=specs))


def make_stacked_act(
    runtime: TFRuntime,
    flatten: Callable[[ActOutputs], list[Any]],
    map_states: Callable[..., Any],
    runtime_name: str,
) -> Callable[..., list[tf.Tensor]]:
    """Returns the act function over stacks, `f(*weights, *inputs, noise, params)`.

    `mapped(f, indices)` stacks the results of `f(i)` for each index.
    """
    functions = runtime.functions
    count = len(functions.layout.acting_slots)

    def act(*tensors: tf.Tensor) -> list[tf.Tensor]:
        functions.traces.record(f"act (stacked, {runtime_name})", *tensors)

        def act_for_state(i: tf.Tensor) -> list[tf.Tensor]:
            return run_act(runtime, [tf.gather(tensor, i) for tensor in tensors], flatten)

        # Indices instead of tensors are mapped: `vectorized_map` reads the length of each.
        return list(map_states(act_for_state, tf.range(tf.shape(tensors[count])[0])))

    return act


def remove_gathers(model: bytes) -> bytes:
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
    producers = {name: node for node in graph.node for name in node.output}
    pending = [output.name for output in graph.output]
    needed: set[str] = set()
    while pending:
        node = producers.get(pending.pop())
        if node is not None and node.output[0] not in needed:
            needed.add(node.output[0])
            pending += node.input
            pending += _get_subgraph_inputs(node)
    needed_nodes = [copy.deepcopy(node) for node in graph.node if node.output[0] in needed]
    del graph.node[:]
    graph.node.extend(needed_nodes)
    return bytes(loaded.SerializeToString())


def _get_subgraph_inputs(node: onnx.NodeProto) -> list[str]:
    """Returns the names that the loops and branches of a node read, at any depth."""
    names: list[str] = []
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            names += [output.name for output in graph.output]
            for inner in graph.node:
                names += [*inner.input, *_get_subgraph_inputs(inner)]
    return names
