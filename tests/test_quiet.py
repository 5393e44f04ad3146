"""What converts a policy leaves the process as it was: logging, warnings, environment."""

import contextlib
import logging
import os
import sys
import threading
import warnings

import keras
import pytest
import tensorflow as tf
from tiny import OBS, make, rows_of

from tfpolicies.errors import ExportError
from tfpolicies.system.quiet import quiet_conversion

TOUCHED = ("", "absl", "keras", "onnx", "tensorflow", "tf2onnx", "tf2onnx.tfonnx", "mine")


def process():
    loggers = {name: logging.getLogger(name) for name in TOUCHED}
    found = {
        name: (each.level, list(each.handlers), list(each.filters), each.propagate, each.disabled)
        for name, each in loggers.items()
    }
    return found, list(warnings.filters), sys.stderr, sys.stdout, dict(os.environ)


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
    with pytest.raises(ExportError, match="cannot express what it does: Lgamma"):
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
        with quiet_conversion():
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
        with quiet_conversion():
            root.addHandler(mine)
        after = list(root.handlers)

    assert after == [mine]


def test_two_threads_that_convert_leave_everything_as_it_was():
    inside, outside = threading.Event(), threading.Event()

    def other():
        with quiet_conversion():
            inside.set()
            outside.wait(10)
            libraries_do_as_they_like()

    thread = threading.Thread(target=other)
    with fresh_root():
        before = process()
        with quiet_conversion():
            thread.start()
            inside.wait(10)
        level = logging.getLogger("tf2onnx").level
        outside.set()
        thread.join()
        after = process()

    assert level == logging.CRITICAL  # the other one was still inside
    assert after == before


def convert_nothing():
    with quiet_conversion():
        libraries_do_as_they_like()
        _ = 1 / 0


def test_what_is_raised_inside_comes_out_with_everything_undone():
    with fresh_root():
        before = process()
        with pytest.raises(ZeroDivisionError):
            convert_nothing()
        after = process()

    assert after == before
