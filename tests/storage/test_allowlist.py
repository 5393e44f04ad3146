"""What a file may name: in its place only, of its kind only, and nothing of it is called before."""

import importlib
import inspect
import itertools
import json
import pkgutil
import re
from pathlib import Path

import pytest

import tfpolicies.cli
from helpers.factories import make
from tfpolicies import (
    DQN,
    PPO,
    Algorithm,
    AlgorithmConfig,
    DefaultCallbacks,
    DQNConfig,
    PGConfig,
    PGTF2Policy,
    Policy,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
    SACConfig,
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
from tfpolicies.storage.checkpoint import read_checkpoint, write_checkpoint
from tfpolicies.storage.import_paths import UnresolvedObject
from tfpolicies.storage.json_values import encode_value, find_unresolved
from tfpolicies.storage.manifest import compute_checksum

MAIN = {"$import": "tfpolicies.cli:main"}
DECISION = Path(__file__).parents[2] / "docs/decisions/003-import-paths-in-checkpoints.md"

NAMED = {  # what of this package may stand in each place, an example each
    "callbacks": DefaultCallbacks,
    "model.custom_action_dist": SquashedGaussian,
    "exploration_config.type": EpsilonGreedy,
    "policy_mapping_fn": default_policy_mapping,
    "policies.*.0": PGTF2Policy,
}


def paths_of(places, prefix="", seen=()):
    """The places of a table by their dotted paths; those that lead back to it are left out."""
    for key, place in places.items():
        path = f"{prefix}{key}"
        if isinstance(place, AllowedObject):
            yield path, place
        elif not any(place is each for each in (*seen, places)):
            yield from paths_of(place, f"{path}.", (*seen, places))


def at(path, value):
    """A settings record with a value at a dotted path."""
    record = value
    for key in reversed(path.split(".")):
        if key == "*":
            record = {"any": record}
        elif key == "0":
            record = {"$tuple": [record, None, None, None]}
        elif key == "3":
            record = {"$tuple": [None, None, None, record]}
        else:
            record = {key: record}
    return record


PATHS = dict(paths_of(ALGORITHM_SETTINGS, seen=(POLICY_SETTINGS,)))
INSIDE = (
    "",
    "evaluation_config.",
    "multiagent.",
    "policies.*.3.",
    "policies.*.3.evaluation_config.",
)


OBJECTS = [MAIN, *map(encode_value, NAMED.values())]


@pytest.mark.parametrize("inside", INSIDE)
def test_a_place_takes_what_belongs_there_and_nothing_else(inside):
    for path, value in itertools.product(PATHS, OBJECTS):
        result = decode_settings(at(f"{inside}{path}", value), ALGORITHM_SETTINGS)
        taken = path in NAMED and value == encode_value(NAMED[path])
        missing = [] if taken else [UnresolvedObject(value["$import"], importable=True)]
        assert list(find_unresolved(result).values()) == missing, path
        assert not taken or NAMED[path] in leaves_of(result), path


def leaves_of(value):
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves_of(each)]
    if isinstance(value, tuple):
        return [leaf for each in value for leaf in leaves_of(each)]
    return [value]


@pytest.mark.parametrize("inside", INSIDE)
def test_a_text_that_would_be_imported_is_held_back_wherever_it_stands(inside):
    text = "antigravity.Strategy"
    for path in ("type", "sub_exploration.type", "deep.er.type"):
        result = decode_settings(at(f"{inside}exploration_config.{path}", text), ALGORITHM_SETTINGS)
        assert [each.name for each in find_unresolved(result).values()] == [text]
    env = decode_settings(at(f"{inside}env", "antigravity:Env"), ALGORITHM_SETTINGS)
    assert bool(find_unresolved(env)) is ("policies" not in inside)  # a policy makes none


def every_setting():
    for kind in (AlgorithmConfig, PPOConfig, PGConfig, DQNConfig, SACConfig):
        yield from kind().to_dict()
    yield from (f"model.{name}" for name in MODEL_DEFAULTS)


@pytest.mark.parametrize("places", [ALGORITHM_SETTINGS, POLICY_SETTINGS], ids=["all", "policy"])
def test_a_setting_without_a_place_takes_no_object_at_all(places):
    for path, value in itertools.product(set(every_setting()) - PATHS.keys(), OBJECTS):
        result = decode_settings(at(path, value), places)
        assert [each.name for each in find_unresolved(result).values()] == [value["$import"]], path


def test_every_setting_that_takes_something_callable_has_a_place():
    """A setting that is one by its type, or by its check, and that a file may then name."""

    def called(): ...

    for kind in (AlgorithmConfig, PPOConfig, PGConfig, DQNConfig, SACConfig):
        config = kind()
        for name in config.to_dict():
            try:
                config.copy(copy_frozen=False).update_from_dict({name: called})
            except (ValueError, TypeError):
                continue
            assert name in PATHS or f"{name}.custom_model" in PATHS, name


def test_a_file_names_a_schedule_of_keras_own_or_none():
    for name, is_taken in (("CosineDecay", True), ("LearningRateSchedule", False), ("a.B", False)):
        lr = {"type": name, "initial_learning_rate": 0.1, "decay_steps": 2}
        result = decode_settings({"lr": lr}, POLICY_SETTINGS)["lr"]
        assert result == (lr if is_taken else UnresolvedObject(name))


def objects_of_the_package():
    elsewhere = ("__main__", ".mlserver_runtime")  # a program, and what is copied to MLServer
    for module in pkgutil.walk_packages(tfpolicies.__path__, "tfpolicies."):
        if module.name.endswith(elsewhere) or ".distributed." in module.name:
            continue
        for value in list(vars(importlib.import_module(module.name)).values()):
            if getattr(value, "__module__", "").startswith("tfpolicies"):
                yield value


def test_of_all_functions_of_the_package_those_that_are_marked_may_be_named():
    kinds = {place.role for place in PATHS.values()} | {"algorithm_class"}
    functions = [each for each in objects_of_the_package() if inspect.isfunction(each)]
    marked = {(f, kind) for f in functions for kind in kinds if is_allowed(f, kind)}
    assert marked == {(default_policy_mapping, "policy_mapping_fn")}


def test_a_class_fits_one_kind_of_place_at_most():
    kinds = {place.role for place in PATHS.values()} | {"algorithm_class"}
    for each in objects_of_the_package():
        if isinstance(each, type):
            assert sum(is_allowed(each, kind) for kind in kinds) <= 1, each


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


# -- checkpoints --------------------------------------------------------------------------------


def config(env="CartPole-v1"):
    made = PPOConfig().environment(env).training(model={"fcnet_hiddens": [4]})
    made.framework(inference="tf", jit_compile=False).rollouts(num_envs_per_worker=2)
    return made.debugging(seed=1, log_level="ERROR")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint of an algorithm."""
    folder = tmp_path_factory.mktemp("saved")
    algorithm = config().build()
    algorithm.save(folder)
    algorithm.stop()
    return folder


@pytest.fixture
def forge(saved, tmp_path):
    """Copies the checkpoint, changed by `change(manifest)` and with checksums that fit."""

    def forged(change, of_policy=False):
        for path in saved.rglob("*"):
            target = tmp_path / path.relative_to(saved)
            if path.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
        folder = next((tmp_path / "policies").iterdir()) if of_policy else tmp_path
        path = folder / ("policy.json" if of_policy else "algorithm.json")
        manifest = json.loads(path.read_text())
        change(manifest)
        manifest["checksum"] = compute_checksum(manifest)
        path.write_text(json.dumps(manifest))
        return folder

    return forged


def must_not_run(*args, **kwargs):
    raise SystemExit("the command line ran")


@pytest.fixture(autouse=True)
def the_command_line_would_be_seen(monkeypatch):
    """The function that forged files name is the same one, and raises if it is called."""
    monkeypatch.setattr(tfpolicies.cli.main, "__code__", must_not_run.__code__)


SETTINGS = [  # one at each depth; `test_a_place_takes_what_belongs_there` has all of them
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


@pytest.mark.parametrize(("path", "of_policy"), SETTINGS)
def test_a_function_of_this_package_in_a_checkpoint_is_asked_for_and_not_called(
    forge, path, of_policy
):
    folder = forge(lambda manifest: put(manifest, path, MAIN), of_policy)
    if of_policy and path.partition(".")[0] in TRAINING_ONLY_SETTINGS:
        policy = Policy.from_checkpoint(folder)  # which does without
        assert list(find_unresolved(policy.config).values()) == [
            UnresolvedObject("tfpolicies.cli:main", True)
        ]
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
    algorithm = config().build()
    algorithm.restore(folder)  # keeps its own
    assert algorithm.worker.policy_mapping_fn is default_policy_mapping
    assert algorithm.worker.is_policy_to_train is None


@pytest.mark.parametrize(
    "named",
    [MAIN, encode_value(DefaultCallbacks), encode_value(PPO), encode_value(Policy), "PPO", 3],
)
def test_a_policy_class_is_one_that_can_be_made(forge, named):
    folder = forge(lambda manifest: manifest.update(policy_class=named), of_policy=True)
    with pytest.raises(CheckpointError, match="class"):
        Policy.from_checkpoint(folder)


@pytest.mark.parametrize("named", [MAIN, encode_value(PPOTF2Policy), encode_value(PPOConfig), 3])
def test_an_algorithm_class_is_one(forge, named):
    folder = forge(lambda manifest: manifest.update(algorithm_class=named))
    with pytest.raises(CheckpointError, match="as its algorithm's class"):
        Algorithm.from_checkpoint(folder)


def test_variables_of_other_processes_are_asked_for(forge):
    def change(manifest):
        variables = {"LD_PRELOAD": "/tmp/evil.so"}
        manifest["config"]["settings"]["extra_python_environs_for_worker"] = variables

    folder = forge(change)
    with pytest.raises(CheckpointError, match=r"\(the variables LD_PRELOAD\)"):
        Algorithm.from_checkpoint(folder)
    values = {"extra_python_environs_for_worker": {"A": "1"}}
    again = Algorithm.from_checkpoint(folder, config=values)
    assert again.config.extra_python_environs_for_worker == {"A": "1"}


@pytest.mark.parametrize("name", ["tf_session_args", "local_tf_session_args"])
def test_sessions_take_numbers_from_a_file(forge, name):
    for value, taken in (
        ({"intra_op_parallelism_threads": 1, "gpu_options": {"allow_growth": False}}, True),
        ({"intra_op_parallelism_threads": 10**6}, False),
        ({"experimental": {"coordination_config": {"service_address": "evil:1"}}}, False),
    ):
        folder = forge(lambda manifest, value=value: put(manifest, name, value))
        if taken:
            assert value.items() <= Algorithm.from_checkpoint(folder).config[name].items()
            continue
        with pytest.raises(CheckpointError, match=rf"config\['{name}'\].*for TensorFlow sessions"):
            Algorithm.from_checkpoint(folder)


def test_callbacks_that_were_put_together_are_asked_for(tmp_path):
    both = make_multi_callbacks([DefaultCallbacks, DefaultCallbacks])
    algorithm = config().callbacks(both).build()
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


# -- X.from_checkpoint ----------------------------------------------------------------------------


class OwnPPO(PPO):
    """An algorithm of the user's."""


class OwnPolicy(PPOTF2Policy):
    """A policy of the user's."""


def test_an_algorithm_is_loaded_by_its_class_and_those_above(saved):
    for kind in (Algorithm, PPO):
        assert type(kind.from_checkpoint(saved)) is PPO
    for kind in (DQN, OwnPPO):
        words = rf"class PPO, not of {kind.__name__}\. Call `PPO\.from_checkpoint\(path\)`"
        with pytest.raises(CheckpointError, match=words):
            kind.from_checkpoint(saved)


def test_an_algorithm_of_the_users_is_found_by_calling_it(tmp_path):
    OwnPPO(config()).save(tmp_path)
    assert type(OwnPPO.from_checkpoint(tmp_path)) is OwnPPO
    for kind in (PPO, DQN):
        with pytest.raises(CheckpointError, match="Call `from_checkpoint` on your class"):
            kind.from_checkpoint(tmp_path)


def test_a_policy_is_loaded_by_its_class_and_those_above(saved, tmp_path):
    from tfpolicies import DQNTF2Policy, PPOTF1Policy, TFPolicy

    folder = next((saved / "policies").iterdir())
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


def test_of_several_policies_those_of_the_class_are_loaded(tmp_path):
    from helpers.multi_agent_envs import SPACE, THREE, Staggered

    class Staged(Staggered):
        def __init__(self, context):
            super().__init__()

    def mapping(agent_id, episode=None, worker=None, **kwargs):
        return "p" if agent_id == "a" else "q"

    policies = {pid: PolicySpec(kind, SPACE, THREE) for pid, kind in KINDS.items()}
    made = config(Staged).multi_agent(policies=policies, policy_mapping_fn=mapping)
    made.build().save(tmp_path)
    result = Policy.from_checkpoint(tmp_path)
    assert {pid: type(policy) for pid, policy in result.items()} == KINDS
    words = r"other classes, 'q' \(PGTF2Policy\).*PPOTF2Policy\.from_checkpoint\(path, policy_ids="
    with pytest.raises(CheckpointError, match=words + r"\['p'\]\) or Policy\.from_checkpoint"):
        PPOTF2Policy.from_checkpoint(tmp_path)
    assert list(PPOTF2Policy.from_checkpoint(tmp_path, policy_ids=["p"])) == ["p"]
    with pytest.raises(CheckpointError, match=r"'p' \(PPOTF2Policy\)"):
        PGTF2Policy.from_checkpoint(tmp_path, policy_ids=["p"])


KINDS = {"p": PPOTF2Policy, "q": PGTF2Policy}


ARRAY = {"$array": {"dtype": "float32", "shape": [2], "elements": [1.0, 2.0]}}


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("config", "settings", "kl_coeff"), 10**400),
        (("config", "settings", "grad_clip"), -(10**400)),
        (("config", "settings", "model", "log_std_init"), 10**400),
        (("config", "settings", "framework"), ARRAY),
        (("config", "settings", "batch_mode"), ARRAY),
        (("config", "settings", "lr"), {"type": ARRAY}),
        (("config", "settings", "exploration_config", "type"), ARRAY),
        (("state", "rng", "state"), ARRAY),
    ],
)
def test_an_array_or_an_endless_number_in_a_file_is_refused_by_an_error_of_ours(
    tmp_path, way, value
):
    make().export_checkpoint(tmp_path / "sound")
    result = read_checkpoint(tmp_path / "sound", "policy.json", kind="Policy")
    added = ("format_version", "tfpolicies_version", "arrays", "policies", "segments", "checksum")
    manifest = {name: entry for name, entry in result.manifest.items() if name not in added}
    node = manifest
    for name in way[:-1]:
        node = node[name]
    assert way[-1] in node
    node[way[-1]] = value
    write_checkpoint(tmp_path / "hostile", "policy.json", manifest, result.arrays)
    with pytest.raises(TfPoliciesError):
        PPOTF2Policy.from_checkpoint(tmp_path / "hostile")


def test_an_id_that_no_file_can_have_is_refused_and_a_policy_that_was_given_it_acts(tmp_path):
    with pytest.raises(ConfigError, match="and valid UTF-8; got"):
        PPOConfig().multi_agent(policies={"a\udc80"})
    odd = make(__policy_id="a\udc80")
    odd.export_checkpoint(tmp_path)
    assert PPOTF2Policy.from_checkpoint(tmp_path).policy_id == "a\udc80"
