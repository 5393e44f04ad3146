"""Small multi-agent environments whose observations tell where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies import MultiAgentEnv, Policy
from tfpolicies.batch.postprocessing import generalized_advantages
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.rollout.multi_agent_sampler import MultiAgentSampler

SPACE = spaces.Box(-1.0, 1e6, (3,), np.float32)
THREE = spaces.Discrete(3)
GAMMA, LAMBDA = 0.75, 0.5


class World(MultiAgentEnv):
    """An environment whose observations are (number of the agent, episode, time)."""

    observation_space = SPACE
    action_space = THREE
    _agent_ids = ("a", "b", "c", "d")

    def __init__(self, config: Any = None) -> None:
        self.episode = -1
        self.now = 0
        self.seeds: list[int | None] = []
        self.acted: list[dict[Any, Any]] = []

    def obs(self, *agents: str) -> dict[str, np.ndarray]:
        return {
            agent: np.array(["abcd".index(agent), self.episode, self.now], np.float32)
            for agent in agents
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.seeds.append(seed)
        self.episode, self.now = self.episode + 1, 0
        return self.first(), {}

    def first(self) -> dict[str, Any]:
        return self.obs("a", "b")

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        self.acted.append(dict(action_dict))
        self.now += 1
        return self.play(action_dict)

    def play(self, actions: Mapping[Any, Any]) -> Any:
        raise NotImplementedError


def flags(over: bool = False, **agents: bool) -> dict[str, bool]:
    return {**agents, "__all__": over}


class Staggered(World):
    """Seven steps; "a" observes after each, "b" after every second and at the end.

    So an episode has 7 + 4 transitions. Everybody earns 1 in every step.
    """

    def play(self, actions: Mapping[Any, Any]) -> Any:
        over = self.now == 7
        seen = self.obs("a", "b") if over or self.now % 2 == 0 else self.obs("a")
        return seen, {"a": 1.0, "b": 1.0}, flags(over), flags(), {}


class Scripted(World):
    """Plays what it is given: for each step obs of agents, rewards, terminated, truncated, infos.

    `script` is a list of (agents that observe, rewards, terminateds, truncateds[, infos]).
    """

    def __init__(self, script: list[tuple], first: tuple[str, ...] = ("a", "b")) -> None:
        super().__init__()
        self.script, self.starting = script, first

    def first(self) -> dict[str, Any]:
        return self.obs(*self.starting)

    def play(self, actions: Mapping[Any, Any]) -> Any:
        agents, rewards, terminateds, truncateds, *infos = self.script[self.now - 1]
        return (
            self.obs(*agents),
            rewards,
            flags(**terminateds) if "__all__" not in terminateds else terminateds,
            flags(**truncateds) if "__all__" not in truncateds else truncateds,
            infos[0] if infos else {},
        )


class Crowd(World):
    """Agents come, wait, leave and end at random; the environment keeps the true transitions.

    `truth[(episode, agent)]` is a list of (obs, action, reward, new_obs, t, terminated, truncated)
    """

    def __init__(self, number: int, seed: int) -> None:
        super().__init__()
        self.number = number
        self.rng = np.random.default_rng(seed)
        self.truth: dict[tuple[int, str], list[tuple]] = {}

    def first(self) -> dict[str, Any]:
        self.done: set[str] = set()
        self.open: dict[str, list] = {}
        self.last: dict[str, np.ndarray] = {}
        self.steps = 0
        agents = [x for x in "abcd" if self.rng.random() < 0.5] or ["a"]
        return self.see(agents)

    def see(self, agents: list[str]) -> dict[str, Any]:
        seen = self.obs(*agents)
        for x in seen.values():
            x[0] += 10 * self.number
        self.last.update(seen)
        self.waiting = set(seen) - self.done
        return seen

    def play(self, actions: Mapping[Any, Any]) -> Any:
        assert set(actions) == self.waiting
        for agent, action in actions.items():
            self.open[agent] = [self.last[agent], action, 0.0]
        rewards = {x: float(self.rng.integers(1, 9)) for x in "abcd" if self.rng.random() < 0.6}
        for agent, reward in rewards.items():
            if agent in self.open:
                self.open[agent][2] += reward
        agents = [x for x in "abcd" if x not in self.done and self.rng.random() < 0.6]
        seen_before = set(self.last)
        ends = {
            x: self.rng.random() < 0.5
            for x in "abcd"
            if x not in self.done and x in seen_before | set(agents) and self.rng.random() < 0.1
        }
        draw = self.rng.random()
        possible = self.steps + len(self.open) > 0
        all_end, all_cut = draw < 0.1 and possible, 0.1 <= draw < 0.2 and possible
        seen = self.see(agents)
        for agent in [*self.open]:
            ended = all_end or ends.get(agent, False)
            cut = all_cut or (agent in ends and not ends[agent])
            if agent in seen or ended or cut:
                obs, action, reward = self.open.pop(agent)
                new = seen.get(agent, obs)
                row = (*obs, action, reward, *new, self.now - 1, ended, cut)
                self.truth.setdefault((self.episode, agent), []).append(row)
                self.steps += 1
        self.done |= set(ends)
        self.waiting -= self.done
        terminateds = {x: True for x, ended in ends.items() if ended}
        truncateds = {x: True for x, ended in ends.items() if not ended}
        return seen, rewards, flags(all_end, **terminateds), flags(all_cut, **truncateds), {}


def value_of(obs: Any) -> np.ndarray:
    """A value that tells observations apart and is exact in float32."""
    return (np.asarray(obs) @ np.array([0.5, 0.25, 0.125]) + 1.0).astype(np.float32)


class Walker(Policy):
    """Acts at random, knows a value, and estimates advantages from it."""

    def __init__(
        self, observation_space: Any = SPACE, action_space: Any = THREE, config: Any = None, seed=0
    ):
        super().__init__(observation_space, action_space, config or {"seed": seed})
        self.rng = np.random.default_rng(self.config["seed"])
        self.calls: list[int] = []

    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        self.calls.append(len(obs_batch))
        actions = self.rng.integers(3, size=len(obs_batch))
        return ActionBatch(actions, [], {"vf_preds": value_of(obs_batch)})

    def compute_values(self, inputs):
        return value_of(inputs[0])

    def postprocess_fragments(self, fragments):
        reached = fragments.get_next_values()
        advantages, targets = generalized_advantages(
            fragments.columns["rewards"],
            fragments.columns["vf_preds"],
            reached,
            fragments.columns["terminateds"],
            fragments.ends,
            gamma=GAMMA,
            lambda_=LAMBDA,
        )
        fragments.new_columns.update(
            advantages=advantages, value_targets=targets, values_bootstrapped=reached
        )


def own_policy(agent_id: str, episode: Any, **kwargs: Any) -> str:
    """The policy of an agent: "p" for a and b, "q" for the others."""
    return "p" if agent_id in ("a", "b") else "q"


def sampler_of(
    *envs: MultiAgentEnv,
    policies: Any = None,
    mapping: Any = own_policy,
    rollout_fragment_length: int = 200,
    batch_mode: str = "truncate_episodes",
    count_steps_by: str = "env_steps",
    seed: int = 0,
    **settings: Any,
) -> MultiAgentSampler:
    """Returns a sampler whose episodes have begun; settings are named as in a config."""
    sampler = MultiAgentSampler(
        MultiAgentEnvAdapter(envs),
        {"p": Walker(), "q": Walker(seed=1)} if policies is None else policies,
        SimpleNamespace(policy_mapping_fn=mapping),
        fragment_length=rollout_fragment_length,
        complete_episodes=batch_mode == "complete_episodes",
        count_agent_steps=count_steps_by == "agent_steps",
        rng=np.random.default_rng(seed),
        **settings,
    )
    sampler.reset(None)
    return sampler
