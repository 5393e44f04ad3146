import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HOME = Path(__file__).parent.parent
README, GUIDE = HOME / "README.md", HOME / "docs" / "README.md"


def run_python_of(page: Path) -> dict[str, Any]:
    """Runs the Python of a page in order; returns the names that are there then."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    return names


@pytest.mark.soak
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_python_of(README)
    assert names["algorithm"].counters["num_env_steps_sampled"] >= 20_000
    assert names["action"] in (0, 1)
    assert {path.name for path in Path().iterdir()} == {"runs", "exported"}


@pytest.mark.soak
def test_the_python_of_the_guide_runs_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_python_of(GUIDE)
    assert names["actions"].shape == (2,)
    assert names["algorithm"].iteration == 10
    assert names["learned"].ended_by in ("steps", "callback")
    assert names["action"] in (0, 1)
    assert abs(names["torque"][0]) <= 2.0
    assert names["recorded"].lengths == [200]
    assert Path("videos/pendulum.mp4").stat().st_size > 10_000
    assert set(names["pair"].worker.policy_map) == {"left", "right", "left_v1"}
    assert len(names["league"]) == 101
    assert [batch.actions.shape for batch in names["found"].values()] == [(3,)] * 100
    logits, value = names["trained_model"](np.zeros((1, 6), np.float32))
    assert (logits.shape, value.shape) == ((1, 3), (1, 1))


@pytest.mark.core
def test_the_readme_can_be_read_at_once():
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.core
@pytest.mark.parametrize("page", [README, GUIDE], ids=["readme", "guide"])
def test_every_file_that_a_page_names_is_there(page):
    text = page.read_text()
    named = {HOME / name for name in re.findall(r"`((?:docs|examples|benchmarks)/[\w./]*)`", text)}
    named |= {page.parent / name for name in re.findall(r"\]\(([\w./]+)\)", text)}
    assert len(named) > 2
    assert [name for name in named if not name.exists()] == []


@pytest.mark.core
@pytest.mark.parametrize("page", [README, GUIDE], ids=["readme", "guide"])
def test_every_option_that_a_page_names_exists(page):
    from tfpolicies.cli.arguments import _make_parsers

    commands = _make_parsers()[1]
    known = {option for command in commands.values() for option in command.options()}
    used = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
    assert used - known == set()
