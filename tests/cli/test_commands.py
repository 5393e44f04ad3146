import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfpolicies import PPO, Policy
from tfpolicies.cli import main
from tfpolicies.cli.arguments import parse
from tfpolicies.errors import UsageError
from tfpolicies.reporting.progress_csv import read_progress

pytestmark = pytest.mark.usefixtures("kept_programs")

PACKAGE_HOME = Path(__file__).parents[2]
QUICK = ["--set", "jit_compile=False", "--set", "inference=tf", "--seed", "7"]

CORRIDOR = """
import gymnasium as gym
import numpy as np

class Corridor(gym.Env):
    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config):
        self.length = config.get("length", 3)

    def reset(self, *, seed=None, options=None):
        self.place = self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.place = max(0, self.place + (1 if action == 1 else -1))
        self.steps += 1
        done, late = self.place == self.length, self.steps == 60
        return np.array([self.place / self.length], np.float32), float(done), done, late, {}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 1024 steps."""
    parent = tmp_path_factory.mktemp("trained")
    words = ["train", "CartPole-v1", "--steps", "1024", "--run-dir", str(parent), *QUICK]
    assert main([*words, "--eval-every", "2", "--eval-episodes", "4", "--keep-best"]) == 0
    (run,) = parent.iterdir()
    return run


def iterations(run: Path) -> list[float]:
    return [row["iteration"] for row in read_progress(run / "progress.csv")]


def start_training(folder: Path, *words: str) -> tuple[subprocess.Popen[str], Path]:
    """Starts a training that would not end; returns it with its run folder after 20 iterations."""
    command = [sys.executable, "-m", "tfpolicies", "train", "CartPole-v1", *words, *QUICK]
    process = subprocess.Popen(
        [*command, "--steps", "100000000"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PACKAGE_HOME)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def has_begun() -> bool:
        results = list(folder.glob("runs/*/progress.csv"))
        return bool(results) and len(read_progress(results[0])) >= 20

    try:
        wait_for(has_begun, process)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    (run,) = folder.glob("runs/*")
    return process, run


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    for _ in range(3000):
        assert process.poll() is None, process.communicate()[1]
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("nothing happened within five minutes")


# -- the words of the command line ------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("text", ["100000", "100_000", "1e5", "1E+5", "100000.0"])
def test_steps_can_be_written_as_people_write_them(text: str) -> None:
    assert parse(["train", "CartPole-v1", "--steps", text]).steps == 100_000


@pytest.mark.core
@pytest.mark.parametrize("text", ["1.5", "many", "inf", "nan", "1e-3"])
def test_steps_that_are_no_whole_number_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="invalid integer value"):
        parse(["train", "CartPole-v1", "--steps", text])


@pytest.mark.core
def test_help_is_there_without_tensorflow() -> None:
    code = (
        "import sys; from tfpolicies.cli import main; main(['--help']); main(['train', '-h']); "
        "sys.exit('tensorflow' in sys.modules or 'gymnasium' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "play-exported" in shown.stdout
    assert "--keep-best" in shown.stdout


@pytest.mark.core
def test_the_name_of_an_algorithm_may_be_written_in_small_letters(capsys) -> None:
    assert main(["tuned", "--algo", "Sac"]) == 0
    small = capsys.readouterr().out
    assert main(["tuned", "--algo", "SAC"]) == 0
    assert small == capsys.readouterr().out
    assert "HalfCheetah-v5" in small
    assert main(["train", "CartPole-v1", "--algo", "sac", "--lr", "fast"]) == 2
    assert "--lr: must be a number, got 'fast'" in capsys.readouterr().err


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "there is no 'trian'. Did you mean 'train'?"),
        (["train", "CartPol-v1"], "No environment 'CartPol-v1' is registered with Gymnasium. Did"),
        (
            ["train", "CartPole-v1", "--algo", "PP0"],
            "--algo: there is no 'PP0'. Did you mean 'PPO'? Choose one of PPO, PG, A2C, DQN, SAC,",
        ),
        (
            ["train", "CartPole-v1", "--eval-evry", "3"],
            "'--eval-evry'. Did you mean '--eval-every'",
        ),
        (["train", "CartPole-v1", "--set", "gama=1"], "Did you mean 'gamma'"),
        (["train", "CartPole-v1", "--set", "fcnet_hidden=[8]"], "'model.fcnet_hiddens'"),
        (
            ["train", "CartPole-v1", "--set", "model.fcnet_hidden=8"],
            "'post_fcnet_hiddens'? Pass a custom model",
        ),
        (["train", "CartPole-v1", "--set", "gamma"], "takes name=value"),
        (["train", "CartPole-v1", "--set", "gamma=2"], "gamma must be a number in [0, 1], got 2"),
        (["train", "CartPole-v1", "--steps", "-5"], "must be 1 or more, got -5"),
        (["train", "CartPole-v1", "--steps", "many"], "invalid integer value: 'many'"),
        (["train"], "train takes an environment"),
        (["train", "nowhere:Env", "--steps", "9"], "'nowhere:Env' could not be imported"),
        (
            ["play-exported", ".", "--env", "CartPole-v1", "--env-config", "3"],
            "must be a JSON object",
        ),
        (["train", "CartPole-v1", "--set", "xyzzy=3"], "use env_config.xyzzy=..."),
        (
            ["train", "--resume"],
            "--resume needs a run folder, or a folder of runs, but 'runs' has no",
        ),
        (["train", "CartPole"], "Gymnasium. Did you mean 'CartPole-v1' or 'CartPole-v0'"),
        (["evaluate", "nowhere"], "there is no such folder"),
        (["evaluate", "nowhere", "--env", "Acrobat-v1"], "Did you mean 'Acrobot-v1'"),
        (["export", "nowhere", "--best", "--to", "out"], "--best needs a run folder"),
        (["play-exported", "nowhere", "--env", "CartPole-v1"], "nowhere) does not exist"),
        (
            ["play-exported", ".", "--env", "CartPole-v1"],
            "must hold one ONNX export, model.onnx with its policy_spec.json, but has none",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_near_matches_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.startswith("tfpolicies: error: ")
    assert "Traceback" not in shown
    assert shown.count("\n") <= 2
    assert list(here.iterdir()) == []


def test_debug_shows_the_traceback(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "CartPol-v1", "--debug"]) == 2
    *trace, last = capsys.readouterr().err.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert last.startswith("tfpolicies: error: No environment 'CartPol-v1'")


# -- train ------------------------------------------------------------------------------------


def test_a_run_leaves_curve_csv_events_and_checkpoints(trained: Path) -> None:
    assert iterations(trained) == [1, 2, 3, 4]
    assert (trained / "learning_curve.png").stat().st_size > 10_000
    assert len(list((trained / "events").iterdir())) == 1
    assert (trained / "checkpoints" / "latest" / "algorithm.json").is_file()
    assert json.loads((trained / "run.json").read_text())["settings"]["finished"] == "steps"


def test_the_best_checkpoint_is_that_of_the_best_evaluation(trained: Path) -> None:
    rows = read_progress(trained / "progress.csv")
    scores = {row["iteration"]: row["evaluation/episode_reward_mean"] for row in rows}
    best = max((i for i in scores if scores[i] == scores[i]), key=lambda i: scores[i])
    manifest = json.loads((trained / "checkpoints" / "best" / "algorithm.json").read_text())
    assert manifest["progress"]["iteration"] == best


@pytest.mark.soak
def test_training_ends_when_recent_episodes_reach_the_target(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "CartPole-v1", "--until", "12", *QUICK]) == 0
    (run,) = (here / "runs").iterdir()
    *before, last = read_progress(run / "progress.csv")
    mean, std, episodes = (last[f"recent_returns/{x}"] for x in ("mean", "std", "episodes"))
    assert mean >= 12
    assert episodes >= 5
    assert all(row["recent_returns/mean"] < 12 for row in before)
    shown = capsys.readouterr().out
    assert f"{mean:.2f} ± {std:.2f} over the last {episodes} training episodes" in shown
    assert "PPO on CartPole-v1: the target was reached" in shown
    assert "learning_curve.png" in shown


def test_a_target_that_is_not_reached_gives_exit_code_1(here: Path) -> None:
    assert main(["train", "CartPole-v1", "--until", "400", "--steps", "256", *QUICK]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "1e-4", "--set", "lr=1e-3"], "--lr and --set lr=1e-3 both set lr"),
        (["--num-envs", "2", "--set", "num_envs_per_env_runner=3"], "both set num_envs_per_worker"),
        (["--set", "env=Acrobot-v1"], "ENV and --set env=Acrobot-v1 both set env"),
    ],
)
def test_a_setting_is_given_by_one_word_of_the_command(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "CartPole-v1", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_another_backend_of_keras_is_named_in_one_line(here: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_HOME), "KERAS_BACKEND": "torch"}
    message = "Keras must use TensorFlow as its backend, but the environment variable KERAS_BACKEND"
    for words in (
        ["-m", "tfpolicies", "train", "CartPole-v1"],
        ["-c", "import tfpolicies; tfpolicies.PPOConfig"],
        ["-c", "from tfpolicies.compat import TFModelV2"],
    ):
        done = subprocess.run(
            [sys.executable, *words], cwd=here, env=environment, capture_output=True, text=True
        )
        assert done.returncode != 0
        assert message in done.stderr.splitlines()[-1]
        assert words[0] == "-c" or len(done.stderr.splitlines()) == 1
    assert list(here.iterdir()) == []


@pytest.mark.soak
def test_pg_trains_and_ships_for_an_importable_environment_with_settings(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "corridor_of_a_user.py").write_text(CORRIDOR)
    monkeypatch.syspath_prepend(here)
    words = [
        "train",
        "corridor_of_a_user:Corridor",
        "--algo",
        "PG",
        "--steps",
        "600",
        "--lr",
        "0.01",
    ]
    more = ["--set", "env_config.length=5", "--set", "train_batch_size=100", "--num-envs", "2"]
    assert main([*words, *more, "--play", "2", *QUICK]) == 0
    assert " over 2 greedy episodes, without tensorflow" in capsys.readouterr().out
    (run,) = (here / "runs").iterdir()
    assert run.name.startswith("pg-corridor_of_a_user-Corridor-")
    rows = read_progress(run / "progress.csv")
    assert rows[-1]["env_steps"] >= 600
    assert min(row["episode_len_mean"] for row in rows) >= 5
    again = ["evaluate", str(run), "--episodes", "3", "--explore"]
    assert main(again) == 2
    assert "Give --env corridor_of_a_user:Corridor." in capsys.readouterr().err
    assert main([*again, "--env", words[1]]) == 0
    assert main(["train", "--resume", str(run), "--steps", "700"]) == 2
    assert f"train {words[1]} --resume runs/{run.name}" in capsys.readouterr().err
    assert main(["train", "other:Env", "--resume", str(run)]) == 2
    assert "ENV cannot be given with --resume" in capsys.readouterr().err
    assert main(["train", words[1], "--resume", str(run), "--steps", "700", "--play", "0"]) == 0
    assert read_progress(run / "progress.csv")[-1]["env_steps"] >= 700
    elsewhere = ["--env", words[1], "--env-config", '{"length": 7}', "--episodes", "2"]
    assert main(["play-exported", str(run), *elsewhere]) == 0
    assert "episodes 2 " in " ".join(capsys.readouterr().out.split())


# -- resume -----------------------------------------------------------------------------------


def test_a_finished_run_is_left_alone_until_a_goal_is_raised(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "CartPole-v1", "--steps", "512", *QUICK]) == 0
    (run,) = (here / "runs").iterdir()
    assert main(["train", "--resume", "--run-dir", "runs"]) == 0
    assert "is finished: all steps were used" in capsys.readouterr().out
    assert iterations(run) == [1, 2]
    assert main(["train", "--resume", str(run), "--steps", "1_024"]) == 0
    assert iterations(run) == [1, 2, 3, 4]
    assert len(list((run / "events").iterdir())) == 2


def test_what_is_trained_cannot_change_with_a_resume(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(trained), "--lr", "0.1", "--eval-every", "9"]) == 2
    assert "--lr, --eval-every cannot be given with --resume" in capsys.readouterr().err


@pytest.mark.soak
def test_ctrl_c_saves_and_prints_the_command_that_goes_on(here: Path) -> None:
    process, run = start_training(here, "--checkpoint-every", "1000000")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    done = iterations(run)
    assert done == list(range(1, len(done) + 1))
    message, *_, saved, _, hint = errors.splitlines()
    assert message.startswith("Interrupted: training saves and ends after this iteration.")
    assert saved == f"Interrupted. Saved in runs/{run.name}/checkpoints/latest."
    command = shlex.split(hint)
    assert command[1:] == ["-m", "tfpolicies", "train", "--resume", f"runs/{run.name}"]
    steps = 256 * (len(done) + 2)
    assert main([*command[3:], "--steps", str(steps)]) == 0
    assert iterations(run) == [*done, len(done) + 1, len(done) + 2]


@pytest.mark.soak
def test_a_killed_run_goes_on_from_its_last_checkpoint_without_doubles(here: Path) -> None:
    process, run = start_training(here, "--checkpoint-every", "8")
    process.kill()
    process.communicate()
    done = iterations(run)
    saved = json.loads((run / "checkpoints" / "latest" / "algorithm.json").read_text())
    kept = saved["progress"]["iteration"]
    assert len(done) - 9 <= kept <= len(done)
    assert main(["train", "--resume", "--steps", str(256 * (kept + 1))]) == 0
    assert iterations(run) == list(range(1, kept + 2))


def test_a_run_killed_before_its_first_checkpoint_starts_anew_in_its_folder(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tfpolicies.reporting.run_folder import RunFolder

    settings = RunFolder.open(trained).settings["train"]
    run = RunFolder.create(here, "ppo", {"train": {**settings, "steps": 256}, "finished": None})
    run.release()
    assert main(["train", "--resume", str(run.path)]) == 0
    assert iterations(run.path) == [1]
    forged: list[dict[str, Any]] = [
        {"set": [words]}
        for words in ("env=a.b:C", "exploration_config.type=a.b.C", "evaluation_config.env=a.b:C")
    ]
    forged += [{"from_file": {"env": "a.b:C"}}, {"callbacks": "a.b:C"}, {"model": "a.b:f"}]
    forged += [{"algo": "a.b:C"}]
    forged += [{"from_file": {"exploration_config": {"type": "a.b.C"}}}, {"policy_mapping": "a:f"}]
    for more in forged:
        content = {"train": {**settings, **more}, "finished": None}
        strange = RunFolder.create(here, "strange", content)
        strange.release()
        assert main(["train", "--resume", str(strange.path)]) == 2
        assert "your code is only imported if you name it" in capsys.readouterr().err
    for name, value, message in (
        ("algo", "tfpolicies.cli.main", "algo 'tfpolicies.cli.main'"),
        ("algo", ["a.b:C"], "algo ['a.b:C']"),
        ("from_file", 3, "from_file 3"),
        ("from_file", {"callbacks": {"$import": "os:system"}}, "UnresolvedObject(name='os:system'"),
        ("model", ["a.b:f"], "model ['a.b:f']"),
    ):
        content = {"train": {**settings, name: value}, "finished": None}
        strange = RunFolder.create(here, "strange", content)
        strange.release()
        assert main(["train", "--resume", str(strange.path)]) == 2
        assert message in capsys.readouterr().err
    first = read_progress(trained / "progress.csv")[0]
    again = read_progress(run.progress_csv)[0]
    assert again["learner/default_policy/total_loss"] == first["learner/default_policy/total_loss"]


MINE = """
import keras
from tfpolicies import DefaultCallbacks

class Telling(DefaultCallbacks):
    def on_train_result(self, *, algorithm, result):
        print("told of", result["training_iteration"])

def small_net(observation_space, num_outputs):
    return keras.Sequential([keras.layers.Dense(3, "tanh"), keras.layers.Dense(num_outputs)])

def by_number(agent_id, episode, worker=None, **kwargs):
    return ["left", "right"][agent_id]

NUMBER = 3
"""
OWN_ALGORITHM = """
from tfpolicies import PG, PGTF2Policy

class HalvedPolicy(PGTF2Policy):
    def loss(self, model, dist_class, train_batch):
        return 0.5 * super().loss(model, dist_class, train_batch)

class Halved(PG):
    policy_classes = {"tf2": HalvedPolicy}
"""
TWO_POLES = """
from tfpolicies.envs.multi_agent_env import make_multi_agent
TwoPoles = make_multi_agent("CartPole-v1")
"""


@pytest.fixture
def mine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with modules of a user."""
    (here / "code_of_mine.py").write_text(MINE)
    (here / "two_poles_of_mine.py").write_text(TWO_POLES)
    (here / "algorithm_of_mine.py").write_text(OWN_ALGORITHM)
    monkeypatch.syspath_prepend(here)
    return here


def test_an_algorithm_of_the_users_is_named_in_each_command(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--algo", "algorithm_of_mine:Halved"]
    few = ["--set", "train_batch_size=64", "--num-envs", "2", *QUICK]
    assert main(["train", "CartPole-v1", *own, "--steps", "64", "--play", "1", *few]) == 0
    assert "Halved on CartPole-v1: all steps were used" in capsys.readouterr().out
    (run,) = (mine / "runs").iterdir()
    assert run.name.startswith("halved-CartPole-v1-")
    commands = [
        ["evaluate", str(run), "--episodes", "1"],
        ["export", str(run), "--to", "out", "--onnx"],
        ["train", "--resume", str(run), "--steps", "128", "--play", "0"],
    ]
    phrases = ["HalvedPolicy, greedy", "Exported HalvedPolicy", "Halved on CartPole-v1"]
    for command, line in zip(commands, phrases, strict=True):
        assert main(command) == 2
        assert shlex.join(own) in capsys.readouterr().err
        assert main([*command, *own]) == 0
        assert line in capsys.readouterr().out
    assert main(["train", "CartPole-v1", "--algo", "algorithm_of_mine:HalvedPolicy"]) == 2
    assert "'algorithm_of_mine:HalvedPolicy' must be a subclass" in capsys.readouterr().err


def test_callbacks_model_and_settings_are_what_the_user_names(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"train_batch_size": 64, "gamma": 0.5, "vf_clip_param": float("inf"), "seed": 11}
    asked |= {"env": "CartPole-v1", "sgd_minibatch_size": 64, "evaluation_interval": 2}
    asked |= {"evaluation_duration": 2, "num_envs_per_worker": 2}
    (mine / "asked.json").write_text(json.dumps(asked))
    own = ["--callbacks", "code_of_mine:Telling", "--model", "code_of_mine:small_net"]
    more = ["--config", "asked.json", "--set", "gamma=0.9", *QUICK[:-2]]
    assert main(["train", "--steps", "128", *own, *more]) == 0
    shown = capsys.readouterr().out
    assert "told of 2" in shown
    assert "(seed 11)" in shown
    (run,) = (mine / "runs").iterdir()
    again = ["train", "--resume", str(run), "--steps", "192"]
    assert main(again) == 2
    shown = capsys.readouterr().err
    assert "uses code_of_mine:Telling and code_of_mine:small_net, but your code is only" in shown
    words = shlex.split(shown.partition("again: `")[2].partition("`")[0])
    words = words[words.index("train") :]
    assert words == ["train", "--resume", f"runs/{run.name}", *own]
    assert main([*again, *own[:2], "--model", "code_of_mine:by_number"]) == 2
    assert "--model cannot be given with --resume" in capsys.readouterr().err
    assert main([*words, "--steps", "192"]) == 0
    assert "told of 3" in capsys.readouterr().out
    rows = read_progress(run / "progress.csv")
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    (policy,) = Policy.from_checkpoint(run / "checkpoints" / "latest").values()
    assert (policy.config["gamma"], policy.config["vf_clip_param"]) == (0.9, float("inf"))
    assert (4, 3) in [weights.shape for weights in policy.get_weights().values()]
    assert rows[1]["evaluation/episode_reward_mean"] >= 1.0
    assert main(["evaluate", str(run), "--episodes", "1"]) == 0
    assert main(["evaluate", str(run), "--episodes", "1", *own[2:]]) == 0
    assert main(["export", str(run), "--to", "out", "--onnx"]) == 0


def test_many_agents_are_mapped_to_policies_by_a_function_of_the_user(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"policies": ["left", "right"], "policies_to_train": ["left"]}
    asked |= {"env_config": {"num_agents": 2}, "train_batch_size": 64, "sgd_minibatch_size": 32}
    (mine / "asked.json").write_text(json.dumps(asked))
    env, mapping = "two_poles_of_mine:TwoPoles", "code_of_mine:by_number"
    words = ["train", env, "--policy-mapping", mapping, "--config", "asked.json", *QUICK]
    assert main([*words, "--steps", "128", "--play", "1"]) == 2
    assert "need a run with one policy, but this one has ['left', 'right']" in (
        capsys.readouterr().err
    )
    assert not (mine / "runs").exists()
    assert main([*words, "--steps", "128"]) == 0
    (run,) = (mine / "runs").iterdir()
    shown = capsys.readouterr()
    assert "from_checkpoint" not in shown.out + shown.err
    assert f"train {env} --resume runs/{run.name} --policy-mapping {mapping} --steps" in shown.out
    assert main(["evaluate", str(run), "--episodes", "1"]) == 2
    assert f"Give --env {env} --policy-mapping {mapping}.\n" in capsys.readouterr().err
    assert main(["export", str(run), "--to", "out"]) == 2
    shown = capsys.readouterr().err
    assert "holds the policies left, right" in shown
    assert shown.count("`tfpolicies export ") == 2
    command = shlex.split(shown.split("`")[1])
    assert main([*command[1:], "--onnx"]) == 0
    assert (mine / "left" / "onnx" / "model.onnx").exists()
    assert main(["train", env, "--resume", str(run), "--policy-mapping", mapping]) == 0
    again = ["train", env, "--resume", str(run), "--policy-mapping", mapping, "--steps", "192"]
    assert main(again) == 0
    assert read_progress(run / "progress.csv")[-1]["env_steps"] >= 192


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--callbacks", "code_of_mine:Absent"], "--callbacks: 'code_of_mine:Absent' could not be"),
        (["--callbacks", "code_of_mine"], "--callbacks takes module:name of a class or function"),
        (["--model", "code_of_mine:NUMBER"], "--model takes module:name of a class or function"),
        (["--policy-mapping", "nowhere:f"], "--policy-mapping: 'nowhere:f' could not be imported"),
        (["--config", "nowhere.json"], "--config: 'nowhere.json' cannot be read as JSON"),
        (["--config", "code_of_mine.py"], "--config: 'code_of_mine.py' cannot be read as JSON"),
        (["--config", "list.json"], 'must hold an object of settings, such as {"lr": 0.001}'),
        (["--config", "gama.json"], "has no such setting. Did you mean 'gamma' or 'lambda'?\n"),
        (["--config", "env.json"], "env.json': env must be the name of an environment, such as"),
    ],
)
def test_what_the_user_names_is_there_or_nothing_is_begun(
    mine: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (mine / "list.json").write_text("[1]")
    (mine / "gama.json").write_text('{"gama": 0.9}')
    (mine / "env.json").write_text('{"env": [["CartPole-v1"]]}')
    assert main(["train", "CartPole-v1", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (mine / "runs").exists()


# -- evaluate, export, play -------------------------------------------------------------------


EXPLODES = """
import numpy as np
from corridor import Corridor

class Explodes(Corridor):
    steps_of_all = 0

    def step(self, action):
        Explodes.steps_of_all += 1
        obs, reward, *rest = super().step(action)
        return obs, 1e25 if Explodes.steps_of_all > 3000 else reward, *rest
"""


def states_of_training(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns what will have the weights before the first and after each iteration of a run."""
    taken: list[dict[str, Any]] = []
    train = PPO.train

    def noting(algorithm: PPO) -> dict[str, Any]:
        taken.extend([] if taken else [algorithm.get_policy().get_weights()])
        result = train(algorithm)
        taken.append(algorithm.get_policy().get_weights())
        return result

    monkeypatch.setattr(PPO, "train", noting)
    return taken


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_best_checkpoint_has_the_weights_that_earned_the_score(
    here: Path, monkeypatch: pytest.MonkeyPatch, evaluates: bool
) -> None:
    taken = states_of_training(monkeypatch)
    words = ["train", "CartPole-v1", "--steps", "1500", "--run-dir", "runs", *QUICK, "--keep-best"]
    small = ["--set", "train_batch_size=256", "--set", "sgd_minibatch_size=128"]
    more = ["--eval-every", "1", "--eval-episodes", "2"] if evaluates else []
    assert main([*words, *small, *more]) == 0
    (run,) = Path("runs").iterdir()
    name = "evaluation/episode_reward_mean" if evaluates else "episode_reward_mean"
    scores = [row[name] for row in read_progress(run / "progress.csv")]
    best = max(range(len(scores)), key=lambda i: scores[i] if scores[i] == scores[i] else -1.0)
    (policy,) = Policy.from_checkpoint(run / "checkpoints" / "best").values()
    actual, expected = policy.get_weights(), taken[best + evaluates]
    assert all((actual[key] == expected[key]).all() for key in expected)
    other = taken[best + (not evaluates)]
    assert not all((actual[key] == other[key]).all() for key in other)


def test_a_nan_loss_ends_the_command_and_overwrites_no_checkpoint(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "corridor.py").write_text(CORRIDOR)
    (here / "explodes.py").write_text(EXPLODES)
    monkeypatch.syspath_prepend(str(here))
    words = ["train", "explodes:Explodes", "--steps", "20000", "--run-dir", "runs", *QUICK]
    small = ["--set", "train_batch_size=512", "--set", "vf_clip_param=inf"]
    kept = ["--keep-best", "--checkpoint-every", "1"]
    assert main([*words, *small, *kept]) == 4
    (run,) = Path("runs").iterdir()
    shown = " ".join(capsys.readouterr().err.split())
    assert "vf_loss (inf)" in shown
    assert "iteration" in shown
    for name in ("latest", "best"):
        manifest = json.loads((run / "checkpoints" / name / "algorithm.json").read_text())
        assert manifest["finite"] is True
    assert manifest["progress"]["iteration"] <= iterations(run)[-1]


def test_evaluate_takes_a_run_its_parent_its_best_or_a_checkpoint(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained / "checkpoints" / "latest"
    shown = []
    for source in (
        ["--best", str(trained)],
        [str(trained)],
        [str(trained.parent)],
        [str(checkpoint)],
    ):
        assert main(["evaluate", *source, "--episodes", "5"]) == 0
        shown.append(capsys.readouterr().out)
    assert "PPOTF2Policy, greedy" in shown[1]
    assert re.search(r"standard deviation +[\d.]+$", shown[1], re.MULTILINE)
    assert shown[1] == shown[2] == shown[3]


def test_evaluate_plays_elsewhere_if_the_spaces_fit(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(trained), "--episodes", "5", "--env"]
    assert main([*words, "gymnasium.envs.classic_control:CartPoleEnv"]) == 0
    assert "episodes 5 " in " ".join(capsys.readouterr().out.split())
    assert main([*words, "Acrobot-v1"]) == 2
    assert "with another shape. Its weights cannot be used there" in capsys.readouterr().err


REACH = """
from pathlib import Path
import gymnasium as gym
import numpy as np

class Reach(gym.Env):
    def __init__(self, config):
        reach = float(Path("reach").read_text())
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Box(-reach, reach, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == 9, False, {}
"""


@pytest.mark.soak
def test_an_environment_that_has_changed_since_training_is_taken_if_told_so(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "reaching.py").write_text(REACH)
    monkeypatch.syspath_prepend(str(here))
    (here / "reach").write_text("1.0")
    assert main(["train", "reaching:Reach", "--steps", "1024", *QUICK]) == 0
    (here / "reach").write_text("2.0")
    evaluate = ["evaluate", "runs", "--env", "reaching:Reach", "--episodes", "2"]
    resume = ["train", "reaching:Reach", "--resume", "--steps", "2048"]
    for words in (evaluate, resume):
        capsys.readouterr()
        assert main(words) == 2
        shown = capsys.readouterr().err
        assert "action_space Box(-1.0, 1.0, (1,), float32), but the environment has" in shown
        assert "Box(-2.0, 2.0, (1,), float32), with other bounds" in shown
        assert "--allow-other-spaces" in shown
        assert main([*words, "--allow-other-spaces"]) == 0


def test_a_run_is_exported_and_plays_in_a_process_without_the_package(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained), "--to", "exported"]) == 0
    shown = capsys.readouterr().out
    assert "exported/saved_model/1" in shown
    assert "exported/onnx/model.onnx" in shown
    assert main(["play-exported", "exported", "--env", "CartPole-v1", "--episodes", "7"]) == 0
    shown = capsys.readouterr().out
    assert "through ONNX Runtime, without tensorflow and tfpolicies" in shown
    assert "episodes 7 " in " ".join(shown.split())
    file = "exported/onnx/model.onnx"
    assert main(["play-exported", file, "--env", "Acrobot-v1", "--episodes", "7"]) == 2
    assert "on 'Acrobot-v1' failed: ValueError: obs must have the shape" in capsys.readouterr().err


def test_playing_an_export_runs_the_packages_own_player_whoever_wrote_the_folder(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained), "--to", "exported", "--onnx"]) == 0
    folder = here / "exported" / "onnx"
    code = f"open({str(here / 'ran')!r}, 'w').close()\n"
    (folder / "play.py").write_text(code)
    for name in ("numpy", "gymnasium", "onnxruntime", "sitecustomize"):
        (folder / f"{name}.py").write_text(code)
    for place in ("exported", "exported/onnx/model.onnx"):
        assert main(["play-exported", place, "--env", "CartPole-v1", "--episodes", "2"]) == 0
    (folder / "play.py").unlink()
    assert main(["play-exported", "exported", "--env", "CartPole-v1", "--episodes", "2"]) == 0
    assert not (here / "ran").exists()
    assert "without tensorflow and tfpolicies" in capsys.readouterr().out


def test_the_player_runs_out_of_a_zip_file_too(here: Path, trained: Path) -> None:
    assert main(["export", str(trained), "--to", "exported", "--onnx"]) == 0
    with zipfile.ZipFile(here / "package.zip", "w") as packed:
        for path in (PACKAGE_HOME / "tfpolicies").rglob("*.py"):
            packed.write(path, path.relative_to(PACKAGE_HOME))
    code = (
        "import sys; sys.path.insert(0, 'package.zip')\n"
        "from pathlib import Path\n"
        "from tfpolicies.cli import onnx_exports\n"
        "assert '.zip' in onnx_exports.__file__\n"
        "played = onnx_exports.play_in_subprocess(Path('exported'), 'CartPole-v1', 2, 0)\n"
        "print(played['episodes'], played['loaded'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("2 []\n", "")


@pytest.mark.parametrize(
    ("words", "written"),
    [(["--onnx", "15"], ["onnx"]), (["--onnx"], ["onnx"]), (["--saved-model"], ["saved_model"])],
)
def test_one_format_can_be_exported_alone(
    here: Path, trained: Path, words: list[str], written: list[str]
) -> None:
    assert main(["export", str(trained / "checkpoints" / "best"), "--to", "out", *words]) == 0
    assert [path.name for path in (here / "out").iterdir()] == written


def test_the_main_job_ends_with_an_export_that_plays_well_enough(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "CartPole-v1", "--until", "60", "--export", "--play", "8", *QUICK]
    assert main(words) == 0
    (run,) = (here / "runs").iterdir()
    shown = capsys.readouterr().out
    (played,) = (line for line in shown.splitlines() if line.startswith("ONNX played"))
    assert float(played.split()[2].rstrip(",")) >= 60
    assert "without tensorflow and tfpolicies" in " ".join(shown.split())
    relative = run.relative_to(here)
    for file in ("export/onnx/model.onnx", "export/saved_model/1", "learning_curve.png"):
        assert (run / file).exists()
        assert f"{relative / file}" in shown


@pytest.mark.soak
def test_training_goes_on_while_the_exported_policy_falls_short(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without learning, samples of the untrained policy last longer than its greedy actions.
    words = ["train", "CartPole-v1", "--until", "15", "--lr", "0", "--steps", "6144"]
    assert main([*words, "--play", "8", *QUICK]) == 1
    shown = capsys.readouterr().out
    assert "short of 15: training continues." in shown
    assert "PPO on CartPole-v1: all steps were used" in shown
    (run,) = (here / "runs").iterdir()
    assert read_progress(run / "progress.csv")[-1]["env_steps"] == 6144


def test_a_run_is_exported_for_an_engine_and_for_small_devices(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(trained), "--to"]
    assert main([*words, "models/pole", "--layout", "triton", "--onnx", "15"]) == 0
    assert "models/pole/1" in capsys.readouterr().out
    assert sorted(path.name for path in (here / "models" / "pole").iterdir()) == [
        "1",
        "config.pbtxt",
    ]
    assert main([*words, "edge", "--litert", "float16"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "of its actions on 1000 random observations are the policy's" in shown
    assert [path.name for path in (here / "edge").iterdir()] == ["litert"]
    assert main([*words, "out", "--layout", "triton", "--litert"]) == 2
    assert "--litert: not allowed with argument --layout" in capsys.readouterr().err
