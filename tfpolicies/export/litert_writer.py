"""Exports LiteRT files, for phones and small boards: greedy, one step per sequence."""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf

from tfpolicies.errors import ExportError, MissingPackageError
from tfpolicies.export.action_agreement import check_observations, measure_agreement
from tfpolicies.export.job import ExportJob
from tfpolicies.export.model_card import CARD_FILE
from tfpolicies.export.publish import open_staging_folder, publish_files
from tfpolicies.export.serving_functions import GREEDY, ServingFunctions
from tfpolicies.export.spec_writer import SPEC_FILE, ExportResult, wrap_export_errors, write_spec
from tfpolicies.export.verify import TOLERANCE, Step, make_sequence_runner, verify
from tfpolicies.system.fork_guard import check_tensorflow_survived_fork
from tfpolicies.system.log_suppression import suppress_conversion_output, suppress_native_stderr

MODEL_FILE = "model.tflite"
WEIGHTS = ("float32", "float16", "int8")
"""The dtypes of stored weights. With `int8`, arrays of less than 1024 numbers stay float32."""

_UNSUPPORTED = re.compile("(?:TF Select|Custom) ops: (.+)")


def export_litert(job: ExportJob) -> ExportResult:
    """Writes `model.tflite` and `policy_spec.json`, verified by LiteRT.

    The file has only the greedy signature, without operations of TensorFlow (Flex). A recurrent
    policy takes and returns one step, `[B, ...]`, and the recurrent state. Files of an earlier
    export are replaced. Weights of "float32" are verified to rounding. For "float16" and "int8" the
    result has the differences of outputs and the share of equal actions.

    Raises:
        MissingPackageError: if `ai-edge-litert` is not installed.
        ExportError: if it cannot be converted (the message names the operation) or written, or
            differs from the policy; the folder is then unchanged.
        ForkError: if this process was forked after TensorFlow had started.
    """
    _require_litert()
    check_tensorflow_survived_fork()
    target, program, state, weights = job.target, job.program, job.state, job.weights
    observations = None
    if job.observations is not None:
        observations = check_observations(program, job.observations)
    tolerance = TOLERANCE if weights == "float32" else np.inf
    with wrap_export_errors("LiteRT", target), open_staging_folder(target) as staging:
        serving = ServingFunctions(program, state, stepwise=True)
        content = _convert(serving, weights)
        (staging / MODEL_FILE).write_bytes(content)
        run = make_sequence_runner(_make_step(content), program)
        parity = verify(run, program, state, [GREEDY], tolerance)
        acting = measure_agreement(run, program, state, observations)
        entries = {"opset": None, "weights": weights, "agreement": acting._asdict()}
        write_spec(staging, "litert", serving, parity, job.card, {GREEDY: MODEL_FILE}, **entries)
        publish_files(staging, target, [CARD_FILE, MODEL_FILE, SPEC_FILE])
    path = target / MODEL_FILE
    use = f"Load it with ai_edge_litert.interpreter.Interpreter({str(path)!r})."
    return ExportResult(path, parity, use, acting)


def _require_litert() -> None:
    try:
        with suppress_native_stderr(b""):
            import ai_edge_litert.interpreter  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "Exporting a policy to LiteRT requires `ai-edge-litert`, which cannot be imported "
            f"({error}). Install it: pip install 'tfpolicies[edge]'"
        ) from error


def _convert(serving: ServingFunctions, weights: str) -> bytes:
    """Returns the greedy signature as a LiteRT model."""
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [serving.signatures[GREEDY]], serving.module
    )
    if weights != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if weights == "float16":
        converter.target_spec.supported_types = [tf.float16]
    with suppress_conversion_output(), suppress_native_stderr(b""):
        try:
            return bytes(converter.convert())
        except Exception as error:
            failed = error
    unsupported = _UNSUPPORTED.findall(str(failed))
    if not unsupported:
        raise failed
    raise ExportError(
        f"LiteRT has no operation for {', '.join(unsupported)} of TensorFlow, which the policy "
        "uses. Write the model without it, or export a SavedModel or ONNX."
    ) from failed


def _make_step(content: bytes) -> Step:
    """Returns a function that runs a LiteRT model, from inputs to outputs by name."""
    from ai_edge_litert.interpreter import Interpreter

    with suppress_native_stderr(b""):
        interpreter = Interpreter(model_content=content, num_threads=1)
        interpreter.allocate_tensors()
        runner = interpreter.get_signature_runner(GREEDY)
    return lambda inputs: runner(**inputs)
