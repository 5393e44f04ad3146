"""SAC on Pendulum-v1: one environment, one update per step, 20,000 steps.

    python examples/pendulum_sac.py --seed 0

prints the mean return of the last ten episodes during training, then that of 20 greedy ones.
"""

from __future__ import annotations

import argparse

from tfpolicies import SACConfig


def train(steps: int = 20_000, *, seed: int = 0, episodes: int = 20, **training: object) -> float:
    """Trains for `steps` environment steps; returns the mean of `episodes` greedy returns."""
    config = (
        SACConfig()
        .environment("Pendulum-v1")
        .training(num_steps_sampled_before_learning_starts=500, **training)
        .evaluation(evaluation_duration=episodes, evaluation_config={"explore": False})
        .reporting(
            min_time_s_per_iteration=None,
            min_sample_timesteps_per_iteration=1000,
            metrics_num_episodes_for_smoothing=10,
        )
        .debugging(seed=seed)
    )
    algorithm = config.build()
    while algorithm.counters["num_env_steps_sampled"] < steps:
        result = algorithm.train()
        print(f"{result['timesteps_total']:6,} steps: {result['episode_reward_mean']:8.1f}")
    mean_return = float(algorithm.evaluate()["evaluation"]["episode_reward_mean"])
    algorithm.stop()
    print(f"seed {seed}: greedy mean return {mean_return:.1f} of {episodes} episodes")
    return mean_return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    train(options.steps, seed=options.seed, lr=options.lr)


if __name__ == "__main__":
    main()
