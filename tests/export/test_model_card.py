"""Model cards: the facts that are known of a policy, next to each export."""

import json
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from tfpolicies import PGConfig, PGTF2Policy
from tfpolicies.export.model_card import (
    CARD_FILE,
    ModelCard,
    ReturnFigure,
    add_evaluation,
    export_facts,
    format_card,
    get_export_facts,
    make_card_entry,
)
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.export.spec_file import SPEC_FILE, read_spec

pytestmark = pytest.mark.usefixtures("kept_programs")

VECTOR, CHOICE = spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2)


def make_policy(**settings):
    config = {"model": {"fcnet_hiddens": [4]}, "inference": "tf", "jit_compile": False, "seed": 7}
    return PGTF2Policy(VECTOR, CHOICE, {**config, **settings})


def read_card(folder):
    spec, text = read_spec(Path(folder) / SPEC_FILE), (Path(folder) / CARD_FILE).read_text()
    assert format_card(spec) == text
    return spec["card"], text


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    make_policy(lr=0.5).export_model(folder, onnx=True)
    return folder


@pytest.mark.core
def test_a_policy_says_what_it_knows_and_nothing_else(exported):
    card, text = read_card(exported)
    commit = card.pop("commit", None)
    assert len(card.pop("exported")) == len("2025-01-31")
    assert card == {
        "policy_id": "default_policy",
        "algorithm": "PG",
        "seed": 7,
        "gradient_updates": 0,
        "settings": {"lr": 0.5, "model": {"fcnet_hiddens": [4]}},
    }
    assert text.startswith("# PG\n")
    assert ("Commit" in text) == (commit is not None)
    for unknown in ("Environment", "Mean return", "None", "nan"):
        assert unknown not in text
    assert "- Actions: `Discrete(2)`" in text
    assert "| input | `obs` | float32 | [batch, 3] |" in text
    assert "No evaluation of these weights is recorded." in text


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({}, "1"),
        ({"litert": True}, "."),
        ({"layout": "triton"}, "1"),
        ({"layout": "mlserver"}, "."),
    ],
    ids=["saved_model", "litert", "triton", "mlserver"],
)
def test_every_format_has_a_card_next_to_its_spec(tmp_path, options, place):
    make_policy().export_model(tmp_path / "policy", **options)
    card, _ = read_card(tmp_path / "policy" / place)
    assert card["algorithm"] == "PG"


def test_the_same_policy_gives_the_same_spec_and_card(tmp_path):
    policy = make_policy()
    specs = []
    for name in ("one", "two"):
        policy.export_model(tmp_path / name, litert=True)
        specs.append(read_spec(tmp_path / name / SPEC_FILE))
        del specs[-1]["card"]["exported"]
    assert specs[0] == specs[1]


def test_facts_of_the_caller_come_before_those_of_the_policy(tmp_path):
    facts = ModelCard(algorithm="mine:Algo", env_steps=1200, seed=None)
    with export_facts(facts):
        make_policy().export_model(tmp_path, onnx=True)
    assert get_export_facts() == ModelCard()
    card, text = read_card(tmp_path)
    assert (card["algorithm"], card["env_steps"], card["seed"]) == ("mine:Algo", 1200, 7)
    assert "| Environment steps | 1,200 |" in text


def test_an_algorithm_adds_its_steps_and_returns(tmp_path):
    config = PGConfig().environment("CartPole-v1").debugging(seed=3, log_level="ERROR")
    config.framework("tf2", inference="tf", jit_compile=False)
    config.evaluation(evaluation_interval=1, evaluation_duration=2)
    config.evaluation(evaluation_config={"explore": False})
    algorithm = config.training(model={"fcnet_hiddens": [4]}).build()
    result = algorithm.train()
    algorithm.export_policy_model(tmp_path, onnx=True)
    algorithm.stop()
    card, text = read_card(tmp_path)
    assert (card["environment"], card["seed"]) == ("CartPole-v1", 3)
    assert card["env_steps"] == result["num_env_steps_sampled"]
    assert card["training"]["mean_return"] == result["recent_returns"]["mean"]
    evaluation = result["evaluation"]["episode_reward_mean"]
    assert card["evaluation"] == {"mean_return": evaluation, "episodes": 2, "explores": False}
    assert "over 2 episodes; actions are greedy" in text
    assert "one training in CartPole-v1, with seed 3" in text
    assert "gymnasium" in card["versions"]


def test_an_evaluation_is_added_to_an_existing_export(tmp_path, exported):
    for name in (SPEC_FILE, CARD_FILE):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    before = read_spec(tmp_path / SPEC_FILE)
    add_evaluation(tmp_path, ReturnFigure(mean_return=12.5, episodes=1, explores=False))
    card, text = read_card(tmp_path)
    assert card["evaluation"] == {"mean_return": 12.5, "episodes": 1, "explores": False}
    assert "12.5 over 1 episode; actions are greedy" in text
    assert {**read_spec(tmp_path / SPEC_FILE), "card": 0} == {**before, "card": 0}


def test_players_take_specs_with_and_without_a_card(tmp_path, exported):
    observation = np.zeros(3, np.float32)
    expected = OnnxPolicy(exported).act(observation)
    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    spec = read_spec(tmp_path / SPEC_FILE)
    del spec["card"]
    (tmp_path / SPEC_FILE).write_text(json.dumps(spec))
    (tmp_path / CARD_FILE).unlink()
    assert OnnxPolicy(tmp_path).act(observation) == expected


def test_paths_variables_and_logs_of_the_machine_are_left_out():
    settings = {
        "input_": "/home/me/logs.parquet",
        "extra_python_environs_for_worker": {"TOKEN": "secret"},
        "env_config": {"map": "/home/me/maps/a.txt", "size": 3},
        "grad_clip": {"$float": "inf"},
    }
    card = make_card_entry(ModelCard(settings=settings))
    assert card["settings"] == {"env_config": {"map": "a.txt", "size": 3}, "grad_clip": "inf"}
