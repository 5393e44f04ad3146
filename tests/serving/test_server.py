"""A server in a separate process, and clients of tritonclient."""

import json
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tritonclient import grpc

from helpers.serving import MATRIX, Server, export, inputs_of, place, policy_of
from helpers.serving_clients import (
    BODY,
    CLIENTS,
    GOOD,
    INFER,
    ask,
    compute_outputs,
    connect,
    get,
    make_body,
    make_client,
    post,
)
from tfpolicies.cli import main, serve

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("kept_programs")]


@pytest.fixture(scope="module")
def policies():
    return {kind: policy_of(kind) for kind in MATRIX}


@pytest.fixture(scope="module")
def server(tmp_path_factory, policies):
    home = tmp_path_factory.mktemp("exports")
    folders = [str(export(policy, home / kind)) for kind, policy in policies.items()]
    with Server(*folders, "--max-sequences", "4", "--max-body", "200000", "--control") as running:
        yield running
        assert running.end() == 0


@pytest.fixture(params=["http", "grpc"])
def client(request, server):
    with make_client(server, request.param) as result:
        yield result


@pytest.mark.parametrize("kind", ["mlp", "mixed", "masked", "image"])
def test_a_served_policy_acts_as_the_policy_does(client, policies, kind):
    arrays = inputs_of(policies[kind], 5)

    result, _ = ask(client, kind, arrays)

    for name, array in compute_outputs(policies[kind], arrays).items():
        np.testing.assert_allclose(result[name], array, rtol=0, atol=1e-5, err_msg=name)


def test_a_policy_with_a_memory_remembers_a_sequence(client, policies):
    policy = policies["memory"]
    state, action, reward = [x[None] for x in policy.get_initial_state()], 0, 0.0
    for step in range(5):
        obs = inputs_of(policy, 1, seed=step)["obs"]
        rewards = np.array([reward], np.float32)
        acted = policy.compute_actions(
            obs, state, prev_action_batch=[action], prev_reward_batch=rewards, explore=False
        )
        flags = {"sequence_start": step == 0, "sequence_end": step == 4}

        actual, _ = ask(client, "memory", {"obs": obs, "rewards": rewards}, sequence_id=7, **flags)

        np.testing.assert_array_equal(actual["actions"], acted.actions)
        expected = acted.extras["action_dist_inputs"]
        np.testing.assert_allclose(actual["action_dist_inputs"], expected, rtol=0, atol=1e-5)
        assert not any(name.startswith("state_out") for name in actual)
        state, action, reward = acted.state_outs, int(acted.actions[0]), step + 0.5
    with pytest.raises(Exception, match=r"no sequence 7.*sequence_start"):
        ask(client, "memory", inputs_of(policy, 1), sequence_id=7)


def test_whole_sequences_need_no_sequence_id(client, policies):
    policy = policies["memory"]
    obs = inputs_of(policy, 6)["obs"].reshape(2, 3, 3)
    inputs = {f"state_in_{i}": np.zeros((2, 4), np.float32) for i in range(2)}
    inputs |= {"obs": obs, "seq_lens": np.full(2, 3, np.int32)}
    inputs["prev_actions"] = np.ones((2, 3), np.int64)
    inputs["prev_rewards"] = np.ones((2, 3), np.float32)

    result, _ = ask(client, "memory", inputs)

    state, before = [np.zeros((2, 4), np.float32)] * 2, {"prev_action_batch": [1, 1]}
    before["prev_reward_batch"] = np.ones(2, np.float32)
    for step in range(3):
        acted = policy.compute_actions(obs[:, step], state, **before, explore=False)
        np.testing.assert_array_equal(result["actions"][:, step], acted.actions)
        state = acted.state_outs
    np.testing.assert_allclose(result["state_out_0"], state[0], rtol=0, atol=1e-5)
    with pytest.raises(Exception, match=r"reads earlier steps: give the parameter sequence_id"):
        ask(client, "memory", {"obs": obs[:, 0]})
    with pytest.raises(Exception, match=r"'seq_lens' must be from 1 to 3"):
        ask(client, "memory", {**inputs, "seq_lens": np.full(2, 4, np.int32)})


def test_a_seed_gives_the_same_actions_however_requests_are_batched(client, server, policies):
    arrays = inputs_of(policies["mixed"], 2)
    alone, _ = ask(client, "mixed", arrays, parameters={"seed": 3})

    def draw(seed):
        with make_client(server, client.kind) as other:
            return ask(other, "mixed", arrays, parameters={"seed": seed})[0]["actions_1"]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(draw, [3, 4] * 8))

    for actions in results[::2]:
        np.testing.assert_allclose(actions, alone["actions_1"], rtol=0, atol=1e-6)
    assert np.abs(results[1] - results[0]).max() > 1e-3
    drawn = [ask(client, "mixed", arrays, parameters={"explore": True})[0] for _ in range(2)]
    assert np.abs(drawn[0]["actions_1"] - drawn[1]["actions_1"]).max() > 1e-3


def test_metadata_is_what_the_spec_says(client, server):
    result = client.get_model_metadata("memory")
    config = client.get_model_config("memory")
    if client.kind == "grpc":
        shapes = {x.name: (x.datatype, [*x.shape]) for x in result.inputs}
        assert config.config.sequence_batching.oldest.max_candidate_sequences == 4
        assert [[*x.dims] for x in config.config.input] == [[3], []]
    else:
        shapes = {x["name"]: (x["datatype"], x["shape"]) for x in result["inputs"]}
        assert config["sequence_batching"]["oldest"] == {"max_candidate_sequences": 4}
        assert config["input"][0] == {"name": "obs", "data_type": "TYPE_FP32", "dims": [3]}
        assert config["input"][1]["optional"] is True
    assert shapes["obs"] == ("FP32", [-1, -1, 3])
    assert shapes["state_in_0"] == ("FP32", [-1, 4])
    assert shapes["seq_lens"] == ("INT32", [-1])
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("memory")
    assert "sequence" in json.dumps(json.loads(get(server, "/v2"))["extensions"])


def test_models_are_listed_unloaded_and_loaded(client):
    client.unload_model("masked")
    index = client.get_model_repository_index()
    if client.kind == "http":
        states = {x["name"]: x["state"] for x in index}
    else:
        states = {x.name: x.state for x in index.models}
    assert states.pop("masked") == "UNAVAILABLE"
    assert set(states.values()) == {"READY"}
    assert not client.is_model_ready("masked")

    client.load_model("masked")

    assert client.is_model_ready("masked")
    with pytest.raises(Exception, match=r"no model 'maksed'. Did you mean 'masked'"):
        client.load_model("maksed")


BAD = {
    "not JSON": (b"{", "not JSON"),
    "a list": ([], "must be a JSON object, got list"),
    "no inputs": ({}, "'obs' is missing.*obs FP32 .-1, 3."),
    "inputs is no list": ({"inputs": 3}, "'inputs' must be a JSON list"),
    "an input that is no object": ({"inputs": [1]}, "An input must be a JSON object"),
    "another name": (make_body(name="ob"), "no input 'ob'. Did you mean 'obs'"),
    "no name": (make_body(name=None), "must have a name"),
    "twice": ({"inputs": GOOD["inputs"] * 2}, "'obs' is given twice"),
    "rank": (make_body(shape=[3]), r"must be FP32 \[-1, 3\], got FP32 \[3\]"),
    "shape": (make_body(shape=[1, 2], data=[1, 2]), r"got FP32 \[1, 2\]"),
    "no rows": (make_body(shape=[0, 3], data=[]), r"got FP32 \[0, 3\]"),
    "a negative shape": (make_body(shape=[-1, 3]), "at most 32 sizes, got"),
    "a shape of text": (make_body(shape="13"), "at most 32 sizes, got '13'"),
    "a huge shape": (make_body(shape=[2**31, 3]), "at most 32 sizes"),
    "too few": (make_body(data=[1, 2]), r"3 values.*got 2"),
    "nested otherwise": (make_body(data=[[1], [2], [3]]), r"in the shape \[3, 1\]"),
    "ragged": (make_body(data=[[1], [2, 3]]), "lists of different lengths"),
    "text": (make_body(data=["a", 2, 3]), "must have values of FP32, got"),
    "null": (make_body(data=[None, 2, 3]), "must have values of FP32, got"),
    "no data": ({"inputs": [{"name": "obs", "shape": [1, 3], "datatype": "FP32"}]}, "no data"),
    "datatype": (make_body(datatype="FP64"), "must be FP32.*got FP64"),
    "an unknown datatype": (make_body(datatype="float"), "datatype 'float'. Use one of"),
    "infinite": (make_body(data=[1e300, 2, 3]), r"finite numbers, got inf at \[0, 0\]"),
    "an output": ({**GOOD, "outputs": [{"name": "x"}]}, "no output 'x'.*actions"),
    "a parameter": ({**GOOD, "parameters": {"sed": 1}}, "Did you mean 'seed'"),
    "seed": ({**GOOD, "parameters": {"seed": "a"}}, "seed must be of int, got 'a'"),
    "explore": ({**GOOD, "parameters": {"explore": 1}}, "explore must be of bool"),
    "no id": ({**GOOD, "parameters": {"sequence_end": True}}, "need a sequence_id"),
    "id": ({**GOOD, "id": 3}, "'id' must be a string"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused_by_name(server, fault):
    body, message = BAD[fault]
    status, error = post(server, INFER, body)
    assert status == 400
    assert re.search(message, error)


def test_what_no_action_can_be_chosen_for_is_refused_by_input_rule_and_row(client, policies):
    arrays = inputs_of(policies["masked"], 2)
    arrays["action_mask"][1] = 0
    with pytest.raises(Exception, match="'action_mask' must allow an action, but row 1 is") as one:
        ask(client, "masked", arrays)
    arrays = inputs_of(policies["mixed"], 2)
    arrays["obs_near"][1] = 5
    with pytest.raises(Exception, match=r"'obs_near' must be from 0 to 4, got 5 at \[1\]") as two:
        ask(client, "mixed", arrays)
    for refusal in (one, two):
        assert refusal.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


@pytest.mark.parametrize("kind", ["mlp", "masked", "image"])
def test_who_asks_for_actions_alone_gets_the_same_ones(client, policies, kind):
    arrays = inputs_of(policies[kind], 5)
    name = "actions_normalized"

    everything, _ = ask(client, kind, arrays)
    drawn, _ = ask(client, kind, arrays, parameters={"seed": 3})

    for parameters, expected in [({}, everything), ({"seed": 3}, drawn)]:
        requested = [CLIENTS[client.kind].InferRequestedOutput(name)]
        actual, _ = ask(client, kind, arrays, outputs=requested, parameters=parameters)
        assert [*actual] == [name]
        np.testing.assert_array_equal(actual[name], expected[name])


def test_a_client_that_hangs_up_in_the_middle_harms_nobody(server):
    for _ in range(3):
        with connect(server) as connection:
            head = b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\n"
            connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
    assert post(server, INFER, GOOD)[0] == 200
    assert 'protocol="http",status="500"' not in get(server, "/metrics").decode()


def test_bytes_that_do_not_fit_are_refused_by_name(server):
    def binary(size, raw, length=None):
        head = {"inputs": [{"name": "obs", "shape": [1, 3], "datatype": "FP32"}]}
        head["inputs"][0]["parameters"] = {"binary_data_size": size}
        text = json.dumps(head).encode()
        headers = {"Inference-Header-Content-Length": str(len(text) if length is None else length)}
        return post(server, INFER, text + raw, **headers)

    assert binary(12, bytes(12))[0] == 200
    nan = np.array([0, np.nan, 0], np.float32).tobytes()
    for answer, message in [
        (binary(12, bytes(8)), "from 0 to 8, .* got 12"),
        (binary(8, bytes(8)), "must have 12 bytes"),
        (binary("12", bytes(12)), "from 0 to 12, .* got '12'"),
        (binary(12, bytes(13)), "1 bytes after the JSON belong to no input"),
        (binary(12, bytes(12), "x"), "must be the length of the JSON.*'x'"),
        (binary(12, bytes(12), 10**9), "must be the length of the JSON"),
        (binary(12, bytes(12), "1" * 5000), "must be the length of the JSON"),
        (binary(12, nan), r"finite numbers, got nan at \[0, 1\]"),
    ]:
        assert answer[0] == 400
        assert re.search(message, answer[1])


def test_what_is_not_there_and_what_is_too_large_is_told_from_what_is_wrong(server):
    good = GOOD
    assert post(server, "/v2/models/nobody/infer", good)[0] == 404
    assert post(server, "/v2/models/mlp/versions/9/infer", good)[0] == 404
    assert post(server, "/v2/nothing", good)[0] == 404
    assert post(server, "/v2", good)[0] == 405
    with pytest.raises(urllib.error.HTTPError, match="405"):
        get(server, INFER)
    assert post(server, "/v2/models/mlp/infer/", good)[0] == 200
    status, error = post(server, INFER, good, **{"Content-Encoding": "gzip"})
    assert (status, "compressed" in error) == (415, True)
    status, error = post(server, INFER, bytes(200_001))
    assert (status, "200000" in error) == (413, True)
    with make_client(server, "grpc") as client:
        for model, fault in [("nobody", "NOT_FOUND.*no model"), ("mlp", "INVALID_ARG.*FP32")]:
            with pytest.raises(grpc.InferenceServerException, match=fault):
                ask(client, model, {"obs": np.zeros((1, 2), np.float32)})
        big = {"obs": np.zeros((20_000, 3), np.float32)}
        with pytest.raises(grpc.InferenceServerException, match="larger than max"):
            ask(client, "mlp", big)


def test_no_more_sequences_are_remembered_than_may_be(client, policies):
    arrays = inputs_of(policies["memory"], 1)
    for number in range(1, 5):
        ask(client, "memory", arrays, sequence_id=f"s{number}", sequence_start=True)

    with pytest.raises(Exception, match=r"keeps at most 4 rows of sequences.*sequence_end"):
        ask(client, "memory", arrays, sequence_id="s5", sequence_start=True)

    for number in range(1, 5):
        ask(client, "memory", arrays, sequence_id=f"s{number}", sequence_end=True)


def test_the_process_that_serves_has_no_tensorflow(server):
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "onnxruntime" in maps
    assert "tensorflow" not in maps
    assert "keras" not in maps


def test_it_says_what_it_serves_and_counts_what_it_answers(server, policies):
    assert any(line.startswith("model mlp, version ") for line in server.lines)
    assert server.http.startswith("127.0.0.1:")
    post(server, INFER, GOOD)
    text = get(server, "/metrics").decode()
    assert 'tfpolicies_requests_total{model="mlp",protocol="http",status="200"}' in text
    assert 'tfpolicies_batch_rows_count{model="mlp"}' in text


def test_a_new_version_is_taken_up_and_a_broken_one_is_not(tmp_path):
    folder = export(policy_of("mlp", seed=1), tmp_path / "cart")
    with Server(f"mine={folder}") as server, make_client(server) as client:
        arrays = inputs_of(policy_of("mlp"), 3)
        before, first = ask(client, "mine", arrays)

        so_far = len(server.lines)
        export(policy_of("mlp", seed=2), folder)
        server.line("model mine, version ", so_far)
        after, second = ask(client, "mine", arrays)
        assert second != first
        assert np.abs(after["vf_preds"] - before["vf_preds"]).max() > 1e-3

        content = (folder / "model.onnx").read_bytes()
        (folder / "model.onnx").write_bytes(content[:-9] + b"123456789")
        result = server.line("mine: refused a new version", so_far)
        assert f"{second} stays active" in result
        assert ask(client, "mine", arrays)[1] == second
        assert server.end(signal.SIGINT) == 0


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    home = tmp_path_factory.mktemp("versions")
    return [export(policy_of("mlp", seed), home / str(seed)) for seed in (1, 2)]


def test_versions_change_under_load_and_no_request_is_lost_or_mixed(versions, tmp_path):
    folder = tmp_path / "agent"
    place(versions[0], folder)
    obs = {"obs": np.ones((1, 3), np.float32)}
    with Server(str(folder)) as server:
        is_over = threading.Event()

        def ask_until_over(kind):
            results = []
            with make_client(server, kind) as client:
                while not is_over.is_set():
                    outputs, version = ask(client, "agent", obs)
                    results.append((version, float(outputs["vf_preds"][0])))
            return results

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(ask_until_over, kind) for kind in ("http", "grpc") * 2]
            for change in range(4):
                so_far = len(server.lines)
                place(versions[(change + 1) % 2], folder)
                server.line("model agent, version ", so_far)
            is_over.set()
            answers = [answer for client in clients for answer in client.result()]
        assert server.end() == 0

    values = {version: {v for name, v in answers if name == version} for version, _ in answers}
    assert len(values) == 2
    spread = [max(results) - min(results) for results in values.values()]
    assert max(spread) <= 1e-5  # a version answers as itself, whatever comes and goes
    first, second = (min(results) for results in values.values())
    assert abs(first - second) > 1e-3


def test_a_server_that_ends_finishes_what_runs(versions):
    with Server(f"agent={versions[0]}") as server:
        head = "POST /v2/models/agent/infer HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Length: {len(BODY)}\r\n\r\n"
        with connect(server) as connection:
            connection.sendall(head.encode() + BODY[:9])
            get(server, "/v2")  # what came before has been read
            server.process.send_signal(signal.SIGTERM)
            while accepts_connections(server):
                time.sleep(0.02)
            connection.sendall(BODY[9:])
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert server.process.wait(60) == 0


def accepts_connections(server):
    try:
        connect(server).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_checkpoint_is_exported_first(tmp_path):
    policy = policy_of("mlp")
    policy.export_checkpoint(str(tmp_path / "trained"))
    with Server(f"mine={tmp_path / 'trained'}") as server, make_client(server) as client:
        assert server.lines[0].startswith("exporting ")
        arrays = inputs_of(policy, 3)
        actual, _ = ask(client, "mine", arrays)
        expected = compute_outputs(policy, arrays)["vf_preds"]
        np.testing.assert_allclose(actual["vf_preds"], expected, rtol=0, atol=1e-5)
        assert "tensorflow" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        assert server.end() == 0


@pytest.mark.parametrize(
    ("place", "message", "named"),
    [
        ("1", {"artefact": "saved_model"}, "a SavedModel"),
        (".", {"artefact": "litert"}, "a LiteRT file"),
        ("1", {"artefact": "onnx", "layout": "triton"}, "an export for triton"),
        ("models/cart/1", {"artefact": "onnx", "layout": "triton"}, "an export for triton"),
    ],
    ids=["saved_model", "litert", "triton", "kserve"],
)
def test_exports_that_are_not_served_are_named_with_the_command(
    tmp_path, capsys, place, message, named
):
    folder = tmp_path / "exported" / place
    folder.mkdir(parents=True)
    (folder / "policy_spec.json").write_text(json.dumps(message))
    assert main(["serve", str(tmp_path / "exported")]) == 2
    shown = capsys.readouterr().err
    assert f"{named}, but serve takes ONNX" in shown
    assert "`tfpolicies export RUN --to DIR --onnx`" in shown


def test_an_onnx_export_beside_a_saved_model_is_served(tmp_path):
    folder = tmp_path / "both"
    policy_of("mlp").export_model(folder)
    policy_of("mlp").export_model(folder, onnx=True)
    assert serve._find_or_make_export(folder, tmp_path / "own") == folder
    assert serve._find_or_make_export(folder / "model.onnx", tmp_path / "own") == folder


def test_a_folder_of_exports_is_answered_with_the_command_that_serves_them(tmp_path, capsys):
    for name in ("cat", "mouse"):
        (tmp_path / name / "onnx").mkdir(parents=True)
        (tmp_path / name / "onnx" / "policy_spec.json").write_text("{}")
    assert main(["serve", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert f"`tfpolicies serve {tmp_path / 'cat'} {tmp_path / 'mouse'}`" in shown
    for name in ("dog", "bird"):
        (tmp_path / "plain" / name / "1").mkdir(parents=True)
        (tmp_path / "plain" / name / "1" / "policy_spec.json").write_text('{"artefact": "onnx"}')
    assert main(["serve", str(tmp_path / "plain")]) == 2
    within = [tmp_path / "plain" / name for name in ("bird", "dog")]
    assert f"`tfpolicies serve {within[0]} {within[1]}`" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["serve", str(tmp_path / "empty")]) == 2
    shown = capsys.readouterr().err
    assert "is not an ONNX export, and cannot be exported: Checkpoint" in shown
    assert shown.count("tfpolicies: error:") == 1


@pytest.mark.parametrize(
    "part", ["", "onnx", "onnx/model.onnx", "7", "7/onnx", "7/model.onnx"], ids=str
)
def test_a_model_has_the_name_of_its_folder_but_not_of_onnx_or_a_number(tmp_path, part):
    path = tmp_path / "exp" / part
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("") if path.suffix else path.mkdir(exist_ok=True)
    assert serve._get_default_name(path) == "exp"


def test_a_version_that_is_pinned_is_the_one_that_answers(versions, tmp_path):
    for number, version in zip(("9", "10"), versions, strict=True):
        place(version, tmp_path / "agent" / number)
    with Server(str(tmp_path / "agent"), "--pin", "9") as server:
        server.line("model agent, version 9, from ")
        status, answer = post(server, "/v2/models/agent/infer", GOOD)
        assert (status, json.loads(answer)["model_version"]) == (200, "9")
        assert server.end() == 0


def test_names_and_ports_are_refused_before_anything_is_exported(versions, capsys):
    assert main(["serve", f"a={versions[0]}", f"a={versions[1]}"]) == 2
    assert "a=FOLDER is given 2 times" in capsys.readouterr().err
    assert main(["serve", str(versions[0]), "--port", "70000"]) == 2
    assert "--port: must be from 0 to 65535, got 70000" in capsys.readouterr().err


def test_what_a_killed_server_exported_goes_when_another_one_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = tmp_path / "tfpolicies-serve-killed"
    (killed / "0" / "onnx").mkdir(parents=True)
    with serve._make_temp_folder() as first:
        assert not killed.exists()
        with serve._make_temp_folder() as second:
            assert first.exists()
            assert second != first
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_served_ends_with_status_2(versions, tmp_path, capsys):
    assert main(["serve", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["serve", f"agent={versions[0]}", "--port", port, "--grpc-port", "0"]) == 2
    assert f"cannot listen at 127.0.0.1:{port}" in capsys.readouterr().err
