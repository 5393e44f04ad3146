"""The main job in Python: train PPO on CartPole-v1, export the policy, play with the export.

    python examples/cartpole_main_job.py

`tfpolicies train CartPole-v1 --until 475 --export --play 100` does the same, with a progress bar,
TensorBoard events, checkpoints during training and `--resume`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tfpolicies import Algorithm, PPOConfig
from tfpolicies.algorithms.tuned_hyperparameters import get_tuned_settings

ENV = "CartPole-v1"


def train(target: float, max_steps: int, *, seed: int = 0) -> Algorithm:
    """Trains until the mean return of the last 100 episodes is at least `target`."""
    config = PPOConfig().update_from_dict(get_tuned_settings("PPO", ENV))
    algorithm: Algorithm = config.environment(ENV).debugging(seed=seed).build()
    while algorithm.counters["num_env_steps_sampled"] < max_steps:
        result = algorithm.train()
        if result["training_iteration"] % 20 == 0:
            print(f"{result['timesteps_total']:7,} steps: {result['episode_reward_mean']:.1f}")
        if result["episodes_total"] >= 100 and result["episode_reward_mean"] >= target:
            break
    return algorithm


def play_exported(folder: Path, episodes: int) -> float:
    """Plays with the ONNX file in a process that imports neither TensorFlow nor this package."""
    command = [sys.executable, "-I", str(folder / "play.py"), "--env", ENV, "--json"]
    command += ["--episodes", str(episodes), "--seed", "1"]
    completed = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(completed.stdout)["mean_return"])


def main(
    folder: Path = Path("exported"),
    target: float = 475.0,
    max_steps: int = 500_000,
    episodes: int = 100,
) -> float:
    algorithm = train(target, max_steps)
    algorithm.save(folder / "checkpoint")
    policy = algorithm.get_policy()
    policy.export_model(folder / "saved_model")
    policy.export_model(folder / "onnx", onnx=True)
    algorithm.stop()
    mean_return = play_exported(folder / "onnx", episodes)
    print(f"{folder / 'onnx'} played {episodes} episodes: mean return {mean_return:.1f}")
    return mean_return


if __name__ == "__main__":
    main()
