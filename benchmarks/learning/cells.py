"""The cells of the learning benchmark: what is known of them, and how they are run.

A finished cell is a row of `learning.csv`, and up to 50 rows of `learning_curves.csv`. Both files
only grow; of several rows of a cell the newest counts.
"""

import csv
import datetime
import json
import os
import queue
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ROOT
from benchmarks.learning.tasks import Cell

HERE = Path(__file__).resolve().parent
SCRIPTS = {
    "ours": "ours_learning.py",
    "sb3": "peer_sb3_learning.py",
    "sbx": "peer_sb3_learning.py",
}
COLUMNS = (
    *("task", "library", "algorithm", "env", "part", "steps", "seed", "settings"),
    *("return_mean", "return_std", "wall_seconds", "cpu_seconds", "load_before", "load_after"),
    *("commit", "versions", "finished", "error"),
)
CURVE_COLUMNS = ("task", "library", "seed", "settings", "step", "return_mean")
POINTS = 50  # of a stored curve
TIME_LIMIT = 8 * 3600.0  # seconds for one cell
_THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


class Key(NamedTuple):
    """What a row is of; a cell whose settings have changed is another one."""

    task: str
    library: str
    seed: int
    settings: str


def key_of(cell: Cell) -> Key:
    """Returns what the rows of a cell are found by."""
    return Key(cell.task.name, cell.library, cell.seed, cell.task.digest())


def _key_of_row(row: dict[str, str]) -> Key:
    return Key(row["task"], row["library"], int(row["seed"]), row["settings"])


class Table:
    """The two CSV files.

    Args:
        folder: where they are, or will be.
    """

    def __init__(self, folder: Path) -> None:
        self.results = folder / "learning.csv"
        self.curves = folder / "learning_curves.csv"
        self._lock = threading.Lock()

    def rows(self) -> dict[Key, dict[str, str]]:
        """Returns the newest row of each cell, failed ones included."""
        return {_key_of_row(row): row for row in _read(self.results)}

    def finished(self) -> dict[Key, dict[str, str]]:
        """Returns the newest row of each cell whose newest row is no failure."""
        return {key: row for key, row in self.rows().items() if not row["error"]}

    def curve_rows(self) -> dict[Key, list[tuple[float, float]]]:
        """Returns the curve of each cell: steps, and mean returns of training."""
        results: dict[Key, dict[float, float]] = {}
        for row in _read(self.curves):
            points = results.setdefault(_key_of_row(row), {})
            points[float(row["step"])] = float(row["return_mean"])
        return {key: sorted(points.items()) for key, points in results.items()}

    def add(self, row: dict[str, Any], curve: Sequence[tuple[float, float]]) -> None:
        """Appends a cell, its curve first."""
        named = {name: row[name] for name in CURVE_COLUMNS[:4]}
        points = [{**named, "step": f"{x:.0f}", "return_mean": f"{y:.6g}"} for x, y in curve]
        with self._lock:
            _append(self.curves, CURVE_COLUMNS, points)
            _append(self.results, COLUMNS, [row])


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _append(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def thinned(
    curve: Sequence[tuple[float, float]], points: int = POINTS
) -> list[tuple[float, float]]:
    """Returns at most so many points of a curve, evenly spaced, the last one among them.

    Points without a return, before the first episode has ended, are left out.

    >>> thinned([(1, float("nan")), (2, 0.5), (3, 1.0), (4, 2.0)], points=2)
    [(2, 0.5), (4, 2.0)]
    """
    known = [(x, y) for x, y in curve if y == y]
    count = min(points, len(known))
    return [known[(i + 1) * len(known) // count - 1] for i in range(count)]


def commit_of(root: Path) -> str:
    """Returns the commit of a checkout, with "-dirty" if its code is not that of the commit."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "tfpolicies", "benchmarks/learning/*.py")
    return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if changed else "")


@dataclass
class Runner:
    """Runs cells, each in a process of its own.

    Attributes:
        table: where they are filed.
        interpreters: by library.
        work: folder for run folders and what processes say, one for each cell.
        tell: called with a line when a cell begins and when it ends.
    """

    table: Table
    interpreters: dict[str, Path]
    work: Path
    tell: Callable[[str], None]

    def run(self, cells: Iterable[Cell], at_once: int) -> int:
        """Runs cells, in their order, some of them at once; returns how many failed.

        A cell that fails is filed with its last words, and does not end the others.
        """
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in cells:
            waiting.put(cell)
        failed: list[Cell] = []

        def work() -> None:
            while True:
                try:
                    cell = waiting.get_nowait()
                except queue.Empty:
                    return
                if not self._run(cell):
                    failed.append(cell)

        threads = [threading.Thread(target=work) for _ in range(at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(failed)

    def _run(self, cell: Cell) -> bool:
        """Runs a cell and files it; returns whether it succeeded."""
        row, curve = self._known(cell), []
        self.tell(f"{_now()} {cell.name} begins")
        row["load_before"] = f"{os.getloadavg()[0]:.2f}"
        try:
            answer = self._answer(cell)
            row |= figures_of(answer)
            curve = thinned(answer["curve"])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            row["error"] = self._last_words(cell, error)
        row |= {"load_after": f"{os.getloadavg()[0]:.2f}", "finished": _now()}
        self.table.add(row, curve)
        self.tell(f"{_now()} {cell.name}: {row['error'] or row['return_mean']}")
        return not row["error"]

    def _known(self, cell: Cell) -> dict[str, Any]:
        """Returns the columns that are known before a cell runs."""
        task = cell.task
        known = {name: getattr(task, name) for name in ("algorithm", "env", "part", "steps")}
        row = dict.fromkeys(COLUMNS, "") | known | key_of(cell)._asdict()
        return row | {"commit": commit_of(ROOT)}

    def _answer(self, cell: Cell) -> dict[str, Any]:
        folder = self._folder(cell)
        folder.mkdir(parents=True, exist_ok=True)
        task = cell.task
        names = ("algorithm", "env", "steps", "own_weights")
        request = {name: getattr(task, name) for name in names}
        request |= {"seed": cell.seed, "settings": task.settings()}
        command = [str(self.interpreters[cell.library]), str(HERE / SCRIPTS[cell.library])]
        command += [json.dumps(request), "--folder", str(folder)]
        if cell.library != "ours":
            command += ["--library", cell.library]
        with (folder / "said.txt").open("w") as said:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                timeout=TIME_LIMIT,
                env=_environment(cell.library),
                cwd=folder,
                check=True,
            )
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer

    def _folder(self, cell: Cell) -> Path:
        """Returns where a cell works; another commit does not train on in its run folder."""
        return self.work / f"{cell.name}-{cell.task.digest()}-{commit_of(ROOT)}"

    def _last_words(self, cell: Cell, error: Exception) -> str:
        """Returns the last line that a failed process said."""
        said = self._folder(cell) / "said.txt"
        lines = said.read_text(errors="replace").strip().splitlines() if said.exists() else []
        return (lines[-1] if lines else str(error))[-300:] or type(error).__name__


def _environment(library: str) -> dict[str, str]:
    """Returns a process's environment variables: one thread; ours finds this checkout."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ours = {"PYTHONPATH": str(ROOT)}
    return variables | _THREADS | ours


def figures_of(answer: dict[str, Any]) -> dict[str, str]:
    """Returns the columns of a row that a process's answer fills.

    >>> figures_of({"returns": [1.0, 3.0], "wall_seconds": 2.04, "cpu_seconds": 1.0,
    ...             "versions": {"numpy": "2.4"}})["return_std"]
    '1'
    """
    returns = answer["returns"]
    return {
        "return_mean": f"{statistics.fmean(returns):.6g}",
        "return_std": f"{statistics.pstdev(returns):.6g}",
        "wall_seconds": f"{answer['wall_seconds']:.1f}",
        "cpu_seconds": f"{answer['cpu_seconds']:.1f}",
        "versions": " ".join(f"{name}={each}" for name, each in answer["versions"].items()),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
