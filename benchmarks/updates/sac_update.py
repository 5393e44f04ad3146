"""Measures one update of SAC against a bare `tf.function` of the same mathematics.

`python -m benchmarks.updates.sac_update`: 256 rows, two layers of 256 units, twin critics, Adam,
compiled by XLA. It prints milliseconds per update, of the clock and of the processor: the bare
function, one update per call, and 64 updates per call; measured in turn, in one process.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from benchmarks.updates.bare_sac import BareSac
from tfpolicies import SACTF2Policy, SampleBatch

ROWS, UPDATES, ROUNDS = 256, 64, 9


def batch_of(rows: int) -> SampleBatch:
    """Returns random transitions."""
    rng = np.random.default_rng(0)
    return SampleBatch(
        obs=rng.normal(size=(rows, 3)).astype(np.float32),
        new_obs=rng.normal(size=(rows, 3)).astype(np.float32),
        actions=rng.uniform(-1, 1, (rows, 1)).astype(np.float32),
        rewards=rng.normal(size=rows).astype(np.float32),
        terminateds=np.zeros(rows, bool),
        weights=np.ones(rows, np.float32),
    )


def bare() -> Callable[[], Any]:
    """Returns a hand-written update on ready tensors."""
    learner, batch = BareSac(3, 1), batch_of(ROWS)
    columns = [tf.constant(batch[x]) for x in ("obs", "new_obs", "actions", "rewards")]
    noise = tf.random.stateless_normal((ROWS, 2), (0, 0))
    return lambda: learner.update(*columns, noise)


def main() -> None:
    space, actions = spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (1,))
    policy = SACTF2Policy(space, actions, {"seed": 0})
    one, many = batch_of(ROWS), batch_of(ROWS * UPDATES)
    replay = policy.driver.learning.replay
    ways: dict[str, tuple[Callable[[], Any], int, int]] = {
        "bare function": (bare(), 20, 1),
        "one update per call": (
            lambda: policy.driver.learning.replay(one, ROWS, np.ones(1, bool)),
            20,
            1,
        ),
        "64 updates per call": (
            lambda: replay(many, ROWS, np.ones(UPDATES, bool)),
            1,
            UPDATES,
        ),
    }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, (run, calls, updates) in ways.items():
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(calls):
                run()
            took = time.perf_counter() - clock, time.process_time() - processor
            results[name].append((1e3 * took[0] / calls / updates, 1e3 * took[1] / calls / updates))
    for name, times in results.items():  # the first round compiles
        clock, processor = np.median(times[1:], axis=0)
        print(f"{name:20} {clock:6.2f} ms of the clock, {processor:6.2f} ms of the processor")


if __name__ == "__main__":
    main()
