"""The command `serve`: exports, and runs that are exported first, over HTTP and gRPC."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tfpolicies.cli.ends import DONE
from tfpolicies.errors import ExportError, MissingPackageError

_SPEC = "policy_spec.json"
_ONNX = "onnx"  # the folder that `tfpolicies export` makes in the one that it is given


def serve(args: argparse.Namespace) -> int:
    """Serves policies until SIGTERM or Ctrl-C; then finishes what runs."""
    try:
        from tfpolicies.serving.repository import Repository, named
        from tfpolicies.serving.served import Limits
        from tfpolicies.serving.server import Address, run
    except ImportError as error:
        raise MissingPackageError(
            f"Serving needs packages that are not installed ({error}). Install them: "
            "pip install 'tfpolicies[serve]'"
        ) from error
    limits = Limits(
        args.max_batch, args.max_sequences, args.sequence_idle, args.max_body, args.threads
    )
    with tempfile.TemporaryDirectory(prefix="tfpolicies-serve-") as own:
        sources = [_named(source) for source in args.sources]
        folders = [
            (name or _called(path), _export_of(path, Path(own, str(number))))
            for number, (name, path) in enumerate(sources)
        ]
        address = Address(args.host, args.port, args.grpc_port)
        run(Repository(named(folders), limits, _say), address, _say)
    return DONE


def _say(line: str) -> None:
    print(line, flush=True)


def _named(source: str) -> tuple[str, Path]:
    """Returns the name that `NAME=PATH` gives, "" if it gives none, and the path."""
    name, given, path = source.partition("=")
    if given and not Path(source).exists():
        return name, Path(path)
    return "", Path(source)


def _called(path: Path) -> str:
    """Returns what a model is called after: its folder, or the one that was exported into."""
    path = path.absolute()
    path = path if path.is_dir() else path.parent
    return path.parent.name if path.name == _ONNX else path.name


def _export_of(path: Path, own: Path) -> Path:
    """Returns the folder of an export, or of versions; a run is exported into `own`.

    Raises:
        ExportError: if there is neither an export nor a run.
    """
    if not path.exists():
        raise ExportError(
            f"{str(path)!r} does not exist. Give what `tfpolicies export` wrote, or a run."
        )
    folder = path if path.is_dir() else path.parent
    for found in (folder, folder / _ONNX):
        numbered = [each for each in found.glob("*") if each.name.isdecimal()]
        if any((each / _SPEC).exists() for each in (found, *numbered)):
            return found
    _say(f"exporting {path}")
    words = ["export", str(path), "--to", str(own), "--onnx"]
    command = [sys.executable, "-m", "tfpolicies", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise ExportError(f"{str(path)!r} is no ONNX export, and cannot be exported: {reason}")
    return own / _ONNX
