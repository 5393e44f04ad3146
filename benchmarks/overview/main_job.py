"""Measures tfpolicies against Stable-Baselines3, RLlib and the bare environment, in one run.

`python -m benchmarks.overview.main_job --help` lists the options; README.md says how to read the
results.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks import FOLDER, RESULTS, ROOT
from benchmarks.overview import report
from benchmarks.overview.plan import LEARNING, MEASUREMENTS, Contestant, Measurement
from tools import peers

PEERS = {peer.name: peer for peer in (peers.SB3, peers.RLLIB)}
TIME_LIMIT = 1200.0  # seconds for one run of a script


@dataclass
class Results:
    """What the runs gave so far."""

    values: report.Values = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    errors: list[dict[str, str]] = field(default_factory=list)

    def has_failed(self, measurement: Measurement, contestant: Contestant) -> bool:
        """Whether this contestant failed in this measurement; then it is not tried again."""
        return any(
            (error["measurement"], error["contestant"]) == (measurement.name, contestant.label)
            for error in self.errors
        )


def main() -> int:
    """Runs what the command line asks for; returns 1 if a contestant failed."""
    options = _parse()
    console = Console()
    console.width = max(console.width, 120)  # the table is not broken for a narrow terminal or file
    chosen = [measurement for measurement in MEASUREMENTS if measurement.name in options.only]
    try:
        interpreters = _interpreters(options, chosen)
    except peers.PeerError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    load_before = os.getloadavg()
    results = Runs(interpreters, options.peers / "bytecode").measure(chosen, options.quick)
    records = _shown(console, chosen, results)
    options.out.mkdir(parents=True, exist_ok=True)
    written = {
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "quick": options.quick,
        "machine": machine() | {"load_before": load_before, "load_after": os.getloadavg()},
        "versions": results.versions,
        "learning_settings": LEARNING,
        "results": records,
        "errors": results.errors,
    }
    (options.out / "main_job.json").write_text(json.dumps(written, indent=1) + "\n")
    report.chart(chosen, results.values, options.out / "main_job.png")
    console.print(f"Written: {options.out / 'main_job.json'}, {options.out / 'main_job.png'}")
    return 1 if results.errors else 0


def _shown(console: Console, chosen: list[Measurement], results: Results) -> list[dict[str, Any]]:
    """Prints the table and what went wrong; returns the records of the table."""
    records = report.summary(chosen, results.values)
    console.print(report.table(chosen, records))
    for failed in results.errors:
        console.print(f"[red]{failed['contestant']}, {failed['measurement']}:[/red]")
        console.print(failed["message"], markup=False, highlight=False, soft_wrap=True)
    return records


def _parse() -> argparse.Namespace:
    names = [measurement.name for measurement in MEASUREMENTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overview.main_job", description=__doc__
    )
    parser.add_argument(
        "--only", type=_names, default=names, help=f"some of {','.join(names)}, by commas"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short repetition of each: does it all run?"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for main_job.json and .png"
    )
    parser.add_argument(
        "--peers", type=Path, default=peers.PEERS, help="folder for the peers' environments"
    )
    for name in PEERS:
        parser.add_argument(
            f"--{name}-python", type=Path, help=f"an interpreter that has {name}'s packages already"
        )
    return parser.parse_args()


def _names(text: str) -> list[str]:
    known = [measurement.name for measurement in MEASUREMENTS]
    if unknown := set(text.split(",")) - set(known):
        raise argparse.ArgumentTypeError(f"unknown: {sorted(unknown)}; known: {known}")
    return text.split(",")


def _interpreters(options: argparse.Namespace, chosen: list[Measurement]) -> dict[str, Path]:
    """Returns the interpreter of everyone who takes part, making environments that are missing."""
    taking_part = {
        contestant.interpreter for measurement in chosen for contestant in measurement.contestants
    }
    results = {"ours": Path(sys.executable)}
    for name in sorted(taking_part - {"ours"}):
        results[name] = interpreter_of(PEERS[name], options)
    return results


@dataclass
class Runs:
    """Runs the scripts, each time in a process of its own.

    Attributes:
        interpreters: Name of each interpreter -> its path.
        bytecode: Folder where Python keeps compiled modules between runs, for everyone alike;
            otherwise start-up would depend on how a package was installed.
        settings: The hyperparameters of the measurement "learning".
        results: What the runs gave so far.
    """

    interpreters: dict[str, Path]
    bytecode: Path
    settings: dict[str, Any] = field(default_factory=lambda: LEARNING)
    results: Results = field(default_factory=Results)

    def measure(self, chosen: list[Measurement], quick: bool) -> Results:
        """Runs every repetition; contestants take turns, in another order each time.

        So whatever else the machine does meets all of them alike.
        """
        repetitions, seconds = (1, 0.2) if quick else (5, 1.0)
        planned = [
            (measurement, contestant, repetition)
            for measurement in chosen
            for repetition in range(-1 if measurement.startup_counts else 0, repetitions)
            for contestant in _rotated(measurement.contestants, repetition)
        ]
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=len(planned))
            for measurement, contestant, repetition in planned:
                progress.update(task, description=f"{measurement.name}: {contestant.label}")
                if not self.results.has_failed(measurement, contestant):
                    self._run(measurement, contestant, seconds, repetition)
                progress.advance(task)
        return self.results

    def _run(
        self, measurement: Measurement, contestant: Contestant, seconds: float, repetition: int
    ) -> None:
        """Runs one script once and files its figures or its error.

        The figures of a negative repetition do not count.
        """
        command = [str(self.interpreters[contestant.interpreter]), str(FOLDER / contestant.script)]
        command += [measurement.name, "--variant", contestant.variant, "--seconds", str(seconds)]
        command += [
            "--seed",
            str(self.settings["first_seed"] + max(repetition, 0)),
            "--settings",
            json.dumps(self.settings),
        ]
        command += ["--started", repr(time.time())]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT,
                env=self._environment(contestant),
                cwd=tempfile.gettempdir(),
            )
            done.check_returncode()
            answer = json.loads(done.stdout.strip().splitlines()[-1])
        except (OSError, subprocess.SubprocessError, json.JSONDecodeError, IndexError) as error:
            names = {"measurement": measurement.name, "contestant": contestant.label}
            self.results.errors.append(names | {"message": _last_words(error)})
            return
        if repetition >= 0:
            self.results.versions[contestant.script] = answer["versions"]
            for key, value in answer["figures"].items():
                place = (measurement.name, contestant.label, key)
                self.results.values.setdefault(place, []).append(value)

    def _environment(self, contestant: Contestant) -> dict[str, str]:
        """Returns a run's environment variables: ours finds this checkout, peers find nothing."""
        dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        variables = {name: value for name, value in os.environ.items() if name not in dropped}
        variables["PYTHONPYCACHEPREFIX"] = str(self.bytecode.absolute())
        return variables | {"PYTHONPATH": str(ROOT)}


def parser_beside(
    beside: Sequence[peers.Peer], name: str, description: str | None
) -> argparse.ArgumentParser:
    """Returns the options of a benchmark `benchmarks.<name>` that has these peers."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder for {name}.json")
    parser.add_argument(
        "--peers", type=Path, default=peers.PEERS, help="folder for the peers' environments"
    )
    for peer in beside:
        parser.add_argument(
            f"--{peer.name}-python",
            type=Path,
            help=f"an interpreter that has {peer.name}'s packages already",
        )
    return parser


def interpreter_of(peer: peers.Peer, options: argparse.Namespace) -> Path:
    """Returns the peer's interpreter: the one that was given, or one that is made.

    Raises:
        PeerError: if it cannot be made.
    """
    python: Path | None = getattr(options, f"{peer.name}_python")
    return python.absolute() if python else peers.interpreter(peer, options.peers)


def compare(
    measurement: Measurement,
    peer: peers.Peer,
    settings: dict[str, Any],
    options: argparse.Namespace,
    name: str,
) -> int:
    """Takes one measurement by itself, prints its table and writes it as JSON.

    Args:
        measurement: what is measured, with whom.
        peer: beside whom.
        settings: The hyperparameters.
        options: Those of `parser_beside`, and `quick`.
        name: Of the JSON file, in the folder `out`.

    Returns:
        1 if a contestant failed, else 0.
    """
    console = Console()
    console.width = max(console.width, 120)
    try:
        interpreters = {"ours": Path(sys.executable), peer.name: interpreter_of(peer, options)}
    except peers.PeerError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        return 1
    runs = Runs(interpreters, options.peers / "bytecode", settings)
    results = runs.measure([measurement], quick=options.quick)
    records = _shown(console, [measurement], results)
    options.out.mkdir(parents=True, exist_ok=True)
    written = {
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": results.versions,
        "settings": settings,
        "results": records,
        "errors": results.errors,
    }
    (options.out / name).write_text(json.dumps(written, indent=1) + "\n")
    console.print(f"Written: {options.out / name}")
    return 1 if results.errors else 0


def _rotated(contestants: tuple[Contestant, ...], by: int) -> tuple[Contestant, ...]:
    by %= len(contestants)
    return contestants[by:] + contestants[:by]


def _last_words(error: Exception) -> str:
    """Returns the end of what a failed run said."""
    said = getattr(error, "stderr", None) or str(error)
    said = said.decode(errors="replace") if isinstance(said, bytes) else said
    return "\n".join(said.strip().splitlines()[-4:])


def machine() -> dict[str, Any]:
    """Returns what the measurements ran on."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
