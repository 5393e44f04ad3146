"""Completes and checks the `model` config. Does not import Keras, so that configs can use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from tfpolicies.errors import ModelSettingError, show_value, suggest_similar_names
from tfpolicies.models.defaults import MODEL_DEFAULTS, MODEL_SETTINGS

Settings: TypeAlias = Mapping[str, Any]
"""A `model` config, or one that holds it."""


def complete_model_config(config: Settings) -> dict[str, Any]:
    """Completes a `model` config from `MODEL_DEFAULTS` and checks it.

    Args:
        config: any of the settings; missing ones get their defaults.

    Returns:
        A new dict with every setting.

    >>> complete_model_config({"use_gru": True})["lstm_cell_size"]
    256
    """
    for key in config:
        if key not in MODEL_DEFAULTS:
            all_settings = f" Settings are {', '.join(MODEL_DEFAULTS)}."
            raise ModelSettingError(
                f"model[{key!r}] is not a model "
                f"setting.{suggest_similar_names(key, MODEL_DEFAULTS) or all_settings} Pass a "
                "custom model as model={'custom_model': your_model}."
            )
    settings = {**MODEL_DEFAULTS, **config}
    for key, (_, rule) in MODEL_SETTINGS.items():
        if not rule.is_valid(settings[key]):
            value = show_value(settings[key])
            description = f"{rule.description}{rule.hint(settings[key])}"
            raise ModelSettingError(f"model[{key!r}] must be {description}, got {value}.")
    _check_combination(settings)
    return settings


def as_pair(value: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    """Returns a kernel or stride as (height, width).

    >>> as_pair(4), as_pair([3, 5])
    ((4, 4), (3, 5))
    """
    if isinstance(value, int):
        return value, value
    return int(value[0]), int(value[1])


_MEMORY_SETTINGS = ("use_lstm", "use_gru", "use_attention")
_REQUIRED_MEMORY = {
    "lstm_use_prev_action": ("use_lstm", "use_gru"),
    "lstm_use_prev_reward": ("use_lstm", "use_gru"),
    "attention_use_n_prev_actions": ("use_attention",),
    "attention_use_n_prev_rewards": ("use_attention",),
}
"""Settings that only have an effect with one of these memories."""


def has_memory(settings: Settings) -> bool:
    """Returns whether settings ask for a memory.

    >>> has_memory(complete_model_config({"use_gru": True})), has_memory(complete_model_config({}))
    (True, False)
    """
    return any(settings.get(key) for key in _MEMORY_SETTINGS)


def without_memory(settings: Settings) -> dict[str, Any]:
    """Returns the settings with all settings of memories at their defaults."""
    return {
        **settings,
        **{key: MODEL_DEFAULTS[key] for key in (*_MEMORY_SETTINGS, *_REQUIRED_MEMORY)},
    }


def _check_combination(settings: Settings) -> None:
    enabled = [key for key in _MEMORY_SETTINGS if settings[key]]
    if len(enabled) > 1:
        raise ModelSettingError(
            f"At most one of model['use_lstm'], model['use_gru'] and model['use_attention'] can be "
            f"True, got {' and '.join(enabled)}. Choose one kind of memory."
        )
    if enabled and settings["no_final_linear"]:
        raise ModelSettingError(
            f"model['no_final_linear'] must be False with {enabled[0]}, got True: the outputs are "
            "a linear layer after the memory."
        )
    for key, memories in _REQUIRED_MEMORY.items():
        if settings[key] and not any(settings[memory] for memory in memories):
            raise ModelSettingError(
                f"model[{key!r}] must be {MODEL_DEFAULTS[key]} without {' or '.join(memories)}, "
                f"got {settings[key]}. Add model={{{memories[0]!r}: True}}."
            )
    training, acting = (settings[f"attention_memory_{x}"] for x in ("training", "inference"))
    if training not in (acting, MODEL_DEFAULTS["attention_memory_training"]):
        raise ModelSettingError(
            "model['attention_memory_training'] must be left out or equal "
            f"model['attention_memory_inference'] = {acting}, got {show_value(training)}: training "
            "uses the memory from acting, so that both compute the same."
        )
