"""A stash that is full, gone or damaged: the policy is named, and nothing in memory is lost."""

import contextlib
import json
import resource
import shutil

import numpy as np
import pytest

from helpers.factories import OBS, TWO, batch_for, make, rows_of
from tfpolicies import PolicyMap, PPOTF2Policy
from tfpolicies.errors import StashError

ROWS = rows_of(OBS, 3)
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


def fill(policy, number):
    policy.set_weights([np.full_like(x, number) for x in policy.get_weights().values()])


def number_of(policy):
    (result,) = {float(x) for array in policy.get_weights().values() for x in array.flat}
    return result


@pytest.fixture(scope="module", autouse=True)
def program():
    """Keeps what the policies of this file share from being made again for each test."""
    kept = make()
    kept.learn_on_batch(batch_for(kept, 4))
    yield
    del kept


def map_of(*ids, **arguments):
    """Makes a map of policies whose weights are 1, 2, 3..."""
    m = PolicyMap(**arguments)
    for i, policy_id in enumerate(ids):
        m[policy_id] = make()
        fill(m.get_handle(policy_id), i + 1)
    return m


def file_of(m, policy_id):
    page = m._cache[m.get_handle(policy_id)._state]
    return page.stash.get_path(page.name)


# -- no space -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_a_full_disk_costs_nothing_and_the_map_recovers(kept, tmp_path):
    m = map_of("a", "b", capacity=1, path=tmp_path if kept else None)  # b in memory, unwritten
    new = make()
    ways = {
        "get": lambda: m["a"],
        "use": lambda: m.get_handle("a").compute_actions(ROWS),
        "set": lambda: m.__setitem__("c", new),
        "update": lambda: m.update({"c": new}),
        "create": lambda: m.create_policy("c", PPOTF2Policy, OBS, TWO, {}, QUICK),
        "copy": lambda: m.copy_policy("b", "c"),
        "evict": lambda: m.evict("b"),
        "freeze": lambda: m.freeze("b"),
    }
    for name, way in ways.items():
        with full_disk(), pytest.raises(StashError, match=r"'b' cannot be written.*space"):
            way()
        assert set(m) == {"a", "b"}, name
        assert m.in_memory() == ["b"], name
        assert number_of(m["b"]) == 2
        assert not m["b"].driver.is_frozen
        assert "c" not in m.specs
    with full_disk():
        m["b"].learn_on_batch(batch_for(m["b"], 4))
        fill(m["b"], 5)
        assert m.get("b") is m.get_handle("b")
    stash = tmp_path if kept else m._cache.stash.folder
    assert list(stash.rglob("*.tfp-tmp")) == []
    assert number_of(m["a"]) == 1
    assert number_of(m["b"]) == 5
    m["c"] = new
    assert m.freeze("b").driver.is_frozen


def test_the_old_entry_outlives_a_write_that_failed():
    m = map_of("a", "b", capacity=1)
    assert number_of(m["a"]) == 1
    fill(m["a"], 3)
    with full_disk(), pytest.raises(StashError, match="'a'"):
        _ = m["b"]
    content = file_of(m, "a").read_bytes()
    assert np.frombuffer(content, np.uint8).size > 200
    assert number_of(m["a"]) == 3
    assert number_of(m["b"]) == 2
    assert file_of(m, "a").read_bytes() != content


def test_a_flush_writes_what_it_can(tmp_path):
    m = map_of("a", "b", path=tmp_path)
    m.flush()
    fill(m["a"], 7)
    with full_disk(), pytest.raises(StashError, match="'a' cannot be written"):
        m.flush()
    with full_disk(), pytest.raises(StashError, match="'a' cannot be written"):
        m.close()
    assert number_of(m["a"]) == 7  # a close that failed closed nothing
    m.close()
    with PolicyMap(path=tmp_path) as m:
        assert (number_of(m["a"]), number_of(m["b"])) == (7, 2)


# -- no folder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_a_deleted_folder_costs_only_what_was_nowhere_else(kept, tmp_path):
    m = map_of("a", "b", "c", "d", capacity=2, path=tmp_path if kept else None)
    a = m.get_handle("a")
    assert number_of(m["b"]) == 2  # in memory, and in the folder as it is
    assert m.in_memory() == ["d", "b"]
    m.freeze("b")
    m["b"].compute_actions(ROWS)
    folder = m._cache.stash.folder
    shutil.rmtree(tmp_path if kept else folder)
    for _ in range(2):
        with pytest.raises(StashError, match="'a' was stashed and cannot be read back"):
            _ = m["a"]
        with pytest.raises(StashError, match="'a'"):
            a.compute_actions(ROWS)
    assert number_of(m["d"]) == 4
    m["e"], m["f"] = make(), make()
    assert m.in_memory() == ["e", "f"]
    assert number_of(m["d"]) == 4
    assert number_of(m["b"]) == 2
    assert m["b"].driver.is_frozen
    del m["a"]
    with pytest.raises(StashError, match="'a'"):
        a.get_weights()  # it is not made up
    m["c"] = make()
    fill(m["c"], 9)
    _ = m["d"], m["e"]
    assert number_of(m["c"]) == 9
    m.clear()
    assert len(m) == 0


def test_a_reopened_map_without_its_images_names_the_policy(tmp_path):
    map_of("a", "b", path=tmp_path).close()
    with PolicyMap(path=tmp_path) as m:
        for path in (tmp_path / "worker_0").glob("a*"):
            path.unlink()
        with pytest.raises(StashError, match="'a' was stashed and cannot be read back"):
            _ = m["a"]
        with pytest.raises(StashError, match="'a'"):
            m.get("a")
        assert number_of(m["b"]) == 2
        del m["a"]
    with PolicyMap(path=tmp_path) as m:
        assert list(m) == ["b"]


# -- damage ---------------------------------------------------------------------------------------

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
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_named_and_others_are_unharmed(damage, frozen):
    m = map_of("a", "b", "c", capacity=2)
    if frozen:
        m.freeze("a")
    m.evict("a")
    path = file_of(m, "a")
    sound = path.read_bytes()
    path.write_bytes(DAMAGES[damage](sound))
    a = m.get_handle("a")
    for _ in range(2):
        with pytest.raises(StashError, match="'a' was stashed and cannot be read back"):
            _ = m["a"]
        with pytest.raises(StashError, match="'a'"):
            a.get_weights()
    assert [number_of(m[x]) for x in "bc"] == [2, 3]
    assert len(m.in_memory()) == 2
    path.write_bytes(sound)
    assert number_of(m["a"]) == 1  # nothing was thrown away
    m.evict("a")
    path.write_bytes(DAMAGES[damage](sound))
    m["a"] = make()
    fill(m["a"], 6)
    assert number_of(m["a"]) == 6


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


@pytest.mark.parametrize("damage", RECORDS)
def test_a_damaged_record_is_named_and_others_are_unharmed(damage, tmp_path):
    map_of("a", "b", path=tmp_path).close()
    (record,) = (tmp_path / "worker_0").glob("a*.json")
    text = record.read_text()
    with PolicyMap(path=tmp_path) as m:
        assert set(m) == {"a", "b"}
        record.write_text(RECORDS[damage](text))
        with pytest.raises(StashError, match="'a'"):
            _ = m["a"]
        assert number_of(m["b"]) == 2
        m.flush()
        assert "a" in m
        record.write_text(text)
        assert number_of(m["a"]) == 1
    record.write_text(RECORDS[damage](text))
    with PolicyMap(path=tmp_path) as m:
        assert number_of(m["b"]) == 2
        m["a"] = make()
        fill(m["a"], 4)
    with PolicyMap(path=tmp_path) as m:
        assert number_of(m["a"]) == 4
