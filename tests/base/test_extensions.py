"""Extensions: attributes that they add to objects of the package, and hooks."""

import contextlib
import copy
import pickle
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.factories import OBS, PLANE, TWO, batch_for, make
from tfpolicies import (
    AlgorithmConfig,
    PGTF2Policy,
    Policy,
    PPOConfig,
    PPOTF2Policy,
    SampleBatch,
    ViewRequirement,
)
from tfpolicies.base.extensions import EXTENSIONS, describe_missing
from tfpolicies.errors import ConfigError, UsageError
from tfpolicies.extending import Extension, register_extension
from tfpolicies.rollout.episode import Episode


@pytest.fixture
def register(no_extensions, monkeypatch):
    """Registers extensions for one test."""
    monkeypatch.setattr("tfpolicies.program.program._registry", {})
    yield register_extension
    EXTENSIONS.clear()


def _get_sum(batch):
    if "rewards" not in batch:
        raise LookupError("rewards")
    return float(batch["rewards"].sum())


class Sums(Extension):
    attributes = {
        SampleBatch: {"total": _get_sum, "count": lambda batch: -1},
        Policy: {"twice": lambda policy: lambda x: 2 * x},
        AlgorithmConfig: {"rate": lambda config: config.lr},
    }
    class_attributes = {
        Policy: {"title": lambda cls: cls.__name__.upper()},
        ViewRequirement: {"of_rewards": lambda cls: cls("rewards", shift=-1)},
    }


def test_objects_have_further_attributes_that_hide_none_of_the_package(register):
    batch = SampleBatch(rewards=[1.0, 2.5], obs=[0, 1])
    assert not hasattr(batch, "total")
    register(Sums)
    assert batch.total == 3.5
    assert batch.count == 2
    assert not hasattr(SampleBatch(obs=[0]), "total")
    with pytest.raises(AttributeError, match="'SampleBatch' object has no attribute 'totl'"):
        _ = batch.totl
    assert PPOConfig().training(lr=0.25).rate == 0.25
    assert PPOConfig().training(lr=0.25)["rate"] == 0.25


def test_classes_have_further_attributes_and_so_have_their_subclasses(register):
    register(Sums)
    assert PGTF2Policy.title == "PGTF2POLICY"
    assert ViewRequirement.of_rewards.shift == -1
    policy = make(PGTF2Policy)
    assert policy.twice(4) == 8
    assert not hasattr(policy, "title")
    assert not hasattr(PGTF2Policy, "twice")
    with pytest.raises(AttributeError, match="type object 'PGTF2Policy' has no attribute 'titel'"):
        _ = PGTF2Policy.titel


def test_the_first_extension_that_has_an_attribute_gives_it(register):
    class Absent(Sums):
        attributes = {SampleBatch: {"total": lambda batch: [].index(1) or {}["none"]}}

    class Other(Sums):
        attributes = {SampleBatch: {"total": lambda batch: {}["none"]}}

    class Last(Sums):
        attributes = {SampleBatch: {"total": lambda batch: 7.0}}

    for extension in (Other, Sums, Last):
        register(extension)
    assert SampleBatch(rewards=[1.0]).total == 1.0
    assert SampleBatch(obs=[1.0]).total == 7.0
    EXTENSIONS.clear()
    register(Absent)
    with pytest.raises(ValueError, match="not in list"):  # an error of a getter is not hidden
        _ = SampleBatch(rewards=[1.0]).total


def test_batches_and_views_are_copied_and_pickled_as_before(register):
    register(Sums)
    batch = SampleBatch(rewards=[1.0, 2.5])
    for same in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert same.total == 3.5
    view = ViewRequirement("obs")
    assert pickle.loads(pickle.dumps(view)) == copy.deepcopy(view) == view


def test_a_path_is_imported_when_something_is_missing_and_not_before(register, monkeypatch):
    register("tests_extension_of_sums:Sums")
    assert SampleBatch(rewards=[1.0]).count == 1
    with pytest.raises(ModuleNotFoundError, match="tests_extension_of_sums"):
        _ = SampleBatch(rewards=[1.0]).total
    module = types.ModuleType("tests_extension_of_sums")
    module.Sums = Sums
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert SampleBatch(rewards=[1.0]).total == 1.0
    EXTENSIONS.clear()
    register("json:loads")
    with pytest.raises(ConfigError, match="'json:loads' must be a subclass of Extension"):
        _ = SampleBatch(rewards=[1.0]).total


@pytest.mark.parametrize("extension", ["json", "json:a:b", 3, dict, Sums()])
def test_other_objects_are_refused_as_extensions(register, extension):
    with pytest.raises(ConfigError, match="must be a subclass of Extension, or its path"):
        register(extension)


def test_remote_workers_get_the_extensions(register):
    names = pytest.importorskip("tfpolicies.distributed.registry_sync")
    register("json:loads")
    register(Sums)
    packed = names.pack_registries()
    EXTENSIONS.clear()
    names.register_packed(packed)
    assert EXTENSIONS["json:loads"] == "json:loads"
    del EXTENSIONS["json:loads"]
    assert SampleBatch(rewards=[1.0]).total == 1.0


UNTOUCHED = """
import sys
import tfpolicies
from tfpolicies import SampleBatch
batch = SampleBatch(obs=[1])
before = [{*vars(batch)}, dir(batch), dir(SampleBatch)]
hasattr(batch, "nothing"), hasattr(batch, "policy_batches")
assert not [name for name in sys.modules if name.startswith("tfpolicies.compat")]
import tfpolicies.compat
assert "tfpolicies.compat.rllib_extension" not in sys.modules
assert "tensorflow" not in sys.modules
assert batch.policy_batches == {"default_policy": batch}
assert before == [{*vars(batch)}, dir(batch), dir(SampleBatch)]
"""


def test_nothing_is_loaded_or_changed_before_a_name_is_read():
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_messages_are_those_of_python():
    for owner in (SampleBatch(obs=[1]), SampleBatch, 3, int):
        with pytest.raises(AttributeError) as raised:
            getattr(owner, "nothing")  # noqa: B009
        assert str(raised.value) == describe_missing(owner, "nothing")


class Doubled:
    """A model of another kind: a layer of twice its width."""

    width = 3


def build_doubled(observation_space, num_outputs, width=Doubled.width):
    inputs = keras.Input(observation_space.shape)
    hidden = keras.layers.Dense(2 * width, name="doubled")(inputs)
    return keras.Model(inputs, keras.layers.Dense(num_outputs)(hidden))


class Hooks(Extension):
    records_steps = True

    def make_model_factory(self, custom_model):
        return build_doubled if custom_model is Doubled else custom_model

    def wrap_model(self, model, observation_space, action_space):
        assert (observation_space, action_space) == (OBS, TWO)
        if not isinstance(model, Doubled):
            return model
        return build_doubled(observation_space, int(action_space.n), model.width)

    def prepare_model(self, policy, model):
        object.__setattr__(model, "owner_id", policy.policy_id)

    def complete_recurrent_state(self, policy, states):
        if len(states) != 1:
            return None
        halves = np.split(np.asarray(states[0], np.float32), 2, axis=1)
        return halves, lambda after: [np.concatenate(after, axis=1)]

    def read_statistics(self, view, train_batch):
        return {name[5:]: x for name, x in vars(view).items() if name.startswith("stat_")}

    @contextlib.contextmanager
    def edit_batch(self, batch, space):
        batch["rewards"] = batch["rewards"] + 1
        yield
        batch["rewards"] = 10 * batch["rewards"]


def test_hooks_do_nothing_by_default():
    hooks, model = Extension(), object()
    assert hooks.make_model_factory(model) is model
    assert hooks.wrap_model(model, None, None) is model
    assert hooks.prepare_model(None, model) is None
    assert hooks.complete_recurrent_state(None, []) is None
    assert hooks.read_statistics(None, {}) is None
    with hooks.edit_batch({}, None) as edited:
        assert edited is None
    assert not hooks.records_steps


def test_models_of_another_kind_become_keras_models(register):
    class Making(PGTF2Policy):
        def make_model(self):
            model = Doubled()
            model.width = 5
            return model

    register(Extension)
    register(Hooks)
    policy = make(PGTF2Policy, model={"custom_model": Doubled})
    assert policy.model.get_layer("doubled").units == 6
    assert policy.model.owner_id == policy.policy_id
    assert make(Making).model.get_layer("doubled").units == 10


def test_a_memory_of_another_form_is_converted_there_and_back(register):
    policy = make(PGTF2Policy, model={"use_lstm": True, "lstm_cell_size": 2})
    halves = [np.full((1, 2), 0.5, np.float32), np.full((1, 2), -0.5, np.float32)]
    joined = [np.array([[0.5, 0.5, -0.5, -0.5]])]
    obs = np.zeros((1, *OBS.shape), np.float32)
    with pytest.raises(UsageError, match="a recurrent state of 2 arrays, but state_batches has 1"):
        policy.compute_actions(obs, joined, explore=False)
    register(Hooks)
    after = policy.compute_actions(obs, joined, explore=False)[1]
    expected = policy.compute_actions(obs, halves, explore=False)[1]
    assert [part.shape for part in after] == [(1, 4)]
    np.testing.assert_array_equal(after[0], np.concatenate(expected, axis=1))
    with pytest.raises(UsageError, match="a recurrent state of 2 arrays, but state_batches has 3"):
        policy.compute_actions(obs, joined * 3, explore=False)


class Keeping(PPOTF2Policy):
    def loss(self, model, dist_class, train_batch):
        self.stat_rows = tf.reduce_sum(train_batch["loss_mask"])
        self._mean_kl_loss = tf.constant(0.0)
        return super().loss(model, dist_class, train_batch)


def test_statistics_are_read_from_the_attributes_of_a_loss(register):
    words = r"Keeping\.loss stores _mean_kl_loss on self.*self\.record\(kl="
    policy = make(Keeping)
    for extension in (Extension, Hooks):
        with pytest.raises(ConfigError, match=words):
            policy.learn_on_batch(batch_for(policy, 8))
        register(extension)
    policy = make(type("Counting", (Keeping,), {}))
    assert policy.learn_on_batch(batch_for(policy, 8))["learner_stats"]["rows"] == 8.0


def test_callbacks_see_batches_as_extensions_edit_them(register):
    register(Hooks)
    register(Extension)
    batch = SampleBatch(rewards=np.array([1.0, 2.0]))
    with EXTENSIONS.edit_batch(batch, PLANE):
        assert batch["rewards"].tolist() == [2.0, 3.0]
        batch["rewards"] = batch["rewards"] * 2
    assert batch["rewards"].tolist() == [40.0, 60.0]


@pytest.mark.parametrize("extensions", [[], [Extension], [Extension, Hooks]])
def test_episodes_record_steps_where_an_extension_reads_them(register, extensions):
    for extension in extensions:
        register(extension)
    episode = Episode(1, 0, None)
    for action, reward in ((3, 0.5), (4, 1.5)):
        episode.record_step({"agent0": [0.0]}, {"agent0": action}, {"agent0": reward})
    assert episode.last_action_for() == 4
    previous = {"agent0": 3} if Hooks in extensions else {}
    assert episode._prev_actions == previous
