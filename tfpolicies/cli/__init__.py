"""The command line: `tfpolicies train | evaluate | export | serve | ...`, and plugin commands.

Signal handlers are installed before most imports, and TensorFlow is only imported by commands that
need it.
"""

from __future__ import annotations

import atexit
import os
import sys

from tfpolicies.system.signal_handling import ShutdownHandler, SignalInterrupt, print_to_stderr
from tfpolicies.system.stdio import open_standard_files

TYPE_CHECKING = False  # as in `typing`
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; `tfpolicies --help` has the list.

    Args:
        argv: the arguments after the program's name. None: those of the process, which is then set
            up as the main program and exits with the status.
    """
    if argv is not None:
        with ShutdownHandler() as signals:
            return _run([*argv], signals)
    open_standard_files()
    with ShutdownHandler() as signals:
        status = _run(sys.argv[1:], signals, is_program=True)
        signals.acknowledge()  # from now on a signal changes nothing

        from tfpolicies.cli.exit_codes import flush_output

        status = flush_output(status)
        signals.exit_at_next_signal(status)
        if signals.requested is not None:
            atexit._run_exitfuncs()
            os._exit(status)  # waiting for TensorFlow and running threads takes too long
    return status


def _run(argv: list[str], signals: ShutdownHandler, *, is_program: bool = False) -> int:
    try:
        if is_program:
            _prepare_process()

        from tfpolicies.cli.arguments import parse

        try:
            args = parse(argv)
        except SystemExit as exit_error:  # raised by argparse for --help and --version
            return int(exit_error.code or 0)
        if args.command is None:
            print(args.help)
            return 0
        from tfpolicies.system.installed_distributions import check_same_version

        check_same_version()
        return int(args.run(args))
    except BaseException as error:
        signals.acknowledge()
        return _report_error(
            error if signals.requested is None else SignalInterrupt(signals.requested), argv
        )


def _report_error(error: BaseException, argv: list[str]) -> int:
    """Reports the error of a command that had nothing to save; returns the exit status."""
    import traceback

    from tfpolicies.cli.exit_codes import FAILED, describe_error, get_exit_status

    status = get_exit_status(error, work_started=False)
    if "--debug" in argv:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        print_to_stderr(f"{describe_error(error).capitalize()}.")
    else:
        hint = " --debug shows the traceback." if status == FAILED else ""
        message = describe_error(error)
        print_to_stderr(f"tfpolicies: error: {message}{'' if message.endswith('?') else '.'}{hint}")
    return status


def _prepare_process() -> None:
    """Hides TensorFlow's startup log; makes the current folder importable, as `python -m` does."""
    from tfpolicies.system.gpu_memory import claim_process

    claim_process()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
