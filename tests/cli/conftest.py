"""Commands that tests run in this process."""

import pytest

from tfpolicies.cli import main


@pytest.fixture
def refuse(capsys):
    """A function that runs a command which is refused, a list or one text; returns its message."""

    def run(words, status=2):
        capsys.readouterr()
        assert main(words.split() if isinstance(words, str) else words) == status
        return capsys.readouterr().err

    return run


@pytest.fixture
def succeed(capsys):
    """A function that runs a command, a list or one text; returns what it prints."""

    def run(words):
        capsys.readouterr()
        assert main(words.split() if isinstance(words, str) else words) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder, of which modules are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path
