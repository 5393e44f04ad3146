"""Stable-Baselines3's PPO update on images (torch, CPU), with the network of `update_forms`.

Run by `python -m benchmarks.updates.compile_modes --sb3`; by hand: `SB3_PYTHON peer_sb3_images.py
images`.
"""

import time
import warnings
from typing import Any

import numpy as np

from benchmarks import probe

probe.hush()

import gymnasium as gym  # noqa: E402
import torch  # noqa: E402
from stable_baselines3 import PPO  # noqa: E402
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

ROWS, MINIBATCH, EPOCHS, ENVS = 256, 64, 2, 8
SHAPE = (4, 84, 84)


class Frames(gym.Env):
    """Random images that never end."""

    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, False, {}


class Convolutions(BaseFeaturesExtractor):
    """The default filters of tfpolicies for 84 x 84: 16 of 8 x 8, 32 of 4 x 4, 256 of 11 x 11."""

    def __init__(self, space: gym.Space) -> None:
        super().__init__(space, 256)
        self.layers = torch.nn.Sequential(
            torch.nn.ZeroPad2d(2),
            torch.nn.Conv2d(SHAPE[0], 16, 8, 4),
            torch.nn.ReLU(),
            torch.nn.ZeroPad2d((1, 2, 1, 2)),
            torch.nn.Conv2d(16, 32, 4, 2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 256, 11, 1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def images(request: probe.Request) -> probe.Figures:
    """Returns the ms of one update: with all cores, and with SB3's own network."""
    same = {
        "features_extractor_class": Convolutions,
        "share_features_extractor": False,
        "net_arch": [],
    }
    return {
        "same network": _update_ms("CnnPolicy", same),
        "SB3's default network": _update_ms("CnnPolicy", {}),
    }


def _update_ms(policy: str, network: dict[str, Any]) -> float:
    settings = {"n_steps": ROWS // ENVS, "batch_size": MINIBATCH, "n_epochs": EPOCHS, "seed": 0}
    env = DummyVecEnv([Frames] * ENVS)
    model = PPO(policy, env, device="cpu", policy_kwargs=network, **settings)
    _, callback = model._setup_learn(10**9)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, ROWS // ENVS)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        model.train()
        times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times[1:]))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    probe.serve(["stable-baselines3", "torch", "gymnasium", "numpy"], {"images": images})
