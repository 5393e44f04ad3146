"""Files that earlier commits wrote load, act and train on as they did then."""

import json
from pathlib import Path

import numpy as np
import pytest

from soak.stored_formats import play, stored_names

STORED = Path(__file__).parents[1] / "stored"
COMMITS = ("bb9fcaf", "18d25f4")
FILES = [(commit, name) for commit in COMMITS for name in stored_names(STORED / commit)]


def load_expected(commit):
    with np.load(STORED / commit / "expected.npz") as arrays:
        return dict(arrays)


@pytest.mark.soak
@pytest.mark.parametrize(("commit", "name"), FILES)
def test_files_of_an_earlier_commit_give_the_stored_numbers(commit, name):
    results = play(STORED / commit, name)
    expected = {key: x for key, x in load_expected(commit).items() if key.startswith(f"{name}/")}
    assert expected.keys() <= results.keys()
    # Processors round differently, and many small updates by replayed rows build on it.
    replays = name.startswith(("algorithms/dqn", "algorithms/ddpg", "algorithms/td3"))
    atol = 5e-3 if replays else 1e-5
    for key, array in expected.items():
        np.testing.assert_allclose(results[key], array, rtol=1e-4, atol=atol, err_msg=key)


@pytest.mark.parametrize("commit", COMMITS)
def test_each_set_of_stored_files_is_complete_and_names_the_commit_that_wrote_it(commit):
    assert json.loads((STORED / commit / "versions.json").read_text())["commit"] == commit
    stored = stored_names(STORED / commit)
    assert all(
        key.startswith(tuple(f"{name}/" for name in stored)) for key in load_expected(commit)
    )
    assert len(stored) == {"bb9fcaf": 12, "18d25f4": 34}[commit]
