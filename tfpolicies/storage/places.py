"""Allow-list of objects that a file may name, by their location in the decoded value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tfpolicies.errors import CheckpointError
from tfpolicies.storage.import_paths import TRUSTED, Missing, resolve
from tfpolicies.type_aliases import Setting


@dataclass(frozen=True)
class Place:
    """Rule for the objects allowed at one location.

    Attributes:
        role: the role for which an object there must be allowed (`tfpolicies.marks`).
        allows_functions: whether functions, or classes used as functions, are allowed.
        decode_plain: converts plain JSON at that location to itself, or to a `Missing` if it would import
            something; None if plain values are harmless.
    """

    kind: str
    functions: bool = False
    plain: Callable[[Any], Any] | None = None


Places = Place | Mapping[Any, "Places"] | None
"""A rule, or rules in a dict, list or tuple by key or index ("*": any); None: nothing allowed."""


def admitted(
    value: Setting,
    places: Places,
    *,
    known: Mapping[str, Any] | None = None,
    trusted: Collection[str] = TRUSTED,
) -> Any:
    """Returns a result of `decode_value` with the allowed objects resolved.

    All others stay `Missing` (see `find_missing`): those of other packages, those not allowed at
    their location, and all at locations without a rule.

    Args:
        value: with a `Missing` for each object.
        allowed: the rules by location.
        objects: import path or stored name -> the object to use for it, provided by the caller.
        trusted: names of the top-level packages that may be imported.

    Raises:
        CheckpointError: if the value is nested hundreds of levels deep.

    >>> watching = Missing("tfpolicies.config.callbacks:DefaultCallbacks", importable=True)
    >>> admitted({"callbacks": watching, "more": watching}, {"callbacks": Place("callbacks")})
    {'callbacks': <class '...DefaultCallbacks'>, 'more': Missing(name='...', importable=True)}
    """
    given = known or {}

    def looked_up(missing: Missing, place: Places) -> Any:
        if missing.name in given:
            return given[missing.name]
        if not missing.importable or not isinstance(place, Place):
            return missing
        return resolve(missing.name, place.kind, functions=place.functions, trusted=trusted)

    def walk(value: Setting, places: Places) -> Any:
        if isinstance(places, Place) and not isinstance(value, Missing):
            value = value if places.plain is None else places.plain(value)
        if isinstance(value, Missing):
            return looked_up(value, places)
        if isinstance(value, dict):  # not Mapping: a space is one
            pairs = value.items()
            return {walk(key, None): walk(each, _place_of(places, key)) for key, each in pairs}
        if isinstance(value, list | tuple):
            found = [walk(each, _place_of(places, i)) for i, each in enumerate(value)]
            return found if isinstance(value, list) else tuple(found)
        if isinstance(value, set | frozenset):
            return type(value)(walk(each, None) for each in value)
        return value

    try:
        return walk(value, places)
    except RecursionError:
        raise CheckpointError("The record of a value is nested too deeply.") from None


def _place_of(places: Places, key: object) -> Places:
    return places.get(key, places.get("*")) if isinstance(places, Mapping) else None
