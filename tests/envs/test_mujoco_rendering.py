"""Pictures of MuJoCo: a process of their own draws them, and its faults end nothing else."""

import ctypes.util
import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from reporting.test_video import decoded
from tfpolicies import PPOConfig, record_video
from tfpolicies.envs import mujoco_drawing
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
from tfpolicies.envs.mujoco_drawing import _receive, _send
_receive(sys.stdin.buffer)
_send(sys.stdout.buffer, {{"0": np.zeros((32, 32, 3), np.uint8)}})
os.kill(os.getpid(), signal.SIGSEGV)
"""
"""Programs in place of the one that draws; a driver that fails does what they do."""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


def robot(source: Any = "Hopper-v5") -> Any:
    env = make_renderable_env(source, EnvContext({}), FRAME_MODES)
    env.reset(seed=3)
    return env


def config(source: Any = "Hopper-v5") -> PPOConfig:
    made = PPOConfig().environment(source).debugging(seed=0, log_level="ERROR")
    made.framework(inference="tf", jit_compile=False).rollouts(num_envs_per_worker=2)
    return made.training(
        model={"fcnet_hiddens": [4]}, train_batch_size=32, sgd_minibatch_size=16, num_sgd_iter=1
    )


def refusal(env: Any) -> str:
    with pytest.raises(EnvError) as result:
        render_frames(env)
    env.close()
    return str(result.value)


# -- faults, with or without libraries of OpenGL -----------------------------------------------


def test_a_driver_that_crashes_ends_its_own_process_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mujoco_drawing, "_PROGRAM", CRASHES)
    said = refusal(robot())
    assert said.startswith("The environment 'Hopper-v5' could not be rendered: MuJoCo renders in")
    assert "(MUJOCO_GL='egl': SIGSEGV ended it; MUJOCO_GL='osmesa': SIGSEGV ended it)" in said
    assert said.endswith("apt-get install libegl1 libgl1-mesa-dri.")
    assert "MUJOCO_GL" not in os.environ


def test_where_there_is_a_display_it_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mujoco_drawing, "_PROGRAM", CRASHES)
    monkeypatch.setenv("DISPLAY", ":0")
    said = refusal(robot())
    assert [said.count(f"MUJOCO_GL='{way}'") for way in ("egl", "glfw", "osmesa")] == [1, 1, 1]


def test_the_way_that_the_user_set_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    env = robot()
    monkeypatch.setenv("MUJOCO_GL", "glfw")  # which needs a display, and there is none
    said = refusal(env)
    assert "(MUJOCO_GL='glfw': FatalError: an OpenGL platform library has not been loaded" in said
    assert "egl'" not in said
    assert said.endswith("Or unset MUJOCO_GL: then each backend is tried.")


def test_a_value_that_mujoco_does_not_know_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    env = robot()
    monkeypatch.setenv("MUJOCO_GL", "vulkan")
    assert "(MUJOCO_GL='vulkan': RuntimeError: invalid value" in refusal(env)


def test_a_driver_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mujoco_drawing, "_PROGRAM", HANGS)
    monkeypatch.setattr(mujoco_drawing, "_RENDER_TIMEOUT_S", 0.25)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert "(MUJOCO_GL='egl': it took more than 0.25 s)" in refusal(robot())


def test_a_video_that_cannot_be_drawn_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mujoco_drawing, "_PROGRAM", CRASHES)
    algorithm = config().build()
    with pytest.raises(EnvError, match="SIGSEGV"):
        algorithm.learn(64, run_dir=tmp_path / "run", progress=False, record_every=1)
    with pytest.raises(EnvError, match="SIGSEGV"):
        record_video(algorithm, tmp_path / "a.mp4")
    assert (algorithm.iteration, list(tmp_path.iterdir())) == (0, [])


def test_a_driver_that_crashes_while_training_costs_the_video_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mujoco_drawing, "_PROGRAM", DRAWS_ONCE)
    algorithm = config().build()
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        logging.getLogger("tfpolicies").setLevel(logging.WARNING)
        algorithm.learn(64, run_dir=tmp_path, progress=False, record_every=1)
    assert algorithm.iteration == 2
    assert caplog.text.count("SIGSEGV ended it") == 2
    assert "There is no video of iteration 2" in caplog.text
    assert list((tmp_path / "videos").iterdir()) == []


def test_other_environments_and_steps_without_pictures_start_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refused)
    env = robot("CartPole-v1")
    assert render_frames(env)[0].shape == (400, 600, 3)
    env.close()
    env = robot()
    env.step(env.action_space.sample())
    env.close()


# -- pictures ---------------------------------------------------------------------------------

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

    def __init__(self, render_mode: str | None = None) -> None:
        self.part = gym.make("Hopper-v5", render_mode="rgb_array")
        self.observation_space = self.part.observation_space
        self.action_space = self.part.action_space
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.part.reset(seed=seed)

    def step(self, action: Any) -> Any:
        return self.part.step(action)

    def render(self) -> Any:
        return self.part.render()

    def close(self) -> None:
        self.part.close()


@needs_egl
def test_pictures_are_those_of_mujoco_itself_and_nothing_is_set_here() -> None:
    settings = {**os.environ, "MUJOCO_GL": "egl"}
    command = [sys.executable, "-c", OF_MUJOCO_ITSELF]
    drawn = subprocess.run(command, capture_output=True, check=True, env=settings)
    expected = np.load(io.BytesIO(drawn.stdout))
    for source in ("Hopper-v5", Holder):
        env = robot(source)
        np.testing.assert_array_equal(render_frames(env)[0], expected)
        for _ in range(20):
            env.step(env.action_space.sample())
        moved = render_frames(env)[0]
        assert (moved != expected).any()
        np.testing.assert_array_equal(render_frames(env)[0], moved)
        env.close()
    assert not {"MUJOCO_GL", "PYOPENGL_PLATFORM"} & {*os.environ}


@needs_egl
def test_what_an_environment_changes_about_its_model_is_seen() -> None:
    env = robot()
    before = render_frames(env)[0].astype(int)
    env.unwrapped.model.geom_rgba[1:] = (1.0, 0.0, 0.0, 1.0)
    after = render_frames(env)[0].astype(int)
    redder = (after - before)[:, :, 0] - (after - before)[:, :, 1]
    assert (redder > 50).sum() > 500
    env.close()


@needs_egl
def test_a_robot_is_recorded_where_tensorflow_is_loaded(tmp_path: Path) -> None:
    algorithm = config().build()
    algorithm.train()
    made = record_video(algorithm, tmp_path / "a.mp4", max_steps=3)
    frames, _ = decoded(tmp_path / "a.mp4")
    assert made.lengths == [3]
    assert frames.shape[1] > 480
    assert frames[0, :480].std() > 10
    algorithm.train()
