"""Imports checkpoints that RLlib 2.10 makes, and compares what their policies do.

`python -m tools.import_rllib --help` lists the options. For each case of
`peer_rllib_checkpoints.py` and each of RLlib's TensorFlow frameworks, RLlib trains a little, saves,
and acts on 200 observations, in sequences of 20 for policies with a memory; then the checkpoint is
imported, without RLlib, and acts on the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tfpolicies import Policy
from tfpolicies.compat.import_rllib import import_checkpoint
from tfpolicies.models.spaces import leaves, unflatten
from tfpolicies.program.networks import NetworkHandle
from tools import peers

HERE = Path(__file__).parent
USUAL = ("mlp", "cnn", "lstm", "dqn", "sac")
MORE = (
    *("shared", "gaussian", "activated", "posts", "nested", "cnn_posts", "cnn_lstm", "float_lstm"),
    *(
        "dqn_rainbow",
        "dqn_plain",
        "dqn_parts",
        "dqn_shared",
        "dqn_posts",
        "dqn_cnn",
        "dqn_cnn_apart",
        "dqn_cnn_plain",
    ),
    *("sac_single", "sac_free", "sac_discrete", "sac_cnn"),
)
FRAMEWORKS = ("tf", "tf2")
OUTPUTS = ("actions", "action_dist_inputs", "vf_preds", "critic_values")
MOST = 1e-5


def made(python: Path, case: str, framework: str, folder: Path) -> Path:
    """Lets RLlib make a case, unless it is there; returns its folder."""
    place = folder / f"{case}-{framework}"
    if not (place / "expected.npz").exists():
        script = str(HERE / "peer_rllib_checkpoints.py")
        command = [str(python), script, case, framework, str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"RLlib did not make {case}, {framework}:\n{done.stderr[-3000:]}")
    return place


def differences(policy: Policy, expected: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns how far a policy is from what is expected, by output.

    A difference counts relative to max(1, |x|), |x| being the largest of its column, as for
    exports: images of 0 to 255 make large numbers, which RLlib rounds, too.

    Args:
        policy: an imported one.
        expected: what `peer_rllib_checkpoints.py` stored, `[steps, rows, ...]` each.
    """
    names = [leaf.name("obs") for leaf in leaves(policy.observation_space)]
    steps, rows = expected["actions"].shape[:2]
    memory = [np.stack([part] * rows) for part in policy.get_initial_state()]
    actions = np.zeros_like(expected["actions"][0])
    largest: dict[str, float] = {}
    for step in range(steps):
        obs = unflatten(policy.observation_space, [expected[name][step] for name in names])
        before: Any = {"prev_action_batch": actions}
        before["prev_reward_batch"] = expected["prev_rewards"][step]
        actions, memory, extras = policy.compute_actions(obs, memory, **before, explore=False)
        actual = {**extras, "actions": actions}
        if "critic_values" in expected:
            actual["critic_values"] = _critic_values(policy, obs, actions)
        for name in OUTPUTS:
            if name in expected:
                error = _error(actual[name], expected[name][step])
                largest[name] = max(largest.get(name, 0.0), error)
    return largest


def _critic_values(policy: Any, obs: Any, actions: np.ndarray) -> np.ndarray:
    """Returns what the critics of SAC make of actions."""
    inputs = {} if policy.dist_class.space.shape == () else {"actions": actions}
    with policy.program.lock:
        policy.program.load_model(policy.driver.state)  # whose variables are resident then
        functions = policy.program.functions
        critic = NetworkHandle(
            functions.networks["critic"].model, functions.network, training=False
        )
        return critic(obs, **inputs).numpy()


def _error(result: np.ndarray, right: np.ndarray) -> float:
    scale = np.maximum(1.0, np.abs(right.astype(np.float64)).max(axis=0))
    return float(np.max(np.abs(result - right) / scale))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a policy is not what it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="more networks than the usual five")
    parser.add_argument("--keep", type=Path, help="folder to keep what RLlib makes")
    parser.add_argument("--peers", type=Path, default=peers.PEERS)
    parser.add_argument("--rllib-python", type=Path)
    options = parser.parse_args(argv)
    python = options.rllib_python or peers.interpreter(peers.RLLIB, options.peers)
    table = Table("case", "framework", *OUTPUTS)
    worst = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for case in USUAL + MORE * options.all:
            for framework in FRAMEWORKS:
                place = made(python, case, framework, folder)
                (imported,) = import_checkpoint(place / "checkpoint").values()
                result = differences(imported.policy, dict(np.load(place / "expected.npz")))
                worst = max(worst, *result.values())
                shown = (f"{result[x]:.1e}" if x in result else "" for x in OUTPUTS)
                table.add_row(case, framework, *shown)
    Console().print(table)
    print(f"The largest difference is {worst:.1e}; allowed is {MOST:g}.")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
