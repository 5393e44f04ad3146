"""Replay buffers: the rows they keep, samples, states, and refusals."""

import json

import numpy as np
import pytest

from helpers.replay import make_rows
from tfpolicies.batch.sample_batch import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from tfpolicies.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    UnknownPolicyError,
    UsageError,
)
from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer
from tfpolicies.replay.ring_buffer import ReplayBuffer
from tfpolicies.storage.json_values import decode_value, encode_value


def get_kept(buffer):
    return sorted(set(buffer.sample(2000)["actions"].tolist()))


def test_the_newest_rows_are_kept_and_columns_stay_together():
    buffer = ReplayBuffer(5, seed=1)
    for first, stop, oldest in [(0, 3, 0), (3, 6, 1), (6, 8, 3), (8, 20, 15)]:
        buffer.add(make_rows(first, stop))
        assert get_kept(buffer) == list(range(oldest, stop))
        assert (len(buffer), buffer.num_added) == (stop - oldest, stop)
    batch = buffer.sample(50)
    assert batch["obs"].dtype == np.float32
    np.testing.assert_array_equal(batch["obs"], np.stack([batch["actions"], -batch["actions"]], 1))


def test_any_cuts_of_the_same_rows_fill_the_buffer_alike():
    rng = np.random.default_rng(0)
    for capacity in (1, 7, 8, 100):
        cuts = np.sort(rng.integers(0, 60, size=9))
        buffer, whole = ReplayBuffer(capacity, seed=3), ReplayBuffer(capacity, seed=3)
        for first, stop in zip([0, *cuts], [*cuts, 60], strict=True):
            buffer.add(make_rows(first, stop))
        whole.add(make_rows(0, 60))
        expected = list(range(max(60 - capacity, 0), 60))
        assert get_kept(buffer) == expected
        for each in (buffer, whole):
            arrays = [segment.get_arrays()["actions"] for _, segment in each.get_state()["rows"]]
            assert np.concatenate(arrays).tolist() == expected


def test_every_row_is_sampled_equally_often():
    buffer = ReplayBuffer(10, seed=0)
    buffer.add(make_rows(0, 14))
    counts = np.bincount(buffer.sample(100_000)["actions"] - 4, minlength=10)
    sigma = np.sqrt(100_000 * 0.1 * 0.9)
    assert (np.abs(counts - 10_000) < 4 * sigma).all()


def test_rows_are_copied_both_ways():
    buffer, batch = ReplayBuffer(4, seed=0), make_rows(1, 5)
    buffer.add(batch)
    batch["actions"][:] = 0
    buffer.sample(9)["actions"][:] = 0
    assert get_kept(buffer) == [1, 2, 3, 4]


def test_nested_observations_keep_their_structure():
    buffer = ReplayBuffer(3, seed=0)
    for i in range(5):
        obs = {"image": np.full((1, 2, 2), i, np.uint8), "pair": (np.array([i]), np.array([-i]))}
        buffer.add(SampleBatch(obs=obs, rewards=[float(i)], infos=[{"i": i}]))
    batch = buffer.sample(20)
    assert set(batch) == {"obs", "rewards"}
    assert batch["obs"]["image"].shape == (20, 2, 2)
    np.testing.assert_array_equal(batch["obs"]["image"][:, 1, 1], batch["rewards"])
    np.testing.assert_array_equal(batch["obs"]["pair"][1], -batch["rewards"])
    assert set(batch["rewards"].tolist()) == {2.0, 3.0, 4.0}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (SampleBatch(obs=np.zeros((2, 2), np.float32)), r"lacks \['actions'\]"),
        (SampleBatch(make_rows(0, 2), new_obs=np.zeros(2)), r"adds \['new_obs'\]"),
        (SampleBatch(obs=np.zeros((2, 3), np.float32), actions=[0, 1]), r"'obs' must be float32"),
        (SampleBatch(make_rows(0, 2), actions=np.zeros(2)), r"'actions' must be int64"),
        (SampleBatch(make_rows(0, 2), seq_lens=[2]), "sequences"),
        (
            SampleBatch(make_rows(0, 2), actions=np.array(["a", None])),
            "column 'actions' holds object",
        ),
        (SampleBatch(obs=(np.zeros(1),), actions=[0]), r"adds \['obs/\[0\]'\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_change_nothing(batch, message):
    buffer = ReplayBuffer(4, seed=0)
    buffer.add(make_rows(1, 3))
    with pytest.raises(BatchError, match=message):
        buffer.add(batch)
    assert (buffer.num_added, get_kept(buffer)) == (2, [1, 2])


def test_arguments_are_checked():
    with pytest.raises(ConfigError, match=r"`capacity`.*got 0"):
        ReplayBuffer(0)
    with pytest.raises(ConfigError, match="`train_batch_size`"):
        MultiAgentReplayBuffer(5, train_batch_size=0)
    buffer = ReplayBuffer(3)
    with pytest.raises(UsageError, match="empty ReplayBuffer"):
        buffer.sample(1)
    buffer.add(SampleBatch())
    buffer.add(make_rows(0, 0))
    assert len(buffer) == 0
    buffer.add(make_rows(0, 1))
    assert buffer.sample(0).count == 0
    with pytest.raises(UsageError, match="-1"):
        buffer.sample(-1)


def test_a_restored_buffer_continues_exactly():
    buffer = ReplayBuffer(5, seed=2)
    buffer.add(make_rows(0, 7))
    buffer.sample(3)
    state = buffer.get_state()
    rng = decode_value(json.loads(json.dumps(encode_value(state["rng"]))))
    restored = ReplayBuffer(5, seed=9)
    restored.set_state({**state, "rng": rng})
    for each in (buffer, restored):
        each.add(make_rows(7, 9))
    assert restored.sample(20)["actions"].tolist() == buffer.sample(20)["actions"].tolist()
    assert restored.stats() == buffer.stats()
    restored.set_state(ReplayBuffer(5).get_state())
    assert (len(restored), restored.stats()["size_bytes"]) == (0, 0)


def test_damaged_or_foreign_states_are_refused_and_change_nothing():
    buffer = ReplayBuffer(5, seed=2)
    buffer.add(make_rows(1, 4))
    good = buffer.get_state()
    bad = [
        {key: value for key, value in good.items() if key != "rng"},
        {**good, "capacity": 6},
        {**good, "num_added": 4},
        {**good, "columns": {}},
        {**good, "rng": {}},
    ]
    for state in bad:
        with pytest.raises(CheckpointError):
            buffer.set_state(state)
    assert get_kept(buffer) == [1, 2, 3]


def test_each_policy_has_its_own_rows():
    buffer = MultiAgentReplayBuffer(10, seed=0)
    buffer.add(MultiAgentBatch({"a": make_rows(0, 3), "b": make_rows(5, 6)}, env_steps=3))
    buffer.add(make_rows(8, 9))
    assert set(buffer.sample(50, "a")["actions"].tolist()) == {0, 1, 2}
    assert set(buffer.sample(50, "b")["actions"].tolist()) == {5}
    assert set(buffer.sample(5, DEFAULT_POLICY_ID)["actions"].tolist()) == {8}
    assert (len(buffer), buffer.num_added, buffer.stats()["a"]["num_entries"]) == (5, 5, 3)
    with pytest.raises(UnknownPolicyError, match="'c'"):
        buffer.sample(1, "c")
    wrong = MultiAgentBatch({"a": make_rows(0, 3), "b": SampleBatch(obs=[1])}, env_steps=3)
    with pytest.raises(BatchError, match="Policy 'b'"):
        buffer.add(wrong)
    assert buffer.num_added == 5


def test_a_policys_samples_do_not_depend_on_the_others():
    alone, together = MultiAgentReplayBuffer(9, seed=4), MultiAgentReplayBuffer(9, seed=4)
    together.add(MultiAgentBatch({"x": make_rows(0, 3), "a": make_rows(0, 9)}, env_steps=9))
    alone.add(MultiAgentBatch({"a": make_rows(0, 9)}, env_steps=9))
    restored = MultiAgentReplayBuffer(9)
    restored.set_state(together.get_state())
    samples = [b.sample(20, "a")["actions"].tolist() for b in (alone, together, restored)]
    assert samples[0] == samples[1] == samples[2]
    samples = [b.sample(20, "x")["actions"].tolist() for b in (together, restored)]
    assert samples[0] == samples[1]


def test_replay_waits_for_enough_rows():
    buffer = MultiAgentReplayBuffer(100, seed=0, train_batch_size=4, learning_starts=6)
    assert buffer.replay("a") is None
    for first, ready in ((0, False), (5, True)):
        buffer.add(MultiAgentBatch({"a": make_rows(first, first + 5)}, env_steps=5))
        batch = buffer.replay(policy_id="a")
        assert (batch is not None and batch.count == 4) == ready
    small = ReplayBuffer(3, seed=0, train_batch_size=8)
    small.add(make_rows(0, 2))
    assert small.replay() is None
    small.add(make_rows(2, 4))
    assert small.replay().count == 8
