"""RLlib's old TensorFlow stack (2.10) in the town of `examples/traffic_grid.py`.

Variant "tf2" is the traced eager policy, "tf1" the graph policy. Run by `multi_agent`.
"""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import probe

probe.hush()

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import gymnasium as gym  # noqa: E402
import tensorflow as tf  # noqa: E402
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.rllib.algorithms.ppo.ppo_tf_policy import PPOTF1Policy, PPOTF2Policy  # noqa: E402
from ray.rllib.env.multi_agent_env import MultiAgentEnv  # noqa: E402
from ray.rllib.evaluation.rollout_worker import RolloutWorker  # noqa: E402
from traffic_grid import (  # noqa: E402
    CAR_SPACE,
    KEEP_OR_SWITCH,
    LIGHT_SPACE,
    STAY_OR_GO,
    TrafficGrid,
)

tf.get_logger().setLevel("ERROR")


class Town(MultiAgentEnv):
    """The same environment as `examples/traffic.py` has."""

    def __init__(self, num_cars: int) -> None:
        super().__init__()
        self._town = TrafficGrid(num_cars)
        cars, lights = self._town.cars, self._town.lights
        self._agent_ids = {*cars, *lights}
        self.observation_space = gym.spaces.Dict(
            {**dict.fromkeys(cars, CAR_SPACE), **dict.fromkeys(lights, LIGHT_SPACE)}
        )
        self.action_space = gym.spaces.Dict(
            {**dict.fromkeys(cars, STAY_OR_GO), **dict.fromkeys(lights, KEEP_OR_SWITCH)}
        )
        self._obs_space_in_preferred_format = self._action_space_in_preferred_format = True
        self._rng = np.random.default_rng()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        return self._town.reset(self._rng), {}

    def step(self, action_dict: Any) -> Any:
        observations, rewards, over = self._town.step(action_dict)
        return observations, rewards, {"__all__": False}, {"__all__": over}, {}


def sampling(request: probe.Request) -> probe.Figures:
    settings = request.settings
    framework, policy_class = {"tf1": ("tf", PPOTF1Policy), "tf2": ("tf2", PPOTF2Policy)}[
        request.variant
    ]
    if framework == "tf":
        tf.compat.v1.disable_eager_execution()

    def mapping(agent_id: str, episode: Any, **kwargs: Any) -> str:
        return f"car_policy{random.randint(1, 2)}" if agent_id.startswith("car_") else "lights"

    car = (policy_class, CAR_SPACE, STAY_OR_GO)
    config = (
        PPOConfig()
        .framework(framework, eager_tracing=True)
        .rollouts(
            num_rollout_workers=0,
            num_envs_per_worker=settings["copies"],
            rollout_fragment_length=settings["fragment"],
        )
        .training(model={"fcnet_hiddens": probe.HIDDEN})
        .multi_agent(
            policies={
                "car_policy1": (*car, {"gamma": 0.99}),
                "car_policy2": (*car, {"gamma": 0.95}),
                "lights": (policy_class, LIGHT_SPACE, KEEP_OR_SWITCH, {}),
            },
            policy_mapping_fn=mapping,
        )
        .debugging(seed=request.seed, log_level="ERROR")
    )
    worker = RolloutWorker(env_creator=lambda context: Town(settings["cars"]), config=config)
    return {"steps": probe.rate(lambda: worker.sample().env_steps(), request.seconds)}


if __name__ == "__main__":
    probe.serve(["ray", "tensorflow-cpu", "gymnasium", "numpy"], {"traffic": sampling})
