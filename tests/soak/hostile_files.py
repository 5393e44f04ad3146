"""Hostile files for `fuzz_attacks`: their contents, and the readers that load them."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import os
import pkgutil
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from gymnasium import spaces

import tfpolicies
from helpers.differences import find_differences, get_owned
from helpers.factories import OBS, make
from soak.attempt import Attempt, Victim, damage_file
from soak.fuzz_states import edit, renew, walk
from soak.hostile_arrays import array_file_attempt, changed_array_files
from soak.hostile_onnx import make_hostile, onnx_loaders
from tfpolicies import DQNTF2Policy, Policy, PolicyMap, PPOConfig
from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.algorithms.training_state import get_progress
from tfpolicies.cli.export_playback import play_in_subprocess
from tfpolicies.cli.run_lookup import find_run
from tfpolicies.cli.train_options import TrainSettings
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import TfPoliciesError
from tfpolicies.policy.policy_checkpoints import POLICY_MANIFEST
from tfpolicies.reporting.run_folder import RunFolder
from tfpolicies.storage.checkpoint import (
    Checkpoint,
    CheckpointData,
    read_checkpoint,
    write_checkpoint,
)
from tfpolicies.storage.manifest import ALGORITHM_MANIFEST

# What hostile files name --------------------------------------------------------------------------

_NAMES = {
    "keras": "layers.Lambda src.layers.Lambda layers.TFSMLayer"
    " config.enable_unsafe_deserialization",
    "keras.layers": "Lambda core.lambda_layer.Lambda TFSMLayer TorchModuleWrapper JaxLayer"
    " FlaxLayer StringLookup IntegerLookup TextVectorization Hashing",
    "keras.src.layers.core.lambda_layer": "Lambda",
    "keras.saving": "load_model",
    "keras.models": "load_model",
    "keras.src.saving.saving_lib": "load_model",
    "keras.utils": "get_file set_random_seed",
    "keras.src.utils.rng_utils": "set_random_seed",
    "keras.config": "set_floatx",
    "keras.ops": "stop_gradient",
    "builtins": "eval function __lambda__",
    "subprocess": "Popen",
    "os": "system",
    "tfpolicies.cli": "main",
    None: "Lambda layers>Lambda",
}
_ALIASES = [(module, name) for module, names in _NAMES.items() for name in names.split()]

_HOSTILE_CONFIGS: tuple[dict[str, Any], ...] = (
    {"function": {"class_name": "function", "config": "set_floatx", "module": "keras.config"}},
    {"function": {"class_name": "__lambda__", "config": {"value": "4wEAAAA="}}},
    {"function": "keras.config.enable_unsafe_deserialization"},
    {"name": "x", "filepath": "/etc", "call_endpoint": "serving_default"},
    {"name": "x", "vocabulary": "/etc/passwd", "output_mode": "int"},
    {"name": "x", "module": {"class_name": "__bytes__", "config": {"value": "gASVAAAAAA=="}}},
    {"path": "/etc/passwd"},
    {"units": 2, "kernel_initializer": {"module": "os", "class_name": "system", "config": {}}},
    {"units": 2, "activation": {"module": "builtins", "class_name": "function", "config": "eval"}},
)

_LARGE = (10**9, 2 * 10**8, 10**7, 2**31 - 1, 2**31, 2**62, 2**70, 10**400)
_SIZES: tuple[Any, ...] = (*_LARGE, 1e9, -(10**9))

_SPACES: tuple[dict[str, Any], ...] = (
    {"type": "Discrete", "dtype": "int64", "n": 10**9, "start": 0},
    {"type": "Box", "dtype": "float32", "shape": [10**9], "low": -1.0, "high": 1.0},
    {"type": "Box", "dtype": "float32", "shape": [10**5, 10**5], "low": -1.0, "high": 1.0},
    {"type": "Box", "dtype": "uint8", "shape": [30000, 30000, 3], "low": 0, "high": 255},
    {"type": "Box", "dtype": "float32", "shape": [0], "low": 0.0, "high": 1.0},
    {"type": "MultiBinary", "n": 10**9},
    {"type": "MultiBinary", "n": [10**5, 10**5]},
    {"type": "MultiDiscrete", "dtype": "int64", "shape": [2], "nvec": [10**9, 2], "start": 0},
    {"type": "Dict", "spaces": [], "sort_keys": True},
    {"type": "Tuple", "spaces": []},
    {"type": "Text", "min_length": 0, "max_length": 10**9, "characters": "ab"},
)


@functools.cache
def own_callables() -> tuple[str, ...]:
    """Returns the import paths of this package's functions and classes."""
    results = []
    for module in pkgutil.walk_packages(tfpolicies.__path__, "tfpolicies."):
        if ".distributed" in module.name or module.name.endswith("__main__"):
            continue
        with contextlib.suppress(ImportError):
            loaded = importlib.import_module(module.name)
            results += [
                f"{module.name}:{name}"
                for name, value in vars(loaded).items()
                if callable(value) and getattr(value, "__module__", None) == module.name
            ]
    return tuple(sorted(results))


def _named(rng: random.Random) -> str:
    """Returns the path of something that must not be called, the command line most often."""
    telling = ("tfpolicies.cli:main", "tfpolicies.cli.training:train", "os:system")
    return rng.choice(telling) if rng.random() < 0.4 else rng.choice(own_callables())


# Places in JSON -----------------------------------------------------------------------------------


def _places(tree: Any, is_place: Callable[[Any, Any], bool]) -> list[tuple[Any, Any]]:
    """Returns (container, key) of some entries of nested dicts and lists."""
    return [(node, key) for node, key in walk(tree) if is_place(key, node[key])]


def _attack_aliases(victim: Checkpoint, rng: random.Random) -> None:
    module, name = rng.choice(_ALIASES)
    record: dict[str, Any] = {
        "class_name": name,
        "config": copy.deepcopy(rng.choice(_HOSTILE_CONFIGS)),
    }
    if module is not None or rng.random() < 0.5:
        record["module"] = module
    if rng.random() < 0.5:
        record["registered_name"] = rng.choice((None, name, f"keras.layers>{name}"))
    manifest = _some_manifest(victim, rng)
    classes = _places(
        manifest, lambda key, value: isinstance(value, dict) and "class_name" in value
    )
    texts = _places(manifest["config"], lambda key, value: isinstance(value, str))
    layers = _places(manifest, lambda key, value: key == "layers" and isinstance(value, list))
    kind = rng.random()
    if classes and kind < 0.4:
        node, key = rng.choice(classes)
        node[key].update(record if rng.random() < 0.5 else {k: record[k] for k in ("class_name",)})
        node[key]["module"] = module
    elif layers and kind < 0.7:
        node, key = rng.choice(layers)
        node[key].insert(rng.randrange(len(node[key]) + 1), record)
    elif kind < 0.85:
        node, key = rng.choice(texts)
        node[key] = rng.choice((record, name, f"{module}.{name}", f"{module}:{name}"))
    else:
        manifest["config"]["keras"] = record


def _attack_callables(victim: Checkpoint, rng: random.Random) -> None:
    manifest = _some_manifest(victim, rng)
    path = _named(rng)
    record: Any = {"$import": path}
    if rng.random() < 0.2:
        record = rng.choice((path, path.replace(":", "."), {"type": record}, [record]))
    settings = manifest["config"]["settings"]
    likely = [(settings, key) for key in settings]
    likely += [(settings["model"], key) for key in settings["model"]]
    likely += [(manifest, key) for key in ("policy_class", "algorithm_class") if key in manifest]
    likely += [(manifest["roster"], key) for key in manifest.get("roster", {})]
    node, key = rng.choice(likely if rng.random() < 0.7 else _places(manifest, lambda *_: True))
    node[key] = record


def _attack_sizes(victim: Checkpoint, rng: random.Random) -> None:
    manifest = _some_manifest(victim, rng)
    named = [name for name in ("observation_space", "action_space") if name in manifest]
    if named and rng.random() < 0.4:
        space = copy.deepcopy(rng.choice(_SPACES))
        wraps = rng.random()
        if wraps < 0.15:
            space = {"type": "Tuple", "spaces": [space]}
        elif wraps < 0.3:
            space = {"type": "Dict", "spaces": [["a", space]], "sort_keys": True}
        manifest[rng.choice(named)] = space
        return

    def is_size(key: Any, value: Any) -> bool:
        return type(value) in (int, float) and key != "format_version"

    places = _places(manifest, is_size)
    node, key = rng.choice(places)
    node[key] = rng.choice(_SIZES)


def _attack_numbers(victim: Checkpoint, rng: random.Random) -> None:
    part = rng.choice([victim, *victim.policies.values()])
    arrays = [x for group in part.arrays.values() for x in group.values() if x.dtype.kind == "f"]
    arrays = [x for x in arrays if x.size]
    if not arrays:
        return _attack_junk(victim, rng)
    array = rng.choice(arrays)
    array.reshape(-1)[rng.randrange(array.size)] = rng.choice((np.nan, np.inf, -np.inf))
    return None


def _attack_junk(victim: Checkpoint, rng: random.Random) -> None:
    edit(_some_manifest(victim, rng), rng)


def _some_manifest(victim: Checkpoint, rng: random.Random) -> dict[str, Any]:
    return rng.choice([victim, *victim.policies.values()]).manifest


# Models that explode ------------------------------------------------------------------------------


def _choose_size(rng: random.Random, largest: int) -> int:
    """Returns a size, each order of magnitude as likely as the others."""
    return int(2 ** rng.uniform(0, np.log2(largest)))


def _repeat(x: Any, rng: random.Random) -> Any:
    """Explodes features `[B, F]` in sequences, and averages them."""
    layers, size = keras.layers, functools.partial(_choose_size, rng)
    x = layers.RepeatVector(size(1 << 24))(x)
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(("attention", "additive", "steps", "window", "larger", "padded", "many"))
        if kind == "attention":
            x = layers.Attention(score_mode=rng.choice(("dot", "concat")))([x, x])
        elif kind == "additive":
            x = layers.AdditiveAttention(use_scale=False)([x, x])
        elif kind == "steps":
            inner = _nest(size(20), tuple(x.shape[2:])) if rng.random() < 0.3 else None
            x = layers.TimeDistributed(inner or layers.Activation("tanh"))(x)
        elif kind == "window":
            pooling = rng.choice((layers.MaxPooling1D, layers.AveragePooling1D))
            x = pooling(size(1 << 17), strides=1, padding="same")(x)
        elif kind == "larger":
            x = layers.UpSampling1D(size(1 << 16))(x)
        elif kind == "padded":
            x = layers.ZeroPadding1D(size(1 << 24))(x)
        else:
            for _ in range(size(30)):
                x = layers.Activation(rng.choice(("relu", "gelu", "softmax", "sparsemax")))(x)
    return layers.GlobalAveragePooling1D()(x)


def _nest(depth: int, shape: tuple[int, ...], times: int = 2) -> keras.Model:
    """Returns a model that calls an inner one several times, at each of so many depths."""
    x = keras.Input(shape)
    model = keras.Model(x, keras.layers.Activation("tanh")(x))
    for _ in range(min(depth, 8)):  # deeper ones are nested in `_attack_work`, as JSON
        x = inputs = keras.Input(shape)
        for _ in range(times):
            x = model(x)
        model = keras.Model(inputs, x)
    return model


def _describe(model: keras.Model) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    return config


def _make_exploding(shape: tuple[int, ...], rng: random.Random) -> dict[str, Any]:
    """Returns the config of a model that gives as many features as it takes."""
    x = inputs = keras.Input(shape)
    kind = rng.random()
    if kind < 0.7:
        x = _repeat(x, rng)
    elif kind < 0.8:
        noise = (_choose_size(rng, 1 << 17), _choose_size(rng, 1 << 17))
        x = keras.layers.Dropout(0.5, noise_shape=noise)(x)
    else:
        x = keras.layers.Activation("tanh")(x)
    config = _describe(keras.Model(inputs, x))
    outer = _describe(_nest(2, shape, rng.randint(1, 4)))
    for _ in range(rng.choice((0, 0, 0, 1, rng.randint(2, 25)))):
        level = copy.deepcopy(outer)
        for layer in level["config"]["layers"]:
            if layer["class_name"] == "Functional":
                layer["config"] = config["config"]
        config = level
    return config


def _attack_work(victim: Checkpoint, rng: random.Random) -> None:
    """Puts what explodes between two layers of a model, weights and checksums being right."""
    stored = victim.manifest["config"]["keras"]["config"]["layers"]
    places = [i for i, layer in enumerate(stored) if layer["class_name"] == "Dense"]
    if rng.random() < 0.2:
        place = stored[rng.choice(places)]["config"]
        regularizer = keras.regularizers.OrthogonalRegularizer(mode=rng.choice(("rows", "columns")))
        name = rng.choice(("kernel_regularizer", "activity_regularizer"))
        place[name] = keras.saving.serialize_keras_object(regularizer)
    stored.insert(places[-1], _make_exploding((stored[places[0]]["config"]["units"],), rng))


_ATTACKS: dict[str, Callable[[Checkpoint, random.Random], None]] = {
    name: globals()[f"_attack_{name}"]
    for name in ("aliases", "callables", "sizes", "numbers", "junk")
}

# Files and folders --------------------------------------------------------------------------------


def _no_regular_file(path: Path, rng: random.Random) -> None:
    """Puts something in the place of a file that reading may never end of."""
    path.unlink()
    kind = rng.choice(("fifo", "zero", "random", "tty", "folder", "loop", "nowhere", "socket"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind in ("zero", "random", "tty"):
        path.symlink_to(f"/dev/{kind}")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o140600)
    else:
        path.symlink_to(path if kind == "loop" else path.with_name("nowhere"))


def _spoil(path: Path, rng: random.Random, what: str = "") -> str:
    """Damages a file or puts something else in its place; returns what it did."""
    what = what or ("no regular file" if rng.random() < 0.3 else "damage")
    (damage_file if what == "damage" else _no_regular_file)(path, rng)
    return what


def _write(victim: Checkpoint, name: str, folder: Path) -> None:
    """Writes a checkpoint of edited parts, with names and checksums that are right."""
    parts = {
        key: CheckpointData(POLICY_MANIFEST, _bare(part.manifest), part.arrays)
        for key, part in victim.policies.items()
    }
    write_checkpoint(folder, name, _bare(victim.manifest), victim.arrays, policies=parts)


def _bare(manifest: dict[str, Any]) -> dict[str, Any]:
    added = ("format_version", "tfpolicies_version", "arrays", "policies", "checksum")
    return {key: value for key, value in manifest.items() if key not in added}


# Victims ------------------------------------------------------------------------------------------


def _weights(policy: Any) -> list[np.ndarray]:
    return list(policy.get_weights().values())


def _all_weights(algorithm: Any) -> list[np.ndarray]:
    return [x for policy in algorithm.worker.policy_map.values() for x in _weights(policy)]


def sample_policies() -> dict[str, Any]:
    """Returns small policies with every kind of thing that a checkpoint holds."""
    hidden = keras.layers.Dense(4, "tanh", kernel_initializer="he_normal")
    model = keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(2)])
    nested = spaces.Dict({"a": OBS, "b": spaces.Discrete(3)})
    return {
        "catalogue": make(observation_filter="MeanStdFilter"),
        "keras": make(model={"custom_model": model}),
        "dqn": make(DQNTF2Policy, nested),
    }


def policy_victims(root: Path, policies: dict[str, Any]) -> dict[str, Victim]:
    victims = {}
    for name, policy in policies.items():
        sound, hostile = root / name, root / f"{name} hostile"
        policy.export_checkpoint(sound)

        def attack(rng: random.Random, sound: Path = sound, hostile: Path = hostile) -> Attempt:
            what = _make_hostile(sound, hostile, POLICY_MANIFEST, "Policy", rng)
            return Attempt(what, lambda: Policy.from_checkpoint(hostile), arrays=_weights)

        victims[f"policy {name}"] = attack
    return victims


def work_victim(root: Path, policy: Any) -> Victim:
    """Returns the checkpoint of a policy whose Keras model asks for more work than it should."""
    sound, hostile = root / "work", root / "work hostile"
    policy.export_checkpoint(sound)

    def attempt(rng: random.Random) -> Attempt:
        shutil.rmtree(hostile, ignore_errors=True)
        victim = read_checkpoint(sound, POLICY_MANIFEST, kind="Policy")
        _attack_work(victim, rng)
        _write(victim, POLICY_MANIFEST, hostile)
        observation = np.zeros((2, 3), np.float32)

        def load() -> Any:
            loaded = Policy.from_checkpoint(hostile)
            loaded.compute_actions(observation)
            return loaded

        return Attempt("work", load, arrays=_weights)

    return attempt


def _make_hostile(sound: Path, hostile: Path, name: str, kind: str, rng: random.Random) -> str:
    shutil.rmtree(hostile, ignore_errors=True)
    victim = read_checkpoint(sound, name, kind=kind)
    if rng.random() < 0.1:
        with changed_array_files(rng):
            _write(victim, name, hostile)
        return "array file"
    if rng.random() < 0.5:
        attack = rng.choice(list(_ATTACKS))
        _ATTACKS[attack](victim, rng)
        with contextlib.suppress(TfPoliciesError):  # what JSON cannot hold is no file
            _write(victim, name, hostile)
            return attack
    renew(sound, hostile)
    return _spoil(rng.choice(sorted(path for path in hostile.rglob("*") if path.is_file())), rng)


def sample_algorithms() -> tuple[Algorithm, Algorithm]:
    def built(config: PPOConfig) -> Algorithm:
        model = {"fcnet_hiddens": [4]}
        config.framework("tf2", inference="tf", jit_compile=False)
        config.training(train_batch_size=16, sgd_minibatch_size=8, num_sgd_iter=1, model=model)
        config.rollouts(num_envs_per_worker=1, rollout_fragment_length=16)
        algorithm = config.debugging(seed=0, log_level="ERROR").build()
        algorithm.train()
        return algorithm

    two = PPOConfig().environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    return built(PPOConfig().environment("CartPole-v1")), built(
        two.multi_agent(policies={"a", "b"}, policy_mapping_fn=policy_of_agent)
    )


def policy_of_agent(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    del episode, kwargs
    return "ab"[agent_id]


def algorithm_victims(root: Path, single: Algorithm, algorithm: Algorithm) -> dict[str, Victim]:
    """Returns the checkpoints of algorithms, built again and restored into a living one."""
    sound, sound_single = root / "algorithm", root / "single"
    algorithm.save(sound)
    single.save(sound_single)

    def state() -> dict[str, Any]:
        states = {pid: get_owned(policy) for pid, policy in algorithm.worker.policy_map.items()}
        return {"policies": states, "progress": repr(get_progress(algorithm))}

    def restored(rng: random.Random) -> Attempt:
        hostile = root / "algorithm hostile"
        algorithm.restore(sound)
        before = state()
        what = _make_hostile(sound, hostile, ALGORITHM_MANIFEST, "Algorithm", rng)

        def changed() -> str | None:
            return next(find_differences(before, state()), None)

        def load() -> Algorithm:
            algorithm.restore(hostile)
            return algorithm

        return Attempt(f"restore, {what}", load, changed, _all_weights)

    def built(rng: random.Random) -> Attempt:
        hostile = root / "single hostile"
        what = _make_hostile(sound_single, hostile, ALGORITHM_MANIFEST, "Algorithm", rng)

        def load() -> Algorithm:
            results = Algorithm.from_checkpoint(hostile)
            results.stop()
            return results

        return Attempt(what, load, arrays=_all_weights)

    return {"algorithm restored": restored, "algorithm built": built}


def stash_victim(root: Path, policy: Any) -> Victim:
    sound, hostile = root / "stash", root / "stash hostile"
    with PolicyMap(capacity=1, path=sound) as policies:
        policies["main"] = policy.copy("main")
        policies.copy_policy("main", "other")
        policies.freeze("other")
        policies.flush()

    def attempt(rng: random.Random) -> Attempt:
        renew(sound, hostile)
        files = [p for p in sorted(hostile.rglob("*")) if p.is_file() and p.name != "lock"]
        path = rng.choice(files)
        if path.suffix == ".json" and rng.random() < 0.7:
            what = "record"
            record = json.loads(path.read_text())
            part = Checkpoint(record.get("policy", record), {}, {})
            attack = rng.choice([name for name in _ATTACKS if name != "numbers"])
            with contextlib.suppress(KeyError, IndexError):
                _ATTACKS[attack](part, rng)
            path.write_text(json.dumps(record))
        else:
            what = _spoil(path, rng)

        def load() -> list[np.ndarray]:
            with PolicyMap(capacity=2, path=hostile) as result:
                return [x for policy_id in list(result) for x in _weights(result[policy_id])]

        return Attempt(what, load, arrays=lambda arrays: arrays)

    return attempt


def run_victim(root: Path, algorithm: Algorithm) -> Victim:
    """Returns a run folder, whose settings are read as `--resume` reads them."""
    sound, hostile = root / "runs", root / "runs hostile"
    settings = TrainSettings(env="CartPole-v1", set=("gamma=0.9",))
    run = RunFolder.create(sound, "ppo", {"train": settings.as_json(), "finished": None})
    algorithm.save(run.checkpoints / "latest")

    def attempt(rng: random.Random) -> Attempt:
        renew(sound, hostile)
        path = next(hostile.glob("*/run.json"))
        what = rng.choice(("settings", "damage", "no regular file"))
        if what == "settings":
            content = json.loads(path.read_text())
            train = content["settings"]["train"]
            key = rng.choice(list(train))
            bad = (f"callbacks={_named(rng)}", "env=os:system", f"model.custom_model={_named(rng)}")
            train[key] = rng.choice((_named(rng), [rng.choice(bad)], rng.choice(_SIZES), None, {}))
            path.write_text(json.dumps(content))
        else:
            _spoil(path, rng, what)

        def load() -> None:
            result = find_run(str(hostile))
            if result is not None:
                TrainSettings.from_json(
                    result.settings.get("train", {}), str(result.run_json)
                ).make_config().validate()

        return Attempt(what, load)

    return attempt


_PLAYER = str(Path(tfpolicies.__file__).parent / "export" / "player.py")
_MARK = "Path(__file__).with_name('executed').write_text('x')"


def export_victim(root: Path, policy: Any) -> Victim:
    """Returns an export with a foreign `play.py`, played as `tfpolicies play-exported` does."""
    sound, hostile = root / "export", root / "export hostile"
    policy.export_model(sound, onnx=True)

    def attempt(rng: random.Random) -> Attempt:
        renew(sound, hostile)
        player = next(hostile.rglob("play.py"))
        player.write_text(f"from pathlib import Path\n{_MARK}\nprint('{{}}')\n")
        for name in ("numpy.py", "gymnasium.py", "json.py", "sitecustomize.py"):
            (player.parent / name).write_text(f"from pathlib import Path\n{_MARK}\n")
        what = rng.choice(("play.py", "spec", "damage", "no regular file"))
        spec = player.with_name("policy_spec.json")
        if what == "spec":
            content = json.loads(spec.read_text())
            edit(content, rng)
            spec.write_text(json.dumps(content))
        elif what != "play.py":
            _spoil(rng.choice([spec, player.with_name("model.onnx")]), rng, what)

        def changed() -> str | None:
            return "play.py of the folder ran" if list(hostile.rglob("executed")) else None

        def load() -> None:
            play_in_subprocess(player.with_name("model.onnx"), "CartPole-v1", 1, 0)

        return Attempt(what, load, changed, may_start=_PLAYER)

    return attempt


def onnx_victims(root: Path, policy: Any) -> dict[str, Victim]:
    """Returns an export whose ONNX files are attacked, loaded as each part of the package does."""
    sound, hostile = root / "onnx", root / "onnx hostile"
    policy.export_model(sound, onnx=True)

    def attempt(load: Callable[[Path], None], rng: random.Random) -> Attempt:
        what = make_hostile(sound, hostile, rng)
        return Attempt(what, lambda: load(hostile), may_start=_PLAYER)

    return {name: functools.partial(attempt, load) for name, load in onnx_loaders().items()}


def all_victims(root: Path) -> Iterator[tuple[str, Victim, float]]:
    """Yields the victims by name, each with its share of the files."""
    policies, (single, double) = sample_policies(), sample_algorithms()
    for name, victim in policy_victims(root, policies).items():
        yield name, victim, 0.22
    for name, victim in algorithm_victims(root, single, double).items():
        yield name, victim, 0.1
    yield "stash", stash_victim(root, policies["catalogue"]), 0.08
    yield "models that explode", work_victim(root, policies["keras"]), 0.1
    yield "run folder", run_victim(root, single), 0.05
    yield "export", export_victim(root, single.get_policy()), 0.01
    yield "array files", array_file_attempt, 2.0
    for name, victim in onnx_victims(root, policies["catalogue"]).items():
        yield name, victim, 0.02
