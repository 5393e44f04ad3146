"""Untrusted pickles: plain data, records of objects, and refusals before anything runs."""

import builtins
import contextlib
import os
import pickle
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from tfpolicies import storage
from tfpolicies.compat import pickle_process
from tfpolicies.compat.pickle_process import ObjectRecord, read_pickle
from tfpolicies.errors import CheckpointError

MOST_SECONDS, MOST_MEGABYTES = 5.0, 500  # of a slow machine: half of that elsewhere


class Calling:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class Stated(Calling):
    def __reduce__(self):
        return (*self.call, {"x": 1})


def read(folder: Path, content: bytes):
    path = folder / "policy_state.pkl"
    path.write_bytes(content)
    return read_pickle(path)


def nested(depth: int) -> bytes:
    return b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b"."


def doubled(times: int) -> bytes:
    """Returns a list of two of a list of two of ...: 2 ** times values."""
    return b"\x80\x04]" + b"".join(b"\x94](h%ch%ce" % (i, i) for i in range(times)) + b"."


def make_array(shape: tuple[int, ...], code: str, content: bytes | list) -> bytes:
    """Returns an array whose parts do not belong together."""
    kind = pickle.dumps(np.dtype("f4")).replace(b"f4", code.encode())[2:-1]
    head = b"\x80\x04cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
    inner = [pickle.dumps(x, 3)[2:-1] for x in (1, shape)]
    rest = [pickle.dumps(x, 4)[2:-1] for x in (False, content)]
    return head + b"(" + b"".join(inner) + kind + b"".join(rest) + b"tb."


def hostile(canary: Path) -> dict[str, bytes]:
    shell = f"touch {canary}"
    return {
        "system": pickle.dumps(Calling(os.system, shell)),
        "exec": pickle.dumps(Calling(builtins.exec, f"open({str(canary)!r}, 'w')")),
        "open": pickle.dumps(Stated(open, str(canary), "w")),
        "nested getattr": pickle.dumps(Calling(getattr, Calling(__import__, "os"), "system")),
        "pickle in array": pickle.dumps(np.array([Calling(os.system, shell)], object)),
        "extension": b"\x80\x04\x82\x01.",
        "persistent id": b"\x80\x04K\x01Q.",
        "old call": f"(S'{shell}'\nios\nsystem\n.".encode(),
        "buffer": b"\x80\x05\x97.",
        "deep": nested(100_000),
        "doubling": doubled(60),
        "huge memo": b"\x80\x04]r\xff\xff\xff\x7f.",
        "huge frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
        "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        "huge integer": b"\x80\x04\x8b" + struct.pack("<i", 4096) + b"\x01" * 4096 + b".",
        "huge array": make_array((1 << 40,), "f4", b"1234"),
        "object array": make_array((1,), "O8", [Calling]),
        "in a circle": b"\x80\x04]\x94h\x00a.",
        "missing reference": b"\x80\x04h\x05.",
        "no operands": b"\x80\x04R.",
        "endless calls": b"\x80\x04" + b"cos\nsystem\n)R" * 200_000 + b".",
        "copies": b"\x80\x04](" + b"K\x01" * 2000 + b"e\x94cbuiltins\nlist\n\x940"
        + b"h\x01h\x00\x85R" * 60_000 + b".",
        "truncated": pickle.dumps({"weights": list(range(100))})[:-20],
    }  # fmt: skip


INERT = ("system", "exec", "open", "nested getattr", "huge memo", "huge frame")
REASONS = {
    "extension": "the opcode EXT1",
    "persistent id": "the opcode BINPERSID",
    "old call": "the opcode STRING",
    "buffer": "the opcode NEXT_BUFFER",
    "deep": "nested more than 100 deep",
    "doubling": "more than 400000 values",
    "huge integer": "an integer of 32761 bits",
    "huge array": "made of 4 bytes",
    "pickle in array": "'O8', which is not a plain number",
    "copies": "values that are copied",
    "missing reference": "a reference to 5",
}


@pytest.mark.parametrize("name", [*hostile(Path("canary"))])
def test_a_hostile_pickle_does_nothing_at_little_cost(name, tmp_path):
    canary = tmp_path / "canary"
    content = hostile(canary)[name]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if name in INERT:
        assert isinstance(read(tmp_path, content), ObjectRecord | list | None)
    else:
        words = r"was refused: .*Nothing in it was executed"
        with pytest.raises(CheckpointError, match=words) as caught:
            read(tmp_path, content)
        assert REASONS.get(name, "") in str(caught.value)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < MOST_SECONDS
    assert pickle_process._BASE_MEGABYTES < MOST_MEGABYTES  # the limit of all memory of the reader
    assert not canary.exists()


def test_names_become_records_with_their_arguments_and_state(tmp_path):
    result = read(tmp_path, pickle.dumps({"f": Stated(os.system, "true"), "g": os.system}))
    assert result == {
        "f": ObjectRecord("posix:system", ("true",), {"x": 1}, []),
        "g": ObjectRecord("posix:system", None, None, []),
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_and_arrays_are_equal_after_reading(protocol, tmp_path):
    values = {
        "a": [1, -2.5, None, True, "text", (1, (2,)), {"k": []}],
        "grid": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "big": np.arange(3, dtype=">i2"),
        "empty": np.zeros((0, 3)),
        "number": np.float64(2.5),
        "flag": np.bool_(True),
    }
    result = read(tmp_path, pickle.dumps(values, protocol))
    assert result["a"] == values["a"]
    assert [result["number"], result["flag"]] == [2.5, True]
    for name in ("grid", "fortran", "big", "empty"):
        np.testing.assert_array_equal(result[name], values[name])
        assert result[name].dtype == values[name].dtype


def test_random_bytes_are_refused_or_read_but_never_more(tmp_path):
    rng = np.random.default_rng(0)
    values = {"w": np.ones(4, np.float32), "c": [ObjectRecord("a:b", 1, 2, [])]}
    whole = bytearray(pickle.dumps(values))
    for _ in range(5):
        broken = whole.copy()
        for place in rng.integers(2, len(whole), 3):
            broken[place] = rng.integers(256)
        with contextlib.suppress(CheckpointError):
            read(tmp_path, bytes(broken))


def test_anything_but_a_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "missing", "."):
        with pytest.raises(CheckpointError, match="was refused"):
            read_pickle(tmp_path / name)


def test_the_reader_imports_neither_this_package_nor_pickle():
    source = Path(storage.__file__).with_name("pickle_reader.py").read_text()
    assert "import tfpolicies" not in source
    assert "import pickle\n" not in source
    assert source.startswith('"""Reads untrusted pickles')
