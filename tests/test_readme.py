import re
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent
README = HOME / "README.md"


@pytest.mark.core
def test_the_readme_can_be_read_at_once():
    assert len(README.read_text().splitlines()) <= 120


@pytest.mark.core
def test_every_file_that_the_readme_names_is_there():
    text = README.read_text()
    named = {HOME / name for name in re.findall(r"`((?:docs|examples|benchmarks)/[\w./]*)`", text)}
    named |= {README.parent / name for name in re.findall(r"\]\(([\w./]+)\)", text)}
    assert len(named) > 2
    assert [name for name in named if not name.exists()] == []
