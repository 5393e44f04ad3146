"""The sources of a worker's batches: environments, recorded experience, or both."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID
from tfpolicies.config.run_sections import (
    SAMPLER,
    check_input_config,
    is_mixture,
    needs_environment,
)
from tfpolicies.errors import ConfigError
from tfpolicies.models.mean_std_filters import ReturnFilter
from tfpolicies.offline.column_map import ColumnMap
from tfpolicies.offline.data_source import DataSource
from tfpolicies.offline.data_spaces import SpacePair, infer_spaces, iter_chunks
from tfpolicies.offline.experience_io import IOContext
from tfpolicies.offline.input_registry import INPUTS, is_class_path
from tfpolicies.offline.open_data import open_data
from tfpolicies.offline.step_columns import OBS, REWARDS
from tfpolicies.rollout.input_samplers import MixedSampler, ReaderSampler, get_position_or_none
from tfpolicies.rollout.offline_sampler import OfflineSampler, OfflineSettings
from tfpolicies.rollout.postprocessor import Postprocessor
from tfpolicies.rollout.sampler import Sampler

logger = logging.getLogger("tfpolicies")

DATASET = "dataset"
_MAX_FITTED_ROWS = 1_000_000
_DEFAULT_SEED = 0  # of the order of rows in a run without a seed


def require_shard(shards: Sequence[Any] | None, worker_index: int) -> None:
    """Checks that there is an entry for a worker.

    Raises:
        ConfigError: if not.
    """
    is_list = isinstance(shards, list | tuple)
    if shards is not None and not (is_list and worker_index < len(shards)):
        raise ConfigError(
            f"dataset_shards must be a list with an entry for each worker index, and this worker "
            f"has the index {worker_index}; got {shards!r:.200}. An entry is None, a path, or a "
            "shard of a dataset."
        )


def infer_missing_spaces(
    config: AlgorithmConfig, shards: Sequence[Any] | None = None, worker_index: int = 0
) -> SpacePair | None:
    """Returns the spaces of the data that a config names; None if it has spaces, or needs none.

    Args:
        config: of the worker or the algorithm.
        shards: the shards of a dataset, by worker index; None without.
        worker_index: of the worker.

    Raises:
        SpaceError: if the data do not tell their spaces.
    """
    is_known = config.observation_space is not None and config.action_space is not None
    reads_environment = shards is None and needs_environment(config.input_)
    if is_known or reads_environment or config.env is not None or config.is_multi_agent():
        return None
    input_ = _get_first_input(config, shards)
    if _is_reader(input_):
        return None
    if shards is not None:
        shards, worker_index = [shard for shard in shards if shard is not None], 0
    source = _open(input_, config, shards, worker_index)
    try:
        return infer_spaces(
            source,
            config.input_config.get("columns"),
            observation_space=config.observation_space,
            action_space=config.action_space,
        )
    finally:
        source.close()


def _get_first_input(config: AlgorithmConfig, shards: Sequence[Any] | None) -> Any:
    """Returns the input of a config without environments; of a mixture, the first one."""
    if shards is not None:
        return DATASET
    return next(iter(config.input_)) if is_mixture(config.input_) else config.input_


def _is_reader(input_: Any) -> bool:
    """Returns whether a user's reader reads an input, which is not opened as a table then."""
    if isinstance(input_, str):
        return INPUTS.find(input_) is not None or is_class_path(input_)
    return callable(input_) and not hasattr(input_, "iter_batches")


def _open(
    input_: Any, config: AlgorithmConfig, shards: Sequence[Any] | None, worker_index: int
) -> DataSource:
    options = config.input_config
    check_input_config(options)
    data = input_
    if isinstance(input_, str) and input_ == DATASET:
        data = _get_dataset(config, shards, worker_index)
    return open_data(
        data, file_format=options.get("format"), trusted=bool(options.get("trusted", False))
    )


def _get_dataset(config: AlgorithmConfig, shards: Sequence[Any] | None, worker_index: int) -> Any:
    if shards is not None:
        return shards[worker_index]
    options = config.input_config
    if options.get("loader_fn") is not None:
        return options["loader_fn"]()
    paths = options.get("paths", options.get("path"))
    if paths is None:
        raise ConfigError(
            "input_='dataset' needs input_config={'format': 'parquet' or 'json', 'paths': ...}, "
            "input_config={'loader_fn': f} with a function that returns a dataset, or "
            "RolloutWorker(dataset_shards=[...])."
        )
    return paths


def make_sampler(
    worker: Any,
    shards: Sequence[Any] | None,
    make_env_sampler: Callable[[], Sampler | None],
    rng: np.random.Generator,
) -> Any:
    """Returns the sampler of a worker, as `config.input_` says; None if it does not sample.

    Args:
        worker: the worker.
        shards: its argument `dataset_shards`.
        make_env_sampler: makes the sampler of environments.
        rng: draws from mixtures.
    """
    config: AlgorithmConfig = worker.config
    input_ = DATASET if shards is not None and config.input_ == SAMPLER else config.input_
    if isinstance(input_, str) and input_ == SAMPLER:
        return make_env_sampler()
    if worker.worker_index == 0 and worker.num_workers > 0:
        return None
    if shards is not None and shards[worker.worker_index] is None:
        return None
    make_source = _SamplerMaker(worker, shards, make_env_sampler, rng)
    if isinstance(input_, Mapping) and is_mixture(input_):
        samplers = [make_source.make(source) for source in input_]
        return MixedSampler(samplers, [*input_.values()], rng)
    return make_source.make(input_)


def fit_filters(worker: Any) -> list[str]:
    """Fits the running statistics of policies to recorded experience, before training.

    Policies whose statistics have numbers already keep them. At most a million rows are read.

    Args:
        worker: has the policies.

    Returns:
        The ids of the policies whose statistics were fitted.

    Raises:
        ConfigError: if rewards are to be scaled by running returns, which the data do not have.
    """
    config: AlgorithmConfig = worker.config
    shards = worker.creation_args()["dataset_shards"]
    if needs_environment(config.input_) and shards is None:
        return []
    filters = {
        policy_id: policy.driver.filters
        for policy_id, policy in worker.policy_map.items()
        if any(x.is_empty for x in policy.driver.filters.values())
    }
    if not filters:
        return []
    for by_kind in filters.values():
        if isinstance(by_kind.get("reward_filter"), ReturnFilter):
            raise ConfigError(
                "reward_filter='ReturnStdFilter' needs running episodes, and recorded experience "
                "has none. Use 'MeanStdFilter', or scale the rewards in columns={'rewards': f}."
            )
    input_ = _get_first_input(config, shards)
    if _is_reader(input_):
        return []
    index = worker.worker_index
    if shards is not None and shards[index] is None:
        index = next(i for i, shard in enumerate(shards) if shard is not None)
    source = _open(input_, config, shards, index)
    try:
        _observe_data(worker.policy_map, filters, source, config.input_config.get("columns"))
    finally:
        source.close()
    for policy_id in filters:
        worker.policy_map[policy_id].driver.learning.flush_filters()
    return [*filters]


def _observe_data(
    policies: Mapping[str, Any],
    filters: Mapping[str, Mapping[str, Any]],
    source: DataSource,
    columns: Mapping[str, Any] | None,
) -> None:
    column_map = ColumnMap(source.column_names, columns)
    names = [OBS, *([REWARDS] if any("reward_filter" in x for x in filters.values()) else [])]
    rows = 0
    for chunk in iter_chunks(source, column_map.find_sources(names, names)):
        policy_id = chunk.policy_id or DEFAULT_POLICY_ID
        if policy_id not in filters:
            continue
        policy = policies[policy_id]
        spaces = policy.observation_space, policy.action_space
        steps = column_map.read(chunk, spaces, names)
        if "filter" in filters[policy_id]:
            filters[policy_id]["filter"].observe(steps.obs or [])
        if "reward_filter" in filters[policy_id]:
            filters[policy_id]["reward_filter"].observe(steps.columns[REWARDS])
        rows += chunk.rows
        if rows >= _MAX_FITTED_ROWS:
            return


class _SamplerMaker:
    """Makes the samplers of single sources."""

    def __init__(
        self,
        worker: Any,
        shards: Sequence[Any] | None,
        make_env_sampler: Callable[[], Sampler | None],
        rng: np.random.Generator,
    ) -> None:
        self._worker = worker
        self._shards = shards
        self._make_env_sampler = make_env_sampler
        self._rng = rng

    def make(self, source: Any) -> Any:
        """Returns the sampler of one source."""
        worker = self._worker
        if isinstance(source, str) and source == SAMPLER:
            sampler = self._make_env_sampler()
            if sampler is None:
                raise ConfigError(
                    "input_ mixes in 'sampler', which needs an environment: "
                    "config.environment(...)."
                )
            return sampler
        if _is_reader(source):
            return self._make_reader_sampler(_find_reader(source))
        settings = make_offline_settings(worker, self._shards)
        config, shards, index = worker.config, self._shards, worker.worker_index
        return OfflineSampler(
            lambda: _open(source, config, shards, index),
            worker.policy_map,
            settings,
            lambda: make_postprocessor(worker),
            self._rng,
        )

    def _make_reader_sampler(self, make_reader: Callable[[IOContext], Any]) -> ReaderSampler:
        worker = self._worker
        if any(policy.driver.filters for policy in worker.policy_map.values()):
            logger.warning(
                "observation_filter and reward_filter do not change the batches of a reader, which "
                "are learned from as they are. Let the reader scale them, or give the files: "
                "input_=PATH."
            )
        context = IOContext(worker.log_dir, worker.config, worker.worker_index, worker)
        sampler = ReaderSampler(lambda: make_reader(context), self._start_env_sampler, self._rng)
        context.set_sampler_input(sampler.make_sampler_input)
        return sampler

    def _start_env_sampler(self) -> Sampler | None:
        sampler = self._make_env_sampler()
        if sampler is not None:
            sampler.reset(self._worker.seeds.next(sampler.num_envs))
        return sampler


def make_offline_settings(worker: Any, shards: Sequence[Any] | None) -> OfflineSettings:
    """Returns how a worker reads its data."""
    config: AlgorithmConfig = worker.config
    workers = max(1, worker.num_workers)
    rows = -(-config.train_batch_size // workers)
    has_own_shard = shards is not None or config.input_config.get("loader_fn") is not None
    shard = (0, 1) if has_own_shard else (max(0, worker.worker_index - 1), workers)
    seed = _DEFAULT_SEED if config.seed is None else config.seed
    buffer_size = config.shuffle_buffer_size
    return OfflineSettings(
        rows=rows,
        shuffle_rows=buffer_size * rows if buffer_size > 1 else 0,
        shard=shard,
        seed=int(seed),
        columns=config.input_config.get("columns"),
        actions_normalized=config.actions_in_input_normalized,
        postprocess=config.postprocess_inputs,
        whole_trajectories=config.batch_mode == "complete_episodes" and buffer_size <= 1,
    )


def make_postprocessor(worker: Any) -> Postprocessor:
    """Returns a postprocessor of recorded trajectories."""
    config: AlgorithmConfig = worker.config
    return Postprocessor(
        config.clip_rewards,
        worker.callbacks,
        worker,
        worker.policy_map,
        list,
        config.enable_connectors,
        observes=False,
    )


def _find_reader(source: Any) -> Any:
    """Returns the function or class that makes a user's reader."""
    if not isinstance(source, str):
        return source
    return INPUTS.find(source) or _import_class(source)


def _import_class(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"input_={path!r} must be a file, a registered name or the path of a reader's class, "
            f"but it cannot be imported: {error}."
        ) from error


def get_input_position(worker: Any) -> Any:
    """Returns where a worker continues to read its data; None if it reads none."""
    return None if worker.sampler is None else get_position_or_none(worker.sampler)


def set_input_position(worker: Any, position: Any) -> None:
    """Makes a worker continue at a position of `get_input_position`; None changes nothing."""
    if position is not None and hasattr(worker.sampler, "set_position"):
        worker.sampler.set_position(position)
