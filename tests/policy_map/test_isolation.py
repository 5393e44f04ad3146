"""Policies in one map have nothing to do with each other, nor with TensorFlow's global state."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers.factories import OBS, assert_equal, batch_for, make, rows_of
from soak.memory import resident_megabytes
from soak.policy_map_isolation import run
from tfpolicies import DQNTF1Policy, PGTF1Policy, PolicyMap, PPOTF1Policy

ROWS = rows_of(OBS, 6)


def test_policies_of_all_kinds_in_one_map_are_as_if_apart():
    statistics = run(accesses=240, threads=2)
    assert statistics.evictions > 30
    assert statistics.hits > 30


@pytest.mark.soak
def test_graph_policies_come_and_go_two_hundred_times_and_the_memory_stays():
    """In a process of its own, whose memory nobody else changes."""
    code = f"import {__name__} as tests; tests.two_hundred_evictions()"
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests.parent), *sys.path]  # with the tools
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=environment, check=True, timeout=300)


def two_hundred_evictions():
    """Each restored policy equals itself to the bit, in what it owns and in what it does."""
    m = PolicyMap(capacity=1)
    for i, policy_class in enumerate((PPOTF1Policy, PGTF1Policy, DQNTF1Policy)):
        m[f"p{i}"] = make(policy_class, seed=i, model={"fcnet_hiddens": [64, 64]})
        m[f"q{i}"] = make(policy_class, seed=10 + i, model={"fcnet_hiddens": [64, 64]})
        for policy_id in (f"p{i}", f"q{i}"):
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
