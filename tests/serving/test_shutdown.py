"""How a server ends: clients turn elsewhere, and no request gets lost."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2

from helpers.serving import Server
from helpers.serving_clients import BODY, INFER, connect, connect_grpc, make_infer_request
from tfpolicies.serving.connections import refuse_new_connections

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("kept_programs")]

CLIENTS = 8


class Client:
    """Asks for actions, one request after the other, until the server takes no connections.

    Attributes:
        answers: how many requests were answered.
        closing: how many of the answers said that the connection closes.
        lost: what became of those that were not answered.
    """

    def __init__(self, server):
        self._host, self._port = server.http.split(":")
        self.answers = self.closing = 0
        self.lost = []

    def ask(self):
        while True:
            connection = http.client.HTTPConnection(self._host, int(self._port), timeout=60)
            try:
                connection.connect()
            except ConnectionRefusedError:
                return
            while connection.sock is not None:  # it is None once an answer has said `close`
                try:
                    connection.request("POST", INFER, BODY)
                    with connection.getresponse() as response:
                        response.read()
                        status, close = response.status, response.getheader("connection")
                except (OSError, http.client.HTTPException) as error:
                    self.lost.append(repr(error))
                    connection.close()
                    return
                if status != 200:
                    self.lost.append(status)
                self.answers += 1
                self.closing += close == "close"


def test_no_request_of_clients_that_keep_their_connections_is_lost(mlp):
    with Server(mlp, "--drain-seconds", "1") as server, ThreadPoolExecutor(CLIENTS) as pool:
        clients = [Client(server) for _ in range(CLIENTS)]
        asking = [pool.submit(client.ask) for client in clients]
        wait_for(lambda: all(client.answers >= 20 for client in clients))
        assert all(client.closing == 0 for client in clients)
        assert server.end() == 0
        for future in asking:
            future.result(60)
    assert [client.lost for client in clients] == [[]] * CLIENTS
    assert all(client.closing > 0 for client in clients)


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def ask_by_grpc(server, answers):
    """Returns the error of the first request that is not answered."""
    with connect_grpc(server) as stub:
        while True:
            try:
                answers.append(stub.ModelInfer(make_infer_request(), timeout=60))
            except grpc.RpcError as error:
                return error.code(), error.details()


def test_no_request_over_grpc_is_lost(mlp):
    with Server(mlp, "--drain-seconds", "1") as server, ThreadPoolExecutor(CLIENTS) as pool:
        answers = [[] for _ in range(CLIENTS)]
        asking = [pool.submit(ask_by_grpc, server, x) for x in answers]
        wait_for(lambda: all(len(x) >= 20 for x in answers))
        assert server.end() == 0
        for future in asking:
            code, details = future.result(60)
            assert code == grpc.StatusCode.UNAVAILABLE
            assert "Connection refused" in details  # it was not sent


def get_health(server, path):
    host, port = server.http.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        with connection.getresponse() as response:
            return response.status, response.getheader("connection"), json.loads(response.read())


@pytest.mark.parametrize(
    ("second", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_server_that_drains_is_not_ready_but_answers_until_a_second_signal(mlp, second, status):
    with Server(mlp, "--drain-seconds", "600") as server, connect_grpc(server) as stub:
        assert get_health(server, "/v2/health/ready") == (200, None, {"ready": True})
        so_far = len(server.lines)
        server.process.send_signal(signal.SIGTERM)
        line = server.line("Terminated: ", so_far)
        assert "answers for 600 more seconds" in line
        assert get_health(server, "/v2/health/ready") == (503, "close", {"ready": False})
        assert get_health(server, "/v2/health/live") == (200, "close", {"live": True})
        assert not stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=60).ready
        assert stub.ModelInfer(make_infer_request(), timeout=60).model_name == "mlp"
        began = time.monotonic()
        assert server.end(second) == status
        assert time.monotonic() - began < 20  # else 600, and 30 more for what runs


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_server_whose_output_is_closed_drains_and_stops(mlp, unbuffered):
    command = [sys.executable, "-m", "tfpolicies", "serve", mlp, "--drain-seconds", "1"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--grpc-port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    try:
        with process.stdout as output:
            while not output.readline().startswith("gRPC at"):
                assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert time.monotonic() - began < 25  # else it ends after 41 seconds, whatever runs
    finally:
        process.kill()


def test_ctrl_c_stops_without_draining(mlp):
    with Server(mlp, "--drain-seconds", "600") as server:
        assert server.end(signal.SIGINT) == 0


def test_a_second_signal_does_not_wait_for_what_runs(mlp):
    with Server(mlp) as server, connect(server) as connection:
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        connection.sendall(head.encode())
        get_health(server, "/v2")  # what came before has been read
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.5)  # it waits for the body
        began = time.monotonic()
        assert server.end() == 143
        assert time.monotonic() - began < 15  # else 30


def test_a_connection_without_a_request_may_still_send_one_when_the_server_stops(mlp):
    with Server(mlp) as server, connect(server) as early, connect(server) as silent:
        get_health(server, "/v2")
        server.process.send_signal(signal.SIGTERM)
        early.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = early.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200")
        assert silent.recv(1000) == b""  # it is closed, and holds nothing up
        assert server.process.wait(60) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="sockets have no filters")
def test_a_socket_that_begins_no_connections_keeps_those_that_are_made():
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname(), timeout=60) as made,
    ):
        refuse_new_connections(listening)
        with pytest.raises(TimeoutError):
            socket.create_connection(listening.getsockname(), timeout=0.3)
        accepted, _ = listening.accept()
        with accepted:
            made.sendall(b"here")
            assert accepted.recv(10) == b"here"
