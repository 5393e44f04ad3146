"""Checks that an algorithm's training step suits the policies that it trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.multi_agent import as_predicate, is_surely_trained
from tfpolicies.errors import ConfigError
from tfpolicies.policy.policy import Policy


class TrainableCheck:
    """Compares what policies learn from with what the training step of an algorithm gives.

    Args:
        algorithm_class: the class of the algorithm.
    """

    def __init__(self, algorithm_class: Any) -> None:
        self._algorithm_class = algorithm_class
        self._passed: set[str] = set()  # ids of policies

    def require_all(self, config: AlgorithmConfig) -> None:
        """Checks the policies of a config that are surely trained; see `require`."""
        predicate = as_predicate(config.policies_to_train)
        for policy_id, spec in config.policies.items():
            if spec.policy_class is not None and is_surely_trained(policy_id, predicate):
                self.require(policy_id, spec.policy_class)

    def require_sampled(self, policy_ids: Iterable[str], policies: Mapping[str, Policy]) -> None:
        """Checks policies whose rows were sampled to be trained on, each once; see `require`.

        Args:
            policy_ids: their ids.
            policies: all policies by id.
        """
        for policy_id in set(policy_ids) - self._passed:
            policy = policies[policy_id]
            if not policy.driver.is_frozen:
                self.require(policy_id, type(policy))

    def require(self, policy_id: str, policy_class: type[Policy]) -> None:
        """Checks that the training step gives a policy the rows its algorithm learns from.

        Classes and training steps of users are not checked.

        Raises:
            ConfigError: if one of them replays rows and the other one does not.
        """
        algorithm_class = self._algorithm_class
        modules = policy_class.__module__, algorithm_class.training_step.__module__
        package = __package__.partition(".")[0]
        is_ours = all(module.partition(".")[0] == package for module in modules)
        algorithm_replays = algorithm_class._replays
        replays = getattr(policy_class, "_replays", algorithm_replays)
        if not is_ours or replays == algorithm_replays:
            self._passed.add(policy_id)
            return
        needs, does = "replayed rows and target networks", "only what was just sampled"
        if algorithm_replays:
            needs, does = does, needs
        raise ConfigError(
            f"Policy {policy_id!r} is a {policy_class.__name__}, which learns from {needs}, but "
            f"the training step of {algorithm_class.__name__} has {does}. Leave it out of "
            "`policies_to_train` and train it by an algorithm of its own, or override "
            "`training_step`."
        )
