"""An algorithm with many agents goes on from a checkpoint as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.multi_agent_envs import Staggered, own_policy
from tfpolicies import PPO, DefaultCallbacks, Policy, PolicySpec, PPOConfig, PPOTF2Policy
from tfpolicies.algorithms.training_state import get_progress


class SavedStaggered(Staggered):
    """A world that can be saved and restored."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def get_state(self) -> dict[str, int]:
        return {"episode": self.episode, "now": self.now}

    def set_state(self, state: dict[str, int]) -> None:
        self.episode, self.now = state["episode"], state["now"]


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_running_episodes_are_part_of_a_checkpoint(tmp_path: Path, mode: str) -> None:
    config = (
        PPOConfig()
        .environment(SavedStaggered)
        .framework("tf2", inference="tf", jit_compile=False)
        .rollouts(num_envs_per_worker=2, rollout_fragment_length=5, batch_mode=mode)
        .training(
            train_batch_size=10,
            sgd_minibatch_size=8,
            num_sgd_iter=1,
            model={"fcnet_hiddens": [4]},
        )
        .multi_agent(policies={"p", "q"}, policy_mapping_fn=own_policy)
        .debugging(seed=3)
    )
    algorithm = config.build()
    algorithm.train()
    algorithm.save(tmp_path)
    other = PPO.from_checkpoint(
        tmp_path, config={"env": SavedStaggered}, policy_mapping_fn=own_policy
    )
    for _ in range(2):
        left, right = (x.worker.sample() for x in (algorithm, other))
        assert set(left.policy_batches) == set(right.policy_batches)
        for policy_id, part in left.policy_batches.items():
            for name, column in part.items():
                np.testing.assert_array_equal(column, right[policy_id][name], err_msg=name)


class Relay(SavedStaggered):
    """The agents are no texts; step 3 of the second episode fails once."""

    names = {"a": ("runner", 1), "b": np.int64(7)}
    _agent_ids = tuple(names.values())
    failed = False

    def reset(self, **arguments: Any) -> tuple[Any, dict]:
        seen, infos = super().reset(**arguments)
        return self.renamed(seen), infos

    def step(self, action_dict: Any) -> Any:
        if (self.episode, self.now) == (1, 3) and not Relay.failed:
            Relay.failed = True
            raise RuntimeError("the baton fell")
        seen, rewards, *others = super().step(action_dict)
        return self.renamed(seen), self.renamed(rewards), *others

    def renamed(self, by_agent: Any) -> dict[Any, Any]:
        return {self.names[agent]: x for agent, x in by_agent.items()}


class Noting(DefaultCallbacks):
    def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
        if not isinstance(episode, Exception):
            episode.custom_metrics["length"] = episode.length
            episode.hist_data["lengths"] = [episode.length, 0]


def by_type(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    return "p" if isinstance(agent_id, tuple) else "q"


@pytest.mark.core
@pytest.mark.parametrize("callbacks", [None, Noting])
def test_what_was_reported_of_episodes_is_part_of_a_checkpoint(
    tmp_path: Path, callbacks: Any
) -> None:
    """Rewards of policies, custom metrics, and that an episode was faulty and does not count."""
    Relay.failed = False
    config = (
        PPOConfig()
        .environment(Relay, disable_env_checking=True)
        .framework("tf2", inference="tf", jit_compile=False)
        .rollouts(rollout_fragment_length=16)
        .training(train_batch_size=16, sgd_minibatch_size=8, num_sgd_iter=1)
        .multi_agent(policies={"p", "q"}, policy_mapping_fn=by_type)
        .fault_tolerance(restart_failed_sub_environments=True)
        .callbacks(callbacks)
        .debugging(seed=3, log_level="ERROR")
    )
    algorithm = config.training(model={"fcnet_hiddens": [4]}).build()
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


def test_a_class_without_a_name_to_import_stands_for_itself_alone(tmp_path: Path) -> None:
    class Local(Policy):
        def compute_actions(self, obs_batch: Any, state_batches: Any = None, **kwargs: Any) -> Any:
            return np.zeros(len(obs_batch), np.int64), [], {}

    policies = {"p": PolicySpec(), "q": PolicySpec(policy_class=Local)}
    config = (
        PPOConfig()
        .environment(SavedStaggered)
        .framework("tf2", inference="tf", jit_compile=False)
        .training(train_batch_size=8, sgd_minibatch_size=8, model={"fcnet_hiddens": [4]})
        .multi_agent(policies=policies, policy_mapping_fn=own_policy, policies_to_train=["p"])
    )
    algorithm = config.build()
    algorithm.add_policy("p_v1", PPOTF2Policy)
    algorithm.save(tmp_path)
    again = PPO.from_checkpoint(
        tmp_path,
        config={"env": SavedStaggered, "policies": policies},
        policy_mapping_fn=own_policy,
    )
    classes = {pid: type(policy) for pid, policy in again.worker.policy_map.items()}
    assert classes == {"p": PPOTF2Policy, "q": Local, "p_v1": PPOTF2Policy}
    restored = config.build()
    restored.restore(tmp_path)
    assert type(restored.get_policy("p_v1")) is PPOTF2Policy
