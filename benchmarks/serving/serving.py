"""What serving a policy costs, and whether it gives what the policy gives.

    python -m benchmarks.serving.serving [--only parity,load,alone,swaps,malformed,soak,ray]
    [--minutes 10]

The server and its clients are processes of their own, on this computer. `load` and `alone` compare
a policy with its echo on the same server, in turns; the figures are medians of the rounds, and
ratios are what counts. The processor's time of the server per request is free of what else runs,
and `others` is the share of the machine that other processes took meanwhile.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks import RESULTS, ROOT

HERE = Path(__file__).parent
VECTOR = spaces.Box(-1.0, 1.0, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (84, 84, 4), np.uint8)
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(3), "observations": VECTOR})
NESTED = spaces.Dict({"far": VECTOR, "near": spaces.Discrete(5)})
TWO, THREE = spaces.Discrete(2), spaces.Discrete(3)
PLANE = spaces.Box(-2.0, 3.0, (2,), np.float32)
LSTM = {"fcnet_hiddens": [64], "use_lstm": True, "lstm_cell_size": 64}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mlp": (VECTOR, TWO, {"fcnet_hiddens": [64, 64]}),
    "cnn": (IMAGE, THREE, {}),
    "lstm": (VECTOR, TWO, LSTM),
    "masked": (MASKED, THREE, {"fcnet_hiddens": [64, 64]}),
    "dict": (NESTED, TWO, {"fcnet_hiddens": [64, 64]}),
    "box": (VECTOR, PLANE, {"fcnet_hiddens": [64, 64]}),
    "tuple": (VECTOR, spaces.Tuple((THREE, PLANE)), {"fcnet_hiddens": [64, 64]}),
    "lstm_box": (VECTOR, PLANE, LSTM),
}
"""By name, the observations, the actions and the model of a policy."""

LOADED = ("mlp", "cnn", "lstm")
DATATYPES = {"float32": "FP32", "int64": "INT64", "uint8": "UINT8"}
MALFORMED = (
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"inputs": 3}',
    b'{"inputs": []}',
    b'{"inputs": [{"name": "ob", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}',
    b'{"inputs": [{"name": "obs", "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}',
    b'{"inputs": [{"name": "obs", "shape": [1, -4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}',
    b'{"inputs": [{"name": "obs", "shape": [1, 4], "datatype": "FP64", "data": [1, 2, 3, 4]}]}',
    b'{"inputs": [{"name": "obs", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3]}]}',
    b'{"inputs": [{"name": "obs", "shape": [1, 4], "datatype": "FP32", "data": [1, "a", 3, 4]}]}',
    b'{"inputs": [{"name": "obs", "shape": [1, 4], "datatype": "FP32", "data": [1, NaN, 3, 4]}]}',
    b'{"inputs": [{"name": "obs", "shape": [1, 4], "datatype": "FP32", "data": [1e999, 2, 3, 4]}]}',
    b'{"inputs": [{"name": "obs", "shape": [1, 4], "datatype": "FP32", "data": [[1], [2, 3]]}]}',
)


def policy_of(kind: str, seed: int = 1) -> Any:
    """Returns a policy whose weights depend on the seed."""
    from tfpolicies import PPOTF2Policy

    obs, actions, model = KINDS[kind]
    config = {"seed": 0, "inference": "tf", "jit_compile": False, "model": model}
    policy = PPOTF2Policy(obs, actions, config)
    rng = np.random.default_rng(seed)
    weights = policy.get_weights()
    policy.set_weights({k: w + 0.1 * rng.normal(size=w.shape) for k, w in weights.items()})
    return policy


def observation(space: Any, rng: np.random.Generator) -> Any:
    """Returns one random observation, with its row axis."""
    if isinstance(space, spaces.Dict):
        results = {key: observation(part, rng) for key, part in space.items()}
        if "action_mask" in results:
            results["action_mask"][:, 0] = 1
        return results
    if isinstance(space, spaces.Discrete):
        return rng.integers(space.n, size=1)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(2, size=(1, space.n)).astype(np.int8)
    if space.dtype == np.uint8:
        return rng.integers(256, size=(1, *space.shape), dtype=np.uint8)
    return rng.normal(size=(1, *space.shape)).astype(np.float32)


def named(obs: Any) -> dict[str, np.ndarray]:
    """Returns an observation by the names of an export's inputs."""
    if not isinstance(obs, dict):
        return {"obs": obs}
    if "action_mask" in obs:
        return {"obs": obs["observations"], "action_mask": obs["action_mask"].astype(np.int64)}
    return {f"obs_{key}": x for key, x in obs.items()}


class Server:
    """`serving_process.py` with exports, or another command that serves, in its own process."""

    def __init__(
        self, folders: list[Path], command: list[str] | None = None, python: str = sys.executable
    ) -> None:
        echoes = [python, str(HERE / "process.py"), *map(str, folders)]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        if python != sys.executable:  # it has the package installed
            del variables["PYTHONPATH"]
        command = command or echoes
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
        self.ports: dict[str, int] = {}
        while len(self.ports) < 2:
            line = self.line()
            protocol, _, address = line.partition(" at ")
            if address:
                self.ports[protocol.lower()] = int(address.rsplit(":", 1)[1])

    def line(self) -> str:
        """Waits for a line that it prints, and returns it."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError("the server ended")
        return line

    @property
    def cpu(self) -> float:
        """The processor's seconds that it took so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def megabytes(self) -> float:
        """The memory that it holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+)", status)
        return int(match[1]) / 1024 if match else 0.0

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def served(folders: list[Path], python: str = sys.executable) -> Iterator[Server]:
    server = Server(folders, python=python)
    print(f"the server holds {server.megabytes:.0f} MB")
    try:
        yield server
    finally:
        print(f"the server holds {server.megabytes:.0f} MB")
        print("the server ended with", server.end())


def machine() -> tuple[float, float]:
    """Returns the processor's seconds that were used, and all that there were."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    ticks = os.sysconf("SC_CLK_TCK")
    return (sum(fields) - fields[3] - fields[4]) / ticks, sum(fields) / ticks


def begin_load(server: Any, **work: Any) -> subprocess.Popen[str]:
    """Starts clients; they end by themselves."""
    protocol = work.setdefault("protocol", "http")
    work = {"clients": 64, "seconds": 5.0, "requests": 1_000_000, "input": "obs", **work}
    clients = subprocess.Popen(
        [sys.executable, str(HERE / "load.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if clients.stdin is not None:
        clients.stdin.write(json.dumps({**work, "port": server.ports[protocol]}) + "\n")
        clients.stdin.flush()
    return clients


def loaded(server: Any, **work: Any) -> dict[str, Any]:
    """Lets clients work, and returns what came of it."""
    (used, total), cpu = machine(), server.cpu
    output, _ = begin_load(server, **work).communicate()
    results = dict(json.loads(output))
    (used_now, total_now), own = machine(), server.cpu - cpu
    results["others"] = (used_now - used - own - results["cpu"]) / (total_now - total)
    results["cpu_us"] = own / max(1, results["answered"]) * 1e6
    return results


def tensor_of(kind: str) -> dict[str, Any]:
    if kind == "cnn":
        return {"shape": [1, 84, 84, 4], "datatype": "UINT8"}
    return {"shape": [1, 4], "datatype": "FP32", "memory": kind == "lstm"}


def beside_echo(server: Server, clients: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Compares policies with their echoes, in turns."""
    results: dict[str, Any] = {}
    for protocol in ("http", "grpc"):
        for kind in LOADED:
            work = {"protocol": protocol, "clients": clients, "seconds": seconds}
            work |= tensor_of(kind)
            pairs = []
            for _ in range(rounds):
                echo = loaded(server, **work, model=f"{kind}-echo")
                pairs.append((echo, loaded(server, **work, model=kind, output="actions")))
            keys = ("per_second", "p50", "p99", "cpu_us", "others", "failed")
            middle = [
                {key: statistics.median(each[i][key] for each in pairs) for key in keys}
                for i in (0, 1)
            ]
            rate = statistics.median(y["per_second"] / max(x["per_second"], 0.1) for x, y in pairs)
            row = {"echo": middle[0], "policy": middle[1], "rate": rate}
            row["p99"] = statistics.median(y["p99"] / x["p99"] for x, y in pairs)
            results[f"{protocol} {kind}"] = row
            print(f"{clients} clients, {protocol} {kind}: {told(row)}", flush=True)
    return results


def told(row: dict[str, Any]) -> str:
    parts = [
        f"{name} {x['per_second']:.0f}/s, p50 {x['p50']:.2f} p99 {x['p99']:.1f} ms, "
        f"{x['cpu_us']:.0f} us of the processor, others {x['others']:.0%}, failed {x['failed']:.0f}"
        for name, x in (("echo", row["echo"]), ("policy", row["policy"]))
    ]
    return f"{parts[0]}; {parts[1]}; rate x {row['rate']:.2f}, p99 x {row['p99']:.2f}"


def own_milliseconds(folder: Path) -> dict[str, float]:
    """Returns what one observation takes in this process, through the export."""
    from tfpolicies.export.player import OnnxPolicy

    results = {}
    for kind in LOADED:
        policy = OnnxPolicy(folder / kind)
        obs = observation(KINDS[kind][0], np.random.default_rng(0))
        times = []
        for _ in range(300):
            began = time.perf_counter()
            policy.act(obs)
            times.append(time.perf_counter() - began)
        results[kind] = statistics.median(times) * 1e3
    return results


def load(folder: Path, options: argparse.Namespace) -> Any:
    """64 clients beside their echo."""
    with served([folder / kind for kind in LOADED], options.python) as server:
        return beside_echo(server, 64, options.rounds, options.seconds)


def alone(folder: Path, options: argparse.Namespace) -> Any:
    """One client beside its echo, and what the policy takes by itself."""
    own = own_milliseconds(folder)
    with served([folder / kind for kind in LOADED], options.python) as server:
        result = beside_echo(server, 1, options.rounds, options.seconds)
    for name, row in result.items():
        most = row["echo"]["p50"] + 2 * own[name.split()[1]] + 0.5
        row["own"], row["most"] = own[name.split()[1]], most
        print(f"{name}: p50 {row['policy']['p50']:.2f} ms, may be {most:.2f}")
    return result


def parity(folder: Path, options: argparse.Namespace) -> Any:
    """The served actions beside the policy's own, by both protocols."""
    import tritonclient.grpc
    import tritonclient.http

    results = {}
    with served([folder / kind for kind in KINDS], options.python) as server:
        for protocol, module in (("http", tritonclient.http), ("grpc", tritonclient.grpc)):
            client = module.InferenceServerClient(f"127.0.0.1:{server.ports[protocol]}")
            for kind in KINDS:
                ask = asking(client, module, kind)
                results[f"{protocol} {kind}"] = difference(kind, ask, options.requests)
                print(f"{protocol} {kind}: {results[f'{protocol} {kind}']:.1e}", flush=True)
            client.close()
    return results


Ask = Callable[[dict[str, np.ndarray], int], Any]


def asking(client: Any, module: Any, kind: str) -> Ask:
    def ask(arrays: dict[str, np.ndarray], step: int) -> Any:
        inputs = []
        for name, array in arrays.items():
            tensor = module.InferInput(name, array.shape, DATATYPES[str(array.dtype)])
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        memory = {"sequence_id": 5, "sequence_start": step == 0} if "lstm" in kind else {}
        return client.infer(kind, inputs, **memory)

    return ask


def difference(kind: str, ask: Ask, requests: int) -> float:
    """Returns the largest difference between served actions and the policy's own."""
    policy, rng, largest = policy_of(kind), np.random.default_rng(2), 0.0
    state = [x[None] for x in policy.get_initial_state()]
    for step in range(requests):
        obs = observation(policy.observation_space, rng)
        acted = policy.compute_actions(obs, state, explore=False)
        state = acted.state_outs
        answer = ask(named(obs), step)
        parts = acted.actions if isinstance(acted.actions, tuple) else (acted.actions,)
        for number, part in enumerate(parts):
            name = "actions_normalized" + (f"_{number}" if len(parts) > 1 else "")
            largest = max(largest, float(np.abs(answer.as_numpy(name) - part).max()))
    return largest


def swaps(folder: Path, options: argparse.Namespace) -> Any:
    """Twenty versions in the middle of load."""
    with tempfile.TemporaryDirectory() as home:
        agent = Path(home, "agent")
        shutil.copytree(folder / "mlp", agent)
        with served([agent], options.python) as server:
            work = {"model": "agent", "output": "vf_preds", "watch": True, "clients": 16}
            clients = begin_load(server, **work, **tensor_of("mlp"), seconds=80.0)
            versions = 0
            for change in range(20):
                put(folder / ("mlp" if change % 2 else "mlp-other"), agent)
                while not server.line().startswith("model agent,"):
                    pass
                versions += 1
            output, _ = clients.communicate()
            results = dict(json.loads(output))
    keys = ("answered", "failed", "versions", "mixed", "fault")
    result = {"swaps": versions, **{key: results[key] for key in keys}}
    print("swaps:", result)
    return result


def put(made: Path, folder: Path) -> None:
    """Puts the files of an export into a folder, what describes them last."""
    for name in ("model.onnx", "model_sample.onnx", "policy_spec.json"):
        shutil.copy2(made / name, folder / f".{name}")
        os.replace(folder / f".{name}", folder / name)


def malformed(folder: Path, options: argparse.Namespace) -> Any:
    """500 requests that are wrong, and good ones beside them."""
    import http.client

    with served([folder / "mlp"], options.python) as server:
        work = {"model": "mlp", "output": "actions", "clients": 8, **tensor_of("mlp")}
        quiet = loaded(server, **work, seconds=options.seconds)
        clients = begin_load(server, **work, seconds=options.seconds)
        statuses: dict[int, int] = {}
        unnamed = 0
        connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=60)
        rng = np.random.default_rng(0)
        began = time.perf_counter()
        for number in range(500):
            body: bytes = MALFORMED[number % len(MALFORMED)]
            model = "nobody" if number % 17 == 0 else "mlp"
            headers = {}
            if number % 5 == 0:  # bytes that mean nothing, cut anywhere
                body = rng.bytes(int(rng.integers(1, 300)))
                headers = {"Inference-Header-Content-Length": str(int(rng.integers(0, 400)))}
            connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            answer = connection.getresponse()
            text = json.loads(answer.read())
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            unnamed += len(text.get("error", "")) < 20
            pause = began + options.seconds * number / 500 - time.perf_counter()
            time.sleep(max(0.0, pause))
        connection.close()
        output, _ = clients.communicate()
        beside = dict(json.loads(output))
    results = {"statuses": statuses, "unnamed": unnamed, "failed": beside["failed"]}
    results |= {"p99_quiet": quiet["p99"], "p99_beside": beside["p99"]}
    print("malformed:", results)
    return results


def soak(folder: Path, options: argparse.Namespace) -> Any:
    """Load for minutes: memory, and requests that were lost."""
    with served([folder / kind for kind in LOADED], options.python) as server:
        memory, answered, failed = [], 0, 0
        until = time.monotonic() + 60 * options.minutes
        while time.monotonic() < until:
            for kind in LOADED:
                work = {"model": kind, "output": "actions", "clients": 8, **tensor_of(kind)}
                for protocol in ("http", "grpc"):
                    actual = loaded(server, **work, protocol=protocol, seconds=3.0)
                    answered, failed = answered + actual["answered"], failed + actual["failed"]
            memory.append(round(server.megabytes, 1))
    result = {"answered": answered, "failed": failed, "megabytes": memory}
    result["growth"] = round(memory[-1] - memory[0], 1)
    print("soak:", result)
    return result


class OnRay:
    """A replica on Ray Serve, on this computer."""

    def __init__(self, folder: Path) -> None:
        import ray
        from ray import serve

        from tfpolicies.serving import deployment

        self.ports, self.cpu = {"http": _free_port()}, 0.0
        ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
        serve.start(http_options={"host": "127.0.0.1", "port": self.ports["http"]})
        serve.run(deployment(folder, name="mlp", ray_actor_options={"num_cpus": 0.1}))

    def end(self) -> int:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        return 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as result:
        return int(result.getsockname()[1])


def on_ray(folder: Path, options: argparse.Namespace) -> Any:
    """The same policy beside a replica of it on Ray Serve, in turns."""
    rays = OnRay(folder / "mlp")
    work = {"model": "mlp", "output": "actions", "seconds": options.seconds, **tensor_of("mlp")}
    try:
        with served([folder / "mlp"], options.python) as server:
            pairs = [(loaded(rays, **work), loaded(server, **work)) for _ in range(options.rounds)]
    finally:
        rays.end()
    results = {
        name: {
            key: statistics.median(pair[i][key] for pair in pairs) for key in ("per_second", "p99")
        }
        for i, name in enumerate(("ray", "ours"))
    }
    print("ray:", results)
    return results


PARTS: dict[str, Callable[[Path, argparse.Namespace], Any]] = {
    "parity": parity,
    "load": load,
    "alone": alone,
    "swaps": swaps,
    "malformed": malformed,
    "soak": soak,
    "ray": on_ray,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=10.0, help="of the soak")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round of load")
    parser.add_argument("--rounds", type=int, default=5, help="of policy and echo in turns")
    parser.add_argument("--requests", type=int, default=1000, help="of each kind, for parity")
    parser.add_argument(
        "--python", default=sys.executable, help="of an environment with the package, to serve in"
    )
    parser.add_argument("--exports", type=Path, help="a folder to keep the exports in")
    parser.add_argument("--out", type=Path, default=RESULTS / "serving.json")
    options = parser.parse_args()
    parts = options.only.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.exports or Path(temporary)
        for kind in [*(KINDS if "parity" in parts else LOADED), "mlp-other"]:
            if not (folder / kind).exists():
                policy = policy_of(kind.removesuffix("-other"), 1 + kind.endswith("-other"))
                policy.export_model(folder / kind, onnx=True)
        results = {part: PARTS[part](folder, options) for part in parts}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    options.out.write_text(json.dumps({**before, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
