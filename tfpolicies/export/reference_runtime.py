"""Runs a policy's own code on the CPU, also in double precision, to compare exports with it."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfpolicies.program.devices import CPU
from tfpolicies.program.functions import ActInputs, ActOutputs
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.program import Program

if TYPE_CHECKING:
    from tensorflow.core.framework.attr_value_pb2 import AttrValue
    from tensorflow.core.framework.graph_pb2 import GraphDef


class ReferenceRuntime:
    """The act function of a Program on the CPU, on whatever device the Program acts.

    For double precision the traced graph is rewritten, so that any model can be run, including
    custom ones.

    Args:
        program: of the policy.
        double_precision: whether to use float64 instead of float32.

    Raises:
        ValueError: if an operation of the graph does not exist in double precision.
        tf.errors.OpError: if an operation cannot be run in double precision.
    """

    def __init__(self, program: Program, *, double_precision: bool) -> None:
        self._program = program
        weights = [tf.TensorSpec(x.shape, x.dtype) for x in program.layout.acting_slots]
        explorer = program.spec.explorer
        signature = [
            *weights,
            *(tf.TensorSpec([None, *x.shape], x.dtype) for x in program.ports.all),
            tf.TensorSpec([None, explorer.noise_size], tf.float32),
            tf.TensorSpec([explorer.num_params], tf.float32),
        ]

        def act(*tensors: tf.Tensor) -> list[tf.Tensor]:
            *inputs, noise, params = tensors[len(weights) :]
            act_inputs = ActInputs(inputs, noise, params)
            return program.act_layout.flatten(
                program.functions.act(tensors[: len(weights)], act_inputs)
            )

        with program.lock, tf.device(CPU):
            function = tf.function(act, autograph=False).get_concrete_function(*signature)
        self._convert = _to_double if double_precision else lambda dtype: dtype
        self._act: Any = function
        if not double_precision:
            return
        graph = _convert_graph(function.graph.as_graph_def())
        names, outputs = [x.name for x in function.inputs], [x.name for x in function.outputs]

        def run_graph(*tensors: tf.Tensor) -> Any:
            input_map = dict(zip(names, tensors, strict=True))
            return tf.graph_util.import_graph_def(graph, input_map, return_elements=outputs)

        double_signature = [tf.TensorSpec(x.shape, _to_double(x.dtype)) for x in signature]
        with tf.device(CPU):
            self._act = tf.compat.v1.wrap_function(run_graph, double_signature)

    def run(
        self,
        state: PolicyState,
        inputs: Sequence[np.ndarray],
        noise: np.ndarray,
        params: np.ndarray,
    ) -> ActOutputs:
        """Acts for one state; see `TFRuntime.run`."""
        weights = [state.arrays[slot.key] for slot in self._program.layout.acting_slots]
        arrays = [*weights, *inputs, noise, params]
        with tf.device(CPU):
            tensors = [tf.constant(x, self._convert(tf.as_dtype(x.dtype))) for x in arrays]
            outputs = self._act(*tensors)
        return self._program.act_layout.unflatten([x.numpy() for x in outputs])


def _to_double(dtype: tf.DType) -> tf.DType:
    return tf.float64 if dtype == tf.float32 else dtype


def _convert_graph(graph: GraphDef) -> Any:
    """Returns a `GraphDef` with float64 instead of float32; its functions get other names.

    Two functions with the same name and different contents cannot be in one process.
    """
    library = graph.library
    names = {x.signature.name: f"{x.signature.name}_in_double" for x in library.function}
    for node in [
        *graph.node,
        *(node for function in library.function for node in function.node_def),
    ]:
        node.op = names.get(node.op, node.op)
        _convert_attributes(node.attr, names)
    for function in library.function:
        function.signature.name = names[function.signature.name]
        for argument in (*function.signature.input_arg, *function.signature.output_arg):
            argument.type = _to_double(tf.as_dtype(argument.type)).as_datatype_enum
        _convert_attributes(function.attr, names)
    del library.gradient[:]
    return graph


def _convert_attributes(attributes: MutableMapping[str, AttrValue], names: dict[str, str]) -> None:
    """Changes types, constants and names of functions in the attributes of a node."""
    single = tf.float32.as_datatype_enum
    double = tf.float64.as_datatype_enum
    for value in attributes.values():
        kind = value.WhichOneof("value")
        if kind == "type" and value.type == single:
            value.type = double
        elif kind == "tensor" and value.tensor.dtype == single:
            array = tf.make_ndarray(value.tensor).astype(np.float64)
            value.tensor.CopyFrom(tf.make_tensor_proto(array))
        elif kind == "list":
            value.list.type[:] = [double if x == single else x for x in value.list.type]
        for function in [value.func] if kind == "func" else value.list.func:
            function.name = names.get(function.name, function.name)
            _convert_attributes(function.attr, names)
