"""SAC with Discrete actions: losses and gradients by NumPy, masks, runtimes, exports, learning."""

import math

import keras
import numpy as np
import pytest
from gymnasium import spaces

from algorithms.test_dqn import MASKED, THREE, transitions
from algorithms.test_sac import sac
from helpers.continuous_actions import measure_weight_files, mlp, shaken
from helpers.environments import TwoArmsEnv
from helpers.factories import OBS, assert_close, assert_equal, rows_of
from helpers.marks import telling
from tfpolicies import SACConfig, SACTF1Policy, SACTF2Policy
from tfpolicies.errors import ConfigError, ModelError
from tfpolicies.models.distributions import ActionDistribution, Categorical, WholeSpaceDistribution
from tfpolicies.testing import check_policy

pytestmark = pytest.mark.usefixtures("kept_programs")


def discrete(obs=OBS, actions=THREE, **config):
    return sac(obs, actions, **config)


class Reference:
    """The losses of a policy's weights, as the paper has them, in float64."""

    def __init__(self, policy, batch, weights=None):
        state = policy.get_state()
        self.weights = {k: np.float64(w) for k, w in (weights or state["weights"]).items()}
        self.targets = {k: np.float64(w) for k, w in state["target_weights"].items()}
        self.batch, self.gamma = batch, policy.get_hyperparameter("gamma")

    def log_probs(self, obs):
        logits = mlp([w for k, w in self.weights.items() if "/layer" not in k], obs)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    @staticmethod
    def values(weights, prefix, obs):
        """Returns each critic's values of all actions, `[B, n, c]`."""
        mine = [(k, w) for k, w in weights.items() if k.startswith(prefix)]
        ways = [[w for k, w in mine if ("#" in k) == other] for other in (False, True)]
        return np.stack([mlp(way, obs) for way in ways if way], axis=-1)

    def losses(self, target_entropy, targets=None):
        batch, log_alpha = self.batch, self.weights["temperature/layer_0/log_alpha"]
        alpha, rows = np.exp(log_alpha), np.arange(len(self.batch["rewards"]))
        if targets is None:
            logp = self.log_probs(batch["new_obs"])
            after = self.values(self.targets, "critic_target/", batch["new_obs"]).min(-1)
            soft = (np.exp(logp) * (after - alpha * logp)).sum(-1)
            targets = batch["rewards"] + self.gamma * (1 - batch["terminateds"]) * soft
        values = self.values(self.weights, "critic/", batch["obs"])
        self.q, self.targets_of_rows = values[rows, batch["actions"]], targets
        size = np.abs(self.q - targets[:, None])
        huber = np.where(size <= 1, 0.5 * size**2, size - 0.5)
        critic = (batch["weights"][:, None] * huber).mean(0).sum()
        logp = self.log_probs(batch["obs"])
        share = np.exp(logp)
        actor = (share * (alpha * logp - values.min(-1))).sum(-1).mean()
        temperature = -log_alpha * ((share * logp).sum(-1) + target_entropy).mean()
        return np.array([actor, critic, temperature])


# -- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "twin_q", "entropy"),
    telling(
        [(SACTF2Policy, True, "auto"), (SACTF1Policy, True, 0.3), (SACTF2Policy, False, 0.3)],
        (SACTF2Policy, True, "auto"),
    ),
)
def test_losses_and_statistics_are_those_of_the_paper(cls, twin_q, entropy):
    policy = shaken(discrete(cls=cls, twin_q=twin_q, target_entropy=entropy, gamma=0.9))
    batch = transitions(policy, 30)
    batch["weights"] = np.linspace(0.5, 1.5, 30).astype(np.float32)
    reference = Reference(policy, batch)
    wanted_entropy = 0.98 * math.log(3) if entropy == "auto" else 0.3
    actor, critic, temperature = reference.losses(wanted_entropy)
    size = np.abs(reference.q - reference.targets_of_rows[:, None])
    assert (size > 1).any()  # both branches of the Huber loss
    assert (size < 1).any()
    result = policy.learn_on_batch(batch)
    expected = {
        "actor_loss": actor,
        "critic_loss": critic / (2 if twin_q else 1),
        "alpha_loss": temperature,
        "target_entropy": wanted_entropy,
        "mean_q": reference.q[:, 0].mean(),
        "mean_td_error": size.mean(),
    }
    for name, value in expected.items():
        assert result["learner_stats"][name] == pytest.approx(value, rel=2e-4, abs=2e-4), name
    np.testing.assert_allclose(result["td_error"], size.mean(-1), rtol=1e-3, atol=1e-3)


def test_each_gradient_is_that_of_its_own_loss_alone_by_finite_differences():
    policy = shaken(discrete(gamma=0.9))
    batch = transitions(policy, 12)
    gradients, _ = policy.compute_gradients(batch)
    weights = {k: np.float64(w) for k, w in policy.get_weights().items()}
    fixed = Reference(policy, batch)
    fixed.losses(0.98 * math.log(3))
    step, compared = 1e-5, 0
    for (key, value), gradient in zip(weights.items(), gradients, strict=True):
        own = {"critic": 1, "temperature": 2}.get(key.partition("/")[0], 0)
        for at in list(np.ndindex(*value.shape))[:7]:
            sides = []
            for sign in (1, -1):
                moved = {**weights, key: np.array(value)}
                moved[key][at] += sign * step
                losses = Reference(policy, batch, moved).losses(
                    0.98 * math.log(3), fixed.targets_of_rows
                )
                sides.append(losses[own])
            difference = (sides[0] - sides[1]) / (2 * step)
            assert gradient[at] == pytest.approx(difference, rel=2e-3, abs=2e-4), (key, at)
            compared += 1
    assert compared > 40


def test_with_critics_first_the_actor_learns_from_the_updated_ones():
    config = {"gamma": 0.9, "lr": 0.1}
    policy, twin = (
        shaken(discrete(**config, **more)) for more in ({"update_order": "critics_first"}, {})
    )
    batch, before = transitions(policy, 30), policy.get_weights()
    result, other = (each.learn_on_batch(batch)["learner_stats"] for each in (policy, twin))
    after = policy.get_weights()
    critics = {key: w for key, w in after.items() if key.startswith("critic/")}
    assert_close(critics, {key: twin.get_weights()[key] for key in critics}, 1e-6)
    entropy = 0.98 * math.log(3)
    actor_loss = Reference(policy, batch, {**before, **critics}).losses(entropy)[0]
    assert result["actor_loss"] == pytest.approx(actor_loss, rel=2e-4, abs=2e-4)
    assert abs(result["actor_loss"] - other["actor_loss"]) > 0.01
    assert result["critic_loss"] == pytest.approx(other["critic_loss"], rel=1e-5)


def test_forbidden_actions_have_no_part_in_the_means():
    policy = shaken(discrete(MASKED))
    batch = transitions(policy, 4)
    batch["terminateds"][:] = False
    for name in ("obs", "new_obs"):
        batch[name]["action_mask"] = np.array([[1, 0, 0]] * 4, np.int8)
    batch["actions"] = np.zeros(4, np.int64)
    plain = {k: np.asarray(v) for k, v in batch.items() if k not in ("obs", "new_obs")}
    plain |= {name: batch[name]["observations"] for name in ("obs", "new_obs")}
    reference = Reference(policy, plain)
    reference.losses(0.0)
    after = reference.values(reference.targets, "critic_target/", plain["new_obs"])[:, 0].min(-1)
    targets = (
        plain["rewards"] + policy.get_hyperparameter("gamma") * after
    )  # the only action has no entropy
    expected = np.abs(reference.q - targets[:, None]).mean(-1)
    result = policy.learn_on_batch(batch)
    np.testing.assert_allclose(result["td_error"], expected, rtol=1e-3, atol=1e-3)
    values = reference.values(reference.weights, "critic/", plain["obs"])[:, 0].min(-1)
    assert result["learner_stats"]["actor_loss"] == pytest.approx(-values.mean(), rel=1e-3)
    batch["obs"]["action_mask"][:] = 0
    gradients, _ = policy.compute_gradients(batch)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_nothing_is_drawn_while_it_learns():
    policy = discrete()
    before = policy.get_state()
    policy.learn_on_batch(transitions(policy))
    after = policy.get_state()
    assert (after["rng"], after["learning_rng"]) == (before["rng"], before["learning_rng"])


# -- what acts ------------------------------------------------------------------------------------


@pytest.mark.core
def test_one_seed_gives_one_sequence_of_actions_on_all_runtimes():
    ways = {"tf": SACTF2Policy, "onnx": SACTF2Policy, "session": SACTF1Policy}
    batches = [rows_of(OBS, n, seed=n) for n in (1, 4, 7, 1)]
    results = {}
    for way, cls in ways.items():
        policy = shaken(discrete(cls=cls, inference="onnx" if way == "onnx" else "tf"))
        results[way] = np.concatenate([policy.compute_actions(x).actions for x in batches])
    np.testing.assert_array_equal(results["onnx"], results["tf"])
    np.testing.assert_array_equal(results["session"], results["tf"])
    assert set(results["tf"]) == {0, 1, 2}


@pytest.mark.parametrize("onnx", telling([None, True], True))
def test_an_export_holds_the_actor_alone(onnx, tmp_path):
    policy = shaken(discrete(MASKED, q={"fcnet_hiddens": [200, 200]}))
    assert policy.export_model(tmp_path, onnx=onnx).parity.largest_difference < 1e-4
    assert max(measure_weight_files(tmp_path)) < 4 * 200 * 200 / 2


@pytest.mark.soak
@pytest.mark.parametrize("cls", [SACTF2Policy, SACTF1Policy])
def test_it_keeps_the_contract_of_policies(cls):
    check_policy(discrete(MASKED, cls=cls))


@pytest.mark.core
def test_a_policy_goes_on_from_its_checkpoint_to_the_bit(tmp_path):
    policy = discrete(lr=0.01)
    policy.driver.learning.replay(transitions(policy), 6, np.array([True]))
    policy.export_checkpoint(tmp_path)
    loaded = SACTF2Policy.from_checkpoint(tmp_path)
    for each in (policy, loaded):
        each.driver.learning.replay(transitions(each, seed=3), 6, np.array([True]))
    one, other = policy.get_state(), loaded.get_state()
    for part in ("weights", "target_weights", "_optimizer_variables"):
        assert_equal(one[part], other[part])


# -- models ---------------------------------------------------------------------------------------


def own_critic(observation_space, num_outputs):
    place = keras.Input((3,), name="obs")
    return keras.Model(place, keras.layers.Dense(num_outputs)(place))


def test_actor_and_critics_of_ones_own():
    actor = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    policy = discrete(model={"custom_model": actor}, q={"custom_model": own_critic})
    critics = [w for key, w in policy.get_weights().items() if key.startswith("critic/")]
    assert [w.shape for w in critics] == [(3, 3), (3,), (3, 3), (3,)]
    assert policy.learn_on_batch(transitions(policy))["td_error"].shape == (6,)
    with pytest.raises(ModelError, match=r"one value per action, \[B, 3\].*\[B, 2\]"):
        discrete(q={"custom_model": lambda space, n: own_critic(space, 2)})


def test_a_distribution_for_boxes_changes_nothing_and_one_for_all_spaces_is_refused():
    class Whole(WholeSpaceDistribution):
        @classmethod
        def for_space(cls, space, settings, **arguments):
            return ActionDistribution(space, (cls,))

    policy = discrete(model={"custom_action_dist": "deterministic"})
    assert policy.dist_class.leaf_classes == (Categorical,)
    rule = r"SACTF2Policy: .*custom_action_dist'\] must be None for Discrete actions; got .*Whole"
    with pytest.raises(ConfigError, match=rule):
        discrete(model={"custom_action_dist": Whole})


@pytest.mark.parametrize(
    "space",
    [spaces.Dict(place=OBS, mode=THREE), spaces.Box(0, 255, (10, 10, 3), np.uint8)],
    ids=["dict", "image"],
)
def test_critics_of_all_actions_take_every_observation(space):
    policy = discrete(space, model={"post_fcnet_hiddens": [4]})
    result = policy.learn_on_batch(transitions(policy))
    assert np.isfinite(list(result["learner_stats"].values())).all()


# -- training -------------------------------------------------------------------------------------


@pytest.mark.soak
def test_it_learns_which_arm_is_better():
    config = SACConfig().environment(lambda context: TwoArmsEnv())
    config.training(
        lr=0.01,
        model={"fcnet_hiddens": [16]},
        q_model_config={"fcnet_hiddens": [16]},
        train_batch_size=32,
        training_intensity=32,
        target_entropy=0.1,
        num_steps_sampled_before_learning_starts=0,
        replay_buffer_config={"capacity": 5000},
    )
    config.rollouts(num_envs_per_worker=4, rollout_fragment_length=4)
    algorithm = config.debugging(seed=0, log_level="ERROR").build()
    for _ in range(20):
        result = algorithm.train()
    assert result["episode_reward_mean"] > 0.8
