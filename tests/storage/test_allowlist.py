"""Objects that files may name, by setting and kind; none of them is called before."""

import functools
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import shutil
from pathlib import Path

import pytest
import tensorflow as tf

import tfpolicies.cli
from helpers.checkpoints import edit_checkpoint, edit_manifest
from helpers.factories import make
from helpers.multi_agent_envs import SPACE, THREE, Staggered
from tfpolicies import (
    DQN,
    PPO,
    Algorithm,
    AlgorithmConfig,
    DefaultCallbacks,
    DQNConfig,
    DQNTF2Policy,
    PGConfig,
    PGTF2Policy,
    Policy,
    PolicySpec,
    PPOConfig,
    PPOTF1Policy,
    PPOTF2Policy,
    SACConfig,
    TFPolicy,
)
from tfpolicies.base.allowlist import is_allowed
from tfpolicies.config.callbacks import make_multi_callbacks
from tfpolicies.config.multi_agent import default_policy_mapping
from tfpolicies.config.settings_allowlist import (
    ALGORITHM_SETTINGS,
    POLICY_SETTINGS,
    ROSTER,
    decode_settings,
)
from tfpolicies.errors import CheckpointError, ConfigError, TfPoliciesError
from tfpolicies.exploration.strategies import EpsilonGreedy
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.distributions import SquashedGaussian
from tfpolicies.policy.policy_checkpoints import TRAINING_ONLY_SETTINGS
from tfpolicies.storage.allowed_objects import AllowedObject
from tfpolicies.storage.import_paths import UnresolvedObject
from tfpolicies.storage.json_values import encode_value, find_unresolved

MAIN = {"$import": "tfpolicies.cli:main"}
DECISION = Path(__file__).parents[2] / "docs/decisions/003-import-paths-in-checkpoints.md"

NAMED = {  # an example of the objects of this package that each setting may name
    "callbacks": DefaultCallbacks,
    "model.custom_action_dist": SquashedGaussian,
    "exploration_config.type": EpsilonGreedy,
    "policy_mapping_fn": default_policy_mapping,
    "policies.*.0": PGTF2Policy,
}


def iter_paths(places, prefix="", parents=()):
    """The places of a table by their dotted paths; those that lead back to it are left out."""
    for key, place in places.items():
        path = f"{prefix}{key}"
        if isinstance(place, AllowedObject):
            yield path, place
        elif not any(place is each for each in (*parents, places)):
            yield from iter_paths(place, f"{path}.", (*parents, places))


def at(path, value):
    """A settings record with a value at a dotted path."""
    for key in reversed(path.split(".")):
        if key in ("0", "3"):
            value = {"$tuple": [value if i == int(key) else None for i in range(4)]}
        else:
            value = {"any" if key == "*" else key: value}
    return value


PATHS = dict(iter_paths(ALGORITHM_SETTINGS, parents=(POLICY_SETTINGS,)))
NESTED = ("evaluation_config.", "multiagent.", "policies.*.3.", "policies.*.3.evaluation_config.")
INSIDE = pytest.mark.parametrize("inside", ["", *NESTED])
OBJECTS = [MAIN, *map(encode_value, NAMED.values())]


@INSIDE
def test_a_place_takes_what_belongs_there_and_nothing_else(inside):
    for path, value in itertools.product(PATHS, OBJECTS):
        result = decode_settings(at(f"{inside}{path}", value), ALGORITHM_SETTINGS)
        is_allowed_there = path in NAMED and value == encode_value(NAMED[path])
        missing = [] if is_allowed_there else [UnresolvedObject(value["$import"], importable=True)]
        assert list(find_unresolved(result).values()) == missing, path
        assert not is_allowed_there or NAMED[path] in tf.nest.flatten(result), path


@INSIDE
def test_a_text_that_would_be_imported_is_held_back_wherever_it_stands(inside):
    text = "antigravity.Strategy"
    for path in ("type", "sub_exploration.type", "deep.er.type"):
        result = decode_settings(at(f"{inside}exploration_config.{path}", text), ALGORITHM_SETTINGS)
        assert [each.name for each in find_unresolved(result).values()] == [text]
    env = decode_settings(at(f"{inside}env", "antigravity:Env"), ALGORITHM_SETTINGS)
    assert bool(find_unresolved(env)) is ("policies" not in inside)  # a policy makes none


CONFIGS = (AlgorithmConfig, PPOConfig, PGConfig, DQNConfig, SACConfig)
SETTINGS = {*(name for kind in CONFIGS for name in kind().to_dict())}
SETTINGS |= {f"model.{name}" for name in MODEL_DEFAULTS}


@pytest.mark.parametrize("places", [ALGORITHM_SETTINGS, POLICY_SETTINGS], ids=["all", "policy"])
def test_a_setting_without_a_place_takes_no_object_at_all(places):
    for path, value in itertools.product(SETTINGS - PATHS.keys(), OBJECTS):
        result = decode_settings(at(path, value), places)
        assert [each.name for each in find_unresolved(result).values()] == [value["$import"]], path


def test_every_setting_that_takes_something_callable_has_a_place():
    def function(): ...

    for kind in CONFIGS:
        config = kind()
        for name in config.to_dict():
            try:
                config.copy(copy_frozen=False).update_from_dict({name: function})
            except (ValueError, TypeError):
                continue
            assert name in PATHS or f"{name}.custom_model" in PATHS, name


def test_a_file_names_a_schedule_of_keras_own_or_none():
    for name, is_named in (("CosineDecay", True), ("LearningRateSchedule", False), ("a.B", False)):
        lr = {"type": name, "initial_learning_rate": 0.1, "decay_steps": 2}
        result = decode_settings({"lr": lr}, POLICY_SETTINGS)["lr"]
        assert result == (lr if is_named else UnresolvedObject(name))


@functools.cache
def get_package_objects():
    elsewhere = ("__main__", ".mlserver_runtime")  # a program, and a module for MLServer
    objects = []
    for module in pkgutil.walk_packages(tfpolicies.__path__, "tfpolicies."):
        if module.name.endswith(elsewhere) or ".distributed." in module.name:
            continue
        objects += vars(importlib.import_module(module.name)).values()
    return [x for x in objects if getattr(x, "__module__", "").startswith("tfpolicies")]


ROLES = {place.role for place in PATHS.values()} | {"algorithm_class"}


def test_of_all_functions_of_the_package_those_that_are_marked_may_be_named():
    functions = [each for each in get_package_objects() if inspect.isfunction(each)]
    marked = {(f, role) for f in functions for role in ROLES if is_allowed(f, role)}
    assert marked == {(default_policy_mapping, "policy_mapping_fn")}


def test_a_class_is_allowed_in_one_role_at_most():
    for each in get_package_objects():
        if isinstance(each, type):
            assert sum(is_allowed(each, role) for role in ROLES) <= 1, each


def test_the_table_of_the_decision_has_every_place():
    cells = re.findall(r"^\| (`[^|]+) \|", DECISION.read_text(), re.MULTILINE)
    rows = [name for cell in cells for name in re.findall("`([^`]+)`", cell)]
    missing = [path for path in PATHS if path not in rows]
    assert missing == []
    assert [name for name in ROSTER if f"roster.{name}" not in rows] == []


def test_the_tests_that_the_decision_names_exist():
    text = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", DECISION.read_text()))
    files = {path.stem for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert named
    assert [name for name in named - files if f"def {name}(" not in text] == []


def make_config(env="CartPole-v1"):
    config = PPOConfig().environment(env).training(model={"fcnet_hiddens": [4]})
    config.framework(inference="tf", jit_compile=False).rollouts(num_envs_per_worker=2)
    return config.debugging(seed=1, log_level="ERROR")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The checkpoint of an algorithm."""
    folder = tmp_path_factory.mktemp("saved")
    algorithm = make_config().build()
    algorithm.save(folder)
    algorithm.stop()
    return folder


@pytest.fixture
def forge(checkpoint, tmp_path):
    """Copies the checkpoint, changed by `change(manifest)` and with checksums that fit."""

    def forge(change, of_policy=False):
        shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
        folder = next((tmp_path / "policies").iterdir()) if of_policy else tmp_path
        with edit_manifest(folder / ("policy.json" if of_policy else "algorithm.json")) as manifest:
            change(manifest)
        return folder

    return forge


def must_not_run(*args, **kwargs):
    raise SystemExit("the command line ran")


@pytest.fixture(autouse=True)
def the_command_line_would_be_seen(monkeypatch):
    """The function that forged files name is the same one, and raises if it is called."""
    monkeypatch.setattr(tfpolicies.cli.main, "__code__", must_not_run.__code__)


DEPTHS = [  # one at each depth; `test_a_place_takes_what_belongs_there...` has all of them
    ("callbacks", False),
    ("env", False),
    ("evaluation_config.env", False),
    ("model.custom_model", True),
    ("exploration_config.type", True),
]


def put(manifest, path, value):
    place = manifest["config"]["settings"]
    *parents, last = path.split(".")
    for name in parents:
        place[name] = place.get(name) or {}
        place = place[name]
    place[last] = value


@pytest.mark.parametrize(("path", "of_policy"), DEPTHS)
def test_a_function_of_this_package_in_a_checkpoint_is_asked_for_and_not_called(
    forge, path, of_policy
):
    folder = forge(lambda manifest: put(manifest, path, MAIN), of_policy)
    if of_policy and path.partition(".")[0] in TRAINING_ONLY_SETTINGS:
        policy = Policy.from_checkpoint(folder)  # which does not need it
        unresolved = [*find_unresolved(policy.config).values()]
        assert unresolved == [UnresolvedObject("tfpolicies.cli:main", True)]
        policy.compute_single_action(policy.observation_space.sample())
        return
    place = "".join(f"[{name!r}]" for name in path.split("."))
    load = Policy.from_checkpoint if of_policy else Algorithm.from_checkpoint
    with pytest.raises(CheckpointError, match=re.escape(f"config{place} (tfpolicies.cli:main)")):
        load(folder)


@pytest.mark.parametrize("name", ["policy_mapping_fn", "policies_to_train"])
def test_a_roster_names_no_function_but_a_mapping(forge, name):
    folder = forge(lambda manifest: manifest["roster"].update({name: MAIN}))
    with pytest.raises(CheckpointError, match=rf"{name} \(tfpolicies.cli:main\)"):
        Algorithm.from_checkpoint(folder)
    algorithm = make_config().build()
    algorithm.restore(folder)  # keeps its own
    assert algorithm.worker.policy_mapping_fn is default_policy_mapping
    assert algorithm.worker.is_policy_to_train is None


POLICY_CLASSES = [*map(encode_value, (DefaultCallbacks, PPO, Policy)), MAIN, "PPO", 3]
ALGORITHM_CLASSES = [*map(encode_value, (PPOTF2Policy, PPOConfig)), MAIN, 3]


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        *((Policy, "policy_class", x, "class") for x in POLICY_CLASSES),
        *((Algorithm, "algorithm_class", x, "as its algorithm's class") for x in ALGORITHM_CLASSES),
    ],
)
def test_the_class_of_a_checkpoint_is_one_that_can_be_made(forge, kind, key, value, words):
    folder = forge(lambda manifest: manifest.update({key: value}), kind is Policy)
    with pytest.raises(CheckpointError, match=words):
        kind.from_checkpoint(folder)


def test_variables_of_other_processes_are_asked_for(forge):
    name, variables = "extra_python_environs_for_worker", {"LD_PRELOAD": "/tmp/evil.so"}
    folder = forge(lambda manifest: put(manifest, name, variables))
    with pytest.raises(CheckpointError, match=r"\(the variables LD_PRELOAD\)"):
        Algorithm.from_checkpoint(folder)
    again = Algorithm.from_checkpoint(folder, config={name: {"A": "1"}})
    assert again.config[name] == {"A": "1"}


@pytest.mark.parametrize("name", ["tf_session_args", "local_tf_session_args"])
def test_sessions_take_numbers_from_a_file(forge, name):
    for value, is_allowed_there in (
        ({"intra_op_parallelism_threads": 1, "gpu_options": {"allow_growth": False}}, True),
        ({"intra_op_parallelism_threads": 10**6}, False),
        ({"experimental": {"coordination_config": {"service_address": "evil:1"}}}, False),
    ):
        folder = forge(lambda manifest, value=value: put(manifest, name, value))
        if is_allowed_there:
            assert value.items() <= Algorithm.from_checkpoint(folder).config[name].items()
            continue
        with pytest.raises(CheckpointError, match=rf"config\['{name}'\].*for TensorFlow sessions"):
            Algorithm.from_checkpoint(folder)


def test_the_caller_provides_combined_callbacks(tmp_path):
    both = make_multi_callbacks([DefaultCallbacks, DefaultCallbacks])
    algorithm = make_config().callbacks(both).build()
    algorithm.save(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"config\['callbacks'\] \(tfpolicies.*MultiCallbacks"
    ):
        Algorithm.from_checkpoint(tmp_path)
    again = Algorithm.from_checkpoint(tmp_path, config={"callbacks": both})
    assert isinstance(again.callbacks, DefaultCallbacks)


def test_a_spec_of_a_policy_names_a_policy_class():
    spec = PolicySpec(PGTF2Policy, None, None, {"callbacks": DefaultCallbacks})
    record = json.loads(json.dumps(spec.serialize()))
    assert PolicySpec.deserialize(record) == spec
    for wrong in (
        {**record, "policy_class": MAIN},
        {**record, "policy_class": encode_value(DefaultCallbacks)},
        {**record, "config": {"callbacks": MAIN}},
        {**record, "config": {"gamma": encode_value(DefaultCallbacks)}},
    ):
        with pytest.raises(CheckpointError, match="which the caller must provide"):
            PolicySpec.deserialize(wrong)


class OwnPPO(PPO):
    """An algorithm of the user's."""


class OwnPolicy(PPOTF2Policy):
    """A policy of the user's."""


def test_an_algorithm_is_loaded_by_its_class_and_those_above(checkpoint):
    for kind in (Algorithm, PPO):
        assert type(kind.from_checkpoint(checkpoint)) is PPO
    for kind in (DQN, OwnPPO):
        words = rf"class PPO, not of {kind.__name__}\. Call `PPO\.from_checkpoint\(path\)`"
        with pytest.raises(CheckpointError, match=words):
            kind.from_checkpoint(checkpoint)


def test_a_custom_algorithm_is_loaded_by_its_class(tmp_path):
    OwnPPO(make_config()).save(tmp_path)
    assert type(OwnPPO.from_checkpoint(tmp_path)) is OwnPPO
    for kind in (PPO, DQN):
        with pytest.raises(CheckpointError, match="Call `from_checkpoint` on your class"):
            kind.from_checkpoint(tmp_path)


def test_a_policy_is_loaded_by_its_class_and_those_above(checkpoint, tmp_path):
    folder = next((checkpoint / "policies").iterdir())
    for kind in (Policy, TFPolicy, PPOTF2Policy):
        assert type(kind.from_checkpoint(folder)) is PPOTF2Policy
    for kind in (DQNTF2Policy, PPOTF1Policy, OwnPolicy):
        words = (
            f"class PPOTF2Policy, but should be loaded as {kind.__name__}. Call "
            "PPOTF2Policy.from_checkpoint(path) or Policy.from_checkpoint(path)"
        )
        with pytest.raises(CheckpointError, match=re.escape(words)):
            kind.from_checkpoint(folder)
    make(OwnPolicy).export_checkpoint(tmp_path)
    assert type(OwnPolicy.from_checkpoint(tmp_path)) is OwnPolicy


KINDS = {"p": PPOTF2Policy, "q": PGTF2Policy}


def test_of_several_policies_those_of_the_class_are_loaded(tmp_path):
    class Staged(Staggered):
        def __init__(self, context):
            super().__init__()

    def mapping(agent_id, episode=None, worker=None, **kwargs):
        return "p" if agent_id == "a" else "q"

    policies = {pid: PolicySpec(kind, SPACE, THREE) for pid, kind in KINDS.items()}
    config = make_config(Staged).multi_agent(policies=policies, policy_mapping_fn=mapping)
    config.build().save(tmp_path)
    result = Policy.from_checkpoint(tmp_path)
    assert {pid: type(policy) for pid, policy in result.items()} == KINDS
    words = r"other classes, 'q' \(PGTF2Policy\).*PPOTF2Policy\.from_checkpoint\(path, policy_ids="
    with pytest.raises(CheckpointError, match=words + r"\['p'\]\) or Policy\.from_checkpoint"):
        PPOTF2Policy.from_checkpoint(tmp_path)
    assert list(PPOTF2Policy.from_checkpoint(tmp_path, policy_ids=["p"])) == ["p"]
    with pytest.raises(CheckpointError, match=r"'p' \(PPOTF2Policy\)"):
        PGTF2Policy.from_checkpoint(tmp_path, policy_ids=["p"])


ARRAY = {"$array": {"dtype": "float32", "shape": [2], "elements": [1.0, 2.0]}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config.settings.kl_coeff", 10**400),
        ("config.settings.grad_clip", -(10**400)),
        ("config.settings.model.log_std_init", 10**400),
        ("config.settings.framework", ARRAY),
        ("config.settings.batch_mode", ARRAY),
        ("config.settings.lr", {"type": ARRAY}),
        ("config.settings.exploration_config.type", ARRAY),
        ("state.rng.state", ARRAY),
    ],
)
def test_an_array_or_an_endless_number_in_a_file_is_refused(tmp_path, path, value):
    make().export_checkpoint(tmp_path / "sound")
    *parents, last = path.split(".")
    with edit_checkpoint(tmp_path / "sound", tmp_path / "hostile") as manifest:
        node = functools.reduce(dict.__getitem__, parents, manifest)
        assert last in node
        node[last] = value
    with pytest.raises(TfPoliciesError):
        PPOTF2Policy.from_checkpoint(tmp_path / "hostile")


def test_an_id_that_no_file_can_have_is_refused_by_configs_and_kept_by_a_policy(tmp_path):
    with pytest.raises(ConfigError, match="and valid UTF-8; got"):
        PPOConfig().multi_agent(policies={"a\udc80"})
    odd = make(__policy_id="a\udc80")
    odd.export_checkpoint(tmp_path)
    assert PPOTF2Policy.from_checkpoint(tmp_path).policy_id == "a\udc80"
