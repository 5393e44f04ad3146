"""Extension that adds RLlib's attributes and methods to objects of the core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.algorithms.pg import PGPolicy
from tfpolicies.algorithms.ppo import PPOTFPolicy, compute_value_statistics
from tfpolicies.base.extensions import Extension
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.compat import attributes
from tfpolicies.compat.attention import add_step_count
from tfpolicies.compat.batch_methods import (
    get_single_step_input,
    policy_batches,
    view_from_dict,
    view_to_dict,
)
from tfpolicies.compat.episode_methods import EPISODE_METHODS
from tfpolicies.compat.flat_observation_view import flat_observation_view
from tfpolicies.compat.rllib_filters import FILTER_ATTRIBUTES
from tfpolicies.compat.rllib_keras_model import prepare_model
from tfpolicies.compat.tf_model_adapter import make_model_factory, wrap_model
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.models.running_filter import RunningFilter
from tfpolicies.policy.hooks import TFPolicyHooks
from tfpolicies.policy.policy import Policy
from tfpolicies.program.traced_arguments import TracedModel
from tfpolicies.rollout.episode import Episode
from tfpolicies.rollout.multi_agent_episode import MultiAgentEpisode
from tfpolicies.rollout.rollout_worker import RolloutWorker

__all__ = ["RECORDED_STATISTICS", "RLlibExtension"]

_VALUES = "_value_fn_out"
RECORDED_STATISTICS: dict[type, dict[str, str]] = {
    PGPolicy: {"policy_loss": "policy_loss"},
    PPOTFPolicy: {
        "_total_loss": "total_loss",
        "_mean_policy_loss": "policy_loss",
        "_mean_vf_loss": "vf_loss",
        "_mean_kl_loss": "kl",
        "_mean_entropy": "entropy",
    },
}
"""Attributes that losses of RLlib's policies set, and the names of their statistics."""


def _do_nothing() -> None:
    """Does nothing: the core initializes on demand."""


def _raise_no_rows(episode: Any) -> NoReturn:
    raise AttributeError(
        f"{type(episode).__name__!r} object has no attribute 'batch_builder': episodes hold no "
        "rows. Read them in on_postprocess_trajectory or on_sample_end"
    )


def _get_recorded(statistic: str) -> Callable[[Any], Any]:
    """Returns a getter of a statistic that this package's loss recorded on a traced view."""
    return lambda view: _get_context(view)["recorded"][statistic]


def _get_context(view: Any) -> dict[str, Any]:
    """Returns the attributes of a traced view."""
    if view._context is None:
        raise LookupError(f"{view!r} is not traced")
    return vars(view._context)


_EPISODE: dict[str, Callable[[Any], Any]] = {
    "batch_builder": _raise_no_rows,
    "env_id": lambda episode: episode.env_index,
    "policy_map": lambda episode: episode.worker.policy_map,
    "policy_mapping_fn": lambda episode: episode.worker.policy_mapping_fn,
    "started": lambda episode: episode.length > 0,
    **{name: attributes.make_method_getter(function) for name, function in EPISODE_METHODS.items()},
}

_STATISTICS: dict[type, dict[str, Callable[[Any], Any]]] = {
    policy_class: {name: _get_recorded(statistic) for name, statistic in names.items()}
    for policy_class, names in RECORDED_STATISTICS.items()
}


class RLlibExtension(Extension):
    """Adds attributes that RLlib scripts read from policies, batches, episodes and workers."""

    records_steps = True
    attributes = {
        Policy: {"_create_exploration": lambda policy: _do_nothing},
        RunningFilter: FILTER_ATTRIBUTES,
        TFPolicyHooks: {
            "variables": lambda policy: lambda: list(policy.model.variables),
            # False during the trial postprocessing of zeros that finds its columns
            "loss_initialized": lambda policy: lambda: not policy._uses_dummy_batch,
            "maybe_initialize_optimizer_and_loss": lambda policy: _do_nothing,
        },
        PGPolicy: _STATISTICS[PGPolicy],
        PPOTFPolicy: {
            "entropy_coeff": lambda policy: policy._get_current_hyperparameter("entropy_coeff"),
            "kl_coeff": lambda policy: policy._get_current_hyperparameter("kl_coeff"),
            _VALUES: lambda view: _get_context(view)["model"].value_function(),  # of the minibatch
            **_STATISTICS[PPOTFPolicy],
        },
        AlgorithmConfig: attributes.CONFIG_ATTRIBUTES,
        Algorithm: attributes.ALGORITHM_ATTRIBUTES,
        WorkerSet: attributes.WORKER_SET_ATTRIBUTES,
        RolloutWorker: attributes.WORKER_ATTRIBUTES,
        TracedModel: {"from_batch": lambda model: model},
        Episode: _EPISODE,
        MultiAgentEpisode: {"policy_mapping_fn": lambda episode: episode.mapping_fn},
        SampleBatch: {
            "policy_batches": policy_batches,
            "get_single_step_input_dict": attributes.make_method_getter(get_single_step_input),
        },
        ViewRequirement: {"to_dict": attributes.make_method_getter(view_to_dict)},
    }
    class_attributes = {
        TFPolicyHooks: dict.fromkeys(("as_eager", "with_tracing"), lambda cls: lambda: cls),
        ViewRequirement: {"from_dict": lambda cls: view_from_dict},
    }

    make_model_factory = staticmethod(make_model_factory)
    wrap_model = staticmethod(wrap_model)
    prepare_model = staticmethod(prepare_model)
    edit_batch = staticmethod(flat_observation_view)

    def complete_recurrent_state(
        self, policy: Any, states: Any
    ) -> tuple[list[Any], Callable[[list[Any]], list[Any]]] | None:
        with contextlib.suppress(LookupError, TypeError, ValueError):
            return add_step_count(policy, states)
        return None

    def read_statistics(self, view: Any, train_batch: Any) -> Mapping[str, Any]:
        attributes = vars(view)
        base = next((base for base in RECORDED_STATISTICS if isinstance(view, base)), None)
        names = {} if base is None else RECORDED_STATISTICS[base]
        result = {names[name]: x for name, x in attributes.items() if name in names}
        if base is PPOTFPolicy and _VALUES in attributes:
            targets, mask = train_batch["value_targets"], train_batch["loss_mask"]
            limit = view.config["vf_clip_param"]
            result |= compute_value_statistics(attributes[_VALUES], targets, mask, limit)
        return result
