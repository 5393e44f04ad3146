"""A loop of SAC with nothing but an environment, arrays and two compiled functions.

Run by `benchmarks.replay.training_steps`; by hand: `PYTHONPATH=. python
benchmarks/replay/bare_replay.py sac`, then a number of steps per line.
"""

from collections.abc import Callable

from benchmarks import probe

probe.hush()

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from benchmarks.updates.bare_sac import BareSac  # noqa: E402

CAPACITY, ROWS, FIRST = 100_000, 256, 1000


def sac(seed: int, updates: int = 1) -> Callable[[int], None]:
    """Returns what does steps of Pendulum-v1, each with so many updates of 256 rows."""
    env, learner = gym.make("Pendulum-v1"), BareSac(3, 1)
    rng = np.random.default_rng(seed)
    widths = {"obs": 3, "reached": 3, "actions": 1}
    columns = {name: np.zeros((CAPACITY, width), np.float32) for name, width in widths.items()}
    columns["rewards"] = np.zeros(CAPACITY, np.float32)
    obs, added = env.reset(seed=seed)[0], 0

    def step() -> None:
        nonlocal obs, added
        noise = rng.standard_normal((1, 1), np.float32)
        action = learner.act(tf.constant(obs[None]), tf.constant(noise)).numpy()[0]
        reached, reward, terminated, truncated, _ = env.step(2.0 * action)
        values = (obs, reached, action, reward)
        for column, value in zip(columns.values(), values, strict=True):
            column[added % CAPACITY] = value
        added += 1
        obs = env.reset()[0] if terminated or truncated else reached

    def learn() -> None:
        drawn = rng.integers(min(added, CAPACITY), size=ROWS)
        noise = rng.standard_normal((ROWS, 2), np.float32)
        batch = [tf.constant(column[drawn]) for column in columns.values()]
        learner.update(*batch, tf.constant(noise))

    def run(steps: int) -> None:
        for _ in range(steps):
            step()
            for _ in range(updates):
                learn()

    for _ in range(FIRST):
        step()
    run(10)
    return run


if __name__ == "__main__":
    probe.serve_stretches(
        ["tensorflow", "keras", "gymnasium", "numpy"],
        {"sac": sac, "sac8": lambda seed: sac(seed, 8)},
    )
