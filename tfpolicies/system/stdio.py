"""The standard input, output and error of the process."""

from __future__ import annotations

import os
import sys


def open_standard_files() -> None:
    """Opens standard files that the caller closed, on the null device.

    Otherwise the next file to be opened would get their number, and output meant for them.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)  # children inherit it
            if opened != descriptor:
                os.close(opened)
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, closefd=False)  # noqa: SIM115 - it stays open
            setattr(sys, name, stream)


def discard_output() -> None:
    """Redirects standard output, including buffered output, to the null device: its reader is gone.

    Otherwise each later flush would fail, also the interpreter's last one.
    """
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)
    os.close(null_device)
