"""Proximal policy optimization, Schulman et al. 2017 (arXiv:1707.06347).

One training step: collect `train_batch_size` steps, estimate advantages (GAE, arXiv:1506.02438),
standardise them over the whole batch, then do `num_sgd_iter` epochs of minibatch updates of

    L = E[-min(r A, clip(r, 1 - eps, 1 + eps) A)]        (eq. 7; r = pi(a|s) / pi_old(a|s))
        + c_v E[min((V - V_target)^2, vf_clip_param)]    (eq. 9, with the error clipped)
        - c_e E[H]                                       (eq. 9)
        + beta E[KL(pi_old || pi)]                       (eq. 8)

and adapt beta to the KL target (section 4). Deviations from the paper: the value error is clipped
from above, standardised advantages, and beta changes by 1.5 instead of 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfpolicies.algorithms.actor_critic_base import (
    ActorCriticConfig,
    ActorCriticTFPolicy,
    ActorCriticTrainingSettings,
)
from tfpolicies.algorithms.algorithm import Algorithm
from tfpolicies.base.validators import BOOL, NON_NEGATIVE, POSITIVE, POSITIVE_INT
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.setting import setting
from tfpolicies.errors import ConfigError
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.losses import explained_variance, masked_mean
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.program.traced_arguments import TracedModel, TrainBatch

__all__ = ["PPO", "PPOConfig", "PPOTF1Policy", "PPOTF2Policy"]


class PPOTFPolicy(ActorCriticTFPolicy):
    """The loss of PPO, for any runtime."""

    config_class = lazy_class("PPOConfig")
    hyperparameters = (
        *TFPolicy.hyperparameters,
        *("lambda", "clip_param", "vf_clip_param", "vf_loss_coeff"),
        *("entropy_coeff", "kl_coeff", "kl_target"),
    )
    _state_aliases = {"current_kl_coeff": "kl_coeff"}
    _coefficient_stats = {"cur_kl_coeff": "kl_coeff", "entropy_coeff": "entropy_coeff"}
    _enabling_settings = {"kl_coeff": "use_kl_loss"}

    def loss(
        self, model: TracedModel, dist_class: ActionDistribution, train_batch: TrainBatch
    ) -> tf.Tensor:
        """Returns the clipped surrogate objective with its value, entropy and KL terms."""
        config, mask = self.config, train_batch["loss_mask"]
        dist_inputs, _ = model(train_batch)
        current = dist_class(dist_inputs, model)
        previous = dist_class(train_batch[SampleBatch.ACTION_DIST_INPUTS], model)
        advantages = train_batch["advantages"]

        logp = current.logp(train_batch[SampleBatch.ACTIONS])
        ratio = tf.exp(logp - train_batch[SampleBatch.ACTION_LOGP])
        clipped_ratio = tf.clip_by_value(ratio, 1 - config["clip_param"], 1 + config["clip_param"])
        surrogate = tf.minimum(advantages * ratio, advantages * clipped_ratio)

        policy_loss = -masked_mean(surrogate, mask)
        entropy = masked_mean(current.entropy(), mask)
        kl = masked_mean(previous.kl(current), mask)
        self.record(policy_loss=policy_loss, entropy=entropy, kl=kl)
        total_loss = (
            policy_loss
            + config["vf_loss_coeff"] * self._compute_value_loss(model, train_batch)
            - config["entropy_coeff"] * entropy
            + config["kl_coeff"] * kl
        )
        self.record(total_loss=total_loss)
        return total_loss

    def _compute_value_errors(
        self, values: tf.Tensor, targets: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        limit = self.config["vf_clip_param"]
        errors = tf.minimum(tf.square(values - targets), limit)
        return errors, compute_value_statistics(values, targets, mask, limit)

    def _adapt(self, result: Mapping[str, Any]) -> None:
        """Adapts the KL coefficient to the KL that an update of the algorithm measured."""
        if "kl" in result["learner_stats"]:
            self.update_kl(result["learner_stats"]["kl"])

    def update_kl(self, kl: float) -> float:
        """Adapts the KL coefficient to its target; returns it.

        A KL above twice the target raises it by half, one below half the target halves it.
        """
        target, coefficient = (
            self.get_hyperparameter("kl_target"),
            self.get_hyperparameter("kl_coeff"),
        )
        if kl > 2.0 * target:
            coefficient *= 1.5
        elif kl < 0.5 * target:
            coefficient *= 0.5
        self.set_hyperparameter("kl_coeff", coefficient)
        return coefficient


def compute_value_statistics(
    values: tf.Tensor, targets: tf.Tensor, mask: tf.Tensor, limit: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Returns the explained variance of `values` `[B]`, and the share of clipped rows.

    `vf_clipped` counts the rows in `mask` whose squared error is above `limit`.
    """
    values = tf.stop_gradient(values)
    is_clipped = tf.cast(tf.square(values - targets) > limit, tf.float32)
    return {
        "vf_explained_var": explained_variance(targets, values, mask),
        "vf_clipped": masked_mean(is_clipped, mask),
    }


class PPOTF2Policy(PPOTFPolicy):
    """PPO on traced TensorFlow functions.

    >>> from gymnasium import spaces
    >>> space, actions = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
    >>> policy = PPOTF2Policy(space, actions, {"seed": 0, "inference": "tf"})
    >>> policy.compute_actions([space.sample(), space.sample()]).actions.shape
    (2,)
    """


class PPOTF1Policy(PPOTFPolicy):
    """PPO in graph mode: the loss of `PPOTF2Policy` in its own `tf.Graph` and session."""

    runtime = "session"


class PPO(Algorithm):
    """The training loop of PPO; made by `PPOConfig().build()`."""

    config_class = lazy_class("PPOConfig")
    policy_classes = {"tf2": PPOTF2Policy, "tf": PPOTF1Policy}

    def training_step(self) -> dict[str, Any]:
        """Samples one train batch and updates each policy on its rows."""
        batches = self.sample_train_batch()
        results = {}
        for policy_id, batch in batches.items():
            learning = self.get_policy(policy_id).driver.learning
            num_epochs, minibatch_size = self._get_update_sizes(policy_id)
            results[policy_id] = learning.train(
                batch,
                num_epochs,
                minibatch_size or batch.count,
                shuffle=self._get_update_setting(policy_id, "shuffle_sequences"),
                standardize=("advantages",),
            )
            learning.adapt(results[policy_id])
        return results

    def warm_up(self) -> None:
        """Compiles the update for the configured batch."""
        rows = self._count_expected_train_batch_rows()
        self._warm_up_policies(rows, self._get_update_sizes)

    def _get_update_sizes(self, policy_id: str) -> tuple[int, int]:
        """Returns the epochs and the rows of a minibatch of a policy's updates."""
        num_epochs = self._get_update_setting(policy_id, "num_sgd_iter")
        return num_epochs, self._get_update_setting(policy_id, "sgd_minibatch_size")


@dataclass(frozen=True, kw_only=True)
class PPOTrainingSettings(ActorCriticTrainingSettings):
    """The training settings of PPO."""

    lr: float = 5e-5
    train_batch_size: int = 4000
    model: Mapping[str, Any] = setting({**MODEL_DEFAULTS, "vf_share_layers": False})
    sgd_minibatch_size: int = setting(128, POSITIVE_INT)  # rows of an update
    num_sgd_iter: int = setting(30, POSITIVE_INT)  # epochs over the train batch
    shuffle_sequences: bool = setting(True, BOOL)  # rows are shuffled for each epoch
    use_kl_loss: bool = setting(True, BOOL)  # False: beta is and stays 0
    kl_coeff: float = setting(0.2, NON_NEGATIVE)  # beta at the start
    kl_target: float = setting(0.01, POSITIVE)  # nats
    clip_param: float = setting(0.3, POSITIVE)  # eps
    vf_clip_param: float = setting(10.0, POSITIVE)  # largest squared value error; inf: any


class PPOConfig(ActorCriticConfig):
    """The config of PPO.

    >>> config = PPOConfig().environment("CartPole-v1").training(lr=3e-4, clip_param=0.2)
    >>> config.clip_param
    0.2
    """

    training_section = PPOTrainingSettings

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or PPO)
        self.rollouts(rollout_fragment_length="auto")

    def validate(self) -> None:
        """Checks settings against each other.

        Raises:
            ConfigError: if settings contradict each other.
        """
        super().validate()
        if self.sgd_minibatch_size > self.train_batch_size:
            raise ConfigError(
                f"sgd_minibatch_size={self.sgd_minibatch_size} must not be larger than "
                f"train_batch_size={self.train_batch_size}."
            )
        envs = self.num_envs_per_worker * max(1, self.num_rollout_workers)
        rows = envs * self.get_fragment_length()
        if self.batch_mode == "truncate_episodes" and self.rollout_fragment_length != "auto":
            collected_rows = -(-self.train_batch_size // rows) * rows
            if collected_rows > 1.1 * self.train_batch_size:
                raise ConfigError(
                    f"train_batch_size={self.train_batch_size} cannot be collected within 10 %: "
                    f"{envs} environments times rollout_fragment_length="
                    f"{self.rollout_fragment_length} give {rows} rows per sample. Use "
                    "rollout_fragment_length='auto'."
                )
