"""Worker sets with workers in a real Ray cluster: what all of them know, and what is counted."""

import os
import signal
import time

import numpy as np
import pytest
import ray
from gymnasium import spaces

import tfpolicies.compat  # noqa: F401
from compat.test_vector_env import Counting
from helpers.environments import CountingEnv, SeededEnv
from tfpolicies import DefaultCallbacks, PPOConfig
from tfpolicies.distributed.worker_set import WorkerSet
from tfpolicies.errors import ConfigError, EnvError, UnknownPolicyError, WorkerError

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Noting(DefaultCallbacks):
    def on_workers_recreated(self, *, algorithm, worker_set, worker_ids, is_evaluation):
        algorithm.noted = [*getattr(algorithm, "noted", []), (worker_ids, is_evaluation)]


def config(workers=2, **fault_tolerance):
    settings = {"delay_between_worker_restarts_s": 0.0, **fault_tolerance}
    return (
        PPOConfig()
        .environment(SeededEnv)
        .framework("tf2", inference="tf", jit_compile=False)
        .training(
            model={"fcnet_hiddens": [4]},
            train_batch_size=40,
            sgd_minibatch_size=40,
            num_sgd_iter=1,
        )
        .rollouts(
            num_rollout_workers=workers,
            rollout_fragment_length=40 // workers,
            observation_filter="MeanStdFilter",
        )
        .fault_tolerance(**settings)
        .resources(num_cpus_per_worker=0)
        .debugging(seed=1)
        .callbacks(Noting)
    )


def weights_of(worker):
    return worker.get_weights()["default_policy"]


def filter_of(worker):
    return worker.filters["default_policy"].get_state()


def process_of(worker):
    return os.getpid()


def damage(worker):
    weights = worker.get_weights()["default_policy"]
    worker.set_weights({"default_policy": {k: x + 1 for k, x in weights.items()}})


def all_equal(result):
    for other in result[1:]:
        assert other.keys() == result[0].keys()
        for key in other:
            np.testing.assert_array_equal(other[key], result[0][key], err_msg=key)


@pytest.fixture(scope="module")
def algorithm(ray_cluster):
    built = config(recreate_failed_workers=True).build()
    yield built
    built.stop()


def test_weights_and_filters_are_equal_on_all_workers_after_an_iteration(algorithm):
    before = algorithm.counters["num_env_steps_sampled"]
    for _ in range(2):
        result = algorithm.train()
    workers = algorithm.workers
    assert result["num_healthy_workers"] == workers.num_remote_workers() == 2
    assert result["num_env_steps_sampled"] == before + 80
    assert workers.local_worker().environments is None
    all_equal(workers.foreach_worker(weights_of))
    filters = workers.foreach_worker(filter_of)
    all_equal(filters)
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
    workers.foreach_worker(damage, local_worker=False)
    damaged = workers.foreach_worker(weights_of, local_worker=False)
    workers.sync_weights(None, {"timestep": 77})
    all_equal([*damaged, *workers.foreach_worker(weights_of, local_worker=False)])
    assert workers.foreach_worker(lambda w: w.global_vars["timestep"]) == [77] * 3
    algorithm.set_weights({"default_policy": weights_of(algorithm.worker)})
    all_equal(workers.foreach_worker(weights_of))


def test_what_a_function_raises_in_a_worker_is_raised_here(algorithm):
    with pytest.raises(UnknownPolicyError, match="nobody"):
        algorithm.workers.foreach_worker(
            lambda w: w.set_weights({"nobody": {}}), local_worker=False
        )
    assert algorithm.workers.healthy_worker_ids() == [1, 2]


def test_calls_that_nobody_waits_for_are_answered_later(algorithm):
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


def test_results_stay_where_they_are_until_they_are_got(algorithm):
    result = algorithm.workers.foreach_worker(
        lambda w: w.worker_index, healthy_only=True, return_obj_refs=True
    )
    assert result[0] == 0
    assert ray.get(result[1:]) == [1, 2]


def test_weights_may_go_to_some_workers_first(algorithm):
    workers = algorithm.workers
    damage(algorithm.worker)
    workers.sync_weights(to_worker_indices=[2])
    here, first, second = workers.foreach_worker(weights_of)
    all_equal([here, second])
    assert not np.array_equal(*(next(iter(each.values())) for each in (here, first)))
    workers.sync_weights()
    all_equal(workers.foreach_worker(weights_of))


@pytest.mark.soak
def test_a_killed_worker_is_made_anew_and_the_run_goes_on(algorithm, caplog):
    algorithm.train()
    steps = algorithm.counters["num_env_steps_sampled"]
    victim = algorithm.workers.foreach_worker(process_of, local_worker=False)[0]
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
    all_equal(algorithm.workers.foreach_worker(weights_of))
    filters = algorithm.workers.foreach_worker(filter_of)
    all_equal(filters)
    assert filters[0]["frozen/0/count"] <= last["num_env_steps_sampled"] + 40
    again = algorithm.workers.foreach_worker(lambda w: w.recreated_worker)
    assert again == [False, True, False]


def test_checkpoints_are_restored_with_another_number_of_workers(algorithm, tmp_path):
    algorithm.train()
    saved = algorithm.save(tmp_path / "two")
    kind, steps = type(algorithm), algorithm.counters["num_env_steps_sampled"]
    settings = {"callbacks": Noting, "env": SeededEnv}
    for count in (0, 1):
        other = kind.from_checkpoint(
            saved, config={**settings, "num_rollout_workers": count, "rollout_fragment_length": 40}
        )
        all_equal([weights_of(algorithm.worker), *other.workers.foreach_worker(weights_of)])
        all_equal([filter_of(algorithm.worker), *other.workers.foreach_worker(filter_of)])
        result = other.train()
        assert result["num_env_steps_sampled"] == steps + 40
        assert result["training_iteration"] == algorithm.iteration + 1
        other.stop()


@pytest.mark.soak
def test_a_worker_that_dies_ends_a_run_that_does_not_tolerate_it():
    workers = config(1).build().workers
    os.kill(workers.foreach_worker(process_of, local_worker=False)[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"Remote worker 1 .*recreate_failed_workers=True"):
        workers.sample()
    workers.stop()
    workers.stop()


def test_without_ray_workers_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ray>=2.40'"):
        WorkerSet(config=config())


class Cut(CountingEnv):
    """Shows less than its space says."""

    def __init__(self, env_config):
        super().__init__()

    def step(self, action):
        obs, *rest = super().step(action)
        return obs[:2], *rest


def test_an_environment_is_checked_where_it_will_run():
    with pytest.raises(EnvError, match=r"has the shape \(2,\).*disable_env_checking"):
        config(workers=1).environment(Cut).build()


def test_workers_that_are_added_do_as_the_others():
    built = config(workers=1).build()
    built.train()
    built.workers.add_workers(1)
    assert built.workers.healthy_worker_ids() == [1, 2]
    all_equal(built.workers.foreach_worker(weights_of))
    assert [batch.count for batch in built.workers.sample()] == [40, 40]
    assert built.train()["num_healthy_workers"] == 2
    built.stop()


def test_remote_workers_need_no_environment_to_be_called():
    sizes = {"observation_space": spaces.Box(-1.0, 1.0, (3,)), "action_space": spaces.Discrete(2)}
    built = config(workers=1).environment(None, **sizes).build()
    assert built.workers.foreach_worker(lambda w: w.worker_index) == [0, 1]
    all_equal(built.workers.foreach_worker(weights_of))
    built.stop()


def test_a_ported_vector_environment_steps_in_remote_workers():
    built = config().environment(Counting).rollouts(rollout_fragment_length=5).build()
    batches = built.workers.sample()
    assert [batch.count for batch in batches] == [15, 15]
    for batch in batches:
        numbers = batch["obs"][:, 0].reshape(3, 5)
        assert (numbers == [[0], [1], [2]]).all()
        steps = batch["obs"][batch["eps_id"] == batch["eps_id"][0]][:, 2]
        assert steps.tolist() == [0.0, 1.0, 2.0, 3.0]  # the first episode has four
    assert built.train()["num_env_steps_sampled"] == 60  # two rounds, for a batch of 40
    built.stop()


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
