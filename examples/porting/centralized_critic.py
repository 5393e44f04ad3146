"""A centralized critic: it reads the observations and actions of both players.

    python examples/porting/centralized_critic.py --stop-iters 20

Written in the style of RLlib: a model with a second network, a policy class whose
`postprocess_trajectory` reads the other player's batch, and a loss with another value function.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np

from tfpolicies import PPO, MultiAgentEnv, PPOConfig, PPOTF1Policy, PPOTF2Policy, SampleBatch
from tfpolicies.compat import (
    FullyConnectedNetwork,
    ModelCatalog,
    ModelV2,
    TFModelV2,
    compute_gae_for_sample_batch,
    convert_to_numpy,
    make_tf_callable,
    override,
    register_env,
    try_import_tf,
)

tf1, tf, tfv = try_import_tf()
OTHER_OBS, OTHER_ACTION = "other_obs", "other_action"


class Lanes(MultiAgentEnv):
    """Two drivers observe each other's heading, and must choose different sides."""

    def __init__(self, config=None):
        super().__init__()
        self._agent_ids = {"left", "right"}
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def observe(self):
        self.heading = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)
        return {"left": self.heading, "right": self.heading[::-1].copy()}

    def step(self, action_dict):
        self.steps += 1
        sides = action_dict["left"], action_dict["right"]
        agreed = sides == ((0, 1) if self.heading[0] < self.heading[1] else (1, 0))
        over = self.steps == 5
        rewards = dict.fromkeys(("left", "right"), float(agreed))
        return self.observe(), rewards, {"__all__": over}, {"__all__": False}, {}


class CentralizedCriticModel(TFModelV2):
    """Acts on the player's observation; a second network is a central critic for learning."""

    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        self.model = FullyConnectedNetwork(obs_space, action_space, num_outputs, model_config, name)
        inputs = [tf.keras.layers.Input((2,)) for _ in range(3)]
        joined = tf.keras.layers.Concatenate()(inputs)
        hidden = tf.keras.layers.Dense(16, activation="tanh")(joined)
        self.central_vf = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(hidden))

    @override(ModelV2)
    def forward(self, input_dict, state, seq_lens):
        return self.model.forward(input_dict, state, seq_lens)

    @override(ModelV2)
    def value_function(self):
        return self.model.value_function()  # replaced in the loss

    def central_value_function(self, obs, other_obs, other_actions):
        one_hot = tf.one_hot(tf.cast(other_actions, tf.int32), 2)
        return tf.reshape(self.central_vf([obs, other_obs, one_hot]), [-1])


class CentralizedValueMixin:
    """Adds the model's central value function to a policy, as a function of arrays."""

    def __init__(self):
        self.compute_central_vf = make_tf_callable(self.get_session())(
            self.model.central_value_function
        )


def get_ccppo_policy(base):
    """Returns a policy class with a centralized critic, in the mode of `base`."""

    class CCPPOPolicy(CentralizedValueMixin, base):
        def __init__(self, observation_space, action_space, config):
            base.__init__(self, observation_space, action_space, config)
            CentralizedValueMixin.__init__(self)

        @override(base)
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            if self.loss_initialized():
                [(_, _, other)] = list(other_agent_batches.values())
            else:
                other = sample_batch  # a dummy batch of zeros with all columns
            sample_batch[OTHER_OBS] = other[SampleBatch.CUR_OBS]
            sample_batch[OTHER_ACTION] = other[SampleBatch.ACTIONS]
            values = self.compute_central_vf(
                sample_batch[SampleBatch.CUR_OBS],
                sample_batch[OTHER_OBS],
                sample_batch[OTHER_ACTION],
            )
            sample_batch[SampleBatch.VF_PREDS] = convert_to_numpy(values)
            return compute_gae_for_sample_batch(self, sample_batch)

        @override(base)
        def loss(self, model, dist_class, train_batch):
            vf_saved = model.value_function
            model.value_function = lambda: self.model.central_value_function(
                train_batch[SampleBatch.CUR_OBS], train_batch[OTHER_OBS], train_batch[OTHER_ACTION]
            )
            loss = super().loss(model, dist_class, train_batch)
            model.value_function = vf_saved
            return loss

    return CCPPOPolicy


CCPPOGraphPolicy, CCPPOEagerPolicy = map(get_ccppo_policy, (PPOTF1Policy, PPOTF2Policy))


class CentralizedCritic(PPO):
    """PPO with a centralized critic."""

    @classmethod
    @override(PPO)
    def get_default_policy_class(cls, config):
        return CCPPOGraphPolicy if config["framework"] == "tf" else CCPPOEagerPolicy


def main(stop_iters: int = 20, framework: str = "tf2") -> float:
    register_env("lanes", lambda config: Lanes(config))
    ModelCatalog.register_custom_model("cc_model", CentralizedCriticModel)
    config = (
        PPOConfig()
        .environment("lanes")
        .framework(framework)
        .rollouts(batch_mode="complete_episodes", num_rollout_workers=0, num_envs_per_worker=4)
        .training(
            model={"custom_model": "cc_model", "fcnet_hiddens": [16]},
            lr=0.01,
            gamma=0.0,  # steps are independent of each other
            train_batch_size=400,
            num_sgd_iter=6,
        )
        .multi_agent(
            policies={"left", "right"},
            policy_mapping_fn=lambda agent_id, episode, worker, **kwargs: agent_id,
        )
        .debugging(seed=0)
    )
    algo = CentralizedCritic(config=config)
    for i in range(stop_iters):
        result = algo.train()
        explained = result["info"]["learner"]["left"]["learner_stats"]["vf_explained_var"]
        print(
            f"iteration {i + 1}: mean return {result['episode_reward_mean']:.2f} of 10, the critic "
            f"explains {explained:.0%}"
        )
    algo.stop()
    return result["episode_reward_mean"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stop-iters", type=int, default=20)
    parser.add_argument("--framework", choices=["tf", "tf2"], default="tf2")
    args = parser.parse_args()
    main(args.stop_iters, args.framework)
