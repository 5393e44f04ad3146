"""A map does what a dict of policies does, whatever is done to it, and from many threads."""

import pytest

from soak.policy_map_model import run_machine, run_threads


@pytest.mark.soak
def test_the_map_equals_a_plain_dict_of_policies():
    done = run_machine(examples=4, steps=40)
    assert done.total() > 100
    assert {"add", "act", "learn", "copy", "freeze", "pin", "evict"} <= set(done)


@pytest.mark.soak
def test_threads_lose_no_update_and_do_not_wait_for_each_other_for_ever():
    assert run_threads(8, 40, seconds=120).total() > 100
