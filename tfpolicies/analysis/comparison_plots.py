"""Draws comparisons: learning curves, final returns and learning statistics of groups."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfpolicies.analysis.comparison_results import AXES, ComparisonResult, EnvComparison
from tfpolicies.analysis.run_record import RunRecord
from tfpolicies.analysis.run_summary import get_statistic
from tfpolicies.analysis.seed_statistics import EstimatedCurve, interpolate
from tfpolicies.reporting.learning_curve import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Style = dict[str, Any]  # keyword arguments of matplotlib

# Colours on white, each with its counterpart on a dark page; neighbours differ in lightness.
_GROUP_COLORS = {
    "#0b62c4": "#62a8ff",
    "#d55e00": "#ff9349",
    "#178a3c": "#57cf7d",
    "#8e2fb5": "#cf8df0",
    "#b8860b": "#e6bd4a",
    "#008c99": "#45cfdb",
    "#c2185b": "#ff7bab",
    "#5d4037": "#c4a092",
    "#5c6f00": "#b9cf45",
    "#37474f": "#a9bcc6",
    "#e0483c": "#ff8a80",
    "#3949ab": "#9fa8ff",
}
_INK, _GRAY, _GRID, _PAPER = "#202124", "#5f6368", "#e3e6ea", "#ffffff"
_DARK = {_INK: "#e8eaed", _GRAY: "#a6acb3", _GRID: "#353a40", _PAPER: "#16181b"} | _GROUP_COLORS
_COLORS = list(_GROUP_COLORS)
_DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))  # after 6 groups, and so on
_GROUPS_PER_DASH = 6
_BAND_ALPHA = 0.16
_TICK_STEPS = [1, 2, 2.5, 5, 10]
MAX_BANDS = 8  # groups with bands in one picture; more would hide each other
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_MAX_LINES = 3  # of a label


class Picture(NamedTuple):
    """A figure as a wide PNG and as SVG, both wide and narrow, on white and on dark pages."""

    png: bytes
    wide: str
    narrow: str


class _Frame(NamedTuple):
    """The size of a picture."""

    width: float  # inches
    font_size: float
    is_narrow: bool


_WIDE, _NARROW = _Frame(9.2, 10.5, False), _Frame(4.2, 10, True)


def get_color(index: int) -> tuple[str, str]:
    """Returns the colour of a group on white and on dark pages."""
    color = _COLORS[index % len(_COLORS)]
    return color, _GROUP_COLORS[color]


def make_dark(svg: str) -> str:
    """Returns a picture in the colours of dark pages."""
    for light, dark in _DARK.items():
        svg = svg.replace(light, dark)
    return svg


def draw_curves(comparison: ComparisonResult, section: EnvComparison) -> Picture:
    """Draws the returns over the steps: a panel of evaluations, if there are any, and of training.

    Where a group has fewer runs than at its start, its line is thin.
    """
    panels: list[tuple[str, list[EstimatedCurve | None]]] = []
    evaluations = [result.evaluation for result in section.groups]
    if any(evaluations):
        panels.append((f"Evaluations on {section.env}", evaluations))
    panels.append(
        (f"Training episodes on {section.env}", [result.training for result in section.groups])
    )

    def draw(frame: _Frame) -> Figure:
        labels = [result.label for result in section.groups]
        figure = _make_figure(frame, 3.5 if len(panels) == 1 else 5.6, labels)
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for each, (title, curves) in zip(axes, panels, strict=True):
            _style_axes(each, frame)
            style: _Style = {"size": frame.font_size + 1.5, "color": _INK, "parse_math": False}
            each.set_title(_wrap(title, 36 if frame.is_narrow else 90), loc="left", pad=8, **style)
            each.set_ylabel("mean return", color=_GRAY, size=frame.font_size)
            for index, curve in enumerate(curves):
                if curve is not None:
                    _draw_curve(each, curve, index, has_band=len(curves) <= MAX_BANDS)
                if curves is evaluations:
                    _draw_single_evaluations(
                        each, section.groups[index].group.runs, AXES[comparison.by], index
                    )
            _note_if_empty(each, curves, frame)
        _label_x_axis(axes[-1], comparison.by, frame)
        return figure

    return _render(draw)


def draw_final_returns(section: EnvComparison) -> Picture:
    """Draws the final return of each group with its interval, and that of each run as a dot."""

    def draw(frame: _Frame) -> Figure:
        count = len(section.groups)
        labels = [_wrap(x.label, 26 if frame.is_narrow else 48) for x in section.groups]
        lines = max(label.count("\n") + 1 for label in labels)
        figure = _make_figure(frame, 1.3 + max(0.42, 0.1 + 0.18 * lines) * count, [])
        axes = figure.subplots()
        _style_axes(axes, frame)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=_GRID, linewidth=1)
        for index, result in enumerate(section.groups):
            color = get_color(index)[0]
            scores = result.scores[np.isfinite(result.scores)]
            heights = index + 0.24 + np.linspace(-0.06, 0.06, len(scores))  # equal scores are seen
            axes.plot(scores, heights, "o", color=color, markersize=4, alpha=0.6)
            low, high = result.final.low, result.final.high
            if math.isfinite(low):
                axes.hlines(index, low, high, color=color, linewidth=3)
            axes.plot([result.final.estimate], [index], "D", color=color, markersize=8)
        axes.set_yticks(range(count), labels)
        for text in axes.get_yticklabels():
            text.set_parse_math(False)
        axes.tick_params(axis="y", labelcolor=_INK)
        axes.set_ylim(count - 0.4, -0.5)
        axes.margins(x=0.06)
        label = _wrap(f"final return on {section.env}", 36 if frame.is_narrow else 90)
        axes.set_xlabel(label, color=_GRAY, size=frame.font_size, parse_math=False)
        return figure

    return _render(draw)


def draw_statistics(
    comparison: ComparisonResult, section: EnvComparison, names: Sequence[str]
) -> Picture:
    """Draws learning statistics in a panel each: their median over the runs of each group."""
    column = AXES[comparison.by]
    curves = {
        (name, index): _get_median(result.group.runs, name, column, section.grid)
        for name in names
        for index, result in enumerate(section.groups)
    }

    def draw(frame: _Frame) -> Figure:
        num_columns = 1 if frame.is_narrow else 2
        num_rows = math.ceil(len(names) / num_columns)
        labels = [result.label for result in section.groups]
        figure = _make_figure(frame, 2.3 * num_rows, labels)
        axes = figure.subplots(num_rows, num_columns, sharex=True, squeeze=False).ravel()
        for each, name in zip(axes, names, strict=False):
            _style_axes(each, frame, num_ticks=4)
            each.set_title(name, loc="left", size=frame.font_size + 1, color=_INK, pad=6)
            for index in range(len(section.groups)):
                each.plot(section.grid, curves[name, index], **_get_line_style(index, 1.5))
        for each in axes[len(names) :]:
            each.set_visible(False)
        for each in axes[max(0, len(names) - num_columns) : len(names)]:
            each.tick_params(labelbottom=True)
            _label_x_axis(each, comparison.by, frame)
        return figure

    return _render(draw)


def _get_median(runs: Sequence[Any], name: str, column: str, grid: np.ndarray) -> np.ndarray:
    values = np.array(
        [interpolate(run.get_column(column), get_statistic(run, name), grid) for run in runs]
    )
    median = np.full(len(grid), np.nan)
    exists = np.isfinite(values).any(axis=0)
    if exists.any():
        median[exists] = np.nanmedian(values[:, exists], axis=0)
    return median


# -- the parts of a picture -------------------------------------------------------------------


def _make_figure(frame: _Frame, height: float, labels: Sequence[str]) -> Figure:
    """Returns a figure with a legend above its axes; without labels there is none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    width = 42 if frame.is_narrow else 80
    texts = [_wrap(label, width) for label in labels] if len(labels) > 1 else []
    num_columns = _choose_legend_columns(texts, frame)
    num_rows = math.ceil(len(texts) / num_columns)  # of entries, which fill column after column
    columns = [texts[i : i + num_rows] for i in range(0, len(texts), num_rows or 1)]
    num_lines = max((len("\n".join(column).split("\n")) for column in columns), default=0)
    legend_height = 0.2 * num_lines + bool(texts) * 0.15
    total = height + legend_height
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.01, 0.985, (height - 0.06) / total))
    figure = Figure(figsize=(frame.width, total), dpi=150, facecolor=_PAPER, layout=layout)
    FigureCanvasAgg(figure)
    if texts:
        handles = [Line2D([], [], **_get_line_style(index, 2.4)) for index in range(len(texts))]
        legend = figure.legend(
            handles,
            texts,
            loc="upper left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=num_columns,
            frameon=False,
            fontsize=frame.font_size,
            labelcolor=_INK,
            handlelength=2.2,
            columnspacing=1.6,
            labelspacing=0.35,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure


def _choose_legend_columns(texts: Sequence[str], frame: _Frame) -> int:
    widest = max((len(line) for text in texts for line in text.split("\n")), default=1)
    width = (widest + 5) * frame.font_size * 0.58 / 72  # inches
    return max(1, min(len(texts), int(frame.width / width)))


def _wrap(text: str, width: int) -> str:
    lines = textwrap.wrap(text, width, max_lines=_MAX_LINES, placeholder=_ELLIPSIS)
    return "\n".join(lines)


def _style_axes(axes: Axes, frame: _Frame, num_ticks: int = 8) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_facecolor(_PAPER)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRAY)
    axes.grid(axis="y", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_GRAY, labelsize=frame.font_size - 0.5, length=0, pad=5)
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=4 if frame.is_narrow else num_ticks, steps=_TICK_STEPS)
    )
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=_TICK_STEPS))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))


def _label_x_axis(axes: Axes, by: str, frame: _Frame) -> None:
    text = "environment steps" if by == "steps" else "seconds of training"
    axes.set_xlabel(text, color=_GRAY, size=frame.font_size)


def _get_line_style(index: int, width: float) -> _Style:
    dashes = _DASHES[index // _GROUPS_PER_DASH % len(_DASHES)]
    return {"color": get_color(index)[0], "linestyle": dashes, "linewidth": width}


def _draw_curve(axes: Axes, curve: EstimatedCurve, index: int, *, has_band: bool) -> None:
    style = _get_line_style(index, 2.2)
    is_full = curve.num_runs == max(curve.num_runs, default=0)
    # A run may begin later than others, with its first episode: only the end is thin.
    last_full = np.flatnonzero(is_full)[-1] + 1 if is_full.any() else 0
    if has_band:
        axes.fill_between(
            curve.grid, curve.low, curve.high, color=style["color"], alpha=_BAND_ALPHA, linewidth=0
        )
    axes.plot(curve.grid[:last_full], curve.estimate[:last_full], zorder=3, **style)
    if last_full and np.isfinite(curve.estimate[last_full:]).any():
        style |= {"linewidth": 1.0, "zorder": 3}
        axes.plot(curve.grid[last_full - 1 :], curve.estimate[last_full - 1 :], **style)
        end = (curve.grid[last_full - 1], curve.estimate[last_full - 1])
        axes.plot(*end, "o", color=style["color"], markersize=5, zorder=4)


def _draw_single_evaluations(
    axes: Axes, runs: Sequence[RunRecord], column: str, index: int
) -> None:
    """Draws a dot for each run that was evaluated only once, which has no line."""
    for run in runs:
        returns = run.get_evaluation_returns()
        is_evaluated = np.isfinite(returns)
        if is_evaluated.sum() == 1:
            point = run.get_column(column)[is_evaluated], returns[is_evaluated]
            axes.plot(*point, "o", color=get_color(index)[0], markersize=5, zorder=4)


def _note_if_empty(axes: Axes, curves: Sequence[EstimatedCurve | None], frame: _Frame) -> None:
    if not any(curve is not None and np.isfinite(curve.estimate).any() for curve in curves):
        style: _Style = {"ha": "center", "color": _GRAY, "size": frame.font_size}
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no episode has ended", transform=axes.transAxes, **style)


def _render(draw: Callable[[_Frame], Figure]) -> Picture:
    with warnings.catch_warnings():
        # Names of environments may have characters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        wide, narrow = draw(_WIDE), draw(_NARROW)
        png = io.BytesIO()
        wide.savefig(png, format="png", metadata={"Software": None})
        return Picture(png.getvalue(), _to_svg(wide), _to_svg(narrow))


def _to_svg(figure: Figure) -> str:
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return svg.getvalue()
