"""SampleBatch: columns of one length, slices, joins, padding, compression."""

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpolicies.batch.sample_batch import (
    DEFAULT_POLICY_ID,
    MultiAgentBatch,
    SampleBatch,
    concat_samples,
    concat_samples_into_ma_batch,
    convert_ma_batch_to_sample_batch,
)
from tfpolicies.errors import BatchError, BatchUsageError, MissingColumnError, TfPoliciesError


def six_rows(**more):
    return SampleBatch(
        obs={"a": np.arange(6.0), "b": (np.arange(12).reshape(6, 2),)},
        rewards=np.arange(6.0),
        infos=[{"i": i} for i in range(6)],
        **more,
    )


def two_sequences(**more):
    return SampleBatch(
        obs=np.arange(6) + 1, seq_lens=[2, 4], state_in_0=np.array([[10.0], [20.0]]), **more
    )


def assert_same(left, right):
    assert list(left) == list(right)
    for key in left:
        np.testing.assert_equal(dict.get(left, key), dict.get(right, key))


# -- construction and counting -------------------------------------------------------------------


def test_arrays_are_kept_and_lists_and_numbers_become_arrays():
    obs = np.zeros((2, 3), np.uint8)
    batch = SampleBatch({"obs": obs}, rewards=[1.0, 2.0], infos=[{}, {}], seq_lens=[1, 1])
    assert batch["obs"] is obs
    assert isinstance(batch["rewards"], np.ndarray)
    assert batch["infos"] == [{}, {}]
    assert batch["seq_lens"].dtype == np.int32
    assert SampleBatch(a=1).count == 0


def test_a_nested_column_keeps_its_arrays():
    array = np.zeros(2)
    batch = SampleBatch(obs={"a": array, "b": ([1, 2],)})
    assert batch["obs"]["a"] is array
    assert batch["obs"]["b"][0].tolist() == [1, 2]
    assert batch.count == 2


def test_count_is_the_sum_of_seq_lens_or_the_columns_length():
    batch = six_rows()
    assert batch.count == len(batch) == batch.env_steps() == batch.agent_steps() == 6
    assert two_sequences().count == 6
    assert SampleBatch().count == 0
    assert not SampleBatch()


def test_ragged_columns_are_refused_with_the_column_and_both_lengths():
    with pytest.raises(BatchError, match=r"'rewards' has 3 and 'obs' requires 2"):
        SampleBatch(obs=[1, 2], rewards=[1, 2, 3])
    with pytest.raises(BatchError, match="'obs' has 5 and 'seq_lens' requires 6"):
        SampleBatch(obs=np.zeros(5), seq_lens=[2, 4])
    with pytest.raises(BatchError, match="'infos'"):
        SampleBatch(obs=[1, 2], infos=[{}])
    with pytest.raises(BatchError, match="None"):
        SampleBatch(obs=None)


def test_infos_and_memories_alone_are_no_rows():
    memory = {"a": [[1.0], [2.0]], "b": [[1.0], [2.0]]}
    assert SampleBatch(infos=[{}, {}]).count == 0
    assert SampleBatch(infos={"a": np.zeros((3, 1))}).count == 0
    assert SampleBatch(state_in_0=memory, state_out_0=memory).count == 0
    assert SampleBatch(state_in_0=memory, state_out_0=memory, obs=[1, 2]).count == 2
    assert SampleBatch(obs={"a": {"b": np.zeros((3, 1))}}).count == 3


def test_rows_of_different_shapes_are_objects():
    batch = SampleBatch(obs=[1, 2, 3], words=[[1, 2], [3], []])
    assert batch.count == 3
    assert batch["words"].dtype == object
    assert batch[1:]["words"].tolist() == [[3], []]
    assert batch.concat(batch)["words"].tolist() == [[1, 2], [3], []] * 2


def test_a_single_number_belongs_to_the_whole_batch():
    batch = SampleBatch(a=7, obs=[1, 2, 3])
    assert batch.count == 3
    assert (batch[1:].count, batch[1:]["a"], batch.copy()["a"]) == (2, 7, 7)
    assert [row["a"] for row in batch.rows()] == [7, 7, 7]
    assert batch._take_rows([2, 0])["a"] == batch.concat(batch)["a"] == 7
    with pytest.raises(BatchError, match="'a'"):
        batch.concat(SampleBatch(a=8, obs=[1]))


def test_lengths_of_sequences_may_stand_in_a_column():
    batch = SampleBatch(obs=np.zeros(6), seq_lens=np.array([[1], [2], [3]]))
    assert batch.count == 6
    assert batch["seq_lens"].tolist() == [1, 2, 3]


def test_count_follows_changes_and_a_bad_change_changes_nothing():
    batch = SampleBatch(obs=[1, 2])
    with pytest.raises(BatchError, match="'rewards' has 3"):
        batch["rewards"] = [1, 2, 3]
    with pytest.raises(BatchError):
        batch.update(rewards=[1, 2, 3])
    assert list(batch) == ["obs"]
    batch.update(obs=[1, 2, 3], rewards=[4, 5, 6])
    assert batch.count == 3
    del batch["obs"], batch["rewards"]
    assert batch.count == 0
    batch["t"] = [1]
    assert batch.count == 1
    batch["t"] = [1, 2]
    assert batch.count == 2
    batch.clear()
    assert batch.count == 0


def test_states_may_have_one_row_per_row_or_per_sequence():
    assert SampleBatch(obs=np.zeros(6), state_in_0=np.zeros((6, 3)), seq_lens=[2, 4]).count == 6
    with pytest.raises(BatchError, match="state_in_0"):
        SampleBatch(obs=np.zeros(6), state_in_0=np.zeros((3, 3)), seq_lens=[2, 4])
    batch = two_sequences()
    with pytest.raises(BatchError, match="state_in_0"):
        del batch["seq_lens"]
    assert batch.count == 6
    assert "seq_lens" in batch


def test_seq_lens_are_dropped_if_empty_and_refused_if_no_lengths():
    assert "seq_lens" not in SampleBatch(obs=[1], seq_lens=[])
    assert "seq_lens" not in SampleBatch(obs=[1], seq_lens=None)
    assert two_sequences().max_seq_len == 4
    assert SampleBatch(obs=[1]).max_seq_len is None
    with pytest.raises(BatchError, match="seq_lens"):
        SampleBatch(obs=[1], seq_lens=[0.5])
    with pytest.raises(BatchError, match="seq_lens"):
        SampleBatch(obs=[1], seq_lens=[2, -1])


def test_a_time_major_batch_counts_steps_times_sequences():
    batch = SampleBatch(obs=np.zeros((4, 2, 3)), rewards=np.zeros((4, 2)), _time_major=True)
    assert batch.count == 8
    with_lengths = SampleBatch(obs=np.zeros((4, 2)), seq_lens=[3, 4], _time_major=True)
    assert with_lengths.count == 7
    with pytest.raises(BatchError, match="time-major"):
        SampleBatch(obs=np.zeros(4), _time_major=True)


def test_keys_are_strings_and_dones_can_only_be_read():
    with pytest.raises(AssertionError, match="strings"):
        SampleBatch({1: [1]})
    with pytest.raises(KeyError, match="only be read"):
        SampleBatch(dones=[True])
    batch = SampleBatch(terminateds=[False, True, False], truncateds=[True, False, False])
    with pytest.raises(KeyError):
        batch["dones"] = [True, True, True]
    assert batch["dones"].tolist() == [True, True, False]
    del batch["truncateds"]
    assert batch.get("dones").tolist() == [False, True, False]
    assert SampleBatch(obs=[1]).get("dones") is None


def test_missing_columns_and_wrong_indices_are_named():
    batch = six_rows()
    with pytest.raises(KeyError, match="Did you mean 'rewards'"):
        batch["reward"]
    with pytest.raises(MissingColumnError):
        del batch["nothing"]
    with pytest.raises(TypeError, match="rows"):
        batch[0]
    assert batch.get("nothing", 3) == 3


def test_reads_new_keys_and_deletions_are_recorded():
    batch = SampleBatch(obs=[1], t=[2])
    batch["obs"], batch.get("nothing"), batch.get("t")
    batch["new"] = [3]
    batch["obs"] = [4]
    batch.update(other=[5])
    del batch["t"]
    assert batch.accessed_keys == {"obs", "t"}
    assert batch.added_keys == {"new"}
    assert batch.deleted_keys == {"t"}


def test_the_other_doors_of_a_dict_check_too():
    batch = SampleBatch(obs=[1])
    assert batch.setdefault("t", [5]).tolist() == [5]
    assert batch.setdefault("t", [6]).tolist() == [5]
    assert batch.pop("nothing", 7) == 7
    assert batch.popitem()[0] == "t"
    batch |= {"x": [1]}
    assert list(batch) == ["obs", "x"]
    with pytest.raises(BatchError):
        batch |= {"y": [1, 2]}
    with pytest.raises(KeyError):
        batch.pop("nothing")
    with pytest.raises(KeyError):
        SampleBatch().popitem()


def test_is_training_is_a_property_not_a_column():
    batch = SampleBatch(obs=[1], is_training=True)
    assert "is_training" not in batch
    assert batch.is_training is True
    batch.set_training(False)
    assert batch["is_training"] is False


def test_repr_names_rows_sequences_and_columns():
    assert repr(SampleBatch(obs=np.zeros(6), t=np.zeros(6))) == "SampleBatch(6: ['obs', 't'])"
    assert repr(two_sequences()) == "SampleBatch(6 (seqs=2): ['obs', 'state_in_0'])"


class Unknown:
    """Stands for a tensor inside a trace."""

    shape = (None, 3)

    def __or__(self, other):
        return "either"


def test_tensors_of_unknown_length_are_let_through_but_not_counted():
    batch = SampleBatch(obs=Unknown(), rewards=Unknown())
    assert isinstance(batch["obs"], Unknown)
    assert repr(batch) == "SampleBatch(?: ['obs', 'rewards'])"
    with pytest.raises(BatchError, match="traced"):
        len(batch)
    assert SampleBatch(terminateds=Unknown(), truncateds=Unknown())["dones"] == "either"
    assert SampleBatch(obs=[1, 2], seq_lens=Unknown()).count == 2


# -- copies --------------------------------------------------------------------------------------


def test_copy_keeps_everything_and_shares_nothing():
    batch = two_sequences(_is_training=True, _num_grad_updates=3)
    batch["obs"], batch[2:], batch.slice(1, 3), list(batch.rows()), repr(batch)
    twin = batch.copy()
    assert twin.is_training is True
    assert twin.num_grad_updates == 3
    assert twin.accessed_keys == {"obs"}
    twin["state_in_0"], twin["obs"][:] = twin["state_in_0"], 0
    assert batch.accessed_keys == {"obs"}
    assert batch["obs"].tolist() == [1, 2, 3, 4, 5, 6]
    assert np.shares_memory(batch.copy(shallow=True)["obs"], batch["obs"])


@pytest.mark.parametrize("clone", [lambda b: pickle.loads(pickle.dumps(b)), copy.deepcopy])
def test_a_batch_can_be_pickled(clone):
    batch = two_sequences(_num_grad_updates=2).right_zero_pad(5)
    batch.set_get_interceptor(lambda value: value * 2)
    twin = clone(batch)
    assert_same(twin, batch)
    assert (twin.count, twin.zero_padded, twin.max_seq_len) == (6, True, 5)
    assert twin.num_grad_updates == 2
    assert twin.get_interceptor is None


def test_a_batch_of_a_batch_inherits_its_layout():
    padded = two_sequences(_num_grad_updates=3).right_zero_pad(4)
    again = SampleBatch(padded, extra=np.zeros(8))
    assert again.zero_padded
    assert again.num_grad_updates == 3
    assert again.count == 6


# -- rows ----------------------------------------------------------------------------------------


def test_rows_are_single_values_with_their_nesting():
    rows = list(six_rows().rows())
    assert len(rows) == 6
    assert rows[2]["obs"]["a"] == 2.0
    assert rows[2]["obs"]["b"][0].tolist() == [4, 5]
    assert rows[2]["infos"] == {"i": 2}


def test_rows_of_sequences_leave_out_the_padding():
    for batch in (two_sequences(), two_sequences().right_zero_pad(5)):
        rows = list(batch.rows())
        assert [row["obs"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row["state_in_0"][0] for row in rows] == [10, 10, 20, 20, 20, 20]
        assert {row["seq_lens"] for row in rows} == {1}
    time_major = SampleBatch(obs=np.array([[1, 3], [2, 4]]), _time_major=True)
    assert [row["obs"] for row in time_major.rows()] == [1, 2, 3, 4]


def test_columns_are_listed_in_the_order_asked_for():
    assert [c.tolist() for c in SampleBatch(a=[1], b=[2]).columns(["b", "a"])] == [[2], [1]]


def test_shuffle_keeps_rows_together_and_follows_its_generator():
    batch = six_rows().shuffle(np.random.default_rng(1))
    order = np.random.default_rng(1).permutation(6)
    assert batch["rewards"].tolist() == order.tolist()
    assert batch["obs"]["b"][0][:, 0].tolist() == (order * 2).tolist()
    assert [info["i"] for info in batch["infos"]] == order.tolist()
    assert sorted(six_rows().shuffle()["rewards"]) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="depend on each other"):
        two_sequences().shuffle()


def test_shuffle_leaves_the_global_generator_alone():
    before = np.random.get_state()[1].tolist()
    six_rows().shuffle()
    assert np.random.get_state()[1].tolist() == before


def test_take_copies_the_chosen_rows():
    batch = six_rows()._take_rows([4, 0, 4])
    assert batch["rewards"].tolist() == [4, 0, 4]
    assert [info["i"] for info in batch["infos"]] == [4, 0, 4]


def test_size_bytes_adds_up_the_arrays():
    assert SampleBatch(obs={"a": np.zeros(4, np.float32)}, t=np.zeros(4)).size_bytes() == 48


def test_the_ends_of_episodes_are_seen():
    batch = SampleBatch(terminateds=[False, False], truncateds=[False, True])
    assert batch.is_terminated_or_truncated()
    assert batch.is_single_trajectory()
    assert not batch[:1].is_terminated_or_truncated()
    assert not SampleBatch(terminateds=[True, False]).is_single_trajectory()
    padded = SampleBatch(terminateds=[False, False, True], seq_lens=[1, 2]).right_zero_pad(4)
    assert padded.is_terminated_or_truncated()
    assert padded.is_single_trajectory()


# -- slices --------------------------------------------------------------------------------------


@given(
    start=st.none() | st.integers(-9, 9),
    stop=st.none() | st.integers(-9, 9),
    step=st.none() | st.sampled_from([-2, -1, 1, 2, 3]),
)
def test_slices_follow_numpy_and_are_views(start, stop, step):
    batch, chosen = six_rows(_num_grad_updates=2), slice(start, stop, step)
    part = batch[chosen]
    expected = np.arange(6.0)[chosen]
    assert part["rewards"].tolist() == expected.tolist()
    assert part["obs"]["b"][0][:, 1].tolist() == (2 * expected + 1).tolist()
    assert [info["i"] for info in part["infos"]] == expected.tolist()
    assert part.count == len(expected)
    assert part.num_grad_updates == 2
    assert not len(expected) or np.shares_memory(part["rewards"], batch["rewards"])
    if step is None and start is not None and stop is not None:
        assert_same(batch.slice(start, stop), part)


def test_slices_of_sequences_keep_them_whole():
    first = two_sequences()[0:3]
    assert first["obs"].tolist() == [1, 2]
    assert first["seq_lens"].tolist() == [2]
    assert first["state_in_0"].tolist() == [[10]]
    second = two_sequences()[2:6]
    assert second["obs"].tolist() == [3, 4, 5, 6]
    assert second["state_in_0"].tolist() == [[20]]
    assert two_sequences()[0:1].count == 0
    with pytest.raises(BatchUsageError, match="step 1"):
        two_sequences()[::2]


def test_slices_of_a_padded_batch_count_rows_without_padding():
    part = two_sequences().right_zero_pad(5)[2:6]
    assert part["obs"].tolist() == [3, 4, 5, 6, 0]
    assert part.zero_padded
    assert part.count == 4


def test_the_method_slice_cuts_inside_sequences():
    part = two_sequences().slice(0, 3)
    assert part["seq_lens"].tolist() == [2, 1]
    assert part["state_in_0"].tolist() == [[10], [20]]
    padded = two_sequences().slice(-1, 3)
    assert padded["obs"].tolist() == [0, 1, 2, 3]
    assert padded["seq_lens"].tolist() == [3, 1]
    later = two_sequences().slice(3, 99)
    assert later["obs"].tolist() == [4, 5, 6]
    assert later["seq_lens"].tolist() == [3]
    assert later["state_in_0"].tolist() == [[20]]
    assert two_sequences().slice(2, 2).count == 0


def test_the_method_slice_takes_the_states_it_is_told():
    part = two_sequences().slice(0, 3, state_start=0, state_end=2)
    assert part["seq_lens"].tolist() == [2, 1]
    with pytest.raises(BatchUsageError, match="cover"):
        two_sequences().slice(0, 3, state_start=0, state_end=1)
    with pytest.raises(BatchUsageError, match="go together"):
        two_sequences().slice(0, 3, state_start=0)
    with pytest.raises(BatchUsageError, match="seq_lens"):
        six_rows().slice(0, 3, 0, 1)
    with pytest.raises(BatchError, match="padding"):
        two_sequences().right_zero_pad(4).slice(0, 3)


def test_slicing_by_batch_id_chooses_sequences():
    for batch in (two_sequences(), two_sequences().right_zero_pad(4)):
        batch.enable_slicing_by_batch_id()
        assert batch[1:2]["obs"].tolist() == [3, 4, 5, 6]
        batch.disable_slicing_by_batch_id()
        assert batch[1:2]["obs"][:2].tolist() == [1, 2]
    columns = SampleBatch(obs=np.arange(6).reshape(3, 2), _time_major=True)
    assert columns[:1]["obs"].tolist() == [[0, 1]]
    columns.enable_slicing_by_batch_id()
    assert columns[1:]["obs"].tolist() == [[1], [3], [5]]
    plain = six_rows()
    plain.enable_slicing_by_batch_id()
    with pytest.raises(BatchUsageError, match="seq_lens"):
        plain[0:1]


def test_timeslices_by_size_end_with_the_rest():
    assert [p.count for p in six_rows().timeslices(4)] == [4, 2]
    assert [p.count for p in six_rows().timeslices(k=3)] == [3, 3]
    assert [p["obs"].tolist() for p in two_sequences().timeslices(2)] == [[1, 2], [3, 4, 5, 6]]


def test_timeslices_by_number_begin_with_the_smaller_ones():
    assert [p.count for p in six_rows().timeslices(num_slices=4)] == [1, 1, 2, 2]
    assert sum(p.count for p in six_rows().timeslices(num_slices=9)) == 6


@pytest.mark.parametrize("arguments", [{}, {"size": 0}, {"size": 2, "num_slices": 2}])
def test_timeslices_wants_one_positive_argument(arguments):
    with pytest.raises(AssertionError, match="either"):
        six_rows().timeslices(**arguments)


def test_episodes_are_split_by_id_or_by_done():
    batch = SampleBatch(
        obs=np.arange(5),
        eps_id=[1, 1, 2, 2, 2],
        terminateds=[False, True, False, False, False],
        truncateds=[False, False, False, True, False],
    )
    assert [p["obs"].tolist() for p in batch.split_by_episode()] == [[0, 1], [2, 3, 4]]
    assert [p["obs"].tolist() for p in batch.split_by_episode("dones")] == [[0, 1], [2, 3], [4]]
    del batch["eps_id"]
    assert [p.count for p in batch.split_by_episode()] == [2, 2, 1]
    with pytest.raises(KeyError):
        batch.split_by_episode("eps_id")
    with pytest.raises(AssertionError, match="key"):
        batch.split_by_episode("t")
    assert SampleBatch(eps_id=np.empty(0)).split_by_episode() == []


def test_a_padded_batch_is_split_between_its_sequences():
    batch = SampleBatch(obs=np.arange(6), eps_id=[1, 1, 1, 2, 2, 2], seq_lens=[2, 1, 3])
    pieces = batch.copy().right_zero_pad(3).split_by_episode()
    assert [p["obs"].tolist() for p in pieces] == [[0, 1, 0, 2, 0, 0], [3, 4, 5]]
    batch["eps_id"] = [1, 1, 1, 1, 2, 2]
    assert [p["seq_lens"].tolist() for p in batch.split_by_episode()] == [[2, 1, 1], [2]]
    with pytest.raises(BatchError, match="between"):
        batch.right_zero_pad(3).split_by_episode()


# -- joining -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), max_size=5))
def test_pieces_joined_again_give_the_batch(cuts):
    batch = six_rows(terminateds=np.zeros(6, bool))
    bounds = [0, *sorted(cuts), 6]
    pieces = [batch[i:j] for i, j in pairwise(bounds)]
    assert_same(concat_samples(pieces), batch)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 7))
def test_sequences_survive_cutting_and_joining(lengths, size):
    rows = sum(lengths)
    batch = SampleBatch(obs=np.arange(rows), seq_lens=lengths, state_in_0=np.arange(len(lengths)))
    assert_same(concat_samples(batch.timeslices(size)), batch)
    pieces = [batch.slice(i, i + size) for i in range(0, rows, size)]
    joined = concat_samples(pieces)
    assert joined["obs"].tolist() == list(range(rows))
    assert joined["seq_lens"].sum() == rows
    padded = batch.copy().right_zero_pad(5)
    assert_same(concat_samples(padded.timeslices(size)), padded)


def test_joining_weighs_the_updates_by_rows_and_skips_empty_batches():
    one = SampleBatch(obs=np.zeros(2), _num_grad_updates=1.0)
    two = SampleBatch(obs=np.ones(6), _num_grad_updates=5.0)
    joined = concat_samples([one, SampleBatch(), SampleBatch(other=np.empty(0)), two])
    assert joined.num_grad_updates == 4.0
    assert joined.count == 8
    assert one.concat(two).count == 8
    assert concat_samples([SampleBatch(a=[1])]).num_grad_updates == 0.0
    assert concat_samples([]).count == 0


def test_joining_refuses_columns_that_not_all_have():
    one, two = SampleBatch(obs=[1], t=[1]), SampleBatch(obs=[1])
    with pytest.raises(KeyError, match=r"batch 1 lacks \['t'\]"):
        concat_samples([one, two])
    with pytest.raises(BatchError, match=r"batch 1 has \['t'\]"):
        concat_samples([two, one])


def test_joining_refuses_batches_that_lie_differently():
    padded = two_sequences().right_zero_pad(4)
    with pytest.raises(ValueError, match="zero_padded"):
        concat_samples([two_sequences(), padded])
    with pytest.raises(ValueError, match="max_seq_len"):
        concat_samples([two_sequences(), SampleBatch(obs=[1])])
    with pytest.raises(ValueError, match="max_seq_len"):
        concat_samples([padded, two_sequences().right_zero_pad(5)])
    with pytest.raises(ValueError, match="time_major"):
        concat_samples([SampleBatch(obs=np.zeros((1, 1)), _time_major=True), SampleBatch(obs=[1])])
    with pytest.raises(BatchError, match=r"'obs'.*shape"):
        concat_samples([SampleBatch(obs=np.zeros((1, 2))), SampleBatch(obs=np.zeros((1, 3)))])
    with pytest.raises(BatchError, match="'obs'"):
        concat_samples([SampleBatch(obs={"a": [1]}), SampleBatch(obs={"b": [1]})])
    with pytest.raises(BatchError, match="'obs'"):
        concat_samples([SampleBatch(obs={"a": [1]}), SampleBatch(obs=[1])])


def test_time_major_batches_are_joined_side_by_side():
    batch = SampleBatch(
        obs=np.array([[1], [2]]), seq_lens=[2], state_in_0=np.array([[7]]), _time_major=True
    )
    joined = concat_samples([batch, batch])
    assert joined["obs"].tolist() == [[1, 1], [2, 2]]
    assert joined["state_in_0"].tolist() == [[7], [7]]
    assert joined.count == 4


def test_one_batch_joined_shares_its_arrays_but_not_its_dict():
    batch = six_rows()
    joined = concat_samples([batch])
    assert joined is not batch
    assert joined["rewards"] is batch["rewards"]


def test_a_multi_agent_batch_makes_the_result_one():
    single = SampleBatch(obs=[1, 2])
    multi = MultiAgentBatch({"p": SampleBatch(obs=[3]), DEFAULT_POLICY_ID: single}, 2)
    joined = concat_samples([single, multi])
    assert joined.env_steps() == 4
    assert joined[DEFAULT_POLICY_ID]["obs"].tolist() == [1, 2, 1, 2]
    assert joined["p"].count == 1
    assert concat_samples_into_ma_batch([single]).env_steps() == 2
    with pytest.raises(ValueError, match="dict"):
        concat_samples_into_ma_batch([{"obs": [1]}])
    with pytest.raises(ValueError, match="dict"):
        concat_samples([{"obs": [1]}])


def test_a_lone_default_policy_converts_to_a_sample_batch():
    single = SampleBatch(obs=[1, 2])
    assert convert_ma_batch_to_sample_batch(single.as_multi_agent()) is single
    assert convert_ma_batch_to_sample_batch(single) is single
    with pytest.raises(ValueError, match="no other policy"):
        convert_ma_batch_to_sample_batch(MultiAgentBatch({"p": single}, 2))


def test_removed_names_say_what_replaced_them():
    with pytest.raises(ValueError, match=r"concat_samples\(samples\)"):
        SampleBatch.concat_samples([])
    with pytest.raises(ValueError, match="right_zero_pad"):
        two_sequences().zero_pad(5)


# -- padding, compression, interceptor -----------------------------------------------------------


def test_right_zero_pad_gives_every_sequence_the_same_room():
    batch = two_sequences(names=np.array(list("abcdef")), infos=[{}] * 6)
    assert batch.right_zero_pad(5) is batch
    assert batch["obs"].tolist() == [1, 2, 0, 0, 0, 3, 4, 5, 6, 0]
    assert batch["names"].tolist() == ["a", "b", None, None, None, "c", "d", "e", "f", None]
    assert batch["infos"][1:3] == [{}, None]
    assert batch["state_in_0"].tolist() == [[10], [20]]
    assert (batch.count, batch.zero_padded, batch.max_seq_len) == (6, True, 5)
    assert batch.right_zero_pad(5)["obs"].shape == (10,)


def test_right_zero_pad_can_pad_the_states_too():
    batch = SampleBatch(obs=[1, 2, 3], state_in_0=[7, 8, 9], seq_lens=[1, 2])
    assert batch.right_zero_pad(2, exclude_states=False)["state_in_0"].tolist() == [7, 0, 8, 9]


def test_right_zero_pad_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="seq_lens"):
        six_rows().right_zero_pad(3)
    with pytest.raises(ValueError, match="seq_lens"):
        two_sequences().right_zero_pad(3)
    with pytest.raises(ValueError, match="already"):
        two_sequences().right_zero_pad(4).right_zero_pad(5)


@pytest.mark.parametrize("bulk", [False, True])
def test_compression_is_undone_to_the_bit(bulk):
    obs = {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "b": (np.array([0.5, 1.5]),)}
    batch = SampleBatch(obs=obs, new_obs=np.zeros((2, 0)), rewards=[1.0, 2.0])
    original = batch.copy()
    batch.compress(bulk)
    assert isinstance(batch["obs"]["a"][0] if not bulk else batch["obs"]["a"].text, str)
    assert batch["rewards"].tolist() == [1, 2]
    assert batch.count == 2
    assert batch.size_bytes() > 0
    batch.compress(bulk)
    twin = pickle.loads(pickle.dumps(batch)).decompress_if_needed()
    assert_same(twin, original)
    assert twin["obs"]["a"].dtype == np.uint8
    assert twin["obs"]["a"].flags.writeable
    assert_same(twin.decompress_if_needed(), original)


def test_rows_compressed_one_by_one_can_be_sliced_and_joined():
    batch = SampleBatch(obs=np.arange(6).reshape(3, 2))
    batch.compress()
    joined = concat_samples([batch[2:], batch[:1]]).decompress_if_needed()
    assert joined["obs"].tolist() == [[4, 5], [0, 1]]


def test_a_column_compressed_as_a_whole_says_what_to_do():
    batch = SampleBatch(obs=np.arange(6))
    batch.compress(bulk=True)
    with pytest.raises(BatchError, match="decompress_if_needed"):
        batch[1:2]
    with pytest.raises(BatchError, match="decompress_if_needed"):
        concat_samples([batch, batch])


def test_objects_and_damaged_texts_are_refused():
    batch = SampleBatch(obs=np.array([{}, {}]))
    with pytest.raises(BatchError, match="object"):
        batch.compress()
    batch = SampleBatch(obs=np.arange(3))
    batch.compress()
    batch["obs"][0] = batch["obs"][0][:-8]
    with pytest.raises(BatchError, match="damaged"):
        batch.decompress_if_needed()


def test_the_interceptor_sees_each_key_once():
    seen = []

    def double(value):
        seen.append(value)
        return value * 2

    batch = SampleBatch(obs=np.array([1, 2]), is_training=True)
    batch.set_get_interceptor(double)
    assert batch["obs"].tolist() == batch["obs"].tolist() == [2, 4]
    assert len(seen) == 1
    assert next(iter(batch.values())).tolist() == [1, 2]
    assert batch.is_training == 2
    batch["obs"] = np.array([5, 6])
    assert batch["obs"].tolist() == [5, 6]
    batch.set_get_interceptor(lambda value: value * 3)
    assert batch["obs"].tolist() == [15, 18]
    assert batch.copy()["obs"].tolist() == [15, 18]
    batch.set_get_interceptor(None)
    assert batch["obs"].tolist() == [5, 6]


def test_every_error_is_one_of_the_package():
    with pytest.raises(TfPoliciesError):
        SampleBatch(obs=[1, 2], t=[1])
    with pytest.raises(TfPoliciesError):
        six_rows()["nothing"]
