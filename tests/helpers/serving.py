"""A server of exported policies in a process of its own, and exports to serve."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from helpers.factories import OBS, TWO, make, rows_of, varied

HOME = Path(__file__).parents[2]
SECONDS = 240.0

MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(3), "observations": OBS})
NESTED = spaces.Dict({"far": spaces.Box(-1.0, 1.0, (2,), np.float32), "near": spaces.Discrete(5)})
IMAGE = spaces.Box(0, 255, (12, 12, 4), np.uint8)
MIXED = spaces.Tuple((spaces.Discrete(3), spaces.Box(-2.0, 3.0, (2,), np.float32)))
LOOKING_BACK = {
    "fcnet_hiddens": [4],
    "use_lstm": True,
    "lstm_cell_size": 4,
    "lstm_use_prev_action": True,
    "lstm_use_prev_reward": True,
}

MATRIX: dict[str, dict[str, Any]] = {
    "mlp": {},
    "mixed": {"obs": NESTED, "actions": MIXED},
    "masked": {"obs": MASKED, "actions": spaces.Discrete(3)},
    "image": {"obs": IMAGE, "model": {"conv_filters": [[4, 3, 3], [8, 4, 1]]}},
    "memory": {"model": LOOKING_BACK},
}
"""By name, what `make` takes for a policy of each kind."""


def policy_of(kind: str, seed: int = 1) -> Any:
    """Returns a policy of the matrix, with weights that depend on the seed."""
    return varied(make(**{"obs": OBS, "actions": TWO, **MATRIX[kind]}), seed)


def export(policy: Any, folder: Path) -> Path:
    """Exports a policy into a folder, beside which it is made; returns the folder."""
    made = folder.with_name(f".{folder.name}.new")
    policy.export_model(made, onnx=True)
    place(made, folder)
    shutil.rmtree(made)
    return folder


def place(made: Path, folder: Path) -> None:
    """Puts the files of an export into a folder, what describes them last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.onnx", "model_sample.onnx", "policy_spec.json"):
        shutil.copy2(made / name, folder / f".{name}")
        os.replace(folder / f".{name}", folder / name)


def inputs_of(policy: Any, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random observations by the names of an export's inputs."""
    space = policy.observation_space
    result = rows_of(space, rows, seed)
    if not isinstance(space, spaces.Dict):
        return {"obs": result}
    if "action_mask" not in result:
        return {f"obs_{key}": x for key, x in result.items()}
    result["action_mask"][:, 0] = 1  # something is always allowed
    return {"obs": result["observations"], "action_mask": result["action_mask"].astype(np.int64)}


def to_observations(arrays: dict[str, np.ndarray]) -> Any:
    """Returns observations as a policy takes them, from the inputs of its export."""
    obs = arrays.get("obs", {name.removeprefix("obs_"): x for name, x in arrays.items()})
    if "action_mask" in arrays:
        return {"action_mask": arrays["action_mask"], "observations": obs}
    return obs


def without_python_path() -> dict[str, str]:
    """Returns the variables of this process, but not where it finds modules."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}


class Server:
    """`tfpolicies serve`, which listens on free ports; a context manager.

    It does not drain unless the words say so.

    Args:
        words: of the command line.
        folder: the current folder of the process.
        before: is called in the process before it serves.
        python: of an environment that has the package installed; None for this one and its tree.

    Attributes:
        process: that serves.
        lines: what it printed; of JSON, the messages.
        http: `host:port`.
        grpc: likewise.
    """

    def __init__(
        self,
        *words: str,
        folder: Path | None = None,
        before: Callable[[], None] | None = None,
        python: Path | None = None,
    ) -> None:
        options = ["--drain-seconds", "0"]
        interpreter = str(python or sys.executable)
        command = [interpreter, "-m", "tfpolicies", "serve", *options, *words]
        path = {} if python else {"PYTHONPATH": str(HOME)}
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--grpc-port", "0"],
            cwd=folder,
            preexec_fn=before,
            env={**without_python_path(), **path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._told = threading.Condition()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        try:
            self.http = self.line("HTTP at ").partition("://")[2]
            self.grpc = self.line("gRPC at ").removeprefix("gRPC at ").partition(",")[0]
        except BaseException:
            self.__exit__()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                if line.startswith('{"time"'):
                    line = json.loads(line).get("message", line)
                with self._told:
                    self.lines.append(line.rstrip())
                    self._told.notify_all()
        with self._told:
            self.lines.append("(it ended)")
            self._told.notify_all()

    def line(self, beginning: str, after: int = 0) -> str:
        """Waits for a line and returns it; one that is not among the first `after` lines."""

        def found() -> list[str]:
            ended = self.lines[-1:] == ["(it ended)"]
            return [x for x in self.lines[after:] if x.startswith(beginning) or ended]

        with self._told:
            assert self._told.wait_for(found, SECONDS), f"no {beginning!r} in {self.lines}"
            first = found()[0]
        assert first.startswith(beginning), self.lines
        return first

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        self._reading.join(SECONDS)
