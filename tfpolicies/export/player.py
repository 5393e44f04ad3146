"""Plays an exported policy: needs NumPy, ONNX Runtime and Gymnasium, and nothing else.

This file lies beside `model.onnx` as `play.py`. It never imports TensorFlow, Keras or the package
that made the export. As a program:

    python play.py --env CartPole-v1 --episodes 100 --seed 0

As a module:

    policy = OnnxPolicy("model.onnx")
    action = policy.act(observation)     # one observation or a batch [B, ...]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import onnxruntime

NOT_NEEDED = ("tensorflow", "keras", "tfpolicies")


class OnnxPolicy:
    """A policy in an ONNX file, described by the `policy_spec.json` beside it.

    Args:
        path: `model.onnx`, or the folder that holds it.
        sample: draw actions from the distribution instead of taking the most likely one.
        seed: seeds the draws; None for fresh ones.
        threads: how many threads one call may use.

    Raises:
        FileNotFoundError: if a file of the export is missing.
        ValueError: if the files do not belong together.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        sample: bool = False,
        seed: int | None = None,
        threads: int = 1,
    ) -> None:
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self.spec = _read_spec(folder / "policy_spec.json")
        signature = "sample" if sample else "serving_default"
        self.file = folder / self.spec["files"][signature]
        content = self.file.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.spec["sha256"][self.file.name]:
            raise ValueError(
                f"{self.file} is not the file that {folder / 'policy_spec.json'} describes; "
                "export the policy again."
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )
        ports = self.spec["signatures"][signature]
        self._inputs = [port for port in ports["inputs"] if port["name"] != "noise"]
        self._outputs = [port["name"] for port in ports["outputs"]]
        self.sample = sample
        self._rng = np.random.default_rng(seed)
        self._action_dtype = np.dtype(self.spec["action_space"]["dtype"])

    def act(self, obs: Any) -> Any:
        """Returns the action for one observation, or `[B, ...]` for a batch `[B, ...]` of them.

        Observations are nested as the environment's space is; actions are ready for it.
        """
        leaves, single = self._leaves(obs)
        noise = self.draw_noise(self._rng, len(leaves[0])) if self.sample else None
        actions = self.run(leaves, noise)["actions"].astype(self._action_dtype, copy=False)
        return actions[0] if single else actions

    def draw_noise(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """Draws the noise of `rows` actions, float32 `[rows, size]`."""
        size = (rows, self.spec["noise"]["size"])
        if self.spec["noise"]["kind"] == "normal":
            return rng.standard_normal(size, np.float32)
        tiny = np.finfo(np.float32).tiny
        return -np.log(np.maximum(rng.standard_exponential(size, np.float32), tiny))

    def run(
        self, leaves: Sequence[np.ndarray], noise: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Returns all outputs by name for a batch, one array `[B, ...]` per observation leaf."""
        feed = {port["name"]: x for port, x in zip(self._inputs, leaves, strict=True)}
        if noise is not None:
            feed["noise"] = noise
        return dict(zip(self._outputs, self._session.run(self._outputs, feed), strict=True))

    def batch(self, observations: Sequence[Any]) -> list[np.ndarray]:
        """Stacks single observations to one array `[B, ...]` per leaf."""
        rows = [self._leaves(obs)[0] for obs in observations]
        return [np.concatenate(parts) for parts in zip(*rows, strict=True)]

    def _leaves(self, obs: Any) -> tuple[list[np.ndarray], bool]:
        """Returns a batch per leaf, and whether `obs` was a single observation."""
        leaves, single = [], []
        for port in self._inputs:
            array = np.asarray(_pick(obs, port["path"]), port["dtype"])
            shape = tuple(port["shape"][1:])
            single.append(array.shape == shape)
            array = array[None] if single[-1] else array
            if array.shape[1:] != shape:
                raise ValueError(
                    f"{port['name']} must have the shape {list(shape)} or ['B', "
                    f"{', '.join(map(str, shape))}], got {list(array.shape)}."
                )
            leaves.append(array)
        if len(set(single)) > 1 or len({len(leaf) for leaf in leaves}) > 1:
            raise ValueError("All parts of an observation need the same batch size.")
        return leaves, single[0]


def _read_spec(path: Path) -> dict[str, Any]:
    spec = json.loads(path.read_text(encoding="utf-8"))
    kind, version = spec.get("format"), spec.get("format_version")
    if kind != "tfpolicies.policy_spec" or version != 1 or spec.get("artefact") != "onnx":
        raise ValueError(f"{path} does not describe an ONNX export of version 1.")
    return spec


def _pick(obs: Any, path: Sequence[str]) -> Any:
    for key in path:
        obs = obs[key] if isinstance(obs, Mapping) else obs[int(key)]
    return obs


class Played(NamedTuple):
    """The episodes that were played, in the order of their numbers."""

    returns: list[float]
    lengths: list[int]
    seconds: float


class _Seat:
    """One environment with its share of the episodes, fixed before the first step.

    A seat plays its episodes to their ends, so short episodes count no more than long ones.
    """

    def __init__(self, env: gym.Env, episodes: Sequence[int], seed: int) -> None:
        self.env = env
        self.finished: dict[int, tuple[float, int]] = {}
        self._left = list(reversed(episodes))
        self._seed = seed
        self._begin()

    def _begin(self) -> None:
        self.episode = self._left.pop()
        self.rng = np.random.default_rng([self._seed, self.episode])
        self.obs, _ = self.env.reset(seed=self._seed + self.episode)
        self._return, self._length = 0.0, 0

    def step(self, action: Any) -> bool:
        """Does one step; returns whether there is more to play."""
        self.obs, reward, terminated, truncated, _ = self.env.step(action)
        self._return += float(reward)
        self._length += 1
        if not (terminated or truncated):
            return True
        self.finished[self.episode] = (self._return, self._length)
        if not self._left:
            return False
        self._begin()
        return True


def play(
    policy: OnnxPolicy,
    env: str,
    episodes: int,
    *,
    seed: int = 0,
    num_envs: int = 16,
    render: bool = False,
    env_config: Mapping[str, Any] | None = None,
) -> Played:
    """Plays whole episodes in several environments that are stepped together.

    Episode k is reset with `seed + k` and has noise of its own, so the result does not depend on
    `num_envs` (but for rounding in batches of another size).

    Args:
        policy: what acts.
        env: a Gymnasium id, `module:id` to import a module first, or `module:Class`.
        episodes: how many, at least 1.
        seed: of environments and noise, at least 0.
        num_envs: at most so many environments at once; a rendered one is alone.
        render: show a window.
        env_config: keywords for a Gymnasium id; for a class the dict that it is called with.
    """
    if episodes < 1 or num_envs < 1 or seed < 0:
        raise ValueError(
            f"episodes and num_envs must be at least 1 and seed at least 0, got {episodes}, "
            f"{num_envs} and {seed}."
        )
    count = 1 if render else min(num_envs, episodes)
    started = time.perf_counter()
    config = {**(env_config or {}), **({"render_mode": "human"} if render else {})}
    envs = [make_env(env, config) for _ in range(count)]
    try:
        seats = [_Seat(e, range(i, episodes, count), seed) for i, e in enumerate(envs)]
        _play_to_the_end(policy, seats)
    finally:
        for made in envs:
            made.close()
    finished = {number: ended for seat in seats for number, ended in seat.finished.items()}
    returns, lengths = zip(*(finished[number] for number in range(episodes)), strict=True)
    return Played(list(returns), list(lengths), time.perf_counter() - started)


def make_env(env: str, env_config: Mapping[str, Any]) -> gym.Env:
    """Makes an environment by its Gymnasium id, `module:id` or `module:Class`."""
    module, _, name = env.rpartition(":")
    create = getattr(importlib.import_module(module), name, None) if module else None
    return gym.make(env, **env_config) if create is None else create(dict(env_config))


def _play_to_the_end(policy: OnnxPolicy, seats: Sequence[_Seat]) -> None:
    dtype = policy._action_dtype
    active = list(seats)
    while active:
        noise = None
        if policy.sample:
            noise = np.concatenate([policy.draw_noise(seat.rng, 1) for seat in active])
        outputs = policy.run(policy.batch([seat.obs for seat in active]), noise)
        actions = outputs["actions"].astype(dtype, copy=False)
        active = [seat for seat, action in zip(active, actions, strict=True) if seat.step(action)]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plays an exported policy with ONNX Runtime.")
    parser.add_argument("--env", required=True, help="Gymnasium id, module:id or module:Class")
    parser.add_argument("--env-config", type=json.loads, default={}, help="its settings, as JSON")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-envs", type=int, default=16, help="stepped together, at most")
    parser.add_argument("--sample", action="store_true", help="draw actions instead of the best")
    parser.add_argument("--render", action="store_true", help="show a window; one environment")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--model", default=None, help="model.onnx or its folder; default: here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Plays as the command line says and prints the mean return; returns 0."""
    options = _arguments(argv)
    policy = OnnxPolicy(options.model or Path(__file__).parent, sample=options.sample)
    if ":" in options.env and "" not in sys.path:  # an isolated interpreter finds no module here
        sys.path.append(str(Path.cwd()))
    played = play(
        policy,
        options.env,
        options.episodes,
        seed=options.seed,
        num_envs=options.num_envs,
        render=options.render,
        env_config=options.env_config,
    )
    loaded = [name for name in NOT_NEEDED if name in sys.modules]
    returns, steps = played.returns, sum(played.lengths)
    mean = float(np.mean(returns))
    if options.json:
        report = {
            "env": options.env,
            "episodes": options.episodes,
            "seed": options.seed,
            "sample": options.sample,
            "model": policy.file.name,
            "mean_return": mean,
            "min_return": min(returns),
            "max_return": max(returns),
            "returns": returns,
            "lengths": played.lengths,
            "steps": steps,
            "seconds": played.seconds,
            "loaded": loaded,
        }
        print(json.dumps(report))
        return 0
    print(
        f"played {options.env} with {policy.file.name} through ONNX Runtime "
        f"{onnxruntime.__version__}: {steps} steps in {played.seconds:.1f} s"
    )
    print(f"loaded in this process: {', '.join(loaded) or 'neither tensorflow nor tfpolicies'}")
    print(
        f"mean return {mean:.1f} over {options.episodes} episodes "
        f"(min {min(returns):g}, max {max(returns):g})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
