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
    module_name, function = _PACKAGES[namespace]
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        package = module_name.partition(".")[0].replace("_", "-")
        raise EnvError(
            f"{name!r} needs the package {package}: {error}. Install it: pip install {package}."
        ) from error
    if function and not any(registered.startswith(f"{namespace}/") for registered in gym.registry):
        getattr(module, function)()
