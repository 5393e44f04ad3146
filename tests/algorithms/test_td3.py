"""TD3 and DDPG: losses by NumPy, noise, delays, targets, actions, layers, refusals."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.actor_critic_references import TD3Reference, get_actor_weights
from helpers.continuous_actions import mlp, shaken, transitions
from helpers.factories import OBS, assert_close, assert_equal, rows_of
from helpers.marks import telling
from helpers.off_policy import make_td3, replay
from tfpolicies import (
    DDPGConfig,
    DDPGTF1Policy,
    DDPGTF2Policy,
    TD3Config,
    TD3TF1Policy,
    TD3TF2Policy,
)
from tfpolicies.errors import ConfigError

pytestmark = pytest.mark.usefixtures("kept_programs")

HUNDRED = np.float32(100.0)


# -- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "settings"),
    telling(
        [
            (TD3TF2Policy, {}),
            (TD3TF1Policy, {"target_noise_clip": 0.1, "use_huber": True}),
            (TD3TF2Policy, {"use_huber": True, "huber_threshold": 0.5, "l2_reg": 0.1}),
            (DDPGTF2Policy, {"l2_reg": 0.2}),
            (DDPGTF1Policy, {}),
        ],
        (TD3TF2Policy, {}),
    ),
)
def test_losses_and_statistics_are_those_of_the_papers(cls, settings):
    policy = shaken(make_td3(cls=cls, gamma=0.9, target_noise=0.4, **settings))
    batch = transitions(policy, 30)
    is_smooth = policy.config["smooth_target_policy"]
    assert is_smooth == policy.config["twin_q"] == (policy.config["policy_delay"] == 2)
    reference = TD3Reference(policy, batch)
    actor, critic = reference.get_losses()
    assert reference.q.shape == (30, 2 if is_smooth else 1)
    errors = reference.errors[:, 0]
    result = policy.learn_on_batch(batch)
    expected = {
        "actor_loss": actor,
        "critic_loss": critic,
        "mean_q": reference.q[:, 0].mean(),
        "min_q": reference.q[:, 0].min(),
        "max_q": reference.q[:, 0].max(),
        "mean_td_error": errors.mean(),
        **dict.fromkeys(("cur_actor_lr", "cur_critic_lr"), 1e-3),
    }
    assert result["learner_stats"] == pytest.approx(expected, rel=2e-4, abs=2e-4)
    np.testing.assert_allclose(result["td_error"], errors, rtol=1e-3, atol=1e-3)


def test_noise_of_targets_is_clipped_and_so_are_their_actions():
    """With a linear critic Q = 2 a, whose actor gives tanh(0.1) everywhere."""
    settings = {"critic_hiddens": [], "actor_hiddens": [], "twin_q": False, "gamma": 1.0}
    line = spaces.Box(-5, 5, (1,))
    policy = make_td3(actions=line, target_noise=1e4, actor_lr=0.0, critic_lr=0.0, **settings)
    policy.set_weights({
        "layer_0/kernel": np.zeros((3, 1)),
        "layer_0/bias": np.array([0.1]),
        "critic/layer_0/kernel": np.array([[0.0], [0.0], [0.0], [2.0]]),
        "critic/layer_0/bias": np.zeros(1),
    })  # fmt: skip
    batch = transitions(policy, 8)
    batch["rewards"], batch["terminateds"] = np.zeros(8, np.float32), np.zeros(8, bool)
    batch["actions"] = np.zeros((8, 1), np.float32)
    signs = np.sign(TD3Reference(policy, batch).noise[:, 0])
    assert {*signs} == {-1, 1}
    errors = policy.learn_on_batch(batch)["td_error"]
    np.testing.assert_allclose(errors, -2 * (np.tanh(0.1) + 0.5 * signs), rtol=1e-5)
    policy.set_hyperparameter("target_noise_clip", 3.0)  # beyond the bounds
    signs = np.sign(TD3Reference(policy, batch).noise[:, 0])
    np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], -2 * signs, rtol=1e-5)


# -- delays and targets ---------------------------------------------------------------------------


PARTS = {
    "actor": ("weights", "layer"),
    "critic": ("weights", "critic/"),
    "actor target": ("target_weights", "target/"),
    "critic target": ("target_weights", "critic_target/"),
}


def find_moved(before, after):
    """Returns whether actor, critics and their targets moved between two states."""
    result = {}
    for name, (part, prefix) in PARTS.items():
        keys = [key for key in before[part] if key.startswith(prefix)]
        result[name] = any((after[part][key] != before[part][key]).any() for key in keys)
    return result


@pytest.mark.parametrize("order", ["together", "critics_first"])
def test_actor_and_targets_move_once_in_policy_delay_updates_in_both_modes(order):
    policy, other = (
        shaken(make_td3(cls=cls, update_order=order)) for cls in (TD3TF2Policy, TD3TF1Policy)
    )
    states = [policy.get_state()]
    for seed in range(5):
        for each in (policy, other):
            replay(each, transitions(each, seed=seed))
        states.append(policy.get_state())
        for part in ("weights", "target_weights"):
            assert_close(states[-1][part], other.get_state()[part], 1e-5)
    results = [find_moved(*pair) for pair in itertools.pairwise(states)]
    assert [x["critic"] for x in results] == [True] * 5
    for name in ("actor", "actor target", "critic target"):
        assert [x[name] for x in results] == [True, False, True, False, True], name
    slots = states[-1]["_optimizer_variables"]
    assert (slots["optimizer/000_iteration"], slots["critic_optimizer/000_iteration"]) == (3, 5)


class SumsGradients(TD3TF2Policy):
    """Has the sum of the actor's gradients and that of the critics' in its statistics."""

    def grad_stats_fn(self, train_batch, grads):
        totals = [tf.add_n([tf.reduce_sum(tf.abs(x)) for x in each]) for each in grads]
        return dict(zip(("actor", "critic"), totals, strict=True))


@pytest.mark.parametrize("jit", [False, True])
def test_the_actor_is_not_differentiated_where_it_does_not_move(jit):
    policy = shaken(make_td3(cls=SumsGradients, jit_compile=jit))
    batches = [transitions(policy, seed=seed) for seed in range(3)]
    results = [replay(policy, batch)["learner_stats"] for batch in batches]
    assert [stats["actor"] > 0 for stats in results] == [True, False, True]
    assert all(stats["critic"] > 0 for stats in results)


def test_targets_follow_by_tau_where_they_are_due_and_the_actor_moves():
    policy = shaken(make_td3(tau=0.25, actor_lr=0.1, critic_lr=0.1))
    before = policy.get_state()["target_weights"]
    for due in (False, True):  # the actor takes the first of these, not the second
        replay(policy, transitions(policy), moves_targets=due)
        assert_equal(policy.get_state()["target_weights"], before)
    replay(policy, transitions(policy))
    state = policy.get_state()
    follows = zip(state["weights"].values(), before.items(), strict=True)
    expected = {key: 0.25 * new + 0.75 * old for new, (key, old) in follows}
    assert_close(state["target_weights"], expected, 1e-6)
    policy.update_target(1.0)
    state = policy.get_state()
    sources = state["weights"].values()
    for target, source in zip(state["target_weights"].values(), sources, strict=True):
        np.testing.assert_array_equal(target, source)


# -- settings -------------------------------------------------------------------------------------


SHARED = {
    "actor_hiddens": [400, 300],
    "actor_hidden_activation": "relu",
    "critic_hiddens": [400, 300],
    "critic_hidden_activation": "relu",
    "lr": 1e-3,  # of both networks: RLlib's actor_lr and critic_lr
    "actor_lr": None,
    "critic_lr": None,
    "use_huber": False,
    "huber_threshold": 1.0,
    "use_state_preprocessor": False,
    "target_noise": 0.2,
    "target_noise_clip": 0.5,
    "n_step": 1,
    "grad_clip": None,
    "target_network_update_freq": 0,
    "training_intensity": None,
    "rollout_fragment_length": "auto",
    "min_sample_timesteps_per_iteration": 1000,
}
DIFFERENT = (
    "twin_q",
    "policy_delay",
    "smooth_target_policy",
    "l2_reg",
    "tau",
    "train_batch_size",
    "num_steps_sampled_before_learning_starts",
)


@pytest.mark.core
def test_the_defaults_are_those_of_rllibs_contributed_packages():
    for config, capacity, *values in (
        (TD3Config(), 1_000_000, True, 2, True, 0.0, 5e-3, 100, 10_000),
        (DDPGConfig(), 50_000, False, 1, False, 1e-6, 2e-3, 256, 1500),
    ):
        expected = {**SHARED, **dict(zip(DIFFERENT, values, strict=True))}
        assert {name: config[name] for name in expected} == expected
        assert config.replay_buffer_config["capacity"] == capacity
    assert TD3Config().exploration_config == {
        "type": "GaussianNoise",
        "random_timesteps": 10_000,
        "stddev": 0.1,
        "initial_scale": 1.0,
        "final_scale": 1.0,
        "scale_timesteps": 1,
    }
    assert DDPGConfig().exploration_config == {
        "type": "OrnsteinUhlenbeckNoise",
        "random_timesteps": 1000,
        "ou_base_scale": 0.1,
        "ou_theta": 0.15,
        "ou_sigma": 0.2,
        "initial_scale": 1.0,
        "final_scale": 0.02,
        "scale_timesteps": 10_000,
    }
    assert TD3Config().training(l2_reg=None).l2_reg == 0.0


def test_targets_that_move_with_the_actor_have_no_other_pace():
    config = TD3Config().training(target_network_update_freq=100)
    message = "target_network_update_freq must be 0 with policy_delay=2, got 100"
    with pytest.raises(ConfigError, match=message):
        config.validate()
    config.training(policy_delay=1).validate()
    DDPGConfig().training(target_network_update_freq=100).validate()


# -- acting ------------------------------------------------------------------------------------


def test_greedy_actions_are_those_of_the_network():
    policy = shaken(make_td3(actions=spaces.Box(-100, 100, (2,))))
    obs = rows_of(OBS, 9)
    expected = np.tanh(mlp(get_actor_weights(policy.get_weights()), obs))
    np.testing.assert_allclose(policy.compute_actions(obs, explore=False)[0], expected, atol=1e-6)
    policy.on_global_var_update({"timestep": 20_000})
    noisy = policy.compute_actions(np.repeat(obs, 200, 0)).actions.reshape(9, 200, 2)
    inside = np.abs(expected) < 0.6  # where six deviations are in the bounds
    assert inside.any()
    assert noisy.std(1)[inside] == pytest.approx(0.1, rel=0.25)


def test_without_normalised_actions_they_are_in_the_bounds_of_the_box():
    box = spaces.Box(np.array([-1, 0, 2], np.float32), np.array([3, 8, 2.5], np.float32))
    policy = shaken(make_td3(actions=box, normalize_actions=False))
    obs = HUNDRED * rows_of(OBS, 200)
    actions = policy.compute_actions(obs, explore=False).actions
    tanh = np.tanh(mlp(get_actor_weights(policy.get_weights()), obs))
    expected = tanh * [2, 4, 0.25] + [1, 4, 2.25]
    np.testing.assert_allclose(actions, expected, atol=1e-4)
    assert all(action in box for action in actions)
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)


# -- models ---------------------------------------------------------------------------------------


def test_hidden_layers_are_those_named_and_a_preprocessor_adds_those_of_the_model():
    shapes = [w.shape for w in get_actor_weights(make_td3(actor_hiddens=[7, 6]).get_weights())]
    assert shapes == [(3, 7), (7,), (7, 6), (6,), (6, 2), (2,)]
    policy = make_td3(use_state_preprocessor=True, model={"fcnet_hiddens": [8]})
    weights = policy.get_weights()
    assert [w.shape for w in get_actor_weights(weights)][::2] == [(3, 8), (8, 4), (4, 2)]
    critic = [w for k, w in weights.items() if k.startswith("critic/") and "#" not in k]
    assert [w.shape for w in critic][::2] == [(5, 8), (8, 5), (5, 1)]


def test_a_custom_actor_is_brought_into_the_bounds():
    actor = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    policy = shaken(make_td3(model={"custom_model": actor}))
    obs = HUNDRED * rows_of(OBS, 50)
    assert np.abs(policy.compute_actions(obs, explore=False).actions).max() == 1
