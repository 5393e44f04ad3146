"""The command `predict`: adds actions of an exported policy to the rows of a Parquet file."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

from tfpolicies.base.onnx_graph import remove_outputs
from tfpolicies.cli.exit_codes import DONE
from tfpolicies.cli.export_playback import find_export, find_providers
from tfpolicies.errors import ExportError, UsageError
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.serving.infer_requests import VALUE_OUTPUT
from tfpolicies.serving.parquet_actions import write_actions
from tfpolicies.system.paths import describe_path, resolve_path, shorten_path


def predict(args: argparse.Namespace) -> int:
    """Adds actions to the rows of a Parquet file; see `tfpolicies predict --help`."""
    data = resolve_path(args.data)
    if not data.is_file():
        raise UsageError(f"{describe_path(args.data, data)} is not a file. Name a Parquet file.")
    target = _find_target(args.to, data)
    folder = find_export(args.exported)
    try:
        prepare, providers = (
            partial(remove_outputs, names=[VALUE_OUTPUT]),
            find_providers(args.device),
        )
        policy = OnnxPolicy(
            folder, sample=args.explore, threads=args.threads, prepare=prepare, providers=providers
        )
    except ValueError as error:
        raise ExportError(str(error)) from error
    start = time.perf_counter()
    rows = write_actions(
        policy,
        data,
        target,
        columns=args.columns,
        keep=args.keep,
        batch_rows=args.batch,
        seed=args.seed,
    )
    seconds = time.perf_counter() - start
    print(f"{rows:,} rows in {seconds:.1f} s, {rows / seconds:,.0f} rows/s: {shorten_path(target)}")
    return DONE


def _find_target(to: str | None, data: Path) -> Path:
    """Returns the path of the output file."""
    target = data.with_name(f"{data.stem}.actions.parquet") if to is None else resolve_path(to)
    if target.is_dir() or not target.parent.is_dir():
        raise UsageError(
            f"--to takes a file in a folder that exists, got {describe_path(to or target, target)}."
        )
    if target.exists() and target.samefile(data):
        raise UsageError(
            f"--to names the file that is read, {shorten_path(data)}. Name another file."
        )
    return target
