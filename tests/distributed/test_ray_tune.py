"""Algorithms as trials of Ray Tune."""

import sys

import numpy as np
import pytest

from helpers.environments import SeededEnv
from helpers.ray_runs import make_ppo
from tfpolicies import PPO, PPOConfig
from tfpolicies.compat.tune import make_trainable
from tfpolicies.distributed.tune import tune_trainable
from tfpolicies.errors import ConfigError

CONFIG = make_ppo(workers=0)
ignore_warnings_of_ray = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray", "ignore::UserWarning:ray"
)


@ignore_warnings_of_ray
def test_trials_report_metrics_and_write_checkpoints(ray_cluster, tmp_path):
    from ray import tune

    tuner = tune.Tuner(
        tune_trainable(CONFIG),
        param_space={"lr": tune.grid_search([0.0, 0.01])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            stop={"training_iteration": 2},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    )
    results = tuner.fit()
    assert not results.errors
    assert [r.metrics["num_env_steps_sampled"] for r in results] == [80, 80]
    assert sorted(r.metrics["config"]["lr"] for r in results) == [0.0, 0.01]
    fresh = CONFIG.build().get_policy().get_weights()
    for result in results:
        loaded = PPO.from_checkpoint(result.checkpoint.path, config={"env": SeededEnv})
        assert loaded.iteration == 2
        assert loaded.config.lr == result.metrics["config"]["lr"]
        weights = loaded.get_policy().get_weights()
        is_unchanged = all(np.array_equal(fresh[key], weights[key]) for key in fresh)
        assert is_unchanged == (loaded.config.lr == 0.0)


@ignore_warnings_of_ray
def test_an_algorithm_is_a_trainable_by_name_or_class_as_ported_scripts_give_it(
    ray_cluster, tmp_path
):
    from tfpolicies.compat import tune

    class Counting(PPO):
        def training_step(self):
            self._counters["calls"] += 1
            return super().training_step()

    run_config = tune.RunConfig(
        storage_path=str(tmp_path), stop={"training_iteration": 1}, verbose=0
    )
    for trainable, calls in (("PPO", None), (Counting, 1)):
        tuner = tune.Tuner(trainable, param_space=CONFIG.to_dict(), run_config=run_config)
        (result,) = tuner.fit()
        assert result.error is None
        assert result.metrics["num_env_steps_sampled"] == 40
        assert result.metrics["counters"].get("calls") == calls


def test_a_trial_that_was_perturbed_learns_with_its_new_numbers(tmp_path):
    """Population-based training gives a trial the checkpoint of another one, and other numbers."""
    trainable = tune_trainable(CONFIG)
    best = trainable({"lr": 0.5, "gamma": 0.75})
    best.step()
    best.save_checkpoint(str(tmp_path))
    perturbed = trainable({"lr": 0.0625, "gamma": 0.5})
    perturbed.load_checkpoint(str(tmp_path))
    stats = perturbed.step()["info"]["learner"]["default_policy"]["learner_stats"]
    policy = perturbed.algorithm.get_policy()
    assert stats["cur_lr"] == 0.0625
    assert policy.get_hyperparameter("gamma") == policy.config["gamma"] == 0.5
    assert perturbed.algorithm.iteration == 2
    for each in (best, perturbed):
        each.cleanup()


def test_search_spaces_of_tune_in_a_config_go_to_tune():
    tune = pytest.importorskip("ray.tune")

    for space in (tune.loguniform(1e-4, 1e-2), tune.choice([1e-3]), tune.grid_search([1e-3])):
        config = CONFIG.copy().training(lr=space, model={"fcnet_hiddens": space})
        with pytest.raises(ConfigError, match=r"lr has the search space.*param_space=config"):
            config.build()
        _, settings = make_trainable("PPO", config)
        assert settings.keys() == {"lr", "model"}
        assert settings["lr"] == settings["model"]["fcnet_hiddens"] == space
        assert settings["model"]["fcnet_activation"] == "tanh"


def test_without_ray_tune_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'ray\[tune\]>=2.50'"):
        tune_trainable(PPO)


def test_a_trial_asks_for_what_its_workers_need():
    pytest.importorskip("ray.tune")
    kind = tune_trainable(PPO)
    request = kind.default_resource_request({"num_rollout_workers": 2, "num_cpus_per_worker": 0.5})
    assert kind.__name__ == "PPO"
    assert request.bundles == [{"CPU": 1.0}, {"CPU": 0.5}, {"CPU": 0.5}]


def test_an_algorithm_may_ask_for_other_resources_itself():
    tune = pytest.importorskip("ray.tune")

    class Greedy(PPO):
        @classmethod
        def default_resource_request(cls, config):
            return tune.PlacementGroupFactory([{"CPU": 1 + config.num_envs_per_worker}])

    for trainable, config, cpus in (
        (PPO, PPOConfig().resources(num_cpus_for_local_worker=2), [2.0]),
        (PPO, {"num_workers": 1, "custom": 3}, [1.0, 1.0]),
        (tune_trainable(Greedy), {"num_envs_per_worker": 4}, [5.0]),
    ):
        request = trainable.default_resource_request(config)
        assert request.bundles == [{"CPU": count} for count in cpus]
