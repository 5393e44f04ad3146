"""Sections of settings for acting and learning: frozen, typed and validated dataclasses.

`run_sections.py` has the sections of run settings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from tfpolicies.config.idioms import described_schedule, optimizer_settings, rate_hint
from tfpolicies.config.setting import Merge, Section, check, setting
from tfpolicies.connectors import ActionConnector, AgentConnector, Connector, restore
from tfpolicies.errors import ConfigError
from tfpolicies.models.defaults import MODEL_DEFAULTS
from tfpolicies.models.running_filter import FILTER, REWARD_FILTER
from tfpolicies.models.settings import model_settings
from tfpolicies.models.spaces import MASK
from tfpolicies.rules import (
    AMOUNT,
    BOOL,
    COUNT,
    COUNT_OR_AUTO,
    DICT,
    POSITIVE,
    UNIT,
    Rule,
    count,
    function,
    is_number,
    is_one_of,
    is_schedule,
    one_of,
)
from tfpolicies.type_aliases import Setting
from tfpolicies.ways import WAYS

_SPACE = Rule(lambda x: isinstance(x, gym.Space), "a gymnasium space").or_none()
_ENV = Rule(
    lambda x: x is None or isinstance(x, str) or callable(x) or hasattr(x, "reset"),
    "a name, 'package.module:Class', an environment class or creator, or None",
)
_CLIP = Rule(
    lambda x: x is None or isinstance(x, bool) or POSITIVE.holds(x),
    "None, True, False or a number > 0",
)
_KEY = Rule(lambda x: isinstance(x, str) and x != "", "a non-empty text")
_TASK_FN = function("a function (result, env, env_context) -> task").or_none()


@dataclass(frozen=True, kw_only=True)
class Environment(Section):
    """The environment."""

    env: Any = setting(None, _ENV)  # name, "package.module:Class", environment class or None
    env_config: Mapping[str, Any] = setting({}, DICT, merge=Merge.DEEP)  # for the env's creator
    observation_space: gym.Space[Any] | None = setting(None, _SPACE)  # None: the environment's
    action_space: gym.Space[Any] | None = setting(None, _SPACE)  # None: the environment's
    clip_rewards: bool | float | None = setting(None, _CLIP)  # True: their sign; x: to [-x, x]
    normalize_actions: bool = setting(True, BOOL)  # act in [-1, 1], mapped to the Box's bounds
    clip_actions: bool = setting(False, BOOL)  # if not normalised: to the Box's bounds
    disable_env_checking: bool = setting(False, BOOL)
    action_mask_key: str = setting(MASK, _KEY)  # others only with a custom model
    env_task_fn: Callable[..., Any] | None = setting(None, _TASK_FN)  # returns the next task


CONNECTORS: dict[str, Any] = {
    "agent_connectors": AgentConnector,
    "action_connectors": ActionConnector,
}
"""Settings that are lists of connectors, and the classes of these."""


def connector_state(name: str, kind: type[Connector], given: Any) -> list[Any]:
    """Returns the JSON state of a connector, as stored in configs and checkpoints.

    Raises:
        ConfigError: if it is neither a connector of that class nor its state.
    """
    is_state = isinstance(given, list | tuple) and len(given) == 2
    made = restore(given[0], given[1], kind) if is_state else given
    rule = f"a list of {kind.__name__} objects or of their states [name, arguments]"
    check(isinstance(made, kind), name, rule, given)
    return list(made.to_state())


def connector_states(name: str, kind: type[Connector], listed: Sequence[object]) -> list[list[Any]]:
    """Returns the JSON states of a list of connectors; see `connector_state`.

    Raises:
        ConfigError: if it is not a list of such connectors.
    """
    check(isinstance(listed, list | tuple), name, "a list of connectors", listed)
    return [connector_state(name, kind, given) for given in listed]


_BATCH_MODE = one_of("truncate_episodes", "complete_episodes")
_COMPRESSION = Rule(lambda x: is_one_of(x, True, False, "bulk"), "a bool, 'bulk'")
_FILTER = Rule(
    lambda x: FILTER.holds(x) or callable(x), f"{FILTER.words}, or f(shape) that returns a filter"
)
_COEF = Rule(lambda x: is_number(x) and 0 < x <= 1, "a number in (0, 1]").or_none()


@dataclass(frozen=True, kw_only=True)
class Rollouts(Section):
    """Collection of experience."""

    num_rollout_workers: int = setting(0, count(0))  # 0: in this process
    num_envs_per_worker: int = setting(1, COUNT)  # environments stepped together by a worker
    env_processes: int = setting(0, count(0))  # that run them; 0: in the worker's process
    rollout_fragment_length: int | str = setting(200, COUNT_OR_AUTO)  # rows per env and sample()
    batch_mode: str = setting("truncate_episodes", _BATCH_MODE)
    compress_observations: bool | str = setting(False, _COMPRESSION)  # True: rows; "bulk": columns
    observation_filter: Any = setting("NoFilter", _FILTER)  # running statistics, or a custom filter
    agent_connectors: Sequence[Any] = ()  # connectors or their states; each policy gets a copy
    action_connectors: Sequence[Any] = ()  # for actions; policies may override both
    # scales training rewards by running statistics of rewards or ("ReturnStdFilter") returns
    reward_filter: str = setting("NoFilter", REWARD_FILTER)
    update_worker_filter_stats: bool = setting(True, BOOL)  # workers get the merged statistics
    use_worker_filter_stats: bool = setting(True, BOOL)  # workers' statistics are merged
    enable_connectors: bool = setting(True, BOOL)  # False: connector lists must be empty
    create_env_on_local_worker: bool = setting(False, BOOL)  # even with remote workers
    validate_workers_after_construction: bool = setting(True, BOOL)  # failures are errors
    sampler_perf_stats_ema_coef: float | None = setting(None, _COEF)  # None: means of all steps

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in CONNECTORS.items():
            states = connector_states(name, kind, getattr(self, name))
            object.__setattr__(self, name, tuple(states))


def _is_model(model: Setting) -> bool:
    """Returns whether a model is given as a dict; also checks its settings."""
    if isinstance(model, Mapping):
        model_settings(model)
    return isinstance(model, Mapping)


def _model_hint(model: Setting) -> str:
    if isinstance(model, list | tuple):
        return " (layers go into keras.Sequential([...]))"
    return " (a file is read by keras.models.load_model)" if isinstance(model, str) else ""


def _as_model(given: Setting) -> Any:
    """Wraps a model or a model factory in a dict of settings."""
    is_own = callable(given) and not isinstance(given, Mapping)
    return {"custom_model": given} if is_own else given


SCHEDULE = Rule(is_schedule, "a list [[timestep, value], ...] with increasing timesteps").or_none()


def _changes(rate: Setting) -> bool:
    """Returns whether a learning rate is a schedule or a function of the step."""
    return isinstance(rate, Mapping) or callable(rate)


_RATE = Rule(
    lambda x: _changes(x) or AMOUNT.holds(x),
    "a number >= 0, a function of environment steps or a Keras LearningRateSchedule",
    rate_hint,
)
_LIMIT = Rule(POSITIVE.or_none().holds, "None or > 0")
_NORM = one_of("global_norm", "norm", "value")
_MODEL = Rule(_is_model, "a dict, a keras.Model or a factory of one", _model_hint)
_TYPED = Rule(
    lambda x: DICT.holds(x) and isinstance(x.get("type"), Hashable),
    "a dict {'type': a name or a class, ...}",
)


@dataclass(frozen=True, kw_only=True)
class Training(Section):
    """Training settings shared by all algorithms."""

    gamma: float = setting(0.99, UNIT)  # discount per environment step
    # number, f(environment steps) or a Keras LearningRateSchedule
    lr: Any = setting(0.001, _RATE, kept=described_schedule)
    lr_schedule: Any = setting(None, SCHEDULE)  # [[timestep, lr], ...], piecewise linear
    grad_clip: float | None = setting(None, _LIMIT)  # None: no limit
    grad_clip_by: str = setting("global_norm", _NORM)  # all variables, each, each entry
    train_batch_size: int = setting(32, COUNT)  # rows of one training step
    model: Mapping[str, Any] = setting(MODEL_DEFAULTS, _MODEL, merge=Merge.KEYS, kept=_as_model)
    optimizer: Mapping[str, Any] = setting({}, _TYPED, merge=Merge.KEYS)  # {"type": "adam", ...}
    max_requests_in_flight_per_sampler_worker: int = setting(2, COUNT)  # parallel requests

    def __post_init__(self) -> None:
        for name, given in (("lr", self.lr), ("optimizer", self.optimizer)):
            instead = optimizer_settings(given)
            if instead is not None:
                raise ConfigError(
                    f"{name} cannot be an optimizer object, since each policy creates its own "
                    f"optimizer; got {type(given).__name__}(...). Write training({instead})."
                )
        super().__post_init__()
        rule = "left out if lr is a schedule itself"
        fits = self.lr_schedule is None or not _changes(self.lr)
        check(fits, "lr_schedule", rule, self.lr_schedule)


_SESSION = Rule(DICT.holds, "a dict of ConfigProto fields")
_FRAMEWORK, _INFERENCE = one_of("tf", "tf2"), one_of("auto", *WAYS)
_JIT = Rule(lambda x: is_one_of(x, True, False, "auto"), "True, False or 'auto'")


@dataclass(frozen=True, kw_only=True)
class Framework(Section):
    """Runtime of policies."""

    # "tf2": traced functions; "tf": graph mode, for policies without an explicit class
    framework: str = setting("tf2", _FRAMEWORK, kept=lambda x: "tf2" if x is None else x)
    eager_tracing: bool = setting(True, BOOL)  # False: eager, for debugging
    eager_max_retraces: int | None = setting(20, count(0).or_none())  # per function
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
class Exploration(Section):
    """Exploration: whether and how actions are sampled."""

    explore: bool = setting(True, BOOL)
    exploration_config: Mapping[str, Any] = setting(
        {"type": "StochasticSampling"}, _TYPED, merge=Merge.TYPED
    )
