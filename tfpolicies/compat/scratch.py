"""What losses of RLlib keep on `self`, which are recorded statistics here."""

from __future__ import annotations

from typing import Any

from tfpolicies.algorithms.pg import PGPolicy
from tfpolicies.algorithms.ppo import PPOTFPolicy, value_statistics

_VALUES = "_value_fn_out"
_NAMES: dict[type, dict[str, str]] = {
    PGPolicy: {"policy_loss": "policy_loss"},
    PPOTFPolicy: {
        "_total_loss": "total_loss",
        "_mean_policy_loss": "policy_loss",
        "_mean_vf_loss": "vf_loss",
        "_mean_kl_loss": "kl",
        "_mean_entropy": "entropy",
    },
}
"""Attributes of the classes' losses, and the statistics that they are."""


def statistics(view: Any, train_batch: Any) -> dict[str, Any]:
    """Returns the statistics in the attributes that a ported loss set; see `register_spelling`."""
    kept = vars(view)
    found = {name: kept[spelled] for spelled, name in _names(view).items() if spelled in kept}
    if _VALUES in kept and isinstance(view, PPOTFPolicy):
        targets, mask = train_batch["value_targets"], train_batch["loss_mask"]
        found |= value_statistics(kept[_VALUES], targets, mask, view.config["vf_clip_param"])
    return found


def attribute(view: Any, name: str) -> Any:
    """Returns what the loss of this package has under RLlib's name, or None; likewise."""
    if name == _VALUES and isinstance(view, PPOTFPolicy) and "_loss_model" in vars(view):
        return view._loss_model.value_function()
    return view.recorded.get(_names(view).get(name))


def _names(view: Any) -> dict[str, str]:
    return next((names for kind, names in _NAMES.items() if isinstance(view, kind)), {})
