"""Measures training steps of SAC and DQN beside a loop by hand and Stable-Baselines3.

`python -m benchmarks.replay_speed --help` lists the options; README.md says how to read the
results. Each contestant is one process with one thread that lives through all rounds and, in a
round, does a stretch of steps when it is its turn. All of them may be pinned to one core.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import peers
from benchmarks.main_job import HERE, interpreter_of, machine, parser_beside

SCRIPTS = {"ours": "ours_replay.py", "by hand": "bare_replay.py", "SB3": "peer_sb3_replay.py"}
MOST_BY_OTHERS = 0.10  # of the machine, in a round that counts
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}


class Task(NamedTuple):
    """What is measured: a variant of the scripts, and who takes part."""

    variant: str
    title: str
    steps: int  # of a stretch
    contestants: tuple[str, ...]


class Stretch(NamedTuple):
    """What a stretch of steps took, in ms for each step."""

    cpu: float
    clock: float


TASKS = (
    Task("sac", "SAC, Pendulum-v1, one update of 256 rows per step", 256, tuple(SCRIPTS)),
    Task("sac8", "SAC, Pendulum-v1, eight updates per step", 256, tuple(SCRIPTS)),
    Task("dqn", "DQN, CartPole-v1, 128 updates of 64 rows per 256 steps", 2048, ("ours", "SB3")),
)


class Process:
    """A contestant that is ready to run.

    Args:
        command: of the script.
        environment: its variables.

    Attributes:
        versions: of its packages.
    """

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._errors = Path(tempfile.mkstemp(suffix=".txt")[1])
        with self._errors.open("w") as errors:
            self._running = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=tempfile.gettempdir(),
            )
        self.versions = self._answer()

    def run(self, steps: int) -> Stretch:
        """Does so many steps."""
        print(steps, file=self._running.stdin, flush=True)
        took = self._answer()
        return Stretch(1e3 * took["cpu"] / steps, 1e3 * took["clock"] / steps)

    def close(self) -> None:
        """Ends the process."""
        self._running.communicate()
        self._errors.unlink()

    def _answer(self) -> dict[str, Any]:
        for line in self._running.stdout or ():
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"{self._running.args} ended:\n{self._errors.read_text()[-2000:]}")


@dataclass
class Outcome:
    """What the rounds of a task gave.

    Attributes:
        taken: stretches by contestant, one for each round.
        others: the share of the machine that others took, in each round.
        repeated: rounds that did not count.
        versions: of packages, by contestant.
    """

    taken: dict[str, list[Stretch]]
    others: list[float] = field(default_factory=list)
    repeated: int = 0
    versions: dict[str, Any] = field(default_factory=dict)

    def median(self, name: str) -> Stretch:
        """Returns the median of a contestant's rounds."""
        return Stretch(*map(statistics.median, zip(*self.taken[name], strict=True)))

    def ratio(self, name: str) -> float:
        """Returns the median of the CPU time as a multiple of ours, round by round."""
        pairs = zip(self.taken[name], self.taken["ours"], strict=True)
        return statistics.median(other.cpu / ours.cpu for other, ours in pairs)


def measure(task: Task, interpreters: dict[str, Path], rounds: int, patience: int) -> Outcome:
    """Takes a task's rounds; one in which others took much of the machine is repeated.

    Args:
        task: what is measured.
        interpreters: who runs each contestant.
        rounds: that count.
        patience: how many rounds are repeated at most; later ones count as they are.
    """
    processes = {}
    outcome = Outcome({name: [] for name in task.contestants})
    try:
        for name in task.contestants:
            command = [str(interpreters[name]), str(HERE / SCRIPTS[name]), task.variant]
            processes[name] = Process(command, _environment(name))
        outcome.versions = {name: each.versions for name, each in processes.items()}
        while len(outcome.others) < rounds:
            found, others = _round(task, processes, len(outcome.others))
            if others > MOST_BY_OTHERS and outcome.repeated < patience:
                outcome.repeated += 1
                continue
            outcome.others.append(others)
            for name, stretch in found.items():
                outcome.taken[name].append(stretch)
    finally:
        for each in processes.values():
            each.close()
    return outcome


def _round(
    task: Task, processes: dict[str, Process], number: int
) -> tuple[dict[str, Stretch], float]:
    """Returns a stretch of each, in another order each time, and what share others took."""
    names = [*task.contestants]
    names = names[number % len(names) :] + names[: number % len(names)]
    busy, clock = _busy_seconds(), time.perf_counter()
    found = {name: processes[name].run(task.steps) for name in names}
    ours = sum(stretch.cpu for stretch in found.values()) * task.steps / 1e3
    whole = (time.perf_counter() - clock) * (os.cpu_count() or 1)
    return found, max(0.0, _busy_seconds() - busy - ours) / whole


def _busy_seconds() -> float:
    """Returns the seconds that all processors were busy; 0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    times = [int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def _environment(name: str) -> dict[str, str]:
    """Returns a process's variables: ours find this checkout, peers find nothing."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ours = {} if name == "SB3" else {"PYTHONPATH": str(HERE.parent)}
    return variables | ONE_THREAD | ours


def table(found: dict[Task, Outcome]) -> Table:
    """Returns the figures as a table."""
    made = Table(title="ms per environment step; medians of rounds, and the CPU time beside ours")
    for heading in ("", "who", "CPU", "clock", "of ours", "others took", "repeated"):
        made.add_column(heading)
    for task, outcome in found.items():
        for name in task.contestants:
            cpu, clock = outcome.median(name)
            first = name == task.contestants[0]
            others = f"{100 * max(outcome.others):.0f} % at most" if first else ""
            made.add_row(
                task.title if first else "",
                name,
                f"{cpu:.3f}",
                f"{clock:.3f}",
                f"{outcome.ratio(name):.2f}",
                others,
                str(outcome.repeated) if first else "",
            )
    return made


def main() -> int:
    """Runs what the command line asks for."""
    options = _parse()
    console = Console()
    console.width = max(console.width, 120)
    python, sb3 = Path(sys.executable), interpreter_of(peers.SB3, options)
    interpreters = {"ours": python, "by hand": python, "SB3": sb3}
    load = os.getloadavg()
    chosen = [task for task in TASKS if task.variant in options.only.split(",")]
    found = {task: measure(task, interpreters, options.rounds, options.patience) for task in chosen}
    console.print(table(found))
    console.print(f"Load of the machine before: {load}, after: {os.getloadavg()}")
    written = {
        "machine": machine() | {"load_before": load, "load_after": os.getloadavg()},
        "tasks": {task.variant: vars(outcome) for task, outcome in found.items()},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "replay_speed.json").write_text(json.dumps(written, indent=1) + "\n")
    return 0


def _parse() -> argparse.Namespace:
    names = ",".join(task.variant for task in TASKS)
    parser = parser_beside(peers.SB3, "replay_speed", __doc__)
    parser.add_argument("--only", default=names, help=f"some of {names}, by commas")
    parser.add_argument("--rounds", type=int, default=5, help="that count")
    parser.add_argument(
        "--patience", type=int, default=20, help="rounds of a task that are repeated at most"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
