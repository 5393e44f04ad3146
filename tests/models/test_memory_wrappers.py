"""Memories around models of users, and the n last actions and rewards that they read."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from helpers.arrays import assert_arrays_equal
from helpers.factories import OBS, assert_equal, make, rows_of, varied
from helpers.view_models import Counter, check_views
from tfpolicies import Policy, PPOTF2Policy, RolloutWorker
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.export.player import OnnxPolicy
from tfpolicies.models.losses import masked_mean

FIVE = rows_of(OBS, 5, seed=3)
LSTM = {
    "use_lstm": True,
    "lstm_cell_size": 4,
    "lstm_use_prev_action": True,
    "lstm_use_prev_reward": True,
    "max_seq_len": 3,
}
ATTENTION = {
    "use_attention": True,
    "attention_dim": 4,
    "attention_head_dim": 3,
    "attention_memory_inference": 2,
    "attention_position_wise_mlp_dim": 4,
    "attention_use_n_prev_actions": 3,
    "attention_use_n_prev_rewards": 2,
    "max_seq_len": 3,
}


def features(observation_space, num_outputs):
    x = keras.Input(observation_space.shape, name="obs")
    return keras.Model(x, keras.layers.Dense(4, "tanh")(x))


class Features(keras.Model):
    """The same as a class, with a value that is not read."""

    def __init__(self, observation_space, num_outputs):
        super().__init__()
        self.hidden, self.value = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
        assert num_outputs == 4  # the width of the memory

    def call(self, obs):
        return self.hidden(obs), self.value(obs)

    def custom_loss(self, policy_loss, loss_inputs):
        outputs = self(loss_inputs["obs"])[0]
        self.added = masked_mean(tf.reduce_sum(outputs, -1), loss_inputs["loss_mask"])
        return [loss + self.added for loss in policy_loss]

    def custom_metrics(self):
        return {"added": self.added}


def play(policy):
    """Returns what a policy computes in five steps of an episode."""
    memory, result = policy.session(1).recurrent_state, []
    for i, row in enumerate(FIVE):
        result.append(memory.act([row[None]], False)[1]["action_dist_inputs"].copy())
        memory.record_rewards(np.array([0.1 * i], np.float32))
    return np.concatenate(result)


def make_worker(**model):
    config = {"model": model, "rollout_fragment_length": 6, "vf_clip_param": float("inf")}
    return RolloutWorker(
        env_creator=lambda context: Counter(),
        default_policy_class=PPOTF2Policy,
        config={**config, "seed": 0, "inference": "tf", "jit_compile": False},
    )


@pytest.fixture(scope="module")
def catalog():
    """Policies of the catalog's models, with weights for which every input counts."""
    return [varied(make(model={**memory, "fcnet_hiddens": [4]})) for memory in (LSTM, ATTENTION)]


@pytest.mark.parametrize(
    ("which", "inference"), [(0, "tf"), (0, "session"), (0, "onnx"), (1, "session"), (1, "onnx")]
)
def test_a_model_with_the_layers_of_the_encoder_computes_as_the_catalogs(catalog, which, inference):
    memory = (LSTM, ATTENTION)[which]
    policy = make(model={**memory, "custom_model": features}, inference=inference)
    policy.set_weights(catalog[which].get_weights())
    expected = play(catalog[which])
    assert np.ptp(expected, axis=0).min() > 0.01
    np.testing.assert_allclose(play(policy), expected, atol=1e-6)


def test_an_export_is_the_model_with_its_memory(tmp_path):
    policy = varied(make(model={**LSTM, "custom_model": features}, inference="onnx"))
    policy.export_model(tmp_path, onnx=True)  # compares what it has written
    player, session = OnnxPolicy(tmp_path), policy.session()
    for row in FIVE:
        assert player.act(row, 0.5) == session.act(row, 0.5, explore=False)


def test_the_first_policy_begins_with_the_weights_of_an_instance_which_stays_as_it_is():
    model = features(OBS, 2)
    before = [w.copy() for w in model.get_weights()]
    policy = make(model={**LSTM, "custom_model": model})
    assert_arrays_equal(list(policy.get_weights().values())[: len(before)], before)
    varied(policy)
    assert policy.to_keras().features is not model
    assert_arrays_equal(model.get_weights(), before)


def test_no_copy_is_made_around_a_model_that_keras_cannot_rebuild():
    model = Features(OBS, 4)
    policy = make(model={**LSTM, "custom_model": model})
    assert policy.model.features is model
    with pytest.raises(ConfigError, match="give the model as a factory"):
        policy.to_keras()


def test_a_checkpoint_does_without_the_factory(tmp_path):
    policy = varied(make(model={**ATTENTION, "custom_model": features}))
    policy.export_checkpoint(tmp_path)
    loaded = Policy.from_checkpoint(tmp_path)
    assert_equal(loaded.get_weights(), policy.get_weights())
    np.testing.assert_array_equal(play(loaded), play(policy))


def test_the_custom_loss_of_the_model_is_added():
    worker = make_worker(**LSTM, custom_model=Features)
    policy = worker.get_policy()
    assert policy.model.custom_metrics.__self__ is policy.model.features
    before = policy.get_weights()
    stats = policy.learn_on_batch(worker.sample())["learner_stats"]
    assert np.isfinite(stats["model/added"])
    after = policy.get_weights()
    moved = {key for key in before if np.any(before[key] != after[key])}
    unread = {"layer_1/kernel", "layer_1/bias"}  # the model's own value
    assert moved == set(before) - unread


def test_a_batch_has_the_n_last_actions_and_rewards():
    worker = make_worker(**ATTENTION, fcnet_hiddens=[4])
    samples = [worker.sample() for _ in range(3)]
    views = {"prev_n_actions": ("actions", [-3, -2, -1]), "prev_n_rewards": ("rewards", [-2, -1])}
    check_views(samples, views)
    rewards = samples[0]["prev_n_rewards"].tolist()
    assert rewards == [[0, 0], [0, 10], [10, 20], [20, 30], [0, 0], [0, 10]]
    result = worker.get_policy().learn_on_batch(samples[0])
    assert result["learner_stats"]["kl"] == pytest.approx(0.0, abs=1e-6)


def test_the_arguments_for_the_last_step_give_the_n_last_ones(catalog):
    _, policy = catalog
    start = policy.get_initial_state()
    actions, rewards = np.array([0, 1, 1]), np.array([0.5, -1.0], np.float32)
    views = {"prev_n_actions": actions[None], "prev_n_rewards": rewards[None]}
    named = policy.compute_actions(FIVE[:1], [x[None] for x in start], explore=False, views=views)
    _, _, extras = policy.compute_single_action(
        FIVE[0], start, prev_action=actions, prev_reward=rewards, explore=False
    )
    expected = named.extras["action_dist_inputs"][0]
    np.testing.assert_array_equal(extras["action_dist_inputs"], expected)
    one = make(model={**LSTM, "fcnet_hiddens": [4]}).compute_single_action
    state = [np.zeros(4), np.zeros(4)]
    actual = [
        one(FIVE[0], state, prev_action=action, prev_reward=0.5, explore=False)[2]
        for action in (1, [1])  # n = 1, too
    ]
    assert_equal(*actual)


def remembers(observation_space, num_outputs):
    obs, state = keras.Input((None, 3), name="obs"), keras.Input((2,), name="state_in_0")
    outputs = {"logits": keras.layers.Dense(2)(obs), "state_out_0": state}
    return keras.Model({"obs": obs, "state_in_0": state}, outputs)


def in_a_box(observation_space, num_outputs):
    x = keras.Input(observation_space.shape)
    return keras.Model(x, keras.layers.Reshape((3, 1))(x))


def named_like_a_layer(observation_space, num_outputs):
    model = features(observation_space, num_outputs)
    return keras.Model(model.inputs, model.outputs, name="lstm")


def reads_four(observation_space, num_outputs):
    x = keras.Input((4,), name="prev_n_rewards")
    obs = keras.Input((3,), name="obs")
    return keras.Model([obs, x], keras.layers.Concatenate()([obs, x]))


@pytest.mark.parametrize(
    ("model", "memory", "words"),
    [
        (remembers, LSTM, "already has a memory. Leave use_lstm"),
        (in_a_box, LSTM, r"features of shape \[B, n\].* got \(2, 3, 1\) for 2 rows"),
        (named_like_a_layer, LSTM, "around the model 'lstm'.*Give it another name"),
        (reads_four, ATTENTION, r"'prev_n_rewards' of the shape \(4,\), but .* \(2,\)"),
    ],
)
def test_a_model_that_no_memory_fits_is_refused_with_the_remedy(model, memory, words):
    with pytest.raises(ModelError, match=words):
        make(model={**memory, "custom_model": model})
