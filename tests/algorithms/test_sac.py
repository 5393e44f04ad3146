"""SAC: losses and gradients by NumPy, networks, targets, runtimes, exports, what is refused."""

import math

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers.continuous_actions import (
    assert_updates_agree,
    measure_weight_files,
    mlp,
    shaken,
    transitions,
)
from helpers.factories import OBS, PLANE, assert_close, assert_equal, make, rows_of, trajectory
from helpers.marks import telling
from tfpolicies import SACConfig, SACTF1Policy, SACTF2Policy, TD3TF2Policy
from tfpolicies.algorithms import off_policy
from tfpolicies.errors import ConfigError, ModelError, UnsupportedSpaceError
from tfpolicies.models.registry import register_model
from tfpolicies.testing import check_policy

pytestmark = pytest.mark.usefixtures("kept_programs")

NESTED = spaces.Dict(place=OBS, mode=spaces.Discrete(3))


def sac(obs=OBS, actions=PLANE, cls=SACTF2Policy, model=None, q=None, **config):
    quick = {
        "model": {"fcnet_hiddens": [4], **(model or {})},
        "q_model_config": {"fcnet_hiddens": [5], **(q or {})},
    }
    return make(cls, obs, actions, **{**quick, **config})


# -- the reference, in float64 --------------------------------------------------------------------


def squashed_sample(outputs, noise):
    mean, log_std = np.split(outputs, 2, axis=-1)
    log_std = np.clip(log_std, -5, 2)
    u = mean + np.exp(log_std) * noise
    actions = np.tanh(u)
    density = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - np.log(1 - actions**2)
    return actions, density.sum(-1)


class Reference:
    """SAC's losses of a policy's weights, as the papers have them."""

    def __init__(self, policy, batch, noise, weights=None):
        state = policy.get_state()
        self.weights = {k: np.float64(w) for k, w in (weights or state["weights"]).items()}
        self.targets = {k: np.float64(w) for k, w in state["target_weights"].items()}
        self.policy, self.batch = policy, {k: np.asarray(v, np.float64) for k, v in batch.items()}
        self.noise = np.split(np.float64(noise), 2, axis=-1)
        self.squares = policy.config["td_error_loss_fn"] == "mse"

    def actor(self, obs, noise):
        weights = [w for k, w in self.weights.items() if "/layer" not in k]
        return squashed_sample(mlp(weights, obs), noise)

    def values(self, weights, prefix, obs, actions):
        """Returns the value of each critic, `[B, n]`."""
        mine = [(k, w) for k, w in weights.items() if k.startswith(prefix)]
        count = sum("#" in k for k, _ in mine)
        ways = [[w for k, w in mine if "#" not in k]]
        ways += [[w for k, w in mine if "#" in k]] if count else []
        x = np.concatenate([obs, actions], axis=-1)
        return np.concatenate([mlp(each, x) for each in ways], axis=-1)

    @property
    def log_alpha(self):
        return self.weights["temperature/layer_0/log_alpha"]

    def losses(self, target_entropy, gamma=None):
        batch, alpha = self.batch, np.exp(self.log_alpha)
        actions, logp = self.actor(batch["obs"], self.noise[0])
        next_actions, next_logp = self.actor(batch["new_obs"], self.noise[1])
        gamma = self.policy.get_hyperparameter("gamma") if gamma is None else gamma
        after = self.values(self.targets, "critic_target/", batch["new_obs"], next_actions).min(-1)
        goes_on = gamma * (1 - batch["terminateds"])
        targets = batch["rewards"] + goes_on * (after - alpha * next_logp)
        self.q = self.values(self.weights, "critic/", batch["obs"], batch["actions"])
        self.errors = self.q - targets[:, None]
        size = np.abs(self.errors)
        loss = np.where((size <= 1) | self.squares, 0.5 * size**2, size - 0.5)
        critic = (batch["weights"][:, None] * loss).mean(0).sum()
        best = self.values(self.weights, "critic/", batch["obs"], actions).min(-1)
        actor = (alpha * logp - best).mean()
        temperature = -self.log_alpha * (logp + target_entropy).mean()
        return np.array([actor, critic, temperature])


def next_noise(policy, rows):
    """Returns the noise that the next update of a policy draws."""
    twin = np.random.default_rng()
    twin.bit_generator.state = policy.get_state()["learning_rng"]
    return twin.standard_normal((rows, 2 * policy.action_space.shape[0]), np.float32)


# -- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin_q", [True, False])
@pytest.mark.parametrize(
    ("cls", "entropy", "loss"), [(SACTF2Policy, "auto", "mse"), (SACTF1Policy, -0.5, "huber")]
)
def test_losses_and_statistics_are_those_of_the_papers(twin_q, cls, entropy, loss):
    settings = {"target_entropy": entropy, "td_error_loss_fn": loss}
    policy = shaken(sac(cls=cls, twin_q=twin_q, gamma=0.9, **settings))
    batch = transitions(policy, 30)
    reference = Reference(policy, batch, next_noise(policy, 30))
    wanted_entropy = -2.0 if entropy == "auto" else -0.5
    actor, critic, temperature = reference.losses(wanted_entropy)
    size = np.abs(reference.errors)
    assert (size > 1).any()  # both branches of the Huber loss
    assert (size < 1).any()
    result = policy.learn_on_batch(batch)
    expected = {
        "actor_loss": actor,
        "critic_loss": critic / (2 if twin_q else 1),  # the mean over critics, as RLlib reports it
        "alpha_loss": temperature,
        "alpha_value": math.exp(reference.log_alpha),
        "target_entropy": wanted_entropy,
        "mean_q": reference.q[:, 0].mean(),
        "min_q": reference.q[:, 0].min(),
        "max_q": reference.q[:, 0].max(),
        "mean_td_error": size.mean(),
        **dict.fromkeys(("cur_actor_lr", "cur_critic_lr", "cur_entropy_lr"), 3e-4),
    }
    actual = result["learner_stats"]
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=2e-4, abs=2e-4), name
    np.testing.assert_allclose(result["td_error"], size.mean(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("cls", "jit"), [(SACTF2Policy, False), (SACTF2Policy, True), (SACTF1Policy, False)]
)
def test_with_critics_first_the_actor_learns_from_what_they_became(cls, jit):
    config = {"gamma": 0.9, "lr": 0.1, "jit_compile": jit, "td_error_loss_fn": "mse"}
    policy = shaken(sac(cls=cls, update_order="critics_first", **config))
    twin = shaken(sac(cls=cls, **config))
    batch, before = transitions(policy, 30), policy.get_weights()
    noise = next_noise(policy, 30)
    result, other = (each.learn_on_batch(batch)["learner_stats"] for each in (policy, twin))
    after, plain = policy.get_weights(), twin.get_weights()
    critics = {key: w for key, w in after.items() if key.startswith("critic/")}
    assert_close(
        {**critics, "alpha": after["temperature/layer_0/log_alpha"]},
        {**{key: plain[key] for key in critics}, "alpha": plain["temperature/layer_0/log_alpha"]},
        1e-6,
    )
    assert result["critic_loss"] == pytest.approx(other["critic_loss"], rel=1e-5)
    actor_loss = Reference(policy, batch, noise, {**before, **critics}).losses(-2.0)[0]
    assert result["actor_loss"] == pytest.approx(actor_loss, rel=2e-4, abs=2e-4)
    assert abs(result["actor_loss"] - other["actor_loss"]) > 0.01

    twin = shaken(sac(cls=cls, **config))  # steps from what the critics became, alpha as it was
    twin.set_weights({**before, **critics})
    twin.learn_on_batch(batch)
    actor = [key for key in before if "/layer" not in key]
    assert_close({k: after[k] for k in actor}, {k: twin.get_weights()[k] for k in actor}, 1e-5)


def test_with_critics_first_critics_run_as_often_as_together():
    class Counted(keras.layers.Layer):
        def build(self, shape):
            self.runs = self.add_weight(name="runs", shape=(), initializer="zeros", trainable=False)

        def call(self, inputs):
            self.runs.assign_add(1.0)
            return inputs

    def critic(observation_space, num_outputs):
        obs, actions = keras.Input((3,), name="obs"), keras.Input((2,), name="actions")
        x = Counted()(keras.layers.Concatenate()([obs, actions]))
        return keras.Model([obs, actions], keras.layers.Dense(num_outputs)(x))

    def runs(policy):
        return next(x for key, x in policy.get_weights().items() if key.endswith("runs"))

    for order in ("together", "critics_first"):
        policy = sac(q={"custom_model": critic}, twin_q=False, update_order=order)
        before = runs(policy)
        policy.learn_on_batch(transitions(policy, 6))
        assert runs(policy) - before == 2  # on actions of the batch, and of the actor


@pytest.mark.parametrize("twin_q", [True, False])
def test_each_gradient_is_that_of_its_own_loss_alone_by_finite_differences(twin_q):
    policy = shaken(sac(twin_q=twin_q, gamma=0.9))
    batch, noise = transitions(policy, 12), next_noise(policy, 12)
    gradients, _ = policy.compute_gradients(batch)
    weights = {k: np.float64(w) for k, w in policy.get_weights().items()}
    assert len(gradients) == len(weights)
    step, compared = 1e-5, 0
    for (key, value), gradient in zip(weights.items(), gradients, strict=True):
        own = {"critic": 1, "temperature": 2}.get(key.partition("/")[0], 0)
        for at in list(np.ndindex(*value.shape))[:7]:
            results = []
            for sign in (1, -1):
                moved = {**weights, key: np.array(value)}
                moved[key][at] += sign * step
                reference = Reference(policy, batch, noise, moved)
                if own == 1:  # what is behind the stopped gradient does not move
                    fixed = Reference(policy, batch, noise)
                    fixed.losses(-2.0)
                    targets = fixed.q - fixed.errors
                    reference.losses(-2.0)
                    size = np.abs(reference.q - targets)
                    huber = np.where(size <= 1, 0.5 * size**2, size - 0.5)
                    results.append((batch["weights"][:, None] * huber).mean(0).sum())
                else:
                    results.append(reference.losses(-2.0)[own])
            difference = (results[0] - results[1]) / (2 * step)
            assert gradient[at] == pytest.approx(difference, rel=2e-3, abs=2e-4), (key, at)
            compared += 1
    assert compared > 40


def test_a_row_that_terminated_is_worth_its_reward_and_a_truncated_one_goes_on():
    policy = shaken(sac(gamma=0.9))
    batch = transitions(policy, 6)
    batch["terminateds"] = np.ones(6, bool)
    reference = Reference(policy, batch, next_noise(policy, 6))
    reference.losses(-2.0)
    errors = np.abs(reference.q - batch["rewards"][:, None]).mean(-1)
    np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], errors, atol=1e-4)
    batch["truncateds"], batch["terminateds"] = np.ones(6, bool), np.zeros(6, bool)
    reference = Reference(policy, batch, next_noise(policy, 6))
    reference.losses(-2.0)
    expected = np.abs(reference.errors).mean(-1)
    np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], expected, atol=1e-4)


@pytest.mark.parametrize("jit", telling([False, True], False))
def test_many_updates_in_one_call_are_the_updates_one_by_one(jit):
    assert_updates_agree(*(sac(lr=0.01, tau=0.5, jit_compile=x) for x in (jit, False)))


def test_targets_follow_behind_an_update_by_tau():
    policy = shaken(sac(lr=0.1, tau=0.25))
    before = list(policy.get_state()["target_weights"].values())
    policy.driver.learning.replay(transitions(policy), 6, np.array([False]))
    assert_equal(
        dict(enumerate(policy.get_state()["target_weights"].values())), dict(enumerate(before))
    )
    policy.driver.learning.replay(transitions(policy), 6, np.array([True]))
    state = policy.get_state()
    critics = [w for key, w in state["weights"].items() if key.startswith("critic/")]
    for result, q, t in zip(state["target_weights"].values(), critics, before, strict=True):
        np.testing.assert_allclose(result, 0.25 * q + 0.75 * t, rtol=1e-4, atol=1e-6)


def test_n_step_rows_are_discounted_by_their_number_of_rewards():
    policy = shaken(sac(n_step=3, gamma=0.5))
    batch = policy.postprocess_trajectory(trajectory(policy, 5))
    assert batch["n_steps"].tolist() == [3, 3, 3, 2, 1]
    batch = transitions(policy, 6)
    batch["n_steps"] = np.array([1, 2, 3] * 2, np.int32)
    reference = Reference(policy, batch, next_noise(policy, 6))
    reference.losses(-2.0, gamma=0.5 ** batch["n_steps"])
    expected = np.abs(reference.errors).mean(-1)
    np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], expected, atol=1e-4)


# -- the temperature and the rates ----------------------------------------------------------------


def test_the_temperature_starts_at_initial_alpha_and_moves_towards_the_target_entropy():
    policy = sac(initial_alpha=0.2, entropy_lr=0.1, target_entropy=5.0)  # more than there can be
    stats = policy.learn_on_batch(transitions(policy))["learner_stats"]
    assert stats["alpha_value"] == pytest.approx(0.2)
    assert policy.learn_on_batch(transitions(policy))["learner_stats"]["alpha_value"] > 0.2
    policy.set_hyperparameter("target_entropy", -50.0)
    for _ in range(30):
        stats = policy.learn_on_batch(transitions(policy))["learner_stats"]
    assert (stats["target_entropy"], stats["alpha_value"] < 0.2) == (-50.0, True)


def test_networks_learn_at_their_own_rates_or_at_lr():
    policy = sac(lr=0.5, critic_lr=0.0)
    rates = {
        name: policy.get_hyperparameter(name) for name in ("actor_lr", "critic_lr", "entropy_lr")
    }
    assert rates == {"actor_lr": 0.5, "critic_lr": 0.0, "entropy_lr": 0.5}
    before = policy.get_weights()
    stats = policy.learn_on_batch(transitions(policy))["learner_stats"]
    assert (stats["cur_actor_lr"], stats["cur_critic_lr"]) == (0.5, 0.0)
    after = policy.get_weights()
    moved = {key.partition("/")[0] for key in after if (after[key] != before[key]).any()}
    assert {"temperature", "layer_0"} <= moved
    assert "critic" not in moved
    policy.set_hyperparameter("lr", 0.25)
    assert [policy.get_hyperparameter(name) for name in rates] == [0.25, 0.0, 0.25]
    policy.set_hyperparameter("actor_lr", 0.125)
    assert [policy.get_hyperparameter(name) for name in rates] == [0.125, 0.0, 0.25]


def test_a_keras_schedule_is_the_rate_of_all_networks_without_one():
    rate = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    policy = sac(lr=rate, critic_lr=0.25)
    assert [policy.get_hyperparameter(x) for x in ("actor_lr", "critic_lr", "entropy_lr")] == [
        0.5,
        0.25,
        0.5,
    ]


def test_a_schedule_of_lr_moves_the_networks_without_a_rate_of_their_own():
    policy = sac(lr_schedule=[[0, 1.0], [100, 0.0]], critic_lr=0.5)
    policy.on_global_var_update({"timestep": 75})
    assert [policy.get_hyperparameter(x) for x in ("actor_lr", "critic_lr", "entropy_lr")] == [
        0.25,
        0.5,
        0.25,
    ]


def test_policies_that_differ_in_numbers_share_one_trace():
    numbers = [{"gamma": 0.9, "critic_lr": 0.1}, {"tau": 0.5, "target_entropy": -1.0}]
    policies = [sac(**each) for each in numbers]
    assert policies[0].program is policies[1].program
    for policy in policies:
        policy.learn_on_batch(transitions(policy))
    assert policies[0].program.functions.traces["learn_once"] == 1
    assert sac(twin_q=False).program is not policies[0].program


# -- RLlib's names --------------------------------------------------------------------------------


@pytest.mark.core
def test_the_defaults_are_those_of_rllib():
    config = SACConfig()
    expected = {
        "twin_q": True,
        "tau": 5e-3,
        "initial_alpha": 1.0,
        "target_entropy": None,
        "n_step": 1,
        "lr": 3e-4,
        "grad_clip": None,
        "train_batch_size": 256,
        "target_network_update_freq": 0,
        "num_steps_sampled_before_learning_starts": 1500,
        "store_buffer_in_checkpoints": False,
        "training_intensity": None,
        "rollout_fragment_length": "auto",
        "min_time_s_per_iteration": None,
        "min_sample_timesteps_per_iteration": 1000,
    }
    assert {name: config[name] for name in expected} == expected
    assert config.replay_buffer_config["capacity"] == 1_000_000
    for model in (config.policy_model_config, config.q_model_config):
        assert model["fcnet_hiddens"] == [256, 256]
        assert model["fcnet_activation"] == "relu"


@pytest.mark.core
def test_rllibs_dicts_of_settings_are_told_apart():
    config = SACConfig().training(
        optimization_config={"actor_learning_rate": 1e-3, "entropy_learning_rate": 1e-4},
        policy_model_config={"fcnet_hiddens": [7]},
        q_model_config={"fcnet_hiddens": [8]},
        target_entropy="auto",
        clip_actions=False,
        _deterministic_loss=False,
    )
    assert (config.actor_lr, config.critic_lr, config.alpha_lr) == (1e-3, None, 1e-4)
    assert config.model["fcnet_hiddens"] == [7]
    assert config.model["fcnet_activation"] == "relu"
    assert config.q_model_config["fcnet_hiddens"] == [8]
    assert config["optimization"]["actor_learning_rate"] == 1e-3
    config["optimization"]["critic_learning_rate"] = 2e-3
    assert config.critic_lr == 2e-3
    again = SACConfig.from_dict({"optimization": {"entropy_learning_rate": 5e-3}})
    assert again.entropy_lr == 5e-3
    assert "optimization" in again
    with pytest.raises(TypeError, match="unexpected keyword 'optimization'"):
        make_other().training(optimization={})
    assert "optimization" not in make_other()
    with pytest.raises(TypeError, match="'actor_lr' is given under two names"):
        config.training(actor_lr=1.0, optimization={"actor_learning_rate": 2.0})


def make_other():
    from tfpolicies import PPOConfig

    return PPOConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimization": {"actor_lr": 1.0}}, "The key of optimization must be one of actor_learn"),
        ({"optimization": 3e-4}, "optimization must be a dict of actor_learning_rate"),
        ({"critic_lr": -1.0}, "critic_lr must be None or a number >= 0, got -1.0"),
        ({"target_entropy": "none"}, "target_entropy must be a number, or 'auto', got 'none'"),
        ({"initial_alpha": 0.0}, "initial_alpha must be a number > 0, got 0.0"),
        ({"twin_q": 2}, "twin_q must be True or False, got 2"),
        ({"td_error_loss_fn": "l1"}, "td_error_loss_fn must be one of"),
        ({"update_order": "actor"}, "update_order must be one of"),
        ({"q_model_config": 3}, "q_model_config must be a dict"),
        ({"_use_beta_distribution": True}, "_use_beta_distribution must be False here"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        SACConfig().training(**settings)


# -- what acts ------------------------------------------------------------------------------------


@pytest.mark.core
def test_one_seed_gives_one_sequence_of_actions_on_all_runtimes():
    ways = {"tf": SACTF2Policy, "onnx": SACTF2Policy, "session": SACTF1Policy}
    batches = [rows_of(OBS, n, seed=n) for n in (1, 4, 7, 1)]
    results = {}
    for way, cls in ways.items():
        policy = shaken(sac(cls=cls, inference="onnx" if way == "onnx" else "tf"))
        results[way] = np.concatenate([policy.compute_actions(x).actions for x in batches])
    for way in ("onnx", "session"):
        np.testing.assert_allclose(results[way], results["tf"], atol=1e-5, err_msg=way)
    assert np.abs(results["tf"]).max() <= 1
    assert results["tf"].std(0).min() > 0.1


def test_learning_draws_from_a_generator_of_its_own():
    one, other = sac(), sac()
    other.driver.learning.replay(transitions(other), 6, np.array([True]))
    other.set_weights(one.get_weights())
    obs = rows_of(OBS, 5)
    np.testing.assert_array_equal(one.compute_actions(obs)[0], other.compute_actions(obs)[0])


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_sixty_four_actors_act_in_one_stacked_call_as_one_by_one(inference):
    from tfpolicies import PolicyMap

    def filled():
        result = PolicyMap(capacity=100)
        for i in range(64):
            result[f"p{i}"] = sac(seed=i, inference=inference)
        return result

    together, apart = filled(), filled()
    obs = {name: rows_of(OBS, 1 + i % 3, seed=i) for i, name in enumerate(together)}
    result = together.compute_actions(obs)
    for name, rows in obs.items():
        np.testing.assert_allclose(
            result[name].actions, apart[name].compute_actions(rows).actions, atol=1e-5
        )
    traces = together["p0"].program.functions.traces
    assert {name: n for name, n in traces.items() if n != 1} == {}


@pytest.mark.core
@pytest.mark.parametrize("onnx", [None, True])
def test_exports_hold_the_actor_alone(onnx, tmp_path):
    policy = shaken(make(SACTF2Policy, OBS, PLANE, model={"fcnet_hiddens": [64, 64]}))
    result = policy.export_model(tmp_path, onnx=onnx)
    assert result.parity.largest_difference < 1e-4
    sizes = dict.fromkeys(("actor", "all"), 0)
    for key, array in policy.get_weights().items():
        sizes["all"] += array.nbytes
        sizes["actor"] += array.nbytes * (not key.startswith(("critic/", "temperature/")))
    assert sizes["all"] > 20 * sizes["actor"]  # critics of two layers of 256
    for size in measure_weight_files(tmp_path):  # two signatures share one set of variables
        assert sizes["actor"] <= size < 2 * sizes["actor"]


def test_only_what_acts_is_sent_where_nobody_learns():
    policy = sac()
    layout = policy.program.layout
    assert {slot.part for slot in layout.get_slots("model", "filter")} == {"model"}
    assert policy.model.count_params() == 3 * 4 + 4 + 4 * 4 + 4


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space",
    [NESTED, spaces.Box(0, 255, (10, 10, 3), np.uint8), spaces.Tuple([OBS, OBS])],
    ids=["dict", "image", "tuple"],
)
def test_actor_and_critics_take_every_observation(space):
    policy = sac(space)
    result = policy.learn_on_batch(transitions(policy))
    assert result["td_error"].shape == (6,)
    assert np.isfinite(list(result["learner_stats"].values())).all()
    assert policy.compute_actions(rows_of(space, 2)).actions.shape == (2, 2)


def test_actor_and_critics_see_observations_through_one_filter():
    policy = shaken(sac(observation_filter="MeanStdFilter"))
    rows = 50 + 9 * rows_of(OBS, 100)
    policy.filter.observe([rows])
    policy.driver.learning.flush_filters()
    batch = transitions(policy, 9)
    batch["obs"], batch["new_obs"] = rows[:9], rows[1:10]
    seen = dict(batch)
    mean, std = rows.mean(0), rows.std(0, ddof=1)
    seen["obs"], seen["new_obs"] = ((seen[x] - mean) / std for x in ("obs", "new_obs"))
    reference = Reference(policy, seen, next_noise(policy, 9))
    reference.losses(-2.0)
    expected = np.abs(reference.errors).mean(-1)
    np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], expected, rtol=0.01)


def own_critic(observation_space, num_outputs, width=3):
    place, actions = keras.Input((3,), name="obs"), keras.Input((2,), name="actions")
    hidden = keras.layers.Dense(width, "tanh")(keras.layers.Concatenate()([place, actions]))
    return keras.Model({"obs": place, "actions": actions}, keras.layers.Dense(num_outputs)(hidden))


class OwnCritic(keras.Model):
    def __init__(self, observation_space, num_outputs, **kwargs):
        super().__init__()
        self.hidden, self.value = keras.layers.Dense(3, "tanh"), keras.layers.Dense(num_outputs)

    def call(self, inputs):
        joined = keras.ops.concatenate([inputs["obs"], inputs["actions"]], axis=-1)
        return self.value(self.hidden(joined))[:, 0]


@pytest.mark.parametrize("values", [own_critic, OwnCritic, "own critic"])
def test_critics_and_actors_of_ones_own(values):
    register_model("own critic", own_critic)
    actor = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    policy = sac(model={"custom_model": actor}, q={"custom_model": values})
    critics = [w for key, w in policy.get_weights().items() if key.startswith("critic/")]
    assert sum(w.size for w in critics) == 2 * (5 * 3 + 3 + 3 + 1)
    assert (critics[0] != critics[4]).any()  # each has weights of its own
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)


def test_critics_that_only_share_a_name_are_of_different_kinds():
    def one(observation_space, num_outputs):
        return own_critic(observation_space, num_outputs, width=3)

    def other(observation_space, num_outputs):
        return own_critic(observation_space, num_outputs, width=4)

    register_model("changing", one)
    first = sac(q={"custom_model": "changing"})
    register_model("changing", other)
    second = sac(q={"custom_model": "changing"})
    assert first.program is not second.program
    assert len(second.get_weights()["critic/layer_0/bias"]) == 4


@pytest.mark.parametrize(
    ("q", "message"),
    [
        ({"use_lstm": True}, r"q_model_config\['use_lstm'\] must be False for SACTF2Policy"),
        ({"fcnet_hidden": [3]}, "is not a model setting"),
        ({"custom_model": keras.Sequential([keras.layers.Dense(1)])}, "must be a factory"),
        ({"custom_model": lambda space, n: keras.Sequential([keras.layers.Dense(1)])}, "be called"),
        ({"custom_model": lambda space, n: own_critic(space, 2)}, r"one value per row.*\[B, 2\]"),
    ],
)
def test_critics_that_do_not_fit_are_named(q, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        sac(q=q)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        ({}, r"^q_model_config\['conv_filters'\] must be set.*Try q_model_config={"),
        ({"conv_filters": [[2, 17, 1]]}, r"of q_model_config\['conv_filters'\] must not be larger"),
        ({"conv_filters": [[2, 8, 8]], "conv_activation": "x"}, r"^q_model_config\['conv_act"),
    ],
)
def test_what_critics_lack_to_see_images_is_named_as_theirs(q, message):
    images = spaces.Box(0, 255, (16, 16, 1), np.uint8)
    with pytest.raises(ModelError, match=message):
        sac(images, model={"conv_filters": [[2, 8, 8]]}, q=q)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"use_gru": True}, r"model\['use_gru'\] must be False for SACTF2Policy"),
        ({"custom_action_dist": "deterministic"}, r"SACTF2Policy: .* must transform normal noise"),
    ],
)
def test_actors_that_cannot_be_are_named(model, message):
    with pytest.raises(ConfigError, match=message):
        sac(model=model)


def test_an_actor_may_have_one_standard_deviation_for_all_rows():
    policy = sac(model={"free_log_std": True})
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)
    inputs = policy.compute_actions(rows_of(OBS, 4)).extras["action_dist_inputs"]
    assert (inputs[:, 2:] == inputs[0, 2:]).all()


def test_without_normalised_actions_the_gaussian_is_not_squashed():
    policy = sac(normalize_actions=False)
    assert [kind.__name__ for kind in policy.dist_class.leaf_classes] == ["DiagGaussian"]
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        ([-1, 0], [1, np.inf], r"dimension 1 of the action space are \[0, inf\]"),
        ([-1, -np.inf], [1, 0], r"dimension 1 of the action space are \[-inf, 0\]"),
        ([-np.inf, 0], [np.inf, 1], r"dimension 0 of the action space are \[-inf, inf\]"),
    ],
)
def test_boxes_without_bounds_are_refused_with_the_ways_out(low, high, words):
    box = spaces.Box(np.float32(low), np.float32(high))
    for made in (sac, td3_of):
        with pytest.raises(UnsupportedSpaceError, match=f"{words}.*wrappers.TransformAction"):
            made(actions=box)
    with pytest.raises(UnsupportedSpaceError, match="normalize_actions=False, clip_actions=True"):
        sac(actions=box)
    policy = shaken(sac(actions=box, normalize_actions=False, clip_actions=True))
    acting = policy.session(200)
    actions = np.concatenate(
        [acting.act(10 * rows_of(OBS, 200, i), explore=False) for i in range(3)]
    )
    assert all(action in box for action in actions)
    unbounded = np.isinf(low) | np.isinf(high)
    assert np.abs(actions[:, unbounded]).max() > 1.5


def td3_of(**settings):
    return TD3TF2Policy(OBS, settings.pop("actions"), settings)


def test_bounds_that_are_very_far_apart_are_told_of_once(caplog, monkeypatch):
    monkeypatch.setattr(off_policy, "_classes_warned_of_width", set())
    for bound in (499.0, 1000.0, 2000.0):
        sac(actions=spaces.Box(-bound, bound, (2,)))
    (message,) = [x.getMessage() for x in caplog.records]
    assert message.startswith(
        "Environment: the bounds of dimension 0 of its action space are [-1000, 1000]"
    )


@pytest.mark.parametrize(
    "space",
    [spaces.MultiDiscrete([2, 2]), spaces.Box(-1, 1, (2, 2)), spaces.Box(-1, 1, ()),
     spaces.Box(0, 3, (2,), np.int64), spaces.Dict(a=PLANE)],
)  # fmt: skip
def test_only_discrete_ones_and_vectors_of_floats_are_actions(space):
    with pytest.raises(UnsupportedSpaceError, match="Discrete and one-dimensional Boxes of floats"):
        SACTF2Policy(OBS, space, {})


# -- as every policy ------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("cls", [SACTF2Policy, SACTF1Policy])
def test_it_keeps_the_contract_of_policies(cls):
    check_policy(sac(cls=cls))


@pytest.mark.soak
def test_a_policy_goes_on_from_its_checkpoint_to_the_bit(tmp_path):
    policy = sac(lr=0.01, q={"custom_model": own_critic})
    step = np.array([True])
    policy.driver.learning.replay(transitions(policy), 6, step)
    policy.export_checkpoint(tmp_path)
    config = {"q_model_config": {"custom_model": own_critic}}
    loaded = SACTF2Policy.from_checkpoint(tmp_path, config=config)
    for each in (policy, loaded):
        each.driver.learning.replay(transitions(each, seed=3), 6, step)
    one, other = policy.get_state(), loaded.get_state()
    for part in ("weights", "target_weights", "_optimizer_variables"):
        assert_equal(one[part], other[part])
    obs = rows_of(OBS, 3)
    np.testing.assert_array_equal(policy.compute_actions(obs)[0], loaded.compute_actions(obs)[0])


def test_weights_of_the_actor_alone_leave_the_critics():
    policy, other = shaken(sac()), shaken(sac(), seed=5)
    actor = {k: w for k, w in other.get_weights().items() if "/layer" not in k}
    before = policy.get_state()
    policy.set_weights(actor)
    after = policy.get_state()
    assert_equal({k: after["weights"][k] for k in actor}, actor)
    rest = [k for k in before["weights"] if k not in actor]
    assert_equal(*({k: x["weights"][k] for k in rest} for x in (before, after)))
    assert_equal(before["target_weights"], after["target_weights"])
