"""tfpolicies' side of the learning benchmark: one cell in a process of its own.

Run by `benchmarks.learning.run_cells`, which gives the request as JSON.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import probe
from benchmarks.learning import greedy

probe.hush()

import gymnasium as gym  # noqa: E402

import tfpolicies  # noqa: E402
from tfpolicies.algorithms.algorithm_registry import find_algorithm  # noqa: E402

ITERATIONS = 100  # about so many, each a point of the curve
CHECKPOINT_EVERY = 10  # iterations
_PACKAGES = ("tensorflow", "keras", "onnxruntime", "gymnasium", "numpy")


def trained(request: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Trains, or trains on where the run folder ends, and plays greedy episodes."""
    algorithm = config_of(request).build()
    clock, cpu = time.perf_counter(), time.process_time()
    algorithm.learn(
        request["steps"], run_dir=run_dir, progress=False, checkpoint_every=CHECKPOINT_EVERY
    )
    figures = {
        "wall_seconds": time.perf_counter() - clock,
        "cpu_seconds": time.process_time() - cpu,
        "curve": curve_of(run_dir / "progress.csv"),
        "returns": returns_of(algorithm, request["env"]),
    }
    algorithm.stop()
    return figures


def config_of(request: dict[str, Any]) -> Any:
    """Returns the config of a cell."""
    config = find_algorithm(request["algorithm"]).get_default_config()
    config.environment(request["env"]).update_from_dict(request["settings"])
    config.reporting(
        min_time_s_per_iteration=0,
        min_sample_timesteps_per_iteration=request["steps"] // ITERATIONS,
    )
    config.evaluation(
        evaluation_duration=greedy.EPISODES, evaluation_config={"explore": False}
    ).debugging(seed=request["seed"], log_level="ERROR")
    if "replay_buffer_config" in request["settings"]:
        config.training(store_buffer_in_checkpoints=True)
    return config


def returns_of(algorithm: Any, env: str) -> list[float]:
    """Returns those of greedy episodes, in environments of EnvPool by its own seeds."""
    if env.startswith("envpool:"):
        return list(algorithm.evaluate()["evaluation"]["hist_stats"]["episode_reward"])
    return greedy.returns_of(gym.make(env), greedy_actor(algorithm))


def greedy_actor(algorithm: Any) -> Callable[[Any], Any]:
    """Returns a function from an observation to the action without exploration."""
    return lambda obs: algorithm.compute_single_action(obs, explore=False)


def curve_of(progress: Path) -> list[tuple[float, float]]:
    """Returns environment steps and the mean return of the last training episodes."""
    with progress.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(float(row["env_steps"]), float(row["episode_reward_mean"])) for row in rows]


def main() -> None:
    """Trains the cell that the command line names and prints one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("request", type=json.loads)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    if options.request["env"].startswith("MinAtar/"):
        import minatar.gym

        minatar.gym.register_envs()
    figures = trained(options.request, options.folder / "run")
    versions = {name: metadata.version(name) for name in _PACKAGES}
    versions["tfpolicies"] = tfpolicies.__version__
    json.dump({**figures, "versions": versions}, sys.stdout)


if __name__ == "__main__":
    main()
