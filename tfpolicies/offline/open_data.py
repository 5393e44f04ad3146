"""Opens whatever data a user names: files, folders, arrays, data frames, datasets."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpolicies.errors import BatchError, ConfigError
from tfpolicies.offline.data_source import DataSource
from tfpolicies.offline.isolated_source import IsolatedFiles
from tfpolicies.offline.json_lines import extract_json_files
from tfpolicies.offline.memory_data import (
    ArrayData,
    make_frame_data,
    make_ray_data,
    make_tf_data,
)
from tfpolicies.offline.source_process import open_files
from tfpolicies.system.paths import resolve_path

_KINDS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".zip": "json",
}
FORMATS = ("json", "parquet")


def is_file_source(data: Any) -> bool:
    """Returns whether data are named by a path, a glob pattern, or a list of them."""
    if isinstance(data, list | tuple):
        return bool(data) and all(map(is_file_source, data))
    return isinstance(data, str | os.PathLike)


def open_data(data: Any, *, file_format: str | None = None, trusted: bool = False) -> DataSource:
    """Opens recorded experience.

    Args:
        data: the path of a Parquet file, of a file of JSON lines, or of a zip archive or folder of
            them; a glob pattern; a list of those; a dict of arrays; a pandas data frame; a
            `tf.data.Dataset` of dicts; or a Ray dataset.
        file_format: "json" or "parquet"; None: by the files' endings.
        trusted: parse files in this process; otherwise a child process with limits parses them.

    Raises:
        ConfigError: if it is something else, or there are no such files.
        BatchError: if a file is damaged.
        MissingPackageError: if a Parquet file is to be read without pyarrow.
    """
    if file_format is not None and file_format not in FORMATS:
        raise ConfigError(
            f"input_config={{'format': ...}} must be one of {FORMATS}, got {file_format!r:.50}. "
            "Leave it out: files are known by their endings."
        )
    if is_file_source(data):
        paths = find_files(data, file_format)
        kind = file_format or _get_kind(paths)
        with contextlib.ExitStack() as stack:
            names = [str(path) for path in _extract_archives(paths, stack)]
            make_source = open_files if trusted else IsolatedFiles
            source = make_source(kind, names)
            weakref.finalize(source, stack.pop_all().close)  # deletes extracted files
            return source
    if isinstance(data, DataSource):
        return data
    if isinstance(data, Mapping):
        return ArrayData(data)
    if hasattr(data, "element_spec"):
        return make_tf_data(data)
    if hasattr(data, "iter_batches"):
        return make_ray_data(data)
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        return make_frame_data(data)
    raise ConfigError(
        "Recorded experience must be a path or a list of paths, a dict of arrays, a pandas data "
        f"frame, a tf.data.Dataset or a Ray dataset, got {data!r:.200}."
    )


def find_files(data: str | os.PathLike[str] | Sequence[Any], file_format: str | None) -> list[Path]:
    """Returns the files that paths, patterns and folders name, in order, without repetitions.

    Raises:
        ConfigError: if a path names no file.
    """
    if isinstance(data, list | tuple):
        parts = [path for part in data for path in find_files(part, file_format)]
        return list(dict.fromkeys(parts))
    path = resolve_path(data)  # type: ignore[arg-type]
    if path.is_dir():
        endings = [ending for ending, kind in _KINDS.items() if file_format in (None, kind)]
        files = sorted(x for x in path.iterdir() if x.suffix in endings and x.is_file())
    elif glob.has_magic(str(data)) and not path.exists():
        files = sorted(Path(x) for x in glob.glob(str(path)) if Path(x).is_file())
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise ConfigError(
            f"There is no file of recorded experience at {str(data)!r}. Give the path of a "
            ".parquet or .json file, of a folder with such files, or a pattern like 'logs/*.json'."
        )
    return files


def _get_kind(paths: Sequence[Path]) -> str:
    kinds = {_KINDS.get(path.suffix.lower()) for path in paths}
    if kinds == {"json"} or kinds == {"parquet"}:
        return str(kinds.pop())
    raise ConfigError(
        f"The format of {[path.name for path in paths]!s:.200} is unclear; set "
        f"input_config={{'format': 'parquet'}} or 'json', or rename the files."
    )


def _extract_archives(paths: Sequence[Path], stack: contextlib.ExitStack) -> list[Path]:
    result: list[Path] = []
    for path in paths:
        if path.suffix.lower() != ".zip":
            result.append(path)
            continue
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfpolicies-")))
        files = extract_json_files(path, folder)
        if not files:
            raise BatchError(
                f"{path} must have .json files in it, but has none. Give the path of another file."
            )
        result += files
    return result
