"""Algorithms by name, imported on first use.

The algorithms of this package are registered below. Another package registers its own by an entry
point::

    [options.entry_points]
    tfpolicies.algorithms =
        MINE = my_package.mine

The module defines the algorithm, `MINE`, its `MINEConfig` and its policies.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`; this file is imported with the package
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from tfpolicies.algorithms.algorithm import Algorithm

ENTRY_POINT_GROUP = "tfpolicies.algorithms"
"""The group of entry points."""

_MODULES: dict[str, str] = {}
_MODULE_BY_EXPORT: dict[str, str] = {}


def register_algorithm(name: str, module: str, *, extra_names: tuple[str, ...] = ()) -> None:
    """Registers an algorithm by name, for the command line and for ported scripts.

    Args:
        name: of the algorithm, and of its class in the module.
        module: defines it, its config `<name>Config` and its policies `<name>TF1Policy` and
            `<name>TF2Policy`.
        extra_names: further public names of the module.

    Raises:
        ConfigError: if the name is registered for another module.
    """
    if _MODULES.setdefault(name, module) != module:
        from tfpolicies.errors import ConfigError

        raise ConfigError(f"The algorithm {name!r} is that of {_MODULES[name]}, not of {module}.")
    names = (
        name,
        *(f"{name}{suffix}" for suffix in ("Config", "TF1Policy", "TF2Policy")),
        *extra_names,
    )
    _MODULE_BY_EXPORT.update(dict.fromkeys(names, module))


register_algorithm("PPO", "tfpolicies.algorithms.ppo")
register_algorithm("PG", "tfpolicies.algorithms.pg", extra_names=("PGTFPolicy",))
register_algorithm("A2C", "tfpolicies.algorithms.a2c")
register_algorithm("DQN", "tfpolicies.algorithms.dqn", extra_names=("DQNTFPolicy",))
register_algorithm("SAC", "tfpolicies.algorithms.sac", extra_names=("SACTFPolicy",))
register_algorithm("TD3", "tfpolicies.algorithms.td3", extra_names=("TD3TFPolicy",))
register_algorithm("DDPG", "tfpolicies.algorithms.ddpg", extra_names=("DDPGTFPolicy",))
register_algorithm("MARWIL", "tfpolicies.algorithms.marwil")
register_algorithm("BC", "tfpolicies.algorithms.bc")


def get_exported_names() -> dict[str, str]:
    """Returns the public names of registered algorithms, and their modules."""
    return dict(_MODULE_BY_EXPORT)


def get_registered_names() -> list[str]:
    """Returns the names of the algorithms registered in this process."""
    return list(_MODULES)


def get_algorithm_names() -> list[str]:
    """Returns the names of all algorithms, with those of other packages last."""
    return [*_MODULES, *(name for name in _entry_points() if name not in _MODULES)]


def find_algorithm(name: str) -> type[Algorithm]:
    """Returns the class of an algorithm.

    Raises:
        ConfigError: if the name is unknown, or the package that registers it cannot be imported or
            does not define the algorithm; the message names the package.
    """
    import importlib

    from tfpolicies.base.name_registry import describe_entry_point, load_entry_point
    from tfpolicies.errors import ConfigError, suggest_similar_names

    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    entry_point = _entry_points().get(name)
    if entry_point is None:
        names = get_algorithm_names()
        raise ConfigError(
            f"There is no algorithm {name!r}; there are {', '.join(names)}."
            f"{suggest_similar_names(str(name), names)} For your own algorithm, use its class, a "
            "subclass of Algorithm."
        )
    from tfpolicies.algorithms.algorithm import Algorithm

    algorithm = load_entry_point("algorithm", entry_point, entry_point.name)
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise ConfigError(
            f"{describe_entry_point('algorithm', entry_point)} is not an Algorithm: {algorithm!r}."
        )
    return algorithm


def _entry_points() -> dict[str, EntryPoint]:
    from tfpolicies.base.name_registry import get_entry_points

    return get_entry_points(ENTRY_POINT_GROUP)
