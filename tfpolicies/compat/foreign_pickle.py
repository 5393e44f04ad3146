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

from tfpolicies.errors import CheckpointError
from tfpolicies.system.regular_files import open_regular, read_regular, size_of

_READER = Path(__file__).with_name("pickle_reader.py")  # run as a program, not imported
_SECONDS = 10
_MEGABYTES = 400  # plus, for each megabyte of the file:
_TIMES = 8
_LARGEST = 1 << 30  # bytes of a file
_REFUSED = 3
_ALONE = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Named(NamedTuple):
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
    """Returns the content of a pickle: plain values, NumPy arrays, and a `Named` for anything else.

    Args:
        path: the file, which is not trusted.

    Raises:
        CheckpointError: if it cannot be read, is not a pickle, or has content that is not part of
            checkpoints; the message names it.
    """
    with tempfile.TemporaryDirectory(prefix="tfpolicies-") as folder:
        try:
            with open_regular(path) as file:
                if size_of(file) > _LARGEST:
                    raise _refusal(path, f"it has {size_of(file)} bytes, more than {_LARGEST}")
                _run(path, file, folder)
            return _read_answer(folder)
        except OSError as error:
            raise _refusal(path, str(error)) from error


def _run(path: Any, file: Any, folder: str) -> None:
    megabytes = _MEGABYTES + _TIMES * (size_of(file) >> 20)
    command = [sys.executable, "-I", str(_READER), folder, str(_SECONDS), str(megabytes)]
    env = {**os.environ, **_ALONE}
    try:
        done = subprocess.run(
            command, stdin=file, capture_output=True, env=env, timeout=6 * _SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise _refusal(path, f"reading it takes more than {6 * _SECONDS} s") from error
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise _refusal(path, f"reading it takes more than {_SECONDS} s")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise _refusal(path, "".join(said) or f"its reader ended with {done.returncode}")


def _refusal(path: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"The file {str(path)!r} was refused: {why}. Nothing in it was executed. Give an "
        "unchanged checkpoint of RLlib."
    )


def _read_answer(folder: str) -> Any:
    with np.load(Path(folder, "arrays.npz"), allow_pickle=False) as loaded:
        arrays: dict[str, np.ndarray] = dict(loaded)

    def decode(record: Any) -> Any:
        if isinstance(record, list):
            return [decode(each) for each in record]
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
            return Named(content[0], *map(decode, content[1:]))
        return tuple(map(decode, content))

    return decode(json.loads(read_regular(Path(folder, "data.json"))))
