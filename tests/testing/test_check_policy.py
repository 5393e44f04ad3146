"""`check_policy`, on policies that keep the contract and on policies that break each part of it."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from helpers.factories import OBS, PLANE, TWO, assert_equal, make, rows_of
from helpers.marks import telling
from helpers.workers import make_config
from soak.conformance import Combination, make_policy
from tfpolicies import DQNTF2Policy, PGTF2Policy, Policy, PPOTF2Policy
from tfpolicies.errors import PolicyCheckError, UsageError
from tfpolicies.exploration.strategies import EpsilonGreedy
from tfpolicies.models.distributions import DiagGaussian, SquashedGaussian
from tfpolicies.policy.compiled_driver import CompiledDriver, CustomMethodActing
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.testing import check_policy, random_batch
from tfpolicies.testing.environments import MaskedEnv, MemoryEnv, RandomEnv
from tfpolicies.testing.runner import CHECKS

LSTM = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 4}
MASKED = spaces.Dict(observations=OBS, action_mask=spaces.Box(0, 1, (3,), np.int8))
THREE = spaces.Discrete(3)


COVERING = [  # every observation space, every action space and every model; most pairs of the last
    ("box", "discrete", "mlp"),
    ("box2d", "box", "mlp"),
    ("discrete", "multi_discrete", "masked"),
    ("discrete_start", "box_half", "custom"),
    ("multi_discrete", "box_int", "masked"),
    ("multi_binary", "multi_binary", "mlp"),
    ("image", "discrete_start", "cnn"),
    ("dict", "box", "cnn"),
    ("tuple", "nested", "masked"),
    ("dict_of_bits", "discrete_start", "masked"),
    ("dict_of_bits", "nested", "lstm"),
    ("box", "multi_binary", "gru"),
    ("tuple", "box_int", "attention"),
    ("dict", "multi_discrete", "custom"),
]


@pytest.mark.parametrize(("obs", "actions", "model"), telling(COVERING, soak=COVERING[1:]))
def test_the_packages_policies_keep_the_contract(obs, actions, model):
    report = check_policy(make_policy(Combination(obs, actions, model)), exports=False)
    missing = {"memory", "masks", "exports"} - set(report.passes)
    assert {result.check for result in report.results} - set(report.passes) == missing
    assert ("memory" in report.passes) == (model in ("lstm", "gru", "attention"))
    assert ("masks" in report.passes) == (model == "masked")


@pytest.mark.soak
def test_a_policy_with_everything_passes_with_its_export_and_stays_as_it_was():
    model = {**LSTM, "lstm_use_prev_action": True, "lstm_use_prev_reward": True}
    actions = spaces.Dict(arm=PLANE, gear=spaces.Discrete(3, start=1))
    policy = make_tf(PPOTF2Policy, MASKED, actions, model=model, inference="auto")
    session = policy.session(2)
    session.act(rows_of(policy.observation_space, 2))
    before = copy.deepcopy(policy.get_state())
    report = check_policy(policy)
    assert set(report.passes) == set(CHECKS)
    lines = str(report).splitlines()
    assert lines[0] == f"check_policy: {type(policy).__name__}"
    assert "masks: passed (10000 draws)" in lines
    after = policy.get_state()
    assert_equal(after["weights"], before["weights"])
    assert_equal(after["_optimizer_variables"], before["_optimizer_variables"])
    assert after["rng"] == before["rng"]
    assert (after["global_timestep"], after["num_grad_updates"]) == (2, 0)


class Dozing(EpsilonGreedy):
    """A strategy that no file may name."""


DOZING = {"exploration_config": {"type": Dozing, "final_epsilon": 0.5}}


@pytest.mark.parametrize(
    ("cls", "config", "checks"),
    [
        (PGTF2Policy, {}, None),
        (PPOTF2Policy, {"model": LSTM}, ["memory", "batch_invariance", "outputs"]),
        (DQNTF2Policy, {}, ["state", "checkpoint"]),  # has a target network
        (DQNTF2Policy, DOZING, ["state", "checkpoint"]),
    ],
)
def test_policies_of_further_algorithms_and_strategies_pass(cls, config, checks):
    check_policy(make(cls, **config), checks=checks, exports=False)


class LinearPolicy(Policy):
    """A custom linear policy that learns by adding up rewards."""

    def __init__(self, observation_space, action_space, config):
        super().__init__(observation_space, action_space, config)
        self.weights = np.random.default_rng(0).normal(size=(3, 3))
        self.rng = np.random.default_rng(config.get("seed"))

    def scores(self, obs_batch):
        return np.asarray(obs_batch, np.float64) @ self.weights

    def draw_scores(self, obs_batch, explore):
        scores = self.scores(obs_batch)
        return scores + self.rng.gumbel(size=scores.shape) if explore else scores

    def compute_actions(self, obs_batch, state_batches=None, explore=None, **kwargs):
        return ActionBatch(self.draw_scores(obs_batch, explore).argmax(axis=1), [], {})

    def learn_on_batch(self, samples):
        self.weights[:, 0] += samples["rewards"].mean()
        return {}

    def get_weights(self):
        return {"w": self.weights.copy()}

    def set_weights(self, weights):
        self.weights = np.array(weights["w"])

    def get_state(self):
        return {"weights": self.get_weights(), "rng": self.rng.bit_generator.state}

    def set_state(self, state):
        self.set_weights(state["weights"])
        self.rng.bit_generator.state = copy.deepcopy(state["rng"])


@pytest.mark.core
def test_a_custom_policy_is_checked_for_its_abilities():
    report = check_policy(LinearPolicy(OBS, THREE, {"seed": 1}))
    assert set(report.passes) == {
        *("outputs", "action_space", "batch_invariance", "determinism", "aliasing", "state"),
        *("checkpoint", "learning", "untouched"),
    }
    notes = {result.check: result.note for result in report.results}
    assert notes["traces"] == "traces are counted by a Program, and a custom policy has none"


class Remembers(LinearPolicy):
    """Adds up observations in a memory that starts at 1."""

    def get_initial_state(self):
        return [np.ones(3, np.float32)]

    def compute_actions(self, obs_batch, state_batches=None, explore=None, **kwargs):
        after = state_batches[0] + np.asarray(obs_batch, np.float32)
        return ActionBatch(self.scores(after).argmax(axis=1), [after], {})


def test_a_custom_recurrent_state_may_start_anywhere():
    assert "memory" in check_policy(make_custom(Remembers)).passes
    session = make_custom(Remembers).session(2)
    session.act(np.ones((2, 3), np.float32))
    session.reset([1])
    assert session.recurrent_state.get_state()["state_0"].tolist() == [[2, 2, 2], [1, 1, 1]]


def get_failures(policy, **options):
    with pytest.raises(PolicyCheckError) as caught:
        check_policy(policy, **{"exports": False, **options})
    return str(caught.value)


def get_failed_checks(message):
    return [line.partition(":")[0] for line in message.splitlines() if ": expected" in line]


class WrongDtype(LinearPolicy):
    def compute_actions(self, *args, **kwargs):
        acted = super().compute_actions(*args, **kwargs)
        return acted._replace(actions=acted.actions.astype(np.float64))


class OutOfSpace(LinearPolicy):
    def to_env_action(self, action, **kwargs):
        return action + 1


class LooksAtTheBatch(LinearPolicy):
    def scores(self, obs_batch):
        obs = np.asarray(obs_batch, np.float64)
        return super().scores(obs - obs.mean(axis=0)) if len(obs) else super().scores(obs)


class GlobalNoise(LinearPolicy):
    def compute_actions(self, obs_batch, state_batches=None, explore=None, **kwargs):
        self.rng.random()
        noise = np.random.default_rng().gumbel(size=(len(obs_batch), 3)) if explore else 0.0
        return ActionBatch((self.scores(obs_batch) + noise).argmax(axis=1), [], {})


class Forgets(PPOTF2Policy):
    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        fresh = [np.zeros_like(part) for part in state_batches]
        return super().compute_actions(obs_batch, fresh, **kwargs)


class IgnoresMasks(LinearPolicy):
    def scores(self, obs_batch):
        return super().scores(obs_batch["observations"])


class RespectsMasks(LinearPolicy):
    def draw_scores(self, obs_batch, explore):
        scores = super().draw_scores(obs_batch["observations"], explore)
        return np.where(obs_batch["action_mask"] > 0, scores, -np.inf)


class OtherLikelihoods(PPOTF2Policy):
    def compute_log_likelihoods(self, *args, **kwargs):
        return super().compute_log_likelihoods(*args, **kwargs) - 1


class Overconfident(DiagGaussian):
    """Takes the standard deviation for the variance."""

    def entropy(self):
        return 0.5 * super().entropy()


class Lopsided(DiagGaussian):
    def kl(self, other):
        return super().kl(other) + 1.0


class Shifted(DiagGaussian):
    def sample(self, noise):
        return super().sample(noise + 0.5)


class Wider(SquashedGaussian):
    """Draws from a wider distribution than `logp` says."""

    def sample(self, noise):
        return super().sample(1.5 * noise)

    def sampled_logp(self, noise):
        return super().sampled_logp(1.5 * noise)


class PerComponent(DiagGaussian):
    def entropy(self):
        return tf.repeat(super().entropy()[:, None], 2, axis=1)


class Elsewhere(DiagGaussian):
    def deterministic_sample(self):
        return super().deterministic_sample() + 1.0


class Forgetful(DiagGaussian):
    def sampled_logp(self, noise):
        return super().sampled_logp(0.0 * noise)


class HandsOutItsWeights(LinearPolicy):
    def get_weights(self):
        return {"w": self.weights}


class KeepsWhatItGets(LinearPolicy):
    def set_weights(self, weights):
        self.weights = weights["w"]


class EatsItsArgument(LinearPolicy):
    def set_state(self, state):
        super().set_state(state)
        state.pop("rng")


class WritesIntoObservations(LinearPolicy):
    def scores(self, obs_batch):
        obs_batch[...] *= 1.5
        return super().scores(obs_batch)


class LosesItsGenerator(LinearPolicy):
    def get_state(self):
        return {"weights": self.get_weights()}

    def set_state(self, state):
        self.set_weights(state["weights"])

    def __deepcopy__(self, memo):
        copied = type(self)(self.observation_space, self.action_space, self.config)
        copied.set_weights(self.get_weights())
        return copied


class LosesItsOptimizer(PPOTF2Policy):
    def get_state(self):
        state = super().get_state()
        return {k: v for k, v in state.items() if k != "_optimizer_variables"}


class SavesOldWeights(PPOTF2Policy):
    def export_checkpoint(self, export_dir, *args, **kwargs):
        fresh = type(self)(self.observation_space, self.action_space, self.config)
        state = {**self.get_state(), "weights": fresh.get_weights()}
        super().export_checkpoint(export_dir, *args, policy_state=state, **kwargs)


class LearnsNothing(PPOTF2Policy):
    def apply_gradients_fn(self, optimizer, grads):
        optimizer.apply_gradients([(tf.zeros_like(v), v) for _, v in grads])


class Diverges(PPOTF2Policy):
    def loss(self, model, dist_class, train_batch):
        return super().loss(model, dist_class, train_batch) * float("inf")


class AppliesGradientsEarly(PPOTF2Policy):
    def compute_gradients(self, postprocessed_batch):
        self.set_weights({key: w + 0.1 for key, w in self.get_weights().items()})
        return super().compute_gradients(postprocessed_batch)


class ShiftsItsRows(PPOTF2Policy):
    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        batch = super().postprocess_trajectory(sample_batch, other_agent_batches, episode)
        batch["obs"] = np.roll(batch["obs"], 1, axis=0)
        return batch


class RetracesActing(PPOTF2Policy):
    def compute_actions(self, obs_batch, *args, **kwargs):
        self.program.functions.traces[f"act on {len(obs_batch)} rows"] += 1
        return super().compute_actions(obs_batch, *args, **kwargs)


class DriftingTF2Policy(PPOTF2Policy):
    """Its graph-mode class does something else."""


class DriftingTF1Policy(DriftingTF2Policy):
    def compute_actions(self, *args, **kwargs):
        acted = super().compute_actions(*args, **kwargs)
        acted.extras["vf_preds"] += 1.0
        return acted


class Flipping(CustomMethodActing):
    def act(self, *args, **kwargs):
        actions, columns = super().act(*args, **kwargs)
        return 1 - actions, columns


class FlippingDriver(CompiledDriver):
    def choose_parts(self):
        self.acting = Flipping(self.policy)


class ExportsSomethingElse(PPOTF2Policy):
    _driver_class = FlippingDriver

    def compute_actions(self, *args, **kwargs):
        return super().compute_actions(*args, **kwargs)


class SharesItsWeights(LinearPolicy):
    def __deepcopy__(self, memo):
        return self


def make_tf(cls, obs=OBS, actions=TWO, **config):
    policy = make(cls, obs, actions, lr=0.1, **config)
    rng = np.random.default_rng(0)
    policy.set_weights([w + 0.3 * rng.normal(size=w.shape) for w in policy.get_weights().values()])
    return policy


def make_drawing(dist):
    return make_tf(PPOTF2Policy, actions=PLANE, model={"custom_action_dist": dist})


def make_custom(cls, obs=OBS):
    return cls(obs, THREE, {"seed": 1})


BROKEN = {
    "outputs": (lambda: make_custom(WrongDtype), "return actions as int64"),
    "action_space": (
        lambda: make_custom(OutOfSpace),
        r"env_action\(explore=True\) to be in Discrete",
    ),
    "batch_invariance": (lambda: make_custom(LooksAtTheBatch), "of 12 to give the same by itself"),
    "determinism": (lambda: make_custom(GlobalNoise), "never from global ones"),
    "memory": (
        lambda: make_tf(Forgets, model=LSTM),
        "6 single steps to give the same as one sequence",
    ),
    "masks": (lambda: make_custom(IgnoresMasks, MASKED), r"under the mask \["),
    "log_likelihoods": (lambda: make_tf(OtherLikelihoods), "the action_logp of the same rows"),
    "distribution": (lambda: make_drawing(Overconfident), r"`entropy` to be .* as samples show"),
    "aliasing": (lambda: make_custom(HandsOutItsWeights), "get_weights to return copies"),
    "state": (lambda: make_custom(LosesItsGenerator), "to explore like the original"),
    "checkpoint": (lambda: make_tf(SavesOldWeights), "restore what export_checkpoint saved"),
    "learning": (lambda: make_tf(LearnsNothing), "change at least one weight"),
    "gradients": (lambda: make_tf(AppliesGradientsEarly), "compute_gradients to change nothing"),
    "learner": (lambda: make_tf(ShiftsItsRows), "the same as acting for the same rows"),
    "traces": (lambda: make_tf(RetracesActing), "act on 2 rows': '0 -> "),
    "runtimes": (lambda: make_tf(DriftingTF2Policy), "DriftingTF1Policy to act like Drifting"),
    "exports": (lambda: make_tf(ExportsSomethingElse), "the exported player to act like"),
    "untouched": (lambda: make_custom(SharesItsWeights), "nothing mutable on the class"),
}


def test_there_is_a_broken_policy_for_each_check():
    assert set(BROKEN) == set(CHECKS)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_policy_fails_its_check_with_a_next_step(name):
    build, text = BROKEN[name]
    checks = None if name in ALONE else ["outputs", name]
    checks = ["aliasing", name] if name == "untouched" else checks
    checks = [name] if name == "outputs" else checks
    with pytest.raises(PolicyCheckError, match=text) as caught:
        check_policy(build(), checks=checks, exports=name == "exports")
    message = str(caught.value)
    assert get_failed_checks(message) == [name]
    assert "    got: " in message
    assert "    next step: " in message


ALONE = {"outputs", "action_space", "batch_invariance", "masks"}
"""Checks whose broken policy fails nothing else, so that all checks are run."""


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (KeepsWhatItGets, "set_weights to copy its argument"),
        (EatsItsArgument, "set_state not to change its argument"),
        (WritesIntoObservations, "compute_actions not to change its arguments"),
    ],
)
def test_all_arguments_and_results_are_checked_for_aliasing(cls, text):
    message = get_failures(make_custom(cls), checks=["aliasing"])
    assert text in message
    assert "next step: Copy arrays where they enter and leave the policy" in message


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Lopsided, "`kl` to be .* as samples show"),
        (Shifted, "the mean of q / p over samples of p to be 1"),
        (Wider, "the mean of q / p over samples of p to be 1"),
        (PerComponent, r"`entropy` to give one number for each row, \[B\]"),
        (Elsewhere, "zero noise to give `deterministic_sample`"),
        (Forgetful, r"`sampled_logp\(noise\)` to be `logp\(sample\(noise\)\)`"),
    ],
)
def test_every_part_of_a_distribution_is_checked(kind, text):
    message = get_failures(make_drawing(kind), checks=["distribution"])
    assert re.search(text, message)
    assert "over samples of p, the entropy is the mean of -log p" in message


def test_the_distribution_of_a_policy_that_acts_by_its_own_method_is_checked():
    report = check_policy(make_tf(ExportsSomethingElse), checks=["distribution"])
    assert report.passes == ("distribution",)


def test_a_state_without_the_optimizer_and_diverging_weights_fail():
    message = get_failures(make_tf(LosesItsOptimizer), checks=["state"])
    assert "after one more update" in message
    message = get_failures(make_tf(Diverges), checks=["learning"])
    assert "weights and statistics to stay finite" in message


@pytest.mark.core
def test_all_failures_are_listed_in_one_assertion_error():
    class Broken(WrongDtype, OutOfSpace):
        pass

    message = get_failures(make_custom(Broken), checks=["outputs", "action_space", "memory"])
    assert message.startswith("Broken fails 2 of 3 checks.\n\noutputs: expected ")
    assert get_failed_checks(message) == ["outputs", "action_space"]
    assert issubclass(PolicyCheckError, AssertionError)


def test_an_error_that_a_policy_raises_is_a_failure_with_its_place():
    class Raises(LinearPolicy):
        def scores(self, obs_batch):
            raise RuntimeError("out of ideas")

    message = get_failures(make_custom(Raises), checks=["batch_invariance"])
    assert "expected no error\n    got: RuntimeError: out of ideas" in message
    assert "test_check_policy.py" in message


def test_unknown_checks_are_refused():
    with pytest.raises(UsageError, match="Did you mean 'masks'"):
        check_policy(make_custom(LinearPolicy), checks=["mask"])


def test_checks_do_not_use_the_generators_of_spaces():
    space = spaces.Tuple([spaces.Discrete(1000), spaces.MultiBinary(9)])
    policy = make_tf(PPOTF2Policy, space, inference="onnx")
    space.seed(3)
    expected = space.sample()
    space.seed(3)
    check_policy(policy, exports=False)
    actual = space.sample()
    assert actual[0] == expected[0]
    np.testing.assert_array_equal(actual[1], expected[1])


def test_a_custom_policy_may_respect_masks():
    assert "masks" in check_policy(make_custom(RespectsMasks, MASKED)).passes


def test_a_random_batch_has_the_columns_of_a_sample():
    policy = make_tf(PPOTF2Policy, model=LSTM)
    batch = random_batch(policy, 11, length=4)
    assert batch.count == 11
    assert batch["t"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]
    assert batch["terminateds"].nonzero()[0].tolist() == [3, 10]
    assert batch["truncateds"].nonzero()[0].tolist() == [7]
    np.testing.assert_array_equal(batch["new_obs"][0], batch["obs"][1])
    np.testing.assert_array_equal(batch["state_in_0"][1:4], batch["state_out_0"][:3])
    assert not batch["state_in_0"][[0, 4, 8]].any()
    assert {"advantages", "value_targets"} <= set(batch)
    policy.learn_on_batch(batch)
    with pytest.raises(UsageError, match="at least 1"):
        random_batch(policy, 0)


RANDOM = RandomEnv(spaces.Tuple([OBS, TWO]), spaces.MultiBinary(2))
ENVS = [MemoryEnv(cues=3, delay=2), MaskedEnv(), RANDOM]


@pytest.mark.parametrize("env", ENVS, ids=lambda env: type(env).__name__)
def test_the_environments_pass_gymnasiums_own_checker(env):
    check_env(env, skip_render_check=True)


@pytest.mark.core
def test_a_policy_that_respects_masks_earns_all_of_the_masked_environment():
    env = MaskedEnv(actions=3, length=10)
    policy = make_tf(PPOTF2Policy, env.observation_space, env.action_space)
    for episode in range(5):
        obs, total, over = env.reset(seed=episode)[0], 0.0, False
        while not over:
            obs, reward, over, _, _ = env.step(int(policy.compute_single_action(obs)[0]))
            total += reward
        assert total == 10.0


def test_an_algorithm_trains_in_the_random_environment_with_any_spaces():
    env = RandomEnv(spaces.Dict(a=OBS), spaces.MultiDiscrete([2, 3]))
    settings = {"num_envs_per_worker": 2, "rollout_fragment_length": 20, "num_sgd_iter": 1}
    settings |= {"train_batch_size": 40, "sgd_minibatch_size": 20}
    config = make_config(lambda config: copy.deepcopy(env), **settings)
    assert config.build().train()["episodes_total"] == 4
