"""Migrates names in files of earlier versions: import paths, settings and values of settings.

A file keeps the names of the version that wrote it. Add a line here when you rename an object that
files may name, a setting, or a value of a setting.
"""

from __future__ import annotations

from typing import Any

from tfpolicies.base.type_aliases import Json

OBJECTS = {
    "tfpolicies.algorithms.actor_critic:ActorCriticTFPolicy": (
        "tfpolicies.algorithms.actor_critic_base:ActorCriticTFPolicy"
    ),
    "tfpolicies.compat.policies:RandomPolicy": "tfpolicies.compat.random_policy:RandomPolicy",
    "tfpolicies.compat.tf_action_dist:TransformedNoise": (
        "tfpolicies.compat.tf_action_dist:WrappedDistribution"
    ),
    "tfpolicies.exploration.exploration:Scheduled": (
        "tfpolicies.exploration.exploration:ScheduledExploration"
    ),
    "tfpolicies.foreign.policy:ImportedPolicy": (
        "tfpolicies.importers.imported_policy:ImportedPolicy"
    ),
    "tfpolicies.models.distributions.base:WholeSpace": (
        "tfpolicies.models.distributions.base:WholeSpaceDistribution"
    ),
    "tfpolicies.policy.kind:PolicyKind": "tfpolicies.policy.hooks:TFPolicyHooks",
}
"""Present import paths by those of earlier versions."""

SETTINGS = {"new_episodes_at_checkpoint": "reset_episodes_at_checkpoint"}
"""Present names of settings by those of earlier versions."""

VALUES = {("on_nan", "stop"): "raise"}
"""Present values by settings and their values in earlier versions."""

_MAX_DEPTH = 200  # deeper records are left as they are; decoding them raises an error


def migrate_path(path: str) -> str:
    """Returns the present import path of an object.

    >>> migrate_path("tfpolicies.policy.kind:PolicyKind"), migrate_path("my.module:f")
    ('tfpolicies.policy.hooks:TFPolicyHooks', 'my.module:f')
    """
    return OBJECTS.get(path, path)


def migrate_settings(record: Json, depth: int = 0) -> Any:
    """Returns encoded settings, at any depth, with the present names and values.

    >>> migrate_settings({"lr": 0.1, "on_nan": "stop", "model": {"new_episodes_at_checkpoint": 1}})
    {'lr': 0.1, 'on_nan': 'raise', 'model': {'reset_episodes_at_checkpoint': 1}}
    """
    if depth > _MAX_DEPTH:
        return record
    if isinstance(record, dict):
        return {
            SETTINGS.get(name, name): _migrate_value(name, value, depth)
            for name, value in record.items()
        }
    if isinstance(record, list):
        return [migrate_settings(item, depth + 1) for item in record]
    return record


def migrate_assignment(text: str) -> str:
    """Returns a setting of a command, `name=value`, with the present name and value.

    >>> migrate_assignment("on_nan=stop"), migrate_assignment("lr=1e-3")
    ('on_nan=raise', 'lr=1e-3')
    """
    name, equals, value = text.partition("=")
    return f"{SETTINGS.get(name, name)}{equals}{VALUES.get((name, value), value)}"


def _migrate_value(name: str, value: Json, depth: int) -> Any:
    if isinstance(value, str):
        return VALUES.get((name, value), value)
    return migrate_settings(value, depth + 1)
