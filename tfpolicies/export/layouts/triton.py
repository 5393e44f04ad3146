"""Triton Inference Server: an entry of a model repository, for the ONNX Runtime backend.

A policy that is not recurrent is batched dynamically. A recurrent one is served by sequences:
Triton stores the recurrent state of each, by the correlation ID of its requests, and passes it to
the graph, which runs one step of each sequence. See `docs/decisions/019`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.errors import ExportError
from tfpolicies.export.job import ExportJob
from tfpolicies.export.onnx_writer import make_onnx_model, make_value_info, open_onnx_staging
from tfpolicies.export.publish import publish_folder, publish_version, replace_files
from tfpolicies.export.serving_functions import (
    GREEDY,
    ServingFunctions,
    ServingPort,
    get_protocol_datatype,
)
from tfpolicies.export.spec_writer import ExportResult, write_spec
from tfpolicies.export.verify import Parity, Step, make_onnx_step, make_sequence_runner, verify
from tfpolicies.models.ports import PolicyPort
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.program import Program

MODEL_FILE, CONFIG_FILE = "model.onnx", "config.pbtxt"
MAX_BATCH_SIZE = 256
MAX_SEQUENCES = 1024  # whose recurrent states are stored at once
MAX_IDLE_SECONDS = 600
_QUEUE_DELAY = 100  # microseconds that a request waits for a batch
START = ServingPort(PolicyPort("START", (1,), np.dtype(np.int32)), 1)
"""The input for Triton's flag that a sequence begins, `[B, 1]`: 1 or 0."""

FIRST_VERSION = "1"  # later versions are numbered when they are published


def export_triton(job: ExportJob) -> ExportResult:
    """Writes `config.pbtxt` and the next version, `<n>/model.onnx`, verified.

    The folder is the entry of one model; its parent is the repository, and its name is that of the
    model. `policy_spec.json` is next to the ONNX file. Raises as `export_onnx` does.
    """
    with open_onnx_staging(job) as staging:
        parity = write_triton(staging, job)
        path = publish_triton(staging, job.target)
    repository = str(job.target.parent)
    return ExportResult(
        path, parity, f"Start it with tritonserver --model-repository={repository}."
    )


def write_triton(folder: Path, job: ExportJob) -> Parity:
    """Writes an entry of a repository into a folder, with one version in it, verified."""
    program = job.program
    serving = ServingFunctions(program, job.state, stepwise=True)
    version, state_ports = folder / FIRST_VERSION, program.ports.states
    version.mkdir()
    inputs = serving.inputs[GREEDY]
    model_inputs = [
        _rename_state_port(port) if port.port in state_ports else port for port in inputs
    ]
    content = make_onnx_model(
        serving.make_flat_function(GREEDY), model_inputs, serving.outputs, job.opset
    )
    if state_ports:
        serving.inputs = {GREEDY: [*inputs, START]}
        content = _add_start_input(content, state_ports)
    (version / MODEL_FILE).write_bytes(content)
    parity = _verify(make_onnx_step(version / MODEL_FILE), program, job.state)
    entries = {"opset": job.opset, "layout": "triton"}
    write_spec(version, "onnx", serving, parity, job.card, {GREEDY: MODEL_FILE}, **entries)
    (folder / CONFIG_FILE).write_text(_make_config(serving, state_ports, content), encoding="utf-8")
    return parity


def publish_triton(staging: Path, entry: Path) -> Path:
    """Moves the files of `write_triton` to an entry of a repository; returns the version folder."""
    if publish_folder(staging, entry):
        return entry / FIRST_VERSION
    with replace_files(staging, entry, [CONFIG_FILE]):
        return publish_version(staging / FIRST_VERSION, entry)


def _rename_state_port(port: ServingPort) -> ServingPort:
    """Returns the port of a recurrent state in the graph after START was applied."""
    return ServingPort(port.port._replace(name=f"{port.name}_kept"), port.axes)


def _add_start_input(content: bytes, state_ports: Sequence[PolicyPort]) -> bytes:
    """Adds the input START to a graph, which replaces recurrent states by zeros where it is 1.

    TensorFlow code for this would be converted to a product with 0, which lets NaN through.
    """
    import onnx

    model = onnx.load_from_string(content)
    make, const = onnx.helper.make_node, onnx.numpy_helper.from_array
    nodes = [make("Cast", [START.name], ["begins"], to=onnx.TensorProto.BOOL)]
    constants = [const(np.array(0.0, np.float32), "forgotten")]
    inputs = {value.name: value for value in model.graph.input}
    for port in state_ports:
        name, inner_name = port.name, _rename_state_port(ServingPort(port, 1)).name
        inputs[inner_name].name = name
        constants.append(const(np.array([-1, *[1] * len(port.shape)]), f"{name}_axes"))
        nodes.append(make("Reshape", ["begins", f"{name}_axes"], [f"{name}_begins"]))
        nodes.append(make("Where", [f"{name}_begins", "forgotten", name], [inner_name]))
    nodes += model.graph.node
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(constants)
    model.graph.input.append(make_value_info(START))
    return bytes(model.SerializeToString())


def _verify(step: Step, program: Program, state: PolicyState) -> Parity:
    """Compares a graph to its policy; START must reset the state of a recurrent one."""
    if not program.ports.is_recurrent:
        return verify(make_sequence_runner(step, program), program, state, [GREEDY])

    def run_step(inputs: dict[str, np.ndarray]) -> Any:
        rows = len(next(iter(inputs.values())))
        outputs = step({**inputs, START.name: np.zeros((rows, 1), np.int32)})
        _check_start(step, inputs, rows)
        return outputs

    return verify(make_sequence_runner(run_step, program), program, state, [GREEDY])


def _check_start(step: Step, inputs: dict[str, np.ndarray], rows: int) -> None:
    """Raises an `ExportError` if outputs at the start of a sequence depend on the earlier state."""
    ones = {START.name: np.ones((rows, 1), np.int32)}
    from_zeros, from_nan = (
        step({k: np.full_like(x, fill) if k.startswith("state_in_") else x for k, x in items})
        for fill in (0.0, np.nan)
        for items in [({**inputs, **ones}).items()]
    )
    for name, array in from_zeros.items():
        if not np.array_equal(array, from_nan[name], equal_nan=array.dtype.kind == "f"):
            raise ExportError(f"The exported graph does not reset its state at START: {name}.")


def _make_config(
    serving: ServingFunctions, state_ports: Sequence[PolicyPort], content: bytes
) -> str:
    """Returns the text of `config.pbtxt`, a `ModelConfig` of Triton's published protocol."""
    import onnx

    # A GPU is faster only for convolutions.
    operators = {node.op_type for node in onnx.load_from_string(content).graph.node}
    device_kind = "KIND_AUTO" if "Conv" in operators else "KIND_CPU"
    hidden_names = {port.name for port in state_ports}
    hidden_names |= {name.replace("_in_", "_out_") for name in hidden_names} | {START.name}
    lines = ['backend: "onnxruntime"', f"max_batch_size: {MAX_BATCH_SIZE}"]
    for kind, ports in (("input", serving.inputs[GREEDY]), ("output", serving.outputs)):
        lines += [
            f"{kind} {{ {_format_tensor(port.port)} }}"
            for port in ports
            if port.name not in hidden_names
        ]
    lines.append(f"instance_group {{ kind: {device_kind} }}")
    return "\n".join(
        [*lines, *(_make_sequence_batching(state_ports) if state_ports else _DYNAMIC_BATCHING), ""]
    )


_DYNAMIC_BATCHING = [f"dynamic_batching {{ max_queue_delay_microseconds: {_QUEUE_DELAY} }}"]


def _make_sequence_batching(state_ports: Sequence[PolicyPort]) -> list[str]:
    states = [
        f'  state {{ input_name: "{port.name}" output_name: "{port.name.replace("_in_", "_out_")}" '
        f'{_format_type(port)} initial_state {{ name: "zeros" {_format_type(port)} zero_data: '
        "true } }"
        for port in state_ports
    ]
    return [
        "sequence_batching {",
        f"  max_sequence_idle_microseconds: {MAX_IDLE_SECONDS * 1_000_000}",
        f"  oldest {{ max_candidate_sequences: {MAX_SEQUENCES} "
        f"max_queue_delay_microseconds: {_QUEUE_DELAY} }}",
        f'  control_input {{ name: "{START.name}" '
        "control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }",
        *states,
        "}",
    ]


def _format_tensor(port: PolicyPort) -> str:
    """Returns an input or output; scalars per row have the shape `[1]` for clients."""
    if port.shape:
        return f'name: "{port.name}" {_format_type(port)}'
    one = port._replace(shape=(1,))
    return f'name: "{port.name}" {_format_type(one)} reshape: {{ shape: [ ] }}'


def _format_type(port: PolicyPort) -> str:
    dims = ", ".join(map(str, port.shape))
    return f"data_type: TYPE_{get_protocol_datatype(port.dtype)} dims: [ {dims} ]"
