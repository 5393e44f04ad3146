"""How a class or function that makes environments is called: its signature decides, here alone.

`export/player.py` stands alone and has a copy of this rule; a test holds the two together.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from tfpolicies.errors import EnvError, near_matches

_NAMES = ("config", "env_config", "context", "env_context")
_ANNOTATION = re.compile(r"(Optional\[)?(\w+\.)*(dict|Dict|(Mutable)?Mapping|\w*Context)\b")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def called(create: Callable[..., Any], context: Mapping[str, Any]) -> Any:
    """Calls what makes an environment with the whole `env_config`, or with its keys as keywords.

    The signature decides, in this order:

    1. The first parameter is called `config`, `env_config`, `context` or `env_context`, or is
       annotated as a dict or context: it gets the whole.
    2. The keys are parameters, and none is missing: they are keywords.
    3. One parameter is required, and no key is a parameter: it gets the whole.

    Args:
        create: a class, or a function.
        context: the `env_config`.

    Raises:
        EnvError: if none of these holds; it shows the signature.

    >>> called(lambda env_config: env_config["size"], {"size": 4})
    4
    >>> called(lambda render_mode=None, size=5: size, {"size": 4})
    4
    """
    try:
        signature = inspect.signature(create)
    except (TypeError, ValueError):  # Python cannot tell it of some classes written in C
        return create(context)
    parameters = [p for p in signature.parameters.values() if p.kind not in _ANY_NUMBER]
    first = next((p for p in parameters if p.kind in _POSITIONAL), None)
    if first is not None and _is_for_all(first):
        return create(context)
    try:
        signature.bind(**context)  # a key that is no text fits none, either
    except TypeError as error:
        required = [p for p in parameters if p.default is p.empty]
        names = [p.name for p in parameters]
        if required == [first] and not set(names) & set(context):
            return create(context)
        unknown = next((key for key in context if key not in names), None)
        hint = "" if unknown is None else near_matches(str(unknown), names)
        raise EnvError(
            f"{getattr(create, '__name__', create)}{signature} cannot be called with env_config="
            f"{dict(context)!r}: {error}.{hint} Give the names of its parameters as keys; or name "
            "its first parameter `env_config`, which then gets the whole dict."
        ) from error
    return create(**context)


def _is_for_all(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is meant for the whole `env_config`."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    of_kind = any(_ANNOTATION.match(part.strip()) for part in text.split("|"))
    return parameter.name in _NAMES or of_kind
