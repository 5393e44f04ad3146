"""Deep Q-learning, Mnih et al. 2015 (doi:10.1038/nature14236).

One training step: collect a fragment, keep its rows in a ring buffer, and update on rows drawn
from it, uniformly or by priorities (`replay_buffer_config`), by minimising

    L = E[w l(Q(s, a) - y)]                          l: Huber (delta 1), or the square
    y = r + gamma^n (1 - terminated) Q'(s', a*)      (Mnih et al.; n-step: Sutton & Barto 2018, 7.1)

where Q' is the target network and a* maximises Q (double Q-learning, van Hasselt et al. 2016,
arXiv:1509.06461, equation 4) or else Q'. The network may be duelling (Wang et al. 2016,
arXiv:1511.06581). A truncated episode is bootstrapped, a terminated one is not.

Deviations from the papers: Adam; gradients are clipped by each variable's norm; where rows are
drawn uniformly, those of all updates of one training step are drawn before the first of them, which
run in one compiled call. `replay/prioritized.py` lists those of prioritised replay.
Near the end of a fragment, n-step sums have fewer terms, and gamma's exponent is their number.
Distributional and noisy networks are not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf

from tfpolicies.algorithms.off_policy import (
    BY_PRIORITIES,
    OffPolicyAlgorithm,
    OffPolicyConfig,
    OffPolicyTFPolicy,
    OffPolicyTraining,
    check_rows_alone,
)
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.later import later
from tfpolicies.config.setting import setting
from tfpolicies.errors import UnsupportedSpaceError
from tfpolicies.models.defaults import COUNTS
from tfpolicies.models.distributions import ActionDistribution
from tfpolicies.models.distributions.dueling import DuelingValues
from tfpolicies.models.losses import huber, masked_mean
from tfpolicies.models.network import ModelSource, q_model_source
from tfpolicies.models.q_learning import chosen_values, td_errors, td_targets
from tfpolicies.rules import BOOL, POSITIVE, Rule, one_of
from tfpolicies.state import PolicyState

__all__ = ["DQN", "DQNConfig", "DQNTF1Policy", "DQNTF2Policy", "DQNTFPolicy"]


class DQNTFPolicy(OffPolicyTFPolicy):
    """The mathematics of DQN, for any runtime.

    `extras["q_values"]` `[B, n]` of acting are the action values; those of actions that a mask
    forbids are the smallest float32. `learn_on_batch` gives `td_error` `[B]`.
    """

    config_class = later("DQNConfig")
    _acting_only = frozenset({"q_values"})
    static_keys = (
        *OffPolicyTFPolicy.static_keys,
        "adam_epsilon",
        "double_q",
        "dueling",
        "hiddens",
        "td_error_loss_fn",
    )

    def validate_spaces(
        self, observation_space: gym.Space, action_space: gym.Space, config: Mapping[str, Any]
    ) -> None:
        super().validate_spaces(observation_space, action_space, config)
        if not isinstance(action_space, gym.spaces.Discrete):
            raise UnsupportedSpaceError(
                f"{type(self).__name__} supports Discrete actions only, got {action_space}: a "
                "value is estimated for each action."
            )

    @classmethod
    def _distribution(cls, action_space: gym.Space, static: Mapping[str, Any]) -> Any:
        """Returns what turns action values into actions: the largest one is the greedy action."""
        kind = DuelingValues if _is_dueling(static) else ActionDistribution
        return kind.of(action_space)

    @classmethod
    def _model_source(
        cls, observation_space: gym.Space, dist_class: Any, static: Mapping[str, Any]
    ) -> ModelSource:
        """Returns where Q-networks come from.

        A model of the user's gives the values of all actions, `[B, n]`; `dueling` and `hiddens` do
        not concern it.
        """
        if static["model"]["custom_model"] is not None:
            return super()._model_source(observation_space, dist_class, static)
        check_rows_alone("model", static["model"], cls.__name__)
        return q_model_source(observation_space, dist_class.num_inputs, static)

    @classmethod
    def _make_optimizer(cls, static: Mapping[str, Any]) -> Any:
        """Returns a new Keras optimizer; Adam, the default one, gets `adam_epsilon`."""
        settings = dict(static["optimizer"])
        if str(settings.get("type", "adam")).lower() == "adam":
            settings.setdefault("epsilon", static["adam_epsilon"])
        return super()._make_optimizer({**static, "optimizer": settings})

    # -- learning -----------------------------------------------------------------------------

    def loss(self, model: Any, dist_class: Any, train_batch: Any) -> tf.Tensor:
        """Returns the mean loss of the temporal-difference errors, weighted by `weights`."""
        del dist_class
        q, _ = model(train_batch)
        reached = {SampleBatch.OBS: train_batch[SampleBatch.NEXT_OBS]}
        next_target, _ = self.target_model(reached)
        chooser = model(reached)[0] if self.config["double_q"] else next_target
        targets = td_targets(
            train_batch[SampleBatch.REWARDS],
            self.discounts(train_batch),
            next_target,
            chooser,
        )
        chosen, mask = chosen_values(q, train_batch[SampleBatch.ACTIONS]), train_batch["loss_mask"]
        errors = td_errors(chosen, tf.stop_gradient(targets))
        self._record_values(chosen, errors, mask)
        loss = huber if self.config["td_error_loss_fn"] == "huber" else tf.square
        return masked_mean(train_batch["weights"] * loss(errors), mask)

    def extra_action_out_fn(self) -> dict[str, tf.Tensor]:
        """Returns the action values, `q_values` `[N, n]`."""
        return {"q_values": self.dist_inputs}

    def compute_td_error(
        self,
        obs_t: Any,
        act_t: Any,
        rew_t: Any,
        obs_tp1: Any,
        terminateds_mask: Any,
        importance_weights: Any = None,
    ) -> np.ndarray:
        """Returns the temporal-difference error of each transition, float32 `[B]`; updates nothing.

        Args:
            obs_t: observations `[B, ...]`.
            act_t: actions `[B]`.
            rew_t: rewards `[B]`, sums over `n_step` steps.
            obs_tp1: the observations reached `[B, ...]`.
            terminateds_mask: `[B]`, 1 or True where the episode terminated.
            importance_weights: accepted and unused: they weigh the loss, not the errors.

        Raises:
            ObservationError: if observations do not fit their space.
        """
        del importance_weights
        next_target = self._q_values(self._target_state(), obs_tp1)
        chooser = self._q_values(self._state, obs_tp1) if self.config["double_q"] else next_target
        discount = self.hyper("gamma") ** self.config["n_step"]
        goes_on = discount * (1.0 - np.asarray(terminateds_mask, np.float32))
        targets = td_targets(np.asarray(rew_t, np.float32), goes_on, next_target, chooser)
        chosen = chosen_values(self._q_values(self._state, obs_t), np.asarray(act_t))
        return td_errors(chosen, targets).numpy()

    def _target_state(self) -> PolicyState:
        """Returns a state whose model is the target network, for acting."""
        state = self._state.copy()
        for name, source in state.layout.followed_segments("target"):
            state.segments[source][...] = state.segments[name]
        return state

    def _q_values(self, state: PolicyState, obs: Any) -> np.ndarray:
        return self._acting.dist_inputs(self._acting.checked_inputs(obs), state)


def _is_dueling(static: Mapping[str, Any]) -> bool:
    return static["dueling"] and static["model"]["custom_model"] is None


class DQNTF2Policy(DQNTFPolicy):
    """DQN on traced TensorFlow functions.

    >>> from gymnasium import spaces
    >>> space, actions = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
    >>> policy = DQNTF2Policy(space, actions, {"seed": 0, "inference": "tf"})
    >>> policy.compute_actions(np.zeros((3, 4), np.float32)).extras["q_values"].shape
    (3, 2)
    """


class DQNTF1Policy(DQNTFPolicy):
    """DQN in graph mode, in a `tf.Graph` and its own session."""

    runtime = "session"


class DQN(OffPolicyAlgorithm):
    """The training loop of DQN; made by `DQNConfig().build()`."""

    config_class = later("DQNConfig")
    policy_classes = {"tf2": DQNTF2Policy, "tf": DQNTF1Policy}


@dataclass(frozen=True, kw_only=True)
class DQNTraining(OffPolicyTraining):
    """The training settings of DQN."""

    lr: float = 5e-4
    grad_clip: float | None = 40.0
    grad_clip_by: str = "norm"
    replay_buffer_config: Mapping[str, Any] = setting(BY_PRIORITIES)
    adam_epsilon: float = setting(1e-8, POSITIVE)  # of the default optimizer
    double_q: bool = setting(True, BOOL)  # the online network chooses, the target one values
    dueling: bool = setting(True, BOOL)  # off for a model of one's own
    hiddens: Any = setting([256], COUNTS)  # hidden layers of the heads
    td_error_loss_fn: str = setting("huber", one_of("huber", "mse"))
    num_atoms: int = setting(1, Rule(lambda x: x == 1, "1 (no distributional network)"))
    noisy: bool = setting(False, Rule(lambda x: x is False, "False (no noisy network)"))


class DQNConfig(OffPolicyConfig):
    """The config of DQN.

    >>> config = DQNConfig().environment("CartPole-v1").training(lr=1e-3, n_step=3)
    >>> config.fragment_length(), config.exploration_config["type"]
    (3, 'EpsilonGreedy')
    """

    training_section = DQNTraining

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or DQN)
        self.reporting(min_sample_timesteps_per_iteration=1000)
        self.evaluation(evaluation_config={"explore": False})
        self.exploration(
            exploration_config={
                "type": "EpsilonGreedy",
                "initial_epsilon": 1.0,
                "final_epsilon": 0.02,
                "epsilon_timesteps": 10_000,
            }
        )
