"""Counts the package's own calls, files and functions on the way from a call to its effect.

`python -m tools.call_paths` profiles one warm call of each kind with `sys.setprofile`, and
times acting: the median of 2,000 calls in microseconds. `--encode FILE` writes the figures down.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import probe

probe.hush()

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import tfpolicies  # noqa: E402
from tfpolicies import PPOConfig  # noqa: E402
from tfpolicies.testing import random_batch  # noqa: E402

PACKAGE = str(Path(tfpolicies.__file__).parent)
_WARM_UP, _TIMED = 3, 2_000


class CallPath(NamedTuple):
    """The calls, files and functions of the package in one call, and its time."""

    calls: int
    files: int
    functions: int
    microseconds: float | None = None


def profile(call: Callable[[], Any]) -> CallPath:
    """Returns how many calls, files and functions of the package one warm call takes."""
    for _ in range(_WARM_UP):
        call()
    entered: list[tuple[str, str, int]] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            entered.append((code.co_filename, code.co_name, code.co_firstlineno))

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return CallPath(len(entered), len({name for name, *_ in entered}), len(set(entered)))


def _time(call: Callable[[], Any]) -> float:
    """Returns the median time of a call in microseconds."""
    seconds = []
    for _ in range(_TIMED):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds)


def _config() -> PPOConfig:
    return (
        PPOConfig()
        .environment("Pendulum-v1")
        .rollouts(num_envs_per_worker=8, rollout_fragment_length=32)
        .training(train_batch_size=256, sgd_minibatch_size=64, num_sgd_iter=2)
        .debugging(seed=1, log_level="ERROR")
    )


def _operations() -> Iterator[tuple[str, bool, Callable[[], Any]]]:
    """Yields the name of each operation, whether it is timed, and the call."""
    algorithm = _config().build()
    policy, worker = algorithm.get_policy(), algorithm.workers.local_worker()
    obs = np.zeros(3, np.float32)
    session = policy.session()
    yield "session.act", True, lambda: session.act(obs)
    yield "policy.compute_single_action", True, lambda: policy.compute_single_action(obs)
    yield "algorithm.compute_single_action", True, lambda: algorithm.compute_single_action(obs)
    yield "policy.predict", True, lambda: policy.predict(obs)
    yield "sample(): 32 vector steps", False, worker.sample
    batch = random_batch(policy, 256)
    yield "learn_on_batch", False, lambda: policy.learn_on_batch(batch)
    yield "one PPO iteration", False, algorithm.train
    numbers = iter(range(1_000))
    kind = type(policy)
    yield (
        "add_policy, Program there",
        False,
        lambda: algorithm.add_policy(f"policy_{next(numbers)}", kind),
    )


def measure() -> dict[str, CallPath]:
    """Returns the figures of each operation."""
    result = {}
    for name, is_timed, call in _operations():
        counted = profile(call)
        result[name] = counted._replace(microseconds=_time(call) if is_timed else None)
    step = profile_vector_step()
    return {**result, "one vector step of a sampler": step}


def profile_vector_step() -> CallPath:
    """Returns what one more step of a fragment enters: fragments of 33 and of 32 steps compared."""
    counted = []
    for length in (32, 33):
        config = _config().rollouts(rollout_fragment_length=length)
        worker = config.training(train_batch_size=8 * length).build().workers.local_worker()
        counted.append(profile(worker.sample))
        worker.stop()
    return CallPath(counted[1].calls - counted[0].calls, counted[1].files, counted[1].functions)


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m tools.call_paths", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures are written")
    options = parser.parse_args()
    paths = measure()
    table = Table("call", "calls", "files", "functions", "us")
    for name, path in paths.items():
        table.add_row(name, *("" if x is None else f"{x:,.4g}" for x in path))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({k: v._asdict() for k, v in paths.items()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
