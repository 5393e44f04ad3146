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


def test_arrays_are_kept_and_lists_and_numbers_become_arrays():
    obs = {"a": np.zeros((2, 3), np.uint8), "b": ([1, 2],)}
    batch = SampleBatch({"obs": obs}, rewards=[1.0, 2.0], infos=[{}, {}], seq_lens=[1, 1])
    assert batch["obs"]["a"] is obs["a"]
    assert batch["obs"]["b"][0].tolist() == [1, 2]
    assert isinstance(batch["rewards"], np.ndarray)
    assert batch["infos"] == [{}, {}]
    assert batch["seq_lens"].dtype == np.int32
    array = np.zeros(2)
    assert SampleBatch(obs=array)["obs"] is array


MEMORY = {"a": [[1.0], [2.0]], "b": [[1.0], [2.0]]}


@pytest.mark.parametrize(
    ("columns", "count"),
    [
        ({}, 0),
        ({"a": 1}, 0),
        ({"obs": {"a": np.zeros(2), "b": ([1, 2],)}}, 2),
        ({"obs": {"a": {"b": np.zeros((3, 1))}}}, 3),
        ({"infos": [{}, {}]}, 0),
        ({"infos": {"a": np.zeros((3, 1))}}, 0),
        ({"state_in_0": MEMORY, "state_out_0": MEMORY}, 0),
        ({"state_in_0": MEMORY, "state_out_0": MEMORY, "obs": [1, 2]}, 2),
        ({"obs": np.zeros(6), "state_in_0": np.zeros((6, 3)), "seq_lens": [2, 4]}, 6),
        ({"obs": np.zeros(6), "state_in_0": np.zeros((2, 1)), "seq_lens": [2, 4]}, 6),
        ({"obs": np.zeros((4, 2, 3)), "rewards": np.zeros((4, 2)), "_time_major": True}, 8),
        ({"obs": np.zeros((4, 2)), "seq_lens": [3, 4], "_time_major": True}, 7),
        ({"obs": np.zeros(6), "seq_lens": np.array([[1], [2], [3]])}, 6),
    ],
)
def test_count_is_the_sum_of_seq_lens_or_the_length_of_a_column_of_rows(columns, count):
    batch = SampleBatch(**columns)
    assert batch.count == len(batch) == batch.env_steps() == batch.agent_steps() == count
    assert bool(batch) == (count > 0)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"obs": [1, 2], "rewards": [1, 2, 3]}, "'rewards' has 3 and 'obs' requires 2"),
        ({"obs": np.zeros(5), "seq_lens": [2, 4]}, "'obs' has 5 and 'seq_lens' requires 6"),
        ({"obs": [1, 2], "infos": [{}]}, "'infos'"),
        ({"obs": None}, "None"),
        ({"obs": np.zeros(6), "state_in_0": np.zeros((3, 3)), "seq_lens": [2, 4]}, "state_in_0"),
        ({"obs": [1], "seq_lens": [0.5]}, "seq_lens"),
        ({"obs": [1], "seq_lens": [2, -1]}, "seq_lens"),
        ({"obs": np.zeros(4), "_time_major": True}, "time-major"),
    ],
)
def test_columns_that_do_not_fit_are_named_with_their_lengths(columns, message):
    with pytest.raises(BatchError, match=message) as error:
        SampleBatch(**columns)
    assert isinstance(error.value, TfPoliciesError)


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


def test_seq_lens_are_dropped_if_empty_and_kept_if_states_need_them():
    assert "seq_lens" not in SampleBatch(obs=[1], seq_lens=[])
    assert "seq_lens" not in SampleBatch(obs=[1], seq_lens=None)
    assert SampleBatch(obs=[1, 2, 3], seq_lens=[[1], [2]])["seq_lens"].tolist() == [1, 2]
    assert SampleBatch(obs=[1]).max_seq_len is None
    batch = two_sequences()
    assert batch.max_seq_len == 4
    with pytest.raises(BatchError, match="state_in_0"):
        del batch["seq_lens"]
    assert batch.count == 6
    assert "seq_lens" in batch


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
    with pytest.raises(KeyError, match="Did you mean 'rewards'") as error:
        batch["reward"]
    assert isinstance(error.value, TfPoliciesError)
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


def test_the_other_methods_of_a_dict_check_too():
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


def test_repr_names_rows_sequences_and_columns_but_not_is_training():
    batch = SampleBatch(obs=[1], is_training=True)
    assert "is_training" not in batch
    assert batch.is_training is True
    batch.set_training(False)
    assert batch["is_training"] is False
    assert repr(batch) == "SampleBatch(1: ['obs'])"
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


def test_copy_keeps_everything_and_shares_nothing():
    batch = two_sequences(_is_training=True, _num_grad_updates=3)
    batch["obs"], batch[2:], batch.slice(1, 3), list(batch.rows()), repr(batch)
    clone = batch.copy()
    assert clone.is_training is True
    assert clone.num_grad_updates == 3
    assert clone.accessed_keys == {"obs"}
    clone["state_in_0"], clone["obs"][:] = clone["state_in_0"], 0
    assert batch.accessed_keys == {"obs"}
    assert batch["obs"].tolist() == [1, 2, 3, 4, 5, 6]
    assert np.shares_memory(batch.copy(shallow=True)["obs"], batch["obs"])
    batch = SampleBatch(batch.right_zero_pad(4), extra=np.zeros(8))
    assert (batch.zero_padded, batch.num_grad_updates, batch.count) == (True, 3, 6)


@pytest.mark.parametrize("clone", [lambda b: pickle.loads(pickle.dumps(b)), copy.deepcopy])
def test_a_batch_can_be_pickled(clone):
    batch = two_sequences(_num_grad_updates=2).right_zero_pad(5)
    batch.set_get_interceptor(lambda value: value * 2)
    result = clone(batch)
    assert_same(result, batch)
    assert (result.count, result.zero_padded, result.max_seq_len) == (6, True, 5)
    assert result.num_grad_updates == 2
    assert result.get_interceptor is None


def test_rows_are_single_values_with_their_nesting_and_without_padding():
    rows = list(six_rows().rows())
    assert len(rows) == 6
    assert rows[2]["obs"]["a"] == 2.0
    assert rows[2]["obs"]["b"][0].tolist() == [4, 5]
    assert rows[2]["infos"] == {"i": 2}
    for batch in (two_sequences(), two_sequences().right_zero_pad(5)):
        rows = list(batch.rows())
        assert [row["obs"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row["state_in_0"][0] for row in rows] == [10, 10, 20, 20, 20, 20]
        assert {row["seq_lens"] for row in rows} == {1}
    time_major = SampleBatch(obs=np.array([[1, 3], [2, 4]]), _time_major=True)
    assert [row["obs"] for row in time_major.rows()] == [1, 2, 3, 4]


def test_columns_are_listed_in_the_order_of_the_call_and_their_sizes_added_up():
    assert [c.tolist() for c in SampleBatch(a=[1], b=[2]).columns(["b", "a"])] == [[2], [1]]
    assert SampleBatch(obs={"a": np.zeros(4, np.float32)}, t=np.zeros(4)).size_bytes() == 48


def test_shuffle_keeps_rows_together_and_follows_its_generator():
    batch = six_rows().shuffle(np.random.default_rng(1))
    order = np.random.default_rng(1).permutation(6)
    assert batch["rewards"].tolist() == order.tolist()
    assert batch["obs"]["b"][0][:, 0].tolist() == (order * 2).tolist()
    assert [info["i"] for info in batch["infos"]] == order.tolist()
    before = np.random.get_state()[1].tolist()
    assert sorted(six_rows().shuffle()["rewards"]) == [0, 1, 2, 3, 4, 5]
    assert np.random.get_state()[1].tolist() == before
    with pytest.raises(ValueError, match="depend on each other"):
        two_sequences().shuffle()
    batch = six_rows()._take_rows([4, 0, 4])
    assert batch["rewards"].tolist() == [4, 0, 4]
    assert [info["i"] for info in batch["infos"]] == [4, 0, 4]


def test_the_ends_of_episodes_are_seen():
    batch = SampleBatch(terminateds=[False, False], truncateds=[False, True])
    assert batch.is_terminated_or_truncated()
    assert batch.is_single_trajectory()
    assert not batch[:1].is_terminated_or_truncated()
    assert not SampleBatch(terminateds=[True, False]).is_single_trajectory()
    padded = SampleBatch(terminateds=[False, False, True], seq_lens=[1, 2]).right_zero_pad(4)
    assert padded.is_terminated_or_truncated()
    assert padded.is_single_trajectory()


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


def test_slices_of_sequences_keep_them_whole_and_do_not_count_padding():
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
    part = two_sequences().right_zero_pad(5)[2:6]
    assert part["obs"].tolist() == [3, 4, 5, 6, 0]
    assert part.zero_padded
    assert part.count == 4


def test_the_method_slice_cuts_inside_sequences():
    for options in ({}, {"state_start": 0, "state_end": 2}):
        part = two_sequences().slice(0, 3, **options)
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


def test_timeslices_are_of_one_size_or_as_many_as_wanted():
    assert [p.count for p in six_rows().timeslices(4)] == [4, 2]
    assert [p.count for p in six_rows().timeslices(k=3)] == [3, 3]
    assert [p["obs"].tolist() for p in two_sequences().timeslices(2)] == [[1, 2], [3, 4, 5, 6]]
    assert [p.count for p in six_rows().timeslices(num_slices=4)] == [1, 1, 2, 2]
    assert sum(p.count for p in six_rows().timeslices(num_slices=9)) == 6
    for arguments in ({}, {"size": 0}, {"size": 2, "num_slices": 2}):
        with pytest.raises(AssertionError, match="either"):
            six_rows().timeslices(**arguments)


def test_episodes_are_split_by_id_or_by_done_and_padded_ones_between_sequences():
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
    batch = SampleBatch(obs=np.arange(6), eps_id=[1, 1, 1, 2, 2, 2], seq_lens=[2, 1, 3])
    pieces = batch.copy().right_zero_pad(3).split_by_episode()
    assert [p["obs"].tolist() for p in pieces] == [[0, 1, 0, 2, 0, 0], [3, 4, 5]]
    batch["eps_id"] = [1, 1, 1, 1, 2, 2]
    assert [p["seq_lens"].tolist() for p in batch.split_by_episode()] == [[2, 1, 1], [2]]
    with pytest.raises(BatchError, match="between"):
        batch.right_zero_pad(3).split_by_episode()


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
    batch = six_rows()
    alone = concat_samples([batch])
    assert alone is not batch
    assert alone["rewards"] is batch["rewards"]
    assert (alone.num_grad_updates, concat_samples([]).count) == (0.0, 0)
    one = SampleBatch(obs=np.zeros(2), _num_grad_updates=1.0)
    two = SampleBatch(obs=np.ones(6), _num_grad_updates=5.0)
    joined = concat_samples([one, SampleBatch(), SampleBatch(other=np.empty(0)), two])
    assert joined.num_grad_updates == 4.0
    assert joined.count == 8
    assert one.concat(two).count == 8


ONE_ROW, TIME_MAJOR = SampleBatch(obs=[1]), SampleBatch(obs=np.zeros((1, 1)), _time_major=True)
PADDED, PADDED_TO_5 = (two_sequences().right_zero_pad(n) for n in (4, 5))


@pytest.mark.parametrize(
    ("error", "first", "second", "message"),
    [
        (KeyError, SampleBatch(obs=[1], t=[1]), ONE_ROW, r"batch 1 lacks \['t'\]"),
        (BatchError, ONE_ROW, SampleBatch(obs=[1], t=[1]), r"batch 1 has \['t'\]"),
        (ValueError, two_sequences(), PADDED, "zero_padded"),
        (ValueError, two_sequences(), ONE_ROW, "max_seq_len"),
        (ValueError, PADDED, PADDED_TO_5, "max_seq_len"),
        (ValueError, TIME_MAJOR, ONE_ROW, "time_major"),
        (BatchError, SampleBatch(obs=[[0, 0]]), SampleBatch(obs=[[0, 0, 0]]), "'obs'.*shape"),
        (BatchError, SampleBatch(obs={"a": [1]}), SampleBatch(obs={"b": [1]}), "'obs'"),
        (BatchError, SampleBatch(obs={"a": [1]}), ONE_ROW, "'obs'"),
    ],
)
def test_joining_refuses_batches_of_other_columns_or_layout(error, first, second, message):
    with pytest.raises(error, match=message):
        concat_samples([first, second])


def test_time_major_batches_are_joined_side_by_side():
    batch = SampleBatch(
        obs=np.array([[1], [2]]), seq_lens=[2], state_in_0=np.array([[7]]), _time_major=True
    )
    joined = concat_samples([batch, batch])
    assert joined["obs"].tolist() == [[1, 1], [2, 2]]
    assert joined["state_in_0"].tolist() == [[7], [7]]
    assert joined.count == 4


def test_a_multi_agent_batch_makes_the_result_one():
    single = SampleBatch(obs=[1, 2])
    multi = MultiAgentBatch({"p": SampleBatch(obs=[3]), DEFAULT_POLICY_ID: single}, 2)
    joined = concat_samples([single, multi])
    assert joined.env_steps() == 4
    assert joined[DEFAULT_POLICY_ID]["obs"].tolist() == [1, 2, 1, 2]
    assert joined["p"].count == 1
    assert concat_samples_into_ma_batch([single]).env_steps() == 2
    for join in (concat_samples_into_ma_batch, concat_samples):
        with pytest.raises(ValueError, match="dict"):
            join([{"obs": [1]}])


def test_removed_methods_name_their_replacements():
    with pytest.raises(ValueError, match=r"concat_samples\(samples\)"):
        SampleBatch.concat_samples([])
    with pytest.raises(ValueError, match="right_zero_pad"):
        two_sequences().zero_pad(5)


def test_right_zero_pad_gives_every_sequence_the_same_length():
    batch = two_sequences(names=np.array(list("abcdef")), infos=[{}] * 6)
    assert batch.right_zero_pad(5) is batch
    assert batch["obs"].tolist() == [1, 2, 0, 0, 0, 3, 4, 5, 6, 0]
    assert batch["names"].tolist() == ["a", "b", None, None, None, "c", "d", "e", "f", None]
    assert batch["infos"][1:3] == [{}, None]
    assert batch["state_in_0"].tolist() == [[10], [20]]
    assert (batch.count, batch.zero_padded, batch.max_seq_len) == (6, True, 5)
    assert batch.right_zero_pad(5)["obs"].shape == (10,)
    batch = SampleBatch(obs=[1, 2, 3], state_in_0=[7, 8, 9], seq_lens=[1, 2])
    assert batch.right_zero_pad(2, exclude_states=False)["state_in_0"].tolist() == [7, 0, 8, 9]
    for other, length in ((six_rows(), 3), (two_sequences(), 3)):
        with pytest.raises(ValueError, match="seq_lens"):
            other.right_zero_pad(length)
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
    restored = pickle.loads(pickle.dumps(batch)).decompress_if_needed()
    assert_same(restored, original)
    assert restored["obs"]["a"].dtype == np.uint8
    assert restored["obs"]["a"].flags.writeable
    assert_same(restored.decompress_if_needed(), original)


def test_rows_compressed_one_by_one_can_be_sliced_and_joined_but_not_whole_columns():
    batch = SampleBatch(obs=np.arange(6).reshape(3, 2))
    batch.compress()
    joined = concat_samples([batch[2:], batch[:1]]).decompress_if_needed()
    assert joined["obs"].tolist() == [[4, 5], [0, 1]]
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


def test_the_interceptor_gets_each_value_once():
    values = []

    def double(value):
        values.append(value)
        return value * 2

    batch = SampleBatch(obs=np.array([1, 2]), is_training=True)
    batch.set_get_interceptor(double)
    assert batch["obs"].tolist() == batch["obs"].tolist() == [2, 4]
    assert len(values) == 1
    assert next(iter(batch.values())).tolist() == [1, 2]
    assert batch.is_training == 2
    batch["obs"] = np.array([5, 6])
    assert batch["obs"].tolist() == [5, 6]
    batch.set_get_interceptor(lambda value: value * 3)
    assert batch["obs"].tolist() == [15, 18]
    assert batch.copy()["obs"].tolist() == [15, 18]
    batch.set_get_interceptor(None)
    assert batch["obs"].tolist() == [5, 6]
