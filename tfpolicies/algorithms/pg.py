"""REINFORCE, the plain policy gradient: Williams 1992; Sutton et al. 2000.

    L = -E[log pi(a|s) R],   R the discounted return from that step to the end

It has no critic, so the return after a truncated fragment counts as 0; the default is complete
episodes (`batch_mode="complete_episodes"`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.batch.postprocessing import discounted_returns
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.sections import TrainingSettings
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.losses import masked_mean
from tfpolicies.policy.fragments import Fragments
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.program.traced_arguments import TracedModel, TrainBatch

__all__ = ["PG", "PGConfig", "PGTF1Policy", "PGTF2Policy", "PGTFPolicy"]


class PGPolicy(TFPolicy):
    """The loss of the policy gradient, for any runtime."""

    config_class = lazy_class("PGConfig")

    def loss(
        self, model: TracedModel, dist_class: ActionDistribution, train_batch: TrainBatch
    ) -> tf.Tensor:
        """Returns the negative log-likelihood of the actions, weighted by the returns."""
        dist_inputs, _ = model(train_batch)
        logp = dist_class(dist_inputs, model).logp(train_batch[SampleBatch.ACTIONS])
        returns = train_batch["advantages"]
        policy_loss = -masked_mean(logp * returns, train_batch["loss_mask"])
        self.record(policy_loss=policy_loss)
        return policy_loss

    def postprocess_fragments(self, fragments: Fragments) -> None:
        """Adds the discounted return from each step to the end of its trajectory."""
        rewards = fragments.columns["rewards"]
        last_values = np.zeros_like(rewards)
        fragments.new_columns["advantages"] = discounted_returns(
            rewards, fragments.ends, last_values, gamma=self.get_hyperparameter("gamma")
        )


class PGTF2Policy(PGPolicy):
    """The policy gradient on traced TensorFlow functions."""


PGTFPolicy = PGTF2Policy


class PGTF1Policy(PGPolicy):
    """The policy gradient in graph mode, in its own `tf.Graph` and session."""

    runtime = "session"


class PG(Algorithm):
    """The training loop of PG: one update per batch of fresh trajectories."""

    config_class = lazy_class("PGConfig")
    policy_classes = {"tf2": PGTF2Policy, "tf": PGTF1Policy}


@dataclass(frozen=True, kw_only=True)
class PGTrainingSettings(TrainingSettings):
    """The training settings of PG."""

    lr: float = 4e-4
    train_batch_size: int = 200


class PGConfig(AlgorithmConfig):
    """The config of PG."""

    training_section = PGTrainingSettings

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or PG)
        self.rollouts(rollout_fragment_length="auto", batch_mode="complete_episodes")
