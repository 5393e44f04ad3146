"""Writes `constraints.txt`: the version of each package that the tests ran with.

Run it when tox has made its environments: `tox --notest`, then `python -m tools.constraints`.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "constraints.txt"
ENVIRONMENTS = {"3.10": "py310-oldest", "3.11": "py311", "3.12": "py312", "3.13": "py313"}
"""The tox environment of each supported version of Python, oldest first."""

_HEADER = """\
# The versions that the tests ran with, by version of Python: on 3.10 the oldest supported ones, on
# others the newest when this file was written. `python -m tools.constraints` writes it.
#
#     pip install -c constraints.txt tfpolicies
"""
_LIST = (
    "import json, importlib.metadata as m;"
    "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
)
_NOT_CONSTRAINED = {"tfpolicies", "pip", "setuptools"}


def read_versions(python: Path) -> dict[str, str]:
    """Returns the versions of the distributions of an environment, by normalised name."""
    done = subprocess.run([python, "-I", "-c", _LIST], capture_output=True, text=True, check=True)
    versions = {normalize(name): version for name, version in json.loads(done.stdout).items()}
    return {name: x for name, x in versions.items() if name not in _NOT_CONSTRAINED}


def normalize(name: str) -> str:
    """Returns the name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def format_constraints(versions: Mapping[str, Mapping[str, str]]) -> str:
    """Returns the lines of the file.

    Args:
        versions: of each package by the version of Python, oldest first.
    """
    pythons, lines = list(versions), []
    for name in sorted({name for packages in versions.values() for name in packages}):
        groups: dict[str, list[str]] = {}
        for python in pythons:
            if name in versions[python]:
                groups.setdefault(versions[python][name], []).append(python)
        lines += [f"{name}=={x}{_make_marker(group, pythons)}" for x, group in groups.items()]
    return "\n".join(lines)


def _make_marker(group: list[str], pythons: list[str]) -> str:
    if group == pythons:
        return ""
    if group == pythons[-len(group) :]:
        return f'; python_version >= "{group[0]}"'
    return "; " + " or ".join(f'python_version == "{python}"' for python in group)


def main() -> int:
    """Writes the file; returns 1 if an environment is missing."""
    parser = argparse.ArgumentParser(prog="python -m tools.constraints", description=__doc__)
    parser.add_argument("--tox", type=Path, default=ROOT / ".tox", help="folder of tox")
    folder = parser.parse_args().tox
    pythons = {x: folder / name / "bin" / "python" for x, name in ENVIRONMENTS.items()}
    missing = [str(path) for path in pythons.values() if not path.exists()]
    if missing:
        print(f"{', '.join(missing)} is missing. Run `tox --notest` first.", file=sys.stderr)
        return 1
    versions = {python: read_versions(path) for python, path in pythons.items()}
    FILE.write_text(f"{_HEADER}\n{format_constraints(versions)}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
