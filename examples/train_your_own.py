"""Your own `keras.Model` on your own Gymnasium environment: train, watch and export it.

    python examples/train_your_own.py

writes `exported/`: the learning curve, a SavedModel, an ONNX file and a checkpoint.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import keras
import numpy as np

from tfpolicies import PPOConfig
from tfpolicies.reporting.learning_curve import draw_learning_curve
from tfpolicies.reporting.progress_row import make_progress_row


class Corridor(gym.Env):
    """A corridor with a door at the right end; the reward is -0.1 per step, and 1 at the door."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)  # left, right
    length, max_steps = 10, 30

    def __init__(self, config: Any = None) -> None:
        self.position = self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position, self.steps = int(self.np_random.integers(self.length)), 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.position, self.steps = (
            max(0, self.position + (1 if action == 1 else -1)),
            self.steps + 1,
        )
        at_door = self.position == self.length
        reward = 1.0 if at_door else -0.1
        return self._observation(), reward, at_door, self.steps == self.max_steps, {}

    def _observation(self) -> np.ndarray:
        return np.array([self.position / self.length], np.float32)


def train_and_export(folder: str = "exported", iterations: int = 20) -> float:
    model = keras.Sequential([keras.layers.Dense(32, "tanh"), keras.layers.Dense(2)])
    config = PPOConfig().environment(Corridor).rollouts(num_envs_per_worker=8)
    config.training(model=model, lr=3e-3, train_batch_size=512, num_sgd_iter=10, entropy_coeff=0.02)
    algorithm, rows = config.build(), []
    for _ in range(iterations):
        rows.append(make_progress_row(algorithm.train()))
        print("{env_steps:6,} steps, mean return {episode_reward_mean:.2f}".format(**rows[-1]))
    algorithm.save(f"{folder}/checkpoint")
    algorithm.get_policy().export_model(f"{folder}/saved_model")
    algorithm.get_policy().export_model(f"{folder}/onnx", onnx=True)
    draw_learning_curve(rows, f"{folder}/learning_curve.png", title="PPO in the corridor")
    return rows[-1]["episode_reward_mean"]


if __name__ == "__main__":
    train_and_export()
