"""Suppresses output of libraries, and restores logging and environment afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator

from tfpolicies.system.keras_backend import require_tensorflow_backend

_NATIVE_LOG = rb"^([IWEF]\d{4} |WARNING: All log messages before absl|To enable the follow)"
_suppressed_patterns: list[bytes] = []  # of the blocks since the first of them was entered
_has_any_failed = False  # whether one of these blocks raised


class _SharedContext:
    """A context of the whole process: entered by the first thread, left by the last one."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._entered = contextlib.ExitStack()
        self._num_inside = 0

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        with self._lock:
            if not self._num_inside:
                self._entered.enter_context(self._make())
            self._num_inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    self._entered.close()


@contextlib.contextmanager
def suppress_native_stderr(pattern: bytes = _NATIVE_LOG) -> Iterator[None]:
    """Removes matching lines from standard error.

    Other lines are written at the end; after an error all lines are. Several threads may be inside:
    lines are written when the last one leaves, without those that match a pattern of any of them.
    If standard error is closed, nothing happens.

    Args:
        pattern: a regular expression, searched in each line. By default it matches the logs of
            native code.
    """
    global _has_any_failed
    with _shared_redirection.enter():
        try:
            _suppressed_patterns.append(pattern)
            yield
        except BaseException:
            _has_any_failed = True
            raise


@contextlib.contextmanager
def _redirect_stderr() -> Iterator[None]:
    global _has_any_failed
    _suppressed_patterns.clear()
    _has_any_failed = False
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        original_descriptor = os.dup(2)
    except OSError:
        yield
        return
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(original_descriptor, 2)
            os.close(original_descriptor)
            captured.seek(0)
            is_suppressed = re.compile(b"|".join(_suppressed_patterns)).search
            lines = [line for line in captured if _has_any_failed or not is_suppressed(line)]
            with contextlib.suppress(OSError):  # the pipe may be closed
                os.write(2, b"".join(lines))


_shared_redirection = _SharedContext(_redirect_stderr)  # the file descriptor belongs to the process


def load_tensorflow() -> None:
    """Imports TensorFlow and Keras; prints nothing unless that fails.

    Raises:
        ConfigError: if Keras uses another backend.
    """
    require_tensorflow_backend()
    if "tensorflow" in sys.modules:
        return
    with suppress_native_stderr():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401


_CONVERTER_LOGGERS = (
    "absl",
    "keras",
    "onnx",
    "tensorflow",
    "tf2onnx",
)  # and the loggers below them


@contextlib.contextmanager
def suppress_conversion_output() -> Iterator[None]:
    """Suppresses the output of TensorFlow and tf2onnx during a conversion.

    Afterwards logging, warning filters and environment variables are restored, whatever the
    libraries did to them. Errors are raised as usual. Several threads may be inside; see
    `suppress_native_stderr`.
    """
    with _shared_suppression.enter(), suppress_native_stderr():
        yield


@contextlib.contextmanager
def _suppress_logging() -> Iterator[None]:
    with _preserve_logging(), _preserve_environment(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("tf2onnx", "tensorflow"):  # they log errors that they also raise
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield


_shared_suppression = _SharedContext(_suppress_logging)


@contextlib.contextmanager
def _preserve_logging() -> Iterator[None]:
    """Restores the root logger and those of converters, including new ones."""
    root, null_handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(null_handler)  # so that `logging.basicConfig` does nothing
    loggers = {name: logging.getLogger(name) for name in _list_converter_loggers()}
    settings = {name: (x.level, [*x.handlers], x.propagate) for name, x in loggers.items()}
    level = root.level
    try:
        yield
    finally:
        root.removeHandler(null_handler)
        root.setLevel(level)
        for name in _list_converter_loggers():
            logger = logging.getLogger(name)
            level, logger.handlers[:], logger.propagate = settings.get(
                name, (logging.NOTSET, [], True)
            )
            logger.setLevel(level)


def _list_converter_loggers() -> list[str]:
    names = set(_CONVERTER_LOGGERS) | set(logging.root.manager.loggerDict)
    return [name for name in sorted(names) if name.partition(".")[0] in _CONVERTER_LOGGERS]


@contextlib.contextmanager
def _preserve_environment() -> Iterator[None]:
    variables = _get_tensorflow_variables()
    try:
        yield
    finally:
        for name in _get_tensorflow_variables().keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)


def _get_tensorflow_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TF_")}


def extend_sys_path(paths: Iterable[str]) -> None:
    """Adds another process's `sys.path` to that of this process."""
    sys.path.extend(path for path in paths if path not in sys.path)
