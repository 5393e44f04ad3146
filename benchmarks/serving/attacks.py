"""A server of policies under attack, next to honest clients.

    python -m benchmarks.serving.attacks [--seconds 20] [--rounds 3] [--exports FOLDER]

In turns, 16 honest clients (8 of HTTP, 8 of gRPC) ask a quiet server, and one that is attacked in
all of these ways at once:

- names: bodies as large as are taken, with one long name, or with millions of empty lists
- pages: requests as a web page sends them, of another host or origin, and requests for control
- waiting: hundreds of connections that never finish their headers, or send none of a body
- heads: addresses and headers of megabytes
- messages: 2 connections of gRPC with 15 calls each, whose messages never arrive whole
- loops: requests to a model that runs in a circle for them

The rates of the attacks are bounded, since all share this computer. Prints failures, p99 with and
without attack, and how much the server's memory grows at most.
"""

import argparse
import contextlib
import json
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.serving.serving import Server, begin_load, policy_of, tensor_of
from tools.endless_model import with_endless_loop

BODY = 7_900_000  # bytes, just below what the server takes
WAITING = 300
TENSOR = {"name": "obs", "shape": [1, 4], "datatype": "FP32", "data": [0.0, 0.0, 0.0, 0.0]}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW = 0, 1, 4, 6, 8


class Attack:
    """An attack that repeats until it is ended, and counts the answers.

    Attributes:
        answers: how often each status came.
        is_over: set once it is to end.
    """

    def __init__(self, name: str, server: Server, attack: Callable[["Attack"], None]) -> None:
        self.name, self.ports, self.is_over = name, server.ports, threading.Event()
        self.answers: Counter[str] = Counter()
        self._attack = attack
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.is_over.is_set():
            try:
                self._attack(self)
            except OSError as error:
                self.answers[type(error).__name__] += 1

    def connect(self, protocol: str = "http") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.ports[protocol]), timeout=20)

    def post(self, path: str, body: bytes, *lines: str, host: str = "127.0.0.1") -> None:
        """Sends one request through a connection of its own, and counts its status."""
        head = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", *lines]
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):  # it is answered before all is sent
                connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
            try:
                answer = connection.recv(1000)
            except ConnectionError:
                answer = b""
            self.answers[answer[9:12].decode() or "closed"] += 1

    def rest(self, seconds: float) -> None:
        self.is_over.wait(seconds)

    def end(self) -> None:
        self.is_over.set()
        self._thread.join(30)


def bodies() -> Iterator[bytes]:
    """Yields bodies that take long to be compared, or much memory; the last one is too large."""
    long = "n" * BODY
    empty = b"[" + b"[]," * (BODY // 3) + b"[]]"
    yield json.dumps({"inputs": [{**TENSOR, "name": long}]}).encode()
    yield json.dumps({"inputs": [TENSOR], "parameters": {long: 1}}).encode()
    yield json.dumps({"inputs": [TENSOR], "outputs": [{"name": long}]}).encode()
    yield json.dumps({"inputs": [{**TENSOR, "data": 0}]}).encode().replace(b" 0}", b"%s}" % empty)
    yield b'{"inputs":' + b"[" * BODY
    yield b" " * 63_000_000


def send_names(attack: Attack) -> None:
    for body in bodies():
        attack.post("/v2/models/mlp/infer", body)
        attack.rest(0.5)
        if attack.is_over.is_set():
            return


def act_as_page(attack: Attack) -> None:
    body = json.dumps({"inputs": [TENSOR]}).encode()
    attack.post("/v2/models/mlp/infer", body, host="evil.example")
    attack.post("/v2/models/mlp/infer", body, "Origin: http://evil.example")
    attack.post("/v2/models/mlp/infer", body, "Sec-Fetch-Site: cross-site")
    attack.post("/v2/repository/models/mlp/unload", b"{}")
    attack.rest(0.2)


def keep_waiting(attack: Attack) -> None:
    with contextlib.ExitStack() as stack:
        while not attack.is_over.is_set():
            for number in range(WAITING):
                connection = stack.enter_context(attack.connect())
                head = b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                end = b"Content-Length: 9\r\n\r\n" if number % 5 == 0 else b"X-Slow: "
                connection.sendall(head + end)
                attack.answers["opened"] += 1
                attack.rest(0.01)
            attack.rest(5)
            stack.close()


def send_heads(attack: Attack) -> None:
    long = "h" * 2_000_000
    attack.post("/v2/models/mlp/infer", b"", f"X-Long: {long}")
    attack.post(f"/{long}", b"")
    attack.rest(0.5)


def send_messages(attack: Attack) -> None:
    """Sends as much of 15 messages as flow control allows, and never their end."""
    with attack.connect("grpc") as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        calls = {1 + 2 * number: BODY - 1000 for number in range(15)}
        for number in calls:
            connection.sendall(frame(HEADERS, 4, number, CALL))
        room = {0: 65_535, **dict.fromkeys(calls, 65_535)}
        first = b"\0" + BODY.to_bytes(4, "big")
        begun: set[int] = set()
        received, until = b"", time.monotonic() + 5
        while calls and time.monotonic() < until and not attack.is_over.is_set():
            for number in [*calls]:
                size = min(room[number], room[0], calls[number], 16_384)
                if size > len(first):
                    part = b"\0" * size if number in begun else first.ljust(size, b"\0")
                    begun.add(number)
                    connection.sendall(frame(DATA, 0, number, part))
                    for key in (number, 0):
                        room[key] -= size
                    calls[number] -= size
            connection.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                part = connection.recv(65_536)
                if not part:
                    break
                received += part
            connection.settimeout(20)
            while len(received) >= 9 and len(received) >= 9 + (size := size_of(received)):
                kind, flags = received[3], received[4]
                number = int.from_bytes(received[5:9], "big")
                content, received = received[9 : 9 + size], received[9 + size :]
                if kind == WINDOW and number in room:
                    room[number] += int.from_bytes(content, "big")
                elif kind in (SETTINGS, PING) and not flags & 1:
                    connection.sendall(frame(kind, 1, 0, content if kind == PING else b""))
                elif flags & 1 and calls.pop(number, 0):
                    attack.answers["ended"] += 1
        attack.answers["calls"] += 15
    attack.rest(1.0)


def size_of(received: bytes) -> int:
    return int.from_bytes(received[:3], "big")


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """Returns a frame of HTTP/2."""
    head = len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + content


def field(name: str, value: str) -> bytes:
    """Returns a header as HTTP/2 writes it, without compression."""
    return b"\0" + b"".join(bytes([len(x)]) + x.encode() for x in (name, value))


CALL = b"".join(
    itself
    for itself in (
        field(":method", "POST"),
        field(":scheme", "http"),
        field(":path", "/inference.GRPCInferenceService/ModelInfer"),
        field(":authority", "127.0.0.1"),
        field("te", "trailers"),
        field("content-type", "application/grpc"),
    )
)


def run_in_circles(attack: Attack) -> None:
    body = {"inputs": [{**TENSOR, "data": [2.0, 0.0, 0.0, 0.0]}]}
    attack.post("/v2/models/loop/infer", json.dumps(body).encode())
    attack.rest(0.2)


ATTACKS: dict[str, list[Callable[[Attack], None]]] = {
    "names": [send_names],
    "pages": [act_as_page],
    "waiting": [keep_waiting],
    "heads": [send_heads],
    "messages": [send_messages, send_messages],
    "loops": [run_in_circles],
}


class Peak:
    """The most memory that a server holds, looked at 20 times a second."""

    def __init__(self, server: Server) -> None:
        self.megabytes, self._server = server.megabytes, server
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.05):
            self.megabytes = max(self.megabytes, self._server.megabytes)

    def end(self) -> float:
        self._is_over.set()
        self._thread.join()
        return self.megabytes


def ask(server: Server, seconds: float) -> dict[str, Any]:
    """Lets 16 honest clients work, and returns what came of it."""
    work = {"model": "mlp", "output": "actions", "clients": 8, "seconds": seconds}
    work |= tensor_of("mlp")
    running = [begin_load(server, **work, protocol=protocol) for protocol in ("http", "grpc")]
    results = [json.loads(clients.communicate()[0]) for clients in running]
    result = {f"p99_{name}": x["p99"] for name, x in zip(("http", "grpc"), results, strict=True)}
    result |= {key: sum(x[key] for x in results) for key in ("answered", "failed")}
    return result | {"fault": [x["fault"] for x in results if x["fault"]]}


def compare(server: Server, rounds: int, seconds: float, names: list[str]) -> dict[str, Any]:
    """Asks the server alone and under attack, in turns."""
    ask(server, 2.0)
    before, ratios, failed, answers = server.megabytes, [], 0, {}
    peak, rows = Peak(server), []
    for _ in range(rounds):
        quiet = ask(server, seconds)
        attacks = [Attack(name, server, each) for name in names for each in ATTACKS[name]]
        attacked = ask(server, seconds)
        for attack in attacks:
            attack.is_over.set()
        for attack in attacks:
            attack.end()
            answers[attack.name] = Counter(answers.get(attack.name, {})) + attack.answers
        rows.append({"quiet": quiet, "attacked": attacked})
        print(json.dumps(rows[-1]), flush=True)
        failed += attacked["failed"] + quiet["failed"]
        for name in ("p99_http", "p99_grpc"):
            ratios.append(attacked[name] / quiet[name])
    return {
        "failed": failed,
        "p99_ratio": round(statistics.median(ratios), 2),
        "growth_megabytes": round(peak.end() - before, 1),
        "answers": {name: dict(counted) for name, counted in answers.items()},
        "rounds": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Attacks a server of policies.")
    parser.add_argument("--only", default=",".join(ATTACKS), help="some of " + ", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--exports", type=Path, help="a folder that has or is to keep the export")
    parser.add_argument("--out", type=Path, default=RESULTS / "serving_attacks.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.exports or Path(temporary)
        if not (folder / "mlp").exists():
            policy_of("mlp").export_model(folder / "mlp", onnx=True)
        loop = Path(temporary, "loop")
        shutil.copytree(folder / "mlp", loop)
        with_endless_loop(loop)
        words = [f"mlp={folder / 'mlp'}", f"loop={loop}", "--port", "0", "--grpc-port", "0"]
        options = ["--max-seconds", "2", "--drain-seconds", "0"]
        command = [sys.executable, "-m", "tfpolicies", "serve", *words, *options]
        server = Server([], command)
        try:
            result = compare(server, options.rounds, options.seconds, options.only.split(","))
            endless = Attack("loops", server, run_in_circles)  # one runs when the server ends
            time.sleep(1.0)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            endless.is_over.set()
            result["status"] = server.process.wait(60)
            result["seconds_to_end"] = round(time.monotonic() - began, 1)
        finally:
            server.process.kill()
    for key, value in result.items():
        if key != "rounds":
            print(f"{key}: {value}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
