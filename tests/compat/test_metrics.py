"""Custom evaluation functions, metrics and functions of workers, and printed results."""

import json

import numpy as np
import pytest

from helpers.multi_agent_envs import Staggered, own_policy
from helpers.quick_configs import Corridor, quick_config
from tfpolicies import DefaultCallbacks, PGConfig
from tfpolicies.compat import collect_episodes, pretty_print, summarize_episodes
from tfpolicies.rollout.episode import RolloutMetrics


def make_config(workers=0, **evaluation):
    config = quick_config(env=Corridor, env_config={"length": 4}, seed=2)
    config.rollouts(num_rollout_workers=workers, rollout_fragment_length=16 // max(1, workers))
    return config.evaluation(**evaluation).resources(num_cpus_per_worker=0)


def evaluate(algorithm, eval_workers):
    """Plays corridors whose length is that of the worker."""
    eval_workers.foreach_worker_with_id(
        lambda index, worker: worker.foreach_env(lambda env: env.set_length(3 + index))
    )
    only_here = not eval_workers.num_remote_workers()
    for _ in range(5):
        eval_workers.foreach_worker(lambda worker: worker.sample(), local_worker=only_here)
    episodes = collect_episodes(workers=eval_workers, timeout_seconds=99999)
    metrics = summarize_episodes(episodes)
    metrics["foo"] = 1
    return metrics


def test_a_custom_evaluation_sets_environments_samples_and_summarises():
    algorithm = make_config(evaluation_interval=1, custom_evaluation_function=evaluate).build()
    for _ in range(2):
        result = algorithm.train()["evaluation"]
        assert result["foo"] == 1
        assert result["episodes_this_iter"] == 5
        assert result["hist_stats"]["episode_lengths"] == [3] * 5
        assert result["episode_reward_mean"] == 3.0


@pytest.mark.usefixtures("ray_cluster")
def test_remote_workers_evaluate_by_the_same_function():
    config = make_config(2, evaluation_num_workers=2, custom_evaluation_function=evaluate)
    algorithm = config.build()
    result = algorithm.evaluate()["evaluation"]
    assert sorted(result["hist_stats"]["episode_lengths"]) == [4] * 5 + [5] * 5
    ids = algorithm.workers.foreach_policy(lambda policy, policy_id: policy_id)
    assert ids == ["default_policy"] * 3
    assert algorithm.workers.foreach_policy(get_width, local_worker=False) == [4, 4]
    algorithm.workers.sample()  # comes home with its metrics
    algorithm.workers.foreach_worker(lambda worker: worker.sample(), local_worker=False)
    assert len(collect_episodes(algorithm.workers)) == 8
    assert collect_episodes(algorithm.workers) == []
    algorithm.workers.foreach_worker(lambda worker: worker.sample(), local_worker=False)
    assert len(collect_episodes(algorithm.workers, [2])) == 2
    algorithm.stop()


def get_width(policy, policy_id):
    return policy.config["model"]["fcnet_hiddens"][0]


@pytest.mark.core
def test_functions_reach_the_policies_and_environments_of_all_workers():
    config = quick_config(PGConfig, lambda context: Staggered(), env_config={"a": 1})
    config.multi_agent(policies={"p", "q"}, policy_mapping_fn=own_policy, policies_to_train=["q"])
    algorithm = config.rollouts(num_envs_per_worker=2).build()
    workers = algorithm.workers
    assert sorted(workers.foreach_policy(lambda policy, policy_id: policy_id)) == ["p", "q"]
    result = workers.foreach_policy_to_train(lambda policy, policy_id: (policy_id, policy))
    assert result == [("q", algorithm.get_policy("q"))]
    assert workers.foreach_policy(get_width, local_worker=False) == []
    assert workers.foreach_env(lambda env: type(env).__name__) == [["Staggered"] * 2]
    result = workers.foreach_env_with_context(lambda env, at: (at["a"], at.vector_index))
    assert result == [[(1, 0), (1, 1)]]


@pytest.mark.parametrize("several", [False, True])
def test_callbacks_get_the_environment_of_an_episode(several):
    results = []

    class Noting(DefaultCallbacks):
        def on_episode_end(self, *, worker, base_env, policies, episode, env_index, **kwargs):
            results.append((env_index, base_env.get_sub_environments()[env_index]))

    config = make_config().callbacks(Noting)
    config.rollouts(num_envs_per_worker=2, rollout_fragment_length=8)
    if several:
        config.environment(lambda context: Staggered())
        config.multi_agent(policies={"p", "q"}, policy_mapping_fn=own_policy)
    algorithm = config.build()
    algorithm.worker.sample()
    assert {index for index, _ in results} == {0, 1}
    for index, one in results:
        assert isinstance(one, Staggered if several else Corridor)
        assert one is algorithm.worker.async_env.get_sub_environments()[index]


@pytest.mark.core
def test_summaries_count_the_new_episodes_and_may_keep_custom_metrics():
    episodes = [RolloutMetrics(2, 1.0, custom_metrics={"x": x}) for x in (1.0, 4.0, 7.0)]
    summary = summarize_episodes(episodes, episodes[1:])
    assert summary["episodes_this_iter"] == 2
    assert summary["custom_metrics"] == {"x_mean": 4.0, "x_min": 1.0, "x_max": 7.0}
    summary = summarize_episodes(episodes, None, True)
    assert summary["episodes_this_iter"] == 3
    assert summary["custom_metrics"] == {"x": [1.0, 4.0, 7.0]}


RESULT = {
    "timers": {"learn_time_ms": np.float64(0.1), "nothing": {}},
    "episode_reward_mean": float("nan"),
    "best": np.inf,
    "config": {"lr": 1.0},
    "hist_stats": {"episode_reward": [1.0, 2.0]},
    "sampler_results": {"hist_stats": {"episode_reward": [1.0]}, "count": np.int64(3)},
    "lengths": [np.float32(0.5), 2, None],
    "array": np.array([[1, 2], [3, 4]]),
    "parts": [{"a": np.bool_(True)}],
    "only": {"hist_stats": {}},
    "done": False,
    "lr": 1e-05,
    "date": "2026-01-02",
    "answer": "no",
    "name": "default_policy",
    "left_out": None,
    ("a", 1): 2,
}

TEXT = """\
"('a', 1)": 2
answer: "no"
array: [[1, 2], [3, 4]]
best: .inf
date: "2026-01-02"
done: false
episode_reward_mean: .nan
lengths: [0.5, 2, null]
lr: 1.0e-05
name: default_policy
only: {}
parts: [{a: true}]
sampler_results:
  count: 3
timers:
  learn_time_ms: 0.1
  nothing: {}"""


@pytest.mark.core
def test_results_are_printed_as_plain_values_without_config_and_histograms():
    assert pretty_print(RESULT) == TEXT


def test_printed_results_are_yaml():
    yaml = pytest.importorskip("yaml")
    actual = yaml.safe_load(pretty_print(RESULT))
    assert actual["lengths"] == [0.5, 2, None]
    assert (actual["lr"], actual["answer"], actual["date"]) == (1e-05, "no", "2026-01-02")
    result = make_config().build().train()
    printed = yaml.safe_load(pretty_print(result))
    assert printed["counters"] == result["counters"]
    assert printed["episode_reward_mean"] == result["episode_reward_mean"]
    assert "config" not in printed
    assert json.dumps(printed["info"])
