"""What objects of the core have under names that only code written for RLlib asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.policy.kind import PolicyKind
from tfpolicies.policy.policy import Policy
from tfpolicies.program.view import ModelView
from tfpolicies.rollout.episode import Episode


def _nothing() -> None:
    """Does nothing: what ported constructors ask for is made on demand here."""


def _loss_initialized(policy: Any) -> Any:
    """Returns a function that is False while postprocessing is given zeros to learn its columns."""
    return lambda: not policy._sees_zeros


def _in_batches(name: str) -> Any:
    def refuse(episode: Any) -> NoReturn:
        raise AttributeError(
            f"{type(episode).__name__!r} object has no attribute {name!r}: episodes hold no rows. "
            "Read them in on_postprocess_trajectory or on_sample_end, whose batches have "
            "state_out_0, action_logp, action_dist_inputs and the like"
        )

    return refuse


_OF_EPISODES = {
    name: _in_batches(name)
    for name in (
        "batch_builder",
        "last_extra_action_outs_for",
        "prev_action_for",
        "prev_reward_for",
        "rnn_state_for",
    )
}

_LOOKUPS: dict[type, dict[str, Callable[[Any], Any]]] = {
    Policy: {"_create_exploration": lambda policy: _nothing},
    PolicyKind: {
        "loss_initialized": _loss_initialized,
        "maybe_initialize_optimizer_and_loss": lambda policy: _nothing,
    },
    Algorithm: {"_counters": lambda algorithm: algorithm.counters},
    ModelView: {"from_batch": lambda model: model},
    Episode: _OF_EPISODES,
}
"""By class and name, what returns the attribute of an object."""


def lookup(obj: Any, name: str) -> Any:
    """Returns what an object has under a name of ported code.

    Raises:
        LookupError: if objects of its class have nothing there.
    """
    for kind in type(obj).__mro__:
        if name in _LOOKUPS.get(kind, ()):
            return _LOOKUPS[kind][name](obj)
    raise LookupError(name)
