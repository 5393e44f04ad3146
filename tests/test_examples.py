import importlib
import inspect
from pathlib import Path

import pytest
from PIL import Image

from tfpolicies.envs import check_env

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def load(monkeypatch):
    """Imports an example as a script beside it would."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.mark.soak
def test_a_users_own_model_learns_a_users_own_environment_and_is_exported(tmp_path, load):
    example = load("train_your_own")
    assert len(inspect.getsource(example.train_and_export).splitlines()) <= 15
    mean_return = example.train_and_export(str(tmp_path), iterations=10)
    assert mean_return > 0.3  # of at most 1.0 - 0.45; a random walk pays about -1.8
    assert (tmp_path / "onnx" / "model.onnx").is_file()
    assert (tmp_path / "saved_model" / "1" / "saved_model.pb").is_file()
    assert (tmp_path / "learning_curve.png").is_file()


@pytest.mark.core
def test_the_main_job_in_python_plays_its_own_export_to_the_target(tmp_path, load):
    example = load("cartpole_main_job")
    assert example.main(tmp_path, target=60.0, max_steps=30_000, episodes=5) >= 60.0
    assert (tmp_path / "checkpoint" / "algorithm.json").is_file()


@pytest.mark.soak
def test_soft_actor_critic_trains_on_the_pendulum_and_plays_greedily(load, capsys):
    small = {"fcnet_hiddens": [16]}
    networks = {"q_model_config": small, "policy_model_config": small}
    mean_return = load("pendulum_sac").train(1000, episodes=2, **networks)
    assert -2000 < mean_return < 0
    assert "1,000 steps" in capsys.readouterr().out


@pytest.mark.soak
def test_the_worst_of_a_population_become_copies_of_the_best(tmp_path, load, capsys):
    example = load("population")
    returns = example.main(str(tmp_path), size=4, rounds=4, exchange=2)
    assert len(returns) == 4
    assert max(returns) > 20.0  # a random policy's
    printed = capsys.readouterr().out
    assert sum(line.endswith(" 2") for line in printed.splitlines()) == 1  # a quarter, once
    assert "times one alone" in printed
    assert (tmp_path / "population.png").stat().st_size > 10_000


@pytest.mark.core
def test_cars_and_lights_are_sampled_by_three_policies(load, capsys):
    example = load("traffic")
    batch = example.main()
    assert set(batch.policy_batches) == {"car_policy1", "car_policy2", "traffic_light_policy"}
    assert batch.env_steps() == 8 * 50
    assert batch.agent_steps() == 8 * 50 * 29
    assert "400 steps of the town, 11600 of cars and lights" in capsys.readouterr().out
    check_env(example.MultiAgentTrafficGrid(num_cars=10), steps=50)


@pytest.mark.soak
def test_the_town_is_trained_and_drawn(tmp_path, load):
    load("traffic_video").main(tmp_path, steps=1600, video_steps=3)
    with Image.open(tmp_path / "traffic.gif") as picture:
        assert picture.n_frames > 3
