"""Learning on another device than TensorFlow's first, and limits of GPU memory."""

import contextlib
import functools
import gc
import json
import re
import sys

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import make
from helpers.marks import telling
from helpers.processes import run_python
from tfpolicies import PPOTF2Policy
from tfpolicies.program import devices, functions
from tfpolicies.program.devices import choose_learner_device
from tfpolicies.system import gpu_memory

QUICK = {"loop": "LOOP", "plain": "PLAIN", "memory": "PLAIN"}
SLOW = {"step": "STEP", "targets": "PLAIN", "networks": "PLAIN", "graph": "LOOP"}
KINDS = telling({**QUICK, **SLOW}, *QUICK, soak=SLOW)


@functools.cache
def learn(*kinds):
    """Returns what policies did in a process with two devices."""
    printed = run_python("-m", "helpers.two_devices", *kinds, seconds=1800).stdout
    return json.loads(printed.splitlines()[-1])


def learn_as(kind):
    """Returns results of learning on the second device and on the first, and the logged lines."""
    result = learn(*(QUICK if kind in QUICK else SLOW))
    return *result["kinds"][kind], result["lines"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_an_update_is_on_the_device_that_learns(kind):
    *results, lines = learn_as(kind)
    for result, device in zip(results, ("CPU:1", "CPU:0"), strict=True):
        assert (result["mode"], result["variables"]) == ({**QUICK, **SLOW}[kind], [device])
        if kind != "graph":  # a session does not say where its operations run
            operations = result["operations"]
            assert {line.split()[0] for line in operations} == {device}, operations
    assert lines == []  # XLA refuses none


def test_a_network_with_convolutions_acts_where_it_learns():
    for result, device in zip(learn_as("plain"), ("CPU:1", "CPU:0"), strict=False):
        (operation,) = result["convolutions"]  # oneDNN has another one on some processors
        assert re.fullmatch(rf"{device} _(MklNative)?FusedConv2D", operation)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_changes_no_number(kind):
    second, first, _ = learn_as(kind)
    for name in ("loss", "weights", "actions"):
        assert second[name] == pytest.approx(first[name], rel=1e-6), name


NO_GPU = "num_gpus=1, but there is no GPU: learning runs on the CPU"


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
    monkeypatch.delenv(gpu_memory.GROWTH_VARIABLE, raising=False)
    monkeypatch.setattr(gpu_memory, "_process_role", {"is_own": False, "only_samples": False})
    for each in (gpu_memory.limit_gpus, gpu_memory.warn_without_gpu):
        each.cache_clear()
    yield monkeypatch
    for each in (gpu_memory.limit_gpus, gpu_memory.warn_without_gpu):
        each.cache_clear()


def pretend_gpu(monkeypatch):
    monkeypatch.setattr(functions, "choose_learner_device", lambda num_gpus: "/gpu:0")
    monkeypatch.setattr(devices, "get_device_context", lambda: contextlib.nullcontext)


@pytest.mark.core
def test_in_a_users_process_one_line_says_how_to_limit_the_gpu(fresh, caplog):
    machine = Machine(fresh)
    for _ in range(2):
        gpu_memory.limit_gpus(uses_gpu=False)
    ways = ("num_gpus=0", "tf.config.set_visible_devices([], 'GPU')")
    assert all(x in caplog.text for x in (*ways, "TF_FORCE_GPU_ALLOW_GROWTH=true"))
    gpu_memory.limit_gpus(uses_gpu=True)
    assert (len(caplog.records), machine.done) == (2, [])


@pytest.mark.core
@pytest.mark.parametrize("limit", [{"grows": True}, {"visible": []}, {}])
def test_where_a_user_limits_the_gpu_nothing_is_logged(fresh, caplog, limit):
    machine = Machine(fresh)
    vars(machine).update(limit)
    if not limit:
        fresh.setenv(gpu_memory.GROWTH_VARIABLE, "true")
    for uses_gpu in (False, True):
        gpu_memory.limit_gpus(uses_gpu=uses_gpu)
    assert (caplog.records, machine.done) == ([], [])


@pytest.mark.core
def test_in_a_process_of_the_package_the_gpu_is_hidden_unless_it_is_used(fresh, caplog):
    machine = Machine(fresh)
    gpu_memory.claim_process()
    gpu_memory.limit_gpus(uses_gpu=True)
    gpu_memory.limit_gpus(uses_gpu=False)
    assert machine.done == [["grow", "GPU:0", True], ["see", [], "GPU"]]
    assert caplog.records == []


def test_a_process_whose_tensorflow_has_started_is_left_as_it_is(fresh, caplog):
    machine = Machine(fresh, started=True)
    gpu_memory.claim_process()
    gpu_memory.limit_gpus(uses_gpu=False)
    assert machine.visible == ["GPU:0"]
    assert len(caplog.records) == 1


@pytest.mark.core
def test_the_command_line_claims_its_process_and_a_call_of_it_does_not(fresh):
    from tfpolicies import cli

    assert cli.main(["--version"]) == 0
    assert not gpu_memory._process_role["is_own"]
    fresh.setattr(sys, "path", ["", *sys.path])
    cli._prepare_process()
    assert gpu_memory._process_role == {"is_own": True, "only_samples": False}


def test_a_worker_that_only_samples_misses_no_gpu(fresh, caplog):
    gpu_memory.claim_process(only_samples=True)
    assert choose_learner_device(1, 0) == "/cpu:0"
    assert caplog.records == []
    gpu_memory.claim_process()
    gpu_memory.warn_without_gpu.cache_clear()
    assert [choose_learner_device(1, 0) for _ in range(2)] == ["/cpu:0"] * 2
    assert [x.getMessage() for x in caplog.records] == [NO_GPU]


@pytest.mark.core
def test_one_line_says_that_a_checkpoint_learns_on_another_device(fresh, caplog, tmp_path):
    gpu_memory.warn_without_gpu.cache_clear()
    policy = make(num_gpus=1, model={"fcnet_hiddens": [9]})
    assert policy.devices == ["/cpu:0"]
    policy.export_checkpoint(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == NO_GPU
    del policy
    gc.collect()  # its Program, too
    caplog.clear()
    pretend_gpu(fresh)
    restored = PPOTF2Policy.from_checkpoint(tmp_path)
    assert restored.devices == ["/gpu:0"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "learned on the CPU; with num_gpus=1 it now learns on the GPU" in line


@pytest.mark.core
def test_acting_is_on_the_gpu_only_for_images(fresh):
    pretend_gpu(fresh)
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
def test_weights_that_stay_on_a_gpu_are_checked_there_for_finite_numbers(monkeypatch, value):
    policy = make(PPOTF2Policy)
    updates = policy.program.updates
    monkeypatch.setattr(updates._functions, "device", "/gpu:0")
    result = {"kernel": tf.constant([1.0, value]), "step": tf.constant([3], tf.int64)}
    assert updates._is_finite(result) == np.isfinite(value)
    assert updates._is_finite({**result, "kernel": tf.constant([1.0, 2.0])})
