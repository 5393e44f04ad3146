"""LRU cache of policy states: the least recently used ones are swapped to a stash on disk.

Only the variables of a state are swapped; policies, their generators, counters and hyperparameters
stay in memory. An unchanged state is dropped without a write.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from tfpolicies.errors import StashError
from tfpolicies.program.policy_state import PolicyState, tick
from tfpolicies.storage.stash import Stash, get_policy_id, make_entry_name

_MAX_MAPPED = 512  # frozen states: each memory map keeps a file open
_MAX_STALE_ENTRIES = 64  # invalid heap items


class CacheStatistics(NamedTuple):
    """Statistics of a `PolicyMap`'s memory.

    >>> CacheStatistics(hits=3, misses=1).hit_rate
    0.75
    """

    policies: int = 0
    in_memory: int = 0
    pinned: int = 0
    frozen: int = 0
    hits: int = 0  # accesses to states in memory
    misses: int = 0  # accesses that loaded a state
    evictions: int = 0
    writes: int = 0  # by evictions of changed states, and by flushes
    bytes_in_memory: int = 0  # of states that are not frozen
    bytes_on_disk: int = 0
    seconds: float = 0.0  # spent on reading and writing

    @property
    def hit_rate(self) -> float:
        """The share of hits; 1 before the first access."""
        total = self.hits + self.misses
        return self.hits / total if total else 1.0


class StoredStates(Protocol):
    """The place that states of a cache are loaded from: a `Stash`, or files of snapshots."""

    def read(self, name: str, size: int) -> np.ndarray:
        """Returns the variables of an entry, uint8 `[size]`."""

    def map(self, name: str, size: int) -> np.ndarray:
        """Returns the variables of an entry as a read-only memory map."""

    def has(self, name: str) -> bool:
        """Whether there is an entry of a name."""

    def remove(self, name: str) -> None:
        """Removes an entry if it exists."""


@dataclass(eq=False)
class CacheEntry:
    """One state in the cache.

    Attributes:
        cache: the cache.
        name: of its entry in the stash.
        state: the state.
        on_eviction: called when the state is evicted from memory.
    """

    cache: StateCache
    name: str
    state: PolicyState
    on_eviction: Callable[[], None]
    written_version: int | None = None  # the version of the variables in the stash
    recorded_name: str | None = None  # the entry in the map's own stash that has a record
    is_pinned: bool = False
    is_owned: bool = True  # not frozen by another worker's map
    ordered_at: int = 0  # last use of the state according to the heap

    def __post_init__(self) -> None:
        self.stash: StoredStates = self.cache.stash

    @property
    def is_frozen(self) -> bool:
        """Whether the state is mapped from the stash, read-only."""
        return self.state.frozen_as is not None

    @property
    def is_dirty(self) -> bool:
        return self.written_version != self.state.version

    def read(self) -> np.ndarray:
        """Returns the variables from the stash: mapped if the state is frozen."""
        read = self.stash.map if self.is_frozen else self.stash.read
        return read(self.name, self.state.layout.num_bytes)

    @property
    def entry_names(self) -> set[str]:
        return {self.name, self.recorded_name or self.name}

    def load_memory(self, state: PolicyState) -> np.ndarray:
        """Loads the variables from the stash; see `tfpolicies.program.policy_state.StateLoader`."""
        return self.cache.load_memory(self, state)


class StateCache:
    """Keeps a limited number of states, or of their bytes, in memory; the rest in a stash.

    Thread-safe. Its lock is last in the lock order: never wait for a state's lock while holding it.
    A state whose lock is held is not evicted.

    Args:
        capacity: states in memory, at least 1; None for any number.
        capacity_bytes: bytes of states in memory; None for any number.
        stash: where evicted states are written.
    """

    def __init__(self, capacity: int | None, capacity_bytes: int | None, stash: Stash) -> None:
        self.capacity = capacity
        self.capacity_bytes = capacity_bytes
        self.stash = stash
        self._lock = threading.RLock()
        self._entries: dict[PolicyState, CacheEntry] = {}
        self._in_memory: set[CacheEntry] = set()
        self._order: list[
            tuple[int, int, CacheEntry]
        ] = []  # a heap: (last use, tie-breaker, entry)
        self._tickets = itertools.count()
        self._bytes = 0
        self._num_mapped = 0  # frozen states in memory
        self._counts = dict.fromkeys(("hits", "misses", "evictions", "writes"), 0)
        self._seconds = 0.0

    def __getitem__(self, state: PolicyState) -> CacheEntry:
        return self._entries[state]

    def __contains__(self, state: PolicyState) -> bool:
        return state in self._entries

    # -- adding and removing ------------------------------------------------------------------

    def add(
        self,
        name: str,
        state: PolicyState,
        on_eviction: Callable[[], None],
        replaced: PolicyState | None = None,
    ) -> None:
        """Adds a state that is in memory, as the most recently used one.

        Args:
            name: of its entry.
            state: the state.
            on_eviction: called when the state is evicted from memory.
            replaced: a state that will be removed, so that its memory does not count.

        Raises:
            StashError: if another state must be evicted and cannot be written; nothing is changed.
        """
        with self._lock:
            entry = CacheEntry(self, name, state, on_eviction)
            replaced_entry = None if replaced is None else self._entries.get(replaced)
            is_in_memory = replaced_entry in self._in_memory
            if replaced_entry is not None and is_in_memory:
                self._mark_evicted(replaced_entry)
            try:
                self._evict_until_fits(entry)
                self._entries[state] = entry
                state.loader = entry
                self._insert(entry)
            finally:
                if replaced_entry is not None and is_in_memory:
                    self._mark_in_memory(replaced_entry)

    def add_stored(
        self,
        name: str,
        state: PolicyState,
        on_eviction: Callable[[], None],
        stash: StoredStates,
        *,
        is_owned: bool,
    ) -> None:
        """Adds a state that is stored; its variables in memory are released.

        Args:
            name: of its entry.
            state: the state; a frozen one is mapped.
            on_eviction: called when the state is evicted from memory.
            stash: where it is stored.
            is_owned: whether this map may remove the entry.
        """
        with state.lock, self._lock:
            entry = CacheEntry(self, name, state, on_eviction)
            entry.stash, entry.written_version, entry.is_owned = stash, state.version, is_owned
            entry.recorded_name = name if stash is self.stash else None
            self._entries[state] = entry
            state.loader = entry
            state.page_out()

    def remove(self, state: PolicyState) -> CacheEntry:
        """Removes a state from the cache; its variables stay in memory, or are loaded.

        A state that cannot be loaded is also removed; using it raises the error. Entries stay in
        the stash.
        """
        with state.lock, self._lock:
            entry = self._entries.pop(state)
            if entry in self._in_memory:
                self._mark_evicted(entry)
            elif not state.is_in_memory:
                with contextlib.suppress(StashError):
                    state.page_in(entry.read())
            if state.is_in_memory:
                state.loader = None
            self._prune_order()  # old heap items would keep the state alive
            return entry

    def touch(self, state: PolicyState) -> None:
        """Makes a state the most recently used one, and loads it if it is not in memory."""
        with self._lock:
            state.last_used = tick()
            if self._entries.get(state) in self._in_memory:
                self._counts["hits"] += 1
                return
        _ = state.segments

    def load_memory(self, entry: CacheEntry, state: PolicyState) -> np.ndarray:
        """Loads the variables of a state, evicting others; the caller holds `state.lock`."""
        with self._lock:
            if state not in self._entries:  # removed after a failed read
                return entry.read()
            self._counts["misses"] += 1
            self._evict_until_fits(entry)
            started_at = time.perf_counter()
            variables = entry.read()
            self._seconds += time.perf_counter() - started_at
            self._insert(entry)
            return variables

    # -- eviction -----------------------------------------------------------------------------

    def _insert(self, entry: CacheEntry) -> None:
        entry.state.last_used = tick()
        self._mark_in_memory(entry)

    def _mark_in_memory(self, entry: CacheEntry) -> None:
        self._in_memory.add(entry)
        self._push_order(entry)
        self._bytes += self._get_num_bytes(entry)
        self._num_mapped += entry.is_frozen

    def _push_order(self, entry: CacheEntry) -> None:
        entry.ordered_at = entry.state.last_used
        heapq.heappush(self._order, (entry.ordered_at, next(self._tickets), entry))

    def _mark_evicted(self, entry: CacheEntry) -> None:
        self._in_memory.remove(entry)
        self._bytes -= self._get_num_bytes(entry)
        self._num_mapped -= entry.is_frozen
        if len(self._order) > 2 * len(self._in_memory) + _MAX_STALE_ENTRIES:
            self._prune_order()

    def _prune_order(self) -> None:
        """Keeps only the valid heap item of each state in memory."""
        valid = [x for x in self._order if x[2] in self._in_memory and x[2].ordered_at == x[0]]
        self._order = valid
        heapq.heapify(valid)

    def _get_num_bytes(self, entry: CacheEntry) -> int:
        return 0 if entry.is_frozen else entry.state.layout.num_bytes

    def _evict_until_fits(self, new_entry: CacheEntry | None) -> None:
        """Evicts the least recently used states until one more fits, or those in memory (None)."""
        while True:
            if self._is_full(new_entry):
                victim = self._pop_victim()
            elif new_entry is not None and new_entry.is_frozen and self._num_mapped >= _MAX_MAPPED:
                victim = self._find_mapped_victim()
            else:
                return
            if victim is None:  # all others are pinned or in use
                return
            try:
                self._evict(victim)
            except BaseException:
                self._push_order(victim)
                raise
            finally:
                victim.state.lock.release()

    def _is_full(self, new_entry: CacheEntry | None) -> bool:
        count = len(self._in_memory) + (new_entry is not None)
        if self.capacity is not None and count > self.capacity:
            return True
        cost = 0 if new_entry is None else self._get_num_bytes(new_entry)
        is_free = self.capacity_bytes is None or (new_entry is not None and cost == 0)
        return not is_free and self._bytes + cost > self.capacity_bytes  # type: ignore[operator]

    def _pop_victim(self) -> CacheEntry | None:
        """Returns the least recently used entry to evict, with its state's lock acquired."""
        skipped = []
        try:
            while self._order:
                ordered_at, _, entry = heapq.heappop(self._order)
                if entry not in self._in_memory or entry.ordered_at != ordered_at:
                    continue
                if entry.state.last_used != ordered_at:  # used since
                    self._push_order(entry)
                    continue
                if _acquire_lock(entry):
                    return entry
                skipped.append(entry)
            return None
        finally:
            for entry in skipped:
                self._push_order(entry)

    def _find_mapped_victim(self) -> CacheEntry | None:
        """Returns the frozen entry to evict next, with its state's lock acquired."""
        mapped = (page for page in self._in_memory if page.is_frozen)
        oldest_first = sorted(mapped, key=lambda page: page.state.last_used)
        return next(filter(_acquire_lock, oldest_first), None)

    def _evict(self, entry: CacheEntry) -> None:
        self._write(entry)
        entry.state.page_out()
        self._mark_evicted(entry)
        self._counts["evictions"] += 1
        entry.on_eviction()

    def _write(self, entry: CacheEntry) -> None:
        if entry.is_dirty or not entry.stash.has(entry.name):
            if entry.is_frozen:  # other maps may have replaced the entry of that name
                entry.stash = self.stash
            is_recorded = entry.name == entry.recorded_name
            name = make_entry_name(get_policy_id(entry.name)) if is_recorded else entry.name
            started_at = time.perf_counter()
            self.stash.write(name, entry.state.memory)
            self._seconds += time.perf_counter() - started_at
            entry.name, entry.written_version = name, entry.state.version
            self._counts["writes"] += 1

    def evict(self, state: PolicyState) -> None:
        """Evicts a state from memory now, unless it is pinned."""
        with state.lock, self._lock:
            entry = self._entries[state]
            if entry in self._in_memory and not entry.is_pinned:
                self._evict(entry)

    # -- single states ------------------------------------------------------------------------

    def pin(self, state: PolicyState) -> None:
        """Keeps a state in memory regardless of capacity, as the most recently used one."""
        with state.lock, self._lock:
            self.touch(state)
            self._entries[state].is_pinned = True

    def unpin(self, state: PolicyState) -> None:
        """Allows a state to be evicted again, at once if there are too many.

        Raises:
            StashError: if a state that must be evicted cannot be written.
        """
        with self._lock:
            self._entries[state].is_pinned = False
            self._evict_until_fits(None)

    def write(self, state: PolicyState) -> None:
        """Writes a state to the stash if its entry there is older; it stays in memory."""
        with state.lock, self._lock:
            entry = self._entries[state]
            if entry in self._in_memory:
                self._write(entry)

    def mark_recorded(self, state: PolicyState) -> None:
        """Notes that a record for the state's current entry in the stash has been written."""
        with state.lock, self._lock:
            entry = self._entries[state]
            if entry.recorded_name not in (None, entry.name):
                entry.stash.remove(entry.recorded_name)
            entry.recorded_name = entry.name

    def freeze(
        self, state: PolicyState, policy_id: str, name: str, stash: Stash, *, is_owned: bool
    ) -> None:
        """Maps a state from a stash entry that was written before, from now on.

        Args:
            state: the state.
            policy_id: its name in messages.
            name: of the entry.
            stash: the stash of the entry.
            is_owned: whether this map may remove the entry.
        """
        with state.lock, self._lock:
            cache_entry = self._entries[state]
            mapped = stash.map(name, state.layout.acting.num_bytes)
            is_in_memory = cache_entry in self._in_memory
            if is_in_memory:
                self._mark_evicted(cache_entry)
            for entry in cache_entry.entry_names:
                self.stash.remove(entry)
            cache_entry.name, cache_entry.stash, cache_entry.written_version = (
                name,
                stash,
                state.version,
            )
            cache_entry.is_owned, cache_entry.recorded_name = is_owned, None
            state.freeze(policy_id)
            if is_in_memory:
                state.page_in(mapped)
                self._mark_in_memory(cache_entry)

    def get_statistics(self) -> CacheStatistics:
        with self._lock:
            entries = self._entries.values()
            written = [x for x in entries if x.written_version is not None]
            return CacheStatistics(
                policies=len(self._entries),
                in_memory=len(self._in_memory),
                pinned=sum(page.is_pinned for page in entries),
                frozen=sum(page.is_frozen for page in entries),
                bytes_in_memory=self._bytes,
                bytes_on_disk=sum(page.state.layout.num_bytes for page in written),
                seconds=self._seconds,
                **self._counts,
            )


def _acquire_lock(entry: CacheEntry) -> bool:
    """Acquires the lock of a state that may be evicted, unless it is held."""
    lock = entry.state.lock
    is_free = not (entry.is_pinned or lock._is_owned())  # type: ignore[attr-defined]
    return is_free and lock.acquire(blocking=False)
