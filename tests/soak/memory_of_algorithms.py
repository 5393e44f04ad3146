"""Memory of algorithms built, trained and stopped in turn: `python -m soak.memory_of_algorithms`.

Each of 25 has another architecture, so nothing can be shared. Prints how much the resident memory
of the process grows with each after the fifth, for each way to learn and to act.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from helpers.scripts import parse_options
from soak.memory import resident_megabytes
from tfpolicies import PPOConfig

_SETTINGS: dict[str, dict[str, Any]] = {
    "XLA, ONNX Runtime (the default)": {"jit_compile": True, "inference": "onnx"},
    "traced, ONNX Runtime": {"jit_compile": False, "inference": "onnx"},
    "XLA, TensorFlow": {"jit_compile": True, "inference": "tf"},
    "traced, TensorFlow": {"jit_compile": False, "inference": "tf"},
    "graph mode": {"framework": "tf", "jit_compile": False},
}
_SETTLED = 5  # the first ones load libraries


def _use_one(hidden: int, settings: dict[str, Any]) -> None:
    config = PPOConfig().environment("CartPole-v1").framework(**settings)
    config.training(train_batch_size=128, sgd_minibatch_size=64, num_sgd_iter=2)
    config.training(model={"fcnet_hiddens": [hidden, 64]})
    algorithm = config.debugging(seed=0, log_level="ERROR").build()
    algorithm.train()
    algorithm.stop()


def growth(count: int, settings: dict[str, Any]) -> float:
    """Returns the megabytes that each of `count` algorithms adds once the first ones are gone."""
    before = 0.0
    for i in range(count):
        if i == _SETTLED:
            before = resident_megabytes()
        _use_one(32 + i, settings)
        gc.collect()
    return (resident_megabytes() - before) / (count - _SETTLED)


def main() -> None:
    options = parse_options(__doc__, count=25, only=("", "a part of the name of a way"))
    for name, settings in _SETTINGS.items():
        if options.only in name:
            started = time.perf_counter()
            grown, seconds = growth(options.count, settings), time.perf_counter() - started
            print(f"{name}: {grown:+.1f} MB each ({options.count} in {seconds:.0f} s)")


if __name__ == "__main__":
    main()
