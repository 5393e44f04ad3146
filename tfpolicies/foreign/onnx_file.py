"""ONNX files of others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError

from tfpolicies.errors import MissingModelFileError, ModelImportError
from tfpolicies.export.player import refuse_other_files
from tfpolicies.foreign.model import ForeignModel, Socket
from tfpolicies.onnx_graphs import with_inner
from tfpolicies.system.regular_files import read_regular

_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
    **{f"tensor({kind}int{n})": f"{kind}int{n}" for kind in ("", "u") for n in (8, 16, 32, 64)},
}


class OnnxFile(ForeignModel):
    """An ONNX file, run by ONNX Runtime on one thread.

    Args:
        path: of the file.

    Raises:
        MissingModelFileError: if there is none.
        ModelImportError: if it is damaged, has operators of other domains than ONNX's own, or
            weights in other files.
    """

    def __init__(self, path: Path) -> None:
        self.source = f"The ONNX file {os.fspath(path)!r}"
        self._path = path
        content = self._content()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                content, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime's are of no class that is public
            raise ModelImportError(f"{self.source} cannot be loaded: {error!s:.500}") from error
        self.inputs = [self._socket(each) for each in self._session.get_inputs()]
        self.outputs = [self._socket(each) for each in self._session.get_outputs()]

    def __reduce__(self) -> tuple[Any, ...]:
        """Is loaded anew, from the same file, in another process."""
        return type(self), (self._path,)

    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns all outputs by name; see `ForeignModel.run`."""
        names = [each.name for each in self.outputs]
        return dict(zip(names, self._session.run(names, dict(feed)), strict=True))

    def _content(self) -> bytes:
        try:
            content = read_regular(self._path)
            refuse_other_files(self._path, content)
            model = onnx.load_from_string(content)
        except FileNotFoundError as error:
            raise MissingModelFileError(f"{self.source} is not there.") from error
        except (OSError, ValueError, DecodeError) as error:
            raise ModelImportError(f"{self.source} was refused: {error}") from error
        named = [*model.opset_import, *with_inner(model.graph.node)]
        others = {each.domain for each in named}.difference(_DOMAINS)
        if others:
            raise ModelImportError(
                f"{self.source} was refused: it has operators of {', '.join(sorted(others))}. Only "
                "ONNX's own are run; export the network without the others."
            )
        return content

    def _socket(self, port: Any) -> Socket:
        if port.type not in _DTYPES:
            raise ModelImportError(
                f"{self.source} cannot be imported: {port.name!r} is a {port.type}, and only plain "
                "numbers are understood."
            )
        shape = tuple(size if isinstance(size, int) else None for size in port.shape)
        return Socket(port.name, shape, np.dtype(_DTYPES[port.type]))
