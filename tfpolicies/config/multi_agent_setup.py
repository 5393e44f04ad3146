"""Completes policy specs from multi-agent settings: class, spaces and config of each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from tfpolicies.config.search_spaces import has_search_space, require_values
from tfpolicies.config.sectioned import SectionedConfig
from tfpolicies.errors import ConfigError

_SPACES = ("observation_space", "action_space")
_ENV = "__env__"

Spaces = tuple[gym.Space[Any] | None, gym.Space[Any] | None]  # of observations, of actions
_ByAgent = Mapping[Any, gym.Space[Any]] | gym.spaces.Dict


def policy_config(
    config: SectionedConfig, policy_id: str, policy_class: type | None, overrides: Mapping[str, Any]
) -> SectionedConfig:
    """Returns the complete config of one policy: a copy of `config` with the overrides.

    It has the `config_class` of the policy's class, if there is one. Overrides for a custom policy
    class without `config_class` may have names that are not settings; they are kept. Multi-agent
    settings are set to their defaults.

    Raises:
        ConfigError: for an override that is unknown or invalid, naming the policy.
    """
    wanted = type(config) if policy_class is None else getattr(policy_class, "config_class", None)
    kind: Any = wanted or type(config)
    made: SectionedConfig
    try:
        if isinstance(config, kind):
            made = config.copy_for_policy()
        else:
            made = kind().update_from_dict(config.settings_for(kind))
        if wanted is None:
            foreign = {key: value for key, value in overrides.items() if key not in made}
            overrides = {key: value for key, value in overrides.items() if key in made}
            made.add_foreign(foreign)
        require_values({key: value for key, value in overrides.items() if has_search_space(value)})
        return made.update_from_dict(overrides)
    except ConfigError as error:
        raise ConfigError(f"policies[{policy_id!r}].config: {error}") from error


@dataclass(frozen=True)
class SpaceSources:
    """Resolves the spaces of policies whose specs have none."""

    config: SectionedConfig
    env: Any
    spaces: Mapping[str, Spaces]

    def space(self, policy_id: str, i: int) -> gym.Space[Any] | None:
        """Returns a policy's observation (0) or action (1) space.

        Raises:
            ConfigError: if there is none, or its agents have different ones.
        """
        own = self.spaces.get(policy_id, (None, None))[i]
        if own is not None:
            return own
        name = _SPACES[i]
        found = self._of_env(i)
        if found is None:
            found = self.config[name]
        if found is None:
            raise ConfigError(
                f"{name} not provided for policy {policy_id!r}: give an environment, the space in "
                f"its PolicySpec, spaces={{...}}, or config.environment({name}=...)."
            )
        agents = _agents(self.env)
        if isinstance(found, Mapping | gym.spaces.Dict) and agents and set(found.keys()) == agents:
            return self._of_agents(policy_id, name, found)
        return found

    def _of_env(self, i: int) -> gym.Space[Any] | None:
        if self.env is None:
            return self.spaces[_ENV][i] if _ENV in self.spaces else None
        single = getattr(self.env, f"single_{_SPACES[i]}", None)
        return getattr(self.env, _SPACES[i], None) if single is None else single

    def _of_agents(self, policy_id: str, name: str, by_agent: _ByAgent) -> gym.Space[Any] | None:
        """Returns the space of the agents of a policy; None if it has no agents."""
        every = list(by_agent.values())
        if all(space == every[0] for space in every):
            return every[0]
        found: dict[Any, gym.Space[Any]] = {
            agent: space for agent, space in by_agent.items() if self._policy_of(agent) == policy_id
        }
        kinds = list(found.values())
        if any(space != kinds[0] for space in kinds):
            raise ConfigError(
                f"Policy {policy_id!r} acts for agents with different {name}s: {found}. Map them "
                "to several policies, by multi_agent(policies=..., policy_mapping_fn=...), or give "
                f"the policy's {name} in its PolicySpec."
            )
        return kinds[0] if kinds else None

    def _policy_of(self, agent: Hashable) -> str:
        try:
            policy_id: str = self.config.policy_mapping_fn(agent, None, worker=None)
            return policy_id
        except Exception as error:
            raise ConfigError(
                "policy_mapping_fn is called without an episode and a worker to infer the "
                f"spaces of policies, but policy_mapping_fn({agent!r}, None, worker=None) raised "
                f"{error!r}. Let it work without them, or give the spaces in the PolicySpecs."
            ) from error


def _agents(env: object) -> set[Any]:
    """Returns the ids of all agents of an environment; empty if single-agent or unknown."""
    if hasattr(env, "get_agent_ids"):
        return set(env.get_agent_ids())
    return set(getattr(env, "possible_agents", None) or ())
