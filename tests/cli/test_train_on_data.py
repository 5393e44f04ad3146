"""`tfpolicies train --data`: options, progress, evaluations, resuming, and the way of the guide."""

import json
import re
import shlex
import signal
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from helpers.processes import start_program
from tfpolicies import Policy
from tfpolicies.cli import main
from tfpolicies.cli.space_text import parse_space
from tfpolicies.errors import ConfigError
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.offline.parquet_writer import write_table
from tfpolicies.reporting.progress_csv import read_progress
from tfpolicies.reporting.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("kept_programs")

GUIDE = Path(__file__).parents[2] / "docs" / "tutorials" / "data.md"
QUICK = ["--set", "jit_compile=False", "--set", "inference=tf", "--seed", "7"]
SMALL = ["--set", "train_batch_size=64", "--set", "model.fcnet_hiddens=[8]"]


def write_log(path, rows=1000, seed=0):
    """A log in which the pole is pushed to where it falls, which balances CartPole a while."""
    rng = np.random.default_rng(seed)
    obs = rng.uniform(-0.2, 0.2, (rows, 4)).astype(np.float32)
    actions = (obs[:, 2] + 0.3 * obs[:, 3] > 0).astype(np.int64)
    ends = np.arange(rows) % 50 == 49
    columns = {"obs": obs, "actions": actions, "rewards": np.ones(rows, np.float32)}
    columns |= {"terminateds": ends, "eps_id": np.arange(rows) // 50, "t": np.arange(rows) % 50}
    write_table(path, columns, None)
    return str(path)


@pytest.fixture
def log(here):
    return write_log(here / "log.parquet")


def get_run(folder):
    (run,) = (folder / "runs").iterdir()
    return run


def get_settings(run):
    return RunFolder.open(run).settings["train"]


def get_weights(run):
    policy = Policy.from_checkpoint(run / "checkpoints" / "latest")
    policy = policy["default_policy"] if isinstance(policy, dict) else policy
    return policy.get_weights()


# -- options --------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "train --data nowhere.parquet",
            "--data: There is no file of recorded experience at 'nowh",
        ),
        ("train --data log.parquet CartPole-v1", "An environment is written before --data"),
        ("train --until 3 --data log.parquet", "--until needs an environment to play in"),
        ("train --play 3 --data log.parquet", "--play needs an environment to play in"),
        ("train --keep-best --data log.parquet", "--keep-best needs an environment to play in"),
        ("train CartPole-v1 --num-envs 3 --data log.parquet", "--num-envs is for sampling"),
        ("train CartPole-v1 --epochs 3", "--epochs needs --data PATH"),
        ("train CartPole-v1 --trusted-data", "--trusted-data needs --data PATH"),
        ("train --epochs 3 --steps 3 --data log.parquet", "Leave one of them out"),
        ("train", "train takes an environment, or recorded experience"),
        ("train --data log.parquet --columns nowhere.json", "the path of a file with one"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, message, log, here, refuse):
    assert message in refuse(words)
    assert not (here / "runs").exists()


def test_data_that_an_algorithm_cannot_learn_from_are_refused(log, here, refuse):
    shown = refuse(["train", "--algo", "PPO", "--data", log, *QUICK])
    assert "The loss of PPOTF2Policy reads 'action_dist_inputs'" in shown
    shown = refuse(["train", "Pendulum-v1", "--data", log, *QUICK])
    assert "obs must have the shape (3,) in each row" in shown
    assert not (here / "runs").exists()


@pytest.mark.core
def test_spaces_are_parsed_from_texts():
    assert parse_space("a", "MultiDiscrete([2, 3])").nvec.tolist() == [2, 3]
    assert parse_space("a", "Box(low=-inf, high=1, shape=(2,))").high.tolist() == [1.0, 1.0]
    for text in ("Discrete", "Dict(a=Discrete(2))", "Discrete(__import__('os'))", "Box(1, 0)", "("):
        with pytest.raises(ConfigError, match="takes one of Box, Discrete"):
            parse_space("--action-space", text)


# -- training -------------------------------------------------------------------------------------


def test_a_run_without_an_environment_trains_and_is_exported(log, here, succeed, refuse):
    shown = succeed(["train", "--data", log, "--epochs", "2", *QUICK, *SMALL])
    assert "Data: 1,000 rows of log.parquet, 2 epochs. Observations Box((4,), float32)" in shown
    assert re.search(r"2,048/2,000 rows \| .*epoch 2.0 of 2.0 \| loss 0\.\d+", shown)
    assert "BC on log.parquet: all rows were read" in shown
    assert "episode" not in shown
    assert "nan" not in shown
    run = get_run(here)
    assert run.name.startswith("bc-log-")
    settings = get_settings(run)
    assert (settings["env"], settings["data"]) == (None, [str(here / "log.parquet")])
    assert (settings["steps"], settings["data_rows"]) == (2000, 1000)
    assert (run / "learning_curve.png").stat().st_size > 10_000
    assert "Give --env NAME" in refuse(["evaluate", str(run)])
    assert "episodes 2 " in " ".join(
        succeed(["evaluate", str(run), "--env", "CartPole-v1", "--episodes", "2"]).split()
    )
    succeed(["export", str(run), "--to", "exported", "--onnx"])
    policy = OnnxPolicy("exported/onnx")
    actions = Policy.from_checkpoint(run / "checkpoints" / "latest")["default_policy"]
    obs = np.float32([[0.1, 0, 0.1, 0.1], [0, 0, -0.1, -0.1]])
    expected = actions.compute_actions(obs, explore=False).actions
    np.testing.assert_array_equal(policy.act(obs), expected)


@pytest.mark.serve
def test_a_run_without_an_environment_is_served(log, here, succeed):
    from helpers.serving import Server

    succeed(["train", "--data", log, "--epochs", "1", *QUICK, *SMALL])
    content = {"name": "obs", "shape": [1, 4], "datatype": "FP32", "data": [0, 0, 0.1, 0.1]}
    with Server(f"pole={get_run(here)}", folder=here) as server:
        request = urllib.request.Request(
            f"http://{server.http}/v2/models/pole/infer",
            json.dumps({"inputs": [content]}).encode(),
        )
        with urllib.request.urlopen(request) as response:
            outputs = {x["name"]: x["data"] for x in json.load(response)["outputs"]}
    assert outputs["actions"] in ([0], [1])


@pytest.mark.soak
def test_an_environment_evaluates_what_is_learned_from_data(log, here, succeed):
    words = ["train", "CartPole-v1", "--data", log, "--steps", "2560", *QUICK, *SMALL]
    shown = succeed([*words, "--eval-episodes", "4", "--keep-best"])
    assert "CartPole-v1 is played every 4 iterations" in shown
    assert "| evaluation " in shown
    assert "over 4 episodes" in shown
    run = get_run(here)
    rows = read_progress(run / "progress.csv")
    evaluated = [
        row["iteration"] for row in rows if row.get("evaluation/episode_reward_mean", 0) > 0
    ]
    assert evaluated == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
    assert rows[-1]["env_steps"] == 2560
    assert (run / "checkpoints" / "best").exists()


@pytest.mark.soak
def test_a_target_is_reached_by_an_evaluation(log, here, succeed):
    words = ["train", "CartPole-v1", "--data", log, *QUICK, *SMALL, "--eval-every", "1"]
    assert "the target was reached" in succeed([*words, "--until", "5"])
    assert main([*words, "--until", "501", "--steps", "128"]) == 1


@pytest.mark.soak
@pytest.mark.parametrize("algo", ["MARWIL", "DQN"])
def test_other_algorithms_learn_from_data(algo, log, here, succeed):
    words = ["train", "--algo", algo, "--data", log, "--steps", "2000", *QUICK]
    shown = succeed([*words, "--set", "model.fcnet_hiddens=[8]"])
    assert f"{algo} on log.parquet: all rows were read" in shown


@pytest.mark.soak
def test_several_files_and_patterns_are_read(here, succeed):
    for i in range(2):
        write_log(here / f"part-{i}.parquet", rows=100, seed=i)
    shown = succeed(["train", "--data", "part-*.parquet", "--epochs", "1", *QUICK, *SMALL])
    assert "Data: 200 rows of part-*.parquet, 1 epoch." in shown
    (here / "columns.json").write_text('{"obs": ["a", "b"], "actions": "c"}')
    import pandas as pd

    table = {"a": np.arange(8.0), "b": np.ones(8), "c": np.tile([1, 2], 4)}
    pd.DataFrame(table).to_parquet("table.parquet")
    words = ["train", "--data", "table.parquet", "--columns", "columns.json", "--trusted-data"]
    stated = ["--set", "action_space=Discrete(2, start=1)"]
    shown = succeed([*words, *stated, "--steps", "64", *QUICK, *SMALL])
    assert "actions Discrete(2, start=1)" in shown


# -- resuming -------------------------------------------------------------------------------------


@pytest.mark.soak
def test_moved_data_are_named_again(log, here, refuse, succeed):
    succeed(["train", "--data", "log.parquet", "--epochs", "1", *QUICK, *SMALL])
    run = get_run(here)
    assert "is finished: all rows were read" in succeed(["train", "--resume", str(run)])
    (here / "log.parquet").rename(here / "moved.parquet")
    words = ["train", "--resume", str(run), "--epochs", "2"]
    shown = refuse(words)
    assert f"recorded experience at '{here}/log.parquet'" in shown
    assert "If they were moved, name them again:" in shown
    succeed([*words, "--data", "moved.parquet"])
    assert get_settings(run)["data"] == [str(here / "moved.parquet")]
    assert read_progress(run / "progress.csv")[-1]["env_steps"] == 2048
    assert "--until needs an environment" in refuse([*words, "--until", "3"])


@pytest.mark.soak
@pytest.mark.parametrize("algo", ["BC", "MARWIL", "DQN"])
def test_a_killed_run_resumes_to_the_bit(algo, log, here, succeed):
    code = "import sys; from tfpolicies.cli import main; sys.exit(main())"
    words = ["train", "--algo", algo, "--data", log, "--checkpoint-every", "7", *QUICK]
    words += ["--set", "model.fcnet_hiddens=[8]"]
    words += ["--set", "store_buffer_in_checkpoints=True"] if algo == "DQN" else SMALL
    process = start_program(code, *words, "--steps", "100000000", cwd=here)
    try:
        while len([*here.glob("runs/*/progress.csv")]) == 0:
            assert process.poll() is None, process.communicate()[1]
        (csv,) = here.glob("runs/*/progress.csv")
        while len(read_progress(csv)) < 20:
            assert process.poll() is None, process.communicate()[1]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    killed = get_run(here)
    saved = json.loads((killed / "checkpoints" / "latest" / "algorithm.json").read_text())
    iteration = saved["progress"]["iteration"]
    steps = int(read_progress(csv)[0]["env_steps"]) * (iteration + 13)
    succeed(["train", "--resume", str(killed), "--steps", str(steps)])
    succeed([*words, "--steps", str(steps), "--run-dir", "whole"])
    (whole,) = (here / "whole").iterdir()
    expected = get_weights(whole)
    for name, array in get_weights(killed).items():
        np.testing.assert_array_equal(array, expected[name])


# -- the guide ------------------------------------------------------------------------------------


def read_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.core
def test_the_guide_is_short_and_its_options_exist():
    from tfpolicies.cli.arguments import _make_parsers

    assert len(GUIDE.read_text().splitlines()) <= 160
    options = {option for command in _make_parsers()[1].values() for option in command.options()}
    used = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", GUIDE.read_text()))
    assert used - options == set()


@pytest.mark.soak
def test_the_way_of_the_guide_from_a_table_to_a_served_policy(here, succeed):
    """Runs the page's Python and commands in order, apart from those that serve."""
    first, second = read_blocks("python")
    names = {}
    exec(compile(first, str(GUIDE), "exec"), names)
    commands = [line for block in read_blocks("sh") for line in block.splitlines()]
    shown = {}
    for line in commands:
        words = shlex.split(line, comments=True) if line.startswith("tfpolicies") else []
        if words and words[1] != "serve":
            shown[" ".join(words[1:3])] = succeed(words[1:])
    assert "5,760 rows in 1 file" in shown["data show"]
    assert "-214.7" in shown["data show"]
    assert Path("logs.png").exists()
    policy = OnnxPolicy("exported/onnx")
    assert policy.act(np.float32([18.5, 0.9])) == 2
    exec(compile(second, str(GUIDE), "exec"), names)
    assert names["action"] == 2
    assert {"expert.parquet", "random.json", "logs.png"} <= {path.name for path in here.iterdir()}
