"""Base class of configs: settings in frozen sections, read as attributes and items."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, NamedTuple, TypeVar

from tfpolicies.config.dialect import (
    ALIASES,
    CONSTANTS,
    DICT_NAMES,
    GROUPS,
    GUESTS,
    require_constant,
)
from tfpolicies.config.idioms import setting_hint
from tfpolicies.config.read_only import PLAIN, copied, handed_out, in_dict, is_same
from tfpolicies.config.search_spaces import has_search_space, require_values
from tfpolicies.config.setting import Section, check, get_metadata, taken
from tfpolicies.errors import ConfigError, FrozenConfigError, UnknownSettingError, near_matches
from tfpolicies.extensions import EXTENSIONS, describe_import
from tfpolicies.type_aliases import Setting

logger = logging.getLogger("tfpolicies")

_METHODS = {constant.method for constant in CONSTANTS.values()}
_PRIVATE = ("_sections", "_layout", "_homes", "_frozen", "_foreign", "_searched", "_automatic")

Config = TypeVar("Config", bound="SectionedConfig")


class _Layout(NamedTuple):
    """Data shared by all configs of a class; never modified.

    Attributes:
        sections: sections with default values, by name.
        section_by_setting: the section of each setting.
        canonical_names: the setting for each accepted name, including its own.
        groups: those of `GROUPS` whose settings exist.
        dict_names: the unique name of each setting in `to_dict()`.
        readable: all names that can be read.
        metadata: the arguments of `setting` for each setting.
    """

    sections: dict[str, Section]
    homes: dict[str, str]
    names: dict[str, str]
    groups: dict[str, Mapping[str, str]]
    dict_names: dict[str, str]
    readable: frozenset[str]
    metadata: dict[str, Mapping[str, Any]]


class SectionedConfig:
    """Settings in frozen sections; subclasses define the sections and the methods that change them.

    Args:
        section_classes: the classes of the sections, by the name of the method that changes it.
    """

    algo_class: type | None = None  # the algorithm that is configured
    _sections: dict[str, Section]  # by name
    _layout: _Layout
    _homes: Mapping[str, str]  # the section of each setting
    _frozen: bool
    _foreign: dict[str, Any]  # settings of a custom policy class
    _searched: dict[str, Any]  # settings that are or contain search spaces of Ray Tune
    _automatic: dict[str, Any]  # resolved values of "auto" settings

    def __init__(self, kinds: Mapping[str, type]) -> None:
        layout = _make_layout(tuple(kinds.items()))
        parts = {"_sections": dict(layout.sections), "_layout": layout, "_homes": layout.homes}
        vars(self).update(parts, _frozen=False, _foreign={}, _searched={}, _automatic={})

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in ("_layout", "_homes")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        layout = _make_layout(tuple((name, type(x)) for name, x in state["_sections"].items()))
        vars(self).update(state, _layout=layout, _homes=layout.homes)

    # -- changes ------------------------------------------------------------------------------

    def _change(self: Config, called: str, settings: Mapping[str, Any], *homes: str) -> Config:
        """Changes settings, all of them or none.

        Args:
            method_name: the method, for messages.
            settings: the new values.
            section_names: the allowed sections; by default the one with the method's name.
        """
        homes = homes or (called,)
        guests = GUESTS.get(called, ())
        changes: dict[str, dict[str, Any]] = {}
        searched: dict[str, Any] = {}
        for given_name, value in self._ungrouped(settings).items():
            name = self._layout.names.get(given_name, given_name)
            if name in CONSTANTS and CONSTANTS[name].method in homes:
                require_constant(name, value)
                continue
            home = self._homes.get(name, "")
            if home not in homes and name not in guests:
                raise TypeError(self._unexpected(called, given_name, homes))
            present = self._searched.get(name, vars(self._sections[home])[name])
            if not self._frozen and (value is present or is_same(value, present)):
                continue  # the usual case when a policy copies the settings of a worker
            of_home = changes.setdefault(home, {})
            if name in of_home or name in searched:
                raise TypeError(f"{called}() got {name!r} under two names.")
            value = taken(self._layout.metadata[name], present, value)
            (searched if has_search_space(value) else of_home)[name] = value
        self._put(changes, searched)
        return self

    def _ungrouped(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns settings with `GROUPS` expanded into single settings."""
        if not self._layout.groups:
            return settings
        result: dict[str, Any] = {}
        for name, value in settings.items():
            keys = self._layout.groups.get(self._meant(name), {})
            if keys:
                check(isinstance(value, Mapping), name, f"a dict of {', '.join(keys)}", value)
            for key in value if keys else ():
                check(key in keys, f"The key of {name}", f"one of {', '.join(keys)}", key)
            parts = {keys[key]: x for key, x in value.items()} if keys else {name: value}
            for part in parts.keys() & result.keys():
                raise TypeError(f"{part!r} is given under two names.")
            result |= parts
        return result

    def _put(
        self, given: Mapping[str, Mapping[str, Any]], searched: Mapping[str, Any] | None = None
    ) -> None:
        """Applies validated values by section and name, and search spaces: all of them or none."""
        names = [*(name for part in given.values() for name in part), *(searched or ())]
        if not names:
            return
        self._check_not_frozen(", ".join(names))
        parts = {
            home: dataclasses.replace(self._sections[home], **changes)
            for home, changes in given.items()
        }
        self._check_parts(parts)
        self._sections.update(parts)
        for name in names:
            self._searched.pop(name, None)
        self._searched.update(searched or {})

    def _check_parts(self, parts: Mapping[str, Any]) -> None:
        """Checks changed sections against the others, before they are applied."""

    def _unexpected(self, called: str, name: str, homes: Collection[str]) -> str:
        names = [known for known, home in self._homes.items() if home in homes]
        names += [known for known, constant in CONSTANTS.items() if constant.method in homes]
        known = self._meant(name)
        home = CONSTANTS[known].method if known in CONSTANTS else self._homes.get(known)
        answer = f" It is a setting of `{home}()`." if home else setting_hint(name, self._homes)
        if not answer:
            answer = f"{near_matches(name, [*names, *ALIASES])} It takes {', '.join(names)}."
        return f"{called}() got an unexpected keyword {name!r}.{answer}"

    def _check_not_frozen(self, what: str) -> None:
        if self._frozen:
            raise FrozenConfigError(
                f"Cannot set attribute {what} of an already frozen {type(self).__name__}: a worker "
                "or an algorithm uses it. Change a copy: `config.copy(copy_frozen=False)`."
            )

    # -- as attributes and items --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _PRIVATE:
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Setting) -> None:
        if name == "algo_class":
            self._take_algorithm(value)
        else:
            self[name] = value

    def _take_algorithm(self, value: Setting) -> None:
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
        home = self._homes.get(key)
        if home is None:
            return self._get_by_other_name(key)
        value = self._searched.get(key, getattr(self._sections[home], key))
        if type(value) in PLAIN:
            return value
        return handed_out(value, functools.partial(self._write, key))

    def _get_by_other_name(self, key: str) -> Any:
        """Returns the value of a name that is an alias, a fixed setting or a group."""
        if key in self._foreign:
            return copied(self._foreign[key])
        name = self._meant(key)
        if name in self._homes:
            return self[name]
        with contextlib.suppress(LookupError):
            return EXTENSIONS.get_attribute(self, key)
        name = self._name_of(key)
        if name in CONSTANTS:
            return copied(CONSTANTS[name].value)
        group = {part: self[meant] for part, meant in self._layout.groups[name].items()}
        return handed_out(group, functools.partial(self.__setitem__, name))

    def _write(self, name: str, value: dict[str, Any]) -> None:
        """Replaces a setting by the content of its `ConfigDict` after a write.

        Deleted keys get their defaults again.
        """
        home = self._homes[name]
        default = getattr(self._layout.sections[home], name)
        value = taken(self._layout.metadata[name], default, value)
        if has_search_space(value):
            self._put({}, {name: value})
        else:
            self._put({home: {name: value}})

    def __setitem__(self, key: str, value: Setting) -> None:
        self.update_from_dict({self._name_of(key): value})

    def _meant(self, name: str) -> str:
        """Returns the canonical name for a setting name or alias."""
        return self._layout.names.get(name, name)

    def _name_of(self, key: str) -> str:
        name = self._meant(key)
        if name in self._layout.readable:
            return name
        if key == "multiagent":
            raise UnknownSettingError(
                "'multiagent' belongs to old dict configs: give it to `update_from_dict` or "
                "`from_dict`; read `config.policies` and the like, and set them by `multi_agent()`."
            )
        raise UnknownSettingError(
            f"Invalid property name {key!r}: {type(self).__name__} has no such setting."
            f"{describe_import(self, key)[1:] or self._hint(name)}"
        )

    def _hint(self, name: str) -> str:
        """Returns a hint for a name that is not a setting: its equivalent or near matches."""
        known = [*self._homes, *CONSTANTS]
        known += [alias for alias, meant in ALIASES.items() if meant in known]
        hint = setting_hint(str(name), self._homes) or near_matches(str(name), known)
        if not hint and self.algo_class is None:
            return " Settings of single algorithms are in their config, such as PPOConfig."
        return hint

    def __contains__(self, key: object) -> bool:
        return str(key) in self._layout.readable or key in self._foreign

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
        if not isinstance(other, SectionedConfig) or type(self) is not type(other):
            return NotImplemented
        mine, theirs = ((each._sections, each._foreign, each._searched) for each in (self, other))
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed = [f"{name}={value!r}" for name, value in self._changed().items()]
        return f"{type(self).__name__}({', '.join(changed)})"

    def _changed(self, *without: str) -> dict[str, Any]:
        """Returns the settings that differ from those of a new config of this class."""
        default = type(self)()._as_dict(*without)  # type: ignore[call-arg]
        mine = self._as_dict(*without)
        return {name: x for name, x in mine.items() if name not in default or default[name] != x}

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
            names[name]: value if type(value) in PLAIN else in_dict(value)
            for home, part in self._sections.items()
            if home not in without
            for name, value in vars(part).items()
        }
        settings |= {names[name]: copied(value) for name, value in self._searched.items()}
        return {**settings, **copied(self._foreign)}

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
        given = dict(config_dict)
        nested = given.pop("multiagent", None)
        homes = self._homes
        settings = {x if x in homes else self._name_of(x): value for x, value in given.items()}
        if nested is not None:
            settings.update(self._multi_agent_settings(nested))
        return self._change("update_from_dict", settings, *self._sections, *_METHODS)

    def _multi_agent_settings(self, nested: object) -> Mapping[str, Any]:
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
        return {config._name_of(name): value for name, value in settings.items()}

    def copy(self: Config, copy_frozen: bool | None = None) -> Config:
        """Returns a copy; `copy_frozen` decides whether it is frozen, None keeps it as it is."""
        twin = type(self).__new__(type(self))
        found = vars(twin)
        found.update(vars(self), _sections=dict(self._sections), _foreign=copied(self._foreign))
        found.update(_searched=dict(self._searched), _automatic=dict(self._automatic))
        if copy_frozen is not None:
            found["_frozen"] = copy_frozen
        return twin

    def record_resolved(self, **values: Setting) -> None:
        """Replaces "auto" settings by their resolved values, even in a frozen config.

        The value is remembered as automatic: policies created later resolve "auto" again.
        """
        for name, value in values.items():
            if self[name] == "auto":
                tell_if_resolved_anew(name, self._automatic.get(name), value)
                self._automatic[name] = value
                home = self._homes[name]
                part = self._sections[home]
                self._sections[home] = dataclasses.replace(part, **{name: value})

    def require_values(self) -> None:
        """Checks that no setting is a search space of Ray Tune.

        Raises:
            ConfigError: if some are; it names them and how to use them.
        """
        require_values(self._searched)

    def note_automatic(self, values: Mapping[str, Any]) -> None:
        """Restores the values that "auto" settings resolved to earlier."""
        self._automatic.update(values)

    def automatic(self) -> list[str]:
        """Returns the names of "auto" settings that still have their resolved values."""
        return sorted(name for name, value in self._automatic.items() if self[name] == value)

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


def as_overrides(given: SectionedConfig | Setting) -> Any:
    """Returns a config as a dict of its changed settings; other values unchanged."""
    return given._changed() if isinstance(given, SectionedConfig) else given


def tell_if_resolved_anew(name: str, before: Setting, now: Setting) -> None:
    """Logs that an "auto" setting resolved to another value than in the checkpoint."""
    if before not in (None, "auto", now):
        logger.warning(
            "%s='auto' now resolves to %r, which is faster here. In the checkpoint it was %r; "
            "%s=%r restores that.",
            *(name, now, before, name, before),
        )


@functools.cache
def _make_layout(kinds: tuple[tuple[str, type], ...]) -> _Layout:
    sections = {name: kind() for name, kind in kinds}
    homes = {name: home for home, section in sections.items() for name in vars(section)}
    names = ALIASES | {name: name for name in homes}
    groups = {name: x for name, x in GROUPS.items() if homes.keys() >= set(x.values())}
    dict_names = {name: DICT_NAMES.get(name, name) for name in homes}
    dict_names = {name: name if old in homes else old for name, old in dict_names.items()}
    own = homes.keys() | CONSTANTS.keys() | groups.keys()
    readable = own | {name for name, meant in names.items() if meant in own}
    metadata = {name: x for _, kind in kinds for name, x in get_metadata(kind).items()}
    return _Layout(sections, homes, names, groups, dict_names, frozenset(readable), metadata)
