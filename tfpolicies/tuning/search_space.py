"""Search spaces: ranges and constants of settings, by name.

A name is that of a setting, `"lr"`; of a key of a dict, `"model.fcnet_hiddens"`; or of several that
get the same value, `"model.fcnet_hiddens, q_model_config.fcnet_hiddens"`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfpolicies.base.type_aliases import Json
from tfpolicies.config.rllib_settings import ALIASES
from tfpolicies.errors import ConfigError, TfPoliciesError, UnknownSettingError, show_value
from tfpolicies.storage.json_values import decode_value, encode_value, find_unresolved
from tfpolicies.tuning.ranges import Choice, Range, parse_range

if TYPE_CHECKING:
    from tfpolicies.config.algorithm_config import AlgorithmConfig

UPDATES_PER_STEP = "updates_per_step"
"""A name in spaces: gradient updates per environment step of algorithms with replay.

It stands for `training_intensity`, the rows trained per row sampled, which depends on the batch.
"""

Settings = dict[str, Any]
"""Settings by name, also `"model.fcnet_hiddens"`."""

_NOT_SEARCHED = ("env", "seed", "evaluation_interval", "evaluation_duration")


@dataclass(frozen=True)
class SearchSpace:
    """The ranges that are searched, and constants that all trials but the first have.

    Attributes:
        ranges: by name.
        constants: values by name.
        source: of the ranges, for display; "" if they are the user's.
    """

    ranges: Mapping[str, Range]
    constants: Mapping[str, Any]
    source: str = ""

    @classmethod
    def from_mapping(cls, space: Mapping[str, Any], source: str = "") -> SearchSpace:
        """Returns the space of a dict of ranges and constants; see `tune`.

        Raises:
            ConfigError: if it has no range, an invalid one, or two for one setting.
        """
        if not isinstance(space, Mapping) or not all(isinstance(name, str) for name in space):
            raise ConfigError(
                'A search space is a dict such as {"lr": log_uniform(1e-5, 1e-2)}, got '
                f"{show_value(space)}."
            )
        parsed = {name: parse_range(name, value) for name, value in space.items()}
        ranges = {name: value for name, value in parsed.items() if value is not None}
        constants = {name: value for name, value in space.items() if parsed[name] is None}
        if not ranges:
            raise ConfigError(
                'A search space needs a range, such as {"lr": log_uniform(1e-5, 1e-2)} or, in '
                f'JSON, {{"lr": {{"log_uniform": [1e-5, 1e-2]}}}}, got {show_value(space)}.'
            )
        _require_single_use(space)
        return cls(ranges, constants, source)

    def without(self, names: Collection[str]) -> SearchSpace:
        """Returns the space without those settings, which have values.

        Raises:
            ConfigError: if no range remains.
        """
        canonical = {ALIASES.get(name, name) for name in names}
        ranges = {name: x for name, x in self.ranges.items() if not _overlaps(name, canonical)}
        constants = {
            name: x for name, x in self.constants.items() if not _overlaps(name, canonical)
        }
        if not ranges:
            raise ConfigError(
                f"All settings of the search space have values: {', '.join(sorted(names))}. Leave "
                "one of them out, or give a space."
            )
        return SearchSpace(ranges, constants, self.source)

    def to_json(self) -> dict[str, Any]:
        """Returns the ranges and constants as JSON values; see `from_json`."""
        return {
            "ranges": {name: encode_value(x.to_json()) for name, x in self.ranges.items()},
            "constants": encode_value(dict(self.constants)),
            "source": self.source,
        }

    @classmethod
    def from_json(cls, content: Json) -> SearchSpace:
        """Restores a space from the result of `to_json`.

        Raises:
            ConfigError: if it is not one.
        """
        if not isinstance(content, dict) or set(content) != {"ranges", "constants", "source"}:
            raise ConfigError(f"A stored search space is damaged: {show_value(content)}.")
        values = {**decode_value(content["ranges"]), **decode_value(content["constants"])}
        if find_unresolved(values):
            raise ConfigError(f"A stored search space names code: {show_value(content)}.")
        return cls.from_mapping(values, str(content["source"]))

    def check(self, config: AlgorithmConfig) -> None:
        """Checks that a config accepts the ends of all ranges; changes nothing.

        Raises:
            ConfigError: for an unknown setting, or a value that it does not accept.
        """
        config = config.copy(copy_frozen=False)
        _change(config, self.constants)
        for name, setting_range in self.ranges.items():
            for value in setting_range.examples:
                _change(config.copy(copy_frozen=False), {name: value})

    def describe(self) -> dict[str, str]:
        """Returns the ranges as texts, by name."""
        return {name: str(value) for name, value in self.ranges.items()}

    def make_settings(self, values: Mapping[str, Any], steps: int) -> Settings:
        """Returns all settings of a trial.

        Args:
            values: a value for each range, by its name.
            steps: of the trial.
        """
        settings = dict(self.constants)
        for name, setting_range in self.ranges.items():
            value = values[name]
            if not isinstance(setting_range, Choice) and setting_range.is_share_of_steps:
                value = max(1, round(value * steps))
            settings[name] = value
        return settings


def split_names(name: str) -> list[str]:
    """Returns the settings that a name of a space stands for.

    >>> split_names("model.fcnet_hiddens, q_model_config.fcnet_hiddens")
    ['model.fcnet_hiddens', 'q_model_config.fcnet_hiddens']
    """
    return [part.strip() for part in name.split(",")]


def shorten_name(name: str) -> str:
    """Returns a name for display: of several settings, the first one and how many follow.

    >>> shorten_name("model.fcnet_hiddens, q_model_config.fcnet_hiddens"), shorten_name("lr")
    ('model.fcnet_hiddens (+1)', 'lr')
    """
    first, *others = split_names(name)
    return f"{first} (+{len(others)})" if others else first


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as `update_from_dict` takes them.

    >>> nest({"lr": 1e-3, "model.fcnet_hiddens": [8], "model.use_lstm": True})
    {'lr': 0.001, 'model': {'fcnet_hiddens': [8], 'use_lstm': True}}
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        for part in split_names(name):
            *heads, key = part.split(".")
            target = result
            for head in heads:
                target = target.setdefault(head, {})
                if not isinstance(target, dict):
                    raise ConfigError(f"{part} and {head} are both set. Give one of them.")
            target[key] = value
    return result


def expand_updates_per_step(settings: Mapping[str, Any], train_batch_size: int) -> Settings:
    """Replaces `updates_per_step` by `training_intensity`.

    >>> expand_updates_per_step({"updates_per_step": 0.25}, 64)
    {'training_intensity': 16.0}
    """
    result = dict(settings)
    updates = result.pop(UPDATES_PER_STEP, None)
    if updates is not None:
        result["training_intensity"] = float(updates) * train_batch_size
    return result


def _change(config: AlgorithmConfig, settings: Mapping[str, Any]) -> None:
    for part in _iterate_parts(settings):
        if part in _NOT_SEARCHED:
            raise ConfigError(f"The search space: {part} cannot be searched. Leave it out.")
    changes = expand_updates_per_step(settings, config.get("train_batch_size", 1))
    try:
        config.update_from_dict(nest(changes))
    except UnknownSettingError as error:
        raise ConfigError(f"The search space: {error}") from error
    except (TfPoliciesError, TypeError) as error:
        texts = ", ".join(f"{name}={show_value(value)}" for name, value in settings.items())
        raise ConfigError(f"The search space, {texts}: {error}") from error


def _require_single_use(space: Mapping[str, Any]) -> None:
    used: set[str] = set()
    for part in _iterate_parts(space):
        if part in used:
            raise ConfigError(f"The search space sets {part} twice. Give it once.")
        used.add(part)


def _iterate_parts(space: Mapping[str, Any]) -> Iterator[str]:
    for name in space:
        for part in split_names(name):
            yield ALIASES.get(part, part)


def _overlaps(name: str, names: Collection[str]) -> bool:
    """Whether a name of a space sets one of the given settings, or a key of one."""
    parts = [ALIASES.get(part, part) for part in split_names(name)]
    if UPDATES_PER_STEP in parts:
        parts.append("training_intensity")
    return any(
        part == other or part.startswith(f"{other}.") or other.startswith(f"{part}.")
        for part in parts
        for other in names
    )
