"""LiteRT files over the export matrix: `python -m benchmarks.litert`.

Exports one policy of each kind of space and model with float32, float16 and int8 weights, and
prints how well each file agrees, its size, and the share of greedy actions that are the policy's on
1000 observations that the policy visits in an environment of random transitions in its spaces. What
cannot be converted is listed with its reason. `--only TEXT` takes combinations whose name has it;
`--units N` widens the layers (4 are too few for int8, which leaves small arrays as they are).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.conformance import Combination, make_policy
from tfpolicies.errors import ExportError
from tfpolicies.models.spaces import leaves, pick

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


class Wandering(gym.Env):
    """Goes to a random place, a step that the action chooses: so what is visited hangs on both."""

    def __init__(self, observation_space: gym.Space, action_space: gym.Space) -> None:
        self.observation_space = observation_space
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.observation_space.seed(0 if seed is None else seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        flat = gym.spaces.flatten(self.action_space, action)
        for _ in range(int(np.abs(np.nan_to_num(flat)).sum()) % 3):
            self.observation_space.sample()
        return self.observation_space.sample(), 0.0, False, False, {}


def visited(policy: Any) -> Any:
    """Returns a batch of observations that the policy visits, nested as its space is."""
    env = Wandering(policy.observation_space, policy.action_space)
    session, seen = policy.session(), []
    obs, _ = env.reset(seed=0)
    for _ in range(ROWS):
        seen.append(obs)
        obs, *_ = env.step(session.act(obs))
    rows = [
        np.stack([np.asarray(pick(o, x.path)) for o in seen]) for x in leaves(env.observation_space)
    ]
    return policy.program.ports and _nested(env.observation_space, iter(rows))


def _nested(space: Any, rows: Any) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {key: _nested(part, rows) for key, part in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_nested(part, rows) for part in space)
    return next(rows)


def wide_policy(combination: Combination, units: int) -> Any:
    """Returns a policy of the combination whose layers have `units` units."""
    from benchmarks import conformance

    model = dict(conformance.MODELS[combination.model])
    sizes = {"fcnet_hiddens": [units, units], "lstm_cell_size": units, "attention_dim": units}
    if "conv_filters" in model:
        sizes["post_fcnet_hiddens"] = [units]
    kept = {key: value for key, value in sizes.items() if key in model}
    return make_policy(combination, model={**model, **kept})


def measure(combination: Combination, units: int) -> tuple[list[str], str]:
    """Returns the cells of a row, and why there are none."""
    policy = wide_policy(combination, units)
    seen, cells = visited(policy), []
    for weights in WEIGHTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = policy.export_model(folder, litert=weights, observations=seen)
            except ExportError as error:
                return cells, f"{combination}, {weights}: {error}"
            size = result.path.stat().st_size / 1024
            share = result.agreement.equal_actions
            cells += [f"{result.parity.largest_difference:.1e}", f"{size:.0f} kB", f"{share:.1%}"]
    return cells, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--units", type=int, default=64)
    options = parser.parse_args()
    heads = [f"{name} {what}" for name in WEIGHTS for what in ("difference", "size", "equal")]
    print("|".join(["", "policy", *heads, ""]))
    print("|---" * (1 + len(heads)) + "|")
    refused = []
    for combination in COMBINATIONS:
        if options.only not in str(combination):
            continue
        cells, reason = measure(combination, options.units)
        refused += [reason] if reason else []
        print("|".join(["", str(combination), *cells, ""]), flush=True)
    for reason in refused:
        print(f"refused: {reason}")
    print(f"{len(refused)} refused")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
