"""Fork guard: TensorFlow cannot run in a process that was forked after it started.

Its threads do not exist in the child, which would wait for them forever. NumPy and ONNX Runtime,
which runs in the caller's thread, still work there.
"""

from __future__ import annotations

import os
import sys

from tfpolicies.errors import ForkError

forked_from_pid: int | None = None
"""Process id of the parent, in a child that lacks TensorFlow's threads."""


def check_tensorflow_survived_fork() -> None:
    """Checks that TensorFlow can run in this process."""
    if forked_from_pid is not None:
        raise ForkError(
            f"TensorFlow cannot run here: this process was forked from process {forked_from_pid} "
            "after TensorFlow had started there, and its threads do not survive a fork. Start the "
            'process with multiprocessing.get_context("spawn") instead, or use Ray workers '
            "(config.rollouts(num_rollout_workers=...)). Methods without TensorFlow work here: "
            "get_weights, SampleBatch, and acting with inference='onnx'."
        )


def _record_fork() -> None:
    global forked_from_pid
    if _tensorflow_has_run():
        forked_from_pid = os.getppid()


def _tensorflow_has_run() -> bool:
    """Returns True if TensorFlow has made its threads, for this package or other code."""
    module = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(module, "context_safe", lambda: None)()
    return getattr(context, "_context_handle", None) is not None


os.register_at_fork(after_in_child=_record_fork)
