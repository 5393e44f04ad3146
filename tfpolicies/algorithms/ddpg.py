"""Deep deterministic policy gradient, Lillicrap et al. 2015 (arXiv:1509.02971).

One training step: collect a fragment, store its rows in a replay buffer, and update on rows sampled
from it (`replay_buffer_config`), by minimising (algorithm 1 of the paper)

    L(theta) = E[w l(Q(s, a) - y)]                   l: half the square, or Huber
    y = r + gamma^n (1 - terminated) Q'(s', pi'(s'))
    L(phi) = -E[Q(s, pi(s))]                         whose gradient is that of the paper

Target networks are updated after each update, Q' <- tau Q + (1 - tau) Q', and pi' in the same way.
Ornstein-Uhlenbeck noise is added to actions (section 3). This is TD3 without its three additions,
which can be switched on; the mathematics and the deviations are described in `td3.py`.

Further deviations from the paper: no batch normalisation; the action enters the critic with the
observation, not after its first layer; both networks have weight decay, `l2_reg`, and one learning
rate. The defaults are those of RLlib's contributed package `rllib_ddpg`, as of release 2.10; so
replay is prioritized, where the paper samples uniformly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfpolicies.algorithms.off_policy import PRIORITIZED_REPLAY_CONFIG, OffPolicyAlgorithm
from tfpolicies.algorithms.td3 import TD3Config, TD3TFPolicy, TD3TrainingSettings
from tfpolicies.config.lazy_class import lazy_class
from tfpolicies.config.setting import setting

__all__ = ["DDPG", "DDPGConfig", "DDPGTF1Policy", "DDPGTF2Policy", "DDPGTFPolicy"]


class DDPGTFPolicy(TD3TFPolicy):
    """The loss of DDPG, for any runtime: that of `TD3TFPolicy` with other defaults."""

    config_class = lazy_class("DDPGConfig")


class DDPGTF2Policy(DDPGTFPolicy):
    """DDPG on traced TensorFlow functions.

    >>> from gymnasium import spaces
    >>> space, actions = spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (1,))
    >>> policy = DDPGTF2Policy(space, actions, {"seed": 0, "inference": "tf"})
    >>> policy.compute_actions([space.sample(), space.sample()]).actions.shape
    (2, 1)
    """


class DDPGTF1Policy(DDPGTFPolicy):
    """DDPG in graph mode, in a `tf.Graph` and its own session."""

    runtime = "session"


class DDPG(OffPolicyAlgorithm):
    """The training loop of DDPG; made by `DDPGConfig().build()`."""

    config_class = lazy_class("DDPGConfig")
    policy_classes = {"tf2": DDPGTF2Policy, "tf": DDPGTF1Policy}


@dataclass(frozen=True, kw_only=True)
class DDPGTrainingSettings(TD3TrainingSettings):
    """The training settings of DDPG."""

    twin_q: bool = False
    policy_delay: int = 1
    smooth_target_policy: bool = False
    l2_reg: float = 1e-6
    train_batch_size: int = 256
    tau: float = 2e-3
    num_steps_sampled_before_learning_starts: int = 1500
    replay_buffer_config: Mapping[str, Any] = setting(PRIORITIZED_REPLAY_CONFIG)


class DDPGConfig(TD3Config):
    """The config of DDPG.

    >>> config = DDPGConfig().environment("Pendulum-v1").training(n_step=3)
    >>> config.twin_q, config.get_fragment_length(), config.exploration_config["type"]
    (False, 3, 'OrnsteinUhlenbeckNoise')
    """

    training_section = DDPGTrainingSettings

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or DDPG)
        self.exploration(
            exploration_config={
                "type": "OrnsteinUhlenbeckNoise",
                "random_timesteps": 1000,
                "ou_base_scale": 0.1,
                "ou_theta": 0.15,
                "ou_sigma": 0.2,
                "initial_scale": 1.0,
                "final_scale": 0.02,
                "scale_timesteps": 10_000,
            }
        )
