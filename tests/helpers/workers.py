"""Small configs and workers, and comparisons of sampled batches."""

from __future__ import annotations

import inspect
from typing import Any

from helpers import factories
from helpers.multi_agent_envs import sampler_of
from tfpolicies import DefaultCallbacks, PPOConfig, PPOTF2Policy, RolloutWorker


def make_config(env: Any = None, config_class: Any = PPOConfig, **settings: Any) -> Any:
    """Makes a config with one hidden layer that acts through TensorFlow and learns without XLA."""
    quick = {"inference": "tf", "jit_compile": False, "model": {"fcnet_hiddens": [4]}}
    quick |= {"seed": 0, "log_level": "ERROR"}
    return config_class().environment(env).update_from_dict({**quick, **settings})


WORKER_ARGUMENTS = {*inspect.signature(RolloutWorker).parameters} - {"config"}


def make_worker(
    env: Any = None, policy_class: Any = PPOTF2Policy, **settings: Any
) -> RolloutWorker:
    """Makes a worker with arguments of `RolloutWorker`, and settings for `make_config`."""
    arguments = {name: settings.pop(name) for name in WORKER_ARGUMENTS & settings.keys()}
    config = make_config(env, **settings)
    return RolloutWorker(config=config, default_policy_class=policy_class, **arguments)


def make_small_config(
    env: Any = "CartPole-v1", config_class: Any = PPOConfig, **settings: Any
) -> Any:
    """Makes a config of iterations of 32 rows, which PPO learns from twice in halves."""
    config = make_config(env, config_class, train_batch_size=32)
    if isinstance(config, PPOConfig):
        config.training(sgd_minibatch_size=16, num_sgd_iter=2)
    return config.update_from_dict(settings)


def map_all_to(policy_id: str) -> Any:
    """Makes a mapping function of one policy for all agents."""
    return lambda agent_id, episode=None, worker=None, **kwargs: policy_id


def sampler_with(policy: Any, *envs: Any, length: int = 200, **settings: Any) -> Any:
    """Returns a multi-agent sampler with one policy, "p", for all agents."""
    settings |= {"policies": {"p": policy}, "mapping": map_all_to("p")}
    return sampler_of(*envs, rollout_fragment_length=length, **settings)


def make_callbacks(**methods: Any) -> type[DefaultCallbacks]:
    """Makes a class of callbacks from functions of their keyword arguments."""

    def as_method(function: Any) -> Any:
        return lambda self, **kwargs: function(**kwargs)

    members = {name: as_method(function) for name, function in methods.items()}
    return type("Callbacks", (DefaultCallbacks,), members)


def get_logits(algorithm: Any, obs: Any, policy_id: str = "default_policy") -> list[float]:
    """Returns the logits by which an algorithm acts on one observation."""
    settings = {"policy_id": policy_id, "explore": False, "full_fetch": True}
    return algorithm.compute_single_action(obs, **settings)[2]["action_dist_inputs"].tolist()


def assert_equal_batches(actual: Any, expected: Any, atol: float = 0.0) -> None:
    """Asserts that batches of one or several policies have the same columns, up to `atol`."""
    actual, expected = (batch.as_multi_agent().policy_batches for batch in (actual, expected))
    assert set(actual) == set(expected)
    for policy_id, part in expected.items():
        if atol:
            factories.assert_close(actual[policy_id], part, atol)
        else:
            factories.assert_equal(actual[policy_id], part)


def assert_equal_weights(one: Any, other: Any) -> None:
    """Asserts that workers or algorithms have the same weights of the default policy."""
    weights = (x.get_weights()["default_policy"] for x in (one, other))
    factories.assert_equal(*weights)
