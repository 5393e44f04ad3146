"""Checkpoints of algorithms with many agents: running episodes, results, classes of policies."""

import numpy as np
import pytest

from helpers.custom_policies import ZeroPolicy
from helpers.environments import SavedCountingEnv
from helpers.multi_agent_envs import own_policy
from helpers.two_policies import Staged
from helpers.workers import make_small_config
from tfpolicies import PPO, DefaultCallbacks, PolicySpec, PPOTF2Policy
from tfpolicies.algorithms.training_state import get_progress


class SavedStaggered(Staged):
    get_state, set_state = SavedCountingEnv.get_state, SavedCountingEnv.set_state


def make_config(env, mapping, batch_size, policies=frozenset("pq"), **settings):
    defaults = {"seed": 3, "sgd_minibatch_size": 8, "num_sgd_iter": 1}
    config = make_small_config(env, **defaults, train_batch_size=batch_size, **settings)
    return config.multi_agent(policies=policies, policy_mapping_fn=mapping)


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_running_episodes_are_part_of_a_checkpoint(tmp_path, mode):
    config = make_config(SavedStaggered, own_policy, 10, num_envs_per_worker=2)
    algorithm = config.rollouts(rollout_fragment_length=5, batch_mode=mode).build()
    algorithm.train()
    algorithm.save(tmp_path)
    env = {"env": SavedStaggered}
    other = PPO.from_checkpoint(tmp_path, config=env, policy_mapping_fn=own_policy)
    for _ in range(2):
        left, right = (
            {pid: dict(batch) for pid, batch in x.worker.sample().policy_batches.items()}
            for x in (algorithm, other)
        )
        np.testing.assert_equal(left, right)


class Relay(SavedStaggered):
    """Has agents that are not texts; step 3 of the second episode fails once."""

    names = {"a": ("runner", 1), "b": np.int64(7)}
    _agent_ids = tuple(names.values())
    failed = False

    def reset(self, **arguments):
        obs, infos = super().reset(**arguments)
        return self.rename(obs), infos

    def step(self, action_dict):
        if (self.episode, self.now) == (1, 3) and not Relay.failed:
            Relay.failed = True
            raise RuntimeError("the baton fell")
        obs, rewards, *others = super().step(action_dict)
        return self.rename(obs), self.rename(rewards), *others

    def rename(self, by_agent):
        return {self.names[agent]: x for agent, x in by_agent.items()}


class Noting(DefaultCallbacks):
    def on_episode_end(self, *, episode, **kwargs):
        if not isinstance(episode, Exception):
            episode.custom_metrics["length"] = episode.length
            episode.hist_data["lengths"] = [episode.length, 0]


def by_type(agent_id, episode, **kwargs):
    return "p" if isinstance(agent_id, tuple) else "q"


@pytest.mark.core
@pytest.mark.parametrize("callbacks", [None, Noting])
def test_results_of_episodes_are_part_of_a_checkpoint(tmp_path, callbacks):
    """Rewards of policies, custom metrics, and that an episode was faulty and does not count."""
    Relay.failed = False
    config = make_config(Relay, by_type, 16, rollout_fragment_length=16)
    config.environment(disable_env_checking=True).callbacks(callbacks)
    algorithm = config.fault_tolerance(restart_failed_sub_environments=True).build()
    result = algorithm.train()
    assert (result["num_faulty_episodes"], result["episode_len_mean"]) == (1, 7.0)
    assert result["policy_reward_mean"] == {"p": 7.0, "q": 7.0}
    algorithm.save(tmp_path)
    settings = {"env": Relay, "callbacks": callbacks}
    other = PPO.from_checkpoint(tmp_path, policy_mapping_fn=by_type, config=settings)
    assert get_progress(other) == get_progress(algorithm)
    left, right = (x.train() for x in (algorithm, other))
    names = ["num_faulty_episodes", "episode_len_mean", "episode_reward_min", "policy_reward_min"]
    for name in [*names, "custom_metrics"]:
        assert left[name] == right[name], name
    assert left["hist_stats"].keys() == right["hist_stats"].keys()
    assert ("lengths" in left["hist_stats"]) == ("length_mean" in left["custom_metrics"])
    assert ("lengths" in left["hist_stats"]) == (callbacks is not None)


def test_a_class_without_an_import_path_is_given_for_its_own_policy_only(tmp_path):
    class Local(ZeroPolicy):
        pass

    policies = {"p": PolicySpec(), "q": PolicySpec(policy_class=Local)}
    config = make_config(SavedStaggered, own_policy, 8, policies, policies_to_train=["p"])
    algorithm = config.build()
    algorithm.add_policy("p_v1", PPOTF2Policy)
    algorithm.save(tmp_path)
    settings = {"env": SavedStaggered, "policies": policies}
    again = PPO.from_checkpoint(tmp_path, config=settings, policy_mapping_fn=own_policy)
    classes = {pid: type(policy) for pid, policy in again.worker.policy_map.items()}
    assert classes == {"p": PPOTF2Policy, "q": Local, "p_v1": PPOTF2Policy}
    restored = config.build()
    restored.restore(tmp_path)
    assert type(restored.get_policy("p_v1")) is PPOTF2Policy
