"""The serving function: acting with the weights, preprocessing and action pipeline inside.

An export has two signatures. `serving_default` takes observations and is greedy; `sample` also
takes `noise` `[B, noise_size]` and turns it into sampled actions. Both give, by name:

* `actions` `[B, *shape]`: ready for the environment;
* `actions_normalized` `[B, *shape]`: as `compute_actions` gives them;
* `action_logp` `[B]`: the log-probability of these actions;
* `action_dist_inputs` `[B, n]`: what the action distribution is made of;
* `vf_preds` `[B]`: values, where the model estimates them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpolicies.errors import ExportError
from tfpolicies.program.program import Program
from tfpolicies.state import PolicyState

_PYTHON_OPERATIONS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
GREEDY, SAMPLE = "serving_default", "sample"
NOISE = "noise"

OUTPUT_FIELDS = {
    "actions": "env_actions",
    "actions_normalized": "actions",
    "action_logp": "logp",
    "action_dist_inputs": "dist_inputs",
    "vf_preds": "values",
}
"""The field of `ActOutputs` behind each output."""


class Port(NamedTuple):
    """One input or output of a signature."""

    name: str
    shape: tuple[int, ...]  # without the batch
    dtype: np.dtype
    path: tuple[str, ...]  # where an observation's leaf lies in its space; () elsewhere

    @property
    def tensor_spec(self) -> tf.TensorSpec:
        """The tensor with its dynamic batch."""
        return tf.TensorSpec([None, *self.shape], self.dtype, name=self.name)


class Serving:
    """A Program and the weights of one state as functions of named tensors.

    Args:
        program: gives the functions.
        state: its weights are copied.

    Attributes:
        module: owns the weights as variables.
        signatures: the concrete function of each signature.
        inputs: the ports of each signature, observations first.
        outputs: the ports that both signatures give.

    Raises:
        ExportError: if two parts of the observation space would have the same input name, or
            the model runs Python code.
    """

    def __init__(self, program: Program, state: PolicyState) -> None:
        self._functions = program.functions
        self.module = tf.Module(name="policy")
        self.module.weights = [
            tf.Variable(state.arrays[slot.key], name=re.sub(r"[^\w/]", "_", slot.key))
            for slot in program.layout.of("model")
        ]
        obs = observation_ports(program)
        noise = Port(NOISE, (program.spec.dist_class.noise_size,), np.dtype(np.float32), ())
        self.inputs = {GREEDY: obs, SAMPLE: [*obs, noise]}
        known = {name: (shape, dtype) for name, shape, dtype in program.output_shapes()}
        self.outputs = [
            Port(name, *known[field], ()) for name, field in OUTPUT_FIELDS.items() if field in known
        ]
        with program.lock:
            self.signatures = {name: self._traced(name) for name in self.inputs}
        for name, function in self.signatures.items():
            _refuse_python(name, function.graph)

    def _traced(self, signature: str) -> Any:
        ports = self.inputs[signature]
        function = tf.function(self._by_name(signature))
        return function.get_concrete_function(**{port.name: port.tensor_spec for port in ports})

    def _by_name(self, signature: str) -> Callable[..., dict[str, tf.Tensor]]:
        ports = self.inputs[signature]
        flat = self.flat_function(signature)

        def serve(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            outputs = flat(*(tensors[port.name] for port in ports))
            return {port.name: x for port, x in zip(self.outputs, outputs, strict=True)}

        return serve

    def flat_function(self, signature: str) -> Callable[..., list[tf.Tensor]]:
        """Returns a signature's function with its ports as positions instead of names."""

        def serve(*tensors: tf.Tensor) -> list[tf.Tensor]:
            if signature == SAMPLE:
                *obs, noise = tensors
            else:
                obs = list(tensors)
                size = self.inputs[SAMPLE][-1].shape[0]
                noise = tf.zeros([tf.shape(obs[0])[0], size], tf.float32)
            weights = [variable.read_value() for variable in self.module.weights]
            acted = self._functions.act(weights, obs, noise)._asdict()
            return [tf.identity(acted[OUTPUT_FIELDS[port.name]]) for port in self.outputs]

        return serve


def observation_ports(program: Program) -> list[Port]:
    """Returns the input of each leaf of the observation space: `obs`, or `obs_<path>`.

    Raises:
        ExportError: if two leaves would have the same name.
    """
    ports: dict[str, Port] = {}
    for leaf in program.spec.obs_leaves:
        name = re.sub(r"\W", "_", leaf.name("obs"), flags=re.ASCII)
        if name in ports:
            raise ExportError(
                f"The parts {'/'.join(ports[name].path)!r} and {'/'.join(leaf.path)!r} of the "
                f"observation space would both be the input {name!r} of the export. Rename one of "
                "the keys in the environment."
            )
        ports[name] = Port(name, leaf.shape, leaf.dtype, leaf.path)
    return list(ports.values())


def _refuse_python(signature: str, graph: Any) -> None:
    found = _PYTHON_OPERATIONS & set(_operation_types(graph))
    if found:
        raise ExportError(
            f"The signature {signature!r} runs Python code ({', '.join(sorted(found))}), which no "
            "export can hold. Write the model without tf.py_function and tf.numpy_function."
        )


def _operation_types(graph: Any) -> Iterator[str]:
    definition = graph.as_graph_def()
    yield from (node.op for node in definition.node)
    for function in definition.library.function:
        yield from (node.op for node in function.node_def)
