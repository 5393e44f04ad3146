"""Completes policy specs from multi-agent settings: class, spaces and config of each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from tfpolicies.config.base_config import BaseConfig
from tfpolicies.config.search_spaces import has_search_space, require_values
from tfpolicies.errors import ConfigError

_SPACES = ("observation_space", "action_space")
_ENV_KEY = "__env__"

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


@dataclass(frozen=True)
class SpaceResolver:
    """Resolves the spaces of policies whose specs have none."""

    config: BaseConfig
    env: Any
    spaces: Mapping[str, Spaces]

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
            policy_id: str = self.config.policy_mapping_fn(agent, None, worker=None)
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
