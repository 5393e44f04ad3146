"""What the stash of a policy map holds: entries with records, frozen policies, policies to open.

A kept stash has a folder for each worker, with the policies that its map flushed, and one of frozen
policies for all. A policy that lies there *waits*: it is made of its record when it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import FolderInUseError, StashError, TfPoliciesError
from tfpolicies.policy.checkpoints import policy_of_record, policy_record
from tfpolicies.policy.policy import Policy
from tfpolicies.storage.stash import HEADER, Stash
from tfpolicies.system.atomic import make_folder, remove_leftovers
from tfpolicies.system.folder_lock import FolderLock

_FROZEN = "frozen"  # the folder of frozen policies, and the mark of their entries


class Entry(NamedTuple):
    """Where a policy lies.

    Attributes:
        stash: in which stash.
        name: of the entry.
    """

    stash: Stash
    name: str


class Archive:
    """The stashes of one map, and what waits in them. Callers hold the map's lock.

    Args:
        path: the folder of a kept stash; None for a temporary one.
        worker_index: of the worker that the map belongs to.
        classes: policy classes that records may name beside those of the package.

    Raises:
        StashError: if another process uses the stash with the same `worker_index`.
    """

    def __init__(
        self,
        path: str | Path | None,
        worker_index: int,
        classes: Sequence[type[Policy]],
        model_work_limit: float,
    ) -> None:
        self.worker_index = worker_index
        self.is_kept = path is not None
        self.waiting: dict[str, Entry] = {}
        self._classes = tuple(classes)
        self._model_work_limit = model_work_limit
        self._deleted: set[str] = set()  # here; others may still have those that were frozen
        if path is None:
            self._held: FolderLock | None = None
            self.stash = self.frozen = Stash()
        else:
            own = Path(path) / f"worker_{worker_index}"
            self._held = _held(own)
            self.stash, self.frozen = Stash(own), Stash(Path(path) / _FROZEN, scratch=own)

    # -- what waits -----------------------------------------------------------------------------

    def find(self, stash: Stash, known: Container[str]) -> list[str]:
        """Lets wait what a stash has records of; returns the new ids.

        Args:
            stash: the own one, or that of frozen policies.
            known: ids that the map has already.
        """
        known_here = self._deleted | self.waiting.keys()
        found = {
            policy_id: Entry(stash, name)
            for name, policy_id in stash.recorded()
            if policy_id not in known and policy_id not in known_here
        }
        self.waiting.update(found)
        return sorted(found)

    def look_for(self, policy_id: str) -> None:
        """Lets a policy wait if another process has frozen it meanwhile."""
        entry = self._frozen_entry(policy_id)
        if self.is_kept and policy_id not in self._deleted and entry.stash.has_record(entry.name):
            self.waiting[policy_id] = entry

    def make(self, policy_id: str) -> Any:
        """Returns the policy that waits under an id, its variables in the stash.

        Raises:
            StashError: if its record is damaged, or names an unknown class.
        """
        stash, name = self.waiting[policy_id]
        record = stash.read_record(name)
        source = f"the stash's record of {policy_id!r}"
        try:
            policy = policy_of_record(
                record["policy"], source, self._classes, stash.size(name), self._model_work_limit
            )
        except TfPoliciesError as error:
            raise StashError(
                f"The policy {policy_id!r} cannot be made as the stash has it: {error} (Classes of "
                "yours are given by `PolicyMap(policy_classes=[...])`.)"
            ) from error
        policy.policy_id = policy_id
        if stash is self.frozen:
            policy.holding.state.frozen_as = policy_id
        return policy

    def arrived(self, entry: Entry) -> list[str]:
        """Takes down that what lay in an entry is in the map now; returns its ids."""
        ids = [policy_id for policy_id, place in self.waiting.items() if place == entry]
        for policy_id in ids:
            del self.waiting[policy_id]
        return ids

    def replaced(self, policy_id: str) -> None:
        """Takes down that the map has another policy under an id."""
        self._drop(policy_id)
        self._deleted.discard(policy_id)

    def deleted(self, policy_id: str) -> None:
        """Takes down that a policy is to be forgotten, whoever froze it."""
        self._drop(policy_id)
        if self.is_kept:
            self._deleted.add(policy_id)

    def _drop(self, policy_id: str) -> None:
        """Forgets what waits under an id, if something does; removes it if it is this map's own."""
        entry = self.waiting.pop(policy_id, None)
        if entry is not None and entry not in self.waiting.values() and self.owns(entry):
            entry.stash.remove(entry.name)

    # -- what is written ------------------------------------------------------------------------

    def owns(self, entry: Entry) -> bool:
        """Whether it was a map of this path and worker that wrote an entry, now or before."""
        if not self.is_kept or entry.stash is self.stash:
            return True
        with contextlib.suppress(StashError):
            record = entry.stash.read_record(entry.name)
            return bool(record.get("worker_index") == self.worker_index)
        return False

    def freeze(self, policy_id: str, policy: Policy, memory: np.ndarray) -> tuple[Entry, bool]:
        """Writes a policy among the frozen ones; returns its entry, and whether it is this map's.

        Raises:
            StashError: if it cannot be written, or another one was frozen under this id.
        """
        entry = self._frozen_entry(policy_id)
        stash, name = entry
        is_new = stash.write_new(name, memory)
        if not is_new and not _holds(entry, memory):
            raise StashError(
                f"Another policy was frozen as {policy_id!r} in {str(stash.folder)!r} "
                "before. Choose another id: `copy_policy(source, target)`, then freeze that."
            )
        if self.is_kept and not stash.has_record(name):
            self.write_record(entry, [policy_id], policy)
        return entry, is_new or self.owns(entry)

    def _frozen_entry(self, policy_id: str) -> Entry:
        return Entry(self.frozen, f"{policy_id}~{_FROZEN}")

    def write_record(self, entry: Entry, policy_ids: Sequence[str], policy: Policy) -> None:
        """Writes what another process needs to make a policy of an entry."""
        record = {"policy_ids": policy_ids, "worker_index": self.worker_index}
        entry.stash.write_record(entry.name, {**record, "policy": policy_record(policy)})

    def close(self) -> None:
        """Lets other maps open the stash."""
        self.waiting.clear()
        if self._held is not None:
            self._held.release()


def _holds(entry: Entry, memory: np.ndarray) -> bool:
    """Whether an entry has the same image as a memory."""
    same_size = entry.stash.size(entry.name) == HEADER + memory.size
    return same_size and np.array_equal(entry.stash.read(entry.name, memory.size), memory)


def _held(folder: Path) -> FolderLock:
    """Makes a stash's folder, keeps it for this process, and tidies up after killed ones."""
    try:
        make_folder(folder)
        held = FolderLock(folder)
    except FolderInUseError as error:
        raise StashError(
            f"The stash {str(folder)!r} is in use by another PolicyMap, of {error.owner}; close "
            "that one, or give this one another `path` or `worker_index`."
        ) from error
    except OSError as error:
        raise StashError(
            f"The stash {str(folder)!r} cannot be made: {error}. Give another `path`."
        ) from error
    remove_leftovers(folder)
    return held
