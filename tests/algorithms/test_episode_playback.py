"""Videos of policies that play: pictures, results, refusals, and training that is not changed."""

import io
import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from rich.console import Console

from helpers import rendering_envs as filmed
from helpers.videos import decode_video
from helpers.workers import make_small_config
from tfpolicies import record_video
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


def config(env=filmed.Painted, **model):
    model = {"fcnet_hiddens": [4], **model}
    return make_small_config(env, seed=3, lr=0.05, num_envs_per_worker=2, model=model)


def pair_config():
    """Makes a config of two policies in an environment that no file may name."""
    settings = {"policies": {"left", "right"}, "policy_mapping_fn": filmed.mapped}
    return config("helpers.rendering_envs:Pair").multi_agent(**settings)


class Silent(DefaultCallbacks):
    """Callbacks of a script, which no file can restore."""


def brightness(path):
    """Returns the brightness of the pictures of a video, in steps of their environment."""
    frames, _ = decode_video(path)
    return [round(float(frame[10:200, 10:300].mean()) / 20) for frame in frames]


def evaluate(policy, seeds, wrap=lambda envs: envs):
    envs = wrap(make_environments(filmed.Painted, len(seeds), EnvContext({})))
    played = play_episodes(policy, envs, EvaluationDuration(len(seeds), True), seeds=seeds)
    return [episode.episode_reward for episode in played]


# -- pictures and results ---------------------------------------------------------------------


@pytest.mark.core
def test_each_step_is_one_picture_and_returns_are_those_of_an_evaluation(tmp_path):
    policy = filmed.rising(env=filmed.Painted)
    recording = record_video(policy, tmp_path / "a.mp4", episodes=2, seed=7)
    episode = [0, 1, 2, 3, 4, 5, 6, *[6] * HELD]
    assert brightness(tmp_path / "a.mp4") == episode * 2
    assert decode_video(tmp_path / "a.mp4")[1] == 10
    assert recording.paths == [tmp_path / "a.mp4"]
    assert (recording.returns, recording.lengths) == (evaluate(policy, [7, 8]), [6, 6])


@pytest.mark.core
def test_several_files_show_the_same_and_another_rate_may_be_asked_for(tmp_path):
    policy = filmed.rising(env=filmed.Painted, env_config={"length": 2})
    record_video(policy, [tmp_path / "a.gif", tmp_path / "a.mp4"], fps=4)
    for name in ("a.gif", "a.mp4"):
        assert brightness(tmp_path / name) == [0, 1, 2, 2, 2, 2, 2]
        assert decode_video(tmp_path / name)[1] == 4


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
def test_creators_take_the_render_mode_as_they_can(tmp_path, env, shown):
    settings = {"length": 2} if env is filmed.Deaf else {}
    policy = filmed.rising(env=env, env_config=settings)
    record_video(policy, tmp_path / "a.mp4")
    pictures = brightness(tmp_path / "a.mp4")
    assert pictures[: len(shown)] == shown
    assert set(pictures[len(shown) :]) == {shown[-1]}


def test_registered_creators_and_names_of_gymnasium_render(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "painted", lambda context: filmed.Painted(**context))
    record_video(filmed.rising(), tmp_path / "a.mp4", "painted")
    assert brightness(tmp_path / "a.mp4")[:7] == [0, 1, 2, 3, 4, 5, 6]
    policy = config("CartPole-v1").build().get_policy()
    assert record_video(policy, tmp_path / "b.mp4", max_steps=5).lengths == [5]
    frames, rate = decode_video(tmp_path / "b.mp4")
    assert (frames.shape, rate) == ((6 + 50, 400 + 2 * 19, 600, 3), 50)


def test_an_endless_episode_is_cut(tmp_path):
    policy = filmed.rising(env=filmed.Painted, env_config={"length": 10**9})
    recording = record_video(policy, tmp_path / "a.mp4", episodes=2, max_steps=3)
    assert recording.lengths == [3, 3]
    assert brightness(tmp_path / "a.mp4") == [0, 1, 2, *[3] * (1 + HELD)] * 2


def test_memories_filters_and_connectors_act_as_in_evaluations(tmp_path):
    settings = config(use_lstm=True, lstm_cell_size=4, max_seq_len=4)
    settings.rollouts(observation_filter="MeanStdFilter", agent_connectors=[FrameStack(2)])
    algorithm = settings.build()
    algorithm.train()
    policy = algorithm.get_policy()
    before = policy.get_weights()
    greedy = policy.driver.copy_with_settings("greedy", {"explore": False}, rebuild=False)
    expected = evaluate(greedy, [0, 1], lambda envs: wrap_connectors(envs, greedy))
    for player in (policy, algorithm):
        recording = record_video(player, tmp_path / "a.mp4", episodes=2)
        np.testing.assert_allclose(recording.returns, expected, rtol=1e-5)
    np.testing.assert_equal(policy.get_weights(), before)


def test_all_agents_of_an_environment_play(tmp_path):
    algorithm = pair_config().build()
    assert record_video(algorithm, tmp_path / "a.mp4", seed=5).lengths == [6]
    assert brightness(tmp_path / "a.mp4")[:7] == [0, 1, 2, 3, 4, 5, 6]
    with pytest.raises(EnvError, match="several agents"):
        record_video(algorithm.get_policy("left"), tmp_path / "b.mp4", filmed.Pair)


@pytest.mark.parametrize("name", ["pettingzoo:classic/tictactoe_v3", "mpe2:simple_spread_v3"])
def test_environments_of_pettingzoo_are_recorded(tmp_path, name):
    pytest.importorskip(name.partition(":")[0])
    recording = record_video(config(name).build(), tmp_path / "a.mp4", fps=1)
    frames, _ = decode_video(tmp_path / "a.mp4")
    assert len(frames) == recording.lengths[0] + 1 + 1
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 60


# -- refusals ---------------------------------------------------------------------------------


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
def test_an_environment_that_does_not_render_is_named_with_the_next_step(tmp_path, env, message):
    with pytest.raises(EnvError, match=f"(?s){message}"):
        record_video(filmed.rising(), tmp_path / "a.mp4", env)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.core
def test_wrong_arguments_are_refused(tmp_path):
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
def test_an_environment_that_breaks_leaves_no_half_video(tmp_path):
    with pytest.raises(RuntimeError, match="it fell"):
        record_video(filmed.rising(), tmp_path / "a.mp4", filmed.Failing)
    assert list(tmp_path.iterdir()) == []


# -- while training ---------------------------------------------------------------------------


class Counting(DefaultCallbacks):
    """Counts the episodes of all environments there are."""

    episodes = 0

    def on_episode_end(self, **kwargs):
        Counting.episodes += 1


def learn(run_dir, **options):
    """Returns weights, rows of the curve without times, and the number of episodes."""
    Counting.episodes = 0
    algorithm = config().callbacks(Counting).build()
    algorithm.learn(128, run_dir=run_dir, progress=False, **options)
    rows = read_progress(run_dir / "progress.csv")
    for row in rows:
        for name in [x for x in row if x.startswith(("time", "steps_per_s"))]:
            del row[name]
    return algorithm.get_weights(), rows, Counting.episodes


def test_videos_while_training_change_nothing_about_it(tmp_path):
    expected = learn(tmp_path / "plain")
    np.testing.assert_equal(learn(tmp_path / "other", record_every=2), expected)
    names = ["iteration-000002-steps-000000064.mp4", "iteration-000004-steps-000000128.mp4"]
    assert sorted(x.name for x in (tmp_path / "other" / "videos").iterdir()) == names
    assert not (tmp_path / "plain" / "videos").exists()
    assert brightness(tmp_path / "other" / "videos" / names[0])[:7] == [0, 1, 2, 3, 4, 5, 6]


def test_a_bar_says_that_a_video_is_recorded(tmp_path):
    output = io.StringIO()
    terminal = {"TERM": "xterm-256color"}
    console = Console(file=output, width=100, force_terminal=True, _environ=terminal)
    goals, algorithm = TrainingOptions(steps=64, record_every=2), config().build()
    with RunFolder.create_at(tmp_path / "run", {}) as run:
        run_logger = RunLogger(run, algorithm, goals)
        TrainingLoop(algorithm, goals, run_logger, console).train(lambda what: None)
        run_logger.close()
    assert "| recording a video" in output.getvalue()


def test_wrong_options_of_videos_are_refused_before_training(tmp_path):
    algorithm = config(filmed.Blind).build()
    with pytest.raises(EnvError, match="no render_mode"):
        algorithm.learn(64, run_dir=tmp_path / "run", progress=False, record_every=1)
    with pytest.raises(UsageError, match="record_every needs a run_dir"):
        algorithm.learn(64, progress=False, record_every=1)
    with pytest.raises(UsageError, match="record_every must be a whole number"):
        algorithm.learn(64, run_dir=tmp_path / "run", record_every=-1)
    assert (algorithm.iteration, list(tmp_path.iterdir())) == (0, [])


def test_a_video_that_fails_does_not_end_training(tmp_path, caplog):
    algorithm = config(filmed.Failing).build()
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        logging.getLogger("tfpolicies").setLevel(logging.WARNING)
        algorithm.learn(64, run_dir=tmp_path, progress=False, record_every=2)
    assert algorithm.iteration == 2
    assert "There is no video of iteration 2" in caplog.text
    assert list((tmp_path / "videos").iterdir()) == []


# -- on the command line ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of an environment that a file may not name."""
    run_dir = tmp_path_factory.mktemp("run") / "mine"
    config("helpers.rendering_envs:Painted").build().learn(64, run_dir=run_dir, progress=False)
    return run_dir


ENV = ["--env", "helpers.rendering_envs:Painted"]


def test_the_command_writes_into_the_run_and_prints_the_returns_of_evaluate(run, capsys):
    assert main(["record", str(run.parent), *ENV, "--gif", "--episodes", "2", "--seed", "4"]) == 0
    out = capsys.readouterr().out
    videos = run / "videos"
    assert {path.name for path in videos.iterdir()} == {"latest.mp4", "latest.gif"}
    assert str(videos / "latest.gif") in out
    for i in range(2):
        assert main(["evaluate", str(run), *ENV, "--episodes", "1", "--seed", str(4 + i)]) == 0
        mean = float(capsys.readouterr().out.split("mean return")[1].split()[0])
        assert f"episode {i + 1}  return {mean:,.2f}, 6 steps" in out


def test_to_names_a_file_or_a_folder(run, tmp_path):
    words = ["record", str(run / "checkpoints" / "latest"), *ENV, "--episodes", "1", "--to"]
    assert main([*words, str(tmp_path / "a.gif")]) == 0
    assert main([*words, str(tmp_path / "new")]) == 0
    assert [x.name for x in (tmp_path / "new").iterdir()] == ["latest.mp4"]
    assert {x.name for x in tmp_path.iterdir()} == {"a.gif", "new"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["record", *ENV, "--to", "a.avi"], "ends in .mp4 or .gif, or a folder, got"),
        (["record"], "Give --env helpers.rendering_envs:Painted"),
        (["record", "--env", "helpers.rendering_envs:Blind"], "has no render_mode"),
        (["record", *ENV, "--fps", "0"], "must be above 0"),
        (["record", "--best"], "Train with --keep-best"),
        (["watch", *ENV], "tfpolicies record {run}"),
    ],
)
def test_the_command_refuses_wrong_words(run, capsys, monkeypatch, words, message):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    assert main([words[0], str(run), *words[1:]]) == 2
    assert message.format(run=run) in capsys.readouterr().err


def test_a_window_shows_the_episodes(run, capsys, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert main(["watch", str(run), *ENV, "--episodes", "2"]) == 0
    assert "episode 2  return" in capsys.readouterr().out
    assert main(["watch", str(run), "--env", "helpers.rendering_envs:TwoPictures"]) == 2
    assert "Make a video: tfpolicies record" in capsys.readouterr().err


def test_a_run_of_several_policies_is_evaluated_as_it_is_recorded(tmp_path, capsys):
    run_dir = tmp_path / "run"
    pair_config().callbacks(Silent).build().learn(64, run_dir=run_dir, progress=False)
    words = [str(run_dir), "--env", "helpers.rendering_envs:Pair"]
    words += ["--policy-mapping", "helpers.rendering_envs:mapped", "--episodes", "3"]
    capsys.readouterr()
    assert main(["record", *words]) == 0
    recorded = capsys.readouterr().out
    episode = [0, 1, 2, 3, 4, 5, 6, *[6] * HELD]
    assert brightness(run_dir / "videos" / "latest.mp4") == episode * 3
    assert main(["evaluate", *words]) == 0
    evaluated = capsys.readouterr().out
    assert re.search(r"mean length +6\b", evaluated)
    assert re.search(r"mean of left +[\d.-]+", evaluated)
    (mean,) = re.findall(r"mean return +(\S+)", evaluated)
    returns = [float(x) for x in re.findall(r"return (\S+),", recorded)]
    assert float(mean) == pytest.approx(sum(returns) / 3, abs=0.01)


def test_the_command_records_while_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = ("train_batch_size=32", "sgd_minibatch_size=16", "inference=tf", "jit_compile=False")
    words = ["--steps", "64", "--seed", "1", "--record-every", "2"]
    words += [word for x in quick for word in ("--set", x)]
    assert main(["train", "helpers.rendering_envs:Painted", *words]) == 0
    (video,) = tmp_path.glob("runs/*/videos/*")
    assert video.name.startswith("iteration-000002")
    assert main(["train", "helpers.rendering_envs:Blind", *words]) == 2
    assert "no render_mode" in capsys.readouterr().err
    assert len([*Path("runs").iterdir()]) == 1


def test_a_picture_does_not_make_sdl_complain_about_a_folder(tmp_path, capfd):
    class Loud(filmed.Painted):
        is_open = False

        def render(self):
            if not self.is_open:  # as SDL does
                os.write(2, b"error: XDG_RUNTIME_DIR not set in the environment.\nmine\n")
            self.is_open = True
            return super().render()

    policy = config(Loud).build().get_policy()
    capfd.readouterr()
    record_video(policy, tmp_path / "loud.gif")
    assert capfd.readouterr().err == "mine\nmine\n"  # it is made twice
