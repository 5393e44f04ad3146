"""`check_policy`: the package's policies keep the contract, and each way to break it is found."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from helpers import factories
from helpers.marks import telling
from soak.conformance import Combination, make_policy
from tfpolicies import DQNTF2Policy, PGTF2Policy, Policy, PPOConfig, PPOTF2Policy
from tfpolicies.errors import PolicyCheckError, UsageError
from tfpolicies.exploration.strategies import EpsilonGreedy
from tfpolicies.models.distributions import DiagGaussian, SquashedGaussian
from tfpolicies.policy.compiled_driver import CompiledDriver, CustomMethodActing
from tfpolicies.policy.policy import ActionBatch
from tfpolicies.testing import check_policy, random_batch
from tfpolicies.testing.environments import MaskedEnv, MemoryEnv, RandomEnv
from tfpolicies.testing.runner import CHECKS

LSTM = {"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 4}
MASKED = spaces.Dict(observations=factories.OBS, action_mask=spaces.Box(0, 1, (3,), np.int8))
THREE = spaces.Discrete(3)


# -- policies that keep the contract --------------------------------------------------------------

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


@pytest.mark.parametrize(("seen", "done", "model"), telling(COVERING, soak=COVERING[1:]))
def test_the_packages_policies_keep_the_contract(seen, done, model):
    report = check_policy(make_policy(Combination(seen, done, model)), exports=False)
    missing = {"memory", "masks", "exports"} - set(report.passes)
    assert {result.check for result in report.results} - set(report.passes) == missing
    assert ("memory" in report.passes) == (model in ("lstm", "gru", "attention"))
    assert ("masks" in report.passes) == (model == "masked")


@pytest.mark.soak
def test_a_policy_with_everything_is_exported_too_and_left_as_it_was():
    model = {**LSTM, "lstm_use_prev_action": True, "lstm_use_prev_reward": True}
    actions = spaces.Dict(arm=factories.PLANE, gear=spaces.Discrete(3, start=1))
    policy = tf_policy(PPOTF2Policy, MASKED, actions, model=model, inference="auto")
    session = policy.session(2)
    session.act(factories.rows_of(policy.observation_space, 2))
    before = copy.deepcopy(policy.get_state())
    report = check_policy(policy)
    assert set(report.passes) == set(CHECKS)
    lines = str(report).splitlines()
    assert lines[0] == f"check_policy: {type(policy).__name__}"
    assert "masks: passed (10000 draws)" in lines
    after = policy.get_state()
    factories.assert_equal(after["weights"], before["weights"])
    factories.assert_equal(after["_optimizer_variables"], before["_optimizer_variables"])
    assert after["rng"] == before["rng"]
    assert after["global_timestep"] == 2
    assert after["num_grad_updates"] == 0


def test_a_policy_of_another_algorithm_and_one_with_memory_pass():
    check_policy(factories.make(PGTF2Policy), exports=False)
    check_policy(factories.make(model=LSTM), checks=["memory", "batch_invariance", "outputs"])


class Dozing(EpsilonGreedy):
    """A strategy that no file may name."""


def test_a_policy_with_a_target_network_and_a_strategy_of_ones_own_passes():
    check_policy(factories.make(DQNTF2Policy), checks=["state", "checkpoint"])
    dozing = {"exploration_config": {"type": Dozing, "final_epsilon": 0.5}}
    check_policy(factories.make(DQNTF2Policy, **dozing), checks=["state", "checkpoint"])


class HandWritten(Policy):
    """A linear policy that learns by adding up rewards, all by hand."""

    def __init__(self, observation_space, action_space, config):
        super().__init__(observation_space, action_space, config)
        self.weights = np.random.default_rng(0).normal(size=(3, 3))
        self.rng = np.random.default_rng(config.get("seed"))

    def scores(self, obs_batch):
        return np.asarray(obs_batch, np.float64) @ self.weights

    def compute_actions(self, obs_batch, state_batches=None, explore=None, **kwargs):
        scores = self.scores(obs_batch)
        if explore:
            scores = scores + self.rng.gumbel(size=scores.shape)
        return ActionBatch(scores.argmax(axis=1), [], {})

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
def test_a_hand_written_policy_is_held_to_what_it_can_do():
    report = check_policy(HandWritten(factories.OBS, THREE, {"seed": 1}))
    assert set(report.passes) == {
        *("outputs", "action_space", "batch_invariance", "determinism", "aliasing", "state"),
        *("checkpoint", "learning", "untouched"),
    }
    notes = {result.check: result.note for result in report.results}
    assert notes["traces"] == "traces are counted by a Program, and a custom policy has none"


class Remembers(HandWritten):
    """Adds up observations in a memory that starts at 1."""

    def get_initial_state(self):
        return [np.ones(3, np.float32)]

    def compute_actions(self, obs_batch, state_batches=None, explore=None, **kwargs):
        after = state_batches[0] + np.asarray(obs_batch, np.float32)
        return ActionBatch(self.scores(after).argmax(axis=1), [after], {})


def test_a_hand_written_memory_may_start_anywhere():
    assert "memory" in check_policy(by_hand(Remembers)).passes
    session = by_hand(Remembers).session(2)
    session.act(np.ones((2, 3), np.float32))
    session.reset([1])
    assert session.recurrent_state.get_state()["state_0"].tolist() == [[2, 2, 2], [1, 1, 1]]


# -- policies that break it -----------------------------------------------------------------------


def failures_of(policy, **options):
    with pytest.raises(PolicyCheckError) as caught:
        check_policy(policy, **{"exports": False, **options})
    return str(caught.value)


def names_in(message):
    return [line.partition(":")[0] for line in message.splitlines() if ": expected" in line]


class WrongDtype(HandWritten):
    def compute_actions(self, *args, **kwargs):
        acted = super().compute_actions(*args, **kwargs)
        return acted._replace(actions=acted.actions.astype(np.float64))


class OutOfSpace(HandWritten):
    def to_env_action(self, action, **kwargs):
        return action + 1


class LooksAtTheBatch(HandWritten):
    def scores(self, obs_batch):
        obs = np.asarray(obs_batch, np.float64)
        return super().scores(obs - obs.mean(axis=0)) if len(obs) else super().scores(obs)


class GlobalNoise(HandWritten):
    def compute_actions(self, obs_batch, state_batches=None, explore=None, **kwargs):
        self.rng.random()
        noise = np.random.default_rng().gumbel(size=(len(obs_batch), 3)) if explore else 0.0
        return ActionBatch((self.scores(obs_batch) + noise).argmax(axis=1), [], {})


class Forgets(PPOTF2Policy):
    def compute_actions(self, obs_batch, state_batches=None, **kwargs):
        fresh = [np.zeros_like(part) for part in state_batches]
        return super().compute_actions(obs_batch, fresh, **kwargs)


class IgnoresMasks(HandWritten):
    def scores(self, obs_batch):
        return super().scores(obs_batch["observations"])


class RespectsMasks(HandWritten):
    def compute_actions(self, obs_batch, state_batches=None, explore=None, **kwargs):
        scores = self.scores(obs_batch["observations"])
        if explore:
            scores = scores + self.rng.gumbel(size=scores.shape)
        allowed = np.where(obs_batch["action_mask"] > 0, scores, -np.inf)
        return ActionBatch(allowed.argmax(axis=1), [], {})


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


class HandsOutItsWeights(HandWritten):
    def get_weights(self):
        return {"w": self.weights}


class KeepsWhatItGets(HandWritten):
    def set_weights(self, weights):
        self.weights = weights["w"]


class EatsItsArgument(HandWritten):
    def set_state(self, state):
        super().set_state(state)
        state.pop("rng")


class WritesIntoObservations(HandWritten):
    def scores(self, obs_batch):
        obs_batch[...] *= 1.5
        return super().scores(obs_batch)


class LosesItsGenerator(HandWritten):
    def get_state(self):
        return {"weights": self.get_weights()}

    def set_state(self, state):
        self.set_weights(state["weights"])

    def __deepcopy__(self, memo):
        made = type(self)(self.observation_space, self.action_space, self.config)
        made.set_weights(self.get_weights())
        return made


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


class TracesAnew(PPOTF2Policy):
    def compute_actions(self, obs_batch, *args, **kwargs):
        self.program.functions.traces[f"act on {len(obs_batch)} rows"] += 1
        return super().compute_actions(obs_batch, *args, **kwargs)


class DriftingTF2Policy(PPOTF2Policy):
    """Its graph-mode twin is below, and does something else."""


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


class SharesItsWeights(HandWritten):
    def __deepcopy__(self, memo):
        return self


SHARED = {"seed": 0, "inference": "tf", "jit_compile": False, "lr": 0.1}


def tf_policy(cls, obs=factories.OBS, actions=factories.TWO, **config):
    policy = factories.make(cls, obs, actions, lr=0.1, **config)
    rng = np.random.default_rng(0)
    policy.set_weights([w + 0.3 * rng.normal(size=w.shape) for w in policy.get_weights().values()])
    return policy


def drawing(kind):
    return tf_policy(PPOTF2Policy, actions=factories.PLANE, model={"custom_action_dist": kind})


def by_hand(cls, obs=factories.OBS):
    return cls(obs, THREE, {"seed": 1})


BROKEN = {
    "outputs": (lambda: by_hand(WrongDtype), "return actions as int64"),
    "action_space": (lambda: by_hand(OutOfSpace), r"env_action\(explore=True\) to be in Discrete"),
    "batch_invariance": (lambda: by_hand(LooksAtTheBatch), "of 12 to give the same by itself"),
    "determinism": (lambda: by_hand(GlobalNoise), "never from global ones"),
    "memory": (
        lambda: tf_policy(Forgets, model=LSTM),
        "6 single steps to give the same as one sequence",
    ),
    "masks": (lambda: by_hand(IgnoresMasks, MASKED), r"under the mask \["),
    "log_likelihoods": (lambda: tf_policy(OtherLikelihoods), "the action_logp of the same rows"),
    "distribution": (lambda: drawing(Overconfident), r"`entropy` to be .* as samples show"),
    "aliasing": (lambda: by_hand(HandsOutItsWeights), "get_weights to return copies"),
    "state": (lambda: by_hand(LosesItsGenerator), "to explore like the original"),
    "checkpoint": (lambda: tf_policy(SavesOldWeights), "restore what export_checkpoint saved"),
    "learning": (lambda: tf_policy(LearnsNothing), "change at least one weight"),
    "gradients": (lambda: tf_policy(AppliesGradientsEarly), "compute_gradients to change nothing"),
    "learner": (lambda: tf_policy(ShiftsItsRows), "the same as acting for the same rows"),
    "traces": (lambda: tf_policy(TracesAnew), "act on 2 rows': '0 -> "),
    "runtimes": (lambda: tf_policy(DriftingTF2Policy), "DriftingTF1Policy to act like Drifting"),
    "exports": (lambda: tf_policy(ExportsSomethingElse), "the exported player to act like"),
    "untouched": (lambda: by_hand(SharesItsWeights), "nothing mutable on the class"),
}


def test_there_is_a_broken_policy_for_each_check():
    assert set(BROKEN) == set(CHECKS)


@pytest.mark.parametrize("name", BROKEN)
def test_a_policy_that_breaks_the_contract_is_told_which_part_and_what_to_do(name):
    make, text = BROKEN[name]
    checks = None if name in ALONE else ["outputs", name]
    checks = ["aliasing", name] if name == "untouched" else checks
    checks = [name] if name == "outputs" else checks
    with pytest.raises(PolicyCheckError, match=text) as caught:
        check_policy(make(), checks=checks, exports=name == "exports")
    message = str(caught.value)
    assert names_in(message) == [name]
    for part in ("    got: ", "    next step: "):
        assert part in message


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
def test_every_way_in_and_out_is_checked_for_aliasing(cls, text):
    message = failures_of(by_hand(cls), checks=["aliasing"])
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
    message = failures_of(drawing(kind), checks=["distribution"])
    assert re.search(text, message)
    assert "over samples of p, the entropy is the mean of -log p" in message


def test_the_distribution_of_a_policy_that_acts_by_its_own_method_is_checked():
    report = check_policy(tf_policy(ExportsSomethingElse), checks=["distribution"])
    assert report.passes == ("distribution",)


def test_a_state_without_the_optimizer_and_weights_that_diverge_are_found():
    message = failures_of(tf_policy(LosesItsOptimizer), checks=["state"])
    assert "after one more update" in message
    message = failures_of(tf_policy(Diverges), checks=["learning"])
    assert "weights and statistics to stay finite" in message


@pytest.mark.core
def test_all_failures_are_listed_in_one_assertion_error():
    class Broken(WrongDtype, OutOfSpace):
        pass

    message = failures_of(by_hand(Broken), checks=["outputs", "action_space", "memory"])
    assert message.startswith("Broken fails 2 of 3 checks.\n\noutputs: expected ")
    assert names_in(message) == ["outputs", "action_space"]
    assert issubclass(PolicyCheckError, AssertionError)


def test_an_error_that_a_policy_raises_is_a_failure_that_says_where():
    class Raises(HandWritten):
        def scores(self, obs_batch):
            raise RuntimeError("out of ideas")

    message = failures_of(by_hand(Raises), checks=["batch_invariance"])
    assert "expected no error\n    got: RuntimeError: out of ideas" in message
    assert "test_check_policy.py" in message


def test_unknown_checks_are_refused():
    with pytest.raises(UsageError, match="Did you mean 'masks'"):
        check_policy(by_hand(HandWritten), checks=["mask"])


def test_checks_leave_the_generators_of_spaces_alone():
    space = spaces.Tuple([spaces.Discrete(1000), spaces.MultiBinary(9)])
    policy = tf_policy(PPOTF2Policy, space, inference="onnx")
    space.seed(3)
    expected = space.sample()
    space.seed(3)
    check_policy(policy, exports=False)
    actual = space.sample()
    assert actual[0] == expected[0]
    np.testing.assert_array_equal(actual[1], expected[1])


def test_a_hand_written_policy_may_respect_masks():
    assert "masks" in check_policy(by_hand(RespectsMasks, MASKED)).passes


# -- batches and environments ---------------------------------------------------------------------


def test_a_random_batch_is_what_a_sampler_would_give():
    policy = tf_policy(PPOTF2Policy, model=LSTM)
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


ENVS = [
    MemoryEnv(cues=3, delay=2),
    MaskedEnv(),
    RandomEnv(spaces.Tuple([factories.OBS, spaces.Discrete(2)]), spaces.MultiBinary(2)),
]


@pytest.mark.parametrize("env", ENVS, ids=lambda env: type(env).__name__)
def test_the_environments_pass_gymnasiums_own_checker(env):
    check_env(env, skip_render_check=True)


@pytest.mark.core
def test_a_policy_that_respects_masks_earns_all_of_the_masked_environment():
    env = MaskedEnv(actions=3, length=10)
    policy = tf_policy(PPOTF2Policy, env.observation_space, env.action_space)
    for episode in range(5):
        obs, total, over = env.reset(seed=episode)[0], 0.0, False
        while not over:
            obs, reward, over, _, _ = env.step(int(policy.compute_single_action(obs)[0]))
            total += reward
        assert total == 10.0


def test_an_algorithm_trains_in_the_random_environment_with_any_spaces():
    config = (
        PPOConfig()
        .environment(
            lambda config: RandomEnv(spaces.Dict(a=factories.OBS), spaces.MultiDiscrete([2, 3])),
        )
        .rollouts(num_envs_per_worker=2, rollout_fragment_length=20)
        .training(train_batch_size=40, sgd_minibatch_size=20, num_sgd_iter=1)
        .framework(inference="tf", jit_compile=False)
        .debugging(seed=0)
    )
    assert config.build().train()["episodes_total"] == 4
