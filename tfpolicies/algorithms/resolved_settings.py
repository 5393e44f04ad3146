"""What every "auto" of a config became, in the config and in the line that a run starts with."""

from __future__ import annotations

from tfpolicies.algorithms.host import HostAlgorithm
from tfpolicies.reporting.console import counted


def record_resolved(algorithm: HostAlgorithm) -> None:
    """Records resolved settings in an algorithm's config, and prints them in one line."""
    config, worker = algorithm.config, algorithm.worker
    envs = algorithm.workers.num_envs()
    length = config.fragment_length(envs)
    config.record_resolved(rollout_fragment_length=length)
    policies = [worker.get_policy(), *worker.policy_map.values()]
    resolved = (each for each in policies if each is not None and each.driver.acting.inference)
    policy = next(resolved, None)  # the default one, or the first there is
    if policy is None:
        return
    inference = policy.driver.acting.inference
    config.record_resolved(inference=inference, jit_compile=policy.config["jit_compile"])
    if config.log_level != "ERROR":
        print(
            f"{type(algorithm).__name__}: acting through {inference}, learning through "
            f"{policy.driver.learning.compile_mode}, "
            f"{counted(envs, 'environment')} x {counted(length, 'step')} per sample."
        )
