"""Serves an export by MLServer: checks its settings, starts it, and asks it over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from mlserver.settings import ModelSettings

folder = Path(sys.argv[1]).absolute()
given = json.loads((folder / "model-settings.json").read_text())
settings = ModelSettings.parse_file(str(folder / "model-settings.json"))
unknown = given.keys() - {x.alias or n for n, x in ModelSettings.model_fields.items()}
unknown -= {"implementation"}
if unknown:
    raise SystemExit(f"settings that MLServer does not know: {unknown}")


def free_port():
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return result.getsockname()[1]


def asked(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    url = f"http://127.0.0.1:{port}/v2/{path}"
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"{}")


def wait_until_ready():
    for _ in range(600):
        try:
            return asked("health/ready")
        except OSError:
            if server.poll() is not None:
                raise SystemExit(f"MLServer ended with {server.returncode}") from None
            time.sleep(0.1)
    raise SystemExit("MLServer is not ready after a minute")


expected = np.load(sys.argv[2])
port = free_port()
environment = {f"MLSERVER_{k}": str(v) for k, v in {"HOST": "127.0.0.1", "HTTP_PORT": port}.items()}
environment |= {"MLSERVER_GRPC_PORT": str(free_port()), "MLSERVER_METRICS_PORT": str(free_port())}
environment["MLSERVER_PARALLEL_WORKERS"] = "0"
command = [str(Path(sys.executable).with_name("mlserver")), "start", str(folder)]
server = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
try:
    wait_until_ready()
    metadata = asked(f"models/{folder.name}")
    inputs = [
        {
            **x,
            "shape": list(expected[x["name"]].shape),
            "data": expected[x["name"]].ravel().tolist(),
        }
        for x in given["inputs"]
    ]
    answer = asked(f"models/{folder.name}/infer", {"inputs": inputs})
    worst = 0.0
    for output in answer["outputs"]:
        name = output["name"]
        array = np.array(output["data"], np.float64).reshape(output["shape"])
        if name in expected:
            if array.shape != expected[name].shape:
                raise SystemExit(f"{name} has the shape {array.shape}")
            worst = max(worst, float(np.abs(array - expected[name]).max()))
    try:
        asked(
            f"models/{folder.name}/infer", {"inputs": inputs[:-1] or [{**inputs[0], "name": "x"}]}
        )
        refused = "answered"
    except urllib.error.HTTPError as error:
        refused = f"{error.code}: {json.loads(error.read())['error']}"
finally:
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(30)
told = {"inputs": [x["name"] for x in metadata["inputs"]], "largest difference": worst}
print(json.dumps({**told, "a request without an input": refused}))
