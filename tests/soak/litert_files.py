"""LiteRT files over the export matrix: `python -m soak.litert_files`.

Exports trained policies, and one with random weights of each kind of space and model, with
float32, float16 and int8 weights. It prints how well each file agrees with its policy, its size,
and the share of greedy actions that are the policy's: on 1000 observations that a trained policy
visits, and on 1000 random elements of the space for the others. What cannot be converted is listed
with its reason. `--only TEXT` takes policies whose name has it; `--units N` sets the width of
layers (int8 leaves arrays of less than 1024 numbers as they are).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import keras
import numpy as np

from helpers.policy_matrix import MODELS, Combination, make_policy
from helpers.scripts import parse_options
from tfpolicies import PPOConfig, SACConfig
from tfpolicies.errors import ExportError

WEIGHTS = ("float32", "float16", "int8")
ROWS = 1000
COMBINATIONS = [
    *(Combination(obs, "discrete", "mlp") for obs in ("box", "box2d", "discrete_start")),
    *(Combination(obs, "discrete", "mlp") for obs in ("multi_discrete", "multi_binary", "tuple")),
    *(Combination("dict", action, "mlp") for action in ("discrete", "nested")),
    *(Combination("box", action, "mlp") for action in ("discrete_start", "multi_discrete")),
    *(Combination("box", action, "mlp") for action in ("multi_binary", "box", "box_half")),
    *(Combination("box", action, "mlp") for action in ("box_int", "nested")),
    *(Combination("image", action, "cnn") for action in ("discrete", "box")),
    Combination("dict", "nested", "cnn"),
    *(Combination(obs, "discrete", "lstm") for obs in ("box", "tuple", "image")),
    *(Combination(obs, "box", "gru") for obs in ("box", "dict")),
    *(Combination(obs, "discrete", "attention") for obs in ("box", "dict_of_bits")),
    *(Combination("box", action, "masked") for action in ("discrete", "multi_discrete")),
    *(Combination(obs, "nested", "custom") for obs in ("box", "dict")),
]


TRAINED: dict[str, tuple[Any, dict[str, Any]]] = {
    "CartPole-v1": (PPOConfig, {"train_batch_size": 1024, "lr": 1e-3}),
    "Acrobot-v1": (PPOConfig, {"train_batch_size": 1024, "lr": 1e-3}),
    "Pendulum-v1": (SACConfig, {}),
}
ITERATIONS = {PPOConfig: 15, SACConfig: 300}


def trained(env: str) -> tuple[Any, Any]:
    """Returns a policy after some training, and 1000 observations that it visits greedily."""
    kind, settings = TRAINED[env]
    config = kind().environment(env).rollouts(num_envs_per_worker=8).debugging(seed=0)
    algorithm = config.training(**settings).build()
    for _ in range(ITERATIONS[kind]):
        algorithm.train()
    policy, one = algorithm.get_policy(), gym.make(env)
    obs, seen = one.reset(seed=0)[0], []
    while len(seen) < ROWS:
        seen.append(obs)
        obs, _, ended, cut, _ = one.step(algorithm.compute_single_action(obs, explore=False))
        if ended or cut:
            obs = one.reset()[0]
    return policy, np.stack(seen)


def sampled(space: gym.Space) -> Any:
    """Returns 1000 elements of a space as one batch, nested as it is."""
    if isinstance(space, gym.spaces.Dict):
        return {key: sampled(part) for key, part in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(map(sampled, space))
    space.seed(0)
    return np.stack([np.asarray(space.sample()) for _ in range(ROWS)])


def wide_policy(combination: Combination, units: int) -> Any:
    model = dict(MODELS[combination.model])
    sizes = {"fcnet_hiddens": [units, units], "lstm_cell_size": units, "attention_dim": units}
    sizes["post_fcnet_hiddens"] = [units]
    return make_policy(combination, model=model | {k: x for k, x in sizes.items() if k in model})


def measure(name: str, policy: Any, seen: Any) -> tuple[list[str], list[str]]:
    """Returns the cells of a row, and what was refused and why."""
    cells, refused = [], []
    for weights in WEIGHTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = policy.export_model(folder, litert=weights, observations=seen)
            except ExportError as error:
                cells += ["refused", "", ""]
                refused.append(f"{name}, {weights}: {error}")
                continue
            size = result.path.stat().st_size / 1024
            share = result.agreement.equal_actions
            cells += [f"{result.parity.largest_difference:.1e}", f"{size:.0f} kB", f"{share:.1%}"]
    return cells, refused


def rows(options: argparse.Namespace) -> Iterator[tuple[str, Any, Any]]:
    for env in TRAINED:
        if options.only in env:
            yield env, *trained(env)
    for combination in COMBINATIONS:
        if options.only in str(combination):
            policy = wide_policy(combination, options.units)
            yield str(combination), policy, sampled(policy.observation_space)


def main() -> int:
    options = parse_options(__doc__, only="", units=64)
    heads = [f"{name} {what}" for name in WEIGHTS for what in ("difference", "size", "equal")]
    print("|".join(["", "policy", *heads, ""]))
    print("|---" * (1 + len(heads)) + "|")
    refused = []
    for name, policy, seen in rows(options):
        cells, reasons = measure(name, policy, seen)
        refused += reasons
        print("|".join(["", name, *cells, ""]), flush=True)
        keras.utils.clear_session()
    print(*refused, f"{len(refused)} refused", sep="\n")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
