"""Conversion of Ray's errors to this package's errors and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError, RayTaskError

from tfpolicies.errors import ConfigError, WorkerError


def require_sendable(arguments: Mapping[str, Any]) -> None:
    """Checks that functions can be sent to workers, before anything is changed."""
    functions = {name: value for name, value in arguments.items() if callable(value)}
    for name, value in functions.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise ConfigError(
                f"{name}={value!r} cannot be sent to remote workers: {error}. Remove its "
                "references to objects of this process (locks, open files, the algorithm)."
            ) from error


def get_result(reference: ray.ObjectRef) -> tuple[Any, BaseException | None]:
    """Returns (result, None), or (None, error)."""
    try:
        return ray.get(reference), None
    except RayError as error:
        return None, error


def describe_failure(error: BaseException) -> str:
    """Returns the reason of a worker's failure in one line."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError):
        text = " ".join(str(error).split())
        return f"its process died ({text[:300]})"
    return str(error)


def make_local_error(error: BaseException, index: int) -> BaseException:
    """Returns the exception to raise for a worker's error: the original one, or a `WorkerError`."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        original = error.cause
        if hasattr(original, "add_note"):
            original.add_note(f"raised in remote worker {index}")
        return original
    return WorkerError(
        f"Remote worker {index} failed: {describe_failure(error)}. Set "
        "fault_tolerance(recreate_failed_workers=True) to replace failed workers, or "
        "fault_tolerance(ignore_worker_failures=True) to continue without them."
    )
