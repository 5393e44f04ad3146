"""The workers of a run: one in this process, and as many others as the config asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import gymnasium as gym

from tfpolicies.batch.multi_agent_batch import MultiAgentBatch
from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.rollout_worker import RolloutWorker


class WorkerSet:
    """A worker in this process, which learns, and those that sample for it.

    Args:
        config: of all workers.
        default_policy_class: the class of policies that name none.
        env_creator: as a `RolloutWorker` takes it.
        validate_env: likewise.
        num_workers: how many others; `config.num_rollout_workers` by default.
        spaces: as a `RolloutWorker` takes them.
    """

    def __init__(
        self,
        *,
        config: AlgorithmConfig,
        default_policy_class: type[Policy] | None = None,
        env_creator: Callable[..., Any] | None = None,
        validate_env: Callable[..., None] | None = None,
        num_workers: int | None = None,
        spaces: Mapping[str, tuple[gym.Space, gym.Space]] | None = None,
    ) -> None:
        self.config = config
        self._local = RolloutWorker(
            env_creator=env_creator,
            validate_env=validate_env,
            config=_of_this_process(config),
            num_workers=num_workers,
            spaces=spaces,
            default_policy_class=default_policy_class,
        )

    def local_worker(self) -> RolloutWorker:
        """Returns the worker of this process."""
        return self._local

    def foreach_worker(
        self, func: Callable[[RolloutWorker], Any], local_worker: bool = True
    ) -> list[Any]:
        """Returns `func(worker)` for each worker.

        Args:
            func: called in the worker's process.
            local_worker: whether the worker of this process is one of them.
        """
        return [func(self._local)] if local_worker else []

    def sample(self) -> list[SampleBatch | MultiAgentBatch]:
        """Returns a batch of each worker that samples."""
        return [self._local.sample()]

    def get_metrics(self) -> list[RolloutMetrics]:
        """Returns the metrics of episodes that ended in any worker since the last call."""
        return self._local.get_metrics()

    def add_policy(self, policy_id: str, *args: Any, **kwargs: Any) -> Policy:
        """Adds a policy to all workers, or to none; see `RolloutWorker.add_policy`.

        Returns:
            The policy of this process.
        """
        return self._local.add_policy(policy_id, *args, **kwargs)

    def remove_policy(self, policy_id: str, **kwargs: Any) -> None:
        """Removes a policy from all workers; see `RolloutWorker.remove_policy`."""
        self._local.remove_policy(policy_id=policy_id, **kwargs)

    def sync_weights(
        self,
        policies: Collection[str] | None = None,
        global_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Gives all workers the weights and counters of this process's worker."""
        del policies
        if global_vars is not None:
            self._local.set_global_vars(global_vars)

    def sync_filters(self) -> None:
        """Lets what all workers observed take effect in all of them."""
        self._local.flush_filters()

    def stop(self) -> None:
        """Stops all workers; may be called again."""
        self._local.stop()


def _of_this_process(config: AlgorithmConfig) -> AlgorithmConfig:
    """Returns the config of the local worker, whose sessions may have settings of their own."""
    if not config.local_tf_session_args:
        return config
    given = config.copy(copy_frozen=False)
    given.framework(tf_session_args=config.local_tf_session_args)
    config.freeze()
    return given
