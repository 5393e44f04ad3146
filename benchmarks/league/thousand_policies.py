"""A thousand policies in one map: `python -m benchmarks.league.thousand_policies`.

Adds policies of one kind (2 x 64 tanh, actor and critic, CartPole's shapes), each with weights of
its own, and as many copies of one; then acts with random ones, of which few are in memory, and with
all in memory. Prints times, traces and memory. `main_job --only league` does the same with 20
policies beside RLlib's map.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from rich.console import Console
from rich.table import Table

from tfpolicies import PolicyMap, PPOConfig, PPOTF2Policy

OBSERVATION_SPACE = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
ACTION_SPACE = gym.spaces.Discrete(2)


def resident_bytes() -> int:
    """Returns the memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def milliseconds(call: Callable[[str], Any], names: Sequence[str]) -> list[float]:
    durations = []
    for name in names:
        before = time.perf_counter()
        call(name)
        durations.append((time.perf_counter() - before) * 1e3)
    return durations


def main() -> int:
    parser = argparse.ArgumentParser(description="What a thousand policies cost.")
    parser.add_argument("--policies", type=int, default=1000)
    parser.add_argument("--capacity", type=int, default=50, help="of the small map")
    options = parser.parse_args()
    model = {"fcnet_hiddens": [64, 64], "vf_share_layers": False}
    config = PPOConfig().training(model=model).debugging(seed=0).to_dict()
    obs = np.zeros((1, 4), np.float32)
    table = Table("figure", "median", "90 %", "worst", title=f"{options.policies} policies")

    def add_row(name: str, values: Sequence[float], unit: str) -> None:
        cells = statistics.median(values), float(np.percentile(values, 90)), max(values)
        table.add_row(name, *(f"{x:.3f} {unit}" for x in cells))

    def create(m: PolicyMap) -> Callable[[str], None]:
        spaces = OBSERVATION_SPACE, ACTION_SPACE
        return lambda name: m.create_policy(name, PPOTF2Policy, *spaces, {}, config)

    fresh = PolicyMap(capacity=options.policies + 1)
    create(fresh)("main")
    program = fresh["main"].program  # type: ignore[attr-defined]
    fresh["main"].compute_actions(obs)
    names = [f"policy_{i}" for i in range(options.policies)]
    before = resident_bytes()
    add_row("added, fresh weights", milliseconds(create(fresh), names), "ms")
    taken = resident_bytes() - before
    state = fresh["main"].driver.state.layout.num_bytes
    main_policy = fresh["main"]
    order = [names[i] for i in np.random.default_rng(0).integers(0, len(names), 3000)]
    act = milliseconds(lambda name: fresh[name].compute_actions(obs), order)
    add_row("acted with, all in memory", [x * 1e3 for x in act], "µs")
    act = milliseconds(lambda name: main_policy.compute_actions(obs), order)
    add_row("acted with, without the map", [x * 1e3 for x in act], "µs")
    for name in names:
        del fresh[name]
    copies = milliseconds(lambda name: fresh.copy_policy("main", name), names)
    add_row("added, a copy", copies, "ms")
    small = PolicyMap(capacity=options.capacity)
    for name in names:
        small[name] = fresh.pop(name)
    act = milliseconds(lambda name: small[name].compute_actions(obs), order)
    add_row(f"acted with, {options.capacity} in memory", [x * 1e3 for x in act], "µs")
    console = Console(width=110)
    console.print(table)
    share = taken / (state * options.policies)
    console.print(
        f"Memory: {taken / 1e6:.1f} MB for {options.policies} states of {state / 1e3:.1f} kB: "
        f"{share:.2f} times their bytes.\nTraces: {dict(program.functions.traces)}\n"
        f"{small.statistics}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
