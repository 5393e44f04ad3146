"""Policies for all combinations of observation space, action space and model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from gymnasium import spaces

from tfpolicies import PPOTF2Policy
from tfpolicies.models.distributions import ActionDistribution

IMAGE = spaces.Box(0, 255, (10, 10, 3), np.uint8)
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)

OBSERVATIONS: dict[str, spaces.Space] = {
    "box": VECTOR,
    "box2d": spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
    "discrete": spaces.Discrete(4),
    "discrete_start": spaces.Discrete(3, start=-1),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(3),
    "image": IMAGE,
    "dict": spaces.Dict(speed=VECTOR, gear=spaces.Discrete(3), camera=IMAGE),
    "tuple": spaces.Tuple(
        [spaces.Discrete(2), spaces.Dict(a=spaces.Box(0.0, 5.0, (1,), np.float64), b=VECTOR)]
    ),
    "dict_of_bits": spaces.Dict(lamps=spaces.MultiBinary([2, 2]), dial=VECTOR),
}

ACTIONS: dict[str, spaces.Space] = {
    "discrete": spaces.Discrete(3),
    "discrete_start": spaces.Discrete(4, start=2),
    "multi_discrete": spaces.MultiDiscrete([2, 4, 3]),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 0.5])),
    "box_half": spaces.Box(0.0, np.inf, (2,), np.float32),
    "box_int": spaces.Box(-1, 2, (2,), np.int64),
    "nested": spaces.Dict(
        move=spaces.Discrete(3),
        arm=spaces.Tuple([spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.MultiBinary(2)]),
    ),
}

_LAYERS = {"fcnet_hiddens": [4]}
_STEPS = {"max_seq_len": 5}


class Custom(keras.Model):
    """A model of a user's own, for any observations: all parts in one row, one hidden layer."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.logits = keras.layers.Dense(units)
        self.value = keras.layers.Dense(1)

    def call(self, inputs: Any) -> dict[str, Any]:
        parts = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
        flat = [keras.ops.reshape(x, (-1, int(np.prod(x.shape[1:])))) for x in parts]
        hidden = self.hidden(keras.ops.concatenate(flat, axis=-1))
        return {"action_dist_inputs": self.logits(hidden), "vf_preds": self.value(hidden)}


def custom_model(observation_space: spaces.Space, num_outputs: int) -> keras.Model:
    return Custom(num_outputs)


_LSTM = {"use_lstm": True, "lstm_cell_size": 4}
_ATTENTION = {"dim": 4, "head_dim": 4, "position_wise_mlp_dim": 4}
_ATTENTION |= {"memory_inference": 3, "memory_training": 3}
_PREVIOUS = {"lstm_use_prev_action": True, "lstm_use_prev_reward": True}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {**_LAYERS, "vf_share_layers": False},
    "cnn": {"conv_filters": [[2, 3, 2], [4, 3, 2]], "post_fcnet_hiddens": [4], **_LAYERS},
    "lstm": {**_LAYERS, **_STEPS, **_LSTM, **_PREVIOUS},
    "gru": {**_LAYERS, **_STEPS, "use_gru": True, "lstm_cell_size": 4},
    "attention": {
        **_LAYERS,
        **_STEPS,
        "use_attention": True,
        **{f"attention_{name}": size for name, size in _ATTENTION.items()},
    },
    "masked": _LAYERS,
    "custom": {"custom_model": custom_model},
}


class Combination(NamedTuple):
    observation: str
    action: str
    model: str

    def __str__(self) -> str:
        return f"{self.observation} x {self.action} x {self.model}"


def make_policy(combination: Combination, policy_class: Any = PPOTF2Policy, **config: Any) -> Any:
    """Makes a policy whose results depend on its inputs: its weights are disturbed."""
    observation_space = OBSERVATIONS[combination.observation]
    action_space = ACTIONS[combination.action]
    if combination.model == "masked":
        size = ActionDistribution.for_space(action_space).mask_size
        mask = spaces.Box(0, 1, (size,), np.int8)
        observation_space = spaces.Dict(observations=observation_space, action_mask=mask)
    settings = {"seed": 0, "jit_compile": False, "model": MODELS[combination.model], **config}
    policy = policy_class(observation_space, action_space, settings)
    rng = np.random.default_rng(1)
    weights = [*policy.get_weights().values()]
    policy.set_weights(
        [w + 0.2 * rng.standard_normal(w.shape) if w.dtype.kind == "f" else w for w in weights]
    )
    return policy
