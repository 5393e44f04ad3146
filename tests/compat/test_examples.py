"""Ported example scripts of RLlib's users."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

PORTING = Path(__file__).parents[2] / "examples" / "porting"
SCRIPTS = sorted(path.stem for path in PORTING.glob("*.py"))
ALLOWED = {"tfpolicies", "gymnasium", "numpy", "tensorflow", "keras", *sys.stdlib_module_names}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(PORTING)
    return importlib.import_module


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_ported_script_imports_nothing_else(script):
    tree = ast.parse((PORTING / f"{script}.py").read_text())
    results = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            results |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            results.add(node.module.split(".")[0])
    assert results <= ALLOWED | {path.stem for path in PORTING.parent.glob("*.py")}


def test_a_custom_tf_model_learns_and_is_exported(tmp_path, load):
    total = load("custom_tf_model").main(stop_iters=8, folder=str(tmp_path))
    assert total == pytest.approx(0.3)  # 1 - 7 * 0.1: straight to the end
    assert (tmp_path / "model.onnx").is_file()


@pytest.mark.soak
def test_self_play_adds_frozen_copies_to_the_league(load):
    module = load("self_play")
    results = []

    class Records(module.SelfPlayCallback):
        def on_train_result(self, *, algorithm, result, **kwargs):
            super().on_train_result(algorithm=algorithm, result=result, **kwargs)
            results.append((set(algorithm.worker.policy_map), set(result["info"]["learner"])))

    module.SelfPlayCallback = Records
    summary = module.main(iterations=6, win_rate_threshold=0.55)
    assert summary["league_size"] >= 3
    policies, trained = results[-1]
    assert {"main", "random", "main_v1"} <= policies
    assert trained == {"main"}


def test_a_custom_policy_learns_its_way(load):
    assert load("hand_written_policy").main(iterations=50) == 1.0


def test_rollout_workers_give_the_batches_of_one_and_of_three_policies(load):
    cart_pole, traffic = load("rollout_workers").main()
    columns = {"obs", "actions", "rewards", "terminateds", "truncateds", "new_obs"}
    assert columns <= set(cart_pole)
    assert cart_pole["obs"].shape == cart_pole["new_obs"].shape == (cart_pole.count, 4)
    cars, lights = {"car_policy1", "car_policy2"}, {"traffic_light_policy"}
    assert set(traffic.policy_batches) == cars | lights
    assert all(columns <= set(rows) for rows in traffic.policy_batches.values())
    assert sum(traffic[name].count for name in cars) == 25 * traffic.env_steps()
    assert traffic["traffic_light_policy"].count == 4 * traffic.env_steps()


@pytest.mark.soak
@pytest.mark.parametrize("framework", ["tf2", "tf"])
def test_players_with_a_centralized_critic_learn_to_give_way(load, framework):
    assert load("centralized_critic").main(stop_iters=8, framework=framework) > 7.0
