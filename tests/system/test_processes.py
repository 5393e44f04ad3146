"""Forks and global modes of TensorFlow: errors of policies, in processes of their own."""

import functools
import os

import pytest

from helpers.marks import telling
from helpers.processes import run_python


@functools.cache
def run_parts(module, *words):
    """Runs a helper in a process of its own; returns the lines that it prints, by headline."""
    _, *parts = run_python("-m", f"helpers.{module}", *words, seconds=120).stdout.split("== ")
    return {name: lines for name, *lines in map(str.splitlines, parts)}


FORK_ERRORS = ["ForkError: TensorFlow cannot run here: this process was fork"] * 15
IN_FORKS = {
    "a child forked before TensorFlow ran may train": ("before", ["no error"]),
    "TensorFlow raises in a child forked after it ran, and does not hang": (
        "tensorflow",
        FORK_ERRORS,
    ),
    "NumPy and ONNX Runtime work in a forked child": ("numpy", ["no error"] * 3),
    "environments run in forked processes while a policy learns": ("environments", ["(2, 4)"]),
    "a forked child neither writes to its parent's stash nor removes it": (
        "stash",
        ["no error", "StashError: The policy 'a' cannot be written to t", "True", "True"],
    ),
    "the parent is not affected": ("parent", ["no error", "no error"]),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only Unix forks")
@pytest.mark.parametrize(
    "case",
    telling(IN_FORKS, *(x for x in IN_FORKS if IN_FORKS[x][0] not in ("tensorflow", "parent"))),
)
def test_in_forked_processes(case):
    headline, lines = IN_FORKS[case]
    assert run_parts("forked_policies")[headline] == lines


@pytest.mark.parametrize("mode", ["eager_execution", "v2_behavior"])
def test_without_eager_execution_one_line_says_how_to_get_it_back(mode):
    lines = run_parts("tensorflow_modes", "disabled")[mode]
    assert len(lines) == 4
    for line in lines:
        assert line.startswith("ConfigError: Eager execution is disabled in this process")
        assert f"tf.compat.v1.disable_{mode}()" in line


IN_STRATEGY = "ConfigError: A policy cannot be made inside the scope of a Mirrored"
IN_FUNCTION = "ConfigError: A policy cannot be made inside a tf.function."
SURROUNDINGS = {
    "strategy": [IN_STRATEGY] * 3,
    "graph": ["no error"] * 3 + [IN_FUNCTION],
    "parts of TensorFlow 2": [
        "ConfigError: tf.compat.v1.disable_control_flow_v2() was called",
        "ConfigError: tf.compat.v1.disable_resource_variables() was called",
        "no error",
    ],
    "functions": ["True True True"] * 3,  # that run eagerly change no number
}


@pytest.mark.soak
@pytest.mark.parametrize(("around", "expected"), SURROUNDINGS.items())
def test_the_surroundings_of_a_policy_that_is_made_are_named_in_one_line(around, expected):
    lines = run_parts("tensorflow_modes", "changed")[around]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


@pytest.mark.soak
def test_keras_in_another_precision_is_refused_in_one_line():
    parts = run_parts("tensorflow_modes", "changed")
    lines = parts["floatx"] + parts["precision"]
    names = ["float64"] * 6 + ["mixed_float16"] * 3 + ["mixed_bfloat16"] * 3
    assert [line.partition(". ")[0] for line in lines] == [
        f"ModelError: Policies are float32 only, but Keras's global dtype policy is {name!r}"
        for name in names
    ]


@pytest.mark.soak
def test_a_model_in_double_precision_is_refused_in_one_line():
    *errors, first, second, third = run_parts("tensorflow_modes", "changed")["model"]
    assert len(errors) == 3
    for line in errors:
        assert line.startswith("ModelError: The model ")
        assert "policies are float32 only" in line
    assert [first, second, third] == ["no error"] * 3
