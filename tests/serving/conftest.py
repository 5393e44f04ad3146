"""Exports that the tests of several files serve."""

import pytest

from helpers.serving import export, policy_of


@pytest.fixture(scope="session")
def mlp(tmp_path_factory):
    """The folder of an export without a memory."""
    return str(export(policy_of("mlp"), tmp_path_factory.mktemp("exports") / "mlp"))
