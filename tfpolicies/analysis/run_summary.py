"""Facts about a run for reports: its end, its speed, and its learning statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tfpolicies.analysis.run_groups import get_algorithm_text, show_text
from tfpolicies.analysis.run_record import RunRecord

_ERROR_LINES = 6
_MAX_STATISTICS = 6
_MAX_INDENT = 40
_ENDS = {"target": "target reached", "steps": "all steps used", "callback": "ended by a callback"}

STATISTICS = {
    "entropy": "entropy of the actions; exploration ends as it reaches its minimum",
    "policy_entropy": "entropy of the actions; exploration ends as it reaches its minimum",
    "kl": "change of the policy by an iteration (KL divergence)",
    "vf_explained_var": "share of the variance of returns that the value function explains",
    "vf_loss": "squared error of the value function",
    "mean_q": "mean predicted return of the sampled actions",
    "mean_td_error": "mean error of the predicted returns",
    "critic_loss": "loss of the critic",
    "actor_loss": "loss of the actor",
    "alpha_value": "temperature: the weight of the entropy",
    "policy_loss": "loss of the policy",
    "total_loss": "sum of the losses",
}
"""Learning statistics with their meaning, in the order in which reports choose them."""

_STATISTICS_BY_ALGORITHM = {
    "PPO": ("entropy", "kl", "vf_explained_var", "vf_loss"),
    "A2C": ("policy_entropy", "vf_explained_var", "vf_loss", "policy_loss"),
    "PG": ("policy_loss",),
    "DQN": ("mean_q", "mean_td_error"),
    "SAC": ("mean_q", "alpha_value", "critic_loss", "actor_loss"),
    "TD3": ("mean_q", "critic_loss", "actor_loss"),
    "DDPG": ("mean_q", "critic_loss", "actor_loss"),
    "BC": ("policy_loss",),
    "MARWIL": ("policy_loss", "vf_explained_var", "vf_loss"),
}


def choose_statistics(runs: Iterable[RunRecord]) -> list[str]:
    """Returns up to six statistics that matter for the algorithms of some runs, and that exist."""
    names: dict[str, None] = {}
    for run in runs:
        recorded = {column.rpartition("/")[2] for column in run.columns if _is_learned(column)}
        preferred = _STATISTICS_BY_ALGORITHM.get(get_algorithm_text(run.algorithm), STATISTICS)
        names |= {name: None for name in preferred if name in recorded}
    return [name for name in STATISTICS if name in names][:_MAX_STATISTICS]


def get_statistic(run: RunRecord, name: str) -> np.ndarray:
    """Returns a statistic of the updates, float64 `[iterations]`: its mean over the policies."""
    columns = [
        values
        for column, values in run.columns.items()
        if _is_learned(column) and column.rpartition("/")[2] == name
    ]
    if not columns:
        return np.full(run.num_iterations, np.nan)
    values = np.array(columns)
    exists = np.isfinite(values)
    total, count = np.where(exists, values, 0.0).sum(axis=0), exists.sum(axis=0)
    result: np.ndarray = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return result


def _is_learned(column: str) -> bool:
    return column.startswith("learner/")


def describe_end(run: RunRecord) -> str:
    """Describes how a run ended, or that it still trains, in a few words."""
    if run.folder.is_in_use:
        return "still training"
    if run.ended_by is not None:
        return _ENDS.get(run.ended_by, show_text(run.ended_by, 40))
    if run.error is not None:
        return "error"
    return "stopped" if run.num_iterations else "not trained"


def get_error_lines(run: RunRecord) -> str:
    """Returns the last lines of the error that ended a run; "" if it ended in another way."""
    if run.error is None or run.ended_by is not None or run.folder.is_in_use:
        return ""
    lines = [line.rstrip() for line in run.error.splitlines() if line.strip()]
    return "\n".join(_show_line(line) for line in lines[-_ERROR_LINES:])


def _show_line(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())].expandtabs(4)
    return indent[:_MAX_INDENT] + show_text(line, 300)


def get_last(run: RunRecord, column: str) -> float:
    """Returns the last finite value of a column; NaN if there is none."""
    values = run.get_column(column)
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else math.nan


def get_speed(run: RunRecord) -> float:
    """Returns the environment steps per second of the whole training; NaN if unknown."""
    seconds = get_last(run, "time_s")
    return get_last(run, "env_steps") / seconds if seconds > 0 else math.nan


def collect_places(runs: Sequence[RunRecord]) -> dict[str, set[str]]:
    """Returns the versions and the properties of the machines that runs used, by name."""
    places: dict[str, set[str]] = {}
    for run in runs:
        for place in run.places:
            for part in ("versions", "machine"):
                properties = place.get(part)
                for name, value in _items(properties):
                    places.setdefault(name, set()).add(value)
    return places


def _items(properties: object) -> Iterable[tuple[str, str]]:
    if isinstance(properties, Mapping):
        for name, value in properties.items():
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield show_text(str(name).replace("_gib", " (GiB)"), 40), show_text(text, 80)
