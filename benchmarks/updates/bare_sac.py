"""SAC on one environment of vectors, written by hand: what TensorFlow takes for its mathematics.

Two layers of 256 units, twin critics, Adam; acting and the update are a `tf.function` each,
compiled by XLA.
"""

import math
from typing import Any

import keras
import tensorflow as tf


class BareSac:
    """Networks, optimizers, and the two functions over them.

    Args:
        obs: Width of an observation.
        actions: Width of an action.
    """

    def __init__(self, obs: int, actions: int) -> None:
        self.actor = mlp(obs, 2 * actions)
        self.critics = [mlp(obs + actions, 1) for _ in range(2)]
        self.targets = [mlp(obs + actions, 1) for _ in range(2)]
        self.log_alpha = tf.Variable(0.0)
        self.groups = [
            [v for each in self.critics for v in each.trainable_variables],
            list(self.actor.trainable_variables),
            [self.log_alpha],
        ]
        self.optimizers = [keras.optimizers.Adam(3e-4) for _ in self.groups]
        for optimizer, variables in zip(self.optimizers, self.groups, strict=True):
            optimizer.build(variables)
        for critic, target in zip(self.critics, self.targets, strict=True):
            target.set_weights(critic.get_weights())

    @tf.function(jit_compile=True)
    def act(self, obs: Any, noise: Any) -> Any:
        """Returns actions in [-1, 1], `[N, k]`, of standard normal noise `[N, k]`."""
        return sample(self.actor(obs), noise)[0]

    @tf.function(jit_compile=True)
    def update(self, obs: Any, reached: Any, actions: Any, rewards: Any, noise: Any) -> Any:
        """Does one update by transitions that do not terminate; `noise` is `[N, 2k]`."""
        alpha, k = tf.exp(self.log_alpha), actions.shape[-1]
        next_actions, next_logp = sample(self.actor(reached), noise[:, k:])
        least_next = least(self.targets, reached, next_actions)
        y = rewards + 0.99 * (least_next - alpha * next_logp)
        with tf.GradientTape() as tape:
            x = tf.concat([obs, actions], -1)
            losses = [tf.reduce_mean((q(x)[:, 0] - y) ** 2) for q in self.critics]
            critic_loss = tf.add_n(losses)
        gradients = [tape.gradient(critic_loss, self.groups[0])]
        with tf.GradientTape() as tape:
            new, logp = sample(self.actor(obs), noise[:, :k])
            actor_loss = tf.reduce_mean(alpha * logp - least(self.critics, obs, new))
        gradients.append(tape.gradient(actor_loss, self.groups[1]))
        gradients.append([-tf.reduce_mean(logp - float(k))])
        for optimizer, gradient, group in zip(self.optimizers, gradients, self.groups, strict=True):
            optimizer.apply(gradient, group)
        for q, target in zip(self.critics, self.targets, strict=True):
            for v, w in zip(q.trainable_variables, target.trainable_variables, strict=True):
                w.assign(0.005 * v + 0.995 * w)
        return critic_loss


def mlp(inputs: int, outputs: int) -> keras.Model:
    """Returns a network of two rectified layers."""
    hidden = [keras.layers.Dense(256, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)])


def least(models: Any, obs: Any, actions: Any) -> Any:
    """Returns the smaller of two critics' values, `[N]`."""
    x = tf.concat([obs, actions], -1)
    return tf.minimum(models[0](x), models[1](x))[:, 0]


def sample(outputs: Any, noise: Any) -> tuple[Any, Any]:
    """Returns squashed actions and their log-probabilities."""
    mean, log_std = tf.split(outputs, 2, -1)
    log_std = tf.clip_by_value(log_std, -5.0, 2.0)
    u = mean + tf.exp(log_std) * noise
    slope = 2.0 * (math.log(2.0) - u - tf.nn.softplus(-2.0 * u))
    logp = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - slope
    return tf.tanh(u), tf.reduce_sum(logp, -1)
