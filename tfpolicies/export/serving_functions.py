"""The serving functions of an export: acting, with weights, preprocessing and mapping of actions.

An export has two signatures. `serving_default` is greedy; `sample` also takes `noise`
`[B, noise_size]` and turns it into actions of the policy's distribution. The first columns of the
noise are for a noisy network, which uses its mean weights if they are zero. Inputs are the ports of
the policy: `obs` or `obs_<path>`, `action_mask`, views such as `prev_actions`. Both return:

* `actions` `[B, *shape]`: ready for the environment (`actions_<path>` per leaf of a nested space);
* `actions_normalized` `[B, *shape]`: as `compute_actions` returns them;
* `action_logp` `[B]`: the log-probability of these actions;
* `action_dist_inputs` `[B, n]`: the inputs of the action distribution;
* `vf_preds` `[B]`: values, if the model estimates them;
* the outputs that the policy class adds.

A loaded SavedModel is also callable: `model(obs)` does the same as `serving_default`. `obs` is
nested as the observation space is; other inputs follow in the order of the signature.

A recurrent policy takes and returns sequences, `[B, T, ...]` each, with any B and T. It also takes
`state_in_<i>` `[B, *shape]` and `seq_lens` `[B]` int32, the number of valid steps of each sequence,
and returns `state_out_<i>` `[B, *shape]`, the recurrent state after them. A stepwise export takes
and returns one step of each sequence, `[B, ...]`, instead, and has no `seq_lens`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.errors import ExportError
from tfpolicies.exploration.exploration_factory import make_exploration
from tfpolicies.models.ports import NOISE, SEQ_LENS, PolicyPort
from tfpolicies.models.spaces import get_at_path, unflatten
from tfpolicies.program.functions import ActInputs, ActOutputs
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.program import Program

_PYTHON_OPERATIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
GREEDY, SAMPLE = "serving_default", "sample"

_OUTPUT_NAMES = {"logp": "action_logp", "dist_inputs": "action_dist_inputs", "values": "vf_preds"}
"""The names of outputs in an export that differ from those of acting."""


class ServingPort(NamedTuple):
    """One input or output of a signature."""

    port: PolicyPort
    axes: int  # the number of leading dynamic axes: 1 for [B, ...], 2 for [B, T, ...]

    @property
    def name(self) -> str:
        return self.port.name

    @property
    def tensor_spec(self) -> tf.TensorSpec:
        shape = [None] * self.axes + list(self.port.shape)
        return tf.TensorSpec(shape, self.port.dtype, name=self.name)


class ServingFunctions:
    """A Program and the weights of one state as functions of named tensors.

    Args:
        program: has the functions.
        state: its weights are copied.
        stepwise: whether a recurrent policy takes one step, `[B, ...]`, instead of sequences.

    Attributes:
        program: the argument.
        module: owns the weights as variables.
        signatures: the concrete function of each signature.
        inputs: the ports of each signature, observations first.
        outputs: the output ports of both signatures.

    Raises:
        ExportError: if the model runs Python code.
    """

    def __init__(self, program: Program, state: PolicyState, *, stepwise: bool = False) -> None:
        self.program = program
        self._sequences = program.ports.is_recurrent and not stepwise
        self.module = tf.Module(name="policy")
        self.module.weights = [
            tf.Variable(state.arrays[slot.key], name=re.sub(r"[^\w/]", "_", slot.key))
            for slot in program.layout.acting_slots
        ]
        self.explorer = make_serving_explorer(program)
        self.inputs = {GREEDY: make_input_ports(program, stepwise=stepwise)}
        noise = PolicyPort(NOISE, (self.explorer.noise_size,), np.dtype(np.float32))
        self.inputs[SAMPLE] = [*self.inputs[GREEDY], ServingPort(noise, 1 + self._sequences)]
        self.outputs = make_output_ports(program, stepwise=stepwise)
        with program.lock:
            serve = tf.function(self._serve, autograph=False)
            self.signatures = {
                name: serve.get_concrete_function(**{port.name: port.tensor_spec for port in ports})
                for name, ports in self.inputs.items()
            }
        for name, function in self.signatures.items():
            _refuse_python(name, function.graph)

    def _serve(self, **inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        outputs = self.program.act_layout.flatten(self._act(inputs))
        named = name_outputs(self.program, outputs)
        leading = tf.shape(inputs[self.inputs[GREEDY][0].name])[:2]
        for port in self.outputs:
            x = named[port.name]
            named[port.name] = tf.identity(_split_time(x, leading) if port.axes == 2 else x)
        return named

    def make_flat_function(self, signature: str) -> Callable[..., list[tf.Tensor]]:
        """Returns a signature's function with positional instead of named inputs."""
        names = [port.name for port in self.inputs[signature]]
        return lambda *tensors: [*self._serve(**dict(zip(names, tensors, strict=True))).values()]

    def as_callable(self) -> Any:
        """Returns `serving_default` as a traced function `f(obs, *others)`."""
        greedy, ports = self.signatures[GREEDY], self.program.ports
        specs = {port.name: port.tensor_spec for port in self.inputs[GREEDY]}

        def call(obs: TensorStructure, *other_inputs: tf.Tensor) -> dict[str, tf.Tensor]:
            parts = [get_at_path(obs, leaf.path) for leaf in ports.obs_leaves]
            return greedy(**dict(zip(specs, [*parts, *other_inputs], strict=True)))

        function = tf.function(call, autograph=False)
        count, spec_list = len(ports.obs), [*specs.values()]
        function.get_concrete_function(
            unflatten(ports.space, spec_list[:count]), *spec_list[count:]
        )
        return function

    def _act(self, named: dict[str, tf.Tensor]) -> ActOutputs:
        ports = self.program.ports
        weights = [variable.read_value() for variable in self.module.weights]
        first_input = named[ports.all[0].name]
        steps: Any = 1
        if self._sequences:
            steps = tf.shape(first_input)[1]
            named = {
                port.name: _merge_time(named[port.name]) if port.axes == 2 else named[port.name]
                for port in self.inputs[SAMPLE]
                if port.name in named
            }
        inputs = [named[port.name] for port in ports.all]
        noise = named.get(NOISE)
        if noise is None:
            noise = tf.zeros([tf.shape(inputs[0])[0], self.explorer.noise_size], tf.float32)
        params = tf.zeros([self.explorer.num_params], tf.float32)
        act_inputs, lengths = ActInputs(inputs, noise, params), named.get(SEQ_LENS)
        return self.program.functions.act(
            weights, act_inputs, seq_lens=lengths, time_steps=steps, explorer=self.explorer
        )


def get_protocol_datatype(dtype: np.dtype) -> str:
    """Returns the name of a dtype in the Open Inference Protocol.

    >>> get_protocol_datatype(np.dtype("float32")), get_protocol_datatype(np.dtype("uint8"))
    ('FP32', 'UINT8')
    """
    return dtype.name.upper().replace("FLOAT", "FP")


def make_serving_explorer(program: Program) -> Any:
    """Returns the transform from noise to actions of an export: plain sampling."""
    sampling = make_exploration(None, program.spec.dist_class).transform
    return sampling.with_network_noise(program.ports.noise_size)


def make_input_ports(program: Program, *, stepwise: bool = False) -> list[ServingPort]:
    ports = program.ports
    if stepwise or not ports.is_recurrent:
        return [ServingPort(port, 1) for port in ports.all]
    rows = [ServingPort(port, 2) for port in (*ports.obs, *ports.view_ports)]
    lengths = ServingPort(PolicyPort(SEQ_LENS, (), np.dtype(np.int32)), 1)
    return [*rows, *(ServingPort(port, 1) for port in ports.states), lengths]


def make_output_ports(program: Program, *, stepwise: bool = False) -> list[ServingPort]:
    layout = program.act_layout
    per_row = 1 + (program.ports.is_recurrent and not stepwise)
    ports = []
    for port in layout.get_ports():
        if port.name != "prob":
            axes = 1 if port in layout.states else per_row
            ports.append(ServingPort(port._replace(name=_get_output_name(program, port)), axes))
    return ports


def name_outputs(program: Program, outputs: list[Any]) -> dict[str, Any]:
    ports = program.act_layout.get_ports()
    pairs = zip(ports, outputs, strict=True)
    return {_get_output_name(program, port): x for port, x in pairs if port.name != "prob"}


def _get_output_name(program: Program, port: PolicyPort) -> str:
    layout = program.act_layout
    if port in layout.env_actions:
        return port.name.replace("env_actions", "actions", 1)
    if port in layout.actions:
        return port.name.replace("actions", "actions_normalized", 1)
    return _OUTPUT_NAMES.get(port.name, port.name)


def _merge_time(x: tf.Tensor) -> tf.Tensor:
    """Reshapes `[B, T, ...]` to `[B * T, ...]`."""
    return tf.ensure_shape(tf.reshape(x, [-1, *x.shape[2:]]), [None, *x.shape[2:]])


def _split_time(x: tf.Tensor, leading: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, tf.concat([leading, tf.constant(x.shape[1:].as_list(), tf.int32)], axis=0))


def _refuse_python(signature: str, graph: tf.Graph) -> None:
    definition = graph.as_graph_def()
    functions = definition.library.function
    nodes = [*definition.node, *(node for function in functions for node in function.node_def)]
    python_operations = _PYTHON_OPERATIONS & {node.op for node in nodes}
    if python_operations:
        raise ExportError(
            f"The signature {signature!r} runs Python code "
            f"({', '.join(sorted(python_operations))}), which cannot be exported. Write the model "
            "without tf.py_function and tf.numpy_function."
        )
