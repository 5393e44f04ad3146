"""The types of readers and writers of experience, which users may implement themselves."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.errors import ConfigError

InputFunction = Callable[["IOContext"], "ExperienceReader"]
OutputFunction = Callable[["IOContext"], "ExperienceWriter"]


class IOContext:
    """Context that functions which make a reader or writer get.

    Args:
        log_dir: the folder of the run; None without one.
        config: the worker's config.
        worker_index: 0 for the worker of this process.
        worker: the worker.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        config: Any = None,
        worker_index: int = 0,
        worker: Any = None,
    ) -> None:
        self.log_dir = log_dir
        self.config = config
        self.worker_index = worker_index
        self.worker = worker

    def default_sampler_input(self) -> Any:
        """Returns a reader that samples the worker's environments; None without environments."""
        make_reader = getattr(self.worker, "make_sampler_input", None)
        return None if make_reader is None else make_reader()


class UnavailableData:
    """Stands for data or a function that a checkpoint could not store.

    An algorithm that is restored without them acts and evaluates; calling this is an error.

    Args:
        setting: "input_" or "output".
        description: of the value when it was saved.
    """

    def __init__(self, setting: str, description: str) -> None:
        self._setting = setting
        self._description = description

    def __call__(self, io_context: IOContext) -> Any:
        """Raises a `ConfigError` that says how to pass the data."""
        del io_context
        raise ConfigError(
            f"The checkpoint was saved with {self._setting}={self._description}, which a file "
            "cannot hold safely. Pass it when loading: from_checkpoint(path, config="
            f"{{{self._setting!r}: ...}})."
        )


class ExperienceReader(abc.ABC):
    """Reads experience, batch by batch.

    A reader whose position can be stored also has `get_state()`, which returns JSON values and
    arrays, and `set_state(state)`; a run that was killed then resumes with the same batches.
    """

    @abc.abstractmethod
    def next(self) -> SampleBatch | MultiAgentBatch:
        """Returns the next batch."""


class ExperienceWriter(abc.ABC):
    """Writes experience, batch by batch."""

    @abc.abstractmethod
    def write(self, sample_batch: SampleBatch | MultiAgentBatch) -> None:
        """Writes a batch."""

    def close(self) -> None:  # noqa: B027
        """Writes what is buffered, and closes files; may be called again."""
