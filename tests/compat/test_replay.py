"""RLlib's buffer classes: items, eviction, modes, priorities, states."""

import numpy as np
import pytest

from tfpolicies import MultiAgentBatch, SampleBatch, compat
from tfpolicies.errors import BatchError, CheckpointError, UnknownPolicyError, UsageError


def rows(first, stop, **columns):
    return SampleBatch(actions=np.arange(first, stop), **columns)


def episodes():
    """Returns whole episodes of 2 and 3 steps, and one that continues."""
    ends = np.array([0, 1, 0, 0, 0, 0], bool)
    cut = np.array([0, 0, 0, 0, 1, 0], bool)
    t, ids = np.array([0, 1, 0, 1, 2, 0]), np.array([7, 7, 8, 8, 8, 9])
    return rows(0, 6, t=t, eps_id=ids, terminateds=ends, truncateds=cut)


def sequences():
    memory = np.array([[1.0], [2.0]], np.float32)
    return rows(0, 7, seq_lens=np.array([3, 4]), state_in_0=memory)


def get_items(buffer):
    return [item["actions"].tolist() for item in buffer._storage]


@pytest.mark.parametrize(
    ("unit", "batch", "expected"),
    [
        ("timesteps", rows(0, 3), [[0], [1], [2]]),
        (compat.StorageUnit.FRAGMENTS, rows(0, 3), [[0, 1, 2]]),
        ("episodes", episodes(), [[0, 1], [2, 3, 4]]),
        ("sequences", sequences(), [[0, 1, 2], [3, 4, 5, 6]]),
    ],
)
def test_items_are_those_of_the_storage_unit(unit, batch, expected):
    buffer = compat.ReplayBuffer(100, unit, seed=0)
    buffer.add(batch)
    assert get_items(buffer) == expected
    assert (len(buffer), buffer.stats()["added_count"]) == (len(expected), sum(map(len, expected)))
    samples = buffer.sample(50)
    assert set(samples["actions"].tolist()) == {x for item in expected for x in item}
    if unit == "sequences":
        assert set(samples["seq_lens"].tolist()) == {3, 4}


def test_a_full_buffer_replaces_its_oldest_items():
    buffer = compat.ReplayBuffer(6, "fragments")
    for first in (0, 2, 4, 6):
        buffer.add(rows(first, first + 2))
    assert get_items(buffer) == [[6, 7], [2, 3], [4, 5]]
    stats = buffer.stats()
    assert (stats["eviction_started"], stats["added_count_wrapped"]) == (True, 2)
    assert stats["est_size_bytes"] == 6 * 8


def test_a_buffer_copies_rows_both_ways():
    buffer, batch = compat.ReplayBuffer(4, "fragments"), rows(1, 3)
    buffer.add(batch)
    batch["actions"][:] = 0
    buffer.sample(1)["actions"][:] = 0
    assert get_items(buffer) == [[1, 2]]


def test_a_reservoir_keeps_every_item_equally_likely():
    counts = np.zeros(30)
    for seed in range(600):
        buffer = compat.ReservoirReplayBuffer(10, seed=seed)
        buffer.add(rows(0, 30))
        counts[[item["actions"][0] for item in buffer._storage]] += 1
    assert counts.sum() == 6000
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert chi_square < 58.3  # of 29 degrees of freedom, the 99.9 % quantile
    stats = buffer.stats()
    assert (stats["num_entries"], stats["num_add_calls"]) == (10, 30)
    assert 0 < stats["num_evicted"] <= 20


def test_weights_and_indexes_come_with_every_row_of_an_item():
    buffer = compat.PrioritizedReplayBuffer(10, "fragments", alpha=1.0, seed=0)
    buffer.add(rows(0, 2), weight=4.0)
    buffer.add(rows(2, 5))  # the greatest so far, which is 1 while nothing was learned
    batch = buffer.sample(20, beta=0.5)
    first = batch["actions"] < 2
    np.testing.assert_array_equal(batch["batch_indexes"], np.where(first, 0, 1))
    np.testing.assert_allclose(batch["weights"], np.where(first, 0.5, 1.0))
    buffer.update_priorities([0, 0], [9.0, 1e-9])
    assert (buffer.sample(50, beta=1.0)["batch_indexes"] == 1).all()
    for wrong in (([2], [1.0]), ([0], [0.0]), ([0], [np.nan]), ([0, 1], [1.0])):
        with pytest.raises(UsageError):
            buffer.update_priorities(*wrong)


def test_steps_of_all_policies_are_drawn_together_in_lockstep():
    parts = {
        name: rows(first, first + 3, t=np.arange(3), eps_id=[5] * 3, agent_index=[i] * 3)
        for i, (name, first) in enumerate({"a": 0, "b": 10}.items())
    }
    buffer = compat.MultiAgentReplayBuffer(9, replay_mode="lockstep", seed=0)
    buffer.add(MultiAgentBatch(parts, 3))
    samples = buffer.sample(20)
    np.testing.assert_array_equal(samples["a"]["actions"] + 10, samples["b"]["actions"])
    assert ([*buffer.replay_buffers], len(buffer)) == (["__all__"], 3)
    with pytest.raises(UsageError, match="leave policy_id out"):
        buffer.sample(1, policy_id="a")
    with pytest.raises(UsageError, match="keeps steps of all policies, not episodes"):
        compat.MultiAgentReplayBuffer(9, "episodes", replay_mode=compat.ReplayMode.LOCKSTEP)


def test_policies_are_drawn_separately_by_default():
    buffer = compat.MultiAgentReplayBuffer(9, seed=0)
    buffer.add(MultiAgentBatch({"a": rows(0, 3), "b": rows(10, 11)}, 3))
    buffer.add(rows(20, 21))
    counts = {pid: len(rows) for pid, rows in buffer.sample(4).policy_batches.items()}
    assert counts == {"a": 4, "b": 4, "default_policy": 4}
    only = buffer.sample(4, policy_id="b")
    assert ([*only.policy_batches], set(only["b"]["actions"].tolist())) == (["b"], {10})
    with pytest.raises(UnknownPolicyError, match="'c'"):
        buffer.sample(1, policy_id="c")


def test_long_sequences_are_cut_and_begin_without_memory_by_default():
    def store(**settings):
        buffer = compat.MultiAgentReplayBuffer(99, "sequences", **settings)
        buffer.add(sequences())
        return buffer.replay_buffers["default_policy"]._storage

    items = store(replay_sequence_length=3)
    whole = store(replay_sequence_override=False, replay_zero_init_states=False)
    assert [x["actions"].tolist() for x in items] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [x["seq_lens"].tolist() for x in items] == [[3], [3], [1]]
    assert all((x["state_in_0"] == 0).all() for x in items)
    assert [x["state_in_0"].tolist() for x in whole] == [[[1.0]], [[2.0]]]


def test_errors_become_priorities_of_each_policy():
    buffer = compat.MultiAgentPrioritizedReplayBuffer(
        9, prioritized_replay_alpha=1.0, prioritized_replay_beta=1.0, prioritized_replay_eps=0.5,
        seed=0,
    )  # fmt: skip
    weights = np.array([1.0, 1.0, 3.0], np.float32)
    buffer.add(MultiAgentBatch({"a": rows(0, 3, weights=weights), "b": rows(5, 7)}, 3))
    samples = buffer.sample(60).policy_batches["a"]
    np.testing.assert_allclose(samples["weights"], np.where(samples["actions"] == 2, 1 / 3, 1.0))
    buffer.update_priorities({"a": (np.array([0, 1]), np.array([-1.5, 0.0]))})
    masses = buffer.replay_buffers["a"].get_state()["priorities"]["masses"]
    assert masses.tolist() == [2.0, 0.5, 3.0]
    with pytest.raises(UnknownPolicyError):
        buffer.update_priorities({"c": (np.array([0]), np.array([1.0]))})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (compat.ReplayBuffer, {}),
        (compat.PrioritizedReplayBuffer, {"beta": 0.4}),
        (compat.ReservoirReplayBuffer, {}),
        (compat.MultiAgentReplayBuffer, {}),
        (compat.MultiAgentPrioritizedReplayBuffer, {}),
    ],
)
def test_a_restored_buffer_continues_to_the_bit(kind, values):
    buffer, twin = kind(8, seed=1), kind(8, seed=2)
    buffer.add(rows(0, 11))
    buffer.sample(3, **values)
    twin.set_state(buffer.get_state())
    for each in (buffer, twin):
        each.add(rows(11, 14))
    for _ in range(3):
        one, other = (each.sample(9, **values).as_multi_agent() for each in (buffer, twin))
        for name, column in one["default_policy"].items():
            np.testing.assert_array_equal(column, other["default_policy"][name])
    assert twin.stats() == buffer.stats()
    with pytest.raises(CheckpointError):
        twin.set_state({"_storage": []})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compat.ReplayBuffer(0), "capacity must be an integer >= 1"),
        (lambda: compat.ReplayBuffer(5, "rows"), "storage_unit must be one of"),
        (
            lambda: compat.MultiAgentReplayBuffer(5, replay_mode="apart"),
            "replay_mode must be one of",
        ),
        (lambda: compat.MultiAgentReplayBuffer(5, replay_burn_in=2), "replay_burn_in must be 0"),
        (lambda: compat.ReplayBuffer(5).sample(1), "no items to sample"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(UsageError, match=message):
        make()
    buffer = compat.MultiAgentReplayBuffer(5, underlying_buffer_config={"type": "Ring"})
    with pytest.raises(UsageError, match="must be a class or one of"):
        buffer.add(rows(0, 1))
    with pytest.raises(BatchError, match="needs sequences"):
        compat.ReplayBuffer(5, "sequences").add(rows(0, 1))
