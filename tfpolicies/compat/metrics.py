"""Metrics of episodes from all workers, and results as text, for ported evaluation code."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.rollout import metrics
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.rollout_worker import RolloutWorker

_LEFT_OUT = ("config", "hist_stats")
_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z_/]([\w ./-]*[\w/-])?")
_HAS_A_MEANING = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # in YAML


def collect_episodes(
    workers: WorkerSet,
    remote_worker_ids: Collection[int] | None = None,
    timeout_seconds: float | None = 180,
) -> list[RolloutMetrics]:
    """Returns the metrics of episodes that ended in any worker since the last collection.

    Args:
        workers: the workers.
        remote_worker_ids: ask only these remote workers; None for all. Metrics that arrived
            earlier, with batches of `workers.sample()`, are from all workers.
        timeout_seconds: remote workers that take longer keep their metrics; None waits for all.

    Raises:
        Exception: an error raised in a remote worker.
    """
    later = workers.foreach_worker(
        operator.methodcaller("get_metrics"),
        local_worker=False,
        remote_worker_ids=remote_worker_ids,
        timeout_seconds=timeout_seconds,
    )
    return sum(later, workers.get_metrics())


def collect_metrics(
    workers: WorkerSet | RolloutWorker,
    remote_worker_ids: Collection[int] | None = None,
    timeout_seconds: float | None = 180,
    keep_custom_metrics: bool = False,
) -> dict[str, Any]:
    """Returns the summary of the episodes that `collect_episodes` returns.

    Args:
        workers: the workers, or one worker.
        remote_worker_ids: as in `collect_episodes`.
        timeout_seconds: as in `collect_episodes`.
        keep_custom_metrics: as in `summarize_episodes`.
    """
    if isinstance(workers, RolloutWorker):
        episodes = workers.get_metrics()
    else:
        episodes = collect_episodes(workers, remote_worker_ids, timeout_seconds)
    return summarize_episodes(episodes, keep_custom_metrics=keep_custom_metrics)


def summarize_episodes(
    episodes: Sequence[RolloutMetrics],
    new_episodes: Sequence[RolloutMetrics] | None = None,
    keep_custom_metrics: bool = False,
) -> dict[str, Any]:
    """Returns means, minima and maxima over episodes; NaN if there are none.

    Args:
        episodes: the episodes of the smoothing window, oldest first.
        new_episodes: those of them that are of this iteration; all by default.
        keep_custom_metrics: whether to return lists of custom metrics, a value per episode.

    >>> summary = summarize_episodes([RolloutMetrics(3, 2.0), RolloutMetrics(5, 4.0)])
    >>> summary["episode_reward_mean"], summary["episodes_this_iter"]
    (3.0, 2)
    """
    new = None if new_episodes is None else len(new_episodes)
    return metrics.summarize_episodes(episodes, new, keep_custom_metrics=keep_custom_metrics)


def pretty_print(result: Mapping[str, Any]) -> str:
    """Returns a result as YAML, sorted by name, without its `config` and `hist_stats`.

    NumPy values and tensors are written as plain numbers, and lists on one line; top-level entries
    that are None are omitted.

    >>> print(pretty_print({"info": {"lr": np.float32(0.5)}, "done": False, "config": {"a": 1}}))
    done: false
    info:
      lr: 0.5
    """
    shown = {name: value for name, value in result.items() if value is not None}
    return "\n".join(_lines(shown, ""))


def _lines(values: Mapping[Any, Any], indent: str) -> list[str]:
    lines = []
    for name, value in sorted(values.items(), key=lambda item: str(item[0])):
        if name in _LEFT_OUT:
            continue
        inner = _lines(value, f"{indent}  ") if isinstance(value, Mapping) else []
        if inner:
            lines += [f"{indent}{_text(str(name))}:", *inner]
        else:
            lines.append(f"{indent}{_text(str(name))}: {_inline(value)}")
    return lines


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        shown = (f"{_text(str(k))}: {_inline(x)}" for k, x in value.items() if k not in _LEFT_OUT)
        return "{" + ", ".join(shown) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if hasattr(value, "numpy") or isinstance(value, np.ndarray | np.generic):
        return _inline(np.asarray(value).tolist())
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    return _number(value) if isinstance(value, float) else _text(str(value))


def _number(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    shown = repr(value)
    return shown if "." in shown else shown.replace("e", ".0e")  # otherwise YAML reads it as text


def _text(value: str) -> str:
    plain = _NEEDS_NO_QUOTES.fullmatch(value) and value.lower() not in _HAS_A_MEANING
    return value if plain else json.dumps(value)
