"""Replay buffers in checkpoints: new rows are written, old ones shared, bad ones refused."""

import contextlib
import json
import os
import pickle
import shutil

import numpy as np
import pytest

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.errors import CheckpointError
from tfpolicies.replay.multi_agent_buffer import MultiAgentReplayBuffer
from tfpolicies.replay.prioritized import MultiAgentPrioritizedReplayBuffer
from tfpolicies.storage.checkpoint import read_checkpoint, write_checkpoint
from tfpolicies.storage.json_values import decode_value, encode_value
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


def buffer_of(count, kind=MultiAgentReplayBuffer):
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


KINDS = [MultiAgentReplayBuffer, MultiAgentPrioritizedReplayBuffer]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 99, 100, 130, 500])
def test_a_stored_buffer_goes_on_exactly(tmp_path, kind, count):
    buffer = buffer_of(count, kind)
    save(buffer, tmp_path)
    twin = load(tmp_path, kind)
    for each in (buffer, twin):
        add(each, count, count + 30)
    require_same(buffer, twin)
    assert twin.num_added == 2 * (count + 30)


def test_rows_that_are_stored_are_not_written_again(tmp_path):
    buffer = buffer_of(100)
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
    assert len(third) == 8  # those of 100 to 130 were written anew, and the former are gone
    add(buffer, 160, 320)
    save(buffer, tmp_path)
    assert len(first.keys() & files(tmp_path).keys()) == 2  # frames, to compare new ones with
    require_same(buffer, load(tmp_path))


def test_checkpoints_in_several_folders_share_files_by_links(tmp_path):
    buffer, a, b, c = buffer_of(100), *(tmp_path / name for name in "abc")
    save(buffer, a)
    add(buffer, 100, 110)
    save(buffer, b)
    shared = files(a).items() & files(b).items()
    assert len(shared) == 4
    shutil.rmtree(a)
    twin = load(b)
    save(twin, c)  # a resumed run shares what it has read and is whole
    assert files(b).keys() == files(c).keys()
    assert files(b).items() & files(c).items() == shared
    shutil.rmtree(b)
    require_same(twin, load(c))


def test_where_links_are_not_possible_files_are_copied(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    buffer, a, b = buffer_of(130), tmp_path / "a", tmp_path / "b"
    save(buffer, a)
    save(buffer, b)
    assert files(a).keys() == files(b).keys()
    assert not set(files(a).values()) & set(files(b).values())
    require_same(buffer, load(b))


def test_rows_are_written_again_if_their_files_are_lost(tmp_path):
    buffer, a, b = buffer_of(130), tmp_path / "a", tmp_path / "b"
    save(buffer, a)
    shutil.rmtree(a)
    save(buffer, b)
    require_same(buffer, load(b))


def test_a_state_can_be_pickled_when_its_files_go(tmp_path):
    buffer = buffer_of(130)
    save(buffer, tmp_path / "a")
    pickled = pickle.dumps(buffer.get_state())
    state = buffer.get_state()
    shutil.rmtree(tmp_path / "a")
    twin, other = MultiAgentReplayBuffer(CAPACITY), MultiAgentReplayBuffer(CAPACITY)
    with pytest.raises(CheckpointError, match="A segment of replayed rows is lost"):
        other.set_state(state)
    assert len(other) == 0
    twin.set_state(pickle.loads(pickled))
    require_same(buffer, twin)


@pytest.mark.parametrize("step", ["replace", "link", "fsync", "unlink", "open"])
def test_a_crash_between_any_two_steps_leaves_old_or_new_whole(tmp_path, step):
    seen, buffer = set(), buffer_of(130)
    save(buffer, tmp_path / "elsewhere")
    for count in range(1, 100):
        folder = tmp_path / str(count)
        old = buffer_of(100)
        save(old, folder)
        add(old, 100, 260)
        with pytest.MonkeyPatch.context() as patch:
            crashed = crash_at(patch, os, step, count)
            with contextlib.suppress(Crash):
                save(old, folder)
        result = load(folder)
        seen.add(result.num_added)
        assert result.num_added in (200, 520)
        assert len(set(result.sample(2000, "p")["actions"].tolist())) == 100
        save(old, folder)
        require_same(old, load(folder), 20)
        assert len(files(folder)) == 8  # what the crash left is removed
        shutil.rmtree(folder)
        if not crashed():
            break
    assert seen == {200, 520} or (step in ("link", "unlink") and seen == {520})


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


def test_damaged_segments_are_refused_and_change_nothing(tmp_path):
    save(buffer_of(100), tmp_path)
    name = sorted(files(tmp_path))[0]
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-1] + b"x")
    with pytest.raises(CheckpointError, match="is damaged"):
        load(tmp_path)
    (tmp_path / name).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="missing or truncated"):
        load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match="missing or truncated"):
        load(tmp_path)


def rewritten(folder, change):
    """Changes a manifest as a stranger may, with the right checksum."""
    from tfpolicies.storage.manifest import compute_checksum

    path = folder / "test.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["checksum"] = compute_checksum(manifest)
    path.write_text(json.dumps(manifest))


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
    save(buffer_of(100), tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_numbers_of_strangers_are_refused_before_room_is_taken():
    good = buffer_of(100).get_state()
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
