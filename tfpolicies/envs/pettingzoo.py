"""PettingZoo's environments as `MultiAgentEnv`: parallel ones and turn-based (AEC) ones.

Observations `{"observation": ..., "action_mask": ...}`, as PettingZoo's classic games have them,
become `{"observations": ..., "action_mask": ...}`, the form from which policies read masks.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from gymnasium import spaces

from tfpolicies.envs.multi_agent_env import (
    ALL,
    ByAgent,
    MultiAgentEnv,
    MultiAgentStepResult,
    Options,
)
from tfpolicies.errors import EnvError, suggest_similar_names

PREFIXES = ("pettingzoo", "mpe2")
MPE_MOVED_HINT = (
    " The particle environments (MPE) have a package of their own: pip install mpe2, and name them "
    "'mpe2:simple_spread_v3'."
)
_PETTINGZOO_OBS_KEY, _POLICY_OBS_KEY = "observation", "observations"


def is_pettingzoo_name(name: str) -> bool:
    """Returns True if `pettingzoo_env` accepts a name.

    >>> is_pettingzoo_name("mpe2:simple_spread_v3"), is_pettingzoo_name("my.module:Env")
    (True, False)
    """
    return name.partition(":")[0] in PREFIXES and ":" in name


def is_pettingzoo(env: Any) -> bool:
    """Returns True if an object is an environment of PettingZoo's API, parallel or turn-based."""
    return hasattr(env, "possible_agents") and not isinstance(env, MultiAgentEnv | type)


def pettingzoo_env(env: Any, **settings: object) -> MultiAgentEnv:
    """Returns a PettingZoo environment as a `MultiAgentEnv`.

    Args:
        env: an instance, parallel or turn-based; a creator `f(**settings)` of one; or a name:
            `"pettingzoo:butterfly/pistonball_v6"`, `"mpe2:simple_spread_v3"`. A name selects the
            parallel form if the module has one.
        settings: keyword arguments for the creator.

    Raises:
        EnvError: for an unknown name, a missing package, or an object that is not an environment of
            PettingZoo.
    """
    result = env
    if isinstance(env, str):
        result = get_pettingzoo_creator(env)(**settings)
    elif not is_pettingzoo(env) and callable(env):
        result = env(**settings)
    if not is_pettingzoo(result):
        raise EnvError(
            "A PettingZoo environment has `possible_agents`, but got "
            f"{type(result).__name__}. Give an instance, a creator, or a name such as "
            "'pettingzoo:classic/tictactoe_v3'."
        )
    return (
        TurnBasedPettingZooEnv(result)
        if hasattr(result, "agent_iter")
        else ParallelPettingZooEnv(result)
    )


def get_pettingzoo_creator(name: str) -> Callable[..., Any]:
    """Returns the creator of a name; it is called with the environment's settings.

    Raises:
        EnvError: if the name is unknown, or a package is missing; by the creator, if a package is
            missing that this environment needs.
    """
    package, _, env_id = name.partition(":")
    return (
        _get_registered_creator(env_id)
        if package == "pettingzoo"
        else _import_creator(package, env_id)
    )


def list_registered_names() -> list[str]:
    """Returns the names of PettingZoo's registered environments; importing them may need more."""
    registry = importlib.import_module("pettingzoo").aec_registry
    return [f"pettingzoo:{_to_module_name(registered)}" for registered in registry]


def _to_module_name(registered: str) -> str:
    return re.sub(r"-(v\d+)$", r"_\1", registered)


def _get_registered_creator(name: str) -> Callable[..., Any]:
    """Returns the creator of a registered environment: its parallel form if it has one.

    PettingZoo's ids end in "-v1"; its modules, and the commonly used names, in "_v1".
    """
    try:
        import pettingzoo as package
        from pettingzoo.env_registry.exceptions import PettingZooRegistryError
    except ImportError as error:
        raise EnvError(
            f"'pettingzoo:{name}' needs the package pettingzoo from version 1.27 on: {error}. "
            "Install it: pip install 'pettingzoo>=1.27'."
        ) from error
    registries = {"parallel": package.parallel_registry, "aec": package.aec_registry}
    registry_id = re.sub(r"_(v\d+)$", r"-\1", name)
    form = next((form for form, registry in registries.items() if registry_id in registry), None)
    if form is None:
        registered = [_to_module_name(registered) for registered in package.aec_registry]
        hint = (
            MPE_MOVED_HINT
            if name.partition("/")[0] == "mpe"
            else suggest_similar_names(name, registered)
        )
        raise EnvError(f"No environment {name!r} is registered with PettingZoo.{hint}")

    def create(**settings: object) -> Any:
        try:
            return package.make(form, registry_id, **settings)
        except (ImportError, PettingZooRegistryError) as error:
            why = error if error.__cause__ is None else f"{error.__cause__}. {error}"
            raise EnvError(f"The environment {name!r} could not be made: {why}") from error

    return create


def _import_creator(package: str, name: str) -> Callable[..., Any]:
    try:
        module = importlib.import_module(f"{package}.{name}")
        return module.parallel_env
    except (ImportError, AttributeError) as error:
        raise EnvError(
            f"The environment '{package}:{name}' could not be imported: {error}. Write it as "
            f"'{package}:simple_spread_v3', and install it: pip install {package}."
        ) from error


class _PettingZooEnv(MultiAgentEnv):
    """Base of both forms: spaces by agent id, and masks under the keys that policies read."""

    def __init__(self, env: Any, *, renames_obs: bool = True) -> None:
        self.env = env
        self.metadata = env.metadata
        self.render_mode = getattr(env, "render_mode", None)
        agents = list(env.possible_agents)
        self._agent_ids = set(agents)
        self._agents_with_mask = {
            a for a in agents if renames_obs and _has_mask(env.observation_space(a))
        }
        self.observation_space = spaces.Dict(
            [
                (agent, self._translate_space(agent, env.observation_space(agent)))
                for agent in agents
            ]
        )
        self.action_space = spaces.Dict([(agent, env.action_space(agent)) for agent in agents])

    def _translate_space(self, agent: Hashable, space: Any) -> spaces.Space:
        if agent not in self._agents_with_mask:
            return space
        mask = space["action_mask"]
        return spaces.Dict(
            action_mask=spaces.Box(0, 1, mask.shape, mask.dtype),
            observations=space[_PETTINGZOO_OBS_KEY],
        )

    def _translate_obs(self, obs: Mapping[Any, Any]) -> ByAgent:
        agents_with_mask = self._agents_with_mask
        return {
            agent: {_POLICY_OBS_KEY: x[_PETTINGZOO_OBS_KEY], "action_mask": x["action_mask"]}
            if agent in agents_with_mask
            else x
            for agent, x in obs.items()
        }

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


def _has_mask(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Dict) and set(space) == {_PETTINGZOO_OBS_KEY, "action_mask"}


def _add_all_flags(
    terminateds: ByAgent, truncateds: ByAgent, over: bool
) -> tuple[ByAgent, ByAgent]:
    """Returns the flags with "__all__": truncated only if some agent was, and none terminated."""
    is_truncated = over and any(truncateds.values()) and not any(terminateds.values())
    return {**terminateds, ALL: over and not is_truncated}, {**truncateds, ALL: is_truncated}


class ParallelPettingZooEnv(_PettingZooEnv):
    """A parallel environment of PettingZoo: all living agents act in each step.

    Args:
        env: the PettingZoo environment.
    """

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[ByAgent, ByAgent]:
        obs, infos = self.env.reset(seed=seed, options=options)
        return self._translate_obs(obs), {
            agent: info for agent, info in infos.items() if agent in obs
        }

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        obs, rewards, terminateds, truncateds, infos = self.env.step(action_dict)
        ends = _add_all_flags(terminateds, truncateds, not self.env.agents)
        observed_infos = {agent: info for agent, info in infos.items() if agent in obs}
        return MultiAgentStepResult(self._translate_obs(obs), rewards, *ends, observed_infos)


class TurnBasedPettingZooEnv(_PettingZooEnv):
    """A turn-based (AEC) environment of PettingZoo: one agent observes and acts at a time.

    An agent gets the reward since its last turn together with its next observation. The last
    observations of agents that are done come in the step in which PettingZoo removes them.

    Args:
        env: the PettingZoo environment.
    """

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[ByAgent, ByAgent]:
        self.env.reset(seed=seed, options=options)
        result = self._advance_turn()
        return dict(result.obs), dict(result.infos)

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        agent = self.env.agent_selection
        if agent not in action_dict:
            raise EnvError(
                f"It is the turn of agent {agent!r}, but the actions are of {list(action_dict)}. "
                "Give an action for the agent whose observation came last."
            )
        self.env.step(action_dict[agent])
        return self._advance_turn()

    def _advance_turn(self) -> MultiAgentStepResult:
        """Removes agents that are done, and returns the observation of the next agent."""
        parts: list[ByAgent] = [{} for _ in MultiAgentStepResult._fields]
        obs, rewards, terminateds, truncateds, infos = parts
        while self.env.agents:
            agent = self.env.agent_selection
            obs[agent], rewards[agent], is_terminated, is_truncated, infos[agent] = self.env.last()
            if not (is_terminated or is_truncated):
                break
            terminateds[agent], truncateds[agent] = is_terminated, is_truncated
            self.env.step(None)
        ends = _add_all_flags(terminateds, truncateds, not self.env.agents)
        return MultiAgentStepResult(self._translate_obs(obs), rewards, *ends, infos)
