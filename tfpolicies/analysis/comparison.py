"""Compares runs over their seeds: learning curves, final returns, settings and ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike

import numpy as np

from tfpolicies.analysis.comparison_files import write_files
from tfpolicies.analysis.comparison_results import (
    AXES,
    ComparisonFiles,
    ComparisonResult,
    EnvComparison,
    GroupResult,
)
from tfpolicies.analysis.diagnosis import describe_cause, diagnose
from tfpolicies.analysis.run_groups import RunGroup, group_runs, read_runs
from tfpolicies.analysis.run_record import RunRecord
from tfpolicies.analysis.seed_statistics import (
    ESTIMATORS,
    ConfidenceInterval,
    EstimatedCurve,
    aggregate_curves,
    compute_interval,
    compute_probability_of_improvement,
    interpolate,
)
from tfpolicies.errors import CheckpointError, UsageError, suggest_similar_names
from tfpolicies.system.paths import resolve_path

_GRID_POINTS = 151
_SCORE_SHARE = 0.1  # of a run's steps at its end, whose returns are its score
_END_TOLERANCE = 0.01  # of the longest run, by which the ends of runs may differ


class RunComparison(ComparisonResult):
    """The result of `compare_runs`; its numbers are those of `ComparisonResult`."""

    def write(self, folder: str | PathLike[str]) -> ComparisonFiles:
        """Writes the comparison as a page and as pictures.

        The page is one file, which loads nothing else and runs no script. It has the causes that
        `diagnose` finds for each run.

        Args:
            folder: where to write; created if missing. Files of an earlier comparison in it are
                replaced.
        """
        return write_files(self, resolve_path(folder), _find_causes)


def compare_runs(
    paths: str
    | PathLike[str]
    | Iterable[str | PathLike[str]]
    | Mapping[str, Iterable[str | PathLike[str]]],
    *,
    by: str = "steps",
    estimator: str = "iqm",
) -> RunComparison:
    """Compares runs by their returns over seeds; also of runs that still train.

    Runs with the same algorithm, environment and settings form a group, whatever their seeds. The
    estimate over the runs of a group has a 95 % interval of the percentile bootstrap (Agarwal et
    al. 2021, arXiv:2108.13264). Curves are interpolated within each run, never beyond its end. The
    score of a run is its mean return over the last tenth of its steps.

    Args:
        paths: run folders, or folders of runs; or lists of them by the name of their group. Runs of
            one name that differ in settings are several groups.
        by: "steps" for environment steps on the x axis, "time" for seconds of training.
        estimator: "iqm" (interquartile mean), "median" or "mean".

    Raises:
        CheckpointError: if a path neither is a run nor holds one, or no run can be read.
        UsageError: for another `by` or `estimator`, or without paths.
    """
    _check_choice("by", by, AXES)
    _check_choice("estimator", estimator, ESTIMATORS)
    is_single = isinstance(paths, str | PathLike)
    records, damaged, names = read_runs([paths] if is_single else paths)  # type: ignore[list-item, arg-type]
    if not records:
        reasons = "; ".join(damaged.values())
        raise CheckpointError(f"None of the runs can be read: {reasons}")
    sections = tuple(
        _compare_groups(env, groups, by, estimator)
        for env, groups in group_runs(records, names).items()
    )
    return RunComparison(sections=sections, damaged=damaged, by=by, estimator=estimator)


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in (names := list(choices)):
        hint = suggest_similar_names(str(value), names)
        raise UsageError(f"{name} must be one of {names}, got {value!r}.{hint}")


def _compare_groups(env: str, groups: Sequence[RunGroup], by: str, estimator: str) -> EnvComparison:
    grid = make_grid([run.get_column(AXES[by]) for group in groups for run in group.runs])
    all_evaluate = all(any(map(_evaluates, group.runs)) for group in groups)
    scored_by = "evaluation" if all_evaluate else "training"
    results = tuple(_summarize(group, grid, by, estimator, scored_by) for group in groups)
    probabilities = {}
    for i, j in itertools.combinations(range(len(results)), 2):
        pair = compute_probability_of_improvement(results[i].scores, results[j].scores)
        probabilities[i, j] = pair
        probabilities[j, i] = ConfidenceInterval(1 - pair.estimate, 1 - pair.high, 1 - pair.low)
    runs = [run for group in groups for run in group.runs]
    early = tuple(run for run in runs if scored_by == "evaluation" and not _has_late_score(run))
    return EnvComparison(
        env=env,
        grid=grid,
        groups=results,
        scored_by=scored_by,
        probabilities=probabilities,
        early_scores=early,
    )


def _has_late_score(run: RunRecord) -> bool:
    """Whether a run has an evaluation in its last tenth, or none at all."""
    is_finite = np.isfinite(run.get_evaluation_returns())
    return bool((is_finite & _is_late(run)).any() or not is_finite.any())


def _is_late(run: RunRecord) -> np.ndarray:
    steps = run.get_column("env_steps")
    return steps >= (1 - _SCORE_SHARE) * steps[-1:]


def make_grid(columns: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the common grid of runs, float64 `[points]`; empty if there are no numbers.

    It ends with the shortest of the runs that are as long as the longest one, up to 1 %: runs end
    with whole iterations, and few of them have the very last step.

    Args:
        columns: the x axis of each run, increasing.
    """
    ends = [column[np.isfinite(column)] for column in columns]
    ends = [column for column in ends if len(column)]
    if not ends:
        return np.zeros(0)
    start = min(column[0] for column in ends)
    longest = max(column[-1] for column in ends)
    end = min(x[-1] for x in ends if x[-1] >= (1 - _END_TOLERANCE) * longest)
    return np.linspace(start, end, _GRID_POINTS) if end > start else np.array([start])


def _evaluates(run: RunRecord) -> bool:
    return bool(np.isfinite(run.get_evaluation_returns()).any())


def _summarize(
    group: RunGroup, grid: np.ndarray, by: str, estimator: str, scored_by: str
) -> GroupResult:
    def estimate(get_returns: Callable[[RunRecord], np.ndarray]) -> EstimatedCurve:
        values = [
            interpolate(run.get_column(AXES[by]), get_returns(run), grid) for run in group.runs
        ]
        return aggregate_curves(grid, np.array(values), estimator)

    evaluates = any(map(_evaluates, group.runs))
    scores = np.array([compute_score(run, scored_by) for run in group.runs])
    return GroupResult(
        group=group,
        training=estimate(RunRecord.get_returns),
        evaluation=estimate(RunRecord.get_evaluation_returns) if evaluates else None,
        scores=scores,
        final=compute_interval(scores, estimator),
    )


def compute_score(run: RunRecord, scored_by: str) -> float:
    """Returns the mean return of a run over the last tenth of its steps; NaN if it has none.

    Of returns that are all earlier, it is the last one.

    Args:
        run: the run.
        scored_by: "evaluation" or "training", the returns to take.
    """
    is_by_evaluation = scored_by == "evaluation"
    returns = run.get_evaluation_returns() if is_by_evaluation else run.get_returns()
    is_finite = np.isfinite(returns)
    if not is_finite.any():
        return float("nan")
    is_late = is_finite & _is_late(run)
    return float(returns[is_late].mean() if is_late.any() else returns[is_finite][-1])


def _find_causes(run: RunRecord) -> list[tuple[str, str]]:
    """Returns title and details of each cause for which a run does not learn."""
    try:
        causes = diagnose(run).causes
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # Files may hold numbers that no training writes; the other runs are compared.
        return [("The diagnosis failed", f"{type(error).__name__}: {error}")]
    return [(describe_cause(cause), f"{cause.evidence} {cause.advice}") for cause in causes]
