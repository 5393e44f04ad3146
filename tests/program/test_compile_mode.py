"""How updates are compiled, in what pieces they run, and what an interruption leaves behind."""

import itertools
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import OBS, assert_close, assert_equal, batch_for, make
from helpers.marks import telling
from tfpolicies import PPOConfig, PPOTF1Policy, PPOTF2Policy
from tfpolicies.policy.policy_checkpoints import POLICY_MANIFEST
from tfpolicies.program.chunking import ChunkSizer
from tfpolicies.program.compile_mode import CompileMode, GraphStats, choose_compile_mode
from tfpolicies.program.runtimes import function, runtime
from tfpolicies.storage.checkpoint import read_checkpoint, write_checkpoint
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
    "dense": ({}, CompileMode.LOOP),
    "lstm": ({**MEMORY, "use_lstm": True}, CompileMode.LOOP),
    "large lstm": ({**MEMORY, "use_lstm": True, "lstm_cell_size": 256}, CompileMode.STEP),
    "gru": ({**MEMORY, "use_gru": True}, CompileMode.LOOP),
    "gated transformer": ({**MEMORY, **ATTENTION, "use_attention": True}, CompileMode.LOOP),
    "attention": (
        with_layer(lambda x: keras.layers.MultiHeadAttention(1, 2)(x, x)),
        CompileMode.LOOP,
    ),
    "keras lstm": (with_layer(lambda x: keras.layers.LSTM(3)(x)), CompileMode.LOOP),
    "convolution": (with_layer(lambda x: keras.layers.Conv1D(2, 3)(x)), CompileMode.PLAIN),
    "depthwise": (with_layer(lambda x: keras.layers.DepthwiseConv1D(3)(x)), CompileMode.PLAIN),
    "both": (
        with_layer(lambda x: keras.layers.LSTM(3)(keras.layers.Conv1D(2, 3)(x))),
        CompileMode.PLAIN,
    ),
}


@pytest.mark.parametrize(
    "kind",
    telling(
        KINDS,
        *("dense", "large lstm", "both"),
        soak=["lstm", "gru", "gated transformer", "attention", "keras lstm", "depthwise"],
    ),
)
def test_the_operations_of_an_update_decide_how_it_is_compiled(kind):
    model, expected = KINDS[kind]
    policy = make(model=model, jit_compile="auto")
    policy.driver.learning.resolve_auto_settings()
    assert policy.program.updates.compile_mode is expected
    assert policy.config["jit_compile"] is (expected is not CompileMode.PLAIN)
    wanted = make(model=model, jit_compile=True)
    wanted.driver.learning.resolve_auto_settings()
    assert wanted.program.updates.compile_mode is (
        CompileMode.STEP if expected is CompileMode.PLAIN else expected
    )


def test_a_batch_that_xla_cannot_compile_the_update_of_is_learned_from_without_it(caplog):
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
    plain, compiled = (
        make(policy_class, obs=obs, jit_compile=jit, model=model, lr=0.01) for jit in (False, True)
    )
    batch, results = random_batch(plain, 12), []
    for policy, form in ((plain, CompileMode.PLAIN), (compiled, CompileMode.STEP)):
        policy._learner.discover_columns()
        policy.program.updates.compile_mode = form
        results.append(policy.learn_epochs(batch, 2, 8, shuffle=False)["learner_stats"])
        assert max(policy.program.functions.traces.values()) == 1
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-5)
    assert_close(plain.get_weights(), compiled.get_weights(), atol=1e-5)


# -- pieces -----------------------------------------------------------------------------------


def in_pieces(monkeypatch, policy, minibatches):
    monkeypatch.setattr(
        policy.program.updates._chunk_sizer, "get_chunk_size", lambda size: minibatches
    )


@pytest.mark.parametrize(
    ("policy_class", "jit"),
    telling(
        itertools.product([PPOTF2Policy, PPOTF1Policy], [False, True]),
        soak=[(PPOTF1Policy, True)],
    ),
)
def test_an_update_in_one_two_or_seven_pieces_gives_equal_bits(monkeypatch, policy_class, jit):
    policies = [make(policy_class, jit_compile=jit, lr=0.01) for _ in range(3)]
    program = policies[0].program
    assert all(policy.program is program for policy in policies)
    batch, results = batch_for(policies[0], 26), []
    for policy, pieces in zip(policies, (1, 2, 7), strict=True):
        in_pieces(monkeypatch, policy, 14 // pieces)
        results.append(policy.learn_epochs(batch, 2, 4)["learner_stats"])
    assert results[0] == results[1] == results[2]
    states = [policy.get_state() for policy in policies]
    for other in states[1:]:
        assert_equal(states[0]["weights"], other["weights"])
        assert_equal(states[0]["_optimizer_variables"], other["_optimizer_variables"])
        assert states[0]["num_grad_updates"] == other["num_grad_updates"] == 14
    assert max(program.functions.traces.values()) == 1


def test_calls_have_as_many_minibatches_as_fit_into_half_a_second():
    pace = ChunkSizer()
    assert pace.get_chunk_size(64) == 1
    pace.record(64, 1, 0.15)
    assert (pace.get_chunk_size(64), pace.get_chunk_size(32)) == (3, 1)
    pace.record(64, 3, 6.0)
    assert pace.get_chunk_size(64) == 1
    pace.record(64, 1, 0.0001)
    assert pace.get_chunk_size(64) > 1000


# -- interruptions ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PPOTF1Policy])
def test_an_update_interrupted_between_pieces_leaves_the_policy_as_it_was(
    monkeypatch, policy_class
):
    policy, twin = make(policy_class, lr=0.01), make(policy_class, lr=0.01)
    batch, before = batch_for(policy, 16), policy.get_state()
    came = []

    def minibatches(size):
        came.append(size)
        if len(came) == 3:
            signal.raise_signal(signal.SIGINT)
        return 1

    monkeypatch.setattr(policy.program.updates._chunk_sizer, "get_chunk_size", minibatches)
    with pytest.raises(KeyboardInterrupt):
        policy.learn_epochs(batch, 2, 4)
    after = policy.get_state()
    assert_equal(before["weights"], after["weights"])
    assert_equal(before["_optimizer_variables"], after["_optimizer_variables"])
    assert (after["rng"], after["num_grad_updates"]) == (before["rng"], 0)
    for each in (policy, twin):
        each.learn_epochs(batch, 2, 4)
    assert_equal(policy.get_weights(), twin.get_weights())


def test_minibatches_that_a_callback_sees_are_taken_back_when_they_are_interrupted(monkeypatch):
    class Interrupts(PPOTF2Policy):
        def learn_on_batch(self, postprocessed_batch):
            if self.num_grad_updates == 2:
                signal.raise_signal(signal.SIGINT)
            return super().learn_on_batch(postprocessed_batch)

    policy = make(Interrupts, lr=0.01)
    before = policy.get_state()
    with pytest.raises(KeyboardInterrupt):
        policy.learn_epochs(batch_for(policy, 16), 2, 4)
    after = policy.get_state()
    assert_equal(before["weights"], after["weights"])
    assert (after["rng"], after["num_grad_updates"]) == (before["rng"], 0)


@pytest.mark.soak
@pytest.mark.parametrize("model", [{"fcnet_hiddens": [5]}, {**MEMORY, "use_gru": True}])
def test_a_policy_learns_on_after_its_first_compiled_call_was_interrupted(monkeypatch, model):
    policy, twin = (make(jit_compile=True, lr=0.01, model=model) for _ in range(2))
    batch = random_batch(policy, 16)
    policy._state.rng.bit_generator.state = twin._state.rng.bit_generator.state
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
    for each in (policy, twin):
        each.learn_epochs(batch, 2, 4)
    assert_equal(policy.get_weights(), twin.get_weights())
    assert policy.num_grad_updates == twin.num_grad_updates > 0


def test_the_first_compiled_call_runs_in_a_thread_that_nobody_has_to_wait_for(monkeypatch):
    policy = make(jit_compile=True, lr=0.01, model={"fcnet_hiddens": [6]})
    threads, call = [], function.TracedFunction.warm_up

    def watched(self, *inputs):
        threads.append(threading.current_thread())
        return call(self, *inputs)

    monkeypatch.setattr(function.TracedFunction, "warm_up", watched)
    policy.driver.learning.warm_up(16, 2, 4)
    assert [thread.daemon for thread in threads] == [True]
    policy.learn_epochs(batch_for(policy, 16), 2, 4)
    assert len(threads) == 1


def test_a_graph_takes_tensors_by_name_and_reads_its_variables_as_they_are_now():
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


# -- forms that fail or take long -------------------------------------------------------------

GIVE_WAY = [
    "learning is compiled step by step, since XLA cannot compile its loop: ",
    "learning runs without XLA, which cannot compile it: ",
]


def fails(self, *inputs):
    raise tf.errors.InternalError(None, None, "Autotuner could not find any supported configs")


@pytest.mark.parametrize("jit", ["auto", True])
def test_a_form_that_cannot_be_compiled_gives_way_to_the_next(monkeypatch, caplog, jit):
    own = {"lr": 0.01, "model": {"fcnet_hiddens": [8]}}
    policy, plain = make(jit_compile=jit, **own), make(**own)
    batch = batch_for(plain, 8)
    monkeypatch.setattr(function.TracedFunction, "warm_up", fails)
    for _ in range(2):
        assert policy.learn_epochs(batch, 2, 4)["num_agent_steps_trained"] == 8
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"{line}Autotuner could not find any supported configs" for line in GIVE_WAY]
    assert policy.program.updates.compile_mode is CompileMode.PLAIN
    for _ in range(2):
        plain.learn_epochs(batch, 2, 4)
    assert_close(policy.get_weights(), plain.get_weights(), atol=1e-6)
    assert policy.num_grad_updates == plain.num_grad_updates


def test_a_form_that_takes_long_gives_way_and_its_late_end_changes_nothing(monkeypatch, caplog):
    own = {"lr": 0.01, "model": {"fcnet_hiddens": [7]}}
    policy, plain = make(jit_compile="auto", **own), make(**own)
    batch, release, ends = batch_for(plain, 8), threading.Event(), []
    call = function.TracedFunction.warm_up

    def slow(self, *inputs):
        release.wait(60)
        call(self, *inputs)
        ends.append(self)

    monkeypatch.setattr(function.TracedFunction, "warm_up", slow)
    monkeypatch.setattr(runtime, "COMPILE_SECONDS", 0.1)
    policy.learn_epochs(batch, 2, 4)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"{line}it took longer than 0.1 s" for line in GIVE_WAY]
    release.set()
    while len(ends) < 2:  # both forms end, on variables of their own
        time.sleep(0.05)
    policy.learn_epochs(batch, 2, 4)
    for _ in range(2):
        plain.learn_epochs(batch, 2, 4)
    assert_close(policy.get_weights(), plain.get_weights(), atol=1e-6)


def test_a_session_whose_form_takes_long_gives_way_too(monkeypatch, caplog):
    own = {"lr": 0.01, "model": {"fcnet_hiddens": [7]}}
    policy, plain = (make(PPOTF1Policy, jit_compile=jit, **own) for jit in (True, False))
    batch, began = batch_for(plain, 8), []

    def run(self, key, call, meanwhile):
        if key is None:
            return False
        began.append(call)
        raise runtime.NotCompiledError("it took longer than 60 s")

    monkeypatch.setattr(runtime.WarmUpCalls, "run", run)
    policy.learn_epochs(batch, 2, 4)
    for call in began:
        call()  # late
    for _ in range(2):
        plain.learn_epochs(batch, 2, 4)
    policy.learn_epochs(batch, 2, 4)
    assert len(caplog.records) == 2
    assert_close(policy.get_weights(), plain.get_weights(), atol=1e-6)


def test_a_process_ends_while_xla_compiles():
    code = """
import sys, time
sys.path.insert(0, "tests")
from helpers.factories import batch_for, make
from tfpolicies.program.runtimes import function, runtime

runtime.COMPILE_SECONDS = 0.1
function.TracedFunction.warm_up = lambda self, *inputs: time.sleep(600)
policy = make(jit_compile="auto")
policy.learn_epochs(batch_for(policy, 8), 2, 4)
print("learned", policy.num_grad_updates)
"""
    command, folder = [sys.executable, "-c", code], Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "learned 4\n")


def work(**more):
    nothing = {"has_convolutions": False, "is_recurrent": False, "has_control_flow": False}
    return GraphStats(**{**nothing, "num_operations": 100, "num_weights": 10_000_000, **more})


@pytest.mark.core
@pytest.mark.parametrize(
    ("step", "form"),
    [
        (work(), CompileMode.LOOP),
        (work(is_recurrent=True), CompileMode.LOOP),
        (work(has_convolutions=True), CompileMode.PLAIN),
        (work(has_convolutions=True, is_recurrent=True), CompileMode.PLAIN),
        (work(num_operations=20_000), CompileMode.PLAIN),
    ],
)
def test_on_a_gpu_only_convolutions_and_unrolled_recurrences_are_plain(step, form):
    assert choose_compile_mode(step, allow_plain=True, on_cpu=False) is form
    expected = CompileMode.STEP if form is CompileMode.PLAIN else form
    assert choose_compile_mode(step, allow_plain=False, on_cpu=False) is expected


# -- checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_old", [False, True])
def test_an_auto_of_a_checkpoint_that_the_rule_would_not_choose_is_resolved_anew(
    tmp_path, caplog, is_old
):
    caplog.set_level("WARNING", "tfpolicies")
    policy = make(obs=IMAGES, model=CONVOLUTIONS, jit_compile="auto")
    policy.config["jit_compile"] = True  # as the rule said once
    policy.export_checkpoint(tmp_path)
    if is_old:
        checkpoint = read_checkpoint(tmp_path, POLICY_MANIFEST, kind="Policy")
        added = ("automatic", "arrays", "checksum", "format_version", "policies")
        old = {k: x for k, x in checkpoint.manifest.items() if k not in added}
        old.pop("tfpolicies_version")
        write_checkpoint(tmp_path, POLICY_MANIFEST, old, checkpoint.arrays)
    restored = PPOTF2Policy.from_checkpoint(tmp_path)
    restored.driver.learning.resolve_auto_settings()
    restored.driver.learning.resolve_auto_settings()
    assert restored.config["jit_compile"] is False
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("jit_compile='auto' now resolves to False")
    kept = PPOTF2Policy.from_checkpoint(tmp_path, config={"jit_compile": True})
    kept.driver.learning.resolve_auto_settings()
    assert kept.config["jit_compile"] is True
    assert kept.program.updates.compile_mode is CompileMode.STEP


def test_what_a_user_chose_stays_in_checkpoints(tmp_path, caplog):
    make(obs=IMAGES, model=CONVOLUTIONS, jit_compile=True).export_checkpoint(tmp_path)
    restored = PPOTF2Policy.from_checkpoint(tmp_path)
    restored.driver.learning.resolve_auto_settings()
    assert restored.config["jit_compile"] is True
    assert not caplog.records


def test_each_policy_of_an_algorithm_resolves_auto_for_itself():
    config = PPOConfig().framework(jit_compile="auto", inference="tf")
    config.record_resolved(jit_compile=True)  # what it became for another policy
    assert config.jit_compile is True
    policy = PPOTF2Policy(IMAGES, spaces.Discrete(2), config.training(model=CONVOLUTIONS))
    policy.driver.learning.resolve_auto_settings()
    assert policy.config["jit_compile"] is False
    assert config.framework(jit_compile=False).get_auto_settings() == []
