"""Answers to names of other libraries, for messages: most are rows of `porting_tables.md`."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, ParamSpec, TypeVar

import numpy as np

from tfpolicies.errors import ConfigError
from tfpolicies.extensions import describe_missing
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.porting_tables import (
    KERAS,
    SB3,
    SB3_SETTINGS,
    as_plain_text,
    codes,
    find_required_import,
    read_table,
)
from tfpolicies.type_aliases import Setting

_P = ParamSpec("_P")
_R = TypeVar("_R")

_ANSWERS: Mapping[str, Mapping[str, str]] = json.loads(
    resources.files(__package__).joinpath("idioms.json").read_text("utf-8")
)

SETTINGS = _ANSWERS["settings"]
"""Settings of Stable-Baselines3, Keras and others that take more words than a row has."""

LEARN_ARGUMENTS = _ANSWERS["learn_arguments"]
"""Arguments of what learns in Stable-Baselines3, by name."""

EVALUATE_ARGUMENTS = _ANSWERS["evaluate_arguments"]
"""Arguments of what evaluates in Stable-Baselines3 and others, by name."""

PREDICT_ARGUMENTS = _ANSWERS["predict_arguments"]
"""Arguments of what acts in Stable-Baselines3, by name."""

METHODS = _ANSWERS["methods"]
"""Methods of algorithms and policies there that have no row."""


def setting_answer(name: str, methods: Mapping[str, str]) -> str:
    """Returns how a setting of another library is given to a config; "" if there is no answer.

    Args:
        name: of the setting.
        methods: those of the config, by the name of the setting that they take.

    >>> setting_answer("ent_coef", {"initial_alpha": "training"})
    'training(initial_alpha=...)'
    """
    if name in SETTINGS:
        return SETTINGS[name]
    for code in _settings().get(name, ()):
        setting = code.partition("=")[0]
        if setting in methods:
            return f"{methods[setting]}({code if '...' in code else f'{setting}=...'})"
    return ""


@functools.cache
def _settings() -> dict[str, list[str]]:
    """Returns what rows say of each setting of Stable-Baselines3, for one algorithm and others."""
    result: dict[str, list[str]] = {}
    for row in (row for header in SB3_SETTINGS for row in read_table(header)):
        for code, here in zip(row.names, codes(row.here), strict=False):
            result.setdefault(code.partition("=")[0], []).append(here.replace('"', "'"))
    return result


@functools.cache
def _methods() -> dict[str, str]:
    """Returns what to do in place of each method of a model there: `model.fit(...)`, and so on."""
    result = dict(METHODS)
    for row in (row for header in (SB3, KERAS) for row in read_table(header)):
        for code, here in zip(row.names, codes(row.here), strict=False):
            if found := re.match(r"\w+\.(\w+)\(", code):
                result.setdefault(found[1], f"Use `{here}`.")
    return result


def setting_hint(name: str, methods: Mapping[str, str]) -> str:
    """Returns what to write for a setting of another library; "" if there is no answer.

    Args:
        name: of the setting.
        methods: as `setting_answer` takes them.

    >>> setting_hint("learning_rate", {"lr": "training"}), setting_hint("lr", {})
    (' Here it is training(lr=...).', '')
    """
    if name in MODEL_DEFAULTS:
        return f" It is a setting of the model: model={{{name!r}: ...}}, --set model.{name}=... ."
    answer = setting_answer(name, methods)
    return answer and f" Here it is {answer}."


def answering(
    answer: Callable[[Any, str], str], advice: str = ""
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a method that is given keywords of another library say what to write instead.

    Args:
        answer: returns what to write, "" if that is unknown, for the object and a keyword.
        advice: what the message ends with; `{0}` is the class of the object.
    """

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        taken = set(inspect.signature(method).parameters)

        @functools.wraps(method)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            unknown = [name for name in kwargs if name not in taken]
            if unknown:
                owner = type(args[0]).__name__
                called = owner if method.__name__ == "__init__" else f"{owner}.{method.__name__}"
                hints = [(name, answer(args[0], name)) for name in unknown]
                lines = [f" Here {name!r} is {text}." for name, text in hints if text]
                raise TypeError(
                    f"{called}() got unexpected keywords: {', '.join(unknown)}."
                    f"{''.join(lines)}{advice.format(owner)}"
                )
            return method(*args, **kwargs)

        return checked

    return decorate


def missing_attribute(owner: object, name: str) -> str:
    """Returns the message of an `AttributeError` about a method of another library, or any name."""
    hint = f". {_methods()[name]}" if name in _methods() else ""
    return f"{describe_missing(owner, name)}{hint}"


def check_recorded_statistics(view: object) -> None:
    """Checks that a loss keeps no statistics in attributes, as RLlib's do.

    Args:
        view: the `self` of the loss, after its call.

    Raises:
        ConfigError: if it does: the message names them and says what to write.
    """
    unread = [name for name in vars(view) if name.startswith("_mean_")]
    if not unread:
        return
    statement = next(filter(None, (find_required_import(type(view), name) for name in unread)), "")
    advice = f"; or import the names for ported code, which read RLlib's: {statement}"
    raise ConfigError(
        f"{type(view).__name__}.loss keeps {', '.join(unread)} on self, where nothing reads "
        f"them. Call self.record(kl=...) for statistics{advice if statement else ''}."
    )


def positional_config(algorithm: str, given: object) -> str:
    """Returns what to write where an algorithm was called as those of Stable-Baselines3 are."""
    return (
        f"{algorithm} takes a config, got {given!r:.100}. Write {algorithm}Config()"
        ".environment(env).training(model={'fcnet_hiddens': [64, 64]}).build(); an image gets "
        "convolutions by itself."
    )


def callback_hint(given: object) -> str:
    """Returns what to write for a callback of Keras or Stable-Baselines3; "" for other objects.

    >>> class TensorBoard:
    ...     __module__ = "keras.callbacks"
    >>> callback_hint(TensorBoard())
    ' Use learn(..., run_dir=...); events are in the run folder.'
    """
    tables = {"keras": KERAS, "stable_baselines3": SB3}
    for kind in type(given).__mro__:
        header = tables.get(kind.__module__.partition(".")[0])
        for row in read_table(header) if header else ():
            if kind.__name__ in [code.partition("(")[0] for code in row.names]:
                return f" Use {as_plain_text(row.here)}."
    return ""


def optimizer_settings(given: Any) -> str | None:
    """Returns how a Keras optimizer is given here; None if it is something else."""
    if not hasattr(given, "get_config") or not hasattr(given, "apply_gradients"):
        return None
    kind, own = type(given), given.get_config()
    try:
        default = kind().get_config()
    except TypeError:  # one around another one
        return "lr=..., optimizer={'type': 'adam', ...}"
    changed = {name: x for name, x in own.items() if x != default.get(name) and name != "name"}
    rate = changed.pop("learning_rate", own["learning_rate"])
    if isinstance(rate, Mapping):
        rate = _schedule(rate["class_name"], rate["config"])
    else:
        rate = float(f"{rate:.7g}")  # which Keras keeps as a float32
    return f"lr={rate!r}, optimizer={ {'type': kind.__name__.lower(), **changed}!r}"


def rate_hint(lr: Setting) -> str:
    """Returns what to write for a learning rate of another form; "" if there is no answer.

    >>> rate_hint("lin_1e-3")
    ' (one that falls to 0 is training(lr_schedule=[[0, 0.001], [total_timesteps, 0.0]]))'
    """
    if isinstance(lr, list | tuple):
        return " ([[step, rate], ...] goes into lr_schedule)"
    if isinstance(lr, str) and (found := re.fullmatch(r"lin_(\d[\d.]*(?:e-?\d+)?)", lr)):
        rate = float(found[1])
        schedule = f"[[0, {rate!r}], [total_timesteps, 0.0]]"
        return f" (one that falls to 0 is training(lr_schedule={schedule}))"
    return ""


def described_schedule(lr: Any) -> Any:
    """Returns a learning rate as a config keeps it: a schedule of Keras's own as a dict.

    What is no such schedule is returned as it is.
    """
    kind = type(lr)
    is_schedule = any(base.__name__ == "LearningRateSchedule" for base in inspect.getmro(kind))
    if not (is_schedule and kind.__module__.startswith("keras.")):
        return lr
    return _schedule(kind.__name__, lr.get_config())


def _schedule(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: x for name, x in settings.items() if name != "name"}
    return {"type": kind, **{name: _plain(x) for name, x in kept.items()}}


def _plain(value: Setting) -> Any:
    """Returns numbers as Python has them, which may come as those of NumPy or as tensors."""
    if value is None or isinstance(value, bool | int | str):
        return value
    return np.asarray(value).tolist()
