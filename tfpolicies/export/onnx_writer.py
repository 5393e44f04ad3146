"""Exports ONNX files: a greedy graph, one that samples, and a client for them."""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpolicies.base.acting_runtimes import ONNX_OPSETS
from tfpolicies.errors import ExportError, MissingPackageError
from tfpolicies.export.job import ExportJob
from tfpolicies.export.model_card import CARD_FILE
from tfpolicies.export.publish import open_staging_folder, publish_files
from tfpolicies.export.serving_functions import GREEDY, ServingFunctions, ServingPort
from tfpolicies.export.spec_writer import SPEC_FILE, ExportResult, wrap_export_errors, write_spec
from tfpolicies.export.verify import ONNX_FILES, Parity, verify_onnx
from tfpolicies.program.runtimes.onnx import OPSET, convert
from tfpolicies.system.fork_guard import check_tensorflow_survived_fork
from tfpolicies.system.log_suppression import suppress_conversion_output

PLAYER_FILE = "play.py"
_PLAYER = Path(__file__).with_name("player.py")  # copied, not imported: it has no dependencies


def export_onnx(job: ExportJob) -> ExportResult:
    """Writes `model.onnx` (greedy) and `model_sample.onnx` (with `noise`), verified.

    Also writes `policy_spec.json`, `MODEL_CARD.md` and `play.py`, a client that needs only NumPy
    and ONNX Runtime. Files of an earlier export are replaced.

    Raises:
        MissingPackageError: if tf2onnx or ONNX Runtime is not installed.
        ExportError: if it cannot be written or differs from the policy; the folder is then
            unchanged.
        ForkError: if this process was forked after TensorFlow had started.
    """
    target, page = job.target, job.page
    extra_files = {PLAYER_FILE: _PLAYER.read_bytes()}
    if page is None:
        parity = write_onnx(job, extra_files)
    else:
        parity = write_onnx(job, {**page.read_files(), **extra_files}, web=page.runtime)
    path = target / ONNX_FILES[GREEDY]
    use = f"Load it with onnxruntime.InferenceSession({str(path)!r})."
    if page is not None:
        use += f" See it: python3 -m http.server -d {str(target)!r}."
    return ExportResult(path, parity, use)


@contextlib.contextmanager
def open_onnx_staging(job: ExportJob) -> Iterator[Path]:
    """Yields a folder for the ONNX files of a job; any error in the block is an `ExportError`."""
    _require_packages("tf2onnx", "onnx", "onnxruntime")
    check_tensorflow_survived_fork()
    label = f"ONNX (opset {job.opset})"
    with wrap_export_errors(label, job.target), open_staging_folder(job.target) as staging:
        yield staging


def write_onnx(job: ExportJob, extra_files: Mapping[str, bytes], **entries: object) -> Parity:
    """Writes `model.onnx`, `model_sample.onnx` and `policy_spec.json` of a job, verified.

    `extra_files` are additional files by name, `entries` additional entries of
    `policy_spec.json`. Raises as `export_onnx` does.
    """
    with open_onnx_staging(job) as folder:
        serving = ServingFunctions(job.program, job.state)
        for signature, name in ONNX_FILES.items():
            function = serving.make_flat_function(signature)
            content = make_onnx_model(
                function, serving.inputs[signature], serving.outputs, job.opset
            )
            (folder / name).write_bytes(content)
        parity = verify_onnx(folder, job.program, job.state)
        write_spec(
            folder, "onnx", serving, parity, job.card, ONNX_FILES, opset=job.opset, **entries
        )
        for name, content in extra_files.items():
            (folder / name).write_bytes(content)
        names = [CARD_FILE, *extra_files, *ONNX_FILES.values(), SPEC_FILE]
        publish_files(folder, job.target, names)
    return parity


def check_opset(opset: int) -> int:
    """Returns an ONNX opset as an integer; raises an `ExportError` if it is not supported."""
    try:
        number = operator.index(opset)
    except TypeError:
        number = 0
    if isinstance(opset, bool) or number not in ONNX_OPSETS:
        raise ExportError(
            f"The ONNX opset must be an integer from {ONNX_OPSETS[0]} to {ONNX_OPSETS[-1]}, got "
            f"{opset!r:.200}. Use onnx=True for the default, {OPSET}."
        )
    return number


def _require_packages(*packages: str) -> None:
    for package in packages:
        try:
            with suppress_conversion_output():
                importlib.import_module(package)
        except ImportError as error:
            raise MissingPackageError(
                f"Exporting a policy to ONNX requires `{package}`, which cannot be imported "
                f"({error}). Install it: pip install {package}"
            ) from error


def make_onnx_model(
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
        values.extend(make_value_info(port) for port in ports)
    return model.SerializeToString()


def make_value_info(port: ServingPort) -> Any:
    """Returns ONNX's description of an input or output of a graph."""
    import onnx

    element_type = onnx.helper.np_dtype_to_tensor_dtype(port.port.dtype)
    axes = ["batch", "time"][: port.axes]
    return onnx.helper.make_tensor_value_info(port.name, element_type, [*axes, *port.port.shape])
