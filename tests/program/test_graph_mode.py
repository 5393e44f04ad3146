"""Graph mode: the same numbers as traced functions; sessions; isolation; checkpoints and runs."""

import functools
import gc
import itertools
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.factories import OBS, PLANE, TWO, assert_close, assert_equal, batch_for, make, rows_of
from helpers.marks import telling
from helpers.processes import run_threads
from helpers.serving import MATRIX
from soak.memory import resident_megabytes
from tfpolicies import (
    AlgorithmConfig,
    PGConfig,
    PGTF1Policy,
    PGTF2Policy,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    RolloutWorker,
    TFPolicy,
)
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.testing.random_batches import random_batch

pytestmark = pytest.mark.usefixtures("kept_programs")

SESSION_WORDS = r"tf_session_args=.* fields of .*ConfigProto"
KINDS = {
    "flat": {},
    "box actions": {"actions": PLANE, "observation_filter": "MeanStdFilter"},
    "conv": MATRIX["image"],
    "lstm": {"model": {**MATRIX["memory"]["model"], "max_seq_len": 4}},
}
OBSERVED = rows_of(OBS, 6)


graph = functools.partial(make, PPOTF1Policy)


@pytest.mark.parametrize(
    ("kind", "jit"),
    telling(
        [*((kind, "auto") for kind in KINDS), ("flat", True)],
        ("conv", "auto"),
        soak=[("flat", True), ("box actions", "auto"), ("lstm", "auto")],
    ),
)
def test_graph_mode_acts_and_learns_like_traced_functions(kind, jit):
    settings = {"lr": 0.01, "grad_clip": 0.5, "jit_compile": jit, **KINDS[kind]}
    policy, traced = both = make(PPOTF1Policy, **settings), make(PPOTF2Policy, **settings)
    assert_equal(policy.get_weights(), traced.get_weights())
    for turn in range(2):
        batch = random_batch(traced, 20, seed=turn)
        policy.set_state({**policy.get_state(), "rng": traced.get_state()["rng"]})
        actions = [each.session(3).act(rows_of(each.observation_space, 3)) for each in both]
        np.testing.assert_allclose(*actions, atol=1e-5)
        results = [each.learn_epochs(batch, 2, 8)["learner_stats"] for each in both]
        assert results[0] == pytest.approx(results[1], abs=1e-4)
        for each in both:
            each.learn_on_batch(batch)
        assert_close(policy.get_weights(), traced.get_weights(), atol=1e-5)
    gradients = [each.compute_gradients(batch)[0] for each in both]
    for left, right in zip(*gradients, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    for each in both:
        each.apply_gradients(gradients[1])
    left, right = (each.get_state() for each in both)
    assert_close(left["weights"], right["weights"], atol=1e-5)
    assert_close(left["_optimizer_variables"], right["_optimizer_variables"], atol=1e-4)


def test_a_custom_class_runs_in_graph_mode():
    class Fetching(PGTF1Policy):
        def extra_action_out_fn(self):
            return {"doubled": 2.0 * self.dist_inputs}

        def extra_learn_fetches_fn(self):
            return {"loss_again": self.recorded["policy_loss"]}

    policy = make(Fetching, lr=0.01)
    acted = policy.compute_actions(OBSERVED)
    inputs = acted.extras["action_dist_inputs"]
    np.testing.assert_array_equal(acted.extras["doubled"], 2.0 * inputs)
    result = policy.learn_on_batch(batch_for(policy, 8))
    assert result["loss_again"] == pytest.approx(result["learner_stats"]["policy_loss"])


@pytest.mark.core
def test_a_model_is_copied_into_the_graph_and_stays_usable_outside():
    template = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    before = [v.numpy() for v in template.variables]
    policy = make(PGTF1Policy, model={"custom_model": template}, lr=0.1)
    for left, right in zip(policy.get_weights().values(), before, strict=True):
        np.testing.assert_array_equal(left, right)
    policy.learn_on_batch(batch_for(policy, 8))
    for left, right in zip(template.variables, before, strict=True):
        np.testing.assert_array_equal(left.numpy(), right)
    for model in (policy.model, policy.to_keras()):
        expected = policy.compute_actions(OBSERVED, explore=False).extras["action_dist_inputs"]
        np.testing.assert_allclose(model(OBSERVED).numpy(), expected, atol=1e-6)


def test_a_model_that_cannot_be_copied_is_refused():
    class Opaque(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.dense = keras.layers.Dense(units)

        def call(self, inputs):
            return self.dense(inputs)

    with pytest.raises(ModelError, match="as a factory"):
        make(PGTF1Policy, model={"custom_model": Opaque(2)})
    policy = make(PGTF1Policy, model={"custom_model": lambda space, units: Opaque(units)}, lr=0.1)
    assert policy.learn_on_batch(batch_for(policy, 8))["num_grad_updates_lifetime"] == 1


@pytest.mark.core
def test_the_class_decides_the_runtime_and_framework_the_class():
    policy, eager = graph(), make()
    assert (policy.framework, policy.driver.acting.inference) == ("tf", "tf")
    assert isinstance(policy.get_session(), tf.compat.v1.Session)
    assert (eager.framework, eager.get_session()) == ("tf2", None)
    automatic = graph(inference="auto", jit_compile="auto")
    assert (automatic.driver.acting.inference, automatic.config["jit_compile"]) == ("tf", False)
    for config, in_graph, traced in (
        (PPOConfig(), PPOTF1Policy, PPOTF2Policy),
        (PGConfig(), PGTF1Policy, PGTF2Policy),
    ):
        get_class = config.algo_class.get_default_policy_class
        assert get_class(config.copy().framework("tf")) is in_graph
        assert get_class(config) is traced
        # A complete config always names a framework, so the class is what counts.
        assert in_graph(OBS, TWO, config.to_dict()).framework == "tf"
        assert traced(OBS, TWO, config.copy().framework("tf")).framework == "tf2"


@pytest.mark.core
def test_contradictions_are_refused():
    for refused, words in (
        (lambda: graph(framework="tf2"), "framework='tf2' contradicts PPOTF1Policy"),
        (lambda: make(framework="tf"), "framework='tf' contradicts PPOTF2Policy"),
        (lambda: graph(eager_tracing=False), "eager_tracing=False contradicts PPOTF1Policy"),
        (lambda: AlgorithmConfig().framework("torch"), "framework must be one of"),
        (lambda: AlgorithmConfig().framework("tfe"), "framework must be one of"),
        (lambda: graph(tf_session_args={"threads": 3}), SESSION_WORDS),
        (lambda: graph(tf_session_args={"device_count": 3}), SESSION_WORDS),
    ):
        with pytest.raises(ConfigError, match=words):
            refused()


@pytest.mark.core
def test_the_session_is_configured_by_tf_session_args():
    config = graph().get_session()._config
    assert config.intra_op_parallelism_threads == config.inter_op_parallelism_threads == 2
    assert config.allow_soft_placement
    assert config.gpu_options.allow_growth
    assert dict(config.device_count) == {"CPU": 1}
    settings = PPOConfig().framework("tf", tf_session_args={"intra_op_parallelism_threads": 1})
    config = PPOTF1Policy(OBS, TWO, settings).get_session()._config
    assert (config.intra_op_parallelism_threads, config.inter_op_parallelism_threads) == (1, 2)


@pytest.mark.core
def test_the_session_creator_is_called_once_with_the_graph_as_default():
    graphs = []

    def create():
        graphs.append(tf.compat.v1.get_default_graph())
        return tf.compat.v1.Session()

    policy, other = graph(__session_creator=create), graph()
    assert not graphs  # sessions are opened when they are first used
    policy.compute_actions(OBSERVED)
    policy.learn_on_batch(batch_for(policy, 8))
    session = policy.get_session()
    assert graphs == [session.graph]
    assert other.get_session().graph is session.graph
    assert other.get_session() is not session
    policy.close()
    policy.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.run([])
    policy.compute_actions(OBSERVED)
    assert len(graphs) == 2
    with pytest.raises(ConfigError, match="session_creator must return"):
        graph(__session_creator=object).get_session()


def test_the_session_holds_the_policys_variables():
    policy = graph(lr=0.1)
    policy.learn_on_batch(batch_for(policy, 8))
    session = policy.get_session()
    variables = policy.program.runtime.functions.network.variables
    for variable, expected in zip(variables, policy.get_weights().values(), strict=True):
        np.testing.assert_array_equal(session.run(variable.value), expected)


@pytest.mark.usefixtures("new_programs")
def test_a_program_is_traced_once_for_all_its_sessions():
    policies = [graph(seed=i, lr=1e-3 * (i + 1)) for i in range(5)]
    for i, policy in enumerate(policies):
        policy.compute_actions(rows_of(OBS, 1 + i))
        policy.compute_log_likelihoods(np.zeros(6, int), OBSERVED)
        policy.learn_epochs(batch_for(policy, 9), 2, 4)
    traces = policies[0].program.functions.traces
    assert max(traces.values()) == 1, traces
    operations = len(policies[0].get_session().graph.get_operations())
    for policy in policies:
        policy.compute_actions(OBSERVED)
        policy.learn_epochs(batch_for(policy, 5), 1, 4)
    assert len(policies[0].get_session().graph.get_operations()) == operations


def learn(policy, turn):
    policy.learn_epochs(batch_for(policy, 12, seed=turn), 2, 4)


def test_policies_learn_and_act_in_threads():
    def make_policies():
        return [graph(seed=i, lr=0.01) for i in range(3)]

    def work(policy):
        for turn in range(4):
            learn(policy, turn)
            policy.compute_actions(OBSERVED)

    alone, together = make_policies(), make_policies()
    for policy in alone:
        work(policy)
    run_threads(*(functools.partial(work, policy) for policy in together))
    for left, right in zip(alone, together, strict=True):
        assert_close(left.get_weights(), right.get_weights(), atol=1e-6)


@pytest.mark.usefixtures("quick_collections", "new_programs")
@pytest.mark.soak
def test_policies_in_turn_give_their_memory_back():
    eager, expected, sizes = make(seed=3), None, []
    for i in range(12):
        policy = graph(seed=i, lr=0.01)
        learn(policy, 0)
        policy.compute_actions(OBSERVED)
        if i % 2:
            policy.close()
        gone = weakref.ref(policy.get_session() if i % 2 == 0 else policy)
        del policy
        gc.collect()
        assert gone() is None
        outputs = eager.compute_actions(OBSERVED, explore=False).extras["action_dist_inputs"]
        expected = outputs if expected is None else expected
        np.testing.assert_array_equal(outputs, expected)
        sizes.append(resident_megabytes())
    assert sizes[-1] - sizes[5] < 10.0


@pytest.mark.core
def test_a_checkpoint_keeps_the_mode_and_a_state_moves_to_traced_functions(tmp_path):
    policy, traced = graph(lr=0.01), make(lr=0.01)
    learn(policy, 0)
    policy.export_checkpoint(tmp_path)
    assert type(TFPolicy.from_checkpoint(tmp_path)) is PPOTF1Policy
    traced.set_state(policy.get_state())
    assert_equal(traced.get_weights(), policy.get_weights())


@pytest.mark.parametrize(
    ("kind", "onnx"),
    telling(itertools.product(["flat", "lstm"], [None, True]), soak=[("lstm", True)]),
)
def test_exports_agree_with_the_session(tmp_path, kind, onnx):
    policy = graph(lr=0.01, **KINDS[kind])
    policy.learn_on_batch(random_batch(policy, 12))
    result = policy.export_model(tmp_path, onnx)
    assert result.parity.largest_difference < 1e-4


def test_a_policy_in_graph_mode_may_act_in_onnx_runtime():
    by_session, by_onnx = graph(), graph(inference="onnx")
    assert (by_onnx.driver.acting.inference, by_onnx.framework) == ("onnx", "tf")
    rows = rows_of(OBS, 100)
    actions = [each.compute_actions(rows).actions for each in (by_session, by_onnx)]
    np.testing.assert_array_equal(*actions)


@pytest.mark.core
def test_an_algorithm_trains_in_graph_mode(tmp_path):
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .framework("tf", local_tf_session_args={"intra_op_parallelism_threads": 1})
        .framework(jit_compile=False)
        .rollouts(num_envs_per_worker=2)
        .training(train_batch_size=64, sgd_minibatch_size=32, num_sgd_iter=2, lr=1e-3)
        .training(model={"fcnet_hiddens": [4]})
        .debugging(seed=1)
    )
    twin = config.copy().framework("tf2")
    algorithms = [each.build() for each in (config, twin)]
    results = [each.train()["info"]["learner"]["default_policy"] for each in algorithms]
    assert results[0]["learner_stats"] == pytest.approx(results[1]["learner_stats"], abs=1e-4)
    policy = algorithms[0].get_policy()
    assert type(policy) is PPOTF1Policy
    assert policy.get_session()._config.intra_op_parallelism_threads == 1
    session = policy.get_session()
    algorithms[0].stop()
    with pytest.raises(RuntimeError, match="closed"):
        session.run([])


def test_a_worker_takes_the_class_that_is_named():
    config = PPOConfig().environment("CartPole-v1").framework("tf", inference="tf")
    worker = RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
    assert worker.get_policy().framework == "tf2"
    assert worker.get_policy().get_session() is None
