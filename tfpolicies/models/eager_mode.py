"""Eager execution for code that a user may call inside a `tf.Graph` block."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def ensure_eager() -> Iterator[None]:
    """Executes a block, or the function that it decorates, eagerly also inside a `tf.Graph` block.

    The graph of that block gets no operations. Inside a `tf.function`, and in a process where eager
    execution is disabled, nothing changes. `tf.init_scope` leaves only the graphs of functions: in
    a `tf.Graph` block it would add operations to that graph.
    """
    if tf.executing_eagerly() or tf.inside_function() or not is_eager_process():
        yield
    else:
        with tf.__internal__.eager_context.eager_mode():
            yield


@functools.cache
def is_eager_process() -> bool:
    """Whether threads of this process execute eagerly by default, whatever surrounds the caller."""
    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(tf.executing_eagerly).result()


class EagerLock:
    """A re-entrant lock whose holder executes eagerly; see `ensure_eager`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._contexts: list[Any] = []  # of the holder, the innermost last

    def __enter__(self) -> None:
        self._lock.acquire()
        context = ensure_eager()
        context.__enter__()
        self._contexts.append(context)

    def __exit__(self, *error: Any) -> None:
        try:
            self._contexts.pop().__exit__(*error)
        finally:
            self._lock.release()
