"""What a server is made of, in this process: batches, sequences, versions."""

import asyncio
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


def doubled(feed):
    if (feed["x"] < 0).any():
        raise FloatingPointError("less than nothing")
    return {"y": 2 * feed["x"]}


@pytest.mark.parametrize("cost", [QUICK, SLOW], ids=["in the loop", "in a thread"])
def test_what_waits_together_runs_together(cost):
    batches = []

    async def ask():
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(doubled, pool, cost, 4, batches.append)
            feeds = [{"x": np.full((1 + i % 2, 2), i)} for i in range(6)]
            return await asyncio.gather(*map(batcher.run, feeds))

    result = asyncio.run(ask())

    assert batches == [4, 3, 2]  # of 1, 2, 1, 2, 1, 2 rows, four at most
    for i, outputs in enumerate(result):
        np.testing.assert_array_equal(outputs["y"], np.full((1 + i % 2, 2), 2 * i))


def test_arrays_of_other_shapes_run_apart_and_a_larger_request_alone():
    batches = []

    async def ask():
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(doubled, pool, QUICK, 4, batches.append)
            feeds = [{"x": np.zeros((1, size))} for size in (2, 2, 3, 3)]
            return await asyncio.gather(*map(batcher.run, [*feeds, {"x": np.zeros((9, 3))}]))

    asyncio.run(ask())
    assert batches == [2, 2, 9]


def test_requests_that_come_soon_behind_each_other_run_together():
    batches = []

    async def ask():
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(doubled, pool, QUICK, 8, batches.append)
            answers = []
            for _ in range(3):
                answers.append(batcher.run({"x": np.zeros((1, 1))}))
                await asyncio.sleep(0)  # a turn of the loop
            await asyncio.gather(*answers)
            await batcher.run({"x": np.zeros((2, 1))})

    asyncio.run(ask())
    assert batches == [3, 2]


def test_what_came_while_a_batch_ran_runs_before_its_callers_go_on():
    order, may_end = [], threading.Event()

    def slow(feed):
        may_end.wait(60)
        return {"y": feed["x"]}

    async def ask():
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(slow, pool, SLOW, 8, lambda rows: order.append(f"{rows} rows begin"))

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

    asyncio.run(ask())
    assert order == ["1 rows begin", "2 rows begin", "1 rows end", "2 rows end"]


def test_the_cost_of_a_batch_is_that_of_a_call_and_of_its_rows():
    cost = BatchCost.measure(lambda rows: 0.0004 + 0.00002 * rows)
    assert cost.estimate_seconds(64) == pytest.approx(0.0004 + 0.00002 * 64)

    tried = []
    slow = BatchCost.measure(lambda rows: (tried.append(rows), 0.002 * rows)[1])
    assert slow.estimate_seconds(10) == pytest.approx(0.02)
    assert max(tried) == 2  # nobody waits for 16 rows of a large network


@pytest.mark.parametrize("cost", [QUICK, SLOW], ids=["in the loop", "in a thread"])
def test_a_request_that_fails_harms_no_other(cost):
    async def ask():
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(doubled, pool, cost, 8)
            feeds = [{"x": np.full((1, 1), x)} for x in (1, -1, 3)]
            return await asyncio.gather(*map(batcher.run, feeds), return_exceptions=True)

    first, fault, third = asyncio.run(ask())
    assert (first["y"].item(), third["y"].item()) == (2, 6)
    assert isinstance(fault, FloatingPointError)


def test_what_nobody_waits_for_any_more_does_not_run():
    batches = []

    async def ask():
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(doubled, pool, QUICK, 8, batches.append)
            gone, waiting = (batcher.run({"x": np.full((1, 1), x)}) for x in (1, 2))
            gone.cancel()
            answer = await waiting
            alone = batcher.run({"x": np.zeros((1, 1))})
            alone.cancel()
            await asyncio.sleep(0.05)
            later = await batcher.run({"x": np.full((3, 1), 4)})
            return answer["y"].item(), later["y"].shape

    assert asyncio.run(ask()) == (4, (3, 1))
    assert batches == [1, 3]


def test_callers_learn_that_the_threads_have_ended():
    async def ask():
        pool = ThreadPoolExecutor(1)
        batcher = Batcher(doubled, pool, SLOW, 8)
        pool.shutdown()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shutdown"):
                await batcher.run({"x": np.zeros((1, 1))})

    asyncio.run(ask())


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Exports of a policy with a memory in two versions, and of one without."""
    home = tmp_path_factory.mktemp("exports")
    for seed in (1, 2):
        export(policy_of("memory", seed), home / f"memory-{seed}")
    export(policy_of("mlp"), home / "mlp")
    return home


@pytest.fixture
def folder(exports, tmp_path):
    """A folder of the first version, to be changed."""
    place(exports / "memory-1", tmp_path / "agent")
    return tmp_path / "agent"


def steps_of(policy, count):
    """Returns observations of a sequence, and the inputs of the distribution that answer them."""
    state, action, result = [x[None] for x in policy.get_initial_state()], 0, []
    for step in range(count):
        obs = inputs_of(policy, 1, seed=step)
        acted = policy.compute_actions(
            obs["obs"], state, prev_action_batch=[action], prev_reward_batch=[0.0], explore=False
        )
        state, action = acted.state_outs, int(acted.actions[0])
        result.append((obs, acted.extras["action_dist_inputs"]))
    return result


async def loaded(folder):
    """Returns a repository whose model `agent` is in a folder."""
    repository = ModelRepository({"agent": folder})
    await repository.load()
    return repository


def sequences_of(repository):
    """Returns how many sequences the metrics count."""
    match = re.search(r'sequences{model="agent"} (\S+)', repository.metrics.to_text().decode())
    return float(match[1])


def test_steps_that_come_at_once_are_taken_in_their_order(folder):
    expected = steps_of(policy_of("memory"), 6)

    async def ask():
        repository = await loaded(folder)
        model = repository["agent"]
        calls = []
        for step, (obs, _) in enumerate(expected):
            for name in ("left", "right"):
                options = InferOptions(
                    sequence=name, starts_sequence=step == 0, ends_sequence=step == 5
                )
                calls.append(model.infer(InferRequest(obs, options, ["action_dist_inputs"])))
        actual = await asyncio.gather(*calls)
        return actual, repository.metrics.to_text().decode()

    actual, text = asyncio.run(ask())

    for step, (_, answer) in enumerate(expected):
        for answered in actual[2 * step : 2 * step + 2]:
            outputs = answered.outputs["action_dist_inputs"]
            np.testing.assert_allclose(outputs, answer, rtol=0, atol=1e-5)
    assert 'tfpolicies_batch_rows_count{model="agent"} 6.0' in text  # two sequences in each batch
    assert 'tfpolicies_sequences{model="agent"} 0.0' in text


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


def test_a_step_is_taken_even_if_its_caller_goes(folder):
    (first, _), (second, _), (third, expected) = steps_of(policy_of("memory"), 3)

    async def ask():
        repository = await loaded(folder)
        model = repository["agent"]
        await model.infer(InferRequest(first, InferOptions(sequence=1, starts_sequence=True)))
        stepping = asyncio.create_task(model.infer(InferRequest(second, InferOptions(sequence=1))))
        await asyncio.sleep(0)  # it waits for its batch
        stepping.cancel()
        last = await model.infer(InferRequest(third, InferOptions(sequence=1)))
        ending = asyncio.create_task(
            model.infer(InferRequest(third, InferOptions(sequence=1, ends_sequence=True)))
        )
        await asyncio.sleep(0)
        ending.cancel()
        for gone in (stepping, ending):
            with pytest.raises(asyncio.CancelledError):
                await gone
        return last.outputs["action_dist_inputs"], sequences_of(repository)

    actual, left = asyncio.run(ask())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    assert left == 0  # the last step ended it


def test_a_sequence_that_begins_anew_during_a_step_carries_nothing_of_it(folder):
    (first, before), (second, _) = steps_of(policy_of("memory"), 2)

    async def ask():
        repository = await loaded(folder)
        model = repository["agent"]
        await model.infer(InferRequest(first, InferOptions(sequence=1, starts_sequence=True)))
        stepping = asyncio.create_task(model.infer(InferRequest(second, InferOptions(sequence=1))))
        await asyncio.sleep(0)
        anew = await model.infer(
            InferRequest(first, InferOptions(sequence=1, starts_sequence=True, ends_sequence=True))
        )
        await stepping
        return anew.outputs["action_dist_inputs"], sequences_of(repository)

    result, left = asyncio.run(ask())
    np.testing.assert_allclose(result, before, rtol=0, atol=1e-5)
    assert left == 0


@pytest.mark.parametrize(
    "wrong", [{"version": "9"}, {"outputs": ["action"]}], ids=["another version", "no such output"]
)
def test_a_step_that_is_refused_begins_no_sequence(folder, wrong):
    obs = inputs_of(policy_of("memory"), 1)

    async def ask():
        repository = await loaded(folder)
        options = InferOptions(sequence="left", starts_sequence=True)
        with pytest.raises(RequestError) as refusal:
            await repository["agent"].infer(InferRequest(obs, options, **wrong))
        return refusal.value.status, repository.metrics.to_text().decode()

    status, text = asyncio.run(ask())
    assert status == (404 if "version" in wrong else 400)
    assert 'tfpolicies_sequences{model="agent"} 0.0' in text


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


def test_a_sequence_is_forgotten_when_it_had_no_step_for_too_long(folder):
    async def ask():
        repository = await loaded(folder)
        now = [0.0]
        sequences = SequenceStore(2, 10.0, lambda: now[0])
        newest = repository["agent"]._get_runner()
        obs, _ = steps_of(policy_of("memory"), 1)[0]
        begin, go_on = InferOptions(sequence=1, starts_sequence=True), InferOptions(sequence=1)
        await sequences.step(1, InferRequest(obs, begin), newest)
        now[0] = 9.0
        await sequences.step(1, InferRequest(obs, go_on), newest)
        now[0] = 18.0
        await sequences.step(1, InferRequest(obs, go_on), newest)
        with pytest.raises(RequestError, match=r"'obs' is missing"):
            await sequences.step(2, InferRequest({}, begin), newest)  # begins nothing
        assert len(sequences) == 1
        two = {"obs": np.zeros((2, 3), np.float32)}
        with pytest.raises(RequestError, match="has 1 rows, as its first one had, got 2"):
            await sequences.step(1, InferRequest(two, go_on), newest)
        now[0] = 28.0
        with pytest.raises(RequestError, match=r"no sequence 1: .* had no step for 10 s"):
            await sequences.step(1, InferRequest(obs, go_on), newest)
        assert len(sequences) == 0

    asyncio.run(ask())


def test_a_sequence_stays_with_the_version_that_it_began_with(folder, exports):
    async def ask():
        said = []
        repository = ModelRepository({"agent": folder}, log=said.append)
        await repository.load()
        model = repository["agent"]
        (first, before), (second, after) = steps_of(policy_of("memory"), 2)
        begun = await model.infer(
            InferRequest(first, InferOptions(sequence=1, starts_sequence=True))
        )
        place(exports / "memory-2", folder)
        await model.update_version()
        await model.update_version()
        went_on = await model.infer(
            InferRequest(second, InferOptions(sequence=1, ends_sequence=True))
        )
        anew = await model.infer(
            InferRequest(first, InferOptions(sequence=1, starts_sequence=True))
        )
        assert [begun.version, went_on.version] == [begun.version] * 2
        assert anew.version == model.version.name != begun.version
        key = "action_dist_inputs"
        np.testing.assert_allclose(begun.outputs[key], before, rtol=0, atol=1e-5)
        np.testing.assert_allclose(went_on.outputs[key], after, rtol=0, atol=1e-5)
        assert np.abs(anew.outputs[key] - before).max() > 1e-3
        assert len(said) == 2

    asyncio.run(ask())


def test_a_broken_version_is_refused_once_and_the_one_before_goes_on(folder, exports):
    async def ask():
        said = []
        repository = ModelRepository({"agent": folder}, log=said.append)
        await repository.load()
        model = repository["agent"]
        version = model.version.name
        shutil.copy2(exports / "memory-2" / "policy_spec.json", folder / "policy_spec.json")
        for _ in range(5):
            await model.update_version()
        assert model.version.name == version
        (line,) = said[1:]
        assert line.startswith(f"agent: refused a new version, {version} stays active. ")
        assert "is not the file that" in line
        with pytest.raises(RequestError, match="is not the file that"):
            await model.load()
        assert model.is_ready
        model.unload()
        with pytest.raises(RequestError, match=r"not ready. It was unloaded") as raised:
            await model.infer(InferRequest({}))
        assert raised.value.status == 503
        place(exports / "memory-2", folder)
        for _ in range(3):
            await model.update_version()
        assert not model.is_ready  # until somebody loads it
        await model.load()
        assert model.is_ready

    asyncio.run(ask())


def test_the_highest_number_is_the_version(tmp_path, exports):
    async def ask():
        for number, made in (("9", "memory-1"), ("10", "memory-2")):
            place(exports / made, tmp_path / number)
        (tmp_path / "11").mkdir()  # nothing in it yet
        repository = ModelRepository({"agent": tmp_path}, log=lambda line: None)
        await repository.load()
        assert repository["agent"].version.name == "10"
        place(exports / "memory-1", tmp_path / "11")
        for _ in range(2):
            await repository["agent"].update_version()
        assert repository["agent"].metadata()["versions"] == ["11"]
        with pytest.raises(RequestError, match="no version '10'") as raised:
            await repository["agent"].infer(InferRequest({}, version="10"))
        assert raised.value.status == 404

    asyncio.run(ask())


def test_a_pinned_version_is_served_even_if_there_are_newer_ones(tmp_path, exports):
    async def ask():
        for number, made in (("9", "memory-1"), ("10/onnx", "memory-2")):
            place(exports / made, tmp_path / number)
        repository = ModelRepository(
            {"agent": tmp_path}, log=lambda line: None, pins={"agent": "9"}
        )
        await repository.load()
        model = repository["agent"]
        place(exports / "memory-1", tmp_path / "11")
        for _ in range(3):
            await model.update_version()
        assert model.metadata()["versions"] == ["9"]
        newest = ModelRepository({"agent": tmp_path / "10" / "onnx"}, log=lambda line: None)
        await newest.load()
        assert newest["agent"].version.name == "10"
        missing = ModelRepository({"agent": tmp_path}, log=lambda line: None, pins={"agent": "8"})
        with pytest.raises(ExportError, match=r"no version '8', which --pin.* 9, 10, 11\."):
            await missing.load()

    asyncio.run(ask())


def test_an_export_without_a_number_is_pinned_by_its_contents(folder, exports):
    async def ask():
        said = []
        first = ModelRepository({"agent": folder}, log=said.append)
        await first.load()
        name = first["agent"].version.name
        pinned = ModelRepository({"agent": folder}, log=said.append, pins={"agent": name})
        await pinned.load()
        place(exports / "memory-2", folder)
        for _ in range(3):
            await pinned["agent"].update_version()
        assert pinned["agent"].version.name == name
        assert f"refused a new version, {name} stays active. " in said[-1]
        assert f"but --pin names '{name}'" in said[-1]

    asyncio.run(ask())


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


def test_new_files_in_a_numbered_folder_are_taken_up(tmp_path, exports):
    async def ask():
        place(exports / "memory-1", tmp_path / "1")
        said = []
        repository = ModelRepository({"agent": tmp_path}, log=said.append)
        await repository.load()
        place(exports / "memory-2", tmp_path / "1")
        (tmp_path / "1" / ".#policy_spec.json").symlink_to("nowhere")  # as an editor leaves it
        for _ in range(3):
            await repository["agent"].update_version()
        assert len(said) == 2

    asyncio.run(ask())


def test_a_server_goes_on_when_nobody_reads_what_it_says(folder, exports):
    def say(line):
        raise BrokenPipeError

    async def ask():
        repository = ModelRepository({"agent": folder}, log=say)
        await repository.load()
        first = repository["agent"].version.name
        place(exports / "memory-2", folder)
        for _ in range(3):
            await repository["agent"].update_version()
        assert repository["agent"].version.name != first

    asyncio.run(ask())


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


def with_callers(use):
    """Runs `use(callers)` with eleven callers of a server that takes 100 bytes a body."""

    async def run():
        app = rest.make_app(ModelRepository({}, ServingLimits(max_body=100)))
        callers = [Caller(app) for _ in range(11)]
        await use(callers)
        for caller in callers:
            caller.running.cancel()

    asyncio.run(run())


def test_of_the_bodies_that_have_not_arrived_whole_the_largest_gives_way(monkeypatch):
    monkeypatch.setattr(rest, "UNCOUNTED_BYTES", 0)

    async def use(callers):
        *early, late, small = callers
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

    with_callers(use)


@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_a_body_that_takes_too_long_is_given_up_however_it_trickles(pause, monkeypatch):
    monkeypatch.setattr(rest, "_BODY_SECONDS", 0.1)

    async def use(callers):
        caller = callers[0]
        await caller.send(b"{")
        while pause and caller.status is None:
            await caller.parts.put({"type": "http.request", "body": b" ", "more_body": True})
            await asyncio.sleep(pause)
        assert await caller.answer() == 408
        assert b"The body is incomplete." in caller.body

    with_callers(use)


def test_an_answer_to_a_body_that_was_read_leaves_the_connection_open():
    async def use(callers):
        await callers[0].send(b"[", more=False)
        assert await callers[0].answer() == 400
        assert b"connection" not in callers[0].headers

    with_callers(use)


def test_a_call_of_grpc_whose_caller_has_gone_is_counted_as_that(folder, monkeypatch):
    asked = asyncio.Event()

    async def never(self, call):
        asked.set()
        await asyncio.Event().wait()

    async def run():
        repository = await loaded(folder)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((GrpcHandler(repository, AccessRules()),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        monkeypatch.setattr(ServedModel, "infer", never)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = GRPCInferenceServiceStub(channel).ModelInfer(
                service_pb2.ModelInferRequest(model_name="agent")
            )
            waiting = asyncio.create_task(asked.wait())
            await asyncio.wait_for(waiting, 60)
            call.cancel()
            counted = b'requests_total{model="agent",protocol="grpc",status="499"} 1.0'
            while counted not in repository.metrics.to_text():
                await asyncio.sleep(0.01)
        await server.stop(None)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_model_that_does_not_come_to_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tfpolicies.export.player._run_trial", lambda source, model: None)
    folder = export(policy_of("mlp"), tmp_path / "agent")
    with_endless_loop(folder, above=-np.inf)
    with pytest.raises(ExportError, match=r"did not end in 0\.5 seconds"):
        asyncio.run(ModelRepository({"agent": folder}, ServingLimits(max_seconds=0.5)).load())
