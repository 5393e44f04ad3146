"""The `model` config, completed and checked. Knows no Keras, so that configs can use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tfpolicies.errors import ModelSettingError, near_matches
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.registry import MODELS
from tfpolicies.rules import BOOL, COUNT, DICT, Rule, is_count, is_number

_MOST_LAYERS, _MOST_BLOCKS = 256, 64  # blocks are attention's units and heads


def model_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Completes a `model` config from `MODEL_DEFAULTS` and checks it.

    Args:
        config: any of the settings; missing ones get their defaults.

    Returns:
        A new dict with every setting.

    Raises:
        ModelSettingError: if a setting is unknown, out of its range, without effect or in
            contradiction to another one; it names the setting, the rule and the value.

    >>> model_settings({"use_gru": True})["lstm_cell_size"]
    256
    """
    for key in config:
        if key not in MODEL_DEFAULTS:
            all_of_them = f" Settings are {', '.join(MODEL_DEFAULTS)}."
            raise ModelSettingError(
                f"model[{key!r}] is not a model setting."
                f"{near_matches(key, MODEL_DEFAULTS) or all_of_them} A model of your own goes to "
                "model={'custom_model': your_model}."
            )
    settings = {**MODEL_DEFAULTS, **config}
    for key, rule in _RULES.items():
        if not rule.holds(settings[key]):
            raise ModelSettingError(f"model[{key!r}] must be {rule.words}, got {settings[key]!r}.")
    _check_together(settings)
    return settings


def is_list_of_counts(value: Any) -> bool:
    """Whether `value` is a list or tuple of at most 256 integers of at least 1."""
    return is_short(value) and all(is_count(entry) for entry in value)


def is_short(value: Any) -> bool:
    """Whether `value` is a list or tuple for not more layers than Keras can put on each other."""
    return isinstance(value, list | tuple) and len(value) <= _MOST_LAYERS


def pair(value: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """Returns a kernel or stride as (height, width).

    >>> pair(4), pair([3, 5])
    ((4, 4), (3, 5))
    """
    if isinstance(value, int):
        return value, value
    return int(value[0]), int(value[1])


def _is_extent(value: Any) -> bool:
    return is_count(value) or (is_list_of_counts(value) and len(value) == 2)


def _is_filters(value: Any) -> bool:
    return value is None or (
        is_short(value)
        and all(
            isinstance(layer, list | tuple)
            and len(layer) == 3
            and is_count(layer[0])
            and _is_extent(layer[1])
            and _is_extent(layer[2])
            for layer in value
        )
    )


def _only(value: Any, words: str) -> Rule:
    return Rule(lambda x: type(x) is type(value) and x == value, words)


COUNTS = Rule(is_list_of_counts, f"a list of integers >= 1, at most {_MOST_LAYERS} of them")
_BLOCKS = Rule(lambda x: is_count(x) and x <= _MOST_BLOCKS, f"an integer from 1 to {_MOST_BLOCKS}")
_FINITE = Rule(lambda x: is_number(x) and math.isfinite(x), "a finite number")
_ACTIVATION = Rule(lambda x: x is None or isinstance(x, str), "a Keras activation name")
_ATARI = "frames are scaled to [0, 1] and otherwise left as the environment gives them; crop, "
_ATARI += "resize and stack them there, with gymnasium.wrappers.AtariPreprocessing and others"
_ONE_STEP = Rule(
    lambda x: is_count(x, 0) and x <= 1,
    "0 or 1: only the last step is handed over, earlier ones are in the memory",
)

_RULES: dict[str, Rule] = {
    "fcnet_hiddens": COUNTS,
    "fcnet_activation": _ACTIVATION,
    "post_fcnet_hiddens": COUNTS,
    "post_fcnet_activation": _ACTIVATION,
    "vf_share_layers": BOOL,
    "free_log_std": BOOL,
    "no_final_linear": BOOL,
    "ortho_init": BOOL,
    "conv_filters": Rule(
        _is_filters,
        "None, [] or a list of [channels, kernel, stride] such as [[16, 4, 2], [32, [3, 3], 1]]",
    ),
    "conv_activation": _ACTIVATION,
    "channels_first": Rule(lambda x: x is None or isinstance(x, bool), "None, True or False"),
    "use_lstm": BOOL,
    "use_gru": BOOL,
    "use_attention": BOOL,
    "max_seq_len": COUNT,
    "lstm_cell_size": COUNT,
    "lstm_use_prev_action": BOOL,
    "lstm_use_prev_reward": BOOL,
    "_time_major": _only(False, "False: sequences are [B, T, ...] here; transpose yours"),
    "attention_num_transformer_units": _BLOCKS,
    "attention_dim": COUNT,
    "attention_num_heads": _BLOCKS,
    "attention_head_dim": COUNT,
    "attention_memory_inference": COUNT,
    "attention_memory_training": COUNT,
    "attention_position_wise_mlp_dim": COUNT,
    "attention_init_gru_gate_bias": Rule(
        lambda x: is_number(x) and math.isfinite(x), "a finite number"
    ),
    "attention_use_n_prev_actions": _ONE_STEP,
    "attention_use_n_prev_rewards": _ONE_STEP,
    "framestack": _only(True, f"True: {_ATARI}"),
    "dim": COUNT,
    "grayscale": _only(False, f"False: {_ATARI}"),
    "zero_mean": _only(True, f"True: {_ATARI}"),
    "custom_model": Rule(
        lambda x: x is None or callable(x) or MODELS.find(x) is not None,
        "None, a keras.Model, a factory or the name of a registered model",
    ),
    "custom_model_config": DICT,
    "custom_action_dist": Rule(
        lambda x: x is None or isinstance(x, str | type),
        "None, the name of a distribution or a subclass of models.distributions.Distribution",
    ),
    "custom_preprocessor": Rule(
        lambda x: x is None,
        "None: change observations with a gymnasium.ObservationWrapper, or inside your model",
    ),
}

_MEMORIES = ("use_lstm", "use_gru", "use_attention")


def _check_together(settings: Mapping[str, Any]) -> None:
    used = [key for key in _MEMORIES if settings[key]]
    if len(used) > 1:
        raise ModelSettingError(
            f"At most one of model['use_lstm'], model['use_gru'] and model['use_attention'] can be "
            f"True, got {' and '.join(used)}. Choose one kind of memory."
        )
    if used and settings["custom_model"] is not None:
        raise ModelSettingError(
            f"model[{used[0]!r}] must be False beside a custom_model, got True. Give your own "
            "model its memory: inputs state_in_0, ... and seq_lens, outputs state_out_0, ..."
        )
    if used and settings["no_final_linear"]:
        raise ModelSettingError(
            f"model['no_final_linear'] must be False with {used[0]}, got True: the outputs are a "
            "linear layer behind the memory."
        )
    recurrent = settings["use_lstm"] or settings["use_gru"]
    for key in ("lstm_use_prev_action", "lstm_use_prev_reward"):
        if settings[key] and not recurrent:
            raise ModelSettingError(
                f"model[{key!r}] must be False without use_lstm or use_gru, got True. Add "
                "model={'use_lstm': True}."
            )
    for key in ("attention_use_n_prev_actions", "attention_use_n_prev_rewards"):
        if settings[key] and not settings["use_attention"]:
            raise ModelSettingError(
                f"model[{key!r}] must be 0 without use_attention, got {settings[key]}. Add "
                "model={'use_attention': True}."
            )
    training, acting = (settings[f"attention_memory_{x}"] for x in ("training", "inference"))
    if training not in (acting, MODEL_DEFAULTS["attention_memory_training"]):
        raise ModelSettingError(
            "model['attention_memory_training'] must be left out or equal "
            f"model['attention_memory_inference'] = {acting}, got {training}: training reads the "
            "memory that acting had, so that both compute the same."
        )
