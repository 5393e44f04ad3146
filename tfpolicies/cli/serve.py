"""The command `serve`: serves exports over HTTP and gRPC, and exports runs first."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tfpolicies.cli.ends import DONE
from tfpolicies.cli.serving import find_providers
from tfpolicies.errors import ExportError, MissingPackageError, UsageError, near_matches
from tfpolicies.export.spec_file import (
    ONNX_FOLDER,
    SPEC_FILE,
    form_of,
    list_versions,
    name_model,
)
from tfpolicies.system.folder_lock import make_locked_folder, remove_abandoned
from tfpolicies.system.paths import describe_path, resolve_path, shown

_OWN = "tfpolicies-serve-"  # prefix of temporary folders for exported runs
_KINDS = {  # formats that are not served; the files for Triton cannot sample
    "saved_model": "a SavedModel",
    "litert": "a LiteRT file",
    "triton": "an export for triton",
}


def serve(args: argparse.Namespace) -> int:
    """Serves policies until SIGTERM or Ctrl-C; see `tfpolicies.serving.shutdown`."""
    try:
        from tfpolicies.serving.access import Access, read_token
        from tfpolicies.serving.logs import Log
        from tfpolicies.serving.repository import Repository, named
        from tfpolicies.serving.served import Limits
        from tfpolicies.serving.server import Address, run
        from tfpolicies.serving.tls import read_tls
    except ImportError as error:
        raise MissingPackageError(
            f"Serving needs packages that are not installed ({error}). Install them: "
            "pip install 'tfpolicies[serve]', or without TensorFlow pip install tfpolicies-serve"
        ) from error
    providers = tuple(find_providers(args.device))
    values = {name: value for name, value in vars(args).items() if name in Limits._fields}
    limits = Limits(**values, providers=providers)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise UsageError(
            "--tls-cert and --tls-key belong together: give a certificate and its private key."
        )
    log = Log(as_json=args.log_format == "json")
    tls = read_tls(args.tls_cert, args.tls_key, log) if args.tls_cert else None
    token = read_token(args.token_file, log) if args.token_file else ""
    hosts, origins = args.allowed_host, args.allowed_origin
    access = Access(args.host, hosts, origins, control=args.control, token=token)
    sources = [_named(source) for source in args.sources]
    _require_one_folder_each([name for name, _ in sources if name])
    sources.sort(key=lambda source: not source[0])  # explicit names take precedence
    paths = named([(name or _default_name(path), path) for name, path in sources])
    pins = _pins_by_model(args.pin, [*paths])
    with _own_folder() as own, contextlib.closing(log):
        folders = {
            name: _export_of(path, Path(own, str(number)), log)
            for number, (name, path) in enumerate(paths.items())
        }
        address = Address(args.host, args.port, args.grpc_port)
        repository = Repository(folders, limits, log, pins)
        record, drain = log.record if args.access_log else None, args.drain_seconds
        run(repository, address, access, log, drain_seconds=drain, tls=tls, record=record)
    return DONE


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """Yields a temporary folder; also removes folders of servers that were killed."""
    remove_abandoned(Path(tempfile.gettempdir()).glob(f"{_OWN}*"))
    folder, lock = make_locked_folder(lambda: Path(tempfile.mkdtemp(prefix=_OWN)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _require_one_folder_each(names: Sequence[str]) -> None:
    name, count = next(iter(Counter(names).most_common(1)), ("", 0))
    if count > 1:
        raise UsageError(f"{name}=FOLDER is given {count} times. Give each model its own name.")


def _named(source: str) -> tuple[str, Path]:
    """Splits `NAME=PATH`; the name is "" if there is none.

    Raises:
        ExportError: if there is no such file or folder.
    """
    name, given, written = source.partition("=")
    if not given or resolve_path(source).exists():
        name, written = "", source
    path = resolve_path(written)
    if not path.exists():
        raise ExportError(
            f"{describe_path(written, path)} does not exist. Give the folder of `tfpolicies "
            "export` or a run."
        )
    return name, path


def _default_name(path: Path) -> str:
    return name_model(_get_folder(path))


def _get_folder(path: Path) -> Path:
    """Returns a folder itself, or the folder of a file."""
    return path if path.is_dir() else path.parent


def _pins_by_model(options: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Returns the versions of `--pin VERSION` and `--pin NAME=VERSION`, by model.

    Raises:
        UsageError: for an unknown model, or a model with two versions.
    """
    pins: dict[str, str] = {}
    for option in options:
        name, _, version = option.rpartition("=")
        if not name and len(models) > 1:
            raise UsageError(
                f"--pin {option} must name one of the {len(models)} models: "
                f"--pin {models[0]}={version or 'VERSION'}."
            )
        name = name or models[0]
        if name not in models:
            raise UsageError(
                f"--pin {option} names no model that is served.{near_matches(name, models)} "
                f"The models are {', '.join(models)}."
            )
        if not version or name in pins:
            raise UsageError(
                f"--pin gives the model {name} {'two versions' if version else 'no version'}. "
                f"Give it one: --pin {name}=VERSION."
            )
        pins[name] = version
    return pins


def _export_of(path: Path, own: Path, say: Callable[[str], object] = print) -> Path:
    """Returns the folder of an export or of its versions; a run is exported into `temp_folder`.

    Raises:
        ExportError: if the path is neither an export nor a run.
    """
    folder = _get_folder(path)
    for found in (folder, folder / ONNX_FOLDER):
        if specs := _specs(found):
            _require_served(path, specs[0] if specs[0].parent == found else specs[-1])
            return found
    if importlib.util.find_spec("tensorflow") is None:
        _require_no_exports_within(folder)
        raise ExportError(
            f"{shown(path)} is not an ONNX export, and exporting a run needs TensorFlow, which is "
            "not installed. Export it where the distribution tfpolicies is installed, `tfpolicies "
            "export RUN --to DIR --onnx`, and serve DIR."
        )
    say(f"exporting {shown(path)}")
    words = ["export", str(path), "--to", str(own), "--onnx"]
    command = [sys.executable, "-m", "tfpolicies", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        _require_no_exports_within(folder)
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        reason = reason.removeprefix("tfpolicies: error: ")
        raise ExportError(f"{shown(path)} is not an ONNX export, and cannot be exported: {reason}")
    return own / ONNX_FOLDER


def _specs(folder: Path) -> list[Path]:
    """Returns the spec files of the exports in a folder: its own, and those of its versions."""
    versions = list_versions(folder) if folder.is_dir() else {}
    specs = [place / SPEC_FILE for place in (folder, *versions.values())]
    return [spec for spec in specs if spec.exists()]


def _require_served(path: Path, spec: Path) -> None:
    """Refuses an export that is not ONNX with both greedy and sampling outputs.

    Raises:
        ExportError: with its format, and the command that writes the right one.
    """
    if (kind := _unserved(spec)) is not None:
        raise ExportError(
            f"{shown(path)} holds {kind}, but serve takes ONNX. Export the run again: "
            "`tfpolicies export RUN --to DIR --onnx`."
        )


def _unserved(spec: Path) -> str | None:
    """Returns the format of an export; None if it is served, or invalid and reported later."""
    return _KINDS.get(form_of(spec) or "")


def _require_no_exports_within(folder: Path) -> None:
    """Reports exports that are nested deeper in a folder than `serve` searches.

    Raises:
        ExportError: if there are any; with the command that serves them, if they can be served.
    """
    found: dict[Path, Path] = {}  # the newest spec of each export
    for part in (*sorted(folder.glob("*")), *sorted(folder.glob("*/*"))):  # KServe's are 2 deep
        specs = [] if part.parent in found else _specs(part) or _specs(part / ONNX_FOLDER)
        if specs:
            found[part] = specs[-1]
    served = [part for part, spec in found.items() if _unserved(spec) is None]
    if served:
        command = shlex.join(["tfpolicies", "serve", *map(shown, served)])
        raise ExportError(f"{shown(folder)} is not an export, but contains some: `{command}`.")
    for spec in found.values():
        _require_served(folder, spec)
