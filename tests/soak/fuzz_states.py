"""Feeds damaged and hostile checkpoints and states to a policy, and counts what comes of it.

    python -m soak.fuzz_states --count 1000 --seed 0

A checkpoint's files are damaged blindly, or its manifest is edited and its checksums are made right
again, as a hostile writer would. A state's entries are dropped or replaced. Each input must either
be loaded or be refused with the package's own error, and a refusal must have changed nothing.
Anything else is listed: another exception, more than two seconds, an attempt to run something.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from soak.fuzz_files import SLOW, FuzzResult, nothing_runs
from tfpolicies import PPOTF2Policy
from tfpolicies.errors import TfPoliciesError
from tfpolicies.storage.manifest import compute_checksum

JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 10**9, 2**70, 0.5, float("nan"), float("inf"), "", "x" * 50, "os:system",
    "tests.absent.Class", [], [1], {}, {"a": 1}, {"$import": "os:system"}, [[["x"]]],
    10**400, -(10**400), -float("inf"), "x" * 5000, "\ud800", {"$tuple": [1, 2]}, {"type": [1]},
    {"$array": {"dtype": "float32", "shape": [2], "elements": [0.5, 1.0]}},
)  # fmt: skip


def sample_policy() -> PPOTF2Policy:
    """Returns a small policy with a filter, so that every kind of state occurs."""
    config = {
        "seed": 0,
        "inference": "tf",
        "jit_compile": False,
        "observation_filter": "MeanStdFilter",
        "exploration_config": {"type": "StochasticSampling"},
        "model": {"fcnet_hiddens": [4]},
    }
    return PPOTF2Policy(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), config)


def fuzz_checkpoints(count: int, seed: int) -> FuzzResult:
    """Loads `count` damaged checkpoints; the same seed makes the same ones."""
    policy = sample_policy()  # keeps the Program alive, so that loading builds no other
    with tempfile.TemporaryDirectory() as folder:
        sound, damaged = Path(folder) / "sound", Path(folder) / "damaged"
        policy.export_checkpoint(sound)

        def prepare(rng: random.Random) -> Callable[[], Any]:
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(sound, damaged)
            _damage(damaged, rng)
            return lambda: PPOTF2Policy.from_checkpoint(damaged)

        return _count(count, seed, "checkpoint", prepare, lambda: None)


def fuzz_states(count: int, seed: int) -> FuzzResult:
    """Sets `count` damaged states on a policy; the same seed makes the same ones."""
    policy = sample_policy()
    sound = policy.get_state()

    def prepare(rng: random.Random) -> Callable[[], Any]:
        policy.set_state(sound)
        state = copy.deepcopy({k: v for k, v in sound.items() if k != "policy_spec"})
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            edit(state, rng)
        return lambda: policy.set_state(state)

    def unchanged() -> str | None:
        now = policy.get_state()
        differing = [
            key for key in sound if key != "policy_spec" and not same(sound[key], now[key])
        ]
        return f"changed {differing}" if differing else None

    return _count(count, seed, "state", prepare, unchanged)


def _count(
    count: int,
    seed: int,
    kind: str,
    prepare: Callable[[random.Random], Callable[[], Any]],
    changed: Callable[[], str | None],
) -> FuzzResult:
    loaded, refused, slowest, other = 0, 0, 0.0, []
    for number in range(count):
        attempt = prepare(random.Random(f"{seed} {kind} {number}"))
        start, seen = time.perf_counter(), ""
        events: list[str] = []
        try:
            with nothing_runs() as events:
                attempt()
            loaded += 1
        except TfPoliciesError:
            refused += 1
            seen = changed() or ""
        except Exception as error:
            seen = repr(error)[:300]
        took = time.perf_counter() - start
        slowest = max(slowest, took)
        seen = seen or (f"{took:.1f} s" if took > SLOW else "") or " ".join(events)
        if seen:
            other.append(f"{kind} {number}: {seen}")
    return FuzzResult(loaded, refused, other, slowest)


def _damage(folder: Path, rng: random.Random) -> None:
    manifest = folder / "policy.json"
    if rng.random() < 0.6:  # a hostile writer: edited, with the checksum made right
        whole = json.loads(manifest.read_text())
        for _ in range(rng.choice((1, 1, 2))):
            edit(whole, rng)
        if isinstance(whole, dict):
            whole["checksum"] = compute_checksum(whole)
        manifest.write_text(json.dumps(whole))
        return
    damage_file(rng.choice(sorted(p for p in folder.rglob("*") if p.is_file())), rng)


def damage_file(path: Path, rng: random.Random) -> None:
    """Flips a bit of a file, cuts its end off, puts bytes into it or deletes it."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(("flip", "cut", "splice", "delete"))
    if kind == "delete":
        path.unlink()
        return
    place = rng.randrange(len(data))
    if kind == "flip":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    else:
        data[place:place] = rng.randbytes(rng.randrange(1, 64))
    path.write_bytes(data)


def edit(tree: Any, rng: random.Random) -> None:
    """Replaces or removes one entry somewhere in nested dicts, lists and arrays."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        entries = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in entries:
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(tree)
    node, key = rng.choice(places)
    value = node[key]
    if rng.random() < 0.2:
        del node[key]
    elif isinstance(value, np.ndarray) and rng.random() < 0.8:
        node[key] = rng.choice(
            (
                value[..., None],
                value.reshape(-1)[:0],
                value.astype("U8"),
                value.astype(object),
                value.tolist(),
            )
        )
    else:
        node[key] = copy.deepcopy(rng.choice(JUNK))


def same(one: Any, two: Any) -> bool:
    """Whether two nested values of dicts and arrays are equal, NaN equal to NaN."""
    if isinstance(one, dict):
        return set(one) == set(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two, equal_nan=one.dtype.kind == "f")
    return bool(one == two)


def main() -> int:
    """Fuzzes both; returns 1 if anything but loading and refusing happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bad = 0
    for name, fuzz in (("checkpoints", fuzz_checkpoints), ("states", fuzz_states)):
        result = fuzz(options.count, options.seed)
        print(f"{name}: {result}")
        for line in result.other:
            print("   ", line)
        bad += len(result.other)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
