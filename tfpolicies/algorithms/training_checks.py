"""Checks of the policies that a training step trains, and of the results it returns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from tfpolicies.base.finite_checks import find_first_non_finite
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.multi_agent import as_predicate, is_surely_trained
from tfpolicies.errors import ConfigError, NonFiniteError, UsageError
from tfpolicies.policy.driver import validate_result
from tfpolicies.policy.policy import Policy
from tfpolicies.policy_map.policy_map import PolicyMap


class TrainableCheck:
    """Checks that an algorithm's training step gives policies the rows they learn from.

    Args:
        algorithm_class: the class of the algorithm.
    """

    def __init__(self, algorithm_class: Any) -> None:
        self._algorithm_class = algorithm_class
        self._checked_ids: set[str] = set()  # ids of policies

    def check_config(self, config: AlgorithmConfig) -> None:
        """Checks the policies of a config that are certain to be trained; see `require`."""
        predicate = as_predicate(config.policies_to_train)
        for policy_id, spec in config.policies.items():
            if spec.policy_class is not None and is_surely_trained(policy_id, predicate):
                self.check(policy_id, spec.policy_class)

    def check_sampled(self, policy_ids: Iterable[str], policies: Mapping[str, Policy]) -> None:
        """Checks each policy with sampled training rows once; see `require`.

        Args:
            policy_ids: their ids.
            policies: all policies by id.
        """
        for policy_id in set(policy_ids) - self._checked_ids:
            policy = policies[policy_id]
            if not policy.driver.is_frozen:
                self.check(policy_id, type(policy))

    def check(self, policy_id: str, policy_class: type[Policy]) -> None:
        """Checks that the training step gives a policy the rows its loss needs.

        Custom policy classes and training steps are not checked.
        """
        algorithm_class = self._algorithm_class
        modules = policy_class.__module__, algorithm_class.training_step.__module__
        package = __package__.partition(".")[0]
        is_built_in = all(module.partition(".")[0] == package for module in modules)
        algorithm_replays = algorithm_class._replays
        policy_replays = getattr(policy_class, "_replays", algorithm_replays)
        if not is_built_in or policy_replays == algorithm_replays:
            self._checked_ids.add(policy_id)
            return
        required_rows, available_rows = (
            "replayed rows and target networks",
            "only freshly sampled rows",
        )
        if algorithm_replays:
            required_rows, available_rows = available_rows, required_rows
        raise ConfigError(
            f"Policy {policy_id!r} is a {policy_class.__name__}, which learns from "
            f"{required_rows}, but the training step of {algorithm_class.__name__} has "
            f"{available_rows}. Leave it out of `policies_to_train` and train it with a separate "
            "algorithm, or override `training_step`."
        )


logger = logging.getLogger("tfpolicies")


class LearnerResultCheck:
    """Checks the results of policies after each training step.

    Args:
        name: of the algorithm.
        config: of the algorithm.
        policies: by id.
    """

    def __init__(self, name: str, config: AlgorithmConfig, policies: PolicyMap) -> None:
        self._name = name
        self._config = config
        self._policies = policies
        self._warned_ids: set[str] = set()  # ids of custom policies

    def check(self, learner: Mapping[str, Any]) -> None:
        """Checks the results of a training step.

        Raises:
            UsageError: if it is not a dict of results by policy id.
            NonFiniteError: if a custom policy reports a loss that is not finite; its state is not
                rolled back.
        """
        policies = self._policies
        if not isinstance(learner, Mapping) or not all(pid in policies for pid in learner):
            raise UsageError(
                f"{self._name}.training_step must return a dict with the "
                "results of policies by their ids, such as what super().training_step() returns, "
                f"or {{}}; got {learner!r:.200}. Add your own metrics to the result in the "
                "callback on_train_result."
            )
        for policy_id, result in learner.items():
            policy = policies.get_handle(policy_id)
            validate_result(policy, "learn_on_batch", result)
            self._check_losses(policy_id, policy, result)

    def _check_losses(self, policy_id: str, policy: Policy, result: Mapping[str, Any]) -> None:
        if policy.driver.learning.detects_non_finite:
            return  # it has checked losses and weights already
        stats = result.get("learner_stats") or {}
        non_finite = find_first_non_finite({name: x for name, x in stats.items() if "loss" in name})
        if non_finite is None:
            return
        term = "{} ({})".format(*non_finite)
        message = f"The update of policy {policy_id!r} is not finite: it reports {term}."
        if policy.config.get("on_nan", self._config.on_nan) == "raise":
            error = NonFiniteError(
                f"{message} It has its own update method, so its state was not rolled back; "
                "debugging(on_nan='warn') continues training."
            )
            error.term, error.policy_id = term, policy_id
            raise error
        if policy_id not in self._warned_ids:
            self._warned_ids.add(policy_id)
            logger.warning("%s Training continues, because of on_nan='warn'.", message)
