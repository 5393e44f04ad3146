"""Damaged inputs load right or are refused with the package's own error, and change nothing."""

import pytest

from benchmarks.fuzz_states import fuzz_checkpoints, fuzz_states


@pytest.mark.parametrize(
    ("fuzz", "count"), [(fuzz_states, 400), (fuzz_checkpoints, 60)], ids=["states", "checkpoints"]
)
def test_damaged_inputs_are_refused_or_right(fuzz, count):
    result = fuzz(count, seed=1)
    assert result.other == []
    assert result.loaded > 0
    assert result.refused > count // 4
