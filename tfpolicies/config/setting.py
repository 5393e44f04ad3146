"""Settings: dataclass fields of a section with a rule and a way to merge dicts."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np

from tfpolicies.base.type_aliases import Setting
from tfpolicies.base.validators import Validator, is_one_of
from tfpolicies.config.live_dict import copy_containers, is_dict, merge_dicts
from tfpolicies.errors import ConfigError, show_value


class Merge(enum.Enum):
    """Ways to merge a given dict into the current one."""

    REPLACE = "the given dict replaces the current one"
    KEYS = "keys that are not given are kept"
    DEEP = "as KEYS, also in nested dicts"
    TYPED = "as KEYS, unless another 'type' is given, which replaces all keys"


def setting(
    default: Setting,
    rule: Validator | None = None,
    *,
    merge: Merge | None = None,
    normalize: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns the dataclass field of a setting.

    Arguments that are left out are inherited from the same setting of a base section.

    Args:
        default: its value if not given; a dict or list is copied.
        rule: validates values; by default any value is valid.
        merge: how a given dict is merged into the current one; it replaces it by default.
        normalize: converts a given value to its stored form.
    """
    arguments = {"rule": rule, "merge": merge, "normalize": normalize}
    metadata = {name: value for name, value in arguments.items() if value is not None}
    if isinstance(default, dict | list):
        shared = copy_containers(default)  # shared by all sections, which never modify it
        return field(default_factory=lambda: shared, metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def get_metadata(section: type) -> Mapping[str, Mapping[str, Any]]:
    """Returns the arguments of `setting` for each setting of a section, by name."""
    result: dict[str, Mapping[str, Any]] = {}
    for base in reversed(section.__mro__):
        for dataclass_field in vars(base).get("__dataclass_fields__", {}).values():
            result[dataclass_field.name] = {
                **result.get(dataclass_field.name, {}),
                **dataclass_field.metadata,
            }
    return result


@functools.cache
def _get_rules(section: type) -> list[tuple[str, Validator, Any]]:
    """Returns name, rule and validated default of the settings of a section with rules."""
    rules = []
    for dataclass_field in fields(section):
        rule = get_metadata(section)[dataclass_field.name].get("rule")
        if rule is not None:
            factory = dataclass_field.default_factory
            default = dataclass_field.default if factory is MISSING else factory()
            require(dataclass_field.name, rule, default)
            rules.append((dataclass_field.name, rule, default))
    return rules


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of settings, validated on construction.

    Raises:
        ConfigError: if a value is invalid; it names the setting, its rule and the value.
    """

    def __post_init__(self) -> None:
        section_class: type = type(self)
        for name, rule, default in _get_rules(section_class):
            value = getattr(self, name)
            if value is not default:  # saves time: configs change often
                require(name, rule, value)


def require(name: str, rule: Validator, value: object) -> None:
    """Raises a `ConfigError` with name, rule and value, unless the value fulfils the rule."""
    if not rule.is_valid(value):
        hint = rule.hint(value)
        raise ConfigError(f"{name} must be {rule.description}{hint}, got {show_value(value)}.")


def check(condition: bool, name: str, rule: str, value: object) -> None:
    """Raises a `ConfigError` as `require` does, unless `condition` is true."""
    if not condition:
        raise ConfigError(f"{name} must be {rule}, got {show_value(value)}.")


def merge_value(metadata: Mapping[str, Any], current: Setting, value: Setting) -> Any:
    """Returns a given value in its stored form, merged into the current value for dicts.

    NumPy numbers become Python numbers, and a whole float becomes an integer if the rule requires
    one. Values in an `env_config` stay unchanged.

    Args:
        metadata: metadata of the setting, from `get_metadata`.
        current: the current value.
        value: the given value.
    """
    merge = metadata.get("merge", Merge.REPLACE)
    value = _to_python(value)
    if merge in (Merge.KEYS, Merge.TYPED) and is_dict(value):
        value = {key: _to_python(part) for key, part in value.items()}
    rule = metadata.get("rule")
    if isinstance(value, float) and value.is_integer() and rule is not None:
        value = int(value) if rule.is_valid(int(value)) and not rule.is_valid(value) else value
    if "normalize" in metadata:
        value = metadata["normalize"](value)
    if merge is Merge.REPLACE or not isinstance(value, Mapping):
        return copy_containers(value)
    base = current if isinstance(current, Mapping) else {}
    current_type = base.get("type")
    if merge is Merge.TYPED and not is_one_of(value.get("type", current_type), current_type):
        base = {}
    return copy_containers(merge_dicts(base, value, deep=merge is Merge.DEEP))


def _to_python(value: Setting) -> Any:
    """Converts NumPy scalars to Python numbers, also in lists and tuples."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(_to_python, value))
    return value
