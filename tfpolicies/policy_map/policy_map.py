"""Policy map: policies by id, for example of a league, only some of them in memory.

A policy of the map is a stable handle: `m[k]` is the same object as long as `k` exists, while its
variables are swapped to a stash and loaded again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import gymnasium as gym
import numpy as np

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.policy_spec import PolicySpec, validate_policy_id
from tfpolicies.errors import ConfigError, StashError, UnknownPolicyError, UsageError
from tfpolicies.policy.policy import Policy
from tfpolicies.policy_map import stacked_acting
from tfpolicies.policy_map.policy_store import PolicyStore, StoreEntry
from tfpolicies.policy_map.snapshots import describe_snapshot, make_snapshot_policy
from tfpolicies.policy_map.state_cache import CacheStatistics, StateCache
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.storage.content_file import ContentFile
from tfpolicies.storage.pickling import refuse_pickling
from tfpolicies.storage.snapshot_file import write_snapshot
from tfpolicies.storage.stash import make_entry_name

logger = logging.getLogger("tfpolicies")

_DEFAULT_WORKER_CAPACITY, _DEFAULT_CAPACITY = 10, 100  # default capacities


class PolicyMap(MutableMapping[str, Policy]):
    """Maps policy ids to policies; supports all dict operations, and is thread-safe.

    At most `capacity` policies have their variables in memory. The variables of the least recently
    used ones are in a stash on disk, and are loaded by one read when they are used. Nothing else of
    a policy is swapped, so it is always the same object and keeps its attributes. Accessing a
    policy (`m[k]`, `get`), setting it and acting with it make it the most recently used one;
    iterating over the map does not, and loads nothing.

    Custom policies, whose variables the map does not know, stay in memory. The map may also contain
    a policy of another map, such as a worker's: the other map then manages its memory.

    Args:
        worker_index: of the worker that the map belongs to; it seeds noise.
        num_workers: of the run.
        capacity: policies in memory; by default 10 with `worker_index`, 100 without; any number if
            only `capacity_bytes` is given.
        path: folder of a persistent stash: a later map opens it with all that `flush` or `close`
            wrote, and maps of other processes share its frozen policies. None for a temporary
            folder.
        policy_config: settings that `create_policy` adds if its config lacks them.
        session_creator: creates the `tf.compat.v1.Session` of a graph-mode policy, with the graph
            of its Program as default. Called once for each policy from `create_policy`, never for
            others; and again if one is loaded from the stash and its Program has no idle session.
        seed: seeds policies whose config has no seed, each differently; see `create_policy`.
        policy_states_are_swappable: accepted; states always are.
        capacity_bytes: bytes of the variables in memory, frozen ones not counted; None for any.
        policy_classes: your classes that a stash at `path` may name.
        model_work_limit: how many times the usual work a Keras model of a stash at `path` may take;
            `math.inf` for no limit. See `docs/decisions/003`.

    Raises:
        ConfigError: for an argument out of its range.
        StashError: if another process uses the stash with the same `worker_index`.

    >>> import gymnasium as gym
    >>> from tfpolicies import PPOConfig, PPOTF2Policy
    >>> spaces = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)
    >>> m = PolicyMap(capacity=2)
    >>> for name in ("a", "b", "c"):
    ...     m[name] = PPOTF2Policy(*spaces, {"model": {"fcnet_hiddens": [8]}})
    >>> len(m), m.in_memory()
    (3, ['b', 'c'])
    >>> handle = m["a"]
    >>> handle is m["a"], m.in_memory()
    (True, ['c', 'a'])
    """

    def __init__(
        self,
        worker_index: int | None = None,
        num_workers: int | None = None,
        capacity: int | None = None,
        path: str | Path | None = None,
        policy_config: Mapping[str, Any] | None = None,
        session_creator: Callable[[], Any] | None = None,
        seed: int | None = None,
        *,
        policy_states_are_swappable: bool = False,
        capacity_bytes: int | None = None,
        policy_classes: Sequence[type[Policy]] = (),
        model_work_limit: float = 1.0,
    ) -> None:
        _check_counts(0, worker_index=worker_index, num_workers=num_workers, seed=seed)
        _check_counts(1, capacity=capacity, capacity_bytes=capacity_bytes)
        if session_creator is not None and not callable(session_creator):
            raise ConfigError(
                "session_creator must be a function without arguments that returns a "
                f"tf.compat.v1.Session, or None; got {session_creator!r}."
            )
        if not isinstance(policy_states_are_swappable, bool):
            raise ConfigError(
                "policy_states_are_swappable must be True or False, got "
                f"{policy_states_are_swappable!r}."
            )
        if capacity is None and capacity_bytes is None:
            capacity = _DEFAULT_CAPACITY if worker_index is None else _DEFAULT_WORKER_CAPACITY
        self.worker_index = worker_index or 0
        self.num_workers = num_workers or 0
        self.capacity = capacity
        self.policy_config = dict(policy_config or {})
        self.session_creator = session_creator
        self.seed = seed
        self.policy_states_are_swappable = policy_states_are_swappable
        self.specs: dict[str, PolicySpec] = {}
        self._lock = threading.RLock()
        self._policies: dict[str, Policy] = {}
        self._store = PolicyStore(path, self.worker_index, policy_classes, model_work_limit)
        self._cache = StateCache(capacity, capacity_bytes, self._store.stash)
        if self._store.is_persistent:
            self._store.open_worker_stash()
            self.refresh()

    # -- a dict -------------------------------------------------------------------------------

    def __getitem__(self, policy_id: str) -> Policy:
        """Returns a policy, with its variables in memory, as the most recently used one.

        Raises:
            UnknownPolicyError: if there is none of this id; also a KeyError.
            StashError: if its variables cannot be loaded, or those of others not be written.
        """
        policy = self.get_handle(policy_id)
        state = self._get_cached_state(policy)
        if state is not None:
            self._cache.touch(state)
        return policy

    def _get_cached_state(self, policy: Policy) -> Any:
        """Returns the state of a policy if this map manages its memory, else None."""
        state = policy._pageable
        return state if state is not None and state in self._cache else None

    def _get_own_state(self, policy_id: str) -> Any:
        """Returns a policy's state, None for a custom policy; raises if another map manages it."""
        policy = self.get_handle(policy_id)
        state = self._get_cached_state(policy)
        if state is None and policy.driver.state is not None:
            raise UsageError(
                f"The policy {policy_id!r} is shared: its memory belongs to another PolicyMap. "
                "Call the method there, or put a copy here: `policy.copy()`."
            )
        return state

    def get_handle(self, policy_id: str) -> Policy:
        """Returns a policy without loading its variables; its first use loads them.

        Raises:
            UnknownPolicyError: if there is none of this id; also a KeyError.
        """
        policy = self._policies.get(policy_id)
        if policy is not None:
            return policy
        with self._lock:
            if policy_id not in self:
                self._store.refresh(policy_id)
            if policy_id in self._store.unloaded:
                self._load(policy_id)
            if policy_id not in self._policies:
                raise UnknownPolicyError(
                    f"{policy_id!r} not found in this PolicyMap; it has {self._format_ids()}."
                )
            return self._policies[policy_id]

    def __setitem__(self, policy_id: str, policy: Policy) -> None:
        """Puts a policy under an id, as the most recently used one, replacing another.

        Raises:
            UsageError: if it is not a policy.
            StashError: if another policy must be evicted and cannot be written; nothing is changed.
        """
        validate_policy_id(policy_id, error=True)
        if not isinstance(policy, Policy):
            raise UsageError(f"A PolicyMap holds policies; got {policy!r:.80} for {policy_id!r}.")
        with self._lock:
            replaced = self._policies.get(policy_id)
            if replaced is not policy:
                if policy.driver.state is not None:
                    self._cache_state(policy_id, policy, policy.driver.state, replaced)
                self._policies[policy_id] = policy
                self._store.mark_replaced(policy_id)
                self.specs.pop(policy_id, None)
                if replaced is not None:
                    self._release_policy(replaced, replaced_as=policy_id)
            state = self._get_cached_state(policy)
            if state is not None:
                self._cache.touch(state)

    def _cache_state(
        self, policy_id: str, policy: Policy, state: PolicyState, replaced: Policy | None
    ) -> None:
        """Adds a policy's state to the cache, in place of that of the replaced policy."""
        if state.loader is not None:
            return  # it is here under another id, or another map manages it
        name = make_entry_name(policy_id)
        is_last_id = replaced is not None and self._count_ids(replaced) == 1
        replaced_state = (
            self._get_cached_state(replaced) if replaced is not None and is_last_id else None
        )
        self._cache.add(name, state, _make_eviction_callback(policy, state), replaced_state)

    def _count_ids(self, policy: Policy) -> int:
        return sum(other is policy for other in self._policies.values())

    def _release_policy(self, policy: Policy, replaced_as: str | None = None) -> None:
        """Releases a policy, unless the map still has it under another id.

        If another policy now has the id `replaced_as`, the flushed entry stays until the next
        flush.
        """
        state = self._get_cached_state(policy)
        is_of_other_map = state is None and policy.driver.state is not None
        if self._count_ids(policy) or is_of_other_map:
            return
        policy.close()
        if state is not None:
            entry = self._cache.remove(state)
            kept_name = None if replaced_as is None else entry.recorded_name
            if replaced_as is not None and kept_name is not None:
                self._store.supersede(replaced_as, StoreEntry(self._store.stash, kept_name))
            if entry.is_owned or entry.stash is self._store.stash:
                for name in entry.entry_names - {kept_name}:
                    entry.stash.remove(name)

    def __delitem__(self, policy_id: str) -> None:
        """Removes a policy, also from the stash, and closes its session.

        Raises:
            UnknownPolicyError: if there is none of this id; also a KeyError.
        """
        with self._lock:
            if policy_id not in self._store.unloaded:
                policy = self.get_handle(policy_id)
                del self._policies[policy_id]
                self._release_policy(policy)
            self._store.mark_deleted(policy_id)
            self.specs.pop(policy_id, None)

    def __contains__(self, policy_id: object) -> bool:
        return policy_id in self._policies or policy_id in self._store.unloaded

    def __len__(self) -> int:
        with self._lock:
            return len(self._policies) + len(self._store.unloaded)

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter([*self._policies, *self._store.unloaded])

    def get(self, policy_id: str, default: object = None) -> Any:
        """Returns `m[policy_id]`, or `default` if there is none of this id."""
        if policy_id not in self:
            return default
        try:
            return self[policy_id]
        except UnknownPolicyError:  # deleted meanwhile
            return default

    def pop(self, policy_id: str, *default: object) -> Any:
        """Removes a policy and returns it; returns `default`, if given, if there is none."""
        if len(default) > 1:
            raise TypeError(f"pop takes an id and at most one default, got {len(default)}.")
        with self._lock:
            if default and policy_id not in self:
                return default[0]
            policy = self.get_handle(policy_id)
            del self[policy_id]
            return policy

    def popitem(self) -> tuple[str, Policy]:
        """Removes the last policy in the order of iteration; returns its id and the policy.

        Raises:
            UnknownPolicyError: if the map is empty; also a KeyError.
        """
        with self._lock:
            ids = list(self)
            if not ids:
                raise UnknownPolicyError("popitem needs a policy, but this PolicyMap is empty.")
            return ids[-1], self.pop(ids[-1])

    def setdefault(self, policy_id: str, default: Any = None) -> Policy:
        """Returns the policy under an id; puts `default` there first if there is none."""
        with self._lock:
            if policy_id not in self:
                self[policy_id] = default
            return self[policy_id]

    def clear(self) -> None:
        """Removes all policies, also those whose entries in the stash are damaged."""
        with self._lock:
            for policy_id in self:
                del self[policy_id]

    def items(self) -> ItemsView[str, Policy]:
        """Returns a view of all ids and policies, stashed ones included; it loads nothing."""
        return _Items(self)

    def values(self) -> ValuesView[Policy]:
        """Returns a view of all policies, stashed ones included; it loads nothing."""
        return _Values(self)

    def copy(self) -> dict[str, Policy]:
        """Returns the policies by id as a plain dict; this map still manages them."""
        return dict(self.items())

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return (
            f"{type(self).__name__}(policies={self._format_ids()}, capacity={self.capacity}, "
            f"in_memory={self.statistics.in_memory})"
        )

    __repr__ = __str__

    def _format_ids(self) -> str:
        ids = sorted(self)
        return ", ".join(map(repr, ids[:20])) + (f" and {len(ids) - 20} more" * (len(ids) > 20))

    # -- making policies ----------------------------------------------------------------------

    def create_policy(
        self,
        policy_id: str,
        policy_cls: type[Policy],
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        config_override: Mapping[str, Any] | None,
        merged_config: AlgorithmConfig | Mapping[str, Any],
    ) -> None:
        """Creates a policy and puts it under its id, replacing another.

        Weights and noise are seeded by the seed of the config, or else of the map, together with
        the policy's id; noise also by the worker's index. So policies differ, and a run is
        repeatable.

        Args:
            policy_id: its id.
            policy_cls: its class.
            observation_space: as the environment has it.
            action_space: as the environment has it.
            config_override: the settings that differ in its config; kept in `specs`.
            merged_config: the whole config, `config_override` included.

        Raises:
            Exception: any error of the class; the map is then unchanged.
        """
        if not (isinstance(policy_cls, type) and issubclass(policy_cls, Policy)):
            raise ConfigError(f"policy_cls must be a subclass of Policy, got {policy_cls!r}.")
        validate_policy_id(policy_id, error=True)
        config_source = merged_config
        config = dict(
            config_source.to_dict() if isinstance(config_source, AlgorithmConfig) else config_source
        )
        config = {**self.policy_config, **config, "__policy_id": policy_id}
        config["worker_index"] = self.worker_index
        if config.get("seed") is None:
            config["seed"] = self.seed
        is_graph_mode = getattr(policy_cls, "runtime", None) == "session"
        session_creator = self.session_creator if is_graph_mode else None
        if session_creator is not None:
            config["__session_creator"] = session_creator
        policy: Any = policy_cls(observation_space, action_space, config)
        if session_creator is not None:
            policy.driver.program.runtime.open_session(policy.driver.state)
        self[policy_id] = policy
        override = dict(config_override or {})
        self.specs[policy_id] = PolicySpec(policy_cls, observation_space, action_space, override)

    def copy_policy(self, source: str, target: str, **hyperparameters: float) -> Policy:
        """Copies a policy: variables, optimizer, exploration, filters, counters.

        The copy is not frozen, and has its own generator. If a policy with the same Program exists
        under `target`, its state is overwritten, so that handles on it stay valid; any other policy
        is replaced.

        Args:
            source: id of the policy to copy.
            target: id of the copy.
            **hyperparameters: numbers to set in the copy, such as `lr=1e-3`.

        Returns:
            The policy under `target`.

        Raises:
            UnknownPolicyError: if there is no `source`.
            ConfigError: if its class has no such hyperparameter; nothing is changed then.
        """
        original = self.get_handle(source)
        if target == source:
            raise UsageError(f"source and target must differ, got {source!r} for both.")
        validate_policy_id(target, error=True)
        policy: Policy = original.copy(target)
        for name, value in hyperparameters.items():
            policy.driver.set_hyperparameter(name, value)
        with self._lock:
            existing: Policy | None = None
            if target in self:
                with contextlib.suppress(StashError):  # a damaged policy is replaced
                    existing = self.get_handle(target)
            if existing is not original and _accepts_state_of(existing, policy):
                existing_state: dict[str, Any] = existing.get_state()
                rng_states = {
                    key: existing_state[key]
                    for key in existing_state
                    if key in ("rng", "learning_rng")
                }
                existing.set_state({**policy.get_state(), **rng_states})
                return existing
            self[target] = policy
            if source in self.specs:
                self.specs[target] = self.specs[source]
        return policy

    def perturb(
        self,
        policy_id: str,
        *names: str,
        factors: Sequence[float] = (0.8, 1.2),
        rng: np.random.Generator | None = None,
    ) -> dict[str, float]:
        """Multiplies hyperparameters of a policy by random factors.

        It is the "explore" step of population-based training (Jaderberg et al. 2017,
        arXiv:1711.09846, section 4.1.1).

        Args:
            policy_id: of the policy.
            *names: the hyperparameters to change, such as "lr".
            factors: one of them is drawn for each.
            rng: draws the factors; None takes the policy's own generator.

        Returns:
            The new values, by name.

        Raises:
            ConfigError: if the policy has no such hyperparameter; nothing is changed then.
            FrozenPolicyError: if it is frozen; nothing is changed then.
            UsageError: for a custom policy.
        """
        driver = self.get_handle(policy_id).driver
        driver.require_changeable()
        generator: Any = driver.generator if rng is None else rng
        values = {name: driver.get_hyperparameter(name) for name in names}
        new_values = {
            name: value * float(generator.choice(factors)) for name, value in values.items()
        }
        for name, value in new_values.items():
            driver.set_hyperparameter(name, value)
        return new_values

    # -- acting -------------------------------------------------------------------------------

    compute_actions = stacked_acting.compute_actions

    # -- memory -------------------------------------------------------------------------------

    def in_memory(self) -> list[str]:
        """Returns the ids of policies in memory, the most recently used one last."""
        with self._lock:
            last_uses = [
                (state.last_used, policy_id)
                for policy_id, policy in self._policies.items()
                if (state := policy.driver.state) is not None and state.is_in_memory
            ]
        return [policy_id for _, policy_id in sorted(last_uses)]

    @property
    def statistics(self) -> CacheStatistics:
        """Statistics of the map's memory."""
        return self._cache.get_statistics()

    def pin(self, policy_id: str) -> None:
        """Keeps a policy in memory, regardless of capacity, until `unpin`."""
        self._apply_to_state(policy_id, self._cache.pin)

    def unpin(self, policy_id: str) -> None:
        """Allows a policy to be evicted to the stash again."""
        self._apply_to_state(policy_id, self._cache.unpin)

    def evict(self, policy_id: str) -> None:
        """Evicts a policy to the stash now; a pinned one stays.

        Raises:
            StashError: if it cannot be written; it stays in memory then.
        """
        self._apply_to_state(policy_id, self._cache.evict)

    def _apply_to_state(self, policy_id: str, action: Callable[[Any], None]) -> None:
        """Calls a method of the cache with a policy's state, if it has one."""
        with self._lock:
            state = self._get_own_state(policy_id)
            if state is not None:
                action(state)

    def freeze(self, policy_id: str) -> Policy:
        """Makes a policy read-only: it acts, but neither learns nor accepts other weights.

        Its variables are memory-mapped from the stash, so that all processes that open the same
        stash share them. `copy_policy` makes a copy that may change.

        Returns:
            The policy.

        Raises:
            UsageError: for a custom policy.
            StashError: if it cannot be written, or another one was frozen under this id.
        """
        with self._lock:
            policy, state = self[policy_id], self._get_own_state(policy_id)
            if state is None:
                raise UsageError(f"{policy!r} cannot be frozen: its variables are unknown.")
            with state.lock:
                if state.frozen_as is None:
                    image = state.pack_acting()
                    entry, is_owned = self._store.freeze(policy_id, policy, image)
                    self._cache.freeze(state, policy_id, entry.name, entry.stash, is_owned=is_owned)
        return policy

    def write_snapshot(self, policy_id: str, folder: str | Path) -> ContentFile:
        """Writes the file of a snapshot: the description of a policy, and the variables that act.

        Args:
            policy_id: of the policy.
            folder: of the file, which is named by its content; made if it is missing.

        Returns:
            The file, for `add_snapshot` in this or any other process.

        Raises:
            UsageError: for a custom policy.
            StashError: if the file cannot be written.
        """
        with self._lock:
            policy, state = self[policy_id], self._get_own_state(policy_id)
            if state is None:
                raise UsageError(
                    f"There can be no snapshot of {policy!r}: its variables are unknown."
                )
            with state.lock:
                description, memory = describe_snapshot(policy), state.pack_acting()
        try:
            return write_snapshot(Path(folder), description, memory)
        except OSError as error:
            raise StashError(
                f"The snapshot of {policy_id!r} cannot be written: {error}. Give another `folder`, "
                "or free some space."
            ) from error

    def add_snapshot(self, policy_id: str, file: ContentFile, prototype: Policy) -> Policy:
        """Adds a snapshot: a policy that acts as another did when the file was written.

        It is frozen. Its variables are loaded when it first acts, by mapping the file, so that all
        processes of a machine share them. Noise is drawn from its own generator, seeded by its id.

        Args:
            policy_id: of the snapshot.
            file: written by `write_snapshot`.
            prototype: the policy of which the file was written, or one with the same model. The
                snapshot copies its attributes; later changes of the prototype do not matter.

        Returns:
            The policy.

        Raises:
            UsageError: if there is a policy of this id, or `prototype` has another model.
            CheckpointError: if the file is missing or damaged.

        >>> import gymnasium as gym
        >>> import tempfile
        >>> from tfpolicies import PPOTF2Policy
        >>> spaces = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)
        >>> m = PolicyMap()
        >>> m["main"] = PPOTF2Policy(*spaces, {"model": {"fcnet_hiddens": [8]}})
        >>> file = m.write_snapshot("main", tempfile.mkdtemp())
        >>> m.add_snapshot("main_1", file, m["main"]).driver.is_frozen, m.in_memory()
        (True, ['main'])
        """
        validate_policy_id(policy_id, error=True)
        with self._lock:
            if policy_id in self:
                raise UsageError(
                    f"There is a policy {policy_id!r} already. Choose another id for the snapshot, "
                    f"or remove the policy first: `del policy_map[{policy_id!r}]`."
                )
            policy = make_snapshot_policy(policy_id, file, prototype)
            state, files, name = policy._pageable, self._store.snapshots, make_entry_name(policy_id)
            state.freeze(policy_id)
            files.add(name, file)
            callback = _make_eviction_callback(policy, state)
            self._cache.add_stored(name, state, callback, files, is_owned=True)
            self._policies[policy_id] = policy
            self._store.mark_replaced(policy_id)
        return policy

    def get_snapshot_file(self, policy_id: str) -> ContentFile | None:
        """Returns the file of a snapshot; None if the policy is not one.

        Raises:
            UnknownPolicyError: if there is none of this id; also a KeyError.
        """
        state = self._get_cached_state(self.get_handle(policy_id))
        entry = None if state is None else self._cache[state]
        files = self._store.snapshots
        return None if entry is None or entry.stash is not files else files[entry.name]

    # -- the stash ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Writes all policies to a persistent stash, for a later map to load.

        Custom policies are not written: the map does not know their variables.

        Raises:
            StashError: if one of them cannot be written; the others are.
        """
        with self._lock:
            superseded = self._store.get_superseded_names()
        first_error = None
        for policy_id in self if self._store.is_persistent else ():
            with self._lock:
                policy = self._policies.get(policy_id)  # unloaded ones are in the stash already
                try:
                    state = None if policy is None else self._get_cached_state(policy)
                    if policy is not None and state is not None:
                        self._flush(policy, state)
                except StashError as error:
                    first_error = first_error or error
        if first_error is not None:
            raise first_error
        with self._lock:
            self._store.remove_superseded(superseded)

    def _flush(self, policy: Policy, state: PolicyState) -> None:
        entry = self._cache[state]
        if entry.stash in (self._store.frozen_stash, self._store.snapshots):
            return
        ids = [policy_id for policy_id, other in self._policies.items() if other is policy]
        with state.lock:
            self._cache.write(state)
            self._store.write_record(StoreEntry(self._store.stash, entry.name), ids, policy)
            self._cache.mark_recorded(state)

    def close(self) -> None:
        """Flushes and releases a persistent stash, closes sessions, and empties the map.

        Policies that are still referenced stay usable in memory, and may be put into another map.
        """
        self.flush()
        with self._lock:
            self._close_sessions()
            cached = [
                weakref.ref(x)
                for x in {*self._policies.values()}
                if self._get_cached_state(x) is not None
            ]
            self._policies.clear()
            self.specs.clear()
            for policy in filter(None, (reference() for reference in cached)):
                self._cache.remove(policy._pageable)
            self._store.close()

    def _close_sessions(self) -> None:
        for policy in self._policies.values():
            if self._get_cached_state(policy) is None and policy.driver.state is not None:
                continue  # another map manages it
            policy.close()
            program = policy.driver.program
            if program is not None and self.session_creator is not None:
                program.runtime.close_idle_sessions(self.session_creator)

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self, "Pickle its policies, dict(policy_map), and fill another map.")

    def __enter__(self) -> PolicyMap:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def refresh(self) -> list[str]:
        """Finds policies that other processes froze in the stash; returns the new ids."""
        with self._lock:
            store = self._store
            return (
                store.add_unloaded(store.frozen_stash, self._policies)
                if store.is_persistent
                else []
            )

    def _load(self, policy_id: str) -> None:
        entry = self._store.unloaded[policy_id]
        policy = self._store.load_policy(policy_id)
        state, is_owned = policy.driver.state, self._store.owns(entry)
        self._cache.add_stored(
            entry.name,
            state,
            _make_eviction_callback(policy, state),
            entry.stash,
            is_owned=is_owned,
        )
        self._policies.update(dict.fromkeys(self._store.mark_loaded(entry), policy))


class _Items(ItemsView[str, Policy]):
    def __iter__(self) -> Iterator[tuple[str, Policy]]:
        policy_map: Any = self._mapping  # type: ignore[attr-defined]
        with policy_map._lock:  # so that none is deleted during the loop
            return iter([(policy_id, policy_map.get_handle(policy_id)) for policy_id in policy_map])

    def __contains__(self, item: object) -> bool:
        return any(item == pair for pair in self)


class _Values(ValuesView[Policy]):
    def __iter__(self) -> Iterator[Policy]:
        return (policy for _, policy in _Items(self._mapping))  # type: ignore[attr-defined]

    def __contains__(self, value: object) -> bool:
        return any(value is policy for policy in self)


def _make_eviction_callback(policy: Any, state: PolicyState) -> Callable[[], None]:
    return functools.partial(policy.driver.program.runtime.release_session, state)


def _accepts_state_of(policy: Policy | None, other: Policy) -> TypeGuard[Policy]:
    """Whether a policy has the same Program as another, and may change."""
    if policy is None or policy.driver.program is None:
        return False
    driver, other_driver = policy.driver, other.driver
    return driver.program is other_driver.program and not driver.is_frozen


def _check_counts(minimum: int, **counts: int | None) -> None:
    for name, value in counts.items():
        is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and not (is_integer and value >= minimum):
            raise ConfigError(f"{name} must be an integer >= {minimum} or None, got {value!r}.")
