"""Draws the learning curve as a PNG image."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfpolicies.errors import UsageError
from tfpolicies.reporting.progress_row import (
    EVALUATION_MEAN,
    RECENT_PREFIX,
    find_loss,
    find_policies_with_returns,
    has_constant_sum,
    to_number,
)
from tfpolicies.system.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Style = dict[str, Any]  # keyword arguments of matplotlib

_BLUE, _ORANGE, _GREEN = "#1c6dd0", "#e8710a", "#1e8e3e"
_POLICY_COLORS = (  # of as many policies as are drawn
    *("#d93025", "#9334e6", "#12a4af", "#b5306f", "#7a5c3e", "#f2b600", "#5c6bc0", "#80868b"),
)
_MAX_NAME_LENGTH = 24  # characters of a policy's id in the legend
_INK, _GRAY, _GRID = "#202124", "#5f6368", "#e8eaed"
_BAND_ALPHA = 0.13
_FEW_POINTS = 25  # up to here each point of the curve gets a dot
_TICK_STEPS = [1, 2, 2.5, 5, 10]
_MARKER_STYLE: _Style = {"markeredgecolor": "white", "clip_on": False}  # for markers on top
_HEADROOM = 0.06  # share of the height above the highest and below the lowest number


def draw_learning_curve(
    progress_rows: Sequence[Mapping[str, float]],
    png_path: str | PathLike[str],
    *,
    title: str,
    target: float | None = None,
    from_data: bool = False,
) -> None:
    """Draws the mean return over the environment steps and replaces the PNG atomically.

    It shows the mean return of recent training episodes as a line, their lowest and highest return
    as a band, evaluations as points, `target` as a dashed line, and a mark where the mean first
    reached it. Rows of earlier versions have the last 100 episodes instead of the recent ones. Rows
    before the first episode (NaN) are left out. With several policies, up to 8,
    those that learn first, it also shows the mean return of each, over the longer window of
    `metrics_num_episodes_for_smoothing`; if the sum of all returns is constant, the sum and its
    target are left out. A curve without points shows the loss if the run learns from data, else a
    note. The global state of matplotlib is not changed.

    Args:
        progress_rows: rows of `read_progress`, in order of `env_steps`.
        png_path: the image file, 1500 x 825 pixels.
        title: algorithm and environment, such as `"PPO on CartPole-v1"`.
        target: the mean return at which training stops, if any.
        from_data: whether the run reads recorded experience, so that steps are rows.

    Raises:
        UsageError: if a row lacks `env_steps` or `target` is not a finite number.
    """
    _check_arguments(progress_rows, target)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(rect=(0.02, 0.01, 0.96, 0.85))
    figure = Figure(figsize=(10, 5.5), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _style_axes(axes)
    axes.set_xlim(0, max([row["env_steps"] for row in progress_rows], default=0) * 1.02 or 1)
    policies = _choose_policies(progress_rows)
    _draw_policies(axes, progress_rows, policies)
    total = _find_constant_sum(progress_rows) if policies else math.nan
    if math.isfinite(total):
        note = f"the returns of all agents always add up to {format_number(total)}"
        figure.text(0.03, 0.89, note, color=_GRAY, size=11, va="center")
        progress_rows, target = _without_sum(progress_rows), None
    agents = ", all agents" if policies else ""
    artists = _draw_returns(axes, progress_rows, f"mean of recent training episodes{agents}")
    artists += _draw_evaluations(axes, progress_rows)
    if from_data:
        axes.set_xlabel("training progress (rows)", color=_GRAY, size=11, labelpad=8)
    if not artists and from_data:
        artists = _draw_loss(axes, progress_rows)
    else:
        if not artists and not policies:
            _draw_note(axes, "no episode has ended yet")
        if target is not None:
            artists.append(_draw_target(axes, target))
        _set_y_limits(axes, progress_rows, policies, target)
        if target is not None:
            _mark_target_reached(axes, progress_rows, target)
    _draw_title_and_legend(figure, title, artists)
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    write_atomically(Path(png_path), png.getvalue())


def _check_arguments(rows: Sequence[Mapping[str, float]], target: float | None) -> None:
    for index, row in enumerate(rows):
        steps = to_number(row.get("env_steps"))
        if steps is None or not math.isfinite(steps):
            raise UsageError(
                f"`progress_rows[{index}]` must have the number 'env_steps', got {steps!r}. "
                "Pass the rows of `read_progress`."
            )
    number = to_number(target)
    if target is not None and (number is None or not math.isfinite(number)):
        raise UsageError(f"`target` must be a finite number or None, got {target!r}.")


def _style_axes(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRAY)
    axes.grid(axis="y", color=_GRID, linewidth=1, linestyle="-")
    axes.set_axisbelow(True)
    axes.tick_params(colors=_GRAY, labelsize=10, length=0, pad=6)
    axes.tick_params(axis="x", length=4)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=_TICK_STEPS, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=_TICK_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axes.set_xlabel("training progress (environment steps)", color=_GRAY, size=11, labelpad=8)
    axes.set_ylabel("return (reward per episode)", color=_GRAY, size=11, labelpad=8)


def _draw_returns(axes: Axes, rows: Sequence[Mapping[str, float]], label: str) -> list[Artist]:
    steps, means = _get_points(rows, "mean")
    if not steps:
        return []
    dots: _Style = {"marker": "o" if len(steps) <= _FEW_POINTS else "", "markersize": 5}
    ends: _Style = {"solid_capstyle": "round", "solid_joinstyle": "round"}
    (line,) = axes.plot(steps, means, color=_BLUE, linewidth=2.4, zorder=3, **dots, **ends)
    line.set_label(label)
    return [line, *_draw_band(axes, rows)]


def _choose_policies(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the policies to draw, those that learn first; none if there is only one."""
    names = rows[-1] if rows else {}  # all rows have the same columns
    policies = find_policies_with_returns(names)
    learners = {pid for pid in policies if any(x.startswith(f"learner/{pid}/") for x in names)}
    ordered = sorted(policies, key=lambda pid: pid not in learners)
    return ordered[: len(_POLICY_COLORS)] if len(policies) > 1 else []


def _name_policy_mean(policy_id: str) -> str:
    return f"policy/{policy_id}/return_mean"


def _draw_policies(
    axes: Axes, rows: Sequence[Mapping[str, float]], policies: Sequence[str]
) -> None:
    lines = []
    for policy_id, color in zip(policies, _POLICY_COLORS, strict=False):
        steps, means = _get_points(rows, _name_policy_mean(policy_id))
        dots: _Style = {"marker": "o" if len(steps) <= _FEW_POINTS else "", "markersize": 4}
        is_long = len(policy_id) > _MAX_NAME_LENGTH
        name = f"{policy_id[: _MAX_NAME_LENGTH - 1]}…" if is_long else policy_id
        lines += axes.plot(steps, means, color=color, linewidth=1.8, zorder=4, label=name, **dots)
    if lines:
        place: _Style = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        appearance: _Style = {"frameon": False, "fontsize": 11, "labelcolor": _GRAY}
        legend = axes.legend(
            handles=lines, title="mean by policy,\nsmoothed", **place, **appearance
        )
        legend.get_title().set_color(_GRAY)


def _find_constant_sum(rows: Sequence[Mapping[str, float]]) -> float:
    """Returns the return that all episodes have, though those of policies differ, else NaN."""
    columns = {name: [row.get(name, math.nan) for row in rows] for name in rows[-1]}
    return _get_points(rows, "mean")[1][-1] if has_constant_sum(columns) else math.nan


def _without_sum(rows: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Returns rows without the sum over agents, and without evaluations that have the same one."""
    is_sum = len({*_get_points(rows, EVALUATION_MEAN)[1]}) == 1
    prefixes = (RECENT_PREFIX, "episode_reward_", *([EVALUATION_MEAN] if is_sum else []))
    return [{name: x for name, x in row.items() if not name.startswith(prefixes)} for row in rows]


def _draw_note(axes: Axes, note: str) -> None:
    style: _Style = {"ha": "center", "color": _GRAY, "size": 13}
    axes.text(0.5, 0.45, note, transform=axes.transAxes, **style)


def _draw_loss(axes: Axes, rows: Sequence[Mapping[str, float]]) -> list[Artist]:
    points = [(row["env_steps"], find_loss(row)) for row in rows]
    points = [(steps, loss) for steps, loss in points if math.isfinite(loss)]
    axes.set_ylabel("loss", color=_GRAY, size=11, labelpad=8)
    if not points:
        _draw_note(axes, "no loss is recorded")
        return []
    dots: _Style = {"marker": "o" if len(points) <= _FEW_POINTS else "", "markersize": 5}
    steps, losses = zip(*points, strict=True)
    return list(axes.plot(steps, losses, color=_BLUE, linewidth=1.8, label="training loss", **dots))


def _draw_band(axes: Axes, rows: Sequence[Mapping[str, float]]) -> list[Artist]:
    (steps, low), (_, high) = _get_points(rows, "min"), _get_points(rows, "max")
    if not steps or len(low) != len(high):
        return []
    style: _Style = {"color": _BLUE, "alpha": _BAND_ALPHA, "zorder": 1}
    if len(steps) == 1:  # an area needs two points
        axes.vlines(steps, low, high, linewidth=12, **style)
    label = "lowest to highest of them"
    return [axes.fill_between(steps, low, high, linewidth=0, label=label, **style)]


def _draw_evaluations(axes: Axes, rows: Sequence[Mapping[str, float]]) -> list[Artist]:
    steps, means = _get_points(rows, EVALUATION_MEAN)
    if not steps:
        return []
    label: _Style = {"zorder": 4, "label": "evaluation"}
    return list(
        axes.plot(steps, means, "D", markersize=6.5, color=_ORANGE, **_MARKER_STYLE, **label)
    )


def _draw_target(axes: Axes, target: float) -> Artist:
    style: _Style = {"linewidth": 1.6, "linestyle": (0, (5, 3)), "zorder": 2}
    return axes.axhline(target, color=_GREEN, label=f"target {format_number(target)}", **style)


def _set_y_limits(
    axes: Axes,
    rows: Sequence[Mapping[str, float]],
    policies: Sequence[str],
    target: float | None,
) -> None:
    """Fits the y axis to all values, and to zero if that is near or all values are equal."""
    columns = ["mean", "min", "max", EVALUATION_MEAN, *map(_name_policy_mean, policies)]
    values = [value for name in columns for value in _get_points(rows, name)[1]]
    values += [] if target is None else [target]
    if not values:
        axes.set_yticks([])
        return
    low, high = min(values), max(values)
    if 0 <= low < high / 2 or low == high:
        low, high = min(low, 0), max(high, 0)
    margin = _HEADROOM * (high - low) or 1
    axes.set_ylim(low - (margin if low else 0), high + (margin if high else margin / 2))


def _mark_target_reached(axes: Axes, rows: Sequence[Mapping[str, float]], target: float) -> None:
    from matplotlib.patheffects import withStroke

    steps, means = _get_points(rows, "mean")
    index_reached = next((index for index, mean in enumerate(means) if mean >= target), None)
    if index_reached is None:
        return
    style: _Style = {"markersize": 10, "markeredgewidth": 1.8, "zorder": 5}
    axes.plot(
        steps[index_reached], means[index_reached], "o", color=_GREEN, **_MARKER_STYLE, **style
    )
    low, high = axes.get_ylim()
    axes.vlines(
        steps[index_reached],
        low,
        means[index_reached],
        color=_GREEN,
        linewidth=1.2,
        linestyle=":",
        zorder=2,
    )
    text = f"target reached\nat {format_number(steps[index_reached])} steps"
    seconds = {row["env_steps"]: row.get("time_s") for row in rows}[steps[index_reached]]
    if seconds is not None and math.isfinite(seconds):
        text += f"\nafter {format_duration(seconds)}"
    left_half = steps[index_reached] < axes.get_xlim()[1] / 2
    side, shift = ("left", 10) if left_half else ("right", -10)
    foot = steps[index_reached], low + 0.05 * (high - low)
    place: _Style = {"textcoords": "offset points", "ha": side, "va": "bottom"}
    halo = withStroke(linewidth=3.5, foreground="white", alpha=0.8)
    words: _Style = {"size": 11, "linespacing": 1.35, "zorder": 6, "path_effects": [halo]}
    axes.annotate(text, foot, (shift, 0), color=_GREEN, **place, **words)


def _draw_title_and_legend(figure: Figure, title: str, artists: list[Artist]) -> None:
    style: _Style = {"size": 16, "weight": "bold", "color": _INK, "va": "center"}
    figure.text(0.03, 0.955, title, parse_math=False, **style)
    if artists:
        place: _Style = {
            "loc": "center left",
            "bbox_to_anchor": (0.022, 0.89),
            "ncols": len(artists),
        }
        appearance: _Style = {"frameon": False, "fontsize": 11, "labelcolor": _GRAY}
        spacing: _Style = {"handlelength": 1.8, "columnspacing": 2, "borderpad": 0}
        figure.legend(handles=artists, **place, **appearance, **spacing)


def _get_points(
    rows: Sequence[Mapping[str, float]], column: str
) -> tuple[list[float], list[float]]:
    """Returns env steps and values of the rows with a finite number in `column`.

    "mean", "min" and "max" refer to the returns of training episodes.
    """
    values = [(row["env_steps"], _get_value(row, column)) for row in rows]
    points = [(steps, value) for steps, value in values if math.isfinite(value)]
    return [steps for steps, _ in points], [value for _, value in points]


def _get_value(row: Mapping[str, float], column: str) -> float:
    if column not in ("mean", "min", "max"):
        return row.get(column, math.nan)
    value = row.get(f"{RECENT_PREFIX}{column}", math.nan)
    return value if math.isfinite(value) else row.get(f"episode_reward_{column}", math.nan)


def format_number(value: float) -> str:
    """Formats a number with thousands separators.

    >>> format_number(20000.0), format_number(0.25), format_number(-1200)
    ('20,000', '0.25', '−1,200')
    """
    return f"{value:,.10g}".replace("-", "\N{MINUS SIGN}")


def format_duration(seconds: float) -> str:
    """Formats seconds with their two largest units.

    >>> format_duration(7.4), format_duration(75), format_duration(3725)
    ('7 s', '1 min 15 s', '1 h 2 min')
    """
    total_seconds = round(seconds)
    if total_seconds < 60:
        return f"{total_seconds} s"
    if total_seconds < 3600:
        return f"{total_seconds // 60} min {total_seconds % 60} s"
    return f"{total_seconds // 3600} h {total_seconds % 3600 // 60} min"
