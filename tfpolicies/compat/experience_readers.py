"""RLlib's readers of recorded experience.

A reader with a worker reads as `offline_data(input_=...)` of its config does. One without a worker
returns lines as recorded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpolicies.batch.layout import DONES
from tfpolicies.batch.sample_batch import (
    DEFAULT_POLICY_ID,
    MultiAgentBatch,
    SampleBatch,
    concat_samples,
)
from tfpolicies.config.run_sections import SAMPLER
from tfpolicies.errors import BatchError, ConfigError, UsageError
from tfpolicies.offline.block_reader import shuffle_tables, split_units
from tfpolicies.offline.data_source import Chunk, DataSource, ReadRequest, ReadResult, Unit
from tfpolicies.offline.data_spaces import iter_chunks
from tfpolicies.offline.experience_io import ExperienceReader, IOContext
from tfpolicies.offline.input_registry import INPUTS, is_class_path, register_input, require_no_d4rl
from tfpolicies.offline.open_data import FORMATS, find_files, is_file_source, open_data
from tfpolicies.offline.step_columns import SEPARATOR
from tfpolicies.rollout.experience_input import make_offline_settings, make_postprocessor
from tfpolicies.rollout.loaded_block import count_env_steps
from tfpolicies.rollout.offline_sampler import OfflineSampler

__all__ = [
    "DatasetReader",
    "ExperienceDataset",
    "IOContext",
    "InputReader",
    "JsonReader",
    "MixedInput",
    "ShuffledInput",
    "get_dataset_and_shards",
    "register_input",
    "registry_contains_input",
    "registry_get_input",
]

Batch = SampleBatch | MultiAgentBatch
_FILE_SCHEME = "file://"


def registry_contains_input(name: str) -> bool:
    """Returns whether a name is registered by `register_input`."""
    return INPUTS.find(name) is not None


def registry_get_input(name: str) -> Any:
    """Returns the function that was registered under a name.

    Raises:
        ConfigError: if there is none.
    """
    creator = INPUTS.find(name)
    if creator is None:
        raise ConfigError(
            f"No input is registered as {name!r}; there are {sorted(INPUTS)}. Call "
            "register_input(name, creator)."
        )
    return creator


class InputReader(ExperienceReader):
    """Base class of readers: `next()` returns a batch."""

    def tf_input_ops(self, queue_size: int = 1) -> dict[str, Any]:
        """Returns the columns of a batch as tensors, for a `custom_loss` of a model.

        Each execution of the loss reads the next batch, and each trace of the loss creates its own
        reader if `custom_loss` does. The position is not part of a checkpoint. XLA does not compile
        such an update.

        Args:
            queue_size: accepted for ported code.

        Returns:
            The columns of numbers, `[N, ...]` with any N; those of nested observations are nested.

        Raises:
            BatchError: if batches have several policies.
        """
        del queue_size
        first = _get_numbers(self.next())
        specs = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in tf.nest.flatten(first)]
        pending = [first]

        def read() -> list[np.ndarray]:
            columns = pending.pop() if pending else _get_numbers(self.next())
            tf.nest.assert_same_structure(first, columns)
            return [
                np.asarray(x, spec.dtype.as_numpy_dtype)
                for x, spec in zip(tf.nest.flatten(columns), specs, strict=True)
            ]

        tensors = tf.numpy_function(read, [], [spec.dtype for spec in specs])
        shaped = [tf.ensure_shape(x, spec.shape) for x, spec in zip(tensors, specs, strict=True)]
        columns: dict[str, Any] = tf.nest.pack_sequence_as(first, shaped)
        return columns


def _get_numbers(batch: Batch) -> dict[str, Any]:
    """Returns the columns of numbers of a batch of one policy.

    Raises:
        BatchError: if it has several.
    """
    policy_batches = batch.as_multi_agent().policy_batches
    if len(policy_batches) != 1:
        raise BatchError(
            f"tf_input_ops needs batches of one policy, got those of {sorted(policy_batches)}. "
            "Override next() to return the batch of one of them."
        )
    columns = next(iter(policy_batches.values()))
    return {
        name: columns[name]
        for name in sorted(columns)
        if all(np.asarray(x).dtype.kind in "iuf" for x in tf.nest.flatten(columns[name]))
    }


class _DataReader(InputReader):
    """Reads a data source.

    Args:
        open_source: opens it; called by the first read.
        ioctx: the context; None for one without a worker.
    """

    def __init__(self, open_source: Callable[[], DataSource], ioctx: IOContext | None) -> None:
        self.ioctx = ioctx or IOContext()
        get_setting = self.ioctx.get_setting
        workers = get_setting("num_rollout_workers", 0) or get_setting("num_workers", 0) or 1
        self.batch_size = max(1, -(-get_setting("train_batch_size", 1) // workers))
        self._open_source = open_source
        self._source: DataSource | None = None
        seed = get_setting("seed", None)
        self._seed = [0 if seed is None else int(seed), self.ioctx.worker_index]
        self._epoch, self._unit, self._position = 0, 0, -1
        worker = self.ioctx.worker
        self._sampler = None if worker is None else self._make_sampler(worker)

    def next(self) -> Batch:
        """Returns the next batch.

        With a worker, it has exactly as many rows as the worker's share of the train batch, with
        observations, actions and rewards as the policies' losses read them. Without a worker, it
        has whole lines with at least that many rows (one line without a config), as recorded.

        Raises:
            BatchError: if a file is damaged, or has no rows.
        """
        if self._sampler is not None:
            return self._sampler.sample()
        batches: list[Batch] = []
        missing = self.batch_size
        while missing > 0:
            batch = self._read_next(missing)
            batches.append(batch)
            missing -= batch.count
        return batches[0] if len(batches) == 1 else concat_samples(batches)

    def read_all_files(self) -> Iterator[Batch]:
        """Yields all lines as recorded, in the order of the files, one batch for each."""
        source = self._get_source()
        for table, start, stop in source.units:
            position = start
            while position < stop:
                chunks, position = source.read(ReadRequest(table, position, stop, 1, None))
                if chunks:
                    yield _to_batch(chunks)

    def close(self) -> None:
        """Closes files; a later read opens them again."""
        for part in (self._source, self._sampler):
            if part is not None:
                part.close()

    def get_state(self) -> dict[str, Any]:
        """Returns the position, for `set_state` of a reader of the same data."""
        if self._sampler is not None:
            return self._sampler.get_state()
        return {"position": [self._epoch, self._unit, self._position]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at a position of `get_state`."""
        if self._sampler is not None:
            self._sampler.set_state(state)
        else:
            self._epoch, self._unit, self._position = map(int, state["position"])

    # -- without a worker ---------------------------------------------------------------------

    def _get_source(self) -> DataSource:
        if self._source is None:
            self._source = self._open_source()
        return self._source

    def _read_next(self, rows: int) -> Batch:
        source = self._get_source()
        for _ in range(2 * len(source.units) + 1):  # units may be empty
            table, start, stop = source.units[self._get_order(source)[self._unit]]
            position = max(start, self._position)
            chunks: list[Chunk] = []
            if position < stop:
                chunks, position = source.read(ReadRequest(table, position, stop, rows, None))
            self._position = position
            if position >= stop:
                self._unit, self._position = self._unit + 1, -1
            if self._unit >= len(source.units):
                self._epoch, self._unit = self._epoch + 1, 0
            if chunks:
                return _to_batch(chunks)
        raise BatchError(f"There is no row in {[*source.tables]!s:.200}.")

    def _get_order(self, source: DataSource) -> list[int]:
        """Returns the order of units in this epoch: files in random order."""
        rng = np.random.default_rng([*self._seed, self._epoch])
        return shuffle_tables(source.units, len(source.tables), rng)

    # -- with a worker ------------------------------------------------------------------------

    def _make_sampler(self, worker: Any) -> OfflineSampler:
        settings = make_offline_settings(worker, None)
        settings = settings._replace(
            rows=self.batch_size,
            shard=(0, 1),
            seed=settings.seed + worker.worker_index,
            reads_all=True,
        )
        return OfflineSampler(
            self._open_source,
            worker.policy_map,
            settings,
            lambda: make_postprocessor(worker),
            np.random.default_rng(settings.seed),
        )


def _to_batch(chunks: Sequence[Chunk]) -> Batch:
    """Returns rows of one line, or of several, as recorded."""
    batches = {chunk.policy_id: SampleBatch(_nest(chunk.columns)) for chunk in chunks}
    if [*batches] == [None]:
        return batches[None]
    by_policy = {pid or DEFAULT_POLICY_ID: batch for pid, batch in batches.items()}
    return MultiAgentBatch(by_policy, count_env_steps(by_policy))


def _nest(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, column in columns.items():
        if name == DONES:  # also there as "terminateds"
            continue
        *parents, last = name.split(SEPARATOR)
        level = result
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = column
    return result


class JsonReader(_DataReader):
    """Reads files of JSON lines, as `JsonWriter` and RLlib write them.

    Files come in an order that is drawn again for each pass from the config's seed and the worker's
    index. Packed columns are read as data: nothing in them is executed.

    Args:
        inputs: a path, a folder, or a pattern like "logs/*.json"; or a list of paths.
        ioctx: the context. Its `input_config={"trusted": True}` parses files in this process.

    Raises:
        ConfigError: if there is no such file.

    >>> import tempfile
    >>> from tfpolicies import SampleBatch
    >>> from tfpolicies.compat import JsonWriter
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     JsonWriter(folder).write(SampleBatch(obs=[[0.5]], actions=[1]))
    ...     JsonReader(folder).next()["obs"]
    array([[0.5]])
    """

    def __init__(self, inputs: str | Sequence[str], ioctx: IOContext | None = None) -> None:
        if not is_file_source(inputs):
            raise ConfigError(f"inputs must be a path or a list of paths, got {inputs!r:.200}.")
        paths = find_files(_strip_scheme(inputs), "json")
        trusted = (ioctx or IOContext()).input_config.get("trusted", False)
        super().__init__(lambda: open_data(paths, file_format="json", trusted=bool(trusted)), ioctx)


def _strip_scheme(inputs: Any) -> Any:
    if isinstance(inputs, list | tuple):
        return [_strip_scheme(part) for part in inputs]
    return inputs.removeprefix(_FILE_SCHEME) if isinstance(inputs, str) else inputs


# -- datasets -------------------------------------------------------------------------------------


class ExperienceDataset(DataSource):
    """Recorded experience that any process can open; `get_dataset_and_shards` returns it.

    It does not need Ray. It can be sent to other processes, which open its files themselves, and is
    accepted by `DatasetReader`, `RolloutWorker(dataset_shards=[...])` and
    `offline_data(input_=...)`.

    Args:
        data: whatever `offline_data(input_=...)` reads.
        file_format: "json" or "parquet"; None: by the files' endings.
        trusted: whether files are parsed in the process that reads.
        shard: `(k, n)`: the k-th of n shares.
    """

    def __init__(
        self,
        data: Any,
        *,
        file_format: str | None = None,
        trusted: bool = False,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self._data = data
        self._file_format = file_format
        self._trusted = trusted
        self._shard = shard
        self._opened: DataSource | None = None

    def split(self, n: int) -> list[ExperienceDataset]:
        """Returns n datasets that have all rows together, each about the same number.

        Raises:
            UsageError: if this is a part already.
        """
        if self._shard != (0, 1):
            raise UsageError(f"{self!r} is a shard of a dataset; split the dataset itself.")
        kwargs: dict[str, Any] = {"file_format": self._file_format, "trusted": self._trusted}
        return [ExperienceDataset(self._data, **kwargs, shard=(i, n)) for i in range(n)]

    def count(self) -> int:
        """Returns the number of rows, all of which are read."""
        return sum(chunk.rows for chunk in iter_chunks(self, None))

    def __repr__(self) -> str:
        shard = "" if self._shard == (0, 1) else f", shard={self._shard}"
        return f"ExperienceDataset({self._data!r:.200}{shard})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _open(self) -> DataSource:
        if self._opened is None:
            self._opened = open_data(
                self._data, file_format=self._file_format, trusted=self._trusted
            )
            if self._shard[1] > 1 and not self._opened.can_seek:
                raise ConfigError(
                    f"{self._data!r:.200} is a stream, which cannot be shared among "
                    f"{self._shard[1]} workers. Give files or arrays, or shards of a Ray dataset."
                )
        return self._opened

    @property
    def tables(self) -> Sequence[str]:  # type: ignore[override]
        return self._open().tables

    @property
    def units(self) -> Sequence[Unit]:  # type: ignore[override]
        index, count = self._shard
        return split_units(self._open().units, count)[index::count]

    @property
    def ends(self) -> Sequence[int]:  # type: ignore[override]
        return self._open().ends

    @property
    def column_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._open().column_names

    @property
    def has_contiguous_episodes(self) -> bool:  # type: ignore[override]
        return self._open().has_contiguous_episodes

    @property
    def can_seek(self) -> bool:  # type: ignore[override]
        return self._open().can_seek

    @property
    def metadata(self) -> Mapping[str, object]:  # type: ignore[override]
        return self._open().metadata

    def read(self, request: ReadRequest) -> ReadResult:
        return self._open().read(request)

    def prefetch(self, request: ReadRequest) -> None:
        self._open().prefetch(request)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = None


def get_dataset_and_shards(config: Any, num_workers: int = 0) -> tuple[Any, list[Any]]:
    """Returns a dataset, and the shards of workers by index, for `RolloutWorker(dataset_shards=)`.

    Args:
        config: a config, or a dict of settings, with `input_="dataset"` and an `input_config` that
            has `format` and `paths`, or `loader_fn`.
        num_workers: the number of remote workers.

    Returns:
        `(dataset, [dataset])` without remote workers, otherwise `(dataset, [None, shard, ...])`.
        It is an `ExperienceDataset`, or the Ray dataset that `loader_fn` returns.

    Raises:
        ConfigError: if `input_` is something else, `format` is unknown, or both or none of paths
            and `loader_fn` are given.
    """
    get_setting = IOContext(config=config).get_setting
    options = get_setting("input_config", {})
    if get_setting("input", get_setting("input_", None)) != "dataset":
        raise ConfigError("get_dataset_and_shards needs offline_data(input_='dataset').")
    paths, loader = options.get("paths", options.get("path")), options.get("loader_fn")
    if (paths is None) == (loader is None):
        raise ConfigError(
            "input_config must have either 'format' and 'paths', or 'loader_fn', got "
            f"{sorted(options)}."
        )
    if paths is not None and options.get("format") not in FORMATS:
        raise ConfigError(
            f"input_config['format'] must be one of {FORMATS}, got {options.get('format')!r}."
        )
    data = _strip_scheme(paths) if loader is None else loader()
    if hasattr(data, "iter_batches") and hasattr(data, "split"):
        dataset, shards = data, data.split(num_workers) if num_workers else []
    else:
        dataset = ExperienceDataset(
            data if paths is None else [str(x) for x in find_files(data, options["format"])],
            file_format=options.get("format") if loader is None else None,
            trusted=bool(options.get("trusted", False)),
        )
        shards = dataset.split(num_workers)
    return dataset, [None, *shards] if num_workers else [dataset]


class DatasetReader(_DataReader):
    """Reads a dataset of `get_dataset_and_shards`, or one of Ray.

    Args:
        ds: the dataset; None for a worker that does not sample, whose reader must not be used.
        ioctx: the context.
    """

    def __init__(self, ds: Any, ioctx: IOContext | None = None) -> None:
        super().__init__(lambda: open_data(ds), ioctx)


# -- combinations ---------------------------------------------------------------------------------


class MixedInput(InputReader):
    """Reads from one of several readers, which is drawn for each batch.

    Args:
        dist: weights by source, which sum to 1. A source is "sampler", a path, a registered name,
            or a function of the context that returns a reader.
        ioctx: the context, whose config's seed draws.

    Raises:
        ConfigError: if the weights do not sum to 1, or there is no environment to sample.
    """

    def __init__(self, dist: Mapping[Any, float], ioctx: IOContext) -> None:
        total = sum(dist.values())
        if abs(total - 1.0) > 1e-6 or min(dist.values()) < 0:
            raise ConfigError(
                f"Weights of MixedInput must not be negative and sum to 1, got {total:g}: "
                f"{dict(dist)!r:.200}."
            )
        self.choices = [_make_reader(source, ioctx) for source in dist]
        self.p = np.array([*dist.values()], float) / total
        seed = ioctx.get_setting("seed", None)
        self._rng = np.random.default_rng([0 if seed is None else int(seed), ioctx.worker_index])

    def next(self) -> Batch:
        """Returns the next batch of one of the readers."""
        batch: Batch = self.choices[int(self._rng.choice(len(self.choices), p=self.p))].next()
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the generator and the states of readers that have one."""
        return {
            "rng": self._rng.bit_generator.state,
            "readers": [_get_state(reader) for reader in self.choices],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at a position of `get_state`."""
        self._rng.bit_generator.state = state["rng"]
        for reader, reader_state in zip(self.choices, state["readers"], strict=True):
            _set_state(reader, reader_state)

    def close(self) -> None:
        """Closes the readers."""
        for reader in self.choices:
            _close(reader)


def _make_reader(source: Any, ioctx: IOContext) -> Any:
    """Returns the reader of a source.

    Raises:
        ConfigError: if there is no environment to sample.
    """
    if callable(source):
        return source(ioctx)
    if source == SAMPLER:
        reader = ioctx.default_sampler_input()
        if reader is None:
            raise ConfigError(
                "'sampler' in MixedInput needs an environment: config.environment(...), and the "
                "context that a worker passes to an input function."
            )
        return reader
    if registry_contains_input(source):
        return registry_get_input(source)(ioctx)
    require_no_d4rl(source)
    if is_class_path(source):
        raise ConfigError(f"{source!r} in MixedInput must be the class itself, not its path.")
    return JsonReader(os.fspath(source) if not isinstance(source, list) else source, ioctx)


def _get_state(reader: Any) -> Any:
    get_state = getattr(reader, "get_state", None)
    return None if get_state is None else get_state()


def _set_state(reader: Any, state: Any) -> None:
    if state is not None:
        reader.set_state(state)


def _close(reader: Any) -> None:
    if callable(getattr(reader, "close", None)):
        reader.close()


class ShuffledInput(InputReader):
    """Shuffles the batches of a reader with a buffer.

    Each batch is returned once. (RLlib's draws with repetitions, so that some batches are lost.)

    Args:
        child: the reader.
        n: the number of batches in the buffer; 0 or 1: batches in the reader's order.
        seed: of the order.
    """

    def __init__(self, child: ExperienceReader, n: int = 0, *, seed: int = 0) -> None:
        self.child = child
        self.n = n
        self.buffer: list[Batch] = []
        self._rng = np.random.default_rng(seed)

    def next(self) -> Batch:
        """Returns a random batch of the buffer, which the reader's next batch replaces."""
        if self.n <= 1:
            return self.child.next()
        while len(self.buffer) < self.n:
            self.buffer.append(self.child.next())
        index = int(self._rng.integers(self.n))
        batch, self.buffer[index] = self.buffer[index], self.child.next()
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the generator, the buffer and the reader's state, if it has one."""
        return {
            "rng": self._rng.bit_generator.state,
            "buffer": [_encode_batch(batch) for batch in self.buffer],
            "child": _get_state(self.child),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at a position of `get_state`."""
        self._rng.bit_generator.state = state["rng"]
        self.buffer = [_decode_batch(record) for record in state["buffer"]]
        _set_state(self.child, state["child"])

    def close(self) -> None:
        """Closes the reader."""
        _close(self.child)


def _encode_batch(batch: Batch) -> list[Any]:
    """Returns a batch as plain values and arrays: environment steps and columns by policy."""
    if isinstance(batch, SampleBatch):
        return [-1, [[DEFAULT_POLICY_ID, dict(batch)]]]
    return [batch.env_steps(), [[pid, dict(x)] for pid, x in batch.policy_batches.items()]]


def _decode_batch(record: Sequence[Any]) -> Batch:
    env_steps, policy_batches = record
    batches = {pid: SampleBatch(columns) for pid, columns in policy_batches}
    return batches[DEFAULT_POLICY_ID] if env_steps < 0 else MultiAgentBatch(batches, env_steps)
