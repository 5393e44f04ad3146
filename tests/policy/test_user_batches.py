"""Batches of users: actions outside of their space are refused."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import PLANE, TWO, assert_equal, batch_for, make
from tfpolicies import DQNTF2Policy, PGTF2Policy, PPOTF1Policy, PPOTF2Policy, SACTF2Policy
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import BatchError
from tfpolicies.testing.random_batches import random_batch

pytestmark = pytest.mark.usefixtures("kept_programs")

MANY = spaces.MultiDiscrete([2, 3])
PARTS = spaces.Dict({"which": TWO, "how": PLANE})
MEMORY = {"fcnet_hiddens": [4], "use_gru": True, "lstm_cell_size": 4, "max_seq_len": 3}


def make_batch(policy, row, value, part=None):
    """Returns a batch of six rows in which the action of one is another."""
    batch = random_batch(policy, 6, seed=0)
    actions = batch["actions"] if part is None else batch["actions"][part]
    actions[row] = value
    return batch


METHODS = {"learn_on_batch": (), "learn_epochs": (1, 3)}
METHODS |= {"compute_gradients": (), "load_batch_into_buffer": ()}


def assert_refused(policy, batch, words, method="learn_on_batch"):
    before, steps = policy.get_weights(), policy.get_state()["global_timestep"]
    with pytest.raises(BatchError, match=words):
        getattr(policy, method)(batch, *METHODS[method])
    assert_equal(policy.get_weights(), before)
    assert policy.get_state()["global_timestep"] == steps


@pytest.mark.core
@pytest.mark.parametrize("cls", [PPOTF2Policy, PPOTF1Policy, PGTF2Policy, DQNTF2Policy])
@pytest.mark.parametrize("value", [2, 5, -1])
def test_choices_that_do_not_exist_are_refused(cls, value):
    policy = make(cls)
    words = (
        rf"'actions' must be choices of Discrete\(2\), counted from 0, but row 4 is {value}; "
        r"1 of 6 rows are wrong\. Correct them, or leave them out"
    )
    assert_refused(policy, make_batch(policy, 4, value), words)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [{"fcnet_hiddens": [4]}, MEMORY], ids=["plain", "memory"])
def test_every_learning_method_refuses_them(method, model):
    policy = make(model=model)
    assert_refused(policy, make_batch(policy, [1, 5], [7, 7]), "row 1 is 7; 2 of 6 rows", method)
    getattr(policy, method)(random_batch(policy, 6, seed=0), *METHODS[method])


@pytest.mark.parametrize(
    ("actions", "part", "value", "words"),
    [
        (MANY, None, [1, 3], r"MultiDiscrete\(\[2 3\]\).*row 2 is \[1, 3\]"),
        (MANY, None, [2, 0], r"row 2 is \[2, 0\]"),
        (spaces.MultiBinary(2), None, [0, 2], r"MultiBinary\(2\).*row 2 is \[0, 2\]"),
        (spaces.Discrete(3, start=5), None, 5, r"counted from 0, but row 2 is 5"),
        (spaces.Box(-2, 2, (1,), np.int8), None, 5, r"counted from 0, but row 2 is \[5\]"),
        (PARTS, "which", 2, r"'actions_which' must be choices of Discrete\(2\)"),
        (PARTS, "how", [0.0, np.nan], r"'actions_how' must be finite, but row 2 is \[0\.0, nan"),
        (PLANE, None, [np.inf, 0.0], r"'actions' must be finite, but row 2 is \[inf"),
    ],
)
def test_each_part_of_a_space_is_checked(actions, part, value, words):
    policy = make(actions=actions)
    assert_refused(policy, make_batch(policy, 2, value, part), words)


@pytest.mark.parametrize(
    ("cls", "stat"), [(PPOTF2Policy, "total_loss"), (SACTF2Policy, "actor_loss")]
)
def test_real_numbers_may_exceed_their_bounds(cls, stat):
    policy = make(cls, actions=PLANE)
    result = policy.learn_on_batch(make_batch(policy, 3, [1.5, -7.0]))
    assert np.isfinite(result["learner_stats"][stat])


@pytest.mark.parametrize("cls", [DQNTF2Policy, SACTF2Policy])
def test_rows_without_weights_have_equal_weights(cls):
    batch = batch_for(make(cls), 6)
    twins = [make(cls) for _ in range(2)]
    plain = SampleBatch({name: x for name, x in batch.items() if name != "weights"})
    assert "weights" in batch
    results = [p.learn_on_batch(x) for p, x in zip(twins, (batch, plain), strict=True)]
    assert results[0]["learner_stats"] == results[1]["learner_stats"]
    assert_equal(*(policy.get_weights() for policy in twins))
