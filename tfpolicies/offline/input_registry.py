"""Registry of readers by name, for `offline_data(input_=name)`."""

from __future__ import annotations

from tfpolicies.base.name_registry import NameRegistry
from tfpolicies.errors import ConfigError
from tfpolicies.offline.input_reader import InputFunction

INPUTS = NameRegistry("An input", ConfigError)


def register_input(name: str, input_creator: InputFunction) -> None:
    """Registers a function that makes a reader, under a name.

    Args:
        name: a non-empty text.
        input_creator: `f(io_context)` that returns a reader.

    Raises:
        ConfigError: if `input_creator` cannot be called.
    """
    if not callable(input_creator):
        raise ConfigError(
            f"The creator of {name!r} must be a function f(io_context) that returns an "
            f"InputReader, got {input_creator!r}."
        )
    INPUTS.add(name, input_creator)
