"""RLlib's setting names: aliases, the methods that accept them, and fixed settings.

`Constant`s are settings of RLlib that have only one supported value here. They are not stored in a
config's sections, `to_dict()` or checkpoints; they can be read (`config.render_env`), and set to
their value. `idioms.py` has hints for names of other libraries.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

from tfpolicies.base.porting_tables import LATER_SETTINGS, extract_code, read_table
from tfpolicies.base.type_aliases import Setting
from tfpolicies.errors import ConfigError

logger = logging.getLogger("tfpolicies")

_RENAMED = {row.names[0]: extract_code(row.replacement)[0] for row in read_table(LATER_SETTINGS)}

DICT_NAMES = {
    "lambda_": "lambda",
    "num_rollout_workers": "num_workers",
    "create_env_on_local_worker": "create_env_on_driver",
    "custom_evaluation_function": "custom_eval_function",
    "num_cpus_for_local_worker": "num_cpus_for_driver",
}
"""Names of settings in `to_dict()`, where they differ."""

ALIASES = {
    **{old: name for name, old in DICT_NAMES.items()},
    **_RENAMED,
    "framework_str": "framework",
    "input": "input_",
    "policy_model_config": "model",
    "optimization_config": "optimization",
    "alpha_lr": "entropy_lr",
}
"""Alias of a setting -> its canonical name."""

SETTING_GROUPS: Mapping[str, Mapping[str, str]] = {
    "optimization": {
        "actor_learning_rate": "actor_lr",
        "critic_learning_rate": "critic_lr",
        "entropy_learning_rate": "entropy_lr",
    },
}
"""Dict settings that set several others: by name, the setting of each key."""

ALSO_ACCEPTED_BY: Mapping[str, tuple[str, ...]] = {
    "rollouts": (
        "restart_failed_sub_environments",
        "recreate_failed_workers",
        "ignore_worker_failures",
        "max_num_worker_restarts",
        "delay_between_worker_restarts_s",
        "num_consecutive_worker_failures_tolerance",
        "worker_health_probe_timeout_s",
        "worker_restore_timeout_s",
    ),
    "training": ("clip_actions",),
    "env_runners": (
        "explore",
        "exploration_config",
        "num_cpus_per_worker",
        "num_gpus_per_worker",
        "custom_resources_per_worker",
        "max_requests_in_flight_per_sampler_worker",
    ),
}
"""Settings of other sections that a method accepts, as in older or newer versions of RLlib."""


class FixedSetting(NamedTuple):
    """A setting of RLlib that has the same value in all configs.

    Attributes:
        method: the fluent method that accepts it.
        value: its value.
        reason: the reason why it is fixed, and the alternative.
        ignored_values: other accepted values without effect.
        warning: logged for these, if their lack of effect is not obvious.
    """

    method: str
    value: Any
    reason: str
    ignored_values: tuple[Any, ...] = ()
    warning: str | None = None


_DEPRECATED = -1
"""RLlib's default of deprecated arguments."""


def _read_fixed_settings() -> dict[str, FixedSetting]:
    """Reads `constant_settings.json`, which groups settings with the same reason.

    The keys of an entry are those of `Constant`, with "values" for name -> value.
    """
    text = resources.files(__package__).joinpath("constant_settings.json").read_text("utf-8")
    return {
        name: FixedSetting(
            entry["method"],
            value,
            entry["why"],
            tuple(entry.get("harmless", ())),
            entry.get("said"),
        )
        for entry in json.loads(text)
        for name, value in entry["values"].items()
    }


FIXED_SETTINGS: Mapping[str, FixedSetting] = _read_fixed_settings()
"""Fixed settings by name."""


def check_fixed_setting(name: str, value: Setting) -> None:
    """Raises a `ConfigError` unless a fixed setting gets its value, or one without effect."""
    fixed = FIXED_SETTINGS[name]
    if any(
        _is_same_value(value, accepted_value)
        for accepted_value in (fixed.value, *fixed.ignored_values)
    ):
        if fixed.warning and not _is_same_value(value, fixed.value):
            logger.warning("%s=%r %s: %s.", name, value, fixed.warning, fixed.reason)
        return
    if fixed.value == _DEPRECATED:
        raise ConfigError(f"{name}={value!r} has been deprecated: {fixed.reason}.")
    raise ConfigError(f"{name} must be {fixed.value!r} here, got {value!r}: {fixed.reason}.")


def _is_same_value(value: Setting, accepted_value: Setting) -> bool:
    types = {type(value), type(accepted_value)}
    return value is accepted_value or (
        (len(types) == 1 or types == {int, float}) and value == accepted_value
    )
