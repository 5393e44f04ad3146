"""The rollout worker: environments, policies and a sampler, behind the documented methods."""

from __future__ import annotations

import copy
import itertools
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from tfpolicies.batch.postprocessing import standardized
from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.config.idioms import missing_attribute
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID, PolicySpec, validate_policy_id
from tfpolicies.envs.checking import same_randomness
from tfpolicies.envs.making import EnvContext
from tfpolicies.envs.multi_agent_environments import MultiAgentEnvironments
from tfpolicies.envs.repairs import Watchdog
from tfpolicies.envs.vector import Environments
from tfpolicies.errors import ConfigError, UsageError, WeightsError
from tfpolicies.extensions import Extensible
from tfpolicies.policy.policy import Policy
from tfpolicies.policy_map.policy_map import PolicyMap
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.parallel_iteration import ParallelIteration
from tfpolicies.rollout.roster import (
    MappingFn,
    Roster,
    ToTrain,
    as_predicate,
    named,
    require_mapping_fn,
)
from tfpolicies.rollout.sampler import Sampler
from tfpolicies.rollout.samplers import make_sampler
from tfpolicies.rollout.worker_environments import make_worker_environments
from tfpolicies.storage.pickling import refuse_pickling

_EVALUATION_SEED = 10_000
_DRAWS = 16  # calls of a mapping function for an agent, to see which policies it may give


class RolloutWorker(ParallelIteration, Extensible):
    """Collects experience of policies in environments.

    Args:
        env_creator: `f(env_context)` that gives an environment, called once for each of
            `num_envs_per_worker`; or None, to take `config.env`. See `make_any_environments` for
            what is accepted: vector environments, EnvPool, `MultiAgentEnv` and PettingZoo, too.
            It may give None, for a worker without environments, if there are `spaces`.
        validate_env: `f(env, env_context)`, raises to reject an environment.
        config: an `AlgorithmConfig` (frozen from here on), a dict of settings, or None for the
            policy class's defaults.
        worker_index: 0 for the worker of this process.
        num_workers: remote workers of the run; `config.num_rollout_workers` by default.
        recreated_worker: whether this worker replaces one that died.
        log_dir: accepted; kept in `creation_args()`.
        spaces: `{policy_id: (observation_space, action_space)}`, used instead of the environment's;
            the key `"__env__"` has those of an environment that is not made here. They are what
            an environment gives and takes, before connectors.
        default_policy_class: the class of policies that name none.
        dataset_shards: must be None.
        tf_session_creator: must be -1; a session creator belongs to a `PolicyMap`.

    Attributes:
        config: the frozen config.
        worker_index: as given.
        num_workers: as given.
        environments: the environments behind one step, None without any; `async_env`, too.
        sampler: what steps them.
        policy_map: the policies by id.
        policy_dict: how each was made, a `PolicySpec` by id, with the environment's spaces.
        global_vars: the counters of the run.
        callbacks: the user's.
        weights_seq_no: of the weights that were set last.
        multiagent: whether there is another policy than the one called `DEFAULT_POLICY_ID`.
        seed: the config's plus the worker's index (plus 10000 in evaluation); None without one.
        seconds_to_make: what making all environments took.
        watchdog: looks after how long environments take; None without `env_step_timeout_s`.
        has_episodes: whether episodes run; if not, new ones begin with the next sample, so that
            policies and a mapping given before the first one are in its first episodes.

    Raises:
        ConfigError: for contradicting settings, or if a policy has no class or no spaces.
        EnvError: for an environment that is unknown or unusable.
        SpaceError: if the spaces of a policy do not fit those of the environment.
    """

    _describe_missing = staticmethod(missing_attribute)

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
        spaces: Mapping[str, tuple[gym.Space, gym.Space]] | None = None,
        default_policy_class: type[Policy] | None = None,
        dataset_shards: list[Any] | None = None,
        tf_session_creator: Any = -1,
    ) -> None:
        self._creation_args = {name: x for name, x in locals().items() if name != "self"}
        if tf_session_creator != -1:
            raise ConfigError(
                "tf_session_creator is no longer an argument of a worker; give a session_creator "
                "to a PolicyMap."
            )
        if dataset_shards is not None:
            raise ConfigError("dataset_shards must be None: workers sample from environments.")
        if default_policy_class is not None and not (
            isinstance(default_policy_class, type) and issubclass(default_policy_class, Policy)
        ):
            raise ConfigError(
                f"default_policy_class must be a subclass of Policy, got {default_policy_class!r}; "
                "give the class to act with, for example PPOTF2Policy."
            )
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
        made = self.config["callbacks"]
        self.callbacks: DefaultCallbacks = DefaultCallbacks() if made is None else made()
        self.global_vars: dict[str, Any] = {"timestep": 0, "num_grad_updates_per_policy": {}}
        self.weights_seq_no: int | None = None
        self.flushes_filters = True
        self.seeds_used = 0
        self._stopped = False
        self.has_episodes = False
        self._own_lock = threading.Lock()
        self._first_batch: Any = None
        self.environments: Environments | MultiAgentEnvironments | None = None
        self.watchdog: Watchdog | None = None
        self.seconds_to_make = 0.0
        source = env_creator if env_creator is not None else self.config.env
        if source is not None and self._has_environments():
            found = make_worker_environments(self, source, self._context(), validate_env)
            self.environments, self.watchdog = found
        self.roster = Roster(
            self.config,
            self.worker_index,
            self.num_workers,
            self.callbacks.on_create_policy,
        )
        try:
            for policy_id, spec in self.complete_specs(None).items():
                self.roster.make(policy_id, spec)
            self.sampler = make_sampler(self, self._seed("episodes"))
        except BaseException:
            self.stop()
            raise

    # -- construction -------------------------------------------------------------------------

    def _has_environments(self) -> bool:
        """Whether this worker samples: the local one does not where remote ones do."""
        remote_ones_do = self.worker_index == 0 and self.num_workers > 0
        return not remote_ones_do or bool(self.config.create_env_on_local_worker)

    def _context(self) -> EnvContext:
        return EnvContext(
            self.config.to_dict()["env_config"],
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            recreated_worker=self.recreated_worker,
        )

    def complete_specs(self, policies: Mapping[str, PolicySpec] | None) -> dict[str, PolicySpec]:
        """Returns specs with class, spaces and whole configs; those of the config by default.

        Spaces are what the environment gives and takes, before connectors.

        Args:
            policies: specs by policy id; None for those of the config.

        Raises:
            ConfigError: for spaces that nobody names.
        """
        env, spaces = None, dict(self.spaces)
        if isinstance(self.environments, MultiAgentEnvironments):
            env = self.environments.get_sub_environments()[0]
        elif self.environments is not None:
            envs = self.environments
            spaces.setdefault("__env__", (envs.observation_space, envs.action_space))
        specs, _ = self.config.get_multi_agent_setup(
            policies=policies,
            env=env,
            spaces=spaces or None,
            default_policy_class=self.default_policy_class,
        )
        return specs

    def _seed(self, purpose: str) -> Any:
        if self.config.seed is None:
            return None
        return [self.config.seed, self.worker_index, sum(purpose.encode())]

    # -- sampling -----------------------------------------------------------------------------

    @property
    def env(self) -> Any:
        """The first environment, or None."""
        return next(iter(self._sub_environments()), None)

    @property
    def async_env(self) -> Environments | MultiAgentEnvironments | None:
        """The environments behind one step, or None."""
        return self.environments

    @property
    def multiagent(self) -> bool:
        """Whether there is another policy than the one called `DEFAULT_POLICY_ID`, or none."""
        return set(self.policy_map) != {DEFAULT_POLICY_ID}

    @property
    def seed(self) -> int | None:
        """The seed of this worker, None if the config has none; see `next_seeds`."""
        if self.config.seed is None:
            return None
        return self.config.seed + self.worker_index + _EVALUATION_SEED * self.config.in_evaluation

    @property
    def total_rollout_fragment_length(self) -> int:
        """The steps of one `sample()` over all environments, as `count_steps_by` counts them."""
        envs = self.config.num_envs_per_worker
        if self.environments is not None:
            envs = self.environments.num_envs
        return self.config.fragment_length(envs, self.worker_index) * envs

    def reset_episodes(self) -> None:
        """Starts new episodes in all environments; rows not handed out yet are dropped."""
        self._require_sampler().reset(self.next_seeds())
        self.has_episodes = True

    def restore_sampling(
        self,
        seeds_used: int,
        rng: np.random.Generator | None,
        global_vars: Mapping[str, Any],
        sampler_state: Mapping[str, Any] | None,
    ) -> None:
        """Continues from a checkpoint: its running episodes, or new ones with the next sample.

        A worker that had no environment left no generator (`rng`); this one keeps its own then.
        """
        self.seeds_used = seeds_used
        self.global_vars = dict(global_vars)
        if self.sampler is None:
            return
        if rng is not None:
            self.sampler.rng = rng
        self.has_episodes = sampler_state is not None
        if sampler_state is not None:
            self.sampler.set_state(sampler_state)

    def next_seeds(self, *, evaluation: bool = False) -> list[int] | None:
        """Returns a new seed for each environment, or None if the config has no seed.

        They depend on the seed, the worker's index, the environment's index, and on how often this
        was called.
        """
        base, envs = self.config.seed, self.environments
        calls, self.seeds_used = self.seeds_used, self.seeds_used + 1
        if base is None or envs is None:
            return None
        base += 1001 * self.worker_index + 1_000_003 * calls
        base += _EVALUATION_SEED if evaluation else 0
        return [base + i for i in range(envs.num_envs)]

    def _require_sampler(self) -> Sampler:
        if self._stopped:
            raise UsageError(
                "This worker was stopped, so its environments are closed; make a new one."
            )
        if self.sampler is None:
            raise UsageError(
                "This worker has no input_reader, because it has no environment; give it an "
                "env_creator or config.environment(...)."
            )
        return self.sampler

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Returns a batch of fresh, postprocessed experience; later calls continue the episodes.

        With `batch_mode="truncate_episodes"` it has `rollout_fragment_length` steps of each
        environment, with `"complete_episodes"` whole episodes of at least that many steps in all.
        Environments with several agents give a `MultiAgentBatch`, whose steps are counted by
        `count_steps_by`; others a `SampleBatch`.

        Raises:
            UsageError: if the worker has no environment, or was stopped.
            EnvError: if an environment breaks its contract. After this and any other error, of
                callbacks for example, new episodes begin with the next sample.
        """
        sampler = self._require_sampler()
        if self._first_batch is not None:
            return self._first_batch
        if not self.has_episodes:
            self.reset_episodes()
        if self.flushes_filters:
            self.flush_filters()
        self.has_episodes = False  # what an error leaves behind must not get into a batch
        batch = sampler.sample()
        self.has_episodes = True
        self.callbacks.on_sample_end(worker=self, samples=batch)
        if self.config.compress_observations:
            for part in batch.as_multi_agent().policy_batches.values():
                part.compress(bulk=self.config.compress_observations == "bulk")
        if self.config.fake_sampler:
            self._first_batch = batch
        return batch

    def sample_with_count(self) -> tuple[SampleBatch | MultiAgentBatch, int]:
        """Returns `(batch, batch.count)`."""
        batch = self.sample()
        return batch, batch.count

    def sample_and_learn(
        self,
        expected_batch_size: int,
        num_sgd_iter: int,
        sgd_minibatch_size: int,
        standardize_fields: Collection[str],
    ) -> tuple[dict[str, Any], int]:
        """Samples one batch and learns from it in minibatches.

        Args:
            expected_batch_size: what `batch.count` must be.
            num_sgd_iter: epochs.
            sgd_minibatch_size: rows of an update; 0 for all rows at once.
            standardize_fields: columns that get mean 0 and standard deviation 1 first.

        Returns:
            The results by policy id (of a policy written by hand, that of its last minibatch),
            and the count of the batch.

        Raises:
            UsageError: if the batch has another count; also an AssertionError.
            MissingColumnError: if there is no such column to standardize; nobody learns then.
        """
        batch = self.sample()
        if batch.count != expected_batch_size:
            raise UsageError(
                f"sample_and_learn expected a batch of {expected_batch_size} steps, but this "
                f"worker gave {batch.count}; see rollout_fragment_length."
            )
        parts = self._trained_parts(batch)
        for rows in parts.values():
            for name in standardize_fields:
                rows[name] = standardized(np.asarray(rows[name], np.float32))
        rng = self._require_sampler().rng
        results: dict[str, Any] = {}
        for policy_id, rows in parts.items():
            driver, size = self.policy_map[policy_id].driver, sgd_minibatch_size or rows.count
            results[policy_id] = driver.learning.update(rows, num_sgd_iter, size, rng=rng)
        return results, batch.count

    def get_metrics(self) -> list[RolloutMetrics]:
        """Returns the metrics of episodes that ended since the last call."""
        if self.sampler is None:
            return []
        metrics, self.sampler.metrics = self.sampler.metrics, []
        return metrics

    # -- policies -----------------------------------------------------------------------------

    @property
    def policy_map(self) -> PolicyMap:
        """The policies by id."""
        return self.roster.policy_map

    @property
    def policy_dict(self) -> dict[str, PolicySpec]:
        """How each policy was made, by id."""
        return self.roster.specs

    @property
    def policy_mapping_fn(self) -> MappingFn:
        """The function that says which policy acts for an agent."""
        return self.roster.policy_mapping_fn

    @property
    def is_policy_to_train(self) -> ToTrain:
        """What says whether a policy is trained, `f(policy_id, batch=None)`; None for all."""
        return self.roster.is_policy_to_train

    def add_policy(
        self,
        policy_id: str,
        policy_cls: type[Policy] | None = None,
        policy: Policy | None = None,
        *,
        observation_space: gym.Space | None = None,
        action_space: gym.Space | None = None,
        config: Mapping[str, Any] | AlgorithmConfig | None = None,
        policy_state: Mapping[str, Any] | None = None,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: Any = None,
        module_spec: Any = None,
    ) -> Policy:
        """Adds a policy, in the middle of episodes, too; all arguments are checked before.

        Args:
            policy_id: its id.
            policy_cls: the class to make it of; or
            policy: the policy itself, which may not belong to another worker: of such a one, a copy
                is taken.
            observation_space: what the environment gives the policy, before its connectors; None
                for what the environment or config says.
            action_space: likewise.
            config: its overrides of the worker's config; with `agent_connectors` or
                `action_connectors` the policy has others than the rest, or none.
            policy_state: its state, as `get_state` returned it.
            policy_mapping_fn: from now on says which policy acts for an agent. Running episodes
                keep the mapping that they began with.
            policies_to_train: ids of the policies to train, or `f(policy_id, batch=None)`; None
                keeps what there is, an empty list trains none.
            module_spec: must be None.

        Returns:
            The new policy.

        Raises:
            ConfigError: for an invalid id or setting.
            PolicyExistsError: if there is a policy of this id; also a KeyError.
            UsageError: unless exactly one of `policy_cls` and `policy` is given; also a ValueError.
        """
        self.roster.require_new(policy_id, policy_cls, policy, module_spec)
        spec = None
        if policy is None:
            given = PolicySpec(policy_cls, observation_space, action_space, config)
            spec = self.complete_specs({policy_id: given})[policy_id]
        added = self.roster.add(
            policy_id,
            spec,
            policy,
            policy_state=policy_state,
            policy_mapping_fn=policy_mapping_fn,
            policies_to_train=policies_to_train,
        )
        timestep = self.global_vars["timestep"]
        if timestep and spec is not None and policy_state is None:
            # Its schedules begin where the run is.
            self.set_global_vars({"timestep": timestep}, policy_ids=[policy_id])
        return added

    def remove_policy(
        self,
        *,
        policy_id: str = DEFAULT_POLICY_ID,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: Any = None,
    ) -> None:
        """Removes a policy. Running episodes in which it plays are dropped at their next step.

        Args:
            policy_id: its id.
            policy_mapping_fn: as in `add_policy`.
            policies_to_train: as in `add_policy`.

        Raises:
            UnknownPolicyError: if there is none of this id; also a ValueError and a KeyError.
            UsageError: if the mapping function gives it to an agent; nothing is changed then.
        """
        self.require_unmapped(policy_id, policy_mapping_fn)
        self.drop_policy(policy_id, policy_mapping_fn, policies_to_train)

    def require_unmapped(self, policy_id: str, policy_mapping_fn: MappingFn | None = None) -> None:
        """Checks that the mapping function gives a policy to none of the agents.

        The function is called for each agent that the environment names, with running episodes or
        with None, several times, since it may draw policies. Where it raises an error nothing is
        known. The generators of `random` and NumPy stay as they are.

        Args:
            policy_id: of the policy.
            policy_mapping_fn: the function; None for the one there is.

        Raises:
            ConfigError: if it is not a function.
            UsageError: if it gives the policy to an agent.
        """
        require_mapping_fn(policy_mapping_fn)
        mapping = policy_mapping_fn or self.policy_mapping_fn
        if policy_id not in self.policy_map or self.env is None:
            return
        agents = sorted(getattr(self.env, "get_agent_ids", set)(), key=str)
        episodes = getattr(self.sampler, "running_episodes", None) or [None]
        for agent, episode in itertools.product(agents, episodes):
            try:
                with same_randomness():
                    drawn = {mapping(agent, episode, worker=self) for _ in range(_DRAWS)}
            except Exception:
                continue
            if policy_id in drawn:
                name = getattr(mapping, "__qualname__", repr(mapping))
                raise UsageError(
                    f"Policy {policy_id!r} cannot be removed: policy_mapping_fn ({name:.200}) "
                    f"gives it to agent {agent!r}. Give another mapping in the same call, "
                    f"remove_policy({policy_id!r}, policy_mapping_fn=...). To replace the policy, "
                    f"go on with add_policy({policy_id!r}, ..., policy_mapping_fn=...), where the "
                    "mapping may be the old one; or let it become a copy of another one: "
                    f"get_policy({policy_id!r}).set_state(get_policy(OTHER).get_state())."
                )

    def drop_policy(
        self, policy_id: str, policy_mapping_fn: MappingFn | None = None, to_train: Any = None
    ) -> None:
        """Removes a policy without a look at the mapping, which the caller sets."""
        self.roster.remove(policy_id, policy_mapping_fn, to_train)
        self.global_vars["num_grad_updates_per_policy"].pop(policy_id, None)

    def set_policy_mapping_fn(self, policy_mapping_fn: MappingFn | None = None) -> None:
        """Sets the function that says which policy acts for an agent; None keeps what there is.

        Running episodes keep the mapping that they began with.

        Raises:
            ConfigError: if it is no function; nothing is changed then.
        """
        require_mapping_fn(policy_mapping_fn)
        self.roster.change(policy_mapping_fn, None)

    def set_is_policy_to_train(self, is_policy_to_train: Any) -> None:
        """Sets which policies are trained: a list, set or tuple of ids, or `f(id, batch=None)`.

        Raises:
            UsageError: for anything else; also an AssertionError.
        """
        if is_policy_to_train is None:
            raise UsageError(
                "is_policy_to_train must be a list, set or tuple of ids, or a function; got None. "
                "To train all: `lambda policy_id, batch=None: True`."
            )
        self.roster.change(None, as_predicate(is_policy_to_train))

    def get_policies_to_train(self, batch: Any = None) -> set[str]:
        """Returns the ids of the policies that are trained on a batch."""
        return self.roster.trained(batch)

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Any:
        """Returns the policy of that id, or None."""
        return self.policy_map.get(policy_id)

    def for_policy(
        self, func: Callable[..., Any], policy_id: str = DEFAULT_POLICY_ID, **kwargs: Any
    ) -> Any:
        """Returns `func(policy, **kwargs)`.

        Raises:
            UnknownPolicyError: if there is no policy of that id.
        """
        return func(self.policy_map[policy_id], **kwargs)

    def foreach_policy(self, func: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Returns `func(policy, policy_id, **kwargs)` for each policy."""
        return [func(policy, pid, **kwargs) for pid, policy in self.policy_map.items()]

    def foreach_policy_to_train(self, func: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Returns `func(policy, policy_id, **kwargs)` for each policy that is trained."""
        found = self.policy_map.items()
        return [func(policy, pid, **kwargs) for pid, policy in found if self.roster.trains(pid)]

    # -- weights, filters, state --------------------------------------------------------------

    def get_weights(self, policies: Collection[str] | str | None = None) -> dict[str, Any]:
        """Returns the weights by policy id, of all policies or of the one or those named."""
        ids = named(policies, list(self.policy_map))
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
            global_vars: as `set_global_vars` takes them.
            weights_seq_no: a number of these weights; those of the number that was set last are
                not set again.

        Raises:
            UnknownPolicyError: if there is no policy of an id; nothing is changed then.
            KeyError: for global variables without `timestep`; likewise.
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
        """The running statistics of observations by policy id, of policies that have any."""
        found = {pid: policy.driver.filters for pid, policy in self.policy_map.items()}
        return {pid: own["filter"] for pid, own in found.items() if "filter" in own}

    @property
    def preprocessors(self) -> dict[str, Any]:
        """Always empty: policies preprocess observations themselves."""
        return {}

    def get_filters(self, flush_after: bool = False) -> dict[str, Any]:
        """Returns copies of the filters by policy id; what is pending in them is pending in those.

        Args:
            flush_after: let what is pending take effect here, so that it is not reported again.
        """
        copies = {pid: each.snapshot() for pid, each in self.filters.items()}
        if flush_after:
            self.flush_filters()
        return copies

    def sync_filters(self, new_filters: Mapping[str, Any]) -> None:
        """Takes over the statistics of other filters; what is pending here stays pending.

        Args:
            new_filters: by policy id, for exactly the policies that `filters` has.

        Raises:
            UsageError: if one is missing, or is of a policy without a filter here; also an
                AssertionError. Nothing is changed then.
            WeightsError: if one does not fit; likewise.
        """
        own = self.filters
        missing, unknown = sorted(set(own) - set(new_filters)), sorted(set(new_filters) - set(own))
        if missing or unknown:
            raise UsageError(
                f"new_filters must have a filter for each policy of this worker that has one, "
                f"{sorted(own)}, and no others; missing are {missing}, unknown are {unknown}. Give "
                "what `get_filters()` of a worker with the same policies returned."
            )
        for policy_id, each in own.items():
            each.snapshot().sync(new_filters[policy_id])
        for policy_id, each in own.items():
            each.sync(new_filters[policy_id])
            self.policy_map.handle(policy_id).driver.apply_filters()

    def flush_filters(self) -> None:
        """Lets the statistics of what was sampled take effect in filters.

        A worker of its own does it before each sample; an algorithm once per training iteration, so
        that what was acted on and what is learned from are normalised alike.
        """
        for policy in self.policy_map.values():
            policy.driver.learning.flush_filters()

    def get_state(self) -> dict[str, Any]:
        """Returns what `set_state` restores: policies, mapping, who is trained, counters.

        Policies that are not trained are left out with `checkpoint_trainable_policies_only`.
        """
        only = self.config.checkpoint_trainable_policies_only
        ids = [pid for pid in self.policy_map if not only or self.roster.trains(pid)]
        return {
            "policy_ids": ids,
            "policy_states": {pid: self.policy_map[pid].get_state() for pid in ids},
            "policy_mapping_fn": self.policy_mapping_fn,
            "is_policy_to_train": self.is_policy_to_train,
            "filters": self.get_filters(),
            "global_vars": copy.deepcopy(self.global_vars),
        }

    def __reduce__(self) -> NoReturn:
        refuse_pickling(
            self,
            "Make another one of the same config, RolloutWorker(config=worker.config), and give it "
            "the policies: other.set_state(worker.get_state()).",
        )

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned; policies that are not here yet are added.

        Policies that are here only stay as they are. The filters are restored with the policies,
        whose parts they are.

        Raises:
            ConfigError: for an invalid id of a policy, or a mapping that is no function.
            WeightsError: if this is no state of a worker, or a policy's state does not fit; nothing
                is changed then.
            UsageError: if `is_policy_to_train` says nothing about policies; likewise.
        """
        to_train, mapping_fn, added = self._checked_state(state)
        for policy_id, each in state["policy_states"].items():
            if policy_id in added:
                self.add_policy(policy_id, policy=added[policy_id], policy_state=each)
            else:
                self.policy_map[policy_id].set_state(each)
        self.roster.change(mapping_fn, None)
        if "is_policy_to_train" in state:
            self.roster.is_policy_to_train = to_train  # None, too: all are
        if state.get("global_vars"):
            self.set_global_vars(state["global_vars"])

    def _checked_state(self, state: Any) -> tuple[ToTrain, Any, dict[str, Policy]]:
        """Checks a state of a worker.

        Returns:
            What says who is trained, the mapping function, and the policies that are not here.
        """
        policy_states = state.get("policy_states") if isinstance(state, Mapping) else None
        if not isinstance(policy_states, Mapping):
            raise WeightsError(
                "A state of a worker must be a dict with 'policy_states', as `get_state()` gives "
                f"it; got {state!r:.200}."
            )
        to_train = as_predicate(state.get("is_policy_to_train"))
        mapping_fn = state.get("policy_mapping_fn")
        require_mapping_fn(mapping_fn)
        made = {}
        for policy_id, each in policy_states.items():
            if policy_id in self.policy_map:
                policy = self.policy_map.handle(policy_id)
            else:
                policy = made[policy_id] = self._policy_of_state(policy_id, each)
            policy.driver.check_state(each)
        return to_train, mapping_fn, made

    def _policy_of_state(self, policy_id: str, state: Any) -> Policy:
        """Returns a new policy of the kind that a policy's state tells."""
        validate_policy_id(policy_id, error=True)
        spec = state.get("policy_spec") if isinstance(state, Mapping) else None
        if spec is None:
            raise WeightsError(
                f"There is no policy {policy_id!r} here, and its state has no 'policy_spec' to "
                "make it of. Add the policy first, or give what `get_state()` returned."
            )
        spaces = spec["observation_space"], spec["action_space"]
        own = {"__policy_id": policy_id, "worker_index": self.worker_index}
        return spec["policy_class"](*spaces, {**spec["config"], **own})

    def get_global_vars(self) -> dict[str, Any]:
        """Returns the counters of the run: `timestep`, `num_grad_updates_per_policy`."""
        return self.global_vars

    def set_global_vars(
        self, global_vars: Mapping[str, Any], policy_ids: Collection[str] | None = None
    ) -> None:
        """Takes over the counters of the run and tells the policies that are trained.

        Args:
            global_vars: `timestep`, and `num_grad_updates_per_policy`; policies are told all others
                with the time step, and of the updates their own number.
            policy_ids: tell only these.

        Raises:
            KeyError: without `timestep`.
        """
        told = dict(global_vars)
        updates = dict(told.pop("num_grad_updates_per_policy", {}))
        self.global_vars["timestep"] = told["timestep"]
        self.global_vars["num_grad_updates_per_policy"].update(updates)
        for policy_id in named(policy_ids, list(self.policy_map)):
            if self.roster.trains(policy_id):
                told["num_grad_updates"] = updates.get(policy_id)
                self.policy_map.handle(policy_id).on_global_var_update(dict(told))

    # -- learning -----------------------------------------------------------------------------

    def _trained_parts(self, samples: Any) -> dict[str, SampleBatch]:
        """Returns the parts of a batch whose policies are trained on it, readable, by id.

        Raises:
            UnknownPolicyError: if there is no policy of an id.
        """
        whole = samples.as_multi_agent()
        for policy_id in whole.policy_batches:
            self.policy_map.handle(policy_id)
        parts = whole.policy_batches.items()
        return {pid: _readable(part) for pid, part in parts if self.roster.trains(pid, whole)}

    def learn_on_batch(self, samples: Any) -> dict[str, Any]:
        """Updates each policy that is trained on its part of a batch; returns results by id.

        Raises:
            UnknownPolicyError: if there is no policy of an id; nothing is changed then.
        """
        parts = self._trained_parts(samples)
        return {pid: self.policy_map[pid].learn_on_batch(part) for pid, part in parts.items()}

    def compute_gradients(
        self, samples: Any, single_agent: bool | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns gradients of a batch and their statistics, which `apply_gradients` takes.

        Args:
            samples: the batch.
            single_agent: True: of the default policy alone, as a list with its info. Otherwise
                both are dicts by the ids of the policies that are trained, the info with
                `batch_count`.

        Raises:
            UsageError: if `single_agent` is True for a batch of other policies.
        """
        whole = samples.as_multi_agent()
        if single_agent:
            if set(whole.policy_batches) != {DEFAULT_POLICY_ID}:
                raise UsageError(
                    "single_agent=True needs a batch of the default policy alone, got one of "
                    f"{sorted(whole.policy_batches)}."
                )
            policy = self.policy_map[DEFAULT_POLICY_ID]
            part = _readable(whole.policy_batches[DEFAULT_POLICY_ID])
            gradients, info = policy.compute_gradients(part)
            return gradients, {**info, "batch_count": samples.count}
        found = {
            policy_id: self.policy_map[policy_id].compute_gradients(part)
            for policy_id, part in self._trained_parts(samples).items()
        }
        infos: dict[str, Any] = {policy_id: info for policy_id, (_, info) in found.items()}
        by_policy = {policy_id: gradients for policy_id, (gradients, _) in found.items()}
        return by_policy, {**infos, "batch_count": samples.count}

    def apply_gradients(self, grads: Any) -> None:
        """Applies gradients: a list to the default policy, a dict by the ids of policies.

        Those of policies that are not trained are left out.

        Raises:
            UnknownPolicyError: if there is no policy of an id; nothing is changed then.
        """
        by_policy = grads if isinstance(grads, Mapping) else {DEFAULT_POLICY_ID: grads}
        policies = {policy_id: self.policy_map[policy_id] for policy_id in by_policy}
        for policy_id, policy in policies.items():
            if self.roster.trains(policy_id):
                policy.apply_gradients(by_policy[policy_id])

    # -- the rest -----------------------------------------------------------------------------

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """Returns `func(env)` for each environment; `[]` without any."""
        return [func(env) for env in self._sub_environments()]

    def foreach_env_with_context(self, func: Callable[[Any, EnvContext], Any]) -> list[Any]:
        """Returns `func(env, env_context)` for each environment; `[]` without any."""
        context, envs = self._context(), self._sub_environments()
        return [
            func(env, context.copy_with_overrides(vector_index=i)) for i, env in enumerate(envs)
        ]

    def _sub_environments(self) -> list[Any]:
        return [] if self.environments is None else self.environments.get_sub_environments()

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns `func(self, *args, **kwargs)`."""
        return func(self, *args, **kwargs)

    def ping(self) -> str:
        """Returns "pong"."""
        return "pong"

    def lock(self) -> None:
        """Waits for this worker's own lock and takes it; nothing here takes it by itself."""
        self._own_lock.acquire()

    def unlock(self) -> None:
        """Gives this worker's own lock back.

        Raises:
            RuntimeError: if nobody has it.
        """
        self._own_lock.release()

    def trouble(self) -> str | None:
        """Says what an environment hangs in, None if none does; may be asked from any thread."""
        return None if self.watchdog is None else self.watchdog.trouble()

    def get_host(self) -> str:
        """Returns the computer's network name."""
        return socket.gethostname()

    def get_node_ip(self) -> str:
        """Returns an address under which other computers may reach this one."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # a test address (RFC 5737): nothing is sent
                return str(probe.getsockname()[0])
            except OSError:
                return "127.0.0.1"

    def find_free_port(self) -> int:
        """Returns a port of this computer that is free at this moment."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def setup_torch_data_parallel(
        self, url: str = "", world_rank: int = 0, world_size: int = 1, backend: str = ""
    ) -> NoReturn:
        """Raises a `UsageError`: policies of TensorFlow do not learn in a torch process group."""
        del url, world_rank, world_size, backend
        raise UsageError(
            "This worker does not support torch distributed: its policies are TensorFlow's. Let "
            "several workers sample with `rollouts(num_rollout_workers=...)`."
        )

    def creation_args(self) -> dict[str, Any]:
        """Returns the arguments that this worker was made with."""
        return dict(self._creation_args)

    def stop(self) -> None:
        """Closes the environments and the policies' sessions; may be called again."""
        self._stopped = True
        if hasattr(self, "roster"):
            for policy in self.policy_map.values():
                policy.close()
        if self.environments is not None:
            self.environments.close()
            self.environments = self.sampler = None
        if self.watchdog is not None:
            self.watchdog.close()


def _readable(batch: SampleBatch) -> SampleBatch:
    """Returns the batch with its observations unpacked, leaving the caller's as it is."""
    return batch.copy(shallow=True).decompress_if_needed()


def _as_config(config: Any, policy_class: Any) -> AlgorithmConfig:
    if isinstance(config, AlgorithmConfig):
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"config must be an AlgorithmConfig, a dict of settings or None, got {config!r}."
        )
    config_class = getattr(policy_class, "config_class", AlgorithmConfig)
    return config_class().update_from_dict(config or {})
