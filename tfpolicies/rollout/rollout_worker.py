"""`RolloutWorker`: samples experience with policies in environments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from tfpolicies.base.extensions import Extensible
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.config.migration_hints import describe_missing_attribute
from tfpolicies.config.multi_agent import (
    MappingFn,
    TrainPredicate,
    as_predicate,
    require_mapping_fn,
)
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID, PolicySpec
from tfpolicies.config.run_sections import needs_environment
from tfpolicies.envs.env_factory import EnvContext
from tfpolicies.envs.fault_tolerance import Watchdog
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.envs.vector_adapters import VectorEnvAdapter
from tfpolicies.errors import ConfigError, UsageError
from tfpolicies.policy.policy import Policy
from tfpolicies.rollout import worker_state
from tfpolicies.rollout.base_worker import Spaces
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.episode_seeds import EpisodeSeeds
from tfpolicies.rollout.experience_input import (
    fit_filters,
    infer_missing_spaces,
    make_sampler,
    require_shard,
)
from tfpolicies.rollout.experience_output import StepRecorder
from tfpolicies.rollout.learning_worker import LearningWorker
from tfpolicies.rollout.multi_agent_sampler import MultiAgentSampler
from tfpolicies.rollout.observation_filters import ObservationFilters
from tfpolicies.rollout.parallel_iterator_worker import ParallelIteratorWorker
from tfpolicies.rollout.policy_changes import PolicyAddition
from tfpolicies.rollout.sampler import Sampler
from tfpolicies.rollout.single_agent_sampler import SingleAgentSampler
from tfpolicies.rollout.worker_environments import make_worker_environments
from tfpolicies.rollout.worker_policies import WorkerPolicies, select_ids
from tfpolicies.rollout.worker_process import WorkerProcess
from tfpolicies.storage.pickling import refuse_pickling


class RolloutWorker(LearningWorker, ParallelIteratorWorker, WorkerProcess, Extensible):
    """Collects experience of policies in environments.

    Args:
        env_creator: `f(env_context)` that returns an environment, called once for each of
            `num_envs_per_worker`; or None, to use `config.env`. It may also return vector
            environments, EnvPool, `MultiAgentEnv` or PettingZoo environments; see
            `make_any_environments`. With `spaces` it may return None, for a worker without
            environments.
        validate_env: `f(env, env_context)`, raises to reject an environment.
        config: an `AlgorithmConfig` (frozen from here on), a dict of settings, or None for the
            policy class's defaults.
        worker_index: 0 for the worker of this process.
        num_workers: remote workers of the run; `config.num_rollout_workers` by default.
        recreated_worker: whether this worker replaces one that died.
        log_dir: accepted; kept in `creation_args()`.
        spaces: `{policy_id: (observation_space, action_space)}`, used instead of the environment's;
            the key `"__env__"` has those of an environment that is not created here. They are the
            environment's spaces, before connectors.
        default_policy_class: the class of policies without a class in their spec.
        dataset_shards: by worker index, the recorded experience that the worker reads instead of
            sampling: paths, arrays, or a shard of a Ray dataset; None for a worker that reads none.
        tf_session_creator: must be -1; a session creator is an argument of `PolicyMap`.

    Attributes:
        config: the frozen config.
        worker_index: 0 for the worker of this process.
        num_workers: remote workers of the run.
        environments: all environments, which step together; None without any. Also `async_env`.
        sampler: steps the environments; None without any.
        policies: the policies, their mapping to agents, and which are trained.
        policy_map: the policies by id.
        policy_dict: a `PolicySpec` for each policy id, with the environment's spaces.
        observation_filters: the running statistics of observations.
        global_vars: the counters of the run.
        seeds: of environments and generators.
        callbacks: the user's.
        weights_seq_no: of the weights that were set last.
        multiagent: whether there is another policy than the one called `DEFAULT_POLICY_ID`.
        seed: the config's plus the worker's index (plus 10000 in evaluation); None without one.
        seconds_to_make: the time to create all environments.
        watchdog: monitors the step time of environments; None without `env_step_timeout_s`.
        has_episodes: whether episodes run; if not, new ones start with the next sample, so that
            policies and a mapping set before the first sample apply to its episodes.

    Raises:
        ConfigError: for contradicting settings, or if a policy has no class or no spaces.
        EnvError: for an environment that is unknown or unusable.
        SpaceError: if the spaces of a policy do not fit those of the environment.
    """

    _describe_missing = staticmethod(describe_missing_attribute)

    def __init__(
        self,
        *,
        env_creator: Callable[[EnvContext], Any] | None = None,
        validate_env: Callable[[Any, EnvContext], None] | None = None,
        config: AlgorithmConfig | Mapping[str, Any] | None = None,
        worker_index: int = 0,
        num_workers: int | None = None,
        recreated_worker: bool = False,
        log_dir: str | None = None,
        spaces: Mapping[str, Spaces] | None = None,
        default_policy_class: type[Policy] | None = None,
        dataset_shards: list[Any] | None = None,
        tf_session_creator: object = -1,
    ) -> None:
        arguments = dict(locals())
        del arguments["self"], arguments["__class__"]
        super().__init__(arguments)
        _require_supported(tf_session_creator, default_policy_class)
        require_shard(dataset_shards, worker_index)
        self.config = _as_config(config, default_policy_class)
        self.config.freeze()
        self.default_policy_class = default_policy_class
        self.worker_index = worker_index
        self.num_workers = (
            self.config.num_rollout_workers if num_workers is None else int(num_workers)
        )
        self.recreated_worker = recreated_worker
        self.log_dir = log_dir
        self.spaces = dict(spaces or {})
        make_callbacks = self.config["callbacks"] or DefaultCallbacks
        self.callbacks = make_callbacks()
        self.global_vars = {"timestep": 0, "num_grad_updates_per_policy": {}}
        self.weights_seq_no: int | None = None
        self.flushes_filters = True
        self.seeds = EpisodeSeeds(self.config, worker_index)
        self.has_episodes = False
        self._first_batch: SampleBatch | MultiAgentBatch | None = None
        self.environments = None
        self.watchdog: Watchdog | None = None
        self.seconds_to_make = 0.0
        source = env_creator if env_creator is not None else self.config.env
        self._dataset_shards = dataset_shards
        self._recorder = None if self.config.output is None else StepRecorder(self)
        if source is not None and self._has_environments():
            self.environments, self.watchdog = make_worker_environments(
                self, source, self._context(), validate_env
            )
        if not self.spaces:
            inferred = infer_missing_spaces(self.config, dataset_shards, worker_index)
            self.spaces = {} if inferred is None else {"__env__": inferred}
        self.policies = WorkerPolicies(self)
        self.observation_filters = ObservationFilters(self.policies.policy_map)
        try:
            for policy_id, spec in self.policies.complete_specs(None).items():
                self.policies.make_policy(policy_id, spec)
            self.sampler = self._make_sampler()
        except BaseException:
            self.stop()
            raise

    # -- construction -------------------------------------------------------------------------

    def _has_environments(self) -> bool:
        """Returns whether this worker needs environments: to sample, or for their spaces.

        The local one does not sample if there are remote ones.
        """
        config = self.config
        has_spaces = config.observation_space is not None and config.action_space is not None
        if has_spaces and not needs_environment(config.input_) and self._dataset_shards is None:
            return False
        remote_workers_sample = self.worker_index == 0 and self.num_workers > 0
        return not remote_workers_sample or bool(self.config.create_env_on_local_worker)

    def _context(self) -> EnvContext:
        return EnvContext(
            self.config.to_dict()["env_config"],
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            recreated_worker=self.recreated_worker,
        )

    def _make_sampler(self) -> Any:
        rng = np.random.default_rng(self.seeds.get_generator_seed("episodes"))
        return make_sampler(self, self._dataset_shards, self._make_env_sampler, rng)

    def _make_env_sampler(self) -> Sampler | None:
        envs, config = self.environments, self.config
        if envs is None:
            return None
        settings: dict[str, Any] = {
            "fragment_length": config.get_fragment_length(envs.num_envs, self.worker_index),
            "complete_episodes": config.batch_mode == "complete_episodes",
            "clip_rewards": config.clip_rewards,
            "enable_connectors": config.enable_connectors,
            "rng": np.random.default_rng(self.seeds.get_generator_seed("episodes")),
            "callbacks": self.callbacks,
            "worker": self,
            "perf_stats_ema_coef": config.sampler_perf_stats_ema_coef,
            "record": None if self._recorder is None else self._recorder.record,
        }
        if not isinstance(envs, MultiAgentEnvAdapter):
            return SingleAgentSampler(envs, self.policy_map, **settings)
        return MultiAgentSampler(
            envs,
            self.policy_map,
            self.policies,
            count_agent_steps=config.count_steps_by == "agent_steps",
            observation_fn=config.observation_fn,
            **settings,
        )

    # -- sampling -----------------------------------------------------------------------------

    @property
    def async_env(self) -> VectorEnvAdapter | MultiAgentEnvAdapter | None:
        """All environments, which step together; None without any."""
        return self.environments

    @property
    def multiagent(self) -> bool:
        """True if there is another policy than the one called `DEFAULT_POLICY_ID`, or none."""
        return set(self.policy_map) != {DEFAULT_POLICY_ID}

    @property
    def seed(self) -> int | None:
        """The seed of this worker, None if the config has none; see `EpisodeSeeds`."""
        return self.seeds.worker_seed

    @property
    def total_rollout_fragment_length(self) -> int:
        """The steps of one `sample()` over all environments, as `count_steps_by` counts them."""
        envs: int = self.config.num_envs_per_worker
        if self.environments is not None:
            envs = self.environments.num_envs
        return self.config.get_fragment_length(envs, self.worker_index) * envs

    def reset_episodes(self) -> None:
        """Starts new episodes in all environments; drops rows that were not returned yet."""
        sampler = self._require_sampler()
        sampler.reset(self.seeds.next(sampler.num_envs))
        self.has_episodes = True

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Returns a batch of new, postprocessed experience; later calls continue the episodes.

        With `batch_mode="truncate_episodes"` it has `rollout_fragment_length` steps of each
        environment, with `"complete_episodes"` whole episodes of at least that many steps in total.
        Environments with several agents give a `MultiAgentBatch`, whose steps are counted by
        `count_steps_by`; others a `SampleBatch`.

        Raises:
            UsageError: if the worker has no environment, or was stopped.
            EnvError: if an environment breaks its contract. After this and any other error, of
                callbacks for example, new episodes start with the next sample.
        """
        sampler = self._require_sampler()
        if self._first_batch is not None:
            return self._first_batch
        if not self.has_episodes:
            self.reset_episodes()
        if self.flushes_filters:
            fit_filters(self)
            self.observation_filters.flush()
        self.has_episodes = False  # after an error, partial episodes must not get into a batch
        batch = sampler.sample()
        self.has_episodes = True
        self.callbacks.on_sample_end(worker=self, samples=batch)
        if self.config.compress_observations:
            for policy_batch in batch.as_multi_agent().policy_batches.values():
                policy_batch.compress(bulk=self.config.compress_observations == "bulk")
        if self.config.fake_sampler:
            self._first_batch = batch
        return batch

    def sample_with_count(self) -> tuple[SampleBatch | MultiAgentBatch, int]:
        """Returns `(batch, batch.count)`."""
        batch = self.sample()
        return batch, batch.count

    def get_metrics(self) -> list[RolloutMetrics]:
        """Returns the metrics of episodes that ended since the last call."""
        if self.sampler is None:
            return []
        metrics, self.sampler.metrics = self.sampler.metrics, []
        return metrics

    # -- policies -----------------------------------------------------------------------------

    @property
    def policy_dict(self) -> dict[str, PolicySpec]:
        """The `PolicySpec` of each policy by id."""
        return self.policies.specs

    @property
    def policy_mapping_fn(self) -> MappingFn:
        """The function that maps an agent to a policy id."""
        return self.policies.policy_mapping_fn

    @property
    def is_policy_to_train(self) -> TrainPredicate:
        """The predicate of trained policies, `f(policy_id, batch=None)`; None for all."""
        return self.policies.is_policy_to_train

    def add_policy(
        self,
        policy_id: str,
        policy_cls: type[Policy] | None = None,
        policy: Policy | None = None,
        *,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        config: Mapping[str, Any] | AlgorithmConfig | None = None,
        policy_state: Mapping[str, Any] | None = None,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: Collection[str] | TrainPredicate = None,
        module_spec: object = None,
    ) -> Policy:
        """Adds a policy, also while episodes run; checks all arguments first.

        Args:
            policy_id: its id.
            policy_cls: the class to create it from; or
            policy: the policy itself; if it belongs to another worker, it is copied.
            observation_space: the environment's observations for the policy, before its connectors;
                None for the space of the environment or config.
            action_space: the environment's actions for the policy, after its connectors; None for
                the space of the environment or config.
            config: its overrides of the worker's config; with `agent_connectors` or
                `action_connectors` the policy has other connectors than the rest, or none.
            policy_state: its state, from `get_state`.
            policy_mapping_fn: the new mapping of agents to policies. Running episodes keep the
                mapping that they started with.
            policies_to_train: ids of the policies to train, or `f(policy_id, batch=None)`; None
                keeps the present ones, an empty list trains none.
            module_spec: must be None.

        Returns:
            The new policy.

        Raises:
            ConfigError: for an invalid id or setting.
            PolicyExistsError: if there is a policy of this id; also a KeyError.
            UsageError: unless exactly one of `policy_cls` and `policy` is given; also a ValueError.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        return self.policies.add(PolicyAddition.from_arguments(self.policy_map, **arguments))

    def remove_policy(
        self,
        *,
        policy_id: str = DEFAULT_POLICY_ID,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: Collection[str] | TrainPredicate = None,
    ) -> None:
        """Removes a policy. Running episodes that use it are dropped at their next step.

        Args:
            policy_id: its id.
            policy_mapping_fn: as in `add_policy`.
            policies_to_train: as in `add_policy`.

        Raises:
            UnknownPolicyError: if there is none of this id; also a ValueError and a KeyError.
            UsageError: if the mapping function maps an agent to it; nothing is changed then.
        """
        self.policies.require_unmapped(policy_id, policy_mapping_fn)
        self.policies.remove(policy_id, policy_mapping_fn, policies_to_train)

    def set_policy_mapping_fn(self, policy_mapping_fn: MappingFn | None = None) -> None:
        """Sets the function that maps agents to policies; None keeps the present one.

        Running episodes keep the mapping that they started with.

        Raises:
            ConfigError: if it is not a function; nothing is changed then.
        """
        require_mapping_fn(policy_mapping_fn)
        self.policies.update_mapping_and_trainable(policy_mapping_fn, None)

    def set_is_policy_to_train(self, is_policy_to_train: Collection[str] | TrainPredicate) -> None:
        """Sets which policies are trained: a list, set or tuple of ids, or `f(id, batch=None)`.

        Raises:
            UsageError: for anything else; also an AssertionError.
        """
        if is_policy_to_train is None:
            raise UsageError(
                "is_policy_to_train must be a list, set or tuple of ids, or a function; got None. "
                "To train all: `lambda policy_id, batch=None: True`."
            )
        self.policies.update_mapping_and_trainable(None, as_predicate(is_policy_to_train))

    def get_policies_to_train(self, batch: SampleBatch | MultiAgentBatch | None = None) -> set[str]:
        """Returns the ids of the policies that are trained on a batch."""
        return {pid for pid in self.policy_map if self.policies.is_trained(pid, batch)}

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Any:
        """Returns the policy of that id, or None."""
        return self.policy_map.get(policy_id)

    def for_policy(
        self, func: Callable[..., Any], policy_id: str = DEFAULT_POLICY_ID, **kwargs: object
    ) -> Any:
        """Returns `func(policy, **kwargs)`.

        Raises:
            UnknownPolicyError: if there is no policy of that id.
        """
        return func(self.policy_map[policy_id], **kwargs)

    def foreach_policy(self, func: Callable[..., Any], **kwargs: object) -> list[Any]:
        """Returns `func(policy, policy_id, **kwargs)` for each policy."""
        return [func(policy, pid, **kwargs) for pid, policy in self.policy_map.items()]

    def foreach_policy_to_train(self, func: Callable[..., Any], **kwargs: object) -> list[Any]:
        """Returns `func(policy, policy_id, **kwargs)` for each policy that is trained."""
        trains, policies = self.policies.is_trained, self.policy_map.items()
        return [func(policy, pid, **kwargs) for pid, policy in policies if trains(pid)]

    # -- weights, filters, state --------------------------------------------------------------

    def get_weights(self, policies: Collection[str] | str | None = None) -> dict[str, Any]:
        """Returns the weights by policy id, of all policies or of the named ones."""
        ids = select_ids(policies, list(self.policy_map))
        return {policy_id: self.policy_map[policy_id].get_weights() for policy_id in ids}

    def set_weights(
        self,
        weights: Mapping[str, Any],
        global_vars: Mapping[str, Any] | None = None,
        weights_seq_no: int | None = None,
    ) -> None:
        """Sets the weights of the given policies, then the global variables.

        Args:
            weights: by policy id.
            global_vars: as for `set_global_vars`.
            weights_seq_no: a number of these weights; weights with the same number as the last
                ones are not set again.

        Raises:
            UnknownPolicyError: if a policy id does not exist; nothing is changed then.
            KeyError: for global variables without `timestep`; nothing is changed then.
        """
        policies = {policy_id: self.policy_map[policy_id] for policy_id in weights}
        if global_vars:
            _ = global_vars["timestep"]
        if weights_seq_no is None or weights_seq_no != self.weights_seq_no:
            for policy_id, policy in policies.items():
                policy.set_weights(weights[policy_id])
            self.weights_seq_no = weights_seq_no
        if global_vars:
            self.set_global_vars(global_vars)

    @property
    def filters(self) -> dict[str, Any]:
        """The running statistics of observations by policy id, for policies that have any."""
        return self.observation_filters.by_policy

    @property
    def preprocessors(self) -> dict[str, Any]:
        """Always empty: policies preprocess observations themselves."""
        return {}

    def get_filters(self, flush_after: bool = False) -> dict[str, Any]:
        """Returns copies of the filters by policy id, including their pending statistics.

        Args:
            flush_after: apply the pending statistics in this worker, so that they are not
                reported again.
        """
        copies = self.observation_filters.copy()
        if flush_after:
            self.observation_filters.flush()
        return copies

    def sync_filters(self, new_filters: Mapping[str, Any]) -> None:
        """Copies the statistics of other filters; pending statistics stay pending.

        Args:
            new_filters: by policy id, for exactly the policies that `filters` has.

        Raises:
            UsageError: if one is missing, or is of a policy without a filter here; also an
                AssertionError. Nothing is changed then.
            WeightsError: if one does not fit; nothing is changed then.
        """
        self.observation_filters.sync(new_filters)

    def get_state(self) -> dict[str, Any]:
        """Returns the state for `set_state`: policies, mapping, trained policies, counters.

        With `checkpoint_trainable_policies_only` it has only the policies that are trained.
        """
        return worker_state.get_worker_state(self.policies, self.observation_filters)

    def __reduce__(self) -> NoReturn:
        refuse_pickling(
            self,
            "Create another one with the same config, RolloutWorker(config=worker.config), and "
            "copy the policies: other.set_state(worker.get_state()).",
        )

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; adds policies that do not exist here yet.

        Policies that the state does not have stay as they are. The filters are restored as part of
        the policies.

        Raises:
            ConfigError: for an invalid policy id, or a mapping that is not a function.
            WeightsError: if this is not a state of a worker, or a policy's state does not fit;
                nothing is changed then.
            UsageError: if `is_policy_to_train` is neither ids nor a function; nothing is changed
                then.
        """
        worker_state.restore_worker_state(self.policies, state)

    def get_global_vars(self) -> dict[str, Any]:
        """Returns the counters of the run: `timestep`, `num_grad_updates_per_policy`."""
        return self.global_vars

    def set_global_vars(
        self, global_vars: Mapping[str, Any], policy_ids: Collection[str] | None = None
    ) -> None:
        """Sets the counters of the run and notifies the policies that are trained.

        Args:
            global_vars: `timestep`, and `num_grad_updates_per_policy`. Policies get all other
                counters with the time step, and their own number of updates.
            policy_ids: notify only these policies.

        Raises:
            KeyError: without `timestep`.
        """
        self.policies.set_global_vars(global_vars, policy_ids)

    # -- environments -------------------------------------------------------------------------

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """Returns `func(env)` for each environment; `[]` without any."""
        return [func(env) for env in self._sub_environments()]

    def foreach_env_with_context(self, func: Callable[[Any, EnvContext], Any]) -> list[Any]:
        """Returns `func(env, env_context)` for each environment; `[]` without any."""
        context, envs = self._context(), self._sub_environments()
        return [
            func(env, context.copy_with_overrides(vector_index=i)) for i, env in enumerate(envs)
        ]

    def stop(self) -> None:
        """Closes the environments and the policies' sessions; may be called again."""
        self._stopped = True
        if hasattr(self, "policies"):
            for policy in self.policy_map.values():
                policy.close()
        if self._recorder is not None:
            self._recorder.close()
        sampler = getattr(self, "sampler", None)
        if sampler is not None:
            sampler.close()
            self.sampler = None
        if self.environments is not None:
            self.environments.close()
            self.environments = None
        if self.watchdog is not None:
            self.watchdog.close()


def _require_supported(
    tf_session_creator: object,
    policy_class: type[Policy] | None,
) -> None:
    if tf_session_creator != -1:
        raise ConfigError(
            "tf_session_creator is no longer an argument of a worker; give a session_creator "
            "to a PolicyMap."
        )
    if policy_class is not None and not (
        isinstance(policy_class, type) and issubclass(policy_class, Policy)
    ):
        raise ConfigError(
            f"default_policy_class must be a subclass of Policy, got {policy_class!r}; "
            "give a policy class, for example PPOTF2Policy."
        )


def _as_config(
    config: AlgorithmConfig | Mapping[str, Any] | None, policy_class: type[Policy] | None
) -> AlgorithmConfig:
    if isinstance(config, AlgorithmConfig):
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"config must be an AlgorithmConfig, a dict of settings or None, got {config!r}."
        )
    config_class = getattr(policy_class, "config_class", AlgorithmConfig)
    return config_class().update_from_dict(config or {})
