"""Policy classes, losses and models in the idioms of RLlib's users."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.factories import OBS, TWO, assert_close, batch_for, make, rows_of, trajectory
from helpers.rllib_models import Linear, with_model
from tfpolicies import PGTF1Policy, PGTF2Policy, PPOTF1Policy, PPOTF2Policy, SampleBatch, compat
from tfpolicies.compat.tf_model_adapter import TFModelFactory
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.losses import masked_mean

FIVE = rows_of(OBS, 5, seed=3)


class Critic(compat.TFModelV2):
    """A model with a second network, which only the loss and postprocessing use."""

    def __init__(self, *args):
        super().__init__(*args)
        self.base_model = compat.FullyConnectedNetwork(*args)
        self.central = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])

    @compat.override(compat.ModelV2)
    def forward(self, input_dict, state, seq_lens):
        return self.base_model.forward(input_dict, state, seq_lens)

    @compat.override(compat.ModelV2)
    def value_function(self):
        return self.base_model.value_function()

    def central_value(self, obs, other):
        other = tf.cast(other, tf.float32)[:, None]
        return tf.reshape(self.central(tf.concat([obs, other], axis=1)), [-1])


class CentralValue:
    """Makes a function of a method of the model, in the constructor of a policy."""

    def __init__(self):
        self.central_value = compat.make_tf_callable(self.get_session())(self.model.central_value)


def with_central_critic(base):
    class CentralPolicy(CentralValue, base):
        def __init__(self, observation_space, action_space, config):
            base.__init__(self, observation_space, action_space, config)
            CentralValue.__init__(self)

        @compat.override(base)
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            if self.loss_initialized():
                ((_, _, other),) = other_agent_batches.values()
                sample_batch["other"] = other["actions"]
            else:
                sample_batch["other"] = np.zeros_like(sample_batch["actions"])
            values = self.central_value(sample_batch["obs"], sample_batch["other"])
            sample_batch["vf_preds"] = compat.convert_to_numpy(values)
            return compat.compute_gae_for_sample_batch(self, sample_batch)

        @compat.override(base)
        def loss(self, model, dist_class, train_batch):
            before = model.value_function
            model.value_function = lambda: self.model.central_value(
                train_batch["obs"], train_batch["other"]
            )
            loss = super().loss(model, dist_class, train_batch)
            model.value_function = before
            return loss

    return CentralPolicy


compat.ModelCatalog.register_custom_model("critic", Critic)


def make_central(base=PPOTF2Policy, **config):
    return make(with_central_critic(base), model={"custom_model": "critic"}, **config)


def test_a_method_of_the_model_runs_with_the_weights_of_its_policy():
    first = make_central()
    second = first.copy("second")
    second.set_weights({k: 2 * v + 1 for k, v in first.get_weights().items()})
    assert first.program is second.program
    others = np.array([0, 1, 0, 1, 1])

    def expected(policy):
        kernel, bias = list(policy.get_weights().values())[-2:]
        return (np.concatenate([FIVE, others[:, None]], axis=1) @ kernel + bias)[:, 0]

    for policy in (first, second, first):
        for call in (policy.central_value, policy.model.central_value):
            np.testing.assert_allclose(call(FIVE, others), expected(policy), rtol=1e-5)
    assert first.model.base_model.num_outputs == 2


@pytest.mark.parametrize("base", [PPOTF2Policy, PPOTF1Policy])
def test_a_central_critic_learns_from_the_actions_of_others(base):
    policy = make_central(base, lr=0.01, vf_loss_coeff=1.0)
    batch = trajectory(policy, 6)
    other = trajectory(policy, 6, seed=5)
    assert policy.loss_initialized()
    batch = policy.postprocess_trajectory(batch, {"b": ("other", policy, other)})
    np.testing.assert_array_equal(batch["other"], other["actions"])
    before = list(policy.get_weights().values())
    stats = policy.learn_on_batch(batch)["learner_stats"]
    pairs = zip(before, policy.get_weights().values(), strict=True)
    changes = [not np.array_equal(x, y) for x, y in pairs]
    assert changes[-2:] == [True, True]  # the second network
    errors = np.square(batch["vf_preds"] - batch["value_targets"])
    assert stats["vf_loss"] == pytest.approx(np.minimum(errors, 10.0).mean(), rel=1e-4)


def test_acting_may_call_layers_of_the_model_with_the_policys_weights():
    class Curious(PGTF2Policy):
        def make_model(self):
            return tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2)])

        def action_distribution_fn(self, model, *, obs_batch, state_batches, **kwargs):
            return model.layers[0](obs_batch), self.dist_class, []

    for policy in (make(Curious), make(Curious, seed=1)):
        kernel, bias = policy.get_weights().values()
        result = policy.compute_actions(FIVE).extras["action_dist_inputs"]
        np.testing.assert_allclose(result, FIVE @ kernel + bias, atol=1e-6)


class Shared(Linear):
    layer = tf.keras.layers.Dense(2, name="common")

    def __init__(self, *args):
        super().__init__(*args)
        self.out = self.layer


def test_layers_that_policies_have_in_common_are_refused():
    with pytest.raises(ModelError, match=r"Each Shared must make separate layers.*\['common'\]"):
        with_model(Shared, PGTF2Policy)


class Scoped(Linear):
    def __init__(self, *args):
        super().__init__(*args)
        with tf.compat.v1.variable_scope("mine"):
            self.out = tf.keras.layers.Dense(self.num_outputs)


class Reusing(Linear):
    def __init__(self, *args):
        super().__init__(*args)
        with tf.compat.v1.variable_scope("shared", reuse=tf.compat.v1.AUTO_REUSE):
            self.out = tf.keras.layers.Dense(self.num_outputs)


@pytest.mark.parametrize("kind", [PGTF2Policy, PGTF1Policy])
def test_weights_that_would_be_shared_by_a_variable_scope_are_refused(kind):
    words = "Reusing makes layers in a variable_scope with reuse.*Map agents"
    with pytest.raises(ModelError, match=words):
        with_model(Reusing, kind)


def test_layers_in_a_variable_scope_without_reuse_belong_to_the_model():
    model = TFModelFactory(Scoped)(OBS, 2, action_space=TWO, model_config={})
    assert [x.shape for x in model.trainable_variables] == [(3, 2), (2,)]


def copied_loss(self, model, dist_class, train_batch):
    """The clipped objective as users copy it, with the attributes that statistics read."""
    logits, state = model(train_batch)
    current, previous = (dist_class(x, model) for x in (logits, train_batch["action_dist_inputs"]))
    if state:
        steps = tf.shape(logits)[0] // tf.shape(train_batch["seq_lens"])[0]
        mask = tf.reshape(tf.sequence_mask(train_batch["seq_lens"], steps), [-1])

        def mean(x):
            return tf.reduce_mean(tf.boolean_mask(x, mask))
    else:
        mean = tf.reduce_mean
    ratio = tf.exp(current.logp(train_batch["actions"]) - train_batch["action_logp"])
    advantages, clip = train_batch[compat.Postprocessing.ADVANTAGES], self.config["clip_param"]
    surrogate = tf.minimum(
        advantages * ratio, advantages * tf.clip_by_value(ratio, 1 - clip, 1 + clip)
    )
    values = model.value_function()
    error = tf.square(values - train_batch[compat.Postprocessing.VALUE_TARGETS])
    error = tf.minimum(error, self.config["vf_clip_param"])
    kl, entropy = previous.kl(current), current.entropy()
    self._mean_policy_loss, self._mean_kl_loss = mean(-surrogate), mean(kl)
    self._mean_vf_loss, self._mean_entropy = mean(error), mean(entropy)
    self._value_fn_out = values
    self._total_loss = mean(
        -surrogate
        + self.config["vf_loss_coeff"] * error
        - self.entropy_coeff * entropy
        + self.kl_coeff * kl
    )
    return self._total_loss


class Copied(PPOTF2Policy):
    loss = copied_loss


@pytest.mark.parametrize("model", [{}, {"use_lstm": True, "lstm_cell_size": 3, "max_seq_len": 4}])
def test_a_copied_loss_learns_as_that_of_ppo(model):
    config = {"model": {"fcnet_hiddens": [4], **model}, "entropy_coeff": 0.1, "lr": 0.01}
    policies = [make(policy_class, **config) for policy_class in (PPOTF2Policy, Copied)]
    rows = make_rows_with_states(policies[0], 11) if model else trajectory(policies[0], 11)
    batch = policies[0].postprocess_trajectory(rows)
    results = [policy.learn_epochs(batch, 2, 8, shuffle=False) for policy in policies]
    stats = [result["learner_stats"] for result in results]
    assert_close(*(policy.get_weights() for policy in policies), atol=1e-5)
    assert set(stats[0]) == set(stats[1])
    for name in ("total_loss", "kl", "entropy", "vf_loss"):
        assert stats[0][name] == pytest.approx(stats[1][name], rel=1e-3, abs=1e-5)


def make_rows_with_states(policy, rows):
    states = [np.zeros((rows, 3), np.float32) for _ in range(2)]
    obs = rows_of(OBS, rows, 0)
    actions, after, extras = policy.compute_actions(obs, states)
    ends = np.arange(rows) == rows - 1
    return SampleBatch(
        obs=obs,
        new_obs=rows_of(OBS, rows, 1),
        actions=actions,
        rewards=np.linspace(-1, 1, rows).astype(np.float32),
        terminateds=ends,
        truncateds=np.zeros(rows, bool),
        unroll_id=np.zeros(rows, np.int64),
        **{f"state_in_{i}": x for i, x in enumerate(states)},
        **{f"state_out_{i}": x for i, x in enumerate(after)},
        **extras,
    )


def test_a_loss_that_ignores_padding_is_refused_with_a_memory():
    class Careless(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            logits, _ = model.from_batch(train_batch)
            logp = dist_class(logits, model).logp(train_batch["actions"])
            return -tf.reduce_mean(logp * train_batch["advantages"])

    policy = make(Careless, model={"use_lstm": True, "lstm_cell_size": 3})
    with pytest.raises(ConfigError, match=r"Careless\.loss does not read.*losses\.masked_mean"):
        policy._learner.discover_columns()


def test_statistics_that_read_the_mask_do_not_weigh_the_loss():
    class Careless(PGTF2Policy):
        def loss(self, model, dist_class, train_batch):
            logits, _ = model(train_batch)
            logp = dist_class(logits, model).logp(train_batch["actions"])
            self.terms = logp * train_batch["advantages"]
            return -tf.reduce_mean(self.terms)

        def stats_fn(self, train_batch):
            return {"term": masked_mean(self.terms, train_batch["loss_mask"])}

    policies = [make(policy_class, lr=0.01) for policy_class in (Careless, PGTF2Policy)]
    batch = batch_for(policies[0], 7)
    for policy in policies:
        policy.learn_epochs(batch, 1, 4, shuffle=False)  # of 4 rows and of 3
    assert not policies[0].program.updates.signature.reads_mask
    assert_close(*(policy.get_weights() for policy in policies), atol=1e-6)


def test_a_condition_on_a_tensor_is_refused():
    class Asking(PPOTF2Policy):
        def loss(self, model, dist_class, train_batch):
            loss = super().loss(model, dist_class, train_batch)
            return loss + self._mean_kl_loss if self.config["kl_coeff"] > 0.0 else loss

    policy = make(Asking)
    with pytest.raises(ConfigError, match=r"Asking\.loss uses the value of a tensor in Python"):
        policy.learn_on_batch(batch_for(policy, 4))


def test_a_custom_loss_has_only_the_statistics_that_it_sets():
    class Bare(PPOTF2Policy):
        def loss(self, model, dist_class, train_batch):
            logits, _ = model(train_batch)
            return tf.reduce_mean(tf.square(logits))

    policy = make(Bare)
    stats = policy.learn_on_batch(batch_for(policy, 4))["learner_stats"]
    assert set(stats) == {"cur_lr", "cur_kl_coeff", "entropy_coeff"}


def test_coefficients_of_mixins_are_those_in_force():
    class Mixed(
        compat.KLCoeffMixin,
        compat.EntropyCoeffSchedule,
        compat.LearningRateSchedule,
        compat.ValueNetworkMixin,
        compat.EagerTFPolicyV2,
    ):
        config_class = PPOTF2Policy.config_class
        hyperparameters = PPOTF2Policy.hyperparameters
        static_keys = PPOTF2Policy.static_keys

        def __init__(self, observation_space, action_space, config):
            super(compat.ValueNetworkMixin, self).__init__(observation_space, action_space, config)
            compat.KLCoeffMixin.__init__(self, config)
            compat.EntropyCoeffSchedule.__init__(self, 0.25, None)
            compat.LearningRateSchedule.__init__(self, 0.5, None)
            compat.ValueNetworkMixin.__init__(self, config)
            self.maybe_initialize_optimizer_and_loss()

        loss = copied_loss

        def stats_fn(self, train_batch):
            return {"kl_coeff": self.kl_coeff, "entropy": self.entropy_coeff, "lr": self.cur_lr}

        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            return compat.compute_gae_for_sample_batch(
                self, sample_batch, other_agent_batches, episode
            )

    policy = make(Mixed, kl_coeff=0.125, entropy_coeff=0.25, lr=0.5)
    assert (policy.kl_coeff, policy.entropy_coeff, policy.cur_lr) == (0.125, 0.25, 0.5)
    stats = policy.learn_on_batch(batch_for(policy, 4))["learner_stats"]
    assert (stats["kl_coeff"], stats["entropy"], stats["lr"]) == (0.125, 0.25, 0.5)
    assert issubclass(compat.DynamicTFPolicyV2, compat.EagerTFPolicyV2)
    assert compat.DynamicTFPolicyV2.runtime == "session"


@pytest.mark.parametrize("terminated", [True, False])
def test_advantages_of_one_trajectory_are_those_of_ppo(terminated):
    policy = make(lambda_=0.5, gamma=0.9)
    rows = trajectory(policy, 5, terminated=terminated)
    expected = policy.postprocess_trajectory(rows.copy())
    batch = compat.compute_gae_for_sample_batch(policy, rows.copy())
    for name in ("advantages", "value_targets", "values_bootstrapped"):
        np.testing.assert_allclose(batch[name], expected[name], rtol=1e-5)
    assert batch["advantages"].dtype == np.float32


def test_tensors_become_arrays_of_32_bits():
    values = {"a": tf.constant([1.5], tf.float64), "b": (np.array([2]),)}
    result = compat.convert_to_numpy(values)
    assert (result["a"].dtype, result["b"][0].dtype) == (np.float32, np.int32)
    assert compat.convert_to_numpy(values, reduce_type=False)["a"].dtype == np.float64
