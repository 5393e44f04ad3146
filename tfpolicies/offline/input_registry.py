"""Registry of readers by name, for `offline_data(input_=name)`."""

from __future__ import annotations

from tfpolicies.base.name_registry import NameRegistry
from tfpolicies.errors import ConfigError
from tfpolicies.offline.experience_io import InputFunction

INPUTS = NameRegistry("An input", ConfigError)

FILE_ENDINGS = ("json", "jsonl", "parquet", "pq", "zip")


def is_class_path(source: object) -> bool:
    """Returns whether a text is the path of a class in a module, not a file or a name.

    >>> is_class_path("package.readers.MyReader"), is_class_path("logs.parquet")
    (True, False)
    """
    parts = source.split(".") if isinstance(source, str) else []
    is_path = len(parts) > 1 and all(part.isidentifier() for part in parts)
    return is_path and parts[-1] not in FILE_ENDINGS


def require_no_d4rl(source: object) -> None:
    """Refuses the names of D4RL's datasets, `d4rl.NAME`.

    Raises:
        ConfigError: for such a name.
    """
    if isinstance(source, str) and source.startswith("d4rl."):
        raise ConfigError(
            f"The input {source!r} is not supported. The package d4rl is no longer maintained, and "
            "its datasets are in Minari: pip install 'minari[hf,hdf5]', and give the arrays of "
            "minari.load_dataset(...) as offline_data(input_={'obs': ..., 'actions': ...})."
        )


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
            f"ExperienceReader, got {input_creator!r}."
        )
    INPUTS.add(name, input_creator)
