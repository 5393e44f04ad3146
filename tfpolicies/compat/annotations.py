"""Type names for annotations in ported code, and the decorator `Deprecated`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

AlgorithmConfigDict = dict[str, Any]
PartialAlgorithmConfigDict = dict[str, Any]
ModelConfigDict = dict[str, Any]
ModelWeights = dict[str, Any]
MultiAgentDict = dict[Any, Any]
ResultDict = dict[str, Any]
EnvActionType = Any
EnvObsType = Any
EnvType = Any
TensorStructType = Any
TensorType = Any

Marked = TypeVar("Marked", bound=Callable[..., Any])


def Deprecated(*args: Any, **kwargs: Any) -> Callable[[Marked], Marked]:
    """Returns a decorator that leaves a function or class unchanged; the arguments are ignored.

    >>> @Deprecated(old="f", new="g", error=False)
    ... def f():
    ...     return 1
    >>> f()
    1
    """
    del args, kwargs
    return lambda marked: marked
