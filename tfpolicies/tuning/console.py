"""Prints the progress and the results of a search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.reporting.progress_display import format_count
from tfpolicies.system.paths import shorten_path
from tfpolicies.tuning.options import TuneOptions
from tfpolicies.tuning.ranges import make_label
from tfpolicies.tuning.search_folder import SearchFolder
from tfpolicies.tuning.search_results import TuneResult, find_best
from tfpolicies.tuning.search_space import UPDATES_PER_STEP, SearchSpace, shorten_name, split_names
from tfpolicies.tuning.study import COMPLETE, FAILED, PRUNED, TrialRow

_NUM_BEST = 4  # trials in the table of results
_NUM_IMPORTANT = 5
_PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


class SearchConsole:
    """Shows a search on a console: a line per trial, and in a terminal the running ones.

    Args:
        console: where to print.
        options: of the search.
        unit: of the steps of a run.
    """

    def __init__(self, console: Console, options: TuneOptions, unit: str = "step") -> None:
        self._console = console
        self._unit = unit
        self._options = options
        self._running: dict[int, str] = {}
        self._status: Status | None = None

    def __enter__(self) -> SearchConsole:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def print_start(self, folder: SearchFolder, space: SearchSpace, num_finished: int) -> None:
        """Prints the ranges, and where the results will be."""
        options = self._options
        source = f", from {space.source}" if space.source else ""
        self._print(f"Searching {format_count(len(space.ranges), 'setting')}{source}:")
        width = max(len(shorten_name(name)) for name in space.ranges)
        for name, text in space.describe().items():
            self._print(f"  {shorten_name(name):{width}}  {text}")
        runs = f"{options.trials} trials of {format_count(options.steps, self._unit)}"
        seeds = "" if options.seeds == 1 else f", {options.seeds} seeds each"
        jobs = "" if options.jobs == 1 else f", {options.jobs} at a time"
        finished = f"; {num_finished} are finished" if num_finished else ""
        self._print(f"{runs}{seeds}{jobs}{finished}.")
        self._print(f"Search folder: {shorten_path(folder.path)}  (seed {options.seed})")

    def on_evaluation(self, number: int, share: float, mean_return: float) -> None:
        """Shows the share of a trial's steps and its last evaluation."""
        self._running[number] = f"trial {number}: {share:.0%}, return {mean_return:,.5g}"
        self._update_status()

    def on_trial(self, row: TrialRow, best: TrialRow | None) -> None:
        """Prints a line about a finished trial."""
        self._running.pop(row.number, None)
        result = _format_result(row)
        is_best = best is not None and best.number == row.number
        mark = "  best so far" if is_best and row.number else ""
        start = "  (your settings)" if row.number == 0 else ""
        self._print(
            f"trial {row.number:>3}  {row.state:8}  {result:>18}  {row.seconds:6.1f} s{start}{mark}"
        )
        if row.state == FAILED:
            self._print(f"           {row.error}")
        self._update_status()

    def print_result(self, result: TuneResult, space: SearchSpace, config: AlgorithmConfig) -> None:
        """Prints the best trials, the most important settings, and the files.

        Args:
            result: of the search.
            space: the ranges.
            config: the settings of trial 0.
        """
        rows = result.trials
        states = [row.state for row in rows]
        pruned, failed = states.count(PRUNED), states.count(FAILED)
        self._print("")
        self._console.print(_make_best_table(rows, space, config))
        if result.importances:
            self._print("")
            names = list(result.importances.items())[:_NUM_IMPORTANT]
            shares = ", ".join(f"{shorten_name(name)} {share:.0%}" for name, share in names)
            self._print(f"Most important: {shares} (PED-ANOVA).")
        complete = states.count(COMPLETE)
        self._print(
            f"{format_count(complete, 'trial')} complete, {pruned} pruned, {failed} failed."
        )
        best = next(row for row in [find_best(rows)] if row)
        if best.number == 0 and complete > 1:
            self._print("No trial was better than your settings (trial 0).")
        repaired = [row.number for row in rows if row.repairs]
        if repaired:
            example = next(row.repairs[0] for row in rows if row.repairs)
            self._print(
                f"In {format_count(len(repaired), 'trial')} settings were changed to work together "
                f"(trial {repaired[0]}: {example})."
            )
        self._print("")
        files = {
            "best settings": result.best_json,
            "all trials": result.trials_csv,
            "picture": result.picture,
            "best run": best.folders[0],
        }
        for name, path in files.items():
            self._console.print(
                Text.assemble((f"{name:13}  ", "dim"), shorten_path(path)),
                soft_wrap=True,
                highlight=False,
            )

    def _update_status(self) -> None:
        if self._status is not None:
            self._status.update(" | ".join(self._running.values()))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _format_result(row: TrialRow) -> str:
    if row.mean_return is None:
        return ""
    if len(row.returns) == 1:
        return f"{row.mean_return:,.5g}"
    mean = row.mean_return
    variance = math.fsum((x - mean) ** 2 for x in row.returns) / len(row.returns)
    return f"{mean:,.5g} {_PLUS_MINUS} {math.sqrt(variance):,.3g}"


def _make_best_table(
    rows: Sequence[TrialRow], space: SearchSpace, config: AlgorithmConfig
) -> Table:
    """Returns a table with a column for each of the best trials, and for trial 0."""
    complete = [row for row in rows if row.mean_return is not None]
    ranked = sorted(complete, key=lambda row: (-(row.mean_return or 0.0), row.number))
    best = ranked[:_NUM_BEST] + [row for row in ranked[_NUM_BEST:] if row.number == 0]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("best trials", style="dim", overflow="fold")
    for row in best:
        start = " (yours)" if row.number == 0 else ""
        table.add_column(f"{row.number}{start}", justify="right", no_wrap=True)
    table.add_row("mean return", *(_format_result(row) for row in best))
    for name in space.ranges:
        table.add_row(
            shorten_name(name), *(_format(_get_setting(row, name, config)) for row in best)
        )
    return table


def _get_setting(row: TrialRow, name: str, config: AlgorithmConfig) -> Any:
    """Returns the value of a range's name in a trial, or else in the config."""
    if name == UPDATES_PER_STEP:
        intensity = row.settings.get("training_intensity", config.get("training_intensity"))
        size = row.settings.get("train_batch_size", config.get("train_batch_size"))
        return None if intensity is None else intensity / size
    if name in row.settings:
        return row.settings[name]
    head, _, key = split_names(name)[0].partition(".")
    value = config.get(head)
    return value.get(key) if key and isinstance(value, Mapping) else value


def _format(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else make_label(value)
