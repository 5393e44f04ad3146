"""What ported code asks of algorithms and workers: old names, states, runs without environment."""

import os
import pickle

import numpy as np
import pytest
from gymnasium import spaces

import tfpolicies.compat  # noqa: F401
from helpers.environments import CountingEnv
from helpers.factories import OBS, TWO, assert_equal, batch_for
from tfpolicies import (
    PPO,
    Algorithm,
    DefaultCallbacks,
    DQNConfig,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
    RolloutWorker,
)
from tfpolicies.errors import CheckpointError, ConfigError, UsageError, WeightsError

pytestmark = pytest.mark.usefixtures("kept_programs")


def tiny(env=None, **settings):
    config = PPOConfig().environment(env, **settings)
    config.training(train_batch_size=16, sgd_minibatch_size=8, num_sgd_iter=1)
    config.training(model={"fcnet_hiddens": [4]})
    return config.framework(inference="tf", jit_compile=False).debugging(seed=1, log_level="ERROR")


def counting(context):
    return CountingEnv(context.vector_index)


class Told(DefaultCallbacks):
    loaded = 0

    def on_checkpoint_loaded(self, *, algorithm, **kwargs):
        self.loaded += 1


def test_checkpoints_are_written_and_loaded_under_their_old_names(tmp_path):
    algorithm = tiny(counting).callbacks(Told).build()
    algorithm.train()
    before = algorithm.get_weights()["default_policy"]
    assert algorithm.save_checkpoint(tmp_path / "saved") is None
    algorithm.train()
    algorithm.load_checkpoint(checkpoint_dir=tmp_path / "saved")
    assert algorithm.callbacks.loaded == 1
    assert_equal(algorithm.get_weights()["default_policy"], before)
    algorithm.stop()


def test_the_path_of_a_checkpoint_brings_along_in_this_process_what_no_file_can_hold(tmp_path):
    algorithm = tiny(lambda context: CountingEnv(3)).callbacks(Told).build()
    path = algorithm.save(tmp_path / "saved").checkpoint.path
    twin = PPO.from_checkpoint(path, config={"lr": 0.5})
    assert twin.config.env is algorithm.config.env
    assert twin.config.lr == 0.5
    assert twin.callbacks.loaded == 1  # it is a `Told`
    for plain in (str(tmp_path / "saved"), pickle.loads(pickle.dumps(path)), path[:]):
        with pytest.raises(CheckpointError, match=r"config\['env'\].*config\['callbacks'\]"):
            PPO.from_checkpoint(plain)
    for each in (algorithm, twin):
        each.stop()


def test_a_step_is_an_iteration_and_counts():
    algorithm = tiny(counting).build()
    assert set(algorithm._counters.values()) == {0}
    assert algorithm.step()["training_iteration"] == 1
    assert set(algorithm._counters.values()) == {16}
    assert algorithm.get_config() is algorithm.config
    algorithm.stop()


def test_an_algorithm_has_a_folder_to_write_into(tmp_path):
    algorithm = tiny(counting).build()
    folder = algorithm.logdir
    assert os.path.isdir(folder)
    assert algorithm.logdir == folder
    algorithm.stop()
    os.rmdir(folder)


def test_the_folder_to_write_into_is_that_of_the_run(tmp_path):
    algorithm = tiny(counting).build()
    algorithm.learn(16, run_dir=tmp_path / "run", progress=False)
    assert algorithm.logdir == str(tmp_path / "run")
    algorithm.stop()


def test_an_algorithm_is_built_of_the_state_of_another_one():
    algorithm = tiny(counting).build()
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
    for each in (algorithm, twin):
        each.stop()


# -- without an environment -------------------------------------------------------------------


@pytest.mark.parametrize("config_class", [PPOConfig, DQNConfig])
def test_spaces_are_enough_to_act_learn_and_come_back(config_class, tmp_path):
    config = config_class().environment(observation_space=OBS, action_space=TWO)
    config.training(model={"fcnet_hiddens": [4]}, train_batch_size=128)
    config.framework(inference="tf", jit_compile=False).debugging(log_level="ERROR")
    algorithm = config.build()
    policy = algorithm.get_policy()
    assert (policy.observation_space, policy.action_space) == (OBS, TWO)
    assert TWO.contains(algorithm.compute_single_action(np.zeros(3, np.float32)))
    policy.learn_on_batch(batch_for(policy, 8))
    assert policy.num_grad_updates == 1
    with pytest.raises(UsageError, match="has no environment"):
        algorithm.train()
    twin = Algorithm.from_checkpoint(algorithm.save(tmp_path / "saved"))
    assert_equal(twin.get_weights()["default_policy"], algorithm.get_weights()["default_policy"])
    for each in (algorithm, twin):
        each.stop()


def test_several_policies_with_spaces_of_their_own_need_no_environment():
    specs = {"a": PolicySpec(None, OBS, TWO), "b": PolicySpec(None, OBS, spaces.Discrete(3))}
    config = tiny().multi_agent(policies=specs, policy_mapping_fn=lambda *values, **more: "a")
    algorithm = config.build()
    assert algorithm.get_policy("b").action_space == spaces.Discrete(3)
    algorithm.stop()


def test_evaluation_may_have_the_only_environment():
    config = tiny(observation_space=CountingEnv.observation_space, action_space=spaces.Discrete(3))
    config.evaluation(evaluation_duration=2, evaluation_config={"env": counting})
    algorithm = config.build()
    assert algorithm.evaluate()["evaluation"]["episodes_this_iter"] == 2
    algorithm.stop()


@pytest.mark.core
@pytest.mark.parametrize("values", [{}, {"observation_space": OBS}])
def test_without_environment_and_spaces_nothing_is_built(values):
    with pytest.raises(ConfigError, match=r"needs an environment.*observation_space=\.\.\."):
        tiny(**values).build()


# -- workers ----------------------------------------------------------------------------------


def made_worker(config, **arguments):
    return RolloutWorker(config=config, default_policy_class=PPOTF2Policy, **arguments)


def test_a_worker_tells_where_its_environments_run_and_makes_another_one():
    worker = made_worker(tiny(counting, env_config={"size": 3}), worker_index=2)
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


def test_a_worker_keeps_the_batch_that_it_gives_again_and_again():
    worker = made_worker(tiny(counting).debugging(fake_sampler=True))
    batch = worker.sample()
    assert worker.sample() is worker.last_batch is batch
    worker.stop()


def test_workers_say_which_policies_are_trained_and_have_nobody_to_wait_for():
    specs = {name: PolicySpec(None, OBS, TWO) for name in "ab"}
    config = tiny().multi_agent(policies=specs, policies_to_train=["a"])
    algorithm = config.multi_agent(policy_mapping_fn=lambda *values, **more: "a").build()
    workers = algorithm.workers
    assert [workers.is_policy_to_train(name) for name in "ab"] == [True, False]
    assert workers.foreach_worker_async(lambda worker: 1) == 0
    assert workers.fetch_ready_async_reqs(timeout_seconds=None) == []
    with pytest.raises(UsageError, match=r"build with num_rollout_workers of 1 or more"):
        workers.add_workers(1)
    with pytest.raises(AttributeError, match="'WorkerSet' object has no attribute 'nothing'"):
        workers.nothing  # noqa: B018
    algorithm.stop()
