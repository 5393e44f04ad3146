"""Index of the policies that a policy map has on disk: flushed, frozen, and not loaded yet.

A persistent stash has a folder for each worker, with the policies that its map flushed, and a
shared one of frozen policies. A policy on disk is *unloaded* until the map accesses it and creates
it from its record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfpolicies.errors import FolderInUseError, StashError, TfPoliciesError
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.policy_checkpoints import make_policy_from_record, make_policy_record
from tfpolicies.policy_map.snapshots import SnapshotFiles
from tfpolicies.storage.stash import HEADER_BYTES, RecordSummary, Stash
from tfpolicies.system.atomic import make_folder, remove_leftovers
from tfpolicies.system.folder_lock import FolderLock, exclusive_access
from tfpolicies.system.paths import resolve_path

_FROZEN_FOLDER = "frozen"  # the folder of frozen policies, and the suffix of their entries


class StoreEntry(NamedTuple):
    """Location of a policy on disk.

    Attributes:
        stash: the stash.
        name: of the entry.
    """

    stash: Stash
    name: str


class PolicyStore:
    """The stashes of one map and their policies. Callers hold the map's lock.

    Args:
        path: the folder of a persistent stash; None for a temporary one.
        worker_index: of the worker that the map belongs to.
        classes: policy classes that records may name besides those of the package.

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
        self.is_persistent = path is not None
        self.unloaded: dict[str, StoreEntry] = {}
        self.snapshots = SnapshotFiles()
        self._classes = tuple(classes)
        self._model_work_limit = model_work_limit
        self._deleted: set[str] = set()  # in this map; others may still have frozen ones
        self._superseded: dict[str, set[str]] = {}  # by id: entries to remove at the next flush
        self._last_record_number = 0  # of the newest record
        if path is None:
            self._folder_lock: FolderLock | None = None
            self.stash = self.frozen_stash = Stash()
        else:
            folder = resolve_path(path)
            worker_folder = folder / f"worker_{worker_index}"
            self._folder_lock = _lock_folder(worker_folder)
            self.stash, self.frozen_stash = (
                Stash(worker_folder),
                Stash(folder / _FROZEN_FOLDER, scratch=worker_folder),
            )

    # -- unloaded policies ----------------------------------------------------------------------

    def add_unloaded(self, stash: Stash, existing: Container[str]) -> list[str]:
        """Adds the policies with records in a stash as unloaded; returns the new ids.

        Args:
            stash: this worker's stash, or that of frozen policies.
            existing: ids that the map already has.
        """
        return self._add_recorded(stash, stash.list_records(), existing)

    def _add_recorded(
        self, stash: Stash, summaries: Sequence[RecordSummary], existing: Container[str]
    ) -> list[str]:
        ignored = self._deleted | self.unloaded.keys()
        entries: dict[str, StoreEntry] = {}
        for summary in summaries:
            new = [x for x in summary.policy_ids if x not in existing and x not in ignored]
            entries.update(dict.fromkeys(new, StoreEntry(stash, summary.name)))
            self._last_record_number = max(self._last_record_number, summary.number)
        self.unloaded.update(entries)
        return sorted(entries)

    def open_worker_stash(self) -> None:
        """Adds the policies of this worker's stash as unloaded; removes leftovers."""
        summaries = self.stash.list_records()
        self._add_recorded(self.stash, summaries, ())
        if self._folder_lock is not None and self._folder_lock.is_held:
            for summary in summaries:
                if StoreEntry(self.stash, summary.name) not in self.unloaded.values():
                    self.stash.remove(summary.name)  # a newer record has its ids
            self.stash.remove_unrecorded()

    def refresh(self, policy_id: str) -> None:
        """Adds a policy as unloaded if another process has frozen it since."""
        entry = self._get_frozen_entry(policy_id)
        if (
            self.is_persistent
            and policy_id not in self._deleted
            and entry.stash.has_record(entry.name)
        ):
            self.unloaded[policy_id] = entry

    def load_policy(self, policy_id: str) -> Any:
        """Returns the unloaded policy of an id; its variables stay in the stash."""
        stash, name = self.unloaded[policy_id]
        record = stash.read_record(name)
        source = f"the stash's record of {policy_id!r}"
        try:
            policy = make_policy_from_record(
                record["policy"],
                source,
                self._classes,
                stash.get_size(name),
                self._model_work_limit,
            )
        except TfPoliciesError as error:
            raise StashError(
                f"The policy {policy_id!r} cannot be loaded from the stash: {error} (Pass your own "
                "classes by `PolicyMap(policy_classes=[...])`.)"
            ) from error
        policy.policy_id = policy_id
        if stash is self.frozen_stash:
            state = policy.driver.state
            if stash.get_size(name) == HEADER_BYTES + state.layout.acting.num_bytes:
                state.freeze(policy_id)
            else:
                state.frozen_as = policy_id  # earlier versions wrote all variables
        return policy

    def mark_loaded(self, entry: StoreEntry) -> list[str]:
        """Records that the policy of an entry is in the map; returns its ids."""
        ids = [
            policy_id for policy_id, store_entry in self.unloaded.items() if store_entry == entry
        ]
        for policy_id in ids:
            del self.unloaded[policy_id]
        return ids

    def mark_replaced(self, policy_id: str) -> None:
        """Records that the map has another policy under an id.

        The flushed entry of the old one stays until the next flush.
        """
        entry = self._remove_unloaded(policy_id)
        if entry is not None:
            self.supersede(policy_id, entry)
        self._deleted.discard(policy_id)

    def mark_deleted(self, policy_id: str) -> None:
        """Records that a policy was deleted, even if another process froze it."""
        entry = self._remove_unloaded(policy_id)
        if entry is not None:
            entry.stash.remove(entry.name)
        for name in self._superseded.pop(policy_id, ()):
            self.stash.remove(name)
        if self.is_persistent:
            self._deleted.add(policy_id)

    def _remove_unloaded(self, policy_id: str) -> StoreEntry | None:
        """Removes an unloaded policy; returns its entry if this map may delete that."""
        entry = self.unloaded.pop(policy_id, None)
        is_last = entry is not None and entry not in self.unloaded.values()
        return entry if entry is not None and is_last and self.owns(entry) else None

    def supersede(self, policy_id: str, entry: StoreEntry) -> None:
        """Marks an entry for removal by the next flush; removes a frozen one at once."""
        if entry.stash is self.stash and self.is_persistent:
            self._superseded.setdefault(policy_id, set()).add(entry.name)
        else:
            entry.stash.remove(entry.name)

    def get_superseded_names(self) -> set[str]:
        """Returns the entries whose policies have been replaced since the last flush."""
        return set().union(*self._superseded.values())

    def remove_superseded(self, names: AbstractSet[str]) -> None:
        """Removes entries after a flush has recorded the policies that replaced them."""
        for name in names:
            self.stash.remove(name)
        remaining = {policy_id: old - names for policy_id, old in self._superseded.items()}
        self._superseded = {policy_id: old for policy_id, old in remaining.items() if old}

    # -- records and frozen policies --------------------------------------------------------------

    def owns(self, entry: StoreEntry) -> bool:
        """Whether a map of this path and worker wrote an entry, now or earlier."""
        if not self.is_persistent or entry.stash is self.stash:
            return True
        with contextlib.suppress(StashError):
            record = entry.stash.read_record(entry.name)
            return bool(record.get("worker_index") == self.worker_index)
        return False

    def freeze(self, policy_id: str, policy: Policy, image: np.ndarray) -> tuple[StoreEntry, bool]:
        """Writes a policy to the frozen ones; returns its entry, and whether it is this map's."""
        entry = self._get_frozen_entry(policy_id)
        stash, name = entry
        with _lock_exclusively(stash) as is_exclusive:
            if is_exclusive and self.is_persistent and not stash.has_record(name):
                stash.remove(name)  # a process was killed before it wrote the record
            is_new = stash.write_new(name, image)
            if not is_new and not _has_image(entry, image):
                raise StashError(
                    f"Another policy was already frozen as {policy_id!r} in "
                    f"{str(stash.folder)!r}. Choose another id: `copy_policy(source, target)`, "
                    "then freeze that."
                )
            if self.is_persistent and not stash.has_record(name):
                self.write_record(entry, [policy_id], policy)
        return entry, is_new or self.owns(entry)

    def _get_frozen_entry(self, policy_id: str) -> StoreEntry:
        return StoreEntry(self.frozen_stash, f"{policy_id}~{_FROZEN_FOLDER}")

    def write_record(self, entry: StoreEntry, policy_ids: Sequence[str], policy: Policy) -> None:
        """Writes the record that another process needs to create the policy of an entry."""
        self._last_record_number += 1
        record: dict[str, Any] = {"policy_ids": policy_ids, "worker_index": self.worker_index}
        record["number"] = self._last_record_number
        entry.stash.write_record(entry.name, {**record, "policy": make_policy_record(policy)})

    def close(self) -> None:
        """Releases the stash for other maps."""
        self.unloaded.clear()
        if self._folder_lock is not None:
            self._folder_lock.release()


@contextlib.contextmanager
def _lock_exclusively(stash: Stash) -> Iterator[bool]:
    """Locks a stash for freezing; yields whether the lock is certain to be exclusive."""
    try:
        stash.make_folders()
        with exclusive_access(stash.folder) as is_exclusive:
            yield is_exclusive
    except FolderInUseError as error:
        raise StashError(str(error)) from error
    except OSError as error:
        raise StashError(f"The policy cannot be written to the stash: {error}.") from error


def _has_image(entry: StoreEntry, image: np.ndarray) -> bool:
    """Whether the stored image of an entry equals an array of variables."""
    same_size = entry.stash.get_size(entry.name) == HEADER_BYTES + image.size
    return same_size and np.array_equal(entry.stash.read(entry.name, image.size), image)


def _lock_folder(folder: Path) -> FolderLock:
    """Creates and locks a stash's folder, and removes leftovers of killed processes."""
    try:
        make_folder(folder)
        folder_lock = FolderLock(folder)
    except FolderInUseError as error:
        raise StashError(
            f"The stash {str(folder)!r} is in use by another PolicyMap, of {error.owner}; close "
            "that one, or give this one another `path` or `worker_index`."
        ) from error
    except OSError as error:
        raise StashError(
            f"The stash {str(folder)!r} cannot be created: {error}. Give another `path`."
        ) from error
    if folder_lock.is_held:
        remove_leftovers(folder)
    return folder_lock
