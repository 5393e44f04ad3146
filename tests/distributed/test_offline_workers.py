"""Workers in a real Ray cluster read disjoint shares of recorded experience, exactly."""

import os
import signal
import time
from collections import Counter

import numpy as np
import pytest
from gymnasium import spaces

from helpers.workers import make_config
from tfpolicies import BCConfig, MARWILConfig
from tfpolicies.offline.parquet_writer import write_table

pytestmark = pytest.mark.usefixtures("ray_cluster")

ROWS = 1200
SPACES = {
    "observation_space": spaces.Box(-1e6, 1e6, (1,), np.float32),
    "action_space": spaces.Discrete(2),
}


@pytest.fixture
def path(tmp_path):
    """Eight files of 150 rows, whose observations are the numbers of the rows."""
    for i in range(8):
        numbers = np.arange(150 * i, 150 * (i + 1))
        columns = {
            "obs": numbers.astype(np.float32)[:, None],
            "actions": numbers % 2,
            "rewards": np.ones(150, np.float32),
            "terminateds": numbers % 10 == 9,
            "eps_id": numbers // 10,
        }
        write_table(tmp_path / f"{i}.parquet", columns, None)
    return tmp_path


def build(path, config_class=BCConfig, **settings):
    settings = {"train_batch_size": 100, "num_rollout_workers": 2, **settings}
    settings |= {"input_": str(path), "shuffle_buffer_size": 4, **SPACES}
    config = make_config(None, config_class, **settings)
    config.fault_tolerance(recreate_failed_workers=True, delay_between_worker_restarts_s=0.0)
    return config.build()


def collect(algorithm, rounds):
    batches = [batch for _ in range(rounds) for batch in algorithm.workers.sample()]
    return [batch["obs"][:, 0].astype(int).tolist() for batch in batches]


def test_each_row_is_read_once_per_epoch_although_a_worker_is_killed(path):
    algorithm = build(path)
    rows = collect(algorithm, 4)
    victim = algorithm.workers.foreach_worker(lambda w: os.getpid(), local_worker=False)[0]
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 240
    streams = {}
    while True:
        rows += collect(algorithm, 1)
        streams = {0: [], 1: []}
        for batch in rows:
            streams[batch[0] // 150 % 2] += batch  # each worker reads every other file
        if min(map(len, streams.values())) >= 3 * ROWS // 2:
            break
        assert time.monotonic() < deadline
    assert algorithm.workers.num_remote_worker_restarts() == 1
    algorithm.stop()
    assert set(streams[0]).isdisjoint(streams[1])
    for stream in streams.values():
        for epoch in range(3):
            part = stream[epoch * ROWS // 2 : (epoch + 1) * ROWS // 2]
            assert set(Counter(part).values()) == {1}
            assert len(part) == ROWS // 2


def test_a_restored_run_goes_on_where_the_workers_were(path, tmp_path):
    first = build(path, MARWILConfig)
    for _ in range(3):
        first.train()
    checkpoint = first.save(tmp_path / "checkpoint").checkpoint.path
    expected = collect(first, 5)
    first.stop()
    second = build(path, MARWILConfig)
    second.restore(checkpoint)
    assert collect(second, 5) == expected
    second.stop()


def test_another_number_of_workers_reads_from_the_start(path, tmp_path):
    first = build(path)
    first.train()
    checkpoint = first.save(tmp_path / "checkpoint").checkpoint.path
    first.stop()
    second = build(path, num_rollout_workers=1)
    second.restore(checkpoint)
    rows = [row for batch in collect(second, ROWS // 100) for row in batch]
    second.stop()
    assert sorted(rows) == list(range(ROWS))
