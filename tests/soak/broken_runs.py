"""Trains runs that are broken in known ways, and sound ones, and shows what the log says of them.

Each broken run differs from a sound one in one thing. It is right if the first warning names that
thing; a sound run is right if there is no warning at all. The cause of a warning is known by a few
words that only it has (`OPTIONS`).

There are two sets: `RUNS`, by which the checks were made, and `HELD_OUT`, which was chosen later.

Run: `python -m soak.broken_runs`; `--sets "held out"` runs only the second set. Exits with 1 if in
one of them more than a sixth of the broken runs, or any sound one, is not right.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import PendulumEnv

from helpers.scripts import parse_options
from tfpolicies import (
    A2CConfig,
    DDPGConfig,
    DQNConfig,
    MultiAgentEnv,
    PGConfig,
    PPOConfig,
    SACConfig,
    TD3Config,
)
from tfpolicies.algorithms.tuned_hyperparameters import get_tuned_settings

WORDS = {
    "horizon": "later rewards of an action do not count",
    "small rate": "so it hardly learns",
    "large steps": "far over kl_target",
    "large rate": "far over the usual",
    "entropy bonus": "the entropy bonus",
    "observations": "observations have magnitude",
    "values explode": "the value function explodes",
    "value errors large": "values are wrong by",
    "same returns": "nothing tells good actions from bad ones",
    "no end": "no episode has ended",
    "value errors clipped": "is above vf_clip_param",
    "few updates": "There is one update per",
}
MOST_WRONG = 1 / 6  # of the broken runs of a set


class Squares(gym.Env):
    """An image whose bright half says which of two actions is rewarded, 20 steps to an episode."""

    observation_space = spaces.Box(0, 255, (16, 16, 1), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.now = 0
        return self._draw(), {}

    def _draw(self) -> np.ndarray:
        self.side = int(self.np_random.integers(2))
        image = np.zeros((16, 16, 1), np.uint8)
        image[:, 8 * self.side : 8 * self.side + 8] = 255
        return image

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        reward, self.now = float(action == self.side), self.now + 1
        return self._draw(), reward, False, self.now == 20, {}


class Scaled(gym.ObservationWrapper):
    """Observations in units that are 100,000 times as small."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-np.inf, np.inf, env.observation_space.shape)

    def observation(self, observation: Any) -> Any:
        return observation * np.float32(1e5)


class Delayed(gym.Env):
    """Pays at the end of 200 steps for the steps in which the action was the observed one."""

    observation_space = spaces.Box(0.0, 1.0, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.now, self.right = 0, 0
        return self._observe(), {}

    def _observe(self) -> np.ndarray:
        self.side = int(self.np_random.integers(2))
        return np.array([self.side, self.now / 200], np.float32)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.right += action == self.side
        self.now += 1
        is_last = self.now == 200
        return self._observe(), float(self.right) if is_last else 0.0, is_last, False, {}


class Two(MultiAgentEnv):
    """Two agents that are rewarded for the observed action; `idle` perhaps for any action."""

    _agent_ids = frozenset(("busy", "idle"))
    observation_space = spaces.Box(0.0, 1.0, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, env_config: Any) -> None:
        super().__init__()
        self.pays_always = env_config["pays_always"]
        self.rng = np.random.default_rng(env_config.vector_index)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.now = 0
        return self._observe(), {}

    def _observe(self) -> dict[str, Any]:
        self.sides = {agent: int(self.rng.integers(2)) for agent in sorted(self._agent_ids)}
        return {agent: np.array([side], np.float32) for agent, side in self.sides.items()}

    def step(self, action_dict: Any) -> Any:
        rewards = {agent: float(action_dict[agent] == self.sides[agent]) for agent in self.sides}
        if self.pays_always:
            rewards["idle"] = 1.0
        self.now += 1
        ends = {"__all__": self.now == 20}
        return self._observe(), rewards, ends, {"__all__": False}, {}


class FastSpeeds(Scaled):
    """One component in units that are 10,000 times as small."""

    def observation(self, observation: Any) -> Any:
        return observation * np.array([1, 1e4, 1, 1], np.float32)


def _endless(_: Any) -> gym.Env:
    return PendulumEnv()


def _scaled(_: Any) -> gym.Env:
    return Scaled(gym.make("Pendulum-v1"))


def _costly(_: Any) -> gym.Env:
    """Makes a pendulum whose rewards are in units that are 10,000 times as small."""
    return gym.wrappers.TransformReward(gym.make("Pendulum-v1"), lambda reward: 1e4 * reward)


Make = Callable[[], Any]


def make_run(
    config_class: Any, env: Any, settings: dict[str, Any], envs: int = 1, **training: Any
) -> Make:
    def make() -> Any:
        config = config_class().environment(env).rollouts(num_envs_per_worker=envs)
        return config.training(**settings).training(**training)

    return make


_MODEL = {"model": {"fcnet_hiddens": [64, 64]}}
_PPO = {"train_batch_size": 2000, "sgd_minibatch_size": 200, "num_sgd_iter": 10, "lr": 3e-4}
_START = {"num_steps_sampled_before_learning_starts": 500}
_ppo = partial(make_run, PPOConfig, settings={**_PPO, **_MODEL}, envs=4)
_a2c = partial(
    make_run, A2CConfig, settings={"train_batch_size": 160, "lr": 1e-3, **_MODEL}, envs=8
)
_dqn = partial(make_run, DQNConfig, settings=_START)
_UNCLIPPED = {"vf_clip_param": float("inf")}


def _tuned(
    config_class: Any,
    env: str = "Pendulum-v1",
    *,
    source: Any = None,
    envs: int = 0,
    **training: Any,
) -> Make:
    """Returns a maker of a run with tuned settings, some of which are changed."""

    def make() -> Any:
        name = config_class.__name__.removesuffix("Config")
        config = config_class().environment(env).update_from_dict(get_tuned_settings(name, env))
        if source is not None:
            config.environment(source)
        if envs:
            config.rollouts(num_envs_per_worker=envs)
        return config.training(**training)

    return make


def _two(*, pays_always: bool) -> Make:
    def make() -> PPOConfig:
        config = _ppo(Two)().environment(env_config={"pays_always": pays_always})
        return config.multi_agent(
            policies=["busy", "idle"], policy_mapping_fn=lambda agent_id, *_, **__: agent_id
        )

    return make


_SMALL = {"train_batch_size": 64, **_START}  # and quick


class Run(NamedTuple):
    """A run: a maker of its config, its steps, and the cause; None for a sound one."""

    make: Make
    steps: int
    cause: str | None = None


_SQUARES = {"conv_filters": [[8, [4, 4], 2], [16, [8, 8], 1]]}
RUNS = {
    "PPO CartPole, gamma=0": Run(_ppo("CartPole-v1", gamma=0.0), 20_000, "horizon"),
    "PPO Pendulum, gamma=0.3": Run(_tuned(PPOConfig, gamma=0.3), 40_000, "horizon"),
    "PPO CartPole, lr=1e-9": Run(_ppo("CartPole-v1", lr=1e-9), 20_000, "small rate"),
    "PPO CartPole, lr=0.3": Run(_ppo("CartPole-v1", lr=0.3), 20_000, "large steps"),
    "PPO CartPole, entropy_coeff=5": Run(
        _ppo("CartPole-v1", entropy_coeff=5.0), 20_000, "entropy bonus"
    ),
    "PPO Pendulum, observations x 1e5": Run(
        _tuned(PPOConfig, source=_scaled), 40_000, "observations"
    ),
    "DQN CartPole, lr=0.3": Run(_dqn("CartPole-v1", lr=0.3), 6_000, "large rate"),
    "PPO Pendulum, rewards x 1e4": Run(_ppo(_costly, **_UNCLIPPED), 40_000, "value errors large"),
    "PPO MountainCar": Run(_ppo("MountainCar-v0"), 40_000, "same returns"),
    "PPO Pendulum without time limit": Run(_ppo(_endless), 60_000, "no end"),
    "PPO Pendulum, vf_clip_param=10": Run(_ppo("Pendulum-v1"), 40_000, "value errors clipped"),
    "DQN CartPole, 16 environments": Run(_dqn("CartPole-v1", envs=16), 10_000, "few updates"),
    "sound: PPO CartPole": Run(_tuned(PPOConfig, "CartPole-v1"), 50_000),
    "sound: PPO Pendulum": Run(_tuned(PPOConfig), 100_000),
    "sound: DQN CartPole": Run(_tuned(DQNConfig, "CartPole-v1"), 20_000),
    "sound: SAC Pendulum": Run(_tuned(SACConfig), 10_000),
    "sound: PPO on images": Run(_ppo(Squares, model=_SQUARES), 20_000),
}

_LSTM = {"fcnet_hiddens": [32], "use_lstm": True, "lstm_cell_size": 32}
_MINATAR = {"conv_filters": [[16, [3, 3], 1]], "post_fcnet_hiddens": [64]}
HELD_OUT = {
    "PPO Acrobot, gamma=0.2": Run(_tuned(PPOConfig, "Acrobot-v1", gamma=0.2), 60_000, "horizon"),
    "PPO with pay after 200 steps, gamma=0.8": Run(
        _ppo(Delayed, gamma=0.8, **_UNCLIPPED), 40_000, "horizon"
    ),
    "DQN Acrobot, lr=1e-7": Run(_dqn("Acrobot-v1", lr=1e-7), 10_000, "small rate"),
    "SAC Pendulum, lr=1e-7": Run(_tuned(SACConfig, lr=1e-7, **_SMALL), 9_000, "small rate"),
    "A2C CartPole, lr=1e-8": Run(_a2c("CartPole-v1", lr=1e-8), 30_000, "small rate"),
    "PPO Pendulum, entropy_coeff=1": Run(
        _tuned(PPOConfig, entropy_coeff=1.0), 60_000, "entropy bonus"
    ),
    "A2C CartPole, entropy_coeff=20": Run(
        _a2c("CartPole-v1", entropy_coeff=20.0), 30_000, "entropy bonus"
    ),
    "A2C CartPole, one observation x 1e4": Run(
        _a2c(lambda _: FastSpeeds(gym.make("CartPole-v1"))), 30_000, "observations"
    ),
    "TD3 Pendulum, rewards x 1e4": Run(
        _tuned(TD3Config, source=_costly, **_SMALL), 9_000, "value errors large"
    ),
    "DQN MountainCar": Run(_dqn("MountainCar-v0", envs=4), 22_000, "same returns"),
    "TD3 Pendulum without time limit": Run(
        _tuned(TD3Config, source=_endless, **_SMALL), 12_000, "no end"
    ),
    "SAC Pendulum, 16 environments": Run(_tuned(SACConfig, envs=16), 20_000, "few updates"),
    "PPO LunarLander, lr=0.1": Run(
        _ppo("LunarLander-v3", lr=0.1, **_UNCLIPPED), 30_000, "large steps"
    ),
    "DDPG Pendulum, lr=0.1": Run(
        _tuned(DDPGConfig, actor_lr=0.1, critic_lr=0.1, **_SMALL), 9_000, "large rate"
    ),
    "PPO, one of two agents is always paid": Run(_two(pays_always=True), 20_000, "same returns"),
    "sound: PPO FrozenLake": Run(
        _ppo(lambda _: gym.make("FrozenLake-v1", is_slippery=False)), 30_000
    ),
    "sound: PPO Pendulum of 1,000 steps": Run(
        _tuned(PPOConfig, source=lambda _: gym.make("Pendulum-v1", max_episode_steps=1000)), 80_000
    ),
    "sound: SAC Pendulum, early": Run(_tuned(SACConfig, **_SMALL), 3_000),
    "sound: DQN LunarLander, early": Run(_tuned(DQNConfig, "LunarLander-v3"), 5_000),
    "sound: PPO CartPole, LSTM": Run(_ppo("CartPole-v1", model=_LSTM), 20_000),
    "sound: PPO MinAtar Breakout": Run(_ppo("MinAtar/Breakout-v1", model=_MINATAR), 20_000),
    "sound: PG CartPole": Run(make_run(PGConfig, "CartPole-v1", {}, envs=4), 30_000),
    "sound: TD3 Pendulum": Run(_tuned(TD3Config, **_SMALL), 10_000),
    "sound: PPO, two agents": Run(_two(pays_always=False), 20_000),
}
"""Chosen after the rules and their thresholds were set."""


class Outcome(NamedTuple):
    lines: list[str]
    at_steps: int  # when the first line came
    mean_return: float
    seconds: float


def train(run: Run, seed: int) -> Outcome:
    lines: list[str] = []
    handler, began, at_steps = logging.Handler(logging.WARNING), time.perf_counter(), 0
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("tfpolicies")
    logger.addHandler(handler)
    try:
        algorithm = run.make().debugging(seed=seed).build()
        while algorithm.counters["num_env_steps_sampled"] < run.steps:
            result = algorithm.train()
            if lines and not at_steps:
                at_steps = result["num_env_steps_sampled"]
        algorithm.stop()
    finally:
        logger.removeHandler(handler)
    mean = result["recent_returns"]["mean"]
    return Outcome(lines, at_steps, mean, time.perf_counter() - began)


def get_cause(line: str) -> str:
    return next((name for name, words in WORDS.items() if words in line), line[:60])


def main() -> int:
    sets = {"known": RUNS, "held out": HELD_OUT}
    options = parse_options(
        __doc__,
        only=("", "a part of the names of runs"),
        seed=0,
        lines=(False, "print the warnings, too"),
        sets=list(sets),
    )
    logging.getLogger("tfpolicies").propagate = False
    is_good = [run_set(name, sets[name], options) for name in options.sets]
    return int(not all(is_good))


def run_set(title: str, runs: dict[str, Run], options: argparse.Namespace) -> bool:
    """Trains the runs of a set, prints what they showed, and returns whether enough is right."""
    print(f"{title}: run | cause | warnings, in order | at step | return | s | right")
    right = {True: [], False: []}
    for name, run in runs.items():
        if options.only not in name:
            continue
        outcome = train(run, options.seed)
        causes = [get_cause(line) for line in outcome.lines]
        is_right = causes[:1] == ([run.cause] if run.cause else [])
        right[run.cause is None].append(is_right)
        figures = [f"{outcome.at_steps:,}" if causes else "", f"{outcome.mean_return:.4g}"]
        cells = [name, run.cause or "none", ", ".join(causes) or "none", *figures]
        cells += [f"{outcome.seconds:.0f}", "yes" if is_right else "NO"]
        print(" | ".join(cells), flush=True)
        if options.lines:
            print(*(f"    {line}" for line in outcome.lines), sep="\n", flush=True)
    broken, sound = right[False], right[True]
    print(f"{sum(broken)} of {len(broken)} broken runs have the true cause in their first warning;")
    print(f"{sum(sound)} of {len(sound)} sound runs have no warning.")
    return broken.count(False) <= MOST_WRONG * len(broken) and all(sound)


if __name__ == "__main__":
    sys.exit(main())
