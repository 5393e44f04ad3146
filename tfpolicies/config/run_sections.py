"""Sections of run settings: resources, fault tolerance, evaluation, reporting and others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfpolicies.base.validators import (
    BOOL,
    DICT,
    NON_NEGATIVE,
    POSITIVE,
    POSITIVE_INT,
    POSITIVE_INT_OR_AUTO,
    Validator,
    function,
    int_at_least,
    is_number,
    one_of,
)
from tfpolicies.config.base_config import as_overrides
from tfpolicies.config.setting import Merge, Section, check, require, setting
from tfpolicies.errors import ConfigError, suggest_similar_names
from tfpolicies.offline.data_source import DataSource
from tfpolicies.offline.input_registry import FILE_ENDINGS, require_no_d4rl
from tfpolicies.offline.memory_data import ArrayData

_RESOURCE_DICT = Validator(
    lambda x: (
        isinstance(x, Mapping)
        and all(isinstance(key, str) and NON_NEGATIVE.is_valid(amount) for key, amount in x.items())
    ),
    "a dict {name: amount >= 0}",
)
_STRING_DICT = Validator(
    lambda x: (
        isinstance(x, Mapping) and all(isinstance(text, str) for pair in x.items() for text in pair)
    ),
    "a dict of texts {name: value}",
)
_GPUS = Validator(
    lambda x: is_number(x) and 0 <= x <= 1,
    "0 or 1 (a learner uses one GPU at most), or a share between",
)
_PLACEMENT = one_of("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SECONDS = Validator(POSITIVE.is_valid, "a number of seconds > 0").or_none()
_OVERRIDES = Validator(DICT.is_valid, "a dict of overrides").or_none()
_EVALUATION_FN = function("a function (algorithm, evaluation_workers) -> dict").or_none()
_SEED = Validator(int_at_least(0).is_valid, "an int >= 0").or_none()
_CALLBACKS_CLASS = Validator(lambda x: x is None or callable(x), "a DefaultCallbacks subclass")


@dataclass(frozen=True, kw_only=True)
class ResourceSettings(Section):
    """Hardware resources; per-worker settings apply to remote workers."""

    num_gpus: float = setting(0, _GPUS)  # 1: the learner uses a GPU, if available
    num_cpus_per_worker: float = setting(1, NON_NEGATIVE)  # CPUs that Ray reserves per worker
    num_gpus_per_worker: float = setting(0, NON_NEGATIVE)  # GPUs that Ray reserves per worker
    num_cpus_for_local_worker: float = setting(1, NON_NEGATIVE)  # reserved for the learner
    custom_resources_per_worker: Mapping[str, float] = setting({}, _RESOURCE_DICT)  # Ray's
    placement_strategy: str = setting("PACK", _PLACEMENT)  # of workers on Ray's nodes


@dataclass(frozen=True, kw_only=True)
class FaultToleranceSettings(Section):
    """Handling of failed environments and workers."""

    restart_failed_sub_environments: bool = setting(False, BOOL)  # recreated, its episode dropped
    # consecutive, of each; None: unlimited
    max_num_sub_environment_restarts: int | None = setting(None, int_at_least(0).or_none())
    env_step_timeout_s: float | None = setting(None, _SECONDS)  # a longer reset or step fails
    recreate_failed_workers: bool = setting(False, BOOL)  # dead remote workers are replaced
    ignore_worker_failures: bool = setting(False, BOOL)  # continues with the remaining ones
    max_num_worker_restarts: int = setting(1000, int_at_least(0))  # of each worker
    delay_between_worker_restarts_s: float = setting(60.0, NON_NEGATIVE)  # seconds
    num_consecutive_worker_failures_tolerance: int = setting(
        100, int_at_least(0)
    )  # rounds with none
    worker_health_probe_timeout_s: float = setting(60.0, NON_NEGATIVE)  # until one counts as dead
    worker_restore_timeout_s: float = setting(1800.0, NON_NEGATIVE)  # until a new one must be ready


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Section):
    """Evaluation of policies in separate environments."""

    evaluation_interval: int | None = setting(
        None, POSITIVE_INT.or_none()
    )  # None: only by `evaluate()`
    evaluation_duration: int | str = setting(
        10, POSITIVE_INT_OR_AUTO
    )  # "auto": while training runs
    evaluation_duration_unit: str = setting("episodes", one_of("episodes", "timesteps"))
    evaluation_config: Mapping[str, Any] | None = setting(  # overrides, e.g. {"explore": False}
        None, _OVERRIDES, merge=Merge.KEYS, normalize=as_overrides
    )
    evaluation_num_workers: int = setting(0, int_at_least(0))  # remote; 0: in this process
    evaluation_parallel_to_training: bool = setting(False, BOOL)  # concurrently with training
    evaluation_sample_timeout_s: float | None = setting(180.0, NON_NEGATIVE.or_none())  # per worker
    custom_evaluation_function: Callable[..., Any] | None = setting(None, _EVALUATION_FN)
    always_attach_evaluation_results: bool = setting(False, BOOL)  # every result has the latest
    in_evaluation: bool = setting(False, BOOL)  # set by `get_evaluation_config_object`


@dataclass(frozen=True, kw_only=True)
class DebuggingSettings(Section):
    """Seed, logging and checks."""

    seed: int | None = setting(None, _SEED)  # of all generators; None: random
    log_level: str = setting("WARN", one_of("DEBUG", "INFO", "WARN", "ERROR"))  # of "tfpolicies"
    fake_sampler: bool = setting(False, BOOL)  # workers repeat their first batch
    log_sys_usage: bool = setting(True, BOOL)  # `perf` in results: CPU and memory load
    on_nan: str = setting("raise", one_of("raise", "warn"))  # "warn": training continues
    check_inputs: bool = setting(True, BOOL)  # reject NaN and empty action masks


def _wrap_arrays(data: Any) -> Any:
    """Returns a dict of arrays as a data source, which configs do not copy and files not store."""
    return ArrayData(data) if isinstance(data, Mapping) and data and not is_mixture(data) else data


def is_mixture(source: Any) -> bool:
    """Returns whether an input is `{source: weight}`, not a dict of arrays."""
    return isinstance(source, Mapping) and len(source) > 0 and all(map(is_number, source.values()))


SAMPLER = "sampler"
"""The input of configs whose batches come from environments."""


def needs_environment(input_: Any) -> bool:
    """Returns whether batches come from environments, at least some of them."""
    if is_mixture(input_):
        return any(source == SAMPLER for source in input_)
    return isinstance(input_, str) and input_ == SAMPLER


def is_definite_data(source: Any) -> bool:
    """Returns whether an input is data, and cannot be a user's reader or a name of one."""
    if isinstance(source, str):
        return source == "dataset" or Path(source).suffix.lstrip(".") in FILE_ENDINGS
    return not is_mixture(source) and not (callable(source) and not hasattr(source, "iter_batches"))


_INPUT = Validator(
    lambda x: (
        (isinstance(x, str) and x != "")
        or isinstance(x, os.PathLike | list | tuple | Mapping | DataSource)
        or callable(x)
        or any(hasattr(x, name) for name in ("iter_batches", "element_spec", "iloc"))
    ),
    "'sampler', 'dataset', a path or a list of paths, a registered name, data in memory, a dict "
    "{source: weight}, or a function of an IOContext that returns a reader",
)
_OUTPUT = Validator(
    lambda x: (
        x is None or (isinstance(x, str) and x != "") or isinstance(x, os.PathLike) or callable(x)
    ),
    "None, a path, 'logdir', 'dataset', or a function of an IOContext that returns a writer",
)
_NAMES = Validator(
    lambda x: isinstance(x, list | tuple | set | frozenset) and all(isinstance(y, str) for y in x),
    "a list of names of columns",
)
_INPUT_KEYS = (
    *("format", "paths", "path", "columns", "trusted", "loader_fn"),
    *("parallelism", "num_cpus_per_read_task"),
)
_OUTPUT_KEYS = ("format", "path", "max_num_samples_per_file", "compress_columns")


def _check_keys(name: str, config: Mapping[str, Any], allowed_keys: Sequence[str]) -> None:
    for key in config:
        if key not in allowed_keys:
            raise ConfigError(
                f"{name} has no key {key!r}.{suggest_similar_names(str(key), allowed_keys)} It "
                f"takes {', '.join(allowed_keys)}."
            )


def check_input_config(input_config: Mapping[str, Any]) -> None:
    """Checks the keys of an `input_config` for data; a user's reader may have any.

    Raises:
        ConfigError: if one is unknown.
    """
    _check_keys("input_config", input_config, _INPUT_KEYS)


@dataclass(frozen=True, kw_only=True)
class OfflineDataSettings(Section):
    """Recorded experience: where batches come from, and where sampled ones are recorded."""

    input_: Any = setting("sampler", _INPUT, normalize=_wrap_arrays)  # "sampler": environments
    # "columns": sources of columns; "trusted": files are parsed in this process; "format", "paths"
    input_config: Mapping[str, Any] = setting({}, DICT)
    actions_in_input_normalized: bool = setting(False, BOOL)  # recorded actions are in [-1, 1]
    postprocess_inputs: bool = setting(False, BOOL)  # trajectories are postprocessed
    shuffle_buffer_size: int = setting(0, int_at_least(0))  # batches; 0 or 1: rows in order
    output: Any = setting(None, _OUTPUT)  # where sampled steps are recorded
    output_config: Mapping[str, Any] = setting({}, DICT)
    output_compress_columns: Sequence[str] = setting(["obs", "new_obs"], _NAMES)  # of JSON lines
    output_max_file_size: int = setting(64 << 20, POSITIVE_INT)  # bytes until the next file

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_definite_data(self.input_):
            check_input_config(self.input_config)
        _check_keys("output_config", self.output_config, _OUTPUT_KEYS)
        for source in self.input_ if is_mixture(self.input_) else [self.input_]:
            require_no_d4rl(source)
        if is_mixture(self.input_):
            total = sum(self.input_.values())
            rule = "weights that are not negative and sum to 1"
            is_valid = abs(total - 1.0) <= 1e-6 and min(self.input_.values()) >= 0
            check(is_valid, "input_", f"{rule} (their sum is {total:g})", self.input_)
        file_format = self.input_config.get("format")
        require("input_config['format']", one_of("json", "parquet").or_none(), file_format)
        require("input_config['trusted']", BOOL, self.input_config.get("trusted", False))
        require(
            "output_config['format']",
            one_of("json", "parquet", "rllib").or_none(),
            self.output_config.get("format"),
        )


@dataclass(frozen=True, kw_only=True)
class ReportingSettings(Section):
    """Metrics that `train()` reports, and the length of an iteration."""

    metrics_num_episodes_for_smoothing: int = setting(100, POSITIVE_INT)  # in the mean return
    metrics_episode_collection_timeout_s: float = setting(
        60.0, NON_NEGATIVE
    )  # for workers' episodes
    keep_per_episode_custom_metrics: bool = setting(False, BOOL)  # all values, not mean, min, max
    min_time_s_per_iteration: float | None = setting(None, NON_NEGATIVE.or_none())  # seconds
    min_sample_timesteps_per_iteration: int = setting(0, int_at_least(0))  # environment steps
    min_train_timesteps_per_iteration: int = setting(0, int_at_least(0))  # trained steps


@dataclass(frozen=True, kw_only=True)
class CheckpointingSettings(Section):
    """Content of checkpoints."""

    reset_episodes_at_checkpoint: bool = setting(False, BOOL)  # makes resumed runs identical
    export_native_model_files: bool = setting(False, BOOL)  # a SavedModel with each policy
    checkpoint_trainable_policies_only: bool = setting(False, BOOL)  # without the others


@dataclass(frozen=True, kw_only=True)
class CallbackSettings(Section):
    """User callbacks."""

    callbacks: Callable[[], Any] | None = setting(None, _CALLBACKS_CLASS)


@dataclass(frozen=True, kw_only=True)
class PythonEnvironmentSettings(Section):
    """Environment variables of remote worker processes."""

    extra_python_environs_for_worker: Mapping[str, str] = setting({}, _STRING_DICT)  # variables


@dataclass(frozen=True, kw_only=True)
class ExperimentalSettings(Section):
    """RLlib's experimental settings, without effect: several optimizers mean several losses."""

    _tf_policy_handles_more_than_one_loss: bool = setting(False, BOOL)
