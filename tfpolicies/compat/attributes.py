"""What objects of the core have under names that only code written for RLlib asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.algorithms.pg import PGPolicy
from tfpolicies.algorithms.ppo import PPOTFPolicy, value_statistics
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.compat.adapter import factory_of, keras_model
from tfpolicies.compat.attention import windowed_memory
from tfpolicies.compat.batches import (
    policy_batches,
    single_step_input,
    view_as_dict,
    view_from_dict,
)
from tfpolicies.compat.configs import OF_CONFIGS
from tfpolicies.compat.episodes import ASKED
from tfpolicies.compat.filters import OF_FILTERS
from tfpolicies.compat.flat_rows import shown
from tfpolicies.compat.keras_model import prepare_model
from tfpolicies.compat.methods import method
from tfpolicies.compat.runs import OF_ALGORITHMS
from tfpolicies.compat.workers import OF_WORKER_SETS, OF_WORKERS
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.models.running_filter import RunningFilter
from tfpolicies.policy.kind import PolicyKind
from tfpolicies.policy.policy import Policy
from tfpolicies.program.view import ModelView
from tfpolicies.rollout.episode import Episode
from tfpolicies.rollout.multi_agent_episode import MultiAgentEpisode
from tfpolicies.rollout.rollout_worker import RolloutWorker

__all__ = ["factory_of", "keras_model", "lookup", "prepare_model", "shown", "statistics"]


def _nothing() -> None:
    """Does nothing: what ported constructors ask for is made on demand here."""


def _no_rows(episode: Any) -> NoReturn:
    raise AttributeError(
        f"{type(episode).__name__!r} object has no attribute 'batch_builder': episodes hold no "
        "rows. Read them in on_postprocess_trajectory or on_sample_end"
    )


_OF_EPISODES: dict[str, Callable[[Any], Any]] = {
    "batch_builder": _no_rows,
    "env_id": lambda episode: episode.env_index,
    "policy_map": lambda episode: episode.worker.policy_map,
    "policy_mapping_fn": lambda episode: episode.worker.policy_mapping_fn,
    "started": lambda episode: episode.length > 0,
    **{name: method(function) for name, function in ASKED.items()},
}

_LOOKUPS: dict[type, dict[str, Callable[[Any], Any]]] = {
    Policy: {"_create_exploration": lambda policy: _nothing},
    RunningFilter: OF_FILTERS,
    PolicyKind: {
        "variables": lambda policy: lambda: list(policy.model.variables),
        # False while postprocessing is given zeros to learn its columns
        "loss_initialized": lambda policy: lambda: not policy._sees_zeros,
        "maybe_initialize_optimizer_and_loss": lambda policy: _nothing,
        "windowed_memory": method(windowed_memory),
    },
    PPOTFPolicy: {
        "entropy_coeff": lambda policy: policy._in_force("entropy_coeff"),
        "kl_coeff": lambda policy: policy._in_force("kl_coeff"),
    },
    AlgorithmConfig: OF_CONFIGS,
    Algorithm: OF_ALGORITHMS,
    WorkerSet: OF_WORKER_SETS,
    RolloutWorker: OF_WORKERS,
    ModelView: {"from_batch": lambda model: model},
    Episode: _OF_EPISODES,
    MultiAgentEpisode: {"policy_mapping_fn": lambda episode: episode.mapping_fn},
    SampleBatch: {
        "policy_batches": policy_batches,
        "get_single_step_input_dict": method(single_step_input),
    },
    ViewRequirement: {"to_dict": method(view_as_dict)},
}
"""By class and name, what returns the attribute of an object."""

_OF_CLASSES: dict[type, dict[str, Callable[[Any], Any]]] = {
    PolicyKind: dict.fromkeys(("as_eager", "with_tracing"), lambda kind: lambda: kind),
    ViewRequirement: {"from_dict": lambda kind: view_from_dict},
}
"""By class and name, what returns the method of a class itself."""


def lookup(obj: Any, name: str) -> Any:
    """Returns what an object has under a name of ported code.

    Raises:
        LookupError: if objects of its class have nothing there.
    """
    is_class = isinstance(obj, type)
    lookups = _OF_CLASSES if is_class else _LOOKUPS
    for kind in (obj if is_class else type(obj)).__mro__:
        if name in lookups.get(kind, ()):
            return lookups[kind][name](obj)
    if is_class:
        raise LookupError(name)
    if vars(obj).get("_is_view"):
        return _recorded(obj, name)
    raise LookupError(name)


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
    """Returns the statistics in the attributes that a ported loss set; see `ported`."""
    kept = vars(view)
    found = {name: kept[spelled] for spelled, name in _names(view).items() if spelled in kept}
    if _VALUES in kept and _names(view) is _NAMES[PPOTFPolicy]:
        targets, mask = train_batch["value_targets"], train_batch["loss_mask"]
        found |= value_statistics(kept[_VALUES], targets, mask, view.config["vf_clip_param"])
    return found


def _recorded(view: Any, name: str) -> Any:
    """Returns what the loss of this package recorded, under RLlib's name."""
    if name == _VALUES and _names(view) is _NAMES[PPOTFPolicy] and "_loss_model" in vars(view):
        return view._loss_model.value_function()
    return view.recorded[_names(view)[name]]


def _names(view: Any) -> dict[str, str]:
    return next((names for kind, names in _NAMES.items() if isinstance(view, kind)), {})
