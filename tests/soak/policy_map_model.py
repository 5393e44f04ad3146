"""A `PolicyMap` against a plain dict of policies: `python -m soak.policy_map_model`.

A state machine of hypothesis adds, gets, acts with, trains, copies, freezes, pins, evicts, deletes
and reopens policies of several kinds in a map of capacity 2, and does the same to policies in a
dict that share nothing but their Programs. What they do and own must be equal to the bit. Then
eight threads do such things at once, each to policies of its own and to shared ones, and every
update must have counted.

    python -m soak.policy_map_model --steps 10000 --threads 8 --thread-steps 500
"""

from __future__ import annotations

import copy
import random
import tempfile
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helpers.differences import get_owned, require_same, require_same_policy
from helpers.scripts import parse_options
from tfpolicies import DQNTF2Policy, PGTF1Policy, PGTF2Policy, PolicyMap, PPOTF2Policy
from tfpolicies.errors import FrozenPolicyError
from tfpolicies.testing import random_batch

OBS, TWO = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)
_QUICK = {"inference": "tf", "jit_compile": False, "model": {"fcnet_hiddens": [2]}}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo": (PPOTF2Policy, {"observation_filter": "MeanStdFilter"}),
    "pg": (PGTF2Policy, {}),
    "dqn": (DQNTF2Policy, {}),
    "graph": (PGTF1Policy, {}),
    "onnx": (PPOTF2Policy, {"inference": "onnx"}),
}
IDS = ("a", "b", "c", "d", "e")
CAPACITY = 2

_ids, _kinds, _seeds = st.sampled_from(IDS), st.sampled_from(sorted(KINDS)), st.integers(0, 99)
_kept_alive: dict[str, tuple[Any, Any]] = {}  # a policy and a batch of each kind


def make(kind: str, policy_id: str, seed: int) -> Any:
    """Makes a policy; the same arguments make the same one."""
    policy_class, config = KINDS[kind]
    return policy_class(OBS, TWO, {**_QUICK, **config, "seed": seed, "__policy_id": policy_id})


def get_batch(kind: str) -> Any:
    """Returns the batch that policies of a kind learn from; keeps the kind's Program alive."""
    if kind not in _kept_alive:
        policy = make(kind, "x", 0)
        batch = random_batch(policy, 8)
        policy.learn_on_batch(batch)
        _kept_alive[kind] = policy, batch
    return _kept_alive[kind][1]


def get_kind(policy: Any) -> str:
    for kind in KINDS:
        get_batch(kind)
    return next(k for k, (one, _) in _kept_alive.items() if one.program is policy.program)


# -- one step, done to a policy -------------------------------------------------------------------


def act(policy: Any, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(1 + seed % 3, 2)).astype(np.float32)
    result = policy.compute_actions(rows, explore=bool(seed % 2))
    return {"actions": result.actions, **result.extras}


def learn(policy: Any, seed: int) -> dict[str, Any]:
    batch = get_batch(get_kind(policy))
    return policy.learn_epochs(batch, 1 + seed % 2, 4)["learner_stats"]


def set_weights(policy: Any, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    weights = policy.get_weights()
    policy.set_weights({k: rng.normal(size=x.shape).astype(x.dtype) for k, x in weights.items()})
    return {}


def set_hyper(policy: Any, seed: int) -> dict[str, Any]:
    policy.set_hyperparameter("lr", (1 + seed) / 1000)
    return {}


def observe(policy: Any, seed: int) -> dict[str, Any]:
    """Lets the filter see a row and takes it into account."""
    rows = np.full((1, 1, 2), seed / 50, np.float32)
    policy.driver.learning.observe([rows], {"rewards": np.zeros((1, 1), np.float32)})
    policy.driver.learning.flush_filters()
    return {}


def freeze_in_memory(policy: Any) -> None:
    """Freezes a policy that is in no map."""
    state = policy.driver.state
    memory = state.pack_acting()
    state.freeze(policy.policy_id)
    state.page_in(memory)


CHANGES = (learn, set_weights, set_hyper)
STEPS = (act, act, *CHANGES, observe)


def policy_rule(**arguments: Any) -> Any:
    """Makes a method a rule for one of the policies, by index, which needs that there is one."""
    has_policies = precondition(lambda self: self.plain)
    return lambda method: has_policies(rule(index=_seeds, **arguments)(method))


class MapAndDict(RuleBasedStateMachine):
    """A map and a dict to which the same things are done."""

    steps_done: Counter[str] = Counter()

    @initialize(kinds=st.tuples(_kinds, _kinds, _kinds), seed=_seeds)
    def start(self, kinds: tuple[str, ...], seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.m = PolicyMap(capacity=CAPACITY, path=self.folder.name)
        self.plain: dict[str, Any] = {}
        self.handles: dict[str, Any] = {}
        self.pinned: set[str] = set()
        self.frozen: dict[str, dict[str, Any]] = {}  # with what they owned when they were frozen
        self.since_reopening = 0
        for policy_id, kind in zip(IDS, kinds, strict=False):
            self.add(policy_id, kind, seed)

    def _put(self, policy_id: str, policy: Any, twin: Any) -> None:
        self._gone(policy_id)
        self.handles[policy_id], self.plain[policy_id] = policy, twin

    def _gone(self, policy_id: str) -> None:
        self.pinned.discard(policy_id)
        self.frozen.pop(policy_id, None)

    def _choose(self, index: int, name: str) -> str:
        """Counts a step, and returns the id of the policy that it is done to."""
        self._count(name)
        return sorted(self.plain)[index % len(self.plain)]

    def _count(self, name: str) -> None:
        self.steps_done[name] += 1
        self.since_reopening += 1

    # -- rules ------------------------------------------------------------------------------------

    @rule(policy_id=_ids, kind=_kinds, seed=_seeds)
    def add(self, policy_id: str, kind: str, seed: int) -> None:
        self._count("add")
        get_batch(kind)
        self.m[policy_id] = make(kind, policy_id, seed)
        self._put(policy_id, self.m.get_handle(policy_id), make(kind, policy_id, seed))

    @policy_rule(seed=_seeds)
    def act(self, index: int, seed: int) -> None:
        self._use(index, act, seed, by_map=True)

    @policy_rule(seed=_seeds)
    def learn(self, index: int, seed: int) -> None:
        self._use(index, learn, seed, by_map=True)

    @policy_rule(step=st.sampled_from(STEPS), seed=_seeds, by_map=st.booleans())
    def use(self, index: int, step: Any, seed: int, by_map: bool) -> None:
        self._use(index, step, seed, by_map)

    def _use(self, index: int, step: Any, seed: int, by_map: bool) -> None:
        policy_id = self._choose(index, step.__name__)
        policy = self.m[policy_id] if by_map else self.m.get_handle(policy_id)
        if policy_id in self.frozen and step in CHANGES:
            before = get_owned(policy)
            try:
                step(policy, seed)
            except FrozenPolicyError:
                require_same(get_owned(policy), before, f"{policy_id} after a refused change")
                return
            raise AssertionError(f"{step.__name__} changed the frozen {policy_id}")
        if policy_id in self.frozen and step is observe:
            step(policy, seed)
            return
        actual, expected = step(policy, seed), step(self.plain[policy_id], seed)
        require_same(actual, expected, f"what {step.__name__} of {policy_id} gives")

    @policy_rule()
    def compare(self, index: int) -> None:
        policy_id = self._choose(index, "compare")
        require_same_policy(self.m[policy_id], self.plain[policy_id], policy_id)

    @policy_rule(onto=_ids, lr=st.sampled_from([0.25, 0.5]))
    def copy(self, index: int, onto: str, lr: float) -> None:
        source = self._choose(index, "copy")
        if source == onto:
            return
        present, twin = self.plain.get(onto), self.plain[source].copy(onto)
        twin.set_hyperparameter("lr", lr)
        copied = self.m.copy_policy(source, onto, lr=lr)
        if present is not None and present.program is twin.program and onto not in self.frozen:
            present.set_state({**twin.get_state(), "rng": present.get_state()["rng"]})
            self.handles.setdefault(onto, copied)
        else:
            self._put(onto, copied, twin)

    @policy_rule()
    def freeze(self, index: int) -> None:
        policy_id = self._choose(index, "freeze")
        self.m.freeze(policy_id)
        if policy_id not in self.frozen:
            freeze_in_memory(self.plain[policy_id])
            self.frozen[policy_id] = get_owned(self.plain[policy_id])

    @policy_rule(pinned=st.booleans())
    def pin(self, index: int, pinned: bool) -> None:
        policy_id = self._choose(index, "pin")
        (self.m.pin if pinned else self.m.unpin)(policy_id)
        (self.pinned.add if pinned else self.pinned.discard)(policy_id)

    @policy_rule()
    def evict(self, index: int) -> None:
        policy_id = self._choose(index, "evict")
        self.m.evict(policy_id)
        if (policy_id in self.m.in_memory()) != (policy_id in self.pinned):
            raise AssertionError(f"{policy_id} was evicted although pinned, or not although not")

    @policy_rule()
    def delete(self, index: int) -> None:
        policy_id = self._choose(index, "delete")
        policy = self.m.pop(policy_id)
        require_same(
            get_owned(policy), get_owned(self.plain.pop(policy_id)), f"the deleted {policy_id}"
        )
        self.handles.pop(policy_id, None)
        self._gone(policy_id)

    @precondition(lambda self: self.plain and self.since_reopening > 5)
    @rule(close=st.booleans())
    def reopen(self, close: bool) -> None:
        self._count("reopen")
        self.since_reopening = 0
        if not close:
            self.m.flush()
            return
        self.m.close()
        self.m = PolicyMap(capacity=CAPACITY, path=self.folder.name)
        for policy_id, then in self.frozen.items():
            policy = self.plain[policy_id] = self.plain[policy_id].copy()
            policy.set_state(then)  # what it did since then was not kept
            freeze_in_memory(policy)
        self.handles.clear()
        self.pinned.clear()

    # -- what holds always ------------------------------------------------------------------------

    @invariant()
    def ids_handles_and_memory(self) -> None:
        if not hasattr(self, "m"):
            return
        if set(self.m) != set(self.plain) or len(self.m) != len(self.plain):
            raise AssertionError(f"{sorted(self.m)} instead of {sorted(self.plain)}")
        for policy_id, policy in self.handles.items():
            if self.m.get_handle(policy_id) is not policy:
                raise AssertionError(f"{policy_id} is another object")
        in_memory = self.m.in_memory()
        if len(in_memory) > max(CAPACITY, len(self.pinned) + 1):
            raise AssertionError(f"{in_memory} are in memory, pinned are {self.pinned}")
        if not self.pinned <= set(in_memory):
            raise AssertionError(f"pinned {self.pinned}, in memory {in_memory}")

    def teardown(self) -> None:
        if not hasattr(self, "m"):
            return
        try:
            for policy_id, policy in self.m.items():
                require_same_policy(policy, self.plain[policy_id], policy_id)
        finally:
            self.m.close()
            self.folder.cleanup()


THINGS = {"add", "act", "learn", "compare", "copy", "delete", "evict", "freeze", "pin", "reopen"}


def run_machine(examples: int, steps: int, seed: int | None = None) -> Counter[str]:
    """Runs the state machine; returns how often each thing was done.

    Args:
        examples: fresh starts.
        steps: after each, at most.
        seed: None for seeds from 0 on, until everything has been done, five times at most.
    """
    for kind in KINDS:
        get_batch(kind)
    MapAndDict.steps_done = Counter()
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    for number in range(5) if seed is None else [seed]:
        MapAndDict._hypothesis_internal_use_seed = number  # type: ignore[attr-defined]
        run_state_machine_as_test(MapAndDict, settings=chosen)
        if MapAndDict.steps_done.keys() >= THINGS:
            break
    return MapAndDict.steps_done


# -- threads --------------------------------------------------------------------------------------


class Worker(threading.Thread):
    """Does things to policies of its own, which it mirrors, and to shared ones, which it counts."""

    def __init__(self, m: PolicyMap, index: int, steps: int, shared: list[str]) -> None:
        super().__init__(daemon=True)
        self.m, self.index, self.steps, self.shared = m, index, steps, shared
        self.random = random.Random(index)
        self.plain: dict[str, Any] = {}
        self.learned: Counter[str] = Counter()
        self.acted: Counter[str] = Counter()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(self.steps):
                (self._use_own if self.random.random() < 0.5 else self._use_shared)()
            for policy_id, twin in self.plain.items():
                require_same_policy(self.m[policy_id], twin, policy_id)
        except BaseException as error:
            self.error = error

    def _use_own(self) -> None:
        policy_id = f"own {self.index} {self.random.randrange(2)}"
        draw, seed = self.random.random(), self.random.randrange(100)
        if policy_id not in self.plain or draw < 0.1:
            kind = self.random.choice(sorted(KINDS))
            self.m[policy_id] = make(kind, policy_id, seed)
            self.plain[policy_id] = make(kind, policy_id, seed)
        elif draw < 0.2:
            self.m.evict(policy_id)
        elif draw < 0.25:
            require_same(
                get_owned(self.m.pop(policy_id)), get_owned(self.plain.pop(policy_id)), policy_id
            )
        elif draw < 0.3:
            self.m.copy_policy(policy_id, f"{policy_id} copy")
            require_same(
                self.m[f"{policy_id} copy"].get_weights(), self.plain[policy_id].get_weights(), ""
            )
            del self.m[f"{policy_id} copy"]
        else:
            step = self.random.choice(STEPS)
            actual, expected = step(self.m[policy_id], seed), step(self.plain[policy_id], seed)
            require_same(actual, expected, f"what {step.__name__} of {policy_id} gives")

    def _use_shared(self) -> None:
        policy_id = self.random.choice(self.shared)
        draw, seed = self.random.random(), self.random.randrange(100)
        if draw < 0.4:
            learn(self.m[policy_id], seed)
            self.learned[policy_id] += 2 * (1 + seed % 2)
        elif draw < 0.7:
            self.acted[policy_id] += len(act(self.m[policy_id], seed)["actions"])
        elif draw < 0.8:
            self.m.evict(policy_id)
        elif draw < 0.85:
            (self.m.pin if seed % 2 else self.m.unpin)(policy_id)
        elif draw < 0.9:
            self.m.copy_policy(policy_id, f"snapshot {self.index}")
        elif draw < 0.95:
            len(self.m.copy())
        else:
            self.m.flush()


def run_together(threads: list[Any], seconds: float = 600.0) -> None:
    """Runs threads to their ends; raises an AssertionError if one takes too long."""
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            raise AssertionError(f"{thread.name} hangs")


def run_threads(threads: int, steps: int, *, seconds: float = 600.0) -> Counter[str]:
    """Does things to one map from many threads; returns the updates of the shared policies.

    Raises:
        AssertionError: if an update was lost, a policy differs, or the threads do not end in time.
    """
    shared = [f"shared {kind}" for kind in KINDS]
    for kind in KINDS:
        get_batch(kind)
    with tempfile.TemporaryDirectory() as folder, PolicyMap(capacity=3, path=folder) as m:
        for kind, policy_id in zip(KINDS, shared, strict=True):
            m[policy_id] = make(kind, policy_id, 0)
        workers = [Worker(m, i, steps, shared) for i in range(threads)]
        run_together(workers, seconds)
        for worker in workers:
            if worker.error is not None:
                raise AssertionError(f"thread {worker.index} failed") from worker.error
        learned = sum((worker.learned for worker in workers), Counter())
        acted = sum((worker.acted for worker in workers), Counter())
        for policy_id in shared:
            _require_counts(m[policy_id], learned[policy_id], acted[policy_id])
        if any(worker.plain.keys() - set(m) for worker in workers):
            raise AssertionError("a policy is missing")
    return learned


def _require_counts(policy: Any, learned: int, acted: int) -> None:
    state = policy.get_state()
    iterations = next(
        int(x) for key, x in state["_optimizer_variables"].items() if key.endswith("iteration")
    )
    results = state["num_grad_updates"], iterations, state["global_timestep"]
    if results != (learned, learned, acted):
        raise AssertionError(
            f"{policy.policy_id} counts {results}, not {(learned, learned, acted)}"
        )


def main() -> None:
    args = parse_options(__doc__, steps=10_000, threads=8, thread_steps=500, seed=0)
    begun, done, seed = time.perf_counter(), Counter[str](), args.seed
    while done.total() < args.steps:
        done += copy.copy(run_machine(20, 100, seed))
        seed += 1
    print(f"{done.total()} steps without a difference, {time.perf_counter() - begun:.0f} s")
    print(", ".join(f"{name} {count}" for name, count in sorted(done.items())))
    begun = time.perf_counter()
    updates = run_threads(args.threads, args.thread_steps).total()
    print(
        f"{args.threads} threads of {args.thread_steps} steps: {updates} updates of shared "
        f"policies, none lost, {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
