"""Writing of checkpoints by `Algorithm.save`, and the warning about what no file can hold."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from tfpolicies.algorithms import checkpoints
from tfpolicies.algorithms.checkpoints import SavedCheckpoint, SavedPath, StoredAlgorithm
from tfpolicies.algorithms.host import HostAlgorithm
from tfpolicies.distributed import messages
from tfpolicies.rollout.policy_changes import MappingAndTrainable
from tfpolicies.system.paths import resolve_path

logger = logging.getLogger("tfpolicies")


def save(
    algorithm: HostAlgorithm,
    checkpoint_dir: str | os.PathLike[str] | None,
    policy_states: Mapping[str, Mapping[str, Any]] | None,
) -> SavedCheckpoint:
    """Writes the checkpoint of an algorithm; see `Algorithm.save`.

    Args:
        algorithm: an `Algorithm`.
        checkpoint_dir: the folder; None for one named after the iteration.
        policy_states: states to write instead of the present ones, by policy id.

    Raises:
        CheckpointError: if it cannot be written.
        ExportError: if a SavedModel cannot be written; the checkpoint is there.
    """
    folder = resolve_path(checkpoint_dir or f"checkpoint_{algorithm.iteration:06d}")
    record = checkpoints.record_of(algorithm, policy_states)
    record.write(folder)
    if algorithm.config.export_native_model_files:
        policies = algorithm.worker.policy_map
        checkpoints.export_models(policies, record, folder, policy_states or {})
    if record.manifest["finite"] and not policy_states:
        algorithm._last_good = str(folder)
    stored = record.stored(repr(str(folder)))
    settings, functions = checkpoints.held_back(algorithm, stored)
    _warn_unheld(algorithm, stored)
    if algorithm.config.new_episodes_at_checkpoint:
        algorithm.workers.foreach_worker(messages.begin_episodes)
    return SavedCheckpoint(SavedPath(str(folder), settings, MappingAndTrainable(**functions)))


def _warn_unheld(algorithm: HostAlgorithm, stored: StoredAlgorithm) -> None:
    """Logs once what a caller must give again when the checkpoint is loaded."""
    unheld = stored.unheld()
    if unheld is not None and algorithm.tells_of_unheld:
        algorithm.tells_of_unheld = False
        logger.warning(
            "When you load this checkpoint, give these again, since no file chooses what is "
            "imported: %s. Call %s.%s.",
            unheld.names,
            type(algorithm).__name__,
            unheld.call,
        )
