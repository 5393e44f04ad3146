"""Policies of Stable-Baselines3 as ONNX files, as its documentation shows how to export them.

By hand: `SB3_PYTHON tools/peer_sb3_onnx.py FOLDER`, in an environment that also has onnx and
onnxscript. Writes `ppo.onnx`, of logits, `sac.onnx`, of actions in [-1, 1], and `expected.npz`:
observations, and what `predict` of the policies gives for them.
"""

import argparse
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO, SAC

ROWS = 200
SMALL = {"net_arch": [8, 6]}


class Logits(torch.nn.Module):
    """The logits of a policy for Discrete actions."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observation: Any) -> Any:
        return self.policy.get_distribution(observation).distribution.logits


class Actions(torch.nn.Module):
    """The greedy actions of SAC, which are in [-1, 1]."""

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, observation: Any) -> Any:
        return self.actor(observation, deterministic=True)


def export(module: torch.nn.Module, size: int, output: str, path: Path) -> None:
    """Writes a module that takes vectors of a size."""
    torch.onnx.export(
        module,
        (torch.zeros(1, size),),
        str(path),
        input_names=["observation"],
        output_names=[output],
        dynamic_axes={"observation": {0: "batch"}, output: {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    results = {}
    ppo = PPO("MlpPolicy", gym.make("CartPole-v1"), policy_kwargs=SMALL, seed=0, device="cpu")
    sac = SAC("MlpPolicy", gym.make("Pendulum-v1"), policy_kwargs=SMALL, seed=0, device="cpu")
    for name, model, size in (("ppo", ppo, 4), ("sac", sac, 3)):
        obs = rng.normal(size=(ROWS, size)).astype(np.float32)
        results[f"{name}_obs"] = obs
        results[f"{name}_actions"] = model.predict(obs, deterministic=True)[0]
    export(Logits(ppo.policy).eval(), 4, "logits", folder / "ppo.onnx")
    export(Actions(sac.actor).eval(), 3, "action", folder / "sac.onnx")
    np.savez_compressed(folder / "expected.npz", **results)


if __name__ == "__main__":
    main()
