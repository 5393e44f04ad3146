"""Trains algorithms beside Stable-Baselines3 and SBX, and files what they learn.

`python -m benchmarks.learning.run_cells` runs the cells that `benchmarks/results/learning.csv` has
not yet, the shortest first: a cell is a task, a library and a seed. It can be killed and started
again. `--list` shows what is missing and the time that it needs; `--report` writes
`docs/tables/learning.md` from that file.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.learning import tables
from benchmarks.learning.cells import Runner, Table, key_of
from benchmarks.learning.tasks import LIBRARIES, TASKS, Cell, Task, cells
from tools import peers

PEERS = {"sb3": peers.SB3, "sbx": peers.SBX}


def main() -> int:
    """Does what the command line asks for; returns 1 if a cell failed."""
    options = _parse()
    table = Table(options.out)
    if options.report:
        tables.write(table)
        return 0
    chosen = list(cells(options.task or TASKS, options.library, options.seeds))
    if options.list:
        _list(chosen, table)
        return 0
    finished = {} if options.again else table.finished()
    waiting = [cell for cell in chosen if key_of(cell) not in finished]
    minutes = estimate_minutes(waiting, table)
    waiting.sort(key=minutes.__getitem__)
    return _run(waiting, table, options)


def estimate_minutes(cells: Iterable[Cell], table: Table) -> dict[Cell, float]:
    """Returns the minutes on one core that each cell will take; infinity if nothing is known.

    It is the median of the finished cells of its algorithm, environment, steps and library, or of
    those of other libraries.
    """
    seconds: dict[tuple[str, ...], list[float]] = {}
    for key, row in table.finished().items():
        name = (row["algorithm"], row["env"], row["steps"])
        for group in (name, (*name, key.library)):
            seconds.setdefault(group, []).append(float(row["cpu_seconds"]))
    results = {}
    for cell in cells:
        name = (cell.task.algorithm, cell.task.env, str(cell.task.steps))
        durations = seconds.get((*name, cell.library)) or seconds.get(name)
        results[cell] = statistics.median(durations) / 60 if durations else math.inf
    return results


def _run(waiting: list[Cell], table: Table, options: argparse.Namespace) -> int:
    interpreters = {"ours": Path(sys.executable)}
    try:
        for name in sorted({cell.library for cell in waiting} - {"ours"}):
            interpreters[name] = peers.interpreter(PEERS[name], options.peers.absolute())
    except peers.PeerError as error:
        print(error, file=sys.stderr)
        return 1
    work = options.work.absolute()
    runner = Runner(table, interpreters, work, lambda line: print(line, flush=True))
    return 1 if runner.run(waiting, options.at_once) else 0


def _list(chosen: list[Cell], table: Table) -> None:
    """Prints the result of each cell; for one that waits, the minutes that it needs."""
    rows = table.rows()
    waiting = [cell for cell in chosen if not rows.get(key_of(cell), {}).get("return_mean")]
    minutes = estimate_minutes(waiting, table)
    for cell in chosen:
        row = rows.get(key_of(cell), {})
        outcome = row.get("error") or row.get("return_mean")
        outcome = outcome or f"waits: about {minutes[cell]:.1f} minutes"
        print(f"{cell.task.name:44} {cell.library:5} {cell.seed}  {outcome}")
    total = sum(value for value in minutes.values() if value < math.inf)
    unknown = sum(value == math.inf for value in minutes.values())
    print(f"{len(waiting)} cells wait: {total:.0f} minutes on one core", end="")
    print(f", and {unknown} of unknown duration." if unknown else ".")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning.run_cells", description=__doc__
    )
    parser.add_argument(
        "--task", type=_tasks, help="tasks whose name has one of these words, by commas"
    )
    parser.add_argument(
        "--library", type=_libraries, default=LIBRARIES, help="some of ours,sb3,sbx, by commas"
    )
    parser.add_argument("--seeds", type=int, help="the most that each library has")
    parser.add_argument("--at-once", type=int, choices=(1, 2), default=2, help="processes")
    parser.add_argument("--again", action="store_true", help="runs finished cells, too")
    parser.add_argument("--list", action="store_true", help="only says what is known of each cell")
    parser.add_argument("--report", action="store_true", help="only writes docs/tables/learning.md")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV")
    parser.add_argument("--work", type=Path, default=RESULTS / "runs", help="folder of run folders")
    parser.add_argument(
        "--peers", type=Path, default=peers.PEERS, help="folder of the peers' environments"
    )
    return parser.parse_args()


def _tasks(text: str) -> list[Task]:
    results = [task for task in TASKS if any(word in task.name for word in text.split(","))]
    if not results:
        names = ", ".join(task.name for task in TASKS)
        raise argparse.ArgumentTypeError(f"no task has {text!r} in its name; there are {names}")
    return results


def _libraries(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(LIBRARIES):
        raise argparse.ArgumentTypeError(f"unknown: {sorted(unknown)}; known: {LIBRARIES}")
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
