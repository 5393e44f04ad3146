"""Files of an earlier version: made once, loaded by every later one.

`python -m soak.stored_formats make FOLDER` writes checkpoints of algorithms and policies,
stashes, run folders and exports. `... play FOLDER` loads them all, acts and trains on, and prints a
digest of each array that comes of it. `... compare FOLDER --old REV` does that with two commits in
one environment; every digest must be equal, so that a change of the package changes no bit.

`tests/stored/<commit>/` has the files that a commit wrote. Its `versions.json` names the commit
and the versions it ran with, and its `expected.npz` has what the files gave then.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
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

import tfpolicies
from tfpolicies import Algorithm, MultiAgentEnv, PolicyMap, PPOTF1Policy, PPOTF2Policy, TFPolicy
from tfpolicies.cli import main as run_command
from tfpolicies.connectors import ClipActions, FrameStack
from tfpolicies.export.player import OnnxPolicy
from tools.commits import checked_out

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
        results = {
            agent: walker.reset(seed=seeds[agent[0]])[0] for agent, walker in self._walkers.items()
        }
        return results, {}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        steps = {agent: self._walkers[agent].step(action) for agent, action in actions.items()}
        obs, rewards, over, cut, infos = (
            {agent: step[i] for agent, step in steps.items()} for i in range(5)
        )
        cut["__all__"] = all(cut.values())
        over["__all__"] = False
        return obs, rewards, over, cut, infos


def policy_of(agent_id: str, *args: Any, **kwargs: Any) -> str:
    return agent_id


# -- making -----------------------------------------------------------------------------------


STORED_AS = "benchmarks.stored_formats"
"""The module of these objects in the stored files."""

sys.modules.setdefault(STORED_AS, sys.modules[__name__])
for _object in (Line, Corners, Pair, policy_of):
    _object.__module__ = STORED_AS


def _configure(algorithm: str, env: Any, *, jit_compile: Any = False, **training: Any) -> Any:
    config = getattr(tfpolicies, f"{algorithm}Config")().environment(env)
    config = config.training(**{"train_batch_size": 64, "model": NETWORK, **training})
    return config.framework(jit_compile=jit_compile).debugging(seed=3)


def _map_pair(config: Any) -> Any:
    return config.multi_agent(policies={"left", "right"}, policy_mapping_fn=policy_of)


def configs() -> dict[str, Any]:
    """Returns the config of each algorithm whose checkpoint is kept."""
    ppo = {"sgd_minibatch_size": 32, "num_sgd_iter": 2}
    lstm = {**NETWORK, "use_lstm": True, "lstm_cell_size": 4}
    buffer = {"type": "MultiAgentReplayBuffer", "capacity": 128}
    dqn = {"num_steps_sampled_before_learning_starts": 32, "replay_buffer_config": buffer}
    results = {
        "ppo": _configure("PPO", Line, jit_compile="auto", **ppo),
        "lstm": _configure("PPO", Corners, **{**ppo, "model": lstm}),
        "dqn": _configure("DQN", Corners, hiddens=[8], **dqn),
        "graph": _configure("PPO", Corners, jit_compile="auto", **ppo).framework("tf"),
        "multi_agent": _map_pair(_configure("PPO", Pair, **ppo)),
    }
    results["ppo"].rollouts(num_envs_per_worker=4, observation_filter="MeanStdFilter")
    return results | _of_each_algorithm() | _of_each_feature()


def _of_each_algorithm() -> dict[str, Any]:
    """Returns a config of each algorithm in both modes; those of DQN and SAC keep their buffer."""
    on_policy = {"PPO": {"sgd_minibatch_size": 32, "num_sgd_iter": 2}, "A2C": {}, "PG": {}}
    on_policy |= {"MARWIL": {"moving_average_sqd_adv_norm_update_rate": 0.1}, "BC": {}}
    q_network = {"hiddens": [8], "target_network_update_freq": 32}
    actor_critic = {"policy_model_config": NETWORK, "q_model_config": NETWORK}
    off_policy = {
        "DQN": {**q_network, "store_buffer_in_checkpoints": True},
        "SAC": {**actor_critic, "store_buffer_in_checkpoints": True},
        "TD3": {"actor_hiddens": [8], "critic_hiddens": [8]},
        "DDPG": {"actor_hiddens": [8], "critic_hiddens": [8]},
    }
    configs = {}
    for framework in ("tf2", "tf"):
        for algorithm, settings in {**on_policy, **off_policy}.items():
            config = getattr(tfpolicies, f"{algorithm}Config")()
            config.environment(
                Corners if algorithm in ("A2C", "BC", "DQN", "MARWIL", "PG") else Line
            )
            config.framework(framework, jit_compile=False).training(train_batch_size=32, **settings)
            if algorithm in off_policy:
                config.training(num_steps_sampled_before_learning_starts=32)
                config.training(replay_buffer_config={"capacity": 128})
            if algorithm not in ("SAC", "TD3", "DDPG"):
                config.training(model=NETWORK)
            configs[f"{algorithm.lower()}_{framework}"] = config.debugging(seed=3)
    return configs


def _of_each_feature() -> dict[str, Any]:
    """Returns configs of what a checkpoint keeps besides weights: connectors, memory, noise."""
    ppo = {"sgd_minibatch_size": 32, "num_sgd_iter": 2}
    gru = {**NETWORK, "use_gru": True, "lstm_cell_size": 4, "lstm_use_prev_action": True}
    sizes = {"dim": 8, "num_heads": 2, "head_dim": 4, "memory_inference": 4}
    sizes |= {"memory_training": 4, "position_wise_mlp_dim": 8}
    attention = {f"attention_{name}": size for name, size in sizes.items()}
    rainbow = {"num_atoms": 5, "v_min": -4.0, "v_max": 0.0, "noisy": True, "n_step": 2}
    rainbow |= {"train_batch_size": 32, "num_steps_sampled_before_learning_starts": 32}
    prioritized = {"type": "MultiAgentPrioritizedReplayBuffer", "capacity": 128}
    rainbow |= {"replay_buffer_config": prioritized, "store_buffer_in_checkpoints": True}
    connectors = {"agent_connectors": [FrameStack(2)], "action_connectors": [ClipActions()]}
    pair = _map_pair(_configure("PPO", Pair, **ppo))
    return {
        "connectors": _configure("PPO", Line, **ppo).rollouts(**connectors),
        "gru": _configure("PPO", Corners, **ppo, model=gru),
        "attention": _configure(
            "PPO", Corners, **ppo, model={**NETWORK, "use_attention": True, **attention}
        ),
        "agents": pair.rollouts(observation_filter="MeanStdFilter"),
        "rainbow": _configure("DQN", Corners, hiddens=[8], **rainbow),
    }


def make(folder: Path, commit: str) -> None:
    """Writes everything, with the commit and the versions that it was made by."""
    folder.mkdir(parents=True)
    for name, config in configs().items():
        algorithm = config.build()
        for _ in range(2):
            algorithm.train()
        algorithm.save(folder / "algorithms" / name)
        algorithm.stop()
    gru = {**NETWORK, "use_gru": True, "lstm_cell_size": 4}
    policies = {
        "continuous": PPOTF2Policy(OBS, ACTIONS, {"seed": 1, "model": NETWORK}),
        "graph": PPOTF1Policy(OBS, ACTIONS, {"seed": 2, "model": NETWORK}),
        "memory": PPOTF2Policy(OBS, ACTIONS, {"seed": 3, "model": gru}),
    }
    for name, policy in policies.items():
        policy.export_checkpoint(folder / "policies" / name)
    policies["continuous"].export_model(folder / "exports" / "saved_model")
    policies["continuous"].export_model(folder / "exports" / "onnx", onnx=True)
    policies["memory"].export_model(folder / "exports" / "onnx_gru", onnx=True)
    policies["continuous"].export_model(folder / "exports" / "triton", layout="triton")
    stash = PolicyMap(capacity=1, path=folder / "stash")
    for name in ("continuous", "memory"):
        stash[name] = policies[name]
    stash.freeze("continuous")
    stash.close()
    learner = configs()["ppo"].build()
    learner.learn(128, run_dir=folder / "run", progress=False)
    learner.stop()
    with tempfile.TemporaryDirectory() as runs:
        what = ("CartPole-v1", "--algo", "PG", "--set", "model.fcnet_hiddens=[8]", "--seed", "3")
        _command(*what, "--steps", "400", "--run-dir", runs)
        (run,) = Path(runs).iterdir()
        shutil.copytree(run, folder / "command")
    for pattern in ("*/learning_curve.png", "*/events", "*/lock", "exports/**/play.py"):
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    names = ("tfpolicies", "tensorflow", "keras", "numpy", "onnxruntime")
    versions = {name: metadata.version(name) for name in names}
    versions = {"commit": commit, **versions}
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")
    np.savez_compressed(folder / "expected.npz", **arrays_of(folder))


# -- playing ----------------------------------------------------------------------------------


def stored_names(folder: Path) -> list[str]:
    """Returns what a folder holds: "run", "stash", "algorithms/ppo" and so on."""
    places = [folder / kind for kind in _PLAYERS if (folder / kind).is_dir()]
    listed = [sorted(place.iterdir()) if place.name in _LISTED else [place] for place in places]
    return [path.relative_to(folder).as_posix() for paths in listed for path in paths]


def play(folder: Path, name: str) -> Arrays:
    """Loads one thing that is stored, from a copy, and returns what it gives, by its whole name."""
    with tempfile.TemporaryDirectory() as place:
        # Links stay links: of folders without files, as `assets` is, nothing is kept.
        copy = Path(shutil.copytree(folder / name, Path(place) / name, symlinks=True))
        arrays = _PLAYERS[name.split("/")[0]](copy)
    return {f"{name}/{key}": np.asarray(array) for key, array in arrays.items()}


# Rounding grows with each step that replays: the fewer there are, the closer the numbers stay, and
# the runtime that happened to be the fastest rounds in its own way.
_STEADY = {
    "inference": "tf",
    "min_time_s_per_iteration": None,
    "min_sample_timesteps_per_iteration": 64,
}


def _algorithm(path: Path) -> Arrays:
    config = configs()[path.name]
    algorithm = Algorithm.from_checkpoint(
        path,
        config={"env": config.env, **_STEADY},
        policy_mapping_fn=policy_of if config.env is Pair else None,
    )
    with _running(algorithm):
        results = {"return": np.float64(algorithm.train()["episode_reward_mean"])}
        for policy_id, policy in sorted(algorithm.worker.policy_map.items()):
            results |= {f"{policy_id}/{key}": x for key, x in policy.get_weights().items()}
        return results


@contextlib.contextmanager
def _running(algorithm: Algorithm) -> Iterator[None]:
    try:
        yield
    finally:
        algorithm.stop()


def _policy(path: Path) -> Arrays:
    return _acted(TFPolicy.from_checkpoint(path))


def _acted(policy: Any) -> Arrays:
    memory = [np.repeat(x[None], len(ROWS), axis=0) for x in policy.get_initial_state()]
    chosen = policy.compute_actions(ROWS, memory or None)
    return {"actions": chosen[0], **chosen[2]}


def _exported(path: Path) -> Arrays:
    if path.name == "triton":
        path = path / "1"
    if (path / "model.onnx").exists():
        player = OnnxPolicy(path)
        acted = {"acted": np.stack([player.act(row) for row in ROWS])}
        return acted | _answers_of_onnx(path / "model.onnx") if path.name == "onnx" else acted
    (version,) = (result for result in path.iterdir() if result.name.isdigit())
    loaded = tf.saved_model.load(str(version))
    answers = loaded.signatures["serving_default"](obs=tf.constant(ROWS))
    return {name: tensor.numpy() for name, tensor in answers.items()}


def _answers_of_onnx(path: Path) -> Arrays:
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"obs": ROWS}), strict=True))


def _resumed_command(path: Path) -> Arrays:
    _command("--resume", str(path), "--steps", "800")
    algorithm = Algorithm.from_checkpoint(path / "checkpoints" / "latest")
    with _running(algorithm):
        return dict(algorithm.get_policy().get_weights())


def _command(*words: str) -> None:
    """Runs `tfpolicies train` in this process.

    Raises:
        SystemExit: if it does not succeed; its output is the message.
    """
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = run_command(["train", *words])
    if status:
        raise SystemExit(output.getvalue())


def _run(path: Path) -> Arrays:
    algorithm = configs()["ppo"].build()
    with _running(algorithm):
        result = algorithm.learn(192, run_dir=path, progress=False).result
        steps = {"steps": np.int64(result["num_env_steps_sampled"])}
        return {**steps, **algorithm.get_policy().get_weights()}


def _stash(path: Path) -> Arrays:
    with PolicyMap(capacity=1, path=path) as stash:
        results = {name: _acted(stash[name]) for name in sorted(stash)}
    return {f"{name}/{key}": x for name, arrays in results.items() for key, x in arrays.items()}


_PLAYERS: dict[str, Callable[[Path], Arrays]] = {
    "algorithms": _algorithm,
    "policies": _policy,
    "exports": _exported,
    "run": _run,
    "stash": _stash,
    "command": _resumed_command,
}
_LISTED = ("algorithms", "policies", "exports")  # folders of several things


def arrays_of(folder: Path) -> Arrays:
    """Returns what everything that a folder holds gives, by its whole name."""
    arrays: Arrays = {}
    for name in stored_names(folder):
        arrays |= play(folder, name)
    return arrays


def digests(folder: Path) -> dict[str, str]:
    return {name: _digest(array) for name, array in arrays_of(folder).items()}


def _digest(array: np.ndarray) -> str:
    head = f"{array.dtype} {array.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


# -- comparing --------------------------------------------------------------------------------


def digests_of(tree: Path, folder: Path) -> dict[str, str]:
    """Returns the digests that the package of another tree gives, in a process of its own."""
    code = (
        "import json, sys, tfpolicies, soak.stored_formats as s\n"
        "found = s.digests(s.Path(sys.argv[1]))\n"
        "print(json.dumps({'package': tfpolicies.__file__, 'digests': found}))"
    )
    home = str(Path(__file__).resolve().parents[1])
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
    result: dict[str, str] = answer["digests"]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m soak.stored_formats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("make", "play", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", default="", help="with make: the commit that writes")
    parser.add_argument("--old", help="revision to compare with")
    parser.add_argument("--new", default="HEAD", help="revision that is compared")
    options = parser.parse_args()
    if options.what == "make":
        make(options.folder, options.commit)
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
    from soak import stored_formats  # whose classes have names that checkpoints can say

    sys.exit(stored_formats.main())
