"""Graph mode: the session runtime gives what traced functions give, and leaves all else alone."""

import gc
import itertools
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from keras.src.backend.common import global_state

from helpers.factories import OBS, PLANE, TWO, assert_close, assert_equal, batch_for, make, rows_of
from helpers.marks import telling
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

LSTM = {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [4], "max_seq_len": 4}
KINDS = {
    "flat": {},
    "box actions": {"actions": PLANE, "observation_filter": "MeanStdFilter"},
    "conv": {
        "obs": spaces.Box(0, 255, (10, 10, 3), np.uint8),
        "model": {"conv_filters": [[4, [4, 4], 2], [8, [5, 5], 1]], "fcnet_hiddens": [4]},
    },
    "lstm": {"model": {**LSTM, "lstm_use_prev_action": True}},
}
OBSERVED = rows_of(OBS, 6)


def graph(**config):
    return make(PPOTF1Policy, **config)


def keras_state():
    return {
        name: len(value) if hasattr(value, "__len__") else value
        for name, value in vars(global_state.GLOBAL_STATE_TRACKER).items()
    }


# -- the same numbers -----------------------------------------------------------------------------


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
    ours, theirs = make(PPOTF1Policy, **settings), make(PPOTF2Policy, **settings)
    assert_equal(ours.get_weights(), theirs.get_weights())
    for turn in range(2):
        batch = random_batch(theirs, 20, seed=turn)
        ours.set_state({**ours.get_state(), "rng": theirs.get_state()["rng"]})
        acted = [each.session(3).act(rows_of(each.observation_space, 3)) for each in (ours, theirs)]
        np.testing.assert_allclose(*acted, atol=1e-5)
        results = [each.learn_epochs(batch, 2, 8)["learner_stats"] for each in (ours, theirs)]
        assert results[0] == pytest.approx(results[1], abs=1e-4)
        for each in (ours, theirs):
            each.learn_on_batch(batch)
        assert_close(ours.get_weights(), theirs.get_weights(), atol=1e-5)
    gradients = [each.compute_gradients(batch)[0] for each in (ours, theirs)]
    for left, right in zip(*gradients, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
    for each in (ours, theirs):
        each.apply_gradients(gradients[1])
    left, right = (each.get_state() for each in (ours, theirs))
    assert_close(left["weights"], right["weights"], atol=1e-5)
    assert_close(left["_optimizer_variables"], right["_optimizer_variables"], atol=1e-4)


def test_a_policy_of_ones_own_runs_in_graph_mode():
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
    made = make(PGTF1Policy, model={"custom_model": lambda space, units: Opaque(units)}, lr=0.1)
    assert made.learn_on_batch(batch_for(made, 8))["num_grad_updates_lifetime"] == 1


# -- the framework and the session ----------------------------------------------------------------


@pytest.mark.core
def test_the_class_decides_the_runtime_and_framework_the_class():
    policy, eager = graph(), make()
    assert (policy.framework, policy.driver.acting.inference) == ("tf", "tf")
    assert isinstance(policy.get_session(), tf.compat.v1.Session)
    assert (eager.framework, eager.get_session()) == ("tf2", None)
    automatic = graph(inference="auto", jit_compile="auto")
    assert (automatic.driver.acting.inference, automatic.config["jit_compile"]) == ("tf", False)
    for config, classes in (
        (PPOConfig(), (PPOTF1Policy, PPOTF2Policy)),
        (PGConfig(), (PGTF1Policy, PGTF2Policy)),
    ):
        algorithm = config.algo_class
        assert algorithm.get_default_policy_class(config.copy().framework("tf")) is classes[0]
        assert algorithm.get_default_policy_class(config) is classes[1]
        # A complete config names a framework in any case, so the class is what counts.
        assert classes[0](OBS, TWO, config.to_dict()).framework == "tf"
        assert classes[1](OBS, TWO, config.copy().framework("tf")).framework == "tf2"


@pytest.mark.core
def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="framework='tf2' contradicts PPOTF1Policy"):
        graph(framework="tf2")
    with pytest.raises(ConfigError, match="framework='tf' contradicts PPOTF2Policy"):
        make(framework="tf")
    with pytest.raises(ConfigError, match="eager_tracing=False contradicts PPOTF1Policy"):
        graph(eager_tracing=False)
    for wrong in ("torch", "tfe"):
        with pytest.raises(ConfigError, match="framework must be one of"):
            AlgorithmConfig().framework(wrong)
    for wrong in ({"threads": 3}, {"device_count": 3}):
        with pytest.raises(ConfigError, match=r"tf_session_args=.* fields of .*ConfigProto"):
            graph(tf_session_args=wrong)


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
    seen = []

    def create():
        seen.append(tf.compat.v1.get_default_graph())
        return tf.compat.v1.Session()

    policy, other = graph(__session_creator=create), graph()
    assert not seen  # sessions are opened when they are first used
    policy.compute_actions(OBSERVED)
    policy.learn_on_batch(batch_for(policy, 8))
    session = policy.get_session()
    assert seen == [session.graph]
    assert other.get_session().graph is session.graph
    assert other.get_session() is not session
    policy.close()
    policy.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.run([])
    policy.compute_actions(OBSERVED)
    assert len(seen) == 2
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


# -- isolation ------------------------------------------------------------------------------------


def learn(policy, turn):
    policy.learn_epochs(batch_for(policy, 12, seed=turn), 2, 4)


@pytest.mark.usefixtures("quick_collections")
def test_graph_and_eager_policies_in_any_order_leave_each_other_alone():
    classes = [PPOTF1Policy, PPOTF2Policy, PPOTF1Policy, PGTF1Policy, PGTF2Policy]
    settings = [{"seed": i, "lr": 0.01 * (i + 1)} for i in range(len(classes))]

    def turn(policy, i):
        actions = policy.compute_actions(OBSERVED).actions.tolist()
        learn(policy, i)
        return actions

    alone, kept = [], [make(each) for each in set(classes)]  # so that Programs are traced once
    for policy_class, config in zip(classes, settings, strict=True):
        policy = make(policy_class, **config)
        alone.append(([turn(policy, i) for i in range(3)], policy.get_weights()))
        del policy
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        made = {i: make(classes[i], **settings[i]) for i in order}
        taken = {i: [] for i in order}
        for step in range(3):
            for i in order if step % 2 else reversed(order):
                taken[i].append(turn(made[i], step))
            made[0].close()  # in the middle of everything
        for i in order:
            assert taken[i] == alone[i][0]
            assert_close(made[i].get_weights(), alone[i][1], atol=1e-6)
            del made[i]
            gc.collect()
    del kept


@pytest.mark.core
def test_global_state_is_left_alone():
    policy = graph()  # whatever a process has after its first policy
    learn(policy, 0)
    before = keras_state(), tf.compat.v1.get_default_graph()
    threads = [
        tf.config.threading.get_intra_op_parallelism_threads(),
        tf.config.threading.get_inter_op_parallelism_threads(),
    ]
    assert threads == [0, 0]  # as TensorFlow starts
    for i in range(3):
        other = graph(seed=i, model={"fcnet_hiddens": [4]})
        learn(other, i)
        other.close()
        assert tf.executing_eagerly()
        assert tf.compat.v1.get_default_session() is None
    assert keras_state() == before[0]
    assert tf.compat.v1.get_default_graph() is before[1]


def test_policies_learn_and_act_in_threads_of_their_own():
    alone = [graph(seed=i, lr=0.01) for i in range(3)]
    for policy in alone:
        for turn in range(4):
            learn(policy, turn)
            policy.compute_actions(OBSERVED)
    together = [graph(seed=i, lr=0.01) for i in range(3)]
    failed = []

    def work(policy):
        try:
            for turn in range(4):
                learn(policy, turn)
                policy.compute_actions(OBSERVED)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(policy,)) for policy in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for left, right in zip(alone, together, strict=True):
        assert_close(left.get_weights(), right.get_weights(), atol=1e-6)


def test_an_update_that_fails_half_way_leaves_the_policy_as_it_was():
    class Checked(PGTF1Policy):
        def loss(self, model, dist_class, train_batch):
            good = tf.reduce_all(train_batch["advantages"] < 100.0)
            with tf.control_dependencies([tf.debugging.Assert(good, ["too large"])]):
                return super().loss(model, dist_class, train_batch)

    policy, twin = make(Checked, lr=0.1), make(Checked, lr=0.1)
    batch = batch_for(policy, 8)
    bad = batch.copy()
    bad["advantages"] = np.array([1, 2, 3, 4, 5, 6, 7, 1000], np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError):
        policy.learn_epochs(bad, 1, 2, shuffle=False)
    for each in (policy, twin):
        each.learn_on_batch(batch)
    assert_equal(policy.get_weights(), twin.get_weights())


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_collections", "new_programs")
@pytest.mark.soak
def test_policies_in_turn_give_their_memory_back():
    eager, expected = make(seed=3), None
    sizes = []
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
        acted = eager.compute_actions(OBSERVED, explore=False).extras["action_dist_inputs"]
        expected = acted if expected is None else expected
        np.testing.assert_array_equal(acted, expected)
        sizes.append(resident_megabytes())
    assert sizes[-1] - sizes[5] < 10.0


# -- checkpoints, exports and runs ----------------------------------------------------------------


@pytest.mark.core
def test_a_checkpoint_continues_in_graph_mode(tmp_path):
    policy = graph(lr=0.01)
    learn(policy, 0)
    policy.export_checkpoint(tmp_path)
    restored = TFPolicy.from_checkpoint(tmp_path)
    assert type(restored) is PPOTF1Policy
    for each in (policy, restored):
        learn(each, 1)
    assert_equal(policy.get_weights(), restored.get_weights())
    np.testing.assert_array_equal(
        *(each.compute_actions(OBSERVED).actions for each in (policy, restored))
    )
    moved = make(lr=0.01)
    moved.set_state(policy.get_state())
    assert_equal(moved.get_weights(), policy.get_weights())


@pytest.mark.parametrize(
    ("kind", "onnx"),
    telling(itertools.product(["flat", "lstm"], [None, True]), soak=[("lstm", True)]),
)
def test_exports_agree_with_the_session(tmp_path, kind, onnx):
    policy = graph(lr=0.01, **KINDS[kind])
    policy.learn_on_batch(random_batch(policy, 12))
    result = policy.export_model(tmp_path, onnx)
    assert result.parity.largest_difference < 1e-4


def test_acting_may_be_given_to_onnx_runtime():
    by_session, by_onnx = graph(), graph(inference="onnx")
    assert (by_onnx.driver.acting.inference, by_onnx.framework) == ("onnx", "tf")
    np.testing.assert_array_equal(
        *(each.compute_actions(rows_of(OBS, 100)).actions for each in (by_session, by_onnx))
    )


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
    left, right = (each.train()["info"]["learner"] for each in algorithms)
    assert left["default_policy"]["learner_stats"] == pytest.approx(
        right["default_policy"]["learner_stats"], abs=1e-4
    )
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
