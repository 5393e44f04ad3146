"""Files that an earlier version wrote load, act and train on as they did then."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.stored_formats import played

STORED = Path(__file__).parent / "stored"


@pytest.fixture(scope="module")
def expected():
    with np.load(STORED / "expected.npz") as stored:
        return dict(stored)


@pytest.mark.soak
def test_files_of_an_earlier_version_give_what_they_gave(expected):
    found = {}
    for name, arrays in played(STORED):
        for key, array in arrays.items():
            np.testing.assert_allclose(
                array, expected[f"{name}/{key}"], rtol=1e-4, atol=1e-5, err_msg=f"{name}/{key}"
            )
            found[f"{name}/{key}"] = array
    assert found.keys() == expected.keys()
