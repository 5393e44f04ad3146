"""Measures one update of SAC against a bare `tf.function` of the same mathematics.

`python -m benchmarks.sac_update`: 256 rows, two layers of 256 units, twin critics, Adam, compiled
by XLA. It prints milliseconds per update, of the clock and of the processor: the bare function, one
update per call, and 64 updates per call; measured in turn, in one process.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from gymnasium import spaces

from tfpolicies import SACTF2Policy, SampleBatch

ROWS, UPDATES, ROUNDS = 256, 64, 9


def batch_of(rows: int) -> SampleBatch:
    """Returns random transitions."""
    rng = np.random.default_rng(0)
    return SampleBatch(
        obs=rng.normal(size=(rows, 3)).astype(np.float32),
        new_obs=rng.normal(size=(rows, 3)).astype(np.float32),
        actions=rng.uniform(-1, 1, (rows, 1)).astype(np.float32),
        rewards=rng.normal(size=rows).astype(np.float32),
        terminateds=np.zeros(rows, bool),
        weights=np.ones(rows, np.float32),
    )


def bare() -> Callable[[], Any]:
    """Returns a hand-written update on ready tensors."""
    actor, *critics = (mlp(3, 2), *(mlp(4, 1) for _ in range(4)))
    online, targets = critics[:2], critics[2:]
    log_alpha = tf.Variable(0.0)
    groups = [
        [v for each in online for v in each.trainable_variables],
        list(actor.trainable_variables),
        [log_alpha],
    ]
    optimizers = [keras.optimizers.Adam(3e-4) for _ in groups]
    for optimizer, variables in zip(optimizers, groups, strict=True):
        optimizer.build(variables)

    def least(models: Any, obs: Any, actions: Any) -> Any:
        x = tf.concat([obs, actions], -1)
        return tf.minimum(models[0](x), models[1](x))[:, 0]

    @tf.function(jit_compile=True)
    def update(obs: Any, reached: Any, actions: Any, rewards: Any, noise: Any) -> Any:
        alpha = tf.exp(log_alpha)
        next_actions, next_logp = sample(actor(reached), noise[:, 1:])
        y = rewards + 0.99 * (least(targets, reached, next_actions) - alpha * next_logp)
        with tf.GradientTape() as tape:
            x = tf.concat([obs, actions], -1)
            critic_loss = tf.add_n([tf.reduce_mean((q(x)[:, 0] - y) ** 2) for q in online])
        gradients = [tape.gradient(critic_loss, groups[0])]
        with tf.GradientTape() as tape:
            new, logp = sample(actor(obs), noise[:, :1])
            actor_loss = tf.reduce_mean(alpha * logp - least(online, obs, new))
        gradients.append(tape.gradient(actor_loss, groups[1]))
        gradients.append([-tf.reduce_mean(logp - 1.0)])
        for optimizer, gradient, variables in zip(optimizers, gradients, groups, strict=True):
            optimizer.apply(gradient, variables)
        for q, target in zip(online, targets, strict=True):
            for v, w in zip(q.trainable_variables, target.trainable_variables, strict=True):
                w.assign(0.005 * v + 0.995 * w)
        return critic_loss

    batch = batch_of(ROWS)
    columns = [tf.constant(batch[x]) for x in ("obs", "new_obs", "actions", "rewards")]
    noise = tf.random.stateless_normal((ROWS, 2), (0, 0))
    return lambda: update(*columns, noise)


def mlp(inputs: int, outputs: int) -> keras.Model:
    """Returns a network of two rectified layers."""
    hidden = [keras.layers.Dense(256, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)])


def sample(outputs: Any, noise: Any) -> tuple[Any, Any]:
    """Returns squashed actions and their log-probabilities."""
    mean, log_std = tf.split(outputs, 2, -1)
    log_std = tf.clip_by_value(log_std, -5.0, 2.0)
    u = mean + tf.exp(log_std) * noise
    slope = 2.0 * (math.log(2.0) - u - tf.nn.softplus(-2.0 * u))
    logp = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - slope
    return tf.tanh(u), tf.reduce_sum(logp, -1)


def main() -> None:
    space, actions = spaces.Box(-1, 1, (3,)), spaces.Box(-2, 2, (1,))
    policy = SACTF2Policy(space, actions, {"seed": 0})
    one, many = batch_of(ROWS), batch_of(ROWS * UPDATES)
    ways: dict[str, tuple[Callable[[], Any], int, int]] = {
        "bare function": (bare(), 20, 1),
        "one update per call": (lambda: policy.learning.replay(one, ROWS, np.ones(1, bool)), 20, 1),
        "64 updates per call": (
            lambda: policy.learning.replay(many, ROWS, np.ones(UPDATES, bool)),
            1,
            UPDATES,
        ),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, (run, calls, updates) in ways.items():
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(calls):
                run()
            took = time.perf_counter() - clock, time.process_time() - processor
            found[name].append((1e3 * took[0] / calls / updates, 1e3 * took[1] / calls / updates))
    for name, times in found.items():  # the first round compiles
        clock, processor = np.median(times[1:], axis=0)
        print(f"{name:20} {clock:6.2f} ms of the clock, {processor:6.2f} ms of the processor")


if __name__ == "__main__":
    main()
