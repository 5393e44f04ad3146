"""Hostile ONNX files for `fuzz_attacks`: built ones and damaged ones."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from tfpolicies import import_policy
from tfpolicies.errors import ExportError
from tfpolicies.export import player
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.serving.repository import ModelRepository
from tfpolicies.serving.served_model import DEFAULT_LIMITS

Node = onnx.NodeProto
_LARGE = (0, -1, 1, 3, 10**5, 10**6, 10**8, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_SECONDS = 1.0  # of a call, or of a trial of the server

# Building -----------------------------------------------------------------------------------------


def value(name: str, kind: int = TensorProto.FLOAT, shape: Any = None) -> onnx.ValueInfoProto:
    """Returns an input or output of a graph."""
    return helper.make_tensor_value_info(name, kind, shape)


def constant(name: str, array: Any) -> onnx.TensorProto:
    """Returns a weight."""
    return numpy_helper.from_array(np.asarray(array), name)


def graph_before(
    model: onnx.ModelProto, nodes: Sequence[Node], constants: Sequence[onnx.TensorProto] = ()
) -> onnx.ModelProto:
    """Returns a copy of a model that reads `harm` in place of its observation.

    Args:
        model: with an input `obs`.
        nodes: compute `harm` from `obs`.
        constants: that they read.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        node.input[:] = ["harm" if name == "obs" else name for name in node.input]
    for node in reversed(nodes):
        result.graph.node.insert(0, node)
    result.graph.initializer.extend(constants)
    return result


def disguise(content: bytes) -> bytes:
    """Returns a model in ONNX Runtime's own format that is legal ONNX without a node, too.

    The format begins with the offset of its first table, and `08 00 09 00` is a field of ONNX, as
    is what follows. So the table is copied to the place that these bytes name.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.save_model_format", "ORT")
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = f"{folder}/model.ort"
        onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        saved = Path(options.optimized_model_filepath).read_bytes()
    (root,) = struct.unpack_from("<I", saved)
    fields = root - struct.unpack_from("<i", saved, root)[0]
    fields_size, table_size = struct.unpack_from("<HH", saved, fields)
    place = struct.unpack("<I", b"\x08\x00\x09\x00")[0]
    base = -(-(place + table_size) // 16) * 16
    table = bytearray(saved[root : root + table_size])
    struct.pack_into("<i", table, 0, place - (base + fields))
    for at in struct.unpack_from(f"<{fields_size // 2 - 2}H", saved, fields + 4):
        if at:
            target = base + root + at + struct.unpack_from("<I", saved, root + at)[0]
            struct.pack_into("<I", table, at, target - (place + at))
    result = bytearray(base) + saved
    result[place : place + table_size] = table
    result[:8] = b"\x08\x00\x09\x00ORTM"
    rest = len(result) - 17  # all of it is one field that ONNX does not know
    size = (rest & 127 | 128, rest >> 7 & 127 | 128, rest >> 14 & 127 | 128, rest >> 21)
    result[11:17] = b"\xa2\x06" + bytes(size)
    return bytes(result)


def _loop(condition: str, trips: str, inside: Node | None = None) -> Node:
    """Returns a Loop that carries `obs` on, by default by changing its sign."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["goes_on"]),
            inside or helper.make_node("Neg", ["carried"], ["carries"]),
        ],
        "body",
        [value("i", TensorProto.INT64, []), value("going", TensorProto.BOOL, []), value("carried")],
        [value("goes_on", TensorProto.BOOL, []), value("carries")],
    )
    return helper.make_node("Loop", [trips, condition, "obs"], ["looped"], body=body)


def _summed(*nodes: Node, name: str) -> list[Node]:
    """Returns nodes and how the sum of what they compute changes the observation."""
    return [
        *nodes,
        helper.make_node("Cast", [name], ["as_float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["as_float"], ["most"], keepdims=0),
        helper.make_node("Add", ["obs", "most"], ["harm"]),
    ]


def _attack_sizes(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """Lets an operator make something large of constants."""
    n = rng.choice((10**6, 10**7, 10**8, 10**9, 2**40))
    node, many = helper.make_node, constant("n", np.array([n], np.int64))
    one, zero = constant("one", np.int64(1)), constant("zero", np.int64(0))
    few = min(n, 3 * 10**6)
    ways: tuple[tuple[list[Node], list[onnx.TensorProto]], ...] = (
        ([node("ConstantOfShape", ["n"], ["big"])], [many]),
        ([node("Expand", ["one", "n"], ["big"])], [many, one]),
        ([node("Tile", ["ones", "n"], ["big"])], [many, constant("ones", np.ones(3, "f"))]),
        ([node("Range", ["zero", "m", "one"], ["big"])], [zero, one, constant("m", np.int64(n))]),
        (
            [node("Pad", ["ones", "pads"], ["big"])],
            [constant("ones", np.ones(3, "f")), constant("pads", np.array([0, n], np.int64))],
        ),
        (
            [node("Resize", ["image", "", "", "to"], ["big"])],
            [
                constant("image", np.ones((1, 1, 2, 2), "f")),
                constant("to", np.array([1, 1, 1000, n // 1000], np.int64)),
            ],
        ),
        (
            [node("OneHot", ["zeros", "m", "values"], ["big"])],
            [
                constant("zeros", np.zeros(9, np.int64)),
                constant("m", np.int64(n)),
                constant("values", np.array([0, 1], "f")),
            ],
        ),
        (
            [node("Mul", ["rows", "columns"], ["big"])],
            [
                constant("rows", np.ones((few // 50, 1), "f")),
                constant("columns", np.ones((1, few // 50), "f")),
            ],
        ),
        (
            [node("Gather", ["rows", "many"], ["big"])],
            [constant("rows", np.ones((9, 3000), "f")), constant("many", np.zeros(99_999, "i8"))],
        ),
        (
            [
                node("ConstantOfShape", ["square"], ["matrix"]),
                node("MatMul", ["matrix", "matrix"], ["again"]),
                node("MatMul", ["again", "again"], ["big"]),
            ],
            [constant("square", np.array([4000, 4000], np.int64))],
        ),
        (
            [
                node("ConstantOfShape", ["line"], ["signal"]),
                node("AveragePool", ["signal"], ["big"], kernel_shape=[10**5], pads=[99_999] * 2),
            ],
            [constant("line", np.array([1, 1, 10**6], np.int64))],
        ),
        (
            [
                node("ConstantOfShape", ["n"], ["zeros"]),
                node("Cast", ["zeros"], ["none"], to=TensorProto.BOOL),
                node("Not", ["none"], ["all"]),
                node("NonZero", ["all"], ["big"]),
            ],
            [many],
        ),
    )
    nodes, constants = rng.choice(ways)
    return graph_before(model, _summed(*nodes, name="big"), constants)


def _attack_loops(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """Lets a Loop run long, or grow what it carries."""
    node = helper.make_node
    grows = node("Concat", ["carried", "carried"], ["carries"], axis=0)
    inside = rng.choice((None, grows))
    trips = rng.choice(("", "trips"))
    constants = [
        constant("true", np.bool_(True)),
        constant("trips", np.int64(rng.choice((40, 10**5, 10**9, 2**62)))),
    ]
    return graph_before(model, _summed(_loop("true", trips, inside), name="looped"), constants)


def _attack_data(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """Lets a model do harm where observations are zeros, and not on the ones of its trial."""
    node = helper.make_node
    nodes = [
        node("ReduceMax", ["obs"], ["largest"], keepdims=0),
        node("Less", ["largest", "bound"], ["is_time"]),
    ]
    constants = [constant("bound", np.float32(0.5)), constant("n", np.int64([9 * 10**9]))]
    if rng.random() < 0.5:
        return graph_before(
            model, [*nodes, *_summed(_loop("is_time", ""), name="looped")], constants
        )
    nodes += [
        node("Cast", ["is_time"], ["as_number"], to=TensorProto.INT64),
        node("Mul", ["as_number", "n"], ["size"]),
        node("ConstantOfShape", ["size"], ["nothing"]),
        node("Concat", ["nothing", "bounds"], ["big"], axis=0),
    ]
    constants.append(constant("bounds", np.zeros(1, "f")))
    return graph_before(model, _summed(*nodes, name="big"), constants)


def _attack_domains(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """Names operators, functions, files or texts that a policy has not."""
    node = helper.make_node
    gelu = node("Gelu", ["obs"], ["harm"], domain="com.microsoft")
    way = rng.choice(("node", "inner", "function", "file", "text", "training"))
    if way == "node":
        return graph_before(model, [gelu])
    if way == "inner":
        inside = node("Gelu", ["carried"], ["carries"], domain="com.microsoft")
        nodes = [_loop("true", "trips", inside), node("Identity", ["looped"], ["harm"])]
        flags = [constant("true", np.bool_(True)), constant("trips", np.int64(1))]
        return graph_before(model, nodes, flags)
    if way == "function":
        result = graph_before(model, [node("Plain", ["obs"], ["harm"])])
        inside = node("Gelu", ["a"], ["b"], domain="com.microsoft")
        opsets = [helper.make_opsetid("com.microsoft", 1)]
        result.functions.append(helper.make_function("", "Plain", ["a"], ["b"], [inside], opsets))
        return result
    if way == "training":
        result = graph_before(model, [node("Identity", ["obs"], ["harm"])])
        result.training_info.add().algorithm.node.append(gelu)
        return result
    if way == "text":
        texts = helper.make_tensor("texts", TensorProto.STRING, [1], [b"x" * 10**6])
        nodes = [node("Tile", ["texts", "n"], ["many"]), node("Shape", ["many"], ["big"])]
        return graph_before(
            model, _summed(*nodes, name="big"), [texts, constant("n", np.array([10**4]))]
        )
    result = graph_before(model, [node("Identity", ["obs"], ["harm"])])
    weight = rng.choice(result.graph.initializer)
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="/etc/hostname")
    weight.ClearField("raw_data")
    return result


def _damaged(content: bytes, rng: random.Random) -> bytes:
    """Changes, inserts or deletes a few bytes."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at, way = rng.randrange(len(result)), rng.random()
        if way < 0.6:
            result[at] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
        elif way < 0.75:
            del result[at : at + rng.choice((1, 1, 8))]
        elif way < 0.9:
            result[at:at] = rng.randbytes(rng.choice((1, 4)))
        else:
            del result[at:]
            result += b"\0"
    return bytes(result)


def _attack_parts(model: onnx.ModelProto, rng: random.Random) -> onnx.ModelProto:
    """Changes operators, inputs, attributes and numbers of a sound model."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    nodes, names = list(result.graph.node), [x.name for x in onnx.defs.get_all_schemas()]
    for _ in range(rng.choice((1, 1, 2, 4))):
        node, way = rng.choice(nodes), rng.randrange(5)
        if way == 0:
            node.op_type = rng.choice(names)
        elif way == 1 and node.input:
            values = [name for each in nodes for name in each.output]
            values += [each.name for each in result.graph.initializer]
            node.input[rng.randrange(len(node.input))] = rng.choice([*values, "", "obs"])
        elif way == 2 and node.attribute:
            attribute = rng.choice(node.attribute)
            attribute.i = rng.choice(_LARGE)
            if attribute.ints:
                attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(_LARGE)
        elif way == 3 and onnx.defs.has(node.op_type):
            for name in onnx.defs.get_schema(node.op_type).attributes:
                if rng.random() < 0.5:
                    node.attribute.append(helper.make_attribute(name, rng.choice(_LARGE)))
        else:
            weight = rng.choice(result.graph.initializer)
            if weight.data_type == TensorProto.INT64 and len(weight.raw_data) >= 8:
                raw = bytearray(weight.raw_data)
                struct.pack_into("<q", raw, 8 * rng.randrange(len(raw) // 8), rng.choice(_LARGE))
                weight.raw_data = bytes(raw)
            elif weight.dims:
                weight.dims[rng.randrange(len(weight.dims))] = rng.choice(_LARGE)
    return result


_ATTACKS: dict[str, Callable[[onnx.ModelProto, random.Random], onnx.ModelProto]] = {
    "sizes": _attack_sizes,
    "loops": _attack_loops,
    "data": _attack_data,
    "domains": _attack_domains,
    "parts": _attack_parts,
}

# Victims ------------------------------------------------------------------------------------------


def make_hostile(sound: Path, hostile: Path, rng: random.Random) -> str:
    """Copies an export and attacks its models, with checksums that are right; returns how."""
    shutil.rmtree(hostile, ignore_errors=True)
    shutil.copytree(sound, hostile)
    what = rng.choice((*_ATTACKS, "parts", "damage", "damage", "disguise"))
    spec = json.loads((hostile / "policy_spec.json").read_text())
    state = rng.getstate()
    for name in ("model.onnx", "model_sample.onnx"):
        path = hostile / name
        rng.setstate(state)
        if what == "damage":
            path.write_bytes(_damaged(path.read_bytes(), rng))
        elif what == "disguise":
            path.write_bytes(disguise(path.read_bytes()))
        else:
            with contextlib.suppress(ValueError):  # numbers that no field holds
                attacked = _ATTACKS[what](onnx.load(path), rng)
                path.write_bytes(attacked.SerializeToString())
        spec["sha256"][name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (hostile / "policy_spec.json").write_text(json.dumps(spec))
    return what


def _import_and_act(folder: Path) -> None:
    policy = import_policy(folder / "model.onnx")
    _act(lambda: policy.compute_actions(_observations(policy.observation_space.shape)))


def _play(folder: Path) -> None:
    try:
        policy = OnnxPolicy(folder)
    except (ValueError, FileNotFoundError) as error:
        raise ExportError(str(error)) from error
    shape = policy.spec["observation_space"]["shape"]
    _act(lambda: policy.act(_observations(shape)))


def _serve(folder: Path) -> None:
    asyncio.run(
        ModelRepository({"agent": folder}, DEFAULT_LIMITS._replace(max_seconds=_SECONDS)).load()
    )


def _act(act: Callable[[], Any]) -> None:
    """Acts once; a model may refuse that, by whatever ONNX Runtime raises."""
    with contextlib.suppress(Exception):
        act()


def _observations(shape: Sequence[int]) -> np.ndarray:
    return np.zeros((2, *shape), np.float32)


def onnx_loaders() -> dict[str, Callable[[Path], None]]:
    """Returns what loads the folder of an export, by the name of the victim.

    The limits of a call are lowered for this process, so that one that reaches them is seen to end
    within what `fuzz_attacks` allows a file.
    """
    player.CALL_SECONDS = _SECONDS
    player._INITIAL_STATE = 400_000_000
    return {"onnx imported": _import_and_act, "onnx played": _play, "onnx served": _serve}
