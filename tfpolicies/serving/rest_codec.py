"""Decodes requests and encodes responses over HTTP: JSON, optionally followed by binary tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from tfpolicies.base.type_aliases import Json
from tfpolicies.errors import RequestError
from tfpolicies.serving.infer_requests import InferOptions, InferRequest, InferResponse
from tfpolicies.serving.request_texts import quote, require_few, require_short
from tfpolicies.serving.tensor_checks import decode_bytes, decode_values, get_datatype

JSON_LENGTH_HEADER = "inference-header-content-length"
"""The header with the length of the JSON part of a body."""

_BINARY_DATA, _BINARY_DATA_SIZE = "binary_data", "binary_data_size"
MAX_LENGTH_DIGITS = 19
"""The most digits of the length of a body."""


class HttpInferRequest(NamedTuple):
    """A request, and the encoding of its response.

    Attributes:
        request: the request.
        binary_outputs: by output name, whether it is requested in binary form.
        binary_by_default: whether other outputs are.
    """

    request: InferRequest
    binary_outputs: Mapping[str, bool]
    binary_by_default: bool


def decode_request(
    body: bytes, json_length: bytes | None, version: str, max_body: int
) -> HttpInferRequest:
    """Decodes the body of a request.

    Args:
        body: of the request.
        json_length: the header with the length of the JSON part; None for all.
        version: in the URL; "" for any.
        max_body: bytes of a body. The JSON may have half as many values, and a sixteenth as many
            lists and objects, which need more memory.
    """
    end = len(body) if json_length is None else _parse_length(json_length, len(body))
    _require_few_values(body, end, max_body)
    try:
        record = orjson.loads(body[:end])
    except orjson.JSONDecodeError as error:
        raise RequestError(
            f"The body is not JSON, at byte {error.pos} of {end}: {error}."
        ) from error
    record = _require_object("The body", record)
    parameters = _get_parameters("the request", record)
    outputs = [_require_name("An output", output) for output in _get_list(record, "outputs")]
    inputs, options = (
        dict(_decode_inputs(_get_list(record, "inputs"), body[end:])),
        InferOptions.from_parameters(parameters),
    )
    names = [output["name"] for output in outputs] or None
    request = InferRequest(inputs, options, names, _parse_id(record.get("id")), version)
    binary_by_default = bool(parameters.get("binary_data_output", False))
    binary_flags = {
        x["name"]: _get_parameters("an output", x).get(_BINARY_DATA, binary_by_default)
        for x in outputs
    }
    return HttpInferRequest(
        request,
        {name: bool(is_binary) for name, is_binary in binary_flags.items()},
        binary_by_default,
    )


def encode_response(
    model: str, request: HttpInferRequest, response: InferResponse
) -> tuple[bytes, int | None]:
    """Encodes a response; returns the body, and the length of its JSON part if that is not all."""
    tensors: list[dict[str, Any]] = []
    binary_parts: list[bytes] = []
    for name, array in response.outputs.items():
        tensor = {"name": name, "datatype": get_datatype(array), "shape": array.shape}
        if request.binary_outputs.get(name, request.binary_by_default):
            binary_parts.append(array.tobytes())
            tensors.append({**tensor, "parameters": {_BINARY_DATA_SIZE: len(binary_parts[-1])}})
        else:
            tensors.append({**tensor, "data": np.ascontiguousarray(array).reshape(-1)})
    record = {"model_name": model, "model_version": response.version, "outputs": tensors}
    if request.request.id:
        record["id"] = request.request.id
    head = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([head, *binary_parts]), len(head)) if binary_parts else (head, None)


def _decode_inputs(records: list[Any], binary_data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    start, names = 0, set()
    for record in records:
        name = _require_name("An input", record)["name"]
        if name in names:
            raise RequestError(f"Input {quote(name)} is given twice.")
        names.add(name)
        size = _get_parameters("an input", record).get(_BINARY_DATA_SIZE)
        datatype, shape = record.get("datatype"), record.get("shape")
        if size is None:
            if "data" not in record:
                raise RequestError(
                    f"Input {quote(name)} has no data: give 'data', or {_BINARY_DATA_SIZE}."
                )
            yield name, decode_values(name, datatype, shape, record["data"])
            continue
        if type(size) is not int or not 0 <= size <= len(binary_data) - start:
            raise RequestError(
                f"{_BINARY_DATA_SIZE} of input {quote(name)} must be from 0 to "
                f"{len(binary_data) - start}, the bytes that are left after the JSON, got "
                f"{quote(size)}."
            )
        yield name, decode_bytes(name, datatype, shape, binary_data[start : start + size])
        start += size
    if start != len(binary_data):
        raise RequestError(f"{len(binary_data) - start} bytes after the JSON belong to no input.")


def _require_few_values(body: bytes, end: int, max_body: int) -> None:
    """Refuses JSON that would need much more memory than its bytes, before it is parsed."""
    if end <= max_body // 16:
        return
    content = np.frombuffer(body, np.uint8, end)  # NumPy releases the GIL
    commas, brackets, braces = (np.count_nonzero(content == ord(mark)) for mark in ",[{")
    lists = brackets + braces
    values = commas + lists
    if values > max_body // 2 or lists > max_body // 16:
        raise RequestError(
            f"The JSON has {values} values, {lists} of them lists or objects. It may have "
            f"{max_body // 2}, and {max_body // 16} lists or objects (half of --max-body, and a "
            f"sixteenth). Send tensors as bytes ({_BINARY_DATA_SIZE}).",
            413,
        )


def _parse_length(text: bytes, body_length: int) -> int:
    if not (text.isdigit() and len(text) <= MAX_LENGTH_DIGITS and int(text) <= body_length):
        raise RequestError(
            f"The header {JSON_LENGTH_HEADER} must be the length of the JSON, at most the "
            f"{body_length} bytes of the body, got {text[:60].decode(errors='replace')!r}."
        )
    return int(text)


def _require_object(description: str, value: Json) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{description} must be a JSON object, got {type(value).__name__}.")
    return value


def _get_parameters(description: str, record: dict[str, Any]) -> dict[str, Any]:
    value = record.get("parameters")
    return {} if value is None else _require_object(f"'parameters' of {description}", value)


def _get_list(record: dict[str, Any], key: str) -> list[Any]:
    value = record.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"{key!r} must be a JSON list, got {type(value).__name__}.")
    require_few(key, value)
    return value


def _require_name(description: str, value: Json) -> dict[str, Any]:
    record = _require_object(description, value)
    if not isinstance(record.get("name"), str):
        raise RequestError(f"{description} must have a name, got {quote(record.get('name'))}.")
    require_short(description.lower(), record["name"])
    return record


def _parse_id(value: Json) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"'id' must be a string, got {quote(value)}.")
    return value
