"""Damaged and hostile files of recorded steps, made by seeded mutation of valid ones."""

import base64
import functools
import io
import json
import pickle
import struct
import zipfile

import numpy as np

ROWS = 60


def make_columns():
    rng = np.random.default_rng(0)
    return {
        "obs": rng.standard_normal((ROWS, 3), np.float32),
        "actions": rng.integers(0, 2, ROWS),
        "rewards": rng.standard_normal(ROWS).astype(np.float32),
        "eps_id": np.repeat(np.arange(6), 10),
        "t": np.tile(np.arange(10), 6),
        "terminateds": np.tile([False] * 9 + [True], 6),
    }


# -- mutations --------------------------------------------------------------------------------


def flip_bits(rng, content, start=0):
    result = bytearray(content)
    for _ in range(int(rng.integers(1, 20))):
        result[int(rng.integers(start, len(result)))] ^= 1 << int(rng.integers(8))
    return bytes(result)


def truncate(rng, content):
    return content[: int(rng.integers(len(content)))]


def swap_blocks(rng, content):
    a, b, c = sorted(int(x) for x in rng.integers(0, len(content), 3))
    return content[:a] + content[b:c] + content[a:b] + content[c:]


def overwrite(rng, content):
    start = int(rng.integers(len(content)))
    size = int(rng.integers(1, 64))
    filler = [b"\xff", b"\x00", b"\x7f", rng.bytes(1), rng.bytes(size)][int(rng.integers(5))]
    return content[:start] + (filler * size)[:size] + content[start + size :]


def insert(rng, content):
    start = int(rng.integers(len(content)))
    return content[:start] + rng.bytes(int(rng.integers(1, 40))) + content[start:]


def repeat_part(rng, content):
    a, b = sorted(int(x) for x in rng.integers(0, len(content), 2))
    return content[:b] + content[a:b] * int(rng.integers(1, 50)) + content[b:]


def enlarge_numbers(rng, content):
    """Replaces a few bytes by numbers of variable length that are huge."""
    result = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        start = int(rng.integers(len(result)))
        result[start : start + int(rng.integers(1, 5))] = (
            b"\xff" * int(rng.integers(3, 10)) + b"\x0f"
        )
    return bytes(result)


MUTATIONS = (
    flip_bits,
    truncate,
    swap_blocks,
    overwrite,
    insert,
    repeat_part,
    enlarge_numbers,
)


def mutate(rng, content, start=0):
    """Returns content with a random mutation after a position."""
    mutation = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
    return content[:start] + mutation(rng, content[start:]), mutation.__name__


# -- Parquet ----------------------------------------------------------------------------------


def to_parquet(columns, metadata=None, **options):
    import pyarrow as pa
    from pyarrow import parquet

    arrays = {
        name: pa.array(list(x) if getattr(x, "ndim", 1) > 1 else x)
        if not isinstance(x, pa.Array)
        else x
        for name, x in columns.items()
    }
    table = pa.table(arrays)
    if metadata is not None:
        table = table.replace_schema_metadata({b"tfpolicies": metadata})
    file = io.BytesIO()
    parquet.write_table(table, file, **options)
    return file.getvalue()


@functools.cache
def make_parquet_bases():
    import pyarrow as pa

    columns = make_columns()
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(columns["obs"].ravel()), 3)
    texts = pa.array([f"episode {i}" for i in columns["eps_id"]]).dictionary_encode()
    result = [
        to_parquet(columns, compression=compression)
        for compression in ("SNAPPY", "GZIP", "ZSTD", "LZ4", "BROTLI", "NONE")
    ]
    result.append(to_parquet({**columns, "obs": fixed, "eps_id": texts}, row_group_size=17))
    result.append(to_parquet(columns, use_dictionary=False, data_page_version="2.0"))
    result.append(to_parquet({**columns, "obs": fixed}, write_page_checksum=True, metadata=b"{}"))
    return result


def make_parquet(rng):
    bases = make_parquet_bases()
    content = bases[int(rng.integers(len(bases)))]
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    choice = int(rng.integers(8))
    if choice == 0:
        size = [0, 1, 2**31 - 1, 2**32 - 1, len(content), int(rng.integers(2**32))]
        length = struct.pack("<I", size[int(rng.integers(len(size)))])
        return content[:-8] + length + content[-4:], "length of the footer"
    if choice < 5:  # the footer, with a right length at its end
        changed, name = mutate(rng, content[footer:-8])
        length = struct.pack("<I", len(changed))
        return content[:footer] + changed + length + content[-4:], f"footer: {name}"
    if choice < 7:
        changed, name = mutate(rng, content[4:footer])
        return content[:4] + changed[: footer - 4] + content[footer:], f"pages: {name}"
    return mutate(rng, content)


def make_parquet_bombs():
    """Returns hostile files that are valid in form, by name."""
    import pyarrow as pa

    columns = make_columns()
    rows = 40_000_000
    zeros = pa.array(np.zeros(rows, np.float32))
    nested = pa.array([1.0] * ROWS)
    for _ in range(60):
        nested = pa.ListArray.from_arrays(pa.array(range(ROWS + 1), pa.int32()), nested)
    many = pa.array(np.arange(rows, dtype=np.int8) % 2)
    few = many[: rows // 4]
    codes = pa.array(np.zeros(rows // 4, np.int8))
    long_text = pa.DictionaryArray.from_arrays(codes, pa.array(["x" * 1000]))
    deep = b'{"observation_space": ' + b"[" * 500 + b"]" * 500 + b"}"
    space = {"space": "Box", "shape": [2**40], "low": 0, "high": 1, "dtype": "float32"}
    one = {"obs": [1.0], "actions": [0], "eps_id": [0]}
    result = {
        f"zeros in {compression}": lambda compression=compression: to_parquet(
            {"obs": zeros, "actions": many, "eps_id": many}, compression=compression
        )
        for compression in ("ZSTD", "GZIP", "SNAPPY", "LZ4", "BROTLI")
    }
    result |= {
        "zeros without a dictionary": lambda: to_parquet(
            {"obs": zeros, "actions": many, "eps_id": many},
            compression="ZSTD",
            use_dictionary=False,
        ),
        "zeros in one page": lambda: to_parquet(
            {"obs": zeros, "actions": many, "eps_id": many},
            compression="ZSTD",
            use_dictionary=False,
            data_page_size=1 << 30,
        ),
        "a long text for each row": lambda: to_parquet(
            {"obs": long_text, "eps_id": long_text, "actions": few}
        ),
        "one huge text": lambda: to_parquet(
            {**one, "eps_id": ["x" * (200 << 20)]}, compression="ZSTD"
        ),
        "a huge list": lambda: to_parquet(
            {**one, "obs": pa.array([[0] * 20_000_000], pa.list_(pa.int8()))}, compression="ZSTD"
        ),
        "a huge list of fixed size": lambda: to_parquet(
            {
                **one,
                "obs": pa.FixedSizeListArray.from_arrays(
                    pa.array(np.zeros(1 << 25, np.int8)), 1 << 25
                ),
            }
        ),
        "lists of size 0": lambda: to_parquet(
            {"obs": pa.array([[]] * ROWS, pa.list_(pa.int8())), "actions": columns["actions"]}
        ),
        "nested deeply": lambda: to_parquet({**columns, "obs": nested}),
        "many columns": lambda: to_parquet({**one} | {f"c{i}": [1] for i in range(20_000)}),
        "many row groups": lambda: to_parquet(
            {"obs": np.zeros(20_000), "actions": np.arange(20_000) % 2, "eps_id": np.zeros(20_000)},
            row_group_size=1,
        ),
        "no rows": lambda: to_parquet({"obs": np.zeros(0), "actions": np.zeros(0)}),
        "no columns": lambda: to_parquet({}),
        "only nulls": lambda: to_parquet({"obs": pa.nulls(ROWS), "actions": [None] * ROWS}),
        "dates out of range": lambda: to_parquet(
            {**columns, "eps_id": pa.array([2**62, -(2**62)] * 30, pa.timestamp("ms"))}
        ),
        "decimals": lambda: to_parquet(
            {**columns, "obs": pa.array([1] * ROWS, pa.decimal128(38, 30))}
        ),
        "names": lambda: to_parquet(
            {
                **one,
                "a'\"\n\r\0b": [1],
                "é\u202e": [1],
                "__class__": [1],
                "": [1],
                "x" * 99999: [1],
            }
        ),
        "metadata: deep": lambda: to_parquet(columns, deep),
        "metadata: no object": lambda: to_parquet(columns, b"[1]"),
        "metadata: invalid UTF-8": lambda: to_parquet(columns, b"\xff\xfe\x00"),
        "metadata: a huge space": lambda: to_parquet(
            columns, json.dumps({"observation_space": space, "action_space": space}).encode()
        ),
        "metadata: a huge number": lambda: to_parquet(columns, b'{"a": ' + b"9" * 10**6 + b"}"),
        "metadata: large": lambda: to_parquet(columns, b'{"a": "' + b"x" * (20 << 20) + b'"}'),
        "metadata: texts": lambda: to_parquet(
            columns, b'{"observation_space": "x", "action_space": {}, "policy_id": {"a": 1}}'
        ),
        "not Parquet": lambda: b"PAR1" + b"\0" * 100 + b"PAR1",
        "encrypted": lambda: b"PARE" + to_parquet(columns)[4:-4] + b"PARE",
        "empty": lambda: b"",
    }
    return result


# -- JSON lines -------------------------------------------------------------------------------


@functools.cache
def make_json_base():
    columns = {name: column.tolist() for name, column in make_columns().items()}
    line = {"type": "SampleBatch", **columns}
    several = {
        "type": "MultiAgentBatch",
        "count": ROWS,
        "policy_batches": {"default_policy": columns},
    }
    text = json.dumps(line) + "\n" + json.dumps(several) + "\n" + json.dumps(line) + "\n"
    return text.encode()


def make_json(rng):
    content = make_json_base()
    if rng.random() < 0.6:
        return mutate(rng, content)
    words = [
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"9" * 5000,
        b"null",
        b"true",
        b'"x"',
        b'"\\ud800"',
        b"{}",
        b"[[]]",
        b"18446744073709551616",
        b"-0",
        b"\x00",
        b"\xff\xfe",
        b'"BCJNGGhA"',
        b'{"a": [1]}',
    ]
    commas = [i for i, byte in enumerate(content) if byte == ord(",")]
    for _ in range(int(rng.integers(1, 4))):
        at = commas[int(rng.integers(len(commas)))]
        word = words[int(rng.integers(len(words)))]
        content = content[: at + 1] + word + b"," + content[at + 1 :]
    return content, "values"


def make_json_bombs():
    """Returns hostile files that are valid in form, by name."""
    columns = {name: column.tolist() for name, column in make_columns().items()}

    def line(**values):
        return (json.dumps({"type": "SampleBatch", **columns, **values}) + "\n").encode()

    def with_text(text):
        return line()[:-2] + text + b"}\n"

    return {
        "deep lists": lambda: with_text(b', "x": ' + b"[" * 200_000 + b"]" * 200_000),
        "deep objects": lambda: with_text(b', "x": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000),
        "nested 900 deep": lambda: line(obs=functools.reduce(lambda x, _: [x], range(900), 1)),
        "nested 60 deep": lambda: line(obs=[functools.reduce(lambda x, _: [x], range(62), 1)] * 60),
        "many empty lists": lambda: with_text(b', "x": [' + b"[]," * 10_000_000 + b"[]]"),
        "many numbers": lambda: with_text(b', "x": [' + b"1," * 15_000_000 + b"1]"),
        "many columns": lambda: line(**{f"c{i}": [1] for i in range(100_000)}),
        "many parts": lambda: line(obs={f"c{i}": [1] for i in range(100_000)}),
        "a huge line": lambda: line()[:-1] + b" " * (66 << 20) + b"\n",
        "a huge text": lambda: line(eps_id="x" * (60 << 20)),
        "many huge lines": lambda: b"".join(line(x="x" * (9 << 20)) for _ in range(6)),
        "a giant number": lambda: with_text(b', "x": [' + b"9" * 1_000_000 + b"]"),
        "a giant exponent": lambda: with_text(b', "rewards": [' + b"1e999999999," * 59 + b"1e9]"),
        "large integers": lambda: line(eps_id=[2**63 + i for i in range(60)]),
        "larger integers": lambda: line(eps_id=[2**64 + i for i in range(60)]),
        "duplicate keys": lambda: with_text(b', "obs": [1], "obs": 3, "type": "SampleBatch"'),
        "duplicate types": lambda: with_text(b', "type": "MultiAgentBatch"'),
        "NUL": lambda: line().replace(b", ", b",\0 ", 1),
        "only NUL": lambda: b"\0" * 100_000,
        "UTF-16": lambda: line().decode().encode("utf-16"),
        "a byte order mark": lambda: b"\xef\xbb\xbf" + line(),
        "invalid UTF-8": lambda: with_text(b', "x\xff": [1]'),
        "half a surrogate": lambda: with_text(b', "x\\ud800": [1], "eps_id": ["\\ud800"]'),
        "names": lambda: line(**{"a'\"\n\0b": [1] * 60, "__class__": [1] * 60, "": [1] * 60}),
        "a policy's name": lambda: json.dumps(
            {"type": "MultiAgentBatch", "policy_batches": {"x\n\0'" * 1000: columns}}
        ).encode(),
        "many policies": lambda: json.dumps(
            {
                "type": "MultiAgentBatch",
                "policy_batches": {f"p{i}": {"obs": [1]} for i in range(99999)},
            }
        ).encode(),
        "empty batches": lambda: b'{"type": "SampleBatch"}\n' * 500_000,
        "empty lines": lambda: b"\n" * (40 << 20),
        "columns of texts": lambda: line(obs=["a"] * 60, rewards="b"),
        "objects": lambda: line(obs=[{"a": 1}] * 59 + [{"b": 1}]),
        "a list": lambda: b"[1, 2]\n",
        "a number": lambda: b"3\n",
        "negative lengths": lambda: line(
            seq_lens=[-1, 61], state_in_0=[[1], [2]], state_out_0=[[1]] * 60
        ),
        "huge lengths": lambda: line(
            seq_lens=[2**62] * 2, state_in_0=[[1], [2]], state_out_0=[[1]] * 60
        ),
        "lengths that are texts": lambda: line(
            seq_lens=["a"], state_in_0=[[1]], state_out_0=[[1]] * 60
        ),
        "empty": lambda: b"",
        "one byte": lambda: b"{",
        "carriage returns": lambda: line().replace(b"\n", b"\r") * 3,
    }


# -- packed columns ---------------------------------------------------------------------------


def pack(pickled, **options):
    import lz4.frame

    return base64.b64encode(lz4.frame.compress(pickled, **options)).decode()


def to_packed_line(text):
    columns = {name: column.tolist() for name, column in make_columns().items()}
    return (json.dumps({"type": "SampleBatch", **columns, "obs": text}) + "\n").encode()


def make_packed(rng):
    """Returns a line whose packed observations are changed in one of their layers."""
    import lz4.frame

    pickled = pickle.dumps(make_columns()["obs"], int(rng.integers(2, 6)))
    layer = int(rng.integers(3))
    if layer == 0:
        changed, name = mutate(rng, pickled)
        return to_packed_line(pack(changed)), f"pickle: {name}"
    frame = lz4.frame.compress(
        pickled, content_checksum=bool(rng.integers(2)), store_size=bool(rng.integers(2))
    )
    if layer == 1:
        changed, name = mutate(rng, frame, 4)
        return to_packed_line(base64.b64encode(changed).decode()), f"LZ4: {name}"
    changed, name = mutate(rng, base64.b64encode(frame), 5)
    return to_packed_line(changed.decode("latin-1")), f"base64: {name}"


class Call:
    """An object whose pickle calls a function by name."""

    def __init__(self, function, *args, state=None):
        self.call = (function, args, state) if state is not None else (function, args)

    def __reduce__(self):
        return self.call


def make_packed_bombs(canary):
    """Returns hostile lines by name; those that run code would create the file `canary`."""
    import os
    import subprocess

    touch = f"touch {canary}"
    call = [
        Call(os.system, touch),
        Call(subprocess.getoutput, touch),
        Call(exec, f"open({str(canary)!r}, 'w')"),
    ]
    pairs = [b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(60)]
    shared = b"\x80\x04)\x94" + b"".join(pairs) + b"."
    array = pickle.dumps(np.zeros((2, 3), np.float32), 2)
    opcodes = {
        "GLOBAL and REDUCE": b"cos\nsystem\n(U%c%sR." % (len(touch), touch.encode() + b"\x85"),
        "GLOBAL, protocol 0": b"cos\nsystem\n(S'" + touch.encode() + b"'\ntR.",
        "INST": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + touch.encode() + b"'\no.",
        "BUILD of a module": b"\x80\x02cos\nsystem\n}U\x04codeU\x01xsb.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c"
        + bytes([len(touch)])
        + touch.encode()
        + b"\x85R.",
        "NEWOBJ": b"\x80\x02cos\nsystem\nU" + bytes([len(touch)]) + touch.encode() + b"\x85\x81.",
        "EXT1": b"\x80\x02\x82\x01.",
        "PERSID": b"Pcanary\n.",
        "BINPERSID": b"\x80\x02U\x01aQ.",
        "NEXT_BUFFER": b"\x80\x05\x97.",
        "READONLY_BUFFER": b"\x80\x05C\x01a\x98.",
        "a huge FRAME": b"\x80\x04\x95" + b"\xff" * 8 + b".",
        "a huge LONG4": b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\xff" * 100 + b".",
        "a long LONG4": b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".",
        "a huge BINUNICODE8": b"\x80\x04\x8d" + b"\xff" * 8 + b"x.",
        "a huge BYTEARRAY8": b"\x80\x05\x96" + b"\xff\xff\xff\xff\0\0\0\0" + b"x.",
        "a huge memo": b"\x80\x02)r\xff\xff\xff\xffj\xff\xff\xff\xff.",
        "a cycle": b"\x80\x02]q\0h\0a.",
        "shared values": shared,
        "nested tuples": b"\x80\x02)" + b"\x85" * 100_000 + b".",
        "many marks": b"\x80\x02" + b"(" * 300_000 + b".",
        "many opcodes": b"\x80\x02" + b"N0" * 400_000 + b"N.",
        "many values": b"\x80\x02](" + b"K\1" * 390_000 + b"e.",
        "a negative shape": array.replace(b"K\x02K\x03\x86", b"J\xff\xff\xff\xffK\x03\x86"),
        "a huge shape": array.replace(b"K\x02K\x03\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"),
        "a huge empty shape": array.replace(
            b"K\x02K\x03\x86", b"K\0\x8a\x10" + b"\x7f" * 16 + b"\x86"
        ),
        "an empty shape of 2**62": array.replace(
            b"K\x02K\x03\x86", b"K\0\x8a\x08" + struct.pack("<q", 2**62) + b"\x86"
        ),
        "an object dtype": array.replace(b"f4", b"O8"),
        "a void dtype": array.replace(b"f4", b"V4"),
        "a huge dtype": array.replace(b"f4", b"f9"),
        "a dtype of texts": array.replace(b"f4", b"U1"),
        "no end": array[:-1],
        "nothing": b"",
        "a number": pickle.dumps(3),
    }
    result = {name: lambda x=x: to_packed_line(pack(x)) for name, x in opcodes.items()}
    for i, value in enumerate(
        [*call, {"x": call}, np.array(call, object), Call(os.system, touch, state={"a": 1})]
    ):
        for protocol in (0, 2, 5):
            pickled = pickle.dumps(value, protocol)
            result[f"call {i}, protocol {protocol}"] = lambda x=pickled: to_packed_line(pack(x))
    zeros = pickle.dumps(np.zeros(200 << 20, np.uint8), 5)
    small = pickle.dumps(np.zeros((1, 30 << 20), np.uint8), 5)

    def many_bombs():
        text = pack(small)
        record = {
            "type": "SampleBatch",
            "obs": text,
            "actions": [1],
            **{f"c{i}": text for i in range(30)},
        }
        return json.dumps(record).encode() + b"\n"

    def rows_of_bombs():
        record = {
            "type": "SampleBatch",
            "obs": [pack(small)] * 40,
            "actions": [1] * 40,
            "t": [1] * 40,
        }
        return json.dumps(record).encode() + b"\n"

    result |= {
        "zeros": lambda: to_packed_line(pack(zeros)),
        "zeros with a small size in the header": lambda: to_packed_line(
            base64.b64encode(shrink_size(base64.b64decode(pack(zeros)))).decode()
        ),
        "many columns of zeros": many_bombs,
        "many rows of zeros": rows_of_bombs,
        "zlib of this package": lambda: to_packed_line(
            "tfpolicies-zlib;<f4;60,99999999999;" + base64.b64encode(b"x" * 99).decode()
        ),
        "zlib: a negative shape": lambda: to_packed_line("tfpolicies-zlib;<f4;-60,-1;eJw="),
        "zlib: objects": lambda: to_packed_line("tfpolicies-zlib;|O;60;eJw="),
        "zlib: a dtype": lambda: to_packed_line("tfpolicies-zlib;f4,(9999999999,)f4;60;eJw="),
        "zlib: zeros": lambda: to_packed_line(
            "tfpolicies-zlib;|u1;500000000;" + base64.b64encode(zlib_zeros(500_000_000)).decode()
        ),
    }
    return result


def shrink_size(frame):
    """Returns an LZ4 frame whose header states 10 bytes."""
    return frame[:6] + struct.pack("<Q", 10) + frame[14:]


def zlib_zeros(size):
    import zlib

    compressor = zlib.compressobj(9)
    parts = [compressor.compress(b"\0" * (1 << 20)) for _ in range(size >> 20)]
    parts.append(compressor.compress(b"\0" * (size % (1 << 20))))
    return b"".join(parts) + compressor.flush()


def make_zip_bombs():
    """Returns hostile archives by name."""

    def archive(*entries, **options):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, **options) as target:
            for name, content in entries:
                target.writestr(name, content)
        return file.getvalue()

    valid = archive(("a.json", make_json_base()))
    return {
        "valid": lambda: valid,
        "zeros": lambda: archive(("a.json", b"\0" * (300 << 20))),
        "many entries": lambda: archive(*((f"{i}.json", b"") for i in range(50_000))),
        "paths": lambda: archive(("../../a.json", make_json_base()), ("/b.json", b"")),
        "an archive": lambda: archive(("a.zip", valid)),
        "a wrong size": lambda: valid.replace(
            struct.pack("<I", len(make_json_base())), struct.pack("<I", 2**31)
        ),
    }


def write_files(folder, kind, count, canary):
    """Writes files of a kind, those by hand first, and `labels.txt`: how each was made."""
    by_hand = {
        "parquet": make_parquet_bombs,
        "json": make_json_bombs,
        "packed": lambda: make_packed_bombs(canary),
        "zip": make_zip_bombs,
    }[kind]()
    make = {"parquet": make_parquet, "json": make_json, "packed": make_packed}.get(kind)
    ending = {"packed": "json"}.get(kind, kind)
    labels = {}
    for i in range(count):
        if i < len(by_hand):
            label, make_content = [*by_hand.items()][i]
            content = make_content()
        elif make is not None:
            content, label = make(np.random.default_rng(i))
        else:
            break
        name = f"{i:04}.{ending}"
        (folder / name).write_bytes(content)
        labels[name] = ("by hand: " if i < len(by_hand) else "") + label
    (folder / "labels.txt").write_text(json.dumps(labels))
