"""Policies that come and go over workers in a real Ray cluster, evaluation, and hanging workers."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from helpers.environments import SeededEnv
from helpers.ray_runs import PairEnv, make_config, make_ppo
from tfpolicies import (
    DefaultCallbacks,
    DQNConfig,
    PolicySpec,
    PPOTF2Policy,
)
from tfpolicies.errors import ConfigError, PolicyExistsError, UnknownPolicyError
from tfpolicies.rollout.policy_changes import MappingAndTrainable

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Hanging(SeededEnv):
    """The first one in worker 1 hangs in its tenth step."""

    def __init__(self, config):
        self.steps = 0
        self.hangs = config.worker_index == 1 and not config.recreated_worker

    def step(self, action):
        self.steps += 1
        if self.hangs and self.steps == 10:
            time.sleep(600)
        return super().step(action)


class FailsElsewhere(PPOTF2Policy):
    """A policy that cannot be made in a remote worker."""

    def __init__(self, observation_space, action_space, config):
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "-1":
            raise RuntimeError("not in this process")
        super().__init__(observation_space, action_space, config)


class Greeting(DefaultCallbacks):
    def on_create_policy(self, *, policy_id, policy):
        policy.greeted = True


def first_policy(agent_id, episode, worker, **kwargs):
    return "first"


def describe(worker):
    """Returns sums of the weights, the policy of agent "b", and the trained policies."""
    weights = {pid: list(map(np.sum, w.values())) for pid, w in worker.get_weights().items()}
    trained = sorted(worker.get_policies_to_train())
    return weights, worker.policy_mapping_fn("b", None, worker=None), trained


def assert_all_alike(algorithm):
    local, *remote = algorithm.workers.foreach_worker(describe)
    assert remote == [local] * 2
    for weights, mapped, _ in algorithm.evaluation_workers.foreach_worker(describe):
        assert (weights, mapped) == local[:2]


@pytest.fixture(scope="module")
def league(ray_cluster):
    algorithm = (
        make_ppo(PairEnv, rows=20)
        .multi_agent(policies={"first": PolicySpec()}, policy_mapping_fn=first_policy)
        .evaluation(evaluation_num_workers=1, evaluation_duration=3)
        .callbacks(Greeting)
        .build()
    )
    algorithm.evaluate()  # makes the workers that evaluate
    yield algorithm
    algorithm.stop()


def test_remote_workers_explore_as_the_last_evaluation_asks_for(league):
    workers = league.evaluation_workers

    def explores(worker):
        return os.getpid(), worker.policy_map["first"].config["explore"]

    before = workers.foreach_worker(explores)
    for explore in (False, True):
        league.evaluate(explore=explore)
        assert workers.foreach_worker(explores) == [(pid, explore) for pid, _ in before]
    assert league.evaluation_workers is workers


def test_policies_are_added_and_removed_everywhere_between_samples(league):
    played = league.evaluate()["evaluation"]
    assert played["episodes_this_iter"] == 3
    assert played["num_agent_steps_sampled_this_iter"] == 30
    assert played["num_healthy_workers"] == 1
    for i in range(20):
        new = f"p{i}"

        def mapping(agent_id, episode, worker, new=new, **kwargs):
            return new if agent_id == "b" else "first"

        league.add_policy(
            new, PPOTF2Policy, policy_mapping_fn=mapping, policies_to_train=["first", new]
        )
        if i % 5 == 0:
            result = league.train()
            assert set(result["info"]["learner"]) == {"first", new}
            league.evaluate()
        assert_all_alike(league)
        league.remove_policy(new, policy_mapping_fn=first_policy, policies_to_train=["first"])
        if i % 5 == 2:
            league.train()
            league.evaluate()
    league.evaluate()
    assert_all_alike(league)
    assert league.workers.foreach_worker(lambda w: sorted(w.policy_map)) == [["first"]] * 3


def test_a_policy_that_one_worker_cannot_make_is_added_to_none(league):
    before = league.workers.foreach_worker(describe)
    with pytest.raises(RuntimeError, match="not in this process"):
        league.add_policy("bad", FailsElsewhere, policy_mapping_fn=lambda *a, **k: "bad")
    for error, arguments in (
        (PolicyExistsError, ("first", PPOTF2Policy)),
        (ValueError, ("second", None)),
    ):
        with pytest.raises(error):
            league.add_policy(*arguments)
    with pytest.raises(UnknownPolicyError):
        league.remove_policy("missing")
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"policy_mapping_fn=.* cannot be sent to remote workers"):
        league.add_policy("second", PPOTF2Policy, policy_mapping_fn=lambda *a, **k: lock)
    with pytest.raises(ConfigError, match="cannot be sent to remote workers"):
        league.remove_policy("first", policy_mapping_fn=lambda *a, **k: lock)
    assert league.workers.foreach_worker(describe) == before
    assert league.evaluation_workers.foreach_worker(lambda w: list(w.policy_map)) == [["first"]] * 2


def test_added_policies_reach_the_callbacks_of_all_workers(league):
    league.add_policy("guest", PPOTF2Policy)
    guests = league.workers.foreach_worker(
        lambda w: (w.worker_index, getattr(w.policy_map["guest"], "greeted", False))
    )
    assert guests == [(0, True), (1, True), (2, True)]
    league.remove_policy("guest")


def test_an_error_in_user_code_costs_no_worker(league):
    healthy = league.workers.healthy_worker_ids()
    unknown = MappingAndTrainable(lambda agent_id, episode, worker, **kwargs: "missing", None)
    league.policies.set_mapping_and_trainable(unknown)
    with pytest.raises(KeyError, match="returned invalid policy id"):
        league.train()  # ten steps of each worker, two episodes
    league.policies.set_mapping_and_trainable(MappingAndTrainable(first_policy, None))
    before = league.counters["num_env_steps_sampled"]
    assert league.train()["num_env_steps_sampled"] == before + 20
    assert league.workers.healthy_worker_ids() == healthy == [1, 2]


def test_sampling_continues_while_an_off_policy_algorithm_learns(ray_cluster):
    config = make_config(SeededEnv, DQNConfig, workers=1, rollout_fragment_length=4)
    algorithm = (
        config.training(
            train_batch_size=8,
            num_steps_sampled_before_learning_starts=8,
            max_requests_in_flight_per_sampler_worker=2,
        )
        .reporting(min_sample_timesteps_per_iteration=40)
        .build()
    )
    result = algorithm.train()
    assert result["num_in_flight_async_reqs"] == 2
    assert result["num_env_steps_sampled"] >= 40
    assert result["num_env_steps_trained"] > 0
    assert algorithm.replay_buffer.num_added == result["num_env_steps_sampled"]
    weights = algorithm.workers.foreach_worker(lambda w: next(iter(w.get_weights().values())))
    for key, value in weights[0].items():
        np.testing.assert_array_equal(weights[1][key], value)
    algorithm.stop()


@pytest.mark.soak
def test_a_worker_that_hangs_is_replaced(ray_cluster, caplog):
    algorithm = (
        make_ppo(Hanging, rows=20)
        .fault_tolerance(
            env_step_timeout_s=3.0,
            recreate_failed_workers=True,
            delay_between_worker_restarts_s=0.0,
        )
        .evaluation(
            evaluation_num_workers=1,
            evaluation_interval=1,
            evaluation_duration="auto",
            evaluation_parallel_to_training=True,
            evaluation_config={"env": SeededEnv},
        )
        .build()
    )
    deadline, results = time.monotonic() + 300, []
    while not results or results[-1]["num_healthy_workers"] < 2:
        results.append(algorithm.train())
        assert time.monotonic() < deadline
    assert "Remote worker 1 failed: `step` of environment 0 of worker 1 hangs for" in caplog.text
    assert results[-1]["num_remote_worker_restarts"] == 1
    assert all(result["evaluation"]["episodes_this_iter"] >= 1 for result in results)
    victim = algorithm.evaluation_workers.foreach_worker(lambda w: os.getpid())[1]
    os.kill(victim, signal.SIGKILL)
    evaluated = algorithm.evaluate(lambda done: 2 - done)["evaluation"]
    assert evaluated["episodes_this_iter"] == 2
    assert evaluated["num_remote_worker_restarts"] == 1
    algorithm.stop()


@pytest.mark.soak
def test_an_environment_that_breaks_in_a_worker_is_named(ray_cluster):
    class Broken(SeededEnv):
        def __init__(self, config):
            self.index = config.worker_index

        def step(self, action):
            obs, *rest = super().step(action)
            return (obs[:1] if self.index == 2 and self.now == 4 else obs), *rest

    algorithm = make_ppo(Broken, rows=20).build()
    with pytest.raises(ValueError, match=r"environment 0 of worker 2 .*shape \(1,\)") as result:
        algorithm.train()
    assert "remote worker 2" in " ".join(getattr(result.value, "__notes__", ["remote worker 2"]))
    algorithm.stop()
