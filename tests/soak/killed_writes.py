"""Writers killed and stopped at every step: `python -m soak.killed_writes`.

What is written, each by a child process of its own:

* `stash`: a `PolicyMap` with a folder, two of its three policies in memory: policies that change,
  are evicted, replaced, copied, deleted, flushed and frozen;
* `replay`: a checkpoint of a replay buffer, whose segments are shared with another folder.

A child is killed (SIGKILL) right before its k-th step for k = 1, 2, 3 ... (an open, rename, link,
removal, fsync ..., seen by Python's audit hooks), then in the middle of a file (a limit of its size
makes the kernel end the process), then at random moments. The next child must find the old or the
new, whole; nothing may keep it out; and nothing of the killed one may be left once it has written.

Then a child is stopped (SIGSTOP) at random moments while another one writes to the same place: that
one must end within `--patience` seconds, by success or with an error of this package, and the
stopped one must end well once it goes on. Prints a line per part and each violation; exits with 1
if there was one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from helpers.children import Child, call_at_step, kill_self
from helpers.factories import make
from helpers.scripts import parse_options
from tfpolicies import Policy, PolicyMap, SampleBatch
from tfpolicies.batch.sample_batch import MultiAgentBatch
from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer
from tfpolicies.storage.checkpoint import read_checkpoint, write_checkpoint
from tfpolicies.storage.json_values import decode_value, encode_value
from tfpolicies.storage.nested_arrays import extract_arrays, restore_arrays
from tfpolicies.system.atomic import is_temporary

# What is written ----------------------------------------------------------------------------------


def make_policy(number: float) -> Policy:
    policy = make()
    set_number(policy, number)
    return policy


def set_number(policy: Policy, number: float) -> None:
    """Gives all weights of a policy, and its counter, one number."""
    policy.set_weights([np.full_like(x, number) for x in policy.get_weights().values()])
    policy.on_global_var_update({"timestep": int(number)})


def get_number(policy: Policy) -> int:
    """Returns the number of a policy.

    Raises:
        ValueError: if its weights and its counter do not have the same.
    """
    numbers = {float(x) for array in policy.get_weights().values() for x in array.flat}
    numbers.add(float(policy.global_timestep))
    if len(numbers) != 1:
        raise ValueError(f"a policy with the numbers {sorted(numbers)}")
    return int(numbers.pop())


class Place:
    """Something on disk that is written again and again, each time with the next number."""

    largest = 1  # bytes of a file that is written

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> int | None:
        """Returns the number of what is there, None for nothing; raises if it is not whole."""
        raise NotImplementedError

    def write(self, number: int) -> None:
        raise NotImplementedError

    def get_leftovers(self) -> list[str]:
        """Returns what lies there and belongs to no whole write."""
        return [str(x) for x in self.folder.rglob("*") if is_temporary(x.name)]


class StashPlace(Place):
    """A map with three policies and some frozen ones."""

    largest = 1 << 14
    ids = ("a", "b", "c")

    def read(self) -> int | None:
        if not (self.folder / "worker_0").exists():
            return None
        policies = PolicyMap(path=self.folder, capacity=2)
        with contextlib.closing(policies._store):  # without a flush
            numbers = {x: get_number(policies[x]) for x in self.ids if x in policies}
            frozen = [x for x in policies if x.startswith("frozen")]
            wrong = [x for x in frozen if get_number(policies[x]) != int(x[6:])]
        if wrong:
            raise ValueError(f"{wrong} are frozen with other numbers")
        # Each policy is flushed by itself: some have the next number already.
        if set(numbers.values()) <= {1} and len(numbers) < len(self.ids):
            return None
        least, most = min(numbers.values()), max(numbers.values())
        if most - least > 1 or len(numbers) < len(self.ids):
            raise ValueError(f"the policies have the numbers {numbers}")
        return least

    def write(self, number: int) -> None:
        policies = PolicyMap(path=self.folder, capacity=2)
        for policy_id in self.ids:
            if policy_id not in policies:
                policies[policy_id] = make_policy(number - 0.5)
        set_number(policies["a"], number + 0.25)
        policies.evict("a")  # not to be found unless it is flushed
        set_number(policies["a"], number)
        policies["b"] = make_policy(number)
        policies["d"] = make_policy(number)
        policies.copy_policy("d", "c")
        set_number(policies["c"], number)
        policies.evict("c")
        del policies["d"]
        policies.flush()
        frozen = f"frozen{number}"
        policies.copy_policy("a", frozen)
        set_number(policies[frozen], number)
        policies.freeze(frozen)
        if number > 2:
            with contextlib.suppress(KeyError):
                del policies[f"frozen{number - 2}"]
        policies.close()

    def get_leftovers(self) -> list[str]:
        own = self.folder / "worker_0"
        names = {x.stem for x in own.glob("*.json")}
        images = [x.name for x in own.glob("*.state") if x.stem not in names]
        records = [x for x in names if not (own / f"{x}.state").exists()]
        many = [] if len(names) <= 3 else [f"{len(names)} records"]
        return super().get_leftovers() + images + records + many


class ReplayPlace(Place):
    """A checkpoint of a replay buffer; another folder has the same segments."""

    largest = 1 << 20
    rows = 260

    def read(self) -> int | None:
        folder = self.folder / "latest"
        if not (folder / "test.json").exists():
            return None
        stored = read_checkpoint(folder, "test.json", kind="Test")
        buffer = MultiAgentReplayBuffer(100, seed=5)
        state = decode_value(stored.manifest["state"])
        buffer.set_state(restore_arrays(state, stored.arrays["extra"], stored.segments))
        rows = buffer.sample(1000, "p")
        marks = rows["obs"][:, 0, :8].copy().view(np.int64)[:, 0]
        if not np.array_equal(marks, rows["actions"]) or len(set(marks)) != 100:
            raise ValueError("rows are mixed")
        if int(rows["actions"].max()) != buffer.num_added - 1:
            raise ValueError("the newest row is missing")
        return int(stored.manifest["number"])

    def write(self, number: int) -> None:
        buffer = MultiAgentReplayBuffer(100, seed=0)
        for start in range(0, self.rows + 30 * number, 50):
            rows = np.arange(start, min(start + 50, self.rows + 30 * number))
            images = np.zeros((len(rows), 64, 64), np.uint8)
            images[:, 0, :8] = rows.astype(np.int64)[:, None].view(np.uint8)
            if len(rows):
                batch = SampleBatch(obs=images, actions=rows)
                buffer.add(MultiAgentBatch({"p": batch}, len(batch)))
        for folder in (self.folder / "best", self.folder / "latest"):
            arrays: dict[str, Any] = {}
            segments: list[Any] = []
            state = encode_value(extract_arrays(buffer.get_state(), arrays, segments))
            manifest = {"type": "Test", "state": state, "number": number}
            write_checkpoint(folder, "test.json", manifest, {"extra": arrays}, segments=segments)

    def get_leftovers(self) -> list[str]:
        listed: set[str] = set()
        for manifest in self.folder.glob("*/test.json"):
            content = json.loads(manifest.read_bytes())
            listed |= {x["file"] for x in [*content["arrays"].values(), *content["segments"]]}
        strays = [x.name for x in self.folder.glob("*/*.h5") if x.name not in listed]
        return super().get_leftovers() + strays


PLACES: dict[str, type[Place]] = {"stash": StashPlace, "replay": ReplayPlace}


# Children -----------------------------------------------------------------------------------------


def child(place: Place, number: int, say: Any, at_step: int = 0, size: int | None = None) -> None:
    """Reads a place, then writes to it; killed in between as asked for."""
    say(found=place.read())
    count = call_at_step(at_step, place.folder, kill_self)
    say(armed=True)
    if size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    began = time.monotonic()
    place.write(number)
    say(steps=count(), seconds=time.monotonic() - began)
    say(leftovers=place.get_leftovers())


class Bench:
    """Children of one kind of place, one after the other, and what is wrong with what they leave.

    Args:
        name: of the kind.
        folder: an empty one.
        rng: draws moments.
        patience: seconds that a process may take beside one that is stopped.
    """

    def __init__(self, name: str, folder: Path, rng: random.Random, patience: float) -> None:
        self.name, self.rng, self.patience = name, rng, patience
        self.place = PLACES[name](folder)
        self.written = 0  # the number of the last write that ended
        self.tried = 0
        self.killed = 0
        self.seconds = 0.0  # that the last whole write took
        self.violations: list[str] = []

    def blame(self, what: str) -> None:
        self.violations.append(what)
        print(f"  {self.name}: {what}", flush=True)

    def judge(self, process: Child, how: str) -> None:
        words = process.words
        if "failed" in words or "refused" in words:
            self.blame(f"{how}: {words.get('failed') or words['refused']}")
            shutil.rmtree(self.place.folder, ignore_errors=True)
            self.written = self.tried = 0
        if "found" in words:
            expected = {self.written, self.tried} - ({0} if self.written else set())
            number = words["found"] or 0
            if number not in expected | ({0} if not self.written else set()):
                self.blame(f"{how}: found {number}, not one of {sorted(expected)}")
            self.written = max(self.written, number)
        if words.get("leftovers"):
            self.blame(f"{how}: left over {words['leftovers'][:4]}")

    def run(self, how: str, delay: float | None = None, **limits: int) -> bool:
        """Runs a child, killed as asked for; returns whether it was killed."""
        number = self.written + 1
        process = Child(lambda say: child(self.place, number, say, **limits))
        if delay is not None:
            process.hear("armed", 300)
            process.hear(None, delay)
        elif not process.hear(None, 300):
            self.blame(f"{how}: not ended in 300 s")
        process.end()
        self.judge(process, how)
        self.tried = number
        self.seconds = process.words.get("seconds", self.seconds)
        was_killed = "ended" not in process.words
        self.killed += was_killed
        if not was_killed:
            self.written = number
        return was_killed

    def kill_at_steps(self, count: int) -> None:
        killed = step = most = 0
        while killed < count:
            step += 1
            if self.run(f"before step {step}", at_step=step):
                killed += 1
                most = max(most, step)
            else:
                step = 0
            if step % 10 == 0:
                self.run("afterwards")
        self.run("afterwards")
        print(f"{self.name}: killed before {killed} steps (up to the {most}th)", flush=True)

    def draw_size(self) -> dict[str, int]:
        return {"size": int(2 ** self.rng.uniform(0, np.log2(self.place.largest)))}

    def draw_delay(self) -> dict[str, float]:
        return {"delay": self.rng.uniform(0, self.seconds)}

    def kill_at_random(self, count: int, where: str, draw: Callable[[], dict[str, Any]]) -> None:
        """Kills children where `draw` says: at a size of files, or after a delay."""
        kills = 0
        for _ in range(count):
            limits = draw()
            kills += self.run(f"{where} {limits}", **limits)
        self.run("afterwards")
        print(f"{self.name}: killed {kills} of {count} times {where}", flush=True)

    def stop(self, count: int) -> None:
        """Stops children before their first, second ... step while others work on the place."""
        ends: Counter[str] = Counter()
        slowest = 0.0
        for step in range(1, count + 1):
            number, how = self.written + 1, f"beside one stopped before step {step}"
            process = Child(functools.partial(stopped_child, self.place, number, at_step=step))
            was_stopped = process.hear("stopping", 300)
            if was_stopped:
                wait_until_stopped(process.id)
                seconds, end = self._work_beside(number, how)
                slowest, ends[end] = max(slowest, seconds), ends[end] + 1
                os.kill(process.id, signal.SIGCONT)
                process.hear(None, 300)
            process.end()
            if "failed" in process.words:
                self.blame(f"{how}, which then: {process.words['failed']}")
            self.written = self.tried = number
            self.run(f"after {how}")
        print(
            f"{self.name}: stopped {count} times, the other one: {dict(ends)}, slowest "
            f"{slowest:.1f} s",
            flush=True,
        )

    def _work_beside(self, number: int, how: str) -> tuple[float, str]:
        """Runs a child beside a stopped one; returns its seconds and how it ended."""
        began = time.monotonic()
        other = Child(functools.partial(second_child, self.place, number))
        is_in_time = other.hear(None, self.patience)
        seconds = time.monotonic() - began
        other.end()
        if not is_in_time:
            self.blame(f"{how}: hangs")
        elif "failed" in other.words:
            self.blame(f"{how}: {other.words['failed']}")
        return seconds, "refused" if "refused" in other.words else "went on"


def stopped_child(place: Place, number: int, say: Callable[..., None], *, at_step: int) -> None:
    """Writes to a place, and stops right before a step."""

    def stop_self() -> None:
        say(stopping=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    call_at_step(at_step, place.folder, stop_self)
    place.write(number)


def second_child(place: Place, number: int, say: Callable[..., None]) -> None:
    say(found=place.read())
    place.write(number)


def wait_until_stopped(process: int) -> None:
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.005)


def main() -> None:
    options = parse_options(
        __doc__,
        kills=(60, "of each kind of place, and of each way"),
        stops=10,
        only=list(PLACES),
        patience=90.0,
        seed=0,
    )
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401

    import tfpolicies.policy.tf_policy  # noqa: F401

    violations = 0
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            rng = random.Random(options.seed)
            bench = Bench(name, Path(folder, "place"), rng, options.patience)
            bench.run("first")
            if options.kills:
                bench.kill_at_steps(options.kills)
                bench.kill_at_random(options.kills, "in a file", bench.draw_size)
                bench.kill_at_random(options.kills, "at a moment", bench.draw_delay)
            if options.stops:
                bench.stop(options.stops)
            print(f"{name}: {bench.killed} killed, {len(bench.violations)} violations", flush=True)
            violations += len(bench.violations)
    if violations:
        raise SystemExit(f"{violations} violations")


if __name__ == "__main__":
    main()
