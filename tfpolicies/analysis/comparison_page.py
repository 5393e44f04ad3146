"""Makes the HTML page of a comparison; it loads nothing, and runs no script."""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import numpy as np

from tfpolicies._version import __version__
from tfpolicies.analysis.comparison_plots import MAX_BANDS, Picture, get_color, make_dark
from tfpolicies.analysis.comparison_results import (
    ComparisonResult,
    EnvComparison,
    Findings,
    GroupResult,
)
from tfpolicies.analysis.comparison_videos import Video
from tfpolicies.analysis.html_elements import Html, element, join, make_data_url, make_table
from tfpolicies.analysis.number_texts import (
    MISSING,
    format_durations,
    format_interval,
    format_probability,
    format_range,
    format_value,
)
from tfpolicies.analysis.run_groups import (
    find_differences,
    get_algorithm_text,
    get_run_text,
    show_text,
)
from tfpolicies.analysis.run_record import RunRecord
from tfpolicies.analysis.run_summary import (
    STATISTICS,
    collect_places,
    describe_end,
    get_error_lines,
    get_last,
    get_speed,
)
from tfpolicies.analysis.seed_statistics import NUM_RESAMPLES
from tfpolicies.reporting.progress_display import format_count

_POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
_NARROW, _DARK = "(max-width: 600px)", "(prefers-color-scheme: dark)"
_FEW_SEEDS = 3  # up to here a page says how little an interval tells

ESTIMATOR_TEXTS = {"iqm": "interquartile mean", "median": "median", "mean": "mean"}


class SectionPictures(NamedTuple):
    """The pictures of one environment; the statistics are None if none are recorded."""

    curves: Picture
    final: Picture
    statistics: Picture | None
    statistic_names: Sequence[str]


def make_page(
    comparison: ComparisonResult,
    pictures: Sequence[SectionPictures],
    videos: Mapping[str, Video],
    find: Findings,
) -> str:
    """Returns the page as text.

    Args:
        comparison: of the runs.
        pictures: of each of its environments.
        videos: by the label of a group and its environment.
        find: returns findings about a run, as titles and details.
    """
    title = make_title(comparison)
    css = importlib.resources.files(__package__).joinpath("comparison.css").read_text("utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(css)),
    )
    sections = zip(comparison.sections, pictures, strict=True)
    main = element(
        "main",
        element("h1", title),
        _make_introduction(comparison),
        _list_damaged(comparison.damaged),
        _make_navigation(comparison) if len(comparison.sections) > 1 else None,
        *(
            _make_section(comparison, section, pictures_of_section, index, videos, find)
            for index, (section, pictures_of_section) in enumerate(sections)
        ),
        _describe_methods(comparison),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', main), lang='en')}\n"


def make_title(comparison: ComparisonResult) -> str:
    """Returns the title: of the only run, or the number of runs and environments."""
    envs = [section.env for section in comparison.sections]
    where = envs[0] if len(envs) == 1 else format_count(len(envs), "environment")
    if len(comparison.runs) == 1:
        [run] = comparison.runs
        return f"{get_algorithm_text(run.algorithm)} on {where}: {get_run_text(run)}"
    return f"{len(comparison.runs)} runs on {where}"


def list_findings(findings: Iterable[tuple[str, str]]) -> Html:
    """Returns findings about a run as a list, each a title and a detail."""
    items = [element("dt", title) + element("dd", detail) for title, detail in findings]
    return element("dl", Html("".join(items)))


# -- the page ---------------------------------------------------------------------------------


def _make_introduction(comparison: ComparisonResult) -> Html:
    runs, groups = comparison.runs, comparison.groups
    today = datetime.now().strftime("%Y-%m-%d %H:%M")
    parts = [f"Made on {today} by tfpolicies {__version__}."]
    if len(runs) > 1:
        count = format_count(len(groups), "group")
        parts.append(
            f"{len(runs)} runs in {count}: runs of a group differ only in their seed. Curves and "
            f"final returns are the {ESTIMATOR_TEXTS[comparison.estimator]} over the runs of a "
            "group, with 95 % bootstrap intervals."
        )
    return element("p", " ".join(parts), class_="soft")


def _list_damaged(damaged: Mapping[str, str]) -> Html | None:
    if not damaged:
        return None
    items = [
        element("li", element("strong", path), f": {reason}") for path, reason in damaged.items()
    ]
    text = f"{format_count(len(damaged), 'run')} cannot be read and was left out"
    if len(damaged) > 1:
        text = f"{format_count(len(damaged), 'run')} cannot be read and were left out"
    return element("section", element("h2", text, class_="alert"), element("ul", *items))


def _make_navigation(comparison: ComparisonResult) -> Html:
    links = [
        element("li", element("a", section.env, href=f"#env-{index}"))
        for index, section in enumerate(comparison.sections)
    ]
    return element("nav", element("ul", *links), aria_label="Environments")


def _make_section(
    comparison: ComparisonResult,
    section: EnvComparison,
    pictures: SectionPictures,
    index: int,
    videos: Mapping[str, Video],
    find: Findings,
) -> Html:
    several = len(section.groups) > 1
    parts = [
        element("h2", section.env, id=f"env-{index}"),
        element("h3", "Learning curves"),
        _make_figure(pictures.curves, _describe_curves(section), _note_seeds(section)),
        element("h3", "Final returns"),
        _make_figure(pictures.final, _describe_final(section), _explain_scores(section))
        if sum(len(result.group.runs) for result in section.groups) > 1
        else element("p", _explain_scores(section), class_="soft"),
        _make_final_table(comparison, section),
        _make_probabilities(section) if several else None,
        _make_settings(section),
        _make_statistics(pictures),
        element("h3", "Runs"),
        _make_runs_table(section),
        *_make_run_details(section, find),
        *_make_videos(section, videos),
        _make_places(section),
    ]
    return element("section", *parts, aria_labelledby=f"env-{index}")


def _make_figure(picture: Picture, alt: str, caption: object) -> Html:
    def source(svg: str, media: str) -> Html:
        return element("source", media=media, srcset=make_data_url(svg.encode(), "image/svg+xml"))

    wide = make_data_url(picture.wide.encode(), "image/svg+xml")
    image = element(
        "picture",
        source(make_dark(picture.narrow), f"{_NARROW} and {_DARK}"),
        source(picture.narrow, _NARROW),
        source(make_dark(picture.wide), _DARK),
        element("img", src=wide, alt=alt),
    )
    return element("figure", image, element("figcaption", caption))


def _describe_curves(section: EnvComparison) -> str:
    ends = [f"{x.label}: {format_value(_get_end(x))}" for x in section.groups]
    return f"Mean return during training on {section.env}. At the end: {'; '.join(ends)}."


def _get_end(result: GroupResult) -> float:
    values = result.training.estimate[np.isfinite(result.training.estimate)]
    return float(values[-1]) if len(values) else math.nan


def _describe_final(section: EnvComparison) -> str:
    texts = [
        f"{x.label}: {format_value(x.final.estimate)} ({format_interval(x.final)})"
        for x in section.groups
    ]
    return f"Final returns on {section.env}, with intervals. {'; '.join(texts)}."


def _note_seeds(section: EnvComparison) -> str:
    """Describes how the curves are to be read, and how much their intervals tell."""
    notes = []
    counts = [len(result.group.runs) for result in section.groups]
    if any(count > 1 for count in counts):
        has_bands = len(counts) <= MAX_BANDS
        notes.append(
            "Bands are 95 % intervals over runs."
            if has_bands
            else f"More than {MAX_BANDS} groups have no bands, which would hide each other."
        )
    if any(_has_shorter_runs(result) for result in section.groups):
        notes.append("After a dot, where a line is thin, some runs of its group have ended.")
    if min(counts) == 1:
        subject = "A group with one run" if len(counts) > 1 else "One run"
        notes.append(f"{subject} has no interval: another seed may give a very different result.")
    few = sorted({count for count in counts if 2 <= count <= _FEW_SEEDS})
    if few:
        count = " or ".join(map(str, few))
        samples = " or ".join(str(math.comb(2 * n - 1, n)) for n in few)
        notes.append(
            f"{count} runs tell little: they give only {samples} different bootstrap samples, so "
            "the interval is too narrow. Train at least 5 seeds."
        )
    if repeated := sorted({seed for x in section.groups for seed in x.group.duplicate_seeds}):
        notes.append(
            f"Some groups have several runs of a seed ({', '.join(map(str, repeated))}). These are "
            "not independent, so the interval is too narrow: leave all but one out."
        )
    return " ".join(notes)


def _has_shorter_runs(result: GroupResult) -> bool:
    num_runs = result.training.num_runs
    is_full = num_runs == num_runs.max(initial=0)
    return bool(is_full.any() and num_runs[np.flatnonzero(is_full)[-1] + 1 :].any())


def _explain_scores(section: EnvComparison) -> str:
    text = (
        f"The final return of a run is the mean of its {section.scored_by} returns over the last "
        "tenth of its steps, also if it ended early."
    )
    evaluate = [x.label for x in section.groups if x.evaluation is not None]
    if section.scored_by == "training" and evaluate:
        text += f" Not all groups have evaluations; these have: {'; '.join(evaluate)}."
    elif section.scored_by == "training":
        text += " There are no evaluations."
    return f"{text} {section.describe_early_scores()}".strip()


def _make_final_table(comparison: ComparisonResult, section: EnvComparison) -> Html:
    name = ESTIMATOR_TEXTS[comparison.estimator].capitalize()
    rows = []
    for index, result in enumerate(section.groups):
        runs = result.group.runs
        steps = [get_last(run, "env_steps") for run in runs]
        seconds = [get_last(run, "time_s") for run in runs]
        speeds = [get_speed(run) for run in runs]
        rows.append(
            [
                _mark_group(index, result.label),
                f"{result.num_scores} of {len(runs)}"
                if result.num_scores < len(runs)
                else len(runs),
                format_value(result.final.estimate),
                format_interval(result.final),
                format_range(steps),
                format_range(speeds),
                format_durations(seconds),
            ]
        )
    header = ["Group", "Runs", name, "95 % interval", "Steps", "Steps/s", "Time"]
    return make_table("Final returns, length and speed of each group", header, rows)


def _mark_group(index: int, label: str) -> Html:
    light, dark = get_color(index)
    swatch = element(
        "span", class_="swatch", style=f"--light:{light};--dark:{dark}", aria_hidden="true"
    )
    return join([swatch, label])


def _make_probabilities(section: EnvComparison) -> Html:
    groups = section.groups
    rows = []
    for i, result in enumerate(groups):
        cells = [
            MISSING if i == j else format_probability(section.probabilities[i, j])
            for j in range(len(groups))
        ]
        rows.append([_mark_group(i, result.label), *cells])
    header = ["Row is better than column", *(x.label for x in groups)]
    return join(
        [
            element("h3", "Probability of improvement"),
            element(
                "p",
                "The probability that a run of the row's group has a higher final return than one "
                "of the column's group (Mann\N{EN DASH}Whitney U divided by the number of pairs), "
                "with the 95 % interval of a bootstrap stratified by group. Near 0.5, the groups "
                "do not differ.",
                class_="soft",
            ),
            make_table("Probability of improvement by group", header, rows),
        ]
    )


def _make_settings(section: EnvComparison) -> Html:
    settings = [result.group.settings for result in section.groups]
    algorithms = [result.group.algorithm for result in section.groups]
    names = find_differences(settings)
    rows: list[list[object]] = []
    if len(set(algorithms)) > 1:
        rows.append(["algorithm", *map(get_algorithm_text, algorithms)])
    groups = [result.group for result in section.groups]
    rows += [[name, *(group.get_setting(name) for group in groups)] for name in names]
    common = {name: x for name, x in sorted(settings[0].items()) if name not in names}
    parts: list[Html] = [element("h3", "Settings")]
    if rows:
        header = ["Setting", *(result.label for result in section.groups)]
        parts.append(make_table("Settings that differ between groups", header, rows, numbers=False))
    if common:
        text = "Settings that all groups share" if len(settings) > 1 else "Settings of all runs"
        table = make_table(
            "Settings that differ from the algorithm's defaults",
            ["Setting", "Value"],
            common.items(),
            numbers=False,
        )
        parts.append(element("details", element("summary", f"{text} ({len(common)})"), table))
    if not (rows or common):
        parts.append(element("p", "All settings have their defaults.", class_="soft"))
    return join(parts)


def _make_statistics(pictures: SectionPictures) -> Html | None:
    if pictures.statistics is None:
        return None
    names = pictures.statistic_names
    meanings = [element("dt", name) + element("dd", STATISTICS.get(name, "")) for name in names]
    return join(
        [
            element("h3", "Learning statistics"),
            _make_figure(
                pictures.statistics,
                f"Learning statistics during training: {', '.join(names)}.",
                "Median over the runs of a group; with several policies, their mean.",
            ),
            element(
                "details",
                element("summary", "Meaning of the statistics"),
                element("dl", Html("".join(meanings))),
            ),
        ]
    )


def _make_runs_table(section: EnvComparison) -> Html:
    rows = []
    for index, result in enumerate(section.groups):
        for run, score in zip(result.group.runs, result.scores, strict=True):
            rows.append(
                [
                    _mark_group(index, get_run_text(run)),
                    MISSING if run.seed is None else run.seed,
                    format_value(float(score)),
                    format_range([get_last(run, "env_steps")]),
                    format_range([get_speed(run)]),
                    format_durations([get_last(run, "time_s")]),
                    describe_end(run),
                ]
            )
    header = ["Run", "Seed", "Final return", "Steps", "Steps/s", "Time", "End"]
    return make_table("The runs, in the colours of their groups", header, rows)


def _make_run_details(section: EnvComparison, find: Findings) -> Iterator[Html]:
    """Yields the errors of runs and their findings."""
    runs = [run for result in section.groups for run in result.group.runs]
    num_sound = 0
    for run in runs:
        error, findings = get_error_lines(run), [*find(run)]
        num_sound += not findings
        if error or findings:
            yield element("h4", get_run_text(run))
        if error:
            yield element("p", "The last lines of the error that ended it:", class_="alert")
            yield element("pre", error)
        if findings:
            yield element("p", "Diagnosis:", class_="soft")
            yield list_findings(findings)
    if num_sound:
        which = "any run" if num_sound == len(runs) > 1 else format_count(num_sound, "run")
        text = f"The diagnosis has no findings for {which}."
        yield element("p", text if len(runs) > 1 else "The diagnosis has no findings.")


def _make_videos(section: EnvComparison, videos: Mapping[str, Video]) -> Iterator[Html]:
    shown = [
        (result.label, videos[result.group.key])
        for result in section.groups
        if result.group.key in videos
    ]
    if not shown:
        return
    yield element("h3", "Newest videos")
    yield element("div", *(_make_video(label, video) for label, video in shown), class_="videos")


def _make_video(label: str, video: Video) -> Html:
    caption = f"{label}: {show_text(video.name, 100)} of {video.run}"
    if video.content is None:
        return element("p", f"{caption} is too large for this page; see {video.path}.")
    url = make_data_url(video.content, video.media_type)
    shown = (
        element("img", src=url, alt=f"An episode, {caption}")
        if video.media_type == "image/gif"
        else element(
            "video", controls=True, muted=True, playsinline=True, src=url, aria_label=caption
        )
    )
    return element("figure", shown, element("figcaption", caption))


def _make_places(section: EnvComparison) -> Html:
    runs: list[RunRecord] = [run for result in section.groups for run in result.group.runs]
    places = [collect_places(result.group.runs) for result in section.groups]
    all_places = collect_places(runs)
    differing = [name for name, values in all_places.items() if len(values) > 1]
    parts: list[Html] = [element("h3", "Versions and machines")]
    if not all_places:
        return join([*parts, element("p", "None are recorded.", class_="soft")])
    if differing:
        rows = [
            [name, *(" or ".join(sorted(each.get(name, {MISSING}))) for each in places)]
            for name in sorted(differing)
        ]
        header = ["Differs", *(result.label for result in section.groups)]
        parts.append(
            element(
                "p",
                "These differ between runs, so speeds, and results to the last digit, may differ "
                "for that reason alone.",
                class_="alert",
            )
        )
        parts.append(make_table("Versions and machines that differ", header, rows, numbers=False))
    same = {name: next(iter(x)) for name, x in sorted(all_places.items()) if len(x) == 1}
    if same:
        table = make_table("The same for all runs", ["", "All runs"], same.items(), numbers=False)
        text = "Versions and machine of all runs" if not differing else "The same for all runs"
        parts.append(element("details", element("summary", text), table))
    return join(parts)


def _describe_methods(comparison: ComparisonResult) -> Html:
    iqm = (
        "The interquartile mean leaves out the lowest and the highest quarter of the runs, rounded "
        "down: with 2 or 3 runs it is the mean. "
        if comparison.estimator == "iqm"
        else ""
    )
    return element(
        "section",
        element("h2", "How this was computed"),
        element(
            "p",
            f"{iqm}Intervals are the 2.5 % and 97.5 % percentiles of {NUM_RESAMPLES:,} bootstrap "
            "samples of whole runs (Agarwal et al. 2021, Deep Reinforcement Learning at the Edge "
            "of the Statistical Precipice). Curves are interpolated linearly between the "
            "iterations of each run, and no run is continued after its end.",
        ),
        class_="soft",
    )
