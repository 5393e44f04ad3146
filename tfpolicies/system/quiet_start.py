"""Hides the lines that TensorFlow prints when it starts, if `tfpolicies` was imported before it.

Lines about CPU features and missing GPUs go to standard error while TensorFlow is imported and when
its first operation runs. If the user sets TF_CPP_MIN_LOG_LEVEL, only that decides.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

_NAME = "tensorflow"
_LEVEL, _QUIET = "TF_CPP_MIN_LOG_LEVEL", "3"
_START_LINES = (
    rb"^(WARNING: All log messages before absl::|To enable the following instructions: |"
    rb"[IWE]\d{4} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] )"
)


def quiet_tensorflow_start() -> None:
    """Makes a later import of TensorFlow print nothing; does nothing if it was imported.

    The environment is changed only during that import: TensorFlow keeps the level that it reads.
    """
    is_watched = any(isinstance(finder, _TensorFlowFinder) for finder in sys.meta_path)
    if _NAME not in sys.modules and not is_watched:
        sys.meta_path.insert(0, _TensorFlowFinder())


class _TensorFlowFinder:
    """Finds TensorFlow like other finders, and gives it a quiet loader, once."""

    def __init__(self) -> None:
        self._searches = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        if name != _NAME or self._searches:
            return None
        import importlib.util

        self._searches = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searches = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _QuietLoader(self, spec.loader)  # type: ignore[assignment]
        return spec


class _QuietLoader:
    """Wraps the loader of TensorFlow; its `exec_module` prints no start-up lines."""

    def __init__(self, finder: _TensorFlowFinder, loader: Any) -> None:
        self._finder = finder
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        from tfpolicies.system.log_suppression import suppress_native_stderr

        module.__loader__ = module.__spec__.loader = self._loader
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        level = os.environ.get(_LEVEL)
        if level not in (None, _QUIET):
            self._loader.exec_module(module)
            return
        os.environ[_LEVEL] = _QUIET
        try:
            with suppress_native_stderr(_START_LINES):
                self._loader.exec_module(module)
        finally:
            if level is None:
                os.environ.pop(_LEVEL, None)
