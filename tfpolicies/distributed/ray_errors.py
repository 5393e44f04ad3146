"""What goes wrong with Ray actors, in the words of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError, RayTaskError

from tfpolicies.errors import ConfigError, WorkerError


def require_sendable(arguments: Mapping[str, Any]) -> None:
    """Checks that functions can be sent to workers, so that nothing is changed before it is sure.

    Raises:
        ConfigError: for one that cannot be pickled.
    """
    functions = {name: value for name, value in arguments.items() if callable(value)}
    for name, value in functions.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise ConfigError(
                f"{name}={value!r} cannot be sent to remote workers: {error}. Leave out what it "
                "holds of this process (locks, open files, the algorithm)."
            ) from error


def fetched(reference: ray.ObjectRef) -> tuple[Any, BaseException | None]:
    """Returns (answer, None), or (None, error)."""
    try:
        return ray.get(reference), None
    except RayError as error:
        return None, error


def reason(error: BaseException) -> str:
    """Returns why a worker failed, in one line."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError):
        text = " ".join(str(error).split())
        return f"its process died ({text[:300]})"
    return str(error)


def cause(error: BaseException, index: int) -> BaseException:
    """Returns what to raise for an error of a worker: what was raised there, if anything was."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        cause = error.cause
        if hasattr(cause, "add_note"):
            cause.add_note(f"raised in remote worker {index}")
        return cause
    return WorkerError(
        f"Remote worker {index} failed: {reason(error)}. Let it be replaced by "
        "fault_tolerance(recreate_failed_workers=True), or do without it by "
        "fault_tolerance(ignore_worker_failures=True)."
    )
