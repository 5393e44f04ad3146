"""Names that ported code uses in annotations, or to mark what is old."""

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


def Deprecated(*given: Any, **named: Any) -> Callable[[Marked], Marked]:
    """Returns a decorator that leaves a function or class as it is; the arguments are not read.

    >>> @Deprecated(old="f", new="g", error=False)
    ... def f():
    ...     return 1
    >>> f()
    1
    """
    del given, named
    return lambda marked: marked
