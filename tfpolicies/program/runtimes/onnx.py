"""Acting by ONNX Runtime: the act function is converted once, with the weights as inputs."""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfpolicies.base.acting_runtimes import ONNX_OPSETS
from tfpolicies.errors import ConfigError
from tfpolicies.program.act_outputs import ActOutputLayout
from tfpolicies.program.devices import CPU
from tfpolicies.program.functions import ActInputs, ActOutputs
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.runtimes.onnx_operators import HANDLERS
from tfpolicies.program.runtimes.onnx_rewrites import (
    dequantize_bytes,
    is_full_image_convolution,
    replace_full_image_convolutions,
)
from tfpolicies.program.runtimes.runtime import ActingRuntime, TFRuntime, make_act_with_weights
from tfpolicies.system.log_suppression import suppress_conversion_output

if TYPE_CHECKING:
    import onnx

OPSET = ONNX_OPSETS[-1]
_LARGE_IMAGE, _LARGE_KERNELS = 64 * 64, 100_000  # pixels, numbers
_MAX_BINDINGS = 16  # batch sizes per thread


@dataclass(eq=False, slots=True)
class _BoundBuffers:
    """The buffers of one batch size. ONNX Runtime keeps output buffers, so sizes share none."""

    io: Any
    inputs: list[np.ndarray]
    noise: np.ndarray
    params: np.ndarray
    outputs: ActOutputs
    weights: Any = None  # the bound arrays; the reference keeps them in memory


class _ThreadBindings(threading.local):
    """The buffers of one thread, by batch size, so that threads do not wait for each other."""

    def __init__(self) -> None:
        self.by_size: OrderedDict[int, _BoundBuffers] = OrderedDict()


class OnnxRuntime(ActingRuntime):
    """Runs a converted act function on one thread, with inputs and outputs bound to NumPy memory.

    Args:
        model: the serialised ONNX model of `convert`, with inputs `weights_<i>`, `input_<i>`,
            `noise` and `params`.
        weight_keys: the state's key of each weight input, in order.
        signature: its inputs without the weights.
        output_layout: the outputs.
    """

    def __init__(
        self,
        model: bytes,
        weight_keys: Sequence[str],
        signature: ActInputs,
        output_layout: ActOutputLayout,
    ) -> None:
        self._session = make_cpu_session(model)
        self._session_inputs = {node.name for node in self._session.get_inputs()}
        named = ((f"weights_{i}", key) for i, key in enumerate(weight_keys))
        self._weights = [(name, key) for name, key in named if name in self._session_inputs]
        self._signature = signature
        self._num_params = signature.params.shape[0]
        self._output_layout = output_layout
        self._bindings = _ThreadBindings()

    def run(
        self,
        states: PolicyState,
        inputs: Sequence[np.ndarray],
        noise: np.ndarray,
        params: np.ndarray,
    ) -> ActOutputs:
        """Acts for one state; see `ActingRuntime.run`.

        Returns the output buffers of this batch size: they are valid until the thread's next call
        with the same size.
        """
        size = len(inputs[0])
        binding = self._bindings.by_size.get(size)
        if binding is None:
            if size == 0:  # ONNX Runtime returns wrong shapes of empty results
                return self._output_layout.unflatten(
                    [port.zeros(0) for port in self._output_layout.get_ports()]
                )
            binding = self._bind(size)
        arrays = states.acting_arrays
        if binding.weights is not arrays:
            for name, key in self._weights:
                binding.io.bind_cpu_input(name, arrays[key])
            binding.weights = arrays
        for buffer, array in zip(binding.inputs, inputs, strict=True):
            buffer[...] = array
        binding.noise[...] = noise
        if self._num_params:
            binding.params[...] = params
        self._session.run_with_iobinding(binding.io)
        return binding.outputs

    def _bind(self, size: int) -> _BoundBuffers:
        io = self._session.io_binding()

        def bind_input(name: str, array: np.ndarray) -> np.ndarray:
            if name in self._session_inputs:
                io.bind_cpu_input(name, array)
            return array

        def zeros(spec: tf.TensorSpec) -> np.ndarray:
            return np.zeros((size, *spec.shape[1:]), spec.dtype.as_numpy_dtype)

        ports = enumerate(self._signature.inputs)
        inputs = [bind_input(f"input_{i}", zeros(spec)) for i, spec in ports]
        noise = bind_input("noise", zeros(self._signature.noise))
        params = bind_input("params", np.zeros(self._num_params, np.float32))
        outputs = []
        for port in self._output_layout.get_ports():
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
        bindings[size] = _BoundBuffers(
            io, inputs, noise, params, self._output_layout.unflatten(outputs)
        )
        return bindings[size]


def prefers_onnx(runtime: TFRuntime) -> bool:
    """Returns whether ONNX Runtime is faster than TensorFlow, and code is traced.

    TensorFlow is faster if the network convolves large images, or with large kernels: since weights
    are inputs, ONNX Runtime converts the kernels to its own layout in each call (10 ns a number),
    and it has one thread. Kernels that cover their image are not converted. Only the CPU is used
    here; if learning is on a GPU, acting on images is as well.
    """
    functions = runtime.functions
    kernels = [math.prod(x.shape) for x in functions.layout.acting_slots if len(x.shape) > 3]
    leaves = functions.network.ports.obs_leaves
    images = [math.prod(leaf.shape[:-1]) for leaf in leaves if len(leaf.shape) > 2]
    has_large_convolutions = kernels and max(images, default=0) >= _LARGE_IMAGE
    if functions.acting_device != CPU:
        return False
    if has_large_convolutions or not functions.spec.static["eager_tracing"]:
        return False
    total = sum(kernels)
    return total < _LARGE_KERNELS or total - _count_full_image_kernels(runtime) < _LARGE_KERNELS


def _count_full_image_kernels(runtime: TFRuntime) -> int:
    """Returns the number of weights in kernels that are as large as their image."""
    function = make_act_with_weights(runtime, "onnx")
    operations = function.get_concrete_function(*function.input_signature).graph.get_operations()
    return sum(math.prod(op.inputs[1].shape) for op in operations if is_full_image_convolution(op))


def make_onnx_runtime(runtime: TFRuntime) -> OnnxRuntime:
    """Returns the converted act function of a Program."""
    layout, slots = runtime.act_layout, runtime.functions.layout.acting_slots
    function = make_act_with_weights(runtime, "onnx")
    model = convert(function, function.input_signature, [port.name for port in layout.get_ports()])
    return OnnxRuntime(model, [slot.key for slot in slots], runtime.signatures.act, layout)


def make_cpu_session(model: bytes, threads: int = 1) -> Any:
    """Returns an `onnxruntime.InferenceSession` on the CPU; 0 threads: one per processor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 4  # errors are raised anyway
    options.add_session_config_entry("session.load_model_format", "ONNX")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def convert(
    function: Any,
    signature: Sequence[Any],
    output_names: Sequence[str],
    opset: int = OPSET,
) -> bytes:
    """Converts a `tf.function` with a flat signature to a serialised ONNX model.

    Args:
        function: its captured variables become constants of the graph.
        signature: a named `tf.TensorSpec` per input.
        output_names: a name per output.
        opset: the version of ONNX's operators.

    Raises:
        ConfigError: if the function draws random numbers, or needs an operator that ONNX lacks.
        Exception: any error of tf2onnx or TensorFlow about unsupported operations.
    """
    concrete = function.get_concrete_function(*signature)
    _check_no_random_operations(concrete.graph.as_graph_def())
    with suppress_conversion_output():
        import tf2onnx

        try:
            model = _convert_in_place(concrete, signature, opset)
        except Exception:  # `from_function` skips optimizers that fail, for which it copies graphs
            model, _ = tf2onnx.convert.from_function(
                function,
                input_signature=list(signature),
                opset=opset,
                custom_op_handlers=HANDLERS,
            )
    _check_operators(model, opset)
    dequantize_bytes(model)
    rename_outputs(model, output_names)
    return bytes(model.SerializeToString())


def _convert_in_place(
    concrete: tf.types.experimental.ConcreteFunction, signature: Sequence[Any], opset: int
) -> Any:
    """Converts a traced function like `tf2onnx.convert.from_function`, in less time.

    The difference: each of tf2onnx's optimizers works on the graph itself, not on a copy of it.
    """
    from tf2onnx import optimizer, tf_loader, tfonnx

    input_tensors = concrete.inputs[: len(signature)]  # captured tensors follow: constants
    inputs, outputs = (
        [tensor.name for tensor in tensors] for tensors in (input_tensors, concrete.outputs)
    )
    names = dict(zip(inputs, [spec.name for spec in signature], strict=True))
    with tf.device(CPU):
        frozen = tf_loader.from_function(concrete, inputs, outputs)
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(replace_full_image_convolutions(frozen), name="")
            converted = tfonnx.process_tf_graph(
                graph,
                continue_on_error=True,
                opset=opset,
                input_names=inputs,
                output_names=outputs,
                tensors_to_rename=names,
                custom_op_handlers=HANDLERS,
            )
            converted = optimizer.optimize_graph(converted, catch_errors=False)
    return converted.make_model("a policy's function")


_RANDOM_OPERATIONS = re.compile(
    "((Stateless)?Random|Multinomial|(Parameterized|Stateless)?TruncatedNormal|"
    "Stateful(Uniform|StandardNormal|TruncatedNormal|RandomBinomial))"
)
"""Matches the names of operations that draw random numbers."""


def _check_no_random_operations(graph: tf.Graph) -> None:
    nodes = [
        *graph.node,
        *(node for function in graph.library.function for node in function.node_def),
    ]
    random_operation = next((node.op for node in nodes if _RANDOM_OPERATIONS.match(node.op)), None)
    if random_operation is not None:
        raise ConfigError(
            f"it draws random numbers ({random_operation}), although a policy's noise must be an "
            "input"
        )


def _check_operators(model: onnx.ModelProto, opset: int) -> None:
    """Raises a `ConfigError` if a model has operators that ONNX lacks.

    Operators that tf2onnx does not know stay in the model as they were in TensorFlow.
    """
    import onnx

    from tfpolicies.base.onnx_graph import iter_nodes

    missing = {
        node.op_type: f"{node.op_type} ({node.name})"
        for node in iter_nodes(model.graph.node)
        if not node.domain and not onnx.defs.has(node.op_type, opset)
    }
    if missing:
        raise ConfigError(
            f"ONNX (opset {opset}) lacks operators for it: {', '.join(missing.values())}"
        )


def rename_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Renames the outputs of a graph, in place.

    The node that computes an output gets its name, since each Identity node costs a part of a
    microsecond in each call. Only outputs that no node computes, or that occur twice, get one.
    """
    import onnx

    graph, renamed = model.graph, {}
    has_subgraphs = any(part.HasField("g") for node in graph.node for part in node.attribute)
    computed = set() if has_subgraphs else {name for node in graph.node for name in node.output}
    for output, name in zip(graph.output, names, strict=True):
        if output.name in computed:
            renamed[output.name] = name
            computed.remove(output.name)
        else:
            source = renamed.get(output.name, output.name)
            graph.node.append(onnx.helper.make_node("Identity", [source], [name]))
        output.name = name
    for node in graph.node:
        for used in (node.input, node.output):
            used[:] = [renamed.get(name, name) for name in used]
