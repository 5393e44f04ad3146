"""Interface of imported models: named tensors in, named tensors out."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfpolicies.errors import ModelImportError


class TensorInfo(NamedTuple):
    """One input or output of a model."""

    name: str
    shape: tuple[int | None, ...]  # None for any size; the first axis is the batch axis
    dtype: np.dtype

    def __str__(self) -> str:
        """Returns a description for messages: `'obs' float32 [None, 4]`."""
        return f"{self.name!r} {self.dtype} {list(self.shape)}"


class ImportedModel(abc.ABC):
    """An imported third-party model; it never changes, so copies of a policy share it.

    Attributes:
        source: describes its origin in messages.
        inputs: its inputs, batch axis first.
        outputs: its outputs.
        supports_providers: whether ONNX Runtime runs it.
    """

    supports_providers = False
    source: str
    inputs: Sequence[TensorInfo]
    outputs: Sequence[TensorInfo]

    @abc.abstractmethod
    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns all outputs by name, given all inputs."""

    def get_initial_state(self) -> list[np.ndarray] | None:
        """Returns the state at the start of an episode; None if the model does not define it."""
        return None

    def run_rows(self, feed: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
        """Returns all outputs for `rows` rows, in padded chunks if the batch size is fixed."""
        batch_size = next((x.shape[0] for x in self.inputs if x.shape and x.shape[0]), None)
        if batch_size is None or batch_size == rows:
            return self.run(feed)
        missing = -rows % batch_size
        padded = {
            name: np.concatenate([x, np.repeat(x[-1:], missing, 0)]) if x.ndim else x
            for name, x in feed.items()
        }
        parts = [
            self.run({name: x[i : i + batch_size] if x.ndim else x for name, x in padded.items()})
            for i in range(0, rows, batch_size)
        ]
        return {name: np.concatenate([part[name] for part in parts])[:rows] for name in parts[0]}

    def make_import_error(self, problem: str) -> ModelImportError:
        """Returns an error about the model that lists its inputs and outputs."""
        inputs, outputs = (", ".join(map(str, x)) for x in (self.inputs, self.outputs))
        return ModelImportError(
            f"{self.source} cannot be imported: {problem}. Its inputs are {inputs or 'none'}; its "
            f"outputs are {outputs or 'none'}."
        )
