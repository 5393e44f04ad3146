"""One flat row of numbers per training iteration, for CSV, TensorBoard and learning curve."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tfpolicies.errors import UsageError

_KEYS = {  # column -> key in the result of an iteration
    "iteration": "training_iteration",  # training iterations so far, from 1
    "env_steps": "num_env_steps_sampled",  # environment steps so far, over all environments
    "time_s": "time_total_s",  # seconds of training so far
    "steps_per_s": "num_env_steps_sampled_throughput_per_sec",  # in this iteration
    # of the last 100 episodes or more; NaN before the first has ended
    "episode_reward_mean": "episode_reward_mean",
    "episode_reward_min": "episode_reward_min",
    "episode_reward_max": "episode_reward_max",
    "episode_len_mean": "episode_len_mean",  # environment steps per episode
    "episodes": "episodes_total",  # episodes ended so far
}
FIXED_COLUMNS = tuple(_KEYS)
# Columns of the newest episodes: mean, std, min, max, episodes, env_steps
RECENT_PREFIX = "recent_returns/"
_POLICY_RETURN = re.compile(r"policy/(.+)/return_mean")
_MAX_SUM_SHARE = 1e-4  # of the range of the policies' returns, by which a constant sum may vary
_LOSSES = ("total_loss", "critic_loss", "loss", "policy_loss")
EVALUATION_MEAN = "evaluation/episode_reward_mean"  # in iterations with an evaluation


def make_progress_row(result: Mapping[str, Any]) -> dict[str, float]:
    """Flattens the result of `Algorithm.train()` into one row of numbers.

    The row has every name of `FIXED_COLUMNS` in their order, then `episode/<name>` for each further
    number `episode_<name>`, `recent_returns/<name>` for the newest episodes,
    `evaluation/episode_<name>` if the iteration evaluated, `custom/<name>` for `custom_metrics` of
    callbacks (and `evaluation/custom/<name>`), `env_steps_trained`, `learner/<policy
    id>/<statistic>`, `policy/<policy id>/<figure>` (`policy_metrics`, and with several policies
    `return_mean`, `return_min` and `return_max` of their agents), and `time/<part>_s`, sorted.
    Numbers missing in the result are NaN; learner statistics that are not single numbers are left
    out.

    Raises:
        UsageError: if `result` lacks `training_iteration` or `num_env_steps_sampled`.

    >>> row = make_progress_row({"training_iteration": 1, "num_env_steps_sampled": 64,
    ...                     "info": {"learner": {"default_policy": {"learner_stats": {"kl": .5}}}}})
    >>> row["env_steps"], row["episode_reward_mean"], row["learner/default_policy/kl"]
    (64, nan, 0.5)
    """
    for key in ("training_iteration", "num_env_steps_sampled"):
        if to_number(result.get(key)) is None:
            raise UsageError(
                f"`result` must hold the number {key!r}, got {result.get(key)!r}. "
                "Pass what `Algorithm.train()` returned."
            )
    numbers = {name: to_number(result.get(key)) for name, key in _KEYS.items()}
    row = {name: math.nan if number is None else number for name, number in numbers.items()}
    evaluation = result.get("evaluation") or {}
    learner_results = result.get("info", {}).get("learner", {})
    episodes = {key: x for key, x in _get_episode_numbers(result).items() if key not in row}
    more_columns = {
        "custom": result.get("custom_metrics"),
        "episode": {key.removeprefix("episode_"): x for key, x in episodes.items()},
        "evaluation": {
            **_get_episode_numbers(evaluation),
            "custom": evaluation.get("custom_metrics"),
        },
        "learner": {
            pid: policy_result.get("learner_stats")
            for pid, policy_result in learner_results.items()
        },
        "env_steps_trained": result.get("num_env_steps_trained"),
        "policy": _get_policy_figures(result),
        "recent_returns": result.get("recent_returns"),
        "time": _get_times(result),
    }
    return row | dict(sorted(_flatten(more_columns, "")))


def _get_times(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of an iteration that sampling, its environments and learning took."""
    milliseconds, parts = result.get("timers", {}), result.get("sampler_perf", {})
    names = {"sample": "sample_time_ms", "learn": "learn_time_ms"}
    times = {f"{x}_s": milliseconds[key] / 1e3 for x, key in names.items() if key in milliseconds}
    total = sum(parts.values())
    if times and total > 0:
        times["env_s"] = times["sample_s"] * parts["mean_env_wait_ms"] / total
    return times


def describe_times(columns: Mapping[str, Iterable[float]]) -> str:
    """Describes which shares of the time environments, the rest of sampling, and learning took.

    Args:
        columns: values of some iterations by column of `progress.csv`.

    Returns:
        The description; "" if the columns do not tell.

    >>> times = {"time/sample_s": [3.0, 5.0], "time/env_s": [3.0, 4.0], "time/learn_s": [1.0, 1.0]}
    >>> describe_times(times)
    '70% environments, 10% other sampling, 20% learning'
    """
    names = ("env", "sample", "learn")
    sums = [sum(x for x in columns.get(f"time/{name}_s", ()) if x == x) for name in names]
    env, sample, learn = sums
    if not env or not sample + learn:
        return ""
    shares = [part / (sample + learn) for part in (env, sample - env, learn)]
    return "{:.0%} environments, {:.0%} other sampling, {:.0%} learning".format(*shares)


def _get_policy_figures(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns figures by policy: its metrics, and the returns of its agents."""
    figures = {pid: dict(metrics) for pid, metrics in result.get("policy_metrics", {}).items()}
    for name in ("mean", "min", "max"):
        for pid, value in result.get(f"policy_reward_{name}", {}).items():
            figures.setdefault(pid, {})[f"return_{name}"] = value
    return figures


def find_loss(row: Mapping[str, float]) -> float:
    """Returns the loss of an iteration, the mean over its policies; NaN if there is none.

    >>> find_loss({"learner/a/total_loss": 1.0, "learner/b/total_loss": 2.0, "learner/a/kl": 0.1})
    1.5
    """
    for name in _LOSSES:
        losses = [
            value
            for column, value in row.items()
            if column.startswith("learner/") and column.endswith(f"/{name}")
        ]
        if losses:
            return sum(losses) / len(losses)
    return math.nan


def find_policies_with_returns(columns: Iterable[str]) -> list[str]:
    """Returns the ids of the policies whose returns some columns have.

    >>> find_policies_with_returns(["env_steps", "policy/a/return_mean", "policy/b/return_mean"])
    ['a', 'b']
    """
    return [match[1] for name in columns if (match := _POLICY_RETURN.fullmatch(name))]


def has_constant_sum(columns: Mapping[str, Iterable[float]]) -> bool:
    """Returns whether all episodes have the same return, though those of policies differ.

    Args:
        columns: values of some iterations by column of `progress.csv`.

    >>> total = {"episode_reward_min": [0.0], "episode_reward_max": [0.0]}
    >>> has_constant_sum({**total, "policy/a/return_mean": [-1.0, 1.0]}), has_constant_sum(total)
    (True, False)
    """
    policies = find_policies_with_returns(columns)
    ranges = [get_policy_range(columns, pid) for pid in policies]
    total = _get_range(columns, ("episode_reward_min", "episode_reward_max"))
    largest = max((x for x in ranges if not math.isnan(x)), default=0.0)
    return largest > 0 and total <= _MAX_SUM_SHARE * largest


def get_policy_range(columns: Mapping[str, Iterable[float]], policy_id: str) -> float:
    """Returns the highest minus the lowest known return of a policy; NaN if it has none."""
    return _get_range(columns, [f"policy/{policy_id}/return_{x}" for x in ("mean", "min", "max")])


def _get_range(columns: Mapping[str, Iterable[float]], names: Iterable[str]) -> float:
    values = [x for name in names for x in columns.get(name, ()) if math.isfinite(x)]
    return max(values) - min(values) if values else math.nan


def select_known_numbers(row: Mapping[str, float]) -> dict[str, float]:
    """Returns a row without means over no episode, which are NaN; a NaN of the learner stays.

    >>> select_known_numbers({"env_steps": 8, "episode_reward_mean": math.nan})
    {'env_steps': 8}
    """
    return {
        name: value
        for name, value in row.items()
        if name.startswith("learner/") or not math.isnan(value)
    }


def to_number(value: object) -> float | None:
    """Converts a single real number to int or float; returns None for other values.

    NumPy scalars and 0-dimensional arrays are numbers; booleans and strings are not.

    >>> to_number(3), to_number("3"), to_number(True)
    (3, None, None)
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _get_episode_numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of an episode summary, such as `episode_reward_mean`."""
    return {
        key: value
        for key, value in summary.items()
        if key.startswith("episode_") and to_number(value) is not None
    }


def _flatten(statistics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yields the single numbers in nested mappings, by path."""
    for name, value in statistics.items():
        number = to_number(value)
        if number is not None:
            yield f"{prefix}{name}", number
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
