"""The parts of Rainbow: distributions of returns on atoms, noisy layers, and their combinations."""

import itertools

import keras
import numpy as np
import pytest
from gymnasium import spaces

from helpers.continuous_actions import transitions
from helpers.factories import OBS, assert_equal, rows_of, varied
from helpers.marks import telling
from helpers.off_policy import (
    MASKED,
    RAINBOW,
    THREE,
    get_q_values,
    make_dqn,
    make_q_stats,
    make_rainbow,
)
from tfpolicies import DQNConfig, DQNTF1Policy, DQNTF2Policy
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.catalog.layers import NoisyDense
from tfpolicies.models.distributions import MASKED_LOGIT, Categorical
from tfpolicies.models.distributions.action_values import AtomValues
from tfpolicies.models.q_learning import atom_errors, atom_targets, project_distribution
from tfpolicies.policy_map.stacked_acting import compute_actions
from tfpolicies.testing import check_policy

pytestmark = pytest.mark.usefixtures("kept_programs")

ATOMS = {name: RAINBOW[name] for name in ("num_atoms", "v_min", "v_max")}
LINEAR = {"model": {"fcnet_hiddens": []}, "hiddens": []}
FIVE = np.linspace(-2.0, 2.0, 5, dtype=np.float32)


def greedy_epsilon(value):
    return {"exploration_config": {"type": "EpsilonGreedy", "epsilon_schedule": value}}


# -- the projection -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [
        (0.0, 1.0, [0.1, 0.2, 0.3, 0.4, 0.0]),  # where it was
        (1.0, 1.0, [0.0, 0.1, 0.2, 0.3, 0.4]),  # from atom to atom
        (0.25, 1.0, [0.075, 0.175, 0.275, 0.375, 0.1]),  # a quarter of each to the right
        (5.0, 1.0, [0.0, 0.0, 0.0, 0.0, 1.0]),  # beyond the last atom
        (-5.0, 1.0, [1.0, 0.0, 0.0, 0.0, 0.0]),
        (-0.5, 0.0, [0.0, 0.5, 0.5, 0.0, 0.0]),  # the reward alone, between two atoms
        (0.0, 0.5, [0.0, 0.2, 0.6, 0.2, 0.0]),  # -1, -1/2, 0, 1/2
    ],
)
def test_a_moved_distribution_is_shared_by_the_nearest_atoms(reward, discount, expected):
    before = np.array([[0.1, 0.2, 0.3, 0.4, 0.0]], np.float32)
    rows = np.array([reward], np.float32), np.array([discount], np.float32)
    actual = project_distribution(before, *rows, FIVE).numpy()
    np.testing.assert_allclose(actual, [expected], atol=1e-6)


def test_the_projection_is_that_of_the_papers_loop():
    rng = np.random.default_rng(0)
    atoms, step = np.linspace(-10, 10, 51), 0.4
    before = rng.dirichlet(np.ones(51), 40)
    rewards, discounts = rng.normal(scale=6, size=40), rng.uniform(0, 1, 40)
    expected = np.zeros_like(before)
    for row, j in itertools.product(range(40), range(51)):  # Bellemare et al. 2017, algorithm 1
        moved = np.clip(rewards[row] + discounts[row] * atoms[j], -10, 10)
        at = (moved + 10) / step
        low, high = int(np.floor(at)), int(np.ceil(at))
        if low == high:
            expected[row, low] += before[row, j]
        else:
            expected[row, low] += before[row, j] * (high - at)
            expected[row, high] += before[row, j] * (at - low)
    inputs = [np.asarray(x, np.float32) for x in (before, rewards, discounts, atoms)]
    actual = project_distribution(*inputs).numpy()
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    np.testing.assert_allclose(actual.sum(-1), 1.0, atol=1e-5)


@pytest.mark.parametrize(
    ("v_min", "v_max", "count"),
    [(1e7, 1e7 + 10.0, 51), (1e7, 1e7 + 50.0, 51), (-1e38, 1e38, 5), (0.0, 1e-37, 5)],
)
def test_projected_distributions_sum_to_one_wherever_the_atoms_are(v_min, v_max, count):
    atoms = np.linspace(v_min, v_max, count, dtype=np.float32)
    rng, width = np.random.default_rng(0), v_max - v_min
    before = rng.dirichlet(np.ones(count), 40).astype(np.float32)
    rewards = (rng.uniform(-1.0, 1.0, 40) * width).astype(np.float32)
    discounts = rng.choice([0.0, 0.9, 1.0], 40).astype(np.float32)
    result = project_distribution(before, rewards, discounts, atoms).numpy()
    np.testing.assert_allclose(result.sum(axis=-1), 1.0, atol=1e-5)
    assert (result >= 0.0).all()
    stays = project_distribution(
        before, np.zeros(40, np.float32), np.ones(40, np.float32), atoms
    ).numpy()
    np.testing.assert_allclose(stays, before, atol=1e-6)


def test_where_no_action_is_allowed_nothing_comes_after_and_nothing_is_learned():
    logits = np.full((1, 2, 5), MASKED_LOGIT, np.float32)
    one = np.ones(1, np.float32)
    target = atom_targets(one, one, logits, logits[..., 0], FIVE).numpy()
    np.testing.assert_allclose(target, [[0, 0, 0, 1, 0]], atol=1e-6)
    assert atom_errors(logits, np.zeros(1, int), target).numpy().tolist() == [0.0]


# -- distributions --------------------------------------------------------------------------------


def test_the_value_of_an_action_is_the_mean_of_its_atoms():
    kind = AtomValues(spaces.Discrete(2), (Categorical,), 3, 0.0, 4.0, False)
    logits = np.log([[0.5, 0.25, 0.25, 0.25, 0.25, 0.5]]).astype(np.float32)
    np.testing.assert_allclose(kind.compute_inputs(logits), [[1.5, 2.5]], atol=1e-6)
    forbidden = kind.apply_mask(logits, np.array([[1, 0]]))
    np.testing.assert_allclose(kind.compute_inputs(forbidden), [[1.5, MASKED_LOGIT]])
    assert (kind.num_outputs, kind.num_inputs, kind.mask_size, kind.noise_size) == (6, 2, 2, 2)


def test_a_mask_takes_forbidden_actions_out_of_the_mean_of_each_atom():
    policy = varied(make_dqn(MASKED, THREE, **LINEAR, **ATOMS))
    advantage_w, advantage_b, value_w, value_b = policy.get_weights().values()
    obs = rows_of(OBS, 4)
    mask = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1]], np.int8)
    advantage = (obs @ advantage_w + advantage_b).reshape(4, 3, 5)
    value = (obs @ value_w + value_b)[:, None]
    allowed = mask[:, :, None]
    mean = (advantage * allowed).sum(1, keepdims=True) / allowed.sum(1, keepdims=True)
    logits = value + advantage - mean
    share = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.where(mask, (share * FIVE).sum(-1), MASKED_LOGIT)
    out = policy.compute_actions({"observations": obs, "action_mask": mask}, explore=False)
    np.testing.assert_allclose(out.extras["q_values"], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out.actions, expected.argmax(-1))


@pytest.mark.parametrize(
    ("double_q", "dueling"),
    telling(itertools.product([True, False], repeat=2), (True, True)),
)
def test_the_error_is_the_cross_entropy_of_the_projected_target(double_q, dueling):
    config = {"double_q": double_q, "dueling": dueling, "gamma": 0.9, **ATOMS}
    policy, target = varied(make_dqn(**config)), varied(make_dqn(seed=5, **config), seed=2)
    weights = list(target.get_weights().values())
    policy.set_state({**policy.get_state(), "target_weights": weights})
    batch = transitions(policy, 30)

    def shares(each, obs):
        outputs = each._compute_outputs(each.driver.acting.state, obs).numpy()
        logits = outputs.reshape(-1, 2, 5).astype(np.float64)
        return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    rows = np.arange(30)
    after = shares(target, batch["new_obs"])
    chooser = (shares(policy, batch["new_obs"]) if double_q else after) @ FIVE
    discounts = 0.9 * (1 - batch["terminateds"]).astype(np.float32)
    best = after[rows, chooser.argmax(-1)].astype(np.float32)
    expected = project_distribution(best, batch["rewards"], discounts, FIVE).numpy()
    present = shares(policy, batch["obs"])
    expected = -(expected * np.log(present[rows, batch["actions"]])).sum(-1)
    columns = ("obs", "actions", "rewards", "new_obs", "terminateds", "weights")
    actual = policy.compute_td_error(*(batch[name] for name in columns))
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    chosen = get_q_values(policy, batch["obs"])[rows, batch["actions"]]
    np.testing.assert_allclose(chosen, (present @ FIVE)[rows, batch["actions"]], atol=1e-5)
    result = policy.learn_on_batch(batch)
    np.testing.assert_allclose(result["td_error"], expected, rtol=1e-4)
    stats = make_q_stats(chosen, expected)
    assert result["learner_stats"] == pytest.approx(stats, rel=1e-4, abs=1e-5)


def test_gradients_of_logits_are_what_they_say_minus_what_they_should():
    policy = varied(make_dqn(**LINEAR, dueling=False, grad_clip=None, **ATOMS))
    batch = transitions(policy, 9)
    batch["terminateds"][:] = True  # so that the target is the reward alone
    batch["weights"] = np.linspace(0.2, 2.0, 9).astype(np.float32)
    kernel, bias = policy.get_weights().values()
    logits = (batch["obs"] @ kernel + bias).reshape(9, 2, 5)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    nothing = np.zeros(9, np.float32)
    target = project_distribution(shares[:, 0], batch["rewards"], nothing, FIVE).numpy()
    weights = np.eye(2)[batch["actions"]] * batch["weights"][:, None] / 9
    slope = (weights[:, :, None] * (shares - target[:, None])).reshape(9, 10)
    gradients, _ = policy.compute_gradients(batch)
    np.testing.assert_allclose(gradients[0], batch["obs"].T @ slope, atol=1e-5)
    np.testing.assert_allclose(gradients[1], slope.sum(0), atol=1e-5)


def test_a_custom_model_gives_the_logits_of_all_atoms():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(10)])
    policy = make_dqn(model={"custom_model": model}, **ATOMS)
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)
    narrow = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ModelError, match="Give its last layer 10 units"):
        make_dqn(model={"custom_model": narrow}, **ATOMS)


# -- noisy layers ---------------------------------------------------------------------------------


def test_a_noisy_layer_disturbs_each_weight_by_its_own_sigma():
    layer = NoisyDense(2, 0.5)
    x = np.array([[1.0, -2.0, 3.0], [0.5, 0.0, -1.0]], np.float32)
    noise = np.array([[4.0, -1.0, 0.25, 9.0, -4.0], [1.0, 1.0, 0.0, 0.0, 1.0]], np.float32)
    layer([x, noise])
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=w.shape).astype(np.float32) for w in layer.get_weights()]
    kernel, bias, kernel_sigma, bias_sigma = weights
    layer.set_weights(weights)
    shaped = np.array([[2.0, -1.0, 0.5, 3.0, -2.0], [1.0, 1.0, 0.0, 0.0, 1.0]])
    for row in range(2):
        of_inputs, of_outputs = shaped[row, :3], shaped[row, 3:]
        disturbed = kernel + kernel_sigma * np.outer(of_inputs, of_outputs)
        expected = x[row] @ disturbed + bias + bias_sigma * of_outputs
        np.testing.assert_allclose(layer([x, noise])[row], expected, rtol=1e-5, atol=1e-5)
        shared = layer([x, noise[row : row + 1]])  # one draw for all rows
        np.testing.assert_allclose(shared[row], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(layer([x, 0 * noise]), x @ kernel + bias)


def test_a_noisy_layer_begins_at_sigma_0_by_the_root_of_its_inputs():
    policy = make_rainbow(hiddens=[16], sigma0=0.8)
    weights = policy.get_weights()
    sigmas = [w for key, w in weights.items() if key.endswith("_sigma")]
    starts = [0.4, 0.4, 0.2, 0.2] * 2  # after 4 features and 16 hidden units
    assert [np.unique(w).item() for w in sigmas] == pytest.approx(starts)
    assert_equal(make_rainbow(hiddens=[16], sigma0=0.8).get_weights(), weights)
    config = keras.saving.serialize_keras_object(policy.model)
    copy = keras.saving.deserialize_keras_object(config)
    assert [v.path for v in copy.variables] == [v.path for v in policy.model.variables]


def test_each_row_acts_with_other_noise_and_greedily_with_the_mean():
    policy = make_rainbow(**greedy_epsilon(0.0))
    obs = np.repeat(rows_of(OBS, 1), 50, axis=0)
    noisy = policy.compute_actions(obs, explore=True).extras["q_values"]
    assert len(np.unique(noisy[:, 0])) == 50
    mean = policy.compute_actions(obs, explore=False).extras["q_values"]
    assert np.ptp(mean[:, 0]) < 1e-6
    quiet = make_rainbow(sigma0=0.0, **greedy_epsilon(0.0))
    result = quiet.compute_actions(obs, explore=True).extras["q_values"]
    np.testing.assert_allclose(result, mean, atol=1e-6)


def test_a_seed_repeats_the_noise_and_each_update_draws_other_noise():
    one, other = make_rainbow(seed=3), make_rainbow(seed=3)
    batch = transitions(one)
    for policy in (one, other):
        policy.compute_actions(batch["obs"], explore=True)
        first = policy.learn_on_batch(batch)["td_error"]
    np.testing.assert_array_equal(
        one.compute_actions(batch["obs"], explore=True).extras["q_values"],
        other.compute_actions(batch["obs"], explore=True).extras["q_values"],
    )
    assert_equal(one.get_weights(), other.get_weights())
    state = one.get_state()
    again = one.learn_on_batch(batch)["td_error"]
    assert np.abs(again - first).max() > 1e-3  # far more than one small step changes
    one.set_state(state)
    np.testing.assert_array_equal(one.learn_on_batch(batch)["td_error"], again)


def noisy_loss(policy, batch, noise):
    """Returns the loss of a linear noisy network without duelling and atoms, in float64.

    Args:
        policy: whose weights are those of the online network.
        batch: terminated transitions.
        noise: `[5]` of the online network, for 3 inputs and 2 actions.
    """
    kernel, bias, kernel_sigma, bias_sigma = policy.get_weights().values()
    shaped = np.sign(noise) * np.sqrt(np.abs(noise))
    kernel = kernel + kernel_sigma * np.outer(shaped[:3], shaped[3:])
    q = batch["obs"].astype(np.float64) @ kernel + bias + bias_sigma * shaped[3:]
    chosen = q[np.arange(len(q)), batch["actions"]]
    errors = np.square(chosen - batch["rewards"])  # below 1
    return 0.5 * np.mean(batch["weights"] * errors)


def test_gradients_of_means_and_sigmas_are_finite_differences():
    policy = make_dqn(
        model={"fcnet_hiddens": []}, hiddens=[], dueling=False, noisy=True, grad_clip=None
    )
    batch = transitions(policy, 9)
    batch["terminateds"][:] = True
    batch["rewards"] = np.clip(batch["rewards"], -0.2, 0.2)
    rng = np.random.default_rng()
    rng.bit_generator.state = policy.driver.acting.state.learning_rng.bit_generator.state
    noise = rng.standard_normal((1, 15), np.float32)[0, :5].astype(np.float64)
    gradients, _ = policy.compute_gradients(batch)
    start = policy.get_weights()
    for gradient, (key, values) in zip(gradients, start.items(), strict=True):
        for at in np.ndindex(values.shape):
            sides = []
            for step in (1e-2, -1e-2):
                moved = values.copy()
                moved[at] += step
                policy.set_weights({**start, key: moved})
                sides.append(noisy_loss(policy, batch, noise))
            slope = (sides[0] - sides[1]) / 2e-2
            assert gradient[at] == pytest.approx(slope, abs=2e-5), (key, at)


def test_the_noise_of_convolutions_features_is_as_wide_as_they_are():
    space = spaces.Box(0, 255, (13, 11, 2), np.uint8)
    policy = make_rainbow(space, model={"conv_filters": [[4, 3, 2], [5, [3, 2], [2, 1]]]})
    assert policy.compute_actions(rows_of(space, 2), explore=True).actions.shape == (2,)


# -- all combinations -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("atoms", "noisy", "dueling", "double_q", "n_step"),
    telling(
        [
            (5, True, True, True, 3),
            (1, True, False, False, 1),
            (1, True, True, True, 1),
            (5, True, False, False, 1),
            (5, False, False, True, 3),
            (5, False, True, False, 1),
        ],
        (5, True, True, True, 3),
    ),
)
def test_each_part_goes_with_each_other(atoms, noisy, dueling, double_q, n_step):
    parts = {"num_atoms": atoms, "noisy": noisy, "dueling": dueling, "double_q": double_q}
    policy = make_rainbow(n_step=n_step, lr=0.01, v_min=-6.0, v_max=6.0, **parts)
    batch = transitions(policy, 12)
    batch["n_steps"] = np.full(12, n_step, np.int32)
    start = np.mean(np.square(policy.learn_on_batch(batch)["td_error"]))
    for _ in range(60):
        result = policy.learn_on_batch(batch)
    assert np.mean(np.square(result["td_error"])) < start
    assert result["td_error"].shape == (12,)


def test_one_seed_acts_alike_on_all_runtimes():
    obs = rows_of(OBS, 6)
    results = []
    for config in ({}, {"inference": "onnx"}, {"cls": DQNTF1Policy}):
        policy = make_rainbow(**config, **greedy_epsilon(0.2))
        outputs = [policy.compute_actions(obs, explore=True) for _ in range(5)]
        actions = np.concatenate([x.actions for x in outputs])
        before = np.concatenate([x.extras["q_values"] for x in outputs])
        policy.learn_on_batch(transitions(policy))
        after = policy.compute_actions(obs, explore=True).extras["q_values"]
        results.append([actions, before, after])
    for actions, before, after in results[1:]:
        np.testing.assert_array_equal(actions, results[0][0])
        np.testing.assert_allclose(before, results[0][1], atol=1e-5)
        np.testing.assert_allclose(after, results[0][2], atol=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("cls", [DQNTF2Policy, DQNTF1Policy])
def test_a_policy_with_all_parts_keeps_its_contract(cls):
    check_policy(make_rainbow(MASKED, THREE, cls=cls, inference="auto"))


@pytest.mark.core
@pytest.mark.parametrize("onnx", [None, True])
@pytest.mark.parametrize("parts", [{}, RAINBOW], ids=["plain", "all parts"])
def test_exports_give_values_and_are_greedy(parts, onnx, tmp_path):
    result = make_dqn(MASKED, THREE, **parts).export_model(tmp_path, onnx=onnx)
    assert result.parity.largest_difference < 1e-4
    assert '"q_values"' in next(tmp_path.rglob("policy_spec.json")).read_text()


def test_many_noisy_policies_act_in_one_call():
    policies = {str(i): make_rainbow(seed=i, **greedy_epsilon(0.1 * i)) for i in range(3)}
    copies = {name: policy.copy() for name, policy in policies.items()}
    for name, policy in copies.items():
        policy.set_state(policies[name].get_state())
    obs = {name: rows_of(OBS, 3, seed=i) for i, name in enumerate(policies)}
    together = compute_actions(policies, obs, explore=True)
    assert policies["0"].program.inference.get_stacked_runtime("tf") is not None
    for name, policy in copies.items():
        alone = policy.compute_actions(obs[name], explore=True)
        np.testing.assert_array_equal(together[name].actions, alone.actions)
        np.testing.assert_allclose(
            together[name].extras["q_values"], alone.extras["q_values"], atol=1e-5
        )


# -- refusals ------------------------------------------------------------------------------------


def test_noise_needs_the_network_that_is_built_and_no_other_disturbance():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(10)])
    with pytest.raises(ConfigError, match="noisy=True needs the network that DQN builds"):
        make_rainbow(model={"custom_model": model})
    with pytest.raises(ConfigError, match="both add noise to the weights"):
        make_rainbow(exploration_config={"type": "ParameterNoise"})
    with pytest.raises(ConfigError, match="exploration_config must be a dict"):
        make_rainbow(exploration_config={"type": np.array(["a", "b"])})


def test_defaults_are_those_of_rllib():
    config = DQNConfig()
    assert (config.num_atoms, config.v_min, config.v_max) == (1, -10.0, 10.0)
    assert (config.noisy, config.sigma0) == (False, 0.5)
    assert config.training(noisy=True).exploration_config["final_epsilon"] == 0.02
    config.training(num_atoms=51, v_min=1e7, v_max=1e7 + 50)
    config.training(num_atoms=1, v_min=1e7, v_max=1e7 + 1e-3)  # which has no atoms


def test_policies_of_the_same_parts_share_a_program():
    one, same, other = make_rainbow(), make_rainbow(seed=7, lr=0.1), make_rainbow(v_max=3.0)
    assert one.program is same.program
    assert one.program is not other.program
