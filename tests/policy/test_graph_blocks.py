"""Policies inside a `tf.Graph` block: they work as outside, and add no operation to the graph."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.factories import OBS, assert_equal, batch_for, make, rows_of
from helpers.workers import make_config
from tfpolicies import DQNTF2Policy, Policy, import_policy
from tfpolicies.errors import ConfigError
from tfpolicies.models.eager_mode import EagerLock
from tfpolicies.program.runtimes import function

pytestmark = pytest.mark.usefixtures("kept_programs")

KINDS = [
    pytest.param({"inference": "tf"}, id="tf2"),
    pytest.param({"inference": "onnx"}, id="ONNX Runtime"),
    pytest.param({"inference": "session"}, id="graph mode"),
    pytest.param({"jit_compile": True}, id="XLA", marks=pytest.mark.soak),
    pytest.param({"policy_class": DQNTF2Policy}, id="DQN", marks=pytest.mark.soak),
]


@contextlib.contextmanager
def graph_block():
    """A block of a graph, which stays empty and the default one."""
    with tf.Graph().as_default() as graph:
        yield
        assert tf.compat.v1.get_default_graph() is graph
        assert not tf.executing_eagerly()
        assert graph.get_operations() == []


def compute_numbers(policy):
    """Returns results of acting, learning, weights and gradients."""
    rows, batch = rows_of(OBS, 5), batch_for(policy, 8)
    one = policy.compute_single_action(rows[0], explore=False)[0]
    actions, _, extras = policy.compute_actions(rows)
    before = policy.compute_log_likelihoods(actions, rows)
    stats = policy.learn_on_batch(batch)["learner_stats"]
    policy.learn_epochs(batch, 2, 4)
    policy.apply_gradients(policy.compute_gradients(batch)[0])
    policy.set_weights({name: 0.5 * x for name, x in policy.get_weights().items()})
    policy.set_state(policy.get_state())
    after = policy.copy().compute_actions(rows, explore=False)[2]
    mapped = policy.driver.acting.to_env([actions])
    return tf.nest.flatten([one, actions, extras, before, stats, after, mapped])


@pytest.mark.parametrize("config", KINDS)
def test_a_policy_that_is_made_in_a_graph_block_computes_what_it_does_outside(config, monkeypatch):
    with graph_block():
        inside = make(**config)
        result = compute_numbers(inside)
    same_program = compute_numbers(make(**config))
    monkeypatch.setattr("tfpolicies.program.program._registry", {})  # so that it is traced again
    expected = compute_numbers(make(**config))

    for numbers in (result, same_program):
        for one, other in zip(numbers, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    with graph_block():
        compute_numbers(inside)


def test_models_of_users_and_of_files_are_made_in_a_graph_block(tmp_path):
    stored, custom = (
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name=name)
        for name in ("stored", "custom")
    )
    rows = rows_of(OBS, 4)
    make(model={"custom_model": stored}).export_checkpoint(tmp_path)
    with graph_block():
        policies = [Policy.from_checkpoint(tmp_path), make(model={"custom_model": custom})]
        results = [x.compute_actions(rows, explore=False)[2] for x in policies]
        assert policies[0].to_keras().count_params() == policies[1].model.count_params()

    for model, extras in zip((stored, custom), results, strict=True):
        np.testing.assert_allclose(extras["action_dist_inputs"], model(rows), rtol=1e-6, atol=1e-6)


def test_a_learning_rate_of_keras_changes_in_a_graph_block():
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 1.0)
    with graph_block():
        policy = make(lr=schedule)
        assert policy.get_hyperparameter("lr") == 0.5
        policy.learn_on_batch(batch_for(policy, 8))
        policy.learn_on_batch(batch_for(policy, 8))
    assert policy.get_hyperparameter("lr") == 0.25


@pytest.mark.soak
def test_exports_are_written_and_imported_in_a_graph_block(tmp_path):
    policy, rows = make(), rows_of(OBS, 4)
    with graph_block():
        for name, how in {"saved": {}, "onnx": {"onnx": True}, "lite": {"litert": True}}.items():
            assert policy.export_model(tmp_path / name, **how).parity.largest_difference < 1e-5
        policy.to_keras()
        imported = [import_policy(tmp_path / name) for name in ("saved", "onnx")]
        results = [x.compute_actions(rows, explore=False)[0] for x in imported]

    expected = policy.compute_actions(rows, explore=False)[0]
    np.testing.assert_array_equal(results[0], expected)
    np.testing.assert_array_equal(results[1], expected)


def train(framework):
    sizes = {"train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 2}
    algorithm = make_config("CartPole-v1", **sizes, seed=1).framework(framework).build()
    algorithm.train()
    weights = algorithm.get_policy().get_weights()
    algorithm.stop()
    return weights


@pytest.mark.core
@pytest.mark.parametrize("framework", ["tf2", pytest.param("tf", marks=pytest.mark.soak)])
def test_an_algorithm_that_is_built_in_a_graph_block_trains_as_outside(framework):
    expected = train(framework)
    with graph_block():
        weights = train(framework)
    assert_equal(weights, expected)


@pytest.mark.core
def test_a_policy_is_refused_inside_a_function_and_a_strategy():
    with pytest.raises(ConfigError, match=r"made inside a tf\.function\. Make it outside"):
        tf.function(lambda: make(), autograph=False)()
    for block in (graph_block(), contextlib.nullcontext()):
        words = "inside the scope of a MirroredStrategy"
        strategy = tf.distribute.MirroredStrategy(["cpu:0"])
        with block, strategy.scope(), pytest.raises(ConfigError, match=words):
            make()


@pytest.mark.core
def test_acting_in_eager_mode_enters_no_other_mode(monkeypatch):
    policies = [make(), make(inference="onnx"), make(inference="session")]
    rows = rows_of(OBS, 4)
    for policy in policies:
        policy.compute_actions(rows)
    entered = []

    def count(owner, name):
        enter = getattr(owner, name)

        def counted(*args):
            entered.append(name)
            return enter(*args)

        monkeypatch.setattr(owner, name, counted)

    count(function, "ensure_eager")
    count(EagerLock, "__enter__")
    for policy in policies:
        policy.compute_actions(rows)
        policy.compute_single_action(rows[0])
    assert entered == []
    with graph_block():
        policies[0].compute_actions(rows)
    assert entered == ["ensure_eager"]
