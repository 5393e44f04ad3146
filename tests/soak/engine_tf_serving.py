"""Parses the warm-up requests of an export by TensorFlow Serving's own messages, and runs them."""

import json
import sys
from pathlib import Path

import tensorflow as tf
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog

version = Path(sys.argv[1])
records = str(version / "assets.extra" / "tf_serving_warmup_requests")
signatures = tf.saved_model.load(str(version)).signatures
sizes = []
for record in tf.data.TFRecordDataset(records).as_numpy_iterator():
    log = PredictionLog.FromString(record)
    request = log.predict_log.request
    unknown = PredictionLog()
    unknown.CopyFrom(log)
    unknown.DiscardUnknownFields()
    if unknown.SerializeToString(deterministic=True) != log.SerializeToString(deterministic=True):
        raise SystemExit("there are fields that the published messages lack")
    inputs = {name: tf.constant(tf.make_ndarray(x)) for name, x in request.inputs.items()}
    outputs = signatures[request.model_spec.signature_name](**inputs)
    sizes.append(len(outputs["action_logp"]))
print(json.dumps({"requests": len(sizes), "rows": sizes, "model": request.model_spec.name}))
