"""Making a process ready: TensorFlow without the lines it prints first; where modules are."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def native_stderr_held_back() -> Iterator[None]:
    """Holds back what native code writes to the process's standard error while entered.

    If the block fails, what was held back is written after all. Where standard error is closed,
    there is nothing to hold back.
    """
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except Exception:
            os.dup2(kept, 2)
            held.seek(0)
            os.write(2, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def load_tensorflow() -> None:
    """Imports TensorFlow and Keras; prints nothing unless that fails."""
    if "tensorflow" in sys.modules:
        return
    with native_stderr_held_back():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401


def extend_paths(paths: Iterable[str]) -> None:
    """Lets this process import what another one can, whose `sys.path` is given."""
    sys.path.extend(path for path in paths if path not in sys.path)
