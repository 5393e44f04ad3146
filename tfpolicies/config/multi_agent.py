"""Multi-agent settings: policies, policy mapping function and trained policies."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from tfpolicies.base.allowlist import allow_in_checkpoint
from tfpolicies.base.validators import BOOL, POSITIVE_INT, function, one_of
from tfpolicies.config.base_config import BaseConfig
from tfpolicies.config.live_dict import copy_containers
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID, PolicySpec, validate_policy_id
from tfpolicies.config.sections import CONNECTORS, encode_connectors
from tfpolicies.config.setting import Section, check, setting
from tfpolicies.errors import ConfigError, UsageError, show_value

TrainPredicate = Callable[..., bool] | None
MappingFn = Callable[..., str]

SpecArgument = PolicySpec | tuple[Any, ...] | list[Any]
PoliciesArgument = Mapping[str, SpecArgument] | Collection[str]


@allow_in_checkpoint("policy_mapping_fn")
def default_policy_mapping(
    agent_id: Hashable, episode: object = None, worker: object = None, **kwargs: object
) -> str:
    """Returns `DEFAULT_POLICY_ID`, whatever the agent.

    >>> default_policy_mapping("car_1", None, worker=None)
    'default_policy'
    """
    return DEFAULT_POLICY_ID


_OBSERVATION_FN = function(
    "a function (agent_obs, worker, base_env, policies, episode) -> observations"
).or_none()


_DEFAULT_POLICIES: Mapping[str, PolicySpec] = {DEFAULT_POLICY_ID: PolicySpec()}


@dataclass(frozen=True, kw_only=True)
class MultiAgentSettings(Section):
    """Multi-agent settings; `AlgorithmConfig.multi_agent` documents them."""

    policies: Mapping[str, PolicySpec] = field(default_factory=lambda: _DEFAULT_POLICIES)
    policy_map_capacity: int = setting(100, POSITIVE_INT)  # policies with their variables in memory
    policy_mapping_fn: MappingFn = setting(
        default_policy_mapping, normalize=lambda x: default_policy_mapping if x is None else x
    )
    policies_to_train: Collection[str] | TrainPredicate = None  # None: all
    policy_states_are_swappable: bool = setting(False, BOOL)
    observation_fn: Callable[..., Mapping[Any, Any]] | None = setting(None, _OBSERVATION_FN)
    count_steps_by: str = setting("env_steps", one_of("env_steps", "agent_steps"))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "policies", make_policy_specs(self.policies))
        require_mapping_fn(self.policy_mapping_fn)
        as_predicate(self.policies_to_train)


def make_policy_specs(policies: PoliciesArgument) -> dict[str, PolicySpec]:
    """Converts policies, in any form that `AlgorithmConfig.multi_agent` takes, to specs by id.

    Ids of a set are sorted, so that a run does not depend on the hash seed of the process.

    >>> make_policy_specs(["a"]) == {"a": PolicySpec()}
    True
    >>> make_policy_specs({"a": (None, None, None, None)}) == {"a": PolicySpec()}
    True
    """
    if not isinstance(policies, Mapping | list | tuple | set | frozenset):
        raise ConfigError(
            "policies must be a list, set or tuple of policy ids, or a dict {id: PolicySpec or "
            f"(class, observation_space, action_space, config)}}, got {show_value(policies)}."
        )
    ids = sorted(policies, key=str) if isinstance(policies, set | frozenset) else list(policies)
    for policy_id in ids:
        validate_policy_id(policy_id, error=True)  # before it is hashed
    specs = policies if isinstance(policies, Mapping) else dict.fromkeys(ids, PolicySpec())
    return {policy_id: _make_policy_spec(policy_id, specs[policy_id]) for policy_id in ids}


def _make_policy_spec(policy_id: str, spec: SpecArgument) -> PolicySpec:
    location = f"policies[{policy_id!r}]"
    if not isinstance(spec, PolicySpec):
        if not isinstance(spec, list | tuple) or len(spec) != 4:
            raise ConfigError(
                "Policy specs must be tuples/lists of (class, observation_space, action_space, "
                f"config), or PolicySpecs; {location} is {show_value(spec)}."
            )
        spec = PolicySpec(*spec)
    config = spec.config
    if isinstance(config, BaseConfig):
        config = config.settings_for(type(config))  # all of them
    for name, expected_type, rule in (
        ("policy_class", type, "a class of policies or None"),
        ("observation_space", gym.Space, "a gymnasium space or None"),
        ("action_space", gym.Space, "a gymnasium space or None"),
        ("config", Mapping, "a dict or AlgorithmConfig, or None"),
    ):
        value = config if name == "config" else getattr(spec, name)
        check(value is None or isinstance(value, expected_type), f"{location}.{name}", rule, value)
    if config is not None:
        config = _encode_connectors(location, copy_containers(config))
    return dataclasses.replace(spec, config=config)


def _encode_connectors(location: str, config: dict[str, Any]) -> dict[str, Any]:
    states = {
        name: encode_connectors(f"{location}.config[{name!r}]", connector_class, config[name])
        for name, connector_class in CONNECTORS.items()
        if name in config
    }
    return {**config, **states}


def require_mapping_fn(policy_mapping_fn: MappingFn | None) -> None:
    """Raises a `ConfigError` unless it is None or a function with the required signature."""
    if policy_mapping_fn is None:
        return
    rule = "policy_mapping_fn must be a function (agent_id, episode, worker, **kwargs) -> policy_id"
    if not callable(policy_mapping_fn):
        raise ConfigError(f"{rule}, got {show_value(policy_mapping_fn)}.")
    try:
        signature = inspect.signature(policy_mapping_fn)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind("agent", None, worker=None)
    except TypeError as error:
        name = getattr(policy_mapping_fn, "__qualname__", repr(policy_mapping_fn))
        raise ConfigError(f"{rule}, got {name}{signature}: {error}.") from None


def as_predicate(policies_to_train: Collection[str] | TrainPredicate) -> TrainPredicate:
    """Returns the predicate of trained policies, `f(policy_id, batch=None)`; None for all.

    Args:
        policies_to_train: a list, set or tuple of ids, such a function, or None.

    >>> as_predicate(["main"])("main"), as_predicate([])("main")
    (True, False)
    """
    if policies_to_train is None or callable(policies_to_train):
        return policies_to_train
    is_collection = isinstance(policies_to_train, list | set | tuple | frozenset)
    if not is_collection or not all(isinstance(policy_id, str) for policy_id in policies_to_train):
        raise UsageError(
            "policies_to_train must be a list, set or tuple of policy ids, or a function "
            "(policy_id, batch=None) -> bool, or None for all; got "
            f"{show_value(policies_to_train)}."
        )
    return _IdPredicate(frozenset(policies_to_train))


def is_surely_trained(policy_id: str, predicate: TrainPredicate) -> bool:
    """Returns whether a policy is certain to be trained, whatever the batch."""
    return predicate is None or (isinstance(predicate, _IdPredicate) and predicate(policy_id))


@dataclass(frozen=True)
class _IdPredicate:
    """Returns True for some ids; unlike a nested function it can be pickled."""

    ids: frozenset[str]

    def __call__(self, policy_id: str, batch: object = None) -> bool:
        return policy_id in self.ids
