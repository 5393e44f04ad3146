"""Chopping rows into sequences, and padding batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpolicies.batch.rnn_sequencing import chop_into_sequences, pad_batch_to_sequences_of_same_size
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.batch.view_requirement import ViewRequirement
from tfpolicies.errors import BatchError


def chop(**changes):
    arguments = {
        "feature_columns": [[4, 4, 8, 8, 8]],
        "state_columns": [[4, 5, 8, 7, 8]],
        "max_seq_len": 2,
        "episode_ids": [1, 1, 5, 5, 5],
        "unroll_ids": [2, 2, 2, 2, 2],
        "agent_indices": [0, 0, 0, 0, 0],
    }
    return chop_into_sequences(**{**arguments, **changes})


@pytest.mark.core
def test_a_new_sequence_begins_with_an_episode_or_when_the_old_one_is_full():
    features, states, lengths = chop()
    assert lengths.tolist() == [2, 2, 1]
    assert lengths.dtype == np.int32
    assert features[0].tolist() == [4, 4, 8, 8, 8, 0]
    assert states[0].tolist() == [4, 8, 8]


def test_agents_and_unrolls_begin_new_sequences_too():
    assert chop(max_seq_len=9, agent_indices=[0, 1, 1, 1, 1])[2].tolist() == [1, 1, 3]
    assert chop(max_seq_len=9, unroll_ids=[1, 1, 1, 2, 2])[2].tolist() == [2, 1, 2]
    same_sum = {"episode_ids": [5, 4, 4, 4, 4], "agent_indices": [0, 1, 1, 1, 1]}
    assert chop(max_seq_len=9, **same_sum)[2].tolist() == [1, 4]
    only_length = chop(episode_ids=None, unroll_ids=None, agent_indices=None)
    assert only_length[2].tolist() == [2, 2, 1]


def test_sequences_are_padded_by_zeros_none_or_their_last_row():
    assert chop(max_seq_len=7)[0][0].tolist() == [4, 4, 0, 8, 8, 8]
    assert chop(max_seq_len=4, dynamic_max=False)[0][0].tolist() == [4, 4, 0, 0, 8, 8, 8, 0]
    assert chop(padding="last")[0][0].tolist() == [4, 4, 8, 8, 8, 8]
    features = chop(padding="last", max_seq_len=4, dynamic_max=False)[0]
    assert features[0].tolist() == [4, 4, 4, 4, 8, 8, 8, 8]
    texts = chop(padding="last", feature_columns=[np.array(list("abcde"))])[0]
    assert texts[0].tolist() == list("abcdee")
    with pytest.raises(BatchError, match='`padding` must be "zero" or "last", but got \'first\''):
        chop(padding="first")
    nested = {"a": np.ones((5, 2)), "b": (np.array(list("abcde")),)}
    features, _, _ = chop(feature_columns=[nested])
    assert features[0]["a"].sum() == 10
    assert features[0]["b"][0].tolist() == ["a", "b", "c", "d", "e", None]


def test_lengths_and_reduced_states_can_be_arguments():
    features, states, lengths = chop(
        seq_lens=[1, 2, 2], state_columns=[[7, 8, 9]], states_already_reduced_to_init=True
    )
    assert features[0].tolist() == [4, 0, 4, 8, 8, 8]
    assert states[0].tolist() == [7, 8, 9]
    assert lengths.tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_lens": [2, 2]},
        {"seq_lens": [3, 2]},
        {"max_seq_len": 0},
        {"episode_ids": [1, 1]},
        {"state_columns": [[1, 2]]},
        {"state_columns": [[1, 2]], "states_already_reduced_to_init": True},
    ],
)
def test_lengths_that_do_not_fit_are_refused(changes):
    with pytest.raises(BatchError):
        chop(**changes)


def test_no_rows_are_no_sequences():
    no_ids = {key: [] for key in ("episode_ids", "unroll_ids", "agent_indices")}
    features, states, lengths = chop(feature_columns=[[]], state_columns=[], **no_ids)
    assert features[0].shape == (0,)
    assert states == []
    assert lengths.tolist() == []


@pytest.mark.core
def test_shuffling_moves_whole_sequences():
    features, states, lengths = chop(shuffle=True, rng=np.random.default_rng(0))
    order = np.random.default_rng(0).permutation(3)
    assert lengths.tolist() == np.array([2, 2, 1])[order].tolist()
    assert states[0].tolist() == np.array([4, 8, 8])[order].tolist()
    expected = np.array([[4, 4], [8, 8], [8, 0]])[order]
    assert features[0].tolist() == expected.ravel().tolist()


@pytest.mark.core
@given(ids=st.lists(st.integers(0, 2), max_size=12), max_seq_len=st.integers(1, 5))
def test_chopping_loses_no_row_and_mixes_no_episodes(ids, max_seq_len):
    rows = np.arange(1, len(ids) + 1)
    (feature, episode), _, lengths = chop_into_sequences(
        feature_columns=[rows, ids],
        state_columns=[],
        max_seq_len=max_seq_len,
        episode_ids=ids,
        dynamic_max=False,
    )
    assert feature[feature > 0].tolist() == rows.tolist()
    for number, length in enumerate(lengths):
        start = number * max_seq_len
        assert len(set(episode[start : start + length].tolist())) == 1
        assert (feature[start + length : start + max_seq_len] == 0).all()


def recurrent(info=None):
    return SampleBatch(
        obs={"a": np.arange(1, 6)},
        eps_id=[1, 1, 5, 5, 5],
        state_in_0=np.arange(10, 15),
        state_out_0=np.arange(5),
        infos=[info] * 5,
    )


@pytest.mark.core
@pytest.mark.parametrize("info", [{}, 7, [1, 2], (3, 4), "text", None])
def test_a_batch_with_states_is_chopped_and_padded(info):
    batch = recurrent(info)
    pad_batch_to_sequences_of_same_size(batch, 20)
    assert batch["obs"]["a"].tolist() == [1, 2, 0, 3, 4, 5]
    assert batch["infos"] == [info, info, None, info, info, info]
    assert batch["state_in_0"].tolist() == [10, 12]
    assert batch["seq_lens"].tolist() == [2, 3]
    assert (batch.zero_padded, batch.max_seq_len, batch.count) == (True, 3, 5)
    before = batch.copy()
    pad_batch_to_sequences_of_same_size(batch, 2)
    assert batch["obs"]["a"].tolist() == before["obs"]["a"].tolist()
    batch = SampleBatch(obs=[1, 2, 3], state_in_0=[7, 8], seq_lens=[1, 2])  # reduced already
    pad_batch_to_sequences_of_same_size(batch, 4)
    assert batch["obs"].tolist() == [1, 0, 2, 3]
    assert batch["state_in_0"].tolist() == [7, 8]


def test_a_window_of_states_asks_for_full_length():
    batch = recurrent()
    window = ViewRequirement("state_out_0", shift="-3:-1")
    pad_batch_to_sequences_of_same_size(batch, 4, view_requirements={"state_in_0": window})
    assert batch.max_seq_len == 4
    assert batch["obs"]["a"].shape == (8,)


def test_rows_without_states_are_padded_to_be_divisible_or_only_shuffled():
    batch = SampleBatch(obs=np.arange(1, 6), eps_id=[1, 1, 1, 2, 2])
    pad_batch_to_sequences_of_same_size(batch, 99, batch_divisibility_req=2)
    assert batch["obs"].tolist() == [1, 2, 3, 0, 4, 5]
    assert batch["seq_lens"].tolist() == [2, 1, 2]
    assert batch.zero_padded
    batch = SampleBatch(obs=np.arange(6))
    pad_batch_to_sequences_of_same_size(batch, 99, batch_divisibility_req=3)
    assert batch["obs"].tolist() == [0, 1, 2, 3, 4, 5]
    pad_batch_to_sequences_of_same_size(batch, 99, shuffle=True, rng=np.random.default_rng(3))
    assert batch["obs"].tolist() == np.random.default_rng(3).permutation(6).tolist()
    assert not batch.zero_padded


def test_only_the_named_features_are_kept():
    batch = recurrent()
    pad_batch_to_sequences_of_same_size(batch, 20, feature_keys=["obs"])
    assert set(batch) == {"obs", "state_in_0", "seq_lens"}
    batch = recurrent()
    with pytest.raises(KeyError, match="rewards"):
        pad_batch_to_sequences_of_same_size(batch, 20, feature_keys=["rewards"])
    assert not batch.zero_padded
