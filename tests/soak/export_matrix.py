"""Exports of trained policies, sound and faulty: `python -m soak.export_matrix`.

Trains each kind of network with each algorithm that takes it, exports it in every format, and
prints how far the export is from the policy and, where the two are not close, how far both are from
the policy in double precision. Then it plants faults: the policy is compared with exports of a copy
that has one kernel entry off by 1 % (the largest of each layer), another activation, no filter, or
that forgets its memory. Exits with 1 if a sound export was refused, or a faulty one was taken whose
outputs in double precision differ by more than 3e-6: what changes less is rounding.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from helpers.scripts import parse_options
from tfpolicies import (
    A2CConfig,
    DDPGConfig,
    DQNConfig,
    MARWILConfig,
    PGConfig,
    PPOConfig,
    SACConfig,
    TD3Config,
)
from tfpolicies.errors import ExportError
from tfpolicies.export.job import ExportJob
from tfpolicies.export.litert_writer import export_litert
from tfpolicies.export.onnx_writer import export_onnx
from tfpolicies.export.reference_runtime import ReferenceRuntime
from tfpolicies.export.saved_model_writer import export_saved_model
from tfpolicies.export.verify import Comparison, draw_random_inputs

ROUNDING = 3e-6
CONVOLUTIONS = {"conv_filters": [[8, [4, 4], 2], [16, [4, 4], 2], [32, [4, 4], 1]]}


class World(gym.Env):
    """Rewards the action that the observation names; 20 steps to an episode."""

    def __init__(self, config: Any) -> None:
        shape = config["shape"]
        image = len(shape) == 3
        kind: Any = np.uint8 if image else np.float32
        low, high = (0, 255) if image else (-1.0, 1.0)
        self.observation_space = spaces.Box(low, high, shape, kind)
        is_box = config.get("actions") == "box"
        self.action_space = spaces.Box(-1.0, 1.0, (2,)) if is_box else spaces.Discrete(3)

    def _observe(self) -> np.ndarray:
        self.now += 1
        space: Any = self.observation_space
        shape, kind = space.shape, space.dtype
        if kind == np.uint8:
            return self.np_random.integers(0, 256, shape, np.uint8)
        return self.np_random.uniform(-1.0, 1.0, shape).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.now = 0
        self.seen = self._observe()
        return self.seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        middle = 127.0 if self.seen.dtype == np.uint8 else 0.0
        best = 1.0 if float(self.seen.mean()) > middle else 0.0
        reward = -float(np.abs(np.mean(action) - best))
        self.seen = self._observe()
        return self.seen, reward, False, self.now >= 20, {}


SHAPES = {"image": (16, 16, 1), "stack": (16, 16, 4)}
DENSE = {"fcnet_hiddens": [64, 64]}
LSTM = {"use_lstm": True, "lstm_cell_size": 32, "max_seq_len": 8}
NETWORKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mlp": ("vector", DENSE, {}),
    "mlp, filtered": ("vector", DENSE, {"observation_filter": "MeanStdFilter"}),
    "cnn": ("image", CONVOLUTIONS, {}),
    "stacked frames": ("stack", CONVOLUTIONS, {}),
    "lstm": ("vector", LSTM, {}),
    "gru": ("vector", {"use_gru": True, "lstm_cell_size": 32, "max_seq_len": 8}, {}),
    "attention": ("vector", {"use_attention": True, "max_seq_len": 8}, {}),
    "image and lstm": ("image", {**CONVOLUTIONS, **LSTM}, {}),
}
ON_POLICY = {"PPO": PPOConfig, "PG": PGConfig, "A2C": A2CConfig, "MARWIL": MARWILConfig}
REPLAY = {"DQN": DQNConfig, "SAC": SACConfig, "TD3": TD3Config, "DDPG": DDPGConfig}
FORMS = {"SavedModel": export_saved_model, "ONNX": export_onnx, "LiteRT": export_litert}


def built(algo: str, network: str, activations: tuple[str, str] = ("tanh", "relu")) -> Any:
    """Returns an algorithm whose iterations are short; activations of units and convolutions."""
    kind, model, rollouts = NETWORKS[network]
    env = {"shape": SHAPES.get(kind, (6,)), "actions": "box" * (algo in ("SAC", "TD3", "DDPG"))}
    config = {**ON_POLICY, **REPLAY}[algo]().environment(World, env_config=env)
    config.rollouts(rollout_fragment_length=16, **rollouts).debugging(seed=1)
    config.framework("tf2", inference="tf", jit_compile=False)  # compiling would take most of it
    settings = {**model, "fcnet_activation": activations[0], "conv_activation": activations[1]}
    config.training(model=settings, **({"q_model_config": settings} if algo == "SAC" else {}))
    if algo in ON_POLICY:
        config.training(train_batch_size=256, lr=5e-4)
        if algo == "PPO":
            config.training(sgd_minibatch_size=64, num_sgd_iter=4)
    else:
        config.training(train_batch_size=64, lr=1e-3, num_steps_sampled_before_learning_starts=64)
        config.reporting(min_sample_timesteps_per_iteration=128)
    return config.build()


def export(form: str, policy: Any, folder: Path) -> Any:
    return FORMS[form](ExportJob(policy.program, policy.driver.acting.state.copy(), folder))


def sound(algo: str, network: str, iterations: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Trains and exports; yields a row per format."""
    algorithm = built(algo, network)
    for _ in range(iterations):
        algorithm.train()
    policy = algorithm.get_policy()
    for form in FORMS:
        row: dict[str, Any] = {"algo": algo, "network": network, "format": form}
        try:
            parity = export(form, policy, folder / f"{algo} {network} {form}").parity
            row["difference"] = parity.largest_difference
            every = [x for each in parity.differences.values() for x in each.values()]
            row["error"], row["own_error"] = (
                max(getattr(x, name) for x in every) for name in ("error", "own_error")
            )
        except ExportError as error:
            row["refused"] = str(error)[:300]
        yield row
    if algo == "PPO":
        yield from faulty(algorithm, network, folder)
    algorithm.stop()


def faulty(algorithm: Any, network: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Plants faults in copies of a trained policy; yields a row per format and fault."""
    policy = algorithm.get_policy()
    for fault, twin in faults(algorithm, network):
        effect = None if twin is None or "1 %" not in fault else effect_of(policy, twin)
        for form in FORMS:
            row = {"fault": fault, "effect": effect, "network": network, "format": form}
            try:
                verify_as(form, policy, twin, folder / f"fault {network} {form}")
                row["taken"] = effect is None or effect > ROUNDING
            except ExportError as error:
                row["refusal"] = str(error)[:200]
            yield row


def faults(algorithm: Any, network: str) -> Iterator[tuple[str, Any]]:
    policy = algorithm.get_policy()
    acting = {slot.key for slot in policy.program.layout.acting}
    for key, weights in policy.get_weights().items():
        if key in acting and weights.ndim > 1:
            twin, changed = policy.copy(), dict(policy.get_weights())
            changed[key] = weights.copy()
            largest = np.unravel_index(np.abs(weights).argmax(), weights.shape)
            changed[key][largest] *= 1.01
            twin.set_weights(changed)
            yield f"1 % of {key}", twin
    if network in ("mlp", "cnn", "stacked frames"):
        other = built("PPO", network, activations=("relu", "tanh"))
        other.get_policy().set_weights(policy.get_weights())
        yield "other activations", other.get_policy()
        other.stop()
    if "filtered" in network:
        other = built("PPO", "mlp")
        arrays = [x for key, x in policy.get_weights().items() if not key.startswith("filter")]
        other.get_policy().set_weights(arrays)
        yield "no filter", other.get_policy()
        other.stop()
    if policy.program.ports.is_recurrent:
        yield "forgets", None


def effect_of(policy: Any, twin: Any) -> float:
    """Returns the largest difference of two policies in double precision, as verification counts.

    That is relative to the largest number of its column, which counts as 1 if it is smaller.
    """
    program, rng = policy.program, np.random.default_rng(0)
    inputs, memory = draw_random_inputs(program.ports, 500, 1, rng), len(program.ports.states)
    rows = [x[:, 0] for x in inputs[: len(inputs) - memory]] + inputs[len(inputs) - memory :]
    explorer = program.spec.explorer
    noise = np.zeros((500, explorer.noise_size), np.float32)
    params = np.zeros(explorer.num_params, np.float32)
    acting = ReferenceRuntime(program, double_precision=True)
    one, other = (acting.run(x.driver.acting.state, rows, noise, params) for x in (policy, twin))
    pairs = [(one.dist_inputs, other.dist_inputs), (one.values, other.values)]
    pairs += zip(one.states, other.states, strict=True)
    numbers = [pair for pair in pairs if pair[0] is not None]
    return max(
        float((np.abs(a - b) / np.maximum(1.0, np.abs(a).max(axis=0))).max()) for a, b in numbers
    )


def verify_as(form: str, policy: Any, twin: Any, folder: Path) -> None:
    """Compares a policy with an export of another one; with its own that forgets, for None."""
    original = Comparison._run_artefact

    def given(self: Comparison, inputs: Any, *rest: Any) -> Any:
        states = {x.name for x in policy.program.ports.states}
        source = {k: np.zeros_like(x) if k in states else x for k, x in inputs.items()}
        return original(self, source if twin is None else inputs, *rest)

    compared = Comparison.__init__

    def made(self: Comparison, run: Any, program: Any, state: Any, *rest: Any) -> None:
        compared(self, run, policy.program, policy.driver.acting.state, *rest)

    Comparison._run_artefact, Comparison.__init__ = given, made  # type: ignore[method-assign]
    try:
        export(form, policy if twin is None else twin, folder)
    finally:
        Comparison._run_artefact, Comparison.__init__ = original, compared  # type: ignore[method-assign]


def cases(only: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    for network, (_, model, _) in NETWORKS.items():
        remembers = any(name in model for name in ("use_lstm", "use_gru", "use_attention"))
        for algo in ON_POLICY if remembers else {**ON_POLICY, **REPLAY}:
            if only(f"{algo} {network}"):
                yield algo, network


def main() -> None:
    only = ("", "part of an algorithm's and a network's name")
    options = parse_options(__doc__, iterations=20, only=only)
    bad = rows = 0
    with tempfile.TemporaryDirectory() as place:
        for algo, network in cases(lambda name: options.only in name):
            for row in sound(algo, network, options.iterations, Path(place)):
                print(json.dumps(row), flush=True)
                rows += 1
                bad += "refused" in row or row.get("taken", False)
    print(f"{rows} exports, {bad} of them judged wrongly", flush=True)
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
