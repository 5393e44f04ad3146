"""What models add to the loss: `custom_loss` and `metrics` of `TFModelV2` and of Keras models."""

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


class Linear(TFModelV2):
    """One layer without a bias, no value."""

    def __init__(self, *args):
        super().__init__(*args)
        self.out = keras.layers.Dense(self.num_outputs, use_bias=False)

    def forward(self, input_dict, state, seq_lens):
        self.logits = self.out(input_dict["obs_flat"])
        return self.logits, state


class SmallLogits(Linear):
    """Wants small outputs: half the mean of their squares is added."""

    def custom_loss(self, policy_loss, loss_inputs):
        squares = tf.reduce_sum(tf.square(self.logits), axis=-1)
        self.before, self.own = policy_loss[0], 0.5 * masked_mean(squares, loss_inputs["loss_mask"])
        return [loss + self.own for loss in policy_loss]

    def metrics(self):
        return {"total_loss": self.before, "own": self.own, "fixed": 3}


class MaskIgnored(SmallLogits):
    """The same as RLlib's users write it."""

    def custom_loss(self, policy_loss, loss_inputs):
        self.before = policy_loss
        self.own = 0.5 * tf.reduce_mean(tf.reduce_sum(tf.square(self.logits), axis=-1))
        return policy_loss + self.own


for kind in (Linear, SmallLogits, MaskIgnored):
    ModelCatalog.register_custom_model(kind.__name__, kind)


def with_model(kind, policy_class=PPOTF2Policy, obs=OBS, **config):
    if isinstance(kind, type):
        kind = kind.__name__
    config.setdefault("seed", 0)
    return make(policy_class, obs, model={"custom_model": kind}, **config)


def alike(*policies):
    """Gives policies the weights of the first one."""
    for policy in policies[1:]:
        policy.set_weights(list(policies[0].get_weights().values()))
    return policies


@pytest.mark.parametrize(
    ("policy_class", "kind"),
    telling(
        itertools.product([PPOTF2Policy, PPOTF1Policy, PGTF2Policy], [SmallLogits, MaskIgnored]),
        (PPOTF1Policy, SmallLogits),
    ),
)
def test_the_gradient_is_that_of_both_losses(policy_class, kind):
    plain, own = alike(with_model(Linear, policy_class), with_model(kind, policy_class))
    batch = batch_for(plain, 6)
    (without, *_), _ = plain.compute_gradients(batch)
    (result, *_), info = own.compute_gradients(batch)
    weights, x = next(iter(plain.get_weights().values())), batch["obs"]
    np.testing.assert_allclose(result - without, x.T @ (x @ weights) / 6, atol=1e-5)
    term = 0.5 * np.square(x @ weights).sum(-1).mean()
    assert info["learner_stats"]["model/own"] == pytest.approx(term, rel=1e-4)


@pytest.mark.core
def test_metrics_are_statistics_of_learning_beside_those_of_the_policy_class():
    plain, own = alike(with_model(Linear), with_model(SmallLogits))
    batch = batch_for(plain, 6)
    expected = plain.compute_gradients(batch)[1]["learner_stats"]
    for stats in (
        own.compute_gradients(batch)[1]["learner_stats"],
        own.learn_on_batch(batch)["learner_stats"],
    ):
        assert stats["model/total_loss"] == pytest.approx(expected["total_loss"], abs=1e-6)
        assert stats["total_loss"] == pytest.approx(expected["total_loss"], abs=1e-6)
        assert stats["model/fixed"] == 3.0
        assert {"model/total_loss", "model/own", "model/fixed"} == set(stats) - set(expected)


@pytest.mark.parametrize("jit", [True, False])
def test_rows_that_fill_up_a_minibatch_do_not_count(jit):
    weighed = with_model(SmallLogits, PGTF2Policy, jit_compile=jit)
    exact = with_model(MaskIgnored, PGTF2Policy)
    alike(weighed, exact)
    batch = batch_for(weighed, 5)
    left, right = (
        policy.learn_epochs(batch, 2, 4, shuffle=False)["learner_stats"]
        for policy in (weighed, exact)
    )
    assert left["model/own"] == pytest.approx(right["model/own"], rel=1e-5)
    actual, expected = (
        dict(enumerate(policy.get_weights().values())) for policy in (weighed, exact)
    )
    assert_close(actual, expected, 1e-5)


def test_a_loss_that_does_not_weigh_rows_is_not_compiled():
    batch = batch_for(with_model(Linear), 5)
    automatic = with_model(MaskIgnored, jit_compile="auto")
    automatic.learn_on_batch(batch)
    assert automatic.program.updates.compile_mode is CompileMode.PLAIN
    with pytest.raises(ConfigError, match="custom_loss of the model does not read it"):
        with_model(MaskIgnored, jit_compile=True).learn_on_batch(batch)


@pytest.mark.core
def test_policies_of_a_kind_share_one_trace_with_their_own_numbers():
    one, other = with_model(SmallLogits, lr=0.1), with_model(SmallLogits, lr=0.0)
    assert one.program is other.program
    traces = dict(one.program.functions.traces)
    before = other.get_weights()
    for policy in (one, other, one):
        policy.learn_epochs(batch_for(policy, 6), 1, 3)
    assert dict(one.program.functions.traces)["learn_epochs"] <= 1 + traces.get("learn_epochs", 0)
    assert_close(other.get_weights(), before, 0.0)
    assert any(np.any(x != before[key]) for key, x in one.get_weights().items())


class Told(Linear):
    """Keeps what it was told of observations."""

    def custom_loss(self, policy_loss, loss_inputs):
        kind = type(self)
        if tf.executing_eagerly():
            kind.seen = {name: loss_inputs[name] for name in ("obs", "new_obs")}
        assert "actions" in loss_inputs
        assert loss_inputs.get("nothing") is None
        return policy_loss + 0.0 * masked_mean(
            tf.ones_like(loss_inputs["loss_mask"]), loss_inputs["loss_mask"]
        )

    def forward(self, input_dict, state, seq_lens):
        if tf.executing_eagerly():
            type(self).given = input_dict["obs"]
        return super().forward(input_dict, state, seq_lens)


ModelCatalog.register_custom_model("Told", Told)


@pytest.mark.parametrize("name", SPACES)
def test_observations_are_as_forward_sees_them(name):
    policy = with_model(Told, PGTF2Policy, SPACES[name], eager_tracing=False)
    policy.learn_on_batch(batch_for(policy, 4))
    tf.nest.map_structure(np.testing.assert_array_equal, Told.seen["obs"], Told.given)
    tf.nest.assert_same_structure(Told.seen["new_obs"], Told.given)


def test_observations_are_normalised_for_a_model_with_a_filter():
    settings = {"eager_tracing": False, "observation_filter": "MeanStdFilter"}
    policy = with_model(Told, PGTF2Policy, **settings)
    policy.filter.observe([5.0 + 2.0 * rows_of(OBS, 50)])
    policy.driver.learning.flush_filters()
    batch = batch_for(policy, 4)
    policy.learn_on_batch(batch)
    assert np.abs(Told.seen["obs"] - batch["obs"]).min() > 0.1
    np.testing.assert_array_equal(Told.seen["obs"], Told.given)


class Predicting(Linear):
    """Has a head of its own that only its loss calls: it predicts the next observation."""

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


ModelCatalog.register_custom_model("Predicting", Predicting)


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_a_head_for_a_task_beside_learns(inference):
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
        self.own = masked_mean(
            tf.reduce_sum(tf.square(self(loss_inputs["obs"])), -1), loss_inputs["loss_mask"]
        )
        return [loss + self.own for loss in policy_loss]

    def custom_metrics(self):
        return {"own": self.own}


@pytest.mark.core
@pytest.mark.parametrize("policy_class", [PGTF2Policy, PPOTF2Policy])  # PPO adds a value network
def test_a_keras_model_may_have_the_hooks_too(policy_class):
    policy = make(
        policy_class,
        model={"custom_model": lambda space, num_outputs: KerasModel()},
    )
    batch = batch_for(policy, 6)
    kernel, bias = (policy.get_weights()[k] for k in list(policy.get_weights())[:2])
    stats = policy.compute_gradients(batch)[1]["learner_stats"]
    outputs = batch["obs"] @ kernel + bias
    assert stats["model/own"] == pytest.approx(np.square(outputs).sum(-1).mean(), rel=1e-4)


def test_a_loss_that_waits_does_with_a_model_that_changes_no_loss():
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


def broken(name, custom_loss, base=Linear, **members):
    made = type(name, (base,), {"custom_loss": custom_loss, **members})
    ModelCatalog.register_custom_model(name, made)
    return name


def late_layer(self, policy_loss, loss_inputs):
    self.late = keras.layers.Dense(1)
    return policy_loss + tf.reduce_mean(self.late(loss_inputs["obs"]))


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "custom_loss", "words"),
    [
        (
            "PerRow",
            lambda s, loss, d: loss[0] + d["rewards"],
            r"as many scalars.*the shapes \['\(\d+,\)'\]",
        ),
        (
            "Twice",
            lambda s, loss, d: loss + loss,
            r"as policy_loss has: 1\. It returned the shapes \['\(\)', '\(\)'\]",
        ),
        ("Late", late_layer, "custom_loss of the model creates a variable"),
        ("Unknown", lambda s, loss, d: loss[0] + d["reward"], "no column 'reward'.*'rewards'"),
    ],
)
def test_what_cannot_be_a_loss_is_refused_when_it_is_first_run(name, custom_loss, words):
    policy = with_model(broken(name, custom_loss), PGTF2Policy)
    with pytest.raises((ModelError, KeyError), match=words):
        policy.learn_on_batch(batch_for(policy, 4))


def test_metrics_are_single_numbers():
    name = broken("Rows", lambda s, x, d: x, metrics=lambda self: {"rows": tf.ones([3])})
    policy = with_model(name, PGTF2Policy)
    with pytest.raises(ModelError, match=r"The metric 'rows' of Rows must be one number.*\(3,\)"):
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


def test_a_model_with_a_memory_has_to_weigh_its_rows():
    members = {"metrics": lambda self: {"own": self.own}}
    name = broken("SmallCells", flat_squares, Cells, **members)
    policy = make(PGTF2Policy, model={"custom_model": name, "max_seq_len": 4})
    stats = policy.learn_on_batch(random_batch(policy, 6))["learner_stats"]
    assert stats["model/own"] > 0.0
    name = broken("Unweighed", lambda s, x, d: x + tf.reduce_mean(s.logits), Cells)
    policy = make(PGTF2Policy, model={"custom_model": name, "max_seq_len": 4})
    with pytest.raises(ConfigError, match=r"custom_loss of the model does not read .*loss_mask"):
        policy.learn_on_batch(random_batch(policy, 6))
