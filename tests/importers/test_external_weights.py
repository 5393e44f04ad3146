"""ONNX files with their weights in other files, as PyTorch writes them."""

import os

import numpy as np
import onnx
import pytest

from helpers.foreign_models import SB3, TORQUE, assert_refused
from tfpolicies import import_policy
from tfpolicies.importers import onnx_file

SAC = SB3 / "sac.onnx"
DATA = "model.onnx.data"

pytestmark = pytest.mark.core


def save(folder, **options):
    """Saves the policy with its weights in other files; returns the path of the model."""
    split = {"save_as_external_data": True, "size_threshold": 0, "location": DATA}
    onnx.save(onnx.load(SAC), folder / "model.onnx", **{**split, **options})
    return folder / "model.onnx"


def load(path):
    return onnx.load(path, load_external_data=False)


def change_first_weight(path, change):
    """Changes the entries of the first weight: a dict of texts."""
    model = load(path)
    weight = model.graph.initializer[0]
    entries = {entry.key: entry.value for entry in weight.external_data}
    change(entries)
    del weight.external_data[:]
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


def assert_same_actions(path):
    """Asserts that a file acts as the one with its weights inside, on random rows."""
    obs = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    actions = [import_policy(file, **TORQUE).compute_actions(obs).actions for file in (path, SAC)]
    np.testing.assert_array_equal(*actions)
    assert np.ptp(actions[0]) > 0.1


@pytest.mark.parametrize("one_file", [True, False])
def test_weights_in_other_files_are_those_of_the_policy(one_file, tmp_path):
    path = save(tmp_path, all_tensors_to_one_file=one_file)
    weights = load(path).graph.initializer
    assert len(list(tmp_path.iterdir())) == 1 + (1 if one_file else len(weights))
    assert not any(weight.raw_data for weight in weights)
    assert_same_actions(path)


def test_the_default_offset_is_0_and_the_default_length_that_of_the_file(tmp_path):
    path = save(tmp_path, all_tensors_to_one_file=False)
    change_first_weight(path, lambda entries: [entries.pop(key) for key in ("offset", "length")])
    assert_same_actions(path)


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("location", "../model.onnx.data", "not the name of a file in its folder"),
        ("location", "/etc/hostname", "not the name of a file in its folder"),
        ("location", "..", "not the name of a file in its folder|not a regular file"),
        ("location", "", "not the name of a file in its folder"),
        ("location", "model\0", "not the name of a file in its folder"),
        ("location", "absent", r"'absent', which is not in its folder \(.*external_data=False"),
        ("location", "folder", "not a regular file"),
        ("location", "fifo", "not a regular file"),
        ("location", "link", "not a regular file"),
        ("offset", "100000", "which does not have .* unused bytes"),
        ("offset", "-4", "'-4'"),
        ("offset", "9" * 30, "'9999"),
        ("length", "100000", "which does not have 100000 unused bytes from 0"),
        ("length", "four", "'four'"),
    ],
)
def test_a_weight_outside_of_a_regular_file_in_the_folder_is_refused(entry, value, words, tmp_path):
    path = save(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / DATA)
    change_first_weight(path, lambda entries: entries.update({entry: value}))
    assert_refused(path, f"model.onnx.* was refused: .*({words})", **TORQUE)


def test_tensors_cannot_use_the_same_bytes_repeatedly(tmp_path):
    path = save(tmp_path)
    model = load(path)
    for number in range(2):
        copy = model.graph.initializer.add()
        copy.CopyFrom(model.graph.initializer[0])
        copy.name = f"copy_{number}"
    path.write_bytes(model.SerializeToString())
    assert_refused(path, "which does not have", **TORQUE)


def test_more_weights_than_onnx_runtime_can_hold_are_refused(tmp_path, monkeypatch):
    path = save(tmp_path)
    monkeypatch.setattr(onnx_file, "_MAX_WEIGHT_BYTES", (tmp_path / DATA).stat().st_size - 1)
    assert_refused(path, "with which it has more than 2 GiB", **TORQUE)
