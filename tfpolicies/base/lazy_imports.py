"""Lazy imports (PEP 562): names of a package are imported on first use."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def resolve_lazy_attribute(
    name: str, modules: Mapping[str, str], package_globals: dict[str, Any]
) -> Any:
    """Returns a name of a package, for its `__getattr__`, and stores it in the package.

    Args:
        name: the name.
        modules: the module of each name of the package.
        package_globals: the package's `globals()`.

    Raises:
        AttributeError: if the package has no such name.
        ConfigError: if Keras uses another backend than TensorFlow.
        MissingPackageError: if it needs a package that is not installed.
    """
    if name not in modules:
        raise AttributeError(f"module {package_globals['__name__']!r} has no attribute {name!r}")
    importlib.import_module("tfpolicies.system.keras_backend").require_tensorflow_backend()
    distributions = importlib.import_module("tfpolicies.system.installed_distributions")
    module = distributions.import_or_explain(f"{package_globals['__name__']}.{name}", modules[name])
    package_globals[name] = getattr(module, name)
    return package_globals[name]
