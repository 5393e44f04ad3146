"""`tfpolicies train --seeds`: several seeds, each in a process of its own."""

import io
import json
import os
import shlex
import signal
import sys

import pytest
from rich.console import Console

from helpers.processes import is_running, run_python, start_program, wait_until
from helpers.recorded_runs import write_run
from tfpolicies.cli import main
from tfpolicies.cli.arguments import parse
from tfpolicies.cli.train_options import TrainSettings
from tfpolicies.cli.training_seeds import make_words, trains_seeds
from tfpolicies.errors import CheckpointError
from tfpolicies.reporting.progress_csv import read_last_row, read_progress
from tfpolicies.reporting.run_folder import find_runs
from tfpolicies.reporting.seed_folder import SeedFolder
from tfpolicies.reporting.seed_progress import SeedProgress

WORLD = """
import os, sys, time
import gymnasium as gym
import numpy as np

class World(gym.Env):
    '''Episodes of 5 steps; the seeds in `FAILING` raise in step 45, and each step takes `PAUSE`.'''

    observation_space = gym.spaces.Box(0.0, 5.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    _skip_env_checking = True
    steps = 0

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        World.steps += 1
        seed = sys.argv[sys.argv.index("--seed") + 1] if "--seed" in sys.argv else ""
        if World.steps == 45 and seed and seed in os.environ.get("FAILING", "").split(","):
            raise ZeroDivisionError("the wheel came off")
        time.sleep(float(os.environ.get("PAUSE", 0)))
        self.now += 1
        return np.array([self.now], np.float32), float(action), self.now == 5, False, {}
"""
ENV = "world_of_seeds:World"
SETTINGS = ["train_batch_size=20", "rollout_fragment_length=5", "model.fcnet_hiddens=[4]"]
SETTINGS += ["jit_compile=False", "inference=tf"]
TRAIN = ["train", ENV, "--algo", "PG", "--num-envs", "1"]
TRAIN += [word for setting in SETTINGS for word in ("--set", setting)]
MAIN = "import sys; from tfpolicies.cli import main; sys.exit(main())"


@pytest.fixture
def here(here, monkeypatch):
    """A current folder with the module of `ENV`."""
    (here / "world_of_seeds.py").write_text(WORLD)
    monkeypatch.delitem(sys.modules, "world_of_seeds", raising=False)
    return here


def get_folder(here):
    [path] = (here / "runs").glob("*/seeds.json")
    folder = SeedFolder.find(path.parent)
    assert folder is not None
    return folder


def write_seeds(parent, seeds=(0, 1)):
    """Writes a folder of seeds with hand-made runs."""
    settings = TrainSettings(env="CartPole-v1").as_json()
    folder = SeedFolder.create(parent, "ppo-CartPole-v1", seeds, settings)
    for seed in seeds:
        write_run(folder.get_run(seed).path, [1.0, 2.0], seed=seed)
    return folder


# -- in one process -------------------------------------------------------------------------------


def test_the_command_of_a_seed_has_the_same_options():
    words = ["train", "CartPole-v1", "--algo", "DQN", "--lr", "0.001", "--num-envs", "3"]
    words += ["--set", "gamma=0.9", "--set", "model.fcnet_hiddens=[4]", "--until", "1e2"]
    words += ["--keep-best", "--export", "--config", "my.json", "--run-folder", "x/seed-1"]
    words += ["--logger", "mlflow", "--logger", "mine:Logger"]
    data = ["train", "--data", "a.json", "b.json", "--columns", '{"obs": ["x"]}']
    for command in (words, data):
        options = get_options(command)
        assert get_options(make_words(options)) == options


def get_options(words):
    options = vars(parse(words))
    return {name: x for name, x in options.items() if name not in ("command", "debug", "run")}


def test_options_that_contradict_several_seeds_are_refused(here, refuse):
    assert "both set the seed" in refuse("train CartPole-v1 --seeds 2 --seed 1")
    assert "--parallel needs --seeds" in refuse("train CartPole-v1 --parallel 2")
    assert "no_such_module" in refuse("train no_such_module:World --seeds 2")
    folder = write_seeds(here / "runs")
    assert "--seeds cannot be given with --resume" in refuse("train --resume runs --seeds 2")
    assert "--lr cannot be given with --resume" in refuse(
        ["train", "--resume", str(folder.path), "--lr", "1"]
    )
    assert not (here / "comparison").exists()


def test_a_folder_of_seeds_is_found_by_its_path_and_by_its_newest_run(here):
    folder = write_seeds(here / "runs")
    assert SeedFolder.find(folder.path) == folder
    assert SeedFolder.find(here / "runs") is None
    names = [run.path.name for run in find_runs(here / "runs")]
    assert sorted(names) == ["seed-0", "seed-1"]
    checkpoint = folder.get_run(1).latest
    assert not trains_seeds({"resume": "runs"})  # no run has a checkpoint
    checkpoint.mkdir(parents=True)
    (checkpoint / "algorithm.json").write_text("{}")
    assert trains_seeds({"resume": "runs"})
    assert trains_seeds({"resume": None})
    assert trains_seeds({"resume": str(folder.path)})
    assert not trains_seeds({"resume": str(folder.get_run(1).path)})


@pytest.mark.parametrize("change", [{"seeds": [1, 1]}, {"seeds": "12"}, {"format_version": 2}, {}])
def test_a_damaged_folder_of_seeds_is_refused(tmp_path, change):
    file = write_seeds(tmp_path).path / "seeds.json"
    content = json.loads(file.read_text()) | change
    file.write_text(json.dumps(content) if change else "{")
    with pytest.raises(CheckpointError, match="Resume each seed by itself"):
        SeedFolder.find(file.parent)


def test_the_process_that_starts_the_seeds_needs_no_tensorflow(here):
    folder = write_seeds(here / "runs")
    code = (
        "import sys; from tfpolicies.cli import main; "
        f"main(['train', '--resume', {str(folder.path)!r}]); "
        "assert not {'tensorflow', 'keras', 'scipy'} & {*sys.modules}"
    )
    assert "all seeds are finished" in run_python(code).stdout


def test_finished_seeds_are_not_trained_again(here, succeed):
    write_seeds(here / "runs")
    [folder] = (here / "runs").iterdir()
    output = succeed(f"train --resume {folder}")
    assert "all seeds are finished" in output
    assert "--steps ..." in output


def test_progress_is_a_line_for_each_seed_with_news():
    text, now = io.StringIO(), [0.0]
    console = Console(file=text, width=100, force_terminal=False)
    row = {"env_steps": 40, "steps_per_s": 20.0, "recent_returns/mean": 1.5}
    with SeedProgress([3, 7], 9.0, console, clock=lambda: now[0]) as progress:
        progress.update(3, {}, 100)
        progress.update(7, row, 100)  # within 10 seconds of the first line
        assert text.getvalue() == "seed 3 | starting\n"
        now[0] = 11.0
        progress.update(3, row, None)
        progress.finish(7, "target reached")
    assert text.getvalue().splitlines()[1:] == [
        "seed 7 | 40/100 | 20/s | return 1.5 of 9 | at most 0:03 left",
        "seed 3 | 40 | 20/s | return 1.5 of 9",
        "seed 7 | target reached",
    ]


def test_a_terminal_has_a_bar_for_each_seed():
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=True, force_interactive=True)
    with SeedProgress([3, 7], None, console) as progress:
        progress.update(3, {"env_steps": 50, "steps_per_s": 10.0}, 100)
        progress.finish(7, "failed")
    shown = text.getvalue()
    assert "seed 3" in shown
    assert "50/100" in shown
    assert "failed" in shown


def test_the_last_row_is_read_without_the_others(tmp_path):
    run = write_run(tmp_path / "run", [float(i) for i in range(9000)])
    assert run.progress_csv.stat().st_size > 1 << 18
    assert read_last_row(run.progress_csv) == read_progress(run.progress_csv)[-1]
    with run.progress_csv.open("a") as file:
        file.write("9001,900")  # by a killed process
    assert read_last_row(run.progress_csv)["iteration"] == 9000
    short = write_run(tmp_path / "short", [])
    assert read_last_row(short.progress_csv) == {}
    assert read_last_row(tmp_path / "missing") == {}


# -- in processes ---------------------------------------------------------------------------------


@pytest.mark.release
def test_seeds_train_as_alone_and_one_that_fails_does_not_end_the_others(here, capsys, monkeypatch):
    monkeypatch.setenv("FAILING", "4")
    status = main([*TRAIN, "--steps", "80", "--seeds", "3,4", "--parallel", "2"])
    printed = capsys.readouterr()
    assert status == 3
    assert "Seed 4 failed (exit status 3): tfpolicies: error: ZeroDivisionError" in printed.err
    assert "seed 3 | all steps were used" in printed.out
    folder = get_folder(here)
    assert f"runs/{folder.path.name}/seed-4.log" in printed.err
    assert f"runs/{folder.path.name}/comparison/index.html" in printed.out
    page = (folder.comparison / "index.html").read_text()
    assert "the wheel came off" in page

    assert main([*TRAIN, "--steps", "80", "--seed", "3", "--run-dir", "alone"]) == 0
    [alone] = find_runs(here / "alone")
    seed = folder.get_run(3)
    assert get_numbers(seed) == get_numbers(alone)
    assert get_weights(seed) == get_weights(alone)

    monkeypatch.setenv("FAILING", "")  # the command that was printed goes on
    command = shlex.split(printed.err.splitlines()[-1])
    assert main(command[command.index("train") :]) == 0
    assert [row["iteration"] for row in read_progress(folder.get_run(4).progress_csv)] == [
        *range(1, 5)
    ]
    assert not folder.get_run(4).error_txt.exists()


def get_numbers(run):
    names = ("env_steps", "episode_reward_mean", "learner/default_policy/policy_loss")
    return [[row[name] for name in names] for row in read_progress(run.progress_csv)]


def get_weights(run):
    """The name of the file of weights has the hash of its content."""
    return [path.name for path in run.latest.rglob("weights-*")]


@pytest.mark.release
def test_a_command_that_is_wrong_leaves_no_folder(here, capsys):
    assert main([*TRAIN, "--seeds", "2", "--set", "gama=0.9"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("gama") == 1
    assert "Did you mean" in errors
    assert [*(here / "runs").iterdir()] == []


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_saves_all_seeds_and_they_can_be_resumed(here, number, monkeypatch, succeed):
    monkeypatch.setenv("PAUSE", "0.01")
    words = [*TRAIN, "--steps", "100000", "--checkpoint-every", "100000", "--seeds", "2"]
    process = start_program(MAIN, *words, "--parallel", "2")
    try:

        def both_train():
            files = [*(here / "runs").glob("*/seed-*/progress.csv")]
            return len(files) == 2 and all(map(read_last_row, files))

        assert wait_until(both_train, 120)
        folder = get_folder(here)
        pids = [int((folder.get_run(seed).path / "lock").read_text()) for seed in (0, 1)]
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert wait_until(lambda: not any(map(is_running, pids)), 30)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert "2 of 2 seeds are saved" in errors
    done = {}
    for seed in (0, 1):
        run = folder.get_run(seed)
        assert run.has_checkpoint
        done[seed] = len(read_progress(run.progress_csv))
    monkeypatch.setenv("PAUSE", "0")
    steps = 20 * (max(done.values()) + 1)
    output = succeed(["train", ENV, "--resume", "runs", "--steps", f"{steps}", "--parallel", "2"])
    assert "comparison/index.html" in output
    for seed in (0, 1):
        iterations = [row["iteration"] for row in read_progress(folder.get_run(seed).progress_csv)]
        assert iterations == [*range(1, max(done.values()) + 2)]
    assert os.path.exists(folder.get_log(0))
