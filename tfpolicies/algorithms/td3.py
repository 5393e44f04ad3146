"""Twin delayed deep deterministic policy gradient, Fujimoto et al. 2018 (arXiv:1802.09477).

One training step: collect a fragment, store its rows in a replay buffer, and update on rows sampled
uniformly from it, by minimising (algorithm 1 of the paper)

    L(theta) = sum_i E[w l(Q_i(s, a) - y)]           l: half the square, or Huber
    y = r + gamma^n (1 - terminated) min_i Q'_i(s', a')                  (section 4.2)
    a' = clip(pi'(s') + clip(sigma N(0, 1), -c, c), low, high)           (equation 14)
    L(phi) = -E[Q_1(s, pi(s))]                                           (section 5.2, delayed)

Target networks are updated by Q' <- tau Q + (1 - tau) Q', and pi' in the same way. Of d =
`policy_delay` updates, the first one also updates the actor and the target networks. A truncated
episode is bootstrapped, a terminated one is not. `twin_q`, `policy_delay` and
`smooth_target_policy` switch off the paper's three additions to DDPG; see `ddpg.py`.

With `update_order` "together" L(phi) uses the critics from before the update, as in RLlib; with
"critics_first" it uses them after their step, as in the paper and in Stable-Baselines3 (but not
where gradients are computed and applied in two calls).

Deviations from the paper: initial outputs are small, by kernels of norm 0.01; the rows of all
updates of a training step are sampled before the first update. Noise is added to actions as the
policy computes them: in [-1, 1] with `normalize_actions`. Deviations from RLlib: RLlib updates
target networks after each update; gamma's exponent is the number of rewards of a row.

The defaults are those of RLlib's contributed package `rllib_td3`, as of release 2.10; its
`actor_lr` and `critic_lr`, 1e-3, are the default `lr` here, which both use unless set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gymnasium as gym
import numpy as np
import tensorflow as tf

from tfpolicies.algorithms.off_policy import (
    UPDATE_ORDER,
    OffPolicyAlgorithm,
    OffPolicyConfig,
    OffPolicyTFPolicy,
    OffPolicyTrainingSettings,
    check_action_bounds,
    check_action_vectors,
)
from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.base.validators import BOOL, NON_NEGATIVE, POSITIVE, POSITIVE_INT
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.setting import setting
from tfpolicies.errors import ConfigError
from tfpolicies.exploration.random_actions import ContinuousLeaf
from tfpolicies.models.critics import make_critic_source
from tfpolicies.models.defaults import ACTIVATION, LAYER_SIZES
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.losses import half_square, huber, masked_mean
from tfpolicies.models.model_source import ModelSource
from tfpolicies.program.networks import NetworkPlan
from tfpolicies.program.traced_arguments import TracedModel, TrainBatch

__all__ = ["TD3", "TD3Config", "TD3TF1Policy", "TD3TF2Policy", "TD3TFPolicy"]


class TD3TFPolicy(OffPolicyTFPolicy):
    """The loss of TD3, for any runtime.

    Its networks are the actor (the only one that acts and is exported) and the `critic` (two of
    them with `twin_q`); both have target networks. A custom model is the actor; it returns `[B, k]`
    for k components of an action, and tanh maps them into the bounds. `learn_on_batch` returns
    `td_error` `[B]`, that of the first critic.
    """

    config_class = lazy_class("TD3Config")
    hyperparameters = (
        *OffPolicyTFPolicy.hyperparameters,
        *("actor_lr", "critic_lr", "huber_threshold", "l2_reg"),
        *("target_noise", "target_noise_clip"),
    )
    static_keys = (
        *OffPolicyTFPolicy.static_keys,
        *("actor_hidden_activation", "actor_hiddens", "critic_hidden_activation"),
        *("critic_hiddens", "policy_delay", "smooth_target_policy", "twin_q", "update_order"),
        *("use_huber", "use_state_preprocessor"),
    )

    def loss(
        self, model: TracedModel, dist_class: ActionDistribution, train_batch: TrainBatch
    ) -> list[Any]:
        """Returns the losses of actor and critics.

        With `update_order` "critics_first" that of the actor is a function.
        """
        mask, obs, critic = train_batch["loss_mask"], train_batch["obs"], self.networks["critic"]
        q = critic(obs, actions=train_batch[SampleBatch.ACTIONS])  # [B, 1], or 2 with twin_q
        errors = q - tf.stop_gradient(self._compute_targets(dist_class, train_batch))[:, None]
        weighted_losses = train_batch["weights"][:, None] * self._compute_td_loss(errors)
        critic_loss = masked_mean(tf.reduce_sum(weighted_losses, axis=-1), mask)
        critic_loss += self._compute_weight_decay(critic.model.trainable_variables)

        def actor_loss() -> tf.Tensor:
            actions = _compute_actions(dist_class, model, obs)
            loss = -masked_mean(critic(obs, actions=actions)[:, 0], mask)
            loss += self._compute_weight_decay(model.trainable_variables)
            self.record(actor_loss=loss)
            return loss

        self.record(critic_loss=critic_loss)
        self._record_values(q[:, 0], errors[:, 0], mask)
        updates_together = self.config["update_order"] == "together"
        return [actor_loss() if updates_together else actor_loss, critic_loss]

    def _compute_targets(
        self, dist_class: ActionDistribution, train_batch: TrainBatch
    ) -> tf.Tensor:
        """Returns the targets y `[B]`."""
        next_obs = train_batch[SampleBatch.NEXT_OBS]
        actions = _compute_actions(dist_class, self.target_model, next_obs)
        if self.config["smooth_target_policy"]:
            actions = self._smooth_actions(actions, dist_class)
        values = tf.reduce_min(self.target_networks["critic"](next_obs, actions=actions), axis=-1)
        return train_batch[SampleBatch.REWARDS] + self.compute_discounts(train_batch) * values

    def _smooth_actions(self, actions: tf.Tensor, dist_class: ActionDistribution) -> tf.Tensor:
        """Returns actions `[B, k]` with clipped noise, clipped to the bounds."""
        limit = self.config["target_noise_clip"]
        noise = self.config["target_noise"] * self.learning_noise
        leaf = ContinuousLeaf(
            cast(gym.spaces.Box, dist_class.space), self.config["normalize_actions"]
        )
        return leaf.clip(actions + tf.clip_by_value(noise, -limit, limit))

    def _compute_td_loss(self, errors: tf.Tensor) -> tf.Tensor:
        if not self.config["use_huber"]:
            return half_square(errors)
        threshold = self.config["huber_threshold"]
        return tf.square(threshold) * huber(errors / threshold)

    def _compute_weight_decay(self, variables: Sequence[Any]) -> tf.Tensor:
        """Returns `l2_reg` times half the squares of all weights but biases."""
        squares = [tf.reduce_sum(tf.square(x)) for x in variables if "bias" not in x.name]
        return 0.5 * self.config["l2_reg"] * sum(squares, tf.zeros([]))

    def _select_target_updates(self, target_mask: np.ndarray) -> np.ndarray:
        """Returns the target-update mask, limited to updates in which the actor is updated."""
        update_indices = self.num_grad_updates + np.arange(len(target_mask))
        return np.asarray(target_mask, bool) & (update_indices % self.config["policy_delay"] == 0)

    @classmethod
    def learning_noise_size(cls, dist_class: ActionDistribution, static: Mapping[str, Any]) -> int:
        """Returns the noise size of a row: for each component of the action in the next state."""
        return int(dist_class.num_inputs) if static["smooth_target_policy"] else 0

    @classmethod
    def network_plans(
        cls, observation_space: gym.Space, dist_class: ActionDistribution, static: Mapping[str, Any]
    ) -> dict[str, NetworkPlan]:
        """Returns the plans of actor and critics."""
        config = {**_make_model_config(static, "critic"), "custom_model": None}
        source = make_critic_source(observation_space, dist_class, config, 1 + static["twin_q"])
        actor = NetworkPlan(target=True, lr="actor_lr", every=static["policy_delay"])
        critic = NetworkPlan(source.make, target=True, lr="critic_lr", key=source.key)
        return {"model": actor, "critic": critic}

    @classmethod
    def _get_model_source(
        cls, observation_space: gym.Space, dist_class: ActionDistribution, static: Mapping[str, Any]
    ) -> ModelSource:
        """Returns the source of actors; those of the catalog have `actor_hiddens`."""
        actor_config = {**static, "model": _make_model_config(static, "actor")}
        return super()._get_model_source(observation_space, dist_class, actor_config)

    @classmethod
    def _get_distribution(cls, action_space: gym.Space, static: Mapping[str, Any]) -> Any:
        """Returns the distribution that maps the actor's outputs into the bounds.

        Raises:
            ConfigError: for a stochastic distribution.
        """
        default = (
            "squashed_deterministic" if static["normalize_actions"] else "bounded_deterministic"
        )
        settings = static["model"]
        custom_dist = settings["custom_action_dist"]
        dist_class = ActionDistribution.for_space(
            action_space, default if custom_dist is None else custom_dist, settings
        )
        if dist_class.noise_size:
            raise ConfigError(
                f"model['custom_action_dist'] must be deterministic for {cls.__name__}, whose "
                f"policy is one action for each observation; got {custom_dist!r}. Leave it out, "
                "and set `exploration_config`."
            )
        return dist_class

    def validate_spaces(
        self, observation_space: gym.Space, action_space: gym.Space, config: Mapping[str, Any]
    ) -> None:
        super().validate_spaces(observation_space, action_space, config)
        check_action_vectors(action_space, type(self).__name__)
        if config["model"]["custom_action_dist"] is None:
            check_action_bounds(action_space, type(self).__name__)


def _compute_actions(
    dist_class: ActionDistribution, model: TracedModel, obs: TensorStructure
) -> tf.Tensor:
    return dist_class(model({SampleBatch.OBS: obs})[0], model).deterministic_sample()


def _make_model_config(static: Mapping[str, Any], network: str) -> dict[str, Any]:
    settings = static["model"]
    return {
        **settings,
        "fcnet_hiddens": settings["fcnet_hiddens"] if static["use_state_preprocessor"] else [],
        "post_fcnet_hiddens": static[f"{network}_hiddens"],
        "post_fcnet_activation": static[f"{network}_hidden_activation"],
    }


class TD3TF2Policy(TD3TFPolicy):
    """TD3 on traced TensorFlow functions.

    >>> from gymnasium import spaces
    >>> space, actions = spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (1,))
    >>> policy = TD3TF2Policy(space, actions, {"seed": 0, "inference": "tf"})
    >>> policy.compute_actions([space.sample(), space.sample()]).actions.shape
    (2, 1)
    """


class TD3TF1Policy(TD3TFPolicy):
    """TD3 in graph mode, in a `tf.Graph` and its own session."""

    runtime = "session"


class TD3(OffPolicyAlgorithm):
    """The training loop of TD3; made by `TD3Config().build()`.

    `num_target_updates` counts due target updates; only one of `policy_delay` is done.
    """

    config_class = lazy_class("TD3Config")
    policy_classes = {"tf2": TD3TF2Policy, "tf": TD3TF1Policy}


_OPTIONAL_RATE = NON_NEGATIVE.or_none()


@dataclass(frozen=True, kw_only=True)
class TD3TrainingSettings(OffPolicyTrainingSettings):
    """The training settings of TD3, and with other defaults those of DDPG.

    Hidden layers are only those of `actor_hiddens` and `critic_hiddens`; with
    `use_state_preprocessor` those of `model["fcnet_hiddens"]` come before them. `model` configures
    convolutions for images, and its `custom_model` is the actor.
    """

    twin_q: bool = setting(True, BOOL)  # two critics, of which the smaller value counts
    policy_delay: int = setting(
        2, POSITIVE_INT
    )  # updates of the critics for one of actor and targets
    smooth_target_policy: bool = setting(True, BOOL)  # noise on the target network's actions
    target_noise: float = setting(0.2, NON_NEGATIVE)  # its standard deviation
    target_noise_clip: float = setting(0.5, NON_NEGATIVE)  # its largest absolute value
    use_state_preprocessor: bool = setting(False, BOOL)
    actor_hiddens: Any = setting([400, 300], LAYER_SIZES)
    actor_hidden_activation: str | None = setting("relu", ACTIVATION)
    critic_hiddens: Any = setting([400, 300], LAYER_SIZES)
    critic_hidden_activation: str | None = setting("relu", ACTIVATION)
    lr: Any = 1e-3
    actor_lr: float | None = setting(None, _OPTIONAL_RATE)  # None: lr
    critic_lr: float | None = setting(None, _OPTIONAL_RATE)  # None: lr
    update_order: str = setting("together", UPDATE_ORDER)  # critics_first: then the actor
    use_huber: bool = setting(False, BOOL)
    huber_threshold: float = setting(1.0, POSITIVE)
    l2_reg: float = setting(0.0, NON_NEGATIVE, normalize=lambda x: 0.0 if x is None else x)
    grad_clip_by: str = "norm"
    train_batch_size: int = 100
    tau: float = 5e-3
    target_network_update_freq: int = 0
    num_steps_sampled_before_learning_starts: int = 10_000
    replay_buffer_config: Mapping[str, Any] = setting(
        {"type": "MultiAgentReplayBuffer", "capacity": 1_000_000}
    )


class TD3Config(OffPolicyConfig):
    """The config of TD3.

    >>> config = TD3Config().environment("Pendulum-v1").training(policy_delay=3)
    >>> config.lr, config.tau, config.exploration_config["type"]
    (0.001, 0.005, 'GaussianNoise')
    """

    training_section = TD3TrainingSettings

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or TD3)
        self.reporting(min_sample_timesteps_per_iteration=1000)
        self.evaluation(evaluation_config={"explore": False})
        self.exploration(
            exploration_config={
                "type": "GaussianNoise",
                "random_timesteps": 10_000,
                "stddev": 0.1,
                "initial_scale": 1.0,
                "final_scale": 1.0,
                "scale_timesteps": 1,
            }
        )

    def validate(self) -> None:
        """Checks settings against each other.

        Raises:
            ConfigError: if settings contradict each other.
        """
        super().validate()
        if self.policy_delay > 1 and self.target_network_update_freq > 0:
            raise ConfigError(
                f"target_network_update_freq must be 0 with policy_delay={self.policy_delay}, got "
                f"{self.target_network_update_freq}: target networks are updated with the actor "
                "then. Leave it out, or use policy_delay=1."
            )
