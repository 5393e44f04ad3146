"""The numbers of a comparison of runs, which its pictures and its page show."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfpolicies.analysis.run_groups import RunGroup, get_run_text
from tfpolicies.analysis.run_record import RunRecord
from tfpolicies.analysis.seed_statistics import ConfidenceInterval, EstimatedCurve
from tfpolicies.reporting.progress_display import format_count

AXES = {"steps": "env_steps", "time": "time_s"}
"""Columns of `progress.csv` by the name of the x axis."""


_MAX_NAMES = 5

Findings = Callable[[RunRecord], Iterable[tuple[str, str]]]
"""A function that returns findings about a run, each a title and a detail."""


class ComparisonFiles(NamedTuple):
    """The files of a comparison, with absolute paths."""

    page: Path
    pictures: tuple[Path, ...]  # for each environment, the curves and the final returns


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupResult:
    """The results of a group of runs that differ only in their seed.

    Attributes:
        group: the runs, with label and settings.
        training: the mean return of recent training episodes.
        evaluation: the mean return of evaluations; None if no run of the group has any.
        scores: the final return of each run, float64 `[runs]`, NaN where there is none.
        final: the estimate over the scores.
    """

    group: RunGroup
    training: EstimatedCurve
    evaluation: EstimatedCurve | None
    scores: np.ndarray
    final: ConfidenceInterval

    @property
    def label(self) -> str:
        return self.group.label

    @property
    def num_scores(self) -> int:
        """The number of runs that have a final return."""
        return int(np.isfinite(self.scores).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class EnvComparison:
    """The groups of one environment, side by side.

    Attributes:
        env: the name of the environment.
        grid: environment steps or seconds at which the curves are estimated, float64 `[points]`.
        groups: the results, in the order of their first run.
        scored_by: "evaluation" if all groups have evaluations, else "training": the returns that
            give the scores.
        probabilities: of improvement, by the indices of two groups: that a run of the first has a
            higher score than one of the second.
        early_scores: the runs whose last evaluation was before the last tenth of their steps.
    """

    env: str
    grid: np.ndarray
    groups: tuple[GroupResult, ...]
    scored_by: str
    probabilities: Mapping[tuple[int, int], ConfidenceInterval]
    early_scores: tuple[RunRecord, ...] = ()

    def describe_early_scores(self) -> str:
        """Returns a note about `early_scores`; "" if there are none."""
        if not self.early_scores:
            return ""
        names = [get_run_text(run) for run in self.early_scores]
        texts = [*names[:_MAX_NAMES], *(["..."] if len(names) > _MAX_NAMES else [])]
        return (
            f"{format_count(len(names), 'run')} had the last evaluation before the last tenth of "
            f"the steps, so that one counts instead: {', '.join(texts)}. Returns of different "
            "times hardly compare: evaluate after the same numbers of steps."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparisonResult:
    """The numbers of `compare_runs`.

    Attributes:
        sections: one for each environment.
        damaged: the reasons why runs were left out, by path.
        by: the x axis of the curves, "steps" or "time".
        estimator: "iqm", "median" or "mean".
    """

    sections: tuple[EnvComparison, ...]
    damaged: Mapping[str, str]
    by: str
    estimator: str

    @property
    def groups(self) -> tuple[GroupResult, ...]:
        """The results of all environments."""
        return tuple(itertools.chain(*(section.groups for section in self.sections)))

    @property
    def runs(self) -> tuple[RunRecord, ...]:
        return tuple(run for result in self.groups for run in result.group.runs)

    def __repr__(self) -> str:
        counts = {"run": self.runs, "group": self.groups, "environment": self.sections}
        runs, groups, envs = (format_count(len(items), noun) for noun, items in counts.items())
        return f"{type(self).__name__}({runs} in {groups} on {envs})"
