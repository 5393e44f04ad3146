"""TD3 and DDPG: losses and gradients by NumPy, delays, targets, runtimes, exports, refusals."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from helpers.continuous_actions import (
    assert_updates_agree,
    measure_weight_files,
    mlp,
    shaken,
    transitions,
)
from helpers.factories import OBS, PLANE, TWO, assert_close, assert_equal, make, rows_of, trajectory
from helpers.marks import telling
from tfpolicies import (
    DDPGConfig,
    DDPGTF1Policy,
    DDPGTF2Policy,
    SampleBatch,
    TD3Config,
    TD3TF1Policy,
    TD3TF2Policy,
)
from tfpolicies.errors import ConfigError, UnsupportedSpaceError
from tfpolicies.testing import check_policy

pytestmark = pytest.mark.usefixtures("kept_programs")

HUNDRED = np.float32(100.0)


def td3(obs=OBS, actions=PLANE, cls=TD3TF2Policy, **config):
    return make(cls, obs, actions, **{"actor_hiddens": [4], "critic_hiddens": [5], **config})


def actor_of(weights, prefix=""):
    """Returns the weights of the actor, or with "target/" of its target, out of all."""
    return [w for key, w in weights.items() if key.startswith(f"{prefix}layer")]


# -- the reference, in float64 --------------------------------------------------------------------


class Reference:
    """TD3's losses of a policy's weights, as the paper has them, for actions in [-1, 1]."""

    def __init__(self, policy, batch, noise=None, weights=None):
        state = policy.get_state()
        self.weights = {k: np.float64(w) for k, w in (weights or state["weights"]).items()}
        self.followers = {k: np.float64(w) for k, w in state["target_weights"].items()}
        self.config, self.noise = policy.config, 0.0 if noise is None else np.float64(noise)
        self.batch = {k: np.asarray(v, np.float64) for k, v in batch.items()}

    def values(self, weights, prefix, obs, actions):
        """Returns the value of each critic, `[B, n]`."""
        mine = [(k, w) for k, w in weights.items() if k.startswith(prefix)]
        ways = [[w for k, w in mine if "#" not in k], [w for k, w in mine if "#" in k]]
        x = np.concatenate([obs, actions], axis=-1)
        return np.concatenate([mlp(each, x) for each in ways if each], axis=-1)

    def targets(self, gamma=None):
        reached, config = self.batch["new_obs"], self.config
        limit = config["target_noise_clip"]
        disturbed = np.clip(config["target_noise"] * self.noise, -limit, limit)
        actions = np.tanh(mlp(actor_of(self.followers, "target/"), reached)) + disturbed
        after = self.values(self.followers, "critic_target/", reached, np.clip(actions, -1, 1))
        gamma = config["gamma"] if gamma is None else gamma
        goes_on = gamma * (1 - self.batch["terminateds"])
        return self.batch["rewards"] + goes_on * after.min(-1)

    def losses(self, targets):
        """Returns those of actor and critics."""
        batch, config = self.batch, self.config
        self.q = self.values(self.weights, "critic/", batch["obs"], batch["actions"])
        self.errors = self.q - targets[:, None]
        each = 0.5 * self.errors**2
        if config["use_huber"]:
            t, size = config["huber_threshold"], np.abs(self.errors)
            each = np.where(size <= t, each, t * (size - 0.5 * t))
        chosen = np.tanh(mlp(actor_of(self.weights), batch["obs"]))
        actor = -self.values(self.weights, "critic/", batch["obs"], chosen)[:, 0].mean()
        critic = (batch["weights"][:, None] * each).mean(0).sum()
        return np.array([actor + self.decay(""), critic + self.decay("critic/")])

    def decay(self, prefix):
        kernels = [w for k, w in self.weights.items() if k.startswith(f"{prefix}layer")]
        return 0.5 * self.config["l2_reg"] * sum((w**2).sum() for w in kernels if w.ndim > 1)


def next_noise(policy, rows):
    """Returns the noise that the next update of a policy draws."""
    twin = np.random.default_rng()
    twin.bit_generator.state = policy.get_state()["learning_rng"]
    return twin.standard_normal((rows, policy.action_space.shape[0]), np.float32)


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
    policy = shaken(td3(cls=cls, gamma=0.9, target_noise=0.4, **settings))
    batch = transitions(policy, 30)
    is_smooth = policy.config["smooth_target_policy"]
    assert is_smooth == policy.config["twin_q"] == (policy.config["policy_delay"] == 2)
    reference = Reference(policy, batch, next_noise(policy, 30) if is_smooth else None)
    actor, critic = reference.losses(reference.targets())
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


@pytest.mark.parametrize(("cls", "jit"), [(TD3TF2Policy, True), (DDPGTF1Policy, False)])
def test_with_critics_first_the_actor_learns_from_what_they_became(cls, jit):
    config = {"gamma": 0.9, "lr": 0.1, "jit_compile": jit, "l2_reg": 0.1}
    policy = shaken(td3(cls=cls, update_order="critics_first", **config))
    twin = shaken(td3(cls=cls, **config))
    batch, before = transitions(policy, 30), policy.get_weights()
    result, other = (each.learn_on_batch(batch)["learner_stats"] for each in (policy, twin))
    after, plain = policy.get_weights(), twin.get_weights()
    critics = {key: w for key, w in after.items() if key.startswith("critic/")}
    assert_close(critics, {key: plain[key] for key in critics}, 1e-6)
    reference = Reference(policy, batch, weights={**before, **critics})
    actor_loss, _ = reference.losses(np.zeros(30))
    assert result["actor_loss"] == pytest.approx(actor_loss, rel=2e-4, abs=2e-4)
    assert abs(result["actor_loss"] - other["actor_loss"]) > 0.002

    twin = shaken(td3(cls=cls, **config))  # steps from what the critics became
    twin.set_weights({**before, **critics})
    twin.learn_on_batch(batch)
    actor = [key for key in before if key not in critics]
    assert_close({k: after[k] for k in actor}, {k: twin.get_weights()[k] for k in actor}, 1e-5)


@pytest.mark.parametrize("settings", [{}, {"use_huber": True, "twin_q": False, "l2_reg": 0.1}])
def test_each_gradient_is_that_of_its_own_loss_alone_by_finite_differences(settings):
    policy = shaken(td3(gamma=0.9, **settings))
    batch, noise = transitions(policy, 12), next_noise(policy, 12)
    gradients, _ = policy.compute_gradients(batch)
    weights = {k: np.float64(w) for k, w in policy.get_weights().items()}
    targets = Reference(policy, batch, noise).targets()  # no gradient goes through them
    step, compared = 1e-5, 0
    for (key, value), gradient in zip(weights.items(), gradients, strict=True):
        for at in list(np.ndindex(*value.shape))[:7]:
            results = []
            for sign in (1, -1):
                moved = {**weights, key: np.array(value)}
                moved[key][at] += sign * step
                losses = Reference(policy, batch, noise, moved).losses(targets)
                results.append(losses[int(key.startswith("critic/"))])
            difference = (results[0] - results[1]) / (2 * step)
            assert gradient[at] == pytest.approx(difference, rel=2e-3, abs=2e-4), (key, at)
            compared += 1
    assert compared > 30


def test_noise_of_targets_is_clipped_and_so_are_their_actions():
    """With a linear critic Q = 2 a, whose actor gives tanh(0.1) everywhere."""
    settings = {"critic_hiddens": [], "actor_hiddens": [], "twin_q": False, "gamma": 1.0}
    line = spaces.Box(-5, 5, (1,))
    policy = td3(actions=line, target_noise=1e4, actor_lr=0.0, critic_lr=0.0, **settings)
    policy.set_weights({
        "layer_0/kernel": np.zeros((3, 1)),
        "layer_0/bias": np.array([0.1]),
        "critic/layer_0/kernel": np.array([[0.0], [0.0], [0.0], [2.0]]),
        "critic/layer_0/bias": np.zeros(1),
    })  # fmt: skip
    batch = transitions(policy, 8)
    batch["rewards"], batch["terminateds"] = np.zeros(8, np.float32), np.zeros(8, bool)
    batch["actions"] = np.zeros((8, 1), np.float32)
    signs = np.sign(next_noise(policy, 8)[:, 0])
    assert {*signs} == {-1, 1}
    errors = policy.learn_on_batch(batch)["td_error"]
    np.testing.assert_allclose(errors, -2 * (np.tanh(0.1) + 0.5 * signs), rtol=1e-5)
    policy.set_hyperparameter("target_noise_clip", 3.0)  # beyond the bounds
    signs = np.sign(next_noise(policy, 8)[:, 0])
    np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], -2 * signs, rtol=1e-5)


def test_a_row_that_terminated_is_worth_its_reward_and_a_truncated_one_goes_on():
    policy = shaken(td3(gamma=0.9))
    batch = transitions(policy, 6)
    batch["terminateds"] = np.ones(6, bool)
    reference = Reference(policy, batch)
    reference.losses(batch["rewards"])
    result = policy.learn_on_batch(batch)["td_error"]
    np.testing.assert_allclose(result, reference.errors[:, 0], atol=1e-4)
    batch["truncateds"], batch["terminateds"] = np.ones(6, bool), np.zeros(6, bool)
    reference = Reference(policy, batch, next_noise(policy, 6))
    reference.losses(reference.targets())
    result = policy.learn_on_batch(batch)["td_error"]
    np.testing.assert_allclose(result, reference.errors[:, 0], atol=1e-4)


def test_n_step_rows_are_discounted_by_their_number_of_rewards():
    policy = shaken(td3(n_step=3, gamma=0.5))
    batch = policy.postprocess_trajectory(trajectory(policy, 5))
    assert batch["n_steps"].tolist() == [3, 3, 3, 2, 1]
    batch = transitions(policy, 6)
    batch["n_steps"] = np.array([1, 2, 3] * 2, np.int32)
    reference = Reference(policy, batch, next_noise(policy, 6))
    reference.losses(reference.targets(0.5 ** batch["n_steps"]))
    result = policy.learn_on_batch(batch)["td_error"]
    np.testing.assert_allclose(result, reference.errors[:, 0], atol=1e-4)


# -- delays and targets ---------------------------------------------------------------------------


PARTS = {
    "actor": ("weights", "layer"),
    "critic": ("weights", "critic/"),
    "actor target": ("target_weights", "target/"),
    "critic target": ("target_weights", "critic_target/"),
}


def moved(before, after):
    """Returns which of actor, critics and their targets moved between two states."""
    return {
        name: any((after[part][k] != x).any() for k, x in before[part].items() if k.startswith(own))
        for name, (part, own) in PARTS.items()
    }


@pytest.mark.parametrize("order", ["together", "critics_first"])
def test_actor_and_targets_move_once_in_policy_delay_updates_in_both_modes(order):
    policy, other = (
        shaken(td3(cls=cls, update_order=order)) for cls in (TD3TF2Policy, TD3TF1Policy)
    )
    states = [policy.get_state()]
    for seed in range(5):
        for each in (policy, other):
            each.driver.learning.replay(transitions(each, seed=seed), 6, np.array([True]))
        states.append(policy.get_state())
        for part in ("weights", "target_weights"):
            assert_close(states[-1][part], other.get_state()[part], 1e-5)
    results = [moved(*pair) for pair in itertools.pairwise(states)]
    assert [x["critic"] for x in results] == [True] * 5
    for name in ("actor", "actor target", "critic target"):
        assert [x[name] for x in results] == [True, False, True, False, True], name
    slots = states[-1]["_optimizer_variables"]
    assert (slots["optimizer/000_iteration"], slots["critic_optimizer/000_iteration"]) == (3, 5)


class TellsGradients(TD3TF2Policy):
    """Tells the sum of the actor's gradients and that of the critics'."""

    def grad_stats_fn(self, train_batch, grads):
        totals = [tf.add_n([tf.reduce_sum(tf.abs(x)) for x in each]) for each in grads]
        return dict(zip(("actor", "critic"), totals, strict=True))


@pytest.mark.parametrize("jit", [False, True])
def test_the_actor_is_not_differentiated_where_it_does_not_move(jit):
    policy = shaken(td3(cls=TellsGradients, jit_compile=jit))
    results = []
    for seed in range(3):
        result = policy.driver.learning.replay(transitions(policy, seed=seed), 6, np.array([True]))
        results.append(result["learner_stats"])
    assert [stats["actor"] > 0 for stats in results] == [True, False, True]
    assert all(stats["critic"] > 0 for stats in results)


def test_targets_follow_by_tau_where_they_are_due_and_the_actor_moves():
    policy = shaken(td3(tau=0.25, actor_lr=0.1, critic_lr=0.1))
    before = policy.get_state()["target_weights"]
    for due in (False, True):  # the actor takes the first of these, not the second
        policy.driver.learning.replay(transitions(policy), 6, np.array([due]))
        assert_equal(policy.get_state()["target_weights"], before)
    policy.driver.learning.replay(transitions(policy), 6, np.array([True]))
    state = policy.get_state()
    follows = zip(state["weights"].values(), before.items(), strict=True)
    expected = {key: 0.25 * new + 0.75 * old for new, (key, old) in follows}
    assert_close(state["target_weights"], expected, 1e-6)


@pytest.mark.parametrize("jit", telling([False, True], False))
def test_many_updates_in_one_call_are_the_updates_one_by_one(jit):
    assert_updates_agree(*(td3(tau=0.5, jit_compile=x) for x in (jit, False)))


def test_update_target_moves_all_targets_at_once():
    policy = shaken(td3())
    policy.update_target(1.0)
    state = policy.get_state()
    for follower, source in zip(
        state["target_weights"].values(), state["weights"].values(), strict=True
    ):
        np.testing.assert_array_equal(follower, source)


def test_networks_learn_at_their_own_rates_or_at_lr():
    policy = td3(lr=0.5, critic_lr=0.0)
    assert (policy.get_hyperparameter("actor_lr"), policy.get_hyperparameter("critic_lr")) == (
        0.5,
        0.0,
    )
    before = policy.get_state()
    policy.learn_on_batch(transitions(policy))
    result = moved(before, policy.get_state())
    assert (result["actor"], result["critic"]) == (True, False)


def test_policies_that_differ_in_numbers_share_one_trace():
    numbers = [{"target_noise": 0.1, "critic_lr": 0.1}, {"tau": 0.5, "l2_reg": 0.5}]
    policies = [td3(**each) for each in numbers]
    assert policies[0].program is policies[1].program
    for policy in policies:
        policy.learn_on_batch(transitions(policy))
    assert policies[0].program.functions.traces["learn_once"] == 1
    assert td3(policy_delay=3).program is not policies[0].program


# -- RLlib's names --------------------------------------------------------------------------------

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


@pytest.mark.core
def test_the_defaults_are_those_of_rllibs_contributed_packages():
    of_td3 = {
        "twin_q": True,
        "policy_delay": 2,
        "smooth_target_policy": True,
        "l2_reg": 0.0,
        "tau": 5e-3,
        "train_batch_size": 100,
        "num_steps_sampled_before_learning_starts": 10_000,
    }
    of_ddpg = {
        "twin_q": False,
        "policy_delay": 1,
        "smooth_target_policy": False,
        "l2_reg": 1e-6,
        "tau": 2e-3,
        "train_batch_size": 256,
        "num_steps_sampled_before_learning_starts": 1500,
    }
    for config, own, capacity in (
        (TD3Config(), of_td3, 1_000_000),
        (DDPGConfig(), of_ddpg, 50_000),
    ):
        expected = {**SHARED, **own}
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy_delay": 0}, "policy_delay must be an integer >= 1, got 0"),
        ({"critic_lr": -1.0}, "critic_lr must be None or a number >= 0, got -1.0"),
        ({"target_noise_clip": -0.5}, "target_noise_clip must be a number >= 0, got -0.5"),
        ({"huber_threshold": 0.0}, "huber_threshold must be a number > 0, got 0.0"),
        ({"twin_q": 2}, "twin_q must be True or False, got 2"),
        ({"actor_hiddens": [0]}, "actor_hiddens must be a list of integers >= 1"),
        ({"critic_hidden_activation": 3}, "critic_hidden_activation must be a Keras activation"),
    ],
)
@pytest.mark.parametrize("config", [TD3Config, DDPGConfig])
def test_wrong_settings_are_named(config, settings, message):
    with pytest.raises(ConfigError, match=message):
        config().training(**settings)


def test_targets_that_move_with_the_actor_have_no_other_pace():
    config = TD3Config().training(target_network_update_freq=100)
    message = "target_network_update_freq must be 0 with policy_delay=2, got 100"
    with pytest.raises(ConfigError, match=message):
        config.validate()
    config.training(policy_delay=1).validate()
    DDPGConfig().training(target_network_update_freq=100).validate()


# -- what acts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [(TD3TF2Policy, TD3TF1Policy), (DDPGTF2Policy, DDPGTF1Policy)])
def test_one_seed_gives_one_sequence_of_actions_on_all_runtimes(kinds):
    ways = {"tf": kinds[0], "onnx": kinds[0], "session": kinds[1]}
    batches = [rows_of(OBS, n, seed=n) for n in (1, 4, 7, 1)]
    results = {}
    for way, cls in ways.items():
        policy = shaken(td3(cls=cls, inference="onnx" if way == "onnx" else "tf"))
        random = [policy.compute_actions(x).actions for x in batches]
        policy.on_global_var_update({"timestep": 20_000})  # from here on greedy, and noise
        results[way] = np.concatenate(random + [policy.compute_actions(x).actions for x in batches])
    for way in ("onnx", "session"):
        np.testing.assert_allclose(results[way], results["tf"], atol=1e-5, err_msg=way)
    assert np.abs(results["tf"]).max() <= 1
    assert results["tf"].std(0).min() > 0.1


def test_greedy_actions_are_those_of_the_network():
    policy = shaken(td3(actions=spaces.Box(-100, 100, (2,))))
    obs = rows_of(OBS, 9)
    expected = np.tanh(mlp(actor_of(policy.get_weights()), obs))
    np.testing.assert_allclose(policy.compute_actions(obs, explore=False)[0], expected, atol=1e-6)
    policy.on_global_var_update({"timestep": 20_000})
    noisy = policy.compute_actions(np.repeat(obs, 200, 0)).actions.reshape(9, 200, 2)
    inside = np.abs(expected) < 0.6  # where six deviations are in the bounds
    assert inside.any()
    assert noisy.std(1)[inside] == pytest.approx(0.1, rel=0.25)


def test_without_normalised_actions_they_are_in_the_bounds_of_the_box():
    box = spaces.Box(np.array([-1, 0, 2], np.float32), np.array([3, 8, 2.5], np.float32))
    policy = shaken(td3(actions=box, normalize_actions=False))
    obs = HUNDRED * rows_of(OBS, 200)
    actions = policy.compute_actions(obs, explore=False).actions
    tanh = np.tanh(mlp(actor_of(policy.get_weights()), obs))
    expected = tanh * [2, 4, 0.25] + [1, 4, 2.25]
    np.testing.assert_allclose(actions, expected, atol=1e-4)
    assert all(action in box for action in actions)
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)


def test_learning_draws_from_a_generator_of_its_own():
    one, other = td3(), td3()
    other.driver.learning.replay(transitions(other), 6, np.array([True]))
    other.set_weights(one.get_weights())
    obs = rows_of(OBS, 5)
    np.testing.assert_array_equal(one.compute_actions(obs)[0], other.compute_actions(obs)[0])


@pytest.mark.core
@pytest.mark.parametrize("onnx", [None, True])
def test_exports_hold_the_actor_alone(onnx, tmp_path):
    policy = shaken(td3(actor_hiddens=[64, 64], critic_hiddens=[256, 256]))
    result = policy.export_model(tmp_path, onnx=onnx)
    assert result.parity.largest_difference < 1e-4
    actor = sum(w.nbytes for w in actor_of(policy.get_weights()))
    assert sum(w.nbytes for w in policy.get_weights().values()) > 20 * actor
    for size in measure_weight_files(tmp_path):
        assert actor <= size < 2 * actor


# -- models ---------------------------------------------------------------------------------------


def test_actor_and_critics_take_nested_observations():
    policy = td3(spaces.Dict(place=OBS, mode=spaces.Discrete(3)))
    result = policy.learn_on_batch(transitions(policy))
    assert np.isfinite(list(result["learner_stats"].values())).all()
    assert policy.compute_actions(rows_of(policy.observation_space, 2)).actions.shape == (2, 2)


def test_hidden_layers_are_those_named_and_with_a_preprocessor_those_of_the_model_before():
    shapes = [w.shape for w in actor_of(td3(actor_hiddens=[7, 6]).get_weights())]
    assert shapes == [(3, 7), (7,), (7, 6), (6,), (6, 2), (2,)]
    policy = td3(use_state_preprocessor=True, model={"fcnet_hiddens": [8]})
    weights = policy.get_weights()
    assert [w.shape for w in actor_of(weights)][::2] == [(3, 8), (8, 4), (4, 2)]
    critic = [w for k, w in weights.items() if k.startswith("critic/") and "#" not in k]
    assert [w.shape for w in critic][::2] == [(5, 8), (8, 5), (5, 1)]


def test_an_actor_of_ones_own_is_brought_into_the_bounds():
    actor = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    policy = shaken(td3(model={"custom_model": actor}))
    obs = HUNDRED * rows_of(OBS, 50)
    assert np.abs(policy.compute_actions(obs, explore=False).actions).max() == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"use_lstm": True}, r"model\['use_lstm'\] must be False for TD3TF2Policy"),
        ({"custom_action_dist": "squashed_gaussian"}, "must be deterministic for TD3TF2Policy"),
    ],
)
def test_actors_that_cannot_be_are_named(model, message):
    with pytest.raises(ConfigError, match=message):
        td3(model=model)


@pytest.mark.parametrize("space", [TWO, spaces.Box(-1, 1, (2, 2)), spaces.Dict(a=PLANE)])
def test_only_vectors_of_floats_are_actions(space):
    with pytest.raises(UnsupportedSpaceError, match="TD3TF2Policy supports one-dimensional Boxes"):
        TD3TF2Policy(OBS, space, {})


# -- as every policy ------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("cls", [TD3TF2Policy, TD3TF1Policy, DDPGTF2Policy])
def test_it_keeps_the_contract_of_policies(cls):
    check_policy(td3(cls=cls))


def test_a_policy_goes_on_from_its_checkpoint_to_the_bit(tmp_path):
    policy = td3(actor_lr=0.01)
    policy.driver.learning.replay(transitions(policy), 6, np.array([True]))
    policy.export_checkpoint(tmp_path)
    loaded = TD3TF2Policy.from_checkpoint(tmp_path)
    batch = SampleBatch(transitions(policy, 18, seed=3))
    for each in (policy, loaded):
        each.driver.learning.replay(batch, 6, np.ones(3, bool))
    one, other = policy.get_state(), loaded.get_state()
    for part in ("weights", "target_weights", "_optimizer_variables"):
        assert_equal(one[part], other[part])
    obs = rows_of(OBS, 3)
    np.testing.assert_array_equal(policy.compute_actions(obs)[0], loaded.compute_actions(obs)[0])
