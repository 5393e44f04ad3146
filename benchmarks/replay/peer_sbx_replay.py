"""SBX's SAC (JAX, CPU) in its own interpreter.

Run by `benchmarks.replay.training_steps`; by hand: `SBX_PYTHON benchmarks/replay/peer_sbx_replay.py
sac`, then a number of steps per line.
"""

from collections.abc import Callable

from benchmarks import probe

probe.hush()

from sbx import SAC  # noqa: E402

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
    )

    def run(steps: int) -> None:
        model.learn(steps, reset_num_timesteps=False)

    run(FIRST + 256)
    return run


if __name__ == "__main__":
    probe.serve_stretches(
        ["sbx-rl", "stable-baselines3", "jax", "gymnasium", "numpy"],
        {"sac": sac, "sac8": lambda seed: sac(seed, 8)},
    )
