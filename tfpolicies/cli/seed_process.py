"""The process of one of several seeds: `tfpolicies train`, which ends with its parent process.

It is run by `training_seeds` as `python -m tfpolicies.cli.seed_process PARENT train ...`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def end_with_parent(parent: int) -> None:
    """Lets this process get SIGTERM, which saves its state, when its parent ends in any way."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)))

    from tfpolicies.cli import main

    sys.exit(main())
