"""Files of an earlier version: made once, loaded by every later one.

`python -m benchmarks.stored_formats make FOLDER` writes checkpoints of algorithms and policies, a
stash, a run folder and exports. `... play FOLDER` loads them all, acts and trains on, and prints a
digest of each array that comes of it. `... compare FOLDER --old REV` does that with two commits in
one environment; every digest must be equal, so that a change of the package changes no bit.

`tests/stored/` has such files of the versions that its `versions.json` names, and in `expected.npz`
what they gave then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnxruntime
import tensorflow as tf
from gymnasium import spaces

from benchmarks.old_and_new import checked_out
from tfpolicies import (
    Algorithm,
    DQNConfig,
    MultiAgentEnv,
    PolicyMap,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    TFPolicy,
)

Arrays = dict[str, Any]  # name -> array
OBS = spaces.Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = spaces.Box(-2.0, 2.0, (2,), np.float32)
ROWS = np.random.default_rng(0).uniform(-1.0, 1.0, (5, 3)).astype(np.float32)
NETWORK = {"fcnet_hiddens": [8]}


class Line(gym.Env):
    """Walks on a line; the nearer to the middle, the better."""

    observation_space = OBS
    action_space = ACTIONS

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._at, self._now = np.zeros(2, np.float32), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self._at, self._now = self.np_random.uniform(-1, 1, 2).astype(np.float32), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self._at = np.clip(self._at + 0.25 * np.asarray(action, np.float32), -1, 1)
        self._now += 1
        return self._seen(), -float(np.abs(self._at).sum()), False, self._now == 8, {}

    def _seen(self) -> np.ndarray:
        return np.array([*self._at, self._now / 8], np.float32)


class Corners(gym.Env):
    """`Line` with four actions instead of numbers."""

    observation_space = OBS
    action_space = spaces.Discrete(4)

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._line = Line()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self._line.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        steps = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)
        return self._line.step(steps[int(action)])


class Pair(MultiAgentEnv):
    """Two walkers, each on a line of its own."""

    observation_space = OBS
    action_space = spaces.Discrete(4)
    _agent_ids = ("left", "right")

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._walkers = {agent: Corners() for agent in self._agent_ids}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        seeds = {agent: None if seed is None else seed + i for i, agent in enumerate("lr")}
        found = {
            agent: walker.reset(seed=seeds[agent[0]])[0] for agent, walker in self._walkers.items()
        }
        return found, {}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        steps = {agent: self._walkers[agent].step(action) for agent, action in actions.items()}
        obs, rewards, over, cut, infos = (
            {agent: step[i] for agent, step in steps.items()} for i in range(5)
        )
        cut["__all__"] = all(cut.values())
        over["__all__"] = False
        return obs, rewards, over, cut, infos


def policy_of(agent_id: str, *args: Any, **kwargs: Any) -> str:
    """Maps each walker to the policy of its name."""
    return agent_id


# -- making -----------------------------------------------------------------------------------


def configs() -> dict[str, Any]:
    """Returns the config of each algorithm whose checkpoint is kept."""
    small = {"train_batch_size": 64, "model": NETWORK}
    ppo = {**small, "sgd_minibatch_size": 32, "num_sgd_iter": 2}
    found = {
        "ppo": PPOConfig().environment(Line).training(**ppo).rollouts(num_envs_per_worker=4),
        "lstm": PPOConfig()
        .environment(Corners)
        .training(**{**ppo, "model": {**NETWORK, "use_lstm": True, "lstm_cell_size": 4}})
        .framework(jit_compile=False),
        "dqn": DQNConfig().environment(Corners).training(**small, hiddens=[8]),
        "graph": PPOConfig().environment(Corners).training(**ppo).framework("tf"),
        "multi_agent": PPOConfig()
        .environment(Pair)
        .training(**ppo)
        .framework(jit_compile=False)
        .multi_agent(policies={"left", "right"}, policy_mapping_fn=policy_of),
    }
    found["ppo"].rollouts(observation_filter="MeanStdFilter")
    found["dqn"].training(num_steps_sampled_before_learning_starts=32)
    buffer = {"type": "MultiAgentReplayBuffer", "capacity": 128}
    found["dqn"].training(replay_buffer_config=buffer).framework(jit_compile=False)
    return {name: config.debugging(seed=3) for name, config in found.items()}


def make(folder: Path) -> None:
    """Writes everything, with the versions that it was made by."""
    folder.mkdir(parents=True)
    for name, config in configs().items():
        algorithm = config.build()
        for _ in range(2):
            algorithm.train()
        algorithm.save(folder / "algorithms" / name)
        algorithm.stop()
    policies = {
        "continuous": PPOTF2Policy(OBS, ACTIONS, {"seed": 1, "model": NETWORK}),
        "graph": PPOTF1Policy(OBS, ACTIONS, {"seed": 2, "model": NETWORK}),
        "memory": PPOTF2Policy(
            OBS, ACTIONS, {"seed": 3, "model": {**NETWORK, "use_gru": True, "lstm_cell_size": 4}}
        ),
    }
    for name, policy in policies.items():
        policy.export_checkpoint(folder / "policies" / name)
    policies["continuous"].export_model(folder / "exports" / "saved_model")
    policies["continuous"].export_model(folder / "exports" / "onnx", onnx=True)
    stash = PolicyMap(capacity=1, path=folder / "stash")
    for name in ("continuous", "memory"):
        stash[name] = policies[name]
    stash.close()
    learner = configs()["ppo"].build()
    learner.learn(128, run_dir=folder / "run", progress=False)
    learner.stop()
    for made in ("run/learning_curve.png", "run/events", "run/lock", "exports/onnx/play.py"):
        path = folder / made
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    names = ("tfpolicies", "tensorflow", "keras", "numpy", "onnxruntime")
    versions = {name: metadata.version(name) for name in names}
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
    np.savez_compressed(folder / "expected.npz", **arrays_of(folder))


# -- playing ----------------------------------------------------------------------------------


def played(folder: Path) -> Iterator[tuple[str, Arrays]]:
    """Loads everything, from a copy, and yields what acting and training on give."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(folder, Path(place) / "stored"))
        for kind, play in _KINDS.items():
            for path in sorted((copy / kind).iterdir()):
                yield f"{kind}/{path.name}", play(path)
        yield "run", _run(copy / "run")
        yield "stash", _stash(copy / "stash")


def _algorithm(path: Path) -> Arrays:
    config = configs()[path.name]
    algorithm = Algorithm.from_checkpoint(
        path,
        config={"env": config.env},
        policy_mapping_fn=policy_of if path.name == "multi_agent" else None,
    )
    try:
        return _trained_on(algorithm)
    finally:
        algorithm.stop()


def _trained_on(algorithm: Algorithm) -> Arrays:
    result = algorithm.train()
    found = {"return": np.float64(result["episode_reward_mean"])}
    for policy_id, policy in sorted(algorithm.worker.policy_map.items()):
        for key, array in policy.get_weights().items():
            found[f"{policy_id}/{key}"] = array
    return found


def _policy(path: Path) -> Arrays:
    return _acted(TFPolicy.from_checkpoint(path))


def _acted(policy: Any) -> Arrays:
    memory = [np.repeat(x[None], len(ROWS), axis=0) for x in policy.get_initial_state()]
    chosen = policy.compute_actions(ROWS, memory or None)
    return {"actions": chosen[0], **chosen[2]}


def _exported(path: Path) -> Arrays:
    if path.name == "onnx":
        session = onnxruntime.InferenceSession(path / "model.onnx")
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(None, {"obs": ROWS}), strict=True))
    (version,) = (found for found in path.iterdir() if found.name.isdigit())
    loaded = tf.saved_model.load(str(version))
    answers = loaded.signatures["serving_default"](obs=tf.constant(ROWS))
    return {name: tensor.numpy() for name, tensor in answers.items()}


def _run(path: Path) -> Arrays:
    algorithm = configs()["ppo"].build()
    try:
        learned = algorithm.learn(192, run_dir=path, progress=False)
        steps = {"steps": np.int64(learned.result["num_env_steps_sampled"])}
        return {**steps, **algorithm.get_policy().get_weights()}
    finally:
        algorithm.stop()


def _stash(path: Path) -> Arrays:
    stash = PolicyMap(capacity=1, path=path)
    try:
        found = {name: _acted(stash[name]) for name in sorted(stash)}
    finally:
        stash.close()
    return {f"{name}/{key}": x for name, arrays in found.items() for key, x in arrays.items()}


_KINDS: dict[str, Callable[[Path], Arrays]] = {
    "algorithms": _algorithm,
    "policies": _policy,
    "exports": _exported,
}


def arrays_of(folder: Path) -> Arrays:
    """Returns each array that `played` gives, by its whole name."""
    return {
        f"{name}/{key}": np.asarray(array)
        for name, arrays in played(folder)
        for key, array in arrays.items()
    }


def digests(folder: Path) -> dict[str, str]:
    """Returns a digest of the bits of each array that `played` gives, by name."""
    return {name: _digest(array) for name, array in arrays_of(folder).items()}


def _digest(array: np.ndarray) -> str:
    head = f"{array.dtype} {array.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


# -- comparing --------------------------------------------------------------------------------


def digests_of(tree: Path, folder: Path) -> dict[str, str]:
    """Returns the digests that the package of another tree gives, in a process of its own."""
    code = (
        "import json, sys, tfpolicies, benchmarks.stored_formats as s\n"
        "found = s.digests(s.Path(sys.argv[1]))\n"
        "print(json.dumps({'package': tfpolicies.__file__, 'digests': found}))"
    )
    home = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder.resolve())],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), home])},
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    if not Path(answer["package"]).is_relative_to(tree.resolve()):
        raise SystemExit(f"loaded {answer['package']} instead of {tree}")
    found: dict[str, str] = answer["digests"]
    return found


def main() -> int:
    """Makes, plays or compares; returns 1 where digests differ."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stored_formats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("make", "play", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--old", help="revision to compare with")
    parser.add_argument("--new", default="HEAD", help="revision that is compared")
    options = parser.parse_args()
    if options.what == "make":
        make(options.folder)
        return 0
    if options.what == "play":
        print(json.dumps(digests(options.folder), indent=2))
        return 0
    with checked_out(options.old) as old, checked_out(options.new) as new:
        one, other = (digests_of(tree, options.folder) for tree in (old, new))
    differing = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
    print(f"{len(one)} arrays of {options.old}, {len(other)} of {options.new}")
    print(f"{len(differing)} differ" + "".join(f"\n  {key}" for key in differing))
    return bool(differing)


if __name__ == "__main__":
    from benchmarks import stored_formats  # whose classes have names that checkpoints can say

    sys.exit(stored_formats.main())
