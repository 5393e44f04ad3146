"""Runs the notebooks: `python -m tools.site.notebooks [--quick]`.

Without `--quick` their outputs are stored in them. Lists of two texts in the metadata of a cell,
under `quick`, are replaced in quick runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tools.site.code_blocks import ROOT, PageError

FOLDER = ROOT / "examples" / "notebooks"
_MAX_CELL_SECONDS = 1200


def get_notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def run_notebook(path: Path, *, quick: bool) -> nbformat.NotebookNode:
    """Runs a notebook in an empty folder; returns it with its outputs.

    Args:
        path: the file, which is not changed.
        quick: whether the replacements for quick runs are made.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
        PageError: if a text to replace is not in its cell.
    """
    notebook = nbformat.read(path, as_version=4)
    for number, cell in enumerate(notebook.cells):
        for old, new in cell.metadata.get("quick", []) if quick else []:
            if old not in cell.source:
                raise PageError(f"{path.name}, cell {number}: it does not contain {old!r}.")
            cell.source = cell.source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=_MAX_CELL_SECONDS, resources=resources)
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="with the replacements of the cells")
    args = parser.parse_args()
    for path in get_notebooks():
        notebook = run_notebook(path, quick=args.quick)
        if not args.quick:
            nbformat.write(notebook, path)
        print(f"{path.relative_to(ROOT)}: passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
