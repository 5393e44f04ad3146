"""Reads untrusted pickles as data, by running `pickle_reader.py` in a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpolicies import storage
from tfpolicies.errors import CheckpointError
from tfpolicies.system.regular_files import get_size, open_regular, read_regular

_READER_SCRIPT = Path(storage.__file__).with_name("pickle_reader.py")  # run as a program
_MAX_SECONDS = 10
_BASE_MEGABYTES = 400  # plus, for each megabyte of the file:
_MEMORY_FACTOR = 8
_MAX_FILE_BYTES = 1 << 30  # bytes of a file
_REFUSED = 3
_SINGLE_THREAD_ENV = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ObjectRecord(NamedTuple):
    """Record of an object whose class or function is unknown; nothing was imported or called.

    Attributes:
        name: `module:name`.
        args: the arguments of the call; None for the name itself.
        state: the state of the object.
        items: the items of the object.
    """

    name: str
    args: Any
    state: Any
    items: Any


def read_pickle(path: str | os.PathLike[str]) -> Any:
    """Returns the content of a pickle: plain values, NumPy arrays, or else `ObjectRecord`s.

    Args:
        path: the file, which is not trusted.

    Raises:
        CheckpointError: if it cannot be read, is not a pickle, or has content that is not part of
            checkpoints; the message names it.
    """
    with tempfile.TemporaryDirectory(prefix="tfpolicies-") as folder:
        try:
            with open_regular(path) as file:
                if get_size(file) > _MAX_FILE_BYTES:
                    raise _make_error(
                        path, f"it has {get_size(file)} bytes, more than {_MAX_FILE_BYTES}"
                    )
                _run(path, file, folder)
            return _load_result(folder)
        except OSError as error:
            raise _make_error(path, str(error)) from error


def _run(path: Any, file: Any, folder: str) -> None:
    megabytes = _BASE_MEGABYTES + _MEMORY_FACTOR * (get_size(file) >> 20)
    command = [sys.executable, "-I", str(_READER_SCRIPT), folder, str(_MAX_SECONDS), str(megabytes)]
    env = {**os.environ, **_SINGLE_THREAD_ENV}
    try:
        process = subprocess.run(
            command, stdin=file, capture_output=True, env=env, timeout=6 * _MAX_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise _make_error(path, f"reading it takes more than {6 * _MAX_SECONDS} s") from error
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _make_error(path, f"reading it takes more than {_MAX_SECONDS} s")
    if process.returncode:
        last_line = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise _make_error(path, "".join(last_line) or f"its reader ended with {process.returncode}")


def _make_error(path: Any, problem: str) -> CheckpointError:
    return CheckpointError(
        f"The file {str(path)!r} was refused: {problem}. Nothing in it was executed. Give an "
        "unchanged checkpoint of RLlib."
    )


def _load_result(folder: str) -> Any:
    with np.load(Path(folder, "arrays.npz"), allow_pickle=False) as loaded:
        arrays: dict[str, np.ndarray] = dict(loaded)

    def decode(record: Any) -> Any:
        if isinstance(record, list):
            return [decode(item) for item in record]
        if not isinstance(record, dict):
            return record
        ((kind, content),) = record.items()
        if kind == "array":
            return arrays[content]
        if kind == "bytes":
            return bytes(0)  # their content is never used
        if kind == "dict":
            return {decode(key): decode(value) for key, value in content}
        if kind == "named":
            return ObjectRecord(content[0], *map(decode, content[1:]))
        return tuple(map(decode, content))

    return decode(json.loads(read_regular(Path(folder, "data.json"))))
