"""The command `data`: shows recorded experience, and records it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tfpolicies.cli.data_statistics import ActionCoverage, ComponentStats, EpisodeStats
from tfpolicies.cli.data_survey import DataReport, DataSurvey, find_missing
from tfpolicies.cli.exit_codes import DONE, FAULTS_FOUND
from tfpolicies.cli.space_text import parse_space
from tfpolicies.errors import UsageError
from tfpolicies.models.spaces import describe_space
from tfpolicies.offline.column_map import check_columns_setting
from tfpolicies.offline.open_data import open_data
from tfpolicies.offline.step_columns import NEW_OBS
from tfpolicies.reporting.progress_display import (
    CommandConsole,
    format_count,
    make_summary_table,
)
from tfpolicies.system.atomic import write_atomically
from tfpolicies.system.paths import resolve_path, shorten_path

_MAX_COMPONENTS = 32  # of observations or actions in the table
_MAX_CHOICES = 20
_PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


def data(args: argparse.Namespace) -> int:
    """Runs a subcommand; see `tfpolicies data --help`."""
    if args.subcommand == "show":
        return show_data(args)
    from tfpolicies.cli.data_recording import record_data

    return record_data(args)


def show_data(args: argparse.Namespace) -> int:
    """Reads recorded experience once; prints statistics, and faults that training would report.

    Returns:
        An exit status: 1 if there are faults.
    """
    console = CommandConsole()
    picture = None if args.to is None else _find_picture_path(args.to)
    if args.columns is not None:
        check_columns_setting(args.columns)
    spaces = {
        name: parse_space(f"--{name.replace('_', '-')}", text)
        for name in ("observation_space", "action_space")
        if (text := getattr(args, name)) is not None
    }
    source = open_data(args.paths, trusted=args.trusted_data)
    try:
        with Console(stderr=True).status("reading the data"):
            report = DataSurvey(source, args.columns, spaces).run()
    finally:
        source.close()
    if picture is not None:
        from tfpolicies.cli.data_picture import draw_data

        write_atomically(picture, draw_data(report, ", ".join(Path(x).name for x in args.paths)))
    if args.json:
        print(json.dumps(to_json(report), indent=2, allow_nan=False))
    else:
        print_report(console, report, args.paths)
        if picture is not None:
            console.print(f"Picture: {shorten_path(picture)}", highlight=False, soft_wrap=True)
    return FAULTS_FOUND if report.problems else DONE


def _find_picture_path(path: str) -> Path:
    target = resolve_path(path)
    if target.suffix.lower() != ".png" or not target.parent.is_dir():
        raise UsageError(
            f"--to takes a file that ends in .png, in a folder that exists, got {path!r}."
        )
    return target


# -- text -----------------------------------------------------------------------------------------


def print_report(console: Console, report: DataReport, paths: Sequence[str]) -> None:
    """Prints a report as tables."""
    title = f"{format_count(report.rows, 'row')} in {format_count(report.files, 'file')}"
    origin = "stated by the files" if report.has_stated_spaces else "inferred"
    figures: dict[str, Any] = {
        "data": ", ".join(paths),
        "observations": _describe_space(report.observation_space, origin),
        "actions": _describe_space(report.action_space, origin),
        **_describe_episodes(report.episodes),
        "next observations": _describe_next_observations(report),
    }
    console.print(make_summary_table(title, figures))
    console.print()
    _print_columns(console, report)
    for label, stats in report.observations.items():
        names = report.get_component_names(label, stats)
        _print_components(console, names, "Observations", stats, None)
    for label, coverage in report.actions.items():
        _print_coverage(console, report, label, coverage)
    console.print(make_summary_table("Algorithms", _describe_algorithms(report)))
    console.print()
    if not report.problems:
        console.print("No faults were found.", highlight=False)
    else:
        console.print(Text(f"{format_count(len(report.problems), 'fault')}", style="bold"))
        for i, problem in enumerate(report.problems, 1):
            console.print(f"{i}. {problem}", highlight=False, markup=False, soft_wrap=True)


def _describe_space(space: Any, origin: str) -> str:
    return "unknown" if space is None else f"{describe_space(space)}, {origin}"


def _describe_episodes(episodes: EpisodeStats | None) -> dict[str, Any]:
    if episodes is None:
        return {"episodes": "unknown: the data have no eps_id, terminateds or truncateds"}
    if not episodes.count:
        return {"episodes": 0}
    shares = {
        "terminated": episodes.terminated,
        "truncated": episodes.truncated,
        "cut off": episodes.cut_off,
    }
    ends = ", ".join(
        f"{number / episodes.count:.1%} {name}" for name, number in shares.items() if number
    )
    lengths = _describe_stats(episodes.lengths)
    returns = _describe_stats(episodes.returns) if episodes.has_returns else "no rewards"
    return {
        "episodes": f"{episodes.count:,}: {ends}",
        "lengths": lengths,
        "returns": returns,
    }


def _describe_stats(stats: ComponentStats) -> str:
    if stats.low is None or stats.high is None:
        return "none"
    mean, std = stats.mean[0], stats.std[0]
    return (
        f"mean {mean:,.4g} {_PLUS_MINUS} {std:,.4g}, from {stats.low[0]:,.6g} to "
        f"{stats.high[0]:,.6g}"
    )


def _describe_next_observations(report: DataReport) -> str:
    if NEW_OBS in report.available:
        return "recorded"
    return "not recorded: the next row of the episode" if report.episodes else "unknown"


def _describe_algorithms(report: DataReport) -> dict[str, str]:
    return {
        name: f"needs {', '.join(missing)}" if missing else "has all columns"
        for name, missing in find_missing(report).items()
    }


def _print_columns(console: Console, report: DataReport) -> None:
    rows = []
    for name, stats in report.columns.items():
        shape = f" {stats.shape}" if stats.shape else ""
        is_number = math.isfinite(stats.low)
        limits = (stats.low, stats.mean, stats.high)
        numbers = [f"{x:,.5g}" if is_number else "" for x in limits]
        missing = f"{stats.missing:,} not finite" if stats.missing else ""
        rows.append([name, f"{stats.dtype}{shape}", *numbers, missing])
    _print_table(console, "Columns", ["", "", "min", "mean", "max", ""], rows)


def _print_components(
    console: Console, names: Sequence[str], title: str, stats: ComponentStats, at_bounds: Any
) -> None:
    if stats.low is None or stats.high is None or len(stats.low) > _MAX_COMPONENTS:
        return
    mean, std = stats.mean, stats.std
    quantiles = _get_quantiles(stats, (0.05, 0.5, 0.95))
    headers = ["", "min", "5%", "50%", "95%", "max", "mean", "std"]
    rows = [
        [
            names[i],
            *(f"{x:,.4g}" for x in (stats.low[i], *quantiles[:, i], stats.high[i])),
            *(f"{x:,.4g}" for x in (mean[i], std[i])),
            *([] if at_bounds is None else [f"{at_bounds[i]:.1%}"]),
        ]
        for i in range(len(mean))
    ]
    headers += [] if at_bounds is None else ["at bounds"]
    _print_table(console, title, headers, rows)


def _get_quantiles(stats: ComponentStats, shares: Sequence[float]) -> Any:
    import numpy as np

    return np.quantile(stats.sample.get(), shares, axis=0)


def _print_coverage(
    console: Console, report: DataReport, label: str, coverage: ActionCoverage
) -> None:
    stats = coverage.components
    if stats is not None:
        names = report.get_component_names(label, stats)
        _print_components(console, names, "Actions", stats, coverage.share_at_bounds)
        return
    shares = coverage.get_shares()
    rows = [[f"{label} {choice}", f"{share:.1%}"] for choice, share in shares.items()]
    if len(rows) > _MAX_CHOICES:
        unused = sum(share == 0 for share in shares.values())
        rows = [*rows[:_MAX_CHOICES], [f"and {len(rows) - _MAX_CHOICES} more", ""]]
        rows.append(["never chosen", f"{unused:,}"])
    _print_table(console, "Actions", ["", "share"], rows)


def _print_table(
    console: Console, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for i, header in enumerate(headers):
        is_text = i == 0 or not header
        table.add_column(header, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()


# -- JSON -----------------------------------------------------------------------------------------


def to_json(report: DataReport) -> dict[str, Any]:
    """Returns a report as JSON values; unknown numbers are None."""
    from tfpolicies.storage.spaces_json import encode_space

    spaces = {
        name: None if space is None else {"text": str(space), "space": encode_space(space)}
        for name, space in (
            ("observation_space", report.observation_space),
            ("action_space", report.action_space),
        )
    }
    return {
        "rows": report.rows,
        "files": report.files,
        "columns": {
            name: {
                "dtype": stats.dtype,
                "shape": list(stats.shape),
                "min": _to_json_number(stats.low),
                "mean": _to_json_number(stats.mean),
                "max": _to_json_number(stats.high),
                "not_finite": stats.missing,
            }
            for name, stats in report.columns.items()
        },
        **spaces,
        "spaces_are_stated": report.has_stated_spaces,
        "episodes": _episodes_to_json(report.episodes),
        "observations": {k: _components_to_json(x) for k, x in report.observations.items()},
        "actions": {name: _coverage_to_json(x) for name, x in report.actions.items()},
        "missing_columns": {name: list(x) for name, x in find_missing(report).items()},
        "problems": list(report.problems),
    }


def _to_json_number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _episodes_to_json(episodes: EpisodeStats | None) -> Mapping[str, Any] | None:
    if episodes is None:
        return None
    lengths, returns = (_components_to_json(x) for x in (episodes.lengths, episodes.returns))
    return {
        "count": episodes.count,
        "terminated": episodes.terminated,
        "truncated": episodes.truncated,
        "cut_off": episodes.cut_off,
        "lengths": {name: x[0] for name, x in lengths.items()},
        "returns": {name: x[0] for name, x in returns.items()} if episodes.has_returns else None,
    }


def _components_to_json(stats: ComponentStats) -> dict[str, list[float]]:
    if stats.low is None or stats.high is None:
        return {}
    values = {"min": stats.low, "mean": stats.mean, "max": stats.high, "std": stats.std}
    return {name: array.tolist() for name, array in values.items()}


def _coverage_to_json(coverage: ActionCoverage) -> dict[str, Any]:
    if coverage.components is None:
        return {"shares": {str(choice): x for choice, x in coverage.get_shares().items()}}
    at_bounds = coverage.share_at_bounds
    result: dict[str, Any] = _components_to_json(coverage.components)
    return result | ({} if at_bounds is None else {"share_at_bounds": at_bounds.tolist()})
