"""Policies with a memory: acting step by step and learning on sequences are one function."""

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers import factories
from tfpolicies import PPOConfig, PPOTF2Policy, RolloutWorker
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


class Short(gym.Env):
    """Episodes of 5, 6, 7, 5, ... steps; rewards and observations that vary."""

    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-2, 2, (2,), np.float32)])

    def __init__(self, config=None):
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.step_count = 0
        return self._obs(), {}

    def _obs(self):
        return np.sin([self.step_count + self.episode, 2.0 * self.step_count]).astype(np.float32)

    def step(self, action):
        assert self.action_space.contains(action)
        self.step_count += 1
        over = self.step_count >= 5 + self.episode % 3
        return self._obs(), 0.1 * self.step_count, over and self.episode % 2 == 0, over, {}


def varied(policy, seed=3):
    rng = np.random.default_rng(seed)
    new = {
        key: w + 0.4 * rng.normal(size=w.shape) if w.dtype.kind == "f" else w
        for key, w in policy.get_weights().items()
    }
    policy.set_weights(new)
    return policy


def worker_of(model, **rollouts):
    config = PPOConfig().environment(Short).training(model=model).debugging(seed=2)
    config.framework(jit_compile=False, inference="tf")
    config.rollouts(**{"num_envs_per_worker": 2, "rollout_fragment_length": 9, **rollouts})
    worker = RolloutWorker(config=config, default_policy_class=PPOTF2Policy)
    varied(worker.get_policy())
    return worker


@EVERY_MODEL
def test_learning_sees_the_distributions_that_acted(model):
    worker = worker_of(model)
    worker.sample()
    batch = worker.sample()  # begins within episodes, with their memory
    _, info = worker.get_policy().compute_gradients(batch)
    stats = info["learner_stats"]
    assert stats["kl"] == pytest.approx(0.0, abs=1e-6)
    assert stats["policy_loss"] == pytest.approx(-np.mean(batch["advantages"]), abs=1e-5)


@EVERY_MODEL
def test_values_bootstrap_with_the_memory_after_the_last_step(model):
    worker = worker_of(model, num_envs_per_worker=1)
    policy = worker.get_policy()
    first = worker.sample()
    following = worker.sample()
    cut = ~(first["terminateds"] | first["truncateds"])[-1]
    assert cut  # the fragment ends within an episode
    assert first["values_bootstrapped"][-1] == pytest.approx(following["vf_preds"][0], abs=1e-5)
    truncated = np.flatnonzero(first["truncateds"] & ~first["terminateds"])
    terminated = np.flatnonzero(first["terminateds"])
    assert (first["values_bootstrapped"][terminated] == 0).all()
    assert all(first["values_bootstrapped"][truncated] != 0)
    assert policy.is_recurrent()


def test_a_batch_has_whole_sequences_with_the_memory_at_their_beginning():
    worker = worker_of(MODELS["lstm with previous"], num_envs_per_worker=1)
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
def test_a_session_is_the_same_as_carrying_the_memory_by_hand(model):
    policy = varied(factories.make(obs=spaces.Box(-2, 2, (2,)), model=model))
    observations = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)
    session, by_hand = policy.session(), []
    state, action, reward = policy.get_initial_state(), 0, 0.0
    for obs in observations:
        action, state, _ = policy.compute_single_action(
            obs, state, prev_action=action, prev_reward=reward, explore=False
        )
        by_hand.append(action)
        reward = 0.5
    rewards = [0.0] + [0.5] * 6
    acted = [session.act(o, r, explore=False) for o, r in zip(observations, rewards, strict=True)]
    assert acted == by_hand
    session.reset()
    assert session.act(observations[0], 0.0, explore=False) == by_hand[0]


def test_acting_without_the_memory_shows_the_right_call():
    policy = factories.make(model=LSTM)
    with pytest.raises(UsageError, match=r"session\.act\(obs\)"):
        policy.compute_single_action(np.zeros(3, np.float32))
    with pytest.raises(UsageError, match=r"state_batches\[1\] must have the shape \[1, 6\]"):
        policy.compute_single_action(np.zeros(3, np.float32), [np.zeros(6), np.zeros(5)])
    previous = factories.make(model=MODELS["lstm with previous"])
    with pytest.raises(UsageError, match="prev_action"):
        previous.compute_single_action(np.zeros(3, np.float32), previous.get_initial_state())


@pytest.mark.soak
def test_sequences_learn_alike_with_and_without_xla():
    batch = worker_of(MODELS["lstm"]).sample()
    results = []
    for jit in (True, False):
        policy = worker_of(MODELS["lstm"]).get_policy()
        policy = PPOTF2Policy(
            policy.observation_space,
            policy.action_space,
            {"model": MODELS["lstm"], "jit_compile": jit, "lr": 0.01, "seed": 2},
        )
        varied(policy)
        result = policy.learn_epochs(batch, 2, 8)
        results.append((policy.get_weights(), result))
    (compiled, one), (plain, two) = results
    assert one["num_agent_steps_trained"] == two["num_agent_steps_trained"] == batch.count == 18
    for key, weights in compiled.items():
        np.testing.assert_allclose(weights, plain[key], atol=1e-5)


def test_what_fills_up_short_sequences_changes_nothing():
    worker = worker_of(MODELS["lstm"])
    policy, batch = worker.get_policy(), worker.sample()
    gradients, _ = policy.compute_gradients(batch)
    longer = PPOTF2Policy(
        policy.observation_space,
        policy.action_space,
        {"model": {**MODELS["lstm"], "max_seq_len": 9}, "jit_compile": False, "seed": 2},
    )
    longer.set_weights(policy.get_weights())
    again, _ = longer.compute_gradients(batch)  # the same sequences, padded to 9 steps
    for one, two in zip(gradients, again, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


# -- weights ----------------------------------------------------------------------------------


def every_variable(policy):
    """The variables of the model as `get_weights` told them once: with seeds that nobody reads."""
    return {
        slot.key: policy._state.arrays[slot.key]
        for slot in policy.program.layout.get_slots("model")
    }


def keras_model(**dropout):
    def make(observation_space, num_outputs):
        inputs = keras.Input((4, 3))
        x = keras.layers.LSTM(4, **dropout)(inputs)
        x = keras.layers.RNN(keras.layers.GRUCell(4))(keras.layers.Reshape((2, 2))(x))
        return keras.Model(inputs, keras.layers.Dense(num_outputs)(x))

    return {"custom_model": make}


@pytest.mark.core
@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("inference", ["tf", "session"])
def test_weights_are_floats_where_nothing_is_dropped(name, inference):
    policy = factories.make(model={**MODELS[name], "vf_share_layers": True}, inference=inference)
    weights = policy.get_weights()
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    gates, biases = {"lstm": (24, (24,)), "gru": (18, (2, 18))}[name]
    shapes = [(3, 5), (5,), (5, gates), (6, gates), biases, (6, 2), (2,), (6, 1), (1,)]
    assert [array.shape for array in weights.values()] == shapes
    assert policy.get_state()["weights"].keys() == weights.keys()
    # The keys are those of older weights, which had a seed as "layer_2".
    assert [*weights][5:] == [f"layer_{i}/{role}" for i in (3, 4) for role in ("kernel", "bias")]
    everything = every_variable(policy)
    assert everything.keys() - weights.keys() == {"layer_2/seed_generator_state"}
    twin = factories.make(
        model={**MODELS[name], "vf_share_layers": True}, inference=inference, seed=9
    )
    for values in (everything, weights, [*everything.values()], [*weights.values()]):
        twin.set_weights([np.zeros_like(array) for array in weights.values()])
        twin.set_weights(values)
        for key, array in weights.items():
            np.testing.assert_array_equal(twin.get_weights()[key], array)
    with pytest.raises(WeightsError, match="weights has 8 arrays, but this policy has 9"):
        twin.set_weights([*weights.values()][:-1])
    with pytest.raises(WeightsError, match="must be a dict or a list"):
        twin.set_weights(3)
    copy = policy.to_keras()
    first = copy.get_layer(name).weights[0].numpy()
    np.testing.assert_array_equal(first, weights["layer_1/kernel"])


@pytest.mark.parametrize(
    ("dropout", "seeds"), [({}, 0), ({"dropout": 0.5}, 1), ({"recurrent_dropout": 0.5}, 1)]
)
def test_seeds_of_keras_layers_are_weights_where_they_are_read(dropout, seeds):
    made = factories.make(obs=spaces.Box(-1, 1, (4, 3)), model=keras_model(**dropout))
    results = [key for key, x in made.get_weights().items() if x.dtype == np.int64]
    assert len(results) == seeds
    assert len([key for key in every_variable(made) if "seed" in key]) == 2


def test_a_checkpoint_with_the_seed_of_an_lstm_that_drops_nothing_is_loaded(tmp_path):
    policy = varied(factories.make(model=MODELS["lstm"]))
    state = {**policy.get_state(), "weights": every_variable(policy)}
    write_policy_checkpoint(policy, tmp_path / "old", state)
    policy.export_checkpoint(tmp_path / "new")
    old, new = (PPOTF2Policy.from_checkpoint(tmp_path / name) for name in ("old", "new"))
    for twin in (old, new, PPOTF2Policy.from_state(state)):
        assert twin.get_weights().keys() == policy.get_weights().keys()
        for key, array in policy.get_weights().items():
            np.testing.assert_array_equal(twin.get_weights()[key], array)
    np.testing.assert_array_equal(
        every_variable(old)["layer_2/seed_generator_state"],
        every_variable(policy)["layer_2/seed_generator_state"],
    )
