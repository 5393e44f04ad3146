"""Hostile SavedModels, each tried by a child: `python -m soak.hostile_saved_models`.

A sound SavedModel is changed, half of the time by a few bytes of one of its files, half of the time
by an edit of its protobuf: other operations of the allow-list, shapes, types, inputs, functions
that call themselves, other objects. `import_policy` then loads it and acts once, in a forked child
with limits of CPU and memory; a call that does not end is stopped after 5 s. Each must be loaded or
refused with an error of the package. Prints how often a child crashed, hung, or raised something
else, and exits with 1 if one did.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from helpers.children import Child
from helpers.factories import OBS, TWO
from helpers.scripts import parse_options
from soak.attempt import damage_bytes
from soak.fuzz_states import renew

CPU_SECONDS, MEMORY = 30, 12 << 30


def in_child(work: Callable[[], str], limit: float) -> tuple[str, float]:
    """Runs work in a forked child; returns what it said, or how it ended, and its seconds."""

    def run(say: Callable[..., None]) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        say(said=work()[:4000])

    began = time.monotonic()
    child = Child(run)
    is_in_time = child.hear(None, limit)
    words = {"said": f"crashed: {child.end()}", **child.words}
    return (words["said"] if is_in_time else "hung"), time.monotonic() - began


def make_sound(folder: Path) -> None:
    """Writes a SavedModel that knows variables, a loop, a branch and a string-free graph."""
    import tensorflow as tf

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            rng = np.random.default_rng(0)
            self.kernel = tf.Variable(rng.normal(size=(3, 4)).astype(np.float32))
            self.last = tf.Variable(rng.normal(size=(4, 2)).astype(np.float32))

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="obs")])
        def act(self, obs: Any) -> Any:
            x = tf.tanh(obs @ self.kernel)
            for _ in tf.range(3):
                x = x * 0.9 + tf.nn.relu(x)
            x = tf.cond(tf.reduce_sum(x) > 0.0, lambda: x, lambda: tf.reverse(x, [0]))
            return {"logits": tf.concat([x, x], 1)[:, :4] @ self.last}

    model = Model()
    tf.saved_model.save(model, str(folder), signatures={"serving_default": model.act})


def change_bytes(folder: Path, rng: random.Random) -> str:
    path = rng.choice([x for x in folder.rglob("*") if x.is_file() and x.stat().st_size])
    path.write_bytes(damage_bytes(path.read_bytes(), rng))
    return f"damage in {path.name}"


_SIZES = (0, 1, -1, -2, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63), 7)


def edit_protobuf(folder: Path, rng: random.Random) -> str:
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    from tfpolicies.importers.allowed_ops import ALLOWED_OPERATIONS

    path = folder / "saved_model.pb"
    model = SavedModel.FromString(path.read_bytes())
    graph = model.meta_graphs[0]
    functions = list(graph.graph_def.library.function)
    objects = graph.object_graph_def
    kinds = ["op", "input", "shape", "type", "const", "drop", "call", "object", "signature", "attr"]
    edits = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        kind = rng.choice(kinds)
        function = rng.choice(functions)
        node = rng.choice(function.node_def) if function.node_def else None
        if node is None:
            continue
        edits.append(f"{kind} of {node.op}")
        if kind == "op":
            node.op = rng.choice(sorted(ALLOWED_OPERATIONS))
        elif kind == "input" and node.input:
            others = [f"{x.name}:output:0" for x in function.node_def]
            others += [x.name for x in function.signature.input_arg] + ["nowhere:y:0", "^nowhere"]
            node.input[rng.randrange(len(node.input))] = rng.choice(others)
        elif kind == "drop":
            function.node_def.remove(node)
        elif kind in ("shape", "type", "attr", "call") and node.attr:
            value = node.attr[rng.choice(sorted(node.attr))]
            if kind == "type":
                value.type = rng.randrange(0, 30)
            elif kind == "attr":
                value.i = rng.choice(_SIZES)
            elif kind == "call":
                value.func.name = rng.choice(functions).signature.name
            else:
                value.shape.dim.add().size = rng.choice(_SIZES)
        elif kind == "const":
            consts = [x for each in functions for x in each.node_def if x.op == "Const"]
            if consts:
                tensor = rng.choice(consts).attr["value"].tensor
                if rng.random() < 0.5:
                    tensor.tensor_shape.dim.add().size = rng.choice(_SIZES)
                elif rng.random() < 0.5:
                    tensor.dtype = rng.randrange(0, 30)
                else:
                    tensor.tensor_content = os.urandom(rng.choice([0, 1, 4, 8, 64]))
        elif kind == "object" and objects.nodes:
            chosen = rng.choice(objects.nodes)
            if chosen.children and rng.random() < 0.6:
                chosen.children[0].node_id = rng.choice([0, 1, -1, 99999, len(objects.nodes) - 1])
            elif chosen.HasField("variable"):
                chosen.variable.shape.dim.add().size = rng.choice(_SIZES)
                chosen.variable.dtype = rng.randrange(0, 30)
            else:
                chosen.CopyFrom(rng.choice(objects.nodes))
        elif kind == "signature":
            for signature in graph.signature_def.values():
                for info in (*signature.inputs.values(), *signature.outputs.values()):
                    info.tensor_shape.dim.add().size = rng.choice(_SIZES)
                    info.dtype = rng.randrange(0, 30)
    path.write_bytes(model.SerializeToString())
    return ", ".join(edits)


def attempt(folder: Path) -> str:
    import logging

    from tfpolicies import import_policy
    from tfpolicies.errors import TfPoliciesError
    from tfpolicies.export import player

    logging.disable(logging.CRITICAL)
    player.CALL_SECONDS = 5.0
    try:
        policy = import_policy(folder, observation_space=OBS, action_space=TWO)
        policy.compute_actions(np.zeros((2, 3), np.float32), explore=False)
    except TfPoliciesError as error:
        return f"refused: {type(error).__name__}"
    except BaseException as error:
        return f"other: {type(error).__name__}: {str(error)[:200]}"
    return "loaded"


def main() -> None:
    options = parse_options(__doc__, count=100, seed=0, limit=(60.0, "seconds for each"))
    import tensorflow as tf

    import tfpolicies.importers.import_policy  # noqa: F401

    rng, ends = random.Random(options.seed), Counter[str]()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as place:
        sound, hostile = Path(place, "sound"), Path(place, "hostile")
        in_child(lambda: (make_sound(sound), "made")[1], 120)
        versions = {"tensorflow": tf.__version__, "python": sys.version.split()[0]}
        print(json.dumps(versions), in_child(lambda: attempt(sound), 120)[0], flush=True)
        for case in range(options.count):
            renew(sound, hostile)
            change = rng.choice([change_bytes, edit_protobuf])
            what = change(hostile, rng)
            end, seconds = in_child(lambda: attempt(hostile), options.limit)
            slowest = max(slowest, seconds)
            ends[end.partition(":")[0]] += 1
            if not end.startswith(("loaded", "refused")):
                print(f"{case} ({what}): {end}", flush=True)
    print(f"{options.count} files: {dict(ends)}, slowest {slowest:.1f} s", flush=True)
    if set(ends) - {"loaded", "refused"}:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
