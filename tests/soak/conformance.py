"""Every kind of policy against the contract: `python -m soak.conformance`.

Runs `tfpolicies.testing.check_policy` on all combinations of observation space, action space and
model that make sense, and prints what ran, what failed and the largest difference of an export.
`--from N` resumes at combination N; `--only TEXT` runs those whose name contains it.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from gymnasium import spaces

from tfpolicies import PGTF2Policy, PPOTF2Policy
from tfpolicies.errors import PolicyCheckError
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.spaces import leaves
from tfpolicies.testing import CheckReport, check_policy

IMAGE = spaces.Box(0, 255, (10, 10, 3), np.uint8)
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)

OBSERVATIONS: dict[str, spaces.Space] = {
    "box": VECTOR,
    "box2d": spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
    "discrete": spaces.Discrete(4),
    "discrete_start": spaces.Discrete(3, start=-1),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(3),
    "image": IMAGE,
    "dict": spaces.Dict(speed=VECTOR, gear=spaces.Discrete(3), camera=IMAGE),
    "tuple": spaces.Tuple(
        [spaces.Discrete(2), spaces.Dict(a=spaces.Box(0.0, 5.0, (1,), np.float64), b=VECTOR)]
    ),
    "dict_of_bits": spaces.Dict(lamps=spaces.MultiBinary([2, 2]), dial=VECTOR),
}

ACTIONS: dict[str, spaces.Space] = {
    "discrete": spaces.Discrete(3),
    "discrete_start": spaces.Discrete(4, start=2),
    "multi_discrete": spaces.MultiDiscrete([2, 4, 3]),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 0.5])),
    "box_half": spaces.Box(0.0, np.inf, (2,), np.float32),
    "box_int": spaces.Box(-1, 2, (2,), np.int64),
    "nested": spaces.Dict(
        move=spaces.Discrete(3),
        arm=spaces.Tuple([spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.MultiBinary(2)]),
    ),
}

_LAYERS = {"fcnet_hiddens": [4]}
_STEPS = {"max_seq_len": 5}


class Custom(keras.Model):
    """A model of a user's own, for any observations: all parts in one row, one hidden layer."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.logits = keras.layers.Dense(units)
        self.value = keras.layers.Dense(1)

    def call(self, inputs: Any) -> dict[str, Any]:
        parts = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
        flat = [keras.ops.reshape(x, (-1, int(np.prod(x.shape[1:])))) for x in parts]
        hidden = self.hidden(keras.ops.concatenate(flat, axis=-1))
        return {"action_dist_inputs": self.logits(hidden), "vf_preds": self.value(hidden)}


def custom_model(observation_space: spaces.Space, num_outputs: int) -> keras.Model:
    return Custom(num_outputs)


MODELS: dict[str, dict[str, Any]] = {
    "mlp": {**_LAYERS, "vf_share_layers": False},
    "cnn": {"conv_filters": [[2, 3, 2], [4, 3, 2]], "post_fcnet_hiddens": [4], **_LAYERS},
    "lstm": {
        **_LAYERS,
        **_STEPS,
        "use_lstm": True,
        "lstm_cell_size": 4,
        "lstm_use_prev_action": True,
        "lstm_use_prev_reward": True,
    },
    "gru": {**_LAYERS, **_STEPS, "use_gru": True, "lstm_cell_size": 4},
    "attention": {
        **_LAYERS,
        **_STEPS,
        "use_attention": True,
        "attention_dim": 4,
        "attention_head_dim": 4,
        "attention_position_wise_mlp_dim": 4,
        "attention_memory_inference": 3,
        "attention_memory_training": 3,
    },
    "masked": _LAYERS,
    "custom": {"custom_model": custom_model},
}


class Combination(NamedTuple):
    """One kind of policy."""

    observation: str
    action: str
    model: str

    def __str__(self) -> str:
        return f"{self.observation} x {self.action} x {self.model}"


def possible(combination: Combination) -> bool:
    """Whether the combination makes sense: convolutions need an image, masks a choice."""
    if combination.model == "cnn":
        return any(leaf.dtype == np.uint8 for leaf in leaves(OBSERVATIONS[combination.observation]))
    if combination.model == "masked":
        return ActionDistribution.for_space(ACTIONS[combination.action]).mask_size > 0
    return True


def every_combination() -> list[Combination]:
    result = itertools.starmap(Combination, itertools.product(OBSERVATIONS, ACTIONS, MODELS))
    return [combination for combination in result if possible(combination)]


def make_policy(combination: Combination, policy_class: Any = PPOTF2Policy, **config: Any) -> Any:
    """Makes a policy whose results depend on its inputs: its weights are disturbed."""
    observation_space = OBSERVATIONS[combination.observation]
    action_space = ACTIONS[combination.action]
    if combination.model == "masked":
        size = ActionDistribution.for_space(action_space).mask_size
        mask = spaces.Box(0, 1, (size,), np.int8)
        observation_space = spaces.Dict(observations=observation_space, action_mask=mask)
    settings = {"seed": 0, "jit_compile": False, "model": MODELS[combination.model], **config}
    policy = policy_class(observation_space, action_space, settings)
    rng = np.random.default_rng(1)
    policy.set_weights(
        [
            w + 0.2 * rng.standard_normal(w.shape) if w.dtype.kind == "f" else w
            for w in policy.get_weights().values()
        ]
    )
    return policy


def runs(options: argparse.Namespace) -> Iterator[tuple[int, Any, Combination]]:
    results = [
        (cls, combination)
        for combination in every_combination()
        for cls in (PPOTF2Policy, PGTF2Policy)
        # PG has no value: once per model and action space is enough
        if cls is PPOTF2Policy or combination.observation in ("box", "image")
    ]
    for number, (cls, combination) in enumerate(results):
        named = f"{cls.__name__} {combination}"
        if number >= getattr(options, "from") and options.only in named:
            yield number, cls, combination
            if number + 1 >= options.to:
                return


def largest_difference(report: CheckReport) -> float:
    """Returns the figure in the note of the check `exports`."""
    notes = {result.check: result.note for result in report.results}
    match = re.search(r"largest difference (\S+)", notes.get("exports", ""))
    return float(match.group(1)) if match else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", type=int, default=0, metavar="N")
    parser.add_argument("--to", type=int, default=sys.maxsize, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--no-exports", action="store_true")
    options = parser.parse_args()
    passed, failed, worst, started = 0, [], 0.0, time.perf_counter()
    for number, cls, combination in runs(options):
        begun, outcome = time.perf_counter(), "ok"
        try:
            policy = make_policy(combination, cls)
            report = check_policy(policy, exports=not options.no_exports)
            worst = max(worst, largest_difference(report))
            passed += 1
        except PolicyCheckError as error:
            failed.append(f"{number}: {cls.__name__} {combination}")
            outcome = f"FAILED\n{error}\n"
        except Exception as error:
            failed.append(f"{number}: {cls.__name__} {combination}")
            outcome = f"FAILED to be made: {type(error).__name__}: {error}\n"
        seconds = time.perf_counter() - begun
        print(f"{number:4d} {cls.__name__} {combination}: {seconds:.1f} s {outcome}", flush=True)
        keras.utils.clear_session()
    print(
        f"{passed + len(failed)} combinations in {time.perf_counter() - started:.0f} s: {passed} "
        f"passed, {len(failed)} failed; largest difference of an export {worst:.1e}"
    )
    for line in failed:
        print(f"failed {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
