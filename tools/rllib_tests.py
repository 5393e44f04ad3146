"""RLlib's own unit tests on this package: `python -m tools.rllib_tests --rllib PATH`.

`PATH` is the folder `rllib` of the sources of release 2.10.0. The tests of its old stack are ported
by `tfpolicies port` into a temporary folder, beside its examples, and run there. What they import
of RLlib that has no place here is a stand-in that fails when it is used, naming itself
(`rllib_stand_in.py`); so is PyTorch. Loops over frameworks have TensorFlow's alone, configs for
PyTorch or the new stack are for `tf2` and the old one; `ray.init()` does nothing. Prints a table by
file; `--tests FILE` writes each test's verdict, `--missing FILE` the names that tests and examples
want and that are not here. `rllib_verdicts.py` has repairs of tests, and which do not count.
`--only TEXT ...` runs files whose path contains one of the texts.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tfpolicies.compat.port import port_script
from tfpolicies.errors import UsageError
from tools.rllib_stand_in import PACKAGE, SECONDS, VERDICTS
from tools.rllib_verdicts import is_repaired, repaired, why_not_counted

FILES = {
    "policy": (
        "policy_map policy_state_swapping policy_checkpoint_restore export_checkpoint_and_model "
        "compute_log_likelihoods sample_batch multi_agent_batch rnn_sequencing view_requirement "
        "policy"
    ),
    "evaluation": (
        "rollout_worker trajectory_view_api episode episode_v2 agent_collector postprocessing "
        "worker_set envs_that_crash env_runner_v2"
    ),
    "env": "multi_agent_env",
    "algorithms": (
        "algorithm algorithm_config callbacks_old_stack callbacks_on_algorithm "
        "callbacks_on_env_runner algorithm_export_checkpoint"
    ),
    "models": (
        "models preprocessors distributions action_distributions attention_nets lstms "
        "conv2d_default_stacks"
    ),
    "utils/schedules": "schedules",
    "utils/exploration": "explorations random_encoder",
    "utils/replay_buffers": (
        "fifo_replay_buffer multi_agent_mixin_replay_buffer multi_agent_prioritized_replay_buffer "
        "multi_agent_replay_buffer prioritized_replay_buffer_replay_buffer_api replay_buffer "
        "reservoir_buffer segment_tree_replay_buffer_api"
    ),
}
"""The tests that concern what this package offers, by their folder."""

OUTCOMES = ("ok", "ok*", "failed", "missing", "late", "not run", "not counted")
_REST = re.compile(r"^(\s*(?:from|import)\s+)ray\.rllib\b", re.MULTILINE)
_WHOLE = re.compile(r"^(\s*)import (ray|torch)$", re.MULTILINE)
_TORCH = re.compile(r"""(\bframework(?:\(|=)["'])torch(?=["'])""")
_STACK = re.compile(r"(\b_enable_new_api_stack=)True\b")
_STAND_IN = """\
import functools
from tools.rllib_stand_in import install, lookup
__getattr__ = functools.partial(lookup, __name__)
"""
_INSTALL = "install()\n"
_SECONDS_OF_A_FILE = 60  # beside those of its tests


class Verdict(NamedTuple):
    """How a test ended."""

    file: str
    test: str
    outcome: str  # one of OUTCOMES
    reason: str


# -- the folder -------------------------------------------------------------------------------


def test_files(rllib: Path, only: list[str]) -> list[Path]:
    """Returns the tests that run, relative to the sources, in the order of `only`."""
    paths = [
        Path(folder, "tests", f"test_{name}.py")
        for folder, names in FILES.items()
        for name in names.split()
    ]
    results = [path for text in only for path in paths if text in str(path)]
    if absent := [path for path in results if not (rllib / path).is_file()]:
        raise UsageError(
            f"--rllib: {rllib} has no {absent[0]}. Give the folder `rllib` of release 2.10.0."
        )
    return results


def translated(source: Path) -> str:
    """Returns a file of RLlib with imports of this package and of stand-ins."""
    text = port_script(source.read_bytes(), str(source)).source.decode()
    text = text.replace('"ray.rllib.examples.', f'"{PACKAGE}.examples.')  # environments by name
    text = _STACK.sub(r"\1False", _TORCH.sub(r"\1tf2", text))
    return _WHOLE.sub(rf"\1import {PACKAGE}.\2 as \2", _REST.sub(rf"\1{PACKAGE}", text))


def write_folder(rllib: Path, folder: Path, *, repairs: bool = False) -> None:
    """Writes RLlib's examples and tests, ported, as the package of what is left of RLlib."""
    package = folder / PACKAGE
    for source in sorted(rllib.rglob("*.py")):
        path = source.relative_to(rllib)
        if path.parts[0] == "examples" or "tests" in path.parts[:-1]:
            (package / path).parent.mkdir(parents=True, exist_ok=True)
            text = translated(source)
            text = repaired(str(path.with_suffix("")), text) if repairs else text
            (package / path).write_text(text)
    for inner in (path for path in package.rglob("*") if path.is_dir()):
        if not (inner / "__init__.py").exists():
            (inner / "__init__.py").write_text(_STAND_IN)
    (package / "__init__.py").write_text(f"{_STAND_IN}{_INSTALL}")


# -- the tests --------------------------------------------------------------------------------


def tests_of(source: Path) -> list[str]:
    """Returns the names of the tests in a file, `Class::test` or `test`."""
    results = []
    for node in ast.parse(source.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = (one for one in inner if isinstance(one, ast.FunctionDef))
        results += [f"{prefix}{one.name}" for one in functions if one.name.startswith("test")]
    return results


def run_file(rllib: Path, folder: Path, path: Path, seconds: int) -> list[Verdict]:
    """Runs the tests of a file in a process of their own."""
    noted = folder / "verdicts"
    noted.write_text("")
    tests = tests_of(rllib / path)
    home = Path(__file__).parent.parent
    settings = {"PYTHONPATH": f"{folder}{os.pathsep}{home}", VERDICTS: str(noted)}
    settings |= {SECONDS: str(seconds), "TF_CPP_MIN_LOG_LEVEL": "3", "RAY_DEDUP_LOGS": "0"}
    words = ["-q", "-p", "tools.rllib_stand_in", "-p", "no:cacheprovider", "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", *words, str(folder / PACKAGE / path)]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(_SECONDS_OF_A_FILE + seconds * min(len(tests), 4))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # its own session, with what it started
        process.wait()
    lines = [json.loads(line) for line in noted.read_text().splitlines()]
    return [_verdict(path, test, lines) for test in tests]


def _verdict(path: Path, test: str, lines: list[dict[str, str]]) -> Verdict:
    """Returns the verdict of a test: its own line, or that of the class or file it is in."""
    file = str(path.with_suffix(""))
    own = [line for line in lines if line["node"].endswith(f"::{test}")]
    of_file = [line for line in lines if line["node"].endswith(path.name)]
    result = next(
        (line for line in own if line["outcome"] != "passed"), (own or of_file or [None])[0]
    )
    if result is None:
        return Verdict(file, test, "not run", "the file took too long or its process ended")
    if result["outcome"] == "passed":
        return Verdict(file, test, "ok*" if is_repaired(file, test) else "ok", "")
    if why := why_not_counted(file, test):
        return Verdict(file, test, "not counted", why)
    return Verdict(file, test, *_failure(result["reason"]))


def _failure(reason: str) -> tuple[str, str]:
    """Returns how a test ended that did not pass, and why in one line."""
    if "TimeoutError: the test took too long" in reason:
        return "late", reason
    if "MissingName: " not in reason:
        return "failed", reason
    return "missing", reason.partition("MissingName: ")[2]


# -- what is missing --------------------------------------------------------------------------


def wanted(rllib: Path, path: Path) -> set[str]:
    """Returns the names of RLlib that a file imports and that have no place here."""
    names = {remark.name for remark in port_script((rllib / path).read_bytes(), str(path)).remarks}
    return {name for name in names if not _is_foreign(name)}


def _is_foreign(name: str) -> bool:
    """Whether a name is of PyTorch, of the new stack, or a helper of tests and examples."""
    parts = ("torch", "Torch", ".core.", ".connectors.", ".examples.", ".tests.", "test_utils")
    parts += ("rl_module", "env_runner", "_catalog", ".tf_learner")
    return any(part in name for part in parts)


def missing_names(rllib: Path, verdicts: list[Verdict]) -> list[tuple[str, int, int, int]]:
    """Returns each missing name with the tests that failed by it, and the files that import it."""
    stopped = Counter(verdict.reason for verdict in verdicts if verdict.outcome == "missing")
    tests = Counter(
        n for file in {v.file for v in verdicts} for n in wanted(rllib, Path(f"{file}.py"))
    )
    scripts = sorted(path.relative_to(rllib) for path in (rllib / "examples").rglob("*.py"))
    examples = Counter(name for path in scripts for name in wanted(rllib, path))
    names = {*stopped, *tests, *examples}
    rows = [(name, stopped[name], tests[name], examples[name]) for name in names]
    return sorted(rows, key=lambda row: (-sum(row[1:]), row[0]))


# -- tables -----------------------------------------------------------------------------------


def by_file(verdicts: list[Verdict]) -> Iterator[tuple[str, ...]]:
    """Yields the rows of the table by file, that of all files last."""
    for file in [*dict.fromkeys(verdict.file for verdict in verdicts), "all"]:
        counts = Counter(v.outcome for v in verdicts if file in (v.file, "all"))
        yield file, str(counts.total()), *(str(counts[outcome]) for outcome in OUTCOMES)


def share(verdicts: list[Verdict]) -> str:
    """Returns how many of the tests that count pass, as a sentence."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    counted = counts.total() - counts["not counted"]
    both = counts["ok"] + counts["ok*"]
    return f"{counted} count: {counts['ok'] / counted:.0%} ok, {both / counted:.0%} with ok*."


def markdown(titles: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> str:
    """Returns a table in Markdown."""
    lines = [titles, ("---",) * len(titles), *rows]
    return "".join(f"| {' | '.join(str(x).replace('|', '/') for x in row)} |\n" for row in lines)


def main() -> int:
    """Runs the tests and prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m tools.rllib_tests", description=__doc__)
    parser.add_argument("--rllib", type=Path, required=True, help="the folder of its sources")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="of files' names")
    parser.add_argument("--seconds", type=int, default=60, help="for one test (default 60)")
    parser.add_argument("--tests", type=Path, metavar="FILE", help="where verdicts go")
    parser.add_argument("--missing", type=Path, metavar="FILE", help="where missing names go")
    options = parser.parse_args()
    console = Console()
    verdicts: list[Verdict] = []
    titles = ("file", "tests", *OUTCOMES)
    with tempfile.TemporaryDirectory() as name:
        write_folder(options.rllib, Path(name), repairs=True)
        for path in test_files(options.rllib, options.only):
            verdicts += run_file(options.rllib, Path(name), path, options.seconds)
            console.print(*list(by_file(verdicts))[-2])
            if options.tests:
                text = markdown(titles, by_file(verdicts)) + "\n"
                options.tests.write_text(text + markdown(Verdict._fields, iter(verdicts)))
    table = Table(*titles)
    for row in by_file(verdicts):
        table.add_row(*row)
    console.print(table, share(verdicts), sep="\n")
    if options.missing:
        rows = iter(missing_names(options.rllib, verdicts))
        fields = ("name", "tests that it stopped", "test files", "examples")
        options.missing.write_text(markdown(fields, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
