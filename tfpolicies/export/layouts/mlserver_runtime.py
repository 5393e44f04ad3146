"""Serves an exported policy with MLServer; needs only MLServer, NumPy and ONNX Runtime.

This file is next to `model.onnx` as `policy_runtime.py`, and `model-settings.json` names it. It
never imports TensorFlow, Keras or the package that made the export.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.errors import InferenceError
from mlserver.types import InferenceRequest, InferenceResponse, RequestInput, ResponseOutput


class PolicyRuntime(MLModel):
    """Runs `model.onnx` on the inputs of requests: greedy actions, by the names in the file."""

    async def load(self) -> bool:
        """Loads the file named by `parameters.extra.file`, in the folder of the settings."""
        parameters = self.settings.parameters
        name = Path((parameters.extra or {}).get("file", "model.onnx")).name
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.load_model_format", "ONNX")
        self._session = onnxruntime.InferenceSession(
            (Path(parameters.uri) / name).read_bytes(), options, providers=["CPUExecutionProvider"]
        )
        self._outputs = [port.name for port in self._session.get_outputs()]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Returns the requested outputs; all of them if the request names none."""
        feed = self._decode_inputs({tensor.name: tensor for tensor in payload.inputs})
        names = [tensor.name for tensor in payload.outputs or []] or self._outputs
        unknown = sorted(set(names) - set(self._outputs))
        if unknown:
            raise InferenceError(f"There are no outputs {unknown}; there are {self._outputs}.")
        arrays = self._session.run(names, feed)
        outputs = [_encode_output(name, array) for name, array in zip(names, arrays, strict=True)]
        return InferenceResponse(
            model_name=self.name, model_version=self.version, id=payload.id, outputs=outputs
        )

    def _decode_inputs(self, tensors: dict[str, RequestInput]) -> dict[str, np.ndarray]:
        ports = {port.name: port for port in self.settings.inputs}
        if tensors.keys() != ports.keys():
            raise InferenceError(
                f"The inputs must be {sorted(ports)}, but the request has {sorted(tensors)}."
            )
        rows = {_count_rows(tensor) for tensor in tensors.values()}
        if len(rows) > 1:
            raise InferenceError(
                f"All inputs must have the same number of rows, but they have {rows}."
            )
        return {name: self._decode_input(ports[name], tensor) for name, tensor in tensors.items()}

    def _decode_input(self, port: RequestInput, tensor: RequestInput) -> np.ndarray:
        description = f"{tensor.datatype} of the shape {list(tensor.shape)}"
        fits = len(tensor.shape) == len(port.shape) and all(
            expected in (-1, size) for expected, size in zip(port.shape, tensor.shape, strict=True)
        )
        if tensor.datatype != port.datatype or not fits:
            raise InferenceError(
                f"The input {port.name!r} must be {port.datatype} of the shape {port.shape}, "
                f"got {description}."
            )
        try:
            return np.reshape(NumpyCodec.decode_input(tensor), tensor.shape)
        except (TypeError, ValueError) as error:
            raise InferenceError(
                f"The input {port.name!r} is not {description}: {error}."
            ) from error


def _encode_output(name: str, array: np.ndarray) -> ResponseOutput:
    """Returns an output in its original shape: the codec adds an axis to a row of numbers."""
    output = NumpyCodec.encode_output(name, array)
    output.shape = list(array.shape)
    return output


def _count_rows(tensor: RequestInput) -> int:
    return tensor.shape[0] if tensor.shape else 0
