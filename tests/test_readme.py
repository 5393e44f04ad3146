import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_python_of_the_readme_runs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 8
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["actions"].shape == (2,)
    assert names["algorithm"].iteration == 10
    assert names["action"] in (0, 1)
    assert set(names["pair"].worker.policy_map) == {"left", "right", "left_v1"}
    assert len(names["league"]) == 101
    assert [batch.actions.shape for batch in names["found"].values()] == [(3,)] * 100
    logits, value = names["trained_model"](np.zeros((1, 6), np.float32))
    assert (logits.shape, value.shape) == ((1, 3), (1, 1))


@pytest.mark.core
def test_every_file_that_the_readme_names_is_there() -> None:
    text = README.read_text()
    named = set(re.findall(r"`((?:docs|examples|benchmarks)/[\w./]*|[A-Z]+\.md)`", text))
    named |= set(re.findall(r"\]\(([\w./]+)\)", text))
    assert "docs/images/cartpole.png" in named
    assert [name for name in named if not (README.parent / name).exists()] == []


@pytest.mark.core
def test_every_option_that_the_readme_names_exists() -> None:
    from tfpolicies.cli.arguments import _parsers

    commands = _parsers()[1]
    known = {option for command in commands.values() for option in command.options()}
    used = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", README.read_text()))
    assert used - known == set()
