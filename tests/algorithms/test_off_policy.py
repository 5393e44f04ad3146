"""Behaviour that SAC, TD3, DDPG and DQN share: updates, noise, rates, exports, refusals."""

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers.actor_critic_references import DiscreteSACReference, SACReference, TD3Reference
from helpers.continuous_actions import (
    assert_updates_agree,
    measure_weight_files,
    shaken,
    transitions,
)
from helpers.factories import OBS, PLANE, TWO, assert_close, rows_of, trajectory
from helpers.marks import telling
from helpers.off_policy import (
    MASKED,
    RAINBOW,
    assert_equal_states,
    build_critic,
    make_ddpg,
    make_discrete_sac,
    make_dqn,
    make_sac,
    make_td3,
    replay,
)
from tfpolicies import (
    DDPGConfig,
    DDPGTF1Policy,
    DQNConfig,
    DQNTF2Policy,
    SACConfig,
    SACTF1Policy,
    SACTF2Policy,
    TD3Config,
    TD3TF1Policy,
    TD3TF2Policy,
)
from tfpolicies.errors import ConfigError, UnsupportedSpaceError
from tfpolicies.testing import check_policy

pytestmark = pytest.mark.usefixtures("kept_programs")

REFERENCES = {
    make_sac: SACReference,
    make_discrete_sac: DiscreteSACReference,
    make_td3: TD3Reference,
}
GRAPH_CLASSES = {
    make_sac: SACTF1Policy,
    make_discrete_sac: SACTF1Policy,
    make_td3: TD3TF1Policy,
    make_ddpg: DDPGTF1Policy,
}
BOX_ACTIONS = pytest.mark.parametrize("make", [make_sac, make_td3])
UNIFORM = {"type": "MultiAgentReplayBuffer"}
PRIORITIZED = {"type": "MultiAgentPrioritizedReplayBuffer"}


# -- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (make_sac, {"twin_q": True}),
        (make_sac, {"twin_q": False}),
        (make_discrete_sac, {}),
        (make_td3, {}),
        (make_td3, {"use_huber": True, "twin_q": False, "l2_reg": 0.1}),
    ],
)
def test_gradients_are_those_of_each_networks_loss_by_finite_differences(make, settings):
    policy = shaken(make(gamma=0.9, **settings))
    batch = transitions(policy, 12)
    reference = REFERENCES[make](policy, batch)
    targets = reference.get_targets()  # no gradient goes through them
    gradients, _ = policy.compute_gradients(batch)
    step, compared = 1e-5, 0
    for (key, weights), gradient in zip(reference.weights.items(), gradients, strict=True):
        network = {"critic": 1, "temperature": 2}.get(key.partition("/")[0], 0)
        for at in list(np.ndindex(*weights.shape))[:7]:
            losses = []
            for sign in (1, -1):
                changed = np.array(weights)
                changed[at] += sign * step
                moved = reference.with_weights({**reference.weights, key: changed})
                losses.append(moved.get_losses(targets)[network])
            slope = (losses[0] - losses[1]) / (2 * step)
            assert gradient[at] == pytest.approx(slope, rel=2e-3, abs=2e-4), (key, at)
            compared += 1
    assert compared > (30 if make is make_td3 else 40)


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (make_sac, {"td_error_loss_fn": "mse"}),
        (make_sac, {"td_error_loss_fn": "mse", "jit_compile": True}),
        (make_sac, {"td_error_loss_fn": "mse", "cls": SACTF1Policy}),
        (make_discrete_sac, {}),
        (make_td3, {"l2_reg": 0.1, "jit_compile": True}),
        (make_td3, {"l2_reg": 0.1, "cls": DDPGTF1Policy}),
    ],
)
def test_with_critics_first_the_actor_learns_from_updated_critics(make, config):
    config = {"gamma": 0.9, "lr": 0.1, **config}
    policy = shaken(make(update_order="critics_first", **config))
    together = shaken(make(**config))
    batch, before = transitions(policy, 30), policy.get_weights()
    reference = REFERENCES[make](policy, batch)
    stats, other = (each.learn_on_batch(batch)["learner_stats"] for each in (policy, together))
    after = policy.get_weights()
    critics = {key: w for key, w in after.items() if key.startswith("critic/")}
    same = [*critics, *(key for key in after if key.startswith("temperature/"))]
    assert_close(*({key: x[key] for key in same} for x in (after, together.get_weights())), 1e-6)
    assert stats["critic_loss"] == pytest.approx(other["critic_loss"], rel=1e-5)
    updated = {**before, **critics}
    actor_loss = reference.with_weights(updated).get_losses(np.zeros(30))[0]
    assert stats["actor_loss"] == pytest.approx(actor_loss, rel=2e-4, abs=2e-4)
    difference = abs(stats["actor_loss"] - other["actor_loss"])
    assert difference > (0.002 if make is make_td3 else 0.01)

    stepped = shaken(make(**config))  # steps from the updated critics, with alpha as it was
    stepped.set_weights(updated)
    stepped.learn_on_batch(batch)
    actor = [key for key in before if key not in same]
    assert_close(*({key: x[key] for key in actor} for x in (after, stepped.get_weights())), 1e-5)


@BOX_ACTIONS
def test_terminated_rows_are_worth_their_reward_and_truncated_ones_are_bootstrapped(make):
    policy = shaken(make(gamma=0.9))
    batch = transitions(policy, 6)
    for terminated in (True, False):
        batch["terminateds"] = np.full(6, terminated)
        batch["truncateds"] = ~batch["terminateds"]
        targets = batch["rewards"] if terminated else None
        expected = REFERENCES[make](policy, batch).get_td_errors(targets)
        np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], expected, atol=1e-4)


@BOX_ACTIONS
def test_n_step_rows_are_discounted_by_their_number_of_rewards(make):
    policy = shaken(make(n_step=3, gamma=0.5))
    assert policy.postprocess_trajectory(trajectory(policy, 5))["n_steps"].tolist() == [
        3, 3, 3, 2, 1]  # fmt: skip
    batch = transitions(policy, 6)
    batch["n_steps"] = np.array([1, 2, 3] * 2, np.int32)
    reference = REFERENCES[make](policy, batch)
    expected = reference.get_td_errors(reference.get_targets(0.5 ** batch["n_steps"]))
    np.testing.assert_allclose(policy.learn_on_batch(batch)["td_error"], expected, atol=1e-4)


# -- updates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", telling([False, True], False))
@pytest.mark.parametrize(
    ("make", "config"), [(make_sac, {"lr": 0.01}), (make_td3, {}), (make_dqn, {"lr": 0.01})]
)
def test_many_updates_in_one_call_are_the_updates_one_by_one(make, config, jit):
    assert_updates_agree(*(make(tau=0.5, jit_compile=x, **config) for x in (jit, False)))


@pytest.mark.parametrize(
    ("make", "one", "other", "structure"),
    [
        (make_sac, {"critic_lr": 0.1}, {"tau": 0.5, "target_entropy": -1.0}, {"twin_q": False}),
        (make_td3, {"target_noise": 0.1}, {"tau": 0.5, "l2_reg": 0.5}, {"policy_delay": 3}),
        (make_dqn, {"lr": 0.1, "tau": 1.0}, {"lr": 0.2, "tau": 0.1}, {"double_q": False}),
    ],
)
def test_policies_that_differ_in_numbers_share_one_trace(make, one, other, structure):
    policies = [make(gamma=0.9, **one), make(gamma=0.5, **other)]
    assert policies[0].program is policies[1].program
    for policy in policies:
        policy.learn_on_batch(transitions(policy))
    assert policies[0].program.functions.traces["learn_once"] == 1
    assert make(**structure).program is not policies[0].program


@pytest.mark.parametrize(
    ("make", "names"),
    [(make_sac, ("actor_lr", "critic_lr", "entropy_lr")), (make_td3, ("actor_lr", "critic_lr"))],
)
def test_networks_without_a_rate_learn_at_lr(make, names):
    def get_rates(policy):
        return [policy.get_hyperparameter(name) for name in names]

    policy = make(lr=0.5, critic_lr=0.0)
    assert get_rates(policy) == [0.5, 0.0, 0.5][: len(names)]
    before = policy.get_weights()
    stats = policy.learn_on_batch(transitions(policy))["learner_stats"]
    assert (stats["cur_actor_lr"], stats["cur_critic_lr"]) == (0.5, 0.0)
    after = policy.get_weights()
    moved = {key.partition("/")[0] for key in after if (after[key] != before[key]).any()}
    assert "layer_0" in moved
    assert "critic" not in moved
    assert ("temperature" in moved) == ("entropy_lr" in names)
    policy.set_hyperparameter("lr", 0.25)
    assert get_rates(policy) == [0.25, 0.0, 0.25][: len(names)]
    policy.set_hyperparameter("actor_lr", 0.125)
    assert get_rates(policy) == [0.125, 0.0, 0.25][: len(names)]
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    assert get_rates(make(lr=schedule, critic_lr=0.25)) == [0.5, 0.25, 0.5][: len(names)]
    policy = make(lr_schedule=[[0, 1.0], [100, 0.0]], critic_lr=0.5)
    policy.on_global_var_update({"timestep": 75})
    assert get_rates(policy) == [0.25, 0.5, 0.25][: len(names)]


# -- acting and exports ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [*telling([make_sac, make_discrete_sac], make_sac, make_discrete_sac), make_td3, make_ddpg],
)
def test_one_seed_gives_one_sequence_of_actions_on_all_runtimes(make):
    runtimes = {"tf": {}, "onnx": {"inference": "onnx"}, "session": {"cls": GRAPH_CLASSES[make]}}
    batches = [rows_of(OBS, n, seed=n) for n in (1, 4, 7, 1)]
    results = {}
    for name, config in runtimes.items():
        policy = shaken(make(**config))
        actions = [policy.compute_actions(x).actions for x in batches]
        policy.on_global_var_update({"timestep": 20_000})  # from here on TD3 is greedy, and noise
        actions += [policy.compute_actions(x).actions for x in batches]
        results[name] = np.concatenate(actions)
    atol = 0.0 if make is make_discrete_sac else 1e-5
    for name in ("onnx", "session"):
        np.testing.assert_allclose(results[name], results["tf"], 0.0, atol, err_msg=name)
    if make is make_discrete_sac:
        assert set(results["tf"]) == {0, 1, 2}
    else:
        assert np.abs(results["tf"]).max() <= 1
        assert results["tf"].std(0).min() > 0.1


@BOX_ACTIONS
def test_learning_draws_from_a_generator_of_its_own(make):
    one, other = make(), make()
    replay(other, transitions(other))
    other.set_weights(one.get_weights())
    obs = rows_of(OBS, 5)
    np.testing.assert_array_equal(one.compute_actions(obs)[0], other.compute_actions(obs)[0])


@pytest.mark.core
@pytest.mark.parametrize("onnx", [None, True])
@pytest.mark.parametrize(
    ("make", "config"),
    [
        (make_sac, {"model": {"fcnet_hiddens": [64, 64]}, "q": {"fcnet_hiddens": [256, 256]}}),
        (make_discrete_sac, {"obs": MASKED, "q": {"fcnet_hiddens": [200, 200]}}),
        (make_td3, {"actor_hiddens": [64, 64], "critic_hiddens": [256, 256]}),
    ],
    ids=["sac", "discrete sac", "td3"],
)
def test_exports_hold_only_the_actor(make, config, onnx, tmp_path):
    policy = shaken(make(**config))
    assert policy.export_model(tmp_path, onnx=onnx).parity.largest_difference < 1e-4
    sizes = {key: w.nbytes for key, w in policy.get_weights().items()}
    learning = ("critic/", "temperature/")
    actor = sum(size for key, size in sizes.items() if not key.startswith(learning))
    assert sum(sizes.values()) > 20 * actor
    for size in measure_weight_files(tmp_path):  # two signatures share one set of variables
        assert actor <= size
        assert size < (2 * actor if make is not make_discrete_sac else 4 * 200 * 200 / 2)


@pytest.mark.parametrize(
    ("make", "space"),
    [
        (make_sac, spaces.Dict(place=OBS, mode=spaces.Discrete(3))),
        (make_sac, spaces.Box(0, 255, (10, 10, 3), np.uint8)),
        (make_sac, spaces.Tuple([OBS, OBS])),
        (make_discrete_sac, spaces.Dict(place=OBS, mode=spaces.Discrete(3))),
        (make_discrete_sac, spaces.Box(0, 255, (10, 10, 3), np.uint8)),
        (make_td3, spaces.Dict(place=OBS, mode=spaces.Discrete(3))),
    ],
)
def test_actors_and_critics_take_every_observation(make, space):
    config = {"model": {"post_fcnet_hiddens": [4]}} if make is make_discrete_sac else {}
    policy = make(space, **config)
    result = policy.learn_on_batch(transitions(policy))
    assert result["td_error"].shape == (6,)
    assert np.isfinite(list(result["learner_stats"].values())).all()
    actions = policy.compute_actions(rows_of(space, 2)).actions
    assert actions.shape == (2, *policy.action_space.shape)


@pytest.mark.parametrize(
    ("make", "config"),
    telling(
        [
            (make_sac, {"lr": 0.01, "q": {"custom_model": build_critic}}),
            (make_discrete_sac, {"lr": 0.01}),
            (make_td3, {"actor_lr": 0.01}),
            (make_dqn, {"lr": 0.1, "tau": 0.5}),
            (make_dqn, {"lr": 0.01, "tau": 0.5, **RAINBOW}),
        ],
        (make_discrete_sac, {"lr": 0.01}),
        (make_dqn, {"lr": 0.1, "tau": 0.5}),
    ),
)
def test_policies_resume_from_their_checkpoint_to_the_bit(make, config, tmp_path):
    policy = make(**config)
    replay(policy, transitions(policy))
    policy.export_checkpoint(tmp_path)
    loaded = type(policy).from_checkpoint(
        tmp_path, config={"q_model_config": config["q"]} if "q" in config else None
    )
    assert_equal_states(policy.get_state(), loaded.get_state())
    batch = transitions(policy, 18, seed=3)
    for each in (policy, loaded):
        each.compute_actions(batch["obs"])
        replay(each, batch, 3)
    assert_equal_states(policy.get_state(), loaded.get_state())
    np.testing.assert_array_equal(*(x.compute_actions(batch["obs"])[0] for x in (policy, loaded)))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("make", "config"),
    [
        (make_sac, {}),
        (make_sac, {"cls": SACTF1Policy}),
        (make_discrete_sac, {"obs": MASKED}),
        (make_discrete_sac, {"obs": MASKED, "cls": SACTF1Policy}),
        (make_td3, {}),
        (make_td3, {"cls": TD3TF1Policy}),
        (make_ddpg, {}),
    ],
)
def test_policies_keep_their_contract(make, config):
    check_policy(make(**config))


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "model", "message"),
    [
        (make_sac, {"use_gru": True}, r"model\['use_gru'\] must be False for SACTF2Policy"),
        (
            make_sac,
            {"custom_action_dist": "deterministic"},
            r"SACTF2Policy: .* must transform normal noise",
        ),
        (make_td3, {"use_lstm": True}, r"model\['use_lstm'\] must be False for TD3TF2Policy"),
        (
            make_td3,
            {"custom_action_dist": "squashed_gaussian"},
            "must be deterministic for TD3TF2Policy",
        ),
        (make_dqn, {"use_lstm": True}, "use_lstm.*must be False"),
        (make_dqn, {"use_gru": True}, "use_gru.*must be False"),
        (make_dqn, {"use_attention": True}, "use_attention.*must be False"),
    ],
)
def test_models_that_do_not_fit_are_refused_by_name(make, model, message):
    with pytest.raises(ConfigError, match=message):
        make(model=model)


SAC_ACTIONS = "Discrete and one-dimensional Boxes of floats"
TD3_ACTIONS = "TD3TF2Policy supports one-dimensional Boxes"
DQN_ACTIONS = "Discrete actions only"


@pytest.mark.parametrize(
    ("policy_class", "space", "message"),
    [
        (SACTF2Policy, spaces.MultiDiscrete([2, 2]), SAC_ACTIONS),
        (SACTF2Policy, spaces.Box(-1, 1, (2, 2)), SAC_ACTIONS),
        (SACTF2Policy, spaces.Box(-1, 1, ()), SAC_ACTIONS),
        (SACTF2Policy, spaces.Box(0, 3, (2,), np.int64), SAC_ACTIONS),
        (SACTF2Policy, spaces.Dict(a=PLANE), SAC_ACTIONS),
        (TD3TF2Policy, TWO, TD3_ACTIONS),
        (TD3TF2Policy, spaces.Box(-1, 1, (2, 2)), TD3_ACTIONS),
        (TD3TF2Policy, spaces.Dict(a=PLANE), TD3_ACTIONS),
        (DQNTF2Policy, PLANE, DQN_ACTIONS),
        (DQNTF2Policy, spaces.MultiDiscrete([2, 2]), DQN_ACTIONS),
        (DQNTF2Policy, spaces.Tuple([TWO]), DQN_ACTIONS),
    ],
)
def test_other_action_spaces_are_refused(policy_class, space, message):
    with pytest.raises(UnsupportedSpaceError, match=message):
        policy_class(OBS, space, {})


SAC_SETTINGS = [
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
]
TD3_SETTINGS = [
    ({"policy_delay": 0}, "policy_delay must be an integer >= 1, got 0"),
    ({"critic_lr": -1.0}, "critic_lr must be None or a number >= 0, got -1.0"),
    ({"target_noise_clip": -0.5}, "target_noise_clip must be a number >= 0, got -0.5"),
    ({"huber_threshold": 0.0}, "huber_threshold must be a number > 0, got 0.0"),
    ({"twin_q": 2}, "twin_q must be True or False, got 2"),
    ({"actor_hiddens": [0]}, "actor_hiddens must be a list of integers >= 1"),
    ({"critic_hidden_activation": 3}, "critic_hidden_activation must be a Keras activation"),
]
DQN_SETTINGS = [
    ({"td_error_loss_fn": "l1"}, "td_error_loss_fn must be one of"),
    ({"n_step": 0}, "n_step must be an integer >= 1"),
    ({"tau": 1.1}, "tau must be a number in"),
    ({"hiddens": [0]}, "hiddens must be a list"),
    ({"training_intensity": 0}, "training_intensity"),
    ({"target_network_update_freq": -1}, "target_network_update_freq"),
    ({"replay_buffer_config": {"capacity": 0}}, "capacity"),
    ({"replay_buffer_config": {"capacty": 9}}, "Did you mean 'capacity'"),
    ({"replay_buffer_config": {"type": "Ring"}}, "type"),
    ({"replay_buffer_config": {"memory_limit_bytes": -1}}, "`memory_limit_bytes` must be"),
    ({"replay_buffer_config": {"storage_path": "/nowhere"}}, "an existing folder"),
    ({"replay_buffer_config": {**UNIFORM, "prioritized_replay_alpha": 0.6}}, "uniformly"),
    ({"replay_buffer_config": {**PRIORITIZED, "prioritized_replay_beta": -1}}, "number >= 0"),
    ({"replay_buffer_config": {**PRIORITIZED, "prioritized_replay_alfa": 1}}, "_alpha'"),
    ({"replay_buffer_config": {"type": dict}}, "must be one of"),
    ({"num_atoms": 0}, "num_atoms must be an integer >= 1"),
    ({"v_min": 10}, "v_min must be less than v_max=10.0, got 10"),
    ({"v_max": float("inf")}, "v_max must be a finite number"),
    ({"sigma0": -1}, "sigma0 must be a number >= 0"),
    ({"noisy": 1}, "noisy must be True or False"),
    (
        {"num_atoms": 51, "v_min": 1e7, "v_max": 1e7 + 10},
        r"v_min, v_max and num_atoms must be numbers whose atoms are at least 1 apart, as "
        r"float32 resolves them, got \[10000000.0, 10000010.0, 51\]",
    ),
    ({"num_atoms": 2, "v_min": 0.0, "v_max": 1e-40}, r"at least 1\.2e-38 apart"),
    ({"num_atoms": 10**400}, "num_atoms must be numbers whose atoms are at least"),
    ({"num_atoms": 2, "v_max": 1e39}, r"v_min and v_max must be at most 1e\+38 in size"),
]


@pytest.mark.core
@pytest.mark.parametrize(
    ("config_class", "settings", "message"),
    [
        *((SACConfig, *case) for case in SAC_SETTINGS),
        *((TD3Config, *case) for case in TD3_SETTINGS),
        *((DDPGConfig, *case) for case in TD3_SETTINGS),
        *((DQNConfig, *case) for case in DQN_SETTINGS),
    ],
)
def test_settings_out_of_their_range_are_refused_and_change_nothing(
    config_class, settings, message
):
    config = config_class()
    with pytest.raises(ConfigError, match=message):
        config.training(**settings)
    assert config == config_class()
