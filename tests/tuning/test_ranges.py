import pytest

from tfpolicies.errors import ConfigError
from tfpolicies.tuning import choice, int_uniform, log_uniform, share_of_steps, uniform
from tfpolicies.tuning.ranges import parse_range

pytestmark = pytest.mark.core

RANGES = [
    choice([[64, 64], [256, 256]]),
    choice([True, None, "relu", 3]),
    uniform(-1.0, 2.0),
    log_uniform(1e-5, 1e-2),
    int_uniform(1, 20),
    share_of_steps(0.0, 0.5),
]


@pytest.mark.parametrize("setting_range", RANGES, ids=str)
def test_a_range_is_the_same_after_json(setting_range):
    assert parse_range("x", setting_range.to_json()) == setting_range


@pytest.mark.parametrize("value", [0.1, "adam", None, [64, 64], {"type": "adam"}, {"a": 1, "b": 2}])
def test_other_values_are_no_ranges(value):
    assert parse_range("x", value) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: choice([1]), "two different values"),
        (lambda: choice([1, 1]), "two different values"),
        (lambda: choice("ab"), "two different values"),
        (lambda: choice([object(), 1]), "two different values"),
        (lambda: uniform(2.0, 1.0), "the lower one first"),
        (lambda: uniform(0.0, float("inf")), "finite"),
        (lambda: uniform("a", 1), "finite"),
        (lambda: log_uniform(0.0, 1.0), "Use uniform"),
        (lambda: int_uniform(1.0, 2.0), "whole numbers"),
        (lambda: int_uniform(True, 2), "whole numbers"),
        (lambda: share_of_steps(0.5, 2.0), r"in \[0, 1\]"),
        (lambda: parse_range("lr", {"uniform": [1]}), r"range of lr: uniform takes \[low, high\]"),
        (lambda: parse_range("lr", {"uniform": 3}), "range of lr"),
        (lambda: parse_range("lr", {"choice": 3}), "range of lr: choice takes a list"),
    ],
)
def test_an_invalid_range_is_an_error_that_says_the_rule(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
