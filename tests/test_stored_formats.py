"""Files that earlier commits wrote load, act and train on as they did then."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.stored_formats import played

STORED = Path(__file__).parent / "stored"
COMMITS = ("bb9fcaf", "18d25f4")


@pytest.mark.soak
@pytest.mark.parametrize("commit", COMMITS)
def test_files_of_an_earlier_commit_give_what_they_gave(commit):
    with np.load(STORED / commit / "expected.npz") as stored:
        expected = dict(stored)
    answers = {
        f"{name}/{key}": array
        for name, arrays in played(STORED / commit)
        for key, array in arrays.items()
    }
    assert answers.keys() >= expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(answers[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("commit", COMMITS)
def test_each_set_of_stored_files_names_the_commit_that_wrote_it(commit):
    assert json.loads((STORED / commit / "versions.json").read_text())["commit"] == commit
