"""Worker sets in a real Ray cluster: weights, filters, calls, counters, and dying workers."""

import os
import signal
import time

import numpy as np
import pytest
import ray
from gymnasium import spaces

from helpers.environments import CountingEnv, SeededEnv
from helpers.ray_runs import CountingVectorEnv, get_filter_state, get_policy_weights, make_ppo
from tfpolicies import DefaultCallbacks
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.errors import ConfigError, EnvError, UnknownPolicyError, WorkerError

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Noting(DefaultCallbacks):
    def on_workers_recreated(self, *, algorithm, worker_set, worker_ids, is_evaluation):
        algorithm.noted = [*getattr(algorithm, "noted", []), (worker_ids, is_evaluation)]


def make_filtered(workers=2, **fault_tolerance):
    config = make_ppo(workers=workers, observation_filter="MeanStdFilter").callbacks(Noting)
    return config.fault_tolerance(delay_between_worker_restarts_s=0.0, **fault_tolerance)


def damage_weights(worker):
    weights = {key: x + 1 for key, x in get_policy_weights(worker).items()}
    worker.set_weights({"default_policy": weights})


def assert_all_equal(results):
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        for key in other:
            np.testing.assert_array_equal(other[key], results[0][key], err_msg=key)


@pytest.fixture(scope="module")
def algorithm(ray_cluster):
    algorithm = make_filtered(recreate_failed_workers=True).build()
    yield algorithm
    algorithm.stop()


def test_weights_and_filters_are_equal_on_all_workers_after_an_iteration(algorithm):
    before = algorithm.counters["num_env_steps_sampled"]
    for _ in range(2):
        result = algorithm.train()
    workers = algorithm.workers
    assert result["num_healthy_workers"] == workers.num_remote_workers() == 2
    assert result["num_env_steps_sampled"] == before + 80
    assert workers.local_worker().environments is None
    assert_all_equal(workers.foreach_worker(get_policy_weights))
    filters = workers.foreach_worker(get_filter_state)
    assert_all_equal(filters)
    assert filters[0]["frozen/0/count"] == result["num_env_steps_sampled"]
    assert filters[0]["pending/0/count"] == 0


def test_workers_are_processes_of_their_own_with_different_seeds(algorithm):
    processes = algorithm.workers.foreach_worker_with_id(lambda i, w: (i, os.getpid()))
    assert [index for index, _ in processes] == [0, 1, 2]
    assert len({process for _, process in processes}) == 3
    first, second = algorithm.workers.sample()
    assert first.count == second.count == 20
    assert not np.array_equal(first["obs"], second["obs"])
    metrics = algorithm.workers.get_metrics()
    assert [m.episode_length for m in metrics] == [5] * 8


def test_weights_that_did_not_change_are_not_sent_again(algorithm):
    workers = algorithm.workers
    workers.sync_weights()
    workers.foreach_worker(damage_weights, local_worker=False)
    damaged = workers.foreach_worker(get_policy_weights, local_worker=False)
    workers.sync_weights(None, {"timestep": 77})
    assert_all_equal([*damaged, *workers.foreach_worker(get_policy_weights, local_worker=False)])
    assert workers.foreach_worker(lambda w: w.global_vars["timestep"]) == [77] * 3
    algorithm.set_weights({"default_policy": get_policy_weights(algorithm.worker)})
    assert_all_equal(workers.foreach_worker(get_policy_weights))


def test_errors_of_functions_in_workers_are_raised_by_the_call(algorithm):
    with pytest.raises(UnknownPolicyError, match="missing"):
        algorithm.workers.foreach_worker(
            lambda w: w.set_weights({"missing": {}}), local_worker=False
        )
    assert algorithm.workers.healthy_worker_ids() == [1, 2]


def test_asynchronous_calls_are_answered_later(algorithm):
    workers = algorithm.workers
    assert workers.foreach_worker_async(lambda w: w.worker_index * 10) == 2
    assert sorted(workers.fetch_ready_async_reqs(timeout_seconds=None)) == [(1, 10), (2, 20)]
    assert workers.fetch_ready_async_reqs() == []
    assert workers.foreach_worker_async(lambda w: time.sleep(1.0), remote_worker_ids=[2]) == 1
    assert workers.fetch_ready_async_reqs(timeout_seconds=0) == []
    assert workers.fetch_ready_async_reqs(timeout_seconds=60.0) == [(2, None)]


def test_an_answer_stays_where_another_worker_raised(algorithm):
    workers = algorithm.workers
    workers.foreach_worker_async(lambda w: {1: "fine"}[w.worker_index])
    time.sleep(1.0)
    with pytest.raises(KeyError, match="2"):
        workers.fetch_ready_async_reqs(timeout_seconds=None)
    assert workers.fetch_ready_async_reqs(timeout_seconds=None) == [(1, "fine")]
    assert workers.healthy_worker_ids() == [1, 2]


def test_results_may_be_object_references(algorithm):
    result = algorithm.workers.foreach_worker(
        lambda w: w.worker_index, healthy_only=True, return_obj_refs=True
    )
    assert result[0] == 0
    assert ray.get(result[1:]) == [1, 2]


def test_weights_may_go_to_some_workers_first(algorithm):
    workers = algorithm.workers
    damage_weights(algorithm.worker)
    workers.sync_weights(to_worker_indices=[2])
    local, first, second = workers.foreach_worker(get_policy_weights)
    assert_all_equal([local, second])
    assert not np.array_equal(*(next(iter(each.values())) for each in (local, first)))
    workers.sync_weights()
    assert_all_equal(workers.foreach_worker(get_policy_weights))


@pytest.mark.soak
def test_a_killed_worker_is_recreated_and_the_run_continues(algorithm, caplog):
    algorithm.train()
    steps = algorithm.counters["num_env_steps_sampled"]
    victim = algorithm.workers.foreach_worker(lambda w: os.getpid(), local_worker=False)[0]
    os.kill(victim, signal.SIGKILL)
    actual, deadline = [], time.monotonic() + 300
    while len(actual) < 2 or actual[-1]["num_healthy_workers"] < 2:
        actual.append(algorithm.train())
        assert time.monotonic() < deadline
    assert "Remote worker 1 failed: its process died" in caplog.text
    last = actual[-1]
    assert last["num_remote_worker_restarts"] == 1
    assert algorithm.noted == [([1], False)]
    sampled = sum(result["num_env_steps_sampled_this_iter"] for result in actual)
    assert last["num_env_steps_sampled"] == steps + sampled
    last = algorithm.train()
    assert_all_equal(algorithm.workers.foreach_worker(get_policy_weights))
    filters = algorithm.workers.foreach_worker(get_filter_state)
    assert_all_equal(filters)
    assert filters[0]["frozen/0/count"] <= last["num_env_steps_sampled"] + 40
    recreated = algorithm.workers.foreach_worker(lambda w: w.recreated_worker)
    assert recreated == [False, True, False]


def test_checkpoints_are_restored_with_another_number_of_workers(algorithm, tmp_path):
    algorithm.train()
    saved = algorithm.save(tmp_path / "two")
    kind, steps = type(algorithm), algorithm.counters["num_env_steps_sampled"]
    settings = {"callbacks": Noting, "env": SeededEnv}
    for count in (0, 1):
        other = kind.from_checkpoint(
            saved, config={**settings, "num_rollout_workers": count, "rollout_fragment_length": 40}
        )
        assert_all_equal(
            [
                get_policy_weights(algorithm.worker),
                *other.workers.foreach_worker(get_policy_weights),
            ]
        )
        assert_all_equal(
            [get_filter_state(algorithm.worker), *other.workers.foreach_worker(get_filter_state)]
        )
        result = other.train()
        assert result["num_env_steps_sampled"] == steps + 40
        assert result["training_iteration"] == algorithm.iteration + 1
        other.stop()


@pytest.mark.soak
def test_a_worker_that_dies_ends_a_run_that_does_not_tolerate_it():
    workers = make_filtered(1).build().workers
    (victim,) = workers.foreach_worker(lambda w: os.getpid(), local_worker=False)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"Remote worker 1 .*recreate_failed_workers=True"):
        workers.sample()
    workers.stop()
    workers.stop()


def test_without_ray_workers_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ray>=2.40'"):
        WorkerSet(config=make_filtered())


class Cut(CountingEnv):
    """Shows less than its space says."""

    def __init__(self, env_config):
        super().__init__()

    def step(self, action):
        obs, *rest = super().step(action)
        return obs[:2], *rest


def test_an_environment_is_checked_where_it_will_run():
    with pytest.raises(EnvError, match=r"has the shape \(2,\).*disable_env_checking"):
        make_filtered(workers=1).environment(Cut).build()


def test_added_workers_sample_as_the_others():
    other = make_filtered(workers=1).build()
    other.train()
    other.workers.add_workers(1)
    assert other.workers.healthy_worker_ids() == [1, 2]
    assert_all_equal(other.workers.foreach_worker(get_policy_weights))
    assert [batch.count for batch in other.workers.sample()] == [40, 40]
    assert other.train()["num_healthy_workers"] == 2
    other.stop()


def test_remote_workers_can_be_called_without_an_environment():
    sizes = {"observation_space": spaces.Box(-1.0, 1.0, (3,)), "action_space": spaces.Discrete(2)}
    other = make_filtered(workers=1).environment(None, **sizes).build()
    assert other.workers.foreach_worker(lambda w: w.worker_index) == [0, 1]
    assert_all_equal(other.workers.foreach_worker(get_policy_weights))
    other.stop()


def test_a_ported_vector_environment_steps_in_remote_workers():
    config = make_filtered().environment(CountingVectorEnv).rollouts(rollout_fragment_length=5)
    other = config.build()
    batches = other.workers.sample()
    assert [batch.count for batch in batches] == [15, 15]
    for batch in batches:
        numbers = batch["obs"][:, 0].reshape(3, 5)
        assert (numbers == [[0], [1], [2]]).all()
        steps = batch["obs"][batch["eps_id"] == batch["eps_id"][0]][:, 2]
        assert steps.tolist() == [0.0, 1.0, 2.0, 3.0]  # the first episode has four
    assert other.train()["num_env_steps_sampled"] == 60  # two rounds, for a batch of 40
    other.stop()


def fails_first(worker):
    worker.callbacks.calls = getattr(worker.callbacks, "calls", 0) + 1
    if worker.callbacks.calls == 1:
        raise ValueError("the first call fails")
    return worker.callbacks.calls


def test_a_sample_that_arrives_with_the_failure_of_an_earlier_call_counts(algorithm):
    remotes = algorithm.workers._remotes
    remotes._request_samples(fails_first, 2)
    time.sleep(2.0)  # both calls of both workers are done
    assert remotes.sample_ready(fails_first, 2) == [2, 2]
    assert algorithm.workers.healthy_worker_ids() == []
