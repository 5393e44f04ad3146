"""Draws a report of recorded experience as a PNG image."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from tfpolicies.cli.data_statistics import ActionCoverage
from tfpolicies.cli.data_survey import DataReport
from tfpolicies.models.spaces import is_float_box

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _LIGHT, _ORANGE = "#1c6dd0", "#a9c8f0", "#e8710a"
_INK, _GRAY, _GRID = "#202124", "#5f6368", "#e8eaed"
_MAX_COMPONENTS = 24
_MAX_BARS = 40


def draw_data(report: DataReport, title: str) -> bytes:
    """Returns a PNG with the returns, the coverage of the actions and the ranges of observations.

    The global state of matplotlib is not changed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(rect=(0.015, 0.02, 0.97, 0.87), wspace=0.05, hspace=0.08)
    figure = Figure(figsize=(11, 8), dpi=130, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _draw_episodes(axes[0, 0], report, 0, "returns")
    _draw_episodes(axes[0, 1], report, 1, "episode lengths")
    _draw_actions(axes[1, 0], report)
    _draw_observations(axes[1, 1], report)
    figure.text(0.03, 0.955, title, parse_math=False, size=15, weight="bold", color=_INK)
    figure.text(0.03, 0.915, _describe(report), size=11, color=_GRAY)
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    return png.getvalue()


def _describe(report: DataReport) -> str:
    parts = [f"{report.rows:,} rows"]
    if report.episodes is not None:
        parts.append(f"{report.episodes.count:,} episodes")
    if report.problems:
        parts.append(f"{len(report.problems)} faults")
    return ", ".join(parts)


def _style(axes: Axes, title: str) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRAY)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_GRAY, labelsize=9, length=0, pad=5)
    axes.set_title(title, loc="left", size=12, color=_INK, pad=10, parse_math=False)


def _write_note(axes: Axes, note: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, note, transform=axes.transAxes, ha="center", color=_GRAY, size=11)


def _draw_episodes(axes: Axes, report: DataReport, column: int, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    episodes = report.episodes
    name = title[0].upper() + title[1:]
    if episodes is None or not episodes.count:
        _style(axes, name)
        _write_note(axes, "the data do not say where episodes end")
        return
    if column == 0 and not episodes.has_returns:
        _style(axes, name)
        _write_note(axes, "the data have no rewards")
        return
    values = episodes.sample.get()[:, column]
    mean = float((episodes.returns, episodes.lengths)[column].mean[0])
    _style(axes, f"{name}, mean {mean:,.4g}")
    bins = _make_bins(values).tolist()
    axes.hist(values, bins=bins, color=_BLUE, edgecolor="white", linewidth=0.6)
    axes.axvline(mean, color=_ORANGE, linewidth=1.6, linestyle=(0, (5, 3)))
    axes.set_ylabel("episodes", color=_GRAY, size=10)
    if values.min() == values.max():
        axes.set_xlim(values[0] - 5, values[0] + 5)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.grid(axis="y", color=_GRID)


def _make_bins(values: np.ndarray) -> np.ndarray:
    """Returns the edges of bins; whole numbers are in the middle of a bin."""
    low, high = float(values.min()), float(values.max())
    if (values == np.round(values)).all():
        width = max(1, int(np.ceil((high - low + 1) / _MAX_BARS)))
        return np.arange(low, high + width + 1, width) - 0.5
    return np.linspace(low, high, 31) if low < high else np.array([low - 0.5, high + 0.5])


def _draw_actions(axes: Axes, report: DataReport) -> None:
    if not report.actions:
        _style(axes, "Actions")
        _write_note(axes, "the data have no readable actions")
        return
    label, coverage = next(iter(report.actions.items()))
    if coverage.components is None:
        _draw_shares(axes, label, coverage)
        return
    space = coverage.space
    bounds = None
    if space is not None and is_float_box(space):
        bounds = space.low.reshape(-1), space.high.reshape(-1)
    _style(axes, f"Range of {label}" + (" within the space" if bounds else ""))
    names = report.get_component_names(label, coverage.components)
    _draw_ranges(axes, [(names, coverage.components)], bounds)


def _draw_shares(axes: Axes, label: str, coverage: ActionCoverage) -> None:
    shares = coverage.get_shares()
    suffix = f", first {_MAX_BARS} choices" if len(shares) > _MAX_BARS else ""
    _style(axes, f"Share of each choice of {label}{suffix}")
    choices = [*shares][:_MAX_BARS]
    values = [shares[choice] for choice in choices]
    positions = np.arange(len(choices))
    axes.bar(positions, values, color=_BLUE, width=0.75)
    step = max(1, len(choices) // 16)
    axes.set_xticks(positions[::step], [str(choice) for choice in choices[::step]])
    if len(choices) <= 12:
        for position, value in zip(positions, values, strict=True):
            axes.annotate(
                f"{value:.1%}",
                (position, value),
                (0, 3),
                textcoords="offset points",
                ha="center",
                color=_GRAY,
                size=9,
            )
    axes.set_ylim(0, max([*values, 1e-9]) * 1.12)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(axis="y", color=_GRID)


def _draw_observations(axes: Axes, report: DataReport) -> None:
    leaves = [
        (report.get_component_names(label, stats), stats)
        for label, stats in report.observations.items()
    ]
    total = sum(len(names) for names, _ in leaves)
    first = f", first {_MAX_COMPONENTS} of {total:,}" if total > _MAX_COMPONENTS else ""
    _style(axes, f"Ranges of observations{first}")
    if not report.observations:
        _write_note(axes, "the data have no readable observations")
        return
    _draw_ranges(axes, leaves, None)


def _draw_ranges(axes: Axes, leaves: list[tuple[list[str], Any]], bounds: Any) -> None:
    """Draws each component on its own scale, from its smallest to its largest value.

    Args:
        axes: where to draw.
        leaves: names and `ComponentStats` of the components of each leaf.
        bounds: lowest and highest value of each component in the space, for the scale; or None.
    """
    labels: list[str] = []
    rows = []
    for names, stats in leaves:
        if stats.low is None:
            continue
        quantiles = np.quantile(stats.sample.get(), (0.05, 0.5, 0.95), axis=0)
        count = min(len(names), quantiles.shape[1], _MAX_COMPONENTS - len(labels))
        labels += names[:count]
        rows += [(stats.low[i], *quantiles[:, i], stats.high[i]) for i in range(count)]
    if not rows:
        _write_note(axes, "there are no finite numbers")
        return
    array = np.array(rows)
    low, high = array[:, 0].copy(), array[:, -1].copy()
    if bounds is not None:
        stated = [np.asarray(x)[: len(rows)] for x in bounds]
        low = np.where(np.isfinite(stated[0]), stated[0], low)
        high = np.where(np.isfinite(stated[1]), stated[1], high)
    scale = np.where(high > low, high - low, 1)
    first, q5, median, q95, last = ((array - low[:, None]) / scale[:, None]).T
    positions = np.arange(len(rows))
    axes.barh(positions, 1.0, height=0.5, color=_GRID)
    axes.barh(positions, last - first, left=first, height=0.5, color=_LIGHT, label="all")
    axes.barh(positions, q95 - q5, left=q5, height=0.5, color=_BLUE, label="5% to 95%")
    axes.plot(median, positions, "|", color="white", markersize=9, markeredgewidth=2)
    for position, numbers in enumerate(zip(low, high, strict=True)):
        for x, number, side in zip((-0.02, 1.02), numbers, ("right", "left"), strict=True):
            axes.text(x, position, f"{number:,.3g}", ha=side, va="center", color=_GRAY, size=9)
    axes.set_yticks(positions, labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-0.2, 1.2)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, -0.09),
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor=_GRAY,
    )
