"""The command line: `tfpolicies train | evaluate | export | play-exported`.

Nothing here imports TensorFlow before a command needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tfpolicies.cli.arguments import parse
from tfpolicies.errors import TfPoliciesError

ERROR, INTERRUPTED = 2, 130  # exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Codes: 0 done, 1 the target was not reached, 2 an error, 130 interrupted.

    Args:
        argv: the words after the program's name; those of the process if None.
    """
    if argv is None:
        _prepare_process()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(words)
        if args.command is None:
            print(args.help)
            return 0
        from tfpolicies.cli.commands import COMMANDS

        return COMMANDS[args.command](args)
    except SystemExit as ended:  # argparse ends --help and --version so
        return int(ended.code or 0)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    except (TfPoliciesError, OSError) as error:
        if "--debug" in words:
            raise
        print(f"tfpolicies: error: {error}", file=sys.stderr)
        return ERROR


def _prepare_process() -> None:
    """Quiets TensorFlow's start and finds modules in the current folder, as `python -m` does."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
