"""Allow-list of objects that a file may name, by their location in the decoded value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tfpolicies.base.type_aliases import Setting
from tfpolicies.errors import CheckpointError
from tfpolicies.storage.import_paths import TRUSTED_PACKAGES, UnresolvedObject, resolve_import_path


@dataclass(frozen=True)
class AllowedObject:
    """Rule for the objects allowed at one location.

    Attributes:
        role: the role for which an object there must be allowed (`tfpolicies.base.allowlist`).
        allows_functions: whether functions, or classes used as functions, are allowed.
        decode_plain: converts plain JSON at that location to itself, or to a `UnresolvedObject` if
            it would import something; None if plain values are harmless.
    """

    role: str
    allows_functions: bool = False
    decode_plain: Callable[[Any], Any] | None = None


AllowedObjects = AllowedObject | Mapping[Any, "AllowedObjects"] | None
"""A rule, or rules in a dict, list or tuple by key or index ("*": any); None: nothing allowed."""


def resolve_allowed(
    value: Setting,
    allowed: AllowedObjects,
    *,
    objects: Mapping[str, Any] | None = None,
    trusted: Collection[str] = TRUSTED_PACKAGES,
) -> Any:
    """Returns a result of `decode_value` with the allowed objects resolved.

    All others stay `UnresolvedObject` (see `find_unresolved`): those of other packages, those not
    allowed at their location, and all at locations without a rule.

    Args:
        value: with a `UnresolvedObject` for each object.
        allowed: the rules by location.
        objects: import path or stored name -> the object to use for it, provided by the caller.
        trusted: names of the top-level packages that may be imported.

    >>> path = "tfpolicies.config.callbacks:DefaultCallbacks"
    >>> callbacks = UnresolvedObject(path, importable=True)
    >>> resolve_allowed({"callbacks": callbacks}, {"callbacks": AllowedObject("callbacks")})
    {'callbacks': <class '...DefaultCallbacks'>}
    >>> resolve_allowed({"more": callbacks}, {"callbacks": AllowedObject("callbacks")})
    {'more': UnresolvedObject(name='...', importable=True)}
    """
    objects_by_name = objects or {}

    def look_up(missing: UnresolvedObject, allowed_object: AllowedObjects) -> Any:
        if missing.name in objects_by_name:
            return objects_by_name[missing.name]
        if not missing.importable or not isinstance(allowed_object, AllowedObject):
            return missing
        return resolve_import_path(
            missing.name,
            allowed_object.role,
            functions=allowed_object.allows_functions,
            trusted=trusted,
        )

    def walk(value: Setting, allowed_here: AllowedObjects) -> Any:
        if isinstance(allowed_here, AllowedObject) and not isinstance(value, UnresolvedObject):
            value = value if allowed_here.decode_plain is None else allowed_here.decode_plain(value)
        if isinstance(value, UnresolvedObject):
            return look_up(value, allowed_here)
        if isinstance(value, dict):  # not Mapping: a space is one
            pairs = value.items()
            return {
                walk(key, None): walk(element, _get_allowed_at(allowed_here, key))
                for key, element in pairs
            }
        if isinstance(value, list | tuple):
            elements = [
                walk(element, _get_allowed_at(allowed_here, i)) for i, element in enumerate(value)
            ]
            return elements if isinstance(value, list) else tuple(elements)
        if isinstance(value, set | frozenset):
            return type(value)(walk(element, None) for element in value)
        return value

    try:
        return walk(value, allowed)
    except RecursionError:
        raise CheckpointError("The record of a value is nested too deeply.") from None


def _get_allowed_at(allowed: AllowedObjects, key: object) -> AllowedObjects:
    return allowed.get(key, allowed.get("*")) if isinstance(allowed, Mapping) else None
