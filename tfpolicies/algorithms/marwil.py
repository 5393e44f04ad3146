"""MARWIL: monotonic advantage re-weighted imitation learning, Wang et al. 2018.

"Exponentially Weighted Imitation Learning for Batched Historical Data", NeurIPS 2018. It imitates
the actions of a batch, from recorded data or from an environment, and better actions more than
others. One training step is one update on `train_batch_size` rows (or updates on
minibatches of them) of

    L = -E[w (log pi(a|s) + c_std sum_i log std_i)] + c_v E[A^2] / 2      (section 4.2)
    A = R - V(s),   w = exp(beta A / c),   c^2 <- c^2 + rate (E[A^2] - c^2)

where R is the discounted return from that step to the end of its trajectory. If the trajectory is
truncated, the return after its last step is V of its last observation, and 0 if it is terminated.
The moving average c^2 is updated before it is used, once for each update, and no gradient flows
through w. The term of the standard deviations, of Gaussian actions only, and the initial value of
c^2 are RLlib's. Advantages of many times c overflow in w: `mean_weight` is then not finite. A
larger `moving_average_sqd_adv_norm_start`, about the square of usual advantages, or a smaller beta
prevents that.

RLlib's code also bootstraps truncated trajectories, but its critic's value is the constant 0 there,
unless the policy's config has `use_gae`, which is not a setting of its MARWIL.

With beta = 0 all weights are 1. Then there is no critic, and only observations and actions are
read: this is behaviour cloning (`bc.py`).

Actions in batches are normalised, as those of samplers: from -1 to 1 for bounded Boxes. Where the
distribution is a squashed Gaussian, actions are clipped to [-1 + 1e-6, 1 - 1e-6], so that those at
the bounds have a finite likelihood.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import keras
import numpy as np
import tensorflow as tf

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.base.validators import FRACTION, NON_NEGATIVE, POSITIVE_INT, int_at_least
from tfpolicies.batch.postprocessing import discounted_returns
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.config.sections import TrainingSettings
from tfpolicies.config.setting import setting
from tfpolicies.errors import ConfigError
from tfpolicies.models.distributions import ActionDistribution, Deterministic
from tfpolicies.models.losses import explained_variance, masked_mean
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.program.networks import NetworkPlan
from tfpolicies.program.spec import get_static_settings
from tfpolicies.program.traced_arguments import TracedModel, TrainBatch

_SHUFFLE_BUFFER_SIZE = 32  # train batches whose rows are shuffled together; RLlib's is 0

__all__ = ["MARWIL", "MARWILConfig", "MARWILTF1Policy", "MARWILTF2Policy"]


class MARWILTFPolicy(TFPolicy):
    """The loss of MARWIL, for any runtime.

    Unless beta is 0, the network `advantage_norm` holds c^2. It has no trainable variables. Only
    updates with a loss change it, so `compute_gradients` and `apply_gradients` do not.
    """

    config_class = lazy_class("MARWILConfig")
    hyperparameters = (
        *TFPolicy.hyperparameters,
        *("beta", "bc_logstd_coeff", "vf_coeff", "moving_average_sqd_adv_norm_update_rate"),
    )
    static_keys = (*TFPolicy.static_keys, "moving_average_sqd_adv_norm_start")

    def loss(
        self, model: TracedModel, dist_class: ActionDistribution, train_batch: TrainBatch
    ) -> tf.Tensor:
        """Returns the weighted negative log-likelihood of the actions, with the value term."""
        config, mask = self.config, train_batch["loss_mask"]
        dist_inputs, _ = model(train_batch)
        current = dist_class(dist_inputs, model)
        objective = current.logp(train_batch[SampleBatch.ACTIONS])
        log_std = _sum_log_std(current)
        if log_std is not None:
            objective += config["bc_logstd_coeff"] * log_std
        if not config["uses_critic"]:
            policy_loss = -masked_mean(objective, mask)
            self.record(policy_loss=policy_loss, vf_loss=0.0, total_loss=policy_loss)
            return policy_loss

        returns, values = train_batch["advantages"], model.value_function()
        advantages = returns - values
        mean_square = masked_mean(tf.square(advantages), mask)
        weights = self._compute_weights(tf.stop_gradient(advantages), mask)
        policy_loss = -masked_mean(weights * objective, mask)
        vf_loss = 0.5 * mean_square
        total_loss = policy_loss + config["vf_coeff"] * vf_loss
        self.record(
            policy_loss=policy_loss,
            vf_loss=vf_loss,
            total_loss=total_loss,
            vf_explained_var=explained_variance(returns, tf.stop_gradient(values), mask),
        )
        return total_loss

    def _compute_weights(self, advantages: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
        """Returns w `[B]`, after updating the moving average of squared advantages."""
        config = self.config
        squared_norm = self.networks["advantage_norm"](
            value=masked_mean(tf.square(advantages), mask),
            rate=config["moving_average_sqd_adv_norm_update_rate"],
        )
        weights = tf.exp(config["beta"] * advantages / (1e-8 + tf.sqrt(squared_norm)))
        self.record(
            moving_average_sqd_adv_norm=squared_norm,
            mean_weight=masked_mean(weights, mask),
            max_weight=tf.reduce_max(tf.where(mask > 0.0, weights, 0.0)),
        )
        return weights

    @classmethod
    def _derive_static_settings(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"uses_critic": config["beta"] > 0.0}

    @classmethod
    def wants_value(cls, static: Mapping[str, Any]) -> bool:
        """Returns whether the model has a value head: unless beta is 0."""
        return bool(static["uses_critic"])

    @classmethod
    def network_plans(
        cls, observation_space: gym.Space, dist_class: ActionDistribution, static: Mapping[str, Any]
    ) -> dict[str, NetworkPlan]:
        """Returns the plans of the network that acts and, unless beta is 0, of c^2."""
        del observation_space, dist_class
        plans = {"model": NetworkPlan()}
        if static["uses_critic"]:
            initial_value = static["moving_average_sqd_adv_norm_start"]
            plans["advantage_norm"] = NetworkPlan(lambda: MovingAverage(initial_value))
        return plans

    @property
    def _postprocesses(self) -> bool:
        return self.program.spec.has_values

    def postprocess_fragments(self, fragments: Fragments) -> None:
        """Adds R, the discounted return from each step, as `advantages`; nothing if beta is 0."""
        if not self._postprocesses:
            return
        rewards = fragments.columns["rewards"]
        last_values = np.zeros(rewards.shape, np.float32)
        if len(fragments.bootstrap_indices[0]):
            last_values[fragments.bootstrap_indices] = self.compute_values(
                fragments.bootstrap_inputs
            )
        fragments.new_columns["advantages"] = discounted_returns(
            rewards, fragments.ends, last_values, gamma=self.get_hyperparameter("gamma")
        )

    def validate_spaces(
        self, observation_space: gym.Space, action_space: gym.Space, config: Mapping[str, Any]
    ) -> None:
        """Checks that actions have likelihoods, and `log_std` unless `bc_logstd_coeff` is 0."""
        super().validate_spaces(observation_space, action_space, config)
        static = get_static_settings(type(self), config)
        dist_class = self._get_distribution(action_space, static)
        for leaf_class in dist_class.leaf_classes:
            if isinstance(leaf_class, type) and issubclass(leaf_class, Deterministic):
                raise ConfigError(
                    f"{type(self).__name__} imitates actions by their likelihoods, but "
                    f"{leaf_class.__name__} has none. Leave model['custom_action_dist'] out, or "
                    "choose 'diag_gaussian' or 'squashed_gaussian'."
                )
        _check_log_std(dist_class, config["bc_logstd_coeff"])

    def set_hyperparameter(self, name: str, value: float | None) -> None:
        """Sets a hyperparameter of this policy only; see `TFPolicy.set_hyperparameter`.

        Raises:
            ConfigError: also if the policy has no critic and `beta` would not be 0, and if
                `bc_logstd_coeff` would not be 0 for actions without a `log_std`.
        """
        if name == "beta" and value != 0.0 and not self.program.spec.has_values:
            raise ConfigError(
                f"beta of {self!r} must stay 0, got {value!r}: it was built with beta=0, so it has "
                "no critic. Build a MARWIL policy with beta > 0."
            )
        if name == "bc_logstd_coeff":
            _check_log_std(self.dist_class, value)
        super().set_hyperparameter(name, value)


def _sum_log_std(distribution: Any) -> tf.Tensor | None:
    """Returns the sum of the log standard deviations of all components, `[B]`; None without."""
    parts = getattr(distribution, "parts", [distribution])
    sums = [tf.reduce_sum(part.log_std, axis=-1) for part in parts if hasattr(part, "log_std")]
    return tf.add_n(sums) if sums else None


def _check_log_std(dist_class: ActionDistribution, coefficient: float | None) -> None:
    if coefficient != 0.0 and not any(hasattr(x, "log_std") for x in dist_class.leaf_classes):
        raise ConfigError(
            f"bc_logstd_coeff must be 0 for {dist_class.space}, got {coefficient!r}: the "
            "distribution of these actions has no standard deviation. It is for Boxes of floats "
            "with Gaussian actions."
        )


class MovingAverage(keras.layers.Layer):
    """A moving average, one variable. A call updates it and returns its new value.

    Args:
        initial_value: its initial value.
    """

    def __init__(self, initial_value: float) -> None:
        super().__init__(name="moving_average")
        initializer = keras.initializers.Constant(initial_value)
        self.average = self.add_weight(
            name="average", shape=(), initializer=initializer, trainable=False
        )

    def call(self, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Moves the average towards `value` by the fraction `rate`, both scalars."""
        average = tf.convert_to_tensor(self.average)
        average += inputs["rate"] * (inputs["value"] - average)
        self.average.assign(average)
        return average


class MARWILTF2Policy(MARWILTFPolicy):
    """MARWIL on traced TensorFlow functions.

    >>> from gymnasium import spaces
    >>> space, actions = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
    >>> policy = MARWILTF2Policy(space, actions, {"seed": 0, "inference": "tf"})
    >>> policy.compute_actions([space.sample(), space.sample()]).actions.shape
    (2,)
    """


class MARWILTF1Policy(MARWILTFPolicy):
    """MARWIL in graph mode, in its own `tf.Graph` and session."""

    runtime = "session"


class MARWIL(Algorithm):
    """The training loop of MARWIL; made by `MARWILConfig().build()`."""

    config_class = lazy_class("MARWILConfig")
    policy_classes = {"tf2": MARWILTF2Policy, "tf": MARWILTF1Policy}

    def training_step(self) -> dict[str, Any]:
        """Gets one train batch and updates each policy on its rows."""
        batches = self.sample_train_batch()
        results = {}
        for policy_id, batch in batches.items():
            policy = self.get_policy(policy_id)
            num_epochs = self._get_update_setting(policy_id, "num_sgd_iter")
            minibatch_size = self._get_update_setting(policy_id, "sgd_minibatch_size")
            if minibatch_size:
                learning = policy.driver.learning
                results[policy_id] = learning.train(batch, num_epochs, minibatch_size)
            else:
                for _ in range(num_epochs):
                    results[policy_id] = policy.learn_on_batch(batch)
        return results

    def warm_up(self) -> None:
        """Compiles the update for the configured batch."""

        def get_sizes(policy_id: str) -> tuple[int, int | None]:
            minibatch_size = self._get_update_setting(policy_id, "sgd_minibatch_size")
            if not minibatch_size:
                return 1, None
            return self._get_update_setting(policy_id, "num_sgd_iter"), minibatch_size

        self._warm_up_policies(self._count_expected_train_batch_rows(), get_sizes)


@dataclass(frozen=True, kw_only=True)
class MARWILTrainingSettings(TrainingSettings):
    """The training settings of MARWIL."""

    lr: float = 1e-4
    train_batch_size: int = 2000
    beta: float = setting(1.0, FRACTION)  # 0: behaviour cloning, without a critic
    bc_logstd_coeff: float = setting(0.0, NON_NEGATIVE)  # c_std; encourages large ones
    vf_coeff: float = setting(1.0, NON_NEGATIVE)  # c_v
    moving_average_sqd_adv_norm_start: float = setting(100.0, NON_NEGATIVE)  # c^2 at the start
    # rate; below about 1e-7 c^2 hardly changes, since it is a float32
    moving_average_sqd_adv_norm_update_rate: float = setting(1e-8, FRACTION)
    sgd_minibatch_size: int = setting(0, int_at_least(0))  # rows of an update; 0: all
    num_sgd_iter: int = setting(1, POSITIVE_INT)  # epochs over the train batch


class MARWILConfig(AlgorithmConfig):
    """The config of MARWIL.

    >>> config = MARWILConfig().environment("CartPole-v1").training(beta=0.5, lr=1e-3)
    >>> config.beta, config.vf_coeff
    (0.5, 1.0)
    """

    training_section = MARWILTrainingSettings

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or MARWIL)
        self.offline_data(postprocess_inputs=True, shuffle_buffer_size=_SHUFFLE_BUFFER_SIZE)

    def validate(self) -> None:
        """Checks settings against each other.

        Raises:
            ConfigError: if settings contradict each other.
        """
        super().validate()
        if self.beta > 0 and not (self.postprocess_inputs or needs_environment(self.input_)):
            raise ConfigError(
                "postprocess_inputs must be True with beta > 0: it computes the returns of "
                "recorded rows. Set offline_data(postprocess_inputs=True), or beta=0."
            )
        if self.sgd_minibatch_size > self.train_batch_size:
            raise ConfigError(
                f"sgd_minibatch_size={self.sgd_minibatch_size} must not be larger than "
                f"train_batch_size={self.train_batch_size}; 0 updates on all rows at once."
            )
