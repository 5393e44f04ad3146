"""The types of readers and writers of experience, which users may implement themselves."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
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
        self._make_sampler_input: Callable[[], ExperienceReader | None] = lambda: None

    @property
    def input_config(self) -> Mapping[str, Any]:
        """The setting `input_config`."""
        return self.get_setting("input_config", {})

    @property
    def output_config(self) -> Mapping[str, Any]:
        """The setting `output_config`."""
        return self.get_setting("output_config", {})

    def get_setting(self, name: str, default: Any) -> Any:
        """Returns a setting of the config, which may be a dict; the default without a config."""
        if isinstance(self.config, Mapping):
            return self.config.get(name, default)
        return getattr(self.config, name, default)

    def set_sampler_input(self, make_reader: Callable[[], ExperienceReader | None]) -> None:
        """Sets the function that `default_sampler_input` calls."""
        self._make_sampler_input = make_reader

    def default_sampler_input(self) -> ExperienceReader | None:
        """Returns a reader that samples the worker's environments; None without environments."""
        return self._make_sampler_input()


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
        """Writes the rest, and closes files; may be called again."""
