"""Recurrent policies: acting step by step and learning on sequences, and their weights."""

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from helpers.factories import assert_close, assert_equal, make
from helpers.short_envs import ShortEnv
from helpers.workers import make_worker
from tfpolicies import PPOTF2Policy
from tfpolicies.errors import UsageError, WeightsError
from tfpolicies.policy.policy_checkpoints import write_policy_checkpoint

pytestmark = pytest.mark.usefixtures("kept_programs")

LSTM = {"use_lstm": True, "lstm_cell_size": 6, "fcnet_hiddens": [5], "max_seq_len": 4}
MODELS = {
    "lstm": LSTM,
    "lstm with previous": {**LSTM, "lstm_use_prev_action": True, "lstm_use_prev_reward": True},
    "gru": {**LSTM, "use_lstm": False, "use_gru": True},
    "attention": {
        "use_attention": True,
        "attention_dim": 8,
        "attention_head_dim": 4,
        "attention_memory_inference": 3,
        "fcnet_hiddens": [5],
        "max_seq_len": 4,
    },
}
EVERY_MODEL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


class Waves(ShortEnv):
    """Episodes of 5, 6, 7, 5, ... steps; rewards and observations that vary."""

    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-2, 2, (2,), np.float32)])
    episode = -1

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.length, self.terminates = 5 + self.episode % 3, self.episode % 2 == 0
        return super().reset(seed=seed)

    def observe(self):
        return np.sin([self.t + self.episode, 2.0 * self.t]).astype(np.float32)

    def pay(self, action):
        assert self.action_space.contains(action)
        return 0.1 * self.t


def vary(policy):
    return factories.varied(policy, 3)


def make_wave_worker(model, **settings):
    settings = {"num_envs_per_worker": 2, "rollout_fragment_length": 9, "seed": 2, **settings}
    worker = make_worker(Waves, model=model, **settings)
    vary(worker.get_policy())
    return worker


@EVERY_MODEL
def test_learning_sees_the_distributions_that_acted(model):
    worker = make_wave_worker(model)
    worker.sample()
    batch = worker.sample()  # begins within episodes, with their memory
    _, info = worker.get_policy().compute_gradients(batch)
    stats = info["learner_stats"]
    assert stats["kl"] == pytest.approx(0.0, abs=1e-6)
    assert stats["policy_loss"] == pytest.approx(-np.mean(batch["advantages"]), abs=1e-5)


@EVERY_MODEL
def test_values_bootstrap_with_the_memory_after_the_last_step(model):
    worker = make_wave_worker(model, num_envs_per_worker=1)
    first, following = worker.sample(), worker.sample()
    bootstrapped, terminateds = first["values_bootstrapped"], first["terminateds"]
    assert not (terminateds | first["truncateds"])[-1]  # the fragment ends within an episode
    assert bootstrapped[-1] == pytest.approx(following["vf_preds"][0], abs=1e-5)
    assert (bootstrapped[terminateds] == 0).all()
    assert all(bootstrapped[first["truncateds"] & ~terminateds] != 0)
    assert worker.get_policy().is_recurrent()


def test_a_batch_has_whole_sequences_with_the_memory_at_their_beginning():
    worker = make_wave_worker(MODELS["lstm with previous"], num_envs_per_worker=1)
    batch = worker.sample()
    assert batch["seq_lens"].tolist() == [4, 1, 4]  # episodes of 5 and at least 4 steps
    assert batch["state_in_0"].shape == (3, 6)
    assert not batch["state_in_0"][[0, 2]].any()
    assert batch["state_in_0"][1].any()
    assert "state_out_0" not in batch
    rewards = batch["rewards"]
    np.testing.assert_allclose(batch["prev_rewards"][1:5], rewards[:4])
    assert batch["prev_rewards"][[0, 5]].tolist() == [0.0, 0.0]
    discrete, box = batch["actions"]
    np.testing.assert_array_equal(batch["prev_actions"][0][1:5], discrete[:4])
    np.testing.assert_array_equal(batch["prev_actions"][1][6:], box[5:-1])


@EVERY_MODEL
def test_a_session_carries_the_recurrent_state(model):
    policy = vary(make(obs=spaces.Box(-2, 2, (2,)), model=model))
    observations = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)
    session, expected = policy.session(), []
    state, action, reward = policy.get_initial_state(), 0, 0.0
    for obs in observations:
        action, state, _ = policy.compute_single_action(
            obs, state, prev_action=action, prev_reward=reward, explore=False
        )
        expected.append(action)
        reward = 0.5
    rewards = [0.0] + [0.5] * 6
    actions = [session.act(o, r, explore=False) for o, r in zip(observations, rewards, strict=True)]
    assert actions == expected
    session.reset()
    assert session.act(observations[0], 0.0, explore=False) == expected[0]


def test_acting_without_the_recurrent_state_is_refused_with_the_right_call():
    policy = make(model=LSTM)
    with pytest.raises(UsageError, match=r"session\.act\(obs\)"):
        policy.compute_single_action(np.zeros(3, np.float32))
    with pytest.raises(UsageError, match=r"state_batches\[1\] must have the shape \[1, 6\]"):
        policy.compute_single_action(np.zeros(3, np.float32), [np.zeros(6), np.zeros(5)])
    previous = make(model=MODELS["lstm with previous"])
    with pytest.raises(UsageError, match="prev_action"):
        previous.compute_single_action(np.zeros(3, np.float32), previous.get_initial_state())


def make_like_worker(model=LSTM, **config):
    return make(obs=Waves.observation_space, actions=Waves.action_space, model=model, **config)


@pytest.mark.soak
def test_sequences_learn_alike_with_and_without_xla():
    batch = make_wave_worker(LSTM).sample()
    policies = [make_like_worker(jit_compile=jit_compile) for jit_compile in (True, False)]
    results = [vary(policy).learn_epochs(batch, 2, 8) for policy in policies]
    counts = [result["num_agent_steps_trained"] for result in results]
    assert counts == [batch.count] * 2 == [18] * 2
    assert_close(*(policy.get_weights() for policy in policies), atol=1e-5)


def test_padding_of_short_sequences_changes_no_gradients():
    worker = make_wave_worker(LSTM)
    policy, batch = worker.get_policy(), worker.sample()
    gradients, _ = policy.compute_gradients(batch)
    longer = make_like_worker({**LSTM, "max_seq_len": 9})
    longer.set_weights(policy.get_weights())
    same, _ = longer.compute_gradients(batch)  # the same sequences, padded to 9 steps
    for one, two in zip(gradients, same, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


def get_all_variables(policy):
    """Returns all variables of the model, as older weights had them: with unused seeds."""
    slots = policy.program.layout.get_slots("model")
    return {slot.key: policy.driver.acting.state.arrays[slot.key] for slot in slots}


def keras_model(**dropout):
    def make_model(observation_space, num_outputs):
        inputs = keras.Input((4, 3))
        x = keras.layers.LSTM(4, **dropout)(inputs)
        x = keras.layers.RNN(keras.layers.GRUCell(4))(keras.layers.Reshape((2, 2))(x))
        return keras.Model(inputs, keras.layers.Dense(num_outputs)(x))

    return {"custom_model": make_model}


@pytest.mark.core
@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("inference", ["tf", "session"])
def test_weights_are_floats_where_nothing_is_dropped(name, inference):
    policy = make(model={**MODELS[name], "vf_share_layers": True}, inference=inference)
    weights = policy.get_weights()
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    gates, biases = {"lstm": (24, (24,)), "gru": (18, (2, 18))}[name]
    shapes = [(3, 5), (5,), (5, gates), (6, gates), biases, (6, 2), (2,), (6, 1), (1,)]
    assert [array.shape for array in weights.values()] == shapes
    assert policy.get_state()["weights"].keys() == weights.keys()
    # The keys are those of older weights, which had a seed as "layer_2".
    assert [*weights][5:] == [f"layer_{i}/{role}" for i in (3, 4) for role in ("kernel", "bias")]
    everything = get_all_variables(policy)
    assert everything.keys() - weights.keys() == {"layer_2/seed_generator_state"}
    other = make(model=policy.config["model"], inference=inference, seed=9)
    for values in (everything, weights, [*everything.values()], [*weights.values()]):
        other.set_weights([np.zeros_like(array) for array in weights.values()])
        other.set_weights(values)
        assert_equal(other.get_weights(), weights)
    with pytest.raises(WeightsError, match="weights has 8 arrays, but this policy has 9"):
        other.set_weights([*weights.values()][:-1])
    with pytest.raises(WeightsError, match="must be a dict or a list"):
        other.set_weights(3)
    copy = policy.to_keras()
    first = copy.get_layer(name).weights[0].numpy()
    np.testing.assert_array_equal(first, weights["layer_1/kernel"])


@pytest.mark.parametrize(
    ("dropout", "seeds"), [({}, 0), ({"dropout": 0.5}, 1), ({"recurrent_dropout": 0.5}, 1)]
)
def test_seeds_of_keras_layers_are_weights_where_they_are_read(dropout, seeds):
    policy = make(obs=spaces.Box(-1, 1, (4, 3)), model=keras_model(**dropout))
    results = [key for key, x in policy.get_weights().items() if x.dtype == np.int64]
    assert len(results) == seeds
    assert len([key for key in get_all_variables(policy) if "seed" in key]) == 2


def test_a_checkpoint_with_the_seed_of_an_lstm_that_drops_nothing_is_loaded(tmp_path):
    policy = vary(make(model=MODELS["lstm"]))
    state = {**policy.get_state(), "weights": get_all_variables(policy)}
    write_policy_checkpoint(policy, tmp_path / "old", state)
    policy.export_checkpoint(tmp_path / "new")
    old, new = (PPOTF2Policy.from_checkpoint(tmp_path / name) for name in ("old", "new"))
    for restored in (old, new, PPOTF2Policy.from_state(state)):
        assert_equal(restored.get_weights(), policy.get_weights())
    assert_equal(get_all_variables(old), get_all_variables(policy))
