"""Algorithms as trials of Ray Tune."""

import sys

import numpy as np
import pytest

from helpers.environments import SeededEnv
from tfpolicies import PPO, PPOConfig
from tfpolicies.compat.tune import make_trainable
from tfpolicies.distributed.tune import tune_trainable
from tfpolicies.errors import ConfigError

CONFIG = (
    PPOConfig()
    .environment(SeededEnv)
    .framework("tf2", inference="tf", jit_compile=False)
    .training(
        model={"fcnet_hiddens": [4]}, train_batch_size=40, sgd_minibatch_size=40, num_sgd_iter=1
    )
    .rollouts(rollout_fragment_length=40)
    .debugging(seed=1)
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.filterwarnings("ignore::FutureWarning:ray")
@pytest.mark.filterwarnings("ignore::UserWarning:ray")
def test_trials_report_metrics_and_their_checkpoints_are_ours(ray_cluster, tmp_path):
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
        again = PPO.from_checkpoint(result.checkpoint.path, config={"env": SeededEnv})
        assert again.iteration == 2
        assert again.config.lr == result.metrics["config"]["lr"]
        learned = again.get_policy().get_weights()
        same = all(np.array_equal(fresh[key], learned[key]) for key in fresh)
        assert same == (again.config.lr == 0.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.filterwarnings("ignore::FutureWarning:ray")
@pytest.mark.filterwarnings("ignore::UserWarning:ray")
def test_an_algorithm_is_a_trainable_by_name_or_class_as_ported_scripts_give_it(
    ray_cluster, tmp_path
):
    from tfpolicies.compat import tune

    class Counting(PPO):
        def training_step(self):
            self._counters["mine"] += 1
            return super().training_step()

    run_config = tune.RunConfig(
        storage_path=str(tmp_path), stop={"training_iteration": 1}, verbose=0
    )
    for trainable, mine in (("PPO", None), (Counting, 1)):
        tuner = tune.Tuner(trainable, param_space=CONFIG.to_dict(), run_config=run_config)
        (result,) = tuner.fit()
        assert result.error is None
        assert result.metrics["num_env_steps_sampled"] == 40
        assert result.metrics["counters"].get("mine") == mine


def test_a_trial_that_was_perturbed_learns_with_its_new_numbers(tmp_path):
    """Population-based training gives a trial another one's checkpoint and numbers of its own."""
    trainable = tune_trainable(CONFIG)
    best = trainable({"lr": 0.5, "gamma": 0.75})
    best.step()
    best.save_checkpoint(str(tmp_path))
    perturbed = trainable({"lr": 0.0625, "gamma": 0.5})
    perturbed.load_checkpoint(str(tmp_path))
    stats = perturbed.step()["info"]["learner"]["default_policy"]["learner_stats"]
    policy = perturbed.algorithm.get_policy()
    assert (stats["cur_lr"], policy.get_hyperparameter("gamma"), policy.config["gamma"]) == (
        0.0625,
        0.5,
        0.5,
    )
    assert perturbed.algorithm.iteration == 2
    for each in (best, perturbed):
        each.cleanup()


def test_search_spaces_of_tune_in_a_config_go_to_tune():
    tune = pytest.importorskip("ray.tune")

    for space in (tune.loguniform(1e-4, 1e-2), tune.choice([1e-3]), tune.grid_search([1e-3])):
        config = CONFIG.copy().training(lr=space, model={"fcnet_hiddens": space})
        with pytest.raises(ConfigError, match=r"lr has the search space.*param_space=config"):
            config.build()
        _, left = make_trainable("PPO", config)
        assert left.keys() == {"lr", "model"}
        assert left["lr"] == left["model"]["fcnet_hiddens"] == space
        assert left["model"]["fcnet_activation"] == "tanh"


def test_without_ray_tune_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'ray\[tune\]>=2.50'"):
        tune_trainable(PPO)


def test_a_trial_asks_for_what_its_workers_need():
    pytest.importorskip("ray.tune")
    kind = tune_trainable(PPO)
    asked = kind.default_resource_request({"num_rollout_workers": 2, "num_cpus_per_worker": 0.5})
    assert kind.__name__ == "PPO"
    assert asked.bundles == [{"CPU": 1.0}, {"CPU": 0.5}, {"CPU": 0.5}]


def test_an_algorithm_may_ask_for_other_resources_itself():
    tune = pytest.importorskip("ray.tune")

    class Greedy(PPO):
        @classmethod
        def default_resource_request(cls, config):
            return tune.PlacementGroupFactory([{"CPU": 1 + config.num_envs_per_worker}])

    asked = PPO.default_resource_request(PPOConfig().resources(num_cpus_for_local_worker=2))
    assert asked.bundles == [{"CPU": 2.0}]
    asked = PPO.default_resource_request({"num_workers": 1, "of_my_own": 3})
    assert asked.bundles == [{"CPU": 1.0}, {"CPU": 1.0}]
    assert tune_trainable(Greedy).default_resource_request({"num_envs_per_worker": 4}).bundles == [
        {"CPU": 5.0}
    ]
