"""What a setting is: a field of a section that says its rule, and how it takes a dict."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np

from tfpolicies.config.read_only import copied, is_dict, merged
from tfpolicies.errors import ConfigError, show_value
from tfpolicies.rules import Rule, is_one_of
from tfpolicies.type_aliases import Setting


class Merge(enum.Enum):
    """What becomes of the present dict when another one is given."""

    REPLACE = "it goes"
    KEYS = "its keys stay that are not given"
    DEEP = "as KEYS, also in the dicts in it"
    TYPED = "as KEYS, unless another 'type' is given: other keys belong to the old one"


def setting(
    default: Setting,
    rule: Rule | None = None,
    *,
    merge: Merge | None = None,
    kept: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns the dataclass field of a setting.

    What a section leaves out about a setting of its base is as the base has it.

    Args:
        default: what it is where nothing is given; a dict or list is copied.
        rule: what it must be; anything by default.
        merge: how a given dict is laid over the present one; it replaces it by default.
        kept: gives the form in which the config keeps what was given.
    """
    every = {"rule": rule, "merge": merge, "kept": kept}
    told = {name: value for name, value in every.items() if value is not None}
    if isinstance(default, dict | list):
        shared = copied(default)  # by all sections: nobody writes into what a section holds
        return field(default_factory=lambda: shared, metadata=told)
    return field(default=default, metadata=told)


@functools.cache
def get_metadata(section: type) -> Mapping[str, Mapping[str, Any]]:
    """Returns the arguments that `setting` got for each setting of a section, by name."""
    result: dict[str, Mapping[str, Any]] = {}
    for kind in reversed(section.__mro__):
        for each in vars(kind).get("__dataclass_fields__", {}).values():
            result[each.name] = {**result.get(each.name, {}), **each.metadata}
    return result


@functools.cache
def _rules(section: type) -> list[tuple[str, Rule, Any]]:
    """Returns the settings of a section that have rules, with these and the defaults, checked."""
    rules = []
    for each in fields(section):
        rule = get_metadata(section)[each.name].get("rule")
        if rule is not None:
            make = each.default_factory
            default = each.default if make is MISSING else make()
            require(each.name, rule, default)
            rules.append((each.name, rule, default))
    return rules


@dataclass(frozen=True, kw_only=True)
class Section:
    """Settings that belong together, checked when they are made.

    Raises:
        ConfigError: naming the setting, its rule and the value.
    """

    def __post_init__(self) -> None:
        kind: type = type(self)
        for name, rule, default in _rules(kind):
            value = getattr(self, name)
            if value is not default:  # a config is changed often
                require(name, rule, value)


def require(name: str, rule: Rule, value: object) -> None:
    """Raises a `ConfigError` that names the setting, its rule and the value, unless it holds."""
    if not rule.holds(value):
        hint = rule.hint(value)
        raise ConfigError(f"{name} must be {rule.words}{hint}, got {show_value(value)}.")


def check(condition: bool, name: str, rule: str, value: object) -> None:
    """Raises a `ConfigError` as `require` does, unless a condition holds."""
    if not condition:
        raise ConfigError(f"{name} must be {rule}, got {show_value(value)}.")


def taken(told: Mapping[str, Any], present: Setting, value: Setting) -> Any:
    """Returns a setting as a config keeps it, laid over the present value if dicts are merged.

    NumPy's numbers become Python's, and a whole float an integer where the rule asks for one. What
    is in an `env_config` stays as it is.

    Args:
        told: what `get_metadata` has about it.
        present: what is kept now.
        value: what is given.
    """
    merge = told.get("merge", Merge.REPLACE)
    value = _as_python(value)
    if merge in (Merge.KEYS, Merge.TYPED) and is_dict(value):
        value = {key: _as_python(part) for key, part in value.items()}
    rule = told.get("rule")
    if isinstance(value, float) and value.is_integer() and rule is not None:
        value = int(value) if rule.holds(int(value)) and not rule.holds(value) else value
    if "kept" in told:
        value = told["kept"](value)
    if merge is Merge.REPLACE or not isinstance(value, Mapping):
        return copied(value)
    base = present if isinstance(present, Mapping) else {}
    kind = base.get("type")
    if merge is Merge.TYPED and not is_one_of(value.get("type", kind), kind):
        base = {}
    return copied(merged(base, value, deep=merge is Merge.DEEP))


def _as_python(value: Setting) -> Any:
    """Returns a NumPy scalar as Python's number, also in lists and tuples."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(_as_python, value))
    return value
