"""Finds why a run does not learn: `diagnose`, and the command `tfpolicies doctor`."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np

from tfpolicies.algorithms.health_checks import is_ready
from tfpolicies.algorithms.health_rules import RULES, Finding, Rule
from tfpolicies.analysis import course_rules, task_rules, update_rules
from tfpolicies.analysis.history_rule import HistoryRule, Located, get_end, mean
from tfpolicies.analysis.run_history import RunHistory
from tfpolicies.analysis.run_record import RunRecord, read_run
from tfpolicies.base.type_aliases import Json
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID

_MAX_ROWS = 200  # iterations, evenly spread, to which the rules of iterations are applied
_MIN_SHARE = 0.5  # share of the iterations in which a rule applies before it is a cause
_NAMES = ("epsilon", "lr", "tau", "lambda", "beta", "gamma", "explore")  # of settings


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A reason for which a run does not learn.

    Attributes:
        name: names the cause for programs, such as `"short_horizon"`.
        title: names it in a few words.
        policy_id: of the policy that it concerns; "" for the whole run.
        evidence: sentences that describe the fault, with the figures that show it.
        advice: what to change.
        figures: the figures by column of `progress.csv`, or by name.
        settings: the settings that change it, with their current values.
    """

    name: str
    title: str
    policy_id: str
    evidence: str
    advice: str
    figures: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of `diagnose`.

    Attributes:
        run: the name of the run folder.
        causes: the likeliest first; empty if nothing was found.
        figures: the figures of the run: numbers and texts by name.
        is_training: whether a process still trains the run.
    """

    run: str
    causes: tuple[Cause, ...]
    figures: Mapping[str, float | str]
    is_training: bool = False

    def __str__(self) -> str:
        lines = [f"{self.run}: {self.summary}"]
        for i, cause in enumerate(self.causes, 1):
            lines += [f"{i}. {describe_cause(cause)}", f"   {cause.evidence}", f"   {cause.advice}"]
        return "\n".join(lines)

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        if not self.causes:
            return "Nothing was found that keeps this run from learning."
        count = len(self.causes)
        return "1 cause was found." if count == 1 else f"{count} causes, the likeliest first."

    def to_json(self) -> dict[str, Json]:
        """Returns the diagnosis as JSON values; numbers that JSON lacks become texts."""
        content = {
            "run": self.run,
            "is_training": self.is_training,
            "causes": [vars(cause) for cause in self.causes],
            "figures": dict(self.figures),
        }
        encoded: dict[str, Json] = json.loads(json.dumps(_to_json_value(content), allow_nan=False))
        return encoded


def describe_cause(cause: Cause) -> str:
    """Returns the title of a cause, with the policy that it concerns."""
    return f"{cause.title} (policy {cause.policy_id!r})" if cause.policy_id else cause.title


def diagnose(run: str | PathLike[str] | RunRecord) -> Diagnosis:
    """Finds why a run does not learn, in its settings and the columns of its `progress.csv`.

    It applies the rules of the warnings in training to all iterations, and further ones to the
    course of the run: see the page about runs that do not learn. Symptoms that a cause explains
    are left out. A run that learns has no causes.

    Args:
        run: a run folder, of a script or of `tfpolicies train`, also one that is training or was
            killed; or a run that was read already.

    Raises:
        CheckpointError: if it is not a run folder, or its files are damaged.
    """
    record = run if isinstance(run, RunRecord) else read_run(run)
    return diagnose_record(record, is_training=record.folder.is_in_use)


def diagnose_record(record: RunRecord, *, is_training: bool) -> Diagnosis:
    """Diagnoses a run that was read; a process that ends its own run says so by `is_training`."""
    if not record.num_iterations:
        causes = [*_find_why_empty(record, is_training=is_training)]
        return Diagnosis(
            run=record.name,
            causes=tuple(causes),
            figures={"iterations": 0},
            is_training=is_training,
        )
    history = RunHistory(record, is_training=is_training)
    return Diagnosis(
        run=record.name,
        causes=tuple(_find_causes(history)),
        figures=_get_figures(history),
        is_training=history.is_training,
    )


def _find_why_empty(record: RunRecord, *, is_training: bool) -> Iterator[Cause]:
    if is_training:
        return
    error = course_rules.get_error_message(record.error or "")
    yield Cause(
        name="no_iteration",
        title="The run ended before its first iteration",
        policy_id="",
        evidence=f"It ended with an error: {error}"
        if error
        else "It was killed, or its script failed: progress.csv has no iteration.",
        advice="error.txt in the run folder has the traceback."
        if error
        else "Start it again; an iteration may take long: see the time limits of your machine.",
    )


# -- ranking --------------------------------------------------------------------------------------

_HISTORY_RULES: Mapping[str, HistoryRule] = {
    rule.name: rule for rule in (*course_rules.RULES, *task_rules.RULES, *update_rules.RULES)
}

_RANKING = (
    "error",
    "no_learning_yet",
    "no_training",
    "untrained_policy",
    "endless_episodes",
    "no_episode",
    "evaluation_gap",
    "late_learning",
    "exploration",
    "clipped_rewards",
    "equal_returns",
    "equal_policy_returns",
    "equal_observations",
    "unpredictable_actions",
    "unscaled_actions",
    "updates_per_step",
    "few_updates",
    "large_observations",
    "large_bounds",
    "short_horizon",
    "entropy_bonus",
    "target_network",
    "value_range",
    "unusual_choice",
    "unusual_setting",
    "ended_schedule",
    "high_temperature",
    "shared_layers",
    "no_checkpoint",
    "few_iterations",
    "small_steps",
    "large_steps",
    "exploding_values",
    "large_rewards",
    "no_advantages",
    "clipped_value_errors",
    "kl",
    "non_finite_error",
    "non_finite",
    "lagging_policy",
    "unequal_progress",
    "falling_loss",
    "poor_data",
    "rare_rewards",
    "killed",
    "short_run",
    "forgetting",
    "low_entropy",
    "untrained_values",
    "random_policy",
    "differences_from_tuned",
    "no_progress",
)
"""All rules: the likeliest cause first, and symptoms after what may explain them."""


_DEFINITE = frozenset(
    {
        "clipped_rewards",
        "ended_schedule",
        "entropy_bonus",
        "large_observations",
        "short_horizon",
        "target_network",
        "unscaled_actions",
        "unusual_choice",
        "unusual_setting",
        "updates_per_step",
        "value_range",
    }
)
"""Rules that also apply to a run whose returns stopped growing at an unknown level."""


def _find_causes(history: RunHistory) -> Iterator[Cause]:
    """Yields causes by rank; a symptom only if no cause of its policy or the run was found."""
    explained: set[str] = set()
    named_settings = _NamedSettings()
    shows_all = history.is_stuck() or history.has_forgotten()
    definite = _DEFINITE if history.may_be_stuck() else frozenset()
    for name in _RANKING:
        shows_causes = shows_all or name in definite
        if name in RULES:
            rule: Rule | HistoryRule = RULES[name]
            findings = _apply_to_iterations(history, RULES[name], shows_all=shows_causes)
        else:
            rule = _HISTORY_RULES[name]
            is_asked = shows_causes or not _HISTORY_RULES[name].needs_stuck
            findings = [*_HISTORY_RULES[name].find(history)] if is_asked else []
        for finding, policy_id in findings:
            related = {"", policy_id} if policy_id else explained
            is_explained = rule.is_symptom and not explained.isdisjoint(related)
            if is_explained or named_settings.contains(policy_id, finding.settings):
                continue
            named_settings.add(policy_id, finding.settings)
            yield Cause(
                name=name,
                title=finding.title or rule.title,
                policy_id="" if policy_id == DEFAULT_POLICY_ID else policy_id,
                evidence=_start_sentence(finding.evidence),
                advice=finding.advice,
                figures=finding.figures,
                settings=finding.settings,
            )
        explained |= {policy_id for _, policy_id in findings}


class _NamedSettings:
    """The settings that causes have named, by the policy that they concern."""

    def __init__(self) -> None:
        self._policy_ids: dict[str, set[str]] = defaultdict(set)

    def add(self, policy_id: str, names: Iterable[str]) -> None:
        for name in names:
            self._policy_ids[name].add(policy_id)

    def contains(self, policy_id: str, names: Collection[str]) -> bool:
        """Returns whether all of some settings were named, for the policy or the run."""
        ids = [self._policy_ids[name] for name in names]
        return bool(ids) and all(x if not policy_id else x & {"", policy_id} for x in ids)


def _start_sentence(text: str) -> str:
    """Returns a sentence with a capital letter, unless it begins with the name of a setting.

    >>> _start_sentence("the entropy is 0."), _start_sentence("gamma=0.5 is small.")
    ('The entropy is 0.', 'gamma=0.5 is small.')
    """
    word = text.partition(" ")[0]
    is_name = "=" in word or "_" in word or word in _NAMES
    return text if is_name else text[:1].upper() + text[1:]


def _apply_to_iterations(history: RunHistory, rule: Rule, *, shows_all: bool) -> Sequence[Located]:
    """Applies a rule to the iterations of a run; returns the findings in most of them.

    These are most of all iterations, of the first quarter or of the last half: an early fault may
    be hidden by its results.
    """
    if history.has_reached_goal() or not (shows_all or rule.is_setup_check):
        return []
    count = history.record.num_iterations
    rows = np.unique(np.linspace(0, count - 1, min(count, _MAX_ROWS)).astype(int)).tolist()
    rows = rows[-1:] if rule.num_iterations == 1 else rows  # which looks at all episodes so far
    if not (rule.is_setup_check or is_ready(history.get_run_stats(rows[-1]))):
        return []
    results = []
    for policy_id in ("",) if rule.is_of_run else history.policy_ids:
        findings: list[Finding | None] = []
        for row in rows:
            run = history.get_run_stats(row)
            subject = run if rule.is_of_run else history.get_policy_stats(row, policy_id, run)
            findings.append(rule.find(subject))
        applies = np.array([x is not None and x.evidence != "" for x in findings])
        parts = applies, applies[: max(1, len(rows) // 4)], applies[len(rows) // 2 :]
        last = next((x for x in reversed(findings) if x is not None and x.evidence), None)
        is_frequent = applies.sum() >= min(rule.num_iterations, len(rows))
        if last is not None and is_frequent and max(x.mean() for x in parts) > _MIN_SHARE:
            results.append(Located(last, policy_id))
    return results


# -- figures --------------------------------------------------------------------------------------


def _get_figures(history: RunHistory) -> dict[str, float | str]:
    """Returns the figures that the rules looked at, without those that the run lacks."""
    record, score = history.record, history.score
    owner = f"{history.judged_policy}: " if history.judged_policy else ""
    figures: dict[str, float | str] = {
        "algorithm": record.algorithm,
        "environment": record.env or "",
        "iterations": record.num_iterations,
        "steps": history.last_step,
        "episodes": int(np.nan_to_num(record.get_column("episodes")[-1])),
        f"{owner}first return": history.first_returns.mean,
        f"{owner}best return": score.best,
        f"{owner}last return": score.last,
        "last evaluation": history.evaluation.last,
        "return that counts as learned": history.goal,
        "episode length": float(record.get_column("episode_len_mean")[-1]),
    }
    for policy_id in history.policy_ids:
        prefix = f"{policy_id}: " if len(history.policy_ids) > 1 else ""
        for name, columns in _POLICY_FIGURES.items():
            values = history.get_column(policy_id, *columns)
            figures[f"{prefix}{name}"] = mean(values[-1:] if name == "updates" else get_end(values))
    return {
        name: value
        for name, value in figures.items()
        if value != "" and not (isinstance(value, float) and math.isnan(value))
    }


_POLICY_FIGURES = {
    "learning rate": ("cur_lr", "cur_actor_lr"),
    "KL divergence": ("kl",),
    "entropy": ("entropy", "policy_entropy"),
    "share of the largest entropy": ("entropy_share",),
    "explained variance of values": ("vf_explained_var",),
    "share of clipped value errors": ("vf_clipped",),
    "loss of the policy": ("policy_loss", "actor_loss"),
    "loss of values": ("vf_loss", "critic_loss"),
    "mean value": ("mean_q",),
    "temperature": ("alpha_value",),
    "size of observations": ("obs_magnitude",),
    "largest reward": ("reward_magnitude",),
    "updates": ("updates",),
}


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _to_json_value(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(x) for x in value]
    if isinstance(value, np.generic):
        value = value.item()
    is_plain = value is None or isinstance(value, str | bool | int)
    if is_plain or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
