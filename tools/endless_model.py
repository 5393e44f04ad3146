"""Exports whose model never returns, for tests of time limits."""

import hashlib
import json
from pathlib import Path


def with_endless_loop(folder: Path, above: float = 1.0) -> None:
    """Lets the greedy model of an export run without end where an observation is above a number.

    Trials of models give them observations of 0 and 1.
    """
    import onnx

    make_node, make_info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    types = onnx.TensorProto
    body = onnx.helper.make_graph(
        [make_node("Identity", ["c"], ["again"]), make_node("Neg", ["x"], ["y"])],
        "body",
        [
            make_info("i", types.INT64, []),
            make_info("c", types.BOOL, []),
            make_info("x", types.FLOAT, None),
        ],
        [make_info("again", types.BOOL, []), make_info("y", types.FLOAT, None)],
    )
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        node.input[:] = ["looped" if name == "obs" else name for name in node.input]
    added = [
        make_node("ReduceMax", ["obs"], ["most"], keepdims=0),
        make_node("Greater", ["most", "least"], ["is_above"]),
        make_node("Loop", ["", "is_above", "obs"], ["looped"], body=body),
    ]
    for node in reversed(added):
        model.graph.node.insert(0, node)
    model.graph.initializer.append(onnx.helper.make_tensor("least", types.FLOAT, [], [above]))
    content = model.SerializeToString()
    (folder / "model.onnx").write_bytes(content)
    spec = json.loads((folder / "policy_spec.json").read_text())
    spec["sha256"]["model.onnx"] = hashlib.sha256(content).hexdigest()
    (folder / "policy_spec.json").write_text(json.dumps(spec))
