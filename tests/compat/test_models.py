"""`TFModelV2` classes as users of RLlib write them, on all runtimes."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import OBS, PLANE, TWO, batch_for, make, rows_of, trajectory
from helpers.marks import telling
from helpers.processes import run_python
from helpers.rllib_models import Cells, Dense, Functional, Linear, with_model
from tfpolicies import PGTF2Policy, Policy, PolicyMap, PPOTF1Policy, PPOTF2Policy, ViewRequirement
from tfpolicies.compat import (
    FullyConnectedNetwork,
    ModelCatalog,
    RecurrentNetwork,
    TFModelV2,
    VisionNetwork,
    add_time_dimension,
)
from tfpolicies.errors import ConfigError, ModelError, ModelSettingError, UnsupportedMethodError
from tfpolicies.models.distributions import DiagGaussian
from tfpolicies.models.registry import MODELS
from tfpolicies.testing import random_batch

FIVE = rows_of(OBS, 5, seed=3)


def learn(policy, batch):
    """Learns from a batch, and returns the keys of the weights that change."""
    before = policy.get_weights()
    policy.learn_on_batch(batch)
    return [key for key, value in policy.get_weights().items() if np.any(value != before[key])]


def read_guide(beginning):
    """Returns the code of the porting guide that begins so."""
    page = (Path(__file__).parents[2] / "docs" / "migrate" / "rllib.md").read_text()
    (block,) = re.findall(rf"```python\n({beginning}.*?)```", page, re.DOTALL)
    return block


@pytest.mark.core
@pytest.mark.parametrize("inference", ["tf", "onnx", "session"])
def test_a_dense_model_acts_as_its_layers_say_on_every_runtime(inference):
    policy = with_model(Dense, inference=inference, custom_model_config={"hidden": 6})
    w1, b1, w2, b2, w3, b3 = policy.get_weights().values()
    assert w1.shape == (3, 6)
    np.testing.assert_allclose(np.linalg.norm(w1, axis=0), 1.0, rtol=1e-5)  # normc_initializer

    actions, states, extras = policy.compute_actions(FIVE, explore=False)
    hidden = np.tanh(FIVE @ w1 + b1)
    np.testing.assert_allclose(extras["action_dist_inputs"], hidden @ w2 + b2, atol=1e-5)
    np.testing.assert_allclose(extras["vf_preds"], (hidden @ w3 + b3)[:, 0], atol=1e-5)
    assert states == []
    assert actions.tolist() == (hidden @ w2 + b2).argmax(-1).tolist()


@pytest.mark.parametrize(
    ("model", "policy_class", "count"),
    [(Dense, PPOTF2Policy, 6), (Dense, PPOTF1Policy, 6), (Cells, PPOTF1Policy, 7)],
)
def test_all_layers_of_a_model_learn(model, policy_class, count):
    policy = with_model(model, policy_class, max_seq_len=4)
    assert len(learn(policy, random_batch(policy, 6))) == len(policy.get_weights()) == count


@pytest.mark.core
@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_steps_of_a_recurrent_model_equal_those_of_its_layers(inference):
    policy = with_model(Cells, inference=inference, max_seq_len=4)
    assert [part.shape for part in policy.get_initial_state()] == [(3,), (3,)]
    state, outputs = [part[None] for part in policy.get_initial_state()], []
    for row in FIVE:
        _, state, extras = policy.compute_actions(row[None], state, explore=False)
        outputs.append(extras["action_dist_inputs"][0])
    kernel, recurrent, bias, *rest = (
        value for key, value in policy.get_weights().items() if "seed" not in key
    )
    h = c = np.zeros(3)
    for row, output in zip(FIVE, outputs, strict=True):  # Keras's order: i, f, candidate, o
        i, f, g, o = np.split(row @ kernel + h @ recurrent + bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        np.testing.assert_allclose(output, h @ rest[0] + rest[1], atol=1e-5)
    np.testing.assert_allclose(state[0][0], h, atol=1e-5)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


class MaskedByTheLongest(Cells):
    """Masks as RLlib's examples do, as far as the longest sequence of a batch."""

    def forward_rnn(self, inputs, state, seq_lens):
        x, h, c = self.lstm(inputs, initial_state=state, mask=tf.sequence_mask(seq_lens))
        self._values = self.heads["value"](x)
        return self.heads["policy"](x), [h, c]


@pytest.mark.parametrize("policy_class", telling([PPOTF2Policy, PPOTF1Policy], soak=[PPOTF1Policy]))
def test_a_mask_may_be_as_long_as_the_longest_sequence(policy_class):
    models = (Cells, MaskedByTheLongest)
    first, second = (with_model(model, policy_class, max_seq_len=5) for model in models)
    second.set_weights(list(first.get_weights().values()))
    batch = random_batch(first, 7)  # episodes of at most three steps
    batch["eps_id"] = np.array([1, 1, 2, 2, 2, 3, 3])
    for policy in (first, second):
        policy.learn_on_batch(batch)
    for pair in zip(first.get_weights().values(), second.get_weights().values(), strict=True):
        np.testing.assert_allclose(*pair, atol=1e-6)


@pytest.mark.parametrize("model", [Dense, Cells])
def test_exports_act_as_the_policy(tmp_path, model):
    policy = with_model(model)
    policy.export_model(str(tmp_path / "saved"))  # verifies itself against the policy
    policy.export_model(str(tmp_path / "onnx"), onnx=15)
    assert (tmp_path / "onnx" / "model.onnx").is_file()


@pytest.mark.core
def test_a_checkpoint_names_the_registered_model(tmp_path):
    policy = with_model(Dense)
    policy.export_checkpoint(tmp_path)
    restored = Policy.from_checkpoint(tmp_path)
    assert restored.program is policy.program
    extras = [each.compute_actions(FIVE, explore=False).extras for each in (restored, policy)]
    np.testing.assert_array_equal(extras[0]["vf_preds"], extras[1]["vf_preds"])


def test_a_checkpoint_whose_model_is_not_registered_says_to_register_it(tmp_path, monkeypatch):
    with_model(Dense).export_checkpoint(tmp_path)
    monkeypatch.delitem(MODELS, "Dense")
    words = r"register this one first.*register_custom_model\(name, C"
    with pytest.raises(ValueError, match=words):
        Policy.from_checkpoint(tmp_path)
    ModelCatalog.register_custom_model("Dense", Dense)
    assert Policy.from_checkpoint(tmp_path).compute_actions(FIVE).actions.shape == (5,)


def test_policies_of_one_class_share_a_program_whatever_the_name():
    ModelCatalog.register_custom_model("another dense", Dense)
    first, second = with_model(Dense), with_model("another dense")
    assert first.program is second.program
    assert with_model(Dense, custom_model_config={"hidden": 7}).program is not first.program


def test_a_model_without_a_value_gets_one_from_the_catalog():
    policy = with_model(Linear, fcnet_hiddens=[4])
    assert policy.compute_actions(FIVE).extras["vf_preds"].shape == (5,)
    assert "vf_preds" not in with_model(Linear, PGTF2Policy).compute_actions(FIVE).extras


def test_nested_observations_keep_their_structure_and_are_one_hot():
    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple([spaces.Box(-1, 1, (2,))]))
    policy = with_model(Linear, PGTF2Policy, obs=space)
    obs = {"a": np.array([2]), "b": (np.array([[0.5, 0.25]], np.float32),)}
    extras = policy.compute_actions(obs, explore=False).extras
    assert extras["action_dist_inputs"].tolist() == [[1.75, 1.75]]  # 1 of the one-hot, and b
    assert set(Linear.seen) == {"obs", "obs_flat", "is_training"}
    assert Linear.seen["obs"]["a"].shape[-1] == 3


def test_images_come_as_their_pixels():
    space = spaces.Box(0, 255, (2, 2, 1), np.uint8)
    policy = with_model(Linear, PGTF2Policy, obs=space)
    extras = policy.compute_actions(np.full((1, 2, 2, 1), 200, np.uint8)).extras
    np.testing.assert_allclose(extras["action_dist_inputs"], 800.0, rtol=1e-5)


class Masked(TFModelV2):
    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        inner = obs_space.original_space["observations"]
        self.internal = FullyConnectedNetwork(inner, action_space, num_outputs, model_config, name)

    def forward(self, input_dict, state, seq_lens):
        action_mask = input_dict["obs"]["action_mask"]
        logits, _ = self.internal({"obs": input_dict["obs"]["observations"]})
        inf_mask = tf.maximum(tf.math.log(action_mask), tf.float32.min)
        return logits + inf_mask, state

    def value_function(self):
        return self.internal.value_function()


@pytest.mark.core
@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_models_that_add_the_mask_to_their_logits_never_choose_a_forbidden_action(inference):
    space = spaces.Dict(action_mask=spaces.MultiBinary(2), observations=OBS)
    policy = with_model(Masked, obs=space, inference=inference, fcnet_hiddens=[4])
    mask = np.array([[1, 0]] * 3 + [[0, 1]] * 2)
    actions = policy.compute_actions({"action_mask": mask, "observations": FIVE}).actions
    assert actions.tolist() == [0, 0, 0, 1, 1]


class ReadsThePast(Linear):
    def __init__(self, *args):
        super().__init__(*args)
        for name in ("prev_actions", "prev_rewards"):
            self.view_requirements[name] = ViewRequirement(name.removeprefix("prev_"), shift=-1)

    def forward(self, input_dict, state, seq_lens):
        action = tf.cast(input_dict["prev_actions"], tf.float32)
        both = tf.stack([10.0 * action, input_dict["prev_rewards"]], axis=-1)
        return self.out(both), state


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_previous_actions_and_rewards_come_as_numbers(inference):
    policy = with_model(ReadsThePast, PGTF2Policy, inference=inference)
    extras = policy.compute_actions(
        FIVE[:2], prev_action_batch=np.array([0, 1]), prev_reward_batch=np.array([0.5, 2.0])
    ).extras
    assert extras["action_dist_inputs"].tolist() == [[0.5, 0.5], [12.0, 12.0]]


class ReadsFrames(Linear):
    """Looks back as RLlib's examples of the trajectory view API do."""

    def __init__(self, *args):
        super().__init__(*args)
        box, two, n = args[0], args[1], 3
        views = {
            "prev_n_obs": ViewRequirement("obs", shift=f"-{n - 1}:0", space=box),
            "prev_n_rewards": ViewRequirement("rewards", shift=f"-{n}:-1"),
            "prev_n_actions": ViewRequirement("actions", shift=f"-{n}:-1", space=two),
        }
        self.view_requirements.update(views)

    def forward(self, input_dict, state, seq_lens):
        frames = tf.reshape(input_dict["prev_n_obs"], [-1, 3 * self.obs_space.shape[0]])
        actions = tf.one_hot(input_dict["prev_n_actions"], self.action_space.n)
        second = 100.0 * tf.reduce_sum(actions[:, :, 1], axis=-1, keepdims=True)
        last = 1000.0 * input_dict["prev_n_rewards"][:, -1:]
        self.value = frames[:, 0]
        return self.out(tf.concat([frames, second, last], axis=-1)), state

    def value_function(self):
        return self.value


@pytest.mark.parametrize("inference", ["tf", "onnx", "session"])
def test_frames_and_earlier_actions_come_as_numbers(inference):
    policy = with_model(ReadsFrames, inference=inference)
    values = {
        "obs": FIVE[:2],
        "prev_n_obs": np.arange(18.0).reshape(2, 3, 3),
        "prev_n_actions": np.array([[0, 1, 1], [0, 0, 1]]),
        "prev_n_rewards": np.array([[9.0, 9.0, 1.0], [9.0, 9.0, 2.0]]),
    }
    extras = policy.compute_actions_from_input_dict(values, explore=False).extras
    assert extras["action_dist_inputs"][:, 0].tolist() == [36 + 200 + 1000, 117 + 100 + 2000]
    assert extras["vf_preds"].tolist() == [0, 9]
    assert policy.view_requirements["prev_n_obs"].shift_arr.tolist() == [-2, -1, 0]
    assert policy.view_requirements["prev_n_obs"].used_for_compute_actions


def test_networks_of_the_catalog_are_parts_of_others():
    box = spaces.Box(-1, 1, (2, 3), np.float32)
    settings = {"fcnet_hiddens": [5, 4], "vf_share_layers": True}
    dense = FullyConnectedNetwork(box, TWO, 2, settings, "fc")
    outputs, state = dense({"obs": tf.zeros([7, 2, 3])})
    assert (outputs.shape, dense.value_function().shape, state) == ((7, 2), (7,), [])
    assert len(dense.trainable_variables()) == len(dense.variables(as_dict=True)) == 8
    assert dense.last_output() is outputs
    features = FullyConnectedNetwork(box, TWO, None, settings, "features")
    assert features.num_outputs == 4
    assert features({"obs": tf.zeros([7, 2, 3])})[0].shape == (7, 4)
    linear = FullyConnectedNetwork(box, TWO, 2, {}, "linear")
    shapes = [tuple(variable.shape) for variable in linear.variables()]
    assert shapes == [(6, 2), (2,), (6, 1), (1,)]  # no hidden layers, and a value of its own
    pixels = spaces.Box(0, 255, (10, 10, 3), np.uint8)
    vision = VisionNetwork(pixels, TWO, 2, {}, "vision")
    assert vision({"obs": tf.zeros([1, 10, 10, 3], tf.uint8)})[0].shape == (1, 2)
    assert vision.value_function().shape == (1,)


def test_rows_become_sequences():
    rows = tf.reshape(tf.range(12), [6, 2])
    folded = add_time_dimension(rows, seq_lens=tf.constant([3, 1]))
    assert folded.shape == (2, 3, 2)
    assert folded[1].numpy().tolist() == [[6, 7], [8, 9], [10, 11]]
    with pytest.raises(ModelError, match="time_major must be False"):
        add_time_dimension(rows, seq_lens=tf.constant([3]), time_major=True)


def test_the_model_of_the_porting_guide_works():
    names = {}
    exec(read_guide("import keras\n"), names)
    policy = with_model(names["Memory"], max_seq_len=4, custom_model_config={"cells": 5})
    assert [part.shape for part in policy.get_initial_state()] == [(5,), (5,)]


def test_policies_with_ported_models_act_in_one_call():
    league = PolicyMap()
    for i in range(3):
        league[str(i)] = with_model(Dense, seed=i, inference="onnx")
    together = league.compute_actions(dict.fromkeys(league, FIVE), explore=False)
    for key, policy in league.items():
        values = policy.compute_actions(FIVE, explore=False).extras["vf_preds"]
        np.testing.assert_allclose(together[key].extras["vf_preds"], values, atol=1e-6)


class Distances(Functional):
    def __init__(self, *args):
        super().__init__(*args)
        inputs, ones = keras.Input((3,)), tf.ones([3])
        points = keras.layers.Dense(6, use_bias=False)(tf.zeros_like(inputs[:, :1]) + 1.0)
        apart = tf.expand_dims(inputs, 1) - tf.reshape(points, [-1, 2, 3])
        total = tf.reduce_sum(tf.square(apart) * ones, axis=2)
        self.part = FullyConnectedNetwork(self.obs_space, self.action_space, 1, {}, "part")
        value, _ = self.part({"obs": inputs})
        self.base_model = keras.Model(inputs, [-tf.maximum(total, 0.5), value])


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_a_functional_model_may_be_made_of_tensorflows_functions(inference):
    policy = with_model(Distances, inference=inference)
    points = next(w for w in policy.get_weights().values() if w.shape == (1, 6))
    _, _, extras = policy.compute_actions(FIVE, explore=False)
    total = np.square(FIVE[:, None] - points.reshape(2, 3)).sum(axis=2)
    np.testing.assert_allclose(extras["action_dist_inputs"], -np.maximum(total, 0.5), rtol=1e-5)


def test_models_of_tensorflows_functions_need_one_import():
    code = """
import keras, tensorflow as tf
from tfpolicies.compat import TFModelV2
print(tf.reduce_sum(keras.Input((3,)), axis=1).shape)
"""
    assert run_python(code).stdout == "(None,)\n"


class Rows(Functional):
    def __init__(self, *args):
        super().__init__(*args)
        x = keras.Input((3,))
        rows, width = tf.shape(x)[0], tf.shape(x)[1]
        doubled = tf.reshape(tf.stack([x, x], axis=1), [rows, -1])
        reshaped = tf.reshape(doubled, [-1, width * 2])
        assert doubled.shape == reshaped.shape == (None, 6)
        ones = keras.initializers.Ones()
        logits = keras.layers.Dense(2, use_bias=False, kernel_initializer=ones)(reshaped)
        self.base_model = keras.Model(x, [logits, tf.tile(tf.zeros([1, 1]), [rows, 1])])


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_shapes_of_a_functional_model_may_be_counted_from_its_input(inference):
    policy = with_model(Rows, inference=inference)
    extras = policy.compute_actions(FIVE, explore=False).extras
    expected = np.repeat(2.0 * FIVE.sum(1, keepdims=True), 2, axis=1)
    np.testing.assert_allclose(extras["action_dist_inputs"], expected, rtol=1e-5)
    assert extras["vf_preds"].tolist() == [0.0] * 5


def build(self, *args):
    TFModelV2.__init__(self, *args)
    self.out = keras.layers.Dense(2)


def make_class(**members):
    """Returns a class of models of one layer with some members replaced."""
    usual = {
        "__init__": build,
        "forward": lambda self, input_dict, state, seq_lens: (self.out(input_dict["obs"]), state),
    }
    return type("Changed", (TFModelV2,), {**usual, **members})


def makes_layers(self, input_dict, state, seq_lens):
    return keras.layers.Dense(2)(input_dict["obs"]), state


def with_tf_variable(self, *args):
    build(self, *args)
    self.log_std = tf.Variable([0.0], name="log_std")


def functional_with_numpy(self, *args):
    build(self, *args)
    inputs = keras.Input((3,))
    self.base_model = keras.Model(inputs, np.square(inputs))


def frames(self, *args):
    build(self, *args)
    self.view_requirements["prev_n_infos"] = ViewRequirement("infos", shift="-3:0")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"forward": makes_layers}, "makes a variable in each call.*in the constructor"),
        ({"forward": lambda self, d, s, n: self.out(d["obs"])}, "must return a pair.*got"),
        ({"forward": TFModelV2.forward}, r"has no `forward\(self, input_dict, state, seq_lens\)`"),
        ({"forward": lambda self, d, s, n: (d["nothing"], s)}, r"with obs \[2, 3\]: 'nothing'"),
        ({"__init__": with_tf_variable}, r"tf.Variable 'log_std:0'.*keras.Variable\("),
        ({"__init__": functional_with_numpy}, "write keras.ops.square for np.square"),
        ({"__init__": frames}, r"view_requirements\['prev_n_infos'\].*Store"),
        ({"__init__": lambda self: None}, "Changed could not be constructed"),
        ({"get_initial_state": lambda self: [np.ones(2)]}, r"get_initial_state\(\)\[0\] must be z"),
        ({"get_initial_state": lambda self: [np.zeros(2)]}, "must also estimate the values"),
    ],
)
def test_a_form_that_cannot_work_is_refused_with_a_hint(members, words):
    with pytest.raises(ModelError, match=words):
        with_model(make_class(**members))


def test_a_layer_made_at_the_first_call_and_kept_learns():
    def forward(self, input_dict, state, seq_lens):
        if not hasattr(self, "late"):
            self.late = keras.layers.Dense(2)
        return self.late(input_dict["obs"]), state

    policy = with_model(make_class(forward=forward), PGTF2Policy)
    assert [w.shape for w in policy.get_weights().values()] == [(3, 2), (2,)]  # `out` never ran


def test_a_keras_variable_learns():
    def init(self, *args):
        build(self, *args)
        self.scale = keras.Variable([2.0], name="scale")

    def forward(self, input_dict, state, seq_lens):
        return self.out(input_dict["obs"]) * self.scale, state

    policy = with_model(make_class(__init__=init, forward=forward), PGTF2Policy)
    assert len(learn(policy, batch_for(policy, 6))) == len(policy.get_weights()) == 3


def test_the_base_class_names_missing_methods():
    model = make_class()(OBS, TWO, 2, {}, "m")
    assert model.get_initial_state() == []
    assert not model.is_time_major()
    losses = [tf.constant(1.0)]
    assert model.custom_loss(losses, {}) is losses
    assert model.metrics() == {}
    with model.context(), pytest.raises(UnsupportedMethodError, match="has no `value_function"):
        model.value_function()
    rnn = RecurrentNetwork(OBS, TWO, 2, {}, "m")
    with pytest.raises(UnsupportedMethodError, match="has no `forward_rnn"):
        rnn({"obs": tf.zeros([2, 3])}, [], tf.constant([2]))


@pytest.mark.core
def test_names_of_models_are_checked():
    ModelCatalog.register_custom_model("Dense", Dense)
    words = r"the name of a registered model .*Did you mean 'Dense'\?\), got 'Dence'"
    with pytest.raises(ModelSettingError, match=words):
        with_model("Dence")
    with pytest.raises(ModelSettingError, match="non-empty str, got 5"):
        ModelCatalog.register_custom_model(5, Dense)
    with pytest.raises(ModelSettingError, match="must be a factory"):
        ModelCatalog.register_custom_model("number", 5)


def test_a_registered_factory_may_ask_for_the_action_space():
    def factory(observation_space, num_outputs, *, action_space, model_config, width):
        assert (action_space, model_config["fcnet_hiddens"]) == (TWO, [256, 256])
        layers = [keras.layers.Dense(n) for n in (width, num_outputs)]
        return keras.Sequential([keras.Input(observation_space.shape), *layers])

    policy = with_model(factory, PGTF2Policy, custom_model_config={"width": 9})
    assert next(iter(policy.get_weights().values())).shape == (3, 9)


def test_the_distribution_of_the_porting_guide_is_a_narrow_gaussian(tmp_path):
    names = {}
    exec(read_guide("import math\n"), names)
    ModelCatalog.register_custom_action_dist("of_the_guide", names["Narrow"])
    policy = make(PPOTF2Policy, actions=PLANE, model={"custom_action_dist": "of_the_guide"})
    obs = np.random.default_rng(0).random((2000, 3), np.float32)
    means = policy.compute_actions(obs, explore=False)
    np.testing.assert_allclose(means.actions, means.extras["action_dist_inputs"], atol=1e-6)
    samples = policy.compute_actions(obs)
    assert np.std(samples.actions - means.actions) == pytest.approx(0.5, abs=0.02)
    expected = -0.5 * np.sum(((samples.actions - means.actions) / 0.5) ** 2, axis=1)
    expected -= 2 * np.log(0.5 * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(samples.extras["action_logp"], expected, atol=1e-4)
    batch = policy.postprocess_trajectory(trajectory(policy, 6))
    stats = policy.learn_on_batch(batch)["learner_stats"]
    assert stats["entropy"] == pytest.approx(2 * np.log(0.5 * np.sqrt(2 * np.pi * np.e)))
    assert stats["kl"] == pytest.approx(0.0, abs=1e-6)
    assert policy.export_model(tmp_path, onnx=True).parity.largest_difference < 1e-5


def test_distributions_have_names():
    class Narrow(DiagGaussian):
        pass

    ModelCatalog.register_custom_action_dist("narrow", Narrow)
    settings = {"custom_action_dist": "narrow"}
    policy = make(PGTF2Policy, actions=PLANE, model=settings)
    assert policy.dist_class.leaf_classes == (Narrow,)
    assert ModelCatalog.get_action_dist(PLANE, settings, framework="tf")[1] == 4
    with pytest.raises(ConfigError, match=r"a subclass of tfpolicies\.models\.distributions"):
        ModelCatalog.register_custom_action_dist("foreign", dict)
    with pytest.raises(ConfigError, match="non-empty str"):
        ModelCatalog.register_custom_action_dist("", Narrow)
    with pytest.raises(ConfigError, match="ObservationWrapper"):
        ModelCatalog.register_custom_preprocessor("mine", object)


@pytest.mark.parametrize(
    ("space", "kind", "framework"),
    [
        (OBS, FullyConnectedNetwork, "tf"),
        (spaces.Box(-1.0, 1.0, (10, 10, 3)), VisionNetwork, "tf2"),
    ],
)
def test_get_model_v2_gives_a_network_for_the_space(space, kind, framework):
    settings = {} if framework == "tf2" else {"fcnet_hiddens": [4]}
    model = ModelCatalog.get_model_v2(space, TWO, 2, settings, framework=framework)
    assert isinstance(model, kind)
    logits, state = model({"obs": rows_of(space, 5)})
    assert (logits.shape, model.value_function().shape, state) == ((5, 2), (5,), [])
    with pytest.raises(ModelError, match="num_outputs must be 2"):
        ModelCatalog.get_model_v2(OBS, TWO, 3, {})


class Advantages(TFModelV2):
    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__(obs_space, action_space, None, model_config, name)
        self.head = keras.layers.Dense(num_outputs)


def test_get_model_v2_makes_a_network_of_a_model_interface():
    settings = {"fcnet_hiddens": [4]}
    model = ModelCatalog.get_model_v2(OBS, TWO, TWO.n, settings, model_interface=Advantages)
    assert isinstance(model, Advantages)
    assert isinstance(model, FullyConnectedNetwork)
    features, state = model(input_dict={"obs": FIVE})
    assert (features.shape, model.head(features).shape, state) == ((5, 4), (5, 2), [])
    frames = spaces.Box(0, 255, (42, 42, 3), np.uint8)
    settings = {"post_fcnet_hiddens": [4]}
    model = ModelCatalog.get_model_v2(frames, TWO, 2, settings, model_interface=Advantages)
    assert isinstance(model, VisionNetwork)
