"""Lists the environments that a name can choose, in groups; does not need TensorFlow."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import gymnasium as gym

from tfpolicies.envs.env_registry import ENVIRONMENTS
from tfpolicies.envs.envpool import PREFIX, list_tasks
from tfpolicies.envs.pettingzoo import list_registered_names
from tfpolicies.envs.third_party import register_all


class EnvGroup(NamedTuple):
    """Environments of one origin.

    Attributes:
        title: of the group.
        names: that `environment(...)` and `tfpolicies train` take; empty if a package is missing.
        install: the command that installs a missing package; "" if none is missing.
    """

    title: str
    names: tuple[str, ...]
    install: str = ""


_GYMNASIUM_EXTRAS = {"box2d": "Box2D", "mujoco": "mujoco", "phys2d": "jax", "tabular": "jax"}
"""By module of `gymnasium.envs`: the package that its environments import."""

_EXTRA_NAMES = {"phys2d": "jax", "tabular": "jax"}
_TITLES = {"box2d": "Box2D", "mujoco": "MuJoCo"}


def list_environments(part: str = "") -> list[EnvGroup]:
    """Lists environments whose packages are installed, and the known packages that are missing.

    Args:
        part: a part of the name, in any case; with it, groups without such names are left out.
    """
    groups = [EnvGroup("registered in this process", tuple(ENVIRONMENTS))]
    groups += _list_gymnasium()
    groups.append(_list_package("EnvPool", "envpool", "envpool", _list_envpool))
    groups.append(
        _list_package("PettingZoo", "pettingzoo", "'pettingzoo>=1.27'", list_registered_names)
    )
    groups.append(_list_package("MPE2", "mpe2", "mpe2", _list_mpe2))
    chosen = [
        group._replace(names=tuple(x for x in group.names if part.lower() in x.lower()))
        for group in groups
    ]
    return [group for group in chosen if group.names or (group.install and not part)]


def _list_gymnasium() -> list[EnvGroup]:
    """Returns the groups of Gymnasium's registry: its own environments by module, then others."""
    missing = register_all()
    names: dict[tuple[bool, str], list[str]] = {}
    for name, spec in gym.registry.items():
        group = _get_gymnasium_group(spec)
        if group is not None:
            names.setdefault(group, []).append(name)
    groups = []
    for (is_own, module), members in sorted(names.items(), key=lambda item: not item[0][0]):
        title = _TITLES.get(module, module.replace("_", " "))
        title = f"Gymnasium, {title}" if is_own else title
        package = _GYMNASIUM_EXTRAS.get(module) if is_own else None
        if package is None or importlib.util.find_spec(package) is not None:
            groups.append(EnvGroup(title, tuple(members)))
        else:
            extra = _EXTRA_NAMES.get(module, module)
            groups.append(EnvGroup(title, (), f"pip install 'gymnasium[{extra}]'"))
    return groups + [EnvGroup(name, (), f"pip install {package}") for name, package in missing]


def _get_gymnasium_group(spec: Any) -> tuple[bool, str] | None:
    """Returns whether an environment is Gymnasium's own, and the name of its group.

    Returns None for the names of removed versions, which only raise an error.
    """
    entry_point = spec.entry_point
    module = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    parts = module.partition(":")[0].split(".")
    if parts[:2] != ["gymnasium", "envs"]:
        return False, spec.namespace or parts[0]
    return (True, parts[2]) if isinstance(entry_point, str) else None


def _list_package(
    title: str, package: str, requirement: str, list_names: Callable[[], Iterable[str]]
) -> EnvGroup:
    if importlib.util.find_spec(package) is None:
        return EnvGroup(title, (), f"pip install {requirement}")
    return EnvGroup(title, tuple(list_names()))


def _list_envpool() -> list[str]:
    return [f"{PREFIX}{task}" for task in list_tasks()]


def _list_mpe2() -> list[str]:
    folders = importlib.import_module("mpe2").__path__
    names = (module.name for module in pkgutil.iter_modules(folders))
    return [f"mpe2:{name}" for name in names if re.search(r"_v\d+$", name)]
