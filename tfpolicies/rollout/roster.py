"""Who plays: a worker's policies, which agents each of them acts for, and which of them learn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfpolicies.config.algorithm_config import AlgorithmConfig
from tfpolicies.config.multi_agent import (
    ToTrain,
    as_predicate,
    default_policy_mapping,
    require_mapping_fn,
)
from tfpolicies.config.policy_spec import PolicySpec, validate_policy_id
from tfpolicies.connectors import ActionConnectorPipeline, AgentConnectorPipeline
from tfpolicies.errors import (
    ConfigError,
    PolicyExistsError,
    SpaceError,
    UnknownPolicyError,
    UsageError,
)
from tfpolicies.policy.policy import Policy
from tfpolicies.policy.tf_policy import TFPolicy
from tfpolicies.policy_map.policy_map import PolicyMap
from tfpolicies.rollout.worker_environments import Connectors, connectors_of

MappingFn = Callable[..., str]


class Roster:
    """The policies of a worker, with the mapping function and who is trained.

    Every change is checked as a whole before anything happens.

    Args:
        config: of the worker.
        worker_index: of the worker.
        num_workers: of the run.
        on_create_policy: the callback, called with each policy that is made here; the policy's
            rows of connectors are there, if empty, for it to append to.

    Attributes:
        policy_map: the policies.
        specs: how each was made, by id; spaces are the environment's, before connectors.
        policy_mapping_fn: the function that names a policy for an agent.
        is_policy_to_train: `f(policy_id, batch=None)`; None where all are trained.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        worker_index: int,
        num_workers: int,
        on_create_policy: Callable[..., None],
    ) -> None:
        self.config = config
        self.specs: dict[str, PolicySpec] = {}
        self.policy_mapping_fn: MappingFn = config.policy_mapping_fn
        self.is_policy_to_train = as_predicate(config.policies_to_train)
        self._on_create_policy = on_create_policy
        self.policy_map = PolicyMap(
            worker_index,
            num_workers,
            config.policy_map_capacity,
            policy_states_are_swappable=config.policy_states_are_swappable,
        )

    def make(self, policy_id: str, spec: PolicySpec) -> Policy:
        """Makes a policy of a complete spec, puts it in the map, and tells the callback.

        The spec's spaces are the environment's. The policy has those behind its own connectors.

        Raises:
            ConfigError: if the spec names no class or no spaces.
            SpaceError: if the policy's connectors cannot be used for the spaces.
        """
        policy_class: Any = spec.policy_class
        if policy_class is None:
            raise ConfigError(
                f"There is no class for the policy {policy_id!r}. Name one in its PolicySpec, or "
                "give the worker a default_policy_class, for example PPOTF2Policy."
            )
        if spec.observation_space is None or spec.action_space is None:
            function: Any = self.policy_mapping_fn
            is_set = function is not default_policy_mapping
            told = getattr(function, "__qualname__", repr(function)) if is_set else "not set"
            raise ConfigError(
                f"There are no spaces for the policy {policy_id!r}: the environment's agents have "
                f"different ones, and policy_mapping_fn ({told}) gives none of them to it. Let it "
                f"return {policy_id!r} for an agent, by multi_agent(policy_mapping_fn=...) or "
                "--policy-mapping, or give observation_space and action_space with the policy."
            )
        config: AlgorithmConfig = spec.config if spec.config is not None else self.config
        if issubclass(policy_class, TFPolicy):
            settings = config.settings_for(policy_class.config_class)
            settings.pop("framework", None)  # it chooses the class of policies that name none
        else:
            settings = config.to_dict()
        if callable(settings["observation_filter"]):
            settings["observation_filter"] = "NoFilter"  # a connector of the policy filters
        spaces: Any = spec.observation_space, spec.action_space
        connectors = connectors_of(config)
        if connectors is not None:
            spaces = _connected(policy_id, connectors, spaces)
        self.policy_map.create_policy(policy_id, policy_class, spaces[0], spaces[1], None, settings)
        self.specs[policy_id] = spec
        policy = self.policy_map[policy_id]
        if connectors is not None:
            policy.agent_connectors, policy.action_connectors = connectors
        try:
            self.tell_created(policy_id, policy)
        except BaseException:
            self.remove(policy_id)
            raise
        return policy

    def tell_created(self, policy_id: str, policy: Policy) -> None:
        """Calls `on_create_policy`, which may put connectors into the rows of a policy."""
        if policy.agent_connectors is None:
            policy.agent_connectors = AgentConnectorPipeline()
            policy.action_connectors = ActionConnectorPipeline()
            policy.agent_connectors.connect(policy.observation_space)
            policy.action_connectors.connect(policy.action_space)
        self._on_create_policy(policy_id=policy_id, policy=policy)
        if not (policy.agent_connectors or policy.action_connectors):
            policy.agent_connectors = policy.action_connectors = None

    def add(
        self,
        policy_id: str,
        spec: PolicySpec | None,
        policy: Policy | None,
        *,
        policy_state: Mapping[str, Any] | None,
        policy_mapping_fn: Any,
        policies_to_train: Any,
    ) -> Policy:
        """Adds a policy, by its spec or itself; see `RolloutWorker.add_policy`."""
        require_mapping_fn(policy_mapping_fn)
        predicate = as_predicate(policies_to_train)
        if policy is None:
            policy = self.make(policy_id, spec or PolicySpec())
        else:
            state = policy.driver.state
            if state is not None and state.pager is not None:
                policy = policy.copy(policy_id)
            self.policy_map[policy_id] = policy
        try:
            if policy_state is not None:
                policy.set_state(policy_state)
            if policy_id not in self.specs:
                self._take_over(policy_id, policy)
        except Exception:
            self.remove(policy_id)
            raise
        self.change(policy_mapping_fn, predicate)
        return policy

    def _take_over(self, policy_id: str, policy: Policy) -> None:
        """Gives a policy that was made elsewhere the connectors of its config, if it has none."""
        given = policy.agent_connectors, policy.action_connectors
        connectors = connectors_of(policy.config) if given == (None, None) else None
        if connectors is not None:
            policy.agent_connectors, policy.action_connectors = connectors
            if not connectors[1].is_connected:
                connectors[1].connect(policy.action_space)
        agent = policy.agent_connectors
        seen = agent is None or not agent.is_connected
        observed = policy.observation_space if seen else agent.space  # type: ignore[union-attr]
        spec = PolicySpec(type(policy), observed, policy.action_space, policy.config)
        self.specs[policy_id] = spec

    def change(self, policy_mapping_fn: Any, predicate: ToTrain) -> None:
        """Takes over what is given, which was checked; None keeps what there is."""
        if policy_mapping_fn is not None:
            self.policy_mapping_fn = policy_mapping_fn
        if predicate is not None:
            self.is_policy_to_train = predicate

    def require_new(self, policy_id: str, policy_cls: Any, policy: Any, module_spec: Any) -> None:
        """Checks what `add_policy` is given.

        Raises:
            ConfigError: for an invalid id, or a `module_spec`.
            PolicyExistsError: if there is a policy of this id; also a KeyError.
            UsageError: unless exactly one of class and instance is given, and is a policy.
        """
        validate_policy_id(policy_id, error=True)
        if module_spec is not None:
            raise ConfigError(
                "module_spec must be None: there are no RLModules here; give `policy_cls` and "
                "`config={'model': ...}`."
            )
        if policy_id in self.policy_map:
            raise PolicyExistsError(
                f"Policy ID {policy_id!r} already exists in policy map. Remove it first, or choose "
                "another id."
            )
        if (policy_cls is None) == (policy is None):
            raise UsageError(
                "Only one of `policy_cls` and `policy` must be given to add_policy, got "
                f"policy_cls={policy_cls!r} and policy={policy!r}."
            )
        if policy is not None and not isinstance(policy, Policy):
            raise UsageError(
                f"policy must be a Policy, got {policy!r}; give a class as `policy_cls`."
            )

    def remove(self, policy_id: str, policy_mapping_fn: Any = None, to_train: Any = None) -> None:
        """Removes a policy; see `RolloutWorker.remove_policy`."""
        require_mapping_fn(policy_mapping_fn)
        predicate = as_predicate(to_train)
        if policy_id not in self.policy_map:
            raise UnknownPolicyError(
                f"Policy ID {policy_id!r} is not in policy map; it has {sorted(self.policy_map)}."
            )
        del self.policy_map[policy_id]
        self.specs.pop(policy_id, None)
        self.change(policy_mapping_fn, predicate)

    def trains(self, policy_id: str, batch: Any = None) -> bool:
        """Whether a policy is trained on a batch."""
        return self.is_policy_to_train is None or self.is_policy_to_train(policy_id, batch)

    def trained(self, batch: Any = None) -> set[str]:
        """Returns the ids of the policies that are trained on a batch."""
        return {policy_id for policy_id in self.policy_map if self.trains(policy_id, batch)}


def named(policies: Collection[str] | str | None, known: Collection[str]) -> list[str]:
    """Returns the ids of `known` that are named; all for None."""
    if isinstance(policies, str):
        policies = (policies,)
    return [policy_id for policy_id in known if policies is None or policy_id in policies]


def _connected(policy_id: str, connectors: Connectors, given: tuple[Any, Any]) -> tuple[Any, Any]:
    """Connects a policy's connectors to the environment's spaces; returns the policy's.

    Those that are connected already, because policies share them, stay as they are.
    """
    try:
        observed, done = (
            pipeline.output_space(space) if pipeline.is_connected else pipeline.connect(space)
            for pipeline, space in zip(connectors, given, strict=True)
        )
    except SpaceError as error:
        raise SpaceError(
            f"The connectors of policy {policy_id!r} cannot be used for the spaces {given}: "
            f"{error} Give the policy others, by `config={{'agent_connectors': [...]}}` in its "
            "PolicySpec."
        ) from error
    return observed, done
