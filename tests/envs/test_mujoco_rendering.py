"""Rendering of MuJoCo in a separate process, whose faults end nothing else."""

import ctypes.util
import io
import logging
import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

from helpers.videos import decode_video
from helpers.workers import make_config
from tfpolicies import record_video
from tfpolicies.envs import mujoco_render_process as mujoco_render_process
from tfpolicies.envs.env_factory import EnvContext
from tfpolicies.envs.rendering import FRAME_MODES, make_renderable_env, render_frames
from tfpolicies.errors import EnvError

needs_egl = pytest.mark.skipif(ctypes.util.find_library("EGL") is None, reason="no libegl1")

IMPORTS = "import os, signal, sys, time; sys.path[:] = sys.argv[1:]; "
CRASHES = IMPORTS + "os.kill(os.getpid(), signal.SIGSEGV)"
HANGS = IMPORTS + "time.sleep(600)"
DRAWS_ONCE = f"""
{IMPORTS}
import numpy as np
from tfpolicies.envs.mujoco_render_process import _receive, _send
_receive(sys.stdin.buffer)
_send(sys.stdout.buffer, {{"0": np.zeros((32, 32, 3), np.uint8)}})
os.kill(os.getpid(), signal.SIGSEGV)
"""
"""Programs in place of the one that draws; a driver that fails does what they do."""


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


def make_robot(source="Hopper-v5"):
    env = make_renderable_env(source, EnvContext({}), FRAME_MODES)
    env.reset(seed=3)
    return env


def build():
    training = {"train_batch_size": 32, "sgd_minibatch_size": 16, "num_sgd_iter": 1}
    return make_config("Hopper-v5", num_envs_per_worker=2, **training).build()


def get_refusal(env):
    with pytest.raises(EnvError) as result:
        render_frames(env)
    env.close()
    return str(result.value)


@pytest.fixture
def crashes(monkeypatch):
    monkeypatch.setattr(mujoco_render_process, "_PROGRAM", CRASHES)


@pytest.mark.usefixtures("crashes")
def test_a_driver_that_crashes_ends_its_own_process_and_is_named():
    message = get_refusal(make_robot())
    start = "The environment 'Hopper-v5' could not be rendered: MuJoCo renders in"
    assert message.startswith(start)
    assert "(MUJOCO_GL='egl': SIGSEGV ended it; MUJOCO_GL='osmesa': SIGSEGV ended it)" in message
    assert message.endswith("apt-get install libegl1 libgl1-mesa-dri.")
    assert "MUJOCO_GL" not in os.environ


@pytest.mark.usefixtures("crashes")
def test_a_display_is_tried_where_there_is_one(monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    message = get_refusal(make_robot())
    assert [message.count(f"MUJOCO_GL='{x}'") for x in ("egl", "glfw", "osmesa")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        # It needs a display, and there is none.
        ("glfw", "FatalError: an OpenGL platform library has not been loaded"),
        ("vulkan", "RuntimeError: invalid value"),
    ],
)
def test_only_the_backend_that_the_user_set_is_tried(monkeypatch, backend, words):
    env = make_robot()
    monkeypatch.setenv("MUJOCO_GL", backend)
    message = get_refusal(env)
    assert f"(MUJOCO_GL='{backend}': {words}" in message
    assert "egl'" not in message
    if backend == "glfw":
        assert message.endswith("Or unset MUJOCO_GL: then each backend is tried.")


def test_a_driver_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(mujoco_render_process, "_PROGRAM", HANGS)
    monkeypatch.setattr(mujoco_render_process, "_RENDER_TIMEOUT_S", 0.25)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert "(MUJOCO_GL='egl': it took more than 0.25 s)" in get_refusal(make_robot())


@pytest.mark.usefixtures("crashes")
def test_a_video_that_cannot_be_drawn_is_refused_before_training(tmp_path):
    algorithm = build()
    with pytest.raises(EnvError, match="SIGSEGV"):
        algorithm.learn(64, run_dir=tmp_path / "run", progress=False, record_every=1)
    with pytest.raises(EnvError, match="SIGSEGV"):
        record_video(algorithm, tmp_path / "a.mp4")
    assert (algorithm.iteration, list(tmp_path.iterdir())) == (0, [])


def test_a_driver_that_crashes_while_training_costs_only_the_video(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(mujoco_render_process, "_PROGRAM", DRAWS_ONCE)
    algorithm = build()
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        logging.getLogger("tfpolicies").setLevel(logging.WARNING)
        algorithm.learn(64, run_dir=tmp_path, progress=False, record_every=1)
    assert algorithm.iteration == 2
    assert caplog.text.count("SIGSEGV ended it") == 2
    assert "There is no video of iteration 2" in caplog.text
    assert list((tmp_path / "videos").iterdir()) == []


def test_other_environments_and_steps_without_pictures_start_no_process(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    env = make_robot("CartPole-v1")
    assert render_frames(env)[0].shape == (400, 600, 3)
    env.close()
    env = make_robot()
    env.step(env.action_space.sample())
    env.close()


OF_MUJOCO_ITSELF = """
import io, sys
import gymnasium as gym, numpy as np
env = gym.make("Hopper-v5", render_mode="rgb_array")
env.reset(seed=3)
drawn = io.BytesIO()
np.save(drawn, env.render())
sys.stdout.buffer.write(drawn.getvalue())
"""


class Holder(gym.Env):
    """Has a robot as its part, as mazes with robots in them do."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.part = gym.make("Hopper-v5", render_mode="rgb_array")
        self.observation_space = self.part.observation_space
        self.action_space = self.part.action_space
        self.render_mode = render_mode
        self.step, self.render, self.close = self.part.step, self.part.render, self.part.close

    def reset(self, *, seed=None, options=None):
        return self.part.reset(seed=seed)


@needs_egl
def test_pictures_are_those_of_mujoco_itself_and_nothing_is_set_here():
    settings = {**os.environ, "MUJOCO_GL": "egl"}
    command = [sys.executable, "-c", OF_MUJOCO_ITSELF]
    drawn = subprocess.run(command, capture_output=True, check=True, env=settings)
    expected = np.load(io.BytesIO(drawn.stdout))
    for source in ("Hopper-v5", Holder):
        env = make_robot(source)
        np.testing.assert_array_equal(render_frames(env)[0], expected)
        for _ in range(20):
            env.step(env.action_space.sample())
        moved = render_frames(env)[0]
        assert (moved != expected).any()
        np.testing.assert_array_equal(render_frames(env)[0], moved)
        env.close()
    assert not {"MUJOCO_GL", "PYOPENGL_PLATFORM"} & {*os.environ}


@needs_egl
def test_changes_of_the_model_of_an_environment_are_drawn():
    env = make_robot()
    before = render_frames(env)[0].astype(int)
    env.unwrapped.model.geom_rgba[1:] = (1.0, 0.0, 0.0, 1.0)
    after = render_frames(env)[0].astype(int)
    redder = (after - before)[:, :, 0] - (after - before)[:, :, 1]
    assert (redder > 50).sum() > 500
    env.close()


@needs_egl
def test_a_robot_is_recorded_where_tensorflow_is_loaded(tmp_path):
    algorithm = build()
    algorithm.train()
    recording = record_video(algorithm, tmp_path / "a.mp4", max_steps=3)
    frames, _ = decode_video(tmp_path / "a.mp4")
    assert recording.lengths == [3]
    assert frames.shape[1] > 480
    assert frames[0, :480].std() > 10
    algorithm.train()
