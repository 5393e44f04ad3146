"""Finds exported ONNX files, and plays with them in a process without this package."""

from __future__ import annotations

import importlib.resources
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfpolicies.errors import ExportError, UsageError
from tfpolicies.export.spec_file import SPEC_FILE
from tfpolicies.system.paths import describe_path, resolve_path

_MODEL = "model.onnx"


def play_in_subprocess(
    exported: Path,
    env: str,
    episodes: int,
    seed: int,
    env_config: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Mapping[str, Any]:
    """Plays greedily with an exported ONNX file, using only ONNX Runtime.

    It runs this package's player by its path in an isolated interpreter (`python -I`), which does
    not import from the current folder unless `env` names a module there. The folder is read as
    data: its `play.py` is not run, because it may have been changed together with the folder.

    Args:
        exported: the ONNX file, or a folder with one in it.
        env: a name registered with Gymnasium, or `"module:Class"`.
        episodes: the number of episodes, >= 1.
        seed: of the episodes.
        env_config: settings of the environment, as JSON values.
        device: where ONNX Runtime computes: "cpu", "cuda" or "auto".

    Returns:
        The player's report, with `mean_return` among others.
    """
    folder = find_export(exported)
    arguments = ["--model", str(folder), "--env", env, "--json"]
    arguments += ["--episodes", str(episodes), "--seed", str(seed), "--device", device]
    arguments += ["--env-config", json.dumps(env_config)] if env_config else []
    player_resource = importlib.resources.files("tfpolicies").joinpath("export", "player.py")
    with importlib.resources.as_file(
        player_resource
    ) as player:  # unpacked if the package is in a zip file
        command = [sys.executable, "-I", str(player), *arguments]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        reason = (completed.stderr.strip() or completed.stdout.strip() or "no message").splitlines()
        raise ExportError(f"Playing {str(folder)!r} on {env!r} failed: {reason[-1]}")
    return dict(json.loads(completed.stdout.splitlines()[-1]))


def find_export(exported: str | os.PathLike[str]) -> Path:
    """Returns the folder of an ONNX file, or the only one below a folder that has an export."""
    export_path = resolve_path(exported)
    name = describe_path(exported, export_path)
    if not export_path.exists():
        raise ExportError(f"{name} does not exist. Give the folder of `tfpolicies export`.")
    models = export_path.rglob(_MODEL) if export_path.is_dir() else [export_path]
    folders = sorted(path.parent for path in models if (path.parent / SPEC_FILE).exists())
    if len(folders) != 1:
        names = ", ".join(map(str, folders))
        raise ExportError(
            f"{name} must hold one ONNX export, {_MODEL} with its {SPEC_FILE}, but has "
            f"{names or 'none'}. Give the ONNX file, or export with `tfpolicies export RUN --to "
            "DIR`."
        )
    return folders[0]


def find_providers(device: str) -> list[str]:
    from tfpolicies.export.player import get_providers

    try:
        return get_providers(device)
    except ValueError as error:
        raise UsageError(f"--device {device}: {error}") from error


def describe_loaded_packages(report: Mapping[str, Any]) -> str:
    """Describes which of TensorFlow and this package the player's process loaded."""
    if report["loaded"]:  # the environment may import them
        return f"with {' and '.join(report['loaded'])}"
    return "without tensorflow and tfpolicies"
