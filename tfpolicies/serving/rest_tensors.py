"""Decodes requests and encodes responses over HTTP: JSON, optionally followed by binary tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from tfpolicies.errors import RequestError
from tfpolicies.serving.calls import Answer, Call, Options
from tfpolicies.serving.tensors import datatype_of, from_bytes, from_values
from tfpolicies.serving.texts import quote, require_few, require_short
from tfpolicies.type_aliases import Json

JSON_LENGTH = "inference-header-content-length"
"""The header with the length of the JSON part of a body."""

_BINARY, _SIZE = "binary_data", "binary_data_size"
DIGITS = 19
"""The most digits of the length of a body."""


class Asked(NamedTuple):
    """A request, and the encoding of its response.

    Attributes:
        request: the request.
        binary_outputs: by output name, whether it is requested in binary form.
        binary_by_default: whether other outputs are.
    """

    call: Call
    as_bytes: Mapping[str, bool]
    all_as_bytes: bool


def read(body: bytes, json_length: bytes | None, version: str, most: int) -> Asked:
    """Decodes the body of a request.

    Args:
        body: of the request.
        json_length: the header with the length of the JSON part; None for all.
        version: in the URL; "" for any.
        max_body: bytes of a body. The JSON may have half as many values, and a sixteenth as many lists
            and objects, which need more memory.

    Raises:
        RequestError: if it is invalid.
    """
    end = len(body) if json_length is None else _length(json_length, len(body))
    _require_few_values(body, end, most)
    try:
        record = orjson.loads(body[:end])
    except orjson.JSONDecodeError as error:
        raise RequestError(
            f"The body is not JSON, at byte {error.pos} of {end}: {error}."
        ) from error
    record = _object("The body", record)
    parameters = _parameters("the request", record)
    outputs = [_named("An output", each) for each in _list(record, "outputs")]
    inputs, options = dict(_inputs(_list(record, "inputs"), body[end:])), Options.of(parameters)
    names = [each["name"] for each in outputs] or None
    call = Call(inputs, options, names, _text(record.get("id")), version)
    all_as_bytes = bool(parameters.get("binary_data_output", False))
    forms = {x["name"]: _parameters("an output", x).get(_BINARY, all_as_bytes) for x in outputs}
    return Asked(call, {name: bool(form) for name, form in forms.items()}, all_as_bytes)


def written(model: str, asked: Asked, answer: Answer) -> tuple[bytes, int | None]:
    """Encodes a response; returns the body, and the length of its JSON part if that is not all."""
    tensors: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for name, array in answer.outputs.items():
        tensor = {"name": name, "datatype": datatype_of(array), "shape": array.shape}
        if asked.as_bytes.get(name, asked.all_as_bytes):
            raw.append(array.tobytes())
            tensors.append({**tensor, "parameters": {_SIZE: len(raw[-1])}})
        else:
            tensors.append({**tensor, "data": np.ascontiguousarray(array).reshape(-1)})
    record = {"model_name": model, "model_version": answer.version, "outputs": tensors}
    if asked.call.id:
        record["id"] = asked.call.id
    head = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([head, *raw]), len(head)) if raw else (head, None)


def _inputs(records: list[Any], raw: bytes) -> Iterator[tuple[str, np.ndarray]]:
    start, names = 0, set()
    for record in records:
        name = _named("An input", record)["name"]
        if name in names:
            raise RequestError(f"Input {quote(name)} is given twice.")
        names.add(name)
        size = _parameters("an input", record).get(_SIZE)
        datatype, shape = record.get("datatype"), record.get("shape")
        if size is None:
            if "data" not in record:
                raise RequestError(f"Input {quote(name)} has no data: give 'data', or {_SIZE}.")
            yield name, from_values(name, datatype, shape, record["data"])
            continue
        if type(size) is not int or not 0 <= size <= len(raw) - start:
            raise RequestError(
                f"{_SIZE} of input {quote(name)} must be from 0 to {len(raw) - start}, the bytes "
                f"that are left after the JSON, got {quote(size)}."
            )
        yield name, from_bytes(name, datatype, shape, raw[start : start + size])
        start += size
    if start != len(raw):
        raise RequestError(f"{len(raw) - start} bytes after the JSON belong to no input.")


def _require_few_values(body: bytes, end: int, most: int) -> None:
    """Refuses JSON that would need much more memory than its bytes, before it is parsed.

    Raises:
        RequestError: if it has too many values; brackets and commas within strings also count.
    """
    if end <= most // 16:
        return
    content = np.frombuffer(body, np.uint8, end)  # NumPy releases the GIL
    commas, brackets, braces = (np.count_nonzero(content == ord(mark)) for mark in ",[{")
    lists = brackets + braces
    values = commas + lists
    if values > most // 2 or lists > most // 16:
        raise RequestError(
            f"The JSON has {values} values, {lists} of them lists or objects. It may have "
            f"{most // 2}, and {most // 16} lists or objects (half of --max-body, and a "
            f"sixteenth). Send tensors as bytes ({_SIZE}).",
            413,
        )


def _length(text: bytes, most: int) -> int:
    if not (text.isdigit() and len(text) <= DIGITS and int(text) <= most):
        raise RequestError(
            f"The header {JSON_LENGTH} must be the length of the JSON, at most the {most} bytes of "
            f"the body, got {text[:60].decode(errors='replace')!r}."
        )
    return int(text)


def _object(what: str, value: Json) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{what} must be a JSON object, got {type(value).__name__}.")
    return value


def _parameters(what: str, record: dict[str, Any]) -> dict[str, Any]:
    value = record.get("parameters")
    return {} if value is None else _object(f"'parameters' of {what}", value)


def _list(record: dict[str, Any], key: str) -> list[Any]:
    value = record.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"{key!r} must be a JSON list, got {type(value).__name__}.")
    require_few(key, value)
    return value


def _named(what: str, value: Json) -> dict[str, Any]:
    record = _object(what, value)
    if not isinstance(record.get("name"), str):
        raise RequestError(f"{what} must have a name, got {quote(record.get('name'))}.")
    require_short(what.lower(), record["name"])
    return record


def _text(value: Json) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"'id' must be a string, got {quote(value)}.")
    return value
