"""Forks and global modes: TensorFlow in a process that is not as usual says so at once.

Modes are global and forks copy everything, so the scripts run in processes of their own; what
several tests ask about runs in one.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """
import gc, os, signal, subprocess, sys, tempfile
import gymnasium, keras, numpy as np, tensorflow as tf
from helpers.factories import *
from tfpolicies import *
from tfpolicies.testing import random_batch

KINDS = PPOTF2Policy, PPOTF1Policy, DQNTF2Policy

def error_of(f, *args, **more):
    try:
        f(*args, **more)
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    return "no error"
"""


@functools.cache
def printed_by(script):
    """Runs a script in a process of its own; returns what it printed by headline, as lines."""
    done = subprocess.run(
        [sys.executable, "-c", COMMON + script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _, *parts = done.stdout.split("== ")
    return {name: lines for name, *lines in map(str.splitlines, parts)}


# -- forks ----------------------------------------------------------------------------------------

FORKS = """
def in_child(f):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        print(error_of(f)[:60], flush=True)
        os._exit(0)
    print(end="" if os.waitpid(pid, 0)[1] == 0 else "the child hangs\\n")

print("== before")
in_child(lambda: make().learn_on_batch(random_batch(make(), 8)))

print("== tensorflow")
policy, graph, onnx = make(), make(PPOTF1Policy), make(inference="onnx")
batch, rows = random_batch(policy, 8), rows_of(OBS, 3)
for each in (policy, graph):
    each.compute_actions(rows), each.learn_on_batch(batch)
known = onnx.compute_actions(rows, explore=False)[2]["action_dist_inputs"]
for f in (
    lambda: policy.compute_actions(rows),
    lambda: policy.compute_actions(rows[:1]),
    lambda: policy.compute_log_likelihoods(np.zeros(3, np.int64), rows),
    lambda: policy.learn_on_batch(batch),
    lambda: policy.learn_epochs(batch, 1, 4),
    lambda: policy.compute_gradients(batch),
    lambda: policy.export_model(tempfile.mkdtemp()),
    lambda: policy.export_model(tempfile.mkdtemp(), onnx=True),
    lambda: policy.model,
    lambda: policy.to_keras(),
    lambda: graph.compute_actions(rows),
    lambda: graph.learn_on_batch(batch),
    lambda: graph.copy().get_session(),
    lambda: make(),
    lambda: make(model={"fcnet_hiddens": [3]}),
):
    in_child(f)

print("== numpy")
def act():
    found = onnx.compute_actions(rows, explore=False)[2]["action_dist_inputs"]
    assert np.array_equal(found, known)
    onnx.compute_actions(rows_of(OBS, 7)), onnx.compute_single_action(rows[0])
    onnx.session().act(rows[0])

def keep():
    policy.set_weights(policy.get_weights())
    policy.copy().set_state(policy.get_state())
    policy.export_checkpoint(tempfile.mkdtemp())
    assert batch.slice(2, 5).count == 3

in_child(act), in_child(keep), in_child(lambda: subprocess.run(["true"], check=True))

print("== environments")
make_env = lambda: gymnasium.make("CartPole-v1")
envs = gymnasium.vector.AsyncVectorEnv([make_env] * 2, context="fork")
obs, _ = envs.reset(seed=0)
playing = make(obs=envs.single_observation_space)
for _ in range(3):
    obs, *_ = envs.step(playing.compute_actions(obs)[0])
    playing.learn_on_batch(random_batch(playing, 8))
envs.close()
print(obs.shape)

print("== stash")
paged = PolicyMap(capacity=1)
for name in "ab":
    paged[name] = make(inference="onnx")
wanted = {name: paged[name].get_weights() for name in "ab"}
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    for name in "ab":  # what the child changes does not reach the parent's stash
        changed = [0 * x for x in wanted[name].values()]
        print(error_of(lambda: paged[name].set_weights(changed))[:49])
    del paged
    gc.collect()
    sys.stdout.flush()
    os._exit(0)
os.waitpid(pid, 0)
for name in "ab":
    now = paged[name].get_weights()
    print(all(np.array_equal(now[key], x) for key, x in wanted[name].items()))

print("== parent")
print(error_of(policy.learn_on_batch, batch), error_of(make))
"""

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="only Unix forks")


@needs_fork
def test_tensorflow_in_a_child_forked_after_it_ran_raises_instead_of_hanging():
    says_so = "ForkError: TensorFlow cannot run here: this process was fork"

    assert printed_by(FORKS)["tensorflow"] == [says_so] * 15
    assert printed_by(FORKS)["parent"] == ["no error no error"]


@needs_fork
@pytest.mark.core
def test_numpy_and_onnx_runtime_go_on_working_in_a_forked_child():
    assert printed_by(FORKS)["numpy"] == ["no error"] * 3


@needs_fork
@pytest.mark.core
def test_a_forked_child_neither_writes_to_its_parents_stash_nor_removes_it():
    *child, first, second = printed_by(FORKS)["stash"]

    assert child == ["no error", "StashError: The policy 'a' cannot be written to t"]
    assert [first, second] == ["True", "True"]


@needs_fork
@pytest.mark.core
def test_a_child_forked_before_tensorflow_ran_may_train():
    assert printed_by(FORKS)["before"] == ["no error"]


@needs_fork
@pytest.mark.core
def test_environments_in_forked_processes_go_on_beside_a_policy_that_learns():
    assert printed_by(FORKS)["environments"] == ["(2, 4)"]


# -- global modes ---------------------------------------------------------------------------------

NOT_EAGER = """
for name in ("eager_execution", "v2_behavior"):
    print("==", name)
    getattr(tf.compat.v1, "disable_" + name)()
    print(*[error_of(make, kind) for kind in KINDS], sep="\\n")
    config = PPOConfig().environment("CartPole-v1").debugging(log_level="ERROR")
    print(error_of(config.build))
"""


@pytest.mark.parametrize("mode", ["eager_execution", "v2_behavior"])
def test_without_eager_execution_one_line_says_how_to_get_it_back(mode):
    lines = printed_by(NOT_EAGER)[mode]

    assert len(lines) == 4
    for line in lines:
        assert line.startswith("ConfigError: Eager execution is disabled in this process")
        assert f"tf.compat.v1.disable_{mode}()" in line


MODES = """
print("== floatx")
keras.config.set_floatx("float64")
print(*[error_of(make, kind) for kind in KINDS], sep="\\n")
keras.config.set_floatx("float32")
keras.config.set_dtype_policy("float32")

print("== strategy")
with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
    print(*[error_of(make, kind) for kind in KINDS], sep="\\n")

print("== graph")
with tf.Graph().as_default():
    print(*[error_of(make, kind) for kind in KINDS], sep="\\n")
print(error_of(tf.function(lambda: make(), autograph=False)))

print("== parts of TensorFlow 2")
for name in ("control_flow_v2", "resource_variables"):
    getattr(tf.compat.v1, "disable_" + name)()
    print(error_of(make))
    getattr(tf.compat.v1, "enable_" + name)()
print(error_of(make))

print("== precision")
for name in ("float64", "mixed_float16", "mixed_bfloat16"):
    keras.config.set_dtype_policy(name)
    print(*[error_of(make, kind) for kind in KINDS], sep="\\n")
keras.config.set_dtype_policy("float32")

print("== model")
double = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="float64")])
print(*[error_of(make, kind, model={"custom_model": double}) for kind in KINDS], sep="\\n")
print(*[error_of(make, kind) for kind in KINDS], sep="\\n")

print("== functions")
def numbers(kind, units):
    policy = make(kind, model={"fcnet_hiddens": [4], "custom_model_config": {"units": units}})
    stats = policy.learn_epochs(random_batch(policy, 8), 2, 4)["learner_stats"]
    actions = policy.compute_actions(rows_of(OBS, 3))[0].tolist()
    return actions, {name: float(x) for name, x in stats.items()}, policy.get_weights()

before = [numbers(kind, 1) for kind in KINDS]
tf.config.run_functions_eagerly(True)
for kind, (actions, stats, weights) in zip(KINDS, before):
    now = numbers(kind, 2)  # of another Program
    same = all(np.array_equal(a, b) for a, b in zip(weights.values(), now[2].values()))
    print(actions == now[0], stats == now[1], same)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ("strategy", ["ConfigError: A policy cannot be made inside the scope of a Mirrored"] * 3),
        (
            "graph",
            ["no error"] * 3 + ["ConfigError: A policy cannot be made inside a tf.function."],
        ),
        (
            "parts of TensorFlow 2",
            [
                "ConfigError: tf.compat.v1.disable_control_flow_v2() was called",
                "ConfigError: tf.compat.v1.disable_resource_variables() was called",
                "no error",
            ],
        ),
    ],
)
def test_what_surrounds_a_policy_that_is_made_is_named_in_one_line(around, expected):
    lines = printed_by(MODES)[around]

    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


@pytest.mark.soak
def test_keras_in_another_precision_is_refused_in_one_line():
    lines = printed_by(MODES)["floatx"] + printed_by(MODES)["precision"]

    names = ["float64"] * 6 + ["mixed_float16"] * 3 + ["mixed_bfloat16"] * 3
    assert [line.partition(". ")[0] for line in lines] == [
        f"ModelError: Policies are float32 only, but Keras's global dtype policy is {name!r}"
        for name in names
    ]


@pytest.mark.soak
def test_a_model_in_double_precision_is_refused_in_one_line():
    *refused, first, second, third = printed_by(MODES)["model"]

    assert len(refused) == 3
    for line in refused:
        assert line.startswith("ModelError: The model ")
        assert "policies are float32 only" in line
    assert [first, second, third] == ["no error"] * 3


@pytest.mark.soak
def test_functions_that_run_eagerly_change_no_number():
    assert printed_by(MODES)["functions"] == ["True True True"] * 3
