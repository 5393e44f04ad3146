"""Reads untrusted pickles as data: objects that they name are neither imported nor called.

Run as a program in a separate process, it needs only Python and NumPy::

    python -I pickle_reader.py OUT SECONDS MEGABYTES < FILE

It writes `OUT/data.json` and `OUT/arrays.npz`, or fails with a one-line message that names the
refused content. It does not use `pickle.Unpickler`, which calls the objects that `find_class`
returns. It interprets the opcodes one by one, and records each call instead of running it. It
understands the names of NumPy and of containers in `KNOWN_NAMES`, and builds arrays from their
bytes; each other name becomes a `ObjectRecord` with its arguments and state, which does nothing.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import os
import pickletools
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

MAX_OPCODES = 400_000
MAX_VALUES = 400_000  # in the result; shared values count each time
MAX_COPIES = 1_000_000  # values that are copied from one container to another
MAX_BYTES = 1 << 30  # of arrays and texts in the result; shared ones count each time
MAX_UNPACKED_BYTES = 32 << 20  # of one unpacked array
MAX_DEPTH = 100
MAX_INTEGER_BYTES = 64  # bytes of an integer

_CORE = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_NP_NAMES = {"scalar": "scalar", "_reconstruct": "array"}
KNOWN_NAMES = {
    **{(module, name): kind for module in _CORE for name, kind in _NP_NAMES.items()},
    **{(module, "_frombuffer"): "buffer" for module in _NUMERIC},
    ("numpy", "ndarray"): "class",
    ("numpy", "dtype"): "dtype",
    ("collections", "OrderedDict"): "dict",
    ("builtins", "dict"): "dict",
    ("builtins", "list"): "list",
    ("builtins", "tuple"): "tuple",
    ("builtins", "set"): "set",
    ("builtins", "frozenset"): "set",
    **{(module, "bytes"): "bytes" for module in ("builtins", "__builtin__")},
    ("builtins", "bytearray"): "bytes",
    ("_codecs", "encode"): "bytes",
}
"""Kinds of the supported names; old protocols write bytes as calls of `_codecs.encode`."""


class RefusedError(Exception):
    """Raised for content that is not supported."""


class ObjectRecord:
    """A record of an object that a pickle makes by name.

    Attributes:
        name: `module:name`.
        args: the arguments of the call; None for the name itself.
        state: the state passed to it.
        items: the items added to it.
    """

    def __init__(self, name: str, args: Any = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []


class _DtypeRecord:
    """A NumPy dtype under construction."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.order = "="

    def to_dtype(self) -> np.dtype:
        if self.code[:1] not in "biuf" or not self.code[1:].isdigit():
            raise RefusedError(
                f"an array of the dtype {self.code!r:.40}, which is not a plain number"
            )
        try:
            return np.dtype(self.code).newbyteorder(">" if self.order == ">" else "<")
        except (TypeError, ValueError) as error:
            raise RefusedError(f"an array of the dtype {self.code!r:.40}") from error


class _ArrayRecord:
    """A NumPy array under construction."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None


_MARK = object()


class PickleInterpreter:
    """Interprets the opcodes of one pickle.

    Args:
        content: the pickle.

    Raises:
        Refused: for an opcode, size or name that is not supported.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._remaining_copies = MAX_COPIES

    def run(self) -> Any:
        """Returns the content of the pickle: plain values, arrays and `ObjectRecord`s."""
        for number, (name, argument) in enumerate(self._opcodes()):
            if number >= MAX_OPCODES:
                raise RefusedError(f"more than {MAX_OPCODES} opcodes")
            if name == "STOP":
                return self._pop()
            handler = _HANDLERS.get(name)
            if handler is None:
                raise RefusedError(f"the opcode {name}, which is not supported")
            handler(self, argument)
        raise RefusedError("no end")

    def _opcodes(self) -> Iterator[tuple[str, Any]]:
        try:
            for opcode, argument, _ in pickletools.genops(self._content):
                yield opcode.name, argument
        except (ValueError, UnicodeError, OverflowError, MemoryError) as error:
            raise RefusedError(f"an incomplete pickle: {error}") from error

    # -- the stack -----------------------------------------------------------------------------

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise RefusedError("an opcode without its operands")
        return self._stack.pop()

    def _peek(self) -> Any:
        value = self._pop()
        self._stack.append(value)
        return value

    def _pop_to_mark(self) -> list[Any]:
        values: list[Any] = []
        while self._stack and self._stack[-1] is not _MARK:
            values.append(self._stack.pop())
        if not self._stack:
            raise RefusedError("an opcode without its mark")
        self._stack.pop()
        return values[::-1]

    def push(self, value: Any) -> None:
        if isinstance(value, int) and value.bit_length() > 8 * MAX_INTEGER_BYTES:
            raise RefusedError(f"an integer of {value.bit_length()} bits")
        self._stack.append(value)

    def memoize(self, index: int | None) -> None:
        """Stores the top of the stack in the memo, by default under the next number."""
        self._memo[len(self._memo) if index is None else index] = self._peek()

    def push_from_memo(self, index: int) -> None:
        if index not in self._memo:
            raise RefusedError(f"a reference to {index}, which does not exist")
        self.push(self._memo[index])

    def pop(self, _: Any) -> None:
        self._pop()

    def pop_mark(self, _: Any) -> None:
        self._pop_to_mark()

    def push_mark(self, _: Any) -> None:
        self._stack.append(_MARK)

    # -- containers ----------------------------------------------------------------------------

    def push_tuple(self, count: int | None) -> None:
        """Makes a tuple of the last `count` values; None for all above the mark."""
        values = self._pop_to_mark() if count is None else [self._pop() for _ in range(count)][::-1]
        self.push(tuple(values))

    def append(self, _: Any) -> None:
        value = self._pop()
        self._extend([value])

    def appends(self, _: Any) -> None:
        """Adds values to a list or set."""
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._peek()
        if isinstance(target, ObjectRecord):
            target.items += values
        elif isinstance(target, list):
            target += values
        elif isinstance(target, set):
            target.update(map(_make_key, values))
        else:
            raise RefusedError(f"values put into a {type(target).__name__}")

    def set_item(self, _: Any) -> None:
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def set_items(self, _: Any) -> None:
        """Adds entries to a dict."""
        self._update(self._pop_to_mark())

    def _update(self, pairs: list[Any]) -> None:
        target = self._peek()
        if len(pairs) % 2 or not isinstance(target, dict | ObjectRecord):
            raise RefusedError(f"entries put into a {type(target).__name__}")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if isinstance(target, ObjectRecord):
                target.items.append((key, value))
            else:
                target[_make_key(key)] = value

    def push_set(self, _: Any) -> None:
        """Makes a set of the values above the mark."""
        self.push({_make_key(value) for value in self._pop_to_mark()})

    # -- names and calls -----------------------------------------------------------------------

    def push_global(self, argument: Any) -> None:
        """Pushes a record of the name in `module name`."""
        module, _, name = str(argument).partition(" ")
        self.push(ObjectRecord(f"{module}:{name}"))

    def push_stack_global(self, _: Any) -> None:
        """Pushes a record of the name that the last two strings form."""
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise RefusedError("a name that is not a text")
        self.push(ObjectRecord(f"{module}:{name}"))

    def reduce(self, _: Any) -> None:
        """Records a call, or makes an array or container if the name is known."""
        args, function = self._pop(), self._pop()
        if not isinstance(args, tuple):
            raise RefusedError("a call without a tuple of arguments")
        self.push(self._record_call(function, args))

    def reduce_keywords(self, _: Any) -> None:
        """Records a call with keyword arguments."""
        keywords, args, function = self._pop(), self._pop(), self._pop()
        if keywords:
            args = (args, keywords)
        self.push(self._record_call(function, args if isinstance(args, tuple) else (args,)))

    def _record_call(self, function: Any, args: tuple[Any, ...]) -> Any:
        if not isinstance(function, ObjectRecord):
            raise RefusedError(f"a call of a {type(function).__name__}")
        module, _, name = function.name.partition(":")
        kind = KNOWN_NAMES.get((module, name)) if function.args is None else None
        if kind is None:
            return ObjectRecord(function.name, args)
        self._remaining_copies -= sum(
            len(x) for x in args if isinstance(x, list | tuple | set | dict | str)
        )
        if self._remaining_copies < 0:
            raise RefusedError(f"more than {MAX_COPIES} values that are copied")
        try:
            return _MAKERS[kind](self, *args)
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
            raise RefusedError(f"an invalid call of {function.name}: {error}") from error

    def build(self, _: Any) -> None:
        """Sets the state of a record, array or dtype."""
        state, target = self._pop(), self._peek()
        if isinstance(target, _ArrayRecord):
            target.value = self._make_array(state)
        elif isinstance(target, _DtypeRecord):
            target.order = str(state[1]) if isinstance(state, tuple) and len(state) > 1 else "?"
        elif isinstance(target, ObjectRecord):
            target.state = state
        elif not isinstance(target, dict):  # attributes of an OrderedDict are dropped
            raise RefusedError(f"a state for a {type(target).__name__}")

    # -- arrays --------------------------------------------------------------------------------

    def _make_array(self, state: Any) -> np.ndarray:
        if not isinstance(state, tuple) or len(state) != 5:
            raise RefusedError("an array without its five parts")
        _, shape, dtype, is_fortran, content = state
        return self.make_array_from_bytes(content, dtype, shape, "F" if is_fortran is True else "C")

    def make_array_from_bytes(self, content: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
        """Returns an array from its bytes."""
        if not isinstance(dtype, _DtypeRecord):
            raise RefusedError("an array without a dtype")
        element_type, sizes = dtype.to_dtype(), _require_shape(shape)
        if not isinstance(content, bytes):
            raise RefusedError(f"an array of {type(content).__name__} instead of bytes")
        if len(content) != math.prod(sizes) * element_type.itemsize:
            raise RefusedError(f"an array of {sizes} {element_type} made of {len(content)} bytes")
        return np.frombuffer(content, element_type).reshape(
            sizes, order="F" if order == "F" else "C"
        )

    def make_scalar(self, dtype: Any, content: Any) -> Any:
        """Returns a NumPy scalar as a number."""
        return self.make_array_from_bytes(content, dtype, (), "C")[()].item()


def _require_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or len(shape) > 32:
        raise RefusedError("an array without a shape")
    if any(type(size) is not int or size < 0 for size in shape):
        raise RefusedError(f"an array of the shape {shape!r:.80}")
    return shape


def _make_key(value: Any) -> Any:
    """Returns a key of a dict; a record is replaced by its name in angle brackets."""
    if isinstance(value, tuple) and len(value) < 16:
        return tuple(map(_make_plain_key, value))
    return _make_plain_key(value)


def _make_plain_key(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, ObjectRecord):
        return f"<{value.name}>"
    raise RefusedError(f"a {type(value).__name__} as the key of a dict")


def _make_bytes(machine: PickleInterpreter, text: Any = "", *_: Any) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1")


def _make_dict(machine: PickleInterpreter, pairs: Any = ()) -> dict[Any, Any]:
    return {
        _make_key(key): value for key, value in (pairs.items() if type(pairs) is dict else pairs)
    }


_MAKERS: dict[str, Callable[..., Any]] = {
    "array": lambda machine, *_: _ArrayRecord(),
    "buffer": PickleInterpreter.make_array_from_bytes,
    "scalar": PickleInterpreter.make_scalar,
    "class": lambda machine, *args: ObjectRecord("numpy:ndarray", args),
    "dtype": lambda machine, code, *_: _DtypeRecord(str(code)),
    "dict": _make_dict,
    "list": lambda machine, values=(): [*values],
    "tuple": lambda machine, values=(): (*values,),
    "set": lambda machine, values=(): {_make_key(value) for value in values},
    "bytes": _make_bytes,
}
"""Functions that make the values of supported names, by kind."""

_VALUES = (
    "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "SHORT_BINBYTES BINBYTES BINBYTES8"
)
_HANDLERS: dict[str, Callable[[PickleInterpreter, Any], None]] = {
    **dict.fromkeys(_VALUES.split(), PickleInterpreter.push),
    "BYTEARRAY8": lambda machine, value: machine.push(bytes(value)),
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_SET": lambda machine, _: machine.push(set()),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "TUPLE": lambda machine, _: machine.push_tuple(None),
    "MARK": PickleInterpreter.push_mark,
    "POP": PickleInterpreter.pop,
    "POP_MARK": PickleInterpreter.pop_mark,
    "MEMOIZE": PickleInterpreter.memoize,
    "BINPUT": PickleInterpreter.memoize,
    "LONG_BINPUT": PickleInterpreter.memoize,
    "BINGET": PickleInterpreter.push_from_memo,
    "LONG_BINGET": PickleInterpreter.push_from_memo,
    "APPEND": PickleInterpreter.append,
    "APPENDS": PickleInterpreter.appends,
    "ADDITEMS": PickleInterpreter.appends,
    "SETITEM": PickleInterpreter.set_item,
    "SETITEMS": PickleInterpreter.set_items,
    "FROZENSET": PickleInterpreter.push_set,
    "GLOBAL": PickleInterpreter.push_global,
    "STACK_GLOBAL": PickleInterpreter.push_stack_global,
    "REDUCE": PickleInterpreter.reduce,
    "NEWOBJ": PickleInterpreter.reduce,
    "NEWOBJ_EX": PickleInterpreter.reduce_keywords,
    "BUILD": PickleInterpreter.build,
}
"""Handlers by opcode. EXT1, PERSID, INST, OBJ, NEXT_BUFFER and protocol 0 are not supported."""


def read_arrays(content: bytes) -> Any:
    """Returns the array in a pickle, or the arrays of a dict, list or tuple in it.

    Raises:
        RefusedError: if there is anything else in the pickle.
    """
    return _to_arrays(PickleInterpreter(content).run(), 0, itertools.count())


def _to_arrays(value: Any, depth: int, counter: Iterator[int]) -> Any:
    if depth > MAX_DEPTH:
        raise RefusedError(f"values nested more than {MAX_DEPTH} deep, or in a cycle")
    if next(counter) > MAX_VALUES:
        raise RefusedError(f"more than {MAX_VALUES} values")
    array = value.value if isinstance(value, _ArrayRecord) else value
    if isinstance(array, np.ndarray):
        return array
    if isinstance(value, dict):
        return {str(key): _to_arrays(part, depth + 1, counter) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_to_arrays(part, depth + 1, counter) for part in value)
    if isinstance(value, bool | int | float):
        return np.asarray(value)
    name = value.name if isinstance(value, ObjectRecord) else type(value).__name__
    raise RefusedError(f"{name!r:.80} instead of an array")


class JsonEncoder:
    """Encodes values as JSON, and arrays separately.

    Values that JSON does not have become a dict of one key: `{"tuple": [...]}`,
    `{"dict": [[key, value], ...]}`, `{"set": [...]}`, `{"bytes": length}`, `{"array": name}` or
    `{"named": [name, args, state, items]}`.

    Raises:
        Refused: if values are too many, nested too deeply or contain themselves.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._remaining_values = MAX_VALUES
        self._remaining_bytes = MAX_BYTES

    def encode(self, value: Any, depth: int = 0) -> Any:
        self._remaining_values -= 1
        if self._remaining_values < 0:
            raise RefusedError(f"more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise RefusedError(f"values nested more than {MAX_DEPTH} deep, or in a cycle")
        if isinstance(value, str):
            self._use_bytes(len(value))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [self.encode(item, depth + 1) for item in value]
        return self._encode_tagged(value, depth + 1)

    def _use_bytes(self, size: int) -> None:
        self._remaining_bytes -= size
        if self._remaining_bytes < 0:
            raise RefusedError(f"arrays and texts of more than {MAX_BYTES} bytes")

    def _encode_tagged(self, value: Any, depth: int) -> dict[str, Any]:
        if isinstance(value, tuple | set):
            items = value if isinstance(value, tuple) else sorted(value, key=repr)
            kind = "tuple" if isinstance(value, tuple) else "set"
            return {kind: [self.encode(item, depth) for item in items]}
        if isinstance(value, dict):
            pairs = [
                [self.encode(k, depth), self.encode(v, depth)] for k, v in _unpack_entries(value)
            ]
            return {"dict": pairs}
        if isinstance(value, bytes):
            return {"bytes": len(value)}
        if isinstance(value, ObjectRecord):
            parts = (value.args, value.state, value.items)
            return {"named": [value.name, *(self.encode(part, depth) for part in parts)]}
        return self._encode_array(value)

    def _encode_array(self, value: Any) -> dict[str, Any]:
        if isinstance(value, _DtypeRecord):
            return {"named": ["numpy:dtype", value.to_dtype().str, None, []]}
        array = value.value if isinstance(value, _ArrayRecord) else value
        if not isinstance(array, np.ndarray):
            raise RefusedError("an array without a state")
        self._use_bytes(array.nbytes)
        name = f"a{len(self.arrays)}"
        self.arrays[name] = array
        return {"array": name}


_PACKED_KEYS = {"space": ("low", "high", "nvec"), "num_pushes": ("mean_array", "std_array")}
"""Entries that are packed arrays, by an entry that identifies such records of RLlib."""


def _unpack_entries(record: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Returns the entries of a dict; packed arrays of RLlib's records are unpacked."""
    packed = {key for kind, keys in _PACKED_KEYS.items() if kind in record for key in keys}
    return [
        (key, _unpack_array(value) if key in packed and isinstance(value, str) else value)
        for key, value in record.items()
    ]


def _unpack_array(text: str) -> np.ndarray:
    """Returns the array from base64 of zlib of NumPy's file format."""
    try:
        decompressor = zlib.decompressobj()
        content = decompressor.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED_BYTES)
        if decompressor.unconsumed_tail:
            raise RefusedError(f"a packed array of more than {MAX_UNPACKED_BYTES} bytes")
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError, zlib.error, MemoryError) as error:
        raise RefusedError(f"an invalid packed array: {error}") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        raise RefusedError("a packed array without plain numbers")
    return array


def limit_resources(seconds: int, megabytes: int) -> None:
    """Limits the time, memory, files and processes of this process."""
    import resource

    for name, maximum in (
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_AS", megabytes << 20),
        ("RLIMIT_FSIZE", 2 * MAX_BYTES),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_CORE", 0),
    ):
        resource.setrlimit(getattr(resource, name), (maximum, maximum))


def convert_pickle(content: bytes, folder: str) -> None:
    """Writes the content of a pickle into a folder."""
    encoder = JsonEncoder()
    encoded = encoder.encode(PickleInterpreter(content).run())
    np.savez(os.path.join(folder, "arrays.npz"), **encoder.arrays)  # type: ignore[arg-type]
    Path(folder, "data.json").write_text(json.dumps(encoded), encoding="utf-8")


def main() -> NoReturn:
    """Runs the command line; the exit status is 3 for refused content."""
    folder, seconds, megabytes = sys.argv[1:]
    limit_resources(int(seconds), int(megabytes))
    try:
        convert_pickle(sys.stdin.buffer.read(), folder)
    except RefusedError as refused:
        print(f"it holds {refused}", file=sys.stderr)
    except MemoryError:
        print(f"reading it takes more than {megabytes} MB", file=sys.stderr)
    else:
        sys.exit(0)
    sys.exit(3)


if __name__ == "__main__":
    main()
