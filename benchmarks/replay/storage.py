"""Measures what replayed rows cost: bytes, time to add and to draw, and to save.

`python -m benchmarks.replay.storage` fills buffers with transitions of Pendulum's sizes and with
stacks of four frames of 84 x 84 bytes, and prints for each: the bytes that the process grew by per
row, the time of adding a row (eight at a time) and of drawing 256. With `--save` it also writes two
checkpoints of an algorithm with a full buffer, 1000 new rows between them: seconds and new bytes.
Times are those of the processor, medians of `--rounds`. To compare with another version, run this
file with that one on the path.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gymnasium as gym
import numpy as np

from tfpolicies import SampleBatch
from tfpolicies.replay.ring_buffer import ReplayBuffer

AT_ONCE, DRAWN, EPISODE = 8, 256, 200


def vectors(rows: int) -> Iterator[SampleBatch]:
    """Yields rows of Pendulum's sizes, eight at a time."""
    rng = np.random.default_rng(0)
    for _ in range(rows // AT_ONCE):
        yield batch_of(*rng.normal(size=(2, AT_ONCE, 3)).astype(np.float32))


def images(rows: int) -> Iterator[SampleBatch]:
    """Yields rows of stacked frames, one of each of eight games at a time."""
    rng = np.random.default_rng(0)
    stacks = np.zeros((AT_ONCE, 84, 84, 4), np.uint8)
    for step in range(rows // AT_ONCE):
        frames = rng.integers(256, size=(AT_ONCE, 84, 84, 1), dtype=np.uint8)
        reached = np.concatenate([stacks[..., 1:], frames], -1)
        yield batch_of(stacks, reached)
        stacks = np.repeat(frames, 4, -1) if step % EPISODE == EPISODE - 1 else reached


def batch_of(obs: np.ndarray, new_obs: np.ndarray) -> SampleBatch:
    """Returns transitions with columns as replay algorithms keep them."""
    rewards = np.ones(AT_ONCE, np.float32)
    terminateds = np.zeros(AT_ONCE, bool)
    actions = np.zeros((AT_ONCE, 1), np.float32)
    return SampleBatch(
        obs=obs,
        new_obs=new_obs,
        actions=actions,
        rewards=rewards,
        terminateds=terminateds,
        weights=rewards,
    )


def resident() -> int:
    """Returns the bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def seconds(work: Callable[[], object], rounds: int) -> float:
    """Returns the processor's median time for some work."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def measure(name: str, batches: Iterator[SampleBatch], rows: int, rounds: int) -> None:
    """Fills a buffer and prints what its rows cost."""
    buffer, before, spent = ReplayBuffer(rows, seed=0), resident(), 0.0
    for batch in batches:
        began = time.process_time()
        buffer.add(batch)
        spent += time.process_time() - began
    grown = (resident() - before) / rows
    drawn = seconds(lambda: buffer.sample(DRAWN), rounds)
    print(
        f"{name}: {grown:.0f} bytes per row, {1e6 * spent / rows:.2f} us to add one, "
        f"{1e3 * drawn:.3f} ms to draw {DRAWN}"
    )


class Screens(gym.Env):
    """Gives what `--save` needs of an environment: its spaces."""

    observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):  # type: ignore[no-untyped-def]
        """Gives a black screen."""
        return np.zeros((84, 84, 4), np.uint8), {}

    def step(self, action):  # type: ignore[no-untyped-def]
        """Gives another."""
        return np.zeros((84, 84, 4), np.uint8), 0.0, False, False, {}


def save(name: str, env: object, batches: Iterator[SampleBatch], rows: int, new: int) -> None:
    """Prints what two checkpoints of an algorithm with a full buffer take."""
    from tfpolicies import SACConfig
    from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer

    config = SACConfig().environment(env).framework(inference="tf", jit_compile=False)
    config.training(store_buffer_in_checkpoints=True, replay_buffer_config={"capacity": rows})
    algorithm = config.debugging(log_level="ERROR", seed=0).build()
    buffer = MultiAgentReplayBuffer(rows, seed=0)
    algorithm.replay_buffer = buffer
    for _ in range(rows // AT_ONCE):
        buffer.add(next(batches))
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for k in ("first", "second"):
            known = {path.stat().st_ino for path in Path(folder).rglob("*") if path.is_file()}
            began, processor = time.perf_counter(), time.process_time()
            algorithm.save(os.path.join(folder, "checkpoint"))
            took, used = time.perf_counter() - began, time.process_time() - processor
            files = [path.stat() for path in Path(folder).rglob("*") if path.is_file()]
            written = sum(file.st_size for file in files if file.st_ino not in known)
            print(f"{name}, {k} save: {took:.2f} s ({used:.2f} s of it work), {written:,} bytes")
            for _ in range(new // AT_ONCE):
                buffer.add(next(batches))
    algorithm.stop()


def main() -> None:
    """Prints all that is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.save:
        both = options.vectors, options.images
        save("vectors", "Pendulum-v1", vectors(both[0] + 2000), both[0], 1000)
        save("images", Screens, images(both[1] + 2000), both[1], 1000)
        return
    measure("vectors", vectors(options.vectors), options.vectors, options.rounds)
    measure("images", images(options.images), options.images, options.rounds)


if __name__ == "__main__":
    main()
