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
from tfpolicies.policy.kind import PolicyKind
from tfpolicies.policy.learning_batches import dummy_batch

_KEPT = (
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
_WHOLE = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def read_views(
    policy: PolicyKind, requirements: Mapping[str, ViewRequirement]
) -> dict[str, ViewRequirement]:
    """Returns the requirements of columns that are read, and those of columns that acting adds.

    Args:
        policy: of a class with a Program.
        requirements: all possible columns, by name.
    """
    batch = dummy_batch(policy)
    requirements = {**requirements, **_seen_by_acting(policy)}
    acting, training = _read_by_acting(policy), _read_by_loss(policy)
    postprocessing = set(batch.accessed_keys)
    found = {}
    for name, view in {**requirements, **_added(batch, requirements)}.items():
        kept = name in _KEPT
        if kept or name in acting | training | postprocessing or name.startswith("state_"):
            learned = kept or name in training or name.startswith("state_in_")
            found[name] = dataclasses.replace(
                view,
                used_for_compute_actions=view.used_for_compute_actions and name in acting,
                used_for_training=view.used_for_training and learned,
            )
    return found


def _seen_by_acting(policy: PolicyKind) -> dict[str, ViewRequirement]:
    return {
        view.name: ViewRequirement(
            view.source, space=view.space, shift=view.shifts if view.is_window else view.shifts[0]
        )
        for view in policy.program.ports.views
    }


def _read_by_acting(policy: PolicyKind) -> set[str]:
    ports = policy.program.ports
    return {SampleBatch.OBS, *(x.name for x in ports.views), *(x.name for x in ports.states)}


def _read_by_loss(policy: PolicyKind) -> set[str]:
    if not policy._overrides("loss"):
        return set()
    policy._learner.discover()
    return set(policy.program.updates.signature.columns) - {SEQ_LENS}


def _added(
    batch: SampleBatch, requirements: Mapping[str, ViewRequirement]
) -> dict[str, ViewRequirement]:
    found = {}
    for name, column in batch.items():
        if name not in requirements and isinstance(column, np.ndarray):
            kind: Any = np.float32 if column.dtype.kind == "f" else np.int64
            low, high = (-np.inf, np.inf) if kind is np.float32 else _WHOLE
            space = spaces.Box(low, high, column.shape[1:], kind)
            found[name] = ViewRequirement(space=space, used_for_compute_actions=False)
    return found
