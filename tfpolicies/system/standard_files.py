"""The standard files of the process."""

from __future__ import annotations

import os
import sys


def open_standard_files() -> None:
    """Opens what the caller closed of the standard files on nothing.

    Otherwise the next file that is opened would have its number, and get what is written there.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, descriptor)  # which lets children inherit it
            if opened != descriptor:
                os.close(opened)
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, closefd=False)  # noqa: SIM115 - it stays open
            setattr(sys, name, stream)


def discard_output() -> None:
    """Sends standard output, and what waits to be written there, to nothing: its reader is gone.

    Otherwise each later flush would fail, the interpreter's last one as well.
    """
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
