"""Settings under two names: older and newer ones of RLlib, and those of its dict configs."""

from __future__ import annotations

_LATER = {
    "num_env_runners": "num_rollout_workers",
    "num_envs_per_env_runner": "num_envs_per_worker",
    "num_cpus_per_env_runner": "num_cpus_per_worker",
    "num_gpus_per_env_runner": "num_gpus_per_worker",
    "custom_resources_per_env_runner": "custom_resources_per_worker",
    "num_cpus_for_main_process": "num_cpus_for_local_worker",
    "validate_env_runners_after_construction": "validate_workers_after_construction",
    "max_requests_in_flight_per_env_runner": "max_requests_in_flight_per_sampler_worker",
    "evaluation_num_env_runners": "evaluation_num_workers",
    "restart_failed_env_runners": "recreate_failed_workers",
    "recreate_failed_env_runners": "recreate_failed_workers",
    "ignore_env_runner_failures": "ignore_worker_failures",
    "max_num_env_runner_restarts": "max_num_worker_restarts",
    "delay_between_env_runner_restarts_s": "delay_between_worker_restarts_s",
    "num_consecutive_env_runner_failures_tolerance": "num_consecutive_worker_failures_tolerance",
    "env_runner_health_probe_timeout_s": "worker_health_probe_timeout_s",
    "env_runner_restore_timeout_s": "worker_restore_timeout_s",
    "num_learners": "num_learner_workers",
    "num_cpus_per_learner": "num_cpus_per_learner_worker",
    "num_gpus_per_learner": "num_gpus_per_learner_worker",
    "num_epochs": "num_sgd_iter",
    "minibatch_size": "sgd_minibatch_size",
}

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
}
"""Another name of a setting -> its name here."""
