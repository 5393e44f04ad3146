"""Attacks on a server of policies: their refusals, and their costs."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from helpers.serving import Server
from helpers.serving_clients import (
    BODY,
    GOOD,
    INFER,
    connect,
    connect_grpc,
    in_loop,
    limit_descriptors,
    make_body,
    make_infer_request,
    post,
)
from tfpolicies.cli import main
from tfpolicies.errors import RequestError, UsageError, suggest_similar_names
from tfpolicies.serving import connections, grpc_service, rest, time_limits
from tfpolicies.serving.access import AccessRules, read_token
from tfpolicies.serving.connections import ConnectionLimiter, get_connection_limit
from tfpolicies.serving.grpc_service import GrpcHandler
from tfpolicies.serving.infer_requests import InferRequest
from tfpolicies.serving.repository import ModelRepository
from tfpolicies.serving.rest import make_app
from tfpolicies.serving.rest_codec import decode_request
from tfpolicies.serving.served_model import ServingLimits
from tfpolicies.serving.tensor_checks import decode_values, require_outputs
from tfpolicies.serving.time_limits import ModelTimeoutError, TimeLimits
from tfpolicies.serving.upload_budget import UploadBudget
from tools.endless_model import with_endless_loop

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("kept_programs")]

LONG = "n" * 2_000_000


@pytest.fixture(scope="module")
def server(mlp):
    with Server(mlp) as running:
        yield running
        assert running.end() == 0


def receive(connection):
    """Returns all that comes before the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(65_536):
            parts.append(part)
    except ConnectionError:  # it closed before it had read everything
        pass
    return b"".join(parts)


# -- what requests say ----------------------------------------------------------------------------


def parse(record, most=8_000_000):
    body = record if isinstance(record, bytes) else json.dumps(record).encode()
    return decode_request(body, None, "", most).request


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (make_body(name=LONG), "name of an input may have at most 256 characters"),
        ({**GOOD, "outputs": [{"name": LONG}]}, "name of an output may have at most 256"),
        ({**GOOD, "parameters": {LONG: 1}}, "name of a parameter may have at most 256"),
        (make_body(datatype=LONG), "has the datatype 'nnn"),
        (make_body(shape=[LONG]), "must have a shape such as"),
        (make_body(data=[LONG]), "must have values of FP32, got 'nnn"),
        (make_body(parameters={"binary_data_size": LONG}), "must be from 0 to 0"),
        ({**GOOD, "id": [LONG]}, "'id' must be a string"),
        ({"inputs": [{"name": [LONG]}]}, "must have a name, got"),
        ({**GOOD, "parameters": {"seed": LONG}}, "seed must be of int, got 'nnn"),
        ({"inputs": GOOD["inputs"] * 1001}, "may have at most 1000 inputs, got 1001"),
        (make_body(shape=[2**31 - 1] * 32), "values, which is its shape"),
    ],
)
def test_long_texts_are_refused_before_they_are_compared_and_are_cut(record, words, monkeypatch):
    monkeypatch.setattr("difflib.get_close_matches", None)  # it is not called
    with pytest.raises(RequestError, match=words) as refusal:
        parse(record)
    assert len(str(refusal.value)) < 1000
    assert "n" * 200 not in str(refusal.value)


def test_long_names_are_compared_with_none():
    assert suggest_similar_names("gamm", ["gamma"]) == " Did you mean 'gamma'?"
    assert suggest_similar_names("gamma" + " " * 252, ["gamma" + " " * 251]) == ""


@in_loop
async def test_names_of_models_outputs_and_versions_are_cut(mlp):
    repository = ModelRepository({"mlp": Path(mlp)}, log=lambda line: None)
    with pytest.raises(RequestError, match="name of a model may have at most 256") as model:
        repository[LONG]
    with pytest.raises(RequestError, match="name of an output may have at most 256") as output:
        require_outputs([], [LONG])
    await repository.load()
    with pytest.raises(RequestError, match="There is no version 'nnn") as version:
        await repository["mlp"].infer(InferRequest({}, version=LONG))
    assert max(len(str(refusal.value)) for refusal in (model, output, version)) < 500


def test_values_are_counted_before_they_are_parsed(monkeypatch):
    most = 100_000
    empty = b'{"inputs": [{"data": [' + b"[]," * 6_300 + b"[]]}]}"
    flat = json.dumps(make_body(shape=[40_000], data=[1] * 40_000))
    nested = [[0.5] * 4] * 4000
    assert parse(make_body(shape=[4000, 4], data=nested), most)
    assert parse(flat.replace(" ", "").encode(), most).inputs["obs"].shape == (40_000,)
    monkeypatch.setattr("orjson.loads", None)  # it is not called
    with pytest.raises(RequestError, match=r"6305 of them lists or objects. It may have 50000, "):
        parse(empty, most)
    with pytest.raises(RequestError, match="It may have 50000") as refusal:
        parse(b"[" + b"," * 50_000, most)
    assert refusal.value.status == 413


def test_lists_are_nested_at_most_32_deep():
    def nest(depth):
        return json.loads("[" * depth + "1.0" + "]" * depth)

    assert decode_values("x", "FP32", [1] * 32, nest(32)).shape == (1,) * 32
    with pytest.raises(RequestError, match="nested deeper than 32 lists"):
        decode_values("x", "FP32", [1] * 32, nest(33))


def test_batches_of_images_of_floats_pass():
    shape = [4, 84, 84, 4]
    values = np.random.default_rng(0).random(shape)
    body = json.dumps(make_body(shape=shape, data=values.tolist())).encode()
    assert len(body) > 1_000_000
    np.testing.assert_array_equal(parse(body).inputs["obs"], values.astype(np.float32))


@in_loop
async def test_large_bodies_are_parsed_one_by_one_in_another_thread(server, monkeypatch):
    threads = []

    def read_nothing(*args):
        threads.append(threading.current_thread().name)
        raise RequestError("nothing")

    monkeypatch.setattr(rest, "decode_request", read_nothing)
    app = rest.make_app(ModelRepository({"mlp": Path()}))
    for size in (1_000_000, 1_000_001, 1_000_002):
        scope = {"type": "http", "method": "POST", "path": INFER, "headers": []}
        sent = []

        async def receive(size=size):
            return {"type": "http.request", "body": b" " * size}

        async def answer(message, sent=sent):
            sent.append(message)

        await app(scope, receive, answer)
        assert sent[0]["status"] == 400
    assert threads == ["MainThread", "requests_0", "requests_0"]


def test_large_bodies_are_answered(server):
    assert post(server, INFER, {**GOOD, "id": LONG})[0] == 200
    status, error = post(server, INFER, make_body(name=LONG))
    assert (status, "may have at most 256 characters" in error) == (400, True)


# -- who may ask ----------------------------------------------------------------------------------


SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example:8000"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1"}, 403),  # another server of this computer
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "LOCALHOST:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "127.0.0.1"}, 200),
        (
            {
                "Host": "localhost:1",
                "Origin": "http://localhost:1",
                "Sec-Fetch-Site": "same-origin",
            },
            200,
        ),
        ({"Sec-Fetch-Site": "none"}, 200),
    ],
    ids=str,
)
def test_requests_of_this_computer_are_taken_and_those_of_web_pages_are_not(
    server, headers, status
):
    for path, body in ((INFER, BODY), ("/v2", None), ("/metrics", None)):
        answer, error = post(server, path, body, **headers)
        assert answer == status
        assert status == 200 or "--allowed-" in error


def test_models_are_not_controlled_unless_the_server_lets_them_be(server):
    for action in ("load", "unload"):
        status, error = post(server, f"/v2/repository/models/mlp/{action}", b"{}")
        assert (status, "--control" in error) == (403, True)
    with connect_grpc(server) as stub:
        for method, request in [
            (stub.RepositoryModelLoad, service_pb2.RepositoryModelLoadRequest),
            (stub.RepositoryModelUnload, service_pb2.RepositoryModelUnloadRequest),
        ]:
            with pytest.raises(grpc.RpcError, match="--control") as refusal:
                method(request(model_name="mlp"), timeout=60)
            assert refusal.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert post(server, INFER, BODY)[0] == 200


def is_accepted(access, path="/v2", **headers):
    encoded = {name.replace("_", "-").lower().encode(): x.encode() for name, x in headers.items()}
    try:
        access.check_http(path, encoded)
    except RequestError:
        return False
    return True


def test_hosts_and_origins_are_allowed_by_name():
    access = AccessRules("127.0.0.1", ["Policies.example"], ["https://app.example/"])
    assert is_accepted(access, host="policies.example:80")
    assert is_accepted(
        access, host="localhost", origin="https://app.example", sec_fetch_site="cross-site"
    )
    assert not is_accepted(access, host="other.example")
    assert not is_accepted(access, host="localhost", origin="http://app.example")
    everywhere = AccessRules("0.0.0.0")
    assert is_accepted(everywhere, host="10.0.0.7:8000")
    assert not is_accepted(everywhere, host="10.0.0.7:8000", origin="http://evil.example")
    named = AccessRules("0.0.0.0", ["policies.example"])
    assert is_accepted(named, host="policies.example")
    assert not is_accepted(named, host="10.0.0.7:8000")
    assert is_accepted(AccessRules("::1"), host="[::1]:8000")


def test_a_token_guards_everything_but_health():
    access = AccessRules(token="secret")
    assert is_accepted(access, host="localhost", authorization="Bearer secret")
    for wrong in ("Bearer secre", "Bearer secret2", "secret", ""):
        assert not is_accepted(access, host="localhost", authorization=wrong)
    for path in ("/v2", "/metrics", "/v2/models/mlp/infer", "/v2/health/live/x"):
        assert not is_accepted(access, path, host="localhost")
    assert is_accepted(access, "/v2/health/ready", host="localhost")


def test_a_token_is_read_from_a_file_of_one_word(tmp_path, capsys):
    path, said = tmp_path / "token", []
    path.write_text("s3cret\n")
    path.chmod(0o600)
    assert read_token(path, said.append) == "s3cret"
    path.chmod(0o644)
    assert read_token(path, said.append) == "s3cret"
    assert said == [f"Other users may read {path}. Restrict it to yourself: chmod 600 {path}."]
    os.mkfifo(tmp_path / "pipe")
    for name, content in [("a", b""), ("b", b"two words"), ("c", b"x" * 4097), ("d", b"\xff")]:
        (tmp_path / name).write_bytes(content)
    for name in ("a", "b", "c", "d", "pipe", "none"):
        with pytest.raises(UsageError, match=f"--token-file .*{name}"):
            read_token(tmp_path / name, said.append)
    assert main(["serve", str(tmp_path), "--token-file", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_server_with_a_token_and_an_origin(mlp, tmp_path):
    path = tmp_path / "token"
    path.write_text("s3cret")
    words = ["--token-file", str(path), "--allowed-origin", "https://app.example", "--control"]
    with Server(mlp, *words) as server:
        bearer, page = {"Authorization": "Bearer s3cret"}, {"Origin": "https://app.example"}
        assert post(server, INFER, BODY)[0] == 401
        assert post(server, "/v2/health/ready", None)[0] == 200
        assert post(server, INFER, BODY, **bearer)[0] == 200
        assert post(server, "/v2/repository/models/mlp/load", b"{}", **bearer)[0] == 200
        request = urllib.request.Request(f"http://{server.http}/v2", headers={**bearer, **page})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
        with connect_grpc(server) as stub:
            assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=60).live
            request = service_pb2.ModelReadyRequest(name="mlp")
            with pytest.raises(grpc.RpcError) as refusal:
                stub.ModelReady(request, timeout=60)
            assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
            metadata = [("authorization", "Bearer s3cret")]
            assert stub.ModelReady(request, timeout=60, metadata=metadata).ready
        assert server.end() == 0


# -- heads and connections ------------------------------------------------------------------------


CHUNKED = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
CHUNKED = (CHUNKED + "Connection: close\r\n\r\n").encode()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /" + b"a" * 3_000_000, b"414"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 3_000_000, b"431"),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 500_000, b"431"),
        (b"GET /" + b"a" * 65_600 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 65_600 + b"\r\n\r\n", b"431"),
        (b"\r\n" * 100_000, b"431"),
        (CHUNKED + b"0\r\nX: " + b"a" * 3_000_000, b"431"),  # a header after the body
        (CHUNKED + b"1;" + b"a" * 3_000_000, b"431"),  # the extension of a chunk
    ],
    ids=[
        "address",
        "header",
        "headers",
        "whole-address",
        "whole-head",
        "lines",
        "trailer",
        "chunk",
    ],
)
def test_heads_have_a_limit(server, head, status):
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):  # it is refused before all is sent
            connection.sendall(head)
        answer = receive(connection)
    assert answer[9:12] in (status, b"")  # what is unread may make the answer get lost
    assert post(server, INFER, BODY)[0] == 200


def test_heads_below_the_limit_pass(server):
    assert post(server, INFER, BODY, **{"X-Long": "a" * 60_000})[0] == 200
    large = json.dumps({**GOOD, "id": "a" * 300_000}).encode()
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (1000, large[i : i + 1000]) for i in range(0, 300_000, 1000)
    )
    rest = large[300_000:]
    with connect(server) as connection:
        connection.sendall(CHUNKED + chunks + b"%x\r\n%s\r\n0\r\n\r\n" % (len(rest), rest))
        assert receive(connection).startswith(b"HTTP/1.1 200")


class Waiting:
    def __init__(self, address, last_activity, *, has_request=False, is_waiting=True):
        self.address, self.last_activity = address, last_activity
        self.has_request, self.is_waiting = has_request, is_waiting
        self.is_aborted = False

    def abort(self):
        self.is_aborted = True


def test_of_too_many_connections_one_that_never_asked_gives_way():
    bounded = ConnectionLimiter(8)  # six of one address
    busy = [Waiting("a", i, is_waiting=False) for i in range(2)]
    idle = [Waiting("a", i, has_request=True) for i in range(2)]
    silent = [Waiting("a", 10 + i) for i in range(2)]
    for connection in (*busy, *idle, *silent):
        bounded.add(connection)
    others = [Waiting("b", 0, is_waiting=False) for _ in range(2)]
    for connection in others:
        bounded.add(connection)
    for victim in (*silent, *idle):
        bounded.add(Waiting("a", 100, is_waiting=False))
        assert victim.is_aborted
    late = Waiting("a", 100)
    bounded.add(late)
    assert late.is_aborted  # all others are being answered
    stranger = Waiting("c", 100)
    bounded.add(stranger)
    assert stranger.is_aborted
    assert not any(connection.is_aborted for connection in (*busy, *others))
    bounded.remove(others[0])
    bounded.add(newest := Waiting("c", 100))
    assert not newest.is_aborted


def test_connections_are_fewer_than_descriptors(monkeypatch):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (200, 200))
    is_open = len([*Path("/proc/self/fd").iterdir()]) - 1
    assert get_connection_limit() == max(4, (200 - is_open - 64) // 2)
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (10**6, 10**6))
    assert get_connection_limit() == 4096


def test_connections_that_wait_shut_out_no_other(mlp):
    with Server(mlp, before=limit_descriptors) as server:
        opened = []
        for number in range(200):
            opened.append(connect(server))
            end = "Content-Length: 9\r\n\r\n" if number % 2 else "X: "
            opened[-1].sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n{end}".encode())
        for _ in range(3):
            assert post(server, INFER, BODY)[0] == 200
        for connection in opened:
            connection.close()
        assert server.end() == 0


def test_connections_end_that_do_not_send_what_is_waited_for(monkeypatch):
    class Transport:
        def __init__(self):
            self.written, self.is_closed = b"", False

        def get_extra_info(self, name):
            return None

        def write(self, data):
            self.written += data

        def close(self):
            self.is_closed = True

        def is_closing(self):
            return self.is_closed

        abort = close

    lines = []

    async def app(scope, receive, send):
        await receive()

    async def run(*parts, late):
        config = connections_config(make_app(ModelRepository({}), record=lines.append))
        connection = connections.HttpConnection(ConnectionLimiter(8, lines.append), **config)
        connection.connection_made(Transport())
        for part in parts:
            connection.data_received(part)
        await asyncio.sleep(0)
        connection.close_if_late(connection.last_activity + late - 1)
        assert not connection.transport.is_closed
        connection.close_if_late(connection.last_activity + late + 1)
        assert connection.transport.is_closed
        connection.connection_lost(None)
        await asyncio.sleep(0.01)
        return connection.transport.written[9:12]

    head = b"POST /v2/repository/index HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n"
    assert asyncio.run(run(late=20)) == b"408"
    assert asyncio.run(run(head, late=20)) == b"408"
    assert asyncio.run(run(head, b"\r\n", late=60)) == b"408"
    assert [(line.method, line.status) for line in lines] == [("", 408), ("", 408), ("POST", 408)]


def connections_config(app):
    import uvicorn
    from uvicorn.server import ServerState

    config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
    config.load()
    return {"config": config, "server_state": ServerState(), "app_state": {}}


# -- messages that do not arrive ------------------------------------------------------------------


def test_messages_of_grpc_and_bodies_of_http_share_a_budget():
    arrivals, ended = UploadBudget(100), []

    def begin(name):
        arrival = arrivals.start_upload()
        arrival.abort = lambda: ended.append(name)
        return arrival

    body = begin("body")
    body.add_bytes(90)
    messages = [begin(number) for number in range(4)]
    for message in messages[:3]:
        message.add_bytes(200)
    assert ended == []
    messages[3].add_bytes(200)
    assert ended == [0]  # the largest, and of equal ones the first
    messages[1].can_be_aborted = False
    with body:
        body.add_bytes(30)
    assert ended == [0]
    with messages[1], messages[2], messages[3]:
        pass
    again = begin("again")
    again.add_bytes(800)
    with pytest.raises(RequestError, match=r"take 801 bytes, but may take at most 800") as refusal:
        again.add_bytes(1)
    assert refusal.value.status == 503


@in_loop
async def test_a_message_that_does_not_arrive_is_given_up(monkeypatch):
    monkeypatch.setattr(grpc_service, "_UNCOUNTED_SECONDS", 0.01)

    class Context:
        code = None

        async def read(self):
            await asyncio.Event().wait()

        def invocation_metadata(self):
            return ()

        async def abort(self, code, details):
            self.code, self.details = code, details

    handler = GrpcHandler(ModelRepository({}, ServingLimits(max_body=100)), AccessRules())
    infer = handler._handlers["/inference.GRPCInferenceService/ModelInfer"].stream_unary
    first = [Context() for _ in range(4)]
    calls = [asyncio.create_task(infer(None, context)) for context in first]
    await asyncio.sleep(0.05)
    assert [context.code for context in first] == [None] * 4
    calls.append(asyncio.create_task(infer(None, Context())))
    await asyncio.wait_for(calls[0], 60)  # it gives way
    assert first[0].code == grpc.StatusCode.UNAVAILABLE
    assert "Others need the memory" in first[0].details
    for call in calls[1:]:
        call.cancel()
    monkeypatch.setattr(grpc_service, "_MESSAGE_SECONDS", 0.01)
    late = Context()
    await asyncio.wait_for(infer(None, late), 60)
    assert late.code == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_message_that_is_none_is_refused(server):
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError, match="not a ModelInferRequest") as refusal:
            infer(b"\xff\xff\xff", timeout=60)
        assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        request = service_pb2.ModelInferRequest(model_name=LONG)
        with pytest.raises(grpc.RpcError, match="name of a model may have at most 256"):
            infer(request.SerializeToString(), timeout=60)


# -- models that do not come to an end ------------------------------------------------------------


def test_what_runs_too_long_is_ended_and_what_is_quick_is_not(endless):
    import onnxruntime

    session = onnxruntime.InferenceSession((endless / "model.onnx").read_bytes())
    limits = TimeLimits()

    def run(value, seconds):
        with limits.limit(seconds):
            obs = np.full((1, 3), value, np.float32)
            return session.run(None, {"obs": obs}, limits.get_options())

    with pytest.raises(ModelTimeoutError):
        run(2.0, 0.2)
    assert run(0.0, 60.0)  # the one before is forgotten
    with pytest.raises(ZeroDivisionError), limits.limit(60.0):
        raise ZeroDivisionError
    limits.stop()
    with pytest.raises(ModelTimeoutError):
        run(2.0, 60.0)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_threads_of_models_that_take_long_let_others_go_first(endless, monkeypatch):
    import onnxruntime

    monkeypatch.setattr(time_limits, "_YIELD_SECONDS", 0.1)
    session = onnxruntime.InferenceSession((endless / "model.onnx").read_bytes())
    limits = TimeLimits()

    def priority_after(value, seconds):
        obs = np.full((1, 3), value, np.float32)
        with contextlib.suppress(ModelTimeoutError), limits.limit(seconds):
            session.run(None, {"obs": obs}, limits.get_options())
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    model, other = ThreadPoolExecutor(1, initializer=limits.allow_yielding), ThreadPoolExecutor(1)
    with model, other:
        usual = model.submit(priority_after, 0.0, 60.0).result()
        assert model.submit(priority_after, 2.0, 0.4).result() == usual + 10
        assert other.submit(priority_after, 2.0, 0.4).result() == usual


@pytest.fixture(scope="module")
def endless(mlp, tmp_path_factory):
    """The folder of an export whose model does not end where an observation is above 1."""
    copy = shutil.copytree(mlp, tmp_path_factory.mktemp("loop") / "loop")
    with_endless_loop(copy)
    return copy


def test_a_model_that_does_not_end_holds_up_no_other_and_not_the_end(mlp, endless):
    with Server(f"mlp={mlp}", f"loop={endless}", "--max-seconds", "2") as server:
        above = make_body(data=[2, 0, 0])
        status, error = post(server, "/v2/models/loop/infer", above)
        assert (status, "'loop' did not answer within 2 seconds" in error) == (504, True)
        below = make_body(data=[-1, -2, -3])
        assert post(server, "/v2/models/loop/infer", below)[0] == 200
        with connect_grpc(server) as stub:
            with pytest.raises(grpc.RpcError) as refusal:
                stub.ModelInfer(make_infer_request("loop", [2, 2, 2]), timeout=60)
            assert refusal.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        running = threading.Thread(target=post, args=(server, "/v2/models/loop/infer", above))
        running.start()
        time.sleep(0.2)
        assert post(server, INFER, BODY)[0] == 200
        assert server.end() == 0
        running.join(60)


@in_loop
async def test_a_server_that_ends_loads_no_more(endless):
    repository = ModelRepository({"loop": endless}, log=lambda line: None)
    repository.time_limits.stop()
    with pytest.raises(Exception, match="was tried on a few rows, which did not end"):
        await repository.load()
