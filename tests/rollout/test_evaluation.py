"""Evaluation: whole episodes, their exact number, no bias to short ones, no trace in training."""

import logging

import numpy as np
import pytest

from helpers.custom_policies import ZeroPolicy
from helpers.environments import BoxActionEnv, CountingEnv, SeededEnv, counting_creator
from helpers.workers import (
    assert_equal_batches,
    assert_equal_weights,
    make_callbacks,
    make_config,
    make_worker,
)
from tfpolicies import DefaultCallbacks
from tfpolicies.envs.env_factory import EnvContext, make_environments
from tfpolicies.envs.multi_agent_env import make_multi_agent
from tfpolicies.errors import UsageError
from tfpolicies.rollout import evaluation, multi_agent_sampler, single_agent_sampler
from tfpolicies.rollout.evaluation import play_episodes
from tfpolicies.rollout.sampler import EvaluationDuration

pytestmark = pytest.mark.usefixtures("kept_programs")


def play(source, count, duration, *, by_episodes=True, policy_class=ZeroPolicy):
    """Plays in `count` environments; returns the metrics of the episodes."""
    policy = policy_class(CountingEnv.observation_space, CountingEnv.action_space, {})
    envs = make_environments(source, count, EnvContext({}))
    return play_episodes(policy, envs, EvaluationDuration(duration, by_episodes))


def uneven(context):
    """Even environments have episodes of 2 steps, odd ones of 20."""
    return CountingEnv(context.vector_index, [(2,), (20,)][context.vector_index % 2])


def build(env=SeededEnv, **settings):
    training = {"train_batch_size": 32, "sgd_minibatch_size": 16, "num_sgd_iter": 2, "lr": 1e-2}
    training |= {"num_envs_per_worker": 2, "seed": 4}
    return make_config(env, **{**training, **settings}).build()


@pytest.mark.parametrize("mode", ["plain", "next_step", "same_step", "disabled"])
@pytest.mark.parametrize("episodes", [1, 2, 3, 10, 11])
def test_the_exact_number_of_whole_episodes_is_played(mode, episodes):
    metrics = play(counting_creator(mode), 3, episodes)
    expected = []
    for number in range(3):
        env = CountingEnv(number)
        for episode in range((episodes + 2 - number) // 3):
            length = env.length(episode)
            total = sum(env.reward(episode, step, 0) for step in range(length))
            expected.append((length, total))
    assert sorted((m.episode_length, m.episode_reward) for m in metrics) == sorted(expected)


@pytest.mark.parametrize(
    ("duration", "by_episodes", "counts"),
    [(10, True, (5, 5)), (100, False, (25, 3)), (1, False, (1, 1))],
)
def test_short_episodes_are_not_favoured(duration, by_episodes, counts):
    metrics = play(uneven, 2, duration, by_episodes=by_episodes)
    lengths = sorted(m.episode_length for m in metrics)
    assert lengths == [2] * counts[0] + [20] * counts[1]


def test_environments_are_seeded_once_and_restart_each_time():
    policy = ZeroPolicy(CountingEnv.observation_space, CountingEnv.action_space, {})
    envs = make_environments(lambda context: CountingEnv(0, [5]), 2, EnvContext({}))
    for k in range(3):
        play_episodes(policy, envs, EvaluationDuration(2, True), seeds=[10 * k, 10 * k + 1])
    for i, env in enumerate(envs.get_sub_environments()):
        assert [seed for seed in env.seeds if seed is not None] == [i, 10 + i, 20 + i]


def test_the_result_summarises_the_episodes_that_were_played():
    algorithm = build(uneven, evaluation_duration=7)
    result = algorithm.evaluate()
    assert list(result) == ["evaluation"]
    metrics = result["evaluation"]
    assert metrics["episodes_this_iter"] == 7
    assert sorted(metrics["hist_stats"]["episode_lengths"]) == [2] * 4 + [20] * 3
    assert metrics["episode_len_mean"] == pytest.approx(68 / 7)
    returns = metrics["hist_stats"]["episode_reward"]
    assert metrics["episode_reward_mean"] == pytest.approx(np.mean(returns))
    assert metrics["episode_reward_max"] == max(returns)
    assert metrics["num_env_steps_sampled_this_iter"] == metrics["timesteps_this_iter"] == 68
    assert metrics["sampler_results"]["episode_len_mean"] == metrics["episode_len_mean"]
    assert algorithm.counters["num_env_steps_sampled"] == 0


def test_time_steps_are_a_lower_bound_met_by_whole_episodes():
    algorithm = build(evaluation_duration=23, evaluation_duration_unit="timesteps")
    metrics = algorithm.evaluate()["evaluation"]
    assert metrics["timesteps_this_iter"] == 25  # five episodes of five steps
    assert metrics["episodes_this_iter"] == 5


def test_a_duration_function_decides_how_much_remains():
    calls = []

    def get_remaining(done):
        calls.append(done)
        return max(0, 4 - done)

    metrics = build(evaluation_duration=2).evaluate(get_remaining)["evaluation"]
    assert calls == [0, 4]
    assert metrics["episodes_this_iter"] == 4
    growing = build(evaluation_duration=3).evaluate(lambda done: 2 if done < 6 else 0)
    assert growing["evaluation"]["episodes_this_iter"] == 6
    empty = build().evaluate(lambda done: 0)["evaluation"]
    assert empty["episodes_this_iter"] == 0
    assert np.isnan(empty["episode_reward_mean"])


def test_evaluating_changes_nothing_about_training():
    quiet, busy = build(), build(evaluation_interval=1, evaluation_duration=3)
    for _ in range(3):
        expected, actual = quiet.train(), busy.train()
        assert "evaluation" not in expected
        assert actual["evaluation"]["episodes_this_iter"] == 3
        busy.evaluate()
        for name in ("episode_reward_mean", "timesteps_total", "episodes_total"):
            np.testing.assert_equal(actual[name], expected[name])
        assert actual["info"]["learner"] == expected["info"]["learner"]
    assert_equal_weights(busy, quiet)
    assert_equal_batches(busy.worker.sample(), quiet.worker.sample())


def test_evaluation_is_due_every_interval_and_repeatable():
    def run():
        algorithm = build(evaluation_interval=2, evaluation_duration=3)
        results = [algorithm.train().get("evaluation") for _ in range(4)]
        for metrics in results[1], results[3]:  # what depends on the clock
            assert metrics.pop("sampler_perf") == metrics.pop("sampler_results")["sampler_perf"]
        return results

    first, second = run(), run()
    assert [results is not None for results in first] == [False, True, False, True]
    assert first[1] == second[1]
    assert first[3] == second[3]
    assert first[1]["hist_stats"] != first[3]["hist_stats"]


def test_overrides_of_the_evaluation_config_hold_for_evaluation_only():
    algorithm = build(BoxActionEnv, evaluation_config={"explore": False}, evaluation_duration=2)
    first, second = (algorithm.evaluate()["evaluation"]["hist_stats"] for _ in range(2))
    assert first == second  # this environment is not random, and neither is the policy
    assert len(set(first["episode_reward"])) == 1
    assert algorithm.get_policy().config["explore"] is True
    weights = algorithm.get_weights()["default_policy"]
    algorithm.set_weights({"default_policy": {k: v + 0.5 for k, v in weights.items()}})
    third = algorithm.evaluate()["evaluation"]["hist_stats"]
    assert third["episode_reward"] != first["episode_reward"]  # of the present weights
    exploring = build(BoxActionEnv, evaluation_duration=2)
    assert len(set(exploring.evaluate()["evaluation"]["hist_stats"]["episode_reward"])) == 2


def test_callbacks_surround_an_evaluation():
    calls = []

    def on_start(algorithm):
        calls.append(("start", algorithm))

    def on_end(algorithm, evaluation_metrics):
        assert list(evaluation_metrics) == ["evaluation"]
        evaluation_metrics["evaluation"]["custom"] = 5
        calls.append(("end", algorithm, evaluation_metrics))

    callbacks = make_callbacks(on_evaluate_start=on_start, on_evaluate_end=on_end)
    algorithm = build(evaluation_duration=1, callbacks=callbacks)
    result = algorithm.evaluate()
    assert result["evaluation"]["custom"] == 5
    assert calls == [("start", algorithm), ("end", algorithm, result)]
    assert calls[1][2] is result


def test_a_policy_that_asks_for_episodes_gets_them_without_a_worker():
    lengths = []

    class Recording(ZeroPolicy):
        def compute_actions(self, obs_batch, state_batches=None, episodes=None, **kwargs):
            lengths.append([episode.length for episode in episodes])
            return super().compute_actions(obs_batch)

    metrics = play(lambda context: CountingEnv(0, [3]), 1, 1, policy_class=Recording)
    assert len(metrics) == 1
    assert lengths == [[0], [1], [2]]


@pytest.mark.parametrize("several", [False, True])
def test_callbacks_follow_the_episodes_of_an_evaluation(several):
    class Measuring(DefaultCallbacks):
        def on_episode_start(self, *, worker, base_env, policies, episode, env_index):
            episode.user_data["steps"] = 0

        def on_episode_step(self, *, worker, base_env, policies, episode, env_index):
            episode.user_data["steps"] += 1

        def on_episode_end(self, *, worker, base_env, policies, episode, env_index):
            assert worker.config.in_evaluation
            episode.custom_metrics["doubled"] = 2 * episode.user_data["steps"]
            episode.hist_data["places"] = [env_index]

    def four_steps(context):
        return CountingEnv(0, [4])

    env = make_multi_agent(four_steps) if several else four_steps
    algorithm = build(env, evaluation_duration=3, callbacks=Measuring)
    result = algorithm.evaluate()["evaluation"]
    assert result["episodes_this_iter"] == 3
    assert result["custom_metrics"]["doubled_mean"] == 8.0
    assert sorted(result["hist_stats"]["places"]) == [0, 1, 2]


@pytest.mark.parametrize("evaluated_before", [False, True])
def test_a_stopped_algorithm_does_not_evaluate(evaluated_before):
    algorithm = build(evaluation_duration=1)
    if evaluated_before:
        algorithm.evaluate()
    algorithm.stop()
    with pytest.raises(UsageError, match="was stopped"):
        algorithm.evaluate()


def test_a_custom_function_evaluates_with_the_present_policies():
    calls = []

    def evaluate(algorithm, workers):
        assert_equal_weights(workers.local_worker(), algorithm)
        calls.append(workers)
        return {"score": 7}

    algorithm = build(evaluation_interval=2, custom_evaluation_function=evaluate)
    results = [algorithm.train() for _ in range(3)]
    assert [result.get("evaluation") for result in results] == [None, {"score": 7}, None]
    assert len(calls) == 1


@pytest.mark.parametrize("num_envs", [1, 3])
def test_one_sample_of_a_custom_function_has_whole_episodes(num_envs):
    def evaluate(algorithm, workers):
        (batch,) = workers.foreach_worker(lambda worker: worker.sample())
        lengths = [metrics.episode_length for metrics in workers.get_metrics()]
        return {"lengths": lengths, "steps": batch.count}

    settings = {"evaluation_duration": 3, "num_envs_per_worker": num_envs}
    algorithm = build(custom_evaluation_function=evaluate, **settings)
    for _ in range(4):  # all environments end at once: SeededEnv has five steps
        result = algorithm.evaluate()["evaluation"]
        assert result == {"lengths": [5] * num_envs, "steps": 5 * num_envs}


@pytest.mark.parametrize("returned", [None, 3.5, [("score", 7)]])
def test_a_custom_function_that_returns_no_dict_is_named(returned):
    def scoring(algorithm, workers):
        return returned

    algorithm = build(custom_evaluation_function=scoring)
    with pytest.raises(UsageError, match=r"scoring must return a dict of metrics, got ") as caught:
        algorithm.evaluate()
    assert repr(returned) in str(caught.value)


def test_results_carry_the_latest_evaluation_if_asked_for():
    settings = {"evaluation_interval": 2, "always_attach_evaluation_results": True}
    algorithm = build(evaluation_duration=1, **settings)
    first, second, third = (algorithm.train() for _ in range(3))
    assert np.isnan(first["evaluation"]["episode_reward_mean"])
    assert first["evaluation"]["sampler_results"]["episodes_this_iter"] == 0
    assert "hist_stats" not in first["evaluation"]
    assert second["evaluation"]["hist_stats"]["episode_lengths"] == [5]
    assert second["evaluation"]["episodes_this_iter"] == 1
    assert third["evaluation"] is second["evaluation"]


def test_evaluation_workers_exist_from_the_beginning():
    workers = []

    def record(algorithm, **kwargs):
        workers.append(algorithm.evaluation_workers)

    callbacks = make_callbacks(on_algorithm_init=record)
    algorithm = build(evaluation_interval=3, callbacks=callbacks)
    assert workers == [algorithm.evaluation_workers]
    assert workers[0].local_worker().get_policy() is not algorithm.get_policy()
    algorithm = build(evaluation_interval=None)
    assert algorithm.evaluation_workers is None
    algorithm.evaluate()
    assert algorithm.evaluation_workers is not None


class Endless(CountingEnv):
    """Every second instance has an episode that never ends."""

    count = 0

    def __init__(self, config=None):
        Endless.count += 1
        super().__init__(Endless.count)

    def length(self, episode):
        return 10**9 if self.number % 2 else 4


@pytest.mark.parametrize("several", [False, True])
def test_an_evaluation_that_does_not_end_is_cut_and_says_so(several, caplog):
    source = make_multi_agent(Endless) if several else Endless
    settings = {"evaluation_duration": 6, "evaluation_sample_timeout_s": 0.3}
    algorithm = build(source, **settings)
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        result = algorithm.evaluate()["evaluation"]
    count = result["episodes_this_iter"]
    assert 0 < count < 6
    assert result["hist_stats"]["episode_lengths"] == [4] * count
    (message,) = caplog.messages
    assert f"evaluation_sample_timeout_s=0.3 seconds, after {count} of 6 episodes" in message
    algorithm.train()


def test_an_evaluation_without_a_timeout_reports_a_long_episode(monkeypatch, caplog):
    monkeypatch.setattr(evaluation, "LONG_EPISODE_STEPS", 50)
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        assert len(play(lambda context: CountingEnv(0, [80]), 1, 1)) == 1
    (message,) = caplog.messages
    assert "Environment 0: an episode has not ended after 50 steps, and evaluation waits" in message
    assert "max_episode_steps" in message


@pytest.mark.parametrize("several", [False, True])
def test_whole_episodes_report_one_that_does_not_end(several, monkeypatch, caplog):
    for module in (single_agent_sampler, multi_agent_sampler):
        monkeypatch.setattr(module, "LONG_EPISODE_STEPS", 50)

    def long(context):
        return CountingEnv(0, [120])

    source = make_multi_agent(long) if several else long
    settings = {"batch_mode": "complete_episodes", "rollout_fragment_length": 8}
    worker = make_worker(source, **settings)
    with caplog.at_level(logging.WARNING, "tfpolicies"):
        assert worker.sample().count == 120
    assert all("batch_mode='complete_episodes' waits for its end" in x for x in caplog.messages)
    assert "has not ended after " in caplog.messages[0]
