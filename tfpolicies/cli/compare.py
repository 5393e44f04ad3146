"""The command `compare`: runs side by side, as a page, pictures and a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfpolicies.analysis.comparison import compare_runs
from tfpolicies.analysis.comparison_page import ESTIMATOR_TEXTS
from tfpolicies.analysis.comparison_results import (
    ComparisonFiles,
    ComparisonResult,
    EnvComparison,
)
from tfpolicies.analysis.number_texts import format_interval, format_value
from tfpolicies.analysis.run_summary import describe_end
from tfpolicies.cli.exit_codes import DONE
from tfpolicies.reporting.progress_display import CommandConsole
from tfpolicies.system.paths import resolve_path, shorten_path


def compare(args: argparse.Namespace) -> int:
    """Compares runs; writes a page and pictures, and prints a table."""
    console = CommandConsole()
    folder = resolve_path(args.to)
    with console.status("reading runs"):
        comparison = compare_runs(_group_by_name(args.runs), by=args.by, estimator=args.estimate)
    with console.status("drawing"):
        files = comparison.write(folder)
    print_comparison(console, comparison)
    print_comparison_files(console, files)
    return DONE


def _group_by_name(texts: Sequence[str]) -> dict[str, list[str]]:
    """Returns the paths of `NAME=RUNS` by name; those without a name have "".

    >>> _group_by_name(["tuned=runs/a", "runs/b", "tuned=runs/c"])
    {'tuned': ['runs/a', 'runs/c'], '': ['runs/b']}
    """
    paths: dict[str, list[str]] = {}
    for text in texts:
        name, is_named, path = text.partition("=")
        if not is_named or "/" in name or resolve_path(text).exists():
            name, path = "", text
        paths.setdefault(name, []).append(path)
    return paths


def print_comparison(console: Console, comparison: ComparisonResult) -> None:
    """Prints the final returns of all groups, and the runs that were left out."""
    for section in comparison.sections:
        title = f"{section.env}: {section.scored_by} return over the last tenth of the steps"
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(_make_table(comparison, section))
        if note := section.describe_early_scores():
            console.print(note, markup=False, highlight=False)
        console.print()
    for path, reason in comparison.damaged.items():
        console.print(Text.assemble(("left out  ", "bold"), f"{path}: {reason}"), soft_wrap=True)


def print_comparison_files(console: Console, files: ComparisonFiles) -> None:
    named = [("page", files.page), *(("picture", path) for path in files.pictures)]
    for name, path in named:
        line = Text.assemble((f"{name:9}", "dim"), shorten_path(path))
        console.print(line, soft_wrap=True, highlight=False)


def _make_table(comparison: ComparisonResult, section: EnvComparison) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("group", overflow="fold", header_style="dim")
    for name in ("runs", ESTIMATOR_TEXTS[comparison.estimator], "95 % interval"):
        table.add_column(name, justify="right", header_style="dim")
    table.add_column("ended", overflow="fold", header_style="dim")
    for result in section.groups:
        table.add_row(
            Text(result.label),
            str(len(result.group.runs)),
            format_value(result.final.estimate),
            format_interval(result.final),
            Text(_describe_ends([describe_end(run) for run in result.group.runs])),
        )
    return table


def _describe_ends(ends: list[str]) -> str:
    """Describes the ends of a group's runs in one line.

    >>> _describe_ends(["reached its target"] * 2 + ["ended by an error"])
    '2 reached its target, 1 ended by an error'
    """
    counts = {end: ends.count(end) for end in ends}
    if len(counts) == 1:
        return ends[0]
    return ", ".join(f"{count} {end}" for end, count in counts.items())
