"""Sends the registered environments, models and extensions of this process to its workers."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import cloudpickle

from tfpolicies.base.extensions import EXTENSIONS
from tfpolicies.envs.env_registry import ENVIRONMENTS
from tfpolicies.models.distributions.base import BOX_DISTRIBUTIONS
from tfpolicies.models.registry import MODELS
from tfpolicies.offline.input_registry import INPUTS

logger = logging.getLogger("tfpolicies")

_REGISTRIES: dict[str, dict[str, Any]] = {
    "environment": ENVIRONMENTS,
    "model": MODELS,
    "distribution": BOX_DISTRIBUTIONS,
    "extension": EXTENSIONS,
    "input": INPUTS,
}


def pack_registries() -> list[tuple[str, str, bytes]]:
    """Returns (registry, name, pickled object) of all registered names.

    An object that cannot be pickled is omitted; using its name in a worker then raises an error.
    """
    packed = []
    for registry, objects in _REGISTRIES.items():
        for name, value in objects.items():
            with contextlib.suppress(Exception):
                packed.append((registry, name, cloudpickle.dumps(value)))
    return packed


def register_packed(packed: list[tuple[str, str, bytes]]) -> None:
    """Registers the result of `pack_registries` from another process.

    Objects that cannot be imported here are skipped with a warning: a run may not need them.
    """
    for registry, name, pickled in packed:
        try:
            registered = cloudpickle.loads(pickled)
        except Exception as error:
            logger.warning(
                "the %s %r is not available in this worker: %s. Define it in a module that workers "
                "can import, or in the script itself.",
                registry,
                name,
                error,
            )
            continue
        _REGISTRIES[registry][name] = registered
