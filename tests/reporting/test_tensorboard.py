"""Event files: scalars that TensorBoard reads, also after a kill."""

import json
import math
from pathlib import Path

import pytest

from helpers.processes import run_python
from tfpolicies.errors import UsageError
from tfpolicies.reporting.progress_row import FIXED_COLUMNS
from tfpolicies.reporting.tensorboard_events import EventWriter, get_event_scalars

WRITE_AND_LIST = """
import sys
from tfpolicies.reporting.tensorboard_events import EventWriter
writer = EventWriter(sys.argv[1])
writer.write_scalars(64, {"episodes/reward_mean": 9.5})
writer.close()
print(sorted(name for name in sys.modules if name in ("tensorflow", "keras", "torch")))
"""

# In a new process, where tensorboard's readers do without TensorFlow.
READ = """
import json, sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PluginAccumulator,
)
from tensorboard.util import tensor_util
events = EventAccumulator(sys.argv[1]).Reload()
plain = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
events = PluginAccumulator(sys.argv[1]); events.Reload()
number = lambda event: float(tensor_util.make_ndarray(event.tensor_proto))
tensors = {
    tag: [(e.step, number(e)) for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]
}
print(json.dumps([plain, tensors]))
"""


def read(folder: Path) -> dict[str, list[list[float]]]:
    plain, tensors = json.loads(run_python(READ, folder).stdout.splitlines()[-1])
    assert plain == tensors
    return plain


@pytest.mark.core
def test_writing_does_not_import_tensorflow(tmp_path: Path) -> None:
    process = run_python(WRITE_AND_LIST, tmp_path)
    assert (process.stdout, process.stderr) == ("[]\n", "")


@pytest.mark.core
def test_tensorboard_reads_a_killed_and_resumed_run_as_one_curve(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    first = EventWriter(folder)
    for step in (64, 128, 192):
        first.write_scalars(step, {"episodes/reward_mean": step / 2, "learner/p/kl": 0.25})
    first.close()
    cut = first.path.read_bytes()[:-5]  # killed within the last record
    first.path.write_bytes(cut)
    second = EventWriter(folder, resume_step=64)
    second.write_scalars(128, {"episodes/reward_mean": 1.0})
    second.write_scalars(192, {"episodes/reward_mean": 2.0})
    second.close()
    assert second.path.name > first.path.name
    assert read(folder) == {
        "episodes/reward_mean": [[64, 32.0], [128, 1.0], [192, 2.0]],
        "learner/p/kl": [[64, 0.25]],
    }


def test_every_record_is_on_disk_before_the_writer_is_closed(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    writer = EventWriter(tmp_path)
    before = writer.path.stat().st_size
    writer.write_scalars(64, {"speed/env_steps_per_s": 1000.0}, wall_time=5.0)
    record = writer.path.read_bytes()[before:]
    writer.close()
    event = Event.FromString(record[12:-4])  # length and its checksum before, checksum after
    assert (event.step, event.wall_time) == (64, 5.0)
    assert [(value.tag, value.simple_value) for value in event.summary.value] == [
        ("speed/env_steps_per_s", 1000.0)
    ]


@pytest.mark.core
def test_tags_are_grouped_and_means_over_no_episode_are_left_out() -> None:
    numbers = {"iteration": 1, "env_steps": 64, "time_s": 0.5, "steps_per_s": 128.0, "episodes": 0}
    further = {"custom/coins_mean": 2.5, "evaluation/episode_reward_mean": 9.0}
    row = {**dict.fromkeys(FIXED_COLUMNS, math.nan), **numbers, **further}
    row["learner/default_policy/kl"] = math.nan
    scalars = get_event_scalars(row)
    assert str(scalars.pop("learner/default_policy/kl")) == "nan"
    assert scalars == {
        "speed/env_steps_per_s": 128.0,
        "episodes/total": 0,
        "custom/coins_mean": 2.5,
        "evaluation/reward_mean": 9.0,
    }
    assert get_event_scalars(row | {"episode_reward_mean": 21.5})["episodes/reward_mean"] == 21.5


def test_wrong_values_and_a_closed_writer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`resume_step` must be a count .* got -1"):
        EventWriter(tmp_path / "events", resume_step=-1)
    assert not (tmp_path / "events").exists()
    writer = EventWriter(tmp_path)
    size = writer.path.stat().st_size
    with pytest.raises(UsageError, match=r"`step` must be a count .* got 1\.5"):
        writer.write_scalars(1.5, {})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="single numbers, got 'a': 'text'"):
        writer.write_scalars(1, {"a": "text"})  # type: ignore[dict-item]
    assert writer.path.stat().st_size == size
    writer.close()
    writer.close()
    with pytest.raises(UsageError, match="after `close`"):
        writer.write_scalars(1, {"a": 1.0})
