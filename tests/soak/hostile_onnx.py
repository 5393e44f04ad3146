"""Hostile ONNX files for `fuzz_attacks`: built ones and damaged ones.

`tests/importers/test_hostile_onnx.py` has models of other domains and models whose work depends on
their inputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from helpers.onnx_graphs import constant, disguise, graph_before, value
from soak.attempt import damage_bytes
from soak.fuzz_states import renew
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
    node, few = helper.make_node, min(n, 3 * 10**6) // 50
    values = {
        "n": np.int64([n]),
        "m": np.int64(n),
        "one": np.int64(1),
        "zero": np.int64(0),
        "ones": np.ones(3, "f"),
        "pads": np.int64([0, n]),
        "image": np.ones((1, 1, 2, 2), "f"),
        "to": np.int64([1, 1, 1000, n // 1000]),
        "nine": np.zeros(9, np.int64),
        "bits": np.array([0, 1], "f"),
        "rows": np.ones((few, 1), "f"),
        "columns": np.ones((1, few), "f"),
        "wide": np.ones((9, 3000), "f"),
        "many": np.zeros(99_999, "i8"),
        "square": np.int64([4000, 4000]),
        "line": np.int64([1, 1, 10**6]),
    }
    ways: tuple[list[Node], ...] = (
        [node("ConstantOfShape", ["n"], ["big"])],
        [node("Expand", ["one", "n"], ["big"])],
        [node("Tile", ["ones", "n"], ["big"])],
        [node("Range", ["zero", "m", "one"], ["big"])],
        [node("Pad", ["ones", "pads"], ["big"])],
        [node("Resize", ["image", "", "", "to"], ["big"])],
        [node("OneHot", ["nine", "m", "bits"], ["big"])],
        [node("Mul", ["rows", "columns"], ["big"])],
        [node("Gather", ["wide", "many"], ["big"])],
        [
            node("ConstantOfShape", ["square"], ["matrix"]),
            node("MatMul", ["matrix", "matrix"], ["again"]),
            node("MatMul", ["again", "again"], ["big"]),
        ],
        [
            node("ConstantOfShape", ["line"], ["signal"]),
            node("AveragePool", ["signal"], ["big"], kernel_shape=[10**5], pads=[99_999] * 2),
        ],
        [
            node("ConstantOfShape", ["n"], ["zeros"]),
            node("Cast", ["zeros"], ["none"], to=TensorProto.BOOL),
            node("Not", ["none"], ["all"]),
            node("NonZero", ["all"], ["big"]),
        ],
    )
    nodes = rng.choice(ways)
    read = {name for step in nodes for name in step.input} & values.keys()
    constants = [constant(name, values[name]) for name in sorted(read)]
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
    name: globals()[f"_attack_{name}"] for name in ("sizes", "loops", "parts")
}

# Victims ------------------------------------------------------------------------------------------


def make_hostile(sound: Path, hostile: Path, rng: random.Random) -> str:
    """Copies an export and attacks its models, with checksums that are right; returns how."""
    renew(sound, hostile)
    what = rng.choice((*_ATTACKS, "parts", "damage", "damage", "disguise"))
    spec = json.loads((hostile / "policy_spec.json").read_text())
    state = rng.getstate()
    for name in ("model.onnx", "model_sample.onnx"):
        path = hostile / name
        rng.setstate(state)
        if what == "damage":
            path.write_bytes(damage_bytes(path.read_bytes(), rng))
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
