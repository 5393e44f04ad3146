"""Exit statuses of commands, and descriptions of errors."""

from __future__ import annotations

import os
import select
import sys
import sysconfig
import traceback
from pathlib import Path

from tfpolicies.cli.settings import in_words
from tfpolicies.errors import FolderInUseError, NonFiniteError, TfPoliciesError
from tfpolicies.system.signals import SignalEnd, what_happened
from tfpolicies.system.standard_files import discard_output

DONE, FELL_SHORT, USAGE, BROKE, NOT_FINITE, IN_USE = 0, 1, 2, 3, 4, 5
INTERRUPTED, PIPE_CLOSED = 130, 141


def status_of(error: BaseException, *, begun: bool) -> int:
    """Returns the exit status for the error that ended a command.

    Args:
        error: the exception.
        work_started: whether the command had started its work, so that it is not a usage error.

    >>> status_of(TfPoliciesError(), begun=False), status_of(TfPoliciesError(), begun=True)
    (2, 3)
    >>> status_of(SignalEnd(15), begun=False), status_of(SystemExit(0), begun=False)
    (143, 3)
    >>> status_of(NonFiniteError(), begun=True)
    4
    """
    if isinstance(error, SignalEnd):
        return error.status
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, FolderInUseError):
        return IN_USE
    if isinstance(error, NonFiniteError):
        return NOT_FINITE
    if isinstance(error, BrokenPipeError) and output_is_closed():
        return PIPE_CLOSED
    is_usage = isinstance(error, TfPoliciesError | OSError) and not begun
    return USAGE if is_usage else BROKE


def described(error: BaseException) -> str:
    """Describes in one line the error that ended a command, and where it was raised.

    >>> described(SignalEnd(15))
    'terminated'
    >>> described(TfPoliciesError("It is so."))
    'It is so'
    >>> described(TfPoliciesError("It is so.").advised("Write lr=1.", {"lr": 1}))
    'It is so. Give --set lr=1'
    """
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, SignalEnd) else 2
        return what_happened(number).lower()
    if isinstance(error, BrokenPipeError) and output_is_closed():
        return "the output pipe was closed"
    place = _place(error)
    if isinstance(error, SystemExit):
        return f"the process was to end by SystemExit({error.code!r}){place}"
    text = " ".join(_in_own_words(error).split()).removesuffix(".")
    if isinstance(error, TfPoliciesError | OSError):
        return text
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _in_own_words(error: BaseException) -> str:
    """Returns the message of an error, with its advice as command-line options."""
    text = str(error)
    if not isinstance(error, TfPoliciesError) or not error.settings:
        return text
    return f"{text.removesuffix(error.advice)}Give {in_words(error.settings)}."


def _place(error: BaseException) -> str:
    """Returns where an error arose: the last frame outside this package and libraries."""
    frames = [*traceback.extract_tb(error.__traceback__)]
    frames += getattr(error.__cause__, "frames", ())  # in the process of an environment
    libraries = {str(Path(__file__).parent.parent), *sysconfig.get_paths().values()}
    libraries = {f"{path}{os.sep}" for path in libraries if path != sysconfig.get_paths()["data"]}
    own = [x for x in frames if not any(x.filename.startswith(path) for path in libraries)]
    if not frames:
        return ""
    found = (own or frames)[-1]
    return f" ({found.filename}:{found.lineno}, in {found.name})"


def output_is_closed() -> bool:
    """Whether the reader of standard output has closed the pipe."""
    poll = select.poll()
    poll.register(1, 0)
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))


def flush_output(status: int) -> int:
    """Flushes standard output; returns the exit status, changed if the pipe is closed."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        status = PIPE_CLOSED if output_is_closed() and status in (DONE, FELL_SHORT) else status
        discard_output()
    return status
