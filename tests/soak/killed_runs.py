"""Each algorithm killed in the middle and resumed: `python -m soak.killed_runs`.

Each is trained twice with the same seed, from the same script: once without interruption, and once
in processes that are killed (SIGKILL) at random moments after a checkpoint was written, until the
last one is left to end. Episodes restart at checkpoints, and checkpoints hold the replay buffer. In
the end policies (weights, optimizers, generators, counters), replay buffers and the counters of the
runs must be equal to the bit. Prints a line per algorithm; exits with 1 if one differs.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from helpers.differences import find_differences
from helpers.scripts import parse_options

STEPS = 1600
PRIORITIZED = {"type": "MultiAgentPrioritizedReplayBuffer", "capacity": 500}
UNIFORM = {"type": "MultiAgentReplayBuffer", "capacity": 500}
_REPLAY = {
    "train_batch_size": 32,
    "num_steps_sampled_before_learning_starts": 100,
    "store_buffer_in_checkpoints": True,
    "replay_buffer_config": UNIFORM,
}
_PRIORITIZED = {**_REPLAY, "replay_buffer_config": PRIORITIZED}
_DISTRIBUTIONAL = {"num_atoms": 11, "v_min": 0.0, "v_max": 100.0}
_RAINBOW = {**_PRIORITIZED, **_DISTRIBUTIONAL, "noisy": True, "dueling": True, "double_q": True}
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "PPO": ("PPO", "CartPole-v1", {"train_batch_size": 80, "sgd_minibatch_size": 40}),
    "PG": ("PG", "CartPole-v1", {"train_batch_size": 80}),
    "A2C": ("A2C", "CartPole-v1", {"train_batch_size": 80}),
    "MARWIL": ("MARWIL", "CartPole-v1", {"train_batch_size": 80}),
    "BC": ("BC", "CartPole-v1", {"train_batch_size": 80}),
    "DQN": ("DQN", "CartPole-v1", {**_REPLAY, "n_step": 3}),
    "DQN by priorities": ("DQN", "CartPole-v1", {**_PRIORITIZED, "n_step": 3}),
    "Rainbow": ("DQN", "CartPole-v1", {**_RAINBOW, "n_step": 3}),
    "SAC": ("SAC", "Pendulum-v1", _REPLAY),
    "SAC, Discrete": ("SAC", "CartPole-v1", _REPLAY),
    "TD3": ("TD3", "Pendulum-v1", _REPLAY),
    "DDPG": ("DDPG", "Pendulum-v1", _PRIORITIZED),
}
"""What is trained: its algorithm, its environment and its training settings, by name."""


def train(name: str, folder: str) -> None:
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


def kill(name: str, folder: Path, kills: int, rng: random.Random) -> int:
    """Trains a run in processes that are killed, and returns how many were in the middle."""
    done = 0
    for _ in range(kills):
        before = _checkpoint_time(folder)
        process = _start(name, folder)
        while process.poll() is None and _checkpoint_time(folder) == before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.3))
        process.kill()
        done += process.wait() != 0
    _finish(name, folder)
    return done


def _checkpoint_time(folder: Path) -> int:
    """Returns when the newest checkpoint of a run was written, 0 before there is one."""
    manifest = folder / "checkpoints" / "latest" / "algorithm.json"
    return manifest.stat().st_mtime_ns if manifest.exists() else 0


def _start(name: str, folder: Path) -> subprocess.Popen[bytes]:
    code = "import sys; from soak.killed_runs import train; train(*sys.argv[1:])"
    command = [sys.executable, "-c", code, name, str(folder)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1])


def _finish(name: str, folder: Path) -> None:
    process = _start(name, folder)
    if process.wait():
        raise RuntimeError(f"{name} in {folder} ended with status {process.returncode}.")


def get_state(folder: Path) -> dict[str, Any]:
    from tfpolicies import Algorithm

    algorithm = Algorithm.from_checkpoint(folder / "checkpoints" / "latest")
    state = {
        "policy": algorithm.get_policy().get_state(),
        "counters": algorithm.counters,
        "iteration": algorithm.iteration,
        "extra": algorithm.get_extra_state(),
    }
    algorithm.stop()
    return state


def main() -> int:
    kills = (3, "of each algorithm")
    options = parse_options(__doc__, kills=kills, seed=(0, "of the moments"), only=list(RUNS))
    rng, differs = random.Random(options.seed), False
    for name in options.only:
        with tempfile.TemporaryDirectory() as place:
            whole, resumed = Path(place) / "whole", Path(place) / "resumed"
            _finish(name, whole)
            count = kill(name, resumed, options.kills, rng)
            differences = list(find_differences(get_state(whole), get_state(resumed)))
        differs |= bool(differences)
        words = f"differs at {'; '.join(differences[:5])}" if differences else "equal to the bit"
        print(f"{name}: killed {count} times in the middle, {words}", flush=True)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
