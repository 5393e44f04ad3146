"""ONNX files of others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.errors import MissingModelFileError, ModelImportError
from tfpolicies.export.player import LimitedSession, rebuild_model
from tfpolicies.foreign.model import ForeignModel, Socket
from tfpolicies.system.regular_files import read_regular

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
        limited: whether the time and memory that it takes are limited; see `LimitedSession`.
        providers: what ONNX Runtime computes with; see `OnnxPolicy`.

    Raises:
        MissingModelFileError: if there is none.
        ModelImportError: if it is damaged, has operators of other domains than ONNX's own or
            weights in other files, or takes too much.
    """

    def __init__(
        self, path: Path, limited: bool = True, providers: Sequence[str] | None = None
    ) -> None:
        self.source = f"The ONNX file {os.fspath(path)!r}"
        self._path, self._limited, self._providers = path, limited, providers
        try:
            model = rebuild_model(path, read_regular(path), limited=limited)
            self._model = LimitedSession(str(path), model, limited=limited, providers=providers)
        except FileNotFoundError as error:
            raise MissingModelFileError(f"{self.source} is not there.") from error
        except (OSError, ValueError) as error:
            raise ModelImportError(f"{self.source} was refused: {error}") from error
        session = self._model.session
        self.inputs = [self._socket(each) for each in session.get_inputs()]
        self.outputs = [self._socket(each) for each in session.get_outputs()]

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how another process loads the model: from the same file."""
        return type(self), (self._path, self._limited, self._providers)

    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns all outputs by name; see `ForeignModel.run`.

        Raises:
            ModelImportError: if that takes too much time or memory.
        """
        names = [port.name for port in self.outputs]
        try:
            return dict(zip(names, self._model.run(names, dict(feed)), strict=True))
        except ValueError as error:
            raise ModelImportError(str(error)) from error

    def _socket(self, port: Any) -> Socket:
        if port.type not in _DTYPES:
            raise ModelImportError(
                f"{self.source} cannot be imported: {port.name!r} is a {port.type}, and only plain "
                "numbers are understood."
            )
        shape = tuple(size if isinstance(size, int) else None for size in port.shape)
        return Socket(port.name, shape, np.dtype(_DTYPES[port.type]))
