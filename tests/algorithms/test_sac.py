"""SAC, also with Discrete actions: losses by NumPy, targets, temperature, critics, refusals."""

import math
from functools import partial

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers.actor_critic_references import DiscreteSACReference, SACReference
from helpers.continuous_actions import shaken, transitions
from helpers.factories import OBS, assert_equal, rows_of
from helpers.marks import telling
from helpers.off_policy import (
    MASKED,
    build_critic,
    make_discrete_sac,
    make_sac,
    make_td3,
    replay,
)
from tfpolicies import PolicyMap, PPOConfig, SACConfig, SACTF1Policy, SACTF2Policy, SampleBatch
from tfpolicies.algorithms import off_policy
from tfpolicies.errors import ConfigError, ModelError, UnsupportedSpaceError
from tfpolicies.models.distributions import ActionDistribution, Categorical, WholeSpaceDistribution
from tfpolicies.models.registry import register_model

pytestmark = pytest.mark.usefixtures("kept_programs")


# -- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "cls", "twin_q", "entropy", "loss"),
    [
        *telling(
            [
                (make_discrete_sac, SACTF2Policy, True, "auto", "huber"),
                (make_discrete_sac, SACTF1Policy, True, 0.3, "huber"),
                (make_discrete_sac, SACTF2Policy, False, 0.3, "huber"),
            ],
            (make_discrete_sac, SACTF2Policy, True, "auto", "huber"),
        ),
        (make_sac, SACTF2Policy, True, "auto", "mse"),
        (make_sac, SACTF2Policy, False, "auto", "mse"),
        (make_sac, SACTF1Policy, True, -0.5, "huber"),
        (make_sac, SACTF1Policy, False, -0.5, "huber"),
    ],
)
def test_losses_and_statistics_are_those_of_the_papers(make, cls, twin_q, entropy, loss):
    settings = {"target_entropy": entropy, "td_error_loss_fn": loss}
    policy = shaken(make(cls=cls, twin_q=twin_q, gamma=0.9, **settings))
    batch = transitions(policy, 30)
    kind = SACReference if make is make_sac else DiscreteSACReference
    reference = kind(policy, batch)
    actor, critic, temperature = reference.get_losses()
    size = np.abs(reference.errors)
    assert (size > 1).any()  # both branches of the Huber loss
    assert (size < 1).any()
    result = policy.learn_on_batch(batch)
    automatic = -2.0 if make is make_sac else 0.98 * math.log(3)
    expected = {
        "actor_loss": actor,
        "critic_loss": critic / (2 if twin_q else 1),  # the mean over critics, as RLlib reports it
        "alpha_loss": temperature,
        "alpha_value": math.exp(reference.log_alpha),
        "target_entropy": automatic if entropy == "auto" else entropy,
        "mean_q": reference.q[:, 0].mean(),
        "min_q": reference.q[:, 0].min(),
        "max_q": reference.q[:, 0].max(),
        "mean_td_error": size.mean(),
        **dict.fromkeys(("cur_actor_lr", "cur_critic_lr", "cur_entropy_lr"), 3e-4),
    }
    assert result["learner_stats"] == pytest.approx(expected, rel=2e-4, abs=2e-4)
    np.testing.assert_allclose(result["td_error"], size.mean(-1), rtol=1e-3, atol=1e-3)


def test_actor_and_critics_see_observations_through_one_filter():
    policy = shaken(make_sac(observation_filter="MeanStdFilter"))
    rows = 50 + 9 * rows_of(OBS, 100)
    policy.filter.observe([rows])
    policy.driver.learning.flush_filters()
    batch = transitions(policy, 9)
    normalized = (rows - rows.mean(0)) / rows.std(0, ddof=1)
    batch["obs"], batch["new_obs"] = normalized[:9], normalized[1:10]
    expected = SACReference(policy, batch).get_td_errors()
    batch["obs"], batch["new_obs"] = rows[:9], rows[1:10]
    np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], expected, rtol=0.01)


def test_forbidden_actions_have_no_part_in_the_means():
    policy = shaken(make_discrete_sac(MASKED))
    batch = transitions(policy, 4)
    batch["terminateds"][:] = False
    for name in ("obs", "new_obs"):
        batch[name]["action_mask"] = np.array([[1, 0, 0]] * 4, np.int8)
    batch["actions"] = np.zeros(4, np.int64)
    plain = SampleBatch(batch, **{x: batch[x]["observations"] for x in ("obs", "new_obs")})
    reference = DiscreteSACReference(policy, plain)
    critics = (reference.target_weights, "critic_target/"), (reference.weights, "critic/")
    after, now = (
        reference.get_values(*critic, plain[name])[:, 0].min(-1)
        for critic, name in zip(critics, ("new_obs", "obs"), strict=True)
    )
    gamma = policy.get_hyperparameter("gamma")
    expected = reference.get_td_errors(plain["rewards"] + gamma * after)  # without an entropy
    result = policy.learn_on_batch(batch)
    np.testing.assert_allclose(result["td_error"], expected, rtol=1e-3, atol=1e-3)
    assert result["learner_stats"]["actor_loss"] == pytest.approx(-now.mean(), rel=1e-3)
    batch["obs"]["action_mask"][:] = 0
    gradients, _ = policy.compute_gradients(batch)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_learning_with_discrete_actions_draws_nothing():
    policy = make_discrete_sac()
    before = policy.get_state()
    policy.learn_on_batch(transitions(policy))
    after = policy.get_state()
    assert (after["rng"], after["learning_rng"]) == (before["rng"], before["learning_rng"])


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
        policy = make_sac(q={"custom_model": critic}, twin_q=False, update_order=order)
        before = runs(policy)
        policy.learn_on_batch(transitions(policy, 6))
        assert runs(policy) - before == 2  # on actions of the batch, and of the actor


def test_targets_follow_an_update_by_tau():
    policy = shaken(make_sac(lr=0.1, tau=0.25))
    before = policy.get_state()["target_weights"]
    replay(policy, transitions(policy), moves_targets=False)
    assert_equal(policy.get_state()["target_weights"], before)
    replay(policy, transitions(policy))
    state = policy.get_state()
    critics = [w for key, w in state["weights"].items() if key.startswith("critic/")]
    for key, target, critic in zip(before, before.values(), critics, strict=True):
        expected = 0.25 * critic + 0.75 * target
        np.testing.assert_allclose(state["target_weights"][key], expected, rtol=1e-4, atol=1e-6)


# -- the temperature -------------------------------------------------------------------------


def test_the_temperature_starts_at_initial_alpha_and_moves_towards_the_target_entropy():
    policy = make_sac(initial_alpha=0.2, entropy_lr=0.1, target_entropy=5.0)  # unreachable
    stats = policy.learn_on_batch(transitions(policy))["learner_stats"]
    assert stats["alpha_value"] == pytest.approx(0.2)
    assert policy.learn_on_batch(transitions(policy))["learner_stats"]["alpha_value"] > 0.2
    policy.set_hyperparameter("target_entropy", -50.0)
    for _ in range(30):
        stats = policy.learn_on_batch(transitions(policy))["learner_stats"]
    assert (stats["target_entropy"], stats["alpha_value"] < 0.2) == (-50.0, True)


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
        PPOConfig().training(optimization={})
    assert "optimization" not in PPOConfig()
    with pytest.raises(TypeError, match="'actor_lr' is given under two names"):
        config.training(actor_lr=1.0, optimization={"actor_learning_rate": 2.0})


# -- acting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", ["tf", "onnx"])
def test_sixty_four_actors_act_in_one_stacked_call_as_one_by_one(inference):
    together, apart = PolicyMap(capacity=100), PolicyMap(capacity=100)
    for policies in (together, apart):
        policies.update({f"p{i}": make_sac(seed=i, inference=inference) for i in range(64)})
    obs = {name: rows_of(OBS, 1 + i % 3, seed=i) for i, name in enumerate(together)}
    result = together.compute_actions(obs)
    for name, rows in obs.items():
        np.testing.assert_allclose(
            result[name].actions, apart[name].compute_actions(rows).actions, atol=1e-5
        )
    traces = together["p0"].program.functions.traces
    assert {name: n for name, n in traces.items() if n != 1} == {}


def test_only_what_acts_is_sent_where_nobody_learns():
    policy = make_sac()
    layout = policy.program.layout
    assert {slot.part for slot in layout.get_slots("model", "filter")} == {"model"}
    assert policy.model.count_params() == 3 * 4 + 4 + 4 * 4 + 4


# -- models ---------------------------------------------------------------------------------------


class CustomCritic(keras.Model):
    def __init__(self, observation_space, num_outputs, **kwargs):
        super().__init__()
        self.hidden, self.value = keras.layers.Dense(3, "tanh"), keras.layers.Dense(num_outputs)

    def call(self, inputs):
        joined = keras.ops.concatenate([inputs["obs"], inputs["actions"]], axis=-1)
        return self.value(self.hidden(joined))[:, 0]


@pytest.mark.parametrize("values", [build_critic, CustomCritic, "custom critic"])
def test_critics_and_actors_may_be_custom_models(values):
    register_model("custom critic", build_critic)
    actor = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    policy = make_sac(model={"custom_model": actor}, q={"custom_model": values})
    critics = [w for key, w in policy.get_weights().items() if key.startswith("critic/")]
    assert sum(w.size for w in critics) == 2 * (5 * 3 + 3 + 3 + 1)
    assert (critics[0] != critics[4]).any()  # they share no weights
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)


def build_linear_critic(observation_space, num_outputs):
    obs = keras.Input((3,), name="obs")
    return keras.Model(obs, keras.layers.Dense(num_outputs)(obs))


def test_custom_critics_of_discrete_actions_give_a_value_for_each():
    actor = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    policy = make_discrete_sac(
        model={"custom_model": actor}, q={"custom_model": build_linear_critic}
    )
    critics = [w for key, w in policy.get_weights().items() if key.startswith("critic/")]
    assert [w.shape for w in critics] == [(3, 3), (3,), (3, 3), (3,)]
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)
    with pytest.raises(ModelError, match=r"one value per action, \[B, 3\].*\[B, 2\]"):
        make_discrete_sac(q={"custom_model": lambda space, n: build_linear_critic(space, 2)})


def test_critics_that_only_share_a_name_have_different_programs():
    policies = []
    for width in (3, 4):
        register_model("changing", partial(build_critic, width=width))
        policies.append(make_sac(q={"custom_model": "changing"}))
    assert policies[0].program is not policies[1].program
    assert len(policies[1].get_weights()["critic/layer_0/bias"]) == 4


@pytest.mark.parametrize(
    ("q", "message"),
    [
        ({"use_lstm": True}, r"q_model_config\['use_lstm'\] must be False for SACTF2Policy"),
        ({"fcnet_hidden": [3]}, "is not a model setting"),
        ({"custom_model": keras.Sequential([keras.layers.Dense(1)])}, "must be a factory"),
        ({"custom_model": lambda space, n: keras.Sequential([keras.layers.Dense(1)])}, "be called"),
        ({"custom_model": lambda space, n: build_critic(space, 2)}, r"one value per row.*\[B, 2\]"),
    ],
)
def test_critics_that_do_not_fit_are_named(q, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        make_sac(q=q)


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
        make_sac(images, model={"conv_filters": [[2, 8, 8]]}, q=q)


def test_an_actor_may_have_one_standard_deviation_for_all_rows():
    policy = make_sac(model={"free_log_std": True})
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)
    inputs = policy.compute_actions(rows_of(OBS, 4)).extras["action_dist_inputs"]
    assert (inputs[:, 2:] == inputs[0, 2:]).all()


def test_without_normalised_actions_the_gaussian_is_not_squashed():
    policy = make_sac(normalize_actions=False)
    assert [kind.__name__ for kind in policy.dist_class.leaf_classes] == ["DiagGaussian"]
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)


def test_a_distribution_for_boxes_changes_nothing_and_one_for_all_spaces_is_refused():
    class Whole(WholeSpaceDistribution):
        @classmethod
        def for_space(cls, space, settings, **arguments):
            return ActionDistribution(space, (cls,))

    policy = make_discrete_sac(model={"custom_action_dist": "deterministic"})
    assert policy.dist_class.leaf_classes == (Categorical,)
    rule = r"SACTF2Policy: .*custom_action_dist'\] must be None for Discrete actions; got .*Whole"
    with pytest.raises(ConfigError, match=rule):
        make_discrete_sac(model={"custom_action_dist": Whole})


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
    for make in (make_sac, make_td3):
        with pytest.raises(UnsupportedSpaceError, match=f"{words}.*wrappers.TransformAction"):
            make(actions=box)
    with pytest.raises(UnsupportedSpaceError, match="normalize_actions=False, clip_actions=True"):
        make_sac(actions=box)
    policy = shaken(make_sac(actions=box, normalize_actions=False, clip_actions=True))
    session = policy.session(200)
    batches = [10 * rows_of(OBS, 200, i) for i in range(3)]
    actions = np.concatenate([session.act(obs, explore=False) for obs in batches])
    assert all(action in box for action in actions)
    unbounded = np.isinf(low) | np.isinf(high)
    assert np.abs(actions[:, unbounded]).max() > 1.5


def test_bounds_that_are_very_far_apart_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(off_policy, "_classes_warned_of_width", set())
    for bound in (499.0, 1000.0, 2000.0):
        make_sac(actions=spaces.Box(-bound, bound, (2,)))
    (message,) = [x.getMessage() for x in caplog.records]
    assert message.startswith(
        "Environment: the bounds of dimension 0 of its action space are [-1000, 1000]"
    )


def test_weights_of_only_the_actor_leave_the_critics():
    policy, other = shaken(make_sac()), shaken(make_sac(), seed=5)
    actor = {k: w for k, w in other.get_weights().items() if "/layer" not in k}
    before = policy.get_state()
    policy.set_weights(actor)
    after = policy.get_state()
    assert_equal({k: after["weights"][k] for k in actor}, actor)
    rest = [k for k in before["weights"] if k not in actor]
    assert_equal(*({k: x["weights"][k] for k in rest} for x in (before, after)))
    assert_equal(before["target_weights"], after["target_weights"])
