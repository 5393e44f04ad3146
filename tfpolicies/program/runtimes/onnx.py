"""Acting through ONNX Runtime: the act function converted once, the weights being inputs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

OPSET = 18
_MAX_BINDINGS = 16  # batch sizes kept bound at once


class _Binding(NamedTuple):
    """One batch size, bound: ONNX Runtime keeps output buffers, so each size has its own."""

    io: Any
    obs: list[np.ndarray]
    noise: np.ndarray
    outputs: list[np.ndarray]


class OnnxActor:
    """Runs a converted act function on one thread, with inputs and outputs bound to NumPy memory.

    Args:
        model: the serialised ONNX model, as `convert_act` gives it.
        weight_keys: the state's key of each weight input, in order.
        obs: shape (without the batch) and dtype of each observation leaf.
        noise_size: columns of the noise.
        outputs: name, shape (without the batch) and dtype of each output.
    """

    def __init__(
        self,
        model: bytes,
        weight_keys: Sequence[str],
        obs: Sequence[tuple[tuple[int, ...], np.dtype]],
        noise_size: int,
        outputs: Sequence[tuple[str, tuple[int, ...], np.dtype]],
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
        present = {node.name for node in self._session.get_inputs()}
        self._weights = [
            (name, key)
            for name, key in ((f"weights_{i}", key) for i, key in enumerate(weight_keys))
            if name in present
        ]
        self._noise_bound = "noise" in present
        self._obs = [(f"obs_{i}", shape, dtype) for i, (shape, dtype) in enumerate(obs)]
        self._obs_bound = [name in present for name, _, _ in self._obs]
        self._noise_size = noise_size
        self._outputs = list(outputs)
        self._bindings: OrderedDict[int, _Binding] = OrderedDict()
        self._bound_state: Any = None

    def run(
        self, state: Any, obs: Sequence[np.ndarray], noise: np.ndarray | None
    ) -> list[np.ndarray]:
        """Acts for `state` on observation leaves `[B, ...]`; `noise=None` is greedy.

        Returns the output buffers of this batch size: valid until the next call of the same size.
        """
        if self._bound_state is not state:
            self._bindings.clear()
            self._bound_state = state
        size = len(obs[0])
        if size == 0:  # ONNX Runtime mistakes the shapes of empty results
            return [np.zeros((0, *shape), dtype) for _, shape, dtype in self._outputs]
        binding = self._bindings.get(size)
        if binding is None:
            binding = self._bind(state, size)
        for buffer, leaf in zip(binding.obs, obs, strict=True):
            buffer[...] = leaf
        if noise is None:
            binding.noise.fill(0.0)
        else:
            binding.noise[...] = noise
        self._session.run_with_iobinding(binding.io)
        return binding.outputs

    def _bind(self, state: Any, size: int) -> _Binding:
        io = self._session.io_binding()
        for name, key in self._weights:
            io.bind_cpu_input(name, state.arrays[key])
        obs = [np.zeros((size, *shape), dtype) for _, shape, dtype in self._obs]
        for (name, _, _), array, bound in zip(self._obs, obs, self._obs_bound, strict=True):
            if bound:
                io.bind_cpu_input(name, array)
        noise = np.zeros((size, self._noise_size), np.float32)
        if self._noise_bound:
            io.bind_cpu_input("noise", noise)
        outputs = []
        for name, shape, dtype in self._outputs:
            array = np.zeros((size, *shape), dtype)
            io.bind_output(
                name, "cpu", 0, element_type=dtype, shape=array.shape, buffer_ptr=array.ctypes.data
            )
            outputs.append(array)
        if len(self._bindings) >= _MAX_BINDINGS:
            self._bindings.popitem(last=False)
        binding = self._bindings[size] = _Binding(io, obs, noise, outputs)
        return binding


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


@contextlib.contextmanager
def quiet_conversion() -> Iterator[None]:
    """Keeps the converter's remarks off the user's terminal; errors are raised as ever."""
    loggers = [logging.getLogger(name) for name in ("tf2onnx", "tensorflow")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # what is an error is raised, too
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
