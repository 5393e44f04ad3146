"""Custom classes in checkpoints, runtimes and other algorithms."""

import math

import numpy as np
import pytest
import tensorflow as tf

from helpers.continuous_actions import transitions
from helpers.factories import OBS, PLANE, assert_equal, make
from tfpolicies import PPOTF2Policy, SACTF2Policy
from tfpolicies.errors import CheckpointError, ConfigError, MissingColumnError
from tfpolicies.models.distributions import SquashedGaussian
from tfpolicies.models.distributions.base import BOX_DISTRIBUTIONS, register_box_distribution
from tfpolicies.program import inference
from tfpolicies.program.runtimes.runtime import ActingRuntime

NAMES = PPOTF2Policy.hyperparameters


class Growing(PPOTF2Policy):
    pass


class Grown(PPOTF2Policy):
    """`Growing` with another hyperparameter; has the same place and name."""

    hyperparameters = (*NAMES[:3], "num_sgd_iter", *NAMES[3:])
    __qualname__ = "Growing"


Grown.__name__ = "Growing"


def test_a_policy_loads_after_its_class_has_gained_a_hyperparameter(tmp_path, monkeypatch):
    policy = make(Growing, lr=0.25)
    policy.set_hyperparameter("kl_coeff", 0.75)
    policy.export_checkpoint(tmp_path)
    monkeypatch.setitem(globals(), "Growing", Grown)
    loaded = Grown.from_checkpoint(tmp_path)
    numbers = {name: loaded.get_hyperparameter(name) for name in ("lr", "kl_coeff", "num_sgd_iter")}
    assert numbers == {"lr": 0.25, "kl_coeff": 0.75, "num_sgd_iter": policy.config["num_sgd_iter"]}
    assert_equal(loaded.get_weights(), policy.get_weights())


def test_a_policy_whose_class_has_lost_a_hyperparameter_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "Growing", Grown)
    make(Grown).export_checkpoint(tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="or a hyperparameter is missing"):
        Growing.from_checkpoint(tmp_path)


class Breaking(ActingRuntime):
    """Cannot act at all."""

    def run(self, states, inputs, noise, params):
        raise TypeError("no such operator\nand more")


def test_a_runtime_that_fails_when_it_first_acts_is_named_or_gives_way(monkeypatch):
    broken = inference.RUNTIMES["onnx"]._replace(
        build=lambda of: Breaking(), is_preferred=lambda of: True
    )
    monkeypatch.setitem(inference.RUNTIMES, "onnx", broken)
    obs, model = np.zeros((1, 3), np.float32), {"fcnet_hiddens": [7]}
    with pytest.raises(ConfigError, match=r"inference='tf' .* TypeError: no such operator$"):
        make(inference="onnx", model=model).compute_actions(obs)
    policy = make(inference="auto", model=model)
    assert policy.compute_actions(obs).actions.shape == (1,)
    assert policy.config["inference"] == "tf"


class TwoNoises(SquashedGaussian):
    """A squashed Gaussian whose noise is the scaled sum of two numbers."""

    @staticmethod
    def noise_size(space):
        return 2 * math.prod(space.shape)

    def sample(self, noise):
        return super().sample(self._sum(noise))

    def sampled_logp(self, noise):
        return super().sampled_logp(self._sum(noise))

    def _sum(self, noise):
        return tf.add_n(tf.split(noise, 2, axis=-1)) / math.sqrt(2.0)


def test_sac_learns_with_a_distribution_that_takes_more_noise():
    register_box_distribution("two noises", TwoNoises)
    try:
        model = {"fcnet_hiddens": [4], "custom_action_dist": "two noises"}
        policy = make(SACTF2Policy, OBS, PLANE, model=model)
        assert policy.program.spec.noise_size == 8  # two draws of two numbers for two components
        stats = policy.learn_on_batch(transitions(policy, 16))["learner_stats"]
        assert np.isfinite(stats["actor_loss"])
    finally:
        del BOX_DISTRIBUTIONS["two noises"]


class Marking(PPOTF2Policy):
    """Adds a column when it acts, and reads it in postprocessing."""

    def compute_actions(self, obs_batch, *args, **kwargs):
        result = super().compute_actions(obs_batch, *args, **kwargs)
        mark = np.ones(len(obs_batch), np.float32)
        return result._replace(extras={**result.extras, "mark": mark})

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        sample_batch["rewards"] = sample_batch["rewards"] + sample_batch["mark"]
        return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)


def test_the_error_about_a_column_that_only_acting_adds_names_the_batch_of_zeros():
    policy = make(Marking)
    with pytest.raises(MissingColumnError, match=r"'mark'.*batch of zeros.*get\(name, default\)"):
        policy.driver.learning.select_columns({})
