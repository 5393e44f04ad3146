"""A custom `TFModelV2`, trained with PPO: written for RLlib, with other imports.

    python examples/porting/custom_tf_model.py --stop-iters 20

trains in a corridor until the mean return is `--stop-reward`, plays one episode and saves the
policy as an ONNX file, `exported/model.onnx`.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np

from tfpolicies import PPOConfig
from tfpolicies.compat import ModelCatalog, TFModelV2, register_env, try_import_tf

tf1, tf, tfv = try_import_tf()


class SimpleCorridor(gym.Env):
    """A corridor; the reward is -0.1 per step, and 1 at the right end."""

    def __init__(self, config):
        self.end_pos = config["corridor_length"]
        self.cur_pos = 0
        self.action_space = gym.spaces.Discrete(2)  # left, right
        self.observation_space = gym.spaces.Box(0.0, self.end_pos, shape=(1,), dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        self.cur_pos = self.steps = 0
        return np.array([self.cur_pos], np.float32), {}

    def step(self, action):
        self.cur_pos = max(0, self.cur_pos + (1 if action == 1 else -1))
        self.steps += 1
        done = self.cur_pos >= self.end_pos
        reward = 1.0 if done else -0.1
        return np.array([self.cur_pos], np.float32), reward, done, self.steps >= 100, {}


class CustomModel(TFModelV2):
    """Two dense layers with a value branch; the position is scaled to [0, 1]."""

    def __init__(self, obs_space, action_space, num_outputs, model_config, name, hidden=32):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        self.scale = 1.0 / float(obs_space.high[0])
        inputs = tf.keras.layers.Input(shape=obs_space.shape, name="observations")
        layer = tf.keras.layers.Dense(hidden, name="my_layer1", activation="tanh")(inputs)
        layer_out = tf.keras.layers.Dense(num_outputs, name="my_out")(layer)
        value_out = tf.keras.layers.Dense(1, name="value_out")(layer)
        self.base_model = tf.keras.Model(inputs, [layer_out, value_out])

    def forward(self, input_dict, state, seq_lens):
        model_out, self._value_out = self.base_model(self.scale * input_dict["obs"])
        return model_out, state

    def value_function(self):
        return tf.reshape(self._value_out, [-1])


def main(stop_iters: int = 20, stop_reward: float = -0.2, folder: str = "exported") -> float:
    register_env("corridor", lambda config: SimpleCorridor(config))
    ModelCatalog.register_custom_model("my_model", CustomModel)
    config = (
        PPOConfig()
        .environment("corridor", env_config={"corridor_length": 8})
        .framework("tf2")
        .rollouts(num_rollout_workers=0, num_envs_per_worker=4)
        .training(
            model={"custom_model": "my_model", "custom_model_config": {"hidden": 32}},
            lr=5e-3,
            train_batch_size=400,
            num_sgd_iter=10,
        )
        .debugging(seed=0)
    )
    algo = config.build()
    mean = float("nan")
    for i in range(stop_iters):
        mean = algo.train()["episode_reward_mean"]
        print(f"iteration {i + 1}: mean return {mean:.2f}")
        if mean >= stop_reward:
            break

    env = SimpleCorridor({"corridor_length": 8})
    obs, _ = env.reset()
    terminated = truncated = False
    total = 0.0
    while not terminated and not truncated:
        action = algo.compute_single_action(obs, explore=False)
        obs, reward, terminated, truncated, _ = env.step(action)
        total += reward
    print(f"one episode without exploration: {total:.1f}")
    algo.get_policy().export_model(folder, onnx=15)
    algo.stop()
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop-iters", type=int, default=20)
    parser.add_argument("--stop-reward", type=float, default=-0.2)
    args = parser.parse_args()
    main(args.stop_iters, args.stop_reward)
