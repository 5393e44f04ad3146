"""Finds settings far outside of the range in which an algorithm is known to learn.

The range of a setting is that of the tuned settings of the algorithm (all environments of RL
Baselines3 Zoo), its default, and the ranges that the papers tried; see `_KNOWN`. A setting is named
if it is outside by a factor, so that unusual environments have room.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tfpolicies.algorithms.health_rules import Finding
from tfpolicies.algorithms.health_stats import to_float
from tfpolicies.algorithms.tuned_hyperparameters import get_tuned_entries

_MAX_FACTOR = 3.0  # outside of the usual range: half an order of magnitude
_HORIZONS = ("gamma", "lambda")  # compared as 1 / (1 - x), the steps that they look ahead
_MIN_TUNED = 3  # tuned entries that make a range


class _Effect(NamedTuple):
    """Effects of a setting that is too small or too large."""

    too_small: str
    too_large: str


_STEP = _Effect("so updates hardly change the policy", "so each update undoes earlier learning")
_EFFECTS: Mapping[str, _Effect] = {
    "lr": _STEP,
    "actor_lr": _STEP,
    "critic_lr": _STEP,
    "entropy_lr": _Effect("so the temperature hardly changes", "so the temperature is unstable"),
    "gamma": _Effect("so later rewards do not count", "so values are of distant, noisy rewards"),
    "lambda": _Effect("so advantages have the bias of the values", "so advantages are noisy"),
    "clip_param": _Effect(
        "so nearly all gradients are clipped away", "so updates are hardly limited"
    ),
    "grad_clip": _Effect("so gradients are cut to almost nothing", "so gradients are not limited"),
    "entropy_coeff": _Effect("", "so the policy is trained to act at random"),
    "vf_loss_coeff": _Effect(
        "so the value function hardly learns", "so its loss dominates that of the policy"
    ),
    "kl_coeff": _Effect("", "so the policy is held where it is"),
    "kl_target": _Effect("so the policy is held where it is", "so updates are hardly limited"),
    "train_batch_size": _Effect(
        "so each update follows the noise of few rows", "so there are few updates per sampled step"
    ),
    "sgd_minibatch_size": _Effect(
        "so each update follows the noise of few rows", "so there are few updates per train batch"
    ),
    "num_sgd_iter": _Effect(
        "so the sampled rows are hardly used", "so the policy is fitted to one train batch"
    ),
    "n_step": _Effect("", "so returns are those of an older policy"),
    "training_intensity": _Effect(
        "so the sampled rows are hardly used", "so values are fitted to few rows"
    ),
    "replay_buffer_config.capacity": _Effect("so only the newest rows are learned from", ""),
    "beta": _Effect("", "so a few rows with large advantages have all the weight"),
    "model.fcnet_hiddens": _Effect("so the network cannot represent much", "so it trains slowly"),
    "adam_epsilon": _Effect("", "so gradients are divided by it and updates are tiny"),
    "target_noise": _Effect("", "so target values are those of other actions"),
    "policy_delay": _Effect("", "so the policy is hardly updated"),
    "initial_alpha": _Effect("", "so the policy is trained to act at random"),
}

_ANY_LR = (1e-5, 3e-3)
_KNOWN: Mapping[str, tuple[float, float]] = {
    "lr": _ANY_LR,
    "actor_lr": _ANY_LR,
    "critic_lr": _ANY_LR,
    "entropy_lr": _ANY_LR,
    "gamma": (0.9, 0.999),
    "lambda": (0.8, 1.0),
    "clip_param": (0.1, 0.5),  # Andrychowicz et al. 2021 tried these
    "grad_clip": (0.5, 100.0),
    "entropy_coeff": (0.0, 0.03),
    "vf_loss_coeff": (0.1, 1.0),
    "kl_coeff": (0.0, 1.0),
    "kl_target": (0.003, 0.03),  # Schulman et al. 2017, table 1
    "train_batch_size": (64, 4096),
    "sgd_minibatch_size": (32, 4096),
    "num_sgd_iter": (3, 30),
    "n_step": (1, 10),
    "replay_buffer_config.capacity": (1e4, math.inf),
    "beta": (0.0, 3.0),
    "model.fcnet_hiddens": (32, 1024),
    "adam_epsilon": (0.0, 1e-3),
    "target_noise": (0.05, 0.5),  # Fujimoto et al. 2018
    "policy_delay": (1, 4),
    "initial_alpha": (0.0, 1.0),
}
"""Ranges that hold for all algorithms; those of tuned settings widen them."""

_UNBOUNDED = ("training_intensity",)  # ranges of tuned settings only
_WITHOUT_LIMIT = ("sgd_minibatch_size", 0)  # all rows, for BC and MARWIL


class _Range(NamedTuple):
    """The usual range of a setting, and a typical value if there are tuned ones."""

    low: float
    high: float
    typical: float | None = None

    def __str__(self) -> str:
        return (
            f"at least {self.low:g}" if math.isinf(self.high) else f"{self.low:g} to {self.high:g}"
        )


class UnusualSetting(NamedTuple):
    """A setting outside of its usual range.

    Attributes:
        name: of the setting; a dot precedes a key of a nested one.
        factor: how far it is outside, at least 3.
        finding: says so.
    """

    name: str
    factor: float
    finding: Finding


def find_unusual_settings(algorithm: str, settings: Mapping[str, Any]) -> list[UnusualSetting]:
    """Returns the settings far outside of their usual range, the farthest first.

    Args:
        algorithm: its name.
        settings: of the run or of one of its policies.

    >>> [x.name for x in find_unusual_settings("PPO", {"clip_param": 1e-4, "lr": 3e-4})]
    ['clip_param']
    """
    values = dict(_flatten(settings))
    tuned = [dict(_flatten(entry.settings)) for entry in get_tuned_entries(algorithm).values()]
    unusual_settings = []
    for name in (*_KNOWN, *_UNBOUNDED):
        value = values.get(name, math.nan)
        usual = _get_range(name, tuned)
        if usual is None or not math.isfinite(value) or (name, value) == _WITHOUT_LIMIT:
            continue
        factor = _get_factor(name, value, usual)
        if factor >= _MAX_FACTOR:
            unusual_settings.append(UnusualSetting(name, factor, _describe(name, value, usual)))
    return sorted(unusual_settings, key=lambda unusual: -unusual.factor)


def find_differences(
    settings: Mapping[str, Any], tuned_settings: Mapping[str, Any]
) -> dict[str, tuple[float, float]]:
    """Returns the numbers that differ from tuned settings: value and tuned value by name."""
    values = dict(_flatten(settings))
    differences = {
        name: (values[name], tuned)
        for name, tuned in _flatten(tuned_settings)
        if name in values and not math.isclose(values[name], tuned, rel_tol=0.01)
    }

    def get_factor(name: str) -> float:
        value, tuned = differences[name]
        return max(_get_factor(name, value, _Range(tuned, tuned)), 1.0)

    return {name: differences[name] for name in sorted(differences, key=get_factor, reverse=True)}


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers in settings; for a list of layers, the smallest one."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and name == "fcnet_hiddens" and value:
            yield f"{prefix}{name}", to_float(min(value))
        elif not math.isnan(number := to_float(value)):
            yield f"{prefix}{name}", number


def _get_range(name: str, tuned: list[dict[str, float]]) -> _Range | None:
    numbers = sorted(settings[name] for settings in tuned if name in settings)
    if name not in _KNOWN and len(numbers) < _MIN_TUNED:
        return None
    low, high = _KNOWN.get(name, (math.inf, -math.inf))
    typical = numbers[len(numbers) // 2] if numbers else None
    return _Range(min([low, *numbers]), max([high, *numbers]), typical)


def _get_factor(name: str, value: float, usual: _Range) -> float:
    """Returns by which factor a value is outside of a range; 1 or less within it."""
    low, high = usual.low, usual.high
    if name in _HORIZONS:
        value, low, high = (1 / (1 - x) if x < 1 else math.inf for x in (value, low, high))
        if value == math.inf:
            return 1.0  # returns are not discounted, which is right for short episodes
    if value < low:
        return low / value if value > 0 else math.inf
    return value / high if high > 0 else math.inf if value > high else 1.0


def _describe(name: str, value: float, usual: _Range) -> Finding:
    is_small = value < usual.low
    effect = _EFFECTS[name].too_small if is_small else _EFFECTS[name].too_large
    suggestion = usual.low if is_small else usual.high
    if usual.typical is not None:
        suggestion = usual.typical
    number = f"{suggestion:g}" if suggestion >= 1 else f"{suggestion:.1g}"
    if name in _HORIZONS:
        number = f"{suggestion:g}"
    setting, _, key = name.partition(".")
    keyword = f"{setting}_" if setting == "lambda" else setting
    change = f"{keyword}={{{key!r}: {number}}}" if key else f"{keyword}={number}"
    if key == "fcnet_hiddens":
        change = "model={'fcnet_hiddens': [64, 64]}"
    return Finding(
        title=f"{name} is too {'small' if is_small else 'large'}",
        evidence=f"{name} is {value:g}; {usual} is usual{', ' if effect else ''}{effect}.",
        advice=f"{'Raise' if is_small else 'Lower'} it, for example to training({change}).",
        settings={name: value},
    )
