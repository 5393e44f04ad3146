"""Writes experience as Parquet files: one row per step, whole episodes one after the other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.batch.leaves import map_leaves
from tfpolicies.batch.sample_batch import (
    DEFAULT_POLICY_ID,
    MultiAgentBatch,
    SampleBatch,
    concat_samples,
)
from tfpolicies.offline.experience_io import ExperienceWriter
from tfpolicies.offline.json_writer import make_file_name, make_output_folder
from tfpolicies.offline.parquet_files import METADATA_KEY, import_parquet
from tfpolicies.offline.step_columns import iter_parts
from tfpolicies.storage.spaces_json import encode_space
from tfpolicies.system.atomic import replace_on_success, sync_folder

_FILE_BYTES = 16 << 20  # of rows in memory, after which a file is written
_FILE_SECONDS = 30.0  # after which rows in memory are written in any case
_ROW_GROUP_BYTES = 16 << 20
_MAX_HELD_BYTES = 256 << 20  # of episodes that have not ended
_NOT_WRITTEN = ("infos", "unroll_id", "seq_lens")
FORMAT_VERSION = 1

Spaces = tuple[Any, Any]


def write_table(
    path: Path, columns: Mapping[str, Any], spaces: Spaces | None, policy_id: str | None = None
) -> None:
    """Writes a Parquet file: readers find it complete, or not at all.

    Args:
        path: the file.
        columns: arrays `[rows, ...]`, possibly nested.
        spaces: observation and action space, stored in the file.
        policy_id: the policy whose steps they are; None if there is one.

    Raises:
        MissingPackageError: if pyarrow is not installed.
        OSError: if the file cannot be written.
    """
    parquet = import_parquet()
    table = _make_table(columns, spaces, policy_id)
    row_bytes = max(1, table.nbytes // max(1, table.num_rows))
    with replace_on_success(path) as temporary:
        parquet.write_table(
            table,
            temporary,
            row_group_size=max(1, min(_ROW_GROUP_BYTES // row_bytes, 1 << 17)),
            use_dictionary=False,
            compression="zstd",
        )
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(path.parent)


def _make_table(columns: Mapping[str, Any], spaces: Spaces | None, policy_id: str | None) -> Any:
    import pyarrow

    arrays = {
        name: _to_arrow(np.asarray(leaf))
        for column_name, column in columns.items()
        if column_name not in _NOT_WRITTEN
        for name, leaf in iter_parts(column_name, column)
    }
    metadata: dict[str, Any] = {"version": FORMAT_VERSION}
    if spaces is not None:
        names = ("observation_space", "action_space")
        metadata |= {x: encode_space(space) for x, space in zip(names, spaces, strict=True)}
    if policy_id is not None:
        metadata["policy_id"] = policy_id
    table = pyarrow.table(arrays)
    return table.replace_schema_metadata({METADATA_KEY: json.dumps(metadata)})


def _to_arrow(array: np.ndarray) -> Any:
    import pyarrow

    if array.ndim == 1:
        return pyarrow.array(array)
    size = int(np.prod(array.shape[1:]))
    values = pyarrow.array(np.ascontiguousarray(array).reshape(-1))
    return pyarrow.FixedSizeListArray.from_arrays(values, size)


class ParquetWriter(ExperienceWriter):
    """Writes batches as Parquet files into a folder, one file per policy and about 16 MB.

    Rows are held until their episode ends, so that its rows follow each other. A file is written as
    a whole: a killed process loses the rows that it held, and leaves readable files. `infos` are
    not written.

    Args:
        path: the folder.
        spaces: observation and action space by policy id.
        worker_index: for the names of files.
        max_file_size: bytes of rows after which a file is written.

    Raises:
        ConfigError: if the folder cannot be created.
        MissingPackageError: if pyarrow is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        spaces: Mapping[str, Spaces],
        *,
        worker_index: int = 0,
        max_file_size: int = _FILE_BYTES,
    ) -> None:
        import_parquet()
        self._folder = make_output_folder(path)
        self._spaces = spaces
        self._worker_index = worker_index
        self._max_file_size = min(max_file_size, _FILE_BYTES)
        self._episodes: dict[str, EpisodeBuffer] = {}
        self._ready: dict[str, list[SampleBatch]] = {}
        self._size = 0
        self._number = 0
        self._written_at = time.monotonic()

    def write(self, sample_batch: SampleBatch | MultiAgentBatch) -> None:
        """Adds a batch; writes files when there are enough rows of ended episodes."""
        for policy_id, batch in sample_batch.as_multi_agent().policy_batches.items():
            buffer = self._episodes.setdefault(policy_id, EpisodeBuffer())
            for episode in buffer.add(batch):
                self._add_ready(policy_id, episode)
        if self._size >= self._max_file_size or self._is_due():
            self._write_files()

    def close(self) -> None:
        """Writes all rows, also those of episodes that have not ended."""
        for policy_id, buffer in self._episodes.items():
            for episode in buffer.pop_all():
                self._add_ready(policy_id, episode)
        self._write_files()

    def _add_ready(self, policy_id: str, episode: SampleBatch) -> None:
        self._ready.setdefault(policy_id, []).append(episode)
        self._size += episode.size_bytes()

    def _is_due(self) -> bool:
        return self._size > 0 and time.monotonic() - self._written_at > _FILE_SECONDS

    def _write_files(self) -> None:
        for policy_id, episodes in self._ready.items():
            suffix = "" if policy_id == DEFAULT_POLICY_ID else f"-{policy_id}"
            name = make_file_name(self._worker_index, self._number, f"{suffix}.parquet")
            owner = None if policy_id == DEFAULT_POLICY_ID else policy_id
            columns: Any = concat_samples(episodes)
            write_table(self._folder / name, columns, self._spaces.get(policy_id), owner)
            self._number += 1
        self._ready, self._size = {}, 0
        self._written_at = time.monotonic()


def _take_rows(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    return {
        name: map_leaves(lambda leaf: leaf[rows], column)
        for name, column in batch.items()
        if name not in _NOT_WRITTEN
    }


class EpisodeBuffer:
    """Collects the rows of one policy's episodes until they end."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], list[SampleBatch]] = {}
        self._size = 0

    def add(self, batch: SampleBatch) -> Iterator[SampleBatch]:
        """Adds rows, and yields the episodes that ended, each as a whole."""
        agents = batch.get("agent_index", np.zeros_like(batch["eps_id"]))
        keys = np.stack([batch["eps_id"], agents], axis=1)
        done = batch["terminateds"] | batch["truncateds"]
        bounds = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1) | done[:-1]) + 1
        for start, stop in zip([0, *bounds], [*bounds, len(done)], strict=True):
            rows = slice(int(start), int(stop))
            key = int(keys[start, 0]), int(keys[start, 1])
            part = SampleBatch(_take_rows(batch, rows))
            self._open.setdefault(key, []).append(part)
            self._size += part.size_bytes()
            if done[stop - 1]:
                yield self._pop(key)
        while self._size > _MAX_HELD_BYTES:
            yield self._pop(next(iter(self._open)))

    def pop_all(self) -> Iterator[SampleBatch]:
        """Yields the episodes that have not ended."""
        while self._open:
            yield self._pop(next(iter(self._open)))

    def _pop(self, key: tuple[int, int]) -> SampleBatch:
        episode: Any = concat_samples(self._open.pop(key))
        self._size -= episode.size_bytes()
        return episode
