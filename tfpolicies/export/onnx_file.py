"""Exports ONNX files: a greedy graph, one that samples, and a client for them."""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpolicies.errors import ExportError, MissingPackageError
from tfpolicies.export.job import ExportJob
from tfpolicies.export.result import SPEC_FILE, ExportResult, export_errors, write_spec
from tfpolicies.export.serving import GREEDY, Serving, ServingPort
from tfpolicies.export.staging import place_files, staging_folder
from tfpolicies.export.verify import ONNX_FILES, Parity, verify_onnx
from tfpolicies.program.runtimes.onnx import OPSET, convert
from tfpolicies.system.forks import require_tensorflow
from tfpolicies.system.quiet import quiet_conversion
from tfpolicies.ways import OPSETS

PLAYER_FILE = "play.py"
_PLAYER = Path(__file__).with_name("player.py")  # copied, not imported: it has no dependencies


def export_onnx(job: ExportJob) -> ExportResult:
    """Writes `model.onnx` (greedy) and `model_sample.onnx` (with `noise`), verified.

    Also writes `policy_spec.json` and `play.py`, a client that needs only NumPy and ONNX Runtime.
    Files of an earlier export are replaced.

    Raises:
        MissingPackageError: if tf2onnx or ONNX Runtime is not installed.
        ExportError: if it cannot be written or differs from the policy; the folder is then
            unchanged.
        ForkError: if this process was forked after TensorFlow had started.
    """
    target, page = job.target, job.page
    others = {PLAYER_FILE: _PLAYER.read_bytes()}
    if page is None:
        parity = write_onnx(job, others)
    else:
        parity = write_onnx(job, {**page.files(), **others}, web=page.runtime)
    path = target / ONNX_FILES[GREEDY]
    use = f"Load it with onnxruntime.InferenceSession({str(path)!r})."
    if page is not None:
        use += f" See it: python3 -m http.server -d {str(target)!r}."
    return ExportResult(path, parity, use)


@contextlib.contextmanager
def onnx_staging(job: ExportJob) -> Iterator[Path]:
    """Yields a folder for the ONNX files of a job; any error in the block is an `ExportError`."""
    _require("tf2onnx", "onnx", "onnxruntime")
    require_tensorflow()
    what = f"ONNX (opset {job.opset})"
    with export_errors(what, job.target), staging_folder(job.target) as staging:
        yield staging


def write_onnx(job: ExportJob, others: Mapping[str, bytes], **entries: object) -> Parity:
    """Writes `model.onnx`, `model_sample.onnx` and `policy_spec.json` of a job, verified.

    `extra_files` are additional files by name, `entries` additional entries of `policy_spec.json`.
    Raises as `export_onnx` does.
    """
    with onnx_staging(job) as folder:
        serving = Serving(job.program, job.state)
        for signature, name in ONNX_FILES.items():
            function = serving.flat_function(signature)
            content = onnx_model(function, serving.inputs[signature], serving.outputs, job.opset)
            (folder / name).write_bytes(content)
        parity = verify_onnx(folder, job.program, job.state)
        write_spec(folder, "onnx", serving, parity, ONNX_FILES, opset=job.opset, **entries)
        for name, content in others.items():
            (folder / name).write_bytes(content)
        place_files(folder, job.target, [*others, *ONNX_FILES.values(), SPEC_FILE])
    return parity


def checked_opset(opset: int) -> int:
    """Returns an ONNX opset as an integer; raises an `ExportError` unless it is in `OPSETS`."""
    try:
        number = operator.index(opset)
    except TypeError:
        number = 0
    if isinstance(opset, bool) or number not in OPSETS:
        raise ExportError(
            f"The ONNX opset must be an integer from {OPSETS[0]} to {OPSETS[-1]}, got "
            f"{opset!r:.200}. Use onnx=True for the default, {OPSET}."
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


def onnx_model(
    function: Callable[..., list[tf.Tensor]],
    inputs: Sequence[ServingPort],
    outputs: Sequence[ServingPort],
    opset: int = OPSET,
) -> bytes:
    """Converts a function from a tensor per input to one per output, to a serialised ONNX model."""
    import onnx

    specs = [port.tensor_spec for port in inputs]
    traced = tf.function(function, input_signature=specs, autograph=False)
    model = onnx.load_from_string(convert(traced, specs, [port.name for port in outputs], opset))
    # A graph lists only inputs that it uses, but an export must have all ports.
    for values, ports in ((model.graph.input, inputs), (model.graph.output, outputs)):
        del values[:]
        values.extend(value_info(port) for port in ports)
    return model.SerializeToString()


def value_info(port: ServingPort) -> Any:
    """Returns ONNX's description of an input or output of a graph."""
    import onnx

    kind = onnx.helper.np_dtype_to_tensor_dtype(port.port.dtype)
    axes = ["batch", "time"][: port.axes]
    return onnx.helper.make_tensor_value_info(port.name, kind, [*axes, *port.port.shape])
