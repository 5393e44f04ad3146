"""`PolicySpec`: class, spaces and config overrides of one policy."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from tfpolicies.base.validators import is_unicode
from tfpolicies.batch.sample_batch import DEFAULT_POLICY_ID as DEFAULT_POLICY_ID
from tfpolicies.config.settings_allowlist import POLICY_CLASS, POLICY_SETTINGS
from tfpolicies.errors import CheckpointError, ConfigError, show_value
from tfpolicies.storage.allowed_objects import AllowedObjects, resolve_allowed
from tfpolicies.storage.json_values import (
    decode_value,
    encode_value,
    find_unresolved,
    warn_unavailable_objects,
)

logger = logging.getLogger("tfpolicies")

_FORBIDDEN_CHARACTERS = '<>:"/\\|?'


def validate_policy_id(policy_id: str, error: bool = False) -> None:
    r"""Checks a policy id: a non-empty str without `< > : " / \ | ?`, no space or dot at its end.

    Args:
        policy_id: the id.
        error: whether to raise for an id that is not a portable file name, instead of logging a
            warning.

    Raises:
        ConfigError: if it is not a str, is empty or has lone surrogates, which file names cannot
            have; or, with `error`, if it breaks another rule.
    """
    rule = (
        f"A policy id must be a non-empty str without any of {_FORBIDDEN_CHARACTERS} and without a "
        f"space or dot at its end, and valid UTF-8; got {show_value(policy_id)}."
    )
    if not isinstance(policy_id, str) or not policy_id or not is_unicode(policy_id):
        raise ConfigError(rule)
    if set(policy_id) & set(_FORBIDDEN_CHARACTERS) or policy_id[-1] in " .":
        if error:
            raise ConfigError(rule)
        logger.warning("%s It is accepted anyway.", rule)


_FIELDS = ("policy_class", "observation_space", "action_space", "config")
_PLACES: dict[str, AllowedObjects] = {"policy_class": POLICY_CLASS, "config": POLICY_SETTINGS}


@dataclass(frozen=True)
class PolicySpec:
    """Specification of one policy; the worker fills in fields that are None.

    Attributes:
        policy_class: the policy's class.
        observation_space: of the environment, before the policy's connectors.
        action_space: of the environment.
        config: overrides of the worker's config, a dict; may have `agent_connectors` and
            `action_connectors` of this policy. Settings of the whole run, such as
            `train_batch_size`, must have the worker's values.

    >>> spec = PolicySpec(None, gym.spaces.Discrete(3), None, {"gamma": 0.9})
    >>> PolicySpec.deserialize(spec.serialize()) == spec
    True
    """

    policy_class: type | None = None
    observation_space: gym.Space[Any] | None = None
    action_space: gym.Space[Any] | None = None
    config: Any = None

    __hash__ = None  # type: ignore[assignment]

    def serialize(self) -> dict[str, Any]:
        """Returns the spec as JSON values: the class as its import path, with complete spaces.

        Warns about objects without an import path, such as a lambda.
        """
        config = self.config.to_dict() if hasattr(self.config, "to_dict") else self.config
        values = (self.policy_class, self.observation_space, self.action_space, config)
        record = {name: encode_value(value) for name, value in zip(_FIELDS, values, strict=True)}
        warn_unavailable_objects(record)
        return record

    @classmethod
    def deserialize(
        cls, spec: Mapping[str, Any], *, objects: Mapping[str, Any] | None = None
    ) -> PolicySpec:
        """Restores a spec from `serialize`.

        Args:
            spec: the return value of `serialize`.
            objects: import path -> object, for classes and functions of other packages. No other
                names are imported, except allowed ones of this package.

        Raises:
            CheckpointError: if the spec lacks a field, or names something not in `objects`.
        """
        missing_fields = [name for name in _FIELDS if name not in spec]
        if missing_fields:
            raise CheckpointError(f"The policy spec lacks {', '.join(missing_fields)}.")
        decoded = {name: decode_value(spec[name]) for name in _FIELDS}
        values = resolve_allowed(decoded, _PLACES, objects=objects)
        missing = find_unresolved(values)
        if missing:
            names = ", ".join(missing_value.name for missing_value in missing.values())
            raise CheckpointError(
                f"The policy spec names {names}, which the caller must provide: "
                "PolicySpec.deserialize(spec, objects={path: object})."
            )
        return cls(**values)
