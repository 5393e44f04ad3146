"""MultiAgentBatch: batches by policy, and their number of env steps."""

import pickle

import numpy as np
import pytest

from tfpolicies.batch.sample_batch import (
    DEFAULT_POLICY_ID,
    MultiAgentBatch,
    SampleBatch,
    convert_ma_batch_to_sample_batch,
)
from tfpolicies.errors import BatchError


def steps(eps_id, t, agent_index, **columns):
    obs = 10 * np.array(t) + agent_index
    return SampleBatch(eps_id=eps_id, t=t, agent_index=agent_index, obs=obs, **columns)


@pytest.fixture
def batch():
    """Five env steps; agents 0 and 2 share policy "p", agent 1 has "q" and acts in two steps."""
    p = steps([1] * 6, [0, 1, 2, 0, 1, 2], [0, 0, 0, 2, 2, 2])
    q = steps([2, 1, 2], [1, 1, 0], [1, 1, 1])
    return MultiAgentBatch({"p": p, "q": q}, 5)


@pytest.mark.core
def test_count_is_env_steps_and_agent_steps_are_rows(batch):
    assert batch.count == len(batch) == batch.env_steps() == 5
    assert batch.agent_steps() == 9
    assert batch["q"].count == 3
    assert batch.as_multi_agent() is batch
    assert "MultiAgentBatch({'p': SampleBatch(6:" in repr(batch)
    assert repr(batch).endswith("env_steps=5)")
    with pytest.raises(TypeError):
        iter(batch)
    with pytest.raises(KeyError):
        batch[0:1]
    with pytest.raises(KeyError, match="'p', 'q'"):
        batch["r"]


def test_values_must_be_sample_batches_and_env_steps_a_count(batch):
    with pytest.raises(AssertionError, match="'p' has a dict"):
        MultiAgentBatch({"p": {"obs": [1]}}, 1)
    with pytest.raises(AssertionError, match="'p' has a MultiAgentBatch"):
        MultiAgentBatch({"p": batch}, 1)
    for env_steps in (-1, 1.5, True):
        with pytest.raises(AssertionError, match="env_steps"):
            MultiAgentBatch({}, env_steps)


@pytest.mark.core
def test_timeslices_group_the_rows_of_equal_env_steps(batch):
    pieces = batch.timeslices(2)
    assert [piece.env_steps() for piece in pieces] == [2, 2, 1]
    assert [piece.agent_steps() for piece in pieces] == [5, 3, 1]
    assert pieces[0]["p"]["obs"].tolist() == [0, 2, 10, 12]
    assert pieces[0]["q"]["obs"].tolist() == [11]
    assert pieces[1]["p"]["obs"].tolist() == [20, 22]
    assert pieces[1]["q"]["t"].tolist() == [0]
    assert list(pieces[2].policy_batches) == ["q"]
    assert pieces[1]["p"]["unroll_id"].tolist() == [1, 1]
    assert "unroll_id" not in batch["p"]
    batch = MultiAgentBatch({"p": steps([1, 1], [0, 1], [0, 0], unroll_id=[7, 7])}, 2)
    assert [piece["p"]["unroll_id"].tolist() for piece in batch.timeslices(1)] == [[7], [7]]


def test_timeslices_refuse_batches_that_cannot_be_cut(batch):
    assert MultiAgentBatch({"p": SampleBatch()}, 0).timeslices(1) == []
    with pytest.raises(AssertionError, match="at least 1"):
        batch.timeslices(0)
    with pytest.raises(KeyError, match="eps_id"):
        MultiAgentBatch({"p": SampleBatch(obs=[1])}, 1).timeslices(1)
    time_major = SampleBatch(eps_id=[[1]], t=[[0]], agent_index=[[0]], _time_major=True)
    with pytest.raises(BatchError, match="'p' is time-major"):
        MultiAgentBatch({"p": time_major}, 1).timeslices(1)
    stateful = steps([1, 1], [0, 1], [0, 0], seq_lens=[2], state_in_0=[[5.0]])
    with pytest.raises(KeyError, match="'state_out_0' of the row before"):
        MultiAgentBatch({"p": stateful}, 2).timeslices(1)


def test_timeslices_of_sequences_have_rows_that_are_sequences_by_themselves():
    lone = MultiAgentBatch({"p": steps([1], [0], [0], seq_lens=[1], state_in_0=[[5.0]])}, 1)
    assert lone.timeslices(1)[0]["p"]["state_in_0"].tolist() == [[5.0]]
    rows = steps([1] * 3, [0, 1, 2], [0] * 3, seq_lens=[2, 1], _num_grad_updates=4.0)
    rows.update(state_in_0=[[0.0], [7.0]], state_out_0=[[3.0], [7.0], [9.0]])
    first, second = MultiAgentBatch({"p": rows}, 3).timeslices(2)
    assert first["p"]["seq_lens"].tolist() == [1, 1]
    assert first["p"]["state_in_0"].tolist() == [[0.0], [3.0]]
    assert second["p"]["seq_lens"].tolist() == [1]
    assert second["p"]["state_in_0"].tolist() == [[7.0]]
    assert second["p"].num_grad_updates == 4.0
    padded = steps([1] * 3, [0, 1, 2], [0] * 3, seq_lens=[2, 1]).right_zero_pad(4)
    (piece,) = MultiAgentBatch({"p": padded}, 3).timeslices(3)
    assert piece["p"]["obs"].tolist() == [0, 10, 20]
    assert not piece["p"].zero_padded


@pytest.mark.core
def test_batches_of_only_the_default_policy_are_unwrapped():
    single = SampleBatch(obs=[1])
    assert MultiAgentBatch.wrap_as_needed({DEFAULT_POLICY_ID: single}, 1) is single
    assert MultiAgentBatch.wrap_as_needed({"p": single}, 1)["p"] is single
    assert single.as_multi_agent()[DEFAULT_POLICY_ID] is single
    for wrapped in (single, single.as_multi_agent()):
        assert convert_ma_batch_to_sample_batch(wrapped) is single
    with pytest.raises(ValueError, match="no other policy"):
        convert_ma_batch_to_sample_batch(MultiAgentBatch({"p": single}, 2))


def test_copies_pickles_sizes_and_compression_are_those_of_the_batches(batch):
    copy = batch.copy()
    copy["p"]["obs"][:] = -1
    assert batch["p"]["obs"].min() == 0
    restored = pickle.loads(pickle.dumps(batch))
    assert restored["q"]["obs"].tolist() == batch["q"]["obs"].tolist()
    assert restored.env_steps() == 5
    assert batch.size_bytes() == batch["p"].size_bytes() + batch["q"].size_bytes()
    batch.compress()
    assert isinstance(batch["p"]["obs"][0], str)
    assert batch.decompress_if_needed() is batch
    assert batch["p"]["obs"].tolist() == restored["p"]["obs"].tolist()
