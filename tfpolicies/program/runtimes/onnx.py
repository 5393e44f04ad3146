"""Acting through ONNX Runtime: the act function converted once, the weights being inputs."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfpolicies.models.ports import Port
from tfpolicies.program.functions import ActOutputs
from tfpolicies.program.outputs import ActLayout
from tfpolicies.system.quiet import quiet_conversion

OPSET = 18
_MAX_BINDINGS = 16  # batch sizes kept bound at once


@dataclass(eq=False, slots=True)
class _Binding:
    """One batch size, bound: ONNX Runtime keeps output buffers, so each size has its own."""

    io: Any
    inputs: list[np.ndarray]
    noise: np.ndarray
    params: np.ndarray
    outputs: ActOutputs
    weights: Any = None  # the segments of the state whose weights are bound: they stay in memory


class _Bindings(threading.local):
    """The bindings of one thread, by batch size, so that no thread waits for another."""

    def __init__(self) -> None:
        self.by_size: OrderedDict[int, _Binding] = OrderedDict()


class OnnxActor:
    """Runs a converted act function on one thread, with inputs and outputs bound to NumPy memory.

    Args:
        model: the serialised ONNX model, as `convert` gives it, with inputs `weights_<i>`,
            `input_<i>`, `noise` and `params`.
        weight_keys: the state's key of each weight input, in order.
        ports: the inputs of acting.
        noise_size: columns of the noise.
        num_params: parameters of the exploration.
        act: the outputs.
    """

    def __init__(
        self,
        model: bytes,
        weight_keys: Sequence[str],
        ports: Sequence[Port],
        noise_size: int,
        num_params: int,
        act: ActLayout,
    ) -> None:
        self._session = cpu_session(model)
        self._present = {node.name for node in self._session.get_inputs()}
        self._weights = [
            (name, key)
            for name, key in ((f"weights_{i}", key) for i, key in enumerate(weight_keys))
            if name in self._present
        ]
        self._ports = list(ports)
        self._noise_size = noise_size
        self._num_params = num_params
        self._act = act
        self._bindings = _Bindings()

    def run(
        self,
        state: Any,
        inputs: Sequence[np.ndarray],
        noise: np.ndarray | None,
        params: np.ndarray,
    ) -> ActOutputs:
        """Acts for `state`; see `ActInputs`; `noise=None` is zeros.

        Returns the output buffers of this batch size: valid until the thread's next call of the
        same size.
        """
        size = len(inputs[0])
        binding = self._bindings.by_size.get(size)
        if binding is None:
            if size == 0:  # ONNX Runtime mistakes the shapes of empty results
                return self._act.unflatten([port.zeros(0) for port in self._act.ports()])
            binding = self._bind(size)
        weights = state.segments
        if binding.weights is not weights:
            arrays = state.arrays
            for name, key in self._weights:
                binding.io.bind_cpu_input(name, arrays[key])
            binding.weights = weights
        for buffer, array in zip(binding.inputs, inputs, strict=True):
            buffer[...] = array
        if noise is None:
            binding.noise.fill(0.0)
        else:
            binding.noise[...] = noise
        if self._num_params:
            binding.params[...] = params
        self._session.run_with_iobinding(binding.io)
        return binding.outputs

    def _bind(self, size: int) -> _Binding:
        io = self._session.io_binding()

        def bound(name: str, array: np.ndarray) -> np.ndarray:
            if name in self._present:
                io.bind_cpu_input(name, array)
            return array

        inputs = [bound(f"input_{i}", p.zeros(size)) for i, p in enumerate(self._ports)]
        noise = bound("noise", np.zeros((size, self._noise_size), np.float32))
        params = bound("params", np.zeros(self._num_params, np.float32))
        outputs = []
        for port in self._act.ports():
            array = port.zeros(size)
            io.bind_output(
                port.name,
                "cpu",
                0,
                element_type=port.dtype,
                shape=array.shape,
                buffer_ptr=array.ctypes.data,
            )
            outputs.append(array)
        bindings = self._bindings.by_size
        if len(bindings) >= _MAX_BINDINGS:
            bindings.popitem(last=False)
        bindings[size] = _Binding(io, inputs, noise, params, self._act.unflatten(outputs))
        return bindings[size]


def cpu_session(model: bytes) -> Any:
    """Returns an `onnxruntime.InferenceSession` of a serialised model, on one thread of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def convert(
    function: Any, signature: Sequence[Any], output_names: Sequence[str], opset: int = OPSET
) -> bytes:
    """Converts a `tf.function` with a flat signature to a serialised ONNX model.

    Args:
        function: its captured variables become constants of the graph.
        signature: a named `tf.TensorSpec` per input.
        output_names: a name per output.
        opset: the version of ONNX's operators.

    Raises:
        Exception: whatever tf2onnx or TensorFlow raises for what they cannot convert.
    """
    with quiet_conversion():
        import tf2onnx

        model, _ = tf2onnx.convert.from_function(
            function, input_signature=list(signature), opset=opset
        )
    rename_outputs(model, output_names)
    return model.SerializeToString()


def rename_outputs(model: Any, names: Sequence[str]) -> None:
    """Gives the graph's outputs the given names, in place.

    An output that several names share (a value returned twice) gets an Identity node of its own.
    """
    import onnx

    graph = model.graph
    old = [output.name for output in graph.output]
    for output, before, name in zip(graph.output, old, names, strict=True):
        graph.node.append(onnx.helper.make_node("Identity", [before], [name]))
        output.name = name


def without_gathers(model: bytes) -> bytes:
    """Returns a vectorised model that reads its inputs where they lie.

    `tf.vectorized_map` turns "row i of an input, for all i" into a Gather of all rows in order, a
    copy. What only told how many rows there are goes, too.

    Args:
        model: a serialised model; a Gather of a graph's input must be of all rows, in order.
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
    return loaded.SerializeToString()


def _read_by_subgraphs(node: Any) -> list[str]:
    """Returns the names that the loops and branches of a node read, from wherever they are."""
    found: list[str] = []
    for attribute in node.attribute:
        for graph in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
            found += [output.name for output in graph.output]
            for inner in graph.node:
                found += [*inner.input, *_read_by_subgraphs(inner)]
    return found
