"""Algorithms and workers in ported code: checkpoints, states, runs without environment."""

import os
import pickle

import numpy as np
import pytest
from gymnasium import spaces

import tfpolicies.compat
from helpers.environments import CountingEnv
from helpers.factories import OBS, TWO, assert_equal, batch_for
from helpers.quick_configs import counting, quick_config
from tfpolicies import PPO, Algorithm, DQNConfig, PPOConfig, PPOTF2Policy, RolloutWorker
from tfpolicies.errors import CheckpointError, ConfigError, UsageError, WeightsError

pytestmark = pytest.mark.usefixtures("kept_programs")


SPACES = {"observation_space": OBS, "action_space": TWO}


class CountsLoads(tfpolicies.DefaultCallbacks):
    loaded = 0

    def on_checkpoint_loaded(self, *, algorithm, **kwargs):
        self.loaded += 1


def test_save_checkpoint_and_load_checkpoint_are_save_and_restore(tmp_path):
    algorithm = quick_config(env=counting).callbacks(CountsLoads).build()
    algorithm.train()
    before = algorithm.get_weights()["default_policy"]
    assert algorithm.save_checkpoint(tmp_path / "saved") is None
    algorithm.train()
    algorithm.load_checkpoint(checkpoint_dir=tmp_path / "saved")
    assert algorithm.callbacks.loaded == 1
    assert_equal(algorithm.get_weights()["default_policy"], before)


def test_the_path_of_a_checkpoint_holds_objects_that_no_file_can_hold(tmp_path):
    algorithm = quick_config(env=lambda context: CountingEnv(3)).callbacks(CountsLoads).build()
    path = algorithm.save(tmp_path / "saved").checkpoint.path
    twin = PPO.from_checkpoint(path, config={"lr": 0.5})
    assert twin.config.env is algorithm.config.env
    assert twin.config.lr == 0.5
    assert twin.callbacks.loaded == 1  # it is a `CountsLoads`
    for plain in (str(tmp_path / "saved"), pickle.loads(pickle.dumps(path)), path[:]):
        with pytest.raises(CheckpointError, match=r"config\['env'\].*config\['callbacks'\]"):
            PPO.from_checkpoint(plain)


def test_a_step_is_an_iteration_and_counts():
    algorithm = quick_config(env=counting).build()
    assert set(algorithm._counters.values()) == {0}
    assert algorithm.step()["training_iteration"] == 1
    assert set(algorithm._counters.values()) == {16}
    assert algorithm.get_config() is algorithm.config


def test_an_algorithm_has_a_folder_and_that_of_the_run_while_there_is_one(tmp_path):
    algorithm = quick_config(env=counting).build()
    folder = algorithm.logdir
    assert os.path.isdir(folder)
    assert algorithm.logdir == folder
    algorithm.stop()
    os.rmdir(folder)
    algorithm = quick_config(env=counting).build()
    algorithm.learn(16, run_dir=tmp_path / "run", progress=False)
    assert algorithm.logdir == str(tmp_path / "run")


def test_an_algorithm_is_built_from_the_state_of_another_one():
    algorithm = quick_config(env=counting).build()
    algorithm.train()
    state = algorithm.__getstate__()
    twin = Algorithm.from_state(state)
    assert type(twin) is PPO
    assert twin.iteration == 1
    assert twin.counters == algorithm.counters
    assert_equal(twin.get_weights()["default_policy"], algorithm.get_weights()["default_policy"])
    assert twin.train()["training_iteration"] == 2
    with pytest.raises(UsageError, match=r"must have 'algorithm_class' and 'config'.*\['worker'\]"):
        PPO.from_state({"worker": state["worker"]})
    with pytest.raises(WeightsError):
        PPO.from_state({**state, "worker": {}})


@pytest.mark.parametrize("config_class", [PPOConfig, DQNConfig])
def test_spaces_are_enough_to_act_learn_and_come_back(config_class, tmp_path):
    algorithm = quick_config(config_class, **SPACES).build()
    policy = algorithm.get_policy()
    assert (policy.observation_space, policy.action_space) == (OBS, TWO)
    assert TWO.contains(algorithm.compute_single_action(np.zeros(3, np.float32)))
    policy.learn_on_batch(batch_for(policy, 8))
    assert policy.num_grad_updates == 1
    with pytest.raises(UsageError, match="has no environment"):
        algorithm.train()
    twin = Algorithm.from_checkpoint(algorithm.save(tmp_path / "saved"))
    assert_equal(twin.get_weights()["default_policy"], algorithm.get_weights()["default_policy"])


def with_two_policies(**settings):
    actions = {"a": TWO, "b": spaces.Discrete(3)}
    specs = {pid: tfpolicies.PolicySpec(None, OBS, space) for pid, space in actions.items()}
    config = quick_config().multi_agent(policies=specs, **settings)
    return config.multi_agent(policy_mapping_fn=lambda *values, **more: "a").build()


def test_several_policies_with_separate_spaces_need_no_environment():
    assert with_two_policies().get_policy("b").action_space == spaces.Discrete(3)


def test_evaluation_may_have_the_only_environment():
    config = quick_config().environment(observation_space=CountingEnv.observation_space)
    config.environment(action_space=CountingEnv.action_space)
    config.evaluation(evaluation_duration=2, evaluation_config={"env": counting})
    assert config.build().evaluate()["evaluation"]["episodes_this_iter"] == 2


@pytest.mark.core
@pytest.mark.parametrize("values", [{}, {"observation_space": OBS}])
def test_without_environment_and_spaces_nothing_is_built(values):
    with pytest.raises(ConfigError, match=r"needs an environment.*observation_space=\.\.\."):
        quick_config(**values).build()


def make_worker(index=0, **settings):
    config = quick_config(env=counting, **settings)
    return RolloutWorker(config=config, default_policy_class=PPOTF2Policy, worker_index=index)


def test_a_worker_has_the_context_and_the_creator_of_its_environments():
    worker = make_worker(2, env_config={"size": 3})
    assert worker.env_context == {"size": 3}
    assert worker.env_context.worker_index == 2
    assert worker.env_creator(worker.env_context.copy_with_overrides(vector_index=5)).number == 5
    assert worker.last_batch is None
    assert worker.assert_healthy() is None
    worker.stop()
    with pytest.raises(AssertionError, match="was stopped"):
        worker.assert_healthy()
    with pytest.raises(AttributeError, match="'RolloutWorker' object has no attribute 'nothing'"):
        worker.nothing  # noqa: B018


def test_a_fake_sampler_keeps_the_batch_that_it_returns_repeatedly():
    worker = make_worker(fake_sampler=True)
    batch = worker.sample()
    assert worker.sample() is worker.last_batch is batch


def test_local_workers_know_the_policies_to_train_and_do_not_wait_for_others():
    workers = with_two_policies(policies_to_train=["a"]).workers
    assert [workers.is_policy_to_train(name) for name in "ab"] == [True, False]
    assert workers.foreach_worker_async(lambda worker: 1) == 0
    assert workers.fetch_ready_async_reqs(timeout_seconds=None) == []
    with pytest.raises(UsageError, match=r"build with num_rollout_workers of 1 or more"):
        workers.add_workers(1)
    with pytest.raises(AttributeError, match="'WorkerSet' object has no attribute 'nothing'"):
        workers.nothing  # noqa: B018
