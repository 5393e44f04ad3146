"""What every measuring script shares: its arguments, its clock, its rows, its line of JSON.

The scripts run in interpreters that have no packages in common but NumPy, from Python 3.10 on;
so this file needs no more than that.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

BATCH_SIZES = (1, 32, 256)
ONE_UPDATE_ROWS = (128, 2048)
ENV_COUNTS = (1, 8, 32)
FRAGMENT = 128  # steps of each environment in one rollout
ROWS, EPOCHS, MINIBATCH = 2048, 10, 256  # of one update
LEAGUE = 20  # policies
HIDDEN = [64, 64]

Figures = dict[str, float]  # figure -> value, e.g. {"8": 9012.0}


@dataclass(frozen=True)
class Request:
    """What one run of a script is asked for.

    Attributes:
        variant: Which of its ways the contestant is to use, "" where it has one only.
        seconds: How long to measure one figure, after warm-up.
        seed: Seed of the run.
        started: `time.time()` of the moment before this process was started.
        settings: The hyperparameters of the measurement "learning".
    """

    variant: str
    seconds: float
    seed: int
    started: float
    settings: dict[str, Any]


def serve(
    packages: list[str],
    measurements: dict[str, Callable[[Request], Figures]],
    versions: dict[str, str] | None = None,
) -> None:
    """Runs the measurement that the command line names and prints one JSON line.

    Args:
        packages: Distributions whose versions go with the figures.
        measurements: Name of each measurement that the script knows -> its function.
        versions: Further versions to state, of what need not be installed as a distribution.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("measurement", choices=sorted(measurements))
    parser.add_argument("--variant", default="")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--started", type=float, default=time.time())
    parser.add_argument("--settings", type=json.loads, default="{}")
    options = vars(parser.parse_args())
    figures = measurements[options.pop("measurement")](Request(**options))
    stated = {"python": platform.python_version(), **(versions or {})}
    stated |= {name: metadata.version(name) for name in packages}
    print(json.dumps({"figures": figures, "versions": stated}), flush=True)


def serve_stretches(
    packages: list[str], makers: dict[str, Callable[[int], Callable[[int], None]]]
) -> None:
    """Makes what the command line names, then runs a stretch of steps for each line of the input.

    A line of the input is a number of steps; for each, and once when it is ready, one line of JSON
    is printed: the versions first, then the seconds of CPU and of the clock that the stretch took.

    Args:
        packages: Distributions whose versions are stated.
        makers: Name of each variant -> a function of a seed that gives what does so many steps.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=sorted(makers))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run = makers[options.variant](options.seed)
    print(json.dumps({name: metadata.version(name) for name in packages}), flush=True)
    for line in sys.stdin:
        cpu, clock = time.process_time(), time.perf_counter()
        run(int(line))
        took = {"cpu": time.process_time() - cpu, "clock": time.perf_counter() - clock}
        print(json.dumps(took), flush=True)


def hush() -> None:
    """Silences warnings and TensorFlow's banners in this process; to be called before imports."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def microseconds(call: Callable[[], Any], seconds: float) -> float:
    """Returns the median duration of `call` in µs, over `seconds` after a warm-up."""
    durations: list[float] = []
    for _ in range(20):
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        before = time.perf_counter()
        call()
        durations.append(time.perf_counter() - before)
    return statistics.median(durations) * 1e6


def cpu_microseconds(work: Callable[[], int], seconds: float) -> float:
    """Returns the µs of CPU of this process per unit of work, over a stretch of time.

    Args:
        work: does something and returns how many units that were.
        seconds: How long the stretch is, by the clock.
    """
    units, started = 0, time.process_time()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        units += work()
    return (time.process_time() - started) / units * 1e6


def rate(work: Callable[[], int], seconds: float) -> float:
    """Returns the median of units per second, `work` giving the units it has done.

    The first two calls are warm-up; at least three are measured.
    """
    rates: list[float] = []
    work(), work()
    end = time.perf_counter() + seconds
    while len(rates) < 3 or time.perf_counter() < end:
        before = time.perf_counter()
        units = work()
        rates.append(units / (time.perf_counter() - before))
    return statistics.median(rates)


def league_figures(
    new_map: Callable[[int], Any],
    add: Callable[[Any, str], None],
    snapshot: Callable[[Any, str], None],
    seconds: float,
) -> Figures:
    """Returns what it costs to add policies to a map and to act with them.

    Args:
        new_map: Makes a map of a given capacity.
        add: Adds a policy with weights of its own under an id.
        snapshot: Adds a copy of the first policy under an id.
        seconds: How long to measure acting.
    """

    def milliseconds(call: Callable[[Any, str], None], policies: Any, name: str) -> float:
        durations = []
        for i in range(LEAGUE - 1):
            before = time.perf_counter()
            call(policies, f"{name}_{i}")
            durations.append(time.perf_counter() - before)
        return statistics.median(durations) * 1e3

    def acting(policies: Any) -> float:
        random = np.random.RandomState(0)
        ids = list(policies.keys())
        return microseconds(
            lambda: policies[ids[random.randint(len(ids))]].compute_actions(obs), seconds
        )

    obs = observations(1)
    whole, small = new_map(LEAGUE), new_map(5)
    for policies in (whole, small):
        add(policies, "main")
        policies["main"].compute_actions(obs)
    figures = {"add": milliseconds(add, whole, "fresh")}
    milliseconds(add, small, "fresh")
    copies = new_map(LEAGUE)
    add(copies, "main")
    copies["main"].compute_actions(obs)
    figures["snapshot"] = milliseconds(snapshot, copies, "copy")
    main = whole["main"]
    for policies in (whole, small):
        for name in list(policies.keys()):
            policies[name].compute_actions(obs)
    return figures | {
        "evicted": acting(small),
        "memory": acting(whole),
        "bare": microseconds(lambda: main.compute_actions(obs), seconds),
    }


def update_figures(update: Callable[[], float], seconds: float) -> Figures:
    """Returns the duration of the first update and the median of the later ones, in ms.

    Args:
        update: Does one update and returns how long it took, in seconds.
        seconds: How long to measure; at least three updates are.
    """
    first = update()
    update()
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while len(durations) < 3 or time.perf_counter() < end:
        durations.append(update())
    return {"update": statistics.median(durations) * 1e3, "first": first * 1e3}


def observations(batch: int) -> np.ndarray:
    """Returns observations like those of CartPole, float32 [batch, 4]."""
    return np.random.RandomState(batch).uniform(-0.2, 0.2, (batch, 4)).astype(np.float32)


def training_rows() -> dict[str, np.ndarray]:
    """Returns the rows of the measurement "update", the same for every contestant.

    They look as if a fresh policy had collected them: both actions equally likely, values 0.
    """
    random = np.random.RandomState(7)
    return {
        "obs": observations(ROWS),
        "actions": random.randint(0, 2, ROWS).astype(np.int64),
        "rewards": np.ones(ROWS, np.float32),
        "terminateds": np.zeros(ROWS, bool),
        "truncateds": np.zeros(ROWS, bool),
        "advantages": random.normal(size=ROWS).astype(np.float32),
        "value_targets": random.uniform(0, 20, ROWS).astype(np.float32),
        "vf_preds": np.zeros(ROWS, np.float32),
        "action_logp": np.full(ROWS, np.log(0.5), np.float32),
        "action_dist_inputs": np.zeros((ROWS, 2), np.float32),
    }


def learning_figures(
    iterate: Callable[[], tuple[float, int]], request: Request, ready: float
) -> Figures:
    """Trains until the goal and returns what that took.

    Args:
        iterate: Does one iteration (rollout and update) and returns the mean return of the last
            100 training episodes (NaN before there are 100) and the environment steps so far.
        request: Its settings hold "goal" (mean return) and "max_steps" (where to give up).
        ready: `time.time()` when everything was built.

    Returns:
        "seconds" from the start of the process to the goal, "setup" up to `ready`, "steps".

    Raises:
        RuntimeError: if the goal is not reached within "max_steps".
    """
    goal, limit = request.settings["goal"], request.settings["max_steps"]
    mean, steps = float("nan"), 0
    while not mean >= goal:
        if steps >= limit:
            raise RuntimeError(f"no mean return of {goal} within {limit} steps, last was {mean}")
        mean, steps = iterate()
    return {
        "seconds": time.time() - request.started,
        "setup": ready - request.started,
        "steps": steps,
    }
