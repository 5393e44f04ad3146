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

_GL_BACKENDS = ("egl", "glfw", "osmesa")
"""Values of `MUJOCO_GL`, in the order in which they are tried if the user has set none."""

_WINDOW_MODE = "human"
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from tfpolicies.envs.mujoco_render_process import draw; draw()"
)
_FAILURE_KEY = "failed"  # key of the error of a child that cannot render
_RENDER_TIMEOUT_S = 60.0  # after which a child that returns no frame is ended
_EXIT_TIMEOUT_S = 5.0  # seconds for a child to end by itself


def render_in_subprocess(env: gym.Env) -> Any:
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
        for renderer in _find_renderers(env, module.MujocoRenderer):
            remote = _RemoteRenderer(renderer)
            renderer.render, renderer.close = remote.render, remote.close
    return env


def _find_renderers(env: gym.Env, renderer_class: type) -> Iterator[Any]:
    """Yields the renderers of an environment and of the environments nested in it."""
    pending: list[Any] = [env]
    visited: list[Any] = []
    while pending:
        part = pending.pop()
        if any(part is visited_part for visited_part in visited):
            continue
        visited.append(part)
        for value in [*getattr(part, "__dict__", {}).values()]:
            if type(value) is renderer_class:
                yield value
            elif callable(getattr(type(value), "step", None)):
                pending.append(value)


class _RemoteRenderer:
    """Renders for a `MujocoRenderer`, which itself never renders, in another process."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self._process: _RenderProcess | None = None
        self._sent_model = np.zeros(0, np.uint8)  # the model that the process has

    def render(self, render_mode: str | None) -> Any:
        current, self._process = self._process, None  # until it has answered
        if current is None:
            self._sent_model = np.zeros(0, np.uint8)
        model = _serialize_model(self._renderer.model)
        request = self._make_request(render_mode)
        if not np.array_equal(model, self._sent_model):
            request["model"] = self._sent_model = model
        seconds = threading.TIMEOUT_MAX if render_mode == _WINDOW_MODE else _RENDER_TIMEOUT_S
        reasons = {}
        processes = (
            map(_RenderProcess, _get_gl_backends(render_mode)) if current is None else [current]
        )
        for process in processes:
            try:
                frames = process.ask(request, seconds)
            except _RenderError as error:
                reasons[process.gl_backend] = str(error)
                continue
            self._process = process
            return frames
        raise EnvError(_describe_failures(reasons, render_mode))

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _make_request(self, render_mode: str | None) -> dict[str, Any]:
        import mujoco

        renderer = self._renderer
        state_spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        state = np.zeros(mujoco.mj_stateSize(renderer.model, state_spec), renderer.data.qpos.dtype)
        mujoco.mj_getState(renderer.model, renderer.data, state, state_spec)
        options = renderer._vopt or {}
        settings = {
            "default_cam_config": renderer.default_cam_config,
            "width": renderer.width,
            "height": renderer.height,
            "max_geom": renderer.max_geom,
            "camera_id": renderer.camera_id,
            "visual_options": [[int(flag), bool(value)] for flag, value in options.items()],
        }
        settings_json = json.dumps(settings, default=_to_json_value)
        return {"mode": render_mode, "settings": settings_json, "state": state}


def _serialize_model(model: Any) -> np.ndarray:
    import mujoco

    buffer = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return buffer


def _to_json_value(value: np.generic | np.ndarray | SupportsInt) -> Any:
    """Converts arrays to lists, and numbers of NumPy and enumerations to plain ones."""
    return value.tolist() if hasattr(value, "tolist") else int(value)


def _get_gl_backends(render_mode: str | None) -> Sequence[str]:
    if render_mode == _WINDOW_MODE:
        return ("glfw",)  # nothing else opens windows
    user_backend = os.environ.get("MUJOCO_GL")
    has_display = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return (
        (user_backend,)
        if user_backend
        else [backend for backend in _GL_BACKENDS if has_display or backend != "glfw"]
    )


def _describe_failures(reasons: Mapping[str, str], render_mode: str | None) -> str:
    tried = "; ".join(f"MUJOCO_GL={backend!r}: {why}" for backend, why in reasons.items())
    if render_mode == _WINDOW_MODE:
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


class _RenderError(Exception):
    """The rendering process has ended; the message says why."""


class _RenderProcess:
    """A process that renders for one renderer, with one value of `MUJOCO_GL`."""

    def __init__(self, gl_backend: str) -> None:
        self.gl_backend = gl_backend
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # drivers and GLFW are verbose
            env={**_get_child_env(), "MUJOCO_GL": gl_backend},
            start_new_session=True,  # Ctrl-C is for the caller, which may continue
        )
        self.close = weakref.finalize(self, _end_process, self._process)

    def ask(self, request: Mapping[str, Any], seconds: float) -> Any:
        """Returns the frames for a request; ends the process if it takes longer than `seconds`."""
        start = time.monotonic()
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it may have sent an error before it ended
                _send(self._process.stdin, request)  # type: ignore[arg-type]
            answer = _receive(self._process.stdout)  # type: ignore[arg-type]
        finally:
            timer.cancel()
        if answer is None or _FAILURE_KEY in answer:
            is_late = time.monotonic() - start >= seconds
            self.close()
            code = self._process.returncode
            if answer is not None:
                why = f"{answer[_FAILURE_KEY]}".removesuffix(".")
            elif is_late:
                why = f"it took more than {seconds:g} s"
            else:
                why = f"{signal.Signals(-code).name} ended it" if code < 0 else f"status {code}"
            raise _RenderError(why)
        frames = [answer[key] for key in sorted(answer)]
        return tuple(frames) if len(frames) > 1 else next(iter(frames), None)


def _get_child_env() -> dict[str, str]:
    """Returns this process's variables except the one that MuJoCo's driver sets for itself."""
    return {name: value for name, value in os.environ.items() if name != "PYOPENGL_PLATFORM"}


def _end_process(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # type: ignore[union-attr]
    process.stdout.close()  # type: ignore[union-attr]
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _send(file: IO[bytes], arrays: Mapping[str, Any]) -> None:
    """Writes arrays and texts by name, as `_receive` reads them.

    >>> file = io.BytesIO()
    >>> _send(file, {"mode": "rgb_array"})
    >>> _ = file.seek(0)
    >>> str(_receive(file)["mode"]), _receive(file)
    ('rgb_array', None)
    """
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    file.write(packed.tell().to_bytes(8, "big") + packed.getbuffer())
    file.flush()


def _receive(file: IO[bytes]) -> dict[str, np.ndarray] | None:
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
        for pictures in _render_requests(sys.stdin.buffer):
            _send(answers, {f"{i}": picture for i, picture in enumerate(pictures)})
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            _send(answers, {_FAILURE_KEY: f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)  # drivers also fail at a normal exit


def _render_requests(requests: IO[bytes]) -> Iterator[tuple[np.ndarray, ...]]:
    import mujoco
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    state_spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    renderer = None
    while (request := _receive(requests)) is not None:
        if "model" in request:
            model = mujoco.MjModel.from_binary_path("m", {"m": request["model"].tobytes()})
            data = mujoco.MjData(model)
        mujoco.mj_setState(model, data, request["state"], state_spec)
        mujoco.mj_forward(model, data)
        settings = _decode_settings(str(request["settings"]))
        renderer = MujocoRenderer(model, data, **settings) if renderer is None else renderer
        for holder in (renderer, *renderer._viewers.values()):
            holder.model, holder.data = model, data
        renderer.camera_id = settings["camera_id"]
        frames = renderer.render(str(request["mode"]))
        if frames is None:
            yield ()
        else:
            yield frames if isinstance(frames, tuple) else (frames,)


def _decode_settings(settings_json: str) -> dict[str, Any]:
    settings = json.loads(settings_json)
    camera = settings["default_cam_config"] or {}
    arrays = {key: np.array(value) for key, value in camera.items() if isinstance(value, list)}
    flags = dict(settings["visual_options"])
    return {**settings, "default_cam_config": {**camera, **arrays}, "visual_options": flags}
