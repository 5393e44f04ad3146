"""Checkpoint folders: round trips, damage, races and kills."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import shutil
import sys
import time

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.checkpoints import edit_manifest
from helpers.hdf5_objects import OBJECTS, add_object
from tfpolicies.errors import CheckpointError, UnknownPolicyError
from tfpolicies.storage import checkpoint
from tfpolicies.storage.checkpoint import (
    CheckpointData,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from tfpolicies.storage.hdf5_bytes import pack_arrays, unpack_arrays


def part(value=0.0, **entries):
    arrays = {
        "weights": {"dense/kernel": np.full((3, 2), value, np.float32), "step": np.uint32(7)},
        "optimizer": {"m/0": np.arange(4.0)},
    }
    return CheckpointData("policy.json", {"type": "Policy", **entries}, arrays)


def write_policy(folder, value=0.0, **entries):
    write_checkpoint(folder, *part(value, **entries))


def write_algorithm(folder, value, ids=("main", "old")):
    """Writes `value` into every part, so that a mixture of two writes would show."""
    policies = {key: part(value if key == "main" else 0.0, tag=value) for key in ids}
    arrays = {"counters": {"steps": np.array(value)}}
    entries = {"type": "Algorithm", "value": value}
    write_checkpoint(folder, "algorithm.json", entries, arrays, policies=policies)


def read_policy(folder):
    return read_checkpoint(folder, "policy.json", kind="Policy")


def read_algorithm(folder, **options):
    return read_checkpoint(folder, "algorithm.json", kind="Algorithm", **options)


def write_policies(folder, **policies):
    write_checkpoint(folder, "a.json", {"type": "A"}, {}, policies=policies)


def get_value(whole):
    """Returns the one value in all parts of a checkpoint of `write_algorithm`."""
    values = {
        whole.manifest["value"],
        float(whole.arrays["counters"]["steps"]),
        float(whole.policies["main"].arrays["weights"]["dense/kernel"][0, 0]),
        *(policy.manifest["tag"] for policy in whole.policies.values()),
    }
    (value,) = values
    return value


def get_stamps(folder):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(x.relative_to(folder)): (x.stat().st_ino, x.stat().st_mtime_ns) for x in paths}


def get_names(folder):
    return set(get_stamps(folder))


def has_temporary_files(folder):
    return any(name.endswith("tfp-tmp") for name in get_names(folder))


# Round trips --------------------------------------------------------------------------------------


@pytest.mark.core
def test_arrays_and_manifest_come_back_as_they_were(tmp_path):
    write_policy(tmp_path / "new" / "folder", 1.5, config={"lr": 1e-3, "layers": [64, None]})
    back = read_policy(tmp_path / "new" / "folder")
    assert back.manifest["config"] == {"lr": 1e-3, "layers": [64, None]}
    assert list(back.arrays) == ["weights", "optimizer"]
    assert list(back.arrays["weights"]) == ["dense/kernel", "step"]
    np.testing.assert_array_equal(back.arrays["weights"]["dense/kernel"], np.full((3, 2), 1.5))
    assert back.policies == {}


DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", ">f4"]


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (2, 3)])
def test_every_plain_dtype_and_shape_round_trips_to_the_bit(dtype, shape):
    array = np.asarray(np.random.default_rng(0).normal(size=shape) * 99).astype(dtype)
    back = unpack_arrays(pack_arrays({"x": array}))["x"]
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, shape, array.tobytes())
    assert back.flags.writeable


def test_nan_payloads_and_signed_zeros_survive():
    bits = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 1], np.uint32).view(np.float32)
    back = unpack_arrays(pack_arrays({"x": bits}))["x"]
    assert back.tobytes() == bits.tobytes()


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(st.lists(NAMES | st.sampled_from([".", "..", "/", "a/b", "a", "%2F", "\0"]), unique=True))
@settings(max_examples=60)
def test_any_unicode_names_keep_their_text_and_order(chosen):
    arrays = {name: np.array(i) for i, name in enumerate(chosen)}
    back = unpack_arrays(pack_arrays(arrays))
    assert list(back) == chosen
    assert [int(array) for array in back.values()] == list(range(len(chosen)))


def test_the_same_arrays_give_the_same_bytes_at_another_time():
    arrays = {f"layer/{i}": np.random.default_rng(i).normal(size=(5, i)) for i in range(30)}
    first = pack_arrays(arrays)
    time.sleep(1.1)  # HDF5 would store whole seconds
    assert pack_arrays({name: array.copy() for name, array in arrays.items()}) == first


def test_an_empty_checkpoint_and_an_empty_group_are_fine(tmp_path):
    write_checkpoint(tmp_path, "policy.json", {"type": "Policy"}, {})
    assert read_policy(tmp_path).arrays == {}
    write_checkpoint(tmp_path, "policy.json", {"type": "Policy"}, {"weights": {}})
    assert read_policy(tmp_path).arrays == {"weights": {}}


def test_writing_changes_neither_manifest_nor_arrays_of_the_caller(tmp_path):
    entries, arrays = {"type": "Policy"}, {"weights": {"w": np.ones(2)}}
    write_checkpoint(tmp_path, "policy.json", entries, arrays)
    assert entries == {"type": "Policy"}
    np.testing.assert_array_equal(arrays["weights"]["w"], np.ones(2))


# Writing again ------------------------------------------------------------------------------------


@pytest.mark.core
def test_an_unchanged_group_is_not_written_again(tmp_path):
    write_policy(tmp_path, 1.0)
    before = get_stamps(tmp_path)
    write_policy(tmp_path, 2.0)
    after = get_stamps(tmp_path)
    assert {name.split("-")[0] for name in before.keys() - after.keys()} == {"weights"}
    (optimizer,) = (name for name in after if name.startswith("optimizer"))
    assert after[optimizer] == before[optimizer]


def test_the_same_checkpoint_again_touches_no_file(tmp_path):
    write_algorithm(tmp_path, 1.0)
    before = get_stamps(tmp_path)
    write_algorithm(tmp_path, 1.0)
    assert get_stamps(tmp_path) == before


def test_a_damaged_file_is_replaced_by_writing_again(tmp_path):
    write_policy(tmp_path)
    (file,) = tmp_path.glob("weights-*.h5")
    file.write_bytes(b"x" * file.stat().st_size)
    write_policy(tmp_path)
    assert read_policy(tmp_path).arrays["weights"]["step"] == 7


def test_stale_and_temporary_files_are_removed_but_a_strangers_files_stay(tmp_path):
    write_policy(tmp_path, 1.0)
    strangers = {
        "notes.txt",
        "run.json",
        "weights.h5",
        "weights-1234.h5",
        "policies/readme",
        ".tmp",
    }
    (tmp_path / "policies").mkdir()
    for name in strangers:
        (tmp_path / name).write_text('{"arrays": {"a": {}}, "policies": 3}')
    (tmp_path / ".policy.json.0123abcd.tfp-tmp").write_text("half")
    (tmp_path / "weights-0123456789abcdef.h5").write_text("never listed")
    write_policy(tmp_path, 2.0)
    names = get_names(tmp_path)
    assert strangers <= names
    kinds = sorted(name.split("-")[0] for name in names - strangers)
    assert kinds == ["optimizer", "policy.json", "weights"]


def test_two_kinds_of_checkpoint_can_share_a_folder(tmp_path):
    write_policy(tmp_path, 1.0)
    write_algorithm(tmp_path, 2.0)
    write_policy(tmp_path, 3.0)
    assert get_value(read_algorithm(tmp_path)) == 2.0
    assert read_policy(tmp_path).arrays["weights"]["dense/kernel"][0, 0] == 3.0


BAD_ARRAYS = {
    "object": np.array([{}], object),
    "text": np.array(["a"]),
    "complex": np.array(1j),
    "date": np.array("2020-01-01", "M8[D]"),
    "record": np.zeros(1, [("a", "f4")]),
    "list": [1.0],
}


@pytest.mark.parametrize("array", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_arrays_that_are_not_plain_numbers_are_refused_and_nothing_is_written(array, tmp_path):
    arrays = {"weights": {"bad": array}}
    with pytest.raises(CheckpointError, match=r"'bad'.*'weights'"):
        write_checkpoint(tmp_path / "x", "p.json", {"type": "P"}, arrays)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "entries", "group", "array", "words"),
    [
        ("../p.json", {"type": "P"}, "w", "a", "plain file name"),
        ("p.txt", {"type": "P"}, "w", "a", "ending in .json"),
        ("p.json", {}, "w", "a", "'type'"),
        ("p.json", {"type": "P", "arrays": 1}, "w", "a", "must not set"),
        ("p.json", {"type": "P", "shape": (1, 2)}, "w", "a", "'shape'.*encode_value"),
        ("p.json", {"type": "P", "ids": {1: "a"}}, "w", "a", "'ids'.*encode_value"),
        ("p.json", {"type": "P", "lr": float("nan")}, "w", "a", "'lr'.*encode_value"),
        ("p.json", {"type": "P", "f": len}, "w", "a", "'f'.*encode_value"),
        ("p.json", {"type": "P"}, "../w", "a", "letters, digits"),
        ("p.json", {"type": "P"}, "w", "", "non-empty"),
        ("p.json", {"type": "P"}, "w", "\ud800", "unicode"),
    ],
)
def test_arguments_that_cannot_be_stored_are_refused(name, entries, group, array, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        write_checkpoint(tmp_path / "x", name, entries, {group: {array: np.ones(1)}})
    assert not (tmp_path / "x").exists()


def test_a_bad_policy_is_found_before_any_other_is_written(tmp_path):
    bad = CheckpointData("policy.json", {"type": "Policy"}, {"weights": {"w": np.array(["x"])}})
    with pytest.raises(CheckpointError, match="'w'"):
        write_policies(tmp_path / "x", good=part(), bad=bad)
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file/x.*could not be written"):
        write_policy(tmp_path / "file" / "x")


# Policies inside an algorithm's checkpoint --------------------------------------------------------


@pytest.mark.core
def test_policies_are_read_with_their_algorithm_or_without(tmp_path):
    write_algorithm(tmp_path, 4.0)
    whole = read_algorithm(tmp_path)
    assert get_value(whole) == 4.0
    assert list(whole.policies) == ["main", "old"]
    alone = read_policy(tmp_path / whole.manifest["policies"]["main"]["folder"])
    assert alone.manifest == whole.policies["main"].manifest
    assert alone.arrays["weights"]["dense/kernel"][0, 0] == 4.0


def test_a_policy_that_did_not_change_is_not_written_again(tmp_path):
    write_policies(tmp_path, main=part(1.0), old=part(0.5))
    before = {k: v for k, v in get_stamps(tmp_path).items() if k.startswith("policies/old-")}
    write_policies(tmp_path, main=part(2.0), old=part(0.5))
    after = get_stamps(tmp_path)
    assert len(before) == 3
    assert before.items() <= after.items()
    assert len([name for name in after if name.startswith("policies/main-")]) == 3


def test_folders_of_dropped_policies_are_removed_but_a_strangers_file_in_them_stays(tmp_path):
    write_algorithm(tmp_path, 1.0)
    folders = {k: e["folder"] for k, e in read_algorithm(tmp_path).manifest["policies"].items()}
    (tmp_path / folders["old"] / "mine.txt").write_text("keep")
    (tmp_path / folders["old"] / "mine.json").write_text("{}")
    write_algorithm(tmp_path, 2.0, ids=("main",))
    assert not (tmp_path / folders["main"]).exists()
    assert get_names(tmp_path / folders["old"]) == {"mine.txt", "mine.json"}


def test_without_policies_the_folder_for_them_is_gone(tmp_path):
    write_algorithm(tmp_path, 1.0)
    write_checkpoint(tmp_path, "algorithm.json", {"type": "Algorithm"}, {})
    assert get_names(tmp_path) == {"algorithm.json"}
    assert not (tmp_path / "policies").exists()


@pytest.mark.parametrize("policy_id", ["../../evil", "a/b", "", ".", "é🙂", "x" * 300, "\ud800"])
def test_any_policy_id_stays_inside_the_folder(policy_id, tmp_path):
    write_policies(tmp_path / "c", **{policy_id: part(1.0)})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    back = read_checkpoint(tmp_path / "c", "a.json", kind="A")
    assert list(back.policies) == [policy_id]
    assert back.policies[policy_id].arrays["weights"]["dense/kernel"][0, 0] == 1.0


def test_policies_of_the_same_content_and_similar_ids_are_both_there(tmp_path):
    write_policies(tmp_path, **{"a/b": part(1.0), "a:b": part(1.0)})
    assert list(read_checkpoint(tmp_path, "a.json", kind="A").policies) == ["a/b", "a:b"]


def test_only_the_groups_and_policies_asked_for_are_read(tmp_path):
    write_algorithm(tmp_path, 1.0)
    old = read_manifest(tmp_path, "algorithm.json", kind="Algorithm")["policies"]["old"]["folder"]
    shutil.rmtree(tmp_path / old)
    (counters,) = tmp_path.glob("counters-*.h5")
    counters.unlink()
    some = read_algorithm(tmp_path, groups=(), policies=["main"])
    assert (list(some.arrays), list(some.policies)) == ([], ["main"])
    with pytest.raises(UnknownPolicyError, match=r"\['other'\].*\['main', 'old'\]"):
        read_algorithm(tmp_path, policies=["main", "other"])


# Damage -------------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_missing_folder_is_not_found(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere.*not found"):
        read_policy(tmp_path / "nowhere")


@pytest.mark.core
@pytest.mark.parametrize(
    "content", [None, "folder", b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"type"']
)
def test_a_folder_without_a_proper_manifest_does_not_seem_to_be_valid(content, tmp_path):
    path = tmp_path / "policy.json"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    words = r"policy\.json' does not" if content == "folder" else "does not"
    with pytest.raises(CheckpointError, match=f"{words} seem to be valid"):
        read_policy(tmp_path)


def test_a_checkpoint_of_another_type_is_refused(tmp_path):
    write_policy(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"policy\.json' has type 'Policy', but must have 'Algorithm'"
    ):
        read_checkpoint(tmp_path, "policy.json", kind="Algorithm")


def test_a_manifest_edited_by_hand_is_refused(tmp_path):
    write_policy(tmp_path, lr=0.25)
    path = tmp_path / "policy.json"
    path.write_text(path.read_text().replace("0.25", "0.75"))
    with pytest.raises(CheckpointError, match=r"policy\.json'.*checksum differs"):
        read_policy(tmp_path)


ESCAPES = ["../secret.h5", "/etc/passwd", "sub/weights.h5", "", ".", "policy.json", 3, None]
ENTRIES = [None, 3, [], {}, {"file": "a"}, {"file": "a", "sha256": "b", "bytes": -1}]
VERSIONS = [2, 0, None, "1", True, 1.0]


@pytest.mark.core
@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        *(("arrays/weights/file", x, "'weights'.*not an array file of this") for x in ESCAPES),
        *(("arrays/weights", x, "'weights'") for x in ENTRIES),
        *((key, [1], f"'{key}'") for key in ("arrays", "policies")),
        *(("format_version", x, r"has format version.*'9\.8\.7'") for x in VERSIONS),
    ],
)
def test_malformed_entries_and_other_versions_are_refused(entry, value, words, tmp_path):
    write_policy(tmp_path)
    *parents, key = entry.split("/")
    with edit_manifest(tmp_path / "policy.json") as manifest:
        manifest["tfpolicies_version"] = "9.8.7"
        functools.reduce(dict.get, parents, manifest)[key] = value
    with pytest.raises(CheckpointError, match=rf"policy\.json'.*{words}"):
        read_policy(tmp_path)


@pytest.mark.parametrize("key", ["folder", "manifest", "sha256", "type"])
@pytest.mark.parametrize("value", ["../../x", "policies/../..", "policies/x/y", "/", "", 3, None])
def test_policy_folders_outside_the_folder_are_refused(key, value, tmp_path):
    write_algorithm(tmp_path, 1.0)
    with edit_manifest(tmp_path / "algorithm.json") as manifest:
        manifest["policies"]["main"][key] = value
    with pytest.raises(CheckpointError, match=r"json'"):
        read_algorithm(tmp_path)


@pytest.mark.core
@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "folder"])
def test_a_damaged_array_file_is_named_with_the_reason(damage, tmp_path):
    write_policy(tmp_path)
    (file,) = tmp_path.glob("optimizer-*.h5")
    content = file.read_bytes()
    file.unlink()
    if damage == "truncated":
        file.write_bytes(content[:-1])
    elif damage == "longer":
        file.write_bytes(content + b"x")
    elif damage == "folder":
        file.mkdir()
    word = {"missing": "is missing", "folder": "not a regular file"}.get(damage, "bytes")
    with pytest.raises(CheckpointError, match=rf"{file.name}.*{word}"):
        read_policy(tmp_path)


@pytest.mark.parametrize("pattern", ["weights-*.h5", "optimizer-*.h5"])
def test_a_flipped_bit_in_an_array_file_is_found_before_it_is_read(pattern, tmp_path, monkeypatch):
    write_policy(tmp_path)
    (file,) = tmp_path.glob(pattern)
    content = file.read_bytes()
    monkeypatch.setattr(checkpoint, "unpack_arrays", lambda image: {})
    for bit in np.random.default_rng(0).integers(0, 8 * len(content), 100):
        file.write_bytes(flip_bit(content, int(bit)))
        with pytest.raises(CheckpointError, match=rf"{file.name}.*damaged.*SHA-256"):
            read_policy(tmp_path)


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(tmp_path):
    write_policy(tmp_path, config={"lr": 0.001, "name": "main", "layers": [64, 64]})
    path = tmp_path / "policy.json"
    content, original = path.read_bytes(), read_policy(tmp_path).manifest
    harmless = 0
    for bit in range(8 * len(content)):
        path.write_bytes(flip_bit(content, bit))
        try:
            assert read_manifest(tmp_path, "policy.json", kind="Policy") == original
            harmless += 1  # white space into white space, or the case of an escape
        except CheckpointError as error:
            assert "policy.json" in str(error)  # noqa: PT017
    assert harmless < 0.05 * 8 * len(content)


def test_a_flipped_bit_in_a_policys_manifest_is_found_by_the_algorithm(tmp_path):
    write_algorithm(tmp_path, 1.0)
    (path,) = tmp_path.glob("policies/main-*/policy.json")
    content = path.read_bytes()
    for bit in np.random.default_rng(1).integers(0, 8 * len(content), 60):
        path.write_bytes(flip_bit(content, int(bit)))
        with pytest.raises(CheckpointError, match=r"policies/main-.*policy\.json' is damaged"):
            read_algorithm(tmp_path)


@pytest.mark.parametrize("pattern", ["policy.json", "weights-*.h5", ""])
def test_a_missing_part_of_a_policy_is_named(pattern, tmp_path):
    write_algorithm(tmp_path, 1.0)
    (folder,) = tmp_path.glob("policies/main-*")
    if pattern:
        next(folder.glob(pattern)).unlink()
    else:
        shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"policies/main-.*is missing"):
        read_algorithm(tmp_path)


def flip_bit(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# Array files of strangers -------------------------------------------------------------------------


def plant(folder, image):
    """Puts `image` in the place of the weights, with a manifest that agrees."""
    write_policy(folder)
    digest = hashlib.sha256(image).hexdigest()
    entry = {"file": f"weights-{digest[:16]}.h5", "sha256": digest, "bytes": len(image)}
    (folder / entry["file"]).write_bytes(image)
    with edit_manifest(folder / "policy.json") as manifest:
        manifest["arrays"]["weights"] = entry
    return entry["file"]


@pytest.mark.core
@pytest.mark.parametrize("kind", [*OBJECTS, "group", "array beside the group"])
def test_only_plain_numbers_inside_the_file_are_read(kind, tmp_path):
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        group = file.create_group("arrays")
        if kind == "group":
            group.create_group("x")
        elif kind == "array beside the group":
            file.create_dataset("x", data=1)
        else:
            add_object(group, "x", kind)
    name = plant(tmp_path, buffer.getvalue())
    with pytest.raises(CheckpointError, match=rf"{name}' is not an array file"):
        read_policy(tmp_path)


@pytest.mark.parametrize("image", [b"", b"no HDF5", b"\x89HDF\r\n\x1a\n" + b"\xff" * 200])
def test_a_file_of_another_format_is_named(image, tmp_path):
    name = plant(tmp_path, image)
    with pytest.raises(CheckpointError, match=rf"{name}' is not an array file"):
        read_policy(tmp_path)


# Races and kills ----------------------------------------------------------------------------------


@pytest.mark.core
def test_a_reader_that_a_writer_overtakes_reads_the_new_checkpoint(tmp_path, monkeypatch):
    write_algorithm(tmp_path, 1.0)
    read_text, writes = checkpoint._read_manifest_text, [2.0, 3.0, 4.0]

    def read_then_be_overtaken(*args):
        text = read_text(*args)
        if writes:
            write_algorithm(tmp_path, writes.pop(0))
        return text

    monkeypatch.setattr(checkpoint, "_read_manifest_text", read_then_be_overtaken)
    assert get_value(read_algorithm(tmp_path)) == 4.0


@pytest.mark.parametrize("pattern", ["weights-*.h5", "policy.json"])
def test_a_file_that_vanishes_while_it_is_opened_counts_as_missing(pattern, tmp_path, monkeypatch):
    write_algorithm(tmp_path, 1.0)
    (doomed,) = tmp_path.glob(f"policies/main-*/{pattern}")
    real = checkpoint.open_regular

    def overtaken(path):
        if path == doomed:
            path.unlink(missing_ok=True)
            monkeypatch.setattr(checkpoint, "open_regular", real)
            write_algorithm(tmp_path, 2.0)
        return real(path)

    monkeypatch.setattr(checkpoint, "open_regular", overtaken)
    assert get_value(read_algorithm(tmp_path)) == 2.0


class Crash(BaseException):
    """Stands for the end of the process."""


# Before Python 3.11 pathlib kept references of its own to these functions of `os`.
PATHLIB_STEPS = ["unlink", "rmdir", "mkdir"] if sys.version_info >= (3, 11) else []
STEPS = ["fsync", "replace", *PATHLIB_STEPS]


def crash_at(monkeypatch, module, name, count):
    """Lets call number `count` of `module.name` crash; returns whether there were so many."""
    real, calls = getattr(module, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == count:
            raise Crash
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, call)
    return lambda: len(calls) >= count


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_between_any_two_steps_leaves_old_or_new_whole(step, tmp_path):
    values = set()
    for count in range(1, 200):
        folder = tmp_path / str(count)
        write_algorithm(folder, 1.0, ids=("main", "old", "gone"))
        with pytest.MonkeyPatch.context() as patch:
            crashed = crash_at(patch, os, step, count)
            with contextlib.suppress(Crash):
                write_algorithm(folder, 2.0)
        values.add(get_value(read_algorithm(folder)))
        write_algorithm(folder, 3.0)
        assert get_value(read_algorithm(folder)) == 3.0
        entries = read_algorithm(folder).manifest["policies"].values()
        folders = {f"policies/{path.name}" for path in folder.glob("policies/*")}
        assert folders == {entry["folder"] for entry in entries}
        assert not has_temporary_files(folder)
        if not crashed():
            break
    assert count > 2
    assert 2.0 in values


def test_a_full_disk_keeps_the_old_checkpoint_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    write_algorithm(tmp_path, 1.0)
    before = get_names(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            write_algorithm(tmp_path, 2.0)
    assert get_value(read_algorithm(tmp_path)) == 1.0
    assert before <= get_names(tmp_path)
    assert not has_temporary_files(tmp_path)
