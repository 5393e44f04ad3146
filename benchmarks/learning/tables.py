"""Verdicts on the cells: a table for each task in `docs/tables/learning.md`, and a figure.

With five seeds a task is passed if our median is at least the peer's lower quartile, and no more of
our seeds failed than of the peer's. With three it is our median that must be at least the peer's
less half its range. Without a peer it must be the threshold of the settings' source.
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
_FIVE, _THREE = 5, 3  # seeds, by which the rule is chosen

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


def failures(values: Iterable[float], peer_median: float) -> int:
    """Counts seeds below half the peer's median; where that is negative, below twice it.

    >>> failures([100.0, 249.0, 500.0], 500.0), failures([-150.0, -310.0], -150.0)
    (2, 1)
    """
    limit = peer_median / 2 if peer_median >= 0 else peer_median * 2
    return sum(value < limit for value in values)


def verdict(ours: Sequence[float], peer: Sequence[float]) -> Verdict:
    """Compares the returns of our seeds with a peer's."""
    seeds = min(len(ours), len(peer))
    if seeds < _THREE:
        return Verdict(None, "stated")
    rule = _of_five if seeds >= _FIVE else _of_three
    return rule(ours, peer)


def _of_five(ours: Sequence[float], peer: Sequence[float]) -> Verdict:
    low, middle, _ = quartiles(peer)
    median = statistics.median(ours)
    failed, allowed = failures(ours, middle), failures(peer, middle)
    words = f"{_number(median)} against a lower quartile of {_number(low)}; "
    words += f"failed seeds {failed} against {allowed}"
    return Verdict(median >= low and failed <= allowed, words)


def _of_three(ours: Sequence[float], peer: Sequence[float]) -> Verdict:
    median = statistics.median(ours)
    limit = statistics.median(peer) - (max(peer) - min(peer)) / 2
    return Verdict(median >= limit, f"{_number(median)} against {_number(limit)}")


def alone(ours: Sequence[float], threshold: float | None) -> Verdict:
    """Compares the returns of our seeds with what the settings' source reports, if it does."""
    if threshold is None:
        return Verdict(None, "stated")
    median = statistics.median(ours)
    return Verdict(median >= threshold, f"{_number(median)} against {_number(threshold)}")


def verdicts(task: Task, scores: Scores) -> dict[str, Verdict]:
    """Returns a verdict for each peer of a task, or for "" if it has none.

    A peer with cells that are not finished, or of ours, has none yet.
    """
    complete = {name for name, count in task.seeds.items() if len(scores.get(name, ())) >= count}
    if "ours" not in complete:
        return {}  # not finished, or peers alone
    peers = [name for name in task.seeds if name != "ours"]
    if not peers:
        return {"": alone(scores["ours"], task.threshold())}
    return {name: verdict(scores["ours"], scores[name]) for name in peers if name in complete}


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
    for name, lines in (("results", _results(table)), ("settings", _settings())):
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


def _results(table: Table) -> list[str]:
    lines = [
        "| task | library | seeds | median | quartiles | each seed | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        scores = scores_of(task, table)
        result = verdicts(task, scores)
        lines += [_row(task, name, scores[name], result) for name in LIBRARIES if scores.get(name)]
    return lines


def _row(task: Task, library: str, values: Sequence[float], outcomes: dict[str, Verdict]) -> str:
    low, middle, high = quartiles(values)
    result = outcomes.get("" if library == "ours" else library)
    cells = (
        _title(task),
        NAMES[library],
        f"{len(values)} of {task.seeds[library]}",
        _number(middle),
        f"{_number(low)} to {_number(high)}",
        ", ".join(map(_number, values)),
        "" if result is None else _said(result),
    )
    return f"| {' | '.join(cells)} |"


def _said(result: Verdict) -> str:
    if result.passed is None:
        return result.words
    return f"{'passed' if result.passed else 'missed'}: {result.words}"


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
