"""What this process registered by name, packed for workers in other processes."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from ray import cloudpickle

from tfpolicies.envs.registry import ENVIRONMENTS
from tfpolicies.extensions import EXTENSIONS
from tfpolicies.models.distributions.base import BOX_DISTRIBUTIONS
from tfpolicies.models.registry import MODELS

logger = logging.getLogger("tfpolicies")

_REGISTERS: dict[str, dict[str, Any]] = {
    "environment": ENVIRONMENTS,
    "model": MODELS,
    "distribution": BOX_DISTRIBUTIONS,
    "extension": EXTENSIONS,
}


def pack_names() -> list[tuple[str, str, bytes]]:
    """Returns (register, name, pickled object) of all names that this process gave.

    An object that cannot be pickled is left out: whoever needs it is told that it has no name.
    """
    packed = []
    for register, named in _REGISTERS.items():
        for name, value in named.items():
            with contextlib.suppress(Exception):
                packed.append((register, name, cloudpickle.dumps(value)))
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
        _REGISTERS[register][name] = found
