"""Compilation of updates, chunks in which they run, and interruptions."""

import itertools
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.checkpoints import edit_checkpoint
from helpers.factories import OBS, assert_close, assert_equal, batch_for, make
from helpers.marks import telling
from helpers.processes import run_python
from tfpolicies import PPOConfig, PPOTF1Policy, PPOTF2Policy
from tfpolicies.program.chunking import ChunkSizer
from tfpolicies.program.compile_mode import CompileMode, GraphStats, choose_compile_mode
from tfpolicies.program.runtimes import function, runtime
from tfpolicies.testing import random_batch

IMAGES = spaces.Box(0, 255, (12, 12, 1), np.uint8)
CONVOLUTIONS = {"conv_filters": [[2, 4, 4], [2, 3, 1]]}
MEMORY = {"fcnet_hiddens": [3], "lstm_cell_size": 4, "max_seq_len": 4}
ATTENTION = {"attention_dim": 4, "attention_head_dim": 2, "attention_memory_inference": 3}
ATTENTION |= {"attention_memory_training": 3, "attention_position_wise_mlp_dim": 4}


def with_layer(make_layer):
    """Returns a factory of models with a layer `[B, 6, 2] -> [B, ...]` before the outputs."""

    def model(observation_space, num_outputs):
        inputs = keras.Input(observation_space.shape)
        x = keras.layers.Reshape((6, 2))(keras.layers.Dense(12)(inputs))
        x = keras.layers.Flatten()(make_layer(x))
        return keras.Model(inputs, keras.layers.Dense(num_outputs)(x))

    return {"custom_model": model}


KINDS = {
    "dense": {},
    "lstm": {**MEMORY, "use_lstm": True},
    "large lstm": {**MEMORY, "use_lstm": True, "lstm_cell_size": 256},
    "gru": {**MEMORY, "use_gru": True},
    "gated transformer": {**MEMORY, **ATTENTION, "use_attention": True},
    "attention": with_layer(lambda x: keras.layers.MultiHeadAttention(1, 2)(x, x)),
    "keras lstm": with_layer(lambda x: keras.layers.LSTM(3)(x)),
    "convolution": with_layer(lambda x: keras.layers.Conv1D(2, 3)(x)),
    "depthwise": with_layer(lambda x: keras.layers.DepthwiseConv1D(3)(x)),
    "both": with_layer(lambda x: keras.layers.LSTM(3)(keras.layers.Conv1D(2, 3)(x))),
}
MODES = {"large lstm": CompileMode.STEP}
MODES |= dict.fromkeys(("convolution", "depthwise", "both"), CompileMode.PLAIN)
SLOW = ["lstm", "gru", "gated transformer", "attention", "keras lstm", "depthwise"]


@pytest.mark.parametrize("kind", telling(KINDS, *("dense", "large lstm", "both"), soak=SLOW))
def test_the_operations_of_an_update_decide_how_it_is_compiled(kind):
    model, expected = KINDS[kind], MODES.get(kind, CompileMode.LOOP)
    policy = make(model=model, jit_compile="auto")
    policy.driver.learning.resolve_auto_settings()
    assert policy.program.updates.compile_mode is expected
    assert policy.config["jit_compile"] is (expected is not CompileMode.PLAIN)
    compiled = make(model=model, jit_compile=True)
    compiled.driver.learning.resolve_auto_settings()
    step = CompileMode.STEP if expected is CompileMode.PLAIN else expected
    assert compiled.program.updates.compile_mode is step


def test_an_update_that_xla_cannot_compile_runs_without_it(caplog):
    class Reading(PPOTF2Policy):
        def loss(self, model, dist_class, train_batch):
            self._lengths = tf.strings.length(tf.strings.as_string(train_batch["actions"]))
            return super().loss(model, dist_class, train_batch)

        def extra_learn_fetches_fn(self):
            return {"lengths": self._lengths}

    policy, plain = make(Reading, jit_compile="auto", lr=0.01), make(lr=0.01)
    batch = batch_for(plain, 6)
    for each in (policy, plain):
        result = each.learn_on_batch(batch)
        assert result.get("lengths", np.ones(6)).tolist() == [1] * 6
    assert "learning runs without XLA, which cannot compile it" in caplog.text
    assert_close(policy.get_weights(), plain.get_weights(), atol=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
@pytest.mark.parametrize("model", [CONVOLUTIONS, {**MEMORY, "use_gru": True}])
def test_a_plain_loop_around_a_compiled_step_gives_the_same_numbers(policy_class, model):
    obs = IMAGES if model is CONVOLUTIONS else OBS
    config = {"obs": obs, "model": model, "lr": 0.01}
    plain, compiled = (make(policy_class, jit_compile=jit, **config) for jit in (False, True))
    batch, results = random_batch(plain, 12), []
    for policy, mode in ((plain, CompileMode.PLAIN), (compiled, CompileMode.STEP)):
        policy._learner.discover_columns()
        policy.program.updates.compile_mode = mode
        results.append(policy.learn_epochs(batch, 2, 8, shuffle=False)["learner_stats"])
        assert max(policy.program.functions.traces.values()) == 1
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-5)
    assert_close(plain.get_weights(), compiled.get_weights(), atol=1e-5)


@pytest.mark.parametrize(
    ("policy_class", "jit"),
    telling(
        itertools.product([PPOTF2Policy, PPOTF1Policy], [False, True]),
        soak=[(PPOTF1Policy, True)],
    ),
)
def test_an_update_in_one_two_or_seven_chunks_gives_equal_bits(monkeypatch, policy_class, jit):
    policies = [make(policy_class, jit_compile=jit, lr=0.01) for _ in range(3)]
    program = policies[0].program
    assert all(policy.program is program for policy in policies)
    batch, results = batch_for(policies[0], 26), []
    sizer = program.updates._chunk_sizer
    for policy, minibatches in zip(policies, (14, 7, 2), strict=True):
        monkeypatch.setattr(sizer, "get_chunk_size", lambda size, count=minibatches: count)
        results.append(policy.learn_epochs(batch, 2, 4)["learner_stats"])
    assert results[0] == results[1] == results[2]
    states = [policy.get_state() for policy in policies]
    for other in states[1:]:
        assert_equal(states[0]["weights"], other["weights"])
        assert_equal(states[0]["_optimizer_variables"], other["_optimizer_variables"])
        assert states[0]["num_grad_updates"] == other["num_grad_updates"] == 14
    assert max(program.functions.traces.values()) == 1


def test_calls_have_as_many_minibatches_as_fit_into_half_a_second():
    sizer = ChunkSizer()
    assert sizer.get_chunk_size(64) == 1
    sizer.record(64, 1, 0.15)
    assert (sizer.get_chunk_size(64), sizer.get_chunk_size(32)) == (3, 1)
    sizer.record(64, 3, 6.0)
    assert sizer.get_chunk_size(64) == 1
    sizer.record(64, 1, 0.0001)
    assert sizer.get_chunk_size(64) > 1000


def assert_unchanged(policy, before):
    """Asserts that a policy is as new, with the state `before`."""
    after = policy.get_state()
    for part in ("weights", "_optimizer_variables"):
        assert_equal(before[part], after[part])
    assert (after["rng"], after["num_grad_updates"]) == (before["rng"], 0)


def assert_learn_alike(policy, twin, batch):
    for each in (policy, twin):
        each.learn_epochs(batch, 2, 4)
    assert_equal(policy.get_weights(), twin.get_weights())
    assert policy.num_grad_updates == twin.num_grad_updates > 0


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_an_update_interrupted_between_chunks_changes_nothing(monkeypatch, policy_class):
    policy, twin = make(policy_class, lr=0.01), make(policy_class, lr=0.01)
    batch, before, sizes = batch_for(policy, 16), policy.get_state(), []

    def get_chunk_size(size):
        sizes.append(size)
        if len(sizes) == 3:
            signal.raise_signal(signal.SIGINT)
        return 1

    monkeypatch.setattr(policy.program.updates._chunk_sizer, "get_chunk_size", get_chunk_size)
    with pytest.raises(KeyboardInterrupt):
        policy.learn_epochs(batch, 2, 4)
    assert_unchanged(policy, before)
    assert_learn_alike(policy, twin, batch)


def test_minibatches_of_a_method_are_reverted_when_they_are_interrupted():
    class Interrupts(PPOTF2Policy):
        def learn_on_batch(self, postprocessed_batch):
            if self.num_grad_updates == 2:
                signal.raise_signal(signal.SIGINT)
            return super().learn_on_batch(postprocessed_batch)

    policy = make(Interrupts, lr=0.01)
    before = policy.get_state()
    with pytest.raises(KeyboardInterrupt):
        policy.learn_epochs(batch_for(policy, 16), 2, 4)
    assert_unchanged(policy, before)


@pytest.mark.soak
@pytest.mark.parametrize("model", [{"fcnet_hiddens": [5]}, {**MEMORY, "use_gru": True}])
def test_a_policy_learns_after_its_first_compiled_call_was_interrupted(monkeypatch, model):
    policy, twin = (make(jit_compile=True, lr=0.01, model=model) for _ in range(2))
    batch = random_batch(policy, 16)
    policy.driver.acting.state.rng.bit_generator.state = (
        twin.driver.acting.state.rng.bit_generator.state
    )
    before = policy.get_state()
    policy._learner.discover_columns()
    call, release = function.TracedFunction.warm_up, threading.Event()

    def interrupts(self, *inputs):
        if not release.is_set():
            signal.raise_signal(signal.SIGINT)  # in the main thread, which waits
            release.wait(60)
        return call(self, *inputs)

    monkeypatch.setattr(function.TracedFunction, "warm_up", interrupts)
    with pytest.raises(KeyboardInterrupt):
        policy.learn_epochs(batch, 2, 4)
    assert_equal(before["weights"], policy.get_weights())
    release.set()  # only now does the call that was interrupted run
    assert_learn_alike(policy, twin, batch)


def test_the_first_compiled_call_runs_in_a_daemon_thread(monkeypatch):
    policy = make(jit_compile=True, lr=0.01, model={"fcnet_hiddens": [6]})
    threads, call = [], function.TracedFunction.warm_up

    def warm_up(self, *inputs):
        threads.append(threading.current_thread())
        return call(self, *inputs)

    monkeypatch.setattr(function.TracedFunction, "warm_up", warm_up)
    policy.driver.learning.warm_up(16, 2, 4)
    assert [thread.daemon for thread in threads] == [True]
    policy.learn_epochs(batch_for(policy, 16), 2, 4)
    assert len(threads) == 1


def test_a_graph_takes_tensors_by_name_and_reads_the_present_variables():
    weight, number = tf.Variable(2.0), tf.TensorSpec([], tf.float32)
    graph = function.TracedFunction(
        lambda x, y: {"sum": weight * x["b"] + x["a"], "last": y},
        [{"b": number, "a": number}, number],
        "/cpu:0",
    )
    inputs = {"a": tf.constant(1.0), "b": tf.constant(10.0)}, tf.constant(5.0)
    assert graph(*inputs) == {"sum": 21.0, "last": 5.0}
    weight.assign(3.0)
    assert graph(*inputs) == {"sum": 31.0, "last": 5.0}


FALLBACKS = [
    "learning is compiled step by step, since XLA cannot compile its loop: ",
    "learning runs without XLA, which cannot compile it: ",
]


def make_pair(jit="auto", policy_class=PPOTF2Policy, units=7):
    """Makes a policy that is compiled, and one that is not."""
    model = {"fcnet_hiddens": [units]}
    return (make(policy_class, jit_compile=x, lr=0.01, model=model) for x in (jit, False))


def assert_learned_twice(policy, plain, batch):
    """Asserts that a policy has learned from a batch twice, in 2 epochs of minibatches of 4."""
    for _ in range(2):
        plain.learn_epochs(batch, 2, 4)
    assert_close(policy.get_weights(), plain.get_weights(), atol=1e-6)
    assert policy.num_grad_updates == plain.num_grad_updates


def get_lines(caplog):
    return [record.getMessage() for record in caplog.records]


def fail(self, *inputs):
    raise tf.errors.InternalError(None, None, "Autotuner could not find any supported configs")


@pytest.mark.parametrize("jit", ["auto", True])
def test_a_mode_that_cannot_be_compiled_falls_back_to_the_next(monkeypatch, caplog, jit):
    policy, plain = make_pair(jit, units=8)
    batch = batch_for(plain, 8)
    monkeypatch.setattr(function.TracedFunction, "warm_up", fail)
    for _ in range(2):
        assert policy.learn_epochs(batch, 2, 4)["num_agent_steps_trained"] == 8
    cause = "Autotuner could not find any supported configs"
    assert get_lines(caplog) == [line + cause for line in FALLBACKS]
    assert policy.program.updates.compile_mode is CompileMode.PLAIN
    assert_learned_twice(policy, plain, batch)


def test_a_mode_that_takes_long_falls_back_and_its_late_end_changes_nothing(monkeypatch, caplog):
    policy, plain = make_pair()
    batch, release, ends = batch_for(plain, 8), threading.Event(), []
    call = function.TracedFunction.warm_up

    def slow(self, *inputs):
        release.wait(60)
        call(self, *inputs)
        ends.append(self)

    monkeypatch.setattr(function.TracedFunction, "warm_up", slow)
    monkeypatch.setattr(runtime, "COMPILE_SECONDS", 0.1)
    policy.learn_epochs(batch, 2, 4)
    assert get_lines(caplog) == [f"{line}it took longer than 0.1 s" for line in FALLBACKS]
    release.set()
    while len(ends) < 2:  # both modes end, on other variables
        time.sleep(0.05)
    policy.learn_epochs(batch, 2, 4)
    assert_learned_twice(policy, plain, batch)


def test_a_session_whose_mode_takes_long_also_falls_back(monkeypatch, caplog):
    policy, plain = make_pair(True, PPOTF1Policy)
    batch, calls = batch_for(plain, 8), []

    def run(self, key, call, meanwhile):
        if key is None:
            return False
        calls.append(call)
        raise runtime.NotCompiledError("it took longer than 60 s")

    monkeypatch.setattr(runtime.WarmUpCalls, "run", run)
    policy.learn_epochs(batch, 2, 4)
    for call in calls:
        call()  # late
    policy.learn_epochs(batch, 2, 4)
    assert_learned_twice(policy, plain, batch)
    assert len(caplog.records) == 2


def test_a_process_ends_while_xla_compiles():
    code = """
import time
from helpers.factories import batch_for, make
from tfpolicies.program.runtimes import function, runtime

runtime.COMPILE_SECONDS = 0.1
function.TracedFunction.warm_up = lambda self, *inputs: time.sleep(600)
policy = make(jit_compile="auto")
policy.learn_epochs(batch_for(policy, 8), 2, 4)
print("learned", policy.num_grad_updates)
"""
    assert run_python(code).stdout == "learned 4\n"


def make_stats(**changes):
    names = ("has_convolutions", "is_recurrent", "has_control_flow", "calls_python")
    flags = dict.fromkeys(names, False)
    return GraphStats(**{**flags, "num_operations": 100, "num_weights": 10_000_000, **changes})


@pytest.mark.core
@pytest.mark.parametrize(
    ("stats", "mode"),
    [
        (make_stats(), CompileMode.LOOP),
        (make_stats(is_recurrent=True), CompileMode.LOOP),
        (make_stats(has_convolutions=True), CompileMode.PLAIN),
        (make_stats(has_convolutions=True, is_recurrent=True), CompileMode.PLAIN),
        (make_stats(num_operations=20_000), CompileMode.PLAIN),
    ],
)
def test_on_a_gpu_only_convolutions_and_unrolled_recurrences_are_plain(stats, mode):
    assert choose_compile_mode(stats, allow_plain=True, on_cpu=False) is mode
    expected = CompileMode.STEP if mode is CompileMode.PLAIN else mode
    assert choose_compile_mode(stats, allow_plain=False, on_cpu=False) is expected


def test_calls_of_python_are_not_compiled():
    stats = make_stats(calls_python=True)
    for on_cpu in (False, True):
        assert choose_compile_mode(stats, allow_plain=True, on_cpu=on_cpu) is CompileMode.PLAIN


@pytest.mark.parametrize("is_old", [False, True])
def test_an_auto_of_a_checkpoint_is_resolved_again(tmp_path, caplog, is_old):
    caplog.set_level("WARNING", "tfpolicies")
    policy = make(obs=IMAGES, model=CONVOLUTIONS, jit_compile="auto")
    policy.config["jit_compile"] = True  # as the rule said once
    policy.export_checkpoint(tmp_path)
    if is_old:
        with edit_checkpoint(tmp_path) as manifest:
            del manifest["automatic"]
    restored = PPOTF2Policy.from_checkpoint(tmp_path)
    restored.driver.learning.resolve_auto_settings()
    restored.driver.learning.resolve_auto_settings()
    assert restored.config["jit_compile"] is False
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("jit_compile='auto' now resolves to False")
    compiled = PPOTF2Policy.from_checkpoint(tmp_path, config={"jit_compile": True})
    compiled.driver.learning.resolve_auto_settings()
    assert compiled.config["jit_compile"] is True
    assert compiled.program.updates.compile_mode is CompileMode.STEP


def test_settings_of_users_stay_in_checkpoints(tmp_path, caplog):
    make(obs=IMAGES, model=CONVOLUTIONS, jit_compile=True).export_checkpoint(tmp_path)
    restored = PPOTF2Policy.from_checkpoint(tmp_path)
    restored.driver.learning.resolve_auto_settings()
    assert restored.config["jit_compile"] is True
    assert not caplog.records


def test_each_policy_of_an_algorithm_resolves_auto_for_itself():
    config = PPOConfig().framework(jit_compile="auto", inference="tf")
    config.record_resolved(jit_compile=True)  # resolved for another policy
    assert config.jit_compile is True
    policy = PPOTF2Policy(IMAGES, spaces.Discrete(2), config.training(model=CONVOLUTIONS))
    policy.driver.learning.resolve_auto_settings()
    assert policy.config["jit_compile"] is False
    assert config.framework(jit_compile=False).get_auto_settings() == []
