"""BC and MARWIL from recordings of experts: normalised scores of greedy episodes.

    score = (return - random) / (expert - random)

The expert is a run of `tfpolicies train ENV --algo ALGO`, with tuned settings. Its greedy episodes
are recorded, and those of a policy that draws actions uniformly:

    python -m benchmarks.imitation CartPole-v1 RUN --folder data
    python -m benchmarks.imitation HalfCheetah-v5 RUN --folder data --rows 100000 --seeds 3
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies import Algorithm, BCConfig, MARWILConfig
from tfpolicies.offline.parquet_writer import write_table

EPISODES = 200
SETTINGS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"epochs": 20, "marwil": {"norm": 100.0, "beta": 1.0}},
    "Pendulum-v1": {"epochs": 20, "marwil": {"norm": 2e3, "beta": 1.0}},
    "HalfCheetah-v5": {"epochs": 40, "marwil": {"norm": 1e4, "beta": 1.0}},
}
"""Passes over the data; about the mean of squared advantages, and beta."""


def play(env_name: str, rows: int, act: Any, num_envs: int = 16) -> dict[str, np.ndarray]:
    """Returns whole episodes of at least `rows` steps; `act(obs)` gives actions `[N, ...]`."""
    envs = [gym.make(env_name) for _ in range(num_envs)]
    observations = [env.reset(seed=1000 + i)[0] for i, env in enumerate(envs)]
    episodes: list[dict[str, Any]] = []
    running: list[list[Any]] = [[] for _ in envs]
    while sum(len(x["rewards"]) for x in episodes) < rows:
        actions = act(np.stack(observations))
        for i, env in enumerate(envs):
            observation, reward, terminated, truncated, _ = env.step(actions[i])
            running[i].append((observations[i], actions[i], reward, terminated, truncated))
            observations[i] = observation
            if terminated or truncated:
                columns = zip(*running[i], strict=True)
                names = ("obs", "actions", "rewards", "terminateds", "truncateds")
                episode = {x: np.array(column) for x, column in zip(names, columns, strict=True)}
                episode["new_obs"] = np.concatenate([episode["obs"][1:], observation[None]])
                episodes.append(episode)
                running[i], observations[i] = [], env.reset()[0]
    result = {name: np.concatenate([x[name] for x in episodes]) for name in (*names, "new_obs")}
    lengths = [len(x["rewards"]) for x in episodes]
    result["eps_id"] = np.repeat(np.arange(len(lengths)), lengths)
    result["t"] = np.concatenate([np.arange(n) for n in lengths])
    result["rewards"] = result["rewards"].astype(np.float32)
    return result


def get_returns(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the return of each episode."""
    return np.bincount(columns["eps_id"], columns["rewards"])


def record(env_name: str, run: str, folder: Path, rows: int) -> dict[str, float]:
    """Writes recordings of the expert, of random actions, and of both; returns their returns."""
    from tfpolicies.cli.run_lookup import find_checkpoint

    expert = Algorithm.from_checkpoint(find_checkpoint(run))
    policy = expert.get_policy()
    act = policy.driver.acting

    def act_greedily(observations: np.ndarray) -> np.ndarray:
        env_actions, _ = act.act([observations.astype(np.float32)], explore=False)
        return np.array(env_actions)

    env = gym.make(env_name)
    env.action_space.seed(0)

    def act_randomly(observations: np.ndarray) -> np.ndarray:
        return np.array([env.action_space.sample() for _ in observations])

    spaces = policy.observation_space, policy.action_space
    expert_rows = play(env_name, rows, act_greedily)
    random_rows = play(env_name, rows, act_randomly)
    expert.stop()
    write_table(folder / "expert.parquet", expert_rows, spaces)
    half = rows // 2
    mixed = []
    for i, columns in enumerate((expert_rows, random_rows)):
        last = columns["eps_id"][half - 1]
        part = {name: x[columns["eps_id"] <= last] for name, x in columns.items()}
        part["eps_id"] = 2 * part["eps_id"] + i
        mixed.append(part)
    both = {name: np.concatenate([x[name] for x in mixed]) for name in mixed[0]}
    write_table(folder / "mixed.parquet", both, spaces)
    returns = {
        "expert": float(get_returns(expert_rows).mean()),
        "random": float(get_returns(random_rows).mean()),
    }
    (folder / "returns.json").write_text(json.dumps(returns))
    return returns


def train(env_name: str, kind: str, data: Path, seed: int) -> tuple[float, float]:
    """Returns the mean return of greedy episodes, and the seconds of training."""
    options = SETTINGS[env_name]
    config = BCConfig() if kind == "BC" else MARWILConfig()
    config.offline_data(input_=str(data)).environment(env_name)
    config.rollouts(observation_filter="MeanStdFilter")
    config.training(lr=1e-3, train_batch_size=2000, sgd_minibatch_size=250, num_sgd_iter=1)
    # One standard deviation for all states: otherwise it hides errors where few rows are.
    is_continuous = env_name != "CartPole-v1"
    config.training(model={"vf_share_layers": False, "free_log_std": is_continuous})
    if kind == "MARWIL":
        norm = options["marwil"]["norm"]
        config.training(
            beta=options["marwil"]["beta"],
            moving_average_sqd_adv_norm_start=norm,
        )
    config.evaluation(evaluation_duration=EPISODES, evaluation_config={"explore": False})
    algorithm = config.debugging(seed=seed, log_level="ERROR").build()
    rows = 100_000
    start = time.perf_counter()
    for _ in range(math.ceil(options["epochs"] * rows / 2000)):
        algorithm.train()
    seconds = time.perf_counter() - start
    result = algorithm.evaluate(seed=seed)["evaluation"]["episode_reward_mean"]
    algorithm.stop()
    return float(result), seconds


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("run")
    parser.add_argument("--folder", type=Path, default=Path("data"))
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    folder = args.folder / args.env
    folder.mkdir(parents=True, exist_ok=True)
    returns = record(args.env, args.run, folder, args.rows)
    low, high = returns["random"], returns["expert"]
    print(f"{args.env}: expert {high:.1f}, random {low:.1f}")
    for kind, data in (("BC", "expert"), ("BC", "mixed"), ("MARWIL", "mixed")):
        scores = []
        for seed in range(args.seeds):
            result, seconds = train(args.env, kind, folder / f"{data}.parquet", seed)
            scores.append((result - low) / (high - low))
            print(f"  {kind} {data} seed {seed}: {result:.1f} {scores[-1]:.3f} ({seconds:.0f} s)")
        print(f"{kind:6} on {data:6}: score {np.mean(scores):.3f} (least {min(scores):.3f})")


if __name__ == "__main__":
    main()
