"""ONNX files: one graph that is greedy, one that samples, and a player beside them."""

from __future__ import annotations

import hashlib
import importlib
import operator
import os
import shutil
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpolicies.errors import ExportError, MissingPackageError
from tfpolicies.export.result import SPEC_FILE, ExportResult, export_errors, write_spec
from tfpolicies.export.serving import GREEDY, Serving, ServingPort
from tfpolicies.export.staging import place_files, staging_folder
from tfpolicies.export.verify import ONNX_FILES, verify_onnx
from tfpolicies.export.web import WebPage
from tfpolicies.program.program import Program
from tfpolicies.program.runtimes.onnx import OPSET, convert
from tfpolicies.state import PolicyState
from tfpolicies.system.forks import require_tensorflow
from tfpolicies.system.quiet import quiet_conversion

PLAYER_FILE = "play.py"
_PLAYER = Path(__file__).with_name("player.py")  # copied, not imported: it stands alone


def export_onnx(
    program: Program,
    state: PolicyState,
    export_dir: str | os.PathLike[str],
    opset: int = OPSET,
    page: WebPage | None = None,
) -> ExportResult:
    """Writes `model.onnx` (greedy) and `model_sample.onnx` (with `noise`), verified.

    Beside them lie `policy_spec.json` and `play.py`, a client that needs NumPy and ONNX Runtime
    only. Files of an earlier export are replaced.

    Args:
        program: what the policy shares with its kind.
        state: what it owns.
        export_dir: the folder; made if missing.
        opset: the version of ONNX's operators.
        page: also written, for the browser.

    Returns:
        The path of `model.onnx` and how well both graphs agree with the policy.

    Raises:
        MissingPackageError: if tf2onnx or ONNX Runtime is not installed.
        ExportError: if it cannot be written or does not do what the policy does; `export_dir` is
            then as it was.
        ForkError: if this process was forked after TensorFlow had started.
    """
    opset = _checked_opset(opset)
    _require("tf2onnx", "onnx", "onnxruntime")
    require_tensorflow()
    target = Path(export_dir)
    state = state.copy()  # which learning on elsewhere does not change
    with export_errors(f"ONNX (opset {opset})", target), staging_folder(target) as staging:
        serving = Serving(program, state)
        checksums = {}
        for signature, name in ONNX_FILES.items():
            content = _converted(serving, signature, opset)
            (staging / name).write_bytes(content)
            checksums[name] = hashlib.sha256(content).hexdigest()
        shutil.copyfile(_PLAYER, staging / PLAYER_FILE)
        parity = verify_onnx(staging, program, state)
        write_spec(
            staging,
            program,
            serving,
            parity,
            artefact="onnx",
            files=ONNX_FILES,
            sha256=checksums,
            opset=opset,
            packages=("tensorflow", "keras", "tf2onnx", "onnx", "onnxruntime"),
            **({} if page is None else {"web": page.runtime}),
        )
        shown = [] if page is None else page.write(staging)
        place_files(staging, target, [*shown, *ONNX_FILES.values(), PLAYER_FILE, SPEC_FILE])
    return ExportResult(target / ONNX_FILES[GREEDY], parity)


def _checked_opset(opset: Any) -> int:
    try:
        number = operator.index(opset)
    except TypeError:
        number = 0
    if isinstance(opset, bool) or number < 1:
        raise ExportError(
            f"The ONNX opset must be a positive integer, got {opset!r}. Use onnx=True for the "
            f"default, {OPSET}."
        )
    return number


def _require(*packages: str) -> None:
    for package in packages:
        try:
            with quiet_conversion():
                importlib.import_module(package)
        except ImportError as error:
            raise MissingPackageError(
                f"Exporting a policy to ONNX requires `{package}`, which cannot be imported "
                f"({error}). Install it: pip install {package}"
            ) from error


def _converted(serving: Serving, signature: str, opset: int) -> bytes:
    import onnx

    specs = [port.tensor_spec for port in serving.inputs[signature]]
    function = tf.function(serving.flat_function(signature), input_signature=specs, autograph=False)
    content = convert(function, specs, [port.name for port in serving.outputs], opset)
    model = onnx.load_from_string(content)
    graph = model.graph
    # A graph lists what it uses; the ports are promised, whether the model reads them or not.
    for values, ports in (
        (graph.input, serving.inputs[signature]),
        (graph.output, serving.outputs),
    ):
        del values[:]
        values.extend(_value_info(port) for port in ports)
    return model.SerializeToString()


def _value_info(port: ServingPort) -> Any:
    import onnx

    kind = onnx.helper.np_dtype_to_tensor_dtype(port.port.dtype)
    axes = ["batch", "time"][: port.axes]
    return onnx.helper.make_tensor_value_info(port.name, kind, [*axes, *port.port.shape])
