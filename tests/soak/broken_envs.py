"""What a user sees of an environment that is broken: the error, and the log where it goes on.

Run: `python -m soak.broken_envs`
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from tfpolicies import MultiAgentEnv, PPOConfig, PPOTF2Policy, RolloutWorker

KINDS = (
    "raises in reset",
    "raises in step",
    "observation of a wrong shape",
    "observation with NaN",
    "reward of NaN",
    "four values instead of five",
    "hangs for a second",
    "observation of an agent that is done",
    "infos of an unknown agent",
    "no '__all__'",
)
ONE_AGENT = KINDS[:7]
SEVERAL = (*KINDS[:5], *KINDS[6:])


class Lander(gym.Env):
    """Ten steps to an episode; breaks once, in step 3 of the second episode."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)
    lives = 0

    def __init__(self, config: Any) -> None:
        self.kind, self.episode, self.life = config["kind"], -1, Lander.lives
        Lander.lives += 1

    def breaks(self, kind: str) -> bool:
        """Whether now is the moment for a kind of failure."""
        return self.kind == kind and self.episode == 1 and self.life == 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.episode, self.now = self.episode + 1, 0
        if self.breaks("raises in reset"):
            raise ConnectionError("the simulator is gone")
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        self.now += 1
        obs, reward = np.full(2, self.now / 10, np.float32), 1.0
        if self.now == 3:
            if self.breaks("raises in step"):
                raise ZeroDivisionError("the wind was not defined")
            if self.breaks("observation of a wrong shape"):
                obs = np.zeros(3, np.float32)
            if self.breaks("observation with NaN"):
                obs = np.array([0.3, np.nan], np.float32)
            if self.breaks("reward of NaN"):
                reward = float("nan")
            if self.breaks("four values instead of five"):
                return obs, reward, False, {}
            if self.breaks("hangs for a second"):
                time.sleep(1.0)
        return obs, reward, self.now == 10, False, {}


class Landers(MultiAgentEnv):
    """Two agents in one `Lander`."""

    observation_space, action_space = Lander.observation_space, Lander.action_space
    _agent_ids = ("left", "right")

    def __init__(self, config: Any) -> None:
        self.inner = Lander(config)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        obs, _ = self.inner.reset(seed=seed)
        return {"left": obs, "right": obs}, {}

    def step(self, action_dict: Mapping[Any, Any]) -> Any:
        inner = self.inner
        obs, reward, over, _, _ = inner.step(0)
        ends, infos = {"__all__": over}, {}
        if inner.now == 2 and inner.breaks("observation of an agent that is done"):
            ends["left"] = True
        if inner.now == 3 and inner.breaks("infos of an unknown agent"):
            infos = {"middle": {}}
        if inner.now == 3 and inner.breaks("no '__all__'"):
            ends = {}
        seen = {"left": np.zeros(2, np.float32), "right": obs}
        return seen, {"left": 1.0, "right": reward}, ends, {"__all__": False}, infos


def worker_of(source: Any, kind: str, *, restart: bool) -> RolloutWorker:
    """Returns a worker with one environment of that kind."""
    Lander.lives = 0
    config = (
        PPOConfig()
        .environment(env_config={"kind": kind})
        .framework("tf2", inference="tf", jit_compile=False)
        .training(model={"fcnet_hiddens": [4]})
        .rollouts(rollout_fragment_length=10)
        .fault_tolerance(restart_failed_sub_environments=restart, env_step_timeout_s=0.5)
    )
    return RolloutWorker(env_creator=source, config=config, default_policy_class=PPOTF2Policy)


def main() -> None:
    logging.basicConfig(stream=sys.stdout, format="    log: %(message).2000s")
    for source, kinds in ((Lander, ONE_AGENT), (Landers, SEVERAL)):
        for kind in kinds:
            print(f"\n{source.__name__}: {kind}")
            worker = worker_of(source, kind, restart=False)
            try:
                for _ in range(4):
                    worker.sample()
                print("    no error")
            except Exception as error:
                print(f"    {type(error).__name__}: {error}")
                for note in getattr(error, "__notes__", []):
                    print(f"    {note}")
            worker.stop()
            worker = worker_of(source, kind, restart=True)
            steps = sum(worker.sample().env_steps() for _ in range(5))
            faulty = sum(m.episode_faulty for m in worker.get_metrics())
            print(f"    with restarts: {steps} steps sampled, {faulty} faulty episodes")
            worker.stop()


if __name__ == "__main__":
    main()
