"""Nodes of ONNX models, and models without some of their outputs."""

import numpy as np
import onnx
import onnxruntime
import pytest

from helpers.serving import MATRIX, inputs_of, policy_of
from tfpolicies.base.onnx_graph import iter_nodes, remove_outputs

pytestmark = pytest.mark.usefixtures("kept_programs")


def make_session(content):
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def make_feed(policy, session):
    """Returns inputs for two rows: single steps of two sequences if the model remembers."""
    feed = inputs_of(policy, 2)
    if policy.is_recurrent():
        feed = {name: x[:, None] for name, x in feed.items()}
    for port in session.get_inputs():
        if port.name not in feed:
            shape = [{"batch": 2, "time": 1}.get(size, size) for size in port.shape]
            feed[port.name] = np.ones(shape, port.type[7:-1].replace("float", "float32"))
    return feed


def count_weights(content):
    tensors = onnx.load_from_string(content).graph.initializer
    return sum(onnx.numpy_helper.to_array(tensor).size for tensor in tensors)


@pytest.mark.parametrize("kind", MATRIX)
def test_the_other_outputs_stay_as_they_are(tmp_path, kind):
    policy = policy_of(kind)
    content = policy.export_model(tmp_path, onnx=True).path.read_bytes()
    whole, cut = make_session(content), make_session(remove_outputs(content, ["vf_preds"]))
    names = [port.name for port in whole.get_outputs()]
    others = [port.name for port in cut.get_outputs()]
    actual = dict(zip(others, cut.run(None, make_feed(policy, cut)), strict=True))
    assert others == [name for name in names if name != "vf_preds"]
    for name, expected in zip(names, whole.run(None, make_feed(policy, whole)), strict=True):
        if name != "vf_preds":
            np.testing.assert_array_equal(actual[name], expected, err_msg=name)


@pytest.mark.core
def test_weights_of_removed_outputs_are_removed_and_unknown_outputs_ignored(tmp_path):
    content = policy_of("mlp").export_model(tmp_path, onnx=True).path.read_bytes()
    cut = remove_outputs(content, ["vf_preds"])
    actor, critic = 3 * 4 + 4 + 4 * 2 + 2, 3 * 4 + 4 + 4 * 1 + 1
    assert count_weights(content) - count_weights(cut) == critic
    assert count_weights(cut) >= actor
    whole = remove_outputs(content, ["nothing"])
    assert onnx.load_from_string(whole) == onnx.load_from_string(content)


@pytest.mark.core
def test_nodes_of_inner_graphs_follow_those_they_belong_to():
    def graph(*nodes):
        return onnx.helper.make_graph(nodes, "inner", [], [])

    innermost = onnx.helper.make_node("Relu", ["x"], ["y"])
    inner = onnx.helper.make_node("Loop", [], [], body=graph(innermost))
    one = onnx.helper.make_node("If", [], [], then_branch=graph(inner), else_branch=graph())
    two = onnx.helper.make_node("Add", ["y", "z"], ["sum"])
    assert [node.op_type for node in iter_nodes([one, two])] == ["If", "Loop", "Relu", "Add"]
