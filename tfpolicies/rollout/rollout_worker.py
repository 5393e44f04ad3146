"""The rollout worker: environments, policies and a sampler, behind the documented methods."""

from __future__ import annotations

import socket
from collections.abc import Callable, Container, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from tfpolicies.batch.sample_batch import SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.callbacks import DefaultCallbacks
from tfpolicies.config.policy_spec import DEFAULT_POLICY_ID, PolicySpec
from tfpolicies.connectors import ActionConnectorPipeline, AgentConnectorPipeline, restore
from tfpolicies.envs.making import EnvContext, make_environments
from tfpolicies.envs.vector import Environments
from tfpolicies.errors import ConfigError, UnknownPolicyError, UsageError
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.rollout.connected import ConnectedEnvironments
from tfpolicies.rollout.episode import RolloutMetrics
from tfpolicies.rollout.single_agent_sampler import SingleAgentSampler

_EVALUATION_SEED = 10_000


class RolloutWorker:
    """Collects experience of a policy in environments.

    Args:
        env_creator: `f(env_context)` that gives an environment, called once for each of
            `num_envs_per_worker`; or None, to take `config.env`. See `make_environments` for what
            is accepted, vector environments and EnvPool included.
        validate_env: `f(env, env_context)`, raises to reject an environment.
        config: an `AlgorithmConfig` (frozen from here on), a dict of settings, or None for the
            policy class's defaults.
        worker_index: 0 for the worker of this process.
        num_workers: remote workers of the run; `config.num_rollout_workers` by default.
        recreated_worker: whether this worker replaces one that died.
        log_dir: accepted; kept in `creation_args()`.
        spaces: `{policy_id: (observation_space, action_space)}`, used instead of the environment's.
        default_policy_class: the class of policies that name none.
        dataset_shards: must be None.
        tf_session_creator: must be -1; a session creator belongs to a `PolicyMap`.

    Raises:
        ConfigError: for contradicting settings, or if there is no policy class.
        EnvError: for an environment that is unknown or unusable.

    """

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
        self._creation_args = {
            "env_creator": env_creator,
            "validate_env": validate_env,
            "config": config,
            "worker_index": worker_index,
            "num_workers": num_workers,
            "recreated_worker": recreated_worker,
            "log_dir": log_dir,
            "spaces": spaces,
            "default_policy_class": default_policy_class,
            "dataset_shards": dataset_shards,
            "tf_session_creator": tf_session_creator,
        }
        if tf_session_creator != -1:
            raise ConfigError(
                "tf_session_creator is no longer an argument of a worker; give a session_creator "
                "to a PolicyMap."
            )
        if dataset_shards is not None:
            raise ConfigError("dataset_shards must be None: workers sample from environments.")
        if not isinstance(default_policy_class, type) or not issubclass(
            default_policy_class, Policy
        ):
            raise ConfigError(
                f"default_policy_class must be a subclass of Policy, got {default_policy_class!r}; "
                "give the class to act with, for example PPOTF2Policy."
            )
        self.config = _as_config(config, default_policy_class)
        self.config.freeze()
        self.worker_index = worker_index
        self.num_workers = (
            self.config.num_rollout_workers if num_workers is None else int(num_workers)
        )
        self.recreated_worker = recreated_worker
        made = self.config["callbacks"]
        self.callbacks: DefaultCallbacks = DefaultCallbacks() if made is None else made()
        self.global_vars: dict[str, Any] = {"timestep": 0, "num_grad_updates_per_policy": {}}
        self._stopped = False
        self.flushes_filters = True
        self.environments: Environments | None = None
        source = env_creator if env_creator is not None else self.config.env
        if source is not None:
            self.environments = self._make_environments(source, validate_env)
        self.policy_dict = {DEFAULT_POLICY_ID: self._policy_spec(default_policy_class, spaces)}
        self.policy_map: dict[str, Policy] = {}
        for policy_id, spec in self.policy_dict.items():
            self.policy_map[policy_id] = self._make_policy(policy_id, spec)
        self.sampler = self._make_sampler()
        self.seeds_used = 0
        if self.sampler is not None:
            self.reset_episodes()

    # -- construction -------------------------------------------------------------------------

    def _make_environments(self, source: Any, validate_env: Any) -> Environments:

        def on_created(env: Any, env_context: EnvContext, index: int) -> None:
            if validate_env is not None:
                validate_env(env, env_context)
            self.callbacks.on_sub_environment_created(
                worker=self, sub_environment=env, env_context=env_context, env_index=index
            )

        made = make_environments(
            source,
            self.config.num_envs_per_worker,
            self._context(),
            on_created,
            checked=not self.config.disable_env_checking,
        )
        agent, action = self.config.agent_connectors, self.config.action_connectors
        if not agent and not action:
            return made
        return ConnectedEnvironments(
            made,
            AgentConnectorPipeline(restore(*state) for state in agent),
            ActionConnectorPipeline(restore(*state) for state in action),
        )

    def _context(self) -> EnvContext:
        return EnvContext(
            self.config.to_dict()["env_config"],
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            recreated_worker=self.recreated_worker,
        )

    def _policy_spec(self, policy_class: type[Policy], spaces: Any) -> PolicySpec:
        given = (spaces or {}).get(DEFAULT_POLICY_ID) or (spaces or {}).get("__env__")
        envs, config = self.environments, self.config
        found = {}
        for i, name in enumerate(("observation_space", "action_space")):
            space = given[i] if given is not None else None
            if space is None and envs is not None:
                space = getattr(envs, name)
            if space is None:
                space = config[name]
            if space is None:
                raise ConfigError(
                    f"{name} not provided for policy {DEFAULT_POLICY_ID!r}: give an environment, "
                    f"spaces={{...}}, or config.environment({name}=...)."
                )
            found[name] = space
        return PolicySpec(policy_class, found["observation_space"], found["action_space"], {})

    def _make_policy(self, policy_id: str, spec: PolicySpec) -> Policy:
        policy_class: Any = spec.policy_class
        if issubclass(policy_class, TFPolicy):
            settings = self.config.settings_for(policy_class.config_class)
            settings |= {"__policy_id": policy_id, "worker_index": self.worker_index}
            settings.pop("framework", None)  # it chooses the class of policies that name none
        else:
            settings = self.config.to_dict()
        settings.update(spec.config or {})
        policy = policy_class(spec.observation_space, spec.action_space, settings)
        if isinstance(self.environments, ConnectedEnvironments):
            policy.agent_connectors = self.environments.agent
            policy.action_connectors = self.environments.action
        self.callbacks.on_create_policy(policy_id=policy_id, policy=policy)
        return policy

    def _make_sampler(self) -> SingleAgentSampler | None:
        if self.environments is None:
            return None
        config = self.config
        return SingleAgentSampler(
            self.environments,
            self.get_policy,
            fragment_length=config.fragment_length(self.environments.num_envs),
            complete_episodes=config.batch_mode == "complete_episodes",
            clip_rewards=config.clip_rewards,
            rng=np.random.default_rng(self._seed("episodes")),
            callbacks=self.callbacks,
            worker=self,
        )

    def _seed(self, purpose: str) -> Any:
        if self.config.seed is None:
            return None
        return [self.config.seed, self.worker_index, sum(purpose.encode())]

    # -- sampling -----------------------------------------------------------------------------

    @property
    def env(self) -> Any:
        """The first environment, or None."""
        found = [] if self.environments is None else self.environments.instances()
        return found[0] if found else None

    def reset_episodes(self) -> None:
        """Starts new episodes in all environments; rows not handed out yet are dropped."""
        self._require_sampler().reset(self.next_seeds())

    def restore_sampling(
        self,
        seeds_used: int,
        rng: np.random.Generator,
        global_vars: Mapping[str, Any],
        sampler_state: Mapping[str, Any] | None,
    ) -> None:
        """Continues from a checkpoint: the running episodes, or new ones if it has none."""
        sampler = self._require_sampler()
        self.seeds_used = seeds_used
        self.global_vars = dict(global_vars)
        sampler.rng = rng
        if sampler_state is None:
            self.reset_episodes()
        else:
            sampler.set_state(sampler_state)

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

    def _require_sampler(self) -> SingleAgentSampler:
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

    def sample(self) -> SampleBatch:
        """Returns a batch of fresh, postprocessed experience; later calls continue the episodes.

        With `batch_mode="truncate_episodes"` it has `rollout_fragment_length` rows of each
        environment, with `"complete_episodes"` whole episodes of at least that many rows in all.

        Raises:
            UsageError: if the worker has no environment, or was stopped.
        """
        sampler = self._require_sampler()
        if self.flushes_filters:
            self.flush_filters()
        batch = sampler.sample()
        self.callbacks.on_sample_end(worker=self, samples=batch)
        if self.config.compress_observations:
            batch.compress(bulk=self.config.compress_observations == "bulk")
        return batch

    def flush_filters(self) -> None:
        """Lets the statistics of what was sampled take effect in filters.

        A worker of its own does it before each sample; an algorithm once per training iteration, so
        that what was acted on and what is learned from are normalised alike.
        """
        for policy in self.policy_map.values():
            policy.flush_filters()

    def sample_with_count(self) -> tuple[SampleBatch, int]:
        """Returns `(batch, rows)`."""
        batch = self.sample()
        return batch, batch.count

    def get_metrics(self) -> list[RolloutMetrics]:
        """Returns the metrics of episodes that ended since the last call."""
        if self.sampler is None:
            return []
        metrics, self.sampler.metrics = self.sampler.metrics, []
        return metrics

    # -- policies -----------------------------------------------------------------------------

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
        return func(self._require_policy(policy_id), **kwargs)

    def _require_policy(self, policy_id: str) -> Policy:
        if policy_id not in self.policy_map:
            raise UnknownPolicyError(
                f"No policy {policy_id!r} in this worker; it has {sorted(self.policy_map)}."
            )
        return self.policy_map[policy_id]

    def foreach_policy(self, func: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Returns `func(policy, policy_id, **kwargs)` for each policy."""
        return [func(policy, pid, **kwargs) for pid, policy in self.policy_map.items()]

    def get_weights(self, policies: Container[str] | None = None) -> dict[str, Any]:
        """Returns the weights by policy id, of all policies or of the one or those named."""
        if isinstance(policies, str):
            policies = (policies,)
        return {
            pid: policy.get_weights()
            for pid, policy in self.policy_map.items()
            if policies is None or pid in policies
        }

    def set_weights(
        self, weights: Mapping[str, Any], global_vars: Mapping[str, Any] | None = None
    ) -> None:
        """Sets the weights of the given policies, then the global variables.

        Raises:
            UnknownPolicyError: if there is no policy of an id; nothing is changed then.
        """
        policies = {policy_id: self._require_policy(policy_id) for policy_id in weights}
        for policy_id, policy in policies.items():
            policy.set_weights(weights[policy_id])
        if global_vars is not None:
            self.set_global_vars(global_vars)

    def learn_on_batch(self, samples: Any) -> dict[str, Any]:
        """Updates each policy on its part of a batch; returns results by policy id."""
        parts = samples.as_multi_agent().policy_batches
        policies = {policy_id: self._require_policy(policy_id) for policy_id in parts}
        return {
            policy_id: policy.learn_on_batch(_readable(parts[policy_id]))
            for policy_id, policy in policies.items()
        }

    def compute_gradients(self, samples: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the gradients of the default policy on a batch, and their statistics."""
        policy: Any = self._require_policy(DEFAULT_POLICY_ID)
        gradients, info = policy.compute_gradients(_readable(samples))
        return gradients, {**info, "batch_count": samples.count}

    def apply_gradients(self, grads: Any) -> None:
        """Applies gradients to the default policy, or by policy id."""
        by_policy = grads if isinstance(grads, Mapping) else {DEFAULT_POLICY_ID: grads}
        policies: dict[str, Any] = {pid: self._require_policy(pid) for pid in by_policy}
        for policy_id, policy in policies.items():
            policy.apply_gradients(by_policy[policy_id])

    def get_global_vars(self) -> dict[str, Any]:
        """Returns the counters of the run: `timestep`, `num_grad_updates_per_policy`."""
        return self.global_vars

    def set_global_vars(self, global_vars: Mapping[str, Any]) -> None:
        """Takes over the counters of the run and tells the policies.

        Raises:
            KeyError: without `timestep`.
        """
        timestep = global_vars["timestep"]
        updates = dict(global_vars.get("num_grad_updates_per_policy", {}))
        self.global_vars["timestep"] = timestep
        self.global_vars["num_grad_updates_per_policy"].update(updates)
        for policy_id, policy in self.policy_map.items():
            given = {"timestep": timestep, "num_grad_updates": updates.get(policy_id)}
            policy.on_global_var_update(given)

    # -- the rest -----------------------------------------------------------------------------

    def foreach_env(self, func: Callable[[Any], Any]) -> list[Any]:
        """Returns `func(env)` for each environment; `[]` without any."""
        return [] if self.environments is None else list(map(func, self.environments.instances()))

    def foreach_env_with_context(self, func: Callable[[Any, EnvContext], Any]) -> list[Any]:
        """Returns `func(env, env_context)` for each environment; `[]` without any."""
        context = self._context()
        envs = [] if self.environments is None else self.environments.instances()
        return [func(env, context.copy_with(i)) for i, env in enumerate(envs)]

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns `func(self, *args, **kwargs)`."""
        return func(self, *args, **kwargs)

    def ping(self) -> str:
        """Returns "pong"."""
        return "pong"

    def get_host(self) -> str:
        """Returns the computer's network name."""
        return socket.gethostname()

    def creation_args(self) -> dict[str, Any]:
        """Returns the arguments that this worker was made with."""
        return dict(self._creation_args)

    def stop(self) -> None:
        """Closes the environments and the policies' sessions; may be called again."""
        self._stopped = True
        for policy in self.policy_map.values():
            policy.close()
        if self.environments is not None:
            self.environments.close()
            self.environments = self.sampler = None


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
