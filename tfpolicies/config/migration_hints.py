"""Hints for names of Stable-Baselines3, Keras and RLlib in error messages.

Most are rows of `porting_tables.md`.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, ParamSpec, TypeVar

import numpy as np

from tfpolicies.base.extensions import describe_missing
from tfpolicies.base.porting_tables import (
    KERAS,
    SB3,
    SB3_SETTINGS,
    as_plain_text,
    extract_code,
    find_required_import,
    read_table,
)
from tfpolicies.base.type_aliases import Setting
from tfpolicies.errors import ConfigError
from tfpolicies.models.defaults import MODEL_DEFAULTS

_P = ParamSpec("_P")
_R = TypeVar("_R")

_HINTS: Mapping[str, Mapping[str, str]] = json.loads(
    resources.files(__package__).joinpath("migration_hints.json").read_text("utf-8")
)

SETTINGS = _HINTS["settings"]
"""Settings of Stable-Baselines3, Keras and others whose hints are too long for a table row."""

LEARN_ARGUMENTS = _HINTS["learn_arguments"]
"""Arguments of `learn` in Stable-Baselines3 and others, by name."""

EVALUATE_ARGUMENTS = _HINTS["evaluate_arguments"]
"""Arguments of evaluation functions in Stable-Baselines3 and others, by name."""

PREDICT_ARGUMENTS = _HINTS["predict_arguments"]
"""Arguments of `predict` in Stable-Baselines3, by name."""

METHODS = _HINTS["methods"]
"""Methods of their algorithms and policies that are not in a table."""


def find_setting_equivalent(name: str, methods: Mapping[str, str]) -> str:
    """Returns the config call for a setting of another library; "" if there is no equivalent.

    Args:
        name: of the setting.
        methods: the config's methods, by the settings they accept.

    >>> find_setting_equivalent("ent_coef", {"initial_alpha": "training"})
    'training(initial_alpha=...)'
    """
    if name in SETTINGS:
        return SETTINGS[name]
    for equivalent in _read_setting_table().get(name, ()):
        setting = equivalent.partition("=")[0]
        if setting in methods:
            return f"{methods[setting]}({equivalent if '...' in equivalent else f'{setting}=...'})"
    return ""


@functools.cache
def _read_setting_table() -> dict[str, list[str]]:
    """Returns the equivalents of each Stable-Baselines3 setting, from the tables."""
    result: dict[str, list[str]] = {}
    for row in (row for header in SB3_SETTINGS for row in read_table(header)):
        for code, equivalent in zip(row.names, extract_code(row.replacement), strict=False):
            result.setdefault(code.partition("=")[0], []).append(equivalent.replace('"', "'"))
    return result


@functools.cache
def _read_method_table() -> dict[str, str]:
    """Returns hints for methods of their models, such as `model.fit(...)`."""
    result = dict(METHODS)
    for row in (row for header in (SB3, KERAS) for row in read_table(header)):
        for code, equivalent in zip(row.names, extract_code(row.replacement), strict=False):
            if match := re.match(r"\w+\.(\w+)\(", code):
                result.setdefault(match[1], f"Use `{equivalent}`.")
    return result


def suggest_setting(name: str, methods: Mapping[str, str]) -> str:
    """Returns a hint for a setting of another library; "" if there is none.

    Args:
        name: of the setting.
        methods: as in `find_setting_equivalent`.

    >>> suggest_setting("learning_rate", {"lr": "training"}), suggest_setting("lr", {})
    (' Here it is training(lr=...).', '')
    """
    if name in MODEL_DEFAULTS:
        return f" It is a setting of the model: model={{{name!r}: ...}}, --set model.{name}=... ."
    equivalent = find_setting_equivalent(name, methods)
    return equivalent and f" Here it is {equivalent}."


def suggest_for_unknown_keywords(
    get_hint: Callable[[Any, str], str], advice: str = ""
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a method so that its errors for unknown keywords contain hints.

    Args:
        get_hint: returns the equivalent for an object and a keyword; "" if there is none.
        advice: the end of the message; `{0}` is the class of the object.
    """

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = set(inspect.signature(method).parameters)

        @functools.wraps(method)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            unknown = [name for name in kwargs if name not in parameters]
            if unknown:
                owner = type(args[0]).__name__
                called = owner if method.__name__ == "__init__" else f"{owner}.{method.__name__}"
                hints = [(name, get_hint(args[0], name)) for name in unknown]
                lines = [f" Here {name!r} is {text}." for name, text in hints if text]
                raise TypeError(
                    f"{called}() got unexpected keywords: {', '.join(unknown)}."
                    f"{''.join(lines)}{advice.format(owner)}"
                )
            return method(*args, **kwargs)

        return wrapper

    return decorate


def describe_missing_attribute(owner: object, name: str) -> str:
    """Returns the message of an `AttributeError`, with a hint for methods of other libraries."""
    hint = f". {_read_method_table()[name]}" if name in _read_method_table() else ""
    return f"{describe_missing(owner, name)}{hint}"


def check_recorded_statistics(view: object) -> None:
    """Checks that a loss does not store statistics in attributes, as RLlib's losses do.

    Args:
        view: the `self` of the loss, after its call.
    """
    unread_names = [name for name in vars(view) if name.startswith("_mean_")]
    if not unread_names:
        return
    statement = next(
        filter(None, (find_required_import(type(view), name) for name in unread_names)), ""
    )
    advice = f"; or import the names for ported code, which read RLlib's: {statement}"
    raise ConfigError(
        f"{type(view).__name__}.loss stores {', '.join(unread_names)} on self, where nothing reads "
        f"them. Call self.record(kl=...) for statistics{advice if statement else ''}."
    )


def describe_positional_config(algorithm: str, value: object) -> str:
    """Returns the message for a constructor call in the style of Stable-Baselines3."""
    return (
        f"{algorithm} takes a config, got {value!r:.100}. Write {algorithm}Config()"
        ".environment(env).training(model={'fcnet_hiddens': [64, 64]}).build(); images get "
        "convolutions automatically."
    )


def suggest_callback(callback: object) -> str:
    """Returns a hint for a callback of Keras or Stable-Baselines3; "" for other objects.

    >>> class TensorBoard:
    ...     __module__ = "keras.callbacks"
    >>> suggest_callback(TensorBoard())
    ' Use learn(..., run_dir=...); events are in the run folder.'
    """
    tables = {"keras": KERAS, "stable_baselines3": SB3}
    for base in type(callback).__mro__:
        header = tables.get(base.__module__.partition(".")[0])
        for row in read_table(header) if header else ():
            if base.__name__ in [code.partition("(")[0] for code in row.names]:
                return f" Use {as_plain_text(row.replacement)}."
    return ""


def describe_optimizer(optimizer: Any) -> str | None:
    """Returns the settings equivalent to a Keras optimizer; None for other objects."""
    if not hasattr(optimizer, "get_config") or not hasattr(optimizer, "apply_gradients"):
        return None
    optimizer_class, settings = type(optimizer), optimizer.get_config()
    try:
        default = optimizer_class().get_config()
    except TypeError:  # it wraps another optimizer
        return "lr=..., optimizer={'type': 'adam', ...}"
    changed_settings = {
        name: x for name, x in settings.items() if x != default.get(name) and name != "name"
    }
    rate = changed_settings.pop("learning_rate", settings["learning_rate"])
    if isinstance(rate, Mapping):
        rate = _make_schedule_dict(rate["class_name"], rate["config"])
    else:
        rate = float(f"{rate:.7g}")  # Keras stores it as float32
    return (
        f"lr={rate!r}, "
        f"optimizer={ {'type': optimizer_class.__name__.lower(), **changed_settings}!r}"
    )


def suggest_learning_rate(lr: Setting) -> str:
    """Returns a hint for a learning rate in another format; "" if there is none.

    >>> suggest_learning_rate("lin_1e-3")
    ' (one that falls to 0 is training(lr_schedule=[[0, 0.001], [total_timesteps, 0.0]]))'
    """
    if isinstance(lr, list | tuple):
        return " ([[step, rate], ...] goes into lr_schedule)"
    if isinstance(lr, str) and (match := re.fullmatch(r"lin_(\d[\d.]*(?:e-?\d+)?)", lr)):
        rate = float(match[1])
        schedule = f"[[0, {rate!r}], [total_timesteps, 0.0]]"
        return f" (one that falls to 0 is training(lr_schedule={schedule}))"
    return ""


def normalize_schedule(lr: Any) -> Any:
    """Converts a built-in Keras schedule to a dict; returns other values unchanged."""
    schedule_class = type(lr)
    is_schedule = any(
        base.__name__ == "LearningRateSchedule" for base in inspect.getmro(schedule_class)
    )
    if not (is_schedule and schedule_class.__module__.startswith("keras.")):
        return lr
    return _make_schedule_dict(schedule_class.__name__, lr.get_config())


def _make_schedule_dict(type_name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: x for name, x in settings.items() if name != "name"}
    return {"type": type_name, **{name: _to_python(x) for name, x in values.items()}}


def _to_python(value: Setting) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    return np.asarray(value).tolist()
