"""LRU cache of policy states: the least recently used ones are swapped to a stash on disk.

Only the variables of a state are swapped; policies, their generators, counters and hyper-parameters
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
from typing import NamedTuple

import numpy as np

from tfpolicies.errors import StashError
from tfpolicies.state import PolicyState, tick
from tfpolicies.storage.stash import Stash, new_name, policy_of_entry

_MOST_MAPPED = 512  # frozen states: each memory map keeps a file open
_FEW = 64  # invalid heap items


class PagingStatistics(NamedTuple):
    """Statistics of a `PolicyMap`'s memory.

    >>> PagingStatistics(hits=3, misses=1).hit_rate
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
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0


@dataclass(eq=False)
class Page:
    """One state in the cache.

    Attributes:
        cache: the cache.
        name: of its entry in the stash.
        state: the state.
        on_eviction: called when the state is evicted from memory.
    """

    pager: Pager
    name: str
    state: PolicyState
    on_eviction: Callable[[], None]
    written: int | None = None  # the version of the variables in the stash
    recorded_as: str | None = None  # the entry in the map's own stash that has a record
    is_pinned: bool = False
    is_own: bool = True  # not frozen by another worker's map
    noted: int = 0  # last use of the state according to the heap

    def __post_init__(self) -> None:
        self.stash = self.pager.stash

    @property
    def is_frozen(self) -> bool:
        """Whether the state is mapped from the stash, read-only."""
        return self.state.frozen_as is not None

    @property
    def is_dirty(self) -> bool:
        """Whether the variables in memory are not in the stash."""
        return self.written != self.state.version

    def read(self) -> np.ndarray:
        """Returns the variables from the stash: mapped if the state is frozen."""
        read = self.stash.map if self.is_frozen else self.stash.read
        return read(self.name, self.state.layout.num_bytes)

    @property
    def entries(self) -> set[str]:
        """The names of all its possible entries in a stash."""
        return {self.name, self.recorded_as or self.name}

    def bring_back(self, state: PolicyState) -> np.ndarray:
        """Loads the variables from the stash; see `tfpolicies.state.Pager`."""
        return self.pager.bring_back(self, state)


class Pager:
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
        self._pages: dict[PolicyState, Page] = {}
        self._in_memory: set[Page] = set()
        self._order: list[tuple[int, int, Page]] = []  # a heap: (last use, tie-breaker, entry)
        self._tickets = itertools.count()
        self._bytes = 0
        self._mapped = 0  # frozen states in memory
        self._counts = dict.fromkeys(("hits", "misses", "evictions", "writes"), 0)
        self._seconds = 0.0

    def __getitem__(self, state: PolicyState) -> Page:
        return self._pages[state]

    def __contains__(self, state: PolicyState) -> bool:
        return state in self._pages

    # -- adding and removing ------------------------------------------------------------------

    def add(
        self,
        name: str,
        state: PolicyState,
        on_eviction: Callable[[], None],
        leaving: PolicyState | None = None,
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
            page = Page(self, name, state, on_eviction)
            going = None if leaving is None else self._pages.get(leaving)
            is_in = going in self._in_memory
            if going is not None and is_in:
                self._let_go(going)
            try:
                self._make_room(page)
                self._pages[state] = page
                state.pager = page
                self._take_in(page)
            finally:
                if going is not None and is_in:
                    self._count_in(going)

    def adopt(
        self,
        name: str,
        state: PolicyState,
        on_eviction: Callable[[], None],
        stash: Stash,
        *,
        is_own: bool,
    ) -> None:
        """Adds a state that is in a stash; its variables in memory are released.

        Args:
            name: of its entry.
            state: the state; a frozen one is mapped.
            on_eviction: called when the state is evicted from memory.
            stash: the stash.
            is_owned: whether this map may remove the entry.
        """
        with state.lock, self._lock:
            page = Page(self, name, state, on_eviction)
            page.stash, page.written, page.is_own = stash, state.version, is_own
            page.recorded_as = name if stash is self.stash else None
            self._pages[state] = page
            state.pager = page
            state.page_out()

    def leave(self, state: PolicyState) -> Page:
        """Removes a state from the cache; its variables stay in memory, or are loaded.

        A state that cannot be loaded is also removed; using it raises the error. Entries stay in
        the stash.
        """
        with state.lock, self._lock:
            page = self._pages.pop(state)
            if page in self._in_memory:
                self._let_go(page)
            elif not state.is_in_memory:
                with contextlib.suppress(StashError):
                    state.page_in(page.read())
            if state.is_in_memory:
                state.pager = None
            self._drop_old_notes()  # old heap items would keep the state alive
            return page

    def touch(self, state: PolicyState) -> None:
        """Makes a state the most recently used one, and loads it if it is not in memory."""
        with self._lock:
            state.last_used = tick()
            if self._pages.get(state) in self._in_memory:
                self._counts["hits"] += 1
                return
        _ = state.segments

    def bring_back(self, page: Page, state: PolicyState) -> np.ndarray:
        """Loads the variables of a state, evicting others; the caller holds `state.lock`."""
        with self._lock:
            if state not in self._pages:  # removed after a failed read
                return page.read()
            self._counts["misses"] += 1
            self._make_room(page)
            begun = time.perf_counter()
            memory = page.read()
            self._seconds += time.perf_counter() - begun
            self._take_in(page)
            return memory

    # -- eviction -----------------------------------------------------------------------------

    def _take_in(self, page: Page) -> None:
        page.state.last_used = tick()
        self._count_in(page)

    def _count_in(self, page: Page) -> None:
        self._in_memory.add(page)
        self._note(page)
        self._bytes += self._cost(page)
        self._mapped += page.is_frozen

    def _note(self, page: Page) -> None:
        page.noted = page.state.last_used
        heapq.heappush(self._order, (page.noted, next(self._tickets), page))

    def _let_go(self, page: Page) -> None:
        self._in_memory.remove(page)
        self._bytes -= self._cost(page)
        self._mapped -= page.is_frozen
        if len(self._order) > 2 * len(self._in_memory) + _FEW:
            self._drop_old_notes()

    def _drop_old_notes(self) -> None:
        """Keeps only the valid heap item of each state in memory."""
        valid = [x for x in self._order if x[2] in self._in_memory and x[2].noted == x[0]]
        self._order = valid
        heapq.heapify(valid)

    def _cost(self, page: Page) -> int:
        return 0 if page.is_frozen else page.state.layout.num_bytes

    def _make_room(self, page: Page | None) -> None:
        """Evicts the least recently used states until one more fits, or those in memory (None)."""
        while True:
            if self._is_full(page):
                victim = self._victim()
            elif page is not None and page.is_frozen and self._mapped >= _MOST_MAPPED:
                victim = self._mapped_victim()
            else:
                return
            if victim is None:  # all others are pinned or in use
                return
            try:
                self._evict(victim)
            except BaseException:
                self._note(victim)
                raise
            finally:
                victim.state.lock.release()

    def _is_full(self, page: Page | None) -> bool:
        count = len(self._in_memory) + (page is not None)
        if self.capacity is not None and count > self.capacity:
            return True
        cost = 0 if page is None else self._cost(page)
        is_free = self.capacity_bytes is None or (page is not None and cost == 0)
        return not is_free and self._bytes + cost > self.capacity_bytes  # type: ignore[operator]

    def _victim(self) -> Page | None:
        """Returns the least recently used entry to evict, with its state's lock acquired."""
        passed = []
        try:
            while self._order:
                known, _, page = heapq.heappop(self._order)
                if page not in self._in_memory or page.noted != known:
                    continue
                if page.state.last_used != known:  # used since
                    self._note(page)
                    continue
                if _take_lock(page):
                    return page
                passed.append(page)
            return None
        finally:
            for page in passed:
                self._note(page)

    def _mapped_victim(self) -> Page | None:
        """Returns the frozen entry to evict next, with its state's lock acquired."""
        mapped = (page for page in self._in_memory if page.is_frozen)
        oldest_first = sorted(mapped, key=lambda page: page.state.last_used)
        return next(filter(_take_lock, oldest_first), None)

    def _evict(self, page: Page) -> None:
        self._write(page)
        page.state.page_out()
        self._let_go(page)
        self._counts["evictions"] += 1
        page.on_eviction()

    def _write(self, page: Page) -> None:
        if page.is_dirty or not page.stash.has(page.name):
            if page.is_frozen:  # other maps may have replaced the entry of that name
                page.stash = self.stash
            is_recorded = page.name == page.recorded_as
            name = new_name(policy_of_entry(page.name)) if is_recorded else page.name
            begun = time.perf_counter()
            page.stash.write(name, page.state.memory)
            self._seconds += time.perf_counter() - begun
            page.name, page.written = name, page.state.version
            self._counts["writes"] += 1

    def evict(self, state: PolicyState) -> None:
        """Evicts a state from memory now, unless it is pinned."""
        with state.lock, self._lock:
            page = self._pages[state]
            if page in self._in_memory and not page.is_pinned:
                self._evict(page)

    # -- single states ------------------------------------------------------------------------

    def pin(self, state: PolicyState) -> None:
        """Keeps a state in memory regardless of capacity, as the most recently used one."""
        with state.lock, self._lock:
            self.touch(state)
            self._pages[state].is_pinned = True

    def unpin(self, state: PolicyState) -> None:
        """Allows a state to be evicted again, at once if there are too many.

        Raises:
            StashError: if a state that must be evicted cannot be written.
        """
        with self._lock:
            self._pages[state].is_pinned = False
            self._make_room(None)

    def write(self, state: PolicyState) -> None:
        """Writes a state to the stash if its entry there is older; it stays in memory."""
        with state.lock, self._lock:
            page = self._pages[state]
            if page in self._in_memory:
                self._write(page)

    def mark_recorded(self, state: PolicyState) -> None:
        """Notes that a record for the state's current entry in the stash has been written."""
        with state.lock, self._lock:
            page = self._pages[state]
            if page.recorded_as not in (None, page.name):
                page.stash.remove(page.recorded_as)
            page.recorded_as = page.name

    def freeze(
        self, state: PolicyState, policy_id: str, name: str, stash: Stash, *, is_own: bool
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
            page = self._pages[state]
            mapped = stash.map(name, state.layout.num_bytes)
            is_in = page in self._in_memory
            if is_in:
                self._let_go(page)
            for entry in page.entries:
                self.stash.remove(entry)
            page.name, page.stash, page.written = name, stash, state.version
            page.is_own, page.recorded_as = is_own, None
            state.frozen_as = policy_id
            if is_in:
                state.page_in(mapped)
                self._count_in(page)

    def statistics(self) -> PagingStatistics:
        """Returns the statistics so far."""
        with self._lock:
            pages = self._pages.values()
            stashed = [x for x in pages if x.written is not None]
            return PagingStatistics(
                policies=len(self._pages),
                in_memory=len(self._in_memory),
                pinned=sum(page.is_pinned for page in pages),
                frozen=sum(page.is_frozen for page in pages),
                bytes_in_memory=self._bytes,
                bytes_on_disk=sum(page.state.layout.num_bytes for page in stashed),
                seconds=self._seconds,
                **self._counts,
            )


def _take_lock(page: Page) -> bool:
    """Acquires the lock of a state that may be evicted, unless it is held."""
    lock = page.state.lock
    is_free = not (page.is_pinned or lock._is_owned())  # type: ignore[attr-defined]
    return is_free and lock.acquire(blocking=False)
