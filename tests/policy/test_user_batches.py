"""Batches that a user gives to learn from: actions outside of their space are refused."""

import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from tfpolicies import DQNTF2Policy, PGTF2Policy, PPOTF1Policy, PPOTF2Policy, SACTF2Policy
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.errors import BatchError
from tfpolicies.testing.random_batches import random_batch

pytestmark = pytest.mark.usefixtures("kept_programs")

MANY = spaces.MultiDiscrete([2, 3])
PARTS = spaces.Dict({"which": factories.TWO, "how": factories.PLANE})
MEMORY = {"fcnet_hiddens": [4], "use_gru": True, "lstm_cell_size": 4, "max_seq_len": 3}


def with_action(policy, row, value, part=None):
    """Returns a batch of six rows in which the action of one is another."""
    batch = random_batch(policy, 6, seed=0)
    actions = batch["actions"] if part is None else batch["actions"][part]
    actions[row] = value
    return batch


def learn_epochs(policy, batch):
    policy.learn_epochs(batch, 1, 3)


WAYS = {
    "learn_on_batch": lambda policy, batch: policy.learn_on_batch(batch),
    "learn_epochs": learn_epochs,
    "compute_gradients": lambda policy, batch: policy.compute_gradients(batch),
    "load_batch_into_buffer": lambda policy, batch: policy.load_batch_into_buffer(batch),
}


def refused(policy, batch, words, way="learn_on_batch"):
    before, steps = policy.get_weights(), policy.get_state()["global_timestep"]
    with pytest.raises(BatchError, match=words):
        WAYS[way](policy, batch)
    for key, x in policy.get_weights().items():
        np.testing.assert_array_equal(x, before[key])
    assert policy.get_state()["global_timestep"] == steps


@pytest.mark.core
@pytest.mark.parametrize("cls", [PPOTF2Policy, PPOTF1Policy, PGTF2Policy, DQNTF2Policy])
@pytest.mark.parametrize("value", [2, 5, -1])
def test_choices_that_are_not_there_are_refused(cls, value):
    policy = factories.make(cls)
    words = (
        rf"'actions' must be choices of Discrete\(2\), counted from 0, but row 4 is {value}; "
        r"1 of 6 rows are wrong\. Correct them, or leave them out"
    )
    refused(policy, with_action(policy, 4, value), words)


@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize("model", [{"fcnet_hiddens": [4]}, MEMORY], ids=["plain", "memory"])
def test_every_way_to_learn_refuses_them(way, model):
    policy = factories.make(model=model)
    refused(policy, with_action(policy, [1, 5], [7, 7]), "row 1 is 7; 2 of 6 rows", way)
    WAYS[way](policy, random_batch(policy, 6, seed=0))


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
        (factories.PLANE, None, [np.inf, 0.0], r"'actions' must be finite, but row 2 is \[inf"),
    ],
)
def test_each_part_of_a_space_has_its_rule(actions, part, value, words):
    policy = factories.make(actions=actions)
    refused(policy, with_action(policy, 2, value, part), words)


def test_real_numbers_may_lie_outside_of_their_bounds():
    for cls in (PPOTF2Policy, SACTF2Policy):
        policy = factories.make(cls, actions=factories.PLANE)
        result = policy.learn_on_batch(with_action(policy, 3, [1.5, -7.0]))
        assert np.isfinite(
            result["learner_stats"]["total_loss" if cls is PPOTF2Policy else "actor_loss"]
        )


@pytest.mark.parametrize("cls", [DQNTF2Policy, SACTF2Policy])
def test_rows_without_weights_weigh_alike(cls):
    batch = factories.batch_for(factories.make(cls), 6)
    twins = [factories.make(cls) for _ in range(2)]
    plain = SampleBatch({name: x for name, x in batch.items() if name != "weights"})
    assert "weights" in batch
    results = [p.learn_on_batch(x) for p, x in zip(twins, (batch, plain), strict=True)]
    assert results[0]["learner_stats"] == results[1]["learner_stats"]
    for key, x in twins[0].get_weights().items():
        np.testing.assert_array_equal(x, twins[1].get_weights()[key])
