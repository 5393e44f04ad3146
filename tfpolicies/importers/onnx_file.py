"""Imported ONNX files, and files next to them that hold their weights."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tfpolicies.errors import MissingModelFileError, ModelImportError
from tfpolicies.export.player import LimitedSession, rebuild_model
from tfpolicies.importers.imported_model import ImportedModel, TensorInfo
from tfpolicies.system.regular_files import read_regular

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
    **{f"tensor({kind}int{n})": f"{kind}int{n}" for kind in ("", "u") for n in (8, 16, 32, 64)},
}


class ImportedOnnxFile(ImportedModel):
    """An ONNX file, run by ONNX Runtime on one thread.

    Args:
        path: the file.
        limited: whether its time and memory are limited; see `LimitedSession`.
        providers: the execution providers of ONNX Runtime; see `OnnxPolicy`.

    Raises:
        MissingModelFileError: if there is none.
        ModelImportError: if it is damaged, has operators of other domains than ONNX's own, has
            weights in files that are not in its folder, or exceeds a limit.
    """

    supports_providers = True

    def __init__(
        self, path: Path, limited: bool = True, providers: Sequence[str] | None = None
    ) -> None:
        self.source = f"The ONNX file {os.fspath(path)!r}"
        self._path, self._limited, self._providers = path, limited, providers
        try:
            content, weights = read_regular(path), _ExternalWeights(path.parent)
            model = rebuild_model(path, content, limited=limited, read_external=weights.read)
            self._model = LimitedSession(str(path), model, limited=limited, providers=providers)
        except FileNotFoundError as error:
            raise MissingModelFileError(f"{self.source} is not there.") from error
        except (OSError, ValueError) as error:
            raise ModelImportError(f"{self.source} was refused: {error}") from error
        session = self._model.session
        self.inputs = [self._make_tensor_info(each) for each in session.get_inputs()]
        self.outputs = [self._make_tensor_info(each) for each in session.get_outputs()]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the model as its path: another process loads the same file."""
        return type(self), (self._path, self._limited, self._providers)

    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns all outputs by name; see `ImportedModel.run`."""
        names = [tensor.name for tensor in self.outputs]
        try:
            return dict(zip(names, self._model.run(names, dict(feed)), strict=True))
        except ValueError as error:
            raise ModelImportError(str(error)) from error

    def _make_tensor_info(self, node: onnxruntime.NodeArg) -> TensorInfo:
        if node.type not in _DTYPES:
            raise ModelImportError(
                f"{self.source} cannot be imported: {node.name!r} is a {node.type}, and only plain "
                "numbers are supported."
            )
        shape = tuple(size if isinstance(size, int) else None for size in node.shape)
        return TensorInfo(node.name, shape, np.dtype(_DTYPES[node.type]))


_MAX_WEIGHT_BYTES = (1 << 31) - (1 << 26)  # bytes; ONNX Runtime takes a model of less than 2 GiB


class _ExternalWeights:
    """Reads weights from files in the folder of an ONNX file, as PyTorch writes them.

    Args:
        folder: the folder of the ONNX file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents: dict[str, memoryview] = {}  # by the names of files
        self._unused = 0  # bytes of these files that no tensor has used

    def read(self, entries: Mapping[str, str]) -> bytes:
        """Returns the bytes of one tensor.

        The tensors together cannot use more bytes than the files have.

        Args:
            entries: `location`, the name of a file; `offset` and `length` in bytes, by default 0
                and the rest of the file.

        Raises:
            ValueError: if there is no such file in the folder, or it does not have these bytes.
        """
        name = entries.get("location", "")
        if name not in self._contents:
            self._contents[name] = memoryview(self._read_file(name))
            self._unused += len(self._contents[name])
        content = self._contents[name]
        offset = _parse_size(entries.get("offset", "0"))
        size = _parse_size(entries.get("length", str(max(len(content) - offset, 0))))
        self._unused -= size
        if offset + size > len(content) or self._unused < 0:
            raise _make_error(
                name,
                f"which does not have {size} unused bytes from {offset} ({len(content)} in all)",
            )
        return bytes(content[offset : offset + size])

    def _read_file(self, name: str) -> bytes:
        """Returns the content of a file; refuses links, which may lead out of the folder."""
        if not 0 < len(name) < 256 or Path(name).name != name or "\0" in name:
            raise _make_error(name, "which is not the name of a file in its folder")
        path = self._folder / name
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                raise _make_error(name, "which is not a regular file")
            if status.st_size + sum(map(len, self._contents.values())) > _MAX_WEIGHT_BYTES:
                raise _make_error(name, "with which it has more than 2 GiB")
            return read_regular(path)
        except FileNotFoundError:
            raise _make_error(name, "which is not in its folder") from None
        except OSError as error:
            raise _make_error(name, f"which cannot be read ({error})") from None


def _make_error(name: str, problem: str) -> ValueError:
    return ValueError(
        f"has weights in another file, {name!r:.200}, {problem} (torch.onnx.export(..., "
        "external_data=False) writes one file)"
    )


def _parse_size(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"has weights in another file from or up to {text!r:.200}")
    return int(text)
