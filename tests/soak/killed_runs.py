"""Each algorithm killed in the middle and resumed: `python -m soak.killed_runs`.

Each is trained twice with the same seed, from the same script: once without interruption, and once
in processes that are killed (SIGKILL) at random moments after a checkpoint was written, until the
last one is left to end. Episodes begin anew at checkpoints, and checkpoints hold the replay buffer.
In the end policies (weights, optimizers, generators, counters), replay buffers and the counters of
the runs must be equal to the bit. Prints a line per algorithm; exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfpolicies.storage.segment_files import Segment

STEPS = 1600
PRIORITIZED = {"type": "MultiAgentPrioritizedReplayBuffer", "capacity": 500}
UNIFORM = {"type": "MultiAgentReplayBuffer", "capacity": 500}
_REPLAY = {
    "train_batch_size": 32,
    "num_steps_sampled_before_learning_starts": 100,
    "store_buffer_in_checkpoints": True,
    "replay_buffer_config": UNIFORM,
}
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "PPO": ("PPO", "CartPole-v1", {"train_batch_size": 80, "sgd_minibatch_size": 40}),
    "PG": ("PG", "CartPole-v1", {"train_batch_size": 80}),
    "A2C": ("A2C", "CartPole-v1", {"train_batch_size": 80}),
    "DQN": ("DQN", "CartPole-v1", {**_REPLAY, "n_step": 3}),
    "DQN by priorities": (
        "DQN",
        "CartPole-v1",
        {**_REPLAY, "replay_buffer_config": PRIORITIZED, "n_step": 3},
    ),
    "Rainbow": (
        "DQN",
        "CartPole-v1",
        {
            **_REPLAY,
            "replay_buffer_config": PRIORITIZED,
            "n_step": 3,
            "num_atoms": 11,
            "v_min": 0.0,
            "v_max": 100.0,
            "noisy": True,
            "dueling": True,
            "double_q": True,
        },
    ),
    "SAC": ("SAC", "Pendulum-v1", _REPLAY),
    "SAC, Discrete": ("SAC", "CartPole-v1", _REPLAY),
    "TD3": ("TD3", "Pendulum-v1", _REPLAY),
    "DDPG": ("DDPG", "Pendulum-v1", {**_REPLAY, "replay_buffer_config": PRIORITIZED}),
}
"""What is trained: its algorithm, its environment and its training settings, by name."""


def train(name: str, folder: Path) -> None:
    """Trains a run to its end, from where its folder says."""
    from tfpolicies.algorithms.algorithm_registry import find_algorithm

    algo, env, settings = RUNS[name]
    config = find_algorithm(algo).config_class().environment(env).training(**settings)
    config.training(model={"fcnet_hiddens": [16]}).rollouts(num_envs_per_worker=4)
    if algo in ("DQN", "SAC", "TD3", "DDPG"):
        config.rollouts(rollout_fragment_length=5)
    config.reporting(min_sample_timesteps_per_iteration=80, min_time_s_per_iteration=0)
    config.checkpointing(reset_episodes_at_checkpoint=True).debugging(seed=7, log_level="ERROR")
    algorithm = config.build()
    algorithm.learn(STEPS, run_dir=folder, checkpoint_every=2, progress=False)
    algorithm.stop()


def killed(name: str, folder: Path, kills: int, rng: random.Random) -> int:
    """Trains a run in processes that are killed, and returns how many were in the middle."""
    done = 0
    for _ in range(kills):
        before = _checkpoint_time(folder)
        process = _started(name, folder)
        while process.poll() is None and _checkpoint_time(folder) == before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.3))
        process.kill()
        done += process.wait() != 0
    _finished(name, folder)
    return done


def _checkpoint_time(folder: Path) -> int:
    """Returns when the newest checkpoint of a run was written, 0 before there is one."""
    manifest = folder / "checkpoints" / "latest" / "algorithm.json"
    return manifest.stat().st_mtime_ns if manifest.exists() else 0


def _started(name: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "soak.killed_runs", "--train", name, str(folder)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1])


def _finished(name: str, folder: Path) -> None:
    process = _started(name, folder)
    if process.wait():
        raise RuntimeError(f"{name} in {folder} ended with status {process.returncode}.")


def differences(one: Path, other: Path) -> list[str]:
    """Returns what differs in the last checkpoints of two runs."""
    results = [dict(_state_of(folder)) for folder in (one, other)]
    names = results[0].keys() | results[1].keys()
    return sorted(name for name in names if not _are_equal(*(x.get(name) for x in results)))


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool(_same(one, other))
    return bool(one == other)


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() == other.tobytes()


def _state_of(folder: Path) -> Iterator[tuple[str, Any]]:
    from tfpolicies import Algorithm

    algorithm = Algorithm.from_checkpoint(folder / "checkpoints" / "latest")
    state = {
        "policy": algorithm.get_policy().get_state(),
        "counters": algorithm.counters,
        "iteration": algorithm.iteration,
        "extra": algorithm.get_extra_state(),
    }
    algorithm.stop()
    yield from _leaves("", state)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{path}/{key}", part)
    elif isinstance(value, Segment):
        yield from _leaves(path, value.get_arrays())
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _leaves(f"{path}/{i}", part)
    else:
        yield path, value


def main() -> int:
    """Trains what the command line names; returns 1 if a resumed run differs."""
    options = _parse()
    if options.train:
        train(options.train[0], Path(options.train[1]))
        return 0
    rng, differs = random.Random(options.seed), False
    for name in options.only or RUNS:
        with tempfile.TemporaryDirectory() as place:
            whole, resumed = Path(place) / "whole", Path(place) / "resumed"
            _finished(name, whole)
            kills = killed(name, resumed, options.kills, rng)
            result = differences(whole, resumed)
        differs |= bool(result)
        words = f"differs in {', '.join(result[:5])}" if result else "equal to the bit"
        print(f"{name}: killed {kills} times in the middle, {words}", flush=True)
    return int(differs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m soak.killed_runs", description=__doc__)
    parser.add_argument("--kills", type=int, default=3, help="of each algorithm")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--only", nargs="+", choices=RUNS, help="some of them")
    parser.add_argument("--train", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
