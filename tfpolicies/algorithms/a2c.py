"""Advantage actor-critic, Mnih et al. 2016 (arXiv:1602.01783), synchronous.

One training step: collect `train_batch_size` steps in short fragments, estimate advantages, and do
one update of

    L = -E[log pi(a|s) A] + c_v E[(V - R)^2 / 2] - c_e E[H]      (section 4.2 and appendix D)

where A is GAE (arXiv:1506.02438; lambda = 1 gives the n-step advantages of the paper) and
R = A + V_old. Deviations from the paper: Adam for RMSProp, and means over the batch for sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfpolicies.algorithms.actor_critic_base import (
    ActorCriticConfig,
    ActorCriticTFPolicy,
    ActorCriticTrainingSettings,
)
from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.losses import masked_mean
from tfpolicies.program.traced_arguments import TracedModel, TrainBatch

__all__ = ["A2C", "A2CConfig", "A2CTF1Policy", "A2CTF2Policy"]


class A2CTFPolicy(ActorCriticTFPolicy):
    """The loss of A2C, for any runtime."""

    config_class = lazy_class("A2CConfig")

    def loss(
        self, model: TracedModel, dist_class: ActionDistribution, train_batch: TrainBatch
    ) -> tf.Tensor:
        """Returns the policy gradient's loss with its value and entropy terms."""
        config, mask = self.config, train_batch["loss_mask"]
        dist_inputs, _ = model(train_batch)
        current = dist_class(dist_inputs, model)
        logp = current.logp(train_batch[SampleBatch.ACTIONS])

        policy_loss = -masked_mean(logp * train_batch["advantages"], mask)
        entropy = masked_mean(current.entropy(), mask)
        self.record(policy_loss=policy_loss, policy_entropy=entropy)
        value_loss = self._compute_value_loss(model, train_batch)
        return (
            policy_loss + config["vf_loss_coeff"] * value_loss - config["entropy_coeff"] * entropy
        )


class A2CTF2Policy(A2CTFPolicy):
    """A2C on traced TensorFlow functions."""


class A2CTF1Policy(A2CTFPolicy):
    """A2C in graph mode, in its own `tf.Graph` and session."""

    runtime = "session"


class A2C(Algorithm):
    """The training loop of A2C: one update per batch of short fragments."""

    config_class = lazy_class("A2CConfig")
    policy_classes = {"tf2": A2CTF2Policy, "tf": A2CTF1Policy}


@dataclass(frozen=True, kw_only=True)
class A2CTrainingSettings(ActorCriticTrainingSettings):
    """The training settings of A2C."""

    lr: float = 1e-4
    grad_clip: float | None = 40.0
    train_batch_size: int = 200
    vf_loss_coeff: float = 0.5
    entropy_coeff: float = 0.01


class A2CConfig(ActorCriticConfig):
    """The config of A2C.

    >>> config = A2CConfig().environment("CartPole-v1").training(lr=1e-3, lambda_=0.95)
    >>> config.vf_loss_coeff, config.rollout_fragment_length
    (0.5, 20)
    """

    training_section = A2CTrainingSettings

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or A2C)
        self.rollouts(rollout_fragment_length=20)
