"""Policies in one map beside the same ones apart and in a dict; TensorFlow's global state."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from helpers.factories import OBS, assert_equal, batch_for, make, rows_of
from helpers.processes import run_python
from soak.memory import resident_megabytes
from soak.policy_map_isolation import run
from soak.policy_map_model import run_machine, run_threads
from tfpolicies import DQNTF1Policy, PGTF1Policy, PolicyMap, PPOTF1Policy

ROWS = rows_of(OBS, 6)


def test_policies_of_all_kinds_in_one_map_are_as_if_apart():
    threads = tf.config.threading
    statistics = run(accesses=240, threads=2)
    assert threads.get_intra_op_parallelism_threads() == 0  # as TensorFlow starts
    assert threads.get_inter_op_parallelism_threads() == 0
    assert statistics.evictions > 30
    assert statistics.hits > 30


@pytest.mark.soak
def test_graph_policies_come_and_go_two_hundred_times_and_the_memory_stays():
    """In a process of its own, whose memory no other test changes."""
    run_python(f"import {__name__} as tests; tests.check_two_hundred_evictions()")


def check_two_hundred_evictions():
    """Asserts that each restored policy has the same weights and outputs, to the bit."""
    m = PolicyMap(capacity=1)
    for i, policy_class in enumerate((PPOTF1Policy, PGTF1Policy, DQNTF1Policy)):
        for policy_id, seed in ((f"p{i}", i), (f"q{i}", 10 + i)):
            m[policy_id] = make(policy_class, seed=seed, model={"fcnet_hiddens": [64, 64]})
            m[policy_id].learn_on_batch(batch_for(m[policy_id], 8))
    expected = {
        policy_id: (policy.get_weights(), policy.compute_actions(ROWS, explore=False).extras)
        for policy_id, policy in m.items()
    }
    before = m.statistics
    sizes = []
    for turn in range(-(-200 // len(m)) + 10):
        for policy_id, (weights, extras) in expected.items():
            policy = m[policy_id]
            assert_equal(policy.get_weights(), weights)
            assert_equal(policy.compute_actions(ROWS, explore=False).extras, extras)
        if turn % 34 == 9:
            gc.collect()
            sizes.append(resident_megabytes())
    assert m.statistics.misses - before.misses >= 200
    assert m.statistics.writes - before.writes <= len(m)  # nothing was changed
    assert sizes[-1] - sizes[0] < 4.0, sizes
    assert np.isfinite(sizes).all()


@pytest.mark.soak
def test_a_map_equals_a_plain_dict_of_policies():
    done = run_machine(examples=4, steps=40)
    assert done.total() > 100
    assert {"add", "act", "learn", "copy", "freeze", "pin", "evict"} <= set(done)


@pytest.mark.soak
def test_threads_lose_no_update_and_do_not_wait_for_each_other_for_ever():
    assert run_threads(8, 40, seconds=120).total() > 100
