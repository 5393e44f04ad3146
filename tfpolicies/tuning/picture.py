"""Draws a search: the return of each trial, and the importance of each setting."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfpolicies.system.atomic import write_atomically
from tfpolicies.tuning.search_space import shorten_name
from tfpolicies.tuning.study import FAILED, PRUNED, TrialRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREEN, _RED = "#1c6dd0", "#e8710a", "#1e8e3e", "#c5221f"
_INK, _GRAY, _GRID, _PALE = "#202124", "#5f6368", "#e8eaed", "#9aa0a6"
_MIN_BARS, _MAX_BARS = 6, 12


def draw_search(
    rows: Sequence[TrialRow],
    importances: Mapping[str, float],
    path: Path,
    *,
    title: str,
    target: float | None = None,
) -> None:
    """Draws returns by trial, and importances if there are any; replaces the PNG atomically.

    Pruned and failed trials are marked below the others, since they have no result.

    Args:
        rows: the finished trials, at least one of them complete.
        importances: shares by name, highest first.
        path: the image file, 1800 x 825 pixels.
        title: algorithm and environment.
        target: the mean return at which the search ends, if any.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(rect=(0.02, 0.01, 0.96, 0.85), wspace=0.1)
    figure = Figure(figsize=(12, 5.5), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    ratios = {"width_ratios": [1.5, 1]} if importances else {}
    axes = figure.subplots(1, 2 if importances else 1, squeeze=False, gridspec_kw=ratios)[0]
    _draw_history(axes[0], rows, target)
    handles, labels = axes[0].get_legend_handles_labels()
    if importances:
        _draw_importances(axes[1], importances)
    style: dict[str, Any] = {"size": 16, "weight": "bold", "color": _INK, "va": "center"}
    figure.text(0.03, 0.955, f"Tuning of {title}", parse_math=False, **style)
    place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (0.022, 0.89), "ncols": 6}
    look: dict[str, Any] = {"frameon": False, "fontsize": 10.5, "labelcolor": _GRAY, "borderpad": 0}
    figure.legend(handles, labels, **place, **look)
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    write_atomically(path, png.getvalue())


def _draw_history(axes: Axes, rows: Sequence[TrialRow], target: float | None) -> None:
    from matplotlib.ticker import MaxNLocator

    _style_axes(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    complete = [(row.number, row.mean_return) for row in rows if row.mean_return is not None]
    numbers, returns = zip(*complete, strict=True)
    best = [max(returns[: i + 1]) for i in range(len(returns))]
    last = max(row.number for row in rows)
    axes.step(
        [*numbers, last], [*best, best[-1]], where="post", color=_ORANGE, linewidth=2, zorder=2
    )
    axes.lines[-1].set_label("best so far")
    style: dict[str, Any] = {"color": _BLUE, "zorder": 3, "clip_on": False}
    axes.plot(numbers, returns, "o", markersize=6, markeredgecolor="white", label="trial", **style)
    if rows[0].number == 0 and rows[0].mean_return is not None:
        hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 2, "markersize": 8}
        axes.plot([0], [returns[0]], "o", label="start", **{**style, "zorder": 4}, **hollow)
    low, high = min(returns), max(returns)
    if target is not None:
        axes.axhline(target, color=_GREEN, linewidth=1.4, linestyle=(0, (5, 3)), zorder=1)
        axes.lines[-1].set_label(f"target {target:,.6g}")
        low, high = min(low, target), max(high, target)
    margin = 0.08 * (high - low) or 1.0
    for state, color in ((PRUNED, _PALE), (FAILED, _RED)):
        places = [row.number for row in rows if row.state == state]
        if places:
            y = [low - margin] * len(places)
            axes.plot(places, y, "x", color=color, markersize=6, label=state, clip_on=False)
    axes.set_xlim(-0.5, last + 0.5)
    axes.set_ylim(low - 1.6 * margin, high + margin)
    axes.set_xlabel("trial", color=_GRAY, size=11, labelpad=8)
    axes.set_ylabel("mean return of greedy episodes", color=_GRAY, size=11, labelpad=8)


def _draw_importances(axes: Axes, importances: Mapping[str, float]) -> None:
    """Draws a bar for each setting, under its name."""
    shares = dict(list(importances.items())[:_MAX_BARS])
    axes.barh(range(len(shares)), list(shares.values()), color=_BLUE, height=0.36)
    axes.set_ylim(max(len(shares), _MIN_BARS) - 0.5, -1.0)
    axes.set_xlim(0, 1.15 * max(shares.values(), default=1.0) or 1.0)
    axes.set_axis_off()
    name_style: dict[str, Any] = {"va": "bottom", "color": _INK, "size": 9.5, "parse_math": False}
    for place, (name, share) in enumerate(shares.items()):
        axes.text(0, place - 0.24, shorten_name(name), **name_style)
        axes.text(share, place, f" {share:.0%}", va="center", color=_GRAY, size=9.5)
    title: dict[str, Any] = {"loc": "left", "color": _GRAY, "size": 11}
    axes.set_title("importance of settings (PED-ANOVA)", **title)


def _style_axes(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRAY)
    axes.grid(axis="y", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_GRAY, labelsize=10, length=0, pad=6)
