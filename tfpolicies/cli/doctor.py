"""The command `doctor`: says why a run does not learn."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.text import Text

from tfpolicies.analysis.diagnosis import Diagnosis, describe_cause, diagnose
from tfpolicies.cli.exit_codes import DONE, FAULTS_FOUND
from tfpolicies.reporting.progress_display import CommandConsole, make_summary_table
from tfpolicies.reporting.run_folder import RunFolder, find_runs
from tfpolicies.system.paths import shorten_path


def doctor(args: argparse.Namespace) -> int:
    """Prints why a run does not learn.

    Returns:
        An exit status: 1 if there are causes.
    """
    run = find_newest(args.run_folder)
    diagnosis = diagnose(run.path)
    if args.json:
        print(json.dumps(diagnosis.to_json(), indent=2, allow_nan=False))
    else:
        print_diagnosis(CommandConsole(), diagnosis, shorten_path(run.path))
    return FAULTS_FOUND if diagnosis.causes else DONE


def find_newest(path: str) -> RunFolder:
    """Returns the run at `path`, or the newest one in it, with or without a checkpoint.

    Raises:
        CheckpointError: if there is none, or its `run.json` is damaged.
    """
    if RunFolder(path).run_json.exists():
        return RunFolder.open(path)
    runs = find_runs(path)
    return runs[0] if runs else RunFolder.open(path)  # the error describes the folder


def print_diagnosis(console: Console, diagnosis: Diagnosis, path: str) -> None:
    """Prints the causes, the likeliest first, and the figures that were looked at.

    Args:
        console: to print on.
        diagnosis: of the run.
        path: of the run.
    """
    console.print(Text(path, style="bold"), soft_wrap=True)
    if diagnosis.is_training:
        console.print("It is training now.", highlight=False)
    console.print(diagnosis.summary, highlight=False)
    for i, cause in enumerate(diagnosis.causes, 1):
        console.print()
        number = f"{i}. "
        console.print(Text.assemble(number, (describe_cause(cause), "bold")), soft_wrap=True)
        for text in (Text(cause.evidence), Text(cause.advice, style="green")):
            for line in text.wrap(console, console.width - len(number)):
                line.rstrip()
                console.print(Text(" " * len(number)) + line, soft_wrap=True)
    console.print()
    console.print(make_summary_table("Figures", diagnosis.figures))
