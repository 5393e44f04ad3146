"""PPO from a supervised Keras model: first its critic learns, then the policy, too.

A classifier imitates a rule that balances CartPole for a short while. PPO begins with its weights.
The critic is new, and its first errors would spoil the policy: so for the first iterations only
the critic learns.

    python examples/supervised_to_ppo.py
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import keras
import numpy as np

from tfpolicies import PPO, PPOConfig, PPOTF2Policy
from tfpolicies.extending import lazy_class, setting

WARM_UP, ITERATIONS = 5, 15


def play_rule(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns observations and actions of a rule: push to the side to which the pole leans."""
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    observations, actions = [], []
    for _ in range(steps):
        action = int(observation[2] > 0)
        observations.append(observation)
        actions.append(action)
        observation, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            observation, _ = env.reset()
    return np.array(observations), np.array(actions)


def fit_classifier(observations: np.ndarray, actions: np.ndarray) -> keras.Model:
    """Returns a Keras model that gives the logits of both actions."""
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(32, activation="tanh", name="actor_1")
    layers = [hidden, keras.layers.Dense(2, name="actor_out")]
    model = keras.Sequential([keras.Input((4,), name="obs"), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss)
    model.fit(observations, actions, epochs=10, verbose=0)
    return model


class WarmUpPolicy(PPOTF2Policy):
    """PPO whose policy learns at a fraction of the learning rate, `actor_rate`."""

    config_class = lazy_class("WarmUpConfig")
    hyperparameters = (*PPOTF2Policy.hyperparameters, "actor_rate")

    def compute_gradients_fn(self, optimizer, loss):
        """Scales the gradients of the supervised layers; the critic's stay."""
        pairs = super().compute_gradients_fn(optimizer, loss)
        rate = self.config["actor_rate"]
        return [(rate * x if v.path.startswith("actor") else x, v) for x, v in pairs]


@dataclass(frozen=True, kw_only=True)
class WarmUpSettings(PPOConfig.training_section):
    """The settings of PPO, and `actor_rate`."""

    actor_rate: float = setting(1.0)


class WarmUpConfig(PPOConfig):
    """The config of `WarmUpPPO`."""

    training_section = WarmUpSettings


class WarmUpPPO(PPO):
    """PPO with a policy that can wait for its critic."""

    config_class = WarmUpConfig
    policy_classes = {"tf2": WarmUpPolicy}


def main() -> list[float]:
    """Trains, and returns the mean return of greedy episodes after each iteration."""
    model = fit_classifier(*play_rule(3000))
    config = WarmUpConfig(WarmUpPPO).environment("CartPole-v1").rollouts(num_envs_per_worker=8)
    config.training(model=model, train_batch_size=1024, sgd_minibatch_size=256, num_sgd_iter=10)
    config.training(lr=1e-3, gamma=0.98, actor_rate=0.0, vf_clip_param=float("inf"))
    config.evaluation(evaluation_duration=20, evaluation_config={"explore": False})
    algorithm = config.debugging(seed=0, log_level="ERROR").build()
    returns = [evaluate(algorithm)]
    for iteration in range(ITERATIONS):
        if iteration == WARM_UP:
            algorithm.get_policy().set_hyperparameter("actor_rate", 1.0)
        result = algorithm.train()
        stats = result["info"]["learner"]["default_policy"]["learner_stats"]
        returns.append(evaluate(algorithm))
        phase = "critic" if iteration < WARM_UP else "both"
        explained = stats["vf_explained_var"]
        print(f"{iteration + 1:3} {phase:7} explained {explained:5.2f}  return {returns[-1]:6.1f}")
    algorithm.stop()
    return returns


def evaluate(algorithm: PPO) -> float:
    """Returns the mean return of greedy episodes."""
    return float(algorithm.evaluate(seed=1)["evaluation"]["episode_reward_mean"])


if __name__ == "__main__":
    main()
