"""Workers and algorithms whose policies "left" and "right" play `Staggered`."""

import numpy as np

from helpers.multi_agent_envs import Staggered
from tfpolicies import PPOConfig, PPOTF2Policy, RolloutWorker


def a_and_b(agent_id, episode, worker=None, **kwargs):
    return "left" if agent_id == "a" else "right"


def all_left(agent_id, episode, worker=None, **kwargs):
    return "left"


def all_new(agent_id, episode, worker=None, **kwargs):
    return "new"


def only_left(policy_id, batch=None):
    return policy_id == "left"


class Staged(Staggered):
    """`Staggered`, made by a config."""

    def __init__(self, context):
        super().__init__()


def make_config(config_class=PPOConfig, **multi_agent):
    """Makes a config of an algorithm; the settings are those of `config.multi_agent`."""
    config = config_class().environment(Staged).framework(inference="tf", jit_compile=False)
    config.rollouts(rollout_fragment_length=7).debugging(seed=1, log_level="ERROR")
    config.training(model={"fcnet_hiddens": [4]}, train_batch_size=14, lr=0.01)
    if config_class is PPOConfig:
        config.training(sgd_minibatch_size=8, num_sgd_iter=2)
    settings = {"policies": {"left", "right"}, "policy_mapping_fn": a_and_b, **multi_agent}
    return config.multi_agent(**settings)


def make_worker(config=None, policy_class=PPOTF2Policy, **multi_agent):
    """Makes a worker of a config, or one with these settings of `config.multi_agent`."""
    config = make_config(**multi_agent) if config is None else config
    return RolloutWorker(config=config, default_policy_class=policy_class)


def same(one, other):
    """Returns whether all arrays of a dict are those of another one."""
    return all(np.array_equal(one[key], other[key]) for key in one)
