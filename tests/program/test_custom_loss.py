"""Losses and metrics of models: `custom_loss` and `metrics` of `TFModelV2` and Keras models."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.factories import OBS, assert_close, batch_for, make, rows_of
from helpers.marks import telling
from tfpolicies import PGTF2Policy, PPOTF1Policy, PPOTF2Policy, SACTF2Policy, SampleBatch
from tfpolicies.compat import ModelCatalog, RecurrentNetwork, TFModelV2
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.losses import masked_mean
from tfpolicies.program.compile_mode import CompileMode
from tfpolicies.testing import random_batch

pytestmark = pytest.mark.usefixtures("kept_programs")

SPACES = {
    "discrete": spaces.Discrete(4),
    "image": spaces.Box(0, 255, (3, 3, 1), np.uint8),
    "dict": spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (2,), np.float32)),
}


def register(model):
    """Registers a model by the name of its class."""
    ModelCatalog.register_custom_model(model.__name__, model)
    return model


@register
class Linear(TFModelV2):
    """One layer without a bias, no value."""

    def __init__(self, *args):
        super().__init__(*args)
        self.out = keras.layers.Dense(self.num_outputs, use_bias=False)

    def forward(self, input_dict, state, seq_lens):
        self.logits = self.out(input_dict["obs_flat"])
        return self.logits, state


@register
class SmallLogits(Linear):
    """Wants small outputs: half the mean of their squares is added."""

    def custom_loss(self, policy_loss, loss_inputs):
        squares = tf.reduce_sum(tf.square(self.logits), axis=-1)
        self.before, self.own = policy_loss[0], 0.5 * masked_mean(squares, loss_inputs["loss_mask"])
        return [loss + self.own for loss in policy_loss]

    def metrics(self):
        return {"total_loss": self.before, "own": self.own, "fixed": 3}


@register
class MaskIgnored(SmallLogits):
    """The same as users of RLlib write it."""

    def custom_loss(self, policy_loss, loss_inputs):
        self.before = policy_loss
        self.own = 0.5 * tf.reduce_mean(tf.reduce_sum(tf.square(self.logits), axis=-1))
        return policy_loss + self.own


def with_model(kind, policy_class=PPOTF2Policy, obs=OBS, **config):
    return make(policy_class, obs, model={"custom_model": kind.__name__}, **config)


def make_pair(*kinds, policy_class=PPOTF2Policy):
    """Makes policies with models of some classes, and the weights of the first."""
    first, second = (with_model(kind, policy_class) for kind in kinds)
    second.set_weights(list(first.get_weights().values()))
    return first, second


@pytest.mark.parametrize(
    ("policy_class", "kind"),
    telling(
        itertools.product([PPOTF2Policy, PPOTF1Policy, PGTF2Policy], [SmallLogits, MaskIgnored]),
        (PPOTF1Policy, SmallLogits),
    ),
)
def test_the_gradient_is_that_of_both_losses(policy_class, kind):
    plain, custom = make_pair(Linear, kind, policy_class=policy_class)
    batch = batch_for(plain, 6)
    (without, *_), _ = plain.compute_gradients(batch)
    (result, *_), info = custom.compute_gradients(batch)
    weights, x = next(iter(plain.get_weights().values())), batch["obs"]
    np.testing.assert_allclose(result - without, x.T @ (x @ weights) / 6, atol=1e-5)
    term = 0.5 * np.square(x @ weights).sum(-1).mean()
    assert info["learner_stats"]["model/own"] == pytest.approx(term, rel=1e-4)


@pytest.mark.core
def test_metrics_are_statistics_of_learning_next_to_those_of_the_policy_class():
    plain, custom = make_pair(Linear, SmallLogits)
    batch = batch_for(plain, 6)
    expected = plain.compute_gradients(batch)[1]["learner_stats"]
    for stats in (
        custom.compute_gradients(batch)[1]["learner_stats"],
        custom.learn_on_batch(batch)["learner_stats"],
    ):
        for name in ("model/total_loss", "total_loss"):
            assert stats[name] == pytest.approx(expected["total_loss"], abs=1e-6)
        assert stats["model/fixed"] == 3.0
        assert {"model/total_loss", "model/own", "model/fixed"} == set(stats) - set(expected)


@pytest.mark.parametrize("jit", [True, False])
def test_rows_that_fill_up_a_minibatch_do_not_count(jit):
    weighed = with_model(SmallLogits, PGTF2Policy, jit_compile=jit)
    exact = with_model(MaskIgnored, PGTF2Policy)
    exact.set_weights(list(weighed.get_weights().values()))
    batch, terms = batch_for(weighed, 5), []
    for policy in (weighed, exact):
        stats = policy.learn_epochs(batch, 2, 4, shuffle=False)["learner_stats"]
        terms.append(stats["model/own"])
    assert terms[0] == pytest.approx(terms[1], rel=1e-5)
    for left, right in zip(
        weighed.get_weights().values(), exact.get_weights().values(), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)


def test_a_loss_that_does_not_weigh_rows_is_not_compiled():
    batch = batch_for(with_model(Linear), 5)
    automatic = with_model(MaskIgnored, jit_compile="auto")
    automatic.learn_on_batch(batch)
    assert automatic.program.updates.compile_mode is CompileMode.PLAIN
    with pytest.raises(ConfigError, match="custom_loss of the model does not read it"):
        with_model(MaskIgnored, jit_compile=True).learn_on_batch(batch)


@pytest.mark.core
def test_policies_with_one_program_share_a_trace_and_have_other_numbers():
    one, other = with_model(SmallLogits, lr=0.1), with_model(SmallLogits, lr=0.0)
    assert one.program is other.program
    traces = dict(one.program.functions.traces)
    before = other.get_weights()
    for policy in (one, other, one):
        policy.learn_epochs(batch_for(policy, 6), 1, 3)
    assert dict(one.program.functions.traces)["learn_epochs"] <= 1 + traces.get("learn_epochs", 0)
    assert_close(other.get_weights(), before, 0.0)
    assert any(np.any(x != before[key]) for key, x in one.get_weights().items())


@register
class Recording(Linear):
    """Keeps the observations that it gets."""

    def custom_loss(self, policy_loss, loss_inputs):
        if tf.executing_eagerly():
            type(self).in_loss = {name: loss_inputs[name] for name in ("obs", "new_obs")}
        assert "actions" in loss_inputs
        assert loss_inputs.get("nothing") is None
        return policy_loss + 0.0 * tf.reduce_sum(loss_inputs["loss_mask"])

    def forward(self, input_dict, state, seq_lens):
        if tf.executing_eagerly():
            type(self).in_forward = input_dict["obs"]
        return super().forward(input_dict, state, seq_lens)


@pytest.mark.parametrize("name", SPACES)
def test_observations_are_as_forward_sees_them(name):
    policy = with_model(Recording, PGTF2Policy, SPACES[name], eager_tracing=False)
    policy.learn_on_batch(batch_for(policy, 4))
    obs, new_obs = Recording.in_loss["obs"], Recording.in_loss["new_obs"]
    tf.nest.map_structure(np.testing.assert_array_equal, obs, Recording.in_forward)
    tf.nest.assert_same_structure(new_obs, Recording.in_forward)


def test_observations_are_normalised_for_a_model_with_a_filter():
    settings = {"eager_tracing": False, "observation_filter": "MeanStdFilter"}
    policy = with_model(Recording, PGTF2Policy, **settings)
    policy.filter.observe([5.0 + 2.0 * rows_of(OBS, 50)])
    policy.driver.learning.flush_filters()
    batch = batch_for(policy, 4)
    policy.learn_on_batch(batch)
    assert np.abs(Recording.in_loss["obs"] - batch["obs"]).min() > 0.1
    np.testing.assert_array_equal(Recording.in_loss["obs"], Recording.in_forward)


@register
class Predicting(Linear):
    """Has a head that only its loss calls: it predicts the next observation."""

    def __init__(self, *args):
        super().__init__(*args)
        inputs = keras.Input(self.obs_space.shape)
        self.head = keras.Model(inputs, keras.layers.Dense(3, name="prediction")(inputs))

    def custom_loss(self, policy_loss, loss_inputs):
        error = self.head(loss_inputs["obs"]) - loss_inputs["new_obs"]
        errors = tf.reduce_mean(tf.square(error), axis=-1)
        self.error = masked_mean(errors, loss_inputs["loss_mask"])
        return policy_loss[0] + self.error

    def metrics(self):
        return {"error": [self.error]}


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_a_head_for_an_auxiliary_task_learns(inference):
    policy = with_model(Predicting, PGTF2Policy, inference=inference, lr=0.05)
    batch = batch_for(policy, 32)
    errors = [policy.learn_on_batch(batch)["learner_stats"]["model/error"] for _ in range(60)]
    assert errors[-1] < 0.8 * errors[0]
    policy.compute_actions(batch["obs"])


@keras.saving.register_keras_serializable(package="tests")
class KerasModel(keras.Model):
    """A Keras model with the same hooks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.out = keras.layers.Dense(2)

    def call(self, x):
        return self.out(x)

    def custom_loss(self, policy_loss, loss_inputs):
        squares = tf.reduce_sum(tf.square(self(loss_inputs["obs"])), -1)
        self.own = masked_mean(squares, loss_inputs["loss_mask"])
        return [loss + self.own for loss in policy_loss]

    def custom_metrics(self):
        return {"own": self.own}


@pytest.mark.core
@pytest.mark.parametrize("policy_class", [PGTF2Policy, PPOTF2Policy])  # PPO adds a value network
def test_a_keras_model_may_have_the_hooks(policy_class):
    policy = make(policy_class, model={"custom_model": lambda space, num_outputs: KerasModel()})
    batch = batch_for(policy, 6)
    kernel, bias = (policy.get_weights()[k] for k in list(policy.get_weights())[:2])
    stats = policy.compute_gradients(batch)[1]["learner_stats"]
    outputs = batch["obs"] @ kernel + bias
    assert stats["model/own"] == pytest.approx(np.square(outputs).sum(-1).mean(), rel=1e-4)


def test_a_loss_that_is_a_function_needs_a_model_without_custom_loss():
    settings = {"model": {"custom_model": "Linear"}, "update_order": "critics_first"}
    batch = SampleBatch(
        obs=rows_of(OBS, 6),
        new_obs=rows_of(OBS, 6, 1),
        actions=np.arange(6) % 2,
        rewards=np.ones(6, np.float32),
        terminateds=np.zeros(6, bool),
        weights=np.ones(6, np.float32),
    )
    policy = make(SACTF2Policy, **settings)
    before = policy.get_weights()
    policy.learn_on_batch(batch)
    assert all((before[key] != after).any() for key, after in policy.get_weights().items())
    settings["model"] = {"custom_model": "SmallLogits"}
    with pytest.raises(ConfigError, match=r"custom_loss of .* needs all losses .*update_order"):
        make(SACTF2Policy, **settings).learn_on_batch(batch)


def make_model(name, custom_loss, base=Linear, **members):
    return register(type(name, (base,), {"custom_loss": custom_loss, **members}))


def late_layer(self, policy_loss, loss_inputs):
    self.late = keras.layers.Dense(1)
    return policy_loss + tf.reduce_mean(self.late(loss_inputs["obs"]))


ROWS = r"as many scalars.*the shapes \['\(\d+,\)'\]"
TWO = r"as policy_loss has: 1\. It returned the shapes \['\(\)', '\(\)'\]"
METRIC = r"The metric 'rows' of Rows must be one number.*\(3,\)"


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "custom_loss", "words"),
    [
        ("PerRow", lambda s, loss, d: loss[0] + d["rewards"], ROWS),
        ("Twice", lambda s, loss, d: loss + loss, TWO),
        ("Late", late_layer, "custom_loss of the model creates a variable"),
        ("Unknown", lambda s, loss, d: loss[0] + d["reward"], "no column 'reward'.*'rewards'"),
        ("Rows", lambda s, loss, d: loss, METRIC),
    ],
)
def test_wrong_losses_and_metrics_are_refused(name, custom_loss, words):
    metrics = {"rows": tf.ones([3])} if name == "Rows" else {}
    model = make_model(name, custom_loss, metrics=lambda self: metrics)
    policy = with_model(model, PGTF2Policy)
    with pytest.raises((ModelError, KeyError), match=words):
        policy.learn_on_batch(batch_for(policy, 4))


class Cells(RecurrentNetwork):
    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        self.gru = keras.layers.GRU(2, return_sequences=True, return_state=True)
        self.out = keras.layers.Dense(num_outputs)

    def forward_rnn(self, inputs, state, seq_lens):
        mask = tf.sequence_mask(seq_lens, tf.shape(inputs)[1])
        x, h = self.gru(inputs, initial_state=state[0], mask=mask)
        self.logits = self.out(x)
        return self.logits, [h]

    def get_initial_state(self):
        return [np.zeros(2, np.float32)]


def flat_squares(self, policy_loss, loss_inputs):
    squares = tf.reduce_sum(tf.square(tf.reshape(self.logits, [-1, 2])), axis=-1)
    self.own = masked_mean(squares, loss_inputs["loss_mask"])
    return [loss + self.own for loss in policy_loss]


def test_a_recurrent_model_has_to_weigh_its_rows():
    def make_recurrent(model):
        return make(PGTF2Policy, model={"custom_model": model.__name__, "max_seq_len": 4})

    members = {"metrics": lambda self: {"own": self.own}}
    policy = make_recurrent(make_model("SmallCells", flat_squares, Cells, **members))
    stats = policy.learn_on_batch(random_batch(policy, 6))["learner_stats"]
    assert stats["model/own"] > 0.0
    unweighed = make_model("Unweighed", lambda s, x, d: x + tf.reduce_mean(s.logits), Cells)
    policy = make_recurrent(unweighed)
    with pytest.raises(ConfigError, match=r"custom_loss of the model does not read .*loss_mask"):
        policy.learn_on_batch(random_batch(policy, 6))
