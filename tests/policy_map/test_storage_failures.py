"""Stashes that are full, gone or damaged: the policy is named, and nothing in memory is lost."""

import contextlib
import json
import resource
import shutil

import pytest

from helpers.factories import OBS, TWO, batch_for, make, rows_of
from helpers.policy_maps import fill, get_number, make_filled, make_map
from tfpolicies import PolicyMap, PPOTF2Policy
from tfpolicies.errors import StashError

ROWS = rows_of(OBS, 3)
PATHS = pytest.mark.parametrize("has_path", [False, True])
QUICK = {"inference": "tf", "jit_compile": False, "model": {"fcnet_hiddens": [4]}}


@contextlib.contextmanager
def full_disk(allowed=200):
    """Lets no file grow beyond some bytes, fewer than a policy takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module", autouse=True)
def program():
    """Keeps the Program of this file from being made again for each test."""
    policy = make()
    policy.learn_on_batch(batch_for(policy, 4))
    yield
    del policy


def get_file(m, policy_id):
    page = m._cache[m.get_handle(policy_id).driver.acting.state]
    return page.stash.get_path(page.name)


@PATHS
def test_a_full_disk_costs_nothing_and_the_map_recovers(has_path, tmp_path):
    m = make_map(
        "a", "b", capacity=1, path=tmp_path if has_path else None
    )  # b in memory, unwritten
    new = make()
    calls = {
        "get": lambda: m["a"],
        "use": lambda: m.get_handle("a").compute_actions(ROWS),
        "set": lambda: m.__setitem__("c", new),
        "update": lambda: m.update({"c": new}),
        "create": lambda: m.create_policy("c", PPOTF2Policy, OBS, TWO, {}, QUICK),
        "copy": lambda: m.copy_policy("b", "c"),
        "evict": lambda: m.evict("b"),
        "freeze": lambda: m.freeze("b"),
    }
    for name, call in calls.items():
        with full_disk(), pytest.raises(StashError, match=r"'b' cannot be written.*space"):
            call()
        assert (set(m), m.in_memory()) == ({"a", "b"}, ["b"]), name
        assert get_number(m["b"]) == 2
        assert not m["b"].driver.is_frozen
        assert "c" not in m.specs
    with full_disk():
        m["b"].learn_on_batch(batch_for(m["b"], 4))
        fill(m["b"], 5)
        assert m.get("b") is m.get_handle("b")
    stash = tmp_path if has_path else m._cache.stash.folder
    assert list(stash.rglob("*.tfp-tmp")) == []
    assert [get_number(m[x]) for x in "ab"] == [1, 5]
    m["c"] = new
    assert m.freeze("b").driver.is_frozen


def test_the_old_entry_outlives_a_write_that_failed():
    m = make_map("a", "b", capacity=1)
    assert get_number(m["a"]) == 1
    fill(m["a"], 3)
    with full_disk(), pytest.raises(StashError, match="'a'"):
        _ = m["b"]
    content = get_file(m, "a").read_bytes()
    assert len(content) > 200
    assert get_number(m["a"]) == 3
    assert get_number(m["b"]) == 2
    assert get_file(m, "a").read_bytes() != content


def test_a_flush_writes_all_policies_but_those_that_fail(tmp_path):
    m = make_map("a", "b", path=tmp_path)
    m.flush()
    fill(m["a"], 7)
    with full_disk(), pytest.raises(StashError, match="'a' cannot be written"):
        m.flush()
    with full_disk(), pytest.raises(StashError, match="'a' cannot be written"):
        m.close()
    assert get_number(m["a"]) == 7  # a close that failed closed nothing
    m.close()
    with PolicyMap(path=tmp_path) as m:
        assert (get_number(m["a"]), get_number(m["b"])) == (7, 2)


@PATHS
def test_a_deleted_folder_costs_only_policies_that_were_stored_nowhere_else(has_path, tmp_path):
    m = make_map("a", "b", "c", "d", capacity=2, path=tmp_path if has_path else None)
    a = m.get_handle("a")
    assert get_number(m["b"]) == 2  # in memory, and in the folder as it is
    assert m.in_memory() == ["d", "b"]
    m.freeze("b")
    m["b"].compute_actions(ROWS)
    shutil.rmtree(tmp_path if has_path else m._cache.stash.folder)
    for _ in range(2):
        with pytest.raises(StashError, match="'a' was stashed and cannot be read back"):
            _ = m["a"]
        with pytest.raises(StashError, match="'a'"):
            a.compute_actions(ROWS)
    assert get_number(m["d"]) == 4
    m["e"], m["f"] = make(), make()
    assert m.in_memory() == ["e", "f"]
    assert get_number(m["d"]) == 4
    assert get_number(m["b"]) == 2
    assert m["b"].driver.is_frozen
    del m["a"]
    with pytest.raises(StashError, match="'a'"):
        a.get_weights()  # it is not made up
    m["c"] = make_filled(9)
    _ = m["d"], m["e"]
    assert get_number(m["c"]) == 9
    m.clear()
    assert len(m) == 0


def test_a_reopened_map_without_its_images_names_the_policy(tmp_path):
    make_map("a", "b", path=tmp_path).close()
    with PolicyMap(path=tmp_path) as m:
        for path in (tmp_path / "worker_0").glob("a*"):
            path.unlink()
        with pytest.raises(StashError, match="'a' was stashed and cannot be read back"):
            _ = m["a"]
        with pytest.raises(StashError, match="'a'"):
            m.get("a")
        assert get_number(m["b"]) == 2
        del m["a"]
    with PolicyMap(path=tmp_path) as m:
        assert list(m) == ["b"]


DAMAGES = {
    "empty": lambda x: b"",
    "no header": lambda x: x[:30],
    "cut": lambda x: x[:-1],
    "half": lambda x: x[: len(x) // 2],
    "longer": lambda x: x + b"\0",
    "foreign": lambda x: b"something" + x[9:],
    "later form": lambda x: x[:8] + b"\2" + x[9:],
    "first byte": lambda x: x[:64] + bytes([x[64] ^ 1]) + x[65:],
    "last byte": lambda x: x[:-1] + bytes([x[-1] ^ 128]),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_named_and_others_are_unharmed(damage, frozen):
    m = make_map("a", "b", "c", capacity=2)
    if frozen:
        m.freeze("a")
    m.evict("a")
    path = get_file(m, "a")
    sound = path.read_bytes()
    path.write_bytes(damage(sound))
    a = m.get_handle("a")
    for _ in range(2):
        with pytest.raises(StashError, match="'a' was stashed and cannot be read back"):
            _ = m["a"]
        with pytest.raises(StashError, match="'a'"):
            a.get_weights()
    assert [get_number(m[x]) for x in "bc"] == [2, 3]
    assert len(m.in_memory()) == 2
    path.write_bytes(sound)
    assert get_number(m["a"]) == 1  # nothing was thrown away
    m.evict("a")
    path.write_bytes(damage(sound))
    m["a"] = make_filled(6)
    assert get_number(m["a"]) == 6


RECORDS = {
    "empty": lambda x: "",
    "no json": lambda x: x[:-3],
    "a list": lambda x: "[]",
    "nested": lambda x: "[" * 100_000,
    "no policy": lambda x: json.dumps({k: v for k, v in json.loads(x).items() if k != "policy"}),
    "policy is a list": lambda x: json.dumps({**json.loads(x), "policy": []}),
    "policy is empty": lambda x: json.dumps({**json.loads(x), "policy": {}}),
    "another class": lambda x: x.replace("PPOTF2Policy", "PPOTF3Policy"),
    "another kind": lambda x: x.replace("PPOTF2Policy", "PGTF2Policy"),
    "no state": lambda x: x.replace('"state"', '"stat"'),
    "no generator": lambda x: x.replace("PCG64", "PCG65"),
    "other units": lambda x: x.replace("fcnet_hiddens", "fcnet_hidden"),
}


@pytest.mark.parametrize("damage", RECORDS.values(), ids=RECORDS)
def test_a_damaged_record_is_named_and_others_are_unharmed(damage, tmp_path):
    make_map("a", "b", path=tmp_path).close()
    (record,) = (tmp_path / "worker_0").glob("a*.json")
    text = record.read_text()
    with PolicyMap(path=tmp_path) as m:
        assert set(m) == {"a", "b"}
        record.write_text(damage(text))
        with pytest.raises(StashError, match="'a'"):
            _ = m["a"]
        assert get_number(m["b"]) == 2
        m.flush()
        assert "a" in m
        record.write_text(text)
        assert get_number(m["a"]) == 1
    record.write_text(damage(text))
    with PolicyMap(path=tmp_path) as m:
        assert get_number(m["b"]) == 2
        m["a"] = make_filled(4)
    with PolicyMap(path=tmp_path) as m:
        assert get_number(m["a"]) == 4
