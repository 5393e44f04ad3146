"""TensorBoard event files, written without TensorFlow.

The writer of the tensorboard package opens files through TensorFlow's file system and so imports
TensorFlow; here its `RecordWriter` writes to a plain file.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from tfpolicies.errors import UsageError
from tfpolicies.reporting.progress_row import select_known_numbers, to_number

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

_NUM_BINS = 30  # of a histogram
_TAGS = {
    "steps_per_s": "speed/env_steps_per_s",
    "episode_reward_mean": "episodes/reward_mean",
    "episode_reward_min": "episodes/reward_min",
    "episode_reward_max": "episodes/reward_max",
    "episode_len_mean": "episodes/len_mean",
    "episodes": "episodes/total",
}


def get_event_scalars(row: Mapping[str, float]) -> dict[str, float]:
    """Returns the TensorBoard scalars of a progress row, by tag.

    Tags are grouped by their first part: `custom/`, `episodes/`, `evaluation/`,
    `learner/<policy id>/`, `speed/`. Means over no episode (NaN) are left out; a NaN of the
    learner is shown.

    >>> get_event_scalars({"iteration": 1, "env_steps": 64, "episode_len_mean": 9.5})
    {'episodes/len_mean': 9.5}
    """
    fixed = {tag: row[name] for name, tag in _TAGS.items() if name in row}
    grouped_columns = {
        name.replace("evaluation/episode_", "evaluation/"): value
        for name, value in row.items()
        if "/" in name
    }
    return select_known_numbers({**fixed, **grouped_columns})


class EventWriter:
    """Writes scalars to one new event file; each call flushes to the operating system.

    Every start of a run writes a new file, named so that readers take them in order. Its first
    event makes TensorBoard discard values that earlier files have after the resumed step, so that
    no curve has duplicates. A record cut off by a kill only ends the reading of its file.

    Args:
        folder: the folder for the event files; created if missing.
        resume_step: environment steps at the checkpoint that the run resumes from; 0 for a new run.

    Raises:
        UsageError: if `resume_step` is not a count.
    """

    def __init__(self, folder: str | PathLike[str], *, resume_step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        _check_count("resume_step", resume_step)
        self._event = Event
        self._file = _create_event_file(Path(folder))
        self.path = Path(self._file.name)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        restart = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=resume_step + 1, session_log=restart))

    def write_scalars(
        self, step: int, scalars: Mapping[str, float], *, wall_time: float | None = None
    ) -> None:
        """Writes the values of one step.

        Args:
            step: environment steps so far, the x axis.
            scalars: values by tag, stored as float32; see `get_event_scalars`.
            wall_time: seconds since 1970; now if None.
        """
        _check_count("step", step)
        if self._file.closed:
            raise UsageError("`write_scalars` was called after `close`. Open a new `EventWriter`.")
        event = self._event(wall_time=time.time() if wall_time is None else wall_time, step=step)
        for tag, value in scalars.items():
            number = to_number(value)
            if number is None:
                raise UsageError(f"`scalars` must hold single numbers, got {tag!r}: {value!r}.")
            event.summary.value.add(tag=tag, simple_value=number)
        self._write(event)

    def write_histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Writes histograms.

        Args:
            step: environment steps so far.
            values: numbers `[n]` by tag; those that are not finite are left out. Integers get a bar
                for each number, if there are few.
        """
        event = self._event(wall_time=time.time(), step=step)
        for tag, numbers in values.items():
            finite = numbers[np.isfinite(numbers)]
            if len(finite):
                _fill_histogram(event.summary.value.add(tag=tag).histo, finite)
        self._write(event)

    def write_gif(self, step: int, tag: str, content: bytes, width: int, height: int) -> None:
        """Writes a GIF, which TensorBoard plays among its images."""
        event = self._event(wall_time=time.time(), step=step)
        image = event.summary.value.add(tag=tag).image
        image.width, image.height, image.colorspace = width, height, 3
        image.encoded_image_string = content
        self._write(event)

    def write_hyperparameters(self, settings: Mapping[str, str | float | bool]) -> None:
        """Writes the settings of the run, by which TensorBoard's table of runs compares them."""
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        data = HParamsPluginData()
        data.session_start_info.start_time_secs = time.time()
        for name, value in settings.items():
            item = data.session_start_info.hparams[name]
            if isinstance(value, bool):
                item.bool_value = value
            elif isinstance(value, str):
                item.string_value = value
            else:
                item.number_value = value
        event = self._event(wall_time=time.time())
        event.summary.value.add(
            tag=metadata.SESSION_START_INFO_TAG,
            metadata=metadata.create_summary_metadata(data),
            tensor=metadata.NULL_TENSOR,
        )
        self._write(event)

    def close(self) -> None:
        """Closes the file; may be called again."""
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _fill_histogram(histogram: HistogramProto, numbers: np.ndarray) -> None:
    """Fills a histogram with finite numbers `[n]`, n > 0."""
    is_integer = numbers.dtype.kind in "iu"
    low, high = float(numbers.min()), float(numbers.max())
    if is_integer and high - low < _NUM_BINS:
        edges = np.arange(low - 0.5, high + 1.0)
    else:
        edges = np.linspace(low, high if high > low else low + 1.0, _NUM_BINS + 1)
    counts, edges = np.histogram(numbers, edges)
    histogram.min, histogram.max = edges[0], edges[-1]
    histogram.num = len(numbers)
    histogram.sum = float(numbers.sum(dtype=np.float64))
    histogram.sum_squares = float(np.square(numbers, dtype=np.float64).sum())
    histogram.bucket_limit.extend(edges[1:].tolist())
    histogram.bucket.extend(counts.tolist())


def _check_count(name: str, value: int) -> None:
    number = to_number(value)
    if not isinstance(number, int) or number < 0:
        raise UsageError(f"`{name}` must be a count of environment steps, >= 0, got {value!r}.")


def _create_event_file(folder: Path) -> BinaryIO:
    """Creates the next file of the folder; names contain the time and sort by creation."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "events.out.tfevents."
    suffixes = [path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*")]
    newest = max((int(name) for name in suffixes if name.isdecimal()), default=0)
    return (folder / f"{prefix}{max(int(time.time()), newest + 1):010d}").open("xb")
