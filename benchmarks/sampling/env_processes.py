"""A slow environment: one process, environment processes, Ray workers.

Each contestant steps 16 copies of an environment whose steps take 5 ms, and learns from them by PG
with a small network, which costs little. Printed are the seconds until the algorithm is built, the
environment steps a second, the memory of each further process, and the error that a user sees when
one copy raises, or is killed. Each runs in an interpreter of its own.

Run: `python -m benchmarks.sampling.env_processes [--busy] [--copies 16] [--milliseconds 5]`;
`--busy` has the environment compute instead of wait, which more processes than processors cannot
speed up.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

CONTESTANTS = ("one process", "env_processes", "a quarter of them", "2 Ray workers")
FAULTS = ("none", "raises", "killed")
_MIB = 2**20


class Slow(gym.Env):
    """Episodes of 50 steps that take a given time each; one copy may have a fault."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)
    _skip_env_checking = True  # its steps are timed

    def __init__(self, env_config: Any) -> None:
        self.seconds, self.is_busy = env_config["seconds"], env_config["busy"]
        is_faulty = env_config.vector_index == 5 and env_config.worker_index in (0, 1)
        self.fault = env_config["fault"] if is_faulty else "none"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.now = 0
        return self.np_random.random(8, dtype=np.float32), {}

    def step(self, action: int) -> Any:
        self.now += 1
        end = time.perf_counter() + self.seconds
        if not self.is_busy:
            time.sleep(self.seconds)
        while time.perf_counter() < end:
            pass
        if self.now == 10 and self.fault == "raises":
            raise ZeroDivisionError("the wheel came off")
        if self.now == 10 and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        obs = self.np_random.random(8, dtype=np.float32)
        return obs, float(action), self.now == 50, False, {}


def config_of(contestant: str, options: argparse.Namespace, fault: str) -> Any:
    from tfpolicies import PGConfig

    copies, workers = options.copies, 0
    processes = 0
    if contestant == "env_processes":
        processes = copies
    elif contestant == "a quarter of them":
        processes = copies // 4
    if contestant == "2 Ray workers":
        copies, workers = copies // 2, 2
    settings = {"seconds": options.milliseconds / 1000, "busy": options.busy, "fault": fault}
    return (
        PGConfig()
        .environment("benchmarks.sampling.env_processes:Slow", env_config=settings)
        .framework("tf2")
        .training(model={"fcnet_hiddens": [32]}, train_batch_size=options.copies * 20)
        .rollouts(
            num_envs_per_worker=copies,
            env_processes=processes,
            num_rollout_workers=workers,
            rollout_fragment_length=20,
        )
        .resources(num_cpus_per_worker=0)
        .debugging(seed=0, log_sys_usage=False)
    )


def memory_of_children() -> list[int]:
    """Returns the memory of each process that this one started, directly or not, in bytes.

    Shared pages count in parts (PSS).
    """
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(words[1]), []).append(int(status.parent.name))
    waiting, sizes = children.get(os.getpid(), [])[:], []
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        sizes += [1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return sorted(sizes)


def measure(contestant: str, options: argparse.Namespace, fault: str) -> dict[str, Any]:
    """Returns the figures of one contestant; with a fault, the error."""
    import tfpolicies

    config = config_of(contestant, options, fault)
    tfpolicies.PGTF2Policy  # noqa: B018  imports TensorFlow, which is not timed
    began = time.perf_counter()
    algorithm = config.build()
    start = time.perf_counter() - began
    try:
        algorithm.train()  # traces what is compiled
        if fault != "none":
            return {"error": "none"}
        memory = memory_of_children()
        began, steps = time.perf_counter(), 0
        for _ in range(options.iterations):
            steps += algorithm.train()["num_env_steps_sampled_this_iter"]
        seconds = time.perf_counter() - began
    except Exception as error:
        notes = [str(error), *getattr(error, "__notes__", ())]
        return {"error": f"{type(error).__name__}: {' '.join(' '.join(notes).split())}"}
    finally:
        algorithm.stop()
    return {"start": start, "steps": steps / seconds, "memory": memory}


def _describe_death(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the exit status of a process without a result, and the last line that it printed."""
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return f"died: {done.returncode}, {last}"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampling.env_processes", description=__doc__
    )
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    parser.add_argument("--busy", action="store_true", help="the environment computes")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # a contestant and a fault
    options = parser.parse_args()
    if options.one:
        logging.disable(logging.CRITICAL)
        print("\n" + json.dumps(measure(options.one[0], options, options.one[1])))
        return 0
    failed = 0
    errors = []
    print(f"{'':20}{'start-up, s':>12}{'steps/s':>10}{'processes':>11}{'MiB, largest':>14}")
    for contestant in CONTESTANTS:
        for fault in FAULTS:
            words = [sys.executable, "-m", "benchmarks.sampling.env_processes", *sys.argv[1:]]
            words += ["--one", contestant, fault]
            env = {**os.environ, "RAY_worker_niceness": "0"}  # Ray gives its workers 15
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
            died_as_meant = fault == "killed" and done.returncode == -signal.SIGKILL
            failed += done.returncode != 0 and not died_as_meant
            result = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
            if fault != "none":
                errors.append((contestant, fault, result.get("error", _describe_death(done))))
            elif result:
                memory = result["memory"]
                largest = memory[-1] / _MIB if memory else 0.0
                print(
                    f"{contestant:20}{result['start']:12.1f}{result['steps']:10.0f}"
                    f"{len(memory):11}{largest:14.0f}",
                    flush=True,
                )
    for contestant, fault, error in errors:
        print(f"\n{contestant}, one copy {fault}:\n    {error}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
