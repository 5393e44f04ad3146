"""Measures training steps of SAC and DQN beside a loop by hand, Stable-Baselines3 and SBX.

`python -m benchmarks.replay.training_steps --help` lists the options; README.md says how to read
the results. Each contestant is one process that lives through all rounds and, in a round, does a
stretch of steps when it is its turn. It has one thread, or as many as there are cores.
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

from benchmarks import FOLDER, ROOT
from benchmarks.overview.main_job import interpreter_of, machine, parser_beside
from tools import peers

MOST_BY_OTHERS = 0.10  # of the machine, in a round that counts
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
OURS = "ours"  # the interpreter that runs this


class Contestant(NamedTuple):
    """One of those who are measured."""

    name: str
    script: str
    interpreter: str = OURS  # or a peer's name
    has_all_cores: bool = False  # else one thread


class Task(NamedTuple):
    """What is measured: a variant of the scripts, and who takes part; ours comes first."""

    name: str
    variant: str
    title: str
    steps: int  # of a stretch
    contestants: tuple[Contestant, ...]


class Stretch(NamedTuple):
    """What a stretch of steps took, in ms for each step."""

    cpu: float
    clock: float


_OURS = Contestant("ours", "ours_replay.py")
_BY_HAND = Contestant("by hand", "bare_replay.py")
_SB3 = Contestant("SB3", "peer_sb3_replay.py", "sb3")
_SBX = Contestant("SBX", "peer_sbx_replay.py", "sbx")
_ONE_THREAD = (_OURS, _BY_HAND, _SB3, _SBX)
_ALL_CORES = (
    *(each._replace(has_all_cores=True) for each in (_OURS, _BY_HAND, _SBX)),
    _SB3._replace(name="SB3, all cores", has_all_cores=True),
    _SB3._replace(name="SB3, one thread"),
)
_SAC = "SAC, Pendulum-v1, {} of 256 rows per step, {}"
_DQN = "DQN, CartPole-v1, 128 updates of 64 rows per 256 steps, one thread"

TASKS = (
    Task("sac", "sac", _SAC.format("one update", "one thread"), 256, _ONE_THREAD),
    Task("sac8", "sac8", _SAC.format("eight updates", "one thread"), 256, _ONE_THREAD),
    Task("sac-cores", "sac", _SAC.format("one update", "all cores"), 256, _ALL_CORES),
    Task("sac8-cores", "sac8", _SAC.format("eight updates", "all cores"), 256, _ALL_CORES),
    Task("dqn", "dqn", _DQN, 2048, (_OURS, _SB3)),
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
                result: dict[str, Any] = json.loads(line)
                return result
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

    def ratios(self, name: str) -> Stretch:
        """Returns the medians of what it took as multiples of ours, round by round."""
        pairs = list(zip(self.taken[name], self.taken[_OURS.name], strict=True))
        cpu, clock = ([a[k] / b[k] for a, b in pairs] for k in range(2))
        return Stretch(statistics.median(cpu), statistics.median(clock))


def measure(task: Task, interpreters: dict[str, Path], rounds: int, patience: int) -> Outcome:
    """Takes a task's rounds; one in which others took much of the machine is repeated.

    Args:
        task: what is measured.
        interpreters: who runs each contestant.
        rounds: that count.
        patience: how many rounds are repeated at most; later ones count as they are.
    """
    processes = {}
    outcome = Outcome({each.name: [] for each in task.contestants})
    try:
        for each in task.contestants:
            command = [
                str(interpreters[each.interpreter]),
                str(FOLDER / "replay" / each.script),
                task.variant,
            ]
            processes[each.name] = Process(command, _environment(each))
        outcome.versions = {name: process.versions for name, process in processes.items()}
        while len(outcome.others) < rounds:
            result, others = _round(task, processes, len(outcome.others))
            if others > MOST_BY_OTHERS and outcome.repeated < patience:
                outcome.repeated += 1
                continue
            outcome.others.append(others)
            for name, stretch in result.items():
                outcome.taken[name].append(stretch)
    finally:
        for process in processes.values():
            process.close()
    return outcome


def _round(
    task: Task, processes: dict[str, Process], number: int
) -> tuple[dict[str, Stretch], float]:
    """Returns a stretch of each, in another order each time, and what share others took."""
    names = [each.name for each in task.contestants]
    names = names[number % len(names) :] + names[: number % len(names)]
    busy, clock = _busy_seconds(), time.perf_counter()
    results = {name: processes[name].run(task.steps) for name in names}
    ours = sum(stretch.cpu for stretch in results.values()) * task.steps / 1e3
    whole = (time.perf_counter() - clock) * (os.cpu_count() or 1)
    return results, max(0.0, _busy_seconds() - busy - ours) / whole


def _busy_seconds() -> float:
    """Returns the seconds that all processors were busy; 0 where the system does not tell."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return 0.0
    times = [int(x) for x in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def _environment(contestant: Contestant) -> dict[str, str]:
    """Returns a process's variables: ours find this checkout, peers find nothing."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ours = {"PYTHONPATH": str(ROOT)}
    return variables | ({} if contestant.has_all_cores else ONE_THREAD) | ours


def table(result: dict[Task, Outcome]) -> Table:
    """Returns the figures as a table."""
    made = Table(title="ms per environment step; medians of rounds, and as multiples of ours")
    for heading in ("", "who", "CPU", "clock", "CPU / ours", "clock / ours", "others", "repeated"):
        made.add_column(heading)
    for task, outcome in result.items():
        for name in (each.name for each in task.contestants):
            cpu, clock = outcome.median(name)
            first = name == _OURS.name
            others = f"{100 * max(outcome.others):.0f} % at most" if first else ""
            made.add_row(
                task.title if first else "",
                name,
                f"{cpu:.3f}",
                f"{clock:.3f}",
                *(f"{ratio:.2f}" for ratio in outcome.ratios(name)),
                others,
                str(outcome.repeated) if first else "",
            )
    return made


def main() -> int:
    """Runs what the command line asks for."""
    options = _parse()
    console = Console()
    console.width = max(console.width, 120)
    chosen = [task for task in TASKS if task.name in options.only.split(",")]
    expected = {each.interpreter for task in chosen for each in task.contestants}
    interpreters = {OURS: Path(sys.executable)}
    for peer in (peers.SB3, peers.SBX):
        if peer.name in expected:
            interpreters[peer.name] = interpreter_of(peer, options)
    load = os.getloadavg()
    actual = {
        task: measure(task, interpreters, options.rounds, options.patience) for task in chosen
    }
    console.print(table(actual))
    console.print(f"Load of the machine before: {load}, after: {os.getloadavg()}")
    written = {
        "machine": machine() | {"load_before": load, "load_after": os.getloadavg()},
        "tasks": {task.name: vars(outcome) for task, outcome in actual.items()},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "replay_speed.json").write_text(json.dumps(written, indent=1) + "\n")
    return 0


def _parse() -> argparse.Namespace:
    names = ",".join(task.name for task in TASKS)
    parser = parser_beside((peers.SB3, peers.SBX), "replay_speed", __doc__)
    parser.add_argument("--only", default=names, help=f"some of {names}, by commas")
    parser.add_argument("--rounds", type=int, default=5, help="that count")
    parser.add_argument(
        "--patience", type=int, default=20, help="rounds of a task that are repeated at most"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
