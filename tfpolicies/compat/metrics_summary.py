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
from tfpolicies.rollout import episode_summaries
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.rollout_worker import RolloutWorker

_OMITTED_KEYS = ("config", "hist_stats")
_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z_/]([\w ./-]*[\w/-])?")
_YAML_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # in YAML


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
    remote_metrics = workers.foreach_worker(
        operator.methodcaller("get_metrics"),
        local_worker=False,
        remote_worker_ids=remote_worker_ids,
        timeout_seconds=timeout_seconds,
    )
    return sum(remote_metrics, workers.get_metrics())


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
    return episode_summaries.summarize_episodes(
        episodes, new, keep_custom_metrics=keep_custom_metrics
    )


def pretty_print(result: Mapping[str, Any]) -> str:
    """Returns a result as YAML, sorted by name, without its `config` and `hist_stats`.

    NumPy values and tensors are written as plain numbers, and lists on one line; top-level entries
    that are None are omitted.

    >>> print(pretty_print({"info": {"lr": np.float32(0.5)}, "done": False, "config": {"a": 1}}))
    done: false
    info:
      lr: 0.5
    """
    entries = {name: value for name, value in result.items() if value is not None}
    return "\n".join(_format_block(entries, ""))


def _format_block(values: Mapping[Any, Any], indent: str) -> list[str]:
    lines = []
    for name, value in sorted(values.items(), key=lambda item: str(item[0])):
        if name in _OMITTED_KEYS:
            continue
        inner = _format_block(value, f"{indent}  ") if isinstance(value, Mapping) else []
        if inner:
            lines += [f"{indent}{_format_text(str(name))}:", *inner]
        else:
            lines.append(f"{indent}{_format_text(str(name))}: {_format_inline(value)}")
    return lines


def _format_inline(value: Any) -> str:
    if isinstance(value, Mapping):
        entries = (
            f"{_format_text(str(k))}: {_format_inline(x)}"
            for k, x in value.items()
            if k not in _OMITTED_KEYS
        )
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(map(_format_inline, value)) + "]"
    if hasattr(value, "numpy") or isinstance(value, np.ndarray | np.generic):
        return _format_inline(np.asarray(value).tolist())
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    return _format_number(value) if isinstance(value, float) else _format_text(str(value))


def _format_number(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")  # otherwise YAML reads it as text


def _format_text(value: str) -> str:
    needs_no_quotes = _NEEDS_NO_QUOTES.fullmatch(value) and value.lower() not in _YAML_WORDS
    return value if needs_no_quotes else json.dumps(value)
