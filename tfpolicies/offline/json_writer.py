"""Writes experience as JSON lines, one batch per line, which RLlib reads, too."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.batch.compression import pack_array
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.errors import ConfigError
from tfpolicies.offline.experience_io import ExperienceWriter
from tfpolicies.offline.packed_columns import pack_column
from tfpolicies.system.paths import resolve_path

MAX_FILE_BYTES = 64 << 20
_NOT_WRITTEN = ("infos",)


def make_file_name(worker_index: int, number: int, suffix: str) -> str:
    """Returns a name with the time, the worker and the number of a file, as RLlib forms them."""
    time = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return f"output-{time}_worker-{worker_index}_{number}{suffix}"


def make_output_folder(path: str | os.PathLike[str]) -> Path:
    """Creates the folder of recorded experience, and returns it.

    Raises:
        ConfigError: if it cannot be created.
    """
    folder = resolve_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output={str(path)!r} must be a folder that can be created: {error}."
        ) from error
    return folder


class JsonLinesWriter(ExperienceWriter):
    """Writes batches as JSON lines into a folder.

    A line is complete before the next one begins, so a killed process loses at most one batch.
    `infos` are not written.

    Args:
        path: the folder.
        worker_index: for the names of files.
        max_file_size: bytes after which the next file begins.
        compress_columns: columns that are written as packed texts.
        rllib_packing: pack columns as RLlib does (LZ4 frames of pickles), so that RLlib reads
            them; otherwise only this package does.

    Raises:
        ConfigError: if the folder cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        worker_index: int = 0,
        max_file_size: int = MAX_FILE_BYTES,
        compress_columns: Collection[str] = (),
        rllib_packing: bool = False,
    ) -> None:
        self._folder = make_output_folder(path)
        self._worker_index = worker_index
        self._max_file_size = max_file_size
        self._packed_columns = frozenset(compress_columns)
        self._pack = pack_column if rllib_packing else _pack_leaves
        self._file: Any = None
        self._number = 0
        self._size = 0

    def write(self, sample_batch: SampleBatch | MultiAgentBatch) -> None:
        """Appends a batch as a line."""
        line = json.dumps(self._encode(sample_batch), separators=(", ", ": ")) + "\n"
        if self._file is None or self._size >= self._max_file_size:
            self._open_next()
        self._file.write(line)
        self._file.flush()
        self._size += len(line)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_next(self) -> None:
        self.close()
        path = self._folder / make_file_name(self._worker_index, self._number, ".json")
        while path.exists():
            self._number += 1
            path = self._folder / make_file_name(self._worker_index, self._number, ".json")
        self._file = open(path, "w", encoding="ascii")  # noqa: SIM115
        self._number += 1
        self._size = 0

    def _encode(self, batch: SampleBatch | MultiAgentBatch) -> dict[str, Any]:
        if isinstance(batch, MultiAgentBatch):
            batches = {
                policy_id: self._encode_columns(policy_batch)
                for policy_id, policy_batch in batch.policy_batches.items()
            }
            count = batch.env_steps()
            return {"type": "MultiAgentBatch", "count": count, "policy_batches": batches}
        return {"type": "SampleBatch", **self._encode_columns(batch)}

    def _encode_columns(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self._pack(column) if name in self._packed_columns else _to_lists(column)
            for name, column in batch.items()
            if name not in _NOT_WRITTEN
        }


def _pack_leaves(column: Any) -> Any:
    return _encode_leaves(pack_array, column)


def _to_lists(column: Any) -> Any:
    return _encode_leaves(np.ndarray.tolist, column)


def _encode_leaves(encode: Callable[[np.ndarray], Any], column: Any) -> Any:
    """Returns a column with encoded leaves; dicts and tuples become objects of JSON."""
    if isinstance(column, Mapping | tuple):
        parts = column.items() if isinstance(column, Mapping) else enumerate(column)
        return {str(key): _encode_leaves(encode, part) for key, part in parts}
    return encode(np.asarray(column))
