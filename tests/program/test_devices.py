"""Learning on another device than TensorFlow's first, and what a process takes of a GPU."""

import contextlib
import functools
import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import make
from helpers.marks import telling
from tfpolicies import PPOTF2Policy
from tfpolicies.program import devices, functions
from tfpolicies.program.devices import choose_learner_device
from tfpolicies.system import gpus

_CHILD = """
import contextlib, json, logging, sys
import numpy as np
import tensorflow as tf
from gymnasium import spaces
from tensorflow.python.eager import context

two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
sys.path.insert(0, "tests")
from helpers import factories
from tfpolicies import DQNTF2Policy, PPOTF1Policy, PPOTF2Policy, SACTF2Policy
from tfpolicies.program import functions
from tfpolicies.program.compile_mode import CompileMode
from tfpolicies.testing import random_batch

functions.choose_learner_device = lambda num_gpus: "/cpu:1" if num_gpus else "/cpu:0"
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("tfpolicies").addHandler(handler)

IMAGES = {"obs": spaces.Box(0, 255, (12, 12, 1), np.uint8)}
CONVOLUTIONS = {**IMAGES, "model": {"conv_filters": [[2, 4, 4], [2, 3, 1]]}}
MEMORY = {"fcnet_hiddens": [3], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 4}
KINDS = {
    "loop": (PPOTF2Policy, {"jit_compile": "auto", "observation_filter": "MeanStdFilter"}),
    "step": (PPOTF2Policy, {"jit_compile": True, **CONVOLUTIONS}),
    "plain": (PPOTF2Policy, {"jit_compile": False, **CONVOLUTIONS}),
    "memory": (PPOTF2Policy, {"jit_compile": False, "model": MEMORY}),
    "targets": (DQNTF2Policy, {"jit_compile": False}),
    "networks": (SACTF2Policy, {"jit_compile": False, "actions": factories.PLANE}),
    "graph": (
        PPOTF1Policy,
        {"jit_compile": True, "tf_session_args": {"device_count": {"CPU": 2}}},
    ),
}


def device_of(name):
    return name[-5:]


def operations_in(graphs):
    return sorted({
        f"{device_of(node.device)} {node.op}"
        for graph in graphs for node in graph.node
        if node.op not in ("_Arg", "_DeviceArg", "_Send", "_EagerConst", "_Retval")
    })


def run(kind, num_gpus, default):
    policy_class, config = KINDS[kind]
    context.context().enable_run_metadata()
    with tf.device(default) if default else contextlib.nullcontext():
        policy = factories.make(policy_class, num_gpus=num_gpus, lr=0.01, **config)
        batch = random_batch(policy, 12)
        policy._learner.discover_columns()
        if kind == "step":
            policy.program.updates.compile_mode = CompileMode.STEP
        acted = policy.compute_actions(batch["obs"], explore=False) if kind != "memory" else None
        acting = context.context().export_run_metadata().partition_graphs
        stats = policy.learn_epochs(batch, 2, 8, shuffle=False)["learner_stats"]
        graphs = context.context().export_run_metadata().partition_graphs
    inside = policy.program.runtime.functions
    return {
        "form": policy.program.updates.compile_mode.name,
        "variables": sorted({device_of(x.handle.device) for x in inside.resident}),
        "operations": operations_in(graphs),
        "convolutions": [x for x in operations_in(acting) if "FusedConv2D" in x],
        "loss": stats.get("total_loss", stats.get("mean_td_error", 0.0)),
        "weights": sum(float(np.abs(x).sum()) for x in policy.get_weights().values()),
        "actions": np.ravel(acted.actions).tolist() if acted else [],
    }


found = {
    kind: {
        "second": run(kind, 1, None),
        "first": run(kind, 0, "/cpu:1"),  # as if what is not pinned were on a GPU
    }
    for kind in sys.argv[1:]
}
print(json.dumps({"kinds": found, "lines": lines}))
"""

QUICK = {"loop": "LOOP", "plain": "PLAIN", "memory": "PLAIN"}
SLOW = {"step": "STEP", "targets": "PLAIN", "networks": "PLAIN", "graph": "LOOP"}
KINDS = telling({**QUICK, **SLOW}, *QUICK, soak=SLOW)


@functools.cache
def learn(*kinds):
    """Returns what policies did in a process with two devices."""
    command, folder = [sys.executable, "-c", _CHILD, *kinds], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def learn_as(kind):
    """Returns what a policy did that learned on the second device, on the first, and the lines."""
    result = learn(*(QUICK if kind in QUICK else SLOW))
    return *(result["kinds"][kind][where] for where in ("second", "first")), result["lines"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_an_update_is_on_the_device_that_learns(kind):
    *results, lines = learn_as(kind)
    for result, device in zip(results, ("CPU:1", "CPU:0"), strict=True):
        assert (result["form"], result["variables"]) == ({**QUICK, **SLOW}[kind], [device])
        if kind != "graph":  # a session does not say where its operations run
            operations = result["operations"]
            assert {line.split()[0] for line in operations} == {device}, operations
    assert lines == []  # XLA refuses none


def test_a_network_with_convolutions_acts_where_it_learns():
    for result, device in zip(learn_as("plain"), ("CPU:1", "CPU:0"), strict=False):
        (operation,) = result["convolutions"]  # oneDNN has one of its own on some processors
        assert re.fullmatch(rf"{device} _(MklNative)?FusedConv2D", operation)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_changes_no_number(kind):
    second, first, _ = learn_as(kind)
    for name in ("loss", "weights", "actions"):
        assert second[name] == pytest.approx(first[name], rel=1e-6), name


# -- what TensorFlow takes of a GPU ------------------------------------------------------------


class Machine:
    """Stands for TensorFlow's settings on a machine with a GPU."""

    def __init__(self, monkeypatch, *, started=False):
        self.done, self.started, self.visible, self.grows = [], started, ["GPU:0"], False
        config = tf.config
        monkeypatch.setattr(config, "get_visible_devices", lambda kind: self.visible)
        monkeypatch.setattr(config, "set_visible_devices", self.see)
        monkeypatch.setattr(config, "get_logical_device_configuration", lambda gpu: None)
        monkeypatch.setattr(config.experimental, "get_memory_growth", lambda gpu: self.grows)
        monkeypatch.setattr(config.experimental, "set_memory_growth", self.grow)

    def see(self, devices, kind):
        if self.started:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = devices
        self.done.append(["see", devices, kind])

    def grow(self, gpu, grows):
        self.grows = grows
        self.done.append(["grow", gpu, grows])


@pytest.fixture
def fresh(monkeypatch):
    """Lets this process be another one, which may be claimed."""
    monkeypatch.delenv(gpus.GROWTH_VARIABLE, raising=False)
    monkeypatch.setattr(gpus, "_process_role", {"is_own": False, "only_samples": False})
    for each in (gpus.limit_gpus, gpus.warn_without_gpu):
        each.cache_clear()
    yield monkeypatch
    for each in (gpus.limit_gpus, gpus.warn_without_gpu):
        each.cache_clear()


@pytest.mark.core
def test_in_a_users_process_one_line_says_how_and_nothing_is_set(fresh, caplog):
    machine = Machine(fresh)
    for _ in range(2):
        gpus.limit_gpus(uses_gpu=False)
    assert "num_gpus=0" in caplog.text
    assert "tf.config.set_visible_devices([], 'GPU')" in caplog.text
    assert "TF_FORCE_GPU_ALLOW_GROWTH=true" in caplog.text
    gpus.limit_gpus(uses_gpu=True)
    assert (len(caplog.records), machine.done) == (2, [])


@pytest.mark.core
@pytest.mark.parametrize("how", ["variable", "growth", "hidden"])
def test_where_a_user_limits_the_gpu_nothing_is_said(fresh, caplog, how):
    machine = Machine(fresh)
    if how == "variable":
        fresh.setenv(gpus.GROWTH_VARIABLE, "true")
    elif how == "growth":
        machine.grows = True
    else:
        machine.visible = []
    for expected in (False, True):
        gpus.limit_gpus(uses_gpu=expected)
    assert (caplog.records, machine.done) == ([], [])


@pytest.mark.core
def test_in_a_process_of_the_package_the_gpu_is_hidden_unless_it_is_wanted(fresh, caplog):
    machine = Machine(fresh)
    gpus.claim_process()
    gpus.limit_gpus(uses_gpu=True)
    gpus.limit_gpus(uses_gpu=False)
    assert machine.done == [["grow", "GPU:0", True], ["see", [], "GPU"]]
    assert caplog.records == []


def test_a_process_whose_tensorflow_has_started_is_left_as_it_is(fresh, caplog):
    machine = Machine(fresh, started=True)
    gpus.claim_process()
    gpus.limit_gpus(uses_gpu=False)
    assert machine.visible == ["GPU:0"]
    assert len(caplog.records) == 1


@pytest.mark.core
def test_the_command_line_claims_its_process_and_a_call_of_it_does_not(fresh):
    from tfpolicies import cli

    assert cli.main(["--version"]) == 0
    assert not gpus._process_role["is_own"]
    fresh.setattr(sys, "path", ["", *sys.path])
    cli._prepare_process()
    assert gpus._process_role == {"is_own": True, "only_samples": False}


def test_a_worker_that_only_samples_misses_no_gpu(fresh, caplog):
    gpus.claim_process(only_samples=True)
    assert choose_learner_device(1, 0) == "/cpu:0"
    assert caplog.records == []
    gpus.claim_process()
    gpus.warn_without_gpu.cache_clear()
    assert [choose_learner_device(1, 0) for _ in range(2)] == ["/cpu:0"] * 2
    assert [x.getMessage() for x in caplog.records] == [
        "num_gpus=1, but there is no GPU: learning runs on the CPU"
    ]


@pytest.mark.core
def test_a_checkpoint_finds_its_device_again_and_one_line_says_so(fresh, caplog, tmp_path):
    gpus.warn_without_gpu.cache_clear()
    policy = make(num_gpus=1, model={"fcnet_hiddens": [9]})
    assert policy.devices == ["/cpu:0"]
    policy.export_checkpoint(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "num_gpus=1, but there is no GPU: learning runs on the CPU"
    del policy
    gc.collect()  # its Program, too
    caplog.clear()
    fresh.setattr(
        functions, "choose_learner_device", lambda num_gpus: "/gpu:0"
    )  # as if there were one
    fresh.setattr(devices, "get_device_context", lambda: contextlib.nullcontext)
    restored = PPOTF2Policy.from_checkpoint(tmp_path)
    assert restored.devices == ["/gpu:0"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "learned on the CPU; with num_gpus=1 it now learns on the GPU" in line


@pytest.mark.core
def test_acting_is_on_the_gpu_for_images_alone(fresh):
    fresh.setattr(functions, "choose_learner_device", lambda num_gpus: "/gpu:0")
    fresh.setattr(devices, "get_device_context", lambda: contextlib.nullcontext)
    images = spaces.Box(0, 255, (12, 12, 1), np.uint8)
    filters = {"conv_filters": [[2, 4, 4], [2, 3, 1]]}
    seeing = make(obs=images, num_gpus=1, model=filters, inference="auto")
    dense = make(num_gpus=1, model={"fcnet_hiddens": [9]}, inference="auto")
    assert seeing.program.functions.acting_device == "/gpu:0"
    assert seeing.program.inference.auto_runtimes == ["tf"]
    assert dense.program.functions.acting_device == "/cpu:0"
    assert dense.program.inference.auto_runtimes == ["onnx", "tf"]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("uint8", (6, 6, 3)), ("int8", (4,)), ("uint16", (3, 2)), ("uint8", (5,)), ("float32", (3,))],
)
def test_rows_gathered_for_a_gpu_are_those_of_the_column(kind, shape):
    column = np.random.default_rng(0).integers(0, 120, (9, *shape)).astype(kind)
    rows = np.int32([8, 0, 3, 3])
    for device in ("/cpu:0", "/gpu:0"):
        result = devices.gather_rows(tf.constant(column), tf.constant(rows), device)
        assert result.dtype == kind
        np.testing.assert_array_equal(result, column[rows])


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_weights_that_stay_on_a_gpu_are_asked_there_whether_they_are_finite(monkeypatch, value):
    policy = make(PPOTF2Policy)
    updates = policy.program.updates
    monkeypatch.setattr(updates._functions, "device", "/gpu:0")
    left = {"kernel": tf.constant([1.0, value]), "step": tf.constant([3], tf.int64)}
    assert updates._is_finite(left) == np.isfinite(value)
    assert updates._is_finite({**left, "kernel": tf.constant([1.0, 2.0])})
