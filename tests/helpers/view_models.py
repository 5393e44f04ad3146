"""What tests of views share: a world that counts, a model that looks back, and what it must see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies import ViewRequirement

LINE = spaces.Box(-np.inf, np.inf, (1,), np.float32)
TWO = spaces.Discrete(2)


class Counter(gym.Env):
    """Shows 1, 2, 3, ..., pays ten times as much, and is cut after some steps."""

    observation_space, action_space = LINE, TWO

    def __init__(self, length: int = 4) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        self.t = 1
        return np.array([1.0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t > self.length
        return np.array([self.t], np.float32), 10.0 * (self.t - 1), False, over, {}

    def get_state(self) -> dict[str, int]:
        return {"t": self.t}

    def set_state(self, state: dict[str, int]) -> None:
        self.t = state["t"]


def looks_back(observation_space: Any, num_outputs: int) -> keras.Model:
    """Reads the last four observations, and the last three actions and rewards."""
    shape = observation_space.shape
    inputs = {
        "obs": keras.Input(shape, name="obs"),
        "prev_n_obs": keras.Input((4, *shape), name="prev_n_obs"),
        "prev_n_actions": keras.Input((3, num_outputs), name="prev_n_actions"),
        "prev_n_rewards": keras.Input((3,), name="prev_n_rewards"),
    }
    flat = [keras.layers.Flatten()(x) for x in inputs.values()]
    x = keras.layers.Concatenate()(flat)
    x = keras.layers.Dense(8, activation="tanh")(keras.layers.Rescaling(0.1)(x))
    return keras.Model(inputs, [keras.layers.Dense(num_outputs)(x), keras.layers.Dense(1)(x)])


LOOKS_BACK = {
    "prev_n_obs": ("obs", [-3, -2, -1, 0]),
    "prev_n_actions": ("actions", [-3, -2, -1]),
    "prev_n_rewards": ("rewards", [-3, -2, -1]),
}


class Reads(keras.Model):
    """Reads the views that its class requires."""

    required: Mapping[str, ViewRequirement] = {}

    def __init__(self, observation_space: Any, num_outputs: int) -> None:
        super().__init__()
        self.view_requirements = dict(self.required)
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.out, self.value = keras.layers.Dense(num_outputs), keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        rows = [tf.reshape(inputs[k], [tf.shape(inputs[k])[0], -1]) for k in sorted(inputs)]
        width = sum(int(np.prod(inputs[k].shape[1:])) for k in inputs)
        x = self.hidden(0.1 * tf.ensure_shape(tf.concat(rows, -1), [None, width]))
        return self.out(x), self.value(x)


class ReadsGaps(Reads):
    """Reads steps that do not follow each other, too."""

    required = {
        "some": ViewRequirement("obs", shift=[-3, -1]),
        "one": ViewRequirement("obs", shift=-2),
        "even": ViewRequirement("rewards", shift="-5:-1:2"),
        "prev_actions": ViewRequirement("actions", shift=-1),
        "range": ViewRequirement("obs", shift="-2:0"),
    }


GAPS_SEE = {
    "some": ("obs", [-3, -1]),
    "one": ("obs", [-2]),
    "even": ("rewards", [-5, -3, -1]),
    "prev_actions": ("actions", [-1]),
    "range": ("obs", [-2, -1, 0]),
}


def expected(
    samples: Sequence[Mapping[str, Any]], source: str, shifts: Sequence[int]
) -> list[np.ndarray]:
    """Returns what rows must see of a column, by plain loops: an array `[R, shifts, ...]` a sample.

    The samples follow each other, and begin with the first rows of their episodes.
    """
    past: dict[tuple[int, int], list[Any]] = {}
    actual = []
    for batch in samples:
        keys = list(zip(batch["eps_id"].tolist(), batch["agent_index"].tolist(), strict=True))
        later: dict[tuple[int, int], list[Any]] = {}
        for i, key in enumerate(keys):
            later.setdefault(key, []).append(batch[source][i])
        before = {key: len(past.get(key, [])) for key in later}
        known = {key: [*past.get(key, []), *rows] for key, rows in later.items()}
        if source == "obs":
            last = {key: i for i, key in enumerate(keys)}
            known = {key: [*rows, batch["new_obs"][last[key]]] for key, rows in known.items()}
        nothing = np.zeros_like(batch[source][0])
        rows = []
        for key in keys:
            at = before[key]
            before[key] += 1
            seen = known[key]
            rows.append([seen[at + s] if 0 <= at + s < len(seen) else nothing for s in shifts])
        actual.append(np.array(rows))
        for key, own in later.items():
            past.setdefault(key, []).extend(own)
    return actual


def check_views(
    samples: Sequence[Mapping[str, Any]], views: Mapping[str, tuple[str, Sequence[int]]]
) -> None:
    """Asserts that batches have the views, across all samples of some environments."""
    for name, (source, shifts) in views.items():
        for batch, view in zip(samples, expected(samples, source, shifts), strict=True):
            column = np.asarray(batch[name])
            if column.ndim < view.ndim:
                view = view[:, 0]
            np.testing.assert_array_equal(column, view, err_msg=name)
