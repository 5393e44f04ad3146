"""Small policies and configs of the algorithms that learn from replayed rows."""

from typing import Any

import keras
import numpy as np
from gymnasium import spaces

from helpers.continuous_actions import AimEnv
from helpers.environments import SavedCountingEnv, TwoArmsEnv
from helpers.factories import OBS, PLANE, TWO, assert_equal, make
from tfpolicies import (
    DDPGConfig,
    DDPGTF2Policy,
    DQNConfig,
    DQNTF2Policy,
    SACConfig,
    SACTF2Policy,
    TD3Config,
    TD3TF2Policy,
)

THREE = spaces.Discrete(3)
MASKED = spaces.Dict(observations=OBS, action_mask=spaces.MultiBinary(3))
RAINBOW = {"num_atoms": 5, "v_min": -2.0, "v_max": 2.0, "noisy": True}

LAYERS: dict[Any, dict[str, Any]] = {
    DQNConfig: {"hiddens": []},
    SACConfig: {"q_model_config": {"fcnet_hiddens": [8]}},
    TD3Config: {"actor_hiddens": [8], "critic_hiddens": [8]},
    DDPGConfig: {"actor_hiddens": [8], "critic_hiddens": [8]},
}


def make_dqn(obs=OBS, actions=TWO, cls=DQNTF2Policy, model=None, **config):
    quick = {"model": {"fcnet_hiddens": [4], **(model or {})}, "hiddens": [3]}
    return make(cls, obs, actions, **{**quick, **config})


def make_rainbow(obs=OBS, actions=TWO, **config):
    return make_dqn(obs, actions, **{**RAINBOW, **config})


def make_sac(obs=OBS, actions=PLANE, cls=SACTF2Policy, model=None, q=None, **config):
    quick = {
        "model": {"fcnet_hiddens": [4], **(model or {})},
        "q_model_config": {"fcnet_hiddens": [5], **(q or {})},
    }
    return make(cls, obs, actions, **{**quick, **config})


def make_discrete_sac(obs=OBS, actions=THREE, **config):
    return make_sac(obs, actions, **config)


def make_td3(obs=OBS, actions=PLANE, cls=TD3TF2Policy, **config):
    return make(cls, obs, actions, **{"actor_hiddens": [4], "critic_hiddens": [5], **config})


def make_ddpg(obs=OBS, actions=PLANE, cls=DDPGTF2Policy, **config):
    return make_td3(obs, actions, cls, **config)


def build_critic(observation_space, num_outputs, width=3):
    """Returns a custom critic for SAC, for observations `OBS` and actions `PLANE`."""
    obs, actions = keras.Input((3,), name="obs"), keras.Input((2,), name="actions")
    hidden = keras.layers.Dense(width, "tanh")(keras.layers.Concatenate()([obs, actions]))
    return keras.Model({"obs": obs, "actions": actions}, keras.layers.Dense(num_outputs)(hidden))


def get_q_values(policy, obs):
    return policy.compute_actions(obs, explore=False).extras["q_values"].astype(np.float64)


def replay(policy, batch, updates=1, *, moves_targets=True):
    """Does updates of equal size in one call, as training does; returns the result."""
    moves = np.full(updates, moves_targets)
    return policy.driver.learning.replay(batch, batch.count // updates, moves)


def saved_counting(context):
    return SavedCountingEnv(context.vector_index)


def two_arms(context):
    return TwoArmsEnv()


def aim(context):
    return AimEnv()


def make_config(env, config_class=DQNConfig, *, envs=2, fragment=6, **training):
    """Returns a config of a small network that learns from the first row on, in batches of 4."""
    settings = {
        "model": {"fcnet_hiddens": [8]},
        **LAYERS[config_class],
        "train_batch_size": 4,
        "num_steps_sampled_before_learning_starts": 0,
        "replay_buffer_config": {"type": "MultiAgentReplayBuffer", "capacity": 64},
        "store_buffer_in_checkpoints": True,
        **training,
    }
    exploration = {"random_timesteps": 20} if "actor_hiddens" in LAYERS[config_class] else {}
    return (
        config_class()
        .environment(env)
        .rollouts(num_envs_per_worker=envs, rollout_fragment_length=fragment)
        .training(**settings)
        .framework(inference="tf", jit_compile=False)
        .exploration(exploration_config=exploration)
        .reporting(min_sample_timesteps_per_iteration=0, min_time_s_per_iteration=None)
        .debugging(seed=4, log_level="ERROR")
    )


def train(algorithm, iterations):
    """Returns the results of some iterations."""
    return [algorithm.train() for _ in range(iterations)]


def get_stats(result, policy_id="default_policy"):
    return result["info"]["learner"][policy_id]["learner_stats"]


def assert_equal_runs(one, other, iterations=3):
    """Asserts that the next iterations of two algorithms, and then their states, are equal."""
    for _ in range(iterations):
        a, b = one.train(), other.train()
        assert get_stats(a) == get_stats(b)
        assert a["counters"] == b["counters"]
    assert_equal_states(*(algorithm.get_policy().get_state() for algorithm in (one, other)))
    assert_equal(*(dict(x.replay_buffer.sample(50, "default_policy")) for x in (one, other)))


def assert_equal_states(one, other):
    for part in ("weights", "target_weights", "_optimizer_variables"):
        assert_equal(one[part], other[part])
    for part in ("rng", "learning_rng", "num_grad_updates"):
        assert one.get(part) == other.get(part), part
    exploration, other_exploration = (x.get("_exploration_state", {}) for x in (one, other))
    for key in exploration.keys() & {"cur_scale", "last_timestep", "ou_state"}:
        np.testing.assert_array_equal(exploration[key], other_exploration[key], err_msg=key)


def make_q_stats(chosen, td_errors):
    """Makes DQN's statistics from the values of the taken actions and their TD errors."""
    return {
        "cur_lr": 5e-4,
        "mean_q": chosen.mean(),
        "min_q": chosen.min(),
        "max_q": chosen.max(),
        "mean_td_error": td_errors.mean(),
    }
