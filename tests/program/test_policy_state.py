"""State of one policy: its variables, and those of an update that are not copied yet."""

import numpy as np
import pytest

from helpers.factories import assert_equal
from tfpolicies.program.policy_state import PolicyState, Slot, StateLayout

SLOTS = [
    Slot("kernel", (64, 64), "float32", "model"),
    Slot("bias", (3,), "float32", "model"),
    Slot("scale", (), "float32", "model"),
    Slot("mean", (2,), "float64", "filter"),
    Slot("moment", (2,), "float32", "learner"),
]
SMALL, LEARNER = "small of model/float32", "small of learner/float32"


def make_pending_state():
    """Returns a state with filters and a pending update, and the variables of the update."""
    state = PolicyState(StateLayout(SLOTS), [0.1], np.random.default_rng(0))
    state.write({"mean": np.array([8.0, 9.0])})
    kernel = np.arange(4096, dtype=np.float32)
    small, moment = np.float32([1, 2, 3, 4]), np.float32([5, 6])
    with state.lock:
        state.set_pending_update({"kernel": kernel, SMALL: small, LEARNER: moment})
    by_key = {"bias": small[:3], "scale": small[3], "moment": moment}
    return state, {"kernel": kernel.reshape(64, 64), **by_key}


@pytest.mark.core
def test_updates_have_large_variables_singly_and_small_ones_joined():
    buffers = StateLayout(SLOTS).buffers
    keys = {name: [slot.key for slot in slots] for name, slots in buffers.items()}
    assert keys == {"kernel": ["kernel"], SMALL: ["bias", "scale"], LEARNER: ["moment"]}


@pytest.mark.core
def test_acting_views_a_pending_update_and_copies_nothing():
    state, by_key = make_pending_state()
    with state.lock:
        result = state.acting_arrays
        assert result is state.acting_arrays
        for key in ("kernel", "bias", "scale"):
            np.testing.assert_array_equal(result[key], by_key[key])
        assert np.shares_memory(result["kernel"], by_key["kernel"])
        assert result["mean"].tolist() == [8.0, 9.0]
        flat = np.concatenate([np.arange(4096), [1, 2, 3, 4]]).astype(np.float32)
        assert_equal(state.acting_segments, {"model/float32": flat, "filter/float64": [8.0, 9.0]})
        assert state.pending_update is not None


@pytest.mark.core
def test_a_pending_update_is_copied_when_the_arrays_are_read():
    state, by_key = make_pending_state()
    version = state.version
    expected = {**by_key, "mean": [8.0, 9.0]}
    assert_equal(state.arrays, {slot.key: expected[slot.key] for slot in SLOTS})
    assert (state.pending_update, state.version) == (None, version)
    assert not np.shares_memory(state.arrays["kernel"], by_key["kernel"])
    with state.lock:
        assert state.acting_arrays is state.arrays
