"""RLlib's settings as scripts write them, as data: names, methods, and those that cannot differ.

`Constant`s are settings with one meaning here: taken at that value alone. They are no part of a
config's sections, `to_dict()` or checkpoints; they can be read (`config.render_env`), and set to
what they are. `idioms.py` knows what other libraries call things.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfpolicies.errors import ConfigError
from tfpolicies.porting_tables import LATER_SETTINGS, codes, read_table

logger = logging.getLogger("tfpolicies")

_LATER = {row.names[0]: codes(row.here)[0] for row in read_table(LATER_SETTINGS)}

DICT_NAMES = {
    "lambda_": "lambda",
    "num_rollout_workers": "num_workers",
    "create_env_on_local_worker": "create_env_on_driver",
    "custom_evaluation_function": "custom_eval_function",
    "num_cpus_for_local_worker": "num_cpus_for_driver",
}
"""The names of settings in `to_dict()`, where they differ."""

ALIASES = {
    **{old: name for name, old in DICT_NAMES.items()},
    **_LATER,
    "framework_str": "framework",
    "input": "input_",
    "policy_model_config": "model",
    "optimization_config": "optimization",
    "alpha_lr": "entropy_lr",
}
"""Another name of a setting -> its name here."""

GROUPS: Mapping[str, Mapping[str, str]] = {
    "optimization": {
        "actor_learning_rate": "actor_lr",
        "critic_learning_rate": "critic_lr",
        "entropy_learning_rate": "entropy_lr",
    },
}
"""Dicts that are several settings: by name, the setting that each of its keys is."""

GUESTS: Mapping[str, tuple[str, ...]] = {
    "rollouts": (
        "restart_failed_sub_environments",
        "recreate_failed_workers",
        "ignore_worker_failures",
        "max_num_worker_restarts",
        "delay_between_worker_restarts_s",
        "num_consecutive_worker_failures_tolerance",
        "worker_health_probe_timeout_s",
        "worker_restore_timeout_s",
    ),
    "training": ("clip_actions",),
    "env_runners": (
        "explore",
        "exploration_config",
        "num_cpus_per_worker",
        "num_gpus_per_worker",
        "custom_resources_per_worker",
        "max_requests_in_flight_per_sampler_worker",
    ),
}
"""Settings of other sections that a method takes, because they were its own or became so later."""


class Constant(NamedTuple):
    """A setting that has the same value in all configs.

    Attributes:
        method: the fluent method that takes it.
        value: what it is.
        why: why it is nothing else, and what to do instead.
        harmless: further values that would change nothing.
    """

    method: str
    value: Any
    why: str
    harmless: tuple[Any, ...] = ()


_GONE = -1
"""What RLlib gives arguments that are deprecated, to see whether they were given."""

_NO_OFFLINE = (
    "batches come from environments, and are not read from or written to files; use "
    "`RolloutWorker.sample()` to collect them, and `policy.learn_on_batch` to learn from your own"
)
_NO_LEARNERS = "the learner runs in this process; put it on a GPU by num_gpus=1"
_NO_NEW_STACK = (
    "there is one stack, with policies and rollout workers; give the network by training(model=...)"
)
_NO_REMOTE_ENVS = (
    "env_processes=N spreads the num_envs_per_worker environments of a worker over N processes; "
    "or use num_rollout_workers"
)
_NO_OPE = (
    "off-policy estimates need offline data, and batches come from environments; evaluate in an "
    "environment"
)
_OWN_LOGGER = "log the results of `train()`, in a callback's on_train_result for example"
_NO_HORIZON = (
    "episodes end where the environment says; wrap it in gymnasium.wrappers.TimeLimit, whose "
    "truncated episodes are bootstrapped"
)
_OWN_CONNECTORS = "use agent_connectors and action_connectors"
_IN_MODEL = "the model preprocesses observations, whatever the environment"

_BY_METHOD: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "environment": {
        "render_env": (
            False,
            "make the environment with env_config={'render_mode': ...}",
            True,  # RLlib's viewer went with Gymnasium's, so that it shows nothing either
        ),
        "is_atari": (
            False,
            "games are treated like all environments; wrap them in "
            "gymnasium.wrappers.AtariPreprocessing",
            None,
        ),
        "auto_wrap_old_gym_envs": (
            True,
            "environments have Gymnasium's API; wrap others yourself",
            False,
        ),
    },
    "rollouts": {
        "sample_async": (False, "workers sample without threads; use num_rollout_workers for more"),
        "enable_tf1_exec_eagerly": (
            False,
            "framework('tf') is graph mode; use 'tf2' with eager_tracing=False",
        ),
        "horizon": (None, _NO_HORIZON),
        "soft_horizon": (False, _NO_HORIZON),
        "no_done_at_end": (False, _NO_HORIZON),
        "preprocessor_pref": (
            "deepmind",
            f"{_IN_MODEL}; wrap games in gymnasium.wrappers.AtariPreprocessing ('rllib' and None "
            "were the other choices)",
        ),
        "remote_worker_envs": (False, _NO_REMOTE_ENVS),
        "remote_env_batch_wait_ms": (0, _NO_REMOTE_ENVS),
        "sample_collector": (
            None,
            "columns are collected in arrays; change batches in on_sample_end",
        ),
        "env_runner_cls": (None, f"{_NO_NEW_STACK}: `RolloutWorker` samples"),
        "env_to_module_connector": (None, _OWN_CONNECTORS),
        "module_to_env_connector": (None, _OWN_CONNECTORS),
        "synchronize_filters": (True, "use update_worker_filter_stats and use_worker_filter_stats"),
    },
    "evaluation": {
        "enable_async_evaluation": (False, "use evaluation_parallel_to_training=True"),
        "custom_async_evaluation_function": (None, "use custom_evaluation_function"),
        "off_policy_estimation_methods": ({}, _NO_OPE),
        "ope_split_batch_by_episode": (True, _NO_OPE),
    },
    "debugging": {
        "logger_creator": (None, _OWN_LOGGER),
        "logger_config": (None, _OWN_LOGGER, {}),
        "worker_cls": (None, "change what a worker does by `callbacks`"),
    },
    "resources": {
        "_fake_gpus": (False, "use num_gpus=0 where there is none"),
        "num_learner_workers": (0, _NO_LEARNERS),
        "num_cpus_per_learner_worker": (1, _NO_LEARNERS),
        "num_gpus_per_learner_worker": (0, _NO_LEARNERS),
        "local_gpu_idx": (0, "choose GPUs by CUDA_VISIBLE_DEVICES"),
    },
    "python_environment": {
        "extra_python_environs_for_driver": (
            {},
            "the variables of this process are yours: set them in os.environ",
        ),
    },
    "offline_data": {
        "input_": ("sampler", _NO_OFFLINE),
        "input_config": ({}, _NO_OFFLINE),
        "actions_in_input_normalized": (False, _NO_OFFLINE),
        "postprocess_inputs": (False, _NO_OFFLINE),
        "shuffle_buffer_size": (0, _NO_OFFLINE),
        "output": (None, _NO_OFFLINE),
        "output_config": ({}, _NO_OFFLINE),
        "output_compress_columns": (["obs", "new_obs"], _NO_OFFLINE),
        "output_max_file_size": (64 * 1024**2, _NO_OFFLINE),
        "offline_sampling": (False, _NO_OFFLINE),
    },
    "experimental": {
        "_disable_preprocessor_api": (False, _IN_MODEL, True),
        "_disable_execution_plan_api": (
            True,
            "override `training_step`, which is what takes its place",
        ),
        "_disable_action_flattening": (False, "actions are nested like their space", True),
        "_disable_initialize_loss_from_dummy_batch": (
            False,
            "functions are traced when they are first needed",
            True,
        ),
        "_enable_new_api_stack": (False, _NO_NEW_STACK),
        "simple_optimizer": (False, "there is one way to learn: in one compiled call", True),
    },
    "multi_agent": {
        "algorithm_config_overrides_per_module": (
            _GONE,
            "there are no RLModules here; give policies={id: PolicySpec(config={...})}",
        ),
        "replay_mode": (
            _GONE,
            "rows are always replayed for each policy on its own; choose the buffer by "
            "training(replay_buffer_config={...})",
        ),
        "policy_map_cache": (
            _GONE,
            "use policy_map_capacity; policies that are not in memory lie in a private folder",
        ),
    },
    "training": {
        "_enable_learner_api": (False, _NO_NEW_STACK),
        "learner_class": (None, _NO_NEW_STACK),
        "learner_connector": (None, _NO_NEW_STACK),
        "_deterministic_loss": (False, "losses are computed with the noise of the policy's seed"),
        "_use_beta_distribution": (
            False,
            "actions are squashed Gaussians; give another distribution by "
            "model={'custom_action_dist': ...}",
        ),
    },
    "rl_module": {
        "rl_module_spec": (None, _NO_NEW_STACK),
        "_enable_rl_module_api": (False, _NO_NEW_STACK),
    },
    "api_stack": {
        "enable_rl_module_and_learner": (False, _NO_NEW_STACK),
        "enable_env_runner_and_connector_v2": (False, _NO_NEW_STACK),
    },
}
"""By method and name: the value, why it is nothing else, and further values that change nothing."""

CONSTANTS: Mapping[str, Constant] = {
    name: Constant(method, value, why, tuple(harmless))
    for method, constants in _BY_METHOD.items()
    for name, (value, why, *harmless) in constants.items()
}
"""By name."""


SAID: Mapping[str, str] = {"render_env": "shows nothing"}
"""What a line of the log says of values that change nothing, where that is no matter of course."""


def require_constant(name: str, value: Any) -> None:
    """Raises a `ConfigError` unless a constant setting is given its value, or a harmless one."""
    constant = CONSTANTS[name]
    if any(_same(value, accepted) for accepted in (constant.value, *constant.harmless)):
        if name in SAID and not _same(value, constant.value):
            logger.warning("%s=%r %s: %s.", name, value, SAID[name], constant.why)
        return
    if constant.value == _GONE:
        raise ConfigError(f"{name}={value!r} has been deprecated: {constant.why}.")
    raise ConfigError(f"{name} must be {constant.value!r} here, got {value!r}: {constant.why}.")


def _same(value: Any, accepted: Any) -> bool:
    kinds = {type(value), type(accepted)}
    return value is accepted or ((len(kinds) == 1 or kinds == {int, float}) and value == accepted)
