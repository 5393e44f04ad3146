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

from tfpolicies.envs.multi_agent_env import ALL, ByAgent, MultiAgentEnv, MultiAgentStep, Options
from tfpolicies.errors import EnvError, near_matches

PREFIXES = ("pettingzoo", "mpe2")
MOVED = (
    " The particle environments (MPE) have a package of their own: pip install mpe2, and name them "
    "'mpe2:simple_spread_v3'."
)
_THEIRS, _OURS = "observation", "observations"


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
    made = env
    if isinstance(env, str):
        made = pettingzoo_creator(env)(**settings)
    elif not is_pettingzoo(env) and callable(env):
        made = env(**settings)
    if not is_pettingzoo(made):
        raise EnvError(
            "A PettingZoo environment has `possible_agents`, but got "
            f"{type(made).__name__}. Give an instance, a creator, or a name such as "
            "'pettingzoo:classic/tictactoe_v3'."
        )
    return TurnBasedPettingZoo(made) if hasattr(made, "agent_iter") else ParallelPettingZoo(made)


def pettingzoo_creator(name: str) -> Callable[..., Any]:
    """Returns the creator of a name; it is called with the environment's settings.

    Raises:
        EnvError: if the name is unknown, or a package is missing; by the creator, if a package is
            missing that this environment needs.
    """
    package, _, rest = name.partition(":")
    return _registered(rest) if package == "pettingzoo" else _of_module(package, rest)


def _registered(name: str) -> Callable[..., Any]:
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
    own_id = re.sub(r"_(v\d+)$", r"-\1", name)
    form = next((form for form, registry in registries.items() if own_id in registry), None)
    if form is None:
        known = [re.sub(r"-(v\d+)$", r"_\1", known) for known in package.aec_registry]
        moved = MOVED if name.partition("/")[0] == "mpe" else near_matches(name, known)
        raise EnvError(f"No environment {name!r} is registered with PettingZoo.{moved}")

    def create(**settings: object) -> Any:
        try:
            return package.make(form, own_id, **settings)
        except (ImportError, PettingZooRegistryError) as error:
            why = error if error.__cause__ is None else f"{error.__cause__}. {error}"
            raise EnvError(f"The environment {name!r} could not be made: {why}") from error

    return create


def _of_module(package: str, name: str) -> Callable[..., Any]:
    try:
        module = importlib.import_module(f"{package}.{name}")
        return module.parallel_env
    except (ImportError, AttributeError) as error:
        raise EnvError(
            f"The environment '{package}:{name}' could not be imported: {error}. Write it as "
            f"'{package}:simple_spread_v3', and install it: pip install {package}."
        ) from error


class _PettingZoo(MultiAgentEnv):
    """Base of both forms: spaces by agent id, and masks under the keys that policies read."""

    def __init__(self, env: Any, *, renames: bool = True) -> None:
        self.env = env
        self.metadata = env.metadata
        self.render_mode = getattr(env, "render_mode", None)
        agents = list(env.possible_agents)
        self._agent_ids = set(agents)
        self._masked = {a for a in agents if renames and _has_mask(env.observation_space(a))}
        self.observation_space = spaces.Dict(
            [(agent, self._translated(agent, env.observation_space(agent))) for agent in agents]
        )
        self.action_space = spaces.Dict([(agent, env.action_space(agent)) for agent in agents])

    def _translated(self, agent: Hashable, space: Any) -> spaces.Space:
        if agent not in self._masked:
            return space
        mask = space["action_mask"]
        return spaces.Dict(
            action_mask=spaces.Box(0, 1, mask.shape, mask.dtype), observations=space[_THEIRS]
        )

    def _seen(self, obs: Mapping[Any, Any]) -> ByAgent:
        masked = self._masked
        return {
            agent: {_OURS: x[_THEIRS], "action_mask": x["action_mask"]} if agent in masked else x
            for agent, x in obs.items()
        }

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


def _has_mask(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Dict) and set(space) == {_THEIRS, "action_mask"}


def _with_all(terminateds: ByAgent, truncateds: ByAgent, over: bool) -> tuple[ByAgent, ByAgent]:
    """Returns the flags with "__all__": truncated only if some agent was, and none terminated."""
    cut = over and any(truncateds.values()) and not any(terminateds.values())
    return {**terminateds, ALL: over and not cut}, {**truncateds, ALL: cut}


class ParallelPettingZoo(_PettingZoo):
    """A parallel environment of PettingZoo: all living agents act in each step.

    Args:
        env: the PettingZoo environment.
    """

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[ByAgent, ByAgent]:
        obs, infos = self.env.reset(seed=seed, options=options)
        return self._seen(obs), {agent: info for agent, info in infos.items() if agent in obs}

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        obs, rewards, terminateds, truncateds, infos = self.env.step(action_dict)
        ends = _with_all(terminateds, truncateds, not self.env.agents)
        known = {agent: info for agent, info in infos.items() if agent in obs}
        return MultiAgentStep(self._seen(obs), rewards, *ends, known)


class TurnBasedPettingZoo(_PettingZoo):
    """A turn-based (AEC) environment of PettingZoo: one agent observes and acts at a time.

    An agent gets the reward since its last turn together with its next observation. The last
    observations of agents that are done come in the step in which PettingZoo removes them.

    Args:
        env: the PettingZoo environment.
    """

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[ByAgent, ByAgent]:
        self.env.reset(seed=seed, options=options)
        found = self._next_turn()
        return dict(found.obs), dict(found.infos)

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        agent = self.env.agent_selection
        if agent not in action_dict:
            raise EnvError(
                f"It is the turn of agent {agent!r}, but the actions are of {list(action_dict)}. "
                "Give an action for the agent whose observation came last."
            )
        self.env.step(action_dict[agent])
        return self._next_turn()

    def _next_turn(self) -> MultiAgentStep:
        """Removes agents that are done, and returns the observation of the next agent."""
        found: list[ByAgent] = [{} for _ in MultiAgentStep._fields]
        obs, rewards, terminateds, truncateds, infos = found
        while self.env.agents:
            agent = self.env.agent_selection
            obs[agent], rewards[agent], ended, cut, infos[agent] = self.env.last()
            if not (ended or cut):
                break
            terminateds[agent], truncateds[agent] = ended, cut
            self.env.step(None)
        ends = _with_all(terminateds, truncateds, not self.env.agents)
        return MultiAgentStep(self._seen(obs), rewards, *ends, infos)
