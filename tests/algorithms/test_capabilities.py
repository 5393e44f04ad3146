"""The stored capabilities of algorithms are those that building them shows."""

import pytest
from gymnasium import spaces

from tfpolicies import PG, PGTF2Policy
from tfpolicies.algorithms.algorithm_registry import find_algorithm, get_registered_names
from tfpolicies.algorithms.capabilities import (
    ACTIONS,
    OBSERVATIONS,
    find_capabilities,
    read_capabilities,
)
from tfpolicies.errors import UnsupportedSpaceError

STORED = read_capabilities()
SLOW = [pytest.param(x, marks=pytest.mark.release) for x in get_registered_names() if x != "PG"]


@pytest.mark.parametrize("name", [pytest.param("PG", marks=pytest.mark.core), *SLOW])
def test_each_claim_is_that_of_a_real_build(name):
    """If it fails, run `python -m tools.capabilities`."""
    assert find_capabilities(find_algorithm(name)) == STORED[name]


def test_every_algorithm_of_the_package_has_an_entry():
    assert list(STORED) == get_registered_names()
    for capabilities in STORED.values():
        assert set(capabilities.actions) <= set(ACTIONS)
        assert set(capabilities.observations) == set(OBSERVATIONS)
        assert capabilities.runtimes == ("function", "session", "onnx")


def test_an_algorithm_with_other_policies_has_other_capabilities():
    class OneChoice(PGTF2Policy):
        def validate_spaces(self, observation_space, action_space, config):
            if not isinstance(action_space, spaces.Discrete):
                raise UnsupportedSpaceError("Discrete actions only.")

    class Narrow(PG):
        """Takes Discrete actions only."""

        policy_classes = {"tf2": OneChoice}

    assert STORED["PG"].actions == ("discrete", "multi-discrete", "continuous", "nested")
    capabilities = find_capabilities(Narrow)
    assert capabilities.actions == ("discrete",)
    assert capabilities.runtimes == ("function", "onnx")
