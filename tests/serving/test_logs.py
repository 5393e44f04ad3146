"""Lines that a server prints about itself and about requests."""

import io
import json
import threading

import grpc
import pytest
from tritonclient.grpc import service_pb2

from helpers.serving import Server
from helpers.serving_clients import GOOD, INFER, connect, connect_grpc, get, post
from tfpolicies.serving import server_log
from tfpolicies.serving.server_log import AccessLogEntry, ServerLog

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("kept_programs")]

REQUEST = AccessLogEntry(
    "http", "10.0.0.7", "POST", "/v2/models/a/infer", "", 200, 0.0123456, 99, 0.25
)


def get_lines(*requests, **options):
    output = io.StringIO()
    log = ServerLog(output=output, **options)
    for request in requests:
        log.record(request)
    log("ready")
    log.close()
    return output.getvalue().splitlines()


def test_lines_are_text_or_json():
    assert sorted(get_lines(REQUEST)) == [
        "1970-01-01T00:00:00.250Z http 10.0.0.7 POST /v2/models/a/infer 200 0.012346 s 99 bytes",
        "ready",
    ]
    records = [json.loads(line) for line in get_lines(REQUEST, as_json=True)]
    message, answer = sorted(records, key=lambda record: record["kind"] == "request")
    assert (message["kind"], message["message"]) == ("server", "ready")
    assert answer == {
        "time": "1970-01-01T00:00:00.250Z",
        "kind": "request",
        "protocol": "http",
        "client": "10.0.0.7",
        "method": "POST",
        "path": "/v2/models/a/infer",
        "model": "a",
        "status": 200,
        "seconds": 0.012346,
        "bytes": 99,
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_a_path_cannot_write_lines_of_its_own_and_is_cut(as_json):
    forged = REQUEST._replace(path="/a\n1970 http GET /b 200" + "x" * 1000)
    lines = get_lines(forged, as_json=as_json)
    assert len(lines) == 2
    assert all(len(line) < 500 for line in lines)


def test_a_reader_that_is_slow_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(server_log, "_MAX_WAITING", 2)
    may_write, is_writing = threading.Event(), threading.Event()

    class Slow(io.StringIO):
        def write(self, text):
            is_writing.set()
            may_write.wait(60)
            return super().write(text)

    output = Slow()
    log = ServerLog(output=output)
    log.record(REQUEST)
    assert is_writing.wait(60)
    for _ in range(5):
        log.record(REQUEST)  # returns at once
    may_write.set()
    log.close()
    assert output.getvalue().count("POST") == 3
    assert "3 requests were not logged" in output.getvalue()


def test_a_request_has_a_line_if_that_is_asked_for(mlp):
    with Server(mlp, "--access-log", "--log-format", "json") as server:
        assert post(server, f"{INFER}?secret=1", GOOD)[0] == 200
        assert post(server, "/v2/models/none/infer", GOOD)[0] == 404
        get(server, "/v2/health/live")
        with connect(server) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
        with connect_grpc(server) as stub:
            stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="mlp"), timeout=60)
            with pytest.raises(grpc.RpcError):
                stub.ModelInfer(service_pb2.ModelInferRequest(model_name="none"), timeout=60)
        assert server.end() == 0
    records = [json.loads(line) for line in server.lines if line.startswith("{")]
    names = ("protocol", "client", "method", "path", "model", "status")
    service = "/inference.GRPCInferenceService"
    assert [tuple(record[name] for name in names) for record in records] == [
        ("http", "127.0.0.1", "POST", INFER, "mlp", 200),
        ("http", "127.0.0.1", "POST", "/v2/models/none/infer", "none", 404),
        ("http", "127.0.0.1", "GET", "/v2/health/live", "", 200),
        ("http", "127.0.0.1", "", "", "", 400),
        ("grpc", "127.0.0.1", "ModelMetadata", f"{service}/ModelMetadata", "mlp", 200),
        ("grpc", "127.0.0.1", "ModelInfer", f"{service}/ModelInfer", "none", 404),
    ]
    assert all(0 < record["seconds"] < 60 for record in records[:3])
    assert records[0]["bytes"] > 100


def test_requests_have_no_lines_by_default(mlp):
    with Server(mlp) as server:
        assert post(server, INFER, GOOD)[0] == 200
        assert server.end() == 0
    assert [line.split()[0] for line in server.lines] == ["model", "HTTP", "gRPC", "(it"]


def test_lines_of_two_threads_are_not_mixed():
    class Parts(io.StringIO):
        def write(self, text):
            parts.append(text)
            return len(text)

    parts = []
    log = ServerLog(output=Parts())
    log("ready")
    log("taken up")
    assert parts == ["ready\n", "taken up\n"]  # each in one call, which no other one interrupts
