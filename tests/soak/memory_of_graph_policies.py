"""Memory of graph-mode policies that come and go: `python -m soak.memory_of_graph_policies`.

An eager policy lives beside them; its outputs must not change. Prints the resident memory for 50
policies of one Program, whose growth after the tenth must stay below 10 MB, and the growth per
Program for policies of 10 Programs, of which the last four stay for the next policy of their kind.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import tensorflow as tf
from gymnasium import spaces
from keras.src.backend.common import global_state

from soak.memory import resident_megabytes
from tfpolicies import PPOTF1Policy, PPOTF2Policy
from tfpolicies.testing import random_batch

_OBS, _ACTIONS = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)
_ROWS = np.linspace(-1.0, 1.0, 32, dtype=np.float32).reshape(8, 4)


def _keras_state() -> dict[str, Any]:
    tracked = vars(global_state.GLOBAL_STATE_TRACKER)
    return {k: len(v) if hasattr(v, "__len__") else str(v) for k, v in tracked.items()}


def _use_one(hidden: int, seed: int) -> float:
    """Makes, uses and disposes of one policy; returns the milliseconds that making it took."""
    started = time.perf_counter()
    config = {"model": {"fcnet_hiddens": [hidden, 64]}, "seed": seed, "jit_compile": False}
    policy = PPOTF1Policy(_OBS, _ACTIONS, config)
    policy.get_session()
    made = 1000.0 * (time.perf_counter() - started)
    policy.compute_actions(_ROWS)
    policy.learn_epochs(random_batch(policy, 64), 2, 32)
    policy.close()
    return made


def main() -> None:
    eager = PPOTF2Policy(_OBS, _ACTIONS, {"seed": 0, "inference": "tf", "jit_compile": False})
    before = eager.compute_actions(_ROWS, explore=False).extras["action_dist_inputs"]

    def check() -> None:
        now = eager.compute_actions(_ROWS, explore=False).extras["action_dist_inputs"]
        if not (np.array_equal(now, before) and tf.executing_eagerly()):
            raise SystemExit("A graph policy changed an eager one.")

    sizes, times, state = [], [], {}
    for i in range(50):
        times.append(_use_one(64, i))
        gc.collect()
        check()
        sizes.append(resident_megabytes())
        state = _keras_state() if i == 9 else state
    print(f"one Program: {sizes[0]:.1f} MB after 1 policy, {sizes[9]:.1f} after 10, ", end="")
    print(f"{sizes[-1]:.1f} after 50: {sizes[-1] - sizes[9]:+.1f} MB since the tenth")
    print(
        f"making a policy: {times[0]:.0f} ms the first, {np.median(times[1:]):.1f} ms a later one"
    )
    print(f"Keras's global state: {'unchanged' if _keras_state() == state else 'CHANGED'}")
    start = resident_megabytes()
    for i in range(10):
        _use_one(65 + i, i)
        gc.collect()
        check()
    print(f"10 Programs: {(resident_megabytes() - start) / 10:+.1f} MB each")


if __name__ == "__main__":
    main()
