"""Counts how many small faults the tests notice: `python -m tools.mutants`.

Puts one fault at a time into a module (another comparison, operator or constant, a condition turned
round, a statement left out) and runs the tests of that module. `--seed` and `--count` choose which
faults; the same choice hits the same places as long as the structure of a module stays.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = Path(__file__).with_suffix(".json")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}

_IGNORED = shutil.ignore_patterns("__pycache__", "stored", "results", ".peers")

Fault = tuple[int, str]
"""The number of a node in the order of `ast.walk`, and the change."""


def list_faults(source: str) -> list[Fault]:
    """Returns all faults that a module may get."""
    return [
        (number, change)
        for number, node in enumerate(ast.walk(ast.parse(source)))
        for change in _changes(node)
    ]


def _changes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare):
        yield "comparison"
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield "operator"
    elif isinstance(node, ast.BoolOp):
        yield "and/or"
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield "constant"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return"


def mutate(source: str, fault: Fault) -> str:
    """Returns the module with one fault."""
    tree = ast.parse(source)
    number, change = fault
    node = list(ast.walk(tree))[number]
    _CHANGE[change](node)
    return ast.unparse(ast.fix_missing_locations(tree))


def _change_comparison(node: ast.AST) -> None:
    node.ops[0] = _COMPARISONS[type(node.ops[0])]()


def _change_operator(node: ast.AST) -> None:
    node.op = _OPERATORS[type(node.op)]()


def _change_junction(node: ast.AST) -> None:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()


def _change_condition(node: ast.AST) -> None:
    node.test = ast.UnaryOp(ast.Not(), copy.copy(node.test))


def _change_constant(node: ast.AST) -> None:
    node.value = not node.value if isinstance(node.value, bool) else node.value + 1


def _drop_value(node: ast.AST) -> None:
    node.value = ast.Constant(None)


_CHANGE: dict[str, Callable[[ast.AST], None]] = {
    "comparison": _change_comparison,
    "operator": _change_operator,
    "and/or": _change_junction,
    "condition": _change_condition,
    "constant": _change_constant,
    "statement": _drop_value,
    "return": _drop_value,
}


def is_noticed(tree: Path, module: str, tests: list[str], fault: Fault) -> bool:
    """Runs the tests of a module with a fault in a copy of the project; True if one fails."""
    path = tree / module
    source = path.read_text()
    path.write_text(mutate(source, fault))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(
            command,
            cwd=tree,
            capture_output=True,
            check=False,
            timeout=600,
            env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(source)


def main() -> int:
    """Prints the share of faults that tests notice, by module and altogether."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the project to test")
    parser.add_argument("--modules", type=Path, default=MODULES, help="modules and their tests")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="list the faults that stay unnoticed")
    options = parser.parse_args()
    entries = json.loads(options.modules.read_text())
    rng = random.Random(options.seed)
    share = options.count // len(entries)
    work = [
        (entry, fault)
        for entry in entries
        for fault in rng.sample(list_faults((options.tree / entry["module"]).read_text()), share)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trees = []
        for number in range(options.processes):
            trees.append(Path(folder) / str(number))
            for name in ("tfpolicies", "tests", "tools", "docs", "examples", "benchmarks"):
                if (options.tree / name).exists():
                    shutil.copytree(options.tree / name, trees[-1] / name, ignore=_IGNORED)
            shutil.copy(options.tree / "pyproject.toml", trees[-1])
        noticed = _run(work, trees)
    for entry in entries:
        results = [
            result for (other, _), result in zip(work, noticed, strict=True) if other is entry
        ]
        print(f"{sum(results):>4} of {len(results)}  {entry['module']}")
    if options.show:
        for (entry, fault), result in zip(work, noticed, strict=True):
            if not result:
                print(f"unnoticed: {entry['module']} {fault}")
    print(f"{sum(noticed):>4} of {len(noticed)}  altogether")
    return 0


def _run(work: list[tuple[dict[str, object], Fault]], trees: list[Path]) -> list[bool]:
    """Each copy of the project has one fault at a time."""
    free = list(trees)

    def run(item: tuple[dict[str, object], Fault]) -> bool:
        entry, fault = item
        tree = free.pop()
        try:
            return is_noticed(tree, entry["module"], entry["tests"], fault)
        finally:
            free.append(tree)

    with concurrent.futures.ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(run, work))


if __name__ == "__main__":
    sys.exit(main())
