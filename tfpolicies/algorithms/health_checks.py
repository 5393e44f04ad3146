"""Warnings about a run that does not learn, based on the statistics of its iterations.

The rules are those of `health_rules.py`. Each is reported once per run, with the statistic that
shows it and the setting that changes it, after it has applied in several consecutive iterations. A
symptom is not reported while a rule of higher rank applies, or cannot be decided yet, since that
explains it. If returns have grown, the run is learning, and only its setup is checked.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from tfpolicies.algorithms.health_rules import LEARNING_START, MAX_STEPS_WITHOUT_END, RULES, Rule
from tfpolicies.algorithms.health_stats import (
    ActionFacts,
    PolicyStats,
    RowMeter,
    RunStats,
    Settings,
    to_float,
)

if TYPE_CHECKING:
    from tfpolicies.algorithms.algorithm_protocol import AlgorithmProtocol

if TYPE_CHECKING:
    pass

logger = logging.getLogger("tfpolicies")

MIN_EPISODES = 40
"""Finished episodes before a run is judged: twice the number of first returns."""


class HealthChecks:
    """Warns why a run does not learn, as soon as results show it."""

    def __init__(self) -> None:
        self._failed_iterations: Counter[tuple[str, str]] = Counter()
        self._reported_names: set[str] = set()
        self._action_facts: dict[str, tuple[gym.Space[Any], ActionFacts]] = {}  # by policy id

    def check_iteration(
        self, algorithm: AlgorithmProtocol, result: dict[str, Any], meter: RowMeter
    ) -> None:
        """Adds `policy_metrics` to the result of an iteration, and checks it.

        Args:
            algorithm: which trains.
            result: of the iteration.
            meter: measured the rows that its policies learned from.
        """
        config, metrics, learner = algorithm.config, algorithm._metrics, result["info"]["learner"]
        policies = {pid: algorithm.worker.policy_map.get_handle(pid) for pid in learner}
        facts = {pid: self._get_action_facts(pid, x.action_space) for pid, x in policies.items()}
        result["policy_metrics"] = {
            pid: meter.get(pid) | _describe_learning(facts[pid], policy_result)
            for pid, policy_result in learner.items()
        }
        num_envs = algorithm.workers.num_envs() * max(1, config.num_rollout_workers)
        run = RunStats.from_result(
            result, config, metrics.episodes, num_envs, metrics.first_returns
        )
        self.check(
            run,
            [
                PolicyStats.from_result(result, pid, policy.config, facts[pid], run)
                for pid, policy in policies.items()
            ],
        )

    def _get_action_facts(self, policy_id: str, action_space: gym.Space[Any]) -> ActionFacts:
        space, facts = self._action_facts.get(policy_id, (None, ActionFacts()))
        if space is not action_space:
            facts = ActionFacts.from_space(action_space)
            self._action_facts[policy_id] = action_space, facts
        return facts

    def check(self, run_stats: RunStats, policy_stats: Iterable[PolicyStats]) -> None:
        """Checks an iteration, and logs a warning for each rule that applies for the first time.

        Args:
            run_stats: statistics of the whole run.
            policy_stats: statistics of the policies that learned.
        """
        has_improved, ready = run_stats.has_improved(), is_ready(run_stats)
        policies = [*policy_stats]
        failed_ids: set[str] = set()  # ids of policies to which a rule of higher rank applies
        for rule in RULES.values():
            subjects = [run_stats] if rule.is_of_run else policies
            for subject in subjects:
                policy_id = getattr(subject, "policy_id", "")
                finding = None
                if rule.is_setup_check or not has_improved:
                    finding = rule.find(subject)
                waits = not (ready or rule.is_setup_check)
                waits |= rule.is_symptom and not failed_ids.isdisjoint({"", policy_id})
                if finding is not None:
                    failed_ids.add(policy_id)
                message = "" if finding is None or not finding.evidence else finding.message
                self._report(rule, policy_id, message, waits=waits)

    def _report(self, rule: Rule, policy_id: str, message: str, *, waits: bool) -> None:
        key = rule.name, policy_id
        if not message:
            self._failed_iterations.pop(key, None)
            return
        self._failed_iterations[key] += 1
        if (
            self._failed_iterations[key] >= rule.num_iterations
            and not waits
            and rule.name not in self._reported_names
        ):
            self._reported_names.add(rule.name)
            logger.warning("%s%s", f"Policy {policy_id!r}: " if policy_id else "", message)


def _describe_learning(facts: ActionFacts, result: Mapping[str, Any]) -> dict[str, float]:
    """Returns how random the actions of a policy are, and the number of its updates."""
    stats = result.get("learner_stats") or {}
    entropy = to_float(stats.get("entropy", stats.get("policy_entropy")))
    figures = facts.describe_entropy(entropy)
    updates = result.get("num_grad_updates_lifetime")
    return figures if updates is None else {**figures, "updates": updates}


def is_ready(run: RunStats) -> bool:
    """Returns whether a run is long enough to judge it: its returns may show learning."""
    steps = run.env_steps // max(1, run.num_envs)
    return run.episodes_total >= MIN_EPISODES or steps >= MAX_STEPS_WITHOUT_END


def describe_too_short(settings: Settings, steps: float) -> str | None:
    """Returns a message if learning does not start within some steps, else None.

    Args:
        settings: of the run.
        steps: environment steps of the whole run.
    """
    start = to_float(settings.get(LEARNING_START, 0))
    if not start > 0 or steps > start:
        return None
    return (
        f"learning starts after {LEARNING_START}={start:.0f} steps, and the run has {steps:.0f}. "
        f"Train for more steps, or set training({LEARNING_START}=N) (on the command line: --set "
        f"{LEARNING_START}=N)."
    )
