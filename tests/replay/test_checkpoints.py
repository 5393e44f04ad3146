"""Replay buffers in checkpoints: new rows are written, old ones shared, bad ones refused."""

import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.errors import CheckpointError
from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer
from tfpolicies.replay.prioritized import MultiAgentPrioritizedReplayBuffer
from tfpolicies.storage.checkpoint import read_checkpoint, write_checkpoint
from tfpolicies.storage.json_values import decode_value, encode_value
from tfpolicies.storage.manifest import compute_checksum
from tfpolicies.storage.nested_arrays import extract_arrays, restore_arrays

CAPACITY = 100  # a segment has as many rows, if they are small
IDS = ("p", "q")


class Crash(BaseException):
    pass


def rows(first, stop):
    numbers = np.arange(first, stop)
    images = np.zeros((stop - first, 64, 64), np.uint8)
    images[:, 0, :8] = numbers.astype(np.int64)[:, None].view(np.uint8)
    return SampleBatch(obs={"eye": images, "id": numbers.astype(np.float32)}, actions=numbers)


def make_buffer(count, kind=MultiAgentReplayBuffer):
    buffer = kind(CAPACITY, seed=0)
    add(buffer, 0, count)
    return buffer


def add(buffer, first, stop):
    if stop > first:
        parts = {"p": rows(first, stop), "q": rows(first + 1000, stop + 1000)}
        buffer.add(MultiAgentBatch(parts, stop - first))


def save(buffer, folder):
    arrays, segments = {}, []
    state = encode_value(extract_arrays(buffer.get_state(), arrays, segments))
    manifest = {"type": "Test", "state": state}
    write_checkpoint(folder, "test.json", manifest, {"extra": arrays}, segments=segments)


def load(folder, kind=MultiAgentReplayBuffer):
    result = read_checkpoint(folder, "test.json", kind="Test")
    buffer = kind(CAPACITY, seed=5)
    state = decode_value(result.manifest["state"])
    buffer.set_state(restore_arrays(state, result.arrays["extra"], result.segments))
    return buffer


def files(folder):
    """Returns the segment files by name, each with its inode."""
    return {x.name: x.stat().st_ino for x in folder.iterdir() if x.name.startswith("segment-")}


def require_same(one, other, count=300):
    for policy_id in IDS:
        drawn, again = one.sample(count, policy_id), other.sample(count, policy_id)
        np.testing.assert_array_equal(drawn["actions"], again["actions"])
        np.testing.assert_array_equal(drawn["obs"]["eye"], again["obs"]["eye"])
        numbers = drawn["obs"]["eye"][:, 0, :8].copy().view(np.int64)[:, 0]
        np.testing.assert_array_equal(numbers, drawn["actions"])
        np.testing.assert_array_equal(drawn["obs"]["id"], drawn["actions"])


@pytest.mark.parametrize("kind", [MultiAgentReplayBuffer, MultiAgentPrioritizedReplayBuffer])
@pytest.mark.parametrize("count", [0, 1, 99, 100, 130, 500])
def test_a_stored_buffer_continues_exactly(tmp_path, kind, count):
    buffer = make_buffer(count, kind)
    save(buffer, tmp_path)
    restored = load(tmp_path, kind)
    for each in (buffer, restored):
        add(each, count, count + 30)
    require_same(buffer, restored)
    assert restored.num_added == 2 * (count + 30)


def test_rows_that_are_stored_are_not_written_again(tmp_path):
    buffer = make_buffer(100)
    save(buffer, tmp_path)
    first = files(tmp_path)
    assert len(first) == 4  # rows and frames of two policies
    add(buffer, 100, 130)
    save(buffer, tmp_path)
    second = files(tmp_path)
    assert first.items() <= second.items()
    assert len(second) == 8
    add(buffer, 130, 160)
    save(buffer, tmp_path)
    third = files(tmp_path)
    assert first.items() <= third.items()
    assert len(third) == 8  # those of 100 to 130 were written again, and the former are gone
    add(buffer, 160, 320)
    save(buffer, tmp_path)
    assert len(first.keys() & files(tmp_path).keys()) == 2  # frames, to compare new ones with
    require_same(buffer, load(tmp_path))


def test_checkpoints_in_several_folders_share_files_by_links(tmp_path):
    buffer, a, b, c = make_buffer(100), *(tmp_path / name for name in "abc")
    save(buffer, a)
    add(buffer, 100, 110)
    save(buffer, b)
    shared = files(a).items() & files(b).items()
    assert len(shared) == 4
    shutil.rmtree(a)
    restored = load(b)
    save(restored, c)  # a resumed run shares what it has read and is whole
    assert files(b).keys() == files(c).keys()
    assert files(b).items() & files(c).items() == shared
    shutil.rmtree(b)
    require_same(restored, load(c))


def test_where_links_are_not_possible_files_are_copied(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    buffer, a, b = make_buffer(130), tmp_path / "a", tmp_path / "b"
    save(buffer, a)
    save(buffer, b)
    assert files(a).keys() == files(b).keys()
    assert not set(files(a).values()) & set(files(b).values())
    require_same(buffer, load(b))


def test_rows_are_written_again_if_their_files_are_lost(tmp_path):
    buffer, a, b = make_buffer(130), tmp_path / "a", tmp_path / "b"
    save(buffer, a)
    shutil.rmtree(a)
    save(buffer, b)
    require_same(buffer, load(b))


def test_a_state_can_be_pickled_when_its_files_go(tmp_path):
    buffer = make_buffer(130)
    save(buffer, tmp_path / "a")
    pickled = pickle.dumps(buffer.get_state())
    state = buffer.get_state()
    shutil.rmtree(tmp_path / "a")
    restored = MultiAgentReplayBuffer(CAPACITY)
    with pytest.raises(CheckpointError, match="A segment of replayed rows is lost"):
        restored.set_state(state)
    assert len(restored) == 0
    restored.set_state(pickle.loads(pickled))
    require_same(buffer, restored)


@pytest.mark.parametrize("step", ["replace", "link", "fsync", "unlink", "open"])
def test_a_crash_between_any_two_steps_leaves_old_or_new_whole(tmp_path, step):
    outcomes = set()
    for count in range(1, 100):
        folder = tmp_path / str(count)
        old = make_buffer(100)
        save(old, folder)
        add(old, 100, 260)
        with pytest.MonkeyPatch.context() as patch:
            crashed = crash_at(patch, os, step, count)
            with contextlib.suppress(Crash):
                save(old, folder)
        result = load(folder)
        outcomes.add(result.num_added)
        assert result.num_added in (200, 520)
        assert len(set(result.sample(2000, "p")["actions"].tolist())) == 100
        save(old, folder)
        require_same(old, load(folder), 20)
        assert len(files(folder)) == 8  # what the crash left is removed
        shutil.rmtree(folder)
        if not crashed():
            break
    assert outcomes == {200, 520} or (step in ("link", "unlink") and outcomes == {520})


def crash_at(patch, module, name, count):
    real, calls = getattr(module, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == count:
            raise Crash
        return real(*args, **kwargs)

    patch.setattr(module, name, call)
    return lambda: len(calls) >= count


# -- damage and malice ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "missing or truncated"),
        (Path.unlink, "missing or truncated"),
    ],
)
def test_damaged_segments_are_refused(tmp_path, damage, message):
    save(make_buffer(100), tmp_path)
    damage(tmp_path / min(files(tmp_path)))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(segments={}),
        lambda manifest: manifest.update(segments=[]),
        lambda manifest: manifest["segments"].pop(),
        lambda manifest: manifest["segments"].reverse(),
        lambda manifest: manifest["segments"][0].update(file="../../etc/passwd"),
        lambda manifest: manifest["segments"][0].update(file="segment-0123456789abcdef.h5"),
        lambda manifest: manifest["segments"][0].update(bytes=-1),
        lambda manifest: manifest["segments"].append("x"),
    ],
)
def test_manifests_of_strangers_are_refused(tmp_path, change):
    save(make_buffer(100), tmp_path)
    path = tmp_path / "test.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["checksum"] = compute_checksum(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_numbers_of_strangers_are_refused_before_memory_is_taken():
    good = make_buffer(100).get_state()
    changes = [
        {"num_added": 10**15},
        {"num_added": -1},
        {"rows": good["buffers"]["p"]["rows"] * 2},
        {"rows": [(0, good["buffers"]["q"]["frames"]["obs/eye"]["segments"][0][1])]},
        {"columns": {"obs": np.zeros((0, 10**9, 10**9), np.int8)}},
    ]
    for change in changes:
        buffer = MultiAgentReplayBuffer(CAPACITY)
        bad = {**good, "buffers": {"p": {**good["buffers"]["p"], **change}}}
        with pytest.raises(CheckpointError):
            buffer.set_state(bad)
        assert len(buffer) == 0
        assert buffer.allocator.bytes_in_memory == buffer.allocator.bytes_in_files == 0
