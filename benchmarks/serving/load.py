"""Clients of a server of policies, in a process of their own, for `benchmarks.serving.serving`.

Reads one line of JSON, sends requests as it says, and prints what came of them, as JSON. It knows
neither the package nor a client library: what is sent is made once and sent again.

    {"protocol": "http", "port": 8000, "clients": 64, "seconds": 5, "requests": 100000,
     "model": "mlp", "input": "obs", "shape": [1, 4], "datatype": "FP32", "memory": false}
"""

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

import numpy as np

DTYPES = {"FP32": np.float32, "UINT8": np.uint8, "INT64": np.int64}


class Tally:
    """What came of the requests of all clients."""

    def __init__(self, most: int) -> None:
        self.left, self.seconds, self.failed = most, list[float](), list[str]()
        self.versions: dict[str, int] = {}
        self.mixed = 0

    def note(self, seconds: float, is_good: bool, text: str, version: str, value: float) -> None:
        """Counts an answer; all answers of one version must have one value."""
        if not is_good:
            self.failed.append(text[:300])
            return
        self.seconds.append(seconds)
        if version:
            known = self.versions.setdefault(version, value)
            self.mixed += abs(known - value) > 1e-4


def http_request(work: dict[str, Any], **parameters: Any) -> bytes:
    """Returns the bytes of a request whose tensor lies behind the JSON."""
    raw = np.zeros(work["shape"], DTYPES[work["datatype"]]).tobytes()
    tensor = {"name": work["input"], "shape": work["shape"], "datatype": work["datatype"]}
    head = json.dumps(
        {
            "parameters": {"binary_data_output": True, **parameters},
            "inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}],
            **({"outputs": [{"name": work["output"]}]} if work.get("output") else {}),
        }
    ).encode()
    lines = [
        f"POST /v2/models/{work['model']}/infer HTTP/1.1",
        "Host: 127.0.0.1",
        f"Content-Length: {len(head) + len(raw)}",
        f"Inference-Header-Content-Length: {len(head)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + head + raw


async def http_client(number: int, work: dict[str, Any], tally: Tally, until: float) -> None:
    """Sends one request after the other through one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", work["port"], limit=2**20)
    memory = {"sequence_id": number + 1} if work.get("memory") else {}
    request = http_request(work, **memory)
    first = http_request(work, **memory, sequence_start=True) if memory else request
    while time.perf_counter() < until and tally.left > 0:
        tally.left -= 1
        began = time.perf_counter()
        writer.write(first)
        first = request
        head = await reader.readuntil(b"\r\n\r\n")
        lines = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
        body = await reader.readexactly(int(lines[b"content-length"]))
        seconds = time.perf_counter() - began
        version, value = "", 0.0
        if work.get("watch"):
            end = int(lines.get(b"inference-header-content-length", len(body)))
            version = json.loads(body[:end]).get("model_version", "")
            value = float(np.frombuffer(body[end : end + 4], np.float32)[0])
        tally.note(seconds, head[9:12] == b"200", str(body), version, value)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def grpc_client(number: int, work: dict[str, Any], tally: Tally, until: float) -> None:
    """Sends one request after the other through a channel of its own."""
    import grpc
    from tritonclient.grpc import service_pb2 as pb

    def made(**parameters: Any) -> bytes:
        raw = np.zeros(work["shape"], DTYPES[work["datatype"]]).tobytes()
        request = pb.ModelInferRequest(model_name=work["model"], raw_input_contents=[raw])
        request.inputs.add(name=work["input"], datatype=work["datatype"], shape=work["shape"])
        if work.get("output"):
            request.outputs.add(name=work["output"])
        for name, value in parameters.items():
            kind = "bool_param" if isinstance(value, bool) else "int64_param"
            setattr(request.parameters[name], kind, value)
        return bytes(request.SerializeToString())

    memory = {"sequence_id": number + 1} if work.get("memory") else {}
    request = made(**memory)
    first = made(**memory, sequence_start=True) if memory else request
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{work['port']}", options=options) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        while time.perf_counter() < until and tally.left > 0:
            tally.left -= 1
            began = time.perf_counter()
            try:
                await infer(first)
                tally.note(time.perf_counter() - began, True, "", "", 0.0)
            except grpc.aio.AioRpcError as error:
                tally.note(0.0, False, str(error.details()), "", 0.0)
            first = request


async def run(work: dict[str, Any]) -> dict[str, Any]:
    """Lets all clients work, and returns what came of it."""
    tally = Tally(work["requests"])
    client = http_client if work["protocol"] == "http" else grpc_client
    began = time.perf_counter()
    until = began + work["seconds"]
    await asyncio.gather(*(client(i, work, tally, until) for i in range(work["clients"])))
    took = time.perf_counter() - began
    times = np.array(tally.seconds or [np.nan]) * 1e3
    return {
        "answered": len(tally.seconds),
        "failed": len(tally.failed),
        "fault": tally.failed[:1],
        "per_second": len(tally.seconds) / took,
        "p50": float(np.percentile(times, 50)),
        "p99": float(np.percentile(times, 99)),
        "versions": len(tally.versions),
        "mixed": tally.mixed,
        "cpu": time.process_time(),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.stdin.readline())))))
