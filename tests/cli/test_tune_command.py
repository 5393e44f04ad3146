"""The command `tune`."""

import json
import signal
import sys
from pathlib import Path

import pytest

from helpers.processes import is_running, run_python, start_program, wait_until
from tfpolicies.cli import main
from tfpolicies.tuning.search_folder import SearchFolder

optuna = pytest.importorskip("optuna")

PAYING = """
import gymnasium as gym
import numpy as np

class Paying(gym.Env):
    observation_space = gym.spaces.Box(0.0, 10.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config):
        self.reward = config.get("reward", 1.0)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        done = self.steps == 4
        return np.array([self.steps], np.float32), self.reward * done, done, False, {}
"""
SPACE = {"env_config.reward": {"choice": [2.0, 3.0, 5.0]}, "num_sgd_iter": 1}
QUICK = ["--set", "jit_compile=False", "--set", "inference=tf", "--set", "train_batch_size=16"]
QUICK += ["--set", "sgd_minibatch_size=16", "--seed", "7", "--eval-episodes", "2", "--steps", "64"]
SEARCH = ["tune", "paying:Paying", "--space", "space.json", "--to", "search", *QUICK]


@pytest.fixture
def paying(here):
    """A current folder with an environment and a space."""
    (here / "paying.py").write_text(PAYING)
    (here / "space.json").write_text(json.dumps(SPACE))
    yield here
    sys.modules.pop("paying", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tune", "tune takes an environment"),
        ("tune CartPole-v2", "CartPole-v2"),
        ("tune CartPole-v1 --trials 0", "1 or more"),
        ("tune CartPole-v1 --space missing.json", "--space: 'missing.json' cannot be read as JSON"),
        ("tune CartPole-v1 --lr 1e-3 --set lr=1e-4", "both set lr"),
        ("tune CartPole-v1 --steps 9 --epochs 3", "does not take '--epochs'"),
        ("tune --resume", "there is no search in 'runs'"),
        ("tune --resume missing", "missing is not the folder of a search"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_made(here, refuse, words, message):
    assert message in refuse(words)
    assert list(here.iterdir()) == []


def test_wrong_words_are_refused_without_tensorflow():
    code = (
        "import sys; from tfpolicies.cli import main; main(['tune']); "
        "main(['tune', 'CartPole-v1', '--space', 'missing.json']); "
        "print('tensorflow' in sys.modules)"
    )
    assert run_python(code).stdout.endswith("False\n")


def test_without_optuna_the_command_says_how_to_install_it(refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install 'tfpolicies[tune]'" in refuse("tune CartPole-v1")


def test_the_space_of_an_algorithm_can_be_edited(here, succeed, refuse):
    space = json.loads(succeed("tune --algo dqn --show-space"))
    assert space["lr"] == {"log_uniform": [1e-05, 0.01]}
    assert space["dueling"] is False
    space["gama"] = {"choice": [0.9, 0.99]}
    Path("space.json").write_text(json.dumps(space))
    assert "Did you mean 'gamma'" in refuse("tune CartPole-v1 --algo DQN --space space.json")


def test_a_search_gives_settings_that_train_takes(paying, succeed, refuse):
    output = succeed([*SEARCH, "--trials", "3"])
    lines = output.splitlines()
    assert "Searching 1 setting:" in lines
    assert "  env_config.reward  one of 2.0, 3.0, 5.0" in lines
    assert sum(line.startswith("trial ") for line in lines) == 3
    assert "3 trials complete, 0 pruned, 0 failed." in lines
    best = json.loads(Path("search/best.json").read_text())
    command = lines[-1].partition("tfpolicies ")[2]
    assert command == "train paying:Paying --algo PPO --config search/best.json --steps 64"
    trained = succeed(f"{command} --seed 1")
    reward = best["env_config"]["reward"]
    assert f"mean return  {reward:.2f} " in trained

    folder = SearchFolder("search")
    assert folder.read()["command"]["env"] == "paying:Paying"
    assert "holds a search already. Resume it: `tfpolicies tune --resume search`" in refuse(SEARCH)
    missing = refuse("tune --resume search")
    assert "tfpolicies tune paying:Paying --resume search`" in missing
    fixed = refuse("tune paying:Paying --resume search --lr 0.1")
    assert "--lr cannot be given with --resume" in fixed
    goal = ["--trials", "4", "--until", "9"]
    assert main(["tune", "paying:Paying", "--resume", "search", *goal]) == 1  # target missed


@pytest.mark.release
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_a_search_that_is_interrupted_or_killed_is_resumed(paying, succeed, number, status):
    code = "import sys; from tfpolicies.cli import main; sys.exit(main())"
    process = start_program(code, *SEARCH, "--trials", "30", cwd=paying)
    folder = SearchFolder(paying / "search")

    def has_finished_trials():
        return folder.trials_csv.exists() and len(folder.trials_csv.read_text().splitlines()) > 3

    assert wait_until(has_finished_trials, 200)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(number)
    _, message = process.communicate(timeout=30)
    assert process.returncode == status
    assert wait_until(lambda: not any(is_running(int(pid)) for pid in children))
    if number != signal.SIGKILL:
        assert "Trials that were running will run again.\nResume with:\n" in message
        assert "tune paying:Paying --resume search" in message
    before = folder.trials_csv.read_text().splitlines()
    count = str(len(before) + 1)
    output = succeed(["tune", "paying:Paying", "--resume", "search", "--trials", count])
    assert f"{len(before) - 1} are finished" in output
    after = folder.trials_csv.read_text().splitlines()
    assert len(after) == len(before) + 2
    assert set(before) <= set(after)
