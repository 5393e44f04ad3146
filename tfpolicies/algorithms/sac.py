"""Soft actor-critic, Haarnoja et al. 2018 (arXiv:1801.01290, 1812.05905).

One training step: collect a fragment, store its rows in a replay buffer, and update on rows sampled
from it, uniformly or by priority (`replay_buffer_config`). Each update takes one step of each
optimizer, to minimise

    J_Q = sum_i E[w l(Q_i(s, a) - y)]     (1812.05905, eq. 5; l: Huber, or half the square)
    y = r + gamma^n (1 - terminated) (min_i Q'_i(s', a') - alpha log pi(a'|s'))     (eq. 6)
    J_pi = E[alpha log pi(a~|s) - min_i Q_i(s, a~)]  (eq. 9; a~ = tanh(mean + std noise), eq. 8)
    J_alpha = -log(alpha) E[log pi(a~|s) + H]        (eq. 18, by log(alpha) in place of alpha)

where a' and a~ are sampled from the current policy, with noise as an input, and the target networks
Q' are updated after each update: Q' <- tau Q + (1 - tau) Q'. A truncated episode is bootstrapped, a
terminated one is not. log pi is that of the squashed action (1812.05905, appendix C).

For Discrete actions (Christodoulou 2019, arXiv:1910.07207), nothing is sampled: critics evaluate
all actions, and expectations over the policy are sums weighted by its probabilities,

    y = r + gamma^n (1 - terminated) sum_a pi(a|s') (min_i Q'_i(s', a) - alpha log pi(a|s'))
    J_pi = E[sum_a pi(a|s) (alpha log pi(a|s) - min_i Q_i(s, a))]
    J_alpha = -log(alpha) E[sum_a pi(a|s) (log pi(a|s) + H)]            (equations 10, 12, 11)

Where the references differ, there is a setting: `td_error_loss_fn` is "huber" (delta 1) by default,
as in RLlib, or "mse" as in the papers and in Stable-Baselines3. With `update_order` "together" J_pi
uses the critics from before the update, as in RLlib; with "critics_first" it uses them after their
step, as in the papers and in Stable-Baselines3 (but not where gradients are computed and applied in
two calls). `optimizer` has Adam's epsilon, 1e-7 in Keras, 1e-8 in torch. Initial weights are those
of `model` and `q_model_config`, orthogonal by `ortho_init`, or those of a `custom_model`.

Deviations from the papers: alpha is learned as its logarithm; the log standard deviation is clipped
to [-5, 2]; with uniform replay, the rows of all updates of a training step are sampled before the
first update. With `normalize_actions` actions are in [-1, 1] inside, so that the entropy does not
depend on the units of the action space. The weights of prioritised replay apply only to the
critics. H is by default -dim(A), or 0.98 log n for n Discrete actions; RLlib's J_pi for Discrete
actions uses only the first critic. RLlib's config names a prioritised buffer together with
`"prioritized_replay": False`; here replay is uniform by default.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import keras
import tensorflow as tf

from tfpolicies.algorithms.off_policy import (
    UPDATE_ORDER,
    OffPolicyAlgorithm,
    OffPolicyConfig,
    OffPolicyTFPolicy,
    OffPolicyTrainingSettings,
    check_action_bounds,
    check_action_vectors,
    check_feed_forward,
)
from tfpolicies.base.type_aliases import TensorStructure
from tfpolicies.base.validators import (
    BOOL,
    NON_NEGATIVE,
    POSITIVE,
    Validator,
    is_number,
    is_one_of,
    one_of,
)
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.setting import get_metadata, setting
from tfpolicies.errors import ConfigError
from tfpolicies.models.critics import make_critic_source
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.distributions import ActionDistribution, Categorical
from tfpolicies.models.losses import half_square, huber, masked_mean
from tfpolicies.models.model_config import complete_model_config
from tfpolicies.models.q_learning import select_rows
from tfpolicies.program.networks import NetworkPlan
from tfpolicies.program.traced_arguments import TracedModel, TrainBatch

__all__ = ["SAC", "SACConfig", "SACTF1Policy", "SACTF2Policy", "SACTFPolicy"]


class SACTFPolicy(OffPolicyTFPolicy):
    """The loss of SAC, for any runtime.

    Its networks are the actor (the only one that acts and is exported), the `critic` (two of them
    with `twin_q`) and the `temperature`. A custom model is the actor; it returns `[B, 2 k]` for k
    components of an action, or the logits `[B, n]` of n Discrete actions. `learn_on_batch` returns
    `td_error` `[B]`.
    """

    config_class = lazy_class("SACConfig")
    hyperparameters = (
        *OffPolicyTFPolicy.hyperparameters,
        *("actor_lr", "critic_lr", "entropy_lr", "target_entropy"),
    )
    static_keys = (
        *OffPolicyTFPolicy.static_keys,
        *("initial_alpha", "q_model_config", "td_error_loss_fn", "twin_q", "update_order"),
    )

    def loss(
        self, model: TracedModel, dist_class: ActionDistribution, train_batch: TrainBatch
    ) -> list[Any]:
        """Returns the losses of actor, critics and temperature.

        With `update_order` "critics_first" that of the actor is a function.
        """
        mask, obs = train_batch["loss_mask"], train_batch[SampleBatch.OBS]
        next_obs = train_batch[SampleBatch.NEXT_OBS]
        critic, target_critic = self.networks["critic"], self.target_networks["critic"]
        log_alpha = self.networks["temperature"]()
        alpha = tf.stop_gradient(tf.exp(log_alpha))

        policy = dist_class(model(train_batch)[0], model)
        next_policy = dist_class(model({SampleBatch.OBS: next_obs})[0], model)
        current_choice = self._make_choice(0, policy, critic, obs)
        next_choice = self._make_choice(1, next_policy, target_critic, next_obs)

        soft_values = next_choice.expectation(next_choice.min_values - alpha * next_choice.logp)
        targets = (
            train_batch[SampleBatch.REWARDS] + self.compute_discounts(train_batch) * soft_values
        )
        q = current_choice.values(train_batch[SampleBatch.ACTIONS])  # [B, 1], or 2 with twin_q
        errors = q - tf.stop_gradient(targets)[:, None]
        weighted_losses = train_batch["weights"][:, None] * self._compute_td_loss(errors)
        critic_loss = masked_mean(tf.reduce_sum(weighted_losses, axis=-1), mask)

        def actor_loss(choice: SampledActions | AllActions) -> tf.Tensor:
            loss = masked_mean(choice.expectation(alpha * choice.logp - choice.min_values), mask)
            self.record(actor_loss=loss)
            return loss

        target_entropy = self._get_target_entropy(dist_class.space)
        gap = (
            tf.stop_gradient(masked_mean(current_choice.expectation(current_choice.logp), mask))
            + target_entropy
        )
        alpha_loss = -log_alpha * gap

        self.record(
            critic_loss=critic_loss / q.shape[-1],
            alpha_loss=alpha_loss,
            alpha_value=alpha,
            target_entropy=target_entropy,
        )
        self._record_values(q[:, 0], tf.reduce_mean(tf.abs(errors), axis=-1), mask)
        if self.config["update_order"] == "together":
            return [actor_loss(current_choice), critic_loss, alpha_loss]
        return [
            lambda: actor_loss(self._make_choice(0, policy, critic, obs)),
            critic_loss,
            alpha_loss,
        ]

    def _compute_td_loss(self, errors: tf.Tensor) -> tf.Tensor:
        return huber(errors) if self.config["td_error_loss_fn"] == "huber" else half_square(errors)

    def _make_choice(
        self, call: int, distribution: Any, critic: Callable[..., tf.Tensor], obs: TensorStructure
    ) -> Any:
        """Returns the policy's actions in B states; call 0 and 1 have different noise."""
        if _is_discrete(self.action_space):
            return AllActions(distribution, critic, obs)
        noise = tf.split(self.learning_noise, 2, axis=-1)
        return SampledActions(distribution, noise[call], critic, obs)

    def _get_target_entropy(self, space: gym.Space) -> tf.Tensor:
        """Returns H: the setting, or the default for "auto"."""
        default = -1.0 * math.prod(space.shape or ())
        if isinstance(space, gym.spaces.Discrete):
            default = 0.98 * math.log(space.n)
        setting = self.config["target_entropy"]
        return tf.where(tf.math.is_inf(setting), default, setting)

    @classmethod
    def learning_noise_size(cls, dist_class: ActionDistribution, static: Mapping[str, Any]) -> int:
        """Returns the noise size of a row: for actions in its observation and in the next one."""
        del static
        return 0 if _is_discrete(dist_class.space) else 2 * dist_class.noise_size

    @classmethod
    def network_plans(
        cls, observation_space: gym.Space, dist_class: ActionDistribution, static: Mapping[str, Any]
    ) -> dict[str, NetworkPlan]:
        """Returns the plans of actor, critics and temperature.

        Raises:
            ConfigError: for settings that critics cannot have, such as `use_lstm`.
        """
        name, count = "q_model_config", 1 + static["twin_q"]
        config = complete_model_config(static[name])
        check_feed_forward(name, config, cls.__name__)
        source = make_critic_source(observation_space, dist_class, config, count, setting=name)
        initial_log_alpha = math.log(static["initial_alpha"])
        return {
            "model": NetworkPlan(lr="actor_lr"),
            "critic": NetworkPlan(source.make, target=True, lr="critic_lr", key=source.key),
            "temperature": NetworkPlan(lambda: Temperature(initial_log_alpha), lr="entropy_lr"),
        }

    @classmethod
    def _get_distribution(cls, action_space: gym.Space, static: Mapping[str, Any]) -> Any:
        """Returns a squashed Gaussian, or without `normalize_actions` an unsquashed one.

        For Discrete actions it is categorical.

        Raises:
            ConfigError: for a distribution that the loss can neither sample nor sum over.
        """
        settings = static["model"]
        custom_dist = settings["custom_action_dist"]
        if _is_discrete(action_space):
            dist_class = ActionDistribution.for_space(action_space, custom_dist, settings)
            is_supported, rule = (
                dist_class.leaf_classes == (Categorical,),
                "be None for Discrete actions",
            )
        else:
            default = "squashed_gaussian" if static["normalize_actions"] else "diag_gaussian"
            dist_name = default if custom_dist is None else custom_dist
            dist_class = ActionDistribution.for_space(action_space, dist_name, settings)
            is_supported = {noise_type for noise_type, _ in dist_class.noise_blocks} == {"normal"}
            rule = "transform normal noise, from which the loss samples actions"
        if not is_supported:
            raise ConfigError(
                f"{cls.__name__}: model['custom_action_dist'] must {rule}; got {custom_dist!r}."
            )
        return dist_class

    def validate_spaces(
        self, observation_space: gym.Space, action_space: gym.Space, config: Mapping[str, Any]
    ) -> None:
        super().validate_spaces(observation_space, action_space, config)
        if not _is_discrete(action_space):
            class_name = type(self).__name__
            check_action_vectors(action_space, class_name, "Discrete and ")
            has_default_dist = config["model"]["custom_action_dist"] is None
            if config["normalize_actions"] and has_default_dist:
                check_action_bounds(action_space, class_name, _UNSQUASHED_HINT)


_UNSQUASHED_HINT = (
    " Or use a Gaussian that is not squashed: environment(normalize_actions=False, "
    "clip_actions=True)."
)


def _is_discrete(action_space: gym.Space) -> bool:
    return isinstance(action_space, gym.spaces.Discrete)


class SampledActions:
    """The policy in B states, represented by one sampled action per state.

    Args:
        distribution: of actions.
        noise: `[B, k]`.
        critic: returns values `[B, c]` of observations and actions.
        obs: the states.

    Attributes:
        logp: of the actions, `[B]`.
    """

    def __init__(
        self,
        distribution: Any,
        noise: tf.Tensor,
        critic: Callable[..., tf.Tensor],
        obs: TensorStructure,
    ) -> None:
        self._critic, self._obs = critic, obs
        self._actions = distribution.sample(noise)
        self.logp = distribution.sampled_logp(noise)

    @functools.cached_property
    def min_values(self) -> tf.Tensor:
        """The smallest of the critics' values of the actions, `[B]`."""
        return tf.reduce_min(self.values(self._actions), axis=-1)

    def values(self, actions: tf.Tensor) -> Any:
        """Returns each critic's values of the given actions, `[B, c]`."""
        return self._critic(self._obs, actions=actions)

    def expectation(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns the expectation over the policy of numbers `[B]`: the numbers themselves."""
        return numbers


class AllActions:
    """The policy in B states, represented by the probabilities of all n actions.

    Args:
        distribution: a `Categorical`.
        critic: returns values `[B, n, c]` of observations.
        obs: the states.

    Attributes:
        logp: of all actions, `[B, n]`.
        min_values: the smallest of the critics' values of each, `[B, n]`.
    """

    def __init__(
        self, distribution: Any, critic: Callable[..., tf.Tensor], obs: TensorStructure
    ) -> None:
        self._values = critic(obs)
        self.logp = distribution.log_probs()
        self.min_values = tf.reduce_min(self._values, axis=-1)

    def values(self, actions: tf.Tensor) -> tf.Tensor:
        """Returns each critic's values of the given actions, `[B, c]`."""
        return select_rows(self._values, actions)

    def expectation(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns the expectation over the policy of numbers `[B, n]` of the actions: `[B]`."""
        return tf.reduce_sum(tf.exp(self.logp) * numbers, axis=-1)


class Temperature(keras.layers.Layer):
    """The logarithm of alpha, one variable; `call()` returns it.

    Args:
        initial_value: its initial value.
    """

    def __init__(self, initial_value: float) -> None:
        super().__init__(name="temperature")
        initializer = keras.initializers.Constant(initial_value)
        self.log_alpha = self.add_weight(name="log_alpha", shape=(), initializer=initializer)

    def call(self) -> Any:
        return tf.convert_to_tensor(self.log_alpha)


class SACTF2Policy(SACTFPolicy):
    """SAC on traced TensorFlow functions.

    >>> from gymnasium import spaces
    >>> space, actions = spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (1,))
    >>> policy = SACTF2Policy(space, actions, {"seed": 0, "inference": "tf"})
    >>> policy.compute_actions([space.sample(), space.sample()]).actions.shape
    (2, 1)
    """


class SACTF1Policy(SACTFPolicy):
    """SAC in graph mode, in a `tf.Graph` and its own session."""

    runtime = "session"


class SAC(OffPolicyAlgorithm):
    """The training loop of SAC; made by `SACConfig().build()`."""

    config_class = lazy_class("SACConfig")
    policy_classes = {"tf2": SACTF2Policy, "tf": SACTF1Policy}


_TARGET_ENTROPY = Validator(lambda x: x is None or is_number(x), "a number, or 'auto'")
_OPTIONAL_RATE = NON_NEGATIVE.or_none()


@dataclass(frozen=True, kw_only=True)
class SACTrainingSettings(OffPolicyTrainingSettings):
    """The training settings of SAC; `model` is RLlib's `policy_model_config`.

    RLlib's `optimization` sets the three learning rates.
    """

    lr: Any = 3e-4
    actor_lr: float | None = setting(None, _OPTIONAL_RATE)  # None: lr
    critic_lr: float | None = setting(None, _OPTIONAL_RATE)  # None: lr
    entropy_lr: float | None = setting(None, _OPTIONAL_RATE)  # of log(alpha); None: lr
    grad_clip_by: str = "norm"
    train_batch_size: int = 256
    model: Mapping[str, Any] = setting({**MODEL_DEFAULTS, "fcnet_activation": "relu"})
    q_model_config: Mapping[str, Any] = setting(  # the critics'
        {**MODEL_DEFAULTS, "fcnet_activation": "relu"},
        **get_metadata(OffPolicyTrainingSettings)["model"],
    )
    twin_q: bool = setting(True, BOOL)  # two critics; the smaller value is used
    td_error_loss_fn: str = setting("huber", one_of("huber", "mse"))  # mse: half the square
    update_order: str = setting("together", UPDATE_ORDER)  # critics_first: then the actor
    initial_alpha: float = setting(1.0, POSITIVE)
    target_entropy: float | None = setting(  # nats; None, "auto": -dim(A), or 0.98 log n
        None, _TARGET_ENTROPY, normalize=lambda x: None if is_one_of(x, "auto") else x
    )
    tau: float = 5e-3
    target_network_update_freq: int = 0
    num_steps_sampled_before_learning_starts: int = 1500
    replay_buffer_config: Mapping[str, Any] = setting(
        {"type": "MultiAgentReplayBuffer", "capacity": 1_000_000}
    )


class SACConfig(OffPolicyConfig):
    """The config of SAC.

    >>> config = SACConfig().environment("Pendulum-v1").training(
    ...     optimization_config={"critic_learning_rate": 1e-3}, twin_q=False
    ... )
    >>> config.critic_lr, config.tau, config.get_fragment_length()
    (0.001, 0.005, 1)
    """

    training_section = SACTrainingSettings

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or SAC)
        self.reporting(min_sample_timesteps_per_iteration=1000)
