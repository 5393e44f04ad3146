"""Untrusted ONNX files: limits of their computations, and refusals before they run."""

import asyncio
import hashlib
import json
import math
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from gymnasium import spaces
from onnx import TensorProto, helper

from helpers.factories import make
from helpers.foreign_models import assert_refused
from soak.hostile_onnx import constant, disguise, graph_before, value
from tfpolicies import import_policy
from tfpolicies.errors import ExportError, ModelImportError
from tfpolicies.export import player
from tfpolicies.export.player import LimitedSession, OnnxPolicy, rebuild_model
from tfpolicies.serving.repository import ModelRepository

node = helper.make_node
HERE = Path("model.onnx")
BOX = spaces.Box(-9.0, 9.0, (3,))
SPACES = {"observation_space": BOX, "action_space": BOX}
ROW = np.array([[1.0, 2.0, 3.0]])
TRUE = constant("true", np.bool_(True))


def make_model(nodes, constants=()):
    """Returns a model `obs` [B, 3] -> `actions`, of float32."""
    inputs, outputs = [value("obs", shape=["batch", 3])], [value("actions", shape=["batch", 3])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def doing(*nodes, constants=()):
    """Returns a model whose actions are its observations plus the first number of `big`."""
    adding = [
        node("Cast", ["big"], ["numbers"], to=TensorProto.FLOAT),
        node("ReduceMax", ["numbers"], ["most"], keepdims=0),
        node("Add", ["obs", "most"], ["actions"]),
    ]
    model = make_model([*nodes, *adding], constants)
    del model.opset_import[1]
    return model


def loop(condition="true", trips=""):
    """Returns a Loop over the observations that changes their sign."""
    steps = [node("Identity", ["going"], ["on"]), node("Neg", ["x"], ["y"])]
    takes = [value("i", TensorProto.INT64, []), value("going", TensorProto.BOOL, []), value("x")]
    gives = [value("on", TensorProto.BOOL, []), value("y")]
    body = helper.make_graph(steps, "body", takes, gives)
    return node("Loop", [trips, condition, "obs"], ["big"], body=body)


def write(model, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def import_model(model, tmp_path, **settings):
    return import_policy(write(model, tmp_path), **SPACES, **settings)


def refuse(model, tmp_path, words):
    assert_refused(write(model, tmp_path), words, **SPACES)


def assert_adds(policy, number, obs=ROW):
    """Asserts that a policy's actions are its observations plus a number."""
    np.testing.assert_array_equal(policy.compute_actions(obs).actions, obs + number)


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    make().export_model(folder, onnx=True)
    return folder


@pytest.fixture
def export_with(export, tmp_path):
    """Gives the folder of an export with another greedy model, whose checksum is right."""

    def build(change):
        folder = shutil.copytree(export, tmp_path / "changed", dirs_exist_ok=True)
        content = change((folder / "model.onnx").read_bytes())
        (folder / "model.onnx").write_bytes(content)
        spec = json.loads((folder / "policy_spec.json").read_text())
        spec["sha256"]["model.onnx"] = hashlib.sha256(content).hexdigest()
        (folder / "policy_spec.json").write_text(json.dumps(spec))
        return folder

    return build


@pytest.mark.core
def test_a_model_in_the_format_of_onnx_runtime_is_refused_though_it_is_valid_onnx(tmp_path):
    gelu = node("Gelu", ["obs"], ["actions"], domain="com.microsoft")
    content = disguise(make_model([gelu]).SerializeToString())
    assert not onnx.load_from_string(content).graph.node  # nothing that could be checked
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (actions,) = session.run(None, {"obs": np.ones((1, 3), np.float32)})
    np.testing.assert_allclose(actions, 0.841345, atol=1e-6)  # gelu(1): it runs

    refuse(content, tmp_path, "in the format of ONNX Runtime")
    with pytest.raises(ValueError, match="No graph was found"):  # whatever its bytes are
        LimitedSession("model", content, limited=False)


@pytest.mark.core
def test_a_disguised_export_is_neither_run_nor_served(export_with):
    folder = export_with(disguise)
    with pytest.raises(ValueError, match="in the format of ONNX Runtime"):
        OnnxPolicy(folder)
    with pytest.raises(ExportError, match="in the format of ONNX Runtime"):
        asyncio.run(ModelRepository({"agent": folder}).load())


@pytest.mark.core
def test_the_model_that_runs_has_only_the_parts_that_were_checked(export):
    content = (export / "model.onnx").read_bytes()
    model = onnx.load_from_string(content)
    unknown = b"\xa2\x06\x03abc" + content + b"\xa2\x06\x80\x80\x00"  # one in other words
    for values in (content, unknown):
        rebuilt = onnx.load_from_string(rebuild_model(HERE, values))
        assert (rebuilt.producer_name, rebuilt.graph.doc_string) == ("", "")
        rebuilt.producer_name = model.producer_name
        rebuilt.producer_version = model.producer_version
        rebuilt.graph.doc_string = model.graph.doc_string
        assert rebuilt == model


@pytest.mark.core
@pytest.mark.parametrize("count", [8, 21])
def test_graphs_in_graphs_are_checked_as_deep_as_they_go(count):
    nodes = [node("Gelu", ["obs"], ["out"], domain="com.microsoft")]
    for i in range(count):
        graph = helper.make_graph(nodes, f"graph {i}", [], [value("out")])
        nodes = [node("If", ["true"], ["out"], then_branch=graph, else_branch=graph)][:1]
        del nodes[0].attribute[1]
    words = "operators of 'com.microsoft'" if count == 8 else "nested too deeply"
    with pytest.raises(ValueError, match=words):
        rebuild_model(HERE, make_model(nodes[:1]).SerializeToString().replace(b"", b""))


def with_function(model):
    inside = [node("Gelu", ["a"], ["b"], domain="com.microsoft")]
    opsets = [helper.make_opsetid("com.microsoft", 1)]
    model.functions.append(helper.make_function("", "Plain", ["a"], ["b"], inside, opsets))
    model.graph.node[0].op_type = "Plain"


def with_node(*arguments, **attributes):
    return lambda model: model.graph.node.append(node(*arguments, **attributes))


def with_training(model):
    model.training_info.add().algorithm.node.append(node("Relu", ["obs"], ["x"]))


def with_texts(model):
    model.graph.initializer.append(helper.make_tensor("t", TensorProto.STRING, [1], [b"text"]))


def with_sparse_file(model):
    indices = helper.make_tensor("i", TensorProto.INT64, [1], [0])
    values = onnx.TensorProto(name="v", data_type=1, dims=[1], data_location=1)
    values.external_data.add(key="location", value="secret.bin")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [9]))


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_function, "has functions"),
        (with_training, "part for training"),
        (with_texts, "tensors of texts"),
        (with_node("Constant", [], ["t"], value_string="text"), "tensors of texts"),
        (with_node("StringConcat", ["t", "t"], ["u"]), "tensors of texts"),
        (with_sparse_file, "weights in another file, 'secret.bin', which is not in its folder"),
    ],
)
def test_a_model_with_more_than_computations_on_numbers_is_refused(change, words, tmp_path):
    model = doing(node("Relu", ["obs"], ["big"]))
    change(model)
    refuse(model, tmp_path, f"was refused: .*{words}")


@pytest.mark.core
@pytest.mark.parametrize("name", [b"batch", b"obs", b"big", b"Relu", b"graph"])
def test_names_that_are_not_text_are_refused(name, tmp_path):
    content = doing(node("Relu", ["obs"], ["big"])).SerializeToString()
    assert name in content
    content = content.replace(name, name[:-1] + b"\xc7")
    refuse(content, tmp_path, r"was refused: .*is damaged")


@pytest.mark.core
def test_a_file_of_very_many_parts_is_refused_before_they_are_read():
    empty = b"\x0a\x00" * 10_001  # nodes without anything
    model = b"\x3a" + player.encode_varint(len(empty)) + empty
    with pytest.raises(ValueError, match="more than 10000 nodes or 200000 parts"):
        rebuild_model(HERE, model)
    assert len(rebuild_model(HERE, model, limited=False))


OUTER_PRODUCT = [node("Mul", ["a", "b"], ["big"])]
EXPAND = [node("Expand", ["a", "n"], ["big"])]
LONG_WINDOW = [  # few numbers that take long within one operator, which nothing here could end
    node("ConstantOfShape", ["n"], ["x"]),
    node("AveragePool", ["x"], ["big"], kernel_shape=[10**5], pads=[99_999] * 2),
]


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        (OUTER_PRODUCT, {"a": np.ones((20_000, 1), "f"), "b": np.ones((1, 20_000), "f")}),
        (EXPAND, {"a": np.ones(1, "f"), "n": np.array([10**9])}),
        ([loop()], {"true": np.bool_(True)}),
        (LONG_WINDOW, {"n": np.array([1, 1, 10**7])}),
    ],
)
def test_a_model_that_needs_too_much_is_refused_at_no_cost_to_this_process(
    nodes, constants, tmp_path
):
    model = doing(*nodes, constants=[constant(name, x) for name, x in constants.items()])
    before = resource.getrusage(resource.RUSAGE_SELF)
    refuse(model, tmp_path, r"takes too much for 16 rows: more than 1.* 38. MiB")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 1.0
    assert after.ru_maxrss - before.ru_maxrss < 100_000  # kB


def test_an_endless_model_of_an_export_is_not_served(export_with):
    def change(content):
        nodes = [loop(), node("Identity", ["big"], ["harm"])]
        return graph_before(onnx.load_from_string(content), nodes, [TRUE]).SerializeToString()

    with pytest.raises(ExportError, match="takes too much for 16 rows"):
        asyncio.run(ModelRepository({"agent": export_with(change)}).load())


def above_four(*nodes):
    """Returns nodes that read from `is_time` whether an observation is above 4."""
    return [
        node("ReduceMax", ["obs"], ["largest"], keepdims=0),
        node("Greater", ["largest", "four"], ["is_time"]),
        *nodes,
    ]


@pytest.mark.core
def test_memory_is_limited_whatever_a_model_makes_of_its_inputs(tmp_path):
    nodes = above_four(
        node("Cast", ["is_time"], ["as_number"], to=TensorProto.INT64),
        node("Mul", ["as_number", "n"], ["times"]),
        node("Add", ["times", "one"], ["size"]),
        node("ConstantOfShape", ["size"], ["big"]),
    )
    weights = [constant("four", np.float32(4)), constant("n", np.array([10**9]))]
    model = doing(*nodes, constants=[*weights, constant("one", np.array([1]))])
    policy = import_model(model, tmp_path)
    assert_adds(policy, 0)
    with pytest.raises(ModelImportError, match="needs more than the 1024 MiB that all models"):
        policy.compute_actions(ROW + 3)
    assert_adds(policy, 0)
    assert_adds(import_model(model, tmp_path, model_work_limit=math.inf), 0)


def test_time_is_limited_whatever_a_model_makes_of_its_inputs(tmp_path, monkeypatch):
    monkeypatch.setattr(player, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(player, "CALL_CLOCK", player.CallClock())
    nodes = above_four(loop("is_time"))
    policy = import_model(doing(*nodes, constants=[constant("four", np.float32(4))]), tmp_path)
    assert_adds(policy, 3)
    with pytest.raises(ModelImportError, match=r"did not end in 0\.5 seconds, and it is stopped"):
        policy.compute_actions(ROW + 3)
    with pytest.raises(ModelImportError, match="it is stopped"):
        policy.compute_actions(ROW)


@pytest.mark.core
def test_a_model_that_ends_the_process_that_tries_it_is_refused(tmp_path, monkeypatch):
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crashing))
    model = doing(node("Elu", ["obs"], ["big"], alpha=0.123))
    refuse(model, tmp_path, "the process that tried it ended with -11")
    untried = "cannot be tried in another process, or set limited"
    with monkeypatch.context() as changed:
        changed.setattr(player, "__file__", str(tmp_path / "archive.zip" / "player.py"))
        refuse(model, tmp_path, untried)
    monkeypatch.setattr(sys, "executable", "")
    refuse(model, tmp_path, untried)
    assert_adds(import_model(model, tmp_path, model_work_limit=math.inf), 3)


@pytest.mark.core
def test_a_model_that_refuses_the_rows_of_its_trial_is_imported(tmp_path):
    only_two_rows = node("Reshape", ["obs", "shape"], ["big"])
    model = doing(only_two_rows, constants=[constant("shape", np.array([2, 3]))])
    assert_adds(import_model(model, tmp_path), 4, np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 4.0]]))
