"""The sections about how a run goes: hardware, failures, evaluation, reports and the like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tfpolicies.config.sections import (
    check,
    check_amounts,
    check_bools,
    check_counts,
    is_count,
    is_number,
)

_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What hardware is used; what is per worker concerns remote workers."""

    num_gpus: float = 0  # 1: the learner is on a GPU, if there is one
    num_cpus_per_worker: float = 1  # CPUs that Ray keeps for a worker
    num_gpus_per_worker: float = 0  # GPUs that Ray keeps for a worker
    num_cpus_for_local_worker: float = 1  # CPUs that Ray keeps for the learner's process
    custom_resources_per_worker: Mapping[str, float] = field(default_factory=dict)  # Ray's, by name
    placement_strategy: str = "PACK"  # of Ray's placement group: how workers are spread over nodes

    def __post_init__(self) -> None:
        rule = "0 or 1 (a learner uses one GPU at most), or a share between"
        valid = is_number(self.num_gpus) and 0 <= self.num_gpus <= 1
        check(valid, "num_gpus", rule, self.num_gpus)
        check_amounts(self, "num_cpus_per_worker", "num_gpus_per_worker")
        check_amounts(self, "num_cpus_for_local_worker")
        name, custom = "custom_resources_per_worker", self.custom_resources_per_worker
        valid = isinstance(custom, Mapping) and all(
            isinstance(key, str) and is_number(x) and x >= 0 for key, x in custom.items()
        )
        check(valid, name, "a dict {name: amount >= 0}", custom)
        strategy = self.placement_strategy
        check(strategy in _PLACEMENTS, "placement_strategy", f"one of {_PLACEMENTS}", strategy)


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """What happens when environments or workers fail."""

    restart_failed_sub_environments: bool = False  # made anew, its episode dropped; else an error
    max_num_sub_environment_restarts: int | None = None  # in a row, of each; None: any number
    env_step_timeout_s: float | None = None  # a longer reset or step is a failure; None: no limit
    recreate_failed_workers: bool = False  # a remote worker that died is replaced
    ignore_worker_failures: bool = False  # the run goes on with the workers that are left
    max_num_worker_restarts: int = 1000  # of each worker
    delay_between_worker_restarts_s: float = 60.0  # seconds
    num_consecutive_worker_failures_tolerance: int = 100  # rounds in which all workers failed
    worker_health_probe_timeout_s: float = 60.0  # seconds until a silent worker counts as dead
    worker_restore_timeout_s: float = 1800.0  # seconds in which a new worker must be ready

    def __post_init__(self) -> None:
        check_bools(self, "restart_failed_sub_environments")
        most, name = self.max_num_sub_environment_restarts, "max_num_sub_environment_restarts"
        check(most is None or is_count(most, 0), name, "None or an integer >= 0", most)
        check_bools(self, "recreate_failed_workers", "ignore_worker_failures")
        limit = self.env_step_timeout_s
        valid = limit is None or (is_number(limit) and limit > 0)
        check(valid, "env_step_timeout_s", "None or a number of seconds > 0", limit)
        check_counts(self, 0, "max_num_worker_restarts")
        check_counts(self, 0, "num_consecutive_worker_failures_tolerance")
        check_amounts(self, "delay_between_worker_restarts_s")
        check_amounts(self, "worker_health_probe_timeout_s", "worker_restore_timeout_s")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How policies are evaluated, on environments of their own."""

    evaluation_interval: int | None = None  # training iterations; None: only by `evaluate()`
    evaluation_duration: int | str = 10  # episodes or time steps; "auto": as long as training takes
    evaluation_duration_unit: str = "episodes"  # or "timesteps"
    evaluation_config: Mapping[str, Any] | None = None  # overrides, e.g. {"explore": False}
    evaluation_num_workers: int = 0  # remote workers for evaluation alone; 0: in this process
    evaluation_parallel_to_training: bool = False  # on workers of its own, while training goes on
    evaluation_sample_timeout_s: float | None = 180.0  # seconds for a worker's sample; None: none
    custom_evaluation_function: Callable[..., Any] | None = None  # f(algorithm, worker_set) -> dict
    always_attach_evaluation_results: bool = False  # results carry the latest evaluation
    in_evaluation: bool = False  # set by `get_evaluation_config_object`

    def __post_init__(self) -> None:
        interval, duration = self.evaluation_interval, self.evaluation_duration
        valid = interval is None or is_count(interval)
        check(valid, "evaluation_interval", "None or an integer >= 1", interval)
        valid = duration == "auto" or is_count(duration)
        check(valid, "evaluation_duration", "an integer >= 1 or 'auto'", duration)
        unit, units = self.evaluation_duration_unit, ("episodes", "timesteps")
        check(unit in units, "evaluation_duration_unit", f"one of {units}", unit)
        config, function = self.evaluation_config, self.custom_evaluation_function
        valid = config is None or isinstance(config, Mapping)
        check(valid, "evaluation_config", "None or a dict of overrides", config)
        check_counts(self, 0, "evaluation_num_workers")
        check_bools(self, "evaluation_parallel_to_training", "always_attach_evaluation_results")
        check_bools(self, "in_evaluation")
        check_amounts(self, "evaluation_sample_timeout_s", optional=True)
        rule = "None or a function (algorithm, evaluation_workers) -> dict"
        valid = function is None or callable(function)
        check(valid, "custom_evaluation_function", rule, function)


@dataclass(frozen=True, kw_only=True)
class Debugging:
    """What makes runs repeatable and visible."""

    seed: int | None = None  # of everything; None: drawn anew
    log_level: str = "WARN"  # of the logger "tfpolicies"
    fake_sampler: bool = False  # a worker samples once, and gives that batch again and again
    log_sys_usage: bool = True  # `perf` in results: how busy processors and memory are
    on_nan: str = "stop"  # an update with NaN or infinity is an error; "warn": training goes on
    check_inputs: bool = True  # acting by hand refuses NaN, infinity and masks that allow nothing

    def __post_init__(self) -> None:
        check(self.seed is None or is_count(self.seed, 0), "seed", "None or an int >= 0", self.seed)
        levels = ("DEBUG", "INFO", "WARN", "ERROR")
        check(self.log_level in levels, "log_level", f"one of {levels}", self.log_level)
        check_bools(self, "fake_sampler", "log_sys_usage", "check_inputs")
        ways = ("stop", "warn")
        check(self.on_nan in ways, "on_nan", f"one of {ways}", self.on_nan)


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What `train()` reports, and how long one iteration is."""

    metrics_num_episodes_for_smoothing: int = 100  # episodes of the mean return
    metrics_episode_collection_timeout_s: float = 60.0  # seconds to wait for workers' episodes
    keep_per_episode_custom_metrics: bool = False  # every value, not mean, min and max
    min_time_s_per_iteration: float | None = None  # seconds
    min_sample_timesteps_per_iteration: int = 0  # environment steps
    min_train_timesteps_per_iteration: int = 0  # environment steps learned from

    def __post_init__(self) -> None:
        check_counts(self, 1, "metrics_num_episodes_for_smoothing")
        check_amounts(self, "metrics_episode_collection_timeout_s")
        check_bools(self, "keep_per_episode_custom_metrics")
        check_amounts(self, "min_time_s_per_iteration", optional=True)
        check_counts(self, 0, "min_sample_timesteps_per_iteration")
        check_counts(self, 0, "min_train_timesteps_per_iteration")


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """What happens at a checkpoint."""

    new_episodes_at_checkpoint: bool = False  # start new episodes, so that a resumed run is equal
    export_native_model_files: bool = False  # a SavedModel beside each checkpoint of a policy
    checkpoint_trainable_policies_only: bool = False  # policies that do not learn are left out

    def __post_init__(self) -> None:
        check_bools(self, "new_episodes_at_checkpoint", "export_native_model_files")
        check_bools(self, "checkpoint_trainable_policies_only")


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Code of the user that is called at the documented moments."""

    callbacks: Callable[[], Any] | None = None  # a DefaultCallbacks subclass

    def __post_init__(self) -> None:
        made = self.callbacks
        check(made is None or callable(made), "callbacks", "a DefaultCallbacks subclass", made)


@dataclass(frozen=True, kw_only=True)
class PythonEnvironment:
    """What the processes of remote workers find in their environment."""

    extra_python_environs_for_worker: Mapping[str, str] = field(default_factory=dict)  # variables

    def __post_init__(self) -> None:
        given = self.extra_python_environs_for_worker
        valid = isinstance(given, Mapping) and all(
            isinstance(x, str) for pair in given.items() for x in pair
        )
        check(valid, "extra_python_environs_for_worker", "a dict of texts {name: value}", given)


@dataclass(frozen=True, kw_only=True)
class Experimental:
    """What few policy classes need."""

    _tf_policy_handles_more_than_one_loss: bool = False  # `loss` and `optimizer` may return lists

    def __post_init__(self) -> None:
        check_bools(self, "_tf_policy_handles_more_than_one_loss")
