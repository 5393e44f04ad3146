"""Pickled policies and algorithms: equal to their checkpoints, or refused with the reason."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import keras
import numpy as np
import pytest

from helpers import picklable
from helpers.custom_policies import ZeroPolicy
from helpers.factories import OBS, PLANE, assert_equal, make, rows_of
from helpers.workers import make_small_config
from tfpolicies import (
    DQNConfig,
    DQNTF2Policy,
    PolicyMap,
    PPOTF1Policy,
    PPOTF2Policy,
    RolloutWorker,
)
from tfpolicies.connectors import FrameStack
from tfpolicies.errors import TfPoliciesError, UnpicklableError
from tfpolicies.testing import random_batch

pytestmark = pytest.mark.usefixtures("kept_programs")

LSTM = {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [4], "max_seq_len": 4}
LAYERS = keras.Sequential([keras.Input((3,)), picklable.Doubled(), keras.layers.Dense(2)])
KINDS = {
    "plain": lambda: make(),
    "graph mode": lambda: make(PPOTF1Policy),
    "onnx": lambda: make(inference="onnx"),
    "with a memory": lambda: make(model=LSTM),
    "box actions, filters": lambda: make(
        actions=PLANE, observation_filter="MeanStdFilter", reward_filter="MeanStdFilter"
    ),
    "a target, exploration": lambda: make(DQNTF2Policy, worker_index=2),
    "a custom class": lambda: make(picklable.CustomPPOPolicy, callbacks=picklable.Callbacks),
    "a model's factory": lambda: make(model={"custom_model": picklable.factory}),
    "a model's instance": lambda: make(model={"custom_model": LAYERS}),
    "connectors": lambda: make(agent_connectors=[FrameStack(2)], seed=None),
}


def use(policy):
    """Has a policy learn, act and observe; returns it."""
    if not policy.program.ports.is_recurrent:
        policy.learn_on_batch(random_batch(policy, 8))
        policy.compute_actions(rows_of(OBS, 3))
    if policy.filter is not None:
        policy.filter.observe([rows_of(OBS, 5)])
        policy.driver.learning.flush_filters()
    policy.set_hyperparameter("lr", 0.25)
    policy.on_global_var_update({"timestep": 77})
    return policy


def get_state(policy):
    state = policy.get_state()
    del state["policy_spec"]
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_policy_is_equal_to_the_last_number(kind):
    policy = use(KINDS[kind]())
    copied = pickle.loads(pickle.dumps(policy))

    assert type(copied) is type(policy)
    assert copied is not policy
    np.testing.assert_equal(get_state(copied), get_state(policy))
    assert list(copied.get_weights()) == list(policy.get_weights())
    assert (copied.policy_id, copied._worker_index) == (policy.policy_id, policy._worker_index)
    assert type(copied.callbacks) is type(policy.callbacks)
    if not policy.program.ports.is_recurrent:
        obs = rows_of(OBS, 6)
        assert picklable.act(copied, obs) == picklable.act(policy, obs)
        batch = random_batch(policy, 8)
        policy.learn_on_batch(batch), copied.learn_on_batch(batch)
        assert_equal(copied.get_weights(), policy.get_weights())


def small():
    config = make_small_config(picklable.Corridor, num_sgd_iter=1)
    config.multi_agent(policies={"default_policy"}, policy_mapping_fn=picklable.mapping)
    return config.callbacks(picklable.Callbacks)


def test_policies_and_an_algorithm_are_sent_to_a_spawned_process():
    policy = use(make(picklable.CustomPPOPolicy, model={"custom_model": picklable.factory}))
    obs, algorithm = rows_of(OBS, 6), small().build()
    algorithm.train()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        futures = [
            pool.submit(picklable.act, policy, obs),
            pool.submit(picklable.act, ZeroPolicy(), obs),
            pool.submit(picklable.train, algorithm),
        ]
        acted, zero, trained = (future.result(120) for future in futures)

    assert acted == picklable.act(policy, obs)
    assert zero == ("ZeroPolicy", "default_policy", [[0] * 6] * 3)
    np.testing.assert_equal(trained, picklable.train(algorithm))
    assert trained[:2] == (2, 64)


@pytest.mark.core
def test_objects_without_an_import_path_are_refused_with_a_workaround():
    class Local(PPOTF2Policy):
        pass

    class Wrapped(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.dense = keras.layers.Dense(units)

        def call(self, x):
            return self.dense(x)

    def make_model(observation_space, num_outputs):
        return picklable.factory(observation_space, num_outputs)

    refusals = {
        "class of the policy is": make(Local),
        r"config\['model'\]\['custom_model'\] is": make(model={"custom_model": make_model}),
        "as a factory": make(model={"custom_model": Wrapped(2)}),
        r"config\['env'\] is": small().environment(lambda config: picklable.Corridor()).build(),
    }
    for reason, unpicklable in refusals.items():
        with pytest.raises(UnpicklableError, match=reason) as error:
            pickle.dumps(unpicklable)
        assert isinstance(error.value, TypeError)
        assert isinstance(error.value, TfPoliciesError)
        assert "top level of a module" in str(error.value)


def test_maps_and_workers_name_the_objects_to_pickle_instead():
    worker = RolloutWorker(config=small(), default_policy_class=PPOTF2Policy)
    for owner, instead in (
        (PolicyMap(), "Pickle its policies"),
        (worker, "worker.get_state()"),
        (small().build().workers, "Pickle the algorithm"),
    ):
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(UnpicklableError, match=type(owner).__name__) as error:
                copied(owner)
            assert instead in str(error.value)


@pytest.mark.core
def test_a_session_is_pickled_with_its_policy_and_its_memory():
    session = make(model=LSTM).session()
    session.act(rows_of(OBS, 1)[0])
    copied = pickle.loads(pickle.dumps(session))

    obs = rows_of(OBS, 1, seed=1)[0]
    assert [copied.act(obs) for _ in range(4)] == [session.act(obs) for _ in range(4)]


@pytest.mark.core
def test_deepcopy_of_a_policy_is_its_copy_with_another_generator():
    policy = use(make(seed=None))
    copied, again = copy.deepcopy([policy, policy])

    assert copied is again
    assert_equal(copied.get_weights(), policy.get_weights())
    assert copied.program is policy.program
    assert copied.get_state()["rng"] != policy.get_state()["rng"]
    copied.set_weights([0 * x for x in copied.get_weights().values()])
    assert any(x.any() for x in policy.get_weights().values())


def test_the_state_of_an_algorithm_has_the_keys_of_the_contract_and_is_restored():
    algorithm, other = small().build(), small().debugging(seed=1).build()
    algorithm.train()
    state = algorithm.__getstate__()

    assert sorted(state) == [
        "algorithm_class", "config", "counters", "extra", "training_iteration", "worker",
    ]  # fmt: skip
    assert state["algorithm_class"] is type(algorithm)
    assert state["worker"]["policy_ids"] == ["default_policy"]
    other.__setstate__(state)
    assert other.iteration == 1
    assert other.counters == algorithm.counters
    np.testing.assert_equal(other.get_weights(), algorithm.get_weights())
    with pytest.raises(KeyError):
        other.__setstate__({"worker": state["worker"]})


def test_the_state_of_an_algorithm_has_its_replay_buffer_and_the_mapping_of_evaluation():
    config = make_small_config("CartPole-v1", DQNConfig, rollout_fragment_length=4)
    config.training(num_steps_sampled_before_learning_starts=0, store_buffer_in_checkpoints=True)
    config.evaluation(evaluation_interval=9).reporting(min_sample_timesteps_per_iteration=8)
    config.training(train_batch_size=4)
    algorithm, other = config.build(), config.build()
    algorithm.train()
    state = algorithm.__getstate__()
    other.__setstate__(state)
    assert [len(x.replay_buffer) for x in (algorithm, other)] == [8, 8]
    assert state["eval_policy_mapping_fn"] is algorithm.evaluation_worker.policy_mapping_fn
    weights = other.get_weights()
    algorithm.train()
    with pytest.raises(KeyError):
        other.__setstate__({**algorithm.__getstate__(), "extra": {}})
    np.testing.assert_equal(other.get_weights(), weights)


@pytest.mark.core
def test_a_pickled_algorithm_continues_as_one_from_its_checkpoint_does():
    algorithm = small().build()
    algorithm.train()
    copied = pickle.loads(pickle.dumps(algorithm))

    assert type(copied.callbacks) is picklable.Callbacks
    assert copied.worker.policy_mapping_fn is picklable.mapping
    expected = picklable.train(algorithm)
    np.testing.assert_equal(picklable.train(copied), expected)
    assert expected[:2] == (2, 64)
