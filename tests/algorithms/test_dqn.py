"""DQN: the loss and its gradients by hand, targets, masks, n-step rows, settings."""

import itertools

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers.continuous_actions import transitions
from helpers.factories import OBS, assert_equal, rows_of, trajectory
from helpers.marks import telling
from helpers.off_policy import MASKED, THREE, get_q_values, make_dqn, make_q_stats
from tfpolicies import DQNConfig, DQNTF1Policy
from tfpolicies.errors import ConfigError, MissingColumnError, ModelError
from tfpolicies.testing import check_policy

pytestmark = pytest.mark.usefixtures("kept_programs")

COLUMNS = ("obs", "actions", "rewards", "new_obs", "terminateds", "weights")
LOWEST = np.finfo(np.float32).min


def make_pair(scale=1, **config):
    """Returns a policy, and one whose network is the target network of the first."""
    policy, target = make_dqn(**config), make_dqn(seed=5, **config)
    for each in (policy, target):
        each.set_weights([scale * w for w in each.get_weights().values()])
    weights = list(target.get_weights().values())
    policy.set_state({**policy.get_state(), "target_weights": weights})
    return policy, target


def get_td_errors(policy, target, batch, discount):
    """Returns the value of the chosen action of each row, and its error."""
    rows = np.arange(batch.count)
    after = get_q_values(target, batch["new_obs"])
    chooser = get_q_values(policy, batch["new_obs"]) if policy.config["double_q"] else after
    targets = discount * (1 - batch["terminateds"]) * after[rows, chooser.argmax(-1)]
    chosen = get_q_values(policy, batch["obs"])[rows, batch["actions"]]
    return chosen, chosen - batch["rewards"] - targets


# -- loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("double_q", "dueling"),
    telling(itertools.product([True, False], repeat=2), (True, True), (False, False)),
)
def test_the_td_error_is_that_of_the_papers(double_q, dueling):
    config = {"double_q": double_q, "dueling": dueling, "gamma": 0.9}
    policy, target = make_pair(scale=30, **config)  # so that the values differ much
    batch = transitions(policy, 30)
    choices = [get_q_values(x, batch["new_obs"]).argmax(-1) for x in (policy, target)]
    assert (choices[0] != choices[1]).any()  # double Q-learning makes a difference
    chosen, expected = get_td_errors(policy, target, batch, 0.9)
    actual = policy.compute_td_error(*(batch[name] for name in COLUMNS))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert (actual.dtype, policy.num_grad_updates) == (np.float32, 0)
    result = policy.learn_on_batch(batch)
    np.testing.assert_allclose(result["td_error"], expected, rtol=1e-4, atol=1e-4)
    stats = make_q_stats(chosen, expected)
    assert result["learner_stats"] == pytest.approx(stats, rel=1e-4, abs=1e-4)


@pytest.mark.core
@pytest.mark.parametrize("loss", ["huber", "mse"])
def test_gradients_are_those_of_the_weighted_mean_by_hand(loss):
    policy = make_dqn(
        model={"fcnet_hiddens": []}, hiddens=[], dueling=False, td_error_loss_fn=loss, gamma=0.5
    )
    batch = transitions(policy, 9)
    batch["rewards"] *= 3  # beyond the bend of the Huber loss, too
    batch["weights"] = np.linspace(0.2, 2.0, 9).astype(np.float32)
    kernel, bias = policy.get_weights().values()
    q, after = batch["obs"] @ kernel + bias, batch["new_obs"] @ kernel + bias
    targets = batch["rewards"] + 0.5 * (1 - batch["terminateds"]) * after.max(-1)
    rows = np.arange(9)
    error = q[rows, batch["actions"]] - targets
    assert (np.abs(error) > 1).any()
    assert (np.abs(error) < 1).any()
    slope = np.clip(error, -1, 1) if loss == "huber" else 2 * error
    d_q = (batch["weights"] * slope / 9)[:, None] * np.eye(2)[batch["actions"]]
    policy.set_hyperparameter("grad_clip", None)
    gradients, info = policy.compute_gradients(batch)
    np.testing.assert_allclose(gradients[0], batch["obs"].T @ d_q, atol=1e-5)
    np.testing.assert_allclose(gradients[1], d_q.sum(0), atol=1e-5)
    assert info["learner_stats"]["mean_td_error"] == pytest.approx(error.mean(), rel=1e-4)
    np.testing.assert_allclose(info["td_error"], error, rtol=1e-4)
    policy.set_hyperparameter("grad_clip", 0.01)
    for gradient in policy.compute_gradients(batch)[0]:  # each by its norm
        assert np.linalg.norm(gradient) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.core
def test_a_duelling_network_adds_the_value_to_centred_advantages():
    policy = make_dqn(actions=THREE, model={"fcnet_hiddens": []}, hiddens=[])
    paths = [variable.path for variable in policy.model.variables]
    assert paths == ["advantage_out/kernel", "advantage_out/bias", "value_out/kernel",
                     "value_out/bias"]  # fmt: skip
    rng = np.random.default_rng(1)
    weights = [rng.normal(size=w.shape) for w in policy.get_weights().values()]
    policy.set_weights(weights)
    obs = rows_of(OBS, 5)
    advantage, value = obs @ weights[0] + weights[1], obs @ weights[2] + weights[3]
    expected = value + advantage - advantage.mean(-1, keepdims=True)
    extras = policy.compute_actions(obs, explore=False).extras
    np.testing.assert_allclose(extras["q_values"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(extras["q_values"], extras["action_dist_inputs"])


def test_layers_are_named_after_their_part():
    for policy, names in (
        (make_dqn(), {"fc_1", "advantage_1", "advantage_out", "value_1", "value_out"}),
        (make_dqn(dueling=False), {"fc_1", "q_1", "q_out"}),
    ):
        assert {variable.path.partition("/")[0] for variable in policy.model.variables} == names


# -- masks ----------------------------------------------------------------------------------------


@pytest.mark.core
def test_masked_actions_count_neither_in_the_mean_nor_in_the_maximum():
    policy = make_dqn(MASKED, THREE, model={"fcnet_hiddens": []}, hiddens=[], gamma=0.5)
    weights = [5 * rows_of(spaces.Box(-9, 9, w.shape, np.float32), 1, seed=i)[0]
               for i, w in enumerate(policy.get_weights().values())]  # fmt: skip
    policy.set_weights(weights)
    mask = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1]], np.int8)
    obs = rows_of(OBS, 4)
    advantage, value = obs @ weights[0] + weights[1], obs @ weights[2] + weights[3]
    mean = (advantage * mask).sum(-1, keepdims=True) / mask.sum(-1, keepdims=True)
    expected = np.where(mask, value + advantage - mean, LOWEST)
    masked = {"observations": obs, "action_mask": mask}
    out = policy.compute_actions(masked, explore=False)
    np.testing.assert_allclose(out.extras["q_values"], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(out.actions, expected.argmax(-1))
    random = policy.compute_actions(masked, explore=True, timestep=0).actions  # epsilon is 1
    assert mask[np.arange(4), random].all()
    rewards, ends = np.zeros(4, np.float32), np.zeros(4)
    actual = policy.compute_td_error(masked, out.actions, rewards, masked, ends, np.ones(4))
    np.testing.assert_allclose(actual, 0.5 * expected.max(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss", ["huber", "mse"])
def test_a_state_without_allowed_actions_is_worth_nothing_and_teaches_nothing(loss):
    policy = make_dqn(MASKED, THREE, td_error_loss_fn=loss)
    nothing = {"observations": rows_of(OBS, 2), "action_mask": np.zeros((2, 3), np.int8)}
    batch = transitions(policy, 2)
    batch["rewards"] = np.array([1.0, 2.0], np.float32)
    batch["obs"]["action_mask"][:] = 1
    batch["new_obs"] = nothing
    q = get_q_values(policy, batch["obs"])[np.arange(2), batch["actions"]]
    result = policy.learn_on_batch(batch)
    np.testing.assert_allclose(result["td_error"], q - [1, 2], atol=1e-4)
    batch["obs"] = nothing
    gradients, _ = policy.compute_gradients(batch)
    assert all((gradient == 0).all() for gradient in gradients)


# -- n-step rows ----------------------------------------------------------------------------------


@pytest.mark.core
def test_n_step_rows_sum_rewards_and_reach_further():
    policy = make_dqn(n_step=3, gamma=0.5)
    batch = trajectory(policy, 5)
    batch["rewards"] = np.array([1, 2, 4, 8, 16], np.float32)
    reached = batch["new_obs"].copy()
    assert policy.postprocess_trajectory(batch) is batch
    assert batch["rewards"].tolist() == [3, 6, 12, 16, 16]
    assert batch["n_steps"].tolist() == [3, 3, 3, 2, 1]
    assert batch["terminateds"].tolist() == [False, False, True, True, True]
    assert batch["weights"].tolist() == [1] * 5
    np.testing.assert_array_equal(batch["new_obs"], reached[[2, 3, 4, 4, 4]])


@pytest.mark.core
def test_gamma_is_raised_to_the_number_of_summed_rewards():
    policy, target = make_pair(n_step=3, gamma=0.5)
    batch = transitions(policy, 6)
    batch["n_steps"] = np.array([1, 2, 3, 1, 2, 3], np.int32)
    _, expected = get_td_errors(policy, target, batch, np.array([0.5, 0.25, 0.125] * 2))
    np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], expected, atol=1e-5)
    del batch["n_steps"]
    with pytest.raises(MissingColumnError, match="n_steps"):
        policy.learn_on_batch(batch)


def test_one_step_rows_get_weights_alone():
    policy = make_dqn()
    batch = trajectory(policy, 4)
    before = set(batch)
    policy.postprocess_trajectory(batch)
    assert set(batch) - before == {"weights"}


# -- the target network ---------------------------------------------------------------------------


@pytest.mark.core
def test_the_target_follows_by_tau_and_zero_is_respected():
    policy, other = make_pair(tau=0.25)
    online, target = policy.get_weights(), other.get_weights()
    for tau, share, atol in ((0, 0.0, 0), (None, 0.25, 1e-6), (1.0, 1.0, 0)):
        policy.update_target(tau)
        result = policy.get_state()["target_weights"].values()
        for actual, q, t in zip(result, online.values(), target.values(), strict=True):
            np.testing.assert_allclose(actual, share * q + (1 - share) * t, 10 * atol, atol)
    with pytest.raises(ConfigError, match="tau must be a number in"):
        policy.update_target(1.5)
    assert_equal(policy.get_weights(), online)
    never = make_dqn(tau=0.0)
    never.update_target()
    assert never.get_hyperparameter("tau") == 0.0


@pytest.mark.core
def test_learning_leaves_the_target_alone_and_states_restore_it():
    policy = make_dqn(lr=0.1)
    start = policy.get_state()["target_weights"]
    policy.learn_on_batch(transitions(policy))
    state = policy.get_state()
    assert_equal(state["target_weights"], start)
    other = make_dqn(seed=9, lr=0.1)
    other.set_state(state)
    assert_equal(other.get_state()["target_weights"], start)
    batch = transitions(policy, seed=3)
    np.testing.assert_array_equal(
        policy.learn_on_batch(batch)["td_error"], other.learn_on_batch(batch)["td_error"]
    )
    other.set_weights(policy.get_weights())  # foreign weights begin in both networks
    target = other.get_state()["target_weights"].values()
    assert all((a == b).all() for a, b in zip(target, policy.get_weights().values(), strict=True))


def test_online_and_target_network_see_observations_through_one_filter():
    policy, target = make_pair(observation_filter="MeanStdFilter")
    rows = 50 + 9 * rows_of(OBS, 100)
    for each in (policy, target):
        each.filter.observe([rows])
        each.driver.learning.flush_filters()
    batch = transitions(policy, 9)
    batch["obs"], batch["new_obs"] = rows[:9], rows[1:10]
    gamma = policy.get_hyperparameter("gamma")
    _, expected = get_td_errors(policy, target, batch, gamma)
    actual = policy.compute_td_error(*(batch[name] for name in COLUMNS[:-1]))
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], expected, atol=1e-4)


# -- learning -------------------------------------------------------------------------------------


def test_rows_that_fill_up_a_minibatch_do_not_count():
    one, other = make_dqn(jit_compile=True), make_dqn()
    batch = transitions(one, 7)
    stats = [
        policy.learn_epochs(batch, 1, size, shuffle=False)["learner_stats"]
        for policy, size in ((one, 16), (other, 7))
    ]
    for name, value in stats[0].items():
        assert value == pytest.approx(stats[1][name], rel=1e-4, abs=1e-6), name


def test_epsilon_follows_the_timestep_that_is_given():
    policy = make_dqn(
        exploration_config={"initial_epsilon": 1.0, "final_epsilon": 0.0, "epsilon_timesteps": 100}
    )
    obs = rows_of(OBS, 1000)
    greedy = policy.compute_actions(obs, explore=False).actions
    for timestep, share in ((0, 0.5), (50, 0.75), (100, 1.0), (10_000, 1.0)):
        agree = (policy.compute_actions(obs, timestep=timestep).actions == greedy).mean()
        assert agree == pytest.approx(share, abs=0.06), timestep
    policy.on_global_var_update({"timestep": 100})
    out = policy.compute_actions(obs)
    np.testing.assert_array_equal(out.actions, greedy)
    assert (out.extras["action_logp"] == 0).all()
    assert (out.extras["action_prob"] == 1).all()


def test_graph_mode_computes_the_same():
    settings = {"tau": 0.5, "lr": 0.01}
    traced, graph = make_dqn(**settings), make_dqn(cls=DQNTF1Policy, **settings)
    batch = transitions(traced, 12)
    results = []
    for policy in (traced, graph):
        policy.learn_epochs(batch, 1, 4, shuffle=False)
        policy.update_target()
        errors = policy.learn_on_batch(batch)["td_error"]
        again = policy.compute_td_error(*(batch[name] for name in COLUMNS))
        target = policy.get_state()["target_weights"]
        results.append([errors, again, get_q_values(policy, batch["obs"]), *target.values()])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_it_keeps_the_contract_of_policies():
    check_policy(make_dqn(), exports=False)


# -- models and exports ---------------------------------------------------------------------------


def test_a_custom_model_gives_the_values_itself():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    policy = make_dqn(model={"custom_model": model}, hiddens=[7])
    kernel, bias = policy.get_weights().values()
    obs = rows_of(OBS, 3)
    np.testing.assert_allclose(get_q_values(policy, obs), obs @ kernel + bias, atol=1e-5)
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)


def test_images_go_through_convolutions():
    space = spaces.Box(0, 255, (10, 10, 3), np.uint8)
    policy = make_dqn(space)
    assert {v.path.partition("/")[0] for v in policy.model.variables} >= {"conv_1", "advantage_1"}
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)


# -- settings ------------------------------------------------------------------------------------


def test_a_custom_model_that_reads_earlier_rows_is_refused():
    def remembers(observation_space, num_outputs):
        obs = keras.Input((3,), name="obs")
        before = keras.Input((2,), name="prev_actions")
        x = keras.layers.Concatenate()([obs, before])
        return keras.Model({"obs": obs, "prev_actions": before}, keras.layers.Dense(2)(x))

    with pytest.raises(ModelError, match="single transitions"):
        make_dqn(model={"custom_model": remembers})


def test_a_fragment_must_not_be_shorter_than_n_step():
    config = DQNConfig().training(n_step=3)
    config.validate()
    with pytest.raises(ConfigError, match="must not be smaller than n_step=3"):
        config.rollouts(rollout_fragment_length=2).validate()


def test_defaults_are_those_of_the_contract():
    config = DQNConfig()
    assert (config.lr, config.train_batch_size, config.grad_clip) == (5e-4, 32, 40)
    assert (config.n_step, config.double_q, config.dueling) == (1, True, True)
    assert (config.hiddens, config.training_intensity) == ([256], None)
    assert (config.target_network_update_freq, config.tau, config.adam_epsilon) == (500, 1.0, 1e-8)
    assert config.num_steps_sampled_before_learning_starts == 1000
    assert config.min_sample_timesteps_per_iteration == 1000
    assert config.replay_buffer_config == {
        "type": "MultiAgentPrioritizedReplayBuffer",
        "capacity": 50_000,
        "prioritized_replay_alpha": 0.6,
        "prioritized_replay_beta": 0.4,
        "prioritized_replay_eps": 1e-6,
    }
    assert config.rollout_fragment_length == "auto"
    assert config.get_fragment_length() == 1
    assert config.evaluation_config == {"explore": False}
    assert config.exploration_config == {
        "type": "EpsilonGreedy",
        "initial_epsilon": 1.0,
        "final_epsilon": 0.02,
        "epsilon_timesteps": 10_000,
    }


def test_exploration_settings_are_merged_unless_the_type_changes():
    config = DQNConfig().exploration(exploration_config={"epsilon_timesteps": 500})
    assert config.exploration_config["type"] == "EpsilonGreedy"
    assert config.exploration_config["epsilon_timesteps"] == 500
    assert config.exploration_config["final_epsilon"] == 0.02
    config.exploration(exploration_config={"type": "SoftQ", "temperature": 0.5})
    assert config.exploration_config == {"type": "SoftQ", "temperature": 0.5}
