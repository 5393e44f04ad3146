"""Stable-Baselines3's SAC and DQN (torch, CPU) in its own interpreter.

Run by `benchmarks.replay.training_steps`; by hand: `SB3_PYTHON benchmarks/replay/peer_sb3_replay.py
sac`, then a number of steps per line.
"""

from collections.abc import Callable
from typing import Any

from benchmarks import probe

probe.hush()

from stable_baselines3 import DQN, SAC  # noqa: E402

FIRST = 1000


def sac(seed: int, updates: int = 1) -> Callable[[int], None]:
    """Returns what does steps of Pendulum-v1, each with so many updates of 256 rows."""
    model = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        gradient_steps=updates,
        buffer_size=100_000,
        learning_starts=FIRST,
        seed=seed,
        device="cpu",
    )
    return _runs(model)


def dqn(seed: int) -> Callable[[int], None]:
    """Returns what does steps of CartPole-v1 with the Zoo's settings: 256, then 128 updates."""
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=2.3e-3,
        batch_size=64,
        train_freq=256,
        gradient_steps=128,
        buffer_size=100_000,
        learning_starts=FIRST,
        target_update_interval=10,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
    )
    return _runs(model)


def _runs(model: Any) -> Callable[[int], None]:
    def run(steps: int) -> None:
        model.learn(steps, reset_num_timesteps=False)

    run(FIRST + 256)
    return run


if __name__ == "__main__":
    probe.serve_stretches(
        ["stable-baselines3", "torch", "gymnasium", "numpy"],
        {"sac": sac, "sac8": lambda seed: sac(seed, 8), "dqn": dqn},
    )
