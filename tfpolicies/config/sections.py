"""The sections of a config: frozen, typed, and checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from tfpolicies.connectors import ActionConnector, AgentConnector, restore
from tfpolicies.errors import ConfigError
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.settings import model_settings


def check(condition: bool, name: str, rule: str, value: Any) -> None:
    """Raises a `ConfigError` that names the setting, its rule and the value, unless it holds."""
    if not condition:
        raise ConfigError(f"{name} must be {rule}, got {value!r}.")


def is_number(value: Any) -> bool:
    """Whether `value` is a real number (and not a bool or NaN)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def is_count(value: Any, least: int = 1) -> bool:
    """Whether `value` is an integer of at least `least` (and not a bool)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_unit_interval(name: str, value: Any) -> None:
    """Raises a `ConfigError` unless `value` is a number in [0, 1]."""
    check(is_number(value) and 0 <= value <= 1, name, "a number in [0, 1]", value)


def check_bools(section: Any, *names: str) -> None:
    """Raises a `ConfigError` unless the settings of these names are True or False."""
    for name in names:
        value = getattr(section, name)
        check(isinstance(value, bool), name, "True or False", value)


def check_model(model: Any) -> None:
    """Raises a `ConfigError` unless `model` is a dict of known settings with sound values."""
    check(isinstance(model, Mapping), "model", "a dict, a keras.Model or a factory of one", model)
    model_settings(model)


def check_schedule(name: str, value: Any) -> None:
    """Raises a `ConfigError` unless `value` is None or `[[timestep, value], ...]`, sorted."""
    if value is None:
        return
    rule = "None or a list [[timestep, value], ...] with increasing timesteps"
    points = value if isinstance(value, list | tuple) else ()
    pairs = [p for p in points if isinstance(p, list | tuple) and len(p) == 2]
    check(bool(points) and len(pairs) == len(points), name, rule, value)
    check(all(is_number(x) for pair in pairs for x in pair), name, rule, value)
    times = [pair[0] for pair in pairs]
    check(times == sorted(set(times)), name, rule, value)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What is acted in."""

    env: Any = None  # name, "package.module:Class", environment class or None
    env_config: Mapping[str, Any] = field(default_factory=dict)  # for the environment's creator
    observation_space: gym.Space | None = None  # None: the environment's
    action_space: gym.Space | None = None  # None: the environment's
    clip_rewards: bool | float | None = None  # True: their sign; x: to [-x, x]
    normalize_actions: bool = True  # policies act in [-1, 1], mapped to the Box's bounds
    clip_actions: bool = False  # where not normalised: clipped to the Box's bounds
    disable_env_checking: bool = False

    def __post_init__(self) -> None:
        check(isinstance(self.env_config, Mapping), "env_config", "a dict", self.env_config)
        for name in ("observation_space", "action_space"):
            space = getattr(self, name)
            valid = space is None or isinstance(space, gym.Space)
            check(valid, name, "None or a gymnasium space", space)
        check_bools(self, "normalize_actions", "clip_actions", "disable_env_checking")
        clip = self.clip_rewards
        valid = clip is None or isinstance(clip, bool) or (is_number(clip) and clip > 0)
        check(valid, "clip_rewards", "None, True, False or a number > 0", clip)


_CONNECTORS: dict[str, Any] = {
    "agent_connectors": AgentConnector,
    "action_connectors": ActionConnector,
}


def connector_state(name: str, kind: Any, given: Any) -> list[Any]:
    """Returns a connector as the JSON that a config and its checkpoints hold.

    Raises:
        ConfigError: if it is no connector of that kind, nor the state of one.
    """
    made = given
    if isinstance(given, list | tuple) and len(given) == 2:
        made = restore(*given)
    rule = f"a list of {kind.__name__} objects or of their states [name, arguments]"
    check(isinstance(made, kind), name, rule, given)
    return list(made.to_state())


MEAN_STD_FILTERS = ("MeanStdFilter", "ConcurrentMeanStdFilter")
"""Two names of one filter: workers' statistics are always merged."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """How experience is collected."""

    num_rollout_workers: int = 0  # 0: in this process
    num_envs_per_worker: int = 1  # environments stepped together by a worker
    rollout_fragment_length: int | str = 200  # rows per environment and sample(), or "auto"
    batch_mode: str = "truncate_episodes"  # or "complete_episodes"
    compress_observations: bool | str = False  # True: row by row; "bulk": a column at once
    observation_filter: str = "NoFilter"  # or "MeanStdFilter": normalised by running statistics
    agent_connectors: Sequence[Any] = ()  # connectors, or their states, for observations
    action_connectors: Sequence[Any] = ()  # the same for actions
    reward_filter: str = "NoFilter"  # or "MeanStdFilter": learned from at a running scale

    def __post_init__(self) -> None:
        workers, envs = self.num_rollout_workers, self.num_envs_per_worker
        check(is_count(workers, 0), "num_rollout_workers", "an integer >= 0", workers)
        check(is_count(envs), "num_envs_per_worker", "an integer >= 1", envs)
        length = self.rollout_fragment_length
        valid = length == "auto" or is_count(length)
        check(valid, "rollout_fragment_length", "an integer >= 1 or 'auto'", length)
        modes = ("truncate_episodes", "complete_episodes")
        check(self.batch_mode in modes, "batch_mode", f"one of {modes}", self.batch_mode)
        filters, chosen = ("NoFilter", *MEAN_STD_FILTERS), self.observation_filter
        check(chosen in filters, "observation_filter", f"one of {filters}", chosen)
        for name, kind in _CONNECTORS.items():
            listed = getattr(self, name)
            check(isinstance(listed, list | tuple), name, "a list of connectors", listed)
            states = [connector_state(name, kind, given) for given in listed]
            object.__setattr__(self, name, tuple(states))
        scaled = self.reward_filter
        check(scaled in filters, "reward_filter", f"one of {filters}", scaled)
        compress = self.compress_observations
        check(
            compress in (True, False, "bulk"), "compress_observations", "a bool, 'bulk'", compress
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """What all algorithms share about learning."""

    gamma: float = 0.99  # discount per environment step, in [0, 1]
    lr: float = 0.001  # step size of the optimizer, >= 0
    lr_schedule: Any = None  # [[timestep, lr], ...], piecewise linear
    grad_clip: float | None = None  # > 0; None: no limit
    grad_clip_by: str = "global_norm"  # or "norm" (per variable), "value" (per entry)
    train_batch_size: int = 32  # rows of one training step
    model: Mapping[str, Any] = field(default_factory=lambda: dict(MODEL_DEFAULTS))
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # {"type": "adam", "epsilon": ...}

    def __post_init__(self) -> None:
        check_unit_interval("gamma", self.gamma)
        check(is_number(self.lr) and self.lr >= 0, "lr", "a number >= 0", self.lr)
        check_schedule("lr_schedule", self.lr_schedule)
        clip, by = self.grad_clip, self.grad_clip_by
        check(clip is None or (is_number(clip) and clip > 0), "grad_clip", "None or > 0", clip)
        ways = ("global_norm", "norm", "value")
        check(by in ways, "grad_clip_by", f"one of {ways}", by)
        size = self.train_batch_size
        check(is_count(size), "train_batch_size", "an integer >= 1", size)
        check_model(self.model)
        optimizer = self.optimizer
        check(isinstance(optimizer, Mapping), "optimizer", "a dict {'type': ...}", optimizer)


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How policies run."""

    framework: str = "tf2"  # traced functions; "tf": graph mode, where no policy class is named
    eager_tracing: bool = True  # False: untraced, for a debugger
    eager_max_retraces: int | None = 20  # of each function; more are an error; None: no limit
    inference: str = "auto"  # acting through "tf" or "onnx"; "auto": onnx where it agrees with tf
    jit_compile: bool | str = "auto"  # learning compiled by XLA
    tf_session_args: Mapping[str, Any] = field(
        default_factory=lambda: {
            "intra_op_parallelism_threads": 2,
            "inter_op_parallelism_threads": 2,
            "gpu_options": {"allow_growth": True},
            "log_device_placement": False,
            "device_count": {"CPU": 1},
            "allow_soft_placement": True,
        }
    )  # of sessions in graph mode: fields of tf.compat.v1.ConfigProto
    local_tf_session_args: Mapping[str, Any] = field(default_factory=dict)  # on top, this process

    def __post_init__(self) -> None:
        frameworks = ("tf", "tf2")
        check(self.framework in frameworks, "framework", f"one of {frameworks}", self.framework)
        for name in ("tf_session_args", "local_tf_session_args"):
            value = getattr(self, name)
            check(isinstance(value, Mapping), name, "a dict of ConfigProto's fields", value)
        check_bools(self, "eager_tracing")
        limit = self.eager_max_retraces
        valid = limit is None or is_count(limit, 0)
        check(valid, "eager_max_retraces", "None or an integer >= 0", limit)
        runtimes = ("auto", "tf", "onnx")
        check(self.inference in runtimes, "inference", f"one of {runtimes}", self.inference)
        jit = self.jit_compile
        check(jit in (True, False, "auto"), "jit_compile", "True, False or 'auto'", jit)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What hardware is used."""

    num_gpus: float = 0  # 1: the learner is on a GPU, if there is one

    def __post_init__(self) -> None:
        rule = "0 or 1 (a learner uses one GPU at most), or a share between"
        valid = is_number(self.num_gpus) and 0 <= self.num_gpus <= 1
        check(valid, "num_gpus", rule, self.num_gpus)


@dataclass(frozen=True, kw_only=True)
class Exploration:
    """Whether actions are sampled or greedy, and how sampling goes."""

    explore: bool = True
    exploration_config: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "StochasticSampling"}
    )

    def __post_init__(self) -> None:
        check_bools(self, "explore")
        given = self.exploration_config
        check(isinstance(given, Mapping), "exploration_config", "a dict {'type': ...}", given)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How policies are evaluated, on environments of their own."""

    evaluation_interval: int | None = None  # training iterations; None: only by `evaluate()`
    evaluation_duration: int = 10  # episodes, or time steps
    evaluation_duration_unit: str = "episodes"  # or "timesteps"
    evaluation_config: Mapping[str, Any] | None = None  # overrides, e.g. {"explore": False}

    def __post_init__(self) -> None:
        interval, duration = self.evaluation_interval, self.evaluation_duration
        valid = interval is None or is_count(interval)
        check(valid, "evaluation_interval", "None or an integer >= 1", interval)
        check(is_count(duration), "evaluation_duration", "an integer >= 1", duration)
        unit, units = self.evaluation_duration_unit, ("episodes", "timesteps")
        check(unit in units, "evaluation_duration_unit", f"one of {units}", unit)
        config = self.evaluation_config
        valid = config is None or isinstance(config, Mapping)
        check(valid, "evaluation_config", "None or a dict of overrides", config)


@dataclass(frozen=True, kw_only=True)
class Debugging:
    """What makes runs repeatable and visible."""

    seed: int | None = None  # of everything; None: drawn anew
    log_level: str = "WARN"  # of the logger "tfpolicies"

    def __post_init__(self) -> None:
        check(self.seed is None or is_count(self.seed, 0), "seed", "None or an int >= 0", self.seed)
        levels = ("DEBUG", "INFO", "WARN", "ERROR")
        check(self.log_level in levels, "log_level", f"one of {levels}", self.log_level)


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What `train()` reports, and how long one iteration is."""

    metrics_num_episodes_for_smoothing: int = 100  # episodes of the mean return
    min_time_s_per_iteration: float | None = None  # seconds
    min_sample_timesteps_per_iteration: int = 0  # environment steps

    def __post_init__(self) -> None:
        episodes = self.metrics_num_episodes_for_smoothing
        check(is_count(episodes), "metrics_num_episodes_for_smoothing", "an int >= 1", episodes)
        seconds = self.min_time_s_per_iteration
        valid = seconds is None or (is_number(seconds) and seconds >= 0)
        check(valid, "min_time_s_per_iteration", "None or a number >= 0", seconds)
        steps = self.min_sample_timesteps_per_iteration
        check(is_count(steps, 0), "min_sample_timesteps_per_iteration", "an int >= 0", steps)


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """What happens at a checkpoint."""

    new_episodes_at_checkpoint: bool = False  # start new episodes, so that a resumed run is equal
    export_native_model_files: bool = False  # a SavedModel beside each checkpoint of a policy

    def __post_init__(self) -> None:
        check_bools(self, "new_episodes_at_checkpoint", "export_native_model_files")


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Code of the user that is called at the documented moments."""

    callbacks: Callable[[], Any] | None = None  # a DefaultCallbacks subclass

    def __post_init__(self) -> None:
        made = self.callbacks
        check(made is None or callable(made), "callbacks", "a DefaultCallbacks subclass", made)


@dataclass(frozen=True, kw_only=True)
class Experimental:
    """What few policy classes need."""

    _tf_policy_handles_more_than_one_loss: bool = False  # `loss` and `optimizer` may return lists

    def __post_init__(self) -> None:
        check_bools(self, "_tf_policy_handles_more_than_one_loss")
