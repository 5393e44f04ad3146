"""An algorithm that tests of several files export."""

import pytest

from tfpolicies import PGConfig


@pytest.fixture
def small_algorithm():
    config = PGConfig().environment("CartPole-v1")
    config.framework("tf2", inference="tf", jit_compile=False)
    algorithm = config.training(model={"fcnet_hiddens": [4]}).debugging(log_level="ERROR").build()
    yield algorithm
    algorithm.stop()
