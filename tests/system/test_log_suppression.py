"""What converts a policy leaves the process as it was: logging, warnings, environment."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import warnings

import keras
import pytest
import tensorflow as tf

from helpers.factories import OBS, make, rows_of
from tfpolicies.errors import ExportError
from tfpolicies.system.log_suppression import suppress_conversion_output, suppress_native_stderr

TOUCHED = ("", "absl", "keras", "onnx", "tensorflow", "tf2onnx", "tf2onnx.tfonnx", "mine")


def process():
    loggers = {name: logging.getLogger(name) for name in TOUCHED}
    results = {
        name: (each.level, list(each.handlers), list(each.filters), each.propagate, each.disabled)
        for name, each in loggers.items()
    }
    return results, list(warnings.filters), sys.stderr, sys.stdout, dict(os.environ)


@contextlib.contextmanager
def fresh_root(level=logging.WARNING):
    """Gives a root logger as a fresh process has it, before somebody calls `basicConfig`."""
    root = logging.getLogger()
    kept, root.handlers[:] = (root.level, list(root.handlers)), []
    root.setLevel(level)
    try:
        yield root
    finally:
        root.level, root.handlers[:] = kept


def saved_model(policy, folder):
    policy.export_model(folder)


def onnx_file(policy, folder):
    policy.export_model(folder, onnx=True)


class LogGamma(keras.Layer):
    """What ONNX has no operator for."""

    def call(self, inputs):
        return tf.math.lgamma(inputs)


def failing_export(policy, folder):
    del policy
    model = keras.Sequential([LogGamma(), keras.layers.Dense(2)])
    with pytest.raises(ExportError, match="lacks operators for it: Lgamma"):
        make(model={"custom_model": model}).export_model(folder, onnx=True)


def acting(policy, folder):
    del folder
    make(inference="onnx", model={"fcnet_hiddens": [3, 2]}).compute_actions(rows_of(OBS, 2))


@pytest.mark.parametrize("convert", [saved_model, onnx_file, failing_export, acting])
@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_conversions_leave_logging_warnings_and_the_environment_as_they_were(
    convert, level, tmp_path, monkeypatch
):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    policy = make()
    with fresh_root(level):
        before = process()
        convert(policy, tmp_path / "model")
        after = process()

    assert after == before


def test_a_handler_and_a_level_that_a_library_sets_are_undone():
    with fresh_root():
        before = process()
        with suppress_conversion_output():
            libraries_do_as_they_like()
        after = process()

    assert after == before


def libraries_do_as_they_like():
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("tf2onnx").addHandler(logging.StreamHandler())
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.getLogger("absl").propagate = False
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    warnings.simplefilter("error")


def test_a_handler_that_the_user_adds_meanwhile_stays():
    mine = logging.NullHandler()
    with fresh_root() as root:
        with suppress_conversion_output():
            root.addHandler(mine)
        after = list(root.handlers)

    assert after == [mine]


def test_two_threads_that_convert_leave_everything_as_it_was():
    inside, outside = threading.Event(), threading.Event()

    def other():
        with suppress_conversion_output():
            inside.set()
            outside.wait(10)
            libraries_do_as_they_like()

    thread = threading.Thread(target=other)
    with fresh_root():
        before = process()
        with suppress_conversion_output():
            thread.start()
            inside.wait(10)
        level = logging.getLogger("tf2onnx").level
        outside.set()
        thread.join()
        after = process()

    assert level == logging.CRITICAL  # the other one was still inside
    assert after == before


def convert_nothing():
    with suppress_conversion_output():
        libraries_do_as_they_like()
        _ = 1 / 0


def test_what_is_raised_inside_comes_out_with_everything_undone():
    with fresh_root():
        before = process()
        with pytest.raises(ZeroDivisionError):
            convert_nothing()
        after = process()

    assert after == before


def write_to_stderr(*lines):
    for line in lines:
        os.write(2, line.encode() + b"\n")


@pytest.mark.core
def test_native_logs_are_held_back_and_other_lines_are_not(capfd):
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
    shown = {name: x for name, x in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=shown, capture_output=True, text=True, check=True
    )
    assert done.stderr.partition("ADDING\n")[2] == ""


# -- the start of TensorFlow -------------------------------------------------------------------

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


def run_script(script, level=None):
    environ = {name: x for name, x in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environ |= {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True)


def test_tensorflow_starts_without_a_line_where_this_package_was_imported_first():
    done = run_script(SCRIPT)
    assert done.stderr == "before\n"
    assert done.stdout == "None True\n[]\n"  # the environment and the finders are as they were


def test_a_level_that_the_user_has_set_decides_what_tensorflow_prints():
    done = run_script(SCRIPT, level="0")
    assert "tensorflow" in done.stderr.lower()
    assert done.stdout == "0 True\n[]\n"


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
    done = run_script(SCRIPT.replace('print("before"', f'{look}; print("before"'))
    assert done.stderr == "before\n"
