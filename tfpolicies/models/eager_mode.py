"""Eager execution for code that a user may call inside a `tf.Graph` block."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import tensorflow as tf

_Function = TypeVar("_Function", bound=Callable[..., Any])


class ensure_eager:
    """Executes a block, or the function that it decorates, eagerly also inside a `tf.Graph` block.

    The graph of that block gets no operations. Inside a `tf.function`, and in a process where eager
    execution is disabled, nothing changes. `tf.init_scope` leaves only the graphs of functions: in
    a `tf.Graph` block it would add operations to that graph.
    """

    def __enter__(self) -> None:
        self._mode = _enter_eager_mode()

    def __exit__(self, *error: object) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)

    def __call__(self, function: _Function) -> _Function:
        @functools.wraps(function)
        def execute(*args: object, **kwargs: object) -> Any:
            if tf.executing_eagerly():
                return function(*args, **kwargs)
            with ensure_eager():
                return function(*args, **kwargs)

        return cast(_Function, execute)


def _enter_eager_mode() -> Any:
    """Returns the mode that was entered; None if nothing had to change."""
    if tf.executing_eagerly() or tf.inside_function() or not is_eager_process():
        return None
    mode = tf.__internal__.eager_context.eager_mode()
    mode.__enter__()
    return mode


@functools.cache
def is_eager_process() -> bool:
    """Returns whether threads of this process execute eagerly by default, in any context."""
    with ThreadPoolExecutor(1) as other_thread:
        return other_thread.submit(tf.executing_eagerly).result()


class EagerLock:
    """A re-entrant lock whose holder executes eagerly; see `ensure_eager`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._modes: list[Any] = []  # of the holder, the innermost last

    def __enter__(self) -> None:
        self._lock.acquire()
        self._modes.append(_enter_eager_mode())

    def __exit__(self, *error: object) -> None:
        try:
            mode = self._modes.pop()
            if mode is not None:
                mode.__exit__(*error)
        finally:
            self._lock.release()
