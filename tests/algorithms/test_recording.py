"""Recording policies that play: what is seen, what is told, and that training does not feel it."""

import io
import logging
import os
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from rich.console import Console

from helpers import rendering_envs as filmed
from reporting.test_video import decoded
from tfpolicies import Algorithm, PPOConfig, record_video
from tfpolicies.algorithms.run_logger import RunLogger, TrainingOptions
from tfpolicies.algorithms.training_loop import TrainingLoop
from tfpolicies.cli import main
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.connectors import FrameStack
from tfpolicies.envs.env_factory import EnvContext, make_environments
from tfpolicies.envs.env_registry import ENVIRONMENTS
from tfpolicies.errors import EnvError, SpaceError, UsageError
from tfpolicies.reporting.progress_csv import read_progress
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.rollout.connector_env import wrap_connectors
from tfpolicies.rollout.evaluation import play_episodes
from tfpolicies.rollout.sampler import EvaluationDuration

pytestmark = pytest.mark.usefixtures("kept_programs")

HELD = 10  # frames of the last picture of an episode: a second


def config(env: Any = filmed.Painted, **model: Any) -> PPOConfig:
    result = PPOConfig().environment(env).debugging(seed=3, log_level="ERROR")
    result.rollouts(num_envs_per_worker=2).framework(inference="tf", jit_compile=False)
    return result.training(
        model={"fcnet_hiddens": [4], **model},
        train_batch_size=32,
        sgd_minibatch_size=16,
        num_sgd_iter=2,
        lr=0.05,
    )


class Silent(DefaultCallbacks):
    """Callbacks of a script's own, which no file brings back."""


def brightness(path: Path) -> list[int]:
    """Returns what the pictures of a video show, in steps of their environment."""
    frames, _ = decoded(path)
    return [round(float(frame[10:200, 10:300].mean()) / 20) for frame in frames]


def evaluated(policy: Any, env: Any, seeds: list[int]) -> list[float]:
    envs = make_environments(env, len(seeds), EnvContext({}))
    played = play_episodes(policy, envs, EvaluationDuration(len(seeds), True), seeds=seeds)
    return [episode.episode_reward for episode in played]


# -- what is seen and told --------------------------------------------------------------------


@pytest.mark.core
def test_each_step_is_one_picture_and_returns_are_those_of_an_evaluation(tmp_path: Path) -> None:
    policy = filmed.rising(env=filmed.Painted)
    made = record_video(policy, tmp_path / "a.mp4", episodes=2, seed=7)
    episode = [0, 1, 2, 3, 4, 5, 6, *[6] * HELD]
    assert brightness(tmp_path / "a.mp4") == episode * 2
    assert decoded(tmp_path / "a.mp4")[1] == 10
    assert made.paths == [tmp_path / "a.mp4"]
    assert (made.returns, made.lengths) == (evaluated(policy, filmed.Painted, [7, 8]), [6, 6])


@pytest.mark.core
def test_several_files_show_the_same_and_another_rate_may_be_asked_for(tmp_path: Path) -> None:
    policy = filmed.rising(env=filmed.Painted, env_config={"length": 2})
    record_video(policy, [tmp_path / "a.gif", tmp_path / "a.mp4"], fps=4)
    for name in ("a.gif", "a.mp4"):
        assert brightness(tmp_path / name) == [0, 1, 2, 2, 2, 2, 2]
        assert decoded(tmp_path / name)[1] == 4


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        (filmed.Deaf, [0, 1, 2]),
        (lambda: filmed.Painted(length=2), [0, 1, 2]),
        (lambda env_config: filmed.Painted("rgb_array", length=2), [0, 1, 2]),
        ("helpers.rendering_envs:Painted", [0, 1, 2, 3, 4, 5, 6]),
        (filmed.TwoPictures, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]),
    ],
    ids=["deaf", "no-argument", "own-mode", "import-path", "list"],
)
def test_creators_take_the_render_mode_as_they_can(
    tmp_path: Path, env: Any, shown: list[int]
) -> None:
    settings = {"length": 2} if env is filmed.Deaf else {}
    policy = filmed.rising(env=env, env_config=settings)
    record_video(policy, tmp_path / "a.mp4")
    result = brightness(tmp_path / "a.mp4")
    assert result[: len(shown)] == shown
    assert set(result[len(shown) :]) == {shown[-1]}


def test_registered_creators_and_names_of_gymnasium_render(tmp_path: Path) -> None:
    ENVIRONMENTS["painted"] = lambda context: filmed.Painted(**context)
    try:
        record_video(filmed.rising(), tmp_path / "a.mp4", "painted")
    finally:
        del ENVIRONMENTS["painted"]
    assert brightness(tmp_path / "a.mp4")[:7] == [0, 1, 2, 3, 4, 5, 6]
    policy = config("CartPole-v1").build().get_policy()
    made = record_video(policy, tmp_path / "b.mp4", max_steps=5)
    frames, rate = decoded(tmp_path / "b.mp4")
    assert (frames.shape, rate) == ((6 + 50, 400 + 2 * 19, 600, 3), 50)
    assert made.lengths == [5]


def test_an_endless_episode_is_cut(tmp_path: Path) -> None:
    policy = filmed.rising(env=filmed.Painted, env_config={"length": 10**9})
    made = record_video(policy, tmp_path / "a.mp4", episodes=2, max_steps=3)
    assert made.lengths == [3, 3]
    assert brightness(tmp_path / "a.mp4") == [0, 1, 2, *[3] * (1 + HELD)] * 2


def test_memories_filters_and_connectors_act_as_in_evaluations(tmp_path: Path) -> None:
    settings = config(use_lstm=True, lstm_cell_size=4, max_seq_len=4)
    settings.rollouts(observation_filter="MeanStdFilter", agent_connectors=[FrameStack(2)])
    algorithm = settings.build()
    algorithm.train()
    policy = algorithm.get_policy()
    before = policy.get_weights()
    greedy = policy.driver.copy_with_settings("greedy", {"explore": False}, rebuild=False)
    envs = wrap_connectors(make_environments(filmed.Painted, 2, EnvContext({})), greedy)
    played = play_episodes(greedy, envs, EvaluationDuration(2, True), seeds=[0, 1])
    expected = [episode.episode_reward for episode in played]
    for player in (policy, algorithm):
        made = record_video(player, tmp_path / "a.mp4", episodes=2)
        np.testing.assert_allclose(made.returns, expected, rtol=1e-5)
    for name, array in policy.get_weights().items():
        np.testing.assert_array_equal(array, before[name])


def test_all_agents_of_an_environment_play(tmp_path: Path) -> None:
    settings = config(filmed.Pair)
    settings.multi_agent(policies={"left", "right"}, policy_mapping_fn=filmed.mapped)
    algorithm = settings.build()
    made = record_video(algorithm, tmp_path / "a.mp4", seed=5)
    assert brightness(tmp_path / "a.mp4")[:7] == [0, 1, 2, 3, 4, 5, 6]
    assert made.lengths == [6]
    with pytest.raises(EnvError, match="several agents"):
        record_video(algorithm.get_policy("left"), tmp_path / "b.mp4", filmed.Pair)


@pytest.mark.parametrize("name", ["pettingzoo:classic/tictactoe_v3", "mpe2:simple_spread_v3"])
def test_environments_of_pettingzoo_are_recorded(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name.partition(":")[0])
    made = record_video(config(name).build(), tmp_path / "a.mp4", fps=1)
    frames, _ = decoded(tmp_path / "a.mp4")
    assert len(frames) == made.lengths[0] + 1 + 1
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 60


# -- what cannot be recorded ------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("env", "message"),
    [
        (filmed.Blind, r"Blind has no render_mode 'rgb_array'.*is \['ansi'\].*Write a `render`"),
        (filmed.Broken, "Broken must render pictures.*`render` gave str"),
        ("envpool:CartPole-v1", "EnvPool returns only observations.*ALE/Pong-v5"),
        (lambda: SyncVectorEnv([filmed.Painted]), "is a vector environment"),
        ("CartPole-v9", "registered"),
    ],
    ids=["no-mode", "no-picture", "envpool", "vector", "unknown"],
)
def test_what_does_not_render_is_named_with_the_next_step(
    tmp_path: Path, env: Any, message: str
) -> None:
    with pytest.raises(EnvError, match=f"(?s){message}"):
        record_video(filmed.rising(), tmp_path / "a.mp4", env)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.core
def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    policy, path = filmed.rising(env=filmed.Painted), tmp_path / "a.mp4"
    with pytest.raises(UsageError, match=r"episodes must be a whole number.*got 0"):
        record_video(policy, path, episodes=0)
    with pytest.raises(UsageError, match="must be a Policy or an Algorithm, got 'runs'"):
        record_video("runs", path)
    with pytest.raises(UsageError, match="env must be a name"):
        record_video(filmed.rising(), path)
    with pytest.raises(SpaceError):
        record_video(filmed.rising(), path, "Pendulum-v1")


@pytest.mark.core
def test_an_environment_that_breaks_leaves_no_half_video(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="it fell"):
        record_video(filmed.rising(), tmp_path / "a.mp4", filmed.Failing)
    assert list(tmp_path.iterdir()) == []


# -- while training ---------------------------------------------------------------------------


class Told(DefaultCallbacks):
    """Counts the episodes of all environments there are."""

    ended = 0

    def on_episode_end(self, **kwargs: Any) -> None:
        Told.ended += 1


def learned(run_dir: Path, **how: Any) -> tuple[Algorithm, list[dict[str, float]], int]:
    Told.ended = 0
    algorithm = config().callbacks(Told).build()
    algorithm.learn(128, run_dir=run_dir, progress=False, **how)
    clocks = {"time_s", "steps_per_s"}
    rows = read_progress(run_dir / "progress.csv")
    return (
        algorithm,
        [{k: x for k, x in row.items() if k not in clocks} for row in rows],
        Told.ended,
    )


def test_videos_while_training_change_nothing_about_it(tmp_path: Path) -> None:
    plain, rows, ended = learned(tmp_path / "plain")
    other, other_rows, other_ended = learned(tmp_path / "other", record_every=2)
    np.testing.assert_equal(other_rows, rows)
    assert ended == other_ended
    for name, array in plain.get_policy().get_weights().items():
        np.testing.assert_array_equal(other.get_policy().get_weights()[name], array)
    names = ["iteration-000002-steps-000000064.mp4", "iteration-000004-steps-000000128.mp4"]
    assert sorted(x.name for x in (tmp_path / "other" / "videos").iterdir()) == names
    assert not (tmp_path / "plain" / "videos").exists()
    assert brightness(tmp_path / "other" / "videos" / names[0])[:7] == [0, 1, 2, 3, 4, 5, 6]


def test_a_bar_says_that_a_video_is_recorded(tmp_path: Path) -> None:
    output = io.StringIO()
    terminal = {"TERM": "xterm-256color"}
    console = Console(file=output, width=100, force_terminal=True, _environ=terminal)
    goals, algorithm = TrainingOptions(steps=64, record_every=2), config().build()
    with RunFolder.create_at(tmp_path / "run", {}) as run:
        records = RunLogger(run, algorithm, goals)
        TrainingLoop(algorithm, goals, records, console).train(lambda what: None)
        records.close()
    algorithm.stop()
    assert "| recording a video" in output.getvalue()


def test_what_does_not_render_is_told_before_training(tmp_path: Path) -> None:
    algorithm = config(filmed.Blind).build()
    with pytest.raises(EnvError, match="no render_mode"):
        algorithm.learn(64, run_dir=tmp_path / "run", progress=False, record_every=1)
    with pytest.raises(UsageError, match="record_every needs a run_dir"):
        algorithm.learn(64, progress=False, record_every=1)
    with pytest.raises(UsageError, match="record_every must be a whole number"):
        algorithm.learn(64, run_dir=tmp_path / "run", record_every=-1)
    assert (algorithm.iteration, list(tmp_path.iterdir())) == (0, [])


def test_a_video_that_fails_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = config(filmed.Failing).build()
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        logging.getLogger("tfpolicies").setLevel(logging.WARNING)
        algorithm.learn(64, run_dir=tmp_path, progress=False, record_every=2)
    assert algorithm.iteration == 2
    assert "There is no video of iteration 2" in caplog.text
    assert list((tmp_path / "videos").iterdir()) == []


# -- on the command line ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an environment that a file may not name."""
    folder = tmp_path_factory.mktemp("run")
    config("helpers.rendering_envs:Painted").build().learn(
        64, run_dir=folder / "mine", progress=False
    )
    return folder / "mine"


OWN = ["--env", "helpers.rendering_envs:Painted"]


def test_the_command_writes_into_the_run_and_tells_what_evaluate_tells(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(run.parent), *OWN, "--gif", "--episodes", "2", "--seed", "4"]) == 0
    out = capsys.readouterr().out
    videos = run / "videos"
    assert {path.name for path in videos.iterdir()} == {"latest.mp4", "latest.gif"}
    assert str(videos / "latest.gif") in out
    for i in range(2):
        words = ["evaluate", str(run), *OWN, "--episodes", "1", "--seed", str(4 + i)]
        assert main(words) == 0
        mean = float(capsys.readouterr().out.split("mean return")[1].split()[0])
        assert f"episode {i + 1}  return {mean:,.2f}, 6 steps" in out


def test_to_names_a_file_or_a_folder(run: Path, tmp_path: Path) -> None:
    words = ["record", str(run / "checkpoints" / "latest"), *OWN, "--episodes", "1", "--to"]
    assert main([*words, str(tmp_path / "a.gif")]) == 0
    assert main([*words, str(tmp_path / "new")]) == 0
    assert [x.name for x in (tmp_path / "new").iterdir()] == ["latest.mp4"]
    assert {x.name for x in tmp_path.iterdir()} == {"a.gif", "new"}


def test_the_command_refuses_what_it_cannot_do(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    for words, message in [
        (["record", str(run), *OWN, "--to", "a.avi"], "ends in .mp4 or .gif, or a folder, got"),
        (["record", str(run)], "Give --env helpers.rendering_envs:Painted"),
        (["record", str(run), "--env", "helpers.rendering_envs:Blind"], "has no render_mode"),
        (["record", str(run), *OWN, "--fps", "0"], "must be above 0"),
        (["record", str(run), "--best"], "Train with --keep-best"),
        (["watch", str(run), *OWN], f"tfpolicies record {run}"),
    ]:
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_a_window_shows_the_episodes(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert main(["watch", str(run), *OWN, "--episodes", "2"]) == 0
    assert "episode 2  return" in capsys.readouterr().out
    assert main(["watch", str(run), "--env", "helpers.rendering_envs:TwoPictures"]) == 2
    assert "Make a video: tfpolicies record" in capsys.readouterr().err


def test_a_run_of_several_policies_is_recorded_with_its_mapping(tmp_path: Path) -> None:
    settings = config("helpers.rendering_envs:Pair")
    settings.multi_agent(policies={"left", "right"}, policy_mapping_fn=filmed.mapped)
    settings.build().learn(64, run_dir=tmp_path / "run", progress=False)
    words = [
        "record",
        str(tmp_path / "run"),
        "--env",
        "helpers.rendering_envs:Pair",
        "--episodes",
        "1",
    ]
    assert main([*words, "--policy-mapping", "helpers.rendering_envs:mapped"]) == 0
    video = tmp_path / "run" / "videos" / "latest.mp4"
    assert brightness(video) == [0, 1, 2, 3, 4, 5, 6, *[6] * HELD]


def test_a_run_of_several_policies_is_evaluated_as_it_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config("helpers.rendering_envs:Pair").callbacks(Silent)
    settings.multi_agent(policies={"left", "right"}, policy_mapping_fn=filmed.mapped)
    settings.build().learn(64, run_dir=tmp_path / "run", progress=False)
    words = [str(tmp_path / "run"), "--env", "helpers.rendering_envs:Pair", "--episodes", "3"]
    words += ["--policy-mapping", "helpers.rendering_envs:mapped"]
    capsys.readouterr()
    assert main(["record", *words, "--to", str(tmp_path / "a.gif")]) == 0
    recorded = capsys.readouterr().out
    assert main(["evaluate", *words]) == 0
    evaluated = capsys.readouterr().out
    assert re.search(r"mean length +6\b", evaluated)
    assert re.search(r"mean of left +[\d.-]+", evaluated)
    (mean,) = re.findall(r"mean return +(\S+)", evaluated)
    returns = [float(each) for each in re.findall(r"return (\S+),", recorded)]
    assert float(mean) == pytest.approx(sum(returns) / 3, abs=0.01)


def test_the_command_records_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "helpers.rendering_envs:Painted",
        "--steps",
        "64",
        "--seed",
        "1",
        "--record-every",
        "2",
    ]
    quick = ("train_batch_size=32", "sgd_minibatch_size=16", "inference=tf", "jit_compile=False")
    words += [word for each in quick for word in ("--set", each)]
    assert main(words) == 0
    (video,) = tmp_path.glob("runs/*/videos/*")
    assert video.name.startswith("iteration-000002")
    words[1] = "helpers.rendering_envs:Blind"
    assert main(words) == 2
    assert "no render_mode" in capsys.readouterr().err
    assert len([*Path("runs").iterdir()]) == 1


def test_a_picture_does_not_make_sdl_complain_about_a_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Loud(gym.Env):
        observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
        metadata = {"render_modes": ["rgb_array"]}

        def __init__(self, config: Any) -> None:
            self.render_mode, self.is_open = "rgb_array", False

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return np.zeros(2, np.float32), {}

        def step(self, action: int) -> Any:
            return np.zeros(2, np.float32), 0.0, True, False, {}

        def render(self) -> np.ndarray:
            if not self.is_open:  # as SDL does
                os.write(2, b"error: XDG_RUNTIME_DIR not set in the environment.\nmine\n")
            self.is_open = True
            return np.zeros((64, 64, 3), np.uint8)

    policy = config(Loud).build().get_policy()
    capfd.readouterr()
    record_video(policy, tmp_path / "loud.gif")
    assert capfd.readouterr().err == "mine\nmine\n"  # it is made twice
