"""Compares the results of the cells: verdicts, and the tables and figure of the learning page.

One rule holds for every number of seeds, from three on. A task is passed if our median is at least
the lower quartile of the peer's seeds, and if the share of our seeds that failed is not larger than
the peer's. Without a peer, our median must reach the return that the source of the settings
reports, and no seed may have failed. A seed has failed below half the reference: the peer's median,
or the source's return.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import ROOT
from benchmarks.learning import peer_settings
from benchmarks.learning.cells import Table, key_of
from benchmarks.learning.tasks import LIBRARIES, NAMES, TASKS, Cell, Task, source

DOCS = ROOT / "docs"
PAGE = DOCS / "tables" / "learning.md"
FIGURE = DOCS / "images" / "learning.png"
_COLOURS = {"ours": "#0b5fa5", "sb3": "#e08214", "sbx": "#4d9221"}
_MIN_SEEDS = 3  # fewer are not compared

Scores = dict[str, list[float]]  # library -> a mean return per seed


# -- verdicts ---------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """Whether a task is passed; `passed` is None where there is nothing to compare with."""

    passed: bool | None
    words: str


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the lower quartile, the median and the upper quartile, interpolated.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def count_failed(values: Iterable[float], reference: float) -> int:
    """Counts seeds below half a reference return; where that is negative, below twice it.

    >>> count_failed([100.0, 249.0, 500.0], 500.0), count_failed([-150.0, -310.0], -150.0)
    (2, 1)
    """
    limit = reference / 2 if reference >= 0 else reference * 2
    return sum(value < limit for value in values)


def verdict(ours: Sequence[float], peer: Sequence[float]) -> Verdict:
    """Compares the returns of our seeds with a peer's."""
    if min(len(ours), len(peer)) < _MIN_SEEDS:
        return Verdict(None, "not compared: too few seeds")
    low, middle, _ = quartiles(peer)
    median = statistics.median(ours)
    failed, allowed = count_failed(ours, middle), count_failed(peer, middle)
    words = f"{_number(median)} against a lower quartile of {_number(low)}; "
    words += f"failed seeds {failed} of {len(ours)} against {allowed} of {len(peer)}"
    return Verdict(median >= low and failed / len(ours) <= allowed / len(peer), words)


def compare_with_source(ours: Sequence[float], threshold: float | None) -> Verdict:
    """Compares the returns of our seeds with the return that the settings' source reports."""
    if threshold is None:
        return Verdict(None, "not compared")
    if len(ours) < _MIN_SEEDS:
        return Verdict(None, "not compared: too few seeds")
    median, failed = statistics.median(ours), count_failed(ours, threshold)
    words = f"{_number(median)} against the source's {_number(threshold)}; failed seeds {failed}"
    return Verdict(median >= threshold and failed == 0, f"{words} of {len(ours)}")


def verdicts(task: Task, scores: Scores) -> dict[str, Verdict]:
    """Returns a verdict for each peer of a task that has results, or for "" if it has no peer.

    Seeds that are not finished do not count; the table says how many there are.
    """
    ours = scores.get("ours")
    if not ours:
        return {}  # not begun, or peers alone
    peers = [name for name in task.seeds if name != "ours"]
    if not peers:
        return {"": compare_with_source(ours, task.threshold())}
    return {name: verdict(ours, scores[name]) for name in peers if scores.get(name)}


def list_by_outcome(table: Table) -> dict[bool, dict[Task, str]]:
    """Returns the compared tasks: those passed against each peer under True, others under False.

    The values are the words of the first verdict that was missed, or "".
    """
    results: dict[bool, dict[Task, str]] = {True: {}, False: {}}
    for task in TASKS:
        outcomes = verdicts(task, scores_of(task, table)).values()
        missed = [result.words for result in outcomes if result.passed is False]
        if missed or any(result.passed for result in outcomes):
            results[not missed][task] = missed[0] if missed else ""
    return results


# -- the page ---------------------------------------------------------------------------------


def scores_of(task: Task, table: Table) -> Scores:
    """Returns the mean returns of the seeds that are finished, by library."""
    finished = table.finished()
    results: Scores = {}
    for library, count in task.seeds.items():
        keys = [key_of(Cell(task, library, seed)) for seed in range(1, count + 1)]
        results[library] = [float(finished[key]["return_mean"]) for key in keys if key in finished]
    return results


def write(table: Table) -> None:
    """Writes the tables into the page, and draws the figure."""
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw(table, FIGURE)
    text = PAGE.read_text()
    parts = {"summary": _summary(table), "results": _results(table), "settings": _settings()}
    for name, lines in parts.items():
        text = between(text, name, lines)
    PAGE.write_text(text)


def between(text: str, name: str, lines: Sequence[str]) -> str:
    r"""Returns a page with other lines between the markers of a name.

    >>> between("a\n<!-- x -->\nold\n<!-- end of x -->\nb", "x", ["new"])
    'a\n<!-- x -->\nnew\n<!-- end of x -->\nb'
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([before + begin, *lines, end + after])


def _summary(table: Table) -> list[str]:
    passed, missed = (list_by_outcome(table)[outcome] for outcome in (True, False))
    lines = [f"Of {len(passed) + len(missed)} compared tasks, {len(passed)} are passed and "]
    lines[0] += f"{len(missed)} are missed."
    if missed:
        lines += ["", "Missed:", ""]
        lines += [f"- {_title(task)}: {words}" for task, words in missed.items()]
    return lines


def _results(table: Table) -> list[str]:
    lines = [
        "| task | library | seeds | failed seeds | median | quartiles | each seed | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        scores = scores_of(task, table)
        result = verdicts(task, scores)
        reference = _get_reference(scores)
        lines += [
            _row(task, name, scores[name], reference, result.get("" if name == "ours" else name))
            for name in LIBRARIES
            if scores.get(name)
        ]
    return lines


def _get_reference(scores: Scores) -> float:
    """Returns the median that defines failed seeds: of the first peer, or else of our seeds."""
    order = [*LIBRARIES[1:], LIBRARIES[0]]
    samples = [scores[name] for name in order if len(scores.get(name, ())) >= _MIN_SEEDS]
    return statistics.median(samples[0]) if samples else float("nan")


def _row(
    task: Task, library: str, values: Sequence[float], reference: float, result: Verdict | None
) -> str:
    low, middle, high = quartiles(values)
    cells = (
        _title(task),
        NAMES[library],
        f"{len(values)} of {task.seeds[library]}",
        str(count_failed(values, reference)) if len(values) >= _MIN_SEEDS else "",
        _number(middle),
        f"{_number(low)} to {_number(high)}",
        ", ".join(map(_number, values)),
        "" if result is None else _said(result),
    )
    return f"| {' | '.join(cells)} |"


def _said(result: Verdict) -> str:
    if result.passed is None:
        return result.words
    return f"{'passed' if result.passed else '**missed**'}: {result.words}"


def _title(task: Task) -> str:
    part = f", {task.part}" if task.part else ""
    return f"{task.algorithm}{part} on {task.env}, {task.steps:,} steps"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _settings() -> list[str]:
    lines: list[str] = []
    for task in TASKS:
        lines += [f"**{_title(task)}** ({source(task)})", "", "```text", _json(task.settings())]
        lines += ["```", ""]
        if set(task.seeds) - {"ours"}:
            arguments = peer_settings.arguments(task.algorithm, task.settings(), task.steps)
            arguments |= peer_settings.normalised(task.settings())
            lines += ["Settings of the peers:", "", "```text", _json(arguments), "```", ""]
    return lines


def _json(settings: dict[str, Any]) -> str:
    return "\n".join(f'"{name}": {json.dumps(value)}' for name, value in settings.items())


# -- the figure -------------------------------------------------------------------------------


def draw(table: Table, path: Path) -> None:
    """Draws the curves of training, a panel for each task: the median and the range of seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves, finished = table.curve_rows(), table.finished()

    def known(task: Task, library: str) -> list[list[tuple[float, float]]]:
        keys = [key_of(Cell(task, library, seed)) for seed in range(1, task.seeds[library] + 1)]
        return [curves[key] for key in keys if key in finished and key in curves]

    tasks = [task for task in TASKS if any(known(task, library) for library in task.seeds)]
    columns = min(4, max(1, len(tasks)))
    rows = max(1, -(-len(tasks) // columns))
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.75 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(tasks) :]:
        axis.remove()
    for axis, task in zip(axes.flat, tasks, strict=False):
        _panel(axis, task, lambda library, task=task: known(task, library))
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _panel(axis: Any, task: Task, known: Callable[[str], list[list[tuple[float, float]]]]) -> None:
    for library in task.seeds:
        if seeds := known(library):
            at = np.linspace(0, task.steps, 51)
            heights = np.stack([_interpolated(at, curve) for curve in seeds])
            colour = _COLOURS[library]
            axis.plot(at, np.median(heights, 0), color=colour, label=NAMES[library])
            axis.fill_between(at, heights.min(0), heights.max(0), color=colour, alpha=0.2)
    axis.set_title(f"{task.algorithm} {task.part} {task.env}".replace("  ", " "), fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, frameon=False)
    axis.tick_params(labelsize=7)


def _interpolated(at: np.ndarray, curve: Sequence[tuple[float, float]]) -> np.ndarray:
    """Returns a curve's heights, NaN before its first point."""
    steps, heights = np.array(curve).T
    return np.interp(at, steps, heights, left=np.nan)
