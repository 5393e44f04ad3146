"""Damaged and hostile inputs load right or are refused, change nothing, and execute nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from soak.fuzz_states import fuzz_states


def test_damaged_states_are_refused_or_right():
    result = fuzz_states(400, seed=1)
    assert result.other == []
    assert result.loaded > 0
    assert result.refused > 100


@pytest.mark.soak
def test_hostile_files_are_refused_or_right_and_execute_nothing():
    command = [sys.executable, "-m", "soak.fuzz_attacks", "--count", "200", "--seed", "2"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert ", 0 neither loaded nor refused in order" in done.stdout


@pytest.mark.soak
def test_hostile_records_are_refused_or_read_and_execute_nothing():
    command = [sys.executable, "-m", "soak.hostile_records", "--count", "90"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "FAILED" not in done.stdout
