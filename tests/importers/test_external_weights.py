"""ONNX files with their weights in files beside them, as of PyTorch, are imported or refused."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from gymnasium import spaces

from tfpolicies import import_policy
from tfpolicies.errors import ModelImportError
from tfpolicies.importers import onnx_file

SAC = Path(__file__).parents[1] / "stored" / "sb3" / "sac.onnx"
TORQUE = {"observation_space": spaces.Box(-8, 8, (3,)), "action_space": spaces.Box(-2, 2, (1,))}
DATA = "model.onnx.data"

pytestmark = pytest.mark.core


def saved(path, **options):
    """Saves the policy with its weights in other files."""
    split = {"save_as_external_data": True, "size_threshold": 0, "location": DATA}
    onnx.save(onnx.load(SAC), path, **{**split, **options})
    return path


def changed(path, change):
    """Changes the entries of the first weight: a dict of texts."""
    model = onnx.load(path, load_external_data=False)
    weight = model.graph.initializer[0]
    entries = {entry.key: entry.value for entry in weight.external_data}
    change(entries)
    del weight.external_data[:]
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    return path


def assert_same_actions(path):
    """Asserts that a file acts as the one with its weights inside, on random rows."""
    obs = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    actions = [import_policy(file, **TORQUE).compute_actions(obs).actions for file in (path, SAC)]
    np.testing.assert_array_equal(*actions)
    assert np.ptp(actions[0]) > 0.1


@pytest.mark.parametrize("one_file", [True, False])
def test_weights_beside_the_file_are_those_of_the_policy(one_file, tmp_path):
    path = saved(tmp_path / "model.onnx", all_tensors_to_one_file=one_file)
    assert len(list(tmp_path.iterdir())) == (2 if one_file else 1 + len(weights_of(SAC)))
    assert not any(weight.raw_data for weight in weights_of(path))
    assert_same_actions(path)


def weights_of(path):
    return onnx.load(path, load_external_data=False).graph.initializer


def test_an_offset_or_length_that_is_left_out_is_0_or_what_is_left(tmp_path):
    path = saved(tmp_path / "model.onnx", all_tensors_to_one_file=False)
    changed(path, lambda entries: [entries.pop(key) for key in ("offset", "length")])
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
def test_what_is_no_part_of_a_file_beside_it_is_refused(entry, value, words, tmp_path):
    path = saved(tmp_path / "model.onnx")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / DATA)
    changed(path, lambda entries: entries.update({entry: value}))

    with pytest.raises(ModelImportError, match=f"model.onnx.* was refused: .*({words})"):
        import_policy(path, **TORQUE)


def test_tensors_cannot_name_the_same_bytes_again_and_again(tmp_path):
    path = saved(tmp_path / "model.onnx")
    model = onnx.load(path, load_external_data=False)
    for number in range(2):
        copy = model.graph.initializer.add()
        copy.CopyFrom(model.graph.initializer[0])
        copy.name = f"copy_{number}"
    path.write_bytes(model.SerializeToString())

    with pytest.raises(ModelImportError, match="which does not have"):
        import_policy(path, **TORQUE)


def test_more_than_onnx_runtime_can_hold_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = saved(tmp_path / "model.onnx")
    monkeypatch.setattr(onnx_file, "_MAX_WEIGHT_BYTES", (tmp_path / DATA).stat().st_size - 1)
    with pytest.raises(ModelImportError, match="with which it has more than 2 GiB"):
        import_policy(path, **TORQUE)
