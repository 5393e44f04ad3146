"""Completes policy specs from multi-agent settings: class, spaces and config of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym

from tfpolicies.config.base_config import BaseConfig
from tfpolicies.config.live_dict import is_equal
from tfpolicies.config.policy_spec import PolicySpec
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.config.search_spaces import has_search_space, require_values
from tfpolicies.errors import ConfigError, show_value

_SPACES = ("observation_space", "action_space")
_ENV_KEY = "__env__"

UPDATE_SETTINGS = ("num_sgd_iter", "sgd_minibatch_size", "shuffle_sequences")
"""The settings of an update that each policy has for itself."""

_RUN_SECTIONS = (
    *("rollouts", "multi_agent", "resources", "evaluation", "debugging", "reporting"),
    *("checkpointing", "fault_tolerance", "offline_data", "python_environment"),
)
_READ_BY_POLICIES = (
    *("observation_filter", "reward_filter", "agent_connectors", "action_connectors"),
    *("enable_connectors", "num_gpus", "in_evaluation", "seed", "on_nan", "check_inputs"),
    *("export_native_model_files", "policies", "policy_mapping_fn"),
)
"""Settings of `_RUN_SECTIONS` that may differ between policies."""
_OTHER_RUN_SETTINGS = (
    *("disable_env_checking", "env_task_fn"),
    *("train_batch_size", "max_requests_in_flight_per_sampler_worker", "training_intensity"),
    *("target_network_update_freq", "num_steps_sampled_before_learning_starts"),
    *("replay_buffer_config", "store_buffer_in_checkpoints", "before_learn_on_batch"),
)

Spaces = tuple[gym.Space[Any] | None, gym.Space[Any] | None]  # of observations, of actions
_ByAgent = Mapping[Any, gym.Space[Any]] | gym.spaces.Dict


def make_policy_config(
    config: BaseConfig, policy_id: str, policy_class: type | None, overrides: Mapping[str, Any]
) -> BaseConfig:
    """Returns the complete config of one policy: a copy of `config` with the overrides.

    It has the `config_class` of the policy's class, if there is one. Overrides for a custom policy
    class without `config_class` may have names that are not settings; they are kept. Multi-agent
    settings are set to their defaults.
    """
    named_class = (
        type(config) if policy_class is None else getattr(policy_class, "config_class", None)
    )
    config_class: Any = named_class or type(config)
    result: BaseConfig
    try:
        if isinstance(config, config_class):
            result = config.copy_for_policy()
        else:
            result = config_class().update_from_dict(config.settings_for(config_class))
        if named_class is None:
            custom_settings = {key: value for key, value in overrides.items() if key not in result}
            overrides = {key: value for key, value in overrides.items() if key in result}
            result.add_custom_settings(custom_settings)
        require_values({key: value for key, value in overrides.items() if has_search_space(value)})
        return result.update_from_dict(overrides)
    except ConfigError as error:
        raise ConfigError(f"policies[{policy_id!r}].config: {error}") from error


def require_policy_settings(
    config: BaseConfig, policy_id: str, spec: PolicySpec, default_class: type | None
) -> None:
    """Checks that the overrides of a policy take effect.

    Policies of custom classes may read any setting. A complete config may have default values.

    Args:
        config: of the algorithm.
        policy_id: of the policy.
        spec: of the policy.
        default_class: the class of policies without an explicit one.

    Raises:
        ConfigError: for a setting of the whole run with another value than the algorithm's, or
            minibatches larger than train batches.
    """
    names = _find_run_settings(config, policy_id, spec, default_class)
    if names:
        overrides = _by_canonical_name(config, spec.config)
        values = ", ".join(f"{name}={show_value(overrides[name])}" for name in names)
        present = ", ".join(f"{name}={show_value(config[name])}" for name in names)
        raise ConfigError(
            f"policies[{policy_id!r}].config: a single policy cannot have {values}; the "
            f"algorithm's config applies to all policies and has {present}. Set "
            f"{', '.join(names)} on the algorithm's config, and not on the policy's."
        )
    if _has_large_minibatches(config, spec):
        size = _by_canonical_name(config, spec.config)["sgd_minibatch_size"]
        raise ConfigError(
            f"policies[{policy_id!r}].config: sgd_minibatch_size={size} must not be larger than "
            f"train_batch_size={config.train_batch_size} of the algorithm."
        )


def without_run_settings(
    config: BaseConfig, policy_id: str, spec: PolicySpec, default_class: type | None
) -> PolicySpec:
    """Returns a policy's spec without the overrides that `require_policy_settings` rejects."""
    names = _find_run_settings(config, policy_id, spec, default_class)
    if _has_large_minibatches(config, spec):
        names.append("sgd_minibatch_size")
    if not names:
        return spec
    overrides = _by_canonical_name(config, spec.config)
    return replace(spec, config={name: x for name, x in overrides.items() if name not in names})


def _by_canonical_name(config: BaseConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {config._canonical_name(name): value for name, value in overrides.items()}


def _has_large_minibatches(config: BaseConfig, spec: PolicySpec) -> bool:
    size = _by_canonical_name(config, spec.config or {}).get("sgd_minibatch_size")
    has_setting = "sgd_minibatch_size" in config
    return has_setting and isinstance(size, int) and size > config.train_batch_size


def _find_run_settings(
    config: BaseConfig, policy_id: str, spec: PolicySpec, default_class: type | None
) -> list[str]:
    """Returns the overrides without effect, because the algorithm's other values apply."""
    policy_class = spec.policy_class or default_class
    overrides = _by_canonical_name(config, spec.config or {})
    names = [name for name in overrides if is_run_setting(config, name)]
    if spec.policy_class is None and "framework" in overrides:
        names.append("framework")  # which chooses the class of all policies
    if not names or not _is_built_in(policy_class):
        return []
    policy_config = make_policy_config(config, policy_id, policy_class, overrides)
    settings = policy_config._section_by_setting.items()
    is_complete = overrides.keys() >= {x for x, section in settings if section != "multi_agent"}
    default = type(policy_config)() if is_complete else None  # type: ignore[call-arg]
    automatic = config.get_auto_settings()
    return [
        name
        for name in names
        if not is_equal(policy_config[name], config[name])
        and not (default is not None and is_equal(policy_config[name], default[name]))
        and not (name in automatic and policy_config[name] == "auto")
    ]


def is_run_setting(config: BaseConfig, name: str) -> bool:
    """Returns whether the algorithm's value of a setting applies to all policies."""
    if name == "clip_rewards":  # policies clip recorded rewards, and samplers all others
        return needs_environment(config.input_)
    section = config._section_by_setting.get(name)
    if section in _RUN_SECTIONS:
        return name not in _READ_BY_POLICIES
    return section is not None and name in _OTHER_RUN_SETTINGS


def _is_built_in(policy_class: Any) -> bool:
    """Returns whether a policy's class has a config and no base class of another package."""
    classes = [] if policy_class is None else policy_class.__mro__
    own_classes = [x for x in classes if x.__module__.partition(".")[0] == "tfpolicies"]
    others = {x.__module__ for x in classes if x not in own_classes}
    return hasattr(policy_class, "config_class") and others <= {"builtins", "abc", "typing"}


@dataclass(frozen=True)
class SpaceResolver:
    """Resolves the spaces of policies whose specs have none."""

    config: BaseConfig
    env: Any
    spaces: Mapping[str, Spaces]
    policy_mapping_fn: Callable[..., str]

    def get_space(self, policy_id: str, i: int) -> gym.Space[Any] | None:
        """Returns a policy's observation (0) or action (1) space."""
        given_space = self.spaces.get(policy_id, (None, None))[i]
        if given_space is not None:
            return given_space
        name = _SPACES[i]
        space = self._get_env_space(i)
        if space is None:
            space = self.config[name]
        if space is None:
            raise ConfigError(
                f"{name} not provided for policy {policy_id!r}: give an environment, the space in "
                f"its PolicySpec, spaces={{...}}, or config.environment({name}=...)."
            )
        agents = _get_agent_ids(self.env)
        if isinstance(space, Mapping | gym.spaces.Dict) and agents and set(space.keys()) == agents:
            return self._get_agents_space(policy_id, name, space)
        return space

    def _get_env_space(self, i: int) -> gym.Space[Any] | None:
        if self.env is None:
            return self.spaces[_ENV_KEY][i] if _ENV_KEY in self.spaces else None
        single = getattr(self.env, f"single_{_SPACES[i]}", None)
        return getattr(self.env, _SPACES[i], None) if single is None else single

    def _get_agents_space(
        self, policy_id: str, name: str, by_agent: _ByAgent
    ) -> gym.Space[Any] | None:
        """Returns the space of the agents of a policy; None if it has no agents."""
        all_spaces = list(by_agent.values())
        if all(space == all_spaces[0] for space in all_spaces):
            return all_spaces[0]
        policy_spaces: dict[Any, gym.Space[Any]] = {
            agent: space
            for agent, space in by_agent.items()
            if self._get_policy_id(agent) == policy_id
        }
        distinct_spaces = list(policy_spaces.values())
        if any(space != distinct_spaces[0] for space in distinct_spaces):
            raise ConfigError(
                f"Policy {policy_id!r} acts for agents with different {name}s: {policy_spaces}. "
                "Map them to several policies, by multi_agent(policies=..., "
                f"policy_mapping_fn=...), or give the policy's {name} in its PolicySpec."
            )
        return distinct_spaces[0] if distinct_spaces else None

    def _get_policy_id(self, agent: Hashable) -> str:
        try:
            policy_id: str = self.policy_mapping_fn(agent, None, worker=None)
            return policy_id
        except Exception as error:
            raise ConfigError(
                "policy_mapping_fn is called without an episode and a worker to infer the "
                f"spaces of policies, but policy_mapping_fn({agent!r}, None, worker=None) raised "
                f"{error!r}. Let it work without them, or give the spaces in the PolicySpecs."
            ) from error


def _get_agent_ids(env: object) -> set[Any]:
    """Returns the ids of all agents of an environment; empty if single-agent or unknown."""
    if hasattr(env, "get_agent_ids"):
        return set(env.get_agent_ids())
    return set(getattr(env, "possible_agents", None) or ())
