"""Counts how large the house is: lines, functions, classes, names, types, frames of a call.

`python -m tools.code_metrics` prints the code lines of each room (without docstrings, comments and
blank lines), how long functions are, which classes have more than 500 lines (with docstrings), how
many public names the classes have that users meet, how many annotated parameters are `Any` (without
ported code), and how many Python frames of this package one call of a policy takes. `--encode FILE`
writes them down.
"""

import argparse
import ast
import io
import json
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import probe

probe.hush()

import numpy as np  # noqa: E402
from gymnasium import spaces  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import tfpolicies  # noqa: E402
from tfpolicies import PPOTF1Policy, PPOTF2Policy  # noqa: E402
from tfpolicies.testing import random_batch  # noqa: E402
from tools.call_paths import profile  # noqa: E402

PACKAGE = Path(tfpolicies.__file__).parent
CLASSES = (
    *("Policy", "TFPolicy", "PPOTF2Policy", "PolicyMap", "RolloutWorker"),
    *("Algorithm", "AlgorithmConfig", "SampleBatch"),
)
QUANTILES = {"median": 0.5, "90th": 0.9, "99th": 0.99, "longest": 1.0}
_LARGE = 500
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


# -- lines ------------------------------------------------------------------------------------


def code_lines(source: str) -> set[int]:
    """Returns the numbers of the lines that hold code, docstrings excepted."""
    results: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT and token.type != tokenize.ENDMARKER:
            results.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if _is_text(node):
            results.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return results


def _is_text(node: Any) -> bool:
    """Whether a statement is nothing but a string: a docstring, or words behind a constant."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def room_of(path: Path) -> str:
    """Returns the room of a file of the package."""
    parts = path.relative_to(PACKAGE).parts
    return f"{parts[0]}/" if len(parts) > 1 else "."


def lines_by_room() -> dict[str, int]:
    """Returns the code lines of each room."""
    results: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        count = len(code_lines(path.read_text()))
        results[room_of(path)] = results.get(room_of(path), 0) + count
    return results


def function_lengths() -> list[int]:
    """Returns the code lines of each function's body, inner functions counted in and alone."""
    results = []
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        lines = code_lines(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
                results.append(len(lines.intersection(body)))
    return sorted(results)


def length_figures() -> dict[str, int]:
    """Returns how many functions there are, and how long they are."""
    lengths = function_lengths()
    last = len(lengths) - 1
    quantiles = {name: lengths[round(share * last)] for name, share in QUANTILES.items()}
    return {"functions": len(lengths), **quantiles}


def large_classes() -> dict[str, int]:
    """Returns the lines of the largest classes, docstrings included."""
    result = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > _LARGE:
                    result[node.name] = lines
    return dict(sorted(result.items(), key=lambda item: -item[1]))


def parameter_types() -> dict[str, int]:
    """Returns how many annotated parameters there are outside ported code, and which say little."""
    types = [
        ast.unparse(parameter.annotation)
        for path in PACKAGE.rglob("*.py")
        if room_of(path) != "compat/"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for parameter in _parameters(node.args)
        if parameter.annotation is not None
    ]
    return {"annotated": len(types), "Any": types.count("Any"), "object": types.count("object")}


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return named + [x for x in (arguments.vararg, arguments.kwarg) if x is not None]


# -- names ------------------------------------------------------------------------------------


def public_names() -> dict[str, int]:
    """Returns how many names without a leading underscore each class shows."""
    return {name: len(_public(getattr(tfpolicies, name))) for name in CLASSES}


def _public(result: type) -> list[str]:
    return [name for name in dir(result) if not name.startswith("_")]


# -- frames -----------------------------------------------------------------------------------


def frames() -> dict[str, int]:
    """Returns the frames of `compute_actions` in each way of acting, and of `learn_on_batch`."""
    return {name: profile(call).calls for name, call in _calls()}


def _calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    space, actions = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)
    rows = np.zeros((8, 4), np.float32)
    ways = {
        "onnx": PPOTF2Policy(space, actions, {"inference": "onnx"}),
        "traced": PPOTF2Policy(space, actions, {"inference": "tf"}),
        "session": PPOTF1Policy(space, actions, {"inference": "tf"}),
    }
    for name, policy in ways.items():
        yield f"compute_actions, {name}", lambda policy=policy: policy.compute_actions(rows)
    settings = {"train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 2}
    policy = PPOTF2Policy(space, actions, settings)
    batch = random_batch(policy, 64)
    yield "learn_on_batch, 2 epochs of 2 minibatches", lambda: policy.learn_on_batch(batch)


def figures() -> dict[str, dict[str, int]]:
    """Returns everything that is counted."""
    rooms = lines_by_room()
    return {
        "code lines": {**rooms, "all": sum(rooms.values())},
        "lines of a function": length_figures(),
        "large classes": large_classes(),
        "public names": public_names(),
        "parameters": parameter_types(),
        "frames of a call": frames(),
    }


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m tools.code_metrics", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures are written")
    options = parser.parse_args()
    result = figures()
    console = Console()
    for title, numbers in result.items():
        table = Table(title=title, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, number in numbers.items():
            table.add_row(name, f"{number:,}")
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
