"""Snapshots in a policy map: frozen copies of policies, each with its variables in one file.

A snapshot acts exactly as its source did. It shares the Program, and keeps no optimizer and no
network that does not act. Its file is named by its content, never changes, and is mapped, so that
all processes of a machine share its memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tfpolicies.errors import CheckpointError, StashError, UsageError
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.policy_checkpoints import (
    get_fingerprint,
    make_policy_record,
    set_stored_state,
)
from tfpolicies.storage.content_file import ContentFile
from tfpolicies.storage.json_values import decode_value
from tfpolicies.storage.snapshot_file import map_snapshot
from tfpolicies.storage.stash import get_policy_id

_NOT_SHARED = ("rng", "learning_rng")  # each process seeds the generators of a snapshot


class SnapshotFiles:
    """The files of a map's snapshots, with the methods of a `Stash` that a state cache calls."""

    def __init__(self) -> None:
        self._files: dict[str, ContentFile] = {}

    def __getitem__(self, name: str) -> ContentFile:
        return self._files[name]

    def add(self, name: str, file: ContentFile) -> None:
        """Adds the file of an entry."""
        self._files[name] = file

    def map(self, name: str, size: int) -> np.ndarray:
        """Returns the variables of an entry, mapped: uint8 `[size]`, read-only.

        Raises:
            StashError: if the file is missing or damaged, or has another size.
        """
        try:
            memory = map_snapshot(self._files[name]).memory
        except CheckpointError as error:
            raise StashError(
                f"The snapshot {get_policy_id(name)!r} cannot be loaded: {error} Other policies "
                "are not affected."
            ) from error
        if memory.size != size:
            raise StashError(
                f"The snapshot {get_policy_id(name)!r} has {memory.size} bytes, but its policy "
                f"{size}. Add it with a policy that has the same model."
            )
        return memory

    read = map

    def has(self, name: str) -> bool:
        """Whether the file of an entry exists."""
        return name in self._files and self._files[name].exists

    def remove(self, name: str) -> None:
        """Forgets an entry; its file stays, for other processes and for checkpoints."""
        self._files.pop(name, None)


def describe_snapshot(policy: Any) -> dict[str, Any]:
    """Returns the description of a policy in the file of a snapshot: JSON values."""
    record = make_policy_record(policy)
    state = {key: value for key, value in record["state"].items() if key not in _NOT_SHARED}
    return {**record, "state": state}


def make_snapshot_policy(policy_id: str, file: ContentFile, prototype: Any) -> Policy:
    """Returns the policy of a snapshot, whose variables are still those of the prototype.

    Args:
        policy_id: of the snapshot; seeds its generator, together with the prototype's seed.
        file: of the snapshot.
        prototype: a policy with the same Program, whose attributes it copies.

    Raises:
        CheckpointError: if the file cannot be read.
        UsageError: if the prototype has another model, or is a custom policy.
    """
    description = map_snapshot(file).description
    if prototype.driver.state is None or description.get("program") != get_fingerprint(prototype):
        raise UsageError(
            f"{prototype!r} cannot be the prototype of the snapshot {policy_id!r}: it has another "
            "model. Give the policy that the snapshot was made of, or a copy of it."
        )
    policy: Policy = prototype.copy(policy_id)
    settings = {key: decode_value(value) for key, value in description["state"].items()}
    set_stored_state(policy, {**policy.get_state(), **settings})  # a prototype may have diverged
    return policy
