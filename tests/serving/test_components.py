"""Batches, sequences and versions of a server, in this process."""

import asyncio
import contextlib
import json
import re
import shutil
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from gymnasium import spaces
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from helpers.factories import make
from helpers.serving import MASKED, export, inputs_of, place, policy_of
from helpers.serving_clients import in_loop
from tfpolicies.cli import serve
from tfpolicies.errors import ExportError, RequestError, UsageError
from tfpolicies.serving import rest
from tfpolicies.serving.access import AccessRules
from tfpolicies.serving.batching import BatchCost, Batcher
from tfpolicies.serving.grpc_service import GrpcHandler
from tfpolicies.serving.infer_requests import InferOptions, InferRequest
from tfpolicies.serving.model_version import ModelVersion
from tfpolicies.serving.repository import ModelRepository, make_unique_names
from tfpolicies.serving.sequence_state import SequenceStates
from tfpolicies.serving.sequence_store import SequenceStore
from tfpolicies.serving.served_model import ServedModel, ServingLimits
from tfpolicies.serving.tensor_checks import decode_bytes, decode_values
from tools.endless_model import with_endless_loop

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("kept_programs")]


QUICK, SLOW = BatchCost(call=0.0, row=0.0), BatchCost(call=0.0, row=1.0)


COSTS = pytest.mark.parametrize("cost", [QUICK, SLOW], ids=["in the loop", "in a thread"])


def double(feed):
    if (feed["x"] < 0).any():
        raise FloatingPointError("less than nothing")
    return {"y": 2 * feed["x"]}


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as result:
        yield result


@COSTS
@in_loop
async def test_requests_that_wait_together_run_together(cost, pool):
    batches = []
    batcher = Batcher(double, pool, cost, 4, batches.append)
    feeds = [{"x": np.full((1 + i % 2, 2), i)} for i in range(6)]

    result = await asyncio.gather(*map(batcher.run, feeds))

    assert batches == [4, 3, 2]  # of 1, 2, 1, 2, 1, 2 rows, four at most
    for i, outputs in enumerate(result):
        np.testing.assert_array_equal(outputs["y"], np.full((1 + i % 2, 2), 2 * i))


@in_loop
async def test_arrays_of_other_shapes_run_apart_and_a_larger_request_alone(pool):
    batches = []
    batcher = Batcher(double, pool, QUICK, 4, batches.append)
    shapes = [(1, 2), (1, 2), (1, 3), (1, 3), (9, 3)]
    await asyncio.gather(*(batcher.run({"x": np.zeros(shape)}) for shape in shapes))
    assert batches == [2, 2, 9]


@in_loop
async def test_requests_that_come_soon_after_each_other_run_together(pool):
    batches, answers = [], []
    batcher = Batcher(double, pool, QUICK, 8, batches.append)
    for _ in range(3):
        answers.append(batcher.run({"x": np.zeros((1, 1))}))
        await asyncio.sleep(0)  # a turn of the loop
    await asyncio.gather(*answers)
    await batcher.run({"x": np.zeros((2, 1))})
    assert batches == [3, 2]


@in_loop
async def test_a_request_that_came_while_a_batch_ran_runs_before_its_callers_continue(pool):
    order, may_end = [], threading.Event()

    def wait(feed):
        may_end.wait(60)
        return {"y": feed["x"]}

    batcher = Batcher(wait, pool, SLOW, 8, lambda rows: order.append(f"{rows} rows begin"))

    async def call(rows):
        await batcher.run({"x": np.zeros((rows, 1))})
        order.append(f"{rows} rows end")

    first = asyncio.create_task(call(1))
    while not order:
        await asyncio.sleep(0.001)
    second = asyncio.create_task(call(2))
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(first, second)
    assert order == ["1 rows begin", "2 rows begin", "1 rows end", "2 rows end"]


def test_the_cost_of_a_batch_is_that_of_a_call_and_of_its_rows():
    cost = BatchCost.measure(lambda rows: 0.0004 + 0.00002 * rows)
    assert cost.estimate_seconds(64) == pytest.approx(0.0004 + 0.00002 * 64)

    tried = []
    slow = BatchCost.measure(lambda rows: (tried.append(rows), 0.002 * rows)[1])
    assert slow.estimate_seconds(10) == pytest.approx(0.02)
    assert max(tried) == 2  # it does not wait for 16 rows of a large network


@COSTS
@in_loop
async def test_a_request_that_fails_harms_no_other(cost, pool):
    batcher = Batcher(double, pool, cost, 8)
    feeds = [{"x": np.full((1, 1), x)} for x in (1, -1, 3)]
    first, fault, third = await asyncio.gather(*map(batcher.run, feeds), return_exceptions=True)
    assert (first["y"].item(), third["y"].item()) == (2, 6)
    assert isinstance(fault, FloatingPointError)


@in_loop
async def test_a_request_that_was_cancelled_does_not_run(pool):
    batches = []
    batcher = Batcher(double, pool, QUICK, 8, batches.append)
    cancelled, waiting = (batcher.run({"x": np.full((1, 1), x)}) for x in (1, 2))
    cancelled.cancel()
    assert (await waiting)["y"].item() == 4
    alone = batcher.run({"x": np.zeros((1, 1))})
    alone.cancel()
    await asyncio.sleep(0.05)
    assert (await batcher.run({"x": np.full((3, 1), 4)}))["y"].shape == (3, 1)
    assert batches == [1, 3]


@in_loop
async def test_callers_learn_that_the_threads_have_ended(pool):
    batcher = Batcher(double, pool, SLOW, 8)
    pool.shutdown()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shutdown"):
            await batcher.run({"x": np.zeros((1, 1))})


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    home = tmp_path_factory.mktemp("exports")
    for seed in (1, 2):
        export(policy_of("memory", seed), home / f"memory-{seed}")
    return home


@pytest.fixture
def folder(exports, tmp_path):
    place(exports / "memory-1", tmp_path / "agent")
    return tmp_path / "agent"


def get_steps(count):
    """Returns observations of a sequence, and the inputs of the distribution that answer them."""
    policy = policy_of("memory")
    state, action, result = [x[None] for x in policy.get_initial_state()], 0, []
    for step in range(count):
        obs = inputs_of(policy, 1, seed=step)
        acted = policy.compute_actions(
            obs["obs"], state, prev_action_batch=[action], prev_reward_batch=[0.0], explore=False
        )
        state, action = acted.state_outs, int(acted.actions[0])
        result.append((obs, acted.extras["action_dist_inputs"]))
    return result


def make_step(obs, sequence=1, *, starts=False, ends=False, **options):
    flags = InferOptions(sequence=sequence, starts_sequence=starts, ends_sequence=ends)
    return InferRequest(obs, flags, **options)


async def load(folder, said=None, **options):
    """Returns a repository whose model `agent` is in a folder; its log goes to `said`."""
    log = (said if said is not None else []).append
    repository = ModelRepository({"agent": folder}, log=log, **options)
    await repository.load()
    return repository


async def update(repository, times=3):
    """Lets a repository look for new versions, as it does every second."""
    for _ in range(times):
        await repository["agent"].update_version()


def count_sequences(repository):
    match = re.search(r'sequences{model="agent"} (\S+)', repository.metrics.to_text().decode())
    return float(match[1])


def assert_answers(answer, expected):
    np.testing.assert_allclose(answer.outputs["action_dist_inputs"], expected, rtol=0, atol=1e-5)


@in_loop
async def test_steps_that_come_at_once_are_taken_in_their_order(folder):
    steps = get_steps(6)
    repository = await load(folder)
    infer = repository["agent"].infer
    requests = [
        make_step(obs, name, starts=i == 0, ends=i == 5, outputs=["action_dist_inputs"])
        for i, (obs, _) in enumerate(steps)
        for name in ("left", "right")
    ]

    answers = await asyncio.gather(*map(infer, requests))

    for i, answer in enumerate(answers):
        assert_answers(answer, steps[i // 2][1])
    text = repository.metrics.to_text().decode()
    assert 'tfpolicies_batch_rows_count{model="agent"} 6.0' in text  # two sequences in each batch
    assert count_sequences(repository) == 0


class Counting:
    """Stands for a policy that remembers how many steps each row has taken."""

    observation_ports = ({"name": "obs"},)

    def __init__(self):
        self.may_go_on, self.is_running = threading.Event(), threading.Event()
        self.may_go_on.set()

    def make_initial_carry(self, rows):
        return {"count": np.zeros((rows, 1))}

    def run(self, leaves, noise, carried):
        self.is_running.set()
        self.may_go_on.wait(60)
        return {"actions": carried["count"] + leaves[0], "state_out_0": carried["count"] + 1}

    def update_carry(self, outputs, leaves, carried):
        return {"count": outputs["state_out_0"]}


def test_each_row_has_a_memory_of_its_own_that_begins_with_nothing():
    policy = Counting()
    memory = SequenceStates(policy)

    def step(slots):
        obs = 10.0 * np.arange(len(slots))[:, None]
        outputs = memory.step(policy, {"obs": obs, "slots": slots})
        assert outputs.keys() == {"actions"}
        return (outputs["actions"] - obs)[:, 0].tolist()

    first, pair = memory.allocate(1), memory.allocate(2)
    assert [step(first), step(first), step(pair)] == [[0], [1], [0, 0]]
    assert step(np.concatenate([pair, first])) == [1, 1, 2]
    memory.release(first)
    many = memory.allocate(200)
    assert len(memory) == 202
    assert not set(many) & set(pair)
    assert step(many) == [0] * 200
    assert step(pair) == [2, 2]
    memory.release(many)
    memory.release(pair)
    assert len(memory) == 0
    assert step(memory.allocate(3)) == [0, 0, 0]


def test_a_step_that_runs_while_the_memory_grows_is_kept():
    policy = Counting()
    memory = SequenceStates(policy)
    slots = memory.allocate(1)
    feed = {"obs": np.zeros((1, 1)), "slots": slots}
    policy.may_go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(memory.step, policy, feed)
        assert policy.is_running.wait(60)
        memory.allocate(1000)
        policy.may_go_on.set()
        assert stepping.result(60)["actions"].tolist() == [[0]]
    assert memory.step(policy, feed)["actions"].tolist() == [[1]]


@in_loop
async def test_a_step_is_taken_even_if_its_caller_goes(folder):
    (first, _), (second, _), (third, expected) = get_steps(3)
    repository = await load(folder)
    infer = repository["agent"].infer
    await infer(make_step(first, starts=True))
    stepping = asyncio.create_task(infer(make_step(second)))
    await asyncio.sleep(0)  # it waits for its batch
    stepping.cancel()
    assert_answers(await infer(make_step(third)), expected)
    ending = asyncio.create_task(infer(make_step(third, ends=True)))
    await asyncio.sleep(0)
    ending.cancel()
    for cancelled in (stepping, ending):
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert count_sequences(repository) == 0  # the last step ended it


@in_loop
async def test_a_sequence_that_restarts_during_a_step_carries_nothing_of_it(folder):
    (first, expected), (second, _) = get_steps(2)
    repository = await load(folder)
    infer = repository["agent"].infer
    await infer(make_step(first, starts=True))
    stepping = asyncio.create_task(infer(make_step(second)))
    await asyncio.sleep(0)
    assert_answers(await infer(make_step(first, starts=True, ends=True)), expected)
    await stepping
    assert count_sequences(repository) == 0


@pytest.mark.parametrize(
    ("wrong", "status"),
    [({"version": "9"}, 404), ({"outputs": ["action"]}, 400)],
    ids=["another version", "no such output"],
)
@in_loop
async def test_a_step_that_is_refused_begins_no_sequence(folder, wrong, status):
    repository = await load(folder)
    obs = inputs_of(policy_of("memory"), 1)
    with pytest.raises(RequestError) as refusal:
        await repository["agent"].infer(make_step(obs, "left", starts=True, **wrong))
    assert refusal.value.status == status
    assert count_sequences(repository) == 0


def test_masks_of_steps_that_only_fill_a_sequence_up_may_be_anything(tmp_path):
    settings = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 2}
    policy = make(obs=MASKED, actions=spaces.Discrete(3), model=settings)
    version = ModelVersion(export(policy, tmp_path / "masked"))
    values = {
        "obs": np.zeros((2, 3, 3), np.float32),
        "action_mask": np.ones((2, 3, 3), np.int64),
        "state_in_0": np.zeros((2, 2), np.float32),
        "state_in_1": np.zeros((2, 2), np.float32),
        "seq_lens": np.array([3, 1], np.int32),
    }
    values["action_mask"][1, 1:] = 0
    version.make_feed(values, InferOptions())

    values["action_mask"][0, 2] = 0
    with pytest.raises(RequestError, match=r"row 0, step 2 is \[0, 0, 0\]"):
        version.make_feed(values, InferOptions())
    step = {name: values[name][:, 2] for name in ("obs", "action_mask")}
    with pytest.raises(RequestError, match=r"row 0 is \[0, 0, 0\]"):
        version.make_step_feed(step, InferOptions())


def test_an_export_without_an_output_that_it_lists_is_refused(folder):
    path = folder / "policy_spec.json"
    spec = json.loads(path.read_text())
    for signature in spec["signatures"].values():
        signature["outputs"].append({**signature["outputs"][0], "name": "nothing"})
    path.write_text(json.dumps(spec))
    with pytest.raises(ExportError, match=r"lacks outputs that .*policy_spec\.json lists"):
        asyncio.run(ModelRepository({"agent": folder}).load())


@in_loop
async def test_a_sequence_is_forgotten_when_it_had_no_step_for_too_long(folder):
    repository = await load(folder)
    now = [0.0]
    sequences = SequenceStore(2, 10.0, lambda: now[0])
    newest = repository["agent"]._get_runner()
    obs, _ = get_steps(1)[0]
    for now[0] in (0.0, 9.0, 18.0):
        await sequences.step(1, make_step(obs, starts=now[0] == 0.0), newest)
    with pytest.raises(RequestError, match=r"'obs' is missing"):
        await sequences.step(2, make_step({}, starts=True), newest)  # begins nothing
    assert len(sequences) == 1
    two = {"obs": np.zeros((2, 3), np.float32)}
    with pytest.raises(RequestError, match="has 1 rows, as its first one had, got 2"):
        await sequences.step(1, make_step(two), newest)
    now[0] = 28.0
    with pytest.raises(RequestError, match=r"no sequence 1: .* had no step for 10 s"):
        await sequences.step(1, make_step(obs), newest)
    assert len(sequences) == 0


@in_loop
async def test_a_sequence_stays_with_the_version_that_it_began_with(folder, exports):
    said = []
    repository = await load(folder, said)
    model = repository["agent"]
    (first, before), (second, after) = get_steps(2)
    begin = await model.infer(make_step(first, starts=True))
    place(exports / "memory-2", folder)
    await update(repository, 2)
    end = await model.infer(make_step(second, ends=True))
    other = await model.infer(make_step(first, starts=True))
    assert end.version == begin.version != other.version == model.version.name
    assert_answers(begin, before)
    assert_answers(end, after)
    assert np.abs(other.outputs["action_dist_inputs"] - before).max() > 1e-3
    assert len(said) == 2


@in_loop
async def test_a_broken_version_is_refused_once_and_the_one_before_stays(folder, exports):
    said = []
    repository = await load(folder, said)
    model = repository["agent"]
    version = model.version.name
    shutil.copy2(exports / "memory-2" / "policy_spec.json", folder / "policy_spec.json")
    await update(repository, 5)
    assert model.version.name == version
    (line,) = said[1:]
    assert line.startswith(f"agent: refused a new version, {version} stays active. ")
    assert "is not the file that" in line
    with pytest.raises(RequestError, match="is not the file that"):
        await model.load()
    assert model.is_ready
    model.unload()
    with pytest.raises(RequestError, match=r"not ready. It was unloaded") as refusal:
        await model.infer(InferRequest({}))
    assert refusal.value.status == 503
    place(exports / "memory-2", folder)
    await update(repository)
    assert not model.is_ready  # until it is loaded
    await model.load()
    assert model.is_ready


@in_loop
async def test_the_highest_number_is_the_version(tmp_path, exports):
    for number, name in (("9", "memory-1"), ("10", "memory-2")):
        place(exports / name, tmp_path / number)
    (tmp_path / "11").mkdir()  # nothing in it yet
    repository = await load(tmp_path)
    assert repository["agent"].version.name == "10"
    place(exports / "memory-1", tmp_path / "11")
    await update(repository, 2)
    assert repository["agent"].metadata()["versions"] == ["11"]
    with pytest.raises(RequestError, match="no version '10'") as refusal:
        await repository["agent"].infer(InferRequest({}, version="10"))
    assert refusal.value.status == 404


@in_loop
async def test_a_pinned_version_is_served_even_if_there_are_newer_ones(tmp_path, exports):
    for number, name in (("9", "memory-1"), ("10/onnx", "memory-2")):
        place(exports / name, tmp_path / number)
    repository = await load(tmp_path, pins={"agent": "9"})
    place(exports / "memory-1", tmp_path / "11")
    await update(repository)
    assert repository["agent"].metadata()["versions"] == ["9"]
    newest = await load(tmp_path / "10" / "onnx")
    assert newest["agent"].version.name == "10"
    with pytest.raises(ExportError, match=r"no version '8', which --pin.* 9, 10, 11\."):
        await load(tmp_path, pins={"agent": "8"})


@in_loop
async def test_an_export_without_a_number_is_pinned_by_its_contents(folder, exports):
    said = []
    name = (await load(folder))["agent"].version.name
    pinned = await load(folder, said, pins={"agent": name})
    place(exports / "memory-2", folder)
    await update(pinned)
    assert pinned["agent"].version.name == name
    assert f"refused a new version, {name} stays active. " in said[-1]
    assert f"but --pin names '{name}'" in said[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["3"], "--pin 3 must name one of the 2 models: --pin cat=3"),
        (["ca=3"], "'?ca=3'? names no model.*mean 'cat'.*The models are cat, dog"),
        (["cat="], "gives the model cat no version"),
        (["cat=3", "cat=4"], "gives the model cat two versions"),
    ],
)
def test_pins_that_name_no_model_or_version_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        serve._parse_pins(options, ["cat", "dog"])
    assert serve._parse_pins(["dog=3", "cat=12"], ["cat", "dog"]) == {"dog": "3", "cat": "12"}
    assert serve._parse_pins(["3"], ["cat"]) == {"cat": "3"}


def test_what_cannot_be_served_is_named(tmp_path):
    repository = ModelRepository({"agent": tmp_path})
    with pytest.raises(ExportError, match=r"'agent' cannot be served.*neither a policy_spec.json"):
        asyncio.run(repository.load())
    with pytest.raises(UsageError, match="must not have spaces"):
        make_unique_names([("a/b", tmp_path)])


@pytest.mark.parametrize(
    ("shape", "data", "words"),
    [
        ([2**31 - 1] * 80_000, [1.0], "list of at most 32 sizes"),
        ([1] * 33, [1.0], "list of at most 32 sizes"),
        ([0, 2**31 - 1, 2**31 - 1, 2**31 - 1], [], "cannot have the shape"),
        ([40_000], ["a" * 20_000] + ["b"] * 20_000, "values of FP32, got 'b'"),
        ([2], [1.0, None], "values of FP32, got null"),
        ([2], [[1.0], {"a": 1}], "values of FP32, got|lists of different lengths"),
        ([2], [[[[1.0, "2"]]]], "values of FP32, got '2'"),
    ],
)
def test_what_a_request_says_of_its_tensors_costs_next_to_nothing(shape, data, words):
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=words):
            decode_values("x", "FP32", shape, data)
        with pytest.raises(RequestError):
            decode_bytes("x", "FP32", shape, b"" if 0 in shape else b"12")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [[], {}, False, 1.0, "a" * 257, [1] * 1_000_000])
def test_a_sequence_has_a_short_name(name):
    with pytest.raises(RequestError, match=r"an int, or a str of at most 256 characters") as result:
        InferOptions.from_parameters({"sequence_id": name})
    assert len(str(result.value)) < 200


@in_loop
async def test_new_files_in_a_numbered_folder_become_a_version(tmp_path, exports):
    place(exports / "memory-1", tmp_path / "1")
    said = []
    repository = await load(tmp_path, said)
    place(exports / "memory-2", tmp_path / "1")
    (tmp_path / "1" / ".#policy_spec.json").symlink_to("nowhere")  # as an editor leaves it
    await update(repository)
    assert len(said) == 2


@in_loop
async def test_a_server_whose_log_is_closed_continues(folder, exports):
    def log(line):
        raise BrokenPipeError

    repository = ModelRepository({"agent": folder}, log=log)
    await repository.load()
    first = repository["agent"].version.name
    place(exports / "memory-2", folder)
    await update(repository)
    assert repository["agent"].version.name != first


# -- bodies that do not arrive --------------------------------------------------------------------

INDEX = {"type": "http", "method": "POST", "path": "/v2/repository/index", "headers": []}


class Caller:
    """Sends a body part by part to an application, as an HTTP server hands it on."""

    def __init__(self, app):
        self.parts, self.answered = asyncio.Queue(), asyncio.Event()
        self.status, self.headers, self.body = None, {}, b""
        scope = {**INDEX, "query_string": b"", "http_version": "1.1", "app": app}
        self.running = asyncio.create_task(app(scope, self.parts.get, self._take))

    async def send(self, part, *, more=True):
        """Sends a part, and lets the application take it."""
        await self.parts.put({"type": "http.request", "body": part, "more_body": more})
        while not self.parts.empty():
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)

    async def answer(self):
        await asyncio.wait_for(self.answered.wait(), 30)
        return self.status

    async def _take(self, message):
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]
            self.answered.set()


@contextlib.contextmanager
def make_callers():
    """Makes eleven callers of a server that takes 100 bytes a body."""
    app = rest.make_app(ModelRepository({}, ServingLimits(max_body=100)))
    callers = [Caller(app) for _ in range(11)]
    yield callers
    for caller in callers:
        caller.running.cancel()


@in_loop
async def test_of_the_bodies_that_have_not_arrived_whole_the_largest_gives_way(monkeypatch):
    monkeypatch.setattr(rest, "UNCOUNTED_BYTES", 0)
    with make_callers() as (*early, late, small):
        for caller in early:
            await caller.send(b" " * 88)
        assert [caller.status for caller in early] == [None] * 9
        await late.send(b" " * 9)
        assert late.status is None
        assert await early[0].answer() == 503  # of the largest, the one that began first
        assert b"was the largest incomplete one" in early[0].body
        assert early[0].headers[b"connection"] == b"close"
        await small.send(b"{}", more=False)
        assert await small.answer() == 413  # `UNCOUNTED_BYTES` is the most that this address takes
        await late.send(b" " * 80)  # 793 bytes of eight and this one
        await early[1].send(b" " * 12)
        assert await early[1].answer() == 503  # it is the largest itself
        assert b"take 805 bytes, but may take at most 800 (8 times --max" in early[1].body
        await early[2].send(b" " * 9)
        assert early[2].status is None  # there is memory again


@pytest.mark.parametrize("pause", [0.0, 0.02])
@in_loop
async def test_a_body_that_takes_too_long_is_given_up_however_it_trickles(pause, monkeypatch):
    monkeypatch.setattr(rest, "_BODY_SECONDS", 0.1)
    with make_callers() as (caller, *_):
        await caller.send(b"{")
        while pause and caller.status is None:
            await caller.parts.put({"type": "http.request", "body": b" ", "more_body": True})
            await asyncio.sleep(pause)
        assert await caller.answer() == 408
        assert b"The body is incomplete." in caller.body


@in_loop
async def test_an_answer_to_a_body_that_was_read_leaves_the_connection_open():
    with make_callers() as (caller, *_):
        await caller.send(b"[", more=False)
        assert await caller.answer() == 400
        assert b"connection" not in caller.headers


@in_loop
async def test_a_call_of_grpc_whose_caller_has_gone_is_counted_as_that(folder, monkeypatch):
    has_begun = asyncio.Event()

    async def wait_forever(self, call):
        has_begun.set()
        await asyncio.Event().wait()

    repository = await load(folder)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((GrpcHandler(repository, AccessRules()),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setattr(ServedModel, "infer", wait_forever)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = service_pb2.ModelInferRequest(model_name="agent")
        call = GRPCInferenceServiceStub(channel).ModelInfer(request)
        waiting = asyncio.create_task(has_begun.wait())
        await asyncio.wait_for(waiting, 60)
        call.cancel()
        counted = b'requests_total{model="agent",protocol="grpc",status="499"} 1.0'
        while counted not in repository.metrics.to_text():
            await asyncio.sleep(0.01)
    await server.stop(None)


def test_a_model_that_does_not_come_to_an_end_is_refused(mlp, tmp_path, monkeypatch):
    monkeypatch.setattr("tfpolicies.export.player._run_trial", lambda source, model: None)
    folder = shutil.copytree(mlp, tmp_path / "agent")
    with_endless_loop(folder, above=-np.inf)
    with pytest.raises(ExportError, match=r"did not end in 0\.5 seconds"):
        asyncio.run(ModelRepository({"agent": folder}, ServingLimits(max_seconds=0.5)).load())
