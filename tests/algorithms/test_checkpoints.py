"""Algorithms and policies saved and restored: exactly, safely, or not at all."""

import json
import pickle
import re
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.checkpoints import edit_manifest
from helpers.environments import SavedCountingEnv, SeededEnv, counting_creator
from helpers.factories import OBS, TWO, assert_equal, batch_for, make, rows_of
from helpers.keras_models import two_layers, unregistered_layer
from helpers.workers import make_small_config
from tfpolicies import (
    Algorithm,
    DefaultCallbacks,
    PGTF2Policy,
    Policy,
    PolicySpec,
    PPOTF2Policy,
    TFPolicy,
)
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.settings_allowlist import check_environment_name, decode_settings
from tfpolicies.envs.env_registry import register_environment
from tfpolicies.errors import CheckpointError, ConfigError, UnknownPolicyError, WeightsError
from tfpolicies.exploration.strategies import EpsilonGreedy
from tfpolicies.storage.checkpoint import CheckpointData, read_checkpoint, write_checkpoint
from tfpolicies.storage.json_values import UnresolvedObject, encode_value, find_unresolved
from tfpolicies.storage.manifest import compute_checksum

pytestmark = pytest.mark.usefixtures("kept_programs")


class OwnPolicy(PPOTF2Policy):
    """A user's class, which no checkpoint can import by itself."""


class Watching(DefaultCallbacks):
    def on_checkpoint_loaded(self, *, algorithm):
        algorithm.was_loaded = True


def the_only_policy(agent_id, episode, worker=None, **kwargs):
    return "default_policy"


def make_config(env="CartPole-v1", **settings):
    config = make_small_config(env, seed=3, num_envs_per_worker=2, evaluation_duration=2)
    config.training(model={"fcnet_hiddens": [8]}, train_batch_size=64, sgd_minibatch_size=32)
    config.training(lr=1e-2, entropy_coeff=0.01)
    return config.update_from_dict(settings)


def assert_same_run(one, other):
    np.testing.assert_equal(other.get_weights(), one.get_weights())
    states = [a.get_policy().get_state() for a in (one, other)]
    for name in ("rng", "hyperparameters", "num_grad_updates"):
        assert states[0][name] == states[1][name]
    assert one.counters == other.counters
    assert one.iteration == other.iteration


# -- algorithms -------------------------------------------------------------------------------


@pytest.mark.core
def test_a_run_resumed_with_new_episodes_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    algorithm = make_config(reset_episodes_at_checkpoint=True).build()
    for _ in range(3):
        algorithm.train()
    algorithm.evaluate()
    saved = algorithm.save(tmp_path / "checkpoint")
    resumed = Algorithm.from_checkpoint(saved)
    for _ in range(3):
        results = [a.train() for a in (algorithm, resumed)]
        assert results[0]["policy_metrics"] == results[1]["policy_metrics"]
    assert_same_run(algorithm, resumed)
    assert results[0]["episode_reward_mean"] == results[1]["episode_reward_mean"]
    evaluations = [a.evaluate()["evaluation"]["episode_reward_mean"] for a in (algorithm, resumed)]
    assert evaluations[0] == evaluations[1]


def test_ranges_and_rewards_of_a_run_continue_and_are_new_in_older_checkpoints(tmp_path):
    algorithm = make_config().build()
    meter = algorithm._train_batch_sampler.row_meter
    obs = np.array([[0.0, -2.0], [1.0, 3.0]])
    meter.measure("default_policy", SampleBatch({"obs": obs, "rewards": np.array([1.0, -7.0])}))
    saved = algorithm.save(tmp_path / "checkpoint")

    def get_figures():
        other = Algorithm.from_checkpoint(saved)._train_batch_sampler.row_meter
        rows = {"obs": np.array([[0.5, 4.0], [0.5, 4.0]]), "rewards": np.array([2.0, 2.0])}
        other.begin_iteration()
        other.measure("default_policy", SampleBatch(rows))
        figures = other.get("default_policy")
        return figures["obs_range"], figures["reward_magnitude"]

    assert get_figures() == (6.0, 7.0)
    with edit_manifest(tmp_path / "checkpoint" / "algorithm.json") as manifest:
        del manifest["row_meter"]
    assert get_figures() == (0.0, 2.0)


@pytest.mark.parametrize("length", [3, 40])
def test_episodes_that_checkpoints_cut_are_named_once(length, tmp_path, caplog):
    settings = {"reset_episodes_at_checkpoint": True, "log_level": "WARN"}
    create = counting_creator("plain", lengths=[length])
    algorithm = make_config(create, **settings).build()
    for _ in range(2):
        algorithm.train()
        algorithm.save(tmp_path)
        algorithm.save(tmp_path)  # of the same steps
    assert algorithm.counters["num_env_steps_sampled"] == 128
    algorithm.train()
    algorithm.save(tmp_path)
    lines = [x.getMessage() for x in caplog.records if "Episodes are cut" in x.getMessage()]
    assert len(lines) == (length == 40)
    for line in lines:
        assert "here every 32 steps of each environment, and none has ended" in line
        assert "at least 3 times as many steps as the longest episode" in line


def test_a_run_resumes_within_its_episodes_where_environments_give_their_state(tmp_path):
    def create(context):
        return SavedCountingEnv(context.vector_index, [7, 5])

    algorithm = make_config(create).build()
    algorithm.train()
    saved = algorithm.save(tmp_path / "checkpoint")
    resumed = Algorithm.from_checkpoint(saved, config={"env": create})
    batches = [a.worker.sample() for a in (algorithm, resumed)]
    assert batches[0]["t"][0] > 0  # in the middle of an episode
    for name in ("obs", "new_obs", "actions", "rewards", "t", "eps_id", "advantages"):
        np.testing.assert_array_equal(batches[0][name], batches[1][name])
    for a in (algorithm, resumed):
        a.train()
    assert_same_run(algorithm, resumed)


def test_restore_brings_back_an_earlier_state(tmp_path):
    algorithm = make_config().build()
    algorithm.train()
    algorithm.save(tmp_path)
    before, counters = algorithm.get_weights(), dict(algorithm.counters)
    algorithm.train()
    algorithm.restore(str(tmp_path))
    np.testing.assert_equal(algorithm.get_weights(), before)
    assert algorithm.counters == counters
    assert algorithm.iteration == 1
    result = algorithm.train()
    assert (result["training_iteration"], result["iterations_since_restore"]) == (2, 1)
    assert result["time_since_restore"] == pytest.approx(result["time_this_iter_s"])


def test_values_of_auto_are_kept(tmp_path):
    algorithm = make_config(inference="auto", jit_compile="auto").build()
    assert algorithm.config["rollout_fragment_length"] == 32
    algorithm.save(tmp_path)
    for resolved in (algorithm.config, Algorithm.from_checkpoint(tmp_path).config):
        assert (resolved["inference"], resolved["jit_compile"]) == ("onnx", True)


def test_objects_that_no_file_holds_are_named_when_saved_and_required_all_at_once(tmp_path, caplog):
    class Local(Watching):
        pass

    local = make_config(SeededEnv, log_level="WARN").callbacks(Local)
    algorithm = local.multi_agent(policy_mapping_fn=the_only_policy).build()
    for _ in range(2):
        algorithm.save(tmp_path)
    (text,) = [record.getMessage() for record in caplog.records]
    call = "from_checkpoint(path, config={'env': ..., 'callbacks': ...}, policy_mapping_fn=...)."
    assert text.endswith(f" PPO.{call}")
    with pytest.raises(CheckpointError) as error:
        Algorithm.from_checkpoint(tmp_path)
    assert str(error.value).endswith(f" {call}")
    for message in (text, str(error.value)):
        for name in ("['env'] (helpers.environments:SeededEnv)", "Local)", ":the_only_policy)"):
            assert name in message
    settings = {"env": SeededEnv, "callbacks": Local}
    with pytest.raises(CheckpointError, match=r"\(path, policy_mapping_fn=\.\.\.\)\.$"):
        Algorithm.from_checkpoint(tmp_path, config=settings)
    again = Algorithm.from_checkpoint(tmp_path, None, the_only_policy, config=settings)
    assert again.was_loaded


def test_nothing_is_logged_where_a_file_holds_all(tmp_path, caplog):
    make_config(log_level="WARN").build().save(tmp_path)
    assert not caplog.records


def test_a_policy_that_is_saved_alone_warns_of_a_class_without_an_import_path(tmp_path):
    class Local(Watching):
        pass

    policy = make_config(SeededEnv).callbacks(Local).build().get_policy()
    with pytest.warns(UserWarning, match=r"stored by name only: .*Local\. Loading requires"):
        policy.export_checkpoint(tmp_path)


# -- objects that loading requires ------------------------------------------------------------


@pytest.mark.core
def test_a_policy_acts_without_the_callbacks_and_functions_of_its_training(tmp_path):
    watched = make_config(SeededEnv, evaluation_config={"callbacks": Watching}).callbacks(Watching)
    algorithm = watched.multi_agent(policy_mapping_fn=the_only_policy).build()
    algorithm.save(tmp_path / "run")
    algorithm.get_policy().export_checkpoint(tmp_path / "policy")
    batch = algorithm.worker.sample()
    (from_run,) = Policy.from_checkpoint(tmp_path / "run").values()
    alone = Policy.from_checkpoint(tmp_path / "policy")
    observations = np.stack([alone.observation_space.sample() for _ in range(3)])
    expected = algorithm.get_policy().compute_actions(observations, explore=False)[0]
    for policy in (from_run, alone, alone.copy(), pickle.loads(pickle.dumps(alone))):
        actual = policy.compute_actions(observations, explore=False)[0]
        np.testing.assert_array_equal(actual, expected)
        with pytest.raises(CheckpointError, match=r":Watching is needed now.*config=\{\.\.\.\}"):
            policy.learn_on_batch(batch)
    alone.export_checkpoint(tmp_path / "again")  # the names are kept
    again = Policy.from_checkpoint(tmp_path / "again", config={"callbacks": Watching})
    again.learn_on_batch(batch)
    with pytest.raises(CheckpointError, match=r"config\['callbacks'\]"):
        Algorithm.from_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("framework", ["tf2", "tf"])
def test_a_policy_with_a_factory_of_keras_layers_is_loaded_without_the_factory(framework, tmp_path):
    model = {"custom_model": two_layers, "custom_model_config": {"width": 6}}
    algorithm = make_config(model=model).framework(framework).build()
    algorithm.train()
    algorithm.save(tmp_path)
    (policy,) = Policy.from_checkpoint(tmp_path).values()
    assert_equal(policy.get_weights(), algorithm.get_policy().get_weights())
    observations = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
    actual, expected = (
        x.compute_actions(observations, explore=False)[2] for x in (policy, algorithm.get_policy())
    )
    for name in ("action_dist_inputs", "vf_preds"):
        np.testing.assert_array_equal(actual[name], expected[name])
    policy.export_model(tmp_path / "exported", onnx=True)
    policy.learn_on_batch(algorithm.worker.sample())
    settings = {"model": {"custom_model": two_layers}}
    (by_factory,) = Policy.from_checkpoint(tmp_path, config=settings).values()
    assert by_factory.config["model"]["custom_model"] is two_layers
    with pytest.raises(CheckpointError, match=r"\['custom_model'\] \(.*:two_layers\)"):
        Algorithm.from_checkpoint(tmp_path)
    assert type(Algorithm.from_checkpoint(tmp_path, config=settings)) is type(algorithm)


@pytest.mark.core
def test_a_factory_of_unregistered_layers_is_required(tmp_path):
    algorithm = make_config().training(model={"custom_model": unregistered_layer}).build()
    algorithm.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"\['custom_model'\] \(.*:unregistered_layer\)"):
        Policy.from_checkpoint(tmp_path)
    settings = {"model": {"custom_model": unregistered_layer}}
    (policy,) = Policy.from_checkpoint(tmp_path, config=settings).values()
    assert_equal(policy.get_weights(), algorithm.get_policy().get_weights())


def damage_manifest(folder: Path) -> str:
    (folder / "algorithm.json").write_text("{")
    return "algorithm.json"


def damage_arrays(folder: Path) -> str:
    file = next(folder.glob("policies/*/weights-*.h5"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    return file.name


def truncate_arrays(folder: Path) -> str:
    file = next(folder.glob("policies/*/optimizer-*.h5"))
    file.write_bytes(file.read_bytes()[:-10])
    return file.name


def make_foreign(folder: Path) -> str:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    make().export_checkpoint(folder)
    return "algorithm.json"


@pytest.mark.core
@pytest.mark.parametrize("damage", [damage_manifest, damage_arrays, truncate_arrays, make_foreign])
def test_a_damaged_checkpoint_is_named_and_changes_nothing(damage, tmp_path):
    algorithm = make_config().build()
    algorithm.save(tmp_path)
    algorithm.train()
    before, iteration = algorithm.get_weights(), algorithm.iteration
    rng = algorithm.get_policy().get_state()["rng"]
    name = damage(tmp_path)
    with pytest.raises(CheckpointError, match=name):
        algorithm.restore(tmp_path)
    np.testing.assert_equal(algorithm.get_weights(), before)
    assert algorithm.get_policy().get_state()["rng"] == rng
    assert algorithm.iteration == iteration


def test_a_checkpoint_of_another_architecture_changes_nothing(tmp_path):
    make_config(model={"fcnet_hiddens": [16]}).build().save(tmp_path)
    algorithm = make_config().build()
    before = algorithm.get_weights()
    with pytest.raises(WeightsError, match=r"\(4, 8\).*\(4, 16\)"):
        algorithm.restore(tmp_path)
    np.testing.assert_equal(algorithm.get_weights(), before)


@pytest.mark.parametrize("loaded_class", [Algorithm, TFPolicy])
def test_the_error_about_a_folder_names_the_checkpoint_in_it(tmp_path, loaded_class):
    run = tmp_path / "ppo-run"
    make().export_checkpoint(run / "checkpoints" / "best")
    (run / "checkpoints" / "events").mkdir()
    for folder in (run, tmp_path, run / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"There is a checkpoint in .*: give.*best'"):
            loaded_class.from_checkpoint(folder)
    with pytest.raises(CheckpointError, match="not found"):
        loaded_class.from_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no policy.json.$"):
        TFPolicy.from_checkpoint(run / "checkpoints" / "events")


def test_saved_models_of_all_policies_follow_a_checkpoint_if_asked_for(tmp_path):
    algorithm = make_config(export_native_model_files=True).build()
    before = algorithm.get_policy().get_state()
    before["weights"] = {name: x * 0 for name, x in before["weights"].items()}
    for turn in range(2):  # the second replaces the first
        states = {"default_policy": before} if turn else None
        path = algorithm.save(tmp_path, policy_states=states).checkpoint.path
        exported = tf.saved_model.load(str(Path(path, "policies", "default_policy", "model")))
        logits = exported(np.ones((1, 4), np.float32))["action_dist_inputs"]
        assert bool(np.any(logits)) == (not turn)
    assert not any(map(np.any, Algorithm.from_checkpoint(path).get_policy().get_weights().values()))


# -- policies ---------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("policy_class", [PPOTF2Policy, PGTF2Policy])
def test_a_restored_policy_acts_and_learns_exactly_as_the_saved_one(policy_class, tmp_path):
    policy = make(policy_class, lr=1e-2, grad_clip=0.5)
    batch = batch_for(policy, 12)
    policy.learn_on_batch(batch)
    policy.set_hyperparameter("lr", 5e-3)
    policy.export_checkpoint(tmp_path)
    copy = TFPolicy.from_checkpoint(tmp_path)
    assert type(copy) is policy_class
    assert copy.get_hyperparameter("lr") == policy.get_hyperparameter("lr")
    assert copy.num_grad_updates == policy.num_grad_updates == 1
    assert copy.global_timestep == policy.global_timestep
    actual, expected = (x.compute_actions(rows_of(OBS, 50)).actions for x in (copy, policy))
    np.testing.assert_array_equal(actual, expected)
    for x in (policy, copy):
        x.learn_epochs(batch, 3, 5)
    assert_equal(copy.get_weights(), policy.get_weights())


def test_policies_of_an_algorithm_are_loaded_by_id(tmp_path):
    algorithm = make_config().build()
    algorithm.save(tmp_path)
    for policy_ids in (None, ["default_policy"]):
        assert set(TFPolicy.from_checkpoint(tmp_path, policy_ids)) == {"default_policy"}
    with pytest.raises(UnknownPolicyError, match="nobody"):
        TFPolicy.from_checkpoint(tmp_path, ["nobody"])
    make().export_checkpoint(tmp_path / "one")
    with pytest.raises(CheckpointError, match="one policy"):
        TFPolicy.from_checkpoint(tmp_path / "one", ["default_policy"])


def test_a_model_of_keras_layers_is_loaded_from_the_checkpoint(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(2)])
    policy = make(model={"custom_model": model})
    policy.export_checkpoint(tmp_path)
    actual, expected = (
        x.compute_actions(rows_of(OBS, 4), explore=False).extras["action_dist_inputs"]
        for x in (TFPolicy.from_checkpoint(tmp_path), policy)
    )
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.core
def test_a_checkpoint_from_before_channels_could_be_first_keeps_its_network(tmp_path):
    space = spaces.Box(0, 255, (3, 12, 12), np.uint8)
    model = {"conv_filters": [[4, [3, 12], 1]], "channels_first": False}
    policy = PPOTF2Policy(space, TWO, {"seed": 1, "model": model, "inference": "tf"})
    policy.export_checkpoint(tmp_path)
    manifest = json.loads((tmp_path / "policy.json").read_text())
    del manifest["config"]["settings"]["model"]["channels_first"]
    manifest["checksum"] = compute_checksum(manifest)
    (tmp_path / "policy.json").write_text(json.dumps(manifest))
    obs = np.random.default_rng(0).integers(0, 256, (5, *space.shape), np.uint8)
    actual, expected = (
        x.compute_actions(obs, explore=False).extras
        for x in (TFPolicy.from_checkpoint(tmp_path), policy)
    )
    for name, column in expected.items():
        np.testing.assert_array_equal(actual[name], column)


def test_a_custom_class_is_loaded_by_calling_it(tmp_path):
    make(OwnPolicy).export_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"OwnPolicy\.from_checkpoint\(path\)"):
        TFPolicy.from_checkpoint(tmp_path)
    assert type(OwnPolicy.from_checkpoint(tmp_path)) is OwnPolicy


def test_no_code_named_by_a_checkpoint_is_run(tmp_path):
    make().export_checkpoint(tmp_path)
    manifest = json.loads((tmp_path / "policy.json").read_text())
    manifest["policy_class"] = {"$import": "os:system"}
    (tmp_path / "policy.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"policy\.json"):
        TFPolicy.from_checkpoint(tmp_path)


FOREIGN = """
from helpers.environments import SeededEnv
from tfpolicies.exploration.strategies import StochasticSampling

class Env(SeededEnv): pass
class Strategy(StochasticSampling): pass
"""


@pytest.fixture
def unimport_foreign(tmp_path, monkeypatch):
    """Writes a custom module; returns a function that removes it from the imported ones."""
    (tmp_path / "foreign_module.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)

    def unimport():
        return sys.modules.pop("foreign_module", None)

    yield unimport
    unimport()


@pytest.mark.parametrize("name", ["foreign_module:Env", "foreign_module.Env"])
def test_an_environment_that_a_file_names_is_not_imported(name, unimport_foreign, tmp_path, caplog):
    settings = {"exploration_config": {"type": "foreign_module.Strategy"}}
    algorithm = make_config(
        name, **settings, log_level="WARN", evaluation_config={"env": name, **settings}
    ).build()
    algorithm.save(tmp_path / "run")
    call = "(path, config={'env': ..., 'exploration_config': ..., 'evaluation_config': ...})."
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith(call)
    assert unimport_foreign() is not None
    with pytest.raises(CheckpointError) as error:
        Algorithm.from_checkpoint(tmp_path / "run")
    assert str(error.value).endswith(call)
    for place in (
        f"config['env'] ({name})",
        f"config['evaluation_config']['env'] ({name})",
        "config['exploration_config']['type'] (foreign_module.Strategy)",
        "config['evaluation_config']['exploration_config']['type'] (foreign_module.Strategy)",
    ):
        assert place in str(error.value)
    with pytest.raises(CheckpointError, match=r"\['exploration_config'\]\['type'\]"):
        Policy.from_checkpoint(tmp_path / "run")
    assert unimport_foreign() is None
    settings |= {"env": name, "evaluation_config": {"env": name}}
    assert Algorithm.from_checkpoint(tmp_path / "run", config=settings).config.env == name
    assert unimport_foreign() is not None


@pytest.mark.usefixtures("unimport_foreign")
def test_an_environment_that_the_caller_names_may_be_named_by_the_file_too(tmp_path):
    name = "foreign_module:Env"
    make_config(name, evaluation_config={"env": name}).build().save(tmp_path)
    assert Algorithm.from_checkpoint(tmp_path, config={"env": name}).config.env == name
    settings = {"env": SeededEnv, "evaluation_config": None}
    assert Algorithm.from_checkpoint(tmp_path, config=settings).config.env is SeededEnv


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "is_accepted"),
    [
        ("CartPole-v1", True),
        ("nowhere/Unheard.Of-v0", True),  # it is looked up, not imported
        ("registered_here:Env", True),
        ("pettingzoo:classic/tictactoe_v3", True),
        ("mpe2:simple_spread_v3", True),
        ("tfpolicies.testing.environments:MaskedEnv", False),
        ("tfpolicies.testing.environments.MaskedEnv", False),
        ("mpe2:simple_spread_v3.os", False),
        ("tfpolicies.storage.atomic:os", False),
        ("tfpolicies.storage.checkpoint:write_checkpoint", False),
        ("tfpolicies.policy.tf_policy:TFPolicy", False),
        ("foreign_module:CartPole-v1", False),
        ("mpe2:__main__", False),
        ("mpe2:setup", False),
        (":Env", False),
        ("..Env", False),
    ],
)
def test_a_file_may_choose_among_environments_that_are_there(name, is_accepted):
    register_environment("registered_here:Env", SeededEnv)
    result = check_environment_name(name)
    assert result == (name if is_accepted else UnresolvedObject(name, importable=True))


@pytest.mark.core
@pytest.mark.parametrize("name", ["GymV21Environment-v0", "GymV26Environment"])
def test_an_environment_that_creates_classes_that_its_settings_name_is_required(name):
    assert check_environment_name(name) == UnresolvedObject(name)


def test_objects_that_an_optimizer_would_make_are_held_back():
    inner = {"module": "foreign_module", "class_name": "Inner", "config": {}}
    settings = {"optimizer": {"type": "lossscaleoptimizer", "inner_optimizer": inner}}
    result = decode_settings(encode_value({"policies": {"a": (None, None, None, settings)}}))
    names = [missing.name for missing in find_unresolved(result).values()]
    assert names == ["Inner"]


def test_another_strategy_begins_in_its_initial_state(tmp_path):
    greedy = {"type": "EpsilonGreedy", "epsilon_timesteps": 100, "final_epsilon": 0.0}
    algorithm = make_config(exploration_config=greedy).build()
    policy = algorithm.get_policy()
    for _ in range(2):  # the second begins at 30
        policy.compute_actions(rows_of(policy.observation_space, 30))
    algorithm.save(tmp_path / "greedy")

    def load_exploration_state(folder, **changed):
        path, values = str(tmp_path / folder), {"exploration_config": changed} if changed else {}
        algorithm = Algorithm.from_checkpoint(path, config=values)
        (policy,) = Policy.from_checkpoint(path, config=values).values()
        state = algorithm.get_policy().get_exploration_state()
        assert state == policy.get_exploration_state()
        algorithm.save(tmp_path / "last")
        return state

    assert load_exploration_state("greedy")["last_timestep"] == 30
    assert load_exploration_state("greedy", type=EpsilonGreedy)["last_timestep"] == 30
    assert load_exploration_state("greedy", type="SoftQ") == {}
    initial = {"cur_epsilon": 1.0, "last_timestep": 0}
    assert load_exploration_state("last", type="EpsilonGreedy") == initial


def test_only_the_json_format_without_a_prefix_is_accepted(tmp_path):
    with pytest.raises(ConfigError, match="checkpoint_format must be 'json', got 'cloudpickle'"):
        make().export_checkpoint(tmp_path, checkpoint_format="cloudpickle")
    with pytest.raises(ConfigError, match="filename_prefix"):
        make().export_checkpoint(tmp_path, "old")
    assert list(tmp_path.iterdir()) == []


def test_a_policy_spec_survives_json_and_compares_by_its_four_fields():
    spec = PolicySpec(PPOTF2Policy, OBS, TWO, {"gamma": 0.9, "model": {"fcnet_hiddens": [4]}})
    record = json.loads(json.dumps(spec.serialize()))
    assert PolicySpec.deserialize(record) == spec
    assert spec != PolicySpec(PPOTF2Policy, OBS, TWO, {"gamma": 0.8})
    assert spec != "a spec"
    assert PolicySpec.deserialize(PolicySpec().serialize()) == PolicySpec()


def test_a_policy_spec_with_a_custom_class_requires_it():
    spec = PolicySpec(OwnPolicy, OBS, TWO)
    record = spec.serialize()
    with pytest.raises(CheckpointError, match=r"OwnPolicy.*objects=\{path: object\}"):
        PolicySpec.deserialize(record)
    known = {record["policy_class"]["$import"]: OwnPolicy}
    assert PolicySpec.deserialize(record, objects=known) == spec
    with pytest.raises(CheckpointError, match="lacks policy_class"):
        PolicySpec.deserialize({})


def test_an_algorithm_with_one_agent_loads_with_the_policies_that_were_added(tmp_path):
    algorithm = make_config().build()
    algorithm.add_policy("snapshot", policy=algorithm.get_policy().copy("snapshot"))
    algorithm.save(tmp_path)
    again = Algorithm.from_checkpoint(tmp_path)
    assert set(again.worker.policy_map) == {"default_policy", "snapshot"}
    np.testing.assert_equal(again.get_weights(), algorithm.get_weights())


def copy_with_changes(source, target, change):
    """Copies the checkpoint of a run; `change` edits the manifest of the copy."""
    added = ("format_version", "tfpolicies_version", "arrays", "policies", "checksum")
    run = read_checkpoint(source, "algorithm.json", kind="Algorithm")
    manifests = {
        pid: {name: x for name, x in data.manifest.items() if name not in added}
        for pid, data in {**run.policies, None: run}.items()
    }
    change(manifests[None])
    policies = {
        pid: CheckpointData("policy.json", manifests[pid], data.arrays)
        for pid, data in run.policies.items()
    }
    write_checkpoint(target, "algorithm.json", manifests[None], run.arrays, policies=policies)


@pytest.mark.core
@pytest.mark.parametrize(
    ("part", "entry", "value"),
    [
        ("progress", "episodes", {"$import": "os:system"}),
        ("progress", "counters", []),
        ("progress", "iteration", -1),
        ("progress", "time_total_s", "long"),
        ("worker", "global_vars", 5),
        ("worker", "seeds_used", "many"),
        ("evaluation", "seeds_used", 1),
        ("roster", "policy_mapping_fn", 5),
        ("roster", "policies_to_train", "all"),
        ("roster", "policies_to_train", [["nested"]]),
    ],
)
def test_a_run_whose_state_is_garbled_is_refused_before_anything_is_restored(
    tmp_path, part, entry, value
):
    def garble(manifest):
        manifest[part] = {**(manifest[part] or {}), entry: value}

    algorithm = make_config().build()
    algorithm.save(tmp_path)
    copy_with_changes(tmp_path, tmp_path / "bad", garble)
    weights = algorithm.get_weights()["default_policy"]
    other = {"default_policy": {name: x + 1 for name, x in weights.items()}}
    algorithm.set_weights(other)
    with pytest.raises(CheckpointError, match="lacks or garbles"):
        algorithm.restore(tmp_path / "bad")
    np.testing.assert_equal(algorithm.get_weights(), other)
    with pytest.raises(CheckpointError, match="bad"):
        Algorithm.from_checkpoint(tmp_path / "bad")


@pytest.mark.parametrize("part", ["roster", "config", "algorithm_class"])
def test_a_run_without_a_part_of_its_manifest_is_refused(tmp_path, part):
    make_config().build().save(tmp_path)
    copy_with_changes(tmp_path, tmp_path / "bad", lambda manifest: manifest.pop(part))
    with pytest.raises(CheckpointError, match=f"lacks or garbles '{part}'"):
        Algorithm.from_checkpoint(tmp_path / "bad")


@pytest.mark.core
def test_the_error_about_a_missing_checkpoint_names_one_of_its_run(tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "latest"
    folder.mkdir(parents=True)
    for path in (tmp_path / "run" / "run.json", folder / "algorithm.json"):
        path.write_text("{}")
    for name in ("run", "run/checkpoint", "run/checkpoints/best"):
        with pytest.raises(CheckpointError, match=f"give '{re.escape(str(folder))}'"):
            Algorithm.from_checkpoint(tmp_path / name)
