"""The workers of a run: a local one, and remote ones if the config asks for them."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import gymnasium as gym

from tfpolicies.base.extensions import Extensible
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import overrides
from tfpolicies.config.migration_hints import describe_missing_attribute
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.distributed import worker_protocol
from tfpolicies.distributed.worker_protocol import EnvDescription, FilterDeltas, SampleResult
from tfpolicies.envs.env_factory import EnvContext
from tfpolicies.errors import ConfigError, UnsupportedMethodError
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.evaluation import play
from tfpolicies.rollout.experience_input import fit_filters
from tfpolicies.rollout.policy_changes import MappingAndTrainable, PolicyAddition, PolicyTransaction
from tfpolicies.rollout.rollout_worker import RolloutWorker
from tfpolicies.rollout.sampler import EvaluationResult
from tfpolicies.rollout.worker_policies import WorkerPolicies
from tfpolicies.storage.pickling import refuse_pickling

if TYPE_CHECKING:
    from tfpolicies.distributed.ray_workers import RayWorkers

_SHARE_OF_TIMEOUT = 0.9  # for playing in remote workers, so that results arrive in time


class WorkerSet(Extensible):
    """The local worker, which learns, and the workers that sample for it.

    With remote workers, the local one has no environments and does not sample, unless
    `create_env_on_local_worker` is set. Remote workers are Ray actors: in the cluster that this
    process is connected to, or else in a private one on this computer that ends with the last
    worker set. In a private cluster `num_cpus_per_worker` only sets the number of threads of a
    worker; no worker waits for CPUs.

    Args:
        config: of all workers.
        default_policy_class: the class of policies without a class in their spec.
        env_creator: as for `RolloutWorker`.
        validate_env: as for `RolloutWorker`.
        num_workers: number of remote workers; `config.num_rollout_workers` by default.
        spaces: as for `RolloutWorker`.

    Attributes:
        config: of all workers.
        on_recreated: called with the indices of workers that replaced failed ones.
        input_positions: by index, where remote workers continue to read recorded experience. They
            advance with each sample that arrives.

    Raises:
        ConfigError: if there are to be remote workers, but Ray is not installed.
        WorkerError: if remote workers cannot be started.
    """

    _describe_missing = staticmethod(describe_missing_attribute)

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
        self.on_recreated: Callable[[list[int]], None] = lambda worker_ids: None
        self.input_positions: dict[int, Any] = {}
        self._metrics: list[RolloutMetrics] = []
        self._filter_deltas: list[FilterDeltas] = []
        self._inference_only: set[str] = (
            set()
        )  # policies of which only inference weights were sent last
        self._sent_versions: dict[str, Any] = {}  # by policy id, the version that was sent last
        self._copied_versions: dict[str, Any] = {}  # by policy id, the version that was copied last
        self._remotes: RayWorkers | None = None
        count = config.num_rollout_workers if num_workers is None else num_workers
        arguments: dict[str, Any] = {
            "env_creator": env_creator,
            "validate_env": validate_env,
            "config": config,
            "num_workers": count,
            "spaces": spaces,
            "default_policy_class": default_policy_class,
        }
        description = None
        if count:
            self._remotes = _start_remote_workers(count, arguments, config, self._make_snapshot)
            description = next(iter(self._remotes.descriptions.values()))
            arguments["spaces"] = {**description.spaces, **(spaces or {})}
        arguments["config"] = _make_local_config(config)
        try:
            self._local = RolloutWorker(**arguments)
            self._description: EnvDescription = description or worker_protocol.describe_envs(
                self._local
            )
            self.sync_workers()
        except BaseException:
            if self._remotes is not None:
                self._remotes.stop()
            raise

    # -- workers ------------------------------------------------------------------------------

    def local_worker(self) -> RolloutWorker:
        """Returns the worker of this process."""
        return self._local

    def remote_workers(self) -> list[Any]:
        """Returns an empty list without remote workers; others cannot be returned.

        Raises:
            UnsupportedMethodError: if there are remote workers; it says how to call them.
        """
        if self._remotes is not None:
            raise UnsupportedMethodError(
                "remote_workers() cannot return remote workers: call "
                "workers.foreach_worker(lambda worker: worker.sample(), local_worker=False), with "
                "remote_worker_ids=[...] for some of them."
            )
        return []

    def num_remote_workers(self) -> int:
        """Returns the number of remote workers, including those that failed."""
        return 0 if self._remotes is None else self._remotes.num_workers

    def healthy_worker_ids(self) -> list[int]:
        """Returns the indices of the remote workers that work, from 1."""
        return [] if self._remotes is None else self._remotes.get_healthy_indices()

    def num_healthy_remote_workers(self) -> int:
        """Returns the number of remote workers that work."""
        return len(self.healthy_worker_ids())

    def num_remote_worker_restarts(self) -> int:
        """Returns the number of restarts of remote workers."""
        return 0 if self._remotes is None else self._remotes.num_restarts

    def num_in_flight_async_reqs(self) -> int:
        """Returns the number of requested samples that did not arrive yet."""
        return 0 if self._remotes is None else self._remotes.num_in_flight

    def num_envs(self) -> int:
        """Returns the number of environments per worker."""
        return self._description.num_envs or self.config.num_envs_per_worker

    def is_multi_agent(self) -> bool:
        """Returns whether the environments have several agents each."""
        return self._description.is_multi_agent

    def rows_per_sample(self) -> int:
        """Returns the number of rows of one sample.

        That is a fragment of all sampling environments, or the share of a train batch that each
        worker reads from recorded experience.
        """
        if not needs_environment(self.config.input_):
            workers = max(1, self.num_remote_workers())
            return -(-int(self.config.train_batch_size) // workers) * workers
        indices = range(1, self.num_remote_workers() + 1) or [0]
        envs = self.num_envs()
        return sum(self.config.get_fragment_length(envs, i) * envs for i in indices)

    # -- calling ------------------------------------------------------------------------------

    def foreach_worker(
        self,
        func: Callable[[RolloutWorker], Any],
        local_worker: bool = True,
        *,
        healthy_only: bool = True,
        timeout_seconds: float | None = None,
        remote_worker_ids: Collection[int] | None = None,
        return_obj_refs: bool = False,
    ) -> list[Any]:
        """Returns `func(worker)` for each worker: the local one first, then by index.

        Workers that died are ignored.

        Args:
            func: called in the worker's process.
            local_worker: whether to call the local worker.
            healthy_only: accepted; failed workers are never called.
            timeout_seconds: later results of remote workers are ignored.
            remote_worker_ids: only these remote workers; None for all.
            return_obj_refs: return Ray's references of the remote results immediately; `ray.get`
                waits for one, and raises the error of `func`.

        Raises:
            Exception: the error of `func` in a worker.
        """
        del healthy_only
        self._send_full_weights()  # before `func` may change them here
        results = [func(self._local)] if local_worker else []
        if self._remotes is not None:
            self._remotes.check_workers()
            if return_obj_refs:
                return results + self._remotes.get_references(func, remote_worker_ids)
            remote_results = self._remotes.call(
                func, indices=remote_worker_ids, timeout=timeout_seconds
            )
            results += remote_results.values()
        return results

    def foreach_worker_with_id(
        self, func: Callable[[int, RolloutWorker], Any], local_worker: bool = True, **options: Any
    ) -> list[Any]:
        """Returns `func(index, worker)` for each worker; the local one has the index 0.

        The arguments are those of `foreach_worker`.
        """
        return self.foreach_worker(
            lambda worker: func(worker.worker_index, worker), local_worker, **options
        )

    def foreach_policy(self, func: Callable[..., Any], local_worker: bool = True) -> list[Any]:
        """Returns `func(policy, policy_id)` for each policy of each worker, in one flat list.

        Args:
            func: called in the worker's process.
            local_worker: whether to call the local worker; it comes first.

        Raises:
            Exception: the error of `func` in a worker.
        """
        return self._foreach_worker_flat(
            operator.methodcaller("foreach_policy", func), local_worker
        )

    def foreach_policy_to_train(
        self, func: Callable[..., Any], local_worker: bool = True
    ) -> list[Any]:
        """Returns `func(policy, policy_id)` for each policy that is trained, of each worker.

        The arguments are those of `foreach_policy`.
        """
        return self._foreach_worker_flat(
            operator.methodcaller("foreach_policy_to_train", func), local_worker
        )

    def foreach_env(self, func: Callable[[Any], Any]) -> list[list[Any]]:
        """Returns `func(env)` for each environment, a list per worker; the local worker's is first.

        Args:
            func: called in the worker's process.

        Raises:
            Exception: the error of `func` in a worker.
        """
        return self.foreach_worker(operator.methodcaller("foreach_env", func))

    def foreach_env_with_context(self, func: Callable[[Any, EnvContext], Any]) -> list[list[Any]]:
        """Returns `func(env, env_context)` for each environment, as `foreach_env` does."""
        return self.foreach_worker(operator.methodcaller("foreach_env_with_context", func))

    def _foreach_worker_flat(
        self, func: Callable[[RolloutWorker], list[Any]], local_worker: bool
    ) -> list[Any]:
        return list(itertools.chain.from_iterable(self.foreach_worker(func, local_worker)))

    # -- sampling -----------------------------------------------------------------------------

    def sample(self) -> list[SampleBatch | MultiAgentBatch]:
        """Returns a batch of each worker that samples; remote workers sample in parallel.

        The sample of a worker that failed is lost; no counter and no metric includes it.

        Raises:
            WorkerError: if remote workers failed and the config does not tolerate it.
        """
        if self._remotes is None:
            return [self._local.sample()]
        return self._collect_results(self._remotes.sample(worker_protocol.sample_with_metrics))

    def sample_ready(self) -> list[SampleBatch | MultiAgentBatch]:
        """Returns the batches that are ready, at least one; remote workers continue sampling.

        Each remote worker always has `max_requests_in_flight_per_sampler_worker` pending batches,
        so that it samples while this process learns.

        Raises:
            WorkerError: as `sample`.
        """
        if self._remotes is None:
            return [self._local.sample()]
        in_flight = self.config.max_requests_in_flight_per_sampler_worker
        return self._collect_results(
            self._remotes.sample_ready(worker_protocol.sample_with_metrics, in_flight)
        )

    def _collect_results(self, results: list[SampleResult]) -> list[SampleBatch | MultiAgentBatch]:
        for result in results:
            self._metrics += result.metrics
            if result.input_position is not None:
                self.input_positions[result.worker_index] = result.input_position
            if result.filter_deltas and self.config.use_worker_filter_stats:
                self._filter_deltas.append(result.filter_deltas)
        self.notify_recreated()
        return [result.batch for result in results]

    def notify_recreated(self) -> None:
        """Calls `on_recreated` if workers were restarted since the last call."""
        recreated = [] if self._remotes is None else self._remotes.pop_recreated()
        if recreated:
            self.on_recreated(recreated)

    def get_metrics(self) -> list[RolloutMetrics]:
        """Returns the metrics of episodes that ended in any worker since the last call."""
        metrics, self._metrics = self._metrics, []
        return metrics + self._local.get_metrics()

    # -- policies -----------------------------------------------------------------------------

    def add_policy(
        self,
        policy_id: str,
        policy_cls: type[Policy] | None = None,
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> Policy:
        """Adds a policy to all workers, or to none; see `RolloutWorker.add_policy`.

        Returns:
            The policy of this process.

        Raises:
            ConfigError: also for a function that cannot be sent to remote workers.
            Exception: the error of a remote worker; no worker has the policy then.
        """
        policies = self._local.policy_map
        addition = PolicyAddition.from_arguments(policies, policy_id, policy_cls, policy, **kwargs)
        with PolicyTransaction() as transaction:
            return self.add_in_transaction(transaction, addition)

    def add_in_transaction(
        self, transaction: PolicyTransaction, addition: PolicyAddition
    ) -> Policy:
        """Adds a policy to all workers as part of a transaction.

        Returns:
            The policy of this process.

        Raises:
            PolicyExistsError: if there is a policy of its id; also a KeyError.
            ConfigError: for a function that cannot be sent to remote workers.
        """
        local, policy_id = self._local.policies, addition.policy_id
        if self._remotes is None:
            return local.add_in_transaction(transaction, addition)
        self._remotes.sync_registries()
        mapping_fn, policies_to_train = addition.policy_mapping_fn, addition.is_policy_to_train
        self._require_sendable(
            {"policy_mapping_fn": mapping_fn, "policies_to_train": policies_to_train}
        )
        addition = self._add_remote_spaces(addition)
        previous = local.mapping_and_trainable
        policy = local.add_in_transaction(transaction, addition)
        remote_addition = addition.with_state(worker_protocol.get_inference_state(policy))
        remotes = _RemotePolicies(self._remotes, local)
        transaction.add(remotes, remote_addition, previous)
        self._sent_versions[policy_id] = policy.driver.version
        return policy

    def _require_sendable(self, arguments: Mapping[str, Any]) -> None:
        if self._remotes is not None:
            self._remotes.require_sendable(arguments)

    def _add_remote_spaces(self, addition: PolicyAddition) -> PolicyAddition:
        """Completes an addition with the spaces of the remote workers' environments."""
        spec, healthy = addition.spec, self.healthy_worker_ids()
        if spec is None or self._local.environments is not None or self._remotes is None:
            return addition
        spaces = spec.observation_space, spec.action_space
        if None not in spaces or not healthy:
            return addition
        arguments = addition.policy_id, spec, addition.policy_mapping_fn
        results = self._remotes.call(
            worker_protocol.get_policy_spaces, *arguments, indices=healthy[:1]
        )
        observation_space, action_space = next(iter(results.values()), spaces)
        spec = replace(spec, observation_space=observation_space, action_space=action_space)
        return replace(addition, spec=spec)

    def remove_policy(self, policy_id: str, **kwargs: Any) -> None:
        """Removes a policy from all workers; see `RolloutWorker.remove_policy`.

        Raises:
            UnknownPolicyError: if there is none of this id; nothing is changed then.
            UsageError: if the mapping function maps an agent to it; nothing is changed then.
        """
        self._require_sendable(kwargs)
        self.require_unmapped(policy_id, kwargs.get("policy_mapping_fn"))
        self._local.remove_policy(policy_id=policy_id, **kwargs)
        self._sent_versions.pop(policy_id, None)
        self._copied_versions.pop(policy_id, None)
        if self._remotes is not None:
            mapping_and_trainable = self._local.policies.mapping_and_trainable
            self._remotes.call(worker_protocol.remove_policy, policy_id, mapping_and_trainable)

    def require_unmapped(
        self, policy_id: str, policy_mapping_fn: Callable[..., str] | None = None
    ) -> None:
        """Checks in all workers that no agent is mapped to a policy.

        Raises:
            ConfigError: for a function that cannot be sent to remote workers.
            UsageError: if an agent is mapped to it.
        """
        self._require_sendable({"policy_mapping_fn": policy_mapping_fn})
        self.foreach_worker(
            lambda worker: worker.policies.require_unmapped(policy_id, policy_mapping_fn)
        )

    def set_mapping_and_trainable(
        self, policy_mapping_fn: Callable[..., str], policies_to_train: Callable[..., bool] | None
    ) -> None:
        """Sets the mapping function and the trained policies in all workers.

        Args:
            policy_mapping_fn: `f(agent_id, episode, worker, **kwargs)`, returns a policy id.
            policies_to_train: `f(policy_id, batch=None)`; None for all.
        """
        mapping_and_trainable = MappingAndTrainable(policy_mapping_fn, policies_to_train)
        self._require_sendable(mapping_and_trainable._asdict())
        self.foreach_worker(
            lambda worker: worker.policies.set_mapping_and_trainable(mapping_and_trainable)
        )

    # -- synchronization ----------------------------------------------------------------------

    def sync_weights(
        self,
        policies: Collection[str] | None = None,
        global_vars: Mapping[str, Any] | None = None,
        *,
        to_worker_indices: Collection[int] | None = None,
    ) -> None:
        """Copies weights and counters of the local worker to all workers.

        Weights of policies that did not change since the last call are not sent again, and each
        version is sent once for all workers. The call does not wait: workers apply the weights
        before later samples.

        Args:
            policies: the ids of the policies; None for all.
            global_vars: the counters of the run, also for the local worker.
            to_worker_indices: only these remote workers, from 1; None for all.
        """
        if global_vars is not None:
            self._local.set_global_vars(global_vars)
        if self._remotes is None:
            return
        local, changed = self._local, []
        for policy_id in local.policy_map if policies is None else policies:
            version = self._get_version(policy_id)
            if policy_id in local.policy_map and (
                version is None or version != self._sent_versions.get(policy_id)
            ):
                changed.append(policy_id)
        if to_worker_indices is None:
            self._sent_versions |= {
                policy_id: self._get_version(policy_id) for policy_id in changed
            }
        if changed or global_vars is not None:
            inference_only = not overrides(local.callbacks, "on_postprocess_trajectory")
            update = worker_protocol.make_weights_update(
                local, changed, global_vars, inference_only=inference_only
            )
            self._remotes.call_without_waiting(
                worker_protocol.apply_weights_update, update, indices=to_worker_indices
            )
            self._inference_only |= update.partial

    def _send_full_weights(self) -> None:
        """Sends the weights that sampling did not need, before user code runs in remote workers."""
        policy_ids, self._inference_only = self._inference_only & {*self._local.policy_map}, set()
        if policy_ids and self._remotes is not None:
            self._remotes.call_without_waiting(
                worker_protocol.apply_weights_update,
                worker_protocol.make_weights_update(self._local, policy_ids),
            )

    def sync_filters(self) -> None:
        """Applies the filter statistics of all workers in all workers.

        Without `use_worker_filter_stats` the statistics of remote workers are ignored, and without
        `update_worker_filter_stats` remote workers keep their own.
        """
        self._local.observation_filters.flush()
        if self._remotes is None:
            return
        deltas, self._filter_deltas = self._filter_deltas, []
        synced_ids = {
            pid for pid, version in self._sent_versions.items() if version == self._get_version(pid)
        }
        merged_ids: set[str] = set()
        for delta in deltas:
            merged_ids |= worker_protocol.merge_filter_deltas(self._local, delta)
        if self.config.update_worker_filter_stats and merged_ids:
            self._remotes.call_without_waiting(
                worker_protocol.sync_filters, worker_protocol.copy_filters(self._local, merged_ids)
            )
            self._sent_versions.update(
                {pid: self._get_version(pid) for pid in merged_ids & synced_ids}
            )

    def fit_filters(self) -> None:
        """Fits filters without observations to recorded experience, and copies them to all."""
        if fit_filters(self._local):
            self.sync_workers()

    def _get_version(self, policy_id: str) -> Any:
        policies = self._local.policy_map
        return policies.get_handle(policy_id).driver.version if policy_id in policies else None

    def copy_weights_from(self, source: RolloutWorker) -> None:
        """Copies the acting state of a worker of another set to the policies of all workers.

        Policies that did not change since the last call are skipped.

        Args:
            source: the source; policies that only it has are ignored.
        """
        local, changed = self._local, []
        for policy_id in source.policy_map:
            if policy_id not in local.policy_map:
                continue
            policy = source.policy_map.get_handle(policy_id)
            local_policy: Any = local.policy_map.get_handle(policy_id)
            version = policy.driver.version
            if version is None or self._copied_versions.get(policy_id) != version:
                local_policy.driver.copy_from(source.policy_map[policy_id])
                source_filters = worker_protocol.get_custom_filter(policy)
                for name, local_filter in worker_protocol.get_custom_filter(local_policy).items():
                    local_filter.sync(source_filters[name])
                self._copied_versions[policy_id] = version
                changed.append(policy_id)
            local_policy.global_timestep = policy.global_timestep
        if self._remotes is not None and changed:
            update = worker_protocol.make_weights_update(
                local, changed, with_filters=True, inference_only=True
            )
            self._remotes.call_without_waiting(worker_protocol.apply_weights_update, update)
            self._inference_only |= update.partial

    def play(self, amount: int, *, by_episodes: bool) -> EvaluationResult | None:
        """Plays whole episodes: in the remote workers, each its share, or in the local worker.

        Args:
            amount: the number of episodes, or the minimum number of steps.
            by_episodes: whether `amount` counts episodes.

        Returns:
            The episodes; fewer than `amount` if a worker failed, or if
            `evaluation_sample_timeout_s` was too short (`is_cut`); None if no worker answered.
        """
        limit = self.config.evaluation_sample_timeout_s
        if self._remotes is None:
            return play(self._local, amount, by_episodes=by_episodes, seconds=limit)
        self._remotes.check_workers()
        healthy = self._remotes.get_healthy_indices()
        share, remainder = divmod(amount, len(healthy))
        shares = {index: share + (i < remainder) for i, index in enumerate(healthy)}
        seconds = None if limit is None else _SHARE_OF_TIMEOUT * limit
        call = worker_protocol.evaluate_share, shares, by_episodes, seconds
        results = self._remotes.sample(*call, timeout=limit)
        return functools.reduce(EvaluationResult.merge, results) if results else None

    def sync_workers(self, *, new_episodes: bool = False) -> None:
        """Makes all remote workers equal to the local one: policies, mapping, filters, counters.

        Args:
            new_episodes: whether they start new episodes.
        """
        if self._remotes is None:
            return
        self._sent_versions = {pid: self._get_version(pid) for pid in self._local.policy_map}
        episode_seed = self._remotes.num_restarts if new_episodes else None
        self._remotes.call_without_waiting(
            worker_protocol.restore_snapshot, self._make_snapshot(), episode_seed
        )

    def _make_snapshot(self) -> worker_protocol.WorkerSnapshot:
        return worker_protocol.make_snapshot(self._local, self.input_positions)

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self, "Pickle the algorithm, or its policies.")

    def stop(self) -> None:
        """Stops all workers; may be called again."""
        if self._remotes is not None:
            self._remotes.stop()
        self._local.stop()


class _RemotePolicies:
    """The policies of all remote workers, which are those of the local one.

    Args:
        remotes: the workers.
        local_policies: the policies of the local worker.
    """

    def __init__(self, remotes: RayWorkers, local_policies: WorkerPolicies) -> None:
        self._remotes = remotes
        self._local_policies = local_policies

    def apply(self, addition: PolicyAddition) -> None:
        """Adds a policy of the local worker by its state."""
        mapping_and_trainable = self._local_policies.mapping_and_trainable
        self._remotes.call(worker_protocol.add_policy, addition, mapping_and_trainable)

    def revert(self, policy_id: str, previous: MappingAndTrainable) -> None:
        """Removes a policy where it exists, and restores the mapping and the trained policies."""
        self._remotes.call(worker_protocol.remove_policy, policy_id, previous)


def _start_remote_workers(
    count: int,
    arguments: Mapping[str, Any],
    config: AlgorithmConfig,
    make_snapshot: Callable[[], worker_protocol.WorkerSnapshot],
) -> RayWorkers:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            f"{count} remote workers need Ray, which is not installed: run `pip install "
            "'ray>=2.40'`, or set num_rollout_workers=0 and evaluation_num_workers=0, with "
            "num_envs_per_worker for more environments in this process."
        )
    from tfpolicies.distributed.ray_workers import RayWorkers

    config.freeze()

    def get_arguments(index: int, recreated: bool) -> dict[str, Any]:
        return {**arguments, "worker_index": index, "recreated_worker": recreated}

    return RayWorkers(count, get_arguments, config, make_snapshot)


def _make_local_config(config: AlgorithmConfig) -> AlgorithmConfig:
    """Returns the config of the local worker, with its TensorFlow session settings."""
    if not config.local_tf_session_args:
        return config
    local_config = config.copy(copy_frozen=False)
    local_config.framework(tf_session_args=config.local_tf_session_args)
    config.freeze()
    return local_config
