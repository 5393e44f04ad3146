"""The reference of metrics names all columns and statistics of real runs, and no others."""

import re

import pytest

import tfpolicies
from helpers.quick_configs import quick_config
from tfpolicies.reporting.progress_row import make_progress_row
from tools.site.metrics_page import COLUMNS, STATISTICS, make_metrics_page

ON_POLICY, OFF_POLICY = ("PPO", "A2C", "PG"), ("DQN", "SAC", "TD3", "DDPG")


def get_documented_statistics(algorithm):
    names = {
        name.strip()
        for name, (algorithms, *_) in STATISTICS.items()
        if algorithm in algorithms.split(", ")
    }
    return names


@pytest.mark.parametrize("name", [*ON_POLICY, *OFF_POLICY])
def test_the_tables_have_what_a_run_reports(name):
    env = "Pendulum-v1" if name in ("SAC", "TD3", "DDPG") else "CartPole-v1"
    config = quick_config(getattr(tfpolicies, f"{name}Config"), env)
    if name in OFF_POLICY:
        config.training(num_steps_sampled_before_learning_starts=8)
        config.reporting(min_sample_timesteps_per_iteration=40)
    if name == "PPO":
        config.evaluation(evaluation_interval=1, evaluation_duration=1)
        config.reporting(min_sample_timesteps_per_iteration=500)
    algorithm = config.build()
    row = make_progress_row(algorithm.train())
    algorithm.stop()
    prefix = "learner/default_policy/"
    statistics = {x.removeprefix(prefix) for x in row if x.startswith(prefix)}
    assert statistics == get_documented_statistics(name)
    columns = {x.replace("default_policy", "<policy>") for x in row if not x.startswith("learner/")}
    assert columns <= set(COLUMNS)
    if name == "PPO":
        assert {x for x in columns if "<" not in x} == {x for x in COLUMNS if "<" not in x}


@pytest.mark.parametrize("name", ["MARWIL", "BC"])
def test_the_tables_have_what_a_run_on_data_reports(name):
    rows = {
        "obs": [[0.0], [1.0]] * 10,
        "actions": [0, 1] * 10,
        "rewards": [1.0] * 20,
        "terminateds": [False] * 19 + [True],
    }
    config = quick_config(getattr(tfpolicies, f"{name}Config"))
    algorithm = config.offline_data(input_=rows).build()
    result = algorithm.train()
    algorithm.stop()
    stats = result["info"]["learner"]["default_policy"]["learner_stats"]
    assert set(stats) == get_documented_statistics(name)


def test_the_page_has_a_row_for_each_entry():
    [page] = make_metrics_page().values()
    assert len(re.findall(r"^\| `", page, re.MULTILINE)) == len(COLUMNS) + len(STATISTICS)
