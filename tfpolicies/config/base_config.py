"""Base class of configs: settings in frozen sections, read as attributes and items."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, NamedTuple, TypeVar

from tfpolicies.base.extensions import EXTENSIONS, describe_import
from tfpolicies.base.type_aliases import Setting
from tfpolicies.config.live_dict import (
    PLAIN_TYPES,
    copy_containers,
    is_same,
    to_dict_value,
    wrap_mutable,
)
from tfpolicies.config.migration_hints import suggest_setting
from tfpolicies.config.rllib_settings import (
    ALIASES,
    ALSO_ACCEPTED_BY,
    DICT_NAMES,
    FIXED_SETTINGS,
    SETTING_GROUPS,
    check_fixed_setting,
)
from tfpolicies.config.search_spaces import has_search_space, require_values
from tfpolicies.config.setting import Section, check, get_metadata, merge_value
from tfpolicies.errors import (
    ConfigError,
    FrozenConfigError,
    UnknownSettingError,
    suggest_similar_names,
)

logger = logging.getLogger("tfpolicies")

_FIXED_SETTING_METHODS = {constant.method for constant in FIXED_SETTINGS.values()}
_PRIVATE_ATTRIBUTES = (
    "_sections",
    "_layout",
    "_section_by_setting",
    "_frozen",
    "_custom_settings",
    "_search_spaces",
    "_resolved_auto",
)

Config = TypeVar("Config", bound="BaseConfig")


class _Layout(NamedTuple):
    """Data shared by all configs of a class; never modified.

    Attributes:
        sections: sections with default values, by name.
        section_by_setting: the section of each setting.
        canonical_names: the setting for each accepted name, including its own.
        groups: those of `SETTING_GROUPS` whose settings exist.
        dict_names: the unique name of each setting in `to_dict()`.
        readable: all names that can be read.
        metadata: the arguments of `setting` for each setting.
    """

    sections: dict[str, Section]
    section_by_setting: dict[str, str]
    canonical_names: dict[str, str]
    groups: dict[str, Mapping[str, str]]
    dict_names: dict[str, str]
    readable: frozenset[str]
    metadata: dict[str, Mapping[str, Any]]


class BaseConfig:
    """Settings in frozen sections; subclasses define the sections and the methods that change them.

    Args:
        section_classes: the classes of the sections, by the name of the method that changes it.
    """

    algo_class: type | None = None  # the algorithm that is configured
    _sections: dict[str, Section]  # by name
    _layout: _Layout
    _section_by_setting: Mapping[str, str]  # the section of each setting
    _frozen: bool
    _custom_settings: dict[str, Any]  # settings of a custom policy class
    _search_spaces: dict[str, Any]  # settings that are or contain search spaces of Ray Tune
    _resolved_auto: dict[str, Any]  # resolved values of "auto" settings

    def __init__(self, section_classes: Mapping[str, type]) -> None:
        layout = _make_layout(tuple(section_classes.items()))
        attributes = {
            "_sections": dict(layout.sections),
            "_layout": layout,
            "_section_by_setting": layout.section_by_setting,
        }
        vars(self).update(
            attributes, _frozen=False, _custom_settings={}, _search_spaces={}, _resolved_auto={}
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: x
            for name, x in vars(self).items()
            if name not in ("_layout", "_section_by_setting")
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        layout = _make_layout(tuple((name, type(x)) for name, x in state["_sections"].items()))
        vars(self).update(state, _layout=layout, _section_by_setting=layout.section_by_setting)

    # -- changes ------------------------------------------------------------------------------

    def _change(
        self: Config, method_name: str, settings: Mapping[str, Any], *section_names: str
    ) -> Config:
        """Changes settings, all of them or none.

        Args:
            method_name: the method, for messages.
            settings: the new values.
            section_names: the allowed sections; by default the one with the method's name.
        """
        section_names = section_names or (method_name,)
        also_accepted = ALSO_ACCEPTED_BY.get(method_name, ())
        changes: dict[str, dict[str, Any]] = {}
        search_spaces: dict[str, Any] = {}
        names: set[str] = set()
        for argument, value in self._expand_groups(settings).items():
            name = self._layout.canonical_names.get(argument, argument)
            if name in names:
                raise TypeError(f"{method_name}() got {name!r} under two names.")
            names.add(name)
            if name in FIXED_SETTINGS and FIXED_SETTINGS[name].method in section_names:
                check_fixed_setting(name, value)
                continue
            section = self._section_by_setting.get(name, "")
            if section not in section_names and name not in also_accepted:
                raise TypeError(self._describe_unexpected(method_name, argument, section_names))
            current = self._search_spaces.get(name, vars(self._sections[section])[name])
            if not self._frozen and (value is current or is_same(value, current)):
                continue  # the usual case when a policy copies the settings of a worker
            section_changes = changes.setdefault(section, {})
            value = merge_value(self._layout.metadata[name], current, value)
            (search_spaces if has_search_space(value) else section_changes)[name] = value
        self._apply(changes, search_spaces)
        return self

    def _expand_groups(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns settings with `SETTING_GROUPS` expanded into single settings."""
        if not self._layout.groups:
            return settings
        result: dict[str, Any] = {}
        for name, value in settings.items():
            keys = self._layout.groups.get(self._canonical_name(name), {})
            if keys:
                check(isinstance(value, Mapping), name, f"a dict of {', '.join(keys)}", value)
            for key in value if keys else ():
                check(key in keys, f"The key of {name}", f"one of {', '.join(keys)}", key)
            parts = {keys[key]: x for key, x in value.items()} if keys else {name: value}
            for part in parts.keys() & result.keys():
                raise TypeError(f"{part!r} is given under two names.")
            result |= parts
        return result

    def _apply(
        self,
        changes_by_section: Mapping[str, Mapping[str, Any]],
        search_spaces: Mapping[str, Any] | None = None,
    ) -> None:
        """Applies validated values by section and name, and search spaces: all of them or none."""
        names = [
            *(name for part in changes_by_section.values() for name in part),
            *(search_spaces or ()),
        ]
        if not names:
            return
        self._check_not_frozen(", ".join(names))
        sections = {
            section_name: dataclasses.replace(self._sections[section_name], **changes)
            for section_name, changes in changes_by_section.items()
        }
        self._check_sections(sections)
        self._sections.update(sections)
        for name in names:
            self._search_spaces.pop(name, None)
        self._search_spaces.update(search_spaces or {})

    def _check_sections(self, sections: Mapping[str, Any]) -> None:
        """Checks changed sections against the others, before they are applied."""

    def _describe_unexpected(
        self, method_name: str, name: str, section_names: Collection[str]
    ) -> str:
        names = [
            canonical_name
            for canonical_name, section in self._section_by_setting.items()
            if section in section_names
        ]
        names += [
            canonical_name
            for canonical_name, constant in FIXED_SETTINGS.items()
            if constant.method in section_names
        ]
        canonical_name = self._canonical_name(name)
        section = (
            FIXED_SETTINGS[canonical_name].method
            if canonical_name in FIXED_SETTINGS
            else self._section_by_setting.get(canonical_name)
        )
        hint = (
            f" It is a setting of `{section}()`."
            if section
            else suggest_setting(name, self._section_by_setting)
        )
        if not hint:
            hint = f"{suggest_similar_names(name, [*names, *ALIASES])} It takes {', '.join(names)}."
        return f"{method_name}() got an unexpected keyword {name!r}.{hint}"

    def _check_not_frozen(self, names: str) -> None:
        if self._frozen:
            raise FrozenConfigError(
                f"Cannot set attribute {names} of an already frozen {type(self).__name__}: a "
                "worker or an algorithm uses it. Change a copy: `config.copy(copy_frozen=False)`."
            )

    # -- as attributes and items --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _PRIVATE_ATTRIBUTES:
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Setting) -> None:
        if name == "algo_class":
            self._set_algorithm(value)
        else:
            self[name] = value

    def _set_algorithm(self, value: Setting) -> None:
        """Sets the algorithm: a class, or the name of the present one."""
        self._check_not_frozen("algo_class")
        if isinstance(value, type):
            vars(self)["algo_class"] = value
        elif value != getattr(self.algo_class, "__name__", None):
            raise ConfigError(
                f"algo_class must be a class such as tfpolicies.PPO, got {value!r}. An algorithm's "
                "config, such as PPOConfig(), sets it already."
            )

    def __delattr__(self, name: str) -> None:
        raise FrozenConfigError(f"{name} cannot be deleted: a config keeps all of its settings.")

    def __getitem__(self, key: str) -> Any:
        section = self._section_by_setting.get(key)
        if section is None:
            return self._get_by_alias(key)
        value = self._search_spaces.get(key, getattr(self._sections[section], key))
        if type(value) in PLAIN_TYPES:
            return value
        return wrap_mutable(value, functools.partial(self._replace_setting, key))

    def _get_by_alias(self, key: str) -> Any:
        """Returns the value of a name that is an alias, a fixed setting or a group."""
        if key in self._custom_settings:
            return copy_containers(self._custom_settings[key])
        name = self._canonical_name(key)
        if name in self._section_by_setting:
            return self[name]
        with contextlib.suppress(LookupError):
            return EXTENSIONS.get_attribute(self, key)
        name = self._resolve_name(key)
        if name in FIXED_SETTINGS:
            return copy_containers(FIXED_SETTINGS[name].value)
        group = {
            key_in_group: self[setting_name]
            for key_in_group, setting_name in self._layout.groups[name].items()
        }
        return wrap_mutable(group, functools.partial(self.__setitem__, name))

    def _replace_setting(self, name: str, value: dict[str, Any]) -> None:
        """Replaces a setting by the content of its `LiveDict` after a write.

        Deleted keys get their defaults again.
        """
        section = self._section_by_setting[name]
        default = getattr(self._layout.sections[section], name)
        value = merge_value(self._layout.metadata[name], default, value)
        if has_search_space(value):
            self._apply({}, {name: value})
        else:
            self._apply({section: {name: value}})

    def __setitem__(self, key: str, value: Setting) -> None:
        self.update_from_dict({self._resolve_name(key): value})

    def _canonical_name(self, name: str) -> str:
        """Returns the canonical name for a setting name or alias."""
        return self._layout.canonical_names.get(name, name)

    def _resolve_name(self, key: str) -> str:
        name = self._canonical_name(key)
        if name in self._layout.readable:
            return name
        if key == "multiagent":
            raise UnknownSettingError(
                "'multiagent' belongs to old dict configs: give it to `update_from_dict` or "
                "`from_dict`; read `config.policies` and the like, and set them by `multi_agent()`."
            )
        raise UnknownSettingError(
            f"Invalid property name {key!r}: {type(self).__name__} has no such setting."
            f"{describe_import(self, key)[1:] or self._suggest_names(name)}"
        )

    def _suggest_names(self, name: str) -> str:
        """Returns a hint for a name that is not a setting: its equivalent or near matches."""
        names = [*self._section_by_setting, *FIXED_SETTINGS]
        names += [alias for alias, setting_name in ALIASES.items() if setting_name in names]
        hint = suggest_setting(str(name), self._section_by_setting) or suggest_similar_names(
            str(name), names
        )
        if not hint and self.algo_class is None:
            return " Settings of single algorithms are in their config, such as PPOConfig."
        return hint

    def __contains__(self, key: object) -> bool:
        return str(key) in self._layout.readable or key in self._custom_settings

    def get(self, key: str, default: Setting = None) -> Any:
        """Returns a setting, or `default` if there is none with that name."""
        return self[key] if key in self else default  # noqa: SIM401

    def keys(self) -> KeysView[str]:
        """The names of all settings, as in `to_dict()`."""
        return self.to_dict().keys()

    def values(self) -> ValuesView[Any]:
        """The values of all settings."""
        return self.to_dict().values()

    def items(self) -> ItemsView[str, Any]:
        """All settings with their values."""
        return self.to_dict().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BaseConfig) or type(self) is not type(other):
            return NotImplemented
        own_values, other_values = (
            (config._sections, config._custom_settings, config._search_spaces)
            for config in (self, other)
        )
        return own_values == other_values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed_settings = [
            f"{name}={value!r}" for name, value in self._get_changed_settings().items()
        ]
        return f"{type(self).__name__}({', '.join(changed_settings)})"

    def _get_changed_settings(self, *without: str) -> dict[str, Any]:
        """Returns the settings that differ from those of a new config of this class."""
        default = type(self)()._as_dict(*without)  # type: ignore[call-arg]
        settings = self._as_dict(*without)
        return {
            name: x for name, x in settings.items() if name not in default or default[name] != x
        }

    # -- complete configs ---------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings as a plain dict with copies of the containers in it.

        Some have the names of old dict configs: `lambda_` is `lambda`, and `num_rollout_workers` is
        `num_workers`. The values of `policies` are 4-tuples `(class, observation_space,
        action_space, config)`. Fixed settings (`CONSTANTS` of `dialect.py`) are not included.
        """
        return self._as_dict()

    def _as_dict(self, *without: str) -> dict[str, Any]:
        names = self._layout.dict_names
        settings: dict[str, Any] = {
            names[name]: value if type(value) in PLAIN_TYPES else to_dict_value(value)
            for section, part in self._sections.items()
            if section not in without
            for name, value in vars(part).items()
        }
        settings |= {
            names[name]: copy_containers(value) for name, value in self._search_spaces.items()
        }
        return {**settings, **copy_containers(self._custom_settings)}

    @classmethod
    def from_dict(cls: type[Config], config_dict: Mapping[str, Any]) -> Config:
        """Returns a new config with the given settings; see `update_from_dict`."""
        return cls().update_from_dict(config_dict)  # type: ignore[call-arg]

    def update_from_dict(self: Config, config_dict: Mapping[str, Any]) -> Config:
        """Changes the given settings, by their names or those of `to_dict()`.

        The `multiagent` dict of an old dict config is passed to `multi_agent`.

        Raises:
            ConfigError: for an unknown name; nothing is changed then.
        """
        values = dict(config_dict)
        multiagent = values.pop("multiagent", None)
        section_by_setting = self._section_by_setting
        settings = {
            x if x in section_by_setting else self._resolve_name(x): value
            for x, value in values.items()
        }
        if multiagent is not None:
            settings.update(self._multi_agent_settings(multiagent))
        return self._change("update_from_dict", settings, *self._sections, *_FIXED_SETTING_METHODS)

    def _multi_agent_settings(self, multiagent: object) -> Mapping[str, Any]:
        """Returns the settings in the `multiagent` dict of an old dict config."""
        raise NotImplementedError

    @classmethod
    def overrides(cls, **settings: Setting) -> dict[str, Any]:
        """Returns the settings as a plain dict, after checking their names.

        >>> from tfpolicies import AlgorithmConfig
        >>> AlgorithmConfig.overrides(gamma=0.95)
        {'gamma': 0.95}

        Raises:
            KeyError: for a name that is not a setting of this config class.
        """
        config = cls()  # type: ignore[call-arg]
        return {config._resolve_name(name): value for name, value in settings.items()}

    def copy(self: Config, copy_frozen: bool | None = None) -> Config:
        """Returns a copy; `copy_frozen` decides whether it is frozen, None keeps it as it is."""
        config = type(self).__new__(type(self))
        attributes = vars(config)
        attributes.update(
            vars(self),
            _sections=dict(self._sections),
            _custom_settings=copy_containers(self._custom_settings),
        )
        attributes.update(
            _search_spaces=dict(self._search_spaces), _resolved_auto=dict(self._resolved_auto)
        )
        if copy_frozen is not None:
            attributes["_frozen"] = copy_frozen
        return config

    def __copy__(self: Config) -> Config:
        return self.copy()

    def record_resolved(self, **values: Setting) -> None:
        """Replaces "auto" settings by their resolved values, even in a frozen config.

        The value is remembered as automatic: policies created later resolve "auto" again.
        """
        for name, value in values.items():
            if self[name] == "auto":
                log_auto_change(name, self._resolved_auto.get(name), value)
                self._resolved_auto[name] = value
                section_name = self._section_by_setting[name]
                section = self._sections[section_name]
                self._sections[section_name] = dataclasses.replace(section, **{name: value})

    def require_values(self) -> None:
        """Checks that no setting is a search space of Ray Tune.

        Raises:
            ConfigError: if some are; it names them and how to use them.
        """
        require_values(self._search_spaces)

    def restore_resolved_auto(self, values: Mapping[str, Any]) -> None:
        """Restores the values that "auto" settings resolved to earlier."""
        self._resolved_auto.update(values)

    def get_auto_settings(self) -> list[str]:
        """Returns the names of "auto" settings that still have their resolved values."""
        return sorted(name for name, value in self._resolved_auto.items() if self[name] == value)

    def freeze(self) -> None:
        """Freezes the config: all later changes raise an error.

        Raises:
            ConfigError: if a setting is a search space.
        """
        self.require_values()
        object.__setattr__(self, "_frozen", True)

    @property
    def is_frozen(self) -> bool:
        """Whether changes raise an error."""
        return self._frozen


def as_overrides(value: BaseConfig | Setting) -> Any:
    """Returns a config as a dict of its changed settings; other values unchanged."""
    return value._get_changed_settings() if isinstance(value, BaseConfig) else value


def log_auto_change(name: str, old_value: Setting, new_value: Setting) -> None:
    """Logs that an "auto" setting resolved to another value than in the checkpoint."""
    if old_value not in (None, "auto", new_value):
        logger.warning(
            "%s='auto' now resolves to %r, which is faster here. In the checkpoint it was %r; "
            "%s=%r restores that.",
            *(name, new_value, old_value, name, old_value),
        )


@functools.cache
def _make_layout(section_classes: tuple[tuple[str, type], ...]) -> _Layout:
    sections = {name: section_class() for name, section_class in section_classes}
    section_by_setting = {
        name: section_name for section_name, section in sections.items() for name in vars(section)
    }
    names = ALIASES | {name: name for name in section_by_setting}
    groups = {
        name: x
        for name, x in SETTING_GROUPS.items()
        if section_by_setting.keys() >= set(x.values())
    }
    dict_names = {name: DICT_NAMES.get(name, name) for name in section_by_setting}
    dict_names = {
        name: name if dict_name in section_by_setting else dict_name
        for name, dict_name in dict_names.items()
    }
    setting_names = section_by_setting.keys() | FIXED_SETTINGS.keys() | groups.keys()
    readable = setting_names | {
        name for name, setting_name in names.items() if setting_name in setting_names
    }
    metadata = {
        name: x
        for _, section_class in section_classes
        for name, x in get_metadata(section_class).items()
    }
    return _Layout(
        sections, section_by_setting, names, groups, dict_names, frozenset(readable), metadata
    )
