"""Measures prioritised replay beside trees in plain Python, as RLlib's are.

`python -m benchmarks.replay.prioritized` fills a buffer of a million rows, draws 256 of them by
their priorities with their weights, and sets 256 priorities; ours also copies the rows drawn. In
turns, in one process, a sum tree and a min tree of Python lists do the same without any rows: those
of this file, which are written after the same idea as RLlib's, or with `--rllib PATH` RLlib's own,
where `PATH` is the folder `rllib` of its sources. Times are those of the processor, medians over
rounds. The exit code is 1 if ours is not at least 10 times as fast.
"""

import argparse
import operator
import random
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tfpolicies import SampleBatch
from tfpolicies.replay.prioritized import PrioritizedReplayBuffer

CAPACITY, DRAWN, OBS = 1_000_000, 256, 17
ALPHA, BETA = 0.6, 0.4
LEAST = 10.0  # times as fast


class PlainTree:
    """A binary tree of combined values in a list: the children of node i are 2 i and 2 i + 1."""

    def __init__(self, leaves: list[float], combine: Callable[[float, float], float]) -> None:
        self.size, self.combine = len(leaves), combine
        self.value = [0.0] * self.size + leaves
        for i in reversed(range(1, self.size)):
            self.value[i] = combine(self.value[2 * i], self.value[2 * i + 1])

    def __setitem__(self, place: int, value: float) -> None:
        i, values, combine = place + self.size, self.value, self.combine
        values[i] = value
        while i > 1:
            i >>= 1
            values[i] = combine(values[2 * i], values[2 * i + 1])

    def __getitem__(self, place: int) -> float:
        return self.value[place + self.size]

    def whole(self) -> float:
        """Returns all leaves combined."""
        return self.value[1]

    def find(self, mass: float) -> int:
        """Returns the leaf on which a mass falls."""
        i = 1
        while i < self.size:
            i *= 2
            if self.value[i] <= mass:
                mass -= self.value[i]
                i += 1
        return i - self.size


class PlainPriorities:
    """Draws and updates one row after the other, on trees of lists."""

    def __init__(self, priorities: list[float]) -> None:
        masses = [priority**ALPHA for priority in priorities]
        size = 1 << (len(masses) - 1).bit_length()
        fill = size - len(masses)
        self.count = len(masses)
        self.sums: Any = PlainTree(masses + [0.0] * fill, operator.add)
        self.least: Any = PlainTree(masses + [float("inf")] * fill, min)

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows drawn by their priorities, and their weights."""
        total = self.sums.whole()
        places = [self.sums.find(random.random() * total) for _ in range(DRAWN)]
        largest = (self.least.whole() / total * self.count) ** -BETA
        weights = [(self.sums[i] / total * self.count) ** -BETA / largest for i in places]
        return np.array(places), np.array(weights)

    def update(self, places: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities."""
        for place, priority in zip(places.tolist(), priorities.tolist(), strict=True):
            mass = priority**ALPHA
            self.sums[place] = mass
            self.least[place] = mass


class OwnPriorities(PlainPriorities):
    """The same on RLlib's own trees, called as RLlib's buffer calls them.

    Args:
        priorities: of all rows.
        rllib: the folder of its sources.
    """

    def __init__(self, priorities: list[float], rllib: Path) -> None:
        super().__init__(priorities)
        result = runpy.run_path(str(rllib / "execution" / "segment_tree.py"))
        plain, names = (self.sums, self.least), ("SumSegmentTree", "MinSegmentTree")
        self.sums, self.least = (
            result[name](each.size) for name, each in zip(names, plain, strict=True)
        )
        for own, each in zip((self.sums, self.least), plain, strict=True):
            own.set_state(each.value)

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows and weights; sums are asked for as often as RLlib's buffer does."""
        sums, count = self.sums, self.count
        places = [
            sums.find_prefixsum_idx(random.random() * sums.sum(0, count)) for _ in range(DRAWN)
        ]
        largest = (self.least.min() / sums.sum() * count) ** -BETA
        weights = [(sums[i] / sums.sum() * count) ** -BETA / largest for i in places]
        return np.array(places), np.array(weights)


def filled(priorities: np.ndarray) -> PrioritizedReplayBuffer:
    """Returns our buffer of a million rows."""
    buffer = PrioritizedReplayBuffer(CAPACITY, seed=0, alpha=ALPHA, beta=BETA, eps=0.0)
    obs = np.zeros((CAPACITY, OBS), np.float32)
    ones = np.ones(CAPACITY, np.float32)
    buffer.add(SampleBatch(obs=obs, new_obs=obs, actions=ones, rewards=ones, weights=ones))
    buffer.update_priorities(np.arange(CAPACITY), priorities)
    return buffer


def microseconds(work: Callable[[], Any], calls: int) -> float:
    """Returns the processor's time of one call."""
    started = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - started) / calls * 1e6


def measured(theirs: PlainPriorities, buffer: PrioritizedReplayBuffer, rounds: int) -> Any:
    """Returns the median times of drawing and of updating, ours and theirs, in microseconds."""
    rng = np.random.default_rng(1)
    places, errors = rng.integers(CAPACITY, size=DRAWN), rng.exponential(size=DRAWN) + 1e-6
    works = {
        "draw": (lambda: buffer.sample(DRAWN), theirs.sample),
        "update": (
            lambda: buffer.update_priorities(places, errors),
            lambda: theirs.update(places, errors),
        ),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, (ours, other) in works.items():
            times[name].append((microseconds(ours, 100), microseconds(other, 20)))
    return {
        name: [statistics.median(each) for each in zip(*pairs, strict=True)]
        for name, pairs in times.items()
    }


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.prioritized", description=__doc__
    )
    parser.add_argument("--rllib", type=Path, help="the folder `rllib` of release 2.10.0")
    parser.add_argument("--rounds", type=int, default=5, help="of each (default 5)")
    options = parser.parse_args()
    priorities = np.random.default_rng(0).exponential(size=CAPACITY) + 1e-6
    known = priorities.tolist()
    theirs = OwnPriorities(known, options.rllib) if options.rllib else PlainPriorities(known)
    result = measured(theirs, filled(priorities), options.rounds)
    result["both"] = [sum(each) for each in zip(*result.values(), strict=True)]
    other = "RLlib's trees" if options.rllib else "plain trees"
    table = Table(f"{DRAWN} rows of {CAPACITY:,}", "ours, µs", f"{other}, µs", "times as fast")
    for name, (ours, plain) in result.items():
        table.add_row(name, f"{ours:.0f}", f"{plain:.0f}", f"{plain / ours:.1f}")
    Console().print(table)
    ours, plain = result["both"]
    return int(plain / ours < LEAST)


if __name__ == "__main__":
    sys.exit(main())
