"""Settings that ported scripts name, but which have one meaning here: taken at that value alone.

They are no part of a config's sections, `to_dict()` or checkpoints, since they cannot differ; they
can be read (`config.render_env`), and set to what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tfpolicies.errors import ConfigError


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


_NO_OFFLINE = (
    "batches come from environments, and are not read from or written to files; use "
    "`RolloutWorker.sample()` to collect them, and `policy.learn_on_batch` to learn from your own"
)
_NO_LEARNERS = "the learner runs in this process; put it on a GPU by num_gpus=1"
_NO_NEW_STACK = (
    "there is one stack, with policies and rollout workers; give the network by training(model=...)"
)
_NO_REMOTE_ENVS = (
    "environments run inside their worker; use num_envs_per_worker, or num_rollout_workers for "
    "more processes"
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

CONSTANTS: Mapping[str, Constant] = {
    # environment
    "render_env": Constant(
        "environment", False, "make the environment with env_config={'render_mode': ...}"
    ),
    "is_atari": Constant(
        "environment",
        None,
        "games are treated like all environments; wrap them in "
        "gymnasium.wrappers.AtariPreprocessing",
        (False,),
    ),
    "auto_wrap_old_gym_envs": Constant(
        "environment", True, "environments have Gymnasium's API; wrap others yourself", (False,)
    ),
    # rollouts
    "sample_async": Constant(
        "rollouts", False, "workers sample without threads; use num_rollout_workers for more"
    ),
    "enable_tf1_exec_eagerly": Constant(
        "rollouts", False, "framework('tf') is graph mode; use 'tf2' with eager_tracing=False"
    ),
    "horizon": Constant("rollouts", None, _NO_HORIZON),
    "soft_horizon": Constant("rollouts", False, _NO_HORIZON),
    "no_done_at_end": Constant("rollouts", False, _NO_HORIZON),
    "preprocessor_pref": Constant(
        "rollouts",
        "deepmind",
        f"{_IN_MODEL}; wrap games in gymnasium.wrappers.AtariPreprocessing ('rllib' and None were "
        "the other choices)",
    ),
    "remote_worker_envs": Constant("rollouts", False, _NO_REMOTE_ENVS),
    "remote_env_batch_wait_ms": Constant("rollouts", 0, _NO_REMOTE_ENVS),
    "sample_collector": Constant(
        "rollouts", None, "columns are collected in arrays; change batches in on_sample_end"
    ),
    "env_runner_cls": Constant("rollouts", None, f"{_NO_NEW_STACK}: `RolloutWorker` samples"),
    "env_to_module_connector": Constant("rollouts", None, _OWN_CONNECTORS),
    "module_to_env_connector": Constant("rollouts", None, _OWN_CONNECTORS),
    "synchronize_filters": Constant(
        "rollouts", True, "use update_worker_filter_stats and use_worker_filter_stats"
    ),
    # evaluation
    "enable_async_evaluation": Constant(
        "evaluation", False, "use evaluation_parallel_to_training=True"
    ),
    "custom_async_evaluation_function": Constant(
        "evaluation", None, "use custom_evaluation_function"
    ),
    "off_policy_estimation_methods": Constant("evaluation", {}, _NO_OPE),
    "ope_split_batch_by_episode": Constant("evaluation", True, _NO_OPE),
    # debugging
    "logger_creator": Constant("debugging", None, _OWN_LOGGER),
    "logger_config": Constant("debugging", None, _OWN_LOGGER, ({},)),
    "worker_cls": Constant("debugging", None, "change what a worker does by `callbacks`"),
    # resources
    "_fake_gpus": Constant("resources", False, "use num_gpus=0 where there is none"),
    "num_learner_workers": Constant("resources", 0, _NO_LEARNERS),
    "num_cpus_per_learner_worker": Constant("resources", 1, _NO_LEARNERS),
    "num_gpus_per_learner_worker": Constant("resources", 0, _NO_LEARNERS),
    "local_gpu_idx": Constant("resources", 0, "choose GPUs by CUDA_VISIBLE_DEVICES"),
    # python_environment
    "extra_python_environs_for_driver": Constant(
        "python_environment", {}, "the variables of this process are yours: set them in os.environ"
    ),
    # offline_data
    "input_": Constant("offline_data", "sampler", _NO_OFFLINE),
    "input_config": Constant("offline_data", {}, _NO_OFFLINE),
    "actions_in_input_normalized": Constant("offline_data", False, _NO_OFFLINE),
    "postprocess_inputs": Constant("offline_data", False, _NO_OFFLINE),
    "shuffle_buffer_size": Constant("offline_data", 0, _NO_OFFLINE),
    "output": Constant("offline_data", None, _NO_OFFLINE),
    "output_config": Constant("offline_data", {}, _NO_OFFLINE),
    "output_compress_columns": Constant("offline_data", ["obs", "new_obs"], _NO_OFFLINE),
    "output_max_file_size": Constant("offline_data", 64 * 1024**2, _NO_OFFLINE),
    "offline_sampling": Constant("offline_data", False, _NO_OFFLINE),
    # experimental
    "_disable_preprocessor_api": Constant("experimental", False, _IN_MODEL, (True,)),
    "_disable_execution_plan_api": Constant(
        "experimental", True, "override `training_step`, which is what takes its place"
    ),
    "_disable_action_flattening": Constant(
        "experimental", False, "actions are nested like their space", (True,)
    ),
    "_disable_initialize_loss_from_dummy_batch": Constant(
        "experimental", False, "functions are traced when they are first needed", (True,)
    ),
    "_enable_new_api_stack": Constant("experimental", False, _NO_NEW_STACK),
    "simple_optimizer": Constant(
        "experimental", False, "there is one way to learn: in one compiled call", (True,)
    ),
    # newer RLlib's switches for its other stack
    "_enable_learner_api": Constant("training", False, _NO_NEW_STACK),
    "learner_class": Constant("training", None, _NO_NEW_STACK),
    "learner_connector": Constant("training", None, _NO_NEW_STACK),
    "rl_module_spec": Constant("rl_module", None, _NO_NEW_STACK),
    "_enable_rl_module_api": Constant("rl_module", False, _NO_NEW_STACK),
    "enable_rl_module_and_learner": Constant("api_stack", False, _NO_NEW_STACK),
    "enable_env_runner_and_connector_v2": Constant("api_stack", False, _NO_NEW_STACK),
}
"""By name."""


def require_constant(name: str, value: Any) -> None:
    """Raises a `ConfigError` unless a constant setting is given its value, or a harmless one."""
    constant = CONSTANTS[name]
    if any(_same(value, accepted) for accepted in (constant.value, *constant.harmless)):
        return
    raise ConfigError(f"{name} must be {constant.value!r} here, got {value!r}: {constant.why}.")


def _same(value: Any, accepted: Any) -> bool:
    kinds = {type(value), type(accepted)}
    return value is accepted or ((len(kinds) == 1 or kinds == {int, float}) and value == accepted)
