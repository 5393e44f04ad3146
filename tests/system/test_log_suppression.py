"""Conversions of policies, which change neither logging, warnings nor the environment."""

import contextlib
import copy
import logging
import os
import sys
import threading
import warnings

import keras
import pytest
import tensorflow as tf

from helpers.factories import OBS, make, rows_of
from helpers.processes import run_python
from tfpolicies.errors import ExportError
from tfpolicies.system.log_suppression import suppress_conversion_output, suppress_native_stderr

TOUCHED = ("", "absl", "keras", "onnx", "tensorflow", "tf2onnx", "tf2onnx.tfonnx", "mine")


def get_process_state():
    loggers = [logging.getLogger(name) for name in TOUCHED]
    names = ("level", "handlers", "filters", "propagate", "disabled")
    settings = [[copy.copy(getattr(logger, name)) for name in names] for logger in loggers]
    return settings, list(warnings.filters), sys.stderr, sys.stdout, dict(os.environ)


@contextlib.contextmanager
def fresh_root(level=logging.WARNING):
    """Gives a root logger as a fresh process has it; asserts that the process is left as it is."""
    root = logging.getLogger()
    before, root.handlers[:] = (root.level, list(root.handlers)), []
    root.setLevel(level)
    state = get_process_state()
    try:
        yield root
        now = get_process_state()
    finally:
        root.level, root.handlers[:] = before
    assert now == state


class LogGamma(keras.Layer):
    """A layer without an operator of ONNX."""

    def call(self, inputs):
        return tf.math.lgamma(inputs)


def fail_to_export(folder):
    model = keras.Sequential([LogGamma(), keras.layers.Dense(2)])
    with pytest.raises(ExportError, match="lacks operators for it: Lgamma"):
        make(model={"custom_model": model}).export_model(folder, onnx=True)


def act(folder):
    make(inference="onnx", model={"fcnet_hiddens": [3, 2]}).compute_actions(rows_of(OBS, 2))


CONVERSIONS = {
    "SavedModel": lambda folder: make().export_model(folder),
    "ONNX": lambda folder: make().export_model(folder, onnx=True),
    "failing export": fail_to_export,
    "acting": act,
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_conversions_change_no_settings_of_the_process(convert, level, tmp_path, monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    make()
    with fresh_root(level):
        convert(tmp_path / "model")


def change_process():
    """Changes what libraries change."""
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("tf2onnx").addHandler(logging.StreamHandler())
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.getLogger("absl").propagate = False
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    warnings.simplefilter("error")


def test_a_handler_and_a_level_that_a_library_sets_are_reverted():
    with fresh_root(), suppress_conversion_output():
        change_process()


def test_a_handler_that_the_user_adds_meanwhile_stays():
    handler = logging.NullHandler()
    with fresh_root() as root:
        with suppress_conversion_output():
            root.addHandler(handler)
        after = list(root.handlers)
        root.removeHandler(handler)
    assert after == [handler]


def test_two_threads_that_convert_change_nothing():
    inside, outside = threading.Event(), threading.Event()

    def other():
        with suppress_conversion_output():
            inside.set()
            outside.wait(10)
            change_process()

    thread = threading.Thread(target=other)
    with fresh_root():
        with suppress_conversion_output():
            thread.start()
            inside.wait(10)
        level = logging.getLogger("tf2onnx").level
        outside.set()
        thread.join()
    assert level == logging.CRITICAL  # the other one was still inside


def test_an_error_inside_is_raised_with_everything_reverted():
    def fail():
        with suppress_conversion_output():
            change_process()
            raise ExportError("It is not possible.")

    with fresh_root(), pytest.raises(ExportError, match="not possible"):
        fail()


def write_to_stderr(*lines):
    for line in lines:
        os.write(2, line.encode() + b"\n")


@pytest.mark.core
def test_native_logs_are_suppressed_and_other_lines_are_not(capfd):
    write_to_stderr("before")
    inside, leave = threading.Event(), threading.Event()

    def other():
        with suppress_native_stderr():
            inside.set()
            leave.wait(60)
            write_to_stderr("I0000 00:00:1.2 9 single_machine.cc:376] Starting new session", "mine")

    thread = threading.Thread(target=other)
    with suppress_native_stderr():
        thread.start()
        assert inside.wait(60)
        write_to_stderr("W0000 00:00:1.2 9 devices.cc:67] Number of eligible GPUs", "Epoch 1")
    assert capfd.readouterr().err == "before\n"
    leave.set()
    thread.join()
    write_to_stderr("after")
    assert capfd.readouterr().err == "Epoch 1\nmine\nafter\n"


@pytest.mark.core
def test_native_logs_of_a_block_that_fails_are_written(capfd):
    def fail():
        with suppress_native_stderr():
            write_to_stderr("E0000 00:00:1.2 9 x.cc:1] The cause")
            raise ExportError("It is not possible.")

    with pytest.raises(ExportError, match="not possible"):
        fail()
    assert capfd.readouterr().err == "E0000 00:00:1.2 9 x.cc:1] The cause\n"


def test_a_policy_that_is_added_prints_nothing(tmp_path):
    script = """
import tensorflow as tf
from tfpolicies import PPOConfig, PPOTF2Policy
from tfpolicies.envs.multi_agent_env import make_multi_agent
config = PPOConfig().environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
config.training(train_batch_size=64, sgd_minibatch_size=32, num_sgd_iter=1)
config.multi_agent(policies={"main"}, policy_mapping_fn=lambda *args, **kwargs: "main")
algorithm = config.build()
algorithm.train()
print("ADDING", file=__import__("sys").stderr, flush=True)
mapping = lambda agent, *args, **kwargs: ["main", "other"][agent]
algorithm.add_policy("other", PPOTF2Policy, policy_mapping_fn=mapping)
algorithm.train()
algorithm.stop()
"""
    printed = run_python(script, TF_CPP_MIN_LOG_LEVEL=None).stderr
    assert printed.partition("ADDING\n")[2] == ""


SCRIPT = """
import os, sys
import tfpolicies
print("before", file=sys.stderr)
import tensorflow as tf
tf.constant(1) + 1
print(os.environ.get("TF_CPP_MIN_LOG_LEVEL"), tf.__spec__.loader is tf.__loader__)
finders = [type(finder) for finder in sys.meta_path]
print([finder for finder in finders if finder.__module__.startswith("tfpolicies.")])
"""


@pytest.mark.parametrize("level", [None, "0"])
def test_tensorflow_starts_without_a_line_unless_the_user_has_set_a_level(level):
    ran = run_python(SCRIPT, TF_CPP_MIN_LOG_LEVEL=level)
    assert ran.stderr == "before\n" if level is None else "tensorflow" in ran.stderr.lower()
    assert ran.stdout == f"{level} True\n[]\n"  # the environment and the finders are as before


def test_lines_of_others_are_written_while_tensorflow_is_imported(capfd):
    with suppress_native_stderr(rb"^I\d{4} "):
        os.write(2, b"I0000 a line of TensorFlow\na line of another thread\n")
    assert capfd.readouterr().err == "a line of another thread\n"
    with contextlib.suppress(ZeroDivisionError), suppress_native_stderr(rb"^I\d{4} "):
        os.write(2, b"I0000 why it failed\n")
        raise ZeroDivisionError
    assert capfd.readouterr().err == "I0000 why it failed\n"


def test_looking_for_tensorflow_does_not_import_it_and_keeps_its_start_quiet():
    look = "import importlib.util; assert importlib.util.find_spec('tensorflow')"
    look += "; assert importlib.util.find_spec('no_such_package') is None"
    look += "; assert 'tensorflow' not in sys.modules"
    script = SCRIPT.replace('print("before"', f'{look}; print("before"')
    assert run_python(script, TF_CPP_MIN_LOG_LEVEL=None).stderr == "before\n"
