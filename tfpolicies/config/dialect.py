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

from tfpolicies.errors import ConfigError
from tfpolicies.porting_tables import LATER_SETTINGS, codes, read_table
from tfpolicies.type_aliases import Setting

logger = logging.getLogger("tfpolicies")

_LATER = {row.names[0]: codes(row.here)[0] for row in read_table(LATER_SETTINGS)}

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
    **_LATER,
    "framework_str": "framework",
    "input": "input_",
    "policy_model_config": "model",
    "optimization_config": "optimization",
    "alpha_lr": "entropy_lr",
}
"""Alias of a setting -> its canonical name."""

GROUPS: Mapping[str, Mapping[str, str]] = {
    "optimization": {
        "actor_learning_rate": "actor_lr",
        "critic_learning_rate": "critic_lr",
        "entropy_learning_rate": "entropy_lr",
    },
}
"""Dict settings that set several others: by name, the setting of each key."""

GUESTS: Mapping[str, tuple[str, ...]] = {
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


class Constant(NamedTuple):
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
    why: str
    harmless: tuple[Any, ...] = ()
    said: str | None = None


_GONE = -1
"""RLlib's default of deprecated arguments."""


def _read_constants() -> dict[str, Constant]:
    """Reads `constant_settings.json`, which groups settings with the same reason.

    The keys of an entry are those of `Constant`, with "values" for name -> value.
    """
    text = resources.files(__package__).joinpath("constant_settings.json").read_text("utf-8")
    return {
        name: Constant(
            each["method"], value, each["why"], tuple(each.get("harmless", ())), each.get("said")
        )
        for each in json.loads(text)
        for name, value in each["values"].items()
    }


CONSTANTS: Mapping[str, Constant] = _read_constants()
"""Fixed settings by name."""


def require_constant(name: str, value: Setting) -> None:
    """Raises a `ConfigError` unless a fixed setting gets its value, or one without effect."""
    constant = CONSTANTS[name]
    if any(_same(value, accepted) for accepted in (constant.value, *constant.harmless)):
        if constant.said and not _same(value, constant.value):
            logger.warning("%s=%r %s: %s.", name, value, constant.said, constant.why)
        return
    if constant.value == _GONE:
        raise ConfigError(f"{name}={value!r} has been deprecated: {constant.why}.")
    raise ConfigError(f"{name} must be {constant.value!r} here, got {value!r}: {constant.why}.")


def _same(value: Setting, accepted: Setting) -> bool:
    kinds = {type(value), type(accepted)}
    return value is accepted or ((len(kinds) == 1 or kinds == {int, float}) and value == accepted)
