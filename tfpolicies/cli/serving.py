"""Playing with an exported policy as a stranger would: in a process without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfpolicies.errors import ExportError

PLAYER = "play.py"


def play_in_own_process(
    exported: Path,
    env: str,
    episodes: int,
    seed: int,
    env_config: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Plays greedily with an exported ONNX file through ONNX Runtime alone.

    The player that was exported with the file runs by its path in an isolated interpreter
    (`python -I`), which does not look for modules in the current folder unless `env` names one.

    Args:
        exported: the ONNX file, or a folder with one in it.
        env: a name registered with Gymnasium, or `"module:Class"`.
        episodes: how many to play, >= 1.
        seed: of the episodes.
        env_config: settings of the environment, as JSON can hold them.

    Returns:
        What the player reports, `mean_return` among it.

    Raises:
        ExportError: if there is no such file, or the player fails.
    """
    player = find_player(exported)
    command = [sys.executable, "-I", str(player), "--env", env, "--json"]
    command += ["--episodes", str(episodes), "--seed", str(seed)]
    command += ["--env-config", json.dumps(env_config)] if env_config else []
    played = subprocess.run(command, capture_output=True, text=True, check=False)
    if played.returncode != 0:
        reason = (played.stderr.strip() or played.stdout.strip() or "it said nothing").splitlines()
        raise ExportError(f"Playing {str(player.parent)!r} on {env!r} failed: {reason[-1]}")
    return dict(json.loads(played.stdout.splitlines()[-1]))


def find_player(exported: Path) -> Path:
    """Returns the player beside an ONNX file, or the only one below a folder.

    Raises:
        ExportError: if there is none, or more than one.
    """
    if not exported.exists():
        raise ExportError(f"{str(exported)!r} does not exist. Give what `tfpolicies export` wrote.")
    found = sorted((exported if exported.is_dir() else exported.parent).rglob(PLAYER))
    if len(found) != 1:
        names = ", ".join(str(path.parent) for path in found)
        raise ExportError(
            f"{str(exported)!r} must hold one ONNX export with its {PLAYER}, but has "
            f"{names or 'none'}. Give the ONNX file, or export with `tfpolicies export RUN --to "
            "DIR`."
        )
    return found[0]
