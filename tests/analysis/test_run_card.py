"""The model card of a run: figures of the exported checkpoint, as the run folder has them."""

import csv

import pytest

from helpers.quick_configs import quick_config
from tfpolicies.analysis.run_card import make_run_card
from tfpolicies.analysis.run_record import read_run
from tfpolicies.cli import main
from tfpolicies.export.model_card import CARD_FILE, ReturnFigure
from tfpolicies.export.spec_file import SPEC_FILE, read_spec
from tfpolicies.reporting.progress_row import FIXED_COLUMNS
from tfpolicies.reporting.run_folder import RunFolder

ROWS = [
    {"iteration": 1, "env_steps": 100, "recent": 1.5, "recent_episodes": 4, "evaluation": ""},
    {"iteration": 2, "env_steps": 200, "recent": 2.5, "recent_episodes": 5, "evaluation": 9.0},
    {"iteration": 3, "env_steps": 300, "recent": 3.5, "recent_episodes": 6, "evaluation": ""},
]
COLUMNS = {
    "recent": "recent_returns/mean",
    "recent_episodes": "recent_returns/episodes",
    "evaluation": "evaluation/episode_reward_mean",
}


@pytest.fixture
def run(tmp_path):
    """A run of three iterations, the second of which was evaluated."""
    folder = RunFolder.create_at(tmp_path / "run", {"learn": "PPO"})
    facts = {"algorithm": "PPO", "env": "CartPole-v1", "seed": 5, "config": {"gamma": 0.9}}
    folder.describe({**facts, "commit": "a" * 40}, {"tfpolicies": "1"}, {})
    folder.release()
    with folder.progress_csv.open("w", newline="") as file:
        rows = [{COLUMNS.get(name, name): x for name, x in row.items()} for row in ROWS]
        writer = csv.DictWriter(file, [*FIXED_COLUMNS, *COLUMNS.values()], restval=0)
        writer.writeheader()
        writer.writerows(rows)
    return read_run(folder.path)


def test_the_figures_are_those_of_the_iteration(run):
    card = make_run_card(run, 2)
    assert (card.algorithm, card.environment, card.seed) == ("PPO", "CartPole-v1", 5)
    assert (card.env_steps, card.commit, card.versions) == (200, "a" * 40, {"tfpolicies": "1"})
    assert card.training == ReturnFigure(mean_return=2.5, episodes=5)
    assert card.evaluation == ReturnFigure(mean_return=9.0, explores=False)
    assert card.settings == {"gamma": 0.9}


def test_an_evaluation_of_earlier_weights_is_left_out(run):
    last = make_run_card(run)
    assert (last.env_steps, last.evaluation) == (300, None)
    assert last.training == ReturnFigure(mean_return=3.5, episodes=6)
    assert make_run_card(run, 0).training is None


def test_the_command_export_writes_the_facts_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = quick_config(env="CartPole-v1", gamma=0.9).debugging(seed=7)
    algorithm = config.build()
    algorithm.learn(2 * config.train_batch_size, run_dir="run", progress=False)
    algorithm.stop()
    assert main(["export", "run", "--to", "exported", "--onnx"]) == 0
    card = read_spec(tmp_path / "exported" / "onnx" / SPEC_FILE)["card"]
    assert (card["algorithm"], card["environment"], card["seed"]) == ("PPO", "CartPole-v1", 7)
    assert card["env_steps"] == 2 * config.train_batch_size
    assert card["settings"]["gamma"] == 0.9
    assert "commit" not in card  # the folder is not in a repository
    text = (tmp_path / "exported" / "onnx" / CARD_FILE).read_text()
    assert text.startswith("# PPO on CartPole-v1\n")
    assert str(tmp_path) not in text
