"""Playing with an exported policy as a stranger would: in a process without this package."""

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


def play_in_own_process(
    exported: Path,
    env: str,
    episodes: int,
    seed: int,
    env_config: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Mapping[str, Any]:
    """Plays greedily with an exported ONNX file through ONNX Runtime alone.

    It is this package's own player that runs, by its path in an isolated interpreter (`python -I`),
    which does not look for modules in the current folder unless `env` names one. The folder is
    read as data; the `play.py` in it is for others, and whoever wrote the folder wrote that, too.

    Args:
        exported: the ONNX file, or a folder with one in it.
        env: a name registered with Gymnasium, or `"module:Class"`.
        episodes: how many to play, >= 1.
        seed: of the episodes.
        env_config: settings of the environment, as JSON can hold them.
        device: where ONNX Runtime computes: "cpu", "cuda" or "auto".

    Returns:
        What the player reports, `mean_return` among it.

    Raises:
        ExportError: if there is no such file, or the player fails.
    """
    folder = find_export(exported)
    arguments = ["--model", str(folder), "--env", env, "--json"]
    arguments += ["--episodes", str(episodes), "--seed", str(seed), "--device", device]
    arguments += ["--env-config", json.dumps(env_config)] if env_config else []
    own = importlib.resources.files("tfpolicies").joinpath("export", "player.py")
    with importlib.resources.as_file(own) as player:  # unpacked, where the package is in a zip
        command = [sys.executable, "-I", str(player), *arguments]
        played = subprocess.run(command, capture_output=True, text=True, check=False)
    if played.returncode != 0:
        reason = (played.stderr.strip() or played.stdout.strip() or "it said nothing").splitlines()
        raise ExportError(f"Playing {str(folder)!r} on {env!r} failed: {reason[-1]}")
    return dict(json.loads(played.stdout.splitlines()[-1]))


def find_export(exported: str | os.PathLike[str]) -> Path:
    """Returns the folder of an ONNX file, or the only one below a folder that has an export.

    Raises:
        ExportError: if there is none, or more than one.
    """
    place = resolve_path(exported)
    name = describe_path(exported, place)
    if not place.exists():
        raise ExportError(f"{name} does not exist. Give what `tfpolicies export` wrote.")
    models = place.rglob(_MODEL) if place.is_dir() else [place]
    found = sorted(path.parent for path in models if (path.parent / SPEC_FILE).exists())
    if len(found) != 1:
        names = ", ".join(map(str, found))
        raise ExportError(
            f"{name} must hold one ONNX export, {_MODEL} with its {SPEC_FILE}, but has "
            f"{names or 'none'}. Give the ONNX file, or export with `tfpolicies export RUN --to "
            "DIR`."
        )
    return found[0]


def find_providers(device: str) -> list[str]:
    """Returns the providers of ONNX Runtime for `--device`.

    Raises:
        UsageError: if this ONNX Runtime cannot compute there.
    """
    from tfpolicies.export.player import providers_for

    try:
        return providers_for(device)
    except ValueError as error:
        raise UsageError(f"--device {device}: {error}") from error


def loaded(played: Mapping[str, Any]) -> str:
    """Says whether the player's process did without TensorFlow and this package."""
    if played["loaded"]:  # the environment's own imports may do so
        return f"with {' and '.join(played['loaded'])}"
    return "without tensorflow and tfpolicies"
