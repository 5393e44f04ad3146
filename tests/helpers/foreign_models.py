"""Models of other libraries, their spaces, and SavedModels of single functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from tfpolicies import import_policy
from tfpolicies.errors import ModelImportError

SB3 = Path(__file__).parents[1] / "stored" / "sb3"
"""Folder of ONNX files of Stable-Baselines3's policies."""
POLE = {
    "observation_space": spaces.Box(-np.inf, np.inf, (4,)),
    "action_space": spaces.Discrete(2),
}
TORQUE = {"observation_space": spaces.Box(-8, 8, (3,)), "action_space": spaces.Box(-2, 2, (1,))}


def per_row(*shape: int, dtype: Any = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec([None, *shape], dtype)


class TimeStep(NamedTuple):
    step_type: Any
    reward: Any
    discount: Any
    observation: Any


class PolicyStep(NamedTuple):
    action: Any
    state: Any = ()
    info: Any = ()


STEP = TimeStep(per_row(dtype=tf.int32), per_row(), per_row(), per_row(3))


class TFAgentsPolicy(tf.Module):
    """A policy in the form of TF-Agents' PolicySaver: it sums up observations, from 0.25 on."""

    @tf.function(input_signature=[STEP, {"sum": per_row(3)}])
    def action(self, time_step: TimeStep, policy_state: Any) -> PolicyStep:
        total = policy_state["sum"] + time_step.observation
        return PolicyStep(tf.argmax(total, axis=1), {"sum": total})

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)])
    def get_initial_state(self, batch_size: Any) -> Any:
        return {"sum": tf.fill([batch_size, 3], 0.25)}

    def get_flat_signatures(self) -> dict[str, Any]:
        """Returns the signatures of a SavedModel whose parts are named."""

        def action(*values: Any) -> Any:
            result = self.action(TimeStep(*values[:4]), {"sum": values[4]})
            return {"action": result.action, "state/sum": result.state["sum"]}

        specs = {f"arg_0_{name}": spec for name, spec in STEP._asdict().items()}
        specs["arg_1_sum"] = per_row(3)
        inputs = [tf.TensorSpec(x.shape, x.dtype, name=name) for name, x in specs.items()]
        function = tf.function(action, autograph=False).get_concrete_function(*inputs)
        start = self.get_initial_state.get_concrete_function()
        return {"action": function, "get_initial_state": start}


def make_dense() -> keras.Model:
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((4,)), *layers])


def save_function(folder: Path, function: Callable[..., Any], spec: Any = None) -> Path:
    """Saves a SavedModel of one function of observations; returns the folder."""
    module = tf.Module()
    module.f = tf.function(function, input_signature=[spec or per_row(4)])
    tf.saved_model.save(module, str(folder), signatures=module.f)
    return folder


def assert_refused(source: Any, words: str, **settings: Any) -> None:
    """Asserts that a model is not imported, by a message that matches."""
    with pytest.raises(ModelImportError, match=words):
        import_policy(source, **{**POLE, **settings})
