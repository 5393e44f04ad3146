"""Feeds damaged states to a policy, and counts what comes of it.

    python -m soak.fuzz_states --count 1000 --seed 0

A state's entries are dropped or replaced. Each state must either be loaded or be refused with the
package's own error, and a refusal must have changed nothing. Anything else is listed: another
exception, more than two seconds or 500 MB, an attempt to run something. `soak.fuzz_attacks` does
the same with checkpoints.
"""

from __future__ import annotations

import copy
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from helpers.differences import find_differences, get_owned
from helpers.factories import make
from helpers.scripts import parse_options
from soak.attempt import Attempt, Tally
from tfpolicies import PPOTF2Policy

JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 10**9, 2**70, 0.5, float("nan"), float("inf"), "", "x" * 50, "os:system",
    "tests.absent.Class", [], [1], {}, {"a": 1}, {"$import": "os:system"}, [[["x"]]],
    10**400, -(10**400), -float("inf"), "x" * 5000, "\ud800", {"$tuple": [1, 2]}, {"type": [1]},
    {"$array": {"dtype": "float32", "shape": [2], "elements": [0.5, 1.0]}},
)  # fmt: skip


def sample_policy() -> PPOTF2Policy:
    """Returns a small policy with a filter, so that every kind of state occurs."""
    sampling = {"type": "StochasticSampling"}
    return make(observation_filter="MeanStdFilter", exploration_config=sampling)


def fuzz_states(count: int, seed: int) -> Tally:
    """Sets `count` damaged states on a policy; the same seed makes the same ones."""
    tally, policy = Tally(), sample_policy()
    sound, owned = policy.get_state(), get_owned(policy)

    def damage(rng: random.Random) -> Attempt:
        policy.set_state(sound)
        state = copy.deepcopy(owned)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            edit(state, rng)
        return Attempt("state", lambda: policy.set_state(state), find_changes)

    def find_changes() -> str | None:
        now = policy.get_state()
        changed = [
            key
            for key in sound
            if key != "policy_spec" and any(find_differences(sound[key], now[key]))
        ]
        return f"changed {changed}" if changed else None

    tally.attack("state", damage, range(count), seed)
    return tally


def renew(sound: Path, hostile: Path) -> None:
    """Puts a copy of a folder into the place of another one."""
    shutil.rmtree(hostile, ignore_errors=True)
    shutil.copytree(sound, hostile)


def walk(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (container, key) of each entry of nested dicts and lists."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from walk(value)


def edit(tree: Any, rng: random.Random) -> None:
    """Replaces or removes one entry somewhere in nested dicts, lists and arrays."""
    node, key = rng.choice(list(walk(tree)))
    value = node[key]
    if rng.random() < 0.2:
        del node[key]
    elif isinstance(value, np.ndarray) and rng.random() < 0.8:
        changed = (value[..., None], value.reshape(-1)[:0], value.astype("U8"), value.tolist())
        node[key] = rng.choice((*changed, value.astype(object)))
    else:
        node[key] = copy.deepcopy(rng.choice(JUNK))


def main() -> int:
    options = parse_options(__doc__, count=1000, seed=0)
    tally = fuzz_states(options.count, options.seed)
    print(f"states: {tally}", *tally.other, sep="\n    ")
    return int(bool(tally.other))


if __name__ == "__main__":
    sys.exit(main())
