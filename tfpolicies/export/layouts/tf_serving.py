"""TensorFlow Serving: a SavedModel's version folder with warm-up requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

from tfpolicies.export.job import ExportJob
from tfpolicies.export.player import encode_varint
from tfpolicies.export.saved_model_writer import export_saved_model
from tfpolicies.export.serving_functions import GREEDY, ServingFunctions
from tfpolicies.export.spec_writer import ExportResult
from tfpolicies.export.verify import draw_random_inputs
from tfpolicies.models.ports import SEQ_LENS
from tfpolicies.program.program import Program

WARM_UP = Path("assets.extra", "tf_serving_warmup_requests")
BATCH_SIZES = (1, 8, 32, 128)

# Field numbers in the published messages of TensorFlow Serving.
_PREDICT_LOG, _REQUEST = 6, 1  # of PredictionLog; of PredictLog
_MODEL_SPEC, _INPUTS = 1, 2  # of PredictRequest
_NAME, _SIGNATURE = 1, 3  # of ModelSpec
_KEY, _VALUE = 1, 2  # of an entry of a map


def export_tf_serving(job: ExportJob) -> ExportResult:
    """Writes a SavedModel with warm-up requests; see `export_saved_model`.

    TensorFlow Serving runs the requests, of a few batch sizes, before it accepts others, so that
    clients do not wait for lazy initialisation. They call `serving_default` of a model whose name
    is that of the folder.
    """
    name = job.target.name

    def add_requests(folder: Path, serving: ServingFunctions) -> None:
        (folder / WARM_UP).parent.mkdir()
        with tf.io.TFRecordWriter(str(folder / WARM_UP)) as records:
            for inputs in _make_batches(job.program):
                records.write(_encode_prediction_log(name, inputs))

    result = export_saved_model(job, add_requests)
    command = f"tensorflow_model_server --model_name={name} --model_base_path={job.target}"
    use = f"Start it with {command}."
    return result._replace(use=use)


def _make_batches(program: Program) -> list[dict[str, np.ndarray]]:
    ports, rng, batches = program.ports, np.random.default_rng(0), []
    for size in BATCH_SIZES:
        drawn = draw_random_inputs(ports, size, 1, rng)
        inputs = {port.name: x for port, x in zip(ports.all, drawn, strict=True)}
        if ports.is_recurrent:
            inputs[SEQ_LENS] = np.ones(size, np.int32)
        else:
            inputs = {name: x[:, 0] for name, x in inputs.items()}
        batches.append(inputs)
    return batches


def _encode_prediction_log(model: str, inputs: dict[str, np.ndarray]) -> bytes:
    """Returns a serialised `tensorflow.serving.PredictionLog` of one request.

    All of its fields are texts, messages or maps, which are encoded in the same way: number, length
    and content. So a few lines replace a package of generated code.
    """
    spec = _encode_field(_NAME, model.encode()) + _encode_field(_SIGNATURE, GREEDY.encode())
    request = _encode_field(_MODEL_SPEC, spec)
    for name, array in inputs.items():
        tensor = tf.make_tensor_proto(array).SerializeToString()
        request += _encode_field(
            _INPUTS, _encode_field(_KEY, name.encode()) + _encode_field(_VALUE, tensor)
        )
    return _encode_field(_PREDICT_LOG, _encode_field(_REQUEST, request))


def _encode_field(number: int, content: bytes) -> bytes:
    """Returns a length-delimited field of a Protocol Buffers message.

    >>> list(_encode_field(1, b"hi"))
    [10, 2, 104, 105]
    """
    return bytes([number << 3 | 2]) + encode_varint(len(content)) + content
