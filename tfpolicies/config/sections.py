"""The sections about acting and learning: frozen, typed, and checked when they are made.

`run_sections.py` has those about how a run goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from tfpolicies.config.idioms import optimizer_settings
from tfpolicies.connectors import ActionConnector, AgentConnector, restore
from tfpolicies.errors import ConfigError
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.settings import model_settings
from tfpolicies.models.spaces import MASK


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


def check_counts(section: Any, least: int, *names: str) -> None:
    """Raises a `ConfigError` unless the settings of these names are integers >= `least`."""
    for name in names:
        value = getattr(section, name)
        check(is_count(value, least), name, f"an integer >= {least}", value)


def check_amounts(section: Any, *names: str, optional: bool = False) -> None:
    """Raises a `ConfigError` unless the settings of these names are numbers >= 0, or None."""
    for name in names:
        value = getattr(section, name)
        valid = (optional and value is None) or (is_number(value) and value >= 0)
        check(valid, name, "None or a number >= 0" if optional else "a number >= 0", value)


def check_model(model: Any) -> None:
    """Raises a `ConfigError` unless `model` is a dict of known settings with sound values."""
    rule = "a dict, a keras.Model or a factory of one"
    if isinstance(model, list | tuple):
        rule += " (layers go into keras.Sequential([...]))"
    elif isinstance(model, str):
        rule += " (a file is read by keras.models.load_model)"
    check(isinstance(model, Mapping), "model", rule, model)
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
    action_mask_key: str = MASK  # of observations; only a custom model may have another one
    env_task_fn: Callable[..., Any] | None = None  # f(result, env, env_context) -> its next task

    def __post_init__(self) -> None:
        valid = self.env is None or isinstance(self.env, str) or callable(self.env)
        rule = "a name, 'package.module:Class', a class or creator of environments, or None"
        check(valid or hasattr(self.env, "reset"), "env", rule, self.env)
        check(isinstance(self.env_config, Mapping), "env_config", "a dict", self.env_config)
        for name in ("observation_space", "action_space"):
            space = getattr(self, name)
            valid = space is None or isinstance(space, gym.Space)
            check(valid, name, "None or a gymnasium space", space)
        check_bools(self, "normalize_actions", "clip_actions", "disable_env_checking")
        key = self.action_mask_key
        check(isinstance(key, str) and key != "", "action_mask_key", "a non-empty text", key)
        function, rule = self.env_task_fn, "None or a function (result, env, env_context) -> task"
        check(function is None or callable(function), "env_task_fn", rule, function)
        clip = self.clip_rewards
        valid = clip is None or isinstance(clip, bool) or (is_number(clip) and clip > 0)
        check(valid, "clip_rewards", "None, True, False or a number > 0", clip)


CONNECTORS: dict[str, Any] = {
    "agent_connectors": AgentConnector,
    "action_connectors": ActionConnector,
}
"""The settings that list connectors, and of which kind they are."""


def connector_state(name: str, kind: Any, given: Any) -> list[Any]:
    """Returns a connector as the JSON that a config and its checkpoints hold.

    Raises:
        ConfigError: if it is no connector of that kind, nor the state of one.
    """
    made = given
    if isinstance(given, list | tuple) and len(given) == 2:
        made = restore(given[0], given[1], kind)
    rule = f"a list of {kind.__name__} objects or of their states [name, arguments]"
    check(isinstance(made, kind), name, rule, given)
    return list(made.to_state())


def connector_states(name: str, kind: Any, listed: Any) -> list[list[Any]]:
    """Returns what `connector_state` does for each connector of a list.

    Raises:
        ConfigError: if it is no list of such connectors.
    """
    check(isinstance(listed, list | tuple), name, "a list of connectors", listed)
    return [connector_state(name, kind, given) for given in listed]


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
    agent_connectors: Sequence[Any] = ()  # connectors, or their states; each policy gets its own
    action_connectors: Sequence[Any] = ()  # the same for actions; policies may override both
    reward_filter: str = "NoFilter"  # or "MeanStdFilter": learned from at a running scale
    update_worker_filter_stats: bool = True  # workers get the statistics of all after a round
    use_worker_filter_stats: bool = True  # workers' statistics are merged into those of all
    enable_connectors: bool = True  # False: `agent_connectors`, `action_connectors` must be empty
    create_env_on_local_worker: bool = False  # also where remote workers sample
    validate_workers_after_construction: bool = True  # a worker that cannot be built is an error
    sampler_perf_stats_ema_coef: float | None = None  # of `sampler_perf`; None: means of all steps

    def __post_init__(self) -> None:
        check_counts(self, 0, "num_rollout_workers")
        check_counts(self, 1, "num_envs_per_worker")
        check_bools(self, "update_worker_filter_stats", "use_worker_filter_stats")
        check_bools(self, "enable_connectors", "create_env_on_local_worker")
        check_bools(self, "validate_workers_after_construction")
        length = self.rollout_fragment_length
        valid = length == "auto" or is_count(length)
        check(valid, "rollout_fragment_length", "an integer >= 1 or 'auto'", length)
        modes = ("truncate_episodes", "complete_episodes")
        check(self.batch_mode in modes, "batch_mode", f"one of {modes}", self.batch_mode)
        filters, chosen = ("NoFilter", *MEAN_STD_FILTERS), self.observation_filter
        check(chosen in filters, "observation_filter", f"one of {filters}", chosen)
        for name, kind in CONNECTORS.items():
            listed = getattr(self, name)
            object.__setattr__(self, name, tuple(connector_states(name, kind, listed)))
        scaled = self.reward_filter
        check(scaled in filters, "reward_filter", f"one of {filters}", scaled)
        compress = self.compress_observations
        check(
            compress in (True, False, "bulk"), "compress_observations", "a bool, 'bulk'", compress
        )
        coef = self.sampler_perf_stats_ema_coef
        valid = coef is None or (is_number(coef) and 0 < coef <= 1)
        check(valid, "sampler_perf_stats_ema_coef", "None or a number in (0, 1]", coef)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What all algorithms share about learning."""

    gamma: float = 0.99  # discount per environment step, in [0, 1]
    # step size of the optimizer, >= 0; or f(environment steps), or a Keras LearningRateSchedule
    lr: Any = 0.001
    lr_schedule: Any = None  # [[timestep, lr], ...], piecewise linear
    grad_clip: float | None = None  # > 0; None: no limit
    grad_clip_by: str = "global_norm"  # or "norm" (per variable), "value" (per entry)
    train_batch_size: int = 32  # rows of one training step
    model: Mapping[str, Any] = field(default_factory=lambda: dict(MODEL_DEFAULTS))
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # {"type": "adam", "epsilon": ...}
    max_requests_in_flight_per_sampler_worker: int = 2  # samples asked of a remote worker at once

    def __post_init__(self) -> None:
        check_unit_interval("gamma", self.gamma)
        changes = isinstance(self.lr, Mapping) or callable(self.lr)
        for name, given in (("lr", self.lr), ("optimizer", self.optimizer)):
            instead = optimizer_settings(given)
            if instead is not None:
                raise ConfigError(
                    f"{name} cannot be an optimizer object, since each policy has an optimizer of "
                    f"its own; got {type(given).__name__}(...). Write training({instead})."
                )
        rule = "a number >= 0, a function of environment steps or a Keras LearningRateSchedule"
        if isinstance(self.lr, list | tuple):
            rule += " ([[step, rate], ...] goes into lr_schedule)"
        check(changes or (is_number(self.lr) and self.lr >= 0), "lr", rule, self.lr)
        check_schedule("lr_schedule", self.lr_schedule)
        rule = "left out where lr is a schedule itself"
        check(not changes or self.lr_schedule is None, "lr_schedule", rule, self.lr_schedule)
        clip, by = self.grad_clip, self.grad_clip_by
        check(clip is None or (is_number(clip) and clip > 0), "grad_clip", "None or > 0", clip)
        ways = ("global_norm", "norm", "value")
        check(by in ways, "grad_clip_by", f"one of {ways}", by)
        size = self.train_batch_size
        check(is_count(size), "train_batch_size", "an integer >= 1", size)
        check_counts(self, 1, "max_requests_in_flight_per_sampler_worker")
        check_model(self.model)
        optimizer = self.optimizer
        check(isinstance(optimizer, Mapping), "optimizer", "a dict {'type': ...}", optimizer)


@dataclass(frozen=True, kw_only=True)
class Framework:
    """How policies run."""

    framework: str = "tf2"  # traced functions; "tf": graph mode, where no policy class is named
    eager_tracing: bool = True  # False: untraced, for a debugger
    eager_max_retraces: int | None = 20  # of each function; more are an error; None: no limit
    inference: str = "auto"  # acting through "tf", "onnx", or the faster one
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
        if self.framework is None:  # in ported scripts: whatever is the default
            object.__setattr__(self, "framework", "tf2")
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
