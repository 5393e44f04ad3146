"""The settings of the `model` config, with their defaults and rules.

Does not import Keras, so that configs can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from tfpolicies.base.type_aliases import Setting
from tfpolicies.base.validators import BOOL, DICT, FINITE, POSITIVE_INT, Validator, is_int_at_least
from tfpolicies.errors import suggest_similar_names
from tfpolicies.models.registry import MODELS

_MAX_LAYERS, _MAX_BLOCKS = 256, 64  # blocks are attention's units and heads
_MAX_PAST_STEPS = 1000  # past steps that are passed to a memory


def is_list_of_counts(value: Setting) -> TypeGuard[Sequence[int]]:
    """Returns whether `value` is a list or tuple of at most 256 integers of at least 1."""
    return is_layer_list(value) and all(is_int_at_least(entry) for entry in value)


def is_layer_list(value: Setting) -> TypeGuard[Sequence[Setting]]:
    """Returns whether `value` is a list or tuple with no more entries than Keras stacks layers."""
    return isinstance(value, list | tuple) and len(value) <= _MAX_LAYERS


def _is_size(value: Setting) -> bool:
    return is_int_at_least(value) or (is_list_of_counts(value) and len(value) == 2)


def _is_convolution(layer: Setting) -> bool:
    if not isinstance(layer, list | tuple) or len(layer) != 3:
        return False
    return is_int_at_least(layer[0]) and all(map(_is_size, layer[1:]))


def _must_be(value: Setting, description: str) -> Validator:
    return Validator(lambda x: type(x) is type(value) and x == value, description)


LAYER_SIZES = Validator(
    is_list_of_counts, f"a list of integers >= 1, at most {_MAX_LAYERS} of them"
)
_FILTERS = Validator(
    lambda x: x is None or (is_layer_list(x) and all(map(_is_convolution, x))),
    "None, [] or a list of [channels, kernel, stride] such as [[16, 4, 2], [32, [3, 3], 1]]",
)
_BLOCKS = Validator(
    lambda x: is_int_at_least(x) and x <= _MAX_BLOCKS, f"an integer from 1 to {_MAX_BLOCKS}"
)
ACTIVATION = Validator(lambda x: x is None or isinstance(x, str), "a Keras activation name")
_ATARI_ADVICE = (
    "frames are scaled to [0, 1] and otherwise left as the environment returns them; crop, "
)
_ATARI_ADVICE += (
    "resize and stack them there, with gymnasium.wrappers.AtariPreprocessing and others"
)
_PAST_STEPS = Validator(
    lambda x: is_int_at_least(x, 0) and x <= _MAX_PAST_STEPS,
    f"an integer from 0 to {_MAX_PAST_STEPS}",
)


def _model_hint(custom_model: Setting) -> str:
    if not isinstance(custom_model, str):
        return ""
    suggestion = suggest_similar_names(custom_model, MODELS).lstrip()
    return (
        " (names belong to the process: register this one first, here and wherever it is restored, "
        "by ModelCatalog.register_custom_model(name, Class) or "
        "tfpolicies.models.registry.register_model(name, "
        f"factory){suggestion and f'. {suggestion}'})"
    )


_MODEL = Validator(
    lambda x: x is None or callable(x) or MODELS.find(x) is not None,
    "None, a keras.Model, a factory or the name of a registered model",
    _model_hint,
)
_DISTRIBUTION = Validator(
    lambda x: x is None or isinstance(x, str | type),
    "None, the name of a distribution or a subclass of models.distributions.Distribution",
)
_NO_PREPROCESSOR = Validator(
    lambda x: x is None,
    "None: change observations with a gymnasium.ObservationWrapper, or inside your model",
)

MODEL_SETTINGS: dict[str, tuple[Any, Validator]] = {
    # Fully connected layers.
    "fcnet_hiddens": ([256, 256], LAYER_SIZES),  # units of each hidden layer
    "fcnet_activation": ("tanh", ACTIVATION),  # any Keras activation name
    # units of the layers after them, or after an image's convolutions
    "post_fcnet_hiddens": ([], LAYER_SIZES),
    "post_fcnet_activation": ("relu", ACTIVATION),  # any Keras activation name
    "vf_share_layers": (True, BOOL),  # whether the value reads the actor's last hidden layer
    "free_log_std": (False, BOOL),  # Gaussians: one trained log standard deviation for all rows
    "log_std_init": (0.0, FINITE),  # its initial value
    "no_final_linear": (False, BOOL),  # whether the output layer is the last hidden one, activated
    # True: orthogonal kernels, gains sqrt(2), 0.01 and 1; False: normalised columns
    "ortho_init": (False, BOOL),
    # Images.
    "conv_filters": (None, _FILTERS),  # None: by size; []: flatten images
    "conv_activation": ("relu", ACTIVATION),  # any Keras activation name
    # whether images are [channels, height, width]; None: by their shape
    "channels_first": (
        None,
        Validator(lambda x: x is None or isinstance(x, bool), "None, True or False"),
    ),
    # Memory: at most one of the three.
    "use_lstm": (False, BOOL),
    "use_gru": (False, BOOL),
    "use_attention": (False, BOOL),
    "max_seq_len": (20, POSITIVE_INT),  # steps of one sequence of a train batch
    "lstm_cell_size": (256, POSITIVE_INT),  # units of the LSTM or GRU
    "lstm_use_prev_action": (False, BOOL),  # whether the LSTM or GRU also reads the last action
    "lstm_use_prev_reward": (False, BOOL),  # and the previous reward
    "_time_major": (
        False,
        _must_be(False, "False: sequences are [B, T, ...] here; transpose yours"),
    ),
    "attention_num_transformer_units": (1, _BLOCKS),
    "attention_dim": (64, POSITIVE_INT),  # units of the residual stream
    "attention_num_heads": (1, _BLOCKS),
    "attention_head_dim": (32, POSITIVE_INT),  # units of each head
    "attention_memory_inference": (50, POSITIVE_INT),  # earlier steps that can be attended to
    # training uses the memory from acting: always as above
    "attention_memory_training": (50, POSITIVE_INT),
    "attention_position_wise_mlp_dim": (32, POSITIVE_INT),  # hidden units after each attention
    # the larger, the more of its input an untrained unit passes through
    "attention_init_gru_gate_bias": (2.0, FINITE),
    "attention_use_n_prev_actions": (0, _PAST_STEPS),  # how many of the last actions it also reads
    "attention_use_n_prev_rewards": (0, _PAST_STEPS),  # and of the last rewards
    # Environment wrappers preprocess Atari frames: only these values are allowed, and any `dim`.
    "framestack": (True, _must_be(True, f"True: {_ATARI_ADVICE}")),
    "dim": (84, POSITIVE_INT),  # of no effect: images have the size that the environment gives them
    "grayscale": (False, _must_be(False, f"False: {_ATARI_ADVICE}")),
    "zero_mean": (True, _must_be(True, f"True: {_ATARI_ADVICE}")),
    # Custom models and distributions.
    # a keras.Model, a factory f(observation_space, num_outputs, **config), or a registered name
    "custom_model": (None, _MODEL),
    "custom_model_config": ({}, DICT),  # keyword arguments of the factory
    # the distribution of each Box of floats in the action space: None for "diag_gaussian", or
    # "squashed_gaussian", "deterministic", or a subclass of models.distributions.Distribution;
    # a `WholeSpaceDistribution` class is for the whole action space
    "custom_action_dist": (None, _DISTRIBUTION),
    "custom_preprocessor": (None, _NO_PREPROCESSOR),
}
"""By name: the default, and the rule."""

MODEL_DEFAULTS: dict[str, Any] = {name: default for name, (default, _) in MODEL_SETTINGS.items()}
