"""Checks of the results that a training step returns, and reports of those that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tfpolicies.algorithms.host import HostAlgorithm
from tfpolicies.errors import NonFiniteError, UsageError
from tfpolicies.finite import first_bad
from tfpolicies.policy.driver import validate_result
from tfpolicies.policy.policy import Policy

logger = logging.getLogger("tfpolicies")


class LearnerResultCheck:
    """Checks the results of policies after each training step.

    Args:
        algorithm: an `Algorithm`.
    """

    def __init__(self, algorithm: HostAlgorithm) -> None:
        self._algorithm = algorithm
        self._warned: set[str] = set()  # ids of policies written by hand

    def check(self, learner: Mapping[str, Any]) -> None:
        """Checks the results of a training step.

        Raises:
            UsageError: if it is no dict of results by policy id.
            NonFiniteError: if a policy that learns in its own way reports a loss that is not
                finite; whatever the policy made of it stays.
        """
        policies = self._algorithm.worker.policy_map
        if not isinstance(learner, Mapping) or not all(pid in policies for pid in learner):
            raise UsageError(
                f"{type(self._algorithm).__name__}.training_step must return a dict with the "
                "results of policies by their ids, such as what super().training_step() returns, "
                f"or {{}}; got {learner!r:.200}. Put numbers of your own into the result in the "
                "callback on_train_result."
            )
        for policy_id, result in learner.items():
            policy = policies.handle(policy_id)
            validate_result(policy, "learn_on_batch", result)
            self._check_losses(policy_id, policy, result)

    def _check_losses(self, policy_id: str, policy: Policy, result: Mapping[str, Any]) -> None:
        if policy.driver.learning.detects_non_finite:
            return  # it looked at more than that
        stats = result.get("learner_stats") or {}
        bad = first_bad({name: x for name, x in stats.items() if "loss" in name})
        if bad is None:
            return
        term = "{} ({})".format(*bad)
        message = f"The update of policy {policy_id!r} is not finite: it reports {term}."
        if policy.config.get("on_nan", self._algorithm.config.on_nan) == "stop":
            error = NonFiniteError(
                f"{message} It learns in its own way, so what it made of that is left as it is; "
                "debugging(on_nan='warn') goes on."
            )
            error.term, error.policy_id = term, policy_id
            raise error
        if policy_id not in self._warned:
            self._warned.add(policy_id)
            logger.warning("%s Training goes on, as on_nan='warn' says.", message)
