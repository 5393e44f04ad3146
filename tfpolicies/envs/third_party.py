"""Registers environments of third-party packages with Gymnasium, by namespace."""

from __future__ import annotations

import importlib

import gymnasium as gym

from tfpolicies.errors import EnvError

_PACKAGES = {"ALE": ("ale_py", ""), "MinAtar": ("minatar.gym", "register_envs")}
"""By namespace: the module, and its function that registers its environments."""


def register_namespace(name: str) -> None:
    """Has the package of a name's namespace register its environments, if the package is known.

    Args:
        name: such as `"MinAtar/Breakout-v1"`.
    """
    namespace, slash, _ = name.partition("/")
    if not slash or namespace not in _PACKAGES or name in gym.registry:
        return
    try:
        _register(namespace)
    except ImportError as error:
        package = _get_distribution(namespace)
        raise EnvError(
            f"{name!r} needs the package {package}: {error}. Install it: pip install {package}."
        ) from error


def register_all() -> list[tuple[str, str]]:
    """Has all known packages register their environments.

    Returns:
        The namespaces whose packages are missing, with the names of these packages.
    """
    missing = []
    for namespace in _PACKAGES:
        try:
            _register(namespace)
        except ImportError:
            missing.append((namespace, _get_distribution(namespace)))
    return missing


def _register(namespace: str) -> None:
    module_name, function = _PACKAGES[namespace]
    module = importlib.import_module(module_name)
    if function and not any(registered.startswith(f"{namespace}/") for registered in gym.registry):
        getattr(module, function)()


def _get_distribution(namespace: str) -> str:
    return _PACKAGES[namespace][0].partition(".")[0].replace("_", "-")
