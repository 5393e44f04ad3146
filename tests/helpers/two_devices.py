"""Policies that learn in a process with two devices: `python -m helpers.two_devices KIND ...`."""

import contextlib
import json
import logging
import sys

import numpy as np
import tensorflow as tf
from gymnasium import spaces
from tensorflow.python.eager import context

from helpers import factories
from tfpolicies import DQNTF2Policy, PPOTF1Policy, PPOTF2Policy, SACTF2Policy
from tfpolicies.program import functions
from tfpolicies.program.compile_mode import CompileMode
from tfpolicies.testing import random_batch

IMAGES = {"obs": spaces.Box(0, 255, (12, 12, 1), np.uint8)}
CONVOLUTIONS = {**IMAGES, "model": {"conv_filters": [[2, 4, 4], [2, 3, 1]]}}
MEMORY = {"fcnet_hiddens": [3], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 4}
SESSION = {"tf_session_args": {"device_count": {"CPU": 2}}}
KINDS = {
    "loop": (PPOTF2Policy, {"jit_compile": "auto", "observation_filter": "MeanStdFilter"}),
    "step": (PPOTF2Policy, {"jit_compile": True, **CONVOLUTIONS}),
    "plain": (PPOTF2Policy, {"jit_compile": False, **CONVOLUTIONS}),
    "memory": (PPOTF2Policy, {"jit_compile": False, "model": MEMORY}),
    "targets": (DQNTF2Policy, {"jit_compile": False}),
    "networks": (SACTF2Policy, {"jit_compile": False, "actions": factories.PLANE}),
    "graph": (PPOTF1Policy, {"jit_compile": True, **SESSION}),
}
TRANSFERS = ("_Arg", "_DeviceArg", "_Send", "_EagerConst", "_Retval")


def list_operations(graphs):
    nodes = [node for graph in graphs for node in graph.node if node.op not in TRANSFERS]
    return sorted({f"{node.device[-5:]} {node.op}" for node in nodes})


def run(kind, num_gpus, default):
    """Acts and learns with a policy, and returns its numbers and its devices."""
    policy_class, config = KINDS[kind]
    context.context().enable_run_metadata()
    with tf.device(default) if default else contextlib.nullcontext():
        policy = factories.make(policy_class, num_gpus=num_gpus, lr=0.01, **config)
        batch = random_batch(policy, 12)
        policy._learner.discover_columns()
        if kind == "step":
            policy.program.updates.compile_mode = CompileMode.STEP
        acted = policy.compute_actions(batch["obs"], explore=False) if kind != "memory" else None
        acting = context.context().export_run_metadata().partition_graphs
        stats = policy.learn_epochs(batch, 2, 8, shuffle=False)["learner_stats"]
        graphs = context.context().export_run_metadata().partition_graphs
    resident = policy.program.runtime.functions.resident
    return {
        "mode": policy.program.updates.compile_mode.name,
        "variables": sorted({x.handle.device[-5:] for x in resident}),
        "operations": list_operations(graphs),
        "convolutions": [x for x in list_operations(acting) if "FusedConv2D" in x],
        "loss": stats.get("total_loss", stats.get("mean_td_error", 0.0)),
        "weights": sum(float(np.abs(x).sum()) for x in policy.get_weights().values()),
        "actions": np.ravel(acted.actions).tolist() if acted else [],
    }


def main():
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
    functions.choose_learner_device = lambda num_gpus: "/cpu:1" if num_gpus else "/cpu:0"
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tfpolicies").addHandler(handler)
    # On the second device, and on the first as if all that is not pinned were on a GPU.
    results = {kind: [run(kind, 1, None), run(kind, 0, "/cpu:1")] for kind in sys.argv[1:]}
    print(json.dumps({"kinds": results, "lines": lines}))


if __name__ == "__main__":
    main()
