"""Policies and algorithms travel to other processes as their checkpoints are, or say why not."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import keras
import numpy as np
import pytest

from helpers import picklable
from helpers.factories import OBS, PLANE, assert_equal, make, rows_of
from tfpolicies import (
    DQNConfig,
    DQNTF2Policy,
    PolicyMap,
    PPOConfig,
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
    "a class of the user's": lambda: make(picklable.Mine, callbacks=picklable.Callbacks),
    "a model's factory": lambda: make(model={"custom_model": picklable.factory}),
    "a model's instance": lambda: make(model={"custom_model": LAYERS}),
    "connectors": lambda: make(agent_connectors=[FrameStack(2)], seed=None),
}


def used(policy):
    """A policy that has learned, acted and observed."""
    if not policy.program.ports.is_recurrent:
        policy.learn_on_batch(random_batch(policy, 8))
        policy.compute_actions(rows_of(OBS, 3))
    if policy.filter is not None:
        policy.filter.observe([rows_of(OBS, 5)])
        policy.driver.learning.flush_filters()
    policy.set_hyperparameter("lr", 0.25)
    policy.on_global_var_update({"timestep": 77})
    return policy


def assert_same(left, right):
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    else:
        np.testing.assert_array_equal(left, right)


def everything(policy):
    state = policy.get_state()
    del state["policy_spec"]
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_policy_is_equal_to_the_last_number(kind):
    policy = used(KINDS[kind]())
    twin = pickle.loads(pickle.dumps(policy))

    assert type(twin) is type(policy)
    assert twin is not policy
    assert_same(everything(twin), everything(policy))
    assert (twin.policy_id, twin._worker_index) == (policy.policy_id, policy._worker_index)
    assert type(twin.callbacks) is type(policy.callbacks)
    if not policy.program.ports.is_recurrent:
        obs = rows_of(OBS, 6)
        assert picklable.acted(twin, obs) == picklable.acted(policy, obs)
        batch = random_batch(policy, 8)
        policy.learn_on_batch(batch), twin.learn_on_batch(batch)
        assert_equal(twin.get_weights(), policy.get_weights())


def test_a_spawned_process_takes_policies_and_an_algorithm():
    policy = used(make(picklable.Mine, model={"custom_model": picklable.factory}))
    obs, algorithm = rows_of(OBS, 6), small().build()
    algorithm.train()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        there = [
            pool.submit(picklable.acted, policy, obs),
            pool.submit(picklable.acted, picklable.ByHand(), obs),
            pool.submit(picklable.trained, algorithm),
        ]
        acted, by_hand, (iteration, steps, weights) = (each.result(120) for each in there)

    assert acted == picklable.acted(policy, obs)
    assert by_hand == ("ByHand", "default_policy", [[0] * 6] * 3)
    here = picklable.trained(algorithm)
    assert (iteration, steps) == here[:2] == (2, 64)
    assert_equal(weights, here[2])


def small(**training):
    config = PPOConfig().environment(picklable.Corridor)
    config.training(train_batch_size=32, sgd_minibatch_size=16, num_sgd_iter=1, **training)
    config.training(model={"fcnet_hiddens": [4]})
    config.framework(jit_compile=False, inference="tf")
    config.multi_agent(policies={"default_policy"}, policy_mapping_fn=picklable.mapping)
    return config.debugging(seed=0, log_level="ERROR").callbacks(picklable.Callbacks)


@pytest.mark.core
def test_what_pickle_cannot_find_by_name_is_refused_with_the_way_out():
    class Local(PPOTF2Policy):
        pass

    class Wrapped(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.dense = keras.layers.Dense(units)

        def call(self, x):
            return self.dense(x)

    refused = {
        "class of the policy is": make(Local),
        r"config\['model'\]\['custom_model'\] is": make(
            model={"custom_model": lambda space, outputs: picklable.factory(space, outputs)}
        ),
        "as a factory": make(model={"custom_model": Wrapped(2)}),
        r"config\['env'\] is": small().environment(lambda config: picklable.Corridor()).build(),
    }
    for reason, each in refused.items():
        with pytest.raises(UnpicklableError, match=reason) as error:
            pickle.dumps(each)
        assert isinstance(error.value, TypeError)
        assert isinstance(error.value, TfPoliciesError)
        assert "top level of a module" in str(error.value)


def test_maps_and_workers_say_what_to_pickle_instead():
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
    worker.stop()


@pytest.mark.core
def test_a_session_travels_with_its_policy_and_its_memory():
    session = make(model=LSTM).session()
    session.act(rows_of(OBS, 1)[0])
    twin = pickle.loads(pickle.dumps(session))

    obs = rows_of(OBS, 1, seed=1)[0]
    assert [twin.act(obs) for _ in range(4)] == [session.act(obs) for _ in range(4)]


@pytest.mark.core
def test_deepcopy_of_a_policy_is_its_copy_with_a_generator_of_its_own():
    policy = used(make(seed=None))
    twin, again = copy.deepcopy([policy, policy])

    assert twin is again
    assert_equal(twin.get_weights(), policy.get_weights())
    assert twin.program is policy.program
    assert twin.get_state()["rng"] != policy.get_state()["rng"]
    twin.set_weights([0 * x for x in twin.get_weights().values()])
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
    mine, theirs = (each.get_weights()["default_policy"] for each in (other, algorithm))
    assert_equal(mine, theirs)
    with pytest.raises(KeyError):
        other.__setstate__({"worker": state["worker"]})
    for each in (algorithm, other):
        each.stop()


def test_the_state_of_an_algorithm_has_its_replay_buffer_and_who_acts_in_evaluation():
    config = DQNConfig().environment("CartPole-v1").debugging(seed=1, log_level="ERROR")
    config.framework(inference="tf", jit_compile=False).rollouts(rollout_fragment_length=4)
    config.training(model={"fcnet_hiddens": [4]}, train_batch_size=4)
    config.training(store_buffer_in_checkpoints=True, num_steps_sampled_before_learning_starts=0)
    config.evaluation(evaluation_interval=9).reporting(min_sample_timesteps_per_iteration=8)
    algorithm, other = config.build(), config.build()
    algorithm.train()
    state = algorithm.__getstate__()
    other.__setstate__(state)
    rows = [len(each.replay_buffer) for each in (algorithm, other)]
    assert rows == [8, 8]
    assert state["eval_policy_mapping_fn"] is algorithm.evaluation_worker.policy_mapping_fn
    weights = other.get_weights()["default_policy"]
    algorithm.train()
    with pytest.raises(KeyError):
        other.__setstate__({**algorithm.__getstate__(), "extra": {}})
    assert_equal(other.get_weights()["default_policy"], weights)
    for each in (algorithm, other):
        each.stop()


@pytest.mark.core
def test_a_pickled_algorithm_goes_on_as_one_from_its_checkpoint_does():
    algorithm = small().build()
    algorithm.train()
    twin = pickle.loads(pickle.dumps(algorithm))

    assert type(twin.callbacks) is picklable.Callbacks
    assert twin.worker.policy_mapping_fn is picklable.mapping
    ours, theirs = picklable.trained(algorithm), picklable.trained(twin)
    assert ours[:2] == theirs[:2] == (2, 64)
    assert_equal(ours[2], theirs[2])
