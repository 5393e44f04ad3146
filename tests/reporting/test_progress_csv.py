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
from tfpolicies.reporting.tensorboard_events import get_event_scalars


def row(iteration: int, **extra: float) -> dict[str, float]:
    return {**dict.fromkeys(FIXED_COLUMNS, 0.5), "iteration": iteration, "env_steps": 64} | extra


def iterations(path: Path) -> list[float]:
    return [read["iteration"] for read in read_progress(path)]


def test_a_train_result_becomes_one_flat_row_in_a_fixed_order() -> None:
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
        "info": {
            "learner": {
                "p": {
                    "learner_stats": {
                        "kl": np.array(0.01),
                        "entropy": 0.6,
                        "grad": {"norm": 2.0},
                        "td_error": np.zeros(3),
                        "note": "text",
                    },
                    "num_grad_updates_lifetime": 6.5,
                }
            }
        },
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
    ]


def test_what_callbacks_count_reaches_the_csv_and_tensorboard(tmp_path: Path) -> None:
    result = {"training_iteration": 1, "num_env_steps_sampled": 64}
    one = make_progress_row({**result, "custom_metrics": {"coins_mean": 2.5}})
    ProgressCsv(tmp_path / "progress.csv").append(one)
    assert read_progress(tmp_path / "progress.csv")[0]["custom/coins_mean"] == 2.5
    assert get_event_scalars(one)["custom/coins_mean"] == 2.5


def test_a_result_without_its_counters_is_refused() -> None:
    with pytest.raises(UsageError, match="'num_env_steps_sampled', got None"):
        make_progress_row({"training_iteration": 1})


def test_further_numbers_about_episodes_have_columns_of_their_own() -> None:
    metrics = {"episode_reward_mean": 2.0, "episode_reward_std": 0.5, "episode_media": {"a": 1.0}}
    result = {"training_iteration": 1, "num_env_steps_sampled": 8, **metrics, "evaluation": metrics}
    actual = make_progress_row(result)
    assert {name: value for name, value in actual.items() if "/" in name} == {
        "episode/reward_std": 0.5,
        "evaluation/episode_reward_mean": 2.0,
        "evaluation/episode_reward_std": 0.5,
    }


def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    progress = ProgressCsv(path)
    written = [
        row(1, episode_reward_mean=math.nan, **{"learner/p/kl": 0.1}),
        row(2, time_s=1 / 3, **{"learner/p/kl": math.inf}),
    ]
    for each in written:
        progress.append(each)
        assert path.read_bytes().endswith(b"\n")
    read = read_progress(path)
    assert str(read) == str(written)  # NaN differs from itself
    assert isinstance(read[0]["iteration"], int)
    assert list(read[0]) == [*FIXED_COLUMNS, "learner/p/kl"]


def test_resuming_drops_the_rows_that_the_run_is_about_to_repeat(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    for iteration in (1, 2, 3, 4):
        ProgressCsv(path).append(row(iteration, time_s=1.0))
    resumed = ProgressCsv(path)
    resumed.drop_after(2)
    assert iterations(path) == [1, 2]
    resumed.append(row(3, time_s=2.0))
    assert [(r["iteration"], r["time_s"]) for r in read_progress(path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_a_repeated_iteration_takes_the_place_of_that_row_and_later_ones(tmp_path: Path) -> None:
    progress = ProgressCsv(tmp_path / "progress.csv")
    for iteration in (1, 2, 3, 2):
        progress.append(row(iteration))
    assert iterations(progress.path) == [1, 2]


def test_a_run_resumed_before_its_first_checkpoint_starts_an_empty_curve(tmp_path: Path) -> None:
    progress = ProgressCsv(tmp_path / "progress.csv")
    progress.append(row(1))
    progress.drop_after(0)
    assert read_progress(progress.path) == []


def test_a_new_column_widens_the_file_and_older_rows_have_nothing_there(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    progress = ProgressCsv(path)
    progress.append(row(1, **{"learner/p/kl": 0.25}))
    progress.append(row(2, **{"learner/p/kl": 0.5, "evaluation/episode_reward_mean": 9.0}))
    progress.append(row(3))
    header, *lines = path.read_text().splitlines()
    assert header.endswith(",episodes,evaluation/episode_reward_mean,learner/p/kl")
    assert [line.split(",")[-2:] for line in lines] == [["", "0.25"], ["9.0", "0.5"], ["", ""]]
    assert math.isnan(read_progress(path)[0]["evaluation/episode_reward_mean"])


def test_a_line_cut_by_a_kill_is_not_read_and_is_gone_after_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    ProgressCsv(path).append(row(1))
    with path.open("a") as file:
        file.write("2,64,0.")
    assert iterations(path) == [1]
    ProgressCsv(path).append(row(2))
    assert iterations(path) == [1, 2]
    assert len(path.read_text().splitlines()) == 3


def test_every_cut_of_the_last_line_leaves_the_rows_before_it(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    ProgressCsv(path).append(row(1))
    whole = path.read_bytes()
    ProgressCsv(path).append(row(2))
    content = path.read_bytes()
    for length in range(len(whole), len(content)):
        path.write_bytes(content[:length])
        assert iterations(path) == [1]


def test_a_wrong_row_is_refused_and_the_file_is_as_before(tmp_path: Path) -> None:
    progress = ProgressCsv(tmp_path / "progress.csv")
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
def test_a_foreign_file_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "progress.csv"
    path.write_text(content)
    with pytest.raises(CheckpointError, match="is not a progress file"):
        ProgressCsv(path).append(row(1))
    assert path.read_text() == content


def test_a_damaged_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "progress.csv"
    for iteration in (1, 2):
        ProgressCsv(path).append(row(iteration))
    path.write_text(path.read_text().replace("\n1,64,", "\n1,sixty-four,"))
    with pytest.raises(CheckpointError, match=r"Line 2 of '.*progress\.csv' is damaged"):
        read_progress(path)


def test_reading_a_missing_file_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"`progress\.csv` of a run folder"):
        read_progress(tmp_path / "none.csv")


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
def test_a_writer_killed_at_any_moment_leaves_a_curve_without_gaps_or_doubles(
    tmp_path: Path,
) -> None:
    path = tmp_path / "progress.csv"
    moments, last = random.Random(7), 0
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
