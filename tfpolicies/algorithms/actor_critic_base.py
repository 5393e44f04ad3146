"""Base classes of algorithms with a critic: advantages, settings and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.base.validators import BOOL, FRACTION, NON_NEGATIVE, Validator, is_int_at_least
from tfpolicies.batch.postprocessing import discounted_returns, generalized_advantages
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.sections import SCHEDULE, TrainingSettings
from tfpolicies.config.setting import setting
from tfpolicies.errors import ConfigError
from tfpolicies.models.losses import explained_variance, masked_mean
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.program.traced_arguments import TracedModel, TrainBatch


class ActorCriticTFPolicy(TFPolicy):
    """A policy that learns from advantages, estimated by a critic if there is one."""

    config_class = lazy_class("ActorCriticConfig")
    hyperparameters = (*TFPolicy.hyperparameters, "lambda", "vf_loss_coeff", "entropy_coeff")
    static_keys = (*TFPolicy.static_keys, "use_critic", "use_gae")
    _coefficient_stats = {"entropy_coeff": "entropy_coeff"}

    @classmethod
    def wants_value(cls, static: Mapping[str, Any]) -> bool:
        """Returns whether the model has a value head: if `use_critic` is set."""
        return bool(static["use_critic"])

    def _compute_value_loss(self, model: TracedModel, train_batch: TrainBatch) -> tf.Tensor:
        """Returns the mean value loss and records it; 0 without a critic."""
        if not self.config["use_critic"]:
            self.record(vf_loss=0.0)
            return tf.constant(0.0)
        mask, targets = train_batch["loss_mask"], train_batch["value_targets"]
        errors, statistics = self._compute_value_errors(model.value_function(), targets, mask)
        vf_loss = masked_mean(errors, mask)
        self.record(vf_loss=vf_loss, **statistics)
        return vf_loss

    def _compute_value_errors(
        self, values: tf.Tensor, targets: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the error of each row `[B]`, and statistics of the values."""
        explained_variance_of_values = explained_variance(targets, tf.stop_gradient(values), mask)
        return 0.5 * tf.square(values - targets), {"vf_explained_var": explained_variance_of_values}

    def postprocess_fragments(self, fragments: Fragments) -> None:
        """Adds advantages, value targets and bootstrapped values for all trajectories at once.

        With a critic the advantages are GAE's (arXiv:1506.02438, equation 16), with lambda = 1 if
        `use_gae=False`. Without a critic they are discounted returns, and nothing is bootstrapped.
        """
        rewards, added_columns = fragments.columns["rewards"], fragments.new_columns
        gamma = self.get_hyperparameter("gamma")
        if not self.config["use_critic"]:
            zeros = np.zeros_like(rewards)
            added_columns["value_targets"] = zeros
            added_columns["advantages"] = discounted_returns(
                rewards, fragments.ends, zeros, gamma=gamma
            )
            return
        next_values = fragments.get_next_values()
        added_columns["advantages"], added_columns["value_targets"] = generalized_advantages(
            rewards,
            fragments.columns["vf_preds"],
            next_values,
            fragments.columns["terminateds"],
            fragments.ends,
            gamma=gamma,
            lambda_=self.get_hyperparameter("lambda") if self.config["use_gae"] else 1.0,
        )
        added_columns["values_bootstrapped"] = next_values


_ENTROPY_SCHEDULE = Validator(
    lambda x: is_int_at_least(x) or SCHEDULE.is_valid(x), SCHEDULE.description
)


@dataclass(frozen=True, kw_only=True)
class ActorCriticTrainingSettings(TrainingSettings):
    """Training settings shared by algorithms with a critic."""

    lambda_: float = setting(1.0, FRACTION)  # of GAE
    use_gae: bool = setting(True, BOOL)
    use_critic: bool = setting(True, BOOL)
    vf_loss_coeff: float = setting(1.0, NON_NEGATIVE)  # c_v
    entropy_coeff: float = setting(0.0, NON_NEGATIVE)  # c_e
    entropy_coeff_schedule: Any = setting(  # [[timestep, entropy_coeff], ...]; n: to 0 at n
        None, _ENTROPY_SCHEDULE
    )


class ActorCriticConfig(AlgorithmConfig):
    """The config of algorithms with a critic."""

    training_section = ActorCriticTrainingSettings

    def validate(self) -> None:
        """Checks settings against each other.

        Raises:
            ConfigError: if settings contradict each other.
        """
        super().validate()
        if not self.use_gae and self.batch_mode == "truncate_episodes":
            raise ConfigError(
                "use_gae=False needs complete episodes: set batch_mode='complete_episodes', or "
                "use_gae=True."
            )
