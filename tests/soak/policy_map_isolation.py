"""Policies of many kinds in one map beside the same ones apart: results, sessions, global state.

    python -m soak.policy_map_isolation --accesses 2000 --threads 2

Eager and graph-mode policies of PPO, PG and DQN lie in a map of capacity 4. Threads pick them at
random, and each does the next thing that is planned for the policy it picked: act, learn, set
weights, ask for likelihoods. The same plans are then done to the same policies apart, one after
the other. All results and all that the policies own must be equal to the bit, every graph-mode
policy must have a session of its own on its Program's graph, and TensorFlow's and Keras's global
state must be as before.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from helpers.differences import require_same, require_same_policy
from helpers.factories import OBS, TWO
from helpers.scripts import parse_options
from soak.policy_map_model import run_together
from tfpolicies import (
    DQNTF1Policy,
    DQNTF2Policy,
    PGTF1Policy,
    PGTF2Policy,
    PolicyMap,
    PPOTF1Policy,
    PPOTF2Policy,
)
from tfpolicies.policy_map.state_cache import CacheStatistics
from tfpolicies.testing import random_batch

CLASSES = (PPOTF2Policy, PPOTF1Policy, PGTF2Policy, PGTF1Policy, DQNTF2Policy, DQNTF1Policy)
CAPACITY = 4
_QUICK = {"inference": "tf", "jit_compile": False, "model": {"fcnet_hiddens": [4]}, "seed": 3}


class Planned:
    """A policy's plan: the n-th thing done to it is the same wherever it is."""

    def __init__(self, policy_class: Any, batch: Any) -> None:
        self.name = policy_class.__name__
        self.batch = batch
        self.lock = threading.Lock()
        self.results: list[Any] = []

    def do_next(self, policy: Any) -> None:
        """Does the next thing to a policy, and keeps what it gives."""
        step = len(self.results)
        rng = np.random.default_rng([step, *self.name.encode()])
        rows = rng.normal(size=(1 + step % 4, 3)).astype(np.float32)
        what = int(rng.integers(8))
        if what < 3:
            result = policy.compute_actions(rows)
            self.results.append({"actions": result.actions, **result.extras})
        elif what < 6:
            self.results.append(policy.learn_epochs(self.batch, 1, 4)["learner_stats"])
        elif what == 6:
            actions = np.zeros(len(rows), np.int64)
            self.results.append({"logp": policy.compute_log_likelihoods(actions, rows)})
        else:
            scale = np.float32(rng.uniform(0.5, 1.5))
            policy.set_weights([scale * x for x in policy.get_weights().values()])
            self.results.append(policy.get_weights())


def _global_state() -> dict[str, Any]:
    tracked = vars(global_state.GLOBAL_STATE_TRACKER)
    return {
        "eager": tf.executing_eagerly(),
        "default graph": id(tf.compat.v1.get_default_graph()),
        "default session": id(tf.compat.v1.get_default_session()),
        "Python's random": random.getstate(),
        "NumPy's random": str(np.random.get_state()),
        "Keras": {k: len(v) if hasattr(v, "__len__") else str(v) for k, v in tracked.items()},
        "threads": tf.config.threading.get_inter_op_parallelism_threads(),
        "threads of an operation": tf.config.threading.get_intra_op_parallelism_threads(),
    }


@contextmanager
def untouched_global_state() -> Iterator[None]:
    """Raises an AssertionError if TensorFlow's, Keras's or NumPy's global state changes."""
    tf.random.set_seed(5)
    tf.random.uniform([])
    expected = float(tf.random.uniform([]))
    tf.random.set_seed(5)
    tf.random.uniform([])
    before = _global_state()
    yield
    require_same(_global_state(), before, "the global state")
    require_same(float(tf.random.uniform([])), expected, "TensorFlow's next random number")


def run(accesses: int, threads: int) -> CacheStatistics:
    """Does `accesses` things from some threads to policies in a map, and then apart.

    Returns:
        How the map used its memory.

    Raises:
        AssertionError: if a result, a policy, a session or the global state differs.
    """
    apart = {c.__name__: c(OBS, TWO, {**_QUICK, "__policy_id": c.__name__}) for c in CLASSES}
    batches = {name: random_batch(policy.copy(), 8) for name, policy in apart.items()}
    plans = {c.__name__: Planned(c, batches[c.__name__]) for c in CLASSES}
    sessions: list[Any] = []

    def create_session() -> Any:
        sessions.append(tf.compat.v1.get_default_graph())
        return tf.compat.v1.Session()

    with (
        untouched_global_state(),
        PolicyMap(0, 0, CAPACITY, seed=3, session_creator=create_session) as m,
    ):
        for c in CLASSES:
            m.create_policy(c.__name__, c, OBS, TWO, {}, _QUICK)
        _require_sessions(m, sessions)
        _from_threads(m, plans, accesses, threads)
        statistics = m.statistics
        for name, plan in plans.items():
            alone = Planned(type(apart[name]), batches[name])
            for _ in plan.results:
                alone.do_next(apart[name])
            for step, pair in enumerate(zip(plan.results, alone.results, strict=True)):
                require_same(*pair, f"result {step} of {name}")
            require_same_policy(m[name], apart[name], name)
    return statistics


def _require_sessions(m: PolicyMap, graphs: list[Any]) -> None:
    """Checks that each graph-mode policy had one session made, on its Program's graph."""
    in_graph = [c.__name__ for c in CLASSES if c.runtime == "session"]
    results = [m[name].get_session() for name in in_graph]
    if len({id(session) for session in results}) != len(in_graph):
        raise AssertionError("two policies share a session")
    if graphs != [session.graph for session in results]:
        raise AssertionError(f"{len(graphs)} sessions were made for {len(in_graph)} policies")
    if any(m.get_handle(c.__name__).get_session() for c in CLASSES if c.runtime != "session"):
        raise AssertionError("an eager policy has a session")


def _from_threads(m: PolicyMap, plans: dict[str, Planned], accesses: int, threads: int) -> None:
    failed: list[BaseException] = []

    def access(seed: int) -> None:
        chooser = random.Random(seed)
        try:
            for _ in range(accesses // threads):
                name = chooser.choice(list(plans))
                with plans[name].lock:
                    plans[name].do_next(m[name])
        except BaseException as error:
            failed.append(error)

    run_together([threading.Thread(target=access, args=(i,), daemon=True) for i in range(threads)])
    if failed:
        raise AssertionError("a thread failed") from failed[0]


def main() -> None:
    args = parse_options(__doc__, accesses=2000, threads=2)
    begun = time.perf_counter()
    result = run(args.accesses, args.threads)
    print(
        f"{args.accesses} accesses from {args.threads} threads to {len(CLASSES)} policies, "
        f"{CAPACITY} of them in memory: all results and states equal to the bit, global state "
        f"untouched; {result.evictions} evictions, {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
