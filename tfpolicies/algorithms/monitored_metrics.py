"""The metrics that Keras callbacks may monitor: their names, and the direction that is better."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from tfpolicies.errors import UsageError, suggest_similar_names
from tfpolicies.reporting.progress_row import EVALUATION_MEAN, FIXED_COLUMNS, RECENT_PREFIX

LOSS = "loss"
"""The name of a policy's loss in the logs of Keras callbacks."""

_LEARNER_PREFIX = "learner/"
_EVALUATION_PREFIX = "evaluation/"
_ANY_PREFIXES = ("custom/", "episode/")  # columns of callbacks and of environments
_RECENT_NAMES = ("mean", "std", "min", "max", "episodes", "env_steps")
_HIGHER_IS_BETTER = re.compile(
    r"((evaluation/)?episode_reward_(mean|min|max)"
    r"|recent_returns/(mean|min|max)"
    r"|learner/.*/vf_explained_var"
    r"|steps_per_s)"
)
_LOWER_IS_BETTER = re.compile(r"(loss|learner/.*/(\w*_)?loss|learner/.*/mean_td_error)")
_HINTS = {
    "accuracy": "episode_reward_mean",
    "reward": "episode_reward_mean",
    "return": "episode_reward_mean",
    "val_accuracy": EVALUATION_MEAN,
    "val_loss": EVALUATION_MEAN,
}


def find_direction(name: str) -> str | None:
    """Returns "max" if higher values of a metric are better, "min" for lower ones, None if unknown.

    >>> find_direction("episode_reward_mean"), find_direction("learner/default_policy/vf_loss")
    ('max', 'min')
    >>> find_direction("episode_len_mean") is None
    True
    """
    if _HIGHER_IS_BETTER.fullmatch(name):
        return "max"
    return "min" if _LOWER_IS_BETTER.fullmatch(name) else None


def check_metric(name: str, owner: str, policy_ids: Iterable[str], *, evaluates: bool) -> None:
    """Checks before training that iterations may have a metric.

    Args:
        name: of the metric.
        owner: the callback that monitors it, for the message.
        policy_ids: of the policies.
        evaluates: whether the run evaluates its policies.

    Raises:
        UsageError: if no iteration can have it.
    """
    learner_prefixes = tuple(f"{_LEARNER_PREFIX}{pid}/" for pid in policy_ids)
    recent = [RECENT_PREFIX + name for name in _RECENT_NAMES]
    names = [*FIXED_COLUMNS, *recent, LOSS, *([EVALUATION_MEAN] if evaluates else [])]
    prefixes = (*_ANY_PREFIXES, *learner_prefixes, *([_EVALUATION_PREFIX] if evaluates else []))
    if name in names or name.startswith(prefixes):
        return
    if name.startswith((_EVALUATION_PREFIX, "val_")):
        reason = (
            f"its evaluations give {EVALUATION_MEAN!r}"
            if evaluates
            else f"evaluations give {EVALUATION_MEAN!r}: config.evaluation(evaluation_interval=1)"
        )
        raise UsageError(f"{owner} monitors {name!r}, which this run does not have; {reason}.")
    raise UsageError(_describe_unknown(name, owner, names))


def check_metric_in_logs(name: str, owner: str, logs: Mapping[str, float]) -> None:
    """Checks after an iteration with an update that it has a learner's metric.

    Raises:
        UsageError: if the metric is a learner's, and `logs` do not have it.
    """
    if name.startswith(_LEARNER_PREFIX) and name not in logs:
        raise UsageError(_describe_unknown(name, owner, logs))


def _describe_unknown(name: str, owner: str, names: Iterable[str]) -> str:
    similar = suggest_similar_names(name, [*names])
    hint = f" Did you mean {_HINTS[name]!r}?" if name in _HINTS else similar
    return (
        f"{owner} monitors {name!r}, which a training iteration does not have.{hint} It has "
        f"{', '.join(map(repr, names))}, and learner/<policy id>/<statistic>; see progress.csv."
    )
