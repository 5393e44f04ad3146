"""What docs/howto/serving.md says is so: its code runs, against a server and on Ray."""

import http.server
import json
import re
import socket
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from helpers.factories import TWO, make, varied
from helpers.serving import MATRIX, Server, export

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("kept_programs")]

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "serving.md"
POLE = spaces.Box(-1.0, 1.0, (4,), np.float32)
OBS = np.array([[0.1, 0.2, 0.0, -0.3]], np.float32)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S)


def find_block(text):
    (code,) = [block for block in blocks("python") if text in block]
    return code


@pytest.fixture(scope="module")
def pole():
    return varied(make(obs=POLE, actions=TWO))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pole):
    home = tmp_path_factory.mktemp("exports")
    export(pole, home / "cartpole" / "onnx")
    memory = varied(make(obs=POLE, actions=TWO, **MATRIX["memory"]))
    export(memory, home / "memory")
    pole.export_model(str(home / "cartpole" / "saved_model"))
    return home


@pytest.fixture(scope="module")
def server(folder):
    with Server(str(folder / "cartpole"), str(folder / "memory")) as running:
        yield running


def in_place(server, code):
    for address in ("localhost:8000", "localhost:8010"):
        code = code.replace(address, server.http)
    return code.replace("localhost:8001", server.grpc)


def test_the_clients_of_the_page_get_actions(server, pole):
    http_client, grpc_client, step = map(
        find_block, ('InferenceServerClient("localhost:8000', "tritonclient.grpc", "def step(")
    )
    names = {}
    exec(in_place(server, http_client), names)
    zeros = pole.compute_actions(np.zeros((2, 4), np.float32), explore=False).actions
    np.testing.assert_array_equal(names["actions"], zeros)
    exec(in_place(server, grpc_client), names)
    assert names["actions"].shape == (2,)
    assert f"version {names['version']}, " in server.line("model cartpole")
    exec(in_place(server, step), names)
    assert names["action"] in (0, 1)


def test_curl_gets_actions(server, pole):
    (command,) = [block for block in blocks("sh") if block.startswith("curl")]
    done = subprocess.run(["sh", "-c", in_place(server, command)], capture_output=True, check=True)
    (output,) = json.loads(done.stdout)["outputs"]
    assert output["data"] == pole.compute_actions(OBS, explore=False).actions.tolist()


def test_the_lines_that_the_page_shows_are_those_that_are_printed(server):
    for shown in blocks("text")[0].splitlines():
        pattern = re.sub(r"[0-9a-f]{12}", "[0-9a-f]{12}", re.sub(r":\d+$", r":\\d+", shown))
        pattern = pattern.replace("from ", "from .*")
        assert any(re.fullmatch(pattern, line) for line in server.lines), shown


def test_the_rest_form_of_tensorflow_serving_fits_the_saved_model(folder, pole):
    import tensorflow as tf

    loaded = tf.saved_model.load(str(folder / "cartpole" / "saved_model" / "1"))
    signature = loaded.signatures["serving_default"]

    class Predict(http.server.BaseHTTPRequestHandler):
        """Does with `:predict` what TensorFlow Serving's page says of the columnar form."""

        def do_POST(self):
            data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"]
            outputs = signature(**{name: tf.constant(x) for name, x in data.items()})
            body = json.dumps({"outputs": {k: x.numpy().tolist() for k, x in outputs.items()}})
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Predict) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        names = {}
        code = find_block("localhost:8501")
        exec(code.replace("localhost:8501", f"127.0.0.1:{other.server_port}"), names)

    assert names["actions"] == pole.compute_actions(OBS, explore=False).actions.tolist()


@pytest.fixture
def ray_serve(monkeypatch):
    """Ray Serve on this computer, which may be slow to start where others work."""
    for name in ("READY", "HEALTH"):
        monkeypatch.setenv(f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S", "60")
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    serve = pytest.importorskip("ray.serve")
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield serve, f"127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # of Ray's own
def test_two_replicas_on_ray_serve_act_as_the_policy_does(ray_serve, folder, pole):
    import tritonclient.http

    from tfpolicies.serving import deployment

    options = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.1}}
    serve, address = ray_serve
    serve.run(deployment(folder / "cartpole" / "onnx", name="cartpole", **options))

    client = tritonclient.http.InferenceServerClient(address)
    obs = tritonclient.http.InferInput("obs", [1, 4], "FP32").set_data_from_numpy(OBS)
    expected = pole.compute_actions(OBS, explore=False)
    for _ in range(20):
        answer = client.infer("cartpole", [obs])
        np.testing.assert_array_equal(answer.as_numpy("actions"), expected.actions)
    status = serve.status().applications["default"].deployments["cartpole"]
    assert status.replica_states == {"RUNNING": 2}
