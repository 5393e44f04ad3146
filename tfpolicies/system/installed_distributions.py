"""The two distributions of this package: `tfpolicies`, and `tfpolicies-serve`, which only serves.

Both install the same files. `tfpolicies-serve` depends on fewer packages, and not on TensorFlow.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from tfpolicies._version import __version__
from tfpolicies.errors import MissingPackageError, UsageError

FULL_DISTRIBUTION, SERVING_DISTRIBUTION = "tfpolicies", "tfpolicies-serve"


def import_or_explain(user: str, module: str) -> Any:
    """Imports a module of this package, and explains a missing package.

    Args:
        user: the command or object that needs the module, for the message.
        module: its full name.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or FULL_DISTRIBUTION).partition(".")[0]
        if missing == FULL_DISTRIBUTION:
            raise
        raise MissingPackageError(
            f"{user} needs the package {missing!r}, which is not installed. Of the two "
            f"distributions, {SERVING_DISTRIBUTION} only serves exports; {FULL_DISTRIBUTION} "
            "depends on TensorFlow and all other packages. Install it: pip install "
            f"{FULL_DISTRIBUTION}=={__version__}"
        ) from error


def get_install_command(extra: str) -> str:
    """Returns the command that installs an extra of the installed distribution.

    >>> get_install_command("data")
    "pip install 'tfpolicies[data]'"
    """
    return f"pip install '{next(iter(_get_installed_versions()), FULL_DISTRIBUTION)}[{extra}]'"


def check_same_version() -> None:
    versions = _get_installed_versions()
    if len(set(versions.values())) > 1:
        names = " and ".join(f"{name} {version}" for name, version in versions.items())
        raise UsageError(
            f"{names} are both installed, but have different versions of the same files. Keep "
            f"one: pip uninstall -y {FULL_DISTRIBUTION} {SERVING_DISTRIBUTION}, then pip install "
            f"{FULL_DISTRIBUTION} or {SERVING_DISTRIBUTION}."
        )


def _get_installed_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version  # takes long to import

    versions = {}
    for name in (FULL_DISTRIBUTION, SERVING_DISTRIBUTION):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
