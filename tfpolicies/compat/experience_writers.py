"""RLlib's writers of experience, and its builder of batches from rows."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import numpy as np

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.errors import ConfigError
from tfpolicies.offline.experience_io import ExperienceWriter as OutputWriter
from tfpolicies.offline.experience_io import IOContext
from tfpolicies.offline.json_writer import MAX_FILE_BYTES, JsonLinesWriter
from tfpolicies.offline.parquet_writer import ParquetWriter

__all__ = ["DatasetWriter", "JsonWriter", "NoopOutput", "OutputWriter", "SampleBatchBuilder"]

_PACKED = frozenset({"obs", "new_obs"})


class JsonWriter(JsonLinesWriter):
    """Writes batches as JSON lines that RLlib's `JsonReader` also reads.

    `infos` are not written. Packed columns need the package lz4, as in RLlib.

    Args:
        path: the folder, which is created; "file://" in front of it is ignored.
        ioctx: the context, whose worker's index is in the names of files.
        max_file_size: bytes after which the next file begins.
        compress_columns: columns that are written as packed texts.

    Raises:
        ConfigError: if the folder cannot be created.
    """

    def __init__(
        self,
        path: str,
        ioctx: IOContext | None = None,
        max_file_size: int = MAX_FILE_BYTES,
        compress_columns: Collection[str] = _PACKED,
    ) -> None:
        super().__init__(
            path.removeprefix("file://") if isinstance(path, str) else path,
            worker_index=0 if ioctx is None else ioctx.worker_index,
            max_file_size=max_file_size,
            compress_columns=compress_columns,
            rllib_packing=True,
        )

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the folder could not be created
            self.close()  # RLlib's scripts do not


class DatasetWriter(OutputWriter):
    """Writes a dataset of files, which `input_="dataset"` reads.

    A Parquet file has one row for each step, where RLlib's have one for each batch. Lines of JSON
    are written at once. Rows of Parquet files are held until their episodes end and there are
    enough for a file; `close`, or the end of the writer or the process, writes the rest. A process
    that is killed loses those that it held. Ray is not needed.

    Args:
        ioctx: the context. Its `output_config` has `path` and `format`, "json" or "parquet".
        compress_columns: columns of JSON lines that are packed.

    Raises:
        ConfigError: if there is no path, or another format; Parquet also needs the worker, whose
            policies have the spaces.
    """

    def __init__(
        self, ioctx: IOContext | None = None, compress_columns: Collection[str] = _PACKED
    ) -> None:
        ioctx = ioctx or IOContext()
        options = ioctx.output_config
        path, file_format = options.get("path"), options.get("format")
        if path is None or file_format not in ("json", "parquet"):
            raise ConfigError(
                "DatasetWriter needs output_config={'path': a folder, 'format': 'json' or "
                f"'parquet'}}, got {dict(options)!r:.200}."
            )
        size = ioctx.get_setting("output_max_file_size", MAX_FILE_BYTES)
        if file_format == "json":
            self._writer: OutputWriter = JsonWriter(path, ioctx, size, compress_columns)
            return
        if ioctx.worker is None:
            raise ConfigError(
                "DatasetWriter with format='parquet' needs a context with a worker, whose policies "
                "have the spaces. Use format='json', or tfpolicies.offline's ParquetWriter."
            )
        spaces = {
            policy_id: (policy.observation_space, policy.action_space)
            for policy_id, policy in ioctx.worker.policy_map.items()
        }
        self._writer = ParquetWriter(
            path, spaces, worker_index=ioctx.worker_index, max_file_size=size
        )
        weakref.finalize(self, self._writer.close)  # RLlib's scripts do not

    def write(self, sample_batch: SampleBatch | MultiAgentBatch) -> None:
        """Writes a batch."""
        self._writer.write(sample_batch)

    def close(self) -> None:
        """Writes buffered rows, and closes the file."""
        self._writer.close()


class NoopOutput(OutputWriter):
    """Writes nothing."""

    def write(self, sample_batch: SampleBatch | MultiAgentBatch) -> None:
        """Does nothing."""


class SampleBatchBuilder:
    """Builds a batch from rows.

    Attributes:
        buffers: the values of each column.
        count: the number of rows.

    >>> builder = SampleBatchBuilder()
    >>> builder.add_values(t=0, rewards=1.0)
    >>> builder.add_values(t=1, rewards=0.5)
    >>> builder.build_and_reset()["rewards"]
    array([1. , 0.5], dtype=float32)
    """

    _unroll_ids = itertools.count()

    def __init__(self) -> None:
        self.buffers: dict[str, list[Any]] = defaultdict(list)
        self.count = 0

    def add_values(self, **values: Any) -> None:
        """Adds a row."""
        for name, value in values.items():
            self.buffers[name].append(value)
        self.count += 1

    def add_batch(self, batch: SampleBatch) -> None:
        """Adds the rows of a batch."""
        for name, column in batch.items():
            self.buffers[name].extend(column)
        self.count += batch.count

    def build_and_reset(self) -> SampleBatch:
        """Returns the rows, with a new `unroll_id` if there is none, and forgets them.

        Raises:
            BatchError: if rows have different columns.
        """
        columns: dict[str, Any] = {name: _to_array(rows) for name, rows in self.buffers.items()}
        columns.setdefault("unroll_id", np.full(self.count, next(self._unroll_ids)))
        batch = SampleBatch(columns)
        self.buffers.clear()
        self.count = 0
        return batch


def _to_array(rows: list[Any]) -> Any:
    array = np.array(rows)
    return array.astype(np.float32) if array.dtype == np.float64 else array
