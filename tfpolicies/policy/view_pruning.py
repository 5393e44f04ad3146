"""View requirements of policies with a Program, pruned to the columns that are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.models.ports import SEQ_LENS
from tfpolicies.policy.batch_utils import make_dummy_batch
from tfpolicies.policy.hooks import TFPolicyHooks

_NEVER_PRUNED = (
    SampleBatch.EPS_ID,
    SampleBatch.AGENT_INDEX,
    SampleBatch.UNROLL_ID,
    SampleBatch.TERMINATEDS,
    SampleBatch.TRUNCATEDS,
    SampleBatch.REWARDS,
    SampleBatch.INFOS,
    SampleBatch.T,
)
"""Columns that are never pruned: they identify and describe a row."""
_INT64_RANGE = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def prune_view_requirements(
    policy: TFPolicyHooks, requirements: Mapping[str, ViewRequirement]
) -> dict[str, ViewRequirement]:
    """Returns the requirements of columns that are read, and those of columns that acting adds.

    Args:
        policy: of a class with a Program.
        requirements: all possible columns, by name.
    """
    batch = make_dummy_batch(policy)
    requirements = {**requirements, **_make_model_views(policy)}
    acting, training = _get_acting_columns(policy), _get_loss_columns(policy)
    postprocessing = set(batch.accessed_keys)
    result = {}
    for name, view in {**requirements, **_make_added_views(batch, requirements)}.items():
        is_kept = name in _NEVER_PRUNED
        if is_kept or name in acting | training | postprocessing or name.startswith("state_"):
            is_trained_on = is_kept or name in training or name.startswith("state_in_")
            result[name] = dataclasses.replace(
                view,
                used_for_compute_actions=view.used_for_compute_actions and name in acting,
                used_for_training=view.used_for_training and is_trained_on,
            )
    return result


def _make_model_views(policy: TFPolicyHooks) -> dict[str, ViewRequirement]:
    return {
        view.name: ViewRequirement(
            view.source, space=view.space, shift=view.shifts if view.is_window else view.shifts[0]
        )
        for view in policy.program.ports.views
    }


def _get_acting_columns(policy: TFPolicyHooks) -> set[str]:
    ports = policy.program.ports
    return {SampleBatch.OBS, *(x.name for x in ports.views), *(x.name for x in ports.states)}


def _get_loss_columns(policy: TFPolicyHooks) -> set[str]:
    if not policy._overrides("loss"):
        return set()
    policy._learner.discover_columns()
    return set(policy.program.updates.signature.columns) - {SEQ_LENS}


def _make_added_views(
    batch: SampleBatch, requirements: Mapping[str, ViewRequirement]
) -> dict[str, ViewRequirement]:
    result = {}
    for name, column in batch.items():
        if name not in requirements and isinstance(column, np.ndarray):
            dtype: Any = np.float32 if column.dtype.kind == "f" else np.int64
            low, high = (-np.inf, np.inf) if dtype is np.float32 else _INT64_RANGE
            space = spaces.Box(low, high, column.shape[1:], dtype)
            result[name] = ViewRequirement(space=space, used_for_compute_actions=False)
    return result
