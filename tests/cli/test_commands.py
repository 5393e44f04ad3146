import json
import os
import re
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from helpers.processes import start_program
from helpers.workers import make_small_config
from tfpolicies import PPO, PGConfig, Policy, PolicySpec
from tfpolicies.cli import main, run_lookup
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

def make_short():
    return Corridor({"length": 1})
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
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
    code = "import sys; from tfpolicies.cli import main; sys.exit(main())"
    steps = ["--steps", "100000000"]
    process = start_program(code, "train", "CartPole-v1", *words, *QUICK, *steps, cwd=folder)

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
def test_steps_can_be_written_as_people_write_them(text):
    assert parse(["train", "CartPole-v1", "--steps", text]).steps == 100_000


@pytest.mark.core
@pytest.mark.parametrize("text", ["1.5", "many", "inf", "nan", "1e-3"])
def test_steps_that_are_no_whole_number_are_refused(text):
    with pytest.raises(UsageError, match="invalid integer value"):
        parse(["train", "CartPole-v1", "--steps", text])


@pytest.mark.core
def test_help_is_there_without_tensorflow():
    code = (
        "import sys; from tfpolicies.cli import main; main(['--help']); main(['train', '-h']); "
        "sys.exit('tensorflow' in sys.modules or 'gymnasium' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "play-exported" in shown.stdout
    assert "--keep-best" in shown.stdout


@pytest.mark.core
def test_the_name_of_an_algorithm_may_be_written_in_small_letters(succeed, refuse):
    shown = succeed("list tuned --algo Sac")
    assert shown == succeed("list tuned --algo SAC")
    assert "HalfCheetah-v5" in shown
    shown = refuse("train CartPole-v1 --algo sac --lr fast")
    assert "--lr: must be a number, got 'fast'" in shown


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "there is no 'trian'. Did you mean 'train'?"),
        ("train CartPol-v1", "No environment 'CartPol-v1' is registered with Gymnasium. Did"),
        (
            "train CartPole-v1 --algo PP0",
            "--algo: there is no 'PP0'. Did you mean 'PPO'? Choose one of PPO, PG, A2C, DQN, SAC,",
        ),
        ("train CartPole-v1 --eval-evry 3", "'--eval-evry'. Did you mean '--eval-every'"),
        ("train CartPole-v1 --set gama=1", "Did you mean 'gamma'"),
        ("train CartPole-v1 --set fcnet_hidden=[8]", "'model.fcnet_hiddens'"),
        (
            "train CartPole-v1 --set model.fcnet_hidden=8",
            "'post_fcnet_hiddens'? Pass a custom model",
        ),
        ("train CartPole-v1 --set gamma", "takes name=value"),
        ("train CartPole-v1 --set gamma=2", "gamma must be a number in [0, 1], got 2"),
        ("train CartPole-v1 --steps -5", "must be 1 or more, got -5"),
        ("train CartPole-v1 --steps many", "invalid integer value: 'many'"),
        ("train", "train takes an environment"),
        ("train nowhere:Env --steps 9", "'nowhere:Env' could not be imported"),
        ("play-exported . --env CartPole-v1 --env-config 3", "must be a JSON object"),
        ("train CartPole-v1 --set xyzzy=3", "use env_config.xyzzy=..."),
        ("train --resume", "--resume needs a run folder, or a folder of runs, but 'runs' has no"),
        ("train CartPole", "Gymnasium. Did you mean 'CartPole-v1' or 'CartPole-v0'"),
        ("evaluate nowhere", "there is no such folder"),
        ("evaluate nowhere --env Acrobat-v1", "Did you mean 'Acrobot-v1'"),
        ("export nowhere --best --to out", "--best needs a run folder"),
        ("play-exported nowhere --env CartPole-v1", "nowhere) does not exist"),
        (
            "play-exported . --env CartPole-v1",
            "must hold one ONNX export, model.onnx with its policy_spec.json, but has none",
        ),
        ("train CartPole-v1 --lr 1e-4 --set lr=1e-3", "--lr and --set lr=1e-3 both set lr"),
        (
            "train CartPole-v1 --num-envs 2 --set num_envs_per_env_runner=3",
            "both set num_envs_per_worker",
        ),
        ("train CartPole-v1 --set env=Acrobot-v1", "ENV and --set env=Acrobot-v1 both set env"),
    ],
)
def test_mistakes_are_named_in_one_line_with_near_matches_and_leave_nothing(
    here, words, message, refuse
):
    shown = refuse(words)
    assert message in shown
    assert shown.startswith("tfpolicies: error: ")
    assert "Traceback" not in shown
    assert shown.count("\n") <= 2
    assert list(here.iterdir()) == []


def test_debug_shows_the_traceback(here, capsys):
    assert main(["train", "CartPol-v1", "--debug"]) == 2
    *trace, last = capsys.readouterr().err.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert last.startswith("tfpolicies: error: No environment 'CartPol-v1'")


# -- train ------------------------------------------------------------------------------------


def test_a_run_leaves_curve_csv_events_and_checkpoints(trained):
    assert iterations(trained) == [1, 2, 3, 4]
    assert (trained / "learning_curve.png").stat().st_size > 10_000
    assert len(list((trained / "events").iterdir())) == 1
    assert (trained / "checkpoints" / "latest" / "algorithm.json").is_file()
    assert json.loads((trained / "run.json").read_text())["settings"]["finished"] == "steps"


def test_the_best_checkpoint_is_that_of_the_best_evaluation(trained):
    rows = read_progress(trained / "progress.csv")
    scores = {row["iteration"]: row["evaluation/episode_reward_mean"] for row in rows}
    best = max((i for i in scores if scores[i] == scores[i]), key=lambda i: scores[i])
    manifest = json.loads((trained / "checkpoints" / "best" / "algorithm.json").read_text())
    assert manifest["progress"]["iteration"] == best


@pytest.mark.soak
def test_training_ends_when_recent_episodes_reach_the_target(here, capsys):
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


def test_a_target_that_is_not_reached_gives_exit_code_1(here):
    assert main(["train", "CartPole-v1", "--until", "400", "--steps", "256", *QUICK]) == 1


def test_another_backend_of_keras_is_named_in_one_line(here):
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
def test_pg_trains_and_ships_for_an_environment_of_a_module(mine, refuse, succeed):
    env = "corridor:Corridor"
    words = ["train", env, "--algo", "PG", "--steps", "600", "--lr", "0.01", "--num-envs", "2"]
    words += ["--set", "env_config.length=5", "--set", "train_batch_size=100", "--play", "2"]
    assert " over 2 greedy episodes, without tensorflow" in succeed([*words, *QUICK])
    (run,) = (mine / "runs").iterdir()
    assert run.name.startswith("pg-corridor-Corridor-")
    rows = read_progress(run / "progress.csv")
    assert rows[-1]["env_steps"] >= 600
    assert min(row["episode_len_mean"] for row in rows) >= 5
    again = ["evaluate", str(run), "--episodes", "3", "--explore"]
    assert f"Give --env {env}." in refuse(again)
    assert main([*again, "--env", env]) == 0
    shown = refuse(f"train --resume {run} --steps 700")
    assert f"train {env} --resume runs/{run.name}" in shown
    assert "ENV cannot be given with --resume" in refuse(f"train other:Env --resume {run}")
    succeed(f"train {env} --resume {run} --steps 700 --play 0")
    assert read_progress(run / "progress.csv")[-1]["env_steps"] >= 700
    elsewhere = ["--env", env, "--env-config", '{"length": 7}', "--episodes", "2"]
    assert "episodes 2 " in " ".join(succeed(["play-exported", str(run), *elsewhere]).split())


# -- resume -----------------------------------------------------------------------------------


def test_a_finished_run_is_left_alone_until_a_goal_is_raised(here, succeed):
    assert main(["train", "CartPole-v1", "--steps", "512", *QUICK]) == 0
    (run,) = (here / "runs").iterdir()
    assert "is finished: all steps were used" in succeed(["train", "--resume", "--run-dir", "runs"])
    assert iterations(run) == [1, 2]
    shown = succeed(["train", "--resume", str(run), "--steps", "1_024"])
    assert "Training resumes after iteration 2 (512 steps).\n" in shown
    assert iterations(run) == [1, 2, 3, 4]
    assert len(list((run / "events").iterdir())) == 2


def test_what_is_trained_cannot_change_with_a_resume(trained, refuse):
    shown = refuse(f"train --resume {trained} --lr 0.1 --eval-every 9")
    assert "--lr, --eval-every cannot be given with --resume" in shown


@pytest.mark.soak
def test_a_killed_run_goes_on_from_its_last_checkpoint_without_doubles(here):
    process, run = start_training(here, "--checkpoint-every", "8")
    process.kill()
    process.communicate()
    done = iterations(run)
    saved = json.loads((run / "checkpoints" / "latest" / "algorithm.json").read_text())
    kept = saved["progress"]["iteration"]
    assert len(done) - 9 <= kept <= len(done)
    assert main(["train", "--resume", "--steps", str(256 * (kept + 1))]) == 0
    assert iterations(run) == list(range(1, kept + 2))


def test_a_run_killed_before_its_first_checkpoint_restarts(here, trained, refuse):
    from tfpolicies.reporting.run_folder import RunFolder

    settings = RunFolder.open(trained).settings["train"]
    run = RunFolder.create(here, "ppo", {"train": {**settings, "steps": 256}, "finished": None})
    run.release()
    assert main(["train", "--resume", str(run.path)]) == 0
    assert iterations(run.path) == [1]
    hostile = {"callbacks": {"$import": "os:system"}}
    exploration = {"exploration_config": {"type": "a.b.C"}}
    forged = [{"from_file": {"env": "a.b:C"}}, {"from_file": exploration}, {"algo": "a.b:C"}]
    forged += [{"callbacks": "a.b:C"}, {"model": "a.b:f"}, {"policy_mapping": "a:f"}]
    forged += [{"set": ["env=a.b:C"]}, {"set": ["exploration_config.type=a.b.C"]}]
    forged += [{"set": ["evaluation_config.env=a.b:C"]}]
    cases = [(more, "your code is only imported if you name it") for more in forged]
    cases += [
        ({"algo": "tfpolicies.cli.main"}, "algo 'tfpolicies.cli.main'"),
        ({"algo": ["a.b:C"]}, "algo ['a.b:C']"),
        ({"from_file": 3}, "from_file 3"),
        ({"from_file": hostile}, "UnresolvedObject(name='os:system'"),
        ({"model": ["a.b:f"]}, "model ['a.b:f']"),
    ]
    for more, message in cases:
        content = {"train": {**settings, **more}, "finished": None}
        strange = RunFolder.create(here, "strange", content)
        strange.release()
        assert message in refuse(["train", "--resume", str(strange.path)])
    first = read_progress(trained / "progress.csv")[0]
    again = read_progress(run.progress_csv)[0]
    assert again["learner/default_policy/total_loss"] == first["learner/default_policy/total_loss"]


MINE = """
import keras
from tfpolicies import DefaultCallbacks

class Telling(DefaultCallbacks):
    def on_train_result(self, *, algorithm, result):
        print("result of iteration", result["training_iteration"])

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
MODULES = {
    "code_of_mine": MINE,
    "algorithm_of_mine": OWN_ALGORITHM,
    "corridor": CORRIDOR,
    "policies_of_mine": """
import numpy as np
from tfpolicies import PGTF2Policy, Policy

class Still(Policy):
    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        return np.zeros(len(obs_batch), np.int64), [], {}

class Halved(PGTF2Policy):
    def loss(self, model, dist_class, train_batch):
        return 0.5 * super().loss(model, dist_class, train_batch)

def by_number(agent_id, episode, worker=None, **kwargs):
    return ["learns", "still", "halved"][agent_id]
""",
    "two_poles_of_mine": """
from tfpolicies.envs.multi_agent_env import make_multi_agent
TwoPoles = make_multi_agent("CartPole-v1")
""",
    "explodes": """
from corridor import Corridor

class Explodes(Corridor):
    steps_of_all = 0

    def step(self, action):
        Explodes.steps_of_all += 1
        obs, reward, *rest = super().step(action)
        return obs, 1e25 if Explodes.steps_of_all > 3000 else reward, *rest
""",
    "reaching": """
from pathlib import Path
from corridor import Corridor, gym, np

class Reach(Corridor):
    def __init__(self, config):
        super().__init__(config)
        reach = float(Path("reach").read_text())
        self.action_space = gym.spaces.Box(-reach, reach, (1,), np.float32)
""",
}


@pytest.fixture
def mine(here, monkeypatch):
    """A current folder with modules of a user, which have not been imported."""
    for name, code in MODULES.items():
        (here / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    return here


def test_an_algorithm_of_the_users_is_named_in_each_command(mine, capsys, refuse, succeed):
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
        assert shlex.join(own) in refuse(command)
        assert line in succeed([*command, *own])
    shown = refuse("train CartPole-v1 --algo algorithm_of_mine:HalvedPolicy")
    assert "'algorithm_of_mine:HalvedPolicy' must be a subclass" in shown


def test_callbacks_model_and_settings_are_what_the_user_names(mine, capsys, refuse, succeed):
    asked = {"train_batch_size": 64, "gamma": 0.5, "vf_clip_param": float("inf"), "seed": 11}
    asked |= {"env": "CartPole-v1", "sgd_minibatch_size": 64, "evaluation_interval": 2}
    asked |= {"evaluation_duration": 2, "num_envs_per_worker": 2}
    (mine / "asked.json").write_text(json.dumps(asked))
    own = ["--callbacks", "code_of_mine:Telling", "--model", "code_of_mine:small_net"]
    more = ["--config", "asked.json", "--set", "gamma=0.9", *QUICK[:-2]]
    shown = succeed(["train", "--steps", "128", *own, *more])
    assert "result of iteration 2" in shown
    assert "(seed 11)" in shown
    (run,) = (mine / "runs").iterdir()
    again = ["train", "--resume", str(run), "--steps", "192"]
    shown = refuse(again)
    assert "uses code_of_mine:Telling and code_of_mine:small_net, but your code is only" in shown
    words = shlex.split(shown.partition("again: `")[2].partition("`")[0])
    words = words[words.index("train") :]
    assert words == ["train", "--resume", f"runs/{run.name}", *own]
    assert main([*again, *own[:2], "--model", "code_of_mine:by_number"]) == 2
    assert "--model cannot be given with --resume" in capsys.readouterr().err
    assert "result of iteration 3" in succeed([*words, "--steps", "192"])
    rows = read_progress(run / "progress.csv")
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    (policy,) = Policy.from_checkpoint(run / "checkpoints" / "latest").values()
    assert (policy.config["gamma"], policy.config["vf_clip_param"]) == (0.9, float("inf"))
    assert (4, 3) in [weights.shape for weights in policy.get_weights().values()]
    assert rows[1]["evaluation/episode_reward_mean"] >= 1.0
    assert main(["evaluate", str(run), "--episodes", "1"]) == 0
    assert main(["evaluate", str(run), "--episodes", "1", *own[2:]]) == 0
    assert main(["export", str(run), "--to", "out", "--onnx"]) == 0


def test_agents_are_mapped_to_policies_by_a_function_of_the_user(mine, capsys, refuse):
    asked = {"policies": ["left", "right"], "policies_to_train": ["left"]}
    asked |= {"env_config": {"num_agents": 2}, "train_batch_size": 64, "sgd_minibatch_size": 32}
    (mine / "asked.json").write_text(json.dumps(asked))
    env, mapping = "two_poles_of_mine:TwoPoles", "code_of_mine:by_number"
    words = ["train", env, "--policy-mapping", mapping, "--config", "asked.json", *QUICK]
    shown = refuse([*words, "--steps", "128", "--play", "1"])
    assert "need a run with one policy, but this one has ['left', 'right']" in shown
    assert not (mine / "runs").exists()
    assert main([*words, "--steps", "128"]) == 0
    (run,) = (mine / "runs").iterdir()
    shown = capsys.readouterr()
    assert "from_checkpoint" not in shown.out + shown.err
    assert f"train {env} --resume runs/{run.name} --policy-mapping {mapping} --steps" in shown.out
    assert main(["evaluate", str(run), "--episodes", "1"]) == 2
    assert f"Give --env {env} --policy-mapping {mapping}.\n" in capsys.readouterr().err
    shown = refuse(["export", str(run), "--to", "out"])
    assert "holds the policies left, right" in shown
    assert shown.count("`tfpolicies export ") == 2
    command = shlex.split(shown.split("`")[1])
    assert main([*command[1:], "--onnx"]) == 0
    assert (mine / "left" / "onnx" / "model.onnx").exists()
    assert main(["train", env, "--resume", str(run), "--policy-mapping", mapping]) == 0
    again = ["train", env, "--resume", str(run), "--policy-mapping", mapping, "--steps", "192"]
    assert main(again) == 0
    assert read_progress(run / "progress.csv")[-1]["env_steps"] >= 192


def test_runs_are_played_with_the_settings_of_their_environment(mine, refuse, succeed):
    import corridor

    config = make_small_config(corridor.Corridor, PGConfig).environment(env_config={"length": 59})
    config.build().learn(64, run_dir="run", progress=False)
    evaluate = ["evaluate", "run", "--episodes", "2", "--explore"]
    assert "Give --env NAME, for example" in refuse(evaluate)
    assert "must be a JSON object, got 9" in refuse([*evaluate, "--env-config", "9"])

    def get_mean_length(*words: str) -> float:
        shown = succeed([*evaluate, "--env", *words])
        return float(re.search(r"mean length +([\d.]+)", shown)[1])

    assert get_mean_length("corridor:Corridor") == 60
    assert get_mean_length("corridor:Corridor", "--env-config", '{"length": 1}') < 30
    short = "corridor:make_short"
    assert "with env_config={'length': 59}" in refuse([*evaluate, "--env", short])
    assert get_mean_length(short, "--env-config", "{}") < 30


def test_policy_classes_of_the_user_are_named_to_load_a_run(mine, refuse, succeed):
    import policies_of_mine

    still, halved = (PolicySpec(getattr(policies_of_mine, x)) for x in ("Still", "Halved"))
    config = make_small_config("two_poles_of_mine:TwoPoles", PGConfig)
    config.environment(env_config={"num_agents": 3})
    config.multi_agent(
        policies={"learns": PolicySpec(), "still": still, "halved": halved},
        policy_mapping_fn=policies_of_mine.by_number,
        policies_to_train=["learns", "halved"],
    )
    config.build().learn(64, run_dir="run", progress=False)

    env, mapping = "two_poles_of_mine:TwoPoles", "policies_of_mine:by_number"
    named = ["--policy-mapping", mapping, "--env", env]
    evaluate = ["evaluate", "run", "--episodes", "2", *named]
    own = ["--policy-class", "policies_of_mine:Still", "--policy-class", "policies_of_mine:Halved"]
    assert f"Give {' '.join(own)}.\n" in refuse(evaluate)
    assert "Give --policy-class policies_of_mine:Halved.\n" in refuse([*evaluate, *own[:2]])
    assert "could not be imported" in refuse([*evaluate, "--policy-class", "policies_of_mine:Stil"])
    assert re.search(r"mean of still +[\d.]+", succeed([*evaluate, *own]))

    export = ["export", "run", "--policy", "halved", "--to", "out", "--onnx"]
    assert "Give --policy-class policies_of_mine:Halved.\n" in refuse(export)
    succeed([*export, *own[2:]])
    assert (mine / "out" / "onnx" / "model.onnx").exists()
    for name in (env, "pettingzoo:classic/rps_v2"):
        shown = refuse(f"play-exported out --env {name}")
        assert f"plays environments with one agent, but {name} has several" in shown


def test_several_policies_are_named_before_tensorflow_is_loaded(mine, monkeypatch, refuse):
    folder = mine / "saved"
    config = make_small_config("two_poles_of_mine:TwoPoles", PGConfig)
    config.environment(env_config={"num_agents": 2}).multi_agent(policies={"left", "right"})
    config.multi_agent(policy_mapping_fn=lambda agent_id, *args, **kwargs: "left")
    config.build().save(folder)
    monkeypatch.setattr(run_lookup, "load_tensorflow", Mock(side_effect=AssertionError))
    assert "holds the policies left, right" in refuse(f"export {folder} --to out")


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
def test_what_the_user_names_is_there_or_nothing_is_begun(mine, words, message, refuse):
    (mine / "list.json").write_text("[1]")
    (mine / "gama.json").write_text('{"gama": 0.9}')
    (mine / "env.json").write_text('{"env": [["CartPole-v1"]]}')
    assert message in refuse(["train", "CartPole-v1", *words])
    assert not (mine / "runs").exists()


# -- evaluate, export, play -------------------------------------------------------------------


def record_weights(monkeypatch):
    """Returns what will have the weights before the first and after each iteration of a run."""
    recorded, train = [], PPO.train

    def train_and_record(algorithm):
        recorded.extend([] if recorded else [algorithm.get_policy().get_weights()])
        result = train(algorithm)
        recorded.append(algorithm.get_policy().get_weights())
        return result

    monkeypatch.setattr(PPO, "train", train_and_record)
    return recorded


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_best_checkpoint_has_the_weights_that_earned_the_score(
    here, monkeypatch, evaluates, succeed
):
    recorded = record_weights(monkeypatch)
    words = ["train", "CartPole-v1", "--steps", "1500", "--run-dir", "runs", *QUICK, "--keep-best"]
    small = ["--set", "train_batch_size=256", "--set", "sgd_minibatch_size=128"]
    more = ["--eval-every", "1", "--eval-episodes", "2"] if evaluates else []
    shown = succeed([*words, *small, *more])
    (run,) = Path("runs").iterdir()
    name = "evaluation/episode_reward_mean" if evaluates else "episode_reward_mean"
    scores = [row[name] for row in read_progress(run / "progress.csv")]
    best = max(range(len(scores)), key=lambda i: scores[i] if scores[i] == scores[i] else -1.0)
    score = re.search(r"^best checkpoint .*/best  mean return ([\d.]+)$", shown, re.MULTILINE)[1]
    if evaluates:
        assert float(score) == pytest.approx(scores[best], abs=0.01)
    (policy,) = Policy.from_checkpoint(run / "checkpoints" / "best").values()
    actual, expected = policy.get_weights(), recorded[best + evaluates]
    assert all((actual[key] == expected[key]).all() for key in expected)
    other = recorded[best + (not evaluates)]
    assert not all((actual[key] == other[key]).all() for key in other)


def test_a_nan_loss_ends_the_command_and_overwrites_no_checkpoint(mine, capsys):
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


def test_evaluate_takes_a_run_its_parent_its_best_or_a_checkpoint(trained, succeed):
    checkpoint = trained / "checkpoints" / "latest"
    shown = []
    for source in (["--best", str(trained)], [str(trained)], [trained.parent], [checkpoint]):
        shown.append(succeed(["evaluate", *map(str, source), "--episodes", "5"]))
    assert "PPOTF2Policy, greedy" in shown[1]
    assert re.search(r"standard deviation +[\d.]+$", shown[1], re.MULTILINE)
    assert shown[1] == shown[2] == shown[3]


def test_evaluate_plays_elsewhere_if_the_spaces_fit(trained, refuse, succeed):
    words = ["evaluate", str(trained), "--episodes", "5", "--env"]
    shown = succeed([*words, "gymnasium.envs.classic_control:CartPoleEnv"])
    assert "episodes 5 " in " ".join(shown.split())
    assert "with another shape. Its weights cannot be used there" in refuse([*words, "Acrobot-v1"])


@pytest.mark.soak
def test_an_environment_that_has_changed_since_training_may_be_accepted(mine, refuse):
    (mine / "reach").write_text("1.0")
    assert main(["train", "reaching:Reach", "--steps", "1024", *QUICK]) == 0
    (mine / "reach").write_text("2.0")
    evaluate = ["evaluate", "runs", "--env", "reaching:Reach", "--episodes", "2"]
    resume = ["train", "reaching:Reach", "--resume", "--steps", "2048"]
    for words in (evaluate, resume):
        shown = refuse(words)
        assert "action_space Box(-1.0, 1.0, (1,), float32), but the environment has" in shown
        assert "Box(-2.0, 2.0, (1,), float32), with other bounds" in shown
        assert "--allow-other-spaces" in shown
        assert main([*words, "--allow-other-spaces"]) == 0


def test_a_run_is_exported_and_plays_without_the_package(here, trained, succeed, refuse):
    shown = succeed(["export", str(trained), "--to", "exported"])
    assert "exported/saved_model/1" in shown
    assert "exported/onnx/model.onnx" in shown
    shown = succeed(["play-exported", "exported", "--env", "CartPole-v1", "--episodes", "7"])
    assert "through ONNX Runtime, without tensorflow and tfpolicies" in shown
    assert "episodes 7 " in " ".join(shown.split())
    shown = refuse("play-exported exported/onnx/model.onnx --env Acrobot-v1 --episodes 7")
    assert "on 'Acrobot-v1' failed: ValueError: obs must have the shape" in shown


def test_playing_an_export_runs_no_code_of_its_folder(here, trained, succeed):
    assert main(["export", str(trained), "--to", "exported", "--onnx"]) == 0
    folder = here / "exported" / "onnx"
    code = f"open({str(here / 'ran')!r}, 'w').close()\n"
    (folder / "play.py").write_text(code)
    for name in ("numpy", "gymnasium", "onnxruntime", "sitecustomize"):
        (folder / f"{name}.py").write_text(code)
    for place in ("exported", "exported/onnx/model.onnx"):
        succeed(f"play-exported {place} --env CartPole-v1 --episodes 2")
    (folder / "play.py").unlink()
    shown = succeed("play-exported exported --env CartPole-v1 --episodes 2")
    assert "without tensorflow and tfpolicies" in shown
    assert not (here / "ran").exists()


def test_the_player_runs_out_of_a_zip_file_too(here, trained):
    assert main(["export", str(trained), "--to", "exported", "--onnx"]) == 0
    with zipfile.ZipFile(here / "package.zip", "w") as packed:
        for path in (PACKAGE_HOME / "tfpolicies").rglob("*.py"):
            packed.write(path, path.relative_to(PACKAGE_HOME))
    code = (
        "import sys; sys.path.insert(0, 'package.zip')\n"
        "from pathlib import Path\n"
        "from tfpolicies.cli import export_playback as export_playback\n"
        "assert '.zip' in export_playback.__file__\n"
        "played = export_playback.play_in_subprocess(Path('exported'), 'CartPole-v1', 2, 0)\n"
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
def test_one_format_can_be_exported_alone(here, trained, words, written):
    assert main(["export", str(trained / "checkpoints" / "best"), "--to", "out", *words]) == 0
    assert [path.name for path in (here / "out").iterdir()] == written


def test_the_main_job_ends_with_an_export_that_plays_well_enough(here, succeed):
    words = ["train", "CartPole-v1", "--until", "60", "--export", "--play", "8", *QUICK]
    shown = succeed(words)
    (run,) = (here / "runs").iterdir()
    (played,) = (line for line in shown.splitlines() if line.startswith("ONNX played"))
    assert float(played.split()[2].rstrip(",")) >= 60
    assert "without tensorflow and tfpolicies" in " ".join(shown.split())
    relative = run.relative_to(here)
    for file in ("export/onnx/model.onnx", "export/saved_model/1", "learning_curve.png"):
        assert (run / file).exists()
        assert f"{relative / file}" in shown


@pytest.mark.soak
def test_training_goes_on_while_the_exported_policy_falls_short(here, capsys):
    # Without learning, samples of the untrained policy last longer than its greedy actions.
    words = ["train", "CartPole-v1", "--until", "15", "--lr", "0", "--steps", "6144"]
    assert main([*words, "--play", "8", *QUICK]) == 1
    shown = capsys.readouterr().out
    assert "short of 15: training continues." in shown
    assert "PPO on CartPole-v1: all steps were used" in shown
    (run,) = (here / "runs").iterdir()
    assert read_progress(run / "progress.csv")[-1]["env_steps"] == 6144


def test_a_run_is_exported_for_an_engine_and_for_small_devices(here, trained, succeed, refuse):
    words = ["export", str(trained), "--to"]
    assert "models/pole/1" in succeed([*words, "models/pole", "--layout", "triton", "--onnx", "15"])
    assert {path.name for path in (here / "models" / "pole").iterdir()} == {"1", "config.pbtxt"}
    shown = " ".join(succeed([*words, "edge", "--litert", "float16"]).split())
    assert "of its actions on 1000 random observations are the policy's" in shown
    assert [path.name for path in (here / "edge").iterdir()] == ["litert"]
    shown = refuse([*words, "out", "--layout", "triton", "--litert"])
    assert "--litert: not allowed with argument --layout" in shown
