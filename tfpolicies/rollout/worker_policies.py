"""The policies of a worker, the policy mapping function, and which policies are trained."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

from tfpolicies.batch.sample_batch import MultiAgentBatch, SampleBatch
from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.multi_agent import (
    MappingFn,
    TrainPredicate,
    as_predicate,
    default_policy_mapping,
    make_policy_specs,
    require_mapping_fn,
)
from tfpolicies.config.multi_agent_setup import require_policy_settings
from tfpolicies.config.policy_spec import PolicySpec, validate_policy_id
from tfpolicies.connectors import ActionConnectorPipeline, AgentConnectorPipeline
from tfpolicies.envs.env_checker import preserve_global_rngs
from tfpolicies.envs.multi_agent_adapter import MultiAgentEnvAdapter
from tfpolicies.errors import ConfigError, SpaceError, UnknownPolicyError, UsageError, WeightsError
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.policy_map.policy_map import PolicyMap
from tfpolicies.rollout.base_worker import BaseWorker
from tfpolicies.rollout.policy_changes import (
    MappingAndTrainable,
    PolicyAddition,
    PolicyTransaction,
    require_new_id,
)
from tfpolicies.rollout.worker_environments import ConnectorPair, make_connectors

_MAPPING_CALLS = 16  # calls of a mapping function per agent, to find the policies it may return


class WorkerPolicies:
    """The policies of a worker, the policy mapping function, and which policies are trained.

    Each change validates all arguments before it changes anything.

    Args:
        worker: a `RolloutWorker`; its callback `on_create_policy` is called for each policy that
            is created here. The policy's pipelines exist at that time, if empty, so that the
            callback can append connectors.

    Attributes:
        policy_map: the policies.
        specs: the `PolicySpec` of each policy by id; spaces are the environment's, before
            connectors.
        policy_mapping_fn: the function that returns the policy id of an agent.
        is_policy_to_train: `f(policy_id, batch=None)`; None if all are trained.
    """

    def __init__(self, worker: BaseWorker) -> None:
        config: AlgorithmConfig = worker.config
        self.config = config
        self.specs: dict[str, PolicySpec] = {}
        self.policy_mapping_fn: MappingFn = config.policy_mapping_fn
        self.is_policy_to_train = as_predicate(config.policies_to_train)
        self._worker = worker
        self._on_create_policy = worker.callbacks.on_create_policy
        self.policy_map = PolicyMap(
            worker.worker_index,
            worker.num_workers,
            config.policy_map_capacity,
            policy_states_are_swappable=config.policy_states_are_swappable,
        )

    @property
    def global_vars(self) -> dict[str, Any]:
        """The counters of the run, stored in the worker."""
        counters: dict[str, Any] = self._worker.global_vars
        return counters

    # -- making -------------------------------------------------------------------------------

    def complete_specs(
        self,
        policies: Mapping[str, PolicySpec] | None,
        policy_mapping_fn: MappingFn | None = None,
    ) -> dict[str, PolicySpec]:
        """Returns specs with class, spaces and complete configs.

        Spaces are the environment's, before connectors.

        Args:
            policies: specs by policy id; None for those of the config.
            policy_mapping_fn: the new mapping function, which tells whose spaces they have; None
                for that of the config.

        Raises:
            ConfigError: if the spaces of a policy are unknown.
        """
        worker = self._worker
        env, spaces, envs = None, dict(worker.spaces), worker.environments
        if isinstance(envs, MultiAgentEnvAdapter):
            env = envs.get_sub_environments()[0]
        elif envs is not None:
            spaces.setdefault("__env__", (envs.observation_space, envs.action_space))
        specs, _ = self.config.get_multi_agent_setup(
            policies=policies,
            env=env,
            spaces=spaces or None,
            default_policy_class=worker.default_policy_class,
            policy_mapping_fn=policy_mapping_fn,
        )
        return specs

    def make_policy(
        self, policy_id: str, spec: PolicySpec, policy_mapping_fn: MappingFn | None = None
    ) -> Policy:
        """Creates a policy from a complete spec, adds it to the map, and notifies the callback.

        The spec's spaces are the environment's; the policy gets the spaces after its connectors.

        Raises:
            ConfigError: if the spec has no class or no spaces.
            SpaceError: if the policy's connectors cannot be used for the spaces.
        """
        policy_class: Any = spec.policy_class
        if policy_class is None:
            raise ConfigError(
                f"There is no class for the policy {policy_id!r}. Set one in its PolicySpec, or "
                "give the worker a default_policy_class, for example PPOTF2Policy."
            )
        spaces = self._require_spaces(policy_id, spec, policy_mapping_fn)
        config: AlgorithmConfig = spec.config if spec.config is not None else self.config
        settings = _make_policy_settings(config, policy_class)
        connectors = make_connectors(config)
        if connectors is not None:
            spaces = _connect_pipelines(policy_id, connectors, spaces)
        self.policy_map.create_policy(policy_id, policy_class, spaces[0], spaces[1], None, settings)
        self.specs[policy_id] = spec
        policy = self.policy_map[policy_id]
        if connectors is not None:
            policy.agent_connectors, policy.action_connectors = connectors
        self._notify_created(policy_id, policy)
        return policy

    def _require_spaces(
        self, policy_id: str, spec: PolicySpec, policy_mapping_fn: MappingFn | None
    ) -> tuple[Any, Any]:
        if spec.observation_space is None or spec.action_space is None:
            function: Any = policy_mapping_fn or self.policy_mapping_fn
            has_function = function is not default_policy_mapping
            name = getattr(function, "__qualname__", repr(function)) if has_function else "not set"
            raise ConfigError(
                f"There are no spaces for the policy {policy_id!r}: the environment's agents have "
                f"different ones, and policy_mapping_fn ({name}) maps none of them to it. Let it "
                f"return {policy_id!r} for an agent, by multi_agent(policy_mapping_fn=...) or "
                "--policy-mapping, or give observation_space and action_space with the policy."
            )
        return spec.observation_space, spec.action_space

    def _notify_created(self, policy_id: str, policy: Policy) -> None:
        """Calls `on_create_policy`, which may append connectors to the policy's pipelines."""
        if policy.agent_connectors is None:
            policy.agent_connectors = AgentConnectorPipeline()
            policy.action_connectors = ActionConnectorPipeline()
            policy.agent_connectors.connect(policy.observation_space)
            policy.action_connectors.connect(policy.action_space)
        self._on_create_policy(policy_id=policy_id, policy=policy)
        if not (policy.agent_connectors or policy.action_connectors):
            policy.agent_connectors = policy.action_connectors = None

    def make_from_state(self, policy_id: str, state: Mapping[str, Any]) -> Policy:
        """Creates a policy of the class, spaces and config in a policy's state.

        Raises:
            ConfigError: for an invalid id.
            WeightsError: if the state has no spec.
        """
        validate_policy_id(policy_id, error=True)
        spec = state.get("policy_spec") if isinstance(state, Mapping) else None
        if spec is None:
            raise WeightsError(
                f"There is no policy {policy_id!r} here, and its state has no 'policy_spec' to "
                "create it from. Add the policy first, or pass the result of `get_state()`."
            )
        spaces = spec["observation_space"], spec["action_space"]
        worker_settings = {"__policy_id": policy_id, "worker_index": self._worker.worker_index}
        policy: Policy = spec["policy_class"](*spaces, {**spec["config"], **worker_settings})
        return policy

    # -- adding and removing ------------------------------------------------------------------

    def add(self, addition: PolicyAddition) -> Policy:
        """Adds a policy, or changes nothing; see `RolloutWorker.add_policy`.

        Raises:
            PolicyExistsError: if there is a policy of its id.
            Exception: whatever making it raises.
        """
        with PolicyTransaction() as transaction:
            return self.add_in_transaction(transaction, addition)

    def add_in_transaction(
        self, transaction: PolicyTransaction, addition: PolicyAddition
    ) -> Policy:
        """Adds a policy as part of a transaction.

        Raises:
            PolicyExistsError: if there is a policy of its id.
        """
        require_new_id(addition.policy_id, self.policy_map)
        return transaction.add(self, addition, self.mapping_and_trainable)

    def apply(self, addition: PolicyAddition) -> Policy:
        """Applies an addition; after an error call `revert`.

        If the addition has only a state and the policy exists already, the policy gets that state.
        """
        policy_id, state = addition.policy_id, addition.policy_state
        if addition.spec is not None:
            spec = make_policy_specs({policy_id: addition.spec})[policy_id]
            require_policy_settings(self.config, policy_id, spec, None)
            specs = self.complete_specs({policy_id: spec}, addition.policy_mapping_fn)
            policy = self.make_policy(policy_id, specs[policy_id], addition.policy_mapping_fn)
        else:
            policy = self._put_policy(addition)
        if state is not None:
            policy.set_state(state)
        if policy_id not in self.specs:
            self._register(policy_id, policy)
        self.update_mapping_and_trainable(addition.policy_mapping_fn, addition.is_policy_to_train)
        timestep = self.global_vars["timestep"]
        if timestep and addition.spec is not None and state is None:
            # Its schedules start at the run's current time step.
            self.set_global_vars({"timestep": timestep}, policy_ids=[policy_id])
        if addition.spec is None and addition.calls_on_create:
            self._notify_restored(policy_id, policy)
        return policy

    def revert(self, policy_id: str, previous: MappingAndTrainable) -> None:
        """Removes a policy if it exists, and restores the mapping and the trained policies.

        Does not check whether the mapping still uses the policy.
        """
        if policy_id in self.policy_map:
            self.remove(policy_id)
        self.set_mapping_and_trainable(previous)

    def _put_policy(self, addition: PolicyAddition) -> Policy:
        """Adds an existing policy, or one created from its state, to the map."""
        policy_id, policy = addition.policy_id, addition.policy
        if policy is None:
            if policy_id in self.policy_map:
                return self.policy_map[policy_id]
            policy_state: Any = addition.policy_state
            policy = self.make_from_state(policy_id, policy_state)
            policy.driver.check_state(policy_state)
        state = policy.driver.state
        if state is not None and state.loader is not None:
            policy = policy.copy(policy_id)
        self.policy_map[policy_id] = policy
        return policy

    def _register(self, policy_id: str, policy: Policy) -> None:
        """Records the spec of a policy created elsewhere; gives it connectors if it has none."""
        pipelines = policy.agent_connectors, policy.action_connectors
        connectors = make_connectors(policy.config) if pipelines == (None, None) else None
        if connectors is not None:
            policy.agent_connectors, policy.action_connectors = connectors
            if not connectors[1].is_connected:
                connectors[1].connect(policy.action_space)
        agent_pipeline = policy.agent_connectors
        observation_space = policy.observation_space
        if agent_pipeline is not None and agent_pipeline.is_connected:
            observation_space = agent_pipeline.space
        self.specs[policy_id] = PolicySpec(
            type(policy), observation_space, policy.action_space, policy.config
        )

    def _notify_restored(self, policy_id: str, policy: Policy) -> None:
        """Calls `on_create_policy` for a policy that keeps the connectors of its state."""
        connectors = policy.agent_connectors, policy.action_connectors
        policy.agent_connectors = policy.action_connectors = None
        self._notify_created(policy_id, policy)
        if connectors != (None, None):
            policy.agent_connectors, policy.action_connectors = connectors

    def remove(
        self,
        policy_id: str,
        policy_mapping_fn: MappingFn | None = None,
        policies_to_train: Collection[str] | TrainPredicate = None,
    ) -> None:
        """Removes a policy without checking whether the mapping still uses it.

        Args:
            policy_id: of the policy.
            policy_mapping_fn: the new mapping function; None keeps the present one.
            policies_to_train: ids, or `f(policy_id, batch=None)`; None keeps the present ones.
        """
        require_mapping_fn(policy_mapping_fn)
        predicate = as_predicate(policies_to_train)
        if policy_id not in self.policy_map:
            raise UnknownPolicyError(
                f"Policy ID {policy_id!r} is not in policy map; it has {sorted(self.policy_map)}."
            )
        del self.policy_map[policy_id]
        self.specs.pop(policy_id, None)
        self.global_vars["num_grad_updates_per_policy"].pop(policy_id, None)
        self.update_mapping_and_trainable(policy_mapping_fn, predicate)

    def require_unmapped(self, policy_id: str, policy_mapping_fn: MappingFn | None) -> None:
        """Checks that the mapping function returns a policy for none of the agents.

        Calls the function several times, since it may draw policies at random, for each agent that
        the environment names, with the running episodes or with None. Errors of the function are
        ignored. The generators of `random` and NumPy stay as they are.

        Args:
            policy_id: of the policy.
            policy_mapping_fn: the function; None for the present one.

        Raises:
            ConfigError: if it is not a function.
            UsageError: if it returns the policy for an agent.
        """
        require_mapping_fn(policy_mapping_fn)
        mapping, worker = policy_mapping_fn or self.policy_mapping_fn, self._worker
        if policy_id not in self.policy_map or worker.sampler is None:
            return
        agents = sorted(getattr(worker.env, "get_agent_ids", set)(), key=str)
        episodes = worker.sampler.running_episodes or (None,)
        for agent, episode in itertools.product(agents, episodes):
            try:
                with preserve_global_rngs():
                    mapped_ids = {
                        mapping(agent, episode, worker=worker) for _ in range(_MAPPING_CALLS)
                    }
            except Exception:
                continue
            if policy_id in mapped_ids:
                name = getattr(mapping, "__qualname__", repr(mapping))
                raise UsageError(
                    f"Policy {policy_id!r} cannot be removed: policy_mapping_fn ({name:.200}) "
                    f"maps agent {agent!r} to it. Give another mapping in the same call, "
                    f"remove_policy({policy_id!r}, policy_mapping_fn=...). To replace the policy, "
                    f"then call add_policy({policy_id!r}, ..., policy_mapping_fn=...), where the "
                    "mapping may be the old one; or overwrite it with a copy of another one: "
                    f"get_policy({policy_id!r}).set_state(get_policy(OTHER).get_state())."
                )

    # -- mapping and trained policies ---------------------------------------------------------

    @property
    def mapping_and_trainable(self) -> MappingAndTrainable:
        """The mapping function and the predicate of trained policies."""
        return MappingAndTrainable(self.policy_mapping_fn, self.is_policy_to_train)

    def set_mapping_and_trainable(self, roles: MappingAndTrainable) -> None:
        """Sets the mapping function and which policies are trained.

        Args:
            roles: a `policy_mapping_fn` of None keeps the present one; `policies_to_train` is a
                function, or None for all.

        Raises:
            ConfigError: if the mapping is not a function; nothing is changed then.
        """
        require_mapping_fn(roles.policy_mapping_fn)
        self.update_mapping_and_trainable(roles.policy_mapping_fn, None)
        self.is_policy_to_train = roles.policies_to_train

    def update_mapping_and_trainable(
        self, policy_mapping_fn: MappingFn | None, predicate: TrainPredicate
    ) -> None:
        """Sets a validated mapping and predicate; None keeps the present one."""
        if policy_mapping_fn is not None:
            self.policy_mapping_fn = policy_mapping_fn
        if predicate is not None:
            self.is_policy_to_train = predicate

    def is_trained(
        self, policy_id: str, batch: SampleBatch | MultiAgentBatch | None = None
    ) -> bool:
        """Returns whether a policy is trained on a batch."""
        return self.is_policy_to_train is None or self.is_policy_to_train(policy_id, batch)

    # -- counters -----------------------------------------------------------------------------

    def set_global_vars(
        self, global_vars: Mapping[str, Any], policy_ids: Collection[str] | None = None
    ) -> None:
        """Sets the counters of the run; see `RolloutWorker.set_global_vars`."""
        counters = dict(global_vars)
        updates = dict(counters.pop("num_grad_updates_per_policy", {}))
        self.global_vars["timestep"] = counters["timestep"]
        self.global_vars["num_grad_updates_per_policy"].update(updates)
        for policy_id in select_ids(policy_ids, list(self.policy_map)):
            if self.is_trained(policy_id):
                counters["num_grad_updates"] = updates.get(policy_id)
                self.policy_map.get_handle(policy_id).on_global_var_update(dict(counters))


def select_ids(policies: Collection[str] | str | None, policy_ids: Collection[str]) -> list[str]:
    """Returns the ids in `policy_ids` that `policies` names; all for None."""
    if isinstance(policies, str):
        policies = (policies,)
    return [policy_id for policy_id in policy_ids if policies is None or policy_id in policies]


def _make_policy_settings(config: AlgorithmConfig, policy_class: type) -> dict[str, Any]:
    if issubclass(policy_class, TFPolicy):
        settings = config.settings_for(policy_class.config_class)
        settings.pop("framework", None)  # only chooses the default policy class
    else:
        settings = config.to_dict()
    if callable(settings["observation_filter"]):
        settings["observation_filter"] = "NoFilter"  # a connector filters instead
    return settings


def _connect_pipelines(
    policy_id: str, connectors: ConnectorPair, spaces: tuple[Any, Any]
) -> tuple[Any, Any]:
    """Connects a policy's connectors to the environment's spaces; returns the policy's spaces.

    Pipelines that are connected already, because policies share them, stay as they are.
    """
    try:
        observation_space, action_space = (
            pipeline.output_space(space) if pipeline.is_connected else pipeline.connect(space)
            for pipeline, space in zip(connectors, spaces, strict=True)
        )
    except SpaceError as error:
        raise SpaceError(
            f"The connectors of policy {policy_id!r} cannot be used for the spaces {spaces}: "
            f"{error} Give the policy other connectors, by `config={{'agent_connectors': [...]}}` "
            "in its PolicySpec."
        ) from error
    return observation_space, action_space
