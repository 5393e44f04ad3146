"""Clients of a server of exported policies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import resource
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from helpers.serving import Server, to_observations

INFER = "/v2/models/mlp/infer"


def make_body(**changes: Any) -> dict[str, Any]:
    """Returns a request over HTTP with one observation, which is changed."""
    tensor = {"name": "obs", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3], **changes}
    return {"inputs": [tensor]}


GOOD = make_body()
BODY = json.dumps(GOOD).encode()


def post(server: Server, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Posts bytes or JSON, or asks without a body; returns the status and the answer."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http}{path}", data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]


def get(server: Server, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{server.http}{path}", timeout=60) as answer:
        content: bytes = answer.read()
        return content


def connect(server: Server) -> socket.socket:
    host, port = server.http.split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@contextlib.contextmanager
def connect_grpc(server: Server) -> Iterator[Any]:
    # else all channels of a process share one connection
    with grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield GRPCInferenceServiceStub(channel)


def limit_descriptors() -> None:
    """Lets this process open few files and connections."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))


def make_infer_request(model: str = "mlp", values: Sequence[float] = (1, 1, 1)) -> Any:
    """Returns a request over gRPC, for the actions of one observation."""
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="obs", datatype="FP32", shape=[1, 3])
    request.raw_input_contents.append(np.array(values, np.float32).tobytes())
    return request


CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}
DATATYPES = {"float32": "FP32", "int64": "INT64", "uint8": "UINT8", "int32": "INT32"}


def make_client(server: Server, kind: str = "http") -> Any:
    client = CLIENTS[kind].InferenceServerClient(getattr(server, kind))
    client.kind = kind
    return client


def ask(client: Any, model: str, arrays: dict[str, np.ndarray], **options: Any) -> Any:
    """Returns the answer's arrays by name, and the version that gave them."""
    module, inputs = CLIENTS[client.kind], []
    for name, array in arrays.items():
        inputs.append(module.InferInput(name, array.shape, DATATYPES[str(array.dtype)]))
        inputs[-1].set_data_from_numpy(array)
    result = client.infer(model, inputs, **options)
    answer = result.get_response()
    record = answer if isinstance(answer, dict) else None
    outputs = [x["name"] for x in record["outputs"]] if record else [x.name for x in answer.outputs]
    version = record["model_version"] if record else answer.model_version
    return {name: result.as_numpy(name) for name in outputs}, version


def compute_outputs(policy: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what the policy itself does, by the names of an export's outputs."""
    obs = to_observations(arrays)
    acted = policy.compute_actions(obs, explore=False)
    results = {"vf_preds": acted.extras["vf_preds"]}
    for name, actions in (("actions_normalized", acted.actions), ("actions", policy.predict(obs))):
        if isinstance(actions, tuple):
            results |= {f"{name}_{i}": part for i, part in enumerate(actions)}
        else:
            results[name] = actions
    return results


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Runs a test that is a coroutine, for five minutes at most."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 300))

    return run
