"""Policies that come and go over workers in a real Ray cluster, evaluation, and hanging workers."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from gymnasium import spaces

from helpers.environments import SeededEnv
from tfpolicies import (
    DefaultCallbacks,
    DQNConfig,
    MultiAgentEnv,
    PolicySpec,
    PPOConfig,
    PPOTF2Policy,
)
from tfpolicies.errors import ConfigError, PolicyExistsError, UnknownPolicyError
from tfpolicies.rollout.policy_changes import MappingAndTrainable

pytestmark = pytest.mark.usefixtures("ray_cluster")

OBS = spaces.Box(-1.0, 1.0, (2,), np.float32)


class Pair(MultiAgentEnv):
    """Two agents; episodes of five steps."""

    observation_space = OBS
    action_space = spaces.Discrete(2)
    _agent_ids = ("a", "b")

    def __init__(self, config):
        self.now = 0

    def observe(self):
        return {agent: np.full(2, self.now / 10, np.float32) for agent in self._agent_ids}

    def reset(self, *, seed=None, options=None):
        self.now = 0
        return self.observe(), {}

    def step(self, action_dict):
        self.now += 1
        over = {"__all__": self.now == 5}
        rewards = {agent: float(x) for agent, x in action_dict.items()}
        return self.observe(), rewards, over, {"__all__": False}, {}


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


class Counting(DefaultCallbacks):
    def on_create_policy(self, *, policy_id, policy):
        policy.greeted = True


def small(config, env, **rollouts):
    return (
        config.environment(env)
        .framework("tf2", inference="tf", jit_compile=False)
        .rollouts(**rollouts)
        .resources(num_cpus_per_worker=0)
        .debugging(seed=3)
    )


def ppo(env, workers=2, **training):
    settings = {"train_batch_size": 20, "sgd_minibatch_size": 20, "num_sgd_iter": 1}
    config = small(
        PPOConfig(), env, num_rollout_workers=workers, rollout_fragment_length=20 // workers
    )
    return config.training(model={"fcnet_hiddens": [4]}, **settings, **training)


def first_policy(agent_id, episode, worker, **kwargs):
    return "first"


def roster_of(worker):
    weights = {pid: list(map(np.sum, w.values())) for pid, w in worker.get_weights().items()}
    trained = sorted(worker.get_policies_to_train())
    return weights, worker.policy_mapping_fn("b", None, worker=None), trained


def assert_all_alike(algorithm):
    result = algorithm.workers.foreach_worker(roster_of)
    result += algorithm.evaluation_workers.foreach_worker(
        lambda w: (*roster_of(w)[:2], result[0][2])
    )
    for weights, mapped, trained in result[1:]:
        assert mapped == result[0][1]
        assert trained == result[0][2]
        assert weights.keys() == result[0][0].keys()
        for policy_id, sums in weights.items():
            np.testing.assert_array_equal(sums, result[0][0][policy_id])


@pytest.fixture(scope="module")
def league(ray_cluster):
    algorithm = (
        ppo(Pair)
        .multi_agent(policies={"first": PolicySpec()}, policy_mapping_fn=first_policy)
        .evaluation(evaluation_num_workers=1, evaluation_duration=3)
        .callbacks(Counting)
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
    before = league.workers.foreach_worker(roster_of)
    with pytest.raises(RuntimeError, match="not in this process"):
        league.add_policy("bad", FailsElsewhere, policy_mapping_fn=lambda *a, **k: "bad")
    for error, arguments in (
        (PolicyExistsError, ("first", PPOTF2Policy)),
        (ValueError, ("second", None)),
    ):
        with pytest.raises(error):
            league.add_policy(*arguments)
    with pytest.raises(UnknownPolicyError):
        league.remove_policy("nobody")
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"policy_mapping_fn=.* cannot be sent to remote workers"):
        league.add_policy("second", PPOTF2Policy, policy_mapping_fn=lambda *a, **k: lock)
    with pytest.raises(ConfigError, match="cannot be sent to remote workers"):
        league.remove_policy("first", policy_mapping_fn=lambda *a, **k: lock)
    assert league.workers.foreach_worker(roster_of) == before
    assert league.evaluation_workers.foreach_worker(lambda w: list(w.policy_map)) == [["first"]] * 2


def test_policies_of_workers_know_their_index_and_were_greeted(league):
    league.add_policy("guest", PPOTF2Policy)
    own = league.workers.foreach_worker(
        lambda w: (w.worker_index, getattr(w.policy_map["guest"], "greeted", False))
    )
    assert own == [(0, True), (1, True), (2, True)]
    league.remove_policy("guest")


def test_an_error_of_the_users_code_costs_no_worker(league):
    healthy = league.workers.healthy_worker_ids()
    nobody = MappingAndTrainable(lambda agent_id, episode, worker, **kwargs: "nobody", None)
    league.policies.set_mapping_and_trainable(nobody)
    with pytest.raises(KeyError, match="returned invalid policy id"):
        league.train()  # ten steps of each worker, two episodes
    league.policies.set_mapping_and_trainable(MappingAndTrainable(first_policy, None))
    before = league.counters["num_env_steps_sampled"]
    assert league.train()["num_env_steps_sampled"] == before + 20
    assert league.workers.healthy_worker_ids() == healthy == [1, 2]


def test_sampling_goes_on_while_an_off_policy_algorithm_learns(ray_cluster):
    config = small(DQNConfig(), SeededEnv, num_rollout_workers=1, rollout_fragment_length=4)
    algorithm = (
        config.training(
            model={"fcnet_hiddens": [4]},
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
        ppo(Hanging)
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
def test_the_environment_of_a_worker_may_break_and_is_named(ray_cluster):
    class Broken(SeededEnv):
        def __init__(self, config):
            self.index = config.worker_index

        def step(self, action):
            obs, *rest = super().step(action)
            return (obs[:1] if self.index == 2 and self.now == 4 else obs), *rest

    algorithm = ppo(Broken).build()
    with pytest.raises(ValueError, match=r"environment 0 of worker 2 .*shape \(1,\)") as result:
        algorithm.train()
    assert "remote worker 2" in " ".join(getattr(result.value, "__notes__", ["remote worker 2"]))
    algorithm.stop()
