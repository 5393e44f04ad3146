"""Exit statuses of commands, and descriptions of errors."""

from __future__ import annotations

import os
import select
import sys
import sysconfig
import traceback
from pathlib import Path

from tfpolicies.errors import CheckpointError, FolderInUseError, NonFiniteError, TfPoliciesError
from tfpolicies.system.signal_handling import SignalInterrupt, describe_signal
from tfpolicies.system.stdio import discard_output

DONE, TARGET_MISSED, USAGE, FAILED, NOT_FINITE, RUN_IN_USE = 0, 1, 2, 3, 4, 5
FAULTS_FOUND = TARGET_MISSED  # a check that ended with a negative result
INTERRUPTED, PIPE_CLOSED = 130, 141


def get_exit_status(error: BaseException, *, work_started: bool) -> int:
    """Returns the exit status for the error that ended a command.

    Args:
        error: the exception.
        work_started: whether the command had started its work, so that it is not a usage error.

    >>> get_exit_status(TfPoliciesError(), work_started=False)
    2
    >>> get_exit_status(TfPoliciesError(), work_started=True)
    3
    >>> get_exit_status(SignalInterrupt(15), work_started=False)
    143
    >>> get_exit_status(SystemExit(0), work_started=False)
    3
    >>> get_exit_status(NonFiniteError(), work_started=True)
    4
    """
    if isinstance(error, SignalInterrupt):
        return error.status
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, FolderInUseError):
        return RUN_IN_USE
    if isinstance(error, NonFiniteError):
        return NOT_FINITE
    if isinstance(error, BrokenPipeError) and output_is_closed():
        return PIPE_CLOSED
    is_usage = isinstance(error, TfPoliciesError | OSError) and not work_started
    return USAGE if is_usage else FAILED


def describe_error(error: BaseException) -> str:
    """Describes in one line the error that ended a command, and where it was raised.

    >>> describe_error(SignalInterrupt(15))
    'terminated'
    >>> describe_error(TfPoliciesError("It is so."))
    'It is so'
    >>> describe_error(TfPoliciesError("It is so.").add_advice("Write lr=1.", {"lr": 1}))
    'It is so. Give --set lr=1'
    """
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, SignalInterrupt) else 2
        return describe_signal(number).lower()
    if isinstance(error, BrokenPipeError) and output_is_closed():
        return "the output pipe was closed"
    location = _describe_location(error)
    if isinstance(error, SystemExit):
        return f"the process was to end by SystemExit({error.code!r}){location}"
    text = " ".join(_get_message(error).split()).removesuffix(".")
    if isinstance(error, TfPoliciesError | OSError):
        return text
    return (
        f"{type(error).__name__}: {text}{location}" if text else f"{type(error).__name__}{location}"
    )


def _get_message(error: BaseException) -> str:
    """Returns the message of an error, with its advice as command-line options."""
    text = str(error)
    if not isinstance(error, TfPoliciesError) or not error.settings:
        return text
    from tfpolicies.cli.train_options import has_option, to_arguments  # imports NumPy

    if isinstance(error, CheckpointError) and not all(map(has_option, error.settings)):
        return text  # commands that load a run take no --set
    return f"{text.removesuffix(error.advice)}Give {to_arguments(error.settings)}."


def _describe_location(error: BaseException) -> str:
    """Returns where an error arose: the last frame outside this package and libraries."""
    frames = [*traceback.extract_tb(error.__traceback__)]
    frames += getattr(error.__cause__, "frames", ())  # in the process of an environment
    libraries = {str(Path(__file__).parent.parent), *sysconfig.get_paths().values()}
    libraries = {f"{path}{os.sep}" for path in libraries if path != sysconfig.get_paths()["data"]}
    user_frames = [x for x in frames if not any(x.filename.startswith(path) for path in libraries)]
    if not frames:
        return ""
    frame = (user_frames or frames)[-1]
    return f" ({frame.filename}:{frame.lineno}, in {frame.name})"


def output_is_closed() -> bool:
    """Whether the reader of standard output has closed the pipe."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def flush_output(status: int) -> int:
    """Flushes standard output; returns the exit status, changed if the pipe is closed."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        status = PIPE_CLOSED if output_is_closed() and status in (DONE, TARGET_MISSED) else status
        discard_output()
    return status
