"""Files that RLlib 2.10 wrote, compared with the arrays that its own reader returns."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tfpolicies.offline.data_source import ReadRequest
from tfpolicies.offline.open_data import open_data

FILES = Path(__file__).parent / "rllib_files" / "recorded.tar.xz"
PER_SEQUENCE = ("seq_lens", "state_in_0", "state_in_1")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Returns a folder of files, and the expected arrays by file, line, policy and column."""
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(FILES) as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    content = io.BytesIO((folder / "expected.npz").read_bytes())
    with np.load(content) as arrays:
        return folder, dict(arrays)


def read_lines(path, trusted):
    """Returns the columns of each line, by line, policy and column."""
    source = open_data(path, trusted=trusted)
    result, position, line = {}, 0, 0
    while position < source.ends[0]:
        chunks, position = source.read(ReadRequest(0, position, source.ends[0], 1, None))
        for chunk in chunks:
            policy_id = chunk.policy_id or "default_policy"
            for name, column in chunk.columns.items():
                result[f"{line}/{policy_id}/{name.replace('.', '/')}"] = column
        line += 1
    source.close()
    return result


def get_expected(arrays, stem):
    prefix = f"{stem}/"
    return {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}


NAMES = [
    "packed_single-0",
    "plain_single-0",
    "pendulum-0",
    "multi_agent-0",
    "dict_obs_raw-0",
    "dict_obs_raw_plain-0",
    "lstm-0",
    "dqn-0",
    "samplebatch_infos-0",
    "rollover-0",
    "rollover-1",
    "values-0",
]


@pytest.mark.core
@pytest.mark.parametrize("name", NAMES)
def test_rllibs_columns_are_read_equal_to_the_bit_with_their_dtypes(recorded, name):
    folder, arrays = recorded
    expected = get_expected(arrays, name)
    result = read_lines(folder / f"{name}.json", trusted=True)
    kept = {key for key in expected if key.split("/")[2] not in PER_SEQUENCE}
    assert {key for key in result if key.split("/")[2] not in PER_SEQUENCE} == kept
    assert kept
    for key in kept:
        assert result[key].dtype == expected[key].dtype, key
        assert result[key].shape == expected[key].shape, key
        assert result[key].tobytes() == expected[key].tobytes(), key


@pytest.mark.parametrize("name", ["packed_single-0", "multi_agent-0", "dict_obs_raw-0", "lstm-0"])
def test_the_child_process_reads_the_same_as_this_one(recorded, name):
    folder, _ = recorded
    expected = read_lines(folder / f"{name}.json", trusted=True)
    result = read_lines(folder / f"{name}.json", trusted=False)
    assert result.keys() == expected.keys()
    for key, column in expected.items():
        assert result[key].dtype == column.dtype, key
        np.testing.assert_array_equal(result[key], column)


@pytest.mark.core
def test_each_step_has_the_recurrent_state_before_it(recorded):
    folder, arrays = recorded
    expected = get_expected(arrays, "lstm-0")
    result = read_lines(folder / "lstm-0.json", trusted=True)
    for line in (0, 1):
        lengths = expected[f"{line}/default_policy/seq_lens"]
        starts = np.cumsum(lengths) - lengths
        for i in (0, 1):
            state = result[f"{line}/default_policy/state_in_{i}"]
            after = result[f"{line}/default_policy/state_out_{i}"]
            recorded_state = expected[f"{line}/default_policy/state_in_{i}"]
            np.testing.assert_array_equal(state[starts], recorded_state)
            inner = np.setdiff1d(np.arange(len(state)), starts)
            np.testing.assert_array_equal(state[inner], after[inner - 1])
        assert f"{line}/default_policy/seq_lens" not in result
