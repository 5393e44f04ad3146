"""What this process registered by name, packed for workers in other processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ray import cloudpickle

from tfpolicies import ported
from tfpolicies.envs.registry import register_environment, registered_creator, registered_names
from tfpolicies.models.distributions.action_distribution import (
    BOX_DISTRIBUTIONS,
    register_box_distribution,
)
from tfpolicies.models.registry import register_model, registered_model, registered_models

logger = logging.getLogger("tfpolicies")

_REGISTERS: dict[str, Callable[[str, Any], None]] = {
    "environment": register_environment,
    "model": register_model,
    "distribution": register_box_distribution,
    "ported": lambda name, lookup: ported.register(lookup),
}


def pack_names() -> list[tuple[str, str, bytes]]:
    """Returns (register, name, pickled object) of all names that this process gave.

    An object that cannot be pickled is left out: whoever needs it is told that it has no name.
    """
    found: list[tuple[str, str, Any]]
    found = [("environment", name, registered_creator(name)) for name in registered_names()]
    found += [("model", name, registered_model(name)) for name in registered_models()]
    found += [("distribution", name, kind) for name, kind in BOX_DISTRIBUTIONS.items()]
    found += [("ported", "names", lookup) for lookup in ported.lookups()]
    packed = []
    for register, name, value in found:
        try:
            packed.append((register, name, cloudpickle.dumps(value)))
        except Exception:
            continue
    return packed


def take_names(packed: list[tuple[str, str, bytes]]) -> None:
    """Registers in this process what `pack_names` returned in another.

    What cannot be imported here is left out with a warning: a run may well do without it.
    """
    for register, name, value in packed:
        try:
            found = cloudpickle.loads(value)
        except Exception as error:
            logger.warning(
                "the %s %r is not known to this worker: %s. Define it in a module that workers can "
                "import, or in the script itself.",
                register,
                name,
                error,
            )
            continue
        _REGISTERS[register](name, found)
