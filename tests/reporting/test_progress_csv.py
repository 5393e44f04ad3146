"""Rows of progress: made of results, written to CSV, read back, repaired."""

import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tfpolicies.errors import CheckpointError, UsageError
from tfpolicies.reporting.progress_csv import ProgressCsv, read_progress
from tfpolicies.reporting.progress_row import FIXED_COLUMNS, make_progress_row


def row(iteration: int, **extra: float) -> dict[str, float]:
    return {**dict.fromkeys(FIXED_COLUMNS, 0.5), "iteration": iteration, "env_steps": 64} | extra


@pytest.fixture
def progress(tmp_path: Path) -> ProgressCsv:
    """An empty file of rows."""
    return ProgressCsv(tmp_path / "progress.csv")


def iterations(path: Path) -> list[float]:
    return [read["iteration"] for read in read_progress(path)]


def test_a_train_result_becomes_one_flat_row_in_a_fixed_order() -> None:
    stats = {"kl": np.array(0.01), "entropy": 0.6, "grad": {"norm": 2.0}}
    stats |= {"td_error": np.zeros(3), "note": "text"}
    result = {
        "training_iteration": 3,
        "num_env_steps_sampled": 6144,
        "num_env_steps_sampled_throughput_per_sec": 4096.0,
        "time_total_s": 1.75,
        "episode_reward_mean": np.float32(21.5),
        "episode_reward_min": 9.0,
        "episode_reward_max": 60.0,
        "episode_len_mean": 21.5,
        "episodes_total": 280,
        "recent_returns": {"mean": 23.0, "episodes": 7},
        "custom_metrics": {"coins_mean": 2.5, "coins": [2.0, 3.0]},
        "evaluation": {"episode_reward_mean": 30.0, "custom_metrics": {"coins_mean": 4}},
        "info": {"learner": {"p": {"learner_stats": stats, "num_grad_updates_lifetime": 6.5}}},
        "timers": {"sample_time_ms": 800.0, "learn_time_ms": 150.0},
        "sampler_perf": {"mean_inference_ms": 1.0, "mean_env_wait_ms": 1.0},
    }
    assert list(make_progress_row(result).items()) == [
        ("iteration", 3),
        ("env_steps", 6144),
        ("time_s", 1.75),
        ("steps_per_s", 4096.0),
        ("episode_reward_mean", 21.5),
        ("episode_reward_min", 9.0),
        ("episode_reward_max", 60.0),
        ("episode_len_mean", 21.5),
        ("episodes", 280),
        ("custom/coins_mean", 2.5),
        ("evaluation/custom/coins_mean", 4),
        ("evaluation/episode_reward_mean", 30.0),
        ("learner/p/entropy", 0.6),
        ("learner/p/grad/norm", 2.0),
        ("learner/p/kl", 0.01),
        ("recent_returns/episodes", 7),
        ("recent_returns/mean", 23.0),
        ("time/env_s", 0.4),
        ("time/learn_s", 0.15),
        ("time/sample_s", 0.8),
    ]


def test_further_numbers_about_episodes_have_columns_and_counters_are_required() -> None:
    with pytest.raises(UsageError, match="'num_env_steps_sampled', got None"):
        make_progress_row({"training_iteration": 1})
    metrics = {"episode_reward_mean": 2.0, "episode_reward_std": 0.5, "episode_media": {"a": 1.0}}
    result = {"training_iteration": 1, "num_env_steps_sampled": 8, **metrics, "evaluation": metrics}
    actual = make_progress_row(result)
    assert {name: value for name, value in actual.items() if "/" in name} == {
        "episode/reward_std": 0.5,
        "evaluation/episode_reward_mean": 2.0,
        "evaluation/episode_reward_std": 0.5,
    }


def test_rows_are_read_back_as_they_were_written(progress: ProgressCsv) -> None:
    rows = [
        row(1, episode_reward_mean=math.nan, **{"learner/p/kl": 0.1}),
        row(2, time_s=1 / 3, **{"learner/p/kl": math.inf}),
    ]
    for values in rows:
        progress.append(values)
        assert progress.path.read_bytes().endswith(b"\n")
    result = read_progress(progress.path)
    assert str(result) == str(rows)  # NaN differs from itself
    assert isinstance(result[0]["iteration"], int)
    assert list(result[0]) == [*FIXED_COLUMNS, "learner/p/kl"]


def test_resuming_drops_the_rows_that_the_run_is_about_to_repeat(progress: ProgressCsv) -> None:
    for iteration in (1, 2, 3, 4):
        ProgressCsv(progress.path).append(row(iteration, time_s=1.0))
    resumed = ProgressCsv(progress.path)
    resumed.drop_after(2)
    assert iterations(resumed.path) == [1, 2]
    for iteration, seconds in ((3, 2.0), (4, 2.0), (3, 3.0)):  # the last takes two places
        resumed.append(row(iteration, time_s=seconds))
    rows = read_progress(resumed.path)
    assert [(x["iteration"], x["time_s"]) for x in rows] == [(1, 1.0), (2, 1.0), (3, 3.0)]
    resumed.drop_after(0)
    assert read_progress(resumed.path) == []


def test_a_new_column_widens_the_file_and_is_empty_in_older_rows(progress: ProgressCsv) -> None:
    progress.append(row(1, **{"learner/p/kl": 0.25}))
    progress.append(row(2, **{"learner/p/kl": 0.5, "evaluation/episode_reward_mean": 9.0}))
    progress.append(row(3))
    header, *lines = progress.path.read_text().splitlines()
    assert header.endswith(",episodes,evaluation/episode_reward_mean,learner/p/kl")
    assert [line.split(",")[-2:] for line in lines] == [["", "0.25"], ["9.0", "0.5"], ["", ""]]
    assert math.isnan(read_progress(progress.path)[0]["evaluation/episode_reward_mean"])


def test_a_line_cut_by_a_kill_is_ignored_and_then_replaced(progress: ProgressCsv) -> None:
    path = progress.path
    progress.append(row(1))
    whole = path.read_bytes()
    progress.append(row(2))
    content = path.read_bytes()
    for length in range(len(whole), len(content)):
        path.write_bytes(content[:length])
        assert iterations(path) == [1]
    ProgressCsv(path).append(row(2))
    assert iterations(path) == [1, 2]
    assert len(path.read_text().splitlines()) == 3


def test_a_wrong_row_is_refused_and_the_file_is_as_before(progress: ProgressCsv) -> None:
    progress.append(row(1))
    before = progress.path.read_bytes()
    with pytest.raises(UsageError, match=r"lacks \['episodes'\]"):
        progress.append({k: v for k, v in row(2).items() if k != "episodes"})
    with pytest.raises(UsageError, match=r"got \{'learner/p/td': "):
        progress.append(row(2) | {"learner/p/td": np.zeros(2)})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"`row\['iteration'\]` must be a count, got nan"):
        progress.append(row(2) | {"iteration": math.nan})
    assert progress.path.read_bytes() == before


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "no table"])
def test_a_foreign_file_is_refused_and_kept(progress: ProgressCsv, content: str) -> None:
    progress.path.write_text(content)
    with pytest.raises(CheckpointError, match="is not a progress file"):
        progress.append(row(1))
    assert progress.path.read_text() == content


def test_a_damaged_line_is_named_by_its_number_and_a_missing_file(progress: ProgressCsv) -> None:
    with pytest.raises(FileNotFoundError, match=r"`progress\.csv` of a run folder"):
        read_progress(progress.path)
    for iteration in (1, 2):
        progress.append(row(iteration))
    progress.path.write_text(progress.path.read_text().replace("\n1,64,", "\n1,sixty-four,"))
    with pytest.raises(CheckpointError, match=r"Line 2 of '.*progress\.csv' is damaged"):
        read_progress(progress.path)


WRITE_FOREVER = """
import sys
from tfpolicies.reporting.progress_csv import ProgressCsv
from tfpolicies.reporting.progress_row import FIXED_COLUMNS
start, path = int(sys.argv[1]), sys.argv[2]
progress = ProgressCsv(path)
progress.drop_after(start)
print("ready", flush=True)
for iteration in range(start + 1, start + 1_000_000):
    extra = {f"learner/p/{iteration // 50}": 1.0}  # now and then a new column
    progress.append({**dict.fromkeys(FIXED_COLUMNS, 0.5), "iteration": iteration, **extra})
"""


@pytest.mark.soak
def test_a_writer_killed_at_any_moment_leaves_a_whole_curve(progress: ProgressCsv) -> None:
    moments, last, path = random.Random(7), 0, progress.path
    for _ in range(8):
        command = [sys.executable, "-c", WRITE_FOREVER, str(last), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            for _ in range(6000):
                if path.exists() and len(iterations(path)) > last + 5:
                    break
                time.sleep(0.01)
            time.sleep(moments.uniform(0.0, 0.05))
            writer.send_signal(signal.SIGKILL)
        result = iterations(path)
        assert result == list(range(1, len(result) + 1))
        last = max(0, len(result) - 3)  # the newest checkpoint is a little older
    assert last > 10
