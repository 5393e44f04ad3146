"""MLServer: the ONNX files of a policy with settings and a runtime that runs them.

MLServer has no runtime for ONNX, so the export contains one: `policy_runtime.py`, which is
`mlserver_runtime.py` of this folder. It imports only MLServer, NumPy and ONNX Runtime.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfpolicies.export.job import ExportJob
from tfpolicies.export.onnx_writer import write_onnx
from tfpolicies.export.serving_functions import (
    GREEDY,
    ServingPort,
    get_protocol_datatype,
    make_input_ports,
    make_output_ports,
)
from tfpolicies.export.spec_writer import ExportResult
from tfpolicies.export.verify import ONNX_FILES
from tfpolicies.program.program import Program

SETTINGS_FILE, RUNTIME_FILE = "model-settings.json", "policy_runtime.py"
MAX_BATCH_SIZE, MAX_BATCH_SECONDS = 64, 0.001
_RUNTIME = Path(__file__).with_name("mlserver_runtime.py")  # copied, not imported


def export_mlserver(job: ExportJob) -> ExportResult:
    """Writes `model-settings.json`, `policy_runtime.py` and the ONNX files, verified.

    The folder's name is that of the model. Requests of policies that are not recurrent are batched;
    a recurrent one takes sequences, and clients send back the recurrent state that they received.
    Raises as `export_onnx` does.
    """
    settings = json.dumps(_make_settings(job.program), indent=2) + "\n"
    extra_files = {RUNTIME_FILE: _RUNTIME.read_bytes(), SETTINGS_FILE: settings.encode()}
    parity = write_onnx(job, extra_files, layout="mlserver")
    use = f"Start it with mlserver start {str(job.target)!r}."
    return ExportResult(job.target, parity, use)


def _make_settings(program: Program) -> dict[str, Any]:
    return {
        "implementation": "policy_runtime.PolicyRuntime",
        "platform": "onnx",
        "inputs": [_make_metadata(port) for port in make_input_ports(program)],
        "outputs": [_make_metadata(port) for port in make_output_ports(program)],
        "parameters": {"extra": {"file": ONNX_FILES[GREEDY]}},
        **({} if program.ports.is_recurrent else _BATCHING),
    }


_BATCHING = {"max_batch_size": MAX_BATCH_SIZE, "max_batch_time": MAX_BATCH_SECONDS}


def _make_metadata(port: ServingPort) -> dict[str, Any]:
    shape = [*[-1] * port.axes, *port.port.shape]
    return {"name": port.name, "datatype": get_protocol_datatype(port.port.dtype), "shape": shape}
