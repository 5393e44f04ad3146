"""Compares updates of SAC with Stable-Baselines3's: the same weights, rows and settings, no noise.

`python -m benchmarks.updates.sac_updates --help` lists the options. Both do 60 updates of 256 rows
of LunarLanderContinuous, drawn from random play. Both do them twice: with the gradients of actor
and critics from the same weights, `update_order="together"`, and with the actor updated after the
critics, `update_order="critics_first"`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.learning import peer_settings
from tfpolicies import SACConfig, SACTF2Policy, SampleBatch
from tfpolicies.algorithms.tuned_hyperparameters import get_tuned_settings
from tools import peers

ENV = "LunarLanderContinuous-v3"
STEPS, UPDATES, ROWS = 5000, 60, 256
LOSSES = ("actor_loss", "critic_loss", "alpha_loss")
SHOWN = (1, 2, 10, UPDATES)
WHO = ("ours", "theirs")
ORDERS = {"together": ["--together"], "critics_first": []}  # and their flags
FIRST, MOST = 10, 1e-4  # updates after which rounding shows, and what it may be before


class Silent:
    """A generator whose standard normal numbers are 0.

    Args:
        inner: what gives all else.
    """

    def __init__(self, inner: np.random.Generator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def standard_normal(self, size: Any, dtype: Any) -> np.ndarray:
        """Returns zeros."""
        return np.zeros(size, dtype)


def played() -> dict[str, np.ndarray]:
    """Returns the transitions of random play, by column."""
    env = gym.make(ENV)
    env.action_space.seed(0)
    rows: dict[str, list[Any]] = {}
    obs, _ = env.reset(seed=0)
    for _ in range(STEPS):
        action = env.action_space.sample()
        reached, reward, terminated, truncated, _ = env.step(action)
        values = (obs, action, np.float32(reward), terminated, reached)
        for name, x in zip(("obs", "actions", "rewards", "terminateds", "new_obs"), values,
                           strict=True):  # fmt: skip
            rows.setdefault(name, []).append(x)
        obs = env.reset()[0] if terminated or truncated else reached
    return {name: np.stack(values) for name, values in rows.items()}


def policy_of(settings: dict[str, Any]) -> SACTF2Policy:
    """Returns a policy whose weights are shaken, so that no output begins near 0."""
    env = gym.make(ENV)
    config = SACConfig().update_from_dict(settings).framework(inference="tf").debugging(seed=0)
    policy = SACTF2Policy(env.observation_space, env.action_space, config.to_dict())
    rng = np.random.default_rng(1)
    weights = policy.get_weights()
    shaken = {key: w + np.float32(rng.normal(0, 0.05, w.shape)) for key, w in weights.items()}
    policy.set_weights({**shaken, "temperature/layer_0/log_alpha": np.float32(0.0)})
    policy.update_target(tau=1.0)
    policy.driver.state.learning_rng = Silent(policy.driver.state.learning_rng)
    return policy


def updated(policy: SACTF2Policy, rows: dict[str, np.ndarray], drawn: np.ndarray) -> np.ndarray:
    """Returns the losses of each update, `[updates, 3]`."""
    losses = []
    for chosen in drawn:
        batch = {name: x[chosen] for name, x in rows.items()}
        result = policy.learn_on_batch(SampleBatch({**batch, "weights": np.ones(ROWS, "f4")}))
        policy.update_target()
        losses.append([float(result["learner_stats"][name]) for name in LOSSES])
    return np.array(losses)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if losses of the first updates are further apart than `MOST`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=peers.PEERS)
    options = parser.parse_args(argv)
    python = peers.interpreter(peers.SB3, options.peers.absolute())
    settings = get_tuned_settings("SAC", ENV)
    settings.pop("lr_schedule")
    settings["optimizer"] = {"epsilon": 1e-12}  # which the bias correction scales in Keras alone
    rows = played()
    drawn = np.random.default_rng(2).integers(0, STEPS, (UPDATES, ROWS))
    ended = np.flatnonzero(rows["terminateds"])
    drawn[:, :20] = np.random.default_rng(3).choice(ended, (UPDATES, 20))
    policies = {order: policy_of({**settings, "update_order": order}) for order in ORDERS}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "given.npz")
        arguments = peer_settings.arguments("SAC", settings, STEPS)
        arguments["policy_kwargs"].pop("activation_fn")
        weights = policies["together"].get_weights()  # those of the other are the same
        inputs = {f"weights/{key}": w for key, w in weights.items()}
        inputs |= {f"rows/{name}": x for name, x in rows.items()}
        np.savez(file, env=ENV, arguments=json.dumps(arguments), drawn=drawn, **inputs)
        command = [str(python), str(Path(__file__).with_name("peer_sb3_updates.py")), str(file)]
        theirs = {
            order: np.array(json.loads(subprocess.check_output([*command, *flags])))
            for order, flags in ORDERS.items()
        }
    ours = {order: updated(policy, rows, drawn) for order, policy in policies.items()}
    table = Table("update", "loss", *(f"{who}, {order}" for order in ORDERS for who in WHO))
    for update in SHOWN:
        for i, loss in enumerate(LOSSES):
            values = (x[order][update - 1, i] for order in ORDERS for x in (ours, theirs))
            table.add_row(str(update), loss, *(f"{x:.6g}" for x in values))
    Console(width=120).print(table)
    apart = {order: _apart(ours[order], theirs[order]) for order in ORDERS}
    for order, by_update in apart.items():
        print(
            f"{order}: at most {by_update[:FIRST].max():.1e} apart in {FIRST} updates, "
            f"{by_update.max():.1e} in {UPDATES}, relative to max(1, |loss|)"
        )
    return int(max(x[:FIRST].max() for x in apart.values()) > MOST)


def _apart(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Returns the largest difference of each update."""
    return np.max(np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs)), axis=1)


if __name__ == "__main__":
    sys.exit(main())
