"""What becomes of the figures: medians and ratios, a table, a chart."""

import statistics
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from rich.table import Table

from benchmarks.overview.plan import Cell, Contestant, Measurement

# (measurement, contestant's label, cell's key) -> one value per repetition
Values = dict[tuple[str, str, str], list[float]]

_OURS = ("#0b5fa5", "#62a9e0", "#7b5ea7")
_OTHERS = {"SB3": "#e08214", "RLlib, tf2": "#b2182b", "RLlib, tf1": "#d6877f"}
_LIMITS = ("#8c8c8c", "#c4c4c4")


def times_better(cell: Cell, ours: float, other: float) -> float:
    """Returns how many times better `ours` is than `other`; below 1 it is worse.

    >>> times_better(Cell("1", "batch 1", "µs"), ours=20.0, other=100.0)
    5.0
    """
    return ours / other if cell.higher_is_better else other / ours


def summary(measurements: list[Measurement], values: Values) -> list[dict[str, Any]]:
    """Returns one record per figure and contestant, with its ratio to each way of ours."""
    records = []
    for measurement in measurements:
        for cell in measurement.cells:
            medians = {
                contestant: statistics.median(result)
                for contestant in measurement.contestants
                if (result := values.get((measurement.name, contestant.label, cell.key)))
            }
            records += [
                _record(measurement, cell, contestant, values, medians) for contestant in medians
            ]
    return records


def _record(
    measurement: Measurement,
    cell: Cell,
    contestant: Contestant,
    values: Values,
    medians: dict[Contestant, float],
) -> dict[str, Any]:
    result = values[measurement.name, contestant.label, cell.key]
    rivals = [
        ours
        for ours in medians
        if ours.is_ours and not contestant.is_ours and contestant.limit_of in ("", ours.variant)
    ]
    return {
        "measurement": measurement.name,
        "figure": cell.label,
        "unit": cell.unit,
        "higher_is_better": cell.higher_is_better,
        "contestant": contestant.label,
        "is_limit": bool(contestant.limit_of),
        "median": medians[contestant],
        "min": min(result),
        "max": max(result),
        "values": result,
        "times_better": {
            ours.label: times_better(cell, medians[ours], medians[contestant]) for ours in rivals
        },
    }


def table(measurements: list[Measurement], records: list[dict[str, Any]]) -> Table:
    """Returns the table of all figures, a section for each figure of each measurement."""
    result = Table(title="tfpolicies against its peers (medians)", title_justify="left")
    result.add_column("figure")
    result.add_column("contestant", no_wrap=True)
    result.add_column("median", justify="right", no_wrap=True)
    result.add_column("min - max", justify="right", no_wrap=True)
    result.add_column("how many times better ours is")
    for measurement in measurements:
        for cell in measurement.cells:
            rows = [
                record
                for record in records
                if (record["measurement"], record["figure"]) == (measurement.name, cell.label)
            ]
            names = [f"[bold]{measurement.name}[/bold], {cell.label}"]
            names += [f"[dim]{cell.unit}, {_aim(cell)}[/dim]"]
            for name, record in zip_longest(names, rows, fillvalue="") if rows else ():
                result.add_row(name, *(_row(record) if record else ()))
            result.add_section()
    return result


def _row(record: dict[str, Any]) -> tuple[str, str, str, str]:
    spread = f"{_number(record['min'])} - {_number(record['max'])}"
    return record["contestant"], _number(record["median"]), spread, _ratios(record)


def _aim(cell: Cell) -> str:
    return "more is better" if cell.higher_is_better else "less is better"


def _ratios(record: dict[str, Any]) -> str:
    if record["is_limit"]:
        shares = record["times_better"].items()
        return "\n".join(f"{ours}: {share:.0%} of this limit" for ours, share in shares)
    ratios = record["times_better"].items()
    return ", ".join(f"{_number(ratio, 2)}x ({ours})" for ours, ratio in ratios)


def _number(value: float, decimals: int = 1) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.{decimals}f}"


def chart(measurements: list[Measurement], values: Values, path: Path) -> None:
    """Draws the medians as bars on log scales, a panel for each unit of each measurement.

    The whiskers reach from the smallest to the greatest value.
    """
    panels = [
        (measurement, [cell for cell in measurement.cells if cell.unit == unit])
        for measurement in measurements
        for unit in dict.fromkeys(cell.unit for cell in measurement.cells)
    ]
    rows = (len(panels) + 1) // 2
    figure, axes = plt.subplots(
        rows, 2, figsize=(15, 4.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (measurement, cells) in zip(axes.flat, panels, strict=False):
        _panel(axis, measurement, cells, values)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(axis: Any, measurement: Measurement, cells: list[Cell], values: Values) -> None:
    present = [
        contestant
        for contestant in measurement.contestants
        if all((measurement.name, contestant.label, cell.key) in values for cell in cells)
    ]
    width, lowest = 0.84 / max(len(present), 1), float("inf")
    for index, contestant in enumerate(present):
        results = [values[measurement.name, contestant.label, cell.key] for cell in cells]
        heights = [statistics.median(each) for each in results]
        places = [place + (index - (len(present) - 1) / 2) * width for place in range(len(cells))]
        spread = [
            [height - min(each) for height, each in zip(heights, results, strict=True)],
            [max(each) - height for height, each in zip(heights, results, strict=True)],
        ]
        bars = axis.bar(
            places,
            heights,
            width * 0.94,
            label=contestant.label,
            color=_colour(contestant, present),
            yerr=spread,
            error_kw={"elinewidth": 1, "ecolor": "#333333"},
        )
        axis.bar_label(bars, [_short(height) for height in heights], fontsize=8, padding=2)
        lowest = min(lowest, *heights)
    unit, aim = cells[0].unit, _aim(cells[0])
    axis.set_yscale("log")
    if present:  # a decade below the lowest bar, so that heights are not exaggerated
        axis.set_ylim(lowest / 10, axis.get_ylim()[1] * 2)
    axis.set_xticks(range(len(cells)), [cell.label for cell in cells])
    axis.set_ylabel(unit)
    axis.set_title(f"{measurement.title} [{unit}], {aim}", fontsize=11)
    axis.grid(axis="y", which="major", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False)


def _short(value: float) -> str:
    """Returns a value in three digits or so, for the top of a narrow bar.

    >>> _short(1_066_794), _short(125_682), _short(812.3), _short(13.46)
    ('1.07M', '126k', '812', '13.5')
    """
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if value >= 1e4 else _number(value)


def _colour(contestant: Contestant, present: list[Contestant]) -> str:
    if contestant.label in _OTHERS:
        return _OTHERS[contestant.label]
    alike = [other for other in present if other.script == contestant.script]
    return (_OURS if contestant.is_ours else _LIMITS)[alike.index(contestant)]
