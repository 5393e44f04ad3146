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

from tfpolicies.cli.exit_codes import DONE
from tfpolicies.cli.export_playback import find_providers
from tfpolicies.errors import ExportError, MissingPackageError, UsageError, suggest_similar_names
from tfpolicies.export.spec_file import (
    ONNX_FOLDER,
    SPEC_FILE,
    list_versions,
    name_model,
    read_format,
)
from tfpolicies.system.folder_lock import make_locked_folder, remove_abandoned
from tfpolicies.system.paths import describe_path, resolve_path, shorten_path

_TEMP_FOLDER_PREFIX = "tfpolicies-serve-"  # prefix of temporary folders for exported runs
_UNSERVED_FORMATS = {  # formats that are not served; the files for Triton cannot sample
    "saved_model": "a SavedModel",
    "litert": "a LiteRT file",
    "triton": "an export for triton",
}


def serve(args: argparse.Namespace) -> int:
    """Serves policies until SIGTERM or Ctrl-C; see `tfpolicies.serving.shutdown`."""
    try:
        from tfpolicies.serving.access import AccessRules, read_token
        from tfpolicies.serving.repository import ModelRepository, make_unique_names
        from tfpolicies.serving.served_model import ServingLimits
        from tfpolicies.serving.server import ServerAddress, run
        from tfpolicies.serving.server_log import ServerLog
        from tfpolicies.serving.tls import read_tls
    except ImportError as error:
        raise MissingPackageError(
            f"Serving needs packages that are not installed ({error}). Install them: "
            "pip install 'tfpolicies[serve]', or without TensorFlow pip install tfpolicies-serve"
        ) from error
    providers = tuple(find_providers(args.device))
    values = {name: value for name, value in vars(args).items() if name in ServingLimits._fields}
    limits = ServingLimits(**values, providers=providers)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise UsageError(
            "--tls-cert and --tls-key belong together: give a certificate and its private key."
        )
    log = ServerLog(as_json=args.log_format == "json")
    tls = read_tls(args.tls_cert, args.tls_key, log) if args.tls_cert else None
    token = read_token(args.token_file, log) if args.token_file else ""
    hosts, origins = args.allowed_host, args.allowed_origin
    access = AccessRules(args.host, hosts, origins, control=args.control, token=token)
    sources = [_parse_source(source) for source in args.sources]
    _require_unique_names([name for name, _ in sources if name])
    sources.sort(key=lambda source: not source[0])  # explicit names take precedence
    paths = make_unique_names([(name or _get_default_name(path), path) for name, path in sources])
    pins = _parse_pins(args.pin, [*paths])
    with _make_temp_folder() as temp_folder, contextlib.closing(log):
        folders = {
            name: _find_or_make_export(path, Path(temp_folder, str(number)), log)
            for number, (name, path) in enumerate(paths.items())
        }
        address = ServerAddress(args.host, args.port, args.grpc_port)
        repository = ModelRepository(folders, limits, log, pins)
        record, drain = log.record if args.access_log else None, args.drain_seconds
        run(repository, address, access, log, drain_seconds=drain, tls=tls, record=record)
    return DONE


@contextlib.contextmanager
def _make_temp_folder() -> Iterator[Path]:
    """Yields a temporary folder; also removes folders of servers that were killed."""
    remove_abandoned(Path(tempfile.gettempdir()).glob(f"{_TEMP_FOLDER_PREFIX}*"))
    folder, lock = make_locked_folder(lambda: Path(tempfile.mkdtemp(prefix=_TEMP_FOLDER_PREFIX)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _require_unique_names(names: Sequence[str]) -> None:
    name, count = next(iter(Counter(names).most_common(1)), ("", 0))
    if count > 1:
        raise UsageError(f"{name}=FOLDER is given {count} times. Give each model its own name.")


def _parse_source(source: str) -> tuple[str, Path]:
    """Splits `NAME=PATH`; the name is "" if there is none."""
    name, equals_sign, path_text = source.partition("=")
    if not equals_sign or resolve_path(source).exists():
        name, path_text = "", source
    path = resolve_path(path_text)
    if not path.exists():
        raise ExportError(
            f"{describe_path(path_text, path)} does not exist. Give the folder of `tfpolicies "
            "export` or a run."
        )
    return name, path


def _get_default_name(path: Path) -> str:
    return name_model(_get_folder(path))


def _get_folder(path: Path) -> Path:
    """Returns a folder itself, or the folder of a file."""
    return path if path.is_dir() else path.parent


def _parse_pins(options: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Returns the versions of `--pin VERSION` and `--pin NAME=VERSION`, by model."""
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
                f"--pin {option} names no model that is "
                f"served.{suggest_similar_names(name, models)} The models are {', '.join(models)}."
            )
        if not version or name in pins:
            raise UsageError(
                f"--pin gives the model {name} {'two versions' if version else 'no version'}. "
                f"Give it one: --pin {name}=VERSION."
            )
        pins[name] = version
    return pins


def _find_or_make_export(
    path: Path, temp_folder: Path, log: Callable[[str], object] = print
) -> Path:
    """Returns the folder of an export or of its versions; a run is exported into `temp_folder`."""
    folder = _get_folder(path)
    for candidate in (folder, folder / ONNX_FOLDER):
        if specs := _find_specs(candidate):
            _require_servable(path, specs[0] if specs[0].parent == candidate else specs[-1])
            return candidate
    if importlib.util.find_spec("tensorflow") is None:
        _require_no_nested_exports(folder)
        raise ExportError(
            f"{shorten_path(path)} is not an ONNX export, and exporting a run needs TensorFlow, "
            "which is not installed. Export it where the distribution tfpolicies is installed, "
            "`tfpolicies export RUN --to DIR --onnx`, and serve DIR."
        )
    log(f"exporting {shorten_path(path)}")
    arguments = ["export", str(path), "--to", str(temp_folder), "--onnx"]
    command = [sys.executable, "-m", "tfpolicies", *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        _require_no_nested_exports(folder)
        reason = (completed.stderr.strip() or "no message").splitlines()[-1]
        reason = reason.removeprefix("tfpolicies: error: ")
        raise ExportError(
            f"{shorten_path(path)} is not an ONNX export, and cannot be exported: {reason}"
        )
    return temp_folder / ONNX_FOLDER


def _find_specs(folder: Path) -> list[Path]:
    """Returns the spec files of the exports in a folder: its own, and those of its versions."""
    versions = list_versions(folder) if folder.is_dir() else {}
    specs = [export_folder / SPEC_FILE for export_folder in (folder, *versions.values())]
    return [spec for spec in specs if spec.exists()]


def _require_servable(path: Path, spec: Path) -> None:
    """Refuses an export that is not ONNX with both greedy and sampling outputs."""
    if (format_name := _get_unserved_format(spec)) is not None:
        raise ExportError(
            f"{shorten_path(path)} holds {format_name}, but serve takes ONNX. Export the run "
            "again: `tfpolicies export RUN --to DIR --onnx`."
        )


def _get_unserved_format(spec: Path) -> str | None:
    """Returns the format of an export; None if it is served, or invalid and reported later."""
    return _UNSERVED_FORMATS.get(read_format(spec) or "")


def _require_no_nested_exports(folder: Path) -> None:
    """Reports exports that are nested deeper in a folder than `serve` searches."""
    exports: dict[Path, Path] = {}  # the newest spec of each export
    for part in (*sorted(folder.glob("*")), *sorted(folder.glob("*/*"))):  # KServe's are 2 deep
        specs = (
            [] if part.parent in exports else _find_specs(part) or _find_specs(part / ONNX_FOLDER)
        )
        if specs:
            exports[part] = specs[-1]
    servable = [part for part, spec in exports.items() if _get_unserved_format(spec) is None]
    if servable:
        command = shlex.join(["tfpolicies", "serve", *map(shorten_path, servable)])
        raise ExportError(
            f"{shorten_path(folder)} is not an export, but contains some: `{command}`."
        )
    for spec in exports.values():
        _require_servable(folder, spec)
