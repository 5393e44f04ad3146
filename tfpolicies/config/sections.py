"""Sections of settings for acting and learning: frozen, typed and validated dataclasses.

`run_sections.py` has the sections of run settings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from tfpolicies.base.acting_runtimes import ACTING_RUNTIMES
from tfpolicies.base.type_aliases import Setting
from tfpolicies.base.validators import (
    BOOL,
    DICT,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    POSITIVE_INT,
    POSITIVE_INT_OR_AUTO,
    Validator,
    function,
    int_at_least,
    is_number,
    is_one_of,
    is_schedule,
    one_of,
)
from tfpolicies.config.migration_hints import (
    describe_optimizer,
    normalize_schedule,
    suggest_learning_rate,
)
from tfpolicies.config.setting import Merge, Section, check, setting
from tfpolicies.connectors import ActionConnector, AgentConnector, Connector, restore
from tfpolicies.errors import ConfigError
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.model_config import complete_model_config
from tfpolicies.models.running_filter import FILTER_RULE, REWARD_FILTER_RULE
from tfpolicies.models.spaces import MASK

_SPACE = Validator(lambda x: isinstance(x, gym.Space), "a gymnasium space").or_none()
_ENV = Validator(
    lambda x: x is None or isinstance(x, str) or callable(x) or hasattr(x, "reset"),
    "a name, 'package.module:Class', an environment class or creator, or None",
)
_CLIP_REWARDS = Validator(
    lambda x: x is None or isinstance(x, bool) or POSITIVE.is_valid(x),
    "None, True, False or a number > 0",
)
_NON_EMPTY_STRING = Validator(lambda x: isinstance(x, str) and x != "", "a non-empty text")
_TASK_FN = function("a function (result, env, env_context) -> task").or_none()


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings(Section):
    """The environment."""

    env: Any = setting(None, _ENV)  # name, "package.module:Class", environment class or None
    env_config: Mapping[str, Any] = setting({}, DICT, merge=Merge.DEEP)  # for the env's creator
    observation_space: gym.Space[Any] | None = setting(None, _SPACE)  # None: the environment's
    action_space: gym.Space[Any] | None = setting(None, _SPACE)  # None: the environment's
    clip_rewards: bool | float | None = setting(
        None, _CLIP_REWARDS
    )  # True: their sign; x: to [-x, x]
    normalize_actions: bool = setting(True, BOOL)  # act in [-1, 1], mapped to the Box's bounds
    clip_actions: bool = setting(False, BOOL)  # if not normalised: to the Box's bounds
    disable_env_checking: bool = setting(False, BOOL)
    action_mask_key: str = setting(MASK, _NON_EMPTY_STRING)  # others only with a custom model
    env_task_fn: Callable[..., Any] | None = setting(None, _TASK_FN)  # returns the next task


CONNECTORS: dict[str, Any] = {
    "agent_connectors": AgentConnector,
    "action_connectors": ActionConnector,
}
"""Settings that are lists of connectors, and the classes of these."""


def encode_connector(name: str, connector_class: type[Connector], value: Any) -> list[Any]:
    """Returns the JSON state of a connector, as stored in configs and checkpoints.

    Raises:
        ConfigError: if it is neither a connector of that class nor its state.
    """
    is_state = isinstance(value, list | tuple) and len(value) == 2
    connector = restore(value[0], value[1], connector_class) if is_state else value
    rule = f"a list of {connector_class.__name__} objects or of their states [name, arguments]"
    check(isinstance(connector, connector_class), name, rule, value)
    return list(connector.to_state())


def encode_connectors(
    name: str, connector_class: type[Connector], values: Sequence[object]
) -> list[list[Any]]:
    """Returns the JSON states of a list of connectors; see `encode_connector`.

    Raises:
        ConfigError: if it is not a list of such connectors.
    """
    check(isinstance(values, list | tuple), name, "a list of connectors", values)
    return [encode_connector(name, connector_class, value) for value in values]


_BATCH_MODE = one_of("truncate_episodes", "complete_episodes")
_COMPRESSION = Validator(lambda x: is_one_of(x, True, False, "bulk"), "a bool, 'bulk'")
_FILTER = Validator(
    lambda x: FILTER_RULE.is_valid(x) or callable(x),
    f"{FILTER_RULE.description}, or f(shape) that returns a filter",
)
_EMA_COEFFICIENT = Validator(lambda x: is_number(x) and 0 < x <= 1, "a number in (0, 1]").or_none()


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Section):
    """Collection of experience."""

    num_rollout_workers: int = setting(0, int_at_least(0))  # 0: in this process
    num_envs_per_worker: int = setting(1, POSITIVE_INT)  # environments stepped together by a worker
    env_processes: int = setting(0, int_at_least(0))  # that run them; 0: in the worker's process
    rollout_fragment_length: int | str = setting(
        200, POSITIVE_INT_OR_AUTO
    )  # rows per env and sample()
    batch_mode: str = setting("truncate_episodes", _BATCH_MODE)
    compress_observations: bool | str = setting(False, _COMPRESSION)  # True: rows; "bulk": columns
    observation_filter: Any = setting("NoFilter", _FILTER)  # running statistics, or a custom filter
    agent_connectors: Sequence[Any] = ()  # connectors or their states; each policy gets a copy
    action_connectors: Sequence[Any] = ()  # for actions; policies may override both
    # scales training rewards by running statistics of rewards or ("ReturnStdFilter") returns
    reward_filter: str = setting("NoFilter", REWARD_FILTER_RULE)
    update_worker_filter_stats: bool = setting(True, BOOL)  # workers get the merged statistics
    use_worker_filter_stats: bool = setting(True, BOOL)  # workers' statistics are merged
    enable_connectors: bool = setting(True, BOOL)  # False: connector lists must be empty
    create_env_on_local_worker: bool = setting(False, BOOL)  # even with remote workers
    validate_workers_after_construction: bool = setting(True, BOOL)  # failures are errors
    sampler_perf_stats_ema_coef: float | None = setting(
        None, _EMA_COEFFICIENT
    )  # None: means of all steps

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, connector_class in CONNECTORS.items():
            states = encode_connectors(name, connector_class, getattr(self, name))
            object.__setattr__(self, name, tuple(states))


def _is_model(model: Setting) -> bool:
    """Returns whether a model is given as a dict; also checks its settings."""
    if isinstance(model, Mapping):
        complete_model_config(model)
    return isinstance(model, Mapping)


def _suggest_model(model: Setting) -> str:
    if isinstance(model, list | tuple):
        return " (layers go into keras.Sequential([...]))"
    return " (a file is read by keras.models.load_model)" if isinstance(model, str) else ""


def _normalize_model(model: Setting) -> Any:
    """Wraps a model or a model factory in a dict of settings."""
    is_model_or_factory = callable(model) and not isinstance(model, Mapping)
    return {"custom_model": model} if is_model_or_factory else model


SCHEDULE = Validator(
    is_schedule, "a list [[timestep, value], ...] with increasing timesteps"
).or_none()


def _is_schedule_or_function(rate: Setting) -> bool:
    """Returns whether a learning rate is a schedule or a function of the step."""
    return isinstance(rate, Mapping) or callable(rate)


_RATE = Validator(
    lambda x: _is_schedule_or_function(x) or NON_NEGATIVE.is_valid(x),
    "a number >= 0, a function of environment steps or a Keras LearningRateSchedule",
    suggest_learning_rate,
)
_LIMIT = Validator(POSITIVE.or_none().is_valid, "None or > 0")
_NORM = one_of("global_norm", "norm", "value")
_MODEL = Validator(_is_model, "a dict, a keras.Model or a factory of one", _suggest_model)
_DICT_WITH_TYPE = Validator(
    lambda x: DICT.is_valid(x) and isinstance(x.get("type"), Hashable),
    "a dict {'type': a name or a class, ...}",
)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Section):
    """Training settings shared by all algorithms."""

    gamma: float = setting(0.99, FRACTION)  # discount per environment step
    # number, f(environment steps) or a Keras LearningRateSchedule
    lr: Any = setting(0.001, _RATE, normalize=normalize_schedule)
    lr_schedule: Any = setting(None, SCHEDULE)  # [[timestep, lr], ...], piecewise linear
    grad_clip: float | None = setting(None, _LIMIT)  # None: no limit
    grad_clip_by: str = setting("global_norm", _NORM)  # all variables, each, each entry
    train_batch_size: int = setting(32, POSITIVE_INT)  # rows of one training step
    model: Mapping[str, Any] = setting(
        MODEL_DEFAULTS, _MODEL, merge=Merge.KEYS, normalize=_normalize_model
    )
    optimizer: Mapping[str, Any] = setting(
        {}, _DICT_WITH_TYPE, merge=Merge.KEYS
    )  # {"type": "adam", ...}
    max_requests_in_flight_per_sampler_worker: int = setting(2, POSITIVE_INT)  # parallel requests

    def __post_init__(self) -> None:
        for name, value in (("lr", self.lr), ("optimizer", self.optimizer)):
            suggestion = describe_optimizer(value)
            if suggestion is not None:
                raise ConfigError(
                    f"{name} cannot be an optimizer object, since each policy creates its own "
                    f"optimizer; got {type(value).__name__}(...). Write training({suggestion})."
                )
        super().__post_init__()
        rule = "left out if lr is a schedule itself"
        is_consistent = self.lr_schedule is None or not _is_schedule_or_function(self.lr)
        check(is_consistent, "lr_schedule", rule, self.lr_schedule)


_SESSION = Validator(DICT.is_valid, "a dict of ConfigProto fields")
_FRAMEWORK, _INFERENCE = one_of("tf", "tf2"), one_of("auto", *ACTING_RUNTIMES)
_JIT = Validator(lambda x: is_one_of(x, True, False, "auto"), "True, False or 'auto'")


@dataclass(frozen=True, kw_only=True)
class FrameworkSettings(Section):
    """Runtime of policies."""

    # "tf2": traced functions; "tf": graph mode, for policies without an explicit class
    framework: str = setting("tf2", _FRAMEWORK, normalize=lambda x: "tf2" if x is None else x)
    eager_tracing: bool = setting(True, BOOL)  # False: eager, for debugging
    eager_max_retraces: int | None = setting(20, int_at_least(0).or_none())  # per function
    inference: str = setting("auto", _INFERENCE)  # for acting; "auto": the faster one
    jit_compile: bool | str = setting("auto", _JIT)  # learning compiled by XLA
    tf_session_args: Mapping[str, Any] = setting(  # of sessions in graph mode
        {
            "intra_op_parallelism_threads": 2,
            "inter_op_parallelism_threads": 2,
            "gpu_options": {"allow_growth": True},
            "log_device_placement": False,
            "device_count": {"CPU": 1},
            "allow_soft_placement": True,
        },
        _SESSION,
        merge=Merge.KEYS,
    )
    # overrides in this process
    local_tf_session_args: Mapping[str, Any] = setting({}, _SESSION, merge=Merge.KEYS)


@dataclass(frozen=True, kw_only=True)
class ExplorationSettings(Section):
    """Exploration: whether and how actions are sampled."""

    explore: bool = setting(True, BOOL)
    exploration_config: Mapping[str, Any] = setting(
        {"type": "StochasticSampling"}, _DICT_WITH_TYPE, merge=Merge.TYPED
    )
