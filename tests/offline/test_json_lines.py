"""JSON lines: columns, nested and packed ones, positions of lines, and refusals."""

import json

import numpy as np
import pytest

from helpers.recorded_files import read_chunks, read_columns, write_json_lines
from tfpolicies.batch.compression import pack_array
from tfpolicies.errors import BatchError
from tfpolicies.offline.data_source import ReadRequest, join_chunks
from tfpolicies.offline.json_lines import JsonLines
from tfpolicies.offline.packed_columns import pack_column

pytestmark = pytest.mark.core


def open_lines(tmp_path, *batches):
    return JsonLines([write_json_lines(tmp_path / "a.json", *batches)])


def open_text(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return JsonLines([path])


def read_batch(tmp_path, **columns):
    source = open_lines(tmp_path, columns)
    return read_columns(source, names=tuple(source.column_names))


def test_columns_are_arrays_of_integers_numbers_or_flags(tmp_path):
    result = read_batch(tmp_path, a=[1, 2], b=[1.5, 2], c=[True, False], d=[[[1], [2]]] * 2)
    assert {name: x.dtype.kind for name, x in result.items()} == {
        "a": "i",
        "b": "f",
        "c": "b",
        "d": "i",
    }
    assert result["b"].tolist() == [1.5, 2]
    assert result["d"].shape == (2, 2, 1)


def test_python_s_words_for_numbers_that_are_not_finite_are_read(tmp_path):
    result = read_batch(tmp_path, a=[float("nan"), float("inf"), -float("inf")])["a"]
    np.testing.assert_array_equal(result, [np.nan, np.inf, -np.inf])


def test_large_ids_are_exact(tmp_path):
    assert read_batch(tmp_path, a=[10**18 + 1, -(10**18) - 1])["a"].tolist() == [
        10**18 + 1,
        -(10**18) - 1,
    ]


def test_old_dones_are_terminateds(tmp_path):
    assert {*read_batch(tmp_path, obs=[1], dones=[True])} == {"obs", "terminateds"}
    source = open_lines(tmp_path, {"obs": [1], "dones": [True]})
    assert read_columns(source, names=("terminateds",))["terminateds"].tolist() == [True]
    both = read_batch(tmp_path, dones=[True], terminateds=[False])
    assert both["terminateds"].tolist() == [False]


def test_nested_columns_have_the_path_in_their_names(tmp_path):
    result = read_batch(tmp_path, obs={"eye": {"left": [[1], [2]]}, "arm": [3, 4]})
    assert {name: x.tolist() for name, x in result.items()} == {
        "obs.eye.left": [[1], [2]],
        "obs.arm": [3, 4],
    }
    rows = read_batch(tmp_path, obs=[{"x": 1, "y": [2, 3]}, {"x": 4, "y": [5, 6]}])
    assert {name: x.tolist() for name, x in rows.items()} == {
        "obs.x": [1, 4],
        "obs.y": [[2, 3], [5, 6]],
    }


def test_packed_columns_of_both_packages_keep_their_dtypes(tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    flags = np.array([True, False, True])
    result = read_batch(
        tmp_path,
        whole=pack_column(x),
        nested=pack_column({"x": x, "y": (flags, x)}),
        rows=[pack_column(row) for row in x],
        nested_rows=[pack_column({"x": row}) for row in x],
        ours=pack_array(x),
        our_rows=[pack_array(row) for row in x],
    )
    for name in ("whole", "nested.x", "nested.y.1", "rows", "nested_rows.x", "ours", "our_rows"):
        assert result[name].dtype == np.float32, name
        np.testing.assert_array_equal(result[name], x)
    assert result["nested.y.0"].tolist() == flags.tolist()


def test_texts_are_objects(tmp_path):
    result = read_batch(tmp_path, eps_id=["monday", "tuesday"])["eps_id"]
    assert result.dtype == object
    assert result.tolist() == ["monday", "tuesday"]


def test_lines_of_several_policies_are_chunks_of_each(tmp_path):
    def make_line(start):
        batches = {"red": {"x": [start, start + 1]}, "blue": {"x": [-start]}}
        return {"count": 2, "policy_batches": batches}

    source = open_lines(tmp_path, make_line(1), {"x": [9]}, make_line(3))
    chunks = read_chunks(source)
    assert [(chunk.policy_id, chunk.columns["x"].tolist()) for chunk in chunks] == [
        ("red", [1, 2, 3, 4]),
        ("blue", [-1, -3]),
        (None, [9]),
    ]


def test_positions_are_offsets_of_lines_and_any_offset_leads_to_the_next_line(tmp_path):
    lines = [{"x": [10 * i, 10 * i + 1]} for i in range(5)]
    source = open_lines(tmp_path, *lines)
    content = (tmp_path / "a.json").read_bytes()
    starts = [0, *(i + 1 for i, byte in enumerate(content) if byte == ord("\n"))]
    for position in range(len(content)):
        chunks, end = source.read(ReadRequest(0, position, len(content), 1, None))
        line = int(np.searchsorted(starts, position))
        if line < 5:
            assert chunks[0].columns["x"].tolist() == lines[line]["x"]
            assert end == starts[line + 1]
        else:
            assert (chunks, end) == ([], len(content))
    for stop in range(1, len(content)):
        (chunk,) = source.read(ReadRequest(0, 0, stop, 1 << 30, None)).chunks
        expected = [start for start in starts[:5] if start < stop]
        assert np.unique(chunk.line_offsets).tolist() == expected


def test_rows_are_named_by_file_line_and_row_in_the_line(tmp_path):
    source = open_lines(tmp_path, {"x": [1, 2]}, {"x": [3]}, {"x": [4, 5, 6]})
    (chunk,) = read_chunks(source)
    path = tmp_path / "a.json"
    expected = [(0, 1), (1, 1), (0, 2), (0, 3), (1, 3), (2, 3)]
    for row, (number, line) in enumerate(expected):
        assert chunk.describe_row(row) == f"row {number} in line {line} of {path}"
    assert chunk.take(slice(4, 6)).describe_row(1) == f"row 2 in line 3 of {path}"
    reordered = chunk.reorder(np.array([5, 0, 3]))
    assert reordered.describe_row(0) == f"row 2 in line 3 of {path}"
    assert reordered.describe_row(2) == f"row 0 in line 3 of {path}"


def test_joined_chunks_of_different_files_name_each_row_s_file(tmp_path):
    paths = [
        write_json_lines(tmp_path / "a.json", {"x": [1]}),
        write_json_lines(tmp_path / "b.json", {"x": [2]}, {"x": [3]}),
    ]
    joined = join_chunks(read_chunks(JsonLines(paths)))
    assert joined.columns["x"].tolist() == [1, 2, 3]
    assert joined.describe_row(0) == f"row 0 in line 1 of {paths[0]}"
    assert joined.reorder(np.array([1, 2])).describe_row(1) == f"row 0 in line 2 of {paths[1]}"


def test_empty_lines_and_empty_batches_are_skipped(tmp_path):
    text = '\n{"type": "SampleBatch", "x": []}\n  \n{"type": "SampleBatch", "x": [1]}\n\n'
    source = open_text(tmp_path, text)
    assert source.column_names == ("x",)
    assert read_columns(source)["x"].tolist() == [1]


def test_a_last_line_that_is_incomplete_is_skipped_and_listed(tmp_path):
    source = open_text(tmp_path, '{"type": "SampleBatch", "x": [1]}\n{"type": "SampleBatch", "x"')
    assert read_columns(source)["x"].tolist() == [1]
    assert source.truncated_tables == {str(tmp_path / "a.json")}


def test_an_incomplete_line_elsewhere_is_refused(tmp_path):
    source = open_text(tmp_path, '{"type": "SampleBatch", "x": [1]}\n{"type"\n{}\n')
    with pytest.raises(BatchError, match=r"Line 2 of .*a\.json cannot be parsed as JSON"):
        read_chunks(source)


def test_large_files_are_several_units_that_share_their_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("tfpolicies.offline.json_lines._UNIT_BYTES", 100)
    source = open_lines(tmp_path, *({"x": [i, i]} for i in range(30)))
    assert len(source.units) > 5
    assert read_columns(source)["x"].tolist() == sorted([*range(30)] * 2)


def test_columns_that_cannot_be_read_are_refused_only_if_they_are_asked_for(tmp_path):
    batch = {"obs": [1, 2], "note": [{"a": 1}, None], "ragged": [[1], [1, 2]]}
    source = open_lines(tmp_path, batch)
    assert source.column_names == ("obs", "note", "ragged")
    assert {*read_columns(source)} == {"obs"}
    with pytest.raises(BatchError, match=r"Line 1 of .*'note' must have the parts \['a'\]"):
        read_columns(source, names=("note",))
    with pytest.raises(BatchError, match=r"Line 1 of .*'ragged' must have rows of one shape"):
        read_columns(source, names=("ragged",))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ([1, None], "but row 1 is None"),
        ([1.5, "x"], "but row 1 is 'x'"),
        (3, "got 3"),
        (None, "got None"),
        ([2**70], "but row 0 is 1180591620717411303424"),
        ("abc", "must be an array that was packed, got 'abc'"),
        ("BCJNG!", "it is not an LZ4 frame in base64"),
    ],
)
def test_a_value_that_is_not_a_number_is_named(tmp_path, value, problem):
    source = open_lines(tmp_path, {"obs": [1, 2], "x": value})
    with pytest.raises(BatchError, match="Line 1 of ") as caught:
        read_columns(source, names=("x",))
    assert problem in str(caught.value)


def test_columns_of_different_lengths_are_refused(tmp_path):
    source = open_lines(tmp_path, {"x": [1, 2], "y": [1, 2], "z": [1]})
    with pytest.raises(BatchError, match=r"Line 1 of .*most have 2, and these \{'z': 1\}"):
        read_columns(source)
    assert read_columns(source, names=("x", "y"))["x"].tolist() == [1, 2]


def test_lines_with_other_columns_or_shapes_are_refused(tmp_path):
    source = open_lines(tmp_path, {"x": [1], "y": [1]}, {"x": [1]})
    with pytest.raises(BatchError, match=r"row 0 in line 2 of .* and row 0 in line 1 .*'y'"):
        read_columns(source)
    source = open_lines(tmp_path, {"x": [[1, 2]]}, {"x": [[1]]})
    with pytest.raises(BatchError, match=r"shape \(2,\) in all rows, but row 0 in line 2"):
        read_columns(source)


@pytest.mark.parametrize(
    "record", [[], 1, {}, {"type": "x"}, {"type": "MultiAgentBatch"}, {"type": ["SampleBatch"]}]
)
def test_another_json_value_is_not_a_batch(tmp_path, record):
    with pytest.raises(BatchError, match=r"Line 1 of .*'type' of 'SampleBatch'"):
        open_text(tmp_path, json.dumps(record) + "\n")


def test_a_batch_of_a_policy_that_is_not_an_object_is_refused(tmp_path):
    record = {"type": "MultiAgentBatch", "policy_batches": {"red": [1]}}
    with pytest.raises(BatchError, match="the batch of policy 'red' must be an object"):
        open_text(tmp_path, json.dumps(record) + "\n")


def test_files_without_rows_are_refused(tmp_path):
    with pytest.raises(BatchError, match="There is no row in"):
        open_text(tmp_path, "")


def test_deep_and_huge_values_are_refused(tmp_path, monkeypatch):
    with pytest.raises(BatchError, match="cannot be parsed as JSON"):
        open_text(tmp_path, "[" * 100_000 + "\n")
    with pytest.raises(BatchError, match="cannot be parsed as JSON"):
        open_text(tmp_path, '{"x": ' + "9" * 5000 + "}\n")
    nested = {"x": [1]}
    for _ in range(12):
        nested = {"x": nested}
    source = open_lines(tmp_path, {"a": [1], **nested})
    with pytest.raises(BatchError, match="is nested more than 10 deep"):
        read_columns(source, names=("a", "x"))
    monkeypatch.setattr("tfpolicies.offline.json_lines._MAX_LINE_BYTES", 100)
    with pytest.raises(BatchError, match=r"Line 1 of .*more than 100 bytes"):
        open_lines(tmp_path, {"x": [1] * 100})


@pytest.mark.parametrize("states", [[[1.0]], [[1.0, 2.0], [1.0, 2.0]], [[1.0]] * 4])
def test_recurrent_states_that_do_not_fit_their_sequences_are_refused(tmp_path, states):
    line = {"obs": [1, 2, 3], "seq_lens": [2, 1], "state_out_0": [[5.0]] * 3}
    source = open_lines(tmp_path, {**line, "state_in_0": states})
    assert read_columns(source, names=("obs",))["obs"].tolist() == [1, 2, 3]
    with pytest.raises(BatchError, match=r"Line 1 of .*'state_in_0' must have a row of \(1,\)"):
        read_columns(source, names=("obs", "state_in_0"))
    uneven = {**line, "seq_lens": [2, 2], "state_in_0": [[1.0], [2.0]]}
    with pytest.raises(BatchError, match=r"must add up to 3.*\[2, 2\]"):
        read_columns(open_lines(tmp_path, uneven), names=("state_in_0",))


def test_columns_for_each_sequence_are_left_out_if_they_cannot_be_for_each_step(tmp_path):
    source = open_lines(
        tmp_path, {"obs": [1, 2, 3], "seq_lens": [2, 1], "state_in_0": [[1.0], [2.0]]}
    )
    assert source.column_names == ("obs",)
    assert {*read_columns(source)} == {"obs"}


def test_recurrent_states_follow_those_after_the_step_before(tmp_path):
    source = open_lines(
        tmp_path,
        {
            "obs": [1, 2, 3],
            "seq_lens": [2, 1],
            "state_in_0": [[1.0], [3.0]],
            "state_out_0": [[2.0], [7.0], [8.0]],
        },
    )
    result = read_columns(source, names=("state_in_0",))
    assert result["state_in_0"].tolist() == [[1], [2], [3]]


def test_a_last_line_that_is_another_value_is_refused_also_without_its_end(tmp_path):
    with pytest.raises(BatchError, match=r"Line 1 of .*a\.json: it must be an object"):
        open_text(tmp_path, "[1]")


def test_a_line_whose_columns_are_very_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tfpolicies.offline.json_lines._MAX_LINE_ARRAY_BYTES", 100)
    source = open_lines(tmp_path, {"x": [1] * 6, "y": [1] * 6}, {"x": [1] * 7, "y": [1] * 7})
    assert read_columns(source, names=("x",))["x"].tolist() == [1] * 13
    with pytest.raises(BatchError, match=r"Line 2 of .*its columns must have at most 100 bytes"):
        read_columns(source, names=("x", "y"))
    monkeypatch.setattr("tfpolicies.offline.json_lines.MAX_UNPACKED_BYTES", 20)
    rows = [pack_array(np.ones(2)) for _ in range(3)]
    with pytest.raises(BatchError, match="rows of the packed column 'obs' must have at most 20"):
        read_columns(open_lines(tmp_path, {"obs": rows}), names=("obs",))
