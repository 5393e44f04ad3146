"""Event files: scalars that TensorBoard reads, also after a kill."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from helpers.processes import run_python
from helpers.rendering_envs import Painted
from helpers.workers import make_small_config
from tfpolicies import PGConfig
from tfpolicies.algorithms import run_logger
from tfpolicies.algorithms.recent_actions import RecentActions
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


# -- histograms, pictures, hyperparameters ----------------------------------------------------

READ_OTHERS = """
import json, sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PluginAccumulator,
)
from tensorboard.plugins.hparams import metadata
events = EventAccumulator(sys.argv[1]).Reload()
histograms = {
    tag: [[e.step, e.histogram_value.bucket_limit, e.histogram_value.bucket, e.histogram_value.sum]
          for e in events.Histograms(tag)] for tag in events.Tags()["histograms"]
}
images = {
    tag: [[e.step, e.width, e.height, e.encoded_image_string.decode("latin-1")]
          for e in events.Images(tag)] for tag in events.Tags()["images"]
}
events = PluginAccumulator(sys.argv[1]).Reload()
contents = events.PluginTagToContent(metadata.PLUGIN_NAME)
start = metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG])
hparams = {name: getattr(x, x.WhichOneof("kind")) for name, x in start.hparams.items()}
print(json.dumps([histograms, images, hparams]))
"""


def read_others(folder: Path) -> list:
    return json.loads(run_python(READ_OTHERS, folder).stdout.splitlines()[-1])


@pytest.mark.core
def test_tensorboard_reads_histograms_pictures_and_hyperparameters(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    values = {
        "actions/p": np.array([0, 2, 2, 3]),
        "actions/q": np.array([0.0, 1.0, math.nan, 3.0], np.float32),
        "actions/one": np.zeros(5, np.float32),
        "actions/none": np.array([math.inf]),
    }
    writer.write_histograms(64, values)
    writer.write_gif(128, "videos", b"GIF89a", 4, 3)
    writer.write_hyperparameters({"lr": 0.5, "algorithm": "PPO", "use_gae": True})
    writer.close()
    histograms, images, hparams = read_others(tmp_path)
    assert histograms["actions/p"] == [[64, [0.5, 1.5, 2.5, 3.5], [1, 0, 2, 1], 7]]
    ((step, limits, counts, total),) = histograms["actions/q"]
    assert (step, len(limits), limits[-1], sum(counts), total) == (64, 30, 3.0, 3, 4.0)
    assert (counts[0], counts[10], counts[29]) == (1, 1, 1)
    ((_, limits, counts, _),) = histograms["actions/one"]
    assert (limits[-1], counts[0], sum(counts)) == (1.0, 5, 5)
    assert "actions/none" not in histograms
    assert images == {"videos": [[128, 4, 3, "GIF89a"]]}
    assert hparams == {"lr": 0.5, "algorithm": "PPO", "use_gae": True}


def test_a_run_shows_actions_settings_and_videos(tmp_path: Path) -> None:
    config = make_small_config(Painted, PGConfig, gamma=0.5)
    config.build().learn(64, progress=False, run_dir=tmp_path, record_every=2)
    histograms, images, hparams = read_others(tmp_path / "events")
    ((step, _, counts, _),) = histograms["actions/default_policy"][:1]
    assert sum(counts) == step
    ((step, width, height, content),) = images["videos"]
    assert step >= 64
    assert content.startswith("GIF89a")
    assert max(width, height) == 320
    assert (hparams["algorithm"], hparams["gamma"], hparams["train_batch_size"]) == ("PG", 0.5, 32)
    assert hparams["model.fcnet_hiddens"] == "[4]"


def test_recent_actions_are_split_into_components_and_limited() -> None:
    actions = RecentActions()
    actions.add("p", {"actions": {"a": np.zeros((3, 2)), "b": np.ones(3, np.int64)}})
    actions.add("p", {"actions": {"a": np.ones((2, 2)), "b": np.ones(2, np.int64)}})
    actions.add("q", {"obs": np.zeros(3)})
    components = actions.get_components()
    assert {name: len(numbers) for name, numbers in components.items()} == {
        "actions/p/a/0": 5,
        "actions/p/a/1": 5,
        "actions/p/b": 5,
    }
    assert components["actions/p/a/1"].sum() == 2
    actions.add("q", {"actions": np.zeros((5000, 20), np.float32)})
    actions.add("text", {"actions": np.array(["a", "b"])})
    components = actions.get_components()
    assert [name for name in components if "/text" in name] == []
    many = [numbers for name, numbers in components.items() if name.startswith("actions/q/")]
    assert (len(many), max(map(len, many))) == (16, 1000)


def test_histograms_are_left_out_while_they_would_slow_training(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_logger, "_MAX_HISTOGRAM_TIME_SHARE", 1e-9)
    config = make_small_config("CartPole-v1", PGConfig)
    config.build().learn(96, progress=False, run_dir=tmp_path)
    histograms, *_ = read_others(tmp_path / "events")
    assert len(histograms["actions/default_policy"]) == 1
