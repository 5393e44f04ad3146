"""Padded sequences: updates are finite, and those of the same rows without padding."""

import math

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers import factories
from tfpolicies import (
    A2CTF2Policy,
    MARWILTF2Policy,
    PGTF2Policy,
    PPOTF1Policy,
    PPOTF2Policy,
    SampleBatch,
)
from tfpolicies.errors import BatchError
from tfpolicies.models.losses import masked_mean

pytestmark = pytest.mark.usefixtures("kept_programs")

SIZE, LOG_STD = 24, -5.0  # exp(sum of log-densities at the mean) is more than float32 holds
MODELS = {
    "lstm": {"use_lstm": True, "lstm_cell_size": 3},
    "gru": {"use_gru": True, "lstm_cell_size": 3, "lstm_use_prev_action": True},
    "attention": {
        "use_attention": True,
        "attention_dim": 4,
        "attention_head_dim": 2,
        "attention_memory_inference": 3,
    },
}


class Unmasked(PPOTF2Policy):
    """Multiplies by the mask in the end, as people do, and records extremes of all rows."""

    def loss(self, model, dist_class, train_batch):
        mask = train_batch["loss_mask"]
        current = dist_class(model(train_batch)[0], model)
        logp = current.logp(train_batch["actions"])
        ratio = tf.exp(logp - train_batch["action_logp"])
        previous = dist_class(train_batch["action_dist_inputs"], model)
        values = model.value_function()
        self.record(
            max_ratio=tf.reduce_max(ratio),
            min_ratio=tf.reduce_min(ratio),
            max_kl=tf.reduce_max(previous.kl(current)),
            max_value=tf.reduce_max(values),
            max_output=tf.reduce_max(model.raw_outputs()),
        )
        errors = tf.square(values - train_batch["value_targets"])
        terms = ratio * train_batch["advantages"] + previous.kl(current) + errors
        return tf.reduce_sum(terms * mask) / tf.reduce_sum(mask)


def make_policy(policy_class, model, steps, **config):
    actions = spaces.Box(-1.0, 1.0, (SIZE,), np.float32)
    settings = {"fcnet_hiddens": [4], "free_log_std": True, **MODELS[model], "max_seq_len": steps}
    policy = factories.make(policy_class, actions=actions, model=settings, **config)
    rng = np.random.default_rng(7)
    policy.set_weights(
        {
            name: np.full(w.shape, LOG_STD)
            if "log_std" in name
            else 0.003 * rng.normal(size=w.shape)
            for name, w in policy.get_weights().items()
            if "average" not in name
        }
    )
    return policy


def make_batch(policy, lengths):
    """Returns rows of a policy with means near 0: 1.2 standard deviations away from them."""
    rows, rng = sum(lengths), np.random.default_rng(0)
    z = 1.2 * rng.choice([-1.0, 1.0], (rows, SIZE))
    logp = SIZE * (-0.5 * 1.44 - LOG_STD - 0.5 * math.log(2 * math.pi))
    inputs = np.concatenate([np.zeros((rows, SIZE)), np.full((rows, SIZE), LOG_STD)], axis=1)
    columns = {
        "obs": rng.normal(size=(rows, 3)),
        "actions": np.exp(LOG_STD) * z,
        "action_logp": np.full(rows, logp),
        "action_dist_inputs": inputs,
        "advantages": np.linspace(-1.0, 1.0, rows),
        "value_targets": np.linspace(0.0, 2.0, rows),
        "prev_actions": np.exp(LOG_STD) * np.roll(z, 1, axis=0),
    }
    memory = {
        f"state_in_{i}": np.full((len(lengths), *state.shape), 0.1 * (i + 1))
        for i, state in enumerate(policy.get_initial_state())
    }
    if policy.config["model"]["use_attention"]:  # whose memory counts its steps
        memory = {name: np.zeros_like(x) for name, x in memory.items()}
    floats = {name: np.asarray(x, np.float32) for name, x in {**columns, **memory}.items()}
    return SampleBatch(floats, seq_lens=np.array(lengths, np.int32))


def assert_same_update(padded, whole, lengths):
    """Asserts equal updates of a policy that pads the sequences, and of one that does not."""
    (actual, info), (expected, expected_info) = (
        policy.compute_gradients(make_batch(policy, lengths)) for policy in (padded, whole)
    )
    factories.assert_close(info["learner_stats"], expected_info["learner_stats"], atol=2e-4)
    for one, other in zip(actual, expected, strict=True):
        scale = max(1.0, float(np.abs(other).max()))
        np.testing.assert_allclose(one / scale, other / scale, rtol=0, atol=1e-5)
    assert max(float(np.abs(x).max()) for x in expected) > 1e-3
    for policy in (padded, whole):
        policy.learn_on_batch(make_batch(policy, lengths))
    factories.assert_close(padded.get_weights(), whole.get_weights(), atol=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("policy_class", "model", "jit"),
    [
        (PPOTF2Policy, "lstm", False),
        (PPOTF2Policy, "lstm", True),
        (PPOTF2Policy, "attention", False),
        (PPOTF1Policy, "lstm", False),
        (A2CTF2Policy, "gru", False),
        (PGTF2Policy, "lstm", False),
        (MARWILTF2Policy, "gru", False),
        (MARWILTF2Policy, "lstm", True),
        (Unmasked, "gru", False),
        (Unmasked, "attention", False),
        (Unmasked, "lstm", True),
    ],
)
def test_an_update_on_padded_sequences_is_the_one_on_their_rows(policy_class, model, jit):
    padded, whole = (make_policy(policy_class, model, x, jit_compile=jit) for x in (5, 3))
    assert_same_update(padded, whole, [3, 3, 3])


def test_one_short_sequence_among_full_ones_leaves_an_update_finite():
    policy = make_policy(PPOTF2Policy, "lstm", 4)
    for lengths in ([4, 4, 4, 4], [4, 4, 4, 3], [1, 4]):
        stats = policy.learn_on_batch(make_batch(policy, lengths))["learner_stats"]
        assert all(map(math.isfinite, stats.values())), (lengths, stats)


def test_minibatches_that_are_filled_up_are_finite_too():
    policy = make_policy(PPOTF2Policy, "lstm", 4, jit_compile=True)
    result = policy.learn_epochs(make_batch(policy, [4, 1, 4, 2, 3]), 2, 8)
    assert all(map(math.isfinite, result["learner_stats"].values()))
    assert policy.num_grad_updates == 6


@pytest.mark.core
def test_padded_rows_are_the_last_row_of_their_sequence():
    policy = make_policy(PPOTF2Policy, "gru", 4)
    policy.compute_gradients(make_batch(policy, [4, 4]))  # which finds out what the loss reads
    batch = make_batch(policy, [2, 4, 1])
    columns = policy.program.updates.reader.read(batch).columns
    assert columns["seq_lens"].tolist() == [2, 4, 1]
    for name in ("obs", "actions", "action_logp", "prev_actions", "advantages"):
        rows = np.asarray(batch[name])[[0, 1, 1, 1, 2, 3, 4, 5, 6, 6, 6, 6]]
        np.testing.assert_array_equal(columns[name].reshape(rows.shape), rows, err_msg=name)


def test_sequences_without_rows_are_left_out():
    policy = make_policy(PPOTF2Policy, "lstm", 4)
    whole = make_batch(policy, [4, 2])
    batch = make_batch(policy, [4, 0, 2, 0])
    for name in ("state_in_0", "state_in_1"):
        batch[name] = np.stack([whole[name][0], np.full(3, np.nan), whole[name][1], np.zeros(3)])
    gradients = [policy.compute_gradients(each)[0] for each in (batch, whole)]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(BatchError, match="empty"):
        policy.learn_on_batch(make_batch(policy, [0, 0]))


@pytest.mark.core
def test_a_masked_mean_takes_neither_values_nor_gradients_of_rows_of_weight_zero():
    values, mask = tf.constant([1.0, math.nan, 3.0, math.inf]), tf.constant([1.0, 0.0, 1.0, 0.0])
    with tf.GradientTape() as tape:
        tape.watch(values)
        mean = masked_mean(values, mask)
    assert float(mean) == 2.0
    assert tape.gradient(mean, values).numpy().tolist() == [0.5, 0.0, 0.5, 0.0]
