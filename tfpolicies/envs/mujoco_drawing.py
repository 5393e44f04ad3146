"""Renders MuJoCo's frames and windows in a separate process.

MuJoCo renders through an OpenGL driver: native code, which may crash its process. Mesa's drivers
do so in processes that have loaded TensorFlow (`docs/decisions/022`). So a child process without
TensorFlow renders. It gets the model, and for each frame the state of the simulation; the
simulation itself stays in this process. `MUJOCO_GL` is set only in the child, and a driver that
fails ends only the child.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, SupportsInt

import gymnasium as gym
import numpy as np

from tfpolicies.errors import EnvError

_WAYS = ("egl", "glfw", "osmesa")
"""Values of `MUJOCO_GL`, in the order in which they are tried if the user has set none."""

_WINDOW = "human"
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from tfpolicies.envs.mujoco_drawing import draw; draw()"
)
_FAILED = "failed"  # key of the error of a child that cannot render
_SECONDS = 60.0  # after which a child that returns no frame is ended
_LEAVING = 5.0  # seconds for a child to end by itself


def draw_apart(env: gym.Env) -> Any:
    """Makes the MuJoCo renderers of an environment render in a separate process.

    The process starts with the first frame, and ends when the environment is closed. Environments
    without a `MujocoRenderer` of Gymnasium stay as they are.

    Args:
        env: an environment, which may be wrapped, or have others as its parts.

    Returns:
        `env` itself.
    """
    module = sys.modules.get("gymnasium.envs.mujoco.mujoco_rendering")
    if module is not None:  # if it is not imported, no environment has such a renderer
        for renderer in _renderers(env, module.MujocoRenderer):
            remote = _RemoteRenderer(renderer)
            renderer.render, renderer.close = remote.render, remote.close
    return env


def _renderers(env: gym.Env, kind: type) -> Iterator[Any]:
    """Yields the renderers of an environment and of the environments nested in it."""
    waiting: list[Any] = [env]
    seen: list[Any] = []
    while waiting:
        part = waiting.pop()
        if any(part is other for other in seen):
            continue
        seen.append(part)
        for value in [*getattr(part, "__dict__", {}).values()]:
            if type(value) is kind:
                yield value
            elif callable(getattr(type(value), "step", None)):
                waiting.append(value)


class _RemoteRenderer:
    """Renders for a `MujocoRenderer`, which itself never renders, in another process."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self._painter: _Painter | None = None
        self._known = np.zeros(0, np.uint8)  # the model that the process has

    def render(self, render_mode: str | None) -> Any:
        kept, self._painter = self._painter, None  # until it has answered
        if kept is None:
            self._known = np.zeros(0, np.uint8)
        model = _bytes_of(self._renderer.model)
        request = self._request(render_mode)
        if not np.array_equal(model, self._known):
            request["model"] = self._known = model
        seconds = threading.TIMEOUT_MAX if render_mode == _WINDOW else _SECONDS
        failed = {}
        painters = map(_Painter, _ways(render_mode)) if kept is None else [kept]
        for painter in painters:
            try:
                shown = painter.ask(request, seconds)
            except _NoPictureError as error:
                failed[painter.way] = str(error)
                continue
            self._painter = painter
            return shown
        raise EnvError(_refusal(failed, render_mode))

    def close(self) -> None:
        if self._painter is not None:
            self._painter.close()
            self._painter = None

    def _request(self, render_mode: str | None) -> dict[str, Any]:
        import mujoco

        renderer = self._renderer
        what = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        state = np.zeros(mujoco.mj_stateSize(renderer.model, what), renderer.data.qpos.dtype)
        mujoco.mj_getState(renderer.model, renderer.data, state, what)
        options = renderer._vopt or {}
        settings = {
            "default_cam_config": renderer.default_cam_config,
            "width": renderer.width,
            "height": renderer.height,
            "max_geom": renderer.max_geom,
            "camera_id": renderer.camera_id,
            "visual_options": [[int(flag), bool(value)] for flag, value in options.items()],
        }
        told = json.dumps(settings, default=_plain)
        return {"mode": render_mode, "settings": told, "state": state}


def _bytes_of(model: Any) -> np.ndarray:
    import mujoco

    stored = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, stored)
    return stored


def _plain(value: np.generic | np.ndarray | SupportsInt) -> Any:
    """Converts arrays to lists, and numbers of NumPy and enumerations to plain ones."""
    return value.tolist() if hasattr(value, "tolist") else int(value)


def _ways(render_mode: str | None) -> Sequence[str]:
    if render_mode == _WINDOW:
        return ("glfw",)  # nothing else opens windows
    asked = os.environ.get("MUJOCO_GL")
    has_display = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return (asked,) if asked else [way for way in _WAYS if has_display or way != "glfw"]


def _refusal(failed: Mapping[str, str], render_mode: str | None) -> str:
    tried = "; ".join(f"MUJOCO_GL={way!r}: {why}" for way, why in failed.items())
    if render_mode == _WINDOW:
        advice = "Make a video instead: tfpolicies record."
    else:
        advice = (
            "Install or update a driver that needs no display: on Debian, apt-get install libegl1 "
            "libgl1-mesa-dri."
        )
        if os.environ.get("MUJOCO_GL"):
            advice += " Or unset MUJOCO_GL: then each backend is tried."
    return f"MuJoCo renders in a separate process, which returned no frame ({tried}). {advice}"


# -- the process ------------------------------------------------------------------------------


class _NoPictureError(Exception):
    """The rendering process has ended; the message says why."""


class _Painter:
    """A process that renders for one renderer, with one value of `MUJOCO_GL`."""

    def __init__(self, way: str) -> None:
        self.way = way
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # drivers and GLFW are verbose
            env={**_environment(), "MUJOCO_GL": way},
            start_new_session=True,  # Ctrl-C is for the caller, which may continue
        )
        self.close = weakref.finalize(self, _end, self._process)

    def ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Returns the frames for a request; ends the process if it takes longer than `seconds`."""
        began = time.monotonic()
        late = threading.Timer(seconds, self._process.kill)
        late.daemon = True
        late.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it may have sent an error before it ended
                _send(self._process.stdin, request)  # type: ignore[arg-type]
            answer = _received(self._process.stdout)  # type: ignore[arg-type]
        finally:
            late.cancel()
        if answer is None or _FAILED in answer:
            is_late = time.monotonic() - began >= seconds
            self.close()
            code = self._process.returncode
            if answer is not None:
                why = f"{answer[_FAILED]}".removesuffix(".")
            elif is_late:
                why = f"it took more than {seconds:g} s"
            else:
                why = f"{signal.Signals(-code).name} ended it" if code < 0 else f"status {code}"
            raise _NoPictureError(why)
        pictures = [answer[key] for key in sorted(answer)]
        return tuple(pictures) if len(pictures) > 1 else next(iter(pictures), None)


def _environment() -> dict[str, str]:
    """Returns this process's variables except the one that MuJoCo's driver sets for itself."""
    return {name: value for name, value in os.environ.items() if name != "PYOPENGL_PLATFORM"}


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # type: ignore[union-attr]
    process.stdout.close()  # type: ignore[union-attr]
    try:
        process.wait(_LEAVING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _send(file: IO[bytes], arrays: Mapping[str, Any]) -> None:
    """Writes arrays and texts by name, as `_received` reads them.

    >>> file = io.BytesIO()
    >>> _send(file, {"mode": "rgb_array"})
    >>> _ = file.seek(0)
    >>> str(_received(file)["mode"]), _received(file)
    ('rgb_array', None)
    """
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    file.write(packed.tell().to_bytes(8, "big") + packed.getbuffer())
    file.flush()


def _received(file: IO[bytes]) -> dict[str, np.ndarray] | None:
    """Returns the arrays that were sent; None if they are incomplete because the sender ended."""
    size = int.from_bytes(file.read(8), "big")
    packed = file.read(size)
    if not size or len(packed) < size:
        return None
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        return dict(arrays)


def draw() -> None:
    """Renders requests from standard input until it is closed. The child runs nothing else."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    try:
        for pictures in _drawn(sys.stdin.buffer):
            _send(answers, {f"{i}": picture for i, picture in enumerate(pictures)})
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            _send(answers, {_FAILED: f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)  # drivers also fail at a normal exit


def _drawn(requests: IO[bytes]) -> Iterator[tuple[np.ndarray, ...]]:
    import mujoco
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    what = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    renderer = None
    while (request := _received(requests)) is not None:
        if "model" in request:
            model = mujoco.MjModel.from_binary_path("m", {"m": request["model"].tobytes()})
            data = mujoco.MjData(model)
        mujoco.mj_setState(model, data, request["state"], what)
        mujoco.mj_forward(model, data)
        settings = _settings(str(request["settings"]))
        renderer = MujocoRenderer(model, data, **settings) if renderer is None else renderer
        for holder in (renderer, *renderer._viewers.values()):
            holder.model, holder.data = model, data
        renderer.camera_id = settings["camera_id"]
        shown = renderer.render(str(request["mode"]))
        if shown is None:
            yield ()
        else:
            yield shown if isinstance(shown, tuple) else (shown,)


def _settings(told: str) -> dict[str, Any]:
    settings = json.loads(told)
    camera = settings["default_cam_config"] or {}
    arrays = {key: np.array(value) for key, value in camera.items() if isinstance(value, list)}
    flags = dict(settings["visual_options"])
    return {**settings, "default_cam_config": {**camera, **arrays}, "visual_options": flags}
