"""Overrides besides the loss: model, optimizer, sampling, distribution; tracing and devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpolicies.compat  # noqa: F401 - resolves names of ported code
from helpers.factories import OBS, PLANE, assert_close, batch_for, make, rows_of
from tfpolicies import PGTF2Policy, PPOTF2Policy
from tfpolicies.errors import BatchError, ConfigError, PolicyOwnedError, RetraceError
from tfpolicies.program.devices import choose_learner_device
from tfpolicies.testing import random_batch

RUNTIMES = pytest.mark.parametrize("inference", ["tf", "onnx"])


class Linear(PGTF2Policy):
    def make_model(self):
        inputs = keras.Input(self.observation_space.shape)
        return keras.Model(inputs, keras.layers.Dense(self.dist_class.num_inputs)(inputs))


class Sharp(Linear):
    def action_distribution_fn(self, model, *, obs_batch, state_batches, **kwargs):
        dist_inputs, states = model({"obs": obs_batch}, state_batches)
        return 2.0 * dist_inputs, self.dist_class, states


class Mirrored(Linear):
    """Takes the other one of two actions."""

    def action_sampler_fn(self, model, *, obs_batch, state_batches, noise, **kwargs):
        dist_inputs, states = model({"obs": obs_batch}, state_batches)
        return 1 - self.dist_class(dist_inputs).sample(noise), None, dist_inputs, states


def compute_logits(policy, obs):
    kernel, bias = policy.get_weights().values()
    return obs @ kernel + bias


@pytest.mark.core
def test_a_class_builds_its_model_in_code_and_its_policies_share_a_program():
    first, second = make(Linear, seed=1), make(Linear, seed=2)
    assert first.program is second.program
    obs = rows_of(OBS, 4)
    for policy in (first, second):
        actual = policy.compute_actions(obs).extras["action_dist_inputs"]
        np.testing.assert_allclose(actual, compute_logits(policy, obs), atol=1e-6)
    assert [tuple(w.shape) for w in first.get_weights().values()] == [(3, 2), (2,)]
    first.learn_on_batch(batch_for(first, 4))


def test_the_default_model_is_the_catalogs():
    class Frozen(PPOTF2Policy):
        def make_model(self):
            model = super().make_model()
            model.layers[1].trainable = False
            return model

    plain, frozen = make(), make(Frozen)
    assert list(plain.get_weights()) == list(frozen.get_weights())
    trainable = [len(p.model.trainable_variables) for p in (plain, frozen)]
    assert trainable[1] < trainable[0]


@pytest.mark.core
@RUNTIMES
def test_a_class_chooses_the_distribution_of_its_actions(inference):
    policy = make(Sharp, inference=inference)
    obs = rows_of(OBS, 5)
    expected = 2 * compute_logits(policy, obs)
    acted = policy.compute_actions(obs)
    assert policy.driver.acting.inference == inference
    np.testing.assert_allclose(acted.extras["action_dist_inputs"], expected, atol=1e-5)
    logp = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    logp = logp[np.arange(5), acted.actions]
    np.testing.assert_allclose(acted.extras["action_logp"], logp, atol=1e-5)
    actual = policy.compute_log_likelihoods(acted.actions, obs)
    np.testing.assert_allclose(actual, logp, atol=1e-5)


@pytest.mark.core
@RUNTIMES
def test_a_class_chooses_how_noise_becomes_actions(inference):
    policy, plain = make(Mirrored, inference=inference), make(Linear, inference=inference)
    obs = rows_of(OBS, 30)
    for explore in (True, False):
        mirrored = policy.compute_actions(obs, explore=explore).actions
        np.testing.assert_array_equal(mirrored, 1 - plain.compute_actions(obs, explore=explore)[0])
    assert not policy.compute_actions(obs).extras["action_logp"].any()
    with pytest.raises(ConfigError, match="overrides `action_sampler_fn`, so the distribution"):
        policy.compute_log_likelihoods([0], obs[:1])


def test_distributions_and_several_losses_of_a_class_agree_with_graph_mode():
    sharp, two = (
        type(f"Graph{x.__name__}", (x,), {"runtime": "session"}) for x in (Sharp, TwoLosses)
    )
    one, other = (make(x).compute_actions(rows_of(OBS, 4)) for x in (Sharp, sharp))
    np.testing.assert_allclose(one.actions, other.actions, atol=1e-6)
    inputs = [x.extras["action_dist_inputs"] for x in (one, other)]
    np.testing.assert_allclose(*inputs, atol=1e-6)
    several = {"_tf_policy_handles_more_than_one_loss": True, "lr": 0.1}
    policies = [make(x, **several) for x in (TwoLosses, two)]
    batch = batch_for(policies[0], 4)
    for policy in policies:
        policy.learn_on_batch(batch)
    assert_close(*(policy.get_weights() for policy in policies), atol=1e-6)


def test_a_custom_sampler_of_continuous_actions_is_exported(tmp_path):
    class Halved(Linear):
        def action_sampler_fn(self, model, *, obs_batch, state_batches, noise, **kwargs):
            dist_inputs, states = model(kwargs["input_dict"])
            actions = 0.5 * tf.tanh(self.dist_class(dist_inputs).sample(noise))
            return actions, None, None, states

    policy = make(Halved, actions=PLANE)
    assert np.abs(policy.compute_actions(rows_of(OBS, 50)).actions).max() <= 0.5
    assert policy.export_model(tmp_path).path


def test_custom_sampling_needs_a_custom_model_and_inputs_of_the_right_width():
    class NoModel(PPOTF2Policy):
        action_distribution_fn = Sharp.action_distribution_fn

    class Wide(Linear):
        def action_distribution_fn(self, model, *, obs_batch, state_batches, **kwargs):
            dist_inputs, states = model({"obs": obs_batch}, state_batches)
            return tf.concat([dist_inputs] * 2, -1), self.dist_class, states

    with pytest.raises(ConfigError, match="overrides `action_distribution_fn` but not `make_mod"):
        make(NoModel)
    with pytest.raises(ConfigError, match=r"shape \(None, 4\); `self.dist_class` needs \[N, 2\]"):
        make(Wide).compute_actions(rows_of(OBS, 3))


def test_a_class_chooses_its_optimizer():
    class Descending(PPOTF2Policy):
        def optimizer(self):
            return keras.optimizers.SGD()

        def __init__(self, *args):
            super().__init__(*args)
            self.maybe_initialize_optimizer_and_loss()

    custom, plain = make(Descending, lr=0.1), make(lr=0.1, optimizer={"type": "sgd"})
    batch = batch_for(custom, 6)
    for policy in (custom, plain):
        policy.learn_on_batch(batch)
    assert_close(custom.get_weights(), plain.get_weights(), atol=1e-7)
    assert len(custom.get_state()["_optimizer_variables"]) == 2


def test_the_rows_of_an_update_are_a_multiple_of_the_required_number():
    class InThrees(PPOTF2Policy):
        def get_batch_divisibility_req(self):
            return 3

    policy = make(InThrees)
    policy.learn_on_batch(batch_for(policy, 6))
    for learn in (
        lambda: policy.learn_on_batch(batch_for(policy, 5)),
        lambda: policy.learn_epochs(batch_for(policy, 6), 1, 2),
        lambda: policy.load_batch_into_buffer(batch_for(policy, 4)),
    ):
        with pytest.raises(BatchError, match="a multiple of 3"):
            learn()
    assert policy.num_grad_updates == 1


def test_untraced_policies_run_their_python_code_at_every_call():
    calls = []

    class Debugged(PPOTF2Policy):
        def loss(self, model, dist_class, train_batch):
            calls.append(len(train_batch["actions"]))
            return super().loss(model, dist_class, train_batch)

        def extra_action_out_fn(self):
            calls.append("act")
            return {}

    policy = make(Debugged, eager_tracing=False, inference="auto", jit_compile="auto")
    batch = batch_for(policy, 7)
    policy._learner.discover_columns()
    assert policy.driver.acting.inference == "tf"
    calls.clear()
    policy.learn_epochs(batch, 2, 4)
    assert calls == [4, 4, 4, 4]  # the shorter ones are padded
    calls.clear()
    for _ in range(2):
        policy.compute_actions(batch["obs"])
    assert calls == ["act", "act"]


@pytest.mark.core
def test_a_loss_records_numbers_and_rows():
    class Recording(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            loss = super().loss(model, dist_class, train_batch)
            self.record(twice=2 * self.recorded["policy_loss"], returns=train_batch["advantages"])
            return loss

    policy = make(Recording)
    batch = random_batch(policy, 4)
    result = policy.learn_on_batch(batch)
    stats = result["learner_stats"]
    assert stats["twice"] == pytest.approx(2 * stats["policy_loss"])
    assert result["returns"].tolist() == batch["advantages"].tolist()


def test_a_missing_statistic_of_ported_code_is_an_error(no_extensions):
    class Reading(PPOTF2Policy):
        def loss(self, model, dist_class, train_batch):
            return super().loss(model, dist_class, train_batch) + self._mean_kl_loss

    policy = make(Reading)
    with pytest.raises(PolicyOwnedError, match=r"read self\._mean_kl_loss"):
        policy.learn_on_batch(random_batch(policy, 4))


class TwoLosses(Linear):
    """Pulls the kernel to 1 by one optimizer, and the bias to 2 by another."""

    def loss(self, model, dist_class, train_batch):
        model(train_batch)
        kernel, bias = model.trainable_variables
        pull = tf.reduce_sum(0.0 * train_batch["rewards"])
        losses = [0.5 * tf.reduce_sum((kernel - 1.0) ** 2), 0.5 * tf.reduce_sum((bias - 2.0) ** 2)]
        return [losses[0] + pull, losses[1]]

    def stats_fn(self, train_batch):
        return {}

    def optimizer(self):
        return [keras.optimizers.SGD(), keras.optimizers.SGD(momentum=0.5)]


def test_each_loss_has_its_optimizer():
    policy = make(TwoLosses, lr=0.1)
    batch, weights = batch_for(policy, 4), list(policy.get_weights().values())
    speed = np.zeros(2)
    for _ in range(2):
        policy.learn_on_batch(batch)
        weights[0] = weights[0] + 0.1 * (1 - weights[0])
        speed = 0.5 * speed + 0.1 * (2 - weights[1])
        weights[1] = weights[1] + speed
    for array, expected in zip(policy.get_weights().values(), weights, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5)
    gradients, _ = policy.compute_gradients(batch)
    expected = [weights[0] - 1, np.zeros(2), np.zeros((3, 2)), weights[1] - 2]
    for gradient, array in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, array, rtol=1e-4, atol=1e-6)
    policy.apply_gradients(gradients)
    other = make(TwoLosses, seed=3)
    other.set_state(policy.get_state())
    for copied in (policy, other):
        copied.learn_epochs(batch, 1, 2)
    assert_close(policy.get_weights(), other.get_weights(), atol=0)


def test_several_losses_have_as_many_optimizers():
    few = make(type("TooFew", (TwoLosses,), {"optimizer": lambda self: [keras.optimizers.SGD()]}))
    with pytest.raises(ConfigError, match="returned a list of 2, but `optimizer` a list of 1"):
        few.learn_on_batch(batch_for(few, 4))


def test_a_function_that_is_traced_too_often_is_named_with_the_change():
    policy = make(eager_max_retraces=1)
    policy.compute_actions(rows_of(OBS, 2))
    functions, dtype = policy.program.functions, tf.float32
    functions.traces.record("act", tf.zeros([2, 3], dtype))
    with pytest.raises(RetraceError, match=r"'act' was traced 3 times.* 0 was float32\[2, "):
        functions.traces.record("act", tf.zeros([4, 3], dtype))
    for wrong in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="eager_max_retraces"):
            make(eager_max_retraces=wrong)
    make(eager_max_retraces=None)
    untraced = make(eager_tracing=False, eager_max_retraces=0)
    for _ in range(3):
        untraced.compute_actions(rows_of(OBS, 2))


def test_a_gpu_is_used_if_it_is_configured_and_exists():
    devices = [choose_learner_device(*x) for x in ((0, 2), (1, 1), (0.5, 1))]
    assert devices == ["/cpu:0", "/gpu:0", "/gpu:0"]
    with pytest.raises(ConfigError, match="num_gpus must be 0 or 1"):
        make(num_gpus=2)
