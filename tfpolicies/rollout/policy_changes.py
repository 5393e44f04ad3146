"""Additions of policies as values, and transactions that apply them in all workers or in none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import gymnasium as gym

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.multi_agent import (
    MappingFn,
    TrainPredicate,
    as_predicate,
    require_mapping_fn,
)
from tfpolicies.config.policy_spec import PolicySpec, validate_policy_id
from tfpolicies.errors import ConfigError, PolicyExistsError, UsageError
from tfpolicies.policy.policy import Policy


class MappingAndTrainable(NamedTuple):
    """The policy mapping function and the predicate of trained policies.

    Attributes:
        policy_mapping_fn: `f(agent_id, episode, worker, **kwargs)`, returns a policy id.
        policies_to_train: `f(policy_id, batch=None)`; None for all.
    """

    policy_mapping_fn: Any = None
    policies_to_train: Any = None


@dataclass(frozen=True)
class PolicyAddition:
    """A policy to add to workers, and the changes that come with it.

    Attributes:
        policy_id: its id.
        spec: the spec to create it from; or
        policy: the policy itself. Without both, it is created from its state.
        policy_state: its state, from `get_state`; None keeps the initial state.
        policy_mapping_fn: the new mapping function; None keeps the present one.
        is_policy_to_train: `f(policy_id, batch=None)`; None keeps the present one.
        calls_on_create: whether `on_create_policy` is called, as for each policy that is created.
    """

    policy_id: str
    spec: PolicySpec | None = None
    policy: Policy | None = None
    policy_state: Mapping[str, Any] | None = None
    policy_mapping_fn: Any = None
    is_policy_to_train: TrainPredicate = None
    calls_on_create: bool = False

    @classmethod
    def from_arguments(
        cls,
        policy_ids: Collection[str],
        policy_id: str,
        policy_cls: type[Policy] | None = None,
        policy: Policy | None = None,
        *,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        config: Mapping[str, Any] | AlgorithmConfig | None = None,
        policy_state: Mapping[str, Any] | None = None,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: Collection[str] | TrainPredicate = None,
        module_spec: object = None,
    ) -> PolicyAddition:
        """Checks the arguments of `add_policy` and returns them as one value.

        Args:
            policy_ids: of the policies that exist.
            policy_id: this and all others as in `RolloutWorker.add_policy`.
            policy_cls: as there.
            policy: as there.
            observation_space: as there.
            action_space: as there.
            config: as there.
            policy_state: as there.
            policy_mapping_fn: as there.
            policies_to_train: as there.
            module_spec: as there.

        Raises:
            ConfigError: for an invalid id or mapping function, or a `module_spec`.
            PolicyExistsError: if there is a policy of this id; also a KeyError.
            UsageError: unless exactly one of class and instance is given, and is a policy; or if
                `policies_to_train` is neither ids nor a function.
        """
        validate_policy_id(policy_id, error=True)
        if module_spec is not None:
            raise ConfigError(
                "module_spec must be None: RLModules are not supported; give `policy_cls` and "
                "`config={'model': ...}`."
            )
        require_new_id(policy_id, policy_ids)
        _require_class_or_instance(policy_cls, policy)
        require_mapping_fn(policy_mapping_fn)
        spec = None
        if policy is None:
            spec = PolicySpec(policy_cls, observation_space, action_space, config)
        return cls(
            policy_id,
            spec,
            policy,
            policy_state,
            policy_mapping_fn,
            as_predicate(policies_to_train),
            calls_on_create=policy is None,
        )

    def with_state(self, policy_state: Mapping[str, Any]) -> PolicyAddition:
        """Returns the addition of the same policy to other workers, created from its state."""
        return replace(self, spec=None, policy=None, policy_state=policy_state)


def require_new_id(policy_id: str, policy_ids: Collection[str]) -> None:
    if policy_id in policy_ids:
        raise PolicyExistsError(
            f"Policy ID {policy_id!r} already exists in policy map. Remove it first, or choose "
            "another id."
        )


def _require_class_or_instance(policy_cls: type[Policy] | None, policy: Policy | None) -> None:
    if (policy_cls is None) == (policy is None):
        raise UsageError(
            "Only one of `policy_cls` and `policy` must be given to add_policy, got "
            f"policy_cls={policy_cls!r} and policy={policy!r}."
        )
    if policy is not None and not isinstance(policy, Policy):
        raise UsageError(f"policy must be a Policy, got {policy!r}; give a class as `policy_cls`.")


_Result = TypeVar("_Result", covariant=True)


class PolicyHolder(Protocol[_Result]):
    """One or several workers whose policies a transaction changes."""

    def apply(self, addition: PolicyAddition) -> _Result:
        """Adds a policy."""

    def revert(self, policy_id: str, previous: MappingAndTrainable) -> None:
        """Removes a policy if it exists, and restores the mapping and the trained policies."""


class PolicyTransaction:
    """Adds policies to several workers; if an addition fails, it reverts all of them.

    Use it in a `with` statement. An error in the block reverts the additions in reverse order.

    Example:
        >>> class Names(list):
        ...     def apply(self, addition):
        ...         self.append(addition.policy_id)
        ...     def revert(self, policy_id, before):
        ...         self.remove(policy_id)
        >>> names = Names()
        >>> try:
        ...     with PolicyTransaction() as transaction:
        ...         transaction.add(names, PolicyAddition("p"), MappingAndTrainable())
        ...         raise RuntimeError("another worker refused")
        ... except RuntimeError:
        ...     print(names)
        []
    """

    def __init__(self) -> None:
        self._rollback_stack = ExitStack()

    def __enter__(self) -> PolicyTransaction:
        return self

    def add(
        self, holder: PolicyHolder[_Result], addition: PolicyAddition, previous: MappingAndTrainable
    ) -> _Result:
        """Adds a policy to a worker, or to several.

        Args:
            holder: the worker or workers.
            addition: the policy; its id must be new there.
            previous: the present mapping and trained policies, which an error restores.

        Returns:
            The result of `workers.apply`.
        """
        self._rollback_stack.callback(holder.revert, addition.policy_id, previous)
        return holder.apply(addition)

    def __exit__(
        self,
        kind: object,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        if error is None:
            self._rollback_stack.pop_all()
        self._rollback_stack.close()
