"""Deep Q-learning, Mnih et al. 2015 (doi:10.1038/nature14236), with the extensions of Rainbow.

One training step: collect a fragment, store its rows in a replay buffer, and update on rows sampled
from it, uniformly or by priority (`replay_buffer_config`), by minimising

    L = E[w l(Q(s, a) - y)]                          l: Huber (delta 1), or the square
    y = r + gamma^n (1 - terminated) Q'(s', a*)      (Mnih et al.; n-step: Sutton & Barto 2018, 7.1)

where Q' is the target network and a* maximises Q (double Q-learning, van Hasselt et al. 2016,
arXiv:1509.06461, equation 4) or else Q'. The network may be duelling (Wang et al. 2016,
arXiv:1511.06581). A truncated episode is bootstrapped, a terminated one is not.

With `num_atoms` > 1 the network gives the distribution Z(s, a) of the return on atoms from `v_min`
to `v_max` (C51, Bellemare et al. 2017, arXiv:1707.06887, algorithm 1), and

    L = E[w H(P y, Z(s, a))],   y = r + gamma^n (1 - terminated) Z'(s', a*),   Q(s, a) = E[Z(s, a)]

where P projects onto the atoms (equation 7) and H is the cross entropy, in nats. The cross entropy
of a row is also its error for priorities, as in RLlib; Rainbow (Hessel et al. 2018,
arXiv:1710.02298) uses the KL divergence, which is smaller by the entropy of P y.

With `noisy` the layers after the encoder are noisy (Fortunato et al. 2018, arXiv:1706.10295:
factorised noise, which is an input). When acting, each row has its own noise; an update draws noise
for Q, Q' and the network that chooses a* once for all rows (their algorithm 1). Greedy actions and
`compute_td_error` use the mean weights. `exploration_config` does not change, as in RLlib: for
Rainbow, which has no epsilon, set it to 0.

Deviations from the papers: Adam; gradients are clipped by each variable's norm; with uniform
replay, the rows of all updates of a training step are sampled before the first update, and the
updates run in one compiled call. `replay/prioritized.py` lists those of prioritised replay. Near
the end of an episode, n-step sums have fewer terms, and gamma's exponent is their number. The means
of noisy layers are initialised like other layers, not uniformly, and sigmas with sigma0 /
sqrt(inputs), as in the paper; RLlib draws the sigmas of kernels randomly, independent of sigma0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import tensorflow as tf

from tfpolicies.algorithms.off_policy import (
    PRIORITIZED_REPLAY_CONFIG,
    OffPolicyAlgorithm,
    OffPolicyConfig,
    OffPolicyTFPolicy,
    OffPolicyTrainingSettings,
    check_feed_forward,
)
from tfpolicies.base.type_aliases import Structure, TensorStructure
from tfpolicies.base.validators import (
    BOOL,
    FINITE,
    NON_NEGATIVE,
    POSITIVE,
    POSITIVE_INT,
    is_one_of,
    one_of,
)
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.setting import check, setting
from tfpolicies.errors import ConfigError, UnsupportedSpaceError
from tfpolicies.exploration.parameter_noise import ParameterNoise
from tfpolicies.models import q_learning
from tfpolicies.models.defaults import LAYER_SIZES
from tfpolicies.models.distributions import ActionDistribution, Categorical
from tfpolicies.models.distributions.action_values import AtomValues, DuelingValues
from tfpolicies.models.eager_mode import ensure_eager
from tfpolicies.models.losses import huber, masked_mean
from tfpolicies.models.model_source import ModelSource, make_q_model_source
from tfpolicies.models.network import NetworkInputs
from tfpolicies.models.ports import NOISE
from tfpolicies.program.policy_state import PolicyState
from tfpolicies.program.traced_arguments import TracedModel, TrainBatch

__all__ = ["DQN", "DQNConfig", "DQNTF1Policy", "DQNTF2Policy", "DQNTFPolicy"]


_MAX_ATOM = 1e38  # float32 holds the difference of two of them


class DQNTFPolicy(OffPolicyTFPolicy):
    """The loss of DQN, for any runtime.

    `extras["q_values"]` `[B, n]` of acting are the action values; those of masked actions are the
    smallest float32. `learn_on_batch` returns `td_error` `[B]`.
    """

    config_class = lazy_class("DQNConfig")
    _acting_only_outputs = frozenset({"q_values"})
    static_keys = (
        *OffPolicyTFPolicy.static_keys,
        *("adam_epsilon", "double_q", "dueling", "hiddens", "noisy", "num_atoms", "sigma0"),
        *("td_error_loss_fn", "v_max", "v_min"),
    )

    def validate_spaces(
        self, observation_space: gym.Space, action_space: gym.Space, config: Mapping[str, Any]
    ) -> None:
        super().validate_spaces(observation_space, action_space, config)
        if not isinstance(action_space, gym.spaces.Discrete):
            raise UnsupportedSpaceError(
                f"{type(self).__name__} supports Discrete actions only, got {action_space}: it "
                "estimates a value for each action."
            )
        if config["noisy"]:
            _check_noisy_allowed(config)

    @classmethod
    def _get_distribution(cls, action_space: gym.Space, static: Mapping[str, Any]) -> Any:
        """Returns the distribution over action values: the greedy action has the largest one."""
        dueling = _is_dueling(static)
        if static["num_atoms"] > 1:
            atoms = {name: static[name] for name in ("num_atoms", "v_min", "v_max")}
            return AtomValues(action_space, (Categorical,), dueling=dueling, **atoms)
        return (DuelingValues if dueling else ActionDistribution).for_space(action_space)

    @classmethod
    def _get_model_source(
        cls, observation_space: gym.Space, dist_class: ActionDistribution, static: Mapping[str, Any]
    ) -> ModelSource:
        """Returns the source of Q-networks.

        A custom model returns the values of all actions, `[B, n]`, or the logits of all atoms, `[B,
        n * num_atoms]`; `dueling` and `hiddens` are ignored for it.
        """
        if static["model"]["custom_model"] is not None:
            return super()._get_model_source(observation_space, dist_class, static)
        check_feed_forward("model", static["model"], cls.__name__)
        return make_q_model_source(observation_space, dist_class.num_inputs, static)

    @classmethod
    def _update_noise_size(cls, source: ModelSource, static: Mapping[str, Any]) -> int:
        """Returns the noise size of an update: one block each for Q, Q' and the choice of a*."""
        del static
        return 3 * source.noise_size

    @classmethod
    def _make_optimizer(cls, static: Mapping[str, Any]) -> Any:
        """Returns a new Keras optimizer; Adam, the default one, gets `adam_epsilon`."""
        settings = dict(static["optimizer"])
        if str(settings.get("type", "adam")).lower() == "adam":
            settings.setdefault("epsilon", static["adam_epsilon"])
        return super()._make_optimizer({**static, "optimizer": settings})

    # -- learning -----------------------------------------------------------------------------

    def loss(
        self, model: TracedModel, dist_class: ActionDistribution, train_batch: TrainBatch
    ) -> tf.Tensor:
        """Returns the mean loss of the temporal-difference errors, weighted by `weights`."""
        obs, next_obs = train_batch[SampleBatch.OBS], train_batch[SampleBatch.NEXT_OBS]
        noise = self._get_noise_inputs()
        outputs = _call_network(model, obs, noise[0])
        next_outputs = selection_outputs = _call_network(self.target_model, next_obs, noise[1])
        if self.config["double_q"]:
            selection_outputs = _call_network(model, next_obs, noise[2])
        actions, rewards = train_batch[SampleBatch.ACTIONS], train_batch[SampleBatch.REWARDS]
        transitions = _Transitions(actions, rewards, self.compute_discounts(train_batch))
        q_values, errors = _compute_td_errors(
            dist_class, transitions, outputs, next_outputs, selection_outputs
        )
        mask, losses = train_batch["loss_mask"], errors
        self._record_values(q_values, errors, mask)
        if self.config["num_atoms"] == 1:
            loss = huber if self.config["td_error_loss_fn"] == "huber" else tf.square
            losses = loss(errors)
        return masked_mean(train_batch["weights"] * losses, mask)

    def _get_noise_inputs(self) -> list[dict[str, tf.Tensor]]:
        """Returns the noise inputs of the three network calls in `loss`."""
        if not self.config["noisy"]:
            return [{}, {}, {}]
        return [{NOISE: row[None]} for row in tf.split(self.update_noise, 3)]

    def extra_action_out_fn(self) -> dict[str, tf.Tensor]:
        """Returns the action values, `q_values` `[N, n]`."""
        return {"q_values": self.dist_inputs}

    @ensure_eager()
    def compute_td_error(
        self,
        obs_t: Structure,
        act_t: np.ndarray | Sequence[float],
        rew_t: np.ndarray | Sequence[float],
        obs_tp1: Structure,
        terminateds_mask: np.ndarray | Sequence[float],
        importance_weights: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns the temporal-difference error of each transition, float32 `[B]`; updates nothing.

        With `num_atoms` > 1 it is the cross entropy that is the transition's loss.

        Args:
            obs_t: observations `[B, ...]`.
            act_t: actions `[B]`.
            rew_t: rewards `[B]`, sums over `n_step` steps.
            obs_tp1: the next observations `[B, ...]`.
            terminateds_mask: `[B]`, 1 or True where the episode terminated.
            importance_weights: accepted and unused: they weight the loss, not the errors.

        Raises:
            ObservationError: if observations do not fit their space.
        """
        del importance_weights
        next_outputs = selection_outputs = self._compute_outputs(self._make_target_state(), obs_tp1)
        if self.config["double_q"]:
            selection_outputs = self._compute_outputs(self._state, obs_tp1)
        discount = self.get_hyperparameter("gamma") ** self.config["n_step"]
        discounts = discount * (1.0 - np.asarray(terminateds_mask, np.float32))
        transitions = _Transitions(np.asarray(act_t), np.asarray(rew_t, np.float32), discounts)
        outputs = self._compute_outputs(self._state, obs_t)
        return _compute_td_errors(
            self.dist_class, transitions, outputs, next_outputs, selection_outputs
        )[1].numpy()

    def _make_target_state(self) -> PolicyState:
        """Returns a state whose `model` is the target network."""
        state = self._state.copy()
        for name, source in state.layout.pair_target_segments("target"):
            state.segments[source][...] = state.segments[name]
        return state

    def _compute_outputs(self, state: PolicyState, obs: Structure) -> tf.Tensor:
        inputs = NetworkInputs([*map(tf.constant, self._acting.reader.read(obs, to_act=False))])
        with self.program.lock:
            self.program.load_model(state)
            return self.program.functions.network(inputs, training=False).outputs


def _call_network(
    model: TracedModel, obs: TensorStructure, noise: Mapping[str, tf.Tensor]
) -> tf.Tensor:
    """Returns the outputs of a network for observations, `[B, num_outputs]`."""
    model({SampleBatch.OBS: obs, **noise})
    return model.raw_outputs()


class _Transitions(NamedTuple):
    """Actions, rewards and discounts of transitions, `[B]` each."""

    actions: Any
    rewards: Any
    discounts: Any


def _compute_td_errors(
    dist_class: ActionDistribution,
    transitions: _Transitions,
    outputs: tf.Tensor,
    next_outputs: tf.Tensor,
    selection_outputs: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the values Q(s, a) `[B]`, and the errors `[B]` to minimise.

    Args:
        dist_class: interprets the outputs of networks.
        transitions: the transitions.
        outputs: of the online network in s, `[B, num_outputs]`.
        next_outputs: of the target network in s'.
        selection_outputs: outputs in s' that choose the action.
    """
    actions, rewards, discounts = transitions
    q_values = q_learning.select_values(dist_class.compute_inputs(outputs), actions)
    selection_outputs = dist_class.compute_inputs(selection_outputs)
    if isinstance(dist_class, AtomValues):
        next_logits = dist_class.to_logits(next_outputs)
        targets = q_learning.atom_targets(
            rewards, discounts, next_logits, selection_outputs, dist_class.atoms
        )
        return q_values, q_learning.atom_errors(
            dist_class.to_logits(outputs), actions, tf.stop_gradient(targets)
        )
    targets = q_learning.td_targets(
        rewards, discounts, dist_class.compute_inputs(next_outputs), selection_outputs
    )
    return q_values, q_learning.td_errors(q_values, tf.stop_gradient(targets))


def _check_noisy_allowed(config: Mapping[str, Any]) -> None:
    """Raises a `ConfigError` if other settings exclude noisy layers."""
    if config["model"].get("custom_model") is not None:
        raise ConfigError(
            "noisy=True needs the network that DQN builds, and model['custom_model'] replaces it. "
            "Leave one of them out."
        )
    exploration_type = (config["exploration_config"] or {}).get("type")
    if is_one_of(exploration_type, "ParameterNoise", ParameterNoise):
        raise ConfigError(
            "noisy=True and exploration_config={'type': 'ParameterNoise'} both add noise to the "
            "weights. Choose one of them."
        )


def _require_distinct_atoms(v_min: float, v_max: float, num_atoms: int) -> None:
    """Checks that float32 resolves the atoms from `v_min` to `v_max`.

    Raises:
        ConfigError: if not; it names the three settings, the rule and the values.
    """
    largest = max(abs(v_min), abs(v_max))
    spacing = (v_max - v_min) / min(num_atoms - 1, 2**53)  # which a float holds
    rule = f"at most {_MAX_ATOM:g} in size"
    check(largest <= _MAX_ATOM, "v_min and v_max", rule, [v_min, v_max])
    min_spacing = max(float(np.spacing(np.float32(largest))), float(np.finfo(np.float32).tiny))
    rule = f"numbers whose atoms are at least {min_spacing:.2g} apart, as float32 resolves them"
    values = [v_min, v_max, num_atoms]
    check(spacing >= min_spacing, "v_min, v_max and num_atoms", rule, values)


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

    config_class = lazy_class("DQNConfig")
    policy_classes = {"tf2": DQNTF2Policy, "tf": DQNTF1Policy}


@dataclass(frozen=True, kw_only=True)
class DQNTrainingSettings(OffPolicyTrainingSettings):
    """The training settings of DQN."""

    lr: float = 5e-4
    grad_clip: float | None = 40.0
    grad_clip_by: str = "norm"
    replay_buffer_config: Mapping[str, Any] = setting(PRIORITIZED_REPLAY_CONFIG)
    adam_epsilon: float = setting(1e-8, POSITIVE)  # of the default optimizer
    double_q: bool = setting(True, BOOL)  # the online network chooses, the target one evaluates
    dueling: bool = setting(True, BOOL)  # ignored with a custom model
    hiddens: Any = setting([256], LAYER_SIZES)  # hidden layers of the heads
    td_error_loss_fn: str = setting("huber", one_of("huber", "mse"))
    num_atoms: int = setting(1, POSITIVE_INT)  # of the return distribution; 1: only its mean
    v_min: float = setting(-10.0, FINITE)  # the smallest return that has an atom
    v_max: float = setting(10.0, FINITE)  # the largest one
    noisy: bool = setting(False, BOOL)  # whether the layers of the heads are noisy
    sigma0: float = setting(0.5, NON_NEGATIVE)  # their initial noise

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.v_min < self.v_max, "v_min", f"less than v_max={self.v_max}", self.v_min)
        if self.num_atoms > 1:
            _require_distinct_atoms(self.v_min, self.v_max, self.num_atoms)


class DQNConfig(OffPolicyConfig):
    """The config of DQN.

    >>> config = DQNConfig().environment("CartPole-v1").training(lr=1e-3, n_step=3)
    >>> config.get_fragment_length(), config.exploration_config["type"]
    (3, 'EpsilonGreedy')
    """

    training_section = DQNTrainingSettings

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
